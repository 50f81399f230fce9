"""Attention of prompts, not absorbed: ragged requests, with log-sum-exp, behind one small protocol.

Partial results over disjoint keys of the same queries merge by their log-sum-exp (kernels/merge): so may a prompt's
own chunk, and each piece of the prefix that is stored, be attended to by a separate call.

Work of a call: 2·(X + V) floating-point operations for each head, query and key that it sees.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from dcpbench.errors import UsageError, explain_missing_library
from dcpbench.points.names import PREFILLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSpec:
    """Sizes that a backend is built for."""

    heads: int  # h: query heads of one rank
    kv_heads: int | None = None  # heads of k and v, each for a group of consecutive query heads; None: all have one
    width: int  # X = nope + rope: columns of q and k
    value: int  # V: columns of v and o
    scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Return the number of query heads that share a KV head."""
        return self.heads // (self.kv_heads or self.heads)


class Ragged(Protocol):
    """Attention over requests of known lengths, for any number of layers."""

    def run(self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o [T, h, V] in q's dtype, lse [T, h] in fp32, natural logarithm).

        q, k and v have the rows of the planned requests, one request after the other, and possibly more, which are not
        read; all are contiguous, or k and v have strided rows. v_ShW has the backend's value_width columns, which are zero from V on. If a query sees
        no key, lse = -inf and o is any number, or NaN. o's rows may be strided.
        """

    def compute_output(
        self, q_ThX: torch.Tensor, k_ShX: torch.Tensor, v_ShW: torch.Tensor, out_ThV: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return only the output o of `run`, in contiguous `out` if given."""


class PrefillBackend(Protocol):
    """An attention kernel."""

    value_width: int  # w ≥ V: columns that v must have

    def plan(self, q_lengths: Sequence[int], kv_lengths: Sequence[int], *, causal: bool) -> Ragged:
        """Prepare calls from host-side integers, without waiting for the device; earlier plans stay as they were.

        Lengths are of the same requests, in the order of their rows; a kv length may be 0. Where `causal`, query i of n
        sees the first kv_length − n + i + 1 keys; otherwise all.
        """

    def is_compiled(self) -> bool:
        """Return False if the first plan waits for a compiler."""


def make_prefill(name: str, spec: PrefillSpec) -> PrefillBackend:
    """Return the backend called `name`. Raise MissingPackageError or UsageError if it cannot run."""
    if name == "sdpa":
        from dcpbench.kernels.prefill.sdpa import SdpaPrefill

        return SdpaPrefill(spec)
    if name == "flashinfer":
        with explain_missing_library("--prefill", "flashinfer", "FlashInfer", "sdpa"):
            from dcpbench.kernels.prefill.flashinfer_ragged import FlashInferPrefill
        return FlashInferPrefill(spec)
    raise UsageError(f"--prefill {name} does not exist; choose one of {', '.join(PREFILLS)}.")
