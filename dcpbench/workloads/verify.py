"""`dcpbench verify`: one layout, backend, exchange and dtype against slow references.

attention   merged output of requests of many lengths against fp64 over all rows (workloads/attention_error.py)
reduce      with --collectives all-reduce=symm: sums over the ranks of a replica against fp64, one row and a whole batch
kv_write    one step writes each new row on its owner and nothing else, on any rank

With a checkpoint the engine is compared with `transformers`, too: checkpoint_checks.py.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import torch

from dcpbench.exchange.torch_collectives import gather_objects, reduce_max_error
from dcpbench.points import layout as arithmetic
from dcpbench.points.names import ALL_REDUCES, SYNTHETIC
from dcpbench.workloads.attention_error import LIMIT, compute_attention_error, get_limit
from dcpbench.workloads.checkpoint_checks import compare_checkpoint
from dcpbench.workloads.session import build_whole_session
from dcpbench.workloads.verify_checks import make_check

if TYPE_CHECKING:
    from dcpbench.engine.decode_engine import DecodeEngine, Request
    from dcpbench.launch.jobs import Check, Job
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.point import Point


def run(point: Point, shape: ModelShape, job: Job, *, rank: int, device: torch.device) -> list[Check]:
    """Return all checks of one point, the same list on every rank. Collective."""
    point.layout.check_model(shape, point.ep)
    checks = _check_storage(point, shape, job.settings.seed, rank, device)
    if point.weights != SYNTHETIC:
        checks += compare_checkpoint(point, shape, job, rank, device)
    return checks


def _list_lengths(dcp: int, interleave: int, longest: int) -> list[int]:
    """Return lengths around every edge: shards empty, uneven and even, one page and several."""
    stripe = dcp * interleave
    edges = {1, 2, stripe - 1, stripe, stripe + 1, 3 * stripe + interleave, 7 * stripe, longest}
    return sorted(n for n in edges if 1 <= n <= longest)


def _check_storage(point: Point, shape: ModelShape, seed: int, rank: int, device: torch.device) -> list[Check]:
    small = dataclasses.replace(shape, layers=2, first_k_dense_replace=1 if shape.experts else 2)
    lengths = _list_lengths(point.dcp, point.interleave, point.context)
    synthetic = msgspec.structs.replace(point, weights=SYNTHETIC)
    engine = build_whole_session(synthetic, small, lengths, rank=rank, device=device, seed=seed).engine
    requests = [engine.add_request(n) for n in lengths]
    for number, request in enumerate(requests):
        engine.write_random_kv(request, number, seed)
    batch = engine.plan_step(requests)
    error = compute_attention_error(engine, batch, requests, seed, all_requests=True)
    wrong = _count_wrong_writes(engine, requests)
    limit = LIMIT[point.dtype]
    checks = [
        make_check(point, "attention", error, get_limit(engine), f"lengths {', '.join(map(str, lengths))}"),
        make_check(point, "kv_write", float(wrong), 0.0, "rows that changed and should not have, or the reverse"),
    ]
    if point.all_reduce != ALL_REDUCES[0]:
        detail = f"1 row and {batch.size}, {point.all_reduce}"
        checks.append(make_check(point, "reduce", _measure_reduce_error(engine, batch.size, seed), limit, detail))
    return checks


def _measure_reduce_error(engine: DecodeEngine, rows: int, seed: int) -> float:
    """Return ‖sum − sum₆₄‖ / ‖sum₆₄‖ of random hidden states of a replica's ranks, the largest of all ranks and sizes."""
    model = engine.model
    generator = torch.Generator(engine.device).manual_seed(seed + 1 + model.groups.attn.rank)
    error = 0.0
    for count in (1, rows):
        x_BD = torch.empty(count, model.shape.hidden, dtype=model.dtype, device=engine.device)
        everyone_NBD = model.groups.attn.all_gather(x_BD.normal_(generator=generator))
        truth_BD = everyone_NBD.double().sum(0)
        wrong_BD = model.all_reduce(x_BD).double() - truth_BD
        error = max(error, reduce_max_error(float(wrong_BD.norm() / truth_BD.norm())))
    return error


def _count_wrong_writes(engine: DecodeEngine, requests: list[Request]) -> int:
    """Count rows of layer 0 that one step wrongly changed, and rows of new tokens that it did not change."""
    model = engine.model
    before = model.kv.get_rows(0).clone()
    engine.run_eager(engine.plan_step(requests))
    changed = (model.kv.get_rows(0) != before).any(dim=-1)
    changed[: engine.page_size] = False  # the padding page may change
    due = torch.zeros_like(changed)
    for request in requests:
        loc = int(request.allocation.compute_locs(request.length - 1, request.length)[0])
        if arithmetic.get_owner(loc, model.layout.dcp, model.interleave) == model.groups.dcp.rank:
            due[arithmetic.get_row(loc, model.layout.dcp, model.interleave)] = True
    return sum(gather_objects(int((changed != due).sum())))
