"""Write README.md of a run's folder from its records."""

from __future__ import annotations

import collections
import importlib.util
from typing import TYPE_CHECKING

from dcpbench.points.names import ALL_REDUCES
from dcpbench.records.runs import read_run
from dcpbench.reports import load_labels
from tools import emulation_live
from tools.multi_gpu.running import Ran

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record
    from tools.multi_gpu.parts import Part

BACKENDS = {"flashinfer": "flashinfer", "flashmla": "flash_mla", "DeepGEMM": "deep_gemm"}
STEP_BARS_MS = {("bf16", "bf16"): 130.0, ("fp8", "fp8"): 80.0}  # maximum ms of 32 × 32,000, tp2, H200, by weights, KV
BAR_GPU, BAR_REQUESTS = "H200", 32
LEAST_FLOOR = 0.75
EMULATED_BAR = 0.07
REPLAY_BAR, REPLAY_TAIL_BAR = 0.05, 0.10
SERVED = ("output tok/s", "TTFT p50", "ITL p50", "TTFT p99", "ITL p99")
TAILS = SERVED[3:]
LAYOUTS = ("grid*", "bf16*", "more")
GRIDS = (*LAYOUTS, "experts", "reduce")


def installed() -> str:
    """Return which optional kernels can be used."""
    there = [name for name, module in BACKENDS.items() if importlib.util.find_spec(module)]
    missing = [name for name in BACKENDS if name not in there]
    without = f"; not installed, and gone on without: {', '.join(missing)}" if missing else ""
    return f"Attention and other optional kernels installed: {', '.join(there) or 'none, Triton alone'}{without}."


def records(folder: Path, part: str = "*") -> Iterator[tuple[Path, Record]]:
    """Yield (run, record) for all measured points."""
    for file in sorted(folder.glob(f"{part}/*/records.jsonl")):
        yield from ((file.parent, record) for record in read_run(file.parent).records)


def written(folder: Path, parts: Sequence[Part], state: dict[str, Ran], title: str) -> str:
    """Return the text of README.md."""
    if any(r.environment is not None and r.environment.device == "CPU" for _, r in records(folder)):
        counts = collections.Counter(f"{run.parent.name}: {r.outcome}" for run, r in records(folder))
        points = [f"- {what}, {count} points" for what, count in sorted(counts.items())]
        head = [f"# {title}", "", "Times of a CPU say nothing about performance, and are not shown.", ""]
        return "\n".join([*head, *ran(parts, state), "", *points, "", *failures(folder)])
    sections = {
        "What was run": ran(parts, state),
        "Bars": bars(folder),
        "Where DCP pays": pays(folder),
        "Decode": decode(folder),
        "Emulated against live": emulated(folder),
        "Served": served(folder),
        "Passes": passes(folder),
        "Injected hangs": logs(folder, "hangs"),
        "GPU tests": logs(folder, "tests", 25),
        "Not measured": failures(folder),
    }
    lines = [f"# {title}", "", installed(), machine(folder), ""]
    for name, found in sections.items():
        if found:
            lines += [f"## {name}", "", *found, ""]
    return "\n".join(lines)


def machine(folder: Path) -> str:
    """Return hardware and versions from the records."""
    said = sorted(
        {
            f"{e.device_count} × {e.device}, torch {e.torch}, Triton {e.triton}, CUDA {e.cuda}, NCCL {e.nccl}"
            for _, r in records(folder)
            if (e := r.environment) is not None
        }
    )
    return f"Measured on: {'; '.join(said)}." if said else "Nothing is measured yet."


def ran(parts: Sequence[Part], state: dict[str, Ran]) -> list[str]:
    """Return a line for each command."""
    lines = ["| part | command | estimate min | took min | |", "|---|---|---:|---:|---|"]
    for part in parts:
        for command in part.commands:
            of = state.get(f"{part.name}/{command.name}", Ran(what="not run"))
            note = f"{of.what}{f' (exit code {of.code})' if of.code else ''}{f': {of.note}' if of.note else ''}"
            lines.append(
                f"| {part.name} | `{command.said(of.device or '0')}` | {command.minutes:.1f} | {of.seconds / 60:.1f} | {note} |"
            )
    return lines


def told(record: Record) -> str:
    """Format a point without its load."""
    p = record.point
    exchange = "" if p.exchange == "none" else f" {p.exchange}"
    experts = f" {p.ep_label}" if p.ep_label else ""
    reduced = "" if p.all_reduce == ALL_REDUCES[0] else f" all-reduce {p.all_reduce}"
    return f"{p.model} {p.layout_name}{exchange}{experts}{reduced}, {p.weights_precision}/{p.kv_precision}"


def ok(folder: Path, part: str = "*", *, workload: str = "decode") -> list[Record]:
    """Return the measured points that are not forecasts."""
    return [
        r
        for _, r in records(folder, part)
        if r.outcome == "ok" and r.point.workload == workload and not r.point.emulate
    ]


def share(record: Record) -> float | None:
    """Return the share of the step time that is its floor; None without one."""
    if record.floor is None or record.metrics is None:
        return None
    return record.floor.floor_ms / record.metrics.step_ms.median


def bars(folder: Path) -> list[str]:
    """Return the two steps of 32 × 32,000 at tp2."""
    lines = []
    for r in ok(folder, "steps"):
        bar = STEP_BARS_MS.get((r.point.weights_precision, r.point.kv_precision))
        if bar is None or r.metrics is None:
            continue
        ms, of = r.metrics.step_ms.median, share(r)
        kept = ms <= bar and (r.point.weights_precision != "fp8" or (of is not None and of >= LEAST_FLOOR))
        of_floor = "no floor" if of is None else f"{of:.2f} of its floor"
        same = r.environment is not None and BAR_GPU in r.environment.device and r.point.concurrency == BAR_REQUESTS
        verdict = (
            ("held" if kept else "NOT held") if same else f"not judged, the bar is of {BAR_GPU} and {BAR_REQUESTS}"
        )
        load = f"{r.point.concurrency} × {r.point.context:,}"
        lines.append(f"- {told(r)}, {load}: {ms:.1f} ms (bar {bar:.0f}), {of_floor}: {verdict}")
    return lines


def decode(folder: Path) -> list[str]:
    """Return a line for each measured step."""
    rows = [
        f"| {told(r)} | {r.point.concurrency} × {r.point.context:,} | {r.metrics.step_ms.median:.2f} |"
        f" {r.metrics.output_tok_s.median:,.0f} | {'' if share(r) is None else f'{share(r):.2f}'} |"
        f" {', '.join(r.warnings)} |"
        for part in GRIDS
        for r in ok(folder, part)
        if r.metrics
    ]
    head = ["| point | load | step ms | tok/s | share of floor | marks |", "|---|---|---:|---:|---:|---|"]
    return head + rows if rows else []


def pays(folder: Path) -> list[str]:
    """Return the best layout with DCP over the best one without, by load."""
    best: dict[tuple[str, str, int, int], dict[bool, Record]] = collections.defaultdict(dict)
    for r in [r for part in LAYOUTS for r in ok(folder, part)]:
        p = r.point
        key = (p.model, f"{p.weights_precision}/{p.kv_precision}", p.context, p.concurrency)
        old = best[key].get(p.dcp > 1)
        if r.metrics and (old is None or old.metrics is None or _output(r) > _output(old)):
            best[key][p.dcp > 1] = r
    rows = []
    for (model, precision, context, concurrency), by_dcp in sorted(best.items()):
        ours, other = by_dcp.get(True), by_dcp.get(False)
        ratio = f"{_output(ours) / _output(other):.3f}" if ours and other else ""
        names = [
            f"{r.point.layout_name} {r.point.exchange}".removesuffix(" none") if r else "no room" for r in (ours, other)
        ]
        rows.append(f"| {model} {precision} | {concurrency} × {context:,} | {names[0]} | {names[1]} | {ratio} |")
    head = ["| | load | best with DCP | best without | output, with over without |", "|---|---|---|---|---:|"]
    return head + rows if rows else []


def _output(record: Record) -> float:
    assert record.metrics is not None
    return record.metrics.output_tok_s.median


def emulated(folder: Path) -> list[str]:
    """Return the steps as tools/emulation_live.py compares them."""
    forecasts = emulation_live.measured(sorted(folder.glob("emulated/*")))
    found = list(emulation_live.pairs([r for part in GRIDS for r in ok(folder, part)], forecasts))
    return emulation_live.table(found) if found else []


def numbers(record: Record) -> tuple[float | None, ...]:
    """Return the values of SERVED of a record."""
    assert record.serve is not None
    s = record.serve
    return s.output_tok_s, s.ttft_ms.p50, s.itl_ms.p50, s.ttft_ms.p99, s.itl_ms.p99


def served(folder: Path) -> list[str]:
    """Return all served loads; replays and emulated ones with their deviation from live."""
    lines = [f"| load | point | how | {' | '.join(SERVED)} | |", "|---|---|---|---:|---:|---:|---:|---:|---|"]
    of: dict[tuple[str, ...], dict[str, Record]] = collections.defaultdict(dict)
    for _, r in records(folder):
        if r.outcome == "ok" and r.serve is not None and r.point.load is not None:
            load = f"{r.point.load.requests} × {load_labels.format_shape(r.point.load)}"
            how = "emulated" if r.point.emulate else r.point.load.mode
            of[load, told(r), _arrival(r.point)][how] = r
    for (load, what, arrival), hows in of.items():
        live = hows.get("live")
        for how, r in sorted(hows.items(), key=lambda item: item[0] != "live"):
            mine = numbers(r)
            cells = ["" if n is None else f"{n:,.1f}" for n in mine]
            verdict = ""
            if live is not None and how != "live":
                off = [m / t - 1 if m is not None and t else None for m, t in zip(mine, numbers(live), strict=True)]
                cells = [c if o is None else f"{c} ({o:+.1%})" for c, o in zip(cells, off, strict=True)]
                verdict = _verdict(how, off)
            lines.append(f"| {load}, {arrival} | {what} | {how} | {' | '.join(cells)} | {verdict} |")
    return lines if of else []


def _arrival(point: Point) -> str:
    assert point.load is not None
    rate = point.load.request_rate
    return f"{point.concurrency} clients" if rate is None else f"{rate:g} requests/s"


def _verdict(how: str, off: Sequence[float | None]) -> str:
    tail = None if how == "emulated" else REPLAY_TAIL_BAR
    bar = EMULATED_BAR if how == "emulated" else REPLAY_BAR
    out = [
        name
        for name, o in zip(SERVED, off, strict=True)
        if o is not None and (limit := tail if name in TAILS else bar) is not None and abs(o) > limit
    ]
    return f"NOT within: {', '.join(out)}" if out else f"within {bar:.0%}"


def passes(folder: Path) -> list[str]:
    """Return two passes of the same loads."""
    of: dict[str, list[float]] = collections.defaultdict(list)
    for r in ok(folder, "again"):
        if r.metrics:
            of[f"{told(r)}, {r.point.concurrency} × {r.point.context:,}"].append(r.metrics.step_ms.median)
    return [
        f"- {what}: {', '.join(f'{ms:.2f}' for ms in times)} ms, apart by {max(times) / min(times) - 1:.1%}"
        for what, times in of.items()
        if len(times) > 1
    ]


def logs(folder: Path, part: str, most: int = 12) -> list[str]:
    """Return the last lines that a part's commands printed."""
    lines = []
    for log in sorted(folder.glob(f"{part}/*.log")):
        lines += [
            f"`{log.relative_to(folder)}`:",
            "",
            "```",
            *log.read_text(errors="replace").splitlines()[-most:],
            "```",
            "",
        ]
    return lines[:-1]


def failures(folder: Path) -> list[str]:
    """Return the points that failed, and those without memory."""
    return [
        f"- {run.parent.name}/{run.name}: {told(r)}, {r.point.concurrency} × {r.point.context:,}: {r.outcome}: {r.reason}"
        for run, r in records(folder)
        if r.outcome != "ok"
        and r.point.tp % (r.point.dp * r.point.dcp) == 0  # lists of dp and dcp have some that do not nest
    ]
