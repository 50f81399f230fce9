"""Compare emulated points with live ones of all ranks on the same GPUs, after measuring the communication between them.

    python -m tools.emulation_live -o FOLDER [--ranks 2] [--model deepseek-v3] [--more "--weights-dtype bf16"] [--compare]
    python -m tools.emulation_live --live RUN... --emulated RUN...

The first form needs as many GPUs as ranks. FOLDER gets the communication benches, the machine file, a run of each kind and check.md.
Live and emulated runs alternate, layout by layout. With --compare it only writes check.md from the runs in FOLDER. The second form
compares measured runs, needs no GPU and writes no file. The limit of the error is 5 % of the step time.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dcpbench.bench.cases import COLLECTIVES, REGISTERED_COLLECTIVES
from dcpbench.plan.grid import format_point_load
from dcpbench.points.names import EXCHANGES
from dcpbench.records.runs import read_run
from dcpbench.reports.kernel_gaps import UNEQUAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

MAX_ERROR = 0.05
CONCURRENCIES = "1,2,4,8,16,32,64,128,256,512"
LIVE, EMULATED = "live", "emulated"
MACHINE_FILE = "machine.toml"  # file in the folder that `bench calibrate` writes


class Command(NamedTuple):
    """Hold the arguments of one `dcpbench` command."""

    arguments: list[str]
    only_one: bool = False  # True if the command sees only the first GPU


def _run_command(command: Command) -> None:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if command.only_one else {})
    sys.stdout.write(f"$ dcpbench {shlex.join(command.arguments)}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "dcpbench.cli", *command.arguments], check=False, env=environment)


def list_bench_commands(folder: Path, ranks: int) -> list[Command]:
    """Return the communication benches between this many GPUs, and the command that makes the machine file from their results."""
    folders = {bench: str(folder / f"{bench}-{ranks}") for bench in ("collectives", "exchange")}
    variants = ",".join([*COLLECTIVES, *REGISTERED_COLLECTIVES])
    options = {
        "collectives": ["--variant", variants],
        "exchange": ["--heads", "64,128", "--variant", ",".join(EXCHANGES)],
    }
    benches = [
        Command(
            [
                "bench",
                bench,
                "--ranks",
                str(ranks),
                "--requests",
                CONCURRENCIES,
                "--seconds",
                "0.1",
                *options[bench],
                "-o",
                output,
                "--force",
            ]
        )
        for bench, output in folders.items()
    ]
    calibrate = ["bench", "calibrate", *folders.values(), "-o", str(folder / MACHINE_FILE), "--force"]
    return [*benches, Command(calibrate)]


def list_layouts(ranks: int, exchange: str) -> dict[str, list[str]]:
    """Return the options of the compared layouts by name: `dcp` without and with DCP, `dp` with attention DP."""
    return {"dcp": ["--dcp", f"1,{ranks}", "--exchange", exchange], "dp": ["--dp", str(ranks), "--dcp", "1"]}


def list_sweeps(
    folder: Path, machine: Path | str, model: str, ranks: int, name: str, options: list[str]
) -> list[Command]:
    """Return the live and the emulated sweep of one entry of `list_layouts`; `options` are the layout's options and the load."""
    common = ["sweep", "--model", model, "--tp", str(ranks), *options, "--no-baseline"]
    return [
        Command([*common, "-o", str(folder / f"{LIVE}-{model}-{name}"), "--resume"]),
        Command(
            [*common, "--emulate", str(machine), "-o", str(folder / f"{EMULATED}-{model}-{name}"), "--resume"],
            only_one=True,
        ),
    ]


def measure(folder: Path, args: argparse.Namespace) -> None:
    """Measure communication, then every layout live and emulated."""
    machine = folder / MACHINE_FILE
    if not machine.exists():
        for command in list_bench_commands(folder, args.ranks):
            _run_command(command)
    load = ["--concurrency", args.concurrency, "--context", args.context, "--seconds", args.seconds]
    for model in args.model.split(","):
        for name, options in list_layouts(args.ranks, args.exchange).items():
            for command in list_sweeps(
                folder, machine, model, args.ranks, name, [*options, *shlex.split(args.more), *load]
            ):
                _run_command(command)


def _make_key(point: Point) -> Point:
    """Return the point without `emulate`, as a key that live and emulated points share."""
    return msgspec.structs.replace(point, emulate=None)


def read_measured(folders: Iterable[Path]) -> list[Record]:
    """Return the successful decode records of these runs."""
    records = [r for folder in folders if (folder / "records.jsonl").exists() for r in read_run(folder).records]
    return [r for r in records if r.outcome == "ok" and r.metrics is not None]


def pair_points(live: Iterable[Record], emulated: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    """Yield the live and the emulated record of each point that has both."""
    by_key = {_make_key(r.point): r for r in emulated}
    for key, record in {_make_key(r.point): r for r in live}.items():
        if key in by_key:
            yield record, by_key[key]


def format_point(point: Point) -> str:
    """Format a point for the table, such as `deepseek-v3 tp2·dcp2 ep2 symm fp8/fp8, 8 × 4,000`."""
    precision = f"{point.weights_precision}/{point.kv_precision}"
    parts = (point.model, point.layout_name, point.ep_label, point.format_exchange_label(), precision)
    return f"{' '.join(filter(None, parts))}, {format_point_load(point)}"


COLUMNS = (
    "point",
    "live ms",
    "emulated ms",
    "error",
    "gaps between kernels, µs",
    "phases with an error above 5 % of the phase and 0.5 % of the step",
)


class Pair(NamedTuple):
    """Hold the live and the emulated record of a point."""

    live: Record
    emulated: Record

    @property
    def error(self) -> float:
        """Return emulated / live - 1 of the median step time."""
        assert self.live.metrics is not None
        assert self.emulated.metrics is not None
        return self.emulated.metrics.step_ms.median / self.live.metrics.step_ms.median - 1

    @property
    def gap_share(self) -> float:
        """Return the difference of the gaps between kernels, emulated minus live, as a share of the live step.

        Gaps depend on what a process has run before (docs/methodology.md), not on the layout. 0 if a record has no profile.
        """
        live, emulated = self.live.phases, self.emulated.phases
        if live is None or emulated is None:
            return 0.0
        return (emulated.idle_us / emulated.kernels - live.idle_us / live.kernels) * live.kernels / live.step_us


def format_table(pairs: Iterable[tuple[Record, Record]]) -> list[str]:
    """Format the pairs as a table, and count those within the limit, separately for pairs with unequal gaps between kernels."""
    rows = [Pair(*pair) for pair in pairs]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|---|", *map(_format_row, rows), ""]
    equal = [row for row in rows if abs(row.gap_share) <= UNEQUAL]
    lines.append(f"{_format_within(equal)}.")
    if unequal := [row for row in rows if abs(row.gap_share) > UNEQUAL]:
        shares = [row.gap_share for row in unequal]
        lines.append(
            f"With gaps between kernels that differ by more than {UNEQUAL:.0%} of a step ({min(shares):+.1%} to {max(shares):+.1%}): "
            f"{_format_within(unequal)}."
        )
    return lines


def _format_row(row: Pair) -> str:
    live, emulated = row.live, row.emulated
    assert live.metrics is not None
    assert emulated.metrics is not None
    gaps = ""
    if live.phases and emulated.phases:
        gaps = " → ".join(f"{p.idle_us / p.kernels:.2f}" for p in (live.phases, emulated.phases))
    cells = (
        format_point(live.point),
        f"{live.metrics.step_ms.median:.2f}",
        f"{emulated.metrics.step_ms.median:.2f}",
        f"{row.error:+.1%}",
        gaps,
        ", ".join(_list_wrong_phases(live, emulated)),
    )
    return f"| {' | '.join(cells)} |"


def _format_within(rows: list[Pair]) -> str:
    """Format the number of pairs within the limit, such as `24 of 24 within 5%, off by -1.3% to +1.6%`."""
    errors = [row.error for row in rows]
    text = f"{sum(abs(e) <= MAX_ERROR for e in errors)} of {len(errors)} within {MAX_ERROR:.0%}"
    return f"{text}, off by {min(errors):+.1%} to {max(errors):+.1%}" if errors else text


def _list_wrong_phases(live: Record, emulated: Record) -> Iterator[str]:
    if live.phases is None or emulated.phases is None:
        return
    step = live.phases.step_us
    for name, us in live.phases.phase_us.items():
        emulated_us = emulated.phases.phase_us.get(name, 0.0)
        if abs(emulated_us - us) > max(0.05 * us, 0.005 * step):
            yield f"{name} {us / 1e3:.2f} → {emulated_us / 1e3:.2f}"


def _compare_runs(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print the table for existing runs; return the exit code."""
    for run in (*args.live, *args.emulated):
        if not (run / "records.jsonl").is_file():
            parser.error(f"{run} has no records.jsonl; unpack results first: python -m tools.results unpack")
    found = list(pair_points(read_measured(args.live), read_measured(args.emulated)))
    if not found:
        parser.error("no point has a live and an emulated record; name runs of the same layouts, loads and precision")
    sys.stdout.write("\n".join(format_table(found)) + "\n")
    return 0


def main() -> int:
    """Measure all layouts live and emulated, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument(
        "--live",
        type=Path,
        nargs="+",
        default=[],
        help="runs of all ranks; if several have a point, the last one is used",
    )
    parser.add_argument("--emulated", type=Path, nargs="+", default=[], help="runs with --emulate")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--exchange", default="ag_rs,symm")
    parser.add_argument("--concurrency", default="8,32")
    parser.add_argument("--context", default="4000,32000")
    parser.add_argument("--seconds", default="1")
    parser.add_argument("--more", default="", help="other options of both sweeps, in quotes")
    parser.add_argument("--compare", action="store_true", help="only write check.md from the runs in FOLDER")
    args = parser.parse_args()
    if args.live or args.emulated:
        return _compare_runs(parser, args)
    if args.output is None:
        parser.error("name a folder with -o, or runs to compare with --live and --emulated")
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.compare:
        measure(args.output, args)
    live, emulated = (read_measured(sorted(args.output.glob(f"{kind}-*"))) for kind in (LIVE, EMULATED))
    text = "\n".join(format_table(pair_points(live, emulated))) + "\n"
    (args.output / "check.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
