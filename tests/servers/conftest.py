"""Hide the event loop of a browser, so that servers and clients of these tests can run their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def no_loop_is_running() -> Iterator[None]:
    """Hide the running event loop that a browser driven from this process keeps, because no other
    could run otherwise.
    """
    held = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(held)
