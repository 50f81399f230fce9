"""Compose a decode step from parts of measured steps and calls of the communication model, and check that on smaller layouts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.budget import ITEMSIZE
from dcpbench.points.comm_model import CallTime
from dcpbench.points.roofline import LSE_BYTES, compute_all_reduce_work, compute_gather_work, compute_query_work
from dcpbench.syncs.kernel_time import COMMUNICATION_PARTS
from tools.layout_from_parts.steps import Source, Target, find_sources, list_backend_differences

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.comm_model import CommModel
    from tools.layout_from_parts.steps import MeasuredStep, Sources

ALL_REDUCE, EXCHANGE = COMMUNICATION_PARTS
NO_KERNEL = "no kernel"
VOCABULARY_PARTS = ("sampling", "elementwise")  # parts after the gather of logits, which process the whole vocabulary
DCP_PARTS = ("merge", "copies", "KV cache write", NO_KERNEL)  # parts that an exchange changes
MAX_IDLE_SHARE = 0.1  # share of a step without a kernel above which the output states it
ALL_REDUCE_CALL = "all-reduce-symm"
"""Call of the communication model for vLLM's `cross_device_reduce`: one kernel that reads the memory of peers, as ours does."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the time of one part of a step, from a measured step or from the communication model."""

    name: str
    us: float
    low_us: float  # equal to `us` for measured parts
    high_us: float
    source: Source | None = None  # None: the communication model
    calls: dict[str, int] = {}  # number of modelled calls of a step, by kind


class Composition(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a composed step."""

    target: Target
    layers: int
    parts: list[Part]
    differences: list[str]  # sentences on kernels that vLLM chose differently in the sources

    @property
    def us(self) -> float:
        """Return the time of the step."""
        return sum(part.us for part in self.parts)

    @property
    def low_us(self) -> float:
        """Return the time with the shortest communication of the model's band."""
        return sum(part.low_us for part in self.parts)

    @property
    def high_us(self) -> float:
        """Return the time with the longest communication of the model's band."""
        return sum(part.high_us for part in self.parts)

    @property
    def idle_share(self) -> float:
        """Return the share of the step in which no kernel runs."""
        return sum(part.us for part in self.parts if part.name == NO_KERNEL) / self.us


class CheckedStep(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a step that was both composed and measured."""

    composition: Composition
    measured_us: float
    run: str  # run of the measurement

    @property
    def error(self) -> float:
        """Return the composition over the measurement, minus 1."""
        return self.composition.us / self.measured_us - 1


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Hold composed steps, with the check that gives their band."""

    model: str
    all_layers: int
    machine: str
    steps: list[Composition]
    checks: list[CheckedStep]
    unchecked: list[str]  # sentences on measured steps for which a part is missing

    @property
    def band(self) -> float | None:
        """Return the largest error of the check as a share; None without a check."""
        return max((abs(check.error) for check in self.checks), default=None)


def forecast(
    steps: Sequence[MeasuredStep],
    shape: ModelShape,
    machine: str,
    known: CommModel,
    targets: Sequence[Target],
    checked: Sequence[Target],
) -> Forecast:
    """Compose the targets' steps, and check the composition on the measured steps in `checked`."""
    checks, unchecked = [], []
    for target in checked:
        measured = next((step for step in steps if step.is_target(shape, target)), None)
        if measured is not None:
            try:
                composition = compose(steps, shape, known, target)
            except UsageError as e:
                unchecked.append(str(e))
            else:
                checks.append(CheckedStep(composition=composition, measured_us=measured.step_us, run=measured.run))
    return Forecast(
        model=shape.name,
        all_layers=shape.layers,
        machine=machine,
        steps=[compose(steps, shape, known, target) for target in targets],
        checks=checks,
        unchecked=unchecked,
    )


def compose(steps: Sequence[MeasuredStep], shape: ModelShape, known: CommModel, target: Target) -> Composition:
    """Compose a step from parts of measured steps. Raise UsageError if a measurement or a call is missing."""
    sources = find_sources(steps, shape, target)
    layers = sources.divided.sizes.layers
    measured = list(_take_parts(sources, target))
    modelled = predict_parts(shape, layers, target, known)
    return Composition(
        target=target,
        layers=layers,
        parts=sorted([*measured, *modelled], key=lambda part: -part.us),
        differences=list_backend_differences(sources.steps),
    )


def _take_parts(sources: Sources, target: Target) -> Iterator[Part]:
    """Yield the measured parts without communication, which contains the waits for other ranks.

    Attention depends on the heads of a DCP group and on the KV tokens of a rank, so with DCP it is that of all heads over a share.
    """
    chosen = dict.fromkeys(VOCABULARY_PARTS, sources.all_heads)
    if sources.dcp is not None:
        chosen |= dict.fromkeys(DCP_PARTS, sources.dcp) | {"attention": sources.all_heads}
    names = dict.fromkeys(name for step in sources.steps for name in (*step.phases.phase_us, NO_KERNEL))
    for name in names:
        step = chosen.get(name, sources.divided)
        us = step.phases.idle_us if name == NO_KERNEL else step.phases.phase_us.get(name, 0.0)
        if name not in COMMUNICATION_PARTS and us and not (name == "merge" and target.dcp == 1):
            yield Part(name=name, us=us, low_us=us, high_us=us, source=step.source)


def predict_parts(shape: ModelShape, layers: int, target: Target, known: CommModel) -> list[Part]:
    """Return the all-reduces and exchanges of a step of vLLM by the communication model, between the ranks of the target.

    With B requests, N ranks, H heads, hidden size D, W tokens of vocabulary and L layers in bf16, a rank receives

        all-reduce          2·(N − 1)/N·B·D·2 bytes     2·L + 1 times: behind attention and experts, and behind the embedding
        all-gather          (N − 1)/N·B·W·2             once: logits
        with DCP, per layer
        all-gather          (N − 1)/N·B·H·576·2         queries
        all-gather          (N − 1)·B·H·4               log-sum-exps
        reduce-scatter      (N − 1)/N·B·H·512·2         outputs
    """
    known = known.in_step
    n, rows, itemsize = target.tp, target.requests, ITEMSIZE["bf16"]
    hidden = compute_all_reduce_work(rows * shape.hidden * itemsize, n)
    logits = compute_gather_work(rows * shape.vocab * itemsize, n)
    reduced = [(ALL_REDUCE_CALL, 2 * layers + 1, hidden.received_bytes)]
    exchanged = [("all-gather", 1, logits.received_bytes)]
    if target.dcp > 1:
        queries = compute_query_work(rows, shape.heads, n, shape.query_width, itemsize)
        outputs = compute_gather_work(rows * shape.heads * shape.output_width * itemsize, n)
        exchanged += [
            ("all-gather", layers, queries.received_bytes),
            ("all-gather", layers, (n - 1) * rows * shape.heads * LSE_BYTES),
            ("reduce-scatter", layers, outputs.received_bytes),
        ]
    made = {ALL_REDUCE: reduced, EXCHANGE: exchanged} if n > 1 else {}
    return [_sum_calls(name, calls, n, known) for name, calls in made.items()]


def _sum_calls(name: str, calls: Sequence[tuple[str, int, int]], ranks: int, known: CommModel) -> Part:
    """Return the part of these calls (kind, number, received bytes of a rank); their errors add up, as they are of one model."""
    times = [known.predict_seconds(what, ranks, received).apply_factor(count * 1e6) for what, count, received in calls]
    total = CallTime(mean=sum(t.mean for t in times), low=sum(t.low for t in times), high=sum(t.high for t in times))
    counts: Counter[str] = Counter()
    for what, count, _ in calls:
        counts[what] += count
    return Part(name=name, us=total.mean, low_us=total.low, high_us=total.high, calls=dict(counts))
