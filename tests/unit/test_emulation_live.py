"""tools/emulation_live.py: how points of both runs find each other, and what its table calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from dcpbench.points.layout import Layout
from tests.unit import record_builder as build
from tools import emulation_live

if TYPE_CHECKING:
    from dcpbench.points.point import Point
    from dcpbench.records.record import Record


def point(layout: Layout, ep: str, emulate: str = "") -> Point:
    return msgspec.structs.replace(build.point(layout, ep=ep), dtype="bf16", emulate=emulate)


def step(ep: str, ms: float, emulate: str = "") -> Record:
    """tp2 with experts placed so, live or emulated."""
    record = build.ok(point(Layout(2), ep, emulate))
    assert record.metrics is not None
    metrics = msgspec.structs.replace(
        record.metrics, step_ms=msgspec.structs.replace(record.metrics.step_ms, median=ms)
    )
    return msgspec.structs.replace(record, metrics=metrics, phases=None)


def test_cut_and_whole_experts_of_a_layout_are_two_rows_with_names_of_their_own() -> None:
    """20 → 19.1 ms with cut ones, which is usual and not said; 25 → 26.5 ms with whole ones is 6 %, past the bar of 5."""
    live = [step("1", 20), step("tp", 25)]
    emulated = [step("tp", 26.5, "h200"), step("1", 19.1, "h200")]
    *_, cut, whole, _, said = emulation_live.table(emulation_live.pairs(live, emulated))
    assert cut == "| kimi-k2 tp2 bf16/bf16, 8 × 4,000 | 20.00 | 19.10 | -4.5% |  |"
    assert whole == "| kimi-k2 tp2 ep2 bf16/bf16, 8 × 4,000 | 25.00 | 26.50 | +6.0% |  |"
    assert said == "1 of 2 within 5%."


def test_whole_experts_are_usual_with_attention_dp_and_cut_ones_are_said() -> None:
    whole, cut = (point(Layout(2, 2), ep) for ep in ("tp", "1"))
    assert "ep" not in emulation_live.name(whole)
    assert "tp2·dp2·ep1 bf16/bf16" in emulation_live.name(cut)
