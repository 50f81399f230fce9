"""Comparison of an engine's results with those of transformers by `verify`: errors, limits, ties, and results that
cannot be compared.
"""

import dataclasses
import math

import msgspec
import pytest
import torch

from dcpbench.engine.scaled_weights import compute_block_size
from dcpbench.kernels.attention import QUERIES, WEIGHTS
from dcpbench.kernels.block_scaled import (
    Scaled,
    dequantize_rows,
    dequantize_weight,
    quantize_rows_reference,
    quantize_weight,
)
from dcpbench.kernels.e4m3 import ROUNDING
from dcpbench.points.point import Point
from dcpbench.workloads import checkpoint_checks as checks
from dcpbench.workloads.checkpoint_checks import Finding, Limits, find_errors, find_expert_errors, is_greedy
from dcpbench.workloads.rounding import Roundings, dequantize_blocks, round_rows, round_weight
from dcpbench.workloads.teacher_forcing import (
    ATTENTION,
    EXPERT,
    LOGITS,
    MLP,
    O_PROJ,
    QUERY,
    Comparison,
    Difference,
    ScoreScale,
    choose_experts,
    compute_relative_errors,
)
from dcpbench.workloads.trace import DecodeResult, Trace

POINT = Point(model="tiny", tp=1, concurrency=2, context=9, backend="reference", dtype="bf16", page_size=2)
BF16 = Limits(2.0**-8, fp8_weights=False, attention_rounds=frozenset())
FP8 = dataclasses.replace(BF16, fp8_weights=True)
NO_POSITIONS = torch.zeros(0, dtype=torch.bool)


def make_difference(*errors: float, stage: str = O_PROJ, layer: int = 0, scores: float = 0.0) -> Difference:
    return Difference(stage, layer, torch.tensor(errors), scores)


def make_comparison(*differences: Difference, scales: list[ScoreScale] = []) -> Comparison:  # noqa: B006 - not changed
    return Comparison(list(differences), scales, NO_POSITIONS, torch.zeros(1, 1))


class TestRelativeErrors:
    def test_error_of_a_position_is_relative_to_its_norm(self):
        """Errors of 1 where the model has 10 and 20; the median of 10, 10 and 20 is 10."""
        model = torch.tensor([[10.0, 0.0], [0.0, 20.0], [6.0, 8.0]])
        engine = model + torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        assert compute_relative_errors(engine, model).tolist() == pytest.approx([0.1, 0.05, 0.0])

    def test_error_of_a_small_result_is_relative_to_the_median(self):
        """An error of 1 where the model has 0.01, and 10 at two other positions: a tenth, not a hundred."""
        model = torch.tensor([[0.01], [10.0], [10.0]])
        assert compute_relative_errors(model + torch.tensor([[1.0], [0.0], [0.0]]), model)[0] == pytest.approx(0.1)

    def test_nan_is_an_error(self):
        errors = compute_relative_errors(torch.tensor([[math.nan], [1.0]]), torch.ones(2, 1))
        assert [math.isnan(e) for e in errors.tolist()] == [True, False]

    def test_equal_zeros_have_no_error(self):
        assert compute_relative_errors(torch.zeros(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]


class TestLimits:
    def test_limits_in_bf16_are_a_few_roundings(self):
        """Half a step of bf16 is 2⁻⁸: twice that at the median position, four times at any."""
        assert BF16.get_median_limit(make_difference()) == 2 * 2.0**-8
        assert BF16.get_position_limit(make_difference()) == 4 * 2.0**-8

    def test_limits_do_not_depend_on_depth(self):
        assert BF16.get_position_limit(make_difference(layer=60)) == BF16.get_position_limit(make_difference(layer=0))

    def test_limit_of_attention_grows_with_scores(self):
        """Scores have a root mean square of 3: √(1 + 9)."""
        found = BF16.get_median_limit(make_difference(stage=ATTENTION, scores=3.0))
        assert found == pytest.approx(2 * 2.0**-8 * 10**0.5)

    @pytest.mark.parametrize(("stage", "rounded"), [(MLP, 1), (QUERY, 1), (EXPERT, 1), (O_PROJ, 0), (ATTENTION, 0)])
    def test_fp8_weights_raise_limits_of_stages_that_round_their_own_results(self, stage, rounded):
        """The stage o_proj has the engine's own input, and rounds it to the same e4m3 numbers."""
        one = make_difference(stage=stage)
        assert FP8.get_median_limit(one) - BF16.get_median_limit(one) == pytest.approx(rounded * ROUNDING / 4)
        assert FP8.get_position_limit(one) - BF16.get_position_limit(one) == pytest.approx(rounded * ROUNDING * 2)

    def test_kernels_that_round_queries_and_weights_raise_the_limit(self):
        """Scores of 2 give √(2² + 1) roundings to e4m3 in the mean square."""
        kernel = dataclasses.replace(BF16, attention_rounds=frozenset((QUERIES, WEIGHTS)))
        one = make_difference(stage=ATTENTION, scores=2.0)
        assert kernel.get_median_limit(one) - BF16.get_median_limit(one) == pytest.approx(ROUNDING * 5**0.5)
        assert kernel.get_median_limit(make_difference()) == BF16.get_median_limit(make_difference())


class TestFindings:
    def test_each_prompt_has_its_worst_position_and_all_have_one_median(self):
        """Over 4 + 5 positions, errors 1, 2, 3, 9 and five of 2 have the median 2."""
        found = find_errors(
            BF16, {0: make_comparison(make_difference(1, 2, 3, 9)), 5: make_comparison(make_difference(2, 2, 2, 2, 2))}
        )
        limit, median = BF16.get_position_limit(make_difference()), BF16.get_median_limit(make_difference())
        assert found == [
            Finding(O_PROJ, 0, 9.0, limit, position=3, prompt=0),
            Finding(O_PROJ, 0, 2.0, limit, position=0, prompt=5),
            Finding(O_PROJ, 0, 2.0, median),
        ]

    def test_few_positions_have_no_median(self):
        """The median of seven positions would depend on a few roundings."""
        found = find_errors(BF16, {0: make_comparison(make_difference(*[1.0] * 7))})
        assert [finding.position for finding in found] == [0]

    def test_logits_give_no_layer_finding(self):
        assert find_errors(BF16, {0: make_comparison(make_difference(*[1.0] * 9, stage=LOGITS))}) == []

    def test_nan_is_worse_than_any_error(self):
        (worst,) = find_errors(BF16, {0: make_comparison(make_difference(9.0, math.nan))})
        assert (worst.position, worst.ratio) == (1, math.inf)

    def test_worst_expert_is_named(self):
        (worst,) = find_expert_errors(BF16, [make_difference(0.0, 0.5, stage=EXPERT, layer=3)])
        assert str(worst) == "expert 1 of layer 3"

    def test_failed_check_names_the_worst_and_the_first_layer(self):
        findings = [
            Finding(O_PROJ, 0, 0.001, 0.01, position=2, prompt=0),
            Finding(MLP, 1, 0.02, 0.01, position=2, prompt=0),
            Finding(MLP, 2, 0.9, 0.01),
        ]
        check = checks._check_layers(POINT, findings)
        assert (check.ok, check.error, check.limit) == (False, 0.9, 0.01)
        assert "MLP of layer 2 at the median position; 2 layers of 3 differ" in check.detail
        assert check.detail.endswith("first MLP of layer 1 at position 2 of prompt 1")

    def test_passed_check_names_the_worst_layer_only(self):
        check = checks._check_layers(POINT, [Finding(O_PROJ, 0, 0.001, 0.01)])
        assert check.ok
        assert check.detail.endswith("o_proj of layer 0 at the median position")

    def test_infinite_error_fails_the_check(self):
        check = checks._check_layers(POINT, [Finding(O_PROJ, 0, math.inf, 0.01)])
        assert (check.ok, check.error) == (False, None)


class TestSoftmaxScale:
    @staticmethod
    def make_scale(share: float, noise: float, outputs: int) -> ScoreScale:
        """Return outputs with a derivative of size 10, off by a share of it and by noise that is orthogonal to it."""
        return ScoreScale(share * 100, derivative=100.0, error=(share * 10) ** 2 + noise**2, outputs=outputs)

    def test_scale_error_beyond_noise_is_wrong(self):
        """Noise of 1 over 400 outputs gives a standard error of 1 / 20 / 10 = 0.5 %. The limit is 1 % and five of
        these.
        """
        (right,) = checks._compute_scale_error([self.make_scale(0.02, 1.0, 400)])
        (wrong,) = checks._compute_scale_error([self.make_scale(-0.2, 1.0, 400)])
        assert right.limit == pytest.approx(0.035, rel=0.05)
        assert right.ratio < 1 < wrong.ratio
        assert str(wrong) == "softmax scale of all layers"

    def test_scale_error_is_averaged_over_prompts_and_layers(self):
        (found,) = checks._compute_scale_error([self.make_scale(0.1, 1.0, 100), self.make_scale(0.3, 1.0, 100)])
        assert found.error == pytest.approx(0.2)

    def test_outputs_of_a_single_key_give_no_scale_error(self):
        assert checks._compute_scale_error([ScoreScale(0.0, 0.0, 0.1, 8)]) == []


def make_trace(logits: list[list[float]]) -> Trace:
    """Return a trace with a prompt of one token, and as many new tokens as logits."""
    return Trace(prompt=1, tokens=[0] * len(logits), results={}, logits=torch.tensor(logits))


class TestTokens:
    LOGITS = ((1.0, 3.0, 2.0), (5.0, 4.0, 4.9))

    def check_tokens(self, *ranks: list[int], expected=LOGITS, allowed: float = 0.01):
        decoded = [DecodeResult({0: tokens}, {}, None) for tokens in ranks]
        return checks._check_tokens(
            POINT, {0: make_trace([list(x) for x in self.LOGITS])}, {0: torch.tensor(expected)}, allowed, decoded
        )

    def test_tokens_of_the_largest_logits_are_right(self):
        check = self.check_tokens([1, 0])
        assert (check.error, check.limit, check.ok) == (0, 0, True)
        assert check.detail.startswith("of 2 greedy tokens on all ranks;")

    def test_token_below_the_engines_largest_logit_is_wrong_despite_tolerance(self):
        """The logit 4.9 is within the tolerance of 5, but the engine's own largest logit is 5."""
        assert self.check_tokens([1, 2], allowed=10.0).error == 1

    def test_wrong_token_of_one_rank_is_an_error(self):
        assert self.check_tokens([1, 0], [1, 1]).error == 1

    def test_token_outside_the_vocabulary_is_wrong(self):
        assert self.check_tokens([3, 0]).error == 1
        assert self.check_tokens([-1, 0]).error == 1

    def test_token_must_be_near_the_largest_logit_of_transformers(self):
        """The tolerance is twice the error of a logit: within it either token may be the larger one."""
        near, far = ((1.0, 3.0, 3.015), (5.0, 4.0, 4.9)), ((1.0, 3.0, 3.025), (5.0, 4.0, 4.9))
        assert self.check_tokens([1, 0], expected=near).ok
        assert self.check_tokens([1, 0], expected=far).error == 1

    def test_nan_is_never_the_largest_logit(self):
        assert not is_greedy(torch.tensor([math.nan, 1.0]), 1, 0.0)
        assert not is_greedy(torch.tensor([1.0, math.nan]), 1, 0.0)


class TestLogits:
    @pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3], ids="logits-times-{}".format)
    def test_largest_logit_difference_of_any_position_counts(self, scale):
        found = make_trace([[0.0, 1.0 * scale], [2.0 * scale, 4.5 * scale]])
        expected = torch.tensor([[0.0, 1.0], [2.0, 4.0]]) * scale
        check = checks._check_logits(POINT, {0: found}, {0: expected}, 0.4 * scale, exact=False)
        assert check.error == pytest.approx(0.5 * scale)
        assert (check.ok, check.limit) == (False, 0.4 * scale)
        assert checks._check_logits(POINT, {0: found}, {0: expected}, 0.6 * scale, exact=False).ok

    def test_nan_logit_fails_the_check(self):
        check = checks._check_logits(POINT, {0: make_trace([[math.nan, 1.0]])}, {0: torch.ones(1, 2)}, 9.0, exact=True)
        assert (check.ok, check.error) == (False, None)


class Router:
    """A router like that of transformers: sigmoid scores, a bias for the choice, two of four experts."""

    def __init__(self, bias: torch.Tensor | None) -> None:
        self.e_score_correction_bias = bias
        if bias is None:
            del self.e_score_correction_bias

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid()
        ids = (scores + getattr(self, "e_score_correction_bias", 0.0)).topk(2, dim=-1).indices
        return logits, scores.gather(1, ids), ids


class TestExpertChoice:
    LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0]])

    def choose(self, ids, logits=LOGITS, bias=None):
        bias = torch.zeros(4) if bias is None else bias
        return choose_experts(Router(bias), logits, torch.tensor([ids]))

    def test_order_of_experts_does_not_matter(self):
        assert self.choose([1, 0])[2].tolist() == [False]

    def test_other_expert_is_wrong_and_the_right_ones_are_used(self):
        weights, ids, wrong = self.choose([0, 2])
        assert (wrong.tolist(), ids.sort().values.tolist()) == ([True], [[0, 1]])
        assert weights.sum() == pytest.approx(float(self.LOGITS[0, :2].sigmoid().sum()))

    def test_bias_changes_the_chosen_experts(self):
        bias = torch.tensor([0.0, 0.0, 0.0, 1.0])
        assert self.choose([0, 3], bias=bias)[2].tolist() == [False]
        assert self.choose([0, 1], bias=bias)[2].tolist() == [True]

    def test_too_few_experts_are_wrong(self):
        assert self.choose([0])[2].tolist() == [True]

    def test_invalid_expert_is_wrong(self):
        assert self.choose([0, -1])[2].tolist() == [True]

    @pytest.mark.parametrize("bias", [torch.full((4,), 8.0), None], ids=["bias-of-8", "softmax"])
    def test_either_expert_of_a_tie_is_accepted(self, bias):
        """With a bias of 8, fp32 has steps of 1e-6, so that experts 1 and 2 have the same score."""
        logits = torch.tensor([[3.0, 1.0, 1.0 + 1e-7, 0.0]])
        route = Router(bias)
        for other in (1, 2):
            _, ids, wrong = choose_experts(route, logits, torch.tensor([[0, other]]))
            assert (wrong.tolist(), ids.sort().values.tolist()) == ([False], [[0, other]])
        assert choose_experts(route, logits, torch.tensor([[0, 3]]))[2].tolist() == [True]


class TestRoundings:
    def test_weights_are_rounded_like_those_of_the_engine(self):
        """The implementation is separate from the engine's; 200 × 300 has whole and partial blocks on both sides."""
        weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
        scaled = quantize_weight(weight)
        assert torch.equal(round_weight(weight), dequantize_weight(scaled))
        assert torch.equal(dequantize_blocks(scaled.data, scaled.scale), dequantize_weight(scaled))
        assert not torch.equal(dequantize_blocks(scaled.data, scaled.scale.flip(0)), dequantize_weight(scaled)), (
            "exchanged scales change the result"
        )

    @pytest.mark.parametrize("group", [128, 32, 7])
    def test_rows_are_rounded_like_those_of_the_engine(self, group):
        rows = torch.randn(5, 200, generator=torch.Generator().manual_seed(1))
        assert torch.equal(round_rows(rows, group), dequantize_rows(quantize_rows_reference(rows, group)))

    def test_quantisation_groups_restart_on_each_rank(self):
        """Two ranks have 72 of 144 columns each: the second begins inside a block, which then has gcd(72, 128) = 8
        columns.
        """
        rows = torch.randn(3, 144, generator=torch.Generator().manual_seed(1))
        roundings = Roundings(torch.bfloat16, fp8_weights=True, kv_scale=None)
        assert (compute_block_size(0, 72), compute_block_size(72, 144)) == (128, 8)
        expected = torch.cat((round_rows(rows[:, :72], 128), round_rows(rows[:, 72:], 8)), dim=-1)
        assert torch.equal(roundings.round_weight_input(rows, 2), expected)
        assert not torch.equal(roundings.round_weight_input(rows), expected)

    def test_kv_rows_are_rounded_with_their_scale(self):
        """Values beyond 448 times the scale are clipped."""
        roundings = Roundings(torch.bfloat16, fp8_weights=False, kv_scale=0.5)
        assert roundings.round_kv_row(torch.tensor([1.0, 0.57, 1000.0])).tolist() == [1.0, 0.5625, 224.0]
        assert dataclasses.replace(roundings, kv_scale=None).round_kv_row(torch.tensor([0.625])) == 0.625

    def test_roundings_take_their_split_from_the_point(self):
        point = msgspec.structs.replace(POINT, tp=8, dp=2, weights_dtype="fp8", kv_dtype="fp8", ep="1")
        found = Roundings.from_point(point, torch.bfloat16, 1.0)
        assert (found.attention_parts, found.mlp_parts, found.expert_parts) == (4, 8, 8)
        assert (found.fp8_weights, found.kv_scale) == (True, 1.0)
        plain = msgspec.structs.replace(point, ep="tp", weights_dtype="", kv_dtype="")
        whole = Roundings.from_point(plain, torch.bfloat16, 1.0)
        assert (whole.expert_parts, whole.fp8_weights, whole.kv_scale) == (1, False, None)

    def test_block_scaled_weights_are_scaled_once(self):
        """In a 1 × 1 block, the number 448 with a scale of 2 is 896."""
        weight = Scaled(torch.tensor([[448.0]]).to(torch.float8_e4m3fn), torch.tensor([[2.0]]))
        assert dequantize_blocks(weight.data, weight.scale).item() == 896
