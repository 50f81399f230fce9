"""House rules beyond those of linters: content of the wheel, cost of imports, and statements of documents."""

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
from tools.mutation import EQUIVALENTS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dcpbench"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TORCH = next(c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["type"] == "forbidden")
TORCH_FREE = TORCH["source_modules"]
WITH_TORCH = tuple({line.split(" -> ")[0].removesuffix(".**") for line in TORCH["ignore_imports"]})
"""Modules of these subpackages that run inside a program with torch."""
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


def get_relative_path(path: Path) -> str:
    """Return the path relative to the project, as a test's id."""
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Return a freshly built wheel."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


class TestWheel:
    def test_wheel_installs_one_top_level_name(self, wheel: zipfile.ZipFile) -> None:
        """A top-level `kernels` would overwrite another project's package of that name."""
        names = {name.split("/")[0] for name in wheel.namelist()}
        assert names == {"dcpbench", f"dcpbench-{dcpbench.__version__}.dist-info"}

    def test_wheel_requires_no_package_of_the_test_suite(self, wheel: zipfile.ZipFile) -> None:
        """The requirements of `pip install .` have no extra in the wheel."""
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        lines = wheel.read(metadata).decode().splitlines()
        requirements = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
        required = {re.match(r"[\w.-]+", line)[0].lower() for line in requirements if "extra ==" not in line}
        assert required == {re.match(r"[\w.-]+", line)[0].lower() for line in PROJECT["project"]["dependencies"]}
        extras = [line for name in ("test", "dev") for line in PROJECT["project"]["optional-dependencies"][name]]
        assert not required & {re.match(r"[\w.-]+", line)[0].lower() for line in extras}

    def test_wheel_contains_every_source_and_template(self, wheel: zipfile.ZipFile) -> None:
        files = [*SOURCES, *(path for kind in ("j2", "js", "css", "toml", "sh") for path in PACKAGE.rglob(f"*.{kind}"))]
        assert {get_relative_path(path) for path in files} <= set(wheel.namelist())

    def test_wheel_contains_no_other_kinds_of_files(self, wheel: zipfile.ZipFile) -> None:
        kinds = {Path(name).suffix for name in wheel.namelist() if name.startswith("dcpbench/")}
        assert kinds <= {".py", ".j2", ".css", ".js", ".json", ".toml", ".txt", ".sh", ".cu", ".cuh"}


def list_imported(modules: list[str], *suspects: str) -> list[str]:
    """Return which of `suspects` a fresh interpreter has loaded after importing `modules`."""
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {suspects!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


def list_torch_free_modules(subpackage: str) -> list[str]:
    """Return all modules of a subpackage except those with torch, and except sitecustomize.py, which Python itself
    runs.
    """
    dotted = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES]
    below = [name for name in dotted if name == subpackage or name.startswith(f"{subpackage}.")]
    return [
        name
        for name in below
        if not any(name == part or name.startswith(f"{part}.") for part in WITH_TORCH)
        and not name.endswith(".sitecustomize")
    ]


class TestImports:
    @pytest.mark.parametrize("subpackage", TORCH_FREE)
    def test_torch_free_subpackage_loads_no_torch(self, subpackage: str) -> None:
        """In contrast to import-linter, which reads only this project's sources, this test detects imports by
        third-party packages.
        """
        modules = list_torch_free_modules(subpackage)
        assert modules
        assert list_imported(modules, "torch", "triton", "transformers") == []

    def test_subpackages_without_an_import_contract_load_no_torch(self) -> None:
        modules = [
            m
            for subpackage in ("errors", "plan", "points", "records", "show")
            for m in list_torch_free_modules(f"dcpbench.{subpackage}")
        ]
        assert list_imported(modules, "torch", "triton", "transformers") == []

    def test_command_line_loads_no_heavy_package(self) -> None:
        assert list_imported(["dcpbench.cli"], "torch", "pandas", "numpy", "matplotlib", "jinja2") == []

    def test_no_torch_free_subpackage_is_checked_with_relaxed_types(self) -> None:
        mypy = PROJECT["tool"]["mypy"]
        assert mypy["files"] == ["dcpbench", "tools"]
        assert mypy["strict"]
        relaxed = {name.removesuffix(".*") for override in mypy["overrides"] for name in override["module"]}
        assert not {name for subpackage in TORCH_FREE for name in list_torch_free_modules(subpackage)} & relaxed

    def test_no_module_has_the_name_of_a_used_library(self) -> None:
        """A module `dcpbench/kernels/…/triton.py`, run as a program, would import itself."""
        taken = {"torch", "triton", "flashinfer", "numpy", "pandas", "matplotlib", "nvtx", "typer", "rich"}
        assert not taken & {path.stem for path in SOURCES}


class TestSources:
    def test_modules_share_file_names_only_as_backends_of_one_kind(self) -> None:
        """A traceback, an editor's tab and a table of documentation name a module without its folder."""
        folders: dict[str, set[str]] = {}
        for path in SOURCES:
            folders.setdefault(path.name, set()).add(str(path.parent.relative_to(PACKAGE)))
        shared = {name: places for name, places in folders.items() if len(places) > 1 and name != "__init__.py"}
        assert shared == SHARED_FILE_NAMES

    def test_drawn_tree_of_errors_equals_the_class_hierarchy(self) -> None:
        """Each line of the drawing is an exception with its exit code, one level deeper than its base."""
        drawn = re.findall(r"^ {4}([│├└─ ]*)(\w+Error) +(\d)  ", errors.__doc__ or "", re.MULTILINE)
        found = {
            name: (value.exit_code, len(value.__mro__))
            for name, value in vars(errors).items()
            if isinstance(value, type) and issubclass(value, Exception)
        }
        depth = len(errors.DcpbenchError.__mro__)
        assert {name: (int(code), depth + len(stem) // 4) for stem, name, code in drawn} == found

    def test_help_and_docs_list_the_declared_exit_codes(self) -> None:
        assert list(errors.EXIT_CODES) == list(errors.ExitCode)
        text = cli.app.info.help
        assert isinstance(text, str)
        assert f"3 {errors.EXIT_CODES[errors.ExitCode.NO_ANSWER]} · 4 " in text
        table = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE)
        assert {int(code): meaning.replace("\\|", "|") for code, meaning in table} == {
            int(c): text for c, text in errors.EXIT_CODES.items()
        }

    def test_modules_take_exit_codes_from_the_declaration(self) -> None:
        """Names of codes come from `ExitCode`, and no command returns a bare number other than 0."""
        wrong = [
            f"{path.relative_to(PACKAGE)}: {line.strip()}"
            for path in SOURCES
            for line in path.read_text().splitlines()
            if re.search(r"\b(INTERRUPTED|WRONG|CANNOT_ANSWER|PROGRAM_FAILED|NOT_JUDGED)\b.* = .*\d", line)
            or re.search(r"exit_code = \d", line)
        ]
        assert wrong == ["errors.py: WRONG = 1", "errors.py: INTERRUPTED = 130"]

    def test_equivalent_mutants_change_existing_lines(self) -> None:
        """Delete an entry of tools/mutation_equivalents.txt if its line has changed."""
        entries = [line for line in EQUIVALENTS.read_text().splitlines() if not line.startswith("#")]
        assert len(entries) > 20
        stale = []
        for entry in entries:
            path, _, change = entry.partition(": ")
            lines = (ROOT / path).read_text().splitlines() if (ROOT / path).is_file() else []
            if change.partition(" => ")[0] not in map(str.strip, lines):
                stale.append(entry)
        assert not stale


class TestDocuments:
    def test_architecture_lists_exactly_the_subpackages_and_top_level_modules(self) -> None:
        subpackages = {f"{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
        modules = {path.name for path in PACKAGE.glob("*.py") if path.name != "__init__.py"}
        listed = re.findall(r"^\| `([\w.]+/?)` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
        assert sorted(listed) == sorted(subpackages | modules)

    def test_architecture_names_existing_files_only(self) -> None:
        text = (ROOT / "ARCHITECTURE.md").read_text()
        missing = [name for name in re.findall(r"`([\w/]+\.py)`", text) if not (PACKAGE / name).exists()]
        assert missing == []

    def test_package_has_few_top_level_modules(self) -> None:
        assert len(list(PACKAGE.glob("*.py"))) <= 5

    def test_changelog_has_an_entry_for_this_version(self) -> None:
        assert f"## {dcpbench.__version__}" in (ROOT / "CHANGELOG.md").read_text()

    def test_every_pin_has_a_reason(self) -> None:
        """A reason is a comment above a pin, or a pin above that shares it."""
        lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line]
        pins = [(before, line) for before, line in zip(["", *lines], lines, strict=False) if not line.startswith("#")]
        assert pins
        for before, line in pins:
            assert re.fullmatch(r"[\w-]+==[\w.]+", line), f"{line} is not an exact pin"
            assert before, f"{line} has no reason"

    def test_torch_is_the_first_pin(self) -> None:
        pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert pins[0] == "torch"


def make_environment_without_make() -> dict[str, str]:
    """Return the environment without variables of the `make` that runs these tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "LOCKED"}


class TestMake:
    def test_sweep_target_installs_no_package_of_the_test_suite(self) -> None:
        """The option `-n` of make prints the commands without running them."""
        output = {
            target: subprocess.run(
                ["make", "-n", target, "VENV=nowhere"],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT,
                env=make_environment_without_make(),
            ).stdout
            for target in ("sweep", "test")
        }
        assert "-c constraints.txt -e .\n" in output["sweep"]
        assert "[test,dev]" not in output["sweep"]
        assert "[test,dev]" in output["test"]
        assert "--quiet" not in output["sweep"]

    def test_help_lists_every_target(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
        done = subprocess.run(
            ["make", "--no-print-directory", "help"],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=make_environment_without_make(),
        )
        assert set(re.findall(r"^  make ([\w-]+) +\S", done.stdout, re.MULTILINE)) == targets

    def test_ci_runs_lint_types_and_tests(self) -> None:
        script = ROOT / ".ci" / "run"
        assert os.access(script, os.X_OK)
        assert "make LOCKED=1 lint types test\nmake LOCKED=1 test-versions ARGS='lowest --few'" in script.read_text()

    def test_ci_installs_locked_packages_only(self) -> None:
        """With hashes, pip refuses a file with another hash, and a package without one."""
        words = ["make", "-n", "test", "VENV=nowhere", "LOCKED=1"]
        output = subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=ROOT, env=make_environment_without_make()
        ).stdout
        installs = [line for line in output.splitlines() if "pip install" in line]
        assert len(installs) == 1
        assert "--require-hashes -r requirements.lock && " in installs[0]
        assert installs[0].endswith("--no-deps --no-build-isolation -e .")


MUTABLE = {  # dataclasses and structs that are built step by step, or so often that freezing them would take long
    "dashboard.site": "_Publisher",
    "bench.operators.attention": "Pools",
    "bench.bench_record": "BenchRecord",
    "bench.bench_worker": "PreparedCase",
    "commands.ab": "State",
    "commands.caller": "Part",
    "compare.judging": "_Test",
    "compare.comparison": "Row PointResult Difference OneSidedPoint Finding Comparison",
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
    "serving.traffic": "RequestResult _Turn",
    "syncs.gating.baseline": "Entry Baseline",
    "syncs.sync_report": "Coverage TraceSummary Example Site Totals Finding Verdict Report",
    "syncs.run": "Note",
    "syncs.traces.columns": "Table",
    "syncs.traces.reading": "Args Event ReadProblems",
    "top.facts": "JobFacts",
}


SUBPACKAGES = sorted(
    {name.split(".")[1] for name in TORCH_FREE if name.count(".")} | {"plan", "points", "records", "show"}
)


def list_importable_modules(subpackage: str) -> list[str]:
    """Return the modules of a subpackage that can be imported here."""
    paths = (
        sorted((PACKAGE / subpackage).rglob("*.py"))
        if (PACKAGE / subpackage).is_dir()
        else [PACKAGE / f"{subpackage}.py"]
    )
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return [n for n in names if not (n.startswith(WITH_TORCH) or "recorder" in n or n.endswith("__main__"))]


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_dataclasses_and_structs_are_frozen_unless_listed(subpackage: str) -> None:
    found = set()
    for name in list_importable_modules(subpackage):
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
        (module, cls)
        for module, names in MUTABLE.items()
        for cls in names.split()
        if module.split(".")[0] == subpackage
    }
