"""What bad servers do to a client: a sentence and a recorded failed request each, and no wait beyond the limit."""

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
MANNER = PromptFormat(endpoint="completions", model="fake", extras=ANSWER_IDS, vocab=1000)
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
    """A request of 20 tokens."""
    return Call(
        number, target.encode_request("POST", "/v1/completions", MANNER.encode_body(np.arange(20), tokens)), tokens
    )


async def answered(script: Script, *, requests: int = 1, retries: int = 0, model: Model | None = None) -> list[Outcome]:
    """What becomes of requests, one after the other."""
    async with Running(script, model) as server:
        target = Target.from_url(server.url, timeout_s=LIMIT_S)
        async with Client(target) as client:
            run = Run(client, [call(target, n) for n in range(requests)], LoadOptions(clients=1, retries=retries))
            await asyncio.wait_for(run.send_load(), 20)
            return run.outcomes


def test_every_fault_that_the_server_knows_is_tried_here() -> None:
    """None is left out by mistake."""
    assert {*SAID, *HARMLESS} == {*FAULTS}


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.sample(3)
def test_a_fault_is_a_failed_request_with_a_sentence(fault: str) -> None:
    """By its kind, in bounded memory, and long before the 20 s after which `answered` gives up."""
    (outcome,) = asyncio.run(answered(Script(ttft_ms=2, gap_ms=1, fault=fault)))
    kind, sentence = SAID[fault]
    assert outcome.ended
    assert outcome.error is not None
    assert outcome.error.kind == kind
    assert sentence in outcome.error.sentence
    assert "\n" not in outcome.error.sentence


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_only_unusual_is_read(fault: str) -> None:
    """Other line ends, single bytes, answers that say nothing of tokens, and a head before the head."""
    (outcome,) = asyncio.run(answered(Script(ttft_ms=2, gap_ms=1, fault=fault)))
    assert outcome.error is None
    assert outcome.answer is not None
    assert sum(outcome.answer.list_chunk_tokens()) == 10


def test_requests_after_a_bad_one_are_answered() -> None:
    """Every second one breaks off; its connection is not used again."""
    found = asyncio.run(answered(Script(fault="close-mid", fault_every=2), requests=6))
    assert [outcome.error is None for outcome in found].count(True) == 3


def test_a_busy_server_is_asked_again_only_where_that_is_wanted_and_it_is_counted() -> None:
    """Each time of the request is in its latency."""
    (refused,) = asyncio.run(answered(Script(fault="429-once")))
    assert refused.error is not None
    assert refused.retries == 0
    (again,) = asyncio.run(answered(Script(fault="429-once"), retries=2))
    assert again.error is None
    assert again.retries == 1


def test_nobody_listens() -> None:
    """At a port that was free a moment ago."""

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


def test_tls_where_there_is_none_is_a_sentence() -> None:
    """https to a server of http."""

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
    ("url", "said"),
    [
        ("ftp://x", "is no address of a server"),
        ("http://", "is no address of a server"),
        ("http://x:99999", "Port out of range"),
        ("http://me:secret@x", "put an API key in an environment variable"),
        ("http://x/v1?key=1", "leave out what follows ?"),
    ],
)
def test_an_address_that_is_none_is_refused(url: str, said: str) -> None:
    """Before anything is sent, and without repeating a password."""
    with pytest.raises(UsageError) as error:
        Target.from_url(url)
    assert said in str(error.value)
    assert "secret" not in str(error.value)


def test_a_host_that_is_not_known_says_what_an_address_looks_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word alone is taken for a host, as people leave http:// out."""

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
def test_addresses_as_people_type_them(url: str, wanted: str) -> None:
    """With or without scheme, port, and /v1."""
    assert Target.from_url(url).url == wanted


def test_a_key_typed_as_the_name_of_its_variable_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be recorded with the command. The usual variable may be unset: many servers take no key."""
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert (load_api_key("MY_KEY"), load_api_key("OPENAI_API_KEY")) == ("secret", "")
    with pytest.raises(UsageError, match="the name of an environment variable") as caught:
        load_api_key("sk_typed_by_mistake")
    assert "typed" not in str(caught.value)
