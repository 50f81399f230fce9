"""Test that the corpus has every measured operator, and that each detector finds the expected waits in recorded runs."""

import json
import sys
import threading
import warnings
from pathlib import Path

import msgspec
import pytest
import torch

from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.scan import scan_traces
from tools.syncs import checks
from tools.syncs.corpus.debug_mode import emulate_debug_mode
from tools.syncs.corpus.inputs import make_inputs
from tools.syncs.corpus.measure import _run_debug_mode, attribute_reports, read_trace_findings
from tools.syncs.corpus.programs import PROGRAMS
from tools.syncs.corpus.score import (
    CorpusRun,
    Seen,
    Truth,
    find_contradictions,
    format_programs,
    format_runs,
    score_detectors,
)
from tools.syncs.corpus.vllm_check import Reports, load_check

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
TRACES = sorted((DATA / "corpus").glob("*.json.gz"))
RECORD = ROOT / "results" / "syncs-graphs_H200/hidden-syncs_H200_2026-11-21" / "corpus" / "corpus.json"
VLLM_RECORD = ROOT / "results" / "syncs-graphs_H200/vllm-check_H200_2026-11-30" / "corpus.json"
BY_NAME = {p.name: p for p in PROGRAMS}
OTHER_NAMES = {  # measured cases that have a program of another name
    "bool(all)": "bool_all",
    "torch.tensor": "tensor_from_list",
    "torch.tensor_to": "tensor_from_list_to",
    "tensor_pin_to": "tensor_from_list_pinned",
    "where1": "where_one_argument",
    "repeat_interleave_os": "repeat_interleave_output_size",
    "one_hot_nc": "one_hot_num_classes",
    "index_put_accum": "index_put_accumulate",
    "print": "print_tensor",
    "setitem_pyscalar": "setitem_number",
    "add_cpu_scalar_tensor": "add_cpu_scalar",
}
OTHER_COUNTS = {  # cases in which the program waits another number of times than measured, and the reason
    "print": "four reads for the values printed there, fifteen for ours",
    "event_sync": "its event had passed when it was asked for, ours has not; the call blocks where it must wait",
    "empty_cache": "nothing was cached there; cudaFree waits, which is no stream synchronisation",
    "tensor_pin_to": "its Event Sync is a cudaEventQuery of the allocator of pinned memory, which does not wait",
}
CASES = json.loads((DATA / "h200_sync_ops.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["case"])
def test_every_measured_operator_has_a_program_that_waits_as_often(case: dict) -> None:
    """The table was measured on an H200 with torch 2.11 and CUDA 13.0."""
    program = BY_NAME[OTHER_NAMES.get(case["case"], case["case"])]
    measured = sum(case["cuda_sync"].values())
    if case["case"] in OTHER_COUNTS:
        assert len(program.expected) != measured, "the counts are equal: remove the case from the list"
    else:
        assert len(program.expected) == measured


def test_other_names_and_counts_are_of_existing_cases() -> None:
    assert {*OTHER_NAMES, *OTHER_COUNTS} <= {c["case"] for c in CASES}


def test_programs_have_unique_names_and_docstrings() -> None:
    assert len(BY_NAME) == len(PROGRAMS)
    assert all(p.run.__doc__ for p in PROGRAMS)


def test_every_rule_except_those_of_foreign_code_has_a_program() -> None:
    """SYNC010 is a library that calls the driver, SYNC011 a copy of unknown direction, and SYNC012 a wait with a
    purpose that only the following call shows.
    """
    used = {rule.id for p in PROGRAMS for rule in (*p.expected, *p.hazards)}
    assert set(BY_ID) - used == {"SYNC010", "SYNC011", "SYNC012"}


def test_docs_state_the_number_of_programs() -> None:
    assert f"{len(PROGRAMS)} small programs" in (ROOT / "docs/syncs-detectors.md").read_text()


class TestRecordedTraces:
    """Test traces of the corpus from an H200, with and without Python stacks and `cuda_sync` events."""

    def test_recorded_traces_include_each_kind(self) -> None:
        assert [t.name for t in TRACES] == ["plain.json.gz", "stacks.json.gz", "sync.json.gz", "sync_stacks.json.gz"]

    @pytest.mark.parametrize("trace", TRACES, ids=lambda t: t.name)
    def test_scan_finds_every_wait_and_nothing_else(self, trace: Path) -> None:
        """There are 94 waits, also without `cuda_sync`, as no program waits in a library. A read on a separate thread
        has no operator in a trace, and is reported as a copy.
        """
        seen = read_trace_findings(trace)
        found = {name: (sorted(s.syncs), sorted(s.hazards)) for name, s in seen.items()}
        expected = {p.name: (sorted(r.id for r in p.expected), sorted(r.id for r in p.hazards)) for p in PROGRAMS}
        expected["in_a_thread"] = (["SYNC003"], [])
        assert found == expected

    @pytest.mark.parametrize("name", ["stacks.json.gz", "sync_stacks.json.gz"])
    def test_site_with_a_stack_is_in_its_program(self, name: str) -> None:
        """The read on a thread has no frames: the profiler follows only the thread that started it."""
        sites = scan_traces([DATA / "corpus" / name], root=ROOT).sites
        corpus_sites = [s for s in sites if s.range.startswith("corpus:") and not s.own]
        wrong = {(s.range, s.function) for s in corpus_sites if s.function != s.range.removeprefix("corpus:")}
        assert wrong == {("corpus:in_a_thread", "")}
        assert {s.file.rpartition("/")[2] for s in corpus_sites if s.function} == {
            "reads.py",
            "copies.py",
            "threads.py",
        }

    def test_site_without_a_stack_is_named_by_its_operator(self) -> None:
        sites = scan_traces([DATA / "corpus" / "sync.json.gz"], root=ROOT).sites
        (site,) = [s for s in sites if s.range == "corpus:getitem_boolmask"]
        assert (site.op_chain, site.function, site.file) == (["aten::index", "aten::nonzero"], "", "")


def load_record() -> CorpusRun:
    """Return the record of a run on an H200."""
    return msgspec.json.decode(RECORD.read_bytes(), type=CorpusRun)


def load_vllm_record() -> CorpusRun:
    """Return the record of a run on another H200, with the files of two releases of vLLM."""
    return msgspec.json.decode(VLLM_RECORD.read_bytes(), type=CorpusRun)


class TestPublishedRecord:
    def test_held_up_times_agree_with_every_expectation(self) -> None:
        """Before each program, 20 ms of work are queued: the program returns late if, and only if, it waits."""
        run = load_record()
        assert [p.name for p in run.programs] == [p.name for p in PROGRAMS]
        assert [p.expected for p in run.programs] == [[r.id for r in p.expected] for p in PROGRAMS]
        assert all(p.held_up_ms is not None for p in run.programs)
        assert find_contradictions(run) == []

    def test_recorded_detectors_meet_their_documented_recall(self) -> None:
        run = load_record()
        assert checks.find_failures(run) == []
        recall = {s.detector: (s.found, s.false) for s in score_detectors(run)}
        assert recall["live"] == (93, 0), "one of 94 is cudaFree in empty_cache, which is no synchronisation of torch"
        assert recall["dry run"] == (94, 0)

    def test_table_in_the_docs_equals_the_records(self) -> None:
        page = (ROOT / "docs" / "syncs-detectors.md").read_text()
        hint = "write it again: python -m tools.syncs corpus RECORD VLLM_RECORD"
        assert format_runs([load_record(), load_vllm_record()]).strip() in page, hint

    def test_table_of_programs_equals_the_records(self) -> None:
        table = RECORD.parents[2] / "who-finds-what.md"
        hint = "write it again: python -m tools.syncs corpus RECORD VLLM_RECORD --programs -o FILE"
        assert table.read_text() == format_programs([load_record(), load_vllm_record()]), hint


class TestRecordOfVllmCheck:
    """Test the record of two releases of vLLM's check on an H200, and torch's debug mode as a dry run emulates it."""

    def test_vllm_check_finds_as_many_waits_on_an_h200_as_in_a_dry_run(self) -> None:
        """A dry run on a CPU found 62 and 89 of 94 waits with warnings, in 51 and 52 of 57 programs."""
        found = {
            s.detector: (s.found, s.programs_found)
            for s in score_detectors(load_vllm_record())
            if s.detector.startswith("vLLM")
        }
        assert found["vLLM 0.26.0, warn"] == (62, 51)
        assert found["vLLM 0.33.0, warn"] == (89, 52)

    def test_emulated_debug_mode_finds_as_many_waits_as_on_an_h200(self) -> None:
        """The debug mode finds 88 of 94 waits, in each program as many as on the GPU."""
        with emulate_debug_mode():
            emulated = {p.name: len(_run_debug_mode(p, torch.device("cuda")).syncs) for p in PROGRAMS}
        measured = load_record().detectors["set_sync_debug_mode"]
        assert emulated == {name: len(seen.syncs) for name, seen in measured.items()}
        assert sum(emulated.values()) == 88

    def test_emulated_debug_mode_warns_once_per_line_by_default(self) -> None:
        """Warnings are filtered as in Python; `error` raises at the first of eight waits."""
        program = BY_NAME["item_per_request"]
        for mode, action, expected in (("warn", "default", 1), ("warn", "always", 8)):
            with emulate_debug_mode(), warnings.catch_warnings(record=True) as caught:
                inputs = make_inputs(torch.device("cuda"))
                warnings.simplefilter(action)
                torch.cuda.set_sync_debug_mode(mode)
                program.run(inputs)
            assert len(caught) == expected
        with emulate_debug_mode():
            inputs = make_inputs(torch.device("cuda"))
            torch.cuda.set_sync_debug_mode("error")
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                program.run(inputs)


def make_corpus_run(seen: dict[str, Seen], *truths: Truth, queued: float | None = None) -> CorpusRun:
    return CorpusRun(device="G", torch="2", queued_ms=queued, programs=list(truths), detectors={"d": seen})


class TestScore:
    def test_score_counts_found_missed_false_and_correctly_named_waits(self) -> None:
        """Program a has 2 of 2 waits, one under another name; b has 1 of 2; c reports 1 of 0; d has 0 of 1. These are 3
        of 5, recall 0.6, and 3 of 4 reports are true, precision 0.75.
        """
        run = make_corpus_run(
            {"a": Seen(syncs=["X", "Y"]), "b": Seen(syncs=["X"]), "c": Seen(syncs=["Z"]), "d": Seen()},
            Truth(name="a", expected=["X", "X"]),
            Truth(name="b", expected=["X"] * 2),
            Truth(name="c"),
            Truth(name="d", expected=["X"]),
        )
        (s,) = score_detectors(run)
        assert (s.true, s.found, s.false, s.named) == (5, 3, 1, 2)
        assert (s.recall, s.precision, s.programs, s.programs_found) == (0.6, 0.75, 3, 2)
        assert s.wrong == ["c (1 of 0)", "d"]

    def test_hazards_are_counted_separately(self) -> None:
        (s,) = score_detectors(make_corpus_run({"a": Seen(hazards=["P"])}, Truth(name="a", hazards=["P", "P"])))
        assert (s.true, s.found, s.false, s.hazards, s.hazards_found) == (0, 0, 0, 2, 1)

    @pytest.mark.parametrize(("held", "expected", "wrong"), [(1, [], 0), (19, ["X"], 0), (19, [], 1), (1, ["X"], 1)])
    def test_held_up_time_contradicts_missing_and_unexpected_waits(self, held, expected, wrong) -> None:
        run = make_corpus_run({}, Truth(name="a", expected=expected, held_up_ms=held), queued=20.0)
        assert len(find_contradictions(run)) == wrong

    def test_worse_scan_or_dry_run_fails_but_a_worse_debug_mode_does_not(self) -> None:
        """A scan must be perfect, and a dry run must find 95 % and report nothing false; torch's own mode has no
        threshold.
        """
        truth = [Truth(name="a", expected=["X"])]
        for detector, failures in [("scan, with cuda_sync, no stacks", 1), ("dry run", 1), ("set_sync_debug_mode", 0)]:
            run = CorpusRun(device="G", torch="2", programs=truth, detectors={detector: {"a": Seen()}})
            assert len(checks.find_failures(run)) == failures

    def test_program_table_has_a_row_per_program_with_all_detectors(self) -> None:
        run = make_corpus_run(
            {"a": Seen(syncs=["X"], hazards=["P"])},
            Truth(name="a", expected=["X"] * 2, held_up_ms=9.0),
            Truth(name="b"),
        )
        assert format_programs([run]).splitlines() == [
            "| program | held up ms | waits | d |",
            "|---|--:|--:|--:|",
            "| a | 9.00 | 2 | 1 (1) |",
            "| b |  | 0 | 0 |",
        ]

    def test_detectors_with_equal_findings_on_two_machines_share_a_column(self) -> None:
        truth = Truth(name="a", expected=["X"])
        same, other = make_corpus_run({"a": Seen(syncs=["X"])}, truth), make_corpus_run({"a": Seen(syncs=["Y"])}, truth)
        other.device, other.detectors["e"] = "H", {"a": Seen()}
        head, _, row = format_programs([same, other]).splitlines()
        assert (head, row) == ("| program | held up ms | waits | d; d (H) | e (H) |", "| a |  | 1 | 1 | 0 |")
        text = format_runs([same, make_corpus_run({}, Truth(name="b")), other])
        assert text.count("programs wait") == 2, "one run has other programs"
        assert "| d | 1 | 0 | 1 | 0 | 1 |\n| d (H) | 1 | 0 | 0 | 0 | 1 |" in text, "one run found another kind"


CHECK_OF_VLLM = """
import functools, warnings
import torch
import vllm.envs as envs
from vllm.platforms import current_platform

def enable_gpu_sync_check():
    assert current_platform.is_cuda_alike()
    torch.Tensor.to = torch.Tensor.copy_

def with_gpu_sync_check(fn):
    mode = envs.VLLM_GPU_SYNC_CHECK

    @functools.wraps(fn)
    def wrapper():
        assert mode in ("warn", "error")
        return fn()

    return wrapper
"""
"""The two functions of a release's gpu_sync_debug.py for its server, without checks."""


class TestVllmCheck:
    """Test the loading of vLLM's file, which needs a GPU, with a small substitute and programs that report as torch and
    vLLM do.
    """

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        (tmp_path / "gpu_sync_debug.py").write_text(CHECK_OF_VLLM)
        return tmp_path / "gpu_sync_debug.py"

    def test_warnings_are_counted_once_per_line(self, file: Path) -> None:
        def wait() -> None:
            for _ in range(3):
                warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
            warnings.warn("Tensor.to: a copy. Implicit GPU<->CPU sync detected - use pinned memory", stacklevel=1)

        with load_check(file, "warn") as check:
            assert check(wait) == Reports(syncs=2, copies=1)
            assert check(wait) == Reports(syncs=2, copies=1), "the second call counts from 0"
            assert check(int) == Reports()

    def test_error_is_counted_once_also_on_a_thread(self, file: Path) -> None:
        def wait() -> None:
            raise RuntimeError("GPU<->CPU sync detected - avoid it or wrap with gpu_sync_allowed()")

        def wait_on_a_thread() -> None:
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()

        with load_check(file, "error") as check:
            assert check(wait) == check(wait_on_a_thread) == Reports(syncs=1)

    def test_other_errors_of_a_program_end_the_measurement(self, file: Path) -> None:
        def fail() -> None:
            raise RuntimeError("out of memory")

        with load_check(file, "error") as check, pytest.raises(RuntimeError, match="out of memory"):
            check(fail)

    def test_methods_of_tensors_and_modules_are_restored(self, file: Path) -> None:
        before = torch.Tensor.to
        with load_check(file, "warn"):
            assert torch.Tensor.to is not before
        assert torch.Tensor.to is before
        assert "vllm.envs" not in sys.modules

    def test_reported_copy_is_a_hazard_only_if_the_program_expects_no_wait(self) -> None:
        """vLLM reports a copy that waits and one that may wait in the same words."""
        small, large = BY_NAME["h2d_pageable_nonblocking"], BY_NAME["h2d_pageable_nonblocking_large"]
        found = [attribute_reports(Reports(copies=1), p) for p in (small, large)]
        assert [(len(s.syncs), len(s.hazards)) for s in found] == [(0, 1), (1, 0)]


class TestCommand:
    def test_missing_vllm_check_file_is_refused(self) -> None:
        with pytest.raises(checks.UsageError, match=r"0\.33\.0=gpu_sync_debug\.py"):
            checks.run_corpus([], vllm_checks=["0.33.0=nowhere.py"], output_options=checks.OutputOptions())

    def test_command_prints_an_existing_record(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert checks.run_corpus([RECORD], output_options=checks.OutputOptions()) == 0
        assert "| live | 93 | 0 | 93 | 5 | 56 |" in capsys.readouterr().out

    def test_invalid_record_is_refused_with_a_command(self, tmp_path: Path) -> None:
        for text in ("{}", "nonsense", "[1]"):
            (tmp_path / "x.json").write_text(text)
            with pytest.raises(checks.UsageError, match=r"python -m tools\.syncs corpus --keep"):
                checks.run_corpus([tmp_path / "x.json"], output_options=checks.OutputOptions())

    def test_json_output_is_a_valid_input(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "all.json"
        assert checks.run_corpus([RECORD], output_options=checks.OutputOptions(as_json=True, output=out)) == 0
        assert checks.run_corpus([out, RECORD], output_options=checks.OutputOptions()) == 0
        assert capsys.readouterr().out.count("| dry run |") == 1, "the same run twice"
