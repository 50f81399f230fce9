"""What is to be typed instead keeps what was typed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dcpbench.plan import command_line

if TYPE_CHECKING:
    from collections.abc import Iterator

WORDS = ("sweep", "--tp", "16", "--dcp=8", "--context", "128000", "--device", "cpu", "--dry-run", "-o", "my runs")


@pytest.fixture
def line() -> Iterator[None]:
    before = command_line.line.set(WORDS)
    yield
    command_line.line.reset(before)


@pytest.mark.usefixtures("line")
def test_options_take_the_place_of_those_typed_and_all_others_stay() -> None:
    """Written with a space or =, with a value or none; what has a space is quoted."""
    given = {"--tp": "8", "--dcp": "4", "--dry-run": ""}
    said = "dcpbench sweep --tp 8 --dcp 4 --dry-run --context 128000 -o 'my runs'"
    assert command_line.format_retyped_command("sweep", given, ["--device"]) == said


@pytest.mark.usefixtures("line")
def test_of_another_command_only_what_is_given_is_said() -> None:
    assert command_line.format_retyped_command("serve", {"--tp": "8"}) == "dcpbench serve --tp 8"
