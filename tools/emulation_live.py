"""Hold emulated points against all ranks of the same GPUs: communication is measured first, then both run, and are compared.

    python -m tools.emulation_live -o FOLDER [--ranks 2] [--model deepseek-v3] [--more "--weights-dtype bf16"] [--compare]
    python -m tools.emulation_live --live RUN... --emulated RUN...

The second form compares runs that were measured, needs no GPU and writes no file. The first
needs as many GPUs as ranks. FOLDER gets the benches of communication and machine file, a run of each kind and check.md, written by
--compare alone from what lies there. Live and emulated runs take turns, layout by layout. Bar: 5 % of the step time.
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

BAR = 0.05
REQUESTS = "1,2,4,8,16,32,64,128,256,512"
LIVE, EMULATED = "live", "emulated"
MACHINE = "machine.toml"  # file in the folder that `bench calibrate` writes


class Step(NamedTuple):
    """Hold one command: the arguments of `dcpbench`."""

    words: list[str]
    only_one: bool = False  # True if the command sees only the first GPU


def _run(step: Step) -> None:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if step.only_one else {})
    sys.stdout.write(f"$ dcpbench {shlex.join(step.words)}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "dcpbench.cli", *step.words], check=False, env=environment)


def list_bench_steps(folder: Path, ranks: int) -> list[Step]:
    """Return benchmarks of the calls between this many GPUs, and the command `bench calibrate` that makes the machine file
    from them.
    """
    folders = {bench: str(folder / f"{bench}-{ranks}") for bench in ("collectives", "exchange")}
    variants = ",".join([*COLLECTIVES, *REGISTERED_COLLECTIVES])
    more = {
        "collectives": ["--variant", variants],
        "exchange": ["--heads", "64,128", "--variant", ",".join(EXCHANGES)],
    }
    benches = [
        Step(
            [
                "bench",
                bench,
                "--ranks",
                str(ranks),
                "--requests",
                REQUESTS,
                "--seconds",
                "0.1",
                *more[bench],
                "-o",
                there,
                "--force",
            ]
        )
        for bench, there in folders.items()
    ]
    made = ["bench", "calibrate", *folders.values(), "-o", str(folder / MACHINE), "--force"]
    return [*benches, Step(made)]


def layouts(ranks: int, exchange: str) -> dict[str, list[str]]:
    """Return the options of plain tp and dcp, and of dp."""
    return {"dcp": ["--dcp", f"1,{ranks}", "--exchange", exchange], "dp": ["--dp", str(ranks), "--dcp", "1"]}


def both(folder: Path, machine: Path | str, model: str, ranks: int, name: str, words: list[str]) -> list[Step]:
    """Return a sweep of one layout of `layouts`, live and then emulated; `words` are its other options."""
    common = ["sweep", "--model", model, "--tp", str(ranks), *words, "--no-baseline"]
    return [
        Step([*common, "-o", str(folder / f"{LIVE}-{model}-{name}"), "--resume"]),
        Step(
            [*common, "--emulate", str(machine), "-o", str(folder / f"{EMULATED}-{model}-{name}"), "--resume"],
            only_one=True,
        ),
    ]


def measure(folder: Path, asked: argparse.Namespace) -> None:
    """Measure communication, then every layout live and emulated."""
    machine = folder / MACHINE
    if not machine.exists():
        for step in list_bench_steps(folder, asked.ranks):
            _run(step)
    load = ["--concurrency", asked.concurrency, "--context", asked.context, "--seconds", asked.seconds]
    for model in asked.model.split(","):
        for name, words in layouts(asked.ranks, asked.exchange).items():
            for step in both(folder, machine, model, asked.ranks, name, [*words, *shlex.split(asked.more), *load]):
                _run(step)


def _key(point: Point) -> Point:
    """Return the point without `emulate`, which both sides share."""
    return msgspec.structs.replace(point, emulate=None)


def measured(folders: Iterable[Path]) -> list[Record]:
    """Return the measured decode records of these runs."""
    records = [r for there in folders if (there / "records.jsonl").exists() for r in read_run(there).records]
    return [r for r in records if r.outcome == "ok" and r.metrics is not None]


def pairs(live: Iterable[Record], emulated: Iterable[Record]) -> Iterator[tuple[Record, Record]]:
    """Yield (live, emulated) of each point that ran both ways."""
    its = {_key(r.point): r for r in emulated}
    for key, mine in {_key(r.point): r for r in live}.items():
        if key in its:
            yield mine, its[key]


def name(point: Point) -> str:
    """Return the name of a point in the table: `deepseek-v3 tp2·dcp2 ep2 symm fp8/fp8, 8 × 4,000`."""
    precision = f"{point.weights_precision}/{point.kv_precision}"
    who = (point.model, point.layout_name, point.ep_label, point.format_exchange_label(), precision)
    return f"{' '.join(filter(None, who))}, {format_point_load(point)}"


COLUMNS = (
    "point",
    "live ms",
    "emulated ms",
    "off by",
    "gaps between kernels, µs",
    "phases that are off by more than 5 % of themselves and 0.5 % of the step",
)


class Pair(NamedTuple):
    """Hold a point that ran both ways, with its two step times."""

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
        """Return how much longer or shorter the emulated gaps between kernels are, as a share of the live step.

        Gaps depend on what a process has run before (docs/methodology.md), not on the layout. 0 if one was not profiled.
        """
        live, emulated = self.live.phases, self.emulated.phases
        if live is None or emulated is None:
            return 0.0
        return (emulated.idle_us / emulated.kernels - live.idle_us / live.kernels) * live.kernels / live.step_us


def table(found: Iterable[tuple[Record, Record]]) -> list[str]:
    """Return the rows of `pairs`, and how many are within the bar; those with unequal gaps between kernels are counted apart."""
    rows = [Pair(*both) for both in found]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---:|---|", *map(_row, rows), ""]
    equal = [row for row in rows if abs(row.gap_share) <= UNEQUAL]
    lines.append(f"{_within(equal)}.")
    if apart := [row for row in rows if abs(row.gap_share) > UNEQUAL]:
        shares = [row.gap_share for row in apart]
        lines.append(
            f"With gaps between kernels that differ by more than {UNEQUAL:.0%} of a step ({min(shares):+.1%} to {max(shares):+.1%}): "
            f"{_within(apart)}."
        )
    return lines


def _row(row: Pair) -> str:
    live, emulated = row.live, row.emulated
    assert live.metrics is not None
    assert emulated.metrics is not None
    gaps = ""
    if live.phases and emulated.phases:
        gaps = " → ".join(f"{p.idle_us / p.kernels:.2f}" for p in (live.phases, emulated.phases))
    cells = (
        name(live.point),
        f"{live.metrics.step_ms.median:.2f}",
        f"{emulated.metrics.step_ms.median:.2f}",
        f"{row.error:+.1%}",
        gaps,
        ", ".join(_phases(live, emulated)),
    )
    return f"| {' | '.join(cells)} |"


def _within(rows: list[Pair]) -> str:
    """Return `24 of 24 within 5%, off by -1.3% to +1.6%`."""
    errors = [row.error for row in rows]
    text = f"{sum(abs(e) <= BAR for e in errors)} of {len(errors)} within {BAR:.0%}"
    return f"{text}, off by {min(errors):+.1%} to {max(errors):+.1%}" if errors else text


def _phases(live: Record, emulated: Record) -> Iterator[str]:
    if live.phases is None or emulated.phases is None:
        return
    step = live.phases.step_us
    for name, us in live.phases.phase_us.items():
        its = emulated.phases.phase_us.get(name, 0.0)
        if abs(its - us) > max(0.05 * us, 0.005 * step):
            yield f"{name} {us / 1e3:.2f} → {its / 1e3:.2f}"


def _compare_runs(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> int:
    """Print the table of runs that were measured before."""
    for run in (*asked.live, *asked.emulated):
        if not (run / "records.jsonl").is_file():
            parser.error(f"{run} holds no records.jsonl; unpack results first: python -m tools.results unpack")
    found = list(pairs(measured(asked.live), measured(asked.emulated)))
    if not found:
        parser.error("no point ran both ways; name runs of the same layouts, loads and precision")
    sys.stdout.write("\n".join(table(found)) + "\n")
    return 0


def main() -> int:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument(
        "--live", type=Path, nargs="+", default=[], help="runs of all ranks; of a point in several the last counts"
    )
    parser.add_argument("--emulated", type=Path, nargs="+", default=[], help="runs of one rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--exchange", default="ag_rs,symm")
    parser.add_argument("--concurrency", default="8,32")
    parser.add_argument("--context", default="4000,32000")
    parser.add_argument("--seconds", default="1")
    parser.add_argument("--more", default="", help="other options of both sweeps, in quotes")
    parser.add_argument("--compare", action="store_true")
    asked = parser.parse_args()
    if asked.live or asked.emulated:
        return _compare_runs(parser, asked)
    if asked.output is None:
        parser.error("name a folder with -o, or runs to compare with --live and --emulated")
    asked.output.mkdir(parents=True, exist_ok=True)
    if not asked.compare:
        measure(asked.output, asked)
    live, emulated = (measured(sorted(asked.output.glob(f"{kind}-*"))) for kind in (LIVE, EMULATED))
    text = "\n".join(table(pairs(live, emulated))) + "\n"
    (asked.output / "check.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
