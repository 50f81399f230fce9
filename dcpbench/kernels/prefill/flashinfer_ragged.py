"""FlashInfer's ragged prefill (fa3 on Hopper, fa2 elsewhere). Its log2 LSE is converted to natural log here, once.

Behaviour of its `plan`, from the source of version 0.6.18: it schedules on the host, into a pinned buffer of the
wrapper, and copies that to a device buffer of the wrapper, both by cudaMemcpyAsync on the current stream; it does not
synchronise if the lengths are in pinned host memory. Two rules follow. A wrapper has one plan at a time, so
simultaneous plans need one wrapper each; those of equal lengths share one, as the windows of a long prefix do except
for the last. And the pinned buffer must not be written before its last copy is done, which only an event shows.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import TYPE_CHECKING

import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

from dcpbench.errors import UsageError
from dcpbench.kernels.prefill import flashinfer_jit
from dcpbench.models.shapes import NOPE, ROPE, VALUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.kernels.prefill import PrefillSpec, Ragged

WIDTHS = ((NOPE + ROPE, VALUE), (128, 128), (64, 64))  # columns of keys and values with kernels: MLA, grouped-query (2)
WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommended size for split-KV partials; calls in one stream may share it
WRAPPERS_AT_START = 8  # made early, as each takes 8 MiB of pinned and GPU memory; enough for two steps of four calls


class FlashInferPrefill:
    """PrefillBackend of FlashInfer."""

    def __init__(self, spec: PrefillSpec) -> None:
        if (spec.width, spec.value) not in WIDTHS or spec.dtype not in (torch.bfloat16, torch.float16):
            known = " or ".join(f"{key} and values of {value}" for key, value in WIDTHS)
            raise UsageError(
                f"--prefill flashinfer takes keys of {known} columns in bf16 or fp16, not "
                f"{spec.width} and {spec.value} in {str(spec.dtype).removeprefix('torch.')}; use --prefill sdpa."
            )
        if spec.device.type != "cuda":
            raise UsageError("--prefill flashinfer needs a GPU; use --prefill sdpa.")
        self.spec, self.value_width = spec, spec.value
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=spec.device)
        self.slots = [_Slot(self.workspace) for _ in range(WRAPPERS_AT_START)]
        self.planned: weakref.WeakValueDictionary[object, FlashInferRagged] = weakref.WeakValueDictionary()
        """Plans in use, by their lengths and mask."""

    def is_compiled(self) -> bool:
        """Implement PrefillBackend.is_compiled."""
        spec = self.spec
        return flashinfer_jit.is_compiled(spec.width, spec.value, spec.dtype, spec.device)

    def plan(self, q_lengths: Sequence[int], kv_lengths: Sequence[int], *, causal: bool) -> Ragged:
        """Implement PrefillBackend.plan."""
        same = (*q_lengths, *kv_lengths, causal)
        if (live := self.planned.get(same)) is not None:
            return live
        spec, slot = self.spec, self._find_free_slot()
        slot.wrapper.plan(
            _compute_ends(q_lengths),
            _compute_ends(kv_lengths),
            spec.heads,
            spec.heads // spec.group,
            spec.width,
            head_dim_vo=spec.value,
            causal=causal,
            sm_scale=spec.scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
        )
        slot.sent.record()
        ends = list(itertools.accumulate(q_lengths, initial=0))
        empty = [slice(*rows) for rows, keys in zip(itertools.pairwise(ends), kv_lengths, strict=True) if not keys]
        planned = FlashInferRagged(slot.wrapper, sum(q_lengths), sum(kv_lengths), tuple(empty), spec.value)
        slot.user = weakref.ref(planned)
        self.planned[same] = planned
        return planned

    def _find_free_slot(self) -> _Slot:
        for slot in self.slots:
            if slot.is_free():
                return slot
        self.slots.append(_Slot(self.workspace))
        return self.slots[-1]


class _Slot:
    """A wrapper and who uses it."""

    def __init__(self, workspace: torch.Tensor) -> None:
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        self.sent = torch.cuda.Event()  # recorded behind the copy of a plan; one never recorded counts as done
        self.user: weakref.ref[FlashInferRagged] | None = None

    def is_free(self) -> bool:
        """Return True if its plan is dropped, and its pinned buffer may be written. Calls may still run, as they are in
        stream order.
        """
        return (self.user is None or self.user() is None) and self.sent.query()


@dataclasses.dataclass(frozen=True, eq=False)
class FlashInferRagged:
    """Ragged attention of FlashInfer."""

    wrapper: BatchPrefillWithRaggedKVCacheWrapper
    rows: int
    keys: int
    empty: tuple[slice, ...]  # rows of requests without keys, for which fa3 returns no valid result
    value: int

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Ragged.run. A tile of values may extend past a request, so no row after the last one is passed."""
        q_ThX = q_ThX[: self.rows]
        if not self.keys:  # fa3 cannot describe an empty tile
            return q_ThX[..., : self.value], q_ThX.new_full(q_ThX.shape[:2], float("-inf"), dtype=torch.float32)
        o_ThV, lse_Th = self.wrapper.run(q_ThX, k_ShX[: self.keys], v_ShW[: self.keys], return_lse=True)
        lse_Th.mul_(math.log(2))
        for rows in self.empty:
            lse_Th[rows] = float("-inf")
        return o_ThV, lse_Th

    def compute_output(
        self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor, out_ThV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Implement Ragged.compute_output."""
        q_ThX = q_ThX[: self.rows]
        if not self.keys:
            return q_ThX[..., : self.value] if out_ThV is None else out_ThV
        o_ThV: torch.Tensor = self.wrapper.run(q_ThX, k_ShX[: self.keys], v_ShW[: self.keys], out=out_ThV)
        return o_ThV


def _compute_ends(lengths: Sequence[int]) -> torch.Tensor:
    """Return int32 [requests + 1] in pinned memory, because a copy from pageable memory waits."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32).pin_memory()
