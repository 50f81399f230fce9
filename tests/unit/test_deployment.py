"""Instances that only prefill and instances that only decode, on one clock. Steps take what Fixed says: 10 ms, 1 for each row
that decodes, 2 for each token of a chunk; a page has 4 tokens and is sent as 1,000 bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from dcpbench.serving.deployment import DecodeScheduler, Deployment, Disaggregated, Link
from dcpbench.serving.loads import make_requests
from dcpbench.serving.outcome import make_rows
from dcpbench.serving.replay import ReplayResult, replay_requests
from dcpbench.serving.requests import Sequence
from dcpbench.serving.scheduler import Scheduler
from tests.unit import virtual_serving
from tests.unit.serving_builder import config, request
from tests.unit.test_replay import SETUPS, Fixed, load
from tests.unit.test_sessions import PAGE, VOCAB, sessions

if TYPE_CHECKING:
    from dcpbench.serving.requests import ServeRequest, Step

AT_ONCE = Link(bytes_s=math.inf, page_bytes=1000)
SLOW = Link(bytes_s=1e5, page_bytes=1000)  # 10 ms for a page


@dataclasses.dataclass
class Seen(Fixed):
    """The same engine, and all steps that it ran."""

    steps: list[Step] = dataclasses.field(default_factory=list)

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        self.steps.append(step)
        return super().predict_duration_ms(step, _heat)


def split(
    requests: list[ServeRequest],
    clients: int | None = None,
    *,
    ratio: tuple[int, int] = (1, 1),
    link: Link = AT_ONCE,
    times: Fixed | None = None,
    limit_s: float = math.inf,
    **changes: Any,
) -> ReplayResult:
    """Serve them with so many instances that prefill and that decode, each of 59 pages."""
    deployed = Disaggregated(config(**({"pages": 60} | changes)), *ratio, link)
    return replay_requests(requests, deployed, clients, times or Fixed(), limit_s)


def token_ms(found: ReplayResult) -> list[list[float]]:
    """When each token of each request came."""
    return [[round(t * 1e3, 6) for t in sample.token_s] for sample in found.traffic.samples]


class TestOneRequest:
    """A prompt of 3 is prefilled in 10 + 2 · 3 = 16 ms; each further token takes 10 + 1."""

    def test_over_a_link_that_takes_no_time_it_is_as_where_one_instance_does_both(self) -> None:
        alone = replay_requests([request(0, 3, 3)], Scheduler(config(pages=60)), 1, Fixed())
        assert token_ms(split([request(0, 3, 3)], 1)) == token_ms(alone) == [[16, 27, 38]]

    @pytest.mark.parametrize(("prompt", "pages"), [(3, 1), (4, 1), (5, 2), (8, 2)])
    def test_the_first_gap_is_longer_by_what_its_pages_take(self, prompt: int, pages: int) -> None:
        """The first token is that of the instance that prefills, 10 ms go by for each page, and nothing else changes."""
        first = 10 + 2 * prompt
        expected = [first, first + 10 * pages + 11, first + 10 * pages + 22]
        assert token_ms(split([request(0, prompt, 3)], 1, link=SLOW)) == [expected]

    def test_a_latency_comes_on_top(self) -> None:
        link = dataclasses.replace(SLOW, latency_s=0.002)
        assert token_ms(split([request(0, 3, 3)], 1, link=link)) == [[16, 39, 50]]

    def test_a_single_token_needs_no_transfer(self) -> None:
        found = split([request(0, 3, 1)], 1, link=SLOW)
        assert token_ms(found) == [[16]]
        assert not found.deployed.transfers

    def test_its_sample_says_where_it_was_and_when_it_crossed(self) -> None:
        """Instance 0 prefills; the first that decodes is instance 1."""
        (row,) = make_rows(split([request(0, 5, 3)], 1, link=SLOW).traffic.samples)
        assert (row.prefilled_by, row.instance) == (0, 1)
        assert (row.kv_sent_s, row.kv_arrived_s) == (pytest.approx(0.020), pytest.approx(0.040))

    def test_a_token_that_chunks_leave_over_is_prefilled_too(self) -> None:
        """9 tokens in chunks of 8: 26 ms and 12 ms, the second decided beside the first."""
        assert token_ms(split([request(0, 9, 2)], 1)) == [[38, 49]]


class TestLinks:
    def test_transfers_of_an_instance_go_one_after_another(self) -> None:
        """
        Both are prefilled in one step of 10 + 2 · 6 = 22 ms. A crosses until 32, B until 42. A's two steps are decided
        at 32, and end at 43 and 54; B joins the step that is decided at 43: 54 + 11.
        """
        found = split([request(0, 3, 3), request(1, 3, 3)], 2, link=SLOW)
        assert token_ms(found) == [[22, 43, 54], [22, 65, 76]]
        assert [round(t.begin_s * 1e3) for t in found.deployed.transfers] == [22, 32]

    def test_each_instance_that_prefills_has_its_own_link(self) -> None:
        """As does each that decodes: two of each cross at the same time."""
        found = split([request(0, 3, 2), request(1, 3, 2)], 2, ratio=(2, 2), link=SLOW)
        assert token_ms(found) == [[16, 37], [16, 37]]

    def test_an_instance_receives_from_one_at_a_time(self) -> None:
        """Prefilled on two instances by 16 ms; one that decodes takes A until 26 and B until 36. A's step is over at 37."""
        found = split([request(0, 3, 2), request(1, 3, 2)], 2, ratio=(2, 1), link=SLOW)
        assert [(t.source, round(t.end_s * 1e3)) for t in found.deployed.transfers] == [(0, 26), (1, 36)]
        assert token_ms(found)[0] == [16, 37]

    def test_each_attention_replica_has_its_own_link(self) -> None:
        found = split([request(0, 3, 2), request(1, 3, 2)], 2, link=SLOW, replicas=2)
        assert token_ms(found) == [[16, 37], [16, 37]]


class TestSteps:
    def test_no_chunk_makes_a_running_request_wait(self) -> None:
        """
        B's prompt of 40 comes while A decodes, in five chunks of 26 ms. Where one instance does both, A waits for them
        (10 + 1 + 2 · 8 ms a step); apart, each of its gaps but the first is a step of one row.
        """
        requests = [request(0, 3, 16, 0.0), request(1, 40, 1, 0.03)]
        gaps = [round(b - a, 6) for a, b in itertools.pairwise(token_ms(split(requests))[0])]
        assert set(gaps) == {11}
        both = replay_requests(requests, Scheduler(config(pages=60)), None, Fixed()).traffic.samples[0].token_s
        assert max(b - a for a, b in itertools.pairwise(both)) == pytest.approx(0.027)

    def test_a_step_has_chunks_or_decodes(self) -> None:
        times = Seen()
        split(load(1, 40), 8, ratio=(2, 2), times=times)
        assert not any(r.chunks and r.decodes for step in times.steps for r in step.replicas)

    def test_prefill_bounds_what_it_bounds(self) -> None:
        """Prompts of a whole chunk: a first token each 26 ms from each instance that prefills, whoever waits."""
        for instances in (1, 2):
            found = split([request(i, 8, 2) for i in range(24)], 12, ratio=(instances, 1))
            firsts = sorted(round(ms[0], 3) for ms in token_ms(found))
            assert firsts == [26 * (1 + i // instances) for i in range(24)]

    def test_decode_bounds_what_it_bounds(self) -> None:
        """
        4 slots: steps of 4 rows take 14 ms, so no instance gives more than 4 tokens in them, and close to as many: it
        fills while one prompt after the other is prefilled.
        """
        for instances in (1, 2):
            found = split([request(i, 1, 64) for i in range(32)], 16, ratio=(1, instances))
            decoded = 32 * 63
            assert 0.9 < decoded / (found.end_s / 0.014 * 4 * instances) <= 1
            assert min(found.busy_s[1:]) / found.end_s > 0.95


class TestRoom:
    """4 pages of KV on each instance: 16 tokens. Prompts of 8 take two; of 7 answers the last token is not stored."""

    def test_who_finds_no_room_waits_where_it_was_prefilled(self) -> None:
        """
        B would need two pages and leave one to A, which has two of four: it crosses when A's last token was read. C is
        prefilled in what A left, and D, for which B and C leave nothing, only once B has gone.
        """
        found = split([request(i, 8, 7) for i in range(4)], 4, pages=5, link=SLOW)
        a, b, c, d = found.traffic.samples
        crossed = [s.sequence.transfer for s in (a, b, c, d)]
        assert crossed[1].begin_s == a.token_s[-1]
        assert crossed[1].begin_s > crossed[1].ready_s
        assert c.token_s[0] < a.token_s[-1] < crossed[1].end_s < d.token_s[0]
        assert [s.is_finished for s in (a, b, c, d)] == [True] * 4

    def test_another_instance_that_decodes_has_room(self) -> None:
        found = split([request(i, 8, 7) for i in range(2)], 2, ratio=(1, 2), pages=5)
        assert [t.begin_s - t.ready_s for t in found.deployed.transfers] == [0, 0]
        assert [s.sequence.instance for s in found.traffic.samples] == [1, 2]

    def test_who_loses_its_kv_is_prefilled_anew_and_crosses_again(self) -> None:
        """
        6 pages: when B comes with two, A has three, and both soon need more. B, which came last, is prefilled anew with
        the one token that it had, 9 tokens in all, and crosses when A has finished. All of its tokens come, each once.
        """
        found = split([request(0, 8, 9), request(1, 8, 9)], 2, pages=7)
        a, b = found.traffic.samples
        assert (a.sequence.preemptions, b.sequence.preemptions) == (0, 1)
        assert [t.sent_bytes for t in found.deployed.transfers] == [2000, 2000, 3000]
        assert found.deployed.transfers[2].begin_s == a.token_s[-1]
        assert [len(s.token_s) for s in (a, b)] == [9, 9]

    def test_what_can_never_fit_is_rejected(self) -> None:
        found = split([request(0, 9999, 2), request(1, 3, 2)], 1)
        assert [bool(s.rejected) for s in found.traffic.samples] == [True, False]


def known(order: int, tokens: int = 4) -> Sequence:
    """The prompt of a request is stored; its first token is sampled."""
    return Sequence(request(order, tokens, 9), order, computed=tokens, generated=1)


class TestOneAlone:
    """Instances by themselves."""

    def test_prompts_may_take_every_page_of_an_instance_that_prefills(self) -> None:
        """Four pages, 16 tokens: two prompts of 8 in one step, which ends at 10 + 2 · 16 ms. Nothing there grows."""
        found = split([request(0, 8, 2), request(1, 8, 2)], 2, pages=5, chunk=16)
        assert [ms[0] for ms in token_ms(found)] == [42, 42]

    def test_who_arrives_or_runs_on_an_instance_that_decodes_keeps_a_page_free(self) -> None:
        """Each request in a pool of 8 pages has its own page and one to grow by."""
        decodes = DecodeScheduler(config())
        (replica,) = decodes.replicas
        assert (decodes.find_able_replicas(32), decodes.find_able_replicas(33)) == ([replica], [])
        first = decodes.allocate_arriving(known(0), replica)
        assert (decodes.find_able_replicas(24), decodes.find_able_replicas(25)) == ([replica], [])
        decodes.start_request(first)
        assert (decodes.find_able_replicas(24), decodes.find_able_replicas(25)) == ([replica], [])
        decodes.allocate_arriving(known(1), replica)
        assert (decodes.find_able_replicas(16), decodes.find_able_replicas(17)) == ([replica], [])

    def test_without_a_slot_there_is_no_room(self) -> None:
        decodes = DecodeScheduler(config(max_requests=2))
        (replica,) = decodes.replicas
        for order in range(2):
            assert decodes.find_able_replicas(4) == [replica]
            decodes.allocate_arriving(known(order), replica)
        assert decodes.find_able_replicas(4) == []

    def test_whoever_arrives_runs_in_the_order_of_submission(self) -> None:
        """Who came last is preempted first, however its KV came."""
        decodes = DecodeScheduler(config())
        (replica,) = decodes.replicas
        expected = {order: decodes.allocate_arriving(known(order), replica) for order in (2, 0, 3, 1)}
        assert decodes.count_requests(replica) == 4
        for order in (2, 0, 3, 1):
            decodes.start_request(expected[order])
        assert [s.order for s in replica.running] == [0, 1, 2, 3]

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_an_instance_that_decodes_keeps_nothing_of_who_has_finished(self, prefix_cache: bool) -> None:
        """The cache is of those that prefill: their 9 tokens are there for the next turn, if they have one."""
        found = split([request(0, 9, 3)], 1, prefix_cache=prefix_cache)
        prefill, decode = (scheduler.replicas[0].cache.pages for scheduler in found.deployed.schedulers)
        assert (prefill > 0, decode) == (prefix_cache, 0)

    def test_those_that_lost_their_kv_are_prefilled_in_the_order_of_submission_before_all_others(self) -> None:
        deployed = Disaggregated(config(), 1, 1, AT_ONCE)
        deployed.submit(request(9, 3, 3))
        deployed.in_hand[1] = 3
        deployed.decodes[0].lost = [known(3), known(1), known(2)]
        deployed.handle_decision(1, 0.0)
        assert [s.request.number for s in deployed.prefills[0].waiting] == [1, 2, 3, 9]
        assert deployed.in_hand == [4, 0]

    @pytest.mark.parametrize(
        ("on_first", "on_second", "expected"),
        [
            ((0, 0), (0, 0), (1, 0)),
            ((0, 1), (0, 0), (2, 0)),
            ((1, 0), (0, 1), (1, 1)),
            ((2, 0), (1, 0), (2, 1)),
            ((0, 3), (1, 1), (2, 0)),
        ],
        ids=["all-empty", "fewer-there", "as-many", "one-fewer", "an-empty-replica-of-a-fuller-instance"],
    )
    def test_the_instance_with_the_fewest_requests_receives_and_there_the_replica_with_the_fewest(
        self, on_first: tuple[int, int], on_second: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        """Instances 1 and 2 decode with two replicas each, which have so many requests. In the last case instance 1 has an
        empty replica and three requests in all, instance 2 one on each of its replicas.
        """
        deployed = Disaggregated(config(replicas=2, pages=60), 1, 2, AT_ONCE)
        orders = itertools.count()
        for scheduler, counts in zip(deployed.decodes, (on_first, on_second), strict=True):
            for replica, count in zip(scheduler.replicas, counts, strict=True):
                for _ in range(count):
                    scheduler.start_request(scheduler.allocate_arriving(known(next(orders)), replica))
        deployed.in_hand[1:] = [sum(on_first), sum(on_second)]
        index, replica = deployed._choose_receiver(known(next(orders)))
        assert (index, replica.number) == expected

    def test_of_those_that_wait_for_a_link_the_one_that_waited_longest_is_first(self) -> None:
        """
        30 ms a page. A, prefilled by instance 0 at 16 ms, crosses until 46. B is ready on instance 1 at 27, and C behind A
        at 33: B crosses from 46 to 106 with two pages, and then C.
        """
        link = dataclasses.replace(SLOW, bytes_s=1e5 / 3)
        requests = [request(0, 3, 2, 0.0), request(1, 8, 2, 0.001), request(2, 3, 2, 0.017)]
        found = split(requests, ratio=(2, 1), link=link)
        crossed = [(t.source, round(t.ready_s * 1e3), round(t.begin_s * 1e3)) for t in found.deployed.transfers]
        assert crossed == [(0, 16, 16), (1, 27, 46), (0, 33, 106)]


RANDOM = range(60)


def random_split(seed: int, times: Fixed) -> tuple[ReplayResult, Disaggregated]:
    """A random load on random instances over a random link: little KV, few slots, with and without a prefix cache."""
    rng = np.random.default_rng(seed)
    setup = config(
        pages=int(rng.integers(9, 30)),
        replicas=int(rng.integers(1, 3)),
        max_requests=int(rng.integers(1, 6)),
        chunk=int(rng.choice([4, 8, 16])),
        policy=str(rng.choice(["mixed", "prefill-first"])),
        prefix_cache=bool(rng.integers(2)),
    )
    link = Link(bytes_s=float(rng.choice([1e4, 1e5, 1e9])), latency_s=float(rng.choice([0, 0.003])), page_bytes=1000)
    deployed = Disaggregated(setup, int(rng.integers(1, 4)), int(rng.integers(1, 4)), link)
    clients = int(rng.integers(1, 9)) if rng.integers(2) else None
    requests = load(seed, 40, rate=None if clients else float(rng.choice([2, 20, 200])))
    return replay_requests(requests, deployed, clients, times), deployed


class TestConservation:
    @pytest.mark.parametrize("seed", RANDOM)
    @pytest.mark.sample(4)
    def test_every_token_is_computed_once_and_served_once(self, seed: int) -> None:
        """
        Prompt tokens are in chunks or came from the prefix cache; output tokens are those of last chunks and of decodes.
        Of who lost its KV more was computed.
        """
        times = Seen()
        found, _ = random_split(seed, times)
        chunks: collections.Counter[int] = collections.Counter()
        sampled: collections.Counter[int] = collections.Counter()
        for part in (part for step in times.steps for part in step.replicas):
            for chunk in part.chunks:
                chunks[chunk.sequence.request.number] += chunk.tokens
            sampled.update(s.request.number for s in part.sampled_sequences)
        for sample in found.traffic.samples:
            if sample.rejected:
                continue
            number, sequence = sample.request.number, sample.sequence
            assert sampled[number] == len(sample.token_s) == sample.request.output_tokens
            assert sample.token_s == sorted(sample.token_s)
            computed = chunks[number] + sequence.cached - len(sample.request.prompt)
            assert computed == 0 or (computed > 0 and sequence.preemptions)

    @pytest.mark.parametrize("seed", RANDOM)
    def test_nothing_is_left_behind(self, seed: int) -> None:
        """No KV but the prefix cache's, which nobody has locked; all slots are free again."""
        _, deployed = random_split(seed, Fixed())
        assert set(deployed.in_hand) == {0}
        for scheduler in deployed.schedulers:
            assert not scheduler.unfinished
            for replica in scheduler.replicas:
                assert replica.allocator.used_pages == replica.cache.pages == replica.cache.evictable
                assert len(replica.slots) == scheduler.config.max_requests

    @pytest.mark.parametrize("seed", RANDOM)
    def test_links_are_never_shared(self, seed: int) -> None:
        """Each sender and each receiver has one transfer at a time, as long as its bytes take."""
        found, deployed = random_split(seed, Fixed())
        ends = collections.defaultdict(list)
        for t in found.deployed.transfers:
            ends[t.source].append(t)
            ends[t.target].append(t)
            assert t.ready_s <= t.begin_s
            assert t.end_s - t.begin_s == pytest.approx(deployed.link.compute_seconds(t.sent_bytes))
        if deployed.prefills[0].config.replicas == 1:
            for transfers in ends.values():
                ordered = sorted(transfers, key=lambda t: t.begin_s)
                assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(ordered))

    def test_the_same_load_gives_the_same_tokens_each_time(self) -> None:
        assert token_ms(random_split(7, Fixed())[0]) == token_ms(random_split(7, Fixed())[0])

    def test_a_limit_ends_it_with_each_request_once(self) -> None:
        """Whatever waits, is prefilled, crosses or decodes then."""
        found = split(load(1, 40), 12, link=SLOW, limit_s=0.2)
        numbers = [s.request.number for s in found.traffic.samples]
        assert len(set(numbers)) == len(numbers)
        assert {row.outcome for row in make_rows(found.traffic.samples)} == {"finished", "cancelled"}


class TestSessions:
    """Prompts and answers of 20 to 60 tokens, pages of PAGE."""

    def test_the_cache_of_those_that_prefill_has_prompts_and_no_answers(self) -> None:
        """What was answered lies where it was decoded: the next turn finds the whole pages of the prompt before it."""
        of = sessions(turns="3", requests=6)
        both = replay_requests(make_requests(of, VOCAB), Scheduler(virtual_serving.config(page_size=PAGE)), 1, Fixed())
        deployed = Disaggregated(virtual_serving.config(page_size=PAGE), 1, 1, AT_ONCE)
        apart = replay_requests(make_requests(of, VOCAB), deployed, 1, Fixed())
        before = 0
        for mine, theirs in zip(apart.traffic.samples, both.traffic.samples, strict=True):
            assert mine.request.number == theirs.request.number
            assert mine.cached == (before // PAGE * PAGE if mine.request.turn else 0)
            assert mine.cached <= theirs.cached
            before = len(mine.request.prompt)
        assert sum(s.cached for s in apart.traffic.samples) < sum(s.cached for s in both.traffic.samples)

    def test_turns_stay_on_the_instance_that_has_what_was_said(self) -> None:
        found = replay_requests(
            make_requests(sessions(turns="4", requests=24), VOCAB),
            Disaggregated(virtual_serving.config(page_size=PAGE), 3, 2, AT_ONCE),
            4,
            Fixed(),
        )
        homes = collections.defaultdict(set)
        for row in make_rows(found.traffic.samples):
            homes[row.session].add(row.prefilled_by)
        assert {len(of) for of in homes.values()} == {1}


class TestAlike:
    """Several instances that all do both."""

    @pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
    def test_one_is_what_it_is_alone(self, setup: Any) -> None:
        alone, one = (
            replay_requests(load(3, 40), of, 8, Fixed()) for of in (Scheduler(setup), Deployment([Scheduler(setup)]))
        )
        assert token_ms(one) == token_ms(alone)

    def test_requests_go_to_the_instance_with_the_fewest(self) -> None:
        """Two clients on two instances are each as if alone."""
        found = replay_requests(
            [request(0, 3, 3), request(1, 3, 3)], Deployment([Scheduler(config()) for _ in range(2)]), 2, Fixed()
        )
        assert token_ms(found) == [[16, 27, 38]] * 2
        assert [s.sequence.instance for s in found.traffic.samples] == [0, 1]

    def test_an_idle_instance_takes_what_comes_while_others_are_busy(self) -> None:
        """B comes at 5 ms, in the midst of A's step: 5 + 16."""
        requests = [request(0, 3, 3, 0.0), request(1, 3, 1, 0.005)]
        found = replay_requests(requests, Deployment([Scheduler(config()) for _ in range(2)]), None, Fixed())
        assert token_ms(found) == [[16, 27, 38], [21]]
