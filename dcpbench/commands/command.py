"""Turn a function into a command: its parameters are options, and a parameter of type Group stands for its fields.

Options that several commands share are fields of one class (options.py), and are passed on as one value.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from dcpbench.commands import catalogue
from dcpbench.commands.counterparts import make_counterpart_error
from dcpbench.errors import ExitCode, UsageError
from dcpbench.plan.command_line import hide_headers, remove_options
from dcpbench.plan.option_parsers import format_value
from dcpbench.points.counts import parse_count, suggest_counts
from dcpbench.points.structured_options import expand_structured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.commands.caller import Caller
    from dcpbench.commands.catalogue import Entry
    from dcpbench.points.key_values import StructuredOption

    Does = TypeVar("Does", bound=Callable[..., int])

CONTEXT = "ctx"
TYPED = "dcpbench.typed"  # key of the command and its arguments in the context of Click
STRUCTURED = "KEY=VALUE"  # placeholder of the value of a structured option
PARSER_ERROR: Any = typer.BadParameter.__base__  # error of invalid options; its module depends on Typer's version


def make_panel(title: str | None, **same: Any) -> Callable[..., Any]:  # noqa: ANN401 -- what Typer takes
    """Return a function that makes options under this title of the help, with the settings in `same`.

    Its arguments are the help text, then the option's names unless they follow from the field: a `bool` that is not off
    by default can be switched off (`--x/--no-x`).
    """

    def make_option(text: str, *names: str, default: object = None, **own: Any) -> Any:  # noqa: ANN401 -- as above
        return typer.Option(default, *names, help=text, rich_help_panel=title, **same, **own)

    return make_option


def make_structured(panel: Callable[..., Any], declared: type[StructuredOption], *keys: str, **texts: str) -> Any:  # noqa: ANN401 -- what Typer takes
    """Return a structured option under a panel's title, with some of its keys (all if none is named).

    `texts` replaces the help texts of keys; `about` is the text of the option itself.
    """
    own = {"" if name == "about" else name: text for name, text in texts.items()}
    return panel(
        declared.format_help(keys, own),
        declared.option,
        metavar=STRUCTURED,
        parser=functools.partial(declared.parse, keys=keys),
    )


@dataclass_transform(kw_only_default=True)
class Group:
    """Hold options that a command takes as one value. A field is an option only if its default is one."""

    def __init__(self, **given: object) -> None:
        """Set each option to its given value, or to its default."""
        options = get_type_hints(type(self))
        assert given.keys() <= options.keys()
        for name in options:
            default = getattr(type(self), name)
            setattr(self, name, given.get(name, default.default if isinstance(default, OptionInfo) else default))


def register_command(app: typer.Typer, **settings: Any) -> Callable[[Does], Does]:  # noqa: ANN401 -- what Typer takes
    """Make a function that returns an exit code a command of `app`; its docstring is the help."""

    def register(function: Does) -> Does:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        # Typer would keep the line breaks of a paragraph at any width.
        text = "\n\n".join(p if p.startswith(" ") else p.replace("\n", " ") for p in paragraphs)
        app.command(cls=Command, help=text, **settings)(_make_flat(function))
        return function

    return register


def add_command(app: typer.Typer, entry: Entry) -> None:
    """Import the module of a command or group of commands and add it to `app`."""
    module = importlib.import_module(f"dcpbench.commands.{entry.function}")
    if entry.is_group:
        app.add_typer(module.app, rich_help_panel=entry.panel)
    else:
        register_command(app, name=entry.name, rich_help_panel=entry.panel)(getattr(module, entry.function))


@functools.cache
def load_command(name: str) -> Any:  # noqa: ANN401 -- of Click, or of Typer's copy of it
    """Return the Click command of this name, whose parser reads arguments as `dcpbench NAME` does."""
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)  # with a callback an application of one command is still a group
    add_command(app, catalogue.BY_NAME[name])
    return typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]


def collect_typed(*groups: object) -> dict[str, object]:
    """Return the given options of these groups by name, as in a configuration file."""
    given = {name: value for group in groups for name, value in vars(group).items() if value is not None}
    given = expand_structured(given)
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def list_changed(group: Group) -> list[str]:
    """Return the options of a group that are not at their defaults, such as `--api-key-env`."""
    declared = {name: getattr(type(group), name) for name in get_type_hints(type(group))}
    return [
        option.param_decls[-1] if option.param_decls else "--" + name.replace("_", "-")
        for name, option in declared.items()
        if isinstance(option, OptionInfo) and getattr(group, name) != option.default
    ]


def _make_flat(function: Callable[..., int]) -> Callable[..., None]:
    """Return the function with one parameter for each option, for Typer to read from its signature."""
    taken: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[type[Group], list[str]]] = {}
    for name, p in inspect.signature(function, eval_str=True).parameters.items():
        of_group = isinstance(p.annotation, type) and issubclass(p.annotation, Group)
        options = _list_options(p.annotation) if of_group else [_make_parameter(name, p.annotation, p.default)]
        taken |= {option.name: option for option in options}
        if of_group:
            groups[name] = p.annotation, [option.name for option in options]

    def run_flat(ctx: typer.Context, **given: object) -> None:
        made = {name: kind(**{option: given.pop(option) for option in names}) for name, (kind, names) in groups.items()}
        for group in made.values():
            if hasattr(group, "caller"):
                group.caller = dataclasses.replace(ctx.obj or group.caller, argv=ctx.meta[TYPED])
        raise typer.Exit(function(**given, **made))

    run_flat.__name__ = function.__name__
    taken = {CONTEXT: inspect.Parameter(CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)} | taken
    run_flat.__signature__ = inspect.Signature([*taken.values()])  # type: ignore[attr-defined]
    run_flat.__annotations__ = {name: p.annotation for name, p in taken.items()}
    return run_flat


def _list_options(group: type[Group]) -> list[inspect.Parameter]:
    fields = {name: (kind, getattr(group, name)) for name, kind in get_type_hints(group).items()}
    return [
        _make_parameter(n, kind, default) for n, (kind, default) in fields.items() if isinstance(default, OptionInfo)
    ]


def _make_parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:  # noqa: ANN401 -- of any type
    """Return a parameter annotated with its type and option. Names are explicit: Typer's defaults differ by version."""
    if isinstance(default, OptionInfo):
        option, default = copy.copy(default), default.default
        flag = "--" + name.replace("_", "-")
        both = f"{flag}/--no-{flag[2:]}" if kind in (bool, bool | None) and default is not False else ""
        option.default, option.param_decls = ..., option.param_decls or (both or flag,)
        if kind in (int, int | None) and option.parser is None:
            option.parser = functools.partial(_parse_count, flag, option.min)
        kind = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _parse_count(option: str, minimum: float | None, value: object) -> int:
    """Return the number for `8` or `64k`. Raise UsageError for any other text, and for numbers below `minimum`."""
    found = parse_count(str(value))
    if found is None:
        choices = suggest_counts(str(value)) or "not a whole number; write for example " + f"{option} 8"
        raise UsageError(f"{option} {format_value(value)}: {choices}.")
    if minimum is not None and found < minimum:
        raise UsageError(f"{option} {found} is less than {minimum:g}; write for example {option} {max(minimum, 8):g}.")
    return found


class Command(TyperCommand):
    """Reject an option that is given twice, for which Click's parser would silently drop the first value.

    An option that only the command's counterpart has is an error that names the counterpart, unless the arguments are parsed
    for another command, such as `ab`.
    """

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]  # as Click's own
        """Return the options; the help of a switch shows no type, as if it took a value."""
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # as Click's own
        """Parse the arguments as Click does. Raise UsageError if an option with a value is given twice."""
        try:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            args = _merge_structured(args, order)
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        except PARSER_ERROR as error:
            unknown = getattr(error, "option_name", None) if ctx.parent is not None else None
            found = make_counterpart_error(str(ctx.info_name), unknown, args) if unknown else None
            if found is None:
                raise
            raise found from error
        for option, times in Counter(order).items():
            if times > 1 and "…" in (getattr(option, "metavar", None) or ""):
                name = max(option.opts, key=len)
                values = [value for typed in option.opts for value in _find_values(typed, args)]
                raise UsageError(f"{name} is given {times} times; write one list: {name} {','.join(values)}")
            once = option.param_type_name == "option" and not option.multiple
            if times > 1 and once and not getattr(option, "is_flag", False):
                raise UsageError(f"{max(option.opts, key=len)} is given {times} times; give it once.")
        ctx.meta[TYPED] = (str(ctx.info_name), *hide_headers(args))
        return super().parse_args(ctx, args)


def _merge_structured(args: list[str], order: Sequence[Any]) -> list[str]:
    """Return the arguments with structured options that are given several times merged, at most one of them with a bare value."""
    merged = list(args)
    for option, times in Counter(order).items():
        if times == 1 or getattr(option, "metavar", None) != STRUCTURED:
            continue
        name = max(option.opts, key=len)
        values = sorted(_find_values(name, merged), key=lambda value: "=" in value.partition(",")[0])
        if sum("=" not in value.partition(",")[0] for value in values) <= 1:
            merged = [*remove_options(merged, [name]), name, ",".join(values)]
    return merged


def _find_values(option: str, args: list[str]) -> list[str]:
    """Return the values given for an option, as `--tp 2` or `--tp=2`."""
    pairs = zip(args, [*args[1:], ""], strict=True)
    return [
        after if word == option else word[len(option) + 1 :]
        for word, after in pairs
        if word == option or word.startswith(f"{option}=")
    ]


def run_command(
    command: Command, arguments: Sequence[str], prog_name: str | None = None, *, caller: Caller | None = None
) -> int:
    """Run a command in this process, for the calling command, and return its exit code.

    Raise KeyboardInterrupt if Ctrl-C ended it; Typer turns that into an exit code.
    """
    code = int(command.main(list(arguments), prog_name=prog_name, standalone_mode=False, obj=caller) or 0)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    return code
