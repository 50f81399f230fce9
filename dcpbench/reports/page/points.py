"""Frames as data for the scripts of the page: an array per column. Nothing is computed anew."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import UsageError
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import CLOSED, GAMMA, LIVE
from dcpbench.points.point import AXES, LOAD_AXES, Load, Point
from dcpbench.records.metrics import METRIC, PAGE, PAGE_TABLE, Metric
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.reports import marks, overview, style
from dcpbench.reports.figures import has_phases, phases_in_ms
from dcpbench.reports.findings import LOAD
from dcpbench.reports.frames import same_load
from dcpbench.reports.reproduce import command_of
from dcpbench.show import figures
from dcpbench.show.numbers import missing

if TYPE_CHECKING:
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
Rows = list[dict[str, Any]]


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
    rows: Rows = []
    phases: dict[str, None] = {}
    series = _Series(frames)
    recorded = _recorded(frames)
    ratios = _ratios(frames)
    others = _over_others(frames)
    for table in tables:
        part = table.head(max(most - len(rows), 0))
        times = phases_in_ms(part).to_dict("records") if has_phases(part) else [{}] * len(part)
        told = marks.telling(table)[: len(part)]
        for named, spent, telling in zip(part.to_dict("records"), times, told, strict=True):
            row = {str(name): value for name, value in named.items()} | {"telling": telling or None}
            same = tuple(row[name] for name in SAME)
            row |= ratios.get(same, {}) | others.get(same, {})
            phases |= dict.fromkeys(map(str, spent))
            rows.append(_row(row, {str(k): v for k, v in spent.items()}) | series.of(row) | _command(row, recorded))
    total = sum(map(len, tables))
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(n for row in rows for n in row)}
    return {
        "columns": {name: values for name, values in columns.items() if any(v is not None for v in values)},
        "count": len(rows),
        "total": total,
        "cpu": frames.cpu,
        "series": series.looks,
        "phases": list(phases),
        "fields": [field for field in FIELDS if any(row.get(field["name"]) is not None for row in rows)],
        "watermark": figures.WATERMARK,
        "log_range": figures.LOG_RANGE,
        "level": REPEATS_AGREE_WITHIN,
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
            "layout": r["layout"],
            "concurrency": r["concurrency"],
        }
        for r in rows
    ]


SAME = [*LOAD, "label"]
"""What only a point and its comparison with its baseline share."""


def _ratios(frames: Frames) -> dict[tuple[str, ...], dict[str, Any]]:
    """What findings say of each DCP point and its baseline; nothing where two points would share it."""
    found = frames.findings.ratios
    if found.empty:
        return {}
    found = found[found["ratio"].notna()].drop_duplicates(SAME, keep=False)
    names = {"ratio": "dcp_ratio", "low": "dcp_ratio_low", "high": "dcp_ratio_high"}
    kept = found.rename(columns=names)[[*SAME, *names.values(), "baseline", "verdict"]].to_dict("records")
    return {tuple(row[name] for name in SAME): {str(k): v for k, v in row.items()} for row in kept}


def _over_others(frames: Frames) -> dict[tuple[str, ...], dict[str, Any]]:
    """What overview says of each layout's best point of a load."""
    found = overview.against_others(frames)
    if found.empty:
        return {}
    kept = found.drop_duplicates(SAME, keep=False)
    return {
        tuple(row[name] for name in SAME): {"other_ratio": row["ratio"], "rival": row["rival"], "who": row["who"]}
        | {"misses": None if row["meets"] else 1}
        for row in kept.to_dict("records")
    }


def _row(row: dict[str, Any], phases: dict[str, Any]) -> dict[str, Any]:
    """One point: its words, its numbers in the units of FIELDS, and the ends of their intervals."""
    found: dict[str, Any] = {axis.name: row[axis.name] for axis in AXES if axis.title} | {
        "run": row["run"],
        "layout": row["layout"],
        "label": row["label"],
        "backend": row["backend"],
        "device": row["device"],
        "origin": row.get("origin"),
        "settings": row["settings"] or None,
        "exchange": point_of(row).exchange_label() or row["exchange"],
        "mode": row["mode"] if _served(row) else LIVE,
        "load": row["rest"] if _served(row) else "decode",
        "panel": _panel(row),
        "arrival": row["load_arrival"],
        "marks": [mark for mark in row["marks"].split(", ") if mark] or [UNMARKED],
        "telling": row["telling"],
        "kv_bounded_by": row["kv_bounded_by"],
        "baseline": row.get("baseline"),
        "verdict": row.get("verdict"),
        "other_ratio": _number(row.get("other_ratio")),
        "rival": row.get("rival"),
        "who": row.get("who"),
        "misses": row.get("misses"),
        "samples": row.get("samples") or row.get("itl_samples"),
    }
    for field in FIELDS:
        name, scale = field["name"], METRIC[field["name"]].scale if field["name"] in METRIC else 1.0
        for end in ("", "_low", "_high") if field["range"] else ("",):
            found[name + end] = _number(row.get(name + end), scale)
    found = {k: brief(v, LONGEST_NAME) if isinstance(v, str) else v for k, v in found.items()}
    found |= {f"phase:{name}": _number(ms) for name, ms in phases.items()}
    found["context"] = found["context"] or None  # 0 where another tool's file does not say
    return found | {"phase:idle": _number(row.get("idle_us"), 1e-3) if phases else None}


def _served(row: dict[str, Any]) -> bool:
    return bool(row["mode"] != "decode")


def _panel(row: dict[str, Any]) -> str:
    """Points of one panel differ in nothing but the layout, how it is computed, and how heavy the load is."""
    if not _served(row):
        return f"{row['model']}, context {row['context']:,} tokens"
    arrival = {CLOSED: "closed loop", GAMMA: "open loop"}.get(row["load_arrival"], "at the trace's times")
    return f"{row['model']}, {arrival}, {row['rest']}, {row['mode']}"


def _number(value: Any, scale: float = 1.0) -> float | int | None:  # noqa: ANN401 - whatever a table holds
    if missing(value) or isinstance(value, str):
        return None
    value = value if scale == 1 else value * scale
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def point_of(row: dict[str, Any]) -> Point:
    """The point that a row of Frames was made of, as its first repeat."""
    fields = {name: row[name] for name in Point.__struct_fields__ if name not in ("repeat", "load")}
    load = None
    if _served(row):
        names = [name for name in Load.__struct_fields__ if name != "mode"]
        asked: dict[str, Any] = {n: None if missing(v := row[f"load_{n}"]) else v for n in names}
        load = Load(mode=row["mode"], **asked)
    return Point(**fields, load=load)


class _Series:
    """Which line a point belongs to, and how that looks."""

    def __init__(self, frames: Frames) -> None:
        self.looks: list[dict[str, Any]] = []
        self._places: dict[tuple[str, ...], int] = {}
        self._styles: dict[bool, style.Style] = {}
        tables = {served: t for served, t in ((False, frames.points), (True, frames.served)) if len(t)}
        if tables:
            whole = style.Style.of(frames.everything)
            of = {served: style.Style.of(t).variants for served, t in tables.items()}
            self._styles = {served: dataclasses.replace(whole, variants=names) for served, names in of.items()}
        ordered = [t.sort_values([*DEGREES], kind="stable")["label"] for t in tables.values()]
        self._labels = list(dict.fromkeys(str(label) for labels in ordered for label in labels.unique()))

    def of(self, row: dict[str, Any]) -> dict[str, int]:
        """The place of a row's series in `looks`."""
        look = self._styles[_served(row)]
        layout, variant, run = str(row["layout"]), str(row["variant"]), str(row["run"])
        key = (row["workload"], layout, variant, run)
        if key not in self._places:
            self._places[key] = len(self.looks)
            several = f", {run}" if len(look.runs) > 1 else ""
            name = brief(f"{row['label']}{several}", LONGEST_NAME)
            self.looks.append({"name": name} | self._look(look, str(row["label"]), layout, variant, run))
        return {"series": self._places[key]}

    def _look(self, look: style.Style, label: str, layout: str, variant: str, run: str) -> dict[str, int]:
        """Places in the scripts' colours, dashes and symbols: a colour for each label while there are enough of them.

        Of more labels, layouts have the colours and variants the dashes, as in the figures.
        """
        if len(self._labels) <= len(figures.COLOURS):
            place, of_run = self._labels.index(label), look.runs.index(run)
            return {
                "colour": place,
                "dash": of_run % len(figures.LINES),
                "symbol": of_run if len(look.runs) > 1 else place,
            }
        return {
            "colour": figures.COLOURS.index(look.colour(layout, variant)),
            "dash": figures.LINES.index(look.line(variant, layout)),
            "symbol": figures.MARKERS.index(look.marker(layout, run, variant)),
        }


def _recorded(frames: Frames) -> dict[tuple[str, Point, str], Record]:
    """The first record of each point, by run, point and load as sent."""
    found: dict[tuple[str, Point, str], Record] = {}
    for run in frames.runs:
        for record in run.records:
            if record.outcome == "ok":
                point = msgspec.structs.replace(record.point, repeat=0)
                found.setdefault((run.name, point, same_load(record)), record)
    return found


def _command(row: dict[str, Any], recorded: dict[tuple[str, Point, str], Record]) -> dict[str, str | None]:
    """A point's command, with the settings that its record was measured with.

    Null for a point of another tool, one that no option can say, and one that takes no bearable length.
    """
    point = point_of(row)
    record = recorded[row["run"], point, row["same_load"] if point.load else ""]
    try:
        command = None if record.origin else command_of(point, record.measured_with, cpu=bool(row["cpu"]))
    except UsageError:
        command = None
    return {"command": command if command and len(command) <= LONGEST_COMMAND else None}
