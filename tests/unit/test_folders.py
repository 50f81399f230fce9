"""Run folders: refusals, files that --force removes, and settings that --resume may not change."""

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

POINT = Point(model="tiny", tp=2, dcp=2, concurrency=2, context=100, backend="triton", dtype="fp32", page_size=64)
RECORD = Record(point=POINT, outcome="ok")
SETTINGS = Settings(kv_memory_bytes=1 << 30)
NOW = folders.list_settings([POINT], SETTINGS, "cpu")


def write_job(folder: Path, tag: str, settings: Settings = SETTINGS, point: Point = POINT, command: str = "") -> None:
    """Write a job file as the launcher does."""
    made = Job(
        kind="sweep", tag=tag, folder=str(folder), device="cpu", points=[point], settings=settings, command=command
    )
    made.get_path().write_bytes(msgspec.json.encode(made))
    made.get_progress_path().touch()
    (folder / "logs" / tag).mkdir(parents=True)


class TestLock:
    def test_a_second_run_is_refused_while_the_first_writes(self, tmp_path: Path) -> None:
        """The error names the process to end; later the folder is free again."""
        with (
            folders.lock_folder(tmp_path),
            pytest.raises(OutputError, match=rf"still writing here.*pid {os.getpid()}\)"),
        ):
            folders.lock_folder(tmp_path).__enter__()
        with folders.lock_folder(tmp_path):
            pass

    def test_job_with_the_inherited_descriptor_keeps_the_lock(self, tmp_path: Path) -> None:
        """A torchrun agent keeps it after its launcher was killed."""
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

    def test_damaged_lock_file_gives_a_refusal_without_process_id(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(folders, "END_TIMEOUT_S", 0.0)
        with folders.lock_folder(tmp_path):
            (tmp_path / LOCK_FILE).write_bytes(b"\x00\xffgarbage -1 99999999999999999999")
            with pytest.raises(OutputError, match=r"still writing here.*\(pid unknown\)"):
                folders.lock_folder(tmp_path).__enter__()

    def test_ending_workers_are_waited_for(self, tmp_path: Path) -> None:
        """The command of the worker is gone; the worker ends at the first wait for it."""
        with folders.lock_folder(tmp_path) as lock:
            job = subprocess.Popen(["sh", "-c", "read line"], stdin=subprocess.PIPE, pass_fds=(lock,))
            os.ftruncate(lock, 0)
        sleeps = []

        def sleep(seconds: float) -> None:
            sleeps.append(seconds)
            job.communicate(b"end\n")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folders.time, "sleep", sleep)
            with folders.lock_folder(tmp_path):
                assert len(sleeps) == 1

    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
    def test_file_system_without_locks_is_refused(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Without a lock two runs could write into one folder."""

        def flock(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(folders.fcntl, "flock", flock)
        with pytest.raises(OutputError, match=r"gives no lock on \.lock .* a local disk with -o"):
            folders.lock_folder(tmp_path).__enter__()


class TestSweep:
    def test_a_new_folder_is_made_with_its_parents(self, tmp_path: Path) -> None:
        folders.prepare_sweep(tmp_path / "a" / "b", resume=False, force=False)
        assert list((tmp_path / "a" / "b").iterdir()) == []

    def test_records_are_not_overwritten_without_an_option(self, tmp_path: Path) -> None:
        RecordFile(tmp_path).append(RECORD)
        with pytest.raises(OutputError, match=r"already holds records; add --resume .* --force"):
            folders.prepare_sweep(tmp_path, resume=False, force=False)
        assert read_records(tmp_path) == [RECORD]

    def test_empty_record_file_is_overwritten(self, tmp_path: Path) -> None:
        (tmp_path / RECORDS_FILE).touch()
        folders.prepare_sweep(tmp_path, resume=False, force=False)
        assert read_records(tmp_path) == []

    @pytest.mark.parametrize("resume", [True, False])
    def test_only_resume_keeps_measured_cases_of_servers(self, tmp_path: Path, resume: bool) -> None:
        file = tmp_path / "step-times" / "m.cases.jsonl"
        file.parent.mkdir()
        file.touch()
        folders.prepare_sweep(tmp_path, resume=resume, force=False)
        assert file.exists() == resume

    def test_resume_keeps_records_and_force_removes_records_jobs_and_logs(self, tmp_path: Path) -> None:
        """A leftover job file would give wrong settings for the new run."""
        RecordFile(tmp_path).append(RECORD)
        write_job(tmp_path, "tp2-0")
        (tmp_path / "notes.txt").touch()
        folders.prepare_sweep(tmp_path, resume=True, force=False)
        assert read_records(tmp_path) == [RECORD]
        folders.prepare_sweep(tmp_path, resume=False, force=True)
        assert sorted(p.name for p in tmp_path.rglob("*")) == ["logs", "notes.txt"]


class TestVerify:
    def test_verify_refuses_the_folder_of_a_sweep_even_with_force(self, tmp_path: Path) -> None:
        """The records belong to the sweep, and verify cannot --resume."""
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
    def test_file_at_the_place_of_the_folder_raises_output_error(self, below: str, tmp_path: Path) -> None:
        (tmp_path / "taken").touch()
        with pytest.raises(OutputError, match=r"(cannot be used as output folder|cannot be read) .*-o"):
            folders.prepare_sweep(tmp_path / "taken" / below, resume=False, force=False)

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs /proc, which not even root can write")
    def test_unwritable_existing_folder_raises_output_error(self) -> None:
        """Only writing fails there; mkdir does not."""
        for prepare in (folders.prepare_checks, lambda *a, **k: folders.prepare_sweep(*a, resume=False, **k)):
            with pytest.raises(OutputError, match=r"/proc/self cannot be used as output folder \(.*\); .* -o"):
                prepare(Path("/proc/self"), force=False)


class TestResume:
    def test_resume_with_the_same_settings_gives_no_message(self, tmp_path: Path) -> None:
        assert folders.check_resumed(tmp_path, NOW) == "", "a folder without jobs"
        write_job(tmp_path, "tp2-0")
        assert folders.check_resumed(tmp_path, NOW) == ""

    def test_resume_with_another_time_limit_is_reported_and_accepted(self, tmp_path: Path) -> None:
        """The precision of a median may differ between the points of a run: each record has it."""
        write_job(tmp_path, "tp2-0")
        now = folders.list_settings([POINT], msgspec.structs.replace(SETTINGS, seconds=3, profile=False), "cpu")
        message = folders.check_resumed(tmp_path, now)
        assert "--seconds was 10 and is 3, --profile was on and is off" in message
        assert "\n" not in message

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
    def test_resume_with_changed_measurement_settings_is_refused(
        self, changed: dict[str, object], words: str, tmp_path: Path
    ) -> None:
        """These settings give pools of other sizes, or points that share nothing with the existing ones."""
        write_job(tmp_path, "tp2-0")
        with pytest.raises(OutputError, match="give the value of that run, or another folder with -o") as caught:
            folders.check_resumed(tmp_path, NOW | changed)
        assert words in str(caught.value)

    def test_setting_is_compared_with_points_that_use_it(self, tmp_path: Path) -> None:
        """A point without DCP has interleave 1 whatever the option is."""
        striped, alone = (msgspec.structs.replace(POINT, **of) for of in ({"interleave": 4}, {"dcp": 1}))
        write_job(tmp_path, "tp2-0", point=striped)
        now = folders.list_settings([alone, striped], SETTINGS, "cpu")
        assert folders.check_resumed(tmp_path, now) == ""
        write_job(tmp_path, "tp2-1", point=alone)
        assert folders.check_resumed(tmp_path, now) == ""
        with pytest.raises(OutputError, match="--page-size interleave was 4 and is 1"):
            folders.check_resumed(tmp_path, NOW)

    @pytest.mark.parametrize(
        ("changed", "words"),
        [
            ({"step_times": "/b.json"}, "--step-times was /a.json and is /b.json"),
            ({"micro_batches": 4}, "--stages micro-batches was not given and is 4"),
            ({"limit_seconds": 60.0}, "--timeout load was not given and is 60"),
        ],
    )
    def test_settings_of_points_without_a_job_are_those_of_their_records(
        self, changed: dict[str, object], words: str, tmp_path: Path
    ) -> None:
        """A replay of given step times needs no job."""
        given = msgspec.structs.replace(SETTINGS, step_times="/a.json")
        served = serve_record_builder.make_served_record(serve_record_builder.make_point(serve_record_builder.DCP))
        record = msgspec.structs.replace(served, measured_with=msgspec.to_builtins(given))
        assert folders.check_resumed(tmp_path, folders.list_settings([POINT], given, "cpu"), [record]) == ""
        with pytest.raises(OutputError, match=f"{words}. Points of one run share"):
            folders.check_resumed(
                tmp_path,
                folders.list_settings([POINT], msgspec.structs.replace(given, **changed), "cpu"),
                [record],
            )

    def test_resume_with_another_command_is_refused_with_the_command_to_type(self, tmp_path: Path) -> None:
        """Differing options of two commands would be a misleading error."""
        served = serve_record_builder.make_point(serve_record_builder.DCP)
        folders.check_same_command(tmp_path, POINT, [])
        write_job(tmp_path, "tp2-0", point=served, command=f"dcpbench serve --tp 2 -o {tmp_path}")
        with pytest.raises(OutputError, match="holds a run of serve, and this is sweep") as caught:
            folders.check_same_command(tmp_path, POINT, [])
        assert str(caught.value).endswith(f"type: dcpbench serve --tp 2 -o {tmp_path} --resume")
        folders.check_same_command(tmp_path, served, [])

    def test_command_is_taken_from_records_if_there_is_no_job(self, tmp_path: Path) -> None:
        """A replay needs no job."""
        served = serve_record_builder.make_served_record(serve_record_builder.make_point(serve_record_builder.DCP))
        assert served.environment
        typed = msgspec.structs.replace(served.environment, command="dcpbench serve --mode replay")
        record = msgspec.structs.replace(served, environment=typed)
        with pytest.raises(OutputError, match=rf"type: dcpbench serve --mode replay -o {tmp_path} --resume$"):
            folders.check_same_command(tmp_path, POINT, [record])

    def test_settings_are_taken_from_the_last_valid_job(self, tmp_path: Path) -> None:
        """Three jobs with 10, 3 and unreadable settings are written in this order."""
        write_job(tmp_path, "tp2-0")
        write_job(tmp_path, "tp2-1", msgspec.structs.replace(SETTINGS, seconds=3))
        (tmp_path / "job-tp2-2.json").write_text("{half")
        for age, tag in ((30, "tp2-0"), (20, "tp2-1"), (10, "tp2-2")):
            os.utime(tmp_path / f"job-{tag}.json", (1e9 - age, 1e9 - age))
        assert "--seconds was 3 and is 10" in folders.check_resumed(tmp_path, NOW)


def test_removed_or_replaced_folder_raises_output_error(tmp_path: Path) -> None:
    """The folder is moved away, and another process creates a new one."""
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


def test_workers_of_a_dead_command_are_polled_twenty_times_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers get five seconds to end."""
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
