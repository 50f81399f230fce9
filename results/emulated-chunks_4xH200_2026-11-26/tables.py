"""The tables of README.md, from the records beside this file: `python tables.py`."""

import importlib.util
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
FOUR = HERE.parent / "decode-serving-fp8_4xH200_2026-11-26" / "tables.py"
spec = importlib.util.spec_from_file_location("four", FOUR)
four = importlib.util.module_from_spec(spec)
spec.loader.exec_module(four)

PAIRS = {0: (0, 1), 2: (2, 3)}
"""GPUs of each run of two."""
PROMPTS = [(1, 128, 0), (1, 512, 0), (1, 1024, 0), (1, 2048, 0), (2, 1024, 4352), (1, 4096, 0), (8, 1024, 0)]
DECODES = [(8, 5500), (32, 5500), (48, 5500)]


def case_of(case):
    chunks = tuple((c["chunks"], c["tokens"], c["prefix"]) for c in case["chunks"])
    return chunks, tuple((d["requests"], d["context"]) for d in case["decodes"])


def steps(run):
    """Median ms of each case that is on a line of the model; one of a kind each."""
    (file,) = (HERE / run / "step-times").glob("*.json")
    cases = json.loads(file.read_text())["cases"]
    return {case_of(m["case"]): statistics.median(m["samples_ms"]) for m in cases if m["case"]["use"] == "line"}


def named():
    for chunks, tokens, prefix in PROMPTS:
        words = f"{chunks} × {tokens:,}" if chunks > 1 else f"{tokens:,}"
        yield words + (f" after {prefix:,}" if prefix else ""), (((chunks, tokens, prefix),), ())
    for requests, context in DECODES:
        yield f"decode, {requests} × {context:,}", ((), ((requests, context),))


def off(its, live):
    return f"{its / live - 1:+.1%}".replace("%", " %")


def against_live():
    live = {pair: steps(f"live-{pair}") for pair in PAIRS}
    alone = {gpu: steps(f"emulated-{gpu}") for gpus in PAIRS.values() for gpu in gpus}
    columns = [w for pair, gpus in PAIRS.items() for w in (f"GPUs {gpus[0]} and {gpus[1]}", *[f"emulated by {g}" for g in gpus])]
    four.head("ms a step", *columns)
    for words, case in named():
        cells = []
        for pair, gpus in PAIRS.items():
            cells.append(f"{live[pair][case]:.1f}")
            cells += [f"{alone[g][case]:.1f} ({off(alone[g][case], live[pair][case])})" for g in gpus]
        four.row(words, *cells)
    print()
    short = {}
    for pair, gpus in PAIRS.items():
        for case, ms in live[pair].items():
            kind = "decode" if not case[0] else "prompts up to 544" if sum(n * t for n, t, _ in case[0]) <= 544 else "more"
            for which, pick in (("slower", max), ("faster", min)):
                short.setdefault((kind, which), []).append(pick(alone[g][case] for g in gpus) / ms - 1)
    for (kind, which), errors in sorted(short.items()):
        print(f"{kind}, the {which} GPU: {min(errors):+.1%} to {max(errors):+.1%}, median {statistics.median(errors):+.1%}, {len(errors)} cases")
    print()


def busy():
    """The same by modes of the stand-in; the grid's own are `rests`."""
    found = {}
    for gpu in range(4):
        for line in (HERE / f"emulated-{gpu}" / "busy.jsonl").read_text().splitlines():
            d = json.loads(line)
            found[gpu, d["busy"], case_of(d["case"])] = d["ms"]
    rests = {gpu: steps(f"emulated-{gpu}") for gpu in range(4)}
    four.head("over resting", "32 SMs multiply", "132 multiply")
    for words, case in named():
        if (0, 132, case) in found:
            four.row(words, *[", ".join(off(found[g, n, case], rests[g][case]) for g in range(4)) for n in (32, 132)])
    print()


def loads():
    four.head("load", "", "output tok/s", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", left=2)
    ways = [("replay, GPUs 0 and 1", "live-0"), ("replay, GPUs 2 and 3", "live-2"), *[(f"emulated by {g}", f"emulated-{g}") for g in range(4)]]
    for kind in four.LIVE:
        for r in four.ok(HERE / f"served/live-{kind}"):
            key = (r.point.concurrency, r.point.load.request_rate)
            words = f"{key[1]} requests/s" if key[1] else f"{key[0]} clients"
            four.row(words + (", 3 turns" if kind == "turns" else ""), "live", *four.served(r.serve))
            for what, run in ways:
                its = {(o.point.concurrency, o.point.load.request_rate): o.serve for o in four.ok(HERE / f"replays/{run}-{kind}")}
                four.row("", what, *four.apart(its[key], r.serve))
    print()


def company():
    four.head("products and what is between, ms", *[f"GPU {g}: {w}" for g in (0, 1) for w in ("products", "call")])
    rows = {}
    for g in (0, 1):
        for line in (HERE / "company" / f"company-{g}.jsonl").read_text().splitlines():
            d = json.loads(line)
            rows.setdefault((d["products"], d["kind"]), {}).setdefault(g, []).append((d["work_ms"], d["call_ms"]))
    for (products, kind), by_gpu in rows.items():
        four.row(f"{products}, {kind}", *[" / ".join(f"{x[at]:.3f}" for x in by_gpu[g]) for g in (0, 1) for at in (0, 1)])
    print()


def warm():
    """Emulated by a GPU that had just begun."""
    four.head("ms a step, MHz, W", "GPU 0", "GPU 1")
    both = []
    for g in (0, 1):
        lines = (HERE / "company" / f"emulated-{g}.jsonl").read_text().splitlines()
        both.append({case_of(d["case"]): d for d in map(json.loads, lines) if not d["busy"]})
    for words, case in named():
        if all(case in one for one in both):
            four.row(words, *[f"{d['ms']:.1f}, {statistics.mean(d['clock']):.0f}, {statistics.mean(d['power']) / 1e3:.0f}" for d in (one[case] for one in both)])
    print()


if __name__ == "__main__":
    against_live()
    busy()
    loads()
    company()
    warm()
