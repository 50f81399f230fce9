"""Parse options and report errors of tools with subcommands."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from dcpbench.errors import DcpbenchError

if TYPE_CHECKING:
    from collections.abc import Callable


def parse_count(text: str) -> int:
    """Parse a positive whole number. Raise ArgumentTypeError for other text."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def report_errors(run: Callable[[], int]) -> int:
    """Run a command; return its exit code. Print an error of dcpbench, and return the exit code of the error."""
    try:
        return run()
    except DcpbenchError as e:
        sys.stderr.write(f"{e}\n")
        return int(e.exit_code)
