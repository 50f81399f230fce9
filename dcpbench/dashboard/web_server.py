"""Serve the site of `dcpbench dashboard serve` and the state of current runs, on loopback only. Needs starlette.

A browser lets any web page send requests to 127.0.0.1. Therefore a request must name this machine as its host, only
GET and HEAD are handled, and the headers of responses forbid other pages to use them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
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
FOREVER = b"private, max-age=31536000, immutable"  # for files that have a digest of their content in their name


def make_app(watcher: Watcher) -> Starlette:
    """Return the application that serves the watcher's site."""

    async def send_index(_: Request) -> Response:
        text = await anyio.Path(watcher.site / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace(STATIC, LIVE, 1))

    runs = running.RunningRuns(watcher.root)

    async def send_live_state(_: Request) -> Response:
        states = await anyio.to_thread.run_sync(runs.read_states)
        index = await anyio.to_thread.run_sync(site.read_index_path, watcher.site)
        return JSONResponse({"index": index, "jobs": [*map(running.render_job, states)], "note": watcher.note})

    async def send_no_icon(_: Request) -> Response:
        return Response(status_code=204)  # browsers request it for every page

    routes = [
        Route("/", send_index),
        Route("/index.html", send_index),
        Route("/live.json", send_live_state),
        Route("/favicon.ico", send_no_icon),
    ]
    return Starlette(
        routes=[*routes, Mount("/", _Files(watcher))],
        middleware=[
            Middleware(_Headers),
            Middleware(_TrustedHost, allowed_hosts=list(HOSTS), www_redirect=False),
        ],
    )


class _TrustedHost(TrustedHostMiddleware):
    """Refuse requests to other hosts, ignoring case: Starlette before 1.9 compares host names with case."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its host in lower case."""
        if "headers" in scope:
            headers = [(name, value.lower() if name == b"host" else value) for name, value in scope["headers"]]
            scope = {**scope, "headers": headers}
        await super().__call__(scope, receive, send)


class _Files(StaticFiles):
    """Serve the site's files; links that lead out of the site are not followed."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(directory=watcher.site, follow_symlink=False)
        self._watcher = watcher

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file; the page of a run is made first. Raises HTTPException 404 if the path holds a NUL byte."""
        if "\0" in path:  # Starlette before 1.0 passes it to the file system, which raises ValueError
            raise HTTPException(404)
        folder, _, rest = path.partition("/")
        if folder == pages.FOLDER and scope["method"] in ("GET", "HEAD"):
            note = await anyio.to_thread.run_sync(self._watcher.make_page, rest.partition("/")[0])
            if note:
                return PlainTextResponse(note, status_code=404)
        return await super().get_response(path, scope)


class _Headers:
    """Add the headers that forbid browsers any use of a response except to show it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on and add the headers to its response, errors included."""
        kept = scope.get("path", "").startswith(f"/{data.FOLDER}/")

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                cached = FOREVER if kept and message["status"] == 200 else b"no-store"  # noqa: PLR2004 - OK
                given = [(name, value) for name, value in message.get("headers", []) if name.lower() not in HEADERS]
                message["headers"] = [*given, *HEADERS.items(), (b"cache-control", cached)]
            await send(message)

        await self._app(scope, receive, send_with_headers)
