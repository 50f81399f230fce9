"""Changes lines of the rooms without a GPU, one at a time, and says whether a test fails: mutants by cosmic-ray's operators.

    pip install -e '.[mutation]'
    python -m tools.mutation cover --data covered.sqlite              # which test runs which line: a quarter of an hour
    python -m tools.mutation run --data covered.sqlite --mutants 500 --seed 0 --out mutants.jsonl
    python -m tools.mutation run --data covered.sqlite --again mutants.jsonl --out mended.jsonl

A mutant is tried by those tests that run its line, the quick and specific first, until one fails. One process has collected
the suite, and what changes inside a function is put into a fork of it; what runs at import (constants, classes) is loaded in
a fork of a process that has nothing of ours. Where a test fails for the first time, or takes too long or ends its process,
it counts where the same tests in the same order pass without the change; else that test is not asked again.
Tests that start processes of their own (marks `long`, `distributed`, `browser`) are not among them, so what
only they run counts as not seen. A mutant listed in tools/mutation_equivalents.txt, which nobody could see, counts for
nothing; nor does one that is gone: `--again` tries the mutants of a file with the tests and lines of today, of which some are no more.
Ends with 1 where fewer than 90 % of the others were seen.
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
ROOMS = (
    *("compare", "dashboard", "doctor", "exports", "hangs", "imports", "launch", "plan", "points", "recommend"),
    *("records", "reports", "servers", "serving", "show", "syncs", "top"),
)
NOT_HERE = ("syncs/dry_run", "syncs/live", "syncs/recorder", "launch/subprocess_guard.py")  # run in other programs
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv|Mod)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue|AddNot|ReplaceUnaryOperator_.*"
    r"|NumberReplacer|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ExceptionReplacer)"
)
SUITE = ("tests/unit", "tests/cli", "tests/servers")
QUICK = "not long and not browser and not soak and not gpu and not distributed"
LIBRARIES = (  # libraries imported before anything is forked
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
"""Options of pytest; assertions stay plain, because assertion rewriting loads the package itself: it has a plugin of
pytest.
"""
MOST_S, LONG_S = 60, 1
"""Maximum total time in s of a mutant's tests, as covered: half for the quick and specific ones, in which a test that
took longer than LONG_S comes last, and half for those that run most lines of the file for their time.
"""
START_S, TEST_S, TIMES = 120, 20, 10  # limits: s to the first test, s within one, factor over its own time
SEEN, SURVIVED, EQUIVALENT, NOT_REACHED, GONE = "seen", "survived", "equivalent", "not reached", "gone"
GOOD = 0.9
PASSED, FAILED, UNREADABLE, LONG, DIED, BROKEN = (
    "passed",
    "failed",
    "could not import",
    "took too long in",
    "ended in",
    "broke",
)
SAID = "DCPBENCH_MUTATION_LOG"  # environment variable with a file for the output of the tries
OWN = ("dcpbench", "tests", "tools")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """Hold one change."""

    path: str
    operator: str
    occurrence: int
    line: int
    was: str
    now: str
    first: int | None = None  # value of `occurrence` when it was first tried, if added lines may have moved it

    @property
    def name(self) -> str:
        """Return the name in the list of equivalents, without line number, which may change."""
        return f"{self.path}: {self.was.strip()} => {self.now.strip()}"

    @property
    def source(self) -> str:
        """Return the unchanged file."""
        return (ROOT / self.path).read_text(encoding="utf-8")

    @property
    def code(self) -> str:
        """Return the file with the change."""
        from cosmic_ray import plugins
        from cosmic_ray.mutating import mutate_code

        return str(mutate_code(self.source, plugins.get_operator(self.operator)(), self.occurrence))


class Ended(NamedTuple):
    """Hold how a try ended, and in which test."""

    how: str
    test: str


# Selection of the changes


def files() -> list[str]:
    """Return all files that are mutated."""
    found = [file.relative_to(ROOT) for room in ROOMS for file in sorted((ROOT / "dcpbench" / room).rglob("*.py"))]
    return [str(f) for f in found if not any(str(f).startswith(f"dcpbench/{part}") for part in NOT_HERE)]


def places(paths: Iterable[str], kept: Path) -> list[tuple[str, str, int, int]]:
    """Return (file, operator, which of the two, line) of every possible change; those of a file are cached, as they
    take a second.
    """
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    found = []
    for path in paths:
        name = hashlib.sha256((ROOT / path).read_bytes()).hexdigest()
        if name not in known:
            known[name] = _places(path)
        found += [(path, *place) for place in known[name]]
    kept.write_text(json.dumps(known), encoding="utf-8")
    return found


def _places(path: str) -> list[tuple[str, int, int]]:
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (ROOT / path).read_text(encoding="utf-8")
    never = _never_run(source)
    nodes = list(ast_nodes(get_ast(source)))
    found: list[tuple[str, int, int]] = []
    for name in (n for n in plugins.operator_names() if OPERATORS.fullmatch(n)):
        operator = plugins.get_operator(name)()
        starts = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [(name, n, line) for n, (line, _) in enumerate(starts) if line not in never]
    return found


def mutants(found: Iterable[tuple[str, str, int, int]]) -> Iterator[Mutant]:
    """Yield the changes at these places that are valid Python and compile to something else."""
    for place in found:
        bare = Mutant(*place, "", "")
        try:
            pairs = itertools.zip_longest(bare.source.splitlines(), bare.code.splitlines(), fillvalue="")
            changed = next(((a, b) for a, b in pairs if a != b), None)
            if changed and changed_functions(bare) != []:
                yield Mutant(*place, *changed)
        except (SyntaxError, AttributeError):  # the latter of cosmic-ray, which replaces no exception with a dot
            continue


def at_random(seed: int, only: str, kept: Path) -> Iterator[Mutant]:
    """Yield every change once, in random order."""
    found = places((path for path in files() if only in path), kept)
    random.Random(seed).shuffle(found)
    return mutants(found)


def again(paths: Iterable[Path], kept: Path) -> Iterator[Mutant]:
    """Yield the mutants in files of `run` at their present lines; line 0 if they no longer exist."""
    here = files()
    for row in rows(paths):
        known: dict[str, Any] = {field.name: row.get(field.name) for field in dataclasses.fields(Mutant)}
        old = Mutant(**known)
        old = dataclasses.replace(old, first=old.occurrence if old.first is None else old.first)
        same = [place for place in places({old.path} & set(here), kept) if place[1] == old.operator]
        new = [m for m in mutants(same) if (m.was, m.now) == (old.was, old.now)]
        if new:
            yield dataclasses.replace(min(new, key=lambda m: abs(m.line - old.line)), first=old.first)
        else:
            yield dataclasses.replace(old, line=0)


def rows(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return all lines of files that `run` wrote."""
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def _never_run(source: str) -> set[int]:
    """Return the lines of annotations and of imports for types alone, which are never evaluated."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        spans = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            spans.append(node)
        for span in spans:
            if isinstance(span, ast.expr | ast.stmt):
                found |= set(range(span.lineno, (span.end_lineno or span.lineno) + 1))
    return found


def changed_functions(mutant: Mutant) -> list[tuple[CodeType, CodeType]] | None:
    """Return functions before and after a change, the inner ones last; None if something differs
    that runs at import.
    """
    old, new = (compile(c, str(ROOT / mutant.path), "exec", dont_inherit=True) for c in (mutant.source, mutant.code))
    return _differing(old, new)


AT_ONCE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # functions that run at once: at import


def _differing(old: CodeType, new: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    inner = [[c for c in code.co_consts if isinstance(c, types.CodeType)] for code in (old, new)]
    function = bool(old.co_flags & 1)  # optimised: neither a module nor the body of a class
    own = [(old, new)]
    if len(inner[0]) != len(inner[1]) or _essence(old) != _essence(new):
        return own if function else None
    found: list[tuple[CodeType, CodeType]] = []
    for pair in zip(*inner, strict=True):
        differ = _differing(*pair)
        if differ is None or (differ and pair[0].co_name in AT_ONCE and not function):
            return own if function else None
        found += differ
    return own + found if found and function else found


def _essence(code: CodeType) -> tuple[object, ...]:
    """Return what determines a code object's behaviour, without its nested code and its position."""
    constants = tuple(isinstance(c, types.CodeType) or repr(c) for c in code.co_consts)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, constants, names, code.co_exceptiontable, code.co_flags


# Which tests


class Suite(NamedTuple):
    """Hold the result of covering: the time of each passed test."""

    seconds: dict[str, float]

    def limit(self, test: str) -> float:
        """Return the seconds after which a test has taken too long."""
        return max(TEST_S, TIMES * self.seconds.get(test, 0.0)) if test else START_S


class Times:
    """Record how long tests took, and which did not pass, as a plugin of pytest."""

    def __init__(self) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.others: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 -- pytest's
        """Record the report of one phase of one test."""
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.others.add(report.nodeid)


def cover(data: Path, tests: list[str]) -> int:
    """Run the quick tests once, or some of them again, and store which of them run which line and for how long."""
    import pytest

    os.environ["COVERAGE_FILE"] = str(data.absolute())
    times = Times()
    words = ["-m", QUICK, "--cov=dcpbench", "--cov-context=test", "--cov-report=", *["--cov-append"] * bool(tests)]
    code = pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *words, *(tests or SUITE)], plugins=[times])
    kept = _seconds(data) if tests else {}
    kept |= {name: round(s, 3) for name, s in times.seconds.items() if name not in times.others}
    _beside(data).write_text(json.dumps(kept), encoding="utf-8")
    return int(code)


def _beside(data: Path) -> Path:
    """Return the file with the seconds of tests."""
    return data.with_suffix(".json")


def _seconds(data: Path) -> dict[str, float]:
    return dict(json.loads(_beside(data).read_text(encoding="utf-8")))


class Covered:
    """Hold which tests run which lines."""

    def __init__(self, data: Path, seconds: dict[str, float]) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(data))
        self._data.read()
        self._files = {
            str(Path(f).relative_to(ROOT)): f for f in self._data.measured_files() if f.startswith(str(ROOT))
        }
        self._seconds = seconds

    def tests(self, mutant: Mutant) -> list[str]:
        """Return tests that run the line, or a line that names what the line defines, quickest and most specific first,
        alternating files.
        """
        lines = self._lines(mutant.path)
        size = collections.Counter(name for names in lines.values() for name in names)
        ran = set(lines.get(mutant.line, ()))
        made = made_at_import(mutant.source, mutant.line)
        said: dict[str, set[str]] = {}
        if made:
            words = re.compile(rf"\b({'|'.join(made)})\b")
            ran |= {name for path in self._files for name in self._on(path, words)} or set(size)
            said = naming(words)
            ran |= {name for name in self._seconds if name.split("::", maxsplit=1)[0] in said or name.startswith(HOUSE)}
        known = [name for name in ran if name in self._seconds]

        def order(name: str) -> tuple[int, float, str]:
            file, *_, function = name.partition("[")[0].split("::")
            far = 0 if function in said.get(file, ()) or name.startswith(HOUSE) else 1 if file in said else 2
            return far, (self._seconds[name] + 0.1) * (size[name] or 1000), name

        place: collections.Counter[str] = collections.Counter()
        in_turn: list[tuple[bool, bool, int, int, float, str]] = []
        for name in sorted(known, key=order):
            far, cost, _ = order(name)
            place[file := name.split("::", maxsplit=1)[0]] += 1
            in_turn.append((far > 0, self._seconds[name] > LONG_S, place[file], far, cost, name))
        specific = [name for *_, name in sorted(in_turn)]
        broad = sorted(known, key=lambda name: (-size[name] / (self._seconds[name] + 0.1), name))
        chosen: dict[str, None] = {}
        for names in (specific, broad):
            left_s = MOST_S / 2
            for name in names:
                if name not in chosen and self._seconds[name] <= left_s:
                    chosen[name] = None
                    left_s -= self._seconds[name]
        first, rest = [*chosen][:FIRST], [*chosen][FIRST:]
        turn = {file: i for i, file in reversed(list(enumerate(name.split("::")[0] for name in rest)))}
        return first + sorted(rest, key=lambda name: turn[name.split("::")[0]])

    @functools.cache  # noqa: B019 -- one for the whole program
    def _lines(self, path: str) -> dict[int, set[str]]:
        found = self._data.contexts_by_lineno(self._files[path]) if path in self._files else {}
        return {line: {name.rpartition("|")[0] for name in names if name} for line, names in found.items()}

    def _on(self, path: str, words: re.Pattern[str]) -> set[str]:
        """Return the tests that run lines with one of these words."""
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
        numbers = [n for n, line in enumerate(text.splitlines(), 1) if words.search(line)] if words.search(text) else []
        return set().union(*(self._lines(path).get(n, ()) for n in numbers)) if numbers else set()


HOUSE = "tests/unit/test_house.py::test_dataclasses_and_structs_are_frozen"  # tests of all definitions at import
FIRST = 12  # number of tests that run one by one first; the others run by file, because a file may start something once


def naming(words: re.Pattern[str]) -> dict[str, set[str]]:
    """Return the test files that have one of these words, and which of their tests do."""
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


def made_at_import(source: str, line: int) -> list[str]:
    """Return the names that a line assigns at import; empty for a line inside a function."""

    def inside(body: list[ast.stmt], around: list[str]) -> list[str]:
        for node in body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            if not first <= line <= (node.end_lineno or node.lineno):
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                return [node.name] if line < node.body[0].lineno else []
            if isinstance(node, ast.ClassDef):
                return inside(node.body, [node.name]) if line >= node.body[0].lineno else [node.name]
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            return [n.id for t in targets if t for n in ast.walk(t) if isinstance(n, ast.Name)] + around
        return around

    return inside(ast.parse(source).body, [])


# How it is tried


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Load one module from changed code."""

    def __init__(self, mutant: Mutant) -> None:
        self.name, self.file, self.code = module_name(mutant.path), ROOT / mutant.path, mutant.code

    def find_spec(self, name: str, *_: Any) -> Any:  # noqa: ANN401 -- importlib's
        """Find only its own module."""
        if name != self.name:
            return None
        inside = [str(self.file.parent)] if self.file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code."""
        exec(compile(self.code, str(self.file), "exec", dont_inherit=True), vars(module))  # noqa: S102 -- ours


def module_name(path: str) -> str:
    """Return the name under which a file is imported."""
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Told:
    """Run tests by name in the given order as a plugin of pytest, report each, and end the process at the first
    failure.
    """

    def __init__(self, line: Connection, tests: list[str]) -> None:
        self.line, self.tests = line, tests

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401 -- pytest's
        """Treat a file that cannot be imported as a failed test."""
        if report.failed:
            self.end(UNREADABLE, report.nodeid)

    def pytest_runtestloop(self, session: Any) -> bool:  # noqa: ANN401 -- pytest's
        """Replace pytest's own loop."""
        self.items(session.items)
        return True

    def items(self, collected: list[Any]) -> None:
        """Run the tests; if the parameters of a test have changed, run its present ones."""
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
        """Report one phase of one test."""
        if report.failed:
            print(report.nodeid, report.longreprtext, flush=True)
            self.end(FAILED, report.nodeid)

    def end(self, how: str, test: str) -> None:
        """Report the outcome, and exit the process."""
        self.line.send((how, test))
        os._exit(0)


class Collected:
    """Collect the suite once as a plugin of pytest, and run its tests in forks with changed functions."""

    def __init__(self, line: Connection, suite: Suite) -> None:
        self.line, self.suite, self.told = line, suite, Told.__new__(Told)

    def pytest_runtestloop(self, session: Any) -> bool:  # noqa: ANN401 -- pytest's
        """Serve tries until the pipe is closed."""
        for path in files():
            importlib.import_module(module_name(path))
        session.config.pluginmanager.register(self.told)
        self.session = session
        gc.unfreeze()
        objects = gc.get_objects()
        self.functions = collections.defaultdict(list)
        for function in (o for o in objects if type(o) is types.FunctionType and ours(o.__code__)):
            self.functions[_place(function.__code__)].append(function)
        caches = [o for o in objects if type(o) is functools._lru_cache_wrapper]  # noqa: SLF001 -- has no other name
        self.caches = [c for c in caches if str(getattr(c, "__module__", "")).startswith("dcpbench")]
        del objects
        gc.freeze()
        self.line.send("ready")
        with contextlib.suppress(EOFError):
            while True:
                mutant, tests = self.line.recv()
                self.line.send(forked(functools.partial(self.run, mutant, tests), self.suite))
        os._exit(0)

    def run(self, mutant: Mutant | None, tests: list[str], line: Connection) -> None:
        """Apply the change, and run the tests, in the fork."""
        if mutant:
            sys.meta_path.insert(0, Mutated(mutant))
            for old, new in changed_functions(mutant) or []:
                for function in self.functions[_place(old)]:
                    function.__code__ = new
            for cache in self.caches:
                cache.cache_clear()
        self.told.__init__(line, tests)  # type: ignore[misc]
        self.told.items(self.session.items)


def ours(code: CodeType) -> bool:
    """Return True if the code belongs to the package."""
    return code.co_filename.startswith(f"{ROOT}/dcpbench/")


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def loaded(mutant: Mutant | None, tests: list[str], line: Connection) -> None:
    """Load the changed module in place of its file, and run the tests, in a fork of a process without any of our
    modules.
    """
    import pytest

    if mutant:
        sys.meta_path.insert(0, Mutated(mutant))
    named = list(dict.fromkeys(name.split("::")[0] for name in tests))
    code = pytest.main([*PYTEST, "-m", QUICK, f"--basetemp={tempfile.mkdtemp()}", *named], plugins=[Told(line, tests)])
    raise AssertionError(f"pytest ended with {code}")


def forked(do: Callable[[Connection], None], suite: Suite) -> Ended:
    """Return the outcome that a fork running this function reports."""
    mine, its = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            mine.close()
            nothing = os.open(os.devnull, os.O_RDWR)
            said = os.open(os.environ.get(SAID, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for standard, file in enumerate((nothing, said, said)):
                os.dup2(file, standard)
            do(its)
        except BaseException:  # noqa: BLE001 -- told, and no mutant's doing
            traceback.print_exc(file=sys.__stderr__)
            its.send((BROKEN, ""))
        finally:
            os._exit(1)
    its.close()
    ended = os.pidfd_open(pid)
    how, test = "begins", ""
    while how == "begins":
        ready = wait([mine, ended], suite.limit(test))
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
    assert how != BROKEN, f"a try broke; {SAID}=FILE keeps what it says"
    return Ended(how, test)


class Tries:
    """Try mutants."""

    def __init__(self, suite: Suite) -> None:
        self.suite = suite
        self.fit: set[tuple[str, bool]] = set()  # tests that were seen to pass without a change after those before them
        self.unfit: set[str] = set()  # tests that fail without a change, too
        self._line, its = multiprocessing.Pipe()
        if os.fork() == 0:
            self._line.close()
            import pytest

            words = [*PYTEST, "-m", QUICK, f"--basetemp={tempfile.gettempdir()}/pytest", *SUITE]
            said = os.open(os.environ.get(SAID, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(said, 1)
            os._exit(int(pytest.main(words, plugins=[Collected(its, suite)])) or 1)
        its.close()
        assert self._line.recv() == "ready"

    def once(self, mutant: Mutant | None, tests: list[str], *, inside: bool) -> Ended:
        """Try a change inside functions, or one at import."""
        if not inside:
            return forked(functools.partial(loaded, mutant, tests), self.suite)
        self._line.send((mutant, tests))
        return Ended(*self._line.recv())

    def fails(self, mutant: Mutant, tests: list[str], *, inside: bool) -> str:
        """Return how the tests show the change; empty if they do not."""
        while tests := [name for name in tests if name not in self.unfit]:
            ended = self.once(mutant, tests, inside=inside)
            if ended.how == PASSED:
                return ""
            so_far = tests[: tests.index(ended.test) + 1] if ended.test in tests else tests
            told = (ended.test, inside)
            without = (
                Ended(PASSED, "")
                if told in self.fit and ended.how == FAILED
                else self.once(None, so_far, inside=inside)
            )
            if without.how == PASSED:
                self.fit.add(told)
                return f"{ended.how} {ended.test}".strip()
            print(f"without any change, too: {' '.join(without)}", flush=True)
            self.unfit |= {without.test, ended.test} & set(tests) or set(tests)
        return ""

    def of(self, mutant: Mutant, tests: list[str], equivalents: set[str]) -> tuple[str, str]:
        """Return (outcome of a mutant, how it was found)."""
        if not mutant.line:
            return GONE, ""
        if mutant.name in equivalents:
            return EQUIVALENT, ""
        if not tests:
            return NOT_REACHED, ""
        inside = bool(changed_functions(mutant))
        how = self.fails(mutant, tests, inside=inside)
        return (SEEN, how) if how else (SURVIVED, f"{len(tests)} tests")


def run(asked: argparse.Namespace) -> int:
    """Try the mutants, and print the score."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert not any(name.split(".")[0] == "dcpbench" for name in sys.modules), (
        "nothing of ours may be loaded before its mutant"
    )
    os.chdir(ROOT)
    suite = Suite(_seconds(asked.data))
    covered = Covered(asked.data, suite.seconds)
    equivalents = set(EQUIVALENTS.read_text().splitlines()) if EQUIVALENTS.exists() else set()
    done = rows([asked.out]) if asked.out and asked.out.exists() else []
    counts = collections.Counter(str(row["what"]) for row in done)
    before = {_identity(row) for row in done}
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        tries = Tries(suite)
        began = time.monotonic()
        kept = asked.data.with_suffix(".places.json")
        chosen = again(asked.again, kept) if asked.again else at_random(asked.seed, asked.only, kept)
        for mutant in chosen:
            if (counts.total() >= asked.mutants and not asked.again) or time.monotonic() > began + asked.minutes * 60:
                break
            start = time.monotonic()
            if _identity(dataclasses.asdict(mutant)) in before:
                continue
            what, how = tries.of(mutant, covered.tests(mutant) if mutant.line else [], equivalents)
            counts[what] += 1
            if what != SEEN:
                print(f"{what}: line {mutant.line} of {mutant.name} ({how})", flush=True)
            row = dataclasses.asdict(mutant) | {"what": what, "how": how, "s": round(time.monotonic() - start, 2)}
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    counted = counts.total() - counts[EQUIVALENT] - counts[GONE]
    score = counts[SEEN] / counted if counted else 0.0
    each = (time.monotonic() - began) / max(counts.total() - len(done), 1)
    print(f"{counts.total()} mutants: {dict(counts)}; {100 * score:.1f} % of {counted} seen; {each:.1f} s each")
    return 0 if score >= GOOD and (asked.again or counts.total() >= asked.mutants) else 1


def _identity(row: dict[str, Any]) -> tuple[object, ...]:
    """Return what identifies a mutant, as long as no line is added or removed."""
    return row["path"], row["operator"], row["occurrence"], row["now"], row["line"] == 0


def main(arguments: list[str] | None = None) -> int:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument("--tests", nargs="+", default=[], help="cover: only these, added to what was covered before")
    parser.add_argument("--data", type=Path, required=True, help="file of what was covered")
    parser.add_argument("--mutants", type=int, default=500, help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60, help="no further mutant after so long; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="which mutants; default: %(default)s")
    parser.add_argument("--only", default="", help="mutants of files with this in their path")
    parser.add_argument(
        "--again", type=Path, nargs="+", help="the mutants of these files of --out, in place of random ones"
    )
    parser.add_argument(
        "--out", type=Path, help="append a line of JSON for each mutant; what is there is not tried again"
    )
    asked = parser.parse_args(arguments)
    return cover(asked.data, asked.tests) if asked.what == "cover" else run(asked)


if __name__ == "__main__":
    sys.exit(main())
