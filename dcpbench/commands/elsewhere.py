"""Check whether a command could run on other machines, with its own plan; nothing is run. Does not import torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dcpbench.commands.caller import Caller, PlannedMachine
from dcpbench.commands.command import run_command
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.plan.command_line import remove_options
from dcpbench.points.names import LIBRARIES, SYNTHETIC
from dcpbench.points.structured_options import RequestFile, expand_structured

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dcpbench.points.device_probe import Probe

REAL_SERVERS = ("url", "engine", "serve_cmd")  # options of `server` that name the server, or the command that starts it
LOADS = ("serve", "server")  # commands that take a file of requests
SAYS_ALL = ("config", "engine")  # files without which only single options can be checked, not together
DECIDES = {"weights", "model", "requests", "step_times", "emulate", "checkpoint"}  # files that decide if points run
ANY_MEMORY = 1 << 50  # memory of a GPU of unknown type, in bytes: so much that no point is rejected for lack of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """Describe the machines on which the command may run."""

    probes: Sequence[Probe]  # possible GPUs of a machine; an error counts only if it occurs with all of them
    nodes: int = 1
    counted: bool = True  # True if the number of GPUs of a machine is known, so that layouts can be checked against it


def make_unknown_probe(count: int) -> Probe:
    """Return a probe with `count` GPUs of unknown type: all kernels are available and memory is unlimited."""
    from dcpbench.points.device_probe import HOPPER, Probe

    return Probe(
        device="cuda",
        count=count,
        name="requested",
        memory_bytes=ANY_MEMORY,
        capability=HOPPER,
        packages=dict.fromkeys(LIBRARIES.values(), "planned"),
    )


def make_known_probe(name: str, count: int) -> Probe:
    """Return a probe with `count` GPUs of this name in points/gpus.py. Raise UsageError if the name is unknown."""
    import msgspec

    from dcpbench.plan.spec import make_planned_probe

    try:
        return msgspec.structs.replace(make_planned_probe(name, 1), count=count, gpu=None)
    except UsageError as e:
        raise UsageError(f"{str(e).rstrip('.')}; leave --gpu out for another one.") from e


def find_absent_options(command: Any, typed: Mapping[str, Any], *, shared: bool) -> list[str]:  # noqa: ANN401 -- Typer's, by any name
    """Return the names of options that refer to files or variables of the other machines.

    `shared`: the current folder exists on them, too, so a file that is missing here is missing there.
    """
    from dcpbench.servers.client import KEY_VARIABLE

    def is_away(value: object) -> bool:
        path = Path(str(value))
        return value != SYNTHETIC and not (shared and (path.exists() or not path.is_absolute()))

    files = [p.name for p in command.params if getattr(p, "metavar", None) in ("FILE", "FOLDER")]
    found = [name for name in files if typed.get(name) is not None and is_away(typed[name])]
    given = typed.get("requests") if command.name in LOADS else None  # a bench has counts of that name
    if given is not None and (file := RequestFile.parse(given).file) is not None and is_away(file):
        found.append("requests")
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
    argv: Sequence[str],
    typed: Mapping[str, Any],
    there: Machines,
    away: Collection[str],
) -> str:
    """Raise the command's own error if it could not run there, whatever the values of the options in `away`.

    Return a sentence that describes what was checked.
    """
    each = any(name in SAYS_ALL for name in away) or (argv[0] == "server" and "step_times" in away)
    whole = there.counted and DECIDES.isdisjoint(away)
    try:
        if each:
            _check_each(argv[0], typed)
        else:
            _check_plan(command, argv, there, away, whole=whole)
    except DcpbenchError as e:
        raise type(e)(f"the submitted {argv[0]}: {e}") from e
    if each:
        return "The other options were checked one by one."
    return (
        "All other options were checked."
        if whole
        else "Only the values of the other options were checked, not whether the points can run."
    )


def _read_config_options(command: Any, config: object) -> dict[str, object]:  # noqa: ANN401 -- as above
    """Return the options of a configuration file. If it cannot be read, return none: the command reports the error."""
    from dcpbench.plan.spec import read_options

    try:
        return read_options(Path(str(config)), [p.name for p in command.params])
    except DcpbenchError:
        return {}


def _check_each(name: str, typed: Mapping[str, Any]) -> None:
    """Parse each option by itself. Raise UsageError for an invalid value."""
    from dcpbench.plan.serve_spec import SERVE_PARSERS
    from dcpbench.plan.server_spec import SERVER_PARSERS
    from dcpbench.plan.spec import PARSERS

    parsers = {"serve": SERVE_PARSERS, "server": SERVER_PARSERS}.get(name, PARSERS)
    for option, value in expand_structured(typed).items():
        if value is not None and option in parsers:
            parsers[option](option, str(value) if isinstance(value, Path) else value)


def _check_plan(
    command: Any,  # noqa: ANN401 -- as above
    argv: Sequence[str],
    there: Machines,
    away: Collection[str],
    *,
    whole: bool,
) -> None:
    """Plan the command without the options in `away`. `whole`: also check its points, not only values."""
    unread = {*away, "prompts"} if "checkpoint" in away else set(away)
    options = [option for p in command.params if p.name in unread for option in p.opts]
    arguments = remove_options(argv[1:], options)
    errors: list[DcpbenchError] = []
    for probe in there.probes:
        planned = PlannedMachine(probe, nodes=there.nodes, points=whole, layouts=there.counted)
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                run_command(command, arguments, argv[0], caller=Caller(elsewhere=planned))
        except DcpbenchError as e:
            errors.append(e)
        else:
            return
    raise errors[0]


def _is_path(word: str) -> bool:
    """Return whether a word that can be a name is a path instead."""
    return "/" in word or word.endswith(".toml") or word in (".", "..")
