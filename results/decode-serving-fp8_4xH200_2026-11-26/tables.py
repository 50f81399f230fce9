"""The tables of README.md, from the records beside this file: `python tables.py`."""

from pathlib import Path

import msgspec

from dcpbench.bench.record import BenchRecord
from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
MODELS = {"deepseek-v3": "V3", "kimi-k2": "K2"}


def ok(run):
    return [r for r in read_run(HERE / run).records if r.outcome == "ok"]


def step_ms(record, *, gaps):
    """Of decode; without `gaps`, without the time in which no kernel ran."""
    return record.metrics.step_ms.median - (0 if gaps else record.phases.idle_us / 1e3)


def name(point):
    return f"{point.layout_name} `{point.exchange}`" if point.dcp > 1 else point.layout_name


def row(*cells):
    print(f"| {' | '.join(map(str, cells))} |")


def decode(model):
    of = {}
    for r in ok(f"grid/{model}-fp8"):
        of.setdefault((r.point.context, r.point.concurrency), {})[name(r.point)] = r
    layouts = list(dict.fromkeys(label for records in of.values() for label in records))
    row(f"{MODELS[model]}, requests × context", *layouts)
    row("---", *["---:"] * len(layouts))
    for (context, concurrency), records in sorted(of.items()):
        cells = []
        for label in layouts:
            r = records.get(label)
            marks = "*" if r and "throttled" in r.marks else ""
            cells.append(
                "no room"
                if r is None
                else f"{r.metrics.step_ms.median:.1f}{marks} ({r.floor.floor_ms / r.metrics.step_ms.median:.2f})"
            )
        row(f"{concurrency} × {context:,}", *cells)
    print()
    row(
        f"{MODELS[model]}: output over the best layout without DCP",
        "best with DCP",
        "over",
        "as measured",
        "without gaps",
    )
    row("---", "---", "---", "---:", "---:")
    for (context, concurrency), records in sorted(of.items()):
        found = []
        for gaps in (True, False):
            split, other = (
                {label: step_ms(r, gaps=gaps) for label, r in records.items() if (r.point.dcp > 1) == dcp}
                for dcp in (True, False)
            )
            found.append(
                (min(split, key=split.get), min(other, key=other.get), min(other.values()) / min(split.values()))
            )
        (label, over, measured), (_, over_too, without) = found
        row(
            f"{concurrency} × {context:,}",
            label,
            over if over == over_too else f"{over}, {over_too}",
            f"{measured:.3f}",
            f"{without:.3f}",
        )
    print()


def phases(model, layouts, context, concurrency):
    of = {
        name(r.point): r
        for r in ok(f"grid/{model}-fp8")
        if (r.point.context, r.point.concurrency) == (context, concurrency)
    }
    row(f"{MODELS[model]}, {concurrency} × {context:,}: ms (share of its limit)", *layouts)
    row("---", *["---:"] * len(layouts))
    names = [n for n in of[layouts[0]].phases.phase_us] + ["q_gather", "merge", "dp_gather"]
    for phase in dict.fromkeys(names):
        cells = []
        for label in layouts:
            us, floor = of[label].phases.phase_us.get(phase), of[label].floor.phase_floor_us.get(phase, 0)
            cells.append("" if us is None else f"{us / 1e3:.2f} ({floor / us:.2f})")
        row(phase, *cells)
    row("idle", *[f"{of[label].phases.idle_us / 1e3:.2f}" for label in layouts])
    row(
        "step",
        *[
            f"{of[label].metrics.step_ms.median:.2f} ({of[label].floor.floor_ms / of[label].metrics.step_ms.median:.2f})"
            for label in layouts
        ],
    )
    print()


def exchanges():
    record = msgspec.json.decode((HERE / "wire" / "exchange-4" / "bench-exchange.json").read_bytes(), type=BenchRecord)
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


def seed():
    row(
        "V3, clients",
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
        ("40 GiB", "seed/deepseek-v3"),
        *(("4 GiB", f"seed-4gib/{p.name}") for p in sorted((HERE / "seed-4gib").iterdir())),
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


if __name__ == "__main__":
    decode("deepseek-v3")
    decode("kimi-k2")
    phases("deepseek-v3", ["tp4", "tp4·dcp4 `symm`", "tp4·dp4"], 4000, 8)
    phases("deepseek-v3", ["tp4", "tp4·dcp4 `symm`", "tp4·dp4"], 128000, 8)
    exchanges()
    seed()
