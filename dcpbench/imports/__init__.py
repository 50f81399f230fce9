"""Results of other engines as a run, so that one report shows them beside ours.

Each is a record of its own, marked by origin, with samples where the moments of tokens are known.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import LayoutError, OutputError, RecordsError, UsageError
from dcpbench.imports import documents, metrics, sglang, vllm
from dcpbench.imports.result import shapes_of
from dcpbench.launch.folders import make_folder
from dcpbench.plan.options import did_you_mean
from dcpbench.points.layout import DEGREES, Layout
from dcpbench.points.names import CLOSED, ENGINES, NO_EXCHANGE, SGLANG, UNKNOWN, VLLM
from dcpbench.points.point import SETTING, Load, Point
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.record import CPU, OURS, Environment, Record
from dcpbench.serving.samples import FOLDER, samples_name, write_samples
from dcpbench.show.text import counted, short

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.imports.result import Result, Shape

READERS = {VLLM: vllm.read, SGLANG: sglang.read}
"""What reads one document, by --from."""
TOOLS = {VLLM: vllm.TOOL, SGLANG: sglang.TOOL}
"""What wrote it."""
KNOWN_BY = {VLLM: ("model_id", "num_prompts"), SGLANG: ("median_e2e_latency_ms", "dataset_name")}
"""Fields that the other engine's file does not have."""
DETAILED = {VLLM: "--save-detailed", SGLANG: "--output-details"}
"""The option that keeps times of requests."""
WARM_UP = -1
"""Number of a sweep's run that only warms the server up."""
MOST_NAMED = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What the user says of results that do not say it themselves."""

    model: str | None = None
    tp: int | None = None
    dp: int | None = None
    dcp: int | None = None
    gpu: str | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Imported:
    """The run that was made."""

    path: Path
    """Its record file."""
    notes: list[str]
    """What a reader must know."""


def import_files(
    files: Iterable[Path], engine: str, output: Path | None, told: Told, *, force: bool = False
) -> Imported:
    """Make a run of result files; a run that is whole, or none: everything is read before anything is written.

    Raises UsageError for an unknown engine and options that cannot be, RecordsError for a file that is not the
    engine's, OutputError for a folder that cannot be written or already holds records.
    """
    if engine not in ENGINES:
        raise UsageError(f"--from {engine} is unknown{did_you_mean(engine, ENGINES)}")
    folder = output or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-import-{engine}"
    _check_told(told)
    kept, left_out = _measurements(documents.gather(dict.fromkeys(files)), engine)
    results = [_read(document, engine) for document in kept]
    both = zip(results, shapes_of(results), strict=True)
    points = _numbered([_point(result, shape, engine, told) for result, shape in both])
    records = [_record(r, p, engine, told) for r, p in zip(results, points, strict=True)]
    path = _write(list(zip(results, records, strict=True)), folder, force=force)
    return Imported(path, [*_sentences(records, engine), *_unread(results), *left_out])


def _measurements(found: Sequence[Document], engine: str) -> tuple[list[Document], list[str]]:
    """The documents that are a measurement of their own, and a sentence for each kind of those that are not.

    Raises RecordsError where none is.
    """
    alone = {_numbers(document.fields) for document in found if not document.listed}
    kept: list[Document] = []
    others: dict[str, list[Document]] = {}
    for document in found:
        what = _instead(document, engine, alone)
        (others.setdefault(what, []) if what else kept).append(document)
    left_out = [f"Left out, {what}: {_few(dict.fromkeys(d.file for d in those))}." for what, those in others.items()]
    if not kept:
        for document in others.get(_other(engine), [])[:1]:
            _read(document, engine)  # says what it is instead
        raise RecordsError(f"{found[0].where}: no result of {TOOLS[engine]} was found. {' '.join(left_out)}")
    return kept, left_out


def _instead(document: Document, engine: str, alone: Collection[frozenset[tuple[str, object]]]) -> str:
    """What a document is that is no measurement of its own; empty for one that is, and for a file that was named."""
    fields = document.fields
    if "error_type" in fields:
        return "runs of the sweep that failed"
    if fields.get("run_number") == WARM_UP:
        return "warm-ups"
    if document.listed and _numbers(fields) in alone:
        return "summaries of results that have files of their own"
    if document.found and (_looks_like(fields) != engine or _is_ours(fields)):
        return _other(engine)
    return ""


def _numbers(fields: dict[str, Any]) -> frozenset[tuple[str, object]]:
    """What two results cannot have in common, as all their times are among it."""
    return frozenset((name, value) for name, value in fields.items() if isinstance(value, str | int | float))


def _other(engine: str) -> str:
    return f"no result of {TOOLS[engine]}"


def _read(document: Document, engine: str) -> Result:
    fields = document.fields
    if "schema_version" in fields and "point" in fields:
        raise RecordsError(f"{document.where} is a record of dcpbench; no import is needed: dcpbench report RUN.")
    if _is_ours(fields):
        raise RecordsError(
            f"{document.where} was exported by dcpbench, not measured by {engine}; report the run that it came from."
        )
    other = _looks_like(fields)
    if other not in (engine, ""):
        raise RecordsError(f"{document.where} looks like a result of {other}; import it with --from {other}.")
    if not other:
        raise RecordsError(
            f"{document.where} is no result of {TOOLS[engine]}: it has none of the fields by which one is known "
            f"({', '.join(KNOWN_BY[engine])})."
        )
    try:
        return READERS[engine](document)
    except RecursionError as e:
        raise RecordsError(f"{document.where} is nested too deeply, and so no result of {TOOLS[engine]}.") from e


def _is_ours(fields: dict[str, Any]) -> bool:
    return str(fields.get("backend", "")).startswith(OURS)


def _looks_like(fields: dict[str, object]) -> str:
    return next((engine for engine, names in KNOWN_BY.items() if any(name in fields for name in names)), "")


def _check_told(told: Told) -> None:
    if told.tp is None:
        if given := [f"--{name}" for name in ("dp", "dcp", "gpu") if getattr(told, name) is not None]:
            raise UsageError(f"{', '.join(given)} without --tp: say how many GPUs there were, for example --tp 8.")
        return
    for name in DEGREES:
        if (getattr(told, name) or 1) < 1:
            raise UsageError(f"--{name} {getattr(told, name)} is not positive; try --{name} 1.")
    try:
        Layout(tp=told.tp, dp=told.dp or 1, dcp=told.dcp or 1)
    except LayoutError as e:
        raise UsageError(str(e)) from e


def _layout(result: Result, told: Told) -> dict[str, int]:
    """As the user says, else as the file does, else unknown. Raises UsageError where the two contradict each other.

    And RecordsError for a layout of the file that nothing can have run on.
    """
    if told.tp is not None:
        typed = {"tp": told.tp, "dp": told.dp or 1, "dcp": told.dcp or 1}
        if result.layout and typed != result.layout:
            says = ", ".join(f"{name} {degree}" for name, degree in result.layout.items())
            raise UsageError(f"{result.where} says {says}; leave --tp, --dp and --dcp out, or import it by itself.")
        return typed
    if not result.layout:
        return dict.fromkeys(DEGREES, 0)
    try:
        Layout(**result.layout)
    except LayoutError as e:
        raise RecordsError(f"{result.where} says a layout that cannot be, in our degrees: {e}") from e
    return dict(result.layout)


def _point(result: Result, shape: Shape, engine: str, told: Told) -> Point:
    model = told.model or result.model
    if not model:
        raise UsageError(f"{result.where} names no model; add --model NAME.")
    layout = _layout(result, told)
    requests = result.submitted if result.submitted is not None else result.completed
    return Point(
        model=model,
        tp=layout["tp"],
        dp=layout["dp"],
        dcp=layout["dcp"],
        workload="serve",
        concurrency=result.concurrency or max(requests, 1),
        context=shape.most,
        exchange=NO_EXCHANGE if layout["dcp"] == 1 else UNKNOWN,
        all_reduce=UNKNOWN,
        backend=engine,
        dtype=told.dtype or UNKNOWN,
        page_size=0,
        interleave=0,
        weights=UNKNOWN,
        load=Load(
            requests=requests,
            arrival=result.arrival,
            request_rate=result.request_rate,
            burstiness=result.burstiness,
            input_tokens=shape.prompts,
            output_tokens=shape.answers,
            prefix_share=None,
            trace=result.trace,
            chunk=0,
            policy=UNKNOWN,
            prefix_cache=None,
            prefill=UNKNOWN,
            seed=None,
        ),
        settings=SETTING.join(f"{name}={value}" for name, value in result.settings.items()),
    )


def _numbered(points: Sequence[Point]) -> list[Point]:
    """Results of the same point are its repeats, in the order given."""
    seen: Counter[str] = Counter()
    found = []
    for point in points:
        found.append(msgspec.structs.replace(point, repeat=seen[point.key()]))
        seen[point.key()] += 1
    return found


def _record(result: Result, point: Point, engine: str, told: Told) -> Record:
    detail = {"source": Path(result.where).name, **{name: text for name, text in result.facts.items() if text}}
    environment = Environment(device=told.gpu, device_count=point.tp) if told.gpu else None
    record = Record(point=point, outcome="failed", detail=detail, origin=engine, environment=environment)
    if not result.completed or not result.output_tokens:
        reason = f"no output token came; see {result.where} and the server's log."
        return msgspec.structs.replace(record, reason=reason)
    serve, marks = metrics.serve_metrics(result, point.tp)
    if metrics.rows(result) is not None:
        serve = msgspec.structs.replace(serve, samples_file=samples_name(point))
    if told.gpu == CPU:
        marks = [*marks, "cpu"]
    return msgspec.structs.replace(record, outcome="ok", marks=marks, serve=serve, seconds=result.duration_s)


def _write(found: Sequence[tuple[Result, Record]], folder: Path, *, force: bool) -> Path:
    """All files in a folder beside the run's, then into it, the records last."""
    path = folder / RECORDS_FILE
    if path.exists() and path.stat().st_size and not force:
        raise OutputError(f"{folder} already holds records; add --force to start over, or give another with -o.")
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".import-") as name:
        half = Path(name)
        for result, record in found:
            if (rows := metrics.rows(result)) is not None and record.serve:
                write_samples(half, record.point, rows)
            RecordFile(half).append(record)
        try:
            if (half / FOLDER).exists():
                shutil.copytree(half / FOLDER, folder / FOLDER, dirs_exist_ok=True)
            (half / RECORDS_FILE).replace(path)
        except OSError as e:
            raise OutputError(f"{folder} cannot be written ({e.strerror}); give another folder with -o.") from e
    return path


def _sentences(records: Sequence[Record], engine: str) -> list[str]:
    marks = Counter(mark for record in records for mark in record.marks)
    count = len(records)
    said = [f"{counted(count, 'result')} of {TOOLS[engine]}."]
    if n := marks[metrics.SUMMARY_ONLY]:
        said.append(
            f"{n} of {count} without times of requests: means and percentiles are the tool's own. With details "
            f"({DETAILED[engine]}) ours are computed."
        )
    if n := marks[metrics.CHUNK_GAPS]:
        said.append(
            f"{n} of {count} with several tokens in a chunk: ITL is that of chunks there, and tok/s/user is absent."
        )
    if n := sum(not record.point.tp for record in records):
        said.append(
            f"{n} of {count} of a layout that nobody told: nothing is known per GPU. Say it with --tp, --dp, --dcp."
        )
    if any(r.point.load and r.point.load.arrival != CLOSED and r.serve and r.serve.ttft_ms.samples for r in records):
        said.append("TTFT of these open loops counts from when a request was sent, ours from when it was due.")
    return said


def _unread(results: Sequence[Result]) -> list[str]:
    """Names the fields that are not read, and in how many results they are."""
    counts = Counter(name for result in results for name in result.unread)
    if not counts:
        return []
    names = _few([f"{name} (in {n:,} of {len(results):,})" for name, n in counts.items()])
    return [f"Not read, as no field of ours means the same: {names}."]


def _few(these: Iterable[str]) -> str:
    """The first of them, inert and short, and how many more there are."""
    names = list(these)
    shown = ", ".join(short(name) for name in names[:MOST_NAMED])
    return shown + (f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else "")
