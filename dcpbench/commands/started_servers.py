"""Print and check the commands of servers that dcpbench starts, for `server` and `sweep`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dcpbench.errors import MissingPackageError, UsageError
from dcpbench.plan.option_parsers import check_seconds
from dcpbench.points import redaction
from dcpbench.points.names import format_flag
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dcpbench.plan.grid import Candidate
    from dcpbench.points.structured_options import Timeout
    from dcpbench.servers.presets import Engine


START_S = 1800.0  # default time after which a server that accepts no requests has failed
REQUEST_S = 600.0  # default time without a token after which a request has failed


def check_options(given: Iterable[str], taken: Collection[str], source: str) -> None:
    """Raise UsageError for a given option that belongs to dcpbench's own engine. `source`: `--url` or `--engine`."""
    if wrong := [format_flag(name) for name in given if name not in taken]:
        raise UsageError(f"{wrong[0]} is an option of dcpbench's own engine; leave it out, or {source}.")


def get_start_s(limits: Timeout) -> float:
    """Return the time after which a server that accepts no requests has failed."""
    return START_S if limits.start is None else limits.start


def get_request_s(limits: Timeout) -> float:
    """Return the time without a token after which a request has failed."""
    return REQUEST_S if limits.stall is None else limits.stall


def check_server_limits(limits: Timeout) -> None:
    """Raise UsageError for a time limit of a server that is not positive."""
    check_seconds("--timeout", get_request_s(limits), int(REQUEST_S))
    check_seconds("--timeout start", get_start_s(limits), int(START_S))


def list_commands(candidates: Sequence[Candidate], engine: Engine, model: str, traces: str = "") -> list[list[str]]:
    """Return the command of the server of each point that can run."""
    points = [candidate.point for candidate in candidates if candidate.error is None]
    return [engine.make_command(p, engine.find_settings(p), model, 0, traces=traces) for p in points]


def print_commands(commands: Iterable[Sequence[str]]) -> None:
    """Print each command once, for --dry-run."""
    for command in dict.fromkeys(map(redaction.format_command_line, commands)):
        print_stderr(command)


def check_programs(engine: Engine, commands: Iterable[Sequence[str]]) -> None:
    """Raise MissingPackageError if a program of the engine's commands is not on PATH."""
    for program in dict.fromkeys(command[0] for command in commands):
        if shutil.which(program, path=engine.env.get("PATH")) is None:
            raise MissingPackageError(
                f"{engine.name} cannot be started: there is no program {program} here; install it, or begin PATH with the "
                "folder that holds it."
            )
