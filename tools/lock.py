"""Write requirements.lock: every package that CI installs, with its version and the hashes of its files.

    python -m tools.lock uv            # `make lock` brings uv along; the new lock replaces the old one

It holds what `.[test,dev]` needs on Python 3.11 and newer, as constraints.txt allows: `pip install --require-hashes -r
requirements.lock` installs that and nothing else. torch is its build for the CPU, which package indices that have it offer
beside the default one; that needs no packages of CUDA, and an index without it has no file of these hashes.
"""

from __future__ import annotations

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
SETTLED = "7 days"  # minimum age of a release: younger ones are not everywhere, and their problems are unknown
EDITABLE = "editables>=0.5"  # hatchling needs it for an editable install (-e), besides build requirements
TORCH = {  # SHA-256 of torch's files by version, as their index has them; the first was computed from the file
    "2.13.0": (  # builds `+cpu` of manylinux_2_28: of Python 3.11 and 3.12 on x86_64, then of both on aarch64
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
    )
}
HEAD = "# What CI installs, by `pip install --require-hashes -r requirements.lock`; `make lock` writes it. Python 3.11 and 3.12.\n"
HASH = " --hash=sha256:"


def wanted() -> list[Requirement]:
    """Return the requirements of pyproject.toml, to build and to run, with the extras of CI."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = told["project"]
    lines, extras = [*project["dependencies"], *told["build-system"]["requires"], EDITABLE], [*EXTRAS]
    for extra in extras:
        for line in project["optional-dependencies"][extra]:
            of = Requirement(line)
            if of.name == project["name"]:
                extras += [also for also in sorted(of.extras) if also not in extras]
            else:
                lines.append(line)
    return [Requirement(line) for line in dict.fromkeys(lines)]


def constraints() -> list[Requirement]:
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def of_torch() -> list[str]:
    """Return the requirements of the installed build of torch."""
    asked = importlib.metadata.requires("torch") or []
    return [line for line in asked if "extra ==" not in line]


def torch_entry() -> str:
    """Return torch's lines in the lock; exit with a message if its hashes are not known."""
    version = next(str(of.specifier).removeprefix("==") for of in constraints() if of.name == "torch")
    if version not in TORCH:
        sys.exit(
            f"constraints.txt has torch {version}, whose hashes are not known: add those of its CPU builds to TORCH in tools/lock.py."
        )
    return " \\\n".join([f"torch=={version}", *(f"    --hash=sha256:{of}" for of in TORCH[version])]) + "\n"


def locked(text: str) -> list[tuple[Requirement, int]]:
    """Return each entry of a lock: its pin, and the number of its hashes."""
    lines = text.replace("\\\n", "").splitlines()
    parts = [line.partition(HASH) for line in lines if line and not line.startswith("#")]
    return [(Requirement(pin), (HASH + hashes).count(HASH) if hashes else 0) for pin, _, hashes in parts]


def problems(text: str, asked: Sequence[Requirement], pinned: Sequence[Requirement]) -> list[str]:
    """Return a sentence for each difference of a lock from pyproject.toml (`asked`) and constraints.txt (`pinned`)."""
    entries = locked(text)
    by_name: dict[str, list[Requirement]] = {}
    for pin, _ in entries:
        by_name.setdefault(canonicalize_name(pin.name), []).append(pin)
    found = [f"{pin} has no hash" for pin, hashes in entries if not hashes]
    found += [f"{pin} is no exact version" for pin, _ in entries if not _version(pin)]
    for of in asked:
        found += [] if canonicalize_name(of.name) in by_name else [f"{of} is not in it"]
    for of in (*asked, *pinned):
        pins = by_name.get(canonicalize_name(of.name), [])
        found += [f"{pin} is not {of}" for pin in pins if not of.specifier.contains(_version(pin), prereleases=True)]
    return found


def _version(pin: Requirement) -> str:
    text = str(pin.specifier)
    return text.removeprefix("==") if text.startswith("==") and "," not in text else ""


def main(uv: str) -> int:
    """Resolve and write the lock."""
    asked = [str(of) for of in wanted() if of.name != "torch"] + of_torch()
    words = ["pip", "compile", "-", "--universal", "--python-version", OLDEST, "--generate-hashes", "--quiet"]
    words += ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links", "-c", "constraints.txt"]
    words += ["--exclude-newer", SETTLED]
    made = subprocess.run([uv, *words], input="\n".join(asked), capture_output=True, text=True, cwd=ROOT, check=False)
    if made.returncode:
        sys.exit(f"uv found no versions that fit:\n{made.stderr}")
    entries = [*re.split(r"\n(?=\S)", made.stdout.strip()), torch_entry().strip()]
    LOCK.write_text(HEAD + "\n".join(sorted(entries)) + "\n", encoding="utf-8")
    sys.stdout.write(f"Wrote {LOCK.name}: {len(entries)} packages.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
