"""Points that a machine cannot run, by command: limits of kernels, graphs and model sizes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING

import msgspec
import pytest

from dcpbench.errors import UsageError
from dcpbench.kernels import kv_gather, kv_up_proj
from dcpbench.models import SHAPES
from dcpbench.models.shapes import Gqa
from dcpbench.models.weight_formats import EXPERTS, FORMATS, INT4, PARTS
from dcpbench.plan import grid, validate
from dcpbench.plan.kernel_limits import TENSOR_UNIT, compute_part_sizes, find_split_block
from dcpbench.plan.spec import make_spec
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings
from tests.unit.probes import CPU, H200X4

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape
    from dcpbench.points.device_probe import Probe


def check(shape: ModelShape = SHAPES["tiny"], probe: Probe = H200X4, *, timed: bool = True, **changes: object) -> None:
    """Check one point of the tiny model."""
    point = Point(model="tiny", tp=2, dcp=2, concurrency=2, context=9, exchange="ag_rs", backend="triton", dtype="bf16")
    changed = msgspec.structs.replace(point, **changes)
    validate.check_runnable(changed, Settings(), shape, validate.Machine(probe=probe, timed=timed))


def tiny(**sizes: int) -> ModelShape:
    """Return the tiny model with other widths."""
    return dataclasses.replace(SHAPES["tiny"], **sizes)


def test_reference_backend_is_not_timed_on_a_gpu_but_may_be_verified() -> None:
    """The reference's plan makes new tensors, so a captured graph would replay the lengths of its capture."""
    with pytest.raises(UsageError, match="use --backend triton or --backend flashinfer"):
        check(backend="reference")
    check(backend="reference", timed=False)
    check(backend="reference", probe=CPU)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_gpu_times_only_bf16_but_verifies_other_dtypes(dtype: str) -> None:
    """The grouped product of the experts exists only in bf16."""
    with pytest.raises(UsageError, match=f"--weights-dtype {dtype}: .* use --weights-dtype bf16.*verify"):
        check(dtype=dtype)
    check(dtype=dtype, timed=False)
    check(dtype=dtype, probe=CPU)


def test_sweep_grid_refuses_what_verify_layouts_accept() -> None:
    """Both commands get the same options."""
    spec = make_spec({"backend": "reference", "model": "tiny", "tp": "2", "context": "37", "concurrency": "4"}, H200X4)
    assert all("--backend reference" in str(c.error) for c in grid.expand_grid(spec, H200X4))
    assert all(c.error is None for c in grid.expand_layouts([Layout(tp=2, dcp=2)], spec, H200X4))


def test_expert_width_of_a_rank_must_be_a_multiple_of_16_bytes() -> None:
    """24 numbers over 2 ranks are 12 each, 24 bytes in bf16; 16 numbers are 8, 16 bytes. A CPU accepts both."""
    with pytest.raises(
        UsageError,
        match=r"has 12 numbers of tiny's experts, 24 wide.*; use --tp 1 --dcp 1, the largest layout without this limit, or --ep tp",
    ):
        check(tiny(moe_intermediate_size=24), ep="1")
    check(tiny(moe_intermediate_size=24), ep="tp")
    check(tiny(moe_intermediate_size=24), ep="1", probe=CPU)
    check(tiny(moe_intermediate_size=16), ep="1")


def test_sizes_of_a_rank_are_checked_against_fp8_blocks() -> None:
    """V3 over 4 ranks, 2 of them in each replica, has 64 heads of 192 and 128 numbers, and a fourth of the widths of
    experts.
    """
    shape, point = (
        SHAPES["deepseek-v3"],
        Point(model="deepseek-v3", tp=4, dp=2, ep="1", concurrency=2, context=9, backend="triton", dtype="bf16"),
    )
    sizes = {name: size for name, (size, *_) in compute_part_sizes(point, shape).items()}
    assert sizes == {
        "'hidden_size'": 7168,
        "the queries": 1536,
        "q_b": 64 * 192,
        "o_proj": 64 * 128,
        "an expert": 512,
        "the shared expert": 512,
        "the dense MLP": 4608,
    }
    whole = msgspec.structs.replace(point, ep="tp")
    assert compute_part_sizes(whole, shape)["an expert"][0] == 2048
    lite = compute_part_sizes(whole, dataclasses.replace(SHAPES["deepseek-v2-lite"], first_k_dense_replace=0))
    assert [lite[name][0] for name in ("the queries", "the shared expert", "the dense MLP")] == [8 * 192, 704, 0]


@pytest.mark.parametrize(("dp", "limit"), [(1, 512), (2, 1024)])
@pytest.mark.parametrize("probe", [CPU, H200X4], ids=["cpu", "gpu"])
def test_more_requests_than_the_largest_graph_are_refused(probe: Probe, dp: int, limit: int) -> None:
    """The limit is 512 per replica; one request more makes the batch of one replica larger."""
    check(probe=probe, dp=dp, dcp=1, exchange="none", concurrency=limit)
    with pytest.raises(UsageError, match=rf"--concurrency {limit + 1} .*--concurrency can be up to {limit}\."):
        check(probe=probe, dp=dp, dcp=1, exchange="none", concurrency=limit + 1)


@pytest.mark.parametrize(
    "sizes", [{"latent": 48}, {"qk_rope_head_dim": 24}, {"latent": 8}, {"qk_rope_head_dim": 8}], ids=str
)
@pytest.mark.parametrize("probe", [CPU, H200X4], ids=["cpu", "gpu"])
def test_triton_requires_powers_of_two_from_16(probe: Probe, sizes: dict[str, int]) -> None:
    """tl.arange accepts no other sizes, and the message suggests another backend."""
    with pytest.raises(UsageError, match=r"--backend (triton needs|reference)|rope kernel"):
        check(tiny(**sizes), probe)
    if probe is CPU:
        check(tiny(**sizes), probe, backend="reference")


def test_rope_width_must_be_a_power_of_two_on_a_gpu() -> None:
    """The rope kernel is used with every backend."""
    with pytest.raises(UsageError, match="'qk_rope_head_dim' 24; dcpbench verify --device cpu --backend reference"):
        check(tiny(qk_rope_head_dim=24), backend="reference", timed=False)


def test_symmetric_memory_over_several_machines_is_refused() -> None:
    """With two machines of two GPUs, dcp 2 is inside one; dcp 4 and the reduction over tp 4 are not."""
    two = msgspec.structs.replace(H200X4, count=2)
    point = Point(model="tiny", tp=4, dcp=4, concurrency=2, context=9, exchange="symm", backend="triton", dtype="bf16")

    def check_changed(**changes: object) -> None:
        changed = msgspec.structs.replace(point, **changes)
        validate.check_runnable(changed, Settings(), SHAPES["tiny"], validate.Machine(probe=two, nnodes=2))

    check_changed(dcp=2)
    with pytest.raises(UsageError, match=r"--exchange symm .* of 4 ranks.* 2 of them; use --exchange a2a"):
        check_changed()
    with pytest.raises(UsageError, match=r"--collectives all-reduce=symm .*use --collectives all-reduce=nccl"):
        check_changed(dcp=2, all_reduce="symm")
    check_changed(dcp=2, dp=2, all_reduce="symm")


def test_project_first_accepts_any_value_width() -> None:
    """The merged values are rounded before o_proj anyway."""
    check(tiny(v_head_dim=20), project_first=True)


@pytest.mark.parametrize("sizes", [{"v_head_dim": 20}, {"v_head_dim": 48}, {"v_head_dim": 8}], ids=str)
def test_odd_value_widths_run_without_dcp_and_on_the_cpu(sizes: dict[str, int]) -> None:
    """Only values merged in fp32 use the restricted kernel: on a GPU, in half precision, with dcp > 1."""
    with pytest.raises(UsageError, match=r"'v_head_dim' to be powers of two of at least 16.*use --dcp 1"):
        check(tiny(**sizes))
    check(tiny(**sizes), dcp=1, exchange="none")
    check(tiny(**sizes), timed=False, dtype="fp32")
    check(tiny(**sizes), CPU)


class TestServedRows:
    """`serve` with dcp > 1 gathers KV rows of all ranks in token order, in units of 16 bytes."""

    LOAD = Load(requests=2, input_tokens="8", output_tokens="1", chunk=64)

    def check_served(self, latent: int, dtype: str = "fp32", **changes: object) -> None:
        """Check a point of `serve` on the CPU, of a model with KV rows of `latent` + 16 numbers."""
        options = {"backend": "reference", "workload": "serve", "load": self.LOAD, "dtype": dtype} | changes
        check(tiny(latent=latent), CPU, **options)

    def test_kv_rows_must_be_a_multiple_of_16_bytes(self) -> None:
        """34 + 16 numbers of 4 bytes are 200 = 12.5 · 16 bytes."""
        message = "of 16 bytes, and tiny has KV rows of 50 fp32 numbers, 200 bytes; use --dcp 1, or dcpbench sweep"
        with pytest.raises(UsageError, match=f"--dcp 2: .*{message} for decode steps only"):
            self.check_served(34)
        self.check_served(34, dcp=1, exchange="none")

    def test_message_names_a_dtype_with_a_valid_row_size(self) -> None:
        """36 + 16 numbers are 104 bytes in bf16, and 208 = 13 · 16 in fp32."""
        with pytest.raises(
            UsageError, match=r"tiny has KV rows of 52 bf16 numbers, 104 bytes; use --kv-dtype fp32, --dcp 1"
        ):
            self.check_served(36, "bf16")
        self.check_served(36, "fp32")

    def test_units_equal_those_of_the_kernels(self) -> None:
        assert kv_gather.UNIT == validate.ROW_UNIT
        assert kv_up_proj.UNIT == TENSOR_UNIT

    def test_value_width_must_be_a_multiple_of_16_bytes_on_gpus(self) -> None:
        """Values of 36 bf16 numbers are 72 bytes; a CPU accepts them."""
        sizes = {"dcp": 1, "exchange": "none", "backend": "triton", "load": self.LOAD}
        check(**sizes)
        with pytest.raises(UsageError, match=r"'v_head_dim' 36 in bf16; use dcpbench sweep"):
            check(tiny(v_head_dim=36), **sizes)
        check(tiny(v_head_dim=36), CPU, **{**sizes, "backend": "reference", "dtype": "fp32"})

    def test_decode_steps_accept_any_kv_row_size(self) -> None:
        check(tiny(latent=34), CPU, backend="reference", dtype="fp32")


@pytest.mark.parametrize(("served", "gathers"), [(True, [2, 4, 2]), (False, [4, 2])], ids=["served", "decode"])
def test_emulated_layout_requires_times_of_all_its_collectives(
    monkeypatch: pytest.MonkeyPatch, served: bool, gathers: list[int]
) -> None:
    """tp8·dp2·dcp2 with symm has all-gathers over 4 ranks of heads and over 2 replicas; a served point also gathers
    prefixes over dcp.
    """
    calls: list[tuple[str, int]] = []
    comm_model = SimpleNamespace(predict_seconds=lambda name, ranks, _: calls.append((name, ranks)))
    monkeypatch.setattr(validate, "load_machine", lambda _: SimpleNamespace(comm_model=comm_model))
    load = Load(requests=4, input_tokens="10", output_tokens="5", chunk=2048, mode="replay") if served else None
    point = Point(
        model="deepseek-v3",
        tp=8,
        dp=2,
        dcp=2,
        concurrency=2,
        context=15,
        exchange="symm",
        backend="flashinfer",
        dtype="bf16",
        emulate="H200",
        load=load,
    )
    validate._check_emulated(point, validate.Machine(probe=H200X4, timed=True))
    assert calls[:3] == [("symm", 2), ("symm", 2), ("all-reduce", 4)]
    assert sorted(ranks for name, ranks in calls if name == "all-gather") == sorted(gathers)


@pytest.mark.parametrize("backend", ["flashinfer", "flashmla"])
def test_backends_without_multi_row_queries_are_refused_for_drafts(backend: str) -> None:
    refusal = (
        rf"--backend {backend} does not take the 4 query rows of a request together \(--mtp 3\); use --backend triton"
    )
    with pytest.raises(UsageError, match=refusal):
        check(backend=backend, mtp=3, acceptance="0.8/0.6/0.4")
    check(mtp=3, acceptance="0.8/0.6/0.4")


def test_drafts_on_hopper_require_a_page_size_of_the_kernels() -> None:
    """Kernels of grouped-query attention and other GPUs accept any page size."""
    from dcpbench.kernels.attention import hopper_pairs  # with torch

    drafts = {"mtp": 3, "acceptance": "0.8/0.6/0.4"}
    hopper = msgspec.structs.replace(H200X4, capability=validate.HOPPER)
    with pytest.raises(
        UsageError, match=r"read pages of 16 and 32 rows and multiples of 64, not 1; use --page-size 64"
    ):
        check(probe=hopper, **drafts)
    for page in range(1, 200):
        if hopper_pairs.supports_pages(page):
            check(probe=hopper, page_size=page, **drafts)
        else:
            with pytest.raises(UsageError, match="--page-size 64"):
                check(probe=hopper, page_size=page, **drafts)
    check(probe=hopper)
    check(SHAPES["qwen3-235b-a22b"], hopper, dcp=1, exchange="none", **drafts)


def test_drafts_count_towards_the_positions_of_the_model() -> None:
    """A context of 65,533 leaves 3 of 65,536 positions: one token and 2 drafts."""
    check(context=65533, mtp=2)
    with pytest.raises(UsageError, match="65536 positions"):
        check(context=65533, mtp=3)


class TestGroupedQueryAttention:
    QWEN = SHAPES["qwen3-235b-a22b"]

    def test_model_with_unsupported_parts_is_planned_but_not_measured(self) -> None:
        """Such a model can be replayed with given step times."""
        point = Point(model="gpt-oss-120b", tp=2, concurrency=2, context=9, backend="triton", dtype="bf16")
        lacking = "biases in attention and sliding windows and attention sinks and biases of experts"
        with pytest.raises(UsageError, match=rf"does not compute {lacking}, which gpt-oss-120b has.* --dry-run"):
            validate.check_live(point, Settings(), SHAPES["gpt-oss-120b"])
        with pytest.raises(UsageError, match=r"rope on a part of a head, which glm-4.6"):
            validate.check_live(point, Settings(), SHAPES["glm-4.6"])
        validate.check_live(point, Settings(step_times="times.json"), SHAPES["gpt-oss-120b"])

    @pytest.mark.parametrize("model", ["qwen3-235b-a22b", "qwen3-32b", "llama-3.1-70b", "tiny"])
    def test_supported_models_are_measured(self, model: str) -> None:
        check(self.QWEN, dcp=1, exchange="none")
        point = Point(model=model, tp=2, concurrency=2, context=9, backend="triton", dtype="bf16")
        validate.check_live(point, Settings(), SHAPES[model])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backend": "flashmla", "page_size": 64}, "flashmla computes MLA, and .* use --backend triton"),
            ({"project_first": True}, "project-first: the attention of qwen3-235b-a22b gives values"),
            ({"qk_rope_head_dim": 96, "v_head_dim": 96}, "power of two of at least 16, and qwen3-235b-a22b has 96"),
            (
                {"qk_rope_head_dim": 32, "v_head_dim": 32, "backend": "flashinfer"},
                "heads of 64, 128, 256 columns, .* has 32",
            ),
        ],
    )
    def test_options_without_kernels_are_refused(self, options: dict[str, object], message: str) -> None:
        sizes = {name: options[name] for name in ("qk_rope_head_dim", "v_head_dim") if name in options}
        with pytest.raises(UsageError, match=message):
            check(
                dataclasses.replace(self.QWEN, gqa=Gqa(kv_heads=1), **sizes),
                **{name: value for name, value in options.items() if name not in sizes},
            )


class TestFormats:
    """Weights in fewer bits than fp8 are planned but not measured."""

    @pytest.mark.parametrize("weights", ["int4", "nvfp4", "mxfp4"])
    def test_format_without_kernels_is_planned_but_not_measured(self, weights: str) -> None:
        """Replays with given step times need no kernels."""
        point = Point(
            model="deepseek-v3", tp=4, concurrency=2, context=9, backend="triton", dtype="bf16", weights_dtype=weights
        )
        with pytest.raises(UsageError, match=f"no kernels for {weights} weights.*; .* fp8 or bf16 .* --dry-run"):
            validate.check_live(point, Settings(), SHAPES["deepseek-v3"])
        validate.check_live(point, Settings(step_times="times.json"), SHAPES["deepseek-v3"])
        validate.check_live(msgspec.structs.replace(point, weights_dtype="fp8"), Settings(), SHAPES["deepseek-v3"])

    @pytest.mark.parametrize(
        ("changes", "computed"),
        [
            ({"columns": 32}, True),
            ({"columns": 128}, True),
            ({"columns": 64}, False),
            ({"columns": 32, "scale_bits": 20}, False),
            ({"columns": 32, "parts": frozenset(PARTS)}, False),
            ({"columns": 32, "mtp": False}, False),
        ],
    )
    def test_the_engine_has_int4_in_experts_alone(self, changes: dict[str, object], computed: bool) -> None:
        """Symmetric in groups of 32 or 128: zero points take 4 bits of each group."""
        found = dataclasses.replace(FORMATS[INT4], **{"parts": frozenset({EXPERTS}), **changes})  # type: ignore[arg-type]
        reason = validate.find_live_limit(dataclasses.replace(SHAPES["kimi-k2"], published=found), INT4)
        assert (reason is None) if computed else "but experts alone, symmetric in groups of 32 or 128" in str(reason)

    def test_no_rank_has_a_part_of_a_group_of_int4_even_on_the_cpu(self) -> None:
        """Experts 32 wide have a group over tp1 and half a group over tp2; whole experts have theirs."""
        found = dataclasses.replace(FORMATS[INT4], columns=32, parts=frozenset({EXPERTS}))
        shape = dataclasses.replace(SHAPES["tiny"], published=found)
        int4 = {"dtype": "fp32", "weights_dtype": INT4, "backend": "reference", "tp": 2}
        check(shape, CPU, ep="tp", **int4)
        with pytest.raises(UsageError, match=r"an expert \(16 numbers\) of tiny .* block of 32, .*use --tp 1"):
            check(shape, CPU, ep="1", **int4)

    @pytest.mark.parametrize(
        ("weights", "tp", "split"),
        [
            ("int4", 8, "an expert (96 numbers)"),
            ("int4", 4, "an expert (192 numbers)"),
            ("int4", 2, None),
            ("nvfp4", 8, None),
            ("mxfp4", 32, None),
        ],
    )
    def test_part_of_an_expert_on_a_rank_must_be_whole_groups(self, weights: str, tp: int, split: str | None) -> None:
        """Experts of Qwen3-30B are 768 wide; int4 has groups of 128, nvfp4 of 16. Engines pad parts in mxfp4."""
        point = Point(
            model="qwen3-30b-a3b",
            tp=tp,
            ep="1",
            concurrency=2,
            context=9,
            backend="triton",
            dtype="bf16",
            weights_dtype=weights,
        )
        limit = find_split_block(point, SHAPES["qwen3-30b-a3b"])
        assert (limit.reason.partition(" of ")[0] if limit else None) == split
        assert limit is None or "; use --tp 2, the largest" in limit.format_for_sweep()
        assert limit is None or "; give --gpus 2, or " in limit.format_for_recommend()
