"""docs/coverage.md is what tools/coverage.py makes of the declarations, and each declared thing has its place in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dcpbench.models import FAMILIES, deepseek_v3
from dcpbench.points.names import WEIGHT_FORMATS
from tools import coverage

if TYPE_CHECKING:
    from dcpbench.models.family import Family

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"


def find_row(table: str, name: str) -> list[str]:
    """Cells of the row that names it, after its names."""
    (row,) = [
        line for line in table.splitlines() if line.startswith("| ") and name in line.split(" | ")[0][2:].split(", ")
    ]
    return row.strip("| ").split(" | ")[1:]


def test_the_page_is_what_the_declarations_make() -> None:
    assert PAGE.read_text(encoding="utf-8") == coverage.render(), "run `python -m tools.coverage -o docs/coverage.md`"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.title)
def test_every_declared_family_has_a_row_in_both_tables(family: Family) -> None:
    """With all its models, and a cell for each declared weight format."""
    _, models, layouts, _ = PAGE.read_text(encoding="utf-8").split("\n## ")
    kind, names, *cells = find_row(models, family.title)
    assert kind == f"`{family.model_type}`"
    assert all(f"`{name}`" in names for preset in family.presets for name in preset.repositories)
    assert len(cells) == 1 + len(WEIGHT_FORMATS)
    assert len(find_row(layouts, family.title)) == len(coverage.PARALLEL)


def test_a_family_without_a_row_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    new = dataclasses.replace(deepseek_v3.FAMILY, title="Another", model_type="another")
    monkeypatch.setattr(coverage, "FAMILIES", (*FAMILIES, new))
    assert PAGE.read_text(encoding="utf-8") != coverage.render()


def test_a_letter_stands_for_what_the_planner_takes() -> None:
    """fp8 V3 in all ways; nvfp4 is planned alone; grouped-query attention has no DCP within its 8 KV heads."""
    v3 = {"tp": 8, "dcp": 1}
    assert coverage.list_letters("deepseek-v3", v3) == "LREPS"
    assert coverage.list_letters("deepseek-v3", v3 | {"weights_dtype": "nvfp4"}) == "P"
    assert coverage.list_letters("llama-3.1-70b", {"tp": 8, "dcp": 2}) == ""
    assert coverage.find_best([], coverage.WHOLE_MODEL) == coverage.UNKNOWN
    assert coverage.find_best(["llama-3.1-70b"], [{"tp": 8, "dcp": 2}]) == coverage.NONE
    assert not coverage.is_planned("deepseek-v3", served=True, tp=8, dcp=1, concurrency=8, policy="vllm")
    assert coverage.is_planned("deepseek-v3", served=True, tp=8, dcp=1, concurrency=8, policy="vllm", mode="replay")
