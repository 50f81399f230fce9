"""Test the state that `dcpbench top` computes from a run's files."""

from __future__ import annotations

import math
import os
import statistics
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.launch.jobs import WAITING, Check, Failure
from dcpbench.launch.processes import COMMAND, NONE, WORKERS
from dcpbench.records import student
from dcpbench.records.file import RecordFile
from dcpbench.records.record import Record
from dcpbench.show.text import MAX_LINE_CHARS
from dcpbench.top.facts import Facts
from dcpbench.top.state import estimate_time_left
from tests.unit import top_builder as build
from tests.unit.serve_record_builder import make_load

if TYPE_CHECKING:
    from pathlib import Path

FOUR = [build.make_point(context) for context in (100, 200, 300, 400)]


class TestPoints:
    def test_points_are_counted_by_outcome(self, tmp_path: Path) -> None:
        """Count four runnable points (one measured, one failed, one in progress, one to come) and a rejected one."""
        job = build.write_job(tmp_path, FOUR)
        build.add_record(tmp_path, build.make_point(999), start=0, seconds=0, outcome="rejected", reason="too long")
        build.add_finished_point(job, tmp_path, FOUR[0], 1, 11)
        build.add_record(tmp_path, FOUR[1], start=11, outcome="failed", reason="rank 1: ValueError")
        build.add_event(job, 22, "measure", FOUR[2], "3/9 requests")
        found = build.make_state(tmp_path, 25)
        assert (found.total, found.ok, found.failed, found.rejected, found.left) == (4, 1, 1, 1, 2)
        assert found.now
        assert found.now.point == "tiny tp2 reference, 2 × 300 tokens"
        assert (found.now.stage, found.now.stage_s, found.now.note) == ("measure", 3, "3/9 requests")
        assert (found.now.silent_s, found.now.timeout_s) == (3, 300)
        assert [(p.outcome, p.tok_s, p.itl_ms) for p in found.last] == [("ok", 200, 10), ("failed", None, None)]

    def test_hung_point_counts_as_failed(self, tmp_path: Path) -> None:
        build.write_job(tmp_path, FOUR)
        build.add_record(tmp_path, FOUR[0], start=0, outcome="hung", reason="no sign of life for 300 s")
        assert build.make_state(tmp_path, 25).failed == 1

    def test_resumed_run_counts_failed_points_as_left(self, tmp_path: Path) -> None:
        """Measure one point and fail one in the first command; the second, 1,000 s later, lists all four points."""
        first = build.write_job(tmp_path, FOUR)
        build.add_finished_point(first, tmp_path, FOUR[0], 0, 10)
        build.add_record(tmp_path, FOUR[1], start=10, outcome="failed", reason="rank 1")
        build.write_job(tmp_path, FOUR[1:], pool=FOUR, tag="tp2-1", at=1005, command="dcpbench sweep --tp 2 --resume")
        found = build.make_state(tmp_path, 1010, began=1000)
        assert (found.ok, found.failed, found.left, found.elapsed_s) == (1, 0, 3, 10)
        assert found.points_per_minute is None

    def test_points_are_counted_by_world_size(self, tmp_path: Path) -> None:
        wide = build.make_point(100, tp=4)
        job = build.write_job(tmp_path, FOUR, pool=[*FOUR, wide])
        build.add_finished_point(job, tmp_path, FOUR[0], 0, 10)
        found = build.make_state(tmp_path, 11)
        assert [(s.tp, s.finished, s.total) for s in found.sizes] == [(2, 1, 4), (4, 0, 1)]

    def test_replay_without_jobs_has_no_total_of_points(self, tmp_path: Path) -> None:
        build.add_record(tmp_path, FOUR[0], start=0, seconds=2)
        found = build.make_state(tmp_path, 3)
        assert (found.kind, found.ok, found.total, found.left, found.eta) == ("", 1, None, None, None)

    def test_replay_without_jobs_ends_with_its_last_point(self, tmp_path: Path) -> None:
        """Expect 2 s for a single point of 2 s, however much later the state is read."""
        build.add_record(tmp_path, FOUR[0], start=0, seconds=2)
        found = build.make_state(tmp_path, 99, alive=NONE)
        assert (found.status, found.elapsed_s) == ("ended", 2)

    @pytest.mark.parametrize(("start", "failed"), [(988, 1), (987, 0)])
    def test_failure_up_to_two_seconds_before_the_command_is_counted(
        self, tmp_path: Path, start: float, failed: int
    ) -> None:
        """Allow 2 s because records have whole seconds; a failure 3 s before belongs to an earlier command."""
        build.write_job(tmp_path, FOUR, at=1001)
        build.add_record(tmp_path, FOUR[0], start=start, outcome="failed")
        assert build.make_state(tmp_path, 1012, began=1000).failed == failed

    def test_run_of_served_points_has_the_kind_serve(self, tmp_path: Path) -> None:
        build.write_job(tmp_path, [build.make_point(100, workload="serve", load=make_load())])
        assert build.make_state(tmp_path, 1).kind == "serve"


class TestTime:
    def test_time_left_is_estimated_from_finished_points(self, tmp_path: Path) -> None:
        """Expect 2 · 10 - 5 = 15 s for two points of 10 s left, 5 s into the first; 2 points in 20 s are 6 a minute."""
        job = build.write_job(tmp_path, FOUR)
        build.add_finished_point(job, tmp_path, FOUR[0], 0, 10)
        build.add_finished_point(job, tmp_path, FOUR[1], 10, 20)
        build.add_event(job, 20, "measure", FOUR[2])
        found = build.make_state(tmp_path, 25)
        assert found.eta
        assert (found.eta.seconds, found.eta.low, found.eta.points) == (15, None, 2)
        assert (found.points_per_minute, found.elapsed_s) == (6, 25)

    def test_points_that_were_not_tried_do_not_shorten_the_estimate(self, tmp_path: Path) -> None:
        """Fail one point after 10 s and skip two others; the estimate for the fourth stays 10 s."""
        build.write_job(tmp_path, FOUR)
        build.add_record(tmp_path, FOUR[0], start=0, outcome="failed")
        for spared in FOUR[1:3]:
            build.add_record(tmp_path, spared, start=0, seconds=0, outcome="failed")
        found = build.make_state(tmp_path, 10)
        assert (found.failed, found.left) == (3, 1)
        assert found.eta
        assert (found.eta.seconds, found.eta.points) == (10, 1)

    def test_range_of_time_left_is_the_prediction_interval_of_a_sum(self) -> None:
        """Use 8, 10 and 12 s: mean 10, s = 2, t(2) = 4.30. Four left: 40 ± 4.30 · 2 · √(4 + 16/3) = 40 ± 26.27."""
        found = estimate_time_left([8, 10, 12], 4)
        assert found
        half = 4.30 * 2 * math.sqrt(4 + 16 / 3)
        assert (found.seconds, found.low, found.high) == (40, pytest.approx(40 - half), pytest.approx(40 + half))

    @pytest.mark.parametrize("n", range(3, 16))
    def test_range_of_time_left_follows_students_t_distribution(self, n: int) -> None:
        """Expect ± t(n - 1) · s · √(1 + 1/n) for n points at 9 and 11 s alternately with one left; beyond the table t
        is 2.2.
        """
        durations = [9.0 + 2 * (i % 2) for i in range(n)]
        found = estimate_time_left(durations, 1)
        assert found
        assert found.high is not None
        t = 2.2 if n > 11 else round(student.compute_quantile(0.025, n - 1), 2)
        half = t * statistics.stdev(durations) * math.sqrt(1 + 1 / n)
        assert found.high - found.seconds == pytest.approx(half, abs=0.01 * half)
        assert estimate_time_left(durations[:2], 1).high is None

    def test_range_of_time_left_does_not_go_below_zero(self) -> None:
        """Use 1, 100 and 1 s: ± 4.30 · 57 is far more than the 34 s that are left."""
        found = estimate_time_left([1, 100, 1], 1)
        assert found
        assert (found.low, found.seconds) == (0, 34)

    def test_time_left_does_not_go_below_zero(self) -> None:
        """Spend 100 s on the last point where others take 10 s."""
        found = estimate_time_left([8, 10, 12], 1, spent=100)
        assert found
        assert (found.seconds, found.low) == (0, 0)

    @pytest.mark.parametrize(("durations", "left"), [([], 3), ([10.0], 0)], ids=["nothing ended", "nothing left"])
    def test_time_left_is_none_without_finished_or_remaining_points(self, durations: list[float], left: int) -> None:
        assert estimate_time_left(durations, left) is None


class TestStatus:
    @pytest.mark.parametrize(
        ("alive", "at", "status"),
        [
            (COMMAND, 20, "running"),
            (COMMAND, 80, "silent"),
            (WORKERS, 20, "orphaned"),
            (NONE, 20, "stopped"),
        ],
    )
    def test_status_of_a_run_with_points_left(self, tmp_path: Path, alive: str, at: float, status: str) -> None:
        job = build.write_job(tmp_path, FOUR)
        build.add_event(job, 10, "measure", FOUR[0])
        assert build.make_state(tmp_path, at, alive=alive).status == status

    @pytest.mark.parametrize(("alive", "status"), [(COMMAND, "finishing"), (NONE, "ended")])
    def test_status_of_a_run_after_its_last_point(self, tmp_path: Path, alive: str, status: str) -> None:
        job = build.write_job(tmp_path, FOUR[:1])
        build.add_finished_point(job, tmp_path, FOUR[0], 0, 10)
        found = build.make_state(tmp_path, 11, alive=alive)
        assert (found.status, found.now, found.eta) == (status, None, None)

    def test_run_without_events_is_starting(self, tmp_path: Path) -> None:
        assert build.make_state(tmp_path, 1).status == "starting"
        build.write_job(tmp_path, FOUR)
        assert build.make_state(tmp_path, 2).status == "starting"

    def test_fresh_files_without_a_process_belong_to_another_machine(self, tmp_path: Path) -> None:
        """Leave a rank's pid file, as no command has ended the job; the status changes after a while, or once the run
        was seen here.
        """
        job = build.write_job(tmp_path, FOUR)
        build.add_event(job, 10, "measure", FOUR[0])
        (tmp_path / "rank-0.pid").write_text("1")
        assert build.make_state(tmp_path, 20, alive=NONE, began=None).status == "elsewhere"
        assert build.make_state(tmp_path, 20, alive=NONE, began=None, known_here=True).status == "stopped"
        assert build.make_state(tmp_path, 80, alive=NONE, began=None).status == "stopped"

    @pytest.mark.parametrize(
        ("timeout", "stage", "seconds"), [(60, "measure", 60), (60, "build", 300), (900, "build", 900)]
    )
    def test_limit_of_silence_is_that_of_the_job_in_its_stage(
        self, tmp_path: Path, timeout: float, stage: str, seconds: float
    ) -> None:
        job = build.write_job(tmp_path, FOUR, timeout=timeout)
        build.add_event(job, 1, stage, FOUR[0])
        found = build.make_state(tmp_path, 2)
        assert found.now
        assert found.now.timeout_s == seconds


class TestExitCode:
    @pytest.mark.parametrize(("outcome", "code"), [("ok", 0), ("failed", 4), ("hung", 4)])
    def test_exit_code_of_an_ended_run_follows_its_outcomes(self, tmp_path: Path, outcome: str, code: int) -> None:
        build.write_job(tmp_path, FOUR[:1])
        build.add_record(tmp_path, FOUR[0], start=0, outcome=outcome)
        assert build.make_state(tmp_path, 11, alive=NONE).exit_code == code
        assert build.make_state(tmp_path, 11).exit_code is None, "the command is alive"

    def test_stopped_run_has_exit_code_130_unless_a_rank_failed(self, tmp_path: Path) -> None:
        """Stop a run as Ctrl-C does; with an error file of a rank it has failed instead."""
        build.write_job(tmp_path, FOUR)
        assert build.make_state(tmp_path, 99, alive=NONE).exit_code == 130
        failure = Failure(rank=1, key="", kind="ValueError", message="no such row", traceback="")
        (tmp_path / "error-1.json").write_bytes(msgspec.json.encode(failure))
        found = build.make_state(tmp_path, 99, alive=NONE)
        assert (found.exit_code, found.problem) == (4, "rank 1: ValueError: no such row")

    @pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)], ids=["all agree", "one is wrong"])
    def test_verify_with_a_failed_check_has_exit_code_1(self, tmp_path: Path, ok: bool, code: int) -> None:
        job = build.write_job(tmp_path, FOUR[:1], kind="verify", pool=[])
        build.add_event(job, 5, "done", FOUR[0])
        check = Check(
            name="reduce", layout="tp2", backend="reference", exchange="none", dtype="fp32", error=0.1, limit=1, ok=ok
        )
        build.append_data(tmp_path / "checks.jsonl", msgspec.json.encode(check) + b"\n")
        found = build.make_state(tmp_path, 9, alive=NONE)
        assert (found.kind, found.total, found.ok, found.exit_code) == ("verify", 1, 1, code)


class TestFiles:
    def test_incomplete_line_is_read_once_it_is_complete(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, FOUR)
        build.add_event(job, 1, "build", FOUR[0])
        whole = job.get_progress_path().read_bytes()
        facts = Facts(tmp_path)
        build.make_state(facts, 2)
        build.append_data(job.get_progress_path(), whole.replace(b"build", b"check")[:40])
        assert (before := build.make_state(facts, 3).now)
        build.append_data(job.get_progress_path(), whole.replace(b"build", b"check")[40:])
        assert (after := build.make_state(facts, 4).now)
        assert (before.stage, after.stage) == ("build", "check")

    def test_unreadable_lines_are_counted_and_the_rest_is_shown(self, tmp_path: Path) -> None:
        """Write invalid JSON, JSON of another type, invalid UTF-8, another schema version, and half a job file."""
        job = build.write_job(tmp_path, FOUR)
        build.add_event(job, 1, "measure", FOUR[0])
        build.append_data(job.get_progress_path(), b'{"stage":\n[1]\n\xff\xfe\n\n')
        build.add_event(job, 2, "profile", FOUR[0])
        build.add_record(tmp_path, FOUR[1], start=0, schema_version=99)
        (tmp_path / "job-tp4-0.json").write_bytes(b'{"kind": "sw')
        found = build.make_state(tmp_path, 3)
        assert found.now
        assert found.now.stage == "profile"
        assert found.unread == {"progress-tp2-0.jsonl": 3, "records.jsonl": 1, "job-tp4-0.json": 1}

    def test_file_without_read_permission_is_reported_as_unread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Report the file, because a run with another user's records would otherwise look as if it had measured
        nothing.
        """
        build.write_job(tmp_path, FOUR)
        RecordFile(tmp_path).append(Record(point=FOUR[0], outcome="failed", reason="it died"))
        open_path = type(tmp_path).open

        def refuse_records(path: Path, *args: Any, **options: Any) -> object:
            if path.name == "records.jsonl":
                raise PermissionError(13, "Permission denied", str(path))
            return open_path(path, *args, **options)

        monkeypatch.setattr(type(tmp_path), "open", refuse_records)
        assert build.make_state(tmp_path, 3).unread == {"records.jsonl": 1}

    def test_record_with_a_wrong_checksum_is_counted_as_unread(self, tmp_path: Path) -> None:
        build.write_job(tmp_path, FOUR)
        RecordFile(tmp_path).append(Record(point=FOUR[0], outcome="failed", reason="it died"))
        RecordFile(tmp_path).append(Record(point=FOUR[1], outcome="failed", reason="it died"))
        path = tmp_path / "records.jsonl"
        path.write_bytes(path.read_bytes().replace(b"it died", b"it dyed", 1))
        found = build.make_state(tmp_path, 3)
        assert (found.failed, found.unread) == (1, {"records.jsonl": 1})

    def test_points_added_to_an_open_job_are_counted(self, tmp_path: Path) -> None:
        job = build.write_job(tmp_path, FOUR[:1], pool=[], is_open=True)
        build.add_finished_point(job, tmp_path, FOUR[0], 0, 10)
        build.add_event(job, 10, WAITING)
        facts = Facts(tmp_path)
        assert build.make_state(facts, 11).left == 0
        build.write_job(tmp_path, FOUR[:3], pool=[], is_open=True)
        build.add_event(job, 12, "measure", FOUR[1])
        found = build.make_state(facts, 13)
        assert (found.total, found.ok, found.left) == (3, 1, 2)
        assert found.now
        assert (found.now.point, found.now.stage_s) == ("tiny tp2 reference, 2 × 200 tokens", 1)

    def test_restarted_run_is_read_from_its_new_files(self, tmp_path: Path) -> None:
        """Replace job, events and records by files of the same names, as --force does."""
        job = build.write_job(tmp_path, FOUR)
        build.add_finished_point(job, tmp_path, FOUR[0], 0, 10)
        facts = Facts(tmp_path)
        assert build.make_state(facts, 11).ok == 1
        for path in tmp_path.iterdir():
            path.unlink()
        build.write_job(tmp_path, FOUR[:2])
        found = build.make_state(facts, 12)
        assert (found.ok, found.total, found.last) == (0, 2, [])

    def test_hostile_texts_become_short_and_printable(self, tmp_path: Path) -> None:
        hostile = build.make_point(100, model="\x1b[2J\x1b]0;owned\x07[red]" + "m" * 10_000_000)
        job = build.write_job(tmp_path, [hostile])
        build.add_event(job, 1, "\x1b[31mmeasure", hostile, "\x9b2J\r\n" + "n" * 10_000_000)
        build.add_record(tmp_path, hostile, start=0, outcome="failed", reason="\u202e" + "r" * 10_000_000)
        found = build.make_state(tmp_path, 2, began=-99)
        encoded = msgspec.json.encode(found).decode()
        assert all(c.isprintable() for c in encoded)
        assert len(encoded) < 10 * MAX_LINE_CHARS

    def test_pipe_in_place_of_a_file_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "records.jsonl")
        assert build.make_state(tmp_path, 1).ok == 0
