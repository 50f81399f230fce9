"""Test `dcpbench dashboard` as a command, and the workflow that publishes its site."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from typer.models import OptionInfo

from dcpbench import cli
from dcpbench.commands import dashboard
from tests.unit import dashboard_builder

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "github-pages.yml"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process, as in a pipe of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["dashboard", *args])
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(args, int(end.value.code or 0), out, err)

    return call


def test_build_writes_a_site_and_prints_its_path(run, tmp_path: Path) -> None:
    """Reports are real ones, and every link of the page leads to a file."""
    runs = dashboard_builder.write_history(tmp_path / "runs", runs=1, count=2)
    done = run("build", str(runs), "-o", str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"Wrote {tmp_path / 'site' / 'index.html'}\n")
    assert "1 made, 0 unchanged" in done.stdout
    for name in ("report.html", "records.jsonl", "points.csv"):
        assert (tmp_path / "site" / "runs" / "run-000" / name).is_file()
    page = (tmp_path / "site" / "index.html").read_text()
    for link in re.findall(r'(?:src|href)="([^"#:?]+)["?]', page):
        assert (tmp_path / "site" / link).is_file(), link
    again = run("build", str(runs), "-o", str(tmp_path / "site"))
    assert "0 made, 1 unchanged" in again.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", "no/such/folder"], "is no folder; name the one that holds your runs"),
        (["build", "tests", "-o", "docs"], "holds no dashboard; give a new folder with -o"),
        (["build", "tests", "-o", "README.md"], "README.md is a file; give a folder with -o, such as -o site."),
        (["build", "tests", "-o", "tests"], "holds the runs themselves"),
        (["serve", "no/such/folder"], "is no folder; name the one that holds your runs"),
        (["serve", "tests", "--port", "99999"], "--port"),
        (["serve", "tests", "--host", "10.0.0.7"], "--host"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_one_error_line(args: list[str], message: str, run) -> None:
    """No option exists to listen elsewhere than on loopback."""
    done = run(*args)
    assert done.returncode == 2
    assert message in " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stderr).split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["build", "serve"])
def test_help_of_every_command_has_an_example(command: str, run) -> None:
    text = run(command, "--help").stdout
    assert f"dcpbench dashboard {command} runs" in text


@pytest.mark.parametrize("command", [dashboard.build, dashboard.serve], ids=lambda c: c.__name__)
def test_every_option_has_its_declared_name(command: Any) -> None:
    """test_help.py has the same test for the other commands."""
    notes = [
        n for kind in get_type_hints(command, include_extras=True).values() for n in getattr(kind, "__metadata__", ())
    ]
    options = [note for note in notes if isinstance(note, OptionInfo)]
    assert options
    assert all(str(next(iter([*o.param_decls, o.default]))).startswith("-") for o in options)


def test_help_imports_no_heavy_package() -> None:
    code = (
        "import sys\nfrom dcpbench import cli\n"
        "try:\n    cli.main(['dashboard', 'serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'numpy', 'pandas', 'starlette', 'jinja2', 'ruptures') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")


class TestPublishing:
    def test_workflow_is_valid_by_the_published_schema(self) -> None:
        command = [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.github-workflows",
            str(EXAMPLE),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def test_command_of_the_workflow_is_valid(self) -> None:
        """The command writes the site to the folder that the next step uploads."""
        steps = yaml.safe_load(EXAMPLE.read_text())["jobs"]["build"]["steps"]
        (build,) = (step["run"] for step in steps if "dashboard build" in step.get("run", ""))
        assert build == "dcpbench dashboard build runs -o site"
        assert steps[-1]["with"]["path"] == "site"

    def test_only_the_publishing_job_has_write_permission(self) -> None:
        workflow = yaml.safe_load(EXAMPLE.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        assert workflow["jobs"]["publish"]["permissions"] == {"pages": "write", "id-token": "write"}
