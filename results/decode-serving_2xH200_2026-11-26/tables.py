"""The tables of README.md, from the records beside this file: `python tables.py`."""

import importlib.util
import statistics
from pathlib import Path

import msgspec

from dcpbench.bench.record import BenchRecord
from dcpbench.records.metrics import METRIC
from tools import emulation_live
from tools.emulation_check import EXCHANGE_BAR, EXCHANGED

HERE = Path(__file__).parent
FOUR = HERE.parent / "decode-serving-fp8_4xH200_2026-11-26" / "tables.py"
spec = importlib.util.spec_from_file_location("four", FOUR)
four = importlib.util.module_from_spec(spec)
spec.loader.exec_module(four)

MODELS = {"V3": "deepseek-v3", "K2": "kimi-k2"}
TP, DP, SYMM, AG_RS = "tp2", "tp2·dp2", "tp2·dcp2 `symm`", "tp2·dcp2 `ag_rs`"
BOTH_WAYS = {
    "V3, fp8": ("grid/deepseek-v3-fp8", "deepseek-v3"),
    "K2, fp8": ("grid/kimi-k2-fp8", "kimi-k2"),
    "V3, bf16": ("bf16/deepseek-v3-bf16", "deepseek-v3-bf16"),
    "K2, bf16": ("bf16/kimi-k2-bf16", "kimi-k2-bf16"),
    "V3, fp8, cut and whole experts": ("experts/deepseek-v3", "deepseek-v3-ep"),
    "K2, fp8, cut and whole experts": ("experts/kimi-k2", "kimi-k2-ep"),
}
"""Runs, live and emulated."""
FARTHEST = 10
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
RANKS = (2, 4)


def grid(model):
    return four.ok(HERE / "grid" / f"{MODELS[model]}-fp8")


def bf16(model):
    return four.ok(HERE / "bf16" / f"{MODELS[model]}-bf16")


def cut_and_whole(model):
    return four.by_load(four.ok(HERE / "experts" / MODELS[model]), ep=True)


def times(bench, ranks):
    """µs by (variant, sizes)."""
    file = HERE / "wire" / f"{bench}-{ranks}" / f"bench-{bench}.json"
    record = msgspec.json.decode(file.read_bytes(), type=BenchRecord)
    return {
        (r.case.variant, r.case.sizes.get("heads", 0), r.case.sizes["requests"]): r.graph.time.median_us
        for r in record.results
    }


def against(us, name, suffix, heads, requests):
    """Plain, registered, and plain over registered."""
    plain, registered = us[name, heads, requests], us[f"{name}{suffix}", heads, requests]
    return f"{plain:.1f} → {registered:.1f} ({plain / registered:.2f})"


def registered(ranks):
    collectives, exchanges = times("collectives", ranks), times("exchange", ranks)
    four.head(f"N = {ranks}, requests", *COLLECTIVES, "`ag_rs`, 64 heads", "`ag_rs`, 128 heads")
    for requests in sorted({requests for *_, requests in collectives}):
        four.row(
            requests,
            *[against(collectives, name, "-registered", 0, requests) for name in COLLECTIVES],
            *[against(exchanges, "ag_rs", "_registered", heads, requests) for heads in (64, 128)],
        )
    print()


def energy(model, of):
    """Joules an output token."""
    layouts = list(dict.fromkeys(label for records in of.values() for label in records))
    four.head(f"{model}, requests × context", *layouts)
    for at, records in of.items():
        joules = {label: METRIC["joules_per_token"].of(r) for label, r in records.items()}
        four.row(four.said(*at), *[f"{joules[label]:.2f}" if label in joules else "no room" for label in layouts])
    print()


def precisions():
    """Output of tp2·dcp2 over tp2's."""
    head = [f"{precision}, `{exchange}`" for exchange in ("ag_rs", "symm") for precision in ("bf16", "fp8")]
    four.head("tp2·dcp2 over tp2, output", *head)
    for model in MODELS:
        wide, narrow = four.by_load(bf16(model)), four.by_load(grid(model))
        for at in wide:
            four.row(
                f"{model}, {four.said(*at)}",
                *[
                    f"{four.step_ms(of[at][TP]) / four.step_ms(of[at][label]):.3f}"
                    for label in (AG_RS, SYMM)
                    for of in (wide, narrow)
                ],
            )
    print()


def gaps():
    """µs between kernels: the long ones, and how many points had short ones."""
    four.head("run", "points", "gaps, µs", "points with short ones", "gaps, µs")
    for name, runs in BOTH_WAYS.items():
        for what, run in zip(("", ", emulated"), (runs[0], f"emulated/{runs[1]}"), strict=True):
            us = sorted(four.gap_us(r) for r in four.ok(HERE / run))
            short = [x for x in us if x < four.SHORT_GAP_US]
            four.row(name + what, len(us), span(us[len(short) :]), len(short), span(short) if short else "")
    print()


def span(sizes):
    return f"{sizes[0]:.2f} to {sizes[-1]:.2f}"


def emulated():
    """How far a step is off, by run, and the farthest ones; µs of exchanges of live steps."""
    found = {
        name: list(emulation_live.pairs(four.ok(HERE / live), four.ok(HERE / "emulated" / run)))
        for name, (live, run) in BOTH_WAYS.items()
    }
    four.head(
        "run",
        "points",
        "off by",
        "half within",
        "exchanges",
        "off by",
        "within 10 %",
        "live steps in the forecasts' intervals",
    )
    for name, pairs in (*found.items(), ("all", [pair for pairs in found.values() for pair in pairs])):
        steps = [four.step_ms(forecast) / four.step_ms(live) - 1 for live, forecast in pairs]
        exchanged = [exchange_us(forecast) / exchange_us(live) - 1 for live, forecast in pairs if live.point.dcp > 1]
        four.row(
            name,
            len(steps),
            percents(steps),
            f"{statistics.median(map(abs, steps)):.1%}".replace("%", " %"),
            len(exchanged),
            percents(exchanged),
            sum(abs(share) <= EXCHANGE_BAR for share in exchanged),
            sum(expected(*pair) for pair in pairs),
        )
    print()
    farthest = sorted((pair for pairs in found.values() for pair in pairs), key=lambda pair: -off(*pair))
    print("\n".join(emulation_live.table(farthest[:FARTHEST])[:-1]))


def exchange_us(record):
    return sum(record.phases.phase_us[phase] for phase in EXCHANGED)


def percents(shares):
    return f"{min(shares):+.1%} to {max(shares):+.1%}".replace("%", " %")


def expected(live, forecast):
    """Whether the live step is in the forecast's interval."""
    interval = forecast.metrics.step_ms
    return interval.low <= four.step_ms(live) <= interval.high


def off(live, forecast):
    return abs(four.step_ms(forecast) / four.step_ms(live) - 1)


if __name__ == "__main__":
    grids, wide = ({model: four.by_load(of(model)) for model in MODELS} for of in (grid, bf16))
    all_of = {**grids, **{f"{model} in bf16": of for model, of in wide.items()}}
    for table in (four.decode, four.pays):
        for model, of in all_of.items():
            table(model, of)
    precisions()
    experts = {model: cut_and_whole(model) for model in MODELS}
    for model, of in experts.items():
        four.experts(model, of, (TP, SYMM, DP))
    for model, of in experts.items():
        four.attention_dp(model, of, grids[model], SYMM, DP)
    gaps()
    for model, of in all_of.items():
        energy(model, of)
    for model, context, concurrency in (("V3", 4000, 8), ("V3", 32000, 32), ("V3", 32000, 128), ("K2", 128000, 8)):
        records = grids[model][context, concurrency]
        shown = {label: records[label] for label in (TP, AG_RS, SYMM, DP) if label in records}
        four.phases(f"{model}, {four.said(context, concurrency)}", shown)
    for context, concurrency in ((4000, 8), (32000, 32)):
        shown = {label: wide["V3"][context, concurrency][label] for label in (TP, AG_RS, SYMM, DP)}
        four.phases(f"V3 in bf16, {four.said(context, concurrency)}", shown)
    for ranks in RANKS:
        four.exchanges(HERE / "wire" / f"exchange-{ranks}")
    for ranks in RANKS:
        registered(ranks)
    emulated()
    print()
    four.against_live(HERE)
    four.against_live(HERE / "again")
