"""The backend `triton`: our own kernels, their workspace, and the selection of the kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from dcpbench.errors import UsageError
from dcpbench.kernels.attention import QUERIES, WEIGHTS, hopper_pairs
from dcpbench.kernels.attention.partition import LN_2, PartialOutputs
from dcpbench.kernels.attention.plain_mla import plain_kernel
from dcpbench.kernels.linear import count_multiprocessors

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, DecodeSpec, Shards

LOG2_E = math.log2(math.e)
HOPPER_HEADS = 64  # heads of one program of the Hopper kernel: the rows of one warpgroup's product
DIVISION = {"LEAST": hopper_pairs.MIN_TILES, "SLACK": hopper_pairs.SLACK}
HOPPER = {"BLOCK_K": 64, "STAGES": 2, "P_SLOTS": 1, "LOAD_WARPS": 4, "REGS": (160, 136, 56)} | DIVISION
"""Parameters that fill the 227 KB of shared memory of a multiprocessor; docs/kernels-attention.md lists variants that are
not faster.
"""
HOPPER_FP8 = {  # parameters for e4m3 rows, with tiles of half the size
    "BLOCK_K": 64,
    "STAGES": 2,
    "V_SLOTS": 3,
    "P_SLOTS": 1,
    "LOAD_WARPS": 4,
    "REGS": (160, 112, 80),
} | DIVISION
ROUNDS: dict[str, tuple[str, ...]] = {"hopper-fp8": (QUERIES,), "hopper-apart-fp8": (QUERIES, WEIGHTS)}
"""Tensors that a kernel rounds to e4m3, for kernels that round any."""
INTERPRETED_PARTS = 4  # programs without a GPU to query for its multiprocessors: enough to cut requests


def choose_kernel(spec: AttentionSpec) -> str:
    """Return 'plain' if the GPU has no Hopper instructions or no Hopper kernel supports the sizes.

    There, where pages can be copied whole and it can be compiled, 'hopper-few' up to 16 heads and 'hopper-pairs' past them,
    else 'hopper'; over e4m3 'hopper-apart-fp8', else 'hopper-fp8'.
    """
    gluon = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    hopper = gluon and spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) == (9, 0)
    fits = (spec.latent, spec.rope) == (512, 64) and spec.dtype in (torch.bfloat16, torch.float16)
    if not (hopper and fits):
        return "plain"
    compiled = hopper_pairs.supports_pages(spec.page_size) and hopper_pairs.is_installed()
    if compiled and hopper_pairs.has_few_heads(spec):
        return "hopper-few"
    if compiled:
        return "hopper-apart-fp8" if spec.fp8 else "hopper-pairs"
    if spec.query_length > 1:
        raise UsageError(
            f"--backend triton takes {spec.query_length} query rows of a request with pages of 16 or 32 rows or multiples "
            f"of 64, and with cuda-bindings; page size {spec.page_size} has no such kernel here. Use --page-size 64."
        )
    return "hopper-fp8" if spec.fp8 else "hopper"


class PageTables:
    """Page tables and local lengths of a batch in fixed buffers, written in place as captured graphs need it.

    Of each request: `pages` [requests, max_pages] int32 and `lengths` [requests] int32, those of its last query row. Of
    each query row: `row_lengths` [B] int32, which is `lengths` if requests have one row.
    """

    def __init__(self, spec: DecodeSpec) -> None:
        self.query_length = spec.query_length
        self.pages = torch.zeros(spec.requests, spec.max_pages, dtype=torch.int32, device=spec.device)
        self.lengths = torch.zeros(spec.requests, dtype=torch.int32, device=spec.device)
        self.row_lengths = self.lengths if spec.query_length == 1 else self.lengths.new_zeros(spec.batch)

    def copy_tables(self, shards: Shards) -> None:
        """Copy one step's tables to the device."""
        host = np.zeros(self.pages.shape, dtype=np.int32)
        for b, pages in enumerate(shards.pages):
            host[b, : len(pages)] = pages
        self.pages.copy_(torch.from_numpy(host))
        self.row_lengths.copy_(torch.tensor(shards.lengths, dtype=torch.int32))
        self.lengths.copy_(self.row_lengths[self.query_length - 1 :: self.query_length])


class TritonBackend:
    """Triton backend; R and P must be powers of two (512 and 64 in every published model). `kernel` names the kernel
    that runs.

    Work is divided on the device in each run, from the lengths there, so lengths and tables may change in place at any
    time. A run is two kernels: the attention, and the merge of requests that were cut.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.kernel = choose_kernel(spec)
        self.rounds = ROUNDS.get(self.kernel, ())
        self.heads = spec.query_length * spec.heads  # heads of a request's query rows, which share its KV rows
        self.block_h = HOPPER_HEADS if self.kernel != "plain" else min(64, max(16, triton.next_power_of_2(self.heads)))
        programs = count_multiprocessors(spec.device, INTERPRETED_PARTS)
        self.head_blocks = triton.cdiv(self.heads, self.block_h)
        self.parts = max(1, programs // self.head_blocks)
        self.tables = PageTables(spec)
        self.partial = PartialOutputs(spec.requests, self.parts, self.heads, spec.latent, spec.device)

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan."""
        self.tables.copy_tables(shards)

    def plan_on_device(self) -> None:
        """Do nothing, see Backend: each run divides its own work."""

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        spec = self.spec
        batch, heads = spec.requests, self.heads
        grid = (self.parts * self.head_blocks,)
        arguments = (
            q_BHQ,
            kv,
            self.tables.pages,
            self.tables.lengths,
            self.tables.row_lengths,
            self.partial.o,
            self.partial.lse,
            self.partial.of_request,
            o_BHR,
            lse_BH,
        )
        single = (*arguments[:4], *arguments[5:])  # kernels of one query row a request
        numbers = (LN_2, self.tables.pages.stride(0), heads, batch, self.parts)
        block_b = max(32, triton.next_power_of_2(batch))
        # Hopper kernels are imported only where they run: Triton before 3.6 and its interpreter cannot import them.
        if self.kernel in ("hopper-pairs", "hopper-apart-fp8", "hopper-few"):
            scale = spec.scale * spec.kv_scale * LOG2_E
            hopper_pairs.launch_kernel(spec, grid[0], q_BHQ, kv, arguments[2:], (scale, *numbers))
        elif self.kernel == "hopper":
            from dcpbench.kernels.attention.hopper_mla import hopper_kernel

            hopper_kernel[grid](
                *single, spec.scale * LOG2_E, *numbers, PAGE=spec.page_size, BLOCK_B=block_b, **HOPPER, num_warps=4
            )
        elif self.kernel == "hopper-fp8":
            from dcpbench.kernels.attention.hopper_mla_fp8 import hopper_fp8_kernel

            scales = (spec.scale * spec.kv_scale * LOG2_E, spec.kv_scale)
            hopper_fp8_kernel[grid](
                *single, *scales, *numbers, PAGE=spec.page_size, BLOCK_B=block_b, **HOPPER_FP8, num_warps=4
            )
        else:
            plain_kernel[grid](
                *arguments,
                spec.scale * spec.kv_scale * LOG2_E,
                spec.kv_scale,
                *numbers,
                spec.page_size,
                R=spec.latent,
                P=spec.rope,
                BLOCK_B=triton.next_power_of_2(batch),
                BLOCK_H=self.block_h,
                BLOCK_K=32,
                LEAST=4,
                SLACK=4,
                PRECISION="ieee" if q_BHQ.dtype == torch.float32 else "tf32",
                QUERY_LENGTH=spec.query_length,
                num_warps=8 if self.block_h == 64 else 4,
                num_stages=2,
            )
        self.partial.merge(self.tables.lengths, o_BHR, lse_BH)
