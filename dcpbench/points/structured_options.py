"""Declare the options with several keys, as `--sessions turns=4,think=2`: structured options. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from dcpbench.points.batches import CHUNK, CPU_CHUNK
from dcpbench.points.gpus import GPUS
from dcpbench.points.key_values import Key, StructuredOption

if TYPE_CHECKING:
    from collections.abc import Mapping


class Sessions(StructuredOption, frozen=True, kw_only=True):
    """Describe requests that are turns of sessions."""

    option = "--sessions"
    text = (
        "Requests are turns of sessions: each prompt begins with the whole conversation so far, so that the prefix cache can "
        "hold it. --concurrency and --request-rate then count sessions, --num-requests counts their turns."
    )
    bare = "turns"

    turns: Annotated[
        str | None,
        Key("LEN", "turns of a session, in the notation of lengths.", "1, requests are independent", "turns"),
    ] = None
    tokens: Annotated[
        str | None,
        Key("LEN", "tokens that each turn after the first adds to the prompt.", "as --input-tokens", "turn_tokens"),
    ] = None
    think: Annotated[
        str | None,
        Key(
            "S",
            "seconds from an answer to the next turn, such as the run time of a tool: 2, uniform:0.5-3 or lognormal:1.2:0.8 (median and sigma).",
            "0",
            "think_time",
        ),
    ] = None
    system: Annotated[
        int | None,
        Key(
            "N",
            "tokens of a prefix that all sessions share, such as a system prompt with tools.",
            "0",
            "system_tokens",
        ),
    ] = None
    branch: Annotated[
        float | None,
        Key(
            "P",
            "probability, from 0 to 1, that a turn continues an earlier turn of its session instead of the last one.",
            "0",
            "branch",
        ),
    ] = None
    subagents: Annotated[
        int | None,
        Key(
            "N",
            "number of concurrent sub-agent requests after each turn except the last. Each adds as many tokens to the conversation as a turn does (key tokens); the next turn starts when all of them have been answered.",
            "0",
            "subagents",
        ),
    ] = None
    preset: Annotated[
        str | None,
        Key(
            "NAME",
            "coding-agent: lengths, turns and gaps of published traces, unless an option sets them (docs/serving.md).",
            "none",
            "session_preset",
        ),
    ] = None


class RequestFile(StructuredOption, frozen=True, kw_only=True):
    """Describe a file of requests, its format if its columns do not identify it, and the seed of generated prompts."""

    option = "--requests"
    text = "Requests from a file in the format of Mooncake, Qwen, AIPerf, BurstGPT or Azure, or in dcpbench's own JSONL or CSV. They arrive at the times in the file; with --request-rate, at that rate; with --concurrency, in a closed loop. For example: --requests trace.jsonl."
    bare = "file"

    file: Annotated[str | None, Key("PATH", "the file.", "none; requests are generated", "requests")] = None
    format: Annotated[
        str | None,
        Key(
            "NAME",
            "own, mooncake, qwen, aiperf, burstgpt or azure.",
            "recognised by the columns, and printed",
            "trace_format",
        ),
    ] = None
    columns: Annotated[
        str | None,
        Key(
            "OURS:THEIRS/…",
            "names of columns in another file, such as arrival:ts/input_tokens:prompt; also output_tokens, hash_ids, session, delay.",
            "those of the format",
            "trace_columns",
        ),
    ] = None
    time_unit: Annotated[
        str | None, Key("UNIT", "unit of times: s, ms, us, ns or date.", "that of the format", "trace_time_unit")
    ] = None
    block_size: Annotated[
        int | None, Key("N", "number of tokens that one hash id stands for.", "that of the format", "trace_block_size")
    ] = None
    seed: Annotated[
        int | None,
        Key(
            "N",
            "seed of generated lengths, gaps and tokens, which are the same for every layout and machine.",
            "0",
            "seed",
        ),
    ] = None


class PrefixShare(StructuredOption, frozen=True, kw_only=True):
    """Describe common beginnings of prompts."""

    option = "--prefix-share"
    text = "Prompts with a common prefix."
    bare = "share"

    share: Annotated[
        float | None,
        Key(
            "S",
            "share of each prompt, from 0 to less than 1, that is the common prefix of its group.",
            "0",
            "prefix_share",
        ),
    ] = None
    groups: Annotated[
        int | None, Key("N", "number of groups; requests are assigned to them in turn.", "1", "prefix_groups")
    ] = None


class Disaggregate(StructuredOption, frozen=True, kw_only=True):
    """Describe several instances of a layout, and the transfers between them."""

    option = "--disaggregate"
    text = "With --mode replay: several instances of the layout, each on its own tp GPUs. Values separated by / are separate points."
    bare = "instances"

    instances: Annotated[
        tuple[str, ...] | None,
        Key(
            "P:D/…",
            "P prefill instances and D decode instances (disaggregated prefill in vLLM, PD disaggregation in SGLang); 1P2D means 1:2. A single number N means N instances that both prefill and decode. The baseline of P:D is P + D of these.",
            "one instance that does both",
            "disaggregate",
        ),
    ] = None
    gb_s: Annotated[
        tuple[str, ...] | None,
        Key(
            "RATE/…",
            "rate at which a GPU sends KV, in 10⁹ bytes per second, such as 50 for 400 Gb/s; each GPU sends its part of a request's KV to the GPU with the same rank, one request after another.",
            "",
            "transfer_gb_s",
        ),
    ] = None
    ms: Annotated[float | None, Key("MS", "fixed latency of each request's transfer, in ms.", "0", "transfer_ms")] = (
        None
    )


class Prefill(StructuredOption, frozen=True, kw_only=True):
    """Describe how prompts are prefilled."""

    option = "--prefill"
    text = "How prompts are prefilled."
    bare = "attention"

    attention: Annotated[
        str | None,
        Key(
            "NAME",
            "sdpa (torch), or flashinfer, which is about three times as fast.",
            "flashinfer on GPUs where it is installed; else sdpa",
            "prefill",
        ),
    ] = None
    prefix_cache: Annotated[
        bool | None,
        Key(
            "yes|no",
            "keep the KV of finished requests, as far as memory allows, for later prompts with the same prefix.",
            "yes",
            "prefix_cache",
        ),
    ] = None
    policy: Annotated[
        str | None,
        Key(
            "NAME",
            "mixed: a step contains chunks of prompts and decode tokens of running requests. prefill-first: running requests wait until no chunk is left. vllm and sglang: the policies of these engines, only with --mode replay (docs/replay.md).",
            "mixed; with step times of another engine, that engine's policy",
            "policy",
        ),
    ] = None
    chunk: Annotated[
        tuple[int, ...] | None,
        Key(
            "TOKENS/…",
            "maximum number of prompt tokens in a step, over the whole layout: SGLang's --chunked-prefill-size; vLLM's --max-num-batched-tokens, "
            "which bounds each replica and also counts decode tokens. At least page size × dcp × dp. Values separated by / are separate points.",
            f"{CHUNK} on GPUs; {CPU_CHUNK} on the CPU",
            "chunk",
        ),
    ] = None


class Mtp(StructuredOption, frozen=True, kw_only=True):
    """Describe steps of several tokens."""

    option = "--mtp"
    text = "Multi-token prediction: a step verifies draft tokens and yields the accepted ones and one more token."
    bare = "tokens"

    tokens: Annotated[
        tuple[int, ...] | None,
        Key(
            "N/…",
            "drafts per request and step, 1 to 7, or 0 for none. Values separated by / are separate points.",
            "0",
            "mtp",
        ),
    ] = None
    acceptance: Annotated[
        str | None,
        Key(
            "A/B/…",
            "probability that the first, second, … draft is accepted if all drafts before it are accepted, or a JSON file with a list of these. A request's expected tokens per step are 1 + A + A·B + ….",
            "",
            "acceptance",
        ),
    ] = None


class PageSize(StructuredOption, frozen=True, kw_only=True):
    """Describe pages of the KV cache."""

    option = "--page-size"
    text = "Pages of the KV cache."
    bare = "rows"

    rows: Annotated[
        int | None,
        Key("ROWS", "KV rows in a page of one rank (vLLM's --block-size).", "64 on GPUs; 1 on the CPU", "page_size"),
    ] = None
    interleave: Annotated[
        int | None,
        Key(
            "TOKENS",
            "number of consecutive tokens that stay on one dcp rank (vLLM's --cp-kv-cache-interleave-size): a divisor of the page size.",
            "1",
            "interleave",
        ),
    ] = None


class Collectives(StructuredOption, frozen=True, kw_only=True):
    """Describe variants of the communication of a layer."""

    option = "--collectives"
    text = "Communication in a layer, other than --exchange. Values separated by / are separate points."

    all_reduce: Annotated[
        tuple[str, ...] | None,
        Key(
            "NAME/…",
            "how the partial sums of tp are reduced: nccl, or symm through symmetric memory.",
            "nccl",
            "all_reduce",
        ),
    ] = None
    q_replicate: Annotated[
        tuple[bool, ...] | None,
        Key(
            "yes|no",
            "every dcp rank computes the queries of all heads. This needs no all-gather of queries, but more weights on each rank.",
            "no",
            "q_replicate",
        ),
    ] = None
    project_first: Annotated[
        tuple[bool, ...] | None,
        Key(
            "yes|no",
            "apply the value projection to partial outputs before the exchange. This sends fewer bytes, but needs more weights on each rank.",
            "no",
            "project_first",
        ),
    ] = None


class Stages(StructuredOption, frozen=True, kw_only=True):
    """Describe pipeline stages and prefill context parallelism, which are planned and not run by the engine."""

    option = "--stages"
    text = (
        "Pipeline stages and prefill context parallelism, which are only estimated. Values separated by / are compared."
    )
    bare = "pp"

    pp: Annotated[tuple[int, ...] | None, Key("N/…", "pipeline stages, each with tp · pcp GPUs.", "1", "pp")] = None
    pcp: Annotated[
        tuple[int, ...] | None,
        Key(
            "N/…",
            "groups of tp GPUs over which the tokens of prompts are divided (vLLM's --prefill-context-parallel-size).",
            "1",
            "pcp",
        ),
    ] = None
    micro_batches: Annotated[
        int | None, Key("N", "micro-batches in flight over the stages.", "as many as stages", "micro_batches")
    ] = None


class Timeout(StructuredOption, frozen=True, kw_only=True):
    """Hold time limits in seconds, and the number of retries of points that exceed them."""

    option = "--timeout"
    text = "Time limits in seconds, and retries."
    bare = "stall"

    stall: Annotated[
        float | None,
        Key(
            "S",
            "a point without progress for this long is treated as hung: stacks of all ranks are saved, its job is ended, and the "
            "other points go on. The limit of startup, build and warm-up is at least 300 s each.",
            "300",
        ),
    ] = None
    point: Annotated[
        float | None,
        Key("S", "a point that takes longer than this, including its build, is treated as hung.", "none"),
    ] = None
    retries: Annotated[
        int,
        Key(
            "N",
            "number of times that a hung or failed point is retried, after all other points. --resume skips a point "
            "after N + 1 failures, and after at least two.",
        ),
    ] = 0
    load: Annotated[
        float | None,
        Key(
            "S",
            "a load ends after this time, and requests that have not finished are counted as cancelled.",
            "none",
            "limit_seconds",
        ),
    ] = None
    start: Annotated[
        float | None, Key("S", "a started server that accepts no requests within this time has failed.", "1800")
    ] = None


class Nodes(StructuredOption, frozen=True, kw_only=True):
    """Describe several machines, as torchrun's --nnodes, --node-rank and --rdzv-endpoint."""

    option = "--nodes"
    text = (
        "Several machines: start the same command on each, with the same secret in DCPBENCH_SECRET. tp counts the GPUs of all "
        "of them."
    )
    bare = "count"

    count: Annotated[int, Key("N", "machines.")] = 1
    rank: Annotated[int, Key("N", "rank of this machine; rank 0 keeps the records.")] = 0
    endpoint: Annotated[
        str,
        Key(
            "HOST:PORT",
            "address of node 0 with a free port, the same on every machine. Node 0 listens only at this address, which must be in a network that you trust.",
        ),
    ] = ""


_GPUS = " or ".join(", ".join(gpu.name for gpu in GPUS).rsplit(", ", 1))


class Gpu(StructuredOption, frozen=True, kw_only=True):
    """Describe the GPUs of a machine that is not this one."""

    option = "--gpu"
    text = "With --dry-run: plan for a machine with other GPUs than this one has."
    bare = "name"

    name: Annotated[
        str | None,
        Key("NAME", f"{_GPUS}; `dcpbench machines` marks those known only from data sheets.", "this machine's"),
    ] = None
    count: Annotated[int | None, Key("N", "GPUs of a machine.", "8")] = None


class Client(StructuredOption, frozen=True, kw_only=True):
    """Describe the client that sends requests to a server."""

    option = "--client"
    text = "The client that sends the requests."

    warm_up: Annotated[int, Key("N", "short requests before the measurement.")] = 8
    retries: Annotated[
        int,
        Key(
            "N",
            "number of times that a request is sent again while the server is busy (429, 503, connection refused), also in the warm-up. Retries are counted, and their wait is part of the latency.",
        ),
    ] = 0
    processes: Annotated[
        int | None,
        Key(
            "N",
            "number of processes that send the load, each with an event loop.",
            "one for each 8,000 expected chunks per second, at most one per core",
        ),
    ] = None
    realtime: Annotated[
        bool,
        Key(
            "yes|no",
            "give the client real-time priority on its cores (SCHED_RR) while a load is sent, if the kernel allows it (root, CAP_SYS_NICE or RLIMIT_RTPRIO). The record states whether this was allowed.",
        ),
    ] = True


class Find(StructuredOption, frozen=True, kw_only=True):
    """Describe the search for the highest load that meets the SLO."""

    option = "--find"
    text = (
        "Search each layout for the highest load that meets --slo, by bisection, instead of measuring given loads. For example: "
        "--find rate=0.5-20 --slo ttft=2000,itl=60."
    )
    bare = "load"

    load: Annotated[
        str | None,
        Key(
            "NAME",
            "the load that is searched, within default bounds: concurrency (clients of a closed loop) or rate (requests per second).",
        ),
    ] = None
    concurrency: Annotated[
        str | None,
        Key(
            "LOW-HIGH",
            "search the number of clients within these bounds.",
            "1-256, or 1 to the number of requests if that is lower",
        ),
    ] = None
    rate: Annotated[str | None, Key("LOW-HIGH", "search the requests per second within these bounds.", "0.01-100")] = (
        None
    )
    repeats: Annotated[
        int | None,
        Key(
            "N",
            "runs of each live load; the load meets the SLO if more than half of its runs do. A replay is deterministic and runs once.",
            "3",
        ),
    ] = None


STRUCTURED = (  # all structured options
    RequestFile,
    Sessions,
    PrefixShare,
    Disaggregate,
    Prefill,
    Mtp,
    PageSize,
    Collectives,
    Stages,
    Timeout,
    Nodes,
    Gpu,
    Client,
    Find,
)
BY_NAME = {declared.option: declared for declared in STRUCTURED}
KEYS = {  # option and key of each field of a spec that a structured option sets
    key.field: (declared, name) for declared in STRUCTURED for name, key in declared.list_keys().items() if key.field
}


def expand_structured(given: Mapping[str, object]) -> dict[str, object]:
    """Return options as given, with the fields of a spec that structured options set in place of these options."""
    found: dict[str, object] = {}
    for name, value in given.items():
        found |= value.collect_fields() if isinstance(value, StructuredOption) else {name: value}
    return found
