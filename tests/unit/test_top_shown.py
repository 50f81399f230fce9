"""What `dcpbench top` shows of a state, whom it takes for alive, and what it says of GPUs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from dcpbench.errors import UsageError
from dcpbench.launch import processes
from dcpbench.top import state_text, watch
from dcpbench.top.facts import Facts
from dcpbench.top.gpu_monitor import Gpus, GpuState
from dcpbench.top.state import Estimate
from dcpbench.top.state_text import format_changes, format_snapshot
from dcpbench.top.state_view import render_state
from tests.unit import top_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.top.state import State

POINTS = [build.point(context, model="a-model-with-a-long-name") for context in range(100, 130)]
GPU = GpuState(
    index=3,
    name="NVIDIA H200",
    utilisation=98,
    sm_clock_mhz=1830,
    sm_clock_max_mhz=1980,
    power_w=612.4,
    power_limit_w=700,
    temperature_c=61,
    memory_used_bytes=120 << 30,
    memory_total_bytes=140 << 30,
    throttle_reasons=["sw_power_cap"],
)


@pytest.fixture
def busy(tmp_path: Path) -> State:
    """20 of 30 points have ended, one of them failed; GPUs are there."""
    job = build.job(tmp_path, POINTS)
    for i, of in enumerate(POINTS[:19]):
        build.add_finished_point(job, tmp_path, of, 10 * i, 10 * i + 10)
    build.record(tmp_path, POINTS[19], start=190, outcome="failed", reason="rank 1: ValueError: no such row " * 5)
    build.add_event(job, 201, "measure", POINTS[20], "3/9 requests, 1,200 tok/s")
    return msgspec.structs.replace(build.state(tmp_path, 205), gpus=[GPU])


def shown(state: State, width: int, height: int = 40, **console: Any) -> str:
    """What a terminal of that size shows."""
    out = io.StringIO()
    Console(file=out, width=width, **console).print(render_state(state, width, height))
    return out.getvalue()


def squeezed(text: str) -> str:
    """Without white space: words and paths may go on in the next line."""
    return "".join(text.split())


class TestView:
    @pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
    def test_no_line_is_wider_than_the_terminal(self, busy: State, width: int) -> None:
        assert max(map(len, shown(busy, width).splitlines())) <= width

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_how_far_it_is_is_said_at_any_width(self, busy: State, tmp_path: Path, width: int) -> None:
        """20 points in 200 s are 6 a minute; 10 left of 10 s each, 5 s of which have passed: 95 s."""
        told = squeezed(shown(busy, width))
        for said in (
            f"sweep in {tmp_path}: running",
            "20 of 30 points · 1 failed · 10 left",
            "6 points/min · 3 min so far · about 95 s left",
            "tp2 reference, 2 × 120 tokens",
            "measure for 4 s · 3/9 requests, 1,200 tok/s",
            "1830/1980",
        ):
            assert squeezed(said) in told

    def test_eighty_columns_show_all_there_is_of_a_gpu(self, busy: State) -> None:
        told = shown(busy, 80)
        for said in ("3 NVIDIA H200", "sw_power_cap", "1830/1980", "612/700", "61", "120/140", "98 %"):
            assert said in told

    @pytest.mark.parametrize(
        ("width", "columns"),
        [(70, "tok/s /GPU ITL ms took"), (69, "tok/s ITL ms"), (50, "tok/s ITL ms"), (49, "tok/s")],
    )
    def test_narrow_terminals_keep_the_columns_that_matter_most(self, busy: State, width: int, columns: str) -> None:
        (head,) = [line for line in shown(busy, width).splitlines() if "last points" in line]
        assert head.split() == ["last", "points", *columns.split()]

    def test_a_run_whose_command_is_not_known_is_a_run(self, tmp_path: Path) -> None:
        """A replay has no jobs that say what it is."""
        build.record(tmp_path, POINTS[0], start=0, seconds=2)
        assert next(format_changes(None, build.state(tmp_path, 3))).startswith(f"run in {tmp_path}: ")

    def test_a_low_terminal_keeps_what_is_newest(self, busy: State) -> None:
        """Three of 12 lines are left for points."""
        told = shown(busy, 100, height=12)
        assert [n for n in range(100, 120) if f"2 × {n} tokens" in told] == [117, 118, 119]

    def test_without_colour_there_is_none(self, busy: State, monkeypatch: pytest.MonkeyPatch) -> None:
        """NO_COLOR leaves bold and dim."""
        monkeypatch.setenv("NO_COLOR", "1")
        told = shown(busy, 80, force_terminal=True)
        codes = {code for part in told.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
        assert codes <= {"0", "1", "2"}

    def test_a_cpu_run_says_so(self, tmp_path: Path) -> None:
        build.job(tmp_path, POINTS, device="cpu")
        found = build.state(tmp_path, 1)
        assert "do not reflect performance" in " ".join(shown(found, 80).split())
        assert "do not reflect performance" in "\n".join(format_changes(None, found))

    def test_markup_in_a_name_stays_text(self, tmp_path: Path) -> None:
        job = build.job(tmp_path, [build.point(1, model="[bold red]x[/]")])
        build.add_event(job, 1, "measure", job.points[0], "[link=file:///]y[/link]")
        told = shown(build.state(tmp_path, 2), 120)
        assert "[bold red]x[/]" in told
        assert "[link=file:///]y[/link]" in told


class TestLines:
    def test_nothing_is_said_while_only_time_passes(self, tmp_path: Path) -> None:
        job = build.job(tmp_path, POINTS)
        build.add_event(job, 1, "measure", POINTS[0], "1/9 requests")
        facts = Facts(tmp_path)
        first = build.state(facts, 2)
        build.add_event(job, 3, "measure", POINTS[0], "2/9 requests")
        assert list(format_changes(first, build.state(facts, 4))) == []

    def test_each_change_is_a_line(self, tmp_path: Path) -> None:
        job = build.job(tmp_path, POINTS[:3])
        facts = Facts(tmp_path)
        first = build.state(facts, 1)
        build.add_finished_point(job, tmp_path, POINTS[0], 2, 10)
        build.add_finished_point(job, tmp_path, POINTS[1], 10, 20)
        build.add_event(job, 20, "measure", POINTS[2])
        name = "a-model-with-a-long-name tp2 reference, 2 ×"
        assert list(format_changes(first, build.state(facts, 20))) == [
            "running",
            f"{name} 100 tokens: 200 tok/s, ITL 10 ms",
            f"{name} 101 tokens: 200 tok/s, ITL 10 ms",
            "2 of 3 points · 1 left · 6 points/min · 20 s so far · about 10 s left, by 2 points alone",
            f"now: {name} 102 tokens, measure",
        ]

    def test_a_run_that_hangs_says_so_once(self, tmp_path: Path) -> None:
        job = build.job(tmp_path, POINTS)
        build.add_event(job, 0, "measure", POINTS[0])
        facts = Facts(tmp_path)
        well, silent, later = (build.state(facts, at) for at in (1, 61, 90))
        said = "no sign of life for 61 s; dcpbench ends such a job after 5 min"
        assert list(format_changes(well, silent)) == [said]
        assert list(format_changes(silent, later)) == []

    def test_records_that_cannot_be_read_are_said_at_the_first_look(self, tmp_path: Path) -> None:
        build.job(tmp_path, POINTS)
        (tmp_path / "records.jsonl").write_bytes(b"no record\n")
        assert "lines that could not be read, and are left out: records.jsonl: 1" in list(
            format_snapshot(build.state(tmp_path, 1))
        )

    def test_one_look_says_all(self, busy: State) -> None:
        said = list(format_snapshot(busy))
        assert "measure for 4 s · 3/9 requests, 1,200 tok/s" in said
        assert "GPU 3: 1,830 MHz, 612 W, 61 °C, slowed: sw_power_cap" in said


def test_time_left_has_its_range_or_its_reason() -> None:
    ranged = Estimate(seconds=540, low=420, high=720, points=9)
    assert state_text.format_time_left(ranged) == "about 9 min left (7 min to 12 min)"
    assert state_text.format_time_left(Estimate(seconds=540, points=1)) == "about 9 min left, by 1 point alone"
    assert state_text.format_time_left(Estimate(seconds=0, points=1)) == "the last point takes longer than others did"


class TestProcesses:
    @pytest.fixture
    def lock(self, tmp_path: Path) -> Callable[..., str]:
        def write(*pids: object, written: float | None = None) -> str:
            path = tmp_path / ".lock"
            path.write_text("\n".join(map(str, pids)))
            if written is not None:
                os.utime(path, (written, written))
            return processes.find_alive(tmp_path)[0]

        return write

    def test_the_command_comes_first_in_the_lock_then_its_workers(self, lock: Callable[..., str]) -> None:
        dead = subprocess.Popen(["true"])
        dead.wait()
        assert lock(os.getpid(), dead.pid) == processes.COMMAND
        assert lock(dead.pid, os.getpid()) == processes.WORKERS
        assert lock(dead.pid) == processes.NONE

    def test_another_process_with_its_id_is_not_it(self, lock: Callable[..., str]) -> None:
        """This test began after 2001, when that lock was written."""
        assert lock(os.getpid(), written=1_000_000_000) == processes.NONE

    def test_a_process_that_has_ended_and_was_not_waited_for_is_dead(self, lock: Callable[..., str]) -> None:
        ended = subprocess.Popen(["true"])
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert lock(ended.pid) == processes.NONE
        ended.wait()

    @pytest.mark.parametrize("text", ["", "x", "-1", "9" * 5000, "\x00"])
    def test_a_lock_of_anything_else_names_nobody(self, lock: Callable[..., str], text: str) -> None:
        assert lock(text) == processes.NONE

    def test_the_newest_running_run_is_found(self, tmp_path: Path) -> None:
        for name, pid, written in (("old", os.getpid(), 4e9), ("new", os.getpid(), 5e9), ("ended", 2**22 + 1, 6e9)):
            (tmp_path / name).mkdir()
            (tmp_path / name / ".lock").write_text(str(pid))
            os.utime(tmp_path / name / ".lock", (written, written))
        assert watch.find_running(tmp_path) == tmp_path / "new"
        for name in ("old", "new"):
            (tmp_path / name / ".lock").write_text("0")
        with pytest.raises(UsageError, match=r"no run below .* is running here; name one"):
            watch.find_running(tmp_path)


class TestGpus:
    def test_what_nvml_does_not_say_is_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """612,400 mW are 612.4 W; bits 0x44 are a power cap and heat; this GPU refuses all else."""

        def refuse(*_: object) -> None:
            raise RuntimeError("Not Supported")

        queries = dict.fromkeys(
            ["MemoryInfo", "UtilizationRates", "ClockInfo", "MaxClockInfo", "EnforcedPowerLimit", "Temperature"], refuse
        )
        fake = types.SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 1,
            nvmlDeviceGetHandleByIndex=lambda i: i,
            nvmlDeviceGetName=lambda _: b"GPU\xff",
            nvmlDeviceGetPowerUsage=lambda _: 612_400,
            nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 0x44,
            NVML_CLOCK_SM=1,
            NVML_TEMPERATURE_GPU=0,
            **{f"nvmlDeviceGet{name}": query for name, query in queries.items()},
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        reasons = ["sw_power_cap", "hw_thermal"]
        assert Gpus().read_states() == [GpuState(index=0, name="GPU\ufffd", power_w=612.4, throttle_reasons=reasons)]

    def test_a_gpu_that_says_all_is_asked_in_its_own_units(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """mW become W; memory, clocks and temperature are as they come; of two GPUs each has its number."""
        answers: dict[str, Any] = {
            "Name": "H200",
            "UtilizationRates": types.SimpleNamespace(gpu=98),
            "PowerUsage": 612_400,
            "EnforcedPowerLimit": 700_500,
            "MemoryInfo": types.SimpleNamespace(used=7, total=9),
            "CurrentClocksThrottleReasons": 0,
        }
        asked: list[tuple[str, tuple[object, ...]]] = []

        def told(name: str) -> Callable[..., object]:
            return lambda _, *of: (
                asked.append((name, of)) or {"ClockInfo": 1830, "MaxClockInfo": 1980, "Temperature": 61}[name]
            )

        fake = types.SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda i: i,
            NVML_CLOCK_SM=1,
            NVML_TEMPERATURE_GPU=0,
            **{f"nvmlDeviceGet{name}": (lambda _, value=value: value) for name, value in answers.items()},
            **{f"nvmlDeviceGet{name}": told(name) for name in ("ClockInfo", "MaxClockInfo", "Temperature")},
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        first, second = Gpus().read_states()
        assert first == GpuState(
            index=0,
            name="H200",
            utilisation=98,
            sm_clock_mhz=1830,
            sm_clock_max_mhz=1980,
            power_w=612.4,
            power_limit_w=700.5,
            temperature_c=61,
            memory_used_bytes=7,
            memory_total_bytes=9,
        )
        assert second == msgspec.structs.replace(first, index=1)
        assert asked[:3] == [("ClockInfo", (1,)), ("MaxClockInfo", (1,)), ("Temperature", (0,))]

    def test_a_machine_without_nvml_has_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert Gpus().read_states() == []
