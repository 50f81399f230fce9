"""Changes lines of the rooms without a GPU, one at a time, and says whether a test fails: mutants by cosmic-ray's operators.

    pip install cosmic-ray pytest-cov
    python -m tools.mutation cover --data covered.sqlite              # which test runs which line: a quarter of an hour
    python -m tools.mutation run --data covered.sqlite --mutants 500 --seed 0 --out mutants.jsonl

Each mutant is tried in a fork of a process that has imported torch and pytest but nothing of ours; there the mutated
module is loaded in place of its file, and those tests run that run its line, the most specific first, until one fails.
Tests of the suite that start processes of their own (marks `long`, `distributed`, `browser`) are not among them, so what
only they run counts as not seen. A mutant listed in tools/mutation_equivalents.txt, which nobody could see, counts for
nothing. Ends with 1 where fewer than 90 % of the others were seen.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import dataclasses
import importlib.abc
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[1]
EQUIVALENTS = Path(__file__).with_name("mutation_equivalents.txt")
ROOMS = (
    *("compare", "dashboard", "doctor", "exports", "hangs", "imports", "launch", "plan", "points", "recommend"),
    *("records", "reports", "servers", "serving", "show", "syncs", "top"),
)
NOT_HERE = ("syncs/dry_run", "syncs/live", "syncs/recorder", "launch/child.py")
"""What runs inside other programs, or before anything is imported."""
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv|Mod)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|Is_IsNot|IsNot_Is|In_NotIn|NotIn_In)"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue|AddNot|ReplaceUnaryOperator_.*"
    r"|NumberReplacer|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ExceptionReplacer)"
)
SUITE = ("tests/unit", "tests/cli", "tests/servers")
QUICK = "not long and not browser and not soak and not gpu and not distributed"
FIRST, MOST = 12, 150
"""Tests of the first try and of all tries of a mutant."""
LIMIT_S = 60
SEEN, SURVIVED, EQUIVALENT, NOT_REACHED = "seen", "survived", "equivalent", "not reached"
GOOD = 0.9
BROKEN = 70
"""Exit code of a try that did not come as far as pytest."""
SAID = "DCPBENCH_MUTATION_LOG"
"""Environment variable with a file for what the tries print."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change."""

    path: str
    operator: str
    occurrence: int
    line: int
    was: str
    now: str

    @property
    def name(self) -> str:
        """As in the list of equivalents: no line number, which moves."""
        return f"{self.path}: {self.was.strip()} => {self.now.strip()}"


def cover(data: Path) -> int:
    """Run the quick tests once, and keep which of them runs which line."""
    words = [
        "-n",
        "0",
        "-q",
        "-m",
        QUICK,
        "--cov=dcpbench",
        "--cov-context=test",
        "--cov-report=",
        "-p",
        "no:cacheprovider",
    ]
    env = os.environ | {"COVERAGE_FILE": str(data.absolute())}
    return subprocess.call([sys.executable, "-m", "pytest", *SUITE, *words], cwd=ROOT, env=env)


def candidates(seed: int) -> Iterator[Mutant]:
    """All mutants, file by file at random and one of each file in turn at random, without end of the list twice."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    places: list[tuple[str, str, int, int]] = []
    sources: dict[str, str] = {}
    names = [n for n in plugins.operator_names() if OPERATORS.fullmatch(n)]
    for room in ROOMS:
        for file in sorted((ROOT / "dcpbench" / room).rglob("*.py")):
            path = str(file.relative_to(ROOT))
            if any(path.startswith(f"dcpbench/{part}") for part in NOT_HERE):
                continue
            sources[path] = file.read_text()
            never = _never_run(sources[path])
            nodes = list(ast_nodes(get_ast(sources[path])))
            for name in names:
                operator = plugins.get_operator(name)()
                found = (start for node in nodes for start, _ in operator.mutation_positions(node))
                places += [(path, name, n, line) for n, (line, _) in enumerate(found) if line not in never]
    random.Random(seed).shuffle(places)
    for path, name, occurrence, line in places:
        code = mutate_code(sources[path], plugins.get_operator(name)(), occurrence)
        if code is None or code == sources[path]:
            continue
        pairs = zip(sources[path].splitlines(), code.splitlines(), strict=False)
        changed = next(((a, b) for a, b in pairs if a != b), None)
        if changed:
            yield Mutant(path, name, occurrence, line, *changed)


def _never_run(source: str) -> set[int]:
    """Lines of annotations and of imports for types alone, which nothing evaluates."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        spans = [getattr(node, name, None) for name in ("annotation", "returns")]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            spans.append(node)
        for span in spans:
            if isinstance(span, ast.expr | ast.stmt):
                found |= set(range(span.lineno, (span.end_lineno or span.lineno) + 1))
    return found


class Covered:
    """Which tests run which lines."""

    def __init__(self, data: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(str(data))
        self._data.read()
        self._lines: dict[str, dict[int, list[str]]] = {}
        self._size: collections.Counter[str] = collections.Counter()

    def tests(self, mutant: Mutant) -> list[str]:
        """Tests that run the line, those first that run least else; of a line that imports run, all of its module."""
        if mutant.path not in self._lines:
            own = next((f for f in self._data.measured_files() if f.endswith(f"/{mutant.path}")), "")
            self._lines[mutant.path] = self._data.contexts_by_lineno(own) if own else {}
        lines = self._lines[mutant.path]
        ran = self._names(lines.get(mutant.line, []))
        if not ran and "" in lines.get(mutant.line, []):
            ran = self._names([name for names in lines.values() for name in names])
        size = collections.Counter(n for names in lines.values() for n in self._names(names))
        return sorted(ran, key=lambda name: (size[name], name))

    @staticmethod
    def _names(contexts: list[str]) -> set[str]:
        return {name.rpartition("|")[0] for name in contexts if name}


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from changed code."""

    def __init__(self, path: str, code: str) -> None:
        parts = Path(path).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.file, self.code = ROOT / path, code

    def find_spec(self, name: str, *_: Any) -> Any:  # noqa: ANN401 -- importlib's
        """Its own."""
        if name != self.name:
            return None
        inside = [str(self.file.parent)] if self.file.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed code."""
        exec(compile(self.code, str(self.file), "exec"), vars(module))  # noqa: S102 -- ours


def attempt(mutant: Mutant, tests: list[str]) -> tuple[bool, str]:
    """Whether a test fails with the mutant, and how that ended."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    pid = os.fork()
    if pid == 0:
        code = BROKEN
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDWR)
            said = os.open(os.environ.get(SAID, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for standard, file in enumerate((nothing, said, said)):
                os.dup2(file, standard)
            # Assertions stay plain, as what rewrites them loads the whole package itself: it has a plugin of pytest.
            source = (ROOT / mutant.path).read_text()
            changed = mutate_code(source, plugins.get_operator(mutant.operator)(), mutant.occurrence)
            sys.meta_path.insert(0, Mutated(mutant.path, changed))
            signal.alarm(LIMIT_S)
            import pytest

            code = int(
                pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov", "--assert=plain", *tests])
            )
        except BaseException:  # noqa: BLE001 -- told, and no mutant's doing
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    assert status != BROKEN, f"a try broke; {SAID}=FILE keeps what it says"
    return status != 0, {0: "passed", 1: "failed", -signal.SIGALRM: "took too long"}.get(status, f"ended with {status}")


def tried(mutant: Mutant, tests: list[str], equivalents: set[str]) -> tuple[str, str]:
    """(what became of a mutant, how)."""
    if mutant.name in equivalents:
        return EQUIVALENT, ""
    if not tests:
        return NOT_REACHED, ""
    for part in (tests[:FIRST], tests[FIRST:MOST]):
        if part:
            seen, how = attempt(mutant, part)
            if seen:
                return SEEN, how
    return SURVIVED, f"{min(len(tests), MOST)} of {len(tests)} tests"


def run(asked: argparse.Namespace) -> int:
    """Try so many mutants, and tell the score."""
    import matplotlib.pyplot as plt
    import pandas as pd
    import pytest
    import torch

    assert all((plt, pd, pytest, torch))
    assert not any(name.startswith("dcpbench") for name in sys.modules), (
        "nothing of ours may be loaded before its mutant"
    )
    os.chdir(ROOT)
    covered = Covered(asked.data)
    equivalents = set(EQUIVALENTS.read_text().splitlines()) if EQUIVALENTS.exists() else set()
    counts: collections.Counter[str] = collections.Counter()
    ends = time.monotonic() + asked.minutes * 60
    for mutant in candidates(asked.seed):
        if sum(counts.values()) >= asked.mutants or time.monotonic() > ends:
            break
        if asked.only and asked.only not in mutant.path:
            continue
        tests = covered.tests(mutant)
        began = time.monotonic()
        what, how = tried(mutant, tests, equivalents)
        counts[what] += 1
        if what != SEEN:
            print(f"{what}: line {mutant.line} of {mutant.name} ({how})", flush=True)
        row = dataclasses.asdict(mutant) | {"what": what, "how": how, "s": round(time.monotonic() - began, 2)}
        if asked.out:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    counted = sum(counts.values()) - counts[EQUIVALENT]
    score = counts[SEEN] / counted if counted else 0.0
    print(f"{sum(counts.values())} mutants: {dict(counts)}; {100 * score:.1f} % of {counted} seen")
    return 0 if score >= GOOD and sum(counts.values()) >= asked.mutants else 1


def main(arguments: list[str] | None = None) -> int:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument("--data", type=Path, required=True, help="file of what was covered")
    parser.add_argument("--mutants", type=int, default=500, help="default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60, help="no further mutant after so long; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="which mutants; default: %(default)s")
    parser.add_argument("--only", default="", help="mutants of files with this in their path")
    parser.add_argument("--out", type=Path, help="append a line of JSON for each mutant")
    asked = parser.parse_args(arguments)
    return cover(asked.data) if asked.what == "cover" else run(asked)


if __name__ == "__main__":
    sys.exit(main())
