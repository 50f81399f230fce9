"""Start jobs of these tests quickly: torch's agent and the ranks are forks of a process with torch (rank.py)."""

import pytest

from tests import as_fork


@pytest.fixture(scope="package", autouse=True)
def _forked_agents():
    with pytest.MonkeyPatch.context() as patch:
        as_fork.agents(patch.setattr)
        yield
