"""int4 weights with a bf16 scale for each group of a row, and their layout for kernels that multiply them with bf16 rows (W4A16).

A weight is scale · q with q from −8 to 7, as compressed-tensors' symmetric W4A16 has it (Kimi-K2-Thinking: groups of 32). Checkpoints
store 8 numbers side by side in an int32. Here numbers are stored in the order in which a program multiplies them, so that unpacking moves
nothing between threads:

    data [E, K / 128, N, 32] int16    bits 4·i to 4·i + 3 of word j of a block of 128 columns: q + 8 of its column 32·i + j
    scale, groups of 32               int64 [E, K / 128, N]: the bf16 scales of a block, the first one in the lowest bits
    scale, groups of 128              int32 [E, K / 256, N]: the same of two blocks

The words of a block lie together for all rows: a program reads whole lines. K is rounded up to the columns of a word of scales, 128 or
256; columns past it have scales of 0.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from dcpbench.models.weight_formats import INT4_GROUPS

BLOCK = 128  # columns of a block: four parts, of which each word has one number
WORDS = BLOCK // 4  # words of a row in a block, and columns of a part
SPANS = dict(zip(INT4_GROUPS, (BLOCK, 2 * BLOCK), strict=True))  # columns per word of scales, by columns per group
ZERO = 8  # stored number of q = 0
STEPS = 7.5  # largest |weight| of a group over its scale, as compressed-tensors computes scales of 16 symmetric steps
DEVIATION = (21.5 * 13 / 12) ** 0.5  # root mean square of integers from −8 to 7, times scales from 0.5 to 1.5
SHRINK = 32  # a GPU unpacks weights times 2**-SHRINK: scales of subnormal numbers, up to 2**(133 - SHRINK) larger, are finite
MIN_SCALE = 2.0**-100  # lower bound of a scale, so that a group of zeros has one that does not underflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4:
    """Weights [E, N, K] in int4, in the layout of the module's docstring."""

    data: torch.Tensor
    scale: torch.Tensor
    group: int  # columns per scale: one of INT4_GROUPS
    depth: int  # K, a multiple of `group`

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return [E, N, K]."""
        return self.data.shape[0], self.data.shape[2], self.depth

    @property
    def nbytes(self) -> int:
        """Return the bytes of the numbers and their scales."""
        return self.data.nbytes + self.scale.nbytes

    def select_expert(self, expert: int) -> Int4:
        """Return the weight of one expert, as the only one."""
        one = slice(expert, expert + 1)
        return dataclasses.replace(self, data=self.data[one], scale=self.scale[one])


def quantize(weight: torch.Tensor, group: int) -> Int4:
    """Quantise weights [E, N, K] to the nearest steps. `group` must be one of INT4_GROUPS and divide K."""
    groups = weight.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1) / STEPS).clamp(min=MIN_SCALE).to(torch.bfloat16)
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-ZERO, ZERO - 1)
    return pack(q.flatten(-2).to(torch.int8), scale)


def pack(q_ENK: torch.Tensor, scale: torch.Tensor) -> Int4:
    """Return numbers from −8 to 7 and bf16 scales [E, N, K / group] in the layout of kernels."""
    experts, height, depth = q_ENK.shape
    group = depth // scale.shape[-1]
    padded = torch.nn.functional.pad(q_ENK, (0, -depth % SPANS[group]))
    parts = (padded + ZERO).to(torch.int32).view(experts, height, -1, 4, WORDS)
    words = parts[..., 0, :] | parts[..., 1, :] << 4 | parts[..., 2, :] << 8 | parts[..., 3, :] << 12
    data = words.to(torch.int16).transpose(1, 2).contiguous()
    return Int4(data=data, scale=pack_scales(scale, group), group=group, depth=depth)


def pack_scales(scale: torch.Tensor, group: int) -> torch.Tensor:
    """Return bf16 scales [E, N, K / group] in the layout of kernels."""
    together = SPANS[group] // group
    padded = _copy(torch.nn.functional.pad(scale, (0, -scale.shape[-1] % together)))
    return _copy(padded.view(torch.int64 if together == 4 else torch.int32).transpose(1, 2))


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of its shape: `contiguous` keeps others where a dimension has one element."""
    return x.clone(memory_format=torch.contiguous_format)


def draw_random(shape: tuple[int, int, int], group: int, deviation: float, random: torch.Generator) -> Int4:
    """Return uniform numbers from −8 to 7, with scales near those that give the weights [E, N, K] this standard deviation."""
    experts, height, depth = shape
    blocks = -(-depth // SPANS[group]) * (SPANS[group] // BLOCK)
    data = torch.empty(experts, blocks, height, WORDS, dtype=torch.int16, device=random.device)
    data.random_(-(2**15), 2**15, generator=random)
    scale = 0.5 + torch.rand(experts, height, depth // group, generator=random, device=random.device)
    words = pack_scales((scale * (deviation / DEVIATION)).to(torch.bfloat16), group)
    return Int4(data=data, scale=words, group=group, depth=depth)


def unpack(weight: Int4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers from −8 to 7, int8 [E, N, K], and their bf16 scales [E, N, K / group]."""
    words = weight.data.transpose(1, 2).to(torch.int32)
    parts = torch.stack([(words >> 4 * i & 15) - ZERO for i in range(4)], -2)
    scale = _copy(weight.scale.transpose(1, 2)).view(torch.bfloat16)
    return parts.flatten(2)[..., : weight.depth].to(torch.int8), scale[..., : weight.depth // weight.group]


def dequantize(weight: Int4) -> torch.Tensor:
    """Return the represented weights, fp32 [E, N, K]."""
    q_ENK, scale = unpack(weight)
    return q_ENK.float() * scale.float().repeat_interleave(weight.group, -1)


UNPACK = tl.constexpr(
    """{
    .reg .b32 high;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, $4, 0x00F000F0;
    shr.u32 high, $4, 8;
    and.b32 $2, high, 0x000F000F;
    and.b32 $3, high, 0x00F000F0;
    fma.rn.bf16x2 $0, $0, $5, $9;
    fma.rn.bf16x2 $1, $1, $6, $10;
    fma.rn.bf16x2 $2, $2, $7, $11;
    fma.rn.bf16x2 $3, $3, $8, $12;
    }"""
)
"""Unpack two words of 16 bits into eight scaled weights q · scale; a word has four numbers q + 8 of four bits. Without conversion, the
bits of q + 8 are a bf16 number, subnormal or not: (q + 8) · 2⁻¹³³. SCALE multiplies scales by the inverse power, less SHRINK so that they
are finite. One fma computes (q + 8) · scale − 8 · scale and rounds once, as −8 · scale is exact. Subnormal numbers must not be flushed."""

SCALE = tl.constexpr(
    """{
    .reg .b32 even, odd, zero, none;
    mov.b32 even, 0x72007200;
    mov.b32 odd, 0x70007000;
    mov.b32 zero, 0xB100B100;
    mov.b32 none, 0x80008000;
    fma.rn.bf16x2 $0, $3, even, none;
    fma.rn.bf16x2 $1, $3, odd, none;
    fma.rn.bf16x2 $2, $3, zero, none;
    }"""
)
"""Multiply two scales, below 2²⁷, by 2^(133 − SHRINK) for parts 0 and 2, by 2^(129 − SHRINK) for parts 1 and 3, which are four bits
further to the left, and by −8 · 2^−SHRINK."""


@triton.jit
def _get_half(word_N, HALF: tl.constexpr):
    return (word_N >> 16 * HALF).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split_scales(word_N, GROUP: tl.constexpr):
    """Return the words with the scales of parts 0 and 1 and of parts 2 and 3 of a block."""
    if GROUP == 32:
        low, high = word_N.to(tl.int32), (word_N >> 32).to(tl.int32)
    else:
        low, high = word_N, word_N
    return low, high


@triton.jit
def _scale_natively(word_N):
    return tl.inline_asm_elementwise(
        SCALE, "=&r,=&r,=&r,r", [word_N], (tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )


@triton.jit
def _unpack_part(word_NK, scale_N, PART: tl.constexpr):
    return ((word_NK >> 4 * PART & 15).to(tl.float32) - 8) * scale_N.to(tl.float32)[:, None]


@triton.jit
def _spread(scale_N, word_NK):
    return tl.broadcast_to(scale_N[:, None], word_NK.shape)


@triton.jit
def unpack_block(word_NK, scale_N, BLOCK: tl.constexpr, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """Return the four parts of a block of columns, [rows, 32] each: fp32, or if NATIVE bf16 times 2**-SHRINK.

    Args:
        word_NK: words of the block, [rows, 32].
        scale_N: words of scales, [rows].
        BLOCK: number of the block among those that share a word of scales.
        GROUP: columns per scale.
        NATIVE: True for a GPU's bf16 instructions, on two numbers each, which round a number once.
    """
    FIRST: tl.constexpr = 0 if GROUP == 32 else BLOCK
    SECOND: tl.constexpr = 1 if GROUP == 32 else BLOCK
    low, high = _split_scales(scale_N, GROUP)
    if NATIVE:
        even_01, odd_01, zero_01 = _scale_natively(low)
        even_23, odd_23, zero_23 = _scale_natively(high)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            UNPACK,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
            [
                word_NK,
                _spread(_get_half(even_01, FIRST), word_NK),
                _spread(_get_half(odd_01, SECOND), word_NK),
                _spread(_get_half(even_23, FIRST), word_NK),
                _spread(_get_half(odd_23, SECOND), word_NK),
                _spread(_get_half(zero_01, FIRST), word_NK),
                _spread(_get_half(zero_01, SECOND), word_NK),
                _spread(_get_half(zero_23, FIRST), word_NK),
                _spread(_get_half(zero_23, SECOND), word_NK),
            ],
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w0, w1 = _unpack_part(word_NK, _get_half(low, FIRST), 0), _unpack_part(word_NK, _get_half(low, SECOND), 1)
        w2, w3 = _unpack_part(word_NK, _get_half(high, FIRST), 2), _unpack_part(word_NK, _get_half(high, SECOND), 3)
    return w0, w1, w2, w3
