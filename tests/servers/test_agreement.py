"""Test `verify --url`: real differences of servers are found, near-ties are not reported, and AGREE needs evidence."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.servers.answer_collector import Collector, Questions, make_distinct_prompts
from dcpbench.servers.answer_counts import AGAIN, Cell, Count, GroupAnswers, LengthAnswers, count_between, count_own
from dcpbench.servers.answer_noise import Limits, Noise
from dcpbench.servers.answer_pairs import (
    BATCH,
    CACHE,
    DRIFT,
    NEAR_TIE,
    OUTLIER,
    REPEAT,
    SAME,
    SERVERS,
    TOKEN,
    UNKNOWN,
    Answer,
)
from dcpbench.servers.answer_verdict import (
    AGREE,
    CONSISTENT,
    DIFFER,
    FEW_TOKENS,
    RARE,
    UNATTRIBUTED,
    UNDECIDED,
    UNMEASURED,
    check_decides,
    check_rounds,
    find_next_length,
    judge_counts,
)
from dcpbench.servers.answer_verdict_text import format_report, make_table
from dcpbench.servers.ask import parse_answer
from dcpbench.servers.client import Target
from dcpbench.servers.edge_lengths import DOUBLED, fit_lengths
from dcpbench.servers.events import read_completion
from dcpbench.servers.exact_tests import (
    LEVEL,
    compute_smallest_found_share,
    compute_tail,
    compute_upper_bound,
    reject_by_holm,
)
from dcpbench.servers.server_comparison import Report, SettingResult, compare_running
from tests.servers.fake_server import Model, Running, Script
from tools.client_accuracy import run_test_server
from tools.server_agreement import CORRECT_PAIRS, PAIRS, format_verdicts, run_verify, start_faulty_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dcpbench.servers.answer_verdict import Finding, Judgement

N = 32

compare_pair = Limits().compare_pair


def answer(tokens: str, *, ahead: float = 2.0, second: str = "?", off: float = 0.0, logprobs: bool = True) -> Answer:
    """Return an answer of one-letter tokens, each `ahead` of `second` in log-probability."""
    if not logprobs:
        return Answer(tokens=list(tokens))
    logprob = -1.0 + off
    tops = [{token: logprob, second: logprob - ahead} for token in tokens]
    return Answer(tokens=list(tokens), names=list(tokens), logprobs=[logprob] * len(tokens), tops=tops)


def collect(context: int, prompts: list[dict[str, Any]], batch: int = 12) -> LengthAnswers:
    """Return a server's answers to prompts: alone (`first` while new, `again` in the last round) and in a `batch`."""
    alone: list[list[Answer]] = [[], [], []]
    together = []
    for prompt in prompts:
        options = dict(prompt)
        right = options.get("alone", "a" * N)
        texts = [options.pop(name, right) for name in ("first", "alone", "again", "batch")]
        *rounds, in_batch = (answer(text, **options) for text in texts)
        for of, one in zip(alone, rounds, strict=True):
            of.append(one)
        together.append(in_batch)
    groups = [
        GroupAnswers(batch=1, shared=False, number=0, rounds=alone, alone=[]),
        GroupAnswers(
            batch=batch, shared=False, number=3 * len(prompts), rounds=[together] * 3, alone=alone[1][: len(prompts)]
        ),
    ]
    return LengthAnswers(length=context, groups=groups, scored=[])


def judge(servers: list[list[LengthAnswers]], hits: tuple[int | None, ...] = (0, None)) -> Report:
    """Return the judged comparison of one or two servers, given as [server][length]."""
    results: list[SettingResult] = []
    limits = Limits()
    base = [c for of in servers[0] for c in count_own(of, limits)]
    for name, lengths, hit_tokens in zip("AB", servers, hits, strict=False):
        own = [c for of in lengths for c in count_own(of, limits)]
        both = zip(servers[0], lengths, strict=True)
        judgement = judge_counts(
            own,
            [c for a, b in both for c in count_between(a, b, limits)] if results else None,
            base if results else [],
            limits=limits,
            base_repeats=not results or results[0].verdict == CONSISTENT,
            level=LEVEL / len(servers),
        )
        contexts = [of.length for of in lengths]
        reference = results[0].name if results else ""
        results.append(
            SettingResult(name=name, reference=reference, hit_tokens=hit_tokens, lengths=contexts, judgement=judgement)
        )
    return Report(results=results, seed=1, new_tokens=N)


def judge_servers(*servers: dict[str, Any], contexts: tuple[int, ...] = (512,), prompts: int = 12) -> Report:
    """Return the judged comparison of servers that answer all prompts of all lengths in the given way."""
    return judge([[collect(n, [how] * prompts) for n in contexts] for how in servers])


def get_judgements(report: Report) -> list[Judgement]:
    """Return the judgement of each server."""
    return [result.judgement for result in report.results if result.judgement is not None]


def list_findings(report: Report) -> list[tuple[str, Finding]]:
    """Return the findings on all servers, each with the name of the server."""
    return [
        (name, finding) for name, one in zip("AB", get_judgements(report), strict=False) for finding in one.findings
    ]


WRONG = "a" * 4 + "b" * (N - 4)


class TestPairs:
    """Compare two answers to one prompt."""

    def test_equal_answers_are_the_same(self) -> None:
        found = compare_pair(answer("abc"), answer("abc"))
        assert (found.kind, found.first, found.drift, found.compared, found.tokens) == (SAME, None, 0.0, 3, 3)

    @pytest.mark.parametrize(
        ("ahead", "kind"), [(0.05, NEAR_TIE), (0.2, NEAR_TIE), (0.21, OUTLIER), (1.19, OUTLIER), (1.21, TOKEN)]
    )
    def test_both_log_probabilities_decide_on_a_near_tie(self, ahead: float, kind: str) -> None:
        """Rounding moves a log-probability by 0.1, so tokens within 0.2 may swap; more than 1.2 cannot be rounding."""
        near, sure = answer("axx", second="b", ahead=0.05), answer("bxx", second="a", ahead=ahead)
        for x, y in ((near, sure), (sure, near)):
            found = compare_pair(x, y)
            assert (found.kind, found.first, found.compared, found.tokens) == (kind, 0, 1, 3)
            assert found.gap == pytest.approx(max(ahead, 0.05))

    def test_token_outside_the_top_list_is_less_likely_than_its_last_entry(self) -> None:
        """If the last entry is 2 behind, `z` is no near-tie; if the last entry is 0.1 behind, the gap is unknown."""
        assert compare_pair(answer("a", ahead=2.0), answer("z", ahead=2.0)).kind == TOKEN
        assert compare_pair(answer("a", ahead=0.1), answer("z", ahead=0.1)).kind == UNKNOWN
        alone = Answer(tokens=["a"], names=["a"], logprobs=[-1.0], tops=[{"a": -1.0}])
        assert compare_pair(alone, answer("z", ahead=0.1)).kind == UNKNOWN

    @pytest.mark.parametrize(
        ("common", "measured", "kind"), [(0, False, TOKEN), (0, True, TOKEN), (3, False, UNKNOWN), (3, True, OUTLIER)]
    )
    def test_disjoint_top_lists_are_a_difference(self, common: int, measured: bool, kind: str) -> None:
        """20 likely tokens of 129,280 lie within 0.8, so the gap alone would not prove a difference."""

        def list_answer(prefix: str) -> Answer:
            top = {f"{prefix if i < 20 - common else 'both'}{i}": -3.0 - 0.04 * i for i in range(20)}
            return Answer(tokens=[f"{prefix}0"], names=[f"{prefix}0"], logprobs=[-3.0], tops=[top])

        noise = Noise(prompts=30, values=[0.2, 0.4, 0.6, 0.8]) if measured else Noise()
        assert Limits(gap_noise=noise).compare_pair(list_answer("a"), list_answer("b")).kind == kind

    def test_without_log_probabilities_a_difference_cannot_be_attributed(self) -> None:
        """Log-probabilities of one side are sufficient."""
        silent = answer("b", logprobs=False)
        assert compare_pair(answer("a", logprobs=False), silent).kind == UNKNOWN
        assert compare_pair(answer("a", logprobs=False), answer("a", logprobs=False)).kind == SAME
        one = Answer(tokens=["a"], names=["a"], logprobs=[-1.0], tops=[{"a": -1.0, "b": -4.0}])
        named = Answer(tokens=["b"], names=["b"], logprobs=[-1.0])
        assert compare_pair(one, named).kind == TOKEN

    def test_answers_with_and_without_token_ids_are_compared_by_text(self) -> None:
        """Not every engine returns ids."""
        ids = Answer(
            tokens=["7", "8"], names=["a", "b"], logprobs=[-1.0] * 2, tops=[{"a": -1.0}, {"b": -1.0, "c": -4.0}]
        )
        assert compare_pair(ids, answer("ab")).kind == SAME
        assert (compare_pair(ids, answer("ac")).kind, compare_pair(ids, answer("ac")).first) == (TOKEN, 1)

    def test_shorter_answer_differs_at_its_end(self) -> None:
        """The missing token has no log-probability, so the gap is unknown."""
        found = compare_pair(answer("ab"), answer("abc"))
        assert (found.kind, found.first, found.compared, found.tokens) == (UNKNOWN, 2, 3, 3)

    @pytest.mark.parametrize(
        ("off", "tokens", "kind"), [(0.09, 8, SAME), (0.11, 8, OUTLIER), (0.11, 3, SAME), (0.76, 4, DRIFT)]
    )
    def test_equal_tokens_with_different_log_probabilities_drift(self, off: float, tokens: int, kind: str) -> None:
        """The mean over at least four tokens exceeds the tolerance, or what rounding can explain."""
        found = compare_pair(answer("a" * tokens), answer("a" * tokens, off=off))
        assert found.kind == kind
        assert found.drift == pytest.approx(off)

    def test_drift_before_a_near_tie_is_reported(self) -> None:
        tied = {"second": "b", "ahead": 0.05}
        other = answer("aaaaa", second="a", ahead=0.05, off=0.8)
        other = Answer(
            tokens=[*other.tokens[:4], "b"],
            names=[*other.names[:4], "b"],
            logprobs=other.logprobs,
            tops=[*other.tops[:4], {"b": -0.5, "a": -0.55}],
        )
        assert compare_pair(answer("aaaaa", **tied), other).kind == DRIFT  # type: ignore[arg-type]


class TestVerdicts:
    """Judge servers over all pairs of answers."""

    def test_equal_servers_agree_with_the_detectable_difference(self) -> None:
        """12 prompts of two lengths are sent new, again, in a batch and alone; a share p is missed with (1 − p)^120."""
        report = judge_servers({}, {}, contexts=(64, 512))
        judgement = get_judgements(report)[1]
        assert (report.verdict, judgement.coverage, judgement.findings, judgement.undecided) == (AGREE, 1.0, [], [])
        assert judgement.detectable.prompts == pytest.approx(1 - 0.05 ** (1 / 120))
        assert judgement.detectable.prompts_of_a_length == pytest.approx(1 - 0.05 ** (1 / 60))
        tokens = 2 * 12 * N * 7  # 1 new pair, 2 repeated ones, 3 in a batch and 1 alone
        assert judgement.detectable.tokens == pytest.approx(3 / tokens, rel=0.01)
        a, b = format_report(report)
        assert a.startswith(
            "A: CONSISTENT. Its answers repeat, apart from rounding, at 2 lengths of prompts from 64 to 512"
        )
        assert b.startswith(
            "B: AGREE. Its answers equal those of A, apart from rounding, at 2 lengths of prompts from 64 to 512 tokens and batch sizes 1 and 12; "
            "0 near-ties. A fault in 2.47% of prompts (5% of those of one length), or in 0.056% of tokens, would have been seen with 95% "
            "confidence, if it chooses tokens more than 0.2 apart in log-probability, or replaces all likely tokens."
        )

    def test_single_server_is_consistent_but_never_agrees(self) -> None:
        report = judge_servers({})
        assert report.verdict == CONSISTENT
        assert format_report(report)[0].startswith("A: CONSISTENT. Its answers repeat")

    @pytest.mark.parametrize(
        ("how", "effect", "words"),
        [
            ({"first": WRONG}, CACHE, "when a prompt is sent again (prefix cache)"),
            ({"batch": WRONG}, BATCH, "between answers in a batch and alone"),
        ],
    )
    @pytest.mark.parametrize("side", ["A", "B", "both", "one"])
    def test_server_that_differs_from_itself_gets_differ(
        self, how: dict[str, Any], effect: str, words: str, side: str
    ) -> None:
        """Either server, both servers, or a single server may give unrepeatable answers."""
        sides = {"A": [how, {}], "B": [{}, how], "both": [how, how], "one": [how]}[side]
        report = judge_servers(*sides)
        assert report.verdict == DIFFER
        found = {name: finding for name, finding in list_findings(report) if finding.effect == effect}
        assert set(found) == {"both": {"A", "B"}, "one": {"A"}}.get(side, {side})
        text = format_report(report)["AB".index(min(found))]
        assert f"differs from itself {words}" in text
        for finding in found.values():
            assert (finding.differing, finding.lengths, finding.first) == (12, [512], 5)

    def test_servers_with_different_answers_get_differ(self) -> None:
        """B differs from 512 prompt tokens on; the next length is between the last right and the first wrong one."""
        right, wrong = [collect(n, [{}] * 12) for n in (64, 512)], collect(512, [{"alone": WRONG, "batch": WRONG}] * 12)
        report = judge([right, [right[0], wrong]])
        ((server, finding),) = list_findings(report)
        assert (report.verdict, server, finding.effect, finding.lengths) == (DIFFER, "B", SERVERS, [512])
        assert (finding.differing, finding.prompts, finding.first) == (60, 120, 5)
        assert format_report(report)[1].startswith(
            "B: DIFFER. It answers differently from A: 60 of 120 prompts. Smallest setting that shows it: a prompt of 512 tokens, batch "
            "size 1, prefix-cache miss; token 5 of the answer (after 516 tokens of context) is another one, 2 apart in log-probability; "
            "rounding explains up to 1.2. It shows at prompts of 512 tokens (not 64)"
        )
        assert find_next_length(get_judgements(report), 32) == 288
        assert find_next_length(get_judgements(report), 448) is None
        assert find_next_length(get_judgements(judge_servers({}, {}, contexts=(64, 512))), 32) is None

    def test_drift_between_servers_with_equal_tokens_is_a_difference(self) -> None:
        report = judge_servers({}, {"off": 0.7})
        assert [(name, f.effect, f.first) for name, f in list_findings(report)] == [("B", SERVERS, None)]

    def test_small_drift_is_undecided_if_rounding_is_unknown(self) -> None:
        """Both servers repeat themselves exactly, which does not measure the rounding between them."""
        report = judge_servers({}, {"off": 0.2})
        assert (report.verdict, get_judgements(report)[1].undecided) == (UNDECIDED, [UNMEASURED])
        assert "Rounding could not be measured" in format_report(report)[1]

    def test_near_ties_are_no_difference(self) -> None:
        """Every answer of B differs from A's in its last token, which is 0.05 ahead in A."""
        a = {"alone": "a" * N, "second": "b", "ahead": 0.05}
        b = {"alone": "a" * (N - 1) + "b", "second": "a", "ahead": 0.05}
        report = judge_servers(a, b)
        assert report.verdict == AGREE
        assert "; 84 near-ties." in format_report(report)[1], "12 prompts with 7 pairs each"

    def test_near_ties_in_the_first_token_are_undecided(self) -> None:
        """Tokens after the first difference are not compared."""
        a = {"alone": "a" * N, "second": "b", "ahead": 0.05}
        b = {"alone": "b" * N, "second": "a", "ahead": 0.05}
        report = judge_servers(a, b)
        judgement = get_judgements(report)[1]
        assert (report.verdict, judgement.undecided, judgement.coverage) == (UNDECIDED, [FEW_TOKENS], 1 / N)

    def test_differences_that_cannot_be_attributed_are_undecided(self) -> None:
        """A near-tie cannot be distinguished from a fault without log-probabilities."""
        report = judge_servers({"logprobs": False}, {"alone": WRONG, "logprobs": False})
        assert (report.verdict, get_judgements(report)[1].undecided) == (UNDECIDED, [UNATTRIBUTED])
        text = format_report(report)[1]
        assert "no log-probabilities say whether those are near-ties" in text
        assert "compared by their tokens alone" in text
        assert judge_servers({"logprobs": False}, {"logprobs": False}).verdict == AGREE

    def test_rare_difference_is_undecided(self) -> None:
        """One differing prompt of twelve is neither agreement nor significant."""
        report = judge([[collect(512, [{}] * 12)], [collect(512, [*[{}] * 11, {"alone": WRONG}])]])
        assert (report.verdict, get_judgements(report)[1].undecided) == (UNDECIDED, [RARE])
        assert "ask more with --num-prompts" in format_report(report)[1]

    def test_one_real_difference_among_pairs_of_a_prompt_prevents_agreement(self) -> None:
        """One of seven pairs differs."""
        report = judge([[collect(512, [{}] * 12)], [collect(512, [*[{}] * 11, {"first": WRONG}])]])
        assert report.verdict == UNDECIDED

    def test_servers_with_unrepeatable_answers_get_differ(self) -> None:
        """Half of the prompts get another answer on repetition from both servers, from B, or from a single server."""
        noisy = [collect(n, [{"again": WRONG}] * 6 + [{}] * 6) for n in (64, 128, 256)]
        right = [collect(n, [{}] * 12) for n in (64, 128, 256)]
        for servers, expected in (([noisy, noisy], {"A", "B"}), ([right, noisy], {"B"}), ([noisy], {"A"})):
            report = judge(servers)
            assert report.verdict == DIFFER
            assert {name for name, finding in list_findings(report) if finding.effect == REPEAT} == expected

    def test_repeats_estimate_the_share_of_random_differences(self) -> None:
        """A share of differing prompts that also occurs among repeats is no finding."""
        noisy = collect(512, [{"again": WRONG}] * 3 + [{}] * 9)
        batch = collect(1024, [{"batch": WRONG}] * 3 + [{}] * 9)
        assert not [f for _, f in list_findings(judge([[noisy, batch]] * 2)) if f.effect == BATCH]

    def test_empty_answers_are_undecided(self) -> None:
        assert judge_servers({"alone": ""}, {"alone": ""}).verdict == UNDECIDED

    def test_table_has_a_row_for_each_server(self) -> None:
        """Each column of an effect has the number of differing prompts."""
        table = make_table(judge_servers({}, {"batch": WRONG}))
        assert [column.header for column in table.columns] == [
            "setting",
            "repeated",
            "cache hit",
            "in a batch",
            "from the reference",
            "prompt tokens",
            "verdict",
        ]
        cells = [list(column.cells) for column in table.columns]
        assert (cells[3], cells[4], cells[6]) == (["0/12", "12/12"], ["", "24/60"], [CONSISTENT, DIFFER])

    def test_report_states_prefix_cache_hits(self) -> None:
        """The number of hits may be positive, zero or unknown."""
        lengths = [collect(512, [{}] * 12)]
        a, b = format_report(judge([lengths, lengths], (512, None)))
        assert a.endswith("It reports prefix-cache hits of 512 tokens.")
        assert b.endswith(
            "It does not report prefix-cache hits, so whether repeated prompts used its cache is unknown."
        )
        assert format_report(judge([lengths], (0,)))[0].endswith("its cache was not tested.")
        assert "name longer ones" in format_report(judge([[collect(64, [{}] * 12)]], (None,)))[0]


class TestStatistics:
    """Compare statistics with values that are worked out by hand."""

    def test_tails_and_bounds(self) -> None:
        """The cases are heads of a fair coin, and the rule of three."""
        assert compute_tail(3, 3, 0.5) == pytest.approx(0.125)
        assert compute_tail(2, 3, 0.5) == pytest.approx(0.5)
        assert compute_tail(0, 3, 0.5) == 1.0
        assert (compute_tail(4, 3, 0.5), compute_tail(3, 3, 1.0), compute_tail(1, 3, 0.0)) == (0.0, 1.0, 0.0)

    def test_binomial_tails_of_many_prompts(self) -> None:
        """Binomial coefficients of more than 1,029 prompts overflow a float; scipy.stats.binom.sf has these values."""
        assert compute_tail(300, 9000, 0.02) == pytest.approx(9.083776164433871e-17)
        assert compute_tail(40, 5000, 0.01) == pytest.approx(0.9363766892389094)
        assert compute_upper_bound(0, 9000) == pytest.approx(1 - 0.05 ** (1 / 9000))
        assert compute_upper_bound(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60))
        assert compute_upper_bound(0, 0) == compute_upper_bound(5, 5) == 1.0
        assert 1 - compute_tail(3, 40, compute_upper_bound(2, 40)) == pytest.approx(0.05)

    def test_holm_compares_sorted_p_values_with_shares_of_the_level(self) -> None:
        """The smallest of three p-values is compared with a third of the level, the next one with half of it."""
        key = (REPEAT, "A")
        tests = {(key, 0): LEVEL / 3, (key, 1): LEVEL / 2, (key, 2): LEVEL * 1.1}
        assert reject_by_holm(tests) == {(key, 0), (key, 1)}
        assert reject_by_holm({(key, 0): LEVEL / 2.9, (key, 1): LEVEL / 2, (key, 2): LEVEL}) == set()

    def test_smallest_found_share(self) -> None:
        """At least 17 of 100 prompts must differ, because 16 are too probable at a share of 0.07."""
        assert compute_tail(17, 100, 0.07) <= 0.001 < compute_tail(16, 100, 0.07)
        share = compute_smallest_found_share(100, 0.07, 0.001)
        assert compute_tail(17, 100, share) == pytest.approx(0.95)
        assert compute_smallest_found_share(2, 0.5, 0.001) == 1.0

    def test_detectable_share_follows_from_the_number_of_comparisons(self) -> None:
        """A single server has 10 prompts in its prefix cache; without comparisons no share is detectable."""
        made = [
            Count(
                effect=effect,
                cell=Cell(length=9, batch=1, cache=AGAIN),
                prompts=n,
                pairs=n,
                compared=100 * n,
                tokens=100 * n,
            )
            for effect, n in ((REPEAT, 5), (CACHE, 10))
        ]
        found = judge_counts(made, None, [], limits=Limits()).detectable
        assert found.prompts == pytest.approx(1 - 0.05 ** (1 / 10))
        assert found.tokens == pytest.approx(1 - 0.05 ** (1 / 1000))
        assert judge_counts([], None, [], limits=Limits()).detectable.tokens == 1.0

    @pytest.mark.parametrize(
        ("prompts", "lengths", "servers", "message"),
        [
            (8, DOUBLED[:1], 2, ""),
            (8, DOUBLED, 2, ""),
            (5, DOUBLED, 2, ""),
            (
                3,
                DOUBLED,
                2,
                "with --num-prompts 3 no difference could be distinguished from chance; use --num-prompts 4 or more.",
            ),
            (4, DOUBLED[:1], 1, "use --num-prompts 8 or more"),
        ],
    )
    def test_comparison_without_statistical_power_is_refused(
        self, prompts: int, lengths: tuple[int, ...], servers: int, message: str
    ) -> None:
        """The comparison could not find a difference even if every prompt differed."""
        if not message:
            check_decides(prompts, lengths, (1, 8), servers)
            return
        with pytest.raises(UsageError) as error:
            check_decides(prompts, lengths, (1, 8), servers)
        assert message in str(error.value)

    def test_single_round_is_refused(self) -> None:
        check_rounds(2)
        with pytest.raises(UsageError, match="--repeats 1 does not repeat anything; use --repeats 2 or more"):
            check_rounds(1)

    def test_accepted_comparison_finds_a_difference_of_all_prompts(self) -> None:
        """Every prompt of one length differs in one of several tested effects."""
        for servers, lengths, prompts in ((1, 1, 12), (2, 1, 10), (2, 10, 5)):
            check_decides(prompts, range(1, lengths + 1), (1, prompts), servers)
            right = [collect(n, [{}] * prompts, prompts) for n in range(1, lengths + 1)]
            wrong = [*right[:-1], collect(lengths, [{"batch": WRONG}] * prompts, prompts)]
            found = list_findings(judge([wrong, *[right] * (servers - 1)]))
            assert ("A", BATCH) in [(name, finding.effect) for name, finding in found]


@pytest.mark.parametrize(
    ("wanted", "given", "longest", "tokens", "lengths"),
    [
        (DOUBLED, False, None, 32, [64 * 2**n for n in range(9)]),
        (DOUBLED, False, 300, 32, [64, 128, 256]),
        (DOUBLED, False, 96, 32, [64]),
        (DOUBLED, False, 95, 32, [63]),
        (DOUBLED, False, 33, 32, [1]),
        (DOUBLED, False, 32, 32, [1]),
        (DOUBLED, False, 9, 32, [1]),
        (DOUBLED, False, 32_800, 32, [64 * 2**n for n in range(10)]),
        ([3, 5], True, None, 32, [3, 5]),
        ([3, 20_000], True, None, 32, [3, 20_000]),
        ([5, 6], True, 37, 32, [5]),
    ],
)
def test_prompt_lengths_are_limited_by_the_maximum_context(
    wanted: list[int], given: bool, longest: int | None, tokens: int, lengths: list[int]
) -> None:
    """If the server reports no maximum, default lengths go up to 16,384 tokens; longer ones are left out."""
    found, longer = fit_lengths(wanted, longest, tokens, given=given)
    assert found == lengths
    assert longer == [n for n in wanted if n > max(lengths)]


def test_given_lengths_that_all_exceed_the_maximum_are_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"^--context 6 with 32 new tokens is more than the 37 that a server takes; --context can be up to 5",
    ):
        fit_lengths([6, 9], 37, 32, given=True)


def test_prompts_depend_on_seed_and_length_only() -> None:
    """Prompts of one call differ from each other."""
    first, other = make_distinct_prompts(np.random.default_rng([1, 50]), 50, 2, 30)
    again = make_distinct_prompts(np.random.default_rng([1, 50]), 50, 2, 30)
    assert [p.tolist() for p in again] == [first.tolist(), other.tolist()]
    assert (len(first), first.dtype, first.tolist() != other.tolist()) == (50, np.int32, True)
    assert 0 <= first.min() <= first.max() < 30
    assert make_distinct_prompts(np.random.default_rng([2, 50]), 50, 1, 30)[0].tolist() != first.tolist()


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (
            b'{"choices":[{"text":" a b","logprobs":{"tokens":[" a"," b"],"token_logprobs":[-1,-2],"top_logprobs":[{" a":-1," c":-1.5},{" b":-2}]}}]}',
            Answer(
                tokens=[" a", " b"],
                names=[" a", " b"],
                logprobs=[-1.0, -2.0],
                tops=[{" a": -1, " c": -1.5}, {" b": -2}],
            ),
        ),
        (
            b'{"choices":[{"message":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-1,"top_logprobs":[{"token":"a","logprob":-1},{"token":"b","logprob":-3}]}]}}]}',
            Answer(tokens=["a"], names=["a"], logprobs=[-1.0], tops=[{"a": -1, "b": -3}]),
        ),
        (b'{"choices":[{"text":"some words"}]}', Answer(tokens=["some", "words"])),
        (b'{"choices":[{"text":"x","token_ids":[5,6]}]}', Answer(tokens=["5", "6"])),
        (
            b'{"choices":[{"text":"x","token_ids":[5],"logprobs":{"tokens":["x"],"token_logprobs":[-1],"top_logprobs":[{"x":-1,"y":null}]}}]}',
            Answer(tokens=["5"], names=["x"], logprobs=[-1.0], tops=[{"x": -1}]),
        ),
        (
            b'{"choices":[{"text":"x","token_ids":[5],"logprobs":{"tokens":["x"],"token_logprobs":[null],"top_logprobs":null}}]}',
            Answer(tokens=["5"]),
        ),
    ],
    ids=["completions", "chat", "text", "ids", "both", "null"],
)
def test_parse_answer_of_each_api_format(data: bytes, wanted: Answer) -> None:
    choices = read_completion(data).choices
    assert choices
    assert parse_answer(choices[0]) == wanted


QUESTIONS = Questions(lengths=None, batches=(1, 8), prompts=8, tokens=16, rounds=2, seed=0, endpoint="completions")


async def compare_targets(targets: list[Target], contexts: list[int] | None) -> Report:
    """Compare servers of this process from another thread."""
    questions = dataclasses.replace(QUESTIONS, lengths=contexts)
    return await asyncio.to_thread(compare_running, targets, questions, 0.1, lambda _: None)


async def compare_models(a: Model, b: Model, contexts: list[int] | None, script: Script | None = None) -> Report:
    """Judge two servers in this process."""
    async with Running(script, a) as first, Running(script, b) as second:
        targets = [Target.from_url(first.url, timeout_s=5), Target.from_url(second.url, timeout_s=5)]
        return await compare_targets(targets, contexts)


@pytest.mark.parametrize(
    ("b", "wrong"),
    [
        (Model(), []),
        (Model(wrong_from=300), [290, 400]),
        (Model(drift_from=300, drift=2.0), [290, 400]),
        (Model(version="9"), []),
    ],
    ids=["same", "token", "drift", "other-version"],
)
def test_injected_faults_are_found_at_their_position(b: Model, wrong: list[int]) -> None:
    """The fault begins at 300 tokens of context, which is the eleventh token after a prompt of 290.

    Lengths between right and wrong ones are asked too.
    """
    report = asyncio.run(compare_models(Model(), b, [100, 200, 280, 290, 400]))
    found = [finding for _, finding in list_findings(report) if finding.effect == SERVERS]
    assert [[n for n in finding.lengths if n in (100, 200, 280, 290, 400)] for finding in found] == (
        [wrong] if wrong else []
    )
    assert report.verdict == (DIFFER if wrong else AGREE)
    if b.wrong_from:
        assert "token 11 of the answer (after 300 tokens of context)" in format_report(report)[1]


def test_first_wrong_length_is_narrowed_down() -> None:
    """Lengths between 100 and 400 are asked until the first wrong one is at most 16 tokens after a right one."""
    report = asyncio.run(compare_models(Model(), Model(wrong_from=300), [100, 400]))
    (finding,) = [finding for _, finding in list_findings(report)]
    assert finding.lengths[0] - max(finding.clean_lengths) <= 16
    assert 300 - 16 <= finding.lengths[0] <= 300
    assert [result.lengths for result in report.results] == [sorted([*finding.lengths, *finding.clean_lengths])] * 2


def test_server_with_shorter_maximum_context_is_compared_up_to_it() -> None:
    """A accepts 300 tokens, so it is asked 64, 128 and 256 with 16 new ones; B accepts 150, or 60, which is too few."""
    report = asyncio.run(compare_models(Model(max_model_len=300), Model(max_model_len=150), None))
    assert [(result.lengths, result.left_out[:1]) for result in report.results] == [
        ([64, 128, 256], [512]),
        ([64, 128], [256]),
    ]
    assert report.verdict == AGREE
    assert "longer than the 300 that A takes" in format_report(report)[-1]
    with pytest.raises(UsageError, match="it takes prompts of up to 44 tokens"):
        asyncio.run(compare_models(Model(max_model_len=300), Model(max_model_len=60), None))


def test_intermediate_length_is_asked_only_of_servers_that_accept_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A accepts 600 tokens and B 150, so only A is asked 200."""
    lengths = iter([200, None])
    monkeypatch.setattr("dcpbench.servers.server_comparison.find_next_length", lambda *_: next(lengths))
    report = asyncio.run(compare_models(Model(max_model_len=600), Model(max_model_len=150), [64, 500]))
    assert [result.lengths for result in report.results] == [[64, 200, 500], [64]]


def test_different_servers_without_logprobs_never_agree() -> None:
    """The servers do not accept token ids either."""
    script = Script(takes_ids=False, token_ids=False)
    report = asyncio.run(compare_models(Model(strict=True), Model(strict=True, wrong_from=60), [20, 100], script))
    assert (report.verdict, get_judgements(report)[1].logprobs) == (DIFFER, True)
    without = Model(strict=True, logprobs=False)
    wrong = Model(strict=True, logprobs=False, wrong_from=60)
    assert asyncio.run(compare_models(without, wrong, [20, 100], script)).verdict == UNDECIDED
    assert asyncio.run(compare_models(without, without, [20, 100], script)).verdict == AGREE


def test_exit_code_of_verify_url_follows_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid options are one error line."""
    for words, message in (
        (["--url", "http://127.0.0.1:9", "--tp", "2"], "--tp is an option of dcpbench's own engine"),
        (["--url", "http://127.0.0.1:9", "--url", "x", "--url", "y"], "--url is given 3 times"),
        (["--url", "http://127.0.0.1:9", "--url", "127.0.0.1:9/v1"], "--url names http://127.0.0.1:9 twice"),
        (["--url", "http://127.0.0.1:9", "--context", "0"], "--context"),
        (["--url", "http://127.0.0.1:9", "--num-prompts", "2"], "use --num-prompts 4 or more"),
        (["--url", "http://127.0.0.1:9", "--extra-body", '{"temperature": 1}'], "dcpbench sets temperature itself"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["verify", *words])
        assert end.value.code
        err = capsys.readouterr().err
        assert message in err
        assert "Traceback" not in err
    words = ["--context", "300,400", "--new-tokens", "4", "--num-prompts", "9"]
    words += ["--header", "X-Team: blue", "--extra-body", '{"priority": 3}', "-o", str(tmp_path / "out")]
    words += ["--model", "fake"]
    with run_test_server("", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["verify", "--url", url, *words, "--json"])
    assert not end.value.code
    with pytest.raises(SystemExit) as again:
        cli.main(["verify", "--url", url, *words])
    assert again.value.code == 2, "answers of another comparison are not replaced"
    found = json.loads(capsys.readouterr().out)
    (result,) = found["results"]
    assert (found["verdict"], result["verdict"], result["url"]) == (CONSISTENT, CONSISTENT, url)
    assert {c["cell"]["length"] for c in result["judgement"]["counts"]} == set(result["lengths"]) == {300, 400}
    assert result["hit_tokens"] > 0
    assert json.loads((tmp_path / "out" / "answers.json").read_text())["seed"] == found["seed"]
    assert "blue" not in json.dumps(found) + (tmp_path / "out" / "answers.json").read_text()
    sent = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert {(one["headers"]["x-team"], one["body"]["priority"]) for one in sent} == {("blue", 3)}


def test_both_servers_get_text_if_one_refuses_token_ids() -> None:
    """With ids for one server and text for the other, differences between tokenizers would be found."""

    async def main() -> tuple[list[object], list[object]]:
        async with Running(Script()) as one, Running(Script(takes_ids=False)) as other:
            targets = [Target.from_url(one.url), Target.from_url(other.url)]
            await compare_targets(targets, [16])
            first, second = ([sent.body["prompt"] for sent in server.server.sent] for server in (one, other))
            return first, second

    one, other = asyncio.run(main())
    assert isinstance(one[-1], str)
    assert one[-1] == other[-1]


def test_each_prompt_is_sent_repeatedly_alone_and_in_a_batch() -> None:
    """8 prompts alone and 8 with a common first half are sent three times, then 8 in a batch, and these alone."""

    async def main() -> list[tuple[tuple[int, ...], float, float]]:
        async with Running(Script(ttft_ms=30)) as server:
            await Collector(Target.from_url(server.url), QUESTIONS, lambda _: None).collect(None, lambda _: [300])
            sent = [s for s in server.server.sent if s.prompt_tokens == 300 and s.body.get("max_tokens") == 16]
            return [(tuple(s.body["prompt"]), s.came_s, s.ended_s) for s in sent]

    sent = asyncio.run(main())
    at_once = [sum(came < end and begin < ended for _, begin, end in sent) for _, came, ended in sent]
    assert at_once == [1] * 48 + [8] * 24 + [1] * 8
    prompts = [prompt for prompt, _, _ in sent]
    alone, shared, batch = (prompts[i : i + 24] for i in (0, 24, 48))
    for group in (alone, shared, batch):
        assert len(set(group[:8])) == 8
        assert sorted(group[:8]) == sorted(group[8:16]) == sorted(group[16:])
    assert [prompt[:150] for prompt in shared[:8]] == [prompt[:150] for prompt in alone[:8]]
    assert not set(alone) & set(shared)
    assert sorted(prompts[72:]) == sorted(batch[:8])


@pytest.fixture(scope="module")
def engines() -> Iterator[str]:
    """Return the address of the stand-in engines in a separate process."""
    with start_faulty_engine() as url:
        yield url


@pytest.mark.parametrize("pair", PAIRS)
def test_planted_faults_are_found_without_false_positives(pair: str, engines: str) -> None:
    """`python -m tools.server_agreement faults` repeats this 50 times and with more lengths."""
    contexts = "4096" if pair == "long prompts" else "512"
    found = run_verify(engines, PAIRS[pair], "--context", contexts, "--new-tokens", "16")
    right = {1: CONSISTENT, 2: AGREE}[len(PAIRS[pair])]
    assert (found["verdict"], found["exit_code"]) == ((right, 0) if pair in CORRECT_PAIRS else (DIFFER, 1)), found[
        "text"
    ]


def test_warm_prefix_cache_changes_no_verdict(engines: str) -> None:
    """The same prompts are sent again, so first answers come from the cache and are wrong too."""
    for _ in range(2):
        found = run_verify(engines, ("good", "cache"), "--context", "512", "--seed", "7", "--new-tokens", "16")
        assert found["verdict"] == DIFFER


def test_fault_table_fails_on_a_wrong_verdict() -> None:
    """One AGREE for a fault, or one DIFFER for a correct pair, fails the table."""
    lines = [{"pair": name, "verdict": "AGREE" if name in CORRECT_PAIRS else "DIFFER"} for name in PAIRS] * 50
    assert format_verdicts(lines)[1]
    assert format_verdicts([*lines, *[{"pair": "batch", "verdict": "UNDECIDED"}] * 2])[1]
    assert not format_verdicts([*lines, *[{"pair": "batch", "verdict": "UNDECIDED"}] * 3])[1]
    assert not format_verdicts([*lines, {"pair": "batch", "verdict": "AGREE"}])[1]
    assert not format_verdicts([*lines, {"pair": "right, bf16 noise", "verdict": "DIFFER"}])[1]
