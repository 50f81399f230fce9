"""Test `dcpbench export` and `import` as commands: output, files and exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcpbench import cli
from dcpbench.exports import FORMATS
from tests.unit import engine_files_builder as files
from tests.unit import record_builder
from tests.unit import serve_record_builder as build

ROOT = Path(cli.__file__).parents[1]
HEAVY = ("torch", "pandas", "numpy", "matplotlib", "pyarrow", "dcpbench.exports", "dcpbench.imports")


@pytest.fixture
def dcpbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command in this process, as in a pipe of 80 columns without colour."""
    for name, value in {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)

    def call(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        typed = [*map(str, args)]
        with pytest.raises(SystemExit) as end:
            cli.main(typed)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(typed, int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write a run with a served point and a decode step."""
    found = [
        build.make_served_record(build.make_point(build.DCP)),
        record_builder.make_ok_record(record_builder.make_point(build.DCP)),
    ]
    return record_builder.write_records(tmp_path / "run", found)


@pytest.mark.parametrize("command", ["export", "import"])
def test_help_has_examples_and_imports_no_heavy_package(command: str) -> None:
    code = (
        "import sys\nfrom dcpbench import cli\n"
        f"try:\n    cli.main([{command!r}, '--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {HEAVY} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "LOADED []" in done.stdout
    assert f"dcpbench {command} " in done.stdout
    assert "For example" in done.stdout


def test_options_of_export_and_import(dcpbench) -> None:
    """Scripts rely on options, so that a lost one must be noticed."""
    options = {
        "export": {"--to", "-o", "--output", "--force", "-h", "--help"},
        "import": {
            "--from",
            "-o",
            "--output",
            "--force",
            "--model",
            "--tp",
            "--dp",
            "--dcp",
            "--pp",
            "--pcp",
            "--gpu",
            "--dtype",
            "-h",
            "--help",
        },
    }
    for command, names in options.items():
        text = re.sub(r"[│╭╮╰╯─]", " ", dcpbench(command, "--help").stdout)
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*(?= )", text)) >= names


@pytest.mark.parametrize("to", list(FORMATS))
def test_every_format_is_written_and_its_path_printed(dcpbench, to: str, run: Path, tmp_path: Path) -> None:
    done = dcpbench("export", run, "--to", to, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    paths = [Path(p) for p in re.findall(r"^Wrote (.*)$", done.stdout, re.MULTILINE)]
    assert paths
    assert all(path.is_file() and path.is_relative_to(tmp_path / "out") for path in paths)
    if to in ("vllm", "sglang", "inferencex"):
        assert done.stderr == "1 of 2 points left out: 1 of decode steps, which have no requests.\n"
    else:
        assert done.stderr == ""


def test_imported_results_are_printed_as_a_table(dcpbench, run: Path, tmp_path: Path) -> None:
    path = files.write_file(
        tmp_path, files.make_vllm_result(), files.remove_details(files.make_vllm_result(max_concurrency=2))
    )
    done = dcpbench("import", path, "--from", "vllm", "--tp", 8, "--dcp", 8, "-o", tmp_path / "engine")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Wrote {tmp_path / 'engine' / 'records.jsonl'}\n"
    assert "1 of 2 without times of requests" in done.stderr
    shown = dcpbench("show", run, tmp_path / "engine")
    assert shown.returncode == 0, shown.stderr
    assert "vllm" in shown.stdout
    assert "Traceback" not in shown.stdout + shown.stderr


def test_import_skips_an_unreadable_file_and_exits_with_4(dcpbench, tmp_path: Path) -> None:
    files.write_file(tmp_path, files.make_vllm_result(), name="good.json")
    (tmp_path / "empty.json").touch()
    done = dcpbench("import", tmp_path, "--from", "vllm", "-o", tmp_path / "run")
    assert done.returncode == 4
    assert done.stdout == f"Wrote {tmp_path / 'run' / 'records.jsonl'}\n"
    assert "1 result of vllm bench serve." in done.stderr
    assert f"Left out: {tmp_path / 'empty.json'} is empty" in " ".join(done.stderr.split())


def test_export_reports_a_missing_gpu_name(dcpbench, tmp_path: Path) -> None:
    path = files.write_file(tmp_path, files.remove_details(files.make_vllm_result()))
    assert dcpbench("import", path, "--from", "vllm", "--tp", 8, "-o", tmp_path / "run").returncode == 0
    done = dcpbench("export", tmp_path / "run", "--to", "inferencex")
    assert done.returncode == 2
    assert "import again with --gpu NAME" in " ".join(done.stderr.split())


def test_import_without_a_name_writes_to_the_default_folder(dcpbench, tmp_path: Path) -> None:
    path = files.write_file(tmp_path, files.make_vllm_result())
    done = dcpbench("import", path, "--from", "vllm", cwd=tmp_path)
    assert re.fullmatch(r"Wrote runs/\d{4}-\d\d-\d\d-\d{6}-import-vllm/records\.jsonl\n", done.stdout)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "RUN", "--to", "prometeus"), "did you mean prometheus"),
        (("export", "nowhere", "--to", "csv"), "does not exist"),
        (("import", "nowhere.json", "--from", "vllm"), "cannot be read"),
        (("import", "RUN/records.jsonl", "--from", "vllm"), "is a record of dcpbench"),
        (("import", "RESULT", "--from", "sglang"), "import it with --from vllm"),
        (("import", "RESULT", "--from", "vllm", "--dcp", "8"), "--dcp without --tp"),
    ],
    ids=["format", "run", "file", "ours", "engine", "dcp"],
)
def test_invalid_arguments_exit_with_2_and_one_error_line(
    args: tuple[str, ...], message: str, run: Path, tmp_path: Path, dcpbench
) -> None:
    result = files.write_file(tmp_path, files.make_vllm_result())
    typed = [a.replace("RUN", str(run)).replace("RESULT", str(result)) for a in args]
    done = dcpbench(*typed, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_export_to_an_existing_file_needs_force(dcpbench, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.prom"
    assert dcpbench("export", run, "--to", "prometheus", "-o", out).returncode == 0
    assert dcpbench("export", run, "--to", "prometheus", "-o", out).returncode == 2
    assert dcpbench("export", run, "--to", "prometheus", "-o", out, "--force").returncode == 0


def test_exported_vllm_file_has_the_fields_of_vllm(dcpbench, run: Path, tmp_path: Path) -> None:
    dcpbench("export", run, "--to", "vllm", "-o", tmp_path / "out")
    (path,) = (tmp_path / "out").iterdir()
    assert json.loads(path.read_text())["backend"] == "dcpbench"
