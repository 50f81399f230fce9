"""Disaggregated and replicated instances on one clock. A step of Fixed takes 10 ms, plus 1 ms for each decode row and 2
ms for each token of a chunk; a page has 4 tokens and is sent as 1,000 bytes.
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
from tests.unit.serving_builder import make_config, make_request
from tests.unit.test_replay import SETUPS, Fixed, load
from tests.unit.test_sessions import PAGE, VOCAB, make_load

if TYPE_CHECKING:
    from dcpbench.serving.requests import ServeRequest, Step

AT_ONCE = Link(bytes_s=math.inf, page_bytes=1000)
SLOW = Link(bytes_s=1e5, page_bytes=1000)  # a page takes 10 ms


@dataclasses.dataclass
class RecordingFixed(Fixed):
    """A Fixed that records all steps that it ran."""

    steps: list[Step] = dataclasses.field(default_factory=list)

    def predict_duration_ms(self, step: Step, _heat: float = 0.0) -> float:
        self.steps.append(step)
        return super().predict_duration_ms(step, _heat)


def replay_disaggregated(
    requests: list[ServeRequest],
    clients: int | None = None,
    *,
    ratio: tuple[int, int] = (1, 1),
    link: Link = AT_ONCE,
    times: Fixed | None = None,
    limit_s: float = math.inf,
    **changes: Any,
) -> ReplayResult:
    """Replay the requests with these numbers of prefill and decode instances, each with 59 pages."""
    deployed = Disaggregated(make_config(**({"pages": 60} | changes)), *ratio, link)
    return replay_requests(requests, deployed, clients, times or Fixed(), limit_s)


def get_token_ms(found: ReplayResult) -> list[list[float]]:
    """Return the time of each token of each request."""
    return [[round(t * 1e3, 6) for t in sample.token_s] for sample in found.traffic.samples]


class TestOneRequest:
    """A prompt of 3 is prefilled in 10 + 2 · 3 = 16 ms; each further token takes 10 + 1."""

    def test_instant_link_gives_the_times_of_a_single_instance(self) -> None:
        alone = replay_requests([make_request(0, 3, 3)], Scheduler(make_config(pages=60)), 1, Fixed())
        assert get_token_ms(replay_disaggregated([make_request(0, 3, 3)], 1)) == get_token_ms(alone) == [[16, 27, 38]]

    @pytest.mark.parametrize(("prompt", "pages"), [(3, 1), (4, 1), (5, 2), (8, 2)])
    def test_first_gap_is_longer_by_the_transfer_of_its_pages(self, prompt: int, pages: int) -> None:
        """The first token comes from the prefill instance, each page takes 10 ms, and nothing else changes."""
        first = 10 + 2 * prompt
        expected = [first, first + 10 * pages + 11, first + 10 * pages + 22]
        assert get_token_ms(replay_disaggregated([make_request(0, prompt, 3)], 1, link=SLOW)) == [expected]

    def test_latency_is_added_to_the_transfer(self) -> None:
        link = dataclasses.replace(SLOW, latency_s=0.002)
        assert get_token_ms(replay_disaggregated([make_request(0, 3, 3)], 1, link=link)) == [[16, 39, 50]]

    def test_a_single_token_needs_no_transfer(self) -> None:
        found = replay_disaggregated([make_request(0, 3, 1)], 1, link=SLOW)
        assert get_token_ms(found) == [[16]]
        assert not found.deployed.transfers

    def test_sample_has_instances_and_times_of_the_transfer(self) -> None:
        """Instance 0 prefills, and instance 1 is the first that decodes."""
        (row,) = make_rows(replay_disaggregated([make_request(0, 5, 3)], 1, link=SLOW).traffic.samples)
        assert (row.prefilled_by, row.instance) == (0, 1)
        assert (row.kv_sent_s, row.kv_arrived_s) == (pytest.approx(0.020), pytest.approx(0.040))

    def test_last_token_of_a_prompt_is_prefilled_in_its_own_chunk(self) -> None:
        """9 tokens in chunks of 8 take 26 ms and 12 ms; the second step has no decodes."""
        assert get_token_ms(replay_disaggregated([make_request(0, 9, 2)], 1)) == [[38, 49]]


class TestLinks:
    def test_transfers_of_an_instance_are_sequential(self) -> None:
        """Both requests are prefilled in one step of 10 + 2 · 6 = 22 ms. A's transfer ends at 32, B's at 42. A's two
        steps begin at 32 and end at 43 and 54; B joins the step that begins at 43: 54 + 11.
        """
        found = replay_disaggregated([make_request(0, 3, 3), make_request(1, 3, 3)], 2, link=SLOW)
        assert get_token_ms(found) == [[22, 43, 54], [22, 65, 76]]
        assert [round(t.begin_s * 1e3) for t in found.deployed.transfers] == [22, 32]

    def test_each_prefill_and_decode_instance_has_its_own_link(self) -> None:
        """With two of each, two transfers run at the same time."""
        found = replay_disaggregated([make_request(0, 3, 2), make_request(1, 3, 2)], 2, ratio=(2, 2), link=SLOW)
        assert get_token_ms(found) == [[16, 37], [16, 37]]

    def test_decode_instance_receives_one_transfer_at_a_time(self) -> None:
        """Two instances have prefilled by 16 ms; one decode instance receives A until 26 and B until 36. A's step ends
        at 37.
        """
        found = replay_disaggregated([make_request(0, 3, 2), make_request(1, 3, 2)], 2, ratio=(2, 1), link=SLOW)
        assert [(t.source, round(t.end_s * 1e3)) for t in found.deployed.transfers] == [(0, 26), (1, 36)]
        assert get_token_ms(found)[0] == [16, 37]

    def test_each_attention_replica_has_its_own_link(self) -> None:
        found = replay_disaggregated([make_request(0, 3, 2), make_request(1, 3, 2)], 2, link=SLOW, replicas=2)
        assert get_token_ms(found) == [[16, 37], [16, 37]]


class TestSteps:
    def test_chunks_do_not_delay_decodes_of_other_instances(self) -> None:
        """B's prompt of 40 tokens arrives while A decodes, in five chunks of 26 ms. On a single instance A waits for
        them (10 + 1 + 2 · 8 ms a step); here all of its gaps but the first are steps of one row.
        """
        requests = [make_request(0, 3, 16, 0.0), make_request(1, 40, 1, 0.03)]
        gaps = [round(b - a, 6) for a, b in itertools.pairwise(get_token_ms(replay_disaggregated(requests))[0])]
        assert set(gaps) == {11}
        both = replay_requests(requests, Scheduler(make_config(pages=60)), None, Fixed()).traffic.samples[0].token_s
        assert max(b - a for a, b in itertools.pairwise(both)) == pytest.approx(0.027)

    def test_a_step_has_chunks_or_decodes(self) -> None:
        times = RecordingFixed()
        replay_disaggregated(load(1, 40), 8, ratio=(2, 2), times=times)
        assert not any(r.chunks and r.decodes for step in times.steps for r in step.replicas)

    def test_first_tokens_are_limited_by_prefill_instances(self) -> None:
        """Prompts have a whole chunk: each prefill instance gives a first token every 26 ms."""
        for instances in (1, 2):
            found = replay_disaggregated([make_request(i, 8, 2) for i in range(24)], 12, ratio=(instances, 1))
            firsts = sorted(round(ms[0], 3) for ms in get_token_ms(found))
            assert firsts == [26 * (1 + i // instances) for i in range(24)]

    def test_output_is_limited_by_decode_instances(self) -> None:
        """With 4 slots, steps of 4 rows take 14 ms, so that an instance gives at most 4 tokens in them, and nearly as
        many while prompts are prefilled one after another.
        """
        for instances in (1, 2):
            found = replay_disaggregated([make_request(i, 1, 64) for i in range(32)], 16, ratio=(1, instances))
            decoded = 32 * 63
            assert 0.9 < decoded / (found.end_s / 0.014 * 4 * instances) <= 1
            assert min(found.busy_s[1:]) / found.end_s > 0.95


class TestKvCapacity:
    """Each instance has 4 pages of KV: 16 tokens. Prompts of 8 take two; the last of 7 output tokens is not stored."""

    def test_request_without_decode_pages_waits_on_its_prefill_instance(self) -> None:
        """B would need two pages and leave one to A, which has two of four: its transfer begins when A's last token has
        been read. C is prefilled in the pages of A, and D, for which B and C leave none, only after B's transfer.
        """
        found = replay_disaggregated([make_request(i, 8, 7) for i in range(4)], 4, pages=5, link=SLOW)
        a, b, c, d = found.traffic.samples
        crossed = [s.sequence.transfer for s in (a, b, c, d)]
        assert crossed[1].begin_s == a.token_s[-1]
        assert crossed[1].begin_s > crossed[1].ready_s
        assert c.token_s[0] < a.token_s[-1] < crossed[1].end_s < d.token_s[0]
        assert [s.is_finished for s in (a, b, c, d)] == [True] * 4

    def test_request_goes_to_a_decode_instance_with_free_pages(self) -> None:
        found = replay_disaggregated([make_request(i, 8, 7) for i in range(2)], 2, ratio=(1, 2), pages=5)
        assert [t.begin_s - t.ready_s for t in found.deployed.transfers] == [0, 0]
        assert [s.sequence.instance for s in found.traffic.samples] == [1, 2]

    def test_preempted_request_is_prefilled_and_transferred_again(self) -> None:
        """A has three of 6 pages when B arrives with two, and both soon need more. B, the later one, is prefilled
        again with the token that it had, 9 tokens in all, and transferred when A has finished. All of its tokens come,
        each once.
        """
        found = replay_disaggregated([make_request(0, 8, 9), make_request(1, 8, 9)], 2, pages=7)
        a, b = found.traffic.samples
        assert (a.sequence.preemptions, b.sequence.preemptions) == (0, 1)
        assert [t.sent_bytes for t in found.deployed.transfers] == [2000, 2000, 3000]
        assert found.deployed.transfers[2].begin_s == a.token_s[-1]
        assert [len(s.token_s) for s in (a, b)] == [9, 9]

    def test_request_larger_than_an_instance_is_rejected(self) -> None:
        found = replay_disaggregated([make_request(0, 9999, 2), make_request(1, 3, 2)], 1)
        assert [bool(s.rejected) for s in found.traffic.samples] == [True, False]


def make_prefilled_sequence(order: int, tokens: int = 4) -> Sequence:
    """Return the sequence of a request with a stored prompt and a first token."""
    return Sequence(make_request(order, tokens, 9), order, computed=tokens, generated=1)


class TestInstances:
    """Tests of single instances and of the choice between them."""

    def test_prompts_may_take_every_page_of_a_prefill_instance(self) -> None:
        """Two prompts of 8 in one step take four pages, 16 tokens; the step ends at 10 + 2 · 16 ms. A prefill instance
        keeps no page to grow into.
        """
        found = replay_disaggregated([make_request(0, 8, 2), make_request(1, 8, 2)], 2, pages=5, chunk=16)
        assert [ms[0] for ms in get_token_ms(found)] == [42, 42]

    def test_each_request_of_a_decode_instance_reserves_a_page_to_grow(self) -> None:
        """Each request in a pool of 8 pages has its own page and one to grow into."""
        decodes = DecodeScheduler(make_config())
        (replica,) = decodes.replicas
        assert (decodes.find_able_replicas(32), decodes.find_able_replicas(33)) == ([replica], [])
        first = decodes.allocate_arriving(make_prefilled_sequence(0), replica)
        assert (decodes.find_able_replicas(24), decodes.find_able_replicas(25)) == ([replica], [])
        decodes.start_request(first)
        assert (decodes.find_able_replicas(24), decodes.find_able_replicas(25)) == ([replica], [])
        decodes.allocate_arriving(make_prefilled_sequence(1), replica)
        assert (decodes.find_able_replicas(16), decodes.find_able_replicas(17)) == ([replica], [])

    def test_decode_instance_without_a_free_slot_accepts_no_request(self) -> None:
        decodes = DecodeScheduler(make_config(max_requests=2))
        (replica,) = decodes.replicas
        for order in range(2):
            assert decodes.find_able_replicas(4) == [replica]
            decodes.allocate_arriving(make_prefilled_sequence(order), replica)
        assert decodes.find_able_replicas(4) == []

    def test_arriving_requests_run_in_order_of_submission(self) -> None:
        """The latest request is preempted first, independent of the order of transfers."""
        decodes = DecodeScheduler(make_config())
        (replica,) = decodes.replicas
        expected = {order: decodes.allocate_arriving(make_prefilled_sequence(order), replica) for order in (2, 0, 3, 1)}
        assert decodes.count_requests(replica) == 4
        for order in (2, 0, 3, 1):
            decodes.start_request(expected[order])
        assert [s.order for s in replica.running] == [0, 1, 2, 3]

    @pytest.mark.parametrize("prefix_cache", [True, False])
    def test_decode_instance_keeps_no_kv_of_finished_requests(self, prefix_cache: bool) -> None:
        """The prefix cache belongs to prefill instances: their 9 tokens remain for the next turn, if there is a cache."""
        found = replay_disaggregated([make_request(0, 9, 3)], 1, prefix_cache=prefix_cache)
        prefill, decode = (scheduler.replicas[0].cache.pages for scheduler in found.deployed.schedulers)
        assert (prefill > 0, decode) == (prefix_cache, 0)

    def test_preempted_requests_are_prefilled_first_in_order_of_submission(self) -> None:
        deployed = Disaggregated(make_config(), 1, 1, AT_ONCE)
        deployed.submit(make_request(9, 3, 3))
        deployed.in_hand[1] = 3
        deployed.decodes[0].lost = [make_prefilled_sequence(3), make_prefilled_sequence(1), make_prefilled_sequence(2)]
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
        ids=["all-empty", "first-has-more", "equal", "second-has-fewer", "fuller-instance-has-empty-replica"],
    )
    def test_receiver_is_the_instance_and_its_replica_with_fewest_requests(
        self, on_first: tuple[int, int], on_second: tuple[int, int], expected: tuple[int, int]
    ) -> None:
        """Instances 1 and 2 decode with two replicas each, which have these numbers of requests. In the last case
        instance 1 has an empty replica and three requests in all, and instance 2 one on each of its replicas.
        """
        deployed = Disaggregated(make_config(replicas=2, pages=60), 1, 2, AT_ONCE)
        orders = itertools.count()
        for scheduler, counts in zip(deployed.decodes, (on_first, on_second), strict=True):
            for replica, count in zip(scheduler.replicas, counts, strict=True):
                for _ in range(count):
                    scheduler.start_request(scheduler.allocate_arriving(make_prefilled_sequence(next(orders)), replica))
        deployed.in_hand[1:] = [sum(on_first), sum(on_second)]
        index, replica = deployed._choose_receiver(make_prefilled_sequence(next(orders)))
        assert (index, replica.number) == expected

    def test_request_that_waited_longest_for_a_link_is_transferred_first(self) -> None:
        """A page takes 30 ms. A, prefilled by instance 0 at 16 ms, is sent until 46. B is ready on instance 1 at 27,
        and C behind A at 33: B is sent from 46 to 106 with two pages, and then C.
        """
        link = dataclasses.replace(SLOW, bytes_s=1e5 / 3)
        requests = [make_request(0, 3, 2, 0.0), make_request(1, 8, 2, 0.001), make_request(2, 3, 2, 0.017)]
        found = replay_disaggregated(requests, ratio=(2, 1), link=link)
        crossed = [(t.source, round(t.ready_s * 1e3), round(t.begin_s * 1e3)) for t in found.deployed.transfers]
        assert crossed == [(0, 16, 16), (1, 27, 46), (0, 33, 106)]


RANDOM = range(60)


def replay_random(seed: int, times: Fixed) -> tuple[ReplayResult, Disaggregated]:
    """Replay a random load on random instances over a random link: little KV, few slots, with and without a prefix
    cache.
    """
    rng = np.random.default_rng(seed)
    setup = make_config(
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
        """Prompt tokens are in chunks or came from the prefix cache; output tokens are those of last chunks and of
        decodes. A preempted request has more computed tokens.
        """
        times = RecordingFixed()
        found, _ = replay_random(seed, times)
        chunks: collections.Counter[int] = collections.Counter()
        sampled: collections.Counter[int] = collections.Counter()
        for part in (part for step in times.steps for part in step.replicas):
            for chunk in part.chunks:
                chunks[chunk.sequence.request.number] += chunk.tokens
            sampled.update(s.request.number for s in part.sampled_sequences)
        served = [sample for sample in found.traffic.samples if not sample.rejected]
        assert served
        for sample in served:
            number, sequence = sample.request.number, sample.sequence
            assert sampled[number] == len(sample.token_s) == sample.request.output_tokens
            assert sample.token_s == sorted(sample.token_s)
            computed = chunks[number] + sequence.cached - len(sample.request.prompt)
            assert computed == 0 or (computed > 0 and sequence.preemptions)

    @pytest.mark.parametrize("seed", RANDOM)
    def test_pages_and_slots_are_free_after_a_replay(self, seed: int) -> None:
        """Only the unlocked pages of the prefix cache stay allocated."""
        _, deployed = replay_random(seed, Fixed())
        assert set(deployed.in_hand) == {0}
        for scheduler in deployed.schedulers:
            assert not scheduler.unfinished
            for replica in scheduler.replicas:
                assert replica.allocator.used_pages == replica.cache.pages == replica.cache.evictable
                assert len(replica.slots) == scheduler.config.max_requests

    @pytest.mark.parametrize("seed", RANDOM)
    def test_sender_and_receiver_have_one_transfer_at_a_time(self, seed: int) -> None:
        """Each transfer takes the time of its bytes."""
        found, deployed = replay_random(seed, Fixed())
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

    def test_same_load_gives_the_same_token_times(self) -> None:
        assert get_token_ms(replay_random(7, Fixed())[0]) == get_token_ms(replay_random(7, Fixed())[0])

    def test_time_limit_cancels_unfinished_requests(self) -> None:
        """Every request has one sample, although it waits, is prefilled, transferred or decoded at the limit."""
        found = replay_disaggregated(load(1, 40), 12, link=SLOW, limit_s=0.2)
        numbers = [s.request.number for s in found.traffic.samples]
        assert len(set(numbers)) == len(numbers)
        assert {row.outcome for row in make_rows(found.traffic.samples)} == {"finished", "cancelled"}

    @pytest.mark.parametrize("limit_s", [0.2, 0.21, 0.22, 0.23])
    def test_all_admitted_requests_have_an_instance_at_the_time_limit(self, limit_s: float) -> None:
        """This includes those that finish with a step that runs at the limit."""
        both = replay_requests(
            load(1, 40), Deployment([Scheduler(make_config(pages=60)) for _ in "12"]), 8, Fixed(), limit_s
        )
        for found in both, replay_disaggregated(load(1, 40), 8, limit_s=limit_s):
            rows = make_rows(found.traffic.samples)
            assert {row.outcome for row in rows} == {"finished", "cancelled"}
            assert all(row.instance is not None for row in rows)


class TestSessions:
    """Prompts and answers have 20 to 60 tokens, and pages have PAGE."""

    def test_prefill_cache_has_prompts_and_no_answers(self) -> None:
        """Answers are stored on the decode instance: the next turn finds the whole pages of the previous prompt."""
        conversations = make_load(turns="3", requests=6)
        both = replay_requests(
            make_requests(conversations, VOCAB), Scheduler(virtual_serving.make_config(page_size=PAGE)), 1, Fixed()
        )
        deployed = Disaggregated(virtual_serving.make_config(page_size=PAGE), 1, 1, AT_ONCE)
        apart = replay_requests(make_requests(conversations, VOCAB), deployed, 1, Fixed())
        before = 0
        for mine, theirs in zip(apart.traffic.samples, both.traffic.samples, strict=True):
            assert mine.request.number == theirs.request.number
            assert mine.cached == (before // PAGE * PAGE if mine.request.turn else 0)
            assert mine.cached <= theirs.cached
            before = len(mine.request.prompt)
        assert sum(s.cached for s in apart.traffic.samples) < sum(s.cached for s in both.traffic.samples)

    def test_turns_of_a_session_stay_on_one_prefill_instance(self) -> None:
        found = replay_requests(
            make_requests(make_load(turns="4", requests=24), VOCAB),
            Disaggregated(virtual_serving.make_config(page_size=PAGE), 3, 2, AT_ONCE),
            4,
            Fixed(),
        )
        homes = collections.defaultdict(set)
        for row in make_rows(found.traffic.samples):
            homes[row.session].add(row.prefilled_by)
        assert {len(instances) for instances in homes.values()} == {1}


class TestReplicatedInstances:
    """Several equal instances prefill and decode."""

    @pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
    def test_deployment_of_one_scheduler_equals_the_scheduler(self, setup: Any) -> None:
        alone, one = (
            replay_requests(load(3, 40), deployed, 8, Fixed())
            for deployed in (Scheduler(setup), Deployment([Scheduler(setup)]))
        )
        assert get_token_ms(one) == get_token_ms(alone)

    def test_requests_go_to_the_instance_with_fewest_requests(self) -> None:
        """Two clients on two instances do not affect each other."""
        found = replay_requests(
            [make_request(0, 3, 3), make_request(1, 3, 3)],
            Deployment([Scheduler(make_config()) for _ in range(2)]),
            2,
            Fixed(),
        )
        assert get_token_ms(found) == [[16, 27, 38]] * 2
        assert [s.sequence.instance for s in found.traffic.samples] == [0, 1]

    def test_idle_instance_takes_a_request_while_another_is_busy(self) -> None:
        """B arrives at 5 ms, during A's step: 5 + 16."""
        requests = [make_request(0, 3, 3, 0.0), make_request(1, 3, 1, 0.005)]
        found = replay_requests(requests, Deployment([Scheduler(make_config()) for _ in range(2)]), None, Fixed())
        assert get_token_ms(found) == [[16, 27, 38], [21]]
