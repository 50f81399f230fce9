"""Test programs that wait outside of the ranges which could be taken for their steps: none of them is ever clean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.profiler import record_function

from dcpbench.errors import WorkerError
from dcpbench.servers.profile import find_waits
from dcpbench.syncs.dry_run import dry_run
from dcpbench.syncs.gating import baseline
from dcpbench.syncs.gating.gate import Gate, can_be_finding, compute_verdict
from dcpbench.syncs.scan import scan_traces
from tests.unit.program_traces import Program

if TYPE_CHECKING:
    from collections.abc import Callable

    from dcpbench.syncs.sync_report import Report, Verdict


ROOT = Path(__file__).parents[2]


def load_shards_then_decode() -> Program:
    """Build a trace of four numbered ranges that load weights, then a loop without ranges that waits 20 times."""
    program = Program()
    for shard in range(4):
        with program.range(f"load shard {shard}"):
            program.work(5)
    for _ in range(20):
        program.work(2)
        program.read()
    return program


def waits_behind_the_last_step() -> Program:
    """Build a trace of five profiler steps that do not wait, then eight waits."""
    program = Program()
    for step in range(5):
        with program.range(f"ProfilerStep#{step}"):
            program.work(5)
    for _ in range(8):
        program.work(1)
        program.read()
    return program


def sglang_batches_of_different_sizes() -> Program:
    """Build a trace where each prefill has another batch size and thus a unique number; the twelve decode steps wait."""
    program = Program()
    for batch in range(4):
        with program.range(f"EXTEND bs={batch + 1}"):
            program.work(30)
    for _ in range(12):
        with program.range("DECODE bs=8"):
            program.work(1)
            program.read()
    return program


def two_warm_ups_then_waits() -> Program:
    program = Program()
    for turn in range(2):
        with program.range(f"warm {turn}"):
            program.work(5)
    for _ in range(8):
        program.work(1)
        program.read()
    return program


def vllm_ramp_then_decode() -> Program:
    """Build a trace where requests arrive one by one, then decode together; only decode steps wait, 40 times."""
    program = Program()
    for cached in range(4):
        with program.range(f"execute_new_1_cached_{cached}"):
            program.work(30, us=200)
    for _ in range(40):
        with program.range("execute_new_0_cached_4"):
            program.work(1)
            program.read()
            program.work(1)
    return program


def diffusers_pipeline() -> Program:
    """Build a trace of a text encoder, 20 denoising steps with a range each, VAE and safety checker; only the denoising
    does not wait.
    """
    program = Program()
    for _ in range(2):  # prompt and negative prompt
        program.work(12)
        program.read(3)
    for step in range(20):
        with program.range(f"denoise_step_{step}"):
            program.work(40)
    for _ in range(4):  # slices of the VAE
        program.work(10)
        program.read(6)
    return program


def diffusers_waits_before_alone() -> Program:
    """Build the same trace with all 139 waits before the denoising."""
    program = Program()
    for _ in range(139):
        program.work(1)
        program.read()
    for step in range(20):
        with program.range(f"denoise_step_{step}"):
            program.work(40)
    return program


def diffusers_pipeline_called_three_times() -> Program:
    """Build a trace where numbers of denoising steps repeat with each image; the scheduler's timesteps are read before
    each.
    """
    program = Program()
    for _ in range(3):
        program.read(2)
        for step in range(10):
            with program.range(f"step_{step}"):
                program.work(30)
        program.work(5)
        program.read()
    return program


def transformers_generate() -> Program:
    """Build a trace with numbered chunks of the prompt; each of 32 tokens then calls `stopping_criteria.all()`."""
    program = Program()
    for chunk in range(6):
        with program.range(f"prefill chunk {chunk}"):
            program.work(4)
    for _ in range(32):
        program.work(24)
        program.read()
    return program


def transformers_waits_between_tokens() -> Program:
    """Build a trace with a range for each token; the stopping criterion is read between two of them."""
    program = Program()
    for token in range(16):
        with program.range(f"token {token}"):
            program.work(24)
        program.read()
    return program


def vllm_samples_behind_the_forward_pass() -> Program:
    """Build a trace of vLLM, which annotates `execute_model` and samples after it, so that each wait is between two
    annotations.
    """
    program = Program()
    with program.range("execute_context_2(4096)_generation_0(0)"):
        program.work(60)
    program.read()
    for _ in range(12):
        with program.range("execute_context_0(0)_generation_2(2)"):
            program.work(20)
        program.read()
    return program


def vllm_waits_in_prefill_alone() -> Program:
    """Build a trace with one prefill that waits, and twelve decode steps that do not."""
    program = Program()
    with program.range("execute_context_1(2048)_generation_0(0)"):
        program.work(60)
        program.read(3)
    for _ in range(12):
        with program.range("execute_context_0(0)_generation_1(1)"):
            program.work(20)
    return program


def sglang_scheduler_waits() -> Program:
    """Build a trace where SGLang's scheduler waits between forward passes, every third time."""
    program = Program()
    for step in range(15):
        with program.range("step[EXTEND bs=2 toks=4096]" if step % 5 == 0 else f"step[DECODE bs={step % 4 + 1}]"):
            program.work(20)
        if step % 3 == 2:
            program.read()
    return program


def warm_up_in_numbered_ranges() -> Program:
    """Build a trace where warm-up has ranges and most of the GPU work; serving has none and waits ten times."""
    program = Program()
    for turn in range(5):
        with program.range(f"warmup {turn}"):
            program.work(60)
            program.read()
    for _ in range(10):
        program.work(4)
        program.read()
    return program


def layers_of_one_forward_pass() -> Program:
    """Build a trace where layers are numbered and occur once each; the tokens are read after the last one."""
    program = Program()
    for layer in range(32):
        with program.range(f"layer_{layer}"):
            program.work(6)
    program.work(4)
    program.read(4)
    return program


def layers_in_steps() -> Program:
    """Build a trace where layers are numbered within each numbered step; sampling waits between the steps."""
    program = Program()
    for step in range(6):
        with program.range(f"step {step}"):
            for layer in range(4):
                with program.range(f"layer {layer}"):
                    program.work(6)
        program.read()
    return program


def batches_of_epochs() -> Program:
    """Build a trace where the numbers of batches begin at 0 in each epoch; validation waits after each of them."""
    program = Program()
    for epoch in range(3):
        with program.range(f"epoch {epoch}"):
            for batch in range(5):
                with program.range(f"batch {batch}"):
                    program.work(12)
        program.work(3)
        program.read(2)
    return program


def two_families() -> Program:
    """Build a trace where encoder chunks wait, and the denoising with most of the work does not."""
    program = Program()
    for chunk in range(8):
        with program.range(f"encode {chunk}"):
            program.work(10)
            program.read()
    for step in range(10):
        with program.range(f"denoise {step}"):
            program.work(20)
    return program


def stages_of_a_pipeline() -> Program:
    """Build a trace of three numbered stages only; the first is a loop that waits 20 times."""
    program = Program()
    with program.range("stage 0"):
        for _ in range(20):
            program.work(2)
            program.read()
    for stage in (1, 2):
        with program.range(f"stage {stage}"):
            program.work(60)
    return program


def waits_in_every_third_step() -> Program:
    program = Program()
    for step in range(12):
        with program.range(f"ProfilerStep#{step}"):
            program.work(10)
            if step % 3 == 1:
                program.read()
    return program


def another_function_waits_in_each_step() -> Program:
    """Build a trace where each step waits once, always in another function."""
    program = Program()
    for step in range(8):
        with program.range(f"ProfilerStep#{step}"):
            program.work(10)
            with program.function(f"engine/hook_{step}.py(1): on_step_{step}"):
                program.read()
    return program


PROGRAMS: tuple[tuple[Callable[[], Program], int, int], ...] = (
    (load_shards_then_decode, 20, 1),
    (waits_behind_the_last_step, 8, 1),
    (sglang_batches_of_different_sizes, 12, 1),
    (two_warm_ups_then_waits, 8, 1),
    (vllm_ramp_then_decode, 40, 1),
    (diffusers_pipeline, 30, 1),
    (diffusers_waits_before_alone, 139, 3),
    (diffusers_pipeline_called_three_times, 9, 1),
    (transformers_generate, 32, 1),
    (transformers_waits_between_tokens, 16, 1),
    (vllm_samples_behind_the_forward_pass, 13, 1),
    (vllm_waits_in_prefill_alone, 3, 1),
    (sglang_scheduler_waits, 5, 1),
    (warm_up_in_numbered_ranges, 15, 1),
    (layers_of_one_forward_pass, 4, 1),
    (layers_in_steps, 6, 1),
    (batches_of_epochs, 6, 1),
    (two_families, 8, 3),
    (stages_of_a_pipeline, 20, 3),
    (waits_in_every_third_step, 4, 1),
    (another_function_waits_in_each_step, 8, 1),
)
"""A program, the number of its waits, and the exit code of a scan without limits."""
NAMED = [pytest.param(make, waits, code, id=make.__name__) for make, waits, code in PROGRAMS]
MANY = 1000.0  # a limit of waits per step that no program here exceeds


def test_docs_state_the_number_of_programs() -> None:
    page = (ROOT / "docs" / "syncs-detectors.md").read_text()
    unknown = sum(1 for _, _, code in PROGRAMS if code == 3)
    assert f"Of {len(PROGRAMS)} programs" in page
    assert f"clean: {len(PROGRAMS) - unknown} have findings, {unknown} end in exit code 3" in page


def scan(make: Callable[[], Program], folder: Path, **options: str) -> Report:
    return scan_traces([make().write(folder / "trace.json")], root=folder, **options)


def verdict(report: Report, folder: Path, **limits: float | baseline.Baseline) -> Verdict:
    return compute_verdict(report, Gate(root=folder, **limits))


@pytest.mark.parametrize(("make", "waits", "code"), NAMED)
def test_program_that_waits_is_never_clean(make: Callable[[], Program], waits: int, code: int, tmp_path: Path) -> None:
    report = scan(make, tmp_path)
    assert sum(site.count for site in report.sites) == waits
    assert verdict(report, tmp_path).exit_code == code


@pytest.mark.parametrize("make", [pytest.param(make, id=make.__name__) for make, _, _ in PROGRAMS])
def test_limit_per_step_does_not_hide_waits_outside_steps(make: Callable[[], Program], tmp_path: Path) -> None:
    """No program exceeds the limit, and only one with each wait in a step is clean."""
    report = scan(make, tmp_path)
    outside = any(site.outside for site in report.sites)
    guessed = any(site.warmup_only for site in report.sites) and report.traces[0].coverage.steps_guessed
    unknown = outside or guessed or not report.traces[0].steps
    assert verdict(report, tmp_path, max_per_step=MANY).exit_code == (3 if unknown else 0)


def test_additional_wait_after_the_last_step_exceeds_the_baseline(tmp_path: Path) -> None:
    """The same program has eight waits after its last step in the baseline, and nine in the report."""
    report = scan(waits_behind_the_last_step, tmp_path)
    known = baseline.build_baseline(filter(can_be_finding, report.sites))
    assert verdict(report, tmp_path, baseline=known).exit_code == 0

    def with_one_more() -> Program:
        program = waits_behind_the_last_step()
        program.read()
        return program

    more = verdict(scan(with_one_more, tmp_path), tmp_path, baseline=known)
    assert more.exit_code == 1
    assert "9 outside the steps here, 8 in the baseline" in more.findings[0].message


def test_step_range_option_confirms_guessed_steps(tmp_path: Path) -> None:
    """Calls before the first step are then warm-up."""
    (reason,) = verdict(scan(diffusers_waits_before_alone, tmp_path), tmp_path).reasons
    assert "give --step-range '^denoise_step_'" in reason
    report = scan(diffusers_waits_before_alone, tmp_path, step_range="^denoise_step_")
    assert verdict(report, tmp_path).exit_code == 0


class TestPhases:
    def test_prefill_and_decode_have_separate_counts(self, tmp_path: Path) -> None:
        report = scan(vllm_waits_in_prefill_alone, tmp_path)
        assert report.traces[0].coverage.steps_by_phase == {"decode": 12, "prefill": 1}
        assert report.sites[0].count_per_phase == {"prefill": 3.0, "decode": 0.0}

    @pytest.mark.parametrize("step_range", [None, "^execute_"])
    def test_profiler_steps_have_the_phases_of_engine_ranges_inside(
        self, step_range: str | None, tmp_path: Path
    ) -> None:
        """With a schedule, vLLM's profiler marks steps as well; a prefill in the first step is no warm-up."""
        program = Program()
        for step in range(5):
            with program.range(f"ProfilerStep#{step}"), program.range(f"execute_new_{0 if step else 2}_cached_{step}"):
                program.work(20)
                program.read(0 if step else 2)
        report = scan_traces([program.write(tmp_path / "trace.json")], root=tmp_path, step_range=step_range)
        assert report.traces[0].coverage.steps_by_phase == {"decode": 4, "prefill": 1}
        assert report.sites[0].count_per_phase == {"prefill": 2.0, "decode": 0.0}
        assert verdict(report, tmp_path).exit_code == 1

    def test_limit_per_step_applies_to_each_phase(self, tmp_path: Path) -> None:
        """Three waits in the only prefill are 0.25 per step on average, and exceed a limit of 2."""
        report = scan(vllm_waits_in_prefill_alone, tmp_path)
        (finding,) = verdict(report, tmp_path, max_per_step=2.0).findings
        assert finding.message.startswith("3 synchronisations per prefill step, the limit is 2")

    def test_baseline_compares_each_phase(self, tmp_path: Path) -> None:
        """Prefill waits as in the baseline, and decode waits in addition."""
        known = baseline.build_baseline(filter(can_be_finding, scan(vllm_waits_in_prefill_alone, tmp_path).sites))

        def decode_waits_too() -> Program:
            program = Program()
            with program.range("execute_context_1(2048)_generation_0(0)"):
                program.work(60)
                program.read(3)
            for _ in range(12):
                with program.range("execute_context_0(0)_generation_1(1)"):
                    program.work(20)
                    program.read()
            return program

        found = verdict(scan(decode_waits_too, tmp_path), tmp_path, baseline=known)
        assert "1 per decode step here, 0 in the baseline" in found.findings[0].message

    def test_sampling_after_the_last_forward_pass_belongs_to_its_step(self, tmp_path: Path) -> None:
        report = scan(vllm_samples_behind_the_forward_pass, tmp_path)
        assert report.sites[0].count_per_phase == {"prefill": 1.0, "decode": 1.0}
        assert report.sites[0].outside == 0
        assert verdict(report, tmp_path, max_per_step=1.0).exit_code == 0

    def test_count_per_step_of_a_server_is_that_of_its_worst_phase(self, tmp_path: Path) -> None:
        """Three waits in a prefill and none in decode are three per step, not 3 of 13."""
        trace = vllm_waits_in_prefill_alone().write(tmp_path / "rank0.json")
        assert find_waits([trace])[0] == 3.0

    def test_server_with_numbered_ranges_has_a_count_if_all_waits_are_in_steps(self, tmp_path: Path) -> None:
        """Waits in each step are counted; those before ranges that may be no steps would be missing."""
        trace = transformers_waits_between_tokens().write(tmp_path / "rank0.json")
        assert find_waits([trace])[0] == 1.0
        with pytest.raises(WorkerError, match="give --step-range"):
            find_waits([two_families().write(tmp_path / "rank0.json")])

    def test_recording_without_the_last_sampling_has_the_same_counts(self, tmp_path: Path) -> None:
        program = vllm_samples_behind_the_forward_pass()
        with program.range("execute_context_0(0)_generation_2(2)"):
            program.work(20)
        report = scan_traces([program.write(tmp_path / "trace.json")], root=tmp_path)
        assert report.traces[0].coverage.steps_by_phase == {"decode": 13, "prefill": 1}
        assert report.sites[0].count_per_phase == {"prefill": 1.0, "decode": 1.0}


NUMBERED_RANGES = """
import torch
from torch.profiler import record_function
parts = []
for i in range(4):
    with record_function(f"load shard {i}"):
        parts.append(torch.randn(64, 64, device="cuda"))
x = torch.randn(1, 64, device="cuda")
for _ in range(20):
    for w in parts:
        x = torch.tanh(x @ w)
    token = x.argmax().item()
"""


def test_dry_run_has_the_same_steps() -> None:
    """Numbered ranges load, then a loop without ranges waits in each of 20 iterations."""
    with dry_run() as run:
        exec(NUMBERED_RANGES, {})  # noqa: S102 -- a program of ours
    report = run.report()
    assert report.traces[0].steps is None
    assert [(site.count, site.warmup_only) for site in report.sites] == [(20, False)]


def test_dry_run_finds_waits_after_the_last_step() -> None:
    with dry_run() as run:
        x = torch.ones(4, device="cuda")
        for step in range(4):
            with record_function(f"step {step}"):
                for _ in range(5):
                    x = x + 1
        for _ in range(3):
            x.sum().item()
    report = run.report(step_range="^step ")
    assert report.traces[0].steps == 4
    assert [(site.count, site.outside, site.warmup_only) for site in report.sites] == [(3, 3, False)]
