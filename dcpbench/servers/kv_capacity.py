"""Tokens that a server's KV cache holds in all, from what its endpoints and its log report. No torch.

vLLM and SGLang count differently, and neither gives the total in every place:

    vLLM    /metrics, vllm:cache_config_info: `kv_cache_size_tokens` is the total of one engine (a data-parallel replica), context
            parallelism included. Versions without that label give `num_gpu_blocks` × `block_size`, the blocks of one rank summed
            over all engines: decode and prefill context parallelism multiply it.
            Log: "GPU KV cache size: N tokens", once for each engine, the same as kv_cache_size_tokens.
    SGLang  /server_info: `max_total_num_tokens`, and `memory_usage.token_capacity` of each data-parallel rank, are of one rank:
            decode context parallelism (`dcp_size`) multiplies it. Prefill context parallelism does not, as each rank keeps a copy.
            Log: "max_total_num_tokens=N", of one rank.

Sources: vllm/v1/core/kv_cache_utils.py (get_kv_cache_capacity), vllm/v1/engine/utils.py and vllm/v1/metrics/loggers.py of
github.com/vllm-project/vllm; sglang/srt/managers/scheduler.py (get_internal_state) and
sglang/srt/model_executor/model_runner_kv_cache_mixin.py of github.com/sgl-project/sglang.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from dcpbench.points.names import SGLANG
from dcpbench.records.record import KvSources
from dcpbench.servers.exit_reason import COLOUR
from dcpbench.show.text import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dcpbench.records.record import EngineSettings

MAX_TOKENS = 10**15  # a larger number is no capacity: 1e15 tokens of 1 byte are a petabyte
BY_LABEL, BY_LOG, BY_BLOCKS, BY_POOL = "kv_cache_size_tokens", "log", "num_gpu_blocks", "max_total_num_tokens"
LOG, REPLICAS, CONTEXT_PARALLEL = "log", "replicas", "context_parallel"  # kinds of KvSources.conflicts
VLLM_LOG = re.compile(
    r"^(?P<process>\(EngineCore[^)]*\))?.*[CG]PU KV cache size: (?P<tokens>[\d,]{1,20}) tokens", re.MULTILINE
)
SGLANG_LOG = re.compile(r"\bmax_total_num_tokens=(?P<tokens>\d{1,15})\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvReport:
    """Numbers that a server's endpoints give about its KV cache, not yet multiplied."""

    engine_tokens: tuple[int, ...] = ()  # vLLM: kv_cache_size_tokens of each engine
    engine_blocks: tuple[int, ...] = ()  # vLLM: num_gpu_blocks of each engine's label, the sum over all engines in each
    block_size: int = 0  # vLLM: tokens of a block
    rank_tokens: tuple[int, ...] = ()  # SGLang: max_total_num_tokens of each data-parallel rank that reports
    dp: int | None = None  # SGLang: dp_size
    dcp: int | None = None  # SGLang: dcp_size

    def __bool__(self) -> bool:
        """Return True if the server reports any number."""
        return bool(self.engine_tokens or self.engine_blocks or self.rank_tokens)


def read_vllm(cache_configs: Sequence[Mapping[str, str]]) -> KvReport:
    """Read the labels of vllm:cache_config_info, one mapping for each engine."""
    sizes = {size for labels in cache_configs if (size := parse_count(labels.get("block_size")))}
    blocks = [parse_count(labels.get("num_gpu_blocks")) for labels in cache_configs]
    tokens = [parse_count(labels.get(BY_LABEL)) for labels in cache_configs]
    whole = len(sizes) == 1 and all(blocks)
    return KvReport(
        engine_tokens=tuple(n for n in tokens if n) if all(tokens) else (),
        engine_blocks=tuple(n for n in blocks if n) if whole else (),
        block_size=min(sizes) if whole else 0,
    )


def read_sglang(info: Mapping[str, Any]) -> KvReport:
    """Read SGLang's /server_info."""
    listed = info.get("internal_states")
    states = [state for state in listed if isinstance(state, dict)] if isinstance(listed, list) else []
    pools = [_read_rank_tokens(state) for state in states]
    first = parse_count(info.get(BY_POOL)) or next((n for n in pools if n), None)
    return KvReport(
        rank_tokens=tuple(n for n in pools if n) if pools and all(pools) else (first,) if first else (),
        dp=parse_count(info.get("dp_size")),
        dcp=parse_count(info.get("dcp_size"))
        or (1 if "tp_size" in info else None),  # versions without DCP lack the field
    )


def compute_capacity(
    report: KvReport,
    engine: str,
    *,
    dp: int,
    dcp: int,
    pcp: int = 1,
    max_model_len: int | None = None,
    log: str = "",
) -> tuple[int | None, KvSources | None]:
    """Compute the total capacity in tokens, and where it comes from; both None if the server reports nothing.

    `dp` and `dcp` are the degrees that the user gave, 0 if unknown. `pcp` is vLLM's prefill context parallel degree.
    `log` is the log of a server that dcpbench started. The capacity alone is None if a factor of it is unknown.
    """
    if engine == SGLANG:
        return _compute_sglang(report, dp=dp, dcp=dcp, log=log) if report else (None, None)
    logged = _sum_vllm_log_tokens(log)
    if not report and logged is None:
        return None, None
    return _compute_vllm(report, dp=dp, cp=dcp * pcp, max_model_len=max_model_len, logged=logged)


def parse_count(value: object) -> int | None:
    """Return a positive whole number that is a plausible count, given as an int or as its digits; else None."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(MAX_TOKENS)):
        value = int(value)
    return value if type(value) is int and 0 < value <= MAX_TOKENS else None


def find_page_size(settings: EngineSettings | None, facts: Mapping[str, str]) -> int | None:
    """Return the tokens of a KV page, from the log of a server or from its reports (ServerInfo.facts); None if both leave them out."""
    logged = settings.page_size if settings is not None else None
    return logged or parse_count(facts.get("block_size")) or parse_count(facts.get("page_size"))


def _compute_vllm(
    report: KvReport, *, dp: int, cp: int, max_model_len: int | None, logged: int | None
) -> tuple[int | None, KvSources]:
    replicas = len(report.engine_tokens or report.engine_blocks) or dp or 1
    differing = set(report.engine_blocks)
    blocks = differing.pop() if len(differing) == 1 else sum(report.engine_blocks)
    rank_tokens = blocks * report.block_size or None
    expected: set[int] = set()
    total: int | None
    if report.engine_tokens:
        total, source = sum(report.engine_tokens), BY_LABEL
        expected = {total}
    elif logged is not None:
        total, source = logged, BY_LOG
        if rank_tokens and cp:
            expected = _compute_expected_log(blocks, report.block_size, cp, replicas, max_model_len)
    else:
        total, source = (rank_tokens * cp if rank_tokens and cp else None), BY_BLOCKS
    conflicts = [REPLICAS] if dp and replicas != dp else []
    conflicts += [LOG] if logged is not None and expected and logged not in expected else []
    return total, KvSources(
        source=source,
        rank_tokens=rank_tokens,
        context_parallel=cp or None,
        replicas=replicas,
        log_tokens=logged,
        conflicts=conflicts,
    )


def describe_conflicts(sources: KvSources, tokens: int | None) -> str:
    """Return a sentence that names the sources of the KV capacity that disagree; empty if none do."""
    capacity = "unknown" if tokens is None else f"{tokens:,} tokens"
    of_blocks = (sources.rank_tokens or 0) * (sources.context_parallel or 1)
    log = f"its log has {sources.log_tokens or 0:,}"
    named = {
        LOG: f"the blocks that it reports hold {of_blocks:,}" if sources.source == BY_LOG else log,
        REPLICAS: f"it reports {format_count(sources.replicas, 'replica')}, which is not --dp",
        CONTEXT_PARALLEL: f"it reports a context parallel degree of {sources.context_parallel}, which is not --dcp",
    }
    found = "; ".join(named[kind] for kind in sources.conflicts)
    return (
        f"The KV capacity of the server is recorded as {capacity} (by {sources.source}), but {found}" if found else ""
    )


def _compute_expected_log(blocks: int, block_size: int, cp: int, replicas: int, max_model_len: int | None) -> set[int]:
    """Return the totals that vLLM's log may give for these blocks.

    Older versions (0.18 among them) log blocks × block size × context parallelism, newer ones (0.26 among them)
    max_model_len × the number of requests of that length that fit, each rounded up to whole blocks.
    """
    each = blocks // replicas
    found = {each * block_size * cp * replicas}
    if max_model_len:
        per_request = math.ceil(math.ceil(max_model_len / cp) / block_size)
        found.add(int(each / per_request * max_model_len) * replicas)
    return found


def _sum_vllm_log_tokens(log: str) -> int | None:
    """Return the sum of the last KV cache size that each engine process logged; None if none did."""
    lines = VLLM_LOG.finditer(COLOUR.sub("", log))
    found = {match["process"]: int(match["tokens"].replace(",", "")) for match in lines}
    return sum(found.values()) or None


def _compute_sglang(report: KvReport, *, dp: int, dcp: int, log: str) -> tuple[int | None, KvSources]:
    cp = report.dcp or dcp
    replicas = report.dp or (len(report.rank_tokens) if len(report.rank_tokens) > 1 else dp or 1)
    each = report.rank_tokens if len(report.rank_tokens) == replicas else report.rank_tokens[:1] * replicas
    logged = {int(match["tokens"]) for match in SGLANG_LOG.finditer(log)}
    conflicts = [REPLICAS] if dp and replicas != dp else []
    conflicts += [CONTEXT_PARALLEL] if dcp and cp != dcp else []
    conflicts += [LOG] if logged and not set(each) <= logged else []
    return (sum(each) * cp if cp else None), KvSources(
        source=BY_POOL,
        rank_tokens=each[0],
        context_parallel=cp or None,
        replicas=replicas,
        log_tokens=max(logged, default=None),
        conflicts=conflicts,
    )


def _read_rank_tokens(state: Mapping[str, Any]) -> int | None:
    memory = state.get("memory_usage")
    capacity = memory.get("token_capacity") if isinstance(memory, dict) else None
    return parse_count(state.get(BY_POOL)) or parse_count(capacity)
