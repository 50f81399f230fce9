"""Find the lines of a function that can make a blocking call, from its source. No torch.

Traces name the function that waits, not the line. Its source has the syntax that makes the call: a method by the name of the
frame below the function (`item`, `nonzero`), else an index, a condition, a conversion or an operator, by the operator that
torch recorded. Several lines may fit. Nested functions are functions of their own.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dcpbench.show.text import fit_text
from dcpbench.syncs.gating.comments import Function, get_first_line, parse_source
from dcpbench.syncs.sync_report import CallLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from dcpbench.syncs.sync_report import Report, Site

MAX_TEXT_CHARS = 200  # of a line that is kept
MODULE = "<module>"
BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)")
FRAME = re.compile(r"\(\d+\): (.+)$")
NUMBERS = ("int", "float", "complex", "range", "round")  # calls that take a tensor's value without a frame in a trace
NAMESPACES = ("linalg_", "fft_", "special_")
SHOWING = ("print", "str", "repr", "format")
ITERATING = ("list", "tuple", "set", "sorted", "zip", "enumerate", "sum", "max", "min", "any", "all", "map", "reversed")
CONVERTING = ("asarray", "array", "ascontiguousarray", "stack", "concatenate")
OPERATORS: dict[str, tuple[type[ast.AST], ...]] = {  # operators of torch that Python's operators call
    "add": (ast.Add,),
    "sub": (ast.Sub,),
    "rsub": (ast.Sub,),
    "mul": (ast.Mult,),
    "div": (ast.Div,),
    "floor_divide": (ast.FloorDiv,),
    "remainder": (ast.Mod,),
    "pow": (ast.Pow,),
    "matmul": (ast.MatMult,),
    "eq": (ast.Eq,),
    "ne": (ast.NotEq,),
    "lt": (ast.Lt,),
    "le": (ast.LtE,),
    "gt": (ast.Gt,),
    "ge": (ast.GtE,),
    "neg": (ast.USub,),
    "bitwise_not": (ast.Invert,),
    "bitwise_and": (ast.BitAnd,),
    "bitwise_or": (ast.BitOr,),
    "bitwise_xor": (ast.BitXor,),
}
RUNTIME_CALLS = {  # names of Python calls that make a call of the runtime without an operator
    "cudaDeviceSynchronize": ("synchronize",),
    "cudaStreamSynchronize": ("synchronize",),
    "cudaEventSynchronize": ("synchronize", "wait"),
    "cudaFree": ("empty_cache",),
    "cudaHostAlloc": ("pin_memory",),
}


@dataclasses.dataclass(frozen=True)
class SourceText:
    """A parsed source file."""

    lines: list[str]
    tree: ast.Module

    @functools.cached_property
    def functions(self) -> dict[tuple[str, int], Function]:
        """Return the functions by name and line: that of `def` and that of the first decorator; of several the outermost."""
        found: dict[tuple[str, int], Function] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
                for line in (get_first_line(node), node.lineno):
                    found.setdefault((name, line), node)
        return found


def add_call_lines(report: Report, folders: Sequence[Path]) -> list[str]:
    """Set `call_lines` of all sites if their source is found in one of the folders, or at the path that the trace has.

    Return the files with functions that begin on other lines than in the trace: their source is of another version.
    """
    known: dict[str, SourceText | None] = {}
    other: list[str] = []
    for site in report.sites:
        if site.line_is != "function" or site.line is None or site.own:
            continue
        if site.file not in known:
            known[site.file] = read_source(site.file, folders)
        source = known[site.file]
        if source is None:
            continue
        function = find_function(source, site.function, site.line)
        if function is None:
            other.append(site.file)
            continue
        site.call_lines = find_call_lines(source, function, site)
    return list(dict.fromkeys(other))


def read_source(file: str, folders: Sequence[Path]) -> SourceText | None:
    """Return the source of a file: at its own path, below one of the folders, or there by the longest end of its path.

    Return None if there is none, or if this interpreter cannot parse it.
    """
    for path in _iter_places(file, folders):
        text, tree = parse_source(path) or ("", None)
        if tree is not None:
            return SourceText(text.split("\n"), tree)  # not splitlines, which also splits at form feeds
    return None


def _iter_places(file: str, folders: Sequence[Path]) -> Iterator[Path]:
    parts = Path(file.replace("\\", "/")).parts
    if not file or file.startswith("<"):
        return
    for folder in folders:
        relative = [part for part in parts if part not in ("/", "..", ".")]
        for begin in range(len(relative)):
            yield folder.joinpath(*relative[begin:])
    if Path(file).is_absolute():
        yield Path(file)


def find_function(source: SourceText, name: str, line: int) -> ast.Module | Function | None:
    """Return the function of this name that begins at a line, where its first decorator counts; None if there is none."""
    return source.tree if name == MODULE else source.functions.get((name, line))


def find_call_lines(source: SourceText, function: ast.Module | Function, site: Site) -> list[CallLine]:
    """Return the lines that can make the site's blocking call, in the order of the source."""
    nodes = list(_walk_body(function))
    for find in _list_rules(site):
        found = {line for node in nodes for line in find(node)}
        if found:
            return [
                CallLine(line=line, text=fit_text(source.lines[line - 1].strip(), MAX_TEXT_CHARS))
                for line in sorted(found)
            ]
    return []


def _walk_body(function: ast.Module | Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    body = function.body if isinstance(function.body, list) else [function.body]
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            waiting += node.decorator_list
        elif not isinstance(node, ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _list_rules(site: Site) -> list[Callable[[ast.AST], Iterable[int]]]:
    """Return the ways to find lines, the most specific first; the first one that finds any decides."""
    below = _list_names_below(site)
    operators = [_get_operator_name(op) for op in site.op_chain]
    calls = [rule for name in (*operators, *RUNTIME_CALLS.get(site.call, ())) for rule in _make_call_rules(name, site)]
    syntax = [rule for name in operators for rule in _make_syntax_rules(name, site)]
    if not below:  # without a frame below the function, its syntax makes the call
        return [*syntax, *calls]
    return [*(rule for name in below for rule in _make_call_rules(name, site)), *calls, *syntax]


def _list_names_below(site: Site) -> list[str]:
    """Return the names of the frames below the site's function, outermost first; empty if there is none."""
    at = [i for i, frame in enumerate(site.stack) if _is_frame_of(frame, site)]
    below = site.stack[at[-1] + 1 :] if at else []
    return [match[1] for frame in below if (match := BUILT_IN.match(frame) or FRAME.search(frame))]


def _is_frame_of(frame: str, site: Site) -> bool:
    match = FRAME.search(frame)
    return match is not None and match[1] == site.function and f"{Path(site.file).name}({site.line})" in frame


def _get_operator_name(op: str) -> str:
    """Return `unique` for `aten::_unique2`, and `index_put` for `aten::index_put_`."""
    name = re.sub(r"\d+$", "", op.rpartition("::")[2].strip("_")).removesuffix("_impl")
    return name.rstrip("_")


def _make_call_rules(name: str, site: Site) -> list[Callable[[ast.AST], Iterable[int]]]:
    """Return rules for a call of `name`; the first one also looks at its arguments."""
    special = {
        "__format__": (_find_formatted, _find_calls(SHOWING)),
        "__repr__": (_find_calls(SHOWING), _find_formatted),
        "__str__": (_find_calls(SHOWING), _find_formatted),
        "__contains__": (_find_membership,),
        "__iter__": (_find_iteration, _find_calls(ITERATING)),
        "__array__": (_find_calls(CONVERTING),),
        "__getitem__": (_find_subscripts(store=False),),
        "__setitem__": (_find_subscripts(store=True),),
    }
    if name in special:
        return list(special[name])
    bare = name.rpartition("_")[2] if name.startswith(NAMESPACES) else name  # torch.linalg.inv is linalg_inv
    calls = _find_calls((name, f"{name}_", bare))

    def find_fitting(node: ast.AST) -> Iterable[int]:
        return calls(node) if isinstance(node, ast.Call) and _fits_direction(node, site.direction) else ()

    return [find_fitting, calls]


def _fits_direction(call: ast.Call, direction: str) -> bool:
    """Return False if a call's arguments name the CPU and the copy goes to the GPU, or the GPU and it goes to the host."""
    texts = [
        node.value
        for argument in [*call.args, *(word.value for word in call.keywords)]
        for node in ast.walk(argument)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    if direction.startswith("DtoH"):
        return not any(text.startswith(("cuda", "xpu", "hip")) for text in texts)
    if direction.startswith("HtoD"):
        return not any(text.startswith("cpu") for text in texts)
    return True


def _find_calls(names: Sequence[str]) -> Callable[[ast.AST], Iterable[int]]:
    def find(node: ast.AST) -> Iterable[int]:
        if not isinstance(node, ast.Call):
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr in names:
            yield node.func.end_lineno or node.lineno
        elif isinstance(node.func, ast.Name) and node.func.id in names:
            yield node.lineno

    return find


def _make_syntax_rules(name: str, site: Site) -> list[Callable[[ast.AST], Iterable[int]]]:
    """Return rules for syntax that calls an operator of torch without a separate frame."""
    if name in OPERATORS:
        return [_find_operators(OPERATORS[name])]
    load, store = _find_subscripts(store=False), _find_subscripts(store=True)
    rules: dict[str, list[Callable[[ast.AST], Iterable[int]]]] = {
        "is_nonzero": [_find_conditions],
        "item": [_find_numbers, _find_conditions, load],
        "local_scalar_dense": [_find_numbers, _find_conditions, load],
        "index": [load],
        "index_put": [store],
        "copy": [store],
        "unbind": [_find_iteration],
        "select": [_find_iteration],
    }
    if site.direction.startswith("HtoD"):
        rules |= {"to": [_find_list_indices, store], "to_copy": [_find_list_indices, store]}
    return rules.get(name, [])


def _find_operators(kinds: tuple[type[ast.AST], ...]) -> Callable[[ast.AST], Iterable[int]]:
    def find(node: ast.AST) -> Iterable[int]:
        if (isinstance(node, ast.BinOp | ast.UnaryOp | ast.AugAssign) and isinstance(node.op, kinds)) or (
            isinstance(node, ast.Compare) and any(isinstance(op, kinds) for op in node.ops)
        ):
            yield node.lineno

    return find


def _find_conditions(node: ast.AST) -> Iterable[int]:
    """Yield the lines of tests that may ask a tensor whether it is true."""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        tests = [node.test]
    elif isinstance(node, ast.BoolOp):
        tests = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        tests = [node.operand]
    elif isinstance(node, ast.comprehension):
        tests = node.ifs
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("bool", "any", "all"):
        tests = node.args[:1]
    elif isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
        tests = [node]
    yield from (test.lineno for test in tests if _may_be_tensor(test))


def _may_be_tensor(test: ast.expr) -> bool:
    """Return False for tests with a result that is no tensor, such as `x is None`, and for those that are tested part by part."""
    if isinstance(test, ast.BoolOp | ast.Constant | ast.JoinedStr | ast.List | ast.Tuple | ast.Dict):
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return False
    if isinstance(test, ast.Compare):
        if all(isinstance(op, ast.Is | ast.IsNot) for op in test.ops):
            return False
        sides = [test.left, *test.comparators]
        return not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Name):
        return test.func.id not in ("isinstance", "hasattr", "callable", "issubclass", "len")
    return True


def _find_numbers(node: ast.AST) -> Iterable[int]:
    """Yield the lines that need a tensor's value as a number: conversions, and ends of slices."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
        if any(not isinstance(argument, ast.Constant) for argument in node.args):
            yield node.lineno
    elif isinstance(node, ast.Slice):
        ends = [end for end in (node.lower, node.upper, node.step) if end is not None]
        yield from (end.lineno for end in ends if not _is_number(end))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _find_subscripts(*, store: bool) -> Callable[[ast.AST], Iterable[int]]:
    def find(node: ast.AST) -> Iterable[int]:
        targets: list[ast.AST] = []
        if store and isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign):
            targets = [node.target]
        elif not store and isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            targets = [node]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(part, ast.Subscript) and (store or _may_gather(part.slice)):
                    yield part.value.end_lineno or part.lineno

    return find


def _may_gather(index: ast.expr) -> bool:
    """Return False for an index that only selects or slices: numbers, slices, None, `...` and texts."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    return any(not isinstance(part, ast.Slice) and not _is_number(part) for part in parts)


def _find_list_indices(node: ast.AST) -> Iterable[int]:
    if isinstance(node, ast.Subscript) and any(isinstance(part, ast.List) for part in ast.walk(node.slice)):
        yield node.value.end_lineno or node.lineno


def _find_formatted(node: ast.AST) -> Iterable[int]:
    if isinstance(node, ast.FormattedValue):
        yield node.lineno


def _find_membership(node: ast.AST) -> Iterable[int]:
    if isinstance(node, ast.Compare) and any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
        yield node.lineno


def _find_iteration(node: ast.AST) -> Iterable[int]:
    if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
        yield node.iter.lineno
    elif isinstance(node, ast.Starred):
        yield node.lineno
