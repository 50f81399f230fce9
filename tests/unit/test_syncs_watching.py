"""Test parts of live watching: allowed regions, the decorator, pageable copies, and a torch without callbacks."""

import subprocess
import sys
import threading

import pytest
import torch
from torch.cuda import _gpu_trace

from dcpbench.errors import CapacityError, SyncError, UsageError
from dcpbench.syncs import allow, live, no_syncs, watch
from dcpbench.syncs.live import callbacks
from dcpbench.syncs.live.pageable import find_copy, is_staged
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
class TestAllow:
    def test_allowed_wait_is_not_counted_and_keeps_its_reason(self) -> None:
        with watch(at_most=0) as seen, allow("the batch is over"):
            wait_for_stream()
        assert seen.count == 0
        assert [sync.allowed for sync in seen.allowed] == ["the batch is over"]
        assert list(seen.report().verdict.allowed.values()) == ["the batch is over"]

    def test_allowed_regions_nest_and_end(self) -> None:
        with watch() as seen:
            with allow("outer"):
                with allow("inner"):
                    wait_for_stream()
                wait_for_stream()
            wait_for_stream()
        assert [sync.allowed for sync in seen.allowed] == ["inner", "outer"]
        assert seen.count == 1

    def test_line_reached_from_inside_and_outside_a_region_is_two_sites(self) -> None:
        with watch() as seen:
            for inside in (True, False):
                if inside:
                    with allow("once"):
                        wait_for_stream()
                else:
                    wait_for_stream()
        assert sorted((site.allowed, site.count) for site in seen.report().sites) == [("", 1), ("once", 1)]

    def test_allowed_region_applies_to_its_thread_only(self) -> None:
        with watch(threads="all") as seen, allow("mine"):
            thread = threading.Thread(target=wait_for_stream)
            thread.start()
            thread.join()
        assert (seen.count, len(seen.allowed)) == (1, 0)

    @pytest.mark.parametrize("reason", ["", "  ", None])
    def test_allowed_region_requires_a_reason(self, reason: str) -> None:
        with pytest.raises(UsageError, match="needs its reason"), allow(reason):
            pass


@needs_cuda
class TestDecorator:
    def test_decorated_call_that_synchronises_raises_after_its_end(self) -> None:
        done = []

        @no_syncs
        def step() -> None:
            wait_for_stream()
            done.append(1)

        with pytest.raises(SyncError, match="1 CUDA synchronisations where none may be"):
            step()
        assert done == [1]

    def test_decorated_clean_call_returns_its_value(self) -> None:
        assert no_syncs(at_most=1)(lambda x: x + 1)(2) == 3

    def test_generators_and_coroutines_cannot_be_decorated(self) -> None:
        async def step() -> None: ...

        with pytest.raises(UsageError, match=r"watch\(at_most=0\)"):
            no_syncs(step)

    def test_decorator_options_are_keyword_only(self) -> None:
        with pytest.raises(UsageError, match="at_most=1"):
            no_syncs(1)


class TestPageable:
    def test_strided_view_is_staged_unlike_contiguous_memory(self) -> None:
        """Meta tensors replace those on the device: only shapes, strides and dtypes are used."""
        device, host = torch.empty(4, 6, device="meta"), torch.empty(4, 6)
        assert not is_staged(device, host)
        assert not is_staged(host, device)
        assert is_staged(torch.empty(4, 12)[:, ::2], device)
        assert is_staged(device, torch.empty(4, 12)[:, ::2])

    def test_two_transposed_sides_have_one_layout(self) -> None:
        device, host = torch.empty(6, 4, device="meta").t(), torch.empty(6, 4).t()
        assert not is_staged(host, device)
        assert is_staged(host, device.contiguous())

    def test_copy_to_another_dtype_is_converted_on_the_device(self) -> None:
        assert not is_staged(torch.empty(4, dtype=torch.float64), torch.empty(4, device="meta"))

    def test_broadcast_row_is_staged(self) -> None:
        assert is_staged(torch.empty(6), torch.empty(4, 6, device="meta"))

    def test_copy_within_one_side_is_not_pageable(self) -> None:
        x = torch.ones(3)
        assert find_copy("aten::copy_", (x, x, True), {}, x) is None
        assert find_copy("aten::_to_copy", (x,), {"dtype": torch.float64, "non_blocking": True}, x) is None
        assert find_copy("aten::add", (x, x), {}, x) is None


class TestWithoutCuda:
    def test_watch_without_cuda_suggests_an_alternative(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "has_cuda", lambda: False)
        with pytest.raises(CapacityError, match="dry_run"), watch():
            pass

    def test_live_package_imports_no_torch(self) -> None:
        code = "import sys, dcpbench.syncs, dcpbench.syncs.allowed; print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


class TestWithoutCallbacks:
    def test_torch_without_callbacks_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A watch would miss waits; it can begin once the callbacks exist."""
        monkeypatch.setattr(live, "has_cuda", lambda: True)
        monkeypatch.setattr(callbacks, "_registered", False)
        seen = watch()
        with monkeypatch.context() as without:
            without.delattr(_gpu_trace, "register_callback_for_stream_synchronization")
            with (
                pytest.raises(CapacityError, match=r"does not tell when it waits .*: dcpbench syncs run -- python"),
                seen,
            ):
                pass
        monkeypatch.setattr(callbacks, "_registered", True)
        with seen:
            fake_cuda.stream()
        assert seen.count == 1
