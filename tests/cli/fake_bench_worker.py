"""Replace dcpbench.bench.bench_worker: finish every case at once, or fail as DCPBENCH_FAKE selects.

`wrong` finds a difference, `dies` ends after the first case, `stillborn` before it, `hangs` writes no further events, `half`
writes an event in two parts, and `failed` cannot run the second case. With `lonely` rank 1 fails after the first case and
rank 0 waits for it; with `leaves` rank 1 exits without an error.
"""

import os
import sys
import time
from pathlib import Path

import msgspec

from dcpbench.bench.bench_record import BenchJob, Event, Limit, Result
from dcpbench.records.record import Environment


def follow_rank_0(events: Path, how: str) -> None:
    """Run a rank other than 0: exit with rank 0, or after the first case."""
    stage = b'"done"' if how in {"lonely", "leaves"} else b'"end"'
    while not (events.exists() and stage in events.read_bytes()):
        time.sleep(0.02)
    if how == "lonely":
        sys.exit("illegal memory access")
    if how == "leaves":
        sys.stdout.write("nothing more to do\n")


def main(folder: Path) -> None:
    """Write the events of a job."""
    how = os.environ.get("DCPBENCH_FAKE", "")
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=BenchJob)
    if how == "stillborn":
        sys.exit("cannot import name 'x'")
    if os.environ["RANK"] != "0":
        follow_rank_0(folder / "events.jsonl", how)
        return
    with (folder / "events.jsonl").open("ab", buffering=0) as f:

        def write_event(event: Event) -> None:
            line = msgspec.json.encode(event) + b"\n"
            if how == "half" and event.stage == "done":
                f.write(line[:20])
                time.sleep(0.15)
                line = line[20:]
            f.write(line)

        limit = Limit(name="peer", unit="B/s", median=372e9, low=371e9, high=373e9, samples=20)
        write_event(Event(stage="start", environment=Environment(device="CPU", device_count=0, command=job.command)))
        if job.ranks > 1:
            write_event(Event(stage="limits", limits=[limit], unmeasured=["barrier: none here."]))
        for index, case in enumerate(job.cases):
            write_event(Event(stage="case", index=index))
            result = Result(case=case, correct=how != "wrong", difference="row 3 differs" if how == "wrong" else "")
            if how == "failed" and index == 1:
                result = Result(case=case, outcome="failed", reason="CapacityError: lower --tokens")
            write_event(Event(stage="done", index=index, result=result))
            if how == "dies":
                sys.exit("Segmentation fault")
            while how in {"hangs", "lonely", "leaves"}:
                time.sleep(1)
        write_event(Event(stage="end"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
