"""Commands `dcpbench syncs scan` and `baseline`, and the conclusion that all commands of `syncs` share."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import ExitCode, UsageError
from dcpbench.records.disks import make_output_error
from dcpbench.records.lines import UNREADABLE
from dcpbench.show import ci, streams
from dcpbench.show.terminal import ProgressLine, print_stderr
from dcpbench.show.text import format_count, make_printable
from dcpbench.syncs.call_lines import add_call_lines
from dcpbench.syncs.files import check_inputs, check_output, select_traces, write_output
from dcpbench.syncs.formats import PLAIN_WIDTH, changes_text, check_format, github, markdown, render_report
from dcpbench.syncs.gating import baseline as baselines
from dcpbench.syncs.gating.config import Allow, find_config, find_root
from dcpbench.syncs.gating.gate import Gate, apply_permissions, can_be_finding, check_limits, compute_verdict
from dcpbench.syncs.site_changes import Thresholds, compare_reports
from dcpbench.syncs.site_text import make_report_printable
from dcpbench.syncs.steps import check_step_range
from dcpbench.syncs.sync_report import SCHEMA_VERSION, Report, encode_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.gating.config import Config
    from dcpbench.syncs.site_changes import ReportChanges

BASELINE = "syncs-baseline.json"
NO_STEPS = (
    "warning: not every trace marks steps, so whole counts are compared there: record the same number of steps each "
    "time, or name the range around a step with --step-range '^NAME'.\n"
)
OTHER_SOURCE = (
    " is of another version than in the trace: its functions begin on other lines, so that the lines that wait stay unknown. "
    "Give the source of the trace's commit with --source FOLDER."
)
MAX_FINDINGS = 10  # findings that are repeated on stderr where the report went elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Options of the gate as given on the command line; pyproject.toml supplies the others."""

    baseline: Path | None = None
    max_per_step: float | None = None
    max_bubble_us: float | None = None
    allow: Sequence[str] = ()
    root: Path | None = None
    source: Path | None = None
    step_range: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Format and destination of the report."""

    form: str = "table"
    output: Path | None = None
    force: bool = False


def prepare_gate(options: GateOptions, out: OutputOptions, detector: baselines.Detector = "scan") -> Gate:
    """Read what the gate needs, before anything takes long.

    The baseline must be one of this detector. A dry run uses the key dry-run-baseline of pyproject.toml, if it is there, and never
    max-bubble-us.

    Raises UsageError for limits, globs, a pyproject.toml, a baseline, a format or an output file that cannot be used.
    """
    check_format(out.form)
    check_output(out.output, force=out.force)
    check_limits(options.max_per_step, options.max_bubble_us)
    gate, config = _load_gate(options)
    max_bubble_us = config.max_bubble_us if options.max_bubble_us is None else options.max_bubble_us
    path = options.baseline or (config.dry_run_baseline if detector == "dry-run" else None) or config.baseline
    return dataclasses.replace(
        gate,
        baseline=baselines.read_baseline(path, detector) if path else None,
        max_per_step=config.max_per_step if options.max_per_step is None else options.max_per_step,
        max_bubble_us=None if detector == "dry-run" else max_bubble_us,  # a dry run knows no times
    )


def _load_gate(options: GateOptions) -> tuple[Gate, Config]:
    """Return a gate with permissions and the range of steps but no limits, and the settings of pyproject.toml."""
    if any(not pattern.strip() for pattern in options.allow):
        raise UsageError("--allow is empty; give a function, such as --allow 'engine.sampler.*'.")
    for name, folder, given in (("root", options.root, "root of the repository"), ("source", options.source, "source")):
        if folder is not None and not folder.is_dir():
            raise UsageError(f"--{name} {folder} is not a folder; give that of the {given}.")
    try:
        here = (options.root or Path.cwd()).resolve()
    except FileNotFoundError as e:
        raise UsageError("The current folder has been removed; change to another one with cd.") from e
    root = here if options.root else find_root(here)
    config = find_config(here, root)
    typed = [Allow(function=g, or_range=True, reason=f"--allow {g}", source="--allow") for g in options.allow]
    check_step_range(options.step_range)
    step_range = options.step_range or config.step_range
    return Gate(root=root, source=options.source, allow=(*typed, *config.allow), step_range=step_range), config


def finish_report(report: Report, gate: Gate, out: OutputOptions) -> int:
    """Judge a report, write it in its format, and return the exit code: 0 clean, 1 findings, 3 cannot answer.

    Every command that makes a report ends here; the verdict is set in place. With the format github the step summary is
    written too, where GITHUB_STEP_SUMMARY names its file.
    """
    report.verdict = compute_verdict(report, gate, apply_permissions(report.sites, gate))
    width, terminal = _measure_terminal(out.output)
    text = render_report(report, out.form, root=gate.root, width=width, terminal=terminal)
    if out.form == "github":
        left = github.count_left_out(report)
        more = f"\n{left} of these sites have no annotation.\n" if left else ""
        ci.append_step_summary(markdown.render(make_report_printable(report)) + more)
    _write_result(text, out.output, force=out.force, as_json=out.form in ("json", "sarif"))
    if out.output is not None or out.form != "table":
        _write_verdict(report)
    return report.verdict.exit_code


def _write_result(text: str, output: Path | None, *, force: bool, as_json: bool = False, summary: str = "") -> None:
    """Write the result of a command to its file, and then a summary to stdout; or to stdout without a file."""
    if output is None:
        _print_text(text, as_json=as_json)
    else:
        write_output(output, text, force=force)
        _print_text(f"{summary}Wrote {make_printable(str(output))}\n")


def run_scan(traces: Sequence[str], options: GateOptions, out: OutputOptions, *, all_ranks: bool = False) -> int:
    """Scan traces, write the report and return the exit code; with `all_ranks` no rank's trace may be missing."""
    gate = dataclasses.replace(prepare_gate(options, out), all_ranks=all_ranks)
    return finish_report(_scan_files(traces, gate, out.output), gate, out)


DIFF_FORMATS = ("table", "markdown", "json")


def run_diff(
    old: str,
    new: str,
    gate_options: GateOptions,
    *,
    form: str,
    as_json: bool,
    output: Path | None,
    force: bool,
    tolerance: float,
    min_us: float,
) -> int:
    """Compare two sides, write the result, and return 0 if nothing is new or worse, 1 if something is, and 3 if a side cannot answer.

    A side is what `scan` takes, or the JSON of a report; `tolerance` is a percentage.
    """
    if as_json and form not in ("table", "json"):
        raise UsageError(f"--json and --format {form} are two formats; leave one of them out.")
    if form not in DIFF_FORMATS:
        raise UsageError(f"There is no format {form!r}; give one of {', '.join(DIFF_FORMATS)}.")
    for name, value in (("--tolerance", tolerance), ("--min-us", min_us)):
        if not 0 <= value < math.inf:
            raise UsageError(f"{name} {value} is no threshold; give a number from 0.")
    check_output(output, force=force)
    changes = _compare_sides(old, new, gate_options, output, Thresholds(share=tolerance / 100, microseconds=min_us))
    form = "json" if as_json else form
    width, terminal = _measure_terminal(output)
    if form == "json":
        text = encode_json(changes)
    elif form == "markdown":
        text = changes_text.render_markdown(changes)
    else:
        text = changes_text.render_table(changes, width=width, terminal=terminal)
    summary = f"{changes_text.format_summary(changes)}\n"
    _write_result(text, output, force=force, as_json=form == "json", summary=summary)
    if changes.reasons:
        return ExitCode.NO_ANSWER
    return ExitCode.WRONG if changes.failing else ExitCode.OK


def _compare_sides(
    old: str, new: str, gate_options: GateOptions, output: Path | None, thresholds: Thresholds
) -> ReportChanges:
    gate, _ = _load_gate(gate_options)
    reports = [_read_side(side, gate, output, gate_options.step_range) for side in (old, new)]
    detectors = [{trace.coverage.detector for trace in report.traces} for report in reports]
    if all(detectors) and detectors[0] != detectors[1]:
        names = [" and ".join(sorted(found)) for found in detectors]
        raise UsageError(
            f"{old} is of {names[0]} and {new} of {names[1]}, which name operators differently; compare reports of one detector."
        )
    stale = [apply_permissions(report.sites, gate) for report in reports]
    _print_notes([text for text in stale[0] if text in stale[1]])
    _print_notes(_explain_other_ranks(reports))
    sides = zip(("Old", "New"), reports, strict=True)
    reasons = [f"{name} side: {reason}" for name, report in sides for reason in compute_verdict(report, gate).reasons]
    return compare_reports(reports[0], reports[1], thresholds, reasons)


def _explain_other_ranks(reports: Sequence[Report]) -> list[str]:
    """Return a sentence if both sides of a comparison have ranks, and not the same ones."""
    ranks = [{trace.rank for trace in report.traces if trace.rank is not None} for report in reports]
    if not all(ranks) or ranks[0] == ranks[1]:
        return []
    old, new = (", ".join(map(str, sorted(found))) for found in ranks)
    return [
        f"The old side has traces of ranks {old}, the new one of {new}: waits of a rank without a trace are not known."
    ]


def _measure_terminal(output: Path | None) -> tuple[int, bool]:
    """Return the columns of a table, and True if it may hold colours and hyperlinks."""
    if output is not None or not sys.stdout.isatty():
        return PLAIN_WIDTH, False
    return shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns, "NO_COLOR" not in os.environ


def _print_notes(sentences: Sequence[str]) -> None:
    """Write sentences to stderr for which a report has no place, such as those on permissions of no use."""
    sys.stderr.writelines(f"note: {make_printable(text)}\n" for text in sentences)


def _read_side(side: str, gate: Gate, output: Path | None, step_range: str | None) -> Report:
    """Return the report of a side of `diff`: that in a JSON file of `--format json`, or of the traces.

    Raises UsageError if a report is to have other steps, by the --step-range of the command line.
    """
    path = Path(side)
    if path.is_file():
        with path.open("rb") as file:
            begins = file.read(64)
        if b'"schema_version"' in begins:
            if step_range:
                raise UsageError(
                    f"{side} is a report, which has its steps: leave --step-range out, or give the traces."
                )
            check_inputs(output, [path])
            return _read_report(path)
    return _scan_files([side], gate, output)


def _read_report(path: Path) -> Report:
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, *UNREADABLE) as e:
        raise UsageError(
            f"{path} is no report of dcpbench syncs ({e}); write one with `dcpbench syncs scan TRACE --format json -o FILE`."
        ) from e
    if report.schema_version != SCHEMA_VERSION:
        raise UsageError(
            f"{path} is a report of version {report.schema_version}, this program reads version {SCHEMA_VERSION}; scan the trace again."
        )
    return report


def create_baseline(traces: Sequence[str], options: GateOptions, output: Path | None, *, force: bool) -> int:
    """Write the baseline and return 0; return 3 and write nothing if the trace cannot answer."""
    gate, config = _load_gate(options)
    output = output or config.baseline or Path(BASELINE)
    check_output(output, force=force)
    return write_baseline(_scan_files(traces, gate, output), gate, output, force=force)


def prepare_baseline_gate(options: GateOptions, out: OutputOptions, path: Path) -> Gate:
    """Return the gate for a baseline that a dry run writes, before anything takes long.

    Raises UsageError for options that limit or format a report, which is not written then, and for an unusable file.
    """
    limits = {"--baseline": options.baseline, "--max-per-step": options.max_per_step, "-o": out.output}
    given = [name for name, value in limits.items() if value is not None] + ["--format"] * (out.form != "table")
    if given:
        raise UsageError(f"--write-baseline writes no report, so {given[0]} has no meaning: leave one of them out.")
    check_output(path, force=out.force, option="--write-baseline")
    return _load_gate(options)[0]


def write_baseline(
    report: Report, gate: Gate, output: Path, *, force: bool, detector: baselines.Detector = "scan"
) -> int:
    """Write the baseline of a report and return 0; return 3 and write nothing if the report cannot answer.

    Operators that were never measured are accepted by the baseline, and named.
    """
    _print_notes(apply_permissions(report.sites, gate))
    unmeasured = [name for trace in report.traces for name in trace.coverage.unmeasured]
    made = baselines.build_baseline(filter(can_be_finding, report.sites), detector, unmeasured)
    reasons = compute_verdict(report, dataclasses.replace(gate, baseline=made)).reasons
    if reasons:
        sys.stderr.writelines(f"error: {make_printable(reason)}\n" for reason in reasons)
        return ExitCode.NO_ANSWER
    if not all(trace.steps or trace.front_end for trace in report.traces):
        sys.stderr.write(NO_STEPS)
    summary = f"{format_count(len(made.sites), 'site')} may stay; more of them, or others, are findings.\n"
    if made.unmeasured:
        names = make_printable(", ".join(made.unmeasured))
        summary += f"Operators accepted without a measurement of their waits: {names}.\n"
    _write_result(encode_json(made), output, force=force, summary=summary)
    return 0


def _scan_files(traces: Sequence[str], gate: Gate, output: Path | None) -> Report:
    from dcpbench.syncs.scan import scan_traces as read

    paths = select_traces(traces)
    check_inputs(output, paths)
    with ProgressLine() as progress:
        report = read(paths, root=gate.root, step_range=gate.step_range, progress=progress)
    locate_calls(report, gate)
    return report


def locate_calls(report: Report, gate: Gate) -> None:
    """Find the lines that can make the calls of a scanned trace; name source files of another version on stderr."""
    for file in add_call_lines(report, [folder for folder in (gate.source, gate.root) if folder is not None]):
        text = f"note: {make_printable(file)}{OTHER_SOURCE}"
        columns = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
        print_stderr(textwrap.fill(text, columns) if sys.stderr.isatty() else text)


def _write_verdict(report: Report) -> None:
    """Write the verdict to stderr if the report itself goes to a file or to a program."""
    from dcpbench.syncs.formats.table import format_summary

    verdict = report.verdict
    lines = [f.message for f in verdict.findings[:MAX_FINDINGS]]
    if len(verdict.findings) > MAX_FINDINGS:
        lines.append(f"… and {len(verdict.findings) - MAX_FINDINGS} more")
    lines += [*verdict.reasons, *verdict.stale]
    sys.stderr.write("".join(f"- {make_printable(line)}\n" for line in lines) + format_summary(report) + "\n")


def _print_text(text: str, *, as_json: bool = False) -> None:
    """Write to stdout, with the remedy where its disk is full."""
    try:
        (streams.write_json if as_json else sys.stdout.write)(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` is no mistake, and has an exit code of its own
        raise
    except OSError as e:
        streams.drop_output()
        raise make_output_error("stdout", e, "give a file on another disk with -o") from e
