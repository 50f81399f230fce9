"""How a function becomes a command: its parameters are options, and one that is a dataclass stands for its fields.

So options that several commands share are fields of one class (options.py), and reach what needs them as one value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import typer
from typer.core import TyperCommand

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Does = TypeVar("Does", bound=Callable[..., int])
    Group = TypeVar("Group")

WRONG, SOME_FAILED = 1, 4
"""Exit codes of commands that ran; those of errors are in errors.py."""


def panel(title: str, **same: Any) -> Callable[..., Any]:  # noqa: ANN401 -- what Typer takes
    """`typer.Option` for options that the help shows under this title, and which have the `same` otherwise, too."""
    return functools.partial(typer.Option, rich_help_panel=title, **same)


def command(app: typer.Typer, **settings: Any) -> Callable[[Does], Does]:  # noqa: ANN401 -- what Typer takes
    """Make a function that returns an exit code a command of `app`; its docstring is the help."""

    def add(function: Does) -> Does:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        # Typer would keep the line breaks of a paragraph at any width.
        text = "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)
        app.command(cls=Command, help=text, **settings)(_flat(function))
        return function

    return add


@dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def group(kind: type[Group]) -> type[Group]:
    """A dataclass of options, which is a parameter of commands; made without what costs `--help` its time."""
    return dataclasses.dataclass(kw_only=True, eq=False, repr=False)(kind)


def typed(*groups: object) -> dict[str, object]:
    """The options of these groups that were typed, by name, as a configuration file has them."""
    given = {name: value for group in groups for name, value in vars(group).items() if value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _flat(function: Callable[..., int]) -> Callable[..., None]:
    """The function with a parameter for each option, as Typer reads them off a signature."""
    parameters = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, Any] = {
        name: p.annotation for name, p in parameters.items() if dataclasses.is_dataclass(p.annotation)
    }

    @functools.wraps(function)
    def flat(**given: object) -> None:
        made = {
            name: kind(**{option.name: given.pop(option.name) for option in _options(kind)})
            for name, kind in groups.items()
        }
        raise typer.Exit(function(**given, **made))

    taken = [option for name, p in parameters.items() for option in (_options(groups[name]) if name in groups else [p])]
    flat.__signature__ = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in taken])  # type: ignore[attr-defined]
    flat.__annotations__ = {p.name: p.annotation for p in taken}
    return flat


def _options(kind: Any) -> Iterator[inspect.Parameter]:  # noqa: ANN401 -- any dataclass
    """The fields of a group as parameters; one that is not for the constructor (`init=False`) is no option."""
    for field in dataclasses.fields(kind):
        if field.init:
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            yield inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)


class Command(TyperCommand):
    """A command that takes each option once: of two, the parser would drop the first without a word."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # as Click's own
        """As Click's. Raises UsageError for an option with a value that is given twice."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(order).items():
            if times > 1 and "…" in (getattr(option, "metavar", None) or ""):
                name = max(option.opts, key=len)
                values = [value for typed in option.opts for value in _values(typed, args)]
                raise UsageError(f"{name} is given {times} times; write one list: {name} {','.join(values)}")
            once = option.param_type_name == "option" and not option.multiple
            if times > 1 and once and not getattr(option, "is_flag", False):
                raise UsageError(f"{max(option.opts, key=len)} is given {times} times; give it once.")
        return super().parse_args(ctx, args)


def _values(option: str, args: list[str]) -> list[str]:
    """What is typed for an option, as `--tp 2` or `--tp=2`."""
    pairs = zip(args, [*args[1:], ""], strict=True)
    return [
        after if word == option else word[len(option) + 1 :]
        for word, after in pairs
        if word == option or word.startswith(f"{option}=")
    ]
