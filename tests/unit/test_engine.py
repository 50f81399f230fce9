"""The decode engine of one rank: padded batches on the real model, and KV that is equal in every layout."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dcpbench.engine.decode_engine import Batch, DecodeEngine, Request, count_accepted
from dcpbench.engine.model import StepInput
from dcpbench.errors import UsageError
from dcpbench.hangs.evidence import Device
from dcpbench.points import layout as arithmetic
from dcpbench.points.batches import GRAPH_BATCHES, compute_batch_rows, pad_batch
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.serving.allocator import OutOfKvError
from dcpbench.workloads import decode
from tests.unit import engine_builder as build
from tests.unit.engine_drafts import accept_drafts, append_drafts

LENGTHS = (2, 3, 4)  # lengths of three requests; their smallest graph has four rows, so that one row is padding
STEPS = 4


@dataclasses.dataclass
class Continuation:
    """The results of decoding one request."""

    tokens: list[int]
    first_row: torch.Tensor  # KV of its token 0, all layers
    logits: torch.Tensor


def start_request(engine: DecodeEngine, number: int) -> Request:
    """Return request `number` with synthetic KV and a token to read."""
    request = engine.add_request(LENGTHS[number])
    engine.write_random_kv(request, number, seed=0)
    engine.request_pool.set_tokens(request.slot, request.length - 1, [100 + number])
    return request


def continue_requests(engine: DecodeEngine, numbers: tuple[int, ...]) -> list[Continuation]:
    """Return the greedy tokens of some of the requests, decoded together."""
    requests = [start_request(engine, number) for number in numbers]
    tokens: list[list[int]] = [[] for _ in numbers]
    for _ in range(STEPS):
        batch = engine.plan_step(requests)
        engine.run_eager(batch)
        for i, request in enumerate(requests):
            tokens[i].append(int(batch.next_tokens[i]))
            engine.append_token(request)
    rows = [engine.model.kv.get_all_rows()[:, int(r.allocation.compute_locs(0, 1)[0])].clone() for r in requests]
    return [Continuation(*parts) for parts in zip(tokens, rows, batch.logits[: len(requests)], strict=True)]


def test_norm_counter_marks_the_progress_of_a_step(monkeypatch):
    """Each layer has two norms, counted from 1 on, and there is a last one; attention of layer 1 comes between norms 3
    and 4.
    """
    engine = build.make_engine()
    engine.model.marks = torch.zeros(1, dtype=torch.int32)
    seen = []
    attention = engine.model.run_attention
    monkeypatch.setattr(
        engine.model, "run_attention", lambda *args: (seen.append(int(engine.model.marks[0])), attention(*args))[1]
    )
    engine.run_eager(engine.plan_step([start_request(engine, 0)]))
    layers = engine.model.shape.layers
    assert seen == [2 * layer + 1 for layer in range(layers)]
    assert [Device(norm=n).position for n in (3, 4)] == ["attention of layer 1", "mlp of layer 1"]
    assert engine.model.marks.tolist() == [2 * layers + 1]


@pytest.fixture(scope="module")
def alone() -> list[Continuation]:
    """Return the results of each request in a separate engine, in a graph of one row without padding."""
    return [continue_requests(build.make_engine(), (number,))[0] for number in range(3)]


def hand_out_page_0(engine: DecodeEngine) -> None:
    """Change the allocator so that the first request gets page 0."""
    engine.allocator._free = np.arange(engine.allocator.pages - 1, -1, -1, dtype=np.int32)
    engine.allocator.free_pages = engine.allocator.pages


def is_unchanged(found: Continuation, expected: Continuation) -> bool:
    """Return True for equal tokens, equal KV of token 0, and logits within fp32 rounding of another batch size."""
    return (
        found.tokens == expected.tokens
        and torch.equal(found.first_row, expected.first_row)
        and torch.allclose(found.logits, expected.logits, atol=1e-4)
    )


class TestPadding:
    def test_padded_rows_change_no_request_with_reserved_slot_and_page(self, alone):
        """Three requests in a graph of four rows give exactly the results of single requests."""
        engine = build.make_engine()
        together = continue_requests(engine, (0, 1, 2))
        assert list(engine.batches) == [(4, 1)], "one row was padding"
        assert [is_unchanged(*pair) for pair in zip(together, alone, strict=True)] == [True, True, True]
        assert engine.model.kv.get_all_rows()[:, 0].any(dim=-1).all(), "the padding row was written in every layer"

    def test_padded_row_overwrites_a_request_without_reserved_page(self, alone):
        """The padded row writes token id 0 at position 0 over request 0's first KV row, before attention reads it.

        The empty row points to location 0 of request 0. The text of request 0 changes, and the other two keep theirs.
        """
        engine = build.make_engine()
        hand_out_page_0(engine)
        together = continue_requests(engine, (0, 1, 2))
        assert [is_unchanged(*pair) for pair in zip(together, alone, strict=True)] == [False, True, True]
        victim, truth = together[0], alone[0]
        assert (victim.first_row != truth.first_row).any(dim=-1).all(), "overwritten in every layer"
        assert (victim.logits - truth.logits).abs().max() > 0.1
        assert victim.tokens != truth.tokens


@pytest.mark.parametrize(("requests", "rows"), [(1, 1), (3, 4), (5, 8), (33, 40), (48, 48), (512, 512)])
def test_batch_is_padded_to_the_next_graph_size(requests, rows):
    """Graphs exist for 1, 2, 4, 8 … 40, 48 … 512 rows."""
    assert pad_batch(requests) == rows


def test_graph_sizes_are_four_times_denser_than_powers_of_two():
    """Sizes are 1, 2, then steps of 4 below 16; above, steps are at most a fourth of the size and double with it."""
    steps = [range(4, 16, 4), range(16, 48, 8), range(48, 128, 16), range(128, 256, 32), range(256, 513, 64)]
    assert (1, 2, *itertools.chain(*steps)) == GRAPH_BATCHES


@pytest.mark.parametrize(("requests", "rows"), [(512, 512), (513, 576), (576, 576), (577, 640)])
def test_eager_batches_are_padded_to_multiples_of_64_rows(requests, rows):
    assert compute_batch_rows(requests) == rows


def test_more_requests_than_the_largest_graph_are_refused():
    """The message has the maximum."""
    with pytest.raises(UsageError, match="513 requests per replica are more than the largest graph, 512"):
        pad_batch(513)


def test_request_without_enough_pages_takes_no_slot():
    """Four pages, one of them padding, hold three tokens and not four; all four slots stay free."""
    engine = build.make_engine(pages=4)
    with pytest.raises(OutOfKvError):
        engine.add_request(4)
    assert engine.request_pool.available == 4
    engine.remove_request(engine.add_request(3))
    assert (engine.request_pool.available, engine.allocator.free_pages) == (4, 3)


def collect_kv(layout: Layout, page_size: int, interleave: int) -> dict[int, tuple[int, torch.Tensor]]:
    """Return three requests of 9 + 1 tokens, as workload `decode` admits them: by number, token and KV in token order."""
    point = Point(
        model="tiny",
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        concurrency=3,
        context=9,
        backend="reference",
        dtype="fp32",
        page_size=page_size,
        interleave=interleave,
    )
    session = SimpleNamespace(shape=build.TINY)
    found: dict[int, tuple[int, torch.Tensor]] = {}
    for rank in range(layout.tp):
        engine = build.make_engine(layout, rank, page_size=page_size, interleave=interleave)
        replica = rank // layout.attn_tp
        for index in range(decode._split_requests(point, replica)):
            request = decode._add_request(engine, session, point, 7, index)
            empty = torch.full((build.TINY.layers, request.length, build.TINY.kv_width), float("nan"))
            reads = int(engine.request_pool.tokens[request.slot, request.length - 1])
            token, rows = found.setdefault(index * layout.dp + replica, (reads, empty))
            assert token == reads, "ranks of a replica read the same token"
            for i, loc in enumerate(request.allocation.compute_locs(0, request.length).tolist()):
                if arithmetic.get_owner(loc, layout.dcp, interleave) == layout.get_dcp_rank(rank):
                    rows[:, i] = engine.model.kv.get_all_rows()[:, arithmetic.get_row(loc, layout.dcp, interleave)]
    return found


@pytest.mark.parametrize(
    ("layout", "page_size", "interleave"),
    [(Layout(2, dcp=2), 1, 1), (Layout(4, dcp=2), 4, 2), (Layout(4, dp=2, dcp=2), 2, 1)],
    ids=str,
)
def test_request_has_the_same_kv_in_every_layout(layout, page_size, interleave):
    """Other layouts distribute over ranks and replicas the same numbers that tp1 stores in one place."""
    plain, spread = collect_kv(Layout(1), 1, 1), collect_kv(layout, page_size, interleave)
    assert sorted(plain) == sorted(spread) == [0, 1, 2]
    for number, (token, rows) in plain.items():
        assert rows.shape == (3, 10, 48)
        assert bool(rows.isfinite().all())
        assert spread[number][0] == token
        assert torch.equal(spread[number][1], rows)
    assert [plain[n][0] for n in range(3)] == [0, 7919 % 512, 2 * 7919 % 512]
    assert not torch.equal(plain[0][1], plain[1][1]), "two requests differ"


class FakeGroup:
    """A group of several ranks with gathers that include given tensors of the other ranks."""

    def __init__(self, rank: int, others: dict[int, torch.Tensor]) -> None:
        self.rank, self.others, self.size = rank, others, 1 + len(others)

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([mine if rank == self.rank else self.others[rank] for rank in range(self.size)])


def sample_on_all_ranks(vocab: int, layout: Layout, logits: list[list[float]]) -> list[list[int]]:
    """Return the token that each rank takes for one row, from each rank's logits of its rows of the vocabulary."""
    shape = build.make_shape(vocab=vocab)
    models = [build.make_engine(layout, rank, shape=shape).model for rank in range(layout.tp)]
    pairs = {}
    for rank, model in enumerate(models):
        model.groups = dataclasses.replace(model.groups, attn=FakeGroup(rank, {}))
        model.groups.attn.all_gather = lambda pair, rank=rank: pairs.__setitem__(rank, pair) or pair.unsqueeze(0)
        model.sample_greedy(torch.tensor([logits[rank]]))
    for rank, model in enumerate(models):
        others = {other: pair for other, pair in pairs.items() if other != rank}
        model.groups = dataclasses.replace(model.groups, attn=FakeGroup(rank, others))
    return [model.sample_greedy(torch.tensor([logits[rank]])).tolist() for rank, model in enumerate(models)]


class TestGreedy:
    def test_the_largest_logit_of_all_ranks_wins(self):
        """Two ranks have two rows each: token 3 is row 1 of rank 1."""
        assert sample_on_all_ranks(4, Layout(2), [[0.0, 2.0], [1.0, 3.0]]) == [[3], [3]]

    def test_padding_row_of_the_vocabulary_is_never_sampled(self):
        """With three tokens on two ranks, row 1 of rank 1 is padding; its zero weights give 0, more than any token has."""
        assert sample_on_all_ranks(3, Layout(2), [[-3.0, -2.0], [-1.0, 0.0]]) == [[2], [2]]

    def test_a_rank_without_tokens_never_wins(self):
        """With five tokens on four ranks of two rows, rank 2 has one and rank 3 none. All logits are below padding's 0."""
        logits = [[-5.0, -4.0], [-1.0, -6.0], [-3.0, 0.0], [0.0, 0.0]]
        assert sample_on_all_ranks(5, Layout(4), logits) == [[2]] * 4

    def test_the_smallest_token_wins_a_tie(self):
        """Tokens 1, 2 and 3 have the same logit: the first of rank 0 wins, and on rank 1 the first of its two."""
        assert sample_on_all_ranks(4, Layout(2), [[0.0, 2.0], [2.0, 2.0]]) == [[1], [1]]
        assert sample_on_all_ranks(4, Layout(2), [[0.0, 1.0], [2.0, 2.0]]) == [[2], [2]]


class TestDraftLayer:
    """The draft layer, on two requests with a known token and a draft each."""

    SHAPE = build.TINY.add_drafts(1)

    def make_engine(self) -> DecodeEngine:
        """Return an engine with random norm weights, so that each of them has an effect."""
        engine = build.make_engine(shape=self.SHAPE, query_length=2)
        draft = engine.model.weights.draft
        generator = torch.Generator().manual_seed(1)
        names = ("embedding_norm", "hidden_norm", "final_norm")
        drawn = {name: torch.rand(self.SHAPE.hidden, generator=generator) + 0.5 for name in names}
        engine.model.weights = dataclasses.replace(engine.model.weights, draft=dataclasses.replace(draft, **drawn))
        return engine

    def plan_verification(self, engine: DecodeEngine) -> tuple[list[Request], Batch]:
        """Return the requests and the planned step over both."""
        requests = [start_request(engine, number) for number in range(2)]
        for request in requests:
            append_drafts(engine, request, [7])
        return requests, engine.plan_step(requests, query_length=2)

    def test_draft_layer_equals_a_one_layer_model_over_joined_inputs(self):
        """The model has the layer's weights, the same KV rows, and projections of both norms, computed here, as
        embeddings.
        """
        engine = self.make_engine()
        _, batch = self.plan_verification(engine)
        stored = engine.model.kv.data[-1:].clone()
        engine.run_eager(batch)
        weights, hidden = engine.model.weights, engine.model.final_hidden
        draft = weights.draft
        locs = engine.request_pool.table[batch.slots, batch.positions]
        inputs = StepInput(batch.next_tokens, batch.positions, locs)
        found = engine.model.compute_logits(engine.model.run_draft_layer(inputs, hidden, batch))

        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x / (x.pow(2).mean(-1, keepdim=True) + self.SHAPE.rms_eps).sqrt() * weight

        embedded = norm(weights.embed[batch.next_tokens], draft.embedding_norm)
        joined = torch.cat((embedded, norm(hidden, draft.hidden_norm)), dim=-1) @ draft.join.T
        alone = build.make_engine(
            shape=dataclasses.replace(build.TINY, layers=1, first_k_dense_replace=0), query_length=2
        )
        _, other = self.plan_verification(alone)
        alone.model.weights = dataclasses.replace(
            weights,
            final_norm=draft.final_norm,
            dense=[],
            moe=[draft.layer],
            first_k_dense_replace=0,
            layers=1,
            draft=None,
        )
        alone.model.kv.data.copy_(stored)
        alone.model.embed_tokens = lambda _: joined.clone()
        alone.run_eager(other)
        assert torch.allclose(found[:4], other.logits[:4], atol=1e-5)
        assert found[:4].abs().max() > 0.1

    def test_drafts_are_the_greedy_tokens_of_each_pass(self):
        """Each request has 3 rows: the first pass yields a draft after the accepted tokens, and the second one after
        that.
        """
        engine = build.make_engine(shape=self.SHAPE, query_length=3)
        requests = [start_request(engine, number) for number in range(2)]
        for request in requests:
            append_drafts(engine, request, [7, 8])
        batch = engine.plan_step(requests, query_length=3)
        engine.run_eager(batch)
        kept = [len(tokens) for tokens in accept_drafts(engine, batch, requests)]
        starts = [request.length - 1 for request in requests]
        for request in requests:
            append_drafts(engine, request, [0, 0])
        outputs = []
        run = engine.model.run_draft_layer
        engine.model.run_draft_layer = lambda *args: (outputs.append(run(*args)), outputs[-1])[1]
        engine.plan_drafts(batch, requests, starts)
        engine.run_drafts(batch)
        assert [len(out) for out in outputs] == [6, 2]
        last = [3 * number + count - 1 for number, count in enumerate(kept)]
        best = [engine.model.compute_logits(out).argmax(-1) for out in (outputs[0][last], outputs[1])]
        assert batch.drafts.tolist() == torch.stack(best, dim=1).tolist()
        assert [later.positions.tolist() for later in batch.draft_batches] == [[at + 1 for at in starts]]


def test_accepted_drafts_end_at_the_first_difference():
    """Rows of 4 tokens have the known one, then drafts. The sampled tokens are all equal, differ in the second, and in
    the first.
    """
    tokens = torch.tensor([[9, 1, 2, 3], [9, 1, 5, 3], [9, 4, 2, 3]]).flatten()
    sampled = torch.tensor([[1, 2, 3, 8], [1, 2, 3, 8], [1, 2, 3, 8]]).flatten()
    assert count_accepted(tokens, sampled, 4).tolist() == [3, 1, 0]
