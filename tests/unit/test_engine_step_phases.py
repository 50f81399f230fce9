"""Phases of an engine's decode step from traces in which the profiler disturbs steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcpbench.servers.step_points import read_phases
from dcpbench.syncs.kernel_time import COMMUNICATION_PARTS, measure_steps
from tests.unit.program_traces import Program

TRACES = Path(__file__).parents[1] / "data" / "engine_traces"
VLLM = TRACES / "vllm-0.26.0-tp2-dcp2-8x4000.rank0.pt.trace.json.gz"
SGLANG = TRACES / "sglang-0.5.17-tp2-8x4000.TP-0.trace.json.gz"
"""GPU work, its launches and the annotations of nine decode steps of 8 requests of 4,000 tokens on an H200
(results/engines_H200/engines_2xH200_2026-11-29): a warm-up step, seven measured ones and the one that ends them."""
VLLM_MS, SGLANG_MS = 4.078, 3.835  # steps of the same points, timed without the profiler


def write_rank(path: Path, *, reduce_us: float = 40.0, host_us: tuple[float, ...] = (0.0,) * 6) -> Path:
    """Write a trace of decode steps of 100 µs of GEMM and an all-reduce, before which the host is busy for some time."""
    program = Program()
    for us in host_us:
        with program.range("execute_context_0(0)_generation_8(8)"):
            program.work(1, 100.0)
            program.host += us
            program.work(1, reduce_us, "ncclDevKernel_AllReduce")
        program.host = max(program.host, program.gpu - 60)  # the next step is launched before this one ends
    return program.write(path)


@pytest.mark.parametrize(
    ("trace", "timed_ms", "disturbed", "longer_mean"), [(VLLM, VLLM_MS, 7, 1.30), (SGLANG, SGLANG_MS, 1, 1.03)]
)
def test_phases_of_a_disturbed_profile_match_the_timed_step(
    trace: Path, timed_ms: float, disturbed: int, longer_mean: float
) -> None:
    """The mean step is up to 1.31 times the timed one; in vLLM's trace no step is undisturbed."""
    [steps] = measure_steps(trace)
    assert steps.step_us > longer_mean * timed_ms * 1e3
    phases = read_phases([trace], timed_ms)
    assert phases.step_us / 1e3 == pytest.approx(timed_ms, rel=0.03)
    assert sum(phases.phase_us.values()) + phases.idle_us == pytest.approx(phases.step_us)
    assert (phases.steps, phases.disturbed) == (7, disturbed)
    assert "unknown" not in phases.phase_us


def test_host_waits_prolonged_by_the_profiler_are_separate() -> None:
    """The other gaps of vLLM's step are the 340 between kernels of its graph."""
    phases = read_phases([VLLM], VLLM_MS)
    assert phases.host_wait_us == pytest.approx(1172, abs=1)
    assert phases.idle_us == pytest.approx(263, abs=1)
    assert read_phases([SGLANG], SGLANG_MS).host_wait_us == 0


def test_host_wait_of_the_timed_step_is_idle_time(tmp_path: Path) -> None:
    """The host launches the all-reduce 316 µs after the GEMM, which ends 138 µs after its launch: the GPU waits for 178
    µs.
    """
    trace = write_rank(tmp_path / "rank0.json", host_us=(300.0,) * 6)
    [typical] = [steps.typical for steps in measure_steps(trace)]
    assert typical.host_wait_us == pytest.approx(178, abs=1)
    whole_ms = (typical.step_us + typical.host_wait_us) / 1e3
    real = read_phases([trace], whole_ms)
    assert (real.host_wait_us, real.disturbed) == (0, 0)
    assert real.step_us == pytest.approx(whole_ms * 1e3)
    prolonged = read_phases([trace], typical.step_us / 1e3)
    assert prolonged.host_wait_us == pytest.approx(typical.host_wait_us)
    assert prolonged.step_us == pytest.approx(typical.step_us)
    assert prolonged.disturbed == prolonged.steps == 4


def test_single_long_step_does_not_change_the_typical_step(tmp_path: Path) -> None:
    quiet = read_phases([write_rank(tmp_path / "rank0.json", host_us=(0.0,) * 8)], 0.14)
    one_late = (0.0, 0.0, 0.0, 900.0, 0.0, 0.0, 0.0, 0.0)
    late = read_phases([write_rank(tmp_path / "rank1.json", host_us=one_late)], 0.14)
    assert (quiet.disturbed, late.disturbed) == (0, 1)
    assert late.step_us == pytest.approx(quiet.step_us, rel=0.01)
    assert late.phase_us == pytest.approx(quiet.phase_us)


def test_phases_are_those_of_the_rank_that_others_wait_for(tmp_path: Path) -> None:
    """Rank 1 takes 300 µs longer in its all-reduce, because rank 0 enters it late. Rank 1 also has the longer step."""
    waited_for = write_rank(tmp_path / "rank0.json", host_us=(300.0,) * 6)
    waiting = write_rank(tmp_path / "rank1.json", reduce_us=340.0)
    phases = read_phases([waiting, waited_for], 0.14)
    assert phases.phase_us["all-reduce"] == pytest.approx(40)
    assert set(COMMUNICATION_PARTS) == {"all-reduce", "exchange"}
