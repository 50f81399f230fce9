"""A real Chromium without a window: the system's own, driven by Playwright, which downloads none."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

    Visit = Callable[..., Page]

HERE = Path(__file__).parent
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium was found: apt-get install chromium-headless-shell"
NOTICE = """
addEventListener("securitypolicyviolation", (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI}`));
"""
NO_LIMIT = 0  # disables Playwright's own limits: a busy machine is slow, and pytest ends tests that hang


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, headless. Without one its tests are skipped, except where CI says that nothing may be."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(INSTALL)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A sandbox of its own needs rights that root in a container has not; pages here are ours.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"], timeout=NO_LIMIT)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens a file, or an address below `allowed`, without a network; arguments are those of a browser context.

    `idle` is a script that runs before those of the page, to say when it is idle.

    At the end of the test no page may have asked for anything else, written an error to its console, raised one, or
    violated its policy.
    """
    troubles: list[str] = []
    contexts = []

    def open_page(path: Path, fragment: str = "", *, allowed: str = "file:", idle: str = "", **options: object) -> Page:
        context = browser.new_context(offline=allowed == "file:", **options)  # type: ignore[arg-type]
        context.set_default_timeout(NO_LIMIT)
        context.add_init_script(NOTICE + idle)
        contexts.append(context)
        page = context.new_page()

        def asked(address: str) -> None:
            if not address.startswith((allowed, "data:")):
                troubles.append(f"asked for {address}")

        page.on("request", lambda request: asked(request.url))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(f"raised {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.goto((path.absolute().as_uri() if allowed == "file:" else str(path)) + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
