"""Import results of other engines' benchmarks as runs, so that one report shows them with dcpbench's own.

Each result becomes a record with its origin, and with samples if the times of its tokens are known.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import LayoutError, OutputError, RecordsError, UsageError
from dcpbench.imports import aiperf, documents, field_names, identity, imported_metrics, notes, vllm
from dcpbench.imports.result import make_shapes
from dcpbench.imports.selection import read_result, select_measurements
from dcpbench.launch.folders import lock_folder
from dcpbench.plan.option_parsers import suggest_known
from dcpbench.points.engine_points import make_engine_load, make_engine_point
from dcpbench.points.instances import count_gpus
from dcpbench.points.layout import DEGREES, MAX_RANKS, OUTER_DEGREES, Layout
from dcpbench.points.names import AIPERF, ENGINES, GAMMA, MOE_EP, SGLANG, SGLANG_ONE_BATCH, UNKNOWN, format_flag
from dcpbench.records.disks import convert_output_errors
from dcpbench.records.file import RecordFile
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.records.record import CPU, Environment, Record, ServeMetrics
from dcpbench.serving.load_words import MAX_TOKENS
from dcpbench.serving.samples import FOLDER, make_samples_name, write_samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.imports.result import Result, Shape, Steps
    from dcpbench.points.point import Point

ALL_DEGREES = (*DEGREES, *OUTER_DEGREES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overrides:
    """Hold the user's options for facts that result files do not contain."""

    model: str | None = None
    tp: int | None = None
    dp: int | None = None
    dcp: int | None = None
    pp: int | None = None
    pcp: int | None = None
    gpu: str | None = None
    dtype: str | None = None
    input_len: int | None = None
    output_len: int | None = None

    @property
    def degrees(self) -> dict[str, int]:
        """Return the parallel degrees that were given, by name."""
        return {name: degree for name in ALL_DEGREES if (degree := getattr(self, name)) is not None}


@dataclasses.dataclass(frozen=True)
class Imported:
    """Describe the run that was made."""

    path: Path  # path of its record file
    notes: list[str]  # sentences about the import that a reader must know
    errors: list[RecordsError]  # results below a folder that could not be read, and were left out


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold a result with the metrics computed from it."""

    result: Result
    file: str
    serve: ServeMetrics | None  # none if no output token came
    warnings: list[str]
    from_name: list[str]  # texts of the facts that were read from the name of the file


def import_files(
    files: Iterable[Path], engine: str, output: Path | None, overrides: Overrides, *, force: bool = False
) -> Imported:
    """Make a run of result files. Everything is read before anything is written.

    A result below a folder that cannot be read is left out and returned as an error; the others are imported. Raises
    UsageError for an unknown engine and for options that cannot work, RecordsError for a named file that cannot be read
    and if no result is left, OutputError for a folder that cannot be written or already holds records.
    """
    if engine not in ENGINES:
        raise UsageError(f"--from {engine} is unknown{suggest_known(engine, ENGINES)}")
    folder = output or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-import-{engine}"
    check_overrides(overrides)
    gathered = documents.gather_documents(dict.fromkeys(files))
    if not gathered.documents:
        raise gathered.errors[0]
    if engine == AIPERF:
        gathered = dataclasses.replace(gathered, documents=aiperf.join_requests(gathered.documents))
    kept, left_out = select_measurements(gathered.documents, engine)
    readings, errors = _read_all(kept, engine, overrides)
    results = identity.add_name_hints([reading.file for reading in readings], [reading.result for reading in readings])
    shapes = make_shapes(results, [(*identity.identify_server(r), identity.identify_load(r)) for r in results])
    results = identity.add_server_settings(results, shapes)
    pairs = zip(results, shapes, strict=True)
    points = identity.number_repeats(_make_point(result, shape, engine, overrides) for result, shape in pairs)
    readings = [dataclasses.replace(own, result=result) for own, result in zip(readings, results, strict=True)]
    records = [_make_record(*one, engine) for one in zip(readings, points, shapes, strict=True)]
    path = _write_run(list(zip(results, records, strict=True)), folder, force=force)
    all_errors = [*gathered.errors, *errors]
    from_names: dict[str, list[str]] = {}
    for reading in readings:
        for text in reading.from_name:
            from_names.setdefault(text, []).append(reading.file)
    sentences = [
        *notes.describe_records(records, engine),
        *notes.describe_names(from_names, len(results)),
        *notes.describe_repeats(records, results),
        *notes.describe_unread(results),
        *left_out,
        *notes.describe_errors(all_errors),
    ]
    return Imported(path, sentences, all_errors)


def _read_all(kept: Sequence[Document], engine: str, overrides: Overrides) -> tuple[list[Reading], list[RecordsError]]:
    """Read all documents. Raise RecordsError for an unreadable file that was named, and if no result is left."""
    readings: list[Reading] = []
    errors: list[RecordsError] = []
    for document in kept:
        try:
            readings.append(_read_document(document, engine, overrides))
        except RecordsError as e:
            if not document.found:
                raise
            errors.append(e)
    if not readings:
        raise errors[0]
    return readings, errors


def _read_document(document: Document, engine: str, overrides: Overrides) -> Reading:
    """Read a document, complete it from the options and its name, and compute its metrics."""
    result, from_name = _add_missing(read_result(document, engine), document.file, engine, overrides)
    result = dataclasses.replace(result, layout=_choose_layout(result, overrides))
    if result.steps is not None:
        result = _count_replicas(result, result.steps)
    elif result.rates.output if result.rates else result.completed and result.output_tokens:
        serve, warnings = imported_metrics.compute_metrics(result, _count_all_gpus(result))
        return Reading(result, document.file, serve, warnings, from_name)
    return Reading(result, document.file, None, [], from_name)


def _count_replicas(result: Result, steps: Steps) -> Result:
    """Return timed steps with the requests of all replicas. Raise UsageError if file and layout differ in ranks."""
    if _count_all_gpus(result) != steps.ranks:
        given = f"and the options state {result.gpus}" if result.layout else "and no layout"
        raise UsageError(
            f"{result.where} has {steps.ranks} ranks, {given}; add --tp {steps.ranks}, with --dp and --dcp where they are not 1."
        )
    return dataclasses.replace(result, concurrency=(result.concurrency or 0) * result.layout["dp"])


def _count_all_gpus(result: Result) -> int:
    """Return the GPUs of all instances; 0 if the layout is unknown."""
    return count_gpus(result.gpus, result.disaggregate, result.prefill_gpus)


def _add_missing(result: Result, file: str, engine: str, overrides: Overrides) -> tuple[Result, list[str]]:
    """Return a result with what its file lacks, from the options or else from its name, and texts of the latter.

    Raise UsageError if lengths of the options contradict the file.
    """
    name = field_names.parse_name(file)
    from_name = []
    device = field_names.format_device(overrides.gpu) if overrides.gpu else result.device
    precision = {**result.precision, "weights_dtype": overrides.dtype} if overrides.dtype else result.precision
    nominal = (overrides.input_len or result.nominal[0], overrides.output_len or result.nominal[1])
    if (
        (overrides.input_len or overrides.output_len)
        and (means := result.compute_means())
        and not result.is_plausible(nominal)
    ):
        raise UsageError(
            f"{result.where}: requests had {means[0]:,.0f} tokens in and {means[1]:,.0f} out on average; leave out "
            "--input-len and --output-len, or give the requested lengths of these results."
        )
    if not any((*nominal, *result.lengths)) and any(name.lengths) and result.is_plausible(name.lengths):
        nominal = name.lengths
        from_name.append(" in, ".join(str(n or UNKNOWN) for n in nominal) + " out")
    layout = result.layout
    if not layout and not result.disaggregate and (layout := _complete_layout(name, engine, overrides)):
        from_name.append(str(Layout(**layout)))
    ep = result.ep
    if not ep and (ranks := name.degrees.get("ep")) and not name.several_instances:
        ep = str(ranks)
        from_name.append(f"ep{ranks}")
    return dataclasses.replace(
        result, device=device, precision=precision, nominal=nominal, layout=layout, ep=ep
    ), from_name


def _complete_layout(name: field_names.Name, engine: str, overrides: Overrides) -> dict[str, int]:
    """Return the layout of a name; empty if it has none, or if the options give a layout and the name adds nothing.

    With --tp, the name adds degrees that were not given, unless its own tp is another one.
    """
    named = read_named_layout(name, engine)
    if overrides.tp is None:
        return named
    if named and named["tp"] != overrides.tp:
        return {}
    given = overrides.degrees
    more = {degree: n for degree, n in name.degrees.items() if degree in ALL_DEGREES and degree not in given and n > 1}
    if engine == SGLANG or name.several_instances:
        more.pop("dp", None)
    if not more or name.several_instances:
        return {}
    combined = dict.fromkeys(ALL_DEGREES, 1) | more | given
    return combined if _is_valid_layout(combined) else {}


def read_named_layout(name: field_names.Name, engine: str) -> dict[str, int]:
    """Return the layout of a name; empty without tp, and for degrees that do not divide each other.

    A name such as `1p2d` describes several instances, of which it does not have all layouts. SGLang's dp lies inside tp or
    multiplies it; a name does not tell which, unless tp is 1.
    """
    degrees = name.degrees
    if name.several_instances or (
        engine in (SGLANG, SGLANG_ONE_BATCH) and degrees.get("dp", 1) > 1 and degrees.get("tp") != 1
    ):
        return {}
    layout = vllm.read_layout(degrees)
    return layout if layout and _is_valid_layout(layout) else {}


def _is_valid_layout(layout: Mapping[str, int]) -> bool:
    try:
        Layout(**{name: layout[name] for name in DEGREES})
    except LayoutError:
        return False
    return True


def check_overrides(overrides: Overrides) -> None:
    """Raise UsageError for options that cannot work."""
    for name in ("model", "gpu", "dtype"):
        if getattr(overrides, name) == "":
            raise UsageError(f"{format_flag(name)} is empty; write a name, or leave it out.")
    for name in ("input_len", "output_len"):
        if (length := getattr(overrides, name)) is not None and not 1 <= length <= MAX_TOKENS:
            raise UsageError(f"{format_flag(name)} {length} is no length; try {format_flag(name)} 1024.")
    for name in OUTER_DEGREES:  # which other commands have as keys of --stages
        if not 1 <= (degree := overrides.degrees.get(name, 1)) <= MAX_RANKS:
            raise UsageError(f"--{name} {degree} is not from 1 to {MAX_RANKS:,}; try --{name} 2.")
    if overrides.tp is not None:
        Layout(**overrides.degrees)  # raises LayoutError, which is a UsageError
    elif given := [f"--{name}" for name in overrides.degrees]:
        raise UsageError(f"{', '.join(given)} without --tp: add the number of GPUs, for example --tp 8.")


def _choose_layout(result: Result, overrides: Overrides) -> dict[str, int]:
    """Return the layout of the options, completed by that of the file or its name; empty if unknown.

    Raise UsageError if options and file contradict each other, RecordsError for a layout that no server can have.
    """
    if overrides.tp is None and not result.layout:
        return {}
    typed = overrides.degrees
    if any(_does_contradict(name, n, result) for name, n in typed.items()):
        listed = ", ".join(f"{name} {n}" for name, n in result.layout.items() if n > 1 or name in DEGREES)
        options = ", ".join(f"--{name}" for name in typed)
        raise UsageError(f"{result.where} has {listed}; leave {options} out, or import it by itself.")
    layout = dict.fromkeys(ALL_DEGREES, 1) | dict(result.layout) | typed
    try:
        Layout(**{name: layout[name] for name in DEGREES})
    except LayoutError as e:
        raise RecordsError(f"{result.where} has an impossible layout: {e}") from e
    for name in OUTER_DEGREES:
        if layout[name] > MAX_RANKS:
            raise RecordsError(f"{result.where} has {name} {layout[name]:,}, more ranks than a layout can have.")
    return layout


def _does_contradict(name: str, typed: int, result: Result) -> bool:
    """Return whether an option contradicts the degree of a file.

    A file without dcp, pp or pcp may be of a version that has none, or of a server that got them by other means. Rates per
    GPU are those of the GPUs in the file.
    """
    if not result.layout or typed == result.layout[name]:
        return False
    fixed = ("tp", "dp", *(OUTER_DEGREES if result.rates else ()))
    return name in fixed or result.layout[name] > 1


def _format_experts(result: Result) -> str:
    """Return the number of expert-parallel ranks as an imported point has it; `unknown` if the file does not have it."""
    if result.ep != MOE_EP:
        return result.ep or UNKNOWN
    return str(result.layout["tp"] * result.layout["pcp"]) if result.layout else UNKNOWN


def _make_point(result: Result, shape: Shape, engine: str, overrides: Overrides) -> Point:
    model = overrides.model or result.model
    if not model:
        raise UsageError(f"{result.where} names no model; add --model NAME.")
    requests = result.submitted if result.submitted is not None else result.completed or 0
    point = make_engine_point(
        model=model,
        layout=result.layout or dict.fromkeys(DEGREES, 0),
        ep=_format_experts(result),
        concurrency=result.concurrency or max(requests, 1),
        context=result.steps.context if result.steps else shape.longest,
        backend=result.backend or engine,
        precision=result.precision,
        load=make_engine_load(
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
        disaggregate=result.disaggregate,
        prefill_gpus=result.prefill_gpus if result.layout else 0,
    )
    return msgspec.structs.replace(point, workload="decode", load=None) if result.steps else point


def _make_record(reading: Reading, point: Point, shape: Shape, engine: str) -> Record:
    result, serve = reading.result, reading.serve
    detail = {"source": Path(result.where).name, **{name: text for name, text in result.facts.items() if text}}
    if imported_metrics.CHUNK_GAPS in reading.warnings and (tokens := imported_metrics.count_chunk_tokens(result)):
        detail["tokens_per_chunk"] = f"{tokens:.3g}"
    environment = Environment(device=result.device, device_count=point.gpus) if result.device else None
    record = Record(point=point, outcome="failed", detail=detail, origin=engine, environment=environment)
    if result.steps is not None:
        warnings = ["cpu"] if result.device == CPU else []
        metrics = compute_decode_metrics(list(result.steps.samples_ms), point.concurrency, result.steps.ranks)
        return msgspec.structs.replace(record, outcome="ok", warnings=warnings, metrics=metrics)
    if serve is None:
        reason = f"no output token came; see {result.where} and the server's log."
        return msgspec.structs.replace(record, reason=reason)
    if imported_metrics.make_rows(result) is not None:
        serve = msgspec.structs.replace(serve, samples_file=make_samples_name(point))
    more = {imported_metrics.NOMINAL: shape.nominal, "cpu": result.device == CPU}
    warnings = [*reading.warnings, *(warning for warning, is_set in more.items() if is_set)]
    return msgspec.structs.replace(
        record, outcome="ok", warnings=warnings, serve=serve, seconds=result.duration_s or 0.0
    )


def _write_run(found: Sequence[tuple[Result, Record]], folder: Path, *, force: bool) -> Path:
    """Write all files into a temporary folder inside `folder`, then move them into place, the records last."""
    path = folder / RECORDS_FILE
    if path.exists() and path.stat().st_size and not force:
        raise OutputError(f"{folder} already holds records; add --force to start over, or give another with -o.")
    with lock_folder(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".import-") as name:
        half = Path(name)
        for result, record in found:
            if (rows := imported_metrics.make_rows(result)) is not None and record.serve:
                write_samples(half, record.point, rows)
            RecordFile(half).append(record)
        with convert_output_errors(folder, "give another folder with -o"):
            if (half / FOLDER).exists():
                shutil.copytree(half / FOLDER, folder / FOLDER, dirs_exist_ok=True)
            (half / RECORDS_FILE).replace(path)
    return path
