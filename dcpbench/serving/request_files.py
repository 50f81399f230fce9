"""Read files of requests: Mooncake's traces, our own JSONL, and CSV, distinguished by their content.

    {"timestamp": 105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 3, 4, 5]}     Mooncake; time in ms
    {"arrival_s": 0.1, "input_tokens": 1800, "output_tokens": 26, "prefix_group": 2}            ours
    {"prompt": [17, 3, 99], "output_tokens": 26}                                                ours
    arrival_s,input_tokens,output_tokens,prefix_group                                           CSV, this its first line

Every error names the file and the line.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import hashlib
import json
import math
import reprlib
from typing import TYPE_CHECKING, NoReturn, TypeGuard

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.serving.load_words import MAX_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

BLOCK = 512
"""Tokens per hash id in Mooncake's traces."""
MAX_TOKEN_ID = (1 << 31) - 1
MAX_TIME = 1e15
"""Maximum time stamp in its own unit, far beyond the current date in ms; larger numbers are not times."""
MAX_REASON_LENGTH = 500
CSV_FIELDS = ("arrival_s", "input_tokens", "output_tokens", "prefix_group")
JSON_FIELDS = (*CSV_FIELDS, "prompt")
_FORMATS = (
    'lines such as {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]} (Mooncake), '
    '{"arrival_s": 0.0, "input_tokens": 1200, "output_tokens": 52}, or CSV that begins with '
    "arrival_s,input_tokens,output_tokens"
)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A request of a file."""

    arrival_s: float | None
    """Arrival time in s after the first request; None if the file has no times."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    prompt: np.ndarray | None = None
    """int32 token ids."""
    prefix_group: int | None = None

    @property
    def tokens(self) -> int:
        """Return prompt and output tokens together."""
        return self.input_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A file of requests, by arrival."""

    path: Path
    sha256: str
    rows: list[Row]
    sorted: bool
    """True if the requests had to be sorted by arrival."""

    @property
    def has_times(self) -> bool:
        """Return True if the file has arrival times."""
        return self.rows[0].arrival_s is not None

    @property
    def has_groups(self) -> bool:
        """Return True if any request names a group with which it shares a prefix."""
        return any(row.prefix_group is not None for row in self.rows)

    @property
    def supports_prefix_share(self) -> bool:
        """Return True if --prefix-share determines the shared prefixes; False if the file does."""
        return all(row.prompt is None and row.hash_ids is None for row in self.rows)

    @property
    def largest_id(self) -> int:
        """Return the largest token id in the file; -1 without any."""
        return max((int(row.prompt.max()) for row in self.rows if row.prompt is not None), default=-1)


def read_requests(path: Path) -> Trace:
    """Read a file of requests. Raise UsageError with the line and the problem in it."""
    if path.exists() and not path.is_file():
        raise UsageError(f"--requests {path} is not a file, and every rank reads it again; name a file of requests.")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as e:
        raise UsageError(f"--requests {path} cannot be read ({e.strerror}); name a file that holds {_FORMATS}.") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--requests {path} is not text; it should hold {_FORMATS}.") from e
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"--requests {path} is empty; it should hold {_FORMATS}.")
    found = list(_read_json_rows(path, lines) if lines[0][1].lstrip()[0] in "{[" else _read_csv_rows(path, lines))
    _check_times(path, found)
    rows, moved = _sort_by_arrival([row for _, row in found])
    return Trace(path=path, sha256=hashlib.sha256(data).hexdigest(), rows=rows, sorted=moved)


def _check_times(path: Path, found: list[tuple[int, Row]]) -> None:
    timed = found[0][1].arrival_s is not None
    for number, row in found:
        if (row.arrival_s is not None) != timed:
            has, first = ("no", "has one") if timed else ("an", "has none")
            _raise_error(
                path, number, f"{has} arrival time, and the first request {first}; give all of them one, or none"
            )


def _sort_by_arrival(rows: list[Row]) -> tuple[list[Row], bool]:
    """Return the rows sorted by time, relative to the first one's, and whether their order changed; the sort is stable."""
    if rows[0].arrival_s is None:
        return rows, False
    ordered = sorted(rows, key=lambda row: row.arrival_s or 0.0)
    first = ordered[0].arrival_s or 0.0
    moved = any(a is not b for a, b in zip(rows, ordered, strict=True))
    return [dataclasses.replace(row, arrival_s=(row.arrival_s or 0.0) - first) for row in ordered], moved


def _read_json_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, Row]]:
    read: Callable[[Path, int, Mapping[str, object]], Row] | None = None
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            _raise_error(path, number, f"not JSON ({e}); each line is one request, as {_FORMATS}")
        if not isinstance(value, dict):
            _raise_error(
                path, number, f"{type(value).__name__}, not a JSON object; each line is one request, as {_FORMATS}"
            )
        if read is None:
            read = _parse_mooncake if {"timestamp", "input_length", "hash_ids"} & value.keys() else _parse_own
        yield number, read(path, number, value)


def _read_csv_rows(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, Row]]:
    (first, header), *rest = lines
    names = _split_cells(path, first, header)
    if not set(CSV_FIELDS) & set(names):
        apart = "; columns are separated by commas" if any(name in header for name in CSV_FIELDS) else ""
        _raise_error(path, first, f"neither JSON nor the names of CSV columns{apart}; the file should hold {_FORMATS}")
    _check_fields(path, first, names, CSV_FIELDS)
    for needed in ("input_tokens", "output_tokens"):
        if needed not in names:
            _raise_error(path, first, f"no column '{needed}'")
    if len(set(names)) < len(names):
        _raise_error(path, first, "a column is named twice")
    if not rest:
        _raise_error(path, first, "the names of the columns and no request below them")
    for number, line in rest:
        cells = _split_cells(path, number, line)
        if len(cells) != len(names):
            _raise_error(path, number, f"{len(cells)} cells, and {len(names)} columns have names")
        given = {name: _convert_cell(cell) for name, cell in zip(names, cells, strict=True) if cell}
        yield number, _parse_own(path, number, given)


def _split_cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as e:
        _raise_error(path, number, f"not CSV ({e})")


def _parse_mooncake(path: Path, number: int, given: Mapping[str, object]) -> Row:
    """Parse a row of Mooncake's format; unknown fields are ignored, because other tools add theirs."""
    if "chat_id" in given:
        _raise_error(
            path,
            number,
            "'chat_id', a field of Qwen traces, whose timestamps are in seconds while Mooncake's are in ms; write the times "
            "as 'arrival_s' in s, with 'input_tokens' and 'output_tokens', instead of 'timestamp' and its lengths",
        )
    inputs = _parse_tokens(path, number, given, "input_length")
    hashes = given.get("hash_ids")
    if hashes is not None:
        if not isinstance(hashes, list) or not all(_is_int(h) and h >= 0 for h in hashes):
            _raise_error(path, number, "'hash_ids' is not a list of whole numbers from 0")
        full, blocks = inputs // BLOCK, math.ceil(inputs / BLOCK)
        if len(hashes) not in (full, blocks):
            _raise_error(
                path, number, f"{len(hashes)} 'hash_ids' for {inputs} tokens, which are {blocks} blocks of {BLOCK}"
            )
    return Row(
        arrival_s=_parse_time(path, number, given, "timestamp") / 1000,
        input_tokens=inputs,
        output_tokens=_parse_tokens(path, number, given, "output_length"),
        hash_ids=None if hashes is None else tuple(hashes),
    )


def _parse_own(path: Path, number: int, given: Mapping[str, object]) -> Row:
    _check_fields(path, number, given, JSON_FIELDS)
    if ("prompt" in given) == ("input_tokens" in given):
        both = "both 'prompt' and 'input_tokens'" if "prompt" in given else "neither 'prompt' nor 'input_tokens'"
        _raise_error(path, number, f"{both}; give the token ids, or how many there are")
    prompt = _parse_prompt(path, number, given["prompt"]) if "prompt" in given else None
    group = given.get("prefix_group")
    if group is not None and (not _is_int(group) or group < 0):
        _raise_error(path, number, f"'prefix_group' is {group!r}, not a whole number from 0")
    if group is not None and prompt is not None:
        _raise_error(path, number, "both 'prompt' and 'prefix_group'; the prompt itself says what it shares")
    return Row(
        arrival_s=_parse_time(path, number, given, "arrival_s") if given.get("arrival_s") is not None else None,
        input_tokens=len(prompt) if prompt is not None else _parse_tokens(path, number, given, "input_tokens"),
        output_tokens=_parse_tokens(path, number, given, "output_tokens"),
        prompt=prompt,
        prefix_group=group,
    )


def _parse_prompt(path: Path, number: int, value: object) -> np.ndarray:
    if not isinstance(value, list) or not value or not all(_is_int(t) and 0 <= t <= MAX_TOKEN_ID for t in value):
        _raise_error(path, number, "'prompt' is not a list of token ids, whole numbers from 0")
    return np.array(value, dtype=np.int32)


def _parse_tokens(path: Path, number: int, given: Mapping[str, object], name: str) -> int:
    if name not in given:
        _raise_error(path, number, f"no '{name}'")
    value = given[name]
    if not _is_int(value):
        _raise_error(path, number, f"'{name}' is {value!r}, not a whole number")
    if value < 1:
        _raise_error(path, number, f"'{name}' is {reprlib.repr(value)}; a request has at least 1 token in and 1 out")
    if value > MAX_TOKENS:
        _raise_error(path, number, f"'{name}' is {reprlib.repr(value)}, more than any model takes")
    return value


def _parse_time(path: Path, number: int, given: Mapping[str, object], name: str) -> float:
    if name not in given:
        _raise_error(path, number, f"no '{name}'")
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_TIME:
        _raise_error(path, number, f"'{name}' is {reprlib.repr(value)}, not a time")
    return float(value)


def _check_fields(path: Path, number: int, given: Mapping[str, object] | list[str], known: tuple[str, ...]) -> None:
    """Raise UsageError for unknown fields, because a misspelt arrival time would change the load."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
            _raise_error(path, number, f"'{name}' is not known{hint}")


def _convert_cell(cell: str) -> object:
    """Return a CSV cell as its JSON value; other text stays text, which the error shows."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _raise_error(path: Path, number: int, what: str) -> NoReturn:
    what = what if len(what) <= MAX_REASON_LENGTH else what[:MAX_REASON_LENGTH] + "…"
    raise UsageError(f"--requests {path}, line {number}: {what if what.endswith('?') else what.rstrip('.') + '.'}")
