"""Makes a run folder of results: each a record of its own, marked by origin, with samples where there are moments."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.choices import CLOSED, NO_EXCHANGE, SGLANG, UNKNOWN, VLLM
from dcpbench.errors import LayoutError, OutputError, RecordsError, UsageError
from dcpbench.folders import make_folder
from dcpbench.imports import documents, metrics, sglang, vllm
from dcpbench.layout import Layout
from dcpbench.provenance import CPU, OURS
from dcpbench.records import RECORDS_FILE, Environment, Point, Record, RecordFile
from dcpbench.serve_records import Load
from dcpbench.serving.samples import FOLDER, samples_name, write_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.imports import Told
    from dcpbench.imports.documents import Document
    from dcpbench.imports.result import Result

READERS = {VLLM: vllm.read, SGLANG: sglang.read}
"""What reads one document, by --from."""
TOOLS = {VLLM: vllm.TOOL, SGLANG: sglang.TOOL}
"""What wrote it."""


def make(files: Sequence[Path], engine: str, folder: Path, told: Told, *, force: bool) -> tuple[Path, list[str]]:
    """Read everything, then write it; returns the record file and what to say. Errors as of `import_files`."""
    _check_told(told)
    results = [_read(document, engine) for path in files for document in documents.read(path)]
    points = _numbered([_point(result, engine, told) for result in results])
    records = [_record(r, p, engine, told) for r, p in zip(results, points, strict=True)]
    return _write(list(zip(results, records, strict=True)), folder, force=force), _sentences(records, engine)


def _read(document: Document, engine: str) -> Result:
    fields = document.fields
    if "schema_version" in fields and "point" in fields:
        raise RecordsError(f"{document.where} is a record of dcpbench; no import is needed: dcpbench report RUN.")
    if str(fields.get("backend", "")).startswith(OURS):
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
    return READERS[engine](document)


KNOWN_BY = {VLLM: ("model_id", "num_prompts"), SGLANG: ("median_e2e_latency_ms", "dataset_name")}
"""Fields that the other engine's file does not have."""


def _looks_like(fields: dict[str, object]) -> str:
    return next((engine for engine, names in KNOWN_BY.items() if any(name in fields for name in names)), "")


def _check_told(told: Told) -> None:
    if told.tp is None:
        if given := [f"--{name}" for name in ("dp", "dcp", "gpu") if getattr(told, name) is not None]:
            raise UsageError(f"{', '.join(given)} without --tp: say how many GPUs there were, for example --tp 8.")
        return
    for name in ("tp", "dp", "dcp"):
        if (getattr(told, name) or 1) < 1:
            raise UsageError(f"--{name} {getattr(told, name)} is not positive; try --{name} 1.")
    try:
        Layout(tp=told.tp, dp=told.dp or 1, dcp=told.dcp or 1)
    except LayoutError as e:
        raise UsageError(str(e)) from e


def _layout(result: Result, told: Told) -> dict[str, int]:
    """As the user says, else as the file does, else unknown. Raises UsageError where the two contradict each other."""
    if told.tp is None:
        return _nested(result) if result.layout else {"tp": 0, "dp": 0, "dcp": 0}
    typed = {"tp": told.tp, "dp": told.dp or 1, "dcp": told.dcp or 1}
    if result.layout and typed != result.layout:
        says = ", ".join(f"{name} {degree}" for name, degree in result.layout.items())
        raise UsageError(f"{result.where} says {says}; leave --tp, --dp and --dcp out, or import it by itself.")
    return typed


def _nested(result: Result) -> dict[str, int]:
    """The file's layout. Raises RecordsError for one that nothing can have run on."""
    try:
        Layout(**result.layout)
    except LayoutError as e:
        raise RecordsError(f"{result.where} says a layout that cannot be, in our degrees: {e}") from e
    return dict(result.layout)


def _point(result: Result, engine: str, told: Told) -> Point:
    model = told.model or result.model
    if not model:
        raise UsageError(f"{result.where} names no model; add --model NAME.")
    layout = _layout(result, told)
    inputs, outputs, context = _lengths(result)
    requests = result.submitted if result.submitted is not None else result.completed
    return Point(
        model=model, tp=layout["tp"], dp=layout["dp"], dcp=layout["dcp"], workload="serve",
        concurrency=result.concurrency or max(requests, 1), context=context,
        exchange=UNKNOWN if layout["dcp"] > 1 else NO_EXCHANGE, all_reduce=UNKNOWN, backend=engine,
        dtype=told.dtype or UNKNOWN, page_size=0, interleave=0, weights=UNKNOWN,
        load=Load(
            requests=requests, arrival=result.arrival, request_rate=result.request_rate, burstiness=result.burstiness,
            input_tokens=inputs, output_tokens=outputs, trace=result.trace, chunk=0, policy=UNKNOWN, prefill=UNKNOWN,
        ),
    )  # fmt: skip


def _lengths(result: Result) -> tuple[str, str, int]:
    """Lengths of prompts and answers as a load has them, and the most tokens of a request, 0 where nobody knows."""
    details = result.details
    if details is not None and (done := details.finished()):
        inputs, outputs = ([lens[i] for i in done] for lens in (details.input_lens, details.output_lens))
        most = max(a + b for a, b in zip(inputs, outputs, strict=True))
        return _spec(inputs), _spec(outputs), most
    if result.lengths:
        return str(result.lengths[0]), str(result.lengths[1]), sum(result.lengths)
    if not result.completed:
        return UNKNOWN, UNKNOWN, 0
    inputs_s, outputs_s = (f"mean:{n / result.completed:.0f}" for n in (result.input_tokens, result.output_tokens))
    return inputs_s, outputs_s, 0


def _spec(lengths: list[int]) -> str:
    return str(lengths[0]) if len(set(lengths)) == 1 else f"mean:{sum(lengths) / len(lengths):.0f}"


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
    if not result.completed or not result.output_tokens:
        reason = f"no output token came; see {result.where} and the server's log."
        return Record(
            point=point, outcome="failed", reason=reason, detail=detail, origin=engine, environment=environment
        )
    serve, marks = metrics.serve_metrics(result, point.tp)
    rows = metrics.rows(result.details) if result.details is not None else None
    if rows is not None:
        serve = msgspec.structs.replace(serve, samples_file=samples_name(point))
    if told.gpu == CPU:
        marks = [*marks, "cpu"]
    return Record(
        point=point, outcome="ok", detail=detail, marks=marks, serve=serve, environment=environment,
        seconds=result.duration_s, origin=engine,
    )  # fmt: skip


def _write(found: Sequence[tuple[Result, Record]], folder: Path, *, force: bool) -> Path:
    """All files in a folder beside the run's, then into it, the records last."""
    path = folder / RECORDS_FILE
    if path.exists() and path.stat().st_size and not force:
        raise OutputError(f"{folder} already holds records; add --force to start over, or give another with -o.")
    make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".import-") as name:
        half = Path(name)
        for result, record in found:
            if record.serve and record.serve.samples_file and result.details is not None:
                write_samples(half, record.point, metrics.rows(result.details) or [])
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
    said = [f"{count} result{'s' if count > 1 else ''} of {TOOLS[engine]}."]
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


DETAILED = {VLLM: "--save-detailed", SGLANG: "--output-details"}
"""The option that keeps them."""
