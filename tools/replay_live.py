"""Compare replays with live runs on one GPU: one load gives the step times, and seven other loads run in both modes.

    python -m tools.replay_live -o FOLDER [--models deepseek-v2-lite,deepseek-v3] [--loads closed,open] [--seconds 480] [--compare]

Each model has three closed loops, three open loops and one load of sessions. Request rates of open loops are shares of the rate that the
largest closed loop reaches in replay. Models run one after another, closed loops first. Finished jobs are not repeated, and no job starts
after --seconds. FOLDER gets a run of each job and check.md; --compare only writes check.md from the runs in FOLDER. Limits of the error: 5 %
for TTFT p50 and ITL p50, 10 % for their p99; the cached tokens of sessions must be equal in each turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.errors import RecordsError
from dcpbench.points.names import LIVE, REPLAY
from dcpbench.records.runs import read_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.records.record import Record, ServeMetrics

LIMITS = {("ttft_ms", "p50"): 0.05, ("itl_ms", "p50"): 0.05, ("ttft_ms", "p99"): 0.10, ("itl_ms", "p99"): 0.10}
RATE_SHARES = (0.5, 0.7, 0.95)  # shares of the rate of the largest closed loop; the last one is near saturation
MIN_REQUESTS = 200  # minimum number of finished requests of each load
BUILD, CLOSED, OPEN, SESSIONS = "build", "closed", "open", "sessions"
LOADS = (CLOSED, OPEN, SESSIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Hold the sizes of a model's loads, with lengths in the format of `dcpbench serve`."""

    clients: tuple[
        int, int, int
    ]  # clients of closed loops; the last number is near saturation, and the maximum of open loops
    prompt: str
    output: str
    longest: tuple[str, str]  # lengths of the load that gives the step times: no request of another load is longer
    turn: int  # number of tokens that each of four turns adds
    chunk: int
    kv: str
    requests: int = MIN_REQUESTS


SIZES = {
    "deepseek-v2-lite": Size(
        clients=(8, 24, 64),
        prompt="uniform:200-1800",
        output="uniform:16-96",
        longest=("uniform:1000-3000", "uniform:50-150"),
        turn=300,
        chunk=4096,
        kv="8GiB",
        requests=680,  # the p99 of TTFT needs 662
    ),
    "deepseek-v3": Size(
        clients=(8, 16, 32),
        prompt="uniform:100-900",
        output="uniform:2-8",  # steps take 40 ms and more
        longest=("uniform:500-1600", "uniform:16-48"),
        turn=150,
        chunk=4096,
        kv="4GiB",
        requests=664,
    ),
    "tiny": Size(
        clients=(1, 2, 4),
        prompt="uniform:8-40",
        output="uniform:2-6",
        longest=("uniform:40-120", "uniform:6-12"),
        turn=8,
        chunk=64,
        kv="1MiB",
        requests=24,
    ),
}


def list_options(model: str, job: str, rates: tuple[float, ...] = ()) -> list[str]:
    """Return the options of `dcpbench serve` for a job, in either mode."""
    size = SIZES[model]
    max_clients = str(size.clients[-1])
    prompt, output = size.longest if job == BUILD else (size.prompt, size.output)
    arrival = {
        BUILD: ["--request-rate", "1000", "--concurrency", max_clients, "--requests", "seed=7"],
        CLOSED: ["--concurrency", ",".join(map(str, size.clients))],
        OPEN: ["--request-rate", ",".join(f"{r:g}" for r in rates), "--concurrency", max_clients],
        SESSIONS: ["--concurrency", str(size.clients[1]), "--sessions", f"turns=4,tokens={size.turn}"],
    }[job]
    lengths = ["--num-requests", str(size.requests), "--input-tokens", prompt, "--output-tokens", output]
    return [*arrival, *lengths, "--prefill", f"chunk={size.chunk}", "--kv-memory", size.kv]


def run_serve(folder: Path, *options: str) -> None:
    """Run or resume `dcpbench serve` with these options and a folder."""
    command = ["serve", *options, "--no-baseline", "-o", str(folder), "--resume"]
    sys.stdout.write(f"$ dcpbench {shlex.join(command)}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "dcpbench.cli", *command], check=False)


def read_records(folder: Path) -> list[Record]:
    """Return the successful records of a job; none if it has not run. Print the error if its records cannot be read."""
    if not folder.exists():
        return []
    try:
        return [r for r in read_run(folder).records if r.outcome == "ok"]
    except RecordsError as error:
        sys.stdout.write(f"{error}\n")
        return []


def find_step_times(folder: Path, model: str) -> Path | None:
    """Return the path of the model's step times; None if they are not measured."""
    return next(iter(sorted((folder / f"{BUILD}-{model}" / "step-times").glob("*.json"))), None)


def compute_open_rates(max_request_s: float) -> tuple[float, ...]:
    """Return the request rates of the open loops, rounded to three significant digits."""
    return tuple(float(f"{max_request_s * share:.3g}") for share in RATE_SHARES)


def run_jobs(folder: Path, models: list[str], live: list[str], until: float) -> None:
    """Measure step times, then replay every load, and run those in `live` live until a time."""
    for model in models:
        build = folder / f"{BUILD}-{model}"
        if not read_records(build) and time.monotonic() < until:
            run_serve(build, "--model", model, "--tp", "1", *list_options(model, BUILD), "--mode", REPLAY)
        times = find_step_times(folder, model)
        if times is None:
            sys.stdout.write(
                f"{model}: there are no step times, so none of its loads run; repeat the command to continue.\n"
            )
            continue
        rates: tuple[float, ...] = ()
        for job in LOADS:
            if job == OPEN:
                served = [
                    m.request_throughput for m in map(_get_metrics, read_records(folder / f"{REPLAY}-{model}-{CLOSED}"))
                ]
                rates = compute_open_rates(max((r for r in served if r), default=0.0))
                if not rates[0]:
                    sys.stdout.write(f"{model}: no closed loop was replayed, so the rates of open loops are unknown.\n")
                    continue
            run_serve(
                folder / f"{REPLAY}-{model}-{job}",
                "--mode",
                REPLAY,
                "--step-times",
                str(times),
                *list_options(model, job, rates),
            )
            if job not in live:
                sys.stdout.write(f"{model} {job}: not run live, as --loads does not name it.\n")
            elif time.monotonic() < until:
                options = ["--model", model, "--tp", "1", *list_options(model, job, rates), "--no-profile"]
                run_serve(folder / f"{LIVE}-{model}-{job}", *options)
            else:
                sys.stdout.write(
                    f"{model} {job}: not run live, as --seconds are over; repeat the command to continue.\n"
                )


def _get_metrics(record: Record) -> ServeMetrics:
    assert record.serve is not None
    return record.serve


def _make_load_key(record: Record) -> tuple[int, float | None]:
    """Return the concurrency and request rate, which distinguish the loads of a job."""
    assert record.point.load is not None
    return record.point.concurrency, record.point.load.request_rate


def pair_records(folder: Path) -> Iterator[tuple[str, Record, Record]]:
    """Yield the job, the live record and the replayed record of each load with both."""
    for live in sorted(folder.glob(f"{LIVE}-*")):
        name = live.name.removeprefix(f"{LIVE}-")
        replayed = {_make_load_key(r): r for r in read_records(folder / f"{REPLAY}-{name}")}
        for record in read_records(live):
            match = replayed.get(_make_load_key(record))
            if match is not None:
                yield name, record, match


def compute_errors(live: ServeMetrics, replayed: ServeMetrics) -> dict[tuple[str, str], float | None]:
    """Return replay / live - 1 of each metric with a limit; None if there are too few samples."""
    found: dict[tuple[str, str], float | None] = {}
    for metric, quantile in LIMITS:
        live_ms = getattr(getattr(live, metric), quantile)
        replayed_ms = getattr(getattr(replayed, metric), quantile)
        found[metric, quantile] = replayed_ms / live_ms - 1 if live_ms and replayed_ms is not None else None
    return found


def list_cached_tokens(metrics: ServeMetrics) -> tuple[tuple[int, int, int | None], ...]:
    """Return the number, the prompt tokens and the cached tokens of each turn."""
    return tuple((t.turn, t.input_tokens, t.cached_tokens) for t in metrics.turns)


def format_table(folder: Path) -> list[str]:
    """Format a table of the errors of each load, and the number of loads within all limits."""
    heads = [f"{m.removesuffix('_ms').upper()} {q}" for m, q in LIMITS]
    lines = [
        f"| load | finished | live ms: {', '.join(heads)} | {' | '.join(heads)} | req/s | cached tokens | within limits |",
        f"|---|---:|---|{'---:|' * (len(LIMITS) + 1)}---|---|",
    ]
    ok = []
    devices = set()
    for name, live_record, replayed_record in pair_records(folder):
        live, replayed = _get_metrics(live_record), _get_metrics(replayed_record)
        errors = compute_errors(live, replayed)
        equal_cache = list_cached_tokens(live) == list_cached_tokens(replayed)
        enough = (live.finished or 0) >= MIN_REQUESTS
        missed = [h for h, (what, e) in zip(heads, errors.items(), strict=True) if e is None or abs(e) > LIMITS[what]]
        ok.append(enough and equal_cache and not missed)
        if live_record.environment is not None:
            devices.add(live_record.environment.device)
        clients, request_rate = _make_load_key(live_record)
        arrival = f"{request_rate:g} requests/s" if request_rate else f"{clients} clients"
        live_text = ", ".join(f"{v:.1f}" if (v := getattr(getattr(live, m), q)) is not None else "–" for m, q in LIMITS)
        errors_text = " | ".join("–" if e is None else f"{e:+.1%}" for e in errors.values())
        rate = (
            f"{replayed.request_throughput / live.request_throughput - 1:+.1%}"
            if live.request_throughput and replayed.request_throughput
            else "–"
        )
        cached_text = f"{live.cached_tokens} live, {replayed.cached_tokens}{'' if equal_cache else ' (turns differ)'}"
        problems = [
            *missed,
            *([] if equal_cache else ["cached tokens"]),
            *([] if enough else [f"fewer than {MIN_REQUESTS} requests"]),
        ]
        verdict = f"no: {', '.join(problems)}" if problems else "yes"
        lines.append(
            f"| {name}, {arrival} | {live.finished} | {live_text} | {errors_text} | {rate} | {cached_text} | {verdict} |"
        )
    limits = ", ".join(f"{h} {b:.0%}" for h, b in zip(heads, LIMITS.values(), strict=True))
    return [
        f"Replay / live - 1 on {', '.join(sorted(devices)) or 'nothing yet'}. Limits: {limits}; cached tokens equal in each turn.",
        "",
        *lines,
        "",
        f"{sum(ok)} of {len(ok)} loads are within the limits. A percentile of too few requests is –, and is not within a limit.",
    ]


def main() -> int:
    """Run all jobs, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument(
        "--models",
        default="deepseek-v2-lite,deepseek-v3",
        help=f"models, separated by commas: {', '.join(SIZES)}; default: %(default)s",
    )
    parser.add_argument("--loads", default=",".join(LOADS), help="loads to run live; default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=480.0,
        help="time in s after which no job starts on the GPU; default: %(default)s",
    )
    parser.add_argument("--compare", action="store_true", help="only write check.md from the runs in FOLDER")
    args = parser.parse_args()
    models = args.models.split(",")
    if unknown := [m for m in models if m not in SIZES]:
        parser.error(f"there are no loads for {', '.join(unknown)}; --models takes {', '.join(SIZES)}")
    live = args.loads.split(",")
    if unknown := [job for job in live if job not in LOADS]:
        parser.error(f"there are no loads {', '.join(unknown)}; --loads takes {', '.join(LOADS)}")
    args.output.mkdir(parents=True, exist_ok=True)
    if not args.compare:
        run_jobs(args.output, models, live, time.monotonic() + args.seconds)
    text = "\n".join(format_table(args.output)) + "\n"
    (args.output / "check.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
