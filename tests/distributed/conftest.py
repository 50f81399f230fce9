"""Jobs of these tests begin at once: their ranks are forks of a process that has torch."""

import pytest

from tests import rank_fork


@pytest.fixture(scope="package", autouse=True)
def _forked_ranks():
    with pytest.MonkeyPatch.context() as patch:
        rank_fork.install(patch.setattr)
        yield
