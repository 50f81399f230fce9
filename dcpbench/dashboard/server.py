"""The server of `dcpbench dashboard serve`: the site on this machine alone, and what runs are at work. Needs starlette.

A browser lets any web page ask 127.0.0.1. Therefore only requests that name this machine as their host are answered,
nothing but GET and HEAD does anything, and answers forbid other pages to use them.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dcpbench.dashboard import data, pages, running, site

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dcpbench.dashboard.watching import Watcher

HOSTS = ("127.0.0.1", "localhost")
STATIC, LIVE = 'data-live="no"', 'data-live="yes"'
HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
    # Pages carry their own policy for scripts; both hold at once.
    b"content-security-policy": b"frame-ancestors 'none'; base-uri 'none'; form-action 'none'; object-src 'none'",
}
FOREVER = b"private, max-age=31536000, immutable"
"""For files whose name holds a digest of what they say."""


def make_app(watcher: Watcher) -> Starlette:
    """The application that shows the watcher's site."""

    async def first(_: Request) -> Response:
        text = await anyio.Path(watcher.site / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace(STATIC, LIVE, 1))

    async def live(_: Request) -> Response:
        jobs = await anyio.to_thread.run_sync(running.working, watcher.root)
        index = await anyio.to_thread.run_sync(site.index, watcher.site)
        return JSONResponse({"index": index, "jobs": [dataclasses.asdict(job) for job in jobs], "note": watcher.note})

    async def no_icon(_: Request) -> Response:
        return Response(status_code=204)  # browsers ask, whatever a page says

    routes = [Route("/", first), Route("/index.html", first), Route("/live.json", live), Route("/favicon.ico", no_icon)]
    return Starlette(
        routes=[*routes, Mount("/", _Files(watcher))],
        middleware=[
            Middleware(_Headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
        ],
    )


class _Files(StaticFiles):
    """The site's files; links that lead out of it are not followed."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(directory=watcher.site, follow_symlink=False)
        self._watcher = watcher

    async def get_response(self, path: str, scope: Scope) -> Response:
        """A file; that of a run after its page is made."""
        folder, _, rest = path.partition("/")
        if folder == pages.FOLDER and scope["method"] in ("GET", "HEAD"):
            note = await anyio.to_thread.run_sync(self._watcher.page, rest.partition("/")[0])
            if note:
                return PlainTextResponse(note, status_code=404)
        return await super().get_response(path, scope)


class _Headers:
    """Adds what keeps browsers from doing more with an answer than showing it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; every answer, errors too, gets the headers."""
        kept = scope.get("path", "").startswith(f"/{data.FOLDER}/")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cached = FOREVER if kept and message["status"] == 200 else b"no-store"  # noqa: PLR2004 - OK
                given = [(name, value) for name, value in message.get("headers", []) if name.lower() not in HEADERS]
                message["headers"] = [*given, *HEADERS.items(), (b"cache-control", cached)]
            await send(message)

        await self._app(scope, receive, with_headers)
