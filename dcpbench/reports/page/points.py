"""Convert the tables to data for the scripts of the page, with an array per column; nothing is computed here."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.axes import Role
from dcpbench.points.names import CLOSED, GAMMA, LIVE, TRACE_TIMES
from dcpbench.points.point import AXES, LOAD_AXES, Load, Point, point_axes
from dcpbench.records.metrics import METRIC, PAGE, PAGE_TABLE, Metric
from dcpbench.reports import launch_bands, marks, overview, style, words
from dcpbench.reports.figures import floors_in_ms, has_phases, phases_in_ms
from dcpbench.reports.findings import LOAD
from dcpbench.reports.frames import same_load
from dcpbench.reports.reproduce import command_of
from dcpbench.show import figures
from dcpbench.show.layouts import themed
from dcpbench.show.numbers import missing

if TYPE_CHECKING:
    import pandas as pd

    from dcpbench.records.record import Record
    from dcpbench.reports.frames import Frames

MOST_POINTS = 20_000
"""Maximum number of points that a page holds; a browser draws these within seconds, and points.csv has all."""
DIGITS = 7
"""Number of significant digits in a page; points.csv has all."""
LONGEST = 4000
"""Maximum number of characters of a sentence or a cell; records.jsonl has all."""
LONGEST_NAME = 200
"""Maximum number of characters of a name in the page's data, where each point repeats it."""
LONGEST_COMMAND = 2000
"""Maximum number of characters of a command; a longer one contains a name that reports cut, and would select another
point.
"""
UNMARKED = "unmarked"
"""Filter value for points without a warning."""
LOADS = {
    "concurrency": ("concurrency", "requests"),
    "load_request_rate": ("request rate", "requests/s"),
    "context": ("context", "tokens"),
    "tp": ("GPUs (tp)", ""),
    "instances": ("instances", ""),
    "dp": ("attention replicas (dp)", ""),
    "dcp": ("KV shards (dcp)", ""),
}
"""Label and unit of the numbers of a load and layout."""
FILTERS = {
    "layout": "layout",
    **{axis.name: axis.title for axis in (*AXES, *LOAD_AXES) if axis.title},
    "load": "load",
    "origin": "measured by",
    "run": "run",
    "marks": "marks",
}
"""Names in the page's data, with the label that the page shows."""
COLOURS = (*(name for name in FILTERS if name not in ("load", "marks")), "backend", "device")
"""Names by which the reader's own chart can be coloured."""
PHASE = "phase:"
IDLE = f"{PHASE}idle"
Columns = dict[str, list[Any]]
"""Values of each name, for all points in order."""
Told = dict[tuple[Any, ...], dict[str, Any]]
"""Additional values of points, keyed by the columns SAME."""


def brief(text: object, most: int = LONGEST) -> str:
    """Return the beginning of a text, with the number of characters left out."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}… ({len(whole) - most:,} more characters)"


def _field(name: str, label: str, unit: str, metric: Metric | None = None) -> dict[str, Any]:
    ranged = metric is not None and metric.ranged
    return {"name": name, "label": label, "unit": unit, "table": metric in PAGE_TABLE, "range": ranged}


FIELDS = [
    *(_field(name, *words) for name, words in LOADS.items()),
    *(_field(metric.name, metric.label, metric.shown_unit or "", metric) for metric in PAGE),
    _field("repeats", "repeats", ""),
]
"""Numeric fields of a point on the page, in order."""


def page_data(frames: Frames, most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the data for the scripts of the page: columns of the first `most` points, the looks of their series, and
    all names.
    """
    tables = [table for table in (frames.points, frames.served) if len(table)]
    series, recorded = _Series(frames), _recorded(frames)
    told = [_ratios(frames), _over_others(frames)]
    parts: list[Columns] = []
    count = 0
    for table in tables:
        if len(part := table.head(max(most - count, 0))):
            telling = [said or None for said in marks.telling(table)[: len(part)]]
            parts.append(_columns(part, told, series, recorded) | {"telling": telling})
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
        "watermark": figures.WATERMARK,
        "log_range": figures.LOG_RANGE,
        "level": launch_bands.find_largest(frames.everything),
        "single": launch_bands.are_single(frames.everything),
        "no_room": _no_room(frames),
        "filters": FILTERS,
        "colours": COLOURS,
    }


def _no_room(frames: Frames) -> list[dict[str, Any]]:
    """Return the points of `decode` that were rejected for memory, with the panel in which each would have been."""
    lost = overview.no_room(frames)
    rows = lost[lost["mode"] == "decode"].to_dict("records") if len(lost) else []
    return [
        {
            "panel": f"{r['model']}, context {r['context']:,} tokens",
            "run": r["run"],
            "layout": r["layout"],
            "concurrency": r["concurrency"],
        }
        for r in rows
    ]


LOOPS = {CLOSED: "closed loop", GAMMA: "open loop"}
"""Text for each kind of arrival."""
SAME = [*LOAD, "label"]
"""Columns that only a point and its comparison with its baseline share."""


def _ratios(frames: Frames) -> Told:
    """Return the comparison of each DCP point with its baseline; ambiguous entries, which two points share, are
    dropped.
    """
    found = frames.findings.ratios
    if found.empty:
        return {}
    found = found[found["ratio"].notna()].drop_duplicates(SAME, keep=False)
    names = {"ratio": "dcp_ratio", "low": "dcp_ratio_low", "high": "dcp_ratio_high"}
    kept = found.rename(columns=names)[[*SAME, *names.values(), "baseline", "verdict"]].to_dict("records")
    return {tuple(row[name] for name in SAME): {str(k): v for k, v in row.items()} for row in kept}


def _over_others(frames: Frames) -> Told:
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


def _columns(
    table: pd.DataFrame,
    told: list[Told],
    series: _Series,
    recorded: dict[tuple[str, Point, str], Record],
) -> Columns:
    """Return the points of one kind as columns: text, numbers in the units of FIELDS, and the ends
    of their intervals.
    """
    same = list(zip(*(table[name] for name in SAME), strict=True))
    more: list[dict[str, Any]] = [
        {name: value for of in told for name, value in of.get(key, {}).items()} for key in same
    ]
    beside = {name for row in more for name in row}

    def of(name: str) -> list[Any]:
        own = table[name].tolist() if name in table else [None] * len(table)
        return [row.get(name, value) for row, value in zip(more, own, strict=True)] if name in beside else own

    served = bool((table["mode"] != "decode").any())
    asked = points_of(table)
    found: Columns = {axis.name: of(axis.name) for axis in AXES if axis.title}
    found |= {name: of(name) for name in ("run", "layout", "label", "backend", "device", "origin")}
    found |= {
        "settings": [said or None for said in of("settings")],
        "exchange": _exchanges(table, asked),
        "mode": of("mode") if served else [LIVE] * len(table),
        "load": of("rest") if served else ["decode"] * len(table),
        "panel": _panels(table, served=served),
        "arrival": of("load_arrival"),
        "marks": [[mark for mark in said.split(", ") if mark] or [UNMARKED] for said in of("marks")],
        "kv_bounded_by": of("kv_bounded_by"),
        "baseline": of("baseline"),
        "verdict": of("verdict"),
        "other_ratio": _numbers(of("other_ratio")),
        "rival": of("rival"),
        "who": of("who"),
        "misses": of("misses"),
        "pays": of("pays"),
        "samples": [steps or tokens for steps, tokens in zip(of("samples"), of("itl_samples"), strict=True)],
    }
    found = {name: [_short(value) for value in values] for name, values in found.items()}
    for field in FIELDS:
        name, scale = field["name"], METRIC[field["name"]].scale if field["name"] in METRIC else 1.0
        for end in ("", "_low", "_high") if field["range"] else ("",):
            found[name + end] = _numbers(of(name + end), scale)
    found["context"] = [context or None for context in found["context"]]  # 0 if another tool's file lacks it
    if has_phases(table):
        spent = phases_in_ms(table)
        found |= {f"{PHASE}{name}": _numbers(spent[name].tolist()) for name in spent}
        floors = floors_in_ms(table)
        found |= {f"floor:{name}": _numbers(floors[name].tolist()) for name in floors}
        found[IDLE] = _numbers(of("idle_us"), 1e-3)
    return found | {"series": series.of(table), "command": _commands(table, asked, recorded)}


def _exchanges(table: pd.DataFrame, asked: list[Point]) -> list[str]:
    """Return the exchange of each point with its options, formatted once per distinct combination."""
    options = list(zip(*(table[axis.name] for axis in point_axes(Role.EXCHANGE)), strict=True))
    said = {
        key: point.exchange_label() or point.exchange for key, point in dict(zip(options, asked, strict=True)).items()
    }
    return [said[key] for key in options]


def _short(value: Any) -> Any:  # noqa: ANN401 - whatever a table holds
    return brief(value, LONGEST_NAME) if isinstance(value, str) else value


def _panels(table: pd.DataFrame, *, served: bool) -> list[str]:
    """Return the panel of each point; points of a panel differ only in layout, computation, and load."""
    if not served:
        pairs = zip(table["model"], table["context"], strict=True)
        return [f"{model}, context {context:,} tokens" for model, context in pairs]
    said = zip(table["model"], table["load_arrival"], table["rest"], table["mode"], strict=True)
    return [f"{model}, {LOOPS.get(arrival, TRACE_TIMES)}, {rest}, {mode}" for model, arrival, rest, mode in said]


def _numbers(values: list[Any], scale: float = 1.0) -> list[float | int | None]:
    """Return the values in the unit shown, rounded to DIGITS; null for values that were not measured."""
    return [
        None if value is None or value != value or isinstance(value, str) else _number(value, scale)  # noqa: PLR0124 - NaN
        for value in values
    ]


def _number(value: float, scale: float) -> float | int:
    value = value if scale == 1 else value * scale
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def points_of(table: pd.DataFrame) -> list[Point]:
    """Return the point of each row, as its first repeat."""
    fields = [name for name in Point.__struct_fields__ if name not in ("repeat", "load")]
    loads: list[Load | None] = [None] * len(table)
    if (table["mode"] != "decode").any():
        names = [name for name in Load.__struct_fields__ if name != "mode"]
        asked: Columns = {name: table[f"load_{name}"].tolist() for name in names}
        for place, mode in enumerate(table["mode"]):
            fields_of: dict[str, Any] = {n: None if missing(v := values[place]) else v for n, values in asked.items()}
            loads[place] = Load(mode=mode, **fields_of)
    rows = zip(*(table[name].tolist() for name in fields), strict=True)
    return [Point(**dict(zip(fields, row, strict=True)), load=load) for row, load in zip(rows, loads, strict=True)]


LINE = ("workload", "layout", "variant", "run", "label")
"""Columns that points of one line share; the label follows from the layout and the variant."""


class _Series:
    """Assign each point to a line, and define the look of each line."""

    def __init__(self, frames: Frames) -> None:
        self.looks: list[dict[str, Any]] = []
        self._places: dict[tuple[str, ...], int] = {}
        self._styles: dict[bool, style.Style] = {}
        tables = {served: t for served, t in ((False, frames.points), (True, frames.served)) if len(t)}
        if tables:
            runs = words.unique(frames.everything["run"])
            self._styles = {s: dataclasses.replace(style.Style.of(t), runs=runs) for s, t in tables.items()}

    def of(self, table: pd.DataFrame) -> list[int]:
        """Return the index of each row's series in `looks`."""
        look = self._styles[bool((table["mode"] != "decode").any())]
        keys = list(zip(*(table[name].astype(str) for name in LINE), strict=True))
        for key in dict.fromkeys(keys):
            _, layout, variant, run, label = key
            several = f", {run}" if len(look.runs) > 1 else ""
            name = brief(f"{label}{several}", LONGEST_NAME)
            dash, symbol = look.places(layout, variant, run)
            self._places[key] = len(self.looks)
            self.looks.append({"name": name, "colour": themed(layout), "dash": dash, "symbol": symbol})
        return [self._places[key] for key in keys]


def _recorded(frames: Frames) -> dict[tuple[str, Point, str], Record]:
    """Return the first record of each point, by run, point and load as sent."""
    found: dict[tuple[str, Point, str], Record] = {}
    for run in frames.runs:
        for record in run.records:
            if record.outcome == "ok":
                point = msgspec.structs.replace(record.point, repeat=0) if record.point.repeat else record.point
                found.setdefault((run.name, point, same_load(record)), record)
    return found


def _commands(
    table: pd.DataFrame, asked: list[Point], recorded: dict[tuple[str, Point, str], Record]
) -> list[str | None]:
    """Return each point's command, with the settings of its record.

    The command is null for a point of another tool, for a point that no option can express, and for a command that
    would be too long.
    """
    loads = table["same_load"].tolist() if any(point.load for point in asked) else [""] * len(asked)
    rows = zip(table["run"], asked, loads, table["cpu"].tolist(), strict=True)
    return [_command(point, recorded[run, point, load], cpu=bool(cpu)) for run, point, load, cpu in rows]


def _command(point: Point, record: Record, *, cpu: bool) -> str | None:
    try:
        command = None if record.origin else command_of(point, record.measured_with, cpu=cpu)
    except UsageError:
        command = None
    return command if command and len(command) <= LONGEST_COMMAND else None
