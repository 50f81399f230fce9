"""Format README.md of a run's folder from its records."""

from __future__ import annotations

import collections
import importlib.util
from typing import TYPE_CHECKING

from dcpbench.points.names import ALL_REDUCES
from dcpbench.records.runs import read_run
from dcpbench.reports import load_labels
from tools import emulation_live
from tools.multi_gpu.running import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dcpbench.points.point import Point
    from dcpbench.records.record import Record
    from tools.multi_gpu.parts import Part

BACKENDS = {"flashinfer": "flashinfer", "flashmla": "flash_mla", "DeepGEMM": "deep_gemm"}
MAX_STEP_MS = {
    ("bf16", "bf16"): 130.0,
    ("fp8", "fp8"): 80.0,
}  # maximum ms of 32 × 32,000 at tp2 on H200, by precision of weights and KV
LIMIT_GPU, LIMIT_REQUESTS = "H200", 32
MIN_FLOOR_SHARE = 0.75
MAX_EMULATED_ERROR = 0.07
MAX_REPLAY_ERROR, MAX_REPLAY_TAIL_ERROR = 0.05, 0.10
SERVED = ("output tok/s", "TTFT p50", "ITL p50", "TTFT p99", "ITL p99")
TAILS = SERVED[3:]
LAYOUTS = ("grid*", "bf16*", "more")
GRIDS = (*LAYOUTS, "experts", "reduce")


def format_installed() -> str:
    """Format which optional kernels are installed."""
    there = [name for name, module in BACKENDS.items() if importlib.util.find_spec(module)]
    missing = [name for name in BACKENDS if name not in there]
    without = f"; not installed: {', '.join(missing)}" if missing else ""
    return f"Attention and other optional kernels installed: {', '.join(there) or 'none, only Triton'}{without}."


def iter_records(folder: Path, part: str = "*") -> Iterator[tuple[Path, Record]]:
    """Yield the folder of the run and the record of each point."""
    for file in sorted(folder.glob(f"{part}/*/records.jsonl")):
        yield from ((file.parent, record) for record in read_run(file.parent).records)


def format_report(folder: Path, parts: Sequence[Part], state: dict[str, Outcome], title: str) -> str:
    """Format README.md."""
    if any(r.environment is not None and r.environment.device == "CPU" for _, r in iter_records(folder)):
        counts = collections.Counter(f"{run.parent.name}: {r.outcome}" for run, r in iter_records(folder))
        points = [f"- {what}, {count} points" for what, count in sorted(counts.items())]
        head = [f"# {title}", "", "Times of a CPU are no measure of performance, and are not shown.", ""]
        return "\n".join([*head, *format_commands(parts, state), "", *points, "", *format_failures(folder)])
    sections = {
        "What was run": format_commands(parts, state),
        "Limits of step times": format_step_limits(folder),
        "Gain of DCP": format_dcp_gains(folder),
        "Decode": format_decode(folder),
        "Emulated and live steps": format_emulated(folder),
        "Served": format_served(folder),
        "Passes": format_passes(folder),
        "Injected hangs": format_logs(folder, "hangs"),
        "GPU tests": format_logs(folder, "tests", 25),
        "Not measured": format_failures(folder),
    }
    lines = [f"# {title}", "", format_installed(), format_hardware(folder), ""]
    for name, found in sections.items():
        if found:
            lines += [f"## {name}", "", *found, ""]
    return "\n".join(lines)


def format_hardware(folder: Path) -> str:
    """Format hardware and versions from the records."""
    texts = sorted(
        {
            f"{e.device_count} × {e.device}, torch {e.torch}, Triton {e.triton}, CUDA {e.cuda}, NCCL {e.nccl}"
            for _, r in iter_records(folder)
            if (e := r.environment) is not None
        }
    )
    return f"Measured on: {'; '.join(texts)}." if texts else "Nothing is measured yet."


def format_commands(parts: Sequence[Part], state: dict[str, Outcome]) -> list[str]:
    """Format a table with a row for each command."""
    lines = ["| part | command | estimate min | took min | |", "|---|---|---:|---:|---|"]
    for part in parts:
        for command in part.commands:
            outcome = state.get(f"{part.name}/{command.name}", Outcome(what="not run"))
            note = f"{outcome.what}{f' (exit code {outcome.code})' if outcome.code else ''}{f': {outcome.note}' if outcome.note else ''}"
            lines.append(
                f"| {part.name} | `{command.format_command_line(outcome.device or '0')}` | {command.minutes:.1f} | {outcome.seconds / 60:.1f} | {note} |"
            )
    return lines


def format_point(record: Record) -> str:
    """Format a point without its load."""
    p = record.point
    exchange = "" if p.exchange == "none" else f" {p.exchange}"
    experts = f" {p.ep_label}" if p.ep_label else ""
    reduced = "" if p.all_reduce == ALL_REDUCES[0] else f" all-reduce {p.all_reduce}"
    return f"{p.model} {p.layout_name}{exchange}{experts}{reduced}, {p.weights_precision}/{p.kv_precision}"


def list_measured(folder: Path, part: str = "*", *, workload: str = "decode") -> list[Record]:
    """Return the successful records of a workload that are not emulated."""
    return [
        r
        for _, r in iter_records(folder, part)
        if r.outcome == "ok" and r.point.workload == workload and not r.point.emulate
    ]


def compute_floor_share(record: Record) -> float | None:
    """Return the floor over the step time; None without a floor."""
    if record.floor is None or record.metrics is None:
        return None
    return record.floor.floor_ms / record.metrics.step_ms.median


def format_step_limits(folder: Path) -> list[str]:
    """Format the steps of 32 × 32,000 with their limits."""
    lines = []
    for r in list_measured(folder, "steps"):
        limit_ms = MAX_STEP_MS.get((r.point.weights_precision, r.point.kv_precision))
        if limit_ms is None or r.metrics is None:
            continue
        ms, floor_share = r.metrics.step_ms.median, compute_floor_share(r)
        ok = ms <= limit_ms and (
            r.point.weights_precision != "fp8" or (floor_share is not None and floor_share >= MIN_FLOOR_SHARE)
        )
        floor_text = "no floor" if floor_share is None else f"{floor_share:.2f} of its floor"
        comparable = (
            r.environment is not None and LIMIT_GPU in r.environment.device and r.point.concurrency == LIMIT_REQUESTS
        )
        verdict = (
            ("held" if ok else "NOT held")
            if comparable
            else f"not judged, as the limit is for {LIMIT_GPU} and {LIMIT_REQUESTS} requests"
        )
        load = f"{r.point.concurrency} × {r.point.context:,}"
        lines.append(f"- {format_point(r)}, {load}: {ms:.1f} ms (limit {limit_ms:.0f}), {floor_text}: {verdict}")
    return lines


def format_decode(folder: Path) -> list[str]:
    """Format a table with a row for each measured step."""
    rows = [
        f"| {format_point(r)} | {r.point.concurrency} × {r.point.context:,} | {r.metrics.step_ms.median:.2f} |"
        f" {r.metrics.output_tok_s.median:,.0f} | {'' if compute_floor_share(r) is None else f'{compute_floor_share(r):.2f}'} |"
        f" {', '.join(r.warnings)} |"
        for part in GRIDS
        for r in list_measured(folder, part)
        if r.metrics
    ]
    head = ["| point | load | step ms | tok/s | share of floor | warnings |", "|---|---|---:|---:|---:|---|"]
    return head + rows if rows else []


def format_dcp_gains(folder: Path) -> list[str]:
    """Format a table of the best layouts with and without DCP by load, with the ratio of their output."""
    best: dict[tuple[str, str, int, int], dict[bool, Record]] = collections.defaultdict(dict)
    for r in [r for part in LAYOUTS for r in list_measured(folder, part)]:
        p = r.point
        key = (p.model, f"{p.weights_precision}/{p.kv_precision}", p.context, p.concurrency)
        old = best[key].get(p.dcp > 1)
        if r.metrics and (old is None or old.metrics is None or _get_tok_s(r) > _get_tok_s(old)):
            best[key][p.dcp > 1] = r
    rows = []
    for (model, precision, context, concurrency), by_dcp in sorted(best.items()):
        with_dcp, without = by_dcp.get(True), by_dcp.get(False)
        ratio = f"{_get_tok_s(with_dcp) / _get_tok_s(without):.3f}" if with_dcp and without else ""
        names = [
            f"{r.point.layout_name} {r.point.exchange}".removesuffix(" none") if r else "does not fit"
            for r in (with_dcp, without)
        ]
        rows.append(f"| {model} {precision} | {concurrency} × {context:,} | {names[0]} | {names[1]} | {ratio} |")
    head = ["| | load | best with DCP | best without | output, with over without |", "|---|---|---|---|---:|"]
    return head + rows if rows else []


def _get_tok_s(record: Record) -> float:
    assert record.metrics is not None
    return record.metrics.output_tok_s.median


def format_emulated(folder: Path) -> list[str]:
    """Format the comparison of emulated and live steps of tools/emulation_live.py."""
    forecasts = emulation_live.read_measured(sorted(folder.glob("emulated/*")))
    found = list(emulation_live.pair_points([r for part in GRIDS for r in list_measured(folder, part)], forecasts))
    return emulation_live.format_table(found) if found else []


def get_served_values(record: Record) -> tuple[float | None, ...]:
    """Return the values of the columns SERVED."""
    assert record.serve is not None
    s = record.serve
    return s.output_tok_s, s.ttft_ms.p50, s.itl_ms.p50, s.ttft_ms.p99, s.itl_ms.p99


def format_served(folder: Path) -> list[str]:
    """Format a table of served loads; replays and emulated loads have their deviations from the live load."""
    lines = [f"| load | point | mode | {' | '.join(SERVED)} | |", "|---|---|---|---:|---:|---:|---:|---:|---|"]
    by_load: dict[tuple[str, ...], dict[str, Record]] = collections.defaultdict(dict)
    for _, r in iter_records(folder):
        if r.outcome == "ok" and r.serve is not None and r.point.load is not None:
            load = f"{r.point.load.requests} × {load_labels.format_shape(r.point.load)}"
            mode = "emulated" if r.point.emulate else r.point.load.mode
            by_load[load, format_point(r), _format_arrival(r.point)][mode] = r
    for (load, what, arrival), by_mode in by_load.items():
        live = by_mode.get("live")
        for mode, r in sorted(by_mode.items(), key=lambda item: item[0] != "live"):
            values = get_served_values(r)
            cells = ["" if n is None else f"{n:,.1f}" for n in values]
            verdict = ""
            if live is not None and mode != "live":
                errors = [
                    m / t - 1 if m is not None and t else None
                    for m, t in zip(values, get_served_values(live), strict=True)
                ]
                cells = [c if error is None else f"{c} ({error:+.1%})" for c, error in zip(cells, errors, strict=True)]
                verdict = _format_verdict(mode, errors)
            lines.append(f"| {load}, {arrival} | {what} | {mode} | {' | '.join(cells)} | {verdict} |")
    return lines if by_load else []


def _format_arrival(point: Point) -> str:
    assert point.load is not None
    rate = point.load.request_rate
    return f"{point.concurrency} clients" if rate is None else f"{rate:g} requests/s"


def _format_verdict(mode: str, errors: Sequence[float | None]) -> str:
    tail_limit = None if mode == "emulated" else MAX_REPLAY_TAIL_ERROR
    limit = MAX_EMULATED_ERROR if mode == "emulated" else MAX_REPLAY_ERROR
    beyond = [
        name
        for name, error in zip(SERVED, errors, strict=True)
        if error is not None
        and (allowed := tail_limit if name in TAILS else limit) is not None
        and abs(error) > allowed
    ]
    return f"NOT within: {', '.join(beyond)}" if beyond else f"within {limit:.0%}"


def format_passes(folder: Path) -> list[str]:
    """Format the step times of points that were measured in several passes."""
    by_point: dict[str, list[float]] = collections.defaultdict(list)
    for r in list_measured(folder, "again"):
        if r.metrics:
            by_point[f"{format_point(r)}, {r.point.concurrency} × {r.point.context:,}"].append(r.metrics.step_ms.median)
    return [
        f"- {name}: {', '.join(f'{ms:.2f}' for ms in times)} ms, differ by {max(times) / min(times) - 1:.1%}"
        for name, times in by_point.items()
        if len(times) > 1
    ]


def format_logs(folder: Path, part: str, max_lines: int = 12) -> list[str]:
    """Return the last lines of each log of a part."""
    lines = []
    for log in sorted(folder.glob(f"{part}/*.log")):
        lines += [
            f"`{log.relative_to(folder)}`:",
            "",
            "```",
            *log.read_text(errors="replace").splitlines()[-max_lines:],
            "```",
            "",
        ]
    return lines[:-1]


def format_failures(folder: Path) -> list[str]:
    """Format a line for each point that failed or was rejected."""
    return [
        f"- {run.parent.name}/{run.name}: {format_point(r)}, {r.point.concurrency} × {r.point.context:,}: {r.outcome}: {r.reason}"
        for run, r in iter_records(folder)
        if r.outcome != "ok"
        and r.point.tp % (r.point.dp * r.point.dcp) == 0  # without combinations of --dp and --dcp that are no layout
    ]
