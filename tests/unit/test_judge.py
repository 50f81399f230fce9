"""Which points a machine cannot run, by command: what a kernel, a graph or a model's sizes rule out."""

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
from dcpbench.points.device_probe import Probe
from dcpbench.points.layout import Layout
from dcpbench.points.point import Load, Point
from dcpbench.points.settings import Settings

if TYPE_CHECKING:
    from dcpbench.models.shapes import ModelShape

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


def check(shape: ModelShape = SHAPES["tiny"], probe: Probe = H200X4, *, timed: bool = True, **changes: object) -> None:
    """Judge one point of the tiny model."""
    point = Point(model="tiny", tp=2, dcp=2, concurrency=2, context=9, exchange="ag_rs", backend="triton", dtype="bf16")
    changed = msgspec.structs.replace(point, **changes)
    validate.check_runnable(changed, Settings(), shape, validate.Machine(probe=probe, timed=timed))


def tiny(**sizes: int) -> ModelShape:
    """The tiny model with other widths."""
    return dataclasses.replace(SHAPES["tiny"], **sizes)


def test_the_reference_is_not_timed_on_a_gpu_but_may_be_compared_there() -> None:
    """Its plan makes new tensors: a captured graph would replay the lengths of its capture."""
    with pytest.raises(UsageError, match="use --backend triton or --backend flashinfer"):
        check(backend="reference")
    check(backend="reference", timed=False)
    check(backend="reference", probe=CPU)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_a_gpu_times_bf16_alone_but_compares_other_dtypes(dtype: str) -> None:
    """The grouped product of the experts is bf16 only."""
    with pytest.raises(UsageError, match=f"--weights-dtype {dtype}: .* use --weights-dtype bf16.*verify"):
        check(dtype=dtype)
    check(dtype=dtype, timed=False)
    check(dtype=dtype, probe=CPU)


def test_sweep_and_verify_are_told_apart_by_their_grids() -> None:
    """The same options, one command each."""
    spec = make_spec({"backend": "reference", "model": "tiny", "tp": "2", "context": "37", "concurrency": "4"}, H200X4)
    assert all("--backend reference" in str(c.error) for c in grid.expand_grid(spec, H200X4))
    assert all(c.error is None for c in grid.expand_layouts([Layout(tp=2, dcp=2)], spec, H200X4))


def test_experts_are_cut_into_what_the_kernels_read() -> None:
    """Over 2 ranks 24 numbers are 12 each, 24 bytes in bf16; 16 numbers are 8, 16 bytes. The CPU takes all."""
    with pytest.raises(UsageError, match=r"has 12 numbers of tiny's experts, 24 wide.*; use --ep tp, or a smaller"):
        check(tiny(moe_inter=24), ep="1")
    check(tiny(moe_inter=24), ep="tp")
    check(tiny(moe_inter=24), ep="1", probe=CPU)
    check(tiny(moe_inter=16), ep="1")


def test_blocks_of_fp8_end_where_a_ranks_part_does() -> None:
    """V3 over 4 ranks, 2 of them in each replica, has 64 heads of 192 and 128 numbers, a fourth of what is cut by width."""
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
    lite = compute_part_sizes(whole, dataclasses.replace(SHAPES["deepseek-v2-lite"], first_dense=0))
    assert [lite[name][0] for name in ("the queries", "the shared expert", "the dense MLP")] == [8 * 192, 704, 0]


@pytest.mark.parametrize(("dp", "most"), [(1, 512), (2, 1024)])
@pytest.mark.parametrize("probe", [CPU, H200X4], ids=["cpu", "gpu"])
def test_more_requests_than_the_largest_graph_takes_are_refused_with_the_most(probe: Probe, dp: int, most: int) -> None:
    """512 a replica, and the odd one out makes one replica's batch larger."""
    check(probe=probe, dp=dp, dcp=1, exchange="none", concurrency=most)
    with pytest.raises(UsageError, match=rf"--concurrency {most + 1} .*--concurrency can be up to {most}\."):
        check(probe=probe, dp=dp, dcp=1, exchange="none", concurrency=most + 1)


@pytest.mark.parametrize("sizes", [{"latent": 48}, {"rope": 24}, {"latent": 8}, {"rope": 8}], ids=str)
@pytest.mark.parametrize("probe", [CPU, H200X4], ids=["cpu", "gpu"])
def test_triton_needs_powers_of_two_from_16(probe: Probe, sizes: dict[str, int]) -> None:
    """tl.arange takes no others, and the message says which backend does."""
    with pytest.raises(UsageError, match=r"--backend (triton needs|reference)|rope kernel"):
        check(tiny(**sizes), probe)
    if probe is CPU:
        check(tiny(**sizes), probe, backend="reference")


def test_on_a_gpu_rope_is_a_power_of_two_whatever_the_backend() -> None:
    """The rope kernel has no alternative there."""
    with pytest.raises(UsageError, match="'qk_rope_head_dim' 24; dcpbench verify --device cpu --backend reference"):
        check(tiny(rope=24), backend="reference", timed=False)


@pytest.mark.parametrize("option", ["q_replicate", "project_first"])
def test_options_of_an_exchange_need_one(option: str) -> None:
    """The message names what was typed and what it needs."""
    flag = "--collectives " + option.replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag}: tp2 exchanges nothing; use --dcp 2"):
        check(dcp=1, exchange="none", **{option: True})
    check(**{option: True})


def test_symmetric_memory_ends_at_the_machine() -> None:
    """Two machines of two GPUs: dcp 2 fits in one, dcp 4 and the reduction over tp 4 do not."""
    two = msgspec.structs.replace(H200X4, count=2)
    point = Point(model="tiny", tp=4, dcp=4, concurrency=2, context=9, exchange="symm", backend="triton", dtype="bf16")

    def judged(**changes: object) -> None:
        changed = msgspec.structs.replace(point, **changes)
        validate.check_runnable(changed, Settings(), SHAPES["tiny"], validate.Machine(probe=two, nnodes=2))

    judged(dcp=2)
    with pytest.raises(UsageError, match=r"--exchange symm .* of 4 ranks.* 2 of them; use --exchange a2a"):
        judged()
    with pytest.raises(UsageError, match=r"--collectives all-reduce=symm .*use --collectives all-reduce=nccl"):
        judged(dcp=2, all_reduce="symm")
    judged(dcp=2, dp=2, all_reduce="symm")


def test_values_projected_first_need_no_fp32_product() -> None:
    """What is merged is rounded before o_proj anyway, so V may be any width."""
    check(tiny(value=20), project_first=True)


@pytest.mark.parametrize("sizes", [{"value": 20}, {"value": 48}, {"value": 8}], ids=str)
def test_values_of_other_widths_run_without_dcp_and_on_the_cpu(sizes: dict[str, int]) -> None:
    """Merged in fp32 they pass a kernel of their own, on a GPU, in half precision, where dcp > 1."""
    with pytest.raises(UsageError, match=r"'v_head_dim' to be powers of two from 16.*use --dcp 1"):
        check(tiny(**sizes))
    check(tiny(**sizes), dcp=1, exchange="none")
    check(tiny(**sizes), timed=False, dtype="fp32")
    check(tiny(**sizes), CPU)


class TestServedRows:
    """`serve` with dcp > 1 puts KV rows of all ranks in token order, 16 bytes at a time."""

    LOAD = Load(requests=2, input_tokens="8", output_tokens="1", chunk=64)

    def serve(self, latent: int, dtype: str = "fp32", **changes: object) -> None:
        """Judge a point of `serve` on the CPU, of a model whose KV rows are `latent` + 16 numbers."""
        asked = {"backend": "reference", "workload": "serve", "load": self.LOAD, "dtype": dtype} | changes
        check(tiny(latent=latent), CPU, **asked)

    def test_a_row_that_is_no_multiple_of_16_bytes_is_refused_before_anything_is_launched(self) -> None:
        """34 + 16 numbers of 4 bytes are 200 = 12.5 · 16 bytes."""
        said = "of 16 bytes, and tiny has KV rows of 50 fp32 numbers, 200 bytes; use --dcp 1, or dcpbench sweep"
        with pytest.raises(UsageError, match=f"--dcp 2: .*{said} for decode steps only"):
            self.serve(34)
        self.serve(34, dcp=1, exchange="none")

    def test_a_dtype_in_which_the_row_fits_is_named(self) -> None:
        """36 + 16 numbers: 104 bytes in bf16, 208 = 13 · 16 in fp32."""
        with pytest.raises(
            UsageError, match=r"tiny has KV rows of 52 bf16 numbers, 104 bytes; use --kv-dtype fp32, --dcp 1"
        ):
            self.serve(36, "bf16")
        self.serve(36, "fp32")

    def test_the_unit_is_the_kernels(self) -> None:
        assert kv_gather.UNIT == validate.ROW_UNIT
        assert kv_up_proj.UNIT == TENSOR_UNIT

    def test_keys_and_values_are_made_of_whole_units_on_gpus(self) -> None:
        """Values of 36 bf16 numbers are 72 bytes; a CPU takes them."""
        sizes = {"dcp": 1, "exchange": "none", "backend": "triton", "load": self.LOAD}
        check(**sizes)
        with pytest.raises(UsageError, match=r"'v_head_dim' 36 in bf16; use dcpbench sweep"):
            check(tiny(value=36), **sizes)
        check(tiny(value=36), CPU, **{**sizes, "backend": "reference", "dtype": "fp32"})

    def test_decode_steps_alone_move_no_rows(self) -> None:
        check(tiny(latent=34), CPU, backend="reference", dtype="fp32")


@pytest.mark.parametrize(("served", "gathers"), [(True, [2, 4, 2]), (False, [4, 2])], ids=["served", "decode"])
def test_calls_of_an_emulated_layout_must_be_known_with_those_of_stored_prefixes(
    monkeypatch: pytest.MonkeyPatch, served: bool, gathers: list[int]
) -> None:
    """tp8·dp2·dcp2 by symm: all-gathers of 4 heads' ranks and of 2 replicas; a served one gathers prefixes over dcp, too."""
    asked: list[tuple[str, int]] = []
    wire = SimpleNamespace(predict_seconds=lambda name, ranks, _: asked.append((name, ranks)))
    monkeypatch.setattr(validate, "load_machine", lambda _: SimpleNamespace(wire=wire))
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
    assert asked[:3] == [("symm", 2), ("symm", 2), ("all-reduce", 4)]
    assert sorted(ranks for name, ranks in asked if name == "all-gather") == sorted(gathers)


@pytest.mark.parametrize("backend", ["flashinfer", "flashmla"])
def test_backends_that_do_not_take_query_rows_together_are_refused_for_steps_with_drafts(backend: str) -> None:
    refusal = (
        rf"--backend {backend} does not take the 4 query rows of a request together \(--mtp 3\); use --backend triton"
    )
    with pytest.raises(UsageError, match=refusal):
        check(backend=backend, mtp=3, acceptance="0.8/0.6/0.4")
    check(mtp=3, acceptance="0.8/0.6/0.4")


def test_steps_with_drafts_need_pages_that_hopper_kernels_copy_whole() -> None:
    """Kernels of grouped-query attention take any page, and so do other GPUs; the sizes are those of the kernels."""
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


def test_drafts_have_positions_of_the_model() -> None:
    """A context of 65,533 leaves 3 of 65,536 positions: one token and 2 drafts."""
    check(context=65533, mtp=2)
    with pytest.raises(UsageError, match="65536 positions"):
        check(context=65533, mtp=3)


class TestGroupedQueries:
    QWEN = SHAPES["qwen3-235b-a22b"]

    def test_a_model_with_parts_that_the_engine_lacks_is_planned_and_not_measured(self) -> None:
        """With given step times nothing is measured."""
        point = Point(model="gpt-oss-120b", tp=2, concurrency=2, context=9, backend="triton", dtype="bf16")
        lacking = "biases in attention and sliding windows and attention sinks and biases of experts"
        with pytest.raises(UsageError, match=rf"does not compute {lacking}, which gpt-oss-120b has.* --dry-run"):
            validate.check_live(point, Settings(), SHAPES["gpt-oss-120b"])
        with pytest.raises(UsageError, match=r"rope on a part of a head, which glm-4.6"):
            validate.check_live(point, Settings(), SHAPES["glm-4.6"])
        validate.check_live(point, Settings(step_times="times.json"), SHAPES["gpt-oss-120b"])

    @pytest.mark.parametrize("model", ["qwen3-235b-a22b", "qwen3-32b", "llama-3.1-70b", "tiny"])
    def test_models_that_the_engine_computes_are_measured(self, model: str) -> None:
        check(self.QWEN, dcp=1, exchange="none")
        point = Point(model=model, tp=2, concurrency=2, context=9, backend="triton", dtype="bf16")
        validate.check_live(point, Settings(), SHAPES[model])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"backend": "flashmla", "page_size": 64}, "flashmla computes MLA, and .* use --backend triton"),
            ({"project_first": True}, "project-first: the attention of qwen3-235b-a22b gives values"),
            ({"rope": 96, "value": 96}, "power of two from 16, and qwen3-235b-a22b has 96"),
            ({"rope": 32, "value": 32, "backend": "flashinfer"}, "heads of 64, 128, 256 columns, .* has 32"),
        ],
    )
    def test_what_its_kernels_do_not_take_is_refused(self, options: dict[str, object], message: str) -> None:
        sizes = {name: options[name] for name in ("rope", "value") if name in options}
        with pytest.raises(UsageError, match=message):
            check(
                dataclasses.replace(self.QWEN, gqa=Gqa(kv_heads=1), **sizes),
                **{name: value for name, value in options.items() if name not in sizes},
            )


class TestFormats:
    """Weights in fewer bits than fp8 are planned."""

    @pytest.mark.parametrize("weights", ["int4", "nvfp4", "mxfp4"])
    def test_a_format_without_kernels_is_planned_and_not_measured(self, weights: str) -> None:
        """Replays of given step times need no kernels."""
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
    def test_groups_end_where_a_ranks_part_of_an_expert_does(self, weights: str, tp: int, split: str | None) -> None:
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
        assert limit is None or limit.max_tp == 2
