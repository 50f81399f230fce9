"""Page tables and local lengths of a batch in fixed device buffers, written in place as captured graphs need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, Shards


class PageTables:
    """`pages` [B, max_pages] int32 and `lengths` [B] int32 on the device."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.pages = torch.zeros(spec.batch, spec.max_pages, dtype=torch.int32, device=spec.device)
        self.lengths = torch.zeros(spec.batch, dtype=torch.int32, device=spec.device)

    def fill(self, shards: Shards) -> None:
        """Copy one step's tables to the device."""
        host = np.zeros(self.pages.shape, dtype=np.int32)
        for b, pages in enumerate(shards.pages):
            host[b, : len(pages)] = pages
        self.pages.copy_(torch.from_numpy(host))
        self.lengths.copy_(torch.tensor(shards.lengths, dtype=torch.int32))
