"""A parameter of a command that is a Group stands for its fields, and reaches the command as one value."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from dcpbench.commands.command import Group, collect_typed, make_panel, register_command

SIZES = make_panel("Sizes", metavar="N,…")


class Sizes(Group):
    """Two lists and a file."""

    heads: str | None = SIZES("Heads.")
    rows: str | None = SIZES("Rows.")
    file: Path | None = make_panel(None)("File.")


class FewerSizes(Sizes):
    """Without rows, and with other heads."""

    heads: str | None = SIZES("Other heads.", default="8")
    rows = None


def parser(of: type[Sizes], seen: list[object]) -> typer.core.TyperCommand:
    """A command `try RUN` with one group, which ends with 3."""
    app = typer.Typer(add_completion=False)

    def attempt(run: Annotated[str, typer.Argument()], sizes: Sizes) -> int:
        """Try it."""
        seen.extend([run, sizes])
        return 3

    attempt.__annotations__["sizes"] = of
    register_command(app)(attempt)
    return typer.main.get_command(app)


def test_what_is_typed_arrives_as_one_value_and_the_number_returned_is_the_exit_code() -> None:
    seen: list[object] = []
    code = parser(Sizes, seen).main(["here", "--rows", "1,2", "--file", "x.json"], standalone_mode=False)
    assert code == 3
    run, sizes = seen
    assert (run, vars(sizes)) == ("here", {"heads": None, "rows": "1,2", "file": Path("x.json")})


def test_a_group_keeps_its_order_where_a_command_has_an_option_otherwise() -> None:
    options = parser(FewerSizes, []).params
    assert [p.name for p in options] == ["run", "heads", "file"]
    assert next(p for p in options if p.name == "heads").help == "Other heads."


def test_a_field_that_has_another_default_than_an_option_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser(FewerSizes, []).main(["here", "--rows", "1"])
    assert end.value.code == 2
    assert "--rows" in capsys.readouterr().err


def test_what_was_typed_is_what_a_file_of_options_would_say() -> None:
    """Paths as text, and nothing of what was left out."""
    assert collect_typed(Sizes(rows="1", file=Path("x.json")), FewerSizes()) == {
        "rows": "1",
        "file": "x.json",
        "heads": "8",
    }
    assert collect_typed(Sizes()) == {}
