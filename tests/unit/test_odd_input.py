"""Odd names, addresses and files are refused with a message, without waiting for any of them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from dcpbench import cli
from dcpbench.dashboard import discovery
from dcpbench.engine.checkpoint import CheckpointSource
from dcpbench.errors import ModelError, OutputError, RecordsError, UsageError
from dcpbench.launch.folders import make_folder
from dcpbench.points.device_probe import Probe
from dcpbench.records.file import RecordFile, require_record_file
from dcpbench.servers.client import Target
from dcpbench.submit.k8s import read_pod
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 64}.b", "http://.a", "http://h:0", "h:0"])
def test_impossible_server_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"1 to 63 characters|no server listens at port 0"):
        Target.from_url(url)


def test_addresses_at_the_limits_are_accepted() -> None:
    for host in ("a" * 63 + ".b", "a.b.", "[::1]", "h"):
        Target.from_url(f"http://{host}:8000")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {b: 2026-01-02}", "a.b is read as date; write it in quotes"),
        ("a: !!binary aGk=", "a is read as bytes"),
        ("a: &x [1, *x]", r"line 1: \*x holds itself"),
        ("a: {1: b}", "a has the key 1"),
        ("a: .inf", "a is inf"),
    ],
)
def test_pod_without_a_json_form_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_pod(path)


def test_yaml_alias_without_a_cycle_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text("a: &x {b: 1}\nc: *x\n")
    assert read_pod(path) == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("option", ["--partition", "--account", "--interface", "--pyxis"])
@pytest.mark.parametrize("value", ["a\n#SBATCH --uid=0", "a\rb"])
def test_line_break_in_a_cluster_option_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["submit", "slurm", option, value, "--dry-run", "--", "sweep", "--tp", "1"])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert f"{option} holds a line break" in err
    assert "#SBATCH" not in out


def test_folder_name_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="is no name in UTF-8"):
        make_folder(tmp_path / os.fsdecode(b"a\xff"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_dashboard_skips_record_files_that_never_end(kind: str, tmp_path: Path) -> None:
    for name in ("good", "odd"):
        (tmp_path / name).mkdir()
    RecordFile(tmp_path / "good").append(build.make_ok_record(build.make_point(), steps=3))
    path = tmp_path / "odd" / "records.jsonl"
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    found = discovery.load_runs(tmp_path, {}, lambda _: None)
    assert [run.name for run in found.runs] == ["good"]
    assert found.skipped == ["odd: records.jsonl is no regular file, and reading it might never end."]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("FIFO", "is a FIFO, not a regular file"),
        ("device", "is a device, not a regular file"),
        ("folder", "is a folder"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        "show {run}",
        "report {run}",
        "compare {run} {run}",
        "recommend --machine H200 {run}",
        "export {run} --to csv -o {run}.csv",
        "records check {run}",
        "records repair {run}",
        "sweep --tp 1 --device cpu -o {run} --resume",
        "show {run}/records.jsonl",
    ],
)
def test_irregular_record_file_is_refused_with_the_reason(
    command: str,
    kind: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dcpbench.launch.launcher.run_probe", lambda _: Probe(device="cpu", count=0, name="CPU"))
    path = tmp_path / "run" / "records.jsonl"
    path.parent.mkdir()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(SystemExit) as ended:
        cli.main(command.format(run=path.parent).split())
    assert ended.value.code == 2
    assert f"records.jsonl {reason}; name the folder of a run" in capsys.readouterr().err


def test_record_file_that_is_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").symlink_to("nowhere")
    with pytest.raises(RecordsError, match=r"records\.jsonl is a link to a file that does not exist; name the folder"):
        require_record_file(tmp_path)


def test_records_check_prints_no_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RecordFile(tmp_path).append(build.make_ok_record(build.make_point(), steps=3))
    with (tmp_path / "records.jsonl").open("ab") as f:
        line = json.dumps({"schema_version": 1, "point": {"model": "m", "\x1b]0;title\x07": 1}, "outcome": "ok"})
        f.write(line.encode() + b"\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["records", "check", str(tmp_path)])
    assert end.value.code == 1
    assert "\x1b" not in capsys.readouterr().out


class TestCheckpoint:
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_and_infinity_in_weights_are_refused(self, value: float, tmp_path: Path) -> None:
        weight = torch.ones(4, 4)
        weight[2, 1] = value
        save_file({"w": weight}, tmp_path / "model.safetensors")
        source = CheckpointSource(tmp_path, torch.float32, torch.device("cpu"))
        with pytest.raises(ModelError, match="'w' holds NaN or infinity"):
            source.get_tensor("w", (4, 4))
        assert source.get_tensor("w", (4, 4), rows=slice(0, 2)).sum() == 8, "rows without it can be read"

    def test_nan_in_fp8_weights_is_refused(self, tmp_path: Path) -> None:
        data = torch.zeros(128, 128, dtype=torch.uint8)
        data[5, 5] = 0xFF
        tensors = {"w": data.view(torch.float8_e4m3fn), "w_scale_inv": torch.ones(1, 1)}
        save_file(tensors, tmp_path / "model.safetensors")
        source = CheckpointSource(tmp_path, torch.float32, torch.device("cpu"))
        with pytest.raises(ModelError, match="'w' holds NaN"):
            source.get_tensor("w", (128, 128))

    @pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"])
    def test_index_with_files_outside_its_folder_is_refused(self, file: str, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(ModelError, match="outside of its folder"):
            CheckpointSource(tmp_path, torch.float32, torch.device("cpu"))
