"""Rows of a rank in a gathered batch: prefix sums, padded batches, and counts that cannot be used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.bench.operators.dp_slice import get_dp_rows
from dcpbench.errors import UsageError


def test_packed_rows_begin_after_those_of_all_lower_ranks():
    """Counts 5, 0, 7, 2: rank 2 begins at 5 + 0, rank 3 at 5 + 0 + 7; rank 1 has no rows, at 5."""
    assert [get_dp_rows([5, 0, 7, 2], rank) for rank in range(4)] == [(0, 5), (5, 0), (5, 7), (12, 2)]


def test_rows_of_a_graph_begin_at_rank_times_its_batch():
    """A graph of 8 rows a rank: rank 3 begins at 24 whatever the others have."""
    assert [get_dp_rows([5, 0, 8, 2], rank, graph_batch=8) for rank in range(4)] == [(0, 5), (8, 0), (16, 8), (24, 2)]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9))
def test_every_row_belongs_to_one_rank(counts):
    """The slices of all ranks, one after the other, are the whole batch."""
    rows = list(range(sum(counts)))
    slices = [get_dp_rows(counts, rank) for rank in range(len(counts))]
    assert [row for start, length in slices for row in rows[start : start + length]] == rows


@pytest.mark.parametrize(
    ("counts", "rank", "graph_batch", "says"),
    [
        (None, 1, None, "missing on the host (None)"),
        (None, 1, 8, "pass the padded counts, [8] * dp"),
        ([3, 4], 2, None, "rank 2 has no entry among the token counts of 2 ranks"),
        ([3, 4], -1, None, "rank -1 has no entry"),
        ([], 0, None, "of 0 ranks"),
        ([3, -4], 0, None, "[3, -4] are not all 0 or more"),
        ([3, 9], 1, 8, "rank 1 has 9 tokens, more than the 8 rows of the captured graph"),
    ],
)
def test_counts_that_cannot_be_used_are_an_error_of_ours(counts, rank, graph_batch, says):
    """None in place of the list, as while a graph is captured, is no TypeError."""
    with pytest.raises(UsageError) as caught:
        get_dp_rows(counts, rank, graph_batch)
    assert says in str(caught.value)
