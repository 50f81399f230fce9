"""A disk that is full, read-only or broken ends a command with an error and code 3, and fails no point."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench import cli
from dcpbench.errors import DiskError, OutputError
from dcpbench.records import disks
from dcpbench.records.file import RecordFile, read_records
from dcpbench.serving import samples
from dcpbench.show.whole_files import write_file
from tests.servers.fake_server import FakeServer
from tests.servers.hostile_server import run_in_thread
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD = build.make_failed_record(build.make_point())
DISK = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the disk quota of this user is used up",
    errno.EROFS: "its file system is read-only",
    errno.EIO: "its disk reported an I/O error",
    errno.ESTALE: "its disk cannot be written",
}


def make_failing(number: int, name: str = "") -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number), *([name] if name else []))

    return fail


@pytest.mark.parametrize("number", DISK)
@pytest.mark.parametrize("call", ["open", "fsync"])
def test_disk_error_on_append_names_the_cause_and_the_resume_command(
    number: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening records.jsonl fails, or the disk reports only at fsync that it could not keep the line."""
    out = RecordFile(tmp_path)
    out.append(RECORD)
    with monkeypatch.context() as patch:
        patch.setattr(Path if call == "open" else os, call, make_failing(number))
        with pytest.raises(DiskError, match=DISK[number]) as raised:
            out.append(RECORD)
    assert raised.value.exit_code == 3
    assert f"-o {tmp_path} --resume" in str(raised.value)
    assert len(read_records(tmp_path)) >= 1


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_missing_permission_to_write_records_raises_output_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", make_failing(number))
    with pytest.raises(OutputError, match=r"records\.jsonl cannot be written .* Let this user write there") as raised:
        RecordFile(tmp_path).append(RECORD)
    assert raised.value.exit_code == 2


def test_records_path_that_is_a_folder_raises_output_error(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"records\.jsonl cannot be written \(Is a directory\)"):
        RecordFile(tmp_path).append(RECORD)


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_file(path, b"old")
    monkeypatch.setattr(os, "fsync", make_failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_unwritable_samples_end_the_command_and_record_no_failed_point(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = f"server --device cpu --tp 1 --concurrency 2 --num-requests 2 --input-tokens 9 --output-tokens 2 -o {run}"
    monkeypatch.setattr(samples, "write_file", make_failing(number))
    with run_in_thread(FakeServer()) as url, pytest.raises(SystemExit) as end:
        cli.main([*words.split(), "--url", url, "--client", "processes=1,warm-up=0"])
    assert end.value.code == (2 if number == errno.EACCES else 3)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert f"-o {run} --resume" in err
    assert not (run / "records.jsonl").exists()


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            3,
            "what the command prints, or a file could not be written",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), 3, "error: /a/b could not be written (Read-only file"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", b"/a/b"), 3, "error: /a/b could not be written (Disk quota"),
        (
            OSError(errno.EFBIG, "File too large", "/a/b"),
            3,
            "(File too large); raise the limit (ulimit -f unlimited), then",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/a/\x1bb"),
            2,
            r"error: /a/\x1bb cannot be used (Permission",
        ),
    ],
)
def test_unexpected_os_error_of_a_file_is_one_line_with_an_exit_code(
    error: OSError, code: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli, "choose_app", lambda _: app)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == code
    assert expected in capsys.readouterr().err


def test_interrupt_while_a_command_is_imported_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_command(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "choose_app", import_command)
    with pytest.raises(SystemExit) as end:
        cli.main([])
    assert end.value.code == 130
    assert "Interrupted. To start again, repeat the command." in capsys.readouterr().err


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def app(**_: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "/a")

    monkeypatch.setattr(cli, "choose_app", lambda _: app)
    with pytest.raises(FileNotFoundError):
        cli.main([])


class TestProbes:
    def test_probes_pass_on_a_working_folder(self, tmp_path: Path) -> None:
        disks.check_free_space(tmp_path)
        disks.check_answers(tmp_path)
        assert not list(tmp_path.iterdir())

    def test_probes_ignore_a_missing_folder(self, tmp_path: Path) -> None:
        """A missing folder is reported elsewhere."""
        disks.check_free_space(tmp_path / "gone")
        disks.check_answers(tmp_path / "gone")

    def test_hanging_write_raises_disk_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disks, "ANSWER_S", 0.1)
        monkeypatch.setattr(disks, "PROBE", "import time; time.sleep(60)")
        with pytest.raises(DiskError, match=r"could not be written within 0\.1 s"):
            disks.check_answers(tmp_path)
