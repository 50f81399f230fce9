"""The tables of README.md, from the records beside this file: `python tables.py`."""

from pathlib import Path

import msgspec

from dcpbench.bench.record import BenchRecord
from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
BEFORE = HERE.parent / "decode-deepseek-v3-kimi-k2_4xH200_2026-11-20" / "run1"
MODELS = {"deepseek-v3": "V3", "kimi-k2": "K2"}
FP8, FP8_K2 = ("grid-tp/deepseek-v3", "grid/deepseek-v3-fp8"), ("grid-tp/kimi-k2", "grid/kimi-k2-fp8", "a2a-k2/kimi-k2")
"""tp4, all others, and K2 with `a2a`; tp4's own records of `grid/` have shorter gaps between kernels."""
BF16, BF16_K2 = ("bf16/deepseek-v3-bf16",), ("bf16-k2/kimi-k2-bf16",)
EXPERTS = {"V3": "experts/deepseek-v3", "K2": "experts/kimi-k2"}
TP, DP, SYMM, AG_RS = "tp4", "tp4·dp4", "tp4·dcp4 `symm`", "tp4·dcp4 `ag_rs`"
SHORT_GAP_US = 0.2
COLLECTIVES = ("q_gather", "merge", "attn_reduce", "mlp_reduce")
LIVE = ("closed", "open", "turns")


def ok(*runs):
    return [r for run in runs for r in read_run(HERE / run).records if r.outcome == "ok"]


def step_ms(record, *, gaps=True):
    """Of decode; without `gaps`, without the time in which no kernel ran."""
    return record.metrics.step_ms.median - (0 if gaps else record.phases.idle_us / 1e3)


def name(point, *, ep=False):
    layout = f"{point.layout_name} `{point.exchange}`" if point.dcp > 1 else point.layout_name
    return f"{layout}, `--ep {point.ep}`" if ep else layout


def load(point):
    return point.context, point.concurrency


def said(context, concurrency):
    return f"{concurrency} × {context:,}"


def by_load(records, *, ep=False):
    """Records by layout, by (context, concurrency), in the order of loads and of layouts."""
    of = {}
    for r in sorted(records, key=lambda r: (r.point.dp, r.point.dcp, r.point.exchange)):
        of.setdefault(load(r.point), {})[name(r.point, ep=ep)] = r
    return dict(sorted(of.items()))


def of_model(records, model):
    return [r for r in records if r.point.model == model and r.phases]


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def head(*cells, left=1):
    row(*cells)
    row(*["---"] * left, *["---:"] * (len(cells) - left))


def step(record):
    marks = "*" if "throttled" in record.marks else ""
    return f"{step_ms(record):.1f}{marks} ({record.floor.floor_ms / step_ms(record):.2f})"


def decode(model, of):
    layouts = list(dict.fromkeys(label for records in of.values() for label in records))
    head(f"{model}, requests × context", *layouts)
    for at, records in of.items():
        row(said(*at), *[step(records[label]) if label in records else "no room" for label in layouts])
    print()


def pays(model, of):
    head(f"{model}: output over the best layout without DCP", "best with DCP", "over", "output", left=3)
    for at, records in of.items():
        split, other = (
            {label: step_ms(r) for label, r in records.items() if (r.point.dcp > 1) == dcp} for dcp in (True, False)
        )
        over = min(other.values()) / min(split.values())
        row(said(*at), min(split, key=split.get), min(other, key=other.get), f"{over:.3f}")
    print()


def phases(title, of):
    """`of`: records by column."""
    head(f"{title}: ms (share of its limit)", *of)
    first = next(iter(of.values()))
    for phase in dict.fromkeys([*first.phases.phase_us, "q_gather", "merge", "dp_gather"]):
        cells = []
        for r in of.values():
            us = r.phases.phase_us.get(phase)
            share = f" ({r.floor.phase_floor_us.get(phase, 0) / us:.2f})" if us and r.floor else ""
            cells.append("" if us is None else f"{us / 1e3:.2f}{share}")
        row(phase, *cells)
    row("idle", *[f"{r.phases.idle_us / 1e3:.2f}" for r in of.values()])
    shares = (f" ({r.floor.floor_ms / step_ms(r):.2f})" if r.floor else "" for r in of.values())
    row("step", *[f"{step_ms(r):.2f}{share}" for r, share in zip(of.values(), shares, strict=True)])
    print()


def precisions():
    """Output of tp4·dcp4 over tp4's."""
    head(
        "tp4·dcp4 over tp4, output",
        "bf16, 2026-11-20, `ag_rs`, without gaps",
        "bf16, `ag_rs`",
        "fp8, `ag_rs`",
        "bf16, `symm`",
        "fp8, `symm`",
    )
    for model, fp8, bf16 in (("deepseek-v3", FP8, BF16), ("kimi-k2", FP8_K2, BF16_K2)):
        before, fp8, bf16 = by_load(of_model(ok(BEFORE), model)), by_load(ok(*fp8)), by_load(ok(*bf16))
        for at in bf16:
            cells = [
                f"{step_ms(of[at][TP], gaps=gaps) / step_ms(of[at][label], gaps=gaps):.3f}"
                for of, label, gaps in (
                    (before, AG_RS, False),
                    (bf16, AG_RS, True),
                    (fp8, AG_RS, True),
                    (bf16, SYMM, True),
                    (fp8, SYMM, True),
                )
            ]
            row(f"{MODELS[model]}, {said(*at)}", *cells)
    print()


def gap_us(record):
    return record.phases.idle_us / record.phases.kernels


def gaps():
    """Whether short gaps of rank 0 make a step shorter: against the same points in fp8, all of which have long ones."""
    here, fp8 = by_load(r for r in ok(*BF16) if r.point.dcp > 1), by_load(ok(*FP8))
    points = [(at, label, r) for at, records in here.items() for label, r in records.items()]

    def collectives_ms(at, label):
        here_us, fp8_us = (sum(of[at][label].phases.phase_us[p] for p in COLLECTIVES) for of in (here, fp8))
        return (here_us - fp8_us) / 1e3

    def apart_ms(of, at, layout):
        return step_ms(of[at][f"{layout} `ag_rs`"]) - step_ms(of[at][f"{layout} `symm`"])

    head("V3 in bf16", "gap, µs", "in collectives, ms over fp8", "`ag_rs` − `symm`, ms", "in fp8")
    for at, label, r in points:
        if gap_us(r) < SHORT_GAP_US:
            apart = [f"{apart_ms(of, at, r.point.layout_name):.2f}" for of in (here, fp8)]
            row(f"{said(*at)}, {label}", f"{gap_us(r):.2f}", f"{collectives_ms(at, label):+.2f}", *apart)
    others = [(at, label, r) for at, label, r in points if gap_us(r) >= SHORT_GAP_US]
    spans = [sorted(gap_us(r) for *_, r in others), sorted(collectives_ms(at, label) for at, label, _ in others)]
    low, high = ([found[end] for found in spans] for end in (0, -1))
    row(
        f"the {len(others)} others with DCP",
        f"{low[0]:.2f} to {high[0]:.2f}",
        f"{low[1]:+.2f} to {high[1]:+.2f}",
        "",
        "",
    )
    print()


def experts(model, measured, layouts):
    """Experts cut by width against whole ones."""
    head(
        f"{model}, fp8, 4,000 tokens",
        "`--ep 1`, ms",
        "`--ep tp`, ms",
        "whole ones take longer by",
        "moe",
        "mlp_reduce",
        "its limit",
        "experts of the busiest rank",
    )
    for (_, concurrency), records in measured.items():
        for label in layouts:
            cut, whole = (records[f"{label}, `--ep {ep}`"] for ep in ("1", "tp"))
            both = [
                " → ".join(f"{of[phase] / 1e3:.2f}" for of in found)
                for phase, found in (
                    ("moe", [r.phases.phase_us for r in (cut, whole)]),
                    ("mlp_reduce", [r.phases.phase_us for r in (cut, whole)]),
                    ("mlp_reduce", [r.floor.phase_floor_us for r in (cut, whole)]),
                )
            ]
            row(
                f"{concurrency}, {label}",
                step(cut),
                step(whole),
                f"{step_ms(whole) / step_ms(cut) - 1:+.1%}".replace("%", " %"),
                *both,
                f"{whole.honesty.busiest_rank_experts:.2f} ×",
            )
    print()


def attention_dp(model, measured, grid, dcp, dp):
    """Layout `dcp` over `dp` with whole experts and with cut ones; these were `measured` at 4,000 tokens alone."""
    head(
        f"{model}, fp8, requests × context",
        dcp,
        f"{dp}, whole experts",
        "DCP over it",
        f"{dp}, cut experts",
        "DCP over it",
    )
    for at in sorted({*measured, *grid}):
        if at in measured:
            split, whole, cut = (
                step_ms(measured[at][label]) for label in (f"{dcp}, `--ep 1`", f"{dp}, `--ep tp`", f"{dp}, `--ep 1`")
            )
            sign = ""
        else:
            split, whole = (step_ms(grid[at][label]) for label in (dcp, dp))
            there = measured[4000, at[1]]
            cut = whole - step_ms(there[f"{dp}, `--ep tp`"]) + step_ms(there[f"{dp}, `--ep 1`"])
            sign = "≈ "
        row(
            said(*at),
            f"{split:.1f}",
            f"{whole:.1f}",
            f"{whole / split:.3f}",
            f"{sign}{cut:.1f}",
            f"{sign}{cut / split:.3f}",
        )
    print()


def exchanges(folder):
    record = msgspec.json.decode((HERE / folder / "bench-exchange.json").read_bytes(), type=BenchRecord)
    us = {
        (r.case.sizes["heads"], r.case.sizes["requests"], r.case.variant): r.graph.time.median_us
        for r in record.results
    }
    names = ("symm", "ag_rs", "ag_rs_registered", "a2a")
    row("heads, requests", *[f"`{n}`" for n in names], *[f"`{n}` ÷ `symm`" for n in names[1:]])
    row("---", *["---:"] * (2 * len(names) - 1))
    for heads in (64, 128):
        for requests in (1, 8, 32, 128, 512):
            times = [us[heads, requests, n] for n in names]
            row(f"{heads}, {requests}", *[f"{t:.1f}" for t in times], *[f"{t / times[0]:.2f}" for t in times[1:]])
    print()


def seed(model, roomy, scarce):
    """`roomy`: runs with 40 GiB; `scarce`: the folder of those with 4."""
    row(
        f"{model}, clients",
        "KV a GPU",
        "layout",
        "output tok/s",
        "requests/s",
        "TTFT mean s",
        "TTFT p50 s",
        "TPOT mean ms",
        "ITL p99 ms",
        "preemptions",
    )
    row("---:", "---:", "---", *["---:"] * 7)
    runs = [
        *(("40 GiB", run) for run in roomy),
        *(("4 GiB", f"{scarce}/{p.name}") for p in sorted((HERE / scarce).iterdir())),
    ]
    rows = [(r.point.concurrency, kv, r) for kv, run in runs for r in ok(run)]
    for concurrency, kv, r in sorted(rows, key=lambda found: (found[0], found[1], found[2].point.layout_name)):
        s = r.serve
        row(
            concurrency,
            kv,
            name(r.point),
            f"{s.output_tok_s:.0f}",
            f"{s.request_s:.3f}",
            f"{s.ttft_ms.mean / 1e3:.2f}",
            f"{s.ttft_ms.p50 / 1e3:.2f}",
            f"{s.tpot_ms.mean:.1f}",
            f"{s.itl_ms.p99:.1f}",
            s.preemptions,
        )
    print()


def against_live(here=HERE):
    """Replays of five loads by step times of another load, of all GPUs and of the one that stood for them."""
    head("load", "", "output tok/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "cached tokens by turn", left=2)
    for kind in LIVE:
        live = ok(here / f"served/live-{kind}")
        others = [
            (what, {(r.point.concurrency, r.point.load.request_rate): r.serve for r in ok(here / f"replays/{run}-{kind}")})
            for what, run in (("replay", "replay"), ("emulated", "emulated"))
        ]
        for r in live:
            clients, rate = r.point.concurrency, r.point.load.request_rate
            words = f"{rate} requests/s" if rate else f"{clients} clients"
            row(words + (", 3 turns" if kind == "turns" else ""), "live", *served(r.serve), cached(r.serve))
            for what, of in others:
                there = of[clients, rate]
                row("", what, *apart(there, r.serve), cached(there))
    print()


def figures(serve):
    return serve.output_tok_s, serve.ttft_ms.p50, serve.itl_ms.p50, serve.itl_ms.p99


def served(serve):
    return [f"{x:.1f}" for x in figures(serve)]


def apart(serve, live):
    return [f"{x / y - 1:+.1%}".replace("%", " %") for x, y in zip(figures(serve), figures(live), strict=True)]


def cached(serve):
    return ", ".join(f"{turn.cached_tokens:,}" for turn in serve.turns or ())


if __name__ == "__main__":
    grids = {"V3": FP8, "K2": FP8_K2}
    for table in (decode, pays):
        for model, runs in (*grids.items(), ("V3 in bf16", BF16), ("K2 in bf16", BF16_K2)):
            table(model, by_load(ok(*runs)))
    gaps()
    precisions()
    now, same = by_load(ok(*BF16))[4000, 8], by_load(ok(EXPERTS["V3"]), ep=True)[4000, 8]
    phases(
        f"V3, {said(4000, 8)}",
        {
            "tp4, bf16, 2026-11-20": by_load(of_model(ok(BEFORE), "deepseek-v3"))[4000, 8][TP],
            "tp4, bf16": now[TP],
            "tp4, fp8": same[f"{TP}, `--ep 1`"],
            "tp4·dcp4 `symm`, bf16": now[SYMM],
            "tp4·dcp4 `symm`, fp8": same[f"{SYMM}, `--ep 1`"],
        },
    )
    grid = by_load(ok(*FP8))
    for context in (4000, 128000):
        phases(f"V3, {said(context, 8)}", {label: grid[context, 8][label] for label in (TP, SYMM, DP)})
    cut_and_whole = {model: by_load(ok(run), ep=True) for model, run in EXPERTS.items()}
    for model, measured in cut_and_whole.items():
        experts(model, measured, (TP, SYMM, DP))
    for model, runs in grids.items():
        attention_dp(model, cut_and_whole[model], by_load(ok(*runs)), SYMM, DP)
    exchanges("wire/exchange-4")
    seed("V3", ["seed/deepseek-v3"], "seed-4gib")
    seed("K2", ["seed-k2/kimi-k2", "seed-k2/kimi-k2-dp"], "seed-k2-4gib")
    against_live()
