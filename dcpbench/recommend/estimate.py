"""Estimate the time of a step that was not measured: floors of its parts, each divided by the share that published steps reach.

    seconds(step) = layers · launch + Σ over parts (floor of the part / share) + Σ over kinds of calls (more · calls of the communication model)

Parts are groups of the phases of points/roofline.py, without communication between ranks, for which points/comm_model.py has
measurements instead of floors. Work that is bound by reading has one share, and work that is bound by multiplying another.
Launching a layer with fp8 weights takes longer, because rows are quantised, and so do layers in which ranks hold undivided
experts, because they wait for the busiest rank.

Launch, shares (none is above 1) and `more` are fitted to published step times by least squares of relative errors;
`python -m tools.recommend_check --write` does that and writes points/measured/steps-h200.json. Floors scale with the rates of
a machine, shares do not: a band next to the estimate states its error for a model that the fit had not seen.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from importlib import resources
from statistics import NormalDist
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models.weight_formats import EXPERTS
from dcpbench.points import memory, names
from dcpbench.points.batches import compute_batch_rows
from dcpbench.points.cluster_specs import MEASURED_ON
from dcpbench.points.roofline import compute_floor_us, get_flops_limit, iter_phase_works
from dcpbench.points.step_calls import predict_calls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dcpbench.points.comm_model import CommModel
    from dcpbench.points.roofline import Sharding, StepRows

LAUNCH, QUANTISING = "launch", "quantising"  # terms: µs of every layer, and more µs of one with fp8 weights
WAITING = "waiting"  # term: wait for the rank with most experts, relative to that of random routing
EXCHANGES, COLLECTIVES = "exchanges", "collectives"  # terms relative to modelled time: DCP's calls, and all others
PARTS: dict[str, tuple[str, ...]] = {  # phases of points/roofline.py by part; others are calls between ranks
    "experts": ("moe",),
    "attention": ("attention",),
    "linear": ("qkv_proj", "o_proj", "dense_mlp", "lm_head"),
    "rows": ("embed", "norm", "kv_write"),
    "prefill": ("prefill",),
}
ATTENTION, FP8_ATTENTION = "attention", "attention over fp8"  # over a cache of each precision
MULTIPLIED = {part: f"{part}, multiplied" for part in ("experts", ATTENTION, FP8_ATTENTION, "linear")}
"""Name of the term of each part if it is bound by multiplying; the part's own name is for being bound by reading."""
PER_LAYER, CALLED = (LAUNCH, QUANTISING), (EXCHANGES, COLLECTIVES)
FLOORED = (*PARTS, FP8_ATTENTION, *MULTIPLIED.values())
TERMS = (*PER_LAYER, WAITING, *FLOORED, *CALLED)


class Steps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the parameters that published steps give for steps that were not measured; stored in a file."""

    terms: dict[str, float]  # fitted: µs (PER_LAYER), 1 / share (FLOORED), ratio to computed time (WAITING, CALLED)
    without: dict[str, dict[str, float]]  # terms fitted without a model's steps, by name, to score that model
    band: float  # 90th percentile of |estimate / measured − 1|, for a model that the fit had not seen
    ratio_band: float  # the same percentile for the ratio of two layouts at one load, in which common errors cancel
    machine: str  # machine of the published steps; a GPU of points/gpus.py
    sources: list[str]  # folders of results/
    steps: int  # number of steps that were fitted


@functools.cache
def load_published_steps() -> Steps:
    """Return the parameters of the package."""
    file = resources.files("dcpbench.points.measured") / f"steps-{MEASURED_ON.lower()}.json"
    return msgspec.json.decode(file.read_bytes(), type=Steps)


def pad_step(rows: StepRows, replicas: int) -> StepRows:
    """Return the step as it runs.

    Decode rows are padded to the size of a captured graph, and the padding goes through experts like other rows. All
    replicas are padded to the rows of the fullest; in steps with chunks that padding goes to no expert.
    """
    decodes = len(rows.decodes)
    more = compute_batch_rows(decodes) - decodes if decodes else 0
    return dataclasses.replace(
        rows,
        decodes=rows.decodes + (1,) * more,
        tokens=replicas * (rows.rows + more * rows.queries),
        idle=replicas * rows.rows - rows.tokens if rows.chunks else 0,
    )


def compute_terms(
    sharding: Sharding, rows: StepRows, rates: Mapping[str, float], known: CommModel, exchange: str
) -> dict[str, float] | None:
    """Return the µs of each of TERMS before fitting; None if `rates` lack one that the step needs. Raise as `predict_calls` does."""
    found = dict.fromkeys(TERMS, 0.0)
    part_of = {phase: part for part, phases in PARTS.items() for phase in phases}
    for phase, calls_per_step, work in iter_phase_works(sharding, rows):
        if work.is_empty or work.barriers:
            continue
        us = compute_floor_us(work, rates)
        if us is None:
            return None
        part = FP8_ATTENTION if phase == ATTENTION and sharding.kv_itemsize == 1 else part_of[phase]
        multiplies = work.flops and work.flops / rates[get_flops_limit(work, rates)] * 1e6 >= us
        found[MULTIPLIED.get(part, part) if multiplies else part] += calls_per_step * us
    found[LAUNCH] = float(sharding.shape.layers)
    found[QUANTISING] = float(sharding.shape.layers if sharding.in_fp8 else 0)
    found[WAITING] = compute_waiting_us(sharding, rows.live, rates)
    for what, each in predict_calls(sharding, rows, known, exchange).items():
        found[get_call_term(what)] += each.mean * 1e6
    return found


def compute_waiting_us(sharding: Sharding, tokens: int, rates: Mapping[str, float]) -> float:
    """Return the µs that ranks with undivided experts wait in a step for the rank that reads most of them.

    The busiest rank of a stated routing is that of points/expert_distribution.py. Otherwise all experts are equally likely: an expert is hit with p = 1 − (1 − k / E)^T, so the largest of n ranks with
    E / n each reads √(E / n · p (1 − p)) times the largest of n normal numbers more than the mean (Blom 1958: that of rank n
    is Φ⁻¹((n − 3/8) / (n + 1/4))).
    """
    s, ranks = sharding.shape, sharding.expert_ranks
    if ranks == 1 or not s.experts or "read" not in rates:
        return 0.0
    products = memory.make_mlp_products(s, s.moe_intermediate_size)
    stored = EXPERTS in sharding.weights.parts
    bits = sharding.weights.bits if stored else 8 * sharding.itemsize
    expert_bytes = sum(product.elements for product in products) * bits / 8
    return memory.count_all_layers(s).moe * _estimate_excess(sharding, tokens) * expert_bytes / rates["read"] * 1e6


def _estimate_excess(sharding: Sharding, tokens: int) -> float:
    """Return how many more experts than the mean rank the busiest rank of a layer reads."""
    s, ranks = sharding.shape, sharding.expert_ranks
    if sharding.routing:
        from dcpbench.points.expert_choices import load_choices

        choices = load_choices(sharding.routing, s)
        return choices.estimate_busiest(tokens, ranks) - choices.estimate_hit(tokens) / ranks
    hit = 1 - (1 - s.top_k / s.experts) ** tokens
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return largest * math.sqrt(s.experts / ranks * hit * (1 - hit))


def get_call_term(what: str) -> str:
    """Return the term of a kind of calls."""
    return EXCHANGES if what in names.EXCHANGES else COLLECTIVES


def compute_us(terms_us: Mapping[str, float], fitted: Mapping[str, float]) -> float:
    """Return the estimate in µs."""
    return sum(fitted[name] * amount for name, amount in terms_us.items())
