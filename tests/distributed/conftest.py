"""Jobs of these tests begin at once: torch's agent is a fork of a process that has torch, as their ranks are (rank.py)."""

import pytest

from tests import as_fork


@pytest.fixture(scope="package", autouse=True)
def _forked_agents():
    with pytest.MonkeyPatch.context() as patch:
        as_fork.agents(patch.setattr)
        yield
