"""Compare each operation of each layer with `transformers`, separately, on an engine's own intermediate results.

One forward pass runs over the text that the engine read and wrote. The model computes in fp32 and rounds where the
engine rounds (rounding.py). Hooks compare the result of each operation with the engine's, and pass the engine's on, so
that the next operation has the same input in both. Errors do not accumulate: limits are the same at any depth, and an
error is found at its origin.

    query      q of all heads, of MLA before rope        from the layer's input: norm, projections
    KV latent  columns [0, R) of KV rows of MLA          from the layer's input: norm, projections
    rope key   columns [R, R + P) of KV rows of MLA      from the layer's input: norm, projections, rope
    key        K heads of grouped-query attention        from the layer's input: norm, projections, rope
    value      V heads of grouped-query attention        from the layer's input: norm, projections
    attention  attention outputs of all heads            from q, and KV rows as the cache stores them
    o_proj     the output projection                     from attention outputs
    router     router logits                             from the residual: norm, router
    MLP        dense MLP, or experts and shared expert   from the residual, and the experts that the engine chose
    expert     each routed expert by itself              from a random row
    logits     logits                                    from the residual: norm, lm_head
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from dcpbench.engine import model as engine_model
from dcpbench.workloads.trace import EXPERTS, ROUTER, make_expert_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.workloads.rounding import Roundings
    from dcpbench.workloads.trace import Trace

    Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key and value, [1, heads, P, width] each

QUERY, LATENT, ROPE_KEY, ATTENTION = "query", "KV latent", "rope key", "attention"
KEY, VALUE = "key", "value"
O_PROJ, MLP, EXPERT, LOGITS = "o_proj", "MLP", "expert", "logits"
SCORE_STEP = 0.05  # change of the softmax scale by which the derivative of attention outputs is taken
IMPLEMENTATION = "dcpbench_teacher_forcing"  # name under which transformers finds the attention below
TIE = 4 * torch.finfo(torch.float32).eps  # share of the largest score below which two experts' scores are a tie


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of the engine's result of one operation from the model's."""

    stage: str
    layer: int
    errors: torch.Tensor  # [P]: ‖engine − model‖ / ‖model‖ by position, ‖model‖ being at least its median
    scores: float = 0.0  # root mean square of attention scores, of the attention stage


@dataclasses.dataclass(frozen=True)
class ScoreScale:
    """Projection of a layer's attention errors onto the derivative of the outputs by the logarithm of the softmax
    scale.

    Rounding errors have no direction, so a wrong softmax scale is detected even if each output is within its limit.
    """

    overlap: float  # ⟨engine − model, derivative⟩: of all positions and heads
    derivative: float  # ‖derivative‖²
    error: float  # ‖engine − model‖²
    outputs: int  # number of positions times heads


@dataclasses.dataclass
class Comparison:
    """All differences of one request."""

    differences: list[Difference]
    score_scales: list[ScoreScale]
    misrouted: torch.Tensor  # bool [P]: some layer's experts are not those of the router logits and stored bias
    logits: torch.Tensor  # [P, vocab]: the model's, from the engine's last hidden states


class TeacherForcing:
    """A model with a forward pass that compares with a trace and continues with its results. One per model, reusable."""

    def __init__(self, model: Any, roundings: Roundings) -> None:  # noqa: ANN401 - transformers' classes differ by version
        """Round the parameters of a transformers model in fp32, and attach hooks to it."""
        self.model, self.roundings, self.config = model, roundings, model.config
        self.interleaved = bool(getattr(self.config, "rope_interleave", False))
        self.trace: Trace | None = None
        self.differences: list[Difference] = []
        self.score_scales: list[ScoreScale] = []
        self.misrouted = torch.zeros(0, dtype=torch.bool)
        self._round_parameters()
        self._attach_hooks()

    @torch.no_grad()
    def compare_trace(self, trace: Trace) -> Comparison:
        """Return how the engine's results of one request differ from the model's."""
        self.trace, self.differences, self.score_scales = trace, [], []
        self.misrouted = torch.zeros(len(trace.tokens), dtype=torch.bool)
        logits = self.model(torch.tensor([trace.tokens]), use_cache=False).logits[0]
        self._record_difference(LOGITS, self.config.num_hidden_layers, trace.logits, logits)
        return Comparison(self.differences, self.score_scales, self.misrouted, logits)

    @torch.no_grad()
    def compare_experts(self, engine_LED: torch.Tensor) -> list[Difference]:
        """Return how the engine's experts differ: expert e of each MoE layer on row e of `make_expert_inputs`."""
        differences = []
        for engine_ED, (index, layer) in zip(engine_LED, self._list_moe_layers(), strict=True):
            inputs_ED = self.roundings.round_activation(make_expert_inputs(*engine_ED.shape))
            ids_E1 = torch.arange(len(inputs_ED)).unsqueeze(1)
            found_ED = apply_experts(layer.mlp.experts, self.roundings, inputs_ED, ids_E1, torch.ones(ids_E1.shape))
            errors = compute_relative_errors(engine_ED, self.roundings.round_activation(found_ED))
            differences.append(Difference(EXPERT, index, errors))
        return differences

    def _list_moe_layers(self) -> list[tuple[int, Any]]:
        return [(i, layer) for i, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "experts")]

    def _record_difference(
        self, stage: str, layer: int, engine: torch.Tensor, model: torch.Tensor, scores: float = 0.0
    ) -> None:
        self.differences.append(Difference(stage, layer, compute_relative_errors(engine, model), scores))

    def _get_result(self, name: str, layer: int) -> torch.Tensor:
        """Return the engine's result at all positions of a layer, [P, …], in fp32."""
        assert self.trace is not None
        return self.trace.results[name][:, layer].float()

    def _compare_result(self, stage: str, name: str, layer: int, found: torch.Tensor) -> torch.Tensor:
        """Compare one result and return the engine's in its place."""
        engine = self._get_result(name, layer).reshape(found.shape)
        self._record_difference(stage, layer, engine[0], found[0])
        return engine

    def _round_parameters(self) -> None:
        """Round the parameters that the engine holds in its dtype: all but e4m3 weights, which are exact, and routing
        biases.
        """
        exact = ROUNDED_INPUTS if self.roundings.fp8_weights else ()
        for name, parameter in self.model.named_parameters():
            if not name.endswith(tuple(f".{e}.weight" for e in exact)) and not (exact and ".experts." in name):
                parameter.data = self.roundings.round_activation(parameter.data)

    def _attach_hooks(self) -> None:
        for name, module in self.model.named_modules():
            if name.endswith("norm"):
                _round_norm(module, self.roundings.round_activation)
            elif isinstance(module, torch.nn.Linear):
                self._round_linear(module, name)
        for index, layer in enumerate(self.model.model.layers):
            _attach_before(layer.input_layernorm, self._round_residual)
            _attach_before(layer.post_attention_layernorm, self._round_residual)
            self._attach_attention(layer.self_attn, index)
            _attach_after(layer.mlp, self.roundings.round_activation)
            _attach_after(layer.mlp, functools.partial(self._compare_result, MLP, engine_model.MLP, index))
        for index, layer in self._list_moe_layers():
            self._attach_router(layer.mlp, index)
        _attach_before(self.model.model.norm, self._round_residual)

    def _round_linear(self, module: torch.nn.Linear, name: str) -> None:
        """Round a linear layer's input, if its weights are e4m3, and its output."""
        leaf = name.rpartition(".")[2]
        if leaf in ROUNDED_INPUTS:
            parts = 1
            if leaf == "o_proj":
                parts = self.roundings.attention_parts
            elif leaf == "down_proj":
                parts = self.roundings.mlp_parts
            _attach_before(
                module, lambda x: self.roundings.round_weight_input(self.roundings.round_activation(x), parts)
            )
        if leaf != "kv_b_proj":  # which the engine absorbs: keys and values of single heads are never rounded
            _attach_after(module, self.roundings.round_activation)

    def _round_residual(self, x: torch.Tensor) -> torch.Tensor:
        """Round in place, because the layer adds to the same tensor after the norm."""
        return x.copy_(self.roundings.round_activation(x))

    def _attach_attention(self, attention: Any, index: int) -> None:  # noqa: ANN401
        if hasattr(attention, "kv_a_layernorm"):
            query = attention.q_proj if attention.q_b_proj is None else attention.q_b_proj
            _attach_after(query, functools.partial(self._compare_result, QUERY, engine_model.QUERY, index))
            _attach_after(attention.kv_a_layernorm, functools.partial(self._compare_latent, index))
            attention.attend = functools.partial(self._run_attention, self._store_latent_inputs, index)
        else:
            attention.attend = functools.partial(self._run_attention, self._store_grouped_inputs, index)
        _attach_after(attention.o_proj, functools.partial(self._compare_result, O_PROJ, engine_model.ATTENTION, index))

    def _compare_latent(self, layer: int, found: torch.Tensor) -> torch.Tensor:
        engine_PR = self._get_result(engine_model.KV_ROW, layer)[:, : self.config.kv_lora_rank]
        self._record_difference(LATENT, layer, engine_PR, found[0])
        return self.roundings.round_kv_row(engine_PR).reshape(found.shape)

    def _compare_rope_key(self, layer: int, found_PR: torch.Tensor) -> torch.Tensor:
        """Compare rope keys; transformers separates their pairs if config.json has them interleaved."""
        engine_PR = self._get_result(engine_model.KV_ROW, layer)[:, self.config.kv_lora_rank :]
        if self.interleaved:
            engine_PR = torch.cat((engine_PR[:, 0::2], engine_PR[:, 1::2]), dim=-1)
        self._record_difference(ROPE_KEY, layer, engine_PR, self.roundings.round_activation(found_PR))
        return self.roundings.round_kv_row(engine_PR)

    def _store_latent_inputs(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
        """Return transformers' query, key and value, with rope rounded and KV rows as they are stored."""
        nope = self.config.qk_nope_head_dim
        query = torch.cat((query[..., :nope], self.roundings.round_activation(query[..., nope:])), dim=-1)
        rope_key = self._compare_rope_key(layer, key[0, 0, :, nope:])
        key = torch.cat((key[..., :nope], rope_key.expand(*key.shape[:-1], -1)), dim=-1)
        return query, key, value

    def _store_grouped_inputs(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
        """Return the engine's query, key and value, as they are stored."""
        engine_rows = self._get_result(engine_model.KV_ROW, layer).unflatten(-1, (2, key.shape[1], -1))
        found = {QUERY: query, KEY: key, VALUE: value}
        for name, part_PHX in (
            (QUERY, self._get_result(engine_model.QUERY, layer)),
            (KEY, engine_rows[:, 0]),
            (VALUE, engine_rows[:, 1]),
        ):
            model_PHX = self.roundings.round_activation(found[name][0].transpose(0, 1))
            self._record_difference(name, layer, part_PHX.flatten(1), model_PHX.flatten(1))
            stored = part_PHX if name == QUERY else self.roundings.round_kv_row(part_PHX)
            found[name] = stored.transpose(0, 1).unsqueeze(0)
        return found[QUERY], found[KEY], found[VALUE]

    def _run_attention(
        self,
        store_inputs: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], Inputs],
        layer: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *arguments: Any,  # noqa: ANN401
        scaling: float,
        **options: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, None]:
        """Compare the engine's attention outputs with those of transformers' function, and return the engine's."""
        eager = sys.modules[type(module).__module__].eager_attention_forward
        query, key, value = store_inputs(layer, query, key, value)
        found, _ = eager(module, query, key, value, *arguments, scaling=scaling, **options)
        flatter, _ = eager(module, query, key, value, *arguments, scaling=scaling * (1 - SCORE_STEP), **options)
        engine = self._get_result(engine_model.VALUES, layer).reshape(found.shape)
        self._record_score_scale(engine - found, (found - flatter) / SCORE_STEP)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = (query @ key.transpose(-1, -2) * scaling).tril().pow(2).sum((-1, -2)) / _count_pairs(key.shape[-2])
        found = self.roundings.round_activation(found)
        self._record_difference(
            ATTENTION, layer, engine[0].flatten(1), found[0].flatten(1), float(scores.mean().sqrt())
        )
        return engine, None

    def _record_score_scale(self, error: torch.Tensor, derivative: torch.Tensor) -> None:
        overlap, size, squares = (
            (a * b).sum() for a, b in ((error, derivative), (derivative, derivative), (error, error))
        )
        outputs = derivative.shape[:-1].numel()
        self.score_scales.append(ScoreScale(float(overlap), float(size), float(squares), outputs))

    def _attach_router(self, mlp: Any, index: int) -> None:  # noqa: ANN401
        """Have the MLP take the experts that the engine chose, and its routed experts round as the engine does."""
        route = make_logits_router(mlp.gate)
        at = index - getattr(self.config, "first_k_dense_replace", 0)

        def apply_engine_choice(_: torch.nn.Module, __: tuple[torch.Tensor], output: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
            engine_PE = self._get_result(ROUTER, at)
            self._record_difference(ROUTER, index, engine_PE, output[0])
            weights_Pk, ids_Pk, misrouted_P = choose_experts(route, engine_PE, self._get_result(EXPERTS, at).long())
            self.misrouted |= misrouted_P
            return engine_PE, weights_Pk, ids_Pk

        mlp.gate.register_forward_hook(apply_engine_choice)
        mlp.experts.forward = functools.partial(apply_experts, mlp.experts, self.roundings)


ROUNDED_INPUTS = (  # linear layers with e4m3 weights and inputs rounded to e4m3
    *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
QUANTISED = (*ROUNDED_INPUTS, "kv_b_proj")  # fp8 in DeepSeek's checkpoints; kv_b_proj is computed in our dtype


def compute_relative_errors(engine: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return ‖engine − model‖ / ‖model‖ of each row [P, …]. The divisor is at least the median ‖model‖ of all rows."""
    size_P = model.float().norm(dim=-1)
    floor = max(float(size_P.median()), torch.finfo(torch.float32).tiny)
    return (engine.float() - model.float()).norm(dim=-1) / size_P.clamp(min=floor)


def _count_pairs(positions: int) -> int:
    return positions * (positions + 1) // 2


def _attach_before(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (change(inputs[0]), *inputs[1:]))


def _attach_after(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module.register_forward_hook(lambda _, __, output: change(output))


def _round_norm(norm: Any, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:  # noqa: ANN401
    """Have a norm round before it multiplies with its weight, and after it."""
    weight = norm.weight.data.clone()
    norm.weight.data.fill_(1.0)
    _attach_after(norm, lambda x: activation(weight * activation(x)))


def apply_experts(
    module: Any,  # noqa: ANN401
    roundings: Roundings,
    hidden_TD: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
) -> torch.Tensor:
    """Compute the routed experts of transformers' module with the engine's roundings.

    The hidden rows of an expert are rounded once, from fp32: to e4m3, or to the dtype of activations.
    """
    total_TD = torch.zeros_like(hidden_TD)
    rows_TD = roundings.round_weight_input(hidden_TD)
    for e in ids_Tk.unique().tolist():
        token, slot = (ids_Tk == e).nonzero(as_tuple=True)
        gate, up = functional.linear(rows_TD[token], module.gate_up_proj[e]).chunk(2, dim=-1)
        hidden = module.act_fn(gate) * up
        if roundings.fp8_weights:
            inner = roundings.round_weight_input(hidden, roundings.expert_parts)
        else:
            inner = roundings.round_activation(hidden)
        y = roundings.round_activation(functional.linear(inner, module.down_proj[e]))
        total_TD.index_add_(0, token, y * weights_Tk[token, slot, None])
    return total_TD


Router = Any  # Transformers' router [T, E] → (logits, weights, ids)


def make_logits_router(gate: Router) -> Router:
    """Return a copy of a router that is given router logits: its weight is the identity."""
    copied = copy.deepcopy(gate)
    count = copied.weight.shape[0]
    copied.weight, copied.hidden_dim = torch.nn.Parameter(torch.eye(count)), count
    return copied


def choose_experts(
    route: Router, logits_PE: torch.Tensor, engine_Pk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return weights and ids of the experts that logits choose, and at which positions the engine chose others.

    Scores that are equal but for the last bits may fall either way: the engine's choice is right if it is the router's
    with the scores of the chosen experts raised by TIE.
    """
    _, weights_Pk, ids_Pk = route(logits_PE)
    wrong_P = _compare_experts(ids_Pk, engine_Pk)
    if not bool(wrong_P.any()) or engine_Pk.shape != ids_Pk.shape:
        return weights_Pk, ids_Pk, wrong_P
    chosen_PE = torch.zeros_like(logits_PE).scatter_(1, engine_Pk.clamp(0, logits_PE.shape[1] - 1), 1.0)
    raised = copy.deepcopy(route)
    bias = getattr(route, "e_score_correction_bias", None)
    if bias is None:
        logits_PE = logits_PE + TIE * logits_PE.abs().amax() * chosen_PE
    else:
        raised.e_score_correction_bias = bias + TIE * (1 + bias.abs().amax()) * chosen_PE
    _, raised_Pk, raised_ids_Pk = raised(logits_PE)
    tied_P1 = (wrong_P & ~_compare_experts(raised_ids_Pk, engine_Pk)).unsqueeze(-1)
    return (
        torch.where(tied_P1, raised_Pk, weights_Pk),
        torch.where(tied_P1, raised_ids_Pk, ids_Pk),
        wrong_P & ~tied_P1.squeeze(-1),
    )


def _compare_experts(ids_Pk: torch.Tensor, engine_Pk: torch.Tensor) -> torch.Tensor:
    """Return bool [P]: True if the two choices of experts differ."""
    if ids_Pk.shape != engine_Pk.shape:
        return torch.ones(len(ids_Pk), dtype=torch.bool)
    return (ids_Pk.sort(-1).values != engine_Pk.sort(-1).values).any(-1)


def run_attached_attention(module: Any, *arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:  # noqa: ANN401
    """Run the attention that was attached to the module, with the signature that transformers calls."""
    return module.attend(module, *arguments, **options)
