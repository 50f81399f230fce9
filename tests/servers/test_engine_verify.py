"""Test `verify --engine` with a stand-in engine: faults are found, correct engines agree, and dead ones fail."""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.points.layout import Layout
from dcpbench.records.record import EngineSettings
from dcpbench.servers import server_comparison
from dcpbench.servers.answer_collector import decode_answers, make_distinct_prompts
from dcpbench.servers.answer_counts import (
    AGAIN,
    NEW,
    SHARED,
    Cell,
    GroupAnswers,
    LengthAnswers,
    count_between,
    count_own,
    measure_length_sizes,
)
from dcpbench.servers.answer_noise import (
    DRIFT_SIZE,
    GAP,
    Limits,
    Noise,
    Sizes,
    compute_limits,
    measure_noise,
)
from dcpbench.servers.answer_pairs import REPEAT, SCORES, SERVERS, Answer, ScoredPrompt
from dcpbench.servers.answer_verdict import (
    AGREE,
    BASE_DIFFERS,
    CONSISTENT,
    DIFFER,
    MANY_OUTLIERS,
    RARE,
    UNATTRIBUTED,
    UNDECIDED,
    UNMEASURED,
    Judgement,
    find_period,
    judge_counts,
)
from dcpbench.servers.answer_verdict_text import format_report
from dcpbench.servers.edge_lengths import Edges, count_prompts, list_batches, list_lengths, split_lengths
from dcpbench.servers.engine_flags import find_token_budget
from dcpbench.servers.engine_settings import Grid, list_all_settings
from dcpbench.servers.launch import Server, find_free_port
from dcpbench.servers.presets import PRESETS, Engine
from dcpbench.servers.prompt_logprobs import parse_sglang_reply, parse_vllm_reply
from dcpbench.servers.server_comparison import (
    ANSWER,
    FAILED,
    START,
    Failure,
    Report,
    SettingResult,
)
from tests.servers.measured_pairs import judge_rows, read_rows, scale_sizes
from tools.engine_faults import (
    CASES,
    CORRECT,
    CORRECT_FLIPS,
    CORRECT_FP8,
    format_table,
    run_case,
    run_verify,
    write_engine_file,
)

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

from dcpbench.servers.engine_settings import Setting

QUICK_FLIPS = ("cache flips", "long flips")  # cases that `make test` runs of those with vLLM's noise, which are slow
FAULTS = [
    pytest.param(name, marks=[pytest.mark.long] if name.endswith("flips") and name not in QUICK_FLIPS else [])
    for name in CASES
    if name not in (CORRECT, CORRECT_FP8, CORRECT_FLIPS)
]
TENTH = Limits()


class TestEdges:
    def test_each_edge_has_the_lengths_before_and_after_it(self) -> None:
        """With dcp 1 and 4, interleave 1 and pages of 16 and 64 tokens, a page over all ranks has 64 and 256 tokens."""
        found = list_lengths(Edges(dcp=(1, 4)), 16)
        for edge in (4, 16, 64, 256, 128, 8192):
            assert {edge - 1, edge, edge + 1} <= set(found)
        assert found[:5] == [1, 2, 3, 4, 5]
        assert found[-2:] == [32_768 - 16, 131_072 - 16]
        assert {512, 1024, 2048, 4096} <= set(found), "a length from which answers are wrong lies between two of them"

    def test_known_page_size_interleave_and_token_budget_are_edges(self) -> None:
        found = list_lengths(Edges(dcp=(1, 2), interleave=8, pages=(32,), chunk=2048), 16)
        assert {7, 8, 9, 15, 17, 31, 33, 63, 65, 2047, 2048, 2049} <= set(found)
        assert 8192 not in found

    def test_lengths_beyond_the_maximum_context_are_listed_separately(self) -> None:
        assert split_lengths([1, 100, 101], 100) == ([1, 100], [101])

    def test_batch_sizes_shrink_for_long_prompts(self) -> None:
        """A batch has at most 300,000 tokens (33 prompts of 8,192, two of 128k); the smallest size always runs."""
        assert list_batches(4096, (1, 2, 8, 33, 64)) == [1, 2, 8, 33, 64]
        assert list_batches(8192, (1, 2, 8, 33, 64)) == [1, 2, 8, 33]
        assert list_batches(131_056, (1, 2, 8, 33, 64)) == [1, 2]
        assert list_batches(400_000, (2, 8)) == [2]

    def test_prompts_fill_whole_batches(self) -> None:
        assert [count_prompts(size, 4) for size in (1, 2, 8, 33)] == [4, 4, 8, 33]

    @pytest.mark.parametrize(
        ("words", "settings", "budget"),
        [
            (["vllm", "--max-num-batched-tokens", "2048"], None, 2048),
            (["sglang", "--chunked-prefill-size", "4096"], EngineSettings(max_batched_tokens=8192), 4096),
            ([], EngineSettings(max_batched_tokens=16384), 16384),
            ([], EngineSettings(), None),
            (["--chunked-prefill-size", "-1"], None, None),
        ],
    )
    def test_the_token_budget_comes_from_the_command_or_the_log(self, words, settings, budget) -> None:
        assert find_token_budget(words, settings) == budget

    def test_prompts_differ_in_their_first_token(self) -> None:
        """A prefix cache must not contain the first page of a new prompt."""
        prompts = make_distinct_prompts(np.random.default_rng(0), 20, 64, 100)
        assert len({int(prompt[0]) for prompt in prompts}) == 64
        assert len(make_distinct_prompts(np.random.default_rng(0), 1, 12, 5)) == 12, (
            "with a vocabulary of 5, first tokens repeat"
        )


class TestSettings:
    @staticmethod
    def names(engines: list[Engine], grid: Grid, *variants: str) -> list[str]:
        return [setting.name for setting in list_all_settings(engines, grid, variants)]

    def test_settings_are_layouts_exchanges_and_variants(self) -> None:
        """Exchanges vary only for layouts that share the KV cache; variants run in the last layout."""
        grid = Grid(model="m", layouts=[Layout(tp=8), Layout(tp=8, dcp=8)], exchanges=("ag_rs", "a2a"))
        found = self.names([PRESETS["vllm"]], grid, "eager", "page=--block-size 32")
        assert found == [
            "vllm tp8",
            "vllm tp8·dcp8 ag_rs",
            "vllm tp8·dcp8 a2a",
            "vllm tp8·dcp8 a2a eager",
            "vllm tp8·dcp8 a2a page",
        ]
        last = list_all_settings([PRESETS["vllm"]], grid, ["page=--block-size 32"])[-1].make_command("m", 7)
        assert last[-2:] == ["--block-size", "32"]
        assert "--dcp-comm-backend a2a" in " ".join(last)

    def test_two_engines_have_the_same_layouts(self) -> None:
        found = self.names(
            [PRESETS["vllm"], PRESETS["sglang"]], Grid(model="m", layouts=[Layout(tp=2, dp=1, dcp=1)]), "eager"
        )
        assert found == ["vllm tp2", "vllm tp2 eager", "sglang tp2", "sglang tp2 eager"]

    def test_lists_in_an_engine_file_are_settings(self) -> None:
        """The first combination runs in all layouts, the others run in the last layout."""
        engine = Engine(
            name="x", command="x {port}", layout={"dcp": "-d {dcp}"}, flags={"graphs": [True, False], "n": [1, 2]}
        )
        grid = Grid(model="m", layouts=[Layout(tp=2), Layout(tp=2, dcp=2)])
        found = list_all_settings([engine], grid, [])
        assert [one.name for one in found] == [
            "x tp2",
            "x tp2·dcp2",
            "x tp2·dcp2 graphs=True, n=2",
            "x tp2·dcp2 graphs=False, n=1",
            "x tp2·dcp2 graphs=False, n=2",
        ]
        assert found[1].make_command("m", 7) == ["x", "7", "-d", "2", "--graphs", "--n", "1"]
        assert found[3].make_command("m", 7) == ["x", "7", "-d", "2", "--n", "1"]

    @pytest.mark.parametrize(
        ("engines", "variants", "message"),
        [
            (["vllm"], ["graphs"], "vllm has no such variant (it has eager)"),
            (["vllm"], ["a=--x", "a=--y"], "each variant needs its own name"),
            (["vllm"], ["=--x"], "each variant needs its own name"),
            (["vllm"], ["a='--x"], "close every quote"),
            (["vllm", "sglang"], ["a=--x"], "write them into [variants] of its file"),
            (["vllm", "vllm"], [], "vllm tp2 is listed twice"),
        ],
    )
    def test_invalid_variants_are_refused(self, engines, variants, message) -> None:
        with pytest.raises(UsageError) as error:
            list_all_settings(
                [PRESETS[name] for name in engines], Grid(model="m", layouts=[Layout(tp=2, dp=1, dcp=1)]), variants
            )
        assert message in str(error.value)

    def test_folder_without_a_checkpoint_gets_synthetic_weights(self, tmp_path: Path) -> None:
        """SGLang's plugin is enabled by an environment variable."""
        grid = Grid(model=str(tmp_path), layouts=[Layout(tp=2, dp=1, dcp=1)])
        vllm, sglang = list_all_settings([PRESETS["vllm"], PRESETS["sglang"]], grid, [])
        assert "--load-format dcpbench" in " ".join(vllm.make_command(grid.model, 7))
        assert sglang.environment["DCPBENCH_SYNTHETIC_WEIGHTS"] == "1"
        (tmp_path / "model.safetensors").touch()
        (with_checkpoint,) = list_all_settings([PRESETS["sglang"]], grid, [])
        assert not with_checkpoint.environment

    def test_unsupported_exchange_is_refused_before_a_server_starts(self) -> None:
        grid = Grid(model="m", layouts=[Layout(tp=2, dp=1, dcp=2)], exchanges=("symm",))
        with pytest.raises(UsageError, match="vllm has no --exchange symm"):
            list_all_settings([PRESETS["vllm"]], grid, [])


def answer(seed: int, *, wrong: bool = False, shift: float = 0.0, gap: float = 2.0) -> Answer:
    """Return eight tokens, of which the third one differs if `wrong`."""
    tokens = [f"{seed}-{i}" for i in range(8)]
    others = [f"{name}'" for name in tokens]
    if wrong:
        tokens[2], others[2] = others[2], tokens[2]
    tops = [{token: -0.1 + shift, other: -0.1 - gap} for token, other in zip(tokens, others, strict=True)]
    return Answer(tokens=tokens, names=tokens, logprobs=[-0.1 + shift] * 8, tops=tops)


def make_answers(
    length: int,
    *,
    wrong=lambda *_: False,
    drift=lambda *_: 0.0,
    scores: float = 0.0,
    gap: float = 2.0,
    first: int = 0,
) -> LengthAnswers:
    """Return answers at batch sizes 1 and 8.

    `wrong` and `drift` are called with the position of a request, its batch size and the cache state.
    """
    groups, number = [], first
    for batch, prompts in ((1, 12), (8, 16)):
        start, rounds = number, []
        for cache in (NEW, AGAIN, AGAIN):
            at = [(n, batch, cache) for n in range(number, number + prompts)]
            rounds.append([answer(i, wrong=wrong(*x), shift=drift(*x), gap=gap) for i, x in enumerate(at)])
            number += prompts
        places = [(n, 1, AGAIN) for n in range(number, number + 4)] if batch > 1 else []
        alone = [answer(i, wrong=wrong(*x), shift=drift(*x), gap=gap) for i, x in enumerate(places)]
        number += len(places)
        groups.append(GroupAnswers(batch=batch, shared=False, number=start, rounds=rounds, alone=alone))
    spread = [-1.0 - 0.5 * i + scores * (-1) ** i for i in range(length - 1)]
    return LengthAnswers(
        length=length, groups=groups, scored=[ScoredPrompt(first=spread, again=spread)] if length > 1 else []
    )


LENGTHS = (17, 64, 300, 4096)
SIZE = 12 * 3 + 16 * 3 + 4  # requests per length


def judge(lengths=LENGTHS, **faults) -> Judgement:
    """Judge a setting over all lengths against a first one without a fault."""
    own, between, base_counts = [], [], []
    for i, length in enumerate(lengths):
        base, other = make_answers(length, first=i * SIZE), make_answers(length, first=i * SIZE, **faults)
        base_counts += count_own(base, TENTH)
        own += count_own(other, TENTH)
        between += count_between(base, other, TENTH)
    return judge_counts(own, between, base_counts, limits=TENTH)


class TestJudgement:
    def test_equal_answers_agree(self) -> None:
        found = judge()
        assert (found.verdict, found.findings, found.undecided, found.coverage) == (AGREE, [], [], 1.0)
        assert found.logprobs

    def test_detectable_share_is_stated(self) -> None:
        """Each of four lengths has 28 new prompts, 28 repeated ones and 4 alone."""
        found = judge().detectable
        assert found.prompts == pytest.approx(1 - 0.05 ** (1 / 240))
        assert found.prompts_of_a_length == pytest.approx(1 - 0.05 ** (1 / 60))

    @pytest.mark.parametrize(
        ("wrong", "smallest", "batches", "caches"),
        [
            (lambda _number, _batch, _cache: True, (17, 1, NEW), [1, 8], [NEW, AGAIN]),
            (lambda _number, batch, _cache: batch > 2, (17, 8, NEW), [8], [NEW, AGAIN]),
            (lambda _number, _batch, cache: cache == AGAIN, (17, 1, AGAIN), [1, 8], [AGAIN]),
            (lambda _number, batch, cache: batch > 2 and cache == AGAIN, (17, 8, AGAIN), [8], [AGAIN]),
            (lambda number, _batch, _cache: number >= 2 * SIZE, (300, 1, NEW), [1, 8], [NEW, AGAIN]),
        ],
        ids=["always", "batch", "cache", "batch and cache", "length"],
    )
    def test_smallest_condition_with_a_difference_is_named(self, wrong, smallest, batches, caches) -> None:
        found = judge(wrong=wrong)
        assert found.verdict == DIFFER
        first = found.findings[0]
        assert first.effect == SERVERS
        assert (first.smallest.length, first.smallest.batch, first.smallest.cache) == smallest
        assert (first.batches, first.caches) == (batches, caches)
        assert (first.first, first.gap) == (3, pytest.approx(2.0))

    def test_fault_in_every_33rd_request_is_found_by_its_period(self) -> None:
        """21 of 704 requests are wrong, too few for any share to be significant; nine of them are sent alone."""
        found = judge(range(10, 18), wrong=lambda number, _batch, _cache: number % 33 == 5)
        assert found.verdict == DIFFER
        assert (found.findings[0].effect, found.findings[0].period, found.findings[0].lengths) == (SERVERS, 33, [])

    def test_period_needs_several_requests(self) -> None:
        assert find_period([5, 38, 71, 137]) == 33
        assert find_period([5, 38, 71]) is None
        assert find_period([5, 38, 72, 137]) is None

    def test_rare_differences_are_undecided(self) -> None:
        found = judge(wrong=lambda number, _batch, _cache: number in (7, 100))
        assert (found.verdict, found.undecided) == (UNDECIDED, [RARE])
        result = SettingResult(name="x tp2·dcp2", reference="x tp2", command="x", log="x", judgement=found)
        base = SettingResult(name="x tp2", command="x", log="x", lengths=[17], judgement=judge())
        text = format_report(Report(results=[base, result], not_run=[], seed=1, new_tokens=16))[1]
        assert text.startswith("x tp2·dcp2: UNDECIDED: some answers differ beyond rounding, too few")
        assert (
            "Smallest setting that shows one: it answers differently from x tp2 with a prompt of 17 tokens, batch size 1, prefix-cache miss."
            in text
        )

    def test_setting_with_unrepeatable_answers_never_agrees(self) -> None:
        """Every third request of a round is wrong, with another offset in each round."""
        found = judge(wrong=lambda number, _batch, _cache: number % 3 == 0)
        assert found.verdict == DIFFER
        assert REPEAT in [finding.effect for finding in found.findings]

    def test_agreement_with_a_reference_that_has_no_clean_verdict_is_undecided(self) -> None:
        own = count_own(make_answers(17), TENTH)
        between = count_between(make_answers(17), make_answers(17), TENTH)
        found = judge_counts(own, between, own, limits=TENTH, base_repeats=False)
        assert (found.verdict, found.undecided) == (UNDECIDED, [BASE_DIFFERS])

    def test_near_ties_agree(self) -> None:
        """The two tokens are 0.15 apart, within twice the tolerance."""
        base = [make_answers(length, gap=0.15) for length in LENGTHS]
        other = [
            make_answers(length, gap=0.15, wrong=lambda number, _batch, _cache: number % 5 == 0) for length in LENGTHS
        ]
        own = [count for one in base for count in count_own(one, TENTH)]
        between = [count for a, b in zip(base, other, strict=True) for count in count_between(a, b, TENTH)]
        found = judge_counts(own, between, own, limits=TENTH)
        assert found.verdict == AGREE
        assert sum(count.near_ties for count in between)

    @pytest.mark.parametrize(
        ("gap", "every", "measured", "verdict", "reasons"),
        [
            (0.7, 2, True, UNDECIDED, [MANY_OUTLIERS]),
            (0.7, 50, True, AGREE, []),
            (0.7, 50, False, UNDECIDED, [UNMEASURED]),
            (0.7, 1, True, DIFFER, []),
            (1.1, 50, True, UNDECIDED, [RARE]),
        ],
    )
    def test_differences_above_explained_rounding_are_found(self, gap, every, measured, verdict, reasons) -> None:
        """Rounding is up to 0.5, and typically 0.2; it explains twice as much, 1.0 and 0.4."""
        noise = Noise(prompts=50, values=[0.2, 0.45, 0.5, 0.5])
        limits = Limits(gap_noise=noise) if measured else Limits()
        base = make_answers(17, gap=gap)
        other = make_answers(17, gap=gap, wrong=lambda number, _batch, _cache: number % every == 0)
        own = count_own(base, limits)
        found = judge_counts(count_own(base, limits), count_between(base, other, limits), own, limits=limits)
        assert (found.verdict, found.undecided) == (verdict, reasons)

    def test_differences_without_log_probabilities_are_undecided(self) -> None:
        def strip(one: LengthAnswers) -> LengthAnswers:
            data = json.loads(json.dumps([[[a.tokens for a in r] for r in g.rounds] for g in one.groups]))
            groups = [
                msgspec.structs.replace(g, rounds=[[Answer(tokens=tokens) for tokens in r] for r in rounds], alone=[])
                for g, rounds in zip(one.groups, data, strict=True)
            ]
            return LengthAnswers(length=one.length, groups=groups, scored=[])

        base, other = strip(make_answers(17)), strip(make_answers(17, wrong=lambda *_: True))
        found = judge_counts(count_own(base, TENTH), count_between(base, other, TENTH), [], limits=TENTH)
        assert (found.verdict, found.logprobs) == (UNDECIDED, False)
        assert found.undecided == [UNATTRIBUTED]

    def test_prompt_log_probabilities_are_a_separate_effect(self) -> None:
        found = judge(scores=0.3)
        assert [finding.effect for finding in found.findings] == [SCORES]
        assert found.findings[0].drift == pytest.approx(0.3)
        assert found.findings[0].first is None

    def test_single_setting_is_consistent_or_differs_from_itself(self) -> None:
        own = [count for length in LENGTHS for count in count_own(make_answers(length), TENTH)]
        assert judge_counts(own, None, [], limits=TENTH).verdict == CONSISTENT
        bad = [
            c for n in LENGTHS for c in count_own(make_answers(n, wrong=lambda _n, _b, cache: cache == AGAIN), TENTH)
        ]
        assert judge_counts(bad, None, [], limits=TENTH).verdict == DIFFER

    def test_answers_are_encoded_without_loss(self) -> None:
        assert decode_answers(msgspec.msgpack.encode(make_answers(17))) == make_answers(17)


class TestRounding:
    """Test the limits of rounding, which follow from the answers of one server."""

    NARROW = (ScoredPrompt(first=[-11.7, -11.9], again=[-11.7, -11.9]),)
    WIDE = (ScoredPrompt(first=[-1.0, -9.0], again=[-1.0, -9.0]),)
    NONE = (Sizes(gaps={}, drifts={}),)

    def test_all_bounds_shrink_with_the_deviation_of_log_probabilities(self) -> None:
        """Without trained weights log-probabilities are close together, here 0.1 from their mean."""
        found = compute_limits(0.1, self.NONE, self.NARROW, self.NARROW)
        assert (found.tolerance, found.scale) == (pytest.approx(0.01), pytest.approx(0.1))
        assert found.get_limit(GAP) == pytest.approx(0.12)

    def test_tolerance_is_at_least_four_times_the_noise_of_either_server(self) -> None:
        """Answers of a server differ from their repetitions by 0.005 on average."""
        noisy = [ScoredPrompt(first=[-11.7, -11.9], again=[-11.705, -11.895])]
        assert compute_limits(0.1, self.NONE, self.NARROW, noisy).tolerance == pytest.approx(0.02)

    def test_noise_of_prompts_does_not_raise_the_tolerance(self) -> None:
        wide = [ScoredPrompt(first=[-1.0, -9.0], again=[-2.0, -8.0])]
        assert compute_limits(0.1, self.NONE, wide, wide).tolerance == 0.1

    def test_limits_are_twice_the_rounding_at_each_quantile(self) -> None:
        """101 prompts from 0.01 to 0.21 have a median of 0.11, a 90 % quantile of 0.19 and a 98 % quantile of 0.206."""
        drifts = {"cache": [0.01 + 0.002 * i for i in range(101)]}
        found = compute_limits(0.1, [Sizes(gaps={}, drifts=drifts)], self.WIDE, self.WIDE)
        assert found.list_limits(DRIFT_SIZE) == pytest.approx([0.22, 0.38, 0.412, 0.42])
        assert found.get_explained(DRIFT_SIZE) == pytest.approx(0.21)
        assert found.get_explained(GAP) == pytest.approx(0.84), "four times the drift, since no gaps are known"

    def test_explained_rounding_has_an_upper_limit(self) -> None:
        """A fault that occurs in all answers of a server must not be hidden."""
        found = compute_limits(0.1, [Sizes(gaps={"cache": [2.9] * 40}, drifts={})], self.WIDE, self.WIDE)
        assert found.list_limits(GAP) == pytest.approx([0.5, 0.8, 1.0, 1.2])
        assert found.is_too_wide

    def test_rounding_is_the_median_over_effects(self) -> None:
        """A fault of the prefix cache raises only one of three effects."""
        effects = {"repeat": [0.05] * 30, "cache": [0.9] * 30, "batch": [0.07] * 30}
        assert measure_noise(effects).values == pytest.approx([0.07] * 4)
        del effects["repeat"]
        assert measure_noise(effects).values == pytest.approx([0.07] * 4)

    def test_rounding_is_unknown_if_few_answers_differ(self) -> None:
        """30 differing prompts of 400 are too few, because conditions hardly change any sum; so are 19 of 19."""
        assert measure_noise({"cache": [0.01] * 30 + [0.0] * 370}) == Noise()
        assert measure_noise({"cache": [0.01] * 19}) == Noise()
        assert measure_noise({"cache": [0.01] * 19, "batch": [0.02] * 19}).prompts == 38

    def test_first_server_with_known_rounding_decides(self) -> None:
        quiet, loud = self.NONE[0], Sizes(gaps={}, drifts={"batch": [0.1] * 20})
        assert compute_limits(0.1, [quiet, loud], (), ()).drift_noise.values[0] == pytest.approx(0.1)
        louder = Sizes(gaps={}, drifts={"batch": [0.2] * 20})
        assert compute_limits(0.1, [loud, louder], (), ()).drift_noise.values[0] == pytest.approx(0.1)

    def test_rounding_has_one_size_per_prompt(self) -> None:
        """Batches move log-probabilities of 16 prompts by 0.05; 4 of the prompts are also sent alone."""
        sizes = measure_length_sizes(make_answers(17, drift=lambda _number, batch, _cache: 0.05 if batch > 1 else 0.0))
        assert sizes.drifts["batch"] == pytest.approx([0.05] * 4)
        assert sizes.drifts["repeat"] == [0.0] * 28


class TestVllm:
    """Test gaps and drifts of vLLM 0.26.0 with DeepSeek-V3's layers in fp8 at dcp 1 and 2, on two H200.

    The engine is assumed to be correct: dcp 1 against dcp 2 has the distribution of dcp 1 against itself, at each
    length, batch size and cache state. A fixed tolerance with limits of outliers per length gives DIFFER for it.
    """

    def test_vllm_agrees_across_layouts(self) -> None:
        base, other = judge_rows(*read_rows())
        assert (base.verdict, other.verdict) == (CONSISTENT, AGREE)
        assert base.limits.list_limits(GAP)[0] == pytest.approx(0.25)
        assert other.mean_compared == pytest.approx(4.14, abs=0.01)

    @pytest.mark.parametrize(("factor", "verdict"), [(1.5, UNDECIDED), (2.5, DIFFER)])
    def test_larger_differences_do_not_agree(self, factor: float, verdict: str) -> None:
        (base, other), spread = read_rows()
        assert judge_rows([base, scale_sizes(other, factor)], spread)[1].verdict == verdict

    def test_short_prompts_alone_are_undecided(self) -> None:
        """Batches and prefix-cache hits change nothing up to 17 tokens, so rounding between layouts is unknown."""
        settings, spread = read_rows()
        short = [[row for row in rows if row["length"] <= 17] for rows in settings]
        base, other = judge_rows(short, spread)
        assert (base.verdict, other.verdict, other.undecided) == (CONSISTENT, UNDECIDED, [UNMEASURED])

    @pytest.mark.parametrize(
        ("column", "first", "smallest"),
        [("length", 8193, (8193, 1, NEW)), ("batch", 33, (1, 33, NEW)), ("cache", AGAIN, (1, 1, AGAIN))],
    )
    def test_fault_under_one_condition_is_found(self, column, first, smallest) -> None:
        """Gaps are 0.35 larger under it: each could be rounding, but not their distribution."""
        (base, other), spread = read_rows()
        wrong = [
            row | {"gaps": [x + 0.35 for x in row["gaps"]]}
            if row["effect"] == SERVERS and (row[column] == first if column == "cache" else row[column] >= first)
            else row
            for row in other
        ]
        found = judge_rows([base, wrong], spread)[1]
        cell = found.findings[0].smallest
        assert (found.verdict, cell.length, cell.batch, cell.cache) == (DIFFER, *smallest)


class TestPromptLogprobs:
    PROMPT = np.array([5, 6, 7], np.int32)

    def test_prompt_log_probabilities_of_vllm(self) -> None:
        """A more likely token may come first in an entry."""
        data = b'{"choices":[{"prompt_logprobs":[null,{"9":{"logprob":-0.5},"6":{"logprob":-1.5,"rank":2}},{"7":{"logprob":-2}}]}]}'
        assert parse_vllm_reply(data, self.PROMPT) == [-1.5, -2.0]

    def test_prompt_log_probabilities_of_sglang(self) -> None:
        data = b'{"text":"x","meta_info":{"input_token_logprobs":[[null,5,null],[-1.5,6,null],[-2,7,null]]}}'
        assert parse_sglang_reply(data, self.PROMPT) == [-1.5, -2.0]

    @pytest.mark.parametrize(
        "data",
        [
            b'{"choices":[{"text":"x"}]}',
            b'{"choices":[]}',
            b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-1}}]}]}',
            b'{"choices":[{"prompt_logprobs":[null,{"6":{"logprob":-1}},{"8":{"logprob":-1}}]}]}',
            b'{"meta_info":{"input_token_logprobs":[[null,5],[-1,6],[-1,8]]}}',
            b'{"meta_info":{"input_token_logprobs":[[null,5],[-1,6],[null,7]]}}',
            b"{",
        ],
    )
    def test_incomplete_prompt_log_probabilities_give_none(self, data) -> None:
        assert parse_vllm_reply(data, self.PROMPT) == []
        assert parse_sglang_reply(data, self.PROMPT) == []


class TestReport:
    RESULT = SettingResult(name="x tp2", command="x", log="servers/0-x.log", lengths=[1, 2])

    def test_server_that_does_not_start_is_undecided(self) -> None:
        failures = {
            stage: SettingResult(
                name="x",
                command="x",
                log="servers/0-x.log",
                requests=49,
                failure=Failure(
                    stage=stage,
                    ended=True,
                    reason="it ended with exit code 1: RuntimeError: shape",
                    cell=Cell(length=17, batch=1, cache=SHARED) if stage == ANSWER else None,
                    lines=["capturing CUDA graphs", "RuntimeError: shape"],
                ),
            )
            for stage in (START, ANSWER)
        }
        assert failures[START].verdict == UNDECIDED
        assert failures[ANSWER].verdict == FAILED
        report = Report(results=[failures[ANSWER]], not_run=["y"], seed=1, new_tokens=16)
        assert report.verdict == FAILED
        text = format_report(report)
        before = msgspec.structs.replace(failures[ANSWER].failure, cell=None)
        early = msgspec.structs.replace(failures[ANSWER], failure=before)
        first = format_report(Report(results=[early], not_run=[], seed=1, new_tokens=16))[0]
        assert first.startswith("x: FAILED. It fails before the first prompt: it ended with exit code 1")
        assert "fails at request 49 with a prompt of 17 tokens, batch size 1, shared prefix" in text[0]
        assert text[2:4] == ["    capturing CUDA graphs", "    RuntimeError: shape"]
        assert "Read servers/0-x.log" in text[4]
        assert "Not started" in text[5]

    @pytest.mark.parametrize(
        ("verdicts", "whole"),
        [
            ([CONSISTENT], CONSISTENT),
            ([CONSISTENT, AGREE], AGREE),
            ([CONSISTENT, AGREE, UNDECIDED], UNDECIDED),
            ([CONSISTENT, UNDECIDED, DIFFER], DIFFER),
        ],
    )
    def test_overall_verdict_is_that_of_the_worst_setting(self, verdicts, whole) -> None:
        base = judge()
        results = []
        for i, verdict in enumerate(verdicts):
            judgement = Judgement(**{**{n: getattr(base, n) for n in base.__struct_fields__}, "verdict": verdict})
            results.append(SettingResult(name=str(i), command="x", log="x", judgement=judgement))
        assert Report(results=results, not_run=[], seed=1, new_tokens=16).verdict == whole


def verify_with_seed(folder: Path, flags: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run `verify --engine` with fixed prompts, so that near-ties are the same in each run."""
    return run_verify(folder, flags, "--seed", "1", *words)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_with_their_smallest_condition(fault: str, tmp_path: Path) -> None:
    """`python -m tools.engine_faults` counts results of many runs."""
    line = run_case(fault, tmp_path, "--seed", "1")
    assert line["right"], line


@pytest.mark.parametrize("run", range(5))
def test_correct_engines_with_noise_agree(run: int, tmp_path: Path) -> None:
    line = run_case(CORRECT, tmp_path, "--seed", str(run), options="--context 1,17 --concurrency 1,2,8")
    assert line["right"], line


def test_correct_engines_with_fp8_noise_mostly_agree_and_never_differ(tmp_path: Path) -> None:
    options = "--context 1,17 --concurrency 1,2,8"
    verdicts = []
    for run in range(5):
        (folder := tmp_path / str(run)).mkdir()
        verdicts.append(run_case(CORRECT_FP8, folder, "--seed", str(run), options=options)["verdict"])
    assert "DIFFER" not in verdicts
    assert verdicts.count("AGREE") >= 3


def test_correct_engines_with_vllm_noise_never_differ(tmp_path: Path) -> None:
    """One run in ten is UNDECIDED because the noise in batches is random."""
    line = run_case(CORRECT_FLIPS, tmp_path, "--seed", "1")
    assert line["right"], line


@pytest.mark.long
@pytest.mark.parametrize("noise", [CORRECT, CORRECT_FP8, CORRECT_FLIPS])
@pytest.mark.parametrize("run", range(50))
def test_50_runs_of_correct_engines_have_no_false_positive(run: int, noise: str, tmp_path: Path) -> None:
    line = run_case(noise, tmp_path, "--seed", str(1000 + run))
    assert line["right"], line


def test_fault_table_fails_with_one_wrong_run() -> None:
    lines = [{"case": "cache", "verdict": "DIFFER", "right": True}] * 3
    assert format_table(lines)[1]
    assert not format_table([*lines, {"case": "cache", "verdict": "UNDECIDED", "right": False}])[1]


def test_fault_of_all_settings_is_found_in_the_first(tmp_path: Path) -> None:
    """The other settings have the same fault as the first one, and they must not get AGREE."""
    code, found = verify_with_seed(
        tmp_path,
        "--fault cache --fault-everywhere",
        *["--context", "17,40", "--concurrency", "1,2", "--num-prompts", "8"],
    )
    assert code == 1
    assert [one["verdict"] for one in found["results"]] == [DIFFER, DIFFER]


@pytest.mark.parametrize(("flags", "code", "stage"), [("--dies-at-start", 3, START), ("--dies-after 12", 1, ANSWER)])
def test_dead_engine_is_a_finding_with_its_last_log_lines(flags, code, stage, tmp_path: Path) -> None:
    """SGLang's flashmla accepts --dcp-size 2 and dies at graph capture or at the first request."""
    ended, found = verify_with_seed(tmp_path, flags, "--context", "17", "--concurrency", "1")
    assert ended == code
    failure = found["results"][1]["failure"]
    assert (failure["stage"], failure["ended"]) == (stage, True)
    assert failure["lines"][-1] == "RuntimeError: tile_scheduler_metadata must have shape (num_sm_parts, 8)"
    text = "\n".join(found["text"])
    assert "RuntimeError: tile_scheduler_metadata must have shape (num_sm_parts, 8)" in text
    assert "--attention-backend NAME" in text
    assert (failure["cell"] is None) is not (stage == ANSWER)


def test_engine_without_synthetic_weights_is_not_compared(tmp_path: Path) -> None:
    """Without the plugin, servers would compute different functions."""
    path = write_engine_file(tmp_path, "")
    path.write_text(path.read_text() + '[weights]\nsynthetic = ""\n')
    out = io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(out):
        cli.main(
            [
                "verify",
                "--engine",
                str(path),
                "--model",
                "m",
                "--weights",
                "synthetic",
                "--json",
                "-o",
                str(tmp_path / "o"),
            ]
        )
    assert end.value.code == 3
    assert "did not load dcpbench's plugin" in json.loads(out.getvalue())["results"][0]["failure"]["reason"]


def test_interrupt_keeps_compared_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = server_comparison.EngineComparison.question_setting

    def interrupt_second(self: server_comparison.EngineComparison, number: int, setting: Setting) -> None:
        if number:
            raise KeyboardInterrupt
        question(self, number, setting)

    monkeypatch.setattr(server_comparison.EngineComparison, "question_setting", interrupt_second)
    code, found = verify_with_seed(tmp_path, "", "--context", "1,17", "--concurrency", "1", "--dcp", "1,2")
    assert code == 130
    assert [one["name"] for one in found["results"]] == ["engine tp2"]
    assert (found["not_run"], found["interrupted"]) == (["engine tp2·dcp2"], True)
    assert found["text"][-1] == "Not compared, as the command was interrupted: engine tp2·dcp2."
    assert json.loads((tmp_path / "out" / "answers.json").read_text())["results"] == found["results"]


def test_dead_first_setting_ends_the_comparison(tmp_path: Path) -> None:
    code, found = verify_with_seed(
        tmp_path, "--dies-after 12 --fault-everywhere", "--context", "17", "--concurrency", "1"
    )
    assert (code, found["verdict"], found["not_run"]) == (1, FAILED, ["engine tp2·dcp2"])


def test_prompts_beyond_the_maximum_context_are_left_out_with_a_message(tmp_path: Path) -> None:
    """The engine accepts 100 tokens, and its flag sets the chunk size to 70."""
    words = ("--concurrency", "1", "--num-prompts", "1", "--dcp", "1")
    _, found = verify_with_seed(tmp_path, "--max-model-len 100 --max-num-batched-tokens 70", *words)
    (result,) = found["results"]
    assert result["lengths"][-1] == 71
    assert result["left_out"] == [127, 128, 129, 32762, 131066]
    assert any("longer than the 100 that engine tp2 takes" in line for line in found["text"])
    _, found = verify_with_seed(tmp_path, "--max-num-batched-tokens 70 --max-model-len 0", *words)
    assert found["results"][0]["left_out"] == [32762, 131066]
    assert any("does not report its maximum context; name lengths" in line for line in found["text"])
    _, found = verify_with_seed(tmp_path, "--max-num-batched-tokens 70", *words, "--max-context", "60")
    assert found["results"][0]["lengths"][-1] == 17


def test_two_engines_are_compared_in_the_same_layouts(tmp_path: Path) -> None:
    """The second engine is wrong at dcp 2 and returns prompt log-probabilities in SGLang's format.

    Its first layout is compared with that of the first engine, its other layout with its own first one.
    """
    other = tmp_path / "other"
    other.mkdir()
    path = write_engine_file(other, "--api sglang --fault page")
    path.write_text(path.read_text().replace('"engine"', '"other"', 1))
    words = ("--engine", str(path), "--dcp", "1,2", "--context", "16,17", "--concurrency", "1,2")
    code, found = verify_with_seed(tmp_path, "", *words)
    assert (code, found["verdict"]) == (1, DIFFER)
    assert {one["name"]: one["verdict"] for one in found["results"]} == {
        "engine tp2": CONSISTENT,
        "engine tp2·dcp2": AGREE,
        "other tp2": AGREE,
        "other tp2·dcp2": DIFFER,
    }
    assert [one["reference"] for one in found["results"]] == ["", "engine tp2", "engine tp2", "other tp2"]
    assert "other tp2·dcp2: DIFFER. It answers differently from other tp2: " in "\n".join(found["text"])


def test_layouts_of_an_engine_agree_although_it_differs_from_another(tmp_path: Path) -> None:
    """Each layout of the second engine has the same fault for prompts of 16 tokens."""
    other = tmp_path / "other"
    other.mkdir()
    path = write_engine_file(other, "--fault page --fault-everywhere")
    path.write_text(path.read_text().replace('"engine"', '"other"', 1))
    words = ("--engine", str(path), "--dcp", "1,2", "--context", "16,17", "--concurrency", "1,2")
    _, found = verify_with_seed(tmp_path, "", *words)
    verdicts = {one["name"]: one["verdict"] for one in found["results"]}
    assert (verdicts["other tp2"], verdicts["other tp2·dcp2"]) == (DIFFER, AGREE)


@pytest.mark.parametrize("api", ["sglang", "openai"])
def test_engines_with_fewer_api_fields_are_compared(api: str, tmp_path: Path) -> None:
    code, found = verify_with_seed(tmp_path, f"--api {api}", "--context", "17,40", "--concurrency", "1,2")
    assert (code, found["verdict"]) == (0, AGREE)
    scores = [c for one in found["results"] for c in one["judgement"]["counts"] if c["effect"] == SCORES]
    assert bool(scores) is (api == "sglang")


def test_prompts_refused_by_the_second_engine_are_undecided(tmp_path: Path) -> None:
    code, found = verify_with_seed(
        tmp_path, "", "--context", "17", "--concurrency", "1", "--dcp", "1", "--variant", "small=--vocab 1000"
    )
    assert (code, found["verdict"]) == (3, UNDECIDED)
    assert "compare engines that take the same prompts" in found["results"][1]["failure"]["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "vllm"], "--engine needs --model"),
        (["--engine", "vllm", "--model", "m", "--url", "http://x"], "leave one of them out"),
        (
            ["--engine", "vllm", "--model", "m", "--page-size", "64"],
            "--page-size is an option of dcpbench's own engine",
        ),
        (["--engine", "vllm", "--model", "m", "--gpu", "H200"], "leave it out with --engine"),
        (["--engine", "vllm", "--model", "m", "--timeout", "0"], "--timeout"),
        (["--engine", "vllm", "--model", "m", "--repeats", "1"], "use --repeats 2 or more"),
        (["--engine", "vllm", "--model", "m", "--max-context", "16"], "use 17 or more"),
        (["--engine", "vllm", "--model", "m", "--tp", "4", "--dcp", "3"], "--dcp 3"),
        (["--engine", "vllm", "--model", "m", "--kv-dtype", "bf16"], "--kv-dtype bf16"),
        (["--engine", "vllm", "--model", "m", "--variant", "x"], "--variant x: vllm has no such variant"),
        (["--engine", "none.toml", "--model", "m"], "none.toml"),
        (
            ["--engine", "vllm", "--engine", "sglang", "--model", "m", "--engine-args", "x"],
            "--engine-args belongs to one",
        ),
        (["--engine", "vllm", "--model", "m", "--weights", "x"], "--weights x is none of model, synthetic, dummy"),
        (["--variant", "eager"], "add for example --engine vllm"),
        (["--url", "http://x", "--weights", "dummy"], "--weights needs an engine"),
        (["--url", "http://x", "--max-context", "50"], "--max-context needs an engine"),
        (["--url", "http://x", "--timeout", "start=5"], "--timeout start needs an engine"),
        (["--url", "http://x", "--dry-run"], "--dry-run plans points"),
        (["--url", "http://x", "--gpu", "H200"], "--gpu plans points"),
        (["--url", "http://x", "--device", "tpu"], "--device tpu is unknown"),
        (["--tp", "1", "--num-prompts", "4"], "--num-prompts is for servers"),
        (["--tp", "1", "--header", "a: b"], "--header is for servers"),
        (["--tp", "1", "--timeout", "start=5"], "--timeout start needs an engine"),
        (["--engine", "vllm", "--model", "m", "--max-context", "50", "--context", "9"], "contradict each other"),
        (["--engine", "vllm", "--model", "m", "--device", "tpu"], "--device tpu is unknown"),
        (["--engine", "vllm", "--model", "m", "--ep", "1,tp"], "--ep: with --engine it has one value"),
        (
            ["--engine", "vllm", "--model", "m", "--tp", "2", "--dcp", "2", "--exchange", "fi_a2a"],
            "vllm has no --exchange fi_a2a",
        ),
    ],
)
def test_invalid_options_are_one_error_line(words, message, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", *words])
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_dry_run_prints_each_server_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default degrees are dcp 1 and dcp equal to tp."""
    path = write_engine_file(tmp_path, "")
    words = ["--engine", str(path), "--model", "m", "--tp", "4", "--exchange", "a2a", "--variant", "same"]
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", *words, "--dry-run"])
    assert not end.value.code
    err = capsys.readouterr().err
    names = [line.partition(":")[0] for line in err.splitlines()]
    assert names == ["engine tp4", "engine tp4·dcp4 a2a", "engine tp4·dcp4 a2a same"]
    assert "--dcp 4 --exchange a2a --exchange ag_rs" in err


def test_missing_program_is_named_in_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\ncommand = "no-such-engine --port {port}"\n')
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", "--engine", str(path), "--model", "m"])
    assert end.value.code == 5
    assert "there is no program no-such-engine here" in capsys.readouterr().err


def test_probability_of_a_period_by_chance() -> None:
    """Four positions that are equal modulo 33 are not significant, six are."""
    assert math.isclose(33.0 ** (2 - 6), 8.4e-7, rel_tol=0.01)


@pytest.mark.parametrize("noise", ["fp8", "flips"])
@pytest.mark.parametrize(("fault", "code"), [("none", (0, 3)), ("cache", (1,))])
def test_running_servers_with_noise_are_compared_by_their_own_rounding(
    fault: str, code: tuple[int, ...], noise: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fixed tolerance of 0.1 would give DIFFER for correct servers; the verdict states the measured rounding."""
    with contextlib.ExitStack() as stack:
        urls = []
        for dcp in (1, 2):
            port = find_free_port()
            words = ["-m", "tests.servers.dcp_engine", "--port", str(port), "--dcp", str(dcp), "--noise", noise]
            command = [sys.executable, *words, "--fault", fault]
            server = stack.enter_context(Server(command, tmp_path / f"{dcp}.log", {"PYTHONPATH": "."}, port, "/health"))
            server.wait_until_ready(30)
            urls += ["--url", f"http://127.0.0.1:{port}"]
        with pytest.raises(SystemExit) as ended:
            cli.main(["verify", *urls, "--context", "64,300", "--new-tokens", "8", "--seed", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert ended.value.code in code, found["text"]
    assert any("log-probabilities move by 0.0" in line for line in found["text"])
