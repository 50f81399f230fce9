"""compare/gate.py: rules of --fail-on that no compared point has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpbench.compare import gate
from tests.unit import record_builder as build
from tests.unit.compare_builder import compared

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("rules", "fails"), [("ttft_p99:5%", False), ("ttft_p99:5%,undecided", True)])
def test_a_rule_that_guards_nothing_is_undecided_and_never_passes(tmp_path: Path, rules: str, fails: bool) -> None:
    """Decode has no TTFT: nothing proves that it is worse, and nothing that it is not."""
    p = build.point()
    found = compared(tmp_path, [build.ok(p)], [build.ok(p)])
    gate.apply(found, gate.read_rules(rules))
    assert [f.rule for f in found.findings] == ["ttft_p99:5%"]
    assert found.findings[0].status == ("fails" if fails else "undecided")
    assert bool(found.fails) is fails
