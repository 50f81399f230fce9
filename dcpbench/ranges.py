"""Named stretches of a step: NVTX for Nsight Systems and `record_function` for Kineto, with the same names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import nvtx
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PHASES = (
    "embed", "norm", "qkv_proj", "q_gather", "kv_write", "attention", "merge", "prefill", "prefix_gather", "o_proj",
    "attn_reduce", "dp_gather", "dense_mlp", "moe", "mlp_reduce", "lm_head",
)  # fmt: skip
"""Every name that `phase` is called with, in the order of a layer. A collective's time includes waiting for the slowest
rank: `mlp_reduce` shows how unevenly the experts were loaded."""


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark a stretch of a step."""
    with nvtx.annotate(name, domain="dcpbench"), torch.profiler.record_function(name):
        yield
