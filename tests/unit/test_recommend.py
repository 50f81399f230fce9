"""`dcpbench recommend`: estimates, the rule of what is ahead, scores, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shlex
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from dcpbench.cli import main
from dcpbench.commands import recommend as command
from dcpbench.commands.recommend import ANSWERS
from dcpbench.errors import RecordsError, UsageError
from dcpbench.models import load_shape
from dcpbench.models.weight_formats import FORMATS
from dcpbench.plan import validate
from dcpbench.plan.serve_spec import get_serve_defaults
from dcpbench.plan.spec import make_planned_probe
from dcpbench.plan.validate import find_shortage
from dcpbench.points.cluster_specs import load_machine
from dcpbench.points.comm_model import CallTime
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout, list_valid_layouts
from dcpbench.points.point import Load as PointLoad
from dcpbench.points.point import Point
from dcpbench.points.roofline import Sharding, StepRows
from dcpbench.points.settings import Settings
from dcpbench.points.step_calls import predict_calls
from dcpbench.recommend import advise, answer_formats, answer_table, estimate, parallel
from dcpbench.recommend import layout_choice as choosing
from dcpbench.recommend.capacity import Capacity
from dcpbench.recommend.forecast import EMULATED, ESTIMATED, MEASURED, Estimator, Forecast, apply_factor, from_record
from dcpbench.recommend.score import Load, Score, compute_score
from dcpbench.records.record import Percentiles
from dcpbench.records.runs import read_run
from dcpbench.records.stats import REPEATS_AGREE_WITHIN
from dcpbench.servers.presets import PRESETS
from dcpbench.serving.load_words import is_lock_step
from dcpbench.serving.loads import compute_extent, make_point_requests
from dcpbench.show import terminal
from tests.unit import record_builder, serve_record_builder, step_times_builder
from tools import recommend_check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dcpbench.serving.step_times import StepTimes

ROOT = Path(__file__).parents[2]
DECODED = ROOT / "results" / "decode_4xH200/decode-deepseek-v3-kimi-k2_4xH200_2026-11-20" / "run1"


def make_point(**given: object) -> Point:
    """Return a decode point of DeepSeek-V3."""
    defaults = {
        "model": "deepseek-v3",
        "tp": 4,
        "ep": "1",
        "concurrency": 32,
        "context": 4000,
        "backend": "flashinfer",
        "dtype": "bf16",
        "page_size": 64,
    }
    return Point(**(defaults | given))  # type: ignore[arg-type]


def make_forecast(
    tok_s: float, source: str = ESTIMATED, comm: dict[str, float] | None = None, **fields: object
) -> Forecast:
    """Return a forecast with a band of 10 %, and 4 % for ratios."""
    return Forecast(
        point=make_point(**fields),
        source=source,
        basis="",
        tok_s=tok_s,
        low=tok_s / 1.1,
        high=tok_s * 1.1,
        ratio_error=0.04,
        comm_errors=comm or {},
    )


def test_fit_recovers_the_terms_of_steps() -> None:
    """Steps take 3 µs per layer, 2 times the floor of experts and 1.25 times the floor of attention. No part is limited
    by multiplication, so the multiplied parts get the same factors, and so does attention over fp8.
    """
    true = {"launch": 3.0, "experts": 2.0, "attention": 1.25}
    steps = [
        dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, "experts": experts, "attention": attention}
        for experts, attention in ((100.0, 10.0), (500.0, 40.0), (900.0, 800.0), (50.0, 300.0))
    ]
    fitted = recommend_check.fit_terms(
        [(terms, sum(true.get(name, 0) * us for name, us in terms.items())) for terms in steps]
    )
    over_fp8 = ("attention over fp8", "attention over fp8, multiplied")
    others = {"experts, multiplied": 2.0, "attention, multiplied": 1.25} | dict.fromkeys(over_fp8, 1.25)
    assert {name: round(value, 6) for name, value in fitted.items() if value} == true | others


def test_fit_is_the_least_squares_solution_above_floors() -> None:
    """One of two correlated terms alone would get the factor −2; it gets 1, and the other term gets the least squares."""
    steps = [
        (dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 10.0, "experts": 10.0 + more}, 30.0 - 2 * more)
        for more in (0.0, 1.0, 3.0)
    ]
    fitted = recommend_check.fit_terms(steps)
    table = np.array([[terms["launch"] / us, terms["experts"] / us] for terms, us in steps])

    def error(numbers: tuple[float, float]) -> float:
        return float(((table @ np.array(numbers) - 1) ** 2).sum())

    grid = itertools.product(np.linspace(0, 6, 121), np.linspace(1, 6, 101))
    found = fitted["launch"], fitted["experts"]
    assert found[1] == 1.0
    assert error(found) <= min(map(error, grid))


def test_attention_is_fitted_separately_for_each_kv_precision() -> None:
    """Factors over bf16 are 1.25 for reading and 2 for multiplication; over fp8 2.5 for multiplication, which also
    applies to reading.
    """
    true = {"launch": 1.0, "attention": 1.25, "attention, multiplied": 2.0, "attention over fp8, multiplied": 2.5}
    steps = [
        dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, name: us}
        for name, us in itertools.product(list(true)[1:], (50.0, 700.0))
    ]
    fitted = recommend_check.fit_terms(
        [(terms, sum(true.get(name, 0) * us for name, us in terms.items())) for terms in steps]
    )
    assert {name: round(fitted[name], 6) for name in true} == true
    assert fitted["attention over fp8"] == pytest.approx(2.5)


def test_factor_of_multiplication_applies_to_reading_without_steps() -> None:
    """No part takes less time than its floor, even if that fits better."""
    terms = dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 1.0, "linear, multiplied": 10.0}
    fitted = recommend_check.fit_terms([(terms, 26.0), (terms | {"linear, multiplied": 20.0}, 51.0)])
    assert (fitted["launch"], fitted["linear, multiplied"]) == (pytest.approx(1.0), pytest.approx(2.5))
    assert fitted["linear"] == fitted["linear, multiplied"]
    faster = recommend_check.fit_terms([(terms, 6.0), (terms | {"linear, multiplied": 20.0}, 11.0)])
    assert faster["linear, multiplied"] == 1.0


def test_extra_launches_of_older_steps_are_fitted_separately() -> None:
    """Launches take 3 µs per layer, and 2 µs more in the half of the steps that ran with older kernels."""
    steps = [
        (dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, "experts": experts, "launch, older": older})
        for experts, older in ((100.0, 61.0), (500.0, 0.0), (900.0, 61.0), (50.0, 0.0))
    ]
    found = [(terms, 3 * 61.0 + 2 * terms["launch, older"] + 1.5 * terms["experts"]) for terms in steps]
    fitted = recommend_check.fit_terms(found, ["launch, older"])
    assert (fitted["launch"], fitted["launch, older"]) == (pytest.approx(3.0), pytest.approx(2.0))
    assert fitted["experts"] == pytest.approx(1.5)
    assert recommend_check.fit_terms(found)["launch"] > 3.1


def compute_step_terms(
    prompt: int = 0, exchange: str = "none", context: int = 4000, **fields: object
) -> dict[str, float]:
    """Return the terms of a step of 8 requests of this context, or of a prompt, of DeepSeek-V3 on H200."""
    estimator = Estimator(
        make_point(**fields, exchange=exchange), load_machine("H200"), estimate.load_published_steps().terms
    )
    rows = (
        StepRows(chunks=((prompt, 0),), sampled=1, tokens=prompt) if prompt else estimator.make_decode_rows(8, context)
    )
    found = estimate.compute_terms(estimator.sharding, rows, estimator.rates, estimator.comm_model, exchange)
    assert found is not None
    return found


def test_terms_separate_reading_from_multiplication() -> None:
    """A decode step reads its experts and projections, a prompt of 8,192 tokens multiplies them; over fp8 attention of
    128 heads multiplies, of 32 heads it reads.
    """
    decode, prompt = compute_step_terms(weights_dtype="fp8"), compute_step_terms(8192, weights_dtype="fp8")
    for part in ("experts", "linear"):
        assert decode[part] > 0 == decode[f"{part}, multiplied"]
        assert prompt[f"{part}, multiplied"] > 0
    few, many = (
        compute_step_terms(kv_dtype="fp8", context=128000, **more) for more in ({}, {"dcp": 4, "exchange": "symm"})
    )
    assert few["attention over fp8"] > 0 == few["attention over fp8, multiplied"]
    assert many["attention over fp8, multiplied"] > 0 == many["attention over fp8"]
    assert few["attention"] == few["attention, multiplied"] == 0 == decode["attention over fp8"] < decode["attention"]


def test_launches_waits_and_collectives_are_separate_terms() -> None:
    """The model has 61 layers; ranks with expert parallelism wait for each other, fp8 needs more launches, and
    exchanges are separate from other collectives.
    """
    plain, fp8, whole = (
        compute_step_terms(ep="1"),
        compute_step_terms(ep="1", weights_dtype="fp8"),
        compute_step_terms(ep="tp"),
    )
    assert [each["launch"] for each in (plain, fp8, whole)] == [61, 61, 61]
    assert [each["quantising"] for each in (plain, fp8, whole)] == [0, 61, 0]
    assert [each["waiting"] > 0 for each in (plain, fp8, whole)] == [False, False, True]
    with_dcp = compute_step_terms(dcp=4, exchange="symm")
    assert plain["exchanges"] == 0 < with_dcp["exchanges"]
    assert plain["collectives"] == pytest.approx(with_dcp["collectives"])
    assert plain["collectives"] > 0


def test_ranks_with_expert_parallelism_wait_for_the_slowest() -> None:
    """8 tokens with 8 experts each hit 57 of 256, a rank 14.3 ± 3.3 of its 64; the largest of four ranks has 3.5 more,
    in 58 layers. An expert of V3 in bf16 has 88 MB, which 4.8 TB/s read in 18.4 µs. 1,024 tokens hit all experts, so no
    rank waits.
    """
    shape, rates = load_shape("deepseek-v3"), {"read": 4.8e12}
    whole = Sharding(shape=shape, layout=Layout(4), itemsize=2)
    assert estimate.compute_waiting_us(whole, 8, rates) == pytest.approx(58 * 3.5 * 18.35, rel=0.01)
    assert estimate.compute_waiting_us(dataclasses.replace(whole, weights=FORMATS["fp8"]), 8, rates) == pytest.approx(
        29 * 3.5 * 18.35, rel=0.01
    )
    assert estimate.compute_waiting_us(whole, 1024, rates) < 1
    assert estimate.compute_waiting_us(dataclasses.replace(whole, ep=1), 8, rates) == 0


def test_attention_over_fp8_uses_the_bf16_rate_on_gpus_without_fp8() -> None:
    """An A100 with an fp8 cache has floors and estimates; with fp8 weights it has neither."""
    machine = load_machine("A100")
    estimator = Estimator(make_point(kv_dtype="fp8"), machine, estimate.load_published_steps().terms)
    rows = estimator.make_decode_rows(8, 4000)
    found = estimate.compute_terms(estimator.sharding, rows, estimator.rates, estimator.comm_model, "none")
    assert found is not None
    slower = estimate.compute_terms(
        estimator.sharding,
        rows,
        estimator.rates | {"matmul_fp8": 2 * estimator.rates["matmul"]},
        estimator.comm_model,
        "none",
    )
    assert slower is not None
    over_fp8 = ("attention over fp8", "attention over fp8, multiplied")
    assert sum(found[name] for name in over_fp8) >= sum(slower[name] for name in over_fp8) > 0
    fp8 = Estimator(make_point(weights_dtype="fp8"), machine, estimate.load_published_steps().terms)
    assert estimate.compute_terms(fp8.sharding, rows, fp8.rates, fp8.comm_model, "none") is None


def test_attention_dp_is_forecast_with_both_expert_placements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each placement is a row; an expert width that the ranks do not divide leaves only one."""
    query = dataclasses.replace(make_query("H200"), cycled=True, loads=((8, 4000, None),))
    (choice,), _ = advise.choose_layouts(query, advise.Evidence(), estimate.load_published_steps())
    rows = {row.layout: row.experts for row in answer_table.list_rows(choice)}
    assert (rows["tp4·dp4·ep1"], rows["tp4·dp4·ep4"]) == ("tensor parallel", "expert parallel")
    assert rows["tp4"] == "tensor parallel"
    assert answer_formats.format_placements([choice]).startswith(
        "With attention data parallelism, layouts are compared in pairs: expert parallel (ep above 1) with tensor-parallel experts (ep1, the engines' default). "
    )
    assert advise._list_placements(query, Layout(4, 4)) == ["1", "tp"]
    assert advise._list_placements(query, Layout(4)) == ["1"]
    odd = dataclasses.replace(load_shape("deepseek-v3"), moe_intermediate_size=2056, shared_experts=2)
    monkeypatch.setattr(advise, "load_shape", lambda _: odd)
    assert advise._list_placements(query, Layout(16, 16)) == ["tp"], "2,056 / 16 leaves 8"
    assert Layout(16, 16) in advise._list_valid_layouts(query, 16)
    assert Layout(16) not in advise._list_valid_layouts(query, 16)


def test_layout_that_splits_a_scale_block_is_refused_with_a_suggestion() -> None:
    """2,048 / 32 ranks is 64, half of a block of 128, for a tensor-parallel expert and for the shared expert of every
    layout.
    """
    query = dataclasses.replace(make_query("H200+rdma-400"), weights_dtype="fp8", loads=((64, 4000, None),), gpus=(32,))
    (choice,), _ = advise.choose_layouts(query, advise.Evidence(), estimate.load_published_steps())
    assert not choice.forecasts
    assert choice.refused["tp32"].reason == (
        "an expert (64 numbers) of deepseek-v3 on a rank ends inside a block of 128, and kernels take whole blocks; give "
        "--gpus 16, or --weights-dtype bf16"
    )
    assert not choice.refused["tp32"].for_memory
    (wide,), _ = advise.choose_layouts(
        dataclasses.replace(query, weights_dtype="bf16"), advise.Evidence(), estimate.load_published_steps()
    )
    assert "tp32" in {f.label for f in wide.forecasts}


def get_sweep_refusal(one: Point, probe: Probe) -> str:
    """Return the message with which the planner of `sweep` refuses a point, empty if it accepts the point."""
    try:
        validate.check_runnable(one, Settings(), load_shape(one.model), validate.Machine(probe=probe))
    except UsageError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2", "kimi-k2", "deepseek-v2-lite"])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_recommend_refuses_the_layouts_that_sweep_refuses(model: str, weights: str) -> None:
    """Every layout of up to 32 ranks is refused for the same reason; memory is not limited here."""
    query = dataclasses.replace(make_query("H200+rdma-400"), model=model, weights_dtype=weights)
    refused, accepted = 0, 0
    for tp in range(1, 33):
        probe = msgspec.structs.replace(make_planned_probe("H200", 8), count=tp, memory_bytes=1 << 44)
        for layout in advise._list_valid_layouts(query, tp):
            for one in advise._make_points(query, layout, 8, 4000, None):
                found = advise.find_refusal(query, one)
                reason = "" if found is None or found.for_memory else found.reason.partition("; give ")[0]
                message = get_sweep_refusal(one, probe)
                assert bool(message) == bool(reason), one.instance_name
                assert f"{reason}; use " in message or not message
                refused, accepted = refused + bool(message), accepted + (not message)
    assert accepted > 10 or (model, weights) == ("deepseek-v2-lite", "fp8"), (
        "a dense MLP 10,944 wide ends inside a block"
    )
    assert refused > 0 or weights == "bf16"


def test_more_requests_than_the_largest_graph_are_refused() -> None:
    """A decode step of 513 requests has no graph with one replica, but has one with two."""
    query = dataclasses.replace(make_query("H200"), weights_dtype="fp8", loads=((513, 100, None),), gpus=(8,))
    (choice,), _ = advise.choose_layouts(query, advise.Evidence(), estimate.load_published_steps())
    assert choice.refused["tp8"] == advise.Refusal(
        advise.TOO_MANY, "--concurrency 513 is more than tp8 takes, 512 requests (the largest CUDA graph)"
    )
    assert {f.point.dp for f in choice.forecasts} == {2, 4, 8}


def test_fp8_weights_are_refused_on_a_gpu_without_fp8() -> None:
    """An A100 cannot multiply e4m3, in any layout."""
    query = dataclasses.replace(make_query("A100"), weights_dtype="fp8", loads=((8, 4000, None),))
    (choice,), _ = advise.choose_layouts(query, advise.Evidence(), estimate.load_published_steps())
    assert {one.reason for one in choice.refused.values()} == {
        "a GPU with fp8 is needed (compute capability 8.9 or later), and NVIDIA A100-SXM4-80GB has 8.0; give --weights-dtype bf16"
    }


def test_padding_rows_go_through_the_experts() -> None:
    """Six requests on each of four replicas run as eight: 32 rows instead of 24, and take as long."""
    estimator = Estimator(make_point(dp=4, ep="tp"), load_machine("H200"), estimate.load_published_steps().terms)
    six, eight = (estimate.pad_step(estimator.make_decode_rows(n, 4000), 4) for n in (24, 32))
    assert six.tokens == eight.tokens == 32
    assert len(six.decodes) == 8
    assert estimator.estimate_ms(estimator.make_decode_rows(24, 4000)) == pytest.approx(
        estimator.estimate_ms(estimator.make_decode_rows(32, 4000)), rel=0.02
    )


def test_layout_determines_the_kinds_of_collectives() -> None:
    """tp4·dcp4 has two all-reduces and an exchange, tp4·dp4 an all-gather and a reduce-scatter, tp1 none."""
    machine, shape = load_machine("H200"), load_shape("deepseek-v3")

    def list_kinds(**degrees: int) -> set[str]:
        estimator = Estimator(make_point(**degrees, exchange="a2a"), machine, estimate.load_published_steps().terms)
        assert estimator.sharding.shape == shape
        return set(predict_calls(estimator.sharding, estimator.make_decode_rows(8, 4000), estimator.comm_model, "a2a"))

    assert list_kinds(tp=4, dcp=4) == {"all-reduce", "a2a"}
    assert list_kinds(tp=4, dp=4) == {"all-gather", "reduce-scatter"}
    assert list_kinds(tp=1) == set()


def test_collectives_have_the_bytes_of_other_ranks_once_per_layer() -> None:
    """Eight decode rows of V3, 7,168 numbers of 2 bytes, over 4 ranks: an all-reduce receives 2 · 3/4 of them, 172,032
    bytes. An a2a has 128 gathered heads of 8 requests, 3/4 of which come from other ranks: 768 times 576 + 512 numbers
    of 2 bytes and an lse of 4. With `ag_rs`, outputs are fp32 and each rank has the lse of all.
    """
    calls: list[tuple[object, ...]] = []

    def record_call(*call: object) -> CallTime:
        calls.append(call)
        return CallTime(mean=1.0, low=0.5, high=2.0)

    def predict(rows: int, exchange: str, **degrees: int) -> dict[str, CallTime]:
        estimator = Estimator(
            make_point(**degrees, exchange=exchange), load_machine("H200"), estimate.load_published_steps().terms
        )
        calls.clear()
        machine = SimpleNamespace(in_step=SimpleNamespace(predict_seconds=record_call))
        return predict_calls(
            estimator.sharding,
            estimate.pad_step(estimator.make_decode_rows(rows, 4000), degrees.get("dp", 1)),
            machine,
            exchange,
        )

    found = predict(8, "a2a", tp=4, dcp=4)
    assert calls == [("all-reduce", 4, 172_032, 1)] * 2 + [("a2a", 4, 768 * (1152 + 1024 + 4), 2)]
    assert found["all-reduce"] == CallTime(mean=122.0, low=61.0, high=244.0)
    assert found["a2a"] == CallTime(mean=61.0, low=30.5, high=122.0)
    predict(8, "ag_rs", tp=4, dcp=4)
    assert calls[-1] == ("ag_rs", 4, 768 * (1152 + 2048 + 16), 2)
    predict(8, "a2a", tp=4, dcp=2)
    assert calls[-1] == ("a2a", 2, 8 * 64 // 2 * (1152 + 1024 + 4), 2)
    predict(32, "none", tp=4, dp=4)
    assert calls == [(name, 4, 3 * 32 * 14_336 // 4, 1) for name in ("all-gather", "reduce-scatter")]


def test_stored_prefix_is_gathered_from_the_other_ranks() -> None:
    """Half of 1,000 stored tokens, 1,152 bytes each, are on the other of two ranks."""
    estimator = Estimator(
        make_point(tp=2, dcp=2, exchange="a2a"), load_machine("H200"), estimate.load_published_steps().terms
    )
    calls: list[tuple[object, ...]] = []
    alone = SimpleNamespace(predict_seconds=lambda *call: calls.append(call) or CallTime(mean=1.0, low=0.5, high=2.0))
    known = SimpleNamespace(in_step=alone)
    predict_calls(estimator.sharding, StepRows(chunks=((64, 1000), (8, 0)), tokens=72), known, "a2a")
    assert calls == [("all-reduce", 2, 72 * 14_336, 1)] * 2 + [("all-gather", 2, 576_000, 1)]


def test_errors_of_shared_collectives_cancel_in_a_ratio() -> None:
    """The margin is 4 % for ratios, plus 8 − 5 = 3 % for the same kind of collective, or √(25 + 64) % for different
    kinds.
    """
    a = make_forecast(100, comm={"all-reduce": 0.05})
    assert choosing.compute_margin(a, make_forecast(90, comm={"all-reduce": 0.08})) == pytest.approx(0.07)
    assert choosing.compute_margin(a, make_forecast(90, comm={"a2a": 0.08})) == pytest.approx(
        0.04 + (0.05**2 + 0.08**2) ** 0.5
    )


def test_record_and_estimate_within_both_bands_are_undecided() -> None:
    """A lead of 15 % is less than 1.1 · 1.1 − 1 = 21 %; an estimate corrected by records only has the 4 % of ratios."""
    measured, estimated = make_forecast(115, MEASURED), make_forecast(100)
    assert not choosing.is_ahead(measured, estimated)
    assert choosing.is_ahead(dataclasses.replace(measured, low=115, high=115), apply_factor(estimated, 1.0))


def test_price_includes_all_gpus_of_a_layout() -> None:
    """4 GPUs at $3.6 an hour and 1,000 tok/s: 14.4 / 3.6 million tokens is $4 per million."""
    mean, low, high = choosing.compute_price(3.6, make_forecast(1000))
    assert (round(mean, 6), low < mean < high) == (4.0, True)


def test_score_counts_picks_within_three_percent_and_the_best_constant() -> None:
    """The pick is 2 % behind the best for the first load and 20 % for the second; always picking b is right for both."""
    found = Score(
        loads=[
            Load(name="x", measured={"a": 98, "b": 100}, forecast={"a": 2, "b": 1}),
            Load(name="y", measured={"a": 80, "b": 100}, forecast={"a": 2, "b": 1}),
        ]
    )
    assert (found.right, found.constant, found.winners["b"]) == (1, ("b", 2), 2)
    assert [load.matters for load in found.loads] == [False, True]


def test_terms_of_the_other_model_pick_layouts_of_published_steps() -> None:
    """The picks are right for at least nine of ten loads on 4 × H200, and for more than the best constant answer."""
    found = compute_score(
        read_run(DECODED).records, load_machine("H200"), make_planned_probe("H200", 4), estimate.load_published_steps()
    )
    assert len(found.loads) == 18
    assert found.right >= 0.9 * len(found.loads)
    assert found.right > found.constant[1]
    assert sum(load.matters for load in found.loads) >= 4
    assert len(found.winners) >= 2


def test_layouts_of_two_engines_do_not_compete() -> None:
    """One engine ran two layouts of a load, another engine a third one: two layouts compete."""
    measured = [r for r in read_run(DECODED).records if r.outcome == "ok"]
    first = next(r for r in measured if r.point.dcp == 1)
    load = [r for r in measured if (r.point.concurrency, r.point.model) == (first.point.concurrency, first.point.model)]
    others = [msgspec.structs.replace(r, origin="engine vllm 0.26.0") for r in load if r.point.dcp == 4]
    ours = [r for r in load if r.point.dcp < 4]
    found = compute_score(
        [*ours, *others], load_machine("H200"), make_planned_probe("H200", 4), estimate.load_published_steps()
    )
    assert found.loads
    names = {r.point.layout_name for r in others}
    assert all(names.isdisjoint(one.measured) for one in found.loads)


def test_score_in_json_has_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    """Each load has its best layout and its pick, and as many picks are right as the total states."""
    code, out, _ = run(capsys, "--score", str(DECODED), "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["loads"]) == 18
    assert sum(load["right"] for load in found["loads"]) == found["right"]
    assert found["fitted_without"] == ["deepseek-v3", "kimi-k2"]


def test_run_of_a_server_cannot_be_scored(capsys: pytest.CaptureFixture[str]) -> None:
    """Data types and page size of a server are unknown."""
    served = ROOT / "results" / "engines_H200" / "engines-vllm_2xH200_2026-11-28" / "run"
    code, _, err = run(capsys, "--score", str(served))
    assert code == 2
    assert "was measured through a server" in err
    assert "dcpbench sweep" in err


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("nnodes", [1, 2])
def test_presets_use_only_documented_flags(name: str, nnodes: int) -> None:
    """Every flag is in the engine's own list, and every value if the flag's values are listed."""
    listed = tomllib.loads((ROOT / "tests" / "data" / "engine_flags.toml").read_text())[name]
    assert listed["source"]
    layouts = [Layout(tp=8), Layout(tp=8, dcp=8), Layout(tp=8, dp=2, dcp=4), Layout(tp=8, dp=8)]
    used = set()
    stripes = 64 if name == "vllm" else 1
    for layout in layouts:
        for exchange in ("ag_rs", "a2a"):
            for ep, kv, interleave in (("1", "", 1), ("tp", "fp8", stripes)):
                of = make_point(
                    tp=layout.tp,
                    dp=layout.dp,
                    dcp=layout.dcp,
                    exchange=exchange,
                    ep=ep,
                    kv_dtype=kv,
                    interleave=interleave,
                    weights="unknown",
                )
                words = PRESETS[name].make_command(of, {}, "m", 7, nnodes=nnodes)
                used |= {word for word in words if word.startswith("--")}
                for flag, values in listed["values"].items():
                    assert flag not in words or words[words.index(flag) + 1] in values
    assert used <= set(listed["flags"])
    assert "--dcp-comm-backend" in used


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_single_gpu_has_no_flag_of_expert_parallelism(name: str) -> None:
    """vLLM refuses it for models without experts, and one rank holds all experts either way."""
    one = make_point(tp=1, ep="tp", weights="unknown")
    assert PRESETS[name].make_command(one, {}, "m", 7) == PRESETS[name].make_command(
        msgspec.structs.replace(one, ep="1"), {}, "m", 7
    )


@pytest.mark.parametrize(
    ("name", "changes", "lacking"),
    [
        ("vllm", {"exchange": "symm"}, ["--exchange symm"]),
        ("sglang", {"exchange": "ag_rs_registered"}, ["--exchange ag_rs_registered"]),
        ("vllm", {"exchange": "a2a", "q_replicate": True, "interleave": 64}, ["--collectives q-replicate"]),
        ("sglang", {"exchange": "a2a", "q_replicate": True, "interleave": 64}, ["--page-size interleave=64"]),
        ("sglang", {"exchange": "symm", "project_first": True}, ["--exchange symm", "--collectives project-first"]),
        ("vllm", {"dcp": 1, "exchange": "none", "interleave": 64}, []),
    ],
)
def test_options_without_an_engine_flag_raise_usage_error(
    name: str, changes: dict[str, object], lacking: list[str]
) -> None:
    """Each option without a flag is named; a layout without DCP has no exchange."""
    wanted = make_point(**({"tp": 8, "dcp": 8} | changes))
    assert PRESETS[name].find_lacking(wanted) == lacking
    if not lacking:
        assert PRESETS[name].make_command(wanted, {}, "m", 7)
        return
    with pytest.raises(UsageError, match=f"{name} has no {lacking[0]}"):
        PRESETS[name].make_command(wanted, {}, "m", 7)


def test_unsupported_exchange_gets_the_nearest_supported_layout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The best layout uses symm; the nearest one has the forecast of a query for the engine's own exchanges."""
    words = ["--machine", "H200", "--context", "128000", "--concurrency", "32", "--json", "--exchange"]
    code, out, _ = run(capsys, *words, "symm")
    found = json.loads(out)
    best = found["loads"][0]["best"]
    assert (code, best) == (0, "tp8·dp2·dcp4·ep1 (symm)")
    assert found["commands"][best] == {}
    _, out, _ = run(capsys, *words, "ag_rs,a2a")
    supported = {row["layout"]: row for row in json.loads(out)["loads"][0]["rows"]}
    for nearest in found["nearest"][best].values():
        assert nearest["lacks"] == ["--exchange symm"]
        assert nearest["layout"]["output_tok_s"] == supported[nearest["layout"]["layout"]]["output_tok_s"]
        assert nearest["layout"]["layout"] == "tp8·dp2·dcp4·ep1 (a2a)"
        assert "--dcp-comm-backend a2a" in nearest["command"]


def test_nearest_layout_is_the_fastest_measured_one() -> None:
    """The faster of two measured exchanges is chosen, although no estimate of either was requested."""
    best, slower, faster = (
        make_forecast(tok_s, MEASURED, tp=4, dcp=4, exchange=exchange)
        for tok_s, exchange in ((500, "symm"), (400, "ag_rs"), (450, "a2a"))
    )
    load = advise.Choice(
        requests="32",
        unit="requests",
        lengths="4,000 tokens",
        concurrency=32,
        forecasts=[best],
        misses={},
        refused={},
        runs=[best, slower, faster],
    )
    found = advise.find_nearest(make_query("H200"), load, best, ["ag_rs", "a2a"], estimate.load_published_steps())
    assert found is faster
    start = answer_formats.Start(
        engine="vllm", lacking=["--exchange symm"], nearest=found, load=load.name, command="vllm serve"
    )
    explanation = answer_formats.explain_start(start)
    assert explanation.startswith(
        "vLLM has no --exchange symm. The nearest that it can run is tp4·dcp4 (a2a), 450 tok/s"
    )
    unknown = answer_formats.Start(engine="vllm", lacking=["--exchange symm"])
    assert answer_formats.explain_start(unknown).endswith("there is no command for it.")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the command's exit code, stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        main(["recommend", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_command_prints_bands_costs_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rows are estimates, refused layouts have a reason, and -o gets the files."""
    words = "--machine H200 --context 32000 --concurrency 8,64 --price 3.6 --json -o"
    code, out, _ = run(capsys, *words.split(), str(tmp_path))
    found = json.loads(out)
    assert code == 0
    light, heavy = found["loads"]
    assert {layout["source"] for layout in light["rows"]} == {"estimated"}
    for layout in light["rows"]:
        tok_s, cost = layout["output_tok_s"], layout["dollars_per_million_output_tokens"]
        assert tok_s["low"] < tok_s["mean"] < tok_s["high"]
        assert cost["mean"] == pytest.approx(3.6 * 8 / 3600 / tok_s["mean"] * 1e6)
    refused = {row["layout"]: row for row in heavy["rows"] if not row["fits"]}
    assert "KV" in refused["tp8"]["reason"]
    assert refused["tp8"]["missing_bytes_per_gpu"] > 0
    assert "--tp-size 8" in found["commands"][light["best"]]["sglang"]
    assert any("Energy per token" in text for text in found["unknown"])
    assert {path.name for path in tmp_path.iterdir()} == {f"recommendation.{kind}" for kind in ("md", "json", "png")}
    assert run(capsys, *words.split(), str(tmp_path))[0] == 2


def test_records_replace_and_correct_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    """tp4 is measured, and tp4·dp2, which has no record, is a corrected estimate; records of another GPU are left out
    and named.
    """
    options = [
        "--gpus",
        "4",
        "--weights-dtype",
        "bf16",
        "--cycled",
        "--context",
        "4000",
        "--concurrency",
        "32",
        "--json",
    ]
    code, out, _ = run(capsys, "--machine", "H200", *options, str(DECODED))
    layouts = {
        layout["layout"].partition(" ")[0].partition("·ep")[0]: layout for layout in json.loads(out)["loads"][0]["rows"]
    }
    assert layouts["tp4"]["layout"] == "tp4 (ep4)", "the records ran with expert parallelism"
    tp4 = next(
        r
        for r in read_run(DECODED).records
        if (r.point.model, r.point.concurrency, r.point.context, r.point.dp, r.point.dcp)
        == ("deepseek-v3", 32, 4000, 1, 1)
    )
    assert tp4.metrics is not None
    assert (code, layouts["tp4"]["source"]) == (0, "measured")
    assert layouts["tp4"]["output_tok_s"]["mean"] == tp4.metrics.output_tok_s.median
    assert "corrected by records" in layouts["tp4·dp2"]["basis"]
    _, out, _ = run(capsys, "--machine", "H20", *options, str(DECODED))
    found = json.loads(out)
    assert {layout["source"] for layout in found["loads"][0]["rows"]} == {"estimated"}
    assert any("not on NVIDIA H20" in text for text in found["unknown"])
    options[options.index("4000")] = "777"
    _, out, _ = run(capsys, "--machine", "H200", *options, str(DECODED))
    assert any(text.startswith(f"{DECODED}: no figure is from it") for text in json.loads(out)["unknown"])


def test_cpu_records_are_left_out_with_a_suggested_command() -> None:
    """CPU records are left out although their model is not the one of the query; a run without finished points is
    named, too.
    """
    run = read_run(DECODED)
    first = next(r for r in run.records if r.outcome == "ok")
    tiny = msgspec.structs.replace(first, warnings=["cpu"], point=msgspec.structs.replace(first.point, model="tiny"))
    query = dataclasses.replace(make_query("H200"), loads=((8, 4000, None), (32, 4000, None)), kv_memory="40 GB")
    found, (note,) = advise._select_records(
        query, advise.Evidence(runs=[dataclasses.replace(run, records=[tiny, tiny])])
    )
    assert found == []
    assert note.startswith("Left out: 2 records run on a CPU, and CPU times do not count; on NVIDIA H200 run ")
    assert (
        "dcpbench sweep --model deepseek-v3 --tp 4 --concurrency 8,32 --context 4000 --exchange a2a --weights-dtype bf16 "
        "--kv-dtype bf16 --kv-memory '40 GB' -o runs/measured, and name runs/measured here"
    ) in note
    failed = msgspec.structs.replace(first, outcome="failed")
    _, notes = advise._select_records(
        make_query("H200"), advise.Evidence(runs=[dataclasses.replace(run, records=[failed])])
    )
    assert notes == [f"{run.name}: none of its points finished."]


def make_query(machine: str) -> advise.Query:
    """Make a query for DeepSeek-V3 in bf16 on four GPUs, without a load."""
    return advise.Query(
        model="deepseek-v3",
        machine=load_machine(machine),
        named=machine,
        gpus=(4,),
        loads=(),
        weights_dtype="bf16",
        kv_dtype="bf16",
        exchanges=("a2a",),
        slo={},
    )


def test_progress_is_reported_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress names each layout of each load, or each load of a score; stdout, which scripts read, has none of it."""
    messages: list[str] = []
    loads = ((8, 4000, None), (32, 4000, None))
    advise.choose_layouts(
        dataclasses.replace(make_query("H200"), loads=loads),
        advise.Evidence(),
        estimate.load_published_steps(),
        messages.append,
    )
    assert messages[0] == "8 requests × 4,000 tokens: tp4"
    assert [text.partition(" tokens")[0] for text in messages if " tokens: " in text] == ["8 requests × 4,000"] * 9 + [
        "32 requests × 4,000"
    ] * 9
    hours = itertools.count(step=3600)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    options = "--machine H200 --gpus 4 --weights-dtype bf16 --cycled --context 4000"
    _, out, err = run(capsys, *options.split())
    assert "32 requests × 4,000 tokens: tp4" in err
    assert "32 requests × 4,000 tokens: tp4" not in out
    _, _, err = run(capsys, "--score", str(DECODED))
    assert "load 18 of 18, kimi-k2" in err


def test_emulated_points_count_for_the_emulated_machine() -> None:
    """Such points count as emulated, never as measured, and over two hosts only with the same link."""
    run = read_run(DECODED)
    first = next(r for r in run.records if r.outcome == "ok")

    def make_evidence(emulate: str, tp: int = 4) -> advise.Evidence:
        emulated = msgspec.structs.replace(first.point, emulate=emulate, tp=tp)
        return advise.Evidence(
            runs=[dataclasses.replace(run, records=[msgspec.structs.replace(first, point=emulated)])]
        )

    ((record, name),), _ = advise._select_records(make_query("H200+rdma-400"), make_evidence("H200"))
    assert from_record(record, name).source == EMULATED
    assert advise._select_records(make_query("H200+rdma-400"), make_evidence("H200", tp=16))[0] == []
    assert advise._select_records(make_query("H20"), make_evidence("H200"))[0] == []


def test_served_records_count_only_with_the_same_kv_memory() -> None:
    """KV memory decides which requests wait, so points with 8 GiB do not apply to a whole GPU."""
    run = read_run(ROOT / "results" / "serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21" / "v3-seed-8gib")
    query = make_query("H200")
    other, notes = advise._select_records(query, advise.Evidence(runs=[run]))
    assert other == []
    assert "with 8 GiB of KV on each GPU, not all that was left (--kv-memory)" in notes[0]
    same, _ = advise._select_records(dataclasses.replace(query, kv_memory="8GiB"), advise.Evidence(runs=[run]))
    assert len(same) == len([r for r in run.records if r.outcome == "ok"]) > 0
    _, notes = advise._select_records(
        dataclasses.replace(query, kv_memory="8GiB", kv_dtype="fp8"), advise.Evidence(runs=[run])
    )
    assert notes[0] == f"Left out: {len(same)} records with --kv-dtype bf16, not fp8."


def test_served_load_is_replayed_with_estimated_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """The rows have latencies; no layout meets the SLO."""
    options = "--machine H200 --concurrency 2 --input-tokens 2000 --output-tokens 16 --slo itl=1 --json"
    code, out, _ = run(capsys, *options.split())
    load = json.loads(out)["loads"][0]
    assert code == 0
    assert not load["meets_slo"]
    assert all(layout["ttft_ms"]["p50"] > layout["itl_ms"]["p50"] > 0 for layout in load["rows"])


@pytest.mark.parametrize(("kv_memory", "by_capacity"), [("1GiB", True), ("40GiB", False)])
def test_gain_of_dcp_is_split_by_cause(capsys: pytest.CaptureFixture[str], kv_memory: str, by_capacity: bool) -> None:
    """1 GiB of KV per GPU holds three requests of 4,200 tokens without DCP; 40 GiB hold all requests."""
    options = f"--machine H200 --gpus 8 --concurrency 8 --input-tokens 4000 --output-tokens 200 --kv-memory {kv_memory} --json"
    code, out, _ = run(capsys, *options.split())
    found = json.loads(out)
    gain = found["loads"][0]["gain_by_cause"]
    parts = {tuple(part["causes"]): part["difference"] for part in gain["parts"]}
    assert code == 0
    assert sum(parts.values()) == pytest.approx(gain["layout"]["value"] - gain["baseline"]["value"])
    assert (abs(parts["KV capacity",]) > 0.01 * gain["baseline"]["value"]) == by_capacity
    assert parts["prefix-cache hits",] == 0
    assert any(
        text.startswith(f"From {gain['baseline']['layout']} to {gain['layout']['layout']}, ")
        for text in found["details"]
    )


def test_gain_is_not_split_without_a_served_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Kimi-K2 does not fit on 8 H20, and decode steps alone are not served."""
    for options in ("--model kimi-k2 --machine H20 --gpus 8", "--machine H200 --gpus 8 --context 4000"):
        _, out, _ = run(capsys, *options.split(), "--concurrency", "8", "--json")
        assert json.loads(out)["loads"][0]["gain_by_cause"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--machine H200"),
        ("--machine nope", "is no machine that is known"),
        ("--machine H200 --context 4000 --concurrency 0", "--concurrency 0 is not positive; try --concurrency 8,32."),
        ("--machine H200 --request-rate x", "--request-rate x: not a number"),
        ("--machine H200 --request-rate 1,0", "--request-rate 0 is not a positive number of requests per second"),
        ("--machine H200 --stages pp=2,micro-batches=0", "--stages micro-batches=0 is not positive"),
        ("--machine H200 --request-rate 1 --concurrency 2", "contradict each other"),
        ("--machine H200 --exchange foo", "--exchange foo is none of"),
        ("--machine H200 --price -1", "--price -1 is not a valid price"),
        ("--machine H200 --price 1e308", "--price 1e+308 is not a valid price"),
        ("--machine H200 --prefill chunk=0", "--prefill chunk=0 is not positive; try --prefill chunk=8192."),
        ("--machine H200 --request-rate 1 --num-requests -7", "--num-requests -7 is not positive"),
        ("--machine H200 --request-rate 1 --num-requests 10000001", "--num-requests 10000001 is more than 10,000,000"),
        ("--machine H200 --concurrency 8,2500001", "--concurrency 2500001 is more than 2,500,000"),
        (
            "--machine H200 --num-requests 9",
            "--num-requests applies only with --request-rate; add --request-rate, or leave it out.",
        ),
        ("--machine H200 --context 4000 --kv-memory 9", "--kv-memory 9 has no unit"),
        ("--machine H200 --input-tokens banana", "--input-tokens banana: not a length"),
        ("--machine H200 --context 4000 --slo ttft=1", "without ttft; leave out --slo, or leave out --context."),
        (
            "--machine H200 --context 4000 --slo e2el=9,itl=60.5,tpot=2",
            "without e2el or tpot; write --slo itl=60.5, or leave out --context.",
        ),
        (
            "--machine H200 --output-tokens 1 --slo itl=9,ttft=1",
            "asks for one token, without itl; write --slo ttft=1, or leave out --output-tokens.",
        ),
        ("--machine H200 --context 163840", "--context can be up to 163839."),
        (
            "--machine H200 --input-tokens 163840 --output-tokens 1",
            "163,841 tokens together, pass deepseek-v3's 163,840 positions",
        ),
        ("--machine H200 --weights-dtype int3", "--weights-dtype int3 is none of bf16, fp8, int4, nvfp4, mxfp4"),
        ("--machine H200 --model qwen3-8b --routing zipf:1", "qwen3-8b has no experts; leave --routing out."),
        ("--machine H200 --routing pyproject.toml", "no counts of experts by layer"),
        ("--machine H200 --force", "--force overwrites files in the folder of -o; add -o, or leave --force out."),
        (
            "--machine H200 --score x --concurrency 8 --price 2 run",
            "does not use --concurrency, --price or RUN; leave them out.",
        ),
    ],
)
def test_invalid_options_are_named_in_the_error(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *words.split())
    assert (code, message in err, "Traceback" in err) == (2, True, False)


def test_missing_field_or_collective_of_a_machine_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without `gpu` is refused; a file without all-gather refuses only the layouts that need it."""
    partial = tmp_path / "m.toml"
    partial.write_text('name = "ours"\n')
    options = ["--context", "4000", "--concurrency", "8", "--json"]
    code, _, err = run(capsys, "--machine", str(partial), *options)
    assert (code, "`gpu`" in err) == (2, True)
    calls = "".join(f"    [{ranks}, 1, 100000, 20.0],\n" for ranks in (2, 8))
    partial.write_text(f'name = "ours"\ngpu = "H200"\n[calls]\nall-reduce = [\n{calls}]\n')
    code, out, _ = run(capsys, "--machine", str(partial), *options)
    load = json.loads(out)["loads"][0]
    assert code == 0
    reasons = {row["layout"]: row["reason"] for row in load["rows"]}
    assert [layout for layout, reason in reasons.items() if reason is None] == ["tp8"]
    assert "all-gather was not measured" in reasons["tp8·dp8·ep1"]


@pytest.mark.parametrize(
    "words",
    [
        "--machine H100 --gpus 4 --weights-dtype bf16 --context 4000 --concurrency 8",
        "--machine H100+rdma-400 --gpus 8 --weights-dtype fp8 --cycled --context 128000 --concurrency 64",
        "--machine H200 --gpus 2 --cycled --context 128000 --concurrency 4000",
        "--machine H200 --gpus 1 --cycled --context 4000 --concurrency 99999999",
        "--machine H200 --gpus 4 --cycled --context 128000 --concurrency 8 --kv-memory 1000GB",
        "--machine H200 --gpus 2 --cycled --context 32000 --concurrency 32 --kv-memory 1GiB",
        "--machine H200 --gpus 1 --weights-dtype bf16 --context 4000 --concurrency 1 --kv-memory 1000GB",
        "--machine H200 --concurrency 2 --output-tokens 8 --prefill chunk=100000000",
        "--machine H200 --gpus 1 --cycled --concurrency 2 --input-tokens 100000 --output-tokens 8 --kv-memory 1GiB",
    ],
)
@pytest.mark.sample(3)
def test_advice_gives_an_answer_if_nothing_fits(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every suggested option gives an answer when it replaces the one given; a concurrency above a suggested maximum
    gives none.
    """
    code, out, _ = run(capsys, *words.split())
    assert code == 3
    _, given, advice = out.partition("\n")[0].partition("; give ")
    assert given
    for one in (
        advice.removesuffix(".").replace(" to compare layouts that hold only part of the layers", "").split(", ")
    ):
        for option in one.split(" or "):
            code, out, _ = run(capsys, *apply_advice(words, option))
            assert code == 0, (option, out)
            if " up to " in option:
                name, _, most = option.partition(" up to ")
                assert run(capsys, *apply_advice(words, f"{name} up to {int(most) + 1}"))[0] == 3, option


def apply_advice(words: str, advice: str) -> list[str]:
    """Return the command with an advice applied: `--gpus 16`, `--concurrency up to 9`, `--cycled`, `no --kv-memory`, or
    one `with` another.
    """
    command = words.split()
    for part in advice.replace("up to ", "").split(" with "):
        for name, value in re.findall(r"(--[a-z-]+) ?([^-\s]\S*)?", part):
            if name in command:
                at = command.index(name)
                del command[at : at + 2]
            command += [] if part.startswith("no ") else [name, *filter(None, [value])]
    return command


def test_refusal_names_the_layout_once_if_nothing_fits() -> None:
    """Nothing is suggested for layouts that fit and have no forecast."""
    large = advise.Refusal(advise.LACKS_MEMORY, "its weights are large")
    small = dataclasses.replace(make_choice(), refused={"tp8": large}, instead=["--x"])
    assert answer_formats.format_answer(make_query("H200"), [small]).endswith(
        "can be recommended: tp8: its weights are large; give --x."
    )
    lacks = {"tp8": 9, "tp8·dcp4": 4, "tp8·dcp2": 7}
    capacities = {who: Capacity(weight_bytes=1, missing_bytes=gib << 30) for who, gib in lacks.items()}
    several = dataclasses.replace(small, refused=dict.fromkeys(lacks, large), capacities=capacities)
    assert "can be recommended: tp8·dcp4: its weights" in answer_formats.format_answer(make_query("H200"), [several])
    unknown = advise.Refusal(advise.OTHER, "nothing is known of it; measure it.")
    other = dataclasses.replace(small, refused={"tp8": unknown})
    assert answer_formats.format_answer(make_query("H200"), [other]).endswith(
        "recommended: tp8: nothing is known of it; measure it."
    )


def test_kv_memory_too_small_for_a_step_is_refused_like_in_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The messages are the same, and the command that measures other layouts has the same KV memory."""
    words = "--machine H200 --gpus 8 --context 32000 --concurrency 32 --kv-memory 8.6GiB --json"
    code, out, _ = run(capsys, *words.split())
    found = json.loads(out)
    assert code == 0
    (load,) = found["loads"]
    refused = {row["layout"]: row["reason"] for row in load["rows"] if not row["fits"]}
    fits = {row["layout"].partition(" ")[0].partition("·ep")[0] for row in load["rows"] if row["fits"]}
    settings = dataclasses.replace(make_query("H200"), kv_memory="8.6GiB").settings
    for layout in list_valid_layouts(load_shape("deepseek-v3"), 8):
        planned = make_point(tp=8, dp=layout.dp, dcp=layout.dcp, context=32000, weights_dtype="fp8")
        shortage = find_shortage(planned, settings, load_shape("deepseek-v3"), make_planned_probe("H200", 8))
        assert (str(layout) in fits) == (shortage is None)
        for name in [f"{layout}·ep1", f"{layout}·ep8"] if layout.dp > 1 else [str(layout)]:
            assert refused.get(name) == (shortage.problem if shortage else None)
    assert len(fits) > 1
    assert refused["tp8"].startswith("--kv-memory holds 8.5 GiB")
    assert any("--kv-memory 8.6GiB --emulate H200" in text for text in found["unknown"])
    assert any("SGLang and vLLM do not include --kv-memory" in text for text in found["unknown"])


def test_default_load_has_a_long_context() -> None:
    """32 clients have 32,000 tokens each, so that capacity matters; the chunk is that of serve, and clients do not run
    in lock-step.
    """
    serve_defaults = get_serve_defaults(Probe(device="cuda", count=8, name="NVIDIA H200"))
    ((requests, context, served),) = command._make_loads(command.QueryOptions(), load_shape("deepseek-v3").max_position)
    assert served is not None
    assert (requests, served.input_tokens, served.chunk) == (32, "32000", *serve_defaults["chunk"])
    assert not is_lock_step(served, requests)
    assert context == compute_extent(served).longest


def test_options_of_served_loads_are_refused_for_decode_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Options are refused even with their default value."""
    for option, value in (
        ("--input-tokens", "4000"),
        ("--output-tokens", ANSWERS),
        ("--request-rate", "1"),
        ("--num-requests", "200"),
        ("--prefill", "chunk=8192"),
    ):
        code, _, err = run(capsys, "--machine", "H200", "--context", "4000", option, value)
        assert (code, f"which have no {option}; leave out --context, or {option}." in err) == (2, True)
    both = "--machine H200 --context 4000 --prefill chunk=-9 --input-tokens banana"
    code, _, err = run(capsys, *both.split())
    assert (code, "leave out --context, or --input-tokens and --prefill." in err) == (2, True)


def test_unknown_latency_misses_its_objective() -> None:
    """An unknown latency is given no figure."""
    known = dataclasses.replace(make_forecast(100), itl_ms=Percentiles(p50=20.0))
    assert known.list_missed({"itl": 30.0}) == []
    assert known.list_missed({"itl": 10.0, "ttft": 1e9}) == ["ITL p50 20 ms", "TTFT, which is not known"]


def test_bands_are_at_least_as_wide_as_launches_differ() -> None:
    """A record with samples that scatter by 0.1 % gets the 2 % between launches in the table, the price and JSON; a
    wider band is kept.
    """
    measured = dataclasses.replace(make_forecast(1000, MEASURED), low=999.0, high=1001.0)
    low, high = 1000 / (1 + REPEATS_AGREE_WITHIN), 1000 * (1 + REPEATS_AGREE_WITHIN)
    assert measured.output_bounds_tok_s == (low, high)
    assert make_forecast(1000).output_bounds_tok_s == (make_forecast(1000).low, make_forecast(1000).high)
    priced = dataclasses.replace(make_query("H200"), price=3.6)
    one = dataclasses.replace(make_choice(1000), forecasts=[measured])
    assert choosing.compute_price(3.6, measured) == pytest.approx(
        (4.0, 4.0 / (1 + REPEATS_AGREE_WITHIN), 4.0 * (1 + REPEATS_AGREE_WITHIN))
    )
    assert format_rows(priced, one)[0]["tok/s"] == "1,000 [980–1,020]"
    found = answer_formats.convert_to_json(priced, [one], [], estimate.load_published_steps(), {}, {})
    band = found["loads"][0]["rows"][0]["output_tok_s"]
    assert band == {"mean": 1000, "low": low, "high": high}
    assert choosing.compute_margin(measured, measured) == REPEATS_AGREE_WITHIN


def test_picture_marks_estimates_and_names_layouts_like_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exchanges of one layout have the same colour and different markers; estimates are hollow and dashed, replays
    hollow.
    """
    figures: list[Figure] = []
    monkeypatch.setattr("dcpbench.show.figure_style.save_figure", lambda figure, *_: figures.append(figure))
    loads = [
        [
            make_forecast(800, MEASURED),
            make_forecast(700, dcp=4, exchange="a2a"),
            make_forecast(500, "replayed", dp=2, ep="1"),
        ],
        [make_forecast(900, MEASURED), make_forecast(800, dcp=4, exchange="symm"), make_forecast(600, dp=2, ep="1")],
        [make_forecast(950, MEASURED), make_forecast(850, dcp=4, exchange="symm")],
    ]
    choices = [
        dataclasses.replace(make_choice(), requests=str(n), concurrency=n, forecasts=forecasts)
        for n, forecasts in zip((8, 16, 32), loads, strict=True)
    ]
    answer_formats.draw_picture(make_query("H200"), choices, tmp_path / "x.png")
    (figure,) = figures
    assert figure.axes[0].get_xlabel() == "concurrency (requests in flight, log scale)"
    handles = {str(sign.get_label()): sign for sign in figure.legends[0].legend_handles}
    named = {f.label for forecasts in loads for f in forecasts}
    assert set(handles) == named | {"hollow: replayed", "hollow, dashed: estimated"}
    a2a, symm = handles["tp4·dcp4 (a2a)"], handles["tp4·dcp4 (symm)"]
    assert a2a.get_color() == symm.get_color()  # type: ignore[attr-defined]
    assert a2a.get_marker() != symm.get_marker()  # type: ignore[attr-defined]
    lines = figure.axes[0].get_lines()
    points = {(line.get_ydata()[0] * 4, line.get_markerfacecolor()) for line in lines if line.get_marker() != "None"}  # type: ignore[index,operator]
    assert {rate for rate, face in points if face != "white"} == {800, 900, 950}
    joins = {
        tuple(y * 4 for y in line.get_ydata()): line.get_linestyle() for line in lines if line.get_marker() == "None"
    }  # type: ignore[union-attr,operator]
    assert joins == {(800, 900): "-", (900, 950): "-", (800, 850): "--", (500, 600): "--"}


def test_picture_of_open_loops_is_over_the_request_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rates may have as many requests in flight; a rate of inf is a closed loop, with a panel of its own."""
    figures: list[Figure] = []
    monkeypatch.setattr("dcpbench.show.figure_style.save_figure", lambda figure, *_: figures.append(figure))
    loads = [load(arrival="gamma", request_rate=rate) for rate in (0.5, 1.5)] + [load()]
    choices = [
        dataclasses.replace(make_choice(), forecasts=[make_forecast(800, workload="serve", load=of)]) for of in loads
    ]
    answer_formats.draw_picture(make_query("H200"), choices, tmp_path / "x.png")
    rates, clients = figures[0].axes
    assert [label.get_text() for label in rates.get_xticklabels()] == ["0.5", "1.5"]
    assert [ax.get_xlabel() for ax in (rates, clients)] == [
        "request rate (requests/s)",
        "concurrency (requests in flight)",
    ]


def test_request_rate_is_compared_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--machine H200 --gpus 1 --model qwen3-8b --num-requests 2 --input-tokens 9 --output-tokens 2 --json"
    found = json.loads(run(capsys, *words.split(), "--request-rate", "2,2.0")[1])
    assert [load["load"] for load in found["loads"]] == ["2 req/s × 9 → 2 tokens"]


def test_lead_without_a_difference_has_no_sign() -> None:
    details = answer_formats.format_details(make_query("H200"), make_choice(200, 400.00001))
    assert "the next layout, tp4, by 0 % ± " in details[1]


def test_answer_names_layouts_that_could_not_be_judged() -> None:
    """The answer itself names them, as a reader of its first sentence would take them for worse."""
    unknown, large = advise.Refusal(advise.OTHER, "no call was measured."), advise.Refusal(advise.LACKS_MEMORY, "large")
    known = dataclasses.replace(make_choice(100.0), refused={"tp8": unknown, "tp2": large})
    assert answer_formats.format_answer(make_query("H200"), [known]).endswith(
        " tp8 could not be judged at every load (reasons below)."
    )
    many = dataclasses.replace(known, refused={f"tp{n}": unknown for n in range(8)})
    assert answer_formats.format_answer(make_query("H200"), [many]).endswith(
        " 8 layouts could not be judged at every load (reasons below)."
    )
    fits = dataclasses.replace(known, refused={"tp8": large, "tp2": large})
    assert "judged" not in answer_formats.format_answer(make_query("H200"), [fits])
    points = {"tp8": make_point(tp=8), "tp2": make_point(tp=2)}
    rows = format_rows(make_query("H200"), dataclasses.replace(known, refused_points=points))
    assert [row["fits"] for row in rows] == ["yes", "not judged", "no"]


def test_layouts_over_several_hosts_require_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 3 if no layout fits."""
    code, out, _ = run(
        capsys, *["--machine", "H200", "--gpus", "16", "--context", "4000", "--concurrency", "8", "--json"]
    )
    reasons = {row["layout"]: row["reason"] for row in json.loads(out)["loads"][0]["rows"]}
    assert code == 3
    assert "no link between hosts" in reasons["tp16"]
    assert "H200+rdma-400" in reasons["tp16"]


def test_published_terms_name_their_sources() -> None:
    """Every source is a folder of results/, and each of both models can be left out."""
    steps = estimate.load_published_steps()
    assert steps.sources
    assert all((ROOT / source).is_dir() for source in steps.sources)
    assert steps.without.keys() == {"deepseek-v3", "kimi-k2"}
    assert all(0 < band < 0.2 for band in (steps.band, steps.ratio_band))
    assert msgspec.json.decode(msgspec.json.encode(steps), type=estimate.Steps) == steps


def load(**given: object) -> PointLoad:
    """Return a closed loop of 16 requests, 1,000 tokens in and 20 out."""
    return serve_record_builder.make_load(**({"requests": 16, "input_tokens": "1000", "output_tokens": "20"} | given))


@pytest.mark.parametrize(
    ("recorded", "wanted", "same"),
    [
        ({}, {}, True),
        ({"context": 4000}, {"context": 8000}, False),
        ({"concurrency": 8}, {"concurrency": 32}, False),
        ({"dp": 4}, {}, False),
        ({"load": load()}, {}, False),
        ({}, {"load": load()}, False),
        ({"load": load()}, {"load": load()}, True),
        ({"load": load(seed=7)}, {"load": load()}, True),
        ({"load": load(output_tokens="21")}, {"load": load()}, False),
        ({"load": load(arrival="poisson", request_rate=1.0)}, {"load": load()}, False),
    ],
)
def test_record_counts_for_the_same_layout_under_the_same_load(
    recorded: dict[str, object], wanted: dict[str, object], same: bool
) -> None:
    """A decode point is no served load, and the seed of a load does not matter."""
    assert advise._is_same_load(make_point(**recorded), make_point(**wanted)) is same


def stepped(concurrency: int = 8, context: int = 1020, **given: object) -> advise.Choice:
    """Return the answer for a served load on four GPUs, where only step times of tp4 are known."""
    path = step_times_builder.make_path(
        model="deepseek-v3", tp=4, dtype="bf16", page_size=64, backend="flashinfer", exchange="none"
    )
    times = step_times_builder.make_step_times(path=path)
    query = dataclasses.replace(make_query("H200"), cycled=True)
    steps = estimate.load_published_steps()
    tp4 = [Layout(4)]
    served = load(**given)
    return choose_one(query, {"times.json": times}, steps, tp4, concurrency, context, served)


def choose_one(
    query: advise.Query,
    times: dict[str, StepTimes],
    steps: estimate.Steps,
    layouts: list[Layout],
    *load: Any,
) -> choosing.Choice:
    """Choose among layouts under one load, without records."""
    draft = advise._start_choice(query, times, steps, [], {}, layouts, lambda _: None, *load)
    advise._add_estimates(query, [draft], steps, lambda _: None)
    return advise._finish_choice(query, draft, steps)


def test_load_is_replayed_with_step_times_of_its_layout() -> None:
    """The layout is tp4, which has no exchange, and its steps come from a file, without floors."""
    (found,) = stepped().forecasts
    assert (found.source, found.basis, found.point.layout_name) == ("replayed", "times.json", "tp4")
    assert found.point.load is not None
    assert found.point.load.mode == "replay"
    assert found.ttft_ms.p50 is not None


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ([{}], "Clients run in lock-step: "),
        ([{}, {"output_tokens": "uniform:10-30"}], "Clients run in lock-step under 1 of 2 loads: "),
        ([{"output_tokens": "uniform:10-30"}], None),
        ([{"arrival": "gamma", "request_rate": 2.0}], None),
    ],
)
def test_clients_in_lock_step_are_named(changed: list[dict[str, object]], warning: str | None) -> None:
    """8 clients of 100 requests with one length run in lock-step; a single client does not."""
    loads = tuple((8, 1020, load(requests=100, **more)) for more in changed)
    for requests, expected in ((8, warning), (1, None)):
        query = dataclasses.replace(make_query("H200"), loads=tuple((requests, *rest) for _, *rest in loads))
        warnings = [
            text
            for text in answer_formats.list_unknowns(query, [stepped()], estimate.load_published_steps())
            if "in lock-step" in text
        ]
        assert [text[: len(expected or "")] for text in warnings] == [expected] * bool(expected)


@pytest.mark.parametrize(
    ("dp", "output_tokens", "warns"), [(4, "20", True), (1, "20", False), (4, "uniform:10-30", False)]
)
def test_answer_warns_that_lock_step_favours_attention_dp(dp: int, output_tokens: str, warns: bool) -> None:
    query = dataclasses.replace(make_query("H200"), loads=((8, 1020, load(requests=100, output_tokens=output_tokens)),))
    best = make_forecast(100)
    best = dataclasses.replace(best, point=msgspec.structs.replace(best.point, dp=dp))
    choice = advise.Choice(
        requests="8", unit="clients", lengths="1,020", concurrency=8, forecasts=[best], misses={}, refused={}
    )
    text = answer_formats.format_answer(query, [choice])
    assert text.endswith("which favours attention DP: ask again with --output-tokens uniform:18-22.") == warns
    assert ("in lock-step" in text) == warns


def test_load_beyond_the_step_times_is_estimated_from_floors() -> None:
    """Prompts have 100,000 tokens, measured steps up to 5,500; a replay alone would return this reason."""
    choice = stepped(1, 100_020, input_tokens="100000", requests=2)
    assert [f.source for f in choice.forecasts] == ["estimated"]
    assert choice.refused == {}
    assert choice.short["tp4"].startswith("times.json: no step time is known")
    unknowns = answer_formats.list_unknowns(make_query("H200"), [choice], estimate.load_published_steps())
    assert any(text.startswith(f"tp4 at {choice.name} is estimated: times.json: ") for text in unknowns)
    times = step_times_builder.make_step_times(
        path=step_times_builder.make_path(model="deepseek-v3", tp=4, dtype="bf16")
    )
    served = make_point(concurrency=1, context=100_020, load=load(input_tokens="100000", requests=2))
    reason = advise._replay_point(make_query("H200"), served, "times.json", times)
    assert isinstance(reason, str)
    assert reason.startswith("times.json: ")


@pytest.mark.parametrize("other", [{"tp": 8}, {"dcp": 4}, {"load": None}])
def test_step_times_of_another_layout_are_not_used(other: dict[str, object]) -> None:
    """Step times do not forecast a decode point either."""
    times = step_times_builder.make_step_times(
        path=step_times_builder.make_path(model="deepseek-v3", tp=4, dtype="bf16")
    )
    served = make_point(**({"load": load(), "context": 1020} | other))
    assert advise._replay_point(make_query("H200"), served, "times.json", times) is None


def test_long_replay_reports_its_number_of_steps() -> None:
    """20 consecutive requests of 20 tokens are at least 400 steps; progress is reported every 250 steps."""
    times = step_times_builder.make_step_times(
        path=step_times_builder.make_path(model="deepseek-v3", tp=4, dtype="bf16")
    )
    served = make_point(concurrency=1, context=1020, load=load(requests=20))
    messages: list[str] = []
    assert isinstance(advise._replay_point(make_query("H200"), served, "times.json", times, messages.append), Forecast)
    assert messages[0] == "step 250"


SERVED = ((8, 1020, load()),)


@pytest.mark.parametrize(
    ("path", "device", "loads", "reason"),
    [
        ({}, "CPU", SERVED, "step times run on a CPU, and CPU times do not count"),
        ({"model": "kimi-k2"}, "NVIDIA H200", SERVED, "step times of kimi-k2, not of deepseek-v3"),
        ({}, "NVIDIA H100 80GB HBM3", SERVED, "step times of NVIDIA H100 80GB HBM3, not of NVIDIA H200"),
        ({"emulate": "B200"}, "NVIDIA H200", SERVED, "step times emulated for B200, not for H200"),
        ({"tp": 8}, "NVIDIA H200", SERVED, "step times of 8 GPUs, not of 4 (--gpus)"),
        ({"kv_dtype": "fp8"}, "NVIDIA H200", SERVED, "step times of --kv-dtype fp8, not bf16"),
        ({}, "NVIDIA H200", ((8, 4000, None),), "--context measures decode steps only"),
        ({}, "NVIDIA H200", SERVED, ""),
    ],
)
def test_step_times_of_another_query_are_left_out_with_a_reason(
    path: dict[str, str | int], device: str, loads: tuple[tuple[int, int, PointLoad | None], ...], reason: str
) -> None:
    """Model, machine, size, precision and loads must match; a file that fits is kept without a note."""
    of = step_times_builder.make_path(
        **({"model": "deepseek-v3", "tp": 4, "dtype": "bf16", "backend": "flashinfer"} | path)
    )
    times = step_times_builder.make_step_times(path=of, device=device)
    query = dataclasses.replace(make_query("H200"), loads=loads)
    kept, notes = advise._select_step_times(query, advise.Evidence(times={"times.json": times}))
    assert list(kept) == ([] if reason else ["times.json"])
    assert [note.startswith("Left out: times.json, ") and reason in note for note in notes] == [True] * bool(reason)


def test_correction_scales_rate_and_latencies() -> None:
    """Steps that ran twice as fast give twice the output and half of every latency; unknown percentiles stay unknown."""
    known = {f"{name}_ms": Percentiles(p50=80.0, p99=100.0) for name in ("ttft", "itl", "tpot", "e2el")}
    found = apply_factor(dataclasses.replace(make_forecast(100), **known), 2.0)  # type: ignore[arg-type]
    assert (found.tok_s, found.factor, found.origin) == (200, 2.0, "estimated, corrected")
    for name in known:
        assert getattr(found, name) == Percentiles(p50=40.0, p99=50.0)


def test_correction_is_named_with_its_factor() -> None:
    """The table's last column and a sentence name it, for users who do not read the JSON."""
    corrected = dataclasses.replace(make_choice(200, 320), forecasts=[apply_factor(make_forecast(200, tp=2), 0.5)])
    assert format_rows(make_query("H200"), corrected)[0]["evidence"] == "estimated, corrected"
    (text,) = [
        t
        for t in answer_formats.list_unknowns(make_query("H200"), [corrected], estimate.load_published_steps())
        if "corrected" in t
    ]
    assert "(0.500× at 8 requests × 4,000)" in text


def test_columns_of_numbers_name_their_units() -> None:
    """The table can be read without the text."""
    named = [
        name.replace("\n", " ")
        for name in answer_table.list_columns(dataclasses.replace(make_query("H200"), price=1.0))
    ]
    assert {"tok/s", "tok/s per GPU", "ITL p50 ms", "TTFT p50 s", "weights GiB/GPU", "$/M output tokens"} <= set(named)


def make_choice(*tok_s: float, slo: bool = True) -> advise.Choice:
    """Return a load under which layouts of 2, 4, … GPUs have these rates."""
    forecasts = [make_forecast(rate, tp=2 * (n + 1)) for n, rate in enumerate(tok_s)]
    misses = {} if slo else {f.label: ["ITL p99 90 ms"] for f in forecasts}
    return advise.Choice(
        requests="8", unit="requests", lengths="4,000", concurrency=8, forecasts=forecasts, misses=misses, refused={}
    )


@pytest.mark.parametrize(
    ("concurrency", "load_of", "name"),
    [
        (32, load(), "32 clients × 1,000 → 20 tokens"),
        (1, load(), "1 client × 1,000 → 20 tokens"),
        (32, load(arrival="gamma", request_rate=0.5), "0.5 req/s × 1,000 → 20 tokens"),
        (32, None, "32 requests × 4,000 tokens"),
    ],
)
def test_name_of_a_load_has_the_unit_of_its_number(concurrency: int, load_of: PointLoad | None, name: str) -> None:
    """A closed loop has clients, an open loop a rate, and a decode step requests."""
    assert advise._format_load_name(concurrency, 4000, load_of) == name


def test_loads_with_one_answer_are_a_range_with_one_unit() -> None:
    """The unit stands behind the last number."""
    loads = [dataclasses.replace(make_choice(320, 200), requests=n, unit="clients") for n in ("8", "32")]
    assert answer_formats.format_answer(make_query("H200"), loads).startswith("4 × H200: at 8 to 32 clients × 4,000, ")


@pytest.mark.parametrize(
    ("choice", "answer"),
    [
        (make_choice(200), "take tp2"),
        (make_choice(200, 399), "tp2 or tp4, between which only a measurement decides"),
        (
            make_choice(200, 400, 600),
            "tp2 or tp4 (1 more is level with both), between which only a measurement decides",
        ),
        (
            make_choice(200, 400, 600, 800),
            "tp2 or tp4 (2 more are level with both), between which only a measurement decides",
        ),
        (make_choice(200, slo=False), "no layout meets the SLO; most output has tp2"),
        (
            make_choice(200, 400, 600, 800, 1000, slo=False),
            "no layout meets the SLO; most output has tp2, tp4, tp6 or tp8",
        ),
    ],
    ids=["one", "two", "three", "four", "missed", "five missed"],
)
def test_level_layouts_are_named_together(choice: advise.Choice, answer: str) -> None:
    assert answer_formats.format_answer(make_query("H200"), [choice]).startswith(
        f"4 × H200: at 8 requests × 4,000, {answer} ("
    )


def format_rows(query: advise.Query, choice: advise.Choice) -> list[dict[str, str]]:
    """Return the cells of a load's table by heading."""
    columns = [name.replace("\n", " ") for name in answer_table.list_columns(query)]
    rows = [answer_table.format_row(query, choice, row) for row in answer_table.list_rows(choice)]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_lead_of_the_best_layout_is_given_with_its_margin() -> None:
    """100 tok/s per GPU against 80 is 25 % more, with a margin of 4 %."""
    found = make_choice(200, 320)
    assert [row["layout"] for row in format_rows(make_query("H200"), found)] == ["→ tp2", "tp4"]
    assert (
        answer_formats.format_details(make_query("H200"), found)[1]
        == "Its output per GPU differs from that of the next layout, tp4, by +25 % ± 4 %."
    )


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ((400, 480), "With 4,000, the best layout with DCP is clearly ahead of every layout without DCP at concurrency 8, the only one compared: its output is 1.20× that of the best layout without DCP."),
        ((400, 404), "With 4,000, no layout with DCP is clearly ahead of the best layout without DCP at concurrency 8, the only one compared."),
    ],
    ids=["ahead", "level"],
)  # fmt: skip
def test_gain_of_dcp_is_given_where_it_is_clearly_ahead(rates: tuple[float, float], sentence: str) -> None:
    plain, dcp = (make_forecast(rate, tp=4, dcp=degree) for rate, degree in zip(rates, (1, 4), strict=True))
    found = dataclasses.replace(make_choice(200), forecasts=[plain, dcp])
    assert answer_formats.format_break_even([found]) == sentence


def capacity(requests: int) -> Capacity:
    """Make the capacity of a layout that holds so many requests."""
    return Capacity(weight_bytes=1, kv_tokens=4000 * requests, requests=requests)


@pytest.mark.parametrize(
    ("held", "order", "answer"),
    [
        (
            (9, 15, 99),
            ["→ tp4", "= tp2", "tp6"],
            "take tp4, which is level with tp2 in output tok/s and has more KV capacity",
        ),
        (
            (15, 9, 99),
            ["→ tp2", "= tp4", "tp6"],
            "take tp2, which is level with tp4 in output tok/s and has more KV capacity",
        ),
        ((16, 99, 99), ["→ tp2", "→ tp4", "tp6"], "tp2 or tp4, between which only a measurement decides"),
        ((100, 103, 1), ["→ tp2", "→ tp4", "tp6"], "tp2 or tp4, between which only a measurement decides"),
    ],
    ids=["more", "fewer", "both hold twice the load", "as many"],
)
def test_kv_headroom_breaks_ties(held: tuple[int, ...], order: list[str], answer: str) -> None:
    """tp2 and tp4 are level, tp6 is clearly behind; with 8 clients, capacity for more than 16 requests breaks no tie."""
    found = make_choice(200, 399, 450)
    capacities = {f.label: capacity(n) for f, n in zip(found.forecasts, held, strict=True)}
    found = dataclasses.replace(found, capacities=capacities)
    assert [row["layout"] for row in format_rows(make_query("H200"), found)] == order
    assert answer_formats.format_answer(make_query("H200"), [found]).startswith(
        f"4 × H200: at 8 requests × 4,000, {answer} ("
    )
    assert found.decided == ("take" in answer)
    command = answer_formats.format_details(make_query("H200"), found)[-1]
    assert command.startswith("To decide, run on 4 × H200: dcpbench ab --both ") != found.decided


@pytest.mark.parametrize(
    ("rate", "answer"),
    [(388.0, "take tp4, which is level with tp2"), (360.0, "tp2 or tp4, between which only a measurement decides")],
)
def test_more_kv_capacity_is_not_worth_a_large_share_of_output(rate: float, answer: str) -> None:
    """tp4 holds more and has 3 or 10 % less output per GPU, with an error of 24 %."""
    forecasts = [make_forecast(200.0, tp=2), make_forecast(rate, tp=4, comm={"all-reduce": 0.2})]
    capacities = {f.label: capacity(n) for f, n in zip(forecasts, (9, 15), strict=True)}
    found = dataclasses.replace(make_choice(200), forecasts=forecasts, capacities=capacities)
    assert answer in answer_formats.format_answer(make_query("H200"), [found])
    assert [f.label for f in found.ranked] == (["tp4", "tp2"] if found.decided else ["tp2", "tp4"])


def test_kv_capacity_below_the_load_is_shown_in_the_table() -> None:
    found = dataclasses.replace(make_choice(200), capacities={"tp2": capacity(5)})
    assert format_rows(make_query("H200"), found)[0]["fits"] == "5 of 8 at once"
    short = Capacity(weight_bytes=1, missing_bytes=3 << 30)
    refused = {"tp8": advise.Refusal(advise.NO_WHOLE_MODEL, "large")}
    found = dataclasses.replace(
        found, refused=refused, refused_points={"tp8": make_point(tp=8)}, capacities={"tp8": short}
    )
    assert format_rows(make_query("H200"), found)[1]["fits"] == "no, 3.0 GiB short"


def test_suggested_ab_command_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is for decode steps and for served loads, planned for the machine."""
    served = msgspec.structs.replace(load(requests=64), chunk=8192)
    for more in ({"context": 4000}, {"context": 1020, "load": served, "workload": "serve"}):
        one, other = (
            make_point(tp=8, weights_dtype="fp8", **more, **changes)
            for changes in ({"dcp": 8, "exchange": "a2a"}, {"dp": 8})
        )
        suggested = advise.format_ab_command(dataclasses.replace(make_query("H200"), weights_dtype="fp8"), one, other)
        words = shlex.split(suggested)[1:]
        words[words.index("--both") + 1] += " --gpu H200,count=8"
        with pytest.raises(SystemExit) as ended:
            main([*words, "--dry-run"])
        out, err = capsys.readouterr()
        assert (ended.value.code, "tp8·dcp8" in out, "tp8·dp8·ep1" in out) == (0, True, True), err


def test_suggested_server_command_is_accepted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command is suggested for formats without kernels here; `server` and `sweep --engine` accept it."""
    (tmp_path / "config.json").write_text("{}")
    served = msgspec.structs.replace(load(requests=64), chunk=8192)
    for more in ({"context": 4000}, {"context": 1020, "load": served, "workload": "serve"}):
        one, other = (make_point(tp=8, weights_dtype="nvfp4", **more, dcp=dcp, exchange="a2a") for dcp in (4, 8))
        suggested = advise.format_server_command(one, other).replace("CHECKPOINT", str(tmp_path))
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(suggested)[1:], "--dry-run"])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        assert all(f"--decode-context-parallel-size {dcp}" in out + err for dcp in (4, 8))


@pytest.mark.parametrize("killed", [0, 4], ids=["all live", "one is killed"])
def test_estimates_of_several_processes_equal_those_of_one(killed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are in the order of the points; if a process dies, this one takes over."""
    messages: list[str] = []
    points = [make_point(tp=tp) for tp in (1, 2, 4, 8)]
    own = os.getpid()

    def run(one: Point, _: object) -> str:
        if os.getpid() != own and one.tp == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"tp{one.tp}"

    monkeypatch.setattr(parallel, "_count_cores", lambda: 2)
    assert parallel.estimate_points(points, run, messages.append) == ["tp1", "tp2", "tp4", "tp8"]  # type: ignore[arg-type]
    assert messages[0] == "estimate 1 of 4: tp1"


def test_one_launch_of_a_server_is_undecided() -> None:
    """10 % more output is undecided if no two launches of the server are known, and decided if launches differ by 3 %."""
    single = [
        dataclasses.replace(make_forecast(tok_s, MEASURED, dcp=dcp), low=tok_s, high=tok_s, launch_spread=None)
        for tok_s, dcp in ((1100, 4), (1000, 1))
    ]
    undecided = dataclasses.replace(make_choice(1), forecasts=single)
    assert math.isinf(choosing.compute_margin(*single))
    assert len(undecided.level) == 2
    assert not undecided.decided
    assert (
        "Its output per GPU differs from that of the next layout, tp4, by +10 % in one launch: they are level"
        in answer_formats.format_details(make_query("H200"), undecided)[1]
    )
    assert single[0].output_bounds_tok_s == (1100, 1100)
    known = [dataclasses.replace(f, launch_spread=0.03) for f in single]
    assert dataclasses.replace(undecided, forecasts=known).decided
    decided = dataclasses.replace(undecided, forecasts=known)
    assert (
        "Its output per GPU differs from that of the next layout, tp4, by +10 % ± 3 %."
        in answer_formats.format_details(make_query("H200"), decided)[1]
    )


def test_served_load_is_scored_with_its_latencies() -> None:
    """Two layouts ran the load; KV memory and arrival times are part of its name."""
    run = read_run(ROOT / "results" / "serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21" / "v3-seed-8gib")
    from dcpbench.points.device_probe import Probe

    machine = load_machine("H200")
    probe = Probe(
        device="cuda",
        count=4,
        name="NVIDIA H200",
        memory_bytes=machine.card.memory_bytes,
        packages={"flashinfer": "0.6"},
    )
    found = compute_score(run.records, machine, probe, estimate.load_published_steps(), every=100)
    (one, *_) = found.loads
    assert len(one.measured) > 1
    assert one.measured.keys() == one.forecast.keys()
    assert all(len(errors) >= len(one.measured) for errors in one.latency_errors.values())
    assert one.name.startswith("deepseek-v3, ")
    assert f"{8 << 30} bytes of KV" in one.name


def test_margin_of_record_and_estimate_includes_both_bands() -> None:
    """Bands of 10 % below one and above the other give 21 %; two records have at least the difference of repeats."""
    measured, expected = make_forecast(100, "measured"), make_forecast(90)
    assert choosing.compute_margin(measured, expected) == pytest.approx(0.21)
    exact = dataclasses.replace(measured, low=100.0, high=100.0)
    assert choosing.compute_margin(exact, exact) == REPEATS_AGREE_WITHIN


def test_folder_of_runs_is_read_as_its_runs(tmp_path: Path) -> None:
    """`compare` reads folders in the same way; a folder without any run and an empty run are errors with a suggestion."""
    for name in ("a", "b"):
        record_builder.write_records(
            tmp_path / "runs" / name, [record_builder.make_ok_record(record_builder.make_point())]
        )
    found = command._load_evidence([tmp_path / "runs", tmp_path / "runs" / "b"])
    assert [run.folder.name for run in found.runs] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordsError, match=r"holds no records\.jsonl, nor do the folders in it; name a run"):
        command._load_evidence([tmp_path / "empty"])
    (tmp_path / "empty" / "records.jsonl").touch()
    with pytest.raises(RecordsError, match="holds no record yet; wait for its run, or leave it out"):
        command._load_evidence([tmp_path / "empty"])


def test_met_objectives_are_named_with_their_percentile() -> None:
    """ITL has samples for p90, TTFT only for p50: the table and the JSON state both."""
    itl, ttft = Percentiles(p50=20.0, p90=25.0, samples=100), Percentiles(p50=900.0, samples=8)
    best = dataclasses.replace(make_forecast(1000.0), itl_ms=itl, ttft_ms=ttft)
    query = dataclasses.replace(make_query("H200"), slo={"ttft": 2000.0, "itl": 30.0}, loads=((32, 4000, None),))
    choice = advise.Choice(
        requests="32", unit="requests", lengths="4,000 tokens", concurrency=32, forecasts=[best], misses={}, refused={}
    )
    (row,) = answer_table.list_rows(choice)
    assert format_rows(query, choice)[0]["SLO"] == "meets TTFT p50 900 ms and ITL p90 25 ms"
    assert answer_formats._make_row_json(query, choice, row, {})["objectives"] == [
        {"name": "ttft", "limit_ms": 2000.0, "percentile": "p50", "ms": 900.0, "met": True},
        {"name": "itl", "limit_ms": 30.0, "percentile": "p90", "ms": 25.0, "met": True},
    ]
    assert "SLO" not in format_rows(dataclasses.replace(query, slo={}), choice)[0]


def test_forecasts_of_several_layouts_share_their_requests() -> None:
    """The requests of a load are drawn once for all layouts; another load has other requests."""
    load = PointLoad(mode="replay", requests=4, input_tokens="100", output_tokens="8", chunk=8192, prefill="flashinfer")
    one, other = (make_point(tp=4, dcp=dcp, workload="serve", load=load) for dcp in (1, 4))
    first, again = (make_point_requests(each, Settings(), 1000) for each in (one, other))
    assert all(a is b for a, b in zip(first, again, strict=True))
    longer = msgspec.structs.replace(one, load=msgspec.structs.replace(load, input_tokens="200"))
    assert {r.prompt_tokens for r in make_point_requests(longer, Settings(), 1000)} == {200}


def test_model_of_a_collective_is_fitted_once() -> None:
    """Fits of collectives take longer than all else of an estimate, and every layout needs them."""
    first, again = load_machine("H200").comm_model, load_machine("H200").comm_model
    assert all(first.calls[name] is again.calls[name] for name in first.calls)


def test_dense_model_has_no_attention_dp_and_dcp_needs_copied_kv_heads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Llama-3.1-70B has 8 KV heads, so 8 ranks have one copy of each; Qwen3-235B has 4, and 2 copies."""
    for model, layouts in (
        ("llama-3.1-70b", {"tp8"}),
        ("qwen3-235b-a22b", {"tp8", "tp8·dcp2", "tp8·dp2", "tp8·dp4", "tp8·dp8"}),
    ):
        code, out, _ = run(capsys, *f"--model {model} --machine H200 --context 4000 --concurrency 8 --json".split())
        [load] = json.loads(out)["loads"]
        named = {
            name.partition("·ep")[0].partition(" ")[0]
            for name in re.findall(r"tp8[^\" ,]*", json.dumps(load, ensure_ascii=False))
        }
        assert (code, named) == (0, layouts)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_table_fits_into_a_terminal_without_breaking_a_number(width: int) -> None:
    """Columns are left out before a number is broken: the words of a kept column are no wider than it."""
    names = answer_table.COLUMNS
    row = ["→ tp8·dp2·dcp2·ep1 (a2a)", "tensor parallel", "1,277 [1,255–1,300]", "134.6", "4.96 [3.09–7.95]"]
    row += ["28.0 [25.4–30.9]", "12,953,216", "88", "81.2", "23 of 32 at once", "estimated, corrected"]
    widths = answer_table.choose_column_widths(names, [row], width)
    assert sum(widths.values()) + 2 * len(widths) <= width
    assert {"layout", "tok/s", "fits"} <= set(widths)
    assert ("experts" in widths) == (width == 160)
    for name, cell in zip(names, row, strict=True):
        assert all(len(word) <= widths.get(name, 99) for word in cell.split())
    assert widths["layout"] == len(row[0])


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
@pytest.mark.parametrize(("dcp", "ep", "routing"), [(1, "tp", ""), (4, "tp", ""), (8, "1", ""), (1, "tp", "zipf:1.0")])
def test_step_of_more_requests_is_never_estimated_faster(model: str, dcp: int, ep: str, routing: str) -> None:
    """Collectives of 8 ranks were measured faster with 24 rows than with 16, and whole experts of a rank go up in jumps."""
    one = make_point(model=model, tp=8, dcp=dcp, ep=ep, exchange="a2a" if dcp > 1 else "none", routing=routing)
    found = Estimator(one, load_machine("H200"), estimate.load_published_steps().terms)
    times = [found.estimate_ms(found.make_decode_rows(n, 4000)) for n in (*range(1, 131), 512, 513, 600)]
    assert times == sorted(times)
