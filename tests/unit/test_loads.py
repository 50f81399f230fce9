"""Loads: lengths, arrival times, prompts and shared prefixes."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.points.names import CLOSED, GAMMA, LIVE, REPLAY, TRACE
from dcpbench.points.point import Load, TraceFacts
from dcpbench.serving import loads, requests
from dcpbench.serving.load_words import Lengths, format_load, parse_lengths, parse_slo
from dcpbench.serving.loads import OWN, compute_extent, draw_arrival_times, draw_lengths, make_requests, make_token_ids
from dcpbench.serving.request_files import Row, read_requests

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 512
VOCAB = 1000


def load(**changes: object) -> Load:
    """Return a load of eight prompts of 10 tokens with 3 tokens out."""
    fields = {"requests": 8, "input_tokens": "10", "output_tokens": "3", "chunk": 64}
    return Load(**(fields | changes))  # type: ignore[arg-type]


class TestLengths:
    @pytest.mark.parametrize(
        ("text", "lengths"),
        [
            ("4000", Lengths("fixed", 4000)),
            (" 17 ", Lengths("fixed", 17)),
            ("uniform:1000-7000", Lengths("uniform", 1000, 7000)),
            ("uniform:5-5", Lengths("uniform", 5, 5)),
            ("lognormal:4000:0.5", Lengths("lognormal", 4000, sigma=0.5)),
        ],
    )
    def test_lengths_are_parsed_and_formatted(self, text: str, lengths: Lengths) -> None:
        assert parse_lengths("--input-tokens", text) == lengths
        assert parse_lengths("--input-tokens", str(lengths)) == lengths

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not a length"),
            ("x", "not a length; write a number such as 4000, uniform:1000-7000 or lognormal:4000:0.5"),
            ("1e3", "not a length"),
            ("uniform:1K-7K", "K is 1,000 in some tools and 1,024 in others; write 1000 (or 1k), or 1024"),
            ("10.5", "not a length"),
            ("uniform:10", "not a length"),
            ("uniform:a-b", "not a length"),
            ("normal:4000:1", "not a length"),
            (True, "not a length"),
            ("0", "0 tokens; a request has at least 1 in and 1 out"),
            ("-5", "-5 tokens"),
            ("uniform:0-4", "0 tokens"),
            ("uniform:-3-4", "-3 tokens"),
            ("uniform:9-4", "9 is more than 4; write uniform:4-9"),
            ("lognormal:0:1", "0 tokens"),
            ("lognormal:4000:0", "sigma is 0, and can be more than 0 and up to 3"),
            ("lognormal:4000:-1", "sigma is -1"),
            ("lognormal:4000:nan", "sigma is nan"),
            ("lognormal:4000:inf", "sigma is inf"),
            ("lognormal:4000:wide", "sigma is wide"),
            ("99999999999", "more than any model takes"),
        ],
    )
    def test_invalid_lengths_raise_usage_error_with_examples(self, text: object, message: str) -> None:
        with pytest.raises(UsageError, match="--output-tokens") as e:
            parse_lengths("--output-tokens", text)
        assert message in str(e.value)

    def test_fixed_lengths_are_all_equal(self) -> None:
        inputs, outputs = draw_lengths(load())
        assert (inputs.tolist(), outputs.tolist()) == ([10] * 8, [3] * 8)

    def test_uniform_lengths_include_both_ends(self) -> None:
        """Each of 3 values is missing in 200 draws with a probability of (2/3)²⁰⁰."""
        inputs, _ = draw_lengths(load(requests=200, input_tokens="uniform:4-6"))
        assert set(inputs.tolist()) == {4, 5, 6}

    def test_lognormal_lengths_have_median_sigma_and_at_least_one_token(self) -> None:
        """ln(n / 4000) is normal with standard deviation 0.5; the mean of 20,000 has an error of 0.5 / √20000 = 0.0035."""
        inputs, _ = draw_lengths(load(requests=20_000, input_tokens="lognormal:4000:0.5"))
        logs = np.log(inputs / 4000)
        assert abs(logs.mean()) < 0.02
        assert abs(logs.std() - 0.5) < 0.02
        assert draw_lengths(load(requests=500, input_tokens="lognormal:1:3"))[0].min() == 1

    def test_prompts_and_answers_are_drawn_independently(self) -> None:
        inputs, outputs = draw_lengths(load(requests=50, input_tokens="uniform:1-99", output_tokens="uniform:1-99"))
        assert inputs.tolist() != outputs.tolist()


class TestArrivals:
    def test_closed_loop_has_no_arrival_times(self) -> None:
        assert draw_arrival_times(load(arrival=CLOSED)) == [None] * 8

    def test_first_arrival_is_0_and_the_others_follow(self) -> None:
        times = draw_arrival_times(load(arrival=GAMMA, request_rate=2.0))
        assert times[0] == 0.0
        assert times == sorted(times)
        assert len(times) == 8

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_have_the_mean_of_the_rate_and_spread_of_the_burstiness(self, burstiness: float) -> None:
        """Gamma(k, 1/(k·rate)) has mean 1/rate = 0.5 s and standard deviation mean/√k."""
        gaps = np.diff(
            draw_arrival_times(load(requests=20_001, arrival=GAMMA, request_rate=2.0, burstiness=burstiness))
        )
        assert gaps.mean() == pytest.approx(0.5, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)

    @pytest.mark.parametrize("paced", [False, True])
    def test_single_request_arrives_at_0(self, paced: bool) -> None:
        assert draw_arrival_times(load(requests=1, arrival=GAMMA, request_rate=2.0, paced=paced)) == [0.0]

    @pytest.mark.parametrize(("seed", "burstiness"), [(0, 1.0), (4, 0.25), (1, 4.0)])
    def test_paced_requests_have_exactly_the_requested_rate(self, seed: int, burstiness: float) -> None:
        """121 requests at 2 per second take a minute; all drawn gaps are scaled by the same factor."""
        drawn, paced = (
            np.array(
                draw_arrival_times(
                    load(requests=121, arrival=GAMMA, request_rate=2.0, burstiness=burstiness, seed=seed, paced=one)
                )
            )
            for one in (False, True)
        )
        assert paced[-1] == pytest.approx(60)
        assert drawn[-1] != pytest.approx(60, rel=1e-3)
        assert paced == pytest.approx(drawn * 60 / drawn[-1])

    @pytest.mark.parametrize(("burstiness", "last"), [(1e-300, 0.0), (1e307, 1.0)])
    def test_gaps_without_a_finite_sum_are_not_scaled(self, burstiness: float, last: float) -> None:
        """Three requests arrive all at once, or half a second apart."""
        times = draw_arrival_times(load(requests=3, arrival=GAMMA, request_rate=2.0, burstiness=burstiness, paced=True))
        assert times[-1] == pytest.approx(last)

    def test_gaps_with_a_tiny_sum_are_scaled(self) -> None:
        paced = load(requests=3, arrival=GAMMA, request_rate=2.0, burstiness=0.002, seed=121, paced=True)
        assert draw_arrival_times(paced)[-1] == pytest.approx(1.0)


class TestPrompts:
    def test_requests_of_a_load_are_equal_in_another_process(self) -> None:
        """Ranks do not exchange prompts."""
        code = (
            "from dcpbench.serving.loads import make_requests; from dcpbench.points.point import Load\n"
            "load = Load(requests=8, input_tokens='uniform:3-9', output_tokens='3', chunk=64, arrival='gamma', "
            "request_rate=2.0, prefix_share=0.5)\n"
            "print([(r.prompt.tolist(), r.arrival_s) for r in make_requests(load, 1000)])"
        )
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        requests_here = make_requests(
            load(input_tokens="uniform:3-9", arrival=GAMMA, request_rate=2.0, prefix_share=0.5), VOCAB
        )
        assert printed.strip() == str([(r.prompt.tolist(), r.arrival_s) for r in requests_here])

    def test_another_seed_gives_other_prompts(self) -> None:
        one, two = (make_requests(load(seed=seed), VOCAB)[0].prompt.tolist() for seed in (0, 1))
        assert one != two

    def test_token_ids_are_those_of_older_versions(self) -> None:
        """Records of different versions are compared, so their prompts must be equal."""
        assert make_token_ids(0, OWN, 0, 4, VOCAB).tolist() == [776, 680, 540, 458]

    def test_token_ids_are_int32_and_uniform_over_the_vocabulary(self) -> None:
        ids = make_token_ids(0, OWN, 3, 50_000, 7)
        assert ids.dtype == np.int32
        assert np.bincount(ids, minlength=7).min() > 50_000 / 7 * 0.9
        assert ids.max() == 6

    def test_prompts_share_nothing_by_default(self) -> None:
        prompts = [r.prompt.tolist() for r in make_requests(load(), VOCAB)]
        assert len({tuple(p[:4]) for p in prompts}) == 8

    def test_prompts_of_a_group_share_their_beginning(self) -> None:
        """Prompts share half of 10 tokens; requests 0, 2, 4, 6 are one group and 1, 3, 5, 7 the other."""
        prompts = [r.prompt.tolist() for r in make_requests(load(prefix_share=0.5, prefix_groups=2), VOCAB)]
        assert len({tuple(p[:5]) for p in prompts[::2]}) == 1
        assert len({tuple(p[:5]) for p in prompts[1::2]}) == 1
        assert prompts[0][:5] != prompts[1][:5]
        assert len({p[5] for p in prompts}) > 1

    def test_prompts_of_different_lengths_share_the_part_of_the_shorter(self) -> None:
        a, b = (r.prompt for r in make_requests(load(requests=2, input_tokens="uniform:5-40", prefix_share=0.8), VOCAB))
        shared = min(round(0.8 * len(a)), round(0.8 * len(b)))
        assert a[:shared].tolist() == b[:shared].tolist()

    def test_extent_is_computed_without_prompts(self) -> None:
        """Each request has 10 + 3 tokens, and 8 × 3 tokens are generated; the load ends with the last arrival."""
        found = compute_extent(load(arrival=GAMMA, request_rate=2.0))
        assert (found.shortest, found.longest, found.output) == (13, 13, 24)
        assert found.ends_s == draw_arrival_times(load(arrival=GAMMA, request_rate=2.0))[-1]


class TestTraces:
    @pytest.fixture
    def mooncake(self, tmp_path: Path) -> Path:
        """Return a trace of two requests that share their first block, half a second apart."""
        path = tmp_path / "trace.jsonl"
        path.write_text(
            '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}\n'
            '{"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9]}\n'
        )
        return path

    def make_trace_load(self, path: Path, **changes: object) -> Load:
        fields = {
            "requests": 2,
            "arrival": TRACE,
            "trace": path.name,
            "trace_sha256": read_requests(path).sha256,
            "input_tokens": "trace",
            "output_tokens": "trace",
        }
        return load(**(fields | changes))

    def test_equal_hashes_give_equal_blocks(self, mooncake: Path) -> None:
        """Both share block 7; of the second, 1100 = 2·512 + 76 tokens, the last 76 have no hash and are its own."""
        one, two = make_requests(self.make_trace_load(mooncake), VOCAB, mooncake)
        assert one.prompt[:BLOCK].tolist() == two.prompt[:BLOCK].tolist()
        assert one.prompt[BLOCK : BLOCK + 8].tolist() != two.prompt[BLOCK : BLOCK + 8].tolist()
        assert (len(one.prompt), len(two.prompt)) == (700, 1100)
        assert (one.output_tokens, two.output_tokens) == (5, 6)

    def test_arrival_times_are_those_of_the_file_or_the_load(self, mooncake: Path) -> None:
        def list_times(**changes: object) -> list[float | None]:
            return [r.arrival_s for r in make_requests(self.make_trace_load(mooncake, **changes), VOCAB, mooncake)]

        assert list_times() == [0.0, 0.5]
        assert list_times(arrival=CLOSED) == [None, None]
        assert list_times(arrival=GAMMA, request_rate=9.0) != [0.0, 0.5]

    def test_load_of_fewer_requests_uses_the_first_ones(self, mooncake: Path) -> None:
        assert len(make_requests(self.make_trace_load(mooncake, requests=1), VOCAB, mooncake)) == 1
        assert compute_extent(self.make_trace_load(mooncake, requests=1), str(mooncake)).longest == 705

    def test_changed_file_is_refused(self, mooncake: Path) -> None:
        before = self.make_trace_load(mooncake)
        mooncake.write_text(mooncake.read_text().replace("700", "701"))
        with pytest.raises(UsageError, match="is not the file that it was"):
            make_requests(before, VOCAB, mooncake)

    def test_missing_file_is_named(self, mooncake: Path) -> None:
        with pytest.raises(UsageError, match=r"trace\.jsonl, which is not there; give it with --requests"):
            make_requests(self.make_trace_load(mooncake), VOCAB)

    def test_prompts_and_groups_of_own_files_are_used(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text(
            '{"prompt": [5, 6], "output_tokens": 1}\n'
            '{"input_tokens": 10, "output_tokens": 1, "prefix_group": 3}\n'
            '{"input_tokens": 20, "output_tokens": 1, "prefix_group": 3}\n'
        )
        given, one, two = make_requests(
            self.make_trace_load(path, requests=3, arrival=CLOSED, prefix_share=0.5), VOCAB, path
        )
        assert given.prompt.tolist() == [5, 6]
        assert one.prompt[:5].tolist() == two.prompt[:5].tolist()
        with pytest.raises(UsageError, match=r"token id 6 in own\.jsonl, and the model has 6 of them"):
            make_requests(self.make_trace_load(path, requests=3, arrival=CLOSED), 6, path)


def test_objectives_are_parsed_in_ms() -> None:
    """Objectives are text on the command line, and a table in a file."""
    assert parse_slo("ttft=500, itl=50.5") == {"ttft": 500.0, "itl": 50.5}
    assert parse_slo({"e2el": 9000}) == {"e2el": 9000.0}
    assert parse_slo(["ttft=500", "itl=50.5"]) == {"ttft": 500.0, "itl": 50.5}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "--slo is empty"),
        ({}, "--slo is empty"),
        ([], "--slo is empty"),
        (["ttft=1", 5], "--slo 5: not NAME=MS"),
        (",", "not NAME=MS"),
        ("ttft", "--slo ttft: not NAME=MS"),
        ("ttft=", "not a positive number of ms"),
        ("ttft=0", "not a positive number of ms"),
        ("ttft=-5", "not a positive number of ms"),
        ("ttft=nan", "not a positive number of ms"),
        ("ttft=inf", "not a positive number of ms"),
        ("ttft=fast", "not a positive number of ms"),
        ("latency=5", "--slo latency: not one of ttft, itl, tpot, e2el"),
        ("ttft=1,ttft=2", "names ttft twice"),
        ({"ttft": True}, "not a positive number of ms"),
    ],
    ids=str,
)
def test_invalid_objectives_raise_usage_error(value: object, message: str) -> None:
    with pytest.raises(UsageError, match="write for example --slo ttft=500,itl=50") as e:
        parse_slo(value)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("changes", "concurrency", "name"),
    [
        ({}, 8, "8 clients, 8 × 10→3 tokens"),
        ({"prefix_share": 0.25, "prefix_groups": 2}, 1, "1 client, 8 × 10→3 tokens, 25% shared by 2 groups"),
        ({"arrival": GAMMA, "request_rate": 0.5, "paced": True}, 512, "0.5 req/s, 8 × 10→3 tokens"),
        ({"arrival": GAMMA, "request_rate": 0.5}, 512, "0.5 req/s, as drawn, 8 × 10→3 tokens"),
        (
            {"arrival": GAMMA, "request_rate": 2.0, "burstiness": 0.5, "paced": True},
            512,
            "2 req/s burstiness 0.5, 8 × 10→3 tokens",
        ),
        ({"arrival": TRACE, "trace": "a.jsonl"}, 512, "trace times, 8 of a.jsonl"),
        (
            {"arrival": TRACE, "trace": "a.jsonl", "trace_facts": TraceFacts(sessions=1)},
            512,
            "trace times, 8 of a.jsonl in 1 session",
        ),
        ({"arrival": GAMMA, "request_rate": 0.5, "paced": True}, 3, "0.5 req/s, 8 × 10→3 tokens, 3 at once"),
        ({"mode": "replay"}, 8, "8 clients, 8 × 10→3 tokens, replay"),
    ],
)
def test_name_of_a_load_has_its_main_properties(changes: dict[str, object], concurrency: int, name: str) -> None:
    assert format_load(load(**changes), concurrency) == name


def test_rows_without_a_group_are_assigned_in_rotation() -> None:
    """With three groups, requests 0 and 3 share their beginning, and 1 shares it with the row of group 1."""
    shared = load(prefix_share=0.5, prefix_groups=3)

    def make_beginning(number: int, group: int | None = None) -> list[int]:
        row = Row(arrival_s=None, input_tokens=10, output_tokens=1, prefix_group=group)
        return [int(token) for token in loads._make_row_prompt(shared, VOCAB, number, row, 0)[:5]]

    assert make_beginning(0) == make_beginning(3) == make_beginning(1, 0)
    assert make_beginning(1) == make_beginning(4) == make_beginning(0, 1)
    assert make_beginning(2) not in (make_beginning(0), make_beginning(1))


class TestPromptsOfReplays:
    """The prompts of a replay with millions of requests do not fit into memory together."""

    def test_prompts_are_made_when_read_and_few_are_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lengths of 1,000 requests of 10 tokens need no prompt; reading all prompts keeps at most 256."""
        calls: list[int] = []
        original = loads.make_token_ids
        monkeypatch.setattr(loads, "make_token_ids", lambda *given: calls.append(1) or original(*given))
        found = make_requests(load(requests=1000, mode=REPLAY), VOCAB)
        assert (sum(r.prompt_tokens for r in found), sum(r.kv_tokens for r in found)) == (10_000, 12_000)
        assert calls == []
        assert all(len(r.prompt) == 10 for r in found)
        assert len(calls) == 1000
        assert requests._read_prompt.cache_info().currsize == requests.CACHED_PROMPTS == 256

    @pytest.mark.parametrize("more", [{}, {"prefix_share": 0.5, "prefix_groups": 2}, {"input_tokens": "uniform:1-9"}])
    def test_prompts_of_a_replay_equal_those_of_a_live_run(self, more: dict[str, object]) -> None:
        live, replayed = (make_requests(load(mode=mode, **more), VOCAB) for mode in (LIVE, REPLAY))
        assert [r.prompt.tolist() for r in live] == [r.prompt.tolist() for r in replayed]
        assert all(isinstance(r.source, np.ndarray) for r in live), "live prompts are made before steps are timed"
