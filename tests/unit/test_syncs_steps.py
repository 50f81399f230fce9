"""Steps and counts per step, and what of a site is the same from run to run and from machine to machine."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dcpbench.errors import UsageError
from dcpbench.syncs.scan import scan_traces
from dcpbench.syncs.sites import compute_fingerprint
from dcpbench.syncs.steps import Range, Steps, Work, count_occurrences
from dcpbench.syncs.steps import find_steps as find_steps_of
from dcpbench.syncs.traces.python_lines import Repository, parse_frame
from tests.unit.trace_builder import HOST, Trace, get_only_site, select_counted

ROOT = Path(__file__).parents[2]


def ranges(*names: str, length: float = 10) -> list[Range]:
    """Annotations one after the other, 10 µs apart."""
    return [Range(name, 20.0 * i, 20.0 * i + length) for i, name in enumerate(names)]


def find_steps(found: list[Range], pattern: str | None = None, *, outside: int = 0) -> Steps:
    """Find steps among annotations that hold one launch each, with some launches outside all of them."""
    worked = [r._replace(work=Work(1, 50.0)) for r in found]
    return find_steps_of(worked, Work(len(found) + outside, 50.0 * (len(found) + outside)), pattern)


class TestFindSteps:
    def test_profiler_steps_come_first(self) -> None:
        steps = find_steps(
            [*ranges("ProfilerStep#4", "ProfilerStep#5"), Range("step_1", 0, 99), Range("step_2", 99, 300)]
        )
        assert (steps.marked_by, len(steps)) == ("ProfilerStep#", 2)

    def test_a_profiler_step_that_is_written_twice_is_one(self) -> None:
        """The step is on two threads, or once an operator and once an annotation a microsecond later."""
        steps = find_steps(
            [Range("ProfilerStep#4", 0, 10), Range("ProfilerStep#4", 1, 10), Range("ProfilerStep#5", 20, 30)]
        )
        assert steps.start.tolist() == [0, 20]

    def test_numbered_ranges_are_steps_where_there_are_no_others(self) -> None:
        assert find_steps(ranges("decode_1", "decode_2", "decode_3")).marked_by == "decode_"

    def test_layers_lie_in_steps_and_are_none(self) -> None:
        """Each step holds both layers, so that a layer's number is not its own."""
        steps = [Range(f"step {i}", 100.0 * i, 100.0 * i + 90) for i in range(3)]
        layers = [Range(f"layer {j}", 100.0 * i + 10 * j, 100.0 * i + 10 * j + 5) for i in range(3) for j in range(2)]
        found = [*(r._replace(work=Work(1)) for r in layers), *(r._replace(work=Work(2)) for r in steps)]
        assert find_steps_of(found, Work(6)).marked_by == "step "

    def test_a_pattern_marks_steps_that_share_a_name(self) -> None:
        steps = find_steps(ranges("warm", "decode", "decode", "ProfilerStep#1"), "^decode$")
        assert steps.start.tolist() == [20, 40]

    @pytest.mark.parametrize("pattern", [None, "^ProfilerStep"])
    def test_the_last_profiler_step_is_none_where_it_is_empty(self, pattern: str | None) -> None:
        """prof.step() opens one more. What lies before that belongs to the step before: 35 to the second."""
        found = ranges("ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#2")
        found[2:] = [r._replace(empty=True) for r in found[2:]]
        steps = find_steps(found, pattern)
        assert steps.start.tolist() == [0, 20]
        assert steps.find_indices([35, 61]) == [1, 2]

    def test_only_the_last_profiler_step_is_left_out_and_not_all_of_them(self) -> None:
        empty = [r._replace(empty=True) for r in ranges("ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2")]
        assert len(find_steps(empty)) == 2
        assert len(find_steps(empty[:1])) == 1

    def test_ranges_of_ones_own_are_steps_though_empty(self) -> None:
        assert len(find_steps([r._replace(empty=True) for r in ranges("step 0", "step 1")])) == 2

    @pytest.mark.parametrize("names", [(), ("forward", "forward"), ("step_1",)])
    def test_there_may_be_none(self, names: tuple[str, ...]) -> None:
        assert len(find_steps(ranges(*names))) == 0

    def test_a_moment_between_two_steps_belongs_to_the_earlier(self) -> None:
        """Steps 0 to 10 and 20 to 30: 15 follows the first, -1 lies before it, and 31 behind the last of two."""
        steps = find_steps(ranges("s1", "s2"))
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
    def test_a_wait_while_sglang_prepares_a_batch_belongs_to_the_step_of_that_batch(self, tmp_path: Path) -> None:
        """Each prefill step has one such wait, and no decode step has one, although they lie between the steps."""
        sites = {site.function: site for site in build_sglang_trace().scan(tmp_path).sites}
        assert sites["alloc_for_extend"].count == 4
        assert sites["alloc_for_extend"].count_per_phase == {"prefill": 1.0, "decode": 0.0}
        assert sites["process_batch_result"].count_per_phase == {"prefill": 1.0, "decode": 1.0}

    def test_only_the_last_preparation_before_a_step_counts(self) -> None:
        """SGLang's idle loop makes empty batches, and the first one here lies before the end of the previous step."""
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
def test_the_recipe_of_the_documentation_marks_steps(
    batches: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten at most, and none more than there were."""
    recipe = (ROOT / "docs" / "syncs.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(recipe, {"batches": [torch.ones(2)] * batches, "step": torch.sum})  # noqa: S102 -- ours
    assert scan_traces([tmp_path / "trace.json.gz"], root=tmp_path).traces[0].steps == steps


def test_what_is_advised_where_no_steps_are_marked_marks_them(tmp_path: Path) -> None:
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


def steps_of(phases: str) -> Steps:
    """Steps one after the other; `phases` has one letter for each of them, `-` where it is unknown."""
    names = {"p": "prefill", "m": "mixed", "d": "decode", "-": ""}
    start = np.arange(len(phases), dtype=float)
    return Steps("step ", start, float(len(phases)), phases=tuple(names[letter] for letter in phases))


class TestCountOccurrences:
    @pytest.mark.parametrize(
        ("steps_of_site", "steps", "per_step", "warmup_only", "outside"),
        [
            ([0, 0, 0, 1, 2], 3, 1.0, False, 0),  # three in warm-up, then one each
            ([0, 0], 3, 0.0, True, 0),
            ([None, 0], 3, 0.0, True, 0),  # before the first step is warm-up, too
            ([0, 0, 1], 2, 1.5, False, 0),  # two steps are too few to leave one out
            ([2], 3, 0.5, False, 0),
            ([None], 2, 0.0, False, 1),  # and to call anything warm-up
            ([None, None], 0, None, False, 0),
            ([3, 3], 3, 0.0, False, 2),  # behind the last of three steps
            ([None, 0, 3], 3, 0.0, False, 1),
            ([0, 1, 3], 3, 1.0, False, 0),  # sampling behind each forward pass, also behind the last one
            ([0, 1, 2, 3], 3, 1.0, False, 1),  # the last step has its own already
            ([1, 3, 3, 3], 3, 1.0, False, 2),
            ([2, 4, 6, 8], 9, 0.5, False, 0),  # in every other step
        ],
    )
    def test_warm_up_is_what_comes_first_alone(
        self, steps_of_site: list[int | None], steps: int, per_step: float | None, *, warmup_only: bool, outside: int
    ) -> None:
        found = count_occurrences(steps_of_site, steps_of("-" * steps))
        assert (found.per_step, found.warmup_only, found.outside) == (per_step, warmup_only, outside)
        assert found.per_phase == {}

    def test_phases_are_counted_apart(self) -> None:
        """One wait in the only prefill, two in each of three decode steps after the first of four."""
        found = count_occurrences([0, 2, 2, 3, 3, 4, 4], steps_of("pdddd"))
        assert found.per_phase == {"prefill": 1.0, "decode": 2.0}
        assert (found.per_step, found.warmup_only) == (2.0, False)

    def test_a_prefill_that_comes_first_is_no_warm_up(self) -> None:
        assert not count_occurrences([0], steps_of("pdddd")).warmup_only

    def test_the_first_of_three_decode_steps_is_warm_up(self) -> None:
        assert count_occurrences([1], steps_of("pdddd")).warmup_only


class TestSites:
    def test_what_happens_in_the_first_step_alone_is_warm_up(self, tmp_path: Path) -> None:
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
    def test_a_last_profiler_step_counts_where_work_was_launched_or_waited_for(
        self, last: str, steps: int, tmp_path: Path
    ) -> None:
        """Two reads in each of two steps: 4 over 2; with a third step the first one is warm-up, and it is 2 over 2."""
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
    def test_without_a_gpu_operators_are_work(self, last: float, steps: int, tmp_path: Path) -> None:
        trace = Trace()
        for step in range(3):
            trace.range(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
        for start in (100, 1100, last):
            trace.op("aten::mm", start, start + 50)
        assert trace.scan(tmp_path).traces[0].steps == steps

    def test_occurrences_of_two_threads_are_in_order_of_time(self, tmp_path: Path) -> None:
        """The first occurrence is the earliest, not the one of the thread that comes first."""
        trace = Trace().work()
        trace.item(5000, 5100)
        trace.item(100, 200, tid=HOST + 1)
        site = get_only_site(trace.scan(tmp_path))
        assert site.threads == [f"thread {HOST}", f"thread {HOST + 1}"]
        assert site.example is not None
        assert site.example.ts == 105

    def test_ranges_tell_places_apart_where_there_are_no_functions(self, tmp_path: Path) -> None:
        """Numbers in names of ranges do not: layers are one place. They come twice, and so are no steps."""
        trace = Trace().work()
        for start, name in zip(
            range(0, 5000, 1000), ["layer 1", "layer 2", "sample", "layer 1", "layer 2"], strict=True
        ):
            trace.range(name, start, start + 900)
            trace.item(start + 100, start + 200)
        sites = trace.scan(tmp_path, step_range=None).sites
        assert sorted((s.range, s.count) for s in sites) == [("layer 1", 4), ("sample", 1)]

    def test_a_thread_without_ranges_has_those_of_the_others(self, tmp_path: Path) -> None:
        trace = Trace().work()
        trace.range("backward", 0, 900)
        trace.item(100, 200, tid=HOST + 1)
        assert get_only_site(trace.scan(tmp_path)).range == "backward"

    def test_a_pattern_must_be_one(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"--step-range '\(' is no regular expression"):
            Trace().work().scan(tmp_path, step_range="(")

    def test_a_pattern_must_match_something(self, tmp_path: Path) -> None:
        """What there is instead is named, also where the trace marks steps."""
        trace = Trace().work()
        for step in range(2):
            trace.range(f"step {step}", 1000 * step, 1000 * step + 900)
            trace.range("decode", 1000 * step, 1000 * step + 100)
        says = r"no annotation matches --step-range 'nothing'\. Ranges in this trace: 'decode' \(2\), 'step 0' \(1\)"
        with pytest.raises(UsageError, match=says):
            trace.scan(tmp_path, step_range="nothing")

    def test_all_sites_of_the_same_compiled_graph_are_one_after_a_recompilation(self, tmp_path: Path) -> None:
        trace = Trace().work()
        for start, name in ((0, "Torch-Compiled Region: 0/0"), (1000, "Torch-Compiled Region: 3/1")):
            trace.op(name, start, start + 900)
            trace.item(start + 100, start + 200)
        site = get_only_site(trace.scan(tmp_path))
        assert (site.count, site.traces) == (2, [str(tmp_path / "trace.json")])


def site_of(folder: Path, *frames: str) -> tuple[str, str, str]:
    """(fingerprint, file, function) of an `.item()` within these frames, outermost first."""
    trace = Trace().work()
    for i, frame in enumerate(frames):
        trace.frame(frame, i, 500 - i)
    trace.item(100, 200)
    site = select_counted(trace.scan(folder))[0]
    return site.fingerprint, site.file, site.function


class TestFingerprint:
    def test_lines_and_addresses_do_not_change_it(self, tmp_path: Path) -> None:
        one = site_of(tmp_path, "run.py(3): main", "<built-in method item of Tensor object at 0x7f01>")
        other = site_of(tmp_path, "run.py(30): main", "<built-in method item of Tensor object at 0x7fff>")
        assert one == other

    @pytest.mark.parametrize("root", ["/home/ci/build/4711", "/home/someone/dev/project", "/mnt"])
    @pytest.mark.parametrize("below", ["engine/kv.py", "src/engine/kv.py", "python/engine/kv.py"])
    def test_the_folder_of_a_checkout_does_not_change_it(self, root: str, below: str, tmp_path: Path) -> None:
        """A profiler shortens paths by the folder on sys.path, or does not; the repository holds the file here."""
        (tmp_path / below).parent.mkdir(parents=True)
        (tmp_path / below).touch()
        seen = {
            site_of(tmp_path, f"{file}(8): check_all")
            for file in ("engine/kv.py", f"{root}/{below}", str(tmp_path / below))
        }
        assert {file for _, file, _ in seen} == {below}
        assert len(seen) == 1

    def test_the_folder_of_an_environment_does_not_change_it(self, tmp_path: Path) -> None:
        seen = {
            site_of(tmp_path, f"{folder}vllm/model.py(8): run")
            for folder in ("", "/usr/lib/python3/dist-packages/", "/opt/venv/lib/python3.12/site-packages/")
        }
        assert {file for _, file, _ in seen} == {"vllm/model.py"}
        assert len(seen) == 1

    def test_rule_file_function_operators_and_direction_change_it(self) -> None:
        base = ("SYNC001", "a.py", "f", ["aten::item"], "DtoH")
        others = [
            ("SYNC002", *base[1:]),
            ("SYNC001", "b.py", *base[2:]),
            (*base[:2], "g", *base[3:]),
            (*base[:3], ["aten::nonzero"], "DtoH"),
            (*base[:4], "HtoD"),
        ]
        assert len({compute_fingerprint(*b) for b in (base, *others)}) == 6

    def test_hashes_and_numbers_of_compiled_code_do_not(self) -> None:
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
    def test_it_is_the_innermost_that_is_nobody_elses(self, frames: list[str], function: str, tmp_path: Path) -> None:
        assert site_of(tmp_path, *frames)[2] == function

    def test_a_file_of_the_repository_may_be_called_as_one_of_python(self, tmp_path: Path) -> None:
        """`queue.py` next to `train.py` is the user's."""
        assert site_of(tmp_path, "train.py(1): main", "queue.py(5): put")[2] == "main"
        (tmp_path / "queue.py").touch()
        assert site_of(tmp_path, "train.py(1): main", "queue.py(5): put")[2] == "put"


class TestRepository:
    def test_a_path_that_leads_out_of_it_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret.py").touch()
        (tmp_path / "repo").mkdir()
        assert Repository(tmp_path / "repo").find_path("../secret.py") == "../secret.py"
        assert not Repository(tmp_path / "repo").has_file("../secret.py")

    @pytest.mark.parametrize("file", ["a" * 10_000, "\0", "", "/", "//", "."])
    def test_odd_paths_are_left_alone(self, file: str, tmp_path: Path) -> None:
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
    def test_a_frame_has_a_file_a_line_and_a_function(self, name: str, parts: tuple[str, int, str]) -> None:
        frame = parse_frame(name)
        assert (frame.file, frame.line, frame.function) == parts
