"""The tables of a report, as strings ready to print. An absent value is a dash, never 0."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.records import provenance
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.metrics import DECODE_TABLE, KV_TABLE, PROFILE_TABLE
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.show.numbers import ABSENT, count, gib, missing, number, percent, text, times, with_interval
from dcpbench.show.text import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dcpbench.records.metrics import Metric
    from dcpbench.reports.frames import Frames

FOLD_ABOVE = 24
"""Tables with more rows than this begin folded where they only support a figure."""
MOST_ROWS = 2_000
MOST_LETTERS = 1_000
"""Rows of a table, and letters of a cell: no one long name blows it up, and points.csv has more of it."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of plain strings."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    text_columns: int = 1
    """How many leading columns hold words; the others are numbers and go to the right."""
    fold: bool = False


def whole(value: float | None) -> str:
    """A count; the median of repeats may lie between two."""
    if value is None or missing(value):
        return ABSENT
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def shown(metric: Metric, value: float | None) -> str:
    """A metric's value in the unit that it is shown in."""
    if metric.shown_unit == "%":
        return percent(value)
    if metric.shown_unit == "GiB":
        return gib(value)
    return whole(value) if metric.whole else number(value, metric.digits)


def columns(metrics: Iterable[Metric], **instead: Column) -> list[Column]:
    """Metrics as columns, headed and printed as the catalogue says; some of them `instead` as their table has it."""
    return [instead.get(metric.name) or column(metric) for metric in metrics]


def column(metric: Metric, heading: str = "") -> Column:
    """One metric, perhaps with a heading of its table's own."""
    return heading or metric.heading, lambda row: shown(metric, row[metric.name])


def points(found: pd.DataFrame) -> Table:
    """Every point's numbers."""
    return make_table(
        "Medians; 95 % interval in brackets",
        found,
        [
            ("layout", lambda r: r["label"]),
            ("marks", lambda r: text(r["marks"])),
            ("output tok/s [95 %]", lambda r: with_interval(*(r[f"output_tok_s{x}"] for x in ("", "_low", "_high")))),
            *columns(DECODE_TABLE),
            ("SLO", lambda r: text(r["slo_said"])),
            ("steps", lambda r: f"{r['samples']:,.0f}" if r["samples"] else ABSENT),
            ("repeats apart", lambda r: percent(r["spread"])),
        ],
        load=True,
        text_columns=2,
        optional=("marks", "TTFT p50 ms", "SLO", "repeats apart"),
        fold=len(found) > FOLD_ABOVE,
    )


def steps(found: pd.DataFrame) -> Table:
    """What the profiled pass saw."""
    return make_table(
        "One step, from the profiled pass",
        found,
        [
            ("layout", lambda r: r["label"]),
            ("step ms [95 %]", lambda r: with_interval(r["step_ms"], r["step_ms_low"], r["step_ms_high"])),
            *columns(
                PROFILE_TABLE,
                idle_fraction=("GPU idle", idle),
                kernels=("kernels", lambda r: number(r["kernels"] or None)),
            ),
        ],
        load=True,
        fold=len(found) > FOLD_ABOVE,
    )


def kv(found: pd.DataFrame) -> Table:
    """KV capacity per layout."""
    return make_table(
        "KV cache by layout (the point with the largest pool)",
        found,
        [
            ("model", lambda r: r["model"]),
            ("layout", lambda r: r["layout"]),
            ("bounded by", lambda r: text(r["kv_bounded_by"])),
            *columns(KV_TABLE),
            ("tokens per GiB per GPU", lambda r: count(r["kv_tokens_per_gib"])),
            ("over tp alone", lambda r: times(r["kv_ratio"], 2)),
            ("tokens in all", lambda r: count(r["kv_capacity_tokens"])),
        ],
        text_columns=3,
    )


def others(found: pd.DataFrame) -> Table:
    """Failed, hung and rejected points, those with the same reason together."""
    rows = []
    same = ["run", "model", "layout", "outcome", "reason"]
    for (run, model, layout, outcome, reason), group in itertools.islice(found.groupby(same, sort=False), MOST_ROWS):
        plain = group[group["load"].isna()]
        loads = sorted({(int(c), int(n)) for c, n in zip(plain["context"], plain["concurrency"], strict=True)})
        served = dict.fromkeys(f"{r['mode']}: {r['load']}" for _, r in group[group["load"].notna()].iterrows())
        rows.append(
            {
                "run": run,
                "model": model,
                "layout": layout,
                "outcome": outcome,
                "reason": reason,
                "loads": ", ".join([*(f"{c:,} × {n}" for c, n in loads), *served]),
                "detail": _tail(group["detail"].iloc[0]),
            }
        )
    columns: list[Column] = [
        ("model", lambda r: text(r["model"])),
        ("layout", lambda r: text(r["layout"])),
        ("outcome", lambda r: text(r["outcome"])),
        ("context × concurrency" if found["load"].isna().all() else "load", lambda r: text(r["loads"])),
        ("reason", lambda r: text(r["reason"])),
        ("detail", lambda r: text(r["detail"])),
    ]
    title = "Failed, hung and rejected points"
    return make_table(title, pd.DataFrame(rows), columns, text_columns=6, optional=("detail",))


def repeats(found: pd.DataFrame) -> Table:
    """Points whose repeats disagree."""
    apart = found[found["apart"] > REPEATS_AGREE_WITHIN].sort_values("apart", ascending=False) if len(found) else found
    return make_table(
        f"Points whose repeats differ by more than {REPEATS_AGREE_WITHIN * 100:.0f} %",
        apart,
        [
            ("model", lambda r: r["model"]),
            ("layout", lambda r: r["layout"]),
            ("context", lambda r: f"{r['context']:,}"),
            ("concurrency", lambda r: str(r["concurrency"])),
            ("step medians ms", lambda r: ", ".join(number(m) for m in r["medians_ms"])),
            ("apart", lambda r: percent(r["apart"])),
        ],
        text_columns=2,
    )


def honesty(found: pd.DataFrame) -> Table:
    """What stood behind the numbers, per layout."""
    rows = []
    keys = ["run", "model", "label"]
    groups: Iterable[Any] = found.groupby(keys, sort=False) if len(found) else ()
    for (run, model, label), group in itertools.islice(groups, MOST_ROWS):
        rows.append(
            {
                "run": run,
                "model": model,
                "layout": label,
                "weights": group["weights"].iloc[0],
                "held": _range(group["layers_held"], 0),
                "layers": _range(group["layers"], 0),
                "hit": _range(group["experts_hit"], 2),
                "graph": _yes(group["cuda_graph"]),
                "error": group["attention_error"].max(),
                "peak": group["memory_peak_bytes"].max(),
            }
        )
    return make_table(
        "What stood behind the numbers",
        pd.DataFrame(rows),
        [
            ("model", lambda r: r["model"]),
            ("layout", lambda r: r["layout"]),
            ("weights", lambda r: text(r["weights"])),
            ("CUDA graph", lambda r: r["graph"]),
            ("layers held", lambda r: ABSENT if r["layers"] == ABSENT else f"{r['held']} of {r['layers']}"),
            ("experts hit", lambda r: r["hit"]),
            ("worst attention error", lambda r: number(r["error"], 2)),
            ("peak GiB per GPU", lambda r: gib(r["peak"])),
        ],
        text_columns=4,
    )


def runs(frames: Frames) -> Table:
    """One row per run."""
    rows = []
    for run in frames.runs:
        outcomes = [r.outcome for r in run.records]
        env = next((r.environment for r in run.records if r.environment), None)
        started = min((r.started_at for r in run.records if r.started_at), default=None)
        hardware = None if env is None else provenance.hardware(env)
        versions = [
            f"{n} {getattr(env, n)}" for n in ("dcpbench", "torch", "cuda", "flashinfer") if getattr(env, n, None)
        ]
        counts = [str(outcomes.count(outcome)) for outcome in OUTCOMES]
        rows.append([run.name, text(hardware), ", ".join(versions) or ABSENT, text(started), *counts])
    return Table("Runs", ["run", "hardware", "versions", "started (UTC)", *OUTCOMES], rows, text_columns=4)


def environment(frames: Frames) -> Table:
    """Versions and hardware, one column per run that says something different."""
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
    rows = [[name, *(column[name] for column in columns.values())] for name in names]
    return Table("Environment", ["what", *columns], rows, text_columns=1 + len(columns))


Column = tuple[str, "Callable[[Any], str]"]


def idle(row: pd.Series[Any]) -> str:
    """How much the GPU idled; a CPU has none."""
    return ABSENT if row["cpu"] else percent(row["idle_fraction"])


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
    """Rows printed by `columns`; the run only where there are several, the load first where it belongs there."""
    if found.empty:
        return Table(title, [], [])
    first: list[Column] = [("run", lambda r: str(r["run"]))] if "run" in found and len(set(found["run"])) > 1 else []
    if load:
        first += [
            ("model", lambda r: str(r["model"])),
            ("context", lambda r: f"{r['context']:,}"),
            ("concurrency", lambda r: f"{r['concurrency']:,}"),
        ]
    columns = [*first, *columns]
    if len(found) > MOST_ROWS:
        title = f"{title} (the first {MOST_ROWS:,} of {len(found):,}; points.csv has every point)"
        found = found.head(MOST_ROWS)
    rows = [[cut(show(row), MOST_LETTERS) for _, show in columns] for _, row in found.iterrows()]
    keep = [i for i, (name, _) in enumerate(columns) if name not in optional or any(r[i] != ABSENT for r in rows)]
    words = sum(i < len(first) + text_columns for i in keep)
    return Table(title, [columns[i][0] for i in keep], [[r[i] for i in keep] for r in rows], words, fold)


def _range(values: pd.Series[Any], decimals: int) -> str:
    low, high = (ABSENT if missing(v) else f"{v:,.{decimals}f}" for v in (values.min(), values.max()))
    return low if low == high else f"{low}–{high}"


def _yes(values: pd.Series[Any]) -> str:
    known = {bool(v) for v in values if not missing(v)}
    return ABSENT if not known else "partly" if len(known) > 1 else "yes" if True in known else "no"


def _tail(detail: str, most: int = 600) -> str:
    return detail if len(detail) <= most else "… " + detail[-most:]
