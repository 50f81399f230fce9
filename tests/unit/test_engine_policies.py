"""Test the schedules of vLLM's and SGLang's policies against hand-computed ones.

A block has 2 rows · 2 ranks = 4 tokens, and a pool has eight blocks, unless a test says otherwise. A step is written as
(requests that decode, chunks as (request, first token, end)); steps are decided one ahead, as both engines do.
"""

import dataclasses
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench.errors import UsageError
from dcpbench.points.names import SGLANG, VLLM
from dcpbench.serving import sglang_scheduler
from dcpbench.serving.engine_scheduler import EngineScheduler
from dcpbench.serving.policies import make_scheduler
from dcpbench.serving.scheduler import Scheduler
from dcpbench.serving.sglang_scheduler import SglangScheduler
from dcpbench.serving.step_model import compute_step_works
from tests.unit.serving_builder import make_config, make_request

if TYPE_CHECKING:
    from dcpbench.serving.requests import Step

Decision = tuple[list[int], list[tuple[int, int, int]]]


class Loop:
    """A loop that decides each step before the previous one has been read, as an asynchronous engine does."""

    def __init__(self, policy: str, *load: tuple[list[int] | int, int], **changes: object) -> None:
        self.scheduler = make_scheduler(make_config(policy=policy, **changes))
        self.unread: Step | None = None
        self.last: Step | None = None
        self.count = 0
        self.submit(*load)

    def submit(self, *load: tuple[list[int] | int, int]) -> None:
        for prompt, output in load:
            assert self.scheduler.submit(make_request(self.count, prompt, output)) == ""
            self.count += 1

    def run(self) -> Decision | None:
        """Decide a step, then read the one before it."""
        self.last = self.scheduler.plan_step()
        if self.unread is not None:
            self.scheduler.handle_read(self.unread)
        self.unread = self.last
        if self.last is None:
            return None
        todo = self.last.replicas[0]
        return (
            [s.request.number for s in todo.decodes],
            [(c.sequence.request.number, c.start, c.stop) for c in todo.chunks],
        )

    def run_all(self) -> list[Decision | None]:
        """Run until nothing is left; steps with discarded rows alone are `([], [])`."""
        found = []
        while self.scheduler.unfinished or self.unread is not None:
            found.append(self.run())
            assert len(found) < 1000, "the scheduler makes no progress"
        return found


class TestVllm:
    def test_decodes_and_chunks_share_the_token_budget(self) -> None:
        """Running requests take their part of 8 tokens first; a chunk may end inside a block."""
        loop = Loop(VLLM, (3, 4), (9, 2))
        assert loop.run_all() == [
            ([], [(0, 0, 3), (1, 0, 5)]),  # 8 = 3 + 5
            ([0], [(1, 5, 9)]),
            ([0, 1], []),
            ([0], []),  # request 1 has its last token, which is read after this decision
            None,
        ]

    def test_budget_used_up_by_running_requests_admits_no_request(self) -> None:
        loop = Loop(VLLM, (20, 1), (4, 1))
        assert [loop.run() for _ in range(3)] == [([], [(0, 0, 8)]), ([], [(0, 8, 16)]), ([], [(0, 16, 20), (1, 0, 4)])]

    def test_long_prefill_token_threshold_bounds_the_chunk_of_each_request(self) -> None:
        loop = Loop(VLLM, (8, 1), (8, 1), max_chunk=3)
        assert loop.run() == ([], [(0, 0, 3), (1, 0, 3)])
        assert loop.run() == ([], [(0, 3, 6), (1, 3, 6)])
        assert loop.run() == ([], [(0, 6, 8), (1, 6, 8)])

    def test_finished_request_occupies_a_slot_until_it_is_read(self) -> None:
        """With max_num_seqs 1, request 1 is admitted two decisions after the last token of request 0 was decided."""
        loop = Loop(VLLM, (4, 1), (4, 1), max_requests=1)
        assert [loop.run() for _ in range(4)] == [([], [(0, 0, 4)]), None, ([], [(1, 0, 4)]), None]

    def test_request_is_admitted_only_if_all_its_blocks_are_free(self) -> None:
        """Requests of 20 tokens have 5 of 8 blocks: the second waits, although its first chunk would fit."""
        loop = Loop(VLLM, (20, 2), (20, 1), chunk=64, prefix_cache=False)
        assert [loop.run() for _ in range(4)] == [([], [(0, 0, 20)]), ([0], []), None, ([], [(1, 0, 20)])]

    def test_no_block_is_reserved_and_the_last_admitted_request_is_preempted(self) -> None:
        """Both prompts fill all 8 blocks. Request 0 needs a ninth for its second token and takes those of request 1,
        which computes its prompt and its first token again: 17 tokens.
        """
        loop = Loop(VLLM, (16, 3), (16, 3), chunk=64, prefix_cache=False)
        assert loop.run() == ([], [(0, 0, 16), (1, 0, 16)])
        assert loop.run() == ([0], [])
        assert loop.last is not None
        assert loop.last.preempted == 1
        assert loop.run() == ([0], [])
        assert loop.run() is None
        assert loop.run() == ([], [(1, 0, 17)])
        assert loop.run() == ([1], [])

    def test_nothing_is_admitted_in_a_step_with_a_preemption(self) -> None:
        """Request 1 loses 4 blocks, so that request 2 would fit; it has to wait for the next step, behind request 1."""
        loop = Loop(VLLM, (16, 9), (16, 9), (4, 1), chunk=64, prefix_cache=False)
        assert loop.run() == ([], [(0, 0, 16), (1, 0, 16)])
        assert loop.run() == ([0], [])
        assert loop.run() == ([0], []), "request 1 does not fit, and nothing overtakes it"

    def test_cached_prefix_of_whole_blocks_is_not_computed(self) -> None:
        """Request 1 shares 8 of 10 tokens with request 0 and finds them in the same step. Request 2 equals the start of
        request 0 and computes its last block again, as the last token has to be computed.
        """
        loop = Loop(VLLM, (list(range(10)), 1), ([*range(8), 90, 91, 92], 1), chunk=64)
        assert loop.run() == ([], [(0, 0, 10), (1, 8, 11)])
        loop.submit((list(range(8)), 1))
        assert loop.run() == ([], [(2, 4, 8)])

    def test_prefix_of_an_unfinished_prompt_is_found(self) -> None:
        loop = Loop(VLLM, (list(range(12)), 1))
        assert loop.run() == ([], [(0, 0, 8)])
        loop.submit((list(range(12)), 1))
        assert loop.run() == ([], [(0, 8, 12), (1, 8, 12)])

    def test_single_last_prompt_token_is_a_decode_row(self) -> None:
        loop = Loop(VLLM, (9, 1))
        assert [loop.run(), loop.run()] == [([], [(0, 0, 8)]), ([0], [])]


class TestSglang:
    POOL = 65  # pages, so that reservations fit

    def test_prompts_come_before_decodes(self) -> None:
        loop = Loop(SGLANG, (4, 3), pages=self.POOL)
        assert loop.run() == ([], [(0, 0, 4)])
        loop.submit((12, 1))
        assert [loop.run() for _ in range(3)] == [([], [(1, 0, 8)]), ([], [(1, 8, 12)]), ([0], [])]

    def test_token_of_a_request_that_finished_one_step_earlier_is_discarded(self) -> None:
        """The engine does not know that step 1 had the last token of request 0, so step 2 has a row for it as well."""
        loop = Loop(SGLANG, (4, 2), pages=self.POOL)
        assert [loop.run() for _ in range(3)] == [([], [(0, 0, 4)]), ([0], []), ([], [])]
        assert loop.last is not None
        assert loop.last.replicas[0].discarded == [6]
        batch = compute_step_works(loop.last)[0]
        assert (batch.rows, batch.kv_tokens) == (1, 6)
        assert loop.run() is None
        assert not loop.scheduler.unfinished

    def test_only_the_last_prompt_of_a_batch_is_cut_and_at_a_page(self) -> None:
        """A prompt of 5 tokens takes two of the two pages of a chunk, and one of 3 tokens leaves a page for the next
        prompt.
        """
        loop = Loop(SGLANG, (5, 1), (3, 1), (9, 1), pages=self.POOL)
        assert loop.run() == ([], [(0, 0, 5)])
        assert loop.run() == ([], [(1, 0, 3), (2, 0, 4)])
        assert loop.run() == ([], [(2, 4, 9)])

    def test_request_needs_memory_for_all_tokens_that_it_may_generate(self) -> None:
        """8 blocks are 32 tokens. Request 0 needs 8 + 12 + 4 = 24 < 32. Request 1 needs 4 + 4 + 4 = 12, and 32 - 8 - 4 - 12 = 8
        are left: it waits until request 0 has left and a decode step has seen it.
        """
        loop = Loop(SGLANG, (8, 12), (4, 4), prefix_cache=False, chunk=16)
        found = loop.run_all()
        assert found[0] == ([], [(0, 0, 8)])
        assert found[1:12] == [([0], [])] * 11
        assert found[12:14] == [([], []), None], "a discarded row, then the end of request 0 is known"
        assert found[14] == ([], [(1, 0, 4)])

    def test_running_requests_reserve_a_share_of_their_remaining_tokens(self) -> None:
        """Request 0 holds 40 of 128 tokens; it may generate 79 more, of which 0.7 are reserved: 55.3. Left are 32.7. Request 1 needs 24 + 4 + 4 = 32 and is admitted; with 5 tokens to generate it would need 33 and wait."""
        for output, expected in ((4, ([], [(1, 0, 24)])), (5, ([0], []))):
            loop = Loop(SGLANG, (40, 80), pages=33, chunk=64, prefix_cache=False, max_context=200)
            assert loop.run() == ([], [(0, 0, 40)])
            loop.submit((24, output))
            assert loop.run() == expected

    def test_the_reserved_share_falls_with_each_decode_step(self) -> None:
        loop = Loop(SGLANG, (4, 60), pages=self.POOL)
        assert isinstance(loop.scheduler, SglangScheduler)
        for _ in range(11):
            loop.run()
        assert loop.scheduler.ratio == pytest.approx(0.7 - 10 * 0.7 * 0.86 / 600)

    def test_request_with_fewest_tokens_and_longest_prompt_is_retracted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A pool of 11 pages and a reservation of one token: both are admitted, with 3 and 4 pages. Decode steps 2 and 6
        take two pages each. Step 10 finds none. Both have 10 tokens, so request 1 leaves, which has the longer prompt. It
        computes its 15 + 10 tokens again once request 0 is gone.
        """
        monkeypatch.setattr(sglang_scheduler, "MAX_RESERVED_TOKENS", 1)
        loop = Loop(SGLANG, (11, 20), (15, 20), chunk=64, prefix_cache=False, pages=12)
        assert loop.run() == ([], [(0, 0, 11), (1, 0, 15)])
        assert [loop.run() for _ in range(9)] == [([0, 1], [])] * 9
        assert loop.run() == ([0], [])
        assert loop.last is not None
        assert loop.last.preempted == 1
        assert isinstance(loop.scheduler, SglangScheduler)
        assert loop.scheduler.ratio == 1.0  # min(1, (10 + 20) / 21)
        assert [d for d in loop.run_all() if d is not None and d[1]] == [([], [(1, 0, 25)])]

    def test_prompt_is_found_in_the_cache_after_its_last_chunk_was_read(self) -> None:
        loop = Loop(SGLANG, (list(range(8)), 9), pages=self.POOL)
        assert loop.run() == ([], [(0, 0, 8)])
        loop.submit((list(range(8)), 1))
        assert loop.run() == ([], [(1, 0, 8)]), "step 0 has not been read"
        loop.submit((list(range(8)), 1))
        assert loop.run() == ([], [(2, 4, 8)])

    def test_unfinished_prompt_is_found_in_the_cache_by_the_next_decision(self) -> None:
        loop = Loop(SGLANG, (list(range(10)), 1), pages=self.POOL, chunk=12)
        loop.submit((list(range(100, 120)), 1))
        assert loop.run() == ([], [(0, 0, 10)])
        assert loop.run() == ([], [(1, 0, 12)])
        loop.submit((list(range(100, 120)), 1))
        assert loop.run() == ([], [(1, 12, 20), (2, 12, 16)])

    def test_requests_of_one_token_do_not_block_those_behind(self) -> None:
        """No decode step sees the first request leave; an engine that decides after reading admits the second one at once."""
        loop = Loop(SGLANG, (4, 1), (4, 1), max_requests=1)
        assert [step for step in loop.run_all() if step and step[1]] == [([], [(0, 0, 4)]), ([], [(1, 0, 4)])]
        loop.submit((4, 1), (4, 1))
        for number in (2, 3):
            step = loop.scheduler.plan_step()
            assert step is not None
            assert [chunk.sequence.request.number for chunk in step.replicas[0].chunks] == [number]
            loop.scheduler.handle_read(step)


@pytest.mark.parametrize("policy", [VLLM, SGLANG])
class TestBoth:
    @pytest.mark.parametrize("pages", [9, 12, 40])
    def test_every_request_gets_all_its_tokens_and_all_memory_is_freed(self, policy: str, pages: int) -> None:
        load = [(1 + 7 * n % 17, 1 + 5 * n % 10) for n in range(40)]
        loop = Loop(policy, *load, pages=pages)
        sampled = [0] * len(load)
        while loop.scheduler.unfinished or loop.unread is not None:
            loop.run()
            if loop.last is not None:
                for sequence in loop.last.replicas[0].sampled_sequences:
                    sampled[sequence.request.number] += 1
        assert sampled == [output for _, output in load]
        replica = loop.scheduler.replicas[0]
        assert replica.available_pages == pages - 1
        assert len(replica.slots) == 4

    def test_cancelling_frees_all_pages(self, policy: str) -> None:
        loop = Loop(policy, (20, 4), (8, 4))
        loop.run()
        assert [s.request.number for s in loop.scheduler.cancel()] == [0, 1]
        assert loop.scheduler.replicas[0].available_pages == 8
        assert loop.scheduler.plan_step() is None

    def test_several_replicas_are_refused(self, policy: str) -> None:
        with pytest.raises(UsageError, match=re.escape(f"the policy {policy} is modelled for one attention replica")):
            make_scheduler(make_config(policy=policy, replicas=2))

    def test_answers_of_a_session_are_cached_for_its_next_turn(self, policy: str) -> None:
        first = dataclasses.replace(make_request(0, list(range(6)), 3), answer=np.array([50, 51, 52], dtype=np.int32))
        loop = Loop(policy, pages=40)
        loop.scheduler.submit(first)
        loop.run_all()
        loop.scheduler.submit(make_request(1, [*range(6), 50, 51, 52, 60], 1))
        assert loop.run() == ([], [(1, 8, 10)])


def test_other_policies_use_the_default_scheduler() -> None:
    assert type(make_scheduler(make_config())) is Scheduler
    assert not issubclass(Scheduler, EngineScheduler)
