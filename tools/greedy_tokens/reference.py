"""Judge answers in fp32, by the log-probabilities of transformers' model with an engine's weights and tokens.

The model has the tensors that engines load, drawn on the same kind of device, with fp8 weights dequantised. It reads each prompt with the
tokens of an engine's answer, so that one pass gives all positions of the answer. A second pass rounds like an engine in this precision
(workloads/rounding.py); its difference from the first pass is the rounding error of a correct engine.

Rounding that changes the chosen experts changes log-probabilities by much more than other rounding. Each position therefore states whether
rounding changed its experts, and whether it could: whether other experts would be chosen if router logits changed by ROUTING_FACTOR times
their root mean square change by rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from dcpbench.engine.checkpoint_tensors import iter_checkpoint_tensors
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.errors import UsageError
from dcpbench.models.tensor_names import SCALE
from dcpbench.models.weight_formats import FP8
from dcpbench.workloads.oracle import load_with_weights
from dcpbench.workloads.rounding import Roundings, dequantize_blocks
from dcpbench.workloads.session import DTYPES
from dcpbench.workloads.teacher_forcing import ROUNDED_INPUTS, apply_experts, make_logits_router
from tools.greedy_tokens.scores import Judgement, ScoredAnswer, ScoredPosition

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.models.shapes import ModelShape
    from tools.greedy_tokens.answers import Answers, WeightsKey

TOP_TOKENS = 5  # number of fp32's likeliest tokens that a position keeps
ROUTING_FACTOR = (
    3.0  # possible change of router logits by rounding, in root mean squares: 4.2 standard deviations of a difference
)


def draw_weights(shape: ModelShape, key: WeightsKey) -> dict[str, torch.Tensor]:
    """Return the tensors that engines load, in fp32 on the CPU. Raise UsageError if this machine draws other numbers."""
    device = torch.device("cuda" if key.device != "cpu" else "cpu")
    here = "cpu" if device.type == "cpu" else torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    if here != key.device:
        raise UsageError(
            f"the engines' weights were drawn on {key.device}, and this machine has {here}; run `judge` where they ran."
        )
    source = SyntheticSource(key.seed, DTYPES[key.dtype], device)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in iter_checkpoint_tensors(source, shape, fp8=key.format == FP8):
        if name.endswith(SCALE):
            weight = name.removesuffix(SCALE)
            found[weight] = dequantize_blocks(found[weight], tensor.cpu())
        else:
            found[name] = tensor.cpu().float()
    return found


def judge_answers(files: Sequence[Answers], folder: str, shape: ModelShape) -> Judgement:
    """Score all distinct answers of files of the same weights and prompts."""
    torch.set_float32_matmul_precision("highest")
    key, prompts = files[0].weights, files[0].prompts
    device = torch.device("cuda" if key.device != "cpu" else "cpu")
    judge = Judge(load_with_weights(folder, draw_weights(shape, key)).to(device), shape.n_group)
    roundings = Roundings(dtype=DTYPES[key.dtype], fp8_weights=key.format == FP8, kv_scale=None)
    texts = [
        (number, tokens)
        for number in range(len(prompts))
        for tokens in sorted({tuple(one.list_tokens(number)) for one in files})
    ]
    exact = [judge.score(prompts[number], tokens) for number, tokens in texts]
    with round_as_engine(judge.model, roundings):
        rounded = [judge.score(prompts[number], tokens) for number, tokens in texts]
    limit = ROUTING_FACTOR * measure_logit_change(exact, rounded, roundings)
    scored = []
    for (number, tokens), one, other in zip(texts, exact, rounded, strict=True):
        listed = [list_tokens(files, number, tokens[:place], place) for place in range(len(tokens))]
        ties_P = judge.find_routing_ties(one, limit)
        positions = _select_positions(one, other, ties_P, listed)
        scored.append(ScoredAnswer(prompt=number, tokens=list(tokens), positions=positions))
    return Judgement(weights=key, prompts=prompts, answers=scored)


@dataclasses.dataclass(frozen=True)
class Pass:
    """Hold the results of one pass over a text, at the P positions of the answer, on the CPU."""

    logprobs_PV: torch.Tensor  # noqa: N815
    """Log-probabilities of the answer's tokens."""
    routing: list[tuple[torch.Tensor, torch.Tensor]]  # per layer with experts: logits [P, E], chosen ids [P, k]


class Judge:
    """Score answers with a model of transformers; hooks keep the choices of its routers."""

    def __init__(self, model: Any, groups: int) -> None:  # noqa: ANN401 -- transformers' classes differ by version
        self.model, self.groups = model, groups
        self.routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self._routing: list[tuple[torch.Tensor, torch.Tensor]] = []
        for router in self.routers:
            router.register_forward_hook(self._keep_choice)

    def _keep_choice(self, _: torch.nn.Module, __: tuple[torch.Tensor], output: tuple[torch.Tensor, ...]) -> None:
        self._routing.append((output[0].float().cpu(), output[2].cpu()))

    @torch.no_grad()
    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> Pass:
        """Run over a prompt and its answer; return the results at the P positions of the answer's tokens."""
        text = torch.tensor([[*prompt, *tokens[:-1]]], device=self.model.device)
        self._routing = []
        logits_PV = self.model(text, use_cache=False).logits[0, -len(tokens) :]
        routing = [(logits_PE[-len(tokens) :], ids_Pk[-len(tokens) :]) for logits_PE, ids_Pk in self._routing]
        return Pass(logits_PV.log_softmax(-1).cpu(), routing)

    @torch.no_grad()
    def find_routing_ties(self, found: Pass, limit: float) -> torch.Tensor:
        """Return bool [P]: True if a layer could choose other experts with logits that change by at most `limit`.

        The logits of chosen experts fall, and those of others rise; then the logits of all experts in chosen groups fall, because
        groups are chosen first.
        """
        ties_P = torch.zeros(len(found.logprobs_PV), dtype=torch.bool)
        for router, (logits_PE, ids_Pk) in zip(self.routers, found.routing, strict=True):
            route = make_logits_router(router).cpu()
            chosen_PE = torch.zeros_like(logits_PE).scatter_(1, ids_Pk, 1.0)
            inside_PGe = chosen_PE.view(len(ids_Pk), self.groups, -1).amax(2, keepdim=True)
            inside_PE = inside_PGe.expand(-1, -1, logits_PE.shape[1] // self.groups).flatten(1)
            for against_PE in (chosen_PE, inside_PE):
                _, _, others_Pk = route(logits_PE + limit * (1 - 2 * against_PE))
                ties_P |= differ_in_experts(ids_Pk, others_Pk)
        return ties_P


def differ_in_experts(one_Pk: torch.Tensor, other_Pk: torch.Tensor) -> torch.Tensor:
    """Return bool [P]: True if two choices have different experts."""
    return (one_Pk.sort(-1).values != other_Pk.sort(-1).values).any(-1)


def find_rerouted(exact: Pass, rounded: Pass) -> torch.Tensor:
    """Return bool [P]: True if rounding changed the experts of a layer."""
    found_P = torch.zeros(len(exact.logprobs_PV), dtype=torch.bool)
    for (_, ids_Pk), (_, others_Pk) in zip(exact.routing, rounded.routing, strict=True):
        found_P |= differ_in_experts(ids_Pk, others_Pk)
    return found_P


def measure_logit_change(exact: Sequence[Pass], rounded: Sequence[Pass], roundings: Roundings) -> float:
    """Return the root mean square change of router logits by rounding, in layers before the first changed experts.

    The change includes rounding of the router logits, which some engines do.
    """
    squares, count = 0.0, 0
    for one, other in zip(exact, rounded, strict=True):
        kept_P = torch.ones(len(one.logprobs_PV), dtype=torch.bool)
        for (logits_PE, ids_Pk), (others_PE, others_Pk) in zip(one.routing, other.routing, strict=True):
            change_KE = (logits_PE - roundings.round_activation(others_PE))[kept_P]
            squares, count = squares + float(change_KE.square().sum()), count + change_KE.numel()
            kept_P &= ~differ_in_experts(ids_Pk, others_Pk)
    return math.sqrt(squares / count) if count else 0.0


def list_tokens(files: Sequence[Answers], prompt: int, prefix: Sequence[int], place: int) -> set[int]:
    """Return the tokens that any file lists at a place behind the same prefix."""
    found: set[int] = set()
    for one in files:
        answer = one.answers[prompt]
        if len(answer) > place and one.list_tokens(prompt)[:place] == list(prefix):
            found |= {answer[place].token, *answer[place].logprobs}
    return found


def _select_positions(
    exact: Pass, rounded: Pass, ties_P: torch.Tensor, listed: Sequence[set[int]]
) -> list[ScoredPosition]:
    """Return the answer's positions with the log-probabilities of the listed tokens and of the TOP_TOKENS likeliest tokens."""
    rerouted_P, found = find_rerouted(exact, rounded), []
    for at, tokens in enumerate(listed):
        exact_V, rounded_V = exact.logprobs_PV[at], rounded.logprobs_PV[at]
        ids = sorted(tokens | set(exact_V.topk(TOP_TOKENS).indices.tolist()))
        fp32, moved = (dict(zip(ids, row_V[ids].tolist(), strict=True)) for row_V in (exact_V, rounded_V))
        routing = {"rerouted": bool(rerouted_P[at]), "routing_tie": bool(rerouted_P[at] | ties_P[at])}
        found.append(ScoredPosition(fp32=fp32, rounded=moved, **routing))
    return found


@contextlib.contextmanager
def round_as_engine(model: Any, roundings: Roundings) -> Iterator[None]:  # noqa: ANN401
    """Make a model round inputs of fp8 weights to e4m3, and all results to the activation dtype, inside this block."""
    with contextlib.ExitStack() as attached:
        for name, module in model.named_modules():
            for handle in _attach(module, name.rpartition(".")[2], roundings):
                attached.callback(handle.remove)
            if name.endswith("mlp.experts"):
                module.forward = functools.partial(apply_experts, module, roundings)
                attached.callback(delattr, module, "forward")
        yield


def _attach(module: torch.nn.Module, leaf: str, roundings: Roundings) -> list[Any]:
    """Attach hooks that round a module's input and output; return their handles."""
    if leaf.endswith("norm"):
        return [module.register_forward_pre_hook(_round_residual(roundings)), _round_output(module, roundings)]
    if isinstance(module, torch.nn.Linear):
        handles = [_round_output(module, roundings)]
        if leaf in ROUNDED_INPUTS:
            handles.append(module.register_forward_pre_hook(lambda _, x: (round_input(roundings, x[0]), *x[1:])))
        return handles
    return [_round_output(module, roundings)] if leaf == "mlp" else []


def round_input(roundings: Roundings, x: torch.Tensor) -> torch.Tensor:
    """Round the input of a linear layer as an engine does."""
    return roundings.round_weight_input(roundings.round_activation(x))


def _round_output(module: torch.nn.Module, roundings: Roundings) -> Any:  # noqa: ANN401
    return module.register_forward_hook(lambda _, __, y: roundings.round_activation(y))


def _round_residual(roundings: Roundings) -> Any:  # noqa: ANN401
    """Return a hook that rounds in place, because a layer adds to the same tensor behind its norm."""
    return lambda _, x: (x[0].copy_(roundings.round_activation(x[0])), *x[1:])
