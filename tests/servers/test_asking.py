"""What is sent to a server before and beside a load, by a server in this process that answers without a socket."""

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
from dcpbench.servers.client import RequestError, Target
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
from tests.unit import record_builder, serve_record_builder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dcpbench.launch.jobs import Progress

    Answers = Callable[[str, dict[str, Any]], tuple[int, object]]


class Answering:
    """A client of a server that answers a path and a body with a status and JSON; a list is streamed."""

    target = Target.from_url("http://127.0.0.1:9")

    def __init__(self, answers: Answers) -> None:
        self.answers, self.asked = answers, list[tuple[str, dict[str, Any]]]()

    async def send_request(self, request: bytes, reply: Any, _: float | None = None) -> None:
        """As Client's."""
        head, _, body = request.partition(b"\r\n\r\n")
        path, said = head.split()[1].decode(), json.loads(body)
        self.asked.append((path, said))
        status, answer = self.answers(path, said)
        kind = b"text/event-stream" if isinstance(answer, list) else b"application/json"
        reply.receive_head(status, {b"content-type": kind})
        for piece in answer if isinstance(answer, list) else ():
            reply.receive_body(b"data: " + json.dumps(piece).encode() + b"\n\n", 1.0)
        reply.receive_body(b"data: [DONE]\n\n" if isinstance(answer, list) else json.dumps(answer).encode(), 1.0)
        reply.receive_end()
        if status != 200 and isinstance(answer, list):
            raise RequestError("bad stream", "no.")


def words_of(said: dict[str, Any]) -> int:
    """Of a prompt of text, or of a chat's last message."""
    text = said["prompt"] if "prompt" in said else said["messages"][-1]["content"]
    return len(str(text).split())


def of_text(per_word: float, beside: int) -> Answers:
    """A server that takes text alone, and counts so many tokens of a word and beside."""

    def answers(_: str, said: dict[str, Any]) -> tuple[int, object]:
        prompt = said.get("prompt", "")
        if isinstance(prompt, list) or "return_token_ids" in said:
            return 400, {"error": {"message": "not so."}}
        if said["stream"]:
            return 200, [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        return 200, {"choices": [], "usage": {"prompt_tokens": round(per_word * words_of(said)) + beside}}

    return answers


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_server_that_takes_text_alone_is_asked_for_how_many_tokens_a_word_has(endpoint: str) -> None:
    """40 and 240 words are 53 and 303 tokens: 1.25 each, and 3 in all. It takes no field that asks for ids of tokens."""
    client = Answering(of_text(1.25, 3))
    found = asyncio.run(find_prompt_format(client, "m", endpoint))  # type: ignore[arg-type]
    assert (found.text, found.prompts, found.vocab) == (Words(1.25, 3.0), "text, counted by the server", 1 << 20)
    assert (found.extras, found.id_extras) == (USAGE_IN_EACH, None)
    tried = client.asked[-3:]
    assert [words_of(said) for _, said in tried[1:]] == [40, 240]
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    assert {path for path, _ in client.asked} == {path}
    asked = tried[1][1]
    assert (asked["stream"], asked["max_tokens"], asked["ignore_eos"], "stream_options" in asked) == (
        False,
        1,
        True,
        False,
    )
    ids = [said["prompt"] for _, said in client.asked if isinstance(said.get("prompt"), list)]
    expected = [[*range(1, 8), 31_999], [*range(1, 8), 999], [*range(1, 8), 99]] if endpoint == "completions" else []
    assert [ids[i] for i in range(0, len(ids), len(EXTRAS))] == expected


def test_a_server_whose_count_does_not_follow_the_prompt_is_refused() -> None:
    """It counts 9 tokens whatever it is sent, so no prompt could get its length."""
    with pytest.raises(
        WorkerError, match=r"counts 9 tokens in a prompt of 40 words and 9 in one of 240, so its counts"
    ):
        asyncio.run(find_prompt_format(Answering(of_text(0.0, 9)), "m", "completions", text=True))  # type: ignore[arg-type]


def vllm(_: str, body: dict[str, Any]) -> tuple[int, object]:
    """A server with usage in each chunk and ids of answers; with these it repeats the prompt."""
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
def test_ids_of_answers_are_asked_for_only_if_nothing_else_counts_each_chunk(
    lacks: tuple[str, ...], extras: dict[str, Any], id_extras: dict[str, Any] | None
) -> None:
    """Servers that send them repeat the prompt's, before the first token. Sessions ask for them all the same.

    Fields that a server lacks it ignores here.
    """

    def answers(path: str, body: dict[str, Any]) -> tuple[int, object]:
        known = {name: value for name, value in body.items() if name not in lacks}
        known["stream_options"] = {n: v for n, v in body.get("stream_options", {}).items() if n not in lacks}
        return vllm(path, known)

    found = asyncio.run(find_prompt_format(Answering(answers), "m", "completions"))  # type: ignore[arg-type]
    assert (found.extras, found.id_extras, found.vocab, found.text) == (extras, id_extras, 32_000, None)
    asked = json.loads(found.encode_body(np.arange(3), 2)), json.loads(found.encode_body(np.arange(3), 2, ids=True))
    assert ["return_token_ids" in body for body in asked] == [extras is ANSWER_IDS, id_extras is not None]


def test_a_turn_whose_answer_the_next_one_repeats_asks_for_its_ids() -> None:
    """Of three turns the first two; a request without a session does not."""
    of = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9, id_extras={"return_token_ids": True})
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
    (call,) = sessions.make_calls(target, of, turn)
    answer: Any = SimpleNamespace(tokens=[7, 8], list_chunk_tokens=lambda: [1, 1])
    sent = [call]
    while sent[-1].session is not None:
        sent.append(sent[-1].session.make_next_call(answer))
    assert [b"return_token_ids" in call.data for call in sent] == [True, True, False]
    assert [call.prompt_tokens for call in sent] == [4, 8, 12]
    alone = ServeRequest(number=0, prompt=np.arange(4), output_tokens=2)
    assert b"return_token_ids" not in sessions.make_calls(target, of, [alone])[0].data


@pytest.mark.parametrize("status", [400, 415, 422, 500, 502])
def test_a_field_that_a_server_answers_with_an_error_is_left_out(status: int) -> None:
    """Servers refuse unknown fields with several statuses, and some break down at them."""

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
def test_the_endpoint_that_a_server_has_is_named(endpoint: str, status: int, message: str) -> None:
    path = "/v1/completions" if endpoint == "completions" else "/v1/chat/completions"
    found = [{"choices": [{"text": "a", "delta": {"content": "a"}, "finish_reason": "length"}]}]
    client = Answering(lambda asked, _: (status, {"error": "no"}) if asked == path else (200, found))
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "m", endpoint))  # type: ignore[arg-type]
    assert str(error.value) == f"http://127.0.0.1:9 {message}"
    if status != 400:
        assert len(client.asked) == 2, "no fields are tried where there is no endpoint"


@pytest.mark.parametrize(
    ("retries", "status", "message"),
    [
        (0, 503, "HTTP 503: no. Wait until it is ready, or add --client retries=5."),
        (2, 503, "HTTP 503: no. Wait until it is ready, or raise --client retries."),
        (0, 401, "HTTP 401: no. Put its API key into the environment variable that --api-key-env names"),
        (0, 404, "cannot be measured: the server answered HTTP 404: no."),
    ],
)
def test_a_server_that_accepts_nothing_is_a_sentence_with_what_to_do(
    retries: int, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = sleeping(monkeypatch, [0.0], 9)
    client = Answering(lambda *_: (status, {"error": "no"}))
    with pytest.raises(WorkerError) as error:
        asyncio.run(find_prompt_format(client, "m", "completions", retries=retries))  # type: ignore[arg-type]
    assert message in str(error.value)
    assert len(slept) == retries
    assert len(client.asked) == 1 + retries + (status == 404)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_retries_are_for_the_short_requests_too(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is sent away once."""
    slept = sleeping(monkeypatch, [0.0], 99)
    seen: set[str] = set()

    def answers(path: str, body: dict[str, Any]) -> tuple[int, object]:
        if (text := json.dumps(body)) not in seen:
            seen.add(text)
            return 503, {"error": "loading"}
        return of_text(1.0, 0)(path, body)

    found = asyncio.run(find_prompt_format(Answering(answers), "m", endpoint, retries=1))  # type: ignore[arg-type]
    assert found.text == Words(1.0, 0.0)
    assert slept == [load.RETRY_S] * len(seen)


def test_trials_end_when_they_have_taken_as_long_as_a_request_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is slow to refuse is not asked for each set of fields."""
    clock = [0.0]

    def answers(*_: object) -> tuple[int, object]:
        clock[0] += 250.0
        return 400, {"error": "no"}

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    client = Answering(answers)
    with pytest.raises(WorkerError, match=r"HTTP 400: no\."):
        asyncio.run(find_prompt_format(client, "m", "chat"))  # type: ignore[arg-type]
    assert len(client.asked) == 3 + 1, "600 s are over with the third; then the other endpoint is tried"


def test_a_prompt_that_a_server_counts_as_more_than_was_sent_ends_the_trials() -> None:
    def answers(_: str, body: dict[str, Any]) -> tuple[int, object]:
        if body["stream"]:
            return 200, [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        return 200, {"usage": {"prompt_tokens": 10**12}}

    with pytest.raises(
        WorkerError, match=r"usage.prompt_tokens is 1,000,000,000,000, which is not between 0 and 32,848"
    ):
        asyncio.run(find_prompt_format(Answering(answers), "m", "chat"))  # type: ignore[arg-type]


def test_a_server_that_counts_no_prompt_cannot_be_measured() -> None:
    uncounted = Answering(
        lambda _, said: (200, [{"choices": [{"text": "a", "finish_reason": "x"}]}] if said["stream"] else {})
    )
    with pytest.raises(WorkerError, match=r"does not say how many tokens a prompt of text has; name the folder"):
        asyncio.run(find_prompt_format(uncounted, "m", "chat"))  # type: ignore[arg-type]


def test_a_request_has_these_fields() -> None:
    """Completions have a prompt, chats messages; what is said beside comes last."""
    ids = np.array([5, 6])
    of = PromptFormat(endpoint="completions", model="m", extras={"ignore_eos": True}, vocab=9)
    usual = {"model": "m", "max_tokens": 7, "temperature": 0, "stream": True, "ignore_eos": True}
    assert json.loads(of.encode_body(ids, 7)) == {**usual, "prompt": [5, 6]}
    assert json.loads(of.encode_body(ids, 7, stream=False, seed=1)) == {
        **usual,
        "prompt": [5, 6],
        "stream": False,
        "seed": 1,
    }
    text = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9, text=Words(1.0, 0.0))
    assert text.make_prompt(ids) == f"{WORDS[5]} {WORDS[6]}"
    chat = PromptFormat(endpoint="chat", model="m", extras={}, vocab=9, text=Words(1.0, 0.0))
    said = {"role": "user", "content": f"{WORDS[5]} {WORDS[6]}"}
    assert json.loads(chat.encode_body(ids, 7))["messages"] == [said]
    answer = StreamReply(2, keep=True)
    answer.texts = ["x", "y"]
    assert text.make_next_prompt("a", answer, None, ids) == f"axy {WORDS[5]} {WORDS[6]}"
    assert chat.make_next_prompt([said], answer, None, ids) == [said, {"role": "assistant", "content": "xy"}, said]


@pytest.mark.parametrize(
    ("told", "made_up", "goes_on"),
    [([7, 8], [1, 2], [7, 8]), ([7], [1, 2], [1, 2]), ([], [1, 2], [1, 2]), ([7], None, [7])],
    ids=["all ids", "some ids", "no ids", "nothing made up"],
)
def test_a_prompt_of_ids_goes_on_with_what_the_server_told_where_it_told_all(
    told: list[int], made_up: list[int] | None, goes_on: list[int]
) -> None:
    """Of two tokens that it answered."""
    answer: Any = SimpleNamespace(tokens=told, list_chunk_tokens=lambda: [1, 1])
    of = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    made = None if made_up is None else np.array(made_up)
    assert of.make_next_prompt([3], answer, made, np.array([4])) == [3, *goes_on, 4]


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
def test_an_answer_is_what_a_server_tells_of_its_tokens(
    choice: dict[str, Any], tokens: list[str], logprobs: list[float], tops: list[dict[str, float]]
) -> None:
    (read,) = read_completion(json.dumps({"choices": [choice]}).encode()).choices or []
    found = ask.parse_answer(read)
    assert (found.tokens, found.logprobs, found.tops) == (tokens, logprobs, tops)


def test_warm_up_has_other_tokens_and_short_answers() -> None:
    """As many of a prompt, of an answer 16 at most; under the numbers of the load."""
    asked: list[ServeRequest] = []

    def put(_: object, request: ServeRequest) -> bytes:
        asked.append(request)
        return b"x"

    manner: Any = SimpleNamespace(vocab=50, encode_request=put)
    requests = [
        ServeRequest(number=n, prompt=np.zeros(20, np.int32), output_tokens=tokens) for n, tokens in ((4, 16), (7, 17))
    ]
    calls = measure._make_short_calls(object(), manner, requests)  # type: ignore[arg-type]
    assert [(c.number, c.data, c.output_tokens) for c in calls] == [(4, b"x", 16), (7, b"x", 16)]
    assert [(len(r.prompt), r.output_tokens) for r in asked] == [(20, 16), (20, 16)]
    assert all(r.prompt.min() >= 0 and r.prompt.max() < 50 and r.prompt.any() for r in asked)


def test_a_load_is_sent_in_other_tokens_each_time_that_share_what_they_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids are moved by 7 of 1,000, also those of answers that are made up."""
    point = serve_record_builder.point(
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


def test_a_load_of_a_file_with_tokens_is_sent_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose largest id is beyond what the server was tried with."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"prompt": [1, 2, 2_000], "output_tokens": 3}) + "\n")
    asked: list[int] = []
    monkeypatch.setattr(measure, "make_point_requests", lambda *given: asked.append(given[-1]) or ["as it is"])
    settings = Settings(trace_path=str(trace))
    assert measure._make_requests(serve_record_builder.point(), settings, 1000) == ["as it is"]
    assert measure._make_requests(serve_record_builder.point(), settings, 5000) == ["as it is"]
    assert asked == [2001, 5000]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((1.0, None), (4.0, 5.0), (3, None)),
        ((1.0, 2.0), (1.0, 2.6), (0, 1)),
        ((4.0, 5.0), (1.0, None), (None, None)),
    ],
)
def test_what_a_server_counted_meanwhile_is_the_difference(
    before: tuple[float | None, ...], after: tuple[float | None, ...], said: tuple[int | None, ...]
) -> None:
    """Nothing of one that was started anew, or that did not say."""
    then, now = (info.Counters(preemptions=p, cached_tokens=c) for p, c in (before, after))
    assert tuple(now.compute_increase(then).values()) == said


def test_metrics_are_read_line_by_line() -> None:
    """What is none is left out; of several engines the sum counts, of several names the first."""
    text = '# HELP a\na{x="1",y="b c"} 2.5\na 3\na +Inf\na NaN\nb NaNs\nc\n#a 7\n  d 1\ne{} 1e3 1700000000\nf 1\n'
    found = info.read_metrics(text, ("a", "b", "e"))
    assert found["a"] == [({"x": "1", "y": "b c"}, 2.5), ({}, 3.0)]
    assert found["b"] == []
    assert "c" not in found
    assert found["f"] == [], "only the name is kept of what nothing reads"
    assert info._sum_values(found, ("z", "a", "e")) == 5.5
    assert info._sum_values(found, ("z",)) is None


SERVED = serve_record_builder.served(serve_record_builder.point())


def test_each_server_has_its_points_and_each_point_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layouts one does not start, one dies after its first point, and one does what it should."""
    told: list[tuple[str, str]] = []
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

        def wait_until_ready(self, limit_s: float, tell: Callable[[str], None]) -> list[StartPhase]:
            tell(f"starting, {limit_s:g} s at most")
            if self.layout == "8":
                raise WorkerError("no memory.")
            servers.append(self)
            return [StartPhase(name="starting", seconds=2.3)]

        def find_cause(self, said: str) -> str:
            return f" ({said[:2]})"

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
        told.append((event.stage, f"{event.index + 1} of {event.of}: {event.note}"))

    layouts = (record_builder.Layout(2), record_builder.Layout(4), record_builder.Layout(8))
    points = [
        serve_record_builder.point(layout, n, settings="a=1, b=x=y", weights="unknown")
        for n in (8, 16)
        for layout in layouts
    ]
    asked = measure.ClientConfig(target=Target.from_url("http://127.0.0.1:9", key="k", timeout_s=5.0), device="H200")
    sweep = server_sweep.ServerSweep(
        engine=PRESETS["vllm"],
        model="m",
        config=asked,
        settings=Settings(),
        folder=tmp_path,
        limit_s=9.0,
        measure_point=measured,  # type: ignore[arg-type]
    )
    sweep.measure(points, watch)
    rows = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    failed = tmp_path / "failed.jsonl"
    rows += [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else []
    said = {(row["point"]["tp"], row["point"]["concurrency"]): (row["outcome"], row.get("reason")) for row in rows}
    assert len(started) == 3
    assert said[4, 8] == said[4, 16] == ("ok", None)
    assert said[2, 8] == ("failed", "the server died: killed")
    assert said[2, 16][1].startswith("the server died: killed. Read servers/vllm-tp2")
    assert said[8, 8][1].startswith("no memory (no). Read servers/vllm-tp8")
    stages = [stage for stage, _ in told]
    assert stages == ["build", "failed", "failed", "build", "done", "done", "build", "failed", "failed"]
    assert told[1][1].startswith("1 of 6: the server died: killed")


@pytest.mark.parametrize(
    ("settings", "flags"), [("", {}), ("a=1", {"a": "1"}), ("a=1, b=x=y", {"a": "1", "b": "x=y"}), ("a", {"a": ""})]
)
def test_flags_that_were_varied_are_read_off_a_points_settings(settings: str, flags: dict[str, str]) -> None:
    assert PRESETS["vllm"].find_settings(record_builder.point(settings=settings)) == flags


class Slept(Exception):  # noqa: N818 - no error
    """Ends a loop that would sleep forever."""


def sleeping(monkeypatch: pytest.MonkeyPatch, clock: list[float], times: int, late_s: float = 0.0) -> list[float]:
    """What is slept from now on, by a clock that only sleep moves; raises Slept after some times."""
    slept = list[float]()

    async def sleep(left_s: float) -> None:
        if len(slept) == times:
            raise Slept
        slept.append(round(left_s, 9))
        clock[0] += left_s + late_s

    monkeypatch.setattr("asyncio.sleep", sleep)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    return slept


def test_a_load_says_how_far_it_is_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = sleeping(monkeypatch, clock := [10.0], 3)
    tolds = iter([load.LoadProgress(0, 0, 0), load.LoadProgress(5, 2, 1000), load.LoadProgress(8, 0, 5000)])
    run = SimpleNamespace(get_progress=lambda: next(tolds), start_s=10.0, requests=8)
    said = list[str]()
    with pytest.raises(Slept):
        asyncio.run(measure._report_progress(run, said.append))  # type: ignore[arg-type]
    assert slept == [measure.TELL_S] * 3
    assert clock == [10.0 + 3 * measure.TELL_S]
    rates = [f"{chunks / (n * measure.TELL_S):,.0f}" for n, chunks in enumerate((0, 1000, 5000), 1)]
    assert said == [
        f"0/8 requests, {rates[0]} chunks/s",
        f"3/8 requests, 2 failed, {rates[1]} chunks/s",
        f"8/8 requests, {rates[2]} chunks/s",
    ]


def test_a_share_tells_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = sleeping(monkeypatch, [0.0], 2)
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
def test_the_loop_is_looked_at_on_beats_and_none_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, late_s: float, slept: list[float]
) -> None:
    """In beats: what is slept when each sleep takes `late_s` longer, and how late each was."""
    found = sleeping(monkeypatch, [0.0], 4, late_s * load.BEAT_S)
    run = SimpleNamespace(pace=SimpleNamespace(lags_s=[]))
    with pytest.raises(Slept):
        asyncio.run(load.Run._measure_lag(run))  # type: ignore[arg-type]
    assert [s / load.BEAT_S for s in found] == pytest.approx(slept, abs=1e-6)
    lags = [s / load.BEAT_S for s in run.pace.lags_s]
    assert lags == pytest.approx([late_s] * 4)


@pytest.mark.parametrize(
    ("device", "warnings"),
    [("CPU", ["cpu"]), ("cpu", []), ("NVIDIA H100 80GB HBM3", []), ("unknown", []), ("cpu2", [])],
)
def test_a_record_of_a_server_on_a_cpu_is_marked(tmp_path: Path, device: str, warnings: list[str]) -> None:
    """And one of which nothing was sent says why, with what is known of the server."""
    point = serve_record_builder.point()
    asked = SimpleNamespace(device=device, device_count=4, command="dcpbench server", gpus=None)
    sent = SimpleNamespace(run=None)
    for failed, stopped, reason in [
        ("no.", False, "no."),
        ("", True, "interrupted before any request was sent."),
        ("no.", True, "no."),
    ]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(measure, "_make_server", lambda *_: SERVED.server)
            server = measure.MeasuredServer(
                config=asked,  # type: ignore[arg-type]
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


@pytest.mark.parametrize(
    ("stopped", "limit_s", "reason"),
    [
        (True, None, "a signal ended the run before the first token. Serve the load anew with --resume."),
        (True, 9.0, "a signal ended the run before the first token. Serve the load anew with --resume."),
        (False, 9.0, "cut off by --timeout load=9; use a longer one."),
        (
            False,
            None,
            "though neither --timeout nor a signal ended the run; read the log of the server or of the run.",
        ),
    ],
)
def test_a_run_without_a_token_says_what_ended_it(
    tmp_path: Path, stopped: bool, limit_s: float | None, reason: str
) -> None:
    """A signal before the first token is no reason for a longer limit."""
    point = serve_record_builder.point()
    request = ServeRequest(number=0, prompt=np.zeros(4, np.int32), output_tokens=4, arrival_s=None)
    run = SimpleNamespace(outcomes=[Outcome(Call(0, b"", 4), 1.0)], start_s=1.0, paces=[])
    server = measure.MeasuredServer(
        config=measure.ClientConfig(target=Target.from_url("http://127.0.0.1:9")),
        info=info.ServerInfo(),
        prompt_format=PromptFormat(endpoint="completions", model="m", extras={}, vocab=9),
        settings=Settings(limit_seconds=limit_s),
        folder=tmp_path,
    )
    record = measure._make_record(
        point,
        server,
        measure._LoadState([request], run=run),  # type: ignore[arg-type]
        failed="",
        stopped=stopped,
    )
    assert record.outcome == "failed"
    assert (record.reason or "").endswith(reason)


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [("completions", {"logprobs": 20}), ("chat", {"logprobs": True, "top_logprobs": 20})],
)
def test_fewer_log_probabilities_are_asked_for_until_a_server_takes_the_request(
    endpoint: str, wanted: dict[str, Any]
) -> None:
    """20, then 5, then 2, then none; what it takes is kept, and what other errors say is passed on."""
    refuses = {"message": "logprobs is unknown"}
    choice = {"index": 0, "text": "a b", "message": {"content": "a b"}}
    client = Answering(lambda _, said: (400, refuses) if "logprobs" in said else (200, {"choices": [choice]}))
    manner = PromptFormat(endpoint=endpoint, model="m", extras={"ignore_eos": True}, vocab=9, text=Words(1.0, 0.0))
    side = ask.Side(client, manner)  # type: ignore[arg-type]
    for _ in range(2):
        assert asyncio.run(side.fetch_answer(np.arange(3, dtype=np.int32), 2)) == ask.Answer(tokens=["a", "b"])
    bodies = [body for _, body in client.asked]
    name = "logprobs" if endpoint == "completions" else "top_logprobs"
    tried = [{key: body[key] for key in wanted if key in body} for body in bodies]
    assert tried == [wanted, wanted | {name: 5}, wanted | {name: 2}, {}, {}]
    for body in bodies:
        assert (body["stream"], body["seed"], "stream_options" in body, body["ignore_eos"]) == (False, 0, False, True)
    client = Answering(lambda *_: (200, {"choices": []}))
    with pytest.raises(WorkerError, match=r"^http://127\.0\.0\.1:9: its answer holds no choice\.$"):
        asyncio.run(ask.Side(client, manner).fetch_answer(np.arange(3, dtype=np.int32), 2))  # type: ignore[arg-type]


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
def test_a_whole_answer_is_held_against_what_was_asked(
    changed: dict[str, Any], usage: dict[str, Any], message: str
) -> None:
    """What contradicts the request, or is no answer of OpenAI's API, is a sentence."""
    client = Answering(lambda *_: (200, {"choices": [WHOLE_ANSWER | changed], "usage": usage}))
    manner = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    with pytest.raises(WorkerError) as error:
        asyncio.run(ask.Side(client, manner).fetch_answer(np.arange(3, dtype=np.int32), 2))  # type: ignore[arg-type]
    assert message in str(error.value)


def test_a_whole_answer_may_be_as_long_as_its_tokens_and_its_prompt_need() -> None:
    """The ids of the prompt, and 4 KiB for each token, after a MiB."""

    class Kept(Answering):
        async def send_request(self, request: bytes, reply: Any, _: float | None = None) -> None:
            self.limit = reply._limit
            await super().send_request(request, reply)

    client = Kept(lambda *_: (200, {"choices": [WHOLE_ANSWER]}))
    manner = PromptFormat(endpoint="completions", model="m", extras={}, vocab=9)
    asyncio.run(ask.Side(client, manner).fetch_answer(np.zeros(1000, np.int32), 2))  # type: ignore[arg-type]
    assert client.limit == (1 << 20) + 2 * 4096 + 1000 * 12
