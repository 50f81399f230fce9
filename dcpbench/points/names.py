"""The names that points are made of, for the command line and for the rooms that act on them. No torch."""

from __future__ import annotations

BACKENDS = ("reference", "triton", "flashinfer", "flashmla")
"""What --backend can be; kernels/attention makes them."""
REGISTERED = "ag_rs_registered"
"""The exchange ag_rs in memory that NCCL has registered."""
EXCHANGES = ("ag_rs", "a2a", "symm", REGISTERED)
"""What --exchange can be; exchange/ makes them."""
AUTO_EXCHANGES = EXCHANGES[:-1]
"""Those that --exchange auto tries; the last is run where it is named."""
OVER_FP8 = ("reference", "triton", "flashmla")
"""Backends that read KV rows in fp8."""
LIBRARIES = {"flashinfer": "flashinfer", "flashmla": "flash_mla"}
"""Values of options that need a library, as our extras are called too, and how each is imported."""
AUTO = "auto"
"""A backend or an exchange that is measured for and chosen when a point is warmed up."""
TIMED_BACKENDS = BACKENDS[1:]
"""Those that --backend auto tries; the reference is not for timing."""
ALL_REDUCES = ("nccl", "symm")
"""What --all-reduce can be."""
DTYPES = ("bf16", "fp16", "fp32")
"""What can be computed with."""
FP8 = "fp8"
"""How weights (e4m3 in blocks of 128 × 128 with a scale each) and KV (e4m3 with a scale for a pool) can be stored."""
AS_COMPUTED = ""
"""How they are where a point does not say: in the dtype that is computed with."""
PRECISIONS = (*DTYPES, FP8)
"""What --weights-dtype, --kv-dtype and --dtype can be."""
STORED = ("weights_dtype", "kv_dtype")
"""Options, and fields of a point, that say how weights and KV are stored; --dtype is for both."""
AS_PUBLISHED = "published"
"""What --weights-dtype is on GPUs where nobody types it: fp8 for models whose own checkpoint is, else bf16."""
CUT, WHOLE = "1", "tp"
"""Values of --ep, the expert parallel degree: 1 for tensor-parallel experts (each expert is split by width over all ranks of a
layout), tp for expert parallel (EP: each rank holds some of the experts, undivided). The default is 1 in every layout, as in vLLM and
SGLang, which turn on expert parallel with --enable-expert-parallel and --ep-size."""
SYNTHETIC = "synthetic"
"""What --weights is without a checkpoint."""
NO_EXCHANGE = "none"
"""What a point with dcp 1 has, where nothing is exchanged."""

MIXED, PREFILL_FIRST = POLICIES = ("mixed", "prefill-first")
"""How prompts and running requests share steps: chunks ride with decodes, or decodes wait while there are chunks."""
LIVE, REPLAY = MODES = ("live", "replay")
"""How requests are served: for real, or in virtual time from step times that were measured."""
PREFILLS = ("sdpa", "flashinfer")
"""What --prefill can be; kernels/prefill makes them."""
OBJECTIVES = ("ttft", "itl", "tpot", "e2el")
"""What --slo can bound, in ms; formulas.py defines them."""
VLLM, SGLANG, INFERENCEX = ENGINES = ("vllm", "sglang", "inferencex")
"""What `dcpbench import --from` reads, and so what the origin of a record can be."""
OPENAI = "openai"
"""A real server of which nobody knows more than that it speaks OpenAI's API."""
TOOLS = {VLLM: "vllm bench serve", SGLANG: "SGLang's bench_serving", INFERENCEX: "InferenceX"}
"""What writes the results that are imported."""
UNKNOWN = "unknown"
"""What a point of an import has where nobody says."""
ONE_TURN = "1"
"""What --turns is where each request stands alone."""
CLOSED, GAMMA, TRACE = ARRIVALS = ("closed", "gamma", "trace")
TRACE_TIMES = "trace times"  # when requests of a trace come, as tables name it and as it follows "at"
"""When requests come: as others are answered, at random with a rate, or as a file says."""


def flag(name: str) -> str:
    """`page_size` as it is typed: `--page-size`."""
    return "--" + name.replace("_", "-")
