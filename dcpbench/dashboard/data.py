"""Write runs as files that a browser loads quickly: columns instead of rows, each word once, histories in shards.

Each file calls `dcpbenchData(name, data)`: pages opened from a disk may load scripts, and nothing else. Its name holds
a digest of its content, so that a page never reads half of an old site and half of a new one.

    index                    runs, lines, the latest changes, and the names of all other files; columns of lines are
                             numbers of words; `looks` has the colour and the marker of each word of the layout
    measure-ID               the newest value of every line that has one, and its latest change
    history-N                all entries and changes of some neighbouring lines
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.dashboard import change_points, series
from dcpbench.points.layout import DEGREES
from dcpbench.points.names import BACKENDS
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.garbage_collection import stop_garbage_collector
from dcpbench.records.metrics import DASHBOARD
from dcpbench.show.layouts import Degrees, find_marker_index, format_css_colours
from dcpbench.show.web import encode_markup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.dashboard.change_points import Change
    from dcpbench.dashboard.discovery import FoundRuns, RunData
    from dcpbench.dashboard.series import Entry, Line

SHARD_ENTRIES = 800
DIGITS = 5
DIGEST = 12
MAX_WHOLE = 1e15  # limit above which numbers stay floats: JSON of larger integers is longer, and no script can read it
WORDS = ("model", "workload", "layout", "exchange", "how", "load", "hardware", "driver", "conditions")
NUMBERS = ("context", "concurrency")
MEASURES = {metric.shown_name: metric for metric in DASHBOARD}
FOLDER = "data"
MAX_RUN_PAIRS = 3  # maximum number of pairs of runs that the page opens with, the newest first
MAX_GROUPS = 5  # points, or groups of points with similar changes, of a pair of runs at most
MAX_SIZE_RATIO = 2.0  # maximum factor between steps, in logarithms, that are listed in one line with the largest


@dataclasses.dataclass(frozen=True)
class History:
    """Hold a line with its entry of each run, oldest first."""

    line: Line
    entries: list[tuple[int, Entry]]  # entries with the number of their run
    changes: dict[str, list[tuple[list[int], Change]]] = dataclasses.field(default_factory=dict)
    """Changes by measure, each with the indices of the entries that have a value; none for functional runs."""

    @property
    def layers_held(self) -> str:
        """Return a note that the whole model did not fit in the newest run of this point; empty if all layers were held."""
        return next((entry.layers_held for _, entry in reversed(self.entries) if entry.values), "")

    def find_changes(self) -> None:
        """Find the changes; raise MissingPackageError if a package for that is missing."""
        if self.line.cpu or len(self.entries) < change_points.MIN_RUNS:
            return
        for name in MEASURES:
            having = [i for i, (_, entry) in enumerate(self.entries) if name in entry.values]
            steps = change_points.find_changes([self.entries[i][1].values[name].median for i in having])
            if steps:
                self.changes[name] = [(having, step) for step in steps]


@dataclasses.dataclass(frozen=True)
class Content:
    """Hold the data of a site that do not depend on which runs have a page yet."""

    runs: Sequence[RunData]
    files: dict[str, str]
    index: dict[str, object]  # fields of the index, except its runs and what was left out
    first: str  # path of the measure that the page shows first
    lines: int
    entries: int
    changes: int

    def add_index(
        self, pages: Sequence[str], records: Sequence[str], skipped: Sequence[str]
    ) -> tuple[dict[str, str], str]:
        """Return the text of all data files by path, and the path of the index.

        `pages` are slugs of the runs that have a page, `records` of those with records to download.
        """
        files = dict(self.files)
        runs = _build_run_columns(self.runs, set(pages), set(records))
        return files, _add_file(files, "index", {"runs": runs, "skipped": list(skipped), **self.index})


@stop_garbage_collector()
def build_content(found: FoundRuns, on_progress: Callable[[str], None]) -> Content:
    """Return the data of a site; raise MissingPackageError if a package for change points is missing."""
    histories = _collect_histories(found.runs)
    for number, history in enumerate(histories, 1):
        history.find_changes()
        on_progress(f"changes of {number:,} of {len(histories):,} points")
    files: dict[str, str] = {}
    shards = _add_shards(histories, files)
    measures = _build_measures(histories, files)
    index = {
        **_build_line_columns(histories, shards),
        "measures": measures,
        "latest": _collect_latest(histories, [str(measure["id"]) for measure in measures], found.runs),
        "least": change_points.MIN_RUNS,
        "backends": BACKENDS,
        "shards": [path for _, path in shards],
        "first": measures[0]["id"] if measures else "",
    }
    first = str(measures[0]["file"]) if measures else ""
    count = sum(len(steps) for history in histories for steps in history.changes.values())
    entries = sum(len(h.entries) for h in histories)
    return Content(found.runs, files, index, first, len(histories), entries, count)


def _collect_histories(runs: Sequence[RunData]) -> list[History]:
    """Return all lines, similar ones next to each other, so that lines viewed together are in one shard."""
    found: dict[Line, list[tuple[int, Entry]]] = {}
    for number, run in enumerate(runs):
        for line, entry in run.entries.items():
            found.setdefault(line, []).append((number, entry))

    def make_sort_key(line: Line) -> tuple[object, ...]:
        point = line.example
        names = ("model", "workload", "context", "concurrency", *DEGREES, "exchange")
        return (*(getattr(point, n) for n in names), line.hardware, line.driver, line.conditions, line.point)

    return [History(line, found[line]) for line in sorted(found, key=make_sort_key)]


def _build_run_columns(runs: Sequence[RunData], pages: set[str], records: set[str]) -> dict[str, list[object]]:
    names = ("name", "slug", "date", "commit", "hardware", "driver", "version", "workloads", "models", "headline")
    columns: dict[str, list[object]] = {name: [getattr(run, name) for run in runs] for name in names}
    for outcome in OUTCOMES:
        columns[outcome] = [run.outcomes.get(outcome, 0) for run in runs]
    columns["cpu"] = [int(run.cpu) for run in runs]
    columns["page"] = [int(run.slug in pages) for run in runs]
    columns["records"] = [int(run.slug in records) for run in runs]
    return columns


def _build_line_columns(histories: Sequence[History], shards: Sequence[tuple[int, str]]) -> dict[str, object]:
    shared = series.find_shared_settings([history.line for history in histories])
    distinct = [series.describe_line(history.line, history.layers_held, shared) for history in histories]
    points = [history.line.example for history in histories]
    degrees = {str(row["layout"]): Degrees(p.tp, p.dp, p.dcp) for row, p in zip(distinct, points, strict=True)}
    words: dict[str, list[str]] = {}
    columns: dict[str, list[int] | list[str]] = {"id": [history.line.id for history in histories]}
    for name in WORDS:
        numbers = {word: i for i, word in enumerate(dict.fromkeys(str(row[name]) for row in distinct))}
        words[name], columns[name] = list(numbers), [numbers[str(row[name])] for row in distinct]
    for name in NUMBERS:
        columns[name] = [int(row[name]) for row in distinct]
    known = {point: i for i, point in enumerate(dict.fromkeys(history.line.point for history in histories))}
    columns["point"] = [known[history.line.point] for history in histories]
    columns["cpu"] = [int(history.line.cpu) for history in histories]
    columns["runs"] = [len(history.entries) for history in histories]
    columns["last"] = [history.entries[-1][0] for history in histories]
    newest = [entry.wrong or entry.outcome for history in histories for _, entry in history.entries[-1:]]
    outcomes = list(dict.fromkeys([*OUTCOMES, *newest]))
    columns["outcome"] = [outcomes.index(outcome) for outcome in newest]
    return {
        "shared": shared,
        "words": words | {"outcome": outcomes},
        "looks": [
            [format_css_colours(degrees[layout]), find_marker_index(degrees[layout])] for layout in words["layout"]
        ],
        "lines": columns,
        "starts": [start for start, _ in shards],
    }


def _build_measures(histories: Sequence[History], files: dict[str, str]) -> list[dict[str, object]]:
    measures = []
    for name, metric in MEASURES.items():
        rows, latest = [], []
        for i, history in enumerate(histories):
            newest = next((one for one in reversed(history.entries) if name in one[1].values), None)
            if newest is not None:
                rows.append((i, newest[0], newest[1].values[name]))
            if found := history.changes.get(name):
                having, change = found[-1]
                runs = [history.entries[having[change.before + k]][0] for k in (0, 1)]
                latest.append([i, *runs, *_list_levels(change)])
        if not rows:
            continue
        data = {
            "id": name,
            "line": _encode_gaps([i for i, _, _ in rows]),
            "run": [run for _, run, _ in rows],
            "value": [_to_json_number(v.median) for _, _, v in rows],
            "low": [_to_json_number(v.low) for _, _, v in rows],
            "high": [_to_json_number(v.high) for _, _, v in rows],
            "changes": latest,
        }
        about = {
            "id": name,
            "label": metric.title[:1].upper() + metric.title[1:],
            "unit": metric.shown_unit,
            "better": metric.better,
        }
        measures.append(about | {"file": _add_file(files, f"measure-{name}", data), "changes": len(latest)})
    return measures


@dataclasses.dataclass(frozen=True)
class ChangedPoint:
    """Hold a point that changed between two runs, in one metric or several."""

    line: int
    steps: dict[int, Change]  # changes by number of the measure
    verdict: str  # `better`, `worse`, or empty if its largest change is neither

    @property
    def size(self) -> float:
        """Size of its largest change, in logarithms."""
        return max(map(_compute_size, self.steps.values()))


def _collect_latest(
    histories: Sequence[History], measures: Sequence[str], runs: Sequence[RunData]
) -> dict[str, object]:
    """Return the latest changes, by the two runs between which points changed, and the number of earlier pairs.

    Points of one layout with changes of similar size are grouped, as a new driver changes many points at once.
    `same_code` is 1 where both runs have the same commit, so that the code cannot be the cause.
    """
    pairs: dict[tuple[int, int], dict[int, dict[int, Change]]] = {}
    for i, history in enumerate(histories):
        for number, name in enumerate(measures):
            for having, change in history.changes.get(name, ()):
                before, after = (history.entries[having[change.before + k]][0] for k in (0, 1))
                pairs.setdefault((after, before), {}).setdefault(i, {})[number] = change
    latest = []
    for after, before in sorted(pairs, reverse=True)[:MAX_RUN_PAIRS]:
        moved = [ChangedPoint(i, steps, _compute_verdict(steps, measures)) for i, steps in pairs[after, before].items()]
        groups = _group_similar(moved, histories)
        latest.append(
            {
                "before": before,
                "after": after,
                "same_code": int(runs[before].commit == runs[after].commit != ""),
                "points": len(moved),
                **{verdict: sum(one.verdict == verdict for one in moved) for verdict in ("worse", "better")},
                "groups": [_summarize_group(group, histories) for group in groups[:MAX_GROUPS]],
                "omitted": sum(map(len, groups[MAX_GROUPS:])),
            }
        )
    return {"steps": latest, "more": len(pairs) - len(latest)}


def _group_similar(moved: Sequence[ChangedPoint], histories: Sequence[History]) -> list[list[ChangedPoint]]:
    """Return groups of points of one layout that all became better, or all worse, by similar steps; the largest first."""
    groups: list[list[ChangedPoint]] = []
    newest: dict[tuple[str, str], list[ChangedPoint]] = {}
    for one in sorted(moved, key=lambda one: -one.size):
        key = (histories[one.line].line.example.layout_name, one.verdict)
        group = newest.get(key)
        if group is None or one.size * MAX_SIZE_RATIO < group[0].size:
            newest[key] = group = []
            groups.append(group)
        group.append(one)
    return sorted(groups, key=lambda group: (-round(group[0].size, 3), -len(group)))


def _summarize_group(group: Sequence[ChangedPoint], histories: Sequence[History]) -> dict[str, object]:
    """Return the point that changed most, and each metric with its number of points, its range and its largest change."""
    rows = []
    for number in sorted({number for one in group for number in one.steps}):
        steps = sorted((one.steps[number] for one in group if number in one.steps), key=_compute_size, reverse=True)
        ratios = [step.ratio for step in steps if step.ratio is not None]
        ends = [min(ratios), max(ratios)] if len(ratios) == len(steps) else [None, None]
        rows.append(
            (_compute_size(steps[0]), [number, len(steps), *map(_to_json_number, ends), *_list_levels(steps[0])])
        )
    rows.sort(key=lambda row: -round(row[0], 3))  # a time and its inverse are as large: in the order of the metrics
    model = len({histories[one.line].line.example.model for one in group}) == 1
    return {
        "line": group[0].line,
        "points": len(group),
        "model": int(model),
        "verdict": group[0].verdict,
        "changes": [row for _, row in rows],
    }


def _compute_size(change: Change) -> float:
    return abs(math.log(change.ratio)) if change.ratio else math.inf


def _compute_verdict(steps: dict[int, Change], measures: Sequence[str]) -> str:
    """Return the verdict of the largest change among the measures with a better direction."""
    judged = [(change, MEASURES[measures[number]].better) for number, change in steps.items()]
    change, better = max(judged, key=lambda one: (bool(one[1]), _compute_size(one[0])))
    return ("better" if (better == "higher") == (change.new > change.old) else "worse") if better else ""


def _add_shards(histories: Sequence[History], files: dict[str, str]) -> list[tuple[int, str]]:
    """Write the shards, and return the first line and the path of each."""
    found: list[tuple[int, str]] = []
    start = size = 0
    for i, history in enumerate(histories):
        size += len(history.entries)
        if size >= SHARD_ENTRIES or i + 1 == len(histories):
            rows = list(map(_encode_history, histories[start : i + 1]))
            found.append((start, _add_file(files, f"history-{len(found)}", rows)))
            start, size = i + 1, 0
    return found


def _encode_history(history: History) -> dict[str, object]:
    entries = [entry for _, entry in history.entries]
    values: dict[str, list[list[float | None]]] = {}
    for measure in MEASURES:
        found = [entry.values.get(measure) for entry in entries]
        if not any(found):
            continue
        values[measure] = [[_to_json_number(v.median) if v else None for v in found]]
        if any(v and v.low is not None for v in found):
            values[measure] += [
                [_to_json_number(v.low) if v else None for v in found],
                [_to_json_number(v.high) if v else None for v in found],
            ]
    changed = {
        name: [[having[c.before], having[c.before + 1], *_list_levels(c)] for having, c in steps]
        for name, steps in history.changes.items()
    }
    return {
        "run": _encode_gaps([run for run, _ in history.entries]),
        "outcome": [entry.outcome for entry in entries],
        "repeats": [entry.repeats for entry in entries],
        "warnings": {i: entry.warnings for i, entry in enumerate(entries) if entry.warnings},
        "reason": {i: entry.reason for i, entry in enumerate(entries) if entry.reason},
        "values": values,
        "changes": changed,
    }


def _list_levels(change: Change) -> list[float | None]:
    return [_to_json_number(x) for x in (change.ratio, change.low, change.high, change.old, change.new)]


def _encode_gaps(numbers: Sequence[int]) -> list[int]:
    """Return the differences of successive numbers, which are short."""
    return [b - a for a, b in zip([0, *numbers], numbers, strict=False)]


def _to_json_number(value: float | None) -> float | int | None:
    """Return the value with five significant digits, more than any of these figures is accurate to; null if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < MAX_WHOLE else short


def _add_file(files: dict[str, str], name: str, data: object) -> str:
    text = encode_markup(f'dcpbenchData("{name}",{msgspec.json.encode(data).decode()});\n')
    path = f"{FOLDER}/{name}-{hashlib.sha256(text.encode()).hexdigest()[:DIGEST]}.js"
    files[path] = text
    return path
