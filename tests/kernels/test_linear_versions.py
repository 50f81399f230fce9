"""Versions of the linear layer and its cuts beside one another: all are checked, and what is wrong is named and ends the command with 1."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from tools import linear_versions

HERE = Path(__file__).parents[2]
ROOM = Path("dcpbench/kernels")
SIZES = ("--model", "tiny", "--tp", "1", "--rows", "3", "--matrix", "o")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    """A checkout whose kernel forgets the weights' scales."""
    (tmp_path / "wrong" / ROOM).mkdir(parents=True)
    for name in ("e4m3.py", "block_scaled.py", "linear.py"):
        shutil.copy(HERE / ROOM / name, tmp_path / "wrong" / ROOM / name)
    source = tmp_path / "wrong" / ROOM / "linear.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(" * tl.load(w_scale_at + group)") == 1
    source.write_text(text.replace(" * tl.load(w_scale_at + group)", ""), encoding="utf-8")
    return tmp_path / "wrong"


def test_each_version_runs_its_own_kernels(wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between two right ones the wrong one, with all cuts beside; no time is taken on a CPU."""
    out = tmp_path / "found.jsonl"
    ways = [f"{name}={path}" for name, path in (("now", HERE), ("wrong", wrong), ("again", HERE))]
    assert linear_versions.main([*ways, "--cuts", *SIZES, "-o", str(out)]) == 1
    (line,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert list(line["wrong"]) == ["wrong"]
    assert "relative error" in line["wrong"]["wrong"]
    assert {"now", "again", "c64p1", "c128p1"} <= line["found"].keys()
    assert all(list(one) == ["error"] and one["error"] < 1e-5 for one in line["found"].values())
    assert f"wrong WRONG: {line['wrong']['wrong']}" in capsys.readouterr().out


def test_layers_of_one_size_are_measured_once() -> None:
    """o of 128 heads of 128 numbers, cut by 8, takes 2,048 numbers, as the shared expert's second matrix does whole."""
    asked = argparse.Namespace(model="deepseek-v3", tp="1,8", rows="16", matrix="o,shared-down")
    sizes = [case.sizes for case in linear_versions.cases(asked)]
    assert [(one["layer"], one["inputs"]) for one in sizes] == [
        ("tp1 o", 16384),
        ("tp1 shared-down, tp8 o", 2048),
        ("tp8 shared-down", 256),
    ]


def test_what_is_no_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word in (f"x={tmp_path}", "now"):
        with pytest.raises(SystemExit):
            linear_versions.main([word, "-o", str(tmp_path / "found.jsonl")])
        assert f"{word} is no NAME=CHECKOUT" in capsys.readouterr().err


def test_a_layer_that_kernels_do_not_take_says_which_of_them_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layers of the tiny model are narrower than a block of scales, and assertions have no words."""
    out = tmp_path / "tiny.jsonl"
    asked = ["--model", "tiny", "--tp", "1", "--rows", "1", "--matrix", "q_b"]
    assert linear_versions.main([f"now={HERE}", *asked, "-o", str(out)]) == 1
    (line,) = map(json.loads, out.read_text().splitlines())
    assert re.fullmatch(r"AssertionError: block_scaled\.py:\d+: assert depth % SCALE_BLOCK == 0", line["wrong"]["now"])
    assert line["wrong"]["now"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--rows", "x"], "invalid literal for int() with base 10: 'x': sizes are whole numbers"),
        (["--model", "nonsense"], "--model nonsense: neither a known model nor a folder"),
        (["--matrix", "nonsense"], "none of what was asked for is there to be measured"),
        (["--cuts", "--rows", "16,200"], "--cuts are of up to 128 rows; try --rows 128"),
    ],
)
def test_nonsense_is_named_before_anything_is_measured(
    typed: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.jsonl"
    with pytest.raises(SystemExit) as end:
        linear_versions.main([f"now={HERE}", *typed, "-o", str(out)])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
