"""Tests of tools/emulation_check.py: compared phases of an emulated rank, and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from tests.unit import record_builder as build
from tools import emulation_check as check

if TYPE_CHECKING:
    from dcpbench.records.record import Record


def make_step(layout: Layout, **phase_us: float) -> Record:
    """Return a point with these phases and without idle time."""
    step_us = sum(phase_us.values())
    record = build.make_ok_record(
        build.make_point(layout, ep="tp" if layout.dp > 1 else "1"), median_ms=step_us / 1e3, noise=0
    )
    assert record.phases is not None
    phases = msgspec.structs.replace(record.phases, phase_us=phase_us, step_us=step_us)
    return msgspec.structs.replace(record, phases=phases)


def test_step_and_phases_are_compared_with_published_ones() -> None:
    then = make_step(Layout(4, 1, 4), qkv_proj=2000, attention=1000, moe=9000, q_gather=100, merge=300, embed=10)
    now = make_step(Layout(4, 1, 4), qkv_proj=1980, attention=1030, moe=9270, q_gather=130, merge=290, embed=10)
    found = check.compare(then, now)
    assert found["step"] == pytest.approx((1980 + 1030 + 9270 + 420 + 10) / 12_410)
    assert found["exchange"] == pytest.approx(420 / 400)
    assert found["phases"]["moe"] == pytest.approx(1.03)
    assert found["phases"]["qkv_proj"] == pytest.approx(0.99)
    assert "embed" not in found["phases"], "0.1 % of a step is not judged"


def test_expert_parallel_experts_are_judged_together_with_their_wait() -> None:
    """The emulated rank has most of the experts: 3 ms more, for which the other ranks of the four waited."""
    then, now = (
        make_step(Layout(4, 4), moe=moe, mlp_reduce=wait, attention=1000)
        for moe, wait in ((11_000, 3200), (14_100, 400))
    )
    found = check.compare(then, now)
    assert found["phases"].keys() == {"experts", "attention", "mlp_reduce"}
    assert found["phases"]["experts"] == pytest.approx(14_500 / 14_200)
    lines, held = check.judge_rows([found])
    assert not held, "there is no exchange to judge"
    assert lines[0] == "phases without calls: 100% of 2 within 5%; not: none"


@pytest.mark.parametrize(("wrong", "holds"), [(1, True), (2, False)])
def test_nine_of_ten_points_must_be_within_the_limit(wrong: int, holds: bool) -> None:
    then = make_step(Layout(4, 1, 4), attention=1000, moe=9000, q_gather=100, merge=300)
    late = make_step(Layout(4, 1, 4), attention=1000, moe=9000, q_gather=160, merge=300)
    rows = [check.compare(then, late if i < wrong else then) for i in range(10)]
    lines, held = check.judge_rows(rows)
    assert held is holds
    assert lines[1].startswith(f"exchange: {10 - wrong}0% of 10 within 10%; not: kimi-k2 tp4·dcp4 ag_rs ")
