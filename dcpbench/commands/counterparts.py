"""Point from an option that a command lacks to the other command that has it: `serve` and `server`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.plan.command_line import hide_headers, remove_options_with_words
from dcpbench.points.redaction import format_command_line
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

COUNTERPARTS = {  # for each command, the command for which its users may take it, and what that command does
    "serve": ("server", "measures vLLM, SGLang and other servers"),
    "server": ("serve", "measures dcpbench's own engine"),
}


def make_counterpart_error(command: str, option: str, args: Sequence[str]) -> UsageError | None:
    """Return the error for an unknown option that the command's counterpart has, with the command line to type instead.

    None if no counterpart has the option.
    """
    from dcpbench.commands.command import load_command

    if command not in COUNTERPARTS:
        return None
    other, purpose = COUNTERPARTS[command]
    options = load_command(other).params
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)} | {"--help"}
    if option not in known:
        return None
    given = dict.fromkeys(word.partition("=")[0] for word in args if word.startswith("--") and word != "--")
    lacking = [name for name in given if name not in known]
    argv = remove_options_with_words(hide_headers(["dcpbench", other, *args]), set(lacking))
    text = f"{option} is an option of `dcpbench {other}`, which {purpose}."
    typed = format_command_line(argv)
    if lacking:
        return UsageError(
            f"{text} That command has no {format_list(lacking, 'or')}. Type: {typed}\nOr leave out {option} to stay with `dcpbench {command}`."
        )
    return UsageError(f"{text} Type: {typed}")
