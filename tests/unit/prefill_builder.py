"""Run steps with prompt chunks on an engine of tests/unit/engine_builder.py or of a real rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from dcpbench.engine.model import StepInput
from dcpbench.points.batches import compute_chunk_rows
from dcpbench.serving.requests import Chunk

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import DecodeEngine, Request
    from dcpbench.engine.piecewise_graph import Pieces
    from dcpbench.engine.prefill import Prefiller


@dataclasses.dataclass
class Prompt:
    """Hold a request with memory for all of its tokens; some of them are stored."""

    tokens: list[int]
    request: Request
    stored: int = 0

    @classmethod
    def admit(cls, engine: DecodeEngine, tokens: list[int]) -> Prompt:
        """Return a new request."""
        return cls(tokens, engine.add_request(len(tokens)))


def make_prompt_tokens(number: int, length: int) -> list[int]:
    """Return token ids that distinguish positions and requests."""
    return [(37 * number + 11 * i + 5) % 199 for i in range(length)]


def run_step(
    engine: DecodeEngine,
    prefiller: Prefiller,
    decodes: list[Prompt],
    chunks: list[tuple[Prompt, int]],
    padding: int = 0,
    last_only: bool = False,
    pieces: Pieces | None = None,
    live: list[int] | None = None,
) -> torch.Tensor:
    """Return logits [rows, vocab] of a step with a token of each decode, the tokens of each chunk, and padding rows.

    `last_only` selects the logits of each decode and of each chunk's last token. With `pieces` the step runs in pieces,
    with the padding rows that they need. `live` is the field of StepInput.
    """
    rows = [(p.request.slot, p.stored, p.tokens[p.stored]) for p in decodes]
    planned = []
    for prompt, count in chunks:
        span = range(prompt.stored, prompt.stored + count)
        rows += [(prompt.request.slot, i, prompt.tokens[i]) for i in span]
        planned.append(Chunk(None, prompt.request.slot, span.start, span.stop, samples=True))
    rows += [(0, 0, 0)] * (compute_chunk_rows(len(rows) + padding) - len(rows) if pieces else padding)
    batch = None
    if decodes:
        batch = engine.plan_rows([p.request.slot for p in decodes], [p.stored for p in decodes])
        assert batch.size == len(decodes), "the tests run no padded decodes"
    slots, positions, tokens = torch.tensor(rows).T.contiguous().to(engine.device)
    wanted = None
    if last_only:
        ends = torch.tensor([1] * len(decodes) + [count for _, count in chunks]).cumsum(0) - 1
        wanted = ends.to(engine.device)
    locs = engine.request_pool.table[slots, positions].clamp(min=0)
    inputs = StepInput(
        tokens,
        positions,
        locs,
        logit_rows=wanted,
        live=None if live is None else torch.tensor(live, device=engine.device),
    )
    plan = prefiller.plan_chunks(planned, engine.request_pool.table, len(decodes)) if planned else None
    if pieces:
        found = pieces.get_pieces(len(rows)).run_step(inputs, pieces.get_decodes(batch) if batch else None, plan)
    else:
        found = engine.model.run_step(inputs, batch, plan)
    logits = engine.model.gather_logits(found)
    for prompt in decodes:
        prompt.stored += 1
    for prompt, count in chunks:
        prompt.stored += count
    return logits


def decode_prompt(engine: DecodeEngine, prefiller: Prefiller, tokens: list[int]) -> torch.Tensor:
    """Return logits [tokens, vocab] of a prompt that is fed token by token."""
    prompt = Prompt.admit(engine, tokens)
    return torch.cat([run_step(engine, prefiller, [prompt], []) for _ in tokens])
