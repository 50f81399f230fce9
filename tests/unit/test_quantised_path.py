"""Steps with kernels that quantise their output, as on a GPU, compared with quantisation before each product. Triton's
interpreter runs both, so no GPU is needed.
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
from tests.unit.engine_builder import CPU, TINY, make_groups, make_layers

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

WHOLE = dataclasses.replace(  # widths that are multiples of 128, as kernels over blocks of scales take them
    TINY,
    hidden=256,
    heads=4,
    qk_nope_head_dim=16,
    qk_rope_head_dim=16,
    v_head_dim=32,
    latent=128,
    intermediate_size=256,
    moe_intermediate_size=128,
)
ROWS = 3


def run_pieces(shape: ModelShape) -> list[torch.Tensor]:
    """Return the results of each piece of a step and the residual after it, which are the same in every call."""
    layout = Layout(1)
    weights = load_weights(SyntheticSource(0, torch.float32, CPU), shape, layout, 0, make_layers(shape), fp8=True)
    kv = KvPool(shape.layers, 64, 1, shape.kv_width, torch.float32, CPU)
    model = Model(shape, layout, make_groups(layout, 0), weights, kv, interleave=1, max_context=32, device=CPU)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab, (ROWS,), generator=random)
    batch = StepInput(tokens, torch.tensor([0, 3, 7]), torch.arange(ROWS, dtype=torch.int32))
    residual, found = model.embed_tokens(tokens), []
    for index in range(shape.layers + 1):
        y = torch.randn(ROWS, shape.heads, shape.v_head_dim, generator=random) if index else None
        found += [x.clone() for x in (*model.run_piece(index, y, batch=batch, residual_BD=residual), residual)]
    return found


@pytest.fixture
def choose_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Choose kernels as on a GPU, and record for each product with scales if its rows were quantised before."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter runs on machines without a GPU only")
    quantised: list[str] = []
    plain_linear = linears.apply_linear

    def linear(x: torch.Tensor | Rows, weight: torch.Tensor | Scaled, out: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(weight, Scaled):
            return plain_linear(x, weight, out)
        quantised.append("before" if isinstance(x, Rows) else "here")
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
    return quantised


@pytest.mark.parametrize("q_lora", [128, 256, None])
@pytest.mark.parametrize("shared", [1, 0])
@pytest.mark.sample(5)
def test_kernels_that_quantise_their_output_give_the_same_results(
    q_lora: int | None, shared: int, choose_gpu_kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results agree to fp32 rounding up to the first routed layer; after it, rows of experts are rounded to bf16 once
    per layer. Among the products with scales of a layer, only o_proj quantises its rows itself.
    """
    shape = dataclasses.replace(WHOLE, q_lora=q_lora, shared_experts=shared)
    found = run_pieces(shape)
    here = choose_gpu_kernels.count("here")
    monkeypatch.undo()
    wanted = run_pieces(shape)
    exact = 3 * (shape.first_k_dense_replace + 1)
    for number, (x, y) in enumerate(zip(found, wanted, strict=True)):
        error = float((x - y).double().norm() / y.double().norm())
        assert error < (1e-5 if number < exact else 0.05), number
    assert here == shape.layers
    dense, routed = shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace
    latents = shape.layers * (2 if q_lora else 1)
    assert choose_gpu_kernels.count("before") == latents + 2 * dense + 2 * shared * routed
