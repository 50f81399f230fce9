"""Divided model folders, and steps that tools/layout_from_parts puts together from parts of measured ones."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from dcpbench.errors import UsageError
from dcpbench.models import SHAPES, load_shape
from dcpbench.points.comm_model import IN_STEP_FACTOR, Call, CommModel, Sample
from dcpbench.points.point import Point
from dcpbench.records.model_sizes import ModelSizes, shorten_shape
from dcpbench.records.record import EngineSettings, Environment, Phases, Record, Server
from tests.unit import record_builder as build
from tools.layout_from_parts import __main__ as command
from tools.layout_from_parts.composition import NO_KERNEL, CheckedStep, Composition, compose, forecast, predict_parts
from tools.layout_from_parts.steps import Target, read_steps

if TYPE_CHECKING:
    from pathlib import Path

V3 = SHAPES["deepseek-v3"]
LAYERS, REQUESTS, CONTEXT = 8, 8, 32_000
LAUNCH_US, US_PER_BYTE = 2.0, 1e-5
CALLS = ("all-gather", "reduce-scatter", "all-reduce-symm")
COMM = CommModel(
    {
        name: Call(
            name,
            tuple(Sample(n, 1, size, LAUNCH_US + US_PER_BYTE * size) for n in (2, 8) for size in (10**4, 10**5, 10**7)),
        )
        for name in CALLS
    },
    host=8,
)
"""A call takes 2 µs and 1 µs for each 100,000 bytes, for any number of ranks."""


def make_step(
    *, tp: int, dcp: int = 1, divide: int = 1, context: int = CONTEXT, ms: float | None = None, **changes: Any
) -> Record:
    """Return a measured step; `divide` divides the model's heads and widths, and `parts` are the times of its kernels in µs."""
    parts: dict[str, float] = {"projections": 400.0, "experts": 300.0, "attention": 200.0} | changes.pop("parts", {})
    idle_us = changes.pop("idle_us", 100.0)
    step_us = sum(parts.values()) + idle_us
    layers = changes.pop("layers", LAYERS)
    sizes = ModelSizes.from_shape(
        dataclasses.replace(
            shorten_shape(V3, layers),
            heads=V3.heads // divide,
            moe_intermediate_size=V3.moe_intermediate_size // divide,
            intermediate_size=V3.intermediate_size // divide,
            vocab=V3.vocab // divide,
        )
    )
    settings = EngineSettings(dtype="bfloat16", weights_dtype="fp8", kv_dtype="bfloat16", moe_backend="TRITON")
    point = Point(
        model=f"/models/v3-{divide}",
        tp=tp,
        dcp=dcp,
        concurrency=REQUESTS,
        context=context,
        exchange="unknown" if dcp > 1 else "none",
        backend="vllm",
        dtype="unknown",
        page_size=0,
    )
    fields: dict[str, Any] = {
        "phases": Phases(
            step_us=step_us, phase_us=parts, idle_us=idle_us, idle_fraction=idle_us / step_us, kernels=1, steps=14
        ),
        "model_sizes": sizes,
        "server": Server(engine="vllm", version="0.26.0", settings=settings),
        "environment": Environment(device="NVIDIA H200", device_count=2, dcpbench="0.1.0"),
        "origin": "engine vllm 0.26.0",
        "kv": None,
        "conditions": None,
    }
    return build.make_ok_record(point, median_ms=step_us / 1e3 if ms is None else ms, noise=0.0, **(fields | changes))


def make_runs(tmp_path: Path) -> list[Path]:
    """Return runs with all parts of tp8 and tp8·dcp8, and of tp2 and tp2·dcp2 with their measured steps."""
    runs = {
        "eighth": [make_step(tp=1, divide=8, parts={"projections": 90.0, "experts": 80.0, "sampling": 5.0})],
        "half": [make_step(tp=1, divide=2)],
        "whole": [
            make_step(tp=1, context=4_000, parts={"attention": 40.0, "sampling": 30.0}),
            make_step(tp=1, context=16_000, parts={"attention": 160.0, "sampling": 30.0}),
        ],
        "measured": [
            make_step(tp=2, parts={"all-reduce": 900.0}, ms=1.9),
            make_step(tp=2, dcp=2, parts={"merge": 11.0}, ms=2.0),
            make_step(
                tp=2, dcp=2, context=16_000, idle_us=250.0, parts={"merge": 10.0, "copies": 70.0, "exchange": 500.0}
            ),
        ],
    }
    return [build.write_records(tmp_path / name, records) for name, records in runs.items()]


def compose_target(folders: list[Path], **target: int) -> Composition:
    return compose(read_steps(folders, V3), V3, COMM, Target(requests=REQUESTS, context=CONTEXT, **target))


def get_measured(step: Composition) -> dict[str, tuple[float, str]]:
    """Return the time and the run of each measured part."""
    return {part.name: (part.us, part.source.run) for part in step.parts if part.source is not None}


@pytest.mark.parametrize(("divide", "tp"), [(8, 1), (4, 2), (2, 4)])
def test_rank_of_a_divided_folder_has_the_sizes_of_a_rank_of_tp8(divide: int, tp: int, tmp_path: Path) -> None:
    """128 / 8 heads, experts 2,048 / 8 and dense layers 18,432 / 8 wide, 129,280 / 8 words; all else is whole."""
    assert (
        command.run_command(command.parse_arguments(["model", str(tmp_path), "--divide", str(divide), "--tp", str(tp)]))
        == 0
    )
    shape = load_shape(str(tmp_path))
    assert [n // tp for n in (shape.heads, shape.moe_intermediate_size, shape.intermediate_size, shape.vocab)] == [
        16,
        256,
        2304,
        16160,
    ]
    whole = ("hidden", "q_lora", "latent", "experts", "top_k", "shared_experts", "n_group", "topk_group", "published")
    assert {name: getattr(shape, name) for name in whole} == {name: getattr(V3, name) for name in whole}
    assert (shape.layers, shape.first_k_dense_replace) == (8, 3)
    words = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == shape.vocab


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--divide", "3"], "128, which 6 ranks do not divide; with --tp 2 use --divide 1, 2, 4, 8"),
        (["--divide", "16", "--tp", "2"], "64 wide on one of 32 ranks, which is no multiple of the fp8 block of 128"),
        (["--divide", "2", "--layers", "62"], "deepseek-v3 has 61 layers"),
    ],
)
def test_division_that_vllm_cannot_run_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        command.run_command(command.parse_arguments(["model", str(tmp_path / "folder"), *options]))
    assert not (tmp_path / "folder").exists()


def test_calls_of_a_step_have_the_bytes_that_a_rank_of_eight_receives() -> None:
    """8 requests: all-reduce 2 · 7/8 · 8 · 7,168 · 2 = 200,704 bytes, 17 times; logits 7/8 · 8 · 129,280 · 2 = 1,809,920;
    queries 7/8 · 8 · 128 · 576 · 2 = 1,032,192; log-sum-exps 7 · 8 · 128 · 4 = 28,672; outputs 7/8 · 8 · 128 · 512 · 2 = 917,504.
    """
    reduce, exchange = predict_parts(V3, LAYERS, Target(tp=8, dcp=8, requests=8, context=CONTEXT), COMM)
    assert reduce.calls == {"all-reduce-symm": 17}
    assert reduce.us == pytest.approx(IN_STEP_FACTOR * 17 * (2 + 2.00704))
    assert exchange.calls == {"all-gather": 17, "reduce-scatter": 8}
    assert exchange.us == pytest.approx(IN_STEP_FACTOR * (2 + 18.0992 + 8 * (2 + 10.32192 + 2 + 0.28672 + 2 + 9.17504)))
    assert exchange.low_us < exchange.us < exchange.high_us
    _, logits = predict_parts(V3, LAYERS, Target(tp=8, dcp=1, requests=8, context=CONTEXT), COMM)
    assert logits.us == pytest.approx(IN_STEP_FACTOR * (2 + 18.0992))


def test_step_of_tensor_parallelism_has_parts_of_its_rank_and_modelled_communication(tmp_path: Path) -> None:
    """90 + 80 + 200 + 30 + 100 µs measured; sampling is that of all words, not the 5 µs of an eighth of them."""
    step = compose_target(make_runs(tmp_path), tp=8, dcp=1)
    assert get_measured(step) == {
        "attention": (200.0, "eighth"),
        "projections": (90.0, "eighth"),
        "experts": (80.0, "eighth"),
        "sampling": (30.0, "whole"),
        NO_KERNEL: (100.0, "eighth"),
    }
    communication = sum(part.us for part in step.parts if part.source is None)
    assert step.us == pytest.approx(500 + communication)
    assert communication == pytest.approx(IN_STEP_FACTOR * (17 * 4.00704 + 20.0992))


def test_step_of_dcp_attends_with_all_heads_and_has_the_kernels_around_an_exchange(tmp_path: Path) -> None:
    """Attention is that of 128 heads over 32,000 / 8 tokens. The 500 µs of the measured exchange are replaced."""
    step = compose_target(make_runs(tmp_path), tp=8, dcp=8)
    assert get_measured(step) == {
        "attention": (40.0, "whole"),
        "projections": (90.0, "eighth"),
        "experts": (80.0, "eighth"),
        "sampling": (30.0, "whole"),
        "merge": (11.0, "measured"),  # at 32,000 tokens, the nearest context
        NO_KERNEL: (100.0, "measured"),
    }
    assert step.us == pytest.approx(351 + sum(part.us for part in step.parts if part.source is None))


def test_check_uses_no_part_of_the_step_that_it_checks(tmp_path: Path) -> None:
    """tp2·dcp2 at 32,000 tokens was measured with a merge of 11 µs; the one at 16,000 tokens stands in for it."""
    step = compose_target(make_runs(tmp_path), tp=2, dcp=2)
    found = get_measured(step)
    assert {name: found[name] for name in ("merge", "copies", NO_KERNEL)} == {
        "merge": (10.0, "measured"),
        "copies": (70.0, "measured"),
        NO_KERNEL: (250.0, "measured"),
    }
    assert (found["projections"], found["attention"]) == ((400.0, "half"), (160.0, "whole"))


def test_band_is_the_largest_error_of_the_check(tmp_path: Path) -> None:
    """tp2: 400 + 300 + 200 + 30 + 100 = 1,030 µs, all-reduces 17 · (2 + 1.14688) and logits 2 + 10.3424, of 1,900 µs measured."""
    targets = [Target(tp=2, dcp=dcp, requests=REQUESTS, context=CONTEXT) for dcp in (1, 2)]
    found = forecast(read_steps(make_runs(tmp_path), V3), V3, "H200", COMM, [], targets)
    assert [(check.run, check.measured_us) for check in found.checks] == [("measured", 1900), ("measured", 2000)]
    errors = [check.error for check in found.checks]
    assert errors[0] == pytest.approx((1030 + IN_STEP_FACTOR * (17 * 3.14688 + 12.3424)) / 1900 - 1)
    assert found.band == max(abs(error) for error in errors)


def test_step_that_the_profiler_prolongs_gives_no_gaps(tmp_path: Path) -> None:
    """1,000 µs of parts and gaps are more than 1.03 · 0.9 ms."""
    run = build.write_records(tmp_path / "run", [make_step(tp=1, divide=8, ms=0.9)])
    with pytest.raises(UsageError, match=r"a step of a rank of tp8 .* `model FOLDER --divide 8 --tp 1`"):
        compose_target([run], tp=8, dcp=1)


@pytest.mark.parametrize(
    ("left_out", "dcp", "message"),
    [
        ("eighth", 1, "--tp 1 --context 32000"),
        ("whole", 1, "all heads over 4,000 tokens .* --tp 1 --context 4000"),
        ("measured", 8, "the kernels around an exchange .* --tp 2 --dcp 2"),
    ],
)
def test_missing_measurement_is_named_with_its_command(left_out: str, dcp: int, message: str, tmp_path: Path) -> None:
    runs = [run for run in make_runs(tmp_path) if run.name != left_out]
    with pytest.raises(UsageError, match=message):
        compose_target(runs, tp=8, dcp=dcp)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server": Server(engine="vllm", version="0.33.0")}, "differ in version of vLLM"),
        ({"environment": Environment(device="NVIDIA H100", device_count=2)}, "differ in GPU"),
    ],
)
def test_parts_of_another_version_or_gpu_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    runs = make_runs(tmp_path)
    other = build.write_records(tmp_path / "other", [make_step(tp=1, divide=8, **changes)])
    with pytest.raises(UsageError, match=message):
        compose_target([other, *runs[1:]], tp=8, dcp=1)


def test_different_expert_kernels_are_stated(tmp_path: Path) -> None:
    settings = EngineSettings(dtype="bfloat16", weights_dtype="fp8", kv_dtype="bfloat16", moe_backend="CUTLASS")
    server = Server(engine="vllm", version="0.26.0", settings=settings)
    other = build.write_records(tmp_path / "other", [make_step(tp=1, divide=8, server=server)])
    step = compose_target([other, *make_runs(tmp_path)[1:]], tp=8, dcp=1)
    assert step.differences == ["vLLM chose different kernels (moe_backend: other: CUTLASS, whole: TRITON)."]


def test_exchange_with_other_calls_is_refused(tmp_path: Path) -> None:
    settings = EngineSettings(dtype="bfloat16", weights_dtype="fp8", kv_dtype="bfloat16", exchange="a2a")
    server = Server(engine="vllm", version="0.26.0", settings=settings)
    other = build.write_records(tmp_path / "other", [make_step(tp=2, dcp=2, server=server)])
    with pytest.raises(UsageError, match="other has --exchange a2a"):
        compose_target([*make_runs(tmp_path)[:-1], other], tp=8, dcp=8)


def test_runs_with_different_numbers_of_layers_are_refused(tmp_path: Path) -> None:
    run = build.write_records(tmp_path / "run", [make_step(tp=1, layers=4), make_step(tp=2)])
    with pytest.raises(UsageError, match="different numbers of layers"):
        read_steps([run], V3)


def test_dummy_weights_skewed_routing_other_models_and_unprofiled_steps_are_not_used(tmp_path: Path) -> None:
    dummy = make_step(tp=1)
    dummy = msgspec.structs.replace(dummy, point=msgspec.structs.replace(dummy.point, weights="dummy"))
    skewed = make_step(tp=2)
    skewed = msgspec.structs.replace(skewed, point=msgspec.structs.replace(skewed.point, routing="zipf:1"))
    other = make_step(tp=4, model_sizes=ModelSizes.from_shape(SHAPES["kimi-k2"]))
    unprofiled = make_step(tp=8, phases=None)
    with pytest.raises(UsageError, match="no run has profiled decode steps"):
        read_steps([build.write_records(tmp_path / "run", [dummy, skewed, other, unprofiled])], V3)


def test_command_prints_steps_with_their_band_and_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compose", *map(str, make_runs(tmp_path)), "--concurrency", "8"]
    assert command.run_command(command.parse_arguments([*words, "--json"])) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["target"]["dcp"] for step in found["steps"]] == [1, 8]
    for step in found["steps"]:
        assert step["us"] == pytest.approx(sum(part["us"] for part in step["parts"]))
    assert found["band"] == pytest.approx(max(abs(check["error"]) for check in found["checks"]))
    assert command.run_command(command.parse_arguments(words)) == 0
    text = capsys.readouterr().out
    low, high = (found["steps"][0]["us"] / 1e3 * factor for factor in (1 / (1 + found["band"]), 1 + found["band"]))
    assert f"({low:.2f}–{high:.2f} by the check" in text
    assert "eighth, tp1: 16 heads over 32,000 tokens, experts 256 wide" in text
    assert "8 of 61 layers" in text


def test_forecast_without_a_check_has_no_band_and_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(run) for run in make_runs(tmp_path) if run.name != "half"]
    assert command.run_command(command.parse_arguments(["compose", *runs, "--concurrency", "8"])) == 3
    text = capsys.readouterr().out
    assert "No band" in text
    assert "`model FOLDER --divide 2 --tp 1`" in text


def test_context_that_ranks_cannot_share_equally_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use --context 32000"):
        command.run_command(command.parse_arguments(["compose", *map(str, make_runs(tmp_path)), "--context", "32001"]))


def test_error_of_a_check_has_the_sign_of_the_difference() -> None:
    empty = Composition(target=Target(tp=2, dcp=1, requests=1, context=2), layers=1, parts=[], differences=[])
    assert CheckedStep(composition=empty, measured_us=10.0, run="run").error == -1
