"""What a run's folder is refused for, what --force removes, and what --resume may not change."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from dcpbench.errors import OutputError
from dcpbench.launch import folders
from dcpbench.launch.jobs import Job
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.records.file import RecordFile, read_records
from dcpbench.records.folder import CHECKS_FILE, FAILED_FILE, LOCK_FILE, RECORDS_FILE
from dcpbench.records.record import Record
from tests.unit import serve_record_builder

POINT = Point(model="tiny", tp=2, concurrency=2, context=100, backend="triton", dtype="fp32", page_size=64)
RECORD = Record(point=POINT, outcome="ok")
SETTINGS = Settings(kv_memory_bytes=1 << 30)
NOW = folders.list_settings(POINT, SETTINGS, "cpu")


def job(folder: Path, tag: str, settings: Settings = SETTINGS, point: Point = POINT, command: str = "") -> None:
    """A job file as the launcher leaves it."""
    made = Job(
        kind="sweep", tag=tag, folder=str(folder), device="cpu", points=[point], settings=settings, command=command
    )
    made.get_path().write_bytes(msgspec.json.encode(made))
    made.get_progress_path().touch()
    (folder / "logs" / tag).mkdir(parents=True)


class TestLock:
    def test_a_second_run_is_refused_while_the_first_writes(self, tmp_path: Path) -> None:
        """The sentence names the process to end; afterwards the folder is free again."""
        with (
            folders.lock_folder(tmp_path),
            pytest.raises(OutputError, match=rf"still writing here.*pid {os.getpid()}\)"),
        ):
            folders.lock_folder(tmp_path).__enter__()
        with folders.lock_folder(tmp_path):
            pass

    def test_a_job_that_has_the_descriptor_keeps_the_lock(self, tmp_path: Path) -> None:
        """As a torchrun agent whose launcher was killed."""
        with folders.lock_folder(tmp_path) as lock:
            job = subprocess.Popen(["sleep", "infinity"], pass_fds=(lock,))
        try:
            with pytest.raises(OutputError, match="still writing here"):
                folders.lock_folder(tmp_path).__enter__()
        finally:
            job.kill()
            job.wait()
        with folders.lock_folder(tmp_path):
            pass

    def test_a_lock_file_of_anything_else_is_no_error_and_the_refusal_names_nobody(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folders, "ENDING_S", 0.0)
        with folders.lock_folder(tmp_path):
            (tmp_path / LOCK_FILE).write_bytes(b"\x00\xffgarbage -1 99999999999999999999")
            with pytest.raises(OutputError, match=r"still writing here.*\(pid unknown\)"):
                folders.lock_folder(tmp_path).__enter__()

    def test_workers_that_are_ending_are_waited_for(self, tmp_path: Path) -> None:
        """Their command is gone. This one ends as soon as it sees that it is waited for, by the file that is opened."""
        with folders.lock_folder(tmp_path) as lock:
            job = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE, pass_fds=(lock,))
            os.ftruncate(lock, 0)
        looked = []

        def look(seconds: float) -> None:
            looked.append(seconds)
            job.communicate(b"end\n")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders.time, "sleep", look)
            with folders.lock_folder(tmp_path):
                assert len(looked) == 1

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
    def test_a_lock_that_cannot_be_had_is_refused(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without it two runs could write into one folder."""

        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(folders.fcntl, "flock", flock)
        with pytest.raises(OutputError, match=r"gives no lock on \.lock .* a local disk with -o"):
            folders.lock_folder(tmp_path).__enter__()


class TestSweep:
    def test_a_new_folder_is_made_with_its_parents(self, tmp_path: Path) -> None:
        folders.prepare_sweep(tmp_path / "a" / "b", resume=False, force=False)
        assert list((tmp_path / "a" / "b").iterdir()) == []

    def test_records_are_not_overwritten_without_being_asked(self, tmp_path: Path) -> None:
        RecordFile(tmp_path).append(RECORD)
        with pytest.raises(OutputError, match=r"already holds records; add --resume .* --force"):
            folders.prepare_sweep(tmp_path, resume=False, force=False)
        assert read_records(tmp_path) == [RECORD]

    def test_an_empty_record_file_is_nothing_to_protect(self, tmp_path: Path) -> None:
        (tmp_path / RECORDS_FILE).touch()
        folders.prepare_sweep(tmp_path, resume=False, force=False)
        assert read_records(tmp_path) == []

    def test_resume_keeps_what_is_there_and_force_removes_records_jobs_and_logs(self, tmp_path: Path) -> None:
        """A job file left behind would say with which settings the new run was begun."""
        RecordFile(tmp_path).append(RECORD)
        job(tmp_path, "tp2-0")
        (tmp_path / "notes.txt").touch()
        folders.prepare_sweep(tmp_path, resume=True, force=False)
        assert read_records(tmp_path) == [RECORD]
        folders.prepare_sweep(tmp_path, resume=False, force=True)
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["logs", "notes.txt"]


class TestVerify:
    def test_a_sweeps_folder_is_refused_even_with_force(self, tmp_path: Path) -> None:
        """Its records are not verify's to remove, and verify cannot --resume."""
        RecordFile(tmp_path).append(RECORD)
        for force in (False, True):
            with pytest.raises(OutputError, match=r"holds the records of a sweep; .* -o") as caught:
                folders.prepare_checks(tmp_path, force=force)
            assert "--resume" not in str(caught.value)
        assert read_records(tmp_path) == [RECORD]

    @pytest.mark.parametrize("name", [CHECKS_FILE, FAILED_FILE])
    def test_earlier_checks_need_force_and_are_removed_by_it(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text("{}\n")
        with pytest.raises(OutputError, match="add --force to check again") as caught:
            folders.prepare_checks(tmp_path, force=False)
        assert "--resume" not in str(caught.value)
        folders.prepare_checks(tmp_path, force=True)
        assert not (tmp_path / name).exists()


class TestUnwritable:
    @pytest.mark.parametrize("below", [".", "below"])
    def test_a_file_where_the_folder_should_be_is_our_error(self, below: str, tmp_path: Path) -> None:
        (tmp_path / "taken").touch()
        with pytest.raises(OutputError, match=r"(cannot be used as output folder|cannot be read) .*-o"):
            folders.prepare_sweep(tmp_path / "taken" / below, resume=False, force=False)

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc, which not even root can write")
    def test_a_folder_that_exists_and_takes_no_files_is_our_error(self) -> None:
        """mkdir has nothing to complain about there; only writing does."""
        for prepare in (folders.prepare_checks, lambda *a, **k: folders.prepare_sweep(*a, resume=False, **k)):
            with pytest.raises(OutputError, match=r"/proc/self cannot be used as output folder \(.*\); .* -o"):
                prepare(Path("/proc/self"), force=False)


class TestResume:
    def test_the_same_settings_are_no_news(self, tmp_path: Path) -> None:
        assert folders.check_resumed(tmp_path, NOW) == "", "a folder without jobs"
        job(tmp_path, "tp2-0")
        assert folders.check_resumed(tmp_path, NOW) == ""

    def test_another_time_limit_is_told_and_taken(self, tmp_path: Path) -> None:
        """How well a median is known may differ between the points of a run: each record says it."""
        job(tmp_path, "tp2-0")
        now = folders.list_settings(POINT, msgspec.structs.replace(SETTINGS, seconds=3, profile=False), "cpu")
        said = folders.check_resumed(tmp_path, now)
        assert "--seconds was 10 and is 3, --profile was on and is off" in said
        assert "\n" not in said

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"--kv-memory": None}, "--kv-memory was 1073741824B and is not given"),
            ({"--page-size": 1}, "--page-size was 64 and is 1"),
            ({"--page-size interleave": 2}, "--page-size interleave was 1 and is 2"),
            ({"dtype": "bf16"}, "dtype was fp32 and is bf16"),
            ({"--weights": "folder"}, "--weights was synthetic and is folder"),
            ({"--device": "cuda"}, "--device was cpu and is cuda"),
        ],
        ids=lambda x: "".join(x) if isinstance(x, dict) else "",
    )
    def test_what_would_make_points_of_one_run_differ_is_refused(
        self, changed: dict[str, object], words: str, tmp_path: Path
    ) -> None:
        """Pools of other sizes, or points that share nothing with those already there."""
        job(tmp_path, "tp2-0")
        with pytest.raises(OutputError, match="give the value of that run, or another folder with -o") as caught:
            folders.check_resumed(tmp_path, NOW | changed)
        assert words in str(caught.value)

    def test_a_run_of_another_command_is_named_with_what_to_type(self, tmp_path: Path) -> None:
        """Options that one of the two does not have would be the wrong complaint."""
        served = serve_record_builder.point(serve_record_builder.DCP)
        folders.check_same_command(tmp_path, POINT, [])
        job(tmp_path, "tp2-0", point=served, command=f"dcpbench serve --tp 2 -o {tmp_path}")
        with pytest.raises(OutputError, match="holds a run of serve, and this is sweep") as caught:
            folders.check_same_command(tmp_path, POINT, [])
        assert str(caught.value).endswith(f"type: dcpbench serve --tp 2 -o {tmp_path} --resume")
        folders.check_same_command(tmp_path, served, [])

    def test_records_speak_where_there_is_no_job(self, tmp_path: Path) -> None:
        """As of a replay, which needs none."""
        served = serve_record_builder.served(serve_record_builder.point(serve_record_builder.DCP))
        assert served.environment
        typed = msgspec.structs.replace(served.environment, command="dcpbench serve --mode replay")
        record = msgspec.structs.replace(served, environment=typed)
        with pytest.raises(OutputError, match=rf"type: dcpbench serve --mode replay -o {tmp_path} --resume$"):
            folders.check_same_command(tmp_path, POINT, [record])

    def test_the_last_job_speaks_for_the_run_and_a_damaged_file_does_not(self, tmp_path: Path) -> None:
        """Three jobs with 10, 3 and unreadable settings, written in this order."""
        job(tmp_path, "tp2-0")
        job(tmp_path, "tp2-1", msgspec.structs.replace(SETTINGS, seconds=3))
        (tmp_path / "job-tp2-2.json").write_text("{half")
        for age, tag in ((30, "tp2-0"), (20, "tp2-1"), (10, "tp2-2")):
            os.utime(tmp_path / f"job-{tag}.json", (1e9 - age, 1e9 - age))
        assert "--seconds was 3 and is 10" in folders.check_resumed(tmp_path, NOW)


def test_a_run_notices_that_its_folder_is_another_one(tmp_path: Path) -> None:
    """Moved away, and made anew by somebody else."""
    folder = tmp_path / "run"
    with folders.lock_folder(folder) as lock:
        folders.check_not_removed(folder, lock)
        folder.rename(tmp_path / "moved")
        with pytest.raises(OutputError, match="was removed or moved away while the run was writing there"):
            folders.check_not_removed(folder, lock)
        folder.mkdir()
        (folder / LOCK_FILE).touch()
        with pytest.raises(OutputError, match="was removed or moved away"):
            folders.check_not_removed(folder, lock)


def test_workers_of_a_command_that_is_gone_are_looked_for_twenty_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They get five seconds to end."""
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(folders.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folders.time, "sleep", sleep)
    monkeypatch.setattr(folders, "find_alive", lambda _: ("workers", None))
    monkeypatch.setattr(folders, "find_alive_pid", lambda _: None)
    with folders.lock_folder(tmp_path), pytest.raises(OutputError, match="pid unknown"):
        folders.lock_folder(tmp_path).__enter__()
    assert set(slept) == {0.05}
    assert sum(slept) == pytest.approx(5.0, abs=0.051)
