"""Define the checked contents of one result of any tool, and the lengths that results have in common.

A curve belongs to one load, while the sums of tokens differ with every draw of lengths.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.names import UNKNOWN
from dcpbench.serving.load_words import MAX_TOKENS, parse_lengths
from dcpbench.show.text import fit_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.records.record import Latencies

MAX_NAME = 1000  # characters of a model's name and similar texts
NEAR = 0.05  # maximum difference between means of one load, of the smaller: a tokenizer adds tokens, and draws differ
SAME_CURVE = 0.25  # maximum difference between means along a curve of loads: ten drawn lengths have a wide mean
PLAUSIBLE = (0.1, 1.3)  # range of the mean over a length from a name, outside which the name means something else
PER_TOKEN = 0.98  # minimum number of gaps per token after the first with which a gap counts as the gap of one token
MIN_CHUNK_TOKENS = 1.1  # least tokens per chunk for gaps of chunks; mean ITL and TPOT weigh requests differently


@dataclasses.dataclass(frozen=True, kw_only=True)
class Details:
    """Hold lists of equal length with an entry per request; times in s."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]  # gaps between the chunks of each stream, which may hold several tokens
    errors: list[str]
    latencies: list[float] | None = None
    start_times: list[float] | None = None

    def list_finished(self) -> list[int]:
        """Return the indices of requests with tokens and without an error."""
        return [
            i for i, (n, error) in enumerate(zip(self.output_lens, self.errors, strict=True)) if n > 0 and not error
        ]

    def compute_max_tokens(self) -> int:
        """Return the tokens of the longest finished request, answer included; 0 without finished requests."""
        return max((self.input_lens[i] + self.output_lens[i] for i in self.list_finished()), default=0)

    def compute_latency(self, i: int) -> float:
        """Return the end-to-end latency of a request in s."""
        return self.latencies[i] if self.latencies is not None else self.ttfts[i] + math.fsum(self.itls[i])

    def has_token_times(self) -> bool:
        """Return whether every gap lies between two tokens, so that the time of every token is known."""
        return all(len(self.itls[i]) == self.output_lens[i] - 1 for i in self.list_finished())

    def has_chunk_gaps(self) -> bool:
        """Return whether more than 2 % of the tokens arrived in a chunk with others, so that gaps are those of chunks."""
        gaps = sum(len(self.itls[i]) for i in self.list_finished())
        return gaps < PER_TOKEN * sum(self.output_lens[i] - 1 for i in self.list_finished())

    def has_divided_gaps(self) -> bool:
        """Return whether the tool divided gaps among the tokens of a chunk: a clock rarely yields equal gaps in a row."""
        gaps = [gap for i in self.list_finished() for gap in itertools.pairwise(self.itls[i])]
        return sum(a == b for a, b in gaps) > (1 - PER_TOKEN) * len(gaps)


EVEN = 1e6  # burstiness of a load that a tool sends at even gaps: the largest that a load has
ONE_TOKEN = 1.05  # maximum number of tokens per step or chunk with which a chunk counts as one token


@dataclasses.dataclass(frozen=True)
class Steps:
    """Hold the timed steps of a batch that only decodes."""

    samples_ms: Sequence[float]
    context: int  # KV rows of a request before the step, on average
    ranks: int


LISTS = tuple(field.name for field in dataclasses.fields(Details))
LENS = ("input_lens", "output_lens")  # lists that InferenceX's copy of the benchmark saves without --save-detailed, too


@dataclasses.dataclass(frozen=True)
class Rates:
    """Hold tokens per second and GPU of a result that has neither sums nor a duration."""

    total: float
    output: float
    gpus: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Hold one run of an engine's benchmark; None for facts that the file does not contain."""

    where: str
    model: str | None = None
    backend: str = ""  # the engine that served, if it is not the one that wrote the benchmark
    arrival: str  # arrival process, in the names of a load
    request_rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None  # clients of a closed loop, or the maximum number of requests in flight
    trace: str = ""
    submitted: int | None = None
    completed: int | None = None
    failed: int | None = None
    duration_s: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    rates: Rates | None = None
    lengths: tuple[str | None, str | None] = (None, None)  # prompts and answers, `1024`, `uniform:256-1024`; or None
    nominal: tuple[int | None, int | None] = (None, None)  # requested lengths, if it is unknown whether all have them
    device: str | None = None
    precision: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by point field; `unknown` or absent: none
    summary: Mapping[str, Latencies] = dataclasses.field(default_factory=dict)  # `ttft`, `itl`, `tpot`, `e2el` in ms
    several_tokens: bool = False  # true if the file shows that chunks hold several tokens, as with speculative decoding
    request_goodput: float | None = None
    slo_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, int] = dataclasses.field(default_factory=dict)  # tp, dp, dcp, pp, pcp of decode instances
    disaggregate: str = ""  # prefill and decode instances as a point has them: `1:2`; empty for one that does both
    prefill_gpus: int = 0  # GPUs of each prefill instance if its layout is another one; else 0
    ep: str = ""  # expert parallelism as a point has it, or the number of expert-parallel ranks
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)  # parameters that no point field has
    swept: bool = False  # true for a run of a sweep; its file lists what distinguishes its server
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)  # label, metadata, image or names of files
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: Sequence[str] = ()  # fields of the file that are not read and may matter to the reader
    details: Details | None = None
    steps: Steps | None = None  # timed decode steps, of a tool that serves no requests

    @property
    def gpus(self) -> int:
        """GPUs of one instance; 0 if the layout is unknown."""
        return count_instance_gpus(self.layout)

    def compute_means(self) -> tuple[float, float] | None:
        """Return the mean tokens of a prompt and of an answer; None if the sums are unknown."""
        done = self.completed
        return (self.input_tokens / done, self.output_tokens / done) if done else None

    def is_plausible(self, lengths: tuple[int | None, int | None]) -> bool:
        """Return whether requests of such lengths can have had these means."""
        low, high = PLAUSIBLE
        pairs = zip(self.compute_means() or (), lengths, strict=False)
        return all(low <= mean / requested <= high for mean, requested in pairs if requested)

    def estimate_chunk_tokens(self) -> float | None:
        """Return the mean number of tokens per chunk from the tool's own summary; None if it cannot be estimated.

        With sums and end-to-end latencies: (output tokens - requests) * mean ITL / (requests * (mean E2EL - mean TTFT)).
        Otherwise mean ITL / mean TPOT, which is that number for requests of equal length.
        """
        itl, tpot, ttft, e2el = (self.summary[name].mean for name in ("itl", "tpot", "ttft", "e2el"))
        if not itl:
            return None
        decoded = self.output_tokens - (self.completed or 0)
        if self.completed and decoded > 0 and ttft and e2el and e2el > ttft:
            return decoded * itl / (self.completed * (e2el - ttft))
        if not tpot:
            itl, tpot = self.summary["itl"].p50, self.summary["tpot"].p50
        return itl / tpot if itl and tpot else None


def count_instance_gpus(layout: Mapping[str, int]) -> int:
    """Return the GPUs of one instance of a layout: tp, each pipeline stage and each prefill-context-parallel rank."""
    return layout["tp"] * layout["pp"] * layout["pcp"] if layout else 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """Hold the lengths of a result's prompts and answers, as a load has them."""

    prompts: str  # `1024`, `uniform:256-1024`, or `mean:1022` of all results of the same load; `unknown`
    answers: str
    nominal: bool  # true if a length is the requested one, and requests had another one on average
    longest: int  # tokens of the longest request, answer included; 0 if unknown


@dataclasses.dataclass(frozen=True)
class _Side:
    """Hold the prompts of a result, or its answers."""

    fixed: str | None  # length of all of them, if the file has it
    nominal: int | None  # requested length, if the file does not have the length of all
    tokens: int
    requests: int

    @property
    def mean(self) -> float:
        return self.tokens / self.requests

    def is_off(self) -> bool:
        """Return whether requests had another length on average than the requested one."""
        return bool(self.nominal and self.requests and abs(self.mean / self.nominal - 1) > NEAR)


def make_shapes(results: Sequence[Result], loads: Sequence[object]) -> list[Shape]:
    """Return the shape of each result: the requested lengths if they are known, else a mean that results of a load share.

    `loads` has for each result the server and the load. A curve has none of them twice.
    """
    pairs = [_make_sides(result) for result in results]
    prompts, answers = (_format_lengths(sides, loads) for sides in zip(*pairs, strict=True))
    longest: dict[tuple[str, str], list[int]] = {}
    for result, *names in zip(results, prompts, answers, strict=True):
        longest.setdefault((names[0], names[1]), []).append(
            result.details.compute_max_tokens() if result.details else 0
        )
    return [
        Shape(
            p,
            a,
            any(side.fixed is None and side.is_off() for side in sides),
            _compute_max_tokens(p, a) or (max(longest[p, a]) if all(longest[p, a]) else 0),
        )
        for p, a, sides in zip(prompts, answers, pairs, strict=True)
    ]


def _make_sides(result: Result) -> tuple[_Side, _Side]:
    details, done = result.details, result.details.list_finished() if result.details else []
    sums = (result.input_tokens, result.output_tokens)
    found = []
    for fixed, nominal, tokens, lens in zip(
        result.lengths,
        result.nominal,
        sums,
        (details.input_lens, details.output_lens) if details else ((), ()),
        strict=True,
    ):
        theirs = [lens[i] for i in done]
        equal = str(theirs[0]) if len(set(theirs)) == 1 else None
        found.append(_Side(fixed or equal, nominal, sum(theirs) or tokens, len(theirs) or result.completed or 0))
    return found[0], found[1]


def _format_lengths(sides: Iterable[_Side], loads: Sequence[object]) -> list[str]:
    """Return the length of each side; if it is unknown, the mean over all sides with nearly the same mean.

    The smallest mean decides which others are near it. Two groups belong to one curve if they are not far apart and have
    no load in common.
    """
    sides = list(sides)
    varied = [i for i, side in enumerate(sides) if not side.fixed and not side.nominal and side.requests]
    groups: list[list[int]] = []
    for i in sorted(varied, key=lambda i: sides[i].mean):
        if not groups or sides[i].mean > sides[groups[-1][0]].mean * (1 + NEAR):
            groups.append([])
        groups[-1].append(i)
    curves: list[list[int]] = []
    for group in groups:
        before = curves[-1] if curves else []
        near = before and sides[group[-1]].mean <= sides[before[0]].mean * (1 + SAME_CURVE)
        if near and {loads[i] for i in before}.isdisjoint(loads[i] for i in group):
            before += group
        else:
            curves.append(list(group))
    names = {
        i: f"mean:{sum(sides[j].tokens for j in same) / sum(sides[j].requests for j in same):.0f}"
        for same in curves
        for i in same
    }
    return [
        side.fixed or (str(side.nominal) if side.nominal else names.get(i, UNKNOWN)) for i, side in enumerate(sides)
    ]


def _compute_max_tokens(prompts: str, answers: str) -> int:
    """Return the tokens of the longest request for lengths with an upper bound; 0 for means."""
    if UNKNOWN in (prompts, answers) or "mean:" in prompts + answers:
        return 0
    bounds = [parse_lengths("", spec) for spec in (prompts, answers)]
    return sum(max(bound.low, bound.high) for bound in bounds)


def convert(document: Document, into: type[Any], tool: str) -> Any:  # noqa: ANN401 - one of the tools' structs
    """Return the document as the struct of a tool's file. Raise RecordsError with the name of a wrong field."""
    try:
        found = msgspec.convert(document.fields, into)
    except msgspec.ValidationError as e:
        raise RecordsError(f"{document.where} is not what {tool} writes: {fit_line(str(e))}.") from e
    for name in found.__struct_fields__:
        limit = MAX_TOKENS if name.endswith("_len") else MAX_NUMBER
        _check_values(getattr(found, name), f"{document.where}: {name}", limit=limit)
    return found


def choose(where: str, field: str, value: str, known: Mapping[str, str]) -> str:
    """Return what a value of a field means. Raise RecordsError for a value that is not known."""
    if value not in known:
        raise RecordsError(f"{where}: {field} is {value[:MAX_NAME]!r}, and known are {', '.join(known)}.")
    return known[value]


def read_details(document: Document, completed: int) -> Details | None:
    """Return the lists with an entry per request; None if the file has none, or lengths alone.

    Raise RecordsError if they do not fit each other or the summary.
    """
    given = {name: document.fields[name] for name in LISTS if document.fields.get(name)}
    needed = [f.name for f in dataclasses.fields(Details) if f.default is dataclasses.MISSING]
    if not any(name in given for name in needed if name not in LENS):
        return None
    if lacking := [name for name in needed if name not in given]:
        raise RecordsError(f"{document.where} has details, but no {', '.join(lacking)}; it is not whole.")
    try:
        found = msgspec.convert(given, Details)
    except msgspec.ValidationError as e:
        raise RecordsError(f"{document.where}: {fit_line(str(e))}.") from e
    sizes = {name: len(getattr(found, name)) for name in given}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise RecordsError(f"{document.where}: lists of requests differ in length: {counts}; it is not whole.")
    for name in sizes:
        limit = MAX_TOKENS if name in LENS else MAX_NUMBER
        if name != "errors":
            _check_values(getattr(found, name), f"{document.where}: {name}", signed=name == "start_times", limit=limit)
    if (listed := len(found.list_finished())) != completed:
        raise RecordsError(
            f"{document.where} states that {completed:,} requests completed, while its lists hold {listed:,} "
            "with tokens and without error; remove the lists (ttfts, itls, …) to import its summary alone."
        )
    return found


def read_equal_lengths(document: Document) -> tuple[str | None, str | None]:
    """Return the length of all prompts and of all answers, if lists of lengths have a single value for finished requests.

    Raise RecordsError for lists that are not lengths.
    """
    prompts, answers = (document.fields.get(name) or [] for name in LENS)
    try:
        pairs = list(zip(msgspec.convert(prompts, list[int]), msgspec.convert(answers, list[int]), strict=True))
    except (msgspec.ValidationError, ValueError) as e:
        raise RecordsError(f"{document.where}: {' and '.join(LENS)} are not lists of equally many lengths.") from e
    _check_values(
        [length for pair in pairs for length in pair], f"{document.where}: {' or '.join(LENS)}", limit=MAX_TOKENS
    )
    finished = [pair for pair in pairs if pair[1]]
    prompts, answers = (
        str(lengths.pop()) if len(lengths := {pair[side] for pair in finished}) == 1 else None for side in (0, 1)
    )
    return prompts, answers


def read_rate(document: Document, tool: str, words: Sequence[str]) -> float | None:
    """Return the requests per second; None if all are sent at once (`inf`), or for one of the other `words`.

    Raise RecordsError for any other value.
    """
    value = document.fields.get("request_rate")
    if value is None or value in words:
        return None
    number = _parse_number(value)
    if number == math.inf:
        return None
    if number is None or not 0 < number <= MAX_NUMBER:
        raise RecordsError(
            f"{document.where}: request_rate is {str(value)[:40]}; {tool} writes a number above 0, or {' or '.join(words)}."
        )
    return number


def list_unread(document: Document, known: Collection[str], times: Sequence[str], details: Details | None) -> list[str]:
    """Return the fields with a value that are neither `known` nor statistics of `times` that are read or computed."""
    ours = "mean|median|std|p50|p90|p95|p99" if details is None else r"mean|median|std|max|p[\d.]+"
    statistic = re.compile(rf"(?:{ours})_(?:{'|'.join(times)})_ms")
    return [
        name
        for name, value in document.fields.items()
        if value not in (None, "", [], {}) and name not in known and not statistic.fullmatch(name)
    ]


def read_model(name: object, where: str) -> str | None:
    """Return the name of a model; None for an empty one. Raise RecordsError for a name that is too long."""
    if not isinstance(name, str) or not name.strip():
        return None
    _check_values(name, f"{where}: the model's name")
    return name


def _parse_number(value: object) -> float | None:
    """Return a number, also from a text, as parameters of a sweep may be; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def get_table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a field that holds an object; an empty one if it is absent or of another type."""
    found = fields.get(name)
    return found if isinstance(found, dict) else {}


def read_integer(value: object) -> int | None:
    """Return a whole number above 0, also from a text; None for anything else."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 and int(text) else None  # noqa: PLR2004 - a degree


def read_first_integer(fields: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Return the number of the first of these fields that has one (`read_integer`); None if none has."""
    return next((number for name in names if (number := read_integer(fields.get(name)))), None)


def _check_values(value: object, what: str, *, signed: bool = False, limit: float = MAX_NUMBER) -> None:
    """Raise RecordsError unless numbers are finite, not negative and at most `limit`, and texts no longer than a name."""
    if isinstance(value, list):
        for entry in value:
            _check_values(entry, what, signed=signed, limit=limit)
    elif isinstance(value, str) and len(value) > MAX_NAME:
        raise RecordsError(f"{what} has {len(value):,} characters, which is no name; was the file written by hand?")
    elif isinstance(value, float | int) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordsError(f"{what} is {value}; a result with NaN or infinity cannot be compared. Run it again.")
        if abs(value) > limit:
            raise RecordsError(f"{what} is above {limit:g}, more than anything measured; was the file damaged?")
        if value < 0 and not signed:
            raise RecordsError(f"{what} is {value}, less than nothing.")
