"""Serve answers with numbers, sizes and delays that no correct server has; each URL prefix has one fault.

    python -m tests.servers.hostile

The program prints `listening on http://127.0.0.1:PORT`, and runs until it is killed. The name of a function is the prefix and
the name of its server. A server answers trial requests (at most MAX_TRIAL_TOKENS tokens) correctly unless its fault is about
them, so that the fault affects the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

MAX_TRIAL_TOKENS = 16  # maximum tokens of trial requests
MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MB = 1 << 20


@dataclasses.dataclass
class Request:
    """Hold a request and the connection for its answer."""

    writer: asyncio.StreamWriter
    method: str
    path: str
    body: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        """Return the number of requested tokens."""
        return int(self.body.get("max_tokens") or 0)

    @property
    def prompt(self) -> int:
        """Return the number of tokens of the prompt, or of words if it is text."""
        prompt = self.body.get("prompt") or self.body.get("messages") or ""
        return len(prompt) if isinstance(prompt, list) and "prompt" in self.body else len(str(prompt).split())

    @property
    def measured(self) -> bool:
        """Return True if the request belongs to the load."""
        return self.max_tokens > MAX_TRIAL_TOKENS

    async def write(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def pour(self, data: bytes) -> None:
        """Send the same bytes until the client disconnects."""
        while True:
            await self.write(data)

    async def send_slowly(self, data: bytes) -> None:
        """Send the bytes repeatedly, one every half second."""
        while True:
            for i in range(len(data)):
                await self.write(data[i : i + 1])
                await asyncio.sleep(0.5)

    async def send_json(self, body: object, status: int = 200, more: bytes = b"") -> None:
        """Send a complete answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (status, len(data))
        await self.write(head + more + b"\r\n" + data)

    async def send_event(self, event: object) -> None:
        """Send an event as a chunk of HTTP."""
        text = event if isinstance(event, bytes) else json.dumps(event, separators=(",", ":")).encode()
        await self.send_chunk(b"data: " + text + b"\n\n")

    async def send_chunk(self, data: bytes) -> None:
        """Send a chunk of HTTP."""
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def send_stream(self, change: Callable[[int, dict[str, Any]], object] = lambda _, event: event) -> None:
        """Send a correct stream; `change` may replace each event."""
        await self.write(STREAM)
        for number in range(self.max_tokens):
            await self.send_event(change(number, self.make_token_event(number)))
            await asyncio.sleep(0.002)
        await self.send_event(b"[DONE]")
        await self.write(b"0\r\n\r\n")

    def make_token_event(self, number: int) -> dict[str, Any]:
        """Return the event of one token with the correct usage."""
        end = "length" if number + 1 == self.max_tokens else None
        output = {"delta": {"content": " a"}} if "messages" in self.body else {"text": " a"}
        choice = {"index": 0, "finish_reason": end, **output}
        usage = {"prompt_tokens": self.prompt, "completion_tokens": number + 1}
        return {"object": "text_completion", "choices": [choice], "usage": usage}


Answer = Callable[[Request], Awaitable[None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """Describe one hostile server, and how dcpbench must react to it."""

    answer: Answer
    path: str = "/completions"  # suffix of the paths with faulty answers
    kind: str = ""  # kind of failed requests in the records; empty: all requests finish
    all_fail: bool = True  # True if all requests fail
    refused: str = ""  # part of the message if it cannot be measured at all
    options: str = ""  # options of the command
    waits_s: float = 0.0  # time that the client waits beyond the limits of the load


SERVERS: dict[str, Server] = {}


def register_server(**about: Any) -> Callable[[Answer], Answer]:
    """Return a decorator that adds a server with the name of the decorated function, which answers its requests."""

    def add(answer: Answer) -> Answer:
        SERVERS[answer.__name__] = Server(answer=answer, **about)
        return answer

    return add


def add_events(name: str, change: Callable[[int, dict[str, Any]], object], **about: Any) -> None:
    """Add a server that streams, and changes the events of a load."""

    async def answer(request: Request) -> None:
        await (request.send_stream(change) if request.measured else answer_correctly(request))

    SERVERS[name] = Server(answer=answer, **about)


def change_usage(**fields: object) -> Callable[[int, dict[str, Any]], object]:
    """Return a function that changes fields of the usage of each event."""
    return lambda _, event: event | {"usage": event["usage"] | fields}


def change_choice(**fields: object) -> Callable[[int, dict[str, Any]], object]:
    """Return a function that changes fields of the choice of each event."""
    return lambda _, event: event | {"choices": [event["choices"][0] | fields]}


def replace_event(text: bytes) -> Callable[[int, dict[str, Any]], object]:
    """Return a function that replaces each event by this text."""
    return lambda *_: text


BAD = "bad stream"
for number, value in {"minus_1": -1, "1e16": 10**16, "1e26": 10**26, "of_4000_digits": 10**4000}.items():
    text = b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":%s}}' % (b"9" * 4000)
    add_events(
        f"prompt_tokens_{number}",
        change_usage(prompt_tokens=value) if value < 10**99 else replace_event(text),
        kind=BAD,
    )
    add_events(
        f"completion_tokens_{number}",
        change_usage(completion_tokens=value) if value < 10**99 else replace_event(text),
        kind=BAD,
    )
for number, value in {"minus_99": -99, "1e16": 10**16, "21_of_20": 21}.items():
    add_events(f"cached_tokens_{number}", change_usage(prompt_tokens_details={"cached_tokens": value}), kind=BAD)
add_events("completion_tokens_1e7_for_24", change_usage(completion_tokens=10**7), kind=BAD)
add_events(
    "completion_tokens_float", replace_event(b'{"choices":[{"text":"a"}],"usage":{"completion_tokens":1e26}}'), kind=BAD
)
add_events("reasoning_tokens_1e12", change_usage(completion_tokens_details={"reasoning_tokens": 10**12}), kind=BAD)
add_events("usage_is_text", lambda _, event: event | {"usage": "many"}, kind=BAD)
add_events("token_id_beyond_int32", change_choice(token_ids=[1 << 31]), kind=BAD)
add_events("token_id_beyond_int64", change_choice(token_ids=[1 << 70]), kind=BAD)
add_events("token_id_negative", change_choice(token_ids=[-1]), kind=BAD)
add_events("token_ids_40000_in_a_chunk", change_choice(token_ids=[1] * 40_000), kind=BAD)
add_events("token_ids_are_text", change_choice(token_ids=["a"]), kind=BAD)
add_events("choices_25000_in_a_chunk", lambda _, event: event | {"choices": [{}] * 25_000}, kind="no tokens")
add_events("nested_100000_deep", replace_event(b'{"choices":' + b"[" * 100_000), kind=BAD)
add_events("nested_values_in_logprobs", change_choice(logprobs=[[]] * 20_000))
add_events("half_a_surrogate", replace_event(b'{"choices":[{"text":"\\ud83d"}]}'), kind=BAD)
add_events("no_utf8", replace_event(b'{"choices":[{"text":"\xff\xfe"}]}'), kind=BAD)
add_events("nan", replace_event(b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":NaN}}'), kind=BAD)
add_events("choice_is_null", replace_event(b'{"choices":[null]}'), kind=BAD)
add_events(
    "error_of_a_megabyte", replace_event(b'{"error":{"message":"\\u001b[2J' + b"x" * (MB - 100) + b'"}}'), kind=BAD
)
add_events(
    "finish_reason_of_a_megabyte",
    lambda number, event: change_choice(finish_reason="x" * (MB - 1000))(number, event) if number == 23 else event,
)
add_events("aborts", change_choice(finish_reason="abort"), kind="aborted")
add_events(
    "texts_of_a_megabyte_in_sessions",
    lambda _, event: event | {"choices": [{"delta": {"content": "x" * (MB - 1000)}}]},
    kind=BAD,
    options="--sessions turns=2 --endpoint chat",
)
add_events(
    "token_ids_of_sessions",
    change_choice(token_ids=[5, 6, 7] * 20_000),
    kind=BAD,
    options="--sessions turns=2,tokens=5",
)


async def answer_correctly(request: Request) -> None:
    """Answer correctly."""
    if request.path.endswith("/v1/models"):
        await request.send_json(MODELS)
    elif request.path.endswith("/completions"):
        await (request.send_stream() if request.body.get("stream") else answer_without_stream(request))
    else:
        await request.send_json({"detail": "Not Found"}, 404)


SERVERS["right"] = Server(answer=answer_correctly)


async def answer_without_stream(request: Request) -> None:
    """Answer without a stream."""
    usage = {"prompt_tokens": request.prompt, "completion_tokens": request.max_tokens}
    await request.send_json({"choices": [{"text": " a", "finish_reason": "length"}], "usage": usage})


def answer_load_only(answer: Answer) -> Answer:
    """Return a function that answers requests of the load with `answer`, and other requests correctly."""

    async def found(request: Request) -> None:
        await (answer(request) if request.measured else answer_correctly(request))

    found.__name__ = answer.__name__
    return found


@register_server(kind=BAD)
@answer_load_only
async def endless_chunks(request: Request) -> None:
    """Send tokens without end."""
    await request.write(STREAM)
    await request.pour(b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in [b'data: {"choices":[{"text":"a"}]}\n\n'] * 50))


@register_server(kind=BAD)
@answer_load_only
async def endless_event(request: Request) -> None:
    """Send an event that does not end."""
    await request.write(STREAM + b"6\r\ndata: \r\n")
    await request.pour(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")


@register_server(kind="time-out")
@answer_load_only
async def endless_usage(request: Request) -> None:
    """Send events without choices without end."""
    await request.write(STREAM)
    event = b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n' * 20
    await request.pour(b"%x\r\n%s\r\n" % (len(event), event))


@register_server(kind="time-out")
@answer_load_only
async def endless_comments(request: Request) -> None:
    """Send comments without end, as fast as they are read."""
    await request.write(STREAM)
    event = b": here\n\n" * 2000
    await request.pour(b"%x\r\n%s\r\n" % (len(event), event))


@register_server(kind="time-out")
@answer_load_only
async def endless_lines_of_one_event(request: Request) -> None:
    """Send events of 100,000 lines each without end."""
    await request.write(STREAM)
    event = b":\n" * 100_000 + b"\n"
    await request.pour(b"%x\r\n%s\r\n" % (len(event), event))


@register_server(kind="not HTTP")
@answer_load_only
async def endless_chunk_size(request: Request) -> None:
    """Send the length of a chunk without end."""
    await request.write(STREAM)
    await request.pour(b"0" * 8192)


@register_server(kind="not HTTP")
@answer_load_only
async def chunk_size_of_20_digits(request: Request) -> None:
    """Send a chunk that is longer than any memory."""
    await request.write(STREAM + b"f" * 20 + b"\r\n")
    await request.pour(b"data: x")


@register_server(kind="not HTTP")
@answer_load_only
async def chunk_size_negative(request: Request) -> None:
    """Send a chunk of negative length."""
    await request.write(STREAM + b"-5\r\nhello\r\n")


@register_server(kind="time-out")
@answer_load_only
async def endless_trailers(request: Request) -> None:
    """Send lines after the last chunk without end."""
    await request.write(STREAM + b"0\r\n")
    await request.pour(b"X-Trailer: 1\r\n" * 1000)


@register_server(kind="time-out")
@answer_load_only
async def silent_after_done(request: Request) -> None:
    """Send a complete stream, and never end its last chunk."""
    await request.write(STREAM)
    await request.send_event(request.make_token_event(request.max_tokens - 1))
    await request.send_event(b"[DONE]")
    await asyncio.sleep(3600)


@register_server(kind="time-out")
@answer_load_only
async def silent(request: Request) -> None:
    """Send nothing."""
    del request
    await asyncio.sleep(3600)


@register_server(kind="time-out")
@answer_load_only
async def head_byte_by_byte(request: Request) -> None:
    """Send a byte of a head every half second."""
    await request.send_slowly(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000)


@register_server(kind="time-out")
@answer_load_only
async def event_byte_by_byte(request: Request) -> None:
    """Send a byte of an event every half second."""
    await request.write(STREAM)
    for letter in b'data: {"choices":[{"text":"' + b"x" * 1000:
        await request.send_chunk(bytes([letter]))
        await asyncio.sleep(0.5)


@register_server(kind="not HTTP")
@answer_load_only
async def continues_3500_times(request: Request) -> None:
    """Send 3,500 interim heads at once, and then a correct answer."""
    await request.write(CONTINUE * 3500)
    await request.send_stream()


@register_server(kind="not HTTP")
@answer_load_only
async def continues_without_end(request: Request) -> None:
    """Send interim heads without end."""
    await request.pour(CONTINUE * 100)


@register_server(kind="not HTTP")
@answer_load_only
async def status_of_5000_digits(request: Request) -> None:
    """Send a status that Python would not turn into a number."""
    await request.write(b"HTTP/1.1 " + b"9" * 5000 + b" OK\r\n\r\n")


@register_server(kind="no tokens")
@answer_load_only
async def content_length_of_5000_digits(request: Request) -> None:
    """Send a length that Python would not turn into a number."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: " + b"9" * 5000
    await request.write(head + b"\r\n\r\ndata: [DONE]\n\n")
    request.writer.close()


@register_server(kind="not HTTP")
@answer_load_only
async def longer_than_its_content_length(request: Request) -> None:
    """Send more bytes than announced."""
    await request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 5\r\n\r\n")
    await request.pour(b"data: x" * 1000)


@register_server(kind="not HTTP")
@answer_load_only
async def endless_head(request: Request) -> None:
    """Send headers without end."""
    await request.write(b"HTTP/1.1 200 OK\r\n")
    await request.pour(b"X-Header: 1\r\n" * 500)


@register_server(kind="not HTTP")
@answer_load_only
async def no_http(request: Request) -> None:
    """Send bytes of another protocol."""
    await request.write(bytes(range(256)) * 64)


@register_server(kind="closed")
@answer_load_only
async def resets(request: Request) -> None:
    """Read the request and reset the connection."""
    request.writer.transport.abort()


@register_server(kind="compressed")
@answer_load_only
async def compressed(request: Request) -> None:
    """Send a compressed stream."""
    await request.write(STREAM.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") + b"2\r\n\x1f\x8b\r\n")
    await asyncio.sleep(3600)


@register_server(kind="HTTP 301")
@answer_load_only
async def redirects_to_60000_characters(request: Request) -> None:
    """Redirect to an address with escape sequences."""
    await request.send_json(b"", 301, b"Location: http://\x1b[2J" + b"x" * 60_000 + b"\r\n")


@register_server(kind="HTTP 503", options="--client retries=3")
@answer_load_only
async def busy_for_1e400_seconds(request: Request) -> None:
    """Ask the client to retry after more seconds than a float can hold."""
    await request.send_json({"error": "busy"}, 503, b"Retry-After: " + b"9" * 400 + b"\r\n")


@register_server(kind="HTTP 500")
@answer_load_only
async def error_of_10_megabytes(request: Request) -> None:
    """Send an error with a long body."""
    await request.send_json(b"x" * (10 * MB), 500)


@register_server(kind="no stream", all_fail=False)
@answer_load_only
async def more_answers_than_requests(request: Request) -> None:
    """Send a correct answer and an additional one, which arrives as the answer to the next request."""
    await request.send_stream()
    await request.send_json({"choices": [{"text": "smuggled"}]})


@register_server(path="/v1/models", refused="no complete answer came for 10 s", waits_s=10.0)
async def models_byte_by_byte(request: Request) -> None:
    """List models, a byte every half second."""
    await request.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
    await request.send_slowly(b" ")


@register_server(path="/v1/models", refused="longer than 4,194,304 bytes")
async def models_without_end(request: Request) -> None:
    """List models without end."""
    await request.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"data":[')
    await request.pour(b'{"id":"m"},' * 1000)


@register_server(path="/v1/models", refused="name one with --model")
async def models_200000(request: Request) -> None:
    """List as many models as fit into the limit."""
    await request.send_json({"data": [{"id": f"{i}"} for i in range(200_000)]})


@register_server(path="/v1/models", refused="the server names no model")
async def models_with_strange_names(request: Request) -> None:
    """List models with names that no file or terminal can have."""
    await request.send_json({"data": [{"id": name} for name in ("\x1b[2J", "a\0b", "x" * 100_000, "\ud800", "")]})


@register_server(path="/v1/models")
async def model_len_1e30(request: Request) -> None:
    """Report a context length that is no number of tokens."""
    await request.send_json(b'{"data":[{"id":"m","max_model_len":1e30}]}')


@register_server(path="/v1/models")
async def model_len_negative(request: Request) -> None:
    """Report a negative context length."""
    await request.send_json({"data": [{"id": "m", "max_model_len": -1}]})


@register_server(path="/v1/models", refused="the server names no model")
async def models_nested_deep(request: Request) -> None:
    """List models nested too deep for a parser."""
    await request.send_json(b'{"data":' + b"[" * 200_000)


@register_server(path="/v1/models")
async def model_named_like_a_path(request: Request) -> None:
    """List a model with a name that leads out of a folder."""
    await request.send_json({"data": [{"id": "../../../../tmp/.."}]})


@register_server(path="/metrics")
async def metrics_of_64_megabytes(request: Request) -> None:
    """Report as many metrics as no engine has."""
    line = b'vllm:num_preemptions_total{engine="0"} 1.0\n'
    await request.send_json(line * (64 * MB // len(line)))


@register_server(path="/metrics")
async def metrics_of_15_megabytes(request: Request) -> None:
    """Report as many metrics as fit into the limit, of one name and of many."""
    line = b'vllm:prefix_cache_hits_total{engine="0",model="m"} 1.0\n'
    others = b"".join(b"metric_%d 1\n" % i for i in range(100_000))
    await request.send_json(line * (13 * MB // len(line)) + others)


@register_server(path="/metrics")
async def metrics_in_one_line(request: Request) -> None:
    """Report lines that regular expressions search for a long time."""
    await request.send_json(
        b"vllm:cache_config_info{" + b"a" * (14 * MB) + b"} 1\n" + (b"vllm:x{" + b"a" * 15_000 + b"}\n") * 60
    )


@register_server(path="/metrics")
async def metrics_infinite(request: Request) -> None:
    """Report counters that are no numbers."""
    names = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
    values = ("+Inf", "NaN", "-1", "1e308", "-Inf", "1e308", "9" * 5000)
    await request.send_json("".join(f'{n}{{engine="{v[:9]}"}} {v}\n' for n in names for v in values).encode())


@register_server(path="/metrics")
async def metrics_with_26_digits(request: Request) -> None:
    """Report a KV cache that no machine has."""
    labels = f'block_size="16",num_gpu_blocks="{"9" * 26}",cache_dtype="{"x" * 9000}"'
    more = f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="{"9" * 5000}"}} 1\n'
    await request.send_json(f"vllm:cache_config_info{{{labels}}} 1\n{more}".encode())


@register_server(path="/metrics", waits_s=10.0)
async def metrics_byte_by_byte(request: Request) -> None:
    """Report metrics, a byte every half second."""
    await request.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
    await request.send_slowly(b"#")


@register_server(path="/version")
async def version_of_a_megabyte(request: Request) -> None:
    """Report a long version with an escape sequence."""
    await request.send_json({"version": "\x1b]0;x\x07\n" + "9" * MB})


@register_server(path="/server_info")
async def server_info_of_strange_values(request: Request) -> None:
    """Report values of the wrong types."""
    strange = {"tp_size": 10**4000, "dp_size": [[]] * 100_000, "dtype": "\x1b[2J" * 1000, "page_size": None}
    await request.send_json(strange | {"model_path": {}, "version": 5, "max_total_num_tokens": 10**26})


@register_server(refused="do not follow the prompt", options="--endpoint chat", path="/chat/completions")
async def counts_every_prompt_as_9_tokens(request: Request) -> None:
    """Accept only text, and report the same number of tokens for all prompts."""
    if request.body.get("stream"):
        await request.send_stream()
    else:
        await request.send_json({"choices": [{}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})


@register_server(
    refused="usage.prompt_tokens is 1,000,000,000,000", options="--endpoint chat", path="/chat/completions"
)
async def counts_a_prompt_as_1e12_tokens(request: Request) -> None:
    """Accept only text, and report too many tokens."""
    if request.body.get("stream"):
        await request.send_stream()
    else:
        await request.send_json({"choices": [{}], "usage": {"prompt_tokens": 10**12, "completion_tokens": 1}})


@register_server(refused="accepts no request")
async def refuses_everything(request: Request) -> None:
    """End each stream early."""
    await request.write(STREAM)
    await request.send_event({"error": {"message": "no"}})


@register_server(refused="no token came", waits_s=2.0)
async def trials_never_answered(request: Request) -> None:
    """Never answer any request."""
    del request
    await asyncio.sleep(3600)


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    lengths = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
    body = await reader.readexactly(int(lengths[0])) if lengths else b""
    return Request(writer, method, path, json.loads(body) if body else {})


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, RuntimeError):
        while not writer.is_closing():
            request = await _read_request(reader, writer)
            name, _, rest = request.path.lstrip("/").partition("/")
            server = SERVERS[name]
            await (server.answer(request) if f"/{rest}".endswith(server.path) else answer_correctly(request))
    writer.close()


async def main() -> None:
    """Serve at a free port of the loopback."""
    server = await asyncio.start_server(handle, "127.0.0.1", 0, limit=1 << 26, backlog=256)
    sys.stdout.write(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
