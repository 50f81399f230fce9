"""Commands that write to a full or read-only disk end with exit code 3, and name the disk and the remedy."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from dcpbench import cli
from dcpbench.points.device_probe import Probe
from dcpbench.records import disks
from dcpbench.records.file import RecordFile
from tests.unit import record_builder as build

TRACE = Path(__file__).parents[1] / "data" / "h200_stacks.trace.json.gz"
REASONS = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the disk quota of this user is used up",
    errno.EROFS: "its file system is read-only",
}
REMEDIES = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EROFS: "mount it for writing"}
COMMANDS = {
    "export": "export {run} --to csv -o {disk}/run.csv",
    "compare": "compare {run} {run} -o {disk}/out",
    "compare junit": "compare {run} {run} --junit {disk}/out.xml",
    "recommend": "recommend --machine H200 --context 32000 --concurrency 8 -o {disk}/out",
    "dashboard": "dashboard build {root} -o {disk}/site",
    "scan": "syncs scan {trace} -o {disk}/syncs.json --format json",
    "baseline": "syncs baseline {trace} -o {disk}/baseline.json",
    "report": "report {run} -o {disk}/report",
    "sweep": "sweep --tp 1 -o {disk}/new",
    "resume": "sweep --tp 1 --device cpu -o {disk}/run --resume",
    "repair": "records repair {disk}/run",
}


def break_disk(folder: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every opening of a file for writing below a folder fail, with an error without a file name."""

    def refuse(opened: Any, *, writes: bool) -> None:
        if writes and not isinstance(opened, int) and Path(os.fsdecode(opened)).is_relative_to(folder):
            raise OSError(number, os.strerror(number))

    def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        refuse(file, writes=bool(set(mode) & set("wax+")))
        return real_open(file, mode, *args, **options)

    def open_descriptor(file: Any, flags: int, *args: Any, **options: Any) -> int:
        refuse(file, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
        return real_descriptor(file, flags, *args, **options)

    real_open, real_descriptor = io.open, os.open
    monkeypatch.setattr(io, "open", open_file)
    monkeypatch.setattr(os, "open", open_descriptor)


@pytest.mark.parametrize("number", REASONS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", COMMANDS)
def test_command_names_the_disk_of_its_output_and_a_remedy(
    name: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, disk = tmp_path / "runs", tmp_path / "disk"
    for run in (root / "run", disk / "run"):
        build.write_records(run, [])
        RecordFile(run).append(build.make_ok_record(build.make_point()))
    with (disk / "run" / "records.jsonl").open("ab") as damaged:
        damaged.write(b'{"point": 1\n')
    cpu = Probe(device="cpu", count=0, name="CPU", packages={"torch": "2.9"})
    monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: cpu)
    before = (disk / "run" / "records.jsonl").read_bytes()
    words = COMMANDS[name].format(run=root / "run", root=root, disk=disk, trace=TRACE).split()
    with monkeypatch.context() as patch:
        break_disk(disk, number, patch)
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
    err = capsys.readouterr().err
    message = " ".join(err[err.index("error: ") :].split())
    assert ended.value.code == 3
    assert f"{disk}" in message.partition(REASONS[number])[0]
    assert REASONS[number] in message
    assert REMEDIES[number] in message.lower()
    assert "None" not in message
    assert ("--resume" in message) == (name == "resume")
    assert ("repair the copy" in message) == (name == "repair")
    assert (disk / "run" / "records.jsonl").read_bytes() == before
    assert [path for path in disk.rglob("*") if path.is_file() and path.parent != disk / "run"] == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EISDIR])
def test_output_without_write_permission_has_exit_code_2(number: int) -> None:
    error = disks.make_output_error("runs/a.csv", OSError(number, os.strerror(number)), "give another file with -o")
    assert error.exit_code == 2
    assert str(error) == f"runs/a.csv cannot be written ({os.strerror(number)}). Give another file with -o."


@pytest.mark.parametrize(
    "command",
    [
        "export {run} --to csv --force -o {records}",
        "compare {run} {run} --junit {records}",
        "report {run} -o {records}",
        "syncs scan {trace} --format json --force -o {records}",
    ],
)
def test_output_never_replaces_the_records_of_a_run(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build.write_records(tmp_path / "run", [build.make_ok_record(build.make_point())])
    records = run / "records.jsonl"
    before = records.read_bytes()
    with pytest.raises(SystemExit) as end:
        cli.main(command.format(run=run, records=records, trace=TRACE).split())
    assert end.value.code == 2
    assert f"{records} holds the records of a run and is not replaced. " in capsys.readouterr().err
    assert records.read_bytes() == before
