"""Test `python -m tools.greedy_tokens ask`, which starts an engine's server and writes its answers to prompts."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from dcpbench.models import load_shape
from tools.greedy_tokens import __main__ as command
from tools.greedy_tokens.answers import Answers, Position, make_prompts, read_answers
from tools.greedy_tokens.engines import make_weights_key

ROOT = Path(__file__).parents[2]
ASKED = ("--prompts", "3", "--length", "9", "--new-tokens", "2")


def run(*words: object) -> int:
    return command.run_command(command.parse_arguments(list(map(str, words))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a model folder with 300 words."""
    assert run("model", tmp_path / "model", "--set", "vocab_size=300") == 0
    return tmp_path / "model"


def test_answers_over_http_equal_those_of_the_engine(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server replays a file, so the two files are equal except for the engine's name."""
    prompts = make_prompts(300, 3, 9, seed=0)
    answers = [[Position(number + n, {number + n: -0.5, 290: -1.5}) for n in range(2)] for number in (5, 6, 7)]
    key = make_weights_key(load_shape(str(folder)), "bf16")
    own = Answers(name="own", weights=key, prompts=prompts, answers=answers)
    (tmp_path / "own.json").write_bytes(msgspec.json.encode(own))
    server = f"{sys.executable} -m tests.servers.replayed_engine --file {tmp_path / 'own.json'} --port {{port}}"
    (tmp_path / "fake.toml").write_text(
        f'name = "fake"\ncommand = "{server}"\n[layout]\ndcp = "--dcp {{dcp}}"\n[env]\nPYTHONPATH = "{ROOT}"\n'
    )
    monkeypatch.chdir(tmp_path)
    sent = ("ask", "--engine", "fake.toml", "--model", folder, *ASKED, "--tp", 2, "--dcp", 2)
    assert run(*sent, "-o", tmp_path / "fake.json") == 0
    one, other = read_answers([tmp_path / "own.json", tmp_path / "fake.json"])
    assert other == msgspec.structs.replace(one, name="fake tp2·dcp2")
