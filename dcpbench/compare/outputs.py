"""Print and write a comparison of `compare` or `ab`, and judge it by --fail-on."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import msgspec

from dcpbench.compare import comparison_ci, comparison_markdown, comparison_table, fail_on
from dcpbench.compare.judging import Options, judge_sides
from dcpbench.errors import ExitCode, UsageError
from dcpbench.records import metrics
from dcpbench.records.disks import convert_output_errors
from dcpbench.show.ci import append_step_summary
from dcpbench.show.streams import write_json
from dcpbench.show.terminal import make_console
from dcpbench.show.whole_files import write_output_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.compare.comparison import Comparison
    from dcpbench.records.runs import Run

MIN_ALPHA, MAX_SHARE = 1e-6, 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputTargets:
    """Hold the files and formats of a comparison."""

    fail_on: str | None = None
    folder: Path | None = None
    junit: Path | None = None
    github: bool = False
    as_json: bool = False
    every: bool = False


def check_options(options: Options, out: OutputTargets) -> None:
    """Raise UsageError for options that cannot work, before anything takes long."""
    fail_on.read_rules(out.fail_on)
    for name, value in (("--margin", options.margin), ("--launch-noise", options.launch_noise)):
        if value is not None and not 0 <= value <= MAX_SHARE:
            raise UsageError(f"{name} {value * 100:g}% cannot be; give a share from 0% to 50%, such as {name} 1%.")
    if not MIN_ALPHA <= options.alpha <= MAX_SHARE:
        raise UsageError(f"--alpha {options.alpha:g} cannot be; give a probability such as --alpha 0.05.")
    if unknown := [name for name in options.metrics if not metrics.is_option(name)]:
        raise UsageError(f"--metric {unknown[0]}: there is none; give some of {', '.join(metrics.OPTIONS)}.")


def run_comparison(a: Sequence[Run], b: Sequence[Run], options: Options, out: OutputTargets) -> int:
    """Compare two sides, show and write the result, and return the exit code.

    1 if a rule of --fail-on fails, else 3 if a rule could not be judged, else 0.
    """
    rules = fail_on.read_rules(out.fail_on)
    found = judge_sides(a, b, options)
    fail_on.apply_rules(found, rules)
    found.notes += [
        f"--fail-on {text} guards nothing: no compared point has it." for text in fail_on.list_unused(found, rules)
    ]
    paths = write_files(found, out)
    if out.as_json:
        write_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        terminal = make_console()
        for line in comparison_table.render(found, every=out.every):
            terminal.print(line, soft_wrap=not terminal.is_terminal)
    if out.github:
        sys.stdout.write(comparison_ci.format_github(found))
        sys.stdout.flush()
        append_step_summary(comparison_markdown.render(found))
    for path in paths:
        (sys.stderr if out.as_json else sys.stdout).write(f"Wrote {path}\n")
    if found.fails:
        return ExitCode.WRONG
    return ExitCode.NO_ANSWER if found.unjudged else 0  # a rule had nothing that could have failed it


def write_files(found: Comparison, out: OutputTargets) -> list[Path]:
    """Write Markdown, JSON and the forest plot into `out.folder` and JUnit into its file; return the paths.

    Raise OutputError or DiskError if a file cannot be written.
    """
    paths: list[Path] = []
    if out.folder:
        from dcpbench.compare import picture

        with convert_output_errors(out.folder, "give another folder with -o"):
            out.folder.mkdir(parents=True, exist_ok=True)
            pictures = picture.draw(found, out.folder)
            page, data = out.folder / "compare.md", out.folder / "compare.json"
            write_output_file(page, comparison_markdown.render(found, picture=pictures[0].name if pictures else ""))
            write_output_file(data, msgspec.json.encode(found).decode() + "\n")
            paths += [page, data, *pictures]
    if out.junit:
        with convert_output_errors(out.junit, "give another file with --junit"):
            write_output_file(out.junit, comparison_ci.format_junit(found))
        paths.append(out.junit)
    return paths
