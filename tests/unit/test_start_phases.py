"""Phases of a job until its first measured step."""

from __future__ import annotations

import io

from rich.console import Console

from dcpbench.launch.jobs import Progress
from dcpbench.launch.progress import ProgressBar, format_start
from dcpbench.launch.start_phases import StartPhases
from dcpbench.records.record import StartPhase


def enter_stages(phases: StartPhases, *stages: tuple[str, float]) -> list[dict[str, float]]:
    """Enter stages at these times; return the phases of each that measures a first step."""
    found = [phases.enter_stage(stage, now) for stage, now in stages]
    return [{phase.name: phase.seconds for phase in one} for one in found if one]


def test_phases_add_up_to_the_time_until_the_first_measured_step() -> None:
    """The worker enters `start` 8 s after the launch and builds from 10 s on; 5 + 2 s of two `build` events are one phase."""
    phases = StartPhases(started=0.0)
    stages = (("start", 8.0), ("limits", 9.0), ("build", 10.0), ("build", 15.0), ("capture", 17.0), ("warm up", 20.0))
    (found,) = enter_stages(phases, *stages, ("measure", 26.0), ("measure", 30.0))
    assert found == {
        "starting": 9.0,
        "measuring rates of the GPU": 1.0,
        "building the engine": 7.0,
        "capturing CUDA graphs": 3.0,
        "warming up": 6.0,
    }
    assert sum(found.values()) == 26.0


def test_a_point_that_shares_an_engine_has_no_phases_and_another_engine_has_its_own() -> None:
    """The second point warms up only; the third builds for 4 s, behind the record of the second."""
    phases = StartPhases(started=0.0)
    enter_stages(phases, ("start", 1.0), ("build", 2.0), ("measure", 3.0))
    assert enter_stages(phases, ("done", 5.0), ("warm up", 5.0), ("measure", 7.0)) == []
    assert enter_stages(phases, ("done", 9.0), ("build", 9.5), ("warm up", 13.5), ("measure", 14.0)) == [
        {"building the engine": 4.0, "warming up": 0.5}
    ]


def test_progress_prints_the_phases_of_a_long_start_once() -> None:
    console = Console(file=io.StringIO(), width=200)
    phases = [StartPhase(name="starting", seconds=12.2), StartPhase(name="building", seconds=30.0)]
    with ProgressBar({"a": "tp2"}, console) as bar:
        bar(Progress(stage="measure", key="a", phases=phases))
        bar(Progress(stage="measure", key="a"))
        bar(Progress(stage="measure", key="a", phases=phases[:1]))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "First step after 42 s: 12 s starting, 30 s building\n"


def test_wait_for_flashinfer_is_a_phase_and_its_line_names_the_package_without_a_wait() -> None:
    """The wait begins at 20 s, when all graphs are captured, and ends 60 s later with the warm-up."""
    phases = StartPhases(started=0.0)
    (found,) = enter_stages(
        phases,
        ("start", 5.0),
        ("build", 10.0),
        ("capture", 15.0),
        ("compile", 20.0),
        ("warm up", 80.0),
        ("measure", 81.0),
    )
    assert found["compiling kernels of FlashInfer"] == 60.0
    line = format_start([StartPhase(name=name, seconds=seconds) for name, seconds in found.items()])
    assert line.startswith("First step after 81 s: ")
    assert line.endswith("; install flashinfer-jit-cache to have these kernels prebuilt")
