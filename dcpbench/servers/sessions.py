"""Sessions over HTTP: each turn's prompt holds all earlier turns, the server's own answers included."""

from __future__ import annotations

import dataclasses
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
    """The later turns of one session."""

    target: Target
    prompt_format: PromptFormat
    request: ServeRequest  # the turn that is being answered
    prompt: Prompt  # of that turn
    left: tuple[ServeRequest, ...]
    earlier: Mapping[
        int, tuple[ServeRequest, Prompt, StreamReply]
    ]  # answered turns that later ones continue, by number

    @property
    def needs_text(self) -> bool:
        """Return True if answers have to be kept as text."""
        return self.prompt_format.text is not None

    def make_next_call(self, answer: StreamReply) -> Call:
        """Return the next turn, after this answer to the turn before it."""
        request, *later = self.left
        answered = {**self.earlier, self.request.number: (self.request, self.prompt, answer)}
        assert request.parent is not None
        parent, asked, reply = answered[request.parent]
        new = request.prompt[parent.prompt_tokens + parent.output_tokens :]
        prompt = self.prompt_format.make_next_prompt(asked, reply, parent.answer, new)
        needed = {turn.parent for turn in later}
        earlier = {number: turn for number, turn in answered.items() if number in needed}
        session = (
            dataclasses.replace(self, request=request, prompt=prompt, left=tuple(later), earlier=earlier)
            if later
            else None
        )
        return _make_call(self.target, self.prompt_format, request, prompt, session)


def make_calls(target: Target, prompt_format: PromptFormat, requests: Sequence[ServeRequest]) -> list[Call]:
    """Return the first request of each session, which holds the session's other turns."""
    found = []
    for first, *later in _group_by_session(requests):
        prompt = prompt_format.make_prompt(first.prompt)
        session = Session(target, prompt_format, first, prompt, tuple(later), {}) if later else None
        found.append(_make_call(target, prompt_format, first, prompt, session))
    return found


def _make_call(
    target: Target, prompt_format: PromptFormat, request: ServeRequest, prompt: Prompt, session: Session | None
) -> Call:
    """Return the call of a request. The ids of its answer are requested only if a later turn's prompt holds them."""
    body = prompt_format.encode_prompt_body(prompt, request.output_tokens, ids=session is not None)
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
