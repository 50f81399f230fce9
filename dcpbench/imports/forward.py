"""Read cases of `vllm bench forward --output-json`, with the fields of vllm/benchmarks/forward/main.py in vLLM 0.33.0.

A case is one batch. Its forward is timed as a CUDA graph, in µs, by the slowest rank of each replay. Sampling and the host are not
in it. The file has neither the model nor the layout, but a result of each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import field_names, result
from dcpbench.imports.result import Result, Steps
from dcpbench.points.names import CLOSED, TOOLS, VLLM, VLLM_FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.imports.documents import Document

REAL = "real"  # routing by the model's own routers


class Request(msgspec.Struct, frozen=True):
    """Describe a request of the batch: the tokens that the step computes, and the KV rows with them."""

    query_len: int
    kv_len: int
    num_draft_tokens: int = 0


class Times(msgspec.Struct, frozen=True):
    """Hold the times of a case in µs."""

    samples_us: list[float]


class Rank(msgspec.Struct, frozen=True):
    """Hold the result of one rank."""

    latency_us: Times
    routing: Any = None
    pipeline_timeline: dict[str, Any] | None = None


class File(msgspec.Struct, frozen=True):
    """Hold the fields of a case that are read; others are ignored."""

    case: str
    requests: list[Request]
    median_us: float
    ranks: list[Rank]


def explain_unsupported(fields: Mapping[str, Any]) -> str:
    """Return why a case is no decode step, which a point could hold; empty for one."""
    requests = fields.get("requests")
    if not isinstance(requests, list) or not all(isinstance(r, dict) for r in requests):
        return ""
    if any(r.get("num_draft_tokens") for r in requests):
        return "steps that verify draft tokens"
    return "steps with tokens of prompts" if any(r.get("query_len") != 1 for r in requests) else ""


def read(document: Document) -> Result:
    """Read one case. Raise RecordsError for a document of another tool, and for a case that is no decode step."""
    found: File = result.convert(document, File, TOOLS[VLLM_FORWARD])
    if why := explain_unsupported(document.fields):
        raise RecordsError(
            f"{document.where} has {why}; only decode steps, such as --case decode=32*1@8192, are imported."
        )
    if not found.requests or not found.ranks:
        raise RecordsError(f"{document.where} has no request or no rank; it is not whole.")
    stages = {rank.pipeline_timeline.get("stage") for rank in found.ranks if rank.pipeline_timeline}
    if len(stages) > 1:
        raise RecordsError(
            f"{document.where} has {len(stages)} pipeline stages, in which batches overlap; a decode point has one."
        )
    lens = [r.kv_len for r in found.requests]
    samples = found.ranks[0].latency_us.samples_us
    if not samples or any(not us > 0 for us in samples):
        raise RecordsError(f"{document.where}: samples_us are no times of steps. Run it again.")
    routing = found.ranks[0].routing
    settings = {"bench": "forward"}
    settings |= {"kv_lens": f"{min(lens)}-{max(lens)}"} if min(lens) != max(lens) else {}
    if isinstance(routing, str) and routing != REAL:
        settings["routing"] = field_names.shorten_label(routing)
    alone = len(found.ranks) == 1
    return Result(
        where=document.where,
        backend=VLLM,
        arrival=CLOSED,
        concurrency=len(lens),
        layout=dict.fromkeys(("tp", "dp", "dcp", "pp", "pcp"), 1) if alone else {},
        settings=settings,
        facts={"case": found.case},
        steps=Steps(
            samples_ms=[us / 1e3 for us in samples],
            context=round(sum(lens) / len(lens)) - 1,
            ranks=len(found.ranks),
        ),
    )
