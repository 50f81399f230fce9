"""Test servers that are started for a run: one per layout, refusals are quoted, and no process is left behind."""

from __future__ import annotations

import io
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench import cli
from dcpbench.commands.server import _add_default_ep
from dcpbench.errors import UsageError, WorkerError
from dcpbench.points.engine_points import make_engine_load, make_engine_point
from dcpbench.points.layout import Layout
from dcpbench.records.runs import read_run
from dcpbench.servers import process_group
from dcpbench.servers.engine_log import format_weights_report
from dcpbench.servers.engine_settings import Grid, list_all_settings
from dcpbench.servers.exit_reason import Cause, find_exit_reason, find_reason
from dcpbench.servers.launch import Server, find_free_port
from dcpbench.servers.presets import PRESETS, Engine, choose_ep, choose_weights, resolve_engine
from tests.servers.test_profile import TRACE

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
ENGINE_LOGS = ROOT / "tests" / "data" / "engine_logs"
FAKE = f"{sys.executable} -m tests.servers.fake_server --port {{port}} -tp {{attn_tp}} -dcp {{dcp}} --served-model-name {{model}}"
LOAD = [
    "--device",
    "cpu",
    "--num-requests",
    "4",
    "--input-tokens",
    "20",
    "--output-tokens",
    "4",
    "--client",
    "warm-up=0",
]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the fake server importable by its module's name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def dcpbench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run a command and return its exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0), *capsys.readouterr()


def find_alive(mark: str) -> list[int]:
    """Return the processes with a mark in their command line, except this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def have_ended(mark: str, within_s: float = 15.0) -> bool:
    """Return whether all such processes end in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not find_alive(mark):
            return True
        time.sleep(0.1)
    return False


def start_command(mark: str, *more: str) -> list[str]:
    """Start a command that measures servers with a mark in their command line and two child processes each."""
    command = f"{FAKE} --children 2 --gap-ms 50 --version {mark}"
    words = ["server", "--serve-cmd", command, "--model", "m", "--tp", "1,2", "--concurrency", "2", *LOAD, *more]
    return [sys.executable, "-m", "dcpbench.cli", *words]


def test_refused_layout_is_recorded_with_its_reason_and_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of four layouts run, one is refused by the server, and one does not nest; each configuration starts once."""
    run = tmp_path / "run"
    words = ["server", "--serve-cmd", f"{FAKE} --children 1", "--model", "m", "--tp", "1,2", "--dcp", "1,2"]
    words += ["--concurrency", "1,2", *LOAD, "-o", str(run)]
    code, _, err = dcpbench(capsys, *words)
    assert code == 4
    assert "decode context parallel size 2 is not supported" in err
    found = read_run(run).records
    rejected = {r.reason for r in found if r.outcome == "rejected"}
    records = {(str(r.point.layout), r.point.concurrency): r for r in found if r.outcome != "rejected"}
    assert {key: r.outcome for key, r in records.items()} == {
        ("tp1", 1): "ok",
        ("tp1", 2): "ok",
        ("tp2", 1): "ok",
        ("tp2", 2): "ok",
        ("tp2·dcp2", 1): "failed",
        ("tp2·dcp2", 2): "failed",
    }
    assert "cannot run: tp1·dp1·dcp2" in err
    assert rejected == {"--dcp 2 does not divide --tp 1; these do: 1."}
    why = records["tp2·dcp2", 1].reason or ""
    assert "AssertionError: decode context parallel size 2 is not supported by the attention backend CPU_ATTN" in why
    assert str(records["tp2·dcp2", 1].advice).startswith("Read servers/")
    assert len(list((run / "servers").iterdir())) == 3
    server = records["tp2", 1].server
    assert server
    assert "-tp 2" in server.facts["command"]
    assert records["tp2", 1].origin == "engine vllm 0.32.0"
    assert not find_alive(str(run))
    before = (run / "records.jsonl").read_bytes()
    code, _, err = dcpbench(capsys, *words, "--resume")
    after = (run / "records.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == before.count(b"\n") + 2, "only failed points run again"


def test_kv_capacity_of_a_started_server_is_compared_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang at tp4·dcp2 holds 1,000 pages of 16 tokens per rank, 32,000 in all; vLLM's log without dcp is named."""
    for name, flags, expected in (
        ("right", "--engine sglang", (32_000, 16_000, [])),
        ("wrong", "--no-kv-size-label --log-kv-tokens 16000", (16_000, 16_000, ["log"])),
    ):
        run, traces = tmp_path / name, tmp_path / "new" / name
        words = ["server", "--serve-cmd", f"{FAKE} {flags} --trace {TRACE}", "--model", "m", "--tp", "4"]
        words += ["--dcp", "2", *LOAD]
        code, _, err = dcpbench(capsys, *words, "--concurrency", "2", "--traces", str(traces), "-o", str(run))
        assert code == 0, err
        (record,) = read_run(run).records
        assert record.server is not None
        assert record.server.kv_sources is not None
        sources = record.server.kv_sources
        assert (record.server.kv_capacity_tokens, sources.log_tokens, sources.conflicts) == expected
        assert ("kv_sources_differ" in record.warnings) == bool(sources.conflicts)
        assert ("(by log), but the blocks that it reports hold 32,000" in err) == bool(sources.conflicts)
        assert traces.is_dir()


def serve_with_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str, report: str
) -> tuple[int, Record]:
    """Measure a server that writes SGLang's log of two H200 and `report`; return the exit code and the record."""
    log, engine = tmp_path / "engine.log", tmp_path / "engine.toml"
    log.write_text((ENGINE_LOGS / "sglang-0.5.17-tp2-dcp2.log").read_text() + report)
    engine.write_text(
        f'name = "sglang"\ncommand = "{FAKE} --engine sglang --engine-log {log} --health-delay 1.5"\n'
        '[weights]\nsynthetic = "--seed 0"\ndummy = "--seed 1"\n'
    )
    words = ["server", "--engine", str(engine), "--model", "m", "--weights", weights, "--tp", "2", "--concurrency", "2"]
    code, _, _ = dcpbench(capsys, *words, *LOAD, "-o", str(tmp_path / "run"))
    (record,) = read_run(tmp_path / "run").records
    return code, record


@pytest.mark.parametrize(
    ("weights", "report", "dummy"),
    [("dummy", "", True), ("synthetic", format_weights_report(0, "1a2b3c4d") + "\n", False)],
)
def test_record_of_a_started_server_has_its_settings_and_start_phases(
    weights: str, report: str, dummy: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points with dummy weights have a warning, which the first lines of the report show."""
    code, record = serve_with_weights(tmp_path, capsys, weights, report)
    assert (code, record.point.weights) == (0, weights)
    assert record.server is not None
    settings = record.server.settings
    assert settings is not None
    assert (settings.kv_dtype, settings.max_batched_tokens, settings.prefix_caching) == ("bfloat16", 8192, False)
    assert settings.exchange is None, "one rank holds the whole KV cache of a request"
    phases = [phase.name for phase in record.server.start]
    assert phases == ["starting", "loading weights", "allocating the KV cache", "capturing CUDA graphs", "warming up"]
    assert record.server.start[-1].seconds >= 1
    assert ("dummy_weights" in record.warnings) == dummy
    answer = (tmp_path / "run" / "report" / "report.md").read_text().split("\n\n")[:4]
    assert any("dummy weights of the engine" in part for part in answer) == dummy


def test_server_without_requested_synthetic_weights_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine starts, but no rank reports synthetic weights."""
    code, record = serve_with_weights(tmp_path, capsys, "synthetic", "")
    assert (code, record.outcome) == (4, "failed")
    assert "install dcpbench in the engine's Python environment, or add --weights model" in (record.reason or "")


@pytest.mark.long
def test_dead_server_fails_its_loads_and_the_next_server_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server crashes after half a second, and the second configuration is still started."""
    file = tmp_path / "engine.toml"
    file.write_text(f'name = "crashing"\ncommand = "{FAKE} --gap-ms 30"\n[flags]\ncrash-after = [1.0, 0]\n')
    run = tmp_path / "run"
    words = ["server", "--engine", str(file), "--model", "m", "--tp", "1", "--concurrency", "1,2,4", "--device", "cpu"]
    words += [
        "--num-requests",
        "8",
        "--input-tokens",
        "20",
        "--output-tokens",
        "8",
        "--client",
        "warm-up=0",
        "-o",
        str(run),
    ]
    code, _, _ = dcpbench(capsys, *words)
    assert code == 4
    outcomes: dict[str, list[str]] = {}
    for record in read_run(run).records:
        outcomes.setdefault(record.point.settings, []).append(record.outcome)
        if record.outcome == "failed":
            assert "the server di" in (record.reason or ""), "it died, or did not start on a busy machine"
    assert outcomes["crash-after=0"] == ["ok"] * 3
    assert "failed" in outcomes["crash-after=1.0"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seed", [1])
def test_no_process_is_left_however_the_command_ends(number: int, seed: int, tmp_path: Path) -> None:
    """The signal arrives while a server starts, serves or ends, and its child processes end too."""
    mark = f"mark-{number}-{seed}-{os.getpid()}"
    command = start_command(mark, "-o", str(tmp_path / "run"))
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as ours:
        time.sleep(random.Random(seed * 100 + number).uniform(0.3, 3.5))
        ours.send_signal(number)
        ours.wait(20)
    assert have_ended(mark)


def test_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes of the server are killed too, after the grace period."""
    monkeypatch.setattr("dcpbench.servers.launch.GRACE_S", 0.5)
    mark = f"stubborn-{os.getpid()}"
    port = find_free_port()
    words = (
        f"{sys.executable} -m tests.servers.fake_server --port {port} --ignore-sigterm --children 2 --version {mark}"
    )
    with Server(words.split(), tmp_path / "log", {}, port, "/health") as server:
        server.wait_until_ready(20)
        assert len(find_alive(mark)) >= 2
    assert have_ended(mark, 5)


def test_server_that_is_never_ready_raises_worker_error(tmp_path: Path) -> None:
    """The error quotes the last output of the server; a missing command raises an error too."""
    port = find_free_port()
    words = f"{sys.executable} -m tests.servers.fake_server --port {port} --health-delay 60"
    never = pytest.raises(WorkerError, match=r"took no requests within 6 s \(--timeout start\).*listening on")
    with Server(words.split(), tmp_path / "a", {}, port, "/health") as server, never:
        server.wait_until_ready(6)
    absent = pytest.raises(WorkerError, match="exit code 127: FileNotFoundError: /no/such/engine")
    with Server(["/no/such/engine"], tmp_path / "b", {}, port, "/health") as server, absent:
        server.wait_until_ready(10)


VLLMS = """(EngineCore_0 pid=7) ERROR 11-23 AssertionError: DCP not supported for X
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("Traceback …\nValueError: tp 3 does not divide 8 heads\n", "ValueError: tp 3 does not divide 8 heads"),
        (VLLMS, "AssertionError: DCP not supported for X"),
        ("usage: x\nx: error: unrecognized arguments: --dcp\n", "x: error: unrecognized arguments: --dcp"),
        (
            "\x1b[31mtorch.cuda.OutOfMemoryError: CUDA out of memory\x1b[0m\n",
            "torch.cuda.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "a.ValidationError: 1 validation error for VllmConfig\n  Value error, DCP needs more heads [type=value_error, x]\n    more",
            "a.ValidationError: 1 validation error for VllmConfig: Value error, DCP needs more heads",
        ),
        ("", "no output"),
    ],
)
def test_reason_quotes_the_root_cause_in_the_server_log(log: str, reason: str) -> None:
    """The reason is the cause, and not a later error that refers to it."""
    assert find_reason(log.encode()) == reason


NCCL = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, unhandled cuda error
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Failed to CUDA calloc 10485760 bytes

[2026-11-29 15:45:02] SIGQUIT received. It usually means one child failed.
Exception raised from sendBytes at Utils.hpp:653 (most recent call first):
"""  # SGLang 0.5.17 on a GPU without free memory
BOUND = "DistNetworkError: The server socket has failed to listen. port: 43761, name: EADDRINUSE, message: address already in use"


@pytest.mark.parametrize(
    ("log", "message", "cause", "advice"),
    [
        (
            NCCL,
            "ncclUnhandledCudaError: Call to CUDA function failed: Failed to CUDA calloc 10485760 bytes",
            Cause.MEMORY,
            "nvidia-smi",
        ),
        (
            "(Worker) torch.AcceleratorError: CUDA error: out of memory\n" + VLLMS.splitlines()[-1],
            "torch.AcceleratorError: CUDA error: out of memory",
            Cause.MEMORY,
            "--gpu-memory-utilization",
        ),
        (f"x torch.distributed.{BOUND}", f"torch.distributed.{BOUND}", Cause.PORT, "run the command again"),
        ("ValueError: tp 3", "ValueError: tp 3", Cause.UNKNOWN, ""),
    ],
    ids=["NCCL without memory", "memory", "port", "unknown"],
)
def test_known_causes_have_a_suggestion(log: str, message: str, cause: Cause, advice: str) -> None:
    found = find_exit_reason(log.encode())
    assert (found.message, found.cause) == (message, cause)
    assert advice in found.advice
    assert bool(advice) is bool(found.advice)


def test_server_with_an_occupied_port_raises_an_error_with_a_suggestion(tmp_path: Path) -> None:
    code = f"import sys; sys.exit('torch.distributed.{BOUND}')"
    with (
        Server([sys.executable, "-c", code], tmp_path / "log", {}, 1, "/health") as server,
        pytest.raises(WorkerError) as error,
    ):
        server.wait_until_ready(20)
    assert str(error.value).startswith(
        f"the server did not start: it ended with exit code 1: torch.distributed.{BOUND}."
    )
    assert "Another process took a port" in str(error.value)
    assert server.exit_cause == Cause.PORT


def make_preset_args(name: str, **layout: int) -> str:
    """Return the command line of a preset for a layout."""
    degrees = {"tp": 1, "dp": 1, "dcp": 1} | layout
    load = make_engine_load(requests=1, input_tokens="1", output_tokens="1")
    point = make_engine_point(
        model="m", layout=degrees, backend=name, load=load, concurrency=1, context=2, precision={"dtype": "unknown"}
    )
    return " ".join(PRESETS[name].make_command(point, {"max-num-seqs": "4", "enforce-eager": "True"}, "m", 7))


def test_presets_translate_layouts_to_engine_flags() -> None:
    """vLLM's tensor-parallel degree is per replica, whereas SGLang's counts all ranks."""
    vllm = "vllm serve m --host 127.0.0.1 --port 7"
    assert make_preset_args("vllm") == f"{vllm} --max-num-seqs 4 --enforce-eager"
    assert f"{vllm} --tensor-parallel-size 8 --decode-context-parallel-size 8" in make_preset_args("vllm", tp=8, dcp=8)
    assert "--tensor-parallel-size 2 --data-parallel-size 4" in make_preset_args("vllm", tp=8, dp=4)
    assert "--tp-size 8 --dp-size 4 --enable-dp-attention --dcp-size 2" in make_preset_args("sglang", tp=8, dp=4, dcp=2)


DP_FILE = 'name = "vllm"\ncommand = "vllm serve {model} --port {port}"\n[layout]\ndp = "--data-parallel-size {dp}"\n'


@pytest.mark.parametrize(
    ("content", "arguments", "dp", "requested", "ep"),
    [
        (DP_FILE, None, 2, None, "1"),
        (DP_FILE, None, 1, None, "unknown"),
        (DP_FILE, None, 2, "2", "2"),
        (DP_FILE, "--enable-expert-parallel", 2, None, "unknown"),
        (DP_FILE + "[flags]\nenable-expert-parallel = true\n", None, 2, None, "unknown"),
        (DP_FILE + "[flags]\nenable-expert-parallel = false\n", None, 2, None, "1"),
        (DP_FILE.replace("{dp}", "{dp} -ep"), None, 2, None, "unknown"),
        (DP_FILE.replace('name = "vllm"', 'name = "sglang"'), "--ep-size=2", 2, None, "unknown"),
        (DP_FILE.replace('name = "vllm"', 'name = "own"'), None, 2, None, "unknown"),
    ],
)
def test_expert_parallel_degree_with_dp_attention_depends_on_engine_flags(
    content: str, arguments: str | None, dp: int, requested: str | None, ep: str, tmp_path: Path
) -> None:
    """`server` and `verify --engine` have the same default, for a preset and for an engine file of the same name."""
    (tmp_path / "engine.toml").write_text(content)
    engine = resolve_engine(str(tmp_path / "engine.toml"), None, arguments)
    assert choose_ep(engine, dp, requested) == ep
    grid = Grid(model="m", layouts=[Layout(tp=2, dp=dp)], ep=requested or "unknown")
    (setting,) = list_all_settings([engine], grid, [])
    assert setting.point.ep == ep
    given: dict[str, object] = {"tp": 2, "dp": dp} | ({} if requested is None else {"ep": requested})
    assert _add_default_ep(engine, given).get("ep", "unknown") == ep


def test_server_is_started_with_its_profiler_for_traces() -> None:
    """vLLM needs flags with the folder; SGLang needs an environment variable, and always has metrics enabled."""
    load = make_engine_load(requests=1, input_tokens="1", output_tokens="1")
    degrees = {"tp": 1, "dp": 1, "dcp": 1}
    point = make_engine_point(
        model="m", layout=degrees, backend="x", load=load, concurrency=1, context=2, precision={"dtype": "unknown"}
    )
    vllm = PRESETS["vllm"].make_command(point, {}, "m", 7, traces="/t")
    assert vllm[-4:] == ["--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", "/t"]
    assert "/t" not in PRESETS["vllm"].make_command(point, {}, "m", 7)
    assert PRESETS["sglang"].make_command(point, {}, "m", 7, traces="/t")[-1] == "--enable-metrics"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('command = "x {port}"', "missing required field `name`"),
        ('name = "x"\ncommand = "x"', "has no {port}"),
        ('name = "x"\ncommand = "x {port} {tpp}"', "{tpp} is no placeholder; these are: model"),
        ('name = "x"\ncommand = "x {port"', "cannot be read"),
        ('name = "x"\ncommand = "x {port} {tp!z}"', "{tp!z} is no placeholder"),
        ('name = "x"\ncommand = "x {port} {tp:zz}"', "{tp:zz} is no placeholder"),
        ("name = 'x'\ncommand = 'x {port} \"'", "close every quote"),
        ('name = ""\ncommand = "x {port}"', "name is empty"),
        ('name = "x"\ncommand = "x {port}"\n[env]\n"A=B" = "1"', "env.A=B is no environment variable"),
        ('name = "x"\ncommand = "x {port}"\nready = "health"', "is no path"),
        ('name = "x"\ncommand = "x {port}"\n[flags]\na = []', "flags.a is empty"),
        ('name = "x"\ncommand = "x {port}"\n[layout]\ntpp = "-tpp 2"', "layout.tpp is none of"),
        ("name = ", "is not valid TOML"),
        ("name = " + "[" * 3000, "is not valid TOML: it is nested too deep"),
    ],
)
def test_invalid_engine_file_raises_usage_error(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        resolve_engine(str(path), None)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engine vlm --model m", "is none of vllm, sglang"),
        ("--engine nowhere.toml --model m", "No such file"),
        ("--engine vllm", "--engine needs --model"),
        ("--engine vllm --model m --tp 3 --dcp 2", "dcp"),
        ("--serve-cmd x --model m", "has no {port}"),
        ("--serve-cmd x'{port} --model m", "close every quote"),
        ("--serve-cmd {port}", "--serve-cmd needs --model"),
        ("--engine vllm --model m --gpu count=8", "--gpu count is for --url"),
        ("--engine vllm --model m,n", "--model m,n: a server has one value"),
        (
            "--engine vllm --model m --backend triton",
            "--backend is an option of `dcpbench serve`, which measures dcpbench's own engine.",
        ),
    ],
)
def test_invalid_options_are_refused_before_a_server_starts(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = dcpbench(capsys, "server", *words.split())
    assert code == 2
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["server", "sweep", "verify"])
@pytest.mark.parametrize(
    ("degrees", "named"),
    [("--tp 1,2 --dcp 1", "--tp"), ("--tp 4 --dp 1,2 --dcp 1", "--dp"), ("--tp 4 --dcp 1,2", "--dcp")],
)
def test_layouts_with_the_same_command_are_refused(
    command: str, degrees: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The servers would be the same, and their points would be compared as different layouts."""
    file = tmp_path / "e.toml"
    file.write_text('name = "x"\ncommand = "x --port {port}"')
    code, _, err = dcpbench(capsys, command, "--engine", str(file), "--model", "m", *degrees.split(), "--dry-run")
    assert (code, f"servers with different {named} would have the same command" in err) == (2, True)


@pytest.mark.parametrize("command", ["sweep", "verify"])
@pytest.mark.parametrize(
    "option", ["--page-size interleave=4", "--collectives q-replicate=yes", "--kv-dtype fp8", "--ep 3"]
)
def test_option_without_flags_in_the_engine_file_is_refused(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server would run without the option, and the record would state it."""
    file = tmp_path / "e.toml"
    file.write_text('name = "x"\ncommand = "x --port {port} {tp} {dcp}"\n[layout]\nep = "--ep"')
    words = ["--engine", str(file), "--model", "m", "--tp", "2", "--dcp", "2", *option.split(), "--dry-run"]
    code, out, err = dcpbench(capsys, command, *words)
    assert (code, f"x has no {option.removesuffix('=yes')}" in out + err) == (2, True)


def test_expert_parallelism_is_an_axis_of_started_servers(capsys: pytest.CaptureFixture[str]) -> None:
    """`4` and `tp` are the same degree at tp 4, so two servers are started."""
    code, _, err = dcpbench(
        capsys, *["server", "--engine", "vllm", "--model", "m", "--tp", "4", "--ep", "1,tp,4", "--dry-run"]
    )
    flags = [line for line in err.splitlines() if line.startswith("vllm serve")]
    assert (code, ["--enable-expert-parallel" in line for line in flags]) == (0, [False, True])


def test_dry_run_prints_each_server_command_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = dcpbench(
        capsys,
        "server",
        "--engine",
        "vllm",
        "--model",
        "m",
        "--tp",
        "8",
        "--dcp",
        "1,8",
        "--concurrency",
        "8,32",
        "--dry-run",
    )
    assert code == 0
    assert err.count("vllm serve m") == 2
    assert "--decode-context-parallel-size 8" in err


def test_flags_with_lists_are_axes() -> None:
    """Each combination of the lists is one configuration, and other flags are common to all."""
    made = Engine(name="x", command="x {port}", flags={"a": [1, 2], "b": ["x", "y"], "c": 3})
    assert made.list_settings() == [{"a": a, "b": b} for a in ("1", "2") for b in ("x", "y")]


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (signal.SIGKILL, 137)])
def test_guard_exits_with_the_code_of_its_server(status: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal becomes 128 plus its number as in a shell, and remaining child processes are ended first."""
    ended: list[float] = []
    waits = iter([(0, 0), (77, status)])
    monkeypatch.setattr(process_group.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(process_group.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process_group.os, "fork", lambda: 77)
    monkeypatch.setattr(process_group.os, "waitpid", lambda *_: next(waits))
    monkeypatch.setattr(process_group.time, "sleep", lambda _: None)
    monkeypatch.setattr(process_group, "_stop_all", ended.append)
    assert process_group.main(os.getppid(), 5.0, ["serve"]) == code
    assert ended == [5.0]
    assert process_group.main(-1, 5.0, ["serve"]) == 1, "the parent process is gone"


def test_guard_is_run_by_path_and_reads_its_command_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forked process executes the command; no process is forked if the parent is gone."""

    def begin(*command: object) -> None:
        raise RuntimeError(*command)

    monkeypatch.setattr(process_group.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(process_group.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process_group.os, "fork", lambda: 0)
    monkeypatch.setattr(process_group.os, "setpgid", lambda *_: None)
    monkeypatch.setattr(process_group.os, "execvp", begin)
    monkeypatch.setattr(process_group.os, "dup2", lambda *_: None)
    requested = json.dumps({"command": ["serve", "--port", "1"], "secrets": [], "placeholder": ""})
    monkeypatch.setattr(sys, "stdin", io.StringIO(requested))
    monkeypatch.setattr(sys, "argv", ["process_group.py", str(os.getppid()), "2.5"])
    with pytest.raises(RuntimeError) as began:
        runpy.run_path(process_group.__file__, run_name="__main__")
    assert began.value.args == ("serve", ["serve", "--port", "1"])
    sys.argv[1] = "-1"
    monkeypatch.setattr(sys, "stdin", io.StringIO(requested))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(process_group.__file__, run_name="__main__")
    assert ended.value.code == 1


class Below:
    """Simulate child processes of a guard, which end some polls after a signal; one starts another as it ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lives: dict[int, tuple[int, int]]) -> None:
        """`lives`: looks that a process is there behind SIGTERM, and behind SIGKILL."""
        self.lives, self.got, self.now = lives, list[tuple[int, int]](), 0.0
        self.left: dict[int, int] = dict.fromkeys(lives, 1 << 30)
        monkeypatch.setattr(
            process_group, "list_descendants", lambda _: [pid for pid, left in self.left.items() if left > 0]
        )
        monkeypatch.setattr(process_group, "_reap_children", lambda: None)
        monkeypatch.setattr(process_group.os, "kill", self.kill)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(process_group, "time", clock)

    def kill(self, pid: int, number: int) -> None:
        self.got.append((pid, number))
        behind = self.lives[pid][number == signal.SIGKILL]
        self.left[pid] = min(self.left[pid], behind)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.left = {pid: left - (left < 1 << 30) for pid, left in self.left.items()}


def test_descendants_of_a_guard_get_sigterm_and_then_sigkill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 7 ends on SIGTERM; process 8 ignores it and is killed after its grace period."""
    below = Below(monkeypatch, {7: (2, 1), 8: (1 << 30, 1)})
    process_group._stop_all(1.0)
    assert below.got[:2] == [(7, signal.SIGTERM), (8, signal.SIGTERM)]
    assert set(below.got[2:]) == {(8, signal.SIGKILL)}
    assert below.now == pytest.approx(1.0 + process_group.POLL_INTERVAL_S, abs=2 * process_group.POLL_INTERVAL_S)


def test_guard_does_not_wait_longer_if_all_descendants_end_on_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    below = Below(monkeypatch, {7: (2, 1), 8: (4, 1)})
    process_group._stop_all(60.0)
    assert [number for _, number in below.got] == [signal.SIGTERM] * 2
    assert below.now == pytest.approx(4 * process_group.POLL_INTERVAL_S)


def test_descendants_are_found_at_any_depth() -> None:
    """The processes are a shell and the child that it waits for."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        while not (found := process_group.list_descendants(shell.pid)):
            time.sleep(0.01)
        assert shell.pid in process_group.list_descendants(os.getpid())
        assert set(found) <= set(process_group.list_descendants(os.getpid()))
        os.kill(found[0], signal.SIGKILL)
        shell.wait()
    assert process_group.list_descendants(shell.pid) == []


def test_last_of_several_errors_is_the_reason() -> None:
    """The server continued after the earlier errors."""
    log = b"ValueError: no such cache\nretrying\nRuntimeError: out of memory\nbye\n"
    assert find_reason(log) == "RuntimeError: out of memory"


def test_exchange_flag_is_passed_only_with_dcp() -> None:
    """An exchange that the engine lacks is an error."""
    load = make_engine_load(requests=1, input_tokens="1", output_tokens="1")
    engine = Engine(name="x", command="x {port}", layout={"exchange": "--exchange {exchange}"}, exchanges=("a2a",))
    for dcp, exchange, passed in ((4, "a2a", True), (1, "a2a", False), (4, "none", False)):
        point = make_engine_point(
            model="m",
            layout={"tp": 4, "dp": 1, "dcp": dcp},
            backend="x",
            load=load,
            concurrency=1,
            context=2,
            precision={"dtype": "unknown"},
        )
        point = msgspec.structs.replace(point, exchange=exchange)
        assert ("--exchange a2a" in " ".join(engine.make_command(point, {}, "m", 7))) is passed
    with pytest.raises(UsageError, match="x has no --exchange symm"):
        engine.make_command(msgspec.structs.replace(point, exchange="symm"), {}, "m", 7)


@pytest.mark.parametrize("ends", [True, False], ids=["ends on SIGTERM", "never ends"])
def test_server_is_killed_after_both_grace_periods(ends: bool) -> None:
    """Descendants have 10 s to end on SIGTERM and 10 s more, and the guard has 5 s."""
    did: list[object] = []

    class Guard:
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

        def send_signal(self, number: int) -> None:
            did.append(signal.Signals(number))

        def wait(self, timeout: float | None = None) -> None:
            did.append(timeout)
            if timeout is not None and not ends:
                raise subprocess.TimeoutExpired("guard", timeout)
            self.code = 0

        def kill(self) -> None:
            did.append("killed")

    server = Server.__new__(Server)
    server._guard = Guard()  # type: ignore[assignment]
    server.stop()
    assert did == [signal.SIGTERM, 25.0, *([] if ends else ["killed", None])]
    did.clear()
    server.stop()
    assert did == [], "the server has ended"


def make_server_point(**changes: str) -> Point:
    """Return a point on one GPU."""
    load = make_engine_load(input_tokens="2", output_tokens="1", requests=1)
    layout = {"tp": 1, "dp": 1, "dcp": 1}
    return make_engine_point(
        model="m",
        layout=layout,
        backend="x",
        load=load,
        concurrency=1,
        context=2,
        precision={"dtype": "unknown"},
        **changes,
    )


def test_engine_arguments_are_appended_to_its_command() -> None:
    """Braces of JSON are kept, and quotes group a word with blanks."""
    engine = resolve_engine("vllm", None, """--max-model-len 70000 --compilation-config '{"mode": 0}'""")
    words = engine.make_command(make_server_point(), {}, "m", 80)
    assert words[-4:] == ["--max-model-len", "70000", "--compilation-config", '{"mode": 0}']
    with pytest.raises(UsageError, match=r"--engine-args: .* close every quote"):
        resolve_engine("vllm", None, "--x '")


@pytest.mark.parametrize(
    ("engine", "weights", "flags"),
    [
        ("vllm", "synthetic", ["--load-format", "dcpbench"]),
        ("vllm", "dummy", ["--load-format", "dummy"]),
        ("vllm", "unknown", []),
        ("sglang", "synthetic", ["--load-format", "dummy"]),
    ],
)
def test_presets_have_flags_for_synthetic_weights(engine: str, weights: str, flags: list[str]) -> None:
    words = PRESETS[engine].make_command(make_server_point(weights=weights), {}, "m", 80)
    assert words[len(words) - len(flags) :] == flags
    assert ("--load-format" in words) == bool(flags)


def test_each_exchange_needs_a_server_and_unknown_ones_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts without dcp have no exchange, so tp2 is served once."""
    words = (
        "server --engine vllm --model m --tp 2 --dcp 1,2 --exchange ag_rs,a2a,symm --concurrency 1 --gpu H200 --dry-run"
    )
    code, out, err = dcpbench(capsys, *words.split())
    assert code == 0
    commands = [line for line in err.splitlines() if line.startswith("vllm serve")]
    assert [line.partition("--tensor-parallel-size 2")[2].split() for line in commands] == [
        [],
        ["--decode-context-parallel-size", "2", "--dcp-comm-backend", "ag_rs"],
        ["--decode-context-parallel-size", "2", "--dcp-comm-backend", "a2a"],
    ]
    assert "vllm has no --exchange symm; leave that out" in out + err
    assert "It has --exchange ag_rs,a2a." in out + err


def test_folder_without_a_checkpoint_gets_synthetic_weights(tmp_path: Path) -> None:
    """Synthetic weights need flags of the engine; a model name that is no folder is passed to the engine."""
    (tmp_path / "config.json").touch()
    bare = Engine(name="own", command="x {port}")
    assert choose_weights(PRESETS["vllm"], str(tmp_path), None) == "synthetic"
    assert choose_weights(bare, str(tmp_path), None) == "unknown"
    assert choose_weights(PRESETS["vllm"], "deepseek-ai/DeepSeek-V3", None) == "unknown"
    assert choose_weights(PRESETS["vllm"], str(tmp_path), "model") == "unknown"
    with pytest.raises(UsageError, match=r"own has no flags for it; add them to the engine's file, under \[weights\]"):
        choose_weights(bare, str(tmp_path), "dummy")
    with pytest.raises(UsageError, match="--weights real is none of model, synthetic, dummy"):
        choose_weights(PRESETS["vllm"], str(tmp_path), "real")
    (tmp_path / "model-00001.safetensors").touch()
    assert choose_weights(PRESETS["vllm"], str(tmp_path), None) == "unknown"
