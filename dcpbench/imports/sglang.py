"""SGLang's `bench_serving`: fields as of python/sglang/bench_serving.py; docs/exports.md names the commit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.choices import CLOSED, GAMMA, TRACE
from dcpbench.errors import RecordsError
from dcpbench.imports import result
from dcpbench.imports.result import Details, Result
from dcpbench.imports.vllm import summary

if TYPE_CHECKING:
    from dcpbench.imports.documents import Document

TOOL = "SGLang's bench_serving"
NAMES = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2el": "e2e_latency"}
ONE_TOKEN = 1.05
"""Accepted tokens of a step above which several came at once."""


class File(msgspec.Struct, kw_only=True):
    """The fields that are read; there are more."""

    backend: str
    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    median_e2e_latency_ms: float
    """Tells this file from vLLM's, which has another name for it."""
    dataset_name: str = ""
    max_concurrency: int | None = None
    random_input_len: int | None = None
    random_output_len: int | None = None
    random_range_ratio: float | None = None
    accept_length: float | None = None
    tag: str | None = None


def read(document: Document) -> Result:
    """One result. Raises RecordsError for what is none of SGLang's."""
    fields = _renamed(document.fields)
    found: File = result.convert(type(document)(document.where, fields), File, TOOL)
    rate = fields.get("request_rate")
    traced, per_s = rate == "trace", _rate(rate, document)
    details = result.details(document, Details, found.completed)
    return Result(
        where=document.where,
        model=_model(document),
        arrival=TRACE if traced else CLOSED if per_s is None else GAMMA,
        trace=found.dataset_name if traced else "",
        request_rate=per_s,
        concurrency=found.max_concurrency,
        submitted=None if details is None else len(details.errors),
        completed=found.completed,
        failed=None if details is None else len(details.errors) - found.completed,
        duration_s=found.duration,
        input_tokens=found.total_input_tokens,
        output_tokens=found.total_output_tokens,
        lengths=_lengths(found),
        summary={ours: summary(document, ours, found.completed, theirs) for ours, theirs in NAMES.items()},
        several_tokens=(found.accept_length or 1.0) > ONE_TOKEN or (details is not None and details.divided()),
        facts={"backend": found.backend, "dataset": found.dataset_name, "tag": found.tag or ""},
        details=details,
    )


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Sums by the names that all versions but one have."""
    short = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
    return {**{long: fields[name] for name, long in short.items() if name in fields}, **fields}


def _rate(rate: object, document: Document) -> float | None:
    """Requests per second; None where nothing spaces them, or a trace does."""
    if rate is None or rate in ("trace", "inf"):
        return None
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not rate > 0:
        raise RecordsError(f"{document.where}: request_rate is {str(rate)[:40]}; SGLang writes a number, inf or trace.")
    return None if rate == math.inf else float(rate)


def _model(document: Document) -> str | None:
    info = document.fields.get("server_info")
    name = info.get("model_path") if isinstance(info, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= result.MOST_IN_A_NAME else None


def _lengths(found: File) -> tuple[int, int] | None:
    alike = found.dataset_name.startswith("random") and found.random_range_ratio == 1
    if not alike or found.random_input_len is None or found.random_output_len is None:
        return None
    return found.random_input_len, found.random_output_len
