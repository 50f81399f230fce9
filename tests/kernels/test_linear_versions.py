"""Test the comparison of linear kernel versions and tilings: all are checked, and a wrong one is named and ends the
command with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from tools import linear_versions

HERE = Path(__file__).parents[2]
KERNELS = Path("dcpbench/kernels")
SIZES = ("--model", "tiny", "--tp", "1", "--rows", "3", "--matrix", "o")


@pytest.fixture
def wrong_checkout(tmp_path: Path) -> Path:
    """Return a checkout with a kernel that ignores the weights' scales."""
    (tmp_path / "wrong" / KERNELS).mkdir(parents=True)
    for name in ("e4m3.py", "block_scaled.py", "linear.py"):
        shutil.copy(HERE / KERNELS / name, tmp_path / "wrong" / KERNELS / name)
    source = tmp_path / "wrong" / KERNELS / "linear.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(" * tl.load(w_scale_at + group)") == 1
    source.write_text(text.replace(" * tl.load(w_scale_at + group)", ""), encoding="utf-8")
    return tmp_path / "wrong"


def test_each_version_runs_the_kernels_of_its_checkout(
    wrong_checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare a wrong version between two right ones, with all tilings; a CPU gives no times."""
    out = tmp_path / "found.jsonl"
    versions = [f"{name}={path}" for name, path in (("now", HERE), ("wrong", wrong_checkout), ("again", HERE))]
    assert linear_versions.main([*versions, "--cuts", *SIZES, "-o", str(out)]) == 1
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert list(line["wrong"]) == ["wrong"]
    assert "relative error" in line["wrong"]["wrong"]
    assert {"now", "again", "c64p1", "c128p1"} <= line["versions"].keys()
    assert all(list(one) == ["error"] and one["error"] < 1e-5 for one in line["versions"].values())
    assert f"wrong WRONG: {line['wrong']['wrong']}" in capsys.readouterr().out


def test_layers_of_the_same_size_are_measured_once() -> None:
    """Expect one case for o of 128 heads of 128 numbers divided by 8, 2,048 numbers, and the shared expert's undivided
    down projection.
    """
    options = argparse.Namespace(model="deepseek-v3", tp="1,8", rows="16", matrix="o,shared-down")
    sizes = [case.sizes for case in linear_versions.list_cases(options)]
    assert [(one["layer"], one["inputs"]) for one in sizes] == [
        ("tp1 o", 16384),
        ("tp1 shared-down, tp8 o", 2048),
        ("tp8 shared-down", 256),
    ]


def test_unknown_version_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"x={tmp_path}", "now"):
        with pytest.raises(SystemExit):
            linear_versions.main([word, "-o", str(tmp_path / "found.jsonl")])
        assert f"{word} is no NAME=CHECKOUT" in capsys.readouterr().err


def test_unsupported_layer_is_reported_with_the_failed_assertion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use the tiny model, because its layers are narrower than a block of scales."""
    out = tmp_path / "tiny.jsonl"
    options = ["--model", "tiny", "--tp", "1", "--rows", "1", "--matrix", "q_b"]
    assert linear_versions.main([f"now={HERE}", *options, "-o", str(out)]) == 1
    (line,) = map(json.loads, out.read_text().splitlines())
    assert re.fullmatch(r"AssertionError: block_scaled\.py:\d+: assert depth % SCALE_BLOCK == 0", line["wrong"]["now"])
    assert line["wrong"]["now"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--rows", "x"], "invalid literal for int() with base 10: 'x': sizes are whole numbers"),
        (["--model", "nonsense"], "--model nonsense: neither a known model nor a folder"),
        (["--matrix", "nonsense"], "no case has these sizes"),
        (["--cuts", "--rows", "16,200"], "--cuts are of up to 128 rows; try --rows 128"),
    ],
)
def test_invalid_options_are_rejected_before_measuring(
    options: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.jsonl"
    with pytest.raises(SystemExit) as end:
        linear_versions.main([f"now={HERE}", *options, "-o", str(out)])
    assert end.value.code == 2
    assert expected in capsys.readouterr().err
    assert not out.exists()
