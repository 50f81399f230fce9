"""Test `dcpbench syncs scan` and `baseline` as commands, with prepared reports in place of read traces."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
import typer
from typer.models import OptionInfo

from dcpbench import cli
from dcpbench.commands import syncs as syncs_command
from dcpbench.errors import UsageError
from dcpbench.show import terminal
from dcpbench.syncs import files
from dcpbench.syncs import scan as scanning
from tests.unit import syncs_builder as build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.syncs.sync_report import Report

ROOT = Path(cli.__file__).parents[1]
COMMANDS = ("scan", "baseline")


class Shell:
    """Run commands in a folder with one trace and a prepared report."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.report: Callable[[], Report] = lambda: build.make_report(build.make_site())
        self.seen: dict[str, Any] = {}
        self._capture = capture
        (folder / "t.json").write_text("{}")

    def scan(self, paths: Sequence[Path], **options: Any) -> Report:
        """Replace the reader of traces."""
        self.seen = {"paths": [str(p) for p in paths], **options}
        return self.report()

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of `dcpbench syncs ARGS`."""
        with pytest.raises(SystemExit) as ended:
            cli.main(["syncs", *args])
        captured = self._capture.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err


@pytest.fixture
def syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    shell = Shell(tmp_path, capsys)
    monkeypatch.setattr(scanning, "scan_traces", shell.scan)
    return shell


class TestExitCodes:
    @pytest.mark.parametrize(
        ("report", "args", "code"),
        [
            (build.make_report, [], 0),
            (lambda: build.make_report(build.make_site()), [], 1),
            (lambda: build.make_report(build.make_site()), ["--allow", "kv.check_all"], 0),
            (lambda: build.make_report(build.make_site()), ["--max-per-step", "1"], 0),
            (lambda: build.make_report(build.make_site()), ["--max-per-step", "0.5"], 1),
            (lambda: build.make_report(build.make_site()), ["--max-bubble-us", "299"], 1),
            (lambda: build.make_report(build.make_site()), ["--max-bubble-us", "300"], 0),
            (lambda: build.make_report(traces=[build.make_trace(gpu_events=0)]), [], 3),
            (lambda: build.make_report(traces=[build.make_trace(steps=None)]), ["--max-per-step", "1"], 3),
        ],
    )
    @pytest.mark.parametrize("form", ["table", "json", "sarif", "junit", "github", "markdown"])
    def test_exit_code_follows_the_verdict_in_every_format(
        self, syncs: Shell, report: Callable[[], Report], args: list[str], code: int, form: str
    ) -> None:
        syncs.report = report
        assert syncs("scan", "t.json", "--format", form, *args)[0] == code

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["gone.json"], "There is no trace gone.json"),
            (["*.nothing"], "matches no trace (*.json, *.json.gz, *.sqlite, "),
            (["t.json", "--format", "html"], "give one of table, json"),
            (["t.json", "--baseline", "gone.json"], "dcpbench syncs baseline TRACE -o gone.json"),
            (["t.json", "--root", "gone"], "--root gone is not a folder"),
            (["t.json", "--max-per-step", "-1"], "give a number from 0"),
            (["t.json", "--max-bubble-us", "nan"], "give a number from 0"),
            (["t.json", "--allow", " "], "--allow is empty"),
            (["t.json", "-o", "."], "is a folder"),
            (["t.json", "-o", "t.json"], "--force"),
            (["t.json", "-o", "no/x.json"], "mkdir -p no"),
        ],
    )
    def test_invalid_arguments_exit_with_2_before_a_trace_is_read(
        self, syncs: Shell, args: list[str], words: str
    ) -> None:
        code, out, err = syncs("scan", *args)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert words in err
        assert syncs.seen == {}


class TestOutput:
    def test_stdout_has_only_json_and_stderr_the_verdict(self, syncs: Shell) -> None:
        _, out, err = syncs("scan", "t.json", "--format", "json")
        assert json.loads(out)["verdict"]["status"] == "findings"
        assert err.splitlines()[-1] == "1 finding: exit code 1."

    def test_output_file_is_written_and_named_in_the_last_line(self, syncs: Shell) -> None:
        code, out, _ = syncs("scan", "t.json", "--format", "json", "-o", "r.json")
        assert (code, out) == (1, "Wrote r.json\n")
        assert json.loads((syncs.folder / "r.json").read_text())["totals"]["syncs"] == 10

    def test_output_file_is_overwritten_only_with_force(self, syncs: Shell) -> None:
        (syncs.folder / "r.json").write_text("mine")
        assert syncs("scan", "t.json", "-o", "r.json")[0] == 2
        assert (syncs.folder / "r.json").read_text() == "mine"
        assert syncs("scan", "t.json", "-o", "r.json", "--force")[0] == 1
        assert "check_all" in (syncs.folder / "r.json").read_text()

    def test_pipe_gets_140_columns_without_colours(self, syncs: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "40")
        syncs.report = build.make_report_of_all_kinds
        lines = syncs("scan", "t.json")[1].splitlines()
        assert 110 < max(map(len, lines)) <= 140
        assert not any("\x1b" in line for line in lines)

    def test_report_is_appended_to_the_step_summary(self, syncs: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        summary = syncs.folder / "summary.md"
        summary.write_text("# before\n")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        syncs.report = lambda: build.make_report(*(build.make_site(f"s{n}") for n in range(12)))
        _, out, _ = syncs("scan", "t.json", "--format", "github")
        text = summary.read_text()
        assert out.count("::error ") == 10
        assert text.startswith("# before\n## ❌")
        assert text.count("| ❌ |") == 12
        assert "2 of these sites have no annotation." in text

    def test_unwritable_step_summary_is_a_warning(self, syncs: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        summary = syncs.folder / "missing" / "summary.md"
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
        code, _, err = syncs("scan", "t.json", "--format", "github")
        assert code == 1
        assert f"warning: GITHUB_STEP_SUMMARY={summary} cannot be written" in err

    def test_other_formats_do_not_write_the_step_summary(self, syncs: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(syncs.folder / "summary.md"))
        syncs("scan", "t.json", "--format", "json")
        assert not (syncs.folder / "summary.md").exists()


class TestStreams:
    def python(self, folder: Path, body: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run `dcpbench syncs scan t.json` in a separate process, in which `body` is the reader of traces."""
        (folder / "t.json").touch()
        code = (
            "from dcpbench import cli\nfrom dcpbench.syncs import scan\nfrom tests.unit import syncs_builder as b\n"
            f"def read(paths, progress, **_):\n    {body}\n"
            "scan.scan_traces = read\ncli.main(['syncs', 'scan', 't.json'])"
        )
        env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, check=False)

    def test_interrupt_exits_with_130(self, tmp_path: Path) -> None:
        assert self.python(tmp_path, "raise KeyboardInterrupt").returncode == 130

    def test_ascii_stdout_gets_a_table(self, tmp_path: Path) -> None:
        done = self.python(tmp_path, "return b.make_report(b.make_site())", PYTHONIOENCODING="ascii")
        assert done.returncode == 1
        assert b"check_all" in done.stdout

    def test_progress_goes_to_stderr(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Control characters of a name are escaped in the first and later messages, and stdout has only the report."""
        clock = iter((0.0, 3.0, 3.0, 3.1))
        monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        with terminal.ProgressLine() as show:
            show("reading \x1b[31m.json")
            show("at once again")
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", "reading \\x1b[31m.json\n")
        done = self.python(tmp_path, "progress('x')\n    return b.make_report()")
        assert done.returncode == 0
        assert b"x" not in done.stdout.splitlines()


class TestSettings:
    def test_options_override_settings_of_pyproject(self, syncs: Shell) -> None:
        (syncs.folder / "pyproject.toml").write_text(
            '[tool.dcpbench.syncs]\nmax-per-step = 0\nstep-range = "^decode"\n'
            'allow = [{ function = "sample", reason = "tokens" }]\n'
        )
        assert syncs("scan", "t.json")[0] == 1
        assert syncs.seen["step_range"] == "^decode"
        assert syncs.seen["root"] == syncs.folder
        assert syncs("scan", "t.json", "--max-per-step", "1", "--step-range", "x")[0] == 0
        assert syncs.seen["step_range"] == "x"
        syncs.report = lambda: build.make_report(build.make_site(function="sample"))
        assert syncs("scan", "t.json")[0] == 0

    def test_settings_are_read_from_the_given_root(self, syncs: Shell) -> None:
        (syncs.folder / "repo").mkdir()
        (syncs.folder / "repo" / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax-per-step = 9\n")
        assert syncs("scan", "t.json", "--root", "repo")[0] == 0
        assert syncs.seen["root"] == syncs.folder / "repo"

    def test_invalid_setting_exits_with_2(self, syncs: Shell) -> None:
        (syncs.folder / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax_per_step = 9\n")
        code, _, err = syncs("scan", "t.json")
        assert code == 2
        assert "unknown key max_per_step" in err


class TestBaseline:
    def test_same_trace_passes_with_its_own_baseline(self, syncs: Shell) -> None:
        code, out, _ = syncs("baseline", "t.json", "-o", "b.json")
        assert (code, out.splitlines()[-1]) == (0, "Wrote b.json")
        assert syncs("scan", "t.json", "--baseline", "b.json")[0] == 0
        syncs.report = lambda: build.make_report(build.make_site(), build.make_site("new"))
        assert syncs("scan", "t.json", "--baseline", "b.json")[0] == 1

    def test_baseline_is_written_to_the_path_of_pyproject(self, syncs: Shell) -> None:
        (syncs.folder / "pyproject.toml").write_text('[tool.dcpbench.syncs]\nbaseline = "known.json"\n')
        assert syncs("baseline", "t.json")[0] == 0
        assert syncs("scan", "t.json")[0] == 0
        assert (syncs.folder / "known.json").exists()

    def test_baseline_has_a_default_name_and_needs_force_to_overwrite(self, syncs: Shell) -> None:
        assert syncs("baseline", "t.json")[0] == 0
        assert (syncs.folder / "syncs-baseline.json").exists()
        assert syncs("baseline", "t.json")[0] == 2
        assert syncs("baseline", "t.json", "--force")[0] == 0

    def test_output_never_replaces_what_is_read(self, syncs: Shell) -> None:
        (syncs.folder / "link.json").symlink_to("t.json")
        for words in (["scan", "t.json"], ["baseline", "t.json"], ["diff", "t.json", "t.json"]):
            code, _, err = syncs(*words, "-o", "link.json", "--force")
            assert code == 2
            assert "link.json is itself read; give another file with -o" in err

    def test_inconclusive_trace_gives_no_baseline(self, syncs: Shell) -> None:
        syncs.report = lambda: build.make_report(build.make_site(), traces=[build.make_trace(complete=False)])
        code, _, err = syncs("baseline", "t.json", "-o", "b.json")
        assert code == 3
        assert "ends early" in err
        assert not (syncs.folder / "b.json").exists()

    def test_baseline_without_steps_warns_about_total_counts(self, syncs: Shell) -> None:
        syncs.report = lambda: build.make_report(
            build.make_site(count_per_step=None), traces=[build.make_trace(steps=None)]
        )
        code, _, err = syncs("baseline", "t.json")
        assert code == 0
        assert "--step-range" in err


class TestTraces:
    def make(self, folder: Path, *names: str) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    def test_folders_and_globs_expand_to_traces_in_order_of_ranks(self, tmp_path: Path) -> None:
        self.make(tmp_path, "a/r10.json", "a/r2.json.gz", "a/notes.txt", "a/deep/r3.json", "b.json")
        found = files.expand_names([str(tmp_path / "a"), str(tmp_path / "*.json")])
        assert [p.name for p in found] == ["r2.json.gz", "r10.json", "b.json"]
        deep = files.expand_names([str(tmp_path / "a/**/*.json")])
        assert [p.name for p in deep] == ["r3.json", "r10.json"]

    def test_named_file_is_read_once_whatever_its_suffix(self, tmp_path: Path) -> None:
        self.make(tmp_path, "trace[1].out")
        name = str(tmp_path / "trace[1].out")
        assert files.expand_names([name, f"{tmp_path}/./trace[1].out"]) == [Path(name)]

    @pytest.mark.parametrize("name", ["empty", "gone.json", "*.json"])
    def test_glob_without_a_match_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=re.escape(name)):
            files.expand_names([name])


class TestHelp:
    @pytest.mark.parametrize("args", [["--help"], ["scan", "--help"], ["baseline", "--help"]], ids=" ".join)
    def test_help_has_exit_codes_and_an_example_without_heavy_imports(self, args: list[str]) -> None:
        code = (
            "import sys\nfrom dcpbench import cli\n"
            f"try:\n    cli.main(['syncs', *{args}])\nexcept SystemExit:\n    pass\n"
            "print('LOADED', [m for m in ('torch', 'numpy', 'pandas', 'dcpbench.syncs.commands') if m in sys.modules])"
        )
        env = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
        )
        text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.stdout).split())
        assert "LOADED []" in text
        assert "dcpbench syncs " in text.partition("Usage:")[2].partition("dcpbench")[2]
        assert re.search(r"Exit codes: 0 \w+ ·.* 3 the trace cannot answer", text)
        if args[0] == "scan":
            for words in ("Allowed synchronisation", "MICROSECONDS", "Default: none.", "[default: table]"):
                assert words in text

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_option_is_parsed_and_has_its_declared_name(self, name: str) -> None:
        command = typer.main.get_command(syncs_command.app).commands[name]
        for option in command.params:
            if option.param_type_name == "argument":
                continue
            for typed in (*option.opts, *option.secondary_opts):
                value = [] if option.is_flag else ["1"]
                with command.make_context(name, [typed, *value, "t.json"]) as context:
                    assert context.params[option.name] not in (None, ())
        (callback,) = (c.callback for c in syncs_command.app.registered_commands if c.callback.__name__ == name)
        options = [
            note
            for kind in get_type_hints(callback, include_extras=True).values()
            for note in getattr(kind, "__metadata__", ())
            if isinstance(note, OptionInfo)
        ]
        assert all(str(next(iter([*note.param_decls, note.default]))).startswith("-") for note in options)


def test_terminal_gets_colours_links_and_its_own_width(tmp_path: Path) -> None:
    """A real terminal of 60 columns lists sites below each other."""
    (tmp_path / "python/engine").mkdir(parents=True)
    (tmp_path / "python/engine/kv.py").touch()
    (tmp_path / "t.json").touch()
    code = (
        "from dcpbench import cli\nfrom dcpbench.syncs import scan\nfrom tests.unit import syncs_builder as b\n"
        "scan.scan_traces = lambda *a, **k: b.make_report(b.make_site())\ncli.main(['syncs', 'scan', 't.json'])"
    )
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": "60", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=env, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # Linux raises this if the other end is closed
            break
        if not block:
            break
        shown += block
    os.close(master)
    assert process.wait() == 1
    text = shown.decode()
    assert f"{(tmp_path / 'python/engine/kv.py').as_uri()}#12" in text
    plain = re.sub(r"\x1b\]8;[^\x1b]*\x1b\\|\x1b\[[0-9;]*[mK]", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 60
