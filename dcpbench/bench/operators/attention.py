"""Bench attention: paged MLA decode over one rank's KV rows, backend by backend.

A pass loops over several pools, as a step loops over layers, so that rows are not read from the L2 cache. Pages are in
random order; unused rows are NaN. With several query rows of a request, as in steps that verify drafts, each sees one KV
row more than the one before it. The work of a call is the theoretical work of MLA: every KV row, q and o once, two
products with every head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dcpbench.bench.cases import MAX_QUERY_LENGTH
from dcpbench.bench.operators.calls import Calls, compute_relative_error, count_cold_sets, describe_error, reset_to_nan
from dcpbench.errors import CapacityError
from dcpbench.kernels.attention import AttentionSpec, Shards, compute_rounding_error, make_backend
from dcpbench.kernels.attention.reference import compute_mla_decode
from dcpbench.models.shapes import KV_WIDTH, LATENT, NOPE, ROPE
from dcpbench.points.memory import GIB
from dcpbench.points.names import AS_REQUESTS, FP8
from dcpbench.points.roofline import compute_attention_work

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.bench.bench_record import Case
    from dcpbench.kernels.attention import Backend
    from dcpbench.points.roofline import OperatorCost

SCALE = (NOPE + ROPE) ** -0.5
LIMIT = 1e-2  # relative error past which an output is wrong: rounding to bf16, with twice that as margin
DEVIATION = (KV_WIDTH / (NOPE + ROPE)) ** 0.5  # standard deviation of the scores of rows and queries of normal numbers
KV_SCALE = {"bf16": 1.0, FP8: 0.25}  # scale of the KV cache; not 1 for fp8, so that a kernel that ignores it is wrong
SPREAD = 7 / 8  # uneven lengths lie between 1/8 and 15/8 of their mean
UNRELATED = ("heads", "query_length")  # sizes of a case that its pools do not depend on


def get_query_length(case: Case) -> int:
    """Return the query rows of a request."""
    return int(case.sizes.get("query_length", 1))


def make_row_shards(shards: Shards, query_length: int) -> Shards:
    """Return shards with `query_length` query rows of each request; the last of them sees all of its KV rows."""
    lengths = [max(n - back, 0) for n in shards.lengths for back in range(query_length - 1, -1, -1)]
    return Shards(pages=shards.pages, lengths=lengths)


def make_lengths(case: Case, seed: int) -> list[int]:
    """Return the rows of each request: all `context`, or spread evenly around it in random order, with the same sum.

    Every request has enough rows for any number of query rows.
    """
    requests, context = int(case.sizes["requests"]), int(case.sizes["context"])
    if case.sizes["lengths"] == "even" or requests == 1:
        return [context] * requests
    spread = min(SPREAD, max(1 - MAX_QUERY_LENGTH / context, 0))
    steps = np.linspace(-spread, spread, requests)
    return [round(context * (1 + step)) for step in np.random.default_rng(seed).permutation(steps)]


def make_shards(lengths: list[int], page: int, seed: int) -> Shards:
    """Return pages in random order; page 0 is unused."""
    counts = [-(-n // page) for n in lengths]
    ids = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32) + 1
    return Shards(pages=np.split(ids, np.cumsum(counts)[:-1]), lengths=lengths)


@dataclasses.dataclass
class Pools:
    """KV rows of requests, in enough pools to keep the L2 cache cold."""

    shards: Shards
    data: torch.Tensor  # [pools, pages, page, numbers of a row]


class Attention:
    """Build cases with sizes heads, requests, context, page, lengths and kv. Pools are reused if only heads or backend change."""

    def __init__(self, device: torch.device, seed: int, mean: float = 0.0) -> None:
        """Create the workload; `mean` is that of values with a standard deviation of 1."""
        self.device, self.seed, self.mean = device, seed, mean
        # Triton's interpreter has no products of bf16.
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._key: tuple[object, ...] = ()
        self._pools: Pools | None = None

    def build_calls(self, case: Case) -> Calls:
        """Return calls of a case, one for each pool."""
        key = (*(size for name, size in case.sizes.items() if name not in UNRELATED), case.calls)
        if key != self._key or self._pools is None:
            self._pools = None  # frees the old pools before new ones are made
            self._pools, self._key = self._make_pools(case), key
        pools, query_length = self._pools, get_query_length(case)
        rows, heads = int(case.sizes["requests"]) * query_length, int(case.sizes["heads"])
        spec = self.make_spec(case, pools)
        shards = make_row_shards(pools.shards, query_length)
        if case.variant.endswith(AS_REQUESTS):
            spec = dataclasses.replace(spec, query_length=1)
            shards = Shards(pages=shards.repeat_pages(), lengths=shards.lengths)
        backend = self.make_backend(case.variant.removesuffix(AS_REQUESTS), spec)
        backend.plan(shards)
        generator = torch.Generator(self.device).manual_seed(self.seed + 1)
        query, output = self.get_widths(case)
        q_BHQ = torch.randn(rows, heads, query, generator=generator, device=self.device).to(self.dtype)
        o_LBHR = torch.empty(len(pools.data), rows, heads, output, dtype=self.dtype, device=self.device)
        lse_LBH = torch.empty(len(pools.data), rows, heads, device=self.device)
        run, lse_unit = self.get_run(backend)
        calls = [functools.partial(run, q_BHQ, *each) for each in zip(pools.data, o_LBHR, lse_LBH, strict=True)]
        truths = [
            (layer, b, *self._compute_truth(spec, q_BHQ[b], pools.data[layer], shards, b))
            for layer in sorted({0, len(pools.data) - 1})
            for b in sorted({*range(query_length), rows // 2, rows - 1})
        ]

        def compute_error() -> float:
            return max(
                max(
                    compute_relative_error(o_LBHR[layer, b], o_HR),
                    compute_relative_error(lse_LBH[layer, b] * lse_unit, lse_H),
                )
                for layer, b, o_HR, lse_H in truths
            )

        def check_results(run: Callable[[], None]) -> str:
            reset_to_nan(o_LBHR, lse_LBH)
            run()
            if torch.isnan(o_LBHR).any() or torch.isnan(lse_LBH).any():
                return "NaN: rows were read that are no request's, or results were not written"
            return describe_error(compute_error(), max(LIMIT, compute_rounding_error(backend.rounds, DEVIATION)))

        work = self.compute_work(case, pools)
        return Calls(
            calls=calls,
            check=check_results,
            error=compute_error,
            work=work,
            written_bytes=work.memory_bytes * len(pools.data),
        )

    def get_row_width(self, case: Case) -> int:  # noqa: ARG002 - other kinds of attention use it
        """Return the numbers of a KV row."""
        return KV_WIDTH

    def get_widths(self, case: Case) -> tuple[int, int]:  # noqa: ARG002 - other kinds of attention use it
        """Return the columns of a head's query and output."""
        return KV_WIDTH, LATENT

    def make_spec(self, case: Case, pools: Pools) -> Any:  # noqa: ANN401 - of the kind of attention
        """Return what a backend is built for."""
        return AttentionSpec(latent=LATENT, rope=ROPE, scale=SCALE, **self.make_common_sizes(case, pools))

    def make_common_sizes(self, case: Case, pools: Pools) -> dict[str, Any]:
        """Return the fields of DecodeSpec, without the scale of scores."""
        return {
            "batch": int(case.sizes["requests"]) * get_query_length(case),
            "query_length": get_query_length(case),
            "heads": int(case.sizes["heads"]),
            "page_size": pools.data.shape[2],
            "max_pages": max(map(len, pools.shards.pages)),
            "dtype": self.dtype,
            "device": self.device,
            "kv_dtype": pools.data.dtype,
            "kv_scale": KV_SCALE[str(case.sizes["kv"])],
        }

    def make_backend(self, name: str, spec: Any) -> Backend:  # noqa: ANN401 - of the kind of attention
        """Return a backend."""
        return make_backend(name, spec)

    def get_run(self, backend: Backend) -> tuple[Callable[..., None], float]:
        """Return the timed function, and the factor that makes its log-sum-exp a natural logarithm."""
        return backend.run, 1.0

    def compute_truth(
        self,
        spec: Any,  # noqa: ANN401 - of the kind of attention
        q_HQ: torch.Tensor,
        rows_KQ: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o_HR, lse_H) of a request in the dtype of its rows."""
        return compute_mla_decode(q_HQ, rows_KQ, spec.latent, spec.scale)

    def compute_work(self, case: Case, pools: Pools) -> OperatorCost:
        """Return the minimum work of a call."""
        return compute_attention_work(
            int(case.sizes["heads"]),
            make_row_shards(pools.shards, get_query_length(case)).lengths,
            self.dtype.itemsize,
            kv_itemsize=pools.data.dtype.itemsize,
            query_length=get_query_length(case),
        )

    def shift_rows(self, rows: torch.Tensor) -> None:
        """Add the mean of values, in place."""
        rows[..., :LATENT].add_(self.mean)

    def _make_pools(self, case: Case) -> Pools:
        page = int(case.sizes["page"])
        shards = make_shards(make_lengths(case, self.seed), page, self.seed)
        width = self.get_row_width(case)
        shape = (1 + sum(map(len, shards.pages)), page, width)
        kv_dtype = torch.float8_e4m3fn if case.sizes["kv"] == FP8 else self.dtype
        count = case.calls or count_cold_sets(sum(shards.lengths) * width * kv_dtype.itemsize, self.device)
        try:
            data = torch.empty(count, *shape, dtype=kv_dtype, device=self.device)
            made = torch.empty(shape, dtype=self.dtype, device=self.device)
        except torch.OutOfMemoryError as e:
            need = count * shape[0] * page * width * kv_dtype.itemsize / GIB
            raise CapacityError(f"pools of {need:.1f} GiB do not fit; lower --requests or --context.") from e
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for pool in data:
            made.normal_(generator=generator)
            self.shift_rows(made)
            made.div_(KV_SCALE[str(case.sizes["kv"])])
            made[0] = float("nan")
            for pages, length in zip(shards.pages, shards.lengths, strict=True):
                if length % page:
                    made[int(pages[-1]), length % page :] = float("nan")
            pool.copy_(made)
        return Pools(shards=shards, data=data)

    def _compute_truth(
        self,
        spec: Any,  # noqa: ANN401 - of the kind of attention
        q_HQ: torch.Tensor,
        pool: torch.Tensor,
        shards: Shards,
        b: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (o_HR, lse_H) of query row b in fp64, over the stored values."""
        pages = torch.from_numpy(shards.repeat_pages()[b]).long().to(spec.device)
        rows_KQ = pool[pages].flatten(0, 1)[: shards.lengths[b]]
        return self.compute_truth(spec, q_HQ.double(), rows_KQ.double() * spec.kv_scale)
