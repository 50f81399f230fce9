"""Hold whole outputs of commands, word for word, in tests/data/outputs for review.

    python -m pytest tests/unit/test_outputs.py -n 0                      # shows the difference
    UPDATE_OUTPUTS=1 python -m pytest tests/unit/test_outputs.py -n 0     # writes the files again

Other tests check why each part is as it is. These show a reviewer what a user reads.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench import cli
from dcpbench.commands import doctor as doctor_command
from dcpbench.dashboard import data as dashboard_data
from dcpbench.dashboard import discovery
from dcpbench.models import SHAPES
from dcpbench.models.weight_formats import FORMATS, FP8, UNQUANTISED
from dcpbench.points import memory
from dcpbench.points.layout import Layout, QueryReplication
from dcpbench.reports import dataframes, points_export, report_markdown, sections
from dcpbench.servers.answer_verdict import find_next_length
from dcpbench.servers.answer_verdict_text import format_report, make_table
from dcpbench.show import terminal
from dcpbench.syncs.formats import render_report
from dcpbench.syncs.gating.config import Allow
from dcpbench.syncs.gating.gate import Gate, apply_permissions
from dcpbench.syncs.gating.gate import compute_verdict as judge_syncs
from tests.servers import test_agreement as agreeing
from tests.unit import (
    compare_builder,
    dashboard_builder,
    engine_files_builder,
    record_builder,
    serve_record_builder,
    syncs_builder,
)
from tests.unit.test_doctor import GPU_FAULTS, System, good_versions, run_checks  # noqa: F401 -- a fixture
from tests.unit.test_hangs import make_flight_record
from tests.unit.test_reports_floors import FAR, NEAR
from tests.unit.test_reports_instances import RATE
from tests.unit.test_reports_instances import served as serve_instances
from tests.unit.test_reports_marks import LOWERED
from tests.unit.test_reports_marks import ok as mark_point
from tests.unit.trace_builder import HOST, PAGEABLE, PINNED, TO_GPU, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
OUTPUTS = ROOT / "tests" / "data" / "outputs"
UPDATE = "UPDATE_OUTPUTS"
TP, DCP, DP = Layout(4), Layout(4, 1, 4), Layout(4, 4)


@pytest.fixture
def run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a command in an empty folder and returns what it prints, and its exit code unless 0."""
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=float))  # progress shows no elapsed time
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(list(words))
        out, err = capsys.readouterr()
        return f"$ dcpbench {' '.join(words)}\n{out}{err}{f'exit code {end.value.code}' if end.value.code else ''}\n"

    return run


def check_output(name: str, text: str, tmp_path: Path) -> None:
    """Compare a text with the kept one, except for folders and line numbers of tests."""
    text = re.sub(
        r"(tests/\w+/\w+\.py):\d+", r"\1:LINE", text.replace(str(tmp_path), "FOLDER").replace(str(ROOT), "ROOT")
    )
    text = "".join(f"{line.rstrip()}\n" for line in text.split("\n")).rstrip() + "\n"
    path = OUTPUTS / name
    if os.environ.get(UPDATE):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text.split("\n") == path.read_text().split("\n")


def make_decode_records() -> list[Record]:
    """Return two models, three layouts, two contexts and two loads; one point repeated, one without room, one failed."""
    found = [
        record_builder.make_ok_record(
            record_builder.make_point(layout, model=model, context=context, concurrency=load),
            median_ms=slower * record_builder.compute_step_ms(layout, context, load),
            steps=64,
        )
        for model, slower in (("kimi-k2", 1.0), ("deepseek-v3", 1.13))
        for context in (4_000, 128_000)
        for load in (8, 48)
        for layout in (TP, DCP, DP)
        if (layout, context, load) != (TP, 128_000, 48)
    ]
    again = record_builder.make_point(TP, model="kimi-k2", context=4_000, concurrency=8, repeat=1)
    found.append(
        record_builder.make_ok_record(again, median_ms=1.05 * record_builder.compute_step_ms(TP, 4_000, 8), steps=64)
    )
    found.append(record_builder.make_rejected_record(record_builder.make_point(TP, context=128_000, concurrency=48)))
    found.append(
        record_builder.make_failed_record(
            record_builder.make_point(TP, model="deepseek-v3", context=128_000, concurrency=48)
        )
    )
    return found


REPORTS: dict[str, Callable[[], list[Record]]] = {
    "decode": make_decode_records,
    "serve": lambda: serve_record_builder.make_run()[::2],
    "instances": lambda: [
        serve_instances("1:1", 30, busy={"prefill": 0.2, "decode": 0.95}, **RATE),
        serve_instances("1:2", 28, **RATE),
        serve_instances("2", 25, itl=80),
        serve_instances("1:1", 30, 32, **RATE),
        serve_instances("1:2", 40, 32, busy={"prefill": 0.97, "decode": 0.5}, **RATE),
        serve_instances("3", 31, 32),
        serve_instances("", 20),
    ],
    "floors": lambda: [
        FAR,
        NEAR,
        mark_point(TP, "throttled", gpu=LOWERED, concurrency=32),
        mark_point(DCP, "throttled", "noisy", "drift", gpu=LOWERED, concurrency=32),
        mark_point(DCP, concurrency=48),
    ],
}


@pytest.mark.parametrize("name", REPORTS)
def test_report_as_markdown_and_csv(name: str, tmp_path: Path) -> None:
    """The Markdown has all text of the page."""
    folder = record_builder.write_records(tmp_path / "run", REPORTS[name]())
    read = dataframes.load_frames([folder], slo={"ttft": 2000.0, "itl": 45.0} if name == "serve" else None)
    text = report_markdown.render("title", sections.build_sections(read, []), tmp_path)
    points_export.write_csv(read, tmp_path / "points.csv")
    check_output(f"report-{name}.md", f"{text}\n{(tmp_path / 'points.csv').read_text()}", tmp_path)


def test_report_of_imports_with_own_points(tmp_path: Path, run_command: Callable[..., str]) -> None:
    several = [engine_files_builder.make_inferencex_row(conc=n, tp=tp) for n in (4, 8) for tp in (4, 8)]
    for engine, results in (
        ("vllm", [engine_files_builder.make_vllm_result()]),
        ("sglang", [engine_files_builder.make_sglang_result()]),
        ("inferencex", several),
    ):
        (tmp_path / engine).mkdir()
        engine_files_builder.write_file(tmp_path / engine, *results)
        words = ("--tp", "4") if engine == "vllm" else ()
        run_command("import", f"{engine}/result.json", "--from", engine, *words, "-o", f"runs/{engine}")
    record_builder.write_records(
        tmp_path / "ours", [serve_record_builder.make_served_record(serve_record_builder.make_point(TP))]
    )
    texts = []
    for name, runs in (
        ("all", ["runs/vllm", "runs/sglang", "runs/inferencex", "ours"]),
        ("theirs", ["runs/inferencex"]),
    ):
        read = dataframes.load_frames([tmp_path / run for run in runs])
        texts.append(report_markdown.render(name, sections.build_sections(read, []), tmp_path))
    check_output("report-imported.md", "\n".join(texts), tmp_path)


@pytest.mark.parametrize("name", ["decode", "serve"])
def test_show_at_three_widths(
    name: str, tmp_path: Path, run_command: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_builder.write_records(tmp_path / "run", REPORTS[name]())
    texts = []
    for width in (160, 100, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        texts.append(run_command("show", "run"))
    check_output(f"show-{name}.txt", "\n".join(texts), tmp_path)


def test_scanned_sites_as_markdown(tmp_path: Path) -> None:
    """All kinds of sites are listed, one of which is allowed."""
    report = syncs_builder.make_report_of_all_kinds()
    gate = Gate(root=ROOT, allow=(Allow(function="sample", reason="tokens leave the GPU here", source="allow[0]"),))
    report.verdict = judge_syncs(report, gate, apply_permissions(report.sites, gate))
    check_output("syncs-markdown.txt", render_report(report, "markdown", root=ROOT), tmp_path)


def test_compare_of_two_runs(tmp_path: Path, run_command: Callable[..., str]) -> None:
    """B is 4 % faster, measured with four launches that scatter by 1 %."""
    compare_builder.write_launches(tmp_path / "a", 4, seed=1, cv=0.01)
    compare_builder.write_launches(tmp_path / "b", 4, seed=2, cv=0.01, faster=1.04)
    words = ("--fail-on", "slower:2%,memory:0.1%", "--junit", "junit.xml", "--paired")
    text = run_command("compare", "a", "b", *words, "--all", "-o", "out")
    for name in ("out/compare.md", "junit.xml"):
        text += f"\n--- {name}\n{(tmp_path / name).read_text()}"
    check_output("compare.txt", text, tmp_path)


def test_dashboard_files(tmp_path: Path) -> None:
    """The data has 12 runs with two points, of which the first becomes slower."""
    runs = dashboard_builder.write_history(tmp_path / "runs", runs=12, count=2, step_at=7, cv=0.002)
    found = discovery.load_runs(runs, {}, lambda _: None)
    files, _ = dashboard_data.build_content(found, lambda _: None).add_index([], [], found.skipped)
    text = "\n".join(f"--- {name}\n{text}" for name, text in sorted(files.items()))
    check_output("dashboard.txt", text, tmp_path)


COMMANDS = {
    "plan-sweep": "sweep --gpu H200,count=8 --tp 4,8 --dcp 1,4,8 --dp 1,8 --context 4000,128000 --concurrency 8,64 --model deepseek-v3 --dry-run",
    "plan-serve": "serve --gpu B200,count=8 --dry-run",
    "plan-hosts": "sweep --gpu H100,count=8 --nodes 2,endpoint=10.0.0.1:29500 --tp 8,16 --dp 1,2 --dcp 1,2 --context 8000,1000000 "
    "--concurrency 4,256 --model deepseek-v2,kimi-k2 --dry-run",
    "recommend-hosts": "recommend --machine H200+rdma-400 --gpus 8,16 --model deepseek-v3 --concurrency 8,256 --context 128000 --weights-dtype fp8",
    "recommend-slo": "recommend --machine H200 --gpus 4 --model deepseek-v2 --request-rate 0.5,2 --input-tokens 2000 --output-tokens 30 "
    "--num-requests 24 --slo ttft=400,itl=20 --price 2.5",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_dry_runs_and_recommendations(name: str, tmp_path: Path, run_command: Callable[..., str]) -> None:
    check_output(f"{name}.txt", run_command(*COMMANDS[name].split()), tmp_path)


def test_verdicts_on_answers_of_servers(tmp_path: Path) -> None:
    """Servers are correct, faulty, nearly tied, or without log-probabilities."""
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
            report = agreeing.judge_servers(*servers, contexts=contexts)
            between = find_next_length(agreeing.get_judgements(report), 32)
            lines += [f"{name} {contexts} {between}", *format_report(report)]
            lines += [str([list(column.cells) for column in make_table(report).columns])]
    check_output("agreement.txt", "\n".join(lines), tmp_path)


def test_findings_of_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine has all faults of a GPU, and one has none."""
    monkeypatch.setattr("dcpbench.doctor.gpu_checks.os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("dcpbench.doctor.gpu_checks.os.cpu_count", lambda: 64)
    monkeypatch.setattr("dcpbench.doctor.gpu_checks._read_command", lambda _: "python")
    monkeypatch.setattr("dcpbench.doctor.host.tempfile.gettempdir", lambda: "/tmp")  # noqa: S108 -- a name
    wrong: dict[str, Any] = {k: v for answers, *_ in GPU_FAULTS.values() for k, v in answers.items()}
    sick = run_checks(
        tmp_path,
        env={"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "1"},
        system=System(get_load=60.0, get_limit=256),
        **wrong,
    )
    found = [
        f"{f.level} {f.check} {f.where}: {f.what} To do: {f.remedy}"
        for f in (*sick.findings, *run_checks(tmp_path).findings)
    ]
    check_output("doctor.txt", "\n".join([*found, *doctor_command.format_findings(sick.findings)]), tmp_path)


def test_hang_explain_of_flight_recorders(tmp_path: Path, run_command: Callable[..., str]) -> None:
    """The second of two ranks does not enter a collective."""
    done = ("all_reduce", [4, 3], "completed")
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "flight-0.json").write_text(
        json.dumps(make_flight_record(done, ("all_gather", [4], "started")))
    )
    (tmp_path / "dump" / "flight-1.json").write_text(json.dumps(make_flight_record(done)))
    text = run_command("hang", "explain", "dump") + run_command(
        "hang", "explain", "dump", "--json", "--html", "page.html"
    )
    check_output("hang.txt", f"{text}\n{(tmp_path / 'page.html').read_text()}", tmp_path)


def make_trace() -> Trace:
    """Return three steps of an engine, each with every kind of blocking call, on two threads and two streams."""
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


def test_scanned_trace_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are limits on calls and bubbles."""
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)  # short paths keep the line breaks equal
    report = make_trace().scan(Path())
    report.verdict = judge_syncs(report, Gate(root=tmp_path, max_per_step=3.0, max_bubble_us=50.0))
    check_output("scan.txt", render_report(report, "table", root=tmp_path), tmp_path)


LAYOUTS = [
    Layout(1),
    Layout(4),
    Layout(8),
    Layout(8, dcp=8),
    Layout(8, 2, 4),
    Layout(8, 8),
    Layout(3),
    Layout(16, 4, 2),
]


def test_memory_of_layouts(tmp_path: Path) -> None:
    """Bytes of weights by part, pages, windows and chunks, for each model in bf16, fp32 and fp8."""
    lines = []
    for name, shape in SHAPES.items():
        for layout in LAYOUTS:
            parts = {
                f"{size}{'s' if weights.is_quantised else ''}": [
                    memory.compute_attention_bytes(shape, layout, size, weights=weights),
                    memory.compute_moe_bytes(shape, layout, size, weights, ep="tp"),
                    memory.compute_moe_bytes(shape, layout, size, weights, ep="1"),
                    memory.compute_shared_expert_bytes(shape, layout, size, weights=weights),
                    memory.compute_dense_mlp_bytes(shape, layout, size, weights=weights),
                    memory.compute_certain_bytes(
                        shape, layout, size, QueryReplication(query=True, value=True), weights
                    ),
                    memory.compute_weight_bytes(shape, layout, size, *memory.count_all_layers(shape), weights=weights),
                    [*memory.compute_min_layers(shape, layout, size, 60 << 20, weights=weights)],
                ]
                for size, weights in ((2, UNQUANTISED), (4, UNQUANTISED), (2, FORMATS[FP8]))
            }
            steps = [
                memory.compute_prefill_bytes(shape, layout, n, 2, ep, kv_itemsize=kv)
                for n, ep, kv in ((512, "tp", None), (40_000, "1", 1))
            ]
            windows = [memory.compute_window_bytes(shape, layout, n, 2, kv) for n, kv in ((100, None), (100, 1))]
            pages = [memory.count_pages(n, layout, 16) for n in (0, 1, 16, 17, 4000)]
            pages += [memory.count_kv_pages(layout, n, 4000, 64) for n in (1, 7, 8)]
            outer = [
                memory.compute_outer_bytes(shape, layout, 2),
                memory.compute_vocab_rows(shape, layout),
                memory.compute_page_bytes(shape, 16, 2),
            ]
            lines.append(f"{name} {layout}: {json.dumps(parts)} {steps} {windows} {pages} {outer}")
    for inputs, outputs, heights, cut in (
        (128, 128, (128,), {}),
        (129, 256, (256,), {}),
        (200, 300, (100, 200), {}),
        (7168, 576, (512, 64), {}),
        (1000, 96, (96,), {"rows": 3}),
        (1000, 96, (96,), {"columns": 8}),
    ):
        lines.append(
            f"{inputs} × {outputs} {heights} {cut}: {memory.compute_stored_bytes(memory.LinearShape(inputs, outputs), heights, FORMATS[FP8], **cut)}"
        )
    check_output("memory.txt", "\n".join(lines), tmp_path)
