"""compare/fail_on.py: rules of --fail-on that no compared point has, and limits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dcpbench.compare import fail_on
from tests.unit import record_builder as build
from tests.unit.compare_builder import compare_records

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("rules", "fails"), [("ttft_p99:5%", False), ("ttft_p99:5%,undecided", True)])
def test_rule_without_a_compared_metric_is_unjudged_and_never_passes(tmp_path: Path, rules: str, fails: bool) -> None:
    """Decode has no TTFT, so that a regression can be neither shown nor excluded."""
    p = build.make_point()
    found = compare_records(tmp_path, [build.make_ok_record(p)], [build.make_ok_record(p)])
    fail_on.apply_rules(found, fail_on.read_rules(rules))
    assert [f.rule for f in found.findings] == ["ttft_p99:5%"]
    assert found.findings[0].status == ("fails" if fails else "unjudged")
    assert bool(found.fails) is fails


@pytest.mark.parametrize("rules", ["undecided", "missing,undecided"])
def test_undecided_rule_fails_exactly_the_undecided_rows(tmp_path: Path, rules: str) -> None:
    """With one launch on each side, scatter between launches leaves times undecided; memory is counted, and it is the
    same.
    """
    p = build.make_point()
    found = compare_records(tmp_path / "level", [build.make_ok_record(p)], [build.make_ok_record(p)])
    fail_on.apply_rules(found, fail_on.read_rules(rules))
    undecided = [row for row in found.points[0].rows if row.verdict == "UNDECIDED"]
    assert undecided
    assert len(undecided) < len(found.points[0].rows)
    assert [f.metric for f in found.fails] == [row.metric for row in undecided]
    assert all((row.gate == "fails") == (row in undecided) for row in found.points[0].rows)


@pytest.mark.parametrize(
    ("rule", "a", "higher", "limit"),
    [
        ("tok_s:2%", 100.0, True, math.log(1.02)),
        ("tok_s:+10", 100.0, True, math.log(100 / 90)),
        ("tok_s:+100", 100.0, True, math.inf),
        ("itl_p50:+10", 100.0, False, math.log(1.1)),
    ],
)
def test_limit_of_a_rate_is_the_ratio_of_times(rule: str, a: float, higher: bool, limit: float) -> None:
    """100 tok/s that become 90 take 100 / 90 of the time; 100 ms that become 110 take 1.1 of it."""
    (one,) = fail_on.read_rules(rule)
    row = SimpleNamespace(a=a, higher_is_better=higher)
    assert fail_on._compute_limit(row, one) == pytest.approx(limit)  # type: ignore[arg-type]
