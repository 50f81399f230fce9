"""Redaction of secrets from command lines, environments and URLs, in every notation."""

from __future__ import annotations

import base64
import html
import io
import json
import os
import shlex
import urllib.parse
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench.points import redaction
from dcpbench.points.redaction import PLACEHOLDER, redact, redact_part
from dcpbench.records.file import RecordFile, read_records
from dcpbench.servers.presets import Engine, resolve_engine
from dcpbench.servers.process_group import copy_redacted
from dcpbench.show import streams, text
from tests.unit import record_builder as build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "sk-Planted0123456789abcdefghijKLM"
assert len(KEY) == 33


@pytest.fixture(autouse=True)
def reset_secrets() -> Iterator[None]:
    redaction.reset_secrets()
    yield
    redaction.reset_secrets()


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--api-key", KEY],
        ["serve", f"--api-key={KEY}"],
        ["--api_key", "other-key-0", KEY],
        ["--admin-api-key", KEY],
        ["--hf-token", KEY],
        ["--auth-token", KEY],
        ["--ssl-keyfile-password", KEY],
        ["env", f"VLLM_API_KEY={KEY}", "vllm", "serve"],
        ["server", "--serve-cmd", f"vllm serve m --port {{port}} --api-key {KEY}"],
        ["ab", "--both", shlex.join(["--serve-cmd", f"vllm serve m --api-key {KEY}"])],
        ["--header", f"Authorization: Bearer {KEY}"],
        [f"--header=X-Api-Key: {KEY}"],
        ["--header", f"Authorization: {KEY}"],
        ["--header", "Authorization: Basic " + base64.b64encode(f"me:{KEY}".encode()).decode()],
        ["--url", f"http://h:8000/v1?api_key={KEY}"],
        ["--url", f"http://h:8000/?{KEY}"],
        ["--url", f"https://me:{KEY}@h"],
        ["--url", f"https://{KEY}@h"],
        ["--extra-body", json.dumps({"user": {"api-key": KEY}})],
        ["--extra-body", json.dumps({"headers": {"Authorization": f"Bearer {KEY}"}})],
    ],
    ids=lambda words: words[0] if len(words) == 1 else " ".join(words)[:40].replace(KEY, "KEY"),
)
def test_key_in_a_command_line_is_redacted(words: list[str]) -> None:
    redaction.register_command_line(words)
    assert redact(f"<{KEY}>") == f"<{PLACEHOLDER}>"
    assert KEY not in redaction.format_command_line(words)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "12345678"],
        ["--max-num-batched-tokens", "abcdefgh"],
        ["--tokenizer", "deepseek-ai/DeepSeek-V3"],
        ["--model", "deepseek-ai/DeepSeek-V3", "--num-tokens=abcdefgh"],
        ["--api-key", "EMPTY"],
        ["--api-key", "--------------------"],
        ["--api-key", "1234567890"],
        ["--url", "http://127.0.0.1:8000/v1"],
        ["--api-key-env", "MY_KEY_VARIABLE"],
    ],
)
def test_values_that_are_no_keys_are_not_redacted(words: list[str]) -> None:
    redaction.register_command_line(words)
    assert redaction.list_secrets() == ()


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "VLLM_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DCPBENCH_SECRET"]
)
def test_key_in_the_environment_is_found_by_its_variable(name: str) -> None:
    redaction.register_environment({name: KEY, "TOKENIZERS_PARALLELISM": "false-false", "KEYBOARD": "de-latin1-x"})
    assert redaction.list_secrets() == (KEY,)


@given(key=st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), min_size=12, max_size=60))
def test_key_is_redacted_in_every_notation(key: str) -> None:
    """Notations are plain text, JSON, URL, HTML and Python; text of few different characters is no key."""
    redaction.reset_secrets()
    redaction.register_secrets(key)
    if not redaction.list_secrets():
        return
    for notation in (
        key,
        json.dumps(key)[1:-1],
        json.dumps(key)[1:-1].replace("/", "\\/"),
        urllib.parse.quote(key, safe=""),
        urllib.parse.quote_plus(key),
        html.escape(key),
        repr(key)[1:-1],
    ):
        assert redact(f"a {notation} b") == f"a {PLACEHOLDER} b"


@given(begin=st.integers(0, 25), end=st.integers(8, 33))
def test_long_part_of_a_key_is_redacted(begin: int, end: int) -> None:
    redaction.reset_secrets()
    redaction.register_secrets(KEY)
    assert redact_part(f"wrong: {KEY[:end]}") == f"wrong: {PLACEHOLDER}"
    assert redact_part(f"{KEY[begin:]} is wrong") == f"{PLACEHOLDER} is wrong"


@pytest.mark.parametrize("cut", [text.fit_text, text.fit_name, text.fit_line])
def test_text_is_redacted_before_truncation(cut: object) -> None:
    """No part of the key remains for any position of the cut."""
    redaction.register_secrets(KEY)
    for before in range(180, 205):
        shown = cut("x" * before + KEY + "y" * 300, 200)  # type: ignore[operator]
        assert not any(KEY[i : i + 8] in shown for i in range(len(KEY) - 7)), before


def test_output_to_a_stream_is_redacted() -> None:
    redaction.register_secrets(KEY)
    out = io.StringIO()
    stream = streams.RedactedStream(out)
    print("a", KEY, file=stream)  # type: ignore[call-overload]
    stream.writelines([f"b {KEY}\n"])
    assert out.getvalue() == f"a {PLACEHOLDER}\nb {PLACEHOLDER}\n"
    assert (stream.isatty(), stream.getvalue()) == (False, out.getvalue())


def test_record_is_redacted_except_its_point(tmp_path: Path) -> None:
    """--resume finds points by their key."""
    redaction.register_secrets(KEY, "kimi-k2x")
    point = build.make_point(model="kimi-k2x")
    RecordFile(tmp_path).append(build.make_failed_record(point, reason=f"the server said {KEY}"))
    (found,) = read_records(tmp_path)
    assert found.point == point
    assert found.reason == f"the server said {PLACEHOLDER}"


class TestServerKeys:
    def test_points_have_labels_and_servers_have_the_keys(self, tmp_path: Path) -> None:
        """Two keys give two servers; other varied flags are unchanged."""
        other = KEY[::-1]
        file = tmp_path / "engine.toml"
        flags = f'[flags]\napi-key = ["{KEY}", "{other}"]\nseqs = [4, 8]\n[env]\nHF_TOKEN = "hf-abcdefgh123"\n'
        file.write_text(f'name = "x"\ncommand = "x --port {{port}}"\n{flags}')
        engine = resolve_engine(str(file), None)
        assert engine.list_labels() == [
            {"api-key": f"{PLACEHOLDER} {n}", "seqs": seqs} for n in (1, 2) for seqs in ("4", "8")
        ]
        assert engine.list_settings()[2] == {"api-key": other, "seqs": "4"}
        assert redact("hf-abcdefgh123") == PLACEHOLDER
        point = build.make_point(settings=f"api-key={PLACEHOLDER} 2, seqs=4")
        assert engine.find_settings(point) == engine.list_settings()[2]
        assert other in engine.make_command(point, engine.find_settings(point), "m", 1)

    def test_single_key_has_no_number(self) -> None:
        redaction.register_secrets(KEY)
        engine = Engine(name="x", command="x {port}", flags={"api-key": [KEY], "seqs": [4, 8]})
        assert [label["api-key"] for label in engine.list_labels()] == [PLACEHOLDER, PLACEHOLDER]


@given(cuts=st.lists(st.integers(1, 40), max_size=12), copies=st.integers(0, 3))
def test_server_log_is_redacted_for_any_division_of_writes(cuts: list[int], copies: int) -> None:
    log = b"begin sk-Pl " + b"".join(b"<%s>" % KEY.encode() for _ in range(copies)) + b" end " + KEY.encode()[:9]
    (source, sink), (out, target) = os.pipe(), os.pipe()
    pieces = _divide(log, cuts)
    left = iter([*pieces, b""])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcpbench.servers.process_group.os.read", lambda *_: next(left))
        copy_redacted(source, target, [KEY.encode()], PLACEHOLDER.encode())
    os.close(sink)
    os.close(target)
    expected = b"begin sk-Pl " + b"<(API key)>" * copies + b" end " + KEY.encode()[:9]
    assert os.read(out, 1 << 16) == expected
    os.close(out)


def _divide(data: bytes, sizes: list[int]) -> list[bytes]:
    found = []
    for size in sizes:
        found.append(data[:size])
        data = data[size:]
    return [piece for piece in (*found, data) if piece]
