"""What the records say, computed: best layout per load, DCP against its baseline, KV capacity, repeats.

No sentence here is true in general. Each is made from the points at hand, with their uncertainty, and none is made
about the speed of a CPU run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.reports.merge import spread
from dcpbench.stats import REPEATS_AGREE_WITHIN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.records import Interval
    from dcpbench.reports.frames import Frames

LOAD = ["run", "model", "workload", "context", "concurrency"]
BASELINE_OF = [*LOAD, "tp", "dp", "backend", "dtype", "page_size", "weights", "all_reduce"]
"""What a DCP point and its dcp=1 baseline have in common."""

NOT_RUN = {"rejected": "was rejected", "failed": "failed", "hung": "hung"}
"""What became of a point without numbers, in a sentence."""


def timed(frames: Frames) -> pd.DataFrame:
    """Points whose speed may be spoken about: measured, and not on a CPU."""
    points = frames.points
    return points if points.empty else points[points["output_tok_s"].notna() & ~points["cpu"]]


def best_per_load(points: pd.DataFrame) -> pd.DataFrame:
    """The layout with the highest throughput of each load that at least two layouts ran.

    `clear` is False where its interval overlaps the next one's or it leads by no more than repeats may differ.
    """
    rows: list[dict[str, Any]] = []
    for load, group in points.groupby(LOAD, sort=False) if len(points) else ():
        if len(group) < 2:  # noqa: PLR2004 - a best of one says nothing
            continue
        first, second = (row for _, row in group.sort_values("output_tok_s", ascending=False).head(2).iterrows())
        lead = first["output_tok_s"] / second["output_tok_s"]
        clear = first["output_tok_s_low"] > second["output_tok_s_high"] and lead > 1 + REPEATS_AGREE_WITHIN
        rows.append(
            dict(zip(LOAD, load, strict=True))
            | {
                "best": first["label"],
                "tok_s": first["output_tok_s"],
                "low": first["output_tok_s_low"],
                "high": first["output_tok_s_high"],
                "next": second["label"],
                "lead": lead,
                "clear": bool(clear),
                "layouts": len(group),
            }
        )
    return pd.DataFrame(rows)


def dcp_against_baseline(points: pd.DataFrame) -> pd.DataFrame:
    """Throughput of every DCP point over that of its dcp=1 baseline: the ratio and the widest it may be.

    `ratio` is missing where the baseline did not run. `verdict` is `higher` or `lower` only if the intervals lie apart
    and the ratio differs from 1 by more than repeats may.
    """
    return over_baseline(points, BASELINE_OF, [*LOAD, "label", "tp", "dp"])


def over_baseline(
    points: pd.DataFrame, same: list[str], shown: list[str],
    more: Callable[[pd.Series[Any], pd.Series[Any]], dict[str, Any]] = lambda *_: {},
) -> pd.DataFrame:  # fmt: skip
    """A row for each DCP point: its columns `shown`, and its throughput over that of the point without DCP.

    The two agree in the columns `same`; `more` adds to a row, of the point and its baseline.
    """
    if points.empty:
        return pd.DataFrame()
    base = points[points["dcp"] == 1].drop_duplicates(same).set_index(same)
    rows: list[dict[str, Any]] = []
    for _, point in points[points["dcp"] > 1].iterrows():
        row = {name: point[name] for name in shown}
        key = tuple(point[same])
        if key in base.index:
            over = base.loc[key]
            row |= {
                "baseline": over["label"],
                "ratio": point["output_tok_s"] / over["output_tok_s"],
                "low": point["output_tok_s_low"] / over["output_tok_s_high"],
                "high": point["output_tok_s_high"] / over["output_tok_s_low"],
                **more(point, over),
            }
        told = verdict(row, above="higher", below="lower") if "ratio" in row else "no baseline"
        rows.append(row | {"verdict": told})
    return pd.DataFrame(rows)


def verdict(row: dict[str, Any], *, above: str, below: str) -> str:
    """Whether a ratio is `above` or `below` 1: only where all of its reach is, and by more than repeats may differ."""
    if row["low"] > 1 and row["ratio"] > 1 + REPEATS_AGREE_WITHIN:
        return above
    if row["high"] < 1 and row["ratio"] < 1 - REPEATS_AGREE_WITHIN:
        return below
    return "no clear difference"


def kv_by_layout(points: pd.DataFrame) -> pd.DataFrame:
    """KV cache of each layout: the pool, what it holds, and how much more than its first layout without DCP or DP."""
    if points.empty or points["kv_tokens_per_gib"].isna().all():
        return pd.DataFrame()
    known = points.dropna(subset=["kv_tokens_per_gib"]).sort_values("kv_capacity_tokens", ascending=False)
    best = known.drop_duplicates(["run", "model", "layout"])
    best = best.sort_values(["run", "model", "tp", "dp", "dcp"], kind="stable").copy()
    plain = best[(best["dp"] == 1) & (best["dcp"] == 1)].set_index(["run", "model", "tp"])["kv_tokens_per_gib"]
    keys = zip(best["run"], best["model"], best["tp"], strict=True)
    best["kv_ratio"] = [
        per_gib / plain[key] if key in plain.index else None
        for key, per_gib in zip(keys, best["kv_tokens_per_gib"], strict=True)
    ]
    return best


def repeats(frames: Frames) -> pd.DataFrame:
    """How far repeated measurements of one point lie apart, over repeats and over runs on the same hardware."""
    found: dict[tuple[str, str], list[tuple[str, Any, Interval]]] = {}
    for run in frames.runs:
        for record in run.records:
            if record.outcome == "ok" and record.metrics and record.environment:
                key = (record.point.same_but_repeat(), record.environment.device)
                found.setdefault(key, []).append((run.name, record.point, record.metrics.step_ms))
    rows: list[dict[str, Any]] = []
    for measured in found.values():
        apart = spread([interval for _, _, interval in measured])
        if apart is not None:
            point = measured[0][1]
            rows.append(
                {
                    "model": point.model,
                    "layout": str(point.layout),
                    "context": point.context,
                    "concurrency": point.concurrency,
                    "medians_ms": [interval.median for _, _, interval in measured],
                    "runs": list(dict.fromkeys(name for name, _, _ in measured)),
                    "apart": apart,
                }
            )
    return pd.DataFrame(rows)


def headline(frames: Frames) -> list[str]:
    """The sentences a report opens with."""
    said = []
    if frames.everything.empty:
        said.append(f"No point finished: {_outcomes(frames)}. There is nothing to compare.")
    if frames.cpu:
        said.append(
            "CPU: functional run. It shows which layouts run. "
            "No conclusion about performance can be drawn from its times."
        )
    points = timed(frames)
    best, ratios, kv = best_per_load(points), dcp_against_baseline(points), kv_by_layout(frames.everything)
    for run, model in _models(frames):
        where = f"{model}, run {run}" if len(frames.runs) > 1 else str(model)
        said += [
            f"{where}: {sentence}"
            for sentence in (
                *_best_sentences(_of(best, run, model)),
                *_dcp_sentences(_of(ratios, run, model), frames),
                *_kv_sentences(_of(kv, run, model)),
            )
        ]
    return said


def closing(frames: Frames, apart: Sequence[float]) -> list[str]:
    """The sentences after all that is found: how well repeats agree, and what did not run."""
    if frames.everything.empty:
        return []
    missing = f"Not every point ran: {_outcomes(frames)}. Each is listed with its reason."
    return [repeats_sentence(apart), *([missing] if len(frames.others) else [])]


def repeats_sentence(apart: Sequence[float]) -> str:
    """Whether repeats agree; `apart` says of each point measured more than once by how much they differ."""
    if not len(apart):
        return "Every point was measured once, so how well repeats agree is not known."
    wide = sum(a > REPEATS_AGREE_WITHIN for a in apart)
    within = f"{REPEATS_AGREE_WITHIN:.0%}".replace("%", " %")
    if wide:
        verb = "disagrees" if wide == 1 else "disagree"
        return f"Repeats: {wide} of {_points(len(apart))} measured more than once {verb} by more than {within}."
    if len(apart) == 1:
        return f"Repeats: the one point measured more than once agrees within {_percent(max(apart))}."
    return f"Repeats: all {_points(len(apart))} measured more than once agree within {_percent(max(apart))}."


def _models(frames: Frames) -> list[tuple[str, str]]:
    points = frames.everything
    return [] if points.empty else list(dict.fromkeys(zip(points["run"], points["model"], strict=True)))


def _of(table: pd.DataFrame, run: str, model: str) -> pd.DataFrame:
    return table if table.empty else table[(table["run"] == run) & (table["model"] == model)]


def _best_sentences(best: pd.DataFrame) -> list[str]:
    if best.empty:
        return []
    clear = best[best["clear"]]
    won = [f"{label} in {n}" for label, n in clear["best"].value_counts().items()]
    ties = len(best) - len(clear)
    won += [f"no layout clearly in {ties}"] if ties else []
    top = best.sort_values(["context", "concurrency"]).iloc[-1]
    lead = f"{top['lead']:.2f} times {top['next']}" if top["clear"] else f"not clearly more than {top['next']}"
    text = (
        f"of {_loads(len(best))}, the highest throughput is that of {_list(won)}. At the heaviest load ({_load(top)}) "
    )
    return [
        text + f"it is {top['best']} with {top['tok_s']:,.0f} tok/s [{top['low']:,.0f}–{top['high']:,.0f}], {lead}."
    ]


def _dcp_sentences(ratios: pd.DataFrame, frames: Frames) -> list[str]:
    if ratios.empty:
        return []
    said = []
    known = ratios.dropna(subset=["ratio"]) if "ratio" in ratios else ratios.iloc[:0]
    if len(known):
        counts = known["verdict"].value_counts()
        parts = [f"{v} in {counts[v]}" for v in ("higher", "lower", "no clear difference") if v in counts]
        ordered = known.sort_values("ratio", kind="stable")
        low, high = ordered.iloc[0], ordered.iloc[-1]
        reach = f"from {_ratio(low)} to {_ratio(high)}" if len(known) > 1 else _ratio(low)
        said.append(
            f"throughput with DCP over that of the same layout without it, {_points(len(known))}: {_list(parts)}; "
            f"{reach}."
        )
    if missing := ratios[ratios["verdict"] == "no baseline"].shape[0]:
        lost = _of(frames.others, ratios["run"].iloc[0], ratios["model"].iloc[0])
        ended = set(lost[lost["dcp"] == 1]["outcome"])
        whys = [words for outcome, words in NOT_RUN.items() if outcome in ended]
        why = f", because it {' or '.join(whys)}" if whys else ""
        said.append(f"{_points(missing)} with DCP ran where the same layout without it did not{why}.")
    return said


def _kv_sentences(kv: pd.DataFrame) -> list[str]:
    more = kv if kv.empty else kv[(kv["dcp"] > 1) & kv["kv_ratio"].notna()]
    if more.empty:
        return []
    top = more.sort_values("kv_ratio", kind="stable").iloc[-1]
    times = f"{top['kv_ratio']:.2f} times as many tokens as tp{top['tp']}"
    return [f"per GiB of KV memory on each GPU, {top['layout']} holds {times}."]


def _load(row: pd.Series[Any]) -> str:
    return f"context {row['context']:,}, concurrency {row['concurrency']:,}"


def _ratio(row: pd.Series[Any]) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}–{row['high']:.3f}] ({row['label']}, {_load(row)})"


def _outcomes(frames: Frames) -> str:
    counts = frames.others["outcome"].value_counts()
    return _list([f"{n} {outcome}" for outcome, n in counts.items()]) or "the record file holds no point"


def _list(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def _points(n: int) -> str:
    return "1 point" if n == 1 else f"{n} points"


def _loads(n: int) -> str:
    return "1 load" if n == 1 else f"{n} loads"


def _percent(share: float) -> str:
    return f"{share * 100:.2g} %"
