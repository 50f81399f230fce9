"""Stated distributions of the experts to which tokens are routed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.points.expert_choices import FILE_CHOICES, ZIPF_CHOICES, compute_zipf_shares, load_choices
from dcpbench.points.expert_distribution import parse_routing
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding
from dcpbench.recommend import estimate

if TYPE_CHECKING:
    from pathlib import Path

V3 = load_shape("deepseek-v3")
for_each_model = pytest.mark.parametrize(
    ("model", "exponent"),
    [
        ("deepseek-v3", 0.5),
        ("deepseek-v3", 1.0),
        ("deepseek-v3", 1.5),
        ("deepseek-v2", 1.0),
        ("kimi-k2", 1.0),
        ("kimi-k2", 1.5),
    ],
)
TOKENS, MAX_CHI_SQUARED = 4096, 1.36


def make_file(tmp_path: Path, counts: np.ndarray, *, named: bool = True) -> str:
    """Write a file of counts."""
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": counts.tolist()} if named else counts.tolist()))
    return str(path)


def make_counts(layers: int, steps: int = 0) -> np.ndarray:
    """Return counts of V3's experts as a router may have made them: no expert has more than an eighth of a layer's."""
    rng = np.random.default_rng(1)
    return rng.integers(0, 1000, (*([steps] if steps else []), layers, V3.experts))


def compute_chi_squared(choices_LTk: np.ndarray, shares_LE: np.ndarray) -> np.ndarray:
    """Return χ² of each layer's counts, over experts with shares below 1."""
    tokens = choices_LTk.shape[1]
    counts_LE = np.stack([np.bincount(ids.ravel(), minlength=shares_LE.shape[1]) for ids in choices_LTk])
    spread_LE = np.where(shares_LE < 1, tokens * shares_LE, np.inf)
    return ((counts_LE - tokens * shares_LE) ** 2 / spread_LE).sum(1)


class TestShares:
    def test_zipf_shares_are_proportional_to_the_reciprocal_rank(self) -> None:
        """With 8 experts, one a token, and S = 1, shares are 1/1, 1/2, … over 1 + 1/2 + … + 1/8 = 2.718."""
        assert compute_zipf_shares(8, 1, 1.0) == pytest.approx([1 / r / 2.717857 for r in range(1, 9)])

    def test_zipf_share_of_an_expert_is_at_most_one_per_token(self) -> None:
        """With shares 1, 1/4, 1/9, 1/16 the first expert would take 1.4 of two rows: it takes 1, and the others share the second row."""
        rest = 1 / 4 + 1 / 9 + 1 / 16
        assert compute_zipf_shares(4, 2, 2.0) == pytest.approx([1, 1 / 4 / rest, 1 / 9 / rest, 1 / 16 / rest])

    @for_each_model
    def test_sets_of_each_layer_have_the_stated_shares(self, model: str, exponent: float) -> None:
        """Each layer assigns the ranks of the law to other experts."""
        shape = load_shape(model)
        choices = load_choices(f"zipf:{exponent:g}", shape)
        wanted = np.sort(compute_zipf_shares(shape.experts, shape.top_k, exponent))
        assert choices.shares_LE.shape == (shape.layers - shape.first_k_dense_replace, shape.experts)
        assert np.abs(np.sort(choices.shares_LE, axis=1) - wanted).max() < 1.5 / ZIPF_CHOICES
        assert len({int(layer.argmax()) for layer in choices.shares_LE}) > 10

    @for_each_model
    def test_sets_respect_the_expert_groups_of_the_model(self, model: str, exponent: float) -> None:
        shape = load_shape(model)
        sets_LSk = load_choices(f"zipf:{exponent:g}", shape).sets
        groups = np.sort(sets_LSk // (shape.experts // shape.n_group), axis=2)
        assert (np.diff(groups, axis=2) > 0).sum(2).max() < shape.topk_group
        assert (np.diff(np.sort(sets_LSk, axis=2), axis=2) > 0).all()


class TestDraws:
    @for_each_model
    def test_drawn_counts_follow_the_distribution(self, model: str, exponent: float) -> None:
        """An expert is taken by share · T of T tokens, with variance T · share · (1 − share), so that χ² is the number of experts less k on average.

        The mean of 58 or more layers is within 5 % of that; no layer is above the 99.99th percentile of χ², 1.36 times the experts.
        """
        shape = load_shape(model)
        choices = load_choices(f"zipf:{exponent:g}", shape)
        wanted = np.sort(compute_zipf_shares(shape.experts, shape.top_k, exponent))
        stated_LE = wanted[choices.shares_LE.argsort(axis=1).argsort(axis=1)]
        found = compute_chi_squared(choices.draw(range(TOKENS), seed=0), stated_LE)
        assert found.mean() == pytest.approx(shape.experts - shape.top_k, rel=0.05)
        assert found.max() < shape.experts * MAX_CHI_SQUARED

    def test_chi_squared_detects_another_distribution(self) -> None:
        """A difference of 0.1 in the exponent is detected in every layer."""
        other_LE = load_choices("zipf:1.1", V3).shares_LE
        found = compute_chi_squared(load_choices("zipf:1", V3).draw(range(TOKENS), seed=0), other_LE)
        assert found.min() > V3.experts * MAX_CHI_SQUARED

    def test_experts_of_a_token_do_not_depend_on_other_tokens(self) -> None:
        """A token's number, the seed and the layer determine its experts, independent of ranks and their order of
        tokens.
        """
        choices = load_choices("zipf:1", V3)
        some = choices.draw([7, 0, 12], seed=3)
        assert (choices.draw(range(13), seed=3)[:, [7, 0, 12]] == some).all()
        assert (choices.draw([7, 0, 12], seed=4) != some).any()
        assert (some[0] != some[1]).any()


class TestEstimates:
    @pytest.mark.parametrize("tokens", [1, 8, 32, 256])
    @pytest.mark.parametrize("routing", ["zipf:0.5", "zipf:1"])
    def test_expected_active_experts_equal_a_simulation(self, routing: str, tokens: int) -> None:
        """Over 200 steps they are within 1 %. One token activates 8 experts."""
        choices = load_choices(routing, V3)
        steps = [choices.draw(range(s * tokens, (s + 1) * tokens), seed=1) for s in range(200)]
        distinct = np.mean([[len(np.unique(layer)) for layer in step] for step in steps])
        assert choices.estimate_hit(tokens) == pytest.approx(distinct, rel=0.01)
        if tokens == 1:
            assert choices.estimate_hit(1) == pytest.approx(V3.top_k)

    @pytest.mark.parametrize("ranks", [2, 8])
    def test_expected_busiest_rank_equals_a_simulation(self, ranks: int) -> None:
        """Over 100 steps of 32 tokens it is within 3 %."""
        choices = load_choices("zipf:1", V3)
        steps = [choices.draw(range(s * 32, (s + 1) * 32), seed=2) for s in range(100)]
        each = V3.experts // ranks
        busiest = np.mean([[np.bincount(np.unique(layer) // each).max() for layer in step] for step in steps])
        assert choices.estimate_busiest(32, ranks) == pytest.approx(busiest, rel=0.03)

    def test_floors_use_the_active_experts_of_the_routing(self) -> None:
        """Each of four ranks reads a quarter of them; with 32 tokens, even routing activates 163 of 256 and zipf:1 100."""

        def count_hit(routing: str, ep: int) -> int:
            return (
                Sharding(shape=V3, layout=Layout(4), itemsize=2, ep=ep, routing=routing)
                .estimate_expert_load(32)
                .active_experts
            )

        assert [count_hit(routing, 1) for routing in ("", "zipf:1")] == [163, 100]
        assert count_hit("zipf:1", 4) == 25

    def test_skewed_routing_waits_longer_for_the_busiest_rank(self) -> None:
        def estimate_us(routing: str) -> float:
            sharding = Sharding(shape=V3, layout=Layout(4, 4), itemsize=2, ep=4, routing=routing)
            return estimate.compute_waiting_us(sharding, 32, {"read": 4.8e12})

        expert_us = 58 * 3 * V3.hidden * V3.moe_intermediate_size * 2 / 4.8e12 * 1e6
        choices = load_choices("zipf:1", V3)
        more = choices.estimate_busiest(32, 4) - choices.estimate_hit(32) / 4
        assert estimate_us("zipf:1") == pytest.approx(more * expert_us)
        assert estimate_us("zipf:1") / (100 / 4) > estimate_us("") / (163 / 4)


class TestFiles:
    def test_shares_are_those_of_the_counts_in_the_file(self, tmp_path: Path) -> None:
        counts = make_counts(58)
        choices = load_choices(parse_routing(make_file(tmp_path, counts)), V3)
        assert np.abs(choices.shares_LE - counts * 8 / counts.sum(1, keepdims=True)).max() < 1.5 / FILE_CHOICES

    def test_steps_are_summed_and_dense_layers_ignored(self, tmp_path: Path) -> None:
        """SGLang's recorder writes [steps, all 61 layers, experts]."""
        counts = make_counts(61, steps=3)
        found = load_choices(parse_routing(make_file(tmp_path, counts, named=False)), V3).shares_LE
        summed = counts.sum(0)[3:]
        assert np.abs(found - summed * 8 / summed.sum(1, keepdims=True)).max() < 1.5 / FILE_CHOICES

    def test_model_with_fewer_layers_uses_the_first_counts(self, tmp_path: Path) -> None:
        counts = make_counts(61)
        cut = dataclasses.replace(V3, layers=5)
        assert load_choices(parse_routing(make_file(tmp_path, counts)), cut).shares_LE.shape == (2, 256)

    def test_file_is_stored_with_its_hash_and_refused_after_a_change(self, tmp_path: Path) -> None:
        path = make_file(tmp_path, make_counts(58))
        stored = parse_routing(path)
        assert stored == f"{path}#{hashlib.sha256((tmp_path / 'counts.json').read_bytes()).hexdigest()[:8]}"
        assert parse_routing(stored) == stored
        make_file(tmp_path, make_counts(61))
        with pytest.raises(UsageError, match="the file has changed"):
            load_choices(stored, V3)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("{", "no counts of experts by layer"),
            ('{"counts": [[1]]}', "no counts of experts by layer"),
            ("[1, 2]", "no counts of experts by layer"),
            ("[[1, -2]]", "no counts of experts by layer"),
            (
                "[[1, 2]]",
                "has 1 × 2 counts, layers × experts, and deepseek-v3 has 61 layers, 58 of them with 256 experts",
            ),
            (json.dumps([[0] * 256] * 58), "a layer has no counts"),
            (json.dumps([[100] + [1] * 255] * 58), "an expert with more than 1/8 of them"),
        ],
        ids=["json", "key", "flat", "negative", "sizes", "empty", "impossible"],
    )
    def test_invalid_files_are_refused(self, content: str, words: str, tmp_path: Path) -> None:
        (tmp_path / "counts.json").write_text(content)
        with pytest.raises(UsageError) as error:
            load_choices(parse_routing(str(tmp_path / "counts.json")), V3)
        assert words in str(error.value)


class TestValues:
    @pytest.mark.parametrize(("typed", "stored"), [("even", ""), ("zipf:1.0", "zipf:1"), (" zipf:0.50 ", "zipf:0.5")])
    def test_routing_value_is_normalised(self, typed: str, stored: str) -> None:
        assert parse_routing(typed) == stored

    @pytest.mark.parametrize("typed", ["zipf:", "zipf:x", "zipf:0", "zipf:-1", "zipf:nan", "zipf:5"])
    def test_invalid_exponents_are_refused(self, typed: str) -> None:
        with pytest.raises(UsageError, match="S is an exponent above 0 and up to 4"):
            parse_routing(typed)

    def test_missing_file_is_refused_with_all_valid_forms(self) -> None:
        with pytest.raises(UsageError, match=r"No such file or directory; write even, zipf:S"):
            parse_routing("zip")

    def test_torch_file_is_refused_with_the_conversion_command(self) -> None:
        with pytest.raises(UsageError, match=r"torch.load\('recorded.pt'\)\['logical_count'\].sum\(0\)"):
            parse_routing("recorded.pt")

    def test_routing_that_expert_groups_forbid_is_refused(self) -> None:
        """V3 routes to 4 of 8 groups, but zipf:4 has its first seven experts in every token."""
        with pytest.raises(
            UsageError, match=r"at most 4 of 8 groups of experts, so \d+ % of the rows would go to other"
        ):
            load_choices("zipf:4", V3)
