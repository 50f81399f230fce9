"""What the scheduler decides, case by case. A virtual page is 2 rows · 2 ranks = 4 tokens, and a pool has eight.

A step is written as (numbers of those that decode, chunks as (number, first token, end)).
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
from tests.unit.serving_builder import config, request
from tests.unit.serving_simulation import signature

ROOT = Path(__file__).parents[2]
Decided = tuple[list[int], list[tuple[int, int, int]]]


def serve(*load, **changes) -> Scheduler:
    """A scheduler with requests (prompt, output tokens) submitted."""
    scheduler = Scheduler(config(**changes))
    for number, (prompt, output) in enumerate(load):
        assert scheduler.submit(request(number, prompt, output)) == ""
    return scheduler


def decide(scheduler: Scheduler, replica: int = 0) -> Decided | None:
    """The next step of a replica."""
    step = scheduler.plan_step()
    if step is None:
        return None
    todo = step.replicas[replica]
    return (
        [s.request.number for s in todo.decodes],
        [(c.sequence.request.number, c.start, c.stop) for c in todo.chunks],
    )


class TestChunks:
    def test_chunks_end_at_whole_pages_but_for_the_prompts_last(self) -> None:
        """Ten tokens a step are two pages of four; the prompt of 19 ends in the middle of its fifth page."""
        scheduler = serve((19, 1), chunk=10)
        assert [decide(scheduler) for _ in range(3)] == [([], [(0, 0, 8)]), ([], [(0, 8, 16)]), ([], [(0, 16, 19)])]
        assert decide(scheduler) is None

    def test_what_one_prompt_leaves_of_a_step_the_next_one_takes(self) -> None:
        scheduler = serve((5, 1), (9, 1), chunk=10)
        assert decide(scheduler) == ([], [(0, 0, 5), (1, 0, 4)]), "of ten tokens five are left, a page and a bit"
        assert decide(scheduler) == ([], [(1, 4, 9)])

    def test_less_than_a_page_is_left_unused(self) -> None:
        scheduler = serve((5, 1), (5, 1), chunk=8)
        assert decide(scheduler) == ([], [(0, 0, 5)])
        assert decide(scheduler) == ([], [(1, 0, 5)])

    def test_a_prompts_last_token_alone_is_computed_as_a_decode_row_and_the_prompt_is_cached(self) -> None:
        """A prompt of 9 tokens has a chunk of 8. The second request finds both full pages."""
        scheduler = serve((list(range(9)), 2))
        assert [decide(scheduler) for _ in range(3)] == [([], [(0, 0, 8)]), ([0], []), ([0], [])]
        scheduler.submit(request(1, [*range(9), 9], 1))
        assert decide(scheduler) == ([], [(1, 8, 10)])

    def test_one_token_in_and_one_out_take_one_step(self) -> None:
        scheduler = serve((1, 1))
        step = scheduler.plan_step()
        assert step is not None
        assert [(c.start, c.stop, c.samples) for c in step.replicas[0].chunks] == [(0, 1, True)]
        assert [s.request.number for s in step.finished] == [0]
        assert not scheduler.unfinished

    def test_a_step_smaller_than_a_page_is_refused(self) -> None:
        with pytest.raises(UsageError, match=re.escape("use --prefill chunk=8 or more, or a smaller --page-size")):
            config(chunk=3, replicas=2)


class TestPolicies:
    def test_mixed_decodes_beside_the_prompts_of_others(self) -> None:
        scheduler = serve((4, 4))
        assert decide(scheduler) == ([], [(0, 0, 4)])
        scheduler.submit(request(1, 12, 1))
        assert [decide(scheduler) for _ in range(3)] == [([0], [(1, 0, 8)]), ([0], [(1, 8, 12)]), ([0], [])]

    def test_prefill_first_lets_decodes_wait_while_there_are_prompts(self) -> None:
        scheduler = serve((4, 4), policy=PREFILL_FIRST)
        assert decide(scheduler) == ([], [(0, 0, 4)])
        scheduler.submit(request(1, 12, 1))
        assert [decide(scheduler) for _ in range(3)] == [([], [(1, 0, 8)]), ([], [(1, 8, 12)]), ([0], [])]

    def test_prefill_first_waits_for_prompts_of_all_replicas(self) -> None:
        """One step is run by all of them, and a graph can run it only if none prefills."""
        scheduler = serve((4, 4), (12, 4), policy=PREFILL_FIRST, replicas=2)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.stop for c in r.chunks] for r in step.replicas] == [[4], [8]]
        assert decide(scheduler) == ([], [])
        assert decide(scheduler) == ([0], [])


class TestAdmission:
    def test_requests_go_to_the_replica_with_the_fewest(self) -> None:
        scheduler = serve(*[(4, 2)] * 5, replicas=3, chunk=8)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1, 4], [2]]

    def test_of_replicas_with_as_many_requests_the_one_with_the_most_room_takes_the_next(self) -> None:
        """Request 0 holds four pages of replica 0, request 1 one of replica 1: request 2 joins the latter."""
        scheduler = serve((16, 9), (4, 9), (4, 1), replicas=2, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0], [1, 2]]

    def test_the_fewest_requests_come_before_the_most_room(self) -> None:
        """Replica 0 has request 0 with four of eight pages, replica 1 requests 1 and 2 with one page each. Request 3 joins
        replica 0, which has fewer requests, although replica 1 has more pages left.
        """
        scheduler = serve((16, 9), (4, 9), (4, 9), (4, 1), replicas=2, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1, 2]]

    def test_of_replicas_that_are_alike_the_first_takes_the_next(self) -> None:
        """Four equal requests on three replicas: the fourth joins replica 0."""
        scheduler = serve(*[(4, 9)] * 4, replicas=3, chunk=64)
        step = scheduler.plan_step()
        assert step is not None
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[0, 3], [1], [2]]

    def test_replicas_share_the_chunk_and_the_requests_of_a_point(self) -> None:
        """Each of two replicas prefills 32 of 64 chunk tokens; three of five clients are at one of them."""
        load = Load(requests=9, input_tokens="4", output_tokens="2", chunk=64)
        of = Point(
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
        found = SchedulerConfig.from_point(of, pages=9, max_context=64)
        assert (found.replicas, found.chunk, found.max_requests) == (2, 32, 3)

    def test_each_request_that_runs_keeps_a_page_in_reserve(self) -> None:
        """Eight pages: 16 tokens take four, and one is kept for their next; 13 tokens take four, of which three are
        there. Twelve tokens would fit.
        """
        scheduler = serve((16, 9), (13, 1), chunk=64)
        assert decide(scheduler) == ([], [(0, 0, 16)])
        fits = serve((16, 9), (12, 1), chunk=64)
        assert decide(fits) == ([], [(0, 0, 16), (1, 0, 12)])

    def test_a_small_request_does_not_overtake_a_large_one(self) -> None:
        """First come, first served: nobody starves who is large."""
        scheduler = serve((16, 9), (20, 1), (1, 1), chunk=64)
        assert decide(scheduler) == ([], [(0, 0, 16)])
        assert decide(scheduler) == ([0], [])

    def test_who_fills_the_kv_cache_alone_is_served(self) -> None:
        """Eight pages hold 32 tokens; the last one that is sampled is never stored."""
        scheduler = serve((20, 13), chunk=64)
        while scheduler.plan_step():
            pass
        assert (scheduler.unfinished, scheduler.steps) == ([], 13)

    def test_what_never_fits_is_rejected_with_its_size_and_the_limit(self) -> None:
        """20 + 14 - 1 = 33 tokens, one more than eight pages hold; the others are served."""
        scheduler = serve((4, 1))
        assert scheduler.submit(request(7, 20, 14)) == (
            "request 7 has 20 prompt and 14 output tokens and the KV cache of a replica holds 32 tokens; "
            "give more with --kv-memory or --dcp"
        )
        assert decide(scheduler) == ([], [(0, 0, 4)])

    def test_what_the_engines_tables_cannot_hold_is_rejected_likewise(self) -> None:
        """Rows of 16 tokens serve 17 in all, as the last one is not stored."""
        scheduler = serve((8, 9), max_context=16)
        reason = scheduler.submit(request(7, 9, 9))
        assert "request 7 has 9 prompt and 9 output tokens and the engine was built for 17 in all" in reason

    def test_requests_without_tokens_are_a_mistake_of_the_caller(self) -> None:
        with pytest.raises(ValueError, match="request 0 has no prompt or no output"):
            serve((0, 1))
        with pytest.raises(ValueError, match="request 0 has no prompt or no output"):
            serve((1, 0))


class TestTable:
    def test_a_table_write_covers_whole_pages_and_no_more_than_a_row_has(self) -> None:
        """Five tokens take two pages; the row of the table has six columns."""
        scheduler = serve((5, 2), max_context=6)
        step = scheduler.plan_step()
        assert step is not None
        (write,) = step.replicas[0].table
        assert (write.slot, write.start, write.locs.tolist()) == (1, 0, [4, 5, 6, 7, 8, 9])

    def test_nor_does_the_last_page_of_an_answer_that_fills_the_row(self) -> None:
        """The row of six columns has two of the second page of four tokens."""
        scheduler = serve((4, 3), max_context=6)
        writes = []
        while step := scheduler.plan_step():
            writes += [(w.start, len(w.locs)) for w in step.replicas[0].table]
        assert writes == [(0, 4), (4, 2)]

    def test_a_decode_writes_the_table_only_where_a_page_begins(self) -> None:
        """Tokens 4 … 7 are in the second page, token 8 begins the third."""
        scheduler = serve((4, 6))
        writes = []
        while step := scheduler.plan_step():
            writes.append([(w.start, len(w.locs)) for w in step.replicas[0].table])
        assert writes == [[(0, 4)], [(4, 4)], [], [], [], [(8, 4)]]


class TestPreemption:
    LOAD = ((12, 9), (12, 9))
    """Two requests of 12 prompt tokens, three pages, that store 20 tokens each in the end, five pages."""

    def test_who_came_last_gives_up_its_kv_and_computes_all_tokens_anew(self) -> None:
        """Each request gets three of 9 pages and then a fourth for tokens 12 … 15. For token 16 request 0 takes the last one, request 1 finds none and gives up four; it comes back once request 0 has finished, with 12 + 5 tokens."""
        scheduler = serve(*self.LOAD, pages=10, chunk=24, prefix_cache=False)
        assert decide(scheduler) == ([], [(0, 0, 12), (1, 0, 12)])
        assert [decide(scheduler) for _ in range(4)] == [([0, 1], [])] * 4
        step = scheduler.plan_step()
        assert step is not None
        assert (step.preempted, [s.request.number for s in step.replicas[0].decodes]) == (1, [0])
        assert [decide(scheduler) for _ in range(3)] == [([0], [])] * 3, "tokens 17 … 19, the last of 20"
        assert decide(scheduler) == ([], [(1, 0, 17)])
        assert [decide(scheduler) for _ in range(4)] == [([1], []), ([1], []), ([1], []), None]

    def test_what_the_cache_still_has_of_its_prompt_is_not_computed_anew(self) -> None:
        """Its three pages of prompt stay in the cache while nobody needs them: request 0 takes the freed fourth."""
        scheduler = serve(*self.LOAD, pages=10, chunk=24)
        for _ in range(9):
            scheduler.plan_step()
        (again,) = scheduler.unfinished
        assert decide(scheduler) == ([], [(1, 12, 17)])
        assert (again.preemptions, again.cached) == (1, 0), "the cache had nothing when it was admitted first"

    def test_new_requests_wait_behind_it_but_not_on_other_replicas(self) -> None:
        """Request 1 has the second replica for itself; request 3 joins it there, though the first has more room."""
        scheduler = serve(self.LOAD[0], (16, 21), self.LOAD[1], replicas=2, pages=10, chunk=24, prefix_cache=False)
        while not (step := scheduler.plan_step()).preempted:
            pass
        scheduler.submit(request(3, 1, 1))
        assert scheduler.replicas[0].available_pages > scheduler.replicas[1].available_pages
        step = scheduler.plan_step()
        assert [[c.sequence.request.number for c in r.chunks] for r in step.replicas] == [[], [3]]


class TestPrefixCache:
    def test_at_least_one_token_of_a_cached_prompt_is_computed(self) -> None:
        """Eight tokens are two pages, both cached; the hit is cut to one, as the last token has to be read."""
        scheduler = serve((list(range(8)), 1))
        decide(scheduler)
        scheduler.submit(request(1, list(range(8)), 1))
        assert decide(scheduler) == ([], [(1, 4, 8)])

    def test_a_prompt_adds_the_pages_that_the_cache_did_not_have(self) -> None:
        """One page of the first prompt; the second one finds it and adds its own, which the third one finds, too."""
        scheduler = serve(([1, 2, 3, 4, 5], 1))
        assert decide(scheduler) == ([], [(0, 0, 5)])
        scheduler.submit(request(1, [1, 2, 3, 4, 6, 7, 8, 9, 10], 1))
        assert decide(scheduler) == ([], [(1, 4, 9)])
        scheduler.submit(request(2, [1, 2, 3, 4, 6, 7, 8, 9, 11], 1))
        assert decide(scheduler) == ([], [(2, 8, 9)])

    def test_a_prompt_can_be_found_once_it_is_stored_and_not_before(self) -> None:
        """Both come at once: neither can read the other's pages in the step that writes them."""
        scheduler = serve((list(range(8)), 2), (list(range(8)), 2), chunk=16)
        assert decide(scheduler) == ([], [(0, 0, 8), (1, 0, 8)])

    def test_who_stored_the_same_moves_to_the_caches_pages_and_frees_its_own(self) -> None:
        """Request 0 has pages 1 and 2, request 1 has 3 and 4, which are free again after the step."""
        scheduler = serve((list(range(8)), 3), (list(range(8)), 3), chunk=16)
        scheduler.plan_step()
        assert scheduler.replicas[0].allocator.used_pages == 2
        step = scheduler.plan_step()
        assert step is not None
        moved = step.replicas[0].table[0]
        assert (moved.slot, moved.start, moved.locs.tolist()) == (2, 0, [*range(4, 12)])

    def test_what_finished_requests_left_is_evicted_for_new_ones(self) -> None:
        """Seven full pages of a prompt of 28 stay; the next prompt needs all eight."""
        scheduler = serve((28, 1), chunk=64)
        decide(scheduler)
        assert scheduler.replicas[0].cache.pages == 7
        scheduler.submit(request(1, 30, 3))
        assert decide(scheduler) == ([], [(1, 0, 30)])

    def test_what_the_next_in_line_would_find_is_evicted_last(self) -> None:
        """A of three pages and B of two are cached, and request 2 takes the last three of eight. It grows by two pages,
        for which B goes, though A is older: request 3, which begins like A, waits and was looked up at each step.
        """
        a, b = list(range(12)), list(range(20, 28))
        scheduler = serve((a, 1), (b, 1), (11, 9), max_requests=2, chunk=16)
        assert [decide(scheduler)[1] for _ in range(2)] == [[(0, 0, 12), (1, 0, 4)], [(1, 4, 8), (2, 0, 11)]]
        scheduler.submit(request(3, [*a, *range(50, 66)], 1))
        assert [decide(scheduler) for _ in range(8)] == [([2], [])] * 8
        assert decide(scheduler) == ([], [(3, 12, 28)])

    def test_without_it_nothing_is_kept(self) -> None:
        scheduler = serve((28, 1), chunk=64, prefix_cache=False)
        decide(scheduler)
        assert scheduler.replicas[0].allocator.used_pages == 0


class TestCancel:
    def test_everything_is_given_up_and_free_again(self) -> None:
        """One runs, one has lost its KV, one waits; what was cached stays."""
        scheduler = serve(*TestPreemption.LOAD, (28, 1), pages=10, chunk=24)
        while not scheduler.plan_step().preempted:
            pass
        assert [s.request.number for s in scheduler.cancel()] == [0, 1, 2]
        assert not scheduler.unfinished
        replica = scheduler.replicas[0]
        assert replica.allocator.used_pages == replica.cache.pages == replica.cache.evictable
        assert sorted(replica.slots) == [1, 2, 3, 4]

    def test_a_relocation_dies_with_its_request(self) -> None:
        """Its table row is another's in the next step."""
        scheduler = serve((list(range(8)), 3), (list(range(8)), 3), chunk=16)
        scheduler.plan_step()
        scheduler.cancel()
        scheduler.submit(request(2, 4, 1))
        step = scheduler.plan_step()
        assert step is not None
        assert [w.slot for w in step.replicas[0].table] == [step.replicas[0].chunks[0].slot]


def all_steps(shift: int) -> list[object]:
    """Steps of prompts that share pages, on two replicas with too few slots; `shift` makes other token ids of them."""
    prompts = [list(range(9)), [*range(8), 50, 51], list(range(6)), [*range(8), 50, 51], list(range(30, 50))]
    load = [([t + shift for t in prompt], 9) for prompt in prompts]
    scheduler = serve(*load, max_requests=3, replicas=2)
    out = []
    while step := scheduler.plan_step():
        out.append(signature(step))
    return out


class TestRanksAgree:
    """Every rank runs a scheduler of its own, and none asks another one what it decided."""

    @pytest.mark.parametrize("shift", [1, 100_000])
    def test_decisions_do_not_depend_on_what_tokens_mean(self, shift: int) -> None:
        """Other token ids, alike where the first ones are alike: the same steps. What is sampled is never asked for."""
        assert all_steps(0) == all_steps(shift)
        assert len(all_steps(0)) > 10

    def test_decisions_are_the_same_in_processes_that_hash_differently(self) -> None:
        """Sets and dicts of strings come in another order under another PYTHONHASHSEED."""
        code = "from tests.unit.test_scheduler import all_steps; print(all_steps(0))"
        said = [
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
        assert said[0] == said[1] == f"{all_steps(0)}\n"


class TestDrafts:
    """Steps that verify three drafts, of which u < 0.85, 0.51 and 0.204 accept one, two and three."""

    DRAFTS = Speculation(3, (0.85, 0.6, 0.4))

    def draw(self, number: int, steps: int) -> list[int]:
        """The accepted drafts of the first steps of a request."""
        return [self.DRAFTS.count_accepted(0, number, step) for step in range(steps)]

    def test_a_request_gets_its_accepted_drafts_and_one_more_token(self) -> None:
        """The prompt's step yields the first token, and the last step no more than the answer lacks."""
        scheduler = serve((3, 12), speculation=self.DRAFTS)
        assert decide(scheduler) == ([], [(0, 0, 3)])
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
        """Five tokens lie on two pages of four; four rows from token 5 on reach into a third page, whatever is accepted."""
        scheduler = serve((5, 9), speculation=self.DRAFTS)
        decide(scheduler)
        step = scheduler.plan_step()
        assert step is not None
        (sequence,) = step.replicas[0].decodes
        assert sequence.allocation is not None
        assert len(sequence.allocation.pages) == 3
        assert [(w.start, len(w.locs)) for w in step.replicas[0].table] == [(8, 4)]

    def test_a_request_that_leaves_no_room_for_drafts_is_rejected(self) -> None:
        """Eight pages hold 32 tokens: 20 in and 10 out are 29 rows, and 3 of drafts behind them. One token more does not fit."""
        scheduler = serve(speculation=self.DRAFTS)
        assert scheduler.submit(request(0, 20, 10)) == ""
        assert "the KV cache of a replica holds 32 tokens" in scheduler.submit(request(1, 20, 11))

    def test_accepted_drafts_of_a_request_do_not_depend_on_others(self) -> None:
        """Alone, and after two others that take all slots but one."""

        def collect(*before: tuple[int, int]) -> list[int]:
            scheduler = Scheduler(config(speculation=self.DRAFTS, max_requests=3))
            for number, (prompt, output) in enumerate(before):
                scheduler.submit(request(number, prompt, output))
            scheduler.submit(request(7, 2, 9))
            found = []
            while step := scheduler.plan_step():
                todo = step.replicas[0]
                found += [n for s, n in zip(todo.decodes, todo.accepted, strict=True) if s.request.number == 7]
            return found

        alone = collect()
        assert alone == collect((2, 5), (3, 6)) == self.draw(7, len(alone))
