"""Loads: what is sent, when, and what prompts share."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.points.names import CLOSED, GAMMA, LIVE, REPLAY, TRACE
from dcpbench.points.point import Load
from dcpbench.serving import loads, requests
from dcpbench.serving.load_words import Lengths, format_load, parse_lengths, parse_slo
from dcpbench.serving.loads import OWN, compute_extent, draw_arrival_times, draw_lengths, make_requests, make_token_ids
from dcpbench.serving.request_files import Row, read_requests

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 512
VOCAB = 1000


def load(**changes: object) -> Load:
    """Eight prompts of 10 tokens with 3 tokens out."""
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
    def test_they_are_written_so(self, text: str, lengths: Lengths) -> None:
        assert parse_lengths("--input-tokens", text) == lengths
        assert parse_lengths("--input-tokens", str(lengths)) == lengths

    @pytest.mark.parametrize(
        ("text", "words"),
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
    def test_anything_else_is_refused_with_what_to_write(self, text: object, words: str) -> None:
        with pytest.raises(UsageError, match="--output-tokens") as e:
            parse_lengths("--output-tokens", text)
        assert words in str(e.value)

    def test_fixed_ones_are_all_alike(self) -> None:
        inputs, outputs = draw_lengths(load())
        assert (inputs.tolist(), outputs.tolist()) == ([10] * 8, [3] * 8)

    def test_uniform_ones_reach_both_ends(self) -> None:
        """200 draws of 3 values: each is missing with a chance of (2/3)²⁰⁰."""
        inputs, _ = draw_lengths(load(requests=200, input_tokens="uniform:4-6"))
        assert set(inputs.tolist()) == {4, 5, 6}

    def test_lognormal_ones_have_their_median_and_sigma_and_at_least_a_token(self) -> None:
        """ln(n / 4000) is normal with standard deviation 0.5; of 20,000 its mean is known to 0.5 / √20000 = 0.0035."""
        inputs, _ = draw_lengths(load(requests=20_000, input_tokens="lognormal:4000:0.5"))
        logs = np.log(inputs / 4000)
        assert abs(logs.mean()) < 0.02
        assert abs(logs.std() - 0.5) < 0.02
        assert draw_lengths(load(requests=500, input_tokens="lognormal:1:3"))[0].min() == 1

    def test_prompts_and_answers_are_drawn_independently(self) -> None:
        inputs, outputs = draw_lengths(load(requests=50, input_tokens="uniform:1-99", output_tokens="uniform:1-99"))
        assert inputs.tolist() != outputs.tolist()


class TestArrivals:
    def test_a_closed_loop_has_none(self) -> None:
        assert draw_arrival_times(load(arrival=CLOSED)) == [None] * 8

    def test_the_first_comes_at_once_and_the_others_later(self) -> None:
        times = draw_arrival_times(load(arrival=GAMMA, request_rate=2.0))
        assert times[0] == 0.0
        assert times == sorted(times)
        assert len(times) == 8

    @pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
    def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_burstiness(self, burstiness: float) -> None:
        """Gamma(k, 1/(k·rate)): mean 1/rate = 0.5 s, standard deviation mean/√k."""
        gaps = np.diff(
            draw_arrival_times(load(requests=20_001, arrival=GAMMA, request_rate=2.0, burstiness=burstiness))
        )
        assert gaps.mean() == pytest.approx(0.5, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)

    @pytest.mark.parametrize("paced", [False, True])
    def test_one_request_comes_at_once(self, paced: bool) -> None:
        assert draw_arrival_times(load(requests=1, arrival=GAMMA, request_rate=2.0, paced=paced)) == [0.0]

    @pytest.mark.parametrize(("seed", "burstiness"), [(0, 1.0), (4, 0.25), (1, 4.0)])
    def test_paced_requests_come_as_fast_as_asked_whatever_was_drawn(self, seed: int, burstiness: float) -> None:
        """121 at 2 a second take a minute; each gap is as many times as long as it was drawn."""
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
    def test_a_sum_that_no_number_is_has_no_pace(self, burstiness: float, last: float) -> None:
        """Three requests, all at once, or half a second apart."""
        times = draw_arrival_times(load(requests=3, arrival=GAMMA, request_rate=2.0, burstiness=burstiness, paced=True))
        assert times[-1] == pytest.approx(last)

    def test_gaps_whose_sum_is_hardly_a_number_are_paced(self) -> None:
        paced = load(requests=3, arrival=GAMMA, request_rate=2.0, burstiness=0.002, seed=121, paced=True)
        assert draw_arrival_times(paced)[-1] == pytest.approx(1.0)


class TestPrompts:
    def test_the_same_load_is_the_same_requests_in_another_process(self) -> None:
        """Ranks never talk about prompts."""
        code = (
            "from dcpbench.serving.loads import make_requests; from dcpbench.points.point import Load\n"
            "load = Load(requests=8, input_tokens='uniform:3-9', output_tokens='3', chunk=64, arrival='gamma', "
            "request_rate=2.0, prefix_share=0.5)\n"
            "print([(r.prompt.tolist(), r.arrival_s) for r in make_requests(load, 1000)])"
        )
        there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        here = make_requests(load(input_tokens="uniform:3-9", arrival=GAMMA, request_rate=2.0, prefix_share=0.5), VOCAB)
        assert there.strip() == str([(r.prompt.tolist(), r.arrival_s) for r in here])

    def test_another_seed_is_another_load(self) -> None:
        one, two = (make_requests(load(seed=seed), VOCAB)[0].prompt.tolist() for seed in (0, 1))
        assert one != two

    def test_the_load_stays_what_it_was_in_older_versions(self) -> None:
        """Records of different versions are compared: their prompts must be the same."""
        assert make_token_ids(0, OWN, 0, 4, VOCAB).tolist() == [776, 680, 540, 458]

    def test_ids_are_int32_below_the_vocabulary_and_spread_over_it(self) -> None:
        ids = make_token_ids(0, OWN, 3, 50_000, 7)
        assert ids.dtype == np.int32
        assert np.bincount(ids, minlength=7).min() > 50_000 / 7 * 0.9
        assert ids.max() == 6

    def test_nothing_is_shared_unless_asked_for(self) -> None:
        prompts = [r.prompt.tolist() for r in make_requests(load(), VOCAB)]
        assert len({tuple(p[:4]) for p in prompts}) == 8

    def test_the_first_part_of_a_prompt_is_its_groups(self) -> None:
        """Half of 10 tokens; requests 0, 2, 4, 6 are one group and 1, 3, 5, 7 the other."""
        prompts = [r.prompt.tolist() for r in make_requests(load(prefix_share=0.5, prefix_groups=2), VOCAB)]
        assert len({tuple(p[:5]) for p in prompts[::2]}) == 1
        assert len({tuple(p[:5]) for p in prompts[1::2]}) == 1
        assert prompts[0][:5] != prompts[1][:5]
        assert len({p[5] for p in prompts}) > 1

    def test_prompts_of_uneven_lengths_share_the_shorter_ones_part(self) -> None:
        a, b = (r.prompt for r in make_requests(load(requests=2, input_tokens="uniform:5-40", prefix_share=0.8), VOCAB))
        shared = min(round(0.8 * len(a)), round(0.8 * len(b)))
        assert a[:shared].tolist() == b[:shared].tolist()

    def test_extents_are_known_without_the_prompts(self) -> None:
        """10 + 3 tokens each; 8 × 3 come out; the last one comes when it does."""
        found = compute_extent(load(arrival=GAMMA, request_rate=2.0))
        assert (found.shortest, found.longest, found.output) == (13, 13, 24)
        assert found.ends_s == draw_arrival_times(load(arrival=GAMMA, request_rate=2.0))[-1]


class TestTraces:
    @pytest.fixture
    def mooncake(self, tmp_path: Path) -> Path:
        """Two requests that share their first block, half a second apart."""
        path = tmp_path / "trace.jsonl"
        path.write_text(
            '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]}\n'
            '{"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 9]}\n'
        )
        return path

    def of(self, path: Path, **changes: object) -> Load:
        fields = {
            "requests": 2,
            "arrival": TRACE,
            "trace": path.name,
            "trace_sha256": read_requests(path).sha256,
            "input_tokens": "trace",
            "output_tokens": "trace",
        }
        return load(**(fields | changes))

    def test_equal_hashes_are_equal_blocks(self, mooncake: Path) -> None:
        """Block 7 is shared; of the second, 1100 = 2·512 + 76 tokens, the last 76 have no hash and are its own."""
        one, two = make_requests(self.of(mooncake), VOCAB, mooncake)
        assert one.prompt[:BLOCK].tolist() == two.prompt[:BLOCK].tolist()
        assert one.prompt[BLOCK : BLOCK + 8].tolist() != two.prompt[BLOCK : BLOCK + 8].tolist()
        assert (len(one.prompt), len(two.prompt)) == (700, 1100)
        assert (one.output_tokens, two.output_tokens) == (5, 6)

    def test_times_are_the_files_or_the_loads(self, mooncake: Path) -> None:
        def times(**changes: object) -> list[float | None]:
            return [r.arrival_s for r in make_requests(self.of(mooncake, **changes), VOCAB, mooncake)]

        assert times() == [0.0, 0.5]
        assert times(arrival=CLOSED) == [None, None]
        assert times(arrival=GAMMA, request_rate=9.0) != [0.0, 0.5]

    def test_a_load_of_fewer_requests_takes_the_first(self, mooncake: Path) -> None:
        assert len(make_requests(self.of(mooncake, requests=1), VOCAB, mooncake)) == 1
        assert compute_extent(self.of(mooncake, requests=1), str(mooncake)).longest == 705

    def test_a_file_that_changed_meanwhile_is_refused(self, mooncake: Path) -> None:
        before = self.of(mooncake)
        mooncake.write_text(mooncake.read_text().replace("700", "701"))
        with pytest.raises(UsageError, match="is not the file that it was"):
            make_requests(before, VOCAB, mooncake)

    def test_a_file_that_is_not_there_is_named(self, mooncake: Path) -> None:
        with pytest.raises(UsageError, match=r"trace\.jsonl, which is not there; give it with --requests"):
            make_requests(self.of(mooncake), VOCAB)

    def test_prompts_and_groups_of_our_own_files(self, tmp_path: Path) -> None:
        path = tmp_path / "own.jsonl"
        path.write_text(
            '{"prompt": [5, 6], "output_tokens": 1}\n'
            '{"input_tokens": 10, "output_tokens": 1, "prefix_group": 3}\n'
            '{"input_tokens": 20, "output_tokens": 1, "prefix_group": 3}\n'
        )
        given, one, two = make_requests(self.of(path, requests=3, arrival=CLOSED, prefix_share=0.5), VOCAB, path)
        assert given.prompt.tolist() == [5, 6]
        assert one.prompt[:5].tolist() == two.prompt[:5].tolist()
        with pytest.raises(UsageError, match=r"token id 6 in own\.jsonl, and the model has 6 of them"):
            make_requests(self.of(path, requests=3, arrival=CLOSED), 6, path)


def test_objectives_are_named_in_ms() -> None:
    """As text on the command line, as a table in a file."""
    assert parse_slo("ttft=500, itl=50.5") == {"ttft": 500.0, "itl": 50.5}
    assert parse_slo({"e2el": 9000}) == {"e2el": 9000.0}
    assert parse_slo(["ttft=500", "itl=50.5"]) == {"ttft": 500.0, "itl": 50.5}


@pytest.mark.parametrize(
    ("value", "words"),
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
def test_any_other_objective_is_refused(value: object, words: str) -> None:
    with pytest.raises(UsageError, match="write for example --slo ttft=500,itl=50") as e:
        parse_slo(value)
    assert words in str(e.value)


@pytest.mark.parametrize(
    ("changes", "concurrency", "name"),
    [
        ({}, 8, "8 clients, 8 × 10→3 tokens"),
        ({"prefix_share": 0.25, "prefix_groups": 2}, 1, "1 client, 8 × 10→3 tokens, 25% shared by 2"),
        ({"arrival": GAMMA, "request_rate": 0.5, "paced": True}, 512, "0.5 req/s, 8 × 10→3 tokens"),
        ({"arrival": GAMMA, "request_rate": 0.5}, 512, "0.5 req/s, as drawn, 8 × 10→3 tokens"),
        (
            {"arrival": GAMMA, "request_rate": 2.0, "burstiness": 0.5, "paced": True},
            512,
            "2 req/s burstiness 0.5, 8 × 10→3 tokens",
        ),
        ({"arrival": TRACE, "trace": "a.jsonl"}, 512, "trace times, 8 of a.jsonl"),
        ({"arrival": GAMMA, "request_rate": 0.5, "paced": True}, 3, "0.5 req/s, 8 × 10→3 tokens, 3 at once"),
        ({"mode": "replay"}, 8, "8 clients, 8 × 10→3 tokens, replay"),
    ],
)
def test_a_load_has_a_name(changes: dict[str, object], concurrency: int, name: str) -> None:
    assert format_load(load(**changes), concurrency) == name


def test_rows_of_a_file_that_name_no_group_take_them_in_turn() -> None:
    """Three groups: requests 0 and 3 begin alike, and 1 as the row that names group 1."""
    shared = load(prefix_share=0.5, prefix_groups=3)

    def begins(number: int, group: int | None = None) -> list[int]:
        row = Row(arrival_s=None, input_tokens=10, output_tokens=1, prefix_group=group)
        return [int(token) for token in loads._make_row_prompt(shared, VOCAB, number, row, 0)[:5]]

    assert begins(0) == begins(3) == begins(1, 0)
    assert begins(1) == begins(4) == begins(0, 1)
    assert begins(2) not in (begins(0), begins(1))


class TestPromptsOfReplays:
    """The prompts of a replay, which may have millions of requests, do not fit in memory together."""

    def test_no_prompt_is_made_before_it_is_read_and_few_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1,000 requests of 10 tokens: lengths are known without a prompt; reading all keeps no more than 256."""
        made: list[int] = []
        plain = loads.make_token_ids
        monkeypatch.setattr(loads, "make_token_ids", lambda *given: made.append(1) or plain(*given))
        found = make_requests(load(requests=1000, mode=REPLAY), VOCAB)
        assert (sum(r.prompt_tokens for r in found), sum(r.kv_tokens for r in found)) == (10_000, 12_000)
        assert made == []
        assert all(len(r.prompt) == 10 for r in found)
        assert len(made) == 1000
        assert requests._read_prompt.cache_info().currsize == requests.CACHED_PROMPTS == 256

    @pytest.mark.parametrize("more", [{}, {"prefix_share": 0.5, "prefix_groups": 2}, {"input_tokens": "uniform:1-9"}])
    def test_they_are_those_of_a_live_run(self, more: dict[str, object]) -> None:
        live, replayed = (make_requests(load(mode=mode, **more), VOCAB) for mode in (LIVE, REPLAY))
        assert [r.prompt.tolist() for r in live] == [r.prompt.tolist() for r in replayed]
        assert all(isinstance(r.source, np.ndarray) for r in live), "making one would take time from a step"
