"""Choose the lengths of prompts and the sizes of batches at which engines with decode context parallelism go wrong. No I/O."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BATCHES = (1, 2, 8, 33, 64)  # requests that are in flight at once
PAGES = (16, 64)  # tokens of a KV page: defaults of vLLM and of its MLA kernels
TILE = 128  # tokens that attention kernels take at a time
CHUNK = 8192  # prompt tokens of a step: the default of vLLM and SGLang on large GPUs
LONG_CONTEXTS = (32_768, 131_072)  # tokens of a prompt and its answer
MAX_CONTEXT = LONG_CONTEXTS[-1]  # default of --max-context
DOUBLED = tuple(64 << n for n in range(10))  # lengths of prompts for servers of which no edge is known
UNCHECKED_LENGTH = 16_384  # maximum length by default for a server that does not report its maximum context
MAX_BATCH_TOKENS = 300_000  # prompt tokens of a batch; 33 prompts of a chunk fit
MIN_SHARED = 32  # tokens of a prompt of which the first half fills a KV page


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edges:
    """Describe the sizes at which an engine changes its way of computing."""

    dcp: tuple[int, ...]  # degrees of the layouts that are compared
    interleave: int = 1
    pages: tuple[int, ...] = PAGES
    chunk: int = CHUNK


def list_lengths(edges: Edges, new_tokens: int) -> list[int]:
    """Return the lengths of prompts at all edges, in rising order."""
    found = {1, 2, *_surround((TILE,)), *_surround((edges.chunk,))}
    found |= {TILE << n for n in itertools.takewhile(lambda n: TILE << n < edges.chunk, itertools.count(1))}
    units = (edges.interleave, *edges.pages)
    found |= set(_surround(units)) | set(_surround(edges.dcp))
    found |= set(_surround(unit * dcp for unit in units for dcp in edges.dcp))
    found |= {context - new_tokens for context in LONG_CONTEXTS}
    return sorted(length for length in found if length > 0)


def split_lengths(lengths: Sequence[int], longest: int) -> tuple[list[int], list[int]]:
    """Return the lengths up to `longest`, and those that are longer."""
    return [n for n in lengths if n <= longest], [n for n in lengths if n > longest]


def fit_lengths(wanted: Sequence[int], longest: int | None, tokens: int, *, given: bool) -> tuple[list[int], list[int]]:
    """Return the lengths that a server takes with answers of so many tokens, and those that are too long.

    `longest` is its maximum context. If it takes none, raise UsageError for lengths that were given, and return the longest possible.
    """
    if longest is None:
        return split_lengths(wanted, wanted[-1] if given else UNCHECKED_LENGTH)
    fitting, longer = split_lengths(wanted, longest - tokens)
    if given and not fitting:
        raise UsageError(
            f"--context {wanted[0]:,} with {tokens} new tokens is more than the {longest:,} that a server takes; --context can be up to "
            f"{longest - tokens:,}."
        )
    return fitting or [max(longest - tokens, 1)], longer


def list_batches(length: int, batches: Sequence[int]) -> list[int]:
    """Return the sizes of batches of prompts of this length; larger ones would hold more than MAX_BATCH_TOKENS."""
    return [size for size in batches if size == min(batches) or size * length <= MAX_BATCH_TOKENS]


def count_prompts(size: int, prompts: int) -> int:
    """Return how many prompts fill whole batches of this size, at least `prompts`."""
    return -(-prompts // size) * size


def _surround(edges: Iterable[int]) -> list[int]:
    """Return each edge with the lengths before and after it."""
    return [edge + step for edge in edges for step in (-1, 0, 1)]
