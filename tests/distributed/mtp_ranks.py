"""Run the ranks of test_mtp.py: decode requests one token at a time, and in steps that verify drafts.

Started as `python -m tests.distributed.mtp_ranks WORLD FOLDER`; ranks are forks of that process, so that torch is
imported once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from dcpbench.engine.decode_engine import DecodeEngine
from dcpbench.engine.groups import make_groups
from dcpbench.engine.kv_pool import KvPool
from dcpbench.engine.model import Model
from dcpbench.engine.prefill import Prefiller
from dcpbench.engine.serve_engine import ServeEngine
from dcpbench.engine.synthetic import SyntheticSource
from dcpbench.engine.weights import load_weights
from dcpbench.models.shapes import Gqa
from dcpbench.points.layout import OWN_HEADS, Layout, QueryReplication
from dcpbench.points.speculation import Speculation
from dcpbench.serving.allocator import PADDING_PAGE
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.scheduler import Scheduler, SchedulerConfig
from tests.distributed.forked import fork_ranks
from tests.unit.engine_builder import CPU, TINY, make_layers
from tests.unit.engine_drafts import accept_drafts, append_drafts

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import Request
    from dcpbench.serving.allocator import Allocation

TWELVE = dataclasses.replace(TINY, heads=12, experts=12, n_group=3, intermediate_size=96, moe_intermediate_size=48)
"""Model shape with sizes that are divisible by 1, 2, 3 and 4 ranks."""
GROUPED = dataclasses.replace(
    TWELVE,
    name="grouped",
    gqa=Gqa(kv_heads=1, qk_norm=True),
    q_lora=None,
    latent=0,
    qk_nope_head_dim=0,
    rope_interleaved=False,
)
SHAPES = {"mla": TWELVE, "gqa": GROUPED}
CONTEXTS = (1, 5, 18)  # stored tokens of three requests of a replica; most ranks hold no token of the first
NEW = 8  # tokens that each request decodes
WRONG_AT = ((1, 2, 5), (), (2, 3, 4))
"""Positions of wrongly drafted tokens of each request: single ones, none, and several in a row."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe a layout with its storage and path."""

    layout: Layout
    kind: str = "mla"
    drafts: int = 3
    page_size: int = 1
    interleave: int = 1
    exchange: str = "ag_rs"
    replicated: QueryReplication = OWN_HEADS
    backend: str = "reference"
    fp8: bool = False


DRAFTING = {  # layouts in which the model's own layer drafts tokens
    1: Case(Layout(1)),
    2: Case(Layout(2, dcp=2), page_size=2, exchange="a2a"),
    3: Case(Layout(3, dcp=3), page_size=4),
    4: Case(Layout(4, dp=2, dcp=2), page_size=4, interleave=2),
}
CASES = {
    1: [
        Case(Layout(1)),
        Case(Layout(1), drafts=1, page_size=4),
        Case(Layout(1), drafts=7, page_size=4),
        Case(Layout(1), "gqa", page_size=4),
        Case(Layout(1), fp8=True),
    ],
    2: [
        Case(Layout(2)),
        Case(Layout(2, dcp=2)),
        Case(Layout(2, dcp=2), drafts=7, page_size=4, interleave=2, exchange="a2a"),
        Case(Layout(2, dcp=2), page_size=4, replicated=QueryReplication(query=True, value=True), exchange="a2a"),
        Case(Layout(2, dcp=2), page_size=2, backend="triton", drafts=2),
        Case(Layout(2, dcp=2), fp8=True, exchange="a2a"),
        Case(Layout(2, dcp=2), "gqa", page_size=4),
        Case(Layout(2, dp=2), page_size=4),
    ],
    3: [
        Case(Layout(3, dcp=3)),
        Case(Layout(3, dcp=3), drafts=7, page_size=2, exchange="a2a"),
        Case(Layout(3, dcp=3), "gqa", drafts=2, page_size=4, exchange="a2a"),
    ],
    4: [
        Case(Layout(4, dcp=4)),
        Case(Layout(4, dcp=4), drafts=5, page_size=4, interleave=4, exchange="a2a"),
        Case(Layout(4, dp=2, dcp=2), page_size=2),
        Case(Layout(4, dcp=2), "gqa", page_size=4, replicated=QueryReplication(query=True)),
    ],
}


def make_engine(case: Case, rank: int, *, context: int = 0, requests: int = len(CONTEXTS)) -> DecodeEngine:
    """Return the engine of a rank in fp32."""
    shape, layout = SHAPES[case.kind].add_drafts(case.drafts), case.layout
    context = context or max(CONTEXTS) + 2 * (NEW + case.drafts)
    weights = load_weights(
        SyntheticSource(0, torch.float32, CPU),
        shape,
        layout,
        rank,
        make_layers(shape),
        replicated=case.replicated,
        ep="1",
    )
    pages = 1 + requests * -(-context // (case.page_size * layout.dcp))
    stored = torch.float8_e4m3fn if case.fp8 else torch.float32
    kv = KvPool(shape.stored_layers, pages, case.page_size, shape.compute_kv_width(layout.attn_tp), stored, CPU)
    model = Model(
        shape,
        layout,
        make_groups(layout, rank),
        weights,
        kv,
        interleave=case.interleave,
        max_context=context,
        device=CPU,
        replicated=case.replicated,
    )
    return DecodeEngine(
        model,
        backend=case.backend,
        exchange=case.exchange if layout.dcp > 1 else "none",
        max_requests=requests,
        max_context=context,
        query_length=case.drafts + 1,
    )


def admit(engine: DecodeEngine, number: int, context: int) -> Request:
    """Add request `number` with synthetic KV, and a token to read behind it without a KV location."""
    request = engine.add_request(context)
    engine.write_random_kv(request, number, seed=0)
    engine.request_pool.set_tokens(request.slot, context, [100 + number])
    return request


def decode_one_by_one(case: Case, rank: int) -> tuple[list[list[int]], torch.Tensor]:
    """Return the tokens of each request of this rank's replica, and logits [requests, NEW, vocab]."""
    engine = make_engine(case, rank)
    first = len(CONTEXTS) * (rank // case.layout.attn_tp)
    requests = [admit(engine, first + i, context) for i, context in enumerate(CONTEXTS)]
    tokens: list[list[int]] = [[] for _ in requests]
    logits = []
    for _ in range(NEW):
        for request in requests:
            engine.append_token(request)
        batch = engine.plan_step(requests)
        engine.run_eager(batch)
        assert batch.accepted is None
        logits.append(engine.model.gather_logits(batch.logits)[: len(requests)])
        for i in range(len(requests)):
            tokens[i].append(int(batch.next_tokens[i]))
    return tokens, torch.stack(logits, dim=1)


def poison(engine: DecodeEngine, requests: list[Request]) -> None:
    """Fill every KV row with NaN except those of tokens of requests and of the padding page, rolled back rows
    included.
    """
    poison_except(engine, [(request.allocation, request.length) for request in requests])


def poison_except(engine: DecodeEngine, stored: list[tuple[Allocation, int]]) -> None:
    """Fill every KV row with NaN except those of the first tokens of these allocations and of the padding page."""
    shard = engine.model.shard
    owned = {PADDING_PAGE * shard.page_size + i for i in range(shard.page_size)}
    for allocation, length in stored:
        for loc in allocation.compute_locs(0, length).tolist():
            if loc // shard.interleave % shard.dcp == shard.rank:
                owned.add(loc // (shard.interleave * shard.dcp) * shard.interleave + loc % shard.interleave)
    rows = engine.model.kv.get_all_rows()
    free = [row for row in range(rows.shape[1]) if row not in owned]
    if rows.itemsize == 1:
        rows.view(torch.uint8)[:, free] = 0x7F  # e4m3's NaN
    else:
        rows[:, free] = float("nan")


def verify_drafts(case: Case, rank: int, truth: list[list[int]], logits: torch.Tensor) -> dict[str, object]:
    """Return errors of the logits of all accepted rows, the tokens, and the drafts accepted in each step of each
    request.
    """
    engine = make_engine(case, rank)
    first, length = len(CONTEXTS) * (rank // case.layout.attn_tp), case.drafts + 1
    requests = [admit(engine, first + i, context) for i, context in enumerate(CONTEXTS)]
    vocab = engine.model.shape.vocab
    tokens: list[list[int]] = [[] for _ in requests]
    accepted: list[list[int]] = [[] for _ in requests]
    worst = 0.0
    while any(len(own) < NEW for own in tokens):
        for i, request in enumerate(requests):
            at = len(tokens[i])
            known = (truth[i] + [0] * case.drafts)[at : at + case.drafts]
            drafts = [(token + (at + k in WRONG_AT[i])) % vocab for k, token in enumerate(known)]
            append_drafts(engine, request, drafts)
        poison(engine, requests)
        batch = engine.plan_step(requests, query_length=length)
        engine.run_eager(batch)
        found = engine.model.gather_logits(batch.logits)
        for i, own in enumerate(accept_drafts(engine, batch, requests)):
            at = len(tokens[i])
            rows = found[i * length : i * length + len(own)][: max(NEW - at, 0)]
            expected = logits[i, at : at + len(rows)]
            if len(rows):
                worst = max(worst, float((rows - expected).abs().max() / expected.abs().max()))
                assert bool(rows.isfinite().all())
            tokens[i] += own
            accepted[i].append(len(own) - 1)
        poison(engine, requests)
    return {"error": worst, "tokens": [own[:NEW] for own in tokens], "accepted": accepted}


def draft_tokens(case: Case, rank: int, truth: list[list[int]], correct: bool) -> list[dict[int, list[int]]]:
    """Return, for each request, the tokens drafted by the model's layer, by the number of decoded tokens. Steps verify
    other drafts: all correct, so that a step yields `drafts` + 1 tokens, or all wrong, so that it yields one.
    """
    engine = make_engine(case, rank)
    first, vocab = len(CONTEXTS) * (rank // case.layout.attn_tp), engine.model.shape.vocab
    requests = [admit(engine, first + i, context) for i, context in enumerate(CONTEXTS)]
    found: list[dict[int, list[int]]] = [{} for _ in requests]
    for request in requests:
        append_drafts(engine, request, [0] * case.drafts)
    at = 0
    while at + case.drafts < NEW:
        for request, own in zip(requests, truth, strict=True):
            known = own[at : at + case.drafts]
            verified = known if correct else [(token + 1) % vocab for token in known]
            engine.request_pool.set_tokens(request.slot, request.length - case.drafts, verified)
        batch = engine.plan_step(requests, query_length=case.drafts + 1)
        engine.run_eager(batch)
        yielded = {len(own) for own in accept_drafts(engine, batch, requests)}
        assert yielded == {case.drafts + 1 if correct else 1}
        at += yielded.pop()
        starts = [request.length - 1 for request in requests]
        for request in requests:
            append_drafts(engine, request, [0] * case.drafts)
        engine.plan_drafts(batch, requests, starts)
        engine.run_drafts(batch)
        batch.draft_batches = None  # the next step only verifies
        for own, drafts in zip(found, batch.drafts.tolist(), strict=False):
            own[at] = drafts
    return found


SERVED = (5, 21, 8, 12, 3)  # lengths of prompts that are served together; chunks of 12 tokens divide some


def serve_drafts(case: Case, rank: int) -> dict[str, list[int]]:
    """Return the tokens drafted for requests of this rank's replica, by request and number of known tokens. Requests
    come one after the other, so that steps hold decodes, parts of prompts and prompts that end. All drafts are
    rejected.
    """
    shape, layout = SHAPES[case.kind].add_drafts(case.drafts), case.layout
    engine = make_engine(case, rank, context=max(SERVED) + NEW + case.drafts, requests=len(SERVED))
    prefiller = Prefiller(engine.model, backend="sdpa", tokens=12, rows=12 + engine.largest * engine.query_length)
    serving = ServeEngine(engine, prefiller, None)
    serving.capture_steps()
    config = SchedulerConfig(
        replicas=layout.dp,
        pages=engine.allocator.pages,
        page_size=case.page_size,
        dcp=layout.dcp,
        interleave=case.interleave,
        max_requests=len(SERVED),
        chunk=12,
        prefix_cache=False,
        max_context=engine.max_context,
        speculation=Speculation(case.drafts, (0.0,) * case.drafts),
    )
    scheduler, known = Scheduler(config), dict[int, int]()
    found: dict[str, list[int]] = {}
    for number in range(200):
        if number % 2 == 0 and len(known) < len(SERVED):
            request = len(known)
            known[request] = SERVED[request]
            prompt = np.array(
                [(37 * request + 11 * i + 5) % shape.vocab for i in range(SERVED[request])], dtype=np.int32
            )
            assert not scheduler.submit(ServeRequest(number=request, prompt=prompt, output_tokens=NEW))  # type: ignore[arg-type]
        step = scheduler.plan_step()
        if step is None:
            return found
        launched = serving.launch_step(step)
        for sequence in step.replicas[serving.replica].emitting_sequences:
            known[sequence.request.number] += 1
            at = known[sequence.request.number]
            drafts = engine.request_pool.tokens[sequence.slot, at : at + case.drafts].tolist()
            if not sequence.is_finished:
                found[f"{sequence.request.number}/{at}"] = drafts
        launched.wait_tokens()
        stored = [s for s in scheduler.replicas[serving.replica].running if s.allocation is not None]
        poison_except(engine, [(s.allocation, s.computed) for s in stored])  # type: ignore[misc]
    raise AssertionError("requests are not finished")


def main(rank: int, world: int, folder: Path) -> None:
    """Run every case, and save this rank's results."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    found = []
    for case in CASES[world]:
        truth, logits = decode_one_by_one(case, rank)
        found.append(verify_drafts(case, rank, truth, logits) | {"truth": truth})
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    case = DRAFTING[world]
    truth, _ = decode_one_by_one(case, rank)
    drafted = {name: draft_tokens(case, rank, truth, correct=name == "right") for name in ("right", "wrong")}
    (folder / f"drafted-{world}-{rank}.json").write_text(json.dumps(drafted))
    (folder / f"served-{world}-{rank}.json").write_text(json.dumps(serve_drafts(case, rank)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(main, int(sys.argv[1]), int(sys.argv[1]), Path(sys.argv[2]))
