"""Define programs that read values from the GPU into Python, or need them to know a size."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tools.syncs.corpus.inputs import Inputs


def bool_all(i: Inputs) -> None:
    """Test a condition over a whole tensor."""
    bool((i.loc_R >= 0).all())


def item(i: Inputs) -> None:
    """Read one value."""
    i.x_RC[0, 0].item()


def if_tensor(i: Inputs) -> None:
    """Branch on a tensor."""
    if i.five > 3:
        i.five.add_(0)


def range_tensor(i: Inputs) -> None:
    """Loop over a range with a length on the GPU."""
    for _ in range(i.five):
        pass


def slice_gpu_scalar(i: Inputs) -> None:
    """Slice with an end on the GPU."""
    i.x_RC[: i.five]


def arange_gpu_scalar(i: Inputs) -> None:
    """Make a tensor with a size from the GPU."""
    torch.arange(i.five, device=i.device)  # type: ignore[call-overload]


def full_gpu_fill(i: Inputs) -> None:
    """Fill a tensor with a value from the GPU."""
    torch.full((3,), i.five, device=i.device)  # type: ignore[call-overload]


def equal(i: Inputs) -> None:
    """Compare a tensor with itself, which reads no values."""
    torch.equal(i.x_RC, i.x_RC)


def equal_other(i: Inputs) -> None:
    """Compare two tensors with separate memory."""
    torch.equal(i.x_RC, i.pool_RC)


def allclose(i: Inputs) -> None:
    """Compare approximately, which returns a Python bool."""
    torch.allclose(i.x_RC, i.pool_RC)


def isnan_any_assert(i: Inputs) -> None:
    """Assert on the GPU."""
    torch._assert_async(torch.isnan(i.x_RC).any().logical_not())  # noqa: SLF001 - torch's only assertion that does not wait


def print_tensor(i: Inputs) -> None:
    """Print a tensor, which reads values to choose a format."""
    with Path(os.devnull).open("w") as nowhere:
        print(i.x_RC[0, :4], file=nowhere)


def nonzero(i: Inputs) -> None:
    """Return the indices of true elements."""
    torch.nonzero(i.mask_R)


def nonzero_static(i: Inputs) -> None:
    """Return a requested number of indices."""
    torch.nonzero_static(i.mask_R, size=16)


def argwhere(i: Inputs) -> None:
    """Return the indices of true elements by argwhere."""
    torch.argwhere(i.mask_R)


def where_one_argument(i: Inputs) -> None:
    """Return indices of true elements by the one-argument form of where."""
    torch.where(i.mask_R)


def getitem_boolmask(i: Inputs) -> None:
    """Select rows by a mask."""
    i.x_RC[i.mask_R]


def masked_select(i: Inputs) -> None:
    """Select elements by a mask."""
    torch.masked_select(i.x_RC, i.mask_R[:, None])


def setitem_boolmask_scalar(i: Inputs) -> None:
    """Set masked rows to a number, which is a masked fill."""
    i.x_RC[i.mask_R] = 1.0


def setitem_boolmask_tensor(i: Inputs) -> None:
    """Copy masked rows into masked rows; both sides need the count."""
    i.pool_RC[i.mask_R] = i.x_RC[i.mask_R]


def index_put_bool_tensor(i: Inputs) -> None:
    """Copy a tensor into masked rows."""
    i.pool_RC.index_put_((i.mask_R,), i.x_RC[: 64 // 4])


def masked_fill(i: Inputs) -> None:
    """Fill with a Python number."""
    i.x_RC.masked_fill_(i.mask_R[:, None], 0.0)


def unique(i: Inputs) -> None:
    """Return distinct values."""
    torch.unique(i.ints_R)


def repeat_interleave(i: Inputs) -> None:
    """Repeat by numbers on the GPU, with a check of their signs and their sum."""
    torch.repeat_interleave(i.x_RC, i.repeats_R, dim=0)


def repeat_interleave_output_size(i: Inputs) -> None:
    """Repeat with a sum that the host knows."""
    torch.repeat_interleave(i.x_RC, i.repeats_R, dim=0, output_size=int(i.lens_cpu_R.sum()))


def bincount(i: Inputs) -> None:
    """Count integers, which needs the smallest and the largest."""
    torch.bincount(i.ints_R)


def bincount_minlength(i: Inputs) -> None:
    """Count integers with a minimum length, which needs the same values."""
    torch.bincount(i.ints_R, minlength=8)


def histc(i: Inputs) -> None:
    """Make a histogram of floats, which needs its limits."""
    torch.histc(i.x_RC, bins=8)


def one_hot(i: Inputs) -> None:
    """Encode without a number of classes, which needs the largest value."""
    torch.nn.functional.one_hot(i.ints_R)


def one_hot_num_classes(i: Inputs) -> None:
    """Encode with a given number of classes."""
    torch.nn.functional.one_hot(i.ints_R, num_classes=8)


def linalg_inv(i: Inputs) -> None:
    """Invert a matrix with an error check, which reads a status."""
    torch.linalg.inv(i.square_CC)


def normal_std(i: Inputs) -> None:
    """Draw with standard deviations on the GPU, which are checked to be positive."""
    torch.normal(i.x_RC, i.x_RC.abs() + 1)


def sub_alpha(i: Inputs) -> None:
    """Subtract with a tensor as `alpha`, which becomes a Python number."""
    i.x_RC.sub(i.pool_RC, alpha=i.five)  # type: ignore[arg-type]


def in_a_thread(i: Inputs) -> None:
    """Read one value on another thread."""
    thread = threading.Thread(target=item, args=(i,), name="reader")
    thread.start()
    thread.join()


def topk(i: Inputs) -> None:
    """Select a given number of largest elements."""
    torch.topk(i.x_RC, 4)


def sort(i: Inputs) -> None:
    """Sort; the result has the size of the input."""
    torch.sort(i.x_RC)


def cumsum(i: Inputs) -> None:
    """Sum cumulatively; the result has the size of the input."""
    torch.cumsum(i.ints_R, 0)


def multinomial(i: Inputs) -> None:
    """Draw a given number of samples."""
    torch.multinomial(i.x_RC + 1, 1)


def randperm(i: Inputs) -> None:
    """Permute a given number of elements."""
    torch.randperm(64, device=i.device)


def searchsorted(i: Inputs) -> None:
    """Search sorted values; the result has the size of the input."""
    torch.searchsorted(i.x_RC[:, 0].contiguous(), i.x_RC[:, 1].contiguous())


def scatter(i: Inputs) -> None:
    """Scatter by indices on the GPU."""
    i.pool_RC.scatter_(0, i.ints_R[:, None].expand(-1, 16), i.x_RC)


def index_select(i: Inputs) -> None:
    """Select rows by indices on the GPU."""
    i.x_RC.index_select(0, i.ints_R)


def index_put_accumulate(i: Inputs) -> None:
    """Accumulate at integer indices, the number of which is known."""
    i.pool_RC.index_put_((i.ints_R,), i.x_RC, accumulate=True)


def clip_grad(i: Inputs) -> None:
    """Clip a gradient; the norm stays on the GPU."""
    weight = torch.nn.Parameter(i.pool_RC)
    weight.grad = i.x_RC
    torch.nn.utils.clip_grad_norm_([weight], 1.0)


def pad_sequence(i: Inputs) -> None:
    """Pad sequences whose lengths the host knows."""
    torch.nn.utils.rnn.pad_sequence([i.x_RC[:3], i.x_RC[:5]], batch_first=True)
