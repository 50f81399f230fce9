"""SGLang's `bench_serving`: fields as of python/sglang/bench_serving.py; docs/exports.md names the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.imports import result, said
from dcpbench.imports.result import Result
from dcpbench.imports.vllm import experts_of, summary
from dcpbench.points.names import CLOSED, GAMMA, SGLANG, TOOLS, TRACE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.imports.documents import Document

NAMES = {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2el": "e2e_latency"}
RANDOM = ("random", "random-ids")
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


OTHERS = """
    request_rate server_info total_input total_output total_output_tokens_retokenized total_output_retokenized
    total_input_text_tokens total_input_vision_tokens request_throughput input_throughput output_throughput output_throughput_retokenized
    total_throughput total_throughput_retokenized concurrency sharegpt_output_len fixed_output_len generated_texts
    max_output_tokens_per_s max_concurrent_requests
"""
KNOWN = (*File.__struct_fields__, *result.LISTS, *OTHERS.split())
"""Fields that are read, follow from those, or say nothing of how fast it was."""


def read(document: Document) -> Result:
    """One result. Raises RecordsError for what is none of SGLang's."""
    fields = _renamed(document.fields)
    found: File = result.convert(type(document)(document.where, fields), File, TOOLS[SGLANG])
    traced, per_s = fields.get("request_rate") == TRACE, result.rate(document, "SGLang", ("inf", TRACE))
    details = result.details(document, found.completed)
    server = document.fields.get("server_info")
    server = server if isinstance(server, dict) else {}
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
        layout=_layout(server),
        ep=experts_of(server),
        device=said.hardware({**server, **document.fields}),
        precision=said.precision({**server, **document.fields}),
        hints={"tag": said.brief(found.tag.strip())} if found.tag and found.tag.strip() else {},
        facts={"backend": found.backend, "dataset": found.dataset_name, "tag": found.tag or ""},
        unread=result.unread(document, (*KNOWN, *said.SERVER), list(NAMES.values()), details),
        details=details,
    )


def _layout(server: Mapping[str, Any]) -> dict[str, int]:
    """Of the server's own information. Its dp is inside tp with attention data parallel, else whole copies beside it."""
    tp, dp = result.integer(server.get("tp_size")), result.integer(server.get("dp_size")) or 1
    dcp = result.integer(server.get("dcp_size")) or 1
    if tp is None:
        return {}
    return {"tp": tp if server.get("enable_dp_attention") else tp * dp, "dp": dp, "dcp": dcp}


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Sums by the names that all versions but one have."""
    short = {"total_input": "total_input_tokens", "total_output": "total_output_tokens"}
    return {**{long: fields[name] for name, long in short.items() if name in fields}, **fields}


def _lengths(found: File) -> tuple[str | None, str | None]:
    """Of its random data set, which draws every length from a share of the longest one up to that.

    Of others the file has the same fields, and they say nothing.
    """
    ratio = found.random_range_ratio
    if found.dataset_name not in RANDOM or ratio is None or not 0 <= ratio <= 1:
        return None, None
    prompts, answers = (_drawn(longest, ratio) for longest in (found.random_input_len, found.random_output_len))
    return prompts, answers


def _drawn(longest: int | None, ratio: float) -> str | None:
    if not longest:
        return None
    shortest = max(int(longest * ratio), 1)
    return str(longest) if shortest == longest else f"uniform:{shortest}-{longest}"


def _model(document: Document) -> str | None:
    info = document.fields.get("server_info")
    return result.model(info.get("model_path"), document.where) if isinstance(info, dict) else None
