"""Read how many drafts a server accepted, from its counters before and after a load. No torch.

    vLLM    /metrics: vllm:spec_decode_num_drafts_total, steps of a request that verified drafts, and
            vllm:spec_decode_num_accepted_tokens_per_pos_total, those of them that accepted the draft at a `position` (from 0)
    SGLang  /server_info: avg_spec_accept_length of each internal state, tokens of a request's step since the server's start, the sampled
            one included; /metrics: sglang:generation_tokens_total, with which the mean of a load follows from two such means

vLLM's counters are exact. The mean of a load on SGLang counts first tokens, which prefill yields, as tokens of steps.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dcpbench.points.speculation import MAX_DRAFT_TOKENS
from dcpbench.records.record import SpeculationMetrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Series = Sequence[tuple[Mapping[str, str], float]]

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "sglang:generation_tokens_total"
NAMES = (DRAFTS, ACCEPTED, GENERATED)
MAX_POSITIONS = 64
MAX_COUNT = float(1 << 53)  # of a counter: Prometheus sends floats, which are exact up to here


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftCounters:
    """Counters of a server since its start; None or empty if it does not report them."""

    steps: float | None = None
    accepted: tuple[float, ...] = ()  # by position
    generated: float | None = None
    tokens_per_step: float | None = None
    draft_tokens: int | None = None


def read_draft_counters(metrics: Mapping[str, Series], info: Mapping[str, Any]) -> DraftCounters:
    """Return the counters in the series of /metrics and in SGLang's answer about itself, which is empty for others."""
    positions: dict[int, float] = {}
    for labels, value in metrics.get(ACCEPTED, ()):
        position = labels.get("position", "")
        if position.isdecimal() and int(position) < MAX_POSITIONS:
            positions[int(position)] = positions.get(int(position), 0.0) + value
    states = info.get("internal_states")
    means = [_get_mean(state) for state in states] if isinstance(states, list) else []
    known = [mean for mean in means if mean is not None]
    drafts = info.get("speculative_num_steps")
    return DraftCounters(
        steps=_sum_series(metrics.get(DRAFTS, ())),
        accepted=tuple(positions.get(n, 0.0) for n in range(max(positions, default=-1) + 1)),
        generated=_sum_series(metrics.get(GENERATED, ())),
        tokens_per_step=sum(known) / len(known) if known else None,
        draft_tokens=drafts if isinstance(drafts, int) and 0 < drafts <= MAX_POSITIONS else None,
    )


def summarize_drafts(before: DraftCounters, after: DraftCounters) -> SpeculationMetrics | None:
    """Return what a server accepted in between; None if it verified no drafts, was restarted, or reports what cannot be."""
    if after.steps:
        return _summarize_counted(before, after)
    now, then = after.tokens_per_step, before.tokens_per_step
    if now is None or not 1 <= now <= MAX_POSITIONS + 1:
        return None
    mean = now
    if then and before.generated is not None and after.generated is not None:
        tokens, steps = after.generated - before.generated, after.generated / now - before.generated / then
        if tokens <= 0 or steps <= 0:
            return None
        mean = tokens / steps
    drafts = after.draft_tokens or MAX_DRAFT_TOKENS
    return SpeculationMetrics(draft_tokens=drafts, tokens_per_step=min(max(mean, 1.0), drafts + 1.0))


def _summarize_counted(before: DraftCounters, after: DraftCounters) -> SpeculationMetrics | None:
    then = (*before.accepted, *[0.0] * len(after.accepted))
    steps = (after.steps or 0.0) - (before.steps or 0.0)
    accepted = [now - was for now, was in zip(after.accepted, then, strict=False)]
    if not accepted or not 0 < steps <= MAX_COUNT or any(not 0 <= count <= steps for count in accepted):
        return None
    return SpeculationMetrics(
        draft_tokens=len(accepted),
        steps=round(steps),
        accepted=[round(count) for count in accepted],
        tokens_per_step=1 + sum(accepted) / steps,
    )


def _sum_series(series: Series) -> float | None:
    return sum(value for _, value in series) if series else None


def _get_mean(state: object) -> float | None:
    mean = state.get("avg_spec_accept_length") if isinstance(state, dict) else None
    valid = isinstance(mean, int | float) and not isinstance(mean, bool) and math.isfinite(mean) and mean > 0
    return float(mean) if valid else None  # type: ignore[arg-type]
