"""Test steps, counts per step, and properties of a site that are equal between runs and machines."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dcpbench.errors import UsageError
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sites import compute_fingerprint
from dcpbench.syncs.steps import LaunchedWork, Range, Steps, count_occurrences
from dcpbench.syncs.steps import find_steps as find_steps_of
from dcpbench.syncs.traces.python_lines import Repository, parse_frame
from tests.unit.trace_builder import HOST, Trace, get_only_site, select_counted

ROOT = Path(__file__).parents[2]


def make_ranges(*names: str, length: float = 10) -> list[Range]:
    """Return annotations of 10 µs, with gaps of 10 µs."""
    return [Range(name, 20.0 * i, 20.0 * i + length) for i, name in enumerate(names)]


def find_steps(found: list[Range], pattern: str | None = None, *, outside: int = 0) -> Steps:
    """Find steps among annotations that hold one launch each, with some launches outside all of them."""
    worked = [r._replace(work=LaunchedWork(1, 50.0)) for r in found]
    return find_steps_of(worked, LaunchedWork(len(found) + outside, 50.0 * (len(found) + outside)), pattern)


class TestFindSteps:
    def test_profiler_steps_take_precedence(self) -> None:
        steps = find_steps(
            [*make_ranges("ProfilerStep#4", "ProfilerStep#5"), Range("step_1", 0, 99), Range("step_2", 99, 300)]
        )
        assert (steps.marked_by, len(steps)) == ("ProfilerStep#", 2)

    def test_profiler_step_that_is_written_twice_is_one_step(self) -> None:
        """The step is recorded on two threads, or as an operator and as an annotation a microsecond later."""
        steps = find_steps(
            [Range("ProfilerStep#4", 0, 10), Range("ProfilerStep#4", 1, 10), Range("ProfilerStep#5", 20, 30)]
        )
        assert steps.start.tolist() == [0, 20]

    def test_numbered_ranges_are_steps_without_profiler_steps(self) -> None:
        assert find_steps(make_ranges("decode_1", "decode_2", "decode_3")).marked_by == "decode_"

    def test_layers_within_steps_are_no_steps(self) -> None:
        """Each step has both layers, so that the number of a layer does not identify a step."""
        steps = [Range(f"step {i}", 100.0 * i, 100.0 * i + 90) for i in range(3)]
        layers = [Range(f"layer {j}", 100.0 * i + 10 * j, 100.0 * i + 10 * j + 5) for i in range(3) for j in range(2)]
        found = [
            *(r._replace(work=LaunchedWork(1)) for r in layers),
            *(r._replace(work=LaunchedWork(2)) for r in steps),
        ]
        assert find_steps_of(found, LaunchedWork(6)).marked_by == "step "

    def test_pattern_marks_steps_that_share_a_name(self) -> None:
        steps = find_steps(make_ranges("warm", "decode", "decode", "ProfilerStep#1"), "^decode$")
        assert steps.start.tolist() == [20, 40]

    @pytest.mark.parametrize("pattern", [None, "^ProfilerStep"])
    def test_empty_last_profiler_step_is_left_out(self, pattern: str | None) -> None:
        """The call prof.step() opens one more step. Earlier moments belong to the previous step: 35 to the second."""
        found = make_ranges("ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#2")
        found[2:] = [r._replace(empty=True) for r in found[2:]]
        steps = find_steps(found, pattern)
        assert steps.start.tolist() == [0, 20]
        assert steps.find_indices([35, 61]) == [1, 2]

    def test_only_the_last_of_empty_profiler_steps_is_left_out(self) -> None:
        empty = [r._replace(empty=True) for r in make_ranges("ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2")]
        assert len(find_steps(empty)) == 2
        assert len(find_steps(empty[:1])) == 1

    def test_empty_user_ranges_are_steps(self) -> None:
        assert len(find_steps([r._replace(empty=True) for r in make_ranges("step 0", "step 1")])) == 2

    @pytest.mark.parametrize("names", [(), ("forward", "forward"), ("step_1",)])
    def test_ranges_without_two_numbers_mark_no_steps(self, names: tuple[str, ...]) -> None:
        assert len(find_steps(make_ranges(*names))) == 0

    def test_moment_between_two_steps_belongs_to_the_earlier(self) -> None:
        """Steps are 0 to 10 and 20 to 30: 15 follows the first, -1 is before it, and 31 after the last."""
        steps = find_steps(make_ranges("s1", "s2"))
        assert steps.find_indices([-1, 0, 15, 20, 30, 31]) == [None, 0, 0, 1, 1, 2]


def build_sglang_trace() -> Trace:
    """Build SGLang's loop of four prefill and four decode steps; `alloc_for_extend` waits as a batch of a prefill is made."""
    trace = Trace().work()
    for number in range(8):
        at, phase = number * 1000, "EXTEND" if number < 4 else "DECODE"
        trace.range("scheduler.get_next_batch_to_run", at + 10, at + 200)
        if phase == "EXTEND":
            trace.frame("sglang/srt/mem_cache/allocation.py(303): alloc_for_extend", at + 20, at + 190)
            trace.item(at + 30, at + 100)
        trace.range("scheduler.run_batch", at + 250, at + 700)
        trace.range(f"step[{phase} bs=4]", at + 300, at + 600)
        trace.kernel(at + 310, at + 320, at + 900)
        trace.range("scheduler.process_batch_result", at + 710, at + 990)
        trace.frame("sglang/srt/managers/scheduler.py(9): process_batch_result", at + 720, at + 980)
        trace.call("cudaEventSynchronize", at + 730, at + 905)
    return trace


class TestPreparation:
    def test_wait_while_sglang_prepares_a_batch_belongs_to_the_next_step(self, tmp_path: Path) -> None:
        """Each prefill step has one such wait and no decode step has one, although the waits are between the steps."""
        sites = {site.function: site for site in build_sglang_trace().scan(tmp_path).sites}
        assert sites["alloc_for_extend"].count == 4
        assert sites["alloc_for_extend"].count_per_phase == {"prefill": 1.0, "decode": 0.0}
        assert sites["process_batch_result"].count_per_phase == {"prefill": 1.0, "decode": 1.0}

    def test_only_the_last_preparation_before_a_step_counts(self) -> None:
        """SGLang's idle loop makes empty batches, and the first one here begins before the end of the previous step."""
        prepare = "scheduler.get_next_batch_to_run"
        found = [
            Range("step[DECODE bs=1]", 10, 20),
            Range(prepare, 12, 13),
            Range("step[DECODE bs=1]", 30, 40),
            Range(prepare, 42, 43),
            Range(prepare, 45, 48),
            Range("step[DECODE bs=1]", 50, 60),
        ]
        steps = find_steps(found)
        assert steps.find_indices([11, 12.5, 21, 42.5, 44, 45, 49, 55, 61]) == [0, 0, 0, 1, 1, 2, 2, 2, 3]


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup", "ignore:CUDA is not available")
@pytest.mark.parametrize(("batches", "steps"), [(4, 4), (10, 10), (13, 10)])
def test_recipe_of_the_docs_marks_steps(
    batches: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe marks at most ten steps."""
    recipe = (ROOT / "docs" / "syncs.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(recipe, {"batches": [torch.ones(2)] * batches, "step": torch.sum})  # noqa: S102 -- ours
    assert scan_traces([tmp_path / "trace.json.gz"], root=tmp_path).traces[0].steps == steps


def test_advice_for_a_trace_without_steps_marks_steps(tmp_path: Path) -> None:
    trace = Trace().work()
    trace.item(100, 200)
    report = trace.scan(tmp_path)
    (note,) = [note for note in report.traces[0].coverage.notes if "No steps are marked" in note]
    assert "where profile() has schedule=" in note
    name = re.findall(r'record_function\(f"(.*)"\)', note)[0]
    for n in range(2):
        trace.range(name.format(n=n), 1000 * n, 1000 * n + 900)
        for launch in (300, 400, 500):
            trace.kernel(1000 * n + launch, 1000 * n + launch + 10, 1000 * n + launch + 90)
    assert trace.scan(tmp_path).traces[0].steps == 2


def make_steps(phases: str) -> Steps:
    """Return consecutive steps; `phases` has one letter for each of them, `-` if the phase is unknown."""
    names = {"p": "prefill", "m": "mixed", "d": "decode", "-": ""}
    start = np.arange(len(phases), dtype=float)
    return Steps("step ", start, float(len(phases)), phases=tuple(names[letter] for letter in phases))


class TestCountOccurrences:
    @pytest.mark.parametrize(
        ("steps_of_site", "steps", "per_step", "warmup_only", "outside"),
        [
            ([0, 0, 0, 1, 2], 3, 1.0, False, 0),  # three in warm-up, then one in each step
            ([0, 0], 3, 0.0, True, 0),
            ([None, 0], 3, 0.0, True, 0),  # warm-up includes the time before the first step
            ([0, 0, 1], 2, 1.5, False, 0),  # two steps are too few to leave one out
            ([2], 3, 0.5, False, 0),
            ([None], 2, 0.0, False, 1),  # two steps are too few for a warm-up
            ([None, None], 0, None, False, 0),
            ([3, 3], 3, 0.0, False, 2),  # after the last of three steps
            ([None, 0, 3], 3, 0.0, False, 1),
            ([0, 1, 3], 3, 1.0, False, 0),  # sampling after each forward pass, including the last one
            ([0, 1, 2, 3], 3, 1.0, False, 1),  # the last step has its own call already
            ([1, 3, 3, 3], 3, 1.0, False, 2),
            ([2, 4, 6, 8], 9, 0.5, False, 0),  # in every other step
        ],
    )
    def test_calls_in_the_first_step_only_are_warm_up(
        self, steps_of_site: list[int | None], steps: int, per_step: float | None, *, warmup_only: bool, outside: int
    ) -> None:
        found = count_occurrences(steps_of_site, make_steps("-" * steps))
        assert (found.per_step, found.warmup_only, found.outside) == (per_step, warmup_only, outside)
        assert found.per_phase == {}

    def test_phases_are_counted_separately(self) -> None:
        """There is one wait in the only prefill, and two in each of three decode steps after the first of four."""
        found = count_occurrences([0, 2, 2, 3, 3, 4, 4], make_steps("pdddd"))
        assert found.per_phase == {"prefill": 1.0, "decode": 2.0}
        assert (found.per_step, found.warmup_only) == (2.0, False)

    def test_only_phase_of_a_program_is_named(self) -> None:
        """A baseline of decode and prefill steps must not judge decode steps by its prefill steps."""
        assert count_occurrences([0, 1, 2], make_steps("ddd")).per_phase == {"decode": 1.0}

    def test_first_step_that_is_the_only_prefill_is_no_warm_up(self) -> None:
        assert not count_occurrences([0], make_steps("pdddd")).warmup_only

    def test_first_of_several_decode_steps_is_warm_up(self) -> None:
        assert count_occurrences([1], make_steps("pdddd")).warmup_only


class TestSites:
    def test_site_in_the_first_step_only_is_warm_up(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for step in range(4):
            trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
            trace.item(1000 * step + 100, 1000 * step + 200)
        trace.call("cudaFree", 400, 500)
        sites = {s.kind: (s.count, s.count_per_step, s.warmup_only) for s in trace.scan(tmp_path).sites}
        assert sites == {"scalar-read": (4, 1, False), "memory-allocation": (1, 0, True)}

    @pytest.mark.parametrize(
        ("last", "steps"),
        [
            ("nothing", 2),
            ("the profiler's own wait", 2),
            ("a kernel of the step before", 2),
            ("launch", 3),
            ("wait", 3),
        ],
    )
    def test_last_profiler_step_counts_if_work_was_launched_or_waited_for(
        self, last: str, steps: int, tmp_path: Path
    ) -> None:
        """There are two reads in each of two steps: 4 over 2; with a third step the first one is warm-up, and the count
        is 2 over 2.
        """
        trace = Trace().work()
        for step in range(3):
            trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
        for start in (100, 300, 1100, 1300):
            trace.item(start, start + 50)
        if last == "the profiler's own wait":
            trace.call("cudaDeviceSynchronize", 2880, 2890)
        elif last == "a kernel of the step before":
            trace.kernel(1800, 2100, 2200)
        elif last == "launch":
            trace.kernel(2100, 2200, 2300)
        elif last == "wait":
            trace.call("cudaStreamSynchronize", 2100, 2110)
        report = trace.scan(tmp_path)
        assert report.traces[0].steps == steps
        reads = next(s for s in report.sites if s.op == "aten::_local_scalar_dense")
        assert reads.count_per_step == (2 if steps == 2 else 1)

    @pytest.mark.parametrize(("last", "steps"), [(2100, 3), (1500, 2)])
    def test_last_profiler_step_without_a_gpu_counts_if_it_has_operators(
        self, last: float, steps: int, tmp_path: Path
    ) -> None:
        trace = Trace()
        for step in range(3):
            trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
        for start in (100, 1100, last):
            trace.op("aten::mm", start, start + 50)
        assert trace.scan(tmp_path).traces[0].steps == steps

    def test_occurrences_of_two_threads_are_sorted_by_time(self, tmp_path: Path) -> None:
        """The first occurrence is the earliest, not that of the first thread."""
        trace = Trace().work()
        trace.item(5000, 5100)
        trace.item(100, 200, tid=HOST + 1)
        site = get_only_site(trace.scan(tmp_path))
        assert site.threads == [f"thread {HOST}", f"thread {HOST + 1}"]
        assert site.example is not None
        assert site.example.ts == 105

    def test_ranges_distinguish_sites_without_functions(self, tmp_path: Path) -> None:
        """Numbers in names of ranges are ignored, so that layers are one site. Each range occurs twice, and so marks no
        steps.
        """
        trace = Trace().work()
        for start, name in zip(
            range(0, 5000, 1000), ["layer 1", "layer 2", "sample", "layer 1", "layer 2"], strict=True
        ):
            trace.range(name, start, start + 900)
            trace.item(start + 100, start + 200)
        sites = trace.scan(tmp_path, step_range=None).sites
        assert sorted((s.range, s.count) for s in sites) == [("layer 1", 4), ("sample", 1)]

    def test_thread_without_ranges_uses_those_of_other_threads(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.range("backward", 0, 900)
        trace.item(100, 200, tid=HOST + 1)
        assert get_only_site(trace.scan(tmp_path)).range == "backward"

    def test_invalid_step_range_pattern_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--step-range '\(' is no regular expression"):
            Trace().work().scan(tmp_path, step_range="(")

    def test_step_range_pattern_without_a_match_is_refused(self, tmp_path: Path) -> None:
        """The error lists the ranges of the trace, also if the trace marks steps."""
        trace = Trace().work()
        for step in range(2):
            trace.range(f"step {step}", 1000 * step, 1000 * step + 900)
            trace.range("decode", 1000 * step, 1000 * step + 100)
        message = r"no annotation matches --step-range 'nothing'\. Ranges in this trace: 'decode' \(2\), 'step 0' \(1\)"
        with pytest.raises(UsageError, match=message):
            trace.scan(tmp_path, step_range="nothing")

    def test_recompiled_graph_keeps_its_site(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for start, name in ((0, "Torch-Compiled Region: 0/0"), (1000, "Torch-Compiled Region: 3/1")):
            trace.op(name, start, start + 900)
            trace.item(start + 100, start + 200)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.count, site.traces) == (2, [str(tmp_path / "trace.json")])


def scan_site(folder: Path, *frames: str) -> tuple[str, str, str]:
    """Return (fingerprint, file, function) of an `.item()` within these frames, outermost first."""
    trace = Trace().work()
    for i, frame in enumerate(frames):
        trace.frame(frame, i, 500 - i)
    trace.item(100, 200)
    site = select_counted(trace.scan(folder))[0]
    return site.fingerprint, site.file, site.function


class TestFingerprint:
    def test_fingerprint_ignores_lines_and_addresses(self, tmp_path: Path) -> None:
        first = scan_site(tmp_path, "run.py(3): main", "<built-in method item of Tensor object at 0x7f01>")
        other = scan_site(tmp_path, "run.py(30): main", "<built-in method item of Tensor object at 0x7fff>")
        assert first == other

    @pytest.mark.parametrize("root", ["/home/ci/build/4711", "/home/someone/dev/project", "/mnt"])
    @pytest.mark.parametrize("below", ["engine/kv.py", "src/engine/kv.py", "python/engine/kv.py"])
    def test_fingerprint_ignores_the_folder_of_a_checkout(self, root: str, below: str, tmp_path: Path) -> None:
        """A profiler may shorten paths by the folder on sys.path; the repository has the file here."""
        (tmp_path / below).parent.mkdir(parents=True)
        (tmp_path / below).touch()
        seen = {
            scan_site(tmp_path, f"{file}(8): check_all")
            for file in ("engine/kv.py", f"{root}/{below}", str(tmp_path / below))
        }
        assert {file for _, file, _ in seen} == {below}
        assert len(seen) == 1

    def test_fingerprint_ignores_the_folder_of_an_environment(self, tmp_path: Path) -> None:
        seen = {
            scan_site(tmp_path, f"{folder}vllm/model.py(8): run")
            for folder in ("", "/usr/lib/python3/dist-packages/", "/opt/venv/lib/python3.12/site-packages/")
        }
        assert {file for _, file, _ in seen} == {"vllm/model.py"}
        assert len(seen) == 1

    def test_fingerprint_depends_on_rule_file_function_operators_and_direction(self) -> None:
        base = ("SYNC001", "a.py", "f", ["aten::item"], "DtoH")
        others = [
            ("SYNC002", *base[1:]),
            ("SYNC001", "b.py", *base[2:]),
            (*base[:2], "g", *base[3:]),
            (*base[:3], ["aten::nonzero"], "DtoH"),
            (*base[:4], "HtoD"),
        ]
        assert len({compute_fingerprint(*b) for b in (base, *others)}) == 6

    def test_fingerprint_ignores_hashes_and_numbers_of_compiled_code(self) -> None:
        for pair in (
            ("Torch-Compiled Region: 0/0", "Torch-Compiled Region: 12/3"),
            ("## Call CompiledFxGraph f7qjxm4wz2v9kq3hb5tt ##", "## Call CompiledFxGraph fa1b2c3d4e5f6g7h8i9jklmn ##"),
        ):
            assert len({compute_fingerprint("SYNC001", "a.py", "f", [op], "") for op in pair}) == 1
        assert (
            len(
                {
                    compute_fingerprint("SYNC001", "a.py", "f", [op], "")
                    for op in ("aten::max_pool2d", "aten::max_pool3d")
                }
            )
            == 2
        )


class TestUserFrame:
    @pytest.mark.parametrize(
        ("frames", "function"),
        [
            (["train.py(1): main", "torch/_tensor.py(9): wrapped"], "main"),
            (["train.py(1): main", "contextlib.py(5): inner", "torch/x.py(1): f"], "main"),
            (["train.py(1): main", "/usr/lib/python3.12/contextlib.py(5): inner"], "main"),
            (["train.py(1): main", "/opt/venv/lib/python3.12/site-packages/torch/x.py(5): f"], "main"),
            (["train.py(1): main", "/opt/venv/lib/python3.12/site-packages/flash/x.py(5): f"], "f"),
            (["train.py(1): main", "vllm/attention/ops/triton/kernel.py(5): paged"], "paged"),
            (["train.py(1): main", "triton/runtime/jit.py(5): run"], "main"),
            (["train.py(1): main", "/var/torchinductor_me/ab/cabc.py(5): call"], "main"),
            (["train.py(1): main", "<string>(1): <lambda>", "nn.Module: Linear_0"], "main"),
            (["threading.py(9): run"], "run"),
            (["torch/x.py(1): f"], ""),
        ],
    )
    def test_user_frame_is_the_innermost_outside_torch_and_python(
        self, frames: list[str], function: str, tmp_path: Path
    ) -> None:
        assert scan_site(tmp_path, *frames)[2] == function

    def test_user_file_can_have_the_name_of_a_python_module(self, tmp_path: Path) -> None:
        """The file `queue.py` next to `train.py` is the user's."""
        assert scan_site(tmp_path, "train.py(1): main", "queue.py(5): put")[2] == "main"
        (tmp_path / "queue.py").touch()
        assert scan_site(tmp_path, "train.py(1): main", "queue.py(5): put")[2] == "put"


class TestRepository:
    def test_path_that_leads_out_of_the_repository_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret.py").touch()
        (tmp_path / "repo").mkdir()
        assert Repository(tmp_path / "repo").find_path("../secret.py") == "../secret.py"
        assert not Repository(tmp_path / "repo").has_file("../secret.py")

    @pytest.mark.parametrize("file", ["a" * 10_000, "\0", "", "/", "//", "."])
    def test_unusual_paths_are_returned_unchanged(self, file: str, tmp_path: Path) -> None:
        assert Repository(tmp_path).find_path(file) == file

    @pytest.mark.parametrize(
        ("name", "parts"),
        [
            ("a b.py(12): <lambda>", ("a b.py", 12, "<lambda>")),
            ("a.py(12): f at 0x7f12", ("a.py", 12, "f")),
            ("<frozen importlib._bootstrap>(241): _call", ("", 0, "<frozen importlib._bootstrap>(241): _call")),
            ("nn.Module: Linear_0", ("", 0, "nn.Module: Linear_0")),
            ("", ("", 0, "")),
        ],
    )
    def test_frame_name_is_parsed_into_file_line_and_function(self, name: str, parts: tuple[str, int, str]) -> None:
        frame = parse_frame(name)
        assert (frame.file, frame.line, frame.function) == parts
