"""The tables of README.md, from the records beside this file: `python tables.py`, which makes what `replays/` lacks; `--again` makes all anew."""

import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import msgspec

from dcpbench.bench import calibration
from dcpbench.points.wire import PROMPTS_APART
from dcpbench.records import checksums
from dcpbench.records.runs import read_run
from dcpbench.serving.step_times import read_step_times

HERE = Path(__file__).parent
SEED = Path("../decode-serving-fp8_4xH200_2026-11-26/seed/deepseek-v3/step-times")
STEPPED = Path("../clients-in-step_4xH200_2026-11-27/v3/4gib")
CHUNKS = Path("../emulated-chunks_4xH200_2026-11-26")
KV = "4GiB"
NAMES = {"dcp": "tp4·dcp4", "dp": "tp4·dp4", "dpx": "tp4·dp4, repeat"}
LAYOUTS = {"dcp": "tp4-dcp4", "dpx": "tp4-dp4"}
"""Runs with step times, and the folders of the same layouts in STEPPED."""
BEFORE = {"dcp": "dp1-dcp4", "dpx": "dp4-dcp1"}
"""What their older files in SEED are called by."""
FULL = {"alike": ("4,000 and 1,500", "1500"), "near": ("4,000 and 1,400 to 1,600", "uniform:1400-1600")}
CLIENTS = (8, 24, 32, 48)
GPUS = range(4)
SAID = {"output_tok_s": "output", "ttft_p50_ms": "TTFT p50", "itl_p50_ms": "ITL p50"}


def head(*cells, left=1):
    print("| " + " | ".join(cells) + " |\n|" + " --- |" * left + " ---: |" * (len(cells) - left))


def row(*cells):
    print("| " + " | ".join(cells) + " |")


def percent(ratio):
    return f"{ratio - 1:+.1%}".replace("%", " %")


def records(run):
    return read_run(Path(run)).records


def key(record):
    load = record.point.load
    return record.point.concurrency, load.output_tokens, load.requests


def told(which):
    clients, outputs, _ = which
    return f"{clients} clients, {outputs.removeprefix('uniform:').replace('-', ' to ')} out"


def live(run):
    return {key(r): r for r in records(run) if r.point.load.mode == "live"}


def order(loads):
    return sorted(loads, key=lambda which: (-which[0], which[1] == "200"))


def step_times(run):
    (file,) = (Path(run) / "step-times").glob("*.json")
    return file


def older(run):
    (file,) = SEED.glob(f"*{BEFORE[run]}*.json")
    return file


def neutral(file):
    """Records without where this folder lies, sealed anew."""
    lines = [line.rpartition(b',"crc32":"')[0].replace(f"{Path.cwd()}/".encode(), b"") for line in file.read_bytes().splitlines()]
    file.write_bytes(b"".join(line + checksums.TAIL % zlib.crc32(line) + b"\n" for line in lines))


def replayed(name, file, words):
    """Records of a load by a file of step times."""
    there = Path("replays") / name
    if "--again" in sys.argv or not (there / "records.jsonl").exists():
        typed = f"serve --mode replay --step-times {file} --kv-memory {KV} --no-baseline --input-tokens 4000 {words} -o {there} --force"
        subprocess.run([sys.executable, "-m", "dcpbench", *typed.split()], check=True, capture_output=True)
        for beside in there.iterdir():
            if beside.name != "records.jsonl":
                shutil.rmtree(beside) if beside.is_dir() else beside.unlink()
        neutral(there / "records.jsonl")
    return {key(r): r for r in records(there)}


def same_loads(name, file):
    """The live loads by a file of step times."""
    found = {}
    for clients, outputs, requests in live("dcp"):
        words = f"--output-tokens {outputs} --num-requests {requests} --concurrency {clients}"
        found |= replayed(f"{name}-{clients}-{outputs.removeprefix('uniform:')}", file, words)
    return found


def full(run, lengths):
    outputs = FULL[lengths][1]
    words = f"--output-tokens {outputs} --num-requests 480 --concurrency {','.join(map(str, CLIENTS))}"
    return {which[0]: r for which, r in replayed(f"{run}-{lengths}", step_times(f"{run}-steps"), words).items()}


def full_before(run, lengths):
    return {r.point.concurrency: r for r in records(STEPPED / f"{LAYOUTS[run]}-{lengths}")}


def values(serve):
    return dict(zip(SAID, (serve.output_tok_s, serve.ttft_ms.p50, serve.itl_ms.p50), strict=True))


def machine():
    for run in (*NAMES, *[f"emulated-{g}" for g in GPUS]):
        r = records(run)[0]
        e = r.environment
        print(f"- {run}: {e.device_count} × {e.device}, host {e.host_hash}, launched by {e.git_commit}, {r.honesty.layers_held} of {r.honesty.layers} layers, {r.started_at}, marks {sorted({m for x in records(run) for m in x.marks})}")
    for run in LAYOUTS:
        times = read_step_times(step_times(f"{run}-steps"))
        checks = [f"{e:+.1%}" for _, e in times.check_errors()]
        print(f"- step times of {run}: uses of cases {sorted({m.case.use for m in times.cases})}, {len(times.cases)} cases, {times.measuring_s:.0f} s, checks {checks}, marks {times.marks}")
    print()


def served():
    print("## Live\n")
    head("load", "layout", "output tok/s", "steady", "TTFT p50 ms", "mean", "ITL p50 ms", "p99", "steps", "with prompts", "DCP ahead", left=2)
    runs = {run: live(run) for run in NAMES}
    for which in order(runs["dcp"]):
        for run, loads in runs.items():
            if which not in loads:
                continue
            s = loads[which].serve
            ahead = "" if run == "dcp" else percent(runs["dcp"][which].serve.output_tok_s / s.output_tok_s)
            row(told(which), NAMES[run], f"{s.output_tok_s:.0f}", f"{s.steady_tok_s:.0f}", f"{s.ttft_ms.p50:,.0f}", f"{s.ttft_ms.mean:,.0f}", f"{s.itl_ms.p50:.1f}", f"{s.itl_ms.p99:.0f}", f"{s.steps}", f"{s.steps - s.decode_steps}", ahead)  # fmt: skip
    print()
    apart = [getattr(runs["dpx"][w].serve, "output_tok_s") / r.serve.output_tok_s - 1 for w, r in runs["dp"].items()]
    ms = [a / b - 1 for w, r in runs["dp"].items() for a, b in ((runs["dpx"][w].serve.ttft_ms.p50, r.serve.ttft_ms.p50), (runs["dpx"][w].serve.itl_ms.p50, r.serve.itl_ms.p50))]
    print(f"dpx over dp: output {', '.join(f'{x:+.2%}' for x in apart)}; TTFT p50 and ITL p50 {min(ms):+.2%} to {max(ms):+.2%}\n")


def replays():
    print("## Replays by step times of the same job, off live\n")
    head("load", "layout", "output", "TTFT p50", "mean", "ITL p50", "p99", "steps with prompts, live and replayed", left=2)
    made = {run: same_loads(f"live-{run}", step_times(f"{run}-steps")) for run in LAYOUTS}
    errors = {}
    for run in LAYOUTS:
        for which in order(live(run)):
            a, b = made[run][which].serve, live(run)[which].serve
            pairs = ((a.output_tok_s, b.output_tok_s), (a.ttft_ms.p50, b.ttft_ms.p50), (a.ttft_ms.mean, b.ttft_ms.mean), (a.itl_ms.p50, b.itl_ms.p50), (a.itl_ms.p99, b.itl_ms.p99))
            for name, (mine, truth) in zip(("output", "TTFT p50", "TTFT mean", "ITL p50", "ITL p99"), pairs, strict=True):
                errors.setdefault((run, name), []).append(mine / truth - 1)
            row(told(which), NAMES[run].removesuffix(", repeat"), *[percent(x / y) for x, y in pairs], f"{b.steps - b.decode_steps}, {a.steps - a.decode_steps}")
    print()
    for (run, name), found in errors.items():
        print(f"{run}: {name} {min(found):+.1%} to {max(found):+.1%}")
    print("\nOutput of tp4·dcp4 over tp4·dp4:\n")
    head("load", "live", "replayed by step times of the same job", "of the day before")
    old = {run: same_loads(f"before-{run}", older(run)) for run in LAYOUTS}
    for which in order(live("dcp")):
        row(told(which), *[percent(of["dcp"][which].serve.output_tok_s / of["dpx"][which].serve.output_tok_s) for of in ({run: live(run) for run in LAYOUTS}, made, old)])
    print()


def full_loads():
    print("## Full loads, replayed\n")
    head("output tok/s (before)", "in and out", *[f"{c} clients" for c in CLIENTS], left=2)
    found = {(run, lengths): full(run, lengths) for run in LAYOUTS for lengths in FULL}
    old = {(run, lengths): full_before(run, lengths) for run in LAYOUTS for lengths in FULL}
    for (run, lengths), by in found.items():
        row(NAMES[run].removesuffix(", repeat"), FULL[lengths][0], *[f"{by[c].serve.output_tok_s:,.0f} ({old[run, lengths][c].serve.output_tok_s:,.0f})" for c in CLIENTS])
    print("\nOutput of tp4·dcp4 over tp4·dp4 (before):\n")
    head("in and out", *[f"{c} clients" for c in CLIENTS])
    for lengths, (words, _) in FULL.items():
        row(words, *[f"{percent(found['dcp', lengths][c].serve.output_tok_s / found['dpx', lengths][c].serve.output_tok_s)} ({percent(old['dcp', lengths][c].serve.output_tok_s / old['dpx', lengths][c].serve.output_tok_s)})" for c in CLIENTS])
    print("\nBy lengths that differ instead of alike:\n")
    head("layout", *[f"{c} clients" for c in CLIENTS])
    for run in LAYOUTS:
        row(NAMES[run].removesuffix(", repeat"), *[percent(found[run, "near"][c].serve.output_tok_s / found[run, "alike"][c].serve.output_tok_s) for c in CLIENTS])
    print()
    head("layout", "in and out", "clients", "TTFT p50 ms", "p90", "ITL p50 ms", "p99", "steps with prompts", left=2)
    for (run, lengths), by in found.items():
        for c in (32, 48):
            s = by[c].serve
            row(NAMES[run].removesuffix(", repeat"), FULL[lengths][0], f"{c}", f"{s.ttft_ms.p50:,.0f}", f"{s.ttft_ms.p90:,.0f}", f"{s.itl_ms.p50:.1f}", f"{s.itl_ms.p99:.0f}", f"{s.steps - s.decode_steps}")
    print()


def medians(file):
    """Of each case on a line of the model."""
    return {str(m.case): m.median_ms for m in read_step_times(file).cases if m.case.use == "line"}


STEPS = {
    "dcp": ("8 × 1 token at 256", "32 × 1 token at 256", "48 × 1 token at 256", "1 × 128 tokens at 0", "1 × 512 tokens at 0", "1 × 2,048 tokens at 0", "1 × 4,096 tokens at 0", "2 × 4,096 tokens at 0"),
    "dpx": ("2 × 1 token at 64", "8 × 1 token at 64", "12 × 1 token at 64", "1 × 128 tokens at 0", "1 × 512 tokens at 0", "1 × 1,024 tokens at 0", "1 × 2,048 tokens at 0"),
}  # fmt: skip


def steps():
    print("## Steps, ms\n")
    for run, cases in STEPS.items():
        now, old = medians(step_times(f"{run}-steps")), medians(older(run))
        head(f"{NAMES[run].removesuffix(', repeat')}, of each replica", "ms", "over the day before")
        for case in cases:
            row(case, f"{now[case]:.1f}", percent(now[case] / old[case]) if case in old else "")
        both = [now[c] / old[c] - 1 for c in now if c in old]
        print(f"\n{len(both)} cases that both have: {min(both):+.1%} to {max(both):+.1%}, median {statistics.median(both):+.1%}\n")


def copy_with_prompts(gpu):
    """Step times of a GPU that say what prompts take all four together, by its calibrated file, as --emulate with that writes them."""
    times = json.loads(step_times(f"emulated-{gpu}").read_text())
    prompts = tomllib.loads(Path(f"wire/calibrated-{gpu}.toml").read_text())["prompts"]
    again = calibration.prompts_in([step_times("dcp-steps"), step_times(f"emulated-{gpu}")])
    assert prompts == [list(p) for p in msgspec.to_builtins(again)], "the file is not what calibrate makes of these step times"
    times["emulated"] |= {"prompts": prompts, "chunks_low": PROMPTS_APART, "chunks_high": PROMPTS_APART}
    copy = Path(f"emulated-{gpu}-with-prompts.json")
    copy.write_text(json.dumps(times))
    return copy


def forecasts():
    print("## Forecasts of the live loads by one GPU\n")
    factors()
    head("load", "GPU", "`prompts`", *SAID.values(), "ITL p99", "live within its ends: output, TTFT p50, ITL p50", left=3)
    worst, inside = {}, {}
    made = {(gpu, "no"): same_loads(f"alone-{gpu}", step_times(f"emulated-{gpu}")) for gpu in GPUS}
    for gpu in GPUS:
        copy = copy_with_prompts(gpu)
        made[gpu, "yes"] = same_loads(f"together-{gpu}", copy)
        copy.unlink()
    for which in order(live("dcp")):
        for (gpu, way), by in sorted(made.items(), key=lambda item: (item[0][1], item[0][0])):
            its, truth = values(by[which].serve), values(live("dcp")[which].serve)
            e = by[which].emulated
            within = [getattr(e, f"{n}_low") <= truth[n] <= getattr(e, f"{n}_high") for n in SAID]
            for n, i in zip(SAID, within, strict=True):
                worst.setdefault((way, n), []).append(its[n] / truth[n] - 1)
                inside[way, n] = inside.get((way, n), 0) + i
            p99 = percent(by[which].serve.itl_ms.p99 / live("dcp")[which].serve.itl_ms.p99)
            worst.setdefault((way, "ITL p99"), []).append(by[which].serve.itl_ms.p99 / live("dcp")[which].serve.itl_ms.p99 - 1)
            row(told(which), f"{gpu}", way, *[percent(its[n] / truth[n]) for n in SAID], p99, ", ".join("yes" if i else "no" for i in within))
    print()
    for (way, name), found in worst.items():
        within = f", live within the ends of {inside[way, name]} of {len(found)}" if (way, name) in inside else ""
        print(f"prompts {way}: {name} {min(found):+.1%} to {max(found):+.1%}{within}")
    print()


def factors():
    found = {gpu: dict(tomllib.loads(Path(f"wire/calibrated-{gpu}.toml").read_text())["prompts"]) for gpu in GPUS}
    head("prompt tokens of a step: live over emulated", *[f"GPU {gpu}" for gpu in GPUS])
    for tokens in found[0]:
        row(f"{tokens:,}", *[f"{found[gpu][tokens]:.3f}" for gpu in GPUS])
    print()
    for live_of, gpu in (("live-0", 0), ("live-0", 1), ("live-2", 2), ("live-2", 3)):
        most = max(calibration.prompts_in([step_times(CHUNKS / live_of), step_times(CHUNKS / f"emulated-{gpu}")]), key=lambda p: p.times)
        print(f"the day before, GPU {gpu} of another host, tp2·dcp2: at most {most.times:.3f}")
    print()
    truth = medians(step_times("dcp-steps"))
    for gpu in GPUS:
        its = medians(step_times(f"emulated-{gpu}"))
        kinds = {"decode": [c for c in its if "tokens" not in c], "prompts": [c for c in its if "tokens" in c]}
        for kind, cases in kinds.items():
            off = [its[c] / truth[c] - 1 for c in cases if c in truth]
            print(f"GPU {gpu}: {kind} {min(off):+.1%} to {max(off):+.1%}, median {statistics.median(off):+.1%} of {len(off)}")
    print()
    for run in ("dcp-steps", *[f"emulated-{gpu}" for gpu in GPUS]):
        by = {(m.case.use, str(m.case)): m.median_ms for m in read_step_times(step_times(run)).cases}
        print(f"{run}: 8 × 1,024 tokens again and again over behind decodes {percent(by['hot', '8 × 1,024 tokens at 0'] / by['line', '8 × 1,024 tokens at 0'])}")
    print()


def clocks():
    """By run: mean clock and power of each GPU, from its first record's beginning to its last one's end."""
    seen = []
    for line in Path("clocks.csv").read_text().splitlines():
        at, gpu, clock, power, _ = [cell.strip() for cell in line.split(",")]
        seen.append((datetime.datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=datetime.UTC), int(gpu), float(clock), float(power)))
    head("MHz, W", *[f"GPU {gpu}" for gpu in GPUS])
    for run in (*NAMES, "emulated-0"):
        begin = min(datetime.datetime.fromisoformat(r.started_at) for r in records(run))
        end = max(datetime.datetime.fromisoformat(r.started_at) + datetime.timedelta(seconds=r.seconds) for r in records(run))
        cells = []
        for gpu in GPUS:
            mine = [(c, p) for at, g, c, p in seen if g == gpu and begin <= at <= end and p > 300]
            cells.append(f"{statistics.mean(c for c, _ in mine):.0f}, {statistics.mean(p for _, p in mine):.0f}")
        row(run, *cells)
    print()


if __name__ == "__main__":
    os.chdir(HERE)
    machine()
    served()
    replays()
    full_loads()
    steps()
    forecasts()
    clocks()
