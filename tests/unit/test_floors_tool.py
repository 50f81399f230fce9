"""Tests of tools/floors.py: synthetic benches against a synthetic step, computed by hand."""

import msgspec
import pytest

from dcpbench.bench.bench_record import BenchRecord, Case, Graph, Result
from dcpbench.models import load_shape
from dcpbench.points.layout import Layout
from dcpbench.points.roofline import Sharding, StepRows, compute_step_floors, iter_phase_works
from dcpbench.records.record import Floor, Phases, Rates, Record
from tests.unit import record_builder as build
from tests.unit.bench_builder import make_timing
from tools import floors as tool

RATES = Rates(read_bytes_s=4.6e12, copy_bytes_s=4.3e12, matmul_flop_s=790e12, peer_bytes_s=370e9, barrier_us=3.0)


def make_record_with_floors(layout: Layout) -> Record:
    """Return a record of DeepSeek-V3 with 8 requests of 4,000 tokens; each phase takes twice its floor."""
    point = build.make_point(layout, model="deepseek-v3", dtype="bf16")
    sharding = Sharding.from_point(point, load_shape(point.model))
    us = compute_step_floors(sharding, StepRows(decodes=(4001,) * 8, sampled=8, tokens=8), RATES.limits)
    spent = Phases(
        step_us=1, phase_us={n: 2 * f for n, f in us.items()}, idle_us=0, idle_fraction=0, kernels=1, steps=1
    )
    floor = Floor(floor_ms=sum(us.values()) / 1e3, phase_floor_us=us, experts="expected")
    return build.make_ok_record(point, steps=30, phases=spent, rates=RATES, floor=floor)


def make_bench(name: str, *floors_us: float, variant: str = "triton", **sizes: object) -> BenchRecord:
    """Return a bench with calls that take 4/3 of their floors; `product` is set for the two of experts."""
    products = ("gate-up", "down") if name == "moe" else (None,)
    results = [
        Result(
            case=Case(variant=variant, calls=1, sizes={**({"product": p} if p else {}), **sizes}),
            correct=True,
            floor_us=us,
            graph=Graph(time=make_timing(us * 4 / 3)),
        )
        for p, us in zip(products, floors_us, strict=True)
    ]
    return BenchRecord(bench=name, performance=True, results=results)


def test_attention_floor_is_61_bench_calls():
    record = make_record_with_floors(Layout(1))
    each = record.floor.phase_floor_us["attention"] / 61
    (found,) = tool.compare_record(
        record, [make_bench("attention", each, heads=128, requests=8, context=4000, lengths="even")]
    )
    assert found.floor_us == pytest.approx(found.bench_floor_us)
    assert found.agrees
    assert found.step_us == pytest.approx(2 * found.floor_us)
    assert found.bench_us == pytest.approx(found.floor_us * 4 / 3)


def test_expert_floor_is_58_pairs_of_bench_calls():
    record = make_record_with_floors(Layout(1))
    sharding = Sharding.from_point(record.point, load_shape("deepseek-v3"))
    step = StepRows(decodes=(4001,) * 8, sampled=8, tokens=8)
    *_, gate_up, down = [w for phase, _, w in iter_phase_works(sharding, step) if phase == "moe"]
    each = [work.memory_bytes / RATES.read_bytes_s * 1e6 for work in (gate_up, down)]
    sizes = {"experts": 256, "top_k": 8, "hidden": 7168, "width": 2048, "requests": 8, "rows": "uniform"}
    (found,) = tool.compare_record(record, [make_bench("moe", *each, **sizes)])
    assert found.floor_us == pytest.approx(found.bench_floor_us)
    assert str(found).startswith("moe")


def test_exchange_and_all_reduce_are_compared_per_layer():
    record = make_record_with_floors(Layout(4, 1, 4))
    us = record.floor.phase_floor_us
    exchange = make_bench(
        "exchange", (us["q_gather"] + us["merge"]) / 61, heads=128, requests=8, ranks=4, value=512, q="gathered"
    )
    total = make_bench("collectives", us["attn_reduce"] / 61, variant="all-reduce", requests=8, width=7168, ranks=4)
    assert [(c.operator, c.agrees) for c in tool.compare_record(record, [exchange, total])] == [
        ("exchange", True),
        ("collectives", True),
    ]


def test_bench_more_than_5_percent_off_differs_and_exits_with_1(tmp_path, capsys):
    record = make_record_with_floors(Layout(1))
    each = record.floor.phase_floor_us["attention"] / 61
    (tmp_path / "benches").mkdir()
    for factor, code in ((1.04, 0), (1.06, 1)):
        record_of_bench = make_bench("attention", factor * each, heads=128, requests=8, context=4000, lengths="even")
        (tmp_path / "benches" / "bench-attention.json").write_bytes(msgspec.json.encode(record_of_bench))
        run = build.write_records(tmp_path / f"run{code}", [record])
        assert tool.main([str(run), str(tmp_path / "benches")]) == code
        assert ("DIFFERS" in capsys.readouterr().out) == bool(code)


def test_other_sizes_are_not_compared_and_no_comparison_exits_with_1(tmp_path, capsys):
    record = make_record_with_floors(Layout(1))
    record_of_bench = make_bench("attention", 1.0, heads=64, requests=8, context=4000, lengths="even")
    assert list(tool.compare_record(record, [record_of_bench])) == []
    (tmp_path / "bench-attention.json").write_bytes(msgspec.json.encode(record_of_bench))
    assert tool.main([str(build.write_records(tmp_path / "run", [record])), str(tmp_path)]) == 1
    assert "No operator can be compared" in capsys.readouterr().out
