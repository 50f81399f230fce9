"""Named stretches of a step: NVTX for Nsight Systems and `record_function` for Kineto, with the same names."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import nvtx
import torch

from dcpbench.hangs import heartbeats

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

PHASES = (  # names for `record_range` in a layer's order; collectives include waits: `mlp_reduce` shows uneven experts
    "embed",
    "norm",
    "qkv_proj",
    "q_gather",
    "kv_write",
    "attention",
    "merge",
    "prefill",
    "prefix_gather",
    "o_proj",
    "attn_reduce",
    "dp_gather",
    "dense_mlp",
    "moe",
    "mlp_reduce",
    "lm_head",
)


_quiet = False
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def drop_ranges() -> Iterator[None]:
    """Disable ranges, because marking them delays each kernel of a step that is launched kernel by kernel."""
    global _quiet  # noqa: PLW0603 - one host thread launches
    before, _quiet = _quiet, True
    try:
        yield
    finally:
        _quiet = before


def record_range(name: str) -> AbstractContextManager[None]:
    """Mark a phase of a step; its beginning is also written to the heartbeats."""
    heartbeats.record_phase(name)
    return _NOTHING if _quiet else _record_named_range(name)


@contextlib.contextmanager
def _record_named_range(name: str) -> Iterator[None]:
    recording = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # noqa: SLF001 - has no public name
    recorded = torch.profiler.record_function(name) if recording else _NOTHING
    with nvtx.annotate(name, domain="dcpbench"), recorded:
        yield
