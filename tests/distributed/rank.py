"""Run a rank in place of `-m dcpbench.worker`, as a fork of a process that has imported torch.

For speed some parts are replaced, which other tests cover. The rank exchanges data through shared memory (shared.py). It
orders rows of prefixes with the reference, which is faster than Triton's interpreter: tests/kernels/test_kv_gather.py
compares both, and the ranks of test_kv_gather.py and test_prefill.py run the kernel. A noisy case of step times, as every
case on a busy CPU, has 4 samples; test_step_times_measuring.py tests their number. Garbage collections exclude objects
from before the fork.
"""

from __future__ import annotations

import ctypes
import gc
import runpy
import sys
from typing import TYPE_CHECKING

from tests import as_fork

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dcpbench.points.layout import Prefix

INSIDE = "--inside"


def gather_in_token_order(
    out_TQ: torch.Tensor, own_JQ: torch.Tensor, addresses: Sequence[int], rank: int, prefix: Prefix, table: torch.Tensor
) -> None:
    """Replace kv_gather.gather_in_token_order by its reference, which reads other ranks' parts at their addresses."""
    from dcpbench.kernels.kv_gather import gather_in_token_order_reference, make_request_table

    assert table.equal(make_request_table(prefix, table.device))
    assert addresses[0] == own_JQ.data_ptr()
    parts = [_view_rows(addresses[(n - rank) % prefix.dcp], own_JQ, prefix.part_rows) for n in range(prefix.dcp)]
    gather_in_token_order_reference(out_TQ, parts, prefix)


def _view_rows(address: int, like_JQ: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the tensor [rows, Q] at an address."""
    import torch

    count = rows * like_JQ.shape[1]
    if count == 0:
        return like_JQ[:0]
    memory = (ctypes.c_char * (count * like_JQ.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=like_JQ.dtype, count=count).view(rows, -1)


if __name__ == "__main__":
    if INSIDE not in sys.argv:
        sys.exit(as_fork.main([__spec__.name, *sys.argv[1:], INSIDE]))
    from dcpbench.exchange import prefix
    from dcpbench.workloads import step_timing
    from tests.distributed import shared

    step_timing.MAX_SAMPLES = 4
    prefix.gather_in_token_order = gather_in_token_order
    shared.replace_collectives()
    gc.unfreeze = lambda: None
    sys.argv.remove(INSIDE)
    runpy.run_module("dcpbench.worker", run_name="__main__")
