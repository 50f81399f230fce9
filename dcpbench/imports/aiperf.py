"""Read what AIPerf writes into its artifact folder: profile_export_aiperf.json, and profile_export.jsonl with a record per request.

Fields are those of ai-dynamo/aiperf, docs/tutorials/working-with-profile-exports.md, docs/reference/json-export-schema.md and
src/aiperf/config/phases.py. Its `input_config` has the load in `loadgen`, or, in later versions, in the entry of `phases` that is
measured. Its `inter_token_latency` is (request latency - TTFT) / (output tokens - 1) of a request, which is TPOT; its `inter_chunk_latency` are the
gaps. Each value names its unit.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.errors import RecordsError
from dcpbench.imports import result
from dcpbench.imports.documents import Document
from dcpbench.imports.result import EVEN, Details, Result
from dcpbench.imports.vllm import read_summary
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import AIPERF, CLOSED, GAMMA, OPENAI, TOOLS, TRACE, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.records.record import Latencies

RECORDS = "records"  # field into which the lines of profile_export.jsonl are joined
PROFILING = "profiling"  # phase of the requests that are measured; others warm the server up
NAMES = {
    "ttft": "time_to_first_token",
    "itl": "inter_chunk_latency",
    "tpot": "inter_token_latency",
    "e2el": "request_latency",
}
MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3}  # milliseconds of a unit
RATES = ("poisson", "gamma", "constant")  # arrivals at a rate, the first by default; `gamma` has a smoothness
CONCURRENCY, FIXED_SCHEDULE = "concurrency", "fixed_schedule"  # a closed loop, and requests at the times of a file


def join_requests(documents: Sequence[Document]) -> list[Document]:
    """Return the documents with the records of requests in one folder joined into one, with the folder's summary if it is there."""
    requests: dict[str, list[Document]] = collections.defaultdict(list)
    found: list[Document] = []
    for document in documents:
        if _is_request(document.fields):
            requests[_get_folder(document)].append(document)
        else:
            found.append(document)
    for folder, lines in requests.items():
        records = [line.fields for line in lines]
        summaries = [i for i, d in enumerate(found) if _get_folder(d) == folder and is_summary(d.fields)]
        if len(summaries) == 1:
            summary = found[summaries[0]]
            found[summaries[0]] = dataclasses.replace(summary, fields={**summary.fields, RECORDS: records})
        else:
            where = lines[0].file or lines[0].where
            found.append(dataclasses.replace(lines[0], where=where, fields={RECORDS: records}))
    return found


def is_summary(fields: Mapping[str, Any]) -> bool:
    """Return whether a document is a summary of AIPerf."""
    return isinstance(fields.get("request_latency"), dict) and isinstance(fields.get("request_count"), dict)


def _is_request(fields: Mapping[str, Any]) -> bool:
    metadata = fields.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and "metrics" in fields


def _get_folder(document: Document) -> str:
    return str(Path(document.file or document.where).parent)


def read(document: Document) -> Result:
    """Read one run. Raise RecordsError for a document of another tool."""
    fields = document.fields
    details = _read_details(document)
    if not is_summary(fields) and details is None:
        raise RecordsError(
            f"{document.where} is not what {TOOLS[AIPERF]} writes: no request_latency and request_count."
        )
    config = result.get_table(fields, "input_config")
    completed = _get_number(document, "request_count") if is_summary(fields) else None
    failed = _get_number(document, "error_request_count")
    if details is not None:
        completed, failed = len(details.list_finished()), sum(map(bool, details.errors))
    done = round(completed or 0)
    load, settings = _read_load(document, config), {}
    if load is None:
        if details is None:
            raise RecordsError(
                f"{document.where} states neither a concurrency nor a request rate of the measured requests; add the "
                "profile_export.jsonl of that run to its folder, which shows how many were in flight."
            )
        load, settings = Load(CLOSED, details.count_max_in_flight()), {"load": UNKNOWN}
    endpoint = result.get_table(config, "endpoint")
    urls = found if isinstance(found := endpoint.get("urls"), list) else []
    return Result(
        where=document.where,
        model=result.read_model(_find_model(config), document.where),
        backend=OPENAI,
        arrival=load.arrival,
        request_rate=load.rate,
        burstiness=load.burstiness,
        concurrency=load.concurrency,
        trace=load.trace,
        submitted=None if failed is None else done + round(failed),
        completed=done,
        failed=None if failed is None else round(failed),
        duration_s=_read_duration(document, done),
        input_tokens=_sum_tokens(document, "total_isl", "input_sequence_length", done),
        output_tokens=_sum_tokens(document, "total_osl", "output_sequence_length", done),
        lengths=(_find_length(document, "input_sequence_length"), _find_length(document, "output_sequence_length")),
        summary={ours: _summarize(document, ours, theirs, done) for ours, theirs in NAMES.items()},
        settings=settings,
        facts={"url": str(endpoint.get("url") or next(iter(urls), "")), "start": str(fields.get("start_time") or "")},
        details=details,
    )


@dataclasses.dataclass(frozen=True)
class Load:
    """Hold how requests were sent."""

    arrival: str
    concurrency: int | None  # clients of a closed loop, or the maximum number of requests in flight
    rate: float | None = None
    burstiness: float = 1.0
    trace: str = ""


def _read_load(document: Document, config: Mapping[str, Any]) -> Load | None:
    """Return the load of the measured requests; None if the configuration does not have it.

    The results of one of several measured phases lie in a folder with its name.

    Raise RecordsError for several measured phases, because the summary mixes their requests, and for a phase that a load cannot hold.
    """
    if not (phases := _list_tables(config.get("phases"))):
        sent, given = result.get_table(config, "loadgen"), result.get_table(config, "input")
        if not (sent.get("concurrency") or sent.get("request_rate") or given.get("fixed_schedule")):
            return None
        pattern = sent.get("arrival_pattern") or sent.get("request_rate_mode") or RATES[0]
        kind = FIXED_SCHEDULE if given.get("fixed_schedule") else pattern if sent.get("request_rate") else CONCURRENCY
        phase = {"type": kind, "rate": sent.get("request_rate"), "smoothness": sent.get("arrival_smoothness")}
        return _read_phase(document.where, phase | {"concurrency": sent.get("concurrency")}, given.get("file"))
    measured = [p for p in phases if (p.get("kind") or p.get("name") or PROFILING) == PROFILING]
    if len(measured) > 1:
        folder = Path(_get_folder(document)).name
        measured = [p for p in measured if p.get("name") == folder]
        if len(measured) != 1:
            raise RecordsError(
                f"{document.where} mixes several measured phases; import the results of each phase, below phases/, by themselves."
            )
    trace = next((dataset.get("path") for dataset in _list_tables(config.get("datasets"))), None)
    return _read_phase(document.where, measured[0], trace) if measured else None


def _list_tables(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list, or of an object with a name for each."""
    if isinstance(value, dict):
        return [{"name": name, **entry} for name, entry in value.items() if isinstance(entry, dict)]
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _read_phase(where: str, phase: Mapping[str, Any], trace: object) -> Load:
    """Return the load of a phase; `trace` is the path of the file with times. A concurrency that is not stated is 1."""
    kind, clients = phase.get("type"), result.read_integer(phase.get("concurrency"))
    if kind == FIXED_SCHEDULE:
        return Load(TRACE, clients, trace=Path(str(trace or "trace")).name)
    if kind in RATES and (rate := _read_rate(phase.get("rate"))) is not None:
        shape = EVEN if kind == "constant" else min(_read_rate(phase.get("smoothness")) or 1.0, EVEN)
        return Load(GAMMA, clients, rate, shape)
    if kind == CONCURRENCY:
        return Load(CLOSED, clients or 1)
    raise RecordsError(
        f"{where}: the measured phase of type {str(kind)[:40]} has neither one concurrency nor one rate, so that a point cannot "
        "hold it; import runs of --concurrency, --request-rate or --fixed-schedule."
    )


def _read_rate(rate: object) -> float | None:
    if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= MAX_NUMBER:
        return float(rate)
    return None


def _find_model(config: Mapping[str, Any]) -> object:
    """Return the first model, which earlier versions name in `endpoint`, and later ones in `models`."""
    names = result.get_table(config, "endpoint").get("model_names")
    known = [entry.get("name") for entry in _list_tables(result.get_table(config, "models").get("items"))]
    return next(iter(known or (names if isinstance(names, list) else ())), None)


def _get_number(document: Document, name: str, statistic: str = "avg") -> float | None:
    """Return a statistic of a metric, times in ms; None if the file does not have it. Raise RecordsError for another value."""
    metric = document.fields.get(name)
    if not isinstance(metric, dict) or metric.get(statistic) is None:
        return None
    return _convert(document.where, name, metric[statistic], metric.get("unit"))


def _convert(where: str, name: str, value: object, unit: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise RecordsError(f"{where}: {name} is {str(value)[:40]}, which is no number of a measurement. Run it again.")
    if name in (*NAMES.values(), "benchmark_duration") and str(unit) not in MS:
        raise RecordsError(f"{where}: {name} is in {str(unit)[:40]}, and a time is in one of {', '.join(MS)}.")
    return float(value) * MS.get(str(unit), 1.0)


def _read_duration(document: Document, completed: int) -> float | None:
    """Return the duration in s, or what follows from the rate of requests."""
    duration_ms, rate = _get_number(document, "benchmark_duration"), _get_number(document, "request_throughput")
    if duration_ms is not None:
        return duration_ms / 1e3
    return completed / rate if rate else None


def _sum_tokens(document: Document, total: str, mean: str, completed: int) -> int:
    found = _get_number(document, total)
    return round(found if found is not None else (_get_number(document, mean) or 0.0) * completed)


def _find_length(document: Document, name: str) -> str | None:
    """Return the length of all prompts or answers if they have the same one."""
    low, high = (_get_number(document, name, statistic) for statistic in ("min", "max"))
    return str(round(low)) if low is not None and low == high and low >= 1 else None


def _summarize(document: Document, ours: str, theirs: str, completed: int) -> Latencies:
    words = {"mean": "avg", "median": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
    numbers = {word: _get_number(document, theirs, statistic) for word, statistic in words.items()}
    times = {f"{word}_{ours}_ms": value for word, value in numbers.items() if value is not None}
    return read_summary(Document(document.where, times), ours, completed)


def _read_details(document: Document) -> Details | None:
    """Return the lists with an entry per measured request; None without records of requests."""
    records = document.fields.get(RECORDS)
    if not isinstance(records, list) or not all(isinstance(r, dict) and _is_request(r) for r in records):
        return None
    measured = [r for r in records if r["metadata"].get("benchmark_phase", PROFILING) == PROFILING]
    starts = [r["metadata"]["request_start_ns"] for r in measured]
    if not measured or not all(isinstance(ns, int) for ns in starts):
        raise RecordsError(f"{document.where} holds no request that was measured, or one without its start.")
    return Details(
        input_lens=[round(_read_value(document, r, "input_sequence_length")) for r in measured],
        output_lens=[round(_read_value(document, r, "output_sequence_length")) for r in measured],
        ttfts=[_read_value(document, r, NAMES["ttft"]) / 1e3 for r in measured],
        itls=[[gap / 1e3 for gap in _read_values(document, r, NAMES["itl"])] for r in measured],
        errors=[_read_error(r) for r in measured],
        latencies=[_read_value(document, r, NAMES["e2el"]) / 1e3 for r in measured],
        start_times=[(ns - min(starts)) / 1e9 for ns in starts],
    )


def _read_error(record: Mapping[str, Any]) -> str:
    error = record.get("error")
    return "" if error is None else str(error.get("type") or "error") if isinstance(error, dict) else str(error)


def _read_value(document: Document, record: Mapping[str, Any], name: str) -> float:
    """Return a value of a request, times in ms; 0 if it has none, as after a failure."""
    return next(iter(_read_values(document, record, name)), 0.0)


def _read_values(document: Document, record: Mapping[str, Any], name: str) -> list[float]:
    metrics = record.get("metrics")
    metric = metrics.get(name) if isinstance(metrics, dict) else None
    if not isinstance(metric, dict):
        return []
    value = metric.get("value")
    return [
        _convert(document.where, name, v, metric.get("unit")) for v in (value if isinstance(value, list) else [value])
    ]
