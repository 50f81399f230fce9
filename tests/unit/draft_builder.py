"""Verify drafts of requests of DecodeEngine: tokens behind a request that a step checks. Users' steps have stated acceptance instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.engine.decode_engine import Batch, DecodeEngine, Request


def append_drafts(engine: DecodeEngine, request: Request, drafts: Sequence[int]) -> None:
    """Allocate one more token, and the drafts after it, which the next step verifies."""
    start = request.length
    engine.allocator.extend(request.allocation, 1 + len(drafts))
    engine.request_pool.set_locs(request.slot, start, request.allocation.compute_locs(start, request.length))
    engine.request_pool.set_tokens(request.slot, start + 1, list(drafts))


def accept_drafts(engine: DecodeEngine, batch: Batch, requests: Sequence[Request]) -> list[list[int]]:
    """Return the tokens that the last step of `requests` yields, of each the accepted drafts and one more.

    The token after the accepted ones is the next that a step reads, and later tokens take the locations of rejected drafts.
    """
    assert batch.accepted is not None
    assert batch.next_tokens is not None
    sampled = batch.next_tokens.view(batch.num_requests, batch.query_length).tolist()
    found = []
    for request, tokens, accepted in zip(requests, sampled, batch.accepted.tolist(), strict=False):
        rejected = batch.query_length - 1 - accepted
        request.allocation.tokens -= rejected
        engine.allocator.tokens -= rejected
        engine.request_pool.set_tokens(request.slot, request.length, tokens[accepted : accepted + 1])
        found.append(tokens[: accepted + 1])
    return found
