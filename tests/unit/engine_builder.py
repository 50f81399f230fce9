"""Build engines of single ranks in one process: groups have a size and a rank but no communication."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.groups import Groups
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.exchange.torch_collectives import Group
from dcpbench.models import SHAPES
from dcpbench.points import memory
from dcpbench.points.layout import Layout

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


def make_layers(shape: ModelShape, dense: int | None = None, moe: int | None = None) -> memory.Layers:
    """Return this many distinct layers to hold, by default all of them."""
    whole = memory.count_all_layers(shape)
    return memory.Layers(whole.dense if dense is None else dense, whole.moe if moe is None else moe)


def collect_tensors(node: object) -> list[torch.Tensor]:
    """Return every tensor of nested dataclasses and lists, such as the weights of a rank."""
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, list):
        return [t for child in node for t in collect_tensors(child)]
    if dataclasses.is_dataclass(node):
        return [t for field in dataclasses.fields(node) for t in collect_tensors(getattr(node, field.name))]
    return []


def count_bytes(node: object) -> int:
    """Return the bytes of all tensors, each counted once."""
    return sum(t.nbytes for t in {id(t): t for t in collect_tensors(node)}.values())


def make_groups(layout: Layout, rank: int) -> Groups:
    """Return this rank's groups without process groups: their collectives do nothing."""
    dp = rank // layout.attn_tp
    return Groups(
        attn=Group(layout.attn_tp, layout.get_attn_rank(rank), None),
        dcp=Group(layout.dcp, layout.get_dcp_rank(rank), None),
        dp=Group(layout.dp, dp, None),
    )


def make_engine(
    layout: Layout = Layout(1),  # noqa: B008 - frozen
    rank: int = 0,
    *,
    shape: ModelShape = TINY,
    pages: int = 64,
    page_size: int = 1,
    interleave: int = 1,
    requests: int = 4,
    context: int = 32,
    query_length: int = 1,
    seed: int = 0,
) -> DecodeEngine:
    """Return the engine of one rank in fp32 with synthetic weights; it can run steps if the layout has one rank."""
    weights = load_weights(SyntheticSource(seed, torch.float32, CPU), shape, layout, rank, make_layers(shape))
    kv = KvPool(shape.stored_layers, pages, page_size, shape.compute_kv_width(layout.attn_tp), torch.float32, CPU)
    groups = make_groups(layout, rank)
    model = Model(shape, layout, groups, weights, kv, interleave=interleave, max_context=context, device=CPU)
    return DecodeEngine(
        model,
        backend="reference",
        exchange="none",
        max_requests=requests,
        max_context=context,
        query_length=query_length,
    )


class Recorder(SyntheticSource):
    """Provide synthetic weights in fp32, and record every requested tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, torch.float32, CPU)
        self.made: dict[str, torch.Tensor] = {}

    def get_tensor(self, name: str, *args: object, **kwargs: object) -> torch.Tensor:
        """Return a tensor as in weights.Source, and record it."""
        self.made[name] = super().get_tensor(name, *args, **kwargs)  # type: ignore[arg-type]
        return self.made[name]


def make_tensors(shape: ModelShape) -> dict[str, torch.Tensor]:
    """Return all tensors of a model by their names in a checkpoint."""
    recorder = Recorder()
    load_weights(recorder, shape, Layout(1), 0, make_layers(shape))
    return recorder.made


def make_shape(**changes: object) -> ModelShape:
    """Return the tiny shape with some fields changed."""
    return dataclasses.replace(TINY, **changes)
