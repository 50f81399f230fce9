"""Read the reduced figures of `verify --engine` with a real engine (tests/data/verify), and judge them again.

The files hold gaps and drifts of pairs of answers, without the answers. Each pair is judged like a prompt with one pair. A drift may be
a mean over fewer tokens than are judged otherwise, so large drifts are more frequent here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dcpbench.servers.answer_counts import OWN_PAIRS, Cell, Count
from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP, Limits, Sizes, compute_limits
from dcpbench.servers.answer_pairs import DRIFT, SAME, SCORES, TOKEN, Pair, ScoredPrompt
from dcpbench.servers.answer_verdict import Judgement, judge_counts

VLLM = Path(__file__).parents[1] / "data" / "verify" / "vllm_2xH200.json"


def read_rows(path: Path = VLLM) -> tuple[list[list[dict[str, Any]]], float]:
    """Return the rows of each setting, and the standard deviation of the log-probabilities."""
    data = json.loads(path.read_text())
    settings = [[dict(zip(data["columns"], row, strict=True)) for row in one["rows"]] for one in data["settings"]]
    return settings, data["spread"]


def measure_rows(rows: list[dict[str, Any]]) -> Sizes:
    """Return the gaps and drifts of the pairs of one server's own answers."""
    sizes: dict[str, dict[str, list[float]]] = {"gaps": {}, "drifts": {}}
    for row in rows:
        if row["effect"] in OWN_PAIRS:
            for name, found in sizes.items():
                found.setdefault(row["effect"], []).extend(_pad_values(row, name))
    return Sizes(**sizes)


def make_count(row: dict[str, Any], limits: Limits) -> Count:
    """Return the count of a row under these limits."""
    gaps, drifts = _pad_values(row, "gaps"), _pad_values(row, "drifts")
    gap, drift = limits.get_limit(GAP), limits.scores if row["effect"] == SCORES else limits.get_limit(DRIFT_SIZE)
    real = sum(x > gap for x in gaps) + sum(x > drift for x in drifts)
    outliers = sum(limits.get_explained(GAP) < x <= gap for x in gaps)
    outliers += sum(limits.get_explained(DRIFT_SIZE) < x <= drift for x in drifts)
    kind = TOKEN if max(gaps) > gap else DRIFT if real else SAME
    return Count(
        effect=row["effect"],
        cell=Cell(length=row["length"], batch=row["batch"], cache=row["cache"]),
        prompts=row["pairs"],
        pairs=row["pairs"],
        near_ties=sum(0 < x <= limits.get_explained(GAP) for x in gaps),
        outliers=outliers,
        real=real,
        differing=real,
        compared=row["compared"],
        tokens=row["tokens"],
        with_logprobs=row["pairs"],
        example=Pair(kind=kind, first=0, gap=max(gaps), drift=max(drifts), compared=5, tokens=12),
        gaps=gaps,
        drifts=drifts,
    )


def judge_rows(settings: list[list[dict[str, Any]]], spread: float) -> list[Judgement]:
    """Judge the first setting by itself, and the others against it."""
    scored = [ScoredPrompt(first=[-1.0 - spread, -1.0 + spread], again=[-1.0 - spread, -1.0 + spread])]
    found: list[Judgement] = []
    base: list[Count] = []
    first = measure_rows(settings[0])
    for rows in settings:
        limits = compute_limits(0.1, [first, measure_rows(rows)], scored, scored)
        counts = [make_count(row, limits) for row in rows]
        own = [c for c in counts if c.effect in OWN_PAIRS]
        between = [c for c in counts if c.effect not in OWN_PAIRS]
        repeats = not found or found[0].repeats_itself
        found.append(judge_counts(own, between or None, base, limits=limits, base_repeats=repeats, level=0.0005))
        base = base or own
    return found


def scale_sizes(rows: list[dict[str, Any]], factor: float) -> list[dict[str, Any]]:
    """Return the rows with the differences between settings multiplied."""
    return [
        row | {name: [x * factor for x in row[name]] for name in ("gaps", "drifts")}
        if row["effect"] not in OWN_PAIRS
        else row
        for row in rows
    ]


def _pad_values(row: dict[str, Any], name: str) -> list[float]:
    """Return a value for each pair; those without one do not part, or have no equal token."""
    return [*row[name], *[0.0] * (row["pairs"] - len(row[name]))]
