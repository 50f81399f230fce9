"""Estimate the times of steps over pipeline stages and prefill context parallelism from steps measured without them. No torch.

A measured step stands for the part of a micro-batch that a rank computes. Stage i of the layout takes

    measured time · floor of the part in stage i / floor of the part in the whole model + calls between PCP ranks

where a floor is the least time of memory and products at the nominal rates of the GPU (points/roofline.py), without calls between
ranks. Layers, experts and matrices of the ends thus have their own shares, and the passes that draft tokens belong to the last
stage. A step of the scheduler is a round of micro-batches (points/pipeline.py), with hops and calls by the model of the machine's
links.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.points.cluster_specs import get_limits, load_machine
from dcpbench.points.names import NO_EXCHANGE
from dcpbench.points.pipeline import (
    Round,
    check_hosts,
    compute_round,
    count_micro_batches,
    make_stages,
    predict_hops_us,
    split_chunks,
)
from dcpbench.points.roofline import Sharding, compute_local_us
from dcpbench.points.step_calls import predict_calls
from dcpbench.records.record import StageMetrics
from dcpbench.serving.draft_steps import find_gpu
from dcpbench.serving.step_model import ReplicaBatch, StepModel, compute_step_works
from dcpbench.serving.step_times import MODELLED

if TYPE_CHECKING:
    from dcpbench.points.cluster_specs import Machine
    from dcpbench.points.point import Point
    from dcpbench.points.roofline import StepRows
    from dcpbench.serving.requests import Step
    from dcpbench.serving.step_times import Case, StepTimes


def make_measured_point(point: Point) -> Point:
    """Return the point with the layout whose steps are measured: without stages and PCP, and with DCP inside a PCP rank alone."""
    inner = point.layout.spread.dcp
    plain = {"dcp": inner} | ({"exchange": NO_EXCHANGE} if inner == 1 else {})
    return msgspec.structs.replace(point, pp=1, pcp=1, **plain)


def check_stages(times: StepTimes, point: Point) -> None:
    """Raise UsageError unless steps of the point's stages can be estimated from these step times."""
    if point.layout.gpus == point.tp:
        return
    if times.engine is not None:
        raise UsageError(
            f"{point.instance_name}: these step times are of another engine; name a file of dcpbench's engine, or leave --stages out."
        )
    check_hosts(
        point.layout, _load_machine(times, point), "replay steps that were measured with --emulate and a machine"
    )


def _load_machine(times: StepTimes, point: Point) -> Machine:
    return load_machine(point.emulate or find_gpu(times, point))


class StagedTimes:
    """Replace StepTimes in the clock of a replay: a step takes a round of micro-batches over stages."""

    def __init__(self, times: StepTimes, point: Point, micro_batches: int = 0) -> None:
        """Build the model of each stage; `micro_batches` are in flight over the stages, 0: as many as there are stages."""
        check_stages(times, point)
        self.times, self.point = times, point
        self.is_blocking, self.slowdown, self.get_begin_ms = times.is_blocking, times.slowdown, times.get_begin_ms
        self.micro_batches = (micro_batches or point.pp) if point.pp > 1 else 1
        self.machine = _load_machine(times, point)
        self.stages = _Stages(point, self.machine)
        of_shape = {shape: self._make_model(index) for index, shape in enumerate(self.stages.shapes)}
        self.models = [of_shape[shape] for shape in self.stages.shapes]
        self.total_ms = self.waiting_ms = 0.0
        self._predict_hops_us = functools.cache(self._predict_hops_us)  # type: ignore[method-assign]

    @property
    def how(self) -> str:
        """Return how times of steps are obtained."""
        parts = "hops between stages" if self.point.pcp == 1 else "hops and calls between PCP ranks"
        return f"estimated: measured steps without stages times ratios of floors at the rates of {self.machine.gpu}; {parts} are modelled"

    def predict_duration_ms(self, step: Step, heat: float = 0.0) -> float:
        """Return the duration of a step, as StepTimes does."""
        parts = self._count_parts(step)
        works = self._make_parts(step, parts)
        found = self.predict_round(works, parts)
        ms = found.us / 1e3 * (1 + heat * (self.slowdown(works) - 1))
        self.total_ms += ms
        self.waiting_ms += ms * found.bubble_share
        return ms

    def predict_round(self, works: list[ReplicaBatch], parts: int) -> Round:
        """Return the round of `parts` micro-batches with this work of a rank in each replica."""
        stages_us = [1e3 * model.predict_step_ms(works) for model in self.models]
        return compute_round(stages_us, self._predict_hops_us(max(batch.all_rows for batch in works)), parts)

    def predict_host_ms(self, step: Step) -> float:
        """Return the time during which the host of the largest stage is busy launching its part of all micro-batches."""
        parts = self._count_parts(step)
        share = max(shape.layers for shape in self.stages.shapes) / sum(shape.layers for shape in self.stages.shapes)
        return max(parts * share * self.times.host_model.predict_step_ms(self._make_parts(step, parts)), 0.0)

    def summarize(self) -> StageMetrics:
        """Return the metrics of all steps so far."""
        return StageMetrics(
            micro_batches=self.micro_batches,
            bubble_share=self.waiting_ms / self.total_ms if self.total_ms else 0.0,
            step_times=self.how,
        )

    def _count_parts(self, step: Step) -> int:
        decodes = max(len(replica.decodes) + len(replica.discarded) for replica in step.replicas)
        return count_micro_batches(self.micro_batches, decodes, chunks=step.has_chunks)

    def _make_parts(self, step: Step, parts: int) -> list[ReplicaBatch]:
        """Return the work of a rank of each replica in one of `parts` micro-batches."""
        found = []
        for replica, whole in zip(step.replicas, compute_step_works(step), strict=True):
            decodes = -(-whole.decodes // parts)
            kv_tokens = round(whole.kv_tokens * decodes / whole.decodes / self.stages.shared_kv) if decodes else 0
            chunks = split_chunks([(c.tokens, c.start) for c in replica.chunks], parts * self.point.pcp)
            found.append(ReplicaBatch.from_requests(decodes, kv_tokens, chunks, whole.queries))
        return found

    def _make_model(self, stage: int) -> StepModel:
        """Return the model of the times of a stage."""
        queries = self.times.queries
        samples = (
            [
                (m.case.compute_work(queries), self.stages.estimate_ms(stage, m.case, m.median_ms))
                for m in self.times.select_cases(use)
            ]
            for use in MODELLED
        )
        return StepModel(*samples)

    def _predict_hops_us(self, rows: int) -> list[float]:
        return predict_hops_us(self.machine.comm_model.in_step, self.stages.spread, rows, self.point.pp)


class _Stages:
    """Shares of the stages in measured steps of the whole model."""

    def __init__(self, point: Point, machine: Machine) -> None:
        shape = load_shape(point.model)
        self.point, self.limits, self.comm_model = point, get_limits(machine), machine.comm_model.in_step
        self.shapes = make_stages(shape, point.pp)
        self.spread = Sharding.from_point(point, shape)
        self.shared_kv = self.spread.layout.shared_kv
        self.measured = Sharding.from_point(make_measured_point(point), shape)

    def estimate_ms(self, stage: int, case: Case, ms: float) -> float:
        """Return the time of a stage for a case that takes a measured step `ms`."""
        rows = case.compute_rows(self.point.dp, self.point.mtp + 1)
        prompts = sum(tokens for tokens, _ in rows.chunks)
        gathered = dataclasses.replace(
            rows,
            decodes=tuple(self.shared_kv * tokens for tokens in rows.decodes),
            tokens=rows.tokens + (self.point.pcp - 1) * prompts,
        )
        part = dataclasses.replace(self.spread, shape=self.shapes[stage])
        own = compute_local_us(part, gathered, self.limits)
        if stage == len(self.shapes) - 1:
            own += self._compute_drafts_us(self.spread, gathered)
        whole = compute_local_us(self.measured, rows, self.limits) + self._compute_drafts_us(self.measured, rows)
        return ms * own / whole + self._predict_added_ms(part, gathered, rows)

    def _compute_drafts_us(self, sharding: Sharding, rows: StepRows) -> float:
        """Return the floor of the passes of the layer that drafts."""
        layer = sharding.make_draft_layer() if self.point.mtp else None
        return math.fsum(compute_local_us(layer, of, self.limits) for of in rows.make_draft_passes()) if layer else 0.0

    def _predict_added_ms(self, part: Sharding, gathered: StepRows, rows: StepRows) -> float:
        """Return the time of the calls that a stage makes in addition to those of the measured layout: those of PCP ranks."""
        if self.point.pcp == 1:
            return 0.0
        plain = dataclasses.replace(self.measured, shape=part.shape)
        with_pcp, without = (
            math.fsum(each.mean for each in predict_calls(sharding, of, self.comm_model, self.point.exchange).values())
            for sharding, of in ((part, gathered), (plain, rows))
        )
        return 1e3 * (with_pcp - without)
