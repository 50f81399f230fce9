"""Define programs with the synchronisations that authors of engines found, before and after their fixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from tools.syncs.corpus.inputs import Inputs


def kv_write_check_all(i: Inputs) -> None:
    """Test if all locations belong to this rank, and filter if not: the test, and a filter per tensor."""
    valid_R = i.loc_R >= 0
    loc_R, rows_RC = i.loc_R, i.x_RC
    if not valid_R.all():
        loc_R = loc_R[valid_R]
        rows_RC = rows_RC[valid_R]
    i.pool_RC[loc_R] = rows_RC


def kv_write_filter(i: Inputs) -> None:
    """Filter always, without the test; the filters still wait."""
    valid_R = i.loc_R >= 0
    i.pool_RC[i.loc_R[valid_R]] = i.x_RC[valid_R]


@triton.jit
def _store_valid(loc_ptr, rows_ptr, pool_ptr, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    loc = tl.load(loc_ptr + row)
    column = tl.arange(0, COLUMNS)
    values = tl.load(rows_ptr + row * COLUMNS + column)
    tl.store(pool_ptr + loc * COLUMNS + column, values, mask=(column < COLUMNS) & (loc >= 0))


def kv_write_masked_kernel(i: Inputs) -> None:
    """Apply the mask inside a kernel."""
    _store_valid[(len(i.loc_R),)](i.loc_R, i.x_RC, i.pool_RC, COLUMNS=i.x_RC.shape[1])


def dp_slice_cuda(i: Inputs) -> None:
    """Slice with both ends on the GPU."""
    i.x_RC[i.five : i.five + i.five]


def dp_slice_host(i: Inputs) -> None:
    """Slice with both ends from token counts on the host."""
    start = sum(i.lens_cpu_R[:4].tolist())
    i.x_RC[start : start + 5]


def dcp_filter_indices(i: Inputs) -> None:
    """Select the KV indices of a rank by a mask (SGLang #36702)."""
    (i.ints_R[i.ints_R % 4 == 0]) // 4


def item_per_request(i: Inputs) -> None:
    """Read a value per item in a loop (SGLang #34907)."""
    for row in i.ints_R[:8]:
        row.item()


def sentinel_per_request(i: Inputs) -> None:
    """Make a constant of one element per request (SGLang #32575, before)."""
    torch.cat([torch.tensor([-1], device=i.device) for _ in range(3)])


def sentinel_on_device(i: Inputs) -> None:
    """Fill a constant of one element per request on the device (SGLang #32575, after)."""
    torch.cat([torch.full((1,), -1, device=i.device) for _ in range(3)])


def lengths_unpinned(i: Inputs) -> None:
    """Copy the lengths of a batch from pageable memory (SGLang #38703, before)."""
    torch.tensor([3, 1, 2], dtype=torch.int32).to(i.device, non_blocking=True)


def lengths_pinned(i: Inputs) -> None:
    """Copy the lengths of a batch from pinned memory (SGLang #38703, after)."""
    torch.tensor([3, 1, 2], dtype=torch.int32, pin_memory=True).to(i.device, non_blocking=True)


def longest_request(i: Inputs) -> None:
    """Read the longest length of a batch for a kernel launch (SGLang #4932)."""
    i.repeats_R.max().item()


def plan_from_gpu(i: Inputs) -> None:
    """Copy three index arrays for a plan on the host (SGLang #27689)."""
    i.ints_R.to("cpu")
    i.repeats_R.to("cpu")
    i.loc_R.to("cpu")


def mirror_then_wait(i: Inputs) -> None:
    """Copy into pinned memory, and wait for the stream (SGLang #31364)."""
    i.pinned_RC.copy_(i.x_RC, non_blocking=True)
    torch.cuda.current_stream(i.device).synchronize()


def copy_done_event(i: Inputs) -> None:
    """Copy into pinned memory, and wait for its event (SGLang #26454)."""
    i.pinned_RC.copy_(i.x_RC, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(i.device))
    done.synchronize()


def spec_metadata(i: Inputs) -> None:
    """Index by a mask, and repeat by numbers on the GPU (vLLM #38047, before)."""
    i.x_RC[i.mask_R]
    torch.repeat_interleave(i.x_RC, i.repeats_R, dim=0)


def rank_as_tensor(i: Inputs) -> None:
    """Make a tensor from a Python number (vLLM #58169)."""
    i.ints_R - torch.tensor(3, device=i.device)


def strided_pinned(i: Inputs) -> None:
    """Copy a strided view of pinned memory, staged through pageable memory (vLLM #51841, before)."""
    i.pool_RC[:, :7].copy_(i.pinned_RC[:, :7], non_blocking=True)


def strided_pinned_by_row(i: Inputs) -> None:
    """Copy contiguous rows of pinned memory (vLLM #51841, after)."""
    for row in range(3):
        i.pool_RC[row, :7].copy_(i.pinned_RC[row, :7], non_blocking=True)


KEPT: list[torch.Tensor] = []  # pinned tensors of earlier calls, kept so that torch cannot use their memory again


def pin_in_hot_path(i: Inputs) -> None:
    """Pin memory before a copy; the host pins pages, but does not wait for the GPU (vLLM #37006)."""
    KEPT.append(i.large_cpu.pin_memory())
    KEPT[-1].to(i.device, non_blocking=True)


def debug_assert(i: Inputs) -> None:
    """Assert a condition on a tensor (TensorRT-LLM #12445)."""
    assert (i.ints_R < 8).all()


def setitem_not_mask(i: Inputs) -> None:
    """Copy a tensor into the rows that a mask excludes (TensorRT-LLM #16265)."""
    i.pool_RC[~i.mask_R] = i.x_RC[: 64 - 64 // 4]


def masked_fill_cuda_value(i: Inputs) -> None:
    """Fill with a value on the GPU (pytorch #190512)."""
    i.x_RC.masked_fill_(i.mask_R[:, None], i.five.float())


def masked_fill_cpu_value(i: Inputs) -> None:
    """Fill with a value on the host (pytorch #190512)."""
    i.x_RC.masked_fill_(i.mask_R[:, None], torch.tensor(2.0))
