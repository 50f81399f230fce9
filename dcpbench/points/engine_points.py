"""Make points that another engine serves. Fields that its files and options do not give are unknown. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcpbench.points.names import AS_COMPUTED, NO_EXCHANGE, UNKNOWN
from dcpbench.points.point import SETTING, Load, Point
from dcpbench.points.redaction import redact

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN_FIELDS: dict[str, Any] = {"chunk": 0, "policy": UNKNOWN, "prefix_cache": None, "prefill": UNKNOWN}
"""Values of fields of a load that only the engine has, such as how requests share steps."""


def make_engine_point(
    *,
    model: str,
    layout: Mapping[str, int],
    backend: str,
    load: Load,
    concurrency: int,
    context: int,
    ep: str = UNKNOWN,
    precision: Mapping[str, str],
    weights: str = UNKNOWN,
    exchange: str = UNKNOWN,
    settings: Mapping[str, str] | None = None,
    repeat: int = 0,
    disaggregate: str = "",
    prefill_gpus: int = 0,
) -> Point:
    """Return a served point of the engine `backend`. `layout` has 0 for each degree that is unknown; pp and pcp may be absent.

    `precision`: precisions by the names of a point's fields. Without those of weights and KV cache, both have the dtype.
    `weights`: SYNTHETIC or DUMMY for a server that is started with such weights.
    `exchange`: that of a layout with dcp.
    `settings`: parameters of the server that have no field of their own.
    """
    return Point(
        model=redact(model),
        tp=layout["tp"],
        dp=layout["dp"],
        dcp=layout["dcp"],
        ep=ep,
        workload="serve",
        concurrency=concurrency,
        context=context,
        exchange=NO_EXCHANGE if layout["dcp"] == 1 else exchange,
        all_reduce=UNKNOWN,
        backend=backend,
        dtype=precision.get("dtype", UNKNOWN),
        weights_dtype=precision.get("weights_dtype", AS_COMPUTED),
        kv_dtype=precision.get("kv_dtype", AS_COMPUTED),
        page_size=0,
        interleave=0,
        weights=weights,
        load=load,
        settings=format_settings(settings or {}),
        repeat=repeat,
        disaggregate=disaggregate,
        pp=layout.get("pp", 1),
        pcp=layout.get("pcp", 1),
        prefill_gpus=prefill_gpus,
    )


def format_settings(settings: Mapping[str, str]) -> str:
    """Return the varied parameters of a server as a point stores them, without secrets:
    `max-num-seqs=32, dtype=half`.
    """
    return redact(SETTING.join(f"{name}={value}" for name, value in settings.items()))


def make_engine_load(**fields: Any) -> Load:  # noqa: ANN401 -- fields of several types
    """Return a load that another engine serves."""
    return Load(**UNKNOWN_FIELDS, **fields)
