"""Test the GPU time of an engine's steps by part and by kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from dcpbench import cli
from dcpbench.errors import TraceError
from dcpbench.syncs.kernel_time import PARTS, UNKNOWN, find_part, measure_steps, shorten_name
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
    """Write a trace with vLLM's annotations: one prefill of 2,000 µs, then decode steps with the kernels of STEP, 20 µs
    apart on the GPU.
    """
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


def test_decode_step_time_is_divided_by_part_and_kernel(tmp_path: Path) -> None:
    """The first of five decode steps is warm-up, and the last has no next one that ends it."""
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


def test_overlapping_kernels_are_counted_and_the_overlap_is_reported(tmp_path: Path) -> None:
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


FLASH_ATTENTION_3 = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, "
    "cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<64>, cute::C<64>, cute::C<64> >, 512, "
    "cutlass::bfloat16_t, float, cutlass::arch::Sm90, false>, flash::VarlenDynamicPersistentTileScheduler<64, 64> > > >(Params)"
)
SCALED_MM = (
    "void cutlass::device_kernel<vllm::cutlass_3x_gemm_fp8_blockwise<cutlass::bfloat16_t, 128, 1, 128, cute::tuple<cute::C<128>, "
    "cute::C<16>, cute::C<128> >, cutlass::gemm::KernelTmaWarpSpecializedPingpongFP8Blockwise, true>::GemmKernel>(Params)"
)
GROUPED_MM = (
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, "
    "cutlass::gemm::collective::CollectiveMma<int> > >(Params)"
)
FOREACH = (  # name of the kernel of torch's `_foreach_` operators, with places for the functor and the operation
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<2>, "
    "at::native::(anonymous namespace)::{}, at::native::{} >(at::native::(anonymous namespace)::TensorListMetadata<2>)"
)
REAL_NAMES = {
    "all-reduce": [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals, vllm::Signal*, __nv_bfloat16*, int, int)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(AllReduceFusionPattern)1, __nv_bfloat16, 2, true>",
        "void multimem_all_reduce_kernel<c10::BFloat16, 16>",
        "void all_reduce_kernel<2, 1, __nv_bfloat16>",
    ],
    "exchange": [
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
        "_all_gather_kernel_inner",
    ],
    "merge": [
        "_correct_attn_cp_out_kernel",
        "_dcp_a2a_pack_send_kernel",
        "_dcp_a2a_unpack_combine_kernel",
        "_dcp_lse_combine_kernel",
        "merge_state_kernel",
        "void vllm::merge_attn_states_kernel<__nv_bfloat16, c10::Float8_e4m3fn, 128u, true>(c10::Float8_e4m3fn*, float*)",
        "void flashinfer::MergeStateKernel<8u, __nv_bfloat16, __nv_bfloat16>(__nv_bfloat16*)",
    ],
    "attention": [
        FLASH_ATTENTION_3,
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>, cute::C<128> >, 5, 256, 1, false, true> >(Params)",
        "void flash::prepare_varlen_num_blocks_kernel<1, true>(int, int, int, int const*)",
        "void sm90::flash_fwd_splitkv_mla_kernel<cutlass::bfloat16_t>(DenseAttnDecodeParams)",
        "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512, 8, 32, 256>(CombineParams)",
        "get_mla_metadata_kernel",
        "void flashinfer::mla::BatchMLAPagedAttentionKernel<KernelTraits>(Params)",
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<KernelTraits>(Params)",
        "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u, __nv_bfloat16, __nv_bfloat16, int>(__nv_bfloat16*)",
        "_fwd_grouped_kernel_stage1",
        "_fwd_kernel_stage2",
        "_fwd_kernel",
        "kernel_unified_attention",
    ],
    "experts": [
        "fused_moe_kernel",
        GROUPED_MM,
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 4096u, 7168u, 1u, 64u, 128u, 128u, (deep_gemm::GemmType)2, 4u>(float*)",
        "void vllm::moe::moe_align_block_size_small_batch_expert_kernel<int, 256>(int const*, int*, int*, int*, int*, int, int)",
        "void vllm::moe::count_and_sort_expert_tokens_kernel<int>(int const*, int*, int*, int*, unsigned long, int, int, int, bool)",
        "void vllm::moe::grouped_topk_fused_small_expert_count_kernel<float, float, int, (vllm::moe::ScoringFunc)1, 256, true, 8>(float*)",
        "void vllm::moe::moe_sum_vec_kernel<c10::BFloat16, 8, 8, false>(c10::BFloat16*, c10::BFloat16 const*, long, int, long, long)",
        "void vllm::moe::moeSigmoid<256, float>(float const*)",
        "void router_gemm_kernel_float_output<__nv_bfloat16, 128, 8, 4, 256, 7168>(float*)",
        "_fwd_kernel_ep_scatter_1",
        "void moe_fused_gate_kernel<float>(void*)",
        "_moe_sum_reduce_kernel",
        "triton_per_fused_copy__mul_sum_0",
        "void vllm::act_and_mul_kernel<c10::BFloat16, __nv_bfloat162, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>(float))>(int)",
        "void vllm::silu_and_mul_per_block_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, false, 128>(c10::Float8_e4m3fn*, float*)",
    ],
    "KV cache write": [
        "void vllm::concat_and_cache_mla_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>(__nv_bfloat16 const*)",
        "void vllm::concat_and_cache_mla_rope_fused_kernel<float, c10::BFloat16, true, __nv_bfloat16>(long const*)",
        "set_mla_kv_buffer_kernel",
        "set_mla_kv_concat_q_kernel",
        "void store_kvcache<512, 1>(void*)",
    ],
    "norm and rope": [
        "void vllm::rms_norm_kernel<c10::BFloat16, 16, 2, false>(c10::BFloat16*, c10::BFloat16 const*, long)",
        "void vllm::rms_norm_per_block_quant_kernel<c10::BFloat16, c10::Float8_e4m3fn, false, false, 128>(c10::Float8_e4m3fn*)",
        "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, c10::BFloat16, false>(long const*, c10::BFloat16*)",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<true, 64u, 8u, 8u>(float*)",
        "fused_rope_kernel",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ],
    "quantisation": [
        "void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn, false, false, float>(c10::BFloat16 const*, void*)",
        "per_token_group_quant_8bit_v2_kernel",
        "_per_token_group_quant_fp8",
        "void vllm::convert_fp8_kernel<unsigned char, unsigned short>(unsigned short const*)",
    ],
    "projections": [
        SCALED_MM,
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 2112u, 7168u, 1u, 64u, 128u, 128u, (deep_gemm::GemmType)0, 4u>(float*)",
        "void fused_a_gemm_kernel<1, 2112, 7168, 16, 16, 256, 12>(__nv_bfloat16*, __nv_bfloat16 const*, __nv_bfloat16 const*, int)",
        "_w8a8_triton_block_scaled_mm",
        "_w8a8_block_fp8_matmul",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNN",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasLt::cublasSplitKParams)",
        "void gemvx::kernel<int, int, __nv_bfloat16, __nv_bfloat16>(cublasGemvTensorStridedBatched)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_cublas",
    ],
    "sampling": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4> >(float)",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(float*)",
        "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u, true, float, int>(float*)",
        "_topk_topp_kernel",
        "_topk_log_softmax_kernel",
        "_temperature_kernel",
        "void vllm::apply_repetition_penalties_kernel<float>(float*)",
    ],
    "copies": [
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)",
        FOREACH.format("UnaryOpFunctor<long, 2, 1, 1>", "Copy<long, long>"),
        "void vllm::ConcatMLAQKernel<c10::BFloat16, 512>(c10::BFloat16*)",
        "void concat_mla_absorb_q_kernel<512, 64>(__nv_bfloat16*)",
        "void vllm::gather_and_maybe_dequant_cache<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0, 320, 64>(int)",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >(int)",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>(int)",
        "triton_poi_fused__to_copy_add_0",
        FOREACH.format("BinaryOpScalarFunctor<float, 1, 1, 0>", "std::plus<float>, float"),
        "_compute_slot_mapping_kernel",
        "_dcp_local_seq_lens_kernel",
        "create_flashinfer_kv_indices_triton",
        "get_num_kv_splits_triton",
        "void at_cuda_detail::cub::DeviceScanKernel<Policy>(int*)",
    ],
    UNKNOWN: ["something_else", "hadamard_transform_kernel"],
}
"""Names of kernels in vLLM 0.26.0's libraries, in the sources of vLLM, SGLang 0.5.17, FlashInfer, DeepGEMM and NCCL, and of torch,
with shortened template arguments."""


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in REAL_NAMES.items() for name in names])
def test_parts_follow_from_the_names_of_kernels(name: str, part: str) -> None:
    assert find_part(name) == part


def test_every_part_is_tested_with_names() -> None:
    assert set(REAL_NAMES) == {*(part for part, _ in PARTS), UNKNOWN}


def test_cutlass_kernels_with_one_name_are_distinguished(tmp_path: Path) -> None:
    """FlashAttention 3 and the products of fp8 weights are both `cutlass::device_kernel`."""
    program = Program()
    for _ in range(5):
        with program.range("execute_context_0(0)_generation_8(8)"):
            for name, us in ((FLASH_ATTENTION_3, 300.0), (SCALED_MM, 100.0), (GROUPED_MM, 500.0)):
                program.work(1, us, name)
        program.host = program.gpu
    (decode,) = measure_steps(program.write(tmp_path / "rank0.pt.trace.json"))
    assert decode.part_us == pytest.approx({"experts": 500, "attention": 300, "projections": 100}, abs=0.01)
    assert [(kernel.name, kernel.part) for kernel in decode.kernels] == [
        ("cutlass::device_kernel: GemmUniversal", "experts"),
        ("cutlass::device_kernel: FlashAttnFwdSm90", "attention"),
        ("cutlass::device_kernel: cutlass_3x_gemm_fp8_blockwise", "projections"),
    ]


def test_names_are_shown_without_template_arguments_and_parameters() -> None:
    assert shorten_name("void a::(anonymous namespace)::f<b<c>, (d)1>(e<f>, int)") == "a::f"
    assert shorten_name("Memcpy HtoD (Pinned -> Device)") == "Memcpy HtoD"
    assert shorten_name("(odd)") == "(odd)"
    assert (
        shorten_name("std::enable_if<(((8)>(0)))&&a<b>::exists, void>::type a::norm<b, 8, true>(b*, long)") == "a::norm"
    )


@pytest.mark.parametrize(
    ("pattern", "says"), [("(", "--step-range '(' is no regular expression"), ("", "--step-range is empty")]
)
def test_invalid_step_range_is_refused(
    pattern: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_engine_trace(tmp_path / "rank0.pt.trace.json")
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "kernels", str(tmp_path), "--step-range", pattern])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_command_names_what_it_leaves_out_and_what_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder holds a trace that ends early, a copy of it, and a file of settings."""
    whole = write_engine_trace(tmp_path / "whole.json").read_text()
    (tmp_path / "whole.json").unlink()
    for name in ("rank0.json", "rank1.json"):
        (tmp_path / name).write_text(whole[:-200])
    (tmp_path / "settings.json").write_text('{"layers": 3}')
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "kernels", str(tmp_path), "--json"])
    out, err = capsys.readouterr()
    assert end.value.code in (0, None)
    found = json.loads(out)
    assert {step["path"] for step in found} == {str(tmp_path / "rank0.json")}
    assert all("ends early" in step["damage"][0] for step in found)
    assert f"warning: {tmp_path}/rank0.json ends early" in err
    assert "rank1.json holds the same trace" in err
    assert "settings.json holds no events" in err


def test_command_prints_parts_and_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The front end's trace in the same folder is left out by name."""
    write_engine_trace(tmp_path / "dp0_pp0_tp0_dcp0_ep0_rank0.1.pt.trace.json")
    Program().write(tmp_path / "host_1.async_llm.1.pt.trace.json")
    with pytest.raises(SystemExit) as end:
        cli.main(["syncs", "kernels", str(tmp_path), "--top", "1"])
    out, err = capsys.readouterr()
    assert end.value.code in (0, None)
    assert "decode step, mean of 3 steps" in out
    assert "Median step without waits for the host: 980.0 µs" in out
    assert "the GPU waits for the host's launches for a further 20.0 µs" in out
    assert "0 of 3 steps last more than 3 % longer than that." in out
    assert any(line.split()[:2] == ["experts", "500.0"] for line in out.splitlines())
    assert "my_new_kernel" not in out
    assert "is the trace of vLLM's front end" in err
    with pytest.raises(SystemExit):
        cli.main(["syncs", "kernels", str(tmp_path), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["kind"] for row in rows][-1] == "decode"
    assert rows[-1]["part_us"]["unknown"] == pytest.approx(10, abs=0.01)


def test_trace_without_usable_steps_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has 1 step, and at least 2 are needed.*Ranges in this trace"):
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
