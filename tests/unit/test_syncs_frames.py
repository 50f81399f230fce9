"""Test which call on a line of Python is running, by its source."""

import sys

import pytest

from dcpbench.syncs.python_frames import SUBSCRIPT, UNKNOWN, find_call_name


class Probe:
    """Query the name of the running call, in every way in which a method can be called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def ask(self, *_: object) -> "Probe":
        self.names.append(find_call_name(sys._getframe(1)))
        return self

    def _used_by_syntax(self, *_: object) -> bool:
        self.names.append(find_call_name(sys._getframe(1)))
        return True

    __getitem__ = __setitem__ = __bool__ = __lt__ = _used_by_syntax


@pytest.fixture
def probe() -> Probe:
    return Probe()


def test_last_call_of_a_chain_is_the_running_one(probe: Probe) -> None:
    probe.ask().ask(
        1,
        2,
    )
    assert probe.names == ["ask", "ask"]


def test_each_nested_call_is_named_while_it_runs(probe: Probe) -> None:
    item = probe.ask
    probe.ask(item())
    assert probe.names == ["item", "ask"]


def test_index_read_and_write_are_named(probe: Probe) -> None:
    _ = probe[1]
    probe[2] = 3
    assert probe.names == [SUBSCRIPT, SUBSCRIPT]


def test_condition_and_comparison_are_no_calls(probe: Probe) -> None:
    if probe:
        _ = probe < 1
    assert probe.names == ["", ""]


def test_call_after_non_ascii_text_is_named(probe: Probe) -> None:
    _ = "größer", probe.ask()
    assert probe.names == ["ask"]


def test_call_without_readable_source_is_unknown(probe: Probe) -> None:
    exec(compile("probe.ask()", "<no such source>", "exec"), {"probe": probe})  # noqa: S102
    assert probe.names == [UNKNOWN]
