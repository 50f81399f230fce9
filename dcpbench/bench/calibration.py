"""Calibrate the communication model of a machine from benchmarks between ranks, and assess its quality.

Records become samples of points.comm_model. Step times of several GPUs and of a single emulating GPU calibrate steps with
prompts. No torch.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

import msgspec

from dcpbench.bench.bench_record import SCHEMA_VERSION, BenchRecord
from dcpbench.bench.cases import AUTO_VARIANTS, COLLECTIVES
from dcpbench.errors import UsageError
from dcpbench.points.comm_model import ACROSS, Call, Prompts, Sample
from dcpbench.points.gpus import GPUS
from dcpbench.records.lines import UNREADABLE
from dcpbench.serving.step_times import LINE, StepTimes, read_step_times

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from pathlib import Path

BENCHES = {"collectives": COLLECTIVES, "exchange": AUTO_VARIANTS}  # benches of link times, and required calls


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality of the model for a call."""

    call: Call
    errors: list[float]  # relative errors at sizes between two others, predicted without them; sorted

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the smallest and the largest measured number of received bytes."""
        found = [s.received_bytes for s in self.call.samples]
        return min(found), max(found)

    def compute_percentile(self, share: float) -> float | None:
        """Return a percentile of the errors; None if no size lies between two others."""
        return self.errors[min(int(share * len(self.errors)), len(self.errors) - 1)] if self.errors else None


def compute_quality(calls: Iterable[Call]) -> list[Quality]:
    """Return the quality of each call."""
    return [Quality(call, sorted(call.compute_left_out_errors())) for call in calls]


def read_records(paths: Sequence[Path]) -> list[BenchRecord]:
    """Return the records of benches between ranks in files, or anywhere below folders; duplicates count once.

    Raise UsageError if there is none.
    """
    files = [
        file
        for path in paths
        for file in (sorted(path.rglob("bench-*.json")) if path.is_dir() else [path])
        if not path.is_dir() or file.stem.removeprefix("bench-") in BENCHES
    ]
    found: list[BenchRecord] = []
    for record in map(_read_record, files):
        if record not in found:  # its sizes would predict themselves without an error
            found.append(record)
    if not any(list(iter_samples(record)) for record in found):
        where = ", ".join(map(str, paths))
        raise UsageError(
            f"{where}: no times of bench collectives or bench exchange; measure them on GPUs with dcpbench bench collectives "
            "--ranks 2 -o FOLDER, or let dcpbench bench calibrate do it."
        )
    return found


def find_step_times(paths: Sequence[Path]) -> list[Path]:
    """Return the files of step times among these, and anywhere below folders."""
    return [
        file
        for path in paths
        for file in (sorted(path.rglob("step-times/*.json")) if path.is_dir() else [path])
        if file.parent.name == "step-times"
    ]


def compute_prompt_ratios(files: Sequence[Path]) -> list[Prompts]:
    """Return the ratio of step times with prompts on several GPUs to those on a single emulating GPU.

    It is given by prompt tokens, as medians over cases and over all pairs of such files of one engine path. Raise
    UsageError for files of a CPU, and for a file without a counterpart; RecordsError for one that cannot be read.
    """
    times = {file: read_step_times(file) for file in files}
    ratios: dict[int, list[float]] = {}
    for file, one in times.items():
        others = [
            of for of in times.values() if (of.emulated is None) != (one.emulated is None) and _has_same_path(of, one)
        ]
        if one.engine is not None:
            raise UsageError(f"{file} has steps of {one.engine.engine}, not of dcpbench's engine; leave it out.")
        if one.is_blocking:
            raise UsageError(f"{file} was measured on a CPU, and CPU times say nothing about GPUs; leave it out.")
        if not others:
            lacks = (
                "on the GPUs themselves"
                if one.emulated
                else "with --emulate and the machine's file, on one of these GPUs"
            )
            raise UsageError(
                f"{file} can be held against nothing: measure step times of the same layout and load {lacks}, and name both runs."
            )
        for live in others if one.emulated else ():
            medians = {m.case: m.median_ms for m in live.cases}
            for m in one.cases:
                if m.case.chunks and m.case.use == LINE and m.case in medians:
                    ratios.setdefault(m.case.compute_work().tokens, []).append(medians[m.case] / m.median_ms)
    return [Prompts(tokens, round(statistics.median(found), 4)) for tokens, found in sorted(ratios.items())]


def _has_same_path(one: StepTimes, other: StepTimes) -> bool:
    """Return True if the paths are equal, apart from emulation."""
    by_all = {"emulate": ""}
    return one.path | by_all == other.path | by_all and one.environment.device == other.environment.device


def _read_record(path: Path) -> BenchRecord:
    try:
        record = msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    except OSError as e:
        raise UsageError(
            f"{path}: {e.strerror}; name a bench-collectives.json, a bench-exchange.json, or a folder."
        ) from e
    except UNREADABLE as e:
        raise UsageError(
            f"{path} is no record of a bench ({e}); name a bench-collectives.json or a bench-exchange.json."
        ) from e
    if record.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"{path}: schema_version {record.schema_version}, while this dcpbench reads {SCHEMA_VERSION}; read it with the "
            "version that wrote it."
        )
    return record


def iter_samples(record: BenchRecord) -> Iterator[tuple[str, Sample]]:
    """Yield each timed call of a record with its name: medians of the slowest rank, in a CUDA graph; none for a CPU."""
    if record.bench not in BENCHES or not record.performance:
        return
    for result in record.results:
        time = result.graph.time if result.graph else None
        if time is not None and result.work is not None and result.outcome == "ok" and result.correct is not False:
            received = result.work.comm_bytes or result.work.received_bytes
            yield (
                result.case.variant,
                Sample(record.ranks, result.work.barriers, received, round(time.median_us, 2)),
            )


def collect_samples(records: Iterable[BenchRecord]) -> dict[str, list[Sample]]:
    """Return samples by call, in the order of ranks and sizes. Raise UsageError if records come from different GPUs."""
    records = list(records)
    devices = {r.environment.device for r in records if r.environment is not None and list(iter_samples(r))}
    if len(devices) > 1:
        raise UsageError(f"these benches ran on {' and '.join(sorted(devices))}; calibrate each kind of GPU by itself.")
    found: dict[str, list[Sample]] = {}
    for record in records:
        for name, sample in iter_samples(record):
            found.setdefault(name, []).append(sample)
    order = [*ACROSS, *sorted(found)]
    return {
        name: sorted(samples, key=lambda s: (s.ranks, s.received_bytes, s.us))
        for name, samples in sorted(found.items(), key=lambda item: order.index(item[0]))
    }


def find_missing_calls(calls: Collection[str]) -> dict[str, list[str]]:
    """Return by bench the calls that a machine needs and that were not measured."""
    found = {bench: [name for name in names if name not in calls] for bench, names in BENCHES.items()}
    return {bench: names for bench, names in found.items() if names}


def describe_hardware(records: Iterable[BenchRecord]) -> tuple[str, str]:
    """Return (the GPU's name in the table, or empty; hardware, NCCL and driver as text)."""
    descriptions: dict[str, None] = {}
    card = ""
    for record in records:
        e = record.environment
        if e is None or not list(iter_samples(record)):
            continue
        card = next((gpu.name for gpu in GPUS if gpu.device == e.device), "")
        descriptions[f"{record.ranks} × {e.device}, NCCL {e.nccl}, torch {e.torch}, {record.started_at[:10]}"] = None
    return card, "; ".join(descriptions)
