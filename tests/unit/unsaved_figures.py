"""Make the figures of reports without rendering them, which is nearly all of the time of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports import plots

if TYPE_CHECKING:
    from pathlib import Path

    import pytest
    from matplotlib.figure import Figure

SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def leave_figures_unsaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every figure file by an empty picture, for tests of a report's text."""

    def save(_: Figure, path: Path, *formats: str) -> list[Path]:
        paths = [path.with_suffix(f".{form}") for form in formats]
        for target in paths:
            target.write_text(SVG)
        return paths

    monkeypatch.setattr(plots, "save_figure", save)
