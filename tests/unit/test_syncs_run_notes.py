"""Test `dcpbench syncs run` without a program: the notes of its report on each process, and its refusals."""

from pathlib import Path

import msgspec
import pytest

from dcpbench.errors import OutputError, UsageError
from dcpbench.syncs import run as runs
from dcpbench.syncs.commands import GateOptions, OutputOptions
from dcpbench.syncs.gating.gate import Gate, compute_verdict
from dcpbench.syncs.run import Note, Recording
from dcpbench.syncs.sync_report import Coverage, Example, Report, Site, TraceSummary
from tests.unit.trace_builder import Trace


class TestReport:
    def test_report_with_a_rank_without_a_trace_is_not_clean(self) -> None:
        report = Report(traces=[TraceSummary(path="rank0-pid1.json", coverage=Coverage(detector="scan"))])
        notes = [Note(pid=1, rank="0", trace="rank0-pid1.json", cuda=True, steps=3), Note(pid=2, rank="1", cuda=True)]
        runs.add_notes(report, notes, Recording(warmup=4))
        assert [(t.rank, t.coverage.complete) for t in report.traces] == [(None, True), (1, False)]
        assert "--warmup 4 leaves none" in report.traces[1].coverage.damage[0]

    def test_trace_that_is_cut_short_has_the_cause_as_reason(self) -> None:
        report = Report(traces=[TraceSummary(path="pid1.json", coverage=Coverage(detector="scan", gpu_events=1))])
        note = Note(pid=1, trace="pid1.json", cuda=True, cut=True, steps=3, problems=["the program has a profiler"])
        runs.add_notes(report, [note], Recording())
        (reason,) = compute_verdict(report, Gate(root=Path("/nonexistent"))).reasons
        assert reason == "pid1.json is cut short: the program has a profiler."
        assert runs.explain_notes([note], Recording()) == []

    def test_recording_without_a_matching_range_is_not_lost(self, tmp_path: Path) -> None:
        """The recorded program may have run for hours."""
        trace = Trace().work()
        trace.range("decode", 0, 900)
        trace.item(100, 200)
        (tmp_path / "pid1.json").write_text(trace.text())
        gate = Gate(root=tmp_path, step_range="^prefill", max_per_step=3)
        report = runs.scan_recordings(tmp_path, gate)
        assert len(report.sites) == 1
        verdict = compute_verdict(report, gate)
        assert verdict.exit_code == 3
        assert f"{tmp_path}/pid1.json has no range that matches --step-range '^prefill'" in verdict.reasons[0]

    def test_other_steps_do_not_stand_for_the_range(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for step in range(3):
            trace.range(f"ProfilerStep#{step}", step * 1000, step * 1000 + 900)
        (tmp_path / "pid1.json").write_text(trace.text())
        gate = Gate(root=tmp_path, step_range="^prefill", max_per_step=3)
        assert compute_verdict(runs.scan_recordings(tmp_path, gate), gate).exit_code == 3

    def test_traces_of_a_missing_folder_are_shown_by_name(self) -> None:
        example = Example(trace="/gone/a.json")
        site = Site(fingerprint="f", rule="SYNC001", kind="k", example=example, traces=["/gone/a.json"])
        report = Report(traces=[TraceSummary(path="/gone/a.json", coverage=Coverage(detector="scan"))], sites=[site])
        runs.remove_folder_names(report, Path("/gone"))
        assert "/gone" not in msgspec.json.encode(report).decode()
        assert report.sites[0].worst is None

    def test_steps_that_were_never_recorded_have_a_note(self) -> None:
        notes = [Note(pid=1, trace="pid1.json", cuda=True, steps=0)]
        assert "a:b was never called" in runs.explain_notes(notes, Recording(step="a:b"))[0]
        assert "--step MODULE:FUNCTION" in runs.explain_notes(notes, Recording())[0]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [({"warmup": -1}, "from 0"), ({"steps": 0}, "from 1"), ({"step": "train_step"}, "MODULE:FUNCTION")],
    )
    def test_invalid_options_are_refused_with_valid_ones(self, options: dict, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            Recording(**options).check_values()

    def test_folder_that_already_has_traces_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "rank0-pid1.json").write_text("{}")
        with pytest.raises(OutputError, match="already holds traces"):
            Recording(keep=tmp_path).check_values()

    @pytest.mark.parametrize(("command", "message"), [([], "after `--`"), (["script.py"], "-- python script.py")])
    def test_command_that_cannot_start_is_refused_with_a_remedy(self, command: list[str], message: str) -> None:
        with pytest.raises(UsageError, match=message):
            runs.run_program(command, Recording(), GateOptions(), OutputOptions())
