"""Define tests that test_syncs_plugin.py runs in a separate pytest with a dry run; some are meant to fail."""

import unittest

import pytest
import torch

import dcpbench.syncs

BEFORE = torch.cuda.is_available()


@pytest.mark.no_cuda_sync
def test_a_sync() -> None:
    lengths = torch.ones(4, device="cuda")
    if lengths.sum() > 3:
        pass


@pytest.mark.no_cuda_sync
def test_clean() -> None:
    torch.ones(4, device="cuda").masked_fill_(torch.ones(4, device="cuda") > 0, 0.0)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.max_cuda_syncs(2)
def test_at_most_two(times) -> None:
    for _ in range(times):
        torch.ones(1, device="cuda").item()


@pytest.fixture
def lengths():
    lengths = torch.ones(4, device="cuda")
    assert lengths.tolist() == [1.0] * 4
    yield lengths
    lengths.cpu()


@pytest.mark.no_cuda_sync
def test_of_a_fixture_that_synchronises(lengths) -> None:
    lengths.add_(1)


def test_of_the_fixture_that_counts(cuda_syncs) -> None:
    assert cuda_syncs.count == 0
    torch.ones(4, device="cuda").cpu()
    assert [s.rule for s in cuda_syncs.syncs] == ["SYNC003"]
    assert "test_of_the_fixture_that_counts" in cuda_syncs.text()
    assert cuda_syncs.report().totals.syncs == 1
    assert cuda_syncs.mode == "dry-run"


def sample(x):
    return x.argmax().item()


@pytest.mark.no_cuda_sync(allow=["sam*"])
def test_an_allowed_function() -> None:
    sample(torch.ones(4, device="cuda"))


@pytest.mark.no_cuda_sync(allow=["other.sample"])
def test_a_function_that_is_not_meant() -> None:
    sample(torch.ones(4, device="cuda"))


@pytest.mark.no_cuda_sync
def test_an_allowed_region() -> None:
    with dcpbench.syncs.allow("the batch is over"):
        torch.ones(4, device="cuda").cpu()


@pytest.mark.no_cuda_sync
class TestMarked:
    def test_by_its_class(self) -> None:
        torch.ones(1, device="cuda").item()

    @pytest.mark.max_cuda_syncs(1)
    def test_by_itself(self) -> None:
        torch.ones(1, device="cuda").item()


@pytest.mark.no_cuda_sync
class Step(unittest.TestCase):
    def setUp(self):
        self.x = torch.ones(1, device="cuda")
        self.x.item()

    def tearDown(self):
        self.x.item()

    def test_clean(self):
        self.x.add_(1)

    def test_sync(self):
        self.x.item()


@pytest.mark.no_cuda_sync
class Served(unittest.IsolatedAsyncioTestCase):
    async def test_sync_in_a_coroutine(self):
        torch.ones(1, device="cuda").item()


@pytest.mark.no_cuda_sync
def test_that_fails_by_itself() -> None:
    torch.ones(1, device="cuda").item()
    pytest.fail("for a separate reason")


@pytest.mark.no_cuda_sync
@pytest.mark.xfail(strict=True)
def test_expected_to_fail() -> None:
    torch.ones(1, device="cuda").item()


@pytest.mark.no_cuda_sync
@pytest.mark.skip
def test_skipped() -> None: ...


@pytest.mark.no_cuda_sync
def test_on_the_host() -> None:
    torch.ones(1).item()


@pytest.mark.no_cuda_sync
def test_operator_that_was_never_measured() -> None:
    torch.poisson(torch.ones(1, device="cuda"))


class TestNeighbours:
    @pytest.mark.no_cuda_sync
    def test_dry(self) -> None:
        assert torch.cuda.is_available()

    def test_behind_it(self) -> None:
        assert torch.cuda.is_available() == BEFORE
