"""Published gains of DCP compared with forecasts: data, errors, and the table of docs/recommend.md."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

from dcpbench.points.gpus import GPUS
from dcpbench.points.layout import Layout
from tools import published_crossovers as published

ENTRIES = published.read_entries()
PAGE = Path(__file__).parents[2] / "docs" / "recommend.md"
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: f"{e.source} {e.input_tokens} {e.concurrency or ''}")
def test_entry_has_source_figure_and_conditions(entry: published.Entry) -> None:
    assert entry.url.startswith("https://github.com/")
    assert entry.read
    assert (entry.gain is None) != (entry.crossover is None)
    assert (entry.crossover is None) == (entry.concurrency is not None)
    assert entry.machine in {gpu.name for gpu in GPUS}
    assert Layout(*entry.layout).dcp > Layout(*entry.baseline).dcp
    if entry.crossover is not None:
        assert entry.crossover[0] < entry.crossover[1]


def test_each_forecast_is_stored_and_each_large_error_explained() -> None:
    for entry in ENTRIES:
        assert entry.factor is not None
        assert bool(entry.explanation) == (entry.factor > published.MAX_FACTOR), entry


@pytest.mark.parametrize(
    ("forecast", "low", "high", "factor"),
    [(1.2, 1.5, 1.5, 1.25), (1.5, 1.2, 1.2, 1.25), (10, 8, 16, 1), (2, 8, 16, 4), (32, 8, 16, 2), (1.05, 0, 1, 1.05)],
)
def test_error_is_the_ratio_to_the_nearest_published_figure(
    forecast: float, low: float, high: float, factor: float
) -> None:
    assert published.compute_factor(forecast, low, high) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("ratios", "crossover"),
    [
        ([(1, 0.5), (4, 2.0)], 2.0),  # half way, by logarithms
        ([(1, 0.9), (2, 0.9), (4, 1.1)], 2 * 2 ** (math.log(0.9) / (math.log(0.9) - math.log(1.1)))),
        ([(1, 1.1), (2, 1.2)], 1.0),
        ([(8, 0.9), (16, math.inf)], 8.0),  # the baseline does not fit
        ([(1, 0.8), (2, 0.9)], None),
    ],
)
def test_crossover_is_interpolated_between_two_levels(ratios: list[tuple[int, float]], crossover: float | None) -> None:
    assert published.find_crossover(ratios) == (None if crossover is None else pytest.approx(crossover))


def test_documentation_has_the_table() -> None:
    """Cells are compared without links; `python -m tools.published_crossovers` prints the table."""
    text = LINK.sub(r"\1", PAGE.read_text(encoding="utf-8"))
    for line in published.format_table(ENTRIES):
        assert LINK.sub(r"\1", line) in text


def test_stored_forecasts_equal_those_of_recommend() -> None:
    """Only one crossover, which has decode steps alone, and the smallest served load are computed here; the tool
    computes all.
    """
    crossover = next(entry for entry in ENTRIES if entry.crossover is not None)
    served = min((e for e in ENTRIES if e.gain is not None), key=lambda e: e.concurrency or 0)
    for entry in (crossover, served):
        found = published.forecast_entry(msgspec.structs.replace(entry, forecast=None))
        assert found == pytest.approx(entry.forecast, rel=0.02), "python -m tools.published_crossovers --write"
