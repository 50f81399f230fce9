"""Recommendations from step times and records of other engines: use, names, and separation from dcpbench's own engine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.points.engine_points import make_engine_load, make_engine_point
from dcpbench.points.layout import Layout
from dcpbench.points.names import CLOSED, VLLM
from dcpbench.points.point import Load, Point
from dcpbench.recommend import advise, answer_formats, estimate, forecast
from dcpbench.records.record import Environment
from dcpbench.serving.engine_cases import EngineExtent, make_engine_cases
from dcpbench.serving.step_times import EngineServer, MeasuredCase, StepTimes, get_engine_path
from tests.unit import serve_record_builder
from tests.unit.step_times_builder import CONDITIONS, compute_true_ms
from tests.unit.test_recommend import choose_one, load, make_query

if TYPE_CHECKING:
    from dcpbench.recommend.forecast import Forecast

ENGINE = EngineServer(
    engine=VLLM, version="0.26.0", policy=VLLM, token_budget=8192, max_requests=64, block_tokens=64, kv_tokens=2_000_000
)


def make_server_point(model: str = "deepseek-ai/DeepSeek-V3", **precision: str) -> Point:
    """Return a served point of a vLLM server on tp4."""
    wanted = load()
    fields = {name: value for name, value in msgspec.structs.asdict(wanted).items() if name in Load.__struct_fields__}
    own = {"chunk", "policy", "prefix_cache", "prefill"}
    return make_engine_point(
        model=model,
        layout={"tp": 4, "dp": 1, "dcp": 1},
        backend=VLLM,
        load=make_engine_load(**{name: value for name, value in fields.items() if name not in own}),
        concurrency=8,
        context=1020,
        precision=precision,
    )


def make_server_times(point: Point, layers: int = 0) -> StepTimes:
    """Return step times of the server of a point."""
    cases = make_engine_cases(EngineExtent.from_points([point], ENGINE))
    return StepTimes(
        path=get_engine_path(point),
        cases=[MeasuredCase(case=case, samples_ms=[compute_true_ms(case.compute_work())]) for case in cases],
        launch_ms=0.0,
        measuring_s=1.0,
        conditions=msgspec.structs.replace(CONDITIONS, layers=layers, layers_held=layers),
        environment=Environment(device="NVIDIA H200", device_count=4),
        engine=ENGINE,
    )


def choose(times: StepTimes) -> tuple[advise.Choice, list[str]]:
    """Return the choice among tp4 for the load, and the notes on the step times."""
    query = dataclasses.replace(make_query("H200"), cycled=True, loads=((8, 1020, load()),))
    kept, notes = advise._select_step_times(query, advise.Evidence(times={"vllm.json": times}))
    steps = estimate.load_published_steps()
    return choose_one(query, kept, steps, [Layout(4)], 8, 1020, load()), notes


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-ai/DeepSeek-V3", "/models/DeepSeek-V3"])
def test_step_times_of_a_server_are_replayed_with_its_policy(model: str) -> None:
    choice, notes = choose(make_server_times(make_server_point(model)))
    (found,) = choice.forecasts
    assert (found.source, found.engine, found.basis) == ("replayed", "vLLM 0.26.0", "vllm.json")
    assert found.origin == "replayed, vLLM 0.26.0"
    assert notes == [
        "vllm.json: the precision of the server's weights and KV cache is unknown; it is taken to be as requested."
    ]
    assert (
        answer_formats.describe_engines([found])
        == "The forecasts are for the kernels and the scheduling policy of vLLM 0.26.0."
    )
    assert answer_formats._make_forecast_json(make_query("H200"), found)["engine"] == "vLLM 0.26.0"


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        (make_server_times(make_server_point(), layers=8), "step times of 8 of the 61 layers of deepseek-v3"),
        (
            make_server_times(make_server_point("DeepSeek-V2-Lite")),
            "step times of DeepSeek-V2-Lite, not of deepseek-v3",
        ),
        (
            make_server_times(make_server_point(dtype="bf16", weights_dtype="fp8")),
            "step times of --weights-dtype fp8, not bf16",
        ),
    ],
    ids=["fewer layers", "another model", "another precision"],
)
def test_step_times_of_another_model_are_left_out_with_a_reason(times: StepTimes, reason: str) -> None:
    choice, notes = choose(times)
    assert [f.engine for f in choice.forecasts] == [""]
    assert notes == [f"Left out: vllm.json, {reason}."]


def test_step_times_of_all_layers_are_used() -> None:
    choice, _ = choose(make_server_times(make_server_point(), layers=61))
    assert [f.engine for f in choice.forecasts] == ["vLLM 0.26.0"]


def test_record_of_a_server_counts_and_names_its_engine() -> None:
    """The chunk size of a server is the engine's own, which no record contains."""
    point = make_server_point("deepseek-v3")
    served = serve_record_builder.make_served_record(serve_record_builder.make_point(Layout(4)))
    record = msgspec.structs.replace(served, point=point, origin="engine vllm 0.26.0")
    assert record.environment is not None
    record = msgspec.structs.replace(
        record, environment=msgspec.structs.replace(record.environment, device="NVIDIA H200")
    )
    query = dataclasses.replace(make_query("H200"), loads=((8, 1020, load()),))
    assert advise._explain_exclusion(record, query) == ""
    wanted = advise._make_point(query, Layout(4), "none", "1", 8, 1020, load())
    assert advise._is_same_load(point, wanted, server=True)
    assert not advise._is_same_load(point, wanted)
    assert forecast.from_record(record, "run").engine == "vLLM 0.26.0"
    assert forecast.from_record(served, "run").engine == ""


def test_answer_names_each_of_several_engines() -> None:
    (vllm,) = choose(make_server_times(make_server_point()))[0].forecasts
    own: Forecast = dataclasses.replace(vllm, engine="")
    text = answer_formats.describe_engines([vllm, own])
    assert "vLLM 0.26.0 and dcpbench's engine" in text
    assert "differences between layouts are also differences between engines" in text
    assert "forecasts are for dcpbench's engine" in answer_formats.describe_engines([own])
    assert own.point.load is not None
    assert own.point.load.arrival == CLOSED
