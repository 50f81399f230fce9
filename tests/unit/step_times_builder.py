"""Build step times of a simulated engine with durations that are linear in the work of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.batches import compute_chunk_rows
from dcpbench.records.record import Conditions, Environment
from dcpbench.serving.step_cases import Extent, make_cases
from dcpbench.serving.step_times import PATH_AXES, EnginePath, MeasuredCase, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.serving.step_model import ReplicaBatch

EXTENT = Extent(requests=48, context=5500, pages=1200, virtual_page=256, chunk=8192, targets=(8, 48), prompts=(4000,))
"""Extent of DeepSeek-V3 on tp4·dcp4 with prompts of 4,000 and answers of 1,500 tokens, and KV for 307,200."""
CONDITIONS = Conditions(weights="synthetic", layers=4, layers_held=4, full_weights_bytes_per_gpu=1)


def make_path(**fields: str | int | bool) -> EnginePath:
    """Return a path with these fields and the defaults of the others."""
    return {axis.name: fields.get(axis.name, axis.default) for axis in PATH_AXES}


PATH = make_path(model="tiny", tp=4, dcp=4, dtype="bf16", page_size=64, backend="flashinfer", exchange="ag_rs")


def compute_true_ms(batch: ReplicaBatch) -> float:
    """Return 40 ms to read weights, 1.4 a row and 0.1 per thousand KV tokens, plus products of padded rows and
    attention of chunks.
    """
    if not batch.tokens:
        return 40 + 1.4 * batch.rows + 1e-4 * batch.kv_tokens
    chunks = 60 + 0.045 * compute_chunk_rows(batch.rows + batch.tokens) + 2.5e-6 * batch.pairs + 1.5e-3 * batch.prefix
    return chunks + (5 + 0.05 * batch.rows + 1e-4 * batch.kv_tokens if batch.rows else 0)


def make_step_times(
    extent: Extent = EXTENT,
    truth: Callable[[ReplicaBatch], float] = compute_true_ms,
    *,
    launch_ms: float = 2.0,
    device: str = "NVIDIA H200",
    path: EnginePath = PATH,
) -> StepTimes:
    """Return the result of measuring the complete grid of that engine."""
    return StepTimes(
        path=path,
        cases=[MeasuredCase(case=case, samples_ms=[truth(case.compute_work())]) for case in make_cases(extent)],
        launch_ms=launch_ms,
        measuring_s=20.0,
        conditions=CONDITIONS,
        environment=Environment(device=device, device_count=4, device_memory_bytes=141 << 30),
    )
