"""Format sites and traces as text: printable names, times and sizes with units, and the status of a site in a verdict."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dcpbench.points.sizes import format_size
from dcpbench.show.numbers import MICROSECONDS, format_with_unit
from dcpbench.show.text import format_count, make_printable
from dcpbench.syncs.rules import BY_ID
from dcpbench.syncs.sync_report import Report, get_sort_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.syncs.rules import Rule
    from dcpbench.syncs.site_changes import SiteCost
    from dcpbench.syncs.sync_report import Site, Totals, TraceSummary, Verdict

SiteStatus = Literal["finding", "counted", "known", "allowed", "warm-up", "may block", "own"]
"""finding: fails the gate alone; counted: adds to a limit that is exceeded; known: within baseline and limits."""
LEVELS = {"finding": "error", "counted": "warning"}  # annotations, by status; all others have the lowest
NOTHING = "–"
MAX_CALL_LINES = 5
MAX_NAMES = 5  # processes or operators that a sentence names
BOUND_NOTE = (
    "Bubble is an upper bound of the GPU idle time that removing this wait alone saves: the idle time from its start until "
    "the next wait, as far as later launches end it, and never more than the call takes. On several streams, later waits may "
    "cost less, too. A wait during which the GPU has work costs nothing."
)


def make_report_printable(report: Report) -> Report:
    """Return a copy of the report with all texts printable and the sites sorted worst first.

    Names come from other people's programs: a kernel may be called anything.
    """
    copy = msgspec.convert(_make_value_printable(msgspec.to_builtins(report)), Report)
    copy.sites.sort(key=get_sort_key)
    return copy


def _make_value_printable(value: Any) -> Any:  # noqa: ANN401 -- whatever JSON holds
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, list):
        return [_make_value_printable(v) for v in value]
    if isinstance(value, dict):
        return {_make_value_printable(k): _make_value_printable(v) for k, v in value.items()}
    return value


def format_microseconds(value: float | None) -> str:
    """Format a time in microseconds with a fitting unit; a dash if it is unknown."""
    return NOTHING if value is None else format_with_unit(value, MICROSECONDS)


def format_bubble(value: float | None) -> str:
    """Format `bubble at most 5 µs`, or that the bubble is unknown."""
    return "bubble not known" if value is None else f"bubble at most {format_microseconds(value)}"


def is_timed(cost: Site | Totals) -> bool:
    """Return False for waits without times, as in a dry run, which have no cost to show."""
    return cost.wait_us is not None or cost.bubble_us is not None


def format_count_per_step(value: float | None) -> str:
    """Format a count per step, such as 2 or 0.25; a dash without steps."""
    return NOTHING if value is None else f"{value:.4g}"


def format_per_step(site: Site | SiteCost, between: str = ", ", form: str = "{} {}", form_alone: str = "{}") -> str:
    """Return the count per step, by phase where phases are known: `1 decode, 0.25 mixed`.

    `form` is the form of a count and its phase, `form_alone` that of a count without phases.
    """
    counts = {phase: format_count_per_step(count) for phase, count in site.count_per_phase.items() if count}
    phases = between.join(form.format(count, phase) for phase, count in counts.items())
    return phases or form_alone.format(format_count_per_step(site.count_per_step))


def format_times(site: Site, between: str = ", ") -> list[str]:
    """Return the count per step, the total wait, its median and p99, and the bubble."""
    waits = (site.wait_us, site.wait_median_us, site.wait_p99_us, site.bubble_us)
    return [format_per_step(site, between), *map(format_microseconds, waits)]


def format_trace(trace: TraceSummary) -> str:
    """Return one line about a trace: what was seen in it, and which ranges are its steps."""
    seen = trace.coverage
    if trace.front_end:
        name = "vLLM's front end" if seen.detector == "scan" else "this process"
        return f"Left out {trace.path}: {name} uses no GPU."
    facts = [] if trace.rank is None else [f"rank {trace.rank}{f' of {trace.world_size}' if trace.world_size else ''}"]
    facts += [seen.detector] if seen.detector != "scan" else []
    facts += [format_steps(trace)] if trace.steps or seen.detector == "scan" else []
    if seen.detector == "scan":
        facts += [
            f"{seen.gpu_events:,} GPU events",
            f"{seen.runtime_events:,} runtime calls",
            f"{seen.driver_events:,} driver calls",
            f"{seen.sync_events:,} cuda_sync events",
            f"stacks: {seen.stacks}",
        ]
    if trace.gpu_idle_us is not None:
        facts.append(f"GPU idle {format_microseconds(trace.gpu_idle_us)} of {format_microseconds(trace.span_us)}")
    if not seen.complete:
        facts.append("INCOMPLETE")
    return f"Seen in {trace.path}: {', '.join(facts)}"


def format_steps(trace: TraceSummary) -> str:
    """Return how many steps a trace has, which ranges they are, and how much of the work they cover."""
    seen = trace.coverage
    if not trace.steps:
        return "no steps"
    parts = [f"ranges '{seen.steps_from}'" + (", a guess by their numbers" if seen.steps_guessed else "")]
    parts += [", ".join(f"{count:,} {phase}" for phase, count in seen.steps_by_phase.items())]
    parts += [] if seen.steps_share is None else [f"{seen.steps_share:.0%} of the work"]
    return f"{format_count(trace.steps, 'step')} ({'; '.join(filter(None, parts))})"


def count_notes(report: Report) -> Counter[str]:
    """Count the notes on what the traces cannot show, by number of traces."""
    return Counter(note for trace in report.traces for note in list_trace_notes(trace))


def list_trace_notes(trace: TraceSummary) -> list[str]:
    """Return the notes on what a trace cannot show; operators that were never measured are all named."""
    names = ", ".join(trace.coverage.unmeasured)
    unmeasured = f"It was never measured whether these operators wait, and none of their waits is counted: {names}."
    return [*trace.coverage.notes, *([unmeasured] if names else [])]


def format_names(names: Sequence[str]) -> str:
    """Return the first names as part of a sentence, and how many are left out."""
    left = len(names) - MAX_NAMES
    return ", ".join([*names[:MAX_NAMES], *([f"and {left} more"] if left > 0 else [])])


def format_exception(report: Report) -> str:
    """Return `, apart from 2 operators that were never measured (…)` as part of a verdict; empty if all were measured."""
    names = sorted({name for trace in report.traces for name in trace.coverage.unmeasured})
    if not names:
        return ""
    were = "was" if len(names) == 1 else "were"
    return f", apart from {format_count(len(names), 'operator')} that {were} never measured ({format_names(names)})"


def format_place(site: Site) -> str:
    """Format `file:line` as far as both are known."""
    if not site.file:
        return ""
    line = get_best_line(site)
    return site.file if line is None else f"{site.file}:{line}"


def get_best_line(site: Site) -> int | None:
    """Return the line of the call if only one is possible, else that of the function; None if both are unknown."""
    return site.call_lines[0].line if len(site.call_lines) == 1 else site.line


def format_call_lines(site: Site) -> list[str]:
    """Return the source lines that can make the call, such as `57: rows[mask]`; the first ones if there are many."""
    lines = [f"{line.line}: {line.text}" for line in site.call_lines[:MAX_CALL_LINES]]
    left = len(site.call_lines) - len(lines)
    return [*lines, *([f"and {left} more lines"] if left else [])]


def get_site_name(site: Site) -> str:
    """Return the name of a site: its function, else the range, the operator or the blocking call."""
    return site.function or site.range or site.op or site.call or site.kind


def get_outer_op(site: Site) -> str:
    """Return the operator that the program called, which distinguishes calls of one line; empty if it is `site.op` itself."""
    return site.op_chain[0] if site.op_chain and site.op_chain[0] != site.op else ""


def format_sentence(site: Site) -> str:
    """Format one line about a site, for annotations, alerts and logs."""
    where = f" ({format_place(site)})" if format_place(site) else ""
    name, what = get_site_name(site), site.op or site.call or get_site_name(site)
    by = f" by {get_outer_op(site)}" if get_outer_op(site) else ""
    rate = format_per_step(site, form="{} per {} step", form_alone="{} per step")
    much = f"{rate}, " if site.count_per_step is not None else ""
    much += f"{site.count:,} in all" + (f" ({format_waited_share(site)})" if format_waited_share(site) else "")
    much += f", {site.outside:,} of them in no step" if site.outside else ""
    cost = f", {format_bubble(site.bubble_us)}" if is_timed(site) else ""
    lines = f", called from {site.called_from}" if site.called_from else ""
    if len(site.call_lines) > 1:
        lines += f", at one of the lines {', '.join(str(line.line) for line in site.call_lines)}"
    return f"{site.kind}: {what}{by}{f' in {name}' if name != what else ''}{where}{lines}, {much}{cost}"


def format_advice(site: Site) -> str:
    """Format the cause, if the trace shows it, and the usual fix."""
    fix = BY_ID[site.rule].fix
    return f"{site.cause} {fix}" if site.cause else fix


def list_rules(report: Report) -> list[tuple[Rule, list[str]]]:
    """Return the rules of the program's own sites in order of the report, each with its causes as far as the trace shows them."""
    causes: dict[str, dict[str, None]] = {site.rule: {} for site in report.sites if not site.own}
    for site in report.sites:
        if site.cause and not site.own:
            causes[site.rule][site.cause] = None
    return [(BY_ID[rule], list(found)) for rule, found in causes.items()]


def format_waited_share(site: Site) -> str:
    """Format `550 of 1,360 waited` if some found nothing to wait for; empty if all waited, or if it is unknown."""
    if site.waited is None or site.waited >= site.count:
        return ""
    return f"{site.waited:,} of {site.count:,} waited"


def format_copy(site: Site, between: str = " ") -> str:
    """Format the direction and the size of a copy as far as both are known: `DtoH 4.0 KiB`."""
    return between.join(filter(None, (site.direction, "" if site.bytes is None else format_size(site.bytes))))


def list_labels(site: Site, verdict: Verdict) -> list[str]:
    """Return short labels of a site: own, explicit, may block, allowed, warm-up, new, more."""
    new = {finding.reason for finding in verdict.findings_by_site.get(site.fingerprint, ())}
    finding = get_status(site, verdict) == "finding"
    named = (
        ("own", site.own),
        ("explicit", site.explicit),
        ("may block", site.may_block),
        ("allowed", bool(site.allowed)),
        ("warm-up", site.warmup_only and not site.own),
        ("new", finding and "new" in new),
        ("more", finding and "more" in new),
    )
    return [name for name, is_so in named if is_so]


def get_status(site: Site, verdict: Verdict) -> SiteStatus:
    """Return the status of a site in a judged report."""
    if site.own:
        return "own"
    if site.allowed:
        return "allowed"
    if site.may_block:
        return "may block"
    if site.warmup_only:
        return "warm-up"
    if site.fingerprint in verdict.findings_by_site:
        return "finding"
    return "counted" if "" in verdict.findings_by_site else "known"


def format_message(site: Site, verdict: Verdict) -> str:
    """Return the gate's message about the site, or else a sentence about it."""
    compared = (f.message for f in verdict.findings_by_site.get(site.fingerprint, ()) if f.reason != "sync")
    return next(compared, format_sentence(site)) if get_status(site, verdict) == "finding" else format_sentence(site)


def list_dotted_names(site: Site) -> list[str]:
    """Return the dotted names of the site's function, longest first: `a.b.f`, `b.f`, `f`; without a file `f` alone."""
    if not site.function:
        return []
    path = PurePosixPath(site.file.replace("\\", "/"))
    parts = [part for part in (*path.parts[:-1], path.stem) if part not in ("/", ".", "..", "")]
    if parts and parts[-1] == "__init__":
        parts.pop()
    names = [re.sub(r"\s", "_", part) for part in parts]
    return [".".join([*names[n:], site.function]) for n in range(len(names) + 1)]
