"""Simulate the error rates and the detection rates of dcpbench's statistics.

    python -m tools.statistics_check                          # all checks, about 10 minutes on two cores
    python -m tools.statistics_check -o docs/statistics.md    # also write the page
    python -m tools.statistics_check --only intervals --draws 500

It runs dcpbench's code for change points of the dashboard, verdicts of `compare` and `ab`, and intervals of medians. Exit code 1: a rate
is worse than documented. Every check has a fixed seed, so that a run is reproducible.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import betaincinv

from dcpbench.compare import effects
from dcpbench.compare.judging import Options
from dcpbench.dashboard import change_points
from dcpbench.records.stats import StopRule, compute_median_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MAX_FALSE_MARKS = 0.01  # documented share of unchanged histories that are ever marked while they grow
MAX_FALSE_VERDICTS = Options().alpha  # documented share of comparisons of equal sides with any FASTER or SLOWER
MIN_COVERAGE = 0.92  # documented share of intervals that hold the true median, up to an autocorrelation of 0.6
MIN_FOUND = 0.9  # documented share of slowdowns of 5 % found by four launches that scatter by 1 %
DRAWS = 2000  # histories, comparisons or series of each line
SCATTER = 0.01  # relative scatter of runs and launches
RUNS = (30, 60)
ROWS = 4  # metrics in a comparison
WARM_UP = 100  # runs before the first one of a correlated history
BOUND_CONFIDENCE = 0.95  # one-sided confidence of upper bounds
DOCUMENTED_NOISES = {
    "normal": "normal",
    "t": "Student's t, 3 degrees",
    "two-valued": "two-valued, ±1 %, 1 in 5",
    "ar": "AR(1), 0.5",
}  # noise for which rates are documented
OTHER_NOISES = {
    "ar 0.7": "AR(1), 0.7",
    "two levels": "two-valued, and 0.1 % of normal noise",
}  # noise that is shown as well


@dataclasses.dataclass(frozen=True)
class Share:
    """Hold how many draws had a property, and the documented share, if any."""

    found: int
    of: int
    at_most: float | None = None
    at_least: float | None = None

    @property
    def value(self) -> float:
        """Return the share of all draws."""
        return self.found / self.of

    @property
    def bound(self) -> float:
        """Return the upper 95 % bound of the share (Clopper and Pearson)."""
        return (
            1.0 if self.found == self.of else float(betaincinv(self.found + 1, self.of - self.found, BOUND_CONFIDENCE))
        )

    @property
    def holds(self) -> bool:
        """Return True if the share is as documented, and its bound is below twice the documented share."""
        if self.at_most is not None:
            return self.value <= self.at_most and self.bound < 2 * self.at_most
        return self.at_least is None or self.value >= self.at_least

    def __str__(self) -> str:
        """Format the share as `0.4 %`, with `!` if it is worse than documented."""
        return f"{format_percent(self.value)}{'' if self.holds else ' !'}"


@dataclasses.dataclass(frozen=True)
class Table:
    """Hold a table of shares with the sentence above it."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: list[tuple[str, list[Share]]]

    @property
    def holds(self) -> bool:
        """Return True if all shares are as documented."""
        return all(share.holds for _, shares in self.rows for share in shares)

    def __str__(self) -> str:
        """Format the table as Markdown."""
        lines = [self.columns, ("---", *("--:" for _ in self.columns[1:]))]
        lines += [(name, *map(str, shares)) for name, shares in self.rows]
        return f"## {self.title}\n\n{self.text}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def format_percent(share: float) -> str:
    """Format a share as `0.3 %`."""
    return f"{share * 100:.3g} %"


def draw_noise(kind: str, count: int, runs: int, rng: np.random.Generator) -> Floats:
    """Return `count` series of noise in units of the scatter, one in each row."""
    if kind == "t":
        return rng.standard_t(3, (count, runs)) / math.sqrt(3)
    if kind in ("two-valued", "two levels"):
        levels = np.where(rng.random((count, runs)) < 1 / 5, 1.0, -1.0)
        return levels + (0.1 * rng.normal(size=(count, runs)) if kind == "two levels" else 0.0)
    if kind.startswith("ar"):
        return draw_ar1(float(kind.partition(" ")[2] or 0.5), count, runs, rng)
    return rng.normal(size=(count, runs))


def draw_ar1(rho: float, count: int, runs: int, rng: np.random.Generator) -> Floats:
    """Return series of an AR(1) process with a variance of 1."""
    fresh = rng.normal(size=(count, WARM_UP + runs)) * math.sqrt(1 - rho**2)
    for n in range(1, WARM_UP + runs):
        fresh[:, n] += rho * fresh[:, n - 1]
    return fresh[:, WARM_UP:]


def draw_histories(kind: str, count: int, runs: int, seed: int, step: float = 0.0, since: int = 0) -> Floats:
    """Return histories of medians around 50, of which the last `since` runs are `step` higher."""
    found = SCATTER * draw_noise(kind, count, runs, np.random.default_rng([seed, runs, *kind.encode()]))
    if since:
        found[:, -since:] += math.log1p(step)
    return 50 * np.exp(found)


def count_marked(histories: Floats) -> int:
    """Return the number of histories with a change at their end."""
    return sum(bool(change_points.find_changes(row)) for row in histories.tolist())


def count_ever_marked(histories: Floats, every: int = 1) -> int:
    """Return the number of histories with a change at any look while they grow; a look follows `every` runs."""
    looks = range(change_points.MIN_RUNS, histories.shape[1] + 1, every)
    return sum(any(change_points.find_changes(row[:n]) for n in looks) for row in histories.tolist())


def check_false_marks(draws: int) -> Table:
    """Return the rates at which unchanged histories are marked."""
    kinds = [*DOCUMENTED_NOISES, *OTHER_NOISES]
    jobs = [(kind, part, (draws + PARTS - 1) // PARTS) for kind in kinds for part in range(PARTS)]
    with ProcessPoolExecutor(2) as pool:
        counts = list(pool.map(_count_false_marks, *zip(*jobs, strict=True)))
    rows = []
    for i, kind in enumerate(kinds):
        of = jobs[0][2] * PARTS
        sums = np.sum(counts[i * PARTS : (i + 1) * PARTS], axis=0)
        limit = MAX_FALSE_MARKS if kind in DOCUMENTED_NOISES else None
        rows.append(((DOCUMENTED_NOISES | OTHER_NOISES)[kind], [Share(int(n), of, at_most=limit) for n in sums]))
    return Table(
        "Change points: unchanged histories that are marked",
        f"Runs scatter by {format_percent(SCATTER)}; {rows[0][1][0].of:,} histories per line. *Ever*: the history is searched after every run from run "
        f"{change_points.MIN_RUNS} on, and at least one search marks a change. Documented for the first {len(DOCUMENTED_NOISES)} lines: at most "
        f"{format_percent(MAX_FALSE_MARKS)} ever.",
        ("noise", *(f"at {n} runs" for n in RUNS), f"ever up to {RUNS[-1]} runs"),
        rows,
    )


PARTS = 8  # parts of the histories of a kind, for two processes


def _count_false_marks(kind: str, part: int, count: int) -> list[int]:
    histories = draw_histories(kind, count, RUNS[-1], seed=part)
    return [*(count_marked(histories[:, :n]) for n in RUNS), count_ever_marked(histories)]


def check_steps_found(draws: int) -> Table:
    """Return the rates at which a step is found, by its size and the runs since."""
    places = ((20, 10), (30, 5), (30, 7), (60, 5), (60, 15))
    count = max(draws // 4, 1)
    rows = []
    for kind in ("normal", "ar"):
        for step in (0.02, 0.03, 0.05, 0.1):
            found = [count_marked(draw_histories(kind, count, n, 7, step, since)) for n, since in places]
            rows.append((f"{DOCUMENTED_NOISES[kind]}, {format_percent(step)}", [Share(n, count) for n in found]))
    return Table(
        "Change points: steps that are found",
        f"Runs scatter by {format_percent(SCATTER)}; {count:,} histories per cell. *30, 5*: a history of 30 runs, of which the last 5 are at the new level.",
        ("noise, step", *(f"{n}, {since}" for n, since in places)),
        rows,
    )


def find_different(a: Floats, b: Floats, *, paired: bool = False) -> list[bool]:
    """Return True for each row of a comparison that is FASTER or SLOWER; sides are logarithms, [row, launch]."""
    options = Options()
    compare = effects.compare_paired if paired else effects.compare_sides
    found = [
        compare([effects.Estimate(v, None) for v in x], [effects.Estimate(v, None) for v in y])
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    p = [effect.compute_p_differs() for effect in found]
    cut = effects.compute_level(p, options.alpha) if effects.count_rejected(p, options.alpha) else -1.0
    margin = math.log1p(options.margin)
    return [q <= cut and effect.min_distance > margin for q, effect in zip(p, found, strict=True)]


def draw_sides(
    kind: str, launches: tuple[int, int], rng: np.random.Generator, *, paired: bool = False, rows: int = ROWS
) -> tuple[Floats, Floats]:
    """Return the noise of both sides, [row, launch]; paired sides are launched in turn, A B, B A and so on."""
    if not paired:
        return draw_noise(kind, rows, launches[0], rng), draw_noise(kind, rows, launches[1], rng)
    x = draw_noise(kind, rows, 2 * launches[0], rng).reshape(rows, -1, 2)
    x[:, 1::2] = x[:, 1::2, ::-1]
    return x[..., 0], x[..., 1]


def check_false_verdicts(draws: int) -> Table:
    """Return the rates at which equal sides are called different."""
    cases = (
        *(((n, n), (1.0, 1.0), False) for n in (4, 6, 8)),
        ((4, 8), (1.0, 1.0), False),
        ((4, 6), (2.0, 0.3), False),
        *(((n, n), (1.0, 1.0), True) for n in (4, 8)),
    )
    rows = []
    for kind, name in DOCUMENTED_NOISES.items():
        shares = []
        for launches, scatter, paired in cases:
            # Two-valued noise of different scatter has different means: those sides are not equal.
            rng = np.random.default_rng([11, *launches, paired, *kind.encode()])
            wrong = 0
            for _ in range(draws):
                a, b = draw_sides(kind, launches, rng, paired=paired)
                mean = -0.6 if kind == "two-valued" else 0.0
                a, b = (SCATTER * s * (x - mean) for s, x in zip(scatter, (a, b), strict=True))
                wrong += any(find_different(a, b, paired=paired))
            shares.append(Share(wrong, draws, at_most=None if kind == "ar" and scatter[0] != 1 else MAX_FALSE_VERDICTS))
        rows.append((name, shares))
    return Table(
        "Comparisons: equal sides that are called different",
        f"{draws:,} comparisons per cell, each of {ROWS} metrics; any FASTER or SLOWER counts. *4 of 2 %, 6 of 0.3 %*: the sides "
        f"scatter by 2 % and 0.3 %; in other columns, by {format_percent(SCATTER)}. Documented: at most {format_percent(MAX_FALSE_VERDICTS)}, except for AR(1) "
        f"noise and sides that scatter differently.",
        ("noise", "4, 4", "6, 6", "8, 8", "4, 8", "4 of 2 %, 6 of 0.3 %", "4 rounds", "8 rounds"),
        rows,
    )


def check_slowdowns_found(draws: int) -> Table:
    """Return the rates at which a slowdown is found, by its size, the launches and their scatter."""
    launches, scatters = (4, 6, 8, 12), (0.01, 0.02)
    rows = []
    for slowdown in (0.02, 0.03, 0.05, 0.1):
        for scatter in scatters:
            shares = [
                count_slowdowns(slowdown, n, scatter, draws, paired=paired)
                for n, paired in (*((n, False) for n in launches), (4, True), (8, True))
            ]
            rows.append((f"{format_percent(slowdown)}, {format_percent(scatter)}", shares))
    return Table(
        "Comparisons: slowdowns that are found",
        f"One metric of one point, launches per side, normal noise, {draws:,} comparisons per cell. Documented: at least "
        f"{format_percent(MIN_FOUND)} of slowdowns of 5 % with four launches that scatter by {format_percent(SCATTER)}.",
        ("slowdown, scatter", *(f"{n} launches" for n in launches), "4 rounds", "8 rounds"),
        rows,
    )


def count_slowdowns(slowdown: float, launches: int, scatter: float, draws: int, *, paired: bool = False) -> Share:
    """Return the share of slowdowns of one metric that is called SLOWER."""
    rng = np.random.default_rng([13, launches, round(scatter * 1e4), round(slowdown * 1e4), paired])
    found = 0
    for _ in range(draws):
        a, b = draw_sides("normal", (launches, launches), rng, paired=paired, rows=1)
        found += any(find_different(scatter * a, scatter * b + math.log1p(slowdown), paired=paired))
    documented = (slowdown, launches, scatter, paired) == (0.05, effects.MIN_LAUNCHES, SCATTER, False)
    return Share(found, draws, at_least=MIN_FOUND if documented else None)


def check_intervals(draws: int) -> Table:
    """Return the rates at which the interval of a median contains the true median."""
    sizes = (20, 30, 60, 100, 300)
    rows = []
    for rho in (0.0, 0.3, 0.6, 0.9):
        limit = MIN_COVERAGE if rho <= 0.6 else None  # noqa: PLR2004 - as documented
        shares = [count_covered(rho, n, draws) for n in sizes]
        shares = [dataclasses.replace(share, at_least=limit) for share in shares]
        rows.append((f"{rho:g}", [*shares, dataclasses.replace(count_covered_at_stop(rho, draws), at_least=limit)]))
    return Table(
        "Intervals of medians: how many contain the true median",
        f"Nominally 95 %; {draws:,} series per cell. The logarithms of the samples are an AR(1) process. *stopped*: the stop rule chooses the "
        f"number of samples, in chunks of 20, for a scatter of 3 % and a precision of 1 %. Documented: at least {format_percent(MIN_COVERAGE)} up to "
        f"an autocorrelation of 0.6.",
        ("autocorrelation", *(f"{n} samples" for n in sizes), "stopped"),
        rows,
    )


def count_covered(rho: float, samples: int, draws: int) -> Share:
    """Return the share of intervals of correlated samples that contains the median."""
    rng = np.random.default_rng([17, samples, round(10 * rho)])
    series = np.exp(0.03 * draw_ar1(rho, draws, samples, rng))
    return Share(sum(_holds_one(row) for row in series.tolist()), draws)


def count_covered_at_stop(rho: float, draws: int, max_samples: int = 2000) -> Share:
    """Return the share of intervals that contains the median if the stop rule determines the number of samples."""
    rng = np.random.default_rng([19, round(10 * rho)])
    rule = StopRule(precision=0.01, seconds=math.inf)
    count = max(draws // 8, 1)
    covered = 0
    for row in np.exp(0.03 * draw_ar1(rho, count, max_samples, rng)).tolist():
        n = next((n for n in range(20, max_samples, 20) if rule.get_stop_reason(row[:n], 0.0)), max_samples)
        covered += _holds_one(row[:n])
    return Share(covered, count)


def _holds_one(samples: Sequence[float]) -> bool:
    interval = compute_median_interval(samples)
    return interval.low <= 1 <= interval.high


CHECKS: dict[str, Callable[[int], Table]] = {
    "warnings": check_false_marks,
    "steps": check_steps_found,
    "verdicts": check_false_verdicts,
    "slowdowns": check_slowdowns_found,
    "intervals": check_intervals,
}
HEAD = """# How often the statistics are wrong

Written by `python -m tools.statistics_check -o docs/statistics.md`; do not edit. All figures are simulated with dcpbench's code; nothing was measured. A `!` marks a rate that is worse than
documented. The rules are in
[dashboard.md](dashboard.md#what-a-change-is), [comparing.md](comparing.md), [metrics.md](metrics.md).
"""


def main(arguments: Sequence[str]) -> int:
    """Run the checks, print their tables, and return 1 if a rate is worse than documented."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKS, action="append", help="run this check; may be repeated")
    parser.add_argument(
        "--draws", type=int, default=DRAWS, help="histories, comparisons or series of each line; default: %(default)s"
    )
    parser.add_argument("-o", "--output", type=Path, help="also write the tables to this page")
    args = parser.parse_args(arguments)
    tables = []
    for name in args.only or CHECKS:
        tables.append(CHECKS[name](args.draws))
        sys.stdout.write(f"{tables[-1]}\n")
        sys.stdout.flush()
    if args.output:
        args.output.write_text("\n".join([HEAD, *map(str, tables)]), encoding="utf-8")
    return 0 if all(table.holds for table in tables) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
