"""`vllm bench serve --save-result`: fields as of vllm/benchmarks/serve.py; docs/exports.md names the commit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.choices import CLOSED, GAMMA, TRACE
from dcpbench.errors import RecordsError
from dcpbench.imports import result
from dcpbench.imports.result import Details, Result
from dcpbench.serve_records import Latencies

if TYPE_CHECKING:
    from dcpbench.imports.documents import Document

TOOL = "vllm bench serve"
GOODPUT_OF = ("ttft", "tpot", "e2el")


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
    request_rate: float | str | None = None
    burstiness: float = 1.0
    max_concurrency: int | None = None
    failed: int | None = None
    request_goodput: float | None = None
    ramp_up_strategy: str | None = None
    goodput: str = ""
    """Metadata, as --goodput has it."""


def read(document: Document) -> Result:
    """One result. Raises RecordsError for what is none of vLLM's."""
    found: File = result.convert(document, File, TOOL)
    rate = _rate(found, document)
    arrival = CLOSED if rate is None else GAMMA
    return Result(
        where=document.where,
        model=found.model_id,
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
        summary={name: summary(document, name, found.completed) for name in ("ttft", "itl", "tpot", "e2el")},
        several_tokens="spec_decode_acceptance_length" in document.fields,
        goodput_s=found.request_goodput if found.goodput else None,
        slo_ms=_objectives(found.goodput),
        layout=_layout(document),
        facts={"date": found.date, "backend": found.backend},
        details=result.details(document, Details, found.completed),
    )


def summary(document: Document, name: str, completed: int, theirs: str = "") -> Latencies:
    """The tool's own statistics of a latency, by its name in the file.

    A mean and a median of 0 stand for no sample: both tools average a list with one 0 where theirs is empty.
    """
    numbers = {
        ours: number(document, f"{word}_{theirs or name}_ms")
        for ours, word in (("mean", "mean"), ("p50", "median"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"))
    }
    if not numbers["mean"] and not numbers["p50"]:
        return Latencies()
    one_each = name in ("ttft", "e2el") and any(v is not None for v in numbers.values())
    return Latencies(**numbers, samples=completed if one_each else 0)


def number(document: Document, name: str) -> float | None:
    """A time in ms. Raises RecordsError for one that cannot be."""
    value = document.fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= result.LARGEST:
        raise RecordsError(f"{document.where}: {name} is {str(value)[:40]}, which is no time in ms. Run it again.")
    return float(value)


def _rate(found: File, document: Document) -> float | None:
    """Requests per second; None where nothing spaces them (`inf`)."""
    rate = found.request_rate
    if rate is None or rate == "inf":
        return None
    if isinstance(rate, str) or rate <= 0:
        raise RecordsError(f"{document.where}: request_rate is {str(rate)[:40]}; vLLM writes a number or inf.")
    return rate


def _layout(document: Document) -> dict[str, int]:
    """Of --metadata under vLLM's option names. Its tp counts inside one dp replica, ours over all of them."""
    names = {"tp": "tensor_parallel_size", "dp": "data_parallel_size", "dcp": "decode_context_parallel_size"}
    degrees = {ours: result.integer(document.fields.get(theirs)) for ours, theirs in names.items()}
    tp, dp, dcp = degrees["tp"], degrees["dp"] or 1, degrees["dcp"] or 1
    return {} if tp is None else {"tp": tp * dp, "dp": dp, "dcp": dcp}


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
