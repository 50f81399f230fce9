"""A synthetic model: random weights, block by block on the device, the same for the same seed in any sharding."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from dcpbench.engine.scaled_weights import ALL, slice_scaled
from dcpbench.kernels.block_scaled import quantize_weight
from dcpbench.models.weight_formats import SCALE_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.kernels.block_scaled import Scaled

BLOCK = 2 * SCALE_BLOCK  # rows or columns drawn together in a sharded dimension; shards may begin and end inside
REJECTED, CHOSEN = -8.0, (1.0, 2.0)  # logits of experts not taken; first and last taken, further apart than biases
_PRIMES = (1_000_003, 7_368_787)


class SyntheticSource:
    """Normal numbers of standard deviation 1/sqrt(inputs), so that activations keep their size through the layers.

    Norm weights are 1; the routing bias is small. A block is seeded by the tensor's name and the block's place in the
    whole tensor, so that every layout holds a shard of one and the same model, and no rank ever makes a whole tensor.
    """

    kind: str = "synthetic"

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device
        self.generator = torch.Generator(device)

    def get_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: slice | None = None,
        columns: slice | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Implement weights.Source.get_tensor. At most one of `rows` and `columns`, consistently for one name."""
        dtype = dtype or self.dtype
        if len(shape) == 1:
            if not name.endswith("bias"):
                return torch.ones(shape, dtype=dtype, device=self.device)
            return self._make_normal(name, shape, 0.01, dtype)
        std = 1.0 if "embed" in name else shape[1] ** -0.5
        if rows is None and columns is None:
            return self._make_normal(name, shape, std, dtype)
        dim, part = (0, rows) if rows is not None else (1, columns)
        assert part is not None
        size = list(shape)
        size[dim] = part.stop - part.start
        out = torch.empty(size, dtype=dtype, device=self.device)
        for drawn in self._iter_blocks(name, shape, dim, part, std, dtype):
            drawn.slice_output(out, dim, part).copy_(drawn.slice_numbers(drawn.numbers, dim, part))
        return out

    def get_scaled(self, name: str, shape: tuple[int, int], *, rows: slice = ALL, columns: slice = ALL) -> Scaled:
        """Implement weights.Source.get_scaled. Scales are those of normal numbers with a maximum of 448."""
        dim, part = (0, rows) if columns == ALL else (1, columns)
        part = slice(*part.indices(shape[dim])[:2])
        size = list(shape)
        size[dim] = part.stop - part.start
        data = torch.empty(size, dtype=torch.float8_e4m3fn, device=self.device)
        scale = torch.empty([-(-n // SCALE_BLOCK) for n in shape], dtype=torch.float32, device=self.device)
        for drawn in self._iter_blocks(name, shape, dim, part, shape[1] ** -0.5, torch.float32):
            block = quantize_weight(drawn.numbers)
            drawn.slice_output(data, dim, part).copy_(drawn.slice_numbers(block.data, dim, part))
            scale.narrow(dim, drawn.start // SCALE_BLOCK, block.scale.shape[dim]).copy_(block.scale)
        return slice_scaled(data, scale, shape, rows, columns)

    def _iter_blocks(
        self, name: str, shape: tuple[int, ...], dim: int, part: slice, std: float, dtype: torch.dtype
    ) -> Iterator[_Block]:
        """Yield the blocks of a weight that overlap `part`."""
        size = list(shape)
        for start in range(part.start // BLOCK * BLOCK, part.stop, BLOCK):
            size[dim] = min(BLOCK, shape[dim] - start)
            yield _Block(start, self._make_normal(f"{name}[{dim}:{start}]", tuple(size), std, dtype))

    def _make_normal(self, key: str, size: tuple[int, ...], std: float, dtype: torch.dtype) -> torch.Tensor:
        self.generator.manual_seed(zlib.crc32(f"{self.seed}/{key}".encode()))
        return torch.empty(size, dtype=dtype, device=self.device).normal_(0.0, std, generator=self.generator)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of a weight."""

    start: int
    numbers: torch.Tensor

    def slice_output(self, out: torch.Tensor, dim: int, part: slice) -> torch.Tensor:
        """Return the block's place in `out`, which is `part` of the weight."""
        first, last = self._find_overlap(dim, part)
        return out.narrow(dim, first - part.start, last - first)

    def slice_numbers(self, numbers: torch.Tensor, dim: int, part: slice) -> torch.Tensor:
        """Return the block's numbers, plain or quantised, that are in `part`."""
        first, last = self._find_overlap(dim, part)
        return numbers.narrow(dim, first - self.start, last - first)

    def _find_overlap(self, dim: int, part: slice) -> tuple[int, int]:
        return max(self.start, part.start), min(self.start + self.numbers.shape[dim], part.stop)


def make_router_inputs(
    numbers: list[int], *, layers: int, hidden: int, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return inputs of the router, drawn per request and layer, so that every layout routes to the same experts.

    [layers, T, hidden] standard normal; a row depends only on (seed, layer, request number). Hidden states of random
    weights would be routed differently in every layout, as rounding grows from layer to layer, and the rank with the
    most tokens determines the step time by some percent (docs/methodology.md).
    """
    out = torch.empty(layers, len(numbers), hidden, dtype=dtype, device=device)
    generator = torch.Generator(device)
    for t, number in enumerate(numbers):
        generator.manual_seed((seed * _PRIMES[0] + number + 1) * _PRIMES[1])
        out[:, t] = torch.empty(layers, hidden, dtype=dtype, device=device).normal_(generator=generator)
    return out


@dataclasses.dataclass(frozen=True)
class RouterInputs:
    """Inputs of the routers of a step: of all layers, or of one."""

    hidden: torch.Tensor  # [MoE layers or fewer, T or more, D]: routers' input in place of the hidden state, in turn
    logits: torch.Tensor | None = None  # [MoE layers, T or more, E]: used instead of the product's results, if set

    def select_layer(self, index: int, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input [T, D] and the logits [T, E] of one layer."""
        hidden_TD = self.hidden[index % len(self.hidden), :rows]
        return hidden_TD, None if self.logits is None else self.logits[index % len(self.logits), :rows]


def make_routed_logits(ids_LTk: np.ndarray, experts: int, device: torch.device) -> torch.Tensor:
    """Return logits [layers, T, E] in fp32 for which every routing rule selects these experts, with different weights."""
    ids = torch.from_numpy(ids_LTk.astype(np.int64)).to(device)
    out = torch.full((*ids.shape[:2], experts), REJECTED, device=device)
    chosen = torch.linspace(*CHOSEN, ids.shape[2], device=device)
    return out.scatter_(2, ids, chosen.expand(ids.shape))
