"""Which tensors stay on the host where no device is named: those that go to a name ending in `_cpu`."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST_NAME = re.compile(r"_cpu(_[A-Z]+)?$")
"""`lens_cpu`, and with letters for its shape: `lens_cpu_R`."""


def assigned_to_host(file: str, line: int) -> bool:
    """Whether the statement on a line assigns to a name for host memory, or passes such an argument.

    Args:
        file: As in a frame, also of a notebook's cell; unknown files say no.
        line: Any line of the statement.
    """
    return any(first <= line <= last for first, last in _host_lines(file))


@functools.cache
def _host_lines(file: str) -> tuple[tuple[int, int], ...]:
    """First and last line of every such assignment or argument."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(_spans(tree))


def _spans(tree: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            to_host = any(_is_host(target) for target in node.targets)
        elif isinstance(node, ast.AnnAssign):
            to_host = _is_host(node.target)
        else:
            to_host = isinstance(node, ast.keyword) and bool(node.arg and HOST_NAME.search(node.arg))
        value = getattr(node, "value", None) if to_host else None
        if value is not None:
            yield value.lineno, value.end_lineno or value.lineno


def _is_host(target: ast.expr) -> bool:
    name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
    return bool(HOST_NAME.search(name))
