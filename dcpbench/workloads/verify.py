"""`dcpbench verify`: one layout, backend, exchange and dtype against truth computed in the plainest way.

attention   merged output of requests of many lengths against fp64 over all rows (workloads/attention_error.py)
reduce      with --all-reduce symm: sums over the ranks of a replica against fp64, one row and a whole batch
kv_write    one step writes each new row on its owner and nothing else, on any rank
logits      with a checkpoint: logits of every position against `transformers` in fp32, prompts fed token by token; in
            half precision, where rounding chooses other experts, those of the median position
routing     with sigmoid routing: of the same prompts the tokens for which some layer's router chose other experts than
            its scores and the checkpoint's bias in fp32 do
tokens      the same prompts continued greedily: tokens that differ
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.engine.weights import routing_bias
from dcpbench.exchange.collectives import gather_objects, largest_error
from dcpbench.kernels import moe
from dcpbench.kernels.e4m3 import ROUNDING
from dcpbench.launch.jobs import Check
from dcpbench.points import layout as arithmetic
from dcpbench.points.budget import plan_whole
from dcpbench.points.names import ALL_REDUCES, FP8, NO_EXCHANGE
from dcpbench.workloads import oracle
from dcpbench.workloads.attention_error import LIMIT, attention_error, limit_of
from dcpbench.workloads.session import build

if TYPE_CHECKING:
    from dcpbench.engine.decode import DecodeEngine, Request
    from dcpbench.engine.model import Model
    from dcpbench.launch.jobs import Job
    from dcpbench.points.point import Point
    from dcpbench.points.shapes import ModelShape

LOGITS_LIMIT = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 1e-1}
"""Largest difference as a share of the largest logit that transformers has for the prompts: rounding errors grow with
the numbers that are rounded. The logits of the small checkpoints reach 5, and fp32 differs by 2e-6 of that.

In half precision at the median position: near ties between experts are rounded either way, and such a position differs
by whole experts (transformers in bf16 differs from itself in fp32 by up to 1.2 on the checkpoints of the tests, while
the median is 0.09).
"""
ROUNDED = 6
"""Inputs of products over fp8 weights on the way through a layer: of qkv_a, q_b, o, gate, up and down. Gate and up have
the same, and their results are multiplied, which counts it twice."""
STAGGER = 3
"""Request i starts 3·i steps after the first, so that lengths in a batch differ and rows are padding in between."""


def run(point: Point, shape: ModelShape, job: Job, *, rank: int, device: torch.device) -> list[Check]:
    """All checks of one point. Collective; every rank returns the same list."""
    point.layout.check_model(shape, point.ep)
    checks = _storage_checks(point, shape, job.settings.seed, rank, device)
    if point.weights != "synthetic":
        checks += _oracle_checks(point, shape, job, rank, device)
    return checks


def _lengths(dcp: int, interleave: int, longest: int) -> list[int]:
    """Lengths around every edge: shards empty, uneven and even, one page and several."""
    stripe = dcp * interleave
    edges = {1, 2, stripe - 1, stripe, stripe + 1, 3 * stripe + interleave, 7 * stripe, longest}
    return sorted(n for n in edges if 1 <= n <= longest)


def _storage_checks(point: Point, shape: ModelShape, seed: int, rank: int, device: torch.device) -> list[Check]:
    small = dataclasses.replace(shape, layers=2, first_dense=1)
    lengths = _lengths(point.dcp, point.interleave, point.context)
    engine = _engine(msgspec.structs.replace(point, weights="synthetic"), small, lengths, seed, rank, device)
    requests = [engine.admit(n) for n in lengths]
    for number, request in enumerate(requests):
        engine.fill(request, number, seed)
    batch = engine.plan(requests)
    error = attention_error(engine, batch, requests, seed, all_requests=True)
    wrong = _wrong_writes(engine, requests)
    limit = LIMIT[point.dtype]
    checks = [
        _check(point, "attention", error, limit_of(engine), f"lengths {', '.join(map(str, lengths))}"),
        _check(point, "kv_write", float(wrong), 0.0, "rows that changed and should not have, or the reverse"),
    ]
    if point.all_reduce != ALL_REDUCES[0]:
        detail = f"1 row and {batch.size}, {point.all_reduce}"
        checks.append(_check(point, "reduce", _reduce_error(engine, batch.size, seed), limit, detail))
    return checks


def _reduce_error(engine: DecodeEngine, rows: int, seed: int) -> float:
    """‖sum − sum₆₄‖ / ‖sum₆₄‖ of random hidden states of the ranks of a replica; the largest of all ranks and sizes."""
    model = engine.model
    generator = torch.Generator(engine.device).manual_seed(seed + 1 + model.groups.attn.rank)
    error = 0.0
    for count in (1, rows):
        x_BD = torch.empty(count, model.shape.hidden, dtype=model.dtype, device=engine.device)
        everyone_NBD = model.groups.attn.all_gather(x_BD.normal_(generator=generator))
        truth_BD = everyone_NBD.double().sum(0)
        wrong_BD = model.all_reduce(x_BD).double() - truth_BD
        error = max(error, largest_error(float(wrong_BD.norm() / truth_BD.norm())))
    return error


def _wrong_writes(engine: DecodeEngine, requests: list[Request]) -> int:
    """Rows of layer 0 that one step changed without being a new token's, plus new tokens' rows that it left alone."""
    model = engine.model
    before = model.kv.rows(0).clone()
    engine.run(engine.plan(requests))
    changed = (model.kv.rows(0) != before).any(dim=-1)
    changed[: engine.page_size] = False  # the padding page may change
    due = torch.zeros_like(changed)
    for request in requests:
        loc = int(request.allocation.locs(request.length - 1, request.length)[0])
        if arithmetic.owner(loc, model.layout.dcp, model.interleave) == model.groups.dcp.rank:
            due[arithmetic.row(loc, model.layout.dcp, model.interleave)] = True
    return sum(gather_objects(int((changed != due).sum())))


def _oracle_checks(point: Point, shape: ModelShape, job: Job, rank: int, device: torch.device) -> list[Check]:
    prompts = job.prompts
    longest = max(map(len, prompts)) + job.new_tokens
    rows = -(-len(prompts) // point.dp)
    engine = _engine(point, shape, [longest] * rows, job.settings.seed, rank, device)
    mine, elsewhere = _decode(engine, prompts, job.new_tokens, _routing_biases(point, shape, device))
    everyone, astray = gather_objects(mine), max(gather_objects(elsewhere))
    checks = gather_objects(_compare(point, shape, everyone, prompts, job.new_tokens) if rank == 0 else [])[0]
    if shape.routing != "sigmoid" or shape.first_dense == shape.layers:
        return checks
    detail = "tokens for which a layer chose other experts than with the checkpoint's bias in fp32, worst rank"
    return [*checks, _check(point, "routing", float(astray), 0.0, detail)]


def logits_limit(point: Point, shape: ModelShape) -> float:
    """Largest difference from transformers on the weights as they are stored, as a share of its largest logit.

    fp8 leaves the rounding of activations, and where the KV cache is fp8 that of keys and of values. Errors of a product's inputs are
    independent and average as their products do, so each rounding leaves the sum off by ROUNDING of itself; through a
    model they add up like a random walk, at most √(their number) · ROUNDING. Differences and logits are extremes of as
    many numbers. As in half precision at the median position.
    """
    fp8 = shape.layers * (ROUNDED * (point.weights_precision == FP8) + 2 * (point.kv_precision == FP8))
    return max(LOGITS_LIMIT[point.dtype], ROUNDING * fp8**0.5)


def _routing_biases(point: Point, shape: ModelShape, device: torch.device) -> list[torch.Tensor]:
    """[E] of each MoE layer as the checkpoint has it, in fp32; none for routers without."""
    source = CheckpointSource(Path(point.weights), torch.float32, device)
    layers = range(shape.first_dense, shape.layers) if shape.routing == "sigmoid" else ()
    found = [routing_bias(source, shape, f"model.layers.{i}.") for i in layers]
    return [bias_E for bias_E in found if bias_E is not None]


def _routed_elsewhere(model: Model, biases: list[torch.Tensor]) -> int:
    """Tokens of the step whose experts, in any layer, are not those that its scores and `biases` choose."""
    assert model.chosen_experts is not None
    wrong_T = torch.zeros((), dtype=torch.bool)
    for (logits_TE, ids_Tk), bias_E in zip(model.chosen_experts, biases, strict=bool(biases)):
        _, expected_Tk = moe.route(logits_TE, bias_E, model.shape)
        wrong_T = (ids_Tk.sort(-1).values != expected_Tk.sort(-1).values).any(-1).cpu() | wrong_T
    model.chosen_experts.clear()
    return int(wrong_T.sum())


def _compare(
    point: Point,
    shape: ModelShape,
    everyone: list[dict[int, tuple[list[int], torch.Tensor]]],
    prompts: tuple[tuple[int, ...], ...],
    new: int,
) -> list[Check]:
    """Every rank's logits and tokens of its replica's requests against the oracle's."""
    exact = point.precision == "fp32"
    fp8 = FP8 in (point.weights_precision, point.kv_precision)
    expected = oracle.greedy(point.weights, prompts, new, fp8=point.weights_precision == FP8)
    largest = max(float(truth.logits.nan_to_num(0.0, 0.0, 0.0).abs().max()) for truth in expected)
    limit = logits_limit(point, shape) * largest
    differences, wrong, tokens = [], 0, 0
    for found in everyone:
        for i, (said, logits) in found.items():
            pairs = zip(said, expected[i].tokens, strict=True)
            same = next((k for k, (ours, theirs) in enumerate(pairs) if ours != theirs), new)
            tokens += new
            seen = len(prompts[i]) + same  # logits after a token that differs belong to another text
            if same < new and not (fp8 and _margin(expected[i].logits[seen - 1]) <= 2 * limit):
                wrong += new - same
            differences.append((logits[:seen].float() - expected[i].logits[:seen]).abs().amax(dim=-1))
    error_P = torch.cat(differences).nan_to_num(nan=float("inf"))
    detail = f"largest absolute difference from transformers, fp32, whose logits reach {largest:.2g}"
    error = float(error_P.max())
    if not exact:
        detail += f", at the median position; {error:.2g} where rounding chose other experts"
        error = float(error_P.median())
    near = f"; where the two best logits are within {2 * limit:.2g} either is right" if fp8 else ""
    return [
        _check(point, "logits", error, limit, detail),
        _check(
            point,
            "tokens",
            float(wrong),
            0.0 if exact or fp8 else None,
            f"of {tokens} greedy tokens on all ranks{near}",
        ),
    ]


def _margin(logits_V: torch.Tensor) -> float:
    """Between the two best."""
    best, second = logits_V.topk(2).values.tolist()
    return float(best - second)


def _decode(
    engine: DecodeEngine, prompts: tuple[tuple[int, ...], ...], new: int, biases: list[torch.Tensor]
) -> tuple[dict[int, tuple[list[int], torch.Tensor]], int]:
    """This replica's requests by index: greedy tokens, and logits [positions, vocab] of prompt and continuation.

    And how many tokens, padding included, were routed otherwise than `biases` have it.
    """
    dp, elsewhere = engine.model.groups.dp, 0
    engine.model.chosen_experts = []
    mine = range(dp.rank, len(prompts), dp.size)
    rows = -(-len(prompts) // dp.size)
    texts = {i: list(prompts[i]) for i in mine}
    logits: dict[int, list[torch.Tensor]] = {i: [] for i in mine}
    live: dict[int, Request] = {}
    last = max(STAGGER * i + len(p) + new for i, p in enumerate(prompts))
    for step in range(last):
        for i in mine:
            position = step - STAGGER * i
            if position == 0:
                live[i] = engine.admit(1)
            elif i in live and position < len(prompts[i]) + new:
                engine.grow(live[i])
            elif i in live:
                engine.release(live.pop(i))
            if i in live and position < len(prompts[i]):
                engine.requests.set_tokens(live[i].slot, position, [texts[i][position]])
        batch = engine.plan(list(live.values()), rows)
        engine.run(batch)
        elsewhere += _routed_elsewhere(engine.model, biases)
        assert batch.logits is not None
        assert batch.next_tokens is not None
        full = engine.model.full_logits(batch.logits).cpu()
        next_tokens = batch.next_tokens.tolist()
        for row, i in enumerate(live):
            logits[i].append(full[row].clone())
            if len(logits[i]) >= len(texts[i]):
                texts[i].append(next_tokens[row])
    engine.model.chosen_experts = None
    said = {i: (texts[i][len(prompts[i]) : len(prompts[i]) + new], torch.stack(logits[i])) for i in mine}
    return said, elsewhere


def _engine(
    point: Point, shape: ModelShape, lengths: list[int], seed: int, rank: int, device: torch.device
) -> DecodeEngine:
    plan = plan_whole(point, lengths, shape)
    return build(point, shape, plan, rank=rank, device=device, seed=seed).engine


def _check(point: Point, name: str, error: float, limit: float | None, detail: str) -> Check:
    finite = math.isfinite(error)
    return Check(
        name=name,
        layout=str(point.layout),
        ep=point.ep_degree,
        backend=point.backend,
        exchange=point.exchange_label() or NO_EXCHANGE,
        all_reduce=point.all_reduce,
        dtype=point.precision,
        error=error if finite else None,
        limit=limit,
        ok=finite and (limit is None or error <= limit),
        detail=detail,
    )
