"""Test live detection, with torch's callbacks called by hand; on a GPU torch calls them."""

import _thread
import functools
import linecache
import threading
import time

import pytest
import torch

from dcpbench.errors import SyncError, UsageError
from dcpbench.syncs import live, no_syncs, watch
from dcpbench.syncs.live import callbacks, sighting
from tests.unit import fake_cuda


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with a GPU."""
    monkeypatch.setattr(live, "has_cuda", lambda: True)


needs_cuda = pytest.mark.usefixtures("_cuda")


def wait_for_stream() -> None:
    fake_cuda.stream()


def wait_and_fail() -> None:
    fake_cuda.stream()
    _ = 1 // 0


@needs_cuda
class TestWatch:
    def test_wait_is_recorded_with_its_line(self) -> None:
        with watch() as seen:
            wait_for_stream()
        assert [(s.rule, s.function, s.thread) for s in seen.syncs] == [("SYNC006", "wait_for_stream", "MainThread")]
        assert [line for line in seen.text().splitlines() if line.startswith(">") and "fake_cuda.stream()" in line]

    def test_each_kind_of_wait_has_its_rule(self) -> None:
        with watch() as seen:
            fake_cuda.event()
            fake_cuda.device()
        assert [s.rule for s in seen.syncs] == ["SYNC007", "SYNC008"]

    def test_stack_excludes_frames_of_torch_around_the_callback(self) -> None:
        with watch() as seen:
            wait_for_stream()
        assert [f.function for f in seen.syncs[0].frames][-2:] == ["wait_for_stream", "stream"]

    def test_waits_before_and_after_a_watch_are_not_recorded(self) -> None:
        wait_for_stream()
        with watch() as seen:
            pass
        wait_for_stream()
        assert seen.count == 0

    def test_nested_watches_count_separately(self) -> None:
        """The outer watch records all three waits, and the inner one its own."""
        with watch() as outer:
            wait_for_stream()
            with watch() as inner:
                wait_for_stream()
            wait_for_stream()
        assert (outer.count, inner.count) == (3, 1)

    def test_other_threads_are_watched_only_on_request(self) -> None:
        with watch() as own_thread, watch(threads="all") as every:
            thread = threading.Thread(target=wait_for_stream, name="loader")
            thread.start()
            thread.join()
        assert own_thread.count == 0
        assert [s.thread for s in every.syncs] == ["loader"]

    def test_watches_of_two_threads_are_independent(self) -> None:
        """Both are open at the same time, and each thread waits as often as its number."""
        barrier, counts = threading.Barrier(2), {}

        def watched(times: int) -> None:
            with watch() as seen:
                barrier.wait()
                for _ in range(times):
                    wait_for_stream()
                barrier.wait()
            counts[times] = seen.count

        threads = [threading.Thread(target=watched, args=(n,)) for n in (1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts == {1: 1, 5: 5}

    def test_watch_ends_with_an_exception(self) -> None:
        seen = watch(at_most=0)
        with pytest.raises(ZeroDivisionError), seen:
            wait_and_fail()
        wait_for_stream()
        assert seen.count == 1
        assert torch._C._len_torch_dispatch_stack() == 0

    def test_more_waits_than_at_most_raises_with_the_line(self) -> None:
        wait_for_stream_twice = no_syncs(at_most=1)(lambda: [wait_for_stream(), wait_for_stream()])
        with pytest.raises(SyncError, match=r"(?s)2 CUDA synchronisations where at most 1 may be.*fake_cuda"):
            wait_for_stream_twice()

    def test_watch_cannot_be_reused(self) -> None:
        with watch() as seen:
            pass
        with pytest.raises(UsageError, match="make a new one"), seen:
            pass

    @pytest.mark.parametrize("options", [{"threads": "mine"}, {"at_most": -1}, {"at_most": True}, {"at_most": "2"}])
    def test_invalid_options_error_shows_valid_ones(self, options: dict) -> None:
        with pytest.raises(UsageError, match="write"):
            watch(**options)

    def test_live_report_groups_sites_and_notes_its_limits(self) -> None:
        with watch() as seen:
            for _ in range(3):
                wait_for_stream()
        report = seen.report()
        assert [(s.count, s.rule, s.line_is) for s in report.sites] == [(3, "SYNC006", "call")]
        assert report.totals.syncs == 3
        assert any("NCCL" in note for note in report.traces[0].coverage.notes)
        assert report.traces[0].coverage.detector == "live"

    def test_line_with_synchronize_is_explicit(self) -> None:
        with watch() as seen:
            fake_cuda.synchronize()
        assert [(s.rule, s.explicit, s.op) for s in seen.syncs] == [("SYNC006", True, "torch.cuda.Stream.synchronize")]

    def test_compiled_code_stays_compiled(self) -> None:
        """An ordinary dispatch mode makes torch.compile fall back to eager."""
        compiled = []

        def backend(graph: torch.fx.GraphModule, _inputs: list) -> object:
            compiled.append(graph)
            return graph.forward

        function = torch.compile(lambda x: x * 2 + 1, backend=backend)
        with watch() as seen:
            assert function(torch.ones(2)).tolist() == [3.0, 3.0]
        assert len(compiled) == 1
        assert seen.count == 0


@needs_cuda
class TestOperators:
    @pytest.mark.parametrize(
        ("source", "rule", "chain"),
        [
            ("x.sum().item()", "SYNC001", ("aten::_local_scalar_dense",)),
            ("bool((x > 1).all())", "SYNC001", ("aten::_local_scalar_dense",)),
            ("x.nonzero()", "SYNC002", ("aten::nonzero",)),
            ("x.masked_select(x > 1)", "SYNC002", ("aten::masked_select",)),
            ("torch.unique(x)", "SYNC002", ("aten::_unique2",)),
            ("torch.nn.functional.one_hot(n)", "SYNC002", ("aten::one_hot", "aten::_local_scalar_dense")),
            ("torch.linalg.inv(m)", "SYNC001", ("aten::_linalg_check_errors", "aten::_local_scalar_dense")),
        ],
    )
    def test_running_operator_determines_the_rule(self, source: str, rule: str, chain: tuple[str, ...]) -> None:
        """The operator is made to wait, as on a GPU. A composite one such as one_hot is identified by the call on the
        line.
        """
        tensors = {"x": torch.tensor([1.0, 3.0, 0.0]), "n": torch.tensor([0, 2]), "m": torch.eye(2)}
        waiting = {op for op in chain if op != "aten::one_hot"}
        with fake_cuda.Waiting(waiting), watch() as seen:
            eval(compiled(source), {"torch": torch, **tensors})  # noqa: S307  (the source is the parameter above)
        assert seen.syncs
        assert {(s.rule, s.op_chain, s.line) for s in seen.syncs} == {(rule, chain, 1)}

    def test_nested_watches_record_an_operator_once(self) -> None:
        with fake_cuda.Waiting({"aten::nonzero"}), watch() as outer, watch() as inner:
            torch.ones(3).nonzero()
        assert [s.op_chain for s in outer.syncs + inner.syncs] == [("aten::nonzero",)] * 2

    def test_event_wait_inside_an_operator_is_not_explicit(self) -> None:
        with fake_cuda.Waiting({"aten::add"}, fake_cuda.event), watch() as seen:
            torch.ones(3) + 1
        assert [(s.rule, s.op, s.explicit) for s in seen.syncs] == [("SYNC007", "aten::add", False)]

    def test_copy_below_dispatch_modes_is_identified_by_its_call(self) -> None:
        """The call torch.tensor(list, device="cuda") copies below every dispatch mode."""
        with watch() as seen:
            eval(compiled("tensor(1)"), {"tensor": lambda _: fake_cuda.stream()})  # noqa: S307
        # The lambda is the user's innermost line, and it calls `stream`, which is nothing of torch's.
        assert [s.rule for s in seen.syncs] == ["SYNC006"]
        with watch() as seen:
            eval(compiled("tensor()"), {"tensor": fake_cuda.stream})  # noqa: S307
        assert [(s.rule, s.direction) for s in seen.syncs] == [("SYNC004", "HtoD pageable")]

    @pytest.mark.parametrize(
        ("source", "rule"),
        [
            ("item()", "SYNC001"),
            ("tolist()", "SYNC003"),
            ("unique()", "SYNC002"),
            ("tensor()", "SYNC004"),
            ("to()", "SYNC011"),
            ("synchronize()", "SYNC006"),
        ],
    )
    def test_call_determines_the_rule_in_another_thread(self, source: str, rule: str) -> None:
        """A dispatch mode applies only to its own thread."""
        names = {source.removesuffix("()"): fake_cuda.stream}
        thread = threading.Thread(target=lambda: eval(compiled(source), names))  # noqa: S307
        with watch(threads="all") as seen:
            thread.start()
            thread.join()
        assert [s.rule for s in seen.syncs] == [rule]

    def test_wait_in_an_autograd_thread_has_the_line_of_the_backward_call(self) -> None:
        """Threads of autograd have no Python stack, as have threads that only C calls."""
        made: list = []
        waits = map(sighting.make_wait_sync, ["stream"], [[]], [threading.get_ident()])
        _thread.start_new_thread(made.extend, (waits,))
        while not made:
            time.sleep(0.001)
        assert made[0].function == "test_wait_in_an_autograd_thread_has_the_line_of_the_backward_call"

    def test_waits_of_a_backward_pass_are_recorded(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with fake_cuda.Waiting({"aten::mul"}), watch() as seen:
            (x * 2).sum().backward()
        assert [(s.rule, s.op_chain[0]) for s in seen.syncs] == [("SYNC001", "aten::mul")] * 2

    def test_operator_that_raises_in_debug_mode_is_counted_and_raises(self) -> None:
        """The mode set_sync_debug_mode("error") raises before torch's callback is called."""

        def raises() -> None:
            raise RuntimeError(callbacks.MESSAGE)

        error = pytest.raises(RuntimeError, match="synchronizing")
        with fake_cuda.Waiting({"aten::nonzero"}, raises), watch() as seen, error:
            torch.ones(2).nonzero()
        assert [s.rule for s in seen.syncs] == ["SYNC002"]

    def test_higher_order_operators_run(self) -> None:
        with watch() as seen:
            out = torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.zeros(2),))  # noqa: FBT003
        assert out.tolist() == [0.0, 0.0]
        assert seen.count == 0


def compiled(source: str) -> object:
    """Compile code as that of a file, so that its source can be read."""
    name = f"<{source}>"
    linecache.cache[name] = (len(source), None, [source + "\n"], name)
    return compile(source, name, "eval")


@needs_cuda
class TestWithoutModes:
    def test_line_of_torch_determines_the_rule_without_modes(self) -> None:
        """Torch disables modes while it prints a tensor, and reads values on one of its lines."""
        fire = torch.cuda._gpu_trace.StreamSynchronizationCallbacks.fire_callbacks
        names = {"torch": torch, "tolist": functools.partial(fire, 0)}
        inside = str(torch.__file__).replace("__init__.py", "_tensor_str_of_the_test.py")
        source = "def show():\n    with torch.utils._python_dispatch._disable_current_modes():\n        tolist()\n"
        linecache.cache[inside] = (len(source), None, source.splitlines(keepends=True), inside)
        exec(compile(source, inside, "exec"), names)  # noqa: S102  (the text above)
        with watch() as seen:
            names["show"]()
        assert [s.rule for s in seen.syncs] == ["SYNC003"]
        assert seen.syncs[0].function == "test_line_of_torch_determines_the_rule_without_modes"
