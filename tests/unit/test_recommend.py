"""`dcpbench recommend`: estimates, what counts as ahead, scores, the command and what it says."""

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
from dcpbench.points.comm_model import Seconds
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout, list_valid_layouts
from dcpbench.points.point import Load as PointLoad
from dcpbench.points.point import Point
from dcpbench.points.roofline import Sharding, StepRows
from dcpbench.points.settings import Settings
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


def point(**given: object) -> Point:
    """A decode point of DeepSeek-V3."""
    usual = {
        "model": "deepseek-v3",
        "tp": 4,
        "ep": "1",
        "concurrency": 32,
        "context": 4000,
        "backend": "flashinfer",
        "dtype": "bf16",
        "page_size": 64,
    }
    return Point(**(usual | given))  # type: ignore[arg-type]


def forecast(tok_s: float, source: str = ESTIMATED, wire: dict[str, float] | None = None, **of: object) -> Forecast:
    """With a band of 10 %, and 4 % of ratios."""
    return Forecast(
        point=point(**of),
        source=source,
        whence="",
        tok_s=tok_s,
        low=tok_s / 1.1,
        high=tok_s * 1.1,
        ratio_error=0.04,
        wire_errors=wire or {},
    )


def test_the_fit_finds_what_steps_were_made_of() -> None:
    """Steps of 3 µs a layer, a share of 0.5 of experts and 0.8 of attention: 3 · n, times 2 and 1.25.

    None of them multiplied as long as its floor, so those that do have the same shares; so has attention over fp8.
    """
    true = {"launch": 3.0, "experts": 2.0, "attention": 1.25}
    seen = [
        dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, "experts": experts, "attention": attention}
        for experts, attention in ((100.0, 10.0), (500.0, 40.0), (900.0, 800.0), (50.0, 300.0))
    ]
    fitted = recommend_check.fit_terms(
        [(terms, sum(true.get(name, 0) * us for name, us in terms.items())) for terms in seen]
    )
    over_fp8 = ("attention over fp8", "attention over fp8, multiplied")
    others = {"experts, multiplied": 2.0, "attention, multiplied": 1.25} | dict.fromkeys(over_fp8, 1.25)
    assert {name: round(value, 6) for name, value in fitted.items() if value} == true | others


def test_a_fit_takes_no_less_than_floors_and_is_the_best_of_all_such() -> None:
    """Two terms that go together, of which one alone would be −2: it is 1, and the other takes the least squares."""
    seen = [
        (dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 10.0, "experts": 10.0 + more}, 30.0 - 2 * more)
        for more in (0.0, 1.0, 3.0)
    ]
    fitted = recommend_check.fit_terms(seen)
    table = np.array([[terms["launch"] / us, terms["experts"] / us] for terms, us in seen])

    def error(numbers: tuple[float, float]) -> float:
        return float(((table @ np.array(numbers) - 1) ** 2).sum())

    grid = itertools.product(np.linspace(0, 6, 121), np.linspace(1, 6, 101))
    found = fitted["launch"], fitted["experts"]
    assert found[1] == 1.0
    assert error(found) <= min(map(error, grid))


def test_attention_over_caches_of_two_precisions_has_shares_of_its_own() -> None:
    """Over bf16 0.8 where it reads and 0.5 where it multiplies, over fp8 0.4 where it multiplies, and so where it reads."""
    true = {"launch": 1.0, "attention": 1.25, "attention, multiplied": 2.0, "attention over fp8, multiplied": 2.5}
    seen = [
        dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, name: us}
        for name, us in itertools.product(list(true)[1:], (50.0, 700.0))
    ]
    fitted = recommend_check.fit_terms(
        [(terms, sum(true.get(name, 0) * us for name, us in terms.items())) for terms in seen]
    )
    assert {name: round(fitted[name], 6) for name in true} == true
    assert fitted["attention over fp8"] == pytest.approx(2.5)


def test_a_part_that_was_multiplied_alone_is_read_with_the_same_share() -> None:
    """The reverse of above; no part takes less than its floor, whatever would fit better."""
    terms = dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 1.0, "linear, multiplied": 10.0}
    fitted = recommend_check.fit_terms([(terms, 26.0), (terms | {"linear, multiplied": 20.0}, 51.0)])
    assert (fitted["launch"], fitted["linear, multiplied"]) == (pytest.approx(1.0), pytest.approx(2.5))
    assert fitted["linear"] == fitted["linear, multiplied"]
    faster = recommend_check.fit_terms([(terms, 6.0), (terms | {"linear, multiplied": 20.0}, 11.0)])
    assert faster["linear, multiplied"] == 1.0


def test_what_older_steps_take_beyond_is_told_from_what_all_take() -> None:
    """Launches of 3 µs a layer, 2 more in steps of older kernels: the half of them that has the term says so, and no other is it."""
    seen = [
        (dict.fromkeys(estimate.TERMS, 0.0) | {"launch": 61.0, "experts": experts, "launch, older": older})
        for experts, older in ((100.0, 61.0), (500.0, 0.0), (900.0, 61.0), (50.0, 0.0))
    ]
    found = [(terms, 3 * 61.0 + 2 * terms["launch, older"] + 1.5 * terms["experts"]) for terms in seen]
    fitted = recommend_check.fit_terms(found, ["launch, older"])
    assert (fitted["launch"], fitted["launch, older"]) == (pytest.approx(3.0), pytest.approx(2.0))
    assert fitted["experts"] == pytest.approx(1.5)
    assert recommend_check.fit_terms(found)["launch"] > 3.1


def of_steps(prompt: int = 0, exchange: str = "none", context: int = 4000, **of: object) -> dict[str, float]:
    """Terms of a step of 8 requests of so many tokens, or of a prompt, of DeepSeek-V3 on H200."""
    estimator = Estimator(point(**of, exchange=exchange), load_machine("H200"), estimate.load_published_steps().terms)
    rows = (
        StepRows(chunks=((prompt, 0),), sampled=1, tokens=prompt) if prompt else estimator.make_decode_rows(8, context)
    )
    found = estimate.compute_terms(estimator.sharding, rows, estimator.rates, estimator.wire, exchange)
    assert found is not None
    return found


def test_what_is_read_and_what_is_multiplied_are_told_apart() -> None:
    """A decode step reads its experts and projections, a prompt of 8,192 tokens multiplies them; of 128 heads over fp8
    attention multiplies, of 32 it reads.
    """
    decode, prompt = of_steps(weights_dtype="fp8"), of_steps(8192, weights_dtype="fp8")
    for part in ("experts", "linear"):
        assert decode[part] > 0 == decode[f"{part}, multiplied"]
        assert prompt[f"{part}, multiplied"] > 0
    few, many = (of_steps(kv_dtype="fp8", context=128000, **more) for more in ({}, {"dcp": 4, "exchange": "symm"}))
    assert few["attention over fp8"] > 0 == few["attention over fp8, multiplied"]
    assert many["attention over fp8, multiplied"] > 0 == many["attention over fp8"]
    assert few["attention"] == few["attention, multiplied"] == 0 == decode["attention over fp8"] < decode["attention"]


def test_launches_waits_and_calls_have_terms_of_their_own() -> None:
    """61 layers; whole experts wait, fp8 takes more launches, exchanges are no other collectives."""
    plain, fp8, whole = of_steps(ep="1"), of_steps(ep="1", weights_dtype="fp8"), of_steps(ep="tp")
    assert [each["launch"] for each in (plain, fp8, whole)] == [61, 61, 61]
    assert [each["quantising"] for each in (plain, fp8, whole)] == [0, 61, 0]
    assert [each["waiting"] > 0 for each in (plain, fp8, whole)] == [False, False, True]
    with_dcp = of_steps(dcp=4, exchange="symm")
    assert plain["exchanges"] == 0 < with_dcp["exchanges"]
    assert plain["collectives"] == pytest.approx(with_dcp["collectives"])
    assert plain["collectives"] > 0


def test_ranks_with_whole_experts_wait_for_the_one_that_reads_most_of_them() -> None:
    """8 tokens of 8 experts hit 57 of 256, a rank 14.3 ± 3.3 of its 64: the largest of four ranks 3.5 more, in 58 layers.

    An expert of V3 in bf16 is 88 MB, which 4.8 TB/s read in 18.4 µs. 1,024 tokens hit all of them, and nobody waits.
    """
    shape, rates = load_shape("deepseek-v3"), {"read": 4.8e12}
    whole = Sharding(shape=shape, layout=Layout(4), itemsize=2)
    assert estimate.compute_waiting_us(whole, 8, rates) == pytest.approx(58 * 3.5 * 18.35, rel=0.01)
    assert estimate.compute_waiting_us(dataclasses.replace(whole, weights=FORMATS["fp8"]), 8, rates) == pytest.approx(
        29 * 3.5 * 18.35, rel=0.01
    )
    assert estimate.compute_waiting_us(whole, 1024, rates) < 1
    assert estimate.compute_waiting_us(dataclasses.replace(whole, ep=1), 8, rates) == 0


def test_a_gpu_that_does_not_multiply_fp8_attends_to_it_at_the_rate_of_bf16() -> None:
    """An A100 with an fp8 cache has floors, and estimates; with fp8 weights neither."""
    machine = load_machine("A100")
    of = Estimator(point(kv_dtype="fp8"), machine, estimate.load_published_steps().terms)
    rows = of.make_decode_rows(8, 4000)
    found = estimate.compute_terms(of.sharding, rows, of.rates, of.wire, "none")
    assert found is not None
    slower = estimate.compute_terms(
        of.sharding, rows, of.rates | {"matmul_fp8": 2 * of.rates["matmul"]}, of.wire, "none"
    )
    assert slower is not None
    over_fp8 = ("attention over fp8", "attention over fp8, multiplied")
    assert sum(found[name] for name in over_fp8) >= sum(slower[name] for name in over_fp8) > 0
    fp8 = Estimator(point(weights_dtype="fp8"), machine, estimate.load_published_steps().terms)
    assert estimate.compute_terms(fp8.sharding, rows, fp8.rates, fp8.wire, "none") is None


def test_attention_dp_is_forecast_with_both_placements_of_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is a row; a width that does not divide leaves no choice."""
    asked = dataclasses.replace(ask("H200"), cycled=True, loads=((8, 4000, None),))
    (choice,), _ = advise.choose_layouts(asked, advise.Evidence(), estimate.load_published_steps())
    rows = {row.layout: row.experts for row in answer_table.list_rows(choice)}
    assert (rows["tp4·dp4·ep1"], rows["tp4·dp4·ep4"]) == ("tensor parallel", "expert parallel")
    assert rows["tp4"] == "tensor parallel"
    assert answer_formats.format_placements([choice]).startswith(
        "Expert parallel (ep above 1) against tensor-parallel experts (ep1, the engines' default) in 3 pairs of layouts with attention data parallelism: "
    )
    assert advise._list_placements(asked, Layout(4, 4)) == ["1", "tp"]
    assert advise._list_placements(asked, Layout(4)) == ["1"]
    odd = dataclasses.replace(load_shape("deepseek-v3"), moe_inter=2056, shared_experts=2)
    monkeypatch.setattr(advise, "load_shape", lambda _: odd)
    assert advise._list_placements(asked, Layout(16, 16)) == ["tp"], "2,056 / 16 leaves 8"
    assert Layout(16, 16) in advise._list_valid_layouts(asked, 16)
    assert Layout(16) not in advise._list_valid_layouts(asked, 16)


def test_layouts_that_split_a_block_of_scales_are_refused_with_the_largest_that_does_not() -> None:
    """2,048 over 32 ranks are 64 of a block of 128: of a tensor-parallel expert, and of the shared expert in every layout."""
    asked = dataclasses.replace(ask("H200+rdma-400"), weights_dtype="fp8", loads=((64, 4000, None),), gpus=(32,))
    (choice,), _ = advise.choose_layouts(asked, advise.Evidence(), estimate.load_published_steps())
    assert not choice.forecasts
    assert choice.refused["tp32"].reason == (
        "an expert (64 numbers) of deepseek-v3 on a rank ends inside a block of 128, and kernels take whole blocks; give "
        "--gpus 16, or --weights-dtype bf16"
    )
    assert not choice.refused["tp32"].for_memory
    (wide,), _ = advise.choose_layouts(
        dataclasses.replace(asked, weights_dtype="bf16"), advise.Evidence(), estimate.load_published_steps()
    )
    assert "tp32" in {f.who for f in wide.forecasts}


def why_sweep_refuses(one: Point, probe: Probe) -> str:
    """The message with which the planner of `sweep` refuses a point; empty if it takes it."""
    try:
        validate.check_runnable(one, Settings(), load_shape(one.model), validate.Machine(probe=probe))
    except UsageError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2", "kimi-k2", "deepseek-v2-lite"])
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_recommend_refuses_the_layouts_that_sweep_refuses(model: str, weights: str) -> None:
    """Every layout of up to 32 ranks is refused for the same reason; memory is not limited here."""
    asked = dataclasses.replace(ask("H200+rdma-400"), model=model, weights_dtype=weights)
    refused, accepted = 0, 0
    for tp in range(1, 33):
        probe = msgspec.structs.replace(make_planned_probe("H200", 8), count=tp, memory_bytes=1 << 44)
        for layout in advise._list_valid_layouts(asked, tp):
            for one in advise._make_points(asked, layout, 8, 4000, None):
                found = advise.find_refusal(asked, one)
                reason = "" if found is None or found.for_memory else found.reason.partition("; give ")[0]
                message = why_sweep_refuses(one, probe)
                assert bool(message) == bool(reason), one.instance_name
                assert f"{reason}; use " in message or not message
                refused, accepted = refused + bool(message), accepted + (not message)
    assert accepted > 10 or (model, weights) == ("deepseek-v2-lite", "fp8"), (
        "its dense MLP, 10,944 wide, has half a block"
    )
    assert refused > 0 or weights == "bf16"


def test_more_requests_than_the_largest_graph_are_refused_as_sweep_refuses_them() -> None:
    """A decode step of 513 requests has no graph with one replica, but has one with two."""
    asked = dataclasses.replace(ask("H200"), weights_dtype="fp8", loads=((513, 100, None),), gpus=(8,))
    (choice,), _ = advise.choose_layouts(asked, advise.Evidence(), estimate.load_published_steps())
    assert choice.refused["tp8"] == advise.Refusal(
        advise.TOO_MANY, "--concurrency 513 is more than tp8 takes, 512 requests (the largest CUDA graph)"
    )
    assert {f.point.dp for f in choice.forecasts} == {2, 4, 8}


def test_a_gpu_without_fp8_is_refused_as_sweep_refuses_it() -> None:
    """An A100 multiplies no e4m3, in any layout."""
    asked = dataclasses.replace(ask("A100"), weights_dtype="fp8", loads=((8, 4000, None),))
    (choice,), _ = advise.choose_layouts(asked, advise.Evidence(), estimate.load_published_steps())
    assert {one.reason for one in choice.refused.values()} == {
        "a GPU with fp8 is needed (compute capability 8.9 or later), and NVIDIA A100-SXM4-80GB has 8.0; give --weights-dtype bf16"
    }


def test_padding_rows_go_through_the_experts() -> None:
    """Six requests of each of four replicas run as eight: 32 rows, not 24, and take as long."""
    of = Estimator(point(dp=4, ep="tp"), load_machine("H200"), estimate.load_published_steps().terms)
    six, eight = (estimate.pad_step(of.make_decode_rows(n, 4000), 4) for n in (24, 32))
    assert six.tokens == eight.tokens == 32
    assert len(six.decodes) == 8
    assert of.estimate_ms(of.make_decode_rows(24, 4000)) == pytest.approx(
        of.estimate_ms(of.make_decode_rows(32, 4000)), rel=0.02
    )


def test_calls_of_a_layout_are_those_of_its_groups() -> None:
    """tp4·dcp4 has two all-reduces and an exchange, tp4·dp4 an all-gather and a reduce-scatter; tp1 none."""
    machine, shape = load_machine("H200"), load_shape("deepseek-v3")

    def kinds(**degrees: int) -> set[str]:
        of = Estimator(point(**degrees, exchange="a2a"), machine, estimate.load_published_steps().terms)
        assert of.sharding.shape == shape
        return set(estimate.predict_calls(of.sharding, of.make_decode_rows(8, 4000), of.wire, "a2a"))

    assert kinds(tp=4, dcp=4) == {"all-reduce", "a2a"}
    assert kinds(tp=4, dp=4) == {"all-gather", "reduce-scatter"}
    assert kinds(tp=1) == set()


def test_calls_receive_what_the_other_ranks_send_and_are_made_once_a_layer() -> None:
    """Eight decode rows of V3, 7,168 numbers of 2 bytes, over 4 ranks: an all-reduce receives 2 · 3/4 of them, 172,032 bytes.

    128 gathered heads of 8 requests, of which 3/4 come from others: 768 times 576 + 512 numbers of 2 bytes and an lse of 4;
    by `ag_rs` outputs are fp32 and each rank has the lse of all.
    """
    asked: list[tuple[object, ...]] = []

    def seconds(*call: object) -> Seconds:
        asked.append(call)
        return Seconds(mean=1.0, low=0.5, high=2.0)

    def made(rows: int, exchange: str, **degrees: int) -> dict[str, Seconds]:
        of = Estimator(point(**degrees, exchange=exchange), load_machine("H200"), estimate.load_published_steps().terms)
        asked.clear()
        known = SimpleNamespace(in_step=SimpleNamespace(predict_seconds=seconds))
        return estimate.predict_calls(
            of.sharding, estimate.pad_step(of.make_decode_rows(rows, 4000), degrees.get("dp", 1)), known, exchange
        )

    found = made(8, "a2a", tp=4, dcp=4)
    assert asked == [("all-reduce", 4, 172_032, 1)] * 2 + [("a2a", 4, 768 * (1152 + 1024 + 4), 2)]
    assert found["all-reduce"] == Seconds(mean=122.0, low=61.0, high=244.0)
    assert found["a2a"] == Seconds(mean=61.0, low=30.5, high=122.0)
    made(8, "ag_rs", tp=4, dcp=4)
    assert asked[-1] == ("ag_rs", 4, 768 * (1152 + 2048 + 16), 2)
    made(8, "a2a", tp=4, dcp=2)
    assert asked[-1] == ("a2a", 2, 8 * 64 // 2 * (1152 + 1024 + 4), 2)
    made(32, "none", tp=4, dp=4)
    assert asked == [(name, 4, 3 * 32 * 14_336 // 4, 1) for name in ("all-gather", "reduce-scatter")]


def test_a_prefix_is_gathered_from_the_ranks_that_share_it() -> None:
    """Half of 1,000 stored tokens, 1,152 bytes each, lie on the other of two ranks."""
    of = Estimator(point(tp=2, dcp=2, exchange="a2a"), load_machine("H200"), estimate.load_published_steps().terms)
    asked: list[tuple[object, ...]] = []
    alone = SimpleNamespace(predict_seconds=lambda *call: asked.append(call) or Seconds(mean=1.0, low=0.5, high=2.0))
    known = SimpleNamespace(in_step=alone)
    estimate.predict_calls(of.sharding, StepRows(chunks=((64, 1000), (8, 0)), tokens=72), known, "a2a")
    assert asked == [("all-reduce", 2, 72 * 14_336, 1)] * 2 + [("all-gather", 2, 576_000, 1)]


def test_a_kind_of_call_errs_the_same_way_in_both_layouts() -> None:
    """4 % of ratios, and what is left where both have 5 and 8 % of the same calls: 3 %; of different ones √(25 + 64)."""
    a = forecast(100, wire={"all-reduce": 0.05})
    assert choosing.compute_margin(a, forecast(90, wire={"all-reduce": 0.08})) == pytest.approx(0.07)
    assert choosing.compute_margin(a, forecast(90, wire={"a2a": 0.08})) == pytest.approx(
        0.04 + (0.05**2 + 0.08**2) ** 0.5
    )


def test_an_estimate_is_undecided_against_a_record_within_both_bands() -> None:
    """A lead of 15 % is less than 1.1 · 1.1 − 1 = 21 %; corrected by the record, the 4 % of ratios count."""
    seen, guess = forecast(115, MEASURED), forecast(100)
    assert not choosing.is_ahead(seen, guess)
    assert choosing.is_ahead(dataclasses.replace(seen, low=115, high=115), apply_factor(guess, 1.0))


def test_a_price_is_of_all_gpus_of_a_layout() -> None:
    """3.6 $ · 4 GPUs an hour at 1,000 tok/s: 14.4 / 3.6 million tokens, 4 $ a million."""
    mean, low, high = choosing.compute_price(3.6, forecast(1000))
    assert (round(mean, 6), low < mean < high) == (4.0, True)


def test_a_score_counts_picks_within_three_percent_and_the_best_constant() -> None:
    """Two loads: the first is picked 2 % behind the best, the second 20 %; always b is right in both."""
    found = Score(
        loads=[
            Load(name="x", measured={"a": 98, "b": 100}, forecast={"a": 2, "b": 1}),
            Load(name="y", measured={"a": 80, "b": 100}, forecast={"a": 2, "b": 1}),
        ]
    )
    assert (found.right, found.constant, found.winners["b"]) == (1, ("b", 2), 2)
    assert [load.matters for load in found.loads] == [False, True]


def test_published_decode_steps_are_picked_right_by_shares_of_the_other_model() -> None:
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


def test_a_score_in_json_has_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    """With what was best and what would have been picked, as many of them right as the sentence says."""
    code, out, _ = run(capsys, "--score", str(DECODED), "--json")
    found = json.loads(out)
    assert code == 0
    assert len(found["loads"]) == 18
    assert sum(load["right"] for load in found["loads"]) == found["right"]
    assert found["fitted_without"] == ["deepseek-v3", "kimi-k2"]


def test_a_run_of_a_server_has_no_estimates_to_score(capsys: pytest.CaptureFixture[str]) -> None:
    """Its data types and page size are not known."""
    served = ROOT / "results" / "engines_H200" / "engines-vllm_2xH200_2026-11-28" / "run"
    code, _, err = run(capsys, "--score", str(served))
    assert code == 2
    assert "was measured through a server" in err
    assert "dcpbench sweep" in err


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("nnodes", [1, 2])
def test_presets_use_documented_flags_alone(name: str, nnodes: int) -> None:
    """Every flag stands in the engine's own list, and every value where that lists them."""
    listed = tomllib.loads((ROOT / "tests" / "data" / "engine_flags.toml").read_text())[name]
    assert listed["source"]
    layouts = [Layout(tp=8), Layout(tp=8, dcp=8), Layout(tp=8, dp=2, dcp=4), Layout(tp=8, dp=8)]
    seen = set()
    stripes = 64 if name == "vllm" else 1
    for layout in layouts:
        for exchange in ("ag_rs", "a2a"):
            for ep, kv, interleave in (("1", "", 1), ("tp", "fp8", stripes)):
                of = point(
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
                seen |= {word for word in words if word.startswith("--")}
                for flag, values in listed["values"].items():
                    assert flag not in words or words[words.index(flag) + 1] in values
    assert seen <= set(listed["flags"])
    assert "--dcp-comm-backend" in seen


@pytest.mark.parametrize(
    ("name", "of", "lacking"),
    [
        ("vllm", {"exchange": "symm"}, ["--exchange symm"]),
        ("sglang", {"exchange": "ag_rs_registered"}, ["--exchange ag_rs_registered"]),
        ("vllm", {"exchange": "a2a", "q_replicate": True, "interleave": 64}, ["--collectives q-replicate"]),
        ("sglang", {"exchange": "a2a", "q_replicate": True, "interleave": 64}, ["--page-size interleave=64"]),
        ("sglang", {"exchange": "symm", "project_first": True}, ["--exchange symm", "--collectives project-first"]),
        ("vllm", {"dcp": 1, "exchange": "none", "interleave": 64}, []),
    ],
)
def test_no_command_is_made_for_what_an_engine_cannot_run(name: str, of: dict[str, object], lacking: list[str]) -> None:
    """Each part without a flag is named; a layout without DCP exchanges nothing."""
    wanted = point(**({"tp": 8, "dcp": 8} | of))
    assert PRESETS[name].find_lacking(wanted) == lacking
    if not lacking:
        assert PRESETS[name].make_command(wanted, {}, "m", 7)
        return
    with pytest.raises(UsageError, match=f"{name} has no {lacking[0]}"):
        PRESETS[name].make_command(wanted, {}, "m", 7)


def test_an_exchange_that_an_engine_lacks_is_answered_with_the_nearest_and_its_own_forecast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With --exchange symm the best is one with symm; the nearest is what the same question says of the engine's exchanges."""
    words = ["--machine", "H200", "--context", "128000", "--concurrency", "32", "--json", "--exchange"]
    code, out, _ = run(capsys, *words, "symm")
    found = json.loads(out)
    best = found["loads"][0]["best"]
    assert (code, best) == (0, "tp8·dp2·dcp4·ep1 (symm)")
    assert found["commands"][best] == {}
    _, out, _ = run(capsys, *words, "ag_rs,a2a")
    theirs = {row["layout"]: row for row in json.loads(out)["loads"][0]["rows"]}
    for nearest in found["nearest"][best].values():
        assert nearest["lacks"] == ["--exchange symm"]
        assert nearest["layout"]["output_tok_s"] == theirs[nearest["layout"]["layout"]]["output_tok_s"]
        assert nearest["layout"]["layout"] == "tp8·dp2·dcp4·ep1 (a2a)"
        assert "--dcp-comm-backend a2a" in nearest["command"]


def test_the_nearest_that_an_engine_can_run_is_a_record_before_an_estimate() -> None:
    """The faster of two exchanges that ran is chosen, although no estimate of either was requested."""
    best, slower, faster = (
        forecast(tok_s, MEASURED, tp=4, dcp=4, exchange=exchange)
        for tok_s, exchange in ((500, "symm"), (400, "ag_rs"), (450, "a2a"))
    )
    load = advise.Choice(
        requests="32",
        lengths="4,000 tokens",
        concurrency=32,
        forecasts=[best],
        misses={},
        refused={},
        runs=[best, slower, faster],
    )
    found = advise.find_nearest(ask("H200"), load, best, ["ag_rs", "a2a"], estimate.load_published_steps())
    assert found is faster
    start = answer_formats.Start(
        engine="vllm", lacking=["--exchange symm"], nearest=found, load=load.name, command="vllm serve"
    )
    said = answer_formats.explain_start(start)
    assert said.startswith("vLLM has no --exchange symm. The nearest that it can run is tp4·dcp4 (a2a), 450 tok/s")
    unknown = answer_formats.Start(engine="vllm", lacking=["--exchange symm"])
    assert answer_formats.explain_start(unknown).endswith("there is no command for it.")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The command's exit code, and what it said."""
    with pytest.raises(SystemExit) as ended:
        main(["recommend", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_answers_with_a_band_costs_and_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is called measured; what does not fit says why; a folder gets the page."""
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


def test_records_stand_before_estimates_and_set_them_right(capsys: pytest.CaptureFixture[str]) -> None:
    """tp4 as measured, tp4·dp2, which nobody ran, as an estimate; records of another GPU are left out and named."""
    asked = ["--gpus", "4", "--weights-dtype", "bf16", "--cycled", "--context", "4000", "--concurrency", "32", "--json"]
    code, out, _ = run(capsys, "--machine", "H200", *asked, str(DECODED))
    layouts = {
        layout["layout"].partition(" ")[0].partition("·ep")[0]: layout for layout in json.loads(out)["loads"][0]["rows"]
    }
    assert layouts["tp4"]["layout"] == "tp4 (ep4)", "those records are of expert parallel"
    tp4 = next(
        r
        for r in read_run(DECODED).records
        if (r.point.model, r.point.concurrency, r.point.context, r.point.dp, r.point.dcp)
        == ("deepseek-v3", 32, 4000, 1, 1)
    )
    assert tp4.metrics is not None
    assert (code, layouts["tp4"]["source"]) == (0, "measured")
    assert layouts["tp4"]["output_tok_s"]["mean"] == tp4.metrics.output_tok_s.median
    assert "corrected by records" in layouts["tp4·dp2"]["whence"]
    _, out, _ = run(capsys, "--machine", "H20", *asked, str(DECODED))
    found = json.loads(out)
    assert {layout["source"] for layout in found["loads"][0]["rows"]} == {"estimated"}
    assert any("not on NVIDIA H20" in text for text in found["unknown"])
    asked[asked.index("4000")] = "777"
    _, out, _ = run(capsys, "--machine", "H200", *asked, str(DECODED))
    assert any(text.startswith(f"{DECODED}: no figure is from it") for text in json.loads(out)["unknown"])


def test_a_run_on_a_cpu_is_left_out_with_what_to_type_instead() -> None:
    """It is left out although its model is not the one of the query; a run in which all points failed is named, too."""
    run = read_run(DECODED)
    first = next(r for r in run.records if r.outcome == "ok")
    tiny = msgspec.structs.replace(first, marks=["cpu"], point=msgspec.structs.replace(first.point, model="tiny"))
    asked = dataclasses.replace(ask("H200"), loads=((8, 4000, None), (32, 4000, None)), kv_memory="40 GB")
    found, (note,) = advise._select_records(
        asked, advise.Evidence(runs=[dataclasses.replace(run, records=[tiny, tiny])])
    )
    assert found == []
    assert note.startswith("Left out: 2 records run on a CPU, and CPU times do not count; on NVIDIA H200 run ")
    assert (
        "dcpbench sweep --model deepseek-v3 --tp 4 --concurrency 8,32 --context 4000 --exchange a2a --weights-dtype bf16 "
        "--kv-dtype bf16 --kv-memory '40 GB' -o runs/measured, and name runs/measured here"
    ) in note
    failed = msgspec.structs.replace(first, outcome="failed")
    _, notes = advise._select_records(ask("H200"), advise.Evidence(runs=[dataclasses.replace(run, records=[failed])]))
    assert notes == [f"{run.name}: no point of it ran to its end."]


def ask(machine: str) -> advise.Query:
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


def test_what_is_at_work_is_told_and_said_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layout of each load, and of a score each load; nothing of it on stdout, which scripts read."""
    told: list[str] = []
    loads = ((8, 4000, None), (32, 4000, None))
    advise.choose_layouts(
        dataclasses.replace(ask("H200"), loads=loads), advise.Evidence(), estimate.load_published_steps(), told.append
    )
    assert told[0] == "8 × 4,000 tokens: tp4"
    assert [text.partition(" tokens")[0] for text in told if " tokens: " in text] == ["8 × 4,000"] * 9 + [
        "32 × 4,000"
    ] * 9
    hours = itertools.count(step=3600)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(hours)))
    asked = "--machine H200 --gpus 4 --weights-dtype bf16 --cycled --context 4000"
    _, out, err = run(capsys, *asked.split())
    assert "32 × 4,000 tokens: tp4" in err
    assert "32 × 4,000 tokens: tp4" not in out
    _, _, err = run(capsys, "--score", str(DECODED))
    assert "load 18 of 18, kimi-k2" in err


def test_emulated_points_count_for_the_machine_that_they_stand_for() -> None:
    """As emulated, never as measured; over two hosts only with the same link."""
    run = read_run(DECODED)
    first = next(r for r in run.records if r.outcome == "ok")

    def known(emulate: str, tp: int = 4) -> advise.Evidence:
        of = msgspec.structs.replace(first.point, emulate=emulate, tp=tp)
        return advise.Evidence(runs=[dataclasses.replace(run, records=[msgspec.structs.replace(first, point=of)])])

    ((record, name),), _ = advise._select_records(ask("H200+rdma-400"), known("H200"))
    assert from_record(record, name).source == EMULATED
    assert advise._select_records(ask("H200+rdma-400"), known("H200", tp=16))[0] == []
    assert advise._select_records(ask("H20"), known("H200"))[0] == []


def test_served_records_count_only_with_the_kv_memory_that_is_asked_for() -> None:
    """How much KV there is decides who waits: points at 8 GiB say nothing of a whole GPU."""
    run = read_run(ROOT / "results" / "serving_4xH200/serving-deepseek-v3-kimi-k2_4xH200_2026-11-21" / "v3-seed-8gib")
    asked = ask("H200")
    none, notes = advise._select_records(asked, advise.Evidence(runs=[run]))
    assert none == []
    assert "with 8 GiB of KV on each GPU, not all that was left (--kv-memory)" in notes[0]
    same, _ = advise._select_records(dataclasses.replace(asked, kv_memory="8GiB"), advise.Evidence(runs=[run]))
    assert len(same) == len([r for r in run.records if r.outcome == "ok"]) > 0


def test_a_served_load_is_replayed_by_estimated_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """With latencies, against an SLO that nothing meets."""
    asked = "--machine H200 --concurrency 2 --input-tokens 2000 --output-tokens 16 --slo itl=1 --json"
    code, out, _ = run(capsys, *asked.split())
    load = json.loads(out)["loads"][0]
    assert code == 0
    assert not load["meets_slo"]
    assert all(layout["ttft_ms"]["p50"] > layout["itl_ms"]["p50"] > 0 for layout in load["rows"])


@pytest.mark.parametrize(("kv_memory", "by_capacity"), [("1GiB", True), ("40GiB", False)])
def test_the_gain_of_dcp_is_split_by_cause(
    capsys: pytest.CaptureFixture[str], kv_memory: str, by_capacity: bool
) -> None:
    """1 GiB of KV per GPU holds three requests of 4,200 tokens without DCP; 40 GiB hold all. The output has the sentence, too."""
    asked = f"--machine H200 --gpus 8 --concurrency 8 --input-tokens 4000 --output-tokens 200 --kv-memory {kv_memory} --json"
    code, out, _ = run(capsys, *asked.split())
    found = json.loads(out)
    gain = found["loads"][0]["gain_by_cause"]
    parts = {tuple(part["causes"]): part["difference"] for part in gain["parts"]}
    assert code == 0
    assert sum(parts.values()) == pytest.approx(gain["layout"]["value"] - gain["baseline"]["value"])
    assert (abs(parts["KV capacity",]) > 0.01 * gain["baseline"]["value"]) == by_capacity
    assert parts["prefix-cache hits",] == 0
    assert any(text.startswith(f"{gain['layout']['layout']} against ") for text in found["details"])


def test_no_gain_is_split_without_a_baseline_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Kimi-K2 on H20 does not fit; decode steps alone are not served."""
    for asked in ("--model kimi-k2 --machine H20 --gpus 8", "--machine H200 --gpus 8 --context 4000"):
        _, out, _ = run(capsys, *asked.split(), "--concurrency", "8", "--json")
        assert json.loads(out)["loads"][0]["gain_by_cause"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "--machine H200"),
        ("--machine nope", "is no machine that is known"),
        ("--machine H200 --context 4000 --concurrency 0", "--concurrency 0 is not a positive number"),
        ("--machine H200 --request-rate x", "--request-rate x is not a rate"),
        ("--machine H200 --request-rate 1 --concurrency 2", "contradict each other"),
        ("--machine H200 --exchange foo", "--exchange foo is none of"),
        ("--machine H200 --price -1", "--price -1 is not a valid price"),
        ("--machine H200 --price 1e308", "--price 1e+308 is not a valid price"),
        ("--machine H200 --prefill chunk=0", "--prefill chunk=0 is not positive; try --prefill chunk=8192."),
        ("--machine H200 --request-rate 1 --num-requests -7", "--num-requests -7 is not positive"),
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
        ("--machine H200 --force", "--force overwrites files in the folder of -o; add -o, or leave --force out."),
        (
            "--machine H200 --score x --concurrency 8 --price 2 run",
            "does not use --concurrency, --price or RUN; leave them out.",
        ),
    ],
)
def test_mistakes_are_sentences(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Naming the option."""
    code, _, err = run(capsys, *words.split())
    assert (code, said in err, "Traceback" in err) == (2, True, False)


def test_a_machine_file_that_lacks_a_field_or_a_call_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file without `gpu` is refused; one without all-gather refuses the layouts that need it, and no other."""
    partial = tmp_path / "m.toml"
    partial.write_text('name = "ours"\n')
    asked = ["--context", "4000", "--concurrency", "8", "--json"]
    code, _, err = run(capsys, "--machine", str(partial), *asked)
    assert (code, "`gpu`" in err) == (2, True)
    calls = "".join(f"    [{ranks}, 1, 100000, 20.0],\n" for ranks in (2, 8))
    partial.write_text(f'name = "ours"\ngpu = "H200"\n[calls]\nall-reduce = [\n{calls}]\n')
    code, out, _ = run(capsys, "--machine", str(partial), *asked)
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
def test_where_nothing_fits_each_advice_works_when_it_is_typed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every option that the sentence gives, put in the place of what was typed, has an answer; one load more has none."""
    code, out, _ = run(capsys, *words.split())
    assert code == 3
    _, given, advice = out.partition("\n")[0].partition("; give ")
    assert given
    for one in (
        advice.removesuffix(".").replace(" to compare layouts that hold only part of the layers", "").split(", ")
    ):
        for option in one.split(" or "):
            code, out, _ = run(capsys, *retyped(words, option))
            assert code == 0, (option, out)
            if " up to " in option:
                name, _, most = option.partition(" up to ")
                assert run(capsys, *retyped(words, f"{name} up to {int(most) + 1}"))[0] == 3, option


def retyped(words: str, advice: str) -> list[str]:
    """The command with an advice: `--gpus 16`, `--concurrency up to 9`, `--cycled`, `no --kv-memory`, or one `with` another."""
    typed = words.split()
    for part in advice.replace("up to ", "").split(" with "):
        for name, value in re.findall(r"(--[a-z-]+) ?([^-\s]\S*)?", part):
            if name in typed:
                at = typed.index(name)
                del typed[at : at + 2]
            typed += [] if part.startswith("no ") else [name, *filter(None, [value])]
    return typed


def test_where_nothing_fits_a_label_is_said_once() -> None:
    """Nothing is suggested for layouts that fit and have no forecast."""
    large = advise.Refusal(advise.NO_ROOM, "its weights are large")
    small = dataclasses.replace(choice(), refused={"tp8": large}, instead=["--x"])
    assert answer_formats.format_answer(ask("H200"), [small]).endswith(
        "can be recommended: tp8: its weights are large; give --x."
    )
    unknown = advise.Refusal(advise.OTHER, "nothing is known of it; measure it.")
    other = dataclasses.replace(small, refused={"tp8": unknown})
    assert answer_formats.format_answer(ask("H200"), [other]).endswith(
        "recommended: tp8: nothing is known of it; measure it."
    )


def test_a_pool_that_is_too_small_for_a_step_refuses_a_layout_as_sweep_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the same words, and the command that measures the others has the same pool."""
    words = "--machine H200 --gpus 8 --context 32000 --concurrency 32 --kv-memory 8.6GiB --json"
    code, out, _ = run(capsys, *words.split())
    found = json.loads(out)
    assert code == 0
    (load,) = found["loads"]
    refused = {row["layout"]: row["reason"] for row in load["rows"] if not row["fits"]}
    fits = {row["layout"].partition(" ")[0].partition("·ep")[0] for row in load["rows"] if row["fits"]}
    settings = dataclasses.replace(ask("H200"), kv_memory="8.6GiB").settings
    for layout in list_valid_layouts(load_shape("deepseek-v3"), 8):
        of = point(tp=8, dp=layout.dp, dcp=layout.dcp, context=32000, weights_dtype="fp8")
        shortage = find_shortage(of, settings, load_shape("deepseek-v3"), make_planned_probe("H200", 8))
        assert (str(layout) in fits) == (shortage is None)
        for who in [f"{layout}·ep1", f"{layout}·ep8"] if layout.dp > 1 else [str(layout)]:
            assert refused.get(who) == (shortage.problem if shortage else None)
    assert len(fits) > 1
    assert refused["tp8"].startswith("--kv-memory holds 8.5 GiB")
    assert any("--kv-memory 8.6GiB --emulate H200" in text for text in found["unknown"])
    assert any("SGLang and vLLM do not include --kv-memory" in text for text in found["unknown"])


def test_the_default_load_has_a_long_context() -> None:
    """32 clients of 32,000 tokens, at which capacity matters; steps as in serve, and clients that do not run in lock-step."""
    of_serve = get_serve_defaults(Probe(device="cuda", count=8, name="NVIDIA H200"))
    ((requests, context, served),) = command._make_loads(command.Wanted(), load_shape("deepseek-v3").max_position)
    assert served is not None
    assert (requests, served.input_tokens, served.chunk) == (32, "32000", *of_serve["chunk"])
    assert not is_lock_step(served, requests)
    assert context == compute_extent(served).longest


def test_decode_steps_take_no_option_of_served_loads(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is refused though it would be the default, and named."""
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


def test_what_is_not_known_meets_no_objective() -> None:
    """An unknown latency is given no figure."""
    known = dataclasses.replace(forecast(100), itl_ms=Percentiles(p50=20.0))
    assert known.list_missed({"itl": 30.0}) == []
    assert known.list_missed({"itl": 10.0, "ttft": 1e9}) == ["ITL p50 20 ms", "TTFT, which is not known"]


def test_no_figure_is_told_closer_than_launches_differ() -> None:
    """A record whose samples scatter by 0.1 % has the 2 % of another launch, in the table, the price and JSON; a wider band stays."""
    seen = dataclasses.replace(forecast(1000, MEASURED), low=999.0, high=1001.0)
    low, high = 1000 / (1 + REPEATS_AGREE_WITHIN), 1000 * (1 + REPEATS_AGREE_WITHIN)
    assert seen.band == (low, high)
    assert forecast(1000).band == (forecast(1000).low, forecast(1000).high)
    priced = dataclasses.replace(ask("H200"), price=3.6)
    one = dataclasses.replace(choice(1000), forecasts=[seen])
    assert choosing.compute_price(3.6, seen) == pytest.approx(
        (4.0, 4.0 / (1 + REPEATS_AGREE_WITHIN), 4.0 * (1 + REPEATS_AGREE_WITHIN))
    )
    assert format_rows(priced, one)[0]["tok/s"] == "1,000 [980–1,020]"
    found = answer_formats.convert_to_json(priced, [one], [], estimate.load_published_steps(), {}, {})
    told = found["loads"][0]["rows"][0]["output_tok_s"]
    assert told == {"mean": 1000, "low": low, "high": high}
    assert choosing.compute_margin(seen, seen) == REPEATS_AGREE_WITHIN


def test_the_picture_names_layouts_as_the_table_does_and_marks_what_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exchanges of one layout have two marks of one colour; estimates are hollow and dashed, replays hollow."""
    drawn: list[Figure] = []
    monkeypatch.setattr("dcpbench.show.figure_style.save_figure", lambda figure, *_: drawn.append(figure))
    loads = [
        [forecast(800, MEASURED), forecast(700, dcp=4, exchange="a2a"), forecast(500, "replayed", dp=2, ep="1")],
        [forecast(900, MEASURED), forecast(800, dcp=4, exchange="symm"), forecast(600, dp=2, ep="1")],
        [forecast(950, MEASURED), forecast(850, dcp=4, exchange="symm")],
    ]
    choices = [
        dataclasses.replace(choice(), requests=str(n), concurrency=n, forecasts=of)
        for n, of in zip((8, 16, 32), loads, strict=True)
    ]
    answer_formats.draw_picture(ask("H200"), choices, tmp_path / "x.png")
    (figure,) = drawn
    signs = {str(sign.get_label()): sign for sign in figure.legends[0].legend_handles}
    named = {f.who for of in loads for f in of}
    assert set(signs) == named | {"hollow: replayed", "hollow, dashed: estimated"}
    a2a, symm = signs["tp4·dcp4 (a2a)"], signs["tp4·dcp4 (symm)"]
    assert a2a.get_color() == symm.get_color()  # type: ignore[attr-defined]
    assert a2a.get_marker() != symm.get_marker()  # type: ignore[attr-defined]
    lines = figure.axes[0].get_lines()
    points = {(line.get_ydata()[0] * 4, line.get_markerfacecolor()) for line in lines if line.get_marker() != "None"}  # type: ignore[index,operator]
    assert {rate for rate, face in points if face != "white"} == {800, 900, 950}
    joins = {
        tuple(y * 4 for y in line.get_ydata()): line.get_linestyle() for line in lines if line.get_marker() == "None"
    }  # type: ignore[union-attr,operator]
    assert joins == {(800, 900): "-", (900, 950): "-", (800, 850): "--", (500, 600): "--"}


def test_layouts_that_would_fit_and_are_not_judged_stand_beside_the_answer() -> None:
    """They stand in the answer itself, as a reader of the first sentence alone took them for worse."""
    unknown, large = advise.Refusal(advise.OTHER, "no call was measured."), advise.Refusal(advise.NO_ROOM, "large")
    known = dataclasses.replace(choice(100.0), refused={"tp8": unknown, "tp2": large})
    assert answer_formats.format_answer(ask("H200"), [known]).endswith(
        " tp8 could not be judged at every load (reasons below)."
    )
    many = dataclasses.replace(known, refused={f"tp{n}": unknown for n in range(8)})
    assert answer_formats.format_answer(ask("H200"), [many]).endswith(
        " 8 layouts could not be judged at every load (reasons below)."
    )
    fits = dataclasses.replace(known, refused={"tp8": large, "tp2": large})
    assert "judged" not in answer_formats.format_answer(ask("H200"), [fits])
    points = {"tp8": point(tp=8), "tp2": point(tp=2)}
    rows = format_rows(ask("H200"), dataclasses.replace(known, refused_points=points))
    assert [row["fits"] for row in rows] == ["yes", "not judged", "no"]


def test_layouts_over_hosts_need_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    """If nothing fits, the command does not succeed."""
    code, out, _ = run(
        capsys, *["--machine", "H200", "--gpus", "16", "--context", "4000", "--concurrency", "8", "--json"]
    )
    reasons = {row["layout"]: row["reason"] for row in json.loads(out)["loads"][0]["rows"]}
    assert code == 3
    assert "no link between hosts" in reasons["tp16"]
    assert "H200+rdma-400" in reasons["tp16"]


def test_the_shares_in_the_package_say_what_they_are_of() -> None:
    """Every source is a folder of results/, and both models can be left out."""
    steps = estimate.load_published_steps()
    assert steps.sources
    assert all((ROOT / source).is_dir() for source in steps.sources)
    assert steps.without.keys() == {"deepseek-v3", "kimi-k2"}
    assert all(0 < band < 0.2 for band in (steps.band, steps.ratio_band))
    assert msgspec.json.decode(msgspec.json.encode(steps), type=estimate.Steps) == steps


def load(**given: object) -> PointLoad:
    """A closed loop of 16 requests, 1,000 tokens in and 20 out."""
    return serve_record_builder.load(**({"requests": 16, "input_tokens": "1000", "output_tokens": "20"} | given))


@pytest.mark.parametrize(
    ("seen", "wanted", "same"),
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
def test_a_record_counts_for_the_same_layout_under_the_same_load(
    seen: dict[str, object], wanted: dict[str, object], same: bool
) -> None:
    """A decode point is no load, and one load's seed is as good as another's."""
    assert advise._is_same_load(point(**seen), point(**wanted)) is same


def stepped(concurrency: int = 8, context: int = 1020, **given: object) -> advise.Choice:
    """Return the answer for a served load on four GPUs, where only step times of tp4 are known."""
    path = step_times_builder.path_of(
        model="deepseek-v3", tp=4, dtype="bf16", page_size=64, backend="flashinfer", exchange="none"
    )
    times = step_times_builder.step_times(path=path)
    asked = dataclasses.replace(ask("H200"), cycled=True)
    steps = estimate.load_published_steps()
    tp4 = [Layout(4)]
    served = load(**given)
    return choose_one(asked, {"times.json": times}, steps, tp4, concurrency, context, served)


def choose_one(
    asked: advise.Query,
    times: dict[str, StepTimes],
    steps: estimate.Steps,
    layouts: list[Layout],
    *load: Any,
) -> choosing.Choice:
    """Choose among layouts under one load, without records."""
    draft = advise._start_choice(asked, times, steps, [], {}, layouts, lambda _: None, *load)
    advise._add_estimates(asked, [draft], steps, lambda _: None)
    return advise._finish_choice(asked, draft, steps)


def test_a_load_is_replayed_by_step_times_of_its_layout() -> None:
    """The layout is tp4, which has no exchange, and its steps come from a file, without floors."""
    (found,) = stepped().forecasts
    assert (found.source, found.whence, found.point.layout_name) == ("replayed", "times.json", "tp4")
    assert found.point.load is not None
    assert found.point.load.mode == "replay"
    assert found.ttft_ms.p50 is not None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ([{}], "Clients run in lock-step: "),
        ([{}, {"output_tokens": "uniform:10-30"}], "Clients run in lock-step under 1 of 2 loads: "),
        ([{"output_tokens": "uniform:10-30"}], None),
        ([{"arrival": "gamma", "request_rate": 2.0}], None),
    ],
)
def test_clients_that_go_in_step_are_told(changed: list[dict[str, object]], told: str | None) -> None:
    """Requests of one length in a closed loop, at 8 clients of 100 requests; one client has nobody beside it."""
    loads = tuple((8, 1020, load(requests=100, **more)) for more in changed)
    for requests, words in ((8, told), (1, None)):
        asked = dataclasses.replace(ask("H200"), loads=tuple((requests, *rest) for _, *rest in loads))
        said = [
            text
            for text in answer_formats.list_unknowns(asked, [stepped()], estimate.load_published_steps())
            if "in lock-step" in text
        ]
        assert [text[: len(words or "")] for text in said] == [words] * bool(words)


@pytest.mark.parametrize(
    ("dp", "output_tokens", "told"), [(4, "20", True), (1, "20", False), (4, "uniform:10-30", False)]
)
def test_the_answer_says_that_attention_dp_gains_by_clients_in_step(dp: int, output_tokens: str, told: bool) -> None:
    asked = dataclasses.replace(ask("H200"), loads=((8, 1020, load(requests=100, output_tokens=output_tokens)),))
    of = forecast(100)
    of = dataclasses.replace(of, point=msgspec.structs.replace(of.point, dp=dp))
    choice = advise.Choice(requests="8", lengths="1,020", concurrency=8, forecasts=[of], misses={}, refused={})
    text = answer_formats.format_answer(asked, [choice])
    assert text.endswith("which favours attention DP: ask again with --output-tokens uniform:18-22.") == told
    assert ("in lock-step" in text) == told


def test_where_step_times_do_not_reach_the_load_floors_stand_in() -> None:
    """Prompts of 100,000 tokens by steps of up to 5,500; with nothing else known, that would be the reason."""
    choice = stepped(1, 100_020, input_tokens="100000", requests=2)
    assert [f.source for f in choice.forecasts] == ["estimated"]
    assert choice.refused == {}
    assert choice.short["tp4"].startswith("times.json: no step time is known")
    told = answer_formats.list_unknowns(ask("H200"), [choice], estimate.load_published_steps())
    assert any(text.startswith(f"tp4 at {choice.name} is estimated: times.json: ") for text in told)
    times = step_times_builder.step_times(path=step_times_builder.path_of(model="deepseek-v3", tp=4, dtype="bf16"))
    served = point(concurrency=1, context=100_020, load=load(input_tokens="100000", requests=2))
    reason = advise._replay_point(ask("H200"), served, "times.json", times)
    assert isinstance(reason, str)
    assert reason.startswith("times.json: ")


@pytest.mark.parametrize("other", [{"tp": 8}, {"dcp": 4}, {"load": None}])
def test_step_times_of_another_layout_say_nothing(other: dict[str, object]) -> None:
    """They do not forecast a decode point either."""
    times = step_times_builder.step_times(path=step_times_builder.path_of(model="deepseek-v3", tp=4, dtype="bf16"))
    served = point(**({"load": load(), "context": 1020} | other))
    assert advise._replay_point(ask("H200"), served, "times.json", times) is None


def test_a_long_replay_tells_how_many_steps_it_has_served() -> None:
    """20 requests of 20 tokens, one after the other, are 400 steps or more, and each 250th is told."""
    times = step_times_builder.step_times(path=step_times_builder.path_of(model="deepseek-v3", tp=4, dtype="bf16"))
    served = point(concurrency=1, context=1020, load=load(requests=20))
    told: list[str] = []
    assert isinstance(advise._replay_point(ask("H200"), served, "times.json", times, told.append), Forecast)
    assert told[0] == "step 250"


SERVED = ((8, 1020, load()),)


@pytest.mark.parametrize(
    ("path", "device", "loads", "said"),
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
def test_a_file_of_step_times_that_says_nothing_of_what_is_asked_is_left_out_with_the_reason(
    path: dict[str, str | int], device: str, loads: tuple[tuple[int, int, PointLoad | None], ...], said: str
) -> None:
    """Its model, machine, size, precision and what it can replay; one that fits is kept in silence."""
    of = step_times_builder.path_of(
        **({"model": "deepseek-v3", "tp": 4, "dtype": "bf16", "backend": "flashinfer"} | path)
    )
    times = step_times_builder.step_times(path=of, device=device)
    asked = dataclasses.replace(ask("H200"), loads=loads)
    kept, notes = advise._select_step_times(asked, advise.Evidence(times={"times.json": times}))
    assert list(kept) == ([] if said else ["times.json"])
    assert [note.startswith("Left out: times.json, ") and said in note for note in notes] == [True] * bool(said)


def test_an_estimate_is_corrected_in_all_that_it_says() -> None:
    """Steps that ran twice as fast: twice the output, half of every latency, and percentiles that are not known stay so."""
    known = {f"{name}_ms": Percentiles(p50=80.0, p99=100.0) for name in ("ttft", "itl", "tpot", "e2el")}
    found = apply_factor(dataclasses.replace(forecast(100), **known), 2.0)  # type: ignore[arg-type]
    assert (found.tok_s, found.factor, found.origin) == (200, 2.0, "estimated, corrected")
    for name in known:
        assert getattr(found, name) == Percentiles(p50=40.0, p99=50.0)


def test_what_is_corrected_is_said_with_its_factor() -> None:
    """In the table's last column and in a sentence, for who does not read the JSON."""
    right = dataclasses.replace(choice(200, 320), forecasts=[apply_factor(forecast(200, tp=2), 0.5)])
    assert format_rows(ask("H200"), right)[0]["evidence"] == "estimated, corrected"
    (text,) = [
        t
        for t in answer_formats.list_unknowns(ask("H200"), [right], estimate.load_published_steps())
        if "corrected" in t
    ]
    assert "(0.500× at 8 × 4,000)" in text


def test_columns_of_numbers_name_their_units() -> None:
    """Whoever sees the table alone must not guess."""
    named = [name.replace("\n", " ") for name in answer_table.list_columns(dataclasses.replace(ask("H200"), price=1.0))]
    assert {"tok/s", "tok/s per GPU", "ITL p50 ms", "TTFT p50 s", "weights GiB/GPU", "$/M output tokens"} <= set(named)


def choice(*tok_s: float, slo: bool = True) -> advise.Choice:
    """A load under which layouts of two GPUs and more have these rates."""
    forecasts = [forecast(rate, tp=2 * (n + 1)) for n, rate in enumerate(tok_s)]
    misses = {} if slo else {f.who: ["ITL p99 90 ms"] for f in forecasts}
    return advise.Choice(requests="8", lengths="4,000", concurrency=8, forecasts=forecasts, misses=misses, refused={})


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (choice(200), "take tp2"),
        (choice(200, 399), "tp2 or tp4, between which only a measurement decides,"),
        (choice(200, 400, 600), "tp2 or tp4 (1 more is level with both), between which only a measurement decides,"),
        (
            choice(200, 400, 600, 800),
            "tp2 or tp4 (2 more are level with both), between which only a measurement decides,",
        ),
        (choice(200, slo=False), "none within the SLO, nearest tp2"),
        (choice(200, 400, 600, 800, 1000, slo=False), "none within the SLO, nearest tp2, tp4, tp6 or tp8"),
    ],
    ids=["one", "two", "three", "four", "missed", "five missed"],
)
def test_two_layouts_that_nothing_tells_apart_are_named(of: advise.Choice, said: str) -> None:
    assert answer_formats.format_answer(ask("H200"), [of]).startswith(f"4 × H200: {said} at 8 × 4,000 (")


def format_rows(asked: advise.Query, of: advise.Choice) -> list[dict[str, str]]:
    """The cells of a load's table by heading."""
    columns = [name.replace("\n", " ") for name in answer_table.list_columns(asked)]
    rows = [answer_table.format_row(asked, of, row) for row in answer_table.list_rows(of)]
    return [dict(zip(columns, row, strict=True)) for row in rows]


def test_a_sentence_says_by_how_much_the_best_is_ahead_and_by_how_much_it_must_be() -> None:
    """100 tok/s a GPU against 80: 25 % more, where 4 % are needed."""
    found = choice(200, 320)
    assert [row["layout"] for row in format_rows(ask("H200"), found)] == ["→ tp2", "tp4"]
    assert (
        answer_formats.format_details(ask("H200"), found)[1] == "Its output per GPU against the next, tp4: +25 % ± 4 %."
    )


def capacity(requests: int) -> Capacity:
    """Make the capacity of a layout that holds so many requests."""
    return Capacity(weight_bytes=1, kv_tokens=4000 * requests, requests=requests)


@pytest.mark.parametrize(
    ("held", "order", "said"),
    [
        (
            (9, 15, 99),
            ["→ tp4", "= tp2", "tp6"],
            "take tp4 for its KV capacity (its output is level with that of tp2),",
        ),
        (
            (15, 9, 99),
            ["→ tp2", "= tp4", "tp6"],
            "take tp2 for its KV capacity (its output is level with that of tp4),",
        ),
        ((16, 99, 99), ["→ tp2", "→ tp4", "tp6"], "tp2 or tp4, between which only a measurement decides,"),
        ((100, 103, 1), ["→ tp2", "→ tp4", "tp6"], "tp2 or tp4, between which only a measurement decides,"),
    ],
    ids=["more", "fewer", "both hold twice the load", "as many"],
)
def test_kv_headroom_breaks_ties(held: tuple[int, ...], order: list[str], said: str) -> None:
    """tp2 and tp4 are level, tp6 is clearly behind; with 8 clients, room for more than 16 requests breaks no tie."""
    found = choice(200, 399, 450)
    capacities = {f.who: capacity(n) for f, n in zip(found.forecasts, held, strict=True)}
    found = dataclasses.replace(found, capacities=capacities)
    assert [row["layout"] for row in format_rows(ask("H200"), found)] == order
    assert answer_formats.format_answer(ask("H200"), [found]).startswith(f"4 × H200: {said} at 8 × 4,000 (")
    assert found.decided == ("take" in said)
    command = answer_formats.format_details(ask("H200"), found)[-1]
    assert command.startswith("To decide, run on 2 × H200: dcpbench ab --both ") != found.decided


def test_a_pool_that_holds_fewer_requests_than_the_load_says_so() -> None:
    found = dataclasses.replace(choice(200), capacities={"tp2": capacity(5)})
    assert format_rows(ask("H200"), found)[0]["fits"] == "5 of 8 at once"
    short = Capacity(weight_bytes=1, missing_bytes=3 << 30)
    refused = {"tp8": advise.Refusal(advise.NO_WHOLE_MODEL, "large")}
    found = dataclasses.replace(found, refused=refused, refused_points={"tp8": point(tp=8)}, capacities={"tp8": short})
    assert format_rows(ask("H200"), found)[1]["fits"] == "no, 3.0 GiB short"


def test_the_command_that_decides_is_one_that_ab_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """The command is for decode steps and for served loads, planned for the machine."""
    served = msgspec.structs.replace(load(requests=64), chunk=8192)
    for more in ({"context": 4000}, {"context": 1020, "load": served, "workload": "serve"}):
        one, other = (
            point(tp=8, weights_dtype="fp8", **more, **of) for of in ({"dcp": 8, "exchange": "a2a"}, {"dp": 8})
        )
        typed = advise.format_ab_command(dataclasses.replace(ask("H200"), weights_dtype="fp8"), one, other)
        words = shlex.split(typed)[1:]
        words[words.index("--both") + 1] += " --gpu H200,count=8"
        with pytest.raises(SystemExit) as ended:
            main([*words, "--dry-run"])
        out, err = capsys.readouterr()
        assert (ended.value.code, "tp8·dcp8" in out, "tp8·dp8·ep1" in out) == (0, True, True), err


def test_engines_decide_where_ours_has_no_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command is one that `server` or `sweep --engine` takes."""
    (tmp_path / "config.json").write_text("{}")
    served = msgspec.structs.replace(load(requests=64), chunk=8192)
    for more in ({"context": 4000}, {"context": 1020, "load": served, "workload": "serve"}):
        one, other = (point(tp=8, weights_dtype="nvfp4", **more, dcp=dcp, exchange="a2a") for dcp in (4, 8))
        typed = advise.format_server_command(one, other).replace("CHECKPOINT", str(tmp_path))
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(typed)[1:], "--dry-run"])
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        assert all(f"--decode-context-parallel-size {dcp}" in out + err for dcp in (4, 8))


@pytest.mark.parametrize("deadly", [0, 4], ids=["all live", "one is killed"])
def test_estimates_of_several_processes_are_those_of_one(deadly: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the points; where a process dies, this one takes over."""
    told: list[str] = []
    points = [point(tp=tp) for tp in (1, 2, 4, 8)]
    own = os.getpid()

    def run(of: Point, _: object) -> str:
        if os.getpid() != own and of.tp == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"tp{of.tp}"

    monkeypatch.setattr(parallel, "_count_cores", lambda: 2)
    assert parallel.estimate_points(points, run, told.append) == ["tp1", "tp2", "tp4", "tp8"]  # type: ignore[arg-type]
    assert told[0] == "estimate 1 of 4: tp1"


def test_one_launch_of_a_server_decides_nothing() -> None:
    """10 % more output of a server of which no two launches are known; launches that differ by 3 % decide it."""
    single = [
        dataclasses.replace(forecast(tok_s, MEASURED, dcp=dcp), low=tok_s, high=tok_s, launch_band=None)
        for tok_s, dcp in ((1100, 4), (1000, 1))
    ]
    undecided = dataclasses.replace(choice(1), forecasts=single)
    assert math.isinf(choosing.compute_margin(*single))
    assert len(undecided.level) == 2
    assert not undecided.decided
    assert (
        "Its output per GPU against the next, tp4: +10 % in one launch, which is level"
        in answer_formats.format_details(ask("H200"), undecided)[1]
    )
    assert single[0].band == (1100, 1100)
    known = [dataclasses.replace(f, launch_band=0.03) for f in single]
    assert dataclasses.replace(undecided, forecasts=known).decided
    decided = dataclasses.replace(undecided, forecasts=known)
    assert (
        "Its output per GPU against the next, tp4: +10 % ± 3 %."
        in answer_formats.format_details(ask("H200"), decided)[1]
    )


def test_a_served_load_is_scored_with_its_latencies_under_a_name_of_its_own() -> None:
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


def test_a_record_and_an_estimate_are_told_apart_by_both_of_their_bands() -> None:
    """10 % below one and 10 % above the other: 21 %; two records by no less than repeats differ."""
    seen, expected = forecast(100, "measured"), forecast(90)
    assert choosing.compute_margin(seen, expected) == pytest.approx(0.21)
    exact = dataclasses.replace(seen, low=100.0, high=100.0)
    assert choosing.compute_margin(exact, exact) == REPEATS_AGREE_WITHIN


def test_a_folder_of_runs_is_read_as_its_runs(tmp_path: Path) -> None:
    """As `compare` reads it; a folder without any run, and an empty run, are errors with what to type."""
    for name in ("a", "b"):
        record_builder.write(tmp_path / "runs" / name, [record_builder.ok(record_builder.point())])
    found = command._load_evidence([tmp_path / "runs", tmp_path / "runs" / "b"])
    assert [run.folder.name for run in found.runs] == ["a", "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordsError, match=r"holds no records\.jsonl, nor do the folders in it; name a run"):
        command._load_evidence([tmp_path / "empty"])
    (tmp_path / "empty" / "records.jsonl").touch()
    with pytest.raises(RecordsError, match="holds no record yet; wait for its run, or leave it out"):
        command._load_evidence([tmp_path / "empty"])


def test_objectives_that_are_met_are_named_with_the_percentile_that_was_judged() -> None:
    """ITL has samples for p90, TTFT for p50 alone: the table and the JSON state both."""
    itl, ttft = Percentiles(p50=20.0, p90=25.0, samples=100), Percentiles(p50=900.0, samples=8)
    best = dataclasses.replace(forecast(1000.0), itl_ms=itl, ttft_ms=ttft)
    asked = dataclasses.replace(ask("H200"), slo={"ttft": 2000.0, "itl": 30.0}, loads=((32, 4000, None),))
    choice = advise.Choice(
        requests="32", lengths="4,000 tokens", concurrency=32, forecasts=[best], misses={}, refused={}
    )
    (row,) = answer_table.list_rows(choice)
    assert format_rows(asked, choice)[0]["SLO"] == "meets TTFT p50 900 ms and ITL p90 25 ms"
    assert answer_formats._make_row_json(asked, choice, row, {})["objectives"] == [
        {"name": "ttft", "limit_ms": 2000.0, "percentile": "p50", "ms": 900.0, "met": True},
        {"name": "itl", "limit_ms": 30.0, "percentile": "p90", "ms": 25.0, "met": True},
    ]
    assert "SLO" not in format_rows(dataclasses.replace(asked, slo={}), choice)[0]


def test_forecasts_of_several_layouts_share_their_requests() -> None:
    """A layout does not draw the prompts of a load again; another load has requests of its own."""
    load = PointLoad(mode="replay", requests=4, input_tokens="100", output_tokens="8", chunk=8192, prefill="flashinfer")
    one, other = (point(tp=4, dcp=dcp, workload="serve", load=load) for dcp in (1, 4))
    first, again = (make_point_requests(of, Settings(), 1000) for of in (one, other))
    assert all(a is b for a, b in zip(first, again, strict=True))
    longer = msgspec.structs.replace(one, load=msgspec.structs.replace(load, input_tokens="200"))
    assert {r.prompt_tokens for r in make_point_requests(longer, Settings(), 1000)} == {200}


def test_a_call_between_ranks_is_modelled_once() -> None:
    """Fits of calls take longer than all else of an estimate, and every layout needs them."""
    first, again = load_machine("H200").wire, load_machine("H200").wire
    assert all(first.calls[name] is again.calls[name] for name in first.calls)


def test_a_model_without_experts_has_no_attention_dp_and_dcp_needs_copies_of_kv_heads(
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
