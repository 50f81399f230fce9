"""Sessions over HTTP: each turn's prompt holds all earlier turns, the server's own answers included."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from dcpbench.servers.load import Call
from dcpbench.servers.prompt_format import PATHS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dcpbench.servers.answers import StreamReply
    from dcpbench.servers.client import Target
    from dcpbench.servers.prompt_format import Prompt, PromptFormat
    from dcpbench.serving.requests import ServeRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """The later turns of one session; the requests of a turn are sent at the same time."""

    target: Target
    prompt_format: PromptFormat
    pending: Mapping[int, tuple[ServeRequest, Prompt]]  # the turn that is being answered, by the number of the request
    left: tuple[tuple[ServeRequest, ...], ...]  # requests of each later turn
    earlier: Mapping[int, tuple[ServeRequest, Prompt, StreamReply]]  # answered requests that are continued, by number

    @property
    def requests(self) -> int:
        """Return the number of requests of later turns."""
        return sum(map(len, self.left))

    def keeps_text(self, number: int) -> bool:
        """Return True if the answer to this request has to be kept as text, because a later prompt holds it."""
        return self.prompt_format.text is not None and number in _list_continued(self.left)

    def compute_due_s(self, answered_s: float) -> list[float]:
        """Return when each request of the next turn is due, if the last answer before it ended at `answered_s`."""
        return [request.compute_due_s(answered_s) for request in self.left[0]]

    def make_next_calls(self, answers: Mapping[int, StreamReply]) -> list[Call]:
        """Return the requests of the next turn, after these answers to the turn before it, by the number of the request."""
        requests, *later = self.left
        answered = {**self.earlier} | {n: (*self.pending[n], answer) for n, answer in answers.items()}
        pending: dict[int, tuple[ServeRequest, Prompt]] = {}
        for request in requests:
            assert request.parent is not None
            parent, prompt, reply = answered[request.parent]
            new = request.prompt[parent.prompt_tokens + parent.output_tokens :]
            pending[request.number] = request, self.prompt_format.make_next_prompt(prompt, reply, parent.answer, new)
        needed = _list_continued(later)
        earlier = {number: turn for number, turn in answered.items() if number in needed}
        session = dataclasses.replace(self, pending=pending, left=tuple(later), earlier=earlier) if later else None
        return [_make_call(self.target, self.prompt_format, *one, session) for one in pending.values()]


def _list_continued(turns: Sequence[Sequence[ServeRequest]]) -> set[int | None]:
    """Return the numbers of the requests that these turns continue."""
    return {request.parent for turn in turns for request in turn}


def make_calls(target: Target, prompt_format: PromptFormat, requests: Sequence[ServeRequest]) -> list[Call]:
    """Return the first request of each session, which holds the session's other turns."""
    found = []
    for first, *later in _group_by_session(requests):
        prompt = prompt_format.make_prompt(first.prompt)
        turns = tuple(tuple(turn) for _, turn in itertools.groupby(later, key=lambda request: request.turn))
        session = Session(target, prompt_format, {first.number: (first, prompt)}, turns, {}) if later else None
        found.append(_make_call(target, prompt_format, first, prompt, session))
    return found


def _make_call(
    target: Target, prompt_format: PromptFormat, request: ServeRequest, prompt: Prompt, session: Session | None
) -> Call:
    """Return the call of a request. The ids of its answer are requested only if a later turn's prompt holds them."""
    continued = session is not None and request.number in _list_continued(session.left)
    body = prompt_format.encode_prompt_body(prompt, request.output_tokens, ids=continued)
    data = target.encode_request("POST", PATHS[prompt_format.endpoint], body)
    return Call(
        request.number,
        data,
        request.output_tokens,
        request.arrival_s,
        session,
        prompt_tokens=max(len(prompt) if prompt_format.text is None else 0, request.prompt_tokens),
    )


def _group_by_session(requests: Sequence[ServeRequest]) -> Iterator[list[ServeRequest]]:
    session: list[ServeRequest] = []
    for request in requests:
        if session and not request.turn:
            yield session
            session = []
        session.append(request)
    yield session
