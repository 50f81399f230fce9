"""Compare engines at equal layout and load, and DCP with plain tensor parallelism inside each engine.

An engine is a run of Frames.engines. Points are equal if model, mode, hardware, layout and the requests that were sent
are equal; how an engine schedules these requests is its own. Precisions that are known must be equal, too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.models import get_title
from dcpbench.points.names import CLOSED, UNKNOWN
from dcpbench.points.point import LOAD_AXES
from dcpbench.records.metrics import DECODE, METRIC
from dcpbench.records.record import DUMMY_WEIGHTS, SERVER_FLAG
from dcpbench.reports import findings, launch_bands, load_labels, point_warnings, recommendation
from dcpbench.reports.tables import Column, Table, make_column, make_table, make_text_columns
from dcpbench.show.numbers import format_integer, format_ratio, format_value_range, is_missing
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from dcpbench.reports.dataframes import Frames

NOT_COMPARED = {DUMMY_WEIGHTS: "ran with its own dummy weights"}  # these say nothing about an engine's speed, and why
SCHEDULED = ("mode", "chunk", "policy", "prefix_cache", "prefill")  # fields of how a load is served
DEGREES = ("tp", "dp", "dcp", "pp", "pcp", "disaggregate")
SAME_LAYOUT_AND_LOAD = ["model", "mode", "device", "gpus", "emulate", *DEGREES, "sent"]  # columns of comparable points
SCOPE = ["model", "mode", "device", "gpus"]  # columns that points of one sentence share
LATENCIES = ("ttft_p50_ms", "itl_p50_ms")
MAX_SCOPES = 3  # maximum number of models and modes that have a sentence each
MAX_LAYOUTS = 4  # maximum number of layouts that a sentence names


@dataclasses.dataclass(frozen=True, eq=False)
class EngineComparison:
    """Hold the points that several engines ran, and the engines that were left out."""

    rows: pd.DataFrame
    """A row per engine and cell, which is a layout under a load: the engine's fastest variant. `ratio`, `ttft_ratio` and
    `itl_ratio` are over the fastest engine of the cell, `over_run`; `verdict` is `lower` if the engine is behind it by
    more than launches may differ."""
    left_out: dict[str, str]  # why points of an engine are not compared, by engine


def compare_engines(frames: Frames) -> EngineComparison:
    """Return the comparison of all engines of a report; without rows if no point was measured on two of them."""
    points = findings.select_timed(frames.everything)
    names = _list_names(frames)
    points = points[points["run"].isin(names)] if len(points) else points
    left_out: dict[str, str] = {}
    for warning, reason in NOT_COMPARED.items() if len(points) else ():
        marked = point_warnings.has_warning(points, warning)
        left_out |= dict.fromkeys(load_labels.list_unique(points["run"][marked]), reason)
        points = points[~marked]
    if points.empty:
        return EngineComparison(points, left_out)
    points = _split_by_precision(points.assign(sent=pd.Series(_list_sent_loads(points), points.index)))
    same = [*SAME_LAYOUT_AND_LOAD, "stored"]
    points = points.sort_values("output_tok_s", ascending=False, kind="stable").drop_duplicates([*same, "run"])
    shared = points.groupby(same, dropna=False)["run"].transform("size") > 1
    rows = points[shared]
    left_out |= _find_other_precisions(points, compared=set(rows["run"]))
    if rows.empty:
        return EngineComparison(rows, left_out)
    rows = rows.assign(cell=rows.groupby(same, sort=False, dropna=False).ngroup())
    found = findings.add_ratios(rows, rows.drop_duplicates("cell"), ["cell"], "output_tok_s", "run", *LATENCIES)
    for name in LATENCIES:
        own, over = (found[column].astype(float) for column in (name, f"over_{name}"))
        found[f"{name.partition('_')[0]}_ratio"] = own / over
    found = found.assign(verdict=findings.compute_verdicts(found), place=found["run"].map(names.index))
    by = ["model", "mode", "input_typical", "rest", "concurrency", "tp", "dp", "dcp", "place"]
    return EngineComparison(found.sort_values(by, kind="stable", ignore_index=True), left_out)


def _list_sent_loads(points: pd.DataFrame) -> list[tuple[Hashable, ...]]:
    """Return what was sent at each point: clients, requests, lengths, and the time after which the load ended."""
    columns = [f"load_{axis.name}" for axis in LOAD_AXES if axis.name not in SCHEDULED]
    columns = ["workload", "context", "concurrency", *columns, "load_limit_seconds"]
    present = [points[name] for name in columns if name in points]
    return [tuple(None if is_missing(v) else v for v in row) for row in zip(*present, strict=True)]


def _split_by_precision(points: pd.DataFrame) -> pd.DataFrame:
    """Return the points with `stored`, equal where the precisions of weights and KV cache may be compared.

    Where two known precisions differ under one load, points are compared only if theirs is known and equal.
    """
    weights, kv = (pd.Series([pair[i] for pair in points["precisions"]], points.index, dtype=object) for i in (0, 1))
    stored = pd.Series("", points.index, dtype=object)
    for values in (weights, kv):
        known = points.assign(known=values.where(values != UNKNOWN, None))
        differ = known.groupby(SAME_LAYOUT_AND_LOAD, dropna=False)["known"].transform("nunique") > 1
        own = values.where(values != UNKNOWN, "unknown of " + points["run"].astype(str))
        stored = stored.str.cat(own.where(differ, ""), sep=" ")
    return points.assign(stored=stored)


def _find_other_precisions(points: pd.DataFrame, *, compared: set[str]) -> dict[str, str]:
    """Return why engines are not compared that ran the same layouts and loads as others, with other precisions."""
    several = points.groupby(SAME_LAYOUT_AND_LOAD, dropna=False)["run"].transform("nunique") > 1
    apart = points[several & ~points["run"].isin(compared)].drop_duplicates("run")
    return {
        str(run): f"ran with weights in {weights} and a KV cache in {kv}, which another engine did not"
        for run, (weights, kv) in zip(apart["run"], apart["precisions"], strict=True)
    }


def format_answer(frames: Frames) -> str:
    """Return which engine is ahead at equal layout and load, and what DCP gains or costs inside each engine."""
    return " ".join(filter(None, (format_lead(frames), format_dcp_gains(frames))))


def format_dcp_gains(frames: Frames) -> str:
    """Return what DCP gains or costs inside each engine."""
    found = compare_engines(frames)
    scopes = found.rows.groupby(SCOPE, sort=False, dropna=False).ngroups if len(found.rows) else 0
    return " ".join(_describe_dcp(frames, same_conditions=scopes == 1))


def format_lead(frames: Frames) -> str:
    """Return which engine is ahead at equal layout and load."""
    found = compare_engines(frames)
    scopes = [own for _, own in found.rows.groupby(SCOPE, sort=False, dropna=False)] if len(found.rows) else []
    sentences = [f"{_name_scope(own, scopes)}{_describe_lead(own)}." for own in scopes[:MAX_SCOPES]]
    if not scopes:
        names = format_list(_list_names(frames))
        sentences = [
            f"No layout was measured under one load on two of {names}, so nothing here says which engine is ahead."
        ]
    if len(scopes) > MAX_SCOPES:
        sentences.append(f"The table below compares {format_count(len(scopes) - MAX_SCOPES, 'more combination')}.")
    sentences += [f"Not compared: {run}, as it {why}." for run, why in found.left_out.items()]
    return " ".join(sentences)


def _name_scope(rows: pd.DataFrame, scopes: list[pd.DataFrame]) -> str:
    """Return `DeepSeek-V3, replay: on 2 × H200, ` with the parts that differ between sentences."""
    parts = [
        get_title(str(rows[name].iloc[0]))
        for name in ("model", "mode")
        if len({own[name].iloc[0] for own in scopes}) > 1
    ]
    where = recommendation.format_conditions(rows)
    return f"{', '.join(parts)}: {where}" if parts else format_capitalized(where)


def _describe_lead(rows: pd.DataFrame) -> str:
    """Return which engine is ahead and by how much, with the conditions of the comparison."""
    cells = int(rows["cell"].nunique())
    behind = rows["verdict"].eq("lower") & rows["run"].ne(rows["over_run"])
    first = str(rows.drop_duplicates("cell")["over_run"].value_counts(sort=True).index[0])
    others = rows[rows["run"] != first]
    reference = rows[rows["run"] == first].set_index("cell")["output_tok_s"]
    points = "the one point compared" if cells == 1 else f"all {cells:,} points compared"
    everywhere = bool(rows["over_run"].eq(first).all() and behind[others.index].all())
    if everywhere:
        times = others.assign(times=others["cell"].map(reference) / others["output_tok_s"])
        text = f"{first} is ahead at equal layout and load, with {_format_times(times, cells, 'the output of')}, at {points}"
    else:
        known = others[others["cell"].isin(reference.index)]
        times = known.assign(times=known["output_tok_s"] / known["cell"].map(reference))
        text = (
            f"no engine is ahead at every equal layout and load: of {format_count(cells, 'point')}, {_count_leaders(rows)}; "
            f"output over that of {first}: {_format_times(times, cells)}"
        )
    return (
        f"{text} ({_format_cells(rows)}){findings.format_slo_aside(rows)}, {format_launches(rows)}{_format_power(rows)}"
    )


def _format_times(rows: pd.DataFrame, cells: int, of: str = "") -> str:
    """Return `1.19–1.41 times the output of vLLM 0.26.0 and 1.21–1.44 times that of SGLang 0.5.17`."""
    clauses = []
    for run, own in rows.groupby("run", sort=False):
        some = [] if len(own) == cells else [format_count(len(own), "point")]
        times = f"{format_value_range(own['times'], '{:.2f}')} times"
        if of:
            clauses.append(f"{times} {of} {run}" + "".join(f" ({text})" for text in some))
            of = "that of"
        else:
            clauses.append(f"{times} ({', '.join([str(run), *some])})")
    return format_list(clauses)


def _count_leaders(rows: pd.DataFrame) -> str:
    """Return at how many points each engine is ahead, and at how many none is."""
    ahead: dict[str, int] = {}
    for _, own in rows.groupby("cell", sort=False):
        level = own[(own["verdict"] != "lower") | (own["run"] == own["over_run"])]
        name = f"{level['run'].iloc[0]} is ahead" if len(level) == 1 else f"none is {launch_bands.BY_MORE}"
        ahead[name] = ahead.get(name, 0) + 1
    return format_list([f"{name} at {count:,}" for name, count in ahead.items()])


def _format_cells(rows: pd.DataFrame) -> str:
    """Return `tp2 and tp2·dcp2, 8–32 requests of 16,000 tokens`, or `…, decode steps of 8–32 requests of …`."""
    layouts = load_labels.list_unique(rows["layout"])
    named = format_list(layouts) if len(layouts) <= MAX_LAYOUTS else f"{len(layouts)} layouts"
    if (rows["load_arrival"] != CLOSED).any():
        return f"{named}, {format_count(rows['sent'].nunique(), 'load')}"
    steps = "decode steps of " if rows["mode"].eq(DECODE).all() else ""
    return f"{named}, {steps}{load_labels.format_clients(rows)}"


def format_launches(rows: pd.DataFrame) -> str:
    """Return in how many launches the points were measured: `in one launch each`, with the exceptions by engine."""
    least = int(rows["launches"].min())
    text = launch_bands.IN_ONE_LAUNCH if least <= 1 else f"in {least} launches each"
    more = rows[rows["launches"] > least]
    if len(more) == len(rows) or more.empty:
        return text
    clauses = []
    for (run, launches), own in more.groupby(["run", "launches"], sort=False):
        total = int((rows["run"] == run).sum())
        where = "" if len(own) == total else f" at {len(own):,} of {format_count(total, 'point')}"
        clauses.append(f"{run}: {launches} launches{where}")
    return f"{text} ({format_list(clauses)})"


def _format_power(rows: pd.DataFrame) -> str:
    """Return which engines were limited by power or heat, and of which the clocks are not known."""
    slowed = rows["throttle_reasons"].map(bool) | point_warnings.has_warning(rows, point_warnings.THROTTLED)
    unknown = rows["sm_clock_mhz_min"].isna() & ~slowed
    runs = load_labels.list_unique(rows["run"])
    limited = [run for run in runs if slowed[rows["run"] == run].any()]
    hidden = [run for run in runs if unknown[rows["run"] == run].any()]
    power = {*rows["throttle_reasons"][slowed].explode().dropna()} <= {"sw_power_cap"}
    by = "limited by power" if power else "lowered"
    clauses = []
    if limited:
        clauses.append(f"the clocks of {'all engines' if limited == runs else format_list(limited)} were {by}")
    if hidden:
        clauses.append(f"{'those' if limited else 'the clocks'} of {format_list(hidden)} were not recorded")
    return f"; {', and '.join(clauses)}" if clauses else ""


def _describe_dcp(frames: Frames, *, same_conditions: bool) -> list[str]:
    """Return, for each model and mode, the output and the KV capacity of DCP over the same layout without it.

    `same_conditions`: True if the sentence before these states the conditions of all points.
    """
    pairs = _list_dcp_pairs(frames)
    if not pairs:
        return ["No engine ran a layout both with DCP and without it, so nothing here says what DCP gains or costs."]
    sentences = []
    for scope, own, engines in pairs[:MAX_LAYOUTS]:
        where = f"{scope}: inside" if scope else "Inside"
        one = engines[0][0] if len(engines) == 1 else ""
        layout, plain = own["layout"].iloc[0], findings.list_without_dcp(own)[0]
        gains = [_format_gain("" if one else run, rows) for run, rows in engines]
        how = "under the same conditions" if same_conditions else f"{format_launches(own)}{_format_power(own)}"
        held = _format_capacity(frames, str(own["model"].iloc[0]), str(layout), one)
        sentences.append(
            f"{where} {one or 'each engine'}, {layout} gives {format_list(gains)} the output of {plain}, {how}{held}."
        )
    return sentences


def _list_dcp_pairs(frames: Frames) -> list[tuple[str, pd.DataFrame, list[tuple[str, pd.DataFrame]]]]:
    """Return the ratios to the same layout without DCP of each model, mode and layout, in all and by engine.

    They are behind `DeepSeek-V3, live`, which is empty if all have the same model and mode.
    """
    ratios = frames.findings.ratios
    known = ratios[ratios["ratio"].notna()] if len(ratios) else ratios
    groups = list(known.groupby(["model", "mode", "layout"], sort=False)) if len(known) else []
    several = len({key[:2] for key, _ in groups}) > 1
    return [
        (
            f"{model}, {mode}" if several else "",
            own,
            [(run, rows) for run in _list_names(frames) if len(rows := own[own["run"] == run])],
        )
        for (model, mode, _), own in groups
    ]


def _list_names(frames: Frames) -> list[str]:
    """Return the names of the engines that were measured; imported results are not compared with them."""
    return [engine.run.name for engine in frames.engines if not engine.imported]


def _format_gain(run: str, rows: pd.DataFrame) -> str:
    """Return `1.02–1.10 times (vLLM 0.26.0)`, and `not distinguishable` if no ratio differs from 1 by more than launches may.

    Without a name of an engine only the latter is in parentheses.
    """
    best = rows.sort_values("ratio", ascending=False, kind="stable").drop_duplicates("same_load")
    level = "" if rows["verdict"].isin(["higher", "lower"]).any() else launch_bands.NOT_DISTINGUISHABLE
    note = ", ".join(filter(None, (run, level)))
    return f"{format_value_range(best['ratio'], '{:.2f}')} times{f' ({note})' if note else ''}"


def _format_capacity(frames: Frames, model: str, layout: str, one: str = "") -> str:
    """Return `; it holds 2.00 (dcpbench) and 1.99 (SGLang 0.5.17) times the KV tokens of tp2`.

    `one` is the engine that the sentence already names, if it names one. Engines with a KV cache that a flag limits are named instead.
    """
    kv = frames.kv
    own = kv[(kv["model"] == model) & (kv["layout"] == layout)] if len(kv) else kv
    if own.empty:
        return ""
    ratios = {run: ratio for run, ratio in zip(own["run"], own["capacity_ratio"], strict=True) if not is_missing(ratio)}
    alone = list(ratios) == [one]
    texts = [f"{ratios[run]:.2f}{'' if alone else f' ({run})'}" for run in _list_names(frames) if run in ratios]
    held = f"; it holds {format_list(texts)} times the KV tokens of tp{own['tp'].iloc[0]}" if texts else ""
    limited = [run for run in _list_names(frames) if run in set(own["run"][own["kv_bounded_by"].eq(SERVER_FLAG)])]
    return f"{held}; a flag limits the KV cache of {format_list(limited)}" if limited else held


def format_bullets(frames: Frames, most: int = MAX_SCOPES) -> list[str]:
    """Return the latencies of the engines at the same points, and where DCP is ahead inside each: up to `most` of each kind.

    Latencies are over those of the engine that is ahead most often; decode points have none of their own.
    """
    rows = compare_engines(frames).rows
    bullets = []
    for _, own in rows.groupby(SCOPE, sort=False, dropna=False) if len(rows) else ():
        first = str(own.drop_duplicates("cell")["over_run"].value_counts(sort=True).index[0])
        reference = own[own["run"] == first].set_index("cell")
        others = own[(own["run"] != first) & own["cell"].isin(reference.index)]
        if own["mode"].eq(DECODE).all():
            continue  # ITL is the step, and the output its inverse; engine_steps compares steps
        clauses = []
        for name in LATENCIES:
            times = others.assign(times=others[name].astype(float) / others["cell"].map(reference[name].astype(float)))
            times = times[times["times"].notna()]
            if len(times):
                clauses.append(f"{METRIC[name].label} {_format_times(times, len(reference))}")
        if clauses:
            bullets.append(f"Latency over that of {first} at the same points: {'; '.join(clauses)}.")
    return [*bullets[:most], *_describe_where_dcp_is_ahead(frames)[:most]]


def _describe_where_dcp_is_ahead(frames: Frames) -> list[str]:
    """Return, for each model, mode and layout with DCP, at how many points of each engine it is ahead, and from which length on."""
    bullets = []
    for scope, own, engines in _list_dcp_pairs(frames):
        clauses = [f"{_count_ahead(rows)} ({run})" for run, rows in engines]
        layouts = f"{own['layout'].iloc[0]} is ahead of {findings.list_without_dcp(own)[0]} {launch_bands.BY_MORE}"
        bullets.append(f"{scope}{': ' if scope else ''}{layouts} {format_list(clauses)}.")
    return bullets


def _count_ahead(rows: pd.DataFrame) -> str:
    """Return `at 2 of 6 points, from 32,000 tokens on`, the length from which on DCP is ahead at every concurrency."""
    ahead = rows["verdict"].eq("higher")
    lengths = rows["input_typical"]
    behind = lengths[~ahead]
    many = f"at {int(ahead.sum()):,} of {format_count(len(rows), 'point')}"
    if not ahead.any() or lengths.isna().any() or len(set(lengths)) == 1 or not (lengths > behind.max()).any():
        return many
    return f"{many}, from {lengths[lengths > behind.max()].min():,.0f} tokens on"


def list_unknown(frames: Frames) -> list[str]:
    """Return of which engines the weights, or the precision of weights or KV cache, were not recorded."""
    table = frames.everything[frames.everything["run"].isin(_list_names(frames))]
    hidden = {
        "weights": table["weights"] == UNKNOWN,
        "precision": table["precisions"].map(lambda pair: UNKNOWN in pair).astype(bool),
    }
    found: dict[tuple[str, ...], list[str]] = {}
    for what, mask in hidden.items():
        if names := load_labels.list_unique(table["run"][mask]):
            found.setdefault(tuple(names), []).append(what)
    return [f"{format_list(what)} of {format_list(list(names))} not recorded" for names, what in found.items()]


def build_table(frames: Frames) -> Table:
    """Build the table of all engines at each layout and load, with ratios over the fastest engine of each."""
    rows = compare_engines(frames).rows
    if rows.empty:
        return Table("", [], [])
    several = [name for name in ("model", "mode") if len(set(rows[name])) > 1]
    columns: list[Column] = [
        *make_text_columns(*several, "load", "layout"),
        ("engine", "measured_engine"),
        ("launches", lambda r: f"{r['launches']:,}"),
        make_column(METRIC["output_tok_s"]),
        ("× output", lambda r: format_ratio(r["ratio"], 2)),
        make_column(METRIC["ttft_p50_ms"]),
        ("× TTFT", lambda r: format_ratio(r["ttft_ratio"], 2)),
        make_column(METRIC["itl_p50_ms"]),
        ("× ITL", lambda r: format_ratio(r["itl_ratio"], 2)),
        (METRIC["kv_capacity_tokens"].heading, _format_capacity_cell),
    ]
    title = "Engines at equal layout and load; × is over the engine with the most output"
    found = rows.rename(columns={"run": "measured_engine"})
    return make_table(title, found, columns, text_columns=len(several) + 3, optional=("TTFT p50 ms", "× TTFT"))


def _format_capacity_cell(row: Mapping[str, Any]) -> str:
    """Return the KV capacity, with a note if a flag of the server limits it."""
    tokens = format_integer(row["kv_capacity_tokens"])
    return f"{tokens} (limited by a flag)" if row["kv_bounded_by"] == SERVER_FLAG else tokens
