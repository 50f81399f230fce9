"""Export for PyTorch's benchmark database (HUD), schema v3: one record per metric, `extra_info` with strings only.

The uploader adds time, repository and workflow; runners and dependencies are written here, because a file may be
uploaded from another machine than the one that measured. Only GPU measurements are written: the database is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.exports import RenderedFiles, encode_json_list, measured_points
from dcpbench.models import ALIASES, SHAPES
from dcpbench.points.axes import Role
from dcpbench.points.point import select_point_axes
from dcpbench.records.record import OURS
from dcpbench.reports import load_labels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.exports.measured_points import MeasuredPoint
    from dcpbench.records.metrics import Value
    from dcpbench.records.record import Environment

FILE = "hud.json"
PATH = select_point_axes(Role.PATH, but=Role.EXCHANGE)  # fields of a point for its path, except its exchange
PACKAGES = ("torch", "triton", "nccl", "flashinfer", "flash_mla", "dcpbench")
GB = 10**9
BETTER = {"higher": "bigger", "lower": "smaller", "": ""}  # directions in the terms of the database


def render(points: Sequence[MeasuredPoint]) -> RenderedFiles:
    """Return one file with a list of records."""
    kept, left_out = measured_points.filter_points(points, *measured_points.PUBLIC)
    found = []
    for group in measured_points.group_repeats(kept):
        shared = _build_shared_fields(group)
        found += [{"metric": _build_metric(v), **shared} for v in measured_points.collect_values(group)]
    return RenderedFiles({FILE: encode_json_list(found)} if found else {}, left_out)


def _build_metric(v: Value) -> dict[str, Any]:
    return {
        "name": v.metric.name,
        "benchmark_values": list(v.each),
        "extra_info": _convert_to_strings({"unit": v.metric.unit, "better": BETTER[v.metric.better]}),
    }


def _build_shared_fields(group: Sequence[MeasuredPoint]) -> dict[str, Any]:
    first = group[0]
    point, env = first.record.point, next((m.record.environment for m in group if m.record.environment), None)
    return {
        "benchmark": {
            "name": OURS,
            "mode": "inference",
            "dtype": point.precision,
            "extra_info": _convert_to_strings(
                _collect_facts(first) | {"layers": load_labels.describe_layers_held(m.record for m in group)}
            ),
        },
        "model": {
            "name": point.model,
            "type": _describe_architecture(point.model),
            "backend": point.backend,
            "origins": [first.origin],
            "extra_info": _convert_to_strings({"weights": point.weights}),
        },
        "runners": [] if env is None else [_describe_runner(env)],
        "dependencies": {} if env is None else _list_dependencies(env),
    }


def _collect_facts(m: MeasuredPoint) -> dict[str, object]:
    """Return the fields that identify a point, as strings for filters."""
    point = m.record.point
    facts: dict[str, object] = {
        "workload": point.workload,
        "layout": point.layout_name,
        "tensor_parallel_size": point.tp or "",
        "data_parallel_size": point.dp or "",
        "decode_context_parallel_size": point.dcp or "",
        "exchange": point.format_exchange_label(),
        **{axis.name: getattr(point, axis.name) for axis in PATH if axis.name != "backend"},
        "concurrency": point.concurrency,
        "context": point.context or "",
        "warnings": ", ".join(m.record.warnings),
        "point": m.point_id,
    }
    if point.load is not None:
        facts |= {
            "arrival": point.load.arrival,
            "request_rate": point.load.request_rate or "",
            "input_tokens": point.load.input_tokens,
            "output_tokens": point.load.output_tokens,
            "requests": point.load.requests or "",
        }
    return facts


def _describe_architecture(model: str) -> str:
    """Return attention and MLP of a published model, such as `mla-moe-decoder`; `decoder` for another model."""
    name = model.rpartition("/")[2].lower()
    shape = SHAPES.get(ALIASES.get(name, name))
    if shape is None:
        return "decoder"
    return f"{'gqa' if shape.gqa else 'mla'}-{'moe' if shape.first_k_dense_replace < shape.layers else 'dense'}-decoder"


def _describe_runner(env: Environment) -> dict[str, Any]:
    memory = (env.device_memory_bytes or 0) // GB
    return {
        "name": env.host_hash,
        "type": env.device,
        "gpu_info": env.device,
        "gpu_count": env.device_count,
        "avail_gpu_mem_in_gb": memory,
        "extra_info": _convert_to_strings({"driver": env.driver or "", "cuda": env.cuda or ""}),
    }


def _list_dependencies(env: Environment) -> dict[str, Any]:
    return {
        name: {"repo": "", "branch": "", "sha": "", "version": str(version), "extra_info": {}}
        for name in PACKAGES
        if (version := getattr(env, name))
    }


def _convert_to_strings(facts: dict[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value != ""}
