"""Select the documents that are measurements of a tool, and explain what the others are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.errors import RecordsError
from dcpbench.imports import aiperf, forward, guidellm, inferencex, one_batch, sglang, vllm
from dcpbench.points.names import AIPERF, GUIDELLM, INFERENCEX, SGLANG, SGLANG_ONE_BATCH, TOOLS, VLLM, VLLM_FORWARD
from dcpbench.records.record import OURS
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.imports.result import Result

READERS = {  # functions that read one document, by --from
    VLLM: vllm.read,
    SGLANG: sglang.read,
    INFERENCEX: inferencex.read,
    GUIDELLM: guidellm.read,
    AIPERF: aiperf.read,
    VLLM_FORWARD: forward.read,
    SGLANG_ONE_BATCH: one_batch.read,
}
RECOGNISED_BY = {  # fields that the files of the other tools do not have
    VLLM: ("model_id", "num_prompts"),
    SGLANG: ("median_e2e_latency_ms", "dataset_name"),
    INFERENCEX: ("tput_per_gpu", "infmax_model_prefix"),
    GUIDELLM: ("scheduler_metrics", "scheduler_state", guidellm.EARLIER),
    AIPERF: ("inter_token_latency", "output_sequence_length", "benchmark_duration", "records"),
    VLLM_FORWARD: ("median_us",),
    SGLANG_ONE_BATCH: ("prefill_latency", "overall_throughput"),
}
WARM_UP = -1  # number of a sweep's run that only warms the server up
MAX_NAMED = 5  # names in a sentence


def select_measurements(documents: Sequence[Document], engine: str) -> tuple[list[Document], list[str]]:
    """Return the documents that are measurements of their own, and a sentence for each kind of the others.

    Raise RecordsError if there is no measurement.
    """
    alone = {_collect_numbers(document.fields) for document in documents if not document.listed}
    kept: list[Document] = []
    others: dict[str, list[Document]] = {}
    for document in documents:
        kind = _classify(document, engine, alone)
        (others.setdefault(kind, []) if kind else kept).append(document)
    partly = {document.file for document in kept}  # files of which other entries are kept
    left_out = [
        f"Left out, {kind}: {format_first(dict.fromkeys(d.where if d.file in partly else d.file for d in those))}."
        for kind, those in others.items()
    ]
    if not kept:
        for document in others.get(_describe_other(engine), [])[:1]:
            read_result(document, engine)  # raises the error that names the actual kind of the document
        raise RecordsError(f"{documents[0].where}: no result of {TOOLS[engine]} was found. {' '.join(left_out)}")
    return kept, left_out


def _classify(document: Document, engine: str, alone: Collection[frozenset[tuple[str, object]]]) -> str:
    """Return the kind of a document that is not a measurement; empty for a measurement, and for a file that was named."""
    fields = document.fields
    if "error_type" in fields:
        return "runs of the sweep that failed"
    if fields.get("run_number") == WARM_UP:
        return "warm-ups"
    if engine == INFERENCEX and _find_tool(fields) == INFERENCEX and (why := inferencex.explain_unsupported(fields)):
        return why
    if engine == VLLM_FORWARD and (why := forward.explain_unsupported(fields)):
        return why
    if document.listed and _collect_numbers(fields) in alone:
        return "summaries of results that have files of their own"
    if document.found and (_find_tool(fields) != engine or _is_ours(fields)):
        return _describe_other(engine)
    return ""


def _collect_numbers(fields: dict[str, Any]) -> frozenset[tuple[str, object]]:
    """Return the scalar fields: two results cannot have all of them in common, as they include all times."""
    return frozenset((name, value) for name, value in fields.items() if isinstance(value, str | int | float))


def _describe_other(engine: str) -> str:
    return f"no result of {TOOLS[engine]}"


def read_result(document: Document, engine: str) -> Result:
    """Read a document with the reader of `engine`. Raise RecordsError for anything but a result of that tool."""
    fields = document.fields
    if "schema_version" in fields and "point" in fields:
        raise RecordsError(f"{document.where} is a record of dcpbench; no import is needed: dcpbench report RUN.")
    if _is_ours(fields):
        raise RecordsError(
            f"{document.where} was exported by dcpbench, not measured by {engine}; report the run that it came from."
        )
    other = _find_tool(fields)
    if other not in (engine, ""):
        raise RecordsError(f"{document.where} looks like a result of {other}; import it with --from {other}.")
    if not other:
        raise RecordsError(
            f"{document.where} is no result of {TOOLS[engine]}: it has none of the fields by which one is recognised "
            f"({', '.join(RECOGNISED_BY[engine])}); name another file, or the tool that wrote this one with --from."
        )
    try:
        return READERS[engine](document)
    except RecursionError as e:
        raise RecordsError(f"{document.where} is nested too deeply, and so no result of {TOOLS[engine]}.") from e


def _is_ours(fields: dict[str, Any]) -> bool:
    return str(fields.get("backend", "")).startswith(OURS)


def _find_tool(fields: dict[str, Any]) -> str:
    """Return the tool that wrote a document; empty if no tool's fields are in it."""
    fields = inferencex.flatten(fields)
    return next((engine for engine, names in RECOGNISED_BY.items() if any(name in fields for name in names)), "")


def format_first(items: Iterable[str]) -> str:
    """Return the first names, printable and short, and the number of the others."""
    names = list(items)
    shown = ", ".join(fit_name(name) for name in names[:MAX_NAMED])
    return shown + (f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else "")
