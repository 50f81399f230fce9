"""Inject faults into one rank of a sweep, and check whether and how soon the diagnosis names them.

    python -m tools.hangs --ranks 2,4,8
    python -m tools.hangs --gpu H200                # one GPU: a kernel of the captured step that never ends
    python -m tools.hangs --gpu H200 --ranks 2      # two GPUs: the same and three more faults, over NCCL

Each case is a sweep of a tiny model on the CPU with two points on this many gloo ranks. At the first point one rank omits a collective,
calls two collectives in the wrong order, passes another shape or dtype, sleeps, spins, or does not signal in the merge of `symm`
(tests/distributed/faulty_worker.py). The model on GPUs is DeepSeek-V2-Lite; the faults are an omitted all-gather, another shape, a kernel
that never ends, and the signal. Exit code 1: the record does not name rank, layer, collective and line within 15 s after the limit of the
point, or the other point was not measured.
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
from dcpbench.launch.torchrun import RendezvousOptions
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

MAX_DIAGNOSIS_S = 15.0
EXPECTED_KINDS = {  # expected kind of finding by fault; for all other faults, the name of the fault
    "sleeps": "behind",
    "spins": "behind",
    "missing": "order",
    "gather": "order",
    "order": "order",
    LOOPS: "device",
    FLAG: "signal",
}
GPU_MODEL = "deepseek-v2-lite"  # starts in seconds; the host can launch the few kernels of a whole step
NEXT_CONCURRENCY = 2  # concurrency of the point that follows the faulty one


def run_case(fault: str, ranks: int, timeout: float, gpu: str = "") -> tuple[list[str], float, Record]:
    """Run one sweep; return its problems, the seconds from the limit to the record, and the record."""
    culprit = ranks - 1
    os.environ[FAULT] = f"{fault}:{culprit}:1"
    times: dict[str, float] = {"heard": 0.0}

    def watch(event: Progress) -> None:
        if event.stage in ("hung", "failed"):
            times["named"] = time.time()
        elif "named" not in times:
            times["heard"] = event.at

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
        for c in (1, NEXT_CONCURRENCY)
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
        options = launcher.JobOptions(
            folder=folder,
            settings=settings,
            device=probe.device,
            worker=faulty_worker.__name__,
            timeout=timeout,
            engines=tuple(plan_engines(points, settings, probe)),
        )
        launcher.run_points(points, options, RendezvousOptions(), watch)
        first, *rest = read_records(folder)
        where = folder / first.detail.get("evidence", "none") / "finding.json"
        found = msgspec.json.decode(where.read_bytes(), type=Finding) if where.exists() else None
    after = times.get("named", math.inf) - times["heard"] - (timeout if first.outcome == "hung" else 0.0)
    checks = _check_record(fault, culprit, first, found, rest)
    if gpu and fault == FLAG:
        del checks["line"]  # a captured step has no lines
    wrong = [text for text, is_so in checks.items() if not is_so]
    return wrong + ([f"{after:.1f} s"] if after > MAX_DIAGNOSIS_S else []), after, first


def _check_record(
    fault: str, culprit: int, first: Record, found: Finding | None, rest: list[Record]
) -> dict[str, bool]:
    """Return the results of the checks, by the text of the problem."""
    reason = first.reason or ""
    others = [(r.point.concurrency, r.outcome) for r in rest] == [(NEXT_CONCURRENCY, "ok")]
    if fault == LOOPS:
        single = first.point.world == 1  # one rank need not be distinguished
        return {
            f"outcome {first.outcome}": first.outcome == "hung",
            f"kind {first.detail.get('hang')}": first.detail.get("hang") == EXPECTED_KINDS[fault],
            "rank": single or (found is not None and found.ranks == [culprit]),
            "layer": f"layer {LAYER}" in reason,
            "phase": "attention" in reason,
            "the other point": others,
        }
    phase = PHASES.get(fault, "attn_reduce")
    return {
        f"outcome {first.outcome}": first.outcome in ("hung", "failed"),
        f"kind {first.detail.get('hang')}": first.detail.get("hang") == EXPECTED_KINDS.get(fault, fault),
        "rank": f"rank {culprit} " in reason and (found is None or found.ranks == [culprit]),
        "layer": f"layer {LAYER}" in reason,
        "phase": phase in reason,
        "collective": any(f"{op} of" in reason for op in ("all_reduce", "all_gather", "reduce_scatter", "merge")),
        "line": ".py:" in reason or (found is not None and ".py:" in found.line),
        "the other point": others,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, and print a table with a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="", help="numbers of ranks; default: 2,4,8; with --gpu: 1")
    parser.add_argument(
        "--faults",
        default="",
        help=f"faults to inject; default: {','.join(KINDS)}; on one GPU: {LOOPS}; on several: {','.join(ON_GPUS)}",
    )
    parser.add_argument("--timeout", type=float, default=8.0, help="limit of a point in seconds; default: %(default)s")
    parser.add_argument("--reasons", action="store_true", help="also print the reason in each record")
    parser.add_argument("--gpu", default="", help="run on GPUs with this name, such as H200, instead of the CPU")
    args = parser.parse_args(arguments)
    rank_counts = args.ranks or ("1" if args.gpu else "2,4,8")
    print(
        "| fault | ranks | outcome | finding | named after | time of the case | problems |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    failed = 0
    for ranks in map(int, rank_counts.split(",")):
        kinds = KINDS if not args.gpu else (LOOPS,) if ranks == 1 else ON_GPUS
        faults = args.faults.split(",") if args.faults else list(kinds)
        if unknown := [fault for fault in faults if fault not in kinds]:
            sys.exit(f"--faults: there is no {', '.join(unknown)} for this number of ranks; use {', '.join(kinds)}.")
        for fault in faults:
            began = time.monotonic()
            slow = (
                max(1, ranks // 2) if fault == FLAG and not args.gpu else 1
            )  # kernels of `symm` run in Triton's interpreter
            wrong, after, record = run_case(fault, ranks, args.timeout * slow, args.gpu)
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
            if args.reasons or wrong:
                print(f"    {record.reason}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
