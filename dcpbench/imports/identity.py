"""Identify the server of a result: settings that distinguish servers, and results that repeat each other.

A file rarely identifies its server. Labels, metadata and the names of files and folders often do, but they may also name
the load, or number repeats. Therefore most hints distinguish servers only if one load has several of their values, or
several loads share one. A degree always does. The name of a file does only for results of one load, because it may hold
anything, such as the machine that happened to run the load.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.imports.field_names import LAYOUT, parse_name, shorten_label
from dcpbench.points.names import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.imports.result import Result, Shape
    from dcpbench.points.point import Point

FOLDER, FILE = "folder", "name"  # hints made of the name of a folder, and of a file
NUMBERED = re.compile(  # names of folders that hold repeats: `run-2`, `20261121_101112`
    r"(?:run|rep|repeat|trial|iter|seed|pass)?[\W_]*\d[\d\W_T]*", re.IGNORECASE
)
_START, _END = r"(?<![A-Za-z0-9.])", r"(?![A-Za-z0-9]|\.\d)"
_NUMBER = r"(\d+(?:\.\d+)?|inf)"
_LOAD_WORDS = (
    r"(?:max[_-]?)?conc(?:urrency)?|mc|c|con|clients?|users?|bs|batch(?:[_-]?size)?|qps|rps|(?:request[_-]?)?rate|rr|r|n|np"
    r"|(?:num[_-]?)?prompts|requests|reqs?"
)
_LOAD = re.compile(  # a load in a name: `conc64`, `c=8`, `2.5qps`, `infqps`
    rf"{_START}(?:(?:{_LOAD_WORDS})[=_-]?{_NUMBER}|{_NUMBER}[_-]?(?:{_LOAD_WORDS})){_END}", re.IGNORECASE
)
_REPEAT = re.compile(
    rf"{_START}(?:run|rep|repeat|trial|iter|seed|pass|try|attempt|round)[=_-]?\d+{_END}", re.IGNORECASE
)
_SERIAL = re.compile(rf"{_START}(?:\d[\dT]*|(?=[a-f]*\d)[0-9a-f]{{6,}}){_END}", re.IGNORECASE)  # number, date or hash
_SEPARATORS = re.compile(r"[\s_,;=+-]+")


def identify_server(result: Result) -> tuple[object, ...]:
    """Return what a result was measured on, as far as its file has it."""
    parts = (result.layout.items(), result.precision.items(), result.settings.items())
    instances = (result.disaggregate, result.prefill_gpus)
    return (result.model, result.backend, result.device, result.ep, *instances, *map(tuple, parts))


def identify_load(result: Result) -> tuple[object, ...]:
    """Return how heavy the load was."""
    context = result.steps.context if result.steps else None
    return (result.arrival, result.trace, result.request_rate, result.burstiness, result.concurrency, context)


def add_name_hints(files: Sequence[str], results: Sequence[Result]) -> list[Result]:
    """Return the results with hints from the names of their files and folders.

    A sweep names its parameters itself, so that its results get none. Degrees are hints if the layout is unknown. Parts
    that all files have in common are left out of the name of a file.
    """
    folders = [Path(file).parent for file in files]
    several = len(set(folders)) > 1
    words = [_split(_SERIAL.sub(" ", remove_load(Path(file).stem, r))) for file, r in zip(files, results, strict=True)]
    common = set.intersection(*map(set, words)) if words else set()
    found = []
    for result, file, folder, own in zip(results, files, folders, words, strict=True):
        degrees = {} if result.layout else parse_name(file).degrees
        hints = {**result.hints, **{name: str(degree) for name, degree in degrees.items() if name != "ep"}}
        if several and folder.name and not NUMBERED.fullmatch(folder.name):
            hints[FOLDER] = shorten_label(folder.name)
        hints[FILE] = shorten_label("-".join(word for word in own if word not in common))
        found.append(result if result.swept else dataclasses.replace(result, hints=hints))
    return found


def _split(text: str) -> list[str]:
    return [word for word in _SEPARATORS.split(text) if word]


def remove_load(text: str, result: Result) -> str:
    """Return a label without the load of its result, such as `c8` of 8 clients, and without the number of a repeat."""
    figures = {str(number) for number in (result.concurrency, result.submitted, result.completed) if number}
    figures.add("inf" if result.request_rate is None else f"{result.request_rate:g}")

    def get_replacement(match: re.Match[str]) -> str:
        number = (match[1] or match[2]).lower()
        number = number if number == "inf" else f"{float(number):g}" if "." in number else number
        return " " if number in figures else match[0]

    stripped = _REPEAT.sub(" ", _LOAD.sub(get_replacement, text))
    return text if stripped == text else " ".join(stripped.split()).strip(" _-,;=+")


def add_server_settings(results: Sequence[Result], shapes: Sequence[Shape]) -> list[Result]:
    """Return the results with settings that distinguish their servers: the hardware if there are several, and hints."""
    found = list(results)
    if len({result.device for result in found}) > 1:
        found = [_add_setting(result, "gpu", result.device or UNKNOWN) for result in found]
    for hint in dict.fromkeys(name for result in results for name in result.hints):
        values = [remove_load(result.hints.get(hint, ""), result) for result in found]
        if _is_server_hint(hint, values, found, shapes):
            found = [
                _add_setting(result, hint, value) if hint in result.hints else result
                for result, value in zip(found, values, strict=True)
            ]
    return found


def _add_setting(result: Result, name: str, value: str) -> Result:
    return dataclasses.replace(result, settings={**result.settings, name: value}) if value else result


def _is_server_hint(hint: str, values: Sequence[str], results: Sequence[Result], shapes: Sequence[Shape]) -> bool:
    """Return whether a hint distinguishes servers, rather than naming the load of each result."""
    lines: dict[object, set[tuple[object, str]]] = {}
    for value, result, shape in zip(values, results, shapes, strict=True):
        line = (identify_server(result), shape.prompts, shape.answers)
        lines.setdefault(line, set()).add((identify_load(result), value))
    return any(_has_difference(hint, pairs) for pairs in lines.values())


def _has_difference(hint: str, pairs: set[tuple[object, str]]) -> bool:
    """Return whether a hint distinguishes servers among the loads and values of one line."""
    loads, values = ({pair[side] for pair in pairs} for side in (0, 1))
    if len(values) == 1 or hint.replace("-", "_") in LAYOUT:
        return len(values) > 1
    if hint == FILE:
        return len(loads) < len(pairs)
    return not len(pairs) == len(loads) == len(values)


def number_repeats(points: Iterable[Point]) -> list[Point]:
    """Return the points with the results of one point numbered as its repeats, in order."""
    seen: Counter[str] = Counter()
    found = []
    for point in points:
        found.append(msgspec.structs.replace(point, repeat=seen[point.get_key()]))
        seen[point.get_key()] += 1
    return found


def list_repeats(points: Sequence[Point], places: Sequence[str]) -> list[list[str]]:
    """Return the places of the results of each point that has several."""
    groups: dict[str, list[str]] = {}
    for point, place in zip(points, places, strict=True):
        groups.setdefault(point.get_key_without_repeat(), []).append(place)
    return [places for places in groups.values() if len(places) > 1]
