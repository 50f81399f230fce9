"""Compare fp8 weights and KV on every layout with `transformers` rounded in the same way; several ranks run as
torchrun jobs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, safe_open

from dcpbench.engine import checkpoint
from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.weights import load_weights
from dcpbench.kernels.block_scaled import Scaled, dequantize_weight
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.memory import count_all_layers
from tests.distributed.checkpoints import write_deepseek_v3, write_deepseek_v3_fp8
from tests.distributed.test_oracle import (
    A2A,
    AG_RS,
    CUT,
    NONE,
    PAGED,
    PLAIN,
    PROJECTED,
    PROMPTS,
    REPLICATED,
    STRIPED,
    WHOLE,
    make_point,
    verify_alone,
)
from tests.distributed.test_oracle import NEW as TOKENS
from tests.distributed.verifying import verify_by_job

pytestmark = pytest.mark.distributed

WEIGHTS = {"weights_dtype": "fp8"}
KV = {"kv_dtype": "fp8"}
GRID = {
    Layout(1): [(PLAIN, NONE | WEIGHTS), (PAGED, NONE | WEIGHTS | KV), (PAGED, NONE | KV)],
    Layout(2): [(PAGED, NONE | CUT | WEIGHTS | KV), (PLAIN, NONE | WHOLE | WEIGHTS)],
    Layout(4, dcp=4): [(PLAIN, AG_RS | WHOLE | WEIGHTS | KV)],
    Layout(4, dp=2, dcp=2): [(STRIPED, A2A | REPLICATED | PROJECTED | CUT | WEIGHTS | KV)],
    Layout(8, dcp=8): [(STRIPED, AG_RS | CUT | WEIGHTS | KV)],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a checkpoint in fp8, and return its folder."""
    made = tmp_path_factory.mktemp("checkpoint") / "v3-fp8"
    write_deepseek_v3_fp8(made)
    return str(made)


def list_points(tp, folder):
    return [
        make_point(folder, layout, storage, how)
        for layout, cases in GRID.items()
        if layout.tp == tp
        for storage, how in cases
    ]


def assert_agree(points, checks):
    """Check all limits; the limit of layers is a few roundings in the computed dtype."""
    assert [c for c in checks if not c.ok] == []
    layers = [c for c in checks if c.name == "layers"]
    assert [c.dtype for c in layers] == [p.precision for p in points]
    assert all(0 < c.error <= c.limit < 0.1 for c in layers)
    assert all(c.error == 0 for c in checks if c.name in ("tokens", "kv_write", "routing"))
    assert all(c.error < 1e-5 for c in checks if c.name == "attention"), "stored values are exact"


@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.long) for tp in (1, 4, 8))])
def test_layouts_agree_with_equally_rounded_transformers(tp, folder, tmp_path):
    """Use ranks with borders inside blocks of weights, which start groups of activations; transformers rounds in the
    same groups.
    """
    points = list_points(tp, folder)
    if tp == 1:
        assert_agree(points, [check for p in points for check in verify_alone(p, PROMPTS, TOKENS, tmp_path)])
    else:
        assert_agree(points, verify_by_job(points, PROMPTS, TOKENS, tmp_path))


def test_swapped_block_scales_are_found(folder, tmp_path, monkeypatch):
    """Swap two adjacent scales of o_proj."""
    whole = checkpoint.slice_scaled

    def swapped(data, scale, shape, *part):
        return whole(data, scale.flip(1) if shape[0] == 160 else scale, shape, *part)

    monkeypatch.setattr(checkpoint, "slice_scaled", swapped)
    (wrong,) = [c for c in verify_alone(list_points(1, folder)[0], PROMPTS, TOKENS, tmp_path) if not c.ok]
    assert wrong.name == "layers"
    assert "3 layers of 3 differ, first o_proj of layer 0" in wrong.detail


def test_half_precision_checkpoint_is_quantised_while_it_is_read(tmp_path):
    """Compare with the dequantised weights."""
    write_deepseek_v3(tmp_path / "v3")
    points = [make_point(str(tmp_path / "v3"), Layout(1), PLAIN, NONE | WEIGHTS)]
    assert_agree(points, verify_alone(points[0], PROMPTS, TOKENS, tmp_path))


@pytest.mark.parametrize("ep", ["1", "tp"])
@pytest.mark.parametrize("layout", [Layout(1), Layout(2), Layout(4, dcp=4), Layout(8, dcp=2), Layout(8, dp=8)], ids=str)
@pytest.mark.sample(4)
def test_sharding_inside_blocks_changes_no_weight(layout, ep, folder):
    """Compare the dequantised parts of all ranks bitwise with the file."""
    shape, source = load_shape(folder), CheckpointSource(Path(folder), torch.float32, torch.device("cpu"))
    (file,) = source.folder.glob("*.safetensors")
    stored = load_file(file)

    def published(name):
        return dequantize_weight(Scaled(stored[name], stored[name + "_scale_inv"]))

    layer = "model.layers.1."
    for rank in range(layout.tp):
        held = load_weights(source, shape, layout, rank, count_all_layers(shape), ep=ep, fp8=True).get_layer(1)
        width = 144 // layout.tp if ep == "1" else 144
        first = rank * width if ep == "1" else 0
        expert = held.mlp.first
        gate, up = dequantize_weight(held.mlp.gate_up)[0].split(width)
        one = f"{layer}mlp.experts.{expert}."
        assert torch.equal(gate, published(one + "gate_proj.weight")[first : first + width])
        assert torch.equal(up, published(one + "up_proj.weight")[first : first + width])
        assert torch.equal(
            dequantize_weight(held.mlp.down)[0], published(one + "down_proj.weight")[:, first : first + width]
        )
        heads, which = 8 // layout.attn_tp, layout.get_attn_rank(rank)
        rows = slice(which * heads * 28, (which + 1) * heads * 28)
        columns = slice(which * heads * 20, (which + 1) * heads * 20)
        a = layer + "self_attn."
        assert torch.equal(dequantize_weight(held.attention.q_b), published(a + "q_b_proj.weight")[rows])
        assert torch.equal(dequantize_weight(held.attention.o), published(a + "o_proj.weight")[:, columns])
        q, kv = dequantize_weight(held.attention.qkv_a).split((136, 48))
        assert torch.equal(q, published(a + "q_a_proj.weight"))
        assert torch.equal(kv, published(a + "kv_a_proj_with_mqa.weight"))


def test_fp8_checkpoint_has_the_dtypes_of_deepseek_v3(folder):
    """Expect fp8 in all weights except norms, router, embedding and head."""
    (file,) = CheckpointSource(Path(folder), torch.float32, torch.device("cpu")).folder.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - no dict
    plain = {name for name, kind in kinds.items() if kind == "F32" and not name.endswith("_scale_inv")}
    assert all("norm" in n or "mlp.gate." in n or "embed" in n or "lm_head" in n for n in plain)
    assert sum(kind == "F8_E4M3" for kind in kinds.values()) == len(kinds) - len(plain) - sum(
        n.endswith("_scale_inv") for n in kinds
    )
