"""Bench gqa: paged decode attention with grouped query heads over one rank's K and V rows, backend by backend.

Pools, pages and checks are those of bench attention. The work of a call: every KV row, q and o once, two products with
every head.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dcpbench.bench.operators.attention import Attention, Pools, get_query_length, make_row_shards
from dcpbench.kernels.gqa import GqaSpec, make_gqa_backend
from dcpbench.kernels.gqa.reference import compute_gqa_decode
from dcpbench.points.roofline import compute_attention_work

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dcpbench.bench.bench_record import Case
    from dcpbench.kernels.attention import Backend
    from dcpbench.points.roofline import OperatorCost


class Gqa(Attention):
    """Build cases with the sizes of bench attention, kv_heads and head_dim."""

    def get_row_width(self, case: Case) -> int:
        """Return 2·KV heads·X."""
        return 2 * int(case.sizes["kv_heads"]) * int(case.sizes["head_dim"])

    def get_widths(self, case: Case) -> tuple[int, int]:
        """Return X twice."""
        return int(case.sizes["head_dim"]), int(case.sizes["head_dim"])

    def make_spec(self, case: Case, pools: Pools) -> GqaSpec:
        """Return what a backend is built for."""
        width = int(case.sizes["head_dim"])
        return GqaSpec(
            kv_heads=int(case.sizes["kv_heads"]),
            head_dim=width,
            scale=width**-0.5,
            **self.make_common_sizes(case, pools),
        )

    def make_backend(self, name: str, spec: GqaSpec) -> Backend:
        """Return a backend."""
        return make_gqa_backend(name, spec)

    def get_run(self, backend: Backend) -> tuple[Callable[..., None], float]:
        """Return the library's kernel alone, without the conversion of its log-sum-exp, so that its time is the library's."""
        alone: Callable[..., None] | None = getattr(backend, "run_kernel", None)
        return (backend.run, 1.0) if alone is None else (alone, math.log(2))

    def compute_truth(
        self,
        spec: Any,  # noqa: ANN401 - as in Attention
        q_HQ: torch.Tensor,
        rows_KQ: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o_HX, lse_H) of a request in the dtype of its rows."""
        return compute_gqa_decode(q_HQ, rows_KQ, spec.kv_heads, spec.scale)

    def compute_work(self, case: Case, pools: Pools) -> OperatorCost:
        """Return the minimum work of a call."""
        width = int(case.sizes["head_dim"])
        return compute_attention_work(
            int(case.sizes["heads"]),
            make_row_shards(pools.shards, get_query_length(case)).lengths,
            self.dtype.itemsize,
            width,
            width,
            pools.data.dtype.itemsize,
            self.get_row_width(case) * pools.data.dtype.itemsize,
            get_query_length(case),
        )

    def shift_rows(self, rows: torch.Tensor) -> None:
        """Add the mean of values to the V heads, in place."""
        rows[..., rows.shape[-1] // 2 :].add_(self.mean)
