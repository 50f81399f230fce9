"""Bench exchange: communication of a decode attention layer between the ranks of a DCP group, exchange by exchange.

A call is the exchange's share of a layer: q in place → gather_q → partial results in place → merge. In an engine the
preceding operations have just written both, so they lie in the L2 cache; the bench keeps the cache warm, too.

    ag_rs        as the engine runs it: partial outputs are reduced in fp32
    ag_rs-bf16   the same, reduced in bf16
    others       as in exchange/

The minimum that a rank must receive, per request: q (N−1)/N·H·Q·2, o (N−1)/N·H·R·2, lse (N−1)/N·H·4 bytes, after one
barrier for q and one for the partial results.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import FRESH_CALLS, Calls, compute_relative_error, describe_error, reset_to_nan
from dcpbench.bench.operators.rendezvous import get_world_group
from dcpbench.exchange import ExchangeSpec, make_exchange
from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.kernels.merge import merge_partials
from dcpbench.models.shapes import KV_WIDTH, LATENT
from dcpbench.points.roofline import OperatorCost, compute_exchanged_bytes, compute_merge_work, compute_query_work

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.bench.bench_record import Case
    from dcpbench.exchange import Exchange
    from dcpbench.exchange.torch_collectives import Group

DTYPE = torch.bfloat16
LIMIT = 1e-2  # relative error past which a merged output is wrong: rounding partial outputs and their sums to bf16
EMPTY_ON_RANK_1, EMPTY_EVERYWHERE = 1, 2  # requests without rows, if there are enough requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilledSpec(ExchangeSpec):
    """Spec that returns pre-filled tensors where an exchange requests new ones."""

    q_BhQ: torch.Tensor  # noqa: N815 - tensor suffixes are part of a name
    o_BHR: torch.Tensor  # noqa: N815 - as above
    lse_BH: torch.Tensor  # noqa: N815 - as above

    def allocate_query(self, batch: int, ranks: int) -> torch.Tensor:  # noqa: ARG002 - made for this batch and these ranks
        """Return the pre-filled query."""
        return self.q_BhQ

    def allocate_partial(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - see allocate_query
        """Return the pre-filled partial output and lse."""
        return self.o_BHR, self.lse_BH


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Inputs of all ranks, identical on each rank."""

    q_BHQ: torch.Tensor  # noqa: N815 - as above
    o_NBHR: torch.Tensor  # noqa: N815 - as above
    lse_NBH: torch.Tensor  # noqa: N815 - as above

    @classmethod
    def from_case(cls, case: Case, device: torch.device, seed: int) -> Inputs:
        """Return random inputs, including requests without rows on some or all ranks; their o is NaN."""
        batch, heads, ranks, value = (int(case.sizes[n]) for n in ("requests", "heads", "ranks", "value"))
        random = torch.Generator(device).manual_seed(seed)

        def make_numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, device=device)

        o_NBHR, lse_NBH = make_numbers(ranks, batch, heads, value).to(DTYPE), 3 * make_numbers(ranks, batch, heads)
        empty_NB = torch.zeros(ranks, batch, dtype=torch.bool, device=device)
        empty_NB[1:2, EMPTY_ON_RANK_1 : EMPTY_ON_RANK_1 + 1] = True
        empty_NB[:, EMPTY_EVERYWHERE : EMPTY_EVERYWHERE + 1] = True
        o_NBHR[empty_NB] = float("nan")
        lse_NBH[empty_NB] = float("-inf")
        return cls(q_BHQ=make_numbers(batch, heads, KV_WIDTH).to(DTYPE), o_NBHR=o_NBHR, lse_NBH=lse_NBH)

    def merge_heads(self, heads: slice) -> torch.Tensor:
        """Return [h, B, R] of some heads, in fp64."""
        return merge_partials(self.o_NBHR[:, :, heads].double(), self.lse_NBH[:, :, heads].double()).transpose(0, 1)


def make_variant(variant: str, group: Group, spec: ExchangeSpec) -> Exchange:
    """Return the exchange of a variant."""
    name, _, reduce_dtype = variant.partition("-")
    return make_exchange(name, group, dataclasses.replace(spec, reduce_dtype=DTYPE) if reduce_dtype else spec)


class ExchangeBench:
    """Build cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed, self.group = device, seed, get_world_group()

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with sizes heads, requests, ranks, value and q. Collective."""
        group, batch, heads = self.group, int(case.sizes["requests"]), int(case.sizes["heads"])
        inputs = Inputs.from_case(case, self.device, self.seed)
        own = slice(heads // group.size * group.rank, heads // group.size * (group.rank + 1))
        replicate, value = case.sizes["q"] == "replicated", int(case.sizes["value"])
        mine = FilledSpec(
            batch=batch,
            heads=heads,
            width=KV_WIDTH,
            value=value,
            dtype=DTYPE,
            device=self.device,
            q_replicate=replicate,
            project_first=value < LATENT,
            q_BhQ=(inputs.q_BHQ if replicate else inputs.q_BHQ[:, own]).contiguous(),
            o_BHR=inputs.o_NBHR[group.rank],
            lse_BH=inputs.lse_NBH[group.rank],
        )
        exchange = make_variant(case.variant, group, mine)
        wanted_hBR = inputs.merge_heads(own)
        last: collections.deque[tuple[torch.Tensor, torch.Tensor]] = collections.deque(maxlen=2)

        def run_layer(fill: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
            q_BhQ = exchange.get_query_buffer(batch)
            fill(q_BhQ, mine.q_BhQ)
            q_BHQ = exchange.gather_q(q_BhQ)
            o_BHR, lse_BH = exchange.get_partial_buffers(batch)
            fill(o_BHR, mine.o_BHR)
            fill(lse_BH, mine.lse_BH)
            last.append((q_BHQ, exchange.merge_partials(o_BHR, lse_BH)))

        def run_call() -> None:
            run_layer(lambda *_: None)

        def compute_error() -> float:
            return max(compute_relative_error(got_hBR, wanted_hBR) for _, got_hBR in last)

        def check_results(run: Callable[[], None]) -> str:
            for q_BHQ, got_hBR in last:
                reset_to_nan(got_hBR)
                if q_BHQ.data_ptr() != mine.q_BhQ.data_ptr():  # equal if no q is gathered
                    reset_to_nan(q_BHQ)
            gather_objects(None)  # peers may write the gathered q: no rank begins before all have poisoned theirs
            run()
            if not all(torch.equal(q_BHQ, inputs.q_BHQ) for q_BHQ, _ in last):
                return "gathered q is not all ranks' q"
            return describe_error(compute_error(), LIMIT)

        calls = [run_call] * (case.calls or FRESH_CALLS)
        for _ in calls:  # every buffer that the exchange takes turns with is filled once
            run_layer(lambda place, numbers: place.copy_(numbers))
        return Calls(calls=calls, check=check_results, error=compute_error, work=compute_work(case))


def compute_work(case: Case) -> OperatorCost:
    """Return the work of a case; `comm_bytes` are the received bytes by the formula of the variant."""
    batch, heads, ranks, value = (int(case.sizes[n]) for n in ("requests", "heads", "ranks", "value"))
    replicate = case.sizes["q"] == "replicated"
    q = OperatorCost() if replicate else compute_query_work(batch, heads, ranks, KV_WIDTH, DTYPE.itemsize)
    merged = compute_merge_work(batch, heads, ranks, value, DTYPE.itemsize)
    q_bytes, merged_bytes = compute_exchanged_bytes(case.variant, batch, heads, ranks, KV_WIDTH, value, DTYPE.itemsize)
    return OperatorCost(
        received_bytes=q.received_bytes + merged.received_bytes,
        comm_bytes=merged_bytes + (0 if replicate else q_bytes),
        barriers=q.barriers + merged.barriers,
    )
