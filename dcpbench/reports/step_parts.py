"""Bring the phases of dcpbench's steps and the parts of other engines' steps to common parts, by one declared mapping.

dcpbench's phases are ranges of its code (measuring.ranges.PHASES); parts of other engines follow from the names of their
kernels (syncs.kernel_time.PARTS). Both are names in `phases.phase_us` of a record.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dcpbench.reports.floors import find_phases
from dcpbench.show.numbers import is_missing

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN = "unknown"
IDLE = "no kernel"


@dataclasses.dataclass(frozen=True)
class StepPart:
    """Describe a part of a step by the names that records have for it."""

    name: str
    phases: tuple[str, ...]  # of dcpbench's engine
    kernels: tuple[str, ...]  # of other engines
    colour: str


ATTENTION, EXCHANGE, REDUCE, PROJECTIONS, EXPERTS, NORMS, OTHERS = (
    "attention",
    "exchange and merge",
    "all-reduce",
    "projections",
    "experts",
    "norms, rope, KV write",
    "other kernels",
)
STEP_PARTS = (  # common parts in the order of a layer. Names that none of them has are UNKNOWN.
    StepPart(ATTENTION, ("attention", "prefill"), ("attention",), "#332288"),
    StepPart(EXCHANGE, ("q_gather", "merge", "dp_gather", "prefix_gather"), ("exchange", "merge"), "#CC6677"),
    StepPart(REDUCE, ("attn_reduce", "mlp_reduce"), ("all-reduce",), "#117733"),
    StepPart(PROJECTIONS, ("qkv_proj", "o_proj", "dense_mlp", "lm_head"), ("projections",), "#DDCC77"),
    StepPart(EXPERTS, ("moe",), ("experts",), "#88CCEE"),
    StepPart(NORMS, ("norm", "kv_write"), ("norm and rope", "quantisation", "KV cache write"), "#882255"),
    StepPart(OTHERS, ("embed", "other"), ("sampling", "copies", "elementwise"), "#44AA99"),
    StepPart(UNKNOWN, (), (UNKNOWN,), "#000000"),
)
MATRIX_PRODUCTS, COMMUNICATION = "projections and experts", "exchange, merge and all-reduce"
SUMS = {MATRIX_PRODUCTS: (PROJECTIONS, EXPERTS), COMMUNICATION: (EXCHANGE, REDUCE)}
"""Sums of parts that contain the same work in all engines where the parts themselves do not; the second with attention DP."""
CONTENTS = (
    "dcpbench's parts are ranges of its code, those of other engines follow from the names of their kernels. Work that "
    "dcpbench's ranges contain in another part: latent norms, rotary embedding and their quantisation in projections, "
    "sampling and the gather of logits in projections, the shared expert, the router and the quantisation of rows in experts, and the all-reduce of the "
    "embedding in other kernels. In other engines the products of the shared expert are projections unless it is fused with the routed "
    "experts, activations of dense layers are experts, the gather of logits is exchange, and copies before and after an exchange are other kernels. So projections and experts are compared by their sum. Where kernels overlap, each moment counts for the kernel that "
    "began first."
)
DP_CONTENTS = (  # sentences on what the parts of the engines contain that cannot be separated
    "With attention data parallelism, other engines gather and scatter rows for the experts by the same kernels as partial attention, "
    "which are all exchange; dcpbench's sum over experts is all-reduce. So exchange, merge and all-reduce are compared by their sum."
)
_PART_OF = {name: part.name for part in STEP_PARTS for name in (*part.phases, *part.kernels)}


def find_step_part(name: str) -> str:
    """Return the common part to which a phase of dcpbench or a part of another engine belongs."""
    return _PART_OF.get(name, UNKNOWN)


def compute_parts(row: Mapping[str, object]) -> dict[str, float]:
    """Return the time of each common part of a point in µs, from the columns `phase_…_us` of a report's table.

    A part of which the profile has no phase or kernel is absent.
    """
    found: dict[str, float] = {}
    for phase, column in find_phases(row).items():
        if not is_missing(us := row[column]) and us:
            part = find_step_part(phase)
            found[part] = found.get(part, 0.0) + float(us)  # type: ignore[arg-type]
    return {part.name: found[part.name] for part in STEP_PARTS if part.name in found}


def add_sums(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts with SUMS: that of matrix products only if both parts are present, that of communication if any is."""
    enough = {MATRIX_PRODUCTS: all, COMMUNICATION: any}
    sums = {
        name: sum(parts.get(own, 0.0) for own in of)
        for name, of in SUMS.items()
        if enough[name](own in parts for own in of)
    }
    return {**parts, **sums}


PROLONGED = (EXCHANGE, REDUCE, COMMUNICATION, IDLE)  # by the profiler, as they contain waits


def list_compared_parts(row: Mapping[str, Any]) -> list[str]:
    """Return the parts and sums of parts of a point that may be compared between engines, with attention DP or without."""
    if row["dp"] > 1:
        return [ATTENTION, COMMUNICATION, MATRIX_PRODUCTS, NORMS, OTHERS, IDLE]
    return [ATTENTION, EXCHANGE, REDUCE, MATRIX_PRODUCTS, NORMS, OTHERS, IDLE]
