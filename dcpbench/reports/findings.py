"""Compute the findings of the records: best layout per load, DCP against its baseline, break-even, KV capacity, repeats.

Points of `decode` and of `serve` are treated the same way. Live runs and replays are kept apart; only
`compare_replay_with_live` compares them. CPU runs have no findings about speed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.points.axes import COMPUTES, Role
from dcpbench.points.batches import compute_batch_rows
from dcpbench.points.instances import parse_instances
from dcpbench.points.layout import DEGREES, Layout, find_ep_degree, format_layout_name
from dcpbench.points.names import CLOSED, LIVE, REPLAY
from dcpbench.points.point import select_point_axes
from dcpbench.records.launches import is_clearly_ahead
from dcpbench.records.metrics import KV_TABLE, REPLAYED
from dcpbench.records.record import SERVER_FLAG
from dcpbench.records.runs import compute_measurement_digest
from dcpbench.records.stats import REPEATS_AGREE_WITHIN, compute_median_distance, find_lasting_start
from dcpbench.reports import launch_bands, point_warnings
from dcpbench.show.numbers import format_percent, is_missing
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.records.record import Interval, Record
    from dcpbench.reports.dataframes import Frames


NO_MATCH = -1  # row index that stands for no match
SCOPE = ["run", "model", "mode"]  # columns that define the scope of a sentence of the answer
LOAD = [*SCOPE, "same_load"]  # columns that compared points share; such points differ in their `label`
BASELINE_OF = [  # columns that a DCP point and its dcp=1 baseline share, in addition to LOAD
    *LOAD,
    *(a.name for a in select_point_axes(COMPUTES, but=Role.EXCHANGE) if a.name not in ("model", "dcp")),
]
BEST_OF = ["gpus", "mtp", "acceptance", "emulate"]  # columns that the best layout of a load shares with others
RIVAL_OF = [*LOAD, *BEST_OF, "dtype", "weights_dtype", "kv_dtype", "weights"]
"""Columns that layouts share of which one is to be chosen: the load, the GPUs, and what is computed."""
SAME_BUT_EXCHANGE = ["run", *(axis.name for axis in select_point_axes(COMPUTES | Role.LOAD, but=Role.EXCHANGE))]
"""Columns that points of `decode` share if they differ only in their exchange."""
SAME_BUT_MODE = ["device", "same_load", *(axis.name for axis in select_point_axes(COMPUTES))]  # replay and its live run
KV_COLUMNS = (  # columns of compute_kv_by_layout, in addition to the metrics of its table
    "run",
    "run_label",
    "model",
    "origin",
    "instance",
    *DEGREES,
    "kv_bounded_by",
    "kv_tokens_per_gib",
    "kv_capacity_tokens",
)
NO_CAPACITY = ("sweep", SERVER_FLAG)  # limits with which the size of a KV cache says nothing about a layout's capacity
PAYS = ("higher", "alone")  # verdicts of compare_dcp_with_best with which DCP pays
MIN_IN_FLIGHT_SHARE = 0.9  # mean share of clients in flight below which the last requests are reported
MAX_CURVES = 2_000  # pairs of layout and request length at most for which break-even is computed


@dataclasses.dataclass(frozen=True, eq=False)
class Findings:
    """Hold the findings about the points of a report; each table is computed once and shared by all sections."""

    points: pd.DataFrame
    best: pd.DataFrame
    best_within_slo: pd.DataFrame
    ratios: pd.DataFrame
    break_even: pd.DataFrame
    against_best: pd.DataFrame
    repeats: pd.DataFrame

    @functools.cached_property
    def against_others(self) -> pd.DataFrame:
        """Return each layout's best point of a load against the best other layout; see `_compare_with_others`."""
        return _compare_with_others(self.points, self.against_best)


def compute_findings(frames: Frames) -> Findings:
    """Compute all findings; each function below documents its table."""
    points = select_timed(frames.everything)
    ratios = compare_dcp_with_baseline(points)
    return Findings(
        points=points,
        best=find_best_per_load(points),
        best_within_slo=find_best_per_request_length(points),
        ratios=ratios,
        break_even=find_break_even(ratios),
        against_best=compare_dcp_with_best(points),
        repeats=compare_repeats(frames),
    )


def select_timed(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points for which speed may be reported: measured or replayed, not on a CPU, and without wrong results."""
    if points.empty:
        return points
    kept = points["output_tok_s"].notna() & ~points["cpu"].astype(bool) & ~point_warnings.find_wrong(points)
    return points if kept.all() else points[kept]


def find_best_per_load(points: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest layout within the SLO of each load that several layouts ran on equal GPUs with equal drafts.

    `clear` is False if its interval overlaps the next one's or it leads by no more than launches may differ; `level`
    lists it and all layouts that it does not clearly lead, and `how` is the text for them (launch_bands.format_level).
    `next` is missing if no other meets the SLO. If none does,
    `meets` is False, and `label` is the one that comes nearest to it.
    """
    same = [*LOAD, *BEST_OF]
    if len(points):
        points = points[points.groupby(same)["label"].transform("size") > 1]
    if points.empty:
        return pd.DataFrame()
    points = points.assign(place=points.groupby(same, sort=False).ngroup())
    fits = points[~(points["slo_excess"] > 1)].sort_values("output_tok_s", ascending=False, kind="stable")
    rank = fits.groupby("place").cumcount()
    found = fits[rank == 0].set_index("place")
    found[["next", "next_tok_s"]] = fits[rank == 1].set_index("place")[["label", "output_tok_s"]]
    found["lead"] = found["output_tok_s"] / found["next_tok_s"]
    tops = ["output_tok_s", "output_tok_s_low", launch_bands.COLUMN]
    top = found[tops].set_axis(["top", "top_low", "top_band"], axis=1)
    behind = fits.join(top, on="place")
    band = launch_bands.find_band(behind["top_band"], behind[launch_bands.COLUMN])
    ratio, low = behind["top"] / behind["output_tok_s"], behind["top_low"] / behind["output_tok_s_high"]
    clearly = is_clearly_ahead(ratio, low, band)
    level = behind[~clearly].groupby("place")["label"].agg(list).to_dict()
    together = {place: [*dict.fromkeys([label, *level.get(place, [])])] for place, label in found["label"].items()}
    found["level"] = pd.Series(together, dtype=object)
    found["how"] = pd.Series(
        {place: launch_bands.format_level(own, own["place"]) for place, own in behind[~clearly].groupby("place")}
    )
    found["clear"] = found["level"].map(len) == 1
    found["meets"] = True
    missed = points[~points["place"].isin(found.index)].sort_values("slo_excess", kind="stable")
    nearest = missed.drop_duplicates("place").set_index("place").assign(meets=False, clear=False)
    tables = [table for table in (found, nearest) if len(table)]
    return pd.concat(tables).reindex(columns=found.columns).sort_index().reset_index(drop=True)


def find_best_per_request_length(points: pd.DataFrame) -> pd.DataFrame:
    """Return the highest throughput that meets the SLO, with DCP and without, over all loads with one request length.

    The table has a row per run, model, mode, `rest` and BEST_OF: the best point, and `other`, `other_tok_s` and `other_load` for
    the best of the other kind (without DCP if the best has it), missing if none meets the SLO.
    """
    if points.empty:
        return pd.DataFrame()
    fits = points[points["slo_excess"] <= 1].sort_values("output_tok_s", ascending=False, kind="stable")
    if fits.empty:
        return pd.DataFrame()
    keys = [*SCOPE, "rest", *BEST_OF]
    best = fits.drop_duplicates(keys)
    split = fits.assign(with_dcp=fits["dcp"] > 1).drop_duplicates([*keys, "with_dcp"])
    other = match_rows(best, split[split["with_dcp"] != (match_rows(split, best, keys)["dcp"] > 1)], keys)
    found = best.assign(
        other=other["label"],
        other_tok_s=other["output_tok_s"],
        other_high=other["output_tok_s_high"],
        other_band=other[launch_bands.COLUMN],
        other_load=other["arrival"],
    )
    return found.sort_values(
        ["run", "model", "mode", "input_typical", "rest", *BEST_OF], kind="stable", ignore_index=True
    )


def find_best_per_layout(points: pd.DataFrame) -> pd.DataFrame:
    """Return the point with the highest throughput of those that meet the SLO, for each layout and request length."""
    fits = points[points["slo_excess"] <= 1].sort_values("output_tok_s", ascending=False, kind="stable")
    return fits.drop_duplicates([*SCOPE, "rest", "label"])


def compare_dcp_with_baseline(points: pd.DataFrame) -> pd.DataFrame:
    """Return the throughput of every DCP point over that of the same layout without DCP under the same load.

    `low` and `high` bound the ratio. `verdict` is `higher` or `lower` only if the intervals do not overlap and the
    ratio differs from 1 by more than repeats may; it is `no baseline` if the baseline did not run, and the ratios are
    then missing. `ttft_ratio` and `itl_ratio` compare the medians.
    """
    split = points[points["dcp"] > 1] if len(points) else points
    if split.empty:
        return pd.DataFrame()
    taken = ("label", "slo_result", "ttft_p50_ms", "itl_p50_ms")
    found = add_ratios(split, points[points["dcp"] == 1], BASELINE_OF, "output_tok_s", *taken)
    found = found.rename(columns={"over_label": "baseline", "over_slo_result": "baseline_slo"})
    for name in ("ttft", "itl"):
        found[f"{name}_ratio"] = found[f"{name}_p50_ms"].astype(float) / found[f"over_{name}_p50_ms"].astype(float)
    return found.assign(verdict=compute_verdicts(found, without="no baseline")).reset_index(drop=True)


def compare_dcp_with_best(points: pd.DataFrame) -> pd.DataFrame:
    """Return the throughput of every DCP point over that of the best layout without DCP under the same load, within the SLO.

    `rival` is the fastest layout that meets the SLO; it may differ in everything except GPUs, drafts, dtype and
    weights. `low`
    and `high` bound the ratio. `verdict` is `higher` or `lower` as in compare_dcp_with_baseline, `alone` if the point meets
    the SLO and no rival does, `misses` if the point does not, and `no rival` if none ran. Rows are in the order of
    compare_dcp_with_baseline.
    """
    split = points[points["dcp"] > 1] if len(points) else points
    if split.empty:
        return pd.DataFrame()
    others = points[points["dcp"] == 1]
    ran = set(list_keys(others, RIVAL_OF))
    fits = others[~(others["slo_excess"] > 1)].sort_values("output_tok_s", ascending=False, kind="stable")
    found = add_ratios(split, fits, RIVAL_OF, "output_tok_s", "label").rename(columns={"over_label": "rival"})
    found["verdict"] = compute_verdicts(found, without="alone")
    found.loc[found["slo_excess"] > 1, "verdict"] = "misses"
    found.loc[[key not in ran for key in list_keys(found, RIVAL_OF)], "verdict"] = "no rival"
    return found.reset_index(drop=True)


def list_without_dcp(points: pd.DataFrame) -> list[str]:
    """Return the names of the same layouts without DCP, each once: `tp4`, whether or not it ran."""
    return list(dict.fromkeys(format_plain_layout(*of) for of in list_keys(points, ["tp", "dp", "ep", "disaggregate"])))


def format_plain_layout(tp: int, dp: int, ep: str, disaggregate: str) -> str:
    """Return the name of a layout without DCP, with its instances: `tp4`, `tp4·dp2·ep1`, `tp4 1P2D`."""
    name = format_layout_name(Layout(tp, dp=dp), dp, find_ep_degree(ep, tp))
    return f"{name} {parse_instances(disaggregate).label}".rstrip()


def add_ratios(points: pd.DataFrame, others: pd.DataFrame, same: list[str], value: str, *more: str) -> pd.DataFrame:
    """Return the points with columns `over_…`: `value` and `more` of the first row of `others` with the same values in `same`.

    `ratio` is the ratio of the two values, missing without a match; `low` and `high` bound it.
    """
    names = (value, f"{value}_low", f"{value}_high", launch_bands.COLUMN, *more)
    first = match_rows(points, others[[*same, *names]], same)
    found = points.assign(**{f"over_{name}": first[name] for name in names})
    return found.assign(
        ratio=found[value] / found[f"over_{value}"],
        low=found[f"{value}_low"] / found[f"over_{value}_high"],
        high=found[f"{value}_high"] / found[f"over_{value}_low"],
    )


def match_rows(points: pd.DataFrame, others: pd.DataFrame, same: Sequence[str]) -> pd.DataFrame:
    """Return for each of `points` the first row of `others` that has the same values in the columns `same`.

    The result has the index of `points`; a row without a match has no values. An absent value equals another absent one. A join
    of pandas on several columns is no substitute: up to pandas 3.0 it takes an absent value for another value of its column, and
    fails where all values of a column are absent.
    """
    places: dict[tuple[Any, ...], int] = {}
    for place, key in enumerate(_list_comparable_keys(others, same)):
        places.setdefault(key, place)
    found = [places.get(key, NO_MATCH) for key in _list_comparable_keys(points, same)]
    return others.reset_index(drop=True).reindex(found).set_axis(points.index)


def _list_comparable_keys(table: pd.DataFrame, names: Sequence[str]) -> list[tuple[Any, ...]]:
    return [tuple(None if is_missing(value) else value for value in key) for key in list_keys(table, names)]


def compute_verdicts(
    found: pd.DataFrame, *, above: str = "higher", below: str = "lower", without: str = ""
) -> pd.Series[Any]:
    """Return whether ratios are clearly `above` or `below` 1 (is_clearly_ahead), else `without`."""
    found_verdicts = pd.Series("no clear difference", found.index, dtype=object)
    band = launch_bands.find_band(found[launch_bands.COLUMN], found[f"over_{launch_bands.COLUMN}"])
    found_verdicts[is_clearly_ahead(found["ratio"], found["low"], band)] = above
    found_verdicts[is_clearly_ahead(1 / found["ratio"], 1 / found["high"], band)] = below
    found_verdicts[found["ratio"].isna()] = without
    return found_verdicts


def list_keys(table: pd.DataFrame, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the values of these columns row by row; an empty list for an empty table."""
    return list(zip(*(table[name] for name in names), strict=True)) if len(table) else []


def format_slo_aside(ratios: pd.DataFrame) -> str:
    """Return the remark on ratios to the same layout without DCP if an SLO is in force, because such ratios ignore the SLO."""
    return ", whether or not the SLO is met" if (ratios["slo_result"] != "").any() else ""


def find_break_even(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return, per layout with its exchange and request length, the lowest concurrency from which DCP is ahead.

    `from` is the lowest concurrency from which on every verdict of compare_dcp_with_baseline is `higher`; it is missing if
    DCP is not ahead at the highest concurrency tried. `least` is True if `from` is the lowest one tried, so that the
    true one may be lower. `best` is the highest ratio, at `best_at`; `last` is the ratio at the highest concurrency,
    and `ever` is True if DCP is clearly ahead at any. Open loops, for which throughput equals the request rate until
    they cannot keep up, have no break-even.
    """
    known = ratios[ratios["ratio"].notna() & (ratios["load_arrival"] == CLOSED)] if len(ratios) else ratios
    kept = [*SCOPE, "label", "rest"]
    if len(known):
        known = known[known.groupby(kept, sort=False).ngroup() < MAX_CURVES]
    rows: list[dict[str, Any]] = []
    for key, group in known.groupby(kept, sort=False) if len(known) else ():
        ordered = group.sort_values("concurrency", kind="stable")
        ahead = ordered["verdict"].eq("higher").tolist()
        first = find_lasting_start(ahead)
        top = ordered.sort_values("ratio", kind="stable").iloc[-1]
        at = {} if first is None else ordered.iloc[first].to_dict()
        rows.append(
            dict(zip(kept, key, strict=True))
            | {name: ordered[name].iloc[0] for name in ("input_typical", "rest_parts", "baseline", "layout", "variant")}
            | {name: at.get(name) for name in ("ratio", "low", "high")}
            | {
                "from": at.get("concurrency"),
                "least": first == 0,
                "measured": ordered["concurrency"].tolist(),
                "best": top["ratio"],
                "best_at": top["concurrency"],
                "last": ordered["ratio"].iloc[-1],
                "ever": any(ahead),
                "single": launch_bands.has_single_launches(ordered),
            }
        )
    return pd.DataFrame(rows)


def compute_kv_by_layout(points: pd.DataFrame) -> pd.DataFrame:
    """Return the KV cache of an instance of each layout, and its gain over the first layout without DCP or DP.

    `kv_ratio` is the gain in tokens per GiB, or in tokens for a server, which does not report the memory of its pool.
    `capacity_ratio` is the gain in tokens; it is missing if a pool was sized for the largest point of a sweep, or if
    a flag of the server limits it.
    """
    if points.empty or points["kv_capacity_tokens"].isna().all():
        return pd.DataFrame()
    narrow = [*KV_COLUMNS, *(metric.name for metric in KV_TABLE)]
    known = points.loc[points["kv_capacity_tokens"].notna(), list(dict.fromkeys(narrow))]
    known = known.sort_values("kv_capacity_tokens", ascending=False).rename(columns={"instance": "layout"})
    best = known.drop_duplicates(["run", "model", "layout"])
    best = best.sort_values(["run", "model", *DEGREES], kind="stable")
    plain = best[(best["dp"] == 1) & (best["dcp"] == 1) & (best["kv_capacity_tokens"] > 0)]
    first = match_rows(best, plain, ["run", "model", "tp"])
    real = ~best["kv_bounded_by"].isin(NO_CAPACITY) & ~first["kv_bounded_by"].isin(NO_CAPACITY)
    capacity = (best["kv_capacity_tokens"].astype(float) / first["kv_capacity_tokens"].astype(float)).where(real)
    per_gib = best["kv_tokens_per_gib"].astype(float) / first["kv_tokens_per_gib"].astype(float)
    return best.assign(kv_ratio=per_gib.fillna(capacity), capacity_ratio=capacity)


def find_padded(points: pd.DataFrame) -> pd.DataFrame:
    """Return the closed loops in which steps run more rows than requests, because CUDA graphs have fixed sizes.

    `rows` is the number of rows of a step over all replicas.
    """
    alone = points[points["instances"].isna()] if len(points) else points
    known = alone[(alone["load_arrival"] == CLOSED) & alone["cuda_graph"].eq(True)]  # noqa: FBT003 - may be None
    recorded = known["graph_batch"].tolist() if len(known) else []
    rows = [
        dp * int(compute_batch_rows(-(-n // dp)) if is_missing(batch) else batch)
        for n, dp, batch in zip(known["concurrency"], known["dp"], recorded, strict=True)
    ]
    known = known.assign(rows=rows)
    return known[known["rows"] > known["concurrency"]]


def find_last_waves(points: pd.DataFrame) -> pd.DataFrame:
    """Return the closed loops that end with fewer requests than clients, so that much less was in flight on average.

    Loops short of KV capacity and loops with preemptions are excluded, because those explain the lower number.
    """
    if "decode_batch" not in points or "load_requests" not in points:
        return points.iloc[:0]
    points = points[points["instances"].isna()]
    left = points["load_requests"] % points["concurrency"]
    admitted = (points["room_for"] >= points["concurrency"]) & ~(points["preemptions"] > 0)
    few = points["decode_batch"] < MIN_IN_FLIGHT_SHARE * points["concurrency"]
    return points.assign(left=left)[(points["load_arrival"] == CLOSED) & (left > 0) & admitted & few]


def find_kv_pressure(points: pd.DataFrame) -> pd.DataFrame:
    """Return the served points that were short of KV cache: requests were preempted, or fewer fit than were in flight."""
    if points.empty:
        return points
    short = (points["load_arrival"] == CLOSED) & (points["room_for"] < points["concurrency"])
    return points[(points["preemptions"] > 0) | short]


def compare_replay_with_live(served: pd.DataFrame) -> pd.DataFrame:
    """Return each replay with the errors against the live run of the same point and load: `…_error` = replay / live - 1."""
    if served.empty:
        return served
    names = [metric.name for metric in REPLAYED]
    if not {LIVE, REPLAY} <= set(served["mode"]):
        return served.iloc[:0]
    known = served[served["output_tok_s"].notna()]
    replayed = known[known["mode"] == REPLAY]
    live = match_rows(replayed, known[known["mode"] == LIVE].drop_duplicates(SAME_BUT_MODE, keep="last"), SAME_BUT_MODE)
    ran = live["output_tok_s"].notna()
    replayed, live = replayed[ran], live[ran]
    errors = {f"{n}_error": replayed[n] / live[n].where(live[n] != 0) - 1 for n in names}
    replays = {f"{n}_replay": replayed[n] for n in names}
    cpu = replayed["cpu"].astype(bool) | live["cpu"].astype(bool)
    return replayed.assign(**replays, **{n: live[n] for n in names}, cpu=cpu, **errors)


def compare_repeats(frames: Frames) -> pd.DataFrame:
    """Return how far repeated measurements of one point differ, over repeats and over runs on the same hardware.

    A copy of a record, as in a copied run, is not a repeat: it would agree by construction.
    """
    found: dict[tuple[str, str], list[Record]] = {}
    seen: set[tuple[str, bytes]] = set()
    for record in frames.records:
        if record.outcome == "ok" and record.metrics and record.environment:
            device = record.environment.device
            one = (device, compute_measurement_digest(record))
            if one not in seen:
                seen.add(one)
                found.setdefault((record.point.get_key_without_repeat(), device), []).append(record)
    rows: list[dict[str, Any]] = []
    for measured in found.values():
        steps = [record.metrics.step_ms for record in measured if record.metrics]
        if (apart := compute_spread(steps)) is not None:
            point = measured[0].point
            rows.append(
                {
                    "model": frames.format_model(point.model),
                    "layout": point.layout_name,
                    "context": point.context,
                    "concurrency": point.concurrency,
                    "routing": point.routing,
                    "medians_ms": [interval.median for interval in steps],
                    "apart": apart,
                }
            )
    return pd.DataFrame(rows)


def select_served_repeats(served: pd.DataFrame) -> pd.DataFrame:
    """Return the live points that were run more than once; replays are excluded because they repeat exactly."""
    if served.empty:
        return served
    again = served[served["spread"].notna() & (served["mode"] == LIVE)]
    return again.rename(columns={"spread": "apart"})


def compute_spread(intervals: list[Interval]) -> float | None:
    """Return the largest relative difference of any two repeats' medians (stats.compute_median_distance), or None."""
    ordered = sorted(intervals, key=lambda interval: interval.median)
    return compute_median_distance(ordered[0], ordered[-1]) if len(ordered) > 1 else None


def format_repeats_sentence(apart: Sequence[float]) -> str:
    """State how well repeats agree; `apart` holds the relative difference for each point measured more than once."""
    if not len(apart):
        return "Every point was measured once, so the difference between repeats is unknown."
    wide = sum(a > REPEATS_AGREE_WITHIN for a in apart)
    within = f"{REPEATS_AGREE_WITHIN:.0%}".replace("%", " %")
    points = format_count(len(apart), "point")
    if wide:
        return f"Repeats differ by more than {within} at {wide} of {points} measured more than once."
    where = {1: "the one point", 2: "both points"}.get(len(apart), f"all {points}")
    return f"Repeats agree within {format_percent(max(apart))} at {where} measured more than once."


def _compare_with_others(points: pd.DataFrame, against_best: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each load and layout that can be compared with another one, for closed loops not on a CPU.

    `who` is the layout, or the label if all points have one layout; `named` adds its variant if it ran in several.
    `ratio` is its output over that of the fastest other that meets the SLO, or of any other if none does. `meets` is
    True if it meets the SLO itself. `near` is True if it meets the SLO as well as any other and none is clearly ahead
    of it. `pays` is True if it has DCP that pays (compare_dcp_with_best).
    """
    if points.empty:
        return points
    split = points.index[points["dcp"] > 1]
    paying = set(split[against_best["verdict"].isin(PAYS)]) if len(split) else set()
    points = points.assign(pays=points.index.isin(paying))
    points = points[points["load_arrival"] == CLOSED]
    who = "layout" if len(set(points["layout"])) > 1 else "label"
    several = points.groupby("layout")["label"].transform("nunique") > 1
    named = points["label"].where(several, points["layout"])
    points = points.assign(who=points[who], named=named, meets=~(points["slo_excess"].astype(float) > 1))
    ordered = points.sort_values(["meets", "output_tok_s"], ascending=False, kind="stable")
    one = ordered.drop_duplicates([*RIVAL_OF, "who"])
    groups = one.groupby(RIVAL_OF, sort=False)
    one = one.assign(group=groups.ngroup(), place=groups.cumcount())
    # The fastest row of a load that meets the SLO comes first: it is the rival of all others, and the second is its
    # rival.
    rivals = one[one["place"] < 2].assign(place=lambda t: 1 - t["place"]).set_index(["group", "place"])  # noqa: PLR2004
    keys = pd.MultiIndex.from_arrays([one["group"], (one["place"] > 0).astype(int)])
    columns = ["who", "meets", "output_tok_s", "output_tok_s_low", launch_bands.COLUMN]
    other = rivals.reindex(keys)[columns].set_axis(one.index)
    found = one["group"].ge(0) & other["who"].notna()
    one, other = one[found], other[found]
    band = launch_bands.find_band(one[launch_bands.COLUMN], other[launch_bands.COLUMN])
    ratio, low = one["output_tok_s"] / other["output_tok_s"], other["output_tok_s_low"] / one["output_tok_s_high"]
    behind = other["meets"].astype(bool) & is_clearly_ahead(1 / ratio, low, band)
    table = one.assign(ratio=ratio, rival=other["who"], near=one["meets"] & ~behind)
    by = ["model", "mode", "input_typical", "rest", "concurrency", "tp", "dp", "dcp"]
    table = table.sort_values("group", kind="stable").sort_values(by, kind="stable", ignore_index=True)
    return table.drop(columns=["group", "place"])
