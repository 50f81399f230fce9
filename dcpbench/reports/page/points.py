"""Frames as data for the scripts of the page: an array per column. Nothing is computed anew."""

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
"""Points that a page holds; a browser draws these within seconds, and points.csv has all."""
DIGITS = 7
"""Significant digits of numbers in a page; points.csv has all."""
LONGEST = 4000
"""Characters of a sentence or a cell; records.jsonl has all."""
LONGEST_NAME = 200
"""Characters of a name in the page's data, where each point repeats it."""
LONGEST_COMMAND = 2000
"""Characters of a command; a longer one has a name that reports cut, and would ask for another point."""
UNMARKED = "unmarked"
"""Among the marks by which points are filtered: to have none."""
LOADS = {
    "concurrency": ("concurrency", "requests"),
    "load_request_rate": ("request rate", "requests/s"),
    "context": ("context", "tokens"),
    "tp": ("GPUs (tp)", ""),
    "instances": ("instances", ""),
    "dp": ("attention replicas (dp)", ""),
    "dcp": ("KV shards (dcp)", ""),
}
"""Numbers of its load and layout: their label and unit."""
FILTERS = {
    "layout": "layout",
    **{axis.name: axis.title for axis in (*AXES, *LOAD_AXES) if axis.title},
    "load": "load",
    "origin": "measured by",
    "run": "run",
    "marks": "marks",
}
"""Names in the page's data, and what the page calls them."""
COLOURS = (*(name for name in FILTERS if name not in ("load", "marks")), "backend", "device")
"""By what the chart that a reader makes can be coloured."""
PHASE = "phase:"
IDLE = f"{PHASE}idle"
Columns = dict[str, list[Any]]
"""The values of each name, of all points in order."""
Told = dict[tuple[Any, ...], dict[str, Any]]
"""What is known of points beside their own row, by SAME."""


def brief(text: object, most: int = LONGEST) -> str:
    """The beginning of a text, and how much of it is left out."""
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
"""What the page says of a point in numbers, in order."""


def page_data(frames: Frames, most: int = MOST_POINTS) -> dict[str, Any]:
    """What the scripts of the page read: columns of the first `most` points, looks of their series, and names of everything."""
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
    """For which points of `decode` there was no room, in the panel that each would have been in."""
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
"""When requests come."""
SAME = [*LOAD, "label"]
"""What only a point and its comparison with its baseline share."""


def _ratios(frames: Frames) -> Told:
    """What findings say of each DCP point and its baseline; nothing where two points would share it."""
    found = frames.findings.ratios
    if found.empty:
        return {}
    found = found[found["ratio"].notna()].drop_duplicates(SAME, keep=False)
    names = {"ratio": "dcp_ratio", "low": "dcp_ratio_low", "high": "dcp_ratio_high"}
    kept = found.rename(columns=names)[[*SAME, *names.values(), "baseline", "verdict"]].to_dict("records")
    return {tuple(row[name] for name in SAME): {str(k): v for k, v in row.items()} for row in kept}


def _over_others(frames: Frames) -> Told:
    """What overview says of each layout's best point of a load."""
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
    """Points of one kind: their words, their numbers in the units of FIELDS, and the ends of their intervals."""
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
    found["context"] = [context or None for context in found["context"]]  # 0 where another tool's file does not say
    if has_phases(table):
        spent = phases_in_ms(table)
        found |= {f"{PHASE}{name}": _numbers(spent[name].tolist()) for name in spent}
        floors = floors_in_ms(table)
        found |= {f"floor:{name}": _numbers(floors[name].tolist()) for name in floors}
        found[IDLE] = _numbers(of("idle_us"), 1e-3)
    return found | {"series": series.of(table), "command": _commands(table, asked, recorded)}


def _exchanges(table: pd.DataFrame, asked: list[Point]) -> list[str]:
    """Of each point, with its options; points of one label and exchange share what is said."""
    options = list(zip(*(table[axis.name] for axis in point_axes(Role.EXCHANGE)), strict=True))
    said = {
        key: point.exchange_label() or point.exchange for key, point in dict(zip(options, asked, strict=True)).items()
    }
    return [said[key] for key in options]


def _short(value: Any) -> Any:  # noqa: ANN401 - whatever a table holds
    return brief(value, LONGEST_NAME) if isinstance(value, str) else value


def _panels(table: pd.DataFrame, *, served: bool) -> list[str]:
    """Points of one panel differ in nothing but the layout, how it is computed, and how heavy the load is."""
    if not served:
        pairs = zip(table["model"], table["context"], strict=True)
        return [f"{model}, context {context:,} tokens" for model, context in pairs]
    said = zip(table["model"], table["load_arrival"], table["rest"], table["mode"], strict=True)
    return [f"{model}, {LOOPS.get(arrival, TRACE_TIMES)}, {rest}, {mode}" for model, arrival, rest, mode in said]


def _numbers(values: list[Any], scale: float = 1.0) -> list[float | int | None]:
    """In the unit shown, with DIGITS; null where nothing was measured."""
    return [
        None if value is None or value != value or isinstance(value, str) else _number(value, scale)  # noqa: PLR0124 - NaN
        for value in values
    ]


def _number(value: float, scale: float) -> float | int:
    value = value if scale == 1 else value * scale
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def points_of(table: pd.DataFrame) -> list[Point]:
    """The point that each row was made of, as its first repeat."""
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
"""What points of one line have in common; the label follows from the layout and the variant."""


class _Series:
    """Which line a point belongs to, and how that looks."""

    def __init__(self, frames: Frames) -> None:
        self.looks: list[dict[str, Any]] = []
        self._places: dict[tuple[str, ...], int] = {}
        self._styles: dict[bool, style.Style] = {}
        tables = {served: t for served, t in ((False, frames.points), (True, frames.served)) if len(t)}
        if tables:
            runs = words.unique(frames.everything["run"])
            self._styles = {s: dataclasses.replace(style.Style.of(t), runs=runs) for s, t in tables.items()}

    def of(self, table: pd.DataFrame) -> list[int]:
        """The place of each row's series in `looks`."""
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
    """The first record of each point, by run, point and load as sent."""
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
    """Each point's command, with the settings that its record was measured with.

    Null for a point of another tool, one that no option can say, and one that takes no bearable length.
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
