"""An engine that is built for all points that share it, and taken down before the next one is built."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.groups import make_emulated_groups, make_groups
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.synthetic import RouterInputs, SyntheticSource, make_routed_logits, make_router_inputs
from dcpbench.engine.weights import load_weights
from dcpbench.exchange.emulated import Emulation
from dcpbench.exchange.symmetric_all_reduce import ReduceSpec, make_all_reduce
from dcpbench.models.weight_formats import INT4
from dcpbench.points.batches import compute_batch_rows
from dcpbench.points.budget import plan_whole
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.expert_choices import load_choices
from dcpbench.points.names import FP8, MOE_EP
from dcpbench.workloads import choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.engine.weights import Source
    from dcpbench.exchange.symmetric_all_reduce import AllReduce
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.budget import EnginePlan
    from dcpbench.points.point import Point
    from dcpbench.workloads.serve import Serving

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclasses.dataclass
class Session:
    """Everything that points with the same model, layout and storage share."""

    point: Point
    shape: ModelShape
    plan: EnginePlan
    engine: DecodeEngine
    reduce_spec: ReduceSpec
    all_reduces: dict[str, AllReduce] = dataclasses.field(default_factory=dict)
    emulation: Emulation | None = None  # emulation of a rank that represents a layout
    serving: Serving | None = None  # state shared by runs of the workload `serve` on the current path

    def apply_point(self, point: Point) -> None:
        """Switch to the backend, exchange and reduction of another point of this engine. Collective.

        Objects made for earlier points are kept, except their graphs, because they may be needed again.
        """
        model = self.engine.model
        if point.all_reduce not in self.all_reduces:
            self.all_reduces[point.all_reduce] = make_all_reduce(point.all_reduce, model.groups.attn, self.reduce_spec)
        model.all_reduce = self.all_reduces[point.all_reduce]
        self.engine.select_path(*choice.get_initial_candidate(point))
        self.point, self.serving = point, None

    def make_router_inputs(self, numbers: list[int], layers: int, seed: int) -> RouterInputs:
        """Return the router inputs used with synthetic weights, a row for each number; see engine/synthetic.py."""
        model, device, routing = self.engine.model, self.engine.device, self.point.routing
        hidden = make_router_inputs(
            numbers, layers=layers, hidden=self.shape.hidden, seed=seed, dtype=model.dtype, device=device
        )
        if not routing:
            return RouterInputs(hidden)
        ids_LTk = load_choices(routing, self.shape).draw(numbers, seed)
        return RouterInputs(hidden, make_routed_logits(ids_LTk, self.shape.experts, device))


def build_session(
    point: Point,
    shape: ModelShape,
    plan: EnginePlan,
    *,
    rank: int,
    device: torch.device,
    seed: int,
    alive: Callable[[], None] = lambda: None,
) -> Session:
    """Build weights, an empty KV pool and an engine as planned, on the path of `point`. Collective."""
    layout, dtype, shape = point.layout, DTYPES[point.dtype], shape.add_drafts(point.mtp)
    source: Source = SyntheticSource(seed, dtype, device)
    if point.weights != source.kind:
        source = CheckpointSource(Path(point.weights), dtype, device)
    emulation = Emulation(load_machine(point.emulate).comm_model.in_step) if point.emulate else None
    groups = make_emulated_groups(layout, rank, emulation) if emulation else make_groups(layout, rank)
    stored_as = shape.get_weight_format(point.weights_precision)
    weights = load_weights(
        source,
        shape,
        layout,
        rank,
        plan.held,
        alive,
        point.query_replication,
        point.ep,
        fp8=stored_as.name == FP8,
        int4_group=stored_as.columns or 0 if stored_as.name == INT4 else 0,
    )
    stored = torch.float8_e4m3fn if point.kv_precision == FP8 else dtype
    kv = KvPool(
        shape.stored_layers, plan.pages, point.page_size, shape.compute_kv_width(layout.attn_tp), stored, device
    )
    model = Model(
        shape,
        layout,
        groups,
        weights,
        kv,
        interleave=point.interleave,
        max_context=plan.max_context,
        device=device,
        replicated=point.query_replication,
    )
    if emulation and point.ep == MOE_EP:
        model.stands_for = layout.tp
    backend, exchange = choice.get_initial_candidate(point)
    engine = DecodeEngine(
        model,
        backend=backend,
        exchange=exchange,
        max_requests=plan.max_requests,
        max_context=plan.max_context,
        query_length=point.mtp + 1,
    )
    rows = compute_batch_rows(plan.max_requests) * (point.mtp + 1)
    spec = ReduceSpec(rows=rows, columns=shape.hidden, dtype=dtype, device=device)
    session = Session(point=point, shape=shape, plan=plan, engine=engine, reduce_spec=spec, emulation=emulation)
    session.apply_point(point)
    return session


def build_whole_session(
    point: Point, shape: ModelShape, lengths: list[int], *, rank: int, device: torch.device, seed: int
) -> Session:
    """Build an engine that holds all layers and has KV pages for requests of these lengths. Collective."""
    return build_session(point, shape, plan_whole(point, lengths, shape), rank=rank, device=device, seed=seed)


def free_memory(device: torch.device) -> None:
    """Return the memory of a dropped session to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
