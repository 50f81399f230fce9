"""Test the comparison of attention kernel versions: all are checked, and a wrong one is named and ends the command
with 1.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tools import attention_versions

HERE = Path(__file__).parents[2]
SIZES = ("--cases", "2x40", "--heads", "4", "--page", "4")


@pytest.fixture
def wrong_checkout(tmp_path: Path) -> Path:
    """Return a checkout with a kernel that scales scores wrongly."""
    checkout = tmp_path / "wrong"
    shutil.copytree(HERE / attention_versions.KERNELS_FOLDER, checkout / attention_versions.KERNELS_FOLDER)
    source = checkout / attention_versions.KERNELS_FOLDER / "triton_mla.py"
    text = source.read_text(encoding="utf-8")
    assert "spec.scale * spec.kv_scale * LOG2_E" in text
    source.write_text(
        text.replace("spec.scale * spec.kv_scale * LOG2_E", "spec.scale * spec.kv_scale"), encoding="utf-8"
    )
    return checkout


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_each_version_runs_the_kernels_of_its_checkout(
    kv: str, wrong_checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare three versions in one process, of which the second is wrong; a CPU gives no times."""
    out = tmp_path / "found.jsonl"
    assert (
        attention_versions.main(
            [f"now={HERE}", f"wrong={wrong_checkout}", "reference", *SIZES, "--kv", kv, "-o", str(out)]
        )
        == 1
    )
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert (line["sizes"]["kv"], line["sizes"]["heads"], line["gpu"]) == (kv, 4, None)
    assert {name: list(one) for name, one in line["versions"].items()} == {"now": ["error"], "reference": ["error"]}
    assert all(one["error"] < 1e-5 for one in line["versions"].values())
    assert list(line["wrong"]) == ["wrong"]
    output = capsys.readouterr().out
    assert output.startswith(f"2 × 40, H=4, {kv}: now is right, error ")
    assert f"wrong WRONG: {line['wrong']['wrong']}" in output


def test_values_with_a_mean_change_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Give values a mean, because sums that are cut short are hidden by a mean of 0."""
    found = {}
    for mean in ("0", "8"):
        out = tmp_path / f"{mean}.jsonl"
        assert attention_versions.main(["triton", *SIZES, "--kv", "fp8", "--mean", mean, "-o", str(out)]) == 0
        (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
        found[mean] = line["versions"]["triton"]["error"]
        assert line["sizes"]["mean"] == float(mean)
    assert found["0"] != found["8"]
    lines = capsys.readouterr().out.splitlines()
    assert [", values with a mean of 8: triton is right" in line for line in lines] == [False, True]


def test_unknown_version_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, expected in (
        (f"x={tmp_path}", "is no checkout of this project"),
        ("flashmlaa", "is no backend (reference, "),
    ):
        with pytest.raises(SystemExit):
            attention_versions.main([word, "-o", str(tmp_path / "found.jsonl")])
        assert expected in capsys.readouterr().err


def test_version_that_fails_to_run_is_named_with_its_error(wrong_checkout: Path, tmp_path: Path) -> None:
    source = wrong_checkout / attention_versions.KERNELS_FOLDER / "triton_mla.py"
    source.write_text(source.read_text(encoding="utf-8").replace("def run(", "def run_no_more("), encoding="utf-8")
    out = tmp_path / "found.jsonl"
    assert attention_versions.main([f"broken={wrong_checkout}", f"now={HERE}", *SIZES, "-o", str(out)]) == 1
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert list(line["versions"]) == ["now"]
    assert "no attribute 'run'" in line["wrong"]["broken"]


def test_times_are_printed_relative_to_the_first_version() -> None:
    sizes = {"requests": 8, "context": 8192, "heads": 64, "kv": "fp8"}
    line = {
        "sizes": sizes,
        "versions": {"now": {"error": 0, "median_us": 40.0}, "flashmla": {"error": 0, "median_us": 50.0}},
    }
    assert (
        attention_versions.format_case(line | {"wrong": {}})
        == "8 × 8,192, H=64, fp8: now 40.0 µs (1.000), flashmla 50.0 µs (0.800)"
    )


@pytest.mark.parametrize("options", [("--cases", "x"), ("--heads", "16,y")])
def test_sizes_that_are_not_numbers_are_rejected(
    options: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        attention_versions.main([f"now={HERE}", *options, "-o", str(tmp_path / "found.jsonl")])
    assert end.value.code == 2
    assert "sizes are whole numbers" in capsys.readouterr().err
