"""Explain which parts of a program a dry run did not see and cannot judge, each with the command to use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.syncs.site_text import format_names

if TYPE_CHECKING:
    from collections.abc import Collection

    from dcpbench.syncs.sync_report import ChildProcess, TraceSummary


def explain_unseen_parts(trace: TraceSummary, known: Collection[str] = ()) -> list[str]:
    """Return a sentence for each kind of part that was not seen; `known` are unmeasured operators that a baseline accepts."""
    return [*_explain_children(trace), *_explain_operators(trace, known)]


def _explain_children(trace: TraceSummary) -> list[str]:
    children = [child for child in trace.coverage.children if child.may_use_gpu]
    if not children:
        return []
    named = format_names([format_child(child) for child in children])
    sentence = (
        f"{trace.path} started processes that could not be followed, so their waits are not known: {named}. Python "
        "processes are followed if they inherit PYTHONPATH and end by themselves. Well-known programs, such as git, are "
        "harmless; a shell script or another program may start anything. Let the program do their work in its own "
        "process, or use `dcpbench syncs run` on a GPU."
    )
    return [sentence]


def _explain_operators(trace: TraceSummary, known: Collection[str]) -> list[str]:
    unknown = [name for name in trace.coverage.unmeasured if name not in known]
    if not unknown:
        return []
    sentence = (
        f"{trace.path} uses operators of which it was never measured whether they wait, so a dry run counts none of their "
        f"waits: {format_names(unknown)}. Use `dcpbench syncs run` on a GPU, or accept them with "
        f"`dcpbench syncs dry-run --write-baseline FILE -- {trace.path}` and give --baseline FILE from then on."
    )
    return [sentence]


def format_child(child: ChildProcess) -> str:
    """Return the process in words: `process 71 (python worker.py, subprocess: it still runs)`."""
    pid = "" if child.pid is None else f" {child.pid}"
    reason = f": {child.reason}" if child.reason else ""
    return f"process{pid} ({child.command}, {child.start_method}{reason})"
