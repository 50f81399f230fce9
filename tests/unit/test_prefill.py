"""Prefill on one rank: any division of a prompt into chunks gives the logits of token-by-token decode."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.engine.model import StepInput
from dcpbench.engine.prefill import Prefiller, split_calls
from dcpbench.engine.synthetic import RouterInputs
from dcpbench.errors import UsageError
from dcpbench.kernels import moe
from dcpbench.points import memory
from tests.unit import engine_builder as build
from tests.unit.prefill_builder import Prompt, decode_prompt, make_prompt_tokens, run_step

LENGTH = 24
PAGE = 2
LIMIT = 1e-4
TOKENS = 48  # maximum of a step


def make_engine_and_prefiller(window: int = 64, **options):
    """Return an engine and a prefiller with windows of this many tokens."""
    engine = build.make_engine(page_size=PAGE, **options)
    with mock.patch.object(memory, "PREFILL_WINDOW", window):
        return engine, Prefiller(engine.model, backend="sdpa", tokens=TOKENS)


def compute_max_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference."""
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


@pytest.fixture(scope="module")
def reference_logits():
    """Return the logits of three prompts, each alone and token by token."""
    return [decode_prompt(*make_engine_and_prefiller(), make_prompt_tokens(number, LENGTH)) for number in range(3)]


class TestLogits:
    @pytest.mark.parametrize("window", [2, 6, 64], ids=lambda w: f"window{w}")
    @pytest.mark.parametrize("chunks", [(24,), (8, 16), (2, 2, 4, 16), (22, 1, 1)], ids=str)
    def test_any_chunks_give_the_logits_of_token_by_token_decode(self, chunks, window, reference_logits):
        """Chunks begin at multiples of the page of 2 tokens, except the last token of (22, 1, 1), which is decoded."""
        engine, prefiller = make_engine_and_prefiller(window)
        prompt = Prompt.admit(engine, make_prompt_tokens(0, LENGTH))
        logits = [
            run_step(engine, prefiller, [], [(prompt, count)])
            if prompt.stored % PAGE == 0
            else run_step(engine, prefiller, [prompt], [])
            for count in chunks
        ]
        assert compute_max_difference(torch.cat(logits), reference_logits[0]) < LIMIT

    @pytest.mark.parametrize("window", [4, 64], ids=lambda w: f"window{w}")
    def test_decodes_chunks_and_padding_can_share_a_step(self, window, reference_logits):
        """Request 0 decodes its tokens 4 to 6 while request 1 has chunks of 2, 8 and 3 tokens, and request 2 has all in
        one, later.
        """
        engine, prefiller = make_engine_and_prefiller(window, pages=128)
        prompts = [Prompt.admit(engine, make_prompt_tokens(number, LENGTH)) for number in range(3)]
        run_step(engine, prefiller, [], [(prompts[0], 4)])
        found = [[], [], []]
        for chunks in ([(1, 2)], [(1, 8)], [(1, 3), (2, 24)]):
            logits = run_step(engine, prefiller, [prompts[0]], [(prompts[n], count) for n, count in chunks], padding=3)
            assert logits.isfinite().all(), "also padding rows"
            first = 1
            found[0].append(logits[:1])
            for number, count in chunks:
                found[number].append(logits[first : first + count])
                first += count
            assert len(logits) == first + 3
        assert compute_max_difference(torch.cat(found[0]), reference_logits[0][4:7]) < LIMIT
        assert compute_max_difference(torch.cat(found[1]), reference_logits[1][:13]) < LIMIT
        assert compute_max_difference(torch.cat(found[2]), reference_logits[2]) < LIMIT

    def test_last_only_gives_logits_of_decodes_and_last_tokens(self, reference_logits):
        engine, prefiller = make_engine_and_prefiller(pages=128)
        prompts = [Prompt.admit(engine, make_prompt_tokens(number, LENGTH)) for number in range(3)]
        run_step(engine, prefiller, [], [(prompts[0], 4)])
        logits = run_step(
            engine, prefiller, [prompts[0]], [(prompts[1], 6), (prompts[2], 24)], padding=2, last_only=True
        )
        assert (
            compute_max_difference(
                logits, torch.stack([reference_logits[0][4], reference_logits[1][5], reference_logits[2][23]])
            )
            < LIMIT
        )

    def test_several_decodes_and_chunks_can_share_a_step(self, reference_logits):
        engine, prefiller = make_engine_and_prefiller(pages=128)
        prompts = [Prompt.admit(engine, make_prompt_tokens(number, LENGTH)) for number in range(3)]
        run_step(engine, prefiller, [], [(prompts[0], 4), (prompts[1], 6)])
        logits = run_step(engine, prefiller, prompts[:2], [(prompts[2], 24)], last_only=True)
        assert (
            compute_max_difference(
                logits, torch.stack([reference_logits[0][4], reference_logits[1][6], reference_logits[2][23]])
            )
            < LIMIT
        )

    def test_routers_use_given_inputs_of_layers_in_rotation(self):
        """One layer of inputs serves two MoE layers, and has 3 rows more than the step, which are not read."""
        engine, _ = make_engine_and_prefiller()
        engine.model.chosen_experts = []
        router = torch.randn(1, 8, engine.model.shape.hidden, generator=torch.Generator().manual_seed(0))
        router[:, 5:] = float("nan")
        rows = torch.zeros(5, dtype=torch.int64)
        engine.model.run_step(StepInput(rows, rows, rows, RouterInputs(router)), None)
        (_, first), (_, second) = engine.model.chosen_experts
        assert first.shape == (5, 2)
        weights = [engine.model.weights.get_layer(index).mlp for index in (1, 2)]
        for ids, w in zip((first, second), weights, strict=True):
            _, expected = moe.select_experts(router[0, :5] @ w.router.T, w.bias, engine.model.shape)
            assert torch.equal(ids, expected)

    def test_replica_without_work_runs_only_padding(self):
        engine, prefiller = make_engine_and_prefiller()
        assert run_step(engine, prefiller, [], [], padding=4).isfinite().all()


class TestCalls:
    @given(
        chunks=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8)), min_size=1, max_size=6),
        max_stored=st.integers(1, 9),
        keys=st.integers(8, 20),
    )
    def test_each_chunk_attends_to_its_prefix_once_and_its_own_rows(self, chunks, max_stored, keys):
        """Calls are in order and never have more stored tokens or keys than allowed, and each part is as large as
        possible.
        """
        starts, stops = [start for start, _ in chunks], [start + count for start, count in chunks]
        parts = split_calls(starts, stops, max_stored, keys)
        assert [c for first, *_ in parts for c in range(first.chunks.start, first.chunks.stop)] == list(
            range(len(chunks))
        )
        for first, *windows in parts:
            own = sum(stops[first.chunks]) - sum(starts[first.chunks])
            assert first.own
            assert sum(first.stored) <= max_stored
            assert sum(first.stored) + own <= keys
            assert not any(window.own for window in windows)
            assert all(window.chunks == first.chunks and 0 < window.stored[0] <= max_stored for window in windows)
            assert sum(first.stored) + sum(sum(w.stored) for w in windows) == sum(starts[first.chunks])
        for (before, *windows), (after, *_) in itertools.pairwise(parts):
            both = slice(before.chunks.start, after.chunks.start + 1)
            assert windows or sum(starts[both]) > max_stored or sum(stops[both]) > keys

    def test_example_of_split_calls(self):
        """With limits of 6 stored tokens and 12 keys, 5 and 2 do not fit together, and 8 need two windows."""
        found = split_calls([5, 0, 2, 8], [8, 1, 4, 9], 6, 12)
        assert [[(c.chunks, c.stored, c.own) for c in part] for part in found] == [
            [(slice(0, 2), [5, 0], True)],
            [(slice(2, 3), [2], True)],
            [(slice(3, 4), [0], True), (slice(3, 4), [6], False), (slice(3, 4), [2], False)],
        ]

    @pytest.mark.parametrize(("page_size", "tokens"), [(2, 16), (3, 15), (16, 16), (20, 20)])
    def test_default_window_is_whole_pages_and_at_least_one(self, page_size, tokens, monkeypatch):
        """A window of 16 tokens is 8 pages of 2, 5 of 3, one of 16, or one page of 20, its minimum."""
        monkeypatch.setattr(memory, "PREFILL_WINDOW", 16)
        engine = build.make_engine(page_size=page_size)
        assert Prefiller(engine.model, backend="sdpa", tokens=8).window == tokens

    def test_pages_larger_than_a_window_give_the_same_logits(self, reference_logits, monkeypatch):
        monkeypatch.setattr(memory, "PREFILL_WINDOW", PAGE - 1)
        engine = build.make_engine(page_size=PAGE)
        prefiller = Prefiller(engine.model, backend="sdpa", tokens=TOKENS)
        prompt = Prompt.admit(engine, make_prompt_tokens(0, LENGTH))
        logits = [run_step(engine, prefiller, [], [(prompt, count)]) for count in (4, 2, 18)]
        assert compute_max_difference(torch.cat(logits), reference_logits[0]) < LIMIT


class TestErrors:
    def test_step_above_the_token_limit_raises_usage_error(self):
        engine, prefiller = make_engine_and_prefiller(pages=128)
        prompts = [Prompt.admit(engine, make_prompt_tokens(number, LENGTH)) for number in range(3)]
        with pytest.raises(UsageError, match="49 prompt tokens"):
            run_step(engine, prefiller, [], [(prompts[0], 24), (prompts[1], 24), (prompts[2], 1)])

    def test_unknown_gather_raises_usage_error(self):
        with pytest.raises(UsageError, match="nccl, direct"):
            Prefiller(build.make_engine().model, backend="sdpa", tokens=8, gather="mail")

    def test_unknown_backend_raises_usage_error(self):
        with pytest.raises(UsageError, match="sdpa, flashinfer"):
            Prefiller(build.make_engine().model, backend="none", tokens=8)
