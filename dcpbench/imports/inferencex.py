"""InferenceX: rows as its `process_result.py` writes them and its site hands them out; docs/exports.md names the commits.

A row is a summary with rates of tokens for each GPU and times in seconds: neither how long a run took nor how many
requests it had is in it. The server's framework is the backend of its point.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import result, said
from dcpbench.imports.documents import Document
from dcpbench.imports.result import Rates, Result
from dcpbench.imports.vllm import TIMES, summary
from dcpbench.points.names import CLOSED, INFERENCEX, TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping

MS = 1e3


class Row(msgspec.Struct, kw_only=True):
    """The fields that are read; there are more."""

    model: str
    framework: str
    conc: int
    isl: int | None = None
    osl: int | None = None
    tput_per_gpu: float
    output_tput_per_gpu: float
    date: str = ""
    image: str | None = None


OTHERS = """
    infmax_model_prefix disagg is_multinode dp_attention pp prefill_tp prefill_ep prefill_pp prefill_dp_attention
    prefill_num_workers decode_tp decode_ep decode_pp decode_dp_attention decode_num_workers num_gpus num_prefill_gpu
    num_decode_gpu num_aggregate_gpu input_tput_per_gpu pcp_size metrics spec_method spec_decoding mtp ep benchmark_type
    result_filename run_url source scenario_type offload_mode
"""
KNOWN = (*Row.__struct_fields__, *said.SERVER, *OTHERS.split())
SPECULATION = ("spec_decoding", "spec_method", "mtp")
NONE = ("", "none", "off", "false", "0")


def flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A row as it was measured; of one from the site, whose numbers stand in `metrics`."""
    inner = fields.get("metrics")
    return {**fields, **inner} if isinstance(inner, dict) else dict(fields)


def beyond(fields: Mapping[str, Any]) -> str:
    """What no layout of ours says of a row; empty for one that can be read."""
    row = flat(fields)
    if _yes(row.get("disagg")):
        return "prefill and decode on GPUs of their own, of which no row says how KV crosses"
    if any((result.integer(row.get(name)) or 1) > 1 for name in ("pp", "prefill_pp", "decode_pp", "pcp_size")):
        return "pipeline or prefill context parallel, which no layout of ours says"
    if str(row.get("scenario_type") or "").startswith("agentic"):
        return "replays of agents, which have no lengths"
    return ""


def read(document: Document) -> Result:
    """One row. Raises RecordsError for what is none of InferenceX's."""
    fields = flat(document.fields)
    row: Row = result.convert(Document(document.where, fields), Row, TOOLS[INFERENCEX])
    if row.conc < 1:
        raise RecordsError(f"{document.where}: conc is {row.conc}; a row has at least one request in flight.")
    layout = _layout(fields)
    speculates = next((v for n in SPECULATION if (v := str(fields.get(n) or "").lower()) not in NONE), "")
    in_ms = {f"{name}_ms": _ms(v) for name, v in fields.items() if _is_time(name) and isinstance(v, float | int)}
    times = Document(document.where, in_ms)
    return Result(
        where=document.where,
        model=result.model(row.model, document.where),
        backend=said.brief(row.framework),
        arrival=CLOSED,
        request_rate=None,
        concurrency=row.conc,
        submitted=None,
        completed=None,
        failed=None,
        duration_s=None,
        rates=Rates(row.tput_per_gpu, row.output_tput_per_gpu, layout["tp"]),
        nominal=(row.isl, row.osl),
        summary={name: summary(times, name, 0) for name in TIMES},
        several_tokens=bool(speculates),
        layout=layout,
        ep=str(result.integer(fields.get("ep")) or result.integer(fields.get("decode_ep")) or ""),
        device=said.hardware(fields),
        precision=said.precision(fields),
        settings={"spec": said.brief(speculates)} if speculates else {},
        facts={"date": row.date, "image": said.brief(row.image or "")},
        unread=[name for name in fields if name not in KNOWN and not _is_time(name) and fields[name] not in (None, "")],
    )


def _ms(seconds: float) -> float:
    """The same in milliseconds; infinite where no float is as large."""
    try:
        return seconds * MS
    except OverflowError:
        return math.inf


def _is_time(name: str) -> bool:
    """A statistic of a latency; `intvty` is one divided by TPOT."""
    return name.partition("_")[2] in (*TIMES, "intvty")


def _layout(fields: Mapping[str, Any]) -> dict[str, int]:
    """Its tp counts all GPUs; with attention data parallel each replica has one GPU, or those of a dcp group."""
    tp = result.integer(fields.get("tp")) or result.integer(fields.get("decode_tp")) or 0
    dcp = result.integer(fields.get("dcp_size")) or 1
    spread = _yes(fields.get("dp_attention")) or _yes(fields.get("decode_dp_attention"))
    return {"tp": tp, "dp": max(tp // dcp, 1) if spread else 1, "dcp": dcp}


def _yes(value: object) -> bool:
    return str(value).lower() in ("true", "1")
