"""Random weights, made part by part on the device, the same for the same seed, name and part."""

from __future__ import annotations

import zlib

import torch


class SyntheticSource:
    """Normal numbers of standard deviation 1/sqrt(inputs), so that activations keep their size through the layers.

    Norm weights are 1; the routing bias is small. A part is seeded by its name and first row and column: ranks that
    share a part get the same numbers, and no rank ever makes a whole tensor.
    """

    kind: str = "synthetic"

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device
        self.generator = torch.Generator(device)

    def get(
        self, name: str, shape: tuple[int, ...], *, rows: slice | None = None, columns: slice | None = None
    ) -> torch.Tensor:
        """See weights.Source."""
        if len(shape) == 1:
            if not name.endswith("bias"):
                return torch.ones(shape, dtype=self.dtype, device=self.device)
            return self._normal(name, shape, 0.01)
        size = [len(range(*(part or slice(None)).indices(n))) for part, n in zip((rows, columns), shape, strict=True)]
        start = (rows.start if rows else 0, columns.start if columns else 0)
        std = 1.0 if "embed" in name else shape[1] ** -0.5
        return self._normal(f"{name}[{start}]", tuple(size), std)

    def _normal(self, key: str, size: tuple[int, ...], std: float) -> torch.Tensor:
        self.generator.manual_seed(zlib.crc32(f"{self.seed}/{key}".encode()))
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_(0.0, std, generator=self.generator)
