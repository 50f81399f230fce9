"""Test decisions of the scheduler. A virtual page is 2 rows · 2 ranks = 4 tokens, and a pool has eight of them.

A step is written as (numbers of the requests that decode, chunks as (number, first token, end)).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench.errors import UsageError
from dcpbench.points.names import PREFILL_FIRST
from dcpbench.points.point import Load, Point
from dcpbench.points.speculation import Speculation
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from tests.unit.serving_builder import make_config, make_request
from tests.unit.serving_simulation import make_signature

ROOT = Path(__file__).parents[2]
Decided = tuple[list[int], list[tuple[int, int, int]]]


def make_scheduler(*load, **changes) -> Scheduler:
    """Return a scheduler to which requests (prompt, output tokens) are submitted."""
    scheduler = Scheduler(make_config(**changes))
    for number, (prompt, output) in enumerate(load):
        assert scheduler.submit(make_request(number, prompt, output)) == ""
    return scheduler


def plan(scheduler: Scheduler, replica: int = 0) -> Decided | None:
    """Return the next step of a replica."""
    step = scheduler.plan_step()
    if step is None:
        return None
    todo = step.replicas[replica]
    return (
        [s.request.number for s in todo.decodes],
        [(c.sequence.request.number, c.start, c.stop) for c in todo.chunks],
    )


class TestChunks:
    def test_chunks_end_at_whole_pages_except_the_last_of_a_prompt(self) -> None:
        """Ten tokens a step are two pages of four; the prompt of 19 ends within its fifth page."""
        scheduler = make_scheduler((19, 1), chunk=10)
        assert [plan(scheduler) for _ in range(3)] == [([], [(0, 0, 8)]), ([], [(0, 8, 16)]), ([], [(0, 16, 19)])]
        assert plan(scheduler) is None

    def test_chunk_of_next_prompt_fills_remaining_token_budget(self) -> None:
        scheduler = make_scheduler((5, 1), (9, 1), chunk=10)
        assert plan(scheduler) == ([], [(0, 0, 5), (1, 0, 4)]), "five of ten tokens remain, a page and one token"
        assert plan(scheduler) == ([], [(1, 4, 9)])

    def test_remaining_budget_below_a_page_is_unused(self) -> None:
        scheduler = make_scheduler((5, 1), (5, 1), chunk=8)
        assert plan(scheduler) == ([], [(0, 0, 5)])
        assert plan(scheduler) == ([], [(1, 0, 5)])

    def test_single_last_prompt_token_is_a_decode_row_and_the_prompt_is_cached(self) -> None:
        """A prompt of 9 tokens has a chunk of 8. The second request finds both full pages."""
        scheduler = make_scheduler((list(range(9)), 2))
        assert [plan(scheduler) for _ in range(3)] == [([], [(0, 0, 8)]), ([0], []), ([0], [])]
        scheduler.submit(make_request(1, [*range(9), 9], 1))
        assert plan(scheduler) == ([], [(1, 8, 10)])

    def test_request_with_one_token_in_and_one_out_takes_one_step(self) -> None:
        scheduler = make_scheduler((1, 1))
        step = scheduler.plan_step()
        assert step is not None
        assert [(c.start, c.stop, c.samples) for c in step.replicas[0].chunks] == [(0, 1, True)]
        assert [s.request.number for s in step.finished] == [0]
        assert not scheduler.unfinished

    def test_chunk_smaller_than_a_page_is_refused(self) -> None:
        with pytest.raises(UsageError, match=re.escape("use --prefill chunk=8 or more, or a smaller --page-size")):
            make_config(chunk=3, replicas=2)


class TestPolicies:
    def test_mixed_policy_decodes_in_steps_with_prompts(self) -> None:
        scheduler = make_scheduler((4, 4))
        assert plan(scheduler) == ([], [(0, 0, 4)])
        scheduler.submit(make_request(1, 12, 1))
        assert [plan(scheduler) for _ in range(3)] == [([0], [(1, 0, 8)]), ([0], [(1, 8, 12)]), ([0], [])]

    def test_prefill_first_delays_decodes_while_there_are_prompts(self) -> None:
        scheduler = make_scheduler((4, 4), policy=PREFILL_FIRST)
        assert plan(scheduler) == ([], [(0, 0, 4)])
        scheduler.submit(make_request(1, 12, 1))
        assert [plan(scheduler) for _ in range(3)] == [([], [(1, 0, 8)]), ([], [(1, 8, 12)]), ([0], [])]

    def test_prefill_first_delays_decodes_while_any_replica_has_prompts(self) -> None:
        """All replicas run the same step, and a graph can run it only if none prefills."""
        scheduler = make_scheduler((4, 4), (12, 4), policy=PREFILL_FIRST, replicas=2)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.stop for c in r.chunks] for r in step.replicas] == [[4], [8]]
        assert plan(scheduler) == ([], [])
        assert plan(scheduler) == ([0], [])


class TestAdmission:
    def test_request_goes_to_the_replica_with_the_fewest_requests(self) -> None:
        scheduler = make_scheduler(*[(4, 2)] * 5, replicas=3, chunk=8)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1, 4], [2]]

    def test_request_goes_to_the_replica_with_most_free_pages_if_counts_are_equal(self) -> None:
        """Request 0 holds four pages of replica 0, and request 1 one page of replica 1: request 2 joins the latter."""
        scheduler = make_scheduler((16, 9), (4, 9), (4, 1), replicas=2, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0], [1, 2]]

    def test_fewest_requests_take_precedence_over_most_free_pages(self) -> None:
        """Replica 0 has request 0 with four of eight pages, replica 1 requests 1 and 2 with one page each. Request 3
        joins replica 0, which has fewer requests, although replica 1 has more free pages.
        """
        scheduler = make_scheduler((16, 9), (4, 9), (4, 9), (4, 1), replicas=2, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1, 2]]

    def test_first_of_equal_replicas_takes_the_next_request(self) -> None:
        """The fourth of four equal requests on three replicas joins replica 0."""
        scheduler = make_scheduler(*[(4, 9)] * 4, replicas=3, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1], [2]]

    def test_replicas_divide_the_chunk_and_the_requests_of_a_point(self) -> None:
        """Each of two replicas prefills 32 of 64 chunk tokens; three of five clients are at one of them."""
        load = Load(requests=9, input_tokens="4", output_tokens="2", chunk=64)
        point = Point(
            model="tiny",
            tp=4,
            dp=2,
            dcp=2,
            workload="serve",
            concurrency=5,
            context=6,
            backend="reference",
            dtype="fp32",
            page_size=2,
            load=load,
        )
        found = SchedulerConfig.from_point(point, pages=9, max_context=64)
        assert (found.replicas, found.chunk, found.max_requests) == (2, 32, 3)

    def test_each_running_request_reserves_a_page(self) -> None:
        """There are eight pages. 16 tokens take four, and one is reserved for their next; 13 tokens need four, and three are
        free. Twelve tokens would fit.
        """
        scheduler = make_scheduler((16, 9), (13, 1), chunk=64)
        assert plan(scheduler) == ([], [(0, 0, 16)])
        fits = make_scheduler((16, 9), (12, 1), chunk=64)
        assert plan(fits) == ([], [(0, 0, 16), (1, 0, 12)])

    def test_small_request_does_not_overtake_a_large_one(self) -> None:
        """Requests are admitted first come, first served, so that a large one never starves."""
        scheduler = make_scheduler((16, 9), (20, 1), (1, 1), chunk=64)
        assert plan(scheduler) == ([], [(0, 0, 16)])
        assert plan(scheduler) == ([0], [])

    def test_request_that_fills_the_whole_kv_cache_is_served(self) -> None:
        """Eight pages hold 32 tokens; the last sampled token is never stored."""
        scheduler = make_scheduler((20, 13), chunk=64)
        while scheduler.plan_step():
            pass
        assert (scheduler.unfinished, scheduler.steps) == ([], 13)

    def test_request_larger_than_the_kv_cache_is_rejected_with_size_and_limit(self) -> None:
        """The 20 + 14 - 1 = 33 tokens are one more than eight pages hold; the other request is served."""
        scheduler = make_scheduler((4, 1))
        assert scheduler.submit(make_request(7, 20, 14)) == (
            "request 7 has 20 prompt and 14 output tokens and the KV cache of a replica holds 32 tokens; "
            "give more with --kv-memory or --dcp"
        )
        assert plan(scheduler) == ([], [(0, 0, 4)])

    def test_request_longer_than_max_context_is_rejected(self) -> None:
        """Rows of 16 tokens serve 17 in all, as the last one is not stored."""
        scheduler = make_scheduler((8, 9), max_context=16)
        reason = scheduler.submit(make_request(7, 9, 9))
        assert "request 7 has 9 prompt and 9 output tokens and the engine was built for 17 in all" in reason

    def test_request_without_tokens_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="request 0 has no prompt or no output"):
            make_scheduler((0, 1))
        with pytest.raises(ValueError, match="request 0 has no prompt or no output"):
            make_scheduler((1, 0))


class TestTable:
    def test_table_write_covers_whole_pages_up_to_the_row_length(self) -> None:
        """Five tokens take two pages; the row of the table has six columns."""
        scheduler = make_scheduler((5, 2), max_context=6)
        step = scheduler.plan_step()
        assert step is not None
        (write,) = step.replicas[0].table
        assert (write.slot, write.start, write.locs.tolist()) == (1, 0, [4, 5, 6, 7, 8, 9])

    def test_table_write_of_a_decode_ends_at_the_row_length(self) -> None:
        """The row of six columns has two of the second page of four tokens."""
        scheduler = make_scheduler((4, 3), max_context=6)
        writes = []
        while step := scheduler.plan_step():
            writes += [(w.start, len(w.locs)) for w in step.replicas[0].table]
        assert writes == [(0, 4), (4, 2)]

    def test_decode_writes_the_table_only_at_the_start_of_a_page(self) -> None:
        """Tokens 4 … 7 are in the second page, and token 8 begins the third."""
        scheduler = make_scheduler((4, 6))
        writes = []
        while step := scheduler.plan_step():
            writes.append([(w.start, len(w.locs)) for w in step.replicas[0].table])
        assert writes == [[(0, 4)], [(4, 4)], [], [], [], [(8, 4)]]


class TestPreemption:
    LOAD = ((12, 9), (12, 9))
    """Two requests of 12 prompt tokens (three pages), each of which finally stores 20 tokens (five pages)."""

    def test_latest_request_is_preempted_and_recomputes_all_tokens(self) -> None:
        """Each request takes three of 9 pages and then a fourth for tokens 12 … 15. For token 16, request 0 takes the
        last page, so that request 1 is preempted and frees four; after request 0 has finished, it recomputes 12 + 5
        tokens.
        """
        scheduler = make_scheduler(*self.LOAD, pages=10, chunk=24, prefix_cache=False)
        assert plan(scheduler) == ([], [(0, 0, 12), (1, 0, 12)])
        assert [plan(scheduler) for _ in range(4)] == [([0, 1], [])] * 4
        step = scheduler.plan_step()
        assert step is not None
        assert (step.preempted, [s.request.number for s in step.replicas[0].decodes]) == (1, [0])
        assert [plan(scheduler) for _ in range(3)] == [([0], [])] * 3, "tokens 17 … 19, the last of 20"
        assert plan(scheduler) == ([], [(1, 0, 17)])
        assert [plan(scheduler) for _ in range(4)] == [([1], []), ([1], []), ([1], []), None]

    def test_preempted_request_reuses_its_cached_prompt(self) -> None:
        """The three pages of the prompt stay in the cache: request 0 takes only the freed fourth page."""
        scheduler = make_scheduler(*self.LOAD, pages=10, chunk=24)
        for _ in range(9):
            scheduler.plan_step()
        (again,) = scheduler.unfinished
        assert plan(scheduler) == ([], [(1, 12, 17)])
        assert (again.preemptions, again.cached) == (1, 0), "the cache had nothing when it was admitted first"

    def test_new_requests_wait_behind_a_preempted_one_on_its_replica_only(self) -> None:
        """Request 1 has the second replica for itself; request 3 joins it there, although the first replica has more
        free pages.
        """
        scheduler = make_scheduler(
            self.LOAD[0], (16, 21), self.LOAD[1], replicas=2, pages=10, chunk=24, prefix_cache=False
        )
        while not (step := scheduler.plan_step()).preempted:
            pass
        scheduler.submit(make_request(3, 1, 1))
        assert scheduler.replicas[0].available_pages > scheduler.replicas[1].available_pages
        step = scheduler.plan_step()
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[], [3]]


class TestPrefixCache:
    def test_at_least_one_token_of_a_cached_prompt_is_computed(self) -> None:
        """Eight tokens are two cached pages; the hit is cut to one page, since the last token has to be computed."""
        scheduler = make_scheduler((list(range(8)), 1))
        plan(scheduler)
        scheduler.submit(make_request(1, list(range(8)), 1))
        assert plan(scheduler) == ([], [(1, 4, 8)])

    def test_prompt_adds_its_new_pages_to_the_cache(self) -> None:
        """The first prompt adds one page; the second finds it and adds its own, which the third finds, too."""
        scheduler = make_scheduler(([1, 2, 3, 4, 5], 1))
        assert plan(scheduler) == ([], [(0, 0, 5)])
        scheduler.submit(make_request(1, [1, 2, 3, 4, 6, 7, 8, 9, 10], 1))
        assert plan(scheduler) == ([], [(1, 4, 9)])
        scheduler.submit(make_request(2, [1, 2, 3, 4, 6, 7, 8, 9, 11], 1))
        assert plan(scheduler) == ([], [(2, 8, 9)])

    def test_prompts_of_the_same_step_do_not_share_pages(self) -> None:
        """Neither request can read the other's pages in the step that writes them."""
        scheduler = make_scheduler((list(range(8)), 2), (list(range(8)), 2), chunk=16)
        assert plan(scheduler) == ([], [(0, 0, 8), (1, 0, 8)])

    def test_request_with_duplicate_pages_moves_to_the_cached_ones(self) -> None:
        """Request 0 has pages 1 and 2; request 1 has 3 and 4, which are free again after the step."""
        scheduler = make_scheduler((list(range(8)), 3), (list(range(8)), 3), chunk=16)
        scheduler.plan_step()
        assert scheduler.replicas[0].allocator.used_pages == 2
        step = scheduler.plan_step()
        assert step is not None
        moved = step.replicas[0].table[0]
        assert (moved.slot, moved.start, moved.locs.tolist()) == (2, 0, [*range(4, 12)])

    def test_cached_pages_of_finished_requests_are_evicted_for_new_ones(self) -> None:
        """Seven full pages of a prompt of 28 stay; the next prompt needs all eight."""
        scheduler = make_scheduler((28, 1), chunk=64)
        plan(scheduler)
        assert scheduler.replicas[0].cache.pages == 7
        scheduler.submit(make_request(1, 30, 3))
        assert plan(scheduler) == ([], [(1, 0, 30)])

    def test_pages_that_the_next_request_would_reuse_are_evicted_last(self) -> None:
        """Prompt A with three pages and B with two are cached, and request 2 takes the last three of eight. It grows by
        two pages, for which B is evicted though A is older, because request 3, which begins like A, waits and was
        looked up at each step.
        """
        a, b = list(range(12)), list(range(20, 28))
        scheduler = make_scheduler((a, 1), (b, 1), (11, 9), max_requests=2, chunk=16)
        assert [plan(scheduler)[1] for _ in range(2)] == [[(0, 0, 12), (1, 0, 4)], [(1, 4, 8), (2, 0, 11)]]
        scheduler.submit(make_request(3, [*a, *range(50, 66)], 1))
        assert [plan(scheduler) for _ in range(8)] == [([2], [])] * 8
        assert plan(scheduler) == ([], [(3, 12, 28)])

    def test_nothing_is_cached_without_the_prefix_cache(self) -> None:
        scheduler = make_scheduler((28, 1), chunk=64, prefix_cache=False)
        plan(scheduler)
        assert scheduler.replicas[0].allocator.used_pages == 0


class TestCancel:
    def test_cancel_frees_all_pages_and_slots(self) -> None:
        """One request runs, one is preempted, and one waits; cached pages stay."""
        scheduler = make_scheduler(*TestPreemption.LOAD, (28, 1), pages=10, chunk=24)
        while not scheduler.plan_step().preempted:
            pass
        assert [s.request.number for s in scheduler.cancel()] == [0, 1, 2]
        assert not scheduler.unfinished
        replica = scheduler.replicas[0]
        assert replica.allocator.used_pages == replica.cache.pages == replica.cache.evictable
        assert sorted(replica.slots) == [1, 2, 3, 4]

    def test_cancel_drops_pending_table_writes(self) -> None:
        """The table row belongs to another request in the next step."""
        scheduler = make_scheduler((list(range(8)), 3), (list(range(8)), 3), chunk=16)
        scheduler.plan_step()
        scheduler.cancel()
        scheduler.submit(make_request(2, 4, 1))
        step = scheduler.plan_step()
        assert step is not None
        assert [w.slot for w in step.replicas[0].table] == [step.replicas[0].chunks[0].slot]


def collect_steps(shift: int) -> list[object]:
    """Return the steps of prompts that share pages, on two replicas with too few slots; `shift` is added to token ids."""
    prompts = [list(range(9)), [*range(8), 50, 51], list(range(6)), [*range(8), 50, 51], list(range(30, 50))]
    load = [([t + shift for t in prompt], 9) for prompt in prompts]
    scheduler = make_scheduler(*load, max_requests=3, replicas=2)
    out = []
    while step := scheduler.plan_step():
        out.append(make_signature(step))
    return out


class TestRanksAgree:
    """Test that schedulers on all ranks decide the same without communication."""

    @pytest.mark.parametrize("shift", [1, 100_000])
    def test_decisions_do_not_depend_on_token_ids(self, shift: int) -> None:
        """Other token ids with the same equalities give the same steps. Sampled tokens are never used."""
        assert collect_steps(0) == collect_steps(shift)
        assert len(collect_steps(0)) > 10

    def test_decisions_do_not_depend_on_the_hash_seed(self) -> None:
        """Sets and dicts of strings have another order with another PYTHONHASHSEED."""
        code = "from tests.unit.test_scheduler import collect_steps; print(collect_steps(0))"
        outputs = [
            subprocess.run(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=os.environ | {"PYTHONHASHSEED": seed},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for seed in ("1", "2")
        ]
        assert outputs[0] == outputs[1] == f"{collect_steps(0)}\n"


class TestDrafts:
    """Test steps that verify three drafts; u < 0.85, 0.51 and 0.204 accepts one, two and three of them."""

    DRAFTS = Speculation(3, (0.85, 0.6, 0.4))

    def draw(self, number: int, steps: int) -> list[int]:
        """Return the numbers of accepted drafts in the first steps of a request."""
        return [self.DRAFTS.count_accepted(0, number, step) for step in range(steps)]

    def test_step_delivers_the_accepted_drafts_and_one_token(self) -> None:
        """The step of the prompt yields the first token, and the last step yields no more than the answer lacks."""
        scheduler = make_scheduler((3, 12), speculation=self.DRAFTS)
        assert plan(scheduler) == ([], [(0, 0, 3)])
        stored, positions, left = 3, [], 11
        for accepted in self.draw(0, 11):
            step = scheduler.plan_step()
            assert step is not None
            (todo,) = step.replicas
            assert (todo.positions, todo.accepted, todo.delivered) == ([stored], [accepted], [min(accepted + 1, left)])
            assert (todo.tokens, todo.queries) == (4, 4)
            stored, left = stored + todo.delivered[0], left - todo.delivered[0]
            positions += todo.positions
            if not left:
                break
        assert [s.request.number for s in step.finished] == [0]
        assert len(positions) < 11, "fewer steps than tokens"

    def test_drafts_have_pages_before_they_are_verified(self) -> None:
        """Five tokens lie on two pages of four; four rows from token 5 on reach into a third page, whatever is
        accepted.
        """
        scheduler = make_scheduler((5, 9), speculation=self.DRAFTS)
        plan(scheduler)
        step = scheduler.plan_step()
        assert step is not None
        (sequence,) = step.replicas[0].decodes
        assert sequence.allocation is not None
        assert len(sequence.allocation.pages) == 3
        assert [(w.start, len(w.locs)) for w in step.replicas[0].table] == [(8, 4)]

    def test_request_without_kv_capacity_for_drafts_is_rejected(self) -> None:
        """Eight pages hold 32 tokens: 20 in and 10 out are 29 rows, and drafts need 3 more. One token more does not
        fit.
        """
        scheduler = make_scheduler(speculation=self.DRAFTS)
        assert scheduler.submit(make_request(0, 20, 10)) == ""
        assert "the KV cache of a replica holds 32 tokens" in scheduler.submit(make_request(1, 20, 11))

    def test_accepted_drafts_of_a_request_do_not_depend_on_others(self) -> None:
        """The request runs alone, and after two others that take all slots but one."""

        def collect(*before: tuple[int, int]) -> list[int]:
            scheduler = Scheduler(make_config(speculation=self.DRAFTS, max_requests=3))
            for number, (prompt, output) in enumerate(before):
                scheduler.submit(make_request(number, prompt, output))
            scheduler.submit(make_request(7, 2, 9))
            found = []
            while step := scheduler.plan_step():
                todo = step.replicas[0]
                found += [n for s, n in zip(todo.decodes, todo.accepted, strict=True) if s.request.number == 7]
            return found

        alone = collect()
        assert alone == collect((2, 5), (3, 6)) == self.draw(7, len(alone))
