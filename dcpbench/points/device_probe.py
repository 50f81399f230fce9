"""Describe the machine as far as points depend on it. No torch."""

from __future__ import annotations

import msgspec

from dcpbench.points.gpus import Gpu

HOPPER = "9.0"  # compute capability of H100, H200 and H20


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the result of measuring/hardware.py, so that torch-free code can query the machine."""

    device: str  # `cuda` or `cpu`
    count: int  # number of GPUs; 0 without CUDA
    name: str
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    capability: str | None = None
    packages: dict[str, str | None] = {}  # version of each package, None if it cannot be imported
    problems: list[str] = []  # sentences on what is missing and for which purpose
    gpu: Gpu | None = None  # GPU of a planned machine; None if the probe describes this machine
