"""How a server is asked: prompts as token ids where it takes them, else as text of so many tokens, and what beside.

A server is tried out with a few short requests before anything is measured: engines differ in what they take.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from dcpbench.errors import MissingPackageError, UsageError, WorkerError
from dcpbench.servers.answers import BY_IDS, Streamed, refused
from dcpbench.servers.client import OK, RequestError, status_error
from dcpbench.servers.events import StreamError, read_completion

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dcpbench.servers.client import Client
    from dcpbench.serving.requests import ServeRequest

COMPLETIONS, CHAT = ENDPOINTS = ("completions", "chat")
"""What --endpoint can be."""
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
IDS, TOKENIZER, COUNTED = "token ids", "text of a tokenizer", "text, counted by the server"
"""How prompts are put."""
VOCABULARIES = (32_000, 1_000, 100)
"""Ids below these are tried: nearly every model has the first."""
EXACT: dict[str, Any] = {
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
EACH: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
EXTRAS: tuple[dict[str, Any], ...] = (
    EXACT,
    EACH,
    {"ignore_eos": True, "stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True}},
    {},
)
"""Fields beside OpenAI's required ones, from what says most to what every server takes."""
TRIED_TOKENS, TRIED_WORDS = 8, (40, 240)
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
    "write",
    "go",
    "see",
    "number",
    "no",
    "way",
    "could",
    "people",
    "my",
    "than",
    "first",
    "water",
    "been",
    "call",
    "who",
    "oil",
    "its",
    "now",
    "find",
    "long",
    "down",
    "day",
    "did",
    "get",
    "come",
    "made",
    "may",
    "part",
]
"""What prompts of text are made of where there is no tokenizer; most vocabularies have each as one token."""


Prompt = list[int] | str | list[dict[str, str]]
"""As a request has it: token ids, text, or the messages of a chat."""


class Text(Protocol):
    """Turns token ids of a load into text of about as many tokens of the server's."""

    def __call__(self, ids: np.ndarray) -> str:
        """The text; prompts that begin alike have texts that do."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manner:
    """How a server is asked."""

    endpoint: str
    model: str
    extras: dict[str, Any]
    vocab: int
    """Ids of prompts are below it."""
    text: Text | None = None
    """None: prompts are token ids."""
    prompts: str = IDS
    """IDS, TOKENIZER or COUNTED."""
    extra_body: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Fields of --extra-body, sent with every request."""

    def prompt(self, ids: np.ndarray) -> Prompt:
        """Ids of a load as this server takes them."""
        if self.text is None:
            listed: list[int] = ids.tolist()
            return listed
        return self.text(ids) if self.endpoint == COMPLETIONS else [_message("user", self.text(ids))]

    def prolonged(self, said: Prompt, answer: Streamed, made_up: np.ndarray | None, new: np.ndarray) -> Prompt:
        """A prompt, what the server answered to it, and what is added then. `made_up`: int32 ids in the place of an answer
        whose ids the server does not say.
        """
        if self.text is None:
            assert isinstance(said, list)
            told = len(answer.tokens) == sum(answer.chunk_tokens()) and answer.tokens
            return [*said, *(answer.tokens if told or made_up is None else made_up.tolist()), *new.tolist()]
        text = "".join(choice.new_text for choice in answer.choices)
        if isinstance(said, str):
            return f"{said}{text} {self.text(new)}"
        return [*said, _message("assistant", text), _message("user", self.text(new))]

    def body(self, ids: np.ndarray, output_tokens: int, **more: object) -> bytes:
        """A request as JSON, streamed and sampled greedily unless `more` says otherwise."""
        return self.body_of(self.prompt(ids), output_tokens, **more)

    def body_of(self, prompt: Prompt, output_tokens: int, **more: object) -> bytes:
        """The same of what is no longer a load's."""
        put = {"prompt" if self.endpoint == COMPLETIONS else "messages": prompt}
        asked = {"model": self.model, **put, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        return msgspec.json.encode(asked | self.extras | dict(self.extra_body) | more)

    def request(self, client: Client, request: ServeRequest) -> bytes:
        """All bytes of a request of a load."""
        return client.target.request("POST", PATHS[self.endpoint], self.body(request.prompt, request.output_tokens))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@dataclasses.dataclass(frozen=True)
class Words:
    """Words for ids, as many as the server counts as so many tokens."""

    per_word: float
    """Tokens of a word."""
    beside: float
    """Tokens of a prompt beside its words, such as those of a chat's template."""

    def __call__(self, ids: np.ndarray) -> str:
        """See Text."""
        count = max(round((len(ids) - self.beside) / self.per_word), 1)
        found = np.resize(ids, count)
        return " ".join([WORDS[i] for i in (found % len(WORDS)).tolist()])


TRIES = 16
"""Times that a text is cut or prolonged; one or two do, but where most ids decode to nothing."""


class Tokenized:
    """Text of a tokenizer that the user names."""

    def __init__(self, folder: Path, beside: float = 0.0) -> None:
        """Raises UsageError for a folder without a tokenizer.json, MissingPackageError without the library."""
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
        except Exception as e:  # the library raises nothing else
            raise UsageError(
                f"--tokenizer {folder}: no tokenizer could be read from {path.name} ({str(e)[:200]}); name the folder of "
                "the served model, with its tokenizer.json."
            ) from e
        self.vocab: int = self._tokenizer.get_vocab_size()
        self.beside = beside

    def __call__(self, ids: np.ndarray) -> str:
        """See Text. The text is tokenized again, and cut or prolonged until it has as many tokens."""
        wanted = max(len(ids) - round(self.beside), 1)
        found, more = np.resize(ids, wanted).tolist(), itertools.cycle(ids.tolist())
        for _ in range(TRIES):
            text = self._tokenizer.decode(found, skip_special_tokens=True)
            again = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(again) == wanted:
                break
            # On from where the last try ended: a token that the text does not show helps no time.
            found = (again + list(itertools.islice(more, max(wanted - len(again), 0))))[:wanted]
        return text


async def find_manner(
    client: Client,
    model: str,
    endpoint: str,
    *,
    tokenizer: Path | None = None,
    text: bool = False,
    extra_body: Mapping[str, object] | None = None,
) -> Manner:
    """How this server takes prompts and tells tokens. `text`: also where it would take ids. `extra_body`: see Manner.

    Raises WorkerError where it takes none of the ways, and UsageError for a tokenizer that cannot be used.
    """
    own = Tokenized(tokenizer) if tokenizer is not None else None
    errors: list[RequestError] = []
    if endpoint == COMPLETIONS and not text:
        for vocab in (own.vocab,) if own else VOCABULARIES:
            start = Manner(endpoint=endpoint, model=model, extras={}, vocab=vocab, extra_body=extra_body or {})
            found = await _try_extras(client, start, vocab, errors)
            if found is not None:
                return found
    start = Manner(
        endpoint=endpoint,
        model=model,
        extras={},
        vocab=own.vocab if own else 1 << 20,
        text=own or Words(1.0, 0.0),
        prompts=TOKENIZER if own else COUNTED,
        extra_body=extra_body or {},
    )
    found = await _try_extras(client, start, start.vocab, errors)
    if found is None:
        raise WorkerError(f"{client.target.url} takes no request of {PATHS[endpoint]}: {errors[-1].sentence}")
    return await _calibrated(client, found)


async def _try_extras(client: Client, manner: Manner, vocab: int, errors: list[RequestError]) -> Manner | None:
    """With the most telling fields that the server takes; None where it takes none, for which `errors` say why."""
    prompt = np.full(TRIED_TOKENS, vocab - 1, np.int32)
    prompt[:-1] = np.arange(1, TRIED_TOKENS) % vocab
    for extras in EXTRAS:
        tried = dataclasses.replace(manner, extras=extras)
        answer = Streamed(2)
        request = client.target.request("POST", PATHS[manner.endpoint], tried.body(prompt, 2))
        try:
            await client.exchange(request, answer)
        except RequestError as e:
            if not refused(e) and e.kind != "bad stream":  # vLLM says in a stream that it does not take a request
                raise WorkerError(f"{client.target.url} cannot be measured: {e.sentence}") from e
            errors.append(e)
            continue
        if extras is not EXACT or answer.counted_by == BY_IDS:
            return tried
    return None


async def _calibrated(client: Client, manner: Manner) -> Manner:
    """With texts of as many tokens as the server counts. Raises WorkerError where it counts none."""
    short, long = [await _prompt_tokens(client, manner, count) for count in TRIED_WORDS]
    if short is None or long is None:
        if manner.prompts == TOKENIZER:
            return manner
        raise WorkerError(
            f"{client.target.url} takes no token ids and does not say how many tokens a prompt of text has; name the "
            "folder of the model's tokenizer with --tokenizer."
        )
    if isinstance(manner.text, Tokenized):
        manner.text.beside = max(short - TRIED_WORDS[0], 0)
        return manner
    per_word = max((long - short) / (TRIED_WORDS[1] - TRIED_WORDS[0]), 0.01)
    return dataclasses.replace(manner, text=Words(per_word, short - per_word * TRIED_WORDS[0]))


async def _prompt_tokens(client: Client, manner: Manner, count: int) -> int | None:
    """What the server counts of a prompt of so many words, or tokens of the tokenizer."""
    ids = np.arange(count, dtype=np.int32) * 7 % min(manner.vocab, 30_000)
    extras = {"stream": False, "stream_options": None}
    plain = dataclasses.replace(manner, extras={k: v for k, v in manner.extras.items() if k not in extras})
    body = plain.body(ids, 1, stream=False)
    answer = await _whole(client, PATHS[manner.endpoint], body)
    return answer.usage.prompt_tokens if answer.usage else None


async def _whole(client: Client, path: str, body: bytes) -> Any:  # noqa: ANN401 -- a Completion
    from dcpbench.servers.client import Whole

    reply = Whole()
    try:
        await client.exchange(client.target.request("POST", path, body), reply)
        if reply.status != OK:
            raise status_error(reply.status, reply.headers, reply.data)
        return read_completion(reply.data)
    except RequestError as e:
        raise WorkerError(f"{client.target.url} cannot be measured: {e.sentence}") from e
    except StreamError as e:
        raise WorkerError(f"{client.target.url} cannot be measured: {e}.") from e
