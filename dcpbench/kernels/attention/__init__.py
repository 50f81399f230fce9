"""Paged MLA decode attention over one rank's KV rows, with log-sum-exp; all backends implement one small protocol."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from dcpbench.errors import UsageError, explain_missing_library
from dcpbench.kernels.e4m3 import ROUNDING
from dcpbench.points.names import BACKENDS, LIBRARIES

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np
    import torch

    from dcpbench.kernels.attention.triton_mla import PageTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """KV rows that one rank attends to in one step, as host-side integers, so that planning needs no device read."""

    pages: list[np.ndarray]  # per request: page ids of its rows in this rank's pool, in token order, int32
    lengths: list[int]  # per query row: KV rows of this rank that it sees; a request's rows are adjacent

    def repeat_pages(self) -> list[np.ndarray]:
        """Return the pages of each query row's request."""
        query_length = len(self.lengths) // len(self.pages) if self.pages else 1
        return [pages for pages in self.pages for _ in range(query_length)]


QUERIES, WEIGHTS = "queries", "weights"  # tensors a kernel over e4m3 KV may round to e4m3: q, softmax weights


class Backend(Protocol):
    """An attention kernel. `plan` runs outside the graph and does not wait for the device; `run` is captured."""

    rounds: tuple[str, ...]  # tensors among QUERIES and WEIGHTS that the backend rounds to e4m3

    @property
    def tables(self) -> PageTables | None:
        """Return the device tables that `run` reads in a step; a step may fill them itself (kernels/kv_indices) without
        a plan.

        None if only `plan` can fill them.
        """

    def plan_on_device(self) -> None:
        """Divide the work of `tables`, which a step has filled; outside the graph, without waiting. No-op without
        tables.
        """

    def plan(self, shards: Shards) -> None:
        """Fill the index buffers in place for the next `run`s. len(shards.lengths) is the padded number of rows B."""

    def run(self, q_BHQ: torch.Tensor, kv: torch.Tensor, o_BHR: torch.Tensor, lse_BH: torch.Tensor) -> None:
        """Attend to one layer's rows `kv` [pages, page_size, Q] in the spec's KV dtype; all tensors are contiguous.

        Writes o_BHR in q's dtype and lse_BH in fp32, natural logarithm, to buffers chosen by the exchange. For a
        request without rows on this rank, lse = -inf and o is any finite number.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Sizes that a backend of any kind of attention is built for."""

    batch: int  # B: query rows, of which each request has `query_length`
    heads: int  # H: query heads of the whole DCP group
    page_size: int
    max_pages: int  # most pages of one request in one rank's pool
    scale: float
    dtype: torch.dtype  # dtype of q and o
    device: torch.device
    kv_dtype: torch.dtype | None = None  # dtype of KV rows if it differs: e4m3
    kv_scale: float = 1.0  # factor by which stored e4m3 numbers are multiplied
    query_length: int = 1  # adjacent query rows of a request's last tokens; each sees the tokens up to its own

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return self.batch // self.query_length

    @property
    def fp8(self) -> bool:
        """Return True if KV rows are e4m3."""
        return self.kv_dtype is not None and self.kv_dtype.itemsize == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec(DecodeSpec):
    """Sizes that a backend of MLA is built for."""

    latent: int
    rope: int


def check_query_length(name: str, spec: DecodeSpec) -> None:
    """Raise UsageError if requests have several query rows and the backend does not take them together."""
    if spec.query_length > 1 and name in LIBRARIES:
        raise UsageError(
            f"--backend {name} does not take the {spec.query_length} query rows of a request together; use --backend triton."
        )


def compute_rounding_error(rounds: Collection[str], deviation: float) -> float:
    """Return the relative mean square error of o caused by these roundings, for rows and queries of normal numbers.

    Errors of weights average like their values and contribute the rounding error itself; those of a query contribute it
    times the `deviation` of scores.
    """
    return ROUNDING * ((QUERIES in rounds) * deviation**2 + (WEIGHTS in rounds)) ** 0.5


def make_backend(name: str, spec: AttentionSpec) -> Backend:
    """Return the backend called `name`. Raise MissingPackageError or UsageError if it cannot run."""
    check_query_length(name, spec)
    if name == "reference":
        from dcpbench.kernels.attention.reference import ReferenceBackend

        return ReferenceBackend(spec)
    if name == "triton":
        from dcpbench.kernels.attention.triton_mla import TritonBackend

        return TritonBackend(spec)
    if name == "flashinfer":
        with explain_missing_library("--backend", "flashinfer", "FlashInfer", "triton"):
            from dcpbench.kernels.attention.flashinfer_mla import FlashInferBackend
        return FlashInferBackend(spec)
    if name == "flashmla":
        with explain_missing_library("--backend", "flashmla", "sgl-flash-mla 1.0", "triton"):
            from dcpbench.kernels.attention.flashmla_dense import FlashMlaBackend
        return FlashMlaBackend(spec)
    raise UsageError(f"--backend {name} does not exist; choose one of {', '.join(BACKENDS)}.")
