"""The independent count of blocking calls, compared with the scanner's counts of the same traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.trace_builder import PAGEABLE, PINNED, TO_GPU, Trace
from tools.syncs import count_calls

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNER = "vllm/v1/worker/gpu_model_runner.py(307): get_output"
PLAN = "flashinfer/mla/_core.py(1565): plan"


def build_vllm_trace() -> Trace:
    """Build one prefill and four decode steps of vLLM, each with an event wait and a device wait, which torch makes."""
    trace = Trace().work()
    names = ["execute_context_1(4000)_generation_0(0)", *["execute_context_0(0)_generation_8(8)"] * 4]
    for at, name in zip(range(0, 5000, 1000), names, strict=True):
        trace.range(name, at, at + 500)
        trace.kernel(at + 10, at + 20, at + 600)
        trace.frame(RUNNER, at + 520, at + 800)
        trace.frame("torch/cuda/streams.py(231): synchronize", at + 530, at + 700)
        trace.call("cudaEventSynchronize", at + 540, at + 610)
        trace.call("cudaEventQuery", at + 620, at + 621)
        trace.frame("contextlib.py(132): __enter__", at + 705, at + 790)
        trace.call("cudaDeviceSynchronize", at + 710, at + 720)
    return trace


def build_sglang_trace() -> Trace:
    """Build four prefill steps of SGLang: two copies to pageable memory, `.item()`, and a copy from pageable memory."""
    trace = Trace().work()
    for at in range(0, 4000, 1000):
        trace.range("step[EXTEND bs=3 toks=8192]", at, at + 900)
        trace.kernel(at + 10, at + 20, at + 100)
        trace.frame(PLAN, at + 30, at + 400)
        for begin in (at + 40, at + 140):
            trace.op("aten::copy_", begin, begin + 90)
            trace.copy(PAGEABLE, (begin + 1, begin + 70), (begin + 60, begin + 62))
            trace.call("cudaStreamSynchronize", begin + 75, begin + 80)
        trace.copy(TO_GPU, (at + 300, at + 305), (at + 306, at + 307))
        trace.frame("sglang/srt/layers/attention/flashinfer_mla_backend.py(850): update", at + 410, at + 600)
        trace.item(at + 420, at + 500)
        trace.copy(PINNED, (at + 620, at + 625), (at + 630, at + 631))
    return trace


def count_by_function(trace: Trace, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the waits of each function that the tool counts, and those that the scanner counts."""
    scanned: dict[str, int] = {}
    for site in trace.scan(folder).sites:
        name = f"{site.file}: {site.function}"
        scanned[name] = scanned.get(name, 0) + site.count
    counted = count_calls.count_trace(folder / "trace.json")["functions"]
    return {name: sum(found["waits"].values()) for name, found in counted.items()}, scanned


@pytest.mark.parametrize("build", [build_vllm_trace, build_sglang_trace])
def test_tool_and_scanner_count_the_same_waits(build: Callable[[], Trace], tmp_path: Path) -> None:
    counted, scanned = count_by_function(build(), tmp_path)
    assert counted == scanned


def test_calls_and_waits_are_counted_by_step(tmp_path: Path) -> None:
    """Each step of vLLM has two waits; those of the last one begin after its end, and so belong to no step."""
    build_vllm_trace().scan(tmp_path)
    counted = count_calls.count_trace(tmp_path / "trace.json")
    assert counted["steps"] == {"prefill": 1, "decode": 4}
    assert counted["functions"] == {
        "vllm/v1/worker/gpu_model_runner.py: get_output": {
            "calls": {"cudaEventSynchronize": 5, "cudaDeviceSynchronize": 5},
            "waits": {"prefill": 2, "decode": 6, "none": 2},
        }
    }


def test_copy_and_its_synchronisation_are_two_calls_and_one_wait(tmp_path: Path) -> None:
    build_sglang_trace().scan(tmp_path)
    functions = count_calls.count_trace(tmp_path / "trace.json")["functions"]
    assert functions["flashinfer/mla/_core.py: plan"] == {
        "calls": {"cudaMemcpyAsync DtoH pageable": 8, "cudaStreamSynchronize": 8, "cudaMemcpyAsync HtoD pageable": 4},
        "waits": {"prefill": 12},
    }
    assert functions["sglang/srt/layers/attention/flashinfer_mla_backend.py: update"]["waits"] == {"prefill": 4}


def test_tool_prints_json_for_compressed_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(build_vllm_trace().text().encode()))
    count_calls.main([str(path)])
    (printed,) = json.loads(capsys.readouterr().out)
    assert printed["trace"] == "trace.json.gz"


def test_tool_without_a_trace_ends_with_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        count_calls.main([])
    assert "required: TRACE" in capsys.readouterr().err


def test_tool_does_not_import_the_scanner() -> None:
    source = Path(count_calls.__file__).read_text(encoding="utf-8")
    assert "import dcpbench" not in source
    assert "from dcpbench" not in source
