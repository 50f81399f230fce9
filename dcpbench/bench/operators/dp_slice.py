"""Bench dp-slice: a rank selects its own tokens' routed experts from a batch gathered over attention-DP ranks.

    cuda-slice   start and length are numbers on the GPU: each end of the slice is read to the host
    host-slice   start and length from the counts with which the host made the batch (`get_dp_rows`)

Eagerly the ranks' rows follow each other. Under CUDA graphs each rank has `graph_batch` rows, and a captured slice
takes all of them, because a graph's shapes are those of its capture.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.bench.operators.calls import Calls
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.bench.record import Case

LAYERS, TOPK, COLUMNS = 58, 8, 9
"""MoE layers and routed experts of DeepSeek-V3; the buffer has one column more, for the shared expert."""
PADDING = -1
SHARES = (1, 0, 3, 2)
"""Quarters of the busiest rank's tokens that the ranks have in turn; the last rank is the busiest."""

Slice = tuple["torch.Tensor | int", "torch.Tensor | int"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Counts of a step, on the host and on the GPU, and the experts that its tokens were routed to."""

    counts: list[int]
    """Tokens of each rank."""
    counts_on_device: torch.Tensor
    packed: torch.Tensor
    """[Σ counts, layers, columns], int32: the ranks' rows one after the other."""
    padded: torch.Tensor
    """[ranks · graph_batch, layers, columns]"""


def get_dp_rows(tokens_of_ranks: Sequence[int] | None, rank: int, graph_batch: int | None = None) -> tuple[int, int]:
    """Return (first row, number of rows) of `rank`, as Python integers, so that a slice with them does not wait for the
    GPU.

    Without `graph_batch` the ranks' rows follow each other, and the first is Σ tokens_of_ranks[:rank]. Under CUDA
    graphs each rank has `graph_batch` rows, padding last, and the first is rank × graph_batch. Raise UsageError for
    counts that are missing, that do not include this rank, or that do not fit.
    """
    if tokens_of_ranks is None:
        counts = f"[{graph_batch}] * dp" if graph_batch is not None else "[n_0, n_1, …]"
        raise UsageError(
            "the token counts of the attention-DP ranks are missing on the host (None). Keep the list from which the "
            "batch was made along with the tensor on the GPU; while a CUDA graph is captured there is no batch yet, "
            f"so pass the padded counts, {counts}."
        )
    if not 0 <= rank < len(tokens_of_ranks):
        raise UsageError(
            f"rank {rank} has no entry among the token counts of {len(tokens_of_ranks)} ranks; they must be of the "
            "attention-DP group, and the rank its own number in that group."
        )
    rows = tokens_of_ranks[rank]
    if min(tokens_of_ranks) < 0:
        raise UsageError(f"token counts {list(tokens_of_ranks)} are not all 0 or more; pass what each rank has.")
    if graph_batch is None:
        return sum(tokens_of_ranks[:rank]), rows
    if rows > graph_batch:
        raise UsageError(
            f"rank {rank} has {rows} tokens, more than the {graph_batch} rows of the captured graph; choose a graph of "
            "a larger batch, or run this step eagerly with graph_batch=None."
        )
    return rank * graph_batch, rows


def cuda_slice(batch: Batch, rank: int, graph_batch: int | None) -> Slice:
    """Return (start, end) with at least one of them on the GPU."""
    length = batch.counts_on_device[rank]
    start = rank * graph_batch if graph_batch is not None else torch.cumsum(batch.counts_on_device, 0)[rank] - length
    return start, start + length


def host_slice(batch: Batch, rank: int, graph_batch: int | None) -> Slice:
    """Return (start, end) as Python integers."""
    start, length = get_dp_rows(batch.counts, rank, graph_batch)
    return start, start + length


VARIANTS: dict[str, Callable[[Batch, int, int | None], Slice]] = {"cuda-slice": cuda_slice, "host-slice": host_slice}


def copy_rows(buffer_TLE: torch.Tensor, ends: Slice, out_BLE: torch.Tensor) -> None:
    """Copy the rows of a slice, without the shared expert, to the head of `out_BLE`."""
    start, end = ends
    rows = buffer_TLE[start:end, :, :TOPK]
    out_BLE[: rows.shape[0]].copy_(rows)


class DpSlice:
    """Builds cases."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.seed = device, seed

    def build_calls(self, case: Case) -> Calls:
        """Return calls of the last rank with sizes dp and tokens, which are those of the busiest rank and of the graph."""
        tokens, dp = int(case.sizes["tokens"]), int(case.sizes["dp"])
        batch, rank = self._make_batch(make_uneven_counts(tokens, dp), tokens), dp - 1
        # No batch exists during capture: every rank is assumed to have all the rows of the graph.
        in_graph = dataclasses.replace(
            batch,
            counts=[tokens] * dp,
            counts_on_device=torch.full((dp,), tokens, dtype=torch.int64, device=self.device),
        )
        out = torch.empty(tokens, LAYERS, TOPK, dtype=torch.int32, device=self.device)
        locate = VARIANTS[case.variant]

        def run_eager() -> None:
            copy_rows(batch.packed, locate(batch, rank, None), out)

        def run_captured() -> None:
            copy_rows(in_graph.padded, locate(in_graph, rank, tokens), out)

        def check_timed(run: Callable[[], None]) -> str:
            out.fill_(PADDING)
            run()
            return _describe_difference(out, _compute_expected(batch, rank), f"rank {rank} of {dp}")

        def check_variant(run: Callable[[], None]) -> str:
            return check_timed(run) or self._check_all(locate, tokens, dp)

        return Calls(
            calls=[run_eager] * case.calls,
            to_capture=[run_captured] * case.calls,
            check=check_variant,
            check_graph=check_timed,
            written_bytes=batch.counts[rank] * LAYERS * TOPK * out.itemsize,
        )

    def _check_all(self, locate: Callable[[Batch, int, int | None], Slice], tokens: int, dp: int) -> str:
        """Check every rank, in both layouts, with uneven counts, ranks without tokens and ranks with one token."""
        lonely = [0] * (dp - 1) + [tokens]
        for counts in (make_uneven_counts(tokens, dp), [0] * dp, lonely, lonely[::-1]):
            batch = self._make_batch(counts, tokens)
            for rank in range(dp):
                for buffer, graph_batch in ((batch.packed, None), (batch.padded, tokens)):
                    out = torch.full((tokens, LAYERS, TOPK), PADDING, dtype=torch.int32, device=self.device)
                    copy_rows(buffer, locate(batch, rank, graph_batch), out)
                    where = f"rank {rank} of counts {counts}" + (f" in a graph of {tokens}" if graph_batch else "")
                    if difference := _describe_difference(out, _compute_expected(batch, rank), where):
                        return difference
        return ""

    def _make_batch(self, counts: list[int], graph_batch: int) -> Batch:
        """Return a batch of distinct numbers, so that no two rows are equal."""
        numbers = torch.arange(sum(counts) * LAYERS * COLUMNS, dtype=torch.int32).view(-1, LAYERS, COLUMNS)
        padded = torch.full((len(counts), graph_batch, LAYERS, COLUMNS), PADDING, dtype=torch.int32)
        for rank, part in enumerate(numbers.split(counts)):
            padded[rank, : len(part)] = part
        return Batch(
            counts=counts,
            counts_on_device=torch.tensor(counts, dtype=torch.int64).to(self.device),
            packed=numbers.to(self.device),
            padded=padded.flatten(0, 1).to(self.device),
        )


def make_uneven_counts(tokens: int, dp: int) -> list[int]:
    """Return the tokens of each rank: quarters of `tokens`, none on every fourth, and all on the last."""
    return [tokens * SHARES[rank % len(SHARES)] // 4 for rank in range(dp - 1)] + [tokens]


def _compute_expected(batch: Batch, rank: int) -> torch.Tensor:
    """Return the reference: the whole batch, cut into its original parts."""
    return batch.packed.cpu().split(batch.counts)[rank][:, :, :TOPK]


def _describe_difference(out: torch.Tensor, expected: torch.Tensor, where: str) -> str:
    """Return the difference if `out` does not begin with the expected rows or was written behind them; else an empty
    string.
    """
    got = out.cpu()
    if not torch.equal(got[: len(expected)], expected):
        return f"{where}: its rows are not the expected {len(expected)}"
    if bool((got[len(expected) :] != PADDING).any()):
        return f"{where}: more than its {len(expected)} rows were taken"
    return ""
