"""Test the weights of a rank: as many bytes as memory.py computes, the right layer for each index, and reproducible
numbers.
"""

import dataclasses
import itertools

import pytest
import torch

from dcpbench.engine.model import Model
from dcpbench.engine.scaled_weights import ALL, slice_scaled
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import Mlp, Moe, load_weights
from dcpbench.kernels import int4
from dcpbench.models import SHAPES
from dcpbench.models.weight_formats import EXPERTS, FORMATS, FP8, INT4, SCALE_BLOCK, UNQUANTISED
from dcpbench.points import memory
from dcpbench.points.layout import Layout, QueryReplication
from dcpbench.points.names import MOE_EP, MOE_TP
from tests.unit import engine_builder as build


class MetaSource:
    """A source of tensors on the meta device (except scales), which records the requested names."""

    kind = "meta"

    def __init__(self, dtype=torch.bfloat16):
        self.dtype, self.names = dtype, []

    def get_tensor(self, name, shape, *, rows=None, columns=None, dtype=None):
        """See weights.Source."""
        self.names.append(name)
        parts = (rows, columns)[: len(shape)]
        size = [len(range(*(part or slice(None)).indices(n))) for part, n in zip(parts, shape, strict=True)]
        return torch.empty(size, dtype=dtype or self.dtype, device="meta")

    def get_scaled(self, name, shape, *, rows=ALL, columns=ALL):
        """Return a scaled tensor with its blocks split as by a real source."""
        scale = torch.empty([-(-n // SCALE_BLOCK) for n in shape])  # without memory their cutting is slow
        data = self.get_tensor(name, shape, rows=rows, columns=columns, dtype=torch.float8_e4m3fn)
        found = slice_scaled(data, scale, shape, rows, columns)
        return dataclasses.replace(found, scale=found.scale.to("meta"))


WIDE = {
    "own": QueryReplication(),
    "query": QueryReplication(query=True),
    "value": QueryReplication(value=True),
    "both": QueryReplication(query=True, value=True),
}
LAYOUTS = [Layout(1), Layout(2), Layout(4, dcp=2), Layout(4, dp=2, dcp=2), Layout(8, dcp=8), Layout(8, dp=8)]
TINY_SHAPES = {
    "tiny": build.TINY,
    "without-q-lora": build.make_shape(q_lora=None),
    "vocab-509": build.make_shape(vocab=509),
    "vocab-9": build.make_shape(vocab=9),
    "softmax-2-shared": build.make_shape(routing="softmax", normalise=False, shared_experts=2),
    "no-shared": build.make_shape(shared_experts=0),
    "all-dense": build.make_shape(first_k_dense_replace=3),
    "no-dense": build.make_shape(first_k_dense_replace=0),
}
UNEVEN = build.make_shape(
    hidden=320, q_lora=192, moe_intermediate_size=384, intermediate_size=960, qk_nope_head_dim=24, v_head_dim=40
)
"""Shape for which ranks split blocks in rows and in columns, and for which stacked parts end inside a block."""


class TestBytes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("shape", TINY_SHAPES.values(), ids=TINY_SHAPES)
    @pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
    def test_every_rank_holds_the_computed_number_of_bytes(self, shape, layout, dtype, wide):
        """Check the first, the last and a middle rank, with tensor-parallel and whole experts. A vocabulary of 9
        leaves some of 8 ranks only padding.
        """
        dense, moe = shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace
        expected = memory.compute_weight_bytes(shape, layout, dtype.itemsize, dense, moe, wide)
        for rank in {0, layout.tp // 2, layout.tp - 1}:
            ep = MOE_TP if rank == layout.tp - 1 else MOE_EP
            held = load_weights(
                MetaSource(dtype), shape, layout, rank, build.make_layers(shape), replicated=wide, ep=ep
            )
            assert build.count_bytes(held) == expected

    @pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
    def test_rank_of_a_published_model_with_few_layers_holds_the_computed_bytes(self, model):
        """Load one dense and two MoE layers on rank 3 of tp8·dcp8, without and with q-LoRA."""
        shape, layout = SHAPES[model], Layout(8, dcp=8)
        held = load_weights(MetaSource(), shape, layout, 3, build.make_layers(shape, dense=1, moe=2))
        assert build.count_bytes(held) == memory.compute_weight_bytes(shape, layout, 2, 1, 2)

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    @pytest.mark.parametrize("shape", [*TINY_SHAPES.values(), UNEVEN], ids=[*TINY_SHAPES, "blocks-split"])
    @pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
    @pytest.mark.parametrize("ep", [MOE_TP, MOE_EP])
    @pytest.mark.long
    def test_rank_with_most_fp8_scales_holds_the_computed_number_of_bytes(self, shape, layout, wide, ep):
        """Count a byte a number and 4 a block; ranks with borders inside blocks have more blocks. If different ranks
        have the most scales of two tensors, the computed sum is an upper bound.
        """
        dense, moe = shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace
        expected = memory.compute_weight_bytes(shape, layout, 2, dense, moe, wide, FORMATS[FP8], ep=ep)
        ranks = {0, layout.tp // 2, layout.tp - 1, min(1, layout.tp - 1)}
        held = [
            load_weights(MetaSource(), shape, layout, rank, build.make_layers(shape), replicated=wide, ep=ep, fp8=True)
            for rank in ranks
        ]
        most = max(build.count_bytes(weights) for weights in held)
        assert most == expected if shape is not UNEVEN else most <= expected <= most * 1.001

    @pytest.mark.parametrize("layout", [Layout(1), Layout(8, dcp=8), Layout(16)], ids=str)
    @pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
    def test_published_fp8_model_holds_the_computed_number_of_bytes(self, model, layout):
        """Expect W_UK, W_UV, norms, router, embedding and head in bf16."""
        shape = SHAPES[model]
        held = load_weights(
            MetaSource(), shape, layout, layout.tp - 1, build.make_layers(shape, dense=1, moe=1), ep=MOE_TP, fp8=True
        )
        assert build.count_bytes(held) == memory.compute_weight_bytes(
            shape, layout, 2, 1, 1, weights=FORMATS[FP8], ep=MOE_TP
        )
        assert {held.embed.dtype, held.moe[0].mlp.router.dtype, held.moe[0].attention.w_uk.dtype} == {torch.bfloat16}

    @pytest.mark.parametrize("layout", [Layout(1), Layout(8, dcp=8), Layout(16)], ids=str)
    @pytest.mark.parametrize("fp8", [False, True])
    def test_draft_layer_is_loaded_and_counted(self, layout, fp8):
        """Use V3 with one layer of each kind: a third layer with experts, 2 · 7168² numbers of its projection and 3 ·
        7168 of norms.
        """
        shape = SHAPES["deepseek-v3"]
        drafting, weights = shape.add_drafts(1), FORMATS[FP8] if fp8 else UNQUANTISED
        held = load_weights(MetaSource(), drafting, layout, 0, build.make_layers(shape, dense=1, moe=1), fp8=fp8)
        expected = memory.compute_weight_bytes(drafting, layout, 2, 1, 1, weights=weights)
        assert build.count_bytes(held) == expected
        one_more = memory.compute_weight_bytes(shape, layout, 2, 1, 2, weights=weights)
        assert expected == one_more + 2 * (2 * 7168**2 + 3 * 7168)
        assert held.get_layer(shape.layers) is held.draft.layer
        assert drafting.compute_kv_bytes_per_token(2) == 62 * 576 * 2
        assert (shape.add_drafts(0), SHAPES["kimi-k2"].add_drafts(3).drafts) == (shape, False)

    def test_real_tensors_are_counted_like_meta_tensors(self):
        """Check also that the storage of a real tensor is no larger than the tensor."""
        held = load_weights(
            SyntheticSource(0, torch.float32, build.CPU), build.TINY, Layout(4, dcp=2), 1, build.make_layers(build.TINY)
        )
        assert build.count_bytes(held) == memory.compute_weight_bytes(build.TINY, Layout(4, dcp=2), 4, 1, 2)
        attention = held.moe[0].attention
        for tensor in (attention.qkv_a, attention.w_uk, attention.w_uv, attention.o, held.embed):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes, "a view would keep the whole tensor alive"


class TestLayers:
    SHAPE = build.make_shape(layers=9, first_k_dense_replace=3)

    def load(self, dense, moe):
        """Return the weights of tp1 and the source that they come from."""
        source = MetaSource()
        return load_weights(source, self.SHAPE, Layout(1), 0, build.make_layers(self.SHAPE, dense, moe)), source

    def test_fewer_held_layers_are_repeated_within_their_kind(self):
        """Hold 2 of 3 dense and 4 of 6 MoE layers: dense 0 1 0, then MoE 0 1 2 3 0 1."""
        weights, _ = self.load(2, 4)
        used = [weights.get_layer(i) for i in range(9)]
        for layer, held in zip(used[:3], (0, 1, 0), strict=True):
            assert layer is weights.dense[held]
            assert isinstance(layer.mlp, Mlp)
        for layer, held in zip(used[3:], (0, 1, 2, 3, 0, 1), strict=True):
            assert layer is weights.moe[held]
            assert isinstance(layer.mlp, Moe)

    def test_each_layer_has_its_own_weights_if_all_are_held(self):
        weights, _ = self.load(3, 6)
        assert len({id(weights.get_layer(i)) for i in range(9)}) == 9

    def test_first_layers_of_each_kind_are_read(self):
        """Expect layers 0, 1 and 3 to 6 of the checkpoint, and not 2, 7 and 8."""
        _, source = self.load(2, 4)
        read = {int(name.split(".")[2]) for name in source.names if name.startswith("model.layers.")}
        assert read == {0, 1, 3, 4, 5, 6}


@pytest.fixture(scope="module")
def ranks():
    """Load synthetic weights of all ranks of tp4·dp2·dcp2."""
    source, layout = SyntheticSource(0, torch.float32, build.CPU), Layout(4, dp=2, dcp=2)
    return [load_weights(source, build.TINY, layout, rank, build.make_layers(build.TINY)) for rank in range(4)]


class TestShards:
    """Test two replicas of two ranks: heads over 2 ranks and experts over 4."""

    def test_concatenated_shards_equal_the_weights_of_one_rank(self, ranks):
        """Check equality, without which layouts would compute different results and routings."""
        source = SyntheticSource(0, torch.float32, build.CPU)
        whole = load_weights(source, build.TINY, Layout(1), 0, build.make_layers(build.TINY))
        replica = ranks[:2]
        assert torch.equal(torch.cat([w.embed for w in replica]), whole.embed)
        for index in (0, 1, 2):
            heads, one = [w.get_layer(index).attention for w in replica], whole.get_layer(index).attention
            for name, dim in (("w_uk", 0), ("w_uv", 0), ("q_b", 0), ("o", 1)):
                assert torch.equal(torch.cat([getattr(a, name) for a in heads], dim), getattr(one, name))
        experts, one = [w.get_layer(2).mlp for w in ranks], whole.get_layer(2).mlp
        assert torch.equal(torch.cat([e.gate_up for e in experts]), one.gate_up)
        assert torch.equal(torch.cat([e.down for e in experts]), one.down)
        assert torch.equal(torch.cat([e.shared.down for e in experts], 1), one.shared.down)
        dense = [w.get_layer(0).mlp for w in ranks]
        assert torch.equal(torch.cat([d.down for d in dense], 1), whole.get_layer(0).mlp.down)

    def test_concatenated_tensor_parallel_experts_equal_those_of_one_rank(self, ranks):
        """Split the width 32 of all eight experts over the ranks: rows of gate and of up, and columns of down."""
        source, layout = SyntheticSource(0, torch.float32, build.CPU), Layout(4, dp=2, dcp=2)
        layers, width = build.make_layers(build.TINY), build.TINY.moe_intermediate_size
        whole = load_weights(source, build.TINY, Layout(1), 0, layers).get_layer(2).mlp
        cut = [load_weights(source, build.TINY, layout, r, layers, ep=MOE_TP).get_layer(2).mlp for r in range(4)]
        for half, part in ((0, whole.gate_up[:, :width]), (1, whole.gate_up[:, width:])):
            assert torch.equal(torch.cat([w.gate_up.chunk(2, 1)[half] for w in cut], 1), part)
        assert torch.equal(torch.cat([w.down for w in cut], 2), whole.down)
        assert {w.first for w in cut} == {0}
        for one, other in zip(cut, ranks, strict=True):
            assert torch.equal(one.router, other.get_layer(2).mlp.router)
            assert torch.equal(one.shared.gate_up, other.get_layer(2).mlp.shared.gate_up)

    def test_projections_of_a_dcp_group_are_the_concatenation_of_its_ranks(self, ranks):
        """Check both ranks of each group; other tensors, and o_proj, stay this rank's own."""
        source, layout = SyntheticSource(0, torch.float32, build.CPU), Layout(4, dp=2, dcp=2)
        for rank in range(4):
            own = [w.get_layer(1).attention for w in ranks[rank // 2 * 2 :][:2]]
            for replicated, names in ((WIDE["query"], ("q_b", "w_uk")), (WIDE["value"], ("w_uv",))):
                held = load_weights(
                    source, build.TINY, layout, rank, build.make_layers(build.TINY), replicated=replicated
                )
                attention = held.get_layer(1).attention
                for name in ("q_b", "w_uk", "w_uv"):
                    parts = [getattr(a, name) for a in own]
                    assert torch.equal(getattr(attention, name), torch.cat(parts) if name in names else parts[rank % 2])
                assert torch.equal(attention.o, own[rank % 2].o)

    def test_replicas_hold_the_same_attention_and_vocabulary(self, ranks):
        """Expect the first four heads on ranks 0 and 2, the others on 1 and 3."""
        for a, b in ((0, 2), (1, 3)):
            assert torch.equal(ranks[a].embed, ranks[b].embed)
            assert torch.equal(ranks[a].get_layer(1).attention.w_uk, ranks[b].get_layer(1).attention.w_uk)
            assert torch.equal(ranks[a].get_layer(1).attention.o, ranks[b].get_layer(1).attention.o)
        assert not torch.equal(ranks[0].embed, ranks[1].embed)
        assert not torch.equal(ranks[0].get_layer(1).attention.w_uk, ranks[1].get_layer(1).attention.w_uk)

    def test_replicated_tensors_are_equal_on_all_ranks(self, ranks):
        """Compare router, bias, and the down projection of the latents: results of ranks that route differently would
        not add up.
        """
        q_lora = build.TINY.q_lora
        for other in ranks[1:]:
            for index in (1, 2):
                ours, theirs = ranks[0].get_layer(index), other.get_layer(index)
                assert torch.equal(ours.mlp.router, theirs.mlp.router)
                assert torch.equal(ours.mlp.bias, theirs.mlp.bias)
                assert torch.equal(ours.attention.qkv_a[q_lora:], theirs.attention.qkv_a[q_lora:])

    def test_experts_and_mlp_slices_differ_between_ranks(self, ranks):
        """Compare two of eight experts on each rank, and the slices of the shared expert and the dense MLP."""
        assert [w.get_layer(1).mlp.first for w in ranks] == [0, 2, 4, 6]
        for a, b in itertools.combinations(ranks, 2):
            assert not torch.equal(a.get_layer(1).mlp.gate_up, b.get_layer(1).mlp.gate_up)
            assert not torch.equal(a.get_layer(1).mlp.shared.down, b.get_layer(1).mlp.shared.down)
            assert not torch.equal(a.get_layer(0).mlp.gate_up, b.get_layer(0).mlp.gate_up)

    def test_padding_rows_of_the_vocabulary_are_zero(self):
        """Divide 9 rows over 4 ranks into 3 each: 3, 3, 3 and none."""
        shape, source = build.make_shape(vocab=9), SyntheticSource(0, torch.float32, build.CPU)
        last = load_weights(source, shape, Layout(4), 3, build.make_layers(shape))
        assert last.embed.shape == (3, 64)
        assert not last.embed.any()


class TestSynthetic:
    def part(self, name="x.weight", *, seed=0, rows=None, columns=None):
        """Return part of a [400, 400] matrix."""
        return SyntheticSource(seed, torch.float32, build.CPU).get_tensor(name, (400, 400), rows=rows, columns=columns)

    def test_part_of_a_tensor_does_not_depend_on_earlier_draws(self):
        """Draw another tensor before, because ranks draw their parts in different orders."""
        source = SyntheticSource(0, torch.float32, build.CPU)
        source.get_tensor("other.weight", (3, 3))
        assert torch.equal(source.get_tensor("x.weight", (400, 400), rows=slice(0, 8)), self.part(rows=slice(0, 8)))

    def test_parts_differ_by_name_seed_rows_and_columns(self):
        """Compare the first eight rows of four sources of [400, 400], and the first eight columns, transposed."""
        first = slice(0, 8)
        parts = [
            self.part(rows=first),
            self.part("y.weight", rows=first),
            self.part(seed=1, rows=first),
            self.part(rows=slice(8, 16)),
            self.part(columns=first).T,
        ]
        assert {tuple(part.shape) for part in parts} == {(8, 400)}
        for a, b in itertools.combinations(parts, 2):
            assert not torch.equal(a, b)

    @pytest.mark.parametrize("ranks", [2, 4, 5])
    @pytest.mark.parametrize("dim", [0, 1])
    def test_shards_of_any_layout_are_parts_of_one_tensor(self, dim, ranks):
        """Divide 400 rows or columns over 2, 4 or 5 ranks: shards of 200, 100 and 80 begin anywhere in the blocks
        drawn.
        """
        axis = ("rows", "columns")[dim]
        size = 400 // ranks
        shards = [self.part(**{axis: slice(n * size, (n + 1) * size)}) for n in range(ranks)]
        assert torch.equal(torch.cat(shards, dim), self.part(**{axis: slice(0, 400)}))

    def test_synthetic_weights_keep_the_norm_of_activations(self):
        """Expect a standard deviation of 1/sqrt(400 inputs) = 0.05; 160,000 numbers estimate it to 0.05/sqrt(320000) =
        0.0001.
        """
        assert float(self.part(rows=slice(0, 400)).std()) == pytest.approx(0.05, abs=0.0005)

    def test_norm_weights_are_one_and_the_routing_bias_is_small(self):
        """Check the bias, because a large one would send every token to the same experts: of 256 normal numbers the
        largest is below 5 σ.
        """
        source = SyntheticSource(0, torch.float32, build.CPU)
        assert torch.equal(source.get_tensor("model.norm.weight", (7,)), torch.ones(7))
        bias = source.get_tensor("gate.e_score_correction_bias", (256,))
        assert 0 < bias.abs().max() < 0.05


class TestInt4:
    """Test experts in int4 with all other weights in the computation's dtype, as Kimi-K2-Thinking is published."""

    SHAPE = build.make_shape(hidden=128, moe_intermediate_size=64, layers=2, first_k_dense_replace=1)

    def load(self, layout=Layout(1), rank=0, ep=MOE_EP, group=32):  # noqa: B008 - frozen
        source = SyntheticSource(0, torch.float32, build.CPU)
        held = load_weights(source, self.SHAPE, layout, rank, build.make_layers(self.SHAPE), ep=ep, int4_group=group)
        return held.moe[0].mlp

    @pytest.mark.parametrize("group", [32, 128])
    @pytest.mark.parametrize(
        ("layout", "ep"), [(Layout(1), MOE_EP), (Layout(8, dcp=8), MOE_EP), (Layout(8, dcp=8), MOE_TP)]
    )
    def test_published_int4_model_holds_the_computed_number_of_bytes(self, layout, ep, group):
        """Count 4 bits a number and 16 a group in a rank's experts; 2,048 and 256 inputs are whole blocks of the
        layout.
        """
        shape = dataclasses.replace(SHAPES["kimi-k2"], experts=16)
        weights = dataclasses.replace(FORMATS[INT4], columns=group, parts=frozenset({EXPERTS}))
        layers = build.make_layers(shape, dense=1, moe=1)
        held = load_weights(MetaSource(), shape, layout, layout.tp - 1, layers, ep=ep, int4_group=group)
        assert build.count_bytes(held) == memory.compute_weight_bytes(shape, layout, 2, 1, 1, weights=weights, ep=ep)
        assert {held.moe[0].mlp.shared.down.dtype, held.dense[0].mlp.down.dtype} == {torch.bfloat16}

    @pytest.mark.parametrize("rank", [0, 1])
    def test_int4_shards_are_parts_of_the_same_numbers(self, rank):
        """Give each of two ranks half of the experts, or 32 of each one's 64 numbers in rows of gate and up and in
        columns of down.
        """
        whole, held, cut = self.load(), self.load(Layout(2), rank), self.load(Layout(2), rank, MOE_TP)
        for all_of_it, part in ((whole.gate_up, held.gate_up), (whole.down, held.down)):
            assert torch.equal(int4.dequantize(part), int4.dequantize(all_of_it).chunk(2)[rank])
        rows = int4.dequantize(whole.gate_up).unflatten(1, (2, 2, 32))[:, :, rank].flatten(1, 2)
        assert torch.equal(int4.dequantize(cut.gate_up), rows)
        assert torch.equal(int4.dequantize(cut.down), int4.dequantize(whole.down).chunk(2, -1)[rank])

    def test_engine_multiplies_with_the_dequantised_int4_weights(self):
        """Compare with the dequantised and with the unquantised weights; router and shared expert are the same."""
        one = self.load()
        plain = dataclasses.replace(one, gate_up=int4.dequantize(one.gate_up), down=int4.dequantize(one.down))
        engine = build.make_engine(shape=self.SHAPE)
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
        found, wanted, exact = (
            Model.run_experts(engine.model, x, w, None, None) for w in (one, plain, engine.model.weights.moe[0].mlp)
        )
        assert float((found - wanted).norm() / wanted.norm()) < 1e-5
        assert float((found - exact).norm() / exact.norm()) > 1e-2
