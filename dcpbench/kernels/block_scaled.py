"""fp8 with scales, as DeepSeek-V3's checkpoints have it: e4m3 numbers, and an fp32 scale for each block of them.

Weights have a scale for 128 × 128 numbers, activations one for 128 numbers of a row (DeepSeek-V3, arXiv 2412.19437, 3.3.2).
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from dcpbench.kernels.e4m3 import LARGEST, e4m3_byte, get_capability, has_cast
from dcpbench.models.weight_formats import SCALE_BLOCK

FEW_ROWS = 128  # up to which a product is bound by the reading of its weights, and scales of a group lie side by side
GROUPS, MORE_GROUPS, MANY = 8, 32, 16384  # groups that a program quantises; MORE_GROUPS above MANY in all
SCALE_STRIDES = ("scale_row", "scale_group")  # stride arguments without specialisation: one kernel for all batches
MIN_ABS_MAX = 1e-10  # lower bound of a block's largest number, so that a block of zeros has a scale


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Numbers divided by their scales."""

    data: torch.Tensor  # e4m3 [..., N, K], contiguous
    scale: torch.Tensor
    """fp32: of a weight [..., ⌈N / block[0]⌉, ⌈K / block[1]⌉], contiguous; of rows [N, ⌈K / block[1]⌉], as allocate_rows() has them
    or contiguous."""
    block: tuple[int, int] = (SCALE_BLOCK, SCALE_BLOCK)  # rows and columns per scale; smaller where a rank cuts blocks

    @property
    def nbytes(self) -> int:
        """Return the bytes of the numbers and their scales."""
        return self.data.nbytes + self.scale.nbytes


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activations [T, K], quantised by the kernel that made them, for products with e4m3 weights."""

    scaled: Scaled
    dtype: torch.dtype  # dtype of the numbers before quantisation, and of products
    plain: torch.Tensor | None = None  # numbers before quantisation, if requested


def needs_quantized_input(weight: object) -> bool:
    """Return True if kernels that make activations for a product with this weight also quantise them."""
    return isinstance(weight, Scaled) and weight.data.is_cuda


def allocate_rows(rows: int, depth: int, device: torch.device) -> Scaled:
    """Allocate rows in groups of 128 columns. `depth` must be a multiple of 128.

    A program of a product reads a group's scales of all its rows at once. Of few rows these lie side by side.
    """
    assert depth % SCALE_BLOCK == 0
    groups = depth // SCALE_BLOCK
    data = torch.empty(rows, depth, dtype=torch.float8_e4m3fn, device=device)
    strides = (1, rows) if rows <= FEW_ROWS else (groups, 1)
    scale = torch.empty_strided((rows, groups), strides, dtype=torch.float32, device=device)
    return Scaled(data, scale, (1, SCALE_BLOCK))


@triton.jit
def quantised(x_GK, LEAST: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr):
    """Return the bytes of e4m3 and the scales of groups in fp32, with IEEE rounding.

    A quotient that is off by one ulp may lie on the other side of the midpoint of two e4m3 numbers.
    """
    scale_G = tl.div_rn(tl.maximum(tl.max(tl.abs(x_GK), 1), LEAST), LARGEST)
    return e4m3_byte(tl.div_rn(x_GK, scale_G[:, None]), NATIVE), scale_G


@triton.jit
def store_quantised(
    x,
    data,
    scale,
    scale_row,
    scale_group,
    row,
    first,
    width,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise and store BLOCK fp32 numbers of a row from column `first` on, which begins a group; 0 past `width`.

    `scale_row`, `scale_group`: from a scale to that of the next row, and of the next group.
    """
    g = tl.arange(0, BLOCK // 128)
    byte_GK, scale_G = quantised(tl.reshape(x, [BLOCK // 128, 128]), LEAST, LARGEST, NATIVE)
    live = first + g * 128 < width
    tl.store(scale + row * scale_row + (first // 128 + g) * scale_group, scale_G, mask=live)
    at = row * width + first + g[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(data + at, byte_GK, mask=live[:, None])


def make_store_arguments(rows: Scaled | None) -> dict[str, object]:
    """Return the arguments of a kernel that can store quantised rows."""
    given: dict[str, object] = {"data": None, "scale": None, "NATIVE": False, "EARLY": False}
    row = group = 0
    if rows is not None:
        device, (row, group) = rows.data.device, rows.scale.stride()
        given = {
            "data": rows.data.view(torch.uint8),
            "scale": rows.scale,
            "NATIVE": has_cast(device),
            **get_launch_options(device),
        }
    at = {"scale_row": row, "scale_group": group}
    return given | at | {"QUANTISED": rows is not None, "LEAST": MIN_ABS_MAX, "LARGEST": LARGEST}


@triton.jit(do_not_specialize=SCALE_STRIDES)
def _rows_kernel(
    x,
    data,
    scale,
    scale_row,
    scale_group,
    count,
    groups,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Quantise BLOCK_G groups per program, regardless of the ends of their rows."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    g = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    live = g < count
    at = g[:, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
    x_GK = tl.load(x + at, mask=live[:, None], other=0.0).to(tl.float32)
    byte_GK, scale_G = quantised(x_GK, LEAST, LARGEST, NATIVE)
    tl.store(scale + g // groups * scale_row + g % groups * scale_group, scale_G, mask=live)
    tl.store(data + at, byte_GK, mask=live[:, None])


def get_launch_options(device: torch.device) -> dict[str, bool]:
    """Return the options of a launch with programs that start while the preceding kernel ends, and wait for it themselves.

    All programs of all kernels launched this way must wait. They let the next kernel's programs begin before they wait,
    so these may exist while earlier kernels still run; but a kernel that is waited for has itself waited, so a kernel
    that follows one of them follows all before it. Before its wait a program writes nothing, and reads no data that any
    of them writes.
    """
    return {"EARLY": True, "launch_pdl": True} if get_capability(device) >= (9, 0) else {"EARLY": False}


def quantize_rows(x_TK: torch.Tensor) -> Scaled:
    """Quantise rows [T, K] in groups of 128 columns, each divided by its largest |x| / 448. K is a multiple of 128."""
    rows = allocate_rows(len(x_TK), x_TK.shape[1], x_TK.device)
    count = rows.scale.numel()
    block = MORE_GROUPS if count > MANY else GROUPS
    _rows_kernel[(triton.cdiv(count, block),)](
        x_TK,
        rows.data.view(torch.uint8),
        rows.scale,
        *rows.scale.stride(),
        count,
        rows.scale.shape[1],
        LEAST=MIN_ABS_MAX,
        LARGEST=LARGEST,
        BLOCK_G=block,
        NATIVE=has_cast(x_TK.device),
        num_warps=4,
        **get_launch_options(x_TK.device),
    )
    return rows


def quantize_rows_reference(x_TK: torch.Tensor, group: int = SCALE_BLOCK) -> Scaled:
    """Return the reference quantisation, in groups of any number of columns; the last group may be smaller."""
    scaled = _quantize_blocks(x_TK.unsqueeze(-2), (1, group))
    return Scaled(scaled.data.squeeze(-2), scaled.scale.squeeze(-2), (1, group))


def quantize_weight(weight: torch.Tensor, block: tuple[int, int] = (SCALE_BLOCK, SCALE_BLOCK)) -> Scaled:
    """Quantise a weight [..., N, K] in blocks. Those at the lower and right edges may be smaller."""
    return _quantize_blocks(weight, block)


def _quantize_blocks(x: torch.Tensor, block: tuple[int, int]) -> Scaled:
    *_, height, depth = x.shape
    down, across = -(-height // block[0]), -(-depth // block[1])
    missing = (0, across * block[1] - depth, 0, down * block[0] - height)
    padded = torch.nn.functional.pad(x.float(), missing) if any(missing) else x.float()
    blocks = padded.unflatten(-1, (across, block[1])).unflatten(-3, (down, block[0]))
    # By a tensor, as torch on a GPU multiplies with the reciprocal of a number.
    largest = torch.full((), LARGEST, dtype=torch.float32, device=x.device)
    scale = blocks.abs().amax((-3, -1)).clamp(min=MIN_ABS_MAX) / largest
    data = (blocks / scale[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :height, :depth]
    return Scaled(data.to(torch.float8_e4m3fn).contiguous(), scale, block)


def dequantize_weight(weight: Scaled) -> torch.Tensor:
    """Return the represented weight, fp32 [..., N, K]."""
    *_, height, depth = weight.data.shape
    scale = weight.scale.repeat_interleave(weight.block[0], -2).repeat_interleave(weight.block[1], -1)
    return weight.data.float() * scale[..., :height, :depth]


def dequantize_rows(rows: Scaled) -> torch.Tensor:
    """Return the represented rows, fp32 [T, K]."""
    return rows.data.float() * rows.scale.repeat_interleave(rows.block[1], -1)[..., : rows.data.shape[-1]]
