"""Test settings and start phases read from logs of real servers (vLLM 0.26.0, SGLang 0.5.17 on two H200)."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcpbench.records.record import EngineSettings
from dcpbench.servers.engine_log import (
    StartWatch,
    complete_settings,
    format_weights_report,
    has_dummy_weights,
    read_settings,
)

LOGS = Path(__file__).parents[1] / "data" / "engine_logs"


def read(name: str) -> str:
    return (LOGS / name).read_text(encoding="utf-8")


def test_settings_are_read_from_the_vllm_log() -> None:
    assert read_settings(read("vllm-0.26.0-tp2-dcp2.log")) == EngineSettings(
        load_format="dcpbench",
        dtype="bfloat16",
        weights_dtype="fp8",
        max_batched_tokens=8192,
        prefix_caching=False,
        async_scheduling=True,
        attention_backend="FLASH_ATTN_MLA",
        moe_backend="TRITON",
        exchange="ag_rs",
        graph_batches=[1, 2, 4, 8, 16, 32],
    )


def test_server_info_completes_the_settings_of_the_log() -> None:
    """vLLM 0.26.0 reports its block size and KV cache data type over HTTP, but does not log them."""
    logged = read_settings(read("vllm-0.26.0-tp2-dcp2.log"))
    assert logged is not None
    found = complete_settings(logged, {"block_size": "16", "cache_dtype": "auto"})
    assert (found.page_size, found.kv_dtype) == (16, "bfloat16")
    assert complete_settings(logged, {"cache_dtype": "fp8"}).kv_dtype == "fp8"
    assert complete_settings(logged, {}) == logged
    sglang = EngineSettings(page_size=1, kv_dtype="bfloat16")
    assert complete_settings(sglang, {"page_size": "64", "cache_dtype": "auto"}) == sglang


def test_settings_are_read_from_the_sglang_log() -> None:
    """The data type `auto` is unknown; the line that allocates the KV cache has its data type."""
    assert read_settings(read("sglang-0.5.17-tp2-dcp2.log")) == EngineSettings(
        load_format="dummy",
        weights_dtype="fp8",
        kv_dtype="bfloat16",
        page_size=1,
        max_batched_tokens=8192,
        prefix_caching=False,
        async_scheduling=True,
        attention_backend="flashinfer",
        exchange="ag_rs",
        graph_batches=[1, 2, 4, 8, 12, 16, 24, 32],
    )


def test_log_without_settings_gives_no_settings() -> None:
    assert read_settings("INFO: Application startup complete.\n") is None


@pytest.mark.parametrize(
    ("log", "phases"),
    [
        (
            "vllm-0.26.0-tp2-dcp2.log",
            ["loading weights", "allocating the KV cache", "capturing CUDA graphs", "warming up"],
        ),
        (
            "sglang-0.5.17-tp2-dcp2.log",
            ["loading weights", "allocating the KV cache", "capturing CUDA graphs", "warming up"],
        ),
    ],
)
def test_start_phases_are_timed_from_the_growing_log(log: str, phases: list[str]) -> None:
    """The log arrives in pieces of 1,000 characters, 1 s apart; durations add up to the whole start."""
    watch, text = StartWatch(), read(log)
    pieces = [text[i : i + 1000] for i in range(0, len(text), 1000)]
    for second, piece in enumerate(pieces, 1):
        watch.feed(piece, float(second))
    found = watch.finish(len(pieces) + 5.0)
    assert [phase.name for phase in found] == ["starting", *phases]
    assert sum(phase.seconds for phase in found) == len(pieces) + 5
    assert found[-1].seconds >= 5


def test_log_line_is_read_when_it_is_complete() -> None:
    watch = StartWatch()
    watch.feed("INFO Starting to load mo", 1.0)
    assert watch.phase == "starting"
    watch.feed("del /models/v3\n", 2.0)
    assert watch.phase == "loading weights"


@pytest.mark.parametrize(
    ("settings", "environment", "dummy"),
    [
        (EngineSettings(load_format="dummy"), {}, True),
        (EngineSettings(load_format="dcpbench", weights_fingerprints=["1a2b3c4d"]), {}, False),
        (EngineSettings(load_format="safetensors"), {}, False),
        (EngineSettings(), {}, False),
        (EngineSettings(load_format="dummy"), {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}, False),
        (EngineSettings(load_format="dummy"), {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}, False),
        (EngineSettings(load_format="dummy"), {"DCPBENCH_SYNTHETIC_WEIGHTS": "1"}, True),
        (EngineSettings(load_format="dummy", weights_fingerprints=["1a2b3c4d"]), {}, False),
    ],
)
def test_dummy_weights_are_detected(settings: EngineSettings, environment: dict[str, str], dummy: bool) -> None:
    """The environment variable of dcpbench's plugin proves nothing, but the line that the plugin logs does."""
    assert has_dummy_weights(settings, environment) is dummy


def test_report_of_each_rank_is_read() -> None:
    lines = [format_weights_report(7, found) for found in ("1a2b3c4d", "00ff00ff", "1a2b3c4d")]
    settings = read_settings("\n".join([read("sglang-0.5.17-tp2-dcp2.log"), *lines]))
    assert settings is not None
    assert settings.weights_fingerprints == ["00ff00ff", "1a2b3c4d"]
