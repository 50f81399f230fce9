"""Test that a Group parameter of a command expands to options and reaches the command as one value."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from dcpbench.commands.command import Group, collect_typed, make_panel, register_command

SIZES = make_panel("Sizes", metavar="N,…")


class Sizes(Group):
    """Group of two lists and a file."""

    heads: str | None = SIZES("Heads.")
    rows: str | None = SIZES("Rows.")
    file: Path | None = make_panel(None)("File.")


class FewerSizes(Sizes):
    """Group without rows and with other heads."""

    heads: str | None = SIZES("Other heads.", default="8")
    rows = None


def make_parser(of: type[Sizes], seen: list[object]) -> typer.core.TyperCommand:
    """Return a command `try RUN` with one group, which exits with 3."""
    app = typer.Typer(add_completion=False)

    def attempt(run: Annotated[str, typer.Argument()], sizes: Sizes) -> int:
        """Record the arguments."""
        seen.extend([run, sizes])
        return 3

    attempt.__annotations__["sizes"] = of
    register_command(app)(attempt)
    return typer.main.get_command(app)


def test_options_become_one_value_and_the_return_value_the_exit_code() -> None:
    seen: list[object] = []
    code = make_parser(Sizes, seen).main(["here", "--rows", "1,2", "--file", "x.json"], standalone_mode=False)
    assert code == 3
    run, sizes = seen
    assert (run, vars(sizes)) == ("here", {"heads": None, "rows": "1,2", "file": Path("x.json")})


def test_group_keeps_its_order_if_a_command_redefines_an_option() -> None:
    options = make_parser(FewerSizes, []).params
    assert [p.name for p in options] == ["run", "heads", "file"]
    assert next(p for p in options if p.name == "heads").help == "Other heads."


def test_field_without_an_option_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        make_parser(FewerSizes, []).main(["here", "--rows", "1"])
    assert end.value.code == 2
    assert "--rows" in capsys.readouterr().err


def test_given_options_are_those_of_a_config_file() -> None:
    """Paths are text, and omitted options are absent."""
    assert collect_typed(Sizes(rows="1", file=Path("x.json")), FewerSizes()) == {
        "rows": "1",
        "file": "x.json",
        "heads": "8",
    }
    assert collect_typed(Sizes()) == {}
