"""Print and check the commands of servers that dcpbench starts, for `server` and `sweep`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from dcpbench.errors import MissingPackageError
from dcpbench.plan.option_parsers import check_seconds
from dcpbench.points import redaction
from dcpbench.show.terminal import print_stderr

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.plan.grid import Candidate
    from dcpbench.points.structured_options import Timeout
    from dcpbench.servers.presets import Engine


START_S = 1800.0  # default time after which a server that accepts no requests has failed
REQUEST_S = 600.0  # default time without a token after which a request has failed


def get_start_s(limits: Timeout | None) -> float:
    """Return the time after which a server that accepts no requests has failed."""
    return START_S if limits is None or limits.start is None else limits.start


def get_request_s(limits: Timeout | None) -> float:
    """Return the time without a token after which a request has failed."""
    return REQUEST_S if limits is None or limits.stall is None else limits.stall


def check_server_limits(limits: Timeout | None) -> None:
    """Raise UsageError for a time limit of a server that is not positive."""
    check_seconds("--timeout", get_request_s(limits), int(REQUEST_S))
    check_seconds("--timeout start", get_start_s(limits), int(START_S))


def print_commands(candidates: Sequence[Candidate], engine: Engine, model: str, traces: str) -> None:
    """Print the command of each server, for --dry-run."""
    points = [candidate.point for candidate in candidates if candidate.error is None]
    commands = (engine.make_command(p, engine.find_settings(p), model, 0, traces=traces) for p in points)
    for command in dict.fromkeys(map(redaction.format_command_line, commands)):
        print_stderr(command)


def check_program(candidates: Sequence[Candidate], engine: Engine, model: str) -> None:
    """Raise MissingPackageError if the program of the engine's command is not on PATH."""
    point = next((candidate.point for candidate in candidates if candidate.error is None), None)
    if point is None:
        return
    program = engine.make_command(point, engine.find_settings(point), model, 0)[0]
    if shutil.which(program, path=engine.env.get("PATH")) is None:
        raise MissingPackageError(
            f"{engine.name} cannot be started: there is no program {program} here; install it, or begin PATH with the "
            "folder that holds it."
        )
