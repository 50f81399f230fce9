"""What commands say of records that never change, whole and word for word, as tests/data/said/ has it.

    python -m pytest tests/unit/test_whole_outputs.py -n 0         # where it differs, the difference is shown

Other tests say why each part is as it is; these hold that none changes unnoticed. With SAID=write in the environment the
files are written anew: what then differs is for a reviewer to read, line by line.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import random
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from matplotlib.text import Text
from rich.console import Console

from dcpbench import cli
from dcpbench.commands import doctor as doctor_command
from dcpbench.dashboard import data as dashboard_data
from dcpbench.dashboard import finding
from dcpbench.errors import UsageError
from dcpbench.exports import FORMATS as EXPORTS
from dcpbench.hangs import beats
from dcpbench.hangs.evidence import Device, ProcessState
from dcpbench.launch.processes import COMMAND, NONE, WORKERS
from dcpbench.points.floors import Sharding, StepRows, Work, iter_phase_works
from dcpbench.points.layout import Layout, list_valid_layouts
from dcpbench.points.machines import load_machine
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.points.shapes import SHAPES
from dcpbench.recommend import answer, estimate
from dcpbench.recommend.advise import Choice
from dcpbench.recommend.estimate import load_published_steps
from dcpbench.recommend.forecast import EMULATED, ESTIMATED, MEASURED, REPLAYED, Estimator
from dcpbench.records.record import Interval, Latencies, Percentiles
from dcpbench.reports import answer as answer_of_report
from dcpbench.reports import export, frames, markdown, overview, plots, sections
from dcpbench.reports import terminal as report_terminal
from dcpbench.reports.page.points import build_page_data
from dcpbench.servers import agreement
from dcpbench.servers.agreement_text import format_verdict, make_table
from dcpbench.servers.conditions import CacheUse
from dcpbench.servers.presets import PRESETS, Engine, format_command
from dcpbench.serving.loads import make_requests
from dcpbench.serving.samples import read_samples
from dcpbench.serving.step_cases import Extent, make_cases
from dcpbench.serving.step_times import get_engine_path, write_step_times
from dcpbench.show import terminal
from dcpbench.show.layouts import find_marker_index, get_colours
from dcpbench.syncs.formats import FORMATS as SYNCS
from dcpbench.syncs.formats import render_report
from dcpbench.syncs.gating.config import Allow
from dcpbench.syncs.gating.gate import Gate
from dcpbench.syncs.gating.gate import compute_verdict as judge_syncs
from dcpbench.syncs.scan import scan_traces
from dcpbench.top import words as top_words
from dcpbench.top.facts import Facts
from dcpbench.top.render import render_state as top_render
from tests.servers import test_agreement as agreeing
from tests.unit import (
    compare_builder,
    dashboard_builder,
    engine_files_builder,
    record_builder,
    serve_record_builder,
    step_times_builder,
    syncs_builder,
    top_builder,
)
from tests.unit import test_recommend as advised
from tests.unit import test_replay_point as replayed
from tests.unit.test_doctor import GPU_FAULTS, System, looked, versions  # noqa: F401 -- a fixture
from tests.unit.test_hangs import HALF, X, merges, recorded
from tests.unit.test_hangs import Job as Beating
from tests.unit.test_reports_floors import FAR, NEAR
from tests.unit.test_reports_instances import RATE
from tests.unit.test_reports_instances import served as split
from tests.unit.test_reports_marks import LOWERED
from tests.unit.test_reports_marks import ok as marked
from tests.unit.test_reports_stalls import served as stalling
from tests.unit.test_top_shown import GPU
from tests.unit.trace_builder import HOST, PAGEABLE, PINNED, TO_GPU, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.figure import Figure

    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
SAID = ROOT / "tests" / "data" / "said"
TP, DCP, DP = Layout(4), Layout(4, 1, 4), Layout(4, 4)


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Types a command in a folder of its own; what it printed, and how it ended where that was not well.

    No time passes for what says now and then how far it is.
    """
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=float))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        out, err = capsys.readouterr()
        return f"$ dcpbench {' '.join(words)}\n{out}{err}{f'exit code {end.value.code}' if end.value.code else ''}\n"

    return run


def hold(name: str, text: str, tmp_path: Path) -> None:
    """That a text is the one that is kept, but for where it lies, and lines of tests."""
    text = re.sub(
        r"(tests/\w+/\w+\.py):\d+", r"\1:LINE", text.replace(str(tmp_path), "FOLDER").replace(str(ROOT), "ROOT")
    )
    text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")).rstrip() + "\n"
    path = SAID / name
    if os.environ.get("SAID") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text.split("\n") == path.read_text().split("\n")


def decoded() -> list[Record]:
    """Two models, three layouts, two contexts, two loads; one repeated, one that lacks memory, one that failed."""
    found = [
        record_builder.ok(
            record_builder.point(layout, model=model, context=context, concurrency=load),
            median_ms=slower * record_builder.step_ms(layout, context, load),
            steps=64,
        )
        for model, slower in (("kimi-k2", 1.0), ("deepseek-v3", 1.13))
        for context in (4_000, 128_000)
        for load in (8, 48)
        for layout in (TP, DCP, DP)
        if (layout, context, load) != (TP, 128_000, 48)
    ]
    again = record_builder.point(TP, model="kimi-k2", context=4_000, concurrency=8, repeat=1)
    found.append(record_builder.ok(again, median_ms=1.05 * record_builder.step_ms(TP, 4_000, 8), steps=64))
    found.append(record_builder.rejected(record_builder.point(TP, context=128_000, concurrency=48)))
    found.append(record_builder.failed(record_builder.point(TP, model="deepseek-v3", context=128_000, concurrency=48)))
    return found


RUNS: dict[str, Callable[[], list[Record]]] = {
    "decode": decoded,
    "serve": lambda: serve_record_builder.run()[::2],
    "cpu": record_builder.cpu_sweep,
    "instances": lambda: [
        split("1:1", 30, busy={"prefill": 0.2, "decode": 0.95}, **RATE),
        split("1:2", 28, **RATE),
        split("2", 25, itl=80),
        split("1:1", 30, 32, **RATE),
        split("1:2", 40, 32, busy={"prefill": 0.97, "decode": 0.5}, **RATE),
        split("3", 31, 32),
        split("", 20),
    ],
    "stalls": lambda: [
        stalling((70, 480), 120, chunk=8192),
        stalling((80, 130), 100, chunk=1024),
        stalling((80, 180), 90, chunk=1024, layout=DCP),
        stalling((60, 140), 95, chunk=2048, layout=DP, preemptions=3),
    ],
    "floors": lambda: [
        FAR,
        NEAR,
        marked(TP, "throttled", gpu=LOWERED, concurrency=32),
        marked(DCP, "throttled", "noisy", "drift", gpu=LOWERED, concurrency=32),
        marked(DCP, concurrency=48),
    ],
}
"""The last three with what few runs have: instances apart, chunks that stall decodes, floors, and marks."""


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("slo", [False, True], ids=["", "slo"])
def test_a_report(name: str, slo: bool, tmp_path: Path) -> None:
    """Its Markdown, which has all of the page's words, without pictures; and the table of all points."""
    folder = record_builder.write(tmp_path / "run", RUNS[name]())
    read = frames.load_frames([folder], slo={"ttft": 2000.0, "itl": 45.0} if slo else None)
    text = markdown.render("title", sections.build_sections(read, []), tmp_path)
    export.write_csv(read, tmp_path / "points.csv")
    hold(f"report-{name}{'-slo' if slo else ''}.md", f"{text}\n{(tmp_path / 'points.csv').read_text()}", tmp_path)


def small_run(rng: random.Random) -> list[Record]:
    """A few points that are near each other: layouts, lengths and loads of which some are missing, level, or did not run."""
    models = rng.choice([["kimi-k2"], ["kimi-k2", "deepseek-v3"]])
    lengths = rng.choice([[4_000], [4_000, 32_000], [1_000, 4_000, 16_000, 64_000]])
    loads = rng.choice([[8], [8, 16], [4, 8, 24, 64]])
    layouts = rng.sample(
        [TP, Layout(4, 1, 2), DCP, DP, Layout(4, 2, 2), Layout(8), Layout(8, 1, 8)], rng.choice([1, 2, 3, 3, 4])
    )
    missing = rng.choice([0.0, 0.0, 0.2])
    grows = rng.choice([0.0, 0.002, 0.01])
    found = []
    for model, length, load, layout in itertools.product(models, lengths, loads, layouts):
        of = record_builder.point(
            layout,
            model=model,
            context=length,
            concurrency=load,
            exchange=rng.choice(["ag_rs", "ag_rs", "a2a"]) if layout.dcp > 1 else "none",
            emulate=rng.choice(["", "", "", "", "H200"]) if grows else "",
        )
        if rng.random() < missing:
            found.append(rng.choice([record_builder.rejected, record_builder.failed, record_builder.rejected])(of))
            continue
        rate = load * (100.0 + grows * load * layout.dcp + rng.choice([0, 0, 2, 2.5, 5, 20])) * layout.tp / 4
        spread = rng.choice([0.0, 0.005, 0.02])
        record = small_record(of, rate, spread, held=rng.choice([19, 19, 61]) if grows else 61)
        found.append(record)
        if rng.random() < 0.1:
            found.append(
                small_record(msgspec.structs.replace(of, repeat=1), rate * rng.choice([1.0, 1.02, 1.1]), spread)
            )
    return found


SMALL = record_builder.ok(record_builder.point(TP), steps=8)


def small_record(of: Point, rate: float, spread: float, *, held: int = 61) -> Record:
    """A point with this rate of output tokens, give or take, and what follows from it."""
    assert SMALL.metrics is not None
    assert SMALL.honesty is not None
    ms = of.concurrency / rate * 1e3
    metrics = msgspec.structs.replace(
        SMALL.metrics,
        step_ms=Interval(median=ms, low=ms * (1 - spread), high=ms * (1 + spread), samples=100),
        itl_ms=Percentiles(p50=ms, p90=ms * 1.1, p95=ms * 1.2, p99=ms * 1.5, samples=100),
        output_tok_s=Interval(median=rate, low=rate * (1 - spread), high=rate * (1 + spread), samples=100),
        output_tok_s_per_gpu=rate / of.tp,
        tok_s_per_user=rate / of.concurrency,
        step_samples_ms=[],
    )
    honesty = msgspec.structs.replace(SMALL.honesty, layers_held=held)
    return msgspec.structs.replace(SMALL, point=of, metrics=metrics, honesty=honesty)


def small_served(rng: random.Random) -> list[Record]:
    """The same of served requests: closed loops and open ones, live and replayed, short of KV or not, of other origins."""
    open_loop = rng.random() < 0.3
    loads = rng.choice([[8], [8, 32], [8, 24, 64]])
    lengths = rng.choice([["400"], ["400", "1600"], ["uniform:100-400"]])
    layouts = rng.sample([TP, DCP, DP, Layout(4, 1, 2), Layout(8)], rng.choice([1, 2, 3]))
    modes = rng.choice([["live"], ["replay"], ["live", "replay"]])
    missing = rng.choice([0.0, 0.0, 0.2])
    found = []
    for length, load, layout, mode in itertools.product(lengths, loads, layouts, modes):
        arrives = {"arrival": "gamma", "request_rate": load / 4, "paced": True} if open_loop else {}
        of = serve_record_builder.point(
            layout,
            load,
            {"input_tokens": length, "mode": mode, **arrives},
            exchange="ag_rs" if layout.dcp > 1 else "none",
        )
        if rng.random() < missing:
            found.append(rng.choice([record_builder.rejected, record_builder.failed])(of))
            continue
        rate = load * (50.0 + rng.choice([0, 0, 1, 1.25, 5, 20])) * layout.tp / 4
        preempted = rng.choice([0, 0, 0, 1, 40])
        serve = msgspec.structs.replace(
            SERVED.serve,
            output_tok_s=rate,
            output_tok_s_per_gpu=rate / of.tp,
            tok_s_per_user=rate / load,
            ttft_ms=latencies(rng.choice([800.0, 1900.0, 2000.0, 2000.5, 4000.0])),
            itl_ms=latencies(load / rate * 1e3),
            steady_tok_s=rng.choice([None, rate * 1.1]),
            preemptions=preempted,
            decode_batch=load * rng.choice([0.5, 0.9, 0.95]),
        )
        environment = record_builder.CPU if rng.random() < 0.05 else record_builder.GPU
        marks = (
            ["cpu", "noisy"] if environment is record_builder.CPU else rng.choice([[], [], ["noisy"], ["kv_pressure"]])
        )
        found.append(msgspec.structs.replace(SERVED, point=of, serve=serve, environment=environment, marks=marks))
        if rng.random() < 0.1:
            again = msgspec.structs.replace(of, repeat=1)
            found.append(
                msgspec.structs.replace(
                    SERVED, point=again, serve=msgspec.structs.replace(serve, output_tok_s=rate * 1.02)
                )
            )
    return found


SERVED = serve_record_builder.served(serve_record_builder.point(TP, 8))


def latencies(median: float) -> Latencies:
    """Of so many ms, and more in the tail."""
    return Latencies(mean=median * 1.1, p50=median, p90=median * 1.2, p95=median * 1.3, p99=median * 1.5, samples=200)


def answered(folder: Path, slo: dict[str, float] | None = None) -> list[str]:
    """All that a report says in sentences, without its tables."""
    read = frames.load_frames([folder], slo=slo)
    first, more = answer_of_report.split_sentences(read)
    noted = [
        overview.format_title(read),
        *overview.list_caveats(read),
        "",
        overview.format_answer(read),
        *overview.format_bullets(read),
        "",
        *first,
        "",
        *more,
    ]
    return [*noted, "", json.dumps(rounded(overview_words(read)), ensure_ascii=False)]


def overview_words(read: frames.Frames) -> list[Any]:
    """The tables that answers rest on, in short."""
    found = read.findings
    columns = (
        "label",
        "load",
        "rival",
        "ratio",
        "verdict",
        "near",
        "from",
        "best",
        "ever",
        "least",
        "next",
        "lead",
        "clear",
        "meets",
    )
    tables = (found.against_best, found.against_others, found.break_even, found.best, found.most)
    return [
        [
            " ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row)
            for row in t[[c for c in columns if c in t]].values.tolist()
        ]
        for t in tables
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("made", [small_run, small_served], ids=["decode", "serve"])
def test_answers_about_small_runs(made: Callable[[random.Random], list[Record]], seed: int, tmp_path: Path) -> None:
    """Made at random, so that they meet in many ways; half of them with an SLO that some points miss."""
    folder = record_builder.write(tmp_path / "run", made(random.Random(seed)))
    limits = {"itl": 14.8} if made is small_run else {"ttft": 2000.0, "itl": 29.5}
    slo = limits if seed % 2 else None
    hold(f"answers/{made.__name__}-{seed:02}.txt", "\n".join(answered(folder, slo)), tmp_path)


@pytest.mark.parametrize("name", ["cpu", "instances", "stalls", "floors"])
def test_what_the_scripts_of_a_page_read(name: str, tmp_path: Path) -> None:
    """Columns that say anything, each with how many values it has and what they are; looks of series; names of everything."""
    read = frames.load_frames([record_builder.write(tmp_path / "run", RUNS[name]())])
    told = rounded(build_page_data(read))
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in told.items() if key != "columns"]
    for key, values in told["columns"].items():
        if any(value is not None for value in values):
            lines.append(f"{key} = {' | '.join(json.dumps(value, ensure_ascii=False) for value in values)}")
    hold(f"page-{name}.txt", "\n".join(lines), tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_printed_of_a_run(
    name: str, tmp_path: Path, typed: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On terminals of several widths."""
    record_builder.write(tmp_path / "run", RUNS[name]())
    said = []
    for width in (160, 100, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        said.append(typed("show", "run"))
    hold(f"show-{name}.txt", "\n".join(said), tmp_path)


@pytest.mark.parametrize("form", [form for form in EXPORTS if form != "parquet"])
def test_an_export(form: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    """Of a decode point, a served one and a failed one."""
    found = [decoded()[0], serve_record_builder.run()[0], decoded()[-1]]
    record_builder.write(tmp_path / "run", found)
    text = typed("export", "run", "--to", form, "-o", "out")
    for path in sorted(p for p in (tmp_path / "out").rglob("*") if p.is_file()) or [tmp_path / "out"]:
        text += f"\n--- {path.relative_to(tmp_path)}\n{path.read_text()}"
    hold(f"export-{form}.txt", text, tmp_path)


@pytest.mark.parametrize("form", SYNCS)
def test_a_judged_trace(form: str, tmp_path: Path) -> None:
    """Sites of every standing, of which one is allowed."""
    report = syncs_builder.all_kinds()
    allowed = (Allow(function="sample", reason="tokens leave the GPU here", source="allow[0]"),)
    report.verdict = judge_syncs(report, Gate(root=ROOT, allow=allowed))
    hold(f"syncs-{form}.txt", render_report(report, form, root=ROOT), tmp_path)


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_comparison(rounds: int, tmp_path: Path, typed: Callable[..., str]) -> None:
    """B is 4 % faster by launches that scatter by 1 %; two rules are asked."""
    compare_builder.write_launches(tmp_path / "a", rounds, seed=1, cv=0.01)
    compare_builder.write_launches(tmp_path / "b", rounds, seed=2, cv=0.01, faster=1.04)
    words = ("--fail-on", "slower:2%,memory:0.1%", "--junit", "junit.xml", "--paired")
    text = typed("compare", "a", "b", *words, "--all", "-o", "out")
    for name in ("out/compare.md", "out/compare.json", "junit.xml"):
        text += f"\n--- {name}\n{(tmp_path / name).read_text()}"
    hold(f"compare-{rounds}.txt", text, tmp_path)


def test_runs_over_time(tmp_path: Path) -> None:
    """The data of a site of 12 runs over two points, of which the first becomes slower."""
    runs = dashboard_builder.history(tmp_path / "runs", runs=12, count=2, step_at=7, cv=0.002)
    found = finding.load_runs(runs, {}, lambda _: None)
    files = dashboard_data.build_content(found, lambda _: None).add_index([], [], found.skipped)
    hold("dashboard.txt", "\n".join(f"--- {name}\n{text}" for name, text in sorted(files.files.items())), tmp_path)


def test_runs_over_time_that_differ(tmp_path: Path) -> None:
    """Fourteen runs over four points: machines, drivers and versions change; points come late, fail, are on a CPU, become better and worse."""
    rng = random.Random(3)
    four = dashboard_builder.points(4)
    one_served = serve_record_builder.point()
    for run in range(14):
        found = []
        for i, of in enumerate(four):
            fate = rng.random()
            if (i == 3 and run < 2) or fate < 0.05:
                continue
            faster = (0.94 if i == 0 and run >= 5 else 1.05 if i == 1 and run >= 4 else 1.0) * rng.gauss(1, 0.001)
            env = dashboard_builder.environment(
                run,
                driver="580" if i == 3 and run > 6 else "570.1",
                device="CPU" if i == 2 and run % 2 else "NVIDIA H200",
            )
            if fate > 0.9:
                found.append(record_builder.failed(of) if fate > 0.95 else record_builder.rejected(of))
            else:
                marks = ["cpu"] if env.device == "CPU" else ["noisy"] * (run == 3)
                found.append(dashboard_builder.record(of, run, faster=faster, environment=env, marks=marks))
        if run % 3 == 0:
            found.append(serve_record_builder.served(one_served, started_at=f"2026-01-{run + 5:02}T08:00:00+02:00"))
        record_builder.write(tmp_path / "runs" / f"week {run // 5}" / f"run-{run}", found)
    record_builder.write(tmp_path / "runs" / "none", [])
    again = record_builder.write(tmp_path / "runs" / "z", [dashboard_builder.record(four[0], 4, started_at="no date")])
    record_builder.write(tmp_path / "runs" / "zz", [])
    (tmp_path / "runs" / "zz" / "records.jsonl").write_bytes((again / "records.jsonl").read_bytes())
    runs = finding.load_runs(tmp_path / "runs", {}, lambda _: None)
    told: list[str] = []
    content = dashboard_data.build_content(runs, told.append)
    files = content.add_index([runs.runs[0].slug], [runs.runs[1].slug], runs.skipped)
    about = [f"{r.name} {r.slug} {r.date} {r.headline}" for r in runs.runs]
    counts = f"{files.lines} lines, {files.entries} entries, {files.changes} changes, {files.first.partition('-')[0]}"
    each = [f"--- {name}\n{text}" for name, text in sorted(files.files.items())]
    hold("dashboard-differing.txt", "\n".join([*about, *runs.skipped, counts, *told[:2], *each]), tmp_path)


@pytest.mark.parametrize("width", [80, 140])
def test_a_run_that_is_watched(width: int, tmp_path: Path) -> None:
    """20 of 30 points have ended, one of them failed; one is at work."""
    points = [top_builder.point(context) for context in range(100, 130)]
    job = top_builder.job(tmp_path, points)
    for i, of in enumerate(points[:19]):
        top_builder.done(job, tmp_path, of, 10 * i, 10 * i + 9 + i % 3)
    top_builder.record(tmp_path, points[19], start=192, outcome="failed", reason="rank 1: ValueError: no such row")
    top_builder.tell(job, 203, "measure", points[20], "3/9 requests, 1,200 tok/s")
    state = msgspec.structs.replace(top_builder.state(tmp_path, 205), gpus=[GPU], folder="runs/monday")
    out = io.StringIO()
    Console(file=out, width=width).print(top_render(state, width, 60))
    said = "\n".join([*top_words.format_snapshot(state), *top_words.format_changes(None, state)])
    told = msgspec.json.format(msgspec.json.encode(state)).decode()
    hold(f"top-{width}.txt", f"{out.getvalue()}\n{said}\n{told}", tmp_path)


def measured(folder: Path) -> None:
    """Two jobs of tp 2 and tp 4: three points ended, of which one failed; one is at work since 40 s; one was rejected."""
    points = [top_builder.point(context) for context in (100, 200, 300)]
    wide = [top_builder.point(context, tp=4) for context in (100, 200)]
    first = top_builder.job(folder, points, pool=[*points, *wide])
    top_builder.record(folder, top_builder.point(999), start=0, seconds=0, outcome="rejected", reason="too long")
    top_builder.tell(first, 1, "build")
    top_builder.done(first, folder, points[0], 2, 10)
    top_builder.done(first, folder, points[1], 10, 21)
    top_builder.record(folder, points[2], start=21, seconds=8, outcome="failed", reason="rank 1: ValueError: no row")
    top_builder.tell(first, 29, "done", points[2])
    top_builder.tell(first, 30, "end")
    second = top_builder.job(folder, wide, pool=[*points, *wide], tag="tp4-0", at=33)
    top_builder.tell(second, 40, "measure", wide[0], "1/9 requests")
    top_builder.tell(second, 41, "measure", wide[0])


def verified(folder: Path) -> None:
    """Two layouts checked, of which the second is at work."""
    points = [top_builder.point(100), top_builder.point(200)]
    job = top_builder.job(folder, points, kind="verify", pool=[])
    top_builder.tell(job, 3, "done", points[0])
    top_builder.tell(job, 41, "check", points[1])


def resumed(folder: Path) -> None:
    """One measured and one lost at first; 20 s later the second command has measured another one."""
    points = [top_builder.point(context) for context in (100, 200, 300)]
    first = top_builder.job(folder, points)
    top_builder.done(first, folder, points[0], 0, 5)
    top_builder.record(folder, points[1], start=5, seconds=3, outcome="failed")
    second = top_builder.job(folder, points[1:], pool=points, tag="tp2-1", at=20, command="dcpbench sweep --resume")
    top_builder.done(second, folder, points[1], 22, 41)


def replayed_here(folder: Path) -> None:
    """No job; two points ended, of which one was spared as it would fail, too."""
    top_builder.record(folder, top_builder.point(100), start=0, seconds=41)
    top_builder.record(folder, top_builder.point(200), start=41, seconds=0, outcome="failed", reason="as before")


def not_begun(folder: Path) -> None:
    """A job file, and no event."""
    top_builder.job(folder, [top_builder.point(100)], at=41, device="cpu", command="dcpbench sweep --timeout=30")


def finished(folder: Path) -> None:
    """One point, which failed, and a rank that said why."""
    job = top_builder.job(folder, [top_builder.point(100)])
    top_builder.record(folder, job.points[0], start=1, seconds=40, outcome="failed", reason="rank 0: OSError: none")
    top_builder.tell(job, 41, "end")


@pytest.mark.parametrize("story", [measured, verified, resumed, replayed_here, not_begun, finished])
def test_a_run_at_any_moment(story: Callable[[Path], None], tmp_path: Path) -> None:
    """Its last sign of life was at 41 s. As its command or its workers live or nobody does; as it was seen before, or not."""
    story(tmp_path)
    facts = Facts(tmp_path)
    lines: dict[str, list[str]] = {}
    for alive, began, here, at in itertools.product(
        (COMMAND, WORKERS, NONE), (None, 0, 22, 23), (False, True), (41, 101, 101.5)
    ):
        state = top_builder.state(facts, at, alive=alive, began=began, known_here=here)
        told = msgspec.to_builtins(msgspec.structs.replace(state, folder="run", at=0.0))
        said = {k: v for k, v in rounded(told).items() if v not in (None, "", [], {}) and k != "last"}
        text = "\n".join(
            [json.dumps(said, ensure_ascii=False), *(f"  {line}" for line in top_words.format_snapshot(state))]
        )
        when = f"{alive or 'nobody'} of {began} at {at}{' seen here' if here else ''}"
        lines.setdefault(text.replace(str(tmp_path), "run"), []).append(when)
    last = [json.dumps(msgspec.to_builtins(point)) for point in facts.last]
    hold(
        f"top-{story.__name__}.txt",
        "\n".join([*last, *(f"--- {', '.join(whens)}\n{text}" for text, whens in lines.items())]),
        tmp_path,
    )


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_watched_run_on_terminals_of_all_sizes(count: int, tmp_path: Path) -> None:
    """With so many GPUs: which columns and points there is room for."""
    measured(tmp_path / "run")
    gpus = [
        msgspec.structs.replace(GPU, index=n, **({"power_w": None, "name": ""} if n == 1 else {})) for n in range(count)
    ]
    state = msgspec.structs.replace(top_builder.state(tmp_path / "run", 45), gpus=gpus, folder="run")
    last = [msgspec.structs.replace(state.last[0], point=f"p{n}", ttft_ms=n * 10.0 or None) for n in range(30)]
    state = msgspec.structs.replace(state, last=last, unread={"records.jsonl": 2})
    lines = []
    for width, height in ((49, 12), (50, 14), (59, 16), (60, 18), (61, 20), (69, 25), (70, 30), (71, 33), (90, 60)):
        out = io.StringIO()
        Console(file=out, width=width).print(top_render(state, width, height))
        lines.append(f"--- {width} × {height}\n{out.getvalue()}")
    hold(f"top-sizes-{count}.txt", "\n".join(lines), tmp_path)


PLANS = {
    "sweep": "sweep --gpu H200 --gpus 8 --tp 4,8 --dcp 1,4,8 --dp 1,8 --context 4000,128000 --concurrency 8,64 --model deepseek-v3",
    "sweep-fp8": "sweep --gpu B200 --gpus 8 --tp 8 --dcp 1,8 --dtype fp8 --context 32000 --concurrency 32 --model kimi-k2",
    "serve": "serve --gpu H200 --gpus 8 --tp 8 --dcp 8 --concurrency 8,64 --slo ttft=5000,itl=60",
    "hosts": "sweep --gpu H100 --gpus 8 --nnodes 2 --rdzv-endpoint 10.0.0.1:29500 --tp 8,16 --dp 1,2 --dcp 1,2 --context 8000,1000000 "
    "--concurrency 4,256 --model deepseek-v2,kimi-k2",
    "ways": "sweep --gpu H200 --gpus 4 --tp 4 --dcp 1,4 --exchange ag_rs,a2a,symm --backend triton,flashinfer,reference --kv-dtype bf16,fp8 "
    "--context 4000 --concurrency 8",
    "open": "serve --gpu H200 --gpus 8 --tp 4 --dp 1,4 --request-rate 0.5,2 --burstiness 0.25 --input-tokens uniform:100-9000 "
    "--output-tokens lognormal:300:0.8 --num-requests 50 --prefix-share 0.3 --prefix-groups 4 --chunk 1024,8192",
    "apart": "serve --gpu H200 --gpus 8 --tp 2 --dcp 2 --mode replay --disaggregate 1:2,3 --transfer-gb-s 50 --concurrency 16 --turns 3 "
    "--turn-tokens 200 --think-time 2 --input-tokens 4000 --output-tokens 100 --model deepseek-v2",
    "cpu": "sweep --device cpu --model tiny",
    "cpu-serve": "serve --device cpu --model tiny",
    "gpu-serve": "serve --gpu B200 --gpus 8",
    "gpu-sweep": "sweep --gpu B200 --gpus 8",
    "emulated": "sweep --emulate H200 --gpu H200 --gpus 1 --tp 8 --dcp 1,8 --exchange a2a --context 32000 --concurrency 16 --model deepseek-v2",
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan(name: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    hold(f"plan-{name}.txt", typed(*PLANS[name].split(), "--dry-run"), tmp_path)


ADVICE = {
    "decode": "recommend --machine H200 --gpus 8 --model deepseek-v3 --concurrency 8 --context 4000,128000",
    "price": "recommend --machine B200 --gpus 8 --model kimi-k2 --concurrency 32 --context 32000 --price 4",
    "hosts": "recommend --machine H200+rdma-400 --gpus 8,16 --model deepseek-v3 --concurrency 8,256 --context 128000 --weights-dtype fp8",
    "fp8": "recommend --machine H200 --gpus 8 --model deepseek-v3 --concurrency 64 --context 32000 --kv-dtype fp8",
    "tight": "recommend --machine H100 --gpus 4 --model kimi-k2 --concurrency 8 --context 4000",
    "slo": "recommend --machine H200 --gpus 4 --model deepseek-v2 --request-rate 0.5,2 --input-tokens 2000 --output-tokens 30 --num-requests 24 "
    "--slo ttft=400,itl=20 --price 2.5",
    "serve": "recommend --machine H200 --gpus 4 --model deepseek-v2 --concurrency 16 --input-tokens 1000 --output-tokens 50",
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_recommendation(name: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    hold(f"recommend-{name}.txt", typed(*ADVICE[name].split()), tmp_path)


def test_estimates_of_steps(tmp_path: Path) -> None:
    """µs of each part of a step and of calls between ranks, what they may be off by, and the whole: padded rows, chunks, hosts."""
    lines = []
    fitted = load_published_steps().terms
    chunked = StepRows(decodes=(4000,) * 3, chunks=((512, 1000),), sampled=4, tokens=515)
    ways = (
        *({"tp": tp, "exchange": "none"} for tp in (1, 4, 8, 16)),
        *({"tp": 8, "dcp": 8, "exchange": exchange} for exchange in ("a2a", "ag_rs")),
        {"tp": 4, "dcp": 2, "exchange": "a2a", "kv_dtype": "fp8", "weights_dtype": "fp8"},
        {"tp": 8, "dp": 8, "ep": "tp"},
        {"tp": 8, "dp": 2, "dcp": 4, "ep": "tp", "exchange": "a2a"},
        {"tp": 16, "dp": 16, "ep": "tp"},
        {"tp": 16, "dp": 4, "ep": "tp"},
    )
    for machine, model in (("H200", "deepseek-v3"), ("H200+rdma-400", "kimi-k2"), ("B200", "deepseek-v2")):
        for of in ways:
            one = advised.point(**{"model": model, **of})
            lines.append(f"{machine} {model} {one.layout} {one.exchange} {one.weights_precision}")
            try:
                estimator = Estimator(one, load_machine(machine), fitted)
                for rows in (estimator.make_decode_rows(1, 100), estimator.make_decode_rows(37, 32_000), chunked):
                    full = estimate.pad_step(rows, one.dp)
                    parts = estimate.compute_terms(
                        estimator.sharding, full, estimator.rates, estimator.wire, one.exchange
                    )
                    calls = estimate.predict_calls(estimator.sharding, full, estimator.wire, one.exchange)
                    own = {what: [1e6 * s for s in (c.mean, c.low, c.high)] for what, c in calls.items()}
                    lines.append(
                        f"  {len(full.decodes)} of {full.tokens}: {json.dumps(rounded(parts))} {json.dumps(rounded(own))}"
                    )
                    lines.append(
                        f"    {estimator.estimate_ms(rows):.6g} ms ± {json.dumps(rounded(estimator.compute_wire_errors(rows)))}"
                    )
            except UsageError as e:
                lines.append(f"  {e}")
    hold("estimates.txt", "\n".join(lines), tmp_path)


def chosen(name: str, *of: tuple[dict[str, Any], float, str], slo: tuple[str, ...] = (), **refused: str) -> Choice:
    """A load's choice among layouts with these rates, of which some miss the SLO."""
    found = [
        dataclasses.replace(
            advised.forecast(tok_s, source, {"all-reduce": 0.02 * n}, **degrees),
            itl_ms=Percentiles(p50=12.345 * (n + 1), p99=99.0),
            ttft_ms=Percentiles(p50=1234.5 / (n + 1)),
        )
        for n, (degrees, tok_s, source) in enumerate(of)
    ]
    misses = {f.who: ["ITL p99 99 ms"] for f in found if f.who in slo}
    return Choice(
        name=name,
        concurrency=int(name.partition(" ")[0]),
        forecasts=found,
        misses=misses,
        refused=refused,
    )


TP8, DCP8 = {"tp": 8}, {"tp": 8, "dcp": 8, "exchange": "a2a"}
WIDE, DP8 = {"tp": 16, "dp": 2, "ep": "tp"}, {"tp": 8, "dp": 8, "ep": "tp"}
FULL = "its weights take 99 GiB of each GPU."
CHOICES: dict[str, tuple[dict[str, Any], list[Choice]]] = {
    "alone": ({}, [chosen("8 × 4,000 tokens", (TP8, 800, MEASURED), tp4=FULL, tp2=FULL)]),
    "dcp": (
        {"price": 2.5, "gpus": (8, 16)},
        [
            chosen("8 × 4,000 tokens", (TP8, 900, ESTIMATED), (DCP8, 800, ESTIMATED), (WIDE, 1500, ESTIMATED), tp4=FULL),
            chosen("16 × 4,000 tokens", (DCP8, 1500, ESTIMATED), (TP8, 1200, ESTIMATED), (DP8, 1190, ESTIMATED), tp4="none"),
            chosen("32 × 4,000 tokens", (DCP8, 2500, ESTIMATED), (TP8, 2450, MEASURED), (DP8, 900, EMULATED)),
            chosen("64 × 4,000 tokens", (DCP8, 5000, ESTIMATED), (DP8, 3000, EMULATED), tp8="no room."),
            chosen("8 × 32,000 tokens", (TP8, 700, ESTIMATED), (DP8, 690, ESTIMATED), (DCP8, 680, ESTIMATED)),
            chosen("64 × 32,000 tokens", tp8="no room.", tp4=FULL),
        ],
    ),
    "slo": (
        {"slo": {"itl": 50.0}, "weights_dtype": "fp8", "cycled": True, "price": 9.99},
        [
            chosen("4 × 4,000 tokens", (TP8, 700, ESTIMATED), (DCP8, 900, ESTIMATED), (DP8, 950, REPLAYED), slo=("tp8·dp8",)),
            chosen("8 × 4,000 tokens", (TP8, 700, ESTIMATED), (DCP8, 695, ESTIMATED), slo=("tp8", "tp8·dcp8 (a2a)")),
            chosen("16 × 4,000 tokens", (TP8, 700, ESTIMATED), (DCP8, 300, ESTIMATED), slo=("tp8", "tp8·dcp8 (a2a)")),
        ],
    ),
    "served": (
        {"machine": load_machine("B200"), "named": "B200"},
        [
            chosen(
                f"{n} × 1000 → 20 tokens",
                *(({**of, "concurrency": n, "load": advised.load(requests=4 * n)}, rate / k, REPLAYED) for k, of in ((1, TP8), (2, DCP8))),
            )
            for n, rate in ((8, 700), (16, 1300))
        ],
    ),
    "arriving": (
        {},
        [
            chosen(
                f"1 × {of} req/s",
                ({**TP8, "load": advised.load(requests=9, arrival="gamma", request_rate=of, paced=True, chunk=1024)}, 100 * of, ESTIMATED),
            )
            for of in (0.5, 2.0)
        ],
    ),
    "none": ({}, [chosen("8 × 4,000 tokens", tp4=FULL)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_an_answer_to_what_to_run(name: str, tmp_path: Path) -> None:
    """Its page and its JSON, from choices as made up: alone, undecided, DCP ahead from a load on, an SLO missed, nothing that fits."""
    of, choices = CHOICES[name]
    ask = dataclasses.replace(advised.ask("H200"), **{"gpus": (8,), **of})
    engines = [answer.Start(engine="sglang", command="sglang"), answer.Start(engine="vllm", command="vllm serve")]
    starts = {f.who: engines for _, f in answer.list_recommended(choices)}
    text = answer.render_markdown(ask, choices, ["One was left out."], load_published_steps(), starts)
    told = answer.convert_to_json(ask, choices, ["One was left out."], load_published_steps(), starts)
    level = [f"{c.name}: {c.meets} {c.decided} {c.next.who if c.next else '-'}" for c in choices]
    out = io.StringIO()
    answer.show(ask, choices, [], load_published_steps(), starts, Console(file=out, width=120))
    said = "\n".join(level)
    hold(
        f"answer-{name}.txt",
        f"{text}\n{out.getvalue()}\n{said}\n{json.dumps(rounded(told), indent=1, ensure_ascii=False)}",
        tmp_path,
    )


def test_the_picture_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("dcpbench.show.figures.save_figure", lambda figure, *_: said.append(figure_words(figure)))
    for name in ("dcp", "slo"):
        answer.draw_picture(advised.ask("H200"), CHOICES[name][1], tmp_path / "x.png")
    lengths = [chosen(f"8 × {n},000 tokens", (TP8, 800, MEASURED), (DCP8, 700 + n, ESTIMATED)) for n in range(1, 8)]
    for count in (4, 5, 7):
        answer.draw_picture(advised.ask("H200"), lengths[:count], tmp_path / "x.png")
    hold("answer-picture.txt", "\n".join(said), tmp_path)


def test_command_lines_of_servers(tmp_path: Path) -> None:
    """Of both presets and of an engine of one's own, for layouts, exchanges, precisions, machines and settings."""
    own = Engine(
        name="own",
        command="run '{model} x' --at {host}:{port} {attn_tp} {nnodes}",
        layout={"interleave": "-i {interleave}", "exchange": "-x {exchange}", "tp": "-t {tp}", "kv": "--kv"},
        flags={"eager": True, "off": False, "seqs": [32, 64], "quiet": [True, False], "rate": 0.5},
        profiler="--traces {traces}",
    )
    lines = [str(settings) for settings in own.list_settings()]
    layouts: list[dict[str, Any]] = [
        {"tp": 0, "dp": 0, "dcp": 0, "exchange": "unknown", "ep": "unknown"},
        {"tp": 1, "exchange": "unknown", "ep": "unknown"},
        {"tp": 1},
        {"tp": 4, "exchange": "a2a"},
        {"tp": 8, "dcp": 8, "exchange": "a2a"},
        {"tp": 8, "dcp": 2, "exchange": "symm", "interleave": 64},
        {"tp": 8, "dp": 2, "dcp": 4, "ep": "tp", "exchange": "ag_rs", "interleave": 2, "kv_dtype": "fp8"},
        {"tp": 8, "dp": 8, "ep": "tp", "interleave": 16},
    ]
    for engine, of in itertools.product((*PRESETS.values(), own), layouts):
        one = advised.point(**of)
        for more in ({}, {"nnodes": 2}, {"traces": "/t"}):
            for settings in ({}, {"seqs": "32", "quiet": "False", "eager": "False"}) if not more else ({},):
                try:
                    command = shlex.join(engine.make_command(one, settings, "m", 7, **more))
                except UsageError as e:
                    command = str(e)
                lines.append(f"{engine.name} {one.layout_name} {one.exchange} {more or ''}: {command}")
    for model, nnodes in (("kimi-k2", 1), ("deepseek-v2-lite", 2), ("mine", 1)):
        lines += (f"{name}: {format_command(name, advised.point(model=model), nnodes)}" for name in PRESETS)
    hold("servers.txt", "\n".join(lines), tmp_path)


def test_verdicts_on_answers_of_servers(tmp_path: Path) -> None:
    """The sentences of all effects: of right and faulty servers, of near-ties, and without log-probabilities."""
    wrong, tied = agreeing.WRONG, {"second": "b", "ahead": 0.05}
    sides: dict[str, list[dict[str, Any]]] = {
        "equal": [{}, {}],
        "one": [{}],
        "cache": [{}, {"first": wrong}],
        "batch of both": [{"batch": wrong}, {"batch": wrong}],
        "one, batch": [{"batch": wrong}],
        "wrong": [{}, {"alone": wrong}],
        "drift": [{}, {"off": 0.3}],
        "near-ties": [tied, {"alone": "a" * 31 + "b", "second": "a", "ahead": 0.05}],
        "first token": [tied, {"alone": "b" * 32, "second": "a", "ahead": 0.05}],
        "no logprobs": [{"logprobs": False}, {"alone": wrong, "logprobs": False}],
        "unrepeatable": [{"again": wrong}, {"again": wrong}],
        "unrepeatable B": [{}, {"again": wrong}],
    }
    lines = []
    for name, servers in sides.items():
        for contexts in ((64,), (256, 1024)):
            report = agreeing.compared(*servers, contexts=contexts)
            caches = [CacheUse(hit_tokens=0), CacheUse()][: len(servers)]
            lines += [f"{name} {contexts} {agreement.find_next_length(report, 32)}", *format_verdict(report, caches)]
            lines += [str([list(column.cells) for column in make_table(report, ["a", "b"]).columns])]
    hold("agreement.txt", "\n".join(lines), tmp_path)


def test_machines(tmp_path: Path, typed: Callable[..., str]) -> None:
    hold("machines.txt", typed("machines"), tmp_path)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "inferencex"])
def test_an_import(engine: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    """A result as the engine's own tool writes it: what is said of it, and the record that it becomes."""
    engine_files_builder.file(tmp_path, getattr(engine_files_builder, engine)())
    text = typed("import", "result.json", "--from", engine, "--tp", "8", "-o", "out")
    (record,) = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    told = json.loads(record)
    told["environment"] = {k: v for k, v in (told.get("environment") or {}).items() if k in ("device", "device_count")}
    hold(f"import-{engine}.txt", f"{text}\n{json.dumps(told, indent=1)}", tmp_path)


IMPORTS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "real-vllm": lambda _: (
        "vllm",
        str(ROOT / "tests/data/imports/glm-4.7_1k1k"),
        "--gpu",
        "Gaudi 3",
        "--dtype",
        "bf16",
    ),
    "real-inferencex": lambda _: ("inferencex", str(ROOT / "tests/data/imports/inferencex-tpu-sweep.json")),
    "swept": lambda folder: (
        "vllm",
        *(
            str(
                engine_files_builder.sweep(
                    folder, {"max_num_seqs": n, "tensor_parallel_size": 4}, {"max_concurrency": 3}
                )
            )
            for n in (64, 128)
        ),
    ),
    "summary": lambda folder: (
        "sglang",
        str(
            engine_files_builder.file(
                folder, engine_files_builder.without_details(engine_files_builder.sglang()), name="tp8_2k1k.jsonl"
            )
        ),
        "--input-len",
        "100",
    ),
    "named": lambda folder: (
        "vllm",
        str(
            engine_files_builder.file(
                folder,
                engine_files_builder.vllm(gpu="h200", precision="FP8", isl="100", osl="4", request_rate=0.5),
                engine_files_builder.vllm(max_concurrency=7, request_rate="inf", num_prompts=4, failed=1),
                name="llama-tp4-dp2-ep8-100_4.json",
            )
        ),
    ),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_what_becomes_of_results_as_people_keep_them(name: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    """Folders of sweeps, summaries alone, names that say what files do not: points, loads, metrics and marks."""
    engine, *words = IMPORTS[name](tmp_path)
    lines = [typed("import", "--from", engine, *words, "-o", "out")]
    for row in map(json.loads, (tmp_path / "out" / "records.jsonl").read_text().splitlines()):
        point = {
            k: v
            for k, v in row["point"].items()
            if k in ("model", "tp", "dp", "dcp", "ep", "concurrency", "context", "load")
        }
        serve = {k: v for k, v in (row.get("serve") or {}).items() if k != "samples_file" and v not in (None, {})}
        lines += [json.dumps(rounded(told)) for told in (point, row.get("marks"), row.get("reason"), serve)]
    hold(f"imported-{name}.txt", "\n".join(lines), tmp_path)


def test_a_report_of_other_engines_results_beside_ours(tmp_path: Path, typed: Callable[..., str]) -> None:
    """Of all three, of which one has several layouts; and the answer alone where nothing of ours is beside them."""
    several = [engine_files_builder.inferencex(conc=n, tp=tp) for n in (4, 8) for tp in (4, 8)]
    for engine, results in (
        ("vllm", [engine_files_builder.vllm()]),
        ("sglang", [engine_files_builder.sglang()]),
        ("inferencex", several),
    ):
        (tmp_path / engine).mkdir()
        engine_files_builder.file(tmp_path / engine, *results)
        words = ("--tp", "4") if engine == "vllm" else ()
        typed("import", f"{engine}/result.json", "--from", engine, *words, "-o", f"runs/{engine}")
    record_builder.write(tmp_path / "ours", [serve_record_builder.served(serve_record_builder.point(TP))])
    said = []
    for name, runs in (
        ("all", ["runs/vllm", "runs/sglang", "runs/inferencex", "ours"]),
        ("theirs", ["runs/inferencex"]),
    ):
        read = frames.load_frames([tmp_path / run for run in runs])
        said.append(markdown.render(name, sections.build_sections(read, []), tmp_path))
    hold("report-imported.md", "\n".join(said), tmp_path)


@pytest.mark.parametrize("as_repeats", [False, True])
def test_a_report_of_several_runs(as_repeats: bool, tmp_path: Path) -> None:
    """Three passes over one grid, each a little slower: side by side, or as repeats of one run."""
    folders = [
        record_builder.write(
            tmp_path / name,
            [
                record_builder.ok(
                    p, median_ms=slower * record_builder.step_ms(p.layout, 4_000, p.concurrency), steps=64
                )
                for p in (record_builder.point(layout, concurrency=n) for layout in (TP, DCP) for n in (8, 48))
            ],
        )
        for name, slower in (("monday", 1.0), ("tuesday", 1.02), ("friday", 1.2))
    ]
    read = frames.load_frames(folders, as_repeats=as_repeats)
    text = markdown.render("title", sections.build_sections(read, []), tmp_path)
    hold(f"report-{'repeats' if as_repeats else 'runs'}.md", text, tmp_path)


def test_a_comparison_of_served_runs(tmp_path: Path, typed: Callable[..., str]) -> None:
    """Latencies of requests, throughput and failures, as A and B wrote them; B is A's own slower half."""
    found = serve_record_builder.run()
    record_builder.write(tmp_path / "a", found)
    slower = [serve_record_builder.served(r.point, faster=0.9) if r.serve else r for r in found]
    record_builder.write(tmp_path / "b", slower)
    text = typed("compare", "a", "b", "--all", "--fail-on", "ttft_p50:5%,itl_p50:+1,undecided", "-o", "out")
    hold("compare-served.txt", f"{text}\n{(tmp_path / 'out' / 'compare.md').read_text()}", tmp_path)


@pytest.mark.parametrize("name", ["decode", "serve"])
def test_a_recommendation_in_json(name: str, tmp_path: Path, typed: Callable[..., str]) -> None:
    text = typed(*ADVICE[name].split(), "--json")
    head, _, told = text.partition("\n")
    hold(f"recommend-{name}.json", f"{head}\n{json.dumps(rounded(json.loads(told)), indent=1)}", tmp_path)


def _order(job: Beating) -> None:
    job.steps()
    job.does(0, "all_gather", "merge", 0, hangs=True)
    job.does(1, "all_reduce", "attn_reduce", 0, hangs=True)
    job.does(2, "all_reduce", "attn_reduce", 0, hangs=True)


def _shape(job: Beating) -> None:
    job.steps()
    for rank in range(3):
        job.does(rank, "all_reduce", "attn_reduce", 0, x=HALF if rank == 1 else X, hangs=True)


def _behind(job: Beating) -> None:
    job.steps()
    for rank in (0, 1):
        job.does(rank, "all_reduce", "mlp_reduce", 1, hangs=True)
    job.ranks[2].set_phase("moe")
    seen = [ProcessState(rank=2, pid=7, state="S", cpu=0.01), ProcessState(rank=0, pid=8, state="R", cpu=0.99)]
    (job.folder / "ranks.json").write_bytes(msgspec.json.encode(seen))
    stack = (
        'Current thread 0x00007f00 (most recent call first):\n  File "/a/dcpbench/engine/model.py", line 7 in experts\n'
    )
    (job.folder / "stacks-2.txt").write_text(f'{stack}  File "/a/w.py", line 1 in <module>\n')
    (job.folder / "log-2.txt").write_text("the last line\n")


def _gone(job: Beating) -> None:
    job.steps()
    for rank in (0, 1):
        job.does(rank, "all_reduce", "moe", 0, hangs=True)
    (job.folder / "ranks.json").write_bytes(msgspec.json.encode([ProcessState(rank=2, ended="ended with exit code 3")]))


def _together(job: Beating) -> None:
    for rank in range(3):
        job.does(rank, "all_reduce", "moe", 0, hangs=True)


def _devices(job: Beating) -> None:
    for rank, norm in enumerate((37, 35, 37)):
        job.ranks[rank].record_step(beats.REPLAY)
        (job.folder / f"device-{rank}.json").write_bytes(msgspec.json.encode(Device(norm=norm)))


def _signals(job: Beating) -> None:
    for rank, (ended, heard) in enumerate(((69, {1: 69, 2: 70}), (70, {0: 70, 2: 70}), (70, {0: 70, 1: 70}))):
        job.ranks[rank].record_step(beats.REPLAY)
        told = merges(rank, 3, ended, heard)
        (job.folder / f"device-{rank}.json").write_bytes(msgspec.json.encode(Device(norm=3)))
        (job.folder / f"signals-{rank}.json").write_bytes(msgspec.json.encode(told))


@pytest.mark.parametrize(
    "kind", [_order, _shape, _behind, _gone, _together, _devices, _signals], ids=lambda f: f.__name__[1:]
)
def test_who_keeps_three_ranks_waiting(
    kind: Callable[[Beating], None], tmp_path: Path, typed: Callable[..., str]
) -> None:
    """Each way in which ranks can stand still, as it is told."""
    (tmp_path / "dump").mkdir()
    kind(Beating(tmp_path / "dump", 3, waits=kind not in (_devices, _signals)))
    hold(
        f"hang-{kind.__name__[1:]}.txt",
        typed("hang", "explain", "dump") + typed("hang", "explain", "dump", "--json"),
        tmp_path,
    )


def test_the_work_of_steps(tmp_path: Path) -> None:
    """Of a decode step and of one with a chunk of a prompt, phase by phase, for each model in layouts of 8 ranks."""
    steps = (
        StepRows(decodes=(4000,) * 8, sampled=8, tokens=64),
        StepRows(decodes=(4000,) * 4, chunks=((512, 1000),), sampled=5, tokens=516),
    )
    lines = []
    for name, shape in SHAPES.items():
        for degrees in (
            {},
            {"dcp": 8},
            {"dp": 8, "ep": "tp"},
            {"dcp": 2, "dp": 2, "weights_dtype": "fp8", "kv_dtype": "fp8"},
        ):
            usual = {
                "model": name,
                "tp": 8,
                "ep": "1",
                "concurrency": 64,
                "context": 4000,
                "backend": "triton",
                "dtype": "bf16",
            }
            point = Point(**usual | degrees)  # type: ignore[arg-type]
            for step in steps:
                lines.append(f"{point.layout}, ep {point.ep}, {name}, {len(step.chunks)} chunks")
                for phase, times, work in iter_phase_works(Sharding.from_point(point, shape), step):
                    said = {
                        k: v for k, v in msgspec.structs.asdict(work).items() if v != msgspec.structs.asdict(Work())[k]
                    }
                    lines.append(f"  {times} × {phase}: {', '.join(f'{k} {v}' for k, v in said.items())}")
    hold("work-of-steps.txt", "\n".join(lines), tmp_path)


def test_a_doctors_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine on which everything is wrong with one GPU, and of one where nothing is."""
    monkeypatch.setattr("dcpbench.doctor.gpus.os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("dcpbench.doctor.gpus.os.cpu_count", lambda: 64)
    monkeypatch.setattr("dcpbench.doctor.gpus._read_command", lambda _: "python")
    monkeypatch.setattr("dcpbench.doctor.host.tempfile.gettempdir", lambda: "/tmp")  # noqa: S108 -- a name
    wrong: dict[str, Any] = {k: v for answers, *_ in GPU_FAULTS.values() for k, v in answers.items()}
    sick = looked(
        tmp_path,
        env={"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"},
        system=System(get_load=60.0, get_limit=256),
        **wrong,
    )
    found = [
        f"{f.level} {f.check} {f.where}: {f.what} To do: {f.remedy}"
        for f in (*sick.findings, *looked(tmp_path).findings)
    ]
    hold("doctor.txt", "\n".join([*found, *doctor_command.format_findings(sick.findings)]), tmp_path)


def test_a_hang_that_is_explained(tmp_path: Path, typed: Callable[..., str]) -> None:
    """Flight recorders of two ranks, of which one did not come; and norms of devices."""
    done = ("all_reduce", [4, 3], "completed")
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "flight-0.json").write_text(json.dumps(recorded(done, ("all_gather", [4], "started"))))
    (tmp_path / "dump" / "flight-1.json").write_text(json.dumps(recorded(done)))
    text = typed("hang", "explain", "dump") + typed("hang", "explain", "dump", "--json", "--html", "page.html")
    hold("hang.txt", f"{text}\n{(tmp_path / 'page.html').read_text()}", tmp_path)


def figure_words(figure: Figure) -> str:
    """A figure in words: its size, and of each panel labels, scales, limits, ticks, and what is drawn where."""

    def few(values: Iterable[Any]) -> str:
        return " ".join(f"{float(v):.4g}" for v in np.ravel(np.asarray(list(values), dtype=float)))

    def texts(artists: Iterable[Any]) -> str:
        return " | ".join(a.get_text().replace("\n", " / ") for a in artists if a.get_text())

    lines = [f"figure {few(figure.get_size_inches())}: {texts([*figure.texts, *filter(None, [figure._suptitle])])}"]
    lines += [f"  legend: {texts(legend.get_texts())}, {legend._ncols} columns" for legend in figure.legends]
    lines += [f"  sizes {few(t.get_fontsize() for t in figure.findobj(Text) if t.get_text())}"]
    for ax in figure.axes:
        lines.append(f"  panel {ax.get_title()} / {ax.get_title('left')}: {ax.get_xlabel()} × {ax.get_ylabel()}")
        lines.append(
            f"    {ax.get_xscale()} {few(ax.get_xlim())}, {ax.get_yscale()} {few(ax.get_ylim())} {ax.get_axisbelow()}"
        )
        lines.append(f"    ticks {texts(ax.get_xticklabels())} × {texts(ax.get_yticklabels())}")
        for line in ax.lines:
            style = f"{line.get_color()} {line.get_linestyle()} {line.get_marker()} {line.get_linewidth():g} {line.get_zorder():g}"
            style += f" {line.get_markersize():g} {line.get_markeredgewidth():g} {line.get_alpha()} {line.get_markerfacecolor()}"
            lines.append(f"    line {line.get_label()} {style}: {few(line.get_xdata())} × {few(line.get_ydata())}")
        for patch in ax.patches:
            box = patch.get_path().get_extents(patch.get_patch_transform())
            lines.append(f"    patch {few(patch.get_facecolor())} {few(box.extents)} {patch.get_zorder():g}")
        for found in ax.collections:
            shape = [path.vertices for path in found.get_paths()][:12]
            lines.append(
                f"    {type(found).__name__} {found.get_label()} {few(np.concatenate(shape)) if shape else ''}"
            )
        lines += [
            f"    text {few(t.get_position())} {t.get_ha()} {t.get_va()} {t.get_fontsize():g}: {texts([t])}"
            for t in ax.texts
        ]
        legend = ax.get_legend()
        lines += [f"    legend: {texts(legend.get_texts())}"] if legend else []
    return "\n".join(re.sub(r"_child\d+", "", line) for line in lines)


SEVERAL: dict[str, Callable[[], list[list[Record]]]] = {
    **{name: (lambda run=run: [run()]) for name, run in RUNS.items()},
    "of-two-decodes": lambda: [small_run(random.Random(seed)) for seed in (5, 12)],
    "of-two-serves": lambda: [small_served(random.Random(seed)) for seed in (4, 9)],
    "of-two-instances": lambda: [RUNS["instances"](), RUNS["instances"]()[:4]],
    "of-two-stalls": lambda: [RUNS["stalls"](), RUNS["stalls"]()[1:]],
    "of-exchanges": lambda: [
        [
            small_record(
                record_builder.point(layout, model=model, concurrency=load, exchange=way, **more),
                load * rate * (1.0 if layout is DCP else 0.97),
                0.005,
            )
            for model in ("kimi-k2", "deepseek-v3")
            for layout in (DCP, Layout(4, 1, 2))
            for load in (8, 16)
            for way, rate, more in (
                ("ag_rs", 100.0, {}),
                ("a2a", 105.0, {}),
                ("symm", 104.9, {}),
                ("a2a", 101.0, {"project_first": True}),
            )
        ]
    ],
    "of-both": lambda: [[*small_run(random.Random(7)), *small_served(random.Random(13))]],
}
"""Runs of which figures are drawn together."""


def read_several(name: str, folder: Path) -> frames.Frames:
    """The records of these runs; those made at random are held against an SLO."""
    folders = [record_builder.write(folder / f"run{n or ''}", found) for n, found in enumerate(SEVERAL[name]())]
    return frames.load_frames(folders, slo=None if name in RUNS else {"ttft": 2900.0, "itl": 14.8})


@pytest.mark.parametrize("name", SEVERAL)
def test_figures_of_a_report(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they draw and write, not how a version of matplotlib renders it."""
    said: list[str] = []

    def save(figure: Figure, path: Path, *_: str) -> list[Path]:
        said.append(f"--- {path.name}\n{figure_words(figure)}")
        return []

    monkeypatch.setattr(plots, "save_figure", save)
    pictures = plots.draw_all(read_several(name, tmp_path), tmp_path / "figures")
    told = [f"{p.subject} {p.mode} {p.png.name}: {p.title}. {p.alt}" for p in pictures]
    hold(f"figures-{name}.txt", "\n".join([*told, *said]), tmp_path)


@pytest.mark.parametrize("name", ["of-both", "of-exchanges", "of-two-decodes", "of-two-serves"])
def test_a_report_of_runs_made_at_random(name: str, tmp_path: Path) -> None:
    """All of its tables and texts; and what a page's scripts and a terminal make of it."""
    read = read_several(name, tmp_path)
    text = markdown.render("title", sections.build_sections(read, []), tmp_path)
    told = rounded(build_page_data(read))
    page = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in told.items() if key != "columns"]
    out = io.StringIO()
    for width in (150, 70):
        Console(file=out, width=width).print(report_terminal.render(read))
    hold(f"report-{name}.md", "\n".join([text, out.getvalue(), *page]), tmp_path)


def rounded(value: Any) -> Any:
    """Floats to six digits: sums in another order are the same."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


REPLAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Settings]] = {
    "closed": ({}, {}, Settings()),
    "slo": ({"input_tokens": "uniform:1000-4000"}, {"concurrency": 16}, Settings(slo={"ttft": 900.0, "itl": 70.0})),
    "open": (
        {"arrival": "gamma", "request_rate": 0.8, "burstiness": 0.5, "paced": True},
        {"concurrency": 60},
        Settings(),
    ),
    "prefix": ({"prefix_share": 0.5, "prefix_groups": 3, "chunk": 4096}, {}, Settings()),
    "pressure": ({"output_tokens": "lognormal:300:0.8"}, {"concurrency": 12}, Settings(kv_memory_bytes=256 << 20)),
    "sessions": ({"turns": "uniform:2-4", "turn_tokens": "50", "think_time": 0.5}, {}, Settings()),
    "apart": ({"output_tokens": "lognormal:100:0.8"}, {"disaggregate": "1:2", "transfer_gb_s": 2.0}, Settings()),
    "several": ({"arrival": "gamma", "request_rate": 3.0, "burstiness": 1.0}, {"disaggregate": "3"}, Settings()),
    "first": (
        {"policy": "prefill-first", "chunk": 2048, "output_tokens": "uniform:5-200"},
        {"concurrency": 20},
        Settings(),
    ),
    "uncached": ({"turns": "3", "turn_tokens": "50", "prefix_cache": False}, {}, Settings(limit_seconds=20.0)),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_a_replay(name: str, tmp_path: Path) -> None:
    """Of 40 requests by an engine on paper, in virtual time: all of its metrics, and each request's times."""
    of_load, of_point, settings = REPLAYS[name]
    load = msgspec.structs.replace(replayed.LOAD, **{"requests": 40, **of_load})
    longest = max(4_030, 5_000 if of_load else 0)
    point = msgspec.structs.replace(replayed.POINT, **{"load": load, "context": longest, **of_point})
    file = tmp_path / "times.json"
    write_step_times(file, step_times_builder.step_times(path=get_engine_path(replayed.POINT)))
    record = replayed.run(file, tmp_path, point, settings)
    assert record.serve is not None
    told = rounded(msgspec.to_builtins(record.serve))
    told |= {"outcome": record.outcome, "reason": record.reason, "marks": record.marks}
    each = read_samples(tmp_path / record.serve.samples_file)[:6]
    lines = [json.dumps(rounded(dataclasses.asdict(row))) for row in each]
    hold(f"replay-{name}.txt", "\n".join([json.dumps(told, indent=1), *lines]), tmp_path)


def test_calls_between_ranks_take_as_long_as_machines_let_them(tmp_path: Path) -> None:
    """µs of each kind of call, in a host and over a link, of few bytes and many, alone and inside a step: mean, and both ends."""
    lines = []
    for name in ("H200", "H100", "B200", "H200+rdma-400"):
        wire = load_machine(name).wire
        for what, ranks, size in itertools.product(wire.calls, (2, 4, 8, 16), (1_000, 100_000, 50_000_000)):
            said = []
            for of in (wire, wire.in_step):
                try:
                    took = of.predict_seconds(what, ranks, size, 2)
                except UsageError as e:
                    said.append(str(e))
                else:
                    said.append(" ".join(f"{1e6 * s:.4g}" for s in (took.mean, took.low, took.high)))
            lines.append(f"{name} {what} {ranks} × {size:,}: {' | '.join(dict.fromkeys(said))}")
    hold("wire.txt", "\n".join(lines), tmp_path)


EXTENTS = {
    "long": step_times_builder.EXTENT,
    "small": Extent(requests=6, context=40, pages=32, virtual_page=4, chunk=16),
    "open": dataclasses.replace(step_times_builder.EXTENT, open_loop=True, targets=(), prompts=(), pages=300),
    "shared": dataclasses.replace(step_times_builder.EXTENT, shared=True, pages=100, requests=64),
    "tight": Extent(requests=3, context=900, pages=5, virtual_page=64, chunk=256, targets=(3,)),
}


def test_steps_that_are_measured_for_replays(tmp_path: Path) -> None:
    """All cases of engines with much KV memory and with little, and what the model of them predicts beside its truth."""
    lines = []
    for name, extent in EXTENTS.items():
        lines += [f"--- {name}", *(f"{case.use}: {case}" for case in make_cases(extent))]
    hold("step-cases.txt", "\n".join(lines), tmp_path)


LOADS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "uniform": {"input_tokens": "uniform:5-20", "output_tokens": "lognormal:6:0.5"},
    "gamma": {"arrival": "gamma", "request_rate": 2.0, "burstiness": 0.25},
    "prefix": {"prefix_share": 0.4, "prefix_groups": 3},
    "sessions": {"turns": "uniform:1-3", "turn_tokens": "4", "think_time": 1.0},
}


@pytest.mark.parametrize("name", LOADS)
def test_a_load(name: str, tmp_path: Path) -> None:
    """Twelve requests: when they come, what they ask, which tokens, whose turn."""
    load = msgspec.structs.replace(
        serve_record_builder.load(), **{"requests": 12, "input_tokens": "10", "output_tokens": "3", **LOADS[name]}
    )
    lines = [
        f"{r.number} at {'-' if r.arrival_s is None else f'{r.arrival_s:.6g}'} session {r.session} turn {r.turn}, "
        f"{r.output_tokens} for {r.prompt.tolist()}"
        for r in make_requests(load, 1000)
    ]
    hold(f"load-{name}.txt", "\n".join(lines), tmp_path)


def test_a_trace_that_is_scanned(tmp_path: Path) -> None:
    """Of an H200: all sites with their stacks, waits and bubbles."""
    report = scan_traces([ROOT / "tests" / "data" / "h200_stacks.trace.json.gz"], root=ROOT)
    hold("scan.txt", json.dumps(rounded(msgspec.to_builtins(report)), indent=1), tmp_path)


def mixed() -> Trace:
    """Three steps of an engine, each with every kind of call that blocks, on two threads and two streams."""
    trace = Trace().work()
    for step in range(3):
        t = 10_000.0 * step
        trace.range(f"ProfilerStep#{step}", t, t + 9_900)
        trace.frame("engine/step.py(10): step", t + 1, t + 9_800)
        trace.range("decode", t + 2, t + 5_000)
        for n in range(6):
            trace.kernel(t + 10 + 40 * n, t + 20 + 40 * n, t + 55 + 40 * n, stream=7 + n % 2)
        trace.frame("engine/sample.py(20): sample", t + 300, t + 1_400)
        trace.item(t + 310, t + 500)
        trace.item(t + 600, t + 700, name=PAGEABLE)
        trace.op("aten::to", t + 800, t + 900)
        trace.copy(TO_GPU, (t + 810, t + 890), (t + 820, t + 880), size=1 << 20)
        trace.op("aten::nonzero", t + 1_000, t + 1_300)
        trace.copy(PINNED, (t + 1_010, t + 1_020), (t + 1_100, t + 1_110))
        trace.call("cudaStreamSynchronize", t + 1_030, t + 1_250)
        trace.kernel(t + 1_500, t + 1_520, t + 2_500)
        trace.call("cudaEventSynchronize", t + 1_600, t + 2_510)
        trace.call("cudaMalloc", t + 2_600, t + 2_700)
        trace.call("cudaFree", t + 2_800, t + 3_300)
        trace.call("cudaHostAlloc", t + 3_400, t + 3_900)
        trace.frame("engine/log.py(5): log", t + 5_100, t + 6_000)
        trace.call("cudaDeviceSynchronize", t + 5_200, t + 5_900)
        trace.add(
            "cuda_sync", "Context Synchronize", t + 5_200, t + 5_900, pid=0, tid=7, correlation=10_000 + step, stream=-1
        )
        trace.call("cuStreamSynchronize", t + 6_100, t + 6_300, cat="cuda_driver")
        trace.op("aten::item", t + 6_050, t + 6_400)
        trace.kernel(t + 6_500, t + 6_600, t + 9_000, tid=HOST + 1)
        trace.op("aten::_local_scalar_dense", t + 7_000, t + 9_100, tid=HOST + 1)
        trace.copy(PINNED, (t + 7_010, t + 7_020), (t + 9_001, t + 9_010), tid=HOST + 1)
        trace.call("cudaStreamSynchronize", t + 7_030, t + 9_050, tid=HOST + 1)
    return trace


@pytest.mark.parametrize("form", ["json", "markdown", "table"])
def test_a_trace_with_every_kind_of_wait(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As scan finds, prices and tells them, held against limits on calls and bubbles."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)  # where paths are short, and lines break as they do
    report = mixed().scan(Path())
    report.verdict = judge_syncs(report, Gate(root=tmp_path, max_per_step=3.0, max_bubble_us=50.0))
    text = render_report(report, form, root=tmp_path)
    if form == "json":
        text = json.dumps(rounded(json.loads(text)), indent=1)
    hold(f"scan-mixed-{form}.txt", text, tmp_path)


def test_pictures_of_other_commands(tmp_path: Path, typed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The forest of a comparison, and what is recommended over loads."""
    said: list[str] = []

    def save(figure: Figure, path: Path, *_: str) -> list[Path]:
        said.append(f"--- {path.name}\n{figure_words(figure)}")
        return []

    monkeypatch.setattr("dcpbench.compare.picture.save_figure", save)
    monkeypatch.setattr("dcpbench.show.figures.save_figure", save)
    compare_builder.write_launches(tmp_path / "a", 3, seed=1, cv=0.01)
    compare_builder.write_launches(tmp_path / "b", 3, seed=2, cv=0.01, faster=1.04)
    typed("compare", "a", "b", "-o", "out")
    typed(*ADVICE["price"].split(), "-o", "advice")
    hold("pictures.txt", "\n".join(said), tmp_path)


def test_colours_of_layouts(tmp_path: Path) -> None:
    """On light and on dark, with the place of the marker: of all layouts of up to 32 GPUs, and of names without degrees."""
    names = [str(layout) for tp in (1, 2, 4, 8, 16, 32) for layout in list_valid_layouts(SHAPES["deepseek-v3"], tp)]
    lines = [
        f"{name}: {' '.join(get_colours(name))} {find_marker_index(name)}" for name in (*names, "sglang", "tp4 1P2D")
    ]
    hold("colours.txt", "\n".join(lines), tmp_path)
