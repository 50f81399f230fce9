"""How a point's share of GPU memory is found: for the sweep, and for the worker. No torch.

Both ask the functions here, so that what --dry-run prints is what a rank allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import CapacityError
from dcpbench.points import memory
from dcpbench.points.memory import GIB
from dcpbench.points.names import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcpbench.points.machine import Probe
    from dcpbench.points.point import Point
    from dcpbench.points.settings import Settings
    from dcpbench.points.shapes import ModelShape

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number, by --dtype."""
CPU_BYTES = 4 * GIB
"""Weights and KV of all ranks together that a CPU run may take: it tests the code, and a laptop should survive it."""


def kv_pages(point: Point, points: Iterable[Point], settings: Settings, shape: ModelShape, probe: Probe) -> int:
    """Pages of each rank's KV pool, the padding page included, for every point that shares an engine with `point`.

    --kv-memory where it was given; else what a GPU has left beside all weights, where they fit beside the largest of
    `points`; else as many as that largest one needs. `bounded_by` names the three. Points of `serve` run with fewer
    than they need, as their requests wait: beside all weights they get what is left, and never more than fits.
    """
    page = memory.page_bytes(shape, point.page_size, ITEMSIZE[point.dtype])
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes // page
    sharing = [p for p in points if same_engine(p, point)]
    need, least = max(map(pages_needed, sharing)), max(map(least_pages, sharing))
    if probe.device == "cuda" and probe.memory_bytes is not None:
        moe, itemsize = shape.layers - shape.first_dense, ITEMSIZE[point.dtype]
        weights = memory.weight_bytes(shape, point.layout, itemsize, shape.first_dense, moe, point.group_wide)
        left: int = (_memory(point, shape, probe) - memory.RESERVE_BYTES - weights) // page
        if left >= least:
            return left
    return need if need == least else max(least, min(need, most_pages(point, shape, probe)))


def bounded_by(plan: memory.Plan, settings: Settings, probe: Probe) -> str:
    """What set the size of the KV pool; see records.Kv."""
    if settings.kv_memory_bytes is not None:
        return "kv_memory"
    return "weights" if probe.device == "cuda" and plan.layers_held == plan.layers else "sweep"


def pages_needed(point: Point) -> int:
    """Pages of each rank's pool that this point alone needs, the padding page included.

    `serve`: so many that no request ever waits for KV, were all in flight as long as the longest; the scheduler keeps a
    page for each beside those that it holds.
    """
    if point.load is None:
        return memory.kv_pages_needed(point.layout, point.concurrency, point.context, point.page_size)
    requests = -(-min(point.concurrency, point.load.requests) // point.dp)
    one = memory.pages_for(point.context, point.layout, point.page_size)
    return requests * (one + 1) + memory.PAGES_OF_PADDING


def least_pages(point: Point) -> int:
    """Pages without which this point cannot run: `serve` goes on with one request at a time."""
    if point.load is None:
        return pages_needed(point)
    return memory.pages_for(point.context, point.layout, point.page_size) + memory.PAGES_OF_PADDING


def same_engine(a: Point, b: Point) -> bool:
    """Whether two points can share weights, pools and process groups."""
    fields = ("model", "tp", "dp", "dcp", "dtype", "page_size", "interleave", "weights", "group_wide")
    return all(getattr(a, name) == getattr(b, name) for name in fields)


def same_path(a: Point, b: Point) -> bool:
    """Whether two points are computed by the same kernels and collectives."""
    fields = ("backend", "exchange", "all_reduce", *OPTIONS)
    return all(getattr(a, name) == getattr(b, name) for name in fields)


def memory_plan(point: Point, pages: int, shape: ModelShape, probe: Probe) -> memory.Plan:
    """How one GPU's memory is divided beside a pool of `pages`. Raises CapacityError.

    On CPU every layer is held, and all ranks share CPU_BYTES.
    """
    itemsize, layout = ITEMSIZE[point.dtype], point.layout
    if probe.memory_bytes is not None and probe.device == "cuda":
        return memory.plan(
            shape,
            layout,
            itemsize=itemsize,
            kv_pages=pages,
            page_size=point.page_size,
            total_bytes=_memory(point, shape, probe),
            l2_bytes=probe.l2_bytes or 0,
            wide=point.group_wide,
        )
    dense, moe = shape.first_dense, shape.layers - shape.first_dense
    weights = memory.weight_bytes(shape, layout, itemsize, dense, moe, point.group_wide)
    kv = pages * memory.page_bytes(shape, point.page_size, itemsize)
    if layout.tp * (weights + kv) > CPU_BYTES:
        raise CapacityError(
            f"{shape.name} {layout} in {point.dtype} needs {layout.tp * weights / GIB:,.1f} GiB of weights and "
            f"{layout.tp * kv / GIB:,.1f} GiB of KV cache over its {layout.tp} ranks, and a CPU run may take "
            f"{CPU_BYTES / GIB:.0f} GiB: without GPUs dcpbench only tests that everything works"
        )
    return memory.Plan(
        kv_bytes=kv,
        weight_bytes=weights,
        full_weight_bytes=weights,
        dense_held=dense,
        moe_held=moe,
        layers=shape.layers,
    )


def most_pages(point: Point, shape: ModelShape, probe: Probe) -> int:
    """Pages of the largest pool that fits beside the fewest weights that may be held."""
    itemsize, size = ITEMSIZE[point.dtype], point.page_size
    if probe.memory_bytes is not None and probe.device == "cuda":
        return memory.most_kv_pages(
            shape,
            point.layout,
            itemsize=itemsize,
            page_size=size,
            total_bytes=_memory(point, shape, probe),
            l2_bytes=probe.l2_bytes or 0,
            wide=point.group_wide,
        )
    dense, moe = shape.first_dense, shape.layers - shape.first_dense
    held = memory.weight_bytes(shape, point.layout, itemsize, dense, moe, point.group_wide)
    return max((CPU_BYTES // point.tp - held) // memory.page_bytes(shape, size, itemsize), 0)


def _memory(point: Point, shape: ModelShape, probe: Probe) -> int:
    """Bytes of a GPU without what chunks of prompts need while they are prefilled."""
    total = probe.memory_bytes or 0
    if point.load is None:
        return total
    return total - memory.prefill_bytes(shape, point.layout, point.load.chunk, ITEMSIZE[point.dtype])
