"""Stands in for dcpbench.bench_worker: answers every case at once, or ends as DCPBENCH_FAKE says.

`wrong` finds a difference, `dies` ends after the first case, `stillborn` before it, `hangs` says nothing more, `half`
leaves half a line before the rest of it, `failed` cannot run the second case.
"""

import os
import sys
import time
from pathlib import Path

import msgspec

from dcpbench.bench_records import BenchJob, Event, Result, Syncs
from dcpbench.records import Environment


def main(folder: Path) -> None:
    """Write the events of a job."""
    how = os.environ.get("DCPBENCH_FAKE", "")
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=BenchJob)
    if how == "stillborn":
        sys.exit("cannot import name 'x'")
    with (folder / "events.jsonl").open("ab", buffering=0) as f:

        def tell(event: Event) -> None:
            line = msgspec.json.encode(event) + b"\n"
            if how == "half":
                f.write(line[:20])
                time.sleep(0.15)
                line = line[20:]
            f.write(line)

        tell(Event(stage="start", environment=Environment(device="CPU", device_count=0, command=job.command)))
        for index, case in enumerate(job.cases):
            tell(Event(stage="case", index=index))
            result = Result(case=case, correct=how != "wrong", difference="row 3 differs" if how == "wrong" else "")
            if how == "failed" and index == 1:
                result = Result(case=case, outcome="failed", reason="CapacityError: lower --tokens")
            tell(Event(stage="done", index=index, result=result))
            if how == "dies":
                sys.exit("Segmentation fault, as it were")
            if how == "hangs":
                time.sleep(100)
            tell(Event(stage="counted", index=index, syncs=Syncs(per_call=index, detector="dry-run")))
        tell(Event(stage="end"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
