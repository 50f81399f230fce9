"""Test that a command suggested by an error keeps the options of the original command."""

from dcpbench.plan import command_line

WORDS = ("sweep", "--tp", "16", "--dcp=8", "--context", "128000", "--device", "cpu", "--dry-run", "-o", "my runs")


def test_given_options_replace_the_typed_ones_and_others_are_kept() -> None:
    """Use options written with a space or =, with and without a value; a value with a space is quoted."""
    given = {"--tp": "8", "--dcp": "4", "--dry-run": ""}
    expected = "dcpbench sweep --tp 8 --dcp 4 --dry-run --context 128000 -o 'my runs'"
    assert command_line.format_updated_command(WORDS, "sweep", given, ["--device"]) == expected


def test_options_of_another_command_or_of_none_are_not_repeated() -> None:
    for typed in (WORDS, ()):
        assert command_line.format_updated_command(typed, "serve", {"--tp": "8"}) == "dcpbench serve --tp 8"
