"""Where a record comes from: which tool measured it, on what hardware, and whether its times are a CPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.records.record import Environment, Record

OURS = "dcpbench"
"""Origin of what this package measured."""
CPU = "CPU"
"""Environment.device of a run without GPUs."""


def origin(record: Record) -> str:
    """The tool that measured a point, as an origin is written: `dcpbench`, `vllm`, `sglang`."""
    return str(record.origin) if record.origin else OURS


def hardware(environment: Environment) -> str:
    """`4 × NVIDIA H200`, or `CPU`."""
    return CPU if environment.device == CPU else f"{environment.device_count} × {environment.device}"


def functional(record: Record) -> bool:
    """Whether it ran on a CPU, so that its times say nothing about performance."""
    return "cpu" in record.marks or (record.environment is not None and record.environment.device == CPU)
