"""Stand-in for a collective: write its result and take its time, in one kernel.

Every block copies its part and then waits until the given number of nanoseconds has passed since its own start, by the
GPU's global timer. The copy is part of the time, like a collective's own reads and writes, and the stream is occupied
as long as by a collective. The kernel can be captured in CUDA graphs. On the CPU it copies and does not wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from dcpbench.measuring.timing import capture_graph

BLOCK = 4096
MAX_BLOCKS = 32  # maximum number of blocks, about as many as NCCL uses for a large message
PASSES, CALLS = 5, 200


@triton.jit(do_not_specialize=["size", "copies", "wait_ns"])
def _delay_kernel(x_ptr, out_ptr, size, copies, wait_ns, COPY: tl.constexpr, BLOCK: tl.constexpr):
    end = globaltimer() + wait_ns
    if COPY:
        for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, at < size)
            to = out_ptr + at
            for _ in range(copies):
                tl.store(to, x, at < size)
                to += size
    while globaltimer() < end:
        pass


def copy_and_wait(x: torch.Tensor, out: torch.Tensor | None, seconds: float) -> None:
    """Fill `out`, contiguous and an integer multiple of the size of x, with copies of x, and end after `seconds`.

    x is contiguous. Without `out` nothing is copied and x is unchanged.
    """
    copies = 0 if out is None else out.numel() // x.numel()
    if x.device.type != "cuda":
        if out is not None:
            out.view(copies, -1).copy_(x.reshape(1, -1).expand(copies, -1))
        return
    held_ns = max(round((seconds - measure_overhead_s(x.device)) * 1e9), 0)
    blocks = max(min(triton.cdiv(x.numel(), BLOCK), MAX_BLOCKS), 1) if copies else 1
    _delay_kernel[(blocks,)](x, x if out is None else out, x.numel(), copies, held_ns, COPY=copies > 0, BLOCK=BLOCK)


@functools.cache
def measure_overhead_s(device: torch.device) -> float:
    """Return the duration of a kernel that holds for 0 s in a sequence in a CUDA graph, by which the wait is shortened."""
    _launch_empty(device)
    torch.cuda.synchronize(device)

    def run_calls() -> None:
        for _ in range(CALLS):
            _launch_empty(device)

    graph = capture_graph(run_calls)
    times = []
    for _ in range(PASSES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / CALLS)
    return sorted(times)[PASSES // 2]


def _launch_empty(device: torch.device) -> None:
    nothing = torch.empty(1, device=device)
    _delay_kernel[(1,)](nothing, nothing, 1, 0, 0, COPY=False, BLOCK=BLOCK)
