"""Floors of steps, computed by hand: bytes, operations and received bytes of every phase, at rates with 1 byte per
microsecond.
"""

import dataclasses
import itertools

import pytest

from dcpbench.measuring.ranges import PHASES
from dcpbench.models import SHAPES
from dcpbench.models.shapes import ModelShape
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points import memory
from dcpbench.points.layout import OWN_HEADS, Layout, QueryReplication
from dcpbench.points.roofline import (
    ExpertLoad,
    OperatorCost,
    Sharding,
    StepRows,
    compute_candidate_bytes,
    compute_floor_us,
    compute_linear_work,
    compute_step_floors,
    compute_step_matmul_s,
    estimate_experts_hit,
    iter_phase_works,
)
from dcpbench.records.record import Floor, Phases
from dcpbench.reports import dataframes
from dcpbench.reports.floors import format_decode_sentences
from tests.unit import record_builder

SHAPE = ModelShape(
    name="by hand",
    hidden=8,
    layers=3,
    heads=4,
    q_lora=None,
    experts=4,
    top_k=2,
    shared_experts=1,
    moe_intermediate_size=4,
    intermediate_size=8,
    first_k_dense_replace=1,
    vocab=16,
    routing="softmax",
    n_group=1,
    topk_group=1,
    normalise=False,
    routed_scaling_factor=1.0,
    latent=4,
    qk_rope_head_dim=2,
    qk_nope_head_dim=2,
    v_head_dim=2,
)
RATES = {"read": 1e6, "copy": 1e6, "matmul": 1e9, "matmul_fp8": 2e9, "peer": 0.5e6, "barrier": 10e-6}
"""Rates at which a byte of memory takes 1 µs, 1,000 operations 1 µs (2,000 in fp8), a byte of a peer 2 µs, a barrier 10 µs."""
TP2_DCP2 = Sharding(shape=SHAPE, layout=Layout(2, 1, 2), itemsize=2)
TP1 = Sharding(shape=SHAPE, layout=Layout(1), itemsize=2)


def make_two_requests(sharding: Sharding) -> StepRows:
    """Return a step with 5 and 4 KV rows; its two MoE layers send the tokens to experts (0, 1), (0, 2) and to (2, 3),
    (2, 3).
    """
    routing = tuple(tuple(sharding.count_expert_loads(ids)) for ids in ((0, 1, 0, 2), (2, 3, 2, 3)))
    return StepRows(decodes=(5, 4), sampled=2, tokens=2, routing=routing)


class TestDecode:
    def test_floor_of_every_phase_is_as_computed_by_hand(self):
        """The sizes of tp2·dcp2 in bf16 are h 2 heads a rank, H 4; D 8, R 4, P 2, Q 6, nope 2, V 2. B·D is 2·8 numbers, 32 B.

        The sum of 32 B over 2 ranks takes 2·½·32 B from the peer, 64 µs, and a barrier: 74.

        embed        rows read and written 64, their sum 74
        norm         5 of 4·32 B, the first of 2·32 B
        qkv_proj     per layer q ‖ kv: (8·14 + 2·(8 + 14))·2 = 312 B; W_UK of 2 heads: (2·2·4 + 2·2·(2 + 4))·2 = 80 B
        kv_write     per layer 2 rows read and written: 2·2·6·2 = 48 B
        q_gather     per layer half of 2·4·6·2 = 96 B, 96 µs, and a barrier
        attention    per layer rank 0 has 3 and 2 rows: (5·6 + 2·4·(6 + 4))·2 = 220 B; 400 operations hide behind them
        merge        per layer half of 2·4·(4·2 + 4) = 96 B, 96 µs, and a barrier
        o_proj       per layer W_UV of 2 heads: 80 B; o: (4·8 + 2·(4 + 8))·2 = 112 B
        dense_mlp    once (8·8 + 2·16)·2 + (4·8 + 2·12)·2 = 304 B
        moe          twice router (8·4 + 2·12)·2 = 112 B and shared expert (8·4 + 2·12)·2 + (2·8 + 2·10)·2 = 184 B;
                     rank 0's experts in the first: gate-up (2·64 + 2·8 + 3·4)·2 = 312 B, down (2·32 + 3·4 + 3·8)·2 = 200 B;
                     in the second none has a token
        mlp_reduce   3 sums, and in the second rank 0 waits for rank 1: (2·64 + 2·8 + 4·4)·2 + (2·32 + 4·4 + 4·8)·2 = 544
        lm_head      (8·8 + 2·16)·2 = 192 B; 16 B of candidates from the peer, 32 µs, and a barrier
        """
        floors = compute_step_floors(TP2_DCP2, make_two_requests(TP2_DCP2), RATES)
        assert floors == pytest.approx(
            {
                "embed": 64 + 74,
                "norm": 5 * 128 + 64,
                "qkv_proj": 3 * (312 + 80),
                "kv_write": 3 * 48,
                "q_gather": 3 * 106,
                "attention": 3 * 220,
                "merge": 3 * 106,
                "o_proj": 3 * (80 + 112),
                "attn_reduce": 3 * 74,
                "dense_mlp": 304,
                "moe": 2 * (112 + 184) + 312 + 200,
                "mlp_reduce": 3 * 74 + 544,
                "lm_head": 192 + 42,
            }
        )
        assert sum(floors.values()) == pytest.approx(6664)

    def test_tensor_parallel_experts_take_equally_long_on_all_ranks(self):
        """With ep 1 over 2 ranks, each rank has all experts with a width of 2 of 4, and no rank waits.

        In the first layer 3 experts have 4 rows: gate-up (3·8·4 + 2·8 + 4·2)·2 = 240 B, down (3·2·8 + 4·2 + 4·8)·2 = 176 B;
        in the second 2: (2·8·4 + 2·8 + 4·2)·2 + (2·2·8 + 4·2 + 4·8)·2 = 176 + 144 B.
        """
        tensor_parallel = dataclasses.replace(TP2_DCP2, ep=1)
        floors = compute_step_floors(tensor_parallel, make_two_requests(tensor_parallel), RATES)
        assert floors["moe"] == pytest.approx(2 * (112 + 184) + 240 + 176 + 176 + 144)
        assert floors["mlp_reduce"] == pytest.approx(3 * 74)

    def test_single_rank_has_no_communication_phases(self):
        """The rank of tp1 has all experts: gate-up (3·64 + 2·8 + 4·4)·2 = 448 B, down (3·32 + 4·4 + 4·8)·2 = 288 B in
        the first.
        """
        floors = compute_step_floors(TP1, make_two_requests(TP1), {n: RATES[n] for n in ("read", "copy", "matmul")})
        assert not {"q_gather", "merge", "attn_reduce", "mlp_reduce", "dp_gather"} & set(floors)
        router, shared = 112, (8 * 8 + 2 * 16) * 2 + (4 * 8 + 2 * 12) * 2
        second = (2 * 64 + 16 + 16) * 2 + (2 * 32 + 16 + 32) * 2
        assert floors["moe"] == pytest.approx(2 * (router + shared) + 448 + 288 + second)

    def test_operations_set_the_floor_if_they_take_longer_than_bytes(self):
        """Attention on 2·4 heads takes 3 layers · 400 operations = 1.2 s at 1,000 operations per second."""
        floors = compute_step_floors(TP2_DCP2, make_two_requests(TP2_DCP2), RATES | {"matmul": 1e3})
        assert floors["attention"] == pytest.approx(3 * 400 * 1e3)

    def test_floor_is_none_if_a_rate_is_missing(self):
        assert (
            compute_step_floors(
                TP2_DCP2, make_two_requests(TP2_DCP2), {n: RATES[n] for n in ("read", "copy", "matmul")}
            )
            is None
        )

    def test_replicated_queries_and_early_projection_read_more_and_send_less(self):
        """W_UK and W_UV have 4 heads instead of 2, and q has 4 heads; there is no gather, and the merge has V = 2
        columns instead of R = 4.
        """
        wide = dataclasses.replace(TP2_DCP2, replicated=QueryReplication(query=True, value=True))
        floors = compute_step_floors(wide, make_two_requests(wide), RATES)
        assert "q_gather" not in floors
        assert floors["merge"] == pytest.approx(3 * (2 * 4 * (2 * 2 + 4) + 10))
        assert floors["qkv_proj"] == pytest.approx(3 * ((8 * 22 + 2 * 30) * 2 + 2 * 80))
        assert floors["o_proj"] == pytest.approx(3 * (2 * 80 + 112))

    def test_attention_dp_gathers_tokens_for_the_experts(self):
        """In tp2·dp2 each replica has one of 2 tokens. The gather takes half of 32 B, 32 µs, and a barrier."""
        sharding = Sharding(shape=SHAPE, layout=Layout(2, 2), itemsize=2)
        floors = compute_step_floors(sharding, StepRows(decodes=(5,), sampled=1, tokens=2), RATES)
        assert floors["dp_gather"] == pytest.approx(3 * 42)
        assert floors["mlp_reduce"] == pytest.approx(3 * 42)
        assert "attn_reduce" not in floors
        assert floors["norm"] == pytest.approx((5 * 4 + 2) * 16)

    def test_unknown_routing_is_replaced_by_its_expectation(self):
        """2 tokens with 2 of 4 experts each: 4·(1 − ½²) = 3 have one, 1.5 of a rank's 2, rounded to 2; 2 rows a rank."""
        assert estimate_experts_hit(4, 2, 2) == pytest.approx(3)
        assert TP2_DCP2.estimate_expert_load(2) == ExpertLoad(active_experts=2, assignments=2)
        known = StepRows(
            decodes=(5, 4), sampled=2, tokens=2, routing=((ExpertLoad(active_experts=2, assignments=2),) * 2,) * 2
        )
        unknown = dataclasses.replace(known, routing=())
        assert compute_step_floors(TP2_DCP2, unknown, RATES) == pytest.approx(
            compute_step_floors(TP2_DCP2, known, RATES)
        )


def test_report_states_ratio_of_step_to_floor_and_time_above(tmp_path):
    """The step of 9.996 ms takes 1.50 times 6.664 ms. Its phase moe takes 2.208 ms, twice its floor, mlp_reduce 0.766 +
    1, and attention 0.66 + 0.5; the others take their floors, and idle is the rest: 9.996 - 6.664 - 1.104 - 1 - 0.5 =
    0.728.
    """
    us = compute_step_floors(TP2_DCP2, make_two_requests(TP2_DCP2), RATES)
    more = {"moe": 1104, "mlp_reduce": 1000, "attention": 500}
    record = record_builder.make_ok_record(
        record_builder.make_point(TP2_DCP2.layout, model="by hand", concurrency=2, context=5),
        median_ms=9.996,
        noise=0.0,
        steps=30,
        phases=Phases(
            step_us=9996,
            phase_us={name: least + more.get(name, 0) for name, least in us.items()},
            idle_us=728,
            idle_fraction=728 / 9996,
            kernels=100,
            steps=3,
        ),
        floor=Floor(floor_ms=sum(us.values()) / 1e3, phase_floor_us=us, experts="routed"),
    )
    points = dataframes.load_frames([record_builder.write_records(tmp_path / "run", [record])]).points
    assert format_decode_sentences(points) == [
        (
            "by hand: a step takes 1.50× what this machine allows (tp2·dcp2 at concurrency 2 · context 5: 10.00 ms, minimum "
            "6.66). Time above the limit: moe 1.10 ms, mlp reduce 1.00 ms, idle 0.728 ms."
        )
    ]


class TestChunks:
    def test_floor_of_a_chunk_is_as_computed_by_hand(self):
        """In tp1 with 4 heads, one chunk of 3 tokens follows 2 stored ones, and its last token is sampled.

        prefill      5 rows decompressed: 5·4·4·(2 + 2) = 320 multiplications; 3·2 + 3·4/2 = 12 pairs of 4·(2 + 2 + 2) = 288.
                     (5·6 rows + 4·4·4 weights + 3·4·6 q and o)·2 = 332 B; 1,216 operations hide behind them
        qkv_proj     (8·22 + 3·(8 + 22))·2 = 532 B, no W_UK
        o_proj       (8·8 + 3·16)·2 = 224 B, no W_UV
        lm_head      one row: (8·16 + 24)·2 = 304 B
        """
        floors = compute_step_floors(TP1, StepRows(chunks=((3, 2),), sampled=1, tokens=3), RATES)
        assert floors["prefill"] == pytest.approx(3 * 332)
        assert floors["qkv_proj"] == pytest.approx(3 * 532)
        assert floors["o_proj"] == pytest.approx(3 * 224)
        assert floors["lm_head"] == pytest.approx(304)
        assert not {"attention", "merge", "q_gather", "prefix_gather"} & set(floors)
        slow = compute_step_floors(TP1, StepRows(chunks=((3, 2),), sampled=1, tokens=3), RATES | {"matmul": 1e6})
        assert slow["prefill"] == pytest.approx(3 * 2 * (320 + 288))

    def test_stored_prefix_is_gathered_from_the_other_ranks(self):
        """Each layer gathers half of 2 rows of 6 numbers: 12 B, 24 µs, and a barrier."""
        floors = compute_step_floors(TP2_DCP2, StepRows(chunks=((3, 2),), sampled=1, tokens=3), RATES)
        assert floors["prefix_gather"] == pytest.approx(3 * 34)

    def test_chunk_that_activates_all_experts_reads_all_of_them(self):
        """In DeepSeek-V3 at tp1, 4,096 tokens activate all experts: 58 layers of 256 · 3·7168·2048 bf16 at 4.65 TB/s.

        This takes 281 ms; rows of experts are 0.8 GB a layer, 10 ms in all; the 6·7168·2048 · 8·4,096 operations a layer
        take less than both. The shared expert's 361 GFLOP a layer take 26 ms, the router 1 ms.
        """
        sharding = Sharding(shape=SHAPES["deepseek-v3"], layout=Layout(1), itemsize=2)
        rates = {"read": 4.65e12, "copy": 4.29e12, "matmul": 800e12}
        floors = compute_step_floors(sharding, StepRows(chunks=((4096, 0),), sampled=1, tokens=4096), rates)
        assert sharding.estimate_expert_load(4096).active_experts == 256
        assert floors["moe"] == pytest.approx(281e3 + 10e3 + 26e3 + 1e3, rel=0.01)


def test_phases_with_floors_are_the_profiled_phases():
    mixed = StepRows(decodes=(5,), chunks=((3, 2),), sampled=2, tokens=8)
    for layout in (Layout(4, 2, 2), Layout(4, 1, 4)):
        found = {phase for phase, _, work in iter_phase_works(Sharding(shape=SHAPE, layout=layout, itemsize=2), mixed)}
        assert found == set(PHASES)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "bf16") for name in SHAPES), *itertools.product(["deepseek-v3", "qwen3-30b-a3b"], FORMATS)],
    ids=lambda x: x,
)
def test_bytes_of_weights_equal_the_memory_plan(name: str, precision: str):
    """Twice the bytes of one row less those of two rows are the weights of all layers, with all experts active.

    Norms, biases, the embedding's rows and the routing bias are no products. Block scales are included in the bytes.
    """
    shape, layout = SHAPES[name], Layout(2, 1, 2)
    weights = shape.get_weight_format(precision)
    sharding = Sharding(shape=shape, layout=layout, itemsize=2, weights=weights)
    layers = memory.count_all_layers(shape)
    every = ExpertLoad(active_experts=shape.experts // 2, assignments=0)

    def products(rows: int) -> int:
        step = StepRows(decodes=(1,) * rows, sampled=rows, tokens=rows, routing=((every,) * 2,) * layers.moe)
        weighed = ("qkv_proj", "o_proj", "dense_mlp", "moe", "lm_head")
        return sum(t * w.memory_bytes for phase, t, w in iter_phase_works(sharding, step) if phase in weighed)

    vectors = shape.layers * memory.count_attention_vectors(shape, layout, OWN_HEADS)
    if shape.expert_bias:
        vectors += layers.moe * shape.experts // 2 * (2 * shape.moe_intermediate_size + shape.hidden)
    if not shape.tie_word_embeddings:
        vectors += memory.compute_vocab_rows(shape, layout) * shape.hidden
    if shape.indexer:
        vectors += 2 * shape.indexer.width * shape.indexer.layers
    others = (vectors + shape.hidden) * 2 + layers.moe * shape.experts * 4
    assert (
        2 * products(1) - products(2)
        == memory.compute_weight_bytes(shape, layout, 2, *layers, weights=weights) - others
    )


class TestWindows:
    """In gpt-oss-120b, 18 of 36 layers attend to 128 tokens; it has 8 KV heads and 64 query heads of 64 numbers each."""

    SHARDING = Sharding(shape=SHAPES["gpt-oss-120b"], layout=Layout(1), itemsize=2)

    def list_attention_works(self, step: StepRows, phase: str) -> list[tuple[int, int, int]]:
        """Return calls, bytes and operations of a phase, without and with windows."""
        found = [(times, work) for name, times, work in iter_phase_works(self.SHARDING, step) if name == phase]
        return [(times, work.memory_bytes, work.flops) for times, work in found]

    def test_decode_reads_only_the_window(self):
        """A row has 2 · 8 · 64 numbers, q and o 64 · 64 each; a row and head have 2 · 64 multiplications."""
        rows = [(18, n * 1024 * 2 + 2 * 64 * 64 * 2, 2 * n * 64 * 128) for n in (1000, 128)]
        assert self.list_attention_works(StepRows(decodes=(1000,), sampled=1, tokens=1), "attention") == rows

    def test_prompt_attends_only_to_pairs_inside_the_window(self):
        """A prompt of 200 tokens behind 50 stored ones has 200·50 + 200·201/2 pairs; its queries 79 to 200 reach 128
        tokens.
        """
        inside = sum(min(50 + n, 128) for n in range(1, 201))
        flops = [
            flops
            for _, _, flops in self.list_attention_works(
                StepRows(chunks=((200, 50),), sampled=1, tokens=200), "prefill"
            )
        ]
        assert flops == [2 * pairs * 64 * 128 for pairs in (200 * 50 + 200 * 201 // 2, inside)]


class TestFormats:
    """Weights have four bits, and everything else is in bf16."""

    @pytest.mark.parametrize(
        ("name", "scales"), [("int4", 7168 // 128 * 2), ("nvfp4", 7168 // 16), ("mxfp4", 7168 // 32)]
    )
    def test_linear_layer_reads_half_a_byte_per_number_and_its_scales(self, name: str, scales: int):
        """The layer has 2,048 rows of 7,168 numbers, with 2 bytes for a scale of int4 and one for the others. Tokens
        and results are in bf16.
        """
        work = compute_linear_work(memory.LinearShape(7168, 2048), 3, itemsize=2, weights=FORMATS[name])
        assert work.memory_bytes == 2048 * (7168 // 2 + scales) + 3 * (7168 + 2048) * 2

    def test_fp4_is_multiplied_at_its_own_rate_or_in_bf16(self):
        """On every GPU int4 is widened. A GPU without the rate multiplies fp4 in bf16."""
        product, rates = memory.LinearShape(7168, 2048), {"read": 1e30, "matmul": 1e12, "matmul_fp8": 2e12}
        flops = 2 * 2048 * 7168 * 2048
        for name, with_fp4 in (("int4", 1), ("nvfp4", 4), ("mxfp4", 4)):
            work = compute_linear_work(product, 2048, itemsize=2, weights=FORMATS[name])
            assert compute_floor_us(work, rates) == pytest.approx(flops / 1e6)
            assert compute_floor_us(work, rates | {"matmul_fp4": 4e12}) == pytest.approx(flops / 1e6 / with_fp4)

    def test_parts_outside_a_weight_format_are_read_in_bf16(self):
        """Only experts and MLPs are in nvfp4: attention and the router keep their size."""
        shape, step = SHAPES["qwen3-30b-a3b"], StepRows(decodes=(9,), sampled=1, tokens=1)
        wide, narrow = (
            compute_step_floors(Sharding(shape=shape, layout=Layout(1), itemsize=2, weights=one), step, RATES)
            for one in (UNQUANTISED, FORMATS["nvfp4"])
        )
        assert {phase for phase in wide if wide[phase] != narrow[phase]} == {"moe"}
        assert narrow["moe"] < wide["moe"] / 3


class TestFp8:
    """Weights and KV have a byte per number, and everything else is in bf16."""

    def test_fp8_kv_is_read_written_and_gathered_with_one_byte_per_number(self):
        """Two requests have 5 and 4 rows of 6 numbers, and q and o of 4 heads: 2·4·(6 + 4) numbers in bf16.

        A layer's attention is 9·6 + 80·2 = 214 B instead of 268, its write 2·6·(2 + 1) B instead of 48. Half of a prefix
        of 2 rows is received: 6 B instead of 12.
        """
        fp8 = dataclasses.replace(TP1, kv_itemsize=1)
        decodes = make_two_requests(TP1)
        wide, narrow = (compute_step_floors(sharding, decodes, RATES) for sharding in (TP1, fp8))
        assert (wide["attention"], narrow["attention"]) == (pytest.approx(3 * 268), pytest.approx(3 * 214))
        assert (wide["kv_write"], narrow["kv_write"]) == (pytest.approx(3 * 48), pytest.approx(3 * 36))
        assert {phase for phase in wide if wide[phase] != narrow[phase]} == {"attention", "kv_write"}
        chunk = StepRows(chunks=((3, 2),), sampled=1, tokens=3)
        gathered = compute_step_floors(dataclasses.replace(TP2_DCP2, kv_itemsize=1), chunk, RATES)["prefix_gather"]
        assert gathered == pytest.approx(3 * (10 + 2 * 6))
        wide, narrow = (compute_step_floors(sharding, chunk, RATES) for sharding in (TP1, fp8))
        assert wide["prefill"] - narrow["prefill"] == pytest.approx(3 * 2 * 6)

    def test_fp8_linear_layer_reads_a_byte_per_number_and_a_scale_per_block(self):
        """7168 × 2048 is 56 · 16 blocks; rows and results stay in bf16. Operations are compared with the rate of fp8."""
        work = compute_linear_work(memory.LinearShape(7168, 2048), 3, itemsize=2, weights=FORMATS[FP8])
        assert work.memory_bytes == 7168 * 2048 + 56 * 16 * 4 + 3 * (7168 + 2048) * 2
        assert work.flops == 2 * 3 * 7168 * 2048
        assert compute_floor_us(work, {"read": 1e30, "matmul": 1.0, "matmul_fp8": 1e12}) == pytest.approx(
            work.flops / 1e6
        )
        assert compute_floor_us(work, {"read": 1e30, "matmul": 1.0}) is None, "the rate of bf16 is not used instead"

    def test_products_use_the_rate_of_their_operands_type(self):
        """Router, W_UK, W_UV, head and attention of chunks use the bf16 rate; attention over fp8 rows uses that of fp8."""
        sharding = Sharding(
            shape=SHAPES["deepseek-v3"], layout=Layout(1), itemsize=2, weights=FORMATS[FP8], kv_itemsize=1
        )
        step = StepRows(decodes=(100,), chunks=((3, 2),), sampled=2, tokens=4)
        products = [(phase, work.flops_limit) for phase, _, work in iter_phase_works(sharding, step) if work.flops]
        found = {phase: sorted(limit for name, limit in products if name == phase) for phase, _ in products}
        both = ["matmul", "matmul_fp8", "matmul_fp8"]
        assert found == {
            "qkv_proj": both,
            "attention": ["matmul_fp8"],
            "o_proj": both[:2],
            "prefill": ["matmul"],
            "dense_mlp": both[1:],
            "moe": ["matmul", *both[1:] * 2],
            "lm_head": ["matmul"],
        }

    def test_matmul_time_of_a_step_uses_the_rate_of_each_type(self):
        """Doubling the rate of fp8 halves the time of fp8 products."""
        sharding = Sharding(shape=SHAPES["deepseek-v3"], layout=Layout(1), itemsize=2, weights=FORMATS[FP8])
        step = StepRows(decodes=(100,), sampled=1, tokens=1)
        flops = {"matmul": 0, "matmul_fp8": 0}
        for _, times, work in iter_phase_works(sharding, step):
            flops[work.flops_limit] += times * work.flops
        seconds = compute_step_matmul_s(sharding, step, {"matmul": 1e12, "matmul_fp8": 2e12})
        assert seconds == pytest.approx(flops["matmul"] / 1e12 + flops["matmul_fp8"] / 2e12)
        assert compute_step_matmul_s(sharding, step, {"matmul": 1e12}) is None

    def test_sharding_takes_item_sizes_from_the_point(self):
        point = record_builder.make_point(Layout(1), dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
        found = Sharding.from_point(point, SHAPES["deepseek-v3"])
        assert (found.itemsize, found.in_fp8, found.kv_itemsize) == (2, True, 1)
        plain = Sharding.from_point(record_builder.make_point(Layout(1), dtype="bf16"), SHAPES["deepseek-v3"])
        assert (plain.itemsize, plain.in_fp8, plain.kv_itemsize) == (2, False, 2)


def test_floor_is_the_largest_term():
    """1,000 B take 1 ms, the operations 3 µs, and 2 barriers and 10 B of a peer 2·10 + 20 µs."""
    assert compute_floor_us(
        OperatorCost(memory_bytes=1000, flops=3000, received_bytes=10, barriers=2), RATES
    ) == pytest.approx(1000)
    assert compute_floor_us(OperatorCost(received_bytes=10, barriers=2), RATES) == pytest.approx(40)


class TestSparseAttention:
    """DeepSeek-V3.2 over 8 ranks of DCP attends to 2,048 tokens of 32 requests with 64,000 each."""

    SHARDING = Sharding(shape=SHAPES["deepseek-v3.2"], layout=Layout(8, 1, 8), itemsize=2, kv_itemsize=1)
    STEP = StepRows(decodes=(64_000,) * 32, sampled=32, tokens=32)

    def list_works(self, phase: str, step: StepRows = STEP) -> list[OperatorCost]:
        """Return all works of a phase, each once."""
        return [work for name, _, work in iter_phase_works(self.SHARDING, step) if name == phase and not work.is_empty]

    def test_ranks_exchange_scores_and_indices_of_their_best_tokens(self):
        """7 ranks send 2,048 pairs of 4 + 4 bytes for each of 32 requests: 3.67 MB; queries are 7/8 of 32 · 128 · 1,152
        bytes.
        """
        queries, candidates = sorted((work.received_bytes for work in self.list_works("q_gather")), reverse=True)
        assert candidates == 7 * 32 * 2048 * 8 == 3_670_016
        assert queries == 7 * 32 * 128 * 1152 // 8 == 4_128_768

    def test_candidates_are_limited_by_the_tokens_of_a_rank(self):
        """8,000 tokens are 1,000 on each rank, fewer than 2,048."""
        indexer = self.SHARDING.shape.indexer
        assert compute_candidate_bytes(indexer, [1000] * 32, 8) == 7 * 32 * 1000 * 8
        assert compute_candidate_bytes(indexer, [8000] * 32, 1) == 0

    def test_rank_reads_its_keys_and_its_part_of_the_selected_rows(self):
        """Each request has 8,000 keys of 132 bytes and 256 rows of 656, with q and o of 128 heads in bf16."""
        attention, indexer = self.list_works("attention")[::-1]
        assert indexer.memory_bytes == 32 * 8000 * 132
        assert indexer.flops == 2 * 32 * 8000 * 64 * 128
        assert attention.memory_bytes == 32 * (256 * 656 + 128 * (576 + 512) * 2)

    def test_stored_keys_of_a_prompt_are_gathered(self):
        """The gather has 7/8 of 1,000 tokens' keys of 132 bytes, and of their rows of 656."""
        works = self.list_works("prefix_gather", StepRows(chunks=((100, 1000),), sampled=1, tokens=100))
        assert sorted(work.received_bytes for work in works) == [7 * 1000 * 132 // 8, 7 * 1000 * 656 // 8]
