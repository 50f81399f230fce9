"""A layer's attention over a batch in parts: as a whole, or in two halves that hide each other's exchange.

    one stream      q of A, B │ gather A │ attention A            │ attention B           │
    beside it                          │ gather B               │ merge A               │ merge B

All collectives of both halves are in the second stream and so in one order on every rank.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.exchange import Exchange
    from dcpbench.kernels.attention import Backend

Merged = TypeVar("Merged")
Partial = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some neighbouring rows of a batch, with an attention plan and an exchange of their own."""

    first: int
    size: int
    backend: Backend
    exchange: Exchange

    @property
    def rows(self) -> slice:
        """Its rows in the batch."""
        return slice(self.first, self.first + self.size)


def attend(
    parts: Sequence[Part],
    queries: Sequence[torch.Tensor],
    beside: torch.cuda.Stream | None,
    partial: Callable[[Part, torch.Tensor], Partial],
    merge: Callable[[Part, Partial], Merged],
) -> list[Merged]:
    """Gather, attend and merge each part; `beside` is the stream of the exchanges where there are two parts on a GPU.

    `partial` takes the gathered q [B, H, Q] to o and lse, `merge` these to whatever is wanted.
    """
    if beside is None:
        return [merge(part, partial(part, part.exchange.gather_q(q))) for part, q in zip(parts, queries, strict=True)]
    here = torch.cuda.current_stream()
    beside.wait_stream(here)
    gathered, found = [], []
    with torch.cuda.stream(beside):
        for part, q in zip(parts, queries, strict=True):
            gathered.append((part, part.exchange.gather_q(q), beside.record_event()))
    # Every tensor is held until the streams have joined: the allocator knows only the stream that a tensor is from.
    held: list[Partial] = []
    for part, q_BHQ, ready in gathered:
        here.wait_event(ready)
        held.append(partial(part, q_BHQ))
        done = here.record_event()
        with torch.cuda.stream(beside):
            beside.wait_event(done)
            found.append(merge(part, held[-1]))
    here.wait_stream(beside)
    return found
