"""Test streams with quirks (quirks.py): measurements agree with what the server recorded about its streams."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from dcpbench.errors import WorkerError
from dcpbench.records import formulas
from dcpbench.servers import sessions
from dcpbench.servers.client import Client, RequestError, Target
from dcpbench.servers.load import LoadOptions, Run
from dcpbench.servers.prompt_format import find_prompt_format
from dcpbench.serving.requests import ServeRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.servers.load import Outcome

QUIRKS = Path(__file__).with_name("quirks.py")
REQUESTS, TOKENS = 9, 24
NEAR_MS, NEAR_ITL_MS, NEAR_SHARE = 80.0, 5.0, 0.25  # tolerances between server and client
ATTEMPTS = 8  # loads; other processes delay some of them, whereas a stream that is misread is wrong in each
BROKEN = {"rst": "closed", "drop": "closed", "abort": "aborted", "busy503": "HTTP 503", "midfin": "cut off"}
WHOLE = [
    "plain",
    "usage_zero",
    "usage_first0",
    "usage_final_total",
    "delta_usage",
    "hidden",
    "mtp",
    "mtp_text",
    "role_first",
    "empty_delta",
    "text_only",
    "strict500",
    "tgi500",
    "no_usage",
    "no_usage_noids",
    "split",
    "promptids",
]
CHATS = ("chatonly", "usage_zero", "delta_usage", "hidden", "reasoning", "tools", "content_parts", "delta_null")


class Measured(NamedTuple):
    """Hold the outcomes of a load and the server's records of it."""

    outcomes: list[Outcome]
    truth: list[dict[str, Any]]

    @property
    def tokens(self) -> int:
        """Return the tokens of finished answers."""
        return sum(sum(o.answer.list_chunk_tokens()) for o in self.outcomes if o.error is None and o.answer is not None)

    def medians(self) -> tuple[float, float, float]:
        """Return the client's TTFT, ITL and E2EL in ms."""
        found = []
        for outcome in self.outcomes:
            if outcome.error is None and outcome.answer is not None:
                token_s = formulas.compute_token_times(outcome.answer.chunk_s, outcome.answer.list_chunk_tokens())
                found.append(formulas.RequestTimes(outcome.submitted_s, token_s))
        gaps = np.concatenate([formulas.compute_itl_ms(times) for times in found])
        ttft, e2el = ([of(times) for times in found] for of in (formulas.compute_ttft_ms, formulas.compute_e2el_ms))
        return statistics.median(ttft), float(np.median(gaps)), statistics.median(e2el)

    def true_medians(self) -> tuple[float, float, float]:
        """Return the server's TTFT, ITL and E2EL in ms."""
        whole = [one for one in self.truth if one["ok"]]
        times = [
            formulas.RequestTimes(one["t0"], formulas.compute_token_times(one["sent"], one["tokens"])) for one in whole
        ]
        gaps = np.concatenate([formulas.compute_itl_ms(one) for one in times])
        ttft, e2el = ([of(one) for one in times] for of in (formulas.compute_ttft_ms, formulas.compute_e2el_ms))
        return statistics.median(ttft), float(np.median(gaps)), statistics.median(e2el)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a process with all quirks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(QUIRKS), str(port)]) as process:
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        process.kill()


def measure(
    url: str, *, endpoint: str = "completions", retries: int = 0, prompt_tokens: int = 50, clients: int = REQUESTS
) -> Measured:
    """Send a closed loop to one of the quirks."""

    async def main() -> Measured:
        async with Client(Target.from_url(url, timeout_s=20.0)) as client:
            await client.get("/_reset")
            manner = await find_prompt_format(client, "m", endpoint, retries=retries)
            requests = [
                ServeRequest(number=n, prompt=np.arange(prompt_tokens, dtype=np.int32) % 30_000, output_tokens=TOKENS)
                for n in range(REQUESTS)
            ]
            run = Run(
                client,
                sessions.make_calls(client.target, manner, requests),
                LoadOptions(clients=clients, retries=retries),
            )
            await asyncio.wait_for(run.send_load(), 60)
            truth = json.loads((await client.get("/_truth")).data)
            return Measured(run.outcomes, truth)

    return asyncio.run(main())


def check_load(url: str, endpoint: str = "completions") -> None:
    """Compare the client's tokens and medians with the server's; one of several loads must be close in its times."""
    near = (NEAR_MS, NEAR_ITL_MS, NEAR_MS)
    tried = []
    for _ in range(ATTEMPTS):
        found = measure(url, endpoint=endpoint)
        assert [o.error for o in found.outcomes] == [None] * REQUESTS
        assert found.tokens == REQUESTS * TOKENS
        pairs = list(zip(found.medians(), found.true_medians(), near, strict=True))
        if all(ours == pytest.approx(true, rel=NEAR_SHARE, abs=near_ms) for ours, true, near_ms in pairs):
            return
        tried.append(pairs)
    pytest.fail(f"TTFT, ITL and E2EL (client, server, tolerance in ms) of each load: {tried}")


@pytest.mark.parametrize("quirk", WHOLE)
@pytest.mark.sample(3)
def test_times_and_tokens_of_completions_agree_with_the_server(quirk: str, address: str) -> None:
    """9 requests of 24 tokens are measured with each way in which servers count tokens."""
    check_load(f"{address}/{quirk}")


@pytest.mark.parametrize("quirk", CHATS)
@pytest.mark.sample(3)
def test_times_and_tokens_of_chats_agree_with_the_server(quirk: str, address: str) -> None:
    check_load(f"{address}/{quirk}", endpoint="chat")


@pytest.mark.parametrize("quirk", BROKEN)
@pytest.mark.sample(2)
def test_request_broken_by_the_server_is_counted_once(quirk: str, address: str) -> None:
    """3 of 9 requests fail on kept connections, and the server gets no request twice."""
    found = measure(f"{address}/{quirk}", clients=3)
    assert [o.error.kind for o in found.outcomes if o.error is not None] == [BROKEN[quirk]] * 3
    assert len(found.truth) == REQUESTS
    assert found.tokens == 6 * TOKENS


def test_prompt_of_200000_tokens_is_measured(address: str) -> None:
    """A server that returns ids echoes those of the prompt, 1.3 MB in the event of the first token."""
    found = measure(f"{address}/promptids", prompt_tokens=200_000)
    assert [o.error for o in found.outcomes] == [None] * REQUESTS
    assert not any(one["body"].get("return_token_ids") for one in found.truth)
    assert found.tokens == REQUESTS * TOKENS


def test_server_that_is_still_loading_is_retried(address: str) -> None:
    """The server refuses its first two requests, which are the trial requests."""
    with pytest.raises(
        WorkerError, match=r"HTTP 503: model is loading\. Wait until it is ready, or add --client retries=5"
    ):
        measure(f"{address}/first503")
    assert measure(f"{address}/first503", retries=5).tokens == REQUESTS * TOKENS


@pytest.mark.parametrize(
    ("quirk", "message"),
    [
        ("chatonly", r"it answers /v1/chat/completions; add --endpoint chat\.$"),
        ("gzip", r"is compressed \(Content-Encoding: gzip\)"),
    ],
)
def test_server_that_cannot_be_measured_has_an_error_message(quirk: str, message: str, address: str) -> None:
    with pytest.raises(WorkerError, match=message):
        measure(f"{address}/{quirk}")


def test_usage_beyond_the_request_is_a_failed_request(address: str) -> None:
    """The server counts 48 tokens although 24 were requested."""
    found = measure(f"{address}/usage_wrong")
    errors = [o.error for o in found.outcomes]
    assert all(isinstance(error, RequestError) and error.bad is not None for error in errors)
    assert {(e.bad.field, e.bad.value, e.bad.requested) for e in errors if e and e.bad} == {
        ("completion_tokens", 48, 24)
    }
