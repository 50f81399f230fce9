"""What a sweep expands to, what it rejects and why."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import CapacityError, DcpbenchError, LayoutError, MissingPackageError, ModelError, UsageError
from dcpbench.launch.progress import format_rejected
from dcpbench.models import load_shape
from dcpbench.plan import grid
from dcpbench.plan.spec import make_planned_probe, make_spec
from dcpbench.points import budget, memory
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Point
from dcpbench.points.settings import Settings
from dcpbench.reports.dataframes import load_frames
from dcpbench.reports.findings import BASELINE_OF
from dcpbench.serving.allocator import DcpAllocator
from tests.unit import record_builder
from tests.unit.test_shapes import V3 as V3_CONFIG

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
CPU = Probe(device="cpu", count=0, name="CPU")
H200X4 = Probe(
    device="cuda",
    count=4,
    name="NVIDIA H200",
    memory_bytes=139 * GIB,
    l2_bytes=60 << 20,
    packages={"flashinfer": "0.6.18"},
)


def expand(probe: Probe = H200X4, nnodes: int = 1, **options: object) -> list[grid.Candidate]:
    """Candidates of options given as on the command line."""
    return grid.expand_grid(make_spec(options, probe), probe, nnodes)


def reason(candidates: list[grid.Candidate]) -> str:
    """The one reason that all rejected candidates share."""
    (text,) = {str(c.error) for c in candidates if c.error}
    return text


def test_the_default_sweep_on_gpus_measures_full_dcp_and_its_baseline() -> None:
    """4 GPUs, 3 concurrencies: 3 points of tp4·dcp4 and 3 added ones of tp4."""
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


def test_triton_is_the_default_where_flashinfer_cannot_be_imported() -> None:
    """A default never names a package that is missing."""
    probe = msgspec.structs.replace(H200X4, packages={"flashinfer": None})
    assert {c.point.backend for c in expand(probe)} == {"triton"}


def test_a_default_sweep_on_a_laptop_is_tiny_and_runs() -> None:
    """8 gloo ranks, fp32, the reference kernel, and no rejected point."""
    found = expand(CPU)
    assert {(c.point.model, c.point.tp, c.point.dtype, c.point.backend) for c in found} == {
        ("tiny", 8, "fp32", "reference")
    }
    assert all(c.plan is not None and c.plan.layers_held == 3 for c in found)


def test_a_baseline_that_was_typed_is_not_added_again() -> None:
    """--dcp 1,4 holds the baseline already."""
    found = expand(dcp="1,4", concurrency=8)
    assert [(c.point.dcp, c.added) for c in found] == [(1, False), (4, False)]


def test_the_baseline_of_dcp_inside_dp_is_the_same_dp_without_dcp() -> None:
    """tp4·dp2·dcp2 against tp4·dp2: against tp4 two things would differ. tp4·dp4 has tp4."""
    found = expand(tp="4", dp="2,4", concurrency=8)
    assert [(str(c.point.layout), c.point.exchange, c.added) for c in found] == [
        ("tp4", "none", True),
        ("tp4·dp2", "none", True),
        ("tp4·dp2·dcp2", "ag_rs", False),
        ("tp4·dp4", "none", False),
    ]


def placed(found: list[grid.Candidate]) -> list[tuple[str, str, bool]]:
    """Return for each point its layout, its placement of experts, and whether it was added."""
    return [(str(c.point.layout), c.point.ep, c.added) for c in found]


def test_experts_are_tensor_parallel_by_default_also_with_attention_data_parallel() -> None:
    """As in vLLM and SGLang, which have a flag for expert parallel. tp1 has no other way. A baseline has the same experts."""
    assert placed(expand(tp=4, dp="1,4", concurrency=8)) == [
        ("tp4", "1", True),
        ("tp4·dcp4", "1", False),
        ("tp4·dp4", "1", False),
    ]
    assert placed(expand(CPU, tp=4, dp=2, dcp=2, concurrency=2)) == [
        ("tp4·dp2", "1", True),
        ("tp4·dp2·dcp2", "1", False),
    ]
    assert placed(expand(tp=1, concurrency=8, ep="1,tp", model="deepseek-v2-lite")) == [("tp1", "tp", False)]


def test_experts_are_placed_as_typed() -> None:
    """All ranks of a layout are the word for it, and the baseline has them in the same place."""
    both = [("tp4", "1", True), ("tp4", "tp", True), ("tp4·dcp4", "1", False), ("tp4·dcp4", "tp", False)]
    assert sorted(placed(expand(ep="1,tp", concurrency=8))) == both
    assert sorted(placed(expand(ep="1,4", concurrency=8))) == both
    assert placed(expand(ep="tp", concurrency=8, dp=4)) == [("tp4", "tp", True), ("tp4·dp4", "tp", False)]
    assert placed(expand(ep=1, concurrency=8, dp=4)) == [("tp4", "1", True), ("tp4·dp4", "1", False)]


def test_experts_that_are_dealt_out_to_some_ranks_are_refused() -> None:
    assert "--ep 2 with --tp 4: experts are tensor-parallel over all ranks (--ep 1)" in reason(
        expand(ep=2, concurrency=8)
    )
    with pytest.raises(UsageError, match="--ep whole: not a whole number; write for example --ep 1,tp"):
        expand(ep="whole")


def test_the_report_finds_the_baseline_of_every_dcp_point(tmp_path: Path) -> None:
    """As the sweep adds them: what is compared shares all columns of the report's key, interleave aside."""
    found = [record_builder.ok(c.point, median_ms=10) for c in expand(dp="1,2", dcp="2", concurrency=8)]
    table = load_frames([record_builder.write(tmp_path / "r", found)]).points
    of = {dcp: {tuple(row) for row in table[table["dcp"] == dcp][BASELINE_OF].to_numpy()} for dcp in (1, 2)}
    assert len(of[2]) == 2
    assert of[2] <= of[1]


@pytest.mark.parametrize(("changed", "fits"), [({}, True), ({"num_hidden_layers": 5}, False)], ids=["same", "another"])
def test_a_checkpoint_is_measured_as_what_its_config_says(tmp_path: Path, changed: dict[str, int], fits: bool) -> None:
    """--weights alone takes the shape from config.json; a --model of other sizes beside it is a mistake."""
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


def test_no_baseline_leaves_only_what_was_typed() -> None:
    """The grid alone."""
    assert [c.point.dcp for c in expand(dcp="4", concurrency=8, baseline=False)] == [4]


def test_an_impossible_point_brings_no_baseline() -> None:
    """tp8 on 4 GPUs: a baseline of tp8 could not run either and would only repeat the reason."""
    assert [c.added for c in expand(tp="8", concurrency=8)] == [False]


def test_points_without_dcp_are_not_repeated_for_every_exchange() -> None:
    """Nothing is exchanged at dcp 1: the exchange is `none`, and with dcp 4 it is ag_rs."""
    found = expand(dcp="1,4", concurrency=8, exchange="ag_rs")
    assert [(c.point.dcp, c.point.exchange) for c in found] == [(1, "none"), (4, "ag_rs")]


def test_options_of_an_exchange_are_axes_of_points_that_exchange() -> None:
    """Two exchanges, each with q replicated and not: four points with dcp 4, and one baseline that has none of it."""
    asked = {"exchange": "ag_rs,a2a", "q_replicate": [False, True], "project_first": True, "dtype": "bf16"}
    found = expand(dcp="4", concurrency=8, **asked)
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
    """More bytes for each layer held, so fewer layers of V3 beside the same pool on 4 GPUs."""
    asked = {"dcp": "4", "concurrency": 8, "q_replicate": [False, True], "baseline": False, "kv_memory": "40GiB"}
    own, wide = (c.plan for c in expand(**asked, dtype="bf16"))
    each = [(plan.weight_bytes / plan.layers_held, plan.layers_held) for plan in (own, wide)]
    assert each[1][0] > each[0][0]
    assert each[1][1] <= each[0][1]
    assert wide.full_weight_bytes - own.full_weight_bytes == 61 * 96 * (1536 * 192 + 128 * 512) * 2
    own, wide = (c.plan for c in expand(**asked, weights_dtype="fp8"))
    q_b, w_uk = 96 * 1536 * 192 * (1 + 4 / 128**2), 96 * 128 * 512 * 2  # which is absorbed, and so stays in bf16
    assert wide.full_weight_bytes - own.full_weight_bytes == 61 * (q_b + w_uk)


def test_an_option_of_an_exchange_that_no_point_has_is_refused() -> None:
    """--collectives q-replicate=yes with --dcp 1 alone would silently measure something else; so would verify."""
    with pytest.raises(
        UsageError, match=r"--collectives q-replicate, --collectives project-first without a layout with --dcp > 1"
    ):
        expand(dcp="1", concurrency=8, q_replicate=True, project_first=True)
    spec = make_spec({"tp": "2", "model": "tiny", "project_first": True}, CPU)
    with pytest.raises(UsageError, match=r"--collectives project-first without"):
        grid.expand_layouts([Layout(tp=2)], spec, CPU)
    assert all(c.error is None for c in grid.expand_layouts([Layout(tp=2), Layout(tp=2, dcp=2)], spec, CPU))


def test_auto_is_for_points_that_are_timed_on_gpus() -> None:
    """A baseline without DCP chooses among backends alone; verify and a CPU have no times to choose by."""
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


def test_both_sides_of_a_comparison_have_each_all_reduce() -> None:
    """The baseline of a point with --collectives all-reduce=symm has it, too; a rank without peers has nothing to reduce."""
    found = expand(dcp="4", concurrency=8, all_reduce="nccl,symm", dtype="bf16")
    assert [(c.point.dcp, c.point.all_reduce) for c in found] == [(1, "nccl"), (1, "symm"), (4, "nccl"), (4, "symm")]
    assert grid.format_path(found[1].point) == "flashinfer symm all-reduce"
    assert [c.point.all_reduce for c in expand(tp="1", concurrency=8, all_reduce="symm")] == ["nccl"]


def test_without_dcp_each_tp_and_dp_gets_the_largest() -> None:
    """tp/dp: 2/1, 2/2, 4/1, 4/2."""
    found = expand(tp="2,4", dp="1,2", concurrency=8, baseline=False)
    assert [(c.point.tp, c.point.dp, c.point.dcp) for c in found] == [(2, 1, 2), (2, 2, 1), (4, 1, 4), (4, 2, 2)]


def test_points_that_share_an_engine_are_neighbours() -> None:
    """Repeat, tp, model, layout, backend, exchange, then load: an engine is left at most once in a repeat."""
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


def test_more_ranks_than_gpus_is_an_error_that_names_the_command_to_type() -> None:
    """All typed points need 8 GPUs: the sweep must not quietly measure something smaller."""
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
def test_what_to_type_instead_is_of_the_same_kind(options: dict[str, object], instead: str) -> None:
    """tp 8 on 4 GPUs: as many replicas as were typed, and no more dcp than that."""
    text = reason(expand(tp="8", concurrency=8, **options))
    assert f"Type instead: dcpbench sweep --model deepseek-v3 {instead} (or run it on 2 such machines" in text


def test_what_to_type_instead_stays_a_plan_for_the_same_gpus() -> None:
    """The user plans for four H200 that are not here: the shorter command must not run on this machine."""
    text = reason(expand(make_planned_probe("H200", 4), tp="8", dcp="8", concurrency=8))
    assert "--tp 4 --dcp 4 --dry-run --gpu H200,count=4 (or" in text


def test_reasons_that_differ_in_advice_alone_are_one() -> None:
    """tp8 and tp8·dcp8 on 4 GPUs; told is the layout with the most DCP, whose baseline is measured beside it."""
    with pytest.raises(CapacityError) as caught:
        grid.require_runnable(expand(tp="8", dcp="1,8", concurrency=8))
    assert str(caught.value).count("--tp 8 needs 8 GPUs") == 1
    assert "--tp 4 --dcp 4 (or" in str(caught.value)


def test_points_of_several_models_that_cannot_run_are_named_with_their_model() -> None:
    """Each layout is named once, however many loads share a reason."""
    rows = grid.make_table(expand(model="deepseek-v3,kimi-k2", tp="8", dcp="8", concurrency="8,16"))
    assert [line.partition(": ")[0] for line in format_rejected(rows)] == [
        f"{model} tp8·dcp8 at 8 × 4,000 and 16 × 4,000" for model in ("deepseek-v3", "kimi-k2")
    ]


def test_a_reason_that_begins_with_its_layout_does_not_name_it_again() -> None:
    """The record holds the whole reason; next to the points it would read `tp4 at 32 × 128,000: tp4: …`."""
    probe, options = (
        make_planned_probe("H200", 8),
        {"tp": "4,8", "dp": "1", "dcp": "1", "kv_memory": "1MiB", "model": "kimi-k2"},
    )
    rows = grid.make_table(expand(probe, **options, concurrency=8))
    assert {str(r["reason"]).partition(" holds")[0] for r in rows} == {"tp4: --kv-memory", "tp8: --kv-memory"}
    lines = format_rejected(rows)
    assert [line.partition(" holds")[0].split(": ")[1:] for line in lines] == [["--kv-memory"]] * len(lines)


def test_only_the_points_that_need_too_many_gpus_are_rejected() -> None:
    """--tp 4,8 on 4 GPUs: tp4 runs, tp8 leaves a record that says why it does not."""
    found = expand(tp="4,8", concurrency=8)
    grid.require_runnable(found)
    assert [(c.point.tp, c.error is None) for c in found] == [(4, True), (4, True), (8, False)]
    record = found[-1].make_rejected_record()
    assert record.outcome == "rejected"
    assert "needs 8 GPUs" in str(record.reason)


def test_the_gpus_of_all_nodes_count() -> None:
    """Two machines with 4 GPUs run tp 8; three cannot share it evenly."""
    assert all(c.error is None for c in expand(nnodes=2, tp="8", concurrency=8))
    assert "does not divide over --nodes 3" in reason(expand(nnodes=3, tp="8", concurrency=8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dcp": "3"}, "--dcp 3 does not divide --tp 4; these do: 1, 2, 4"),
        ({"dp": "3"}, "--dp 3 does not divide --tp 4"),
        ({"tp": "1000000007", "dp": "3"}, "--tp 1000000007 is more than the 65,536 ranks"),
        ({"context": "163840"}, "--context can be up to 163839"),
        ({"model": "tiny", "tp": "2"}, "tiny has 32 + 16; use --backend triton"),
        ({"model": "tiny", "tp": "3", "backend": "triton"}, "tp/dp can be 1, 2, 4, 8"),
    ],
    ids=["dcp-3", "dp-3", "tp-1000000007", "context-too-long", "flashinfer-tiny", "heads-do-not-divide"],
)
def test_a_rejected_point_says_what_would_be_valid(options: dict[str, object], words: str) -> None:
    """Each reason ends with the next thing to type."""
    assert words in reason([c for c in expand(concurrency=8, **options) if not c.added])


@pytest.mark.parametrize("dp", ["8", "5"])
def test_more_replicas_than_ranks_is_a_mistake_in_dp_whatever_dcp_would_be(dp: str) -> None:
    """Nobody typed --dcp, and tp / dp rounded down, 0, is none of what can be typed."""
    assert reason(expand(dp=dp, concurrency=8)) == f"--dp {dp} does not divide --tp 4; with --tp 4 these do: 1, 2, 4."


def test_the_context_that_a_rejection_names_is_taken() -> None:
    """163,839 tokens and the one that is decoded are V3's 163,840 positions."""
    taken, passed = expand(context="163839,163840", concurrency=1, baseline=False)
    assert taken.error is None
    assert "--context can be up to 163839" in str(passed.error)


@pytest.mark.parametrize(
    "options", [{"repeats": 10**9}, {"concurrency": [*range(1, 500)], "context": [*range(1, 500)]}]
)
def test_a_grid_of_more_points_than_a_report_reads_is_refused_before_it_is_made(options: dict[str, object]) -> None:
    """499 × 499 = 249,001 points are more than 100,000; a billion would not fit in memory."""
    with pytest.raises(UsageError, match="points are asked for, more than the 100,000 that a run can have"):
        expand(**{"concurrency": 8, **options})


def test_flashinfer_compares_in_half_precision_only() -> None:
    """verify takes fp32 on a GPU, and FlashInfer does not."""
    spec = make_spec({"dtype": "fp32", "context": "37", "concurrency": "4"}, H200X4)
    assert "runs in bf16 and fp16, not fp32" in reason(grid.expand_layouts([Layout(tp=4)], spec, H200X4))
    half = make_spec({"dtype": "fp16", "context": "37", "concurrency": "4"}, H200X4)
    assert [c.error for c in grid.expand_layouts([Layout(tp=4)], half, H200X4)] == [None]


def test_flashinfer_that_was_typed_but_is_missing_is_rejected_with_how_to_install_it() -> None:
    """What was typed is never replaced silently."""
    probe = msgspec.structs.replace(H200X4, packages={})
    with pytest.raises(MissingPackageError, match=r"pip install '\.\[flashinfer\]'"):
        grid.require_runnable(expand(probe, backend="flashinfer"))


@pytest.mark.parametrize(
    ("changed", "options", "said"),
    [
        ({}, {"page_size": 1}, "reads pages of 64 rows, not 1; use --page-size 64 or --backend triton"),
        ({"capability": "10.0"}, {}, "needs a Hopper GPU, and NVIDIA H200 is none; use --backend triton"),
        ({"packages": {}}, {}, r"flash_mla cannot be imported; pip install '.\[flashmla\]'"),
    ],
)
def test_flashmla_says_where_it_cannot_run(changed: dict[str, object], options: dict[str, object], said: str) -> None:
    """It runs on the other GPUs."""
    able = msgspec.structs.replace(H200X4, capability="9.0", packages={"flash_mla": "1.0.0"})
    assert [c.error for c in expand(able, backend="flashmla", concurrency=8)] == [None] * 2
    found = expand(msgspec.structs.replace(able, **changed), backend="flashmla", concurrency=8, **options)
    with pytest.raises(DcpbenchError, match=said):
        grid.require_runnable(found)


def test_flashinfer_needs_a_gpu() -> None:
    """The error on the CPU names the other backends."""
    with pytest.raises(UsageError, match="use --backend reference"):
        grid.require_runnable(expand(CPU, backend="flashinfer"))


def test_a_full_size_model_on_a_machine_without_gpus_is_an_error_not_a_smaller_model() -> None:
    """The error gives the command that does run there."""
    with pytest.raises(CapacityError, match="dcpbench sweep --model tiny --tp 8 --dcp 8"):
        grid.require_runnable(expand(CPU, model="deepseek-v3", tp="8", dcp="8"))


def test_gpus_that_are_there_and_not_used_are_not_called_invisible() -> None:
    """--device cpu on a machine with four."""
    hidden = msgspec.structs.replace(H200X4, device="cpu")
    assert "needs GPUs; none are visible" in reason(expand(CPU, model="deepseek-v3", tp="8"))
    assert "needs GPUs; none are used with --device cpu" in reason(expand(hidden, model="deepseek-v3", tp="8"))


def test_a_baseline_alone_does_not_make_a_sweep_valid() -> None:
    """--dcp 3 is a mistake even though tp4 could run; no baseline hides it."""
    with pytest.raises(LayoutError, match="these do: 1, 2, 4"):
        grid.require_runnable(expand(dcp="3"))


@pytest.mark.parametrize(
    ("dcp", "named", "more"), [("3,5,6", "3,5,6", ""), ("3,5,6,7,9", "3,5,6", "(2 more; see them all with --dry-run)")]
)
def test_an_error_has_three_reasons_and_says_how_many_more_there_are(dcp: str, named: str, more: str) -> None:
    """Three are shown, and none of three is left out."""
    with pytest.raises(LayoutError) as caught:
        grid.require_runnable(expand(dcp=dcp, concurrency=8))
    lines = str(caught.value).split("\n")
    assert [line.split()[1] for line in lines if line.startswith("--dcp")] == named.split(",")
    assert lines[3:] == [more] * bool(more)


def test_kv_that_cannot_fit_names_the_gap_the_largest_concurrency_and_the_dcp_that_would_do() -> None:
    """V3, tp4, 128,000 tokens: 2,001 pages of 64 tokens each request, 61·576·2 bytes a token."""
    found = expand(dcp="1", context=128000, concurrency="1,48", baseline=False)
    assert found[0].error is None
    text = str(found[1].error)
    shape, layout = load_shape("deepseek-v3"), Layout(tp=4)
    fewest = memory.compute_min_layers(shape, layout, 2, 60 << 20)
    left = 139 * GIB - memory.RESERVE_BYTES - memory.compute_weight_bytes(shape, layout, 2, *fewest)
    room = left // memory.compute_page_bytes(shape, 64, 2)
    assert "GiB more than the 131.0 GiB available" in text
    assert f"largest --concurrency that fits is {(room - 1) // 2001}." in text
    assert "With --dcp 4 it fits." in text


@pytest.mark.parametrize("dp", ["1", "2", "4"])
def test_the_concurrency_that_a_rejection_names_does_fit_and_one_more_does_not(dp: str) -> None:
    """The advice is exact at its edge; it counts the requests of all replicas."""
    text = reason(expand(dp=dp, dcp="1", context=128000, concurrency=200, baseline=False))
    most = int(text.partition("fits is ")[2].partition(".")[0])
    edge = expand(dp=dp, dcp="1", context=128000, concurrency=f"{most},{most + 1}", baseline=False)
    assert [c.error is None for c in edge] == [True, False]


def test_a_layouts_pool_is_sized_for_its_largest_point_that_fits() -> None:
    """8 requests of 4,001 tokens on dcp4, page 64: ceil(4001 / 256) = 16 pages each, and the padding page: 129."""
    spec = make_spec({"concurrency": "1,8"}, H200X4)
    found = grid.expand_grid(spec, H200X4)
    assert {c.plan.pages for c in found if c.plan and c.point.dcp == 4} == {8 * 16 + 1}
    assert {c.plan.kv_bytes for c in found if c.plan and c.point.dcp == 4} == {129 * 64 * 61 * 576 * 2}


def test_a_rejected_point_does_not_enlarge_the_pool_of_the_others() -> None:
    """The pool of the point that fits is the same with and without the one that does not."""
    alone = expand(dcp="1", context=128000, concurrency="1", baseline=False)
    beside = expand(dcp="1", context=128000, concurrency="1,48", baseline=False)
    assert alone[0].plan == beside[0].plan


def test_where_all_weights_fit_the_pool_is_what_they_leave() -> None:
    """V2-Lite on one GPU: all 27 layers held, and less than one page of 64·27·576·2 bytes unused."""
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


def test_kv_memory_fixes_the_pool_and_rejects_what_does_not_fit_in_it() -> None:
    """10 GiB hold 2386 pages of 64·61·576·2 bytes; a request of 4,001 tokens takes 63 of them: 37 requests."""
    found = expand(dcp="1", kv_memory="10GiB", concurrency="37,38", baseline=False)
    assert [c.error is None for c in found] == [True, False]
    assert found[0].plan is not None
    assert found[0].plan.kv_bytes == 10 * GIB // (64 * 61 * 576 * 2) * (64 * 61 * 576 * 2)
    assert "largest --concurrency that fits is 37. With --dcp 2 it fits." in str(found[1].error)


@pytest.mark.parametrize("kv_memory", [None, "120GiB"])
def test_a_pool_has_no_more_pages_than_32_bit_locations_tell_apart(kv_memory: str | None) -> None:
    """Rows of a tiny model are so small that a GPU has room for more."""
    eight = msgspec.structs.replace(H200X4, count=8)
    asked = {
        "model": "tiny",
        "backend": "triton",
        "ep": "tp",
        "concurrency": 1,
        "kv_memory": kv_memory,
        "baseline": False,
    }
    (found,) = expand(eight, tp="8", dcp="8", **asked)
    assert found.plan is not None
    assert found.plan.pages == 2**31 // (64 * 8)
    DcpAllocator(found.plan.pages, 64, 8)


def test_a_small_kv_memory_is_told_in_a_unit_that_fits() -> None:
    """1,000 B hold one page of 3·48·4 = 576 B; 2·101 more are 116,352 B. `0.0 GiB` would say nothing of either."""
    (found,) = expand(CPU, kv_memory="1KB", concurrency=2, dcp="1")
    assert "--kv-memory holds 576 B of KV cache per GPU, 113.6 KiB less than" in str(found.error)


def test_a_kv_memory_that_is_too_small_is_told_with_one_that_is_enough_when_typed() -> None:
    """203 pages of 576 B are 114.19 KiB: 114.2, and not 114.1, holds them."""
    (found,) = expand(CPU, kv_memory="1KB", concurrency=2, dcp="1")
    assert str(found.error).endswith("--kv-memory 114.2KiB holds all of them.")
    (found,) = expand(CPU, kv_memory="114.2KiB", concurrency=2, dcp="1")
    assert found.error is None


def test_kv_memory_larger_than_the_gpu_says_how_large_it_can_be() -> None:
    """The named size is accepted when typed."""
    text = reason(expand(kv_memory="200GiB", concurrency=8))
    size = text.partition("--kv-memory can be up to ")[2].partition(" ")[0]
    assert all(c.error is None for c in expand(kv_memory=size, concurrency=8, baseline=False))


def test_points_of_other_engines_have_their_own_pool() -> None:
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
def test_an_engine_is_shared_by_points_of_the_same_weights_pools_and_groups(
    changed: dict[str, object], engine: bool, path: bool
) -> None:
    """A path is shared by points of the same kernels and collectives; loads and repeats belong to neither."""
    of = record_builder.point(Layout(4, dcp=2), exchange="ag_rs", backend="triton")
    other = msgspec.structs.replace(of, **changed)
    assert (budget.is_same_engine(of, other), budget.is_same_path(of, other)) == (engine, path)


def test_all_ranks_of_a_cpu_run_share_four_gib() -> None:
    """8 ranks have 512 MiB each; a token takes 3·48·4 = 576 B, so 4,001 of them 2.3 MB: over 200 requests."""
    (refused,) = expand(CPU, tp="8", dcp="1", context=4000, concurrency=500, baseline=False)
    text = str(refused.error)
    needs = re.search(r"needs ([\d.]+) GiB of weights and ([\d.]+) GiB of KV cache over its 8 ranks", text)
    assert needs is not None
    weights, kv = needs.groups()
    assert "over its 8 ranks, and a CPU run may take 4 GiB" in text
    assert float(kv) == pytest.approx(8 * 500 * 4001 * 576 / 2**30, abs=0.1)
    assert 0 <= float(weights) < 1
    most = int(text.partition("fits is ")[2].partition(".")[0])
    assert 200 < most <= (512 << 20) // (4001 * 576)
    edge = expand(CPU, tp="8", dcp="1", context=4000, concurrency=f"{most},{most + 1}", baseline=False)
    assert [c.error is None for c in edge] == [True, False]


def test_the_pool_of_a_cpu_run_is_bounded_by_the_sweep() -> None:
    """It holds every layer, and no memory that would be left is given to the pool."""
    found = expand(CPU, concurrency=2, tp="2", baseline=False)
    assert {c.plan.bounded_by for c in found if c.plan} == {"sweep"}


def test_more_replicas_than_requests_is_allowed() -> None:
    """Concurrency 1 on dp 4: three replicas hold padding only."""
    assert all(c.error is None for c in expand(dp="4", concurrency=1))


def test_verify_layouts_bring_no_baseline() -> None:
    """Exactly the layouts given, each once."""
    layouts = [Layout(tp=2, dcp=2), Layout(tp=1), Layout(tp=2, dcp=2)]
    found = grid.expand_layouts(layouts, make_spec({"concurrency": "4", "context": "37"}, CPU), CPU)
    assert [c.point.layout for c in found] == [Layout(tp=1), Layout(tp=2, dcp=2)]


def test_the_dry_run_table_shows_both_names_memory_and_reasons() -> None:
    """The tp of vLLM counts one replica: our tp4 dp2 dcp2 is its dp2·tp2·dcp2."""
    rows = grid.make_table(expand(CPU, tp="4", dp="2", dcp="2,3", concurrency=2, baseline=False))
    assert rows[0]["layout"] == "tp4·dp2·dcp2·ep1"
    assert rows[0]["vllm_layout"] == "dp2·tp2·dcp2"
    assert rows[0]["layers_held"] == rows[0]["layers"] == 3
    assert rows[0]["kv_pool_bytes"] == (51 + 1) * 3 * 48 * 4, "ceil(101 / 2) pages of one row, and the padding page"
    assert rows[1]["kv_pool_bytes"] is None
    assert "--dcp 3 does not divide" in str(rows[1]["reason"])


def test_every_error_of_a_candidate_is_one_of_ours() -> None:
    """Rejections carry the exit code with which the command ends."""
    found = expand(tp="4,8", dcp="3,4", context="100,999999", concurrency="8,99999999")
    assert {type(c.error).exit_code for c in found if c.error} == {2, 3}
    assert all(isinstance(c.error, DcpbenchError) for c in found if c.error)


def test_weights_are_as_published_on_gpus_where_nobody_says_and_the_first_line_says_so() -> None:
    """V3 in fp8, V2-Lite in bf16; what is typed needs no line, and on a CPU all is in fp32."""
    asked = {"tp": "4", "dcp": "1", "concurrency": 1, "model": "deepseek-v3,deepseek-v2-lite"}
    spec = make_spec(asked, H200X4)
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
        spec = make_spec(asked | typed, H200X4)
        found = grid.expand_grid(spec, H200X4)
        assert {c.point.precision for c in found} == {precision}
        assert grid.format_precision_note(spec, found) == ""
    spec = make_spec({"tp": "2", "model": "tiny"}, CPU)
    assert {c.point.precision for c in grid.expand_grid(spec, CPU)} == {"fp32"}


def test_a_layout_that_cuts_blocks_on_a_gpu_names_the_largest_that_does_not() -> None:
    """V3's shared expert is 2,048 wide: 64 numbers on each of 32 ranks, 128 on 16."""
    machine = msgspec.structs.replace(H200X4, count=32)
    (found,) = grid.expand_grid(
        make_spec({"tp": "32", "dcp": "1", "concurrency": 1, "baseline": False}, machine), machine
    )
    assert "use --tp 16, the largest that cuts none, or --weights-dtype bf16." in str(found.error)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ({"weights_dtype": "bf16", "kv_dtype": "fp16"}, "one dtype; use --kv-dtype bf16, or fp8 for one of them"),
        ({"weights_dtype": "int8"}, "--weights-dtype int8 is unknown"),
        ({"kv_dtype": "e4m3"}, "--kv-dtype e4m3 is unknown"),
        ({"dtype": "fp4"}, "--dtype fp4 is unknown"),
    ],
)
def test_precisions_that_cannot_be_are_refused(typed: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_spec({"tp": "4"} | typed, H200X4)


@pytest.mark.parametrize(
    ("typed", "capability", "said"),
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
def test_what_cannot_run_in_fp8_says_what_can(typed: dict[str, str], capability: str, said: str) -> None:
    machine = msgspec.structs.replace(H200X4, capability=capability)
    spec = make_spec({"tp": "4", "dcp": "1", "concurrency": 1, "baseline": False} | typed, machine)
    (found,) = grid.expand_grid(spec, machine)
    assert said in str(found.error)


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
def test_where_no_backend_is_typed_it_is_the_fastest_that_was_measured_on_such_a_gpu(
    packages: dict[str, str | None], capability: str, kv: str, backend: str
) -> None:
    machine = msgspec.structs.replace(H200X4, packages=packages, capability=capability)
    found = grid.expand_grid(make_spec({"tp": "4", "dcp": "1", "concurrency": 1, "kv_dtype": kv}, machine), machine)
    assert {(c.point.backend, c.error) for c in found} == {(backend, None)}


def test_where_points_cannot_run_for_several_reasons_the_error_is_of_the_first_kind() -> None:
    """The exit code is of the first kind, too; all reasons are listed."""
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
