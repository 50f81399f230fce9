"""What the records say, computed: best layout per load, DCP against its baseline, break-even, KV capacity, repeats.

Points of `decode` and of `serve` go the same way, live runs and replays apart. Nothing is said about the speed of a CPU
run.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.points.axes import COMPUTES, Role
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import CLOSED
from dcpbench.points.point import point_axes
from dcpbench.records.runs import measurement
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports.merge import spread
from dcpbench.reports.slo import LOAD, SCOPE
from dcpbench.show.numbers import percent
from dcpbench.show.text import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.records.record import Interval
    from dcpbench.reports.frames import Frames

BASELINE_OF = [*LOAD, *(a.name for a in point_axes(COMPUTES, but=Role.EXCHANGE) if a.name not in ("model", "dcp"))]
"""What a DCP point and its dcp=1 baseline have in common; LOAD has the model."""
SHOWN = [
    *SCOPE,
    "workload",
    "same_load",
    "load",
    "load_arrival",
    "arrival",
    "rest",
    "input_typical",
    "context",
    "concurrency",
    "label",
    "layout",
    "variant",
    *DEGREES,
]
"""Columns that a finding takes over from its point."""


class Findings:
    """What is found in the points of a report: each table is made once, however many of its parts show it."""

    def __init__(self, frames: Frames) -> None:
        self._frames = frames

    @cached_property
    def points(self) -> pd.DataFrame:
        """See rivals."""
        return rivals(self._frames)

    @cached_property
    def best(self) -> pd.DataFrame:
        """See best_per_load."""
        return best_per_load(self.points)

    @cached_property
    def most(self) -> pd.DataFrame:
        """See most_per_shape."""
        return most_per_shape(self.points)

    @cached_property
    def ratios(self) -> pd.DataFrame:
        """See dcp_against_baseline."""
        return dcp_against_baseline(self.points)

    @cached_property
    def break_even(self) -> pd.DataFrame:
        """See break_even."""
        return break_even(self.ratios)

    @cached_property
    def against_best(self) -> pd.DataFrame:
        """See dcp_against_best."""
        return dcp_against_best(self.points)

    @cached_property
    def repeats(self) -> pd.DataFrame:
        """See repeats."""
        return repeats(self._frames)


def timed(points: pd.DataFrame) -> pd.DataFrame:
    """Points whose speed may be spoken about: measured or replayed, and not on a CPU."""
    return points if points.empty else points[points["output_tok_s"].notna() & ~points["cpu"].astype(bool)]


def rivals(frames: Frames) -> pd.DataFrame:
    """Such points of both workloads, in the columns that they share."""
    tables = [table for table in (timed(frames.points), timed(frames.served)) if len(table)]
    if len(tables) < 2:  # noqa: PLR2004 - there are two workloads
        return tables[0] if tables else pd.DataFrame()
    return pd.DataFrame([row for table in tables for row in table.to_dict("records")])


def best_per_load(points: pd.DataFrame) -> pd.DataFrame:
    """The layout with the highest throughput of each load that at least two layouts ran, of those that meet its SLO.

    `clear` is False where its interval overlaps the next one's or it leads by no more than repeats may differ; `level`
    lists it and all that it does not clearly lead. `next` is missing where no other meets the SLO. Where none does,
    `meets` is False, and `label` is the one that comes nearest to it.
    """
    if points.empty:
        return pd.DataFrame()
    points = points[points.groupby(LOAD)["label"].transform("size") > 1]
    if points.empty:
        return pd.DataFrame()
    order = {load: i for i, load in enumerate(dict.fromkeys(zip(*(points[name] for name in LOAD), strict=True)))}
    fits = points[~(points["slo_excess"] > 1)]
    fits = fits.sort_values("output_tok_s", ascending=False, kind="stable")
    rank = fits.groupby(LOAD).cumcount()
    first = fits[rank == 0].set_index(LOAD, drop=False)
    second = fits[rank == 1].set_index(LOAD)[["label", "output_tok_s"]].set_axis(["next", "next_tok_s"], axis=1)
    found = first.join(second)
    found["lead"] = found["output_tok_s"] / found["next_tok_s"]
    top = found[["output_tok_s", "output_tok_s_low"]].set_axis(["top", "top_low"], axis=1)
    behind = fits.join(top, on=LOAD)
    clearly = (behind["top_low"] > behind["output_tok_s_high"]) & (
        behind["top"] > behind["output_tok_s"] * (1 + REPEATS_AGREE_WITHIN)
    )
    level: dict[Any, list[str]] = behind[~clearly].groupby(LOAD)["label"].agg(list).to_dict()
    found["level"] = pd.Series(
        [list(dict.fromkeys([row.label, *level.get(row.Index, [])])) for row in found[["label"]].itertuples()],
        found.index,
        dtype=object,
    )
    found["clear"] = found["level"].map(len) == 1
    found["meets"] = True
    missed = points[~_loads(points).isin(set(found.index))]
    nearest = missed.sort_values("slo_excess", kind="stable").drop_duplicates(LOAD).set_index(LOAD, drop=False)
    tables = [table for table in (found, nearest.assign(meets=False, clear=False)) if len(table)]
    found = pd.concat(tables).reindex(columns=found.columns)
    found["best"] = found["label"]
    places = [order[load] for load in found.index.to_list()]
    return found.iloc[sorted(range(len(found)), key=places.__getitem__)].reset_index(drop=True)


def _loads(points: pd.DataFrame) -> pd.Series[Any]:
    return pd.Series(list(zip(*(points[name] for name in LOAD), strict=True)), points.index)


def most_per_shape(points: pd.DataFrame) -> pd.DataFrame:
    """Over all loads with one length of requests: the highest throughput that meets the SLO, with DCP and without.

    A row per run, model, mode and `rest`: the best point, `other` and `other_tok_s`, `other_load`: the best of the
    other kind (without DCP if the best has it), missing where none meets the SLO.
    """
    if points.empty:
        return pd.DataFrame()
    fits = points[points["slo_excess"] <= 1].sort_values("output_tok_s", ascending=False, kind="stable")
    if fits.empty:
        return pd.DataFrame()
    keys = [*SCOPE, "rest"]
    best = fits.drop_duplicates(keys).set_index(keys, drop=False)
    split = fits.assign(with_dcp=fits["dcp"] > 1).drop_duplicates([*keys, "with_dcp"])
    other = split.set_index(keys)
    other = other[other["with_dcp"] != best["dcp"].reindex(other.index).gt(1)]
    names = {
        "label": "other",
        "output_tok_s": "other_tok_s",
        "output_tok_s_high": "other_high",
        "arrival": "other_load",
    }
    found = best.join(other[list(names)].rename(columns=names))
    found = found.reset_index(drop=True)
    return found.sort_values(["run", "model", "mode", "input_typical", "rest"], kind="stable", ignore_index=True)


def dcp_against_baseline(points: pd.DataFrame) -> pd.DataFrame:
    """Throughput of every DCP point over that of the same layout without DCP under the same load.

    `low` and `high` are the widest that the ratio may be. `verdict` is `higher` or `lower` only if the intervals lie
    apart and the ratio differs from 1 by more than repeats may; `no baseline` where that did not run, and there the
    ratios are missing. `ttft_ratio` and `itl_ratio` compare the medians.
    """
    if points.empty:
        return pd.DataFrame()
    split = points[points["dcp"] > 1]
    if split.empty:
        return pd.DataFrame()
    base = points[points["dcp"] == 1].drop_duplicates(BASELINE_OF).set_index(BASELINE_OF)
    names = {name: f"over_{name}" for name in ("label", "slo_said", *RATES, "ttft_p50_ms", "itl_p50_ms")}
    found = split.join(base[list(names)].rename(columns=names), on=BASELINE_OF)
    row = pd.DataFrame({name: found[name] for name in [*SHOWN, "slo_said"]})
    row["baseline"], row["baseline_slo"] = found["over_label"], found["over_slo_said"]
    row["ratio"] = found["output_tok_s"] / found["over_output_tok_s"]
    row["low"] = found["output_tok_s_low"] / found["over_output_tok_s_high"]
    row["high"] = found["output_tok_s_high"] / found["over_output_tok_s_low"]
    for name in ("ttft", "itl"):
        row[f"{name}_ratio"] = found[f"{name}_p50_ms"].astype(float) / found[f"over_{name}_p50_ms"].astype(float)
    row["verdict"] = [
        "no baseline"
        if pd.isna(ratio)
        else verdict({"ratio": ratio, "low": low, "high": high}, above="higher", below="lower")
        for ratio, low, high in zip(row["ratio"], row["low"], row["high"], strict=True)
    ]
    return row.reset_index(drop=True)


RIVAL_OF = [*LOAD, "tp", "dtype", "weights"]
"""What layouts have in common of which one is to be chosen: the load, the GPUs, and what is computed."""
PAYS = ("higher", "alone")
"""Verdicts of dcp_against_best with which DCP pays."""


def dcp_against_best(points: pd.DataFrame) -> pd.DataFrame:
    """Throughput of every DCP point over that of the best layout without DCP under the same load, within the SLO.

    `rival` is the fastest of those that meet the SLO, whatever else differs but GPUs, dtype and weights; `low` and
    `high` are the widest that the ratio may be. `verdict` is `higher` or `lower` as of dcp_against_baseline, `alone`
    where the point meets the SLO and no rival does, `misses` where the point does not, and `no rival` where none ran.
    Rows are in the order of dcp_against_baseline.
    """
    split = points[points["dcp"] > 1] if len(points) else points
    if split.empty:
        return pd.DataFrame()
    others = points[points["dcp"] == 1]
    ran = set(zip(*(others[name] for name in RIVAL_OF), strict=True))
    fits = others[~(others["slo_excess"] > 1)].sort_values("output_tok_s", ascending=False, kind="stable")
    names = {name: f"over_{name}" for name in ("label", *RATES)}
    best = fits.drop_duplicates(RIVAL_OF).set_index(RIVAL_OF)[list(names)].rename(columns=names)
    found = split.join(best, on=RIVAL_OF)
    row = pd.DataFrame({name: found[name] for name in [*SHOWN, "slo_excess", "output_tok_s"]})
    row["rival"] = found["over_label"]
    row["ratio"] = found["output_tok_s"] / found["over_output_tok_s"]
    row["low"] = found["output_tok_s_low"] / found["over_output_tok_s_high"]
    row["high"] = found["output_tok_s_high"] / found["over_output_tok_s_low"]
    keys = zip(*(found[name] for name in RIVAL_OF), strict=True)
    row["verdict"] = [
        _against_best(given, ran=key in ran) for given, key in zip(row.to_dict("records"), keys, strict=True)
    ]
    return row.reset_index(drop=True)


def _against_best(row: dict[Any, Any], *, ran: bool) -> str:
    if not ran:
        return "no rival"
    if row["slo_excess"] > 1:
        return "misses"
    return "alone" if pd.isna(row["ratio"]) else verdict(row, above="higher", below="lower")


MOST_CURVES = 2_000
"""Layouts × lengths of requests whose break-even is looked for; those in the tables above all others."""
RATES = ("output_tok_s", "output_tok_s_low", "output_tok_s_high")


def slo_aside(ratios: pd.DataFrame) -> str:
    """What is said of ratios to the same layout without DCP where an SLO is in force, which they do not look at."""
    return ", whether or not the SLO is met" if (ratios["slo_said"] != "").any() else ""


def verdict(row: dict[str, Any], *, above: str, below: str) -> str:
    """Whether a ratio is `above` or `below` 1: only where all of its reach is, and by more than repeats may differ."""
    if row["low"] > 1 and row["ratio"] > 1 + REPEATS_AGREE_WITHIN:
        return above
    if row["high"] < 1 and row["ratio"] < 1 - REPEATS_AGREE_WITHIN:
        return below
    return "no clear difference"


def break_even(ratios: pd.DataFrame) -> pd.DataFrame:
    """Per layout with its exchange and length of requests: the least concurrency from which on DCP is ahead.

    It is where the verdict of dcp_against_baseline is `higher`. `from` is missing where it is not at the highest
    concurrency tried; `least` says whether it is the lowest one tried, so that the true one may be lower. `best` is the
    highest ratio, at `best_at`, and `lower` whether DCP is clearly lower wherever it was compared. Open loops, whose
    throughput is their rate until they cannot keep up, have no break-even.
    """
    known = ratios[ratios["ratio"].notna() & (ratios["load_arrival"] == CLOSED)] if len(ratios) else ratios
    if len(known):
        kept = [*SCOPE, "label", "rest"]
        known = known[known.groupby(kept, sort=False).ngroup() < MOST_CURVES]
    rows: list[dict[str, Any]] = []
    keys = [*SCOPE, "label", "rest"]
    for key, group in known.groupby(keys, sort=False) if len(known) else ():
        ordered = group.sort_values("concurrency", kind="stable")
        ahead = ordered["verdict"].eq("higher").tolist()
        first = next((i for i in range(len(ahead)) if all(ahead[i:])), None)
        top = ordered.sort_values("ratio", kind="stable").iloc[-1]
        at = None if first is None else ordered.iloc[first]
        rows.append(
            dict(zip(keys, key, strict=True))
            | {
                "input_typical": ordered["input_typical"].iloc[0],
                "baseline": ordered["baseline"].iloc[0],
                "layout": ordered["layout"].iloc[0],
                "variant": ordered["variant"].iloc[0],
                "from": None if at is None else int(at["concurrency"]),
                "ratio": None if at is None else float(at["ratio"]),
                "low": None if at is None else float(at["low"]),
                "high": None if at is None else float(at["high"]),
                "least": first == 0,
                "measured": ordered["concurrency"].tolist(),
                "best": float(top["ratio"]),
                "best_at": int(top["concurrency"]),
                "lower": bool(ordered["verdict"].eq("lower").all()),
            }
        )
    return pd.DataFrame(rows)


def kv_by_layout(points: pd.DataFrame) -> pd.DataFrame:
    """KV cache of each layout: the pool, what it holds, and how much more than its first layout without DCP or DP."""
    if points.empty or points["kv_tokens_per_gib"].isna().all():
        return pd.DataFrame()
    known = points.dropna(subset=["kv_tokens_per_gib"]).sort_values("kv_capacity_tokens", ascending=False)
    best = known.drop_duplicates(["run", "model", "layout"])
    best = best.sort_values(["run", "model", *DEGREES], kind="stable").copy()
    plain = best[(best["dp"] == 1) & (best["dcp"] == 1)].set_index(["run", "model", "tp"])["kv_tokens_per_gib"]
    keys = zip(best["run"], best["model"], best["tp"], strict=True)
    best["kv_ratio"] = [
        per_gib / plain[key] if key in plain.index and plain[key] > 0 else None
        for key, per_gib in zip(keys, best["kv_tokens_per_gib"], strict=True)
    ]
    return best


def repeats(frames: Frames) -> pd.DataFrame:
    """How far repeated measurements of one point lie apart, over repeats and over runs on the same hardware.

    A copy of a record, as in a copied run, is no repeat: it agrees by being the same.
    """
    found: dict[tuple[str, str], list[tuple[str, Any, Interval]]] = {}
    seen: set[tuple[str, bytes]] = set()
    for run in frames.runs:
        for record in run.records:
            if record.outcome == "ok" and record.metrics and record.environment:
                device = record.environment.device
                one = (device, measurement(record))
                if one in seen:
                    continue
                seen.add(one)
                key = (record.point.same_but_repeat(), device)
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


def repeats_sentence(apart: Sequence[float]) -> str:
    """Whether repeats agree; `apart` says of each point measured more than once by how much they differ."""
    if not len(apart):
        return "Every point was measured once, so how well repeats agree is not known."
    wide = sum(a > REPEATS_AGREE_WITHIN for a in apart)
    within = f"{REPEATS_AGREE_WITHIN:.0%}".replace("%", " %")
    points = counted(len(apart), "point")
    if wide:
        verb = "disagrees" if wide == 1 else "disagree"
        return f"Repeats: {wide} of {points} measured more than once {verb} by more than {within}."
    if len(apart) == 1:
        return f"Repeats: the one point measured more than once agrees within {percent(max(apart))}."
    return f"Repeats: all {points} measured more than once agree within {percent(max(apart))}."
