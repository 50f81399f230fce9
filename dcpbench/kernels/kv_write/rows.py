"""KV write to given rows with the mask `row >= 0` inside the kernel, as it is or as bytes of float8_e4m3fn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _e4m3_byte(x):
    """The byte of float8_e4m3fn nearest to an fp32, ties to even, past ±448 the largest; NaN stays NaN.

    In integers, and therefore the same on GPUs without an fp8 cast and in Triton's interpreter, whose cast rounds
    otherwise. Bits 20 and up of an fp32 are its exponent and the three mantissa bits that stay; the exponents' biases
    differ by 120. Below 2^-6 all bytes are multiples of 2^-9, the spacing of fp32 at 2^14: adding that rounds.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    finite = tl.minimum(size, 0x43E00000)  # 448.0
    normal = ((finite + 0x7FFFF + ((finite >> 20) & 1)) >> 20) - (120 << 3)
    small = (finite.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 16384.0
    byte = tl.where(finite >= 0x3C800000, normal, small)  # 2^-6
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _write_rows_kernel(
    kv, new, rows, kv_stride, new_stride, inverse_scale, width, FP8: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + b).to(tl.int64)
    q = tl.arange(0, BLOCK)
    stored = (q < width) & (row >= 0)
    values = tl.load(new + b * new_stride + q, mask=stored)
    if FP8:
        values = _e4m3_byte(values.to(tl.float32) * inverse_scale)
    tl.store(kv + tl.where(row >= 0, row, 0) * kv_stride + q, values, mask=stored)


def write_rows(kv_KQ: torch.Tensor, new_BQ: torch.Tensor, row_B: torch.Tensor, *, scale: float = 1.0) -> None:
    """See kernels.kv_write.write_rows."""
    width = kv_KQ.shape[1]
    fp8 = kv_KQ.element_size() == 1
    _write_rows_kernel[(row_B.shape[0],)](
        kv_KQ.view(torch.uint8) if fp8 else kv_KQ, new_BQ, row_B, kv_KQ.stride(0), new_BQ.stride(0), 1.0 / scale, width,
        FP8=fp8, BLOCK=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
