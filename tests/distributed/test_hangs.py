"""Real ranks of which one goes wrong. `python -m tools.hangs` has all cases; those that hang take as long as their limit."""

import pytest

from tests.distributed.faulty_worker import FAULT
from tools import hangs

pytestmark = [pytest.mark.distributed, pytest.mark.long]


def test_a_rank_that_reduces_another_shape_is_named_with_its_phase_layer_and_line(monkeypatch):
    """gloo breaks at once, and its own error names none of them; the other point is measured."""
    monkeypatch.setenv(FAULT, "")
    wrong, _, record = hangs.case("shape", ranks=2, timeout=300.0)
    assert (record.outcome, wrong) == ("failed", [])
