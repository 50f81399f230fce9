"""Edit command lines: replace options, and hide secrets. No torch."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from dcpbench.points import redaction

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HEADER = "--header"
HIDDEN = "…"


def format_updated_command(
    argv: Sequence[str], command: str, given: Mapping[str, str], others: Sequence[str] = ()
) -> str:
    """Return the words of `update_command` as a command line."""
    return shlex.join(["dcpbench", *update_command(argv, command, given, others)])


def update_command(
    argv: Sequence[str], command: str, given: Mapping[str, str], others: Sequence[str] = ()
) -> list[str]:
    """Return the words of a command line with the options in `given` (empty for a switch) and without `others`.

    `argv` is the command and its arguments. If it is empty or of another command, only the options in `given` are returned.
    """
    kept = remove_options_with_words(argv[1:], {*given, *others}) if argv and argv[0] == command else []
    put = (word for option, value in given.items() for word in (option, value) if word)
    return [command, *put, *kept]


def remove_options(argv: Sequence[str], valued: Sequence[str], switches: Sequence[str] = ()) -> list[str]:
    """Return the arguments without some options that take a value, and without some switches."""
    kept: list[str] = []
    left = iter(argv)
    for word in left:
        if word in valued:
            next(left, None)
        elif word not in switches and not any(
            word.startswith(f"{v}=") or (word.startswith(v) and not v.startswith("--")) for v in valued
        ):
            kept.append(word)
    return kept


def remove_options_with_words(argv: Sequence[str], options: set[str]) -> list[str]:
    """Return the arguments without some options, and without all words from each of them to the next option."""
    kept, dropped = [], False
    for word in argv:
        if word.startswith("-"):
            dropped = word.partition("=")[0] in options
        if not dropped:
            kept.append(word)
    return kept


def remove_settings(argv: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Return the arguments without some settings, named as by `format_flag`: `--exchange`, or the key `--page-size interleave`."""
    words = list(argv)
    for option, _, key in (flag.partition(" ") for flag in flags):
        if not key:
            words = remove_options(words, [option])
            continue
        kept, left = [], iter(words)
        for word in left:
            name, has_value, value = word.partition("=")
            if name != option:
                kept.append(word)
                continue
            items = (value if has_value else next(left, "")).split(",")
            rest = ",".join(item for item in items if item.partition("=")[0] != key)
            kept += [option, rest] if rest else []
        words = kept
    return words


def get_typed_command() -> str:
    """Return the command line of this process as records keep it: without secrets and without values of headers."""
    return redaction.format_command_line(["dcpbench", *hide_headers(sys.argv[1:])])


def hide_headers(argv: Sequence[str]) -> list[str]:
    """Return a command line without the values of its --header options."""
    found: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        if before == HEADER:
            found.append(_hide_value(word))
        elif word.startswith(f"{HEADER}="):
            found.append(f"{HEADER}={_hide_value(word.partition('=')[2])}")
        elif word.startswith("--") and HEADER in word.partition("=")[2]:
            option, _, value = word.partition("=")
            found.append(f"{option}={_hide_nested(value)}")
        elif (
            HEADER in word and word != HEADER
        ):  # options in the value of an option, as in `ab --a "--url … --header …"`
            found.append(_hide_nested(word))
        else:
            found.append(word)
    return found


def _hide_nested(text: str) -> str:
    try:
        argv = shlex.split(text)
    except ValueError:
        return HIDDEN
    if argv == [text] and not text.startswith(f"{HEADER}="):
        return text
    return shlex.join(hide_headers(argv))


def _hide_value(text: str) -> str:
    name, colon, _ = text.partition(":")
    return f"{name}{colon} {HIDDEN}" if colon else HIDDEN
