"""Programs that copy between host and GPU, wait by name, or allocate; and host-only ones that cost nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.syncs.corpus.inputs import Inputs


def cpu(i: Inputs) -> None:
    """A copy that is waited for."""
    i.x_RC.cpu()


def numpy(i: Inputs) -> None:
    """The same on the way to NumPy."""
    i.x_RC.cpu().numpy()


def tolist(i: Inputs) -> None:
    """The same on the way to a list."""
    i.ints_R.tolist()


def split_gpu_sizes(i: Inputs) -> None:
    """Sizes of a split must be Python integers."""
    i.x_RC[: i.lens_cpu_R.sum()].split(i.repeats_R.tolist())


def d2h_nonblocking_pinned(i: Inputs) -> None:
    """Into pinned memory, not waited for."""
    i.pinned_RC.copy_(i.x_RC, non_blocking=True)


def d2h_pinned_blocking(i: Inputs) -> None:
    """Into pinned memory, waited for."""
    i.pinned_RC.copy_(i.x_RC)


def d2h_pageable_nonblocking(i: Inputs) -> None:
    """Copy into pageable memory: CUDA waits although the copy is non-blocking."""
    i.host_RC.copy_(i.x_RC, non_blocking=True)


def to_cpu_nonblocking(i: Inputs) -> None:
    """Current torch takes pinned memory for the result."""
    i.x_RC.to("cpu", non_blocking=True)


def h2d_pageable(i: Inputs) -> None:
    """From pageable memory, waited for."""
    i.host_RC.to(i.device)


def h2d_pageable_nonblocking(i: Inputs) -> None:
    """From pageable memory: 4 KiB go through a staging buffer."""
    i.host_RC.to(i.device, non_blocking=True)


def h2d_pageable_nonblocking_large(i: Inputs) -> None:
    """4 MiB are more than CUDA's staging buffer takes at once."""
    i.large_cpu.to(i.device, non_blocking=True)


def h2d_pinned_nonblocking(i: Inputs) -> None:
    """From pinned memory, not waited for."""
    i.pinned_RC.to(i.device, non_blocking=True)


def tensor_from_list(i: Inputs) -> None:
    """A list goes through pageable memory and is waited for."""
    torch.tensor([1, 2, 3], device=i.device)


def tensor_from_list_to(i: Inputs) -> None:
    """Copy a list in two steps, the second of which is non-blocking."""
    torch.tensor([1, 2, 3]).to(i.device, non_blocking=True)


def tensor_from_list_pinned(i: Inputs) -> None:
    """Copy a list in two steps with pinned memory between them."""
    torch.tensor([1, 2, 3]).pin_memory().to(i.device, non_blocking=True)


def index_int_list(i: Inputs) -> None:
    """A list of indices is a tensor on the host first."""
    i.x_RC[[1, 2, 3]]


def index_cpu_mask(i: Inputs) -> None:
    """Index with a mask on the host: its count is known, its indices are copied."""
    i.x_RC[i.mask_cpu_R]


def setitem_number(i: Inputs) -> None:
    """A number into one element is a tensor on the host first."""
    i.x_RC[3, 2] = 1.0


def setitem_row(i: Inputs) -> None:
    """A number into a row is a fill."""
    i.x_RC[3] = 1.0


def add_cpu_scalar(i: Inputs) -> None:
    """A scalar tensor on the host is read there."""
    i.x_RC + torch.tensor(1.0)


def device_sync(i: Inputs) -> None:
    """Wait for the whole device by name."""
    torch.cuda.synchronize(i.device)


def stream_sync(i: Inputs) -> None:
    """A stream, by name."""
    torch.cuda.current_stream(i.device).synchronize()


def event_sync(i: Inputs) -> None:
    """An event, by name."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(i.device))
    event.synchronize()


def event_query(i: Inputs) -> None:
    """Asking is not waiting."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(i.device))
    event.query()


def stream_wait(i: Inputs) -> None:
    """One stream waits for another; the host does not."""
    torch.cuda.Stream(i.device).wait_stream(torch.cuda.current_stream(i.device))


def malloc_new(i: Inputs) -> None:
    """Memory that the caching allocator does not have yet."""
    torch.empty(3 << 28, dtype=torch.uint8, device=i.device)


def empty_cache(i: Inputs) -> None:
    """Memory is given back to CUDA, which first waits for all work."""
    cached = torch.empty(1 << 26, dtype=torch.uint8, device=i.device)
    del cached
    torch.cuda.empty_cache()


def host_item(i: Inputs) -> None:
    """A value that the host has."""
    i.lens_cpu_R.sum().item()


def host_tolist(i: Inputs) -> None:
    """Values that the host has."""
    i.lens_cpu_R.tolist()


def host_mask(i: Inputs) -> None:
    """A mask and rows that the host has."""
    i.host_RC[i.mask_cpu_R]


def host_made(i: Inputs) -> None:
    """A tensor that is made on the host, by name."""
    bool((torch.ones(8, device="cpu") > i.lens_cpu_R[0]).all())


def slice_python_int(i: Inputs) -> None:
    """A slice with Python integers."""
    i.x_RC[2 : 2 + int(i.lens_cpu_R[2])]
