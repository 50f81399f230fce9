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
    source = _source(frame)
    if source is None:
        return UNKNOWN
    try:
        node = ast.parse(b"(" + source + b")", mode="eval").body
    except (SyntaxError, ValueError):
        # A whole statement: a call would be an expression.
        return ""
    if isinstance(node, ast.Subscript):
        return SUBSCRIPT
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _source(frame: FrameType) -> bytes | None:
    """The text of what is being executed; for an assignment to an index, its target."""
    if frame.f_lasti < 0:
        return None
    instructions = frame.f_code.co_positions()
    line, end_line, start, end = next(itertools.islice(instructions, frame.f_lasti // 2, None), (None,) * 4)
    if line is None or end_line is None or start is None or end is None:
        return None
    text = [linecache.getline(frame.f_code.co_filename, n, frame.f_globals) for n in range(line, end_line + 1)]
    lines = [part.encode() for part in text]
    if not all(lines):
        return None
    # Columns count bytes, and the last line is cut first, as it may be the first one, too.
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    return b"".join(lines)
