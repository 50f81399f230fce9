"""One bench on this machine: its ranks' processes, what they say meanwhile, and their end. No torch.

Ranks are processes of ours and not torchrun's, which would take seconds to start another and has nothing to add on one
machine: they get RANK and an address to meet at, and end with the block that started them, however that is left, or
with this process (child.py).

    FOLDER/job.json, events.jsonl    see bench_records.py
    FOLDER/rank-R.log                everything that rank R printed
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from dcpbench.bench.record import BenchJob, BenchRecord, Event, Result
from dcpbench.launch import child
from dcpbench.launch.jobs import code_words
from dcpbench.launch.torchrun import on_loopback
from dcpbench.records.lines import Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    Process = subprocess.Popen[bytes]

POLL_S = 0.05
GRACE_S = 5.0
"""How long the other ranks may go on once one has died: they may be about to say why."""
START_S = 300.0
"""The least time until the first case: imports take as long as they take."""
STACKS_S = 1.0
LOG_LINES = 15
BROKEN = re.compile(r"nccl|gloo|connection (reset|closed|refused)|broken pipe|DistBackend", re.IGNORECASE)
"""Last words of a rank that only lost another one."""


def follow(
    job: BenchJob, folder: Path, record: BenchRecord, *, worker: str, timeout: float, watch: Callable[[Event], None]
) -> str:
    """Run the job's ranks and fill the record; returns why they ended early, empty where they did not."""
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    record.results = [
        Result(case=case, outcome="failed", reason="not reached: the worker ended before") for case in job.cases
    ]
    with _ranks(job, folder, worker) as ranks:
        heard, dying, begun, events = time.monotonic(), 0.0, False, Tail(folder / "events.jsonl")
        while True:
            codes = [rank.poll() for rank in ranks]
            for line in events.lines():
                event = msgspec.json.decode(line, type=Event)
                heard, begun = time.monotonic(), begun or event.stage == "case"
                _take(event, record)
                watch(event)
            now = time.monotonic()
            if None not in codes:
                break
            dying = dying or (now if any(codes) else 0.0)
            if dying and now - dying > GRACE_S:
                break
            limit = timeout if begun else max(timeout, START_S)
            if now - heard > limit:
                for rank in ranks:
                    rank.send_signal(signal.SIGUSR1)  # it writes its stacks
                time.sleep(STACKS_S)
                return f"It hung: nothing was heard for {limit:g} s (--timeout).{_last_words(folder, ranks)}"
            time.sleep(POLL_S)
        who = ["It"] if len(ranks) == 1 else [f"Rank {number}" for number in range(len(ranks))]
        dead = [f"{name} {code_words(code)}." for name, code in zip(who, codes, strict=True) if code]
        return f"{' '.join(dead)}{_last_words(folder, ranks)}" if dead else ""


def logs(folder: Path) -> bytes:
    """What all ranks printed, one after the other."""
    parts = []
    for path in sorted(folder.glob("rank-*.log")):
        parts += [f"{path.name}:\n".encode(), path.read_bytes(), b"\n"]
    return b"".join(parts)


@contextlib.contextmanager
def _ranks(job: BenchJob, folder: Path, worker: str) -> Iterator[list[Process]]:
    """The ranks' processes, which end with this block, however that is left; SIGTERM and SIGHUP leave it, too."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: sys.exit(128 + n)) for number in signals}
    started: list[Process] = []
    try:
        environment = dict(os.environ) | on_loopback() | _without_gpu(job)
        for rank in range(job.ranks):
            with (folder / f"rank-{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        child.tied([sys.executable, "-m", worker, str(folder)]),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        start_new_session=True,
                    )
                )
        yield started
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _without_gpu(job: BenchJob) -> dict[str, str]:
    """How ranks run on the CPU."""
    return {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if job.device == "cpu" else {}


def _take(event: Event, record: BenchRecord) -> None:
    """Put what an event says into the record."""
    if event.environment:
        record.environment = event.environment
    if event.stage == "limits":
        record.limits, record.without = event.limits, event.without
    if event.result:
        record.results[event.index] = event.result
    for name, value in (("syncs", event.syncs), ("graph", event.graph)):
        if value is not None:
            record.results[event.index] = msgspec.structs.replace(record.results[event.index], **{name: value})


def _last_words(folder: Path, ranks: Sequence[Process]) -> str:
    """The last lines of the rank that died of itself, else of the first that printed anything."""
    said = [(folder / f"rank-{n}.log").read_text(errors="replace").strip().splitlines() for n in range(len(ranks))]
    told = [(n, lines[-LOG_LINES:]) for n, lines in enumerate(said) if lines]
    causes = [(n, lines) for n, lines in told if ranks[n].poll() and not BROKEN.search(lines[-1])]
    for number, lines in [*causes, *told][:1]:
        return "\n".join([f" The last lines{f' of rank {number}' if len(ranks) > 1 else ''}:", *lines])
    return ""
