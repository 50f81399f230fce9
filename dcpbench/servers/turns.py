"""Sessions over HTTP: what a client sends once the turn before has been answered, its answer and all before included."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.servers.load import Call
from dcpbench.servers.prompts import PATHS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dcpbench.servers.answers import Streamed
    from dcpbench.servers.client import Target
    from dcpbench.servers.prompts import Manner, Prompt
    from dcpbench.serving.requests import ServeRequest


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """The turns to come of one session."""

    target: Target
    manner: Manner
    before: ServeRequest
    """The turn whose answer is waited for."""
    said: Prompt
    """Its prompt."""
    left: tuple[ServeRequest, ...]
    think_s: float

    @property
    def texts(self) -> bool:
        """Whether answers have to be kept as text."""
        return self.manner.text is not None

    def next_call(self, answer: Streamed) -> Call:
        """The next turn, by what the server answered."""
        request, *later = self.left
        new = request.prompt[len(self.before.prompt) + self.before.output_tokens :]
        said = self.manner.prolonged(self.said, answer, self.before.answer, new)
        session = dataclasses.replace(self, before=request, said=said, left=tuple(later)) if later else None
        return _call(self.target, self.manner, request, said, session)


def calls(target: Target, manner: Manner, requests: Sequence[ServeRequest], think_s: float) -> list[Call]:
    """The first request of each session, with the session's others behind it; or the only one."""
    found = []
    for first, *later in _by_session(requests):
        said = manner.prompt(first.prompt)
        session = Session(target, manner, first, said, tuple(later), think_s) if later else None
        found.append(_call(target, manner, first, said, session))
    return found


def _call(target: Target, manner: Manner, request: ServeRequest, said: Prompt, session: Session | None) -> Call:
    data = target.request("POST", PATHS[manner.endpoint], manner.body_of(said, request.output_tokens))
    return Call(request.number, data, request.output_tokens, request.arrival_s, session)


def _by_session(requests: Sequence[ServeRequest]) -> Iterator[list[ServeRequest]]:
    session: list[ServeRequest] = []
    for request in requests:
        if session and not request.turn:
            yield session
            session = []
        session.append(request)
    yield session
