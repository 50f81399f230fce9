"""What the machine is, as far as points depend on it. No torch."""

from __future__ import annotations

import msgspec

from dcpbench.points.gpus import Gpu

HOPPER = "9.0"
"""Compute capability of H100, H200 and H20."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What `python -m dcpbench.worker --probe` found, so that torch-free rooms can ask about the machine."""

    device: str
    """`cuda` or `cpu`."""
    count: int
    """GPUs; 0 without CUDA."""
    name: str
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    capability: str | None = None
    packages: dict[str, str | None] = {}
    """Package -> version, None where it cannot be imported."""
    problems: list[str] = []
    """What is missing for what, in sentences."""
    gpu: Gpu | None = None
    """Not this machine: one that is planned for, of these GPUs."""
