"""Send an ASGI application exactly the request of a test, without a client that normalises the path or the headers."""

from __future__ import annotations

import dataclasses
import json as json_module
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import anyio

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Answer:
    """Hold the response."""

    status_code: int
    headers: dict[str, str]
    content: bytes

    @property
    def text(self) -> str:
        """Return the body as text."""
        return self.content.decode()

    def json(self) -> Any:
        """Return the body as JSON."""
        return json_module.loads(self.content)


class Client:
    """Send requests from the machine of the server."""

    def __init__(self, app: Any, host: str) -> None:
        self._app = app
        self._host = host

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Send a GET request."""
        return self.request("GET", path, headers)

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request; `path` is sent unchanged, percent signs and dots included."""
        sent = {"host": self._host} | dict(headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8321),
        }
        with ThreadPoolExecutor(1) as apart:  # Playwright leaves a loop at work in the thread of browser tests
            return apart.submit(anyio.run, self._ask, scope).result()

    async def _ask(self, scope: dict[str, Any]) -> Answer:
        messages: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        await self._app(scope, receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in messages[0]["headers"]}
        body = b"".join(m.get("body", b"") for m in messages[1:])
        return Answer(messages[0]["status"], headers, body)
