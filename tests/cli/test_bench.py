"""`dcpbench bench` as a user meets it: with a fake worker in all its moods, and once each with the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench import bench, cli
from dcpbench.jobs import Probe

HERE = Path(__file__).parent
ROOT = Path(cli.__file__).parents[1]
CPU = Probe(device="cpu", count=0, name="CPU")
GPU = Probe(device="cuda", count=1, name="NVIDIA H200")
TWO = ("kv-write", "--tokens", "4", "--dcp", "2", "--no-empty", "--dtype", "bf16", "--variant", "filter,masked-kernel")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run `dcpbench bench …` in this process and in an empty folder; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "WORKER", "fake_bench_worker")
    monkeypatch.setenv("PYTHONPATH", f"{HERE}{os.pathsep}{ROOT}")

    def run(*args: str, fake: str = "", machine: Probe = CPU) -> tuple[int, str, str]:
        monkeypatch.setenv("DCPBENCH_FAKE", fake)
        monkeypatch.setattr("dcpbench.launch.probe", lambda: machine)
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", *args])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_a_bench_prints_a_table_and_what_it_says(call) -> None:
    """The fake counts 0 syncs of the first case, 1 of the second."""
    code, out, err = call(*TWO)
    assert code == 0
    assert "masked-kernel synchronises once a call." in out
    assert "µs" not in out
    assert "[2/2] masked-kernel, tokens 4, dcp 2, owned 2, dtype bf16  correct" in err
    assert "CPU: correctness and synchronisations (dry run) only" in err


def test_json_on_stdout_is_all_there_is(call) -> None:
    code, out, _ = call(*TWO, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["bench"] == "kv-write"
    assert record["performance"] is False
    assert [r["syncs"]["per_call"] for r in record["results"]] == [0, 1]
    assert record["environment"]["device"] == "CPU"


def test_a_folder_gets_the_record_a_picture_and_the_log_and_is_not_written_over(call) -> None:
    code, out, _ = call(*TWO, "-o", "out")
    assert code == 0
    assert "Wrote out/bench-kv-write.json" in out
    assert {p.name for p in Path("out").iterdir()} == {f"bench-kv-write.{kind}" for kind in ("json", "png", "log")}
    code, _, err = call(*TWO, "-o", "out")
    assert code == 2
    assert "would be written over; add --force" in err
    assert call(*TWO, "-o", "out", "--force")[0] == 0
    assert call("dp-slice", "-o", "out")[0] == 0, "another bench may join it"


def test_a_wrong_result_ends_with_1_and_says_where(call) -> None:
    code, out, _ = call(*TWO, fake="wrong")
    assert code == 1
    assert "WRONG: filter, tokens 4, dcp 2, owned 2, dtype bf16: row 3 differs." in out


def test_a_failed_case_ends_with_4_and_the_others_are_kept(call) -> None:
    code, out, err = call(*TWO, fake="failed")
    assert code == 4
    assert "failed: CapacityError: lower --tokens" in out
    assert "1 of 2 cases failed." in err


def test_a_worker_that_dies_leaves_what_it_had_and_its_last_words(call) -> None:
    code, out, err = call(*TWO, fake="dies")
    assert code == 4
    assert "failed: not reached" in out
    assert "ended with exit code 1" in err
    assert "Segmentation fault, as it were" in err


def test_a_worker_that_never_begins_is_an_error_with_its_log(call) -> None:
    code, _, err = call(*TWO, fake="stillborn")
    assert code == 4
    assert "error: the bench's worker ended before its first case." in err
    assert "cannot import name 'x'" in err
    assert "Traceback" not in err


def test_a_hung_worker_is_ended(call) -> None:
    """A case that hangs is what this bench is about; --timeout says how long silence may last."""
    code, out, err = call(*TWO, "--timeout", "2", fake="hangs")
    assert code == 4
    assert "It hung: nothing was heard for 2 s (--timeout)." in err
    assert "failed: not reached" in out


def test_half_a_line_waits_for_its_other_half(call) -> None:
    code, out, _ = call(*TWO, "--json", fake="half")
    assert code == 0
    assert [r["correct"] for r in json.loads(out)["results"]] == [True, True]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("kv-write", "--device", "cuda"), 3, "`dcpbench bench kv-write --device cpu`"),
        (("dp-slice", "--device", "cuda"), 3, "`dcpbench bench dp-slice --device cpu`"),
        (("kv-write", "--device", "gpu"), 2, "--device gpu is unknown"),
        (("kv-write", "--seconds", "0"), 2, "--seconds 0 is not a positive number of seconds"),
        (("kv-write", "--timeout", "-1"), 2, "--timeout -1 is not a positive number of seconds"),
        (("kv-write", "--backlog", "0"), 2, "--backlog 0: must be 1 to 100,000 µs; try --backlog 100."),
        (("kv-write", "--backlog", "1e9"), 2, "must be 1 to 100,000 µs"),
        (("kv-write", "--tokens", "many"), 2, "write for example --tokens 16,64."),
        (("kv-write", "-o", "/dev/null/x"), 2, "cannot be used as output folder"),
    ],
)
def test_what_cannot_work_is_one_sentence(args, code, says, call) -> None:
    found, out, err = call(*args)
    assert found == code
    assert says in err
    assert out == ""


def test_a_gpus_defaults_are_those_of_the_help(call) -> None:
    """72 cases of 61 layers; the fake worker answers for the GPU."""
    _, out, _ = call("kv-write", "--json", machine=GPU)
    record = json.loads(out)
    assert record["performance"] is True
    assert len(record["results"]) == 72
    assert {r["case"]["calls"] for r in record["results"]} == {61}


def real(*args: str) -> dict:
    """Record of a real run on the CPU."""
    command = [sys.executable, "-m", "dcpbench.cli", "bench", *args, "--device", "cpu", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kv_write_for_real_finds_that_the_published_fix_still_synchronises() -> None:
    """Per call: the check reads one value, and each boolean index counts its rows; the kernel does neither.

    check-all with all entries valid: 1 (the check). With -1 among them: 1 + 2 (loc and the rows). filter: 2, always.
    """
    record = real("kv-write", "--tokens", "8", "--dcp", "1,4", "--dtype", "bf16")
    counts = {}
    for r in record["results"]:
        assert r["correct"]
        assert r["syncs"]["detector"] == "dry-run"
        assert r["time"] is r["host"] is r["graph"] is None, "times of a CPU are no performance"
        counts.setdefault(r["case"]["variant"], {})[r["case"]["sizes"]["owned"]] = r["syncs"]["per_call"]
    assert counts == {
        "check-all": {8: 1, 2: 3, 0: 3}, "filter": {8: 2, 2: 2, 0: 2}, "masked-kernel": {8: 0, 2: 0, 0: 0},
    }  # fmt: skip
    assert any("it does not, it still synchronises twice a call." in told for told in record["findings"])


def test_dp_slice_for_real_reads_both_ends_of_a_slice_from_the_gpu() -> None:
    """Start and end are numbers on the GPU: 2 reads. From the host's counts: none."""
    record = real("dp-slice", "--tokens", "8", "--dp", "3")
    assert {r["case"]["variant"]: r["syncs"]["per_call"] for r in record["results"]} == {
        "cuda-slice": 2, "host-slice": 0,
    }  # fmt: skip
    assert all(r["correct"] for r in record["results"])
    (site,) = record["results"][0]["syncs"]["sites"]
    assert (site["op"], site["function"], site["kind"]) == ("aten::_local_scalar_dense", "take", "scalar-read")
