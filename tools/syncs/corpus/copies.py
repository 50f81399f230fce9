"""Define programs that copy between host and GPU, wait explicitly, or allocate, and programs on the host that do not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.syncs.corpus.inputs import Inputs


def cpu(i: Inputs) -> None:
    """Copy to the host, and wait."""
    i.x_RC.cpu()


def numpy(i: Inputs) -> None:
    """Copy to NumPy, and wait."""
    i.x_RC.cpu().numpy()


def tolist(i: Inputs) -> None:
    """Copy to a list, and wait."""
    i.ints_R.tolist()


def split_gpu_sizes(i: Inputs) -> None:
    """Split by sizes on the GPU, which must become Python integers."""
    i.x_RC[: i.lens_cpu_R.sum()].split(i.repeats_R.tolist())


def d2h_nonblocking_pinned(i: Inputs) -> None:
    """Copy into pinned memory without waiting."""
    i.pinned_RC.copy_(i.x_RC, non_blocking=True)


def d2h_pinned_blocking(i: Inputs) -> None:
    """Copy into pinned memory, and wait."""
    i.pinned_RC.copy_(i.x_RC)


def d2h_pageable_nonblocking(i: Inputs) -> None:
    """Copy into pageable memory: CUDA waits although the copy is non-blocking."""
    i.host_RC.copy_(i.x_RC, non_blocking=True)


def to_cpu_nonblocking(i: Inputs) -> None:
    """Copy to the host without waiting; torch uses pinned memory for the result."""
    i.x_RC.to("cpu", non_blocking=True)


def h2d_pageable(i: Inputs) -> None:
    """Copy from pageable memory, and wait."""
    i.host_RC.to(i.device)


def h2d_pageable_nonblocking(i: Inputs) -> None:
    """Copy 4 KiB from pageable memory, through a staging buffer."""
    i.host_RC.to(i.device, non_blocking=True)


def h2d_pageable_nonblocking_large(i: Inputs) -> None:
    """Copy 4 MiB from pageable memory, more than fit into CUDA's staging buffer."""
    i.large_cpu.to(i.device, non_blocking=True)


def h2d_pinned_nonblocking(i: Inputs) -> None:
    """Copy from pinned memory without waiting."""
    i.pinned_RC.to(i.device, non_blocking=True)


def tensor_from_list(i: Inputs) -> None:
    """Make a tensor from a list, which goes through pageable memory with a wait."""
    torch.tensor([1, 2, 3], device=i.device)


def tensor_from_list_to(i: Inputs) -> None:
    """Copy a list in two steps, the second of which is non-blocking."""
    torch.tensor([1, 2, 3]).to(i.device, non_blocking=True)


def tensor_from_list_pinned(i: Inputs) -> None:
    """Copy a list in two steps with pinned memory between them."""
    torch.tensor([1, 2, 3]).pin_memory().to(i.device, non_blocking=True)


def index_int_list(i: Inputs) -> None:
    """Index with a list, which becomes a tensor on the host first."""
    i.x_RC[[1, 2, 3]]


def index_cpu_mask(i: Inputs) -> None:
    """Index with a mask on the host: its count is known, its indices are copied."""
    i.x_RC[i.mask_cpu_R]


def setitem_number(i: Inputs) -> None:
    """Set one element to a number, which becomes a tensor on the host first."""
    i.x_RC[3, 2] = 1.0


def setitem_row(i: Inputs) -> None:
    """Set a row to a number, which is a fill."""
    i.x_RC[3] = 1.0


def add_cpu_scalar(i: Inputs) -> None:
    """Add a scalar tensor on the host, which is read there."""
    i.x_RC + torch.tensor(1.0)


def device_sync(i: Inputs) -> None:
    """Wait explicitly for the whole device."""
    torch.cuda.synchronize(i.device)


def stream_sync(i: Inputs) -> None:
    """Wait explicitly for a stream."""
    torch.cuda.current_stream(i.device).synchronize()


def event_sync(i: Inputs) -> None:
    """Wait explicitly for an event."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(i.device))
    event.synchronize()


def event_query(i: Inputs) -> None:
    """Query an event without waiting."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(i.device))
    event.query()


def stream_wait(i: Inputs) -> None:
    """Make one stream wait for another, but not the host."""
    torch.cuda.Stream(i.device).wait_stream(torch.cuda.current_stream(i.device))


def malloc_new(i: Inputs) -> None:
    """Allocate memory that the caching allocator does not have."""
    torch.empty(3 << 28, dtype=torch.uint8, device=i.device)


def empty_cache(i: Inputs) -> None:
    """Give memory back to CUDA, which first waits for all work."""
    cached = torch.empty(1 << 26, dtype=torch.uint8, device=i.device)
    del cached
    torch.cuda.empty_cache()


def host_item(i: Inputs) -> None:
    """Read a value on the host."""
    i.lens_cpu_R.sum().item()


def host_tolist(i: Inputs) -> None:
    """Read values on the host."""
    i.lens_cpu_R.tolist()


def host_mask(i: Inputs) -> None:
    """Index rows on the host with a mask on the host."""
    i.host_RC[i.mask_cpu_R]


def host_made(i: Inputs) -> None:
    """Test a tensor that is made explicitly on the host."""
    bool((torch.ones(8, device="cpu") > i.lens_cpu_R[0]).all())


def slice_python_int(i: Inputs) -> None:
    """Slice with Python integers."""
    i.x_RC[2 : 2 + int(i.lens_cpu_R[2])]
