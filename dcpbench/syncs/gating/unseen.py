"""Parts of a program that a dry run did not see, for which it cannot answer; each with what to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcpbench.syncs.model import ChildProcess, TraceSummary

MAX_NAMED = 5  # processes and operators that a sentence names


def unseen_parts(trace: TraceSummary) -> list[str]:
    """Return a sentence for each kind of part that was not seen."""
    children = [child for child in trace.coverage.children if child.may_use_gpu]
    if not children:
        return []
    named = _named([format_child(child) for child in children])
    sentence = (
        f"{trace.path} started processes that a dry run does not follow, so their waits are not known: {named}. They "
        "have no virtual GPU unless they were forked. Let the program do their work in its own process (a "
        "DataLoader with num_workers=0, an engine without worker processes), or use `dcpbench syncs run` on a GPU."
    )
    return [sentence]


def format_child(child: ChildProcess) -> str:
    """Return the process in words: `process 71 (python worker.py, subprocess)`."""
    pid = "" if child.pid is None else f" {child.pid}"
    return f"process{pid} ({child.command}, {child.start_method})"


def _named(names: list[str]) -> str:
    left = len(names) - MAX_NAMED
    return ", ".join([*names[:MAX_NAMED], *([f"and {left} more"] if left > 0 else [])])
