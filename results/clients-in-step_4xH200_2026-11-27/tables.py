"""The tables of README.md, from the records beside this file: `python tables.py`."""

from pathlib import Path

from dcpbench.records.runs import read_run

HERE = Path(__file__).parent
CLIENTS = (8, 24, 32, 48)
LAYOUTS = {"tp4": "tp4", "tp4-dcp4": "tp4·dcp4", "tp4-dp4": "tp4·dp4"}
LENGTHS = {"alike": "4,000 and 1,500", "near": "4,000 and 1,400 to 1,600", "wide": "3,600 to 4,400 and 1,200 to 1,800"}


def served(model, kv, layout, lengths):
    """By clients."""
    return {r.point.concurrency: r.serve for r in read_run(HERE / model / kv / f"{layout}-{lengths}").records}


def row(*cells):
    print("| " + " | ".join(cells) + " |")


def percent(ratio):
    return f"{ratio - 1:+.1%}".replace("%", " %")


def table(model, kv, clients):
    print(f"\n{model}, {kv}, {clients} clients\n")
    row("layout", "tokens in and out", "output tok/s", "TTFT p50 ms", "p90", "ITL p50 ms", "p99")
    row("---", "---", *["---:"] * 5)
    for layout, name in LAYOUTS.items():
        first = served(model, kv, layout, "alike")[clients].output_tok_s
        for lengths, words in LENGTHS.items():
            s = served(model, kv, layout, lengths)[clients]
            rate = f"{s.output_tok_s:.0f}" + ("" if lengths == "alike" else f" ({percent(s.output_tok_s / first)})")
            row(name, words, rate, *[f"{ms:,.0f}" for ms in (s.ttft_ms.p50, s.ttft_ms.p90)], f"{s.itl_ms.p50:.1f}", f"{s.itl_ms.p99:.0f}")


def ahead(kv):
    """DCP over the others, by clients and lengths."""
    print(f"\ntp4·dcp4, {kv}\n")
    row("over", "tokens in and out", *[f"{n} clients" for n in CLIENTS])
    row("---", "---", *["---:"] * len(CLIENTS))
    for model in ("v3", "k2"):
        for layout in ("tp4", "tp4-dp4"):
            for lengths, words in LENGTHS.items():
                dcp, other = (served(model, kv, who, lengths) for who in ("tp4-dcp4", layout))
                row(f"{model.upper()}, {LAYOUTS[layout]}", words, *[percent(dcp[n].output_tok_s / other[n].output_tok_s) for n in CLIENTS])


if __name__ == "__main__":
    ahead("4gib")
    ahead("spare")
    for model in ("v3", "k2"):
        for kv in ("4gib", "spare"):
            for clients in CLIENTS:
                table(model, kv, clients)
