"""Test a client against faulty servers: each fault is a failed request with a message, within the time limit."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from dcpbench.errors import UsageError, WorkerError
from dcpbench.servers import measure
from dcpbench.servers.client import Client, RequestError, Target, load_api_key
from dcpbench.servers.load import Call, LoadOptions, Outcome, Run
from dcpbench.servers.prompt_format import ANSWER_IDS, PromptFormat
from tests.servers.fake_server import FAULTS, Model, Running, Script

LIMIT_S = 1.0
PROMPT_FORMAT = PromptFormat(endpoint="completions", model="fake", extras=ANSWER_IDS, vocab=1000)
SAID = {
    "401": ("HTTP 401", "HTTP 401: Unauthorized"),
    "404": ("HTTP 404", "HTTP 404: Not Found"),
    "400": ("HTTP 400", "HTTP 400: Bad Request"),
    "429": ("HTTP 429", "Too Many Requests"),
    "429-once": ("HTTP 429", "Too Many Requests"),
    "500": ("HTTP 500", "Internal Server Error"),
    "500-mid": ("bad stream", "broke off with an error: EngineCore encountered an issue"),
    "error-event": ("bad stream", "broke off with an error: EngineCore encountered an issue"),
    "html": ("no stream", "text/html instead of a stream: <!doctype html>"),
    "not-json": ("no stream", "application/json instead of a stream: {half"),
    "half-event": ("bad stream", "ended in the middle of an event"),
    "close": ("closed", "closed the connection without an answer"),
    "close-mid": ("closed", "in the middle of its answer"),
    "reset": ("closed", "closed the connection without an answer"),
    "silent": ("time-out", "no token came for 1 s (--timeout)"),
    "silent-mid": ("time-out", "no token came for 1 s (--timeout)"),
    "endless": ("bad stream", "more than 1,020 chunks or token ids for 10 tokens and did not end"),
    "endless-line": ("bad stream", "one event of the stream is longer than 1,048,576 bytes"),
    "endless-head": ("not HTTP", "is not HTTP/1.1"),
    "comments": ("time-out", "no token came for 1 s"),
    "redirect": ("HTTP 301", "redirects (HTTP 301) to http://elsewhere.invalid/v1"),
}
HARMLESS = ("no-usage-no-tokens", "crlf", "slow-bytes", "continue")


def call(target: Target, number: int = 0, tokens: int = 10) -> Call:
    """Return a request of 20 tokens."""
    return Call(
        number,
        target.encode_request("POST", "/v1/completions", PROMPT_FORMAT.encode_body(np.arange(20), tokens)),
        tokens,
    )


async def answered(script: Script, *, requests: int = 1, retries: int = 0, model: Model | None = None) -> list[Outcome]:
    """Send requests one after the other and return their outcomes."""
    async with Running(script, model) as server:
        target = Target.from_url(server.url, timeout_s=LIMIT_S)
        async with Client(target) as client:
            run = Run(client, [call(target, n) for n in range(requests)], LoadOptions(clients=1, retries=retries))
            await asyncio.wait_for(run.send_load(), 20)
            return run.outcomes


def test_every_fault_of_the_fake_server_is_tested() -> None:
    assert {*SAID, *HARMLESS} == {*FAULTS}


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.sample(3)
def test_fault_is_a_failed_request_with_a_message(fault: str) -> None:
    """The kind is known, memory is limited, and the failure comes long before the 20 s limit of `answered`."""
    (outcome,) = asyncio.run(answered(Script(ttft_ms=2, gap_ms=1, fault=fault)))
    kind, sentence = SAID[fault]
    assert outcome.ended
    assert outcome.error is not None
    assert outcome.error.kind == kind
    assert sentence in outcome.error.sentence
    assert "\n" not in outcome.error.sentence


@pytest.mark.parametrize("fault", HARMLESS)
def test_unusual_but_valid_answers_are_read(fault: str) -> None:
    """Answers have other line ends, single bytes, no usage, or a 1xx head before the head."""
    (outcome,) = asyncio.run(answered(Script(ttft_ms=2, gap_ms=1, fault=fault)))
    assert outcome.error is None
    assert outcome.answer is not None
    assert sum(outcome.answer.list_chunk_tokens()) == 10


def test_requests_after_a_failed_one_are_answered() -> None:
    """Every second request breaks off, and its connection is not used again."""
    found = asyncio.run(answered(Script(fault="close-mid", fault_every=2), requests=6))
    assert [outcome.error is None for outcome in found].count(True) == 3


def test_busy_server_is_retried_only_on_request_and_retries_count() -> None:
    """Latency of a request includes all attempts."""
    (refused,) = asyncio.run(answered(Script(fault="429-once")))
    assert refused.error is not None
    assert refused.retries == 0
    (again,) = asyncio.run(answered(Script(fault="429-once"), retries=2))
    assert again.error is None
    assert again.retries == 1


def test_connection_to_a_closed_port_is_refused() -> None:
    """The port was free a moment ago."""

    async def ask() -> RequestError:
        async with Running() as server:
            target = Target.from_url(server.url, timeout_s=LIMIT_S)
        async with Client(target) as client:
            run = Run(client, [call(target)], LoadOptions(clients=1))
            await run.send_load()
            assert run.outcomes[0].error is not None
            return run.outcomes[0].error

    error = asyncio.run(ask())
    assert error.kind == "refused"


def test_https_to_an_http_server_has_an_error_message() -> None:
    async def ask() -> RequestError:
        async with Running() as server:
            target = Target.from_url(server.url.replace("http:", "https:"), timeout_s=LIMIT_S)
            async with Client(target) as client:
                run = Run(client, [call(target)], LoadOptions(clients=1))
                await asyncio.wait_for(run.send_load(), 20)
                assert run.outcomes[0].error is not None
                return run.outcomes[0].error

    assert asyncio.run(ask()).kind in ("TLS", "closed", "time-out", "refused")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://x", "is no address of a server"),
        ("http://", "is no address of a server"),
        ("http://x:99999", "Port out of range"),
        ("http://me:secret@x", "put an API key in an environment variable"),
        ("http://x/v1?key=1", "leave out what follows ?"),
    ],
)
def test_invalid_address_is_refused_without_its_password(url: str, message: str) -> None:
    """No request is sent."""
    with pytest.raises(UsageError) as error:
        Target.from_url(url)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_unknown_host_error_shows_an_example_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single word is parsed as a host, because http:// may be omitted."""

    async def unknown(*_: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr("dcpbench.servers.client._open_socket", unknown)
    with pytest.raises(WorkerError) as error:
        measure.fetch_server_info(Target.from_url("foo"))
    assert str(error.value) == (
        "http://foo:80 cannot be measured: foo is no host that is known here (Name or service not known); write for example "
        "--url http://127.0.0.1:8000."
    )


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://x", "http://x:80"),
        ("https://x/api/v1/", "https://x:443/api"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_address_may_omit_scheme_port_and_v1(url: str, wanted: str) -> None:
    assert Target.from_url(url).url == wanted


def test_key_passed_as_variable_name_is_refused_without_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key would be recorded with the command; the default variable may be unset, since many servers need no key."""
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert (load_api_key("MY_KEY"), load_api_key("OPENAI_API_KEY")) == ("secret", "")
    with pytest.raises(UsageError, match="the name of an environment variable") as caught:
        load_api_key("sk_typed_by_mistake")
    assert "typed" not in str(caught.value)
