"""Data types shared by loads, scheduler, engine and replay: requests, and the work of one step."""

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
def _read_prompt(prompt: LazyPrompt) -> np.ndarray:
    return prompt.make()


class _Prompt:
    """The field `ServeRequest.prompt`: takes an array or a LazyPrompt, and gives an array."""

    def __get__(self, request: ServeRequest | None, owner: type) -> np.ndarray:
        if request is None:
            raise AttributeError("a request has no prompt by default")  # how a dataclass learns that
        return request.source if isinstance(request.source, np.ndarray) else _read_prompt(request.source)

    def __set__(self, request: ServeRequest, prompt: np.ndarray | LazyPrompt) -> None:
        object.__setattr__(request, "source", prompt)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServeRequest:
    """A request as a client sends it."""

    number: int  # position in the load, from 0
    prompt: _Prompt = _Prompt()  # int32 token ids; given as an array or as a LazyPrompt
    output_tokens: int  # tokens that are sampled for it; the end-of-sequence token does not end it
    arrival_s: float | None = None  # s after the start; None in a closed loop: sent after the client's last answer

    session: int | None = None  # session that the request is a turn of; None for a single-turn request
    turn: int = 0
    """Turn number in the session; earlier prompts and answers are the beginning of the turn's own prompt. Requests of a session with
    the same number are sent at the same time, once all with lower numbers have been answered.
    """
    parent: int | None = None  # number of the earlier request: this prompt begins with its prompt and answer
    delay_s: float = 0.0  # s from the answer before to this turn, which is not sent before its arrival_s either
    answer: np.ndarray | None = None  # int32 [output_tokens]: stands for the answer in later turns' prompts; or None
    sampled_prompt: np.ndarray | None = None  # `prompt` with the sampled answers, on ranks that sampled them

    source: ClassVar[np.ndarray | LazyPrompt]  # prompt as passed: an array, or a LazyPrompt that generates it

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, which is not made for it."""
        return len(self.source)

    @property
    def session_turn(self) -> tuple[int, int] | None:
        """Return session and turn, which requests of sub-agents share; None without a session."""
        return None if self.session is None else (self.session, self.turn)

    @property
    def ids(self) -> np.ndarray:
        """Return the token ids that the model reads; `prompt`, which is the same on every rank, is the key of the
        prefix cache.
        """
        return self.prompt if self.sampled_prompt is None else self.sampled_prompt

    def compute_due_s(self, answered_s: float) -> float:
        """Return when a later turn is due, if the answer before it ended at `answered_s` after the start."""
        return max(answered_s + self.delay_s, self.arrival_s or 0.0)

    @property
    def kv_tokens(self) -> int:
        """Return the maximum number of KV rows: the last sampled token is never read."""
        return self.prompt_tokens + self.output_tokens - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Transfer of a request's KV from one instance to another; times in seconds after the start of the run."""

    source: int  # the instance that prefilled
    target: int  # instance that decodes the request
    ready_s: float  # time at which its first token was sampled, which ends the prefill
    begin_s: float  # time at which the links of both instances were free and the decode instance had free KV capacity
    end_s: float
    sent_bytes: int  # bytes sent by each GPU that holds part of the request


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler."""

    request: ServeRequest
    order: int  # submission order: the earliest request is preempted last
    replica: int = -1
    slot: int = 0
    allocation: Allocation | None = None  # KV pages of the request; None while it waits
    node: Node | None = None  # locked node of the prefix cache
    computed: int = 0  # tokens with stored KV rows, including those that the steps decided so far will store
    generated: int = 0  # output tokens sampled, including those of the steps decided so far
    cached: int = 0  # prompt tokens that the prefix cache had when it was admitted first
    preemptions: int = 0
    verified: int = 0  # steps that verified drafts of it, including those decided so far
    instance: int | None = None  # instance that the request is on or was last on, if several serve
    transfer: Transfer | None = None  # first transfer of its KV from a prefill instance to a decode instance
    prompt_tokens: int = dataclasses.field(init=False)  # copied from the request, because each step reads it
    output_tokens: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.prompt_tokens, self.output_tokens = self.request.prompt_tokens, self.request.output_tokens

    @property
    def target(self) -> int:
        """Return the number of known tokens, which prefill has to store before the next token can be sampled."""
        return self.prompt_tokens + self.generated

    @property
    def is_finished(self) -> bool:
        """Return True if its last token has been sampled."""
        return self.generated == self.output_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring prompt tokens of one request that a step prefills."""

    sequence: Sequence
    slot: int
    start: int  # first token; the tokens before it are its stored prefix. A multiple of page_size · dcp.
    stop: int
    samples: bool  # True if these tokens end the prompt, so that the next token is sampled

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class TableWrite:
    """Write of a request's token locations to the request table."""

    slot: int
    start: int  # first token
    locs: np.ndarray  # int32 virtual locations of the tokens from `start` on


@dataclasses.dataclass(slots=True)
class ReplicaStep:
    """Work of one attention replica in a step. Rows: decodes first, then the tokens of the chunks."""

    decodes: list[Sequence] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)  # slots of the decodes
    positions: list[int] = dataclasses.field(default_factory=list)  # index per decode of its token read and KV written
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    table: list[TableWrite] = dataclasses.field(default_factory=list)  # request table writes due before the step runs
    discarded: list[int] = dataclasses.field(default_factory=list)  # KV tokens per row of an already finished request
    queries: int = 1  # rows of each decode: a known token, and its drafts behind it
    accepted: list[int] = dataclasses.field(default_factory=list)  # drafts per decode, even past its end; or empty
    delivered: list[int] = dataclasses.field(default_factory=list)  # tokens per decode; empty without drafts (all one)

    @property
    def tokens(self) -> int:
        """Return the number of rows of the step."""
        return (len(self.decodes) + len(self.discarded)) * self.queries + sum(c.tokens for c in self.chunks)

    @property
    def decoded_tokens(self) -> int:
        """Return the number of tokens that decodes yield."""
        return sum(self.delivered) if self.delivered else len(self.decodes)

    @property
    def sampled_sequences(self) -> list[Sequence]:
        """Return the sequences with a sampled token, in the order of rows."""
        if not self.chunks:
            return self.decodes.copy()
        return [*self.decodes, *(c.sequence for c in self.chunks if c.samples)]

    @property
    def emitting_sequences(self) -> list[Sequence]:
        """Return the sequence of each token that the step yields, in the order of rows."""
        if not self.delivered:
            return self.sampled_sequences
        decodes = zip(self.decodes, self.delivered, strict=True)
        return [
            *(sequence for sequence, tokens in decodes for _ in range(tokens)),
            *self.sampled_sequences[len(self.decodes) :],
        ]


@dataclasses.dataclass(slots=True)
class Step:
    """A step of a layout: the simultaneous work of each replica."""

    number: int
    replicas: list[ReplicaStep]
    finished: list[Sequence] = dataclasses.field(default_factory=list)  # sequences with their last token in this step
    preempted: int = 0  # sequences that lost their KV before this step

    @property
    def has_chunks(self) -> bool:
        """Return True if any replica has prompt chunks, in which case the step cannot be replayed as one graph."""
        return any(r.chunks for r in self.replicas)
