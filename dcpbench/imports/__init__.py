"""Results of other engines as a run, so that one report shows them beside ours.

Each is a record of its own, marked by origin, with samples where the moments of tokens are known.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import LayoutError, OutputError, RecordsError, UsageError
from dcpbench.imports import documents, inferencex, metrics, said, sglang, vllm
from dcpbench.imports.result import shapes_of
from dcpbench.launch.folders import locked
from dcpbench.plan.options import did_you_mean
from dcpbench.points.engines import engine_load, engine_point
from dcpbench.points.layout import DEGREES, Layout
from dcpbench.points.names import (
    CLOSED,
    ENGINES,
    GAMMA,
    INFERENCEX,
    SGLANG,
    TOOLS,
    UNKNOWN,
    VLLM,
    WHOLE,
    flag,
)
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.record import CPU, OURS, Environment, Record
from dcpbench.serving.load_words import MOST_TOKENS
from dcpbench.serving.samples import FOLDER, samples_name, write_samples
from dcpbench.show.text import counted, short

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.imports.result import Result, Shape
    from dcpbench.points.point import Point

READERS = {VLLM: vllm.read, SGLANG: sglang.read, INFERENCEX: inferencex.read}
"""What reads one document, by --from."""
KNOWN_BY = {
    VLLM: ("model_id", "num_prompts"),
    SGLANG: ("median_e2e_latency_ms", "dataset_name"),
    INFERENCEX: ("tput_per_gpu", "infmax_model_prefix"),
}
"""Fields that the others' files do not have."""
DETAILED = {VLLM: "--save-detailed", SGLANG: "--output-details"}
"""The option that keeps times of requests."""
WARM_UP = -1
"""Number of a sweep's run that only warms the server up."""
NUMBERED = re.compile(r"(?:run|rep|repeat|trial|iter|seed|pass)?[\W_]*\d[\d\W_T]*", re.IGNORECASE)
"""Folders of repeats: `run-2`, `20261121_101112`."""
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
    input_len: int | None = None
    output_len: int | None = None


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
    results, named = _completed([_read(document, engine) for document in kept], kept, engine, told)
    shapes = shapes_of(results, [(*_server(result), _load(result)) for result in results])
    results = _told_apart(results, shapes)
    points = _numbered([_point(r, shape, engine, told) for r, shape in zip(results, shapes, strict=True)])
    records = [_record(*one, engine, told) for one in zip(results, points, shapes, strict=True)]
    path = _write(list(zip(results, records, strict=True)), folder, force=force)
    return Imported(path, [*_sentences(records, engine), *named, *_unread(results), *left_out])


def _completed(
    results: Sequence[Result], kept: Sequence[Document], engine: str, told: Told
) -> tuple[list[Result], list[str]]:
    """The results with what the user says, else their names, of what their files do not; and what came from names."""
    found = []
    from_names: dict[str, list[str]] = {}
    several = len({Path(document.file).parent for document in kept}) > 1
    for result, document in zip(results, kept, strict=True):
        name = said.of_name(document.file)
        changes: dict[str, object] = {"device": said.device(told.gpu) if told.gpu else result.device}
        if told.dtype:
            changes["precision"] = {**result.precision, "weights_dtype": told.dtype}
        asked = (told.input_len or result.nominal[0], told.output_len or result.nominal[1])
        if (told.input_len or told.output_len) and (means := result.means()) and not result.plausible(asked):
            raise UsageError(
                f"{result.where}: requests had {means[0]:,.0f} tokens in and {means[1]:,.0f} out on average, which is not "
                "what --input-len and --output-len say."
            )
        if not any((*asked, *result.lengths)) and any(name.lengths) and result.plausible(name.lengths):
            asked = name.lengths
            from_names.setdefault(" in, ".join(str(n or UNKNOWN) for n in asked) + " out", []).append(document.file)
        changes["nominal"] = asked
        if told.tp is None and not result.layout and (layout := _named_layout(name, engine)):
            changes["layout"] = layout
            from_names.setdefault(str(Layout(**layout)), []).append(document.file)
        if not result.ep and (ranks := name.degrees.get("ep")):
            changes["ep"] = str(ranks)
            from_names.setdefault(f"ep{ranks}", []).append(document.file)
        folder = Path(document.file).parent.name
        if several and folder and not result.settings and not NUMBERED.fullmatch(folder):
            changes["hints"] = {**result.hints, "folder": short(folder)}
        found.append(dataclasses.replace(result, **changes))  # type: ignore[arg-type]
    read = "; ".join(f"{what} ({len(files):,} of {len(results):,})" for what, files in from_names.items())
    return found, [f"Read from names of files and folders: {read}."] if read else []


def _named_layout(name: said.Name, engine: str) -> dict[str, int]:
    """Empty where the name says no tp, or degrees that cannot be: then it means something else."""
    if engine == SGLANG and name.degrees.get("dp", 1) > 1:
        return {}  # inside tp or beside it, which no name says
    degrees = vllm.layout_of(name.degrees)
    try:
        return {name: getattr(Layout(**degrees), name) for name in degrees}
    except LayoutError:
        return {}


def _server(result: Result) -> tuple[object, ...]:
    """What a result was measured on, as far as it says."""
    parts = (result.layout.items(), result.precision.items(), result.settings.items())
    return (result.model, result.backend, result.device, result.ep, *map(tuple, parts))


def _load(result: Result) -> tuple[object, ...]:
    return (result.arrival, result.trace, result.request_rate, result.burstiness, result.concurrency)


def _told_apart(results: Sequence[Result], shapes: Sequence[Shape]) -> list[Result]:
    """The results with settings that tell servers apart: hardware where there are several, and hints that do.

    A hint does where results of one server and lengths have several of it, unless it is only the name of a load: then
    each result has its own, and each another load.
    """
    apart: list[dict[str, str]] = [{} for _ in results]
    if len({result.device for result in results}) > 1:
        apart = [{"gpu": result.device or UNKNOWN} for result in results]
    lines: dict[object, list[int]] = {}
    for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        lines.setdefault((_server(result), shape.prompts, shape.answers), []).append(i)
    for hint in dict.fromkeys(name for result in results for name in result.hints):
        for same in lines.values():
            values = [results[i].hints.get(hint, "") for i in same]
            loads = {_load(results[i]) for i in same}
            if len(set(values)) > 1 and (len(set(values)) < len(values) or len(loads) < len(values)):
                for i in (i for i, result in enumerate(results) if hint in result.hints):
                    apart[i][hint] = results[i].hints[hint]
                break
    return [dataclasses.replace(r, settings={**r.settings, **more}) for r, more in zip(results, apart, strict=True)]


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
    if engine == INFERENCEX and (what := inferencex.beyond(fields)):
        return what
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


def _looks_like(fields: dict[str, Any]) -> str:
    fields = inferencex.flat(fields)
    return next((engine for engine, names in KNOWN_BY.items() if any(name in fields for name in names)), "")


def _check_told(told: Told) -> None:
    for name in ("input_len", "output_len"):
        if (length := getattr(told, name)) is not None and not 1 <= length <= MOST_TOKENS:
            raise UsageError(f"{flag(name)} {length} is no length; try {flag(name)} 1024.")
    if told.tp is None:
        if given := [f"--{name}" for name in ("dp", "dcp") if getattr(told, name) is not None]:
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
        # a file that names no dcp may be of a version that has none, or of a server that was told by other means
        if result.layout and typed | ({} if result.layout["dcp"] > 1 else {"dcp": 1}) != result.layout:
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


def _experts(ep: str, tp: int) -> str:
    """As a point of an import has it: a number where the file says how many ranks there were."""
    return (str(tp) if tp else UNKNOWN) if ep == WHOLE else ep or UNKNOWN


def _point(result: Result, shape: Shape, engine: str, told: Told) -> Point:
    model = told.model or result.model
    if not model:
        raise UsageError(f"{result.where} names no model; add --model NAME.")
    layout = _layout(result, told)
    requests = result.submitted if result.submitted is not None else result.completed or 0
    return engine_point(
        model=model,
        layout=layout,
        ep=_experts(result.ep, layout["tp"]),
        concurrency=result.concurrency or max(requests, 1),
        context=shape.most,
        backend=result.backend or engine,
        precision=result.precision,
        load=engine_load(
            requests=requests,
            arrival=result.arrival,
            request_rate=result.request_rate,
            burstiness=result.burstiness,
            paced=None if result.arrival == GAMMA else False,
            input_tokens=shape.prompts,
            output_tokens=shape.answers,
            prefix_share=None,
            trace=result.trace,
            seed=None,
        ),
        settings=result.settings,
    )


def _numbered(points: Sequence[Point]) -> list[Point]:
    """Results of the same point are its repeats, in the order given."""
    seen: Counter[str] = Counter()
    found = []
    for point in points:
        found.append(msgspec.structs.replace(point, repeat=seen[point.key()]))
        seen[point.key()] += 1
    return found


def _record(result: Result, point: Point, shape: Shape, engine: str, told: Told) -> Record:
    detail = {"source": Path(result.where).name, **{name: text for name, text in result.facts.items() if text}}
    environment = Environment(device=result.device, device_count=point.tp) if result.device else None
    record = Record(point=point, outcome="failed", detail=detail, origin=engine, environment=environment)
    if not (result.rates.output if result.rates else result.completed and result.output_tokens):
        reason = f"no output token came; see {result.where} and the server's log."
        return msgspec.structs.replace(record, reason=reason)
    serve, marks = metrics.serve_metrics(result, point.tp)
    if metrics.rows(result) is not None:
        serve = msgspec.structs.replace(serve, samples_file=samples_name(point))
    if shape.nominal:
        marks = [*marks, metrics.NOMINAL]
    if told.gpu == CPU:
        marks = [*marks, "cpu"]
    return msgspec.structs.replace(record, outcome="ok", marks=marks, serve=serve, seconds=result.duration_s or 0.0)


def _write(found: Sequence[tuple[Result, Record]], folder: Path, *, force: bool) -> Path:
    """All files in a folder beside the run's, then into it, the records last."""
    path = folder / RECORDS_FILE
    if path.exists() and path.stat().st_size and not force:
        raise OutputError(f"{folder} already holds records; add --force to start over, or give another with -o.")
    with locked(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".import-") as name:
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
    say = [f"{counted(count, 'result')} of {TOOLS[engine]}."]
    if n := marks[metrics.SUMMARY_ONLY]:
        told = f" With details ({DETAILED[engine]}) ours are computed." if engine in DETAILED else ""
        say.append(f"{n} of {count} without times of requests: means and percentiles are the tool's own.{told}")
    if n := marks[metrics.NOMINAL]:
        say.append(
            f"{n} of {count} shown by the lengths asked for, while their requests were on average more than 5 % shorter "
            "or longer."
        )
    if n := marks[metrics.CHUNK_GAPS]:
        say.append(
            f"{n} of {count} with several tokens in a chunk: ITL is that of chunks there, and tok/s/user is absent."
        )
    if n := sum(not record.point.tp for record in records):
        say.append(
            f"{n} of {count} of a layout that nobody told: nothing is known per GPU. Say it with --tp, --dp, --dcp."
        )
    if any(r.point.load and r.point.load.arrival != CLOSED and r.serve and r.serve.ttft_ms.samples for r in records):
        say.append("TTFT of these open loops counts from when a request was sent, ours from when it was due.")
    return say


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
