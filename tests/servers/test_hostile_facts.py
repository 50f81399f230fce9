"""Test that arbitrary facts and usage reported by a server never produce an unreadable record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dcpbench import cli
from dcpbench.records.checks import OUTCOMES
from dcpbench.records.file import read_records
from tests.servers.fake_server import FakeServer, Model, Script
from tests.servers.hostile_server import run_in_thread

if TYPE_CHECKING:
    import asyncio
    from pathlib import Path


class Odd(FakeServer):
    """Server with given fields in its usage, and its own number in /v1/models."""

    def __init__(self, usage: dict[str, Any] | None = None, longest: str = "", **model: Any) -> None:
        super().__init__(Script(usage="always", gap_ms=1.0), Model(**model))
        self.usage, self.longest = usage or {}, longest

    def _make_usage(self, prompt: list[int], done: int) -> dict[str, Any]:
        return super()._make_usage(prompt, done) | self.usage

    async def _serve_other_path(self, writer: asyncio.StreamWriter, method: str, path: str) -> bool:
        if path != "/v1/models" or not self.longest:
            return await super()._serve_other_path(writer, method, path)
        body = b'{"data":[{"id":"fake","max_model_len":%s}]}' % self.longest.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return True


SERVERS = {
    "max_model_len 1e30": {"longest": "1e30"},
    "max_model_len of 26 digits": {"longest": "1" * 26},
    "max_model_len below 0": {"longest": "-1"},
    "blocks of 26 digits": {"kv_blocks": 10**25},
    "sglang's tokens of 30 digits": {"engine": "sglang", "kv_blocks": 10**29},
    "cached_tokens -99": {"usage": {"prompt_tokens_details": {"cached_tokens": -99}}},
    "cached_tokens 1e16": {"usage": {"prompt_tokens_details": {"cached_tokens": 10**16}}},
    "cached_tokens of 40 digits": {"usage": {"prompt_tokens_details": {"cached_tokens": 10**40}}},
    "version of control characters": {"version": "0.32.0\x1b[2J\u0000\u2028"},
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.sample(3)
def test_record_of_odd_server_facts_is_readable(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the outcome of the point is, show, report and records check read its record."""
    run = str(tmp_path / "run")
    words = f"server --device cpu --tp 8 --concurrency 2 --num-requests 4 --input-tokens 20 --output-tokens 4 -o {run}"
    with run_in_thread(Odd(**SERVERS[name])) as url:
        code = run_command(*words.split(), "--client", "processes=1", "--url", url)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "Usage:" not in err
    if code == 2 or not (tmp_path / "run" / "records.jsonl").exists():
        return  # the server was refused with a message and without a record
    (record,) = read_records(tmp_path / "run")
    assert record.outcome in OUTCOMES
    for command in (["show", run], ["records", "check", run], ["show", run, "--json"]):
        assert run_command(*command) == 0
    json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))


def run_command(*words: str) -> int:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main([*words])
    return int(end.value.code or 0)
