"""Define the batch sizes for which CUDA graphs are captured, and the padding of batches to them. No torch."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

GRAPH_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Requests of one replica in a graph; a batch is padded up to the next size."""
CHUNK, CPU_CHUNK = 8192, 64  # default prompt tokens of a step on GPUs, and on the CPU
EAGER_STEP = 64
PADDING_SLOT, PADDING_POSITION = 0, 0  # padding rows attend to and write one token, on slot 0 of the padding page


def pad_to_size(requests: int, sizes: Sequence[int]) -> int:
    """Return the smallest of the sorted `sizes` that holds `requests`; `requests` itself if none does, or without requests."""
    index = bisect.bisect_left(sizes, requests)
    return sizes[index] if requests and index < len(sizes) else requests


def pad_batch(requests: int) -> int:
    """Return the number of rows of the graph that runs `requests` requests; raise UsageError above the largest size."""
    if requests <= GRAPH_BATCHES[-1]:
        return pad_to_size(requests, GRAPH_BATCHES)
    raise UsageError(
        f"{requests} requests per replica are more than the largest graph, {GRAPH_BATCHES[-1]}; lower --concurrency."
    )


def compute_batch_rows(requests: int) -> int:
    """Return the number of rows of a step of `requests` requests.

    These are the rows of its graph. Above the largest graph steps run eagerly, and rows are rounded up to multiples of
    EAGER_STEP to have few different sizes.
    """
    return pad_batch(requests) if requests <= GRAPH_BATCHES[-1] else -(-requests // EAGER_STEP) * EAGER_STEP


def find_smaller_batch(requests: int) -> int:
    """Return the most requests of a step that has fewer rows than one of `requests` requests; 0 if there is none."""
    rows = compute_batch_rows(requests)
    if rows > GRAPH_BATCHES[-1]:
        return max(rows - EAGER_STEP, GRAPH_BATCHES[-1])
    return GRAPH_BATCHES[bisect.bisect_left(GRAPH_BATCHES, rows) - 1] if rows > 1 else 0


CHUNK_TILE, CHUNK_STEPS = 16, 16  # rows with chunks: multiples of CHUNK_TILE and of 1 / CHUNK_STEPS of a power of two


def compute_chunk_rows(rows: int) -> int:
    """Return the number of rows of a step with chunks: that of the graphs that run the parts between its attentions."""
    tile = max(CHUNK_TILE, (1 << rows.bit_length() >> 1) // CHUNK_STEPS)
    return -(-rows // tile) * tile


def list_chunk_rows(max_rows: int) -> list[int]:
    """Return all values of `compute_chunk_rows` for up to `max_rows` rows."""
    sizes, size = [], 0
    while size < max_rows:
        sizes.append(size := compute_chunk_rows(size + 1))
    return sizes
