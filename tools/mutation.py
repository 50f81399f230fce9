"""Change lines of the subpackages without GPU code, one at a time, and check whether a test fails: mutation tests by cosmic-ray.

    pip install -e '.[mutation]'
    python -m tools.mutation cover --data covered.sqlite              # record which test runs which line; a quarter of an hour
    python -m tools.mutation run --data covered.sqlite --mutants 500 --seed 0 --out mutants.jsonl
    python -m tools.mutation run --data covered.sqlite --again mutants.jsonl --out mended.jsonl

A mutant is tried with the tests that run its line, quick and specific ones first, until one fails. Changes inside a function are
applied in a fork of a process that has collected the suite. Changes of code that runs at import (constants, classes) are loaded in a fork
of a process that has not imported the package. A failure, a timeout or the end of the process counts only if the same tests in the same
order pass without the change; otherwise that test is not used again. Tests with the marks `long`, `distributed` and `browser` start
processes and are excluded, so lines that only they run are not reached. Mutants in tools/mutation_equivalents.txt, which no test can
detect, are left out of the score, and so are mutants whose line no longer exists: `--again` repeats the mutants of a file with the present
tests and lines. Exit code 1: tests detect fewer than 90 % of the mutants.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import functools
import gc
import hashlib
import importlib
import importlib.abc
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import types
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection
    from types import CodeType, ModuleType

ROOT = Path(__file__).parents[1]
EQUIVALENTS = Path(__file__).with_name("mutation_equivalents.txt")
SUBPACKAGES = (
    *("compare", "dashboard", "doctor", "exports", "hangs", "imports", "launch", "plan", "points", "recommend"),
    *("records", "reports", "servers", "serving", "show", "syncs", "top"),
)
EXCLUDED = (
    "syncs/dry_run",
    "syncs/live",
    "syncs/recorder",
    "launch/subprocess_guard.py",
)  # files that run in other programs
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv|Mod)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue|AddNot|ReplaceUnaryOperator_.*"
    r"|NumberReplacer|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ExceptionReplacer)"
)
SUITE = ("tests/unit", "tests/cli", "tests/servers")
QUICK_MARKS = "not long and not browser and not soak and not gpu and not distributed"
LIBRARIES = (  # libraries that are imported before any fork
    "hypothesis",
    "jsonschema",
    "matplotlib.pyplot",
    "pandas",
    "pyarrow.parquet",
    "pytest",
    "rich",
    "torch",
    "typer",
)
PYTEST = ("-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov", "--assert=plain")
"""Options of pytest. Assertions are plain, because their rewriting loads the package, which has a pytest plugin."""
MAX_TESTS_S, LONG_S = 60, 1
"""Maximum total time in s of a mutant's tests, as measured by `cover`. Half is for quick and specific tests, with tests that took longer
than LONG_S at the end, and half for tests that run the most lines per second.
"""
START_S, TEST_S, TIMES = 120, 20, 10  # limits: s until the first test, s of one test, and factor over its measured time
SEEN, SURVIVED, EQUIVALENT, NOT_REACHED, GONE = "seen", "survived", "equivalent", "not reached", "gone"
MIN_SCORE = 0.9
PASSED, FAILED, UNREADABLE, LONG, DIED, BROKEN = (
    "passed",
    "failed",
    "could not import",
    "took too long in",
    "ended in",
    "broke",
)
LOG_VARIABLE = "DCPBENCH_MUTATION_LOG"  # environment variable with a file for the output of the tests


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Hold one change of a line."""

    path: str
    operator: str
    occurrence: int
    line: int
    was: str
    now: str
    first: int | None = None  # value of `occurrence` at the first run, as later changes of the file may have moved it

    @property
    def name(self) -> str:
        """Return the name in the list of equivalents, without the line number, which may change."""
        return f"{self.path}: {self.was.strip()} => {self.now.strip()}"

    @property
    def source(self) -> str:
        """Return the text of the unchanged file."""
        return (ROOT / self.path).read_text(encoding="utf-8")

    @property
    def code(self) -> str:
        """Return the text of the file with the change."""
        from cosmic_ray import plugins
        from cosmic_ray.mutating import mutate_code

        return str(mutate_code(self.source, plugins.get_operator(self.operator)(), self.occurrence))


class Ended(NamedTuple):
    """Hold how a run of tests ended, and in which test."""

    how: str
    test: str


# Selection of the changes


def list_files() -> list[str]:
    """Return the paths of all files that are mutated."""
    found = [
        file.relative_to(ROOT)
        for subpackage in SUBPACKAGES
        for file in sorted((ROOT / "dcpbench" / subpackage).rglob("*.py"))
    ]
    return [str(f) for f in found if not any(str(f).startswith(f"dcpbench/{part}") for part in EXCLUDED)]


def find_places(paths: Iterable[str], kept: Path) -> list[tuple[str, str, int, int]]:
    """Return the file, operator, occurrence and line of every possible change. `kept` caches them, as a file takes a second."""
    cache = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    found = []
    for path in paths:
        name = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        if name not in cache:
            cache[name] = _find_places_in(path)
        found += [(path, *place) for place in cache[name]]
    kept.write_text(json.dumps(cache), encoding="utf-8")
    return found


def _find_places_in(path: str) -> list[tuple[str, int, int]]:
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / path).read_text(encoding="utf-8")
    never = _find_unevaluated_lines(source)
    nodes = list(ast_nodes(get_ast(source)))
    found: list[tuple[str, int, int]] = []
    for name in (n for n in plugins.operator_names() if OPERATORS.fullmatch(n)):
        operator = plugins.get_operator(name)()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [(name, n, line) for n, (line, _) in enumerate(starts) if line not in never]
    return found


def iter_mutants(found: Iterable[tuple[str, str, int, int]]) -> Iterator[Mutant]:
    """Yield the changes at these places that are valid Python and change the compiled code."""
    for place in found:
        bare = Mutant(*place, "", "")
        try:
            pairs = itertools.zip_longest(bare.source.splitlines(), bare.code.splitlines(), fillvalue="")
            changed = next(((a, b) for a, b in pairs if a != b), None)
            if changed and find_changed_functions(bare) != []:
                yield Mutant(*place, *changed)
        except (
            SyntaxError,
            AttributeError,
        ):  # AttributeError: cosmic-ray cannot replace an exception whose name has a dot
            continue


def draw_mutants(seed: int, only: str, kept: Path) -> Iterator[Mutant]:
    """Yield every change once, in a seeded random order."""
    found = find_places((path for path in list_files() if only in path), kept)
    random.Random(seed).shuffle(found)
    return iter_mutants(found)


def repeat_mutants(paths: Iterable[Path], kept: Path) -> Iterator[Mutant]:
    """Yield the mutants in files of `run` at their present lines, or with line 0 if they no longer exist."""
    here = list_files()
    for row in read_rows(paths):
        known: dict[str, Any] = {field.name: row.get(field.name) for field in dataclasses.fields(Mutant)}
        old = Mutant(**known)
        old = dataclasses.replace(old, first=old.occurrence if old.first is None else old.first)
        same = [place for place in find_places({old.path} & set(here), kept) if place[1] == old.operator]
        new = [m for m in iter_mutants(same) if (m.was, m.now) == (old.was, old.now)]
        if new:
            yield dataclasses.replace(min(new, key=lambda m: abs(m.line - old.line)), first=old.first)
        else:
            yield dataclasses.replace(old, line=0)


def read_rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return all rows of files that `run` wrote."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def _find_unevaluated_lines(source: str) -> set[int]:
    """Return the lines of annotations and of imports under TYPE_CHECKING, which are never evaluated."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        spans = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            spans.append(node)
        for span in spans:
            if isinstance(span, ast.expr | ast.stmt):
                found |= set(range(span.lineno, (span.end_lineno or span.lineno) + 1))
    return found


def find_changed_functions(mutant: Mutant) -> list[tuple[CodeType, CodeType]] | None:
    """Return the functions before and after a change, inner ones last; None if code differs that runs at import."""
    old, new = (compile(c, str(ROOT / mutant.path), "exec", dont_inherit=True) for c in (mutant.source, mutant.code))
    return _find_differing(old, new)


RUN_AT_DEFINITION = (
    "<listcomp>",
    "<setcomp>",
    "<dictcomp>",
    "<genexpr>",
)  # functions that run where they are defined, so perhaps at import


def _find_differing(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (old, new)]
    function = bool(old.co_flags & 1)  # CO_OPTIMIZED: neither a module nor the body of a class
    own = [(old, new)]
    if len(inner[0]) != len(inner[1]) or _get_behaviour(old) != _get_behaviour(new):
        return own if function else None
    found: list[tuple[CodeType, CodeType]] = []
    for pair in zip(*inner, strict=True):
        differ = _find_differing(*pair)
        if differ is None or (differ and pair[0].co_name in RUN_AT_DEFINITION and not function):
            return own if function else None
        found += differ
    return own + found if found and function else found


def _get_behaviour(code: CodeType) -> tuple[object, ...]:
    """Return the parts of a code object that determine its behaviour, without nested code and positions."""
    constants = tuple(isinstance(c, types.CodeType) or repr(c) for c in code.co_consts)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, constants, names, code.co_exceptiontable, code.co_flags


# Selection of the tests


class Suite(NamedTuple):
    """Hold the time of each test that passed in `cover`."""

    seconds: dict[str, float]

    def get_limit_s(self, test: str) -> float:
        """Return the time limit of a test in s; for an empty name, the limit until the first test."""
        return max(TEST_S, TIMES * self.seconds.get(test, 0.0)) if test else START_S


class Times:
    """Record the times of tests and the tests that did not pass, as a pytest plugin."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 -- pytest's
        """Record the report on one phase of one test."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.others.add(report.nodeid)


def cover(data: Path, tests: list[str]) -> int:
    """Run the quick tests once, or only `tests` again, and store which lines they run and their times."""
    import pytest

    os.environ["COVERAGE_FILE"] = str(data.absolute())
    times = Times()
    words = [
        "-m",
        QUICK_MARKS,
        "--cov=dcpbench",
        "--cov-context=test",
        "--cov-report=",
        *["--cov-append"] * bool(tests),
    ]
    code = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *words, *(tests or SUITE)], plugins=[times])
    kept = _read_times(data) if tests else {}
    kept |= {name: round(s, 3) for name, s in times.seconds.items() if name not in times.others}
    _get_times_file(data).write_text(json.dumps(kept), encoding="utf-8")
    return int(code)


def _get_times_file(data: Path) -> Path:
    """Return the path of the file with the times of tests."""
    return data.with_suffix(".json")


def _read_times(data: Path) -> dict[str, float]:
    return dict(json.loads(_get_times_file(data).read_text(encoding="utf-8")))


class Coverage:
    """Select tests by the lines that they run."""

    def __init__(self, data: Path, seconds: dict[str, float]) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(data))
        self._data.read()
        self._files = {
            str(Path(f).relative_to(ROOT)): f for f in self._data.measured_files() if f.startswith(str(ROOT))
        }
        self._seconds = seconds

    def select_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests for a mutant, the quickest and most specific first, alternating between test files.

        These tests run the mutated line. If it is a definition that runs at import, they run a line with the defined name.
        """
        lines = self._read_lines(mutant.path)
        size = collections.Counter(name for names in lines.values() for name in names)
        ran = set(lines.get(mutant.line, ()))
        defined = find_names_defined_at(mutant.source, mutant.line)
        naming_tests: dict[str, set[str]] = {}
        if defined:
            words = re.compile(rf"\b({'|'.join(defined)})\b")
            ran |= {name for path in self._files for name in self._find_tests_of_words(path, words)} or set(size)
            naming_tests = find_naming_tests(words)
            ran |= {
                name
                for name in self._seconds
                if name.split("::", maxsplit=1)[0] in naming_tests or name.startswith(DEFINITIONS_TEST)
            }
        known = [name for name in ran if name in self._seconds]

        def get_order(name: str) -> tuple[int, float, str]:
            file, *_, function = name.partition("[")[0].split("::")
            far = (
                0
                if function in naming_tests.get(file, ()) or name.startswith(DEFINITIONS_TEST)
                else 1
                if file in naming_tests
                else 2
            )
            return far, (self._seconds[name] + 0.1) * (size[name] or 1000), name

        place: collections.Counter[str] = collections.Counter()
        in_turn: list[tuple[bool, bool, int, int, float, str]] = []
        for name in sorted(known, key=get_order):
            far, cost, _ = get_order(name)
            place[file := name.split("::", maxsplit=1)[0]] += 1
            in_turn.append((far > 0, self._seconds[name] > LONG_S, place[file], far, cost, name))
        specific = [name for *_, name in sorted(in_turn)]
        broad = sorted(known, key=lambda name: (-size[name] / (self._seconds[name] + 0.1), name))
        chosen: dict[str, None] = {}
        for names in (specific, broad):
            left_s = MAX_TESTS_S / 2
            for name in names:
                if name not in chosen and self._seconds[name] <= left_s:
                    chosen[name] = None
                    left_s -= self._seconds[name]
        first, rest = [*chosen][:FIRST_TESTS], [*chosen][FIRST_TESTS:]
        turn = {file: i for i, file in reversed(list(enumerate(name.split("::")[0] for name in rest)))}
        return first + sorted(rest, key=lambda name: turn[name.split("::")[0]])

    @functools.cache  # noqa: B019 -- the program has one object of this class
    def _read_lines(self, path: str) -> dict[int, set[str]]:
        found = self._data.contexts_by_lineno(self._files[path]) if path in self._files else {}
        return {line: {name.rpartition("|")[0] for name in names if name} for line, names in found.items()}

    def _find_tests_of_words(self, path: str, words: re.Pattern[str]) -> set[str]:
        """Return the tests that run lines of a file with one of these words."""
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        numbers = [n for n, line in enumerate(text.splitlines(), 1) if words.search(line)] if words.search(text) else []
        return set().union(*(self._read_lines(path).get(n, ()) for n in numbers)) if numbers else set()


DEFINITIONS_TEST = (
    "tests/unit/test_house.py::test_dataclasses_and_structs_are_frozen"  # test that checks all definitions at import
)
FIRST_TESTS = 12  # number of tests that run first, in their order; others are grouped by file, because fixtures of a file may be slow


def find_naming_tests(words: re.Pattern[str]) -> dict[str, set[str]]:
    """Return the test files that contain one of these words, with the names of the tests that contain one."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if not words.search(text):
            continue
        lines = text.splitlines()
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        spans = [(f, min([f.lineno, *(d.lineno for d in f.decorator_list)]), f.end_lineno) for f in functions]
        found[str(path.relative_to(ROOT))] = {
            f.name for f, first, last in spans if words.search("\n".join(lines[first - 1 : last]))
        }
    return found


def find_names_defined_at(source: str, line: int) -> list[str]:
    """Return the names that a line defines at import; empty for a line inside a function."""

    def find_names(body: list[ast.stmt], around: list[str]) -> list[str]:
        for node in body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if not first <= line <= (node.end_lineno or node.lineno):
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return [node.name] if line < node.body[0].lineno else []
            if isinstance(node, ast.ClassDef):
                return find_names(node.body, [node.name]) if line >= node.body[0].lineno else [node.name]
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            return [n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)] + around
        return around

    return find_names(ast.parse(source).body, [])


# Running the tests


class MutantLoader(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from changed code."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.file, self.code = make_module_name(mutant.path), ROOT / mutant.path, mutant.code

    def find_spec(self, name: str, *_: Any) -> Any:  # noqa: ANN401 -- as importlib calls it
        """Return the spec of the changed module; None for others."""
        if name != self.name:
            return None
        inside = [str(self.file.parent)] if self.file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code in the module."""
        exec(compile(self.code, str(self.file), "exec", dont_inherit=True), vars(module))  # noqa: S102 -- the code is a mutated module of this package


def make_module_name(path: str) -> str:
    """Return the module name of a file."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class OrderedRun:
    """Run tests by name in the given order, report each, and exit at the first failure, as a pytest plugin."""

    def __init__(self, line: Connection, tests: list[str]) -> None:
        self.line, self.tests = line, tests

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401 -- pytest's
        """Exit with UNREADABLE if a test file cannot be imported."""
        if report.failed:
            self.end(UNREADABLE, report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:  # noqa: ANN401 -- pytest's
        """Run the tests in the given order instead of pytest's."""
        self.run_items(session.items)
        return True

    def run_items(self, collected: list[Any]) -> None:
        """Run the tests, and exit; a test without these parameters runs with its present ones."""
        known = {item.nodeid: item for item in collected}
        by_name = collections.defaultdict(list)
        for item in collected:
            by_name[item.nodeid.partition("[")[0]].append(item)
        chosen = [i for n in self.tests for i in ([known[n]] if n in known else by_name[n.partition("[")[0]])]
        chosen = list(dict.fromkeys(chosen))
        for item, following in itertools.zip_longest(chosen, chosen[1:]):
            self.line.send(("begins", item.nodeid))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self.end(PASSED, "")

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 -- pytest's
        """Exit with FAILED if a phase of a test failed."""
        if report.failed:
            print(report.nodeid, report.longreprtext, flush=True)
            self.end(FAILED, report.nodeid)

    def end(self, how: str, test: str) -> None:
        """Send the outcome, and exit the process."""
        self.line.send((how, test))
        os._exit(0)


class CollectedSuite:
    """Collect the suite once, and run its tests in forks with changed functions, as a pytest plugin."""

    def __init__(self, line: Connection, suite: Suite) -> None:
        self.line, self.suite, self.ordered_run = line, suite, OrderedRun.__new__(OrderedRun)

    def pytest_runtestloop(self, session: Any) -> bool:  # noqa: ANN401 -- pytest's
        """Answer requests to run tests until the pipe is closed."""
        for path in list_files():
            importlib.import_module(make_module_name(path))
        session.config.pluginmanager.register(self.ordered_run)
        self.session = session
        gc.unfreeze()
        objects = gc.get_objects()
        self.functions = collections.defaultdict(list)
        for function in (o for o in objects if type(o) is types.FunctionType and is_package_code(o.__code__)):
            self.functions[_make_function_key(function.__code__)].append(function)
        caches = [o for o in objects if type(o) is functools._lru_cache_wrapper]  # noqa: SLF001 -- the type has no public name
        self.caches = [c for c in caches if str(getattr(c, "__module__", "")).startswith("dcpbench")]
        del objects
        gc.freeze()
        self.line.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                mutant, tests = self.line.recv()
                self.line.send(run_forked(functools.partial(self.run, mutant, tests), self.suite))
        os._exit(0)

    def run(self, mutant: Mutant | None, tests: list[str], line: Connection) -> None:
        """Apply the change, and run the tests; called in the fork."""
        if mutant:
            sys.meta_path.insert(0, MutantLoader(mutant))
            for old, new in find_changed_functions(mutant) or []:
                for function in self.functions[_make_function_key(old)]:
                    function.__code__ = new
            for cache in self.caches:
                cache.cache_clear()
        self.ordered_run.__init__(line, tests)  # type: ignore[misc]
        self.ordered_run.run_items(self.session.items)


def is_package_code(code: CodeType) -> bool:
    """Return True if code belongs to the package."""
    return code.co_filename.startswith(f"{ROOT}/dcpbench/")


def _make_function_key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def run_loaded(mutant: Mutant | None, tests: list[str], line: Connection) -> None:
    """Load the changed module instead of its file, and run the tests; called in a fork of a process without the package."""
    import pytest

    if mutant:
        sys.meta_path.insert(0, MutantLoader(mutant))
    named = list(dict.fromkeys(name.split("::")[0] for name in tests))
    code = pytest.main(
        [*PYTEST, "-m", QUICK_MARKS, f"--basetemp={tempfile.mkdtemp()}", *named], plugins=[OrderedRun(line, tests)]
    )
    raise AssertionError(f"pytest ended with {code}")


def run_forked(do: Callable[[Connection], None], suite: Suite) -> Ended:
    """Run a function in a fork; return the outcome that it sends."""
    mine, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            mine.close()
            null = os.open(os.devnull, os.O_RDWR)
            log = os.open(os.environ.get(LOG_VARIABLE, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for standard, file in enumerate((null, log, log)):
                os.dup2(file, standard)
            do(its)
        except BaseException:  # noqa: BLE001 -- the error is printed; no mutant causes it
            traceback.print_exc(file=sys.__stderr__)
            its.send((BROKEN, ""))
        finally:
            os._exit(1)
    its.close()
    ended = os.pidfd_open(pid)
    how, test = "begins", ""
    while how == "begins":
        ready = wait([mine, ended], suite.get_limit_s(test))
        if mine in ready or (ready and mine.poll()):
            try:
                how, test = mine.recv()
            except EOFError:
                how = DIED
        else:
            how = DIED if ready else LONG
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(ended)
    mine.close()
    for left in Path(tempfile.gettempdir()).iterdir():
        shutil.rmtree(left, ignore_errors=True)
    assert how != BROKEN, f"a run of tests broke; set {LOG_VARIABLE}=FILE to keep its output"
    return Ended(how, test)


class Runner:
    """Run tests against mutants."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.fit: set[tuple[str, bool]] = set()  # tests that passed without a change, after the same tests
        self.unfit: set[str] = set()  # tests that also fail without a change
        self._line, its = multiprocessing.Pipe()
        if os.fork() == 0:
            self._line.close()
            import pytest

            words = [*PYTEST, "-m", QUICK_MARKS, f"--basetemp={tempfile.gettempdir()}/pytest", *SUITE]
            log = os.open(os.environ.get(LOG_VARIABLE, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os._exit(int(pytest.main(words, plugins=[CollectedSuite(its, suite)])) or 1)
        its.close()
        assert self._line.recv() == "ready"

    def run_once(self, mutant: Mutant | None, tests: list[str], *, inside: bool) -> Ended:
        """Run the tests once with a change inside functions, or at import."""
        if not inside:
            return run_forked(functools.partial(run_loaded, mutant, tests), self.suite)
        self._line.send((mutant, tests))
        return Ended(*self._line.recv())

    def detect(self, mutant: Mutant, tests: list[str], *, inside: bool) -> str:
        """Return how a test detects the change; empty if none does."""
        while tests := [name for name in tests if name not in self.unfit]:
            ended = self.run_once(mutant, tests, inside=inside)
            if ended.how == PASSED:
                return ""
            so_far = tests[: tests.index(ended.test) + 1] if ended.test in tests else tests
            key = (ended.test, inside)
            without = (
                Ended(PASSED, "")
                if key in self.fit and ended.how == FAILED
                else self.run_once(None, so_far, inside=inside)
            )
            if without.how == PASSED:
                self.fit.add(key)
                return f"{ended.how} {ended.test}".strip()
            print(f"also fails without the change: {' '.join(without)}", flush=True)
            self.unfit |= {without.test, ended.test} & set(tests) or set(tests)
        return ""

    def judge(self, mutant: Mutant, tests: list[str], equivalents: set[str]) -> tuple[str, str]:
        """Return the outcome of a mutant, and how it was detected."""
        if not mutant.line:
            return GONE, ""
        if mutant.name in equivalents:
            return EQUIVALENT, ""
        if not tests:
            return NOT_REACHED, ""
        inside = bool(find_changed_functions(mutant))
        how = self.detect(mutant, tests, inside=inside)
        return (SEEN, how) if how else (SURVIVED, f"{len(tests)} tests")


def run_mutants(args: argparse.Namespace) -> int:
    """Run the tests against mutants, and print the score."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "dcpbench" for name in sys.modules), (
        "the package must not be imported before a mutant of it"
    )
    os.chdir(ROOT)
    suite = Suite(_read_times(args.data))
    covered = Coverage(args.data, suite.seconds)
    equivalents = set(EQUIVALENTS.read_text().splitlines()) if EQUIVALENTS.exists() else set()
    done = read_rows([args.out]) if args.out and args.out.exists() else []
    counts = collections.Counter(str(row["what"]) for row in done)
    before = {_make_identity(row) for row in done}
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        runner = Runner(suite)
        began = time.monotonic()
        kept = args.data.with_suffix(".places.json")
        chosen = repeat_mutants(args.again, kept) if args.again else draw_mutants(args.seed, args.only, kept)
        for mutant in chosen:
            if (counts.total() >= args.mutants and not args.again) or time.monotonic() > began + args.minutes * 60:
                break
            start = time.monotonic()
            if _make_identity(dataclasses.asdict(mutant)) in before:
                continue
            what, how = runner.judge(mutant, covered.select_tests(mutant) if mutant.line else [], equivalents)
            counts[what] += 1
            if what != SEEN:
                print(f"{what}: line {mutant.line} of {mutant.name} ({how})", flush=True)
            row = dataclasses.asdict(mutant) | {"what": what, "how": how, "s": round(time.monotonic() - start, 2)}
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    counted = counts.total() - counts[EQUIVALENT] - counts[GONE]
    score = counts[SEEN] / counted if counted else 0.0
    each = (time.monotonic() - began) / max(counts.total() - len(done), 1)
    print(f"{counts.total()} mutants: {dict(counts)}; {100 * score:.1f} % of {counted} detected; {each:.1f} s each")
    return 0 if score >= MIN_SCORE and (args.again or counts.total() >= args.mutants) else 1


def _make_identity(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a key of a mutant that is valid while no line is added or removed."""
    return row["path"], row["operator"], row["occurrence"], row["now"], row["line"] == 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument(
        "--tests", nargs="+", default=[], help="with cover: run only these tests, and add them to the file"
    )
    parser.add_argument("--data", type=Path, required=True, help="file with the coverage of each test")
    parser.add_argument("--mutants", type=int, default=500, help="number of random mutants; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60, help="time in min after which no mutant follows; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random mutants; default: %(default)s")
    parser.add_argument("--only", default="", metavar="TEXT", help="only change files with this text in their path")
    parser.add_argument("--again", type=Path, nargs="+", help="repeat the mutants in these files of --out")
    parser.add_argument(
        "--out", type=Path, help="append a line of JSON for each mutant; mutants in the file are not repeated"
    )
    args = parser.parse_args(arguments)
    return cover(args.data, args.tests) if args.what == "cover" else run_mutants(args)


if __name__ == "__main__":
    sys.exit(main())
