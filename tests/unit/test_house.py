"""The house rules that no linter knows: what a wheel holds, what an import costs, what documents promise."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import msgspec
import pytest

import dcpbench
from dcpbench import cli, errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dcpbench"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TORCH = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "forbidden")
TORCH_FREE = TORCH["source_modules"]
WITH_TORCH = tuple({line.split(" -> ")[0].removesuffix(".**") for line in TORCH["ignore_imports"]})
"""Parts of these rooms that run inside a program with torch."""
SHARED_FILE_NAMES = {
    "inferencex.py": {"exports", "imports"},
    "sglang.py": {"engine_plugins", "exports", "imports"},
    "vllm.py": {"engine_plugins", "exports", "imports"},
    "kv_gather.py": {"bench/operators", "kernels"},
    "linear.py": {"bench/operators", "kernels"},
    "merge.py": {"bench/operators", "kernels"},
    "reference.py": {"kernels/attention", "kernels/gqa", "kernels/prefill"},
    "serve.py": {"commands", "workloads"},
    "verify.py": {"commands", "workloads"},
}
"""File names that several modules have, with their folders: backends for the same tool, a kernel and its bench, slow
references of two operations, and a command and its workload.
"""


def named(path: Path) -> str:
    """Path below the project, as a test's id."""
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A freshly built wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


class TestWheel:
    def test_it_installs_one_top_level_name(self, wheel: zipfile.ZipFile) -> None:
        """A top-level `kernels` would overwrite another project's package of that name."""
        names = {name.split("/")[0] for name in wheel.namelist()}
        assert names == {"dcpbench", f"dcpbench-{dcpbench.__version__}.dist-info"}

    def test_it_asks_for_no_package_of_the_suite(self, wheel: zipfile.ZipFile) -> None:
        """What `pip install .` brings stands in the wheel without an extra."""
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        lines = wheel.read(metadata).decode().splitlines()
        asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
        brought = {re.match(r"[\w.-]+", line)[0].lower() for line in asked if "extra ==" not in line}
        assert brought == {re.match(r"[\w.-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
        extras = [line for name in ("test", "dev") for line in PROJECT["project"]["optional-dependencies"][name]]
        assert not brought & {re.match(r"[\w.-]+", line)[0].lower() for line in extras}

    def test_it_holds_every_source_and_template(self, wheel: zipfile.ZipFile) -> None:
        files = [*SOURCES, *(path for kind in ("j2", "js", "css", "toml", "sh") for path in PACKAGE.rglob(f"*.{kind}"))]
        assert {named(path) for path in files} <= set(wheel.namelist())

    def test_it_holds_nothing_else(self, wheel: zipfile.ZipFile) -> None:
        kinds = {Path(name).suffix for name in wheel.namelist() if name.startswith("dcpbench/")}
        assert kinds <= {".py", ".j2", ".css", ".js", ".json", ".toml", ".txt", ".sh", ".cu", ".cuh"}


def imported_by(modules: list[str], *suspects: str) -> list[str]:
    """Return which of `suspects` a fresh interpreter has loaded after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {suspects!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


def modules_of(room: str) -> list[str]:
    """All modules of a room but its parts with torch; Python itself runs sitecustomize.py, in programs of others."""
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]
    below = [name for name in dotted if name == room or name.startswith(f"{room}.")]
    return [
        name
        for name in below
        if not any(name == part or name.startswith(f"{part}.") for part in WITH_TORCH)
        and not name.endswith(".sitecustomize")
    ]


class TestImports:
    @pytest.mark.parametrize("room", TORCH_FREE)
    def test_a_torch_free_room_loads_no_torch(self, room: str) -> None:
        """import-linter reads our sources; this asks Python, and sees what third parties drag in."""
        modules = modules_of(room)
        assert modules
        assert imported_by(modules, "torch", "triton", "transformers") == []

    def test_rooms_that_only_others_import_are_as_free(self) -> None:
        modules = [
            m for room in ("errors", "plan", "points", "records", "show") for m in modules_of(f"dcpbench.{room}")
        ]
        assert imported_by(modules, "torch", "triton", "transformers") == []

    def test_the_command_line_is_instant_as_it_loads_nothing_heavy(self) -> None:
        assert imported_by(["dcpbench.cli"], "torch", "pandas", "numpy", "matplotlib", "jinja2") == []

    def test_no_torch_free_room_is_checked_with_relaxed_types(self) -> None:
        mypy = PROJECT["tool"]["mypy"]
        assert mypy["files"] == ["dcpbench", "tools"]
        assert mypy["strict"]
        relaxed = {name.removesuffix(".*") for override in mypy["overrides"] for name in override["module"]}
        assert not {name for room in TORCH_FREE for name in modules_of(room)} & relaxed

    def test_no_module_shadows_a_library_that_it_uses(self) -> None:
        """`python dcpbench/kernels/…/triton.py` would import itself."""
        taken = {"torch", "triton", "flashinfer", "numpy", "pandas", "matplotlib", "nvtx", "typer", "rich"}
        assert not taken & {path.stem for path in SOURCES}


class TestSources:
    def test_two_modules_share_a_file_name_only_as_backends_of_one_kind(self) -> None:
        """A traceback, a tab of an editor and a table of documentation name a module without its folder."""
        folders: dict[str, set[str]] = {}
        for path in SOURCES:
            folders.setdefault(path.name, set()).add(str(path.parent.relative_to(PACKAGE)))
        shared = {name: places for name, places in folders.items() if len(places) > 1 and name != "__init__.py"}
        assert shared == SHARED_FILE_NAMES

    def test_the_tree_of_errors_is_drawn_as_it_is(self) -> None:
        """Each line of the drawing is an exception with its exit code, one level deeper than its base."""
        drawn = re.findall(r"^ {4}([│├└─ ]*)(\w+Error) +(\d)  ", errors.__doc__ or "", re.MULTILINE)
        found = {
            name: (value.exit_code, len(value.__mro__))
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, Exception)
        }
        depth = len(errors.DcpbenchError.__mro__)
        assert {name: (int(code), depth + len(stem) // 4) for stem, name, code in drawn} == found

    def test_exit_codes_are_declared_once(self) -> None:
        """The help and docs/runs.md say what the declaration says, and each code has a meaning."""
        assert list(errors.EXIT_CODES) == list(errors.ExitCode)
        text = cli.app.info.help
        assert isinstance(text, str)
        assert f"3 {errors.EXIT_CODES[errors.ExitCode.NO_ANSWER]} · 4 " in text
        table = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE)
        assert {int(code): meaning.replace("\\|", "|") for code, meaning in table} == {
            int(c): text for c, text in errors.EXIT_CODES.items()
        }

    def test_no_module_writes_an_exit_code_of_its_own(self) -> None:
        """Names of codes come from `ExitCode`, and no command returns a bare number but 0."""
        wrong = [
            f"{path.relative_to(PACKAGE)}: {line.strip()}"
            for path in SOURCES
            for line in path.read_text().splitlines()
            if re.search(r"\b(INTERRUPTED|WRONG|CANNOT_ANSWER|PROGRAM_FAILED|NOT_JUDGED)\b.* = .*\d", line)
            or re.search(r"exit_code = \d", line)
        ]
        assert wrong == ["errors.py: WRONG = 1", "errors.py: INTERRUPTED = 130"]


class TestDocuments:
    def test_architecture_has_a_sentence_for_every_room_and_names_none_that_is_gone(self) -> None:
        """Rooms are the folders of the package and what lies loose beside them."""
        rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
        loose = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
        named_there = re.findall(r"^\| `([\w.]+/?)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
        assert sorted(named_there) == sorted(rooms | loose)

    def test_architecture_names_no_file_that_is_gone(self) -> None:
        text = (ROOT / "ARCHITECTURE.md").read_text()
        gone = [name for name in re.findall(r"`([\w/]+\.py)`", text) if not (PACKAGE / name).exists()]
        assert gone == []

    def test_few_modules_lie_loose(self) -> None:
        """What is no room of the flow has no place yet."""
        assert len(list(PACKAGE.glob("*.py"))) <= 5

    def test_the_changelog_knows_this_version(self) -> None:
        assert f"## {dcpbench.__version__}" in (ROOT / "CHANGELOG.md").read_text()

    def test_every_pin_has_its_reason_above_it(self) -> None:
        """A comment, or the pin that shares it."""
        lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
        pins = [(before, line) for before, line in zip(["", *lines], lines, strict=False) if not line.startswith("#")]
        assert pins
        for before, line in pins:
            assert re.fullmatch(r"[\w-]+==[\w.]+", line), f"{line} is not an exact pin"
            assert before, f"{line} has no reason"

    def test_torch_is_pinned_above_all(self) -> None:
        pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pins[0] == "torch"


def outside_make() -> dict[str, str]:
    """The environment, without what the `make` that runs these tests was given."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "LOCKED"}


class TestMake:
    def test_measuring_installs_nothing_of_the_suite(self) -> None:
        """`make -n` says what would be run."""
        said = {
            target: subprocess.run(
                ["make", "-n", target, "VENV=nowhere"],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
                env=outside_make(),
            ).stdout
            for target in ("sweep", "test")
        }
        assert "-c constraints.txt -e .\n" in said["sweep"]
        assert "[test,dev]" not in said["sweep"]
        assert "[test,dev]" in said["test"]
        assert "--quiet" not in said["sweep"]

    def test_help_lists_every_target(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
        done = subprocess.run(
            ["make", "--no-print-directory", "help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=outside_make(),
        )
        assert set(re.findall(r"^  make ([\w-]+) +\S", done.stdout, re.MULTILINE)) == targets

    def test_ci_runs_lint_types_and_tests(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        assert "make LOCKED=1 lint types test\nmake LOCKED=1 test-versions ARGS='lowest --few'" in script.read_text()

    def test_ci_installs_what_is_locked_and_nothing_else(self) -> None:
        """pip refuses a file of another hash, and a package that has none."""
        words = ["make", "-n", "test", "VENV=nowhere", "LOCKED=1"]
        said = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=outside_make()).stdout
        installs = [line for line in said.splitlines() if "pip install" in line]
        assert len(installs) == 1
        assert "--require-hashes -r requirements.lock && " in installs[0]
        assert installs[0].endswith("--no-deps --no-build-isolation -e .")


FILLED = {  # dataclasses and structs that are filled step by step, or so often that freezing them would take long
    "dashboard.site": "_Publisher",
    "bench.operators.attention": "Pools",
    "bench.bench_record": "BenchRecord",
    "bench.bench_worker": "PreparedCase",
    "commands.ab": "State",
    "commands.caller": "Part",
    "compare.judging": "_Test",
    "compare.comparison": "Row PointResult Difference Broken Finding Comparison",
    "hangs.evidence": "Rank Evidence",
    "imports.inferencex": "Row",
    "imports.sglang": "File",
    "imports.vllm": "File",
    "launch.launcher": "_JobEnd",
    "records.file": "_Version",
    "reports.page.render": "Chart",
    "reports.plots": "FigureWriter",
    "reports.sections": "Section",
    "servers.load": "Outcome Pace",
    "servers.measure": "ServedLoad _LoadState",
    "servers.step_points": "_Measured",
    "serving.outcome": "StepCounts",
    "serving.replay": "_Instance",
    "serving.requests": "Sequence ReplicaStep Step",
    "serving.step_times": "_Version",
    "serving.traffic": "Sample",
    "syncs.gating.baseline": "Entry Baseline",
    "syncs.sync_report": "Coverage TraceSummary Example Site Totals Finding Verdict Report",
    "syncs.run": "Note",
    "syncs.traces.columns": "Table",
    "syncs.traces.reading": "Args Event ReadProblems",
    "top.facts": "JobFacts",
}


ROOMS = sorted({name.split(".")[1] for name in TORCH_FREE if name.count(".")} | {"plan", "points", "records", "show"})


def modules_without_torch(room: str) -> list[str]:
    """Return the modules of a subpackage that can be imported here."""
    paths = sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / f"{room}.py"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [n for n in names if not (n.startswith(WITH_TORCH) or "recorder" in n or n.endswith("__main__"))]


@pytest.mark.parametrize("room", ROOMS)
def test_values_cannot_be_changed(room: str) -> None:
    """All other dataclasses and structs of the rooms without torch are frozen."""
    found = set()
    for name in modules_without_torch(room):
        module = importlib.import_module(name)
        for cls in vars(module).values():
            if not isinstance(cls, type) or cls.__module__ != name:
                continue
            if dataclasses.is_dataclass(cls):
                frozen = cls.__dataclass_params__.frozen
            elif issubclass(cls, msgspec.Struct):
                frozen = cls.__struct_config__.frozen
            else:
                continue
            if not frozen:
                found.add((name.removeprefix("dcpbench."), cls.__name__))
    assert found == {
        (module, cls) for module, names in FILLED.items() for cls in names.split() if module.split(".")[0] == room
    }
