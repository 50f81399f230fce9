"""FlashMLA's dense MLA decode for Hopper, from the package sgl-flash-mla, which keeps it under `use_legacy`.

Over KV rows in e4m3 it multiplies e4m3 queries: they are rounded as they are, with a scale of 1, as engines do without a
calibrated one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from flash_mla import get_mla_decoding_metadata
from flash_mla.flash_mla_interface import FlashMLASchedMeta, flash_mla_with_kvcache

from dcpbench.errors import UsageError
from dcpbench.kernels.attention import QUERIES, WEIGHTS
from dcpbench.kernels.attention.triton_mla import PageTables
from dcpbench.kernels.e4m3 import e4m3_byte, has_cast

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, Shards

PAGE = 64  # rows of a page, the only size that the kernel reads


@triton.jit
def _take_kernel(o, lse, lengths, o_out, lse_out, heads, BLOCK_H: tl.constexpr, R: tl.constexpr):
    """Copy BLOCK_H heads of a request; the log-sum-exp of a request without rows is +inf in FlashMLA and -inf here."""
    b = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    live = h < heads
    row = b.to(tl.int64) * heads + h
    found = tl.load(lse + row, mask=live)
    tl.store(lse_out + row, tl.where(tl.load(lengths + b) == 0, float("-inf"), found), mask=live)
    place = row[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(o_out + place, tl.load(o + place, mask=live[:, None]), mask=live[:, None])


@triton.jit
def _round_kernel(q, out, count, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, e4m3_byte(tl.load(q + at, mask=at < count).to(tl.float32), NATIVE), mask=at < count)


def quantize_queries(q: torch.Tensor) -> torch.Tensor:
    """Return queries as e4m3, limited to ±448; contiguous."""
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    block = 2048
    grid = (triton.cdiv(q.numel(), block),)
    _round_kernel[grid](q, out.view(torch.uint8), q.numel(), BLOCK=block, NATIVE=has_cast(q.device))
    return out


def copy_results(
    o_BHR: torch.Tensor, lse_BH: torch.Tensor, lengths_B: torch.Tensor, o_out: torch.Tensor, lse_out: torch.Tensor
) -> None:
    """Copy FlashMLA's contiguous results to their destination, with lse = -inf for requests without rows."""
    batch, heads, latent = o_out.shape
    grid = (batch, triton.cdiv(heads, 4))
    _take_kernel[grid](o_BHR, lse_BH, lengths_B, o_out, lse_out, heads, BLOCK_H=4, R=latent)


class FlashMlaBackend:
    """Run FlashMLA with a plan that a kernel makes on the device from the lengths, once a step, in fixed buffers.

    A run is three kernels: the attention, its own merge, and a copy of outputs and log-sum-exps to their destination,
    as FlashMLA allocates its results.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        if (spec.latent, spec.rope) != (512, 64) or spec.dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(
                f"--backend flashmla takes latent 512, rope 64 in bf16 or fp16, not {spec.latent}, {spec.rope} in "
                f"{str(spec.dtype).removeprefix('torch.')}; use --backend triton."
            )
        if spec.page_size != PAGE:
            raise UsageError(
                f"--backend flashmla reads pages of {PAGE} rows, not {spec.page_size}; use --page-size {PAGE} or "
                "--backend triton."
            )
        if spec.device.type != "cuda" or torch.cuda.get_device_capability(spec.device) != (9, 0):
            raise UsageError("--backend flashmla needs a Hopper GPU (H100, H200, H20); use --backend triton.")
        self.spec = spec
        self.tables = PageTables(spec)
        self.rounds: tuple[str, ...] = (QUERIES, WEIGHTS) if spec.fp8 else ()
        self.scales: dict[str, Any] = {}  # keyword arguments of the kernel for e4m3
        if spec.fp8:
            q_scale, kv_scale = torch.tensor([[1.0], [spec.kv_scale]], device=spec.device)
            self.scales = {"is_fp8_kvcache": True, "descale_q": q_scale, "descale_k": kv_scale}
        metadata, splits = self._get_schedule()
        self.metadata = FlashMLASchedMeta(tile_scheduler_metadata=metadata, num_splits=splits)

    def _get_schedule(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the part of each request that each multiprocessor computes, and the number of parts of each request."""
        fp8 = self.spec.fp8
        return get_mla_decoding_metadata(self.tables.lengths, self.spec.heads, 1, is_fp8_kvcache=fp8, use_legacy=True)

    def plan(self, shards: Shards) -> None:
        """Implement Backend.plan."""
        self.tables.copy_tables(shards)
        self.plan_on_device()

    def plan_on_device(self) -> None:
        """Implement Backend.plan_on_device."""
        metadata, splits = self._get_schedule()
        self.metadata.tile_scheduler_metadata.copy_(metadata)
        self.metadata.num_splits.copy_(splits)

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Implement Backend.run."""
        o, lse = flash_mla_with_kvcache(
            (quantize_queries(q_BHQ) if self.spec.fp8 else q_BHQ).unsqueeze(1),
            kv.unsqueeze(2),
            self.tables.pages,
            self.tables.lengths,
            self.spec.latent,
            self.metadata,
            softmax_scale=self.spec.scale,
            use_legacy=True,
            **self.scales,
        )
        copy_results(o, lse, self.tables.lengths, o_BHR, lse_BH)
