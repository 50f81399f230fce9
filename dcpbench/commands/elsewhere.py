"""Whether a command could run on machines that are not here, by its own plan; nothing is run. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.commands.command import run_command
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.points.names import LIBRARIES, SYNTHETIC

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dcpbench.points.machine import Probe

REAL_SERVERS = ("url", "engine", "serve_cmd")
"""Options of `serve` with which servers of others are measured, which have their own models, on one machine."""
SAYS_ALL = ("config", "engine")
"""Files without which nothing is known of how options go together."""
DECIDES = {"weights", "model", "requests", "step_times", "emulate", "checkpoint"}
"""Files on which it depends whether a point can run."""
ANY_MEMORY = 1 << 50
"""Of a GPU of which nobody said what it is: nothing is refused for want of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """What the command may find there."""

    probes: Sequence[Probe]
    """One of these; what any of them can run is no mistake."""
    nodes: int = 1
    counted: bool = True
    """Whether the GPUs of a machine were said, so that layouts can be held against them."""


def make_unknown_probe(count: int) -> Probe:
    """A machine with so many GPUs of which nobody said what they are: it has every kernel, and room for all."""
    from dcpbench.points.machine import HOPPER, Probe

    return Probe(
        device="cuda",
        count=count,
        name="asked for",
        memory_bytes=ANY_MEMORY,
        capability=HOPPER,
        packages=dict.fromkeys(LIBRARIES.values(), "planned"),
    )


def make_known_probe(name: str, count: int) -> Probe:
    """A machine with so many GPUs of points/gpus.py, for which errors advise what can be run. Raises UsageError."""
    import msgspec

    from dcpbench.plan.spec import make_planned_probe

    try:
        return msgspec.structs.replace(make_planned_probe(name, 1), count=count, gpu=None)
    except UsageError as e:
        raise UsageError(f"{str(e).rstrip('.')}; leave --gpu out for another one.") from e


def find_absent_options(command: Any, typed: Mapping[str, Any], *, shared: bool) -> list[str]:  # noqa: ANN401 -- Typer's, by any name
    """Options, by name, that stand for something of the other machines. `shared`: the current folder is theirs, too, so that what
    it lacks they lack.
    """
    from dcpbench.servers.client import KEY_VARIABLE

    def is_away(value: object) -> bool:
        path = Path(str(value))
        return value != SYNTHETIC and not (shared and (path.exists() or not path.is_absolute()))

    files = [p.name for p in command.params if getattr(p, "metavar", None) in ("FILE", "FOLDER")]
    found = [name for name in files if typed.get(name) is not None and is_away(typed[name])]
    others = any(typed.get(name) for name in REAL_SERVERS)
    for name in ("emulate", "engine", *(() if others else ("model",))):
        value = typed.get(name) or ""
        words = value if isinstance(value, list) else str(value).split(",")
        found += [name] if any(_is_path(str(word)) and is_away(word) for word in words) else []
    if not shared and typed.get("api_key_env", KEY_VARIABLE) != KEY_VARIABLE:
        found.append("api_key_env")
    config = typed.get("config")
    if (
        config is not None
        and "config" not in found
        and find_absent_options(command, _read_config_options(command, config), shared=shared)
    ):
        found.append("config")
    return found


def check_command(
    command: Any,  # noqa: ANN401 -- as above
    words: Sequence[str],
    typed: Mapping[str, Any],
    there: Machines,
    away: Collection[str],
) -> str:
    """Raise the command's own error where it could not run there, whatever the options `away` stand for.

    Returns what was checked, as a sentence.
    """
    each = any(name in SAYS_ALL for name in away)
    whole = there.counted and DECIDES.isdisjoint(away)
    try:
        if each:
            _check_each(words[0], typed)
        else:
            _check_plan(command, words, there, away, whole=whole)
    except DcpbenchError as e:
        message = str(e).replace("--nnodes", "--nodes")  # as submit calls it
        message = message.replace(f"see dcpbench {words[0]} --help", "see dcpbench submit --help")
        message = message.replace(f"Type instead: dcpbench {words[0]}", f"Type behind --: {words[0]}")
        raise type(e)(f"the submitted {words[0]}: {message}") from e
    if each:
        return "Of the others, each was read for itself."
    return "All else was checked." if whole else "Of all else, values were checked, not whether its points can run."


def _read_config_options(command: Any, config: object) -> dict[str, object]:  # noqa: ANN401 -- as above
    """Those of a configuration file that is here; of one that cannot be read none, as the command says what is wrong."""
    from dcpbench.plan.spec import read_options

    try:
        return read_options(Path(str(config)), [p.name for p in command.params])
    except DcpbenchError:
        return {}


def _check_each(name: str, typed: Mapping[str, Any]) -> None:
    """Read each option for itself."""
    from dcpbench.plan.serve_spec import SERVE_PARSERS
    from dcpbench.plan.spec import PARSERS

    parsers = SERVE_PARSERS if name == "serve" else PARSERS
    for option, value in typed.items():
        if value is not None and option in parsers:
            parsers[option](option, str(value) if isinstance(value, Path) else value)


def _check_plan(
    command: Any,  # noqa: ANN401 -- as above
    words: Sequence[str],
    there: Machines,
    away: Collection[str],
    *,
    whole: bool,
) -> None:
    """Let the command plan itself, without the options that are away. `whole`: down to its points."""
    from dcpbench.commands import runs

    unread = {*away, "prompts"} if "checkpoint" in away else set(away)
    options = [option for p in command.params if p.name in unread for option in p.opts]
    arguments = remove_options(words[1:], options, ())
    errors: list[DcpbenchError] = []
    for probe in there.probes:
        planned = runs.Elsewhere(probe, nodes=there.nodes, points=whole, layouts=there.counted)
        output = io.StringIO()
        try:
            with runs.run_elsewhere(planned), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                run_command(command, arguments, words[0])
        except DcpbenchError as e:
            errors.append(e)
        else:
            return
    raise errors[0]


def _is_path(word: str) -> bool:
    """Whether a word that can be a name is meant as a file or a folder."""
    return "/" in word or word.endswith(".toml") or word in (".", "..")


def remove_options(words: Sequence[str], valued: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words of a command but for these options."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word in valued:
            next(left, None)
        elif word not in flags and not any(
            word.startswith(f"{v}=") or (word.startswith(v) and not v.startswith("--")) for v in valued
        ):
            kept.append(word)
    return kept
