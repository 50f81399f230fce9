"""Format requests to a server: prompts as token ids if it accepts them, else as text, and further fields.

A few short requests determine the format before the measurement, because engines accept different fields.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from dcpbench.errors import MissingPackageError, UsageError, WorkerError
from dcpbench.servers.answers import StreamReply
from dcpbench.servers.client import (
    CLIENT_ERROR,
    KEY_ERRORS,
    KEY_HINT,
    NO_ENDPOINT,
    TOO_MANY,
    RequestError,
)
from dcpbench.servers.events import Completion, StreamError, format_bad_stream, read_completion
from dcpbench.servers.load import UNAVAILABLE, retry_while_busy
from dcpbench.servers.token_counts import Limits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.servers.client import Client

COMPLETIONS, CHAT = ENDPOINTS = ("completions", "chat")  # values of --endpoint
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
IDS, TOKENIZER, COUNTED = "token ids", "text of a tokenizer", "text, counted by the server"  # forms of a prompt
VOCABULARIES = (32_000, 1_000, 100)  # ids below these are tried: nearly every model has the first
USAGE_IN_EACH: dict[str, Any] = {
    "ignore_eos": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
ANSWER_IDS: dict[str, Any] = {
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
EXTRAS: tuple[dict[str, Any], ...] = (
    USAGE_IN_EACH,
    ANSWER_IDS,
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Fields in addition to OpenAI's required ones, in the order of the information that they give.

Ids of the answer come second, as vLLM and SGLang then also repeat the ids of the prompt, in the event of the first
token: 1.3 MB for 200,000 tokens, which delays that token (vllm/entrypoints/openai/completion/protocol.py,
`return_token_ids`: "prompt_token_ids is included only in the first chunk").
"""
TRIED_TOKENS, TRIED_OUTPUT = 8, 2  # tokens of the prompt and of the answer of a short request
CALIBRATION_WORDS = (40, 240)
MIN_PER_WORD = 0.25  # tokens of a word; with fewer the server does not count the prompt
BUSY = (TOO_MANY, UNAVAILABLE)
MAY_BE_FIELDS = ("bad stream", "closed", "cut off", "no stream", "no tokens")  # failures that other fields may avoid
COMMON_WORDS = """
    the of and to in is that it was for on are as with his they at be this have from or one had by word but not what
    all were we when your can said there use an each which she do how their if will up other about out many then
    them these so some her would make like him into time has look two more write go see number no way could people
    my than first water been call who oil its now find long down day did get come made may part
"""
WORDS = COMMON_WORDS.split()  # of prompts of text without a tokenizer; in most vocabularies each is one token


Prompt = list[int] | str | list[dict[str, str]]  # token ids, text, or the messages of a chat


class Text(Protocol):
    """A function that turns token ids of a load into text of about as many tokens for the server."""

    def __call__(self, ids: np.ndarray) -> str:
        """Return the text. Prompts with a common prefix have texts with a common prefix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """Format of requests to a server."""

    endpoint: str
    model: str
    extras: dict[str, Any]
    vocab: int  # ids of prompts are below it
    text: Text | None = None  # None: prompts are token ids
    prompts: str = IDS  # IDS, TOKENIZER or COUNTED
    id_extras: dict[str, Any] | None = None  # fields that request the ids of the answer; None: unsupported
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)  # sent with every request

    def make_prompt(self, ids: np.ndarray) -> Prompt:
        """Return the prompt for these ids of a load."""
        if self.text is None:
            listed: list[int] = ids.tolist()
            return listed
        return self.text(ids) if self.endpoint == COMPLETIONS else [_make_message("user", self.text(ids))]

    def make_next_prompt(
        self, prompt: Prompt, answer: StreamReply, made_up: np.ndarray | None, new: np.ndarray
    ) -> Prompt:
        """Return a prompt, the server's answer to it, and new ids after it.

        `made_up`: int32 ids that take the place of the answer if the server does not send its ids.
        """
        if self.text is None:
            assert isinstance(prompt, list)
            complete = len(answer.tokens) == sum(answer.list_chunk_tokens()) and answer.tokens
            return [*prompt, *(answer.tokens if complete or made_up is None else made_up.tolist()), *new.tolist()]
        text = "".join(answer.texts)
        if isinstance(prompt, str):
            return f"{prompt}{text} {self.text(new)}"
        return [*prompt, _make_message("assistant", text), _make_message("user", self.text(new))]

    def encode_body(self, tokens: np.ndarray, output_tokens: int, *, ids: bool = False, **more: object) -> bytes:
        """Return a request as JSON, streamed and sampled greedily unless `more` has other values.

        `ids`: ask for the token ids of the answer, if the server has them.
        """
        return self.encode_prompt_body(self.make_prompt(tokens), output_tokens, ids=ids, **more)

    def encode_prompt_body(self, prompt: Prompt, output_tokens: int, *, ids: bool = False, **more: object) -> bytes:
        """Return a request for a prompt that has its final form, like `body`."""
        put = {"prompt" if self.endpoint == COMPLETIONS else "messages": prompt}
        fields = {"model": self.model, **put, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        extras = self.id_extras if ids and self.id_extras is not None else self.extras
        return msgspec.json.encode(fields | extras | dict(self.extra_body) | more)


def _make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclasses.dataclass(frozen=True)
class Words:
    """Text of words, with as many words as give the requested number of tokens on the server."""

    per_word: float  # tokens of a word
    fixed: float  # tokens of a prompt besides its words, such as those of a chat template

    def __call__(self, ids: np.ndarray) -> str:
        """Return text as Text specifies."""
        count = max(round((len(ids) - self.fixed) / self.per_word), 1)
        found = np.resize(ids, count)
        return " ".join([WORDS[i] for i in (found % len(WORDS)).tolist()])


TRIES = 16  # times that a text is cut or extended; one or two suffice unless most ids decode to an empty string


class Tokenized:
    """Text of a tokenizer that the user names."""

    def __init__(self, folder: Path, fixed: float = 0.0) -> None:
        """Raise UsageError for a folder without a tokenizer.json, MissingPackageError without the library."""
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            raise MissingPackageError(
                "--tokenizer needs the package tokenizers: pip install tokenizers; or leave it out, and prompts are "
                "counted by the server."
            ) from e
        path = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as e:  # the only type that the library raises
            raise UsageError(
                f"--tokenizer {folder}: no tokenizer could be read from {path.name} ({str(e)[:200]}); name the folder of "
                "the served model, with its tokenizer.json."
            ) from e
        self.vocab: int = self._tokenizer.get_vocab_size()
        self.fixed = fixed

    def __call__(self, ids: np.ndarray) -> str:
        """Return text for ids, see Text. The text is tokenized again, and cut or extended until it has the requested
        tokens.
        """
        wanted = max(len(ids) - round(self.fixed), 1)
        found, more = np.resize(ids, wanted).tolist(), itertools.cycle(ids.tolist())
        for _ in range(TRIES):
            text = self._tokenizer.decode(found, skip_special_tokens=True)
            again = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(again) == wanted:
                break
            # Continue where the last try ended: a token without text would be tried without success each time.
            found = (again + list(itertools.islice(more, max(wanted - len(again), 0))))[:wanted]
        return text


async def find_prompt_format(
    client: Client,
    model: str,
    endpoint: str,
    *,
    tokenizer: Path | None = None,
    text: bool = False,
    extra_body: Mapping[str, object] | None = None,
    retries: int = 0,
) -> PromptFormat:
    """Return how this server accepts prompts and reports tokens. `text`: use text even if it accepts ids. `extra_body`: see Manner.

    Raise WorkerError if it accepts none of the known forms, and UsageError for a tokenizer that cannot be used.
    """
    own = Tokenized(tokenizer) if tokenizer is not None else None
    probe = FieldProbe(client, endpoint, retries)
    if endpoint == COMPLETIONS and not text:
        for vocab in (own.vocab,) if own else VOCABULARIES:
            start = PromptFormat(endpoint=endpoint, model=model, extras={}, vocab=vocab, extra_body=extra_body or {})
            found = await probe.find_extras(start)
            if found is not None:
                return found
    start = PromptFormat(
        endpoint=endpoint,
        model=model,
        extras={},
        vocab=own.vocab if own else 1 << 20,
        text=own or Words(1.0, 0.0),
        prompts=TOKENIZER if own else COUNTED,
        extra_body=extra_body or {},
    )
    found = await probe.find_extras(start)
    if found is None:
        raise await probe.describe_failure(start)
    return await _fit_text_length(client, found, retries)


class FieldProbe:
    """Short requests that determine the fields that a server accepts."""

    def __init__(self, client: Client, endpoint: str, retries: int) -> None:
        self.client, self.endpoint, self.retries = client, endpoint, retries
        self.errors: list[RequestError] = []
        self._deadline_s = time.monotonic() + client.target.timeout_s

    async def find_extras(self, prompt_format: PromptFormat) -> PromptFormat | None:
        """Return the format with the most informative fields about tokens; None if the server refuses all of them."""
        fallback: PromptFormat | None = None
        for extras in EXTRAS:
            tried = dataclasses.replace(prompt_format, extras=extras)
            answer = await self._test_format(tried)
            if answer is not None and answer.has_chunk_counts:
                return await self._find_ids(tried)
            if answer is not None and extras is not ANSWER_IDS:
                fallback = fallback or tried
            if fallback is not None and extras is not USAGE_IN_EACH:
                break
        return fallback

    async def _find_ids(self, prompt_format: PromptFormat) -> PromptFormat:
        """Return the manner with the fields that ask for the ids of the answer, if the server has them."""
        if prompt_format.extras is ANSWER_IDS:
            return dataclasses.replace(prompt_format, id_extras=ANSWER_IDS)
        answer = await self._test_format(dataclasses.replace(prompt_format, extras=ANSWER_IDS))
        return (
            dataclasses.replace(prompt_format, id_extras=ANSWER_IDS)
            if answer is not None and answer.tokens
            else prompt_format
        )

    async def _test_format(self, prompt_format: PromptFormat) -> StreamReply | None:
        """Return the answer to a short request, None if it failed in a way that other fields may avoid.

        Raise WorkerError if it failed otherwise, or if trials have taken longer than one request may take.
        """
        try:
            return await self._send_short_request(prompt_format)
        except RequestError as e:
            self.errors.append(e)
            if not _should_try_other_fields(e) or time.monotonic() > self._deadline_s:
                raise await self.describe_failure(prompt_format) from e
            return None

    async def _send_short_request(self, prompt_format: PromptFormat) -> StreamReply:
        prompt = np.full(TRIED_TOKENS, prompt_format.vocab - 1, np.int32)
        prompt[:-1] = np.arange(1, TRIED_TOKENS) % prompt_format.vocab
        request = self.client.target.encode_request(
            "POST", PATHS[prompt_format.endpoint], prompt_format.encode_body(prompt, TRIED_OUTPUT)
        )

        async def send_once() -> StreamReply:
            answer = StreamReply(TRIED_OUTPUT, prompt_tokens=TRIED_TOKENS)
            await self.client.send_request(request, answer)
            return answer

        return await retry_while_busy(send_once, self.retries)

    async def describe_failure(self, prompt_format: PromptFormat) -> WorkerError:
        """Return the error that ends the trials, with the option to add if the server's answers show it."""
        url, path, last = self.client.target.url, PATHS[self.endpoint], self.errors[-1]
        if (other := await self._find_other_endpoint(prompt_format, last)) is not None:
            return WorkerError(
                f"{url} does not answer {path} ({last.sentence.rstrip('.')}), but it answers {PATHS[other]}; add --endpoint {other}."
            )
        if last.status in BUSY:
            more = (
                f"Wait until it is ready, or {'raise --client retries' if self.retries else 'add --client retries=5'}."
            )
            return WorkerError(f"{url} cannot be measured: {last.sentence} {more}")
        if last.status in KEY_ERRORS:
            return WorkerError(f"{url} cannot be measured: {last.sentence} {KEY_HINT}")
        if _should_try_other_fields(last):
            return WorkerError(f"{url} accepts no request to {path}; the last one failed: {last.sentence}")
        return WorkerError(f"{url} cannot be measured: {last.sentence}")

    async def _find_other_endpoint(self, prompt_format: PromptFormat, last: RequestError) -> str | None:
        """Return the other endpoint if it answers and this one does not."""
        if last.status not in NO_ENDPOINT and not (_should_try_other_fields(last) and last.status):
            return None
        other = CHAT if self.endpoint == COMPLETIONS else COMPLETIONS
        try:
            await self._send_short_request(
                dataclasses.replace(prompt_format, endpoint=other, extras={}, text=Words(1.0, 0.0))
            )
        except RequestError:
            return None
        return other


def _should_try_other_fields(error: RequestError) -> bool:
    """Return whether the same request may succeed with other fields.

    Servers answer a field that they do not know with 400, 415, 422 or 500, close the connection, or begin a stream that
    reports the error. A missing endpoint, a wrong key and a busy server do not depend on fields.
    """
    if error.status < CLIENT_ERROR:
        return error.kind in MAY_BE_FIELDS
    return error.status not in (*KEY_ERRORS, *NO_ENDPOINT, *BUSY)


async def _fit_text_length(client: Client, prompt_format: PromptFormat, retries: int) -> PromptFormat:
    """Return the manner with texts of the right length by the server's count. Raise WorkerError if it counts none."""
    url, (few, many) = client.target.url, CALIBRATION_WORDS
    short, long = [await _count_prompt_tokens(client, prompt_format, count, retries) for count in CALIBRATION_WORDS]
    if short is None or long is None:
        if prompt_format.prompts == TOKENIZER:
            return prompt_format
        raise WorkerError(
            f"{url} takes no token ids and does not say how many tokens a prompt of text has; name the "
            "folder of the model's tokenizer with --tokenizer."
        )
    if isinstance(prompt_format.text, Tokenized):
        prompt_format.text.fixed = max(short - few, 0)
        return prompt_format
    per_word = (long - short) / (many - few)
    if per_word < MIN_PER_WORD:
        raise WorkerError(
            f"{url} counts {short:,} tokens in a prompt of {few} words and {long:,} in one of {many}, so its counts do not follow "
            "the prompt; name the folder of the model's tokenizer with --tokenizer."
        )
    return dataclasses.replace(prompt_format, text=Words(per_word, short - per_word * few))


async def _count_prompt_tokens(client: Client, prompt_format: PromptFormat, count: int, retries: int) -> int | None:
    """Return the server's count of a prompt of `count` words, or tokens of the tokenizer; None if it reports none."""
    ids = np.arange(count, dtype=np.int32) * 7 % min(prompt_format.vocab, 30_000)
    extras = {name: value for name, value in prompt_format.extras.items() if name != "stream_options"}
    body = dataclasses.replace(prompt_format, extras=extras).encode_body(ids, 1, stream=False)
    answer = await _fetch_completion(client, PATHS[prompt_format.endpoint], body, retries, Limits(1, count))
    return answer.usage.prompt_tokens if answer.usage else None


async def _fetch_completion(client: Client, path: str, body: bytes, retries: int, limits: Limits) -> Completion:
    """Return an answer that is not streamed. Raise WorkerError if there is none, or if its usage is out of range."""
    try:
        found = read_completion(await retry_while_busy(lambda: client.post(path, body), retries))
    except RequestError as e:
        raise WorkerError(f"{client.target.url} cannot be measured: {e.sentence}") from e
    except StreamError as e:
        raise WorkerError(f"{client.target.url} cannot be measured: {e}.") from e
    if found.usage is not None and (bad := limits.find_excess(found.usage)) is not None:
        raise WorkerError(f"{client.target.url} cannot be measured: {format_bad_stream(bad)}.")
    return found
