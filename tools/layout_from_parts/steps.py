"""Read measured decode steps of vLLM, and choose those with the parts of a rank of another layout."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.expert_distribution import OWN
from dcpbench.points.layout import Layout
from dcpbench.points.names import SYNTHETIC, VLLM
from dcpbench.records.model_sizes import ModelSizes
from dcpbench.records.record import EngineSettings, Server
from dcpbench.records.runs import read_run
from dcpbench.reports.engine_steps import is_prolonged
from dcpbench.show.text import make_unique_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.models.shapes import ModelShape
    from dcpbench.records.record import Phases, Record

EXCHANGE = "ag_rs"  # the exchange whose calls are modelled; vLLM's default
UNDIVIDED_SIZES = ("hidden", "experts", "top_k", "latent", "kv_heads", "indexer_heads")  # sizes that no rank divides
DIVIDED_SIZES = ("heads", "moe_intermediate_size", "intermediate_size", "vocab")  # sizes that ranks divide


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a composed step: a layout of the undivided model without attention DP, and its load."""

    tp: int
    dcp: int
    requests: int
    context: int  # KV tokens of a request

    @property
    def layout(self) -> str:
        """Return the layout's name, such as `tp8·dcp8`."""
        return str(Layout(self.tp, 1, self.dcp))


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a measured step by the work of one of its ranks."""

    run: str
    layout: str
    heads: int  # heads with which a rank attends: those of its DCP group
    experts_width: int
    rank_context: int  # KV tokens of a request on a rank


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Hold a measured step of vLLM with its parts."""

    run: str
    record: Record
    sizes: ModelSizes
    phases: Phases
    server: Server

    @property
    def step_us(self) -> float:
        """Return the median time of the step without the profiler, in µs."""
        assert self.record.metrics is not None
        return self.record.metrics.step_ms.median * 1e3

    @property
    def is_prolonged(self) -> bool:
        """Return True if the profiled step is so much longer than the timed one that it contains waits of the profiler."""
        return is_prolonged(self.phases.step_us / self.step_us)

    @property
    def source(self) -> Source:
        """Return the work of a rank."""
        point = self.record.point
        return Source(
            run=self.run,
            layout=str(point.layout),
            heads=self.sizes.heads * point.dcp // point.tp,
            experts_width=self.sizes.moe_intermediate_size // point.tp,
            rank_context=point.context // point.dcp,
        )

    @property
    def settings(self) -> EngineSettings:
        """Return the settings in the server's log."""
        return self.server.settings or EngineSettings()

    def computes_rank_of(self, shape: ModelShape, tp: int) -> bool:
        """Return True if a rank has the heads and widths that one of `tp` ranks has of the model."""
        point = self.record.point
        return point.dcp == 1 and all(
            getattr(self.sizes, n) * tp == getattr(shape, n) * point.tp for n in DIVIDED_SIZES
        )

    def is_undivided(self, shape: ModelShape) -> bool:
        """Return True if the model's heads and widths are the published ones."""
        return all(getattr(self.sizes, name) == getattr(shape, name) for name in DIVIDED_SIZES)

    def is_target(self, shape: ModelShape, target: Target) -> bool:
        """Return True if this step is a measurement of the target."""
        point = self.record.point
        own = (point.tp, point.dcp, point.concurrency, point.context)
        return self.is_undivided(shape) and own == (target.tp, target.dcp, target.requests, target.context)


def read_steps(folders: Sequence[Path], shape: ModelShape) -> list[MeasuredStep]:
    """Return the profiled decode steps of vLLM in these runs that are of the model, whole or divided, in the order of the runs.

    Raise UsageError if there are none, or if they have different numbers of layers.
    """
    names = make_unique_names(folders)
    found = [
        MeasuredStep(names[folder], record, record.model_sizes, record.phases, record.server)
        for folder in folders
        for record in read_run(folder).records
        if is_decode_step(record)
        and record.model_sizes is not msgspec.UNSET
        and record.phases is not None
        and isinstance(record.server, Server)
        and all(
            getattr(record.model_sizes, name) == getattr(ModelSizes.from_shape(shape), name) for name in UNDIVIDED_SIZES
        )
    ]
    if not found:
        raise UsageError(
            f"no run has profiled decode steps of vLLM over synthetic weights of {shape.name}; measure them with dcpbench sweep --engine vllm "
            "--model FOLDER, with FOLDER of `python -m tools.layout_from_parts model`."
        )
    layers = {(step.sizes.layers, step.sizes.first_k_dense_replace) for step in found}
    if len(layers) > 1:
        numbers = ", ".join(f"{n} with {dense} dense" for n, dense in sorted(layers))
        raise UsageError(f"runs have different numbers of layers ({numbers}); name runs with the same.")
    return found


def is_decode_step(record: Record) -> bool:
    """Return True for a measured decode step of vLLM over the synthetic weights, without attention DP and pipeline stages."""
    point = record.point
    return (
        record.outcome == "ok"
        and record.metrics is not None
        and (point.workload, point.backend, point.weights, point.routing) == ("decode", VLLM, SYNTHETIC, OWN)
        and (point.dp, point.pp, point.pcp, point.q_replicate) == (1, 1, 1, False)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Hold the measured steps from which a step is composed."""

    divided: MeasuredStep  # a rank has the widths of the target's ranks, and the whole context
    all_heads: MeasuredStep  # a rank attends with all heads over its share of the context; the vocabulary is whole
    dcp: MeasuredStep | None  # a layout with DCP, for the kernels around its exchange; None without DCP

    @property
    def steps(self) -> list[MeasuredStep]:
        """Return all measured steps."""
        return [step for step in (self.divided, self.all_heads, self.dcp) if step is not None]


def find_sources(steps: Sequence[MeasuredStep], shape: ModelShape, target: Target) -> Sources:
    """Return the steps with the parts of the target, with as few ranks as possible, without the target itself.

    Raise UsageError for a missing measurement, or for different settings.
    """
    steps = sorted(steps, key=lambda s: s.record.point.tp)
    own = [s for s in steps if s.record.point.concurrency == target.requests and not s.is_target(shape, target)]
    fewer = [s for s in own if s.record.point.tp < target.tp]
    divided = [
        s
        for s in fewer
        if s.computes_rank_of(shape, target.tp) and s.record.point.context == target.context and not s.is_prolonged
    ]
    if not divided:
        raise _make_missing_error(
            target, f"a rank of tp{target.tp}", f"--divide {target.tp} --tp 1", f"--tp 1 --context {target.context}"
        )
    share = target.context // target.tp
    all_heads = [
        s
        for s in fewer
        if s.is_undivided(shape)
        and s.record.point.dcp == s.record.point.tp
        and s.record.point.context == share * s.record.point.dcp
    ]
    if not all_heads:
        what = f"all heads over {share:,} tokens"
        raise _make_missing_error(target, what, "--divide 1 --tp 1", f"--tp 1 --context {share}")
    whole = [s for s in own if s.is_undivided(shape)]
    found = Sources(divided=divided[0], all_heads=all_heads[0], dcp=_find_dcp(whole, target))
    _check_equal_settings(found.steps)
    return found


def _find_dcp(whole: Sequence[MeasuredStep], target: Target) -> MeasuredStep | None:
    """Return the step with DCP and the nearest context; its kernels around the exchange do not depend on the context."""
    if target.dcp == 1:
        return None
    found = [s for s in whole if s.record.point.dcp == s.record.point.tp > 1 and not s.is_prolonged]
    if not found:
        words = f"--tp 2 --dcp 2 --context {target.context * 2}"
        raise _make_missing_error(target, "the kernels around an exchange", "--divide 1 --tp 2", words)
    step = min(found, key=lambda s: abs(s.record.point.context - target.context))
    if (exchange := step.settings.exchange or EXCHANGE) != EXCHANGE:
        raise UsageError(
            f"{step.run} has --exchange {exchange}, and only the calls of {EXCHANGE} are modelled; measure it with {EXCHANGE}."
        )
    return step


def _make_missing_error(target: Target, what: str, model: str, sweep: str) -> UsageError:
    return UsageError(
        f"{target.layout}, {target.requests} requests of {target.context:,} tokens: no run has a step of {what} that the profiler does not "
        f"prolong and that is not the step itself; write FOLDER with `model FOLDER {model}` and add a run of dcpbench sweep --engine vllm "
        f"--model FOLDER --concurrency {target.requests} {sweep}."
    )


def _list_settings(step: MeasuredStep) -> dict[str, object]:
    device = step.record.environment.device if step.record.environment else ""
    settings = step.settings
    return {
        "version of vLLM": step.server.version,
        "GPU": device,
        "dtype": settings.dtype,
        "weights": settings.weights_dtype,
        "KV cache": settings.kv_dtype,
    }


def _check_equal_settings(steps: Sequence[MeasuredStep]) -> None:
    """Raise UsageError if parts of these steps do not belong to one engine."""
    first = steps[0]
    for step in steps[1:]:
        for name, value in _list_settings(step).items():
            if value != (other := _list_settings(first)[name]):
                raise UsageError(
                    f"{first.run} and {step.run} differ in {name} ({other}, {value}); measure both with the same engine file and machine."
                )


def list_backend_differences(steps: Sequence[MeasuredStep]) -> list[str]:
    """Return a sentence for each kind of kernel that vLLM chose differently in these steps."""
    found = []
    for name in ("attention_backend", "moe_backend"):
        values = {step.run: getattr(step.settings, name) for step in steps}
        if len(set(values.values())) > 1:
            chosen = ", ".join(f"{run}: {value}" for run, value in values.items())
            found.append(f"vLLM chose different kernels ({name}: {chosen}).")
    return found
