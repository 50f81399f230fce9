"""Write requirements.lock: every package that CI installs, with its version and the hashes of its files.

    python -m tools.lock uv            # `make lock` installs uv and runs this

The lock has the requirements of `.[test,dev]` on Python 3.11 and newer, within constraints.txt; `pip install --require-hashes -r
requirements.lock` installs these packages and no others. torch is its build for the CPU, which needs no CUDA packages. A package index must
offer this build, or pip finds no file with these hashes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
EXTRAS = ("test", "dev")
OLDEST = "3.11"
MIN_AGE = "7 days"  # minimum age of a release: mirrors may lack newer ones, and their problems are unknown
EDITABLE = "editables>=0.5"  # hatchling needs it for an editable install (-e)
TORCH = {  # SHA-256 of torch's files by version, from their index; the first was computed from the file
    "2.13.0": (  # builds `+cpu` of manylinux_2_28: for Python 3.11 and 3.12 on x86_64, then on aarch64
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
    )
}
HEAD = "# What CI installs, by `pip install --require-hashes -r requirements.lock`; `make lock` writes it. Python 3.11 and 3.12.\n"
HASH = " --hash=sha256:"


def read_requirements() -> list[Requirement]:
    """Return the build and run requirements of pyproject.toml, with the extras of CI."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    lines, extras = [*project["dependencies"], *pyproject["build-system"]["requires"], EDITABLE], [*EXTRAS]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            requirement = Requirement(line)
            if requirement.name == project["name"]:
                extras += [other for other in sorted(requirement.extras) if other not in extras]
            else:
                lines.append(line)
    return [Requirement(line) for line in dict.fromkeys(lines)]


def read_constraints() -> list[Requirement]:
    """Return the pinned versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def list_torch_requirements() -> list[str]:
    """Return the requirements of the installed build of torch."""
    required = importlib.metadata.requires("torch") or []
    return [line for line in required if "extra ==" not in line]


def format_torch_entry() -> str:
    """Return torch's lines in the lock. Exit with a message if its hashes are unknown."""
    version = next(str(item.specifier).removeprefix("==") for item in read_constraints() if item.name == "torch")
    if version not in TORCH:
        sys.exit(
            f"constraints.txt has torch {version}, whose hashes are unknown; add those of its CPU builds to TORCH in tools/lock.py."
        )
    return " \\\n".join([f"torch=={version}", *(f"    --hash=sha256:{item}" for item in TORCH[version])]) + "\n"


def parse_lock(text: str) -> list[tuple[Requirement, int]]:
    """Return the pin and the number of hashes of each entry of a lock."""
    lines = text.replace("\\\n", "").splitlines()
    parts = [line.partition(HASH) for line in lines if line and not line.startswith("#")]
    return [(Requirement(pin), (HASH + hashes).count(HASH) if hashes else 0) for pin, _, hashes in parts]


def find_problems(text: str, required: Sequence[Requirement], pinned: Sequence[Requirement]) -> list[str]:
    """Return a sentence for each difference of a lock from pyproject.toml (`required`) and constraints.txt (`pinned`)."""
    entries = parse_lock(text)
    by_name: dict[str, list[Requirement]] = {}
    for pin, _ in entries:
        by_name.setdefault(canonicalize_name(pin.name), []).append(pin)
    found = [f"{pin} has no hash" for pin, hashes in entries if not hashes]
    found += [f"{pin} is no exact version" for pin, _ in entries if not _get_exact_version(pin)]
    for requirement in required:
        found += [] if canonicalize_name(requirement.name) in by_name else [f"{requirement} is not in it"]
    for requirement in (*required, *pinned):
        pins = by_name.get(canonicalize_name(requirement.name), [])
        found += [
            f"{pin} is not {requirement}"
            for pin in pins
            if not requirement.specifier.contains(_get_exact_version(pin), prereleases=True)
        ]
    return found


def _get_exact_version(pin: Requirement) -> str:
    text = str(pin.specifier)
    return text.removeprefix("==") if text.startswith("==") and "," not in text else ""


def main(arguments: Sequence[str]) -> int:
    """Resolve the requirements, and write the lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("uv", help="program of uv")
    uv = parser.parse_args(arguments).uv
    requirements = [
        str(requirement) for requirement in read_requirements() if requirement.name != "torch"
    ] + list_torch_requirements()
    options = ["pip", "compile", "-", "--universal", "--python-version", OLDEST, "--generate-hashes", "--quiet"]
    options += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "-c", "constraints.txt"]
    options += ["--exclude-newer", MIN_AGE]
    try:
        done = subprocess.run(
            [uv, *options], input="\n".join(requirements), capture_output=True, text=True, cwd=ROOT, check=False
        )
    except OSError as e:
        parser.error(f"{uv} cannot be run ({e.strerror}); name the program of uv, or type: make lock")
    if done.returncode or not done.stdout.strip():
        parser.error(
            f"{uv} returned no versions that fit together; change the bounds in pyproject.toml:\n{done.stderr}"
        )
    entries = [*re.split(r"\n(?=\S)", done.stdout.strip()), format_torch_entry().strip()]
    LOCK.write_text(HEAD + "\n".join(sorted(entries)) + "\n", encoding="utf-8")
    sys.stdout.write(f"Wrote {LOCK.name}: {len(entries)} packages.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
