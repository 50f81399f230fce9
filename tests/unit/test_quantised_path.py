"""A step whose kernels quantise what they give, as on a GPU, against one that quantises in front of each product.

Triton's interpreter runs both kinds; a GPU is not needed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from dcpbench.engine import model as walked
from dcpbench.engine.attention import mla
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model, StepInput
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels import block_scaled, moe, norm, qkv_norm_rope
from dcpbench.kernels import linear as linears
from dcpbench.kernels.block_scaled import Rows, Scaled, quantize_rows
from dcpbench.points.layout import Layout
from tests.unit.engine_builder import CPU, TINY, alone, layers

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

WHOLE = dataclasses.replace(  # widths that are multiples of 128, as kernels over blocks of scales take them
    TINY, hidden=256, heads=4, nope=16, rope=16, value=32, latent=128, dense_inter=256, moe_inter=128
)
ROWS = 3


def pieces(shape: ModelShape) -> list[torch.Tensor]:
    """What each piece of a step leaves, with the residual behind it; all of it the same from call to call."""
    layout = Layout(1)
    weights = load_weights(SyntheticSource(0, torch.float32, CPU), shape, layout, 0, layers(shape), fp8=True)
    kv = KvPool(shape.layers, 64, 1, shape.kv_width, torch.float32, CPU)
    model = Model(shape, layout, alone(layout, 0), weights, kv, interleave=1, max_context=32, device=CPU)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (ROWS,), generator=random)
    batch = StepInput(tokens, torch.tensor([0, 3, 7]), torch.arange(ROWS, dtype=torch.int32))
    residual, found = model.embed_tokens(tokens), []
    for index in range(shape.layers + 1):
        y = torch.randn(ROWS, shape.heads, shape.value, generator=random) if index else None
        found += [x.clone() for x in (*model.run_piece(index, y, batch=batch, residual_BD=residual), residual)]
    return found


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are chosen as where there is a GPU. Says of each product over scales who quantised its rows."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter runs on machines without a GPU only")
    seen: list[str] = []
    plain_linear = linears.apply_linear

    def linear(x: torch.Tensor | Rows, weight: torch.Tensor | Scaled, out: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, Scaled):
            return plain_linear(x, weight, out)
        seen.append("before" if isinstance(x, Rows) else "here")
        return linears.compute_product(
            x.scaled if isinstance(x, Rows) else quantize_rows(x), weight, torch.float32, out=out
        )

    def split_latent(*given: object, feeds: object, **more: object) -> object:
        return qkv_norm_rope.split_latent_fused(*given, quantise=isinstance(feeds, Scaled), **more)

    for module in (block_scaled, norm, moe):
        monkeypatch.setattr(module, "needs_quantized_input", lambda weight: isinstance(weight, Scaled))
    monkeypatch.setattr(walked, "apply_linear", linear)
    monkeypatch.setattr(mla, "apply_linear", linear)
    monkeypatch.setattr(mla, "split_latent", split_latent)
    return seen


@pytest.mark.parametrize("q_lora", [128, 256, None])
@pytest.mark.parametrize("shared", [1, 0])
@pytest.mark.sample(5)
def test_a_step_computes_the_same_where_kernels_quantise_what_they_give(
    q_lora: int | None, shared: int, on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first routed layer to fp32's rounding; behind it experts' rows are rounded to bf16, once a layer.

    Of a layer's products over scales o_proj alone quantises its rows itself.
    """
    shape = dataclasses.replace(WHOLE, q_lora=q_lora, shared_experts=shared)
    found = pieces(shape)
    here = on_a_gpu.count("here")
    monkeypatch.undo()
    wanted = pieces(shape)
    exact = 3 * (shape.first_dense + 1)
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        error = float((x - y).double().norm() / y.double().norm())
        assert error < (1e-5 if number < exact else 0.05), number
    assert here == shape.layers
    dense, routed = shape.first_dense, shape.layers - shape.first_dense
    latents = shape.layers * (2 if q_lora else 1)
    assert on_a_gpu.count("before") == latents + 2 * dense + 2 * shared * routed
