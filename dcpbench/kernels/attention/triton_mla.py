"""Paged split-KV MLA decode in Triton: each program reads one stretch of one request's rows, a second kernel merges."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dcpbench.kernels.attention.page_tables import PageTables

if TYPE_CHECKING:
    from dcpbench.kernels.attention import AttentionSpec, Shards

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)


@triton.jit
def _split_kernel(
    q, kv, tables, lengths, part_o, part_lse,
    scale_log2, table_stride, heads, page_size,
    R: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    head_block = tl.program_id(1)
    split = tl.program_id(2)
    Q: tl.constexpr = R + P
    length = tl.load(lengths + b)
    chunk = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_K) * BLOCK_K
    first = split * chunk
    last = tl.minimum(first + chunk, length)

    h = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, R)
    p = tl.arange(0, P)
    live_h = h < heads
    q_rows = q + (b * heads + h)[:, None] * Q
    q_latent = tl.load(q_rows + r[None, :], mask=live_h[:, None], other=0.0)
    q_rope = tl.load(q_rows + R + p[None, :], mask=live_h[:, None], other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, R], tl.float32)
    for start in range(first, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        live_k = k < last
        page = tl.load(tables + b * table_stride + k // page_size, mask=live_k, other=0).to(tl.int64)
        row = (page * page_size + k % page_size) * Q
        latent = tl.load(kv + row[:, None] + r[None, :], mask=live_k[:, None], other=0.0)
        rope = tl.load(kv + row[:, None] + R + p[None, :], mask=live_k[:, None], other=0.0)
        score = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        score += tl.dot(q_rope, tl.trans(rope), input_precision=PRECISION)
        score = tl.where(live_k[None, :], score * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)  # new_top is finite: every stretch of BLOCK_K rows has a live one
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(latent.dtype), latent, input_precision=PRECISION)
        top = new_top

    # A stretch without rows has total 0: its lse is -inf and its o is 0, never 0/0.
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    lse = tl.where(empty, float("-inf"), top + tl.log2(safe))
    out = (b * heads + h) * SPLITS + split
    tl.store(part_o + out[:, None] * R + r[None, :], acc / safe[:, None], mask=live_h[:, None])
    tl.store(part_lse + out, lse, mask=live_h)


@triton.jit
def _merge_kernel(part_o, part_lse, o, lse_out, LN2: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, R)
    s = tl.arange(0, SPLITS)
    lse_s = tl.load(part_lse + row * SPLITS + s)
    top = tl.max(lse_s, 0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse_s - pivot), 0)
    acc = tl.zeros([R], tl.float32)
    for i in range(SPLITS):
        weight = tl.exp2(tl.load(part_lse + row * SPLITS + i) - pivot)
        acc += weight * tl.load(part_o + (row * SPLITS + i) * R + r)
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(o + row * R + r, (acc / safe).to(o.dtype.element_ty))
    tl.store(lse_out + row, tl.where(total == 0.0, float("-inf"), (pivot + tl.log2(safe)) * LN2))


class TritonBackend:
    """Correct first, not yet fast. R and P must be powers of two (512 and 64 in every published model)."""

    name = "triton"

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec
        self.block_h = min(64, max(16, triton.next_power_of_2(spec.heads)))
        programs = spec.batch * triton.cdiv(spec.heads, self.block_h)
        multiprocessors = (
            torch.cuda.get_device_properties(spec.device).multi_processor_count if spec.device.type == "cuda" else 4
        )
        wanted = max(1, min(64, 2 * multiprocessors // programs))
        self.splits = 1 << (wanted.bit_length() - 1)
        self.tables = PageTables(spec)
        rows = spec.batch * spec.heads
        self.part_o = torch.empty(rows * self.splits, spec.latent, dtype=torch.float32, device=spec.device)
        self.part_lse = torch.empty(rows * self.splits, dtype=torch.float32, device=spec.device)

    def plan(self, shards: Shards) -> None:
        """See Backend."""
        self.tables.fill(shards)

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """See Backend."""
        spec = self.spec
        batch, heads, _ = q_BHQ.shape
        _split_kernel[(batch, triton.cdiv(heads, self.block_h), self.splits)](
            q_BHQ, kv, self.tables.pages, self.tables.lengths, self.part_o, self.part_lse,
            spec.scale * LOG2_E, self.tables.pages.stride(0), heads, spec.page_size,
            R=spec.latent, P=spec.rope, SPLITS=self.splits, BLOCK_H=self.block_h, BLOCK_K=32,
            PRECISION="ieee" if q_BHQ.dtype == torch.float32 else "tf32",
            num_warps=8 if self.block_h == 64 else 4, num_stages=2,
        )  # fmt: skip
        _merge_kernel[(batch * heads,)](
            self.part_o, self.part_lse, o_BHR, lse_BH, LN2=LN_2, R=spec.latent, SPLITS=self.splits
        )
