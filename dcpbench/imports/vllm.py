"""`vllm bench serve --save-result`: fields as of vllm/benchmarks/serve.py; docs/exports.md names the commit.

And what `vllm bench sweep` adds to them: the parameters of a run stand behind `run_number`, and in its folder's name.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import result, said
from dcpbench.imports.result import Result
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import CLOSED, CUT, GAMMA, TOOLS, TRACE, VLLM, WHOLE
from dcpbench.records.record import Latencies
from dcpbench.show.text import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.imports.documents import Document

GOODPUT_OF = ("ttft", "tpot", "e2el")
TIMES = ("ttft", "itl", "tpot", "e2el")


class File(msgspec.Struct, kw_only=True):
    """The fields that are read; there are more."""

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
    goodput: str = ""
    """Metadata, as --goodput has it."""


OTHERS = """
    request_rate endpoint_type label tokenizer_id best_of use_beam_search ramp_up_start_rps ramp_up_end_rps
    request_throughput output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests rtfx
    queue_times generated_texts run_number _benchmark_name spec_decode_acceptance_rate spec_decode_acceptance_length
    spec_decode_num_drafts spec_decode_draft_tokens spec_decode_accepted_tokens
    spec_decode_per_position_acceptance_rates
"""
KNOWN = (*File.__struct_fields__, *result.LISTS, *OTHERS.split())
"""Fields that are read, follow from those, or say nothing of how fast it was."""
LABEL = "label"
IN_A_NAME = re.compile(r"([A-Za-z_][\w.]*)=(.*?)(?=-[A-Za-z_][\w.]*=|-(?:BENCH|WL)-|$)")
"""A parameter in a folder's name: `SERVE--max_num_seqs=4-max_model_len=8192-BENCH--request_rate=2`."""
MOST_SETTINGS, LONGEST_SETTING = 100, 200


def read(document: Document) -> Result:
    """One result. Raises RecordsError for what is none of vLLM's."""
    found: File = result.convert(document, File, TOOLS[VLLM])
    rate = result.rate(document, "vLLM", ("inf",))
    arrival = CLOSED if rate is None else GAMMA
    details = result.details(document, found.completed)
    varied = _varied(document)
    told = {**{option(name): value for name, value in document.fields.items()}, **varied}
    layout = layout_of(told)
    nominal = _nominal(told)
    hints = {} if varied else _hints(document, found.backend)
    slo = _objectives(found.goodput)
    several = {name for names in said.PRECISION.values() if sum(name in varied for name in names) > 1 for name in names}
    known = {*KNOWN, *hints, *said.SERVER.difference(several)}
    if not layout:
        known -= {name for names in said.DEGREES.values() for name in names}
    if not (ep := experts_of(told)):
        known -= {*said.EXPERTS, *said.SPREAD}
    if found.completed > found.num_prompts:
        raise RecordsError(
            f"{document.where}: completed is {found.completed}, more than the {found.num_prompts} of num_prompts."
        )
    return Result(
        where=document.where,
        model=result.model(found.model_id, document.where),
        arrival=TRACE if found.ramp_up_strategy else arrival,
        trace=f"ramp-up {found.ramp_up_strategy}" if found.ramp_up_strategy else "",
        request_rate=rate,
        burstiness=found.burstiness,
        concurrency=found.max_concurrency,
        submitted=found.num_prompts,
        completed=found.completed,
        failed=found.num_prompts - found.completed if found.failed is None else found.failed,
        duration_s=found.duration,
        input_tokens=found.total_input_tokens,
        output_tokens=found.total_output_tokens,
        lengths=_all_as_asked(found, nominal),
        nominal=nominal,
        summary={name: summary(document, name, found.completed) for name in TIMES},
        several_tokens="spec_decode_acceptance_length" in document.fields,
        goodput_s=found.request_goodput,
        slo_ms=slo,
        layout=layout,
        ep=ep,
        settings={name: value for name, value in sorted(varied.items()) if name not in known},
        device=said.hardware(told),
        precision=said.precision(told),
        hints=hints,
        facts={"date": found.date, "backend": found.backend, **hints},
        unread=[
            *result.unread(document, {*known, *(n for n in document.fields if option(n) in varied)}, TIMES, details),
            *(["request_goodput (its objectives are not there)"] if found.request_goodput and not slo else []),
        ],
        details=details,
    )


def summary(document: Document, name: str, completed: int, theirs: str = "") -> Latencies:
    """The tool's own statistics of a latency, by its name in the file.

    Where all are 0 there was no sample: both tools average a list with one 0 where theirs is empty. Of each completed
    request there is one TTFT and one E2EL; of how many tokens the others are, no file says.
    """
    numbers = {
        ours: number(document, f"{word}_{theirs or name}_ms")
        for ours, word in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
    }
    if not any(numbers.values()):
        return Latencies()
    rising = [value for ours, value in numbers.items() if ours != "mean" and value is not None]
    if rising != sorted(rising):
        said = ", ".join(f"{ours} {value:g}" for ours, value in numbers.items() if ours != "mean" and value is not None)
        raise RecordsError(
            f"{document.where}: percentiles of {theirs or name} fall ({said} ms); they are not of one list."
        )
    return Latencies(**numbers, samples=completed if name in ("ttft", "e2el") else 0)


def number(document: Document, name: str) -> float | None:
    """A time in ms. Raises RecordsError for one that cannot be."""
    value = document.fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise RecordsError(f"{document.where}: {name} is {str(value)[:40]}, which is no time in ms. Run it again.")
    return float(value)


def option(name: str) -> str:
    """A parameter's name in one of the two ways to write it."""
    return name.replace("-", "_")


def _varied(document: Document) -> dict[str, str]:
    """The parameters of a sweep's run, of server and benchmark alike; empty where it is of none.

    The folder's name is read for them only where the file has none: it is abridged, and may be chosen.
    """
    names = list(document.fields)
    behind = set(names[names.index("run_number") + 1 :]) if "run_number" in names else set()
    written = [n for n in names if n in behind or any(f"{n}=" in folder for folder in document.folders)]
    found = {option(name): _text(document.fields[name]) for name in written}
    if not found:
        found = {option(n): value for folder in document.folders for n, value in IN_A_NAME.findall(folder)}
    if len(found) > MOST_SETTINGS:
        raise RecordsError(f"{document.where} has {len(found):,} parameters of a sweep; was the file damaged?")
    return {name: shortened(value, LONGEST_SETTING) for name, value in found.items()}


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _nominal(fields: Mapping[str, Any]) -> tuple[int | None, int | None]:
    prompts, answers = (
        next((length for name in names if (length := result.integer(fields.get(name)))), None) for names in said.LENGTHS
    )
    return prompts, answers


def _all_as_asked(found: File, nominal: tuple[int | None, int | None]) -> tuple[str | None, str | None]:
    """The lengths asked for, where the sums are those of requests that all had them."""
    prompts, answers = (
        str(length) if length and found.completed and tokens == length * found.completed else None
        for length, tokens in zip(nominal, (found.total_input_tokens, found.total_output_tokens), strict=True)
    )
    return prompts, answers


def _hints(document: Document, backend: str) -> dict[str, str]:
    """Its label and its metadata, which are all texts, where nothing else here reads them."""
    others = {*KNOWN, *said.SERVER} - {LABEL}
    return {
        name: said.brief(value.strip())
        for name, value in document.fields.items()
        if isinstance(value, str) and value.strip() and option(name) not in others
        if name != LABEL or value not in (backend, document.fields.get("endpoint_type"))
    }


def layout_of(fields: Mapping[str, Any]) -> dict[str, int]:
    """By vLLM's option names, of --metadata or of a sweep. Its tp counts inside one dp replica, ours over all."""
    degrees = {
        ours: next((n for name in theirs if (n := result.integer(fields.get(name)))), None)
        for ours, theirs in said.DEGREES.items()
    }
    tp, dp, dcp = degrees["tp"], degrees["dp"] or 1, degrees["dcp"] or 1
    return {} if tp is None else {"tp": tp * dp, "dp": dp, "dcp": dcp}


def experts_of(fields: Mapping[str, Any]) -> str:
    """How a server places experts, by the words of engines: `8` ranks, `tp` for all of them, `1`; empty where none says."""
    number = next((n for name in said.EXPERTS if (n := result.integer(fields.get(name)))), None)
    if number is not None:
        return str(number)
    switch = next((str(fields[name]).lower() for name in said.SPREAD if name in fields), "")
    return {"true": WHOLE, "1": WHOLE, "false": CUT, "0": CUT}.get(switch, "")


def _objectives(text: str) -> dict[str, float]:
    """`ttft:500 e2el:9000` in ms; nothing where it is anything else."""
    found = {}
    for pair in text.split():
        name, _, limit = pair.partition(":")
        try:
            ms = float(limit)
        except ValueError:
            return {}
        if name not in GOODPUT_OF or not 0 < ms < math.inf:
            return {}
        found[name] = ms
    return found
