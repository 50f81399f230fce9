"""Hold replays against live runs on one GPU: step times come from a separate load, then seven others run both ways.

    python -m tools.replay_live -o FOLDER [--models deepseek-v2-lite,deepseek-v3] [--loads closed,open] [--seconds 480] [--compare]

A model has three closed loops, three open ones and one of sessions. Open loops come at shares of the rate at which the most
clients are served in replay. Model by model, closed loops first; what is finished is not run again, and no job is begun
once --seconds are over. FOLDER gets a run of each job and check.md, which --compare alone writes from what lies there.
Bars: TTFT p50 and ITL p50 5 %, p99 10 %; cached tokens of sessions equal, turn by turn.
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

BARS = {("ttft_ms", "p50"): 0.05, ("itl_ms", "p50"): 0.05, ("ttft_ms", "p99"): 0.10, ("itl_ms", "p99"): 0.10}
SHARES = (0.5, 0.7, 0.95)  # shares of the rate at which the most clients are served; the last is near saturation
ENOUGH = 200  # minimum number of finished requests of each load
BUILD, CLOSED, OPEN, SESSIONS = "build", "closed", "open", "sessions"
LOADS = (CLOSED, OPEN, SESSIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Define how large a model's loads are, with lengths in the format of `dcpbench serve`."""

    clients: tuple[int, int, int]  # clients of closed loops; the last: near saturation, maximum of open loops
    prompt: str
    output: str
    longest: tuple[str, str]  # lengths of the load that provides the step times: no request of the others is longer
    turn: int  # number of tokens that each of four turns adds
    chunk: int
    kv: str
    requests: int = ENOUGH


SIZES = {
    "deepseek-v2-lite": Size(
        clients=(8, 24, 64),
        prompt="uniform:200-1800",
        output="uniform:16-96",
        longest=("uniform:1000-3000", "uniform:50-150"),
        turn=300,
        chunk=4096,
        kv="8GiB",
        requests=680,  # a p99 of TTFT needs 662
    ),
    "deepseek-v3": Size(
        clients=(8, 16, 32),
        prompt="uniform:100-900",
        output="uniform:2-8",  # of steps of 40 ms and more
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


def words(model: str, job: str, rates: tuple[float, ...] = ()) -> list[str]:
    """Return the options of `dcpbench serve` for a job, live or replayed."""
    size = SIZES[model]
    most = str(size.clients[-1])
    prompt, output = size.longest if job == BUILD else (size.prompt, size.output)
    when = {
        BUILD: ["--request-rate", "1000", "--concurrency", most, "--requests", "seed=7"],
        CLOSED: ["--concurrency", ",".join(map(str, size.clients))],
        OPEN: ["--request-rate", ",".join(f"{r:g}" for r in rates), "--concurrency", most],
        SESSIONS: ["--concurrency", str(size.clients[1]), "--sessions", f"turns=4,tokens={size.turn}"],
    }[job]
    lengths = ["--num-requests", str(size.requests), "--input-tokens", prompt, "--output-tokens", output]
    return [*when, *lengths, "--prefill", f"chunk={size.chunk}", "--kv-memory", size.kv]


def serve(there: Path, *asked: str) -> None:
    """Run a job of `dcpbench serve` into a folder, or continue it."""
    command = ["serve", *asked, "--no-baseline", "-o", str(there), "--resume"]
    sys.stdout.write(f"$ dcpbench {shlex.join(command)}\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "dcpbench.cli", *command], check=False)


def records(there: Path) -> list[Record]:
    """Return the records of a job; if it has not run, or was cut off before its first point, print that and return
    none.
    """
    if not there.exists():
        return []
    try:
        return [r for r in read_run(there).records if r.outcome == "ok"]
    except RecordsError as nothing:
        sys.stdout.write(f"{nothing}\n")
        return []


def step_times(folder: Path, model: str) -> Path | None:
    """Return the step times that the model's first job measured."""
    return next(iter(sorted((folder / f"{BUILD}-{model}" / "step-times").glob("*.json"))), None)


def open_rates(most_request_s: float) -> tuple[float, ...]:
    """Return the requests per second of the open loops, rounded to three significant digits."""
    return tuple(float(f"{most_request_s * share:.3g}") for share in SHARES)


def measure(folder: Path, models: list[str], live: list[str], until: float) -> None:
    """Measure step times, then every load replayed and those of `live` live, within the time limit."""
    for model in models:
        build = folder / f"{BUILD}-{model}"
        if not records(build) and time.monotonic() < until:
            serve(build, "--model", model, "--tp", "1", *words(model, BUILD), "--mode", REPLAY)
        times = step_times(folder, model)
        if times is None:
            sys.stdout.write(f"{model}: no step times, so none of its loads run; the same command goes on.\n")
            continue
        rates: tuple[float, ...] = ()
        for job in LOADS:
            if job == OPEN:
                served = [m.request_s for m in map(_served, records(folder / f"{REPLAY}-{model}-{CLOSED}"))]
                rates = open_rates(max((r for r in served if r), default=0.0))
                if not rates[0]:
                    sys.stdout.write(f"{model}: no closed loop was replayed, so no rate is known for open ones.\n")
                    continue
            serve(
                folder / f"{REPLAY}-{model}-{job}",
                "--mode",
                REPLAY,
                "--step-times",
                str(times),
                *words(model, job, rates),
            )
            if job not in live:
                sys.stdout.write(f"{model} {job}: not run live, as --loads leaves it out.\n")
            elif time.monotonic() < until:
                asked = ["--model", model, "--tp", "1", *words(model, job, rates), "--no-profile"]
                serve(folder / f"{LIVE}-{model}-{job}", *asked)
            else:
                sys.stdout.write(f"{model} {job}: not run live, --seconds are over; the same command goes on.\n")


def _served(record: Record) -> ServeMetrics:
    assert record.serve is not None
    return record.serve


def _load(record: Record) -> tuple[int, float | None]:
    """Return the fields that distinguish the loads of a job."""
    assert record.point.load is not None
    return record.point.concurrency, record.point.load.request_rate


def pairs(folder: Path) -> Iterator[tuple[str, Record, Record]]:
    """Yield (job, live, replayed) of each load that ran both ways."""
    for live in sorted(folder.glob(f"{LIVE}-*")):
        name = live.name.removeprefix(f"{LIVE}-")
        replayed = {_load(r): r for r in records(folder / f"{REPLAY}-{name}")}
        for mine in records(live):
            its = replayed.get(_load(mine))
            if its is not None:
                yield name, mine, its


def errors(live: ServeMetrics, replayed: ServeMetrics) -> dict[tuple[str, str], float | None]:
    """Return replay / live - 1 for each metric with a bar; None if there are too few samples."""
    found: dict[tuple[str, str], float | None] = {}
    for metric, quantile in BARS:
        mine = getattr(getattr(live, metric), quantile)
        its = getattr(getattr(replayed, metric), quantile)
        found[metric, quantile] = its / mine - 1 if mine and its is not None else None
    return found


def cached(metrics: ServeMetrics) -> tuple[tuple[int, int, int | None], ...]:
    """Return (turn, prompt tokens, cached ones among them) of each turn."""
    return tuple((t.turn, t.input_tokens, t.cached_tokens) for t in metrics.turns)


def table(folder: Path) -> list[str]:
    """Return each load's errors, and how many loads meet all bars."""
    heads = [f"{m.removesuffix('_ms').upper()} {q}" for m, q in BARS]
    lines = [
        f"| load | finished | live ms: {', '.join(heads)} | {' | '.join(heads)} | req/s | cached tokens | holds |",
        f"|---|---:|---|{'---:|' * (len(BARS) + 1)}---|---|",
    ]
    held = []
    devices = set()
    for name, mine, its in pairs(folder):
        live, replayed = _served(mine), _served(its)
        off = errors(live, replayed)
        same = cached(live) == cached(replayed)
        enough = (live.finished or 0) >= ENOUGH
        missed = [h for h, (what, e) in zip(heads, off.items(), strict=True) if e is None or abs(e) > BARS[what]]
        held.append(enough and same and not missed)
        if mine.environment is not None:
            devices.add(mine.environment.device)
        clients, rate_asked = _load(mine)
        when = f"{rate_asked:g} requests/s" if rate_asked else f"{clients} clients"
        seen = ", ".join(f"{v:.1f}" if (v := getattr(getattr(live, m), q)) is not None else "–" for m, q in BARS)
        said = " | ".join("–" if e is None else f"{e:+.1%}" for e in off.values())
        rate = f"{replayed.request_s / live.request_s - 1:+.1%}" if live.request_s and replayed.request_s else "–"
        kept = f"{live.cached_tokens} live, {replayed.cached_tokens}{'' if same else ' (turns differ)'}"
        why = [*missed, *([] if same else ["cached tokens"]), *([] if enough else [f"fewer than {ENOUGH} requests"])]
        verdict = f"no: {', '.join(why)}" if why else "yes"
        lines.append(f"| {name}, {when} | {live.finished} | {seen} | {said} | {rate} | {kept} | {verdict} |")
    bars = ", ".join(f"{h} {b:.0%}" for h, b in zip(heads, BARS.values(), strict=True))
    return [
        f"Replay / live - 1 on {', '.join(sorted(devices)) or 'nothing yet'}. Bars: {bars}; cached tokens equal, turn by turn.",
        "",
        *lines,
        "",
        f"{sum(held)} of {len(held)} loads hold. A percentile that too few requests were served for is – and holds nothing.",
    ]


def main() -> int:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", default="deepseek-v2-lite,deepseek-v3", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--loads", default=",".join(LOADS), help="to run live, of " + ", ".join(LOADS))
    parser.add_argument("--seconds", type=float, default=480.0, help="no job on the GPU is begun later")
    parser.add_argument("--compare", action="store_true", help="only write check.md")
    asked = parser.parse_args()
    models = asked.models.split(",")
    if unknown := [m for m in models if m not in SIZES]:
        parser.error(f"no loads are known for {', '.join(unknown)}; --models takes {', '.join(SIZES)}")
    live = asked.loads.split(",")
    if unknown := [job for job in live if job not in LOADS]:
        parser.error(f"there are no loads {', '.join(unknown)}; --loads takes {', '.join(LOADS)}")
    asked.output.mkdir(parents=True, exist_ok=True)
    if not asked.compare:
        measure(asked.output, models, live, time.monotonic() + asked.seconds)
    text = "\n".join(table(asked.output)) + "\n"
    (asked.output / "check.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
