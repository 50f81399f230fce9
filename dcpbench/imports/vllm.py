"""Read results of `vllm bench serve --save-result`, with the fields of vllm/benchmarks/serve.py; docs/exports.md names the commit.

`vllm bench sweep` adds the parameters of a run behind `run_number`, and in the name of its folder. InferenceX's copy of the
benchmark (utils/bench_serving/benchmark_serving.py) keeps lists of lengths without --save-detailed.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import field_names, result
from dcpbench.imports.result import Result
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import CLOSED, GAMMA, MOE_EP, MOE_TP, TOOLS, TRACE, VLLM, VLLM_OBJECTIVES
from dcpbench.records.record import Latencies
from dcpbench.show.text import summarize_long_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dcpbench.imports.documents import Document

TIMES = ("ttft", "itl", "tpot", "e2el")


class File(msgspec.Struct, kw_only=True):
    """Hold the fields of a result file that are read; others are ignored."""

    model_id: str
    num_prompts: int
    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    date: str = ""
    backend: str = ""
    burstiness: float = 1.0
    max_concurrency: int | None = None
    failed: int | None = None
    request_goodput: float | None = None
    ramp_up_strategy: str | None = None
    goodput: str = ""  # metadata in the form of --goodput


OTHERS = """
    request_rate endpoint_type label tokenizer_id best_of use_beam_search ramp_up_start_rps ramp_up_end_rps
    request_throughput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx
    benchmark_start_time_unix benchmark_end_time_unix queue_times generated_texts run_number _benchmark_name spec_decode_acceptance_rate spec_decode_acceptance_length
    spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens
    spec_decode_per_position_acceptance_rates
"""
KNOWN = (*File.__struct_fields__, *result.LISTS, *OTHERS.split())  # fields that are read or do not matter
LABEL = "label"
IN_A_NAME = re.compile(  # `max_num_seqs=4` in `SERVE--max_num_seqs=4-BENCH--request_rate=2`, the name of a folder
    r"([A-Za-z_][\w.]*)=(.*?)(?=-[A-Za-z_][\w.]*=|-(?:BENCH|WL)-|$)"
)
MAX_SETTINGS, MAX_SETTING = 100, 200  # parameters of a sweep, characters of one of them


def read(document: Document) -> Result:
    """Read one result. Raise RecordsError for a document of another tool."""
    found: File = result.convert(document, File, TOOLS[VLLM])
    rate = result.read_rate(document, "vLLM", ("inf",))
    details = result.read_details(document, found.completed)
    varied = _read_parameters(document)
    fields = {**{normalise_option(name): value for name, value in document.fields.items()}, **varied}
    layout, ep = read_layout(fields), read_experts(fields)
    nominal = _read_nominal(fields)
    unused = _list_unused(varied, layout, ep)
    hints = {} if varied else _read_hints(document, found, unused)
    slo = _parse_objectives(found.goodput)
    known = {*KNOWN, *hints, *field_names.SERVER.difference(unused)}
    if found.completed > found.num_prompts:
        raise RecordsError(
            f"{document.where}: completed is {found.completed}, more than the {found.num_prompts} of num_prompts."
        )
    return Result(
        where=document.where,
        model=result.read_model(found.model_id, document.where),
        arrival=TRACE if found.ramp_up_strategy else CLOSED if rate is None else GAMMA,
        trace=_format_ramp_up(document, found),
        request_rate=rate,
        burstiness=found.burstiness,
        concurrency=found.max_concurrency,
        submitted=found.num_prompts,
        completed=found.completed,
        failed=found.num_prompts - found.completed if found.failed is None else found.failed,
        duration_s=found.duration,
        input_tokens=found.total_input_tokens,
        output_tokens=found.total_output_tokens,
        lengths=_read_lengths(document, found, nominal),
        nominal=nominal,
        summary={name: read_summary(document, name, found.completed) for name in TIMES},
        several_tokens="spec_decode_acceptance_length" in document.fields,
        request_goodput=found.request_goodput,
        slo_ms=slo,
        layout=layout,
        ep=ep,
        settings={name: value for name, value in sorted(varied.items()) if name not in known},
        swept=bool(varied),
        device=field_names.read_hardware(fields),
        precision=field_names.read_precision(fields),
        hints=hints,
        facts={"date": found.date, "backend": found.backend, **hints},
        unread=[
            *result.list_unread(
                document, {*known, *(n for n in document.fields if normalise_option(n) in varied)}, TIMES, details
            ),
            *(["request_goodput (its objectives are not there)"] if found.request_goodput and not slo else []),
        ],
        details=details,
    )


def _list_unused(varied: Mapping[str, str], layout: Mapping[str, int], ep: str) -> set[str]:
    """Return the names of server fields that no field of a point holds here, so that they may distinguish servers."""
    several = [names for names in field_names.PRECISION.values() if sum(name in varied for name in names) > 1]
    unused = {name for names in several for name in names}
    if not layout:
        unused |= {name for names in field_names.DEGREES.values() for name in names}
    if not ep:
        unused |= {*field_names.EXPERTS, *field_names.SPREAD}
    return unused


def _format_ramp_up(document: Document, found: File) -> str:
    """Return the name of a load with a rising rate, with its rates; empty for other loads."""
    if not found.ramp_up_strategy:
        return ""
    rates = [document.fields.get(f"ramp_up_{end}_rps") for end in ("start", "end")]
    known = [f"{rate:g}" for rate in rates if isinstance(rate, int | float)]
    return field_names.shorten_label(f"ramp-up {found.ramp_up_strategy} {'-'.join(known)}".strip())


def read_summary(document: Document, name: str, completed: int, theirs: str = "") -> Latencies:
    """Return the tool's own statistics of a latency, which the file calls `theirs`.

    If all are 0 there was no sample: both tools average a list with one 0 instead of an empty one. Each completed request
    has one TTFT and one E2EL; the number of tokens behind the other latencies is unknown. A file may have the median as
    `median_` or, with --metric-percentiles 50, as `p50_`.
    """
    names = {"mean": ("mean",), "p50": ("median", "p50"), "p90": ("p90",), "p95": ("p95",), "p99": ("p99",)}
    numbers = {
        ours: next((n for word in words if (n := read_time(document, f"{word}_{theirs or name}_ms")) is not None), None)
        for ours, words in names.items()
    }
    if not any(numbers.values()):
        return Latencies()
    rising = [value for ours, value in numbers.items() if ours != "mean" and value is not None]
    if rising != sorted(rising):
        listed = ", ".join(
            f"{ours} {value:g}" for ours, value in numbers.items() if ours != "mean" and value is not None
        )
        raise RecordsError(
            f"{document.where}: percentiles of {theirs or name} fall ({listed} ms); they are not of one list."
        )
    return Latencies(**numbers, samples=completed if name in ("ttft", "e2el") else 0)


def read_time(document: Document, name: str) -> float | None:
    """Return a time in ms; None if the file does not have it. Raise RecordsError for a value that is not a time."""
    value = document.fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise RecordsError(f"{document.where}: {name} is {str(value)[:40]}, which is no time in ms. Run it again.")
    return float(value)


def normalise_option(name: str) -> str:
    """Return the name of a parameter with underscores, as it may be written with hyphens, too."""
    return name.replace("-", "_")


def _read_parameters(document: Document) -> dict[str, str]:
    """Return the parameters of a run of a sweep, of the server and of the benchmark; empty for other results.

    The name of the folder is read only if the file has none, because it is abridged and may be chosen freely.
    """
    names = list(document.fields)
    behind = set(names[names.index("run_number") + 1 :]) if "run_number" in names else set()
    written = [n for n in names if n in behind or any(f"{n}=" in folder for folder in document.folders)]
    found = {normalise_option(name): _format_value(document.fields[name]) for name in written}
    if not found:
        found = {normalise_option(n): value for folder in document.folders for n, value in IN_A_NAME.findall(folder)}
    if len(found) > MAX_SETTINGS:
        raise RecordsError(f"{document.where} has {len(found):,} parameters of a sweep; was the file damaged?")
    return {name: summarize_long_text(value, MAX_SETTING) for name, value in found.items()}


def _format_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _read_nominal(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the requested lengths of prompts and answers from metadata or a sweep."""
    prompts, answers = (result.read_first_integer(fields, names) for names in field_names.LENGTHS)
    return prompts, answers


def _read_lengths(
    document: Document, found: File, nominal: tuple[int | None, int | None]
) -> tuple[str | None, str | None]:
    """Return the length of all prompts and of all answers, if sums or lists of lengths prove it."""
    proven = [
        str(length) if length and found.completed and tokens == length * found.completed else None
        for length, tokens in zip(nominal, (found.total_input_tokens, found.total_output_tokens), strict=True)
    ]
    prompts, answers = (
        by_sum or by_list for by_sum, by_list in zip(proven, result.read_equal_lengths(document), strict=True)
    )
    return prompts, answers


def _read_hints(document: Document, found: File, unused: Collection[str]) -> dict[str, str]:
    """Return the label, the API and the metadata that may distinguish servers. Metadata are texts."""
    others = {*KNOWN, *field_names.SERVER.difference(unused)} - {LABEL, "backend"}
    return {
        name: field_names.shorten_label(value.strip())
        for name, value in document.fields.items()
        if isinstance(value, str) and value.strip() and normalise_option(name) not in others
        if name != LABEL or value not in (found.backend, document.fields.get("endpoint_type"))
    }


def read_layout(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout from vLLM's option names in metadata, a sweep or a name; empty without tp.

    vLLM's tp counts the GPUs of one dp replica, ours those of all replicas. Each pipeline stage and each
    prefill-context-parallel rank has GPUs of its own.
    """
    degrees = {ours: result.read_first_integer(fields, theirs) for ours, theirs in field_names.DEGREES.items()}
    if degrees["tp"] is None:
        return {}
    found = {name: degree or 1 for name, degree in degrees.items()}
    return {**found, "tp": found["tp"] * found["dp"]}


def read_experts(fields: Mapping[str, Any]) -> str:
    """Return the number of expert-parallel ranks, `tp` for all, `1` for tensor-parallel experts; empty if unknown."""
    number = result.read_first_integer(fields, field_names.EXPERTS)
    if number is not None:
        return str(number)
    switch = next((str(fields[name]).lower() for name in field_names.SPREAD if name in fields), "")
    return {"true": MOE_EP, "1": MOE_EP, "false": MOE_TP, "0": MOE_TP}.get(switch, "")


def _parse_objectives(text: str) -> dict[str, float]:
    """Return the objectives of `ttft:500 e2el:9000` in ms; nothing for any other text."""
    found = {}
    for pair in text.split():
        name, _, limit = pair.partition(":")
        try:
            ms = float(limit)
        except ValueError:
            return {}
        if name not in VLLM_OBJECTIVES or not 0 < ms < math.inf:
            return {}
        found[name] = ms
    return found
