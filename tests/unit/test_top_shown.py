"""Test what `dcpbench top` displays for a state, which processes it takes for alive, and what it reads from GPUs."""

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

POINTS = [build.make_point(context, model="a-model-with-a-long-name") for context in range(100, 130)]
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
    """Return a state in which 20 of 30 points have ended, one of them failed, with one GPU."""
    job = build.write_job(tmp_path, POINTS)
    for i, of in enumerate(POINTS[:19]):
        build.add_finished_point(job, tmp_path, of, 10 * i, 10 * i + 10)
    build.add_record(tmp_path, POINTS[19], start=190, outcome="failed", reason="rank 1: ValueError: no such row " * 5)
    build.add_event(job, 201, "measure", POINTS[20], "3/9 requests, 1,200 tok/s")
    return msgspec.structs.replace(build.make_state(tmp_path, 205), gpus=[GPU])


def render(state: State, width: int, height: int = 40, **console: Any) -> str:
    """Return the text that a terminal of this size shows."""
    out = io.StringIO()
    Console(file=out, width=width, **console).print(render_state(state, width, height))
    return out.getvalue()


def remove_white_space(text: str) -> str:
    """Remove white space, because words and paths may be wrapped."""
    return "".join(text.split())


class TestView:
    @pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
    def test_no_line_is_wider_than_the_terminal(self, busy: State, width: int) -> None:
        assert max(map(len, render(busy, width).splitlines())) <= width

    @pytest.mark.parametrize("width", [40, 80, 200])
    def test_progress_is_shown_at_any_width(self, busy: State, tmp_path: Path, width: int) -> None:
        """Expect 6 points a minute for 20 points in 200 s; 10 left of 10 s each, 5 s of which have passed, are 95 s."""
        text = remove_white_space(render(busy, width))
        for expected in (
            f"sweep in {tmp_path}: running",
            "20 of 30 points · 1 failed · 10 left",
            "6 points/min · 3 min so far · about 95 s left",
            "tp2 reference, 2 × 120 tokens",
            "measure for 4 s · 3/9 requests, 1,200 tok/s",
            "1830/1980",
        ):
            assert remove_white_space(expected) in text

    def test_eighty_columns_show_all_values_of_a_gpu(self, busy: State) -> None:
        text = render(busy, 80)
        for expected in ("3 NVIDIA H200", "sw_power_cap", "1830/1980", "612/700", "61", "120/140", "98 %"):
            assert expected in text

    @pytest.mark.parametrize(
        ("width", "columns"),
        [(70, "tok/s /GPU ITL ms took"), (69, "tok/s ITL ms"), (50, "tok/s ITL ms"), (49, "tok/s")],
    )
    def test_narrow_terminal_keeps_the_most_important_columns(self, busy: State, width: int, columns: str) -> None:
        (head,) = [line for line in render(busy, width).splitlines() if "last points" in line]
        assert head.split() == ["last", "points", *columns.split()]

    def test_run_of_an_unknown_command_is_called_run(self, tmp_path: Path) -> None:
        """Use a replay, which has no job files with the name of its command."""
        build.add_record(tmp_path, POINTS[0], start=0, seconds=2)
        assert next(format_changes(None, build.make_state(tmp_path, 3))).startswith(f"run in {tmp_path}: ")

    def test_low_terminal_shows_the_newest_points(self, busy: State) -> None:
        """Leave three of 12 lines for points."""
        text = render(busy, 100, height=12)
        assert [n for n in range(100, 120) if f"2 × {n} tokens" in text] == [117, 118, 119]

    def test_no_color_variable_disables_colours(self, busy: State, monkeypatch: pytest.MonkeyPatch) -> None:
        """Allow bold and dim with NO_COLOR."""
        monkeypatch.setenv("NO_COLOR", "1")
        text = render(busy, 80, force_terminal=True)
        codes = {code for part in text.split("\x1b[")[1:] for code in part.partition("m")[0].split(";")}
        assert codes <= {"0", "1", "2"}

    def test_cpu_run_is_marked_as_no_performance_measurement(self, tmp_path: Path) -> None:
        build.write_job(tmp_path, POINTS, device="cpu")
        found = build.make_state(tmp_path, 1)
        assert "do not reflect performance" in " ".join(render(found, 80).split())
        assert "do not reflect performance" in "\n".join(format_changes(None, found))

    def test_markup_in_names_and_notes_is_shown_as_text(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, [build.make_point(1, model="[bold red]x[/]")])
        build.add_event(job, 1, "measure", job.points[0], "[link=file:///]y[/link]")
        text = render(build.make_state(tmp_path, 2), 120)
        assert "[bold red]x[/]" in text
        assert "[link=file:///]y[/link]" in text


class TestLines:
    def test_no_line_is_printed_while_only_time_passes(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, POINTS)
        build.add_event(job, 1, "measure", POINTS[0], "1/9 requests")
        facts = Facts(tmp_path)
        first = build.make_state(facts, 2)
        build.add_event(job, 3, "measure", POINTS[0], "2/9 requests")
        assert list(format_changes(first, build.make_state(facts, 4))) == []

    def test_each_change_is_printed_as_a_line(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, POINTS[:3])
        facts = Facts(tmp_path)
        first = build.make_state(facts, 1)
        build.add_finished_point(job, tmp_path, POINTS[0], 2, 10)
        build.add_finished_point(job, tmp_path, POINTS[1], 10, 20)
        build.add_event(job, 20, "measure", POINTS[2])
        name = "a-model-with-a-long-name tp2 reference, 2 ×"
        assert list(format_changes(first, build.make_state(facts, 20))) == [
            "running",
            f"{name} 100 tokens: 200 tok/s, ITL 10 ms",
            f"{name} 101 tokens: 200 tok/s, ITL 10 ms",
            "2 of 3 points · 1 left · 6 points/min · 20 s so far · about 10 s left, by 2 points alone",
            f"now: {name} 102 tokens, measure",
        ]

    def test_silence_of_a_hung_run_is_printed_once(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, POINTS)
        build.add_event(job, 0, "measure", POINTS[0])
        facts = Facts(tmp_path)
        well, silent, later = (build.make_state(facts, at) for at in (1, 61, 90))
        message = "no sign of life for 61 s; dcpbench ends such a job after 5 min"
        assert list(format_changes(well, silent)) == [message]
        assert list(format_changes(silent, later)) == []

    def test_unreadable_records_are_named_in_the_first_snapshot(self, tmp_path: Path) -> None:
        build.write_job(tmp_path, POINTS)
        (tmp_path / "records.jsonl").write_bytes(b"no record\n")
        assert "lines that could not be read, and are left out: records.jsonl: 1" in list(
            format_snapshot(build.make_state(tmp_path, 1))
        )

    def test_snapshot_contains_the_current_point_and_gpus(self, busy: State) -> None:
        lines = list(format_snapshot(busy))
        assert "measure for 4 s · 3/9 requests, 1,200 tok/s" in lines
        assert "GPU 3: 1,830 MHz, 612 W, 61 °C, slowed: sw_power_cap" in lines


def test_time_left_is_printed_with_its_range_or_its_number_of_points() -> None:
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

    def test_lock_lists_the_command_before_its_workers(self, lock: Callable[..., str]) -> None:
        dead = subprocess.Popen(["true"])
        dead.wait()
        assert lock(os.getpid(), dead.pid) == processes.COMMAND
        assert lock(dead.pid, os.getpid()) == processes.WORKERS
        assert lock(dead.pid) == processes.NONE

    def test_process_that_reuses_the_id_is_not_taken_for_the_command(self, lock: Callable[..., str]) -> None:
        """Date the lock to 2001, before this process started."""
        assert lock(os.getpid(), written=1_000_000_000) == processes.NONE

    def test_zombie_process_is_not_alive(self, lock: Callable[..., str]) -> None:
        ended = subprocess.Popen(["true"])
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert lock(ended.pid) == processes.NONE
        ended.wait()

    @pytest.mark.parametrize("text", ["", "x", "-1", "9" * 5000, "\x00"])
    def test_lock_with_invalid_content_names_no_process(self, lock: Callable[..., str], text: str) -> None:
        assert lock(text) == processes.NONE

    def test_find_running_returns_the_newest_running_run(self, tmp_path: Path) -> None:
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
    def test_values_that_nvml_does_not_support_are_absent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Expect 612.4 W for 612,400 mW, and a power cap and heat for the bits 0x44; all other queries fail."""

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

    def test_nvml_values_are_converted_to_the_units_of_the_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Convert mW to W, keep the units of memory, clocks and temperature, and number the two GPUs."""
        answers: dict[str, Any] = {
            "Name": "H200",
            "UtilizationRates": types.SimpleNamespace(gpu=98),
            "PowerUsage": 612_400,
            "EnforcedPowerLimit": 700_500,
            "MemoryInfo": types.SimpleNamespace(used=7, total=9),
            "CurrentClocksThrottleReasons": 0,
        }
        queries: list[tuple[str, tuple[object, ...]]] = []

        def make_query(name: str) -> Callable[..., object]:
            return lambda _, *arguments: (
                queries.append((name, arguments)) or {"ClockInfo": 1830, "MaxClockInfo": 1980, "Temperature": 61}[name]
            )

        fake = types.SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda i: i,
            NVML_CLOCK_SM=1,
            NVML_TEMPERATURE_GPU=0,
            **{f"nvmlDeviceGet{name}": (lambda _, value=value: value) for name, value in answers.items()},
            **{f"nvmlDeviceGet{name}": make_query(name) for name in ("ClockInfo", "MaxClockInfo", "Temperature")},
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
        assert queries[:3] == [("ClockInfo", (1,)), ("MaxClockInfo", (1,)), ("Temperature", (0,))]

    def test_machine_without_nvml_has_no_gpu_states(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert Gpus().read_states() == []
