"""A pointer over a mark of a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

LOOK_MS = 100  # Plotly looks at a pointer every 50 ms, and not at one that stays


def point_at(page: Page, mark: Locator) -> None:
    """Hold the pointer over a mark until the page says something of it, wherever the mark moves meanwhile.

    Charts fit their width a moment after they are drawn. The pointer comes from the corner of the page, so that it is
    over no other mark before.
    """
    mark.evaluate("element => element.scrollIntoView({block: 'center', behavior: 'instant'})")
    tip, at = page.locator(".tip"), None
    while at is None or at != mark.bounding_box():
        page.mouse.move(0, 0)
        while tip.is_visible():
            page.wait_for_timeout(LOOK_MS)
        at = mark.bounding_box()
        assert at
        aside = 0
        while not tip.is_visible() and at == mark.bounding_box():
            page.mouse.move(at["x"] + at["width"] / 2 + aside, at["y"] + at["height"] / 2)
            page.wait_for_timeout(LOOK_MS)
            aside = 1 - aside
