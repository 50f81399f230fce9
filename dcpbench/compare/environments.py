"""Find differences between two sides in machine, software, settings, weights and clocks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dcpbench.compare.comparison import SIDES, Difference, LayersHeld
from dcpbench.records.record import get_origin
from dcpbench.show.text import fit_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dcpbench.compare.comparison import SideName
    from dcpbench.compare.sides import Pair
    from dcpbench.records.record import Record

ENVIRONMENT = (
    ("GPU", "device"),
    ("GPUs", "device_count"),
    ("driver", "driver"),
    ("CUDA", "cuda"),
    ("torch", "torch"),
    ("Triton", "triton"),
    ("NCCL", "nccl"),
    ("FlashInfer", "flashinfer"),
    ("FlashMLA", "flash_mla"),
    ("Python", "python"),
    ("dcpbench", "dcpbench"),
    ("commit", "git_commit"),
    ("machine", "host_hash"),
)
CONDITIONS = (
    ("weights", "weights"),
    ("layers", "layers"),
    ("layers held", "layers_held"),
    ("KV rows", "kv"),
    ("CUDA graph", "cuda_graph"),
)
SERVER = (
    ("KV capacity of the server", "kv_capacity_tokens"),
    ("context that the server takes", "max_model_len"),
    ("prompts as", "prompts"),
    ("tokens counted by", "counted"),
)
CLOCK_APART = 0.01  # minimum relative difference of lowest SM clocks that is reported
MAX_SHOWN, MAX_TEXT_CHARS = 4, 60
WITHHELD = " (value withheld)"
SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def find_differences(pairs: Sequence[Pair]) -> list[Difference]:
    """Return every recorded value of matched points that differs between the sides, compared as sets."""
    a, b = _collect_sides(pairs)
    settings = sorted({name for r in (*a, *b) if r.environment for name in r.environment.settings})
    setting_names = sorted({name for r in (*a, *b) for name in r.measured_with})
    conditions = [[_list_conditions(record, settings, setting_names) for record in side] for side in (a, b)]
    found = []
    for i, (what, _) in enumerate(conditions[0][0]):
        x, y = (
            {"none" if value is None else str(value) for record in side for value in record[i][1]}
            for side in conditions
        )
        if x != y:
            shown = ("one", "another") if what.endswith(WITHHELD) else (_format_set(x), _format_set(y))
            found.append(Difference(what=fit_name(what, MAX_TEXT_CHARS), a=shown[0], b=shown[1]))
    return found + list(_compare_clocks(a, b))


def count_layers_held(pairs: Sequence[Pair]) -> list[LayersHeld]:
    """Return for each side and model how many layers were held where the whole model did not fit."""
    counts: dict[tuple[SideName, str, int], list[int]] = {}
    for side, records in zip(SIDES, _collect_sides(pairs), strict=True):
        for r in records:
            if (held := r.conditions) and held.layers_held < held.layers:
                key = (side, fit_name(r.point.model, MAX_TEXT_CHARS), held.layers)
                counts.setdefault(key, []).append(held.layers_held)
    return [
        LayersHeld(side=side, model=model, fewest=min(held), most=max(held), layers=layers)
        for (side, model, layers), held in counts.items()
    ]


def _collect_sides(pairs: Sequence[Pair]) -> tuple[list[Record], list[Record]]:
    a, b = (
        [r for side in sides for _, found in side for r in found]
        for sides in zip(*((p.a, p.b) for p in pairs), strict=True)
    )
    return a, b


def collect_warnings(records: Iterable[Record]) -> list[str]:
    """Return all warnings of some records, sorted; `throttled` with its cause."""
    return sorted({fit_name(warning, MAX_TEXT_CHARS) for r in records for warning in r.warnings})[:20]


def _list_conditions(
    r: Record, settings: Sequence[str], setting_names: Sequence[str]
) -> list[tuple[str, Sequence[object]]]:
    """Return how a record was taken, as pairs of name and values, including these `settings` of its machine and its command."""
    env, conditions, given = r.environment, r.conditions, r.measured_with
    return [
        *((what, [getattr(env, name)] if env else []) for what, name in ENVIRONMENT),
        *((what, [getattr(conditions, name)] if conditions else []) for what, name in CONDITIONS),
        *((n + WITHHELD if SECRET.search(n) else n, [env.settings.get(n)] if env else []) for n in settings),
        *((f"setting {name}", [given.get(name)] if given else []) for name in setting_names),
        ("measured by", [get_origin(r)]),
        *((what, [getattr(r.server, name)] if r.server else []) for what, name in SERVER),
        ("auto chose", [r.choice] if r.choice else []),
        ("throttled by", r.gpu.throttle_reasons if r.gpu else []),
        ("warnings", r.warnings),
    ]


def _compare_clocks(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Difference]:
    low, other = ([r.gpu.sm_clock_mhz_min for r in s if r.gpu and r.gpu.sm_clock_mhz_min] for s in (a, b))
    if low and other and abs(min(low) - min(other)) > CLOCK_APART * max(min(low), min(other)):
        yield Difference(what="lowest SM clock", a=f"{min(low)} MHz", b=f"{min(other)} MHz")


def _format_set(values: set[str]) -> str:
    ordered = sorted(values)
    more = f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    return (", ".join(fit_name(v, MAX_TEXT_CHARS) for v in ordered[:MAX_SHOWN]) or "none") + more
