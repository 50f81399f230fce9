"""Compare published gains and crossovers of DCP with the estimates of `dcpbench recommend` for the same machine and load.

    python -m tools.published_crossovers [--write]

It prints each figure of tools/published_crossovers.json with its forecast, the factor by which the forecast misses it, and an explanation if
that is above MAX_FACTOR. `--write` stores the forecasts in that file; docs/recommend.md has the table. It takes some minutes and needs no
GPU.

A gain is the output of a layout over that of its baseline. A crossover is the concurrency from which the layout has more output than
its baseline in decode steps; published crossovers are between two measured concurrencies.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models import load_shape
from dcpbench.plan.option_parsers import parse_bytes
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.budget import measure_whole_model, plan_engine
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.layout import Layout
from dcpbench.points.names import CLOSED, GAMMA, NO_EXCHANGE, REPLAY
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from dcpbench.recommend import forecast
from dcpbench.recommend.estimate import load_published_steps
from dcpbench.serving.loads import compute_extent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.recommend.forecast import Forecast

FILE = Path(__file__).with_suffix(".json")
MAX_FACTOR = 1.2  # factor above which an entry needs an explanation
LEVELS = (1, 2, 4, 8, 16, 32, 64)  # concurrencies between which a crossover is searched
EXCHANGE = "ag_rs"  # exchange of all published figures


class Entry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold one published figure with its conditions and its forecast."""

    source: str
    url: str
    read: str  # the part of the source that was read, and what is derived or assumed
    model: str
    machine: str  # name in `dcpbench machines`
    weights_dtype: str
    kv_dtype: str = "bf16"
    kv_memory: str | None = None
    layout: tuple[int, int, int]  # tp, dp, dcp
    baseline: tuple[int, int, int]
    input_tokens: str  # for a crossover, the tokens of each request
    output_tokens: str | None = None  # None for decode steps
    concurrency: int | None = None  # None for a crossover
    request_rate: float | None = None
    requests: int | None = None
    gain: float | None = None  # published output of the layout over that of the baseline
    crossover: tuple[int, int] | None = None  # published concurrencies at which the layout is behind, and ahead
    forecast: float | None = None  # gain, or concurrency of the crossover
    explanation: str = ""  # reason why the forecast misses by more than MAX_FACTOR

    @property
    def factor(self) -> float | None:
        """Return the factor by which the forecast misses, at least 1; None without a forecast."""
        if self.forecast is None:
            return None
        return compute_factor(self.forecast, *(self.crossover or (self.gain, self.gain)))


def compute_factor(found: float, low: float | None, high: float | None) -> float:
    """Return the factor between a figure and the nearest end of a range, at least 1; 1 inside the range."""
    assert low is not None
    assert high is not None
    return max(low / found, found / high, 1.0)


def find_crossover(ratios: Sequence[tuple[int, float]]) -> float | None:
    """Return the concurrency at which the ratio reaches 1, interpolated in logarithms between levels; None if it never does.

    If the first ratio is 1 or above, return the first level.
    """
    for (below, low), (above, high) in itertools.pairwise(ratios):
        if low >= 1:
            return float(below)
        if high >= 1:
            share = 0.0 if math.isinf(high) else math.log(low) / (math.log(low) - math.log(high))
            return float(below * (above / below) ** share)
    return None


def read_entries() -> list[Entry]:
    """Return the published figures."""
    found: list[Entry] = msgspec.json.decode(FILE.read_bytes(), type=list[Entry])
    return found


def forecast_entry(entry: Entry) -> float | None:
    """Return the forecast of a figure; None if a layout does not fit, or is never ahead of its baseline."""
    if entry.crossover is not None:
        ratios = [(level, _compute_ratio(entry, level)) for level in LEVELS]
        return find_crossover([(level, ratio) for level, ratio in ratios if ratio is not None])
    assert entry.concurrency is not None
    return _compute_ratio(entry, entry.concurrency)


def _compute_ratio(entry: Entry, concurrency: int) -> float | None:
    """Return the output of the layout over that of its baseline; infinite if only the layout fits, None if it does not fit."""
    layout, baseline = (_estimate(entry, degrees, concurrency) for degrees in (entry.layout, entry.baseline))
    if layout is None:
        return None
    return math.inf if baseline is None else layout.tok_s / baseline.tok_s


def _estimate(entry: Entry, degrees: tuple[int, int, int], concurrency: int) -> Forecast | None:
    """Return the estimate of a layout; None if the KV cache of a decode step does not fit."""
    point = _make_point(entry, Layout(*degrees), concurrency)
    machine, steps, shape = load_machine(entry.machine), load_published_steps(), load_shape(entry.model)
    memory = None if entry.kv_memory is None else parse_bytes("kv_memory", entry.kv_memory)
    settings, probe = Settings(kv_memory_bytes=memory), make_planned_probe(machine.gpu, machine.gpus_per_host)
    if point.load is None and measure_whole_model(point, settings, shape, probe).missing_bytes:
        return None
    plan = plan_engine([point], settings, shape, probe)
    return forecast.estimate_point(point, plan, machine, settings, steps, steps.terms)


def _make_point(entry: Entry, layout: Layout, concurrency: int) -> Point:
    load = None
    context = int(entry.input_tokens) if entry.output_tokens is None else 0
    if entry.output_tokens is not None:
        load = Load(
            mode=REPLAY,
            requests=entry.requests or forecast.ROUNDS * concurrency,
            arrival=CLOSED if entry.request_rate is None else GAMMA,
            request_rate=entry.request_rate,
            paced=entry.request_rate is not None,
            input_tokens=entry.input_tokens,
            output_tokens=entry.output_tokens,
            chunk=8192,
            prefill="flashinfer",
        )
        context = compute_extent(load).longest
    return Point(
        model=entry.model,
        tp=layout.tp,
        dp=layout.dp,
        dcp=layout.dcp,
        ep="1",
        workload="decode" if load is None else "serve",
        concurrency=concurrency,
        context=context,
        exchange=EXCHANGE if layout.dcp > 1 else NO_EXCHANGE,
        backend="flashinfer",
        dtype="bf16",
        weights_dtype=entry.weights_dtype,
        kv_dtype="" if entry.kv_dtype == "bf16" else entry.kv_dtype,
        page_size=64,
        load=load,
    )


def format_table(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of a Markdown table; figures of one source, machine and kind share a row, in the same order in all columns."""
    yield "| source | model, 8 × | loads | published | forecast | error, × |"
    yield "|---|---|---|---|---|---|"
    for (source, url, model, machine, _), group in itertools.groupby(entries, key=_make_group_key):
        row = list(group)
        cells = [
            "; ".join(column)
            for column in zip(*((*_format_figures(entry), _format_factor(entry)) for entry in row), strict=True)
        ]
        yield f"| [{source}]({url}) | {model}, {machine} | {_format_loads(row)} | {' | '.join(cells)} |"


def _make_group_key(entry: Entry) -> tuple[str, str, str, str, bool]:
    return entry.source, entry.url, entry.model, entry.machine, entry.crossover is None


def _format_loads(row: Sequence[Entry]) -> str:
    """Format the loads of a row; loads that differ only in their prompts as `64 × 32,768; 65,536 → 8,192`."""
    loads, prompts = list(map(format_load, row)), [_format_tokens(entry.input_tokens) for entry in row]
    if len({load.replace(prompt, "", 1) for load, prompt in zip(loads, prompts, strict=True)}) == 1:
        return loads[0].replace(prompts[0], "; ".join(prompts), 1)
    return "; ".join(loads)


def format_load(entry: Entry) -> str:
    """Format a load as `64 × 32,768 → 8,192`, with the baseline if it has attention DP."""
    tokens = _format_tokens(entry.input_tokens)
    if entry.output_tokens is None:
        return f"steps of {tokens}"
    clients = entry.concurrency if entry.request_rate is None else entry.requests
    baseline = f" against {_make_point(entry, Layout(*entry.baseline), 1).layout_name}" if entry.baseline[1] > 1 else ""
    return f"{clients:,} × {tokens} → {_format_tokens(entry.output_tokens)}{baseline}"


def _format_tokens(text: str) -> str:
    """Format numbers of tokens as `4,000` or `819–1,024`."""
    return "–".join(f"{int(end):,}" for end in text.removeprefix("uniform:").split("-"))


def _format_figures(entry: Entry) -> tuple[str, str]:
    """Format the published figure and its forecast: a gain as `1.57`, a crossover as `8–16`."""
    if entry.crossover is None:
        return f"{entry.gain:.2f}", "none" if entry.forecast is None else f"{entry.forecast:.2f}"
    low, high = entry.crossover
    return f"{low}–{high}" if low else f"below {high}", "none" if entry.forecast is None else f"{entry.forecast:.1f}"


def _format_factor(entry: Entry) -> str:
    return "none" if entry.factor is None else f"{entry.factor:.2f}"


def list_explanations(entries: Sequence[Entry]) -> list[str]:
    """Return the explanation of each miss above MAX_FACTOR."""
    return [
        f"{entry.source}, {format_load(entry)}: {entry.explanation}"
        for entry in entries
        if entry.factor is None or entry.factor > MAX_FACTOR
    ]


def main() -> int:
    """Compute the forecasts, print the table, and store the forecasts with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the forecasts in {FILE.name}")
    write = parser.parse_args().write
    entries = [msgspec.structs.replace(entry, forecast=_round(forecast_entry(entry))) for entry in read_entries()]
    sys.stdout.write("\n".join([*format_table(entries), "", *list_explanations(entries)]) + "\n")
    if write:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(entries), indent=1) + b"\n")
    return 0 if all(entry.explanation for entry in entries if (entry.factor or math.inf) > MAX_FACTOR) else 1


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    sys.exit(main())
