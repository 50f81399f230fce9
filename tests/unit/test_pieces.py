"""Steps with chunks cut into pieces between attentions give what the plain walk gives, captured or not."""

import dataclasses

import pytest
import torch

from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.piecewise_graph import Pieces, StepPieces
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.exchange.torch_collectives import Group
from dcpbench.hangs import heartbeats
from dcpbench.kernels.prefill.sdpa import PlainRagged
from dcpbench.models.shapes import Gqa
from dcpbench.points import memory
from dcpbench.points.batches import compute_chunk_rows, list_chunk_rows
from dcpbench.points.layout import Layout
from tests.unit.engine_builder import CPU, TINY, alone, layers, shape_like_tiny
from tests.unit.prefill_builder import Prompt, prompt_tokens, step

ONE = Layout(1)
PAGE, TOKENS, REQUESTS = 2, 40, 4
GROUPED = {  # fields of grouped-query attention
    "gqa": Gqa(kv_heads=2, qk_norm=True), "q_lora": None, "latent": 0, "nope": 0, "rope": 16, "value": 16,
    "rope_interleaved": False,
}  # fmt: skip
MODELS = {
    "q_low_rank": shape_like_tiny(),
    "q_whole": shape_like_tiny(q_lora=None),
    "dense_only": shape_like_tiny(layers=2, first_dense=2),
    "one_layer": shape_like_tiny(layers=1, first_dense=0),
    "grouped": shape_like_tiny(**GROUPED),
    "grouped_dense_only": shape_like_tiny(layers=2, first_dense=2, tied=True, **GROUPED),
}
BIG = shape_like_tiny(
    hidden=512, heads=16, q_lora=256, experts=16, top_k=4, moe_inter=256, latent=512, rope=64, nope=128, value=128
)

BIG_GROUPED = shape_like_tiny(
    hidden=512, heads=16, experts=16, top_k=4, moe_inter=256, **GROUPED | {"rope": 128, "value": 128}
)


def engine(shape, device=CPU, dtype=torch.float32, attention="reference", prefill="sdpa", window=None, layout=ONE):
    """One rank, and what attends for its prompts, over stored ones in windows of so many tokens."""
    weights = load_weights(SyntheticSource(0, dtype, device), shape, layout, 0, layers(shape))
    kv = KvPool(shape.layers, 64, PAGE, shape.compute_kv_width(layout.attn_tp), dtype, device)
    groups = dataclasses.replace(alone(layout, 0), dp=Same(layout.dp, 0, None))
    model = Model(shape, layout, groups, weights, kv, interleave=1, max_context=32, device=device)
    of = DecodeEngine(model, backend=attention, exchange="none", max_requests=REQUESTS, max_context=32)
    nbytes = None if window is None else memory.compute_window_bytes(shape, ONE, window, dtype.itemsize)
    return of, Prefiller(model, backend=prefill, tokens=TOKENS, rows=TOKENS + REQUESTS, window_bytes=nbytes)


def logits(of, prefiller, pieces):
    """Return the logits of five steps: a large one, one with less of all, decodes with chunks behind 2 and 4 stored tokens, then behind 14, 20."""
    first, second, third, fourth = (Prompt.admit(of, prompt_tokens(number, 24)) for number in range(4))
    steps = [
        ([], [(first, 16), (second, 18)]),
        ([], [(third, 2), (fourth, 4)]),
        ([first, second], [(third, 12), (fourth, 8)]),
        ([first], [(third, 6)]),
        ([first, second], [(third, 4)]),
    ]
    return [step(of, prefiller, *what, last_only=True, pieces=pieces) for what in steps]


class TestRows:
    def test_they_are_padded_by_a_sixteenth_at_most_past_the_first_few(self):
        for rows in range(1, 5000):
            padded = compute_chunk_rows(rows)
            assert 0 <= padded - rows < max(16, rows / 16 + 1)
            assert compute_chunk_rows(padded) == padded

    def test_every_number_of_rows_is_one_of_the_sizes(self):
        assert {compute_chunk_rows(rows) for rows in range(1, 4161)} == set(list_chunk_rows(4160))


class TestLogits:
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    @pytest.mark.parametrize("name", MODELS)
    def test_they_are_those_of_the_plain_walk(self, name, window):
        """They are also equal if a small step follows a large one in the same buffers, with rows of padding behind it. With capacity for 4 stored tokens the first prefixes have a call each, and later ones windows."""
        plain = logits(*engine(MODELS[name]), None)
        of, prefiller = engine(MODELS[name], window=window)
        cut = logits(of, prefiller, Pieces(prefiller, None))
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(cut, plain, strict=True))

    def test_a_step_of_padding_alone_runs(self):
        """A replica that has nothing to do while another prefills."""
        of, prefiller = engine(TINY)
        pieces = Pieces(prefiller, None)
        pieces.buffers.values.fill_(torch.nan)  # as an unlucky step left it
        found = step(of, prefiller, [], [], padding=3, pieces=pieces)
        assert found.isfinite().all()

    @pytest.mark.gpu
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    @pytest.mark.parametrize("prefill", ["sdpa", "flashinfer"])
    @pytest.mark.parametrize("big", [BIG, BIG_GROUPED], ids=["mla", "gqa"])
    def test_captured_pieces_give_those_of_the_plain_walk(self, big, prefill, window):
        """In bf16, over experts; the same kernels on the same rows, but for padding and windows."""
        if prefill == "flashinfer":
            pytest.importorskip("flashinfer")
        device = torch.device("cuda")
        made = [engine(big, device, torch.bfloat16, "triton", prefill, size) for size in (None, window)]
        plain = logits(*made[0], None)
        of, prefiller = made[1]
        pieces = Pieces(prefiller, None)
        sizes = [of.plan_rows([], [], size) for size in (2, 1)]
        pieces.capture_all(sizes, lambda: None)
        cut = logits(of, prefiller, pieces)
        scale = max(float(x.abs().max()) for x in plain)
        assert all((a - b).abs().max() < 0.02 * scale for a, b in zip(cut, plain, strict=True))
        assert {len(sized.graphs) for sized in pieces.cuts.values()} == {big.layers + 1}
        assert {size: len(sized.graphs) for size, sized in pieces.decodes.items()} == {1: big.layers, 2: big.layers}
        assert len(pieces.graphs) == big.layers


@dataclasses.dataclass(frozen=True)
class Same(Group):
    """Replicas of which all others have this one's rows."""

    def all_gather(self, x):
        return torch.stack([x] * self.size)

    def reduce_scatter(self, x):
        return x[: len(x) // self.size].contiguous()


class TestReplicas:
    @pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_rows_past_those_that_a_replica_has_go_to_no_expert(self, where):
        """
            Two replicas have pieces of 16 rows each, captured on a GPU. Whatever steps they ran before, tokens that count are those of the plain
        walk, and only tokens that do not count may change.
        """
        on_gpu = where == "cuda"
        kind = (torch.device(where), torch.bfloat16, "triton") if on_gpu else ()
        shape = BIG if on_gpu else TINY

        def found(live, *, cut):
            of, prefiller = engine(shape, *kind, layout=Layout(2, dp=2))
            pieces = Pieces(prefiller, None) if cut else None
            if pieces and on_gpu:
                pieces.capture_all([], lambda: None)
            return [
                step(of, prefiller, [], [(Prompt.admit(of, prompt_tokens(n, 16)), 16)], pieces=pieces, live=each)[:16]
                for n, each in enumerate(live)
            ]

        whole = found([None, None], cut=False)
        some = found([[16, 0], [8, 16]], cut=True)
        scale = 0.02 if on_gpu else 1e-5
        near = [
            ((a - b).abs().amax(-1) < scale * whole[0].abs().max()).tolist() for a, b in zip(some, whole, strict=True)
        ]
        assert near[0] + near[1][:8] == [True] * 24
        assert not all(near[1][8:]), "some of whose experts this rank has"


class TestBeats:
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    def test_a_prefix_is_gathered_in_the_layer_that_attends_to_it(self, window, monkeypatch):
        """If a rank waits in an all-gather of prefixes, `hang` names the layer by its last heartbeat."""
        said, gathered = [], []
        monkeypatch.setattr(heartbeats, "record_layer", said.append)
        monkeypatch.setattr(Prefiller, "gather_prefix", lambda _, _seen, index: gathered.append((index, said[-1])))
        of, prefiller = engine(TINY, window=window)
        pieces, prompt = Pieces(prefiller, None), Prompt.admit(of, prompt_tokens(0, 24))
        for tokens in (14, 6):
            step(of, prefiller, [], [(prompt, tokens)], pieces=pieces)
        assert {index for index, _ in gathered} == set(range(TINY.layers))
        assert all(index == layer for index, layer in gathered)


class TestLaunches:
    def test_a_prefix_that_fits_brings_no_call_of_attention(self, monkeypatch):
        """One a layer, without and with it; windows bring one each: 14 tokens in windows of 4 are four more."""
        real, calls = PlainRagged.run, []

        def counted(self, *args):
            calls.append(self)
            return real(self, *args)

        monkeypatch.setattr(PlainRagged, "run", counted)
        shape = MODELS["dense_only"]
        for window, expected in ((None, [1, 1]), (4, [1, 5])):
            of, prefiller = engine(shape, window=window)
            pieces, prompt = Pieces(prefiller, None), Prompt.admit(of, prompt_tokens(0, 24))
            for tokens, each in zip((14, 6), expected, strict=True):
                calls.clear()
                step(of, prefiller, [], [(prompt, tokens)], pieces=pieces)
                assert len(calls) == each * shape.layers

    @pytest.mark.gpu
    def test_a_prefix_that_fits_brings_no_launch(self, monkeypatch):
        """Launches are graphs, kernels and copies, from the embedding to the logits of a planned step."""
        of, prefiller = engine(BIG, torch.device("cuda"), torch.bfloat16, "triton")
        pieces, prompt = Pieces(prefiller, None), Prompt.admit(of, prompt_tokens(0, 24))
        pieces.capture_all([], lambda: None)
        real, launched = StepPieces.run_step, []

        def counted(self, *args):
            both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=both, acc_events=True) as seen:
                found = real(self, *args)
                torch.cuda.synchronize()
            calls = {event.key: event.count for event in seen.key_averages() if event.key.startswith("cu")}
            launched.append(
                {key: n for key, n in calls.items() if "Launch" in key or "Memcpy" in key or "Memset" in key}
            )
            return found

        monkeypatch.setattr(StepPieces, "run_step", counted)
        for _ in range(3):
            step(of, prefiller, [], [(prompt, 8)], pieces=pieces)
        assert sum(launched[1].values()) >= 2 * BIG.layers + 1
        assert launched[1] == launched[2]
        again = Prompt.admit(of, prompt_tokens(1, 24))
        step(of, prefiller, [], [(again, 8)], pieces=pieces)
        assert launched[3] == launched[2], "without a prefix"
