"""tools/routing_check.py: forecasts of steps with a routing, and the printed table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.layout import Layout
from tests.unit import record_builder as build
from tools import routing_check

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.records.record import Record


def make_record(ms: float, routing: str, hit: float) -> Record:
    """Return a step of V3 on tp2 with 32 requests of 4,000 tokens."""
    point = build.make_point(
        Layout(2),
        model="deepseek-v3",
        concurrency=32,
        context=4000,
        routing=routing,
        ep="1",
        dtype="bf16",
        weights_dtype="fp8",
    )
    record = build.make_ok_record(point, median_ms=ms, noise=0.0)
    assert record.conditions is not None
    return msgspec.structs.replace(
        record, conditions=msgspec.structs.replace(record.conditions, experts_hit=hit, graph_batch=32)
    )


def test_skewed_step_is_forecast_shorter_as_it_reads_fewer_experts() -> None:
    """A step reads 163 of 256 experts with even routing, and 78 with zipf:1.25."""
    even, skewed = (routing_check.compare_record(make_record(30.0, *of)) for of in (("", 0.64), ("zipf:1.25", 0.3)))
    assert even is not None
    assert skewed is not None
    assert (even.expected, skewed.expected) == (163, 78)
    assert (even.experts, skewed.experts) == pytest.approx((163.8, 76.8), rel=0.01)
    assert 0.5 < skewed.forecast_ms / even.forecast_ms < 0.8
    assert even.band_ms[0] < even.forecast_ms < even.band_ms[1]


@pytest.mark.parametrize(("ms", "code"), [(None, 0), (500.0, 1)], ids=["inside", "outside"])
def test_exit_code_is_1_if_a_step_is_outside_its_band(
    ms: float | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast = routing_check.compare_record(make_record(30.0, "zipf:1", 0.4))
    assert forecast is not None
    build.write_records(tmp_path / "run", [make_record(ms or forecast.forecast_ms, "zipf:1", 0.4)])
    monkeypatch.setattr(sys, "argv", ["routing_check", str(tmp_path / "run")])
    assert routing_check.main() == code
    printed = capsys.readouterr().out
    assert "| tp2·ep1 | 32 × 4,000 | zipf:1 | 102.4 | 100 |" in printed
    assert ("missed" in printed) == bool(code)
    assert f"{1 - code} of 1 steps are inside" in printed


def test_run_without_steps_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build.write_records(tmp_path / "run", [build.make_failed_record(build.make_point(Layout(2)))])
    monkeypatch.setattr(sys, "argv", ["routing_check", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        routing_check.main()
    assert end.value.code == 2
    assert "no run has a decode step" in capsys.readouterr().err
