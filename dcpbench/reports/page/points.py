"""Convert the tables to data for the scripts of the page, with an array per column; nothing is computed here."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.axes import Role
from dcpbench.points.names import CLOSED, GAMMA, LIVE, TRACE_TIMES
from dcpbench.points.point import AXES, LOAD_AXES, select_point_axes
from dcpbench.records.metrics import METRIC, PAGE, PAGE_TABLE, Metric
from dcpbench.reports import launch_bands, load_labels, overview, point_warnings, style
from dcpbench.reports.figures import compute_floors_ms, compute_phases_ms, has_phases
from dcpbench.reports.findings import LOAD
from dcpbench.reports.reproduce import build_command
from dcpbench.show import figure_style
from dcpbench.show.layouts import format_css_colours
from dcpbench.show.numbers import is_missing
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.points.point import Point
    from dcpbench.reports.dataframes import Frames

MAX_POINTS = 20_000  # of a page; a browser draws these within seconds, and points.csv has all
DIGITS = 7  # number of significant digits in a page; points.csv has all
MAX_CELL_CHARS = 4000  # maximum number of characters of a sentence or a cell; records.jsonl has all
MAX_NAME_CHARS = 200  # maximum number of characters of a name in the page's data, where each point repeats it
MAX_COMMAND_CHARS = 2000  # a longer command contains a name that reports cut, and would select another point
PLAIN = (  # columns that the page takes from the tables and comparisons unchanged
    *("run", "layout", "label", "backend", "device", "kv_bounded_by"),
    *("baseline", "verdict", "rival", "who", "misses", "pays"),
)
NO_WARNING = "no warning"  # filter value for points without a warning
LOADS = {  # label and unit of the numbers of a load and layout
    "concurrency": ("concurrency", "requests"),
    "load_request_rate": ("request rate", "requests/s"),
    "context": ("context", "tokens"),
    "tp": ("GPUs (tp)", ""),
    "instances": ("instances", ""),
    "dp": ("attention replicas (dp)", ""),
    "dcp": ("KV shards (dcp)", ""),
}
FILTERS = {  # names in the page's data, with the label that the page shows
    "layout": "layout",
    **{axis.name: axis.title for axis in (*AXES, *LOAD_AXES) if axis.title},
    "load": "load",
    "origin": "measured by",
    "run": "run",
    "warnings": "warnings",
}
COLOURS = (*(name for name in FILTERS if name not in ("load", "warnings")), "backend", "device")
"""Names by which the reader's own chart can be coloured."""
PHASE = "phase:"
IDLE = f"{PHASE}idle"
Columns = dict[str, list[Any]]  # values of each name, for all points in order
ExtraValues = dict[tuple[Any, ...], dict[str, Any]]  # additional values of points, keyed by the columns SAME


def format_brief(text: object, most: int = MAX_CELL_CHARS) -> str:
    """Return the beginning of a text, with the number of characters left out."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({format_count(len(whole) - most, 'more character')})"


def _make_field(name: str, label: str, unit: str, metric: Metric | None = None) -> dict[str, Any]:
    ranged = metric is not None and metric.ranged
    return {"name": name, "label": label, "unit": unit, "table": metric in PAGE_TABLE, "range": ranged}


FIELDS = [  # numeric fields of a point on the page, in order
    *(_make_field(name, *words) for name, words in LOADS.items()),
    *(_make_field(metric.name, metric.label, metric.shown_unit or "", metric) for metric in PAGE),
    _make_field("repeats", "repeats", ""),
]


def build_page_data(frames: Frames) -> dict[str, Any]:
    """Return the data for the scripts of the page: columns of the first MAX_POINTS points, the looks of their series, and all names."""
    tables = [table for table in (frames.points, frames.served) if len(table)]
    series = _Series(frames)
    extras = [_collect_ratios(frames), _collect_other_ratios(frames)]
    parts: list[Columns] = []
    count = 0
    for table in tables:
        if len(part := table.head(max(MAX_POINTS - count, 0))):
            telling = [text or None for text in point_warnings.format_distinct_warnings(table)[: len(part)]]
            parts.append(_build_columns(part, extras, series) | {"telling": telling})
            count += len(part)
    names = dict.fromkeys(name for part in parts for name in part)
    sizes = [len(next(iter(part.values()))) for part in parts]
    columns = {
        name: [value for part, size in zip(parts, sizes, strict=True) for value in part.get(name, [None] * size)]
        for name in names
    }
    columns = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return {
        "columns": columns,
        "count": count,
        "total": sum(map(len, tables)),
        "cpu": frames.cpu,
        "series": series.looks,
        "phases": [name.removeprefix(PHASE) for name in names if name.startswith(PHASE) and name != IDLE],
        "fields": [field for field in FIELDS if field["name"] in columns],
        "watermark": figure_style.WATERMARK,
        "log_range": figure_style.LOG_RANGE,
        "level": launch_bands.find_largest(frames.everything),
        "single": launch_bands.has_single_launches(frames.everything),
        "lacks_memory": _list_rejected(frames),
        "filters": FILTERS | ({"run": "engine"} if frames.engines else {}),
        "colours": COLOURS,
    }


def _list_rejected(frames: Frames) -> list[dict[str, Any]]:
    """Return the points of `decode` that were rejected for memory, with the panel in which each would have been."""
    lost = overview.select_rejected_for_memory(frames)
    rows = lost[lost["mode"] == "decode"].to_dict("records") if len(lost) else []
    return [
        {
            "panel": _format_decode_panel(r["model"], r["context"], r["routing"]),
            "run": r["run"],
            "model": r["model"],
            "layout": r["layout"],
            "concurrency": r["concurrency"],
        }
        for r in rows
    ]


LOOPS = {CLOSED: "closed loop", GAMMA: "open loop"}  # text for each kind of arrival
SAME = [*LOAD, "label"]  # columns that only a point and its comparison with its baseline share


def _collect_ratios(frames: Frames) -> ExtraValues:
    """Return the comparison of each DCP point with its baseline; ambiguous entries, which two points share, are dropped."""
    found = frames.findings.ratios
    if found.empty:
        return {}
    found = found[found["ratio"].notna()].drop_duplicates(SAME, keep=False)
    names = {"ratio": "dcp_ratio", "low": "dcp_ratio_low", "high": "dcp_ratio_high"}
    kept = load_labels.list_rows(found.rename(columns=names)[[*SAME, *names.values(), "baseline", "verdict"]])
    return {tuple(row[name] for name in SAME): row for row in kept}


def _collect_other_ratios(frames: Frames) -> ExtraValues:
    """Return the comparison of each layout's best point of a load with the best other layout."""
    found = frames.findings.against_others
    if found.empty:
        return {}
    own = [name for name in found if name in SAME or name not in frames.findings.points]
    kept = found[own].drop_duplicates(SAME, keep=False)
    return {
        tuple(row[name] for name in SAME): {"other_ratio": row["ratio"], "rival": row["rival"], "who": row["who"]}
        | {"misses": None if row["meets"] else 1, "pays": 1 if row["pays"] else None}
        for row in kept.to_dict("records")
    }


def _build_columns(table: pd.DataFrame, extras: list[ExtraValues], series: _Series) -> Columns:
    """Return the points of one kind as columns: text, numbers in the units of FIELDS, and the ends of their intervals."""
    same = list(zip(*(table[name] for name in SAME), strict=True))
    more: list[dict[str, Any]] = [
        {name: value for of in extras for name, value in of.get(key, {}).items()} for key in same
    ]
    extra_names = {name for row in more for name in row}

    def get_column(name: str) -> list[Any]:
        own = table[name].tolist() if name in table else [None] * len(table)
        return [row.get(name, value) for row, value in zip(more, own, strict=True)] if name in extra_names else own

    served = bool((table["mode"] != "decode").any())
    points = build_points(table)
    found: Columns = {axis.name: get_column(axis.name) for axis in AXES if axis.title}
    found |= {name: get_column(name) for name in PLAIN}
    found |= {
        "origin": get_column("engine"),
        "settings": [text or None for text in get_column("settings")],
        "exchange": _format_exchanges(table, points),
        "mode": get_column("mode") if served else [LIVE] * len(table),
        "load": get_column("rest") if served else ["decode"] * len(table),
        "panel": _format_panels(table, served=served),
        "arrival": get_column("load_arrival"),
        "warnings": [
            [warning for warning in warnings if warning] or [NO_WARNING] for warnings in get_column("warnings")
        ],
        "other_ratio": _to_json_numbers(get_column("other_ratio")),
        "samples": [
            steps or tokens for steps, tokens in zip(get_column("samples"), get_column("itl_samples"), strict=True)
        ],
    }
    found = {
        name: [format_brief(v, MAX_NAME_CHARS) if isinstance(v, str) else v for v in values]
        for name, values in found.items()
    }
    for field in FIELDS:
        name, scale = field["name"], METRIC[field["name"]].scale if field["name"] in METRIC else 1.0
        for end in ("", "_low", "_high") if field["range"] else ("",):
            found[name + end] = _to_json_numbers(get_column(name + end), scale)
    found["context"] = [context or None for context in found["context"]]  # 0 if another tool's file lacks it
    if has_phases(table):
        spent = compute_phases_ms(table)
        found |= {f"{PHASE}{name}": _to_json_numbers(spent[name].tolist()) for name in spent}
        floors = compute_floors_ms(table)
        found |= {f"floor:{name}": _to_json_numbers(floors[name].tolist()) for name in floors}
        found[IDLE] = _to_json_numbers(get_column("idle_us"), 1e-3)
    return found | {"series": series.find_indices(table), "command": _make_commands(table, points)}


def _format_exchanges(table: pd.DataFrame, points: list[Point]) -> list[str]:
    """Return the exchange of each point with its options, formatted once per distinct combination."""
    options = list(zip(*(table[axis.name] for axis in select_point_axes(Role.EXCHANGE)), strict=True))
    labels = {
        key: point.format_exchange_label() or point.exchange
        for key, point in dict(zip(options, points, strict=True)).items()
    }
    return [labels[key] for key in options]


def _format_panels(table: pd.DataFrame, *, served: bool) -> list[str]:
    """Return the panel of each point; points of a panel differ only in layout, computation, and load."""
    if not served:
        return list(map(_format_decode_panel, table["model"], table["context"], table["routing"]))
    rows = zip(table["model"], table["load_arrival"], table["rest"], table["mode"], strict=True)
    return [f"{model}, {LOOPS.get(arrival, TRACE_TIMES)}, {rest}, {mode}" for model, arrival, rest, mode in rows]


def _format_decode_panel(model: str, context: int, routing: str) -> str:
    return load_labels.SEPARATOR.join(
        filter(None, (f"{model}, context {context:,} tokens", load_labels.format_routing(routing)))
    )


def _to_json_numbers(values: list[Any], scale: float = 1.0) -> list[float | int | None]:
    """Return the values in the unit shown, rounded to DIGITS; null for values that were not measured."""

    def convert(value: Any) -> float | int | None:  # noqa: ANN401 - whatever a table holds
        if is_missing(value) or isinstance(value, str):
            return None
        scaled = value if scale == 1 else value * scale
        return scaled if isinstance(scaled, int) else float(f"{scaled:.{DIGITS}g}")

    return list(map(convert, values))


def build_points(table: pd.DataFrame) -> list[Point]:
    """Return the point of each row, as its first repeat."""
    return [msgspec.structs.replace(record.point, repeat=0) for record in table["record"]]


LINE = ("workload", "layout", "variant", "run", "label")  # columns that points of one line share


class _Series:
    """Assign each point to a line, and define the look of each line."""

    def __init__(self, frames: Frames) -> None:
        self.looks: list[dict[str, Any]] = []
        self._styles: dict[bool, style.Style] = {}
        tables = {served: t for served, t in ((False, frames.points), (True, frames.served)) if len(t)}
        if tables:
            runs = load_labels.list_unique(frames.everything["run"])
            self._styles = {s: dataclasses.replace(style.Style.from_points(t), runs=runs) for s, t in tables.items()}

    def find_indices(self, table: pd.DataFrame) -> list[int]:
        """Return the index of each row's series in `looks`."""
        look = self._styles[bool((table["mode"] != "decode").any())]
        keys = list(zip(*(table[name].astype(str) for name in LINE), strict=True))
        places: dict[tuple[str, ...], int] = {}
        for key in dict.fromkeys(keys):
            _, layout, variant, run, label = key
            several = f", {run}" if len(look.runs) > 1 else ""
            name = format_brief(f"{label}{several}", MAX_NAME_CHARS)
            dash, symbol = look.find_places(layout, variant, run)
            places[key] = len(self.looks)
            self.looks.append(
                {"name": name, "colour": format_css_colours(look.find_degrees(layout)), "dash": dash, "symbol": symbol}
            )
        return [places[key] for key in keys]


def _make_commands(table: pd.DataFrame, points: list[Point]) -> list[str | None]:
    """Return each point's command, with the settings of its record.

    The command is null for a point of another tool, for a point that no option can express, and for a command that
    would be too long.
    """
    commands = []
    for record, point, cpu in zip(table["record"], points, table["cpu"].tolist(), strict=True):
        command = ""
        with contextlib.suppress(UsageError):
            command = "" if record.origin else build_command(point, record.measured_with, cpu=bool(cpu))
        commands.append(command if 0 < len(command) <= MAX_COMMAND_CHARS else None)
    return commands
