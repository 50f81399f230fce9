"""Define the names that points consist of, for the command line and for the modules that act on them. No torch."""

from __future__ import annotations

from dcpbench.models import weight_formats
from dcpbench.points.structured_options import KEYS

BACKENDS = ("reference", "triton", "flashinfer", "flashmla")  # values of --backend; kernels/attention implements them
GQA_BACKENDS = BACKENDS[:3]  # values of --backend for grouped-query attention; kernels/gqa implements them
REGISTERED = "ag_rs_registered"  # the exchange ag_rs in memory that NCCL has registered
EXCHANGES = ("ag_rs", "a2a", "symm", REGISTERED)  # values of --exchange; exchange/ implements them
PCP_EXCHANGE = EXCHANGES[0]  # of DCP over PCP ranks: sums outputs on all of them, as vLLM's `cp_lse_ag_out_ar`
AUTO_EXCHANGES = EXCHANGES[:-1]  # candidates of --exchange auto; the last exchange runs only if it is named
OVER_FP8 = ("reference", "triton", "flashmla")  # backends that read KV rows in fp8
AS_REQUESTS = "-rows"  # suffix of a bench variant that takes a request's query rows as separate requests
LIBRARIES = {"flashinfer": "flashinfer", "flashmla": "flash_mla"}  # option values (also our extras) -> module to import
AUTO = "auto"  # a backend or an exchange that is measured for and chosen when a point is warmed up
TIMED_BACKENDS = BACKENDS[1:]  # candidates of --backend auto; the reference is not for timing
ALL_REDUCES = ("nccl", "symm")  # values of --collectives all-reduce
DTYPES = weight_formats.COMPUTE_DTYPES  # precisions of the computation
FP8 = weight_formats.FP8  # weights: e4m3 with a scale per 128 × 128 block; KV: e4m3 with a scale per pool
AS_COMPUTED = ""  # value of a point for weights or KV in the dtype of the computation
PRECISIONS = (*DTYPES, FP8)  # values of --kv-dtype, and of --weights-dtype for points that are measured
WEIGHT_FORMATS = tuple(weight_formats.FORMATS)  # values of --weights-dtype that are no dtype of the computation
COMPUTED = "dtype"  # field of a point for the dtype of the computation, which follows from the options in STORED
STORED = ("weights_dtype", "kv_dtype")  # options, and fields of a point, for the precision of stored weights and KV
AS_PUBLISHED = "published"  # default of --weights-dtype on GPUs: the format in which a model is published
MOE_TP, MOE_EP = "1", "tp"
"""Values of --ep, the expert parallel degree: 1 for tensor-parallel experts (each expert is split by width over all ranks of a
layout), tp for expert parallel (EP: each rank holds some of the experts, undivided). The default is 1 in every layout, as in vLLM and
SGLang, which turn on expert parallel with --enable-expert-parallel and --ep-size."""
SYNTHETIC = "synthetic"
DUMMY = "dummy"  # value of --weights: weights near zero, with which an engine starts without a checkpoint
NO_EXCHANGE = "none"  # exchange of a point with dcp 1, where nothing is exchanged

LIVE, REPLAY = MODES = ("live", "replay")  # modes of serving: live, or in virtual time from measured step times
PREFILLS = ("sdpa", "flashinfer")  # values of --prefill; kernels/prefill implements them
OBJECTIVES = ("ttft", "itl", "tpot", "e2el")  # objectives of --slo, in ms; formulas.py defines them
VLLM_OBJECTIVES = ("ttft", "tpot", "e2el")  # those that --goodput of vLLM's bench can bound
VLLM, SGLANG, INFERENCEX, GUIDELLM, AIPERF, VLLM_FORWARD, SGLANG_ONE_BATCH = ENGINES = (
    "vllm",
    "sglang",
    "inferencex",
    "guidellm",
    "aiperf",
    "vllm-forward",
    "sglang-one-batch",
)
"""Values of `dcpbench import --from`, and therefore possible origins of a record."""
MIXED, PREFILL_FIRST = OWN_POLICIES = ("mixed", "prefill-first")  # prompt chunks share steps with decodes, or go first
ENGINE_POLICIES = (VLLM, SGLANG)  # policies of other engines with their default settings; replays only
POLICIES = (*OWN_POLICIES, *ENGINE_POLICIES)  # values of --prefill policy
OPENAI = "openai"  # a real server of unknown kind that speaks OpenAI's API
ENGINE_NAMES = {SGLANG: "SGLang", VLLM: "vLLM", OPENAI: "OpenAI API server"}  # as their makers write them
TOOLS = {  # tools that write the results that are imported
    VLLM: "vllm bench serve",
    SGLANG: "SGLang's bench_serving",
    INFERENCEX: "InferenceX",
    GUIDELLM: "GuideLLM",
    AIPERF: "AIPerf",
    VLLM_FORWARD: "vllm bench forward",
    SGLANG_ONE_BATCH: "SGLang's bench_one_batch",
}
UNKNOWN = "unknown"  # value of a field that an import does not have
ONE_TURN = "1"  # value of --sessions turns for independent requests
CLOSED, GAMMA, TRACE = ("closed", "gamma", "trace")  # after an answer, at random with a rate, or at a file's times
TRACE_TIMES = "trace times"  # arrival of the requests of a trace, as tables name it and as it follows "at"


def format_flag(name: str) -> str:
    """Return the option of a name: `--kv-dtype` for `kv_dtype`, `--page-size interleave` for a key of `--page-size`."""
    declared = KEYS.get(name)
    if declared is None:
        return "--" + name.replace("_", "-")
    option, key = declared
    return option.option if _is_bare(name) else f"{option.option} {key}"


def format_setting(name: str, value: object) -> str:
    """Return the option of a name with its value: `--kv-dtype fp8`, `--page-size interleave=8`."""
    return join_value(format_flag(name), value)


def format_field(name: str) -> str:
    """Return the option that sets a field of a point, or the name of the field if it follows from other options."""
    return name if name == COMPUTED else format_flag(name)


def join_value(flag: str, value: object) -> str:
    """Return an option with its value, or a key of a structured option with its value."""
    return f"{flag}{'=' if ' ' in flag else ' '}{value}"


def _is_bare(name: str) -> bool:
    """Return whether a field has the name of its structured option, and its value needs no key: `--page-size 64`."""
    option, key = KEYS[name]
    return option.bare == key and option.option == "--" + name.replace("_", "-")
