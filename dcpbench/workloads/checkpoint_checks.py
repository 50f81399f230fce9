"""Checks of an engine against `transformers` on the same checkpoint.

layers   the result of each operation of each layer, from the engine's own input of that operation and with the engine's
         roundings (teacher_forcing.py): errors do not accumulate, so limits are the same at any depth
logits   logits from the engine's last hidden states, with its roundings; in fp32 those of whole forward passes
tokens   new tokens that are not those of the largest logit, by the engine's logits or by transformers'
routing  tokens for which a layer chose other experts than transformers' rule does from the engine's router logits
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from dcpbench.exchange.torch_collectives import gather_objects
from dcpbench.kernels.attention import compute_rounding_error
from dcpbench.kernels.e4m3 import ROUNDING
from dcpbench.show.text import format_count
from dcpbench.workloads import oracle
from dcpbench.workloads.rounding import Roundings
from dcpbench.workloads.session import DTYPES, build_whole_session
from dcpbench.workloads.teacher_forcing import ATTENTION, EXPERT, KEY, LATENT, LOGITS, MLP, QUERY, ROPE_KEY, VALUE
from dcpbench.workloads.trace import EXPERTS, DecodeResult, Trace, decode_prompts
from dcpbench.workloads.verify_checks import make_check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.engine.decode_engine import DecodeEngine
    from dcpbench.launch.jobs import Check, Job
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.point import Point
    from dcpbench.workloads.teacher_forcing import Comparison, Difference, ScoreScale

HALF_STEP = {"fp32": 5e-6, "fp16": 2.0**-11, "bf16": 2.0**-8}  # largest error of a rounding; fp32: of sums of hundreds
MAX_MEDIAN, MAX_POSITION = 2, 4
"""Roundings by which the result of an operation may differ: at the median position, and at any position. Engines round
some intermediate results that transformers never computes: absorbed queries, and each rank's part of a sum."""
ROUNDED_INSIDE = (QUERY, LATENT, ROPE_KEY, KEY, VALUE, MLP, EXPERT)  # round to e4m3, which a last bit may decide
MAX_FLIPPED_MEDIAN, MAX_FLIPPED = 0.25, 2  # e4m3 roundings by which ROUNDED_INSIDE may differ: median, maximum
MIN_POSITIONS = 8  # positions from which on the median is judged
SCORE_SCALE = "softmax scale"  # name of the finding that attention outputs change as with another softmax scale
MAX_SCALE_ERROR, MAX_DEVIATIONS = 0.01, 5  # share by which the softmax scale may be off, plus standard errors of it


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest relative errors of the operations of one engine."""

    half_step: float
    fp8_weights: bool
    attention_rounds: frozenset[str]  # tensors that the attention kernel rounds to e4m3, among QUERIES and WEIGHTS

    @classmethod
    def from_engine(cls, point: Point, roundings: Roundings, engine: DecodeEngine) -> Limits:
        """Return the limits of a point's engine, which has decoded."""
        rounds = frozenset(what for batch in engine.batches.values() for what in batch.backend.rounds)
        return cls(HALF_STEP[point.dtype], roundings.fp8_weights, rounds)

    def get_median_limit(self, difference: Difference) -> float:
        """Return the limit of the median position."""
        flipped = MAX_FLIPPED_MEDIAN * self._compute_flip_error(difference)
        return MAX_MEDIAN * self._compute_unit(difference) + self._compute_kernel_error(difference) + flipped

    def get_position_limit(self, difference: Difference) -> float:
        """Return the limit of any position."""
        flipped = MAX_FLIPPED * self._compute_flip_error(difference)
        return MAX_POSITION * self._compute_unit(difference) + 2 * self._compute_kernel_error(difference) + flipped

    def _compute_unit(self, difference: Difference) -> float:
        """Return the error of one rounding. Rounded queries change attention outputs by the deviation of scores."""
        return self.half_step * (1 + difference.scores**2) ** 0.5

    def _compute_flip_error(self, difference: Difference) -> float:
        """Return the error of one rounding to e4m3 inside the operation."""
        return ROUNDING if self.fp8_weights and difference.stage in ROUNDED_INSIDE else 0.0

    def _compute_kernel_error(self, difference: Difference) -> float:
        """Return the mean square change caused by the attention kernel's roundings to e4m3."""
        return (
            compute_rounding_error(self.attention_rounds, difference.scores) if difference.stage == ATTENTION else 0.0
        )


@dataclasses.dataclass(frozen=True)
class Finding:
    """An error of one operation and its limit."""

    stage: str
    layer: int | None  # None: all layers together
    error: float
    limit: float
    position: int | None = None  # position of the prompt, or the expert; None: at the median of all
    prompt: int | None = None

    @property
    def ratio(self) -> float:
        """Return error over limit; infinite if the error is not finite."""
        return self.error / self.limit if math.isfinite(self.error) else math.inf

    def __str__(self) -> str:
        if self.layer is None:
            return f"{self.stage} of all layers"
        if self.prompt is not None:
            return f"{self.stage} of layer {self.layer} at position {self.position} of prompt {self.prompt + 1}"
        if self.position is not None:
            return f"{self.stage} {self.position} of layer {self.layer}"
        return f"{self.stage} of layer {self.layer} at the median position"


def compare_checkpoint(point: Point, shape: ModelShape, job: Job, rank: int, device: torch.device) -> list[Check]:
    """Decode a job's prompts and compare with transformers; return the same checks on every rank. Collective.

    Raises MissingPackageError without transformers.
    """
    longest = max(map(len, job.prompts)) + job.new_tokens
    requests = -(-len(job.prompts) // point.dp)
    engine = build_whole_session(
        point, shape, [longest] * requests, rank=rank, device=device, seed=job.settings.seed
    ).engine
    decoded = gather_objects(decode_prompts(engine, job.prompts, job.new_tokens))
    roundings = Roundings.from_point(point, DTYPES[point.dtype], engine.model.kv.scale)
    limits = Limits.from_engine(point, roundings, engine)
    checks = _make_checks(point, roundings, limits, decoded) if rank == 0 else []
    return gather_objects(checks)[0]


def _make_checks(point: Point, roundings: Roundings, limits: Limits, decoded: list[DecodeResult]) -> list[Check]:
    traces = {i: trace for one in decoded for i, trace in one.traces.items()}
    teacher = oracle.load_teacher(point.weights, roundings)
    compared = {i: teacher.compare_trace(trace) for i, trace in sorted(traces.items())}
    outputs = next((one.experts for one in decoded if one.experts is not None), None)
    experts = [] if outputs is None else teacher.compare_experts(outputs)
    expected = {i: comparison.logits for i, comparison in compared.items()}
    exact = point.precision == "fp32"
    if exact:
        expected = {i: oracle.compute_logits(point.weights, trace.tokens) for i, trace in traces.items()}
    allowed = limits.half_step * MAX_POSITION * max(float(logits.abs().max()) for logits in expected.values())
    checks = [
        _check_layers(point, find_errors(limits, compared) + find_expert_errors(limits, experts)),
        _check_logits(point, traces, expected, allowed, exact=exact),
        _check_tokens(point, traces, expected, allowed, decoded),
    ]
    if any(EXPERTS in trace.results for trace in traces.values()):
        checks.append(_check_routing(point, compared))
    return checks


def find_errors(limits: Limits, compared: dict[int, Comparison]) -> list[Finding]:
    """Return the errors of each operation of each layer: the worst of each prompt, and the median of all positions."""
    found = []
    for same in zip(*(comparison.differences for comparison in compared.values()), strict=True):
        if same[0].stage != LOGITS:
            found += [
                _find_worst(limits, difference, prompt) for prompt, difference in zip(compared, same, strict=True)
            ]
            found += _compute_medians(limits, same)
    return found + _compute_scale_error(
        [scale for comparison in compared.values() for scale in comparison.score_scales]
    )


def find_expert_errors(limits: Limits, differences: Sequence[Difference]) -> list[Finding]:
    """Return the errors of experts with one row each: for each layer the worst, and the median."""
    return [finding for d in differences for finding in (_find_worst(limits, d), *_compute_medians(limits, (d,)))]


def _find_worst(limits: Limits, difference: Difference, prompt: int | None = None) -> Finding:
    errors = difference.errors.nan_to_num(nan=math.inf)
    limit = limits.get_position_limit(difference)
    return Finding(difference.stage, difference.layer, float(errors.max()), limit, int(errors.argmax()), prompt)


def _compute_medians(limits: Limits, same: Sequence[Difference]) -> list[Finding]:
    errors = torch.cat([difference.errors for difference in same]).nan_to_num(nan=math.inf)
    if len(errors) < MIN_POSITIONS:
        return []
    return [Finding(same[0].stage, same[0].layer, float(errors.median()), max(map(limits.get_median_limit, same)))]


def _compute_scale_error(scales: Sequence[ScoreScale]) -> list[Finding]:
    """Return the relative error of the softmax scale over all layers as a finding; none if outputs do not depend on it."""
    overlap, derivative, error = (
        sum(getattr(scale, name) for scale in scales) for name in ("overlap", "derivative", "error")
    )
    if derivative == 0:
        return []
    deviation = (error / sum(scale.outputs for scale in scales) / derivative) ** 0.5
    limit = MAX_SCALE_ERROR + MAX_DEVIATIONS * deviation
    return [Finding(SCORE_SCALE, None, abs(overlap / derivative), limit)]


def _check_layers(point: Point, findings: list[Finding]) -> Check:
    worst = max(findings, key=lambda finding: finding.ratio)
    detail = f"‖engine − transformers‖ / ‖transformers‖, {worst}"
    wrong = [finding for finding in findings if finding.ratio > 1]
    seen, differing = ({f.layer for f in some if f.layer is not None} for some in (findings, wrong))
    if differing:
        detail += f"; {format_count(len(differing), 'layer')} of {len(seen)} differ, first {wrong[0]}"
    return make_check(point, "layers", worst.error, worst.limit, detail)


def _check_logits(
    point: Point, traces: dict[int, Trace], expected: dict[int, torch.Tensor], allowed: float, *, exact: bool
) -> Check:
    differences = torch.cat([(trace.logits.float() - expected[i]).abs().amax(-1) for i, trace in traces.items()])
    error = float(differences.nan_to_num(nan=math.inf).max())
    largest = max(float(logits.abs().max()) for logits in expected.values())
    source = "of a forward pass" if exact else "from the same last hidden states"
    detail = f"largest absolute difference from transformers' logits {source}, which reach {largest:.2g}"
    return make_check(point, "logits", error, allowed, detail)


def _check_tokens(
    point: Point,
    traces: dict[int, Trace],
    expected: dict[int, torch.Tensor],
    allowed: float,
    decoded: Sequence[DecodeResult],
) -> Check:
    """Count wrong tokens of all ranks; if transformers' best logits differ by less than two errors, each token is
    right.
    """
    judged = [
        is_greedy(traces[i].logits[position], token, 0.0) and is_greedy(expected[i][position], token, 2 * allowed)
        for one in decoded
        for i, tokens in one.tokens.items()
        for position, token in enumerate(tokens, traces[i].prompt - 1)
    ]
    detail = f"of {len(judged)} greedy tokens on all ranks; logits within {2 * allowed:.2g} of the largest are ties"
    return make_check(point, "tokens", float(judged.count(False)), 0.0, detail)


def is_greedy(logits_V: torch.Tensor, token: int, tolerance: float) -> bool:
    """Return whether a token's logit is the largest, or less by no more than the tolerance."""
    return 0 <= token < len(logits_V) and bool(logits_V[token] >= logits_V.max() - tolerance)


def _check_routing(point: Point, compared: dict[int, Comparison]) -> Check:
    wrong = sum(int(comparison.misrouted.sum()) for comparison in compared.values())
    tokens = sum(len(comparison.misrouted) for comparison in compared.values())
    detail = f"of {tokens} tokens, those for which a layer chose other experts than transformers from the same logits"
    return make_check(point, "routing", float(wrong), 0.0, detail)
