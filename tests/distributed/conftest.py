"""Start the jobs of these tests quickly: the agent and the ranks are forks of a process that has imported torch (rank.py)."""

import pytest

from tests import as_fork


@pytest.fixture(scope="package", autouse=True)
def _forked_agents():
    with pytest.MonkeyPatch.context() as patch:
        as_fork.replace_agents(patch.setattr)
        yield
