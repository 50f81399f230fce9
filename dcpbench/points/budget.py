"""Plan how a GPU's memory is divided between weights and KV; this module is the only place that does. No torch.

memory.py computes the size of each part. --dry-run prints the same plan that the ranks receive.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import InsufficientMemoryError
from dcpbench.models import load_shape
from dcpbench.points import memory
from dcpbench.points.axes import Role
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import OUTER_DEGREES
from dcpbench.points.memory import GIB, Layers
from dcpbench.points.names import FP8
from dcpbench.points.pipeline import make_stages
from dcpbench.points.point import Point, select_point_axes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.settings import Settings

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, FP8: 1}  # bytes of a number, by precision
engine_values = operator.attrgetter(  # values that points share if they use the same weights, pools and groups
    *(axis.name for axis in select_point_axes(Role.ENGINE)), *OUTER_DEGREES
)
CPU_BYTES = 4 * GIB  # maximum bytes of all ranks' weights and KV in a CPU run, which must not exhaust a laptop


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what an engine holds on each rank, for all points that share it; sizes are bytes per GPU."""

    point: Point  # example of the points that share the engine
    pages: int  # number of pages of the KV pool, including the padding page
    max_requests: int  # maximum number of requests of one replica in flight
    max_context: int  # maximum number of tokens of a request that can be stored
    chunk: int = 0  # maximum number of prompt tokens that a step prefills, over the whole layout; 0 if no point serves
    bounded_by: str = "sweep"  # limit that determined the size of the KV pool; see record.Kv
    kv_bytes: int  # bytes of the KV pool, for all layers of the model
    weight_bytes: int  # bytes of the weights held in memory
    full_weight_bytes: int  # bytes of the weights if every layer were held
    held: Layers  # number of distinct layers in memory; the other layers reuse their weights in turn
    layers: int
    l2_warm: bool = False  # True if the held weights are so few that some may still be in the L2 cache when reused

    @property
    def layers_held(self) -> int:
        """Number of distinct layers held in memory."""
        return sum(self.held)


def plan_engines(points: Iterable[Point], settings: Settings, probe: Probe) -> list[EnginePlan]:
    """Return a plan for each engine that these points need; raise the errors of `plan_engine`."""
    engines: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        engines.setdefault(engine_values(point), []).append(point)
    return [plan_engine(sharing, settings, load_shape(sharing[0].model), probe) for sharing in engines.values()]


def find_engine_plan(point: Point, engines: Iterable[EnginePlan]) -> EnginePlan:
    """Return the plan of this point among the plans made for a run."""
    found = next((plan for plan in engines if is_same_engine(plan.point, point)), None)
    assert found is not None, (
        f"no engine was planned for {point.get_key()}; Work.engines needs plan_engines of all points"
    )
    return found


def plan_engine(points: Sequence[Point], settings: Settings, shape: ModelShape, probe: Probe) -> EnginePlan:
    """Return the plan of the engine that `points` share; raise InsufficientMemoryError if its KV pool and the fewest weights do not
    fit.

    The pool has the size of --kv-memory if that is given; else the memory left next to all weights, if every point can
    run in that; else the size that the largest point needs. `bounded_by` names which of the three. Points of `serve`
    run with less than they need, because their requests wait: next to all weights they get what is left, and never more
    than fits. With pipeline stages it is the plan of the stage with the fewest pages, which all stages use; of several, that with
    the largest pages.
    """
    plans = [_plan_stage(points, settings, stage, probe) for stage in make_stages(shape, points[0].pp)]
    return min(plans, key=lambda plan: (plan.pages, -plan.kv_bytes))


def _plan_stage(points: Sequence[Point], settings: Settings, shape: ModelShape, probe: Probe) -> EnginePlan:
    chunk = max(p.load.chunk if p.load else 0 for p in points)
    max_requests = max(map(_count_requests, points))
    rank = _Rank(points[0], chunk, shape, probe, max_requests)
    need, min_pages = max(map(count_needed_pages, points)), max(map(count_min_pages, points))
    pages_left = rank.compute_pages_left(rank.whole)
    if settings.kv_memory_bytes is not None:
        pages, bounded_by = min(settings.kv_memory_bytes // rank.page_bytes, rank.max_pages), "kv_memory"
    elif rank.gpu and pages_left >= min_pages:
        pages, bounded_by = pages_left, "weights"
    else:
        pages, bounded_by = max(min_pages, min(need, rank.compute_pages_left(rank.fewest))), "sweep"
    return rank.make_plan(
        pages,
        rank.fit_layers(pages),
        max_requests=max_requests,
        max_context=max(p.context + p.mtp for p in points) + memory.HEADROOM_TOKENS,
        chunk=chunk,
        bounded_by=bounded_by,
    )


def plan_whole(point: Point, lengths: Sequence[int], shape: ModelShape) -> EnginePlan:
    """Return the plan of an engine with every layer, and KV for a request of each of these lengths, regardless of the
    memory available.
    """
    rank = _Rank(point, 0, shape, Probe(device="cpu", count=0, name="CPU"), len(lengths))
    pages = sum(memory.count_pages(n, point.layout, point.page_size) for n in lengths) + memory.PAGES_OF_PADDING
    return rank.make_plan(pages, rank.whole, max_requests=len(lengths), max_context=max(lengths))


def compute_max_pages(point: Point, shape: ModelShape, probe: Probe) -> int:
    """Return the number of pages of the largest pool that fits next to the fewest weights that may be held; 0 if none
    fits.
    """
    chunk, requests = point.load.chunk if point.load else 0, _count_requests(point)
    ranks = [_Rank(point, chunk, stage, probe, requests) for stage in make_stages(shape, point.pp)]
    return max(min(rank.compute_pages_left(rank.fewest) for rank in ranks), 0)


class WholeModel(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what all layers of a model and its KV cache take of each GPU, and what a GPU has for them, in bytes."""

    weight_bytes: int
    kv_bytes: int  # the pool of --kv-memory; else the smallest pool with which the point runs (`count_min_pages`)
    available_bytes: int  # for weights and KV, in addition to `buffer_bytes`
    buffer_bytes: int  # of steps with prompts; 0 if the point serves no requests

    @property
    def missing_bytes(self) -> int:
        """Return the bytes by which weights and KV exceed the memory of a GPU; 0 if they fit."""
        return max(self.weight_bytes + self.kv_bytes - self.available_bytes, 0)


def measure_whole_model(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> WholeModel:
    """Return the memory that a point takes with all its layers held, even if that is more than a GPU has.

    With pipeline stages it is that of the stage that takes most.
    """
    found = [_measure_stage(point, settings, stage, probe) for stage in make_stages(shape, point.pp)]
    return max(found, key=lambda stage: (stage.missing_bytes, stage.weight_bytes))


def _measure_stage(point: Point, settings: Settings, shape: ModelShape, probe: Probe) -> WholeModel:
    rank = _Rank(point, point.load.chunk if point.load else 0, shape, probe, _count_requests(point))
    pages = count_min_pages(point)
    if settings.kv_memory_bytes is not None:
        pages = settings.kv_memory_bytes // rank.page_bytes
    return WholeModel(
        weight_bytes=rank.compute_weight_bytes(rank.whole),
        kv_bytes=pages * rank.page_bytes,
        available_bytes=rank.free_bytes,
        buffer_bytes=rank.buffers,
    )


def compute_page_bytes(point: Point, shape: ModelShape) -> int:
    """Return the bytes of a page on a rank, of the pipeline stage in which it is largest."""
    kv_itemsize = ITEMSIZE[point.kv_precision]
    stages = make_stages(shape.add_drafts(point.mtp), point.pp)
    return max(memory.compute_page_bytes(stage, point.page_size, kv_itemsize, point.layout) for stage in stages)


def count_needed_pages(point: Point) -> int:
    """Return the number of pages of each rank's pool that this point alone needs, including the padding page.

    For `serve` no request ever waits for KV with so many pages, even if all in flight are as long as the longest; the
    scheduler reserves one page for each request in addition to those that it holds.
    """
    if point.load is None:
        return memory.count_kv_pages(point.layout, point.concurrency, point.context + point.mtp, point.page_size)
    requests = -(-min(point.max_requests, point.load.requests) // point.dp)
    one = memory.count_pages(point.context + point.mtp, point.layout, point.page_size)
    return requests * (one + 1) + memory.PAGES_OF_PADDING


def count_min_pages(point: Point) -> int:
    """Return the minimum number of pages with which this point can run: `serve` continues with one
    request at a time.
    """
    if point.load is None:
        return count_needed_pages(point)
    return memory.count_pages(point.context + point.mtp, point.layout, point.page_size) + memory.PAGES_OF_PADDING


def _count_requests(point: Point) -> int:
    """Return the maximum number of requests of one replica in flight."""
    return -(-point.max_requests // point.dp)


def is_same_engine(a: Point, b: Point) -> bool:
    """Return True if two points can share weights, pools and process groups."""
    return engine_values(a) == engine_values(b)


def is_same_path(a: Point, b: Point) -> bool:
    """Return True if two points are computed by the same kernels and collectives."""
    return a.get_values(Role.PATH) == b.get_values(Role.PATH)


class _Rank:
    """Compute how the memory of one rank is shared by weights and KV.

    On the CPU every layer is held, and all ranks share CPU_BYTES.
    """

    def __init__(self, point: Point, chunk: int, shape: ModelShape, probe: Probe, requests: int) -> None:
        """Compute the fixed sizes; `chunk` is the number of prompt tokens of a step, for which prefill buffers are
        reserved, and `requests` that of requests with their own sliding windows.
        """
        self.point, self.itemsize = point, ITEMSIZE[point.dtype]
        self.shape = shape = shape.add_drafts(point.mtp)
        self.weights = shape.get_weight_format(point.weights_precision)
        self.page_bytes = memory.compute_page_bytes(shape, point.page_size, ITEMSIZE[point.kv_precision], point.layout)
        self.l2_bytes = probe.l2_bytes or 0
        self.fewest = self.whole = memory.count_all_layers(shape)
        self.free_bytes, self.buffers = CPU_BYTES // point.world, 0
        self.gpu = probe.device == "cuda" and probe.memory_bytes is not None
        if self.gpu:
            self.fewest = memory.compute_min_layers(
                shape, point.layout.spread, self.itemsize, self.l2_bytes, point.query_replication, self.weights
            )
            self.free_bytes = (probe.memory_bytes or 0) - memory.RESERVE_BYTES
            if chunk:
                kv_itemsize = ITEMSIZE[point.kv_precision]
                self.buffers = memory.compute_prefill_bytes(
                    shape, point.layout.spread, chunk, self.itemsize, point.ep, kv_itemsize=kv_itemsize
                )
                self.free_bytes -= self.buffers
        self.free_bytes -= requests * memory.compute_sliding_bytes(shape, point.layout, ITEMSIZE[point.kv_precision])

    def compute_weight_bytes(self, layers: Layers) -> int:
        """Return the bytes of this many distinct layers."""
        point = self.point
        return memory.compute_weight_bytes(
            self.shape, point.layout.spread, self.itemsize, *layers, point.query_replication, self.weights, ep=point.ep
        )

    def compute_pages_left(self, layers: Layers) -> int:
        """Return the number of pages that fit next to these layers; negative if the layers alone do not fit."""
        return min((self.free_bytes - self.compute_weight_bytes(layers)) // self.page_bytes, self.max_pages)

    @property
    def max_pages(self) -> int:
        """Maximum number of pages in which every token has a location."""
        return memory.LOCATIONS // (self.point.page_size * self.point.dcp)

    def fit_layers(self, pages: int) -> Layers:
        """Return as many layers as fit next to a pool of this many pages; raise InsufficientMemoryError if the fewest do not."""
        if self.compute_pages_left(self.fewest) < pages:
            raise self._make_memory_error(pages)
        dense, moe = self.fewest
        while dense < self.whole.dense and self.compute_pages_left(Layers(dense + 1, moe)) >= pages:
            dense += 1
        while moe < self.whole.moe and self.compute_pages_left(Layers(dense, moe + 1)) >= pages:
            moe += 1
        return Layers(dense, moe)

    def make_plan(self, pages: int, held: Layers, **limits: Any) -> EnginePlan:  # noqa: ANN401 -- fields of several types
        """Return the plan with this pool, these layers, and `limits` on what points may request."""
        layout, replicated = self.point.layout.spread, self.point.query_replication
        sure = sum(held) * memory.compute_certain_bytes(self.shape, layout, self.itemsize, replicated, self.weights)
        return EnginePlan(
            point=self.point,
            pages=pages,
            kv_bytes=pages * self.page_bytes,
            weight_bytes=self.compute_weight_bytes(held),
            full_weight_bytes=self.compute_weight_bytes(self.whole),
            held=held,
            layers=self.shape.layers,
            l2_warm=sure < memory.CACHE_FACTOR * self.l2_bytes,
            **limits,
        )

    def _make_memory_error(self, pages: int) -> InsufficientMemoryError:
        kv, weights, layout = pages * self.page_bytes, self.compute_weight_bytes(self.fewest), self.point.layout
        name = self.point.instance_name
        if self.gpu:
            problem = (
                f"the KV cache needs {kv / GIB:.1f} GiB per GPU and the fewest weights {weights / GIB:.1f} "
                f"GiB ({sum(self.fewest)} of {self.shape.layers} layers), {(kv + weights - self.free_bytes) / GIB:.1f} GiB more than the {self.free_bytes / GIB:.1f} GiB available"
            )
            return InsufficientMemoryError(f"{name}: {problem}", problem)
        return InsufficientMemoryError(
            f"{self.shape.name} {name} in {self.point.precision} needs {layout.tp * weights / GIB:,.1f} GiB of weights "
            f"and {layout.tp * kv / GIB:,.1f} GiB of KV cache over its {layout.tp} ranks, and a CPU run may take "
            f"{CPU_BYTES / GIB:.0f} GiB: without GPUs dcpbench only tests that everything works"
        )
