"""Test the requests that are sent before and during a load, with a server in this process that needs no socket."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import msgspec
import numpy as np
import pytest

from dcpbench.errors import WorkerError
from dcpbench.points.settings import Settings
from dcpbench.records.record import StartPhase
from dcpbench.servers import ask, client_pool, info, load, measure, server_sweep, sessions
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import Client, RequestError, Target
from dcpbench.servers.events import read_completion
from dcpbench.servers.load import Call, Outcome
from dcpbench.servers.presets import PRESETS
from dcpbench.servers.prompt_format import (
    ANSWER_IDS,
    EXTRAS,
    USAGE_IN_EACH,
    WORDS,
    PromptFormat,
    Words,
    find_prompt_format,
)
from dcpbench.serving.requests import ServeRequest
from tests.servers.test_answers import read_stream
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.launch.jobs import Progress
    from dcpbench.records.record import Record

    Answers = Callable[[str, dict[str, Any]], tuple[int, object]]


class Answering(Client):
    """Client of a server that answers a path and a body with a status and JSON; a list is streamed."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(Target.from_url("http://127.0.0.1:9"))
        self.answers, self.requests = answers, list[tuple[str, dict[str, Any]]]()

    async def send_request(self, request: bytes, reply: Any, _: float | None = None) -> None:
        """Answer a request as `Client.send_request` does."""
        head, _, body = request.partition(b"\r\n\r\n")
        path, fields = head.split()[1].decode(), json.loads(body)
        self.requests.append((path, fields))
        status, answer = self.answers(path, fields)
        kind = b"text/event-stream" if isinstance(answer, list) else b"application/json"
        reply.receive_head(status, {b"content-type": kind})
        for piece in answer if isinstance(answer, list) else ():
            reply.receive_body(b"data: " + json.dumps(piece).encode() + b"\n\n", 1.0)
        reply.receive_body(b"data: [DONE]\n\n" if isinstance(answer, list) else json.dumps(answer).encode(), 1.0)
        reply.receive_end()
        if status != 200 and isinstance(answer, list):
            raise RequestError("bad stream", "no.")


def count_words(body: dict[str, Any]) -> int:
    """Return the number of words of a text prompt, or of a chat's last message."""
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    return len(str(text).split())


def make_text_server(per_word: float, extra: int) -> Answers:
    """Return the answers of a server that takes text only and counts `per_word` tokens per word plus `extra` tokens."""

    def answers(_: str, body: dict[str, Any]) -> tuple[int, object]:
        prompt = body.get("prompt", "")
        if isinstance(prompt, list) or "return_token_ids" in body:
            return 400, {"error": {"message": "not so."}}
        if body["stream"]:
            return 200, [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        return 200, {"choices": [], "usage": {"prompt_tokens": round(per_word * count_words(body)) + extra}}

    return answers


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_tokens_per_word_are_fitted_for_text_only_server(endpoint: str) -> None:
    """40 and 240 words have 53 and 303 tokens, which is 1.25 per word plus 3; the server refuses `return_token_ids`."""
    client = Answering(make_text_server(1.25, 3))
    found = asyncio.run(find_prompt_format(client, "m", endpoint))  # type: ignore[arg-type]
    assert (found.text, found.prompts, found.vocab) == (Words(1.25, 3.0), "text, counted by the server", 1 << 20)
    assert (found.extras, found.id_extras) == (USAGE_IN_EACH, None)
    tried = client.requests[-3:]
    assert [count_words(body) for _, body in tried[1:]] == [40, 240]
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    assert {path for path, _ in client.requests} == {path}
    fields = tried[1][1]
    assert (fields["stream"], fields["max_tokens"], fields["ignore_eos"], "stream_options" in fields) == (
        False,
        1,
        True,
        False,
    )
    ids = [body["prompt"] for _, body in client.requests if isinstance(body.get("prompt"), list)]
    expected = [[*range(1, 8), 31_999], [*range(1, 8), 999], [*range(1, 8), 99]] if endpoint == "completions" else []
    assert [ids[i] for i in range(0, len(ids), len(EXTRAS))] == expected


def test_server_with_constant_prompt_count_is_refused() -> None:
    """The server counts 9 tokens for every prompt, so the number of words for a prompt length cannot be computed."""
    with pytest.raises(
        WorkerError, match=r"counts 9 tokens in a prompt of 40 words and 9 in one of 240, so its counts"
    ):
        asyncio.run(find_prompt_format(Answering(make_text_server(0.0, 9)), "m", "completions", text=True))  # type: ignore[arg-type]


def vllm(_: str, body: dict[str, Any]) -> tuple[int, object]:
    """Answer like a server that sends usage in each chunk and token ids of answers on request."""
    events: list[dict[str, Any]] = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b", "finish_reason": "length"}]},
    ]
    for number, each in enumerate(events):
        if body.get("stream_options", {}).get("continuous_usage_stats"):
            each["usage"] = {"completion_tokens": number + 1}
        if body.get("return_token_ids"):
            each["choices"][0]["token_ids"] = [number]
    return 200, events


@pytest.mark.parametrize(
    ("lacks", "extras", "id_extras"),
    [
        ((), USAGE_IN_EACH, ANSWER_IDS),
        (("return_token_ids",), USAGE_IN_EACH, None),
        (("continuous_usage_stats",), ANSWER_IDS, ANSWER_IDS),
        (("return_token_ids", "continuous_usage_stats"), USAGE_IN_EACH, None),
    ],
)
def test_answer_ids_are_requested_only_without_usage_per_chunk(
    lacks: tuple[str, ...], extras: dict[str, Any], id_extras: dict[str, Any] | None
) -> None:
    """Servers that send answer ids also repeat the prompt's ids before the first token.

    Sessions request the ids in any case. The server ignores fields that it lacks.
    """

    def answers(path: str, body: dict[str, Any]) -> tuple[int, object]:
        known = {name: value for name, value in body.items() if name not in lacks}
        known["stream_options"] = {n: v for n, v in body.get("stream_options", {}).items() if n not in lacks}
        return vllm(path, known)

    found = asyncio.run(find_prompt_format(Answering(answers), "m", "completions"))  # type: ignore[arg-type]
    assert (found.extras, found.id_extras, found.vocab, found.text) == (extras, id_extras, 32_000, None)
    bodies = json.loads(found.encode_body(np.arange(3), 2)), json.loads(found.encode_body(np.arange(3), 2, ids=True))
    assert ["return_token_ids" in body for body in bodies] == [extras is ANSWER_IDS, id_extras is not None]


def test_answer_ids_are_requested_for_turns_with_a_next_turn() -> None:
    """The first two of three turns request ids; a request without a session does not."""
    prompt_format = PromptFormat(
        endpoint="completions", model="m", extras={}, vocab=9, id_extras={"return_token_ids": True}
    )
    turn = [
        ServeRequest(
            number=n,
            prompt=np.arange(4 * (n + 1)),
            output_tokens=2,
            session=0,
            turn=n,
            parent=n - 1 if n else None,
            answer=np.arange(2),
        )
        for n in range(3)
    ]
    target = Target.from_url("http://127.0.0.1:9")
    (call,) = sessions.make_calls(target, prompt_format, turn)
    answer: Any = SimpleNamespace(tokens=[7, 8], list_chunk_tokens=lambda: [1, 1])
    sent = [call]
    while sent[-1].session is not None:
        sent += sent[-1].session.make_next_calls({len(sent) - 1: answer})
    assert [b"return_token_ids" in call.data for call in sent] == [True, True, False]
    assert [call.prompt_tokens for call in sent] == [4, 8, 12]
    alone = ServeRequest(number=0, prompt=np.arange(4), output_tokens=2)
    assert b"return_token_ids" not in sessions.make_calls(target, prompt_format, [alone])[0].data


@pytest.mark.parametrize("status", [400, 415, 422, 500, 502])
def test_field_that_causes_an_error_is_left_out(status: int) -> None:
    """Servers refuse unknown fields with several statuses, and some fail with an internal error."""

    def answers(_: str, body: dict[str, Any]) -> tuple[int, object]:
        if {"ignore_eos", "return_token_ids"} & {*body}:
            return status, {"error": "no"}
        return 200, [{"choices": [{"text": "a", "finish_reason": "length"}]}]

    found = asyncio.run(find_prompt_format(Answering(answers), "m", "completions"))  # type: ignore[arg-type]
    assert found.extras == EXTRAS[3]


@pytest.mark.parametrize(
    ("endpoint", "status", "message"),
    [
        (
            "completions",
            404,
            (
                "does not answer /v1/completions (the server answered HTTP 404: no), but it answers /v1/chat/completions; "
                "add --endpoint chat."
            ),
        ),
        (
            "chat",
            405,
            (
                "does not answer /v1/chat/completions (the server answered HTTP 405: no), but it answers /v1/completions; "
                "add --endpoint completions."
            ),
        ),
        (
            "completions",
            400,
            (
                "does not answer /v1/completions (the server answered HTTP 400: no), but it answers /v1/chat/completions; "
                "add --endpoint chat."
            ),
        ),
    ],
)
def test_error_names_the_endpoint_that_the_server_answers(endpoint: str, status: int, message: str) -> None:
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    found = [{"choices": [{"text": "a", "delta": {"content": "a"}, "finish_reason": "length"}]}]
    client = Answering(lambda requested_path, _: (status, {"error": "no"}) if requested_path == path else (200, found))
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "m", endpoint))  # type: ignore[arg-type]
    assert str(error.value) == f"http://127.0.0.1:9 {message}"
    if status != 400:
        assert len(client.requests) == 2, "no fields are tried without an endpoint"


@pytest.mark.parametrize(
    ("retries", "status", "message"),
    [
        (0, 503, "HTTP 503: no. Wait until it is ready, or add --client retries=5."),
        (2, 503, "HTTP 503: no. Wait until it is ready, or raise --client retries."),
        (0, 401, "HTTP 401: no. Put its API key into the environment variable that --api-key-env names"),
        (0, 404, "cannot be measured: the server answered HTTP 404: no."),
    ],
)
def test_server_that_refuses_all_requests_raises_error_with_a_suggestion(
    retries: int, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = patch_sleep(monkeypatch, [0.0], 9)
    client = Answering(lambda *_: (status, {"error": "no"}))
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "m", "completions", retries=retries))  # type: ignore[arg-type]
    assert message in str(error.value)
    assert len(slept) == retries
    assert len(client.requests) == 1 + retries + (status == 404)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_trial_requests_are_retried(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers each trial request with 503 once."""
    slept = patch_sleep(monkeypatch, [0.0], 99)
    seen: set[str] = set()

    def answers(path: str, body: dict[str, Any]) -> tuple[int, object]:
        if (text := json.dumps(body)) not in seen:
            seen.add(text)
            return 503, {"error": "loading"}
        return make_text_server(1.0, 0)(path, body)

    found = asyncio.run(find_prompt_format(Answering(answers), "m", endpoint, retries=1))  # type: ignore[arg-type]
    assert found.text == Words(1.0, 0.0)
    assert slept == [load.RETRY_S] * len(seen)


def test_trials_end_at_the_request_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to refuse is not tried with every set of fields."""
    clock = [0.0]

    def answers(*_: object) -> tuple[int, object]:
        clock[0] += 250.0
        return 400, {"error": "no"}

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    client = Answering(answers)
    with pytest.raises(WorkerError, match=r"HTTP 400: no\."):
        asyncio.run(find_prompt_format(client, "m", "chat"))  # type: ignore[arg-type]
    assert len(client.requests) == 3 + 1, "600 s have passed after the third; then the other endpoint is tried"


def test_implausible_prompt_count_ends_the_trials() -> None:
    def answers(_: str, body: dict[str, Any]) -> tuple[int, object]:
        if body["stream"]:
            return 200, [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        return 200, {"usage": {"prompt_tokens": 10**12}}

    with pytest.raises(
        WorkerError, match=r"usage.prompt_tokens is 1,000,000,000,000, which is not between 0 and 32,848"
    ):
        asyncio.run(find_prompt_format(Answering(answers), "m", "chat"))  # type: ignore[arg-type]


def test_server_without_prompt_count_cannot_be_measured() -> None:
    uncounted = Answering(
        lambda _, body: (200, [{"choices": [{"text": "a", "finish_reason": "x"}]}] if body["stream"] else {})
    )
    with pytest.raises(WorkerError, match=r"does not say how many tokens a prompt of text has; name the folder"):
        asyncio.run(find_prompt_format(uncounted, "m", "chat"))  # type: ignore[arg-type]


def test_request_body_fields_per_endpoint() -> None:
    """Completions have a prompt, chats have messages, and extra fields come last."""
    ids = np.array([5, 6])
    prompt_format = PromptFormat(endpoint="completions", model="m", extras={"ignore_eos": True}, vocab=9)
    usual = {"model": "m", "max_tokens": 7, "temperature": 0, "stream": True, "ignore_eos": True}
    assert json.loads(prompt_format.encode_body(ids, 7)) == {**usual, "prompt": [5, 6]}
    assert json.loads(prompt_format.encode_body(ids, 7, stream=False, seed=1)) == {
        **usual,
        "prompt": [5, 6],
        "stream": False,
        "seed": 1,
    }
    text = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9, text=Words(1.0, 0.0))
    assert text.make_prompt(ids) == f"{WORDS[5]} {WORDS[6]}"
    chat = PromptFormat(endpoint="chat", model="m", extras={}, vocab=9, text=Words(1.0, 0.0))
    message = {"role": "user", "content": f"{WORDS[5]} {WORDS[6]}"}
    assert json.loads(chat.encode_body(ids, 7))["messages"] == [message]
    answer = StreamReply(2, keep=True)
    answer.texts = ["x", "y"]
    assert text.make_next_prompt("a", answer, None, ids) == f"axy {WORDS[5]} {WORDS[6]}"
    assert chat.make_next_prompt([message], answer, None, ids) == [
        message,
        {"role": "assistant", "content": "xy"},
        message,
    ]


@pytest.mark.parametrize(
    ("server_ids", "generated", "expected"),
    [([7, 8], [1, 2], [7, 8]), ([7], [1, 2], [1, 2]), ([], [1, 2], [1, 2]), ([7], None, [7])],
    ids=["all ids", "some ids", "no ids", "no generated answer"],
)
def test_next_prompt_uses_the_server_token_ids_if_all_are_known(
    server_ids: list[int], generated: list[int] | None, expected: list[int]
) -> None:
    """The answer has two tokens, one in each of two chunks."""
    answer: Any = SimpleNamespace(tokens=server_ids, list_chunk_tokens=lambda: [1, 1])
    prompt_format = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    fallback = None if generated is None else np.array(generated)
    assert prompt_format.make_next_prompt([3], answer, fallback, np.array([4])) == [3, *expected, 4]


@pytest.mark.parametrize(
    ("choice", "tokens", "logprobs", "tops"),
    [
        ({"text": "a  b"}, ["a", "b"], [], []),
        ({"text": "a b", "token_ids": [4, 5]}, ["4", "5"], [], []),
        (
            {
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [-1.0, None],
                    "top_logprobs": [{"a": -1, "b": -4}, None],
                }
            },
            ["a", "b"],
            [],
            [],
        ),
        (
            {"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"b": -4, "a": -1}]}},
            ["a", "b"],
            [-1.0, -2.0],
            [],
        ),
        (
            {"logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": None}]}, "token_ids": [9]},
            ["9"],
            [-1.0],
            [{}],
        ),
    ],
)
def test_parse_answer_reads_tokens_and_log_probabilities(
    choice: dict[str, Any], tokens: list[str], logprobs: list[float], tops: list[dict[str, float]]
) -> None:
    (read,) = read_completion(json.dumps({"choices": [choice]}).encode()).choices or []
    found = ask.parse_answer(read)
    assert (found.tokens, found.logprobs, found.tops) == (tokens, logprobs, tops)


def test_warm_up_requests_have_new_tokens_and_at_most_16_output_tokens() -> None:
    """Prompt lengths and request numbers are those of the load."""
    prompt_format = PromptFormat(endpoint="completions", model="fake", extras={}, vocab=50)
    requests = [
        ServeRequest(number=n, prompt=np.zeros(20, np.int32), output_tokens=tokens) for n, tokens in ((4, 16), (7, 17))
    ]
    calls = measure._make_short_calls(Target.from_url("http://127.0.0.1:9"), prompt_format, requests)
    assert [(c.number, c.output_tokens) for c in calls] == [(4, 16), (7, 16)]
    for call in calls:
        body = json.loads(call.data.partition(b"\r\n\r\n")[2])
        assert (len(body["prompt"]), body["max_tokens"]) == (20, 16)
        assert any(body["prompt"])
        assert all(0 <= token < 50 for token in body["prompt"])


def test_tokens_of_a_load_are_shifted_and_keep_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids, also those of generated answers, are shifted by 7 modulo 1,000."""
    point = serve_record_builder.make_point(
        changed={"requests": 4, "turns": "2", "turn_tokens": "5", "prefix_share": 0.5, "prefix_groups": 1}
    )
    monkeypatch.setattr(measure.secrets, "randbelow", lambda vocab: {1000: 7}[vocab])
    plain = measure.make_point_requests(point, Settings(), 1000)
    moved = measure._make_requests(point, Settings(), 1000)
    for one, other in zip(plain, moved, strict=True):
        assert ((one.prompt + 7) % 1000).tolist() == other.prompt.tolist()
        assert (one.answer is None) == (other.answer is None)
        if one.answer is not None and other.answer is not None:
            assert ((one.answer + 7) % 1000).tolist() == other.answer.tolist()


def test_token_ids_of_a_trace_file_are_sent_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest id, 2,000, exceeds the vocabulary of 1,000 that the server accepted, so 2,001 is used."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": [1, 2, 2_000], "output_tokens": 3}) + "\n")
    counts: list[int] = []
    monkeypatch.setattr(measure, "make_point_requests", lambda *given: counts.append(given[-1]) or ["as it is"])
    settings = Settings(trace_path=str(trace))
    assert measure._make_requests(serve_record_builder.make_point(), settings, 1000) == ["as it is"]
    assert measure._make_requests(serve_record_builder.make_point(), settings, 5000) == ["as it is"]
    assert counts == [2001, 5000]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((1.0, None), (4.0, 5.0), (3, 5)),
        ((1.0, 2.0), (4.0, None), (3, None)),
        ((1.0, 2.0), (1.0, 2.6), (0, 1)),
        ((4.0, 5.0), (1.0, None), (None, None)),
    ],
)
def test_compute_increase_subtracts_server_counters(
    before: tuple[float | None, ...], after: tuple[float | None, ...], expected: tuple[int | None, ...]
) -> None:
    """The increase is unknown if the server restarted, so that a counter fell, or did not report the counter.

    SGLang reports a counter once it has been increased.
    """
    then, now = (info.Counters(preemptions=p, cached_tokens=c) for p, c in (before, after))
    assert tuple(now.compute_increase(then).values()) == expected
    assert now.compute_increase(info.Counters(answered=False)) == {"preemptions": None, "cached_tokens": None}


def test_read_metrics_parses_prometheus_lines() -> None:
    """Invalid values are skipped, values of several engines are summed, and the first present name counts."""
    text = '# HELP a\na{x="1",y="b c"} 2.5\na 3\na +Inf\na NaN\nb NaNs\nc\n#a 7\n  d 1\ne{} 1e3 1700000000\nf 1\n'
    found = info.read_metrics(text, ("a", "b", "e"))
    assert found["a"] == [({"x": "1", "y": "b c"}, 2.5), ({}, 3.0)]
    assert found["b"] == []
    assert "c" not in found
    assert found["f"] == [], "only the name of an unused metric is kept"
    assert info._sum_values(found, ("z", "a", "e")) == 5.5
    assert info._sum_values(found, ("z",)) is None


SERVED = serve_record_builder.make_served_record(serve_record_builder.make_point())


def test_one_server_per_layout_and_one_record_per_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three servers does not start, one dies after its first point, and one measures all its points."""
    events: list[tuple[str, str]] = []
    started: list[list[str]] = []

    class Server:
        def __init__(self, words: list[str], log: Path, env: dict[str, str], port: int, ready: str) -> None:
            started.append(words)
            self.words = words
            self.layout, self.exit_reason = words[words.index("--tensor-parallel-size") + 1], ""
            assert (log.parent.name, env, port, ready) == ("servers", {}, 77, "/health")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        read_log = staticmethod(lambda: "")

        def wait_until_ready(self, limit_s: float, report: Callable[[str], None]) -> list[StartPhase]:
            report(f"starting, {limit_s:g} s at most")
            if self.layout == "8":
                raise WorkerError("no memory.")
            servers.append(self)
            return [StartPhase(name="starting", seconds=2.3)]

        def find_cause(self, error: str) -> str:
            return f" ({error[:2]})"

    servers: list[Server] = []

    def measured(point: Any, server: measure.MeasuredServer, _: object) -> tuple[object, None]:
        assert [(phase.name, phase.seconds) for phase in server.config.start] == [("starting", 2.3)]
        record = msgspec.structs.replace(SERVED, point=point)
        if servers[-1].layout == "2":
            servers[-1].exit_reason = "killed"
            record = msgspec.structs.replace(record, outcome="failed", reason="closed", serve=None)
        return record, None

    monkeypatch.setattr(server_sweep, "Server", Server)
    monkeypatch.setattr(server_sweep, "find_free_port", lambda: 77)
    monkeypatch.setattr(server_sweep, "fetch_server_info", lambda *_: info.ServerInfo(models=(info.Card("m"),)))
    monkeypatch.setattr(server_sweep, "resolve_prompt_format", lambda *_: None)

    def watch(event: Progress) -> None:
        events.append((event.stage, f"{event.index + 1} of {event.of}: {event.note}"))

    layouts = (record_builder.Layout(2), record_builder.Layout(4), record_builder.Layout(8))
    points = [
        serve_record_builder.make_point(layout, n, settings="a=1, b=x=y", weights="unknown")
        for n in (8, 16)
        for layout in layouts
    ]
    config = measure.ClientConfig(target=Target.from_url("http://127.0.0.1:9", key="k", timeout_s=5.0), device="H200")
    sweep = server_sweep.ServerSweep(
        engine=PRESETS["vllm"],
        model="m",
        config=config,
        settings=Settings(),
        folder=tmp_path,
        limit_s=9.0,
        measure_point=measured,  # type: ignore[arg-type]
    )
    sweep.measure(points, watch)
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    failed = tmp_path / "failed.jsonl"
    rows += [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else []
    results = {(row["point"]["tp"], row["point"]["concurrency"]): (row["outcome"], row.get("reason")) for row in rows}
    assert len(started) == 3
    assert results[4, 8] == results[4, 16] == ("ok", None)
    assert results[2, 8] == ("failed", "the server died: killed")
    assert (results[2, 16][1], results[8, 8][1]) == ("the server died: killed", "no memory (no)")
    advice = {(row["point"]["tp"], row["point"]["concurrency"]): row.get("advice") for row in rows}
    assert advice[2, 16].startswith("Read servers/vllm-tp2")
    assert advice[8, 8].startswith("Read servers/vllm-tp8")
    stages = [stage for stage, _ in events]
    assert stages == ["build", "failed", "failed", "build", "done", "done", "build", "failed", "failed"]
    assert events[1][1].startswith("1 of 6: the server died: killed")


@pytest.mark.parametrize(
    ("settings", "flags"), [("", {}), ("a=1", {"a": "1"}), ("a=1, b=x=y", {"a": "1", "b": "x=y"}), ("a", {"a": ""})]
)
def test_find_settings_returns_the_varied_flags_of_a_point(settings: str, flags: dict[str, str]) -> None:
    assert PRESETS["vllm"].find_settings(record_builder.make_point(settings=settings)) == flags


class Slept(Exception):  # noqa: N818 - no error
    """End a loop that would sleep forever."""


def patch_sleep(monkeypatch: pytest.MonkeyPatch, clock: list[float], times: int, late_s: float = 0.0) -> list[float]:
    """Record sleep durations on a clock that only sleeping advances; raise Slept after `times` sleeps."""
    slept = list[float]()

    async def sleep(left_s: float) -> None:
        if len(slept) == times:
            raise Slept
        slept.append(round(left_s, 9))
        clock[0] += left_s + late_s

    monkeypatch.setattr("asyncio.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    return slept


def test_load_progress_is_reported_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = patch_sleep(monkeypatch, clock := [10.0], 3)
    states = iter([load.LoadProgress(0, 0, 0), load.LoadProgress(5, 2, 1000), load.LoadProgress(8, 0, 5000)])
    run = SimpleNamespace(get_progress=lambda: next(states), start_s=10.0, requests=8)
    lines = list[str]()
    with pytest.raises(Slept):
        asyncio.run(measure._report_progress(run, lines.append))  # type: ignore[arg-type]
    assert slept == [measure.PROGRESS_INTERVAL_S] * 3
    assert clock == [10.0 + 3 * measure.PROGRESS_INTERVAL_S]
    rates = [f"{chunks / (n * measure.PROGRESS_INTERVAL_S):,.0f}" for n, chunks in enumerate((0, 1000, 5000), 1)]
    assert lines == [
        f"0/8 requests, {rates[0]} chunks/s",
        f"3/8 requests, 2 failed, {rates[1]} chunks/s",
        f"8/8 requests, {rates[2]} chunks/s",
    ]


def test_client_process_sends_its_progress_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = patch_sleep(monkeypatch, [0.0], 2)
    sent = list[object]()
    with pytest.raises(Slept):
        asyncio.run(
            client_pool._report_progress(
                SimpleNamespace(send=sent.append), SimpleNamespace(get_progress=lambda: "so far")
            )
        )  # type: ignore[arg-type]
    assert (slept, sent) == ([client_pool.PROGRESS_S] * 2, [(client_pool.PROGRESS, "so far")] * 2)


@pytest.mark.parametrize(
    ("late_s", "slept"),
    [
        (0.0, [1, 1, 1, 1]),
        (0.25, [1, 0.75, 0.75, 0.75]),
        (1.0, [1, 0, 0, 0]),
        (2.5, [1, 0, 0, 0]),
    ],
)
def test_event_loop_lag_is_sampled_per_interval_without_catching_up(
    monkeypatch: pytest.MonkeyPatch, late_s: float, slept: list[float]
) -> None:
    """Durations are in intervals; each sleep takes `late_s` intervals longer than requested, which is the measured lag."""
    found = patch_sleep(monkeypatch, [0.0], 4, late_s * load.LAG_INTERVAL_S)
    run = SimpleNamespace(pace=SimpleNamespace(lags_s=[]))
    with pytest.raises(Slept):
        asyncio.run(load.Run._measure_lag(run))  # type: ignore[arg-type]
    assert [s / load.LAG_INTERVAL_S for s in found] == pytest.approx(slept, abs=1e-6)
    lags = [s / load.LAG_INTERVAL_S for s in run.pace.lags_s]
    assert lags == pytest.approx([late_s] * 4)


@pytest.mark.parametrize(
    ("device", "warnings"),
    [("CPU", ["cpu"]), ("cpu", []), ("NVIDIA H100 80GB HBM3", []), ("unknown", []), ("cpu2", [])],
)
def test_record_of_a_cpu_server_has_a_warning(tmp_path: Path, device: str, warnings: list[str]) -> None:
    """A record without any request also states the reason and the known facts about the server."""
    point = serve_record_builder.make_point()
    config = SimpleNamespace(device=device, device_count=4, command="dcpbench server", gpus=None)
    sent = SimpleNamespace(run=None)
    for failed, stopped, reason in [
        ("no.", False, "no."),
        ("", True, "interrupted before any request was sent."),
        ("no.", True, "no."),
    ]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(measure, "_make_server", lambda *_: SERVED.server)
            server = measure.MeasuredServer(
                config=config,  # type: ignore[arg-type]
                info=SimpleNamespace(origin="vllm"),  # type: ignore[arg-type]
                prompt_format=PromptFormat(endpoint="completions", model="m", extras={}, vocab=9),
                settings=Settings(),
                folder=tmp_path,
            )
            record = measure._make_record(
                point,
                server,
                sent,  # type: ignore[arg-type]
                failed=failed,
                stopped=stopped,
            )
        assert (record.outcome, record.reason, record.warnings) == ("failed", reason, warnings)
        assert (record.origin, record.environment.device_count, record.metrics) == ("vllm", 4, None)


def make_load_record(
    folder: Path, limit_s: float | None, load: list[ServeRequest], run: SimpleNamespace, *, stopped: bool = False
) -> Record:
    """Return the record of a load that a server without a process was sent."""
    server = measure.MeasuredServer(
        config=measure.ClientConfig(target=Target.from_url("http://127.0.0.1:9")),
        info=info.ServerInfo(),
        prompt_format=PromptFormat(endpoint="completions", model="m", extras={}, vocab=9),
        settings=Settings(limit_seconds=limit_s),
        folder=folder,
    )
    state = measure._LoadState(load, run=run)  # type: ignore[arg-type]
    return measure._make_record(serve_record_builder.make_point(), server, state, failed="", stopped=stopped)


@pytest.mark.parametrize(
    ("stopped", "limit_s", "reason"),
    [
        (True, None, "a signal ended the run before the first token. Serve the load again with --resume."),
        (True, 9.0, "a signal ended the run before the first token. Serve the load again with --resume."),
        (False, 9.0, "cut off by --timeout load=9; use a longer one."),
        (
            False,
            None,
            "though neither --timeout nor a signal ended the run; read the log of the server or of the run.",
        ),
    ],
)
def test_run_without_tokens_states_why_it_ended(
    tmp_path: Path, stopped: bool, limit_s: float | None, reason: str
) -> None:
    """A signal before the first token is no reason to suggest a longer time limit."""
    request = ServeRequest(number=0, prompt=np.zeros(4, np.int32), output_tokens=4, arrival_s=None)
    run = SimpleNamespace(outcomes=[Outcome(Call(0, b"", 4), 1.0)], start_s=1.0, paces=[])
    record = make_load_record(tmp_path, limit_s, [request], run, stopped=stopped)
    assert record.outcome == "failed"
    assert (record.reason or "").endswith(reason)


@pytest.mark.parametrize(("limit_s", "requests", "cut"), [(9.0, 2, True), (9.0, 1, False), (None, 2, False)])
def test_load_is_cut_off_if_its_limit_left_requests_unsent(
    tmp_path: Path, limit_s: float | None, requests: int, cut: bool
) -> None:
    """One request was sent, and answered."""
    load = [
        ServeRequest(number=n, prompt=np.zeros(4, np.int32), output_tokens=1, arrival_s=None) for n in range(requests)
    ]
    answer = read_stream({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}, requested=1)
    run = SimpleNamespace(outcomes=[Outcome(Call(0, b"", 1), -1.0, answer=answer, ended=True)], start_s=-1.0, paces=[])
    record = make_load_record(tmp_path, limit_s, load, run)
    assert (record.outcome, "cut_off" in record.warnings) == ("ok", cut)


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [("completions", {"logprobs": 20}), ("chat", {"logprobs": True, "top_logprobs": 20})],
)
def test_fewer_log_probabilities_are_requested_until_the_server_accepts(endpoint: str, wanted: dict[str, Any]) -> None:
    """20, 5, 2 and then none are requested; the accepted number is kept, and other errors are raised."""
    error = {"message": "logprobs is unknown"}
    choice = {"index": 0, "text": "a b", "message": {"content": "a b"}}
    client = Answering(lambda _, body: (400, error) if "logprobs" in body else (200, {"choices": [choice]}))
    prompt_format = PromptFormat(
        endpoint=endpoint, model="m", extras={"ignore_eos": True}, vocab=9, text=Words(1.0, 0.0)
    )
    side = ask.Side(client, prompt_format)  # type: ignore[arg-type]
    for _ in range(2):
        assert asyncio.run(side.fetch_answer(np.arange(3, dtype=np.int32), 2)) == ask.Answer(tokens=["a", "b"])
    bodies = [body for _, body in client.requests]
    name = "logprobs" if endpoint == "completions" else "top_logprobs"
    tried = [{key: body[key] for key in wanted if key in body} for body in bodies]
    assert tried == [wanted, wanted | {name: 5}, wanted | {name: 2}, {}, {}]
    for body in bodies:
        assert (body["stream"], body["seed"], "stream_options" in body, body["ignore_eos"]) == (False, 0, False, True)
    client = Answering(lambda *_: (200, {"choices": []}))
    with pytest.raises(WorkerError, match=r"^http://127\.0\.0\.1:9: its answer holds no choice\.$"):
        asyncio.run(ask.Side(client, prompt_format).fetch_answer(np.arange(3, dtype=np.int32), 2))  # type: ignore[arg-type]


WHOLE_ANSWER = {"index": 0, "text": "a b", "finish_reason": "length"}


@pytest.mark.parametrize(
    ("changed", "usage", "message"),
    [
        ({"finish_reason": "abort"}, {}, "the server broke off with an error: finish_reason abort"),
        ({"token_ids": [1] * 1005}, {}, "sent more than 1,004 chunks or token ids for 2 tokens"),
        ({}, {"completion_tokens": 10**7}, "usage.completion_tokens is 10,000,000"),
        ({}, {"prompt_tokens": -1}, "usage.prompt_tokens is -1"),
        ({"logprobs": {"tokens": 5}}, {}, "an event is not a completion (Expected `array | null`, got `int`"),
        ({"logprobs": {"content": [{"token": "a"}]}}, {}, "Object missing required field `logprob`"),
        (
            {"logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{}]}]}},
            {},
            "missing required field",
        ),
        ({"logprobs": [[[]]]}, {}, "Expected `object | null`, got `array`"),
    ],
)
def test_whole_answer_that_contradicts_the_request_raises_worker_error(
    changed: dict[str, Any], usage: dict[str, Any], message: str
) -> None:
    client = Answering(lambda *_: (200, {"choices": [WHOLE_ANSWER | changed], "usage": usage}))
    prompt_format = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    with pytest.raises(WorkerError) as error:
        asyncio.run(ask.Side(client, prompt_format).fetch_answer(np.arange(3, dtype=np.int32), 2))  # type: ignore[arg-type]
    assert message in str(error.value)


def test_size_limit_of_a_whole_answer_depends_on_tokens_and_prompt() -> None:
    """The limit is 1 MiB plus 4 KiB per output token plus 12 bytes per prompt id."""

    class Kept(Answering):
        async def send_request(self, request: bytes, reply: Any, _: float | None = None) -> None:
            self.limit = reply._limit
            await super().send_request(request, reply)

    client = Kept(lambda *_: (200, {"choices": [WHOLE_ANSWER]}))
    prompt_format = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    asyncio.run(ask.Side(client, prompt_format).fetch_answer(np.zeros(1000, np.int32), 2))  # type: ignore[arg-type]
    assert client.limit == (1 << 20) + 2 * 4096 + 1000 * 12
