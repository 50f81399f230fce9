"""`dcpbench syncs run` without a program: what its report says of each process, and what it refuses to start."""

from pathlib import Path

import msgspec
import pytest

from dcpbench.errors import OutputError, UsageError
from dcpbench.syncs import run as runs
from dcpbench.syncs.commands import GateOptions, OutputOptions
from dcpbench.syncs.run import Note, Recording
from dcpbench.syncs.sync_report import Coverage, Example, Report, Site, TraceSummary


class TestReport:
    def test_a_rank_without_its_trace_keeps_the_report_from_saying_clean(self) -> None:
        report = Report(traces=[TraceSummary(path="rank0-pid1.json", coverage=Coverage(detector="scan"))])
        notes = [Note(pid=1, rank="0", trace="rank0-pid1.json", cuda=True, steps=3), Note(pid=2, rank="1", cuda=True)]
        runs.add_notes(report, notes, Recording(warmup=4))
        assert [(t.rank, t.coverage.complete) for t in report.traces] == [(None, True), (1, False)]
        assert "--warmup 4 leaves none" in report.traces[1].coverage.notes[0]

    def test_traces_go_by_their_names_when_their_folder_is_gone(self) -> None:
        example = Example(trace="/gone/a.json")
        site = Site(fingerprint="f", rule="SYNC001", kind="k", example=example, traces=["/gone/a.json"])
        report = Report(traces=[TraceSummary(path="/gone/a.json", coverage=Coverage(detector="scan"))], sites=[site])
        runs.remove_folder_names(report, Path("/gone"))
        assert "/gone" not in msgspec.json.encode(report).decode()
        assert report.sites[0].worst is None

    def test_steps_that_were_never_seen_are_told(self) -> None:
        notes = [Note(pid=1, trace="pid1.json", cuda=True, steps=0)]
        assert "a:b was never called" in runs.explain_notes(notes, Recording(step="a:b"))[0]
        assert "--step MODULE:FUNCTION" in runs.explain_notes(notes, Recording())[0]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "says"),
        [({"warmup": -1}, "from 0"), ({"steps": 0}, "from 1"), ({"step": "train_step"}, "MODULE:FUNCTION")],
    )
    def test_wrong_numbers_and_names_say_what_would_do(self, options: dict, says: str) -> None:
        with pytest.raises(UsageError, match=says):
            Recording(**options).check_values()

    def test_a_folder_with_traces_is_not_mixed_with_others(self, tmp_path: Path) -> None:
        (tmp_path / "rank0-pid1.json").write_text("{}")
        with pytest.raises(OutputError, match="already holds traces"):
            Recording(keep=tmp_path).check_values()

    @pytest.mark.parametrize(("command", "says"), [([], "after `--`"), (["script.py"], "-- python script.py")])
    def test_a_command_that_cannot_start_says_how(self, command: list[str], says: str) -> None:
        with pytest.raises(UsageError, match=says):
            runs.run_program(command, Recording(), GateOptions(), OutputOptions())
