"""float8_e4m3fn in Triton, where a GPU has a cast for it and where there is none."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

LARGEST = 448.0  # number of float8_e4m3fn, which has no infinity
ROUNDING = 2.0**-4 / 3**0.5  # relative error of rounding to e4m3, largest mean square: ± 2⁻⁴, uniformly


@triton.jit
def e4m3_byte(x, NATIVE: tl.constexpr):
    """Return the float8_e4m3fn byte nearest to an fp32: ties to even, ±448 at most, and NaN (of any sign) for NaN.

    NATIVE takes the GPU's own cast (compute capability 8.9 on). Otherwise in integers, as older GPUs have no cast and
    that of Triton's interpreter rounds otherwise. Bits 20 and up of an fp32 are its exponent and the three mantissa
    bits that stay; the exponents' biases differ by 120. Below 2^-6 all bytes are multiples of 2^-9, the spacing of fp32
    at 2^14: adding that rounds.
    """
    if NATIVE:
        # As it is: an or with a sign bit behind the cast, two numbers to a thread, came out wrong (ptxas of CUDA 12.8).
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    finite = tl.minimum(size, 0x43E00000)  # 448.0
    normal = ((finite + 0x7FFFF + ((finite >> 20) & 1)) >> 20) - (120 << 3)
    small = (finite.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 16384.0
    byte = tl.where(finite >= 0x3C800000, normal, small)  # 2^-6
    byte = tl.where(size > 0x7F800000, 0x7F, byte)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_number(byte):
    """Return the fp32 value of a float8_e4m3fn byte with integer arithmetic, as e4m3_byte without NATIVE."""
    bits = byte.to(tl.int32)
    size = bits & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # 2^-9
    number = tl.where(size == 0x7F, float("nan"), number)
    return tl.where(bits > 0x7F, -number, number)


@functools.cache
def get_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, or (0, 0) for a CPU and in Triton's interpreter, where a dry run's
    tensors claim CUDA.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return 0, 0
    return torch.cuda.get_device_capability(device)


def has_cast(device: torch.device) -> bool:
    """Return True if `e4m3_byte` may be NATIVE."""
    return get_capability(device) >= (8, 9)
