"""Test `sweep --engine`: decode points of a served engine, with phases, warnings and refusals."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding, StepRows, compute_step_floors
from dcpbench.records.record import EngineSettings, Rates, Server
from dcpbench.records.runs import Run, read_run
from dcpbench.reports import dataframes, explain, joined_runs, overview
from dcpbench.servers import step_points
from dcpbench.servers.engine_flags import read_limits
from dcpbench.servers.presets import PRESETS, Engine, use_step_profiler
from dcpbench.servers.step_floors import compute_engine_floor, read_rates
from dcpbench.servers.step_points import StepPoints, make_case
from dcpbench.servers.step_probe import ServerLimits
from tests.servers.step_engine import KERNELS, StepEngine, compute_step_ms
from tests.unit import record_builder
from tests.unit.record_builder import make_point

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.records.record import Record

ROOT = Path(__file__).parents[2]
POINTS = ["--model", "m", "--context", "100", "--seconds", "0.6", "--tp", "2"]
ENGINE = """
name = "vllm"
command = "{python} -m tests.servers.step_engine --model {{model}} --port {{port}}"
profiler = "{profiler}"
[layout]
tp = "--tensor-parallel-size {{attn_tp}}"
dcp = "--decode-context-parallel-size {{dcp}} {dcp_flags}"
exchange = "--dcp-comm-backend {{exchange}}"
[weights]
dummy = "--load-format dummy"
"""
PROFILER = "--traces {traces}"
Asked = tuple[int, str, str]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the stand-in engine importable by its module's name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def _choose_cpu(words: tuple[str, ...]) -> list[str]:
    return [] if "--device" in words else ["--device", "cpu"]


class Sweep:
    """Run `dcpbench sweep --engine` on the stand-in engine."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.run, self.capsys = folder, folder / "run", capsys

    def __call__(self, *words: str, concurrency: str = "2", dcp_flags: str = "", profiler: str = PROFILER) -> Asked:
        """Return exit code, stdout and stderr of the command; `dcp_flags` are flags of servers with dcp 2."""
        engine = self.folder / "engine.toml"
        engine.write_text(ENGINE.format(python=sys.executable, dcp_flags=dcp_flags, profiler=profiler))
        words = ("--concurrency", concurrency, *POINTS, *_choose_cpu(words), *words, "-o", str(self.run))
        with pytest.raises(SystemExit) as end:
            cli.main(["sweep", "--engine", str(engine), *words])
        return int(end.value.code or 0), *self.capsys.readouterr()

    @property
    def records(self) -> list[Record]:
        """Return the records of the run."""
        return read_run(self.run).records


@pytest.fixture
def sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Sweep:
    """Return a sweep in a temporary folder."""
    return Sweep(tmp_path, capsys)


def test_point_has_step_time_phases_and_server_facts(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """2 requests at 100 tokens take 20 + 2 · 0.5 + 200 · 0.001 = 21.2 ms.

    Kernels of four parts take 90 % of it, and 2 % more on rank 1. Both ranks have the same step, and the record has
    the first rank. Traces are deleted.
    """
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    code, out, err = sweep("--dcp", "1,2", "--weights", "dummy", "--json")
    assert code == 0, err
    assert json.loads(out)["ok"] == 2
    expected = compute_step_ms([100, 100], [])
    for record in sweep.records:
        assert record.metrics is not None
        assert 0.97 * expected <= record.metrics.step_ms.median <= 1.5 * expected
        assert record.metrics.output_tok_s.median == pytest.approx(2e3 / record.metrics.step_ms.median)
        assert (record.point.workload, record.point.backend, record.point.load) == ("decode", "vllm", None)
        phases = record.phases
        assert phases is not None
        shares = [KERNELS[name] for name in ("flash_fwd_splitkv_mla_kernel", "nvjet_tst_gemm")]
        assert phases.phase_us["attention"] / phases.step_us == pytest.approx(shares[0], rel=0.03)
        assert phases.phase_us["projections"] / phases.step_us == pytest.approx(shares[1], rel=0.03)
        assert set(phases.phase_us) == {"attention", "projections", "all-reduce", "unknown"}
        assert sum(phases.phase_us.values()) + phases.idle_us == pytest.approx(phases.step_us)
        assert (phases.kernels, record.host_syncs_per_step) == (len(KERNELS), 0)
        assert {"cpu", "dummy_weights"} <= set(record.warnings)
        assert isinstance(record.server, Server)
        assert record.server.settings is not None
        assert record.server.settings.max_batched_tokens == 512
        assert record.server.start
        assert "measured_context" in record.server.facts
    assert [r.point.dcp for r in sweep.records] == [1, 2]
    assert [path for path in temporary.rglob("*") if path.is_file()] == []


def test_traces_are_kept_in_the_given_folder(sweep: Sweep, tmp_path: Path) -> None:
    traces = tmp_path / "kept" / "traces"
    code, _, err = sweep("--dcp", "1", "--traces", str(traces))
    assert code == 0, err
    assert len(list(traces.glob("*rank*"))) == 2


def test_no_profile_option_starts_no_profiler(sweep: Sweep) -> None:
    """The server is started without flags of the profiler."""
    code, _, err = sweep("--dcp", "1", "--no-profile")
    assert code == 0, err
    [record] = sweep.records
    assert record.phases is None
    assert record.host_syncs_per_step is None
    assert isinstance(record.server, Server)
    assert "--traces" not in record.server.facts["command"]
    assert "not_profiled" not in record.server.facts


def test_engine_without_profiler_is_still_timed(sweep: Sweep) -> None:
    """The record states why it has no phases."""
    code, _, err = sweep("--dcp", "1", profiler="")
    assert code == 0, err
    [record] = sweep.records
    assert record.metrics is not None
    assert record.phases is None
    assert isinstance(record.server, Server)
    assert "/start_profile" in record.server.facts["not_profiled"]
    assert "was not profiled" in err


def test_dead_engine_fails_only_its_own_points(sweep: Sweep) -> None:
    """The server of dcp 2 dies in its 30th step; its first point takes more than 20 steps."""
    code, _, err = sweep("--dcp", "1,2", "--no-profile", concurrency="1,2", dcp_flags="--dies-after 30")
    assert code == 4, err
    outcomes = {(r.point.dcp, r.point.concurrency): r.outcome for r in sweep.records}
    assert outcomes == {(1, 1): "ok", (1, 2): "ok", (2, 1): "failed", (2, 2): "failed"}
    assert all("illegal memory access" in str(r.reason) for r in sweep.records if r.outcome == "failed")


def test_resume_measures_only_missing_points(sweep: Sweep) -> None:
    """One of two points is already measured."""
    assert sweep("--dcp", "1", "--no-profile")[0] == 0
    [first] = sweep.records
    code, _, err = sweep("--dcp", "1", "--no-profile", "--resume", concurrency="2,3")
    assert code == 0, err
    assert "1 already measured" in err
    assert sweep.records[0].started_at == first.started_at
    assert [r.point.concurrency for r in sweep.records] == [2, 3]


def test_point_interrupted_by_sigint_is_measured_again(sweep: Sweep, tmp_path: Path) -> None:
    """SIGINT arrives while the second point decodes, as from `timeout -s INT`, and its record states that."""
    words = [
        "--engine",
        str(tmp_path / "engine.toml"),
        *POINTS,
        "--concurrency",
        "2,3",
        "--dcp",
        "1",
    ]
    sweep("--dry-run")  # writes the engine file
    words = [sys.executable, "-m", "dcpbench", "sweep", *words, "--no-profile", "--device", "cpu", "-o", str(sweep.run)]
    lines = []
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line.startswith("[1/2]"):
                time.sleep(0.4)  # the second point decodes now; earlier it would have no record
                process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, "".join(lines)
    assert any("--resume" in line for line in lines)
    assert any(f"dcpbench report {sweep.run}" in line for line in lines)
    first, *others = [(r.point.concurrency, r.outcome, r.reason) for r in sweep.records]
    assert first == (2, "ok", None)
    assert others in ([], [(3, "failed", "interrupted before its steps had been measured.")])
    assert "tp2 can run" in overview.format_answer(dataframes.load_frames([sweep.run]))
    code, _, err = sweep("--dcp", "1", "--no-profile", "--resume", concurrency="2,3")
    assert code == 0, err
    assert "1 point to run, 1 already measured" in err
    last = {r.point.concurrency: r.outcome for r in sweep.records}
    assert last == {2: "ok", 3: "ok"}


def test_dry_run_lists_points_commands_and_refusals(sweep: Sweep) -> None:
    """4 requests do not fit into --max-num-seqs 3, and the reason names the flag to change."""
    code, out, err = sweep("--dcp", "1,2", "--engine-args", "--max-num-seqs 3", "--dry-run", concurrency="2,4")
    assert code == 0
    assert out.count("2 × 100") == 2
    assert "--max-num-seqs 4" in out
    assert err.count("tests.servers.step_engine") == 2
    assert not sweep.run.exists()


@pytest.mark.parametrize(
    ("name", "heading", "degrees"),
    [("vllm", "vLLM degrees", "dp2·tp1·dcp1"), ("sglang", "SGLang degrees", "tp2·dp2·dcp1"), ("mine", "", "")],
)
def test_dry_run_has_the_degrees_of_the_started_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, heading: str, degrees: str
) -> None:
    """SGLang's --tp-size counts all ranks, and flags of an unknown engine appear only in its command."""
    engine = tmp_path / "engine.toml"
    engine.write_text(
        f'name = "{name}"\ncommand = "serve {{model}} --port {{port}}"\n[layout]\ntp = "--x {{tp}}"\ndp = "--y {{dp}}"\n'
    )
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--engine", str(engine), *POINTS, "--dp", "2", "--dcp", "1", "--dry-run", "--device", "cpu"])
    out = capsys.readouterr().out
    assert [word for word in ("vLLM degrees", "SGLang degrees") if word in out] == ([heading] if heading else [])
    assert [word for word in ("dp2·tp1·dcp1", "tp2·dp2·dcp1") if word in out] == ([degrees] if degrees else [])


def test_dry_run_reads_the_rates(sweep: Sweep, tmp_path: Path) -> None:
    """A folder without rates is an error before a server starts."""
    code, _, err = sweep("--dry-run", "--rates", str(tmp_path / "none"))
    assert code == 2
    assert str(tmp_path / "none") in err
    folder = record_builder.write_records(tmp_path / "ours", [record_builder.make_ok_record(make_point(Layout(2)))])
    code, _, err = sweep("--dry-run", "--rates", str(folder))
    assert code == 2
    assert "no point of this run has measured rates" in err


def test_default_layouts_are_dcp_1_and_the_largest_dcp(sweep: Sweep) -> None:
    """--no-baseline removes dcp 1, as for dcpbench's own engine."""
    assert sweep("--dry-run")[2].count("tests.servers.step_engine") == 2
    _, out, err = sweep("--dry-run", "--no-baseline")
    assert err.count("tests.servers.step_engine") == 1
    assert "tp2·dcp2" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--backend", "triton"), "--backend"),
        (("--collectives", "all-reduce=symm"), "--collectives all-reduce"),
        (("--emulate", "H200"), "--emulate"),
        (("--kv-memory", "10GiB"), "--kv-memory"),
        (("--baseline",), "--baseline"),
        (("--nodes", "2,endpoint=10.0.0.1:29500"), "--nodes"),
        (("--timeout", "point=60"), "--timeout point"),
        (("--timeout", "0"), "--timeout 0 is not a positive number"),
        (("--device", "tpu"), "--device"),
        (("--kv-dtype", "bf16"), "--kv-dtype"),
        (("--ep", "1,tp"), "--ep"),
        (("--traces", "x", "--no-profile"), "--traces"),
        (("--weights", "nonsense"), "--weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_of_the_own_engine_are_refused(
    sweep: Sweep, words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPBENCH_SECRET", "x" * 32)
    code, _, err = sweep(*words)
    assert code == 2
    assert named in err
    assert not sweep.run.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--engine-args", "--x"), "--engine-args"),
        (("--traces", "x"), "--traces"),
        (("--timeout", "start=5"), "--timeout start"),
    ],
    ids=str,
)
def test_options_of_engines_need_an_engine(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["sweep", "--device", "cpu", *words])
    assert end.value.code == 2
    assert f"{named} needs an engine" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [True, False])
def test_traces_are_deleted_after_reading(tmp_path: Path, keep: bool) -> None:
    """Traces of many points would fill the disk; a trace of the front end has no steps."""
    engine = StepEngine(argparse.Namespace(traces=str(tmp_path), tensor_parallel_size=2))
    engine.traced = [(21_000.0, 0, 4)] * 6
    engine.write_traces()
    measured = step_points._Measured()
    points = StepPoints(limits=lambda _: ServerLimits(), keep_traces=keep)
    asyncio.run(points._read_profile(tmp_path, {}, 10.0, 21.0, measured, lambda _: None))
    assert measured.phases is not None
    assert measured.phases.step_us == pytest.approx(21_000)
    assert measured.waits == (0, [])
    assert len(list(tmp_path.iterdir())) == (3 if keep else 0)


def test_limits_are_read_from_the_flags_of_both_engines() -> None:
    """The last occurrence of a flag counts, as in the engines' own parsers."""
    vllm = ["vllm", "serve", "m", "--max-num-seqs", "8", "--max-model-len=4096", "--max-num-seqs=16"]
    assert read_limits(vllm) == ServerLimits(max_requests=16, max_model_len=4096)
    sglang = ["--chunked-prefill-size", "2048", "--context-length", "70000", "--max-running-requests", "x"]
    assert read_limits(sglang) == ServerLimits(max_batched_tokens=2048, max_model_len=70000)


def test_requests_of_a_step_are_spread_over_replicas() -> None:
    """9 requests run on 2 replicas; vLLM's --max-num-seqs is per replica, SGLang's --max-running-requests for both."""
    found = make_case(msgspec.structs.replace(make_point(Layout(2, 2, 1)), concurrency=9, context=4000))
    assert [(d.requests, d.context) for d in found.decodes] == [(9, 4000)]
    assert read_limits(["--max-num-seqs", "8"], 2).max_requests == 16
    assert read_limits(["--max-running-requests", "8"], 2).max_requests == 8


def test_kv_cache_limited_by_flags_is_counted_over_all_ranks() -> None:
    """10 blocks of 64 tokens on each of vLLM's 2 · 4 ranks hold 5,120; an unknown block size counts as 128."""
    assert read_limits(["--num-gpu-blocks-override=10", "--block-size", "64"], 2, 4).kv_tokens == 5120
    assert read_limits(["--num-gpu-blocks-override", "10", "-pcp", "2"]).kv_tokens == 2560
    assert read_limits(["--max-total-tokens", "1000"], 2, 4).kv_tokens == 8000
    assert read_limits(["--block-size", "64"]).kv_tokens is None


def test_engines_profile_steps_without_python_stacks() -> None:
    """Recording stacks takes longer than a short step; a file with the preset's profiler gets no stacks either."""
    without = PRESETS["vllm"].step_profiler
    assert "torch_profiler_with_stack false" in without
    file_engine = Engine(name="vllm", command="x {port}", profiler=PRESETS["vllm"].profiler)
    other = Engine(name="vllm", command="x {port}", profiler="--mine {traces}")
    assert [use_step_profiler(e).profiler for e in (PRESETS["vllm"], file_engine, other)] == [
        without,
        without,
        other.profiler,
    ]
    assert use_step_profiler(PRESETS["sglang"]).env["SGLANG_PROFILE_WITH_STACK"] == "false"


RATES = Rates(read_bytes_s=4e12, copy_bytes_s=3.5e12, matmul_flop_s=7e14, matmul_fp8_flop_s=1.4e15)
PEERS = msgspec.structs.replace(RATES, peer_bytes_s=4e11, barrier_us=4.0)
FP8_SETTINGS = EngineSettings(dtype="bfloat16", weights_dtype="fp8")


def make_engine_point(tp: int, dcp: int) -> Point:
    """Return a decode point of vLLM."""
    unknown = {"dtype": "unknown", "page_size": 0, "all_reduce": "unknown", "ep": "unknown", "backend": "vllm"}
    return msgspec.structs.replace(make_point(Layout(tp, 1, dcp)), model="deepseek-v3", **unknown)


def test_floor_of_an_engine_equals_that_of_the_own_step() -> None:
    """Work and rates are equal; all-reduce covers both sums of a layer, and mixed parts have no floor."""
    own = make_engine_point(2, 2)
    found = compute_engine_floor(own, FP8_SETTINGS, {2: PEERS})
    assert found is not None
    known = msgspec.structs.replace(own, dtype="bf16", weights_dtype="fp8", kv_dtype="bf16", ep="1")
    step = StepRows(decodes=(own.context + 1,) * own.concurrency, sampled=own.concurrency, tokens=own.concurrency)
    phases = compute_step_floors(Sharding.from_point(known, load_shape("deepseek-v3")), step, PEERS.limits)
    assert phases is not None
    assert found[0] == PEERS
    assert found[1].floor_ms == pytest.approx(sum(phases.values()) / 1e3)
    assert found[1].phase_floor_us == pytest.approx(
        {
            "attention": phases["attention"],
            "KV cache write": phases["kv_write"],
            "all-reduce": phases["attn_reduce"] + phases["mlp_reduce"],
        }
    )


@pytest.mark.parametrize(
    ("changes", "settings", "rates"),
    [
        ({}, FP8_SETTINGS, {4: PEERS}),
        ({}, FP8_SETTINGS, {2: RATES}),
        ({}, None, {2: PEERS}),
        ({}, EngineSettings(dtype="bfloat16", weights_dtype="awq"), {2: PEERS}),
        ({"model": "someone/else"}, FP8_SETTINGS, {2: PEERS}),
    ],
    ids=["other number of GPUs", "no rate between GPUs", "no settings", "weights without a floor", "unknown sizes"],
)
def test_floor_is_unknown_without_its_inputs(
    changes: dict[str, Any], settings: EngineSettings | None, rates: dict[int, Rates]
) -> None:
    own = msgspec.structs.replace(make_engine_point(2, 2), **changes)
    assert compute_engine_floor(own, settings, rates) is None


def test_format_of_a_quantiser_is_that_of_the_model() -> None:
    """vLLM logs `mxfp4` for gpt-oss-120b, which has experts in that format; bf16 weights have a higher floor."""
    own = msgspec.structs.replace(make_engine_point(2, 1), model="gpt-oss-120b", exchange="none")
    floors = [
        compute_engine_floor(own, EngineSettings(dtype="bfloat16", weights_dtype=name), {2: PEERS})
        for name in ("gpt_oss_mxfp4", "mxfp4", None)
    ]
    named, same, wide = (found[1].floor_ms for found in floors if found is not None)
    assert named == same < wide / 2


def test_rates_of_another_gpu_are_refused(tmp_path: Path) -> None:
    """A run without rates is refused too."""
    record_builder.write_records(tmp_path / "ours", [record_builder.make_ok_record(make_point(Layout(2)), rates=PEERS)])
    record_builder.write_records(tmp_path / "cpu", [record_builder.make_cpu_record(make_point(Layout(2)))])
    [record] = read_run(tmp_path / "ours").records
    assert record.environment is not None
    assert read_rates(tmp_path / "ours", record.environment.device) == {2: PEERS}
    with pytest.raises(UsageError, match="was measured on"):
        read_rates(tmp_path / "ours", "NVIDIA L4")
    with pytest.raises(UsageError, match="no point of this run has measured rates"):
        read_rates(tmp_path / "cpu", "")


def test_report_states_how_steps_of_each_engine_were_measured(tmp_path: Path) -> None:
    """Steps of dcpbench's engine are graph replays; those of another engine are gaps between tokens."""
    own = record_builder.make_ok_record(make_point(Layout(2)))
    other = msgspec.structs.replace(record_builder.make_ok_record(make_engine_point(2, 1)), origin="engine vllm 0.26.0")
    folders = {name: tmp_path / name for name in ("ours", "theirs")}
    record_builder.write_records(folders["ours"], [own])
    record_builder.write_records(folders["theirs"], [other])

    def describe(*names: str) -> str:
        return " ".join(explain.describe_method(dataframes.load_frames([folders[name] for name in names])))

    assert "CUDA graph" in describe("ours")
    assert "measured_context" not in describe("ours")
    assert "CUDA graph" not in describe("theirs")
    assert "measured_context" in describe("theirs")
    assert "CUDA graph" in describe("ours", "theirs")
    assert "measured_context" in describe("ours", "theirs")


def test_points_that_never_ran_belong_to_their_engine(tmp_path: Path) -> None:
    """The points have no version, and they must not count as points of dcpbench's engine."""
    own = make_engine_point(2, 1)
    ran = msgspec.structs.replace(record_builder.make_ok_record(own), origin="engine vllm 0.26.0")
    large = msgspec.structs.replace(own, concurrency=4_000)
    longer = msgspec.structs.replace(own, context=900_000)
    record_builder.write_records(
        tmp_path / "run", [ran, record_builder.make_rejected_record(large), record_builder.make_failed_record(longer)]
    )
    run = read_run(tmp_path / "run")
    assert joined_runs.list_engines([run]) == ["vLLM 0.26.0"]
    assert dataframes.load_frames([tmp_path / "run"]).engines == []
    record_builder.write_records(tmp_path / "alone", [record_builder.make_failed_record(longer)])
    assert joined_runs.list_engines([read_run(tmp_path / "alone")]) == ["vLLM"]
    assert joined_runs.list_engines(
        [Run(name="", folder=tmp_path, records=[record_builder.make_ok_record(make_point())])]
    ) == ["dcpbench"]
