"""Test a load that several client processes send: it is divided completely, and its times share one clock."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from dcpbench import cli
from dcpbench.errors import WorkerError
from dcpbench.records.runs import read_run
from dcpbench.servers import client_pool as sharing
from dcpbench.servers.client import Target
from dcpbench.servers.client_pool import DONE, PROGRESS, READY, STOP, ClientPool, open_load, split_evenly, split_load
from dcpbench.servers.load import Call, LoadOptions, Outcome, Pace
from dcpbench.servers.measure import CHUNKS_EACH, WARM_UP_OUTPUT, choose_processes
from dcpbench.servers.prompt_format import ANSWER_IDS, PromptFormat
from dcpbench.serving.requests import ServeRequest
from dcpbench.serving.samples import read_samples
from tests.servers.fake_server import Model, Running, Script
from tools.client_accuracy import run_test_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PROMPT_FORMAT = PromptFormat(endpoint="completions", model="fake", extras=ANSWER_IDS, vocab=1000)
NOWHERE = Target.from_url("http://127.0.0.1:9")
ROOT = Path(__file__).parents[2]


def make_calls(target: Target, number: int, tokens: int = 5, gap_s: float | None = None) -> list[Call]:
    """Return requests of 20 tokens, one every gap_s."""
    return [
        Call(
            n,
            target.encode_request("POST", "/v1/completions", PROMPT_FORMAT.encode_body(np.arange(20) + n, tokens)),
            tokens,
            None if gap_s is None else n * gap_s,
        )
        for n in range(number)
    ]


@pytest.mark.parametrize(("number", "parts", "each"), [(7, 3, [3, 2, 2]), (2, 2, [1, 1]), (0, 2, [0, 0])])
def test_requests_are_divided_evenly(number: int, parts: int, each: list[int]) -> None:
    """The first parts are the larger ones."""
    assert split_evenly(number, parts) == each


def test_requests_are_divided_in_proportion_to_clients() -> None:
    """5 clients in 2 processes are 3 and 2, which get 6 and 4 of 10 requests."""
    shares = split_load(NOWHERE, make_calls(NOWHERE, 10), LoadOptions(clients=5), 2)
    assert [part.options.clients for part in shares] == [3, 2]
    assert [[call.number for call in part.calls] for part in shares] == [[0, 2, 4, 5, 7, 9], [1, 3, 6, 8]]


def test_requests_of_an_open_loop_are_divided_round_robin() -> None:
    """The limit on concurrent requests is divided too."""
    shares = split_load(NOWHERE, make_calls(NOWHERE, 5, gap_s=0.1), LoadOptions(clients=None, at_once=3), 2)
    assert [part.options.at_once for part in shares] == [2, 1]
    assert [[call.number for call in part.calls] for part in shares] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(("requests", "clients", "processes", "expected"), [(1, 4, 4, 1), (9, 2, 4, 2), (9, 9, 1, 1)])
def test_every_process_has_a_request_and_a_client(requests: int, clients: int, processes: int, expected: int) -> None:
    assert len(split_load(NOWHERE, make_calls(NOWHERE, requests), LoadOptions(clients=clients), processes)) == expected


async def _send_load(
    script: Script, clients: int | None, gap_s: float | None, limit_s: float | None = None
) -> ClientPool:
    async with Running(script, Model()) as server:
        target = Target.from_url(server.url)
        async with open_load(
            target, make_calls(target, 12, gap_s=gap_s), LoadOptions(clients=clients, limit_s=limit_s), 2
        ) as run:
            assert isinstance(run, ClientPool)
            await run.prepare(4)
            await run.send_load()
            return run


@pytest.mark.parametrize(("clients", "gap_s"), [(4, None), (None, 0.02)])
def test_outcomes_of_two_processes_form_one_load(clients: int | None, gap_s: float | None) -> None:
    """All requests have times of one clock after one start; those of an open loop are the scheduled times."""
    run = asyncio.run(_send_load(Script(gap_ms=20), clients, gap_s))
    assert sorted(o.call.number for o in run.outcomes) == list(range(12))
    assert all(o.ended and o.error is None and o.answer is not None and len(o.answer.tokens) == 5 for o in run.outcomes)
    assert len(run.paces) == 2
    submitted = [o.submitted_s - run.start_s for o in run.outcomes]
    assert submitted == sorted(submitted)
    assert min(submitted) >= 0
    if gap_s is not None:
        assert submitted == pytest.approx([n * gap_s for n in range(12)], abs=1e-6)
    gaps = np.concatenate([np.diff(o.answer.chunk_s) for o in run.outcomes if o.answer is not None])
    assert np.median(gaps) == pytest.approx(0.02, rel=0.25)


def test_failures_keep_kind_sentence_and_status() -> None:
    run = asyncio.run(_send_load(Script(fault="500"), 4, None))
    assert {(o.error.kind, o.error.status) for o in run.outcomes if o.error} == {("HTTP 500", 500)}
    assert len([o for o in run.outcomes if o.error and "Internal Server Error" in o.error.sentence]) == 12


def test_time_limit_ends_all_processes() -> None:
    """Unfinished requests are in the outcomes too."""
    run = asyncio.run(_send_load(Script(gap_ms=2000), 4, None, limit_s=0.5))
    assert len(run.outcomes) == 4
    assert not any(o.ended for o in run.outcomes)
    assert all(o.answer is not None and len(o.answer.chunk_s) == 1 for o in run.outcomes)


def test_time_limit_ends_an_open_loop_of_one_process() -> None:
    """No request gets its second token, which would arrive after two seconds."""

    async def main() -> list[Outcome]:
        async with Running(Script(gap_ms=2000), Model()) as server:
            target = Target.from_url(server.url)
            async with open_load(
                target, make_calls(target, 3, gap_s=0.02), LoadOptions(clients=None, limit_s=0.5)
            ) as run:
                await run.prepare(3)
                await run.send_load()
                return run.outcomes

    outcomes = asyncio.run(main())
    assert [(o.ended, o.answer is not None and len(o.answer.chunk_s)) for o in outcomes] == [(False, 1)] * 3


def test_stopped_load_keeps_the_outcomes_of_each_process() -> None:
    """One process has finished its request of one token, the other is in the middle of five tokens."""

    async def main() -> ClientPool:
        async with Running(Script(gap_ms=5000), Model()) as server:
            target = Target.from_url(server.url)
            calls = [*make_calls(target, 1, tokens=1), *make_calls(target, 2, tokens=5)[1:]]
            async with open_load(target, calls, LoadOptions(clients=2), 2) as run:
                assert isinstance(run, ClientPool)
                await run.prepare(2)
                running = asyncio.create_task(run.send_load())
                while not run.paces or sum(bool(sent.token_s) for sent in server.server.sent) < 2:  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await running
                return run

    run = asyncio.run(main())
    assert [(o.call.number, o.ended) for o in run.outcomes] in ([(0, True), (1, False)], [(1, False), (0, True)])
    assert all(o.answer is not None and len(o.answer.chunk_s) == 1 for o in run.outcomes)
    assert len(run.paces) == 2


def test_ctrl_c_is_blocked_in_every_process() -> None:
    """A terminal sends SIGINT to the whole group, and a process that receives it exits without its outcomes.

    A new interpreter is needed because Python starts multiprocessing's tracker with the first process, and unblocks
    SIGINT there.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.servers.blocked_signals"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["SIGHUP SIGINT"] * 3


@contextlib.asynccontextmanager
async def start_load(processes: int) -> AsyncIterator[tuple[ClientPool, asyncio.Task[None]]]:
    """Yield a load of one request per process, each of which has its first token, and the task that sends it."""
    async with Running(Script(gap_ms=5000), Model()) as server:
        target = Target.from_url(server.url)
        calls = make_calls(target, processes)
        async with open_load(target, calls, LoadOptions(clients=processes), processes) as run:
            assert isinstance(run, ClientPool)
            await run.prepare(processes)
            running = asyncio.create_task(run.send_load())
            while sum(bool(sent.token_s) for sent in server.server.sent) < processes:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
            yield run, running


def signal_process(run: ClientPool, place: int, number: int) -> None:
    """Send a signal to a process of a pool."""
    pid = run._processes[place].pid
    assert pid is not None
    os.kill(pid, number)


def test_outcomes_of_other_processes_are_kept_if_one_dies() -> None:
    """The first of three processes is killed while all wait for their second token."""

    async def main() -> ClientPool:
        async with start_load(3) as (run, running):
            signal_process(run, 0, signal.SIGKILL)
            with pytest.raises(WorkerError, match="ended with exit code -9"):
                await running
            return run

    run = asyncio.run(main())
    assert [(o.call.number, o.ended) for o in run.outcomes] in ([(1, False), (2, False)], [(2, False), (1, False)])


def test_process_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that is stopped by SIGSTOP neither answers nor exits."""
    monkeypatch.setattr(sharing, "STOP_S", 0.5)
    monkeypatch.setattr(sharing, "END_S", 0.5)

    async def main() -> ClientPool:
        async with start_load(2) as (run, running):
            signal_process(run, 0, signal.SIGSTOP)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return run

    assert [o.call.number for o in asyncio.run(main()).outcomes] == [1]
    assert (
        "1 of 2 client processes did not answer within 0.5 s; their requests are in no record."
        in capsys.readouterr().err
    )


def test_dead_process_raises_worker_error() -> None:
    """The other processes exit too."""

    async def main() -> None:
        async with Running(Script(gap_ms=500)) as server:
            target = Target.from_url(server.url)
            async with open_load(target, make_calls(target, 4), LoadOptions(clients=4), 2) as run:
                assert isinstance(run, ClientPool)
                await run.prepare(4)
                asyncio.get_running_loop().call_later(1.0, signal_process, run, 1, signal.SIGKILL)
                await run.send_load()

    with pytest.raises(WorkerError, match=r"a process of the client ended with exit code -9; try --client processes=1"):
        asyncio.run(main())


def test_record_has_the_number_of_client_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = "--device cpu --num-requests 12 --concurrency 6 --input-tokens 20 --output-tokens 8"
    with run_test_server("--gap-ms 10", tmp_path / "log") as url, pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", url, *load.split(), "--client", "processes=2", "-o", str(tmp_path / "run")])
    assert not end.value.code, capsys.readouterr().err
    (record,) = read_run(tmp_path / "run").records
    assert record.server
    client = record.server.client
    assert client is not None
    assert client.processes == 2
    assert "Overhead of the client" in (tmp_path / "run" / "report" / "report.html").read_text()


@pytest.mark.parametrize("number", ["0", "-1", "65"])
def test_invalid_number_of_processes_raises_usage_error(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No request is sent."""
    with pytest.raises(SystemExit) as end:
        cli.main(["server", "--url", "http://127.0.0.1:9", "--client", f"processes={number}"])
    assert end.value.code == 2
    assert f"--client processes={number} cannot be; write 1 to 64" in capsys.readouterr().err


def find_session_processes(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("number", "wait_s"), [(signal.SIGKILL, 1.0), (signal.SIGINT, 0.3), (signal.SIGINT, 2.0)])
@pytest.mark.long
def test_no_process_outlives_the_command(number: int, wait_s: float, tmp_path: Path) -> None:
    """The command ends in the middle of a load, and before it begins."""
    with run_test_server("--gap-ms 200", tmp_path / "log") as url:
        words = (
            f"server --url {url} --device cpu --num-requests 40 --concurrency 4 --input-tokens 20 --output-tokens 50"
        )
        command = [sys.executable, "-m", "dcpbench.cli", *words.split(), "--client", "processes=2"]
        with subprocess.Popen(
            [*command, "-o", str(tmp_path / "run")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        ) as ours:
            until = time.monotonic() + 30
            while len(find_session_processes(ours.pid)) < 3 and time.monotonic() < until:
                time.sleep(0.05)
            assert len(find_session_processes(ours.pid)) >= 3
            time.sleep(wait_s)
            os.killpg(ours.pid, number) if number == signal.SIGINT else ours.send_signal(number)
            ours.wait(30)
            until = time.monotonic() + 10
            while find_session_processes(ours.pid) and time.monotonic() < until:
                time.sleep(0.1)
            assert not find_session_processes(ours.pid)
    if number == signal.SIGINT:
        (record,) = read_run(tmp_path / "run").records
        assert record.outcome == "failed"
        assert (record.reason or "").startswith("interrupted")


@pytest.mark.long
def test_ctrl_c_in_a_terminal_keeps_outcomes_of_every_process(tmp_path: Path) -> None:
    """The signal goes to the whole group, as in a terminal, while two processes have four unfinished requests."""

    async def main() -> int | None:
        async with Running(Script(gap_ms=100), Model()) as server:
            words = "--device cpu --num-requests 40 --concurrency 4 --input-tokens 20 --output-tokens 500"
            ours = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "dcpbench.cli", "server", "--url", server.url, *words.split()],
                *["--client", "processes=2", "-o", str(tmp_path / "run")],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            while sum(len(s.token_s) > WARM_UP_OUTPUT for s in server.server.sent) < 4 and ours.returncode is None:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.01)
            os.killpg(ours.pid, signal.SIGINT)
            return await ours.wait()

    assert asyncio.run(main()) == 128 + signal.SIGINT
    (record,) = read_run(tmp_path / "run").records
    assert (record.reason or "").startswith("interrupted")
    assert record.server
    assert record.server.client
    assert record.server.client.processes == 2
    assert record.serve
    assert len(read_samples(tmp_path / "run" / record.serve.samples_file)) == 4


def make_point(**load: object) -> object:
    """Return a served point of an engine."""
    from dcpbench.points.engine_points import make_engine_load, make_engine_point

    clients = int(str(load.pop("clients", 200)))
    engine_load = make_engine_load(requests=400, input_tokens="1", output_tokens="100", **load)
    layout = {"tp": 1, "dp": 1, "dcp": 1}
    return make_engine_point(
        model="m",
        layout=layout,
        backend="vllm",
        load=engine_load,
        concurrency=clients,
        context=101,
        precision={"dtype": "unknown"},
    )


@pytest.mark.parametrize(
    ("clients", "itl_s", "cores", "expected"),
    [(200, 0.05, 16, 1), (1000, 0.05, 16, 3), (1000, 0.05, 2, 1), (200, None, 16, 1)],
)
def test_number_of_processes_follows_from_expected_chunks(
    clients: int, itl_s: float | None, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 clients with a chunk every 50 ms get 20,000 chunks/s, and a process handles 8,000; one core stays free."""
    assert CHUNKS_EACH == 8000
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert choose_processes(make_point(clients=clients), [], itl_s) == expected  # type: ignore[arg-type]


def test_number_of_processes_of_an_open_loop_follows_from_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 requests/s of 2,000 tokens are 22,000 chunks/s."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    prompt = np.arange(3, dtype=np.int32)
    due = [ServeRequest(number=n, prompt=prompt, output_tokens=2000, arrival_s=n / 10) for n in range(11)]
    assert choose_processes(make_point(arrival="gamma"), due, None) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["run", "stop before", "stop during"])
def test_client_process_sends_its_share_and_returns_outcomes(order: str) -> None:
    """One client sends three requests of five tokens; a stopped request is unfinished, and no request bytes return."""

    async def main() -> tuple[list[Outcome], Pace]:
        gap_ms = 5000 if order == "stop during" else 1
        async with Running(Script(gap_ms=gap_ms), Model()) as server:
            target = Target.from_url(server.url)
            (part,) = split_load(target, make_calls(target, 3), LoadOptions(clients=1), 1)
            ours, theirs = multiprocessing.Pipe()
            working = asyncio.create_task(sharing._run_share(theirs, part))
            assert await asyncio.to_thread(ours.recv) == (READY, None)
            ours.send(STOP if order == "stop before" else time.perf_counter())
            if order == "stop during":
                while not any(sent.token_s for sent in server.server.sent):  # noqa: ASYNC110 - the server has no event for it
                    await asyncio.sleep(0.01)
                ours.send(STOP)
            while (message := await asyncio.to_thread(ours.recv))[0] != DONE:
                assert message[0] == PROGRESS
            await working
            outcomes, pace = message[1]
            return outcomes, pace

    outcomes, pace = asyncio.run(main())
    ended = [outcome.ended for outcome in outcomes]
    assert ended == {"run": [True] * 3, "stop before": [], "stop during": [False]}[order]
    assert {outcome.call.data for outcome in outcomes} <= {b""}
    assert (pace.wall_s > 0) == (order != "stop before")
