"""The KV cache of one rank: the rows it owns, of every layer, in one tensor."""

from __future__ import annotations

import torch

from dcpbench.errors import CapacityError
from dcpbench.points.memory import GIB


class KvPool:
    """KV cache `data` [layers, pages, page_size, width]: latent ‖ rope key of the tokens that this rank stores.

    Page numbers are those of DcpAllocator (a virtual page is one physical page on each rank). A layer is contiguous, so
    that kernels see plain [pages, page_size, width] or, as rows, [pages · page_size, width].

    An e4m3 pool stores numbers divided by its `scale`. The scale is 1 as in engines without a calibrated one: the
    latent part is normed and the rope key is of similar size, far below ±448 and far above 2⁻⁹.
    """

    scale = 1.0

    def __init__(
        self, layers: int, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate a zeroed pool. Raise CapacityError if the device has too little free memory."""
        need = layers * pages * page_size * width * dtype.itemsize
        try:
            self.data = torch.zeros((layers, pages, page_size, width), dtype=dtype, device=device)
        except torch.OutOfMemoryError as e:
            raise CapacityError(
                f"a KV pool of {need / GIB:.1f} GiB does not fit on {device}; "
                "lower --concurrency or --context, or give --kv-memory"
            ) from e

    def get_all_rows(self) -> torch.Tensor:
        """Return a view [layers, pages · page_size, width]."""
        return self.data.flatten(1, 2)

    def get_rows(self, index: int) -> torch.Tensor:
        """Return a view [pages · page_size, width] of one layer, indexed by `layout.get_row(loc)`."""
        return self.data[index].view(-1, self.data.shape[-1])
