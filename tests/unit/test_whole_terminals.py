"""What terminals show in colour, and comparisons made at random, whole, as tests/data/said/ has it.

Rich's codes of colours are written as ‹red› and so on, so that a style that changes is seen. `SAID=write` writes the files anew, as for
test_whole_outputs.py.
"""

from __future__ import annotations

import io
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rich.default_styles import DEFAULT_STYLES

from dcpbench.compare import ci, gate, markdown, table
from dcpbench.compare.judging import Options, judge_sides
from dcpbench.compare.sides import read_side
from dcpbench.errors import DcpbenchError
from dcpbench.launch import progress
from dcpbench.launch.jobs import Check
from dcpbench.launch.jobs import Progress as Event
from dcpbench.plan.spec import make_planned_probe
from dcpbench.records.formulas import compute_decode_metrics
from dcpbench.reports import frames
from dcpbench.reports import terminal as report_terminal
from dcpbench.syncs.formats import table as syncs_table
from dcpbench.top.render import render_state as top_render
from tests.unit import compare_builder, record_builder, serve_record_builder, syncs_builder, top_builder
from tests.unit.test_whole_outputs import RUNS, hold, measured, resumed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dcpbench.records.record import Record

CODES = {
    "0": "",
    "1": "bold ",
    "2": "dim ",
    "31": "red ",
    "32": "green ",
    "33": "yellow ",
    "36": "cyan ",
    "1;31": "bold red ",
    "1;32": "bold green ",
    "1;33": "bold yellow ",
}


def coloured(*parts: RenderableType, width: int = 120) -> str:
    """As a terminal shows it, with codes in words; links without what they lead to."""
    out = io.StringIO()
    for style in DEFAULT_STYLES.values():
        style._ansi = None  # Rich keeps the codes of the first colour system, which another test may have chosen
    console = Console(
        file=out,
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        markup=False,
        highlight=False,
    )
    for part in parts:
        console.print(part)
    return worded(out.getvalue())


def worded(text: str) -> str:
    """Codes in words."""
    text = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\", "", text)
    return re.sub(
        r"\x1b\[([\d;]*)m",
        lambda m: f"‹{CODES.get(m[1], m[1] + ' ').strip()}›" if m[1] not in ("", "0") else "‹›",
        text,
    )


def test_colours_of_a_run_that_is_watched(tmp_path: Path) -> None:
    """While it runs, silent, and stopped."""
    said = []
    for story in (measured, resumed):
        story(tmp_path / story.__name__)
        for at, alive in ((45, "command"), (200, "command"), (200, "workers"), (200, "")):
            state = msgspec.structs.replace(top_builder.state(tmp_path / story.__name__, at, alive=alive), folder="run")
            said.append(coloured(top_render(state, 100, 40), width=100))
    hold("coloured-top.txt", "\n".join(said), tmp_path)


@pytest.mark.parametrize("name", RUNS)
def test_colours_of_a_table_of_points(name: str, tmp_path: Path) -> None:
    """Those that miss their objectives stand out."""
    read = frames.load_frames([record_builder.write(tmp_path / "run", RUNS[name]())], slo={"ttft": 2000.0, "itl": 45.0})
    hold(f"coloured-{name}.txt", coloured(report_terminal.render(read)), tmp_path)


def test_colours_of_sites(tmp_path: Path) -> None:
    """On a wide terminal and on a narrow one."""
    said = [
        worded(syncs_table.render(syncs_builder.all_kinds(), root=tmp_path, width=width, terminal=True))
        for width in (160, 110, 109, 20)
    ]
    hold("coloured-syncs.txt", "\n".join(said), tmp_path)


class Clock:
    """Time that is put forward."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """As time.monotonic."""
        return self.now


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("brief", [False, True])
def test_progress_of_points(terminal: bool, brief: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five points: one at work for long, one that fails after it was begun again, one that hangs; then an interrupt."""
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    out = io.StringIO()
    console = Console(file=out, width=90, force_terminal=terminal, color_system=None, legacy_windows=False)
    shown: list[dict[str, Any]] = []
    bar = progress.ProgressBar(
        {"a": "first", "b": "second", "c": "third", "d": "fourth", "e": "fifth"}, console, "points", brief=brief
    )
    if terminal:
        monkeypatch.setattr(
            bar, "_bar", SimpleNamespace(update=lambda _, **told: shown.append(told), start=bool, stop=bool)
        )
    with bar:
        for later, stage, key, note in (
            (1, "start", "", ""),
            (1, "build", "a", ""),
            (59, "measure", "a", "10 of 30"),
            (1, "measure", "a", "11 of 30"),
            (60, "measure", "a", "20 of 30"),
            (1, "done", "a", "5.00 ms/step"),
            (5, "again", "b", "rank 1: no such row"),
            (20, "done", "c", ""),
            (2, "failed", "b", "rank 1: no such row"),
            (1, "hung", "d", ""),
            (1, "done", "x", "nobody's"),
            (1, "ending", "", "writing what has finished"),
            (1, "stopped", "", "torchrun had been stopped"),
        ):
            clock.now += later
            bar(Event(stage=stage, key=key, note=note))
    lines = [out.getvalue(), *map(str, shown)]
    hold(f"progress-{'terminal' if terminal else 'pipe'}{'-brief' if brief else ''}.txt", "\n".join(lines), tmp_path)


def test_tables_of_checks_and_of_a_machine(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"layout": "tp2·dcp2", "backend": "triton", "exchange": "a2a", "dtype": "bf16"}
    checks = [
        Check(name="reduce", error=0.00123, limit=0.01, ok=True, **fields),
        Check(name="logits", ep="tp", error=None, limit=0.01, ok=False, detail="rank 1, row 7", **fields),
        Check(name="tokens", error=0.5, limit=None, ok=True, **{**fields, "exchange": "none", "layout": "tp2"}),
    ]
    gpus = make_planned_probe("H200", 8)
    plain = msgspec.structs.replace(
        gpus, packages={"torch": "2.9", "flashinfer": ""}, count=0, name="CPU", capability="", l2_bytes=None
    )
    notes = [progress.format_plan_note(gpus.gpu, 8, nodes) for nodes in (1, 2)] if gpus.gpu else []
    said = coloured(
        progress.make_checks_table(checks),
        progress.make_env_table(gpus),
        progress.make_env_table(plain),
        *notes,
        width=140,
    )
    hold("coloured-checks.txt", said, tmp_path)


def sides(rng: random.Random, folder: Path) -> tuple[Path, Path]:
    """Two sides of a few launches each: some points are missing, failed, marked, of a CPU, or of another environment."""
    found = []
    shift = rng.choice([1.0, 1.0, 1.01, 1.03, 0.97])
    cpu, served = rng.random() < 0.15, rng.random() < 0.25
    for side in ("a", "b"):
        faster = shift if side == "b" else 1.0
        for launch in range(rng.choice([1, 4, 5, 6])):
            noise = np.random.default_rng(rng.randrange(1 << 30))
            records: list[Record] = []
            if served:
                records = [
                    serve_record_builder.served(
                        serve_record_builder.point(concurrency=n), faster=faster * float(noise.normal(1, 0.002))
                    )
                    for n in (8, 32)
                ]
            for load in compare_builder.LOADS:
                record = compare_builder.finished(load)
                level = 10 * float(np.exp(noise.normal(0, 0.004))) / faster
                metrics = compute_decode_metrics(compare_builder.steps(noise, level, "normal"), load, record.point.tp)
                change: dict[str, Any] = {
                    "metrics": metrics,
                    "started_at": f"at {launch}",
                    "memory_peak_bytes": (131 << 30) + rng.choice([0, 0, 1 << 28]),
                }
                change |= {"host_syncs_per_step": rng.choice([0.0, 0.0, 1.0]), "marks": rng.choice([[], [], ["noisy"]])}
                change |= {"environment": record_builder.CPU, "gpu": None} if cpu else {}
                change |= (
                    {"environment": msgspec.structs.replace(record_builder.GPU, driver="580.1")}
                    if side == "b" and rng.random() < 0.2
                    else {}
                )
                fate = rng.random()
                if fate < 0.05:
                    records.append(record_builder.failed(record.point))
                elif fate > 0.1:
                    records.append(msgspec.structs.replace(record, **change))
            record_builder.write(folder / side / f"launch-{launch}", records)
        found.append(folder / side)
    return found[0], found[1]


@pytest.mark.parametrize("seed", range(8))
def test_comparisons_made_at_random(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, as Markdown and for CI; held against rules that some of them break."""
    monkeypatch.chdir(tmp_path)  # where paths are short
    rng = random.Random(seed)
    a, b = (read_side([path]) for path in sides(rng, Path()))
    paired = len(a) == len(b) > 1 and rng.random() < 0.5
    options = Options(
        margin=rng.choice([0.01, 0.02]),
        paired=paired,
        allow_cpu=rng.random() < 0.5,
        launch_noise=rng.choice([None, 0.005]),
    )
    rules = gate.read_rules(
        rng.choice(["slower:2%", "slower:0.5%,memory:0.1%,syncs:+0,undecided,missing", "itl_p50:+0.2,itl_p99:1%", None])
    )
    try:
        found = judge_sides(a, b, options)
    except DcpbenchError as e:
        hold(f"comparisons/{seed:02}.txt", f"{type(e).__name__}: {e}", tmp_path)
        return
    gate.apply_rules(found, rules)
    text = coloured(*table.render(found, every=seed % 2 == 0), width=100)
    rows = [
        " ".join(
            "-" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)
            for v in (
                p.name,
                r.metric,
                r.a,
                r.b,
                r.ratio,
                r.low,
                r.high,
                r.verdict,
                r.p_differs,
                r.p_same,
                r.confidence,
                r.launches,
                r.repeats,
                r.more_launches,
                r.missing_launches,
                r.judged,
                r.least_visible,
            )
        )
        for p in found.points
        for r in p.rows
    ]
    hold(
        f"comparisons/{seed:02}.txt",
        "\n".join(
            [
                str(options),
                text,
                *gate.list_unused(found, rules),
                markdown.render(found),
                ci.format_junit(found),
                ci.format_github(found),
                *rows,
            ]
        ),
        tmp_path,
    )
