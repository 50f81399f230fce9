"""Test baselines of a dry run: how they are written, what they allow, and that baselines of other detectors are
refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from dcpbench.commands.syncs import app
from dcpbench.errors import DcpbenchError, UsageError
from dcpbench.syncs import run, sync_report
from dcpbench.syncs.commands import GateOptions, OutputOptions, prepare_gate
from dcpbench.syncs.gating import baseline as baselines
from tests import forks

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import sys
import torch

def sample(x):
    return x.sum().item()

x = torch.ones(4, device="cuda")
for step in range(4):
    with torch.profiler.record_function(f"step {step}"):
        sample(x)
        if "more" in sys.argv:
            sample(x)
if "new" in sys.argv:
    x.cpu()
if "unmeasured" in sys.argv:
    torch.poisson(x)
sys.exit(5 if "fail" in sys.argv else 0)
"""


class Start:
    """Run the program in a dry run, with files in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "program.py").write_text(PROGRAM)

    def __call__(self, options: str, *arguments: str) -> tuple[int, str]:
        """Return the exit code and what was printed or refused, without line breaks and without the folder's name."""
        words = [str(self.folder / word) if "." in word else word for word in options.split()]
        program = ["python", str(self.folder / "program.py"), *arguments]
        result = CliRunner().invoke(app, ["dry-run", "--root", str(self.folder), *words, "--", *program])
        code, text = result.exit_code, result.output
        if isinstance(result.exception, DcpbenchError):
            code, text = 2, str(result.exception)
        elif result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return code, " ".join(text.replace(f"{self.folder}/", "").split())


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Start:
    """Start programs with processes that begin at once."""
    monkeypatch.setattr(run, "run_process", forks.run_command)
    return Start(tmp_path)


class TestWriting:
    def test_sites_of_a_dry_run_pass_with_its_baseline(self, start: Start, tmp_path: Path) -> None:
        code, text = start("--write-baseline base.json")
        assert (code, text) == (0, "1 site may stay; more of them, or others, are findings. Wrote base.json")
        written = json.loads((tmp_path / "base.json").read_text())
        assert written["detector"] == "dry-run"
        assert [(s["function"], s["count_per_step"]) for s in written["sites"]] == [("sample", 1.0)]
        code, text = start("--baseline base.json")
        assert code == 0
        assert "Clean: no findings" in text
        assert "of no use" not in text

    def test_more_per_step_and_new_sites_are_findings(self, start: Start) -> None:
        start("--write-baseline base.json")
        code, text = start("--baseline base.json", "more", "new")
        assert code == 1
        assert "2 per step here, 1 in the baseline" in text
        assert "new copy-to-host" in text
        assert "was not found" not in text

    def test_unmeasured_operators_are_accepted_and_named_by_a_baseline(self, start: Start, tmp_path: Path) -> None:
        assert start("", "unmeasured")[0] == 1  # the reads are findings without a baseline
        start("--write-baseline base.json")
        code, text = start("--baseline base.json", "unmeasured")
        assert code == 3
        assert "never measured" in text
        code, text = start("--write-baseline base.json --force", "unmeasured")
        assert code == 0
        assert "Operators accepted without a measurement of their waits: aten::poisson." in text
        assert json.loads((tmp_path / "base.json").read_text())["unmeasured"] == ["aten::poisson"]
        code, text = start("--baseline base.json", "unmeasured")
        assert code == 0
        assert "Clean, apart from 1 operator that was never measured (aten::poisson)" in text

    def test_failed_program_writes_no_baseline(self, start: Start, tmp_path: Path) -> None:
        code, text = start("--write-baseline base.json", "fail")
        assert code == 3
        assert "did not run to its end" in text
        assert not (tmp_path / "base.json").exists()

    @pytest.mark.parametrize("option", ["--baseline base.json", "--max-per-step 1", "-o out.txt", "--format json"])
    def test_report_options_are_refused_when_writing_a_baseline(
        self, start: Start, option: str, tmp_path: Path
    ) -> None:
        code, text = start(f"--write-baseline new.json {option}")
        assert code == 2
        assert option.split(maxsplit=1)[0] in text
        assert not (tmp_path / "new.json").exists()

    def test_step_range_without_a_match_is_named_with_the_ranges(self, start: Start) -> None:
        code, text = start("--step-range ^decode")
        assert code == 1
        assert "No range matches --step-range '^decode', so that no steps are known." in text
        assert "'step 0' (1)" in text

    def test_step_range_without_a_match_is_never_clean(self, start: Start, tmp_path: Path) -> None:
        """The steps that the user wants to compare are not known, even if nothing else is found."""
        for options in ("--allow *", "--write-baseline new.json"):
            code, text = start(f"--step-range ^decode {options}")
            assert code == 3
            assert "has no range that matches --step-range '^decode': name one that is there" in text
        assert not (tmp_path / "new.json").exists()

    def test_existing_file_error_names_the_option(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "base.json").touch()
        code, text = start("--write-baseline base.json")
        assert (code, text) == (
            2,
            "base.json exists; give another file with --write-baseline, or --force to write over it.",
        )

    def test_invalid_step_range_is_refused_before_the_program_starts(self, start: Start) -> None:
        code, text = start("--step-range (", "fail")
        assert code == 2
        assert "--step-range '(' is no regular expression" in text

    def test_bubble_limit_of_a_project_does_not_apply_to_a_dry_run(self, start: Start) -> None:
        """It knows no bubbles, so that it could never answer."""
        (start.folder / "pyproject.toml").write_text("[tool.dcpbench.syncs]\nmax-bubble-us = 1\nmax-per-step = 1")
        code, _ = start("")
        assert code == 0

    def test_existing_baseline_is_kept_without_force(self, start: Start, tmp_path: Path) -> None:
        (tmp_path / "base.json").write_text("mine")
        code, text = start("--write-baseline base.json")
        assert code == 2
        assert "--force" in text
        assert (tmp_path / "base.json").read_text() == "mine"


class TestOtherDetectors:
    def settle(self, path: Path, detector: baselines.Detector) -> None:
        """Read the baseline as a command of this detector does."""
        prepare_gate(GateOptions(baseline=path), OutputOptions(), detector)

    def test_baseline_of_traces_is_refused_with_the_command_for_a_dry_run(self, start: Start, tmp_path: Path) -> None:
        path = tmp_path / "base.json"
        path.write_text(sync_report.encode_json(baselines.build_baseline([])))
        with pytest.raises(UsageError, match="baseline of traces") as error:
            self.settle(path, "dry-run")
        assert f"`dcpbench syncs dry-run --write-baseline {tmp_path}/base-dry-run.json -- python" in str(error.value)
        self.settle(path, "scan")
        code, text = start("--baseline base.json")
        assert code == 2
        assert "--write-baseline base-dry-run.json" in text

    def test_baseline_of_a_dry_run_is_refused_for_traces(self, tmp_path: Path) -> None:
        path = tmp_path / "base.json"
        path.write_text(sync_report.encode_json(baselines.build_baseline([], "dry-run")))
        with pytest.raises(UsageError, match="baseline of a dry run") as error:
            self.settle(path, "scan")
        assert f"`dcpbench syncs baseline TRACE -o {tmp_path}/base-scan.json`" in str(error.value)

    @pytest.mark.parametrize(
        ("keys", "fits"),
        [
            ("baseline = 'scan.json'\ndry-run-baseline = 'dry.json'", True),
            ("baseline = 'dry.json'", True),
            ("baseline = 'scan.json'", False),
        ],
    )
    def test_pyproject_has_a_baseline_for_each_detector(self, tmp_path: Path, keys: str, *, fits: bool) -> None:
        (tmp_path / "scan.json").write_text(sync_report.encode_json(baselines.build_baseline([])))
        (tmp_path / "dry.json").write_text(sync_report.encode_json(baselines.build_baseline([], "dry-run")))
        (tmp_path / "pyproject.toml").write_text(f"[tool.dcpbench.syncs]\n{keys}\n")
        if fits:
            gate = prepare_gate(GateOptions(root=tmp_path), OutputOptions(), "dry-run")
            assert gate.baseline is not None
            assert gate.baseline.detector == "dry-run"
        else:
            with pytest.raises(UsageError, match=r"in pyproject\.toml as dry-run-baseline"):
                prepare_gate(GateOptions(root=tmp_path), OutputOptions(), "dry-run")
