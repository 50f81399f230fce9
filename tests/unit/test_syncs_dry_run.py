"""Test the dry run with the corpus, and its description of each wait."""

import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import record_function

from dcpbench.errors import UsageError
from dcpbench.syncs.dry_run import DryRun, dry_run
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.programs import PROGRAMS, Program


@pytest.fixture
def run() -> Iterator[DryRun]:
    """Start a dry run around the test."""
    with dry_run() as seen:
        yield seen


def list_rules(run: DryRun) -> list[str]:
    """Return the rules of the waits so far, in order, without calls that only may block."""
    return [sync.rule for sync in run.syncs if not sync.may_block]


class TestCorpus:
    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
    def test_corpus_program_has_the_measured_waits_and_rules(self, run: DryRun, program: Program) -> None:
        inputs = make_inputs(torch.device("cuda", 0))
        run.syncs.clear()
        program.run(inputs)
        assert sorted(list_rules(run)) == sorted(rule.id for rule in program.expected)
        hazards = sorted(sync.rule for sync in run.syncs if sync.may_block)
        assert hazards == sorted(rule.id for rule in program.hazards)

    def test_every_wait_is_on_a_line_of_the_corpus(self, run: DryRun) -> None:
        inputs = make_inputs(torch.device("cuda", 0))
        run.syncs.clear()
        for program in PROGRAMS:
            program.run(inputs)
        assert {sync.file.rpartition("/syncs/")[2] for sync in run.syncs} == {
            "corpus/copies.py",
            "corpus/reads.py",
            "corpus/threads.py",
        }

    def test_printing_three_integers_reads_each_and_copies_all(self, run: DryRun) -> None:
        """Measured are four waits: each value is read for its width, then all are copied as a list."""
        ints = torch.arange(3).to("cuda")
        run.syncs.clear()
        text = str(ints)
        assert text == "tensor([0, 1, 2], device='cuda:0')"
        assert Counter(list_rules(run)) == {"SYNC001": 3, "SYNC003": 1}


class TestDescription:
    def test_wait_has_line_thread_operator_and_call(self, run: DryRun) -> None:
        def read() -> None:
            bool((torch.ones(3, device="cuda") > 0).all())

        thread = threading.Thread(target=read, name="reader")
        thread.start()
        thread.join()
        (sync,) = run.syncs
        assert (sync.function, sync.file, sync.line) == ("read", __file__, read.__code__.co_firstlineno + 1)
        assert (sync.op, sync.api, sync.thread) == ("aten::_local_scalar_dense", "torch.Tensor.__bool__", "reader")
        assert (sync.direction, sync.bytes, sync.explicit) == ("DtoH", 1, False)
        assert sync.message().startswith(
            f"tests/unit/test_syncs_dry_run.py:{sync.line} in read: A tensor's value is read"
        )

    def test_wait_has_the_line_of_the_user_not_of_torch(self, run: DryRun) -> None:
        torch.nn.functional.one_hot(torch.zeros(2, dtype=torch.long, device="cuda"))
        assert [(s.function, s.op_chain) for s in run.syncs] == [
            ("test_wait_has_the_line_of_the_user_not_of_torch", ("aten::one_hot", "aten::_local_scalar_dense"))
        ]
        assert run.syncs[0].frames[-1].file.startswith(torch.__path__[0]) or run.syncs[0].frames[-1].file == __file__

    def test_explicit_synchronisation_is_marked_explicit(self, run: DryRun) -> None:
        torch.cuda.synchronize()
        torch.cuda.Stream().synchronize()
        torch.cuda.Stream().record_event().synchronize()
        torch.cuda.Event().synchronize()  # the event was never recorded, so that CUDA does not wait
        assert [(s.rule, s.explicit) for s in run.syncs] == [("SYNC008", True), ("SYNC006", True), ("SYNC007", True)]

    def test_wait_in_backward_has_the_line_of_the_call(self, run: DryRun) -> None:
        """The gradient of rows selected by a mask uses the mask, and counts again."""
        x = torch.ones(4, device="cuda", requires_grad=True)
        y = x[x > 0].sum()
        y.backward()
        assert list_rules(run) == ["SYNC002", "SYNC002"]
        assert [s.line - run.syncs[0].line for s in run.syncs if s.line and run.syncs[0].line] == [0, 1]

    def test_copy_has_its_bytes_and_kind_of_memory(self, run: DryRun) -> None:
        torch.zeros(1 << 20).to("cuda", non_blocking=True)
        torch.zeros(256, pin_memory=True).to("cuda")
        assert [(s.direction, s.bytes, s.call) for s in run.syncs if s.rule != "SYNC009"] == [
            ("HtoD pageable", 4 << 20, "cudaMemcpyAsync"),
            ("HtoD pinned", 1024, "cudaStreamSynchronize"),
        ]

    def test_wait_during_graph_capture_is_described_as_an_error(self, run: DryRun) -> None:
        x = torch.ones(2, device="cuda")
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.sum().item()
        assert run.syncs[-1].capturing
        assert "CUDA raises an error" in run.syncs[-1].message()


class TestReport:
    @pytest.mark.parametrize("behind", [False, True])
    def test_profiler_step_after_the_last_step_call_counts_if_it_has_work(self, run: DryRun, behind: bool) -> None:
        """There are two reads in each of two steps: 4 over 2; with a third step that has an operator, 2 over the last
        two.
        """
        x = torch.randn(4, device="cuda")
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=9)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
            for _ in range(2):
                x.sum().item()
                x.sum().item()
                profiler.step()
            if behind:
                x.sum()
        report = run.report(program="p")
        assert report.traces[0].steps == (3 if behind else 2)
        assert sum(site.count_per_step or 0 for site in report.sites) == (1 if behind else 2)

    def test_first_step_is_warm_up(self, run: DryRun) -> None:
        """There is one read in each of four steps, and a copy only in the first, which is warm-up."""
        x = torch.ones(3, device="cuda")
        for step in range(4):
            with record_function(f"step {step}"), record_function("sampling"):
                x.sum().item()
                if step == 0:
                    x.cpu()
        report = run.report(program="engine.py")
        found = {site.rule: site for site in report.sites}
        assert (found["SYNC001"].count, found["SYNC001"].count_per_step, found["SYNC001"].range) == (4, 1.0, "sampling")
        assert (found["SYNC003"].count, found["SYNC003"].warmup_only) == (1, True)
        assert report.traces[0].steps == 4
        assert report.traces[0].coverage.steps_from == "step "

    def test_lines_are_sites_and_times_are_unknown(self, run: DryRun) -> None:
        x = torch.ones(3, device="cuda")
        for _ in range(5):
            x.sum().item()
        x.max().item()
        report = run.report()
        assert [site.count for site in report.sites] == [5, 1]
        assert {site.line_is for site in report.sites} == {"call"}
        assert all(site.wait_us is None and site.bubble_us is None for site in report.sites)
        assert report.totals.syncs == 6
        assert "bubbles are unknown" in report.traces[0].coverage.notes[0]


class TestHostTensors:
    def test_reading_host_tensors_is_no_wait(self, run: DryRun) -> None:
        lens = torch.tensor([1, 2, 3])
        pinned = torch.zeros(3, pin_memory=True)
        assert lens.sum().item() == 6
        assert pinned.is_pinned()
        assert pinned[1:].is_pinned()
        assert not lens.is_pinned()
        assert (lens[lens > 1].tolist(), bool(pinned.any())) == ([2, 3], False)
        assert run.syncs == []

    def test_pinned_memory_is_recognised_for_every_constructor(self, run: DryRun) -> None:
        device = torch.ones(4, device="cuda")
        made = [
            torch.tensor([1.0], pin_memory=True),
            torch.empty(2, pin_memory=True),
            torch.ones(2).pin_memory(),
            device.to("cpu", non_blocking=True),
            torch.empty_like(torch.ones(2), pin_memory=True),
        ]
        assert all(tensor.is_pinned() for tensor in made)
        assert run.syncs == []

    def test_assumed_devices_keep_names_ending_in_cpu_on_the_host(self) -> None:
        with dry_run(assume_device=True) as run:
            lens_cpu = torch.tensor([3, 4])
            lens = torch.tensor([3, 4])
            weights = torch.nn.Linear(2, 2).weight
            host = torch.ones(2, device="cpu")
            assert (lens_cpu.is_cuda, lens.is_cuda, weights.is_cuda, host.is_cuda) == (False, True, True, False)
            assert run.syncs == []
            int(lens_cpu[0])
            int(lens[0])
            lens.to("cuda")
        assert list_rules(run) == ["SYNC001"]


class TestLimits:
    def test_dry_run_restores_torch(self) -> None:
        before = (torch.cuda.is_available, torch.cuda.Stream, torch.Generator, torch.compile, threading.Thread.run)
        with dry_run():
            kept = torch.ones(2, device="cuda")
            assert torch.cuda.is_available()
        assert before == (
            torch.cuda.is_available,
            torch.cuda.Stream,
            torch.Generator,
            torch.compile,
            threading.Thread.run,
        )
        assert (kept + 1).tolist() == [2.0, 2.0]
        if not torch.cuda.is_available():
            with pytest.raises((AssertionError, RuntimeError)):
                torch.ones(2, device="cuda")

    def test_nested_dry_run_is_refused(self, run: DryRun) -> None:
        with pytest.raises(UsageError, match="on already"), dry_run():
            pass
        assert run.syncs == []
