"""Build the tables of a report as strings ready to print; an absent value is a dash, never 0.

A table about served requests holds live runs or replays, and its title names which.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.records import metrics
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.metrics import METRIC
from dcpbench.records.record import OURS, device_of, hardware
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import marks, words
from dcpbench.reports.frames import commonest_first
from dcpbench.show.numbers import ABSENT, count, gib, missing, number, percent, text, times, with_interval
from dcpbench.show.text import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dcpbench.records.metrics import Metric
    from dcpbench.reports.frames import Frames

FOLD_ABOVE = 24
"""Number of rows above which a table that only supports a figure is folded at first."""
MANY_ROWS = 12
"""Maximum number of rows of a table that Markdown shows unfolded, and of a folded one that does not state its row
count.
"""
MOST_ROWS = 2_000
MOST_LETTERS = 1_000
"""Maximum number of rows of a table, and of characters of a cell: a long name must not dominate it, and points.csv has
all.
"""
MOST_DETAIL = 600
"""Maximum number of characters of a log; its end is kept because it is the most informative part."""
Column = tuple[str, "str | Callable[[Any], str]"]
"""Heading of a column, and its content: the name of a row's field, or a function of the row."""


@dataclasses.dataclass(frozen=True)
class Table:
    """Hold a table of plain strings."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    """Number of leading columns with text; the others hold numbers and are right-aligned."""
    fold: bool = False

    @property
    def summary(self) -> str:
        """Return the clickable text of a folded table: its title, and its number of rows if there are many."""
        return self.title + (f" ({len(self.rows):,} rows)" if len(self.rows) > MANY_ROWS else "")


def whole(value: float | None) -> str:
    """Format a count; the median of repeats may lie between two integers."""
    if value is None or missing(value):
        return ABSENT
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def shown(metric: Metric, value: float | None) -> str:
    """Format a metric's value in its display unit."""
    if metric.shown_unit == "%":
        return percent(value)
    if metric.shown_unit == "GiB":
        return gib(value)
    return whole(value) if metric.whole else number(value, metric.digits)


def columns(listed: Iterable[Metric], **instead: Column) -> list[Column]:
    """Return metrics as columns with heading and format from the catalogue; `instead` replaces
    columns by metric name.
    """
    return [instead.get(metric.name) or column(metric) for metric in listed]


def column(metric: Metric, heading: str = "") -> Column:
    """Return the column of one metric, optionally with a heading of its own."""
    return heading or metric.heading, lambda row: shown(metric, row[metric.name])


def named(*names: str) -> list[Column]:
    """Return text columns with the row fields' names as headings."""
    return [(name, name) for name in names]


LOADED: list[Column] = [*named("model", "load"), ("layout", "label")]
APART: Column = ("repeats apart", lambda r: percent(r["spread"]))


def points(found: pd.DataFrame) -> Table:
    """Build the table with the numbers of every point."""
    return make_table(
        "Medians; 95 % interval in brackets",
        found.assign(telling=marks.telling(found)),
        [
            ("layout", "label"),
            ("marks", "telling"),
            ("output tok/s [95 %]", lambda r: with_interval(*(r[f"output_tok_s{x}"] for x in ("", "_low", "_high")))),
            *columns(metrics.DECODE_TABLE),
            ("SLO", "slo_said"),
            ("steps", lambda r: f"{r['samples']:,.0f}" if r["samples"] else ABSENT),
            APART,
        ],
        load=True,
        text_columns=2,
        optional=("marks", "TTFT p50 ms", "SLO", "repeats apart"),
        fold=len(found) > FOLD_ABOVE,
    )


def steps(found: pd.DataFrame) -> Table:
    """Build the table of one step as the profiled pass recorded it."""
    kernels: Column = ("kernels", lambda r: number(r["kernels"] or None))
    return make_table(
        "One step, from the profiled pass",
        found,
        [
            ("layout", "label"),
            ("step ms [95 %]", lambda r: with_interval(r["step_ms"], r["step_ms_low"], r["step_ms_high"])),
            *columns(metrics.PROFILE_TABLE, idle_fraction=("GPU idle", _idle), kernels=kernels),
        ],
        load=True,
        fold=len(found) > FOLD_ABOVE,
    )


def served(found: pd.DataFrame, mode: str) -> Table:
    """Build the table of rates and latencies of every served point of a mode."""
    rows, others = of_mode(found, mode), some_imported(found)
    return make_table(
        words.SERVED[mode],
        rows.assign(telling=[said or ABSENT for said in marks.telling(rows)]),
        [
            *LOADED,
            *named("origin")[:others],
            ("marks", "telling"),
            *columns(metrics.SERVED_TABLE),
            ("SLO", "slo_said"),
            *columns(metrics.SERVED_COUNTS, finished=("finished", _finished)),
            APART,
        ],
        text_columns=4 + others,
        optional=("marks", "SLO", "goodput req/s", "repeats apart"),
        fold=len(rows) > FOLD_ABOVE,
    )


def served_details(found: pd.DataFrame, mode: str) -> Table:
    """Build the table of the other latencies and of step statistics."""
    rows = of_mode(found, mode)
    instead: dict[str, Column] = {
        "decode_steps": ("without prefill", lambda r: percent(r["decode_steps"] / r["steps"] if r["steps"] else None)),
        "idle_fraction": ("GPU idle between", _idle),
        "host_syncs_per_step": column(METRIC["host_syncs_per_step"], "host syncs per step"),
    }
    return make_table(
        f"More of each point, {mode}",
        rows,
        [*LOADED, *columns(metrics.SERVED_DETAILS, **instead)],
        text_columns=3,
        optional=("GPU idle between", "host syncs per step", *(METRIC[name].heading for name in metrics.FLOORS)),
        fold=len(rows) > FOLD_ABOVE // 4,
    )


def replay(found: pd.DataFrame) -> Table:
    """Build the table of deviations of replays from live runs."""
    compared = [*LOADED]
    for metric in metrics.REPLAYED:
        compared += [column(metric, f"{metric.in_brief} live"), ("error", _error(f"{metric.name}_error"))]
    cpu = " (CPU: functional run)" if len(found) and found["cpu"].any() else ""
    return make_table(f"Replay against live{cpu}: replay / live - 1", found, compared, text_columns=3)


def kv(found: pd.DataFrame) -> Table:
    """Build the table of KV capacity per layout."""
    return make_table(
        "KV cache by layout (the point with the largest pool)",
        found,
        [
            *named("model", "layout"),
            ("bounded by", "kv_bounded_by"),
            *columns(metrics.KV_TABLE),
            ("tokens per GiB per GPU", lambda r: count(r["kv_tokens_per_gib"])),
            ("over tp alone", lambda r: times(r["kv_ratio"], 2)),
            ("tokens in all", lambda r: count(r["kv_capacity_tokens"])),
        ],
        text_columns=3,
    )


def others(found: pd.DataFrame) -> Table:
    """Build the table of failed, hung and rejected points, grouped by reason."""
    rows = []
    load = "context × concurrency" if found["load"].isna().all() else "load"
    same = ["run", "model", "layout", "outcome", "told"]
    for key, group in itertools.islice(commonest_first(found).groupby(same, sort=False), MOST_ROWS):
        plain = group[group["load"].isna()]
        loads = sorted({(int(c), int(n)) for c, n in zip(plain["context"], plain["concurrency"], strict=True)})
        served = dict.fromkeys(f"{r['mode']}: {r['load']}" for _, r in group[group["load"].notna()].iterrows())
        detail = group["detail"].iloc[0]
        row = {
            load: ", ".join([*(f"{c:,} × {n}" for c, n in loads), *served]),
            "reason": group["reason"].iloc[0],
            "detail": detail if len(detail) <= MOST_DETAIL else f"… {detail[-MOST_DETAIL:]}",
        }
        rows.append(dict(zip(same, key, strict=True)) | row)
    shown = named("model", "layout", "outcome", load, "reason", "detail")
    title = "Failed, hung and rejected points"
    folded = len(rows) > FOLD_ABOVE // 4
    return make_table(title, pd.DataFrame(rows), shown, text_columns=6, optional=("detail",), fold=folded)


def repeats(found: pd.DataFrame) -> Table:
    """Build the table of points of `decode` for which repeats disagree."""
    medians: Column = ("step medians ms", lambda r: ", ".join(number(m) for m in r["medians_ms"]))
    context: Column = ("context", lambda r: f"{r['context']:,}")
    shown = [*named("model", "layout"), context, *named("concurrency"), medians]
    return _disagreeing("Points", found, shown, 2)


def served_repeats(found: pd.DataFrame) -> Table:
    """Build the table of served points for which repeats disagree."""
    rates: Column = ("output tok/s", lambda r: f"{number(r['output_tok_s_low'])} to {number(r['output_tok_s_high'])}")
    return _disagreeing("Served points", found, [*LOADED, rates], 3, " in output throughput")


def _disagreeing(what: str, found: pd.DataFrame, shown: list[Column], text_columns: int, of: str = "") -> Table:
    apart = found[found["apart"] > REPEATS_AGREE_WITHIN].sort_values("apart", ascending=False) if len(found) else found
    title = f"{what} whose repeats differ by more than {REPEATS_AGREE_WITHIN * 100:.0f} %{of}"
    return make_table(title, apart, [*shown, ("apart", lambda r: percent(r["apart"]))], text_columns=text_columns)


def honesty(found: pd.DataFrame) -> Table:
    """Build the table of measurement conditions per layout; imported points have none."""
    found = found[found["origin"] == OURS] if len(found) else found
    rows, busiest = [], "busiest_rank_experts"  # of which tables of old records have no column
    groups: Iterable[Any] = found.groupby(["run", "model", "label"], sort=False) if len(found) else ()
    for (run, model, label), group in itertools.islice(groups, MOST_ROWS):
        layers = _range(group["layers"], 0)
        rows.append(
            {
                "run": run,
                "model": model,
                "layout": label,
                "weights": group["weights"].iloc[0],
                "CUDA graph": _yes(group["cuda_graph"]),
                "layers held": ABSENT if layers == ABSENT else f"{_range(group['layers_held'], 0)} of {layers}",
                "experts hit": _range(group["experts_hit"], 2),
                **({"busiest rank's experts": _range(group[busiest], 2)} if busiest in group else {}),
                "worst attention error": number(group["attention_error"].max(), 2),
                "peak GiB per GPU": gib(group["memory_peak_bytes"].max()),
            }
        )
    shown = named(*list(rows[0])[1:]) if rows else []
    return make_table("What stood behind the numbers", pd.DataFrame(rows), shown, text_columns=4)


def runs(frames: Frames) -> Table:
    """Build the table with one row per run."""
    rows = []
    for run in frames.runs:
        outcomes = [r.outcome for r in run.records]
        env = next((r.environment for r in run.records if r.environment), None)
        device = next(filter(None, map(device_of, run.records)), None)
        started = min((r.started_at for r in run.records if r.started_at), default=None)
        versions = [
            f"{n} {getattr(env, n)}"
            for n in ("dcpbench", "torch", "cuda", "flashinfer", "flash_mla")
            if getattr(env, n, None)
        ]
        counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
        rows.append(
            [run.name, text(hardware(env) if env else device), ", ".join(versions) or ABSENT, text(started), *counts]
        )
    return Table("Runs", ["run", "hardware", "versions", "started (UTC)", *OUTCOMES], rows, text_columns=4)


def environment(frames: Frames) -> Table:
    """Build the table of versions and hardware, with one column per distinct environment."""
    columns: dict[str, dict[str, str]] = {}
    for run in frames.runs:
        for record in run.records:
            if (env := record.environment) is not None:
                values = {f: getattr(env, f) for f in env.__struct_fields__ if f != "command"}
                for name in ("device_memory_bytes", "l2_bytes"):
                    values[name] = None if values[name] is None else f"{values[name]:,}"
                values["settings"] = " ".join(f"{name}={value}" for name, value in sorted(env.settings.items()))
                shown = {name.replace("_", " "): text(value) for name, value in values.items()}
                if shown not in columns.values():
                    columns[run.name if run.name not in columns else f"{run.name} ({len(columns) + 1})"] = shown
    names = list(next(iter(columns.values()), {}))
    if all(column["dcpbench"] == ABSENT for column in columns.values()):  # imports, which have few of these values
        names = [name for name in names if any(column[name] != ABSENT for column in columns.values())]
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    return Table("Environment", ["what", *columns], rows, text_columns=1 + len(columns))


def of_mode(found: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Return the points of a mode, if there are any points."""
    return found[found["mode"] == mode] if len(found) else found


def some_imported(found: pd.DataFrame) -> bool:
    """Return True if some points come from other tools, so that each row must name its origin."""
    return len(found) > 0 and bool((found["origin"] != OURS).any())


class _Row(Mapping[str, Any]):
    """Read a row of a table lazily, only the columns that are requested; a table of points has 200."""

    def __init__(self, columns: _Columns, number: int) -> None:
        self._columns, self._number = columns, number

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 -- any kind of value
        return self._columns[name][self._number]

    def __iter__(self) -> Iterator[str]:
        return map(str, self._columns.table.columns)

    def __len__(self) -> int:
        return self._columns.table.shape[1]


class _Columns(dict[str, list[Any]]):
    """Convert columns of a table to lists of plain values, each when it is first read."""

    def __init__(self, table: pd.DataFrame) -> None:
        super().__init__()
        self.table = table

    def __missing__(self, name: str) -> list[Any]:
        self[name] = values = self.table[name].tolist()
        return values


def read_rows(table: pd.DataFrame) -> list[Mapping[str, Any]]:
    """Return the rows as `table.to_dict("records")` does, in a time that depends on the columns that are used."""
    columns = _Columns(table)
    return [_Row(columns, number) for number in range(len(table))]


def make_table(
    title: str,
    found: pd.DataFrame,
    columns: list[Column],
    *,
    load: bool = False,
    text_columns: int = 1,
    optional: Iterable[str] = (),
    fold: bool = False,
) -> Table:
    """Build a table of rows formatted by `columns`; the run is shown only if there are several, and the load first if
    requested.
    """
    if found.empty:
        return Table(title, [], [])
    first = named("run") if "run" in found and len(set(found["run"])) > 1 else []
    if load:
        first += named("model")
        first += [("context", lambda r: f"{r['context']:,}"), ("concurrency", lambda r: f"{r['concurrency']:,}")]
    columns = [*first, *columns]
    if len(found) > MOST_ROWS:
        title = f"{title} (the first {MOST_ROWS:,} of {len(found):,}; points.csv has every point)"
        found = found.head(MOST_ROWS)
    told = [[text(r[s]) if isinstance(s, str) else s(r) for _, s in columns] for r in read_rows(found)]
    rows = [[cut(cell, MOST_LETTERS) for cell in row] for row in told]
    theirs = "origin" in found and OURS not in set(found["origin"])  # omit columns that no file has a value for
    keep = [
        i
        for i, (name, _) in enumerate(columns)
        if not (theirs or name in optional) or any(r[i] != ABSENT for r in rows)
    ]
    words = sum(i < len(first) + text_columns for i in keep)
    return Table(title, [columns[i][0] for i in keep], [[r[i] for i in keep] for r in rows], words, fold)


def _idle(row: pd.Series[Any]) -> str:
    """Return how long the GPU idled; a CPU has no such value."""
    return ABSENT if row["cpu"] else percent(row["idle_fraction"])


def _finished(row: pd.Series[Any]) -> str:
    if missing(row["finished"]):
        return ABSENT
    of = "" if missing(row["submitted"]) else f" of {row['submitted']:,.0f}"
    return f"{row['finished']:,.0f}{of}"


def _error(name: str) -> Callable[[Any], str]:
    return lambda r: ABSENT if missing(r[name]) else f"{r[name] * 100:+.1f} %"


def _range(values: pd.Series[Any], decimals: int) -> str:
    low, high = (ABSENT if missing(v) else f"{v:,.{decimals}f}" for v in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


def _yes(values: pd.Series[Any]) -> str:
    known = {bool(v) for v in values if not missing(v)}
    return ABSENT if not known else "partly" if len(known) > 1 else "yes" if True in known else "no"
