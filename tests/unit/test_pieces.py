"""Piecewise CUDA graphs: steps with chunks, divided at attention, give the logits of an undivided step."""

import dataclasses
from unittest import mock

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
from tests.unit.engine_builder import CPU, TINY, make_groups, make_layers, make_shape
from tests.unit.prefill_builder import Prompt, make_prompt_tokens, run_step

ONE = Layout(1)
PAGE, TOKENS, REQUESTS = 2, 40, 4
GROUPED = {  # fields of grouped-query attention
    "gqa": Gqa(kv_heads=2, qk_norm=True), "q_lora": None, "latent": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "rope_interleaved": False,
}  # fmt: skip
MODELS = {
    "q_low_rank": make_shape(),
    "q_whole": make_shape(q_lora=None),
    "dense_only": make_shape(layers=2, first_k_dense_replace=2),
    "one_layer": make_shape(layers=1, first_k_dense_replace=0),
    "grouped": make_shape(**GROUPED),
    "grouped_dense_only": make_shape(layers=2, first_k_dense_replace=2, tie_word_embeddings=True, **GROUPED),
}
BIG = make_shape(
    hidden=512,
    heads=16,
    q_lora=256,
    experts=16,
    top_k=4,
    moe_intermediate_size=256,
    latent=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
)

BIG_GROUPED = make_shape(
    hidden=512,
    heads=16,
    experts=16,
    top_k=4,
    moe_intermediate_size=256,
    **GROUPED | {"qk_rope_head_dim": 128, "v_head_dim": 128},
)


def engine(shape, device=CPU, dtype=torch.float32, attention="reference", prefill="sdpa", window=None, layout=ONE):
    """Return an engine of one rank and a prefiller, with windows of this many stored tokens."""
    weights = load_weights(SyntheticSource(0, dtype, device), shape, layout, 0, make_layers(shape))
    kv = KvPool(shape.layers, 64, PAGE, shape.compute_kv_width(layout.attn_tp), dtype, device)
    groups = dataclasses.replace(make_groups(layout, 0), dp=Same(layout.dp, 0, None))
    model = Model(shape, layout, groups, weights, kv, interleave=1, max_context=32, device=device)
    decode_engine = DecodeEngine(model, backend=attention, exchange="none", max_requests=REQUESTS, max_context=32)
    with mock.patch.object(memory, "PREFILL_WINDOW", window or memory.PREFILL_WINDOW):
        return decode_engine, Prefiller(model, backend=prefill, tokens=TOKENS, rows=TOKENS + REQUESTS)


def compute_logits(decode_engine, prefiller, pieces):
    """Return the logits of five steps: a large one, a smaller one, decodes with chunks after 2 and 4 stored tokens,
    then after 14 and 20.
    """
    first, second, third, fourth = (Prompt.admit(decode_engine, make_prompt_tokens(number, 24)) for number in range(4))
    steps = [
        ([], [(first, 16), (second, 18)]),
        ([], [(third, 2), (fourth, 4)]),
        ([first, second], [(third, 12), (fourth, 8)]),
        ([first], [(third, 6)]),
        ([first, second], [(third, 4)]),
    ]
    return [run_step(decode_engine, prefiller, *parts, last_only=True, pieces=pieces) for parts in steps]


class TestRows:
    def test_rows_are_padded_by_at_most_a_sixteenth(self):
        for rows in range(1, 5000):
            padded = compute_chunk_rows(rows)
            assert 0 <= padded - rows < max(16, rows / 16 + 1)
            assert compute_chunk_rows(padded) == padded

    def test_padded_rows_are_the_listed_sizes(self):
        assert {compute_chunk_rows(rows) for rows in range(1, 4161)} == set(list_chunk_rows(4160))


class TestLogits:
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    @pytest.mark.parametrize("name", MODELS)
    def test_logits_equal_those_of_an_undivided_step(self, name, window):
        """A small step follows a large one in the same buffers, with padding rows at their end. With windows of 4
        stored tokens the first prefixes need one call each, and later ones several windows.
        """
        plain = compute_logits(*engine(MODELS[name]), None)
        decode_engine, prefiller = engine(MODELS[name], window=window)
        divided = compute_logits(decode_engine, prefiller, Pieces(prefiller, None))
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(divided, plain, strict=True))

    def test_step_with_only_padding_runs(self):
        """A replica without work runs such a step while another one prefills."""
        decode_engine, prefiller = engine(TINY)
        pieces = Pieces(prefiller, None)
        pieces.buffers.values.fill_(torch.nan)  # as a failed step may leave it
        found = run_step(decode_engine, prefiller, [], [], padding=3, pieces=pieces)
        assert found.isfinite().all()

    @pytest.mark.gpu
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    @pytest.mark.parametrize("prefill", ["sdpa", "flashinfer"])
    @pytest.mark.parametrize("big", [BIG, BIG_GROUPED], ids=["mla", "gqa"])
    def test_captured_logits_equal_those_of_an_undivided_step(self, big, prefill, window):
        """The steps use bf16 and experts, and the same kernels on the same rows, except for padding and windows."""
        if prefill == "flashinfer":
            pytest.importorskip("flashinfer")
        device = torch.device("cuda")
        engines = [engine(big, device, torch.bfloat16, "triton", prefill, size) for size in (None, window)]
        plain = compute_logits(*engines[0], None)
        decode_engine, prefiller = engines[1]
        pieces = Pieces(prefiller, None)
        sizes = [decode_engine.plan_rows([], [], size) for size in (2, 1)]
        pieces.capture_all(sizes, lambda: None)
        divided = compute_logits(decode_engine, prefiller, pieces)
        scale = max(float(x.abs().max()) for x in plain)
        assert all((a - b).abs().max() < 0.02 * scale for a, b in zip(divided, plain, strict=True))
        assert {len(sized.graphs) for sized in pieces.cuts.values()} == {big.layers + 1}
        assert {size: len(sized.graphs) for size, sized in pieces.decodes.items()} == {1: big.layers, 2: big.layers}
        assert len(pieces.graphs) == big.layers


@dataclasses.dataclass(frozen=True)
class Same(Group):
    """Replicas in which all others have the rows of this one."""

    def all_gather(self, x):
        return torch.stack([x] * self.size)

    def reduce_scatter(self, x):
        return x[: len(x) // self.size].contiguous()


class TestReplicas:
    @pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def test_rows_that_are_not_live_do_not_change_live_rows(self, device):
        """Two replicas have pieces of 16 rows each, captured on a GPU. After any previous steps, live tokens have the
        logits of an undivided step, and only other tokens may change.
        """
        on_gpu = device == "cuda"
        kind = (torch.device(device), torch.bfloat16, "triton") if on_gpu else ()
        shape = BIG if on_gpu else TINY

        def run_steps(live, *, cut):
            decode_engine, prefiller = engine(shape, *kind, layout=Layout(2, dp=2))
            pieces = Pieces(prefiller, None) if cut else None
            if pieces and on_gpu:
                pieces.capture_all([], lambda: None)
            return [
                run_step(
                    decode_engine,
                    prefiller,
                    [],
                    [(Prompt.admit(decode_engine, make_prompt_tokens(n, 16)), 16)],
                    pieces=pieces,
                    live=each,
                )[:16]
                for n, each in enumerate(live)
            ]

        whole = run_steps([None, None], cut=False)
        partly_live = run_steps([[16, 0], [8, 16]], cut=True)
        scale = 0.02 if on_gpu else 1e-5
        is_close = [
            ((a - b).abs().amax(-1) < scale * whole[0].abs().max()).tolist()
            for a, b in zip(partly_live, whole, strict=True)
        ]
        assert is_close[0] + is_close[1][:8] == [True] * 24
        assert not all(is_close[1][8:]), "this rank has some experts of the other tokens"


class TestHeartbeats:
    @pytest.mark.parametrize("window", [4, None], ids=["windows", "one-call"])
    def test_prefix_is_gathered_in_the_layer_of_the_last_heartbeat(self, window, monkeypatch):
        """If a rank waits in an all-gather of prefixes, `hang` names the layer by its last heartbeat."""
        heartbeats_seen, gathered = [], []
        monkeypatch.setattr(heartbeats, "record_layer", heartbeats_seen.append)
        monkeypatch.setattr(
            Prefiller, "gather_prefix", lambda _, _seen, index: gathered.append((index, heartbeats_seen[-1]))
        )
        decode_engine, prefiller = engine(TINY, window=window)
        pieces, prompt = Pieces(prefiller, None), Prompt.admit(decode_engine, make_prompt_tokens(0, 24))
        for tokens in (14, 6):
            run_step(decode_engine, prefiller, [], [(prompt, tokens)], pieces=pieces)
        assert {index for index, _ in gathered} == set(range(TINY.layers))
        assert all(index == layer for index, layer in gathered)


class TestLaunches:
    def test_prefix_in_one_window_adds_no_attention_call(self, monkeypatch):
        """A layer has one call without and with such a prefix; each further window adds one: 14 tokens in windows of 4
        are four more.
        """
        original, calls = PlainRagged.run, []

        def count_calls(self, *args):
            calls.append(self)
            return original(self, *args)

        monkeypatch.setattr(PlainRagged, "run", count_calls)
        shape = MODELS["dense_only"]
        for window, expected in ((None, [1, 1]), (4, [1, 5])):
            decode_engine, prefiller = engine(shape, window=window)
            pieces, prompt = Pieces(prefiller, None), Prompt.admit(decode_engine, make_prompt_tokens(0, 24))
            for tokens, each in zip((14, 6), expected, strict=True):
                calls.clear()
                run_step(decode_engine, prefiller, [], [(prompt, tokens)], pieces=pieces)
                assert len(calls) == each * shape.layers

    @pytest.mark.gpu
    def test_prefix_in_one_window_adds_no_launch(self, monkeypatch):
        """Launches are graphs, kernels and copies, from the embedding to the logits of a planned step."""
        decode_engine, prefiller = engine(BIG, torch.device("cuda"), torch.bfloat16, "triton")
        pieces, prompt = Pieces(prefiller, None), Prompt.admit(decode_engine, make_prompt_tokens(0, 24))
        pieces.capture_all([], lambda: None)
        original, launched = StepPieces.run_step, []

        def count_launches(self, *args):
            both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=both, acc_events=True) as profile:
                found = original(self, *args)
                torch.cuda.synchronize()
            calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("cu")}
            launched.append(
                {key: n for key, n in calls.items() if "Launch" in key or "Memcpy" in key or "Memset" in key}
            )
            return found

        monkeypatch.setattr(StepPieces, "run_step", count_launches)
        for _ in range(3):
            run_step(decode_engine, prefiller, [], [(prompt, 8)], pieces=pieces)
        assert sum(launched[1].values()) >= 2 * BIG.layers + 1
        assert launched[1] == launched[2]
        again = Prompt.admit(decode_engine, make_prompt_tokens(1, 24))
        run_step(decode_engine, prefiller, [], [(again, 8)], pieces=pieces)
        assert launched[3] == launched[2], "a step without a prefix has as many launches"
