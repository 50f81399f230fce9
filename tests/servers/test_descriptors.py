"""Test clients with more connections than open files: the limit is raised, or the shortage is reported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench import cli
from dcpbench.errors import UsageError
from dcpbench.records.file import read_records
from dcpbench.records.record import Server
from dcpbench.servers import client as http
from dcpbench.servers import load
from dcpbench.servers.client import Client, RequestError, Target
from dcpbench.servers.descriptors import OPEN_FILES, SPARE, raise_open_file_limit
from tools.client_accuracy import run_test_server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def limited(soft: int, hard: int | None = None) -> Iterator[None]:
    """Set the number of open files of this process; a hard limit is patched, since it could not be raised again."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        if hard is not None:
            patch.setattr(resource, "getrlimit", lambda _: (soft, hard))
            patch.setattr(resource, "setrlimit", lambda *_: None)
            yield
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.long
def test_1030_clients_are_served_at_a_soft_limit_of_1024_files(tmp_path: Path) -> None:
    """Each request takes two seconds, so all clients are connected at the same time."""
    words = "server --device cpu --tp 8 --concurrency 1030 --num-requests 1030 --input-tokens 20 --output-tokens 4"
    words += f" --client warm-up=0,processes=1 -o {tmp_path / 'run'}"
    with run_test_server("--ttft-ms 2000 --gap-ms 5", tmp_path / "sent.jsonl") as url:
        command = f'ulimit -S -n 1024; exec "$0" -m dcpbench {words} --url {url}'
        done = subprocess.run(
            ["bash", "-c", command, sys.executable], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "run")
    assert record.serve is not None
    assert (record.serve.finished, record.serve.failed) == (1030, 0)
    assert isinstance(record.server, Server)
    assert record.server.failures == []
    assert record.server.client is not None
    assert (record.server.client.starved_share or 0.0) >= 0.0


def test_too_low_hard_limit_is_reported_before_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hard limit is too low for 1,030 clients, whereas two clients are served."""
    words = "server --device cpu --tp 8 --concurrency 1030,2 --num-requests 1030 --input-tokens 20 --output-tokens 2"
    with run_test_server("--gap-ms 1", tmp_path / "sent.jsonl") as url, limited(1024, 1024):
        words += f" --client processes=1 --url {url} -o {tmp_path / 'run'}"
        with pytest.raises(SystemExit) as end:
            cli.main(words.split())
    assert end.value.code == 4
    assert "it may have 1,024 (ulimit -Hn)" in capsys.readouterr().err
    short, other = read_records(tmp_path / "run")
    assert (short.point.concurrency, short.outcome, other.outcome) == (1030, "failed", "ok")
    assert (short.reason or "").startswith("1,030 connections at once need 1,")
    assert isinstance(short.server, Server)
    assert short.server.failures == []


def test_soft_limit_is_raised_as_needed_and_restored() -> None:
    with limited(256):
        with raise_open_file_limit(1000, certain=True):
            assert 1000 + SPARE < soft_limit() < 1000 + 10 * SPARE
        assert soft_limit() == 256
        with raise_open_file_limit(10, certain=True):
            assert soft_limit() == 256


def test_open_loop_is_not_refused_for_too_few_files() -> None:
    """The number of concurrent requests of an open loop is unknown in advance."""
    with limited(256, 256):
        with raise_open_file_limit(1000, certain=False):
            pass
        with (
            pytest.raises(UsageError, match=r"1,000 connections at once .* --client processes=6\."),
            raise_open_file_limit(1000, certain=True, processes=1),
        ):
            pass


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_connection_without_free_descriptor_is_not_reported_as_refused(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: Any) -> None:
        raise OSError(number, "Too many open files")

    async def main() -> None:
        async with Client(Target.from_url("http://127.0.0.1:1")) as client:
            await client.get("/")

    monkeypatch.setattr(http, "_open_socket", none_left)
    with pytest.raises(RequestError, match="so no request was sent") as raised:
        asyncio.run(main())
    assert raised.value.kind == OPEN_FILES
    assert not load.can_retry(raised.value)


def test_unreadable_proc_at_the_end_gives_an_unknown_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc can be read at the start of the run but not at its end; the difference must not be negative."""
    found = iter([0.2, None])
    monkeypatch.setattr(load, "read_starved_s", lambda: next(found))
    words = f"server --device cpu --tp 8 --concurrency 1 --num-requests 1 --input-tokens 20 --client warm-up=0 -o {tmp_path / 'run'}"
    with run_test_server("--ttft-ms 1", tmp_path / "sent.jsonl") as url, pytest.raises(SystemExit) as end:
        cli.main([*words.split(), "--client", "processes=1", "--url", url])
    assert not end.value.code
    (record,) = read_records(tmp_path / "run")
    assert msgspec.to_builtins(record)["server"]["client"]["starved_share"] is None
    assert record.omitted is msgspec.UNSET
