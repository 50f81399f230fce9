"""Test that a planted key is in no output (run folder, stdout, stderr, process titles, logs) on any error path."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.records.file import read_records
from dcpbench.serving.samples import read_samples
from tests.servers.fake_server import FakeServer, Model, Script
from tests.servers.hostile_server import run_in_thread

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
KEY = "sk-Planted0123456789abcdefghijKLM"
PIECES = [KEY[i : i + 10].encode() for i in range(len(KEY) - 9)]  # a truncated key is nearly a key
LOAD = ["--device", "cpu", "--tp", "1", "--concurrency", "2", "--num-requests", "4", "--input-tokens", "20"]
LOAD += ["--output-tokens", "4", "--client", "warm-up=0"]
ONE = ["--client", "processes=1"]
LONG = "x" * 275 + " "  # after this text a message is truncated within the key


class Echo(FakeServer):
    """Server that echoes the key of a request in one of several ways."""

    def __init__(self, mode: str) -> None:
        super().__init__(Script(gap_ms=1.0), Model(engine="sglang" if mode == "facts of SGLang" else "vllm"))
        self.mode = mode

    async def _serve_other_path(self, writer: asyncio.StreamWriter, method: str, path: str) -> bool:
        if path == "/v1/models" and self.mode == "models":
            return await _answer(writer, 401, f'{{"error": {{"message": "{LONG}wrong key {KEY}"}}}}')
        if path == "/v1/models" and self.mode == "name of the model":
            self.model.name = f"fake-{KEY}"
        if path == "/version" and self.mode == "version":
            return await _answer(writer, 200, f'{{"version": "{"0." * 90}{KEY}"}}')
        if path == "/get_server_info" and self.mode == "facts of SGLang":
            facts = f'"max_total_num_tokens": 9, "model_path": "{"y" * 185}{KEY}", "dtype": "{KEY}"'
            return await _answer(writer, 200, f"{{{facts}}}")
        if path == "/metrics" and self.mode == "metrics":
            label = f'block_size="16",num_gpu_blocks="9",cache_dtype="{KEY}"'
            return await _answer(writer, 200, f"vllm:cache_config_info{{{label}}} 1.0\n", "text/plain")
        if path.endswith("_profile") and self.mode == "profiler":
            return await _answer(writer, 500, f"no profile for {KEY}", "text/plain")
        return await super()._serve_other_path(writer, method, path)

    async def _complete(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str], body: bytes) -> bool:
        tried = b'"max_tokens":2,' in body and self.mode.startswith("later ")
        answer = None if tried else ANSWERS.get(self.mode.removeprefix("later "))
        if answer is None:
            return await super()._complete(writer, path, headers, body)
        self.sent.append(None)  # type: ignore[arg-type]
        writer.write(answer)
        await writer.drain()
        return False


def _head(status: str, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *headers, "Connection: close", "", ""]).encode()


async def _answer(writer: asyncio.StreamWriter, code: int, text: str, kind: str = "application/json") -> bool:
    writer.write(_head(f"{code} X", f"Content-Type: {kind}", f"Content-Length: {len(text)}") + text.encode())
    await writer.drain()
    return False


STREAM = _head("200 OK", "Content-Type: text/event-stream")
ANSWERS = {
    "401": _head("401 Unauthorized") + f'{{"error": {{"message": "{LONG}wrong key {KEY}"}}}}'.encode(),
    "401 in HTML": _head("401 Unauthorized", "Content-Type: text/html") + f"<p>{'z' * 190} {KEY} is wrong".encode(),
    "500 escaped": _head("500 X") + b'{"detail": "\\u0073' + KEY[1:].encode() + b'"}',
    "redirect": _head("302 Found", f"Location: https://elsewhere/{'p' * 180}{KEY}/login"),
    "another kind": _head("200 OK", f"Content-Type: text/{KEY}") + f"<title>{'t' * 180}{KEY}".encode(),
    "error in the stream": STREAM + f'data: {{"error": {{"message": "{LONG}{KEY}"}}}}\n\n'.encode(),
    "object error": STREAM + f'data: {{"object": "error", "message": "{KEY}"}}\n\n'.encode(),
    "no JSON in the stream": STREAM + f"data: {'j' * 185} {KEY} {{\n\n".encode(),
    "half an event": STREAM + f"data: {'h' * 180} {KEY}".encode(),
    "its text": STREAM
    + f'data: {{"choices": [{{"text": "{KEY}", "finish_reason": "length"}}]}}\n\ndata: [DONE]\n\n'.encode(),
}
LATER = [f"later {mode}" for mode in ANSWERS]
OF_ITSELF = ["models", "name of the model", "version", "metrics", "facts of SGLang"]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


class Seen:
    """Collect what a command leaves: output, files, and titles of the processes below this one."""

    def __init__(self, capfd: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capfd, self._folder = capfd, folder
        self.titles: set[bytes] = set()
        self.output = ""

    def run(self, *words: str) -> int:
        """Run a command in this process, and return its exit code."""
        with pytest.MonkeyPatch.context() as patch, watched(self.titles):
            patch.setattr(sys, "argv", ["dcpbench", *words])
            with pytest.raises(SystemExit) as end:
                cli.main()
        self.output += "".join(self._capfd.readouterr())
        return int(end.value.code or 0)

    def check(self, *, titles: bool = True) -> None:
        """Fail if a piece of the key is found."""
        assert "Traceback" not in self.output
        places = {"output": self.output.encode()} | ({"titles": b"\n".join(self.titles)} if titles else {})
        for path in self._folder.rglob("*"):
            places[str(path)] = str(path.relative_to(self._folder)).encode()
            if path.is_file():
                places[f"in {path}"] = path.read_bytes()
                if path.suffix == ".parquet":
                    places[f"rows of {path}"] = repr(read_samples(path)).encode()
        found = {name: piece for name, data in places.items() for piece in PIECES if piece in data}
        assert found == {}


@contextlib.contextmanager
def watched(titles: set[bytes]) -> Iterator[None]:
    """Collect the titles of all processes below this one while the block lasts."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.02):
            parents = {}
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    parents[int(entry.name)] = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            below = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in below} - below:
                below |= more
            for pid in below - {os.getpid()}:
                with contextlib.suppress(OSError):
                    titles.add(Path(f"/proc/{pid}/cmdline").read_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def seen(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Seen:
    return Seen(capfd, tmp_path)


@pytest.mark.parametrize("mode", [*OF_ITSELF, *ANSWERS, *LATER])
@pytest.mark.sample(4)
def test_key_echoed_by_a_measured_server_is_redacted(mode: str, seen: Seen) -> None:
    """The server echoes it before the load, in answers to all requests, or to all except trial requests."""
    with run_in_thread(Echo(mode)) as url:
        seen.run("server", "--url", url, *LOAD, *ONE, "-o", "run")
    if Path("run/records.jsonl").exists():
        for command in (["show", "run"], ["show", "run", "--json"], ["records", "check", "run"]):
            seen.run(*command)
    seen.check()


@pytest.mark.parametrize("mode", ["later 401", "later no JSON in the stream"])
def test_client_processes_redact_before_they_truncate(mode: str, seen: Seen) -> None:
    with run_in_thread(Echo(mode)) as url:
        assert seen.run("server", "--url", url, *LOAD, "--client", "processes=2", "-o", "run") == 4
    (record,) = read_records(Path("run"))
    assert "(API key)" in str(record.server) + str(record.reason)
    seen.check()


@pytest.mark.parametrize(
    "mode", ["models", "401", "redirect", "error in the stream", "no JSON in the stream", "its text"]
)
def test_key_echoed_by_compared_servers_is_redacted(mode: str, seen: Seen) -> None:
    with run_in_thread(Echo(mode)) as url:
        seen.run("verify", "--url", url, "--url", url, "--context", "16", "-o", "answers")
        seen.run("verify", "--url", url, "--context", "16", "--json")
    seen.check()


@pytest.mark.parametrize("mode", ["models", "401", "profiler"])
def test_key_echoed_by_a_profiled_server_is_redacted(mode: str, seen: Seen) -> None:
    Path("traces").mkdir()
    with run_in_thread(Echo(mode)) as url:
        seen.run("syncs", "serve", "--url", url, "--traces", "traces", "--wait", "1")
        seen.run("server", "--url", url, *LOAD, *ONE, "--traces", "traces", "-o", "run")
    seen.check()


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:1/?api_key={KEY}",
        f"http://me:{KEY}@127.0.0.1:1",
        f"{'h' * 180}://{KEY}@x",
        f"http://x/#{KEY}",
    ],
    ids=["query", "password", "another scheme", "fragment"],
)
def test_key_in_an_address_is_redacted(url: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert seen.run("server", "--url", url, *LOAD, "-o", "run") == 2
    assert seen.run("verify", "--url", url) == 2
    assert seen.run("syncs", "serve", "--url", url, "--traces", ".") == 2
    seen.check()


FAKE = f"{sys.executable} -m tests.servers.fake_server --port {{port}} --api-key {KEY}"


def test_key_of_a_started_server_is_only_in_its_own_process_title(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server prints its flags, and fails requests because the client has no key.

    The command runs again, and as a dry run.
    """
    monkeypatch.delenv("OPENAI_API_KEY")
    command = ["server", "--serve-cmd", f"{FAKE} --children {KEY}", "--model", "m", *LOAD, *ONE, "-o", "run"]
    seen.run(*command, "--dry-run")
    seen.run(*command, "--dry-run", "--json")
    assert seen.run(*command) == 4, "argparse refuses the flag and echoes it"
    (record,) = read_records(Path("run"))
    assert (Path("run") / record.detail["log"]).is_file(), "the log that the record names exists"
    assert "(API key)" in (Path("run") / record.detail["log"]).read_text()
    before = Path("run/records.jsonl").read_bytes()
    assert seen.run(*command, "--resume") == 4
    assert Path("run/records.jsonl").read_bytes().startswith(before)
    seen.check(titles=False)
    assert not [title for title in seen.titles if KEY.encode() in title and b"process_group.py" in title]


def test_varied_key_is_in_no_name_and_resume_finds_its_points(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has one of the keys of two servers, so half of the points are measured, and only once."""
    other = "".join(reversed(KEY))
    fake = f"{sys.executable} -m tests.servers.fake_server --port {{port}}"
    Path("engine.toml").write_text(f'name = "fake"\ncommand = "{fake}"\n[flags]\napi-key = ["{KEY}", "{other}"]\n')
    folder = Path("kept")
    folder.mkdir()
    toml = str(Path("engine.toml").absolute())
    monkeypatch.chdir(folder)
    command = ["server", "--engine", toml, "--model", "fake", *LOAD, *ONE, "-o", "run"]
    assert seen.run(*command) == 4
    records = {record.point.settings: record for record in read_records(Path("run"))}
    assert {settings: record.outcome for settings, record in records.items()} == {
        "api-key=(API key) 1": "ok",
        "api-key=(API key) 2": "failed",
    }
    assert all((Path("run/servers")).glob("*.log"))
    assert seen.run(*command, "--resume") == 4
    assert "1 point to run, 1 already measured" in seen.output
    seen._folder = Path.cwd()
    seen.check(titles=False)
    assert not any(other[i : i + 10] in seen.output for i in range(len(other) - 9))


def test_ab_with_keys_redacts_them_and_can_be_resumed(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    both = shlex.join(["--serve-cmd", f"{FAKE} --children {KEY}", "--model", "m", *LOAD, *ONE])
    command = [
        "ab",
        "--workload",
        "server",
        "--both",
        both,
        "--a",
        "--requests seed=1",
        "--b",
        "--requests seed=2",
        "--rounds",
        "1",
    ]
    seen.run(*command, "--dry-run")
    seen.run(*command, "-o", "pair")
    seen.run(*command, "-o", "pair", "--resume")
    seen.check(titles=False)


def test_command_with_a_key_is_not_submitted(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch script would contain the key."""
    monkeypatch.delenv("OPENAI_API_KEY")
    command = ["server", "--serve-cmd", FAKE, "--model", "m", *LOAD]
    for where in (["slurm"], ["slurm", "--dry-run"], ["k8s", "--image", "i"], ["k8s", "--image", "i", "--dry-run"]):
        assert seen.run("submit", *where, "--", *command) == 2
    assert "the command contains a key" in seen.output
    seen.check()


@pytest.mark.long
def test_key_in_the_environment_is_redacted_in_all_commands(seen: Seen) -> None:
    """The key is passed as a folder, a model or a name."""
    for words in (
        ["show", KEY],
        ["report", KEY],
        ["records", "check", KEY],
        ["compare", KEY, KEY],
        ["export", KEY, "--to", "csv"],
        ["export", KEY, "--to", KEY],
        ["top", KEY, "--once"],
        ["dashboard", "build", KEY],
        ["import", "--from", "vllm", KEY],
        ["syncs", "scan", KEY],
        ["recommend", "--model", KEY],
        ["sweep", "--model", KEY, "--dry-run"],
        ["server", "--api-key-env", KEY, "--url", "http://127.0.0.1:1"],
        ["submit", "follow", KEY],
        [KEY],
    ):
        assert seen.run(*words) != 0, words
    seen.check()


@pytest.mark.parametrize("mode", ["killed while it loads"])
def test_log_of_a_killed_server_has_no_key(mode: str, tmp_path: Path) -> None:
    """The command and its server are killed, so the log must be redacted while it is written."""
    del mode
    program = f"import sys,time; print('key {KEY}', flush=True); time.sleep(60)"
    words = ["server", "--serve-cmd", shlex.join([sys.executable, "-c", program, "{port}", "--api-key", KEY])]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "dcpbench", *words, "--model", "m", *LOAD, "-o", str(run)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 120
        while time.monotonic() < until and not any(b"(API key)" in p.read_bytes() for p in run.glob("servers/*.log")):
            time.sleep(0.1)
        process.kill()
        out, err = process.communicate()
    (log,) = run.glob("servers/*.log")
    assert log.read_bytes() == b"key (API key)\n"
    assert not any(piece in out + err for piece in PIECES)
