"""Predict the duration of a step from measured cases, by interpolation along the terms that the hardware determines.

    decode only    T(rows, KV)         read the weights that the rows need, and their KV
    prefill only   F(tokens, x) + …    weights and products for all tokens, and attention of each to x others
    mixed          F(all rows, x) + G(rows, KV)     decode rows use weights as other rows do, but attend to their own KV
    uneven         … - S(rows) · share              some replicas have fewer rows than the fullest for the experts
    unaligned      … + U(rows)                      another engine whose kernels are slower for numbers of rows that are no
                                                    multiple of some number

All terms are linear in KV tokens, because attention reads each row once, and in pairs of tokens that attend to each
other. In rows they bend (number of experts hit, ridge point of the roofline), so neighbouring sizes are measured. Steps
outside the measured range are refused, except up to a fifth more KV or pairs, where the line is extrapolated.
"""

from __future__ import annotations

import bisect
import collections
import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

from dcpbench.errors import RecordsError, UsageError
from dcpbench.points.batches import CHUNK_TILE, GRAPH_BATCHES, compute_batch_rows, compute_chunk_rows, pad_to_size
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dcpbench.serving.requests import Step

HEAT_S = 0.04  # default thermal time constant of a power-limited GPU in s, if not measured (H100 and H200)
TELLS = 0.005  # minimum relative slowdown of a case that is used to estimate heat; smaller ones are noise
BEYOND = 1.2  # factor by which a line in KV tokens or pairs is extrapolated past its last case


class ReplicaBatch(NamedTuple):
    """Work of a replica in a step, as far as its time depends on it."""

    rows: int  # decode rows as they run: padded (batches.py)
    kv_tokens: int  # KV tokens that all decode rows together attend to
    tokens: int  # tokens of chunks
    pairs: float  # Σ tokens · (prefix + tokens / 2) over chunks: tokens times those that each attends to
    prefix: int  # Σ prefix over chunks: stored tokens that are gathered and decompressed
    decodes: int = 0  # decode rows without padding
    queries: int = 1  # query rows of each decode row: a known token, and its drafts

    @classmethod
    def from_requests(
        cls, requests: int, kv_tokens: int, chunks: Iterable[tuple[int, int]], queries: int = 1
    ) -> ReplicaBatch:
        """Return the work of decoding `requests` requests and of chunks, each (tokens, prefix)."""
        tokens, pairs, prefix = 0, 0.0, 0
        for count, before in chunks:
            tokens += count
            pairs += count * (before + count / 2)
            prefix += before
        rows = compute_batch_rows(requests) if requests else 0
        return cls(rows, kv_tokens, tokens, pairs, prefix, requests, queries)

    @property
    def all_rows(self) -> int:
        """Return the rows of decodes, padded, and of chunks."""
        return self.rows * self.queries + self.tokens

    @property
    def rows_with_chunks(self) -> int:
        """Return the rows in a step with chunks that go to experts, without padding to the fullest replica."""
        return compute_chunk_rows(self.all_rows)


TimedCase = tuple[ReplicaBatch, float]  # a case and its ms


def compute_step_works(step: Step) -> list[ReplicaBatch]:
    """Return the work of each replica."""
    found = []
    for replica in step.replicas:
        requests, chunks = len(replica.decodes), [(c.tokens, c.start) for c in replica.chunks]
        kv_tokens = sum(replica.positions) + requests * replica.queries + sum(replica.discarded)
        found.append(ReplicaBatch.from_requests(requests + len(replica.discarded), kv_tokens, chunks, replica.queries))
    return found


def _find_bracket(xs: Sequence[float], x: float) -> tuple[int, int, float]:
    """Return the indices of the two sorted numbers around `x`, or past an end the nearest two, and the weight of the
    second.
    """
    if len(xs) == 1:
        return 0, 0, 0.0
    i = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    return i - 1, i, (x - xs[i - 1]) / (xs[i] - xs[i - 1])


class PiecewiseLinear:
    """Piecewise linear through points, those of one x by their mean; beyond its ends the last pieces go on."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        of_x: dict[float, list[float]] = collections.defaultdict(list)
        for x, y in points:
            of_x[x].append(y)
        self.xs = sorted(of_x)
        self.ys = [statistics.fmean(of_x[x]) for x in self.xs]

    @property
    def max_x(self) -> float:
        """Return the largest measured x."""
        return float(self.xs[-1])

    def __call__(self, x: float) -> float:
        """Return y at x."""
        a, b, share = _find_bracket(self.xs, x)
        return float(self.ys[a] + share * (self.ys[b] - self.ys[a]))

    def predict_clamped(self, x: float) -> float:
        """Return y at x, constant past the ends."""
        return self(min(max(x, self.xs[0]), self.xs[-1]))


class Surface:
    """Lines over rows: linear between the lines of neighbouring sizes, all at the same x."""

    def __init__(self, points: Iterable[tuple[int, float, float]]) -> None:
        """Build the surface from (rows, x, ms); x is KV tokens per row, or the tokens that a token attends to."""
        by_rows: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        for rows, x, ms in points:
            by_rows[rows].append((x, ms))
        self.sizes = sorted(by_rows)
        self.lines = [PiecewiseLinear(by_rows[rows]) for rows in self.sizes]
        self.beyond = BEYOND
        self._nearest: dict[float, tuple[PiecewiseLinear, PiecewiseLinear, float, float]] = {}

    def __call__(self, rows: float, x: float) -> float:
        """Return the time in ms at this number of rows."""
        below, above, share, _ = self._find_nearest(rows)
        return (1 - share) * below(x) + share * above(x)

    def compute_max_x(self, rows: float) -> float:
        """Return the largest supported x at this number of rows, from the cases of its two neighbours."""
        return self._find_nearest(rows)[3]

    def _find_nearest(self, rows: float) -> tuple[PiecewiseLinear, PiecewiseLinear, float, float]:
        """Return the lines of the two nearest sizes, the weight of the second, and the largest supported x.

        A replay asks for few different numbers of rows, each many thousand times.
        """
        found = self._nearest.get(rows)
        if found is None:
            a, b, share = _find_bracket(self.sizes, rows)
            below, above = self.lines[a], self.lines[b]
            found = self._nearest[rows] = below, above, share, self.beyond * max(below.max_x, above.max_x)
        return found


class DecodeTimes:
    """Steps of decode rows alone: T(padded rows, KV tokens). Interpolated at equal KV tokens per row."""

    def __init__(self, cases: Sequence[TimedCase]) -> None:
        self.surface = Surface((w.rows, w.kv_tokens / w.rows, ms) for w, ms in cases)

    def __call__(self, rows: int, kv_tokens: int) -> float:
        """Return the time of a step in ms."""
        surface, each = self.surface, kv_tokens / rows
        if not surface.sizes[0] <= rows <= surface.sizes[-1] or each > surface.compute_max_x(rows):
            raise _make_outside_error(
                f"{format_count(rows, 'decode row')} with {kv_tokens:,} KV tokens",
                f"{surface.sizes[0]} to {surface.sizes[-1]} rows, with up to {surface.compute_max_x(rows):,.0f} tokens each",
            )
        return surface(rows, each)


class PrefillTimes:
    """Duration of padded rows (batches.py) through all layers, and of attention of chunks: F(rows, pairs, prefix).

        F = f(rows, pairs / rows) + begin(rows) + gather_ms · prefix     the last two with a prefix alone

    f has a line over pairs / rows at each measured number of rows, fitted through the cases without a prefix and those
    with one, minus the cost of the prefix. `begin` is the fixed cost of gathering from other ranks, from the shortest
    prefix on.
    """

    def __init__(
        self,
        cases: Sequence[TimedCase],
        gather: Sequence[TimedCase],
        decode_rows: int,
        *,
        pad_rows: Callable[[int], int] = compute_chunk_rows,
    ) -> None:
        """Fit the model; `gather` holds the cases off the line, `decode_rows` the additional decode rows allowed with
        chunks. `pad_rows` returns the rows that the engine computes for a number of rows.
        """
        self.pad_rows = pad_rows
        self.bare = [(w, ms) for w, ms in cases if not w.prefix]
        self.stored = [(w, ms) for w, ms in cases if w.prefix]
        self.most = pad_rows(max(w.tokens for w, _ in cases) + decode_rows)
        slope = self._estimate_gather_beyond_line(gather) if gather else self._estimate_gather_along_lines()
        self.gather_ms = max(slope, 0.0)  # below 0 is noise: gathering more is never faster
        self.begin, self.ms = self._fit_lines(self.gather_ms)

    def _fit_lines(self, gather_ms: float) -> tuple[PiecewiseLinear, Surface]:
        """Return `begin` and f for a given cost per stored token."""
        lines: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        for w, ms in self.bare:
            rows, x = self._compute_rows_and_x(w)
            lines[rows].append((x, ms))
        _lead_to_short_prompts(lines)
        found: dict[int, list[tuple[float, float]]] = collections.defaultdict(list)
        for w, ms in self.stored:
            rows, x = self._compute_rows_and_x(w)
            found[rows].append((x, ms - gather_ms * w.prefix))
        begins = [
            (rows, _compute_begin_ms(max(lines[rows]), found[rows]))
            for rows in found
            if len(found[rows]) > 1 and lines[rows]
        ]
        begin = PiecewiseLinear(begins or [(0.0, 0.0)])
        slopes = []
        for rows, cases in found.items():
            top = max(lines[rows], default=None)
            lines[rows] += [(x, ms - begin.predict_clamped(rows)) for x, ms in cases]
            far = max(lines[rows])
            if top is not None and far[0] > top[0]:
                slopes.append((rows, (far[1] - top[1]) / (far[0] - top[0]) / rows))
        if slopes:  # of a pair, which is much the same for all: lines that have no far end get theirs from the others
            end = max(x for points in lines.values() for x, _ in points)
            slope = PiecewiseLinear(slopes)
            for rows in set(lines) - set(found):
                x, ms = max(lines[rows])
                lines[rows].append((end, ms + slope.predict_clamped(rows) * rows * (end - x)))
        return begin, Surface((rows, x, ms) for rows, points in lines.items() for x, ms in points)

    def _estimate_gather_beyond_line(self, gather: Sequence[TimedCase]) -> float:
        """Return the time per stored token in ms, from cases with more stored tokens than those on the line.

        The excess of these cases over the line decreases linearly with the assumed time per token, so two trials
        determine it.
        """
        left = []
        for gather_ms in (0.0, 1.0):
            begin, f = self._fit_lines(gather_ms)
            at = [(w, ms, *self._compute_rows_and_x(w)) for w, ms in gather]
            left.append(
                sum(ms - f(rows, x) - begin.predict_clamped(rows) - gather_ms * w.prefix for w, ms, rows, x in at)
            )
        if abs(left[0] - left[1]) < len(gather):  # the time per token cannot be separated from the line
            raise RecordsError("a case for gathering has no more prefix than the others; measure step times again.")
        return left[0] / (left[0] - left[1])

    def _estimate_gather_along_lines(self) -> float:
        """Return the time per stored token in ms from the last segments of the lines, if no step can have many
        prefixes.

        On a segment, ms grow with pairs and with prefix. More rows mean more pairs per stored token, which separates
        the two: least squares of Δms = a · Δpairs + b · Δprefix, with each line weighted by 1 / Δprefix.
        """
        pieces = []
        for rows in sorted({self._compute_rows_and_x(w)[0] for w, _ in self.stored}):
            cases = sorted(
                (w.pairs, w.prefix, ms)
                for w, ms in [*self.bare, *self.stored]
                if self._compute_rows_and_x(w)[0] == rows
            )
            few, many = cases[-2:] if len(cases) > 1 else (cases[0], cases[0])
            if (more := many[1] - few[1]) > 0:
                pieces.append(((many[0] - few[0]) / more, (many[2] - few[2]) / more))
        if len({x for x, _ in pieces}) < 2:  # noqa: PLR2004 - a line through points
            return pieces[0][1] if pieces else 0.0
        x_mean, y_mean = (sum(values) / len(pieces) for values in zip(*pieces, strict=True))
        slope = sum((x - x_mean) * (y - y_mean) for x, y in pieces) / sum((x - x_mean) ** 2 for x, _ in pieces)
        return float(y_mean - slope * x_mean)

    def __call__(self, rows: int, pairs: float, prefix: int) -> float:
        """Return the time in ms of a step's `rows` rows, decode rows included, without the attention of the latter."""
        rows, surface = self.pad_rows(rows), self.ms
        x = pairs / rows
        if not surface.sizes[0] <= rows <= self.most or x > surface.compute_max_x(rows) + 1:
            raise _make_outside_error(
                f"{rows:,} rows whose chunks' tokens attend to {x:,.0f} tokens on average",
                f"{surface.sizes[0]:,} to {self.most:,} rows, with up to {surface.compute_max_x(rows):,.0f} tokens",
                "a smaller --prefill chunk or load" if rows > self.most else "a smaller load",
            )
        return surface(rows, x) + (self.begin.predict_clamped(rows) + self.gather_ms * prefix if prefix else 0.0)

    def _compute_rows_and_x(self, batch: ReplicaBatch) -> tuple[int, float]:
        rows = self.pad_rows(batch.tokens)
        return rows, batch.pairs / rows


def _compute_begin_ms(bare: tuple[float, float], stored: Sequence[tuple[float, float]]) -> float:
    """Return the fixed cost in ms of a prefix.

    f is a line through `bare` and through the farthest of `stored`, less the cost, and the nearest lies on it; points
    are (pairs / rows, ms).
    """
    near, far = min(stored), max(stored)
    share = (near[0] - bare[0]) / (far[0] - bare[0])
    return max((near[1] - bare[1] - share * (far[1] - bare[1])) / (1 - share), 0.0)


def _lead_to_short_prompts(lines: dict[int, list[tuple[float, float]]]) -> None:
    """Extend lines measured with one length of prompts to 0, because the others continue from theirs to shorter ones.

    There a pair takes less time than between prompts and long prefixes, which add more than pairs.
    """
    slopes = []
    for rows, points in lines.items():
        short, long = min(points), max(points)
        if long[0] > short[0]:
            slopes.append((rows, max((long[1] - short[1]) / (long[0] - short[0]) / rows, 0.0)))
    if slopes:
        slope = PiecewiseLinear(slopes)
        for rows, points in lines.items():
            x, ms = min(points)
            if x == max(points)[0]:
                points.append((0.0, ms - slope.predict_clamped(rows) * rows * x))


def _raise_rows(rows: int) -> int:
    """Return at least CHUNK_TILE rows: fewer take no less time."""
    return max(rows, CHUNK_TILE)


class MixedTimes:
    """Additional time of the attention of decode rows in a step with chunks: G(padded rows, KV tokens), by the chunks'
    tokens.

    It depends little on the chunks, unless launching on the host is slower than the device. Beyond the fewest and the
    most measured tokens, the nearest measured value is used.
    """

    def __init__(self, cases: Sequence[TimedCase], prefill: PrefillTimes) -> None:
        """Build lines over KV tokens per row for each number of rows and of tokens."""
        self.beyond = BEYOND
        found: dict[int, dict[int, list[tuple[float, float]]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for w, ms in cases:
            more = ms - prefill(w.all_rows, w.pairs, w.prefix)
            found[w.rows][w.tokens].append((w.kv_tokens / w.rows, more))
        self.sizes = sorted(found)
        self.tokens = {rows: sorted(found[rows]) for rows in self.sizes}
        self.lines = {
            rows: [PiecewiseLinear(found[rows][tokens]) for tokens in self.tokens[rows]] for rows in self.sizes
        }

    def __call__(self, batch: ReplicaBatch) -> float:
        """Return the time in ms to add to PrefillTimes."""
        rows, each = batch.rows, batch.kv_tokens / batch.rows
        low, high, share = _find_bracket(self.sizes, rows)
        near = [self._find_lines(self.sizes[index], batch.tokens) for index in (low, high)]
        max_x = self.beyond * max(line.max_x for *lines, _ in near for line in lines)
        # With attention DP, a replica without chunks has a request more.
        most = compute_batch_rows(self.sizes[-1] + 1)
        if not self.sizes[0] <= rows <= most or each > max_x:
            raise _make_outside_error(
                f"{format_count(rows, 'decode row')} with {batch.kv_tokens:,} KV tokens in a step with chunks",
                f"{self.sizes[0]} to {most} rows, with up to {max_x:,.0f} tokens each",
            )
        fewer, more = ((1 - weight) * below(each) + weight * above(each) for below, above, weight in near)
        return (1 - share) * fewer + share * more

    def _find_lines(self, rows: int, tokens: int) -> tuple[PiecewiseLinear, PiecewiseLinear, float]:
        """Return the lines of the two nearest numbers of tokens, and the weight of the second."""
        lines = self.lines[rows]
        low, high, share = _find_bracket(self.tokens[rows], tokens)
        return lines[low], lines[high], min(max(share, 0.0), 1.0)


class UnalignedTimes:
    """Additional time of a step with chunks whose number of rows is no multiple of `multiple`: U(rows).

    The products of all rows take longer, whatever the rows attend to. Below the measured rows it falls to 0.
    """

    def __init__(self, cases: Sequence[TimedCase], prefill: PrefillTimes, multiple: int) -> None:
        self.multiple = multiple
        found = [(w.tokens, ms - prefill(w.tokens, w.pairs, w.prefix)) for w, ms in cases]
        self.ms = PiecewiseLinear([(0, 0.0), *found])

    def __call__(self, rows: int) -> float:
        """Return the time in ms to add to PrefillTimes and MixedTimes."""
        return max(self.ms.predict_clamped(rows), 0.0) if rows % self.multiple else 0.0  # below 0 is noise


class UnevenSavings:
    """Time saved by a step with chunks in which replicas have fewer rows than the fullest one: S(rows of the fullest) ·
    share.

    S is the saving if all rows belong to one replica, and share is the missing share of the others' rows: expert
    products skip padding rows, and experts without tokens are not read.
    """

    def __init__(self, cases: Sequence[TimedCase], prefill: PrefillTimes) -> None:
        self.ms = PiecewiseLinear((w.rows_with_chunks, prefill(w.tokens, w.pairs, w.prefix) - ms) for w, ms in cases)

    def __call__(self, works: Sequence[ReplicaBatch]) -> float:
        """Return the time in ms to subtract from PrefillTimes and MixedTimes."""
        rows = [batch.rows_with_chunks for batch in works]
        most, others = max(rows), len(rows) - 1
        if not others:
            return 0.0
        share = sum(most - each for each in rows) / (others * most)
        return share * max(self.ms(most), 0.0)  # below 0 is noise


class HotStep(NamedTuple):
    """A step that was measured after chunks."""

    work: ReplicaBatch
    slowdown: float  # duration relative to that of a cool step
    preceding_tokens: int = 0  # tokens of the chunks; 0: the largest
    elapsed_s: float = 0.0  # time in s during which steps of the same kind have run in between


class Slowdown:
    """Slowdown factor of steps right after the largest chunks: 1 if none was measured.

    Power follows the load, and clocks follow power, within tens of ms. The factors are lines over rows, for decodes and
    for steps with chunks; outside the measured range the nearest value is used. `compute_final_heat` is the share of the slowdown
    that smaller chunks cause, and `settle_s` the time constant of its rise and decay.
    """

    def __init__(self, cases: Iterable[HotStep]) -> None:
        found = [case._replace(slowdown=max(case.slowdown, 1.0)) for case in cases]  # below 1 is noise
        first = [case for case in found if not case.preceding_tokens and not case.elapsed_s]
        self.decodes = [(case.work.rows, case.slowdown) for case in first if not case.work.tokens]
        self.chunks = [(compute_chunk_rows(case.work.all_rows), case.slowdown) for case in first if case.work.tokens]
        of = {case.work: case.slowdown - 1 for case in first if case.slowdown > 1 + TELLS}
        shares = [(case, (case.slowdown - 1) / of[case.work]) for case in found if case.work in of]
        largest = max((case.work.tokens for case in first), default=0)
        smaller = [
            (case.preceding_tokens, min(left, 1.0))
            for case, left in shares
            if case.preceding_tokens and case.preceding_tokens < largest
        ]
        self.left = PiecewiseLinear([*(smaller or [(0, 0.0)] * bool(largest)), (largest, 1.0)])
        self.settle_s = _fit_settle_s([(case.elapsed_s, left) for case, left in shares if case.elapsed_s])

    def __call__(self, works: Sequence[ReplicaBatch]) -> float:
        """Return the slowdown factor of a step of these replicas."""
        rows = max(batch.all_rows for batch in works)
        points = self.chunks if any(batch.tokens for batch in works) else self.decodes
        return PiecewiseLinear(points).predict_clamped(rows) if points else 1.0

    def compute_final_heat(self, works: Sequence[ReplicaBatch]) -> float:
        """Return the final heat of such steps relative to that of the largest chunks: 0 for decodes."""
        if not any(batch.tokens for batch in works):
            return 0.0
        return self.left.predict_clamped(max(batch.all_rows for batch in works))


def _fit_settle_s(left: Sequence[tuple[float, float]]) -> float:
    """Return the time constant of the decay to 1 / e, fitted by exp(-seconds / constant) to (seconds, remaining share)."""
    if not left:
        return HEAT_S
    tried = (HEAT_S * 1.05**k for k in range(-50, 51))
    return min(tried, key=lambda settle_s: sum((math.exp(-s / settle_s) - share) ** 2 for s, share in left))


class DeviceHeat:
    """Model the heat of the device: it rises during steps with chunks and decays while it is idle."""

    def __init__(self, settle_s: float = HEAT_S) -> None:
        self.settle_s = settle_s
        self.share = self.until_s = 0.0

    def compute_share(self, begin_s: float) -> float:
        """Return the heat at the beginning of a step; the device has been idle since the last one."""
        self._update_share(begin_s - self.until_s, 0.0)
        self.until_s = max(self.until_s, begin_s)
        return self.share

    def add_step(self, seconds: float, towards: float) -> None:
        """Advance by a step; see Slowdown.compute_final_heat."""
        self._update_share(seconds, towards)
        self.until_s += seconds

    def _update_share(self, seconds: float, towards: float) -> None:
        self.share += (towards - self.share) * -math.expm1(-max(seconds, 0.0) / self.settle_s)


class StepModel:
    """Complete model of step times. Raise RecordsError if a term has no case at all."""

    def __init__(
        self,
        cases: Sequence[TimedCase],
        gather: Sequence[TimedCase] = (),
        uneven: Sequence[TimedCase] = (),
        unaligned: Sequence[TimedCase] = (),
        *,
        graph_batches: Sequence[int] | None = None,
        row_multiple: int = 1,
    ) -> None:
        """Fit the model.

        Args:
            cases: Cases to interpolate between.
            gather: Cases that determine the cost of more stored tokens.
            uneven: Cases of a single busy replica; without them, all replicas are assumed to be as full as the fullest.
            unaligned: Cases of prompts whose number of tokens is no multiple of `row_multiple`.
            graph_batches: Batch sizes of the captured graphs of another engine, sorted, to which it pads steps of decodes alone; empty
                if it pads none. None for dcpbench's engine, which pads as in batches.py.
            row_multiple: See `unaligned`.
        """
        self.graph_batches = graph_batches
        self.row_ranges: dict[int, tuple[int, int]] = {}  # by graph size: the fewest and the most measured rows
        for rows in sorted(w.decodes for w, _ in cases if w.decodes and not w.tokens):
            size = pad_to_size(rows, graph_batches or ())
            self.row_ranges[size] = (self.row_ranges.get(size, (rows, rows))[0], rows)
        cases, gather, uneven, unaligned = (
            [(self._pad(w), ms) for w, ms in group] for group in (cases, gather, uneven, unaligned)
        )
        decode = [(w, ms) for w, ms in cases if w.rows and not w.tokens]
        mixed = [(w, ms) for w, ms in cases if w.rows and w.tokens and not w.prefix]
        chunks = [(w, ms) for w, ms in cases if w.tokens and not w.rows]
        self.most_graph_rows = (graph_batches or GRAPH_BATCHES)[-1]
        graphs = [s for s in decode if s[0].rows <= self.most_graph_rows]
        eager = [s for s in decode if s[0].rows > self.most_graph_rows]
        if not graphs or not chunks:
            raise RecordsError(
                "step times need steps that only decode and steps that only prefill; measure them again."
            )
        self.graphs = DecodeTimes(graphs)
        self.eager = DecodeTimes(eager) if eager else None
        decode_rows, pad_rows = (
            max((compute_batch_rows(w.rows + 1) * w.queries for w, _ in mixed), default=0),
            compute_chunk_rows,
        )
        if graph_batches is not None:
            decode_rows = max(decode_rows, CHUNK_TILE)  # the longest chunk is measured at a multiple of 16 tokens
            pad_rows = _raise_rows
        self.prefill = PrefillTimes(chunks, gather, decode_rows, pad_rows=pad_rows)
        self.mixed = MixedTimes(mixed, self.prefill)
        self.unaligned = UnalignedTimes(unaligned, self.prefill, row_multiple) if unaligned else None
        self.spared = UnevenSavings(uneven, self.prefill) if uneven else None
        self.least = min(ms for _, ms in [*chunks, *uneven])

    def extrapolate(self) -> None:
        """Continue all lines in KV tokens and pairs without limit, for a layout with a KV cache that it does not have."""
        for surface in (self.graphs.surface, self.prefill.ms, *([self.eager.surface] if self.eager else [])):
            surface.beyond = math.inf
        self.mixed.beyond = math.inf

    def predict_step_ms(self, works: Sequence[ReplicaBatch]) -> float:
        """Return the time of a step of these replicas in ms.

        The slowest replica decides, and all run as many rows as the fullest; with chunks, experts are excepted.
        """
        works = [self._pad(w) for w in works]
        if any(w.tokens for w in works):
            return self._predict_with_chunks(works)
        rows = max(w.rows for w in works)
        times = self.graphs if rows <= self.most_graph_rows else self.eager
        if times is None:
            raise _make_outside_error(f"{rows} decode rows", f"those of captured graphs, up to {self.most_graph_rows}")
        return times(rows, max(w.kv_tokens for w in works))

    def _pad(self, batch: ReplicaBatch) -> ReplicaBatch:
        """Return the batch with the decode rows by which its time is looked up.

        Steps with chunks of another engine run no graphs. Its decodes alone are padded, and padding rows need fewer experts than
        others: between the fewest and the most measured rows of one padded size, times are interpolated. Fewer and more rows of that
        size take as long as these.
        """
        if self.graph_batches is None:
            return batch
        if batch.tokens:
            return batch._replace(rows=batch.decodes)
        size = pad_to_size(batch.decodes, self.graph_batches)
        fewest, most = self.row_ranges.get(size, (size, size))
        return batch._replace(rows=min(max(batch.decodes, fewest), most))

    def _predict_with_chunks(self, works: Sequence[ReplicaBatch]) -> float:
        """Return the time of a step with chunks, at least that of the fastest measured one: less would be noise, as of
        a busy CPU.
        """
        rows = max(w.all_rows for w in works)
        spared = self.spared(works) if self.spared else 0.0
        added = self.unaligned(rows) if self.unaligned else 0.0
        return max(max(self._predict_replica_ms(rows, w) for w in works) - spared, self.least) + added

    def _predict_replica_ms(self, rows: int, batch: ReplicaBatch) -> float:
        alone = self.prefill(rows, batch.pairs, batch.prefix)
        if not batch.rows:
            return alone
        if self.mixed.sizes:
            return alone + self.mixed(batch)
        if batch.tokens:
            raise _make_outside_error(f"{batch.rows} decode rows in a step with chunks", "steps with only one of both")
        # Replicas of one request each: next to one with a chunk, another decodes. The remaining part of G is the read
        # of its KV.
        return alone + self.graphs(batch.rows, batch.kv_tokens) - self.graphs(batch.rows, 0)


def _make_outside_error(what: str, measured: str, less: str = "a smaller load") -> UsageError:
    return UsageError(
        f"no step time is known for {what}. Measured were {measured}. Measure again with the points that need it "
        f"(leave --step-times out), or give {less}."
    )
