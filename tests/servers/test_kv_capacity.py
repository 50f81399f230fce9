"""Test KV capacity in tokens from the numbers that vLLM and SGLang report, with values of runs on two H200."""

from __future__ import annotations

import pytest

from dcpbench.servers.engine_flags import PCP_FLAGS, find_count
from dcpbench.servers.info import ServerInfo
from dcpbench.servers.kv_capacity import KvReport, compute_capacity, read_sglang, read_vllm

BLOCKS, MAX_MODEL_LEN = 615_109, 70_000  # vLLM 0.26.0, tp2·dcp2: 16 tokens per block, 9,841,744 tokens per rank
LOGGED = 19_678_989  # logged by that vLLM: int(615,109 / 2,188 blocks per request × 70,000)
LINE = "(EngineCore{} pid=64025) INFO 04-22 11:54:12 [kv_cache_utils.py:1316] GPU KV cache size: {:,} tokens\n"


def make_vllm_metrics(engines: int = 1, *, blocks: int = BLOCKS, tokens: int | None = None) -> KvReport:
    """Return vLLM's /metrics, in which the blocks in each engine's labels are the sum over all engines."""
    labels = {"block_size": "16", "num_gpu_blocks": str(blocks * engines)}
    labels |= {"kv_cache_size_tokens": str(tokens)} if tokens else {}
    return read_vllm([labels | {"engine": str(n)} for n in range(engines)])


def make_sglang_info(dcp: int = 1, dp: int = 1, each: int = 10_181_218, *, states: bool = True) -> KvReport:
    """Return SGLang's /server_info with the tokens of one rank."""
    state = {"memory_usage": {"token_capacity": each}}
    return read_sglang(
        {"tp_size": 4, "dcp_size": dcp, "dp_size": dp, "max_total_num_tokens": each}
        | ({"internal_states": [state] * dp} if states else {})
    )


def test_blocks_of_one_vllm_rank_are_multiplied_by_dcp() -> None:
    """The capacity is 615,109 blocks × 16 tokens × dcp 2."""
    tokens, sources = compute_capacity(make_vllm_metrics(), "vllm", dp=1, dcp=2, max_model_len=MAX_MODEL_LEN)
    assert tokens == 19_683_488
    assert sources is not None
    assert (sources.source, sources.rank_tokens, sources.context_parallel) == ("num_gpu_blocks", 9_841_744, 2)


def test_vllm_log_is_checked_against_its_blocks() -> None:
    """0.26 logs whole requests of max_model_len, and 0.18 logs blocks × block size × dcp; other numbers conflict."""
    for logged, conflicts in ((LOGGED, []), (19_683_488, []), (9_841_744, ["log"]), (LOGGED + 1, ["log"])):
        log = LINE.format("", logged)
        tokens, sources = compute_capacity(
            make_vllm_metrics(), "vllm", dp=1, dcp=2, max_model_len=MAX_MODEL_LEN, log=log
        )
        assert sources is not None
        assert (tokens, sources.source, sources.log_tokens, sources.conflicts) == (logged, "log", logged, conflicts)


def test_kv_size_label_of_vllm_is_the_total_of_an_engine() -> None:
    """kv_cache_size_tokens includes context parallelism, so neither dcp nor pcp multiplies it."""
    report = make_vllm_metrics(tokens=LOGGED)
    tokens, sources = compute_capacity(report, "vllm", dp=1, dcp=2, pcp=2, log=LINE.format("", LOGGED))
    assert sources is not None
    assert (tokens, sources.source, sources.conflicts) == (LOGGED, "kv_cache_size_tokens", [])
    _, sources = compute_capacity(report, "vllm", dp=1, dcp=2, log=LINE.format("", 9_839_494))
    assert sources is not None
    assert (sources.log_tokens, sources.conflicts) == (9_839_494, ["log"])


def test_vllm_blocks_in_each_engine_label_are_the_sum_of_all_engines() -> None:
    """Two engines of 100 blocks of 16 tokens have 3,200 tokens, and not 6,400, with or without tokens in labels."""
    assert compute_capacity(make_vllm_metrics(2, blocks=100), "vllm", dp=2, dcp=1)[0] == 3_200
    assert compute_capacity(make_vllm_metrics(2, blocks=100, tokens=1_600), "vllm", dp=2, dcp=1)[0] == 3_200
    assert compute_capacity(make_vllm_metrics(2, blocks=100), "vllm", dp=2, dcp=4)[0] == 12_800
    log = LINE.format("_DP0", 1_600) + LINE.format("_DP1", 1_600)
    tokens, sources = compute_capacity(make_vllm_metrics(2, blocks=100, tokens=1_600), "vllm", dp=2, dcp=1, log=log)
    assert sources is not None
    assert (tokens, sources.replicas, sources.log_tokens, sources.conflicts) == (3_200, 2, 3_200, [])


def test_pcp_multiplies_blocks_of_vllm_but_not_of_sglang() -> None:
    """pcp 2 · dcp 4 of 100 blocks of 16 are 12,800 tokens; SGLang keeps a copy on each prefill rank."""
    assert compute_capacity(make_vllm_metrics(blocks=100), "vllm", dp=1, dcp=4, pcp=2)[0] == 12_800
    assert compute_capacity(make_sglang_info(4, each=1_600), "sglang", dp=1, dcp=4, pcp=2)[0] == 6_400
    assert find_count(["vllm", "serve", "m", "--prefill-context-parallel-size", "2"], PCP_FLAGS) == 2
    assert find_count(["vllm", "serve", "m", "-pcp=4"], PCP_FLAGS) == 4
    assert find_count(["vllm", "serve", "m", "--decode-context-parallel-size", "2"], PCP_FLAGS) is None


@pytest.mark.parametrize("states", [True, False])
def test_tokens_of_one_sglang_rank_are_multiplied_by_dcp_and_replicas(states: bool) -> None:
    """SGLang 0.5.17 at tp2·dcp2 has 10,181,218 tokens per rank, 20,362,436 in all, and twice that with two replicas."""
    assert compute_capacity(make_sglang_info(2, states=states), "sglang", dp=1, dcp=2)[0] == 20_362_436
    assert compute_capacity(make_sglang_info(2, 2, states=states), "sglang", dp=2, dcp=2)[0] == 40_724_872
    assert compute_capacity(make_sglang_info(2, states=states), "sglang", dp=0, dcp=0)[0] == 20_362_436


def test_degrees_reported_by_sglang_override_the_given_ones() -> None:
    """The reported degrees count, and the difference is named."""
    tokens, sources = compute_capacity(make_sglang_info(1), "sglang", dp=1, dcp=2)
    assert sources is not None
    assert (tokens, sources.context_parallel, sources.conflicts) == (10_181_218, 1, ["context_parallel"])
    _, sources = compute_capacity(make_sglang_info(2, 2), "sglang", dp=1, dcp=2)
    assert sources is not None
    assert sources.conflicts == ["replicas"]


def test_sglang_log_is_checked_against_the_tokens_of_a_rank() -> None:
    """SGLang's log has the number of one rank too."""
    for logged, conflicts in ((10_181_218, []), (20_362_436, ["log"])):
        log = f"[2026-11-28 10:00:00 TP0] max_total_num_tokens={logged}, chunked_prefill_size=8192\n"
        tokens, sources = compute_capacity(make_sglang_info(2), "sglang", dp=1, dcp=2, log=log)
        assert sources is not None
        assert (tokens, sources.log_tokens, sources.conflicts) == (20_362_436, logged, conflicts)


def test_capacity_with_an_unknown_degree_is_unknown() -> None:
    """Without --tp the tokens of one rank are kept, and no total is computed."""
    tokens, sources = compute_capacity(make_vllm_metrics(blocks=100), "vllm", dp=0, dcp=0)
    assert tokens is None
    assert sources is not None
    assert (sources.rank_tokens, sources.context_parallel) == (1_600, None)
    assert compute_capacity(make_vllm_metrics(blocks=100, tokens=3_200), "vllm", dp=0, dcp=0)[0] == 3_200


@pytest.mark.parametrize("blocks", ["None", "", "-5", "1e3", "9" * 26, "٣"])
def test_invalid_counts_give_no_capacity(blocks: str) -> None:
    report = read_vllm([{"block_size": "16", "num_gpu_blocks": blocks, "kv_cache_size_tokens": blocks}])
    assert compute_capacity(report, "vllm", dp=1, dcp=1) == (None, None)
    for value in (blocks, True, 1.5, 10**26, -5, [5]):
        assert compute_capacity(read_sglang({"max_total_num_tokens": value}), "sglang", dp=1, dcp=1) == (None, None)


def test_conflicting_capacities_are_reported_with_both_numbers() -> None:
    found = ServerInfo(engine="sglang", kv=make_sglang_info(1), metrics=True).with_kv_capacity(dp=1, dcp=2)
    assert found.notes == [
        (
            "The KV capacity of the server is recorded as 10,181,218 tokens (by max_total_num_tokens), but it reports a "
            "context parallel degree of 1, which is not --dcp."
        )
    ]
    found = ServerInfo(engine="vllm", kv=make_vllm_metrics(tokens=LOGGED), metrics=True)
    assert found.with_kv_capacity(dp=1, dcp=2, log=LINE.format("", 5)).notes == [
        "The KV capacity of the server is recorded as 19,678,989 tokens (by kv_cache_size_tokens), but its log has 5."
    ]
    assert found.with_kv_capacity(dp=1, dcp=2).notes == []


def test_missing_counters_give_a_hint_with_the_flag() -> None:
    """SGLang offers /metrics only with --enable-metrics; vLLM's has no counters with --disable-log-stats."""
    assert "start it with --enable-metrics." in ServerInfo(engine="sglang").notes[0]
    assert "start it without --disable-log-stats." in ServerInfo(engine="vllm").notes[0]
    assert ServerInfo(engine="openai").notes == []
    assert ServerInfo(engine="sglang", metrics=True).notes == []


def test_log_of_a_cpu_build_is_checked() -> None:
    """The log is that of vLLM 0.32.0 on a CPU."""
    line = LINE.replace("GPU", "CPU").format("", 233_008)
    tokens, sources = compute_capacity(make_vllm_metrics(tokens=233_008), "vllm", dp=1, dcp=1, log=line)
    assert tokens == 233_008
    assert sources is not None
    assert (sources.log_tokens, sources.conflicts) == (233_008, [])
