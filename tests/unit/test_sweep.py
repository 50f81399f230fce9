"""Test which points a sweep expands to, and which it rejects for which get_shared_reason."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import (
    CapacityError,
    DcpbenchError,
    InsufficientMemoryError,
    LayoutError,
    MissingPackageError,
    ModelError,
    UnusedOptionsError,
    UsageError,
)
from dcpbench.launch.progress import format_rejected
from dcpbench.models import load_shape
from dcpbench.plan import grid
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.points import budget, memory
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.reports.dataframes import load_frames
from dcpbench.reports.findings import BASELINE_OF
from dcpbench.serving.allocator import DcpAllocator
from tests.unit import record_builder
from tests.unit.probes import CPU, H200X4
from tests.unit.test_shapes import V3 as V3_CONFIG

if TYPE_CHECKING:
    from pathlib import Path

    from dcpbench.points.device_probe import Probe

GIB = 1 << 30


def expand(probe: Probe = H200X4, nnodes: int = 1, **options: object) -> list[grid.Candidate]:
    """Return the candidates of options given as on the command line."""
    return grid.expand_grid(make_spec(options, probe), probe, nnodes)


def get_shared_reason(candidates: list[grid.Candidate]) -> str:
    """Return the one reason that all rejected candidates share."""
    (text,) = {str(c.error) for c in candidates if c.error}
    return text


def test_default_sweep_on_gpus_measures_full_dcp_and_its_baseline() -> None:
    """With 4 GPUs and 3 concurrencies, the sweep has 3 points of tp4·dcp4 and adds 3 of tp4."""
    found = expand()
    assert [(c.point.dcp, c.point.concurrency, c.added) for c in found] == [
        (1, 8, True),
        (1, 32, True),
        (1, 48, True),
        (4, 8, False),
        (4, 32, False),
        (4, 48, False),
    ]
    assert {(c.point.model, c.point.backend, c.point.dtype, c.point.page_size, c.point.context) for c in found} == {
        ("deepseek-v3", "flashinfer", "bf16", 64, 4000)
    }


def test_default_backend_is_triton_without_flashinfer() -> None:
    """A default never names a package that is missing."""
    probe = msgspec.structs.replace(H200X4, packages={"flashinfer": None})
    assert {c.point.backend for c in expand(probe)} == {"triton"}


def test_default_sweep_on_cpu_is_tiny_and_runs() -> None:
    """The default is 8 gloo ranks, fp32, the reference kernel, and no rejected point."""
    found = expand(CPU)
    assert {(c.point.model, c.point.tp, c.point.dtype, c.point.backend) for c in found} == {
        ("tiny", 8, "fp32", "reference")
    }
    assert all(c.plan is not None and c.plan.layers_held == 3 for c in found)


def test_baseline_in_the_options_is_not_added_again() -> None:
    """The options --dcp 1,4 contain the baseline already."""
    found = expand(dcp="1,4", concurrency=8)
    assert [(c.point.dcp, c.added) for c in found] == [(1, False), (4, False)]


def test_baseline_of_dcp_with_dp_is_the_same_dp_without_dcp() -> None:
    """The baseline of tp4·dp2·dcp2 is tp4·dp2, since tp4 would differ in two ways; the baseline of tp4·dp4 is tp4."""
    found = expand(tp="4", dp="2,4", concurrency=8)
    assert [(str(c.point.layout), c.point.exchange, c.added) for c in found] == [
        ("tp4", "none", True),
        ("tp4·dp2", "none", True),
        ("tp4·dp2·dcp2", "ag_rs", False),
        ("tp4·dp4", "none", False),
    ]


def list_placements(found: list[grid.Candidate]) -> list[tuple[str, str, bool]]:
    """Return for each point its layout, its placement of experts, and whether it was added."""
    return [(str(c.point.layout), c.point.ep, c.added) for c in found]


def test_experts_are_tensor_parallel_by_default_also_with_attention_dp() -> None:
    """The default is that of vLLM and SGLang, which have a flag for expert parallelism. A baseline places experts in
    the same way.
    """
    assert list_placements(expand(tp=4, dp="1,4", concurrency=8)) == [
        ("tp4", "1", True),
        ("tp4·dcp4", "1", False),
        ("tp4·dp4", "1", False),
    ]
    assert list_placements(expand(CPU, tp=4, dp=2, dcp=2, concurrency=2)) == [
        ("tp4·dp2", "1", True),
        ("tp4·dp2·dcp2", "1", False),
    ]
    assert list_placements(expand(tp=1, concurrency=8, ep="1,tp", model="deepseek-v2-lite")) == [("tp1", "tp", False)]


def test_experts_are_placed_as_the_ep_option_states() -> None:
    """The value `tp` means all ranks of a layout, and the baseline places experts in the same way."""
    both = [("tp4", "1", True), ("tp4", "tp", True), ("tp4·dcp4", "1", False), ("tp4·dcp4", "tp", False)]
    assert sorted(list_placements(expand(ep="1,tp", concurrency=8))) == both
    assert sorted(list_placements(expand(ep="1,4", concurrency=8))) == both
    assert list_placements(expand(ep="tp", concurrency=8, dp=4)) == [("tp4", "tp", True), ("tp4·dp4", "tp", False)]
    assert list_placements(expand(ep=1, concurrency=8, dp=4)) == [("tp4", "1", True), ("tp4·dp4", "1", False)]


def test_ep_over_some_of_the_ranks_is_refused() -> None:
    assert "--ep 2 with --tp 4: experts are tensor-parallel over all ranks (--ep 1)" in get_shared_reason(
        expand(ep=2, concurrency=8)
    )
    with pytest.raises(UsageError, match="--ep whole: not a whole number; write for example --ep 1,tp"):
        expand(ep="whole")


def test_report_finds_the_added_baseline_of_every_dcp_point(tmp_path: Path) -> None:
    """A point and its baseline share all columns of the report's key except interleave."""
    found = [record_builder.make_ok_record(c.point, median_ms=10) for c in expand(dp="1,2", dcp="2", concurrency=8)]
    table = load_frames([record_builder.write_records(tmp_path / "r", found)]).points
    keys = {dcp: {tuple(row) for row in table[table["dcp"] == dcp][BASELINE_OF].to_numpy()} for dcp in (1, 2)}
    assert len(keys[2]) == 2
    assert keys[2] <= keys[1]


@pytest.mark.parametrize(("changed", "fits"), [({}, True), ({"num_hidden_layers": 5}, False)], ids=["same", "another"])
def test_checkpoint_has_the_sizes_of_its_config_json(tmp_path: Path, changed: dict[str, int], fits: bool) -> None:
    """The option --weights alone takes the shape from config.json; a --model with other sizes is an error."""
    (tmp_path / "config.json").write_text(json.dumps(V3_CONFIG | changed))
    (tmp_path / "model.safetensors").touch()
    alone = make_spec({"weights": str(tmp_path)}, H200X4)
    assert {c.plan.layers for c in grid.expand_grid(alone, H200X4) if c.plan} == {changed.get("num_hidden_layers", 61)}
    both = make_spec({"weights": str(tmp_path), "model": "deepseek-v3"}, H200X4)
    if fits:
        assert {c.point.model for c in grid.expand_grid(both, H200X4)} == {"deepseek-v3"}
    else:
        with pytest.raises(ModelError, match=r"layers 61 and 5\. Leave --model out"):
            grid.expand_grid(both, H200X4)


def test_no_baseline_adds_no_point() -> None:
    assert [c.point.dcp for c in expand(dcp="4", concurrency=8, baseline=False)] == [4]


def test_point_that_cannot_run_adds_no_baseline() -> None:
    """A baseline of tp8 on 4 GPUs could not run either and would only repeat the reason."""
    assert [c.added for c in expand(tp="8", concurrency=8)] == [False]


def test_points_without_dcp_have_no_exchange_axis() -> None:
    """Points with dcp 1 exchange nothing: their exchange is `none`, and with dcp 4 it is ag_rs."""
    found = expand(dcp="1,4", concurrency=8, exchange="ag_rs")
    assert [(c.point.dcp, c.point.exchange) for c in found] == [(1, "none"), (4, "ag_rs")]


def test_exchange_options_are_axes_of_points_with_dcp_only() -> None:
    """Two exchanges, each with and without replicated q, make four points with dcp 4, and one baseline without these
    options.
    """
    options = {"exchange": "ag_rs,a2a", "q_replicate": [False, True], "project_first": True, "dtype": "bf16"}
    found = expand(dcp="4", concurrency=8, **options)
    assert [(c.point.dcp, grid.format_path(c.point), c.added) for c in found] == [
        (1, "flashinfer", True),
        (4, "flashinfer a2a +project-first", False),
        (4, "flashinfer ag_rs +project-first", False),
        (4, "flashinfer a2a +q-replicate +project-first", False),
        (4, "flashinfer ag_rs +q-replicate +project-first", False),
    ]
    assert (found[0].point.exchange, found[0].point.q_replicate, found[0].point.project_first) == ("none", False, False)
    rows = grid.make_table(found)
    assert [(r["path"], r["exchange"], r["q_replicate"]) for r in rows[3:4]] == [
        ("flashinfer a2a +q-replicate +project-first", "a2a", True)
    ]


def test_replicated_projections_take_memory_from_the_kv_pool() -> None:
    """Each held layer needs more bytes, so that fewer layers of V3 fit in addition to the same pool on 4 GPUs."""
    options = {"dcp": "4", "concurrency": 8, "q_replicate": [False, True], "baseline": False, "kv_memory": "40GiB"}
    own, wide = (c.plan for c in expand(**options, dtype="bf16"))
    each = [(plan.weight_bytes / plan.layers_held, plan.layers_held) for plan in (own, wide)]
    assert each[1][0] > each[0][0]
    assert each[1][1] <= each[0][1]
    assert wide.full_weight_bytes - own.full_weight_bytes == 61 * 96 * (1536 * 192 + 128 * 512) * 2
    own, wide = (c.plan for c in expand(**options, weights_dtype="fp8"))
    q_b, w_uk = 96 * 1536 * 192 * (1 + 4 / 128**2), 96 * 128 * 512 * 2  # W_UK is absorbed and stays in bf16
    assert wide.full_weight_bytes - own.full_weight_bytes == 61 * (q_b + w_uk)


def test_exchange_options_without_a_dcp_point_are_refused() -> None:
    """The option --collectives q-replicate=yes with --dcp 1 alone would silently measure something else; the same holds
    for verify.
    """
    with pytest.raises(
        UsageError, match=r"--collectives q-replicate and --collectives project-first without a layout with --dcp > 1"
    ):
        expand(dcp="1", concurrency=8, q_replicate=True, project_first=True)
    spec = make_spec({"tp": "2", "model": "tiny", "project_first": True}, CPU)
    with pytest.raises(UsageError, match=r"--collectives project-first without"):
        grid.expand_layouts([Layout(tp=2)], spec, CPU)
    assert all(c.error is None for c in grid.expand_layouts([Layout(tp=2), Layout(tp=2, dcp=2)], spec, CPU))


@pytest.mark.parametrize("model", ["deepseek-v3", "qwen3-235b-a22b", "llama-3.1-70b", "gpt-oss-120b"])
@pytest.mark.parametrize("option", ["exchange", "all_reduce"])
@pytest.mark.parametrize("tp", ["1", "4", "8", "3"])
@pytest.mark.parametrize("gpus", [8, 16])
def test_advice_for_an_unused_option_names_a_layout_that_runs(model: str, option: str, tp: str, gpus: int) -> None:
    """Qwen3-235B has 4 KV heads, so that DCP needs 8 ranks, and Llama 8, so that it needs 16; gpt-oss has sliding windows."""
    typed = {
        "model": model,
        "tp": tp,
        "dp": tp if option == "all_reduce" else "1",
        "dcp": "1",
        "concurrency": 8,
        "baseline": False,
    }
    typed |= {option: "symm" if option == "all_reduce" else "a2a"}
    probe = make_planned_probe("H200", gpus)
    with pytest.raises(UnusedOptionsError) as refused:
        expand(probe, **typed)
    advice = re.search(r"Use for example (.*), or leave it out", str(refused.value))
    least = {"deepseek-v3": 1, "qwen3-235b-a22b": 8, "llama-3.1-70b": 16, "gpt-oss-120b": 999}[model]
    assert (advice is not None) == (option == "all_reduce" or least <= gpus)
    if advice is not None:
        words = advice[1].replace("--", "").split()
        typed["dtype"] = "bf16"  # as other precisions have blocks that do not divide over all layouts
        found = expand(probe, **typed | dict(zip(words[::2], words[1::2], strict=True)))
        assert [c.error for c in found if c.error and not isinstance(c.error, InsufficientMemoryError)] == []


def test_auto_choices_need_times_measured_on_gpus() -> None:
    """A baseline without DCP chooses among backends only; verify and a CPU have no times to choose by."""
    found = expand(dcp="4", concurrency=8, backend="auto", exchange="auto")
    assert [(c.point.dcp, c.point.backend, c.point.exchange, c.error) for c in found] == [
        (1, "auto", "none", None),
        (4, "auto", "auto", None),
    ]
    typed = {"model": "tiny", "tp": "2", "dcp": "2", "concurrency": 2, "exchange": "auto", "backend": "reference"}
    with_auto = make_spec(typed, CPU)
    (rejected,) = (c.error for c in grid.expand_grid(with_auto, CPU) if not c.added)
    assert "--exchange auto chooses by time" in str(rejected)
    assert "use --backend reference --exchange ag_rs" in str(rejected)
    both = make_spec(typed | {"backend": "auto"}, CPU)
    (rejected,) = (c.error for c in grid.expand_grid(both, CPU) if not c.added)
    assert "--backend auto and --exchange auto choose by time" in str(rejected)
    (rejected,) = (c.error for c in grid.expand_layouts([Layout(tp=2, dcp=2)], with_auto, H200X4))
    assert "verify measures none" in str(rejected)


def test_points_and_baselines_have_the_same_all_reduce() -> None:
    """The baseline of a point with --collectives all-reduce=symm has it, too; a single rank reduces nothing."""
    found = expand(dcp="4", concurrency=8, all_reduce="nccl,symm", dtype="bf16")
    assert [(c.point.dcp, c.point.all_reduce) for c in found] == [(1, "nccl"), (1, "symm"), (4, "nccl"), (4, "symm")]
    assert grid.format_path(found[1].point) == "flashinfer symm all-reduce"
    found = expand(tp="1,4", dcp="1", concurrency=8, all_reduce="symm")
    assert [(c.point.tp, c.point.all_reduce) for c in found] == [(1, "nccl"), (4, "symm")]


def test_default_dcp_is_the_largest_for_each_tp_and_dp() -> None:
    """The layouts are tp/dp 2/1, 2/2, 4/1 and 4/2."""
    found = expand(tp="2,4", dp="1,2", concurrency=8, baseline=False)
    assert [(c.point.tp, c.point.dp, c.point.dcp) for c in found] == [(2, 1, 2), (2, 2, 1), (4, 1, 4), (4, 2, 2)]


def test_points_that_share_an_engine_are_adjacent() -> None:
    """Points are sorted by repeat, tp, model, layout, backend, exchange and load, so that each repeat builds an engine
    once.
    """
    found = expand(
        model="kimi-k2,deepseek-v3",
        tp="2,4",
        backend="triton,flashinfer",
        context="4000,100",
        concurrency="8,1",
        repeats=2,
    )
    engines = [(c.point.repeat, c.point.model, c.point.layout) for c in found]
    changes = sum(a != b for a, b in itertools.pairwise(engines))
    assert changes == len(set(engines)) - 1
    assert [c.point.repeat for c in found] == sorted(c.point.repeat for c in found)
    first = found[0].point
    assert (first.model, first.concurrency, first.context) == ("kimi-k2", 1, 100)


def test_too_many_ranks_error_suggests_a_command() -> None:
    """All points need 8 GPUs, and the sweep must not silently measure something smaller."""
    with pytest.raises(CapacityError, match=r"needs 8 GPUs and there are 4 .*--model deepseek-v3 --tp 4 --dcp 4"):
        grid.require_runnable(expand(tp="8", dcp="8"))


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"dcp": "8"}, "--tp 4 --dcp 4"),
        ({"dcp": "2"}, "--tp 4 --dcp 2"),
        ({"dcp": "1"}, "--tp 4 --dcp 1"),
        ({"dp": "2", "dcp": "4"}, "--tp 4 --dp 2 --dcp 2"),
        ({"dp": "4", "dcp": "1"}, "--tp 4 --dp 4 --dcp 1"),
    ],
    ids=str,
)
def test_suggested_layout_keeps_dp_and_does_not_raise_dcp(options: dict[str, object], instead: str) -> None:
    """For tp 8 on 4 GPUs, the suggestion has as many replicas as the options, and no larger dcp."""
    text = get_shared_reason(expand(tp="8", concurrency=8, **options))
    assert f"Type instead: dcpbench sweep --model deepseek-v3 {instead} (or run it on 2 such machines" in text


def test_suggested_command_of_a_dry_run_plans_for_the_same_gpus() -> None:
    """The user plans for four H200 that this machine does not have; the suggested command must not run here."""
    text = get_shared_reason(expand(make_planned_probe("H200", 4), tp="8", dcp="8", concurrency=8))
    assert "--tp 4 --dcp 4 --dry-run --gpu H200,count=4 (or" in text


def test_reasons_that_differ_only_in_advice_are_merged() -> None:
    """The error for tp8 and tp8·dcp8 on 4 GPUs suggests the layout with the largest DCP, since its baseline is measured
    with it.
    """
    with pytest.raises(CapacityError) as caught:
        grid.require_runnable(expand(tp="8", dcp="1,8", concurrency=8))
    assert str(caught.value).count("--tp 8 needs 8 GPUs") == 1
    assert "--tp 4 --dcp 4 (or" in str(caught.value)


def test_rejected_points_of_several_models_are_named_with_their_model() -> None:
    """Each layout is named once, however many loads share a reason."""
    rows = grid.make_table(expand(model="deepseek-v3,kimi-k2", tp="8", dcp="8", concurrency="8,16"))
    assert [line.partition(": ")[0] for line in format_rejected(rows)] == [
        f"{model} tp8·dcp8 at 8 × 4,000 and 16 × 4,000" for model in ("deepseek-v3", "kimi-k2")
    ]


def test_rejected_line_does_not_repeat_the_layout_of_its_reason() -> None:
    """The record has the whole reason; without this, the line would read `tp4 at 32 × 128,000: tp4: …`."""
    probe, options = (
        make_planned_probe("H200", 8),
        {"tp": "4,8", "dp": "1", "dcp": "1", "kv_memory": "1MiB", "model": "kimi-k2"},
    )
    rows = grid.make_table(expand(probe, **options, concurrency=8))
    assert {str(r["reason"]).partition(" holds")[0] for r in rows} == {
        "tp4: --kv-memory",
        "tp8: --kv-memory",
    }
    lines = format_rejected(rows)
    assert [line.partition(" holds")[0].split(": ")[1:] for line in lines] == [["--kv-memory"]] * len(lines)


def test_only_the_points_that_need_too_many_gpus_are_rejected() -> None:
    """With --tp 4,8 on 4 GPUs, tp4 runs, and tp8 leaves a record with the reason."""
    found = expand(tp="4,8", concurrency=8)
    grid.require_runnable(found)
    assert [(c.point.tp, c.error is None) for c in found] == [(4, True), (4, True), (8, False)]
    record = found[-1].make_rejected_record()
    assert record.outcome == "rejected"
    assert "needs 8 GPUs" in str(record.reason)


def test_gpus_of_all_nodes_are_counted() -> None:
    """Two machines with 4 GPUs run tp 8; three cannot share it evenly."""
    assert all(c.error is None for c in expand(nnodes=2, tp="8", concurrency=8))
    assert "does not divide over --nodes 3" in get_shared_reason(expand(nnodes=3, tp="8", concurrency=8))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dcp": "3"}, "--dcp 3 does not divide --tp 4; deepseek-v3 with --tp 4 can have --dcp 1, 2 or 4"),
        ({"dp": "3"}, "--dp 3 does not divide --tp 4"),
        ({"tp": "1000000007", "dp": "3"}, "--tp 1000000007 is more than the 65,536 ranks"),
        ({"context": "163840"}, "--context can be up to 163839"),
        ({"model": "tiny", "tp": "2"}, "tiny has 32 + 16; use --backend triton"),
        ({"model": "tiny", "tp": "3", "backend": "triton"}, "use --tp 1, 2, 4 or 8"),
    ],
    ids=["dcp-3", "dp-3", "tp-1000000007", "context-too-long", "flashinfer-tiny", "heads-do-not-divide"],
)
def test_rejection_names_valid_values(options: dict[str, object], expected: str) -> None:
    """Each reason ends with the next option to use."""
    assert expected in get_shared_reason([c for c in expand(concurrency=8, **options) if not c.added])


@pytest.mark.parametrize("dp", ["8", "5"])
def test_more_replicas_than_ranks_is_reported_as_an_error_of_dp(dp: str) -> None:
    """The default of --dcp is not blamed, and tp / dp, which rounds down to 0, is not suggested."""
    assert (
        get_shared_reason(expand(dp=dp, concurrency=8))
        == f"--dp {dp} does not divide --tp 4; deepseek-v3 with --tp 4 can have --dp 1, 2 or 4."
    )


def test_context_that_a_rejection_names_is_accepted() -> None:
    """The 163,839 tokens and the one that is decoded fill the 163,840 positions of V3."""
    taken, passed = expand(context="163839,163840", concurrency=1, baseline=False)
    assert taken.error is None
    assert "--context can be up to 163839" in str(passed.error)


@pytest.mark.parametrize(
    "options", [{"repeats": 10**9}, {"concurrency": [*range(1, 500)], "context": [*range(1, 500)]}]
)
def test_grid_with_more_points_than_the_maximum_is_refused_before_expansion(options: dict[str, object]) -> None:
    """The 499 × 499 = 249,001 points are more than 100,000; a billion would not fit in memory."""
    with pytest.raises(UsageError, match="points are requested, more than the 100,000 that a run can have"):
        expand(**{"concurrency": 8, **options})


def test_verify_with_flashinfer_requires_half_precision() -> None:
    """On a GPU, verify accepts fp32, which FlashInfer does not support."""
    spec = make_spec({"dtype": "fp32", "context": "37", "concurrency": "4"}, H200X4)
    assert "runs in bf16 and fp16, not fp32" in get_shared_reason(grid.expand_layouts([Layout(tp=4)], spec, H200X4))
    half = make_spec({"dtype": "fp16", "context": "37", "concurrency": "4"}, H200X4)
    assert [c.error for c in grid.expand_layouts([Layout(tp=4)], half, H200X4)] == [None]


def test_requested_flashinfer_that_is_missing_is_rejected_with_install_command() -> None:
    """A backend that the user names is never replaced silently."""
    probe = msgspec.structs.replace(H200X4, packages={})
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
        grid.require_runnable(expand(probe, backend="flashinfer"))


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"page_size": 1}, "reads pages of 64 rows, not 1; use --page-size 64 or --backend triton"),
        ({"capability": "10.0"}, {}, "needs a Hopper GPU, and NVIDIA H200 is none; use --backend triton"),
        ({"packages": {}}, {}, r"flash_mla cannot be imported; pip install '.\[flashmla\]'"),
    ],
)
def test_flashmla_is_rejected_with_the_reason_on_unsupported_machines(
    changed: dict[str, object], options: dict[str, object], message: str
) -> None:
    able = msgspec.structs.replace(H200X4, capability="9.0", packages={"flash_mla": "1.0.0"})
    assert [c.error for c in expand(able, backend="flashmla", concurrency=8)] == [None] * 2
    found = expand(msgspec.structs.replace(able, **changed), backend="flashmla", concurrency=8, **options)
    with pytest.raises(DcpbenchError, match=message):
        grid.require_runnable(found)


def test_flashinfer_is_refused_on_cpu() -> None:
    """The error on a CPU names the other backends."""
    with pytest.raises(UsageError, match="use --backend reference"):
        grid.require_runnable(expand(CPU, backend="flashinfer"))


def test_full_size_model_without_gpus_is_an_error() -> None:
    """The error suggests the command that runs there, instead of measuring a smaller model."""
    with pytest.raises(CapacityError, match="dcpbench sweep --model tiny --tp 8 --dcp 8"):
        grid.require_runnable(expand(CPU, model="deepseek-v3", tp="8", dcp="8"))


def test_error_with_device_cpu_does_not_call_gpus_invisible() -> None:
    """The machine has four GPUs, and --device cpu does not use them."""
    hidden = msgspec.structs.replace(H200X4, device="cpu")
    assert "needs GPUs; none are visible" in get_shared_reason(expand(CPU, model="deepseek-v3", tp="8"))
    assert "needs GPUs; none are used with --device cpu" in get_shared_reason(
        expand(hidden, model="deepseek-v3", tp="8")
    )


def test_baseline_that_can_run_does_not_hide_an_invalid_option() -> None:
    """The option --dcp 3 is an error even though tp4 could run."""
    with pytest.raises(LayoutError, match="deepseek-v3 with --tp 4 can have --dcp 1, 2 or 4"):
        grid.require_runnable(expand(dcp="3"))


@pytest.mark.parametrize(
    ("dcp", "named", "more"), [("3,5,6", "3,5,6", ""), ("3,5,6,7,9", "3,5,6", "(2 more; see them all with --dry-run)")]
)
def test_error_lists_three_reasons_and_counts_the_others(dcp: str, named: str, more: str) -> None:
    """Exactly three reasons are shown; with three in all, none is counted as left out."""
    with pytest.raises(LayoutError) as caught:
        grid.require_runnable(expand(dcp=dcp, concurrency=8))
    lines = str(caught.value).split("\n")
    assert [line.split()[1] for line in lines if line.startswith("--dcp")] == named.split(",")
    assert lines[3:] == [more] * bool(more)


def test_kv_shortage_error_names_gap_largest_concurrency_and_dcp_that_fits() -> None:
    """V3 with tp4 and 128,000 tokens needs 2,001 pages of 64 tokens for each request, and 61·576·2 bytes for each
    token.
    """
    found = expand(dcp="1", context=128000, concurrency="1,48", baseline=False)
    assert found[0].error is None
    text = str(found[1].error)
    shape, layout = load_shape("deepseek-v3"), Layout(tp=4)
    min_layers = memory.compute_min_layers(shape, layout, 2, 60 << 20)
    free_bytes = 139 * GIB - memory.RESERVE_BYTES - memory.compute_weight_bytes(shape, layout, 2, *min_layers)
    page_count = free_bytes // memory.compute_page_bytes(shape, 64, 2)
    assert "GiB more than the 131.0 GiB available" in text
    assert f"largest --concurrency that fits is {(page_count - 1) // 2001}." in text
    assert "With --dcp 4 it fits." in text


@pytest.mark.parametrize("dp", ["1", "2", "4"])
def test_largest_concurrency_in_a_rejection_is_exact(dp: str) -> None:
    """The advice counts the requests of all replicas: this concurrency fits, and one more does not."""
    text = get_shared_reason(expand(dp=dp, dcp="1", context=128000, concurrency=200, baseline=False))
    largest = int(text.partition("fits is ")[2].partition(".")[0])
    edge = expand(dp=dp, dcp="1", context=128000, concurrency=f"{largest},{largest + 1}", baseline=False)
    assert [c.error is None for c in edge] == [True, False]


def test_kv_pool_is_sized_for_the_largest_point_that_fits() -> None:
    """On dcp4 with pages of 64, 8 requests of 4,001 tokens take ceil(4001 / 256) = 16 pages each; with the padding
    page, these are 129.
    """
    spec = make_spec({"concurrency": "1,8"}, H200X4)
    found = grid.expand_grid(spec, H200X4)
    assert {c.plan.pages for c in found if c.plan and c.point.dcp == 4} == {8 * 16 + 1}
    assert {c.plan.kv_bytes for c in found if c.plan and c.point.dcp == 4} == {129 * 64 * 61 * 576 * 2}


def test_rejected_point_does_not_enlarge_the_kv_pool() -> None:
    """The pool of the point that fits is the same with and without the one that does not."""
    alone = expand(dcp="1", context=128000, concurrency="1", baseline=False)
    with_rejected = expand(dcp="1", context=128000, concurrency="1,48", baseline=False)
    assert alone[0].plan == with_rejected[0].plan


def test_kv_pool_takes_all_memory_that_whole_weights_leave() -> None:
    """On one GPU, V2-Lite holds all 27 layers and leaves less than one page of 64·27·576·2 bytes unused."""
    (found,) = expand(model="deepseek-v2-lite", tp="1", concurrency=1)
    assert found.plan is not None
    assert found.plan.layers_held == 27
    page = 64 * 27 * 576 * 2
    unused = (H200X4.memory_bytes or 0) - memory.RESERVE_BYTES - found.plan.weight_bytes - found.plan.kv_bytes
    assert 0 <= unused < page
    assert found.plan.bounded_by == "weights"
    (given,) = expand(model="deepseek-v2-lite", tp="1", concurrency=1, kv_memory="10GiB")
    assert given.plan is not None
    assert given.plan.bounded_by == "kv_memory"
    (large,) = expand(model="deepseek-v3", tp="4", dcp="1", concurrency=1)
    assert large.plan is not None
    assert large.plan.bounded_by == "sweep", "V3 does not fit whole on 4 GPUs"


def test_kv_memory_sets_the_pool_and_rejects_points_that_do_not_fit() -> None:
    """In 10 GiB there are 2386 pages of 64·61·576·2 bytes; a request of 4,001 tokens takes 63 of them, so that 37
    requests fit.
    """
    found = expand(dcp="1", kv_memory="10GiB", concurrency="37,38", baseline=False)
    assert [c.error is None for c in found] == [True, False]
    assert found[0].plan is not None
    assert found[0].plan.kv_bytes == 10 * GIB // (64 * 61 * 576 * 2) * (64 * 61 * 576 * 2)
    assert "largest --concurrency that fits is 37. With --dcp 2 it fits." in str(found[1].error)


@pytest.mark.parametrize("kv_memory", [None, "120GiB"])
def test_kv_pool_has_no_more_rows_than_32_bit_locations_address(kv_memory: str | None) -> None:
    """Rows of the tiny model are so small that a GPU has memory for more."""
    eight = msgspec.structs.replace(H200X4, count=8)
    options = {
        "model": "tiny",
        "backend": "triton",
        "ep": "tp",
        "concurrency": 1,
        "kv_memory": kv_memory,
        "baseline": False,
    }
    (found,) = expand(eight, tp="8", dcp="8", **options)
    assert found.plan is not None
    assert found.plan.pages == 2**31 // (64 * 8)
    DcpAllocator(found.plan.pages, 64, 8)


def test_small_kv_memory_is_reported_in_a_small_unit() -> None:
    """In 1,000 B there is one page of 3·48·4 = 576 B; the missing 2·101 pages are 116,352 B. The text `0.0 GiB` would
    describe neither.
    """
    (found,) = expand(CPU, kv_memory="1KB", concurrency=2, dcp="1")
    assert "--kv-memory holds 576 B of KV cache per GPU, 113.6 KiB less than" in str(found.error)


def test_too_small_kv_memory_error_suggests_a_size_that_is_accepted() -> None:
    """The 203 pages of 576 B are 114.19 KiB, so that 114.2 KiB hold them and 114.1 KiB do not."""
    (found,) = expand(CPU, kv_memory="1KB", concurrency=2, dcp="1")
    assert str(found.error).endswith("--kv-memory 114.2KiB holds all of them.")
    (found,) = expand(CPU, kv_memory="114.2KiB", concurrency=2, dcp="1")
    assert found.error is None


def test_too_large_kv_memory_error_suggests_a_size_that_is_accepted() -> None:
    text = get_shared_reason(expand(kv_memory="200GiB", concurrency=8))
    size = text.partition("--kv-memory can be up to ")[2].partition(" ")[0]
    assert all(c.error is None for c in expand(kv_memory=size, concurrency=8, baseline=False))


def test_points_of_different_engines_have_separate_pools() -> None:
    """A larger load on another layout, model or dtype does not count."""
    small, other = (c.point for c in expand(CPU, concurrency=2, baseline=False, tp="2,4"))
    large = msgspec.structs.replace(other, concurrency=800)
    plans = budget.plan_engines([small, large], Settings(), CPU)
    assert [plan.pages for plan in plans] == [budget.count_needed_pages(point) for point in (small, large)]
    assert budget.find_engine_plan(small, plans) is plans[0]


@pytest.mark.parametrize(
    ("changed", "engine", "path"),
    [
        *(
            ({name: value}, False, True)
            for name, value in (
                ("model", "deepseek-v3"),
                ("tp", 8),
                ("dp", 2),
                ("dcp", 4),
                ("dtype", "fp16"),
                ("page_size", 32),
                ("interleave", 2),
                ("weights", "/checkpoint"),
            )
        ),
        ({"q_replicate": True}, False, False),
        ({"project_first": True}, False, False),
        *(
            ({name: value}, True, False)
            for name, value in (
                ("backend", "flashinfer"),
                ("exchange", "a2a"),
                ("all_reduce", "symm"),
            )
        ),
        *(({name: 9}, True, True) for name in ("concurrency", "context", "repeat")),
    ],
    ids=str,
)
def test_engine_is_shared_by_points_with_the_same_weights_pools_and_groups(
    changed: dict[str, object], engine: bool, path: bool
) -> None:
    """Points with the same kernels and collectives share a path; loads and repeats are part of neither."""
    first = record_builder.make_point(Layout(4, dcp=2), exchange="ag_rs", backend="triton")
    other = msgspec.structs.replace(first, **changed)
    assert (budget.is_same_engine(first, other), budget.is_same_path(first, other)) == (engine, path)


def test_all_ranks_of_a_cpu_run_share_four_gib() -> None:
    """Each of 8 ranks has 512 MiB; a token takes 3·48·4 = 576 B, so that 4,001 tokens take 2.3 MB, and over 200
    requests fit.
    """
    (refused,) = expand(CPU, tp="8", dcp="1", context=4000, concurrency=500, baseline=False)
    text = str(refused.error)
    needs = re.search(r"needs ([\d.]+) GiB of weights and ([\d.]+) GiB of KV cache over its 8 ranks", text)
    assert needs is not None
    weights, kv = needs.groups()
    assert "over its 8 ranks, and a CPU run may take 4 GiB" in text
    assert float(kv) == pytest.approx(8 * 500 * 4001 * 576 / 2**30, abs=0.1)
    assert 0 <= float(weights) < 1
    largest = int(text.partition("fits is ")[2].partition(".")[0])
    assert 200 < largest <= (512 << 20) // (4001 * 576)
    edge = expand(CPU, tp="8", dcp="1", context=4000, concurrency=f"{largest},{largest + 1}", baseline=False)
    assert [c.error is None for c in edge] == [True, False]


def test_kv_pool_of_a_cpu_run_is_bounded_by_the_sweep() -> None:
    """A CPU run holds every layer, and the pool takes no memory that no point needs."""
    found = expand(CPU, concurrency=2, tp="2", baseline=False)
    assert {c.plan.bounded_by for c in found if c.plan} == {"sweep"}


def test_more_replicas_than_requests_is_allowed() -> None:
    """With concurrency 1 and dp 4, three replicas hold padding only."""
    assert all(c.error is None for c in expand(dp="4", concurrency=1))


def test_verify_layouts_add_no_baseline() -> None:
    """The result has exactly the given layouts, each once."""
    layouts = [Layout(tp=2, dcp=2), Layout(tp=1), Layout(tp=2, dcp=2)]
    found = grid.expand_layouts(layouts, make_spec({"concurrency": "4", "context": "37"}, CPU), CPU)
    assert [c.point.layout for c in found] == [Layout(tp=1), Layout(tp=2, dcp=2)]


def test_error_of_verify_repeats_its_command() -> None:
    argv = ["verify", "--model", "deepseek-v3", "--tp", "8"]
    options = {"model": "deepseek-v3", "tp": "8", "concurrency": "4"}
    (found,) = grid.expand_layouts([Layout(8)], make_spec(options, CPU), CPU, argv)
    assert "type: dcpbench verify --model deepseek-v3 --dry-run --gpu H200,count=8 --tp 8. " in str(found.error)
    assert str(found.error).endswith("type: dcpbench verify --model tiny --tp 8 --dcp 8")
    (found,) = grid.expand_layouts([Layout(8)], make_spec(options, H200X4), H200X4, argv)
    assert str(found.error).endswith("Type instead: dcpbench verify --model deepseek-v3 --tp 4 --dcp 1")


def test_dry_run_table_shows_both_layout_names_memory_and_reasons() -> None:
    """The tp of vLLM counts one replica, so that tp4·dp2·dcp2 here is dp2·tp2·dcp2 there."""
    rows = grid.make_table(expand(CPU, tp="4", dp="2", dcp="2,3", concurrency=2, baseline=False))
    assert rows[0]["layout"] == "tp4·dp2·dcp2·ep1"
    assert rows[0]["vllm_layout"] == "dp2·tp2·dcp2"
    assert rows[0]["layers_held"] == rows[0]["layers"] == 3
    assert rows[0]["kv_pool_bytes"] == (51 + 1) * 3 * 48 * 4, "ceil(101 / 2) pages of one row, and the padding page"
    assert rows[1]["kv_pool_bytes"] is None
    assert "--dcp 3 does not divide" in str(rows[1]["reason"])


def test_every_error_of_a_candidate_is_a_dcpbench_error() -> None:
    """Rejections carry the exit code of the command."""
    found = expand(tp="4,8", dcp="3,4", context="100,999999", concurrency="8,99999999")
    assert {type(c.error).exit_code for c in found if c.error} == {2, 3}
    assert all(isinstance(c.error, DcpbenchError) for c in found if c.error)


def test_default_weights_dtype_on_gpus_is_as_published_and_is_printed() -> None:
    """V3 is fp8 and V2-Lite is bf16; a dtype from the options needs no note, and on a CPU everything is fp32."""
    options = {"tp": "4", "dcp": "1", "concurrency": 1, "model": "deepseek-v3,deepseek-v2-lite"}
    spec = make_spec(options, H200X4)
    found = grid.expand_grid(spec, H200X4)
    assert {(c.point.model, c.point.precision) for c in found} == {
        ("deepseek-v3", "fp8 weights, bf16 KV"),
        ("deepseek-v2-lite", "bf16"),
    }
    assert grid.format_precision_note(spec, found) == (
        "Weights fp8, as deepseek-v3 is published; KV bf16. For weights in bf16, add --weights-dtype bf16."
    )
    for typed, precision in (
        ({"dtype": "bf16"}, "bf16"),
        ({"weights_dtype": "bf16"}, "bf16"),
        ({"dtype": "fp8", "backend": "triton"}, "fp8 weights and KV"),
        ({"weights_dtype": "bf16", "kv_dtype": "fp8", "backend": "triton"}, "bf16 weights, fp8 KV"),
    ):
        spec = make_spec(options | typed, H200X4)
        found = grid.expand_grid(spec, H200X4)
        assert {c.point.precision for c in found} == {precision}
        assert grid.format_precision_note(spec, found) == ""
    spec = make_spec({"tp": "2", "model": "tiny"}, CPU)
    assert {c.point.precision for c in grid.expand_grid(spec, CPU)} == {"fp32"}


def test_layout_that_cuts_fp8_blocks_is_refused_with_the_largest_valid_tp() -> None:
    """The shared expert of V3 has a width of 2,048: 64 columns on each of 32 ranks, 128 on 16."""
    machine = msgspec.structs.replace(H200X4, count=32)
    (found,) = grid.expand_grid(
        make_spec({"tp": "32", "dcp": "1", "concurrency": 1, "baseline": False}, machine), machine
    )
    assert "use --tp 16, the largest layout without this limit, or --weights-dtype bf16." in str(found.error)


def test_suggested_layout_that_cuts_no_block_has_degrees_that_divide() -> None:
    """Experts of MiniMax-M2 are 1,536 wide: 192 on each of 8 ranks, 256 on 6; 8 replicas do not divide 6 ranks."""
    machine = msgspec.structs.replace(H200X4, count=8)
    options = {"model": "minimax-m2", "tp": "8", "dp": "8", "concurrency": 1, "baseline": False}
    (found,) = grid.expand_grid(make_spec(options, machine), machine)
    assert "use --tp 6 --dp 6, the largest layout without this limit, or --ep tp, or --weights-dtype bf16." in str(
        found.error
    )
    for changed in ({"tp": "6", "dp": "6"}, {"ep": "tp"}):
        (found,) = grid.expand_grid(make_spec(options | changed, machine), machine)
        assert found.error is None


def test_largest_concurrency_that_fits_counts_the_windows_of_so_many_requests() -> None:
    options = {"model": "gpt-oss-120b", "tp": "4", "dp": "4", "context": 100000, "baseline": False}
    found = grid.expand_grid(make_spec(options | {"concurrency": "500"}, H200X4), H200X4)
    largest = int(re.search(r"largest --concurrency that fits is (\d+)", str(found[0].error))[1])  # type: ignore[index]
    fit = grid.expand_grid(make_spec(options | {"concurrency": f"{largest},{largest + 1}"}, H200X4), H200X4)
    assert [c.error is None for c in fit] == [True, False]


def test_longest_context_leaves_positions_for_drafts() -> None:
    options = {"model": "qwen3-8b", "tp": "4", "dcp": "1", "concurrency": 1, "mtp": "2", "acceptance": "0.8/0.6"}
    found = grid.expand_grid(make_spec(options | {"context": "40957,40958"}, H200X4), H200X4)
    assert [str(c.error) for c in found if c.error] == [
        "--context 40958, 2 drafts and one new token pass qwen3-8b's 40960 positions; --context can be up to 40957."
    ]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"weights_dtype": "bf16", "kv_dtype": "fp16"}, "one dtype; use --kv-dtype bf16, or fp8 for one of them"),
        ({"weights_dtype": "int8"}, "--weights-dtype int8 is unknown"),
        ({"kv_dtype": "e4m3"}, "--kv-dtype e4m3 is unknown"),
        ({"dtype": "fp4"}, "--dtype fp4 is unknown"),
    ],
)
def test_invalid_dtypes_are_refused(typed: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_spec({"tp": "4"} | typed, H200X4)


@pytest.mark.parametrize(
    ("typed", "capability", "message"),
    [
        ({}, "8.0", "--weights-dtype fp8: a GPU with fp8 is needed"),
        ({"weights_dtype": "bf16", "kv_dtype": "fp8", "backend": "triton"}, "8.0", "use --kv-dtype bf16"),
        (
            {"kv_dtype": "fp8", "backend": "flashinfer"},
            "9.0",
            "use --backend flashmla, --backend triton or --kv-dtype bf16",
        ),
    ],
)
def test_unsupported_fp8_is_refused_with_alternatives(typed: dict[str, str], capability: str, message: str) -> None:
    machine = msgspec.structs.replace(H200X4, capability=capability)
    spec = make_spec({"tp": "4", "dcp": "1", "concurrency": 1, "baseline": False} | typed, machine)
    (found,) = grid.expand_grid(spec, machine)
    assert message in str(found.error)


@pytest.mark.parametrize(
    ("packages", "capability", "kv", "backend"),
    [
        ({"flashinfer": "0.6.18", "flash_mla": "1.0.0"}, "9.0", "fp8", "triton"),
        ({"flashinfer": "0.6.18", "flash_mla": "1.0.0"}, "9.0", "bf16", "triton"),
        ({"flashinfer": "0.6.18", "flash_mla": "1.0.0"}, "10.0", "bf16", "flashinfer"),
        ({"flashinfer": "0.6.18", "flash_mla": "1.0.0"}, "10.0", "fp8", "triton"),
        ({"flashinfer": None}, "10.0", "bf16", "triton"),
    ],
)
def test_default_backend_is_the_fastest_measured_on_the_gpu(
    packages: dict[str, str | None], capability: str, kv: str, backend: str
) -> None:
    machine = msgspec.structs.replace(H200X4, packages=packages, capability=capability)
    found = grid.expand_grid(make_spec({"tp": "4", "dcp": "1", "concurrency": 1, "kv_dtype": kv}, machine), machine)
    assert {(c.point.backend, c.error) for c in found} == {(backend, None)}


def test_error_for_several_reasons_has_the_type_of_the_first() -> None:
    """The exit code is that of the first reason, too; all reasons are listed."""
    points = [
        grid.Candidate(
            point=Point(model="tiny", tp=1, concurrency=1, context=n, backend="reference", dtype="fp32"), error=error
        )
        for n, error in enumerate((CapacityError("no room"), UsageError("no such layout")), 1)
    ]
    with pytest.raises(CapacityError, match="no room\nno such layout"):
        grid.require_runnable(points)
    with pytest.raises(UsageError, match="no such layout\nno room"):
        grid.require_runnable(points[::-1])
