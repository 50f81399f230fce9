"""Decide if a change may pass, by counts and bubbles, never by microseconds of wait.

Without a limit every site is a finding. With a baseline there must be no new site and no more per step; --max-per-step
and --max-bubble-us limit sums. Allowed sites, warm-up-only sites and the profiler's own never count.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import re
import shlex
from itertools import chain
from typing import TYPE_CHECKING

from dcpbench.errors import ExitCode, UsageError
from dcpbench.show import text
from dcpbench.syncs.gating import baseline as baselines
from dcpbench.syncs.gating.comments import Comments
from dcpbench.syncs.gating.unseen import explain_unseen_parts
from dcpbench.syncs.site_text import (
    format_count_per_step,
    format_microseconds,
    format_place,
    format_sentence,
    get_site_name,
)
from dcpbench.syncs.sites import count_in_phase, find_worst_step
from dcpbench.syncs.steps import HOW_TO_MARK
from dcpbench.syncs.sync_report import Finding, Verdict, get_sort_key
from dcpbench.syncs.trace_ranks import find_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dcpbench.syncs.gating.baseline import Baseline, Entry
    from dcpbench.syncs.gating.config import Allow
    from dcpbench.syncs.site_changes import SiteCost
    from dcpbench.syncs.sync_report import Report, Site, TraceSummary
    from dcpbench.syncs.trace_ranks import MissingRanks

SLACK = 10**-baselines.DIGITS / 2  # counts per step are rounded in a baseline; a smaller difference is that
DAMAGED = "ends early or is damaged, so that syncs may be missing: record it again, with fewer steps"  # default reason
UNUSED = "baseline: the operator {name} was not used, or has been measured since: write the baseline again."
MAX_SITES_NAMED = 3  # sites that a message about a sum names
MAX_RANKS_NAMED = 8  # ranks that a message about missing traces lists


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """Hold limits and permissions from options and pyproject.toml."""

    root: Path  # repository in which comments are looked for
    source: Path | None = None  # source of the recorded program if it is not `root`
    allow: tuple[Allow, ...] = ()
    baseline: Baseline | None = None
    max_per_step: float | None = None
    max_bubble_us: float | None = None
    step_range: str | None = None  # range that marks a step; unused by the gate, read from pyproject.toml
    all_ranks: bool = False  # each rank of the program must have a trace, as a server's profiler writes all of them


def compute_verdict(report: Report, gate: Gate, stale: Iterable[str] = ()) -> Verdict:
    """Return the verdict on a report to which the gate's permissions were applied; the report's own verdict is not read.

    `stale` are the sentences on permissions that `apply_permissions` has returned.
    """
    stale = list(stale)
    counted = sorted(filter(can_be_finding, report.sites), key=get_sort_key)
    findings = []
    if gate.baseline is None and gate.max_per_step is None and gate.max_bubble_us is None:
        findings = [Finding(reason="sync", message=format_sentence(s), fingerprint=s.fingerprint) for s in counted]
    reasons = [reason for trace in report.traces if (reason := explain_no_answer(trace))]
    reasons += explain_missing(report.traces, all_ranks=gate.all_ranks)
    known = gate.baseline.unmeasured if gate.baseline else ()
    reasons += [reason for trace in report.traces for reason in explain_unseen_parts(trace, known)]
    if not report.traces:
        reasons.append("Nothing was recorded: no trace was read.")
    reasons += explain_guesses(report)
    for found in chain(
        _compare_with_baseline(counted, report, gate),
        _check_per_step(counted, report, gate),
        _check_bubble(counted, gate),
    ):
        if isinstance(found, Finding):
            findings.append(found)
        else:
            reasons.append(found)
    if gate.baseline:
        here = {s.fingerprint for s in report.sites}
        stale += [_explain_gone(e) for e in gate.baseline.sites if e.fingerprint not in here]
        used = {name for trace in report.traces for name in trace.coverage.unmeasured}
        stale += [UNUSED.format(name=name) for name in gate.baseline.unmeasured if name not in used]
    allowed = {s.fingerprint: s.allowed for s in report.sites if s.allowed}
    verdict = Verdict(findings=findings, allowed=allowed, stale=stale, reasons=list(dict.fromkeys(reasons)))
    if findings:
        verdict.status, verdict.exit_code = "findings", ExitCode.WRONG.value
    elif reasons:
        verdict.status, verdict.exit_code = "cannot answer", ExitCode.NO_ANSWER.value
    return verdict


def can_be_finding(site: Site) -> bool:
    """Return whether a site can be a finding."""
    return not (site.own or site.may_block or site.warmup_only or site.allowed)


def apply_permissions(sites: Iterable[Site], gate: Gate, today: dt.date | None = None) -> list[str]:
    """Set `allowed` of each site that has permission and return sentences about stale permissions.

    Entries expire by `today`, which is today in UTC where it is not given.
    """
    today = today or dt.datetime.now(tz=dt.UTC).date()
    sites = [s for s in sites if not s.own]
    stale = []
    for entry in gate.allow:
        matched = [s for s in sites if entry.matches(s)]
        if entry.expires and today > entry.expires:
            stale.append(
                f"{entry.format_name()} expired on {entry.expires}: remove the synchronisation, or give a new date."
            )
        elif not matched:
            stale.append(f"{entry.format_name()} matched nothing: remove it.")
        else:
            for site in matched:
                site.allowed = site.allowed or entry.reason
    comments = Comments(gate.root, other_source=gate.source is not None)
    for site in sites:
        note = comments.find_comment(site)
        if note and not note.reason:
            stale.append(f"{site.file}:{note.line}: allow-sync allows nothing without a reason: allow-sync(reason).")
        elif note:
            site.allowed = site.allowed or note.reason
    return list(dict.fromkeys(stale))


def explain_no_answer(trace: TraceSummary) -> str:
    """Return why a trace cannot answer, with the option to use; empty if it can, or if it is that of a front end."""
    seen = trace.coverage
    if seen.detector == "dry-run" and not (seen.complete or seen.damage):
        return f"{trace.path} did not run to its end, so that later waits are unknown: let it end with exit code 0."
    if seen.detector == "dry-run" and not (seen.ops or trace.front_end or explain_unseen_parts(trace)):
        return (
            f"{trace.path} put nothing on the virtual GPU: let it use device='cuda', or give --assume-device where it "
            "names no device."
        )
    if not seen.complete:
        return f"{trace.path} {'. It '.join(seen.damage or [DAMAGED])}."
    if seen.detector != "scan" or trace.front_end:
        return ""
    if seen.foreign:
        return (
            f"{trace.path} holds work of another accelerator than CUDA, HIP and XPU ({', '.join(seen.foreign)}), with "
            "unknown waits: check the program with `dcpbench syncs dry-run -- python PROGRAM`, or record it on "
            "one of these."
        )
    if not seen.gpu_events:
        return f"{trace.path} holds no GPU events: record with profile(activities=[CPU, CUDA]), or nsys profile --trace=cuda, on a machine with a GPU."
    if not seen.runtime_events:
        return f"{trace.path} holds no calls of the CUDA runtime: record with profile(activities=[CPU, CUDA]), or nsys profile --trace=cuda."
    return ""


def explain_missing(traces: Sequence[TraceSummary], *, all_ranks: bool = False) -> list[str]:
    """Return one sentence for each group of ranks without a trace, with what to type."""
    if traces and all(trace.front_end for trace in traces):
        return [
            f"{traces[0].path} is the trace of vLLM's front end, which uses no GPU: give the traces of its ranks too."
        ]
    return [_explain_missing(missing) for missing in find_missing(traces, all_ranks=all_ranks)]


def _explain_missing(missing: MissingRanks) -> str:
    listed = [str(rank) for rank in missing.ranks[:MAX_RANKS_NAMED]]
    more = len(missing.ranks) - len(listed)
    ranks = f"rank{'s' if len(missing.ranks) > 1 else ''} {', '.join(listed)}{f' and {more} more' if more else ''}"
    labels = {"data-parallel rank": missing.group.dp, "pipeline stage": missing.group.pp}
    where = "".join(f" in {name} {rank}" for name, rank in labels.items() if rank is not None)
    return (
        f"No trace of {ranks}{where} of {missing.group_size} was read, and it may hold waits that the others do not have: give the "
        "traces of all ranks, or the file of one rank alone."
    )


def explain_guesses(report: Report) -> Iterator[str]:
    """Yield a sentence for each trace in which guessed steps are the only reason to call waits warm-up."""
    warm = [s for s in report.sites if s.warmup_only and not (s.own or s.may_block or s.allowed)]
    for trace in report.traces:
        sites = [s for s in warm if trace.path in s.traces]
        if trace.coverage.steps_guessed and sites:
            family = trace.coverage.steps_from
            pattern = "^" + re.escape(family).replace("\\ ", " ")
            yield (
                f"{trace.path} has waits at {text.format_count(len(sites), 'site')} that lie before or in the first of the ranges "
                f"'{family}N' only ({_format_where(sites[0])}). They are warm-up if these ranges are steps, which is a guess: give "
                f"--step-range {shlex.quote(pattern)} if they are, else name the ranges that are."
            )


def _compare_with_baseline(counted: Sequence[Site], report: Report, gate: Gate) -> Iterator[Finding | str]:
    """Yield new sites, sites that occur more often than in the baseline, and sentences on what cannot be compared."""
    if gate.baseline is None:
        return
    entries = {e.fingerprint: e for e in gate.baseline.sites}
    for fingerprint, sites in baselines.group_by_fingerprint(counted).items():
        entry, now, worst = entries.get(fingerprint), baselines.build_entry(sites), format_sentence(sites[0])
        if entry is None:
            yield Finding(reason="new", message=f"new {worst}", fingerprint=fingerprint)
        elif entry.count_per_step is not None and now.count_per_step is None:
            yield from _explain_no_steps(report, "the baseline counts per step")
            yield f"{worst}: lies in no step here, and the baseline counts it per step."
        elif more := _describe_growth(now, entry, sum(s.count for s in sites)):
            yield Finding(reason="more", message=f"{worst}; {more}", fingerprint=fingerprint)


def _describe_growth(now: Entry, entry: Entry, count: int) -> str:
    """Return what has grown, as text; empty if nothing has."""
    if entry.count_per_step is not None and now.count_per_step is not None:
        grown = [
            f"{count:g} per {phase}step here, {before:g} in the baseline"  # all digits: both may start with the same four
            for phase, count, before in list_phase_counts(now, entry)
            if count > before + SLACK
        ]
        if now.outside > entry.outside:
            grown.append(f"{now.outside} outside the steps here, {entry.outside} in the baseline")
        return ", ".join(grown)
    before = entry.count or 0
    return f"{count} in all here, {before} in the baseline" if count > before else ""


def list_phase_counts(now: Entry | SiteCost, entry: Entry | SiteCost) -> list[tuple[str, float, float]]:
    """Return (phase and a blank, count per step here, count per step before) of each phase that both know.

    A phase that only this side knows is listed if it has more than each phase had before. The phase is empty where a
    side knows none.
    """
    worst = entry.count_per_step or 0.0
    if not now.count_per_phase or not entry.count_per_phase:
        return [("", now.count_per_step or 0.0, worst)]
    return [
        (f"{phase} ", count, entry.count_per_phase.get(phase, worst))
        for phase, count in now.count_per_phase.items()
        if phase in entry.count_per_phase or count > worst
    ]


def _check_per_step(counted: Sequence[Site], report: Report, gate: Gate) -> Iterator[Finding | str]:
    """Compare the sum over all sites of a trace, in the trace and phase that have most, with --max-per-step."""
    limit = gate.max_per_step
    if limit is None:
        return
    yield from _explain_no_steps(report, "--max-per-step counts per step")
    phase, total, sites = find_worst_step(counted)
    if total > limit + SLACK:
        named = _format_largest([(count_in_phase(s, phase), s) for s in sites], format_count_per_step)
        step = f"{phase} step" if phase else "step"
        noun = "synchronisation" if total == 1 else "synchronisations"
        message = (
            f"{format_count_per_step(total)} {noun} per {step}, the limit is {format_count_per_step(limit)}: {named}"
        )
        yield Finding(reason="per-step", message=message)
    yield from _explain_outside(counted)


def _explain_outside(counted: Sequence[Site]) -> Iterator[str]:
    """Yield a sentence about waits that no count per step holds, if there are any."""
    outside = [s for s in counted if s.outside]
    if outside:
        waits = sum(s.outside for s in outside)
        yield (
            f"{text.format_count(waits, 'wait')} at {text.format_count(len(outside), 'site')} {'lies' if waits == 1 else 'lie'} in no "
            f"step ({_format_where(outside[0])}) and so in no count per step, which --max-per-step limits: end the recording "
            "with the last step, or allow them with --allow."
        )


def _check_bubble(counted: Sequence[Site], gate: Gate) -> Iterator[Finding | str]:
    """Compare the sum over all sites with --max-bubble-us."""
    limit = gate.max_bubble_us
    if limit is None:
        return
    unknown = [s for s in counted if s.bubble_us is None]
    total = sum(s.bubble_us or 0.0 for s in counted)
    if total > limit:
        named = _format_largest([(s.bubble_us or 0.0, s) for s in counted], format_microseconds)
        above = f"{format_microseconds(total - limit)} above the limit of {format_microseconds(limit)}"
        message = f"bubble of {format_microseconds(total)} in all, {above}: {named}"
        yield Finding(reason="bubble", message=message)
    elif unknown:
        site = f"{unknown[0].kind} in {_format_where(unknown[0])}"
        yield f"The bubble of {site} is not known, so --max-bubble-us cannot be checked: scan a whole trace."


def _format_largest(parts: Iterable[tuple[float, Site]], format_part: Callable[[float], str]) -> str:
    """Name the sites that contribute most to a sum, and the total of all others."""
    some = sorted((part for part in parts if part[0]), key=lambda part: -part[0])
    named = [f"{format_part(much)} in {_format_where(site)}" for much, site in some[:MAX_SITES_NAMED]]
    if rest := [much for much, _ in some[MAX_SITES_NAMED:]]:
        named.append(f"{format_part(sum(rest))} in {text.format_count(len(rest), 'more site')}")
    return ", ".join(named)


def _format_where(site: Site) -> str:
    return f"{get_site_name(site)} ({format_place(site)})" if format_place(site) else get_site_name(site)


def _explain_no_steps(report: Report, why: str) -> list[str]:
    return [
        f"{trace.path} marks no steps, and {why}: name the range around a step with --step-range '^NAME'. {HOW_TO_MARK}"
        for trace in report.traces
        if not (trace.steps or trace.front_end)
    ]


def _explain_gone(entry: Entry) -> str:
    where = " in ".join(part for part in (entry.function, entry.file) if part)
    return f"baseline: {entry.kind or entry.rule} {where or entry.fingerprint} was not found: write the baseline again."


def check_limits(max_per_step: float | None, max_bubble_us: float | None) -> None:
    """Raise UsageError for limits that are no numbers."""
    for name, value in (("--max-per-step", max_per_step), ("--max-bubble-us", max_bubble_us)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name} {value} is no limit: give a number from 0.")
