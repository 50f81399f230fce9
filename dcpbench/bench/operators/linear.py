"""Bench linear: a linear layer of one rank, over the rows of a decode step or of prompts.

    triton      our own over fp8 weights (kernels/linear.py), as an engine calls it: its time includes quantising rows
    torch       torch's linear over bf16 weights, which an engine uses for them
    deepgemm    DeepGEMM's `fp8_gemm_nt` over rows that are quantised already
    flashinfer  FlashInfer's `fp8_blockscale_gemm_sm90`, which quantises rows itself

The minimum memory traffic of a call is the weights and the rows, counted in bf16 for all variants.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import compute_relative_error, count_cold_sets, make_checked_calls
from dcpbench.bench.operators.moe import make_exact, make_weights
from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.kernels import linear as kernels
from dcpbench.kernels.block_scaled import Scaled, dequantize_weight, quantize_rows
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points.memory import LinearShape
from dcpbench.points.roofline import compute_linear_work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.bench_record import Case
    from dcpbench.bench.operators.calls import Calls

LIMIT = 4e-3  # relative error past which a result is wrong: rounding to bf16 is off by 2⁻⁸ at most
CHECKED = 64  # rows that are compared with fp64, spread over all


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case."""

    layer: str  # name of the layer, such as `qkv_a`
    inputs: int
    outputs: int
    rows: int
    weights: str = "bf16"  # `bf16` or `fp8`


def make_triton_call(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
    """Return a call of kernels/linear.py. Raise UsageError for bf16, which has no kernel of ours."""
    if not isinstance(weight_NK, Scaled):
        raise UsageError("triton multiplies fp8 weights; use --variant torch with --weights bf16.")
    return lambda: (kernels.apply_linear(x_TK, weight_NK),)


def make_torch_call(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
    """Return a call of `torch.nn.functional.linear`. Raise UsageError for fp8."""
    if isinstance(weight_NK, Scaled):
        raise UsageError("torch has no product for block scales; use --variant triton,deepgemm with --weights fp8.")
    return lambda: (torch.nn.functional.linear(x_TK, weight_NK),)


def make_deepgemm_call(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
    """Return a call of DeepGEMM's product. Raise MissingPackageError without it, UsageError for bf16."""
    if not isinstance(weight_NK, Scaled):
        raise UsageError("deepgemm multiplies fp8 weights here; use --variant torch with --weights bf16.")
    try:
        import deep_gemm
    except ImportError as e:
        raise MissingPackageError(
            f"--variant deepgemm needs DeepGEMM ({e}); install sgl-deep-gemm, or leave it out with --variant triton."
        ) from e
    x = quantize_rows(x_TK)
    scale = x.scale.contiguous()  # a row's side by side, as it brings them into its own order
    y = torch.empty(len(x_TK), len(weight_NK.data), dtype=x_TK.dtype, device=x_TK.device)

    def run_product() -> tuple[torch.Tensor]:
        deep_gemm.fp8_gemm_nt((x.data, scale), (weight_NK.data, weight_NK.scale), y)
        return (y,)

    return run_product


def make_flashinfer_call(x_TK: torch.Tensor, weight_NK: torch.Tensor | Scaled) -> Callable[[], tuple[torch.Tensor]]:
    """Return a call of FlashInfer's product. Raise MissingPackageError without it, UsageError for bf16."""
    if not isinstance(weight_NK, Scaled):
        raise UsageError("flashinfer multiplies fp8 weights here; use --variant torch with --weights bf16.")
    try:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90
    except ImportError as e:
        raise MissingPackageError(
            f"--variant flashinfer needs a FlashInfer that has products with block scales ({e}); install "
            "flashinfer-python 0.6 or later, or leave it out with --variant triton."
        ) from e
    return lambda: (fp8_blockscale_gemm_sm90(x_TK, weight_NK.data, None, weight_NK.scale),)


VARIANTS: dict[str, Callable[[torch.Tensor, torch.Tensor | Scaled], Callable[[], tuple[torch.Tensor]]]] = {
    "triton": make_triton_call,
    "torch": make_torch_call,
    "deepgemm": make_deepgemm_call,
    "flashinfer": make_flashinfer_call,
}


class Linear:
    """Build cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case with the sizes of `Sizes`."""
        sizes = Sizes(**case.sizes)  # type: ignore[arg-type]
        random = torch.Generator(self.device).manual_seed(self.seed)
        product = LinearShape(sizes.inputs, sizes.outputs)
        scaled = sizes.weights == FP8
        stored = FORMATS[FP8] if scaled else UNQUANTISED
        work = compute_linear_work(product, sizes.rows, itemsize=self.dtype.itemsize, weights=stored)
        x = torch.randn(sizes.rows, sizes.inputs, generator=random, device=self.device).to(self.dtype)
        if scaled:
            x = make_exact(x)
        count = case.calls or count_cold_sets(work.memory_bytes, self.device)
        shape = (sizes.outputs, sizes.inputs)
        weights = [make_weights(shape, sizes.weights, self.dtype, random) for _ in range(count)]
        calls = [VARIANTS[case.variant](x, weight) for weight in weights]
        some = slice(None, None, max(1, sizes.rows // CHECKED))

        def compute_error(results: Sequence[tuple[torch.Tensor, ...]]) -> float:
            ends = (0, count - 1)
            found = torch.cat([results[number][0][some].double() for number in ends])
            wanted = torch.cat([x[some].double() @ convert_to_fp64(weights[number]).T for number in ends])
            return compute_relative_error(found, wanted)

        return make_checked_calls(calls, compute_error, LIMIT, work=work, written_bytes=count * work.memory_bytes)


def convert_to_fp64(weight_NK: torch.Tensor | Scaled) -> torch.Tensor:
    """Return the represented weight in fp64."""
    return (dequantize_weight(weight_NK) if isinstance(weight_NK, Scaled) else weight_NK).double()
