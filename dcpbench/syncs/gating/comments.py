"""Read permissions in the source itself: `# dcpbench: allow-sync(reason)` on the line that synchronises, or on its
function.

A trace often has only the line where a function begins. Then a comment counts on a line that can make the call, as its source
shows; without its source anywhere in the function, but not in functions inside it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import io
import re
import tokenize
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from dcpbench.syncs.sync_report import Site

COMMENT = re.compile(  # the reason may contain brackets, and ends before a further comment
    r"#\s*dcpbench:\s*allow-sync\b(?:\s*\((?P<reason>(?:(?!\)\s*#).)*)\))?"
)
MAX_SOURCE_BYTES = 4 << 20  # maximum bytes of a source file; a larger one was made by a program
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Note(NamedTuple):
    """Hold a comment that belongs to a site."""

    line: int
    reason: str  # reason of the comment; empty if it has none, and then it allows nothing


@dataclasses.dataclass(frozen=True)
class _Source:
    notes: dict[int, Note]  # comments by line
    alone: set[int]  # lines that hold nothing but a comment
    tree: ast.Module | None  # syntax tree; None if this interpreter cannot parse the file

    @functools.cached_property
    def beginning(self) -> dict[int, list[Function]]:
        """Return the functions that begin on a line: that of `def`, or that of the first decorator."""
        return _group_by_line(self._list_functions(), lambda f: {get_first_line(f), f.lineno})

    @functools.cached_property
    def around(self) -> dict[int, list[Function]]:
        """Return the functions around a line, from the outside in."""
        return _group_by_line(self._list_functions(), _get_lines)

    @functools.cached_property
    def statements(self) -> dict[int, tuple[int, int]]:
        """Return the first and the last line of the statement around a line; of a compound statement the part before its body."""
        found: dict[int, tuple[int, int]] = {}
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.stmt):
                body = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
                last = max(node.lineno, body[0].lineno - 1) if body else _get_last_line(node)
                found |= dict.fromkeys(range(node.lineno, last + 1), (node.lineno, last))  # ast.walk goes inwards
        return found

    def _list_functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)] if self.tree else []


class Comments:
    """Read the comments of the repository at `root`; each file is read once.

    `other_source` is True if the lines of calls are those of another version of the source.
    """

    def __init__(self, root: Path, *, other_source: bool = False) -> None:
        self._source = functools.cache(functools.partial(_read_source, root))
        self._other_source = other_source

    def find_comment(self, site: Site) -> Note | None:
        """Return the comment that allows the site; None if there is no file, line or comment."""
        source = self._source(site.file) if site.file and site.line is not None else None
        if source is None or site.line is None or not source.notes:
            return None
        calls = [] if self._other_source else [call.line for call in site.call_lines]
        calls = [site.line] if site.line_is == "call" else calls
        lines = [n for line in calls for n in _list_call_lines(source, line)] or _list_function_lines(source, site.line)
        found = [source.notes[line] for line in lines if line in source.notes]
        return next((note for note in found if note.reason), found[0] if found else None)


def parse_source(path: Path, root: Path | None = None) -> tuple[str, ast.Module | None] | None:
    """Return the text of a Python file and its syntax tree, None if this interpreter cannot parse it; None without a readable file.

    Files of more than MAX_SOURCE_BYTES are not read, nor files outside `root`.
    """
    try:
        if root is not None and not path.resolve().is_relative_to(root.resolve()):
            return None
        if not path.is_file() or path.stat().st_size > MAX_SOURCE_BYTES:
            return None
        with tokenize.open(path) as file:
            text = file.read()
    except (OSError, SyntaxError, ValueError):
        return None
    try:
        return text, ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text, None


def _read_source(root: Path, file: str) -> _Source | None:
    """Return comments and syntax of a file; None if it is not in the repository or cannot be read."""
    parsed = parse_source(root / file, root)
    if parsed is None:
        return None
    text, tree = parsed
    source = _Source({}, set(), tree)
    with contextlib.suppress(tokenize.TokenError, SyntaxError):  # what was read up to there still counts
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type != tokenize.COMMENT:
                continue  # also a string that looks like one
            line, column = token.start
            if not token.line[:column].strip():
                source.alone.add(line)
            found = COMMENT.search(token.string)
            if found:
                source.notes[line] = Note(line, (found["reason"] or "").strip())
    return source


def _list_function_lines(source: _Source, line: int) -> list[int]:
    """Return the lines on which a comment would apply to all calls of a function that begins on this line.

    Lambdas and functions may share a line; the trace does not show which of them it was.
    """
    if source.tree is None:
        return [line]
    return [
        n
        for f in source.beginning.get(line, [])
        for n in (*_list_comments_above(source, get_first_line(f)), *_list_own_lines(f))
    ]


def _list_call_lines(source: _Source, line: int) -> list[int]:
    """Return the lines on which a comment would apply to a call on this line: those of its statement and of its functions' heads."""
    if source.tree is None:
        return [line]
    around = source.around.get(line, [])
    headers = [n for f in around for n in (*_list_comments_above(source, get_first_line(f)), *_get_header_lines(f))]
    first, last = source.statements.get(line, (line, line))
    return [*range(first, last + 1), *_list_comments_above(source, first), *headers]


def _list_comments_above(source: _Source, line: int) -> list[int]:
    """Return the comment lines directly above a line."""
    found = []
    while line - 1 in source.alone:
        line -= 1
        found.append(line)
    return found


def _get_header_lines(function: Function) -> range:
    """Return the lines of decorators and signature; for a lambda all of it."""
    if isinstance(function, ast.Lambda):
        return range(function.lineno, _get_last_line(function) + 1)
    return range(get_first_line(function), function.body[0].lineno)


def _list_own_lines(function: Function) -> list[int]:
    """Return the lines of a function without those of the functions defined in it."""
    inner = (f for f in ast.walk(function) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef))
    nested = {n for f in inner if get_first_line(f) > get_first_line(function) for n in _get_lines(f)}
    return [n for n in _get_lines(function) if n not in nested]


def _get_lines(function: Function) -> range:
    """Return the lines of a function with its decorators."""
    return range(get_first_line(function), _get_last_line(function) + 1)


def _group_by_line(
    functions: Iterable[Function], list_lines: Callable[[Function], Iterable[int]]
) -> dict[int, list[Function]]:
    found: dict[int, list[Function]] = {}
    for function in functions:
        for line in list_lines(function):
            found.setdefault(line, []).append(function)
    return found


def get_first_line(function: Function) -> int:
    """Return Python's `co_firstlineno`: the first decorator's line, if there is one."""
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return min([function.lineno, *(d.lineno for d in decorators)])


def _get_last_line(node: ast.stmt | Function) -> int:
    return node.end_lineno or node.lineno
