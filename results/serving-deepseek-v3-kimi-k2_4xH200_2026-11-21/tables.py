"""All tables of README.md and all figures beside it, from the records alone: `python tables.py` in this folder.

Prints Markdown; writes figures as dcpbench's reports draw them, and one of its own for each model (where DCP pays).
"""

import statistics
import tempfile
from pathlib import Path

import matplotlib as mpl
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from dcpbench.reports import frames, plots
from dcpbench.reports.style import RC, headline
from dcpbench.serving.step_times import read_step_times

NAMES = {"deepseek-v3": "V3", "kimi-k2": "K2"}
LAYOUTS = ("tp4", "tp4·dcp4 `ag_rs`", "tp4·dcp4 `symm`", "tp4·dcp4 `a2a`", "tp4·dp4")
SPARE = ("v3", "v3-symm", "v3-a2a", "k2", "k2-dp")
LIVE = ("v3", "v3-pressure", "v3-open", "k2-dp")
FIGURES = {"throughput": "serve-throughput-replay-closed-{}", "ttft": "serve-ttft-replay-closed-{}"}
LONG = ("output tok/s", "TTFT p50 s", "ITL p50 ms", "preemptions")
COLUMNS = {
    "output tok/s": ("output_tok_s", 1, "{:,.0f}"), "requests/s": ("request_s", 1, "{:.3f}"),
    "TTFT mean s": ("ttft_mean_ms", 1e3, "{:.2f}"), "TTFT p50 s": ("ttft_p50_ms", 1e3, "{:.2f}"),
    "ITL p50 ms": ("itl_p50_ms", 1, "{:.1f}"), "ITL p99 ms": ("itl_p99_ms", 1, "{:.1f}"),
    "preemptions": ("preemptions", 1, "{:,.0f}"),
}  # fmt: skip
AGREE = {
    "output tok/s": "output_tok_s", "TTFT p50 ms": "ttft_p50_ms", "ITL mean ms": "itl_mean_ms",
    "ITL p50 ms": "itl_p50_ms", "ITL p99 ms": "itl_p99_ms",
}  # fmt: skip


def served(*folders):
    """Points of some folders, those that could not run left out, with model and layout as the tables say them."""
    points = frames.load([Path(f) for f in folders]).served
    points = points[points["output_tok_s"].notna()]
    said = [f"{layout} `{x}`" if x != "none" else layout for layout, x in points[["layout", "exchange"]].to_numpy()]
    return points.assign(model=points["model"].map(NAMES), said=said)


def change(ratio):
    return f"{ratio - 1:+.1%}".replace("-", "−").replace("%", " %")


def table(title, head, rows):
    words = [any(c.isalpha() for c in "".join(column)) for column in zip(*rows)]
    print(f"\n### {title}\n\n| {' | '.join(head)} |\n|{''.join('---|' if w else '--:|' for w in words)}")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))


def by_layout(title, points, columns, clients):
    """A row for each model, number of clients and layout."""
    points = points[points["concurrency"].isin(clients)]
    order = points.assign(place=points["said"].map(LAYOUTS.index)).sort_values(
        ["model", "concurrency", "place"], ascending=[False, True, True]
    )
    rows = [
        [
            p["model"],
            f"{p['concurrency']}",
            p["said"],
            *(f.format(p[c] / unit) for c, unit, f in map(COLUMNS.get, columns)),
        ]
        for _, p in order.iterrows()
    ]
    table(title, ["model", "clients", "layout", *columns], rows)


def over_tp4(points):
    """Output tok/s of each layout over that of tp4 under the same load, by (model, layout, input tokens, clients)."""
    keys = {
        (p["model"], p["said"], int(p["load_input_tokens"]), p["concurrency"]): p["output_tok_s"]
        for _, p in points.iterrows()
    }
    return {
        k: v / keys[k[0], "tp4", *k[2:]] for k, v in keys.items() if k[1] != "tp4" and (k[0], "tp4", *k[2:]) in keys
    }


def costs(title, points):
    """What a layout costs or gains where all but tp4's long inputs have KV to spare."""
    ratios = over_tp4(points)
    loads = sorted({k[2:] for k in ratios})
    rows = [
        [model, layout, *(change(ratios[model, layout, *x]) for x in loads)]
        for model in NAMES.values() for layout in LAYOUTS if (model, layout, *loads[0]) in ratios
    ]  # fmt: skip
    table(title, ["model", "layout", *(f"{i:,} in, {c} clients" for i, c in loads)], rows)


def starts(title, ratios):
    """The fewest clients with which a layout is ahead of tp4 by more than 1 %, and the most that it reaches."""
    inputs = sorted({k[2] for k in ratios})
    rows = []
    for model, layout in sorted(
        {k[:2] for k in ratios}, key=lambda k: ([*NAMES.values()].index(k[0]), LAYOUTS.index(k[1]))
    ):
        of_layout = {k[2:]: v for k, v in ratios.items() if k[:2] == (model, layout)}
        ahead = [[c for (n, c), v in sorted(of_layout.items()) if n == i and v > 1.01] for i in inputs]
        best = [max(v for (n, _), v in of_layout.items() if n == i) for i in inputs]
        rows.append(
            [model, layout, *(f"{f'from {a[0]}' if a else 'never'}, up to {b:.2f}×" for a, b in zip(ahead, best))]
        )
    table(title, ["model", "layout", *(f"{i:,} in" for i in inputs)], rows)


def agreement():
    """Replay against live, same load: `live → replay (difference)`."""
    points = served(*LIVE)
    rows = []
    for _, live in points[points["mode"] == "live"].iterrows():
        same = points["mode"] == "replay"
        for column in ("run", "said", "same_load"):
            same &= points[column] == live[column]
        (replay,) = [p for _, p in points[same].iterrows()]
        told = [f"{live[c]:,.1f} → {replay[c]:,.1f} ({change(replay[c] / live[c])})" for c in AGREE.values()]
        rows.append([live["run"], f"{live['model']} {live['said']}, {live['load']}", *told])
    table("Replay against live", ["folder", "load", *AGREE], rows)


def loop():
    """What the live loop did besides."""
    points = served(*LIVE)
    rows = [
        [
            p["run"], f"{p['model']} {p['said']}, {p['load']}", f"{p['idle_fraction'] * 100:.3f} %", f"{p['host_syncs_per_step']:g}",
            f"{p['allocations_per_step'] * p['steps']:.0f}", f"{p['preemptions']:.0f}",
        ]
        for _, p in points[points["mode"] == "live"].iterrows()
    ]  # fmt: skip
    table("The loop", ["folder", "load", "idle", "waits a step", "allocations", "preemptions"], rows)


def files():
    """Each file of step times: how much was measured, and how far checks lie from predictions."""
    rows = []
    for file in sorted(Path().glob("*/step-times/*.json")):
        times = read_step_times(file)
        short = [
            c
            for c in times.cases
            if not c.case.decodes and sum(k.chunks * (k.tokens + k.prefix) for k in c.case.chunks) <= 16
        ]
        host = [statistics.median(c.host_ms) / times.honesty.layers for c in short]
        rows.append([
            file.parts[0], file.stem.rsplit("-", 1)[0], f"{len(times.cases)}", f"{times.measuring_s:.0f}",
            f"{times.launch_ms:.1f}", f"{min(host):.2f}–{max(host):.2f}", f"{max(abs(e) for _, e in times.check_errors()) * 100:.1f} %",
        ])  # fmt: skip
    table(
        "Step times",
        ["folder", "path", "cases", "s", "launch ms", "host ms a layer, up to 16 tokens", "check error"],
        rows,
    )


def picture(kind, model, folder):
    """A figure of the folder's report, under the name that README.md has."""
    with tempfile.TemporaryDirectory() as place:
        for drawn in plots.draw_all(frames.load([Path(folder)]), Path(place)):
            if drawn.png.stem == FIGURES[kind].format(model):
                Path(f"{kind}-{NAMES[model].lower()}.png").write_bytes(drawn.png.read_bytes())


def break_even(model, ratios):
    """Output tok/s with DCP over without, a panel per exchange, a cell per input length and number of clients."""
    layouts = [x for x in LAYOUTS if (model, x) in {k[:2] for k in ratios} and "dcp4" in x]
    inputs, clients = (sorted({k[i] for k in ratios}) for i in (2, 3))
    with mpl.rc_context(RC | {"axes.grid": False, "axes.spines.left": False, "axes.spines.bottom": False}):
        figure = Figure(figsize=(4.4 * len(layouts), 4.0), layout="constrained")
        headline(figure, f"Output tok/s of tp4·dcp4 over tp4, {model}, 500 out, 8 GiB of KV per GPU, replay")
        for ax, layout in zip(figure.subplots(1, len(layouts), sharey=True, squeeze=False).flat, layouts):
            cells = [[ratios.get((model, layout, n, c), float("nan")) for c in clients] for n in inputs]
            ax.imshow(cells, cmap="PuOr_r", norm=TwoSlopeNorm(1, 0.7, 2.1), aspect="auto", origin="lower")
            for y, row in enumerate(cells):
                for x, value in enumerate(row):
                    ax.text(x, y, f"{value:.2f}" if value == value else "–", ha="center", va="center", fontsize=9)
            ax.set_title(layout.replace("`", ""))
            ax.set_xticks(range(len(clients)), clients)
            ax.set_yticks(range(len(inputs)), [f"{n:,}" for n in inputs])
            ax.tick_params(length=0)
            ax.set_xlabel("concurrency (closed loop)")
        figure.axes[0].set_ylabel("input (tokens)")
        figure.savefig(f"break-even-{model.lower()}.png", dpi=150)


if __name__ == "__main__":
    seed = served("v3-seed-8gib", "k2-seed-8gib")
    by_layout("4,000 in, 1,500 out, 8 GiB", seed, tuple(COLUMNS), (8, 32, 48))
    spare = served(*SPARE)
    spare = spare[spare["load_output_tokens"].isin(("1500", "1000"))]
    by_layout("4,000 in, 1,500 out, 32 GiB", spare[spare["load_input_tokens"] == "4000"], tuple(COLUMNS), (8, 32, 48))
    by_layout("32,000 in, 1,000 out, 32 GiB", spare[spare["load_input_tokens"] == "32000"], LONG, (8, 32, 48))
    by_layout("128,000 in, 1,000 out, 32 GiB", served("v3-128k"), LONG, (1, 4, 8))
    costs("Output tok/s against tp4's, 32 GiB", spare)
    ratios = over_tp4(served("v3-break-even-8gib", "k2-break-even-8gib"))
    starts(
        "Fewest clients with which a layout is ahead of tp4 by more than 1 % (and the most it reaches), 500 out, 8 GiB",
        ratios,
    )
    agreement()
    loop()
    files()
    for model in NAMES:
        for kind in FIGURES:
            picture(kind, model, f"{NAMES[model].lower()}-seed-8gib")
        break_even(NAMES[model], ratios)
