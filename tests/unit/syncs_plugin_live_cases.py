"""Define tests that test_syncs_plugin.py runs in a separate pytest, live with fake_cuda's device; some fail."""

import threading

import pytest

from dcpbench.syncs import live
from dcpbench.syncs.live import checked
from tests.unit import fake_cuda

# The plugin then watches on every machine; the tests themselves fire the callbacks.
live.has_cuda = lambda: True
checked.resolve_mode = lambda _: ("live", "seen live on a test")


@pytest.fixture
def noisy():
    fake_cuda.device()
    yield
    fake_cuda.device()


@pytest.mark.no_cuda_sync
@pytest.mark.usefixtures("noisy")
def test_a_wait() -> None:
    fake_cuda.stream()


@pytest.mark.no_cuda_sync
@pytest.mark.usefixtures("noisy")
def test_clean() -> None: ...


def in_a_thread() -> None:
    thread = threading.Thread(target=fake_cuda.stream)
    thread.start()
    thread.join()


@pytest.mark.no_cuda_sync
def test_own_thread() -> None:
    in_a_thread()


@pytest.mark.no_cuda_sync(threads="all")
def test_all_threads() -> None:
    in_a_thread()


def test_of_the_fixture(cuda_syncs) -> None:
    fake_cuda.stream()
    assert cuda_syncs.count == 1
    fake_cuda.event()
    assert [s.rule for s in cuda_syncs.syncs] == ["SYNC006", "SYNC007"]
    assert cuda_syncs.report().traces[0].coverage.detector == "live"
