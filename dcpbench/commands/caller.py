"""Describe the command that calls another one: `ab` runs sweeps as parts of its own run, and `submit` checks commands for other machines."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.points.device_probe import Probe


@dataclasses.dataclass
class Part:
    """Describe a run inside another command, which prints the start, the way to resume and the results itself."""

    what: str = "points"  # label of what the progress bar counts
    devices: set[str] = dataclasses.field(default_factory=set)  # devices on which it runs, once they are known


@dataclasses.dataclass(frozen=True)
class PlannedMachine:
    """Describe the machine for which a command is only validated: it runs nothing and contacts no server."""

    probe: Probe
    nodes: int = 1  # number of such machines
    points: bool = True  # True if everything that points depend on is known; else only option values are checked
    layouts: bool = True  # True if the divisibility of degrees is checked as well when `points` is False


@dataclasses.dataclass(frozen=True)
class Caller:
    """Describe the command that runs this one; the default is a user's command line."""

    part: Part | None = None  # set if this run is part of the caller's
    elsewhere: PlannedMachine | None = None  # set if the command is only validated, for this machine
    argv: tuple[str, ...] = ()  # command and its arguments, without secrets; errors repeat them with other options
