"""Test the progress output of a run without a terminal for a progress bar, and tables on the console."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dcpbench.launch import progress
from dcpbench.launch.jobs import Check, Progress
from dcpbench.points.device_probe import Probe
from dcpbench.points.point import Point
from dcpbench.show.terminal import make_console

POINT = Point(model="tiny", tp=1, concurrency=2, context=100, backend="reference", dtype="fp32")


@pytest.mark.parametrize(
    ("quiet_s", "lines"),
    [
        (60.0, ["[1/1] tiny tp1 reference, 2 × 100 tokens  10 tok/s"]),
        (
            -1.0,
            [
                "tiny tp1 reference, 2 × 100 tokens measure: 3/9 requests",
                "[1/1] tiny tp1 reference, 2 × 100 tokens  10 tok/s",
            ],
        ),
    ],
    ids=["before a minute", "after a minute"],
)
def test_long_point_prints_its_progress_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, quiet_s: float, lines: list[str]
) -> None:
    """Print progress to a log, but not every second."""
    monkeypatch.setattr(progress, "QUIET_S", quiet_s)
    out = io.StringIO()
    with progress.ProgressBar(progress.format_point_names([POINT]), Console(file=out, width=140)) as watch:
        watch(Progress(stage="build", key=POINT.get_key()))
        watch(Progress(stage="measure", key=POINT.get_key(), note="3/9 requests"))
        watch(Progress(stage="done", key=POINT.get_key(), note="10 tok/s"))
    assert out.getvalue().splitlines() == lines


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_narrow_terminal_shortens_the_description_but_not_the_count(width: int) -> None:
    """Keep the count, because the number of finished points matters more than the current one."""
    out = io.StringIO()
    other = Point(model="a-long-name-of-a-model", tp=1, concurrency=2, context=200, backend="reference", dtype="fp32")
    with progress.ProgressBar(
        progress.format_point_names([POINT, other]), Console(file=out, width=width, force_terminal=True)
    ) as watch:
        watch(Progress(stage="done", key=POINT.get_key()))
        watch(Progress(stage="measure", key=other.get_key(), note="3/9 requests, 1,000 tok/s"))
    assert "1/2 points" in re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue())


def test_tables_print_markup_in_names_as_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = Check(
        name="logits",
        layout="tp1",
        backend="b",
        exchange="",
        dtype="fp32",
        error=None,
        limit=1e-3,
        ok=False,
        detail="[red]NaN[/]",
    )
    make_console().print(progress.make_checks_table([wrong]))
    make_console().print(
        progress.make_probe_table(Probe(device="cpu", count=0, name="[bold]CPU", packages={"triton": None}))
    )
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "[red]NaN[/]" in out
    assert "[bold]CPU" in out
    assert "missing" in out
    assert out.count("[") == 3


def test_launcher_events_are_printed_as_sentences() -> None:
    """Print events that do not end a point; only the first letter is capitalised."""
    out = io.StringIO()
    with progress.ProgressBar(progress.format_point_names([POINT]), Console(file=out, width=140)) as watch:
        watch(Progress(stage="stopped", note="torchrun had been stopped (SIGSTOP)"))
        watch(Progress(stage="again", key=POINT.get_key(), note="rank 1: ValueError"))
        watch(Progress(stage="ending", note="writing the requests that have finished"))
    assert out.getvalue().splitlines() == [
        "Torchrun had been stopped (SIGSTOP).",
        "tiny tp1 reference, 2 × 100 tokens  AGAIN, after the others: rank 1: ValueError",
        "Interrupted: writing the requests that have finished",
    ]


def test_device_sizes_are_rounded_not_truncated() -> None:
    """Round 126.75 MiB of L2 cache to 127."""
    out = io.StringIO()
    probe = Probe(
        device="cuda", count=8, name="NVIDIA B200", memory_bytes=178 << 30, l2_bytes=507 << 18, capability="10.0"
    )
    Console(file=out, width=80).print(progress.make_probe_table(probe))
    assert [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()] == [
        "device 8 × NVIDIA B200",
        "memory 178.0 GiB each",
        "L2 cache 127 MiB",
        "compute capability 10.0",
    ]


def test_points_that_a_search_adds_are_named_without_a_count() -> None:
    """Their number is not known before its end: `[1/1]` would stand before each load of a server."""
    out = io.StringIO()
    other = Point(model="tiny", tp=1, concurrency=8, context=100, backend="reference", dtype="fp32")
    with progress.ProgressBar(
        progress.format_point_names([POINT]), Console(file=out, width=140), counted=False
    ) as watch:
        watch(Progress(stage="done", key=POINT.get_key(), note="10 tok/s"))
        watch.add_points([other])
        watch(Progress(stage="done", key=other.get_key(), note="20 tok/s"))
    assert out.getvalue().splitlines() == [
        "tiny tp1 reference, 2 × 100 tokens  10 tok/s",
        "tiny tp1 reference, 8 × 100 tokens  20 tok/s",
    ]


def test_time_left_is_estimated_from_points_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two replays after 300 s of measured steps and 1 s, then three live runs of 20 s, the first of which starts a
    server in 60 s.
    """
    names = {"r1": "first", "r2": "second", "l1": "third", "l2": "fourth", "l3": "fifth"}
    clock = iter([0.0, 300.0, 301.0, 361.0, 381.0, 401.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    now = [next(clock)]
    out = io.StringIO()
    kinds = {key: "replay" if key.startswith("r") else "live" for key in names}
    bar = progress.ProgressBar(names, Console(file=out, width=140), kinds=kinds)
    for key in names:
        now[0] = next(clock)
        bar(Progress(stage="done", key=key))
    assert out.getvalue().splitlines() == [
        "[1/5] first",
        "[2/5] second",
        "[3/5] third  (about 2 min left)",
        "[4/5] fourth  (about 20 s left)",
        "[5/5] fifth",
    ]
