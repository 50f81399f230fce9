"""Commands that reproduce a point: the command line parses them to exactly that point."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench import cli
from dcpbench.commands import point_runner
from dcpbench.errors import UsageError
from dcpbench.plan import grid
from dcpbench.plan.serve_spec import make_serve_spec
from dcpbench.plan.spec import make_spec
from dcpbench.points.settings import Settings
from dcpbench.reports import reproduce
from dcpbench.reports.reproduce import build_command
from dcpbench.serving.step_times import write_step_times
from tests.unit import record_builder, step_times_builder
from tests.unit.probes import CPU, H200X4
from tests.unit.test_shapes import V3

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.plan.spec import SweepSpec
    from dcpbench.points.device_probe import Probe
    from dcpbench.points.point import Point

    ReadBack = Callable[[str], SweepSpec]


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> ReadBack:
    """Return a function that parses a command on the machine of its --device, and returns its grid."""
    specs: list[SweepSpec] = []

    def record_spec(spec: SweepSpec, *_: object, **__: object) -> int:
        specs.append(spec)
        return 0

    monkeypatch.setattr(point_runner, "get_probe", lambda run: CPU if run.device == "cpu" else H200X4)
    monkeypatch.setattr(point_runner, "measure", record_spec)

    def parse(command: str) -> SweepSpec:
        words = shlex.split(command)
        assert words[0] == "dcpbench"
        with pytest.raises(SystemExit) as end:
            cli.main(words[1:])
        assert end.value.code == 0
        return specs[-1]

    return parse


def check_commands(spec: SweepSpec, probe: Probe, read_back: ReadBack, least: int = 1) -> None:
    """Check that each point of a grid has a command with only that point in its grid, measured in the same way."""
    points = [c.point for c in grid.expand_grid(spec, probe) if c.error is None]
    assert len(points) >= least
    for point in points:
        again = read_back(build_command(point, msgspec.to_builtins(spec.settings), cpu=probe.device == "cpu"))
        (found,) = grid.expand_grid(again, probe)
        assert found.point == msgspec.structs.replace(point, repeat=0)
        assert again.settings == spec.settings


DECODE: dict[str, dict[str, object]] = {
    "defaults": {},
    "grid": {"model": "deepseek-v3,kimi-k2", "tp": 4, "dp": "1,2", "dcp": "1,2", "context": "4000,32000"},
    "exchanges": {"backend": "triton,flashinfer,auto", "exchange": "ag_rs,a2a,symm,auto", "concurrency": 8},
    "options": {"exchange": "a2a", "q_replicate": [False, True], "project_first": [False, True]},
    "all-reduces": {"all_reduce": "nccl,symm"},
    "pages": {"page_size": 32, "interleave": 8},
    "kv": {"kv_memory": "60GiB"},
    "kv-bytes": {"kv_memory": "61234567891B"},
    "measured": {"seconds": 2.5, "profile": False, "repeats": 2},
}


@pytest.mark.parametrize("options", DECODE.values(), ids=DECODE)
@pytest.mark.sample(4)
def test_decode_point_has_a_command_for_it_alone(options: dict[str, object], read_back: ReadBack) -> None:
    check_commands(make_spec(options, H200X4), H200X4, read_back, least=2)


def test_command_of_a_cpu_point_selects_the_cpu(read_back: ReadBack) -> None:
    check_commands(make_spec({"tp": 2, "dtype": "bf16", "seconds": 1}, CPU), CPU, read_back, least=2)


def test_command_of_a_checkpoint_names_its_folder(tmp_path: Path, read_back: ReadBack) -> None:
    """One folder has a space in its name, and one begins with a dash."""
    for name in ("my model", "-x"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(V3))
        (folder / "model.safetensors").touch()
        check_commands(make_spec({"weights": str(folder), "concurrency": 8}, H200X4), H200X4, read_back)


SERVE: dict[str, dict[str, object]] = {
    "defaults": {},
    "layouts": {"dp": "1,2", "dcp": "1,2", "concurrency": "3,8", "model": "deepseek-v3,kimi-k2"},
    "lengths": {"input_tokens": "4000,uniform:1000-7000,lognormal:4000:0.5", "output_tokens": "20,uniform:5-9"},
    "rates": {"request_rate": "0.5,2", "burstiness": 0.25},
    "rates-bounded": {"request_rate": 3, "concurrency": 5},
    "prefixes": {"prefix_share": 0.3, "prefix_groups": 4, "prefix_cache": False},
    "how": {"policy": "prefill-first", "chunk": 4096, "prefill": "flashinfer", "seed": 7, "exchange": "a2a,symm"},
    "modes": {"mode": "live,replay", "q_replicate": True, "project_first": True, "all_reduce": "symm"},
    "limits": {"limit_seconds": "0.00005", "slo": "ttft=500,itl=49.5", "profile": False, "kv_memory": "20GiB"},
    "limited": {"num_requests": "40", "repeats": 2},
}


@pytest.mark.parametrize("options", SERVE.values(), ids=SERVE)
@pytest.mark.sample(4)
def test_served_point_has_a_command_for_it_alone(options: dict[str, object], read_back: ReadBack) -> None:
    check_commands(make_serve_spec(options, H200X4), H200X4, read_back, least=2)


def test_command_of_a_served_cpu_point_selects_the_cpu(read_back: ReadBack) -> None:
    check_commands(make_serve_spec({"tp": 2, "mode": "live,replay"}, CPU), CPU, read_back, least=2)


@pytest.mark.parametrize(
    "more", [{}, {"concurrency": 2}, {"request_rate": 2}, {"limit_seconds": 60}, {"num_requests": "3"}], ids=str
)
def test_command_names_a_file_of_requests_with_its_folder(
    more: dict[str, object], tmp_path: Path, read_back: ReadBack
) -> None:
    path = tmp_path / "my trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,10,10\n1,20,10\n2,30,10\n3,40,10\n")
    check_commands(make_serve_spec({"requests": str(path), **more}, H200X4), H200X4, read_back)


def test_command_of_a_replay_names_its_step_times(tmp_path: Path, read_back: ReadBack) -> None:
    """These are of another engine, so the grid itself could not replay from them."""
    path = tmp_path / "times.json"
    write_step_times(path, step_times_builder.make_step_times())
    spec = make_serve_spec({"mode": "replay", "step_times": str(path), "concurrency": 8, "baseline": False}, H200X4)
    (candidate,) = grid.expand_grid(spec, H200X4)
    again = read_back(build_command(candidate.point, msgspec.to_builtins(spec.settings)))
    assert again.settings.step_times == str(path)
    assert grid.expand_grid(again, H200X4)[0].point == candidate.point


def test_command_is_safe_to_paste(read_back: ReadBack) -> None:
    """A name from a record cannot end the command and begin another."""
    name = "$(touch x); `touch y` '\n--force"
    command = build_command(record_builder.make_point(model=name, dtype="bf16"), {})
    assert read_back(command).model == (name,)


@pytest.mark.parametrize("changes", [{"model": "a,b"}, {"backend": "x,"}, {"model": ""}], ids=str)
def test_names_that_no_option_accepts_raise_usage_error(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="comma list"):
        build_command(record_builder.make_point(**changes), msgspec.to_builtins(Settings()))


def test_command_of_a_repeat_is_that_of_the_first_pass() -> None:
    repeated: Point = record_builder.make_point(repeat=3)
    assert build_command(repeated, {}) == build_command(msgspec.structs.replace(repeated, repeat=0), {})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", "a,b", None),
        ("exchange", "", None),
        ("weights", "/models/a,b", ["--weights", "/models/a,b"]),
        ("model", "-x", ["--model=-x"]),
        ("no_profile", True, ["--no-profile"]),
        ("no_profile", False, []),
    ],
)
def test_comma_is_refused_in_names_and_accepted_in_paths(name: str, value: object, words: list[str] | None) -> None:
    if words is None:
        with pytest.raises(UsageError, match="a comma list, and nothing, have another meaning"):
            reproduce._format_option(name, value)
    else:
        assert reproduce._format_option(name, value) == words


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        ({"turns": "4", "think_time": 2.0}, {"sessions": "4,think=2.0"}),
        ({"think_time": 2.0, "tp": 2}, {"sessions": "think=2.0", "tp": 2}),
        ({"page_size": 64, "weights": "x", "interleave": 8}, {"page_size": "64,interleave=8", "weights": "x"}),
        ({"prefix_cache": False}, {"prefill": "prefix-cache=no"}),
        ({"q_replicate": True, "project_first": False}, {"collectives": "q-replicate=yes"}),
    ],
    ids=str,
)
def test_keys_of_one_option_are_joined(options: dict[str, object], joined: dict[str, object]) -> None:
    assert reproduce._join_keys(options) == joined


def test_key_with_a_comma_in_its_value_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="--sessions turns='1,2' cannot be typed"):
        reproduce._join_keys({"turns": "1,2"})


def test_compute_dtype_that_no_option_selects_raises_usage_error() -> None:
    """With fp8 weights and KV the default is bf16 on GPUs and fp32 on the CPU."""
    point = record_builder.make_point(dtype="bf16", weights_dtype="fp8", kv_dtype="fp8")
    assert "--weights-dtype fp8 --kv-dtype fp8" in build_command(point, {})
    with pytest.raises(UsageError, match="no option selects bf16"):
        build_command(point, {}, cpu=True)


def test_weights_folder_is_no_list_of_names() -> None:
    assert {"model", "exchange", "backend"} <= {*reproduce.LISTS}
    assert "weights" not in reproduce.LISTS
