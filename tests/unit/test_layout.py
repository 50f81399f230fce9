"""Layouts: valid degrees, one owner per token, and bijective row maps."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.errors import LayoutError
from dcpbench.models import SHAPES
from dcpbench.points.layout import (
    Layout,
    compute_local_length,
    get_loc,
    get_owner,
    get_row,
    list_local_tokens,
    list_valid_layouts,
    place_experts,
)

DCP = st.integers(1, 16)
STRIPE = st.integers(1, 9)
TOKENS = st.integers(0, 700)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Draw any layout with valid degrees."""
    dcp, groups, dp = (draw(st.integers(1, 5)) for _ in range(3))
    return Layout(tp=dcp * groups * dp, dp=dp, dcp=dcp)


class TestDegrees:
    def test_layouts_of_too_many_ranks_are_refused_at_once(self) -> None:
        """1,000,000,007 is prime, and trying its divisors one by one would take very long."""
        with pytest.raises(LayoutError, match="--tp 1000000007 is more than"):
            list_valid_layouts(SHAPES["tiny"], 1_000_000_007)

    @pytest.mark.parametrize(
        ("degrees", "message"),
        [
            ({"tp": 0}, "--tp 0 is not a positive number"),
            ({"tp": 8, "dcp": -1}, "--dcp -1 is not a positive number"),
            ({"tp": 1000000007, "dcp": 2}, "--tp 1000000007 is more than the 65,536 ranks that a layout can have"),
            ({"tp": 8, "dcp": 1000000007}, "--dcp 1000000007 is more than the 65,536 ranks"),
            ({"tp": 8, "pp": 1000000007}, "--stages pp=1000000007 is more than the 65,536 ranks"),
            ({"tp": 8, "dp": 3}, "--dp 3 does not divide --tp 8; with --tp 8 these do: 1, 2, 4, 8."),
            ({"tp": 8, "dcp": 3}, "--dcp 3 does not divide --tp 8; these do: 1, 2, 4, 8."),
            ({"tp": 8, "dp": 4, "dcp": 4}, "--dcp 4 does not divide --tp 8 / --dp 4 = 2; these do: 1, 2."),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_invalid_degrees_raise_layout_error_with_valid_ones(self, degrees: dict[str, int], message: str) -> None:
        with pytest.raises(LayoutError) as caught:
            Layout(**degrees)
        assert message in str(caught.value)
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        ("layout", "name", "vllm_name"),
        [
            (Layout(tp=8), "tp8", "dp1·tp8·dcp1"),
            (Layout(tp=8, dcp=8), "tp8·dcp8", "dp1·tp8·dcp8"),
            (Layout(tp=8, dp=8), "tp8·dp8", "dp8·tp1·dcp1"),
            (Layout(tp=16, dp=8, dcp=2), "tp16·dp8·dcp2", "dp8·tp2·dcp2"),
        ],
        ids=str,
    )
    def test_layout_has_a_name_and_a_vllm_name(self, layout: Layout, name: str, vllm_name: str) -> None:
        assert str(layout) == name
        assert layout.format_vllm_name() == vllm_name


class TestGroups:
    def test_groups_of_tp8_dp2_dcp2(self) -> None:
        """Two replicas of four ranks have two KV copies each, over neighbouring ranks."""
        layout = Layout(tp=8, dp=2, dcp=2)
        assert layout.list_attn_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert layout.list_dcp_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert layout.list_dp_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]

    @given(layouts())
    def test_each_kind_of_group_has_every_rank_once(self, layout: Layout) -> None:
        for groups in (layout.list_attn_groups(), layout.list_dcp_groups(), layout.list_dp_groups()):
            assert sorted(rank for group in groups for rank in group) == list(range(layout.tp))

    @given(layouts())
    def test_dcp_group_is_in_one_replica_with_every_dcp_rank_once(self, layout: Layout) -> None:
        for group in layout.list_dcp_groups():
            assert len({rank // layout.attn_tp for rank in group}) == 1
            assert [layout.get_dcp_rank(rank) for rank in group] == list(range(layout.dcp))

    @given(layouts())
    def test_dp_group_has_the_same_heads_in_different_replicas(self, layout: Layout) -> None:
        for group in layout.list_dp_groups():
            assert len({layout.get_attn_rank(rank) for rank in group}) == 1
            assert [rank // layout.attn_tp for rank in group] == list(range(layout.dp))


class TestOwnership:
    def test_eleven_tokens_over_four_ranks(self) -> None:
        """Rank 0 has 0 4 8, rank 1 has 1 5 9, rank 2 has 2 6 10, rank 3 has 3 7."""
        assert [list_local_tokens(11, rank, 4) for rank in range(4)] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7]]

    def test_eleven_tokens_over_two_ranks_in_stripes_of_three(self) -> None:
        """Stripes are 012 345 678 9-10: rank 0 has the first and third, rank 1 the second and the incomplete fourth."""
        assert list_local_tokens(11, 0, 2, 3) == [0, 1, 2, 6, 7, 8]
        assert list_local_tokens(11, 1, 2, 3) == [3, 4, 5, 9, 10]

    def test_shards_are_empty_with_fewer_tokens_than_ranks(self) -> None:
        assert [compute_local_length(3, rank, 8) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]

    @given(TOKENS, DCP, STRIPE)
    def test_every_token_has_exactly_one_owner(self, tokens: int, dcp: int, stripe: int) -> None:
        shards = [list_local_tokens(tokens, rank, dcp, stripe) for rank in range(dcp)]
        assert sorted(token for shard in shards for token in shard) == list(range(tokens))
        for rank, shard in enumerate(shards):
            assert all(get_owner(token, dcp, stripe) == rank for token in shard)

    @given(TOKENS, DCP, STRIPE)
    def test_local_lengths_add_up_and_differ_by_at_most_one_stripe(self, tokens: int, dcp: int, stripe: int) -> None:
        lengths = [compute_local_length(tokens, rank, dcp, stripe) for rank in range(dcp)]
        assert sum(lengths) == tokens
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= stripe

    @given(TOKENS, DCP)
    def test_local_length_equals_the_published_formula_for_stripes_of_one(self, tokens: int, dcp: int) -> None:
        for rank in range(dcp):
            assert compute_local_length(tokens, rank, dcp) == tokens // dcp + (rank < tokens % dcp)

    @given(st.integers(0, 1 << 40), DCP, STRIPE)
    def test_owner_and_row_identify_a_location(self, loc: int, dcp: int, stripe: int) -> None:
        assert get_loc(get_row(loc, dcp, stripe), get_owner(loc, dcp, stripe), dcp, stripe) == loc

    @given(st.integers(0, 1 << 40), DCP, STRIPE, st.data())
    def test_every_row_of_every_rank_is_a_location(self, row: int, dcp: int, stripe: int, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, dcp - 1))
        loc = get_loc(row, rank, dcp, stripe)
        assert (get_row(loc, dcp, stripe), get_owner(loc, dcp, stripe)) == (row, rank)

    @given(st.integers(0, 300), DCP, STRIPE)
    def test_rows_are_dense_in_token_order(self, tokens: int, dcp: int, stripe: int) -> None:
        """The tokens of a rank fill its rows 0, 1, 2, … without a gap."""
        for rank in range(dcp):
            mine = [token for token in range(tokens) if get_owner(token, dcp, stripe) == rank]
            assert [get_row(token, dcp, stripe) for token in mine] == list(range(len(mine)))


class TestModels:
    @pytest.mark.parametrize(
        ("model", "layout", "message"),
        [
            (
                "deepseek-v2-lite",
                Layout(tp=32),
                "16 heads, which tp32 would split over 32 ranks; use --tp 1, 2, 4, 8 or 16, or --dp 2, 4",
            ),
            ("deepseek-v3", Layout(tp=3), "128 heads, which tp3 would split over 3 ranks"),
            ("deepseek-v3", Layout(tp=3, dp=3), "256 experts, which do not divide over --tp 3; use --tp 1, 2, 4, 8"),
            ("tiny", Layout(tp=16, dp=2), "8 experts, which do not divide over --tp 16"),
        ],
        ids=str,
    )
    def test_layout_that_does_not_fit_the_model_raises_error_with_valid_degrees(
        self, model: str, layout: Layout, message: str
    ) -> None:
        with pytest.raises(LayoutError) as caught:
            layout.check_model(SHAPES[model])
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (
                {"intermediate_size": 18434},
                "a dense width of 18434, which does not divide over --tp 4; use --tp ",
            ),
            (
                {"moe_intermediate_size": 2050, "shared_experts": 3},
                "a shared expert width of 6150, which does not divide over --tp 4; use --tp ",
            ),
        ],
        ids=["dense", "shared-expert"],
    )
    @pytest.mark.parametrize("dp", [1, 2, 4])
    def test_widths_that_tp_does_not_divide_raise_error_with_valid_degrees(
        self, changed: dict[str, int], message: str, dp: int
    ) -> None:
        """Widths are split over all of tp for any dp. 18,434 = 2 · 13 · 709 and 3 · 2,050 = 2 · 3 · 5² · 41."""
        shape = dataclasses.replace(SHAPES["deepseek-v3"], **changed)
        instead = {1: "1 or 2.", 2: "2.", 4: "1 or 2 with --dp 1 and --dcp 1."}[dp]
        with pytest.raises(LayoutError, match=re.escape(message + instead)):
            Layout(tp=4, dp=dp).check_model(shape)
        Layout(tp=2).check_model(shape)
        assert list_valid_layouts(shape, 4) == []
        Layout(tp=4, dp=dp).check_model(dataclasses.replace(shape, first_k_dense_replace=0, shared_experts=0))

    @pytest.mark.parametrize(
        ("changed", "layout", "ep", "message"),
        [
            (
                {"moe_intermediate_size": 2050, "shared_experts": 2},
                Layout(4),
                "1",
                "experts with a width of 2050, which does not divide over --tp 4; use --tp 1 or 2, or --ep tp.",
            ),
            (
                {"experts": 255},
                Layout(4, dp=2),
                "tp",
                "255 experts, which do not divide over --tp 4; use --tp 1 with --dp 1 and --dcp 1, or --ep 1.",
            ),
            (
                {},
                Layout(4),
                "2",
                "--ep 2 with --tp 4: experts are tensor-parallel over all ranks (--ep 1), or expert parallel over",
            ),
        ],
        ids=["width", "number", "neither"],
    )
    def test_impossible_expert_placement_raises_error_with_valid_ones(
        self, changed: dict[str, int], layout: Layout, ep: str, message: str
    ) -> None:
        """4 divides 2 · 2,050 but not 2,050; 255 is odd, and the other widths are powers of two times nine."""
        shape = dataclasses.replace(SHAPES["deepseek-v3"], **changed)
        with pytest.raises(LayoutError) as caught:
            layout.check_model(shape, ep)
        assert message in str(caught.value)

    @pytest.mark.parametrize("model", SHAPES)
    def test_models_take_the_degrees_that_errors_suggest(self, model: str) -> None:
        """Each of the values in `use --tp 8, 16 or 32, or --dcp 1` is tried by itself, with the other degrees as they are."""
        shape, refused = SHAPES[model], 0
        for tp, dp, dcp, ep in itertools.product((1, 2, 3, 4, 8, 12, 32), (1, 2, 3), (1, 2, 3, 4, 8), ("1", "tp")):
            if tp % dp or tp // dp % dcp:
                continue
            layout = Layout(tp, dp, dcp)
            try:
                layout.check_model(shape, ep)
            except LayoutError as error:
                refused += 1
                advice = str(error).removeprefix(error.problem)
            else:
                continue
            parts = re.findall(r"--(\w+) ([\w, ]+?)( with --dp 1 and --dcp 1)?(?=, or --|\.)", advice)
            assert parts
            for name, values, others in parts:
                changed = {"dp": 1, "dcp": 1} if others else {}
                for value in re.findall(r"\d+|tp", values):
                    if name == "ep":
                        layout.check_model(shape, value)
                    else:
                        dataclasses.replace(layout, **changed, **{name: int(value)}).check_model(shape, ep)
        assert refused

    def test_valid_layouts_depend_on_the_placement_of_experts(self) -> None:
        """The width of 255 experts can be split over 2 ranks, which is the default, but the experts cannot be
        distributed to them.
        """
        shape = dataclasses.replace(SHAPES["deepseek-v3"], experts=255)
        assert list_valid_layouts(shape, 2) == list_valid_layouts(shape, 2, "1")
        assert [str(x) for x in list_valid_layouts(shape, 2, "1")] == ["tp2", "tp2·dcp2", "tp2·dp2"]
        assert list_valid_layouts(shape, 2, "tp") == []

    def test_valid_layouts_of_deepseek_v3_on_four_gpus(self) -> None:
        assert [str(layout) for layout in list_valid_layouts(SHAPES["deepseek-v3"], 4)] == [
            "tp4",
            "tp4·dcp2",
            "tp4·dcp4",
            "tp4·dp2",
            "tp4·dp2·dcp2",
            "tp4·dp4",
        ]

    @pytest.mark.parametrize("model", SHAPES)
    def test_every_valid_layout_passes_the_check_of_its_model(self, model: str) -> None:
        for tp in range(1, 17):
            for layout in list_valid_layouts(SHAPES[model], tp):
                layout.check_model(SHAPES[model], place_experts("1", tp))
                assert layout.tp == tp
