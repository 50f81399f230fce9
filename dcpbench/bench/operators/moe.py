"""Bench moe: one of the two products of a rank's experts, over the tokens of a decode step or of prompts.

    triton      our own; gate-up ends in silu(gate) · up, and for decode batches picks its rows on the way in
    torch       torch's grouped product over rows that lie sorted already; gate-up without silu
    deepgemm    DeepGEMM's masked product over rows that lie in a slab for each expert already; likewise

So the others have less to do. What a call must read are the weights of experts that have a row, and the rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import cold_sets, compared, relative_error
from dcpbench.errors import MissingPackageError
from dcpbench.kernels.moe import decode, prompts
from dcpbench.points.floors import expert_work
from dcpbench.points.memory import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.operators.calls import Calls
    from dcpbench.bench.record import Case
    from dcpbench.points.floors import Work

LIMIT = 8e-3
"""Relative error past which a result is wrong: rounding it, and for gate-up its factors, to bf16."""
CHECKED = 8
"""Experts whose rows are compared with fp64: the fullest, and others spread over all."""
SLAB_ROWS = 64
"""DeepGEMM's slabs are multiples of so many rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a case."""

    product: str
    """`gate-up` or `down`."""
    experts: int
    """All of them here, cut by width."""
    top_k: int
    hidden: int
    width: int
    """I of one rank."""
    requests: int
    rows: str
    """`uniform`: experts are drawn alike; `skewed`: expert i with a chance ∝ 1 / (i + 1); `few`: one in four, the
    others have no row."""

    @property
    def gated(self) -> bool:
        """Whether gate and up are multiplied, and hidden states come in."""
        return self.product == "gate-up"

    @property
    def weight(self) -> tuple[int, int, int]:
        """[E, out, in]."""
        if self.gated:
            return self.experts, 2 * self.width, self.hidden
        return self.experts, self.hidden, self.width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of one call, and what comes of them."""

    sizes: Sizes
    x: torch.Tensor
    """gate-up: tokens [T, D]; down: rows [T·k, I], sorted by expert."""
    weight: torch.Tensor
    ids: torch.Tensor
    """int32 [T, top_k]"""
    counts: list[int]
    """Rows of each expert."""

    @functools.cached_property
    def sorted_rows(self) -> torch.Tensor:
        """The rows in the order of experts, [T·k, in]."""
        if not self.sizes.gated:
            return self.x
        order = torch.sort(self.ids.flatten(), stable=True).indices
        return self.x[order // self.sizes.top_k]

    def truth(self, expert: int, *, fused: bool) -> tuple[slice, torch.Tensor]:
        """(sorted rows of an expert, what comes of them in fp64)."""
        begin = sum(self.counts[:expert])
        rows = slice(begin, begin + self.counts[expert])
        y = self.sorted_rows[rows].double() @ self.weight[expert].double().T
        if self.sizes.gated and fused:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        return rows, y

    def work(self) -> Work:
        """Weights of experts that have a row, and each row read and each result written once."""
        _, height, depth = self.sizes.weight
        return expert_work(
            Product(depth, height),
            gated=self.sizes.gated,
            rows_in=len(self.x),
            rows=self.ids.numel(),
            hit=sum(count > 0 for count in self.counts),
            itemsize=self.x.itemsize,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A variant on its inputs."""

    call: Callable[[], tuple[torch.Tensor]]
    rows: Callable[[torch.Tensor], torch.Tensor]
    """What `call` returns as sorted rows."""
    fused: bool = False
    """Whether gate-up ends in silu(gate) · up."""


def triton(inputs: Inputs) -> Ready:
    """kernels/moe, as an engine calls it; what both products share is made before: the plan, or rows in order."""
    sizes = inputs.sizes
    if inputs.ids.numel() > decode.MOST_ASSIGNMENTS:
        rows_ID = inputs.sorted_rows
        _, ends = prompts.sort_by_expert(inputs.ids, 0, sizes.experts)
        return Ready(
            call=lambda: (prompts.product(rows_ID, inputs.weight, ends, gated=sizes.gated),),
            rows=lambda y: y,
            fused=True,
        )
    plan = decode.plan(inputs.ids, 0, sizes.experts)
    return Ready(
        call=lambda: (decode.product(inputs.x, inputs.weight, plan, sizes.top_k, gated=sizes.gated),),
        rows=lambda y: y,
        fused=True,
    )


def by_torch(inputs: Inputs) -> Ready:
    """`torch._grouped_mm`."""
    rows_ID, weight = inputs.sorted_rows, inputs.weight.transpose(-2, -1)
    _, ends = prompts.sort_by_expert(inputs.ids, 0, inputs.sizes.experts)
    grouped_mm = torch._grouped_mm  # noqa: SLF001 - public only from 2.12 on
    return Ready(call=lambda: (grouped_mm(rows_ID, weight, offs=ends),), rows=lambda y: y)


def deepgemm(inputs: Inputs) -> Ready:
    """`m_grouped_bf16_gemm_nt_masked` of DeepGEMM. Raises MissingPackageError without it."""
    try:
        import deep_gemm
    except ImportError as e:
        raise MissingPackageError(
            f"--variant deepgemm needs DeepGEMM ({e}); install sgl-deep-gemm, or leave it out with "
            "--variant triton,torch."
        ) from e
    counts = inputs.counts
    slab = -(-max(counts) // SLAB_ROWS) * SLAB_ROWS
    rows = inputs.sorted_rows
    x = rows.new_zeros(len(counts), slab, rows.shape[1])
    used = torch.arange(slab, device=x.device)[None] < torch.tensor(counts, device=x.device)[:, None]
    x[used] = rows
    y = rows.new_empty(len(counts), slab, inputs.weight.shape[1])
    masked = torch.tensor(counts, dtype=torch.int32, device=x.device)
    expected = -(-sum(counts) // len(counts))

    def call() -> tuple[torch.Tensor]:
        deep_gemm.m_grouped_bf16_gemm_nt_masked(x, inputs.weight, y, masked, expected)
        return (y,)

    return Ready(call=call, rows=lambda y: y[used])


VARIANTS: dict[str, Callable[[Inputs], Ready]] = {"triton": triton, "torch": by_torch, "deepgemm": deepgemm}


class Moe:
    """Builds cases. The weights are kept for the cases that follow: whole models of them take seconds to draw."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._weights: tuple[tuple[int, ...], list[torch.Tensor]] = ((), [])

    def build(self, case: Case) -> Calls:
        """Calls of a case with the sizes of `Sizes`."""
        sizes = Sizes(**case.sizes)  # type: ignore[arg-type]
        random = torch.Generator(self.device).manual_seed(self.seed)
        inputs = self._inputs(sizes, random)
        work = inputs.work()
        count = case.calls or cold_sets(work.memory_bytes, self.device)
        sets = [dataclasses.replace(inputs, weight=weight) for weight in self._weights_of(sizes.weight, count)]
        ready = [VARIANTS[case.variant](each) for each in sets]
        fullest = max(range(sizes.experts), key=lambda e: inputs.counts[e])
        chosen = {fullest, *range(0, sizes.experts, max(1, sizes.experts // CHECKED))}
        chosen = {e for e in chosen if inputs.counts[e]}

        def error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            found, wanted = [], []
            for number in (0, count - 1):
                y = ready[number].rows(*results[number])
                for expert in chosen:
                    rows, truth = sets[number].truth(expert, fused=ready[number].fused)
                    found.append(y[rows].double().flatten())
                    wanted.append(truth.flatten())
            return relative_error(torch.cat(found), torch.cat(wanted))

        calls = [each.call for each in ready]
        return compared(calls, error, LIMIT, work=work, written_bytes=count * work.memory_bytes)

    def _inputs(self, sizes: Sizes, random: torch.Generator) -> Inputs:
        chance = torch.ones(sizes.experts, device=self.device)
        if sizes.rows == "skewed":
            chance = 1 / torch.arange(1, sizes.experts + 1, device=self.device)
        if sizes.rows == "few":
            chance[torch.arange(sizes.experts, device=self.device) % min(4, sizes.experts // sizes.top_k) != 0] = 0
        ids_Tk = torch.multinomial(chance.expand(sizes.requests, -1), sizes.top_k, generator=random).int()
        rows = sizes.requests if sizes.gated else ids_Tk.numel()
        x = torch.randn(rows, sizes.weight[2], generator=random, device=self.device).to(self.dtype)
        counts = torch.bincount(ids_Tk.flatten(), minlength=sizes.experts).tolist()
        return Inputs(sizes=sizes, x=x, weight=x.new_empty(1, *sizes.weight[1:]), ids=ids_Tk, counts=counts)

    def _weights_of(self, shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
        kept, weights = self._weights
        if kept != shape:
            self._weights = (shape, weights := [])
        random = torch.Generator(self.device).manual_seed(self.seed + 1)
        while len(weights) < count:
            weight = torch.empty(shape, dtype=self.dtype, device=self.device)
            weights.append(weight.normal_(0, shape[2] ** -0.5, generator=random))
        return weights[:count]
