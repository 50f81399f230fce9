"""Run real ranks of which one fails. `python -m tools.hangs` has all cases; those that hang take as long as their
limit.
"""

import pytest

from tests.distributed.faulty_worker import FAULT
from tools import hangs

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def test_rank_with_another_reduce_shape_is_named_with_phase_and_line(monkeypatch):
    """Name phase, layer and line, which gloo's immediate error lacks; the other point is measured."""
    monkeypatch.setenv(FAULT, "")
    wrong, _, record = hangs.run_case("shape", ranks=2, timeout=300.0)
    assert (record.outcome, wrong) == ("failed", [])
