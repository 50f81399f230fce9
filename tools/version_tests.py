"""Run the tests of reports and of the command line with the lowest and with the newest versions of the libraries.

    python -m tools.version_tests [lowest|newest] [--few] [PYTEST-ARGUMENT...]

`lowest` installs the lowest versions that pyproject.toml allows, `newest` the newest releases of the package index; without either word
both run. `--few` runs the small selection of CI. Each run creates a separate virtual environment under .venv/versions. PyTorch, Triton and
the test suite come from the environment that runs this program. Exit code 1: a test failed, or the versions cannot be installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = Path(sys.prefix) / "versions"
LOWEST, NEWEST = "lowest", "newest"
EXTRAS = ("dashboard",)
SHARED_PACKAGES = frozenset({"torch", "triton"})  # large packages, on which the engine depends, but not the reports
SHOWN_PACKAGES = ("numpy", "pandas", "matplotlib", "typer", "rich", "msgspec")  # versions that the output names
TESTS = (  # patterns of test files that depend on libraries; not test_outputs.py, which has widths of pinned versions
    # pandas and Matplotlib: tables and figures of reports, comparisons and the dashboard
    "tests/unit/test_bench_reports.py",
    "tests/unit/test_compare_outputs.py",
    "tests/unit/test_dashboard_*.py",
    "tests/unit/test_figures.py",
    "tests/unit/test_report_page.py",
    "tests/unit/test_reports.py",
    "tests/unit/test_reports_[!h]*.py",  # hostile records take as long as all others
    # msgspec and PyArrow: files for other programs, and files of other programs
    "tests/unit/test_exports.py",
    "tests/unit/test_exports_files.py",
    "tests/unit/test_imports_bad_input.py",
    # Typer and Rich: arguments, help pages, terminals
    "tests/cli/test_bench_help.py",
    "tests/cli/test_dashboard.py",
    "tests/cli/test_exports.py",
    "tests/cli/test_help.py",
    "tests/cli/test_nonsense.py",
    "tests/cli/test_option_groups.py",
    "tests/cli/test_syncs_cli.py",
    "tests/unit/test_show.py",
    "tests/unit/test_terminal.py",
    "tests/unit/test_top_shown.py",
    "tests/unit/test_typed.py",
)
FEW_TESTS = (  # test files that CI runs: reports, help pages, tables and files of each library
    "tests/cli/test_help.py",
    "tests/cli/test_option_groups.py",
    "tests/unit/test_dashboard_server.py",
    "tests/unit/test_exports.py",
    "tests/unit/test_imports_bad_input.py",
    "tests/unit/test_reports.py",
    "tests/unit/test_show.py",
)
FEW_OPTION = "--few"
PYTEST = ("-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider")
QUICK_MARKS = "not long and not browser and not soak"
TIMED_TESTS = (
    "tests/cli/test_help.py::test_help_takes_half_a_second_of_processor_time"  # speed does not depend on the versions
)


def read_requirements() -> list[Requirement]:
    """Return the run-time requirements of pyproject.toml without SHARED_PACKAGES."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return [required for line in lines if (required := Requirement(line)).name not in SHARED_PACKAGES]


def pin_lowest(required: Requirement) -> str:
    """Return the requirement of the lowest allowed version. Raise ValueError if there is no single lower bound."""
    bounds = [bound.version for bound in required.specifier if bound.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(
            f"pyproject.toml requires {required}, which has no single lower bound: write {required.name}>=VERSION."
        )
    return f"{required.name}=={bounds[0]}"


def list_packages(which: str) -> list[str]:
    """Return the requirements that pip installs into an environment."""
    if which == LOWEST:
        return [pin_lowest(required) for required in read_requirements()]
    return [required.name for required in read_requirements()]


def find_test_files(*, few: bool = False) -> list[str]:
    """Return the paths of the test files, relative to the repository; with `few`, only those of CI."""
    patterns = FEW_TESTS if few else TESTS
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def create_environment(which: str) -> Path | None:
    """Return the interpreter of a new environment with these versions, or None if pip cannot install them.

    Packages of the present environment come behind its own. They are added last, because pip would treat them as installed.
    """
    folder = ENVIRONMENTS / which
    venv.create(folder, clear=True, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--disable-pip-version-check",
        "--no-compile",
    ]
    if subprocess.run([*pip, "--quiet", "--only-binary", ":all:", *list_packages(which)], check=False).returncode:
        return None
    shared = [str(ROOT), *(entry for entry in sys.path if entry.endswith("-packages"))]
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")
    return python


def read_versions(python: Path) -> Mapping[str, str]:
    """Return the versions of SHOWN_PACKAGES in an interpreter's environment."""
    program = f"import importlib.metadata as m; print(*(m.version(name) for name in {SHOWN_PACKAGES}))"
    found = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(SHOWN_PACKAGES, found, strict=True))


def run_tests(which: str, arguments: Sequence[str]) -> int:
    """Run the tests in a new environment; return the exit code of pytest, or 1 if the environment cannot be made."""
    begun = time.monotonic()
    python = create_environment(which)
    if python is None:
        sys.stderr.write(f"The {which} versions cannot be installed together; pip names the reason above.\n")
        return 1
    versions = ", ".join(f"{name} {version}" for name, version in read_versions(python).items())
    sys.stdout.write(f"{which}: {versions} (installed in {time.monotonic() - begun:.0f} s)\n")
    sys.stdout.flush()
    command = [
        str(python),
        "-m",
        "pytest",
        *PYTEST,
        "-m",
        QUICK_MARKS,
        "--deselect",
        TIMED_TESTS,
        *find_test_files(few=FEW_OPTION in arguments),
    ]
    command += [argument for argument in arguments if argument != FEW_OPTION]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return 1 if a test failed with any of the versions."""
    if list(arguments) in (["-h"], ["--help"]):
        sys.stdout.write(str(__doc__))
        return 0
    named = [which for which in (LOWEST, NEWEST) if list(arguments[:1]) == [which]]
    codes = [run_tests(which, arguments[len(named) :]) for which in named or (LOWEST, NEWEST)]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
