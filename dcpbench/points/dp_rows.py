"""Which rows of a batch gathered over attention-DP ranks are a rank's own, from counts that the host has. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def dp_rows(tokens_of_ranks: Sequence[int] | None, rank: int, graph_batch: int | None = None) -> tuple[int, int]:
    """(first row, number of rows) of `rank`, as Python integers: a slice with them waits for no GPU.

    Without `graph_batch` the ranks' rows follow each other, and the first is Σ tokens_of_ranks[:rank]. Under CUDA
    graphs each rank has `graph_batch` rows, padding last, and the first is rank × graph_batch. Raises UsageError for
    counts that are missing, that do not hold this rank, or that do not fit.
    """
    if tokens_of_ranks is None:
        counts = f"[{graph_batch}] * dp" if graph_batch is not None else "[n_0, n_1, …]"
        raise UsageError(
            "the token counts of the attention-DP ranks are missing on the host (None). Keep the list from which the "
            "batch was made beside the tensor on the GPU; while a CUDA graph is captured there is no batch yet, so "
            f"pass the padded counts, {counts}."
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
