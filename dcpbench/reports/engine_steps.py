"""Compare the decode steps of several engines part by part, at equal layout, concurrency and context.

Parts are those of step_parts.py, from a profiled step. The time of a step is measured without the profiler, and nothing is
scaled from one to the other.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.records.metrics import DECODE, METRIC
from dcpbench.records.record import MAX_DISTURBANCE, MAX_SUM_ERROR, OURS
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import engines, load_labels
from dcpbench.reports.step_parts import (
    ATTENTION,
    COMMUNICATION,
    CONTENTS,
    DP_CONTENTS,
    EXCHANGE,
    EXPERTS,
    IDLE,
    MATRIX_PRODUCTS,
    OTHERS,
    PROJECTIONS,
    PROLONGED,
    REDUCE,
    STEP_PARTS,
    UNKNOWN,
    add_sums,
    compute_parts,
    list_compared_parts,
)
from dcpbench.reports.tables import FOLD_ABOVE, Table, make_column, make_table, make_text_columns
from dcpbench.show.numbers import (
    ABSENT,
    format_number,
    format_percent,
    format_ratio,
    format_value_range,
    is_missing,
)
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dcpbench.reports.dataframes import Frames
    from dcpbench.reports.tables import Column

PROLONGED_STAR = "*"  # behind the ratio of a step that the profiler prolongs
STEP = "step"  # name of the whole step, measured without the profiler, among the parts that are compared
MIN_SLOWER = 1 + REPEATS_AGREE_WITHIN  # ratio above which a part counts as slower than in another launch
MAX_SLOWER = 8  # maximum number of sentences about parts in which dcpbench is slower
MIN_SHARE = 0.1  # share of the difference between two steps from which a part is named
MAX_UNKNOWN = 0.03  # share of unknown kernels in a step above which its parts are named as incomplete
ONLY_IN_SUMS = (PROJECTIONS, EXPERTS)  # parts that narrow tables show by their sum only
SINGULAR = (STEP, ATTENTION, REDUCE)  # names of parts that take a verb in the singular
TITLE = "Decode steps of engines by part"


@dataclasses.dataclass(frozen=True, eq=False)
class StepComparison:
    """Hold the decode points that several engines ran and of which at least one was profiled."""

    rows: pd.DataFrame
    """Rows of engines.compare_engines with `parts`, the time of each part, of the sums of parts and of IDLE in µs (empty without
    a profile), `step_times`, the step over that of the reference, `part_times`, the same of each part, `profiled_times`, the profiled
    step over the timed one, and `reference`."""
    reference: str  # engine over which ratios are: dcpbench's, else the one that is ahead most often


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowerPart:
    """Describe a part of a step that takes longer in the reference than in another engine."""

    part: str  # a part or a sum of parts of step_parts, or STEP
    engine: str
    times: tuple[float, ...]  # time in the reference over that in the engine, at each point where it is slower
    compared: int  # number of points that have the part in both
    worst: float  # time ratio at the point where most time is lost
    lost_ms: float
    step_ms: float
    where: str  # layout, concurrency and context of that point


def compare_steps(frames: Frames) -> StepComparison:
    """Return the comparison of the engines' decode steps; without rows if no shared point was profiled."""
    rows = engines.compare_engines(frames).rows
    rows = rows[rows["mode"] == DECODE] if len(rows) else rows
    if rows.empty or "profiled_us" not in rows:
        return StepComparison(rows.head(0), "")
    rows = rows.assign(profiled_us=rows["profiled_us"].where(rows["profiled_us"] > 0))
    profiled = rows.groupby("cell")["profiled_us"].transform("count") > 0
    rows = rows[profiled].reset_index(drop=True)
    if rows.empty:
        return StepComparison(rows, "")
    ours = rows["run"][rows["origin"] == OURS]
    reference = str((ours if len(ours) else rows["over_run"]).value_counts(sort=True).index[0])
    records = load_labels.list_rows(rows)
    for row in records:
        row |= {"parts": _collect_parts(row), "profiled_times": _get_profiled_times(row)}
    of_cell = {row["cell"]: row for row in records if row["run"] == reference}
    for row in records:
        first = of_cell.get(row["cell"])
        row["step_times"] = None if first is None else row["step_ms"] / first["step_ms"]
        row["part_times"] = {} if first is None else _compute_part_times(row, first)
    names = ("parts", "step_times", "part_times", "profiled_times")
    found = {name: pd.Series([row[name] for row in records], rows.index, dtype=object) for name in names}
    return StepComparison(rows.assign(**found, reference=reference), reference)


def _collect_parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a point with sums and idle time; empty if it was not profiled."""
    if is_missing(row["profiled_us"]):
        return {}
    return add_sums(compute_parts(row)) | {IDLE: float(row["idle_us"])}


def _get_profiled_times(row: Mapping[str, Any]) -> float | None:
    """Return the profiled step of a point over the timed one; None if either is absent."""
    if is_missing(row["profiled_us"]) or is_missing(row["step_ms"]):
        return None
    return float(row["profiled_us"] / 1e3 / row["step_ms"])


def is_prolonged(*profiled_times: float | None) -> bool:
    """Return True if the profiler prolongs one of several steps by more than MAX_DISTURBANCE."""
    return any(times is not None and times > 1 + MAX_DISTURBANCE for times in profiled_times)


def _compute_part_times(row: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of each part over that in the reference, without parts that the profiler prolongs."""
    prolonged = is_prolonged(row["profiled_times"], reference["profiled_times"])
    return {
        name: us / reference["parts"][name]
        for name, us in row["parts"].items()
        if reference["parts"].get(name, 0.0) > 0 and not (prolonged and name in PROLONGED)
    }


def find_slower_parts(found: StepComparison) -> list[SlowerPart]:
    """Return the parts that take longer in the reference than in another engine, the one that loses most time first."""
    slower = []
    for engine in load_labels.list_unique(found.rows["run"]) if len(found.rows) else ():
        if engine == found.reference:
            continue
        pairs = list(_iterate_pairs(found, engine))
        for part in dict.fromkeys(name for _, theirs in pairs for name in (STEP, *list_compared_parts(theirs))):
            slower += _find_slower_part(part, engine, pairs)
    return sorted(slower, key=lambda one: (one.part != STEP, -one.lost_ms))


def _iterate_pairs(found: StepComparison, engine: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the reference's and the engine's row of each point that both ran."""
    rows = load_labels.list_rows(found.rows)
    ours = {row["cell"]: row for row in rows if row["run"] == found.reference}
    for row in rows:
        if row["run"] == engine and row["cell"] in ours:
            yield ours[row["cell"]], row


def _is_comparable(part: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    prolonged = is_prolonged(ours["profiled_times"], theirs["profiled_times"])
    return part in list_compared_parts(theirs) and not (prolonged and part in PROLONGED)


def _find_slower_part(part: str, engine: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[SlowerPart]:
    """Return the part with the points at which it takes longer in the reference; empty if there are none."""
    known = [
        (ours, mine, other)
        for ours, theirs in pairs
        if part == STEP or _is_comparable(part, ours, theirs)
        for mine, other in [(_get_ms(ours, part), _get_ms(theirs, part))]
        if mine is not None and other is not None and other > 0
    ]
    slower = [(ours, mine, other) for ours, mine, other in known if mine / other > MIN_SLOWER]
    if not slower:
        return []
    row, mine, other = max(slower, key=lambda one: one[1] - one[2])
    return [
        SlowerPart(
            part=part,
            engine=engine,
            times=tuple(own / theirs for _, own, theirs in slower),
            compared=len(known),
            worst=mine / other,
            lost_ms=mine - other,
            step_ms=float(row["step_ms"] if part == STEP else row["profiled_us"] / 1e3),
            where=format_point(row),
        )
    ]


def _get_ms(row: Mapping[str, Any], part: str) -> float | None:
    """Return the time of a part in ms, or of the step without the profiler; None if it is unknown."""
    if part == STEP:
        return None if is_missing(row["step_ms"]) else float(row["step_ms"])
    us = row["parts"].get(part)
    return None if us is None else us / 1e3


def format_point(row: Mapping[str, Any]) -> str:
    """Return `tp2·dcp2, 8 requests of 32,000 tokens`."""
    requests = format_count(int(row["concurrency"]), "request")
    return f"{row['layout']}, {requests} of {int(row['context']):,} tokens"


def format_slower_part(one: SlowerPart, reference: str) -> str:
    """Return `dcpbench's attention takes 1.05–1.31 times as long as vLLM 0.26.0's at 3 of 6 points; …`."""
    times = f"{format_value_range(one.times, '{:.2f}')} times"
    points = "the one point compared" if one.compared == 1 else f"{len(one.times):,} of {one.compared:,} points"
    of = "the step" if one.part == STEP else "the profiled step"
    most = f"most at {one.where}" if len(one.times) > 1 else one.where
    lost = f"{most}: {one.worst:.2f} times, {format_number(one.lost_ms, 2)} ms of {of} of {format_number(one.step_ms, 3)} ms"
    if one.part == IDLE:
        return f"In {reference}'s profiled step no kernel runs for {times} as long as in {one.engine}'s at {points} ({lost})."
    verb = "takes" if one.part in SINGULAR else "take"
    return f"{reference}'s {one.part} {verb} {times} as long as {one.engine}'s at {points} ({lost})."


def describe_slower_parts(frames: Frames) -> list[str]:
    """Return a sentence for each part that takes longer in dcpbench's engine than in another one."""
    found = compare_steps(frames)
    if found.rows.empty:
        return []
    slower = find_slower_parts(found)
    sentences = [format_slower_part(one, found.reference) for one in slower[:MAX_SLOWER]]
    if len(slower) > MAX_SLOWER:
        sentences.append(
            f"The table has {format_count(len(slower) - MAX_SLOWER, 'further part')} that {found.reference} is slower in."
        )
    if not slower:
        compared = found.rows.groupby("cell")["run"].transform("size") > 1
        points = format_count(int(found.rows["cell"][compared].nunique()), "compared point")
        sentences = [f"No compared part takes longer in {found.reference} than in another engine ({points})."]
    return sentences


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDifference:
    """Describe by how much an engine's steps are longer than the reference's, and which parts make the difference."""

    engine: str
    times: tuple[float, ...]  # timed step over that of the reference, at each point that both ran
    more_ms: tuple[float, ...]  # timed step minus that of the reference, at the same points
    profiled: int  # points by which parts are compared: profiled, and not prolonged by the profiler
    parts_ms: dict[str, tuple[float, ...]]  # part minus the reference's in ms, if at least MIN_SHARE of all differences
    shares: dict[str, float]  # share of each of these parts in the sum of the differences, the largest first
    offset: float  # sum of the negative shares, of parts that take less time than the reference's, as a positive number


def find_differences(found: StepComparison) -> list[StepDifference]:
    """Return the difference of each engine to the reference."""
    engines_behind = [run for run in load_labels.list_unique(found.rows["run"]) if run != found.reference]
    return [_find_difference(run, list(_iterate_pairs(found, run))) for run in engines_behind]


def _find_difference(engine: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> StepDifference:
    """Return the difference of an engine by its points and those of the reference."""
    timed = [(ours["step_ms"], theirs["step_ms"]) for ours, theirs in pairs]
    usable = [
        (ours, theirs)
        for ours, theirs in pairs
        if ours["parts"] and theirs["parts"] and not is_prolonged(ours["profiled_times"], theirs["profiled_times"])
    ]
    names = list(dict.fromkeys(name for _, theirs in usable for name in (*list_compared_parts(theirs), UNKNOWN)))
    more_ms = {
        name: tuple((theirs["parts"].get(name, 0.0) - ours["parts"].get(name, 0.0)) / 1e3 for ours, theirs in usable)
        for name in names
    }
    total = sum((theirs["profiled_us"] - ours["profiled_us"]) / 1e3 for ours, theirs in usable)
    shares = {name: sum(values) / total for name, values in more_ms.items()} if total > 0 else {}
    named = {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= MIN_SHARE}
    return StepDifference(
        engine=engine,
        times=tuple(theirs / ours for ours, theirs in timed),
        more_ms=tuple(theirs - ours for ours, theirs in timed),
        profiled=len(usable),
        parts_ms={name: more_ms[name] for name in named},
        shares=named,
        offset=-sum(share for share in shares.values() if share < 0),
    )


def describe_differences(frames: Frames) -> list[str]:
    """Return a sentence for each engine on the ratio of its steps to the reference's, and on the parts that make the difference."""
    found = compare_steps(frames)
    different = find_differences(found) if len(found.rows) else []
    return [_format_difference(one, found.reference) for one in different if one.times]


def _format_difference(one: StepDifference, reference: str) -> str:
    """Return `vLLM 0.26.0's step takes 1.07–1.26 times as long as dcpbench's (14 points, 0.51 to 0.96 ms more). …`."""
    points = format_count(len(one.times), "point")
    text = (
        f"{one.engine}'s step takes {format_value_range(one.times, '{:.2f}')} times as long as {reference}'s "
        f"({points}, {_format_range_ms(one.more_ms)} more)."
    )
    if not one.shares:
        return text
    clauses = [
        f"{name} {format_percent(share)} ({_format_range_ms(one.parts_ms[name])})" for name, share in one.shares.items()
    ]
    at = (
        f" at the {format_count(one.profiled, 'point')} that the profiler does not prolong"
        if one.profiled < len(one.times)
        else ""
    )
    shorter = (
        f" Parts that take less time in {one.engine} subtract {format_percent(one.offset)}, so that all shares add up to 100 %."
        if one.offset >= MIN_SHARE
        else ""
    )
    return f"{text} Shares of the difference between the profiled steps{at}: {format_list(clauses)}.{shorter}"


def _format_range_ms(values: tuple[float, ...]) -> str:
    ends = dict.fromkeys(format_number(end, 2) for end in (min(values), max(values)))
    return f"{' to '.join(ends)} ms"


def describe_limits(frames: Frames) -> list[str]:
    """Return what limits the comparison: profiled against timed steps, parts that cannot be separated, unknown kernels, sums."""
    found = compare_steps(frames)
    if found.rows.empty:
        return []
    rows = found.rows[found.rows["profiled_us"].notna()]
    missing = found.rows[found.rows["profiled_us"].isna()]
    texts = [
        _format_profiled(rows),
        _format_prolonged(rows),
        _format_left_out(rows),
        f"Not profiled: {_format_where(missing)}." if len(missing) else "",
        CONTENTS if (rows["origin"] == OURS).any() and (rows["origin"] != OURS).any() else "",
        DP_CONTENTS if (rows["dp"] > 1).any() else "",
        *_list_absent_parts(rows),
        _format_unknown(rows),
        _format_sums(rows),
    ]
    return [text for text in texts if text]


def _format_profiled(rows: pd.DataFrame) -> str:
    """Return how much longer the profiled step of each engine takes than the timed one."""
    clauses = []
    for run, own in rows.groupby("run", sort=False):
        times = own["profiled_us"].astype(float) / 1e3 / own["step_ms"].astype(float)
        clauses.append(f"{format_value_range(times.dropna(), '{:.2f}')} times ({run})")
    return (
        "Parts are those of a separate profiled step and are not scaled to the step that was timed without the profiler: the profiled "
        f"step takes {format_list(clauses)} as long as the timed one."
    )


def _format_prolonged(rows: pd.DataFrame) -> str:
    """Return at which points the profiled step is too long for its waits to be compared; empty if there are none."""
    longer = rows[rows["profiled_times"].map(is_prolonged).astype(bool)]
    if longer.empty:
        return ""
    return (
        f"Where the profiled step is more than {MAX_DISTURBANCE * 100:g} % longer than the timed one (*), it contains waits for the host or "
        f"for another rank that the profiler causes: {_format_where(longer)}. There {EXCHANGE}, {REDUCE} and {IDLE} are not compared."
    )


def _format_left_out(rows: pd.DataFrame) -> str:
    """Return how long the waits for the host are that are left out of profiled steps; empty without any."""
    apart = rows[rows["host_wait_us"].astype(float) > 0] if "host_wait_us" in rows else rows.head(0)
    if apart.empty:
        return ""
    times = [us / 1e3 for us in apart["host_wait_us"].astype(float)]
    return (
        f"Waits of the GPU for the host that the profiler causes are left out of the profiled step: {_format_range_ms(tuple(times))} a step at "
        f"points of {_format_where(apart)}."
    )


def _format_where(rows: pd.DataFrame) -> str:
    """Return `vLLM 0.26.0 (2 points) and …`."""
    counts = rows["run"].value_counts(sort=False)
    return format_list([f"{run} ({format_count(int(n), 'point')})" for run, n in counts.items()])


def _list_absent_parts(rows: pd.DataFrame) -> list[str]:
    """Return a sentence for each part that one engine has at a point and another one has not."""
    names = [part.name for part in STEP_PARTS if part.name not in (OTHERS, UNKNOWN)]
    absent: dict[tuple[str, str], list[str]] = {}
    for _, cell in rows.groupby("cell", sort=False):
        present = {name for parts in cell["parts"] for name in parts}
        skipped = () if (cell[["dp", "dcp"]] > 1).any(axis=None) else (EXCHANGE,)  # the gather of logits; see CONTENTS
        for run, layout, parts in zip(cell["run"], cell["layout"], cell["parts"], strict=True):
            for name in (name for name in names if name in present and name not in parts and name not in skipped):
                absent.setdefault((run, name), []).append(layout)
    return [
        (
            f"{run} has no kernels of its own for {name} at {format_list(list(dict.fromkeys(layouts)))}: what it does of that work is in "
            "another part or unknown."
        )
        for (run, name), layouts in absent.items()
    ]


def _format_unknown(rows: pd.DataFrame) -> str:
    """Return which share of the steps unknown kernels take in each engine."""
    theirs = rows[rows["origin"] != OURS]
    if theirs.empty:
        return ""
    clauses, high = [], []
    for run, own in theirs.groupby("run", sort=False):
        shares = [_get_unknown_share(row) for row in own.to_dict("records")]
        ends = list(dict.fromkeys(format_percent(share) for share in (min(shares), max(shares))))
        clauses.append(f"{' to '.join(ends)} ({run})")
        high += [str(run)] if max(shares) > MAX_UNKNOWN else []
    text = f"Kernels with unknown names take {format_list(clauses)} of the profiled step"
    return text + (
        f"; above {format_percent(MAX_UNKNOWN)} the parts of {format_list(high)} are incomplete." if high else "."
    )


def _get_unknown_share(row: Mapping[Any, Any]) -> float:
    """Return the share of unknown kernels in a profiled step."""
    return float(row["parts"].get(UNKNOWN, 0.0) / row["profiled_us"])


def _format_sums(rows: pd.DataFrame) -> str:
    """Return whether the parts of each point add up to its profiled step."""
    off = rows[rows["phase_sum_error"].abs() > MAX_SUM_ERROR]
    within = format_percent(MAX_SUM_ERROR)
    if off.empty:
        return f"Parts and idle time add up to the profiled step within {within} at all {format_count(len(rows), 'point')}."
    return f"Parts and idle time do not add up to the profiled step within {within}, so they are not to be compared: {_format_where(off)}."


def build_table(frames: Frames) -> Table:
    """Build the table with a row per engine at each load and layout: the step, and each part with its ratio."""
    found = compare_steps(frames)
    if found.rows.empty:
        return Table("", [], [])
    parts = list_shown_parts(found)
    several = ["model"] if len(set(found.rows["model"])) > 1 else []
    columns: list[Column] = [
        *make_text_columns(*several, "load", "layout"),
        ("engine", "measured_engine"),
        make_column(METRIC["step_ms"], "step ms"),
        ("× step", lambda r: format_ratio(r["step_times"], 2)),
        ("profiled step ms (÷ step)", format_profiled_cell),
        *[(name, _make_part_cell(name, found.reference)) for name in parts],
        (UNKNOWN, format_unknown_cell),
        ("sum / profiled step", format_sum_cell),
    ]
    title = f"{TITLE}: ms, and × over {found.reference}"
    table = found.rows.rename(columns={"run": "measured_engine"})
    return make_table(title, table, columns, text_columns=len(several) + 3, fold=len(table) > FOLD_ABOVE)


def list_shown_parts(found: StepComparison) -> list[str]:
    """Return the parts that any engine has, with the sums that are compared, in the order of a layer."""
    sums = {MATRIX_PRODUCTS: "experts", COMMUNICATION: REDUCE if (found.rows["dp"] > 1).any() else ""}
    behind = {part: name for name, part in sums.items() if part}
    names = [
        name for part in STEP_PARTS if part.name != UNKNOWN for name in (part.name, behind.get(part.name, "")) if name
    ]
    return [name for name in (*names, IDLE) if any(name in parts for parts in found.rows["parts"])]


def _make_part_cell(name: str, reference: str) -> Callable[[Mapping[str, Any]], str]:
    def format_cell(row: Mapping[str, Any]) -> str:
        us = row["parts"].get(name)
        if us is None:
            return ABSENT
        times = row["part_times"].get(name) if row["measured_engine"] != reference else None
        return format_number(us / 1e3, 3) + ("" if times is None else f" ({format_ratio(times, 2)})")

    return format_cell


def format_profiled_cell(row: Mapping[Any, Any]) -> str:
    """Return the profiled step with its ratio to the timed one, and a star if the profiler prolongs it."""
    times, us = row["profiled_times"], row["profiled_us"]
    ms = format_number(None if is_missing(us) else us / 1e3)
    if times is None:
        return ms
    return f"{ms} ({format_ratio(times, 2)}{PROLONGED_STAR if is_prolonged(times) else ''})"


def format_unknown_cell(row: Mapping[Any, Any]) -> str:
    """Return the time of unknown kernels with its share of the profiled step; a dash for ranges, which have none."""
    share = format_unknown_share(row)
    return ABSENT if share == ABSENT else f"{format_number(row['parts'].get(UNKNOWN, 0.0) / 1e3, 3)} ({share})"


def format_unknown_share(row: Mapping[Any, Any]) -> str:
    """Return the share of unknown kernels in the profiled step; a dash for ranges, which have none."""
    if is_missing(row["profiled_us"]) or (row["origin"] == OURS and UNKNOWN not in row["parts"]):
        return ABSENT
    return format_percent(_get_unknown_share(row))


def format_sum_cell(row: Mapping[str, Any]) -> str:
    """Return the sum of the parts over the profiled step, with a star if it differs too much."""
    if is_missing(row["phase_sum_error"]):
        return ABSENT
    star = "*" if abs(row["phase_sum_error"]) > MAX_SUM_ERROR else ""
    return f"{(1 + row['phase_sum_error']) * 100:.1f} %{star}"
