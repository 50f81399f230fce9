"""Move the pointer over a mark of a chart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

LOOK_MS = 100  # Plotly samples the pointer every 50 ms, and ignores one that does not move


def point_at(page: Page, mark: Locator) -> None:
    """Hold the pointer over a mark until the page shows a tooltip, following the mark if it moves. Charts adjust to
    their width shortly after they are drawn. The pointer starts from the corner of the page, so that it is over no
    other mark before.
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
