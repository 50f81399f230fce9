"""The tables of README.md, from the records beside this file: `python tables.py`."""

import importlib.util
from pathlib import Path

import msgspec

from dcpbench.bench.record import BenchRecord
from dcpbench.records.metrics import METRIC
from tools import emulation_live

HERE = Path(__file__).parent
FOUR = HERE.parent / "decode-serving-fp8_4xH200_2026-11-26" / "tables.py"
spec = importlib.util.spec_from_file_location("four", FOUR)
four = importlib.util.module_from_spec(spec)
spec.loader.exec_module(four)

MODELS = {"V3": "deepseek-v3", "K2": "kimi-k2"}
TP, DP, SYMM, AG_RS = "tp2", "tp2·dp2", "tp2·dcp2 `symm`", "tp2·dcp2 `ag_rs`"
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")
RANKS = (2, 4)


def grid(model):
    return four.ok(HERE / "grid" / f"{MODELS[model]}-fp8")


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


def energy(model):
    """Joules an output token."""
    of = four.by_load(grid(model))
    layouts = list(dict.fromkeys(label for records in of.values() for label in records))
    four.head(f"{model}, requests × context", *layouts)
    for at, records in of.items():
        joules = {label: METRIC["joules_per_token"].of(r) for label, r in records.items()}
        four.row(four.said(*at), *[f"{joules[label]:.2f}" if label in joules else "no room" for label in layouts])
    print()


def emulated():
    forecasts = [r for model in MODELS.values() for r in four.ok(HERE / "emulated" / model)]
    live = [r for model in MODELS for r in grid(model)]
    found = list(emulation_live.pairs(live, forecasts))
    head, rule, *rows = emulation_live.table(sorted(found, key=lambda pair: -off(*pair)))
    print("\n".join([head, rule, *rows]))
    print()


def off(live, forecast):
    return abs(four.step_ms(forecast) / four.step_ms(live) - 1)


if __name__ == "__main__":
    for model in MODELS:
        four.decode(model, four.by_load(grid(model)))
    for model in MODELS:
        four.pays(model, four.by_load(grid(model)))
    for model in MODELS:
        energy(model)
    for model, context, concurrency in (("V3", 4000, 8), ("V3", 32000, 32), ("V3", 32000, 128), ("K2", 128000, 8)):
        records = four.by_load(grid(model))[context, concurrency]
        shown = {label: records[label] for label in (TP, AG_RS, SYMM, DP) if label in records}
        four.phases(f"{model}, {four.said(context, concurrency)}", shown)
    for ranks in RANKS:
        four.exchanges(HERE / "wire" / f"exchange-{ranks}")
    for ranks in RANKS:
        registered(ranks)
    emulated()
