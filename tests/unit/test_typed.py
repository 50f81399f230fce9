"""A command that errors advise keeps what was typed."""

from dcpbench.plan import command_line

WORDS = ("sweep", "--tp", "16", "--dcp=8", "--context", "128000", "--device", "cpu", "--dry-run", "-o", "my runs")


def test_options_take_the_place_of_those_typed_and_all_others_stay() -> None:
    """Written with a space or =, with a value or none; what has a space is quoted."""
    given = {"--tp": "8", "--dcp": "4", "--dry-run": ""}
    expected = "dcpbench sweep --tp 8 --dcp 4 --dry-run --context 128000 -o 'my runs'"
    assert command_line.format_retyped_command(WORDS, "sweep", given, ["--device"]) == expected


def test_options_of_another_command_or_of_none_are_not_repeated() -> None:
    for typed in (WORDS, ()):
        assert command_line.format_retyped_command(typed, "serve", {"--tp": "8"}) == "dcpbench serve --tp 8"
