"""What an engine's result file says, whichever engine it is, once it has been read and checked.

And which results asked for requests of the same lengths: a curve is of one load, and sums differ with every draw.
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
from dcpbench.serving.load_words import MOST_TOKENS, parse_lengths
from dcpbench.show.text import one_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from dcpbench.imports.documents import Document
    from dcpbench.records.record import Latencies

MOST_IN_A_NAME = 1000
"""Characters of a model's name and its like."""
NEAR = 0.05
"""Means of one load differ by no more, as a share of the smaller one: a tokenizer adds some, and draws differ."""
SAME_CURVE = 0.25
"""Nor do those of a curve, whose results are of different loads: ten requests of drawn lengths say little of their mean."""
PLAUSIBLE = (0.1, 1.3)
"""The mean over the length asked for, where that stands in a name: it may mean something else."""
PER_TOKEN = 0.98
"""Gaps for each token after the first, from which on a gap stands for a token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Details:
    """Lists of one length with an entry per request; times in seconds."""

    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    """Gaps between the chunks of a stream, of which each may hold several tokens."""
    errors: list[str]
    latencies: list[float] | None = None
    start_times: list[float] | None = None

    def finished(self) -> list[int]:
        """Indices of requests that brought tokens and no error."""
        return [
            i for i, (n, error) in enumerate(zip(self.output_lens, self.errors, strict=True)) if n > 0 and not error
        ]

    def longest(self) -> int:
        """Tokens of the longest finished request, answer included; 0 without any."""
        return max((self.input_lens[i] + self.output_lens[i] for i in self.finished()), default=0)

    def latency(self, i: int) -> float:
        """Of a request, in s."""
        return self.latencies[i] if self.latencies is not None else self.ttfts[i] + math.fsum(self.itls[i])

    def per_token(self) -> bool:
        """Whether each gap of each request is that between two tokens, so that the moment of every token is known."""
        return all(len(self.itls[i]) == self.output_lens[i] - 1 for i in self.finished())

    def in_chunks(self) -> bool:
        """Whether so many tokens came beside others that gaps are those of chunks: more than 2 in 100."""
        gaps = sum(len(self.itls[i]) for i in self.finished())
        return gaps < PER_TOKEN * sum(self.output_lens[i] - 1 for i in self.finished())

    def divided(self) -> bool:
        """Whether gaps were divided among the tokens of a chunk: no clock gives so many twice in a row."""
        gaps = [gap for i in self.finished() for gap in itertools.pairwise(self.itls[i])]
        return sum(a == b for a, b in gaps) > (1 - PER_TOKEN) * len(gaps)


LISTS = tuple(field.name for field in dataclasses.fields(Details))


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a result says that has neither sums nor a duration: tokens per second for each of so many GPUs."""

    total: float
    output: float
    gpus: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One run of an engine's benchmark; None where the file does not say."""

    where: str
    model: str | None
    backend: str = ""
    """What served, where the tool that measured it is another one."""
    arrival: str
    """One of points.names.ARRIVALS."""
    request_rate: float | None
    burstiness: float = 1.0
    concurrency: int | None
    """Clients of a closed loop, or the most requests that were sent at once."""
    trace: str = ""
    submitted: int | None
    completed: int | None
    failed: int | None
    duration_s: float | None
    input_tokens: int = 0
    output_tokens: int = 0
    rates: Rates | None = None
    lengths: tuple[str | None, str | None] = (None, None)
    """Of prompts and answers as a load has them, where the file says it of all: `1024`, `uniform:256-1024`."""
    nominal: tuple[int | None, int | None] = (None, None)
    """Of prompts and answers the length that was asked for, where nothing says whether all had it."""
    device: str | None = None
    precision: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """By the name of a point's field; `unknown`, or not there, where the file does not say."""
    summary: Mapping[str, Latencies]
    """`ttft`, `itl`, `tpot`, `e2el` in ms, as the tool computed them."""
    several_tokens: bool = False
    """Whether a chunk brought several tokens of a request, as with speculative decoding, as far as the file tells."""
    goodput_s: float | None = None
    slo_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """tp, dp and dcp, in our words."""
    ep: str = ""
    """As of a point, or as many ranks as experts are dealt out to."""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of the server and the load, where a sweep says that it varied them and nothing here has a place for them."""
    hints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What may tell two servers apart: a label, metadata, a folder's name."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unread: Sequence[str] = ()
    """Fields of the file that say nothing to us, and may say something to the reader."""
    details: Details | None = None

    def means(self) -> tuple[float, float] | None:
        """Tokens of a prompt and of an answer, where sums are known."""
        done = self.completed
        return (self.input_tokens / done, self.output_tokens / done) if done else None

    def plausible(self, lengths: tuple[int | None, int | None]) -> bool:
        """Whether requests can have been asked for with such lengths."""
        low, high = PLAUSIBLE
        pairs = zip(self.means() or (), lengths, strict=False)
        return all(low <= mean / asked <= high for mean, asked in pairs if asked)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Lengths of a result's prompts and answers, as a load has them."""

    prompts: str
    """`1024`, `uniform:256-1024`, or `mean:1022` of all results of the same load; `unknown`."""
    answers: str
    nominal: bool
    """Whether a length is the one asked for, and the requests were on average of another one."""
    most: int
    """Tokens of the longest request, answer included; 0 where nobody knows it."""


@dataclasses.dataclass(frozen=True)
class _Side:
    """The prompts of a result, or its answers."""

    said: str | None
    """Their length, where the file says it of all of them."""
    nominal: int | None
    """The one asked for, where it does not."""
    tokens: int
    requests: int

    @property
    def mean(self) -> float:
        return self.tokens / self.requests

    def is_off(self) -> bool:
        """Whether requests were on average of another length than asked for."""
        return bool(self.nominal and self.requests and abs(self.mean / self.nominal - 1) > NEAR)


def shapes_of(results: Sequence[Result], loads: Sequence[object]) -> list[Shape]:
    """The shape of each result: the lengths asked for where those are known, else a mean that results of a load share.

    `loads` says of each result what it was measured on and how heavy the load was; no curve has the same twice.
    """
    pairs = [_sides(result) for result in results]
    prompts, answers = (_named(sides, loads) for sides in zip(*pairs, strict=True))
    longest: dict[tuple[str, str], list[int]] = {}
    for result, *names in zip(results, prompts, answers, strict=True):
        longest.setdefault((names[0], names[1]), []).append(result.details.longest() if result.details else 0)
    return [
        Shape(
            p,
            a,
            any(side.said is None and side.is_off() for side in sides),
            _most(p, a) or (max(longest[p, a]) if all(longest[p, a]) else 0),
        )
        for p, a, sides in zip(prompts, answers, pairs, strict=True)
    ]


def _sides(result: Result) -> tuple[_Side, _Side]:
    details, done = result.details, result.details.finished() if result.details else []
    sums = (result.input_tokens, result.output_tokens)
    found = []
    for said, nominal, tokens, lens in zip(
        result.lengths,
        result.nominal,
        sums,
        (details.input_lens, details.output_lens) if details else ((), ()),
        strict=True,
    ):
        theirs = [lens[i] for i in done]
        alike = str(theirs[0]) if len(set(theirs)) == 1 else None
        found.append(_Side(said or alike, nominal, sum(theirs) or tokens, len(theirs) or result.completed or 0))
    return found[0], found[1]


def _named(sides: Iterable[_Side], loads: Sequence[object]) -> list[str]:
    """Of each side its length; where nothing says that, the mean over all that have nearly the same.

    The smallest mean decides which others are near it. Two such groups are of one curve where they are not far apart
    and no load is in both.
    """
    sides = list(sides)
    varied = [i for i, side in enumerate(sides) if not side.said and not side.nominal and side.requests]
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
    return [side.said or (str(side.nominal) if side.nominal else names.get(i, UNKNOWN)) for i, side in enumerate(sides)]


def _most(prompts: str, answers: str) -> int:
    """Of lengths that have an upper bound; 0 for means."""
    if UNKNOWN in (prompts, answers) or "mean:" in prompts + answers:
        return 0
    bounds = [parse_lengths("", spec) for spec in (prompts, answers)]
    return sum(max(bound.low, bound.high) for bound in bounds)


def convert(document: Document, into: type[Any], tool: str) -> Any:  # noqa: ANN401 - one of the tools' structs
    """The document as one of the tools' files. Raises RecordsError that says which field is wrong."""
    try:
        found = msgspec.convert(document.fields, into)
    except msgspec.ValidationError as e:
        raise RecordsError(f"{document.where} is not what {tool} writes: {one_line(str(e))}.") from e
    for name in found.__struct_fields__:
        most = MOST_TOKENS if name.endswith("_len") else MAX_NUMBER
        _check(getattr(found, name), f"{document.where}: {name}", most=most)
    return found


def details(document: Document, completed: int) -> Details | None:
    """The lists with an entry per request, None where the file has none.

    Raises RecordsError where they do not fit each other or the summary.
    """
    given = {name: document.fields[name] for name in LISTS if document.fields.get(name)}
    needed = [f.name for f in dataclasses.fields(Details) if f.default is dataclasses.MISSING]
    if not any(name in given for name in needed):
        return None
    if lacking := [name for name in needed if name not in given]:
        raise RecordsError(f"{document.where} has details, but no {', '.join(lacking)}; it is not whole.")
    try:
        found = msgspec.convert(given, Details)
    except msgspec.ValidationError as e:
        raise RecordsError(f"{document.where}: {one_line(str(e))}.") from e
    sizes = {name: len(getattr(found, name)) for name in given}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        raise RecordsError(f"{document.where}: lists of requests differ in length: {counts}; it is not whole.")
    for name in sizes:
        most = MOST_TOKENS if name in ("input_lens", "output_lens") else MAX_NUMBER
        if name != "errors":
            _check(getattr(found, name), f"{document.where}: {name}", signed=name == "start_times", most=most)
    if (listed := len(found.finished())) != completed:
        raise RecordsError(
            f"{document.where} says that {completed:,} requests completed, while its lists hold {listed:,} "
            "with tokens and without error; remove the lists (ttfts, itls, …) to import its summary alone."
        )
    return found


def rate(document: Document, tool: str, words: Sequence[str]) -> float | None:
    """Requests per second; None where nothing spaces them (`inf`), or the file has another of `words` for it.

    Raises RecordsError for what is neither.
    """
    value = document.fields.get("request_rate")
    if value is None or value in words:
        return None
    number = _number(value)
    if number == math.inf:
        return None
    if number is None or not 0 < number <= MAX_NUMBER:
        said = f"{document.where}: request_rate is {str(value)[:40]}"
        raise RecordsError(f"{said}; {tool} writes a number above 0, or {' or '.join(words)}.")
    return number


def unread(document: Document, known: Collection[str], times: Sequence[str], details: Details | None) -> list[str]:
    """Fields with a value that are neither `known` nor statistics of `times` that we have, or compute of details."""
    ours = "mean|median|std|p90|p95|p99" if details is None else r"mean|median|std|max|p[\d.]+"
    statistic = re.compile(rf"(?:{ours})_(?:{'|'.join(times)})_ms")
    return [
        name
        for name, value in document.fields.items()
        if value not in (None, "", [], {}) and name not in known and not statistic.fullmatch(name)
    ]


def model(name: object, where: str) -> str | None:
    """A model's name; None for an empty one. Raises RecordsError for one that is too long."""
    if not isinstance(name, str) or not name.strip():
        return None
    _check(name, f"{where}: the model's name")
    return name


def _number(value: object) -> float | None:
    """Also of a text, as parameters of a sweep may be; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def integer(value: object) -> int | None:
    """A whole number above 0, also as text."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 7 and int(text) else None  # noqa: PLR2004 - a degree


def _check(value: object, what: str, *, signed: bool = False, most: float = MAX_NUMBER) -> None:
    """Numbers are finite, not negative and at most `most`, texts no longer than a name."""
    if isinstance(value, list):
        for entry in value:
            _check(entry, what, signed=signed, most=most)
    elif isinstance(value, str) and len(value) > MOST_IN_A_NAME:
        raise RecordsError(f"{what} has {len(value):,} characters, which is no name; was the file written by hand?")
    elif isinstance(value, float | int) and not isinstance(value, bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordsError(f"{what} is {value}; a result with NaN or infinity cannot be compared. Run it again.")
        if abs(value) > most:
            raise RecordsError(f"{what} is above {most:g}, more than anything measured; was the file damaged?")
        if value < 0 and not signed:
            raise RecordsError(f"{what} is {value}, less than nothing.")
