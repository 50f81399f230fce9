"""Paged decode attention with grouped query heads over one rank's K and V rows, with log-sum-exp.

A KV row holds the K heads of a token and then its V heads, [2, KV heads, X], so that pools, page tables, exchanges and
the interleaving over DCP ranks are those of MLA. Query head h attends to KV head h // (heads / KV heads). Backends
implement the protocol `Backend` of kernels/attention.

Work of a call: 2·KV heads·X numbers for each row, and 4·heads·X floating-point operations.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError, explain_missing_library
from dcpbench.kernels.attention import DecodeSpec, check_query_length
from dcpbench.points.names import GQA_BACKENDS

if TYPE_CHECKING:
    import torch

    from dcpbench.kernels.attention import Backend


@dataclasses.dataclass(frozen=True, kw_only=True)
class GqaSpec(DecodeSpec):
    """Sizes that a backend of grouped-query attention is built for."""

    kv_heads: int  # KV heads in a row, which divide `heads`
    head_dim: int  # X: columns of q, k, v and o of a head

    @property
    def row_width(self) -> int:
        """Numbers in one KV row."""
        return 2 * self.kv_heads * self.head_dim


def split_rows(rows: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the K and the V heads of KV rows [..., 2·KV heads·X], each [..., KV heads, X]."""
    return rows.unflatten(-1, (2, kv_heads, -1)).unbind(-3)


def make_gqa_backend(name: str, spec: GqaSpec) -> Backend:
    """Return the backend called `name`. Raise MissingPackageError or UsageError if it cannot run."""
    check_query_length(name, spec)
    if name == "reference":
        from dcpbench.kernels.gqa.reference import ReferenceGqa

        return ReferenceGqa(spec)
    if name == "triton":
        from dcpbench.kernels.gqa.triton_gqa import TritonGqa

        return TritonGqa(spec)
    if name == "flashinfer":
        with explain_missing_library("--backend", "flashinfer", "FlashInfer", "triton"):
            from dcpbench.kernels.gqa.flashinfer_gqa import FlashInferGqa
        return FlashInferGqa(spec)
    raise UsageError(
        f"--backend {name} has no kernel for grouped-query attention; choose one of {', '.join(GQA_BACKENDS)}."
    )
