"""Read rows of InferenceX as its `process_result.py` writes them and its site serves them; docs/exports.md names the commits.

A row is a summary with tokens per second and GPU, and times in seconds. It has neither the duration of the run nor the
number of requests. The framework of the server is the backend of its point.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.imports import field_names, result
from dcpbench.imports.documents import Document
from dcpbench.imports.result import Rates, Result, count_instance_gpus
from dcpbench.imports.vllm import TIMES, read_summary
from dcpbench.points.names import CLOSED, INFERENCEX, TOOLS

if TYPE_CHECKING:
    from collections.abc import Mapping


class Row(msgspec.Struct, kw_only=True):
    """Hold the fields of a result row that are read; others are ignored."""

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
    result_filename run_url source scenario_type offload_mode recipe_fingerprint router kv_p2p_transfer
    prefill_dcp_size prefill_pcp_size decode_dcp_size decode_pcp_size
"""
KNOWN = (*Row.__struct_fields__, *field_names.SERVER, *OTHERS.split())
SPECULATION = ("spec_decoding", "spec_method", "mtp")
NONE = ("", "none", "off", "false", "0")
IDENTIFYING = ("image", "recipe_fingerprint", "router", "kv_p2p_transfer", "offload_mode")  # besides a point's fields


def flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it was measured; rows of the site have their numbers in `metrics`."""
    inner = fields.get("metrics")
    return {**fields, **inner} if isinstance(inner, dict) else dict(fields)


def explain_unsupported(fields: Mapping[str, Any]) -> str:
    """Return what a point cannot hold of a row; empty for a row that can be read."""
    row = flatten(fields)
    if field_names.is_true(row.get("disagg")):
        return "prefill and decode on GPUs of their own, and a row does not have the speed at which KV crosses"
    names = ("tp",) if field_names.is_true(row.get("is_multinode")) else ("tp", "decode_tp")
    if not result.read_first_integer(row, names):
        return (
            "no number of GPUs that share one copy of the model, as of several nodes without prefill and decode apart"
        )
    if str(row.get("scenario_type") or "").startswith("agentic"):
        return "replays of agents, which have no lengths"
    return ""


def read(document: Document) -> Result:
    """Read one row. Raise RecordsError for a document of another tool."""
    fields = flatten(document.fields)
    row: Row = result.convert(Document(document.where, fields), Row, TOOLS[INFERENCEX])
    if row.conc < 1:
        raise RecordsError(f"{document.where}: conc is {row.conc}; a row has at least one request in flight.")
    layout = _read_layout(fields)
    speculates = next((v for n in SPECULATION if (v := str(fields.get(n) or "").lower()) not in NONE), "")
    in_ms = {
        f"{name}_ms": _convert_to_ms(v) for name, v in fields.items() if _is_time(name) and isinstance(v, float | int)
    }
    times = Document(document.where, in_ms)
    return Result(
        where=document.where,
        model=result.read_model(row.model, document.where),
        backend=field_names.shorten_label(row.framework),
        arrival=CLOSED,
        concurrency=row.conc,
        rates=Rates(row.tput_per_gpu, row.output_tput_per_gpu, count_instance_gpus(layout)),
        nominal=(row.isl, row.osl),
        summary={name: read_summary(times, name, 0) for name in TIMES},
        several_tokens=bool(speculates),
        layout=layout,
        ep=str(result.read_first_integer(fields, ("ep", "decode_ep")) or ""),
        device=field_names.read_hardware(fields),
        precision=field_names.read_precision(fields),
        settings={"spec": field_names.shorten_label(speculates)} if speculates else {},
        hints={name: text for name in IDENTIFYING if (text := _format_component(fields.get(name)))},
        facts={"date": row.date, "image": field_names.shorten_label(row.image or "")},
        unread=[name for name in fields if name not in KNOWN and not _is_time(name) and fields[name] not in (None, "")],
    )


def _format_component(value: object) -> str:
    """Return a field that names a part of the server; a router has a name and a version."""
    if isinstance(value, dict):
        value = " ".join(str(value[name]) for name in ("name", "version") if name in value)
    return field_names.shorten_label(value) if isinstance(value, str) else ""


def _convert_to_ms(seconds: float) -> float:
    """Return a time in milliseconds; infinity if no float is as large."""
    try:
        return seconds * 1e3
    except OverflowError:
        return math.inf


def _is_time(name: str) -> bool:
    """Return whether a field is a statistic of a latency; `intvty` is 1 / TPOT."""
    return name.partition("_")[2] in (*TIMES, "intvty")


def _read_layout(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the layout in our degrees.

    tp counts the GPUs of all replicas. With attention data parallelism a replica has one GPU, or those of a DCP group. The
    GPUs are tp * pp * pcp, as process_result.py counts them.
    """
    tp = result.read_first_integer(fields, ("tp", "decode_tp")) or 0
    dcp = result.read_first_integer(fields, ("dcp_size", "decode_dcp_size")) or 1
    spread = field_names.is_true(fields.get("dp_attention")) or field_names.is_true(fields.get("decode_dp_attention"))
    return {
        "tp": tp,
        "dp": max(tp // dcp, 1) if spread else 1,
        "dcp": dcp,
        "pp": result.read_first_integer(fields, ("pp", "decode_pp")) or 1,
        "pcp": result.read_first_integer(fields, ("pcp_size", "decode_pcp_size")) or 1,
    }
