"""Read files of requests: those of trace_formats.py, recognised by their columns, and files of which the user names the columns.

    {"timestamp": 105, "input_length": 1800, "output_length": 26, "hash_ids": [0, 3, 4, 5]}     Mooncake; time in ms
    {"arrival_s": 0.1, "input_tokens": 1800, "output_tokens": 26, "prefix_group": 2}            ours
    {"prompt": [17, 3, 99], "output_tokens": 26}                                                ours
    arrival_s,input_tokens,output_tokens,prefix_group                                           CSV, this its first line

Every error names the file and the line.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import difflib
import functools
import hashlib
import itertools
import json
import math
import reprlib
from typing import TYPE_CHECKING, NoReturn, TypeGuard

import numpy as np

from dcpbench.errors import UsageError
from dcpbench.points.point import TraceFacts
from dcpbench.serving import trace_formats as formats
from dcpbench.serving.load_words import MAX_TOKENS
from dcpbench.serving.trace_formats import (
    ARRIVAL,
    DATE,
    DECLARED,
    DELAY,
    FORMATS,
    GROUP,
    HASHES,
    INPUT,
    NS,
    OUTPUT,
    OWN,
    PROMPT,
    SESSION,
    TABLE,
    TIME_UNITS,
    UNITS,
    Reading,
    TraceFormat,
)
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

MAX_TOKEN_ID = (1 << 31) - 1  # samples keep ids as int32
MAX_TIME = 1e15  # maximum time stamp in its own unit, far beyond the current date in ms; larger numbers are not times
MAX_DELAY_S = 1e8
MAX_BLOCK = 1 << 20
MAX_REASON_LENGTH = 500
MAX_SHOWN_COLUMNS = 8
NUMBER_LETTERS = "iInN"  # first letters of inf and nan, which are numbers
CLOSE = 0.85  # similarity of a misspelt column of our own format
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # that are suggested if hash ids do not fit the lengths
_FORMATS = (
    'lines such as {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]} (Mooncake), '
    '{"arrival_s": 0.0, "input_tokens": 1200, "output_tokens": 52}, or CSV that begins with '
    "arrival_s,input_tokens,output_tokens"
)
_NAME_THEM = "columns=arrival:NAME/input_tokens:NAME/output_tokens:NAME,time-unit=s"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A request of a file."""

    arrival_s: float | None  # s after the first request; None: no times; of a later turn, the earliest time to send it
    input_tokens: int  # tokens of the prompt; of a later turn, those that it adds
    output_tokens: int
    hash_ids: tuple[int, ...] | None = None
    prompt: np.ndarray | None = None  # int32 token ids
    prefix_group: int | None = None
    turn: int = 0  # number of the turn in its session; turns follow the first one
    delay_s: float = 0.0  # time in s from the answer of the turn before

    @property
    def tokens(self) -> int:
        """Return prompt and output tokens together."""
        return self.input_tokens + self.output_tokens


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """A file of requests, by arrival; turns of a session follow the first one."""

    path: Path
    sha256: str
    rows: list[Row]
    sorted: bool  # True if the requests had to be sorted by arrival
    reading: Reading = dataclasses.field(default_factory=Reading)  # how it was read: its format, and what that implies
    failures: int = 0  # requests without output tokens, which were left out

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

    def count_sessions(self, requests: int) -> int:
        """Return the sessions among the first requests; 0 for a file without later turns."""
        turns = [row.turn for row in self.rows[:requests]]
        return turns.count(0) if any(turns) else 0

    def compute_span_s(self, requests: int) -> float | None:
        """Return the time in s from the first to the last arrival among the first requests; None without times."""
        if not self.has_times:
            return None
        return max(row.arrival_s or 0.0 for row in self.rows[:requests])

    def compute_prefix_share(self, requests: int) -> float | None:
        """Return the share of prompt tokens that earlier prompts of the first requests begin with: the hit rate of a prefix cache
        that forgets nothing. None for a file that does not tell what prompts have in common.

        Blocks of hash ids count up to the first one that no earlier prompt had; of a later turn all that its session has so far.
        """
        rows = self.rows[:requests]
        if any(row.prompt is not None for row in rows) or not any(row.turn or row.hash_ids for row in rows):
            return None
        seen: set[int] = set()
        total = shared = before = 0
        for row in rows:
            before = before if row.turn else 0
            known = list(itertools.takewhile(seen.__contains__, row.hash_ids or ())) if not row.turn else []
            seen.update(row.hash_ids or ())
            shared += before + min(len(known) * self.reading.block_size, row.input_tokens)
            total += before + row.input_tokens
            before += row.tokens
        return shared / total

    def describe_requests(self, requests: int) -> TraceFacts:
        """Return what the first requests of the file are."""
        return TraceFacts(
            sessions=self.count_sessions(requests),
            span_s=self.compute_span_s(requests),
            prefix_share=self.compute_prefix_share(requests),
            failures=self.failures,
        )

    def describe(self, requests: int) -> str:
        """Return a sentence about how the file was read and what its first requests are."""
        facts = self.describe_requests(requests)
        how, reading = [], self.reading
        if reading.unit and self.has_times:
            how.append("times are dates" if reading.unit == DATE else f"times in {reading.unit}")
        if any(row.hash_ids is not None for row in self.rows):
            how.append(f"{reading.block_size} tokens a hash id")
        found = [format_count(min(requests, len(self.rows)), "request")]
        if facts.sessions:
            found[0] += f" in {format_count(facts.sessions, 'session')}"
        if facts.span_s is not None:
            found[0] += f" over {facts.span_s:,.3f} s"
        if facts.prefix_share is not None:
            found.append(f"{facts.prefix_share:.1%} of the prompt tokens were in earlier prompts")
        if self.failures:
            found.append(f"{format_count(self.failures, 'request')} without output left out")
        if self.sorted:
            found.append("its times were out of order; the requests are sent by time")
        name = "named columns" if reading.format == TABLE else reading.format
        return f"{self.path}: read as {name}{f' ({format_list(how)})' if how else ''}: {'; '.join(found)}."


def compute_lengths(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each prompt, with all earlier turns of its session, and of each answer, int64."""
    inputs, before = [], 0
    for row in rows:
        before = before if row.turn else 0
        inputs.append(before + row.input_tokens)
        before += row.tokens
    return np.array(inputs, dtype=np.int64), np.array([row.output_tokens for row in rows], dtype=np.int64)


_LAST_READ: dict[tuple[Path, str, Reading], Trace] = {}  # by hash and reading: all points of a run read the same file


def read_requests(path: Path, reading: Reading | None = None) -> Trace:
    """Read a file of requests. Raise UsageError with the line and the problem in it."""
    reading = reading or Reading()
    if path.exists() and not path.is_file():
        raise UsageError(
            f"--requests {path} is not a regular file, and it is read several times; name a file of requests."
        )
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as e:
        raise UsageError(f"--requests {path} cannot be read ({e.strerror}); name a file that holds {_FORMATS}.") from e
    except UnicodeDecodeError as e:
        raise UsageError(f"--requests {path} is not text; it should hold {_FORMATS}.") from e
    sha256 = hashlib.sha256(data).hexdigest()
    if (known := _LAST_READ.get((path, sha256, reading))) is not None:
        return known
    found = _parse_file(path, text, sha256, reading)
    _LAST_READ.clear()
    _LAST_READ.update({(path, sha256, how): found for how in (reading, found.reading)})
    return found


def _parse_file(path: Path, text: str, sha256: str, reading: Reading) -> Trace:
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"--requests {path} is empty; it should hold {_FORMATS}.")
    is_json = lines[0][1].lstrip()[0] in "{["
    given = _list_json_objects(path, lines) if is_json else _list_csv_rows(path, lines, reading)
    reader, found, failures = None, [], 0
    seen: dict[str, None] = {}  # names of the columns, in order
    for number, fields in given:
        seen |= dict.fromkeys(fields)
        reader = reader or _make_reader(path, number, fields, reading)
        if (row := reader.parse_row(number, fields)) is None:
            failures += 1
        else:
            found.append((number, row))
    if reader is None or not found:
        raise UsageError(f"--requests {path} holds no request that succeeded; name a file with some.")
    if reading.columns:
        _check_columns(path, reading.columns, seen)
    rows, moved = reader.arrange_rows(found)
    return Trace(
        path=path,
        sha256=sha256,
        rows=rows,
        sorted=moved,
        reading=reader.reading,
        failures=failures,
    )


def _check_columns(path: Path, columns: str, seen: Collection[str]) -> None:
    """Raise UsageError for a column that the user names and that no request has."""
    for ours, theirs in parse_columns(columns).items():
        if theirs not in seen:
            raise UsageError(
                f"--requests {path}: no request has {theirs!r}, which columns= names for {ours}; its columns are "
                f"{', '.join(list(seen)[:MAX_SHOWN_COLUMNS])}."
            )


def parse_columns(text: str) -> dict[str, str]:
    """Return the names of columns in a file by ours, of `arrival:ts/input_tokens:prompt`. Raise UsageError."""
    found: dict[str, str] = {}
    for part in text.split("/"):
        ours, colon, theirs = (word.strip() for word in part.partition(":"))
        if not colon or not theirs or "," in theirs:
            raise UsageError(f"--requests columns={part}: not OURS:THEIRS; write {_NAME_THEM}.")
        if ours not in formats.COLUMNS:
            near = difflib.get_close_matches(ours, formats.COLUMNS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"ours are {', '.join(formats.COLUMNS)}."
            raise UsageError(f"--requests columns={part}: {ours!r} is not known; {hint}")
        if ours in found:
            raise UsageError(f"--requests columns names {ours} twice; give it once.")
        found[ours] = theirs
    return found


def check_reading(reading: Reading) -> None:
    """Raise UsageError for a format, a time unit or a block size that does not exist."""
    for key, value, known in (("format", reading.format, (*FORMATS, TABLE)), ("time-unit", reading.unit, TIME_UNITS)):
        if value and value not in known:
            raise UsageError(f"--requests {key}={value}: not one of {', '.join(known)}.")
    if reading.format == TABLE and not reading.columns:
        raise UsageError(f"--requests format={TABLE} needs the names of the columns; add {_NAME_THEM}.")
    if reading.columns:
        parse_columns(reading.columns)
    if not 0 <= reading.block_size <= MAX_BLOCK:
        raise UsageError(
            f"--requests block-size={reading.block_size}: not 1 to {MAX_BLOCK:,} tokens of a hash id; write for example "
            "block-size=16."
        )


def _make_reader(path: Path, number: int, fields: Mapping[str, object], requested: Reading) -> _Reader:
    """Return the reader for a file that begins with these fields. Raise UsageError if no format is known by them."""
    check_reading(requested)
    if requested.columns:
        name = requested.format or TABLE
        declared = DECLARED.get(name, TraceFormat(columns={}, marks=frozenset(), unit=""))
        own = parse_columns(requested.columns)
        declared = dataclasses.replace(declared, columns={**declared.columns, **own}, known_only=False, refused={})
    else:
        name = requested.format or formats.find_format(fields) or _guess_own(path, number, fields)
        declared = DECLARED[name]
    unit, timed = requested.unit or declared.unit, declared.columns.get(ARRIVAL) in fields
    if timed and not unit and formats.parse_date(fields[declared.columns[ARRIVAL]]) is None:
        _raise_error(
            path,
            number,
            f"the unit of '{declared.columns[ARRIVAL]}' is not known; add time-unit=s, time-unit=ms, time-unit=us or time-unit=ns",
        )
    unit = unit or (DATE if timed else "")
    block = requested.block_size or declared.block_size
    reading = Reading(format=name, columns=requested.columns, unit=unit, block_size=block)
    return _Reader(path, declared, reading, whole_times=declared.whole_times and not requested.unit)


def _guess_own(path: Path, number: int, fields: Mapping[str, object]) -> str:
    """Return our own format for fields that resemble its columns, and so may be misspelt; raise UsageError for others."""
    ours = list(DECLARED[OWN].columns.values())
    if not fields or any(difflib.get_close_matches(name, ours, n=1, cutoff=CLOSE) for name in fields):
        return OWN
    names = ", ".join(list(fields)[:MAX_SHOWN_COLUMNS])
    return _raise_error(
        path,
        number,
        f"its columns ({names}) are of no known format, so that neither lengths nor the unit of times are known; name them: "
        f"--requests file={path},{_NAME_THEM}",
    )


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row as it is in the file: its time in the file's unit, and its session."""

    row: Row
    arrival: int | float | None
    session: object | None


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Parse the rows of one file."""

    path: Path
    declared: TraceFormat
    reading: Reading
    whole_times: bool

    @functools.cached_property
    def per_second(self) -> int:
        """Return the parts of a second that times count."""
        return NS if self.reading.unit == DATE else UNITS.get(self.reading.unit, 1)

    def parse_row(self, number: int, fields: Mapping[str, object]) -> _Row | None:
        """Return a row; None for a request that failed in the recorded service."""
        self._check_names(number, fields)
        given = {ours: fields[theirs] for ours, theirs in self.declared.columns.items() if theirs in fields}
        if self.declared.keeps_failures and given.get(OUTPUT) == 0:
            return None
        self._check_present(number, given, fields)
        prompt, inputs = self._parse_prompt(number, given)
        group = given.get(GROUP)
        if group is not None and (not _is_int(group) or group < 0):
            _raise_error(self.path, number, f"'prefix_group' is {group!r}, not a whole number from 0")
        if group is not None and prompt is not None:
            _raise_error(
                self.path,
                number,
                "both 'prompt' and 'prefix_group'; leave out 'prefix_group', as the token ids determine what the prompts share",
            )
        row = Row(
            arrival_s=None,
            input_tokens=inputs,
            output_tokens=self._parse_tokens(number, given, OUTPUT),
            hash_ids=self._parse_hashes(number, given.get(HASHES), inputs),
            prompt=prompt,
            prefix_group=group,
            delay_s=self._parse_delay(number, given),
        )
        return _Row(row, self._parse_arrival(number, given), given.get(SESSION))

    def arrange_rows(self, found: list[tuple[int, _Row]]) -> tuple[list[Row], bool]:
        """Return the rows by the time of their session's first turn, relative to the first one's, and whether these times were out of
        order; the sort is stable.
        """
        sessions: dict[object, list[_Row]] = collections.defaultdict(list)
        for number, item in found:
            sessions[("row", number) if item.session is None else ("session", str(item.session))].append(item)
        self._check_times(found, [turns[0] for turns in sessions.values()])
        ordered = list(sessions.values())
        times = [turns[0].arrival or 0 for turns in ordered]  # all of them or none have one
        first = min(times)
        ordered.sort(key=lambda turns: turns[0].arrival or 0)
        rows = [
            dataclasses.replace(
                item.row,
                arrival_s=None if item.arrival is None else (item.arrival - first) / self.per_second,
                turn=turn,
            )
            for turns in ordered
            for turn, item in enumerate(turns)
        ]
        return rows, times != sorted(times)

    def _check_times(self, found: list[tuple[int, _Row]], firsts: list[_Row]) -> None:
        timed, begins = found[0][1].arrival is not None, {id(item) for item in firsts}
        for number, item in found:
            if id(item) in begins and (item.arrival is not None) != timed:
                has, first = ("no", "has one") if timed else ("an", "has none")
                _raise_error(
                    self.path,
                    number,
                    f"{has} arrival time, and the first request {first}; give all of them one, or none",
                )

    def _check_names(self, number: int, fields: Mapping[str, object]) -> None:
        """Raise UsageError for columns that change the load: misspelt ones of our format, and refused ones of others."""
        for name in fields:
            if name in self.declared.refused:
                _raise_error(self.path, number, f"'{name}' {self.declared.refused[name]}")
        if self.declared.known_only:
            _check_fields(self.path, number, list(fields), tuple(self.declared.columns.values()))

    def _check_present(self, number: int, given: Mapping[str, object], fields: Mapping[str, object]) -> None:
        """Raise UsageError if a request lacks a length, has two, or lacks its time in a format in which every request has one."""
        if PROMPT in self.declared.columns and (PROMPT in given) == (INPUT in given):
            both = "both 'prompt' and 'input_tokens'" if PROMPT in given else "neither 'prompt' nor 'input_tokens'"
            _raise_error(self.path, number, f"{both}; give the token ids, or how many there are")
        needed = [
            *([] if PROMPT in self.declared.columns else [INPUT]),
            OUTPUT,
            *([ARRIVAL] if self.whole_times else []),
        ]
        for ours in needed:
            if given.get(ours) is None:
                name, has = self.declared.columns.get(ours, ours), ", ".join(list(fields)[:MAX_SHOWN_COLUMNS])
                _raise_error(self.path, number, f"no '{name}', only {has}")

    def _parse_prompt(self, number: int, given: Mapping[str, object]) -> tuple[np.ndarray | None, int]:
        """Return the token ids of a prompt if the file has them, and their number."""
        if PROMPT not in given:
            return None, self._parse_tokens(number, given, INPUT)
        value = given[PROMPT]
        if not isinstance(value, list) or not value or not all(_is_int(t) and 0 <= t <= MAX_TOKEN_ID for t in value):
            _raise_error(self.path, number, "'prompt' is not a list of token ids, whole numbers from 0")
        return np.array(value, dtype=np.int32), len(value)

    def _parse_tokens(self, number: int, given: Mapping[str, object], ours: str) -> int:
        name, value = self.declared.columns[ours], given[ours]
        if not _is_int(value):
            _raise_error(self.path, number, f"'{name}' is {value!r}, not a whole number")
        if value < 1:
            _raise_error(
                self.path, number, f"'{name}' is {reprlib.repr(value)}; a request has at least 1 token in and 1 out"
            )
        if value > MAX_TOKENS:
            _raise_error(self.path, number, f"'{name}' is {reprlib.repr(value)}, more than any model takes")
        return value

    def _parse_hashes(self, number: int, hashes: object, inputs: int) -> tuple[int, ...] | None:
        if hashes is None:
            return None
        if not isinstance(hashes, list) or not all(_is_int(h) and h >= 0 for h in hashes):
            _raise_error(self.path, number, "'hash_ids' is not a list of whole numbers from 0")
        size = self.reading.block_size
        if not size:
            _raise_error(
                self.path,
                number,
                "'hash_ids', and the number of tokens of one is not known; add for example block-size=16",
            )
        if len(hashes) not in (inputs // size, math.ceil(inputs / size)):
            fit = [b for b in BLOCK_SIZES if len(hashes) in (inputs // b, math.ceil(inputs / b))]
            add = f"; blocks of {fit[0]} would fit: add block-size={fit[0]}" if fit else ""
            _raise_error(
                self.path,
                number,
                f"{len(hashes)} 'hash_ids' for {inputs} tokens, which are {format_count(math.ceil(inputs / size), 'block')} of {size}{add}",
            )
        return tuple(hashes)

    def _parse_arrival(self, number: int, given: Mapping[str, object]) -> int | float | None:
        """Return a time in the unit of the file, a date in ns; None without one."""
        name = self.declared.columns.get(ARRIVAL, ARRIVAL)
        value = given.get(ARRIVAL)
        if value is None:
            return None
        if self.reading.unit == DATE:
            if (moment := formats.parse_date(value)) is None:
                _raise_error(self.path, number, f"'{name}' is {reprlib.repr(value)}, not a date")
            return moment
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_TIME:
            _raise_error(self.path, number, f"'{name}' is {reprlib.repr(value)}, not a time")
        if self.whole_times and value != int(value):
            _raise_error(
                self.path,
                number,
                f"'{name}' is {value!r}, and times of {self.reading.format} are whole ms; add time-unit=s if it counts seconds, "
                "or time-unit=ms",
            )
        return value

    def _parse_delay(self, number: int, given: Mapping[str, object]) -> float:
        value = given.get(DELAY)
        if value is None:
            return 0.0
        name = self.declared.columns[DELAY]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_TIME:
            _raise_error(self.path, number, f"'{name}' is {reprlib.repr(value)}, not a time")
        delay_s = value / (1 if self.reading.unit == DATE else self.per_second)
        if not 0 <= delay_s <= MAX_DELAY_S:
            _raise_error(
                self.path, number, f"'{name}' is {reprlib.repr(value)}, not a time from an answer to the next turn"
            )
        return delay_s


def _list_json_objects(path: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as e:
            _raise_error(path, number, f"not JSON ({e}); a file of requests has {_FORMATS}")
        if not isinstance(value, dict):
            _raise_error(path, number, f"not a JSON object; a file of requests has {_FORMATS}")
        yield number, value


def _list_csv_rows(
    path: Path, lines: list[tuple[int, str]], requested: Reading
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield the cells of each row by the names of their columns; empty cells are left out."""
    (first, header), *rest = lines
    names = _split_cells(path, first, header)
    known = requested.columns or requested.format or formats.find_format(names)
    if not known and not (len(names) > 1 and not any(isinstance(_convert_cell(name), int | float) for name in names)):
        apart = "; columns are separated by commas" if any(n in header for n in DECLARED[OWN].columns.values()) else ""
        _raise_error(path, first, f"neither JSON nor the names of CSV columns{apart}; the file should hold {_FORMATS}")
    if not known:
        _ = _guess_own(path, first, dict.fromkeys(names))
    if known in ("", OWN):
        _check_fields(path, first, names, tuple(DECLARED[OWN].columns.values()))
        for needed in (INPUT, OUTPUT):
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
        yield number, {name: _convert_cell(cell) for name, cell in zip(names, cells, strict=True) if cell}


def _split_cells(path: Path, number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as e:
        _raise_error(path, number, f"not CSV ({e})")


def _check_fields(path: Path, number: int, given: Mapping[str, object] | list[str], known: tuple[str, ...]) -> None:
    """Raise UsageError for unknown fields, because a misspelt arrival time would change the load."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known are {', '.join(known)}"
            _raise_error(path, number, f"'{name}' is not known{hint}")


def _convert_cell(cell: str) -> object:
    """Return a CSV cell as its JSON value; other text stays text, which the error shows."""
    if cell[:1].isalpha() and cell[0] not in NUMBER_LETTERS:
        return cell
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
