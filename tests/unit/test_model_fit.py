"""The note that the whole model does not fit, which all commands print first and in the same words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.cli import main
from dcpbench.compare import comparison_table, comparison_text
from dcpbench.compare.judging import Options, judge_sides
from dcpbench.dashboard import series
from dcpbench.dashboard.discovery import _format_headline
from dcpbench.models import load_shape
from dcpbench.plan.spec import make_planned_probe
from dcpbench.points.budget import measure_whole_model
from dcpbench.points.memory import GIB
from dcpbench.points.settings import Settings
from dcpbench.recommend import advise, answer_formats
from dcpbench.records.runs import read_run
from dcpbench.reports import dataframes, overview
from dcpbench.reports.terminal_tables import render
from tests.unit import record_builder
from tests.unit.test_recommend import make_choice, make_point, make_query

if TYPE_CHECKING:
    from pathlib import Path

HELD = "GPU memory holds 14 of 61 layers, which run repeatedly"


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, list[str]]:
    """Return the exit code of a command and the lines of its output."""
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    return int(ended.value.code or 0), capsys.readouterr().out.splitlines()


def write_run(folder: Path, held: int) -> Path:
    """Write a run of tp4 and tp4·dcp4 that holds this many of 61 layers."""
    found = []
    for dcp in (1, 4):
        record = record_builder.make_ok_record(
            record_builder.make_point(tp=4, dcp=dcp, exchange="none" if dcp == 1 else "ag_rs")
        )
        assert record.conditions is not None
        conditions = msgspec.structs.replace(record.conditions, layers=61, layers_held=held)
        found.append(msgspec.structs.replace(record, conditions=conditions))
    return record_builder.write_records(folder, found)


def test_first_lines_of_report_show_compare_and_dashboard_have_the_note(tmp_path: Path) -> None:
    """The note is absent if all layers are held."""
    for held, expected in ((14, True), (61, False)):
        write_run(tmp_path / f"a{held}", held)
        write_run(tmp_path / f"b{held}", held)
        read = dataframes.load_frames([tmp_path / f"a{held}"])
        compared = judge_sides([read_run(tmp_path / f"a{held}")], [read_run(tmp_path / f"b{held}")], Options())
        records = read_run(tmp_path / f"a{held}").records
        first_lines = [
            overview.format_answer(read),
            str(render(read).renderables[0]),
            str(comparison_table.render(compared)[0]),
            " ".join(comparison_text.list_notes(compared)[:1]),
            _format_headline(series.collect_lines(records)),
        ]
        assert [HELD in line for line in first_lines] == [expected] * 5, first_lines
        assert [(h.side, h.fewest, h.most, h.layers) for h in compared.layers_held] == (
            [("a", 14, 14, 61), ("b", 14, 14, 61)] if expected else []
        )


def test_compare_names_the_side_that_does_not_fit(tmp_path: Path) -> None:
    write_run(tmp_path / "a", 61)
    write_run(tmp_path / "b", 14)
    compared = judge_sides([read_run(tmp_path / "a")], [read_run(tmp_path / "b")], Options())
    assert comparison_text.format_no_fit_note(compared) == f"{HELD} (B)."


class TestRecommend:
    """DeepSeek-V3 in fp8 needs 157.8 GiB on each of four H200, which have 131.8."""

    def test_first_sentence_has_the_note(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = "recommend --machine H200 --gpus 4 --context 4000 --concurrency 8 --kv-dtype fp8"
        code, (first, *_) = run(capsys, command)
        assert code == 3
        assert first.startswith(
            "No layout of deepseek-v3 on 4 × H200 can be recommended, as the whole model and KV cache do not fit: tp4·dcp4: its weights take 157.8 GiB "
            "and its KV 0.3 GiB of each GPU, 26.2 GiB more than the 131.8 GiB for both"
        )

    def test_first_sentence_has_the_held_layers_with_cycled(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = "recommend --machine H200 --gpus 4 --context 4000 --concurrency 8 --kv-dtype fp8 --cycled"
        code, (first, *_) = run(capsys, command)
        assert code == 0
        assert first.startswith(
            "4 × H200 (GPU memory holds 47–51 of 61 layers, which run repeatedly): at 8 requests × 4,000 tokens, take tp4"
        )

    def test_layouts_with_held_layers_are_named_if_others_fit(self) -> None:
        best = make_choice(100.0)
        held = [dataclasses.replace(f, layers_held=(14, 61)) for f in best.forecasts[:1]]
        other = dataclasses.replace(best.forecasts[0], layers_held=None)
        mixed = dataclasses.replace(best, forecasts=[*held, other])
        name = held[0].point.layout_name
        assert f"({HELD} in {name})" in answer_formats.format_answer(make_query("H200"), [mixed])
        assert "GPU memory holds" not in answer_formats.format_answer(make_query("H200"), [best])

    def test_shortage_is_that_of_the_whole_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        """tp8·dcp4 needs 79.4 GiB of weights and 134.3 of KV. With only the layers that sweep can hold, 8.7 GiB, 11.2
        GiB would be missing.
        """
        _, lines_out = run(capsys, "recommend --machine H200 --gpus 8 --context 128000 --concurrency 64")
        (row,) = (line for line in lines_out if line.split()[:1] == ["tp8·dcp4"])
        assert row.split()[-7:] == ["—", "—", "79.4", "no,", "81.9", "GiB", "short"]
        assert "fewest weights" not in "\n".join(lines_out)

    def test_held_layers_of_a_run_are_dropped_if_the_model_fits(self) -> None:
        """Held layers are dropped for tp8, where the whole model fits, and kept for tp4."""
        forecast = dataclasses.replace(make_choice(100.0).forecasts[0], layers_held=(25, 61))
        fits, cut = (
            dataclasses.replace(forecast, point=make_point(tp=tp, weights_dtype="fp8", kv_dtype="fp8", context=4000))
            for tp in (8, 4)
        )
        wanted = dataclasses.replace(make_query("H200"), cycled=True)
        assert advise._drop_layers_held(wanted, fits).layers_held is None
        assert advise._drop_layers_held(wanted, cut).layers_held == (25, 61)


def test_memory_of_a_whole_model_includes_its_kv() -> None:
    """V3 in fp8 fits on 8 × H200 with the KV of 8 × 4,000 tokens; with a pool of 100 GiB 47.6 GiB are missing."""
    shape, probe = load_shape("deepseek-v3"), make_planned_probe("H200", 8)
    one = make_point(tp=8, weights_dtype="fp8", kv_dtype="fp8", context=4000, concurrency=8)
    assert measure_whole_model(one, Settings(), shape, probe).missing_bytes == 0
    pool = measure_whole_model(one, Settings(kv_memory_bytes=100 * GIB), shape, probe)
    assert pool.kv_bytes == pytest.approx(100 * GIB, rel=0.01)
    assert pool.missing_bytes == pool.weight_bytes + pool.kv_bytes - pool.available_bytes
    assert pool.missing_bytes / GIB == pytest.approx(79.4 + 100 - 131.8, abs=0.2)


def test_dry_run_begins_with_the_note(capsys: pytest.CaptureFixture[str]) -> None:
    command = "sweep --model deepseek-v3 --tp 4 --dcp 1 --weights-dtype fp8 --kv-dtype fp8 --kv-memory 100GiB --dry-run"
    code, (first, *_) = run(capsys, f"{command} --gpu H200,count=4 --context 4000 --concurrency 8")
    assert (code, first) == (0, f"{HELD}.")
