"""tools/loaded_weights: weights in the log of vLLM compared with the plan, with a script as `vllm serve`."""

import json
import sys
from pathlib import Path

import pytest

from tests.unit.test_published_checkpoints import QWEN_30B
from tools import loaded_weights

PLANNED_GIB = 61_064_245_248 / 2**30
SCRIPT = """#!/bin/sh
echo "$@"
{line}
{end}
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of Qwen3-30B-A3B, with a checkpoint of PLANNED_GIB."""
    folder = tmp_path / "qwen3-30b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_30B))
    return folder


@pytest.mark.parametrize(
    ("logged", "tp", "code"),
    [
        (f"{PLANNED_GIB * 1.01:.2f}", 1, 0),
        (f"{PLANNED_GIB * 0.9:.2f}", 1, 1),
        (f"{PLANNED_GIB / 2:.2f}", 2, 0),
        ("", 1, 4),
    ],
    ids=["within 2 %", "too small", "one of two ranks logs", "vLLM ends"],
)
def test_planned_weights_are_compared_with_the_log(
    logged: str,
    tp: int,
    code: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The script keeps running after the line, like a server, and is killed."""
    line = (
        f'echo "(Worker pid=7) INFO Model loading took {logged} GiB memory and 3.1 seconds"'
        if logged
        else "echo no weights"
    )
    vllm = tmp_path / "vllm"
    vllm.write_text(SCRIPT.format(line=line, end="sleep 60" if logged else "exit 3"))
    vllm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    out = tmp_path / "out" / "loaded.json"
    monkeypatch.setattr(sys, "argv", ["loaded_weights", str(model), "--tp", str(tp), "-o", str(out)])
    assert loaded_weights.main() == code
    (record,) = json.loads(out.read_text())
    assert record["loaded_gib"] == ([float(logged)] if logged else [])
    assert record["planned_gib"] == pytest.approx(PLANNED_GIB / tp, rel=0.02)
    assert ("no weights" in record["log_tail"]) is not bool(logged)
    assert record["seconds"] < 40
    assert ("did not load qwen3-30b" in capsys.readouterr().err) is not bool(logged)


def test_missing_vllm_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["loaded_weights", str(model), "-o", str(tmp_path / "loaded.json")])
    with pytest.raises(SystemExit) as end:
        loaded_weights.main()
    assert end.value.code == 2
    assert "`vllm` is not on PATH" in capsys.readouterr().err
