"""GPU time of an engine's steps by part and by kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.errors import TraceError
from dcpbench.syncs.kernel_time import UNKNOWN, find_part, measure_steps, shorten_name
from tests.unit.program_traces import Program

if TYPE_CHECKING:
    from pathlib import Path

STEP = {
    "void flash::FlashAttnFwdSm90<cutlass::bfloat16_t, 512>(Params)": 300.0,
    "fused_moe_kernel": 500.0,
    "void cutlass::device_kernel<GemmUniversal>(Params)": 100.0,
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 40.0,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": 30.0,
    "my_new_kernel": 10.0,
}


def write_engine_trace(path: Path, decodes: int = 5) -> Path:
    """vLLM's annotations: one prefill of 2,000 µs, then decode steps with the kernels of STEP, 20 µs apart on the GPU."""
    program = Program()
    with program.range("execute_context_1(4096)_generation_0(0)"):
        program.work(1, 2000.0, "prefill_flash_fwd")
    for _ in range(decodes):
        program.gpu += 20
        with program.range("execute_context_0(0)_generation_8(8)"):
            for name, us in STEP.items():
                program.work(1, us, name)
        program.host = program.gpu
    return program.write(path)


def test_a_decode_step_is_divided_by_part_and_by_kernel(tmp_path: Path) -> None:
    """There are five decode steps: the first is warm-up, and the last has no next one that ends it."""
    prefill_and_decode = measure_steps(write_engine_trace(tmp_path / "rank0.pt.trace.json"))
    (decode,) = [step for step in prefill_and_decode if step.kind == "decode"]
    assert decode.steps == 3
    assert decode.part_us == pytest.approx(
        {"experts": 500, "attention": 300, "projections": 100, "all-reduce": 40, "exchange": 30, UNKNOWN: 10}, abs=0.01
    )
    total = sum(kernel.us for kernel in decode.kernels)
    assert total - decode.overlap_us + decode.idle_us == pytest.approx(decode.step_us, abs=0.01)
    assert decode.overlap_us == pytest.approx(0, abs=0.01)
    assert decode.idle_us == pytest.approx(20, abs=0.01)
    assert [(kernel.name, kernel.per_step) for kernel in decode.kernels[:2]] == [
        ("fused_moe_kernel", 1),
        ("flash::FlashAttnFwdSm90", 1),
    ]


def test_kernels_that_overlap_are_counted_and_the_overlap_is_named(tmp_path: Path) -> None:
    """A second stream runs a kernel of 100 µs during the experts of each step."""
    trace = json.loads(write_engine_trace(tmp_path / "rank0.pt.trace.json").read_text())
    experts = [event for event in trace["traceEvents"] if event["name"] == "fused_moe_kernel"]
    trace["traceEvents"] += [event | {"tid": 9, "name": "shared_gemm", "dur": 100.0} for event in experts]
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps(trace))
    decode = measure_steps(tmp_path / "rank0.pt.trace.json")[-1]
    assert decode.overlap_us == pytest.approx(100, abs=0.01)
    total = sum(kernel.us for kernel in decode.kernels)
    assert total - decode.overlap_us + decode.idle_us == pytest.approx(decode.step_us, abs=0.01)
    assert sum(decode.exposed_part_us.values()) + decode.idle_us == pytest.approx(decode.step_us, abs=0.01)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_fwd_grouped_kernel_stage1", "attention"),
        ("void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<…>", "attention"),
        ("_correct_attn_cp_out_kernel", "merge"),
        ("void vllm::merge_attn_states_kernel<__nv_bfloat16, 128u>", "merge"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "exchange"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "all-reduce"),
        ("void vllm::moe::moe_align_block_size_kernel<int>", "experts"),
        ("void vllm::act_and_mul_kernel<…silu…>", "experts"),
        ("per_token_group_quant_8bit_kernel", "quantisation"),
        ("void vllm::concat_and_cache_mla_kernel<…>", "KV cache write"),
        ("void vllm::rms_norm_kernel<__nv_bfloat16>", "norm and rope"),
        ("_w8a8_block_fp8_matmul", "projections"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "projections"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, …>", "elementwise"),
        ("something_else", UNKNOWN),
    ],
)
def test_parts_follow_from_the_names_of_kernels(name: str, part: str) -> None:
    assert find_part(name) == part


def test_names_are_shown_without_template_arguments_and_parameters() -> None:
    assert shorten_name("void a::(anonymous namespace)::f<b<c>, (d)1>(e<f>, int)") == "a::f"
    assert shorten_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD"
    assert shorten_name("(odd)") == "(odd)"


def test_the_command_prints_parts_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The front end's trace in the same folder is left out by name."""
    write_engine_trace(tmp_path / "dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json")
    Program().write(tmp_path / "host_1.async_llm.1.pt.trace.json")
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "kernels", str(tmp_path), "--top", "1"])
    out, err = capsys.readouterr()
    assert end.value.code in (0, None)
    assert "decode step, mean of 3 steps" in out
    assert any(line.split()[:2] == ["experts", "500.0"] for line in out.splitlines())
    assert "my_new_kernel" not in out
    assert "is the trace of vLLM's front end" in err
    with pytest.raises(SystemExit):
        cli.main(["syncs", "kernels", str(tmp_path), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows][-1] == "decode"
    assert rows[-1]["part_us"]["unknown"] == pytest.approx(10, abs=0.01)


def test_a_trace_that_cannot_answer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has 1 steps, and at least 2 are needed"):
        measure_steps(write_one_step(tmp_path / "one.json"))
    cpu = Program()
    cpu.add("cpu_op", "aten::mm", 1000.0, 8)
    with pytest.raises(TraceError, match="has no GPU work"):
        measure_steps(cpu.write(tmp_path / "cpu.json"))


def write_one_step(path: Path) -> Path:
    program = Program()
    with program.range("ProfilerStep#1"):
        program.work(3)
    return program.write(path)
