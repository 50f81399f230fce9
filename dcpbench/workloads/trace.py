"""Prompts decoded greedily by an engine, with every intermediate result that `transformers` can be compared with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.model import KV_ROW, OBSERVED, QUERY, VALUES
from dcpbench.engine.weights import Moe
from dcpbench.kernels import moe
from dcpbench.kernels.block_scaled import Rows, needs_quantized_input, quantize_rows
from dcpbench.kernels.gqa import split_rows

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import Batch, DecodeEngine, Request
    from dcpbench.engine.model import Model
    from dcpbench.points.prompts import Prompts

STAGGER = 3  # request i starts 3·i steps after the first, so that lengths differ and rows in between are padding
ROUTER, EXPERTS = "router", "experts"  # names in `results`: logits [P, MoE layers, E], chosen ids [P, MoE layers, k]
SPLIT = (QUERY, VALUES)  # results that are split by heads over the ranks


@dataclasses.dataclass(frozen=True)
class Trace:
    """Results that an engine computed for one request, on the CPU."""

    prompt: int  # number of tokens of the prompt
    tokens: list[int]  # token at each of the P positions: the prompt, and its continuation without the last token
    results: dict[str, torch.Tensor]  # [P, layers, …], all heads, by OBSERVED, ROUTER, EXPERTS; NaN if a layer has none
    logits: torch.Tensor  # [P, vocab]


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """Tokens and traces that one rank decoded."""

    tokens: dict[int, list[int]]  # new tokens of each of its replica's requests
    traces: dict[int, Trace]  # traces of these requests; only the first rank of each replica has them
    experts: torch.Tensor | None  # [MoE layers, E, D]: expert e's output for row e of `make_expert_inputs`; rank 0 only


class _Recording:
    """Results of one request, a position after the other."""

    def __init__(self, prompt: tuple[int, ...], new: int) -> None:
        self.prompt, self.positions = len(prompt), len(prompt) + new - 1
        self.tokens = list(prompt)
        self.results: dict[str, list[torch.Tensor]] = {}
        self.logits: list[torch.Tensor] = []

    def add_row(self, row: int, results: dict[str, torch.Tensor], logits: torch.Tensor, next_token: int) -> None:
        """Add row `row` of a step's batch from results [layers, B, …] and logits [B, vocab]."""
        for name, result in results.items():
            self.results.setdefault(name, []).append(result[:, row])
        self.logits.append(logits[row])
        if len(self.logits) >= self.prompt:
            self.tokens.append(next_token)

    def get_trace(self) -> Trace:
        """Return the complete trace."""
        results = {name: torch.stack(found) for name, found in self.results.items()}
        return Trace(self.prompt, self.tokens[: self.positions], results, torch.stack(self.logits))


def decode_prompts(engine: DecodeEngine, prompts: Prompts, new: int) -> DecodeResult:
    """Feed this replica's prompts token by token and continue each greedily by `new` tokens. Collective."""
    dp, model = engine.model.groups.dp, engine.model
    rows = -(-len(prompts) // dp.size)
    recordings = {i: _Recording(prompts[i], new) for i in range(dp.rank, len(prompts), dp.size)}
    live: dict[int, Request] = {}
    for step in range(max(STAGGER * i + len(p) + new - 1 for i, p in enumerate(prompts))):
        for i, recording in recordings.items():
            position = step - STAGGER * i
            if position == 0:
                live[i] = engine.add_request(1)
            elif i in live and position < recording.positions:
                engine.append_token(live[i])
            elif i in live:
                engine.remove_request(live.pop(i))
            if i in live and position < recording.prompt:
                engine.request_pool.set_tokens(live[i].slot, position, [prompts[i][position]])
        batch = engine.plan_step(list(live.values()), rows)
        results, logits, next_tokens = _run_step(engine, batch)
        for row, i in enumerate(live):
            recordings[i].add_row(row, results, logits, next_tokens[row])
    tokens = {i: recording.tokens[recording.prompt :] for i, recording in recordings.items()}
    outputs_LED = _run_experts(model)
    if model.groups.attn.rank != 0:
        return DecodeResult(tokens, {}, None)
    traces = {i: recording.get_trace() for i, recording in recordings.items()}
    return DecodeResult(tokens, traces, outputs_LED if dp.rank == 0 else None)


def _run_step(engine: DecodeEngine, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Run a planned step; return its results [layers, B, …] of all heads, logits [B, vocab] and next tokens."""
    model = engine.model
    model.observed, model.chosen_experts = {name: [] for name in OBSERVED}, []
    engine.run_eager(batch)
    observed, routed = model.observed, model.chosen_experts
    model.observed = model.chosen_experts = None
    assert batch.logits is not None
    assert batch.next_tokens is not None
    results = {name: _collect_layers(found, model.shape.layers) for name, found in observed.items()}
    results |= {name: _gather_heads(model, results[name]) for name in SPLIT}
    if model.shape.gqa:
        results[KV_ROW] = _gather_kv_heads(model, results[KV_ROW], model.shape.gqa.kv_heads)
    mine = slice(model.groups.dp.rank * batch.size, (model.groups.dp.rank + 1) * batch.size)
    if model.shape.layers > model.shape.first_k_dense_replace:
        moe_layers = model.shape.layers - model.shape.first_k_dense_replace
        results[ROUTER] = _collect_layers([logits_TE[mine] for logits_TE, _ in routed], moe_layers)
        results[EXPERTS] = _collect_layers([ids_Tk[mine] for _, ids_Tk in routed], moe_layers)
    logits = model.gather_logits(batch.logits).cpu()
    return {name: result.cpu() for name, result in results.items()}, logits, batch.next_tokens.tolist()


def make_expert_inputs(experts: int, hidden: int) -> torch.Tensor:
    """Return a random row for each expert, [E, D], the same in each call."""
    return torch.randn(experts, hidden, generator=torch.Generator().manual_seed(0))


def _run_experts(model: Model) -> torch.Tensor | None:
    """Return `DecodeResult.experts`, summed over all ranks: prompts may never choose some experts. Collective."""
    shape, device = model.shape, model.kv.data.device
    if shape.layers == shape.first_k_dense_replace:
        return None
    x_ED = make_expert_inputs(shape.experts, shape.hidden).to(device, model.dtype)
    ids_E1 = torch.arange(shape.experts, dtype=torch.int32, device=device).unsqueeze(1)
    weights_E1 = torch.ones(ids_E1.shape, device=device)
    outputs = []
    for index in range(shape.first_k_dense_replace, shape.layers):
        w = model.weights.get_layer(index).mlp
        assert isinstance(w, Moe)
        rows = Rows(quantize_rows(x_ED), x_ED.dtype, x_ED) if needs_quantized_input(w.gate_up) else x_ED
        y_ED = moe.apply_experts(rows, w.gate_up, w.down, weights_E1, ids_E1, w.first, torch.zeros_like(x_ED))
        outputs.append(model.groups.dp.all_reduce(model.groups.attn.all_reduce(y_ED)).cpu())
    return torch.stack(outputs)


def _collect_layers(found: list[torch.Tensor], layers: int) -> torch.Tensor:
    """Return [layers, B, …]. Layers that are missing are NaN, or expert -1, so that no comparison can pass."""
    missing = layers - len(found)
    if missing < 0:
        found = found[:layers]
    stacked = torch.stack(found)
    filling = float("nan") if stacked.is_floating_point() else -1
    return torch.cat((stacked, stacked.new_full((missing, *stacked.shape[1:]), filling))) if missing > 0 else stacked


def _gather_heads(model: Model, result: torch.Tensor) -> torch.Tensor:
    """Return [layers, B, H, …] of the heads of all ranks of a replica. Collective."""
    return torch.cat(list(model.groups.attn.all_gather(result.contiguous())), dim=2)


def _gather_kv_heads(model: Model, rows_LBW: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return rows with the K heads and then the V heads of all ranks of a replica; one copy of each head. Collective."""
    ranks = model.layout.attn_tp
    parts = model.groups.attn.all_gather(rows_LBW.contiguous())[:: max(1, ranks // kv_heads)]
    both = [split_rows(part, model.shape.count_kv_heads(ranks)) for part in parts]
    return torch.stack([torch.cat(heads, dim=2) for heads in zip(*both, strict=True)], dim=2).flatten(2)
