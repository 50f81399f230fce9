"""Build the tables of a report as strings ready to print; an absent value is a dash, never 0.

A table about served requests holds live runs or replays, and its title names which.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.records import metrics
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.metrics import METRIC
from dcpbench.records.record import OURS, format_hardware, get_device, get_origin, parse_origin
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import load_labels, point_warnings
from dcpbench.reports.dataframes import sort_commonest_first
from dcpbench.show.numbers import (
    ABSENT,
    format_gib,
    format_integer,
    format_number,
    format_percent,
    format_ratio,
    format_text,
    format_with_interval,
    is_missing,
)
from dcpbench.show.text import fit_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dcpbench.records.metrics import Metric
    from dcpbench.reports.dataframes import Frames

FOLD_ABOVE = 24  # number of rows above which a table that only supports a figure is folded at first
MANY_ROWS = 12  # rows that Markdown shows unfolded, and that a folded table does not count, at most
MAX_ROWS = 2_000  # rows of a table at most; points.csv has all
MAX_CELL_CHARS = 1_000  # characters of a cell at most, so that a long name does not dominate it
MAX_DETAIL_CHARS = 600  # maximum number of characters of a log; its end is kept because it is the most informative part
Column = tuple[str, "str | Callable[[Any], str]"]  # heading, and a field's name or a function of the row


@dataclasses.dataclass(frozen=True)
class Table:
    """Hold a table of plain strings."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1  # number of leading columns with text; the others hold numbers and are right-aligned
    fold: bool = False

    @property
    def summary(self) -> str:
        """Return the clickable text of a folded table: its title, and its number of rows if there are many."""
        return self.title + (f" ({len(self.rows):,} rows)" if len(self.rows) > MANY_ROWS else "")


def format_whole(value: float | None) -> str:
    """Format a count; the median of repeats may lie between two integers."""
    if value is None or is_missing(value):
        return ABSENT
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def format_metric(metric: Metric, value: float | None) -> str:
    """Format a metric's value in its display unit."""
    if metric.shown_unit == "%":
        return format_percent(value)
    if metric.shown_unit == "GiB":
        return format_gib(value)
    return format_whole(value) if metric.whole else format_number(value, metric.digits)


def make_columns(listed: Iterable[Metric], **instead: Column) -> list[Column]:
    """Return metrics as columns with heading and format from the catalogue; `instead` replaces columns by metric name."""
    return [instead.get(metric.name) or make_column(metric) for metric in listed]


def make_column(metric: Metric, heading: str = "") -> Column:
    """Return the column of one metric, optionally with a separate heading."""
    return heading or metric.heading, lambda row: format_metric(metric, row[metric.name])


def make_text_columns(*names: str) -> list[Column]:
    """Return text columns with the row fields' names as headings."""
    return [(name, name) for name in names]


LOADED: list[Column] = [*make_text_columns("model", "load"), ("layout", "label")]
APART: Column = ("repeats apart", lambda r: format_percent(r["spread"]))


def build_points_table(found: pd.DataFrame) -> Table:
    """Build the table with the numbers of every point."""
    return make_table(
        "Medians; 95 % interval in brackets",
        found.assign(telling=point_warnings.format_distinct_warnings(found)),
        [
            ("layout", "label"),
            ("warnings", "telling"),
            (
                "output tok/s [95 %]",
                lambda r: format_with_interval(*(r[f"output_tok_s{x}"] for x in ("", "_low", "_high"))),
            ),
            *make_columns(metrics.DECODE_TABLE),
            ("SLO", "slo_result"),
            ("steps", lambda r: f"{r['samples']:,.0f}" if r["samples"] else ABSENT),
            APART,
        ],
        load=True,
        text_columns=2,
        optional=("warnings", "TTFT p50 ms", "SLO", "repeats apart"),
        fold=len(found) > FOLD_ABOVE,
    )


def build_steps_table(found: pd.DataFrame) -> Table:
    """Build the table of one step as the profiled pass recorded it."""
    kernels: Column = ("kernels", lambda r: format_number(r["kernels"] or None))
    return make_table(
        "One step, from the profiled pass",
        found,
        [
            ("layout", "label"),
            ("step ms [95 %]", lambda r: format_with_interval(r["step_ms"], r["step_ms_low"], r["step_ms_high"])),
            *make_columns(metrics.PROFILE_TABLE, idle_fraction=("GPU idle", _format_idle), kernels=kernels),
        ],
        load=True,
        fold=len(found) > FOLD_ABOVE,
    )


def build_served_table(found: pd.DataFrame, mode: str) -> Table:
    """Build the table of rates and latencies of every served point of a mode."""
    rows, others = select_mode(found, mode), bool((found["origin"] != OURS).any()) and _names_runs(found)
    drafted = metrics.DRAFTED if len(rows) and rows["tokens_per_step"].notna().any() else ()
    kv = METRIC["kv_capacity_tokens"]
    held: Column = (kv.heading, lambda r: format_metric(kv, r["kv_tokens_of_all"]))
    return make_table(
        load_labels.SERVED[mode],
        rows.assign(telling=[warning or ABSENT for warning in point_warnings.format_distinct_warnings(rows)]),
        [
            *LOADED,
            *[("origin", "engine")][:others],
            ("warnings", "telling"),
            *make_columns(metrics.SERVED_TABLE, kv_capacity_tokens=held),
            *make_columns(drafted),
            ("SLO", "slo_result"),
            *make_columns(metrics.SERVED_COUNTS, finished=("finished", _format_finished)),
            APART,
        ],
        text_columns=4 + others,
        optional=("warnings", "SLO", "goodput req/s", "repeats apart", kv.heading),
        fold=len(rows) > FOLD_ABOVE,
    )


def build_served_details(found: pd.DataFrame, mode: str) -> Table:
    """Build the table of the other latencies and of step statistics."""
    rows = select_mode(found, mode)
    instead: dict[str, Column] = {
        "decode_steps": (
            "decode steps, of all",
            lambda r: format_percent(r["decode_steps"] / r["steps"] if r["steps"] else None),
        ),
        "idle_fraction": ("GPU idle between steps", _format_idle),
        "host_syncs_per_step": make_column(METRIC["host_syncs_per_step"], "host syncs per step"),
    }
    return make_table(
        f"More of each point, {mode}",
        rows,
        [*LOADED, *make_columns(metrics.SERVED_DETAILS, **instead)],
        text_columns=3,
        optional=("GPU idle between steps", "host syncs per step", *(METRIC[name].heading for name in metrics.FLOORS)),
        fold=len(rows) > FOLD_ABOVE // 4,
    )


def build_replay_table(found: pd.DataFrame) -> Table:
    """Build the table of deviations of replays from live runs."""
    compared = [*LOADED]
    for metric in metrics.REPLAYED:
        compared += [
            make_column(metric, f"{metric.in_brief} live"),
            ("error", _make_error_formatter(f"{metric.name}_error")),
        ]
    cpu = " (CPU: functional run)" if len(found) and found["cpu"].any() else ""
    return make_table(f"Replay against live{cpu}: replay / live - 1", found, compared, text_columns=3)


def build_kv_table(found: pd.DataFrame) -> Table:
    """Build the table of KV capacity per layout."""
    return make_table(
        "KV cache by layout (the point with the largest pool)",
        found,
        [
            *make_text_columns("model", "layout"),
            ("bounded by", "kv_bounded_by"),
            *make_columns(metrics.KV_TABLE),
            ("tokens per GiB per GPU", lambda r: format_integer(r["kv_tokens_per_gib"])),
            ("over tp alone", lambda r: format_ratio(r["kv_ratio"], 2)),
            ("tokens in all", lambda r: format_integer(r["kv_capacity_tokens"])),
        ],
        text_columns=3,
    )


def build_others_table(found: pd.DataFrame, *, engines: bool = False) -> Table:
    """Build the table of failed, hung and rejected points, grouped by reason; with `engines`, runs are engines."""
    rows = []
    load = "context × concurrency" if found["load"].isna().all() else "load"
    same = ["run", "model", "layout", "outcome", "message"]
    for key, group in itertools.islice(sort_commonest_first(found).groupby(same, sort=False), MAX_ROWS):
        plain = group[group["load"].isna()]
        loads = sorted({(int(c), int(n)) for c, n in zip(plain["context"], plain["concurrency"], strict=True)})
        served = dict.fromkeys(f"{r['mode']}: {r['load']}" for _, r in group[group["load"].notna()].iterrows())
        detail = group["detail"].iloc[0]
        row = {
            load: ", ".join([*(f"{c:,} × {n}" for c, n in loads), *served]),
            "reason": group["reason"].iloc[0],
            "detail": detail if len(detail) <= MAX_DETAIL_CHARS else f"… {detail[-MAX_DETAIL_CHARS:]}",
        }
        rows.append(dict(zip(same, key, strict=True)) | row)
    table = pd.DataFrame(rows)
    table = table.rename(columns={"run": "engine"}) if engines and rows else table
    shown = make_text_columns(*(["engine"] if engines else []), "model", "layout", "outcome", load, "reason", "detail")
    title = "Failed, hung and rejected points"
    folded = len(rows) > FOLD_ABOVE // 4
    return make_table(title, table, shown, text_columns=len(shown), optional=("detail",), fold=folded)


def build_repeats_table(found: pd.DataFrame, *, served: bool = False) -> Table:
    """Build the table of points for which repeats disagree: of `decode`, or served ones."""
    apart = found[found["apart"] > REPEATS_AGREE_WITHIN].sort_values("apart", ascending=False) if len(found) else found
    shown: list[Column] = [
        *make_text_columns("model", "layout"),
        ("context", lambda r: load_labels.format_context(r["context"], r["routing"])),
        *make_text_columns("concurrency"),
        ("step medians ms", lambda r: ", ".join(format_number(m) for m in r["medians_ms"])),
    ]
    if served:
        ends = ("output_tok_s_low", "output_tok_s_high")
        shown = [*LOADED, ("output tok/s", lambda r: " to ".join(format_number(r[end]) for end in ends))]
    return make_table(
        f"{'Served points' if served else 'Points'} whose repeats differ by more than {REPEATS_AGREE_WITHIN * 100:.0f} %"
        f"{' in output throughput' if served else ''}",
        apart,
        [*shown, ("apart", lambda r: format_percent(r["apart"]))],
        text_columns=3 if served else 2,
    )


def build_conditions_table(found: pd.DataFrame) -> Table:
    """Build the table of measurement conditions per layout; imported points have none."""
    found = found[found["origin"] == OURS] if len(found) else found
    rows, busiest = [], "busiest_rank_experts"
    groups: Iterable[Any] = found.groupby(["run", "model", "label"], sort=False) if len(found) else ()
    for (run, model, label), group in itertools.islice(groups, MAX_ROWS):
        layers = _format_range(group["layers"], 0)
        rows.append(
            {
                "run": run,
                "model": model,
                "layout": label,
                "weights": group["weights"].iloc[0],
                "CUDA graph": _format_yes_no(group["cuda_graph"]),
                "layers held": ABSENT if layers == ABSENT else f"{_format_range(group['layers_held'], 0)} of {layers}",
                "experts hit": _format_range(group["experts_hit"], 2),
                **({"busiest rank's experts": _format_range(group[busiest], 2)} if busiest in group else {}),
                "worst attention error": format_number(group["attention_error"].max(), 2),
                "peak GiB per GPU": format_gib(group["memory_peak_bytes"].max()),
            }
        )
    shown = make_text_columns(*list(rows[0])[1:]) if rows else []
    return make_table("Measurement conditions", pd.DataFrame(rows), shown, text_columns=4)


def build_runs_table(frames: Frames) -> Table:
    """Build the table with one row per run as read, not per engine."""
    rows = []
    for run in frames.runs:
        outcomes = [r.outcome for r in run.records]
        env = next((r.environment for r in run.records if r.environment), None)
        device = next(filter(None, map(get_device, run.records)), None)
        started = min((r.started_at for r in run.records if r.started_at), default=None)
        origins = [parse_origin(name) for name in dict.fromkeys(map(get_origin, run.records))]
        versions = [origin.label for origin in origins if origin.engine]
        versions += [
            f"{n} {getattr(env, n)}"
            for n in ("dcpbench", "torch", "cuda", "flashinfer", "flash_mla")
            if getattr(env, n, None)
        ]
        counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
        rows.append(
            [
                run.name,
                format_text(format_hardware(env) if env else device),
                ", ".join(versions) or ABSENT,
                format_text(started),
                *counts,
            ]
        )
    return Table("Runs", ["run", "hardware", "versions", "started (UTC)", *OUTCOMES], rows, text_columns=4)


def build_environment_table(frames: Frames) -> Table:
    """Build the table of versions and hardware, with one column per distinct environment."""
    columns: dict[str, dict[str, str]] = {}
    for run in frames.runs:
        for record in run.records:
            if (env := record.environment) is not None:
                values = {f: getattr(env, f) for f in env.__struct_fields__ if f != "command"}
                for name in ("device_memory_bytes", "l2_bytes"):
                    values[name] = None if values[name] is None else f"{values[name]:,}"
                values["settings"] = " ".join(f"{name}={value}" for name, value in sorted(env.settings.items()))
                shown = {name.replace("_", " "): format_text(value) for name, value in values.items()}
                if shown not in columns.values():
                    columns[run.name if run.name not in columns else f"{run.name} ({len(columns) + 1})"] = shown
    names = list(next(iter(columns.values()), {}))
    if all(column["dcpbench"] == ABSENT for column in columns.values()):  # imports, which have few of these values
        names = [name for name in names if any(column[name] != ABSENT for column in columns.values())]
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    return Table("Environment", ["what", *columns], rows, text_columns=1 + len(columns))


def select_mode(found: pd.DataFrame, mode: str) -> pd.DataFrame:
    """Return the points of a mode, if there are any points."""
    return found[found["mode"] == mode] if len(found) else found


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
    """Build a table of rows formatted by `columns`; the run is shown only if there are several, and the load first if requested."""
    if found.empty:
        return Table(title, [], [])
    first = _make_run_columns(found)
    if load:
        first += make_text_columns("model")
        first += [
            ("context", lambda r: load_labels.format_context(r["context"], r["routing"])),
            ("concurrency", lambda r: f"{r['concurrency']:,}"),
        ]
    columns = [*first, *columns]
    if len(found) > MAX_ROWS:
        title = f"{title} (the first {MAX_ROWS:,} of {len(found):,}; points.csv has every point)"
        found = found.head(MAX_ROWS)
    texts = [[format_text(r[s]) if isinstance(s, str) else s(r) for _, s in columns] for r in found.to_dict("records")]
    rows = [[fit_text(cell, MAX_CELL_CHARS) for cell in row] for row in texts]
    theirs = "origin" in found and OURS not in set(found["origin"])  # omit columns that no file has a value for
    keep = [
        i
        for i, (name, _) in enumerate(columns)
        if not (theirs or name in optional) or any(r[i] != ABSENT for r in rows)
    ]
    words = sum(i < len(first) + text_columns for i in keep)
    return Table(title, [columns[i][0] for i in keep], [[r[i] for i in keep] for r in rows], words, fold)


def format_cut(*parts: tuple[int, int, str]) -> str:
    """Return which parts of a grid, each given as the number shown, the number of all and its name, are not all shown."""
    texts = [f"{shown:,} of {count:,} {name}" for shown, count, name in parts if shown < count]
    return f" (shown: {', '.join(texts)}; points.csv has every point)" if texts else ""


def _make_run_columns(found: pd.DataFrame) -> list[Column]:
    """Return the column with the run, or with the engine if each engine is shown as one run; empty for a single one."""
    if "run" not in found or len(set(found["run"])) == 1:
        return []
    return [("run" if _names_runs(found) else "engine", "run")]


def _names_runs(found: pd.DataFrame) -> bool:
    """Return True unless the column `run` holds the names of engines."""
    return "run_label" not in found or not found["run_label"].eq(found["run"]).all()


def _format_idle(row: pd.Series[Any]) -> str:
    """Return how long the GPU idled; a CPU has no such value."""
    return ABSENT if row["cpu"] else format_percent(row["idle_fraction"])


def _format_finished(row: pd.Series[Any]) -> str:
    if is_missing(row["finished"]):
        return ABSENT
    of = "" if is_missing(row["submitted"]) else f" of {row['submitted']:,.0f}"
    return f"{row['finished']:,.0f}{of}"


def _make_error_formatter(name: str) -> Callable[[Any], str]:
    return lambda r: ABSENT if is_missing(r[name]) else f"{r[name] * 100:+.1f} %"


def _format_range(values: pd.Series[Any], decimals: int) -> str:
    low, high = (ABSENT if is_missing(v) else f"{v:,.{decimals}f}" for v in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


def _format_yes_no(values: pd.Series[Any]) -> str:
    known = {bool(v) for v in values if not is_missing(v)}
    return ABSENT if not known else "partly" if len(known) > 1 else "yes" if True in known else "no"
