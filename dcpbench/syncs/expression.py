"""What a line of Python is doing just now: the name of the call in it that has not returned. No torch here.

An operator's own name says less than the call does: `one_hot` ends in `_local_scalar_dense` as `item` does, and what
other threads do is known by nothing else.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

SUBSCRIPT, UNKNOWN = "[]", "?"


def call_name(frame: FrameType) -> str:
    """Bare name of the function that `frame` is calling, `[]` for an index, nothing for all else.

    `x.max().item()` waiting in item gives `item`; `if t:` gives nothing, and source that cannot be read gives `?`.
    """
    node = _expression(frame)
    if node is None:
        return UNKNOWN
    if isinstance(node, ast.Subscript):
        return SUBSCRIPT
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _expression(frame: FrameType) -> ast.expr | None:
    """The expression whose instruction is being executed; an assignment to an index counts as its target."""
    if frame.f_lasti < 0:
        return None
    instructions = frame.f_code.co_positions()
    line, end_line, start, end = next(itertools.islice(instructions, frame.f_lasti // 2, None), (None,) * 4)
    if line is None or end_line is None or start is None or end is None:
        return None
    text = [linecache.getline(frame.f_code.co_filename, n, frame.f_globals) for n in range(line, end_line + 1)]
    source = [part.encode() for part in text]
    if not all(source):
        return None
    source[-1] = source[-1][:end]
    source[0] = source[0][start:]
    try:
        return ast.parse(b"(" + b"".join(source) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
