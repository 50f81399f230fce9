"""Test the help of `dcpbench bench`: fast, with declared option names, groups, defaults and an example."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from dcpbench import cli
from dcpbench.commands import bench
from tests.cli.helped import get_help

ROOT = Path(cli.__file__).parents[1]
SHARED = {"--seconds", "--timeout", "--device", "-o", "--output", "--force", "--json"}
OPTIONS = {
    "attention": SHARED
    | {
        "--heads",
        "--requests",
        "--context",
        "--page",
        "--kv-dtype",
        "--lengths",
        "--query-length",
        "--backend",
        "--layers",
    },
    "exchange": SHARED
    | {"--heads", "--requests", "--ranks", "--variant", "--layers"}
    | {"--q-replicate", "--no-q-replicate", "--project-first", "--no-project-first"},
    "collectives": SHARED | {"--requests", "--width", "--ranks", "--variant", "--layers"},
    "merge": SHARED | {"--heads", "--requests", "--dcp", "--variant", "--layers"},
    "linear": SHARED | {"--model", "--tp", "--rows", "--matrix", "--weights", "--variant", "--layers"},
    "moe": SHARED | {"--model", "--tp", "--requests", "--rows", "--weights", "--group-size", "--variant", "--layers"},
    "kv-gather": SHARED | {"--requests", "--tokens", "--ranks", "--variant", "--buffer", "--pool-bytes", "--layers"},
}
HEAVY = ("torch", "triton", "pandas", "matplotlib", "numpy", "dcpbench.reports", "rich.progress")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_each_bench(name: str) -> None:
    """Scripts rely on options, so that a new or a lost one must be noticed."""
    command = typer.main.get_command(bench.app).commands[name]
    assert {o for p in command.params for o in [*p.opts, *p.secondary_opts]} == OPTIONS[name]


def test_every_option_has_its_declared_name() -> None:
    """One version of Typer lost names that it derives from variables."""
    notes = [
        note
        for command in bench.app.registered_commands
        if command.name in OPTIONS
        for kind in get_type_hints(command.callback, include_extras=True).values()
        for note in getattr(kind, "__metadata__", ())
        if isinstance(note, OptionInfo)
    ]
    assert len(notes) == sum(len([o for o in names if not o.startswith(("-o", "--no-"))]) for names in OPTIONS.values())
    assert [n for n in notes if not str(next(iter([*n.param_decls, n.default]))).startswith("-")] == []


@pytest.mark.parametrize("name", OPTIONS)
def test_help_has_groups_defaults_and_an_example(name: str) -> None:
    text = get_help("bench", name)
    for words in (
        f"dcpbench bench {name} --",
        "Cases (comma-separated lists)",
        "Measurement",
        "on the CPU.",
    ):
        assert words in text


def test_list_of_benches_suggests_a_first_command() -> None:
    text = get_help("bench")
    assert "Start with: dcpbench bench attention" in text
    assert all(name in text for name in OPTIONS)


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom dcpbench import cli\n"
        "try:\n    cli.main(['bench', 'merge', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout
