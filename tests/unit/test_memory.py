"""Memory arithmetic against figures worked out by hand, and plans that never exceed the memory of a GPU."""

import dataclasses
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import CapacityError, LayoutError
from dcpbench.models import SHAPES
from dcpbench.models.weight_formats import FORMATS, FP8
from dcpbench.points import budget, memory
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import OWN_HEADS, Layout, QueryReplication, compute_local_length
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings

V3 = SHAPES["deepseek-v3"]
H200 = 139 * memory.GIB
L2 = 60 << 20
BF16 = 2


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("deepseek-v2-lite", 15.7),
        ("deepseek-v2", 235.7),
        ("deepseek-v3", 671.0),
        ("kimi-k2", 1026.4),
        ("qwen3-8b", 8.2),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("llama-3.1-8b", 8.0),
        ("llama-3.1-70b", 70.6),
        ("glm-4.6", 352.8),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 116.8),
    ],
)
def test_number_of_weights_equals_that_of_the_model_card(model: str, billions: float) -> None:
    """In fp32 every element, also of the router, takes 4 B."""
    shape = SHAPES[model]
    elements = (
        memory.compute_weight_bytes(
            shape, Layout(1), 4, shape.first_k_dense_replace, shape.layers - shape.first_k_dense_replace
        )
        / 4
    )
    assert round(elements / 1e9, 1) == billions


def test_moe_layer_of_v3_on_one_of_eight_ranks() -> None:
    """32 experts of 3 · 7168 · 2048 = 44,040,192 elements, an eighth of one shared expert, a router with fp32 bias: 32
    · 44,040,192 · 2 = 2,818,572,288; 44,040,192 / 8 · 2 = 11,010,048; 256 · 7168 · 2 + 256 · 4 = 3,671,040.
    """
    assert memory.compute_moe_bytes(V3, Layout(8), BF16) == 2_818_572_288 + 11_010_048 + 3_671_040


def test_attention_of_v3_on_one_rank() -> None:
    """Elements: q 1536·(7168 + 128·192 + 1), kv 7168·576 + 512 + 128·512·256, o 128·128·7168, norms 2·7168."""
    elements = 48_760_320 + 20_906_496 + 117_440_512 + 14_336
    assert memory.compute_attention_bytes(V3, Layout(1), BF16) == 2 * elements


def test_attention_heads_are_divided_only_inside_a_replica() -> None:
    """tp8·dp8 has all heads on each rank, like tp1; dcp changes no weight."""
    assert memory.compute_attention_bytes(V3, Layout(8, dp=8), BF16) == memory.compute_attention_bytes(
        V3, Layout(1), BF16
    )
    assert memory.compute_attention_bytes(V3, Layout(8, dcp=8), BF16) == memory.compute_attention_bytes(
        V3, Layout(8), BF16
    )


def test_replicating_the_q_projection_of_v3_at_dcp8_costs_4_6_gib() -> None:
    """112 more heads have 1536 · 192 numbers of W_UQ and 128 · 512 of W_UK each, in 61 layers; W_UV would have 512 ·
    128.
    """
    own = memory.compute_attention_bytes(V3, Layout(8, dcp=8), BF16)
    query = memory.compute_attention_bytes(V3, Layout(8, dcp=8), BF16, QueryReplication(query=True))
    value = memory.compute_attention_bytes(V3, Layout(8, dcp=8), BF16, QueryReplication(value=True))
    assert query - own == 112 * (1536 * 192 + 128 * 512) * BF16
    assert value - own == 112 * 512 * 128 * BF16
    assert round(61 * (query - own) / memory.GIB, 1) == 4.6
    dense, moe = V3.first_k_dense_replace, V3.layers - V3.first_k_dense_replace
    whole = [
        memory.compute_weight_bytes(V3, Layout(8, dcp=8), BF16, dense, moe, w)
        for w in (OWN_HEADS, QueryReplication(query=True))
    ]
    assert whole[1] - whole[0] == 61 * (query - own)


class TestGroupedQueryAttention:
    """Qwen3-235B: 64 query heads and 4 KV heads of 128 numbers, 94 layers, hidden 4096."""

    QWEN = SHAPES["qwen3-235b-a22b"]

    @pytest.mark.parametrize(
        ("layout", "kv_heads"),
        [(Layout(1), 4), (Layout(2), 2), (Layout(4), 1), (Layout(8), 1), (Layout(8, dcp=2), 1), (Layout(8, dp=8), 4)],
        ids=str,
    )
    def test_rank_has_the_kv_heads_of_its_queries(self, layout: Layout, kv_heads: int) -> None:
        """8 ranks have 2 copies of each KV head; with dcp a rank stores half of the tokens of a copy, in rows of the
        same width.
        """
        heads = 64 // layout.attn_tp
        qkv = 4096 * (heads + 2 * kv_heads) * 128
        norms = 2 * 4096 + 2 * 128
        assert memory.compute_attention_bytes(self.QWEN, layout, BF16) == (qkv + heads * 128 * 4096 + norms) * BF16
        assert memory.compute_page_bytes(self.QWEN, 16, BF16, layout) == 16 * 94 * 2 * kv_heads * 128 * BF16

    def test_dcp_requires_copies_of_kv_heads(self) -> None:
        """tp8 has 2 copies of each of 4 KV heads: as in vLLM, dcp ≤ tp / KV heads."""
        Layout(8, dcp=2).check_model(self.QWEN)
        with pytest.raises(
            LayoutError,
            match=r"has 4 KV heads, of which tp8·dcp4 has 2 copies each.*use --dcp 1 or 2, or --tp 16, 32 or 64",
        ):
            Layout(8, dcp=4).check_model(self.QWEN)
        with pytest.raises(LayoutError, match=r"tp4·dcp2 has 1 copy each.*use --dcp 1, or --tp 8, 16"):
            Layout(4, dcp=2).check_model(self.QWEN)
        with pytest.raises(LayoutError, match=r"tp8·dp2·dcp2 has 1 copy each.*use --dcp 1, or --tp 16, 32"):
            Layout(8, dp=2, dcp=2).check_model(self.QWEN)
        with pytest.raises(LayoutError, match="4 KV heads, which tp6 would split over 6 ranks"):
            Layout(6).check_model(dataclasses.replace(self.QWEN, heads=66))

    def test_sliding_window_layers_hold_rows_for_each_request(self) -> None:
        """18 of 36 layers of gpt-oss-120b keep 128 rows of 1,024 numbers for each of 32 requests, next to the pool."""
        oss = SHAPES["gpt-oss-120b"]
        assert memory.compute_page_bytes(oss, 16, BF16, Layout(1)) == 16 * 18 * 1024 * BF16
        assert memory.compute_sliding_bytes(oss, Layout(2), BF16) == 18 * 128 * 512 * BF16
        assert memory.compute_sliding_bytes(self.QWEN, Layout(2), BF16) == 0
        points = [
            make_one_request(Layout(1), "gpt-oss-120b"),
            msgspec.structs.replace(make_one_request(Layout(1), "gpt-oss-120b"), concurrency=32),
        ]
        one, many = (budget.plan_engine([p], Settings(), oss, make_gpu(300 * memory.GIB)).pages for p in points)
        assert one - many == 31 * 128, "as many layers have a window as not, so a row of a window equals a page"

    def test_experts_in_mxfp4_are_padded_to_whole_blocks_on_a_rank(self) -> None:
        """A rank of eight has 360 of 2,880 numbers of each expert, which engines pad to 12 blocks of 32: 4.25 bits each."""
        oss = dataclasses.replace(SHAPES["gpt-oss-120b"], expert_bias=False)
        router = 128 * (2880 * BF16 + 4)
        found = memory.compute_moe_bytes(oss, Layout(8), BF16, oss.get_weight_format("mxfp4"), ep="1")
        assert found == router + 128 * 3 * 384 * 2880 * 17 // 32

    def test_sliding_window_excludes_dcp(self) -> None:
        with pytest.raises(LayoutError, match=r"layers with a sliding window.*use --dcp 1"):
            Layout(16, dcp=2).check_model(SHAPES["gpt-oss-120b"])

    def test_model_without_experts_holds_mlps(self) -> None:
        """Llama-3.1-8B has 3 · 4096 · 14336 numbers in each of 32 layers. A layer on one rank has 2 · (3 · 4096 · 14336
        + 4096 · 128 · (32 + 16) + 4096² + 2 · 4096) B, 436 MB, more than four times the L2 cache, so one held layer is
        enough.
        """
        llama = SHAPES["llama-3.1-8b"]
        assert memory.compute_dense_mlp_bytes(llama, Layout(1), BF16) == 3 * 4096 * 14336 * BF16
        assert memory.compute_moe_bytes(llama, Layout(1), BF16) == 0
        assert memory.compute_min_layers(llama, Layout(1), BF16, L2) == (1, 0)
        assert memory.compute_min_layers(llama, Layout(8), BF16, L2) == (5, 0), (
            "an eighth of 436 MB, 4.6 times in 252 MB"
        )

    def test_tied_head_is_the_embedding(self) -> None:
        tied = dataclasses.replace(self.QWEN, tie_word_embeddings=True)
        once = memory.compute_outer_bytes(self.QWEN, Layout(1), BF16) - memory.compute_outer_bytes(
            tied, Layout(1), BF16
        )
        assert once == 151936 * 4096 * BF16


def test_dense_mlp_and_vocabulary_of_v3_on_one_of_eight_ranks() -> None:
    """3 · 7168 · 18432 / 8 · 2 B = 99,090,432; (2 · 129280 / 8 + 1) · 7168 · 2 B = 463,353,856."""
    assert memory.compute_dense_mlp_bytes(V3, Layout(8), BF16) == 99_090_432
    assert memory.compute_outer_bytes(V3, Layout(8), BF16) == 463_353_856


def test_vocabulary_is_padded_to_a_multiple_of_the_ranks() -> None:
    """512 rows over 3 ranks are 171 each."""
    assert memory.compute_vocab_rows(SHAPES["tiny"], Layout(3)) == 171


@pytest.mark.parametrize(
    ("layout", "concurrency", "context", "page_size", "pages"),
    [
        (Layout(8), 48, 4000, 1, 48 * 4001 + 1),
        (Layout(8, dcp=8), 48, 4000, 1, 48 * 501 + 1),  # 4001 / 8 = 500.1
        (Layout(8, dcp=8), 48, 4000, 64, 48 * 8 + 1),  # 4001 / 512 = 7.8
        (Layout(8, dp=8), 48, 4000, 1, 6 * 4001 + 1),
        (Layout(8, dp=8), 4, 4000, 1, 4001 + 1),  # half of the replicas have nothing to do
        (Layout(8, dcp=8), 1, 7, 1, 1 + 1),  # the new token is the eighth
        (Layout(8, dcp=8), 1, 8, 1, 2 + 1),
    ],
    ids=str,
)
def test_kv_pages_of_a_rank(layout: Layout, concurrency: int, context: int, page_size: int, pages: int) -> None:
    assert memory.count_kv_pages(layout, concurrency, context, page_size) == pages


@given(st.integers(1, 5000), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 16, 64]))
def test_request_has_the_fewest_pages_that_hold_its_tokens(tokens: int, dcp: int, page_size: int) -> None:
    pages = memory.count_pages(tokens, Layout(8, dcp=dcp), page_size)
    assert (pages - 1) * page_size < compute_local_length(tokens, 0, dcp) <= pages * page_size


def test_page_of_v3_includes_all_layers() -> None:
    """A page has 64 rows of 70,272 B."""
    assert memory.compute_page_bytes(V3, 64, BF16) == 64 * 70_272


def test_fewest_held_layers_exceed_four_times_the_l2_cache() -> None:
    """With tp8 a layer has attention of 73,302,016 B and a shared expert of 11,010,048 B; 4 · 62,914,560 B are 2.98
    layers.
    """
    assert memory.compute_min_layers(V3, Layout(8), BF16, L2) == (1, 3)
    assert memory.compute_min_layers(SHAPES["tiny"], Layout(1), 4, L2) == (1, 2), "at most the layers of the model"


def make_gpu(total: int) -> Probe:
    """Return a machine of GPUs with this memory."""
    return Probe(device="cuda", count=8, name="GPU", memory_bytes=total, l2_bytes=L2)


def make_one_request(layout: Layout, model: str = "deepseek-v3") -> Point:
    """Return a point in bf16 with pages of one token."""
    return Point(
        model=model,
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=1,
        context=1,
        backend="triton",
        dtype="bf16",
    )


def plan_pool(layout: Layout, kv_pages: int, total: int, model: str = "deepseek-v3") -> budget.EnginePlan:
    """Return the plan of an engine in bf16 with a pool of this many pages of one token."""
    shape = SHAPES[model]
    settings = Settings(kv_memory_bytes=kv_pages * memory.compute_page_bytes(shape, 1, BF16))
    return budget.plan_engine([make_one_request(layout, model)], settings, shape, make_gpu(total))


def test_model_without_dense_layers_holds_none() -> None:
    """Other models hold at least one dense layer."""
    assert memory.compute_min_layers(V3, Layout(8), BF16, 60 << 20)[0] == 1
    assert (
        memory.compute_min_layers(dataclasses.replace(V3, first_k_dense_replace=0), Layout(8), BF16, 60 << 20)[0] == 0
    )


def test_every_layer_is_held_if_the_model_fits() -> None:
    plan = plan_pool(Layout(8), 1000, 400 * memory.GIB)
    assert (plan.held, plan.layers_held) == ((3, 58), 61)
    assert plan.weight_bytes == plan.full_weight_bytes
    assert plan.kv_bytes == 1000 * 70_272


def test_as_many_layers_as_fit_are_held() -> None:
    """671 GB of weights do not fit into 4 · 139 GiB."""
    plan = plan_pool(Layout(4), 1000, H200)
    assert plan.held.dense == 3
    assert 2 <= plan.held.moe < 58
    one_more = memory.compute_weight_bytes(V3, Layout(4), BF16, plan.held.dense, plan.held.moe + 1)
    assert plan.kv_bytes + plan.weight_bytes <= H200 - memory.RESERVE_BYTES < plan.kv_bytes + one_more


def test_kv_cache_that_does_not_fit_raises_error_with_the_shortage() -> None:
    """2,000,000 rows of 70,272 B are 130.9 GiB of the 139 − 8 = 131."""
    with pytest.raises(CapacityError) as caught:
        plan_pool(Layout(4), 2_000_000, H200)
    assert caught.value.exit_code == 3
    kv, weights, missing, available = map(float, re.findall(r"(\d+\.\d) GiB", str(caught.value)))
    assert str(caught.value).startswith("tp4: the KV cache needs 130.9 GiB per GPU")
    assert available == 131.0
    assert kv + weights - available == pytest.approx(missing, abs=0.11)


@given(
    st.sampled_from(["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"]),
    st.sampled_from([Layout(1), Layout(4), Layout(8), Layout(8, dcp=8), Layout(8, dp=8)]),
    st.integers(9, 1000),
)
def test_largest_pool_fits_and_one_page_more_does_not(model: str, layout: Layout, gib: int) -> None:
    shape = SHAPES[model]
    total = gib * memory.GIB
    max_pages = budget.compute_max_pages(make_one_request(layout, model), shape, make_gpu(total))
    if max_pages:
        plan = plan_pool(layout, max_pages, total, model)
        assert plan.kv_bytes + plan.weight_bytes <= total - memory.RESERVE_BYTES
    with pytest.raises(CapacityError):
        plan_pool(layout, max_pages + 1, total, model)


def test_prefill_window_of_v3_on_one_of_four_ranks_with_dcp4() -> None:
    """32 heads have keys and values of 192 columns, and a row of 576, in bf16; 144 are sent, 576 received and 576 put
    in order.
    """
    assert memory.compute_window_bytes(V3, Layout(4, dcp=4), 1, BF16) == (2 * 32 * 192 + 576 + 144 + 576 + 576) * 2
    assert (
        memory.compute_window_bytes(V3, Layout(4, dcp=4), 1, BF16, 1) == (2 * 32 * 192 + 576) * 2 + 144 + 576 + 576
    ), "with an fp8 KV cache"
    assert memory.compute_window_bytes(V3, Layout(4), 1, BF16) == (2 * 32 * 192 + 576) * 2, (
        "nothing is gathered without dcp"
    )


def test_prefill_step_of_v3_on_one_of_four_ranks_with_dcp4() -> None:
    """Experts of 8,192 tokens take nearly half of it: 8 · (7168 + 3 · 2048) numbers per token, 1.6 GiB in all."""
    experts = 8192 * 8 * (7168 + 3 * 2048) * 2
    assert round(experts / memory.GIB, 2) == 1.62
    hidden = 8192 * 7 * 7168 * 2
    attention = 8192 * (1536 + 2 * 576 + 32 * (3 * 192 + 2 * 128)) * 2 + 8192 * 32 * 128 * 4
    window = 16384 * (2 * 32 * 192 + 3 * 576 + 144) * 2
    found = memory.compute_prefill_bytes(V3, Layout(4, dcp=4), 8192, BF16)
    assert found == window + experts + hidden + attention
    assert round(found / memory.GIB, 1) == 3.4
    cut = memory.compute_prefill_bytes(V3, Layout(4, dcp=4), 8192, BF16, "1")
    assert found - cut == 8192 * 8 * 3 * (2048 - 512) * 2, "each rank has a quarter of an expert's width"


def test_attention_dp_has_all_tokens_in_experts_and_a_share_in_attention() -> None:
    """tp4·dp4 has 128 heads for a quarter of the tokens: the same attention, and four times the window."""
    one, four = (memory.compute_prefill_bytes(V3, layout, 8192, BF16) for layout in (Layout(4), Layout(4, dp=4)))
    window = 16384 * (2 * 96 * 192) * 2
    rows = 8192 - 2048
    assert four - one == window - rows * (3 * 7168 + 1536 + 2 * 576) * 2


def test_scale_blocks_end_with_each_part_of_a_layer() -> None:
    """Parts of 128, 64 and 128 rows have 2 + 1 + 2 blocks of 64 rows over 128 columns; the last part may end inside a
    block.
    """
    product = memory.LinearShape(128, 320)
    assert memory.compute_stored_bytes(product, (128, 64, 128), FORMATS[FP8]) == 320 * 128 + 5 * 4
    assert memory.compute_stored_bytes(memory.LinearShape(128, 192), (128, 64), FORMATS[FP8]) == 192 * 128 + 2 * 4
    assert memory.compute_stored_bytes(memory.LinearShape(256, 256), (128, 128), FORMATS[FP8]) == 256 * 256 + 4 * 4
