"""Makes one rank of a sweep go wrong, in each of several ways, and says whether that was named, and how soon.

    python -m tools.hangs --ranks 2,4,8
    python -m tools.hangs --gpu H200                # a kernel of the captured step that never ends, on one GPU
    python -m tools.hangs --gpu H200 --ranks 2      # that, and three more between two, over NCCL

Each case is a sweep of a tiny model on the CPU, two points on so many gloo ranks: at the first one, one rank leaves a
collective out, takes two in the other order, gives one another shape or dtype, sleeps, spins, or signals nothing in the merge of
`symm` (tests/distributed/faulty_worker.py). Between GPUs, DeepSeek-V2-Lite: an all-gather that is left out, another shape, a
kernel that never ends, and that signal. Ends with 1 where the record did not name the rank, the layer, the collective and the line within 15 s
after the limit of the point, or the other point was not measured.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.hangs.finding import Finding
from dcpbench.launch import launcher
from dcpbench.launch.torchrun import Machines
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.budget import plan_engines
from dcpbench.points.device_probe import Probe
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import read_records
from tests.distributed import faulty_worker
from tests.distributed.faulty_worker import FAULT, FLAG, KINDS, LAYER, LOOPS, ON_GPUS, PHASES

if TYPE_CHECKING:
    from dcpbench.launch.jobs import Progress
    from dcpbench.records.record import Record

ALLOWED_S = 15.0
NAMES = {  # correct kind of finding by fault; for all others, the fault's own name
    "sleeps": "behind",
    "spins": "behind",
    "missing": "order",
    "gather": "order",
    "order": "order",
    LOOPS: "device",
    FLAG: "signal",
}
GPU_MODEL = "deepseek-v2-lite"  # built in seconds; the host can launch the few kernels of a whole step
REMAINING = 2  # concurrency of the point that follows the faulty one


def case(fault: str, ranks: int, timeout: float, gpu: str = "") -> tuple[list[str], float, Record]:
    """Return (problems, seconds from the limit to the record, the record) of one sweep."""
    culprit = ranks - 1
    os.environ[FAULT] = f"{fault}:{culprit}:1"
    said: dict[str, float] = {"heard": 0.0}

    def watch(event: Progress) -> None:
        if event.stage in ("hung", "failed"):
            said["named"] = time.time()
        elif "named" not in said:
            said["heard"] = event.at

    exchange = "none" if ranks == 1 else "symm" if fault == FLAG else "ag_rs"
    points = [
        Point(
            model="tiny",
            tp=ranks,
            dcp=ranks,
            exchange=exchange,
            concurrency=c,
            context=16,
            backend="reference",
            dtype="fp32",
        )
        for c in (1, REMAINING)
    ]
    settings, probe = Settings(seconds=0.2, profile=False), Probe(device="cpu", count=0, name="CPU")
    if gpu:
        points = [
            msgspec.structs.replace(p, model=GPU_MODEL, context=512, backend="triton", dtype="bf16", page_size=64)
            for p in points
        ]
        probe = make_planned_probe(gpu, ranks)
        settings = msgspec.structs.replace(settings, kv_memory_bytes=4 << 30)
    with tempfile.TemporaryDirectory(prefix="dcpbench-hangs-") as name:
        folder = Path(name)
        work = launcher.Work(
            folder=folder,
            settings=settings,
            device=probe.device,
            worker=faulty_worker.__name__,
            timeout=timeout,
            engines=tuple(plan_engines(points, settings, probe)),
        )
        launcher.run_points(points, work, Machines(), watch)
        first, *rest = read_records(folder)
        where = folder / first.detail.get("evidence", "none") / "finding.json"
        found = msgspec.json.decode(where.read_bytes(), type=Finding) if where.exists() else None
    after = said.get("named", math.inf) - said["heard"] - (timeout if first.outcome == "hung" else 0.0)
    checks = _checks(fault, culprit, first, found, rest)
    if gpu and fault == FLAG:
        del checks["line"]  # a captured step has none
    wrong = [text for text, is_so in checks.items() if not is_so]
    return wrong + ([f"{after:.1f} s"] if after > ALLOWED_S else []), after, first


def _checks(fault: str, culprit: int, first: Record, found: Finding | None, rest: list[Record]) -> dict[str, bool]:
    """Return the checks by the text of the problem if they fail."""
    reason = first.reason or ""
    others = [(r.point.concurrency, r.outcome) for r in rest] == [(REMAINING, "ok")]
    if fault == LOOPS:
        of_one = first.point.world == 1  # which needs no telling apart
        return {
            f"outcome {first.outcome}": first.outcome == "hung",
            f"kind {first.detail.get('hang')}": first.detail.get("hang") == NAMES[fault],
            "rank": of_one or (found is not None and found.ranks == [culprit]),
            "layer": f"layer {LAYER}" in reason,
            "phase": "attention" in reason,
            "the other point": others,
        }
    phase = PHASES.get(fault, "attn_reduce")
    return {
        f"outcome {first.outcome}": first.outcome in ("hung", "failed"),
        f"kind {first.detail.get('hang')}": first.detail.get("hang") == NAMES.get(fault, fault),
        "rank": f"rank {culprit} " in reason and (found is None or found.ranks == [culprit]),
        "layer": f"layer {LAYER}" in reason,
        "phase": phase in reason,
        "collective": any(f"{op} of" in reason for op in ("all_reduce", "all_gather", "reduce_scatter", "merge")),
        "line": ".py:" in reason or (found is not None and ".py:" in found.line),
        "the other point": others,
    }


def main(arguments: list[str] | None = None) -> int:
    """Read the options, run the cases, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="", help="default: 2,4,8; with --gpu, 1")
    parser.add_argument(
        "--faults", default="", help=f"default: {','.join(KINDS)}; of one GPU {LOOPS}; of several {','.join(ON_GPUS)}"
    )
    parser.add_argument("--timeout", type=float, default=8.0, help="limit of a point in seconds; default: %(default)s")
    parser.add_argument("--reasons", action="store_true", help="print each record's reason, too")
    parser.add_argument("--gpu", default="", help="such as H200: ranks on such GPUs, in place of the CPU")
    asked = parser.parse_args(arguments)
    ranks_asked = asked.ranks or ("1" if asked.gpu else "2,4,8")
    print(
        "| fault | ranks | outcome | found | named after | whole case | wrong |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    failed = 0
    for ranks in map(int, ranks_asked.split(",")):
        kinds = KINDS if not asked.gpu else (LOOPS,) if ranks == 1 else ON_GPUS
        faults = asked.faults.split(",") if asked.faults else list(kinds)
        if unknown := [fault for fault in faults if fault not in kinds]:
            sys.exit(f"--faults: no {', '.join(unknown)} at these ranks; there are {', '.join(kinds)}.")
        for fault in faults:
            began = time.monotonic()
            slow = max(1, ranks // 2) if fault == FLAG and not asked.gpu else 1  # kernels of `symm`, interpreted
            wrong, after, record = case(fault, ranks, asked.timeout * slow, asked.gpu)
            failed += bool(wrong)
            row = (
                fault,
                ranks,
                record.outcome,
                record.detail.get("hang", ""),
                f"{after:.1f} s",
                f"{time.monotonic() - began:.0f} s",
                ", ".join(wrong) or "–",
            )
            print(f"| {' | '.join(map(str, row))} |", flush=True)
            if asked.reasons or wrong:
                print(f"    {record.reason}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
