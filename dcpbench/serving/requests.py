"""What is served, and what one step does for it: the words that loads, scheduler, engine and replay share."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.serving.allocator import Allocation
    from dcpbench.serving.radix import Node


CACHED_PROMPTS = 256  # prompts that were read last, as a request that waits is looked at in each step


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LazyPrompt:
    """A prompt that is made when it is read, so that a million of them take no memory."""

    tokens: int
    make: Callable[[], np.ndarray]

    def __len__(self) -> int:
        return self.tokens


@functools.lru_cache(maxsize=CACHED_PROMPTS)
def _read(prompt: LazyPrompt) -> np.ndarray:
    return prompt.make()


class _Prompt:
    """The field `ServeRequest.prompt`: takes an array or a LazyPrompt, and gives an array."""

    def __get__(self, request: ServeRequest | None, owner: type) -> np.ndarray:
        if request is None:
            raise AttributeError("a request has no prompt by default")  # how a dataclass learns that
        return request.source if isinstance(request.source, np.ndarray) else _read(request.source)

    def __set__(self, request: ServeRequest, prompt: np.ndarray | LazyPrompt) -> None:
        object.__setattr__(request, "source", prompt)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServeRequest:
    """One request as a client sends it."""

    number: int
    """Its place in the load, from 0."""
    prompt: _Prompt = _Prompt()
    """int32 token ids; given as an array or as a LazyPrompt."""
    output_tokens: int
    """Tokens that are sampled for it; the end-of-sequence token does not end it."""
    arrival_s: float | None = None
    """Seconds after the start; None in a closed loop, where a client sends it when its last one is answered."""

    session: int | None = None
    """The conversation of which it is a turn; None where it stands alone."""
    turn: int = 0
    """Its place in the conversation: what came before, prompts and answers, is the beginning of its own prompt."""
    answer: np.ndarray | None = None
    """int32 [output_tokens]: what stands for its answer in the prompts of later turns, whatever is sampled. None where
    none follows."""
    said: np.ndarray | None = None
    """`prompt` with the answers that were really sampled, on ranks that sampled them."""

    source: ClassVar[np.ndarray | LazyPrompt]
    """What `prompt` was given as."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, which is not made for it."""
        return len(self.source)

    @property
    def ids(self) -> np.ndarray:
        """Token ids that a model reads; `prompt` is what prefixes are found by, and the same on every rank."""
        return self.prompt if self.said is None else self.said

    @property
    def kv_tokens(self) -> int:
        """KV rows it needs at most: the last sampled token is never read."""
        return self.prompt_tokens + self.output_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """KV of a request that goes from one instance to another; times in seconds after the start of the run."""

    source: int
    """The instance that prefilled."""
    target: int
    """The one that decodes."""
    ready_s: float
    """When its token was sampled, which ends the prefill."""
    begin_s: float
    """When both ends' links were free, and the other instance had room."""
    end_s: float
    sent_bytes: int
    """By each GPU that holds some of it."""


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler."""

    request: ServeRequest
    order: int
    """Of submission: whoever came first is preempted last."""
    replica: int = -1
    slot: int = 0
    allocation: Allocation | None = None
    """None while it waits."""
    node: Node | None = None
    """What it has locked in the prefix cache."""
    computed: int = 0
    """Tokens whose KV rows are stored, or will be once the steps decided so far have run."""
    generated: int = 0
    """Output tokens sampled, likewise."""
    cached: int = 0
    """Prompt tokens that the prefix cache had when it was admitted first."""
    preemptions: int = 0
    instance: int | None = None
    """Where several instances serve, that which it is on, or was last."""
    transfer: Transfer | None = None
    """Of its KV, the first time, from an instance that prefills to one that decodes."""

    @property
    def target(self) -> int:
        """Tokens that prefill has to store before the next token can be sampled: all that are known."""
        return self.request.prompt_tokens + self.generated

    @property
    def finished(self) -> bool:
        """Whether its last token has been sampled."""
        return self.generated == self.request.output_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring prompt tokens of one request that a step prefills."""

    sequence: Sequence
    slot: int
    start: int
    """First token; the tokens before it are its stored prefix. A multiple of page_size · dcp."""
    stop: int
    samples: bool
    """Whether these end the prompt, so that the next token is sampled."""

    @property
    def tokens(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class TableWrite:
    """Where tokens of a request lie from now on."""

    slot: int
    start: int
    """First token."""
    locs: np.ndarray
    """int32 virtual locations of the tokens from `start` on."""


@dataclasses.dataclass(slots=True)
class ReplicaStep:
    """What one attention replica does in a step. Rows: decodes first, then the chunks' tokens."""

    decodes: list[Sequence] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)
    """Of the decodes."""
    positions: list[int] = dataclasses.field(default_factory=list)
    """Of the decodes: index of the token that is read and whose KV row is written."""
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    table: list[TableWrite] = dataclasses.field(default_factory=list)
    """What has to be written into the request table before the step runs."""

    @property
    def tokens(self) -> int:
        """Rows of the step."""
        return len(self.decodes) + sum(c.tokens for c in self.chunks)

    @property
    def emits(self) -> list[Sequence]:
        """Whose tokens are sampled, in the order of rows."""
        return [*self.decodes, *(c.sequence for c in self.chunks if c.samples)]


@dataclasses.dataclass(slots=True)
class Step:
    """One step of a layout: what each replica does, at the same time."""

    number: int
    replicas: list[ReplicaStep]
    finished: list[Sequence] = dataclasses.field(default_factory=list)
    """Whose last token this step samples."""
    preempted: int = 0
    """Sequences that lost their KV before this step."""

    @property
    def prefills(self) -> bool:
        """Whether any replica has chunks: then no graph runs the whole of it."""
        return any(r.chunks for r in self.replicas)
