"""FlashInfer's paged decode with tensor cores. Its log2 LSE becomes natural log here, once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper

from dcpbench.errors import UsageError
from dcpbench.kernels.attention.flashinfer_mla import (
    WORKSPACE_BYTES,
    allocate_ints,
    copy_to_pinned,
    get_workspace,
)
from dcpbench.kernels.gqa import split_rows

if TYPE_CHECKING:
    from dcpbench.kernels.attention import Shards
    from dcpbench.kernels.gqa import GqaSpec

PROGRAMS = 2  # programs for each multiprocessor that a plan divides the work among
HEAD_DIMS = (64, 128, 256)  # columns of a head that the kernels are built for


class FlashInferGqa:
    """BatchDecodeWithPagedKVCacheWrapper in CUDA-graph mode. `plan` copies from pinned memory, without waiting."""

    tables = None
    rounds: tuple[str, ...] = ()

    def __init__(self, spec: GqaSpec) -> None:
        if spec.head_dim not in HEAD_DIMS or spec.dtype not in (torch.bfloat16, torch.float16) or spec.fp8:
            raise UsageError(
                f"--backend flashinfer takes heads of {', '.join(map(str, HEAD_DIMS))} columns in bf16 or fp16, not "
                f"{spec.head_dim} in {str(spec.kv_dtype or spec.dtype).removeprefix('torch.')}; use --backend triton."
            )
        self.spec = spec
        self.indices = allocate_ints(spec.batch * spec.max_pages, spec.device)
        self.empty_B1 = torch.zeros(spec.batch, 1, dtype=torch.bool, device=spec.device)  # no rows on this rank
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            get_workspace(spec.device, compute_workspace_bytes(spec)),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=allocate_ints(spec.batch + 1, spec.device),
            paged_kv_indices_buffer=torch.empty_like(self.indices),
            paged_kv_last_page_len_buffer=allocate_ints(spec.batch, spec.device),
        )
        # Two pinned buffers of plans, used in turn, as in flashinfer_mla.py.
        first = self.wrapper._pin_memory_int_workspace_buffer  # noqa: SLF001 - there is no other way to it
        self.staging = (first, torch.empty_like(first, pin_memory=True))
        self.plans = 0

    def plan_on_device(self) -> None:
        """Implement Backend.plan_on_device. `plan` does the work."""

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan. Page numbers pass through the device, as the wrapper waits for those of the host."""
        spec = self.spec
        used = [-(-length // spec.page_size) for length in shards.lengths]
        pages = copy_to_pinned(np.concatenate([p[:n] for p, n in zip(shards.pages, used, strict=True)]))
        indices = self.indices[: len(pages)].copy_(pages, non_blocking=True)
        lengths = np.asarray(shards.lengths)
        self.empty_B1.copy_(torch.from_numpy(lengths == 0).pin_memory().unsqueeze(1), non_blocking=True)
        self.wrapper._pin_memory_int_workspace_buffer = self.staging[self.plans % 2]  # noqa: SLF001 - see __init__
        self.plans += 1
        self.wrapper.plan(
            copy_to_pinned(np.cumsum([0, *used])),
            indices,
            copy_to_pinned(lengths - np.maximum(np.asarray(used) - 1, 0) * spec.page_size),
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.page_size,
            sm_scale=spec.scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )

    def run_kernel(self, q_BHX: torch.Tensor, kv: torch.Tensor, o_BHX: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Run the library's kernel alone: lse is a binary logarithm, and any number for a request without rows."""
        self.wrapper.run(q_BHX, split_rows(kv, self.spec.kv_heads), out=o_BHX, lse=lse_BH, return_lse=True)

    def run(self, q_BHX: torch.Tensor, kv: torch.Tensor, o_BHX: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        self.run_kernel(q_BHX, kv, o_BHX, lse_BH)
        lse_BH.mul_(math.log(2)).masked_fill_(self.empty_B1, float("-inf"))


def compute_workspace_bytes(spec: GqaSpec) -> int:
    """Return the bytes of the partial results of a plan in CUDA-graph mode, as FlashInfer 0.6 counts them.

    A plan has as many tiles of 16, 64 or 128 rows as the queries of all groups may take, or as a KV head has programs. Each
    takes its rows for every query head in fp32; another sixteenth is for log-sum-exps and alignment.
    """
    group = spec.heads // spec.kv_heads
    rows = next((rows for rows in (16, 64) if group <= rows), 128)
    programs = PROGRAMS * torch.cuda.get_device_properties(spec.device).multi_processor_count // spec.kv_heads
    tiles = max(programs, spec.batch - 1 + -(-spec.batch * group // rows))
    partial = spec.heads * tiles * rows * spec.head_dim * torch.float32.itemsize
    return max(WORKSPACE_BYTES, partial + partial // 16)
