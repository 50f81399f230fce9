"""Run a server that reports arbitrary data about itself and its answers, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING

from tests.servers.fake_server import Running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.fake_server import FakeServer


@contextlib.contextmanager
def run_in_thread(server: FakeServer) -> Iterator[str]:
    """Serve in a separate event loop inside the block, and yield the address."""
    loop, ready, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def serve() -> None:
        running = Running()
        running.server = server
        async with running:
            urls.append(running.url)
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait(30)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(30)
        loop.close()
