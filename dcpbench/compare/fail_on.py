"""Apply --fail-on: find changes for the worse, and rows on which a rule could not have found any."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Literal

from dcpbench.compare.comparison import Comparison, Finding, PointResult, Row
from dcpbench.compare.comparison_text import format_change
from dcpbench.errors import UsageError
from dcpbench.records import metrics
from dcpbench.show.numbers import format_percent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORDS = ("undecided", "missing")  # rules without a limit
STATUSES = ("", "passes", "undecided", "unjudged", "fails")  # of a row, the later ones outweigh the earlier ones
EXAMPLE = "--fail-on slower:2%,itl_p99:5%,syncs:+0"
_LIMIT = re.compile(r"(?:(?P<share>\d+(?:\.\d+)?)%|\+(?P<more>\d+(?:\.\d+)?))")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Hold one part of --fail-on."""

    text: str
    name: str
    limit: str = ""  # as written, such as `2%`
    share: float | None = None  # share of A by which a metric may be worse
    more: float | None = None  # or the amount, in its unit


def read_rules(text: str | None) -> list[Rule]:
    """Parse `slower:2%,syncs:+0`. Raise UsageError with what to type instead."""
    return [_parse_rule(part.strip()) for part in text.split(",")] if text is not None else []


def _parse_rule(text: str) -> Rule:
    name, colon, limit = (part.strip() for part in text.partition(":"))
    if name in WORDS:
        if colon:
            raise UsageError(f"--fail-on {text}: {name} takes no limit; type {name} alone.")
        return Rule(text, name)
    if not metrics.is_option(name):
        raise UsageError(
            f"--fail-on {text or repr(text)}: give one of {', '.join((*metrics.OPTIONS, *WORDS))}, as in {EXAMPLE}."
        )
    found = _LIMIT.fullmatch(limit)
    if not found:
        raise UsageError(
            f"--fail-on {text}: say by how much it may be worse, as a share ({name}:2%) or in its unit ({name}:+1)."
        )
    share, more = found["share"], found["more"]
    return Rule(text, name, limit, float(share) / 100 if share else None, float(more) if more else None)


def apply_rules(comparison: Comparison, rules: Sequence[Rule]) -> None:
    """Judge the comparison by the rules: fill in its findings and the `gate` of each row.

    A sampled row fails if its corrected interval leaves out equality on the worse side and its ratio is beyond the limit.
    It is undecided if the interval reaches beyond the limit, and unjudged if it has no test or B lacks the metric: a rule passes
    nothing that it could not have failed. `undecided` without a rule of a metric fails for every row with the verdict UNDECIDED. With any
    rule, points that ran in A and not in B fail, too: a change that breaks points is no faster for it.
    """
    comparison.rules = [rule.text for rule in rules]
    if not rules:
        return
    words = {rule.name for rule in rules}
    findings: list[Finding] = []
    for point in comparison.points:
        for row in point.rows:
            row.gate = ""
            findings += _apply_to_row(point, row, rules)
        lacking = [] if "missing" in words else [(rule, point.find_missing_in_b(rule.name)) for rule in rules]
        findings += [
            Finding(rule=rule.text, point=point.name, message=f"{point.name}: not judged: {t}", status="unjudged")
            for rule, t in lacking
            if t is not None
        ]
    if "undecided" in words and words <= {*WORDS}:
        findings += [
            _make_undecided_finding(p, row) for p in comparison.points for row in p.rows if row.verdict == "UNDECIDED"
        ]
    broken = [b for b in comparison.broken if b.side == "b"]
    findings += [Finding(rule="failed", point=b.name, message=f"{b.name}: {b.outcome}: {b.reason}") for b in broken]
    if "missing" in words:
        missing = [(name, "only in A") for name in comparison.only_a]
        missing += [(p.name, str(t)) for p in comparison.points for t in p.not_compared if t.absent_in == "b"]
        findings += [Finding(rule="missing", point=name, message=f"{name}: {text}") for name, text in missing]
    findings += [
        Finding(rule=text, message=f"{text}: no compared point has it", status="unjudged")
        for text in list_unused(comparison, rules)
    ]
    if "undecided" in words:
        for finding in findings:
            finding.status = "fails"
    comparison.findings = sorted(findings, key=lambda f: STATUSES.index(f.status), reverse=True)


def list_unused(comparison: Comparison, rules: Sequence[Rule]) -> list[str]:
    """Return the rules about metrics that no compared point has: they guard nothing."""
    return [
        rule.text
        for rule in rules
        if rule.name not in WORDS
        and not any(p.find_row(rule.name) or p.find_missing_in_b(rule.name) for p in comparison.points)
    ]


def _apply_to_row(point: PointResult, row: Row, rules: Sequence[Rule]) -> Iterator[Finding]:
    for rule in rules:
        if point.find_row(rule.name) is not row:
            continue
        status = _get_status(row, rule)
        row.gate = max(row.gate, status, key=STATUSES.index)
        if status != "passes":
            message = f"{point.name}: {_describe_row(row, rule, status)}"
            yield Finding(rule=rule.text, point=point.name, metric=row.metric, status=status, message=message)


def _describe_row(row: Row, rule: Rule, status: str) -> str:
    """Return the finding of a rule for a row, with the numbers and, if it is undecided, the possible findings."""
    numbers = format_change(row)
    if status == "fails":
        return f"{row.title} worse by more than {rule.limit}: {numbers}"
    if status == "unjudged":
        return f"{row.title} could not be judged: {numbers}; {row.reason}"
    visible = (
        "" if row.least_visible is None else f"; {format_percent(row.least_visible - 1)} worse would have been found"
    )
    return f"{row.title} may be worse by more than {rule.limit}: {numbers}{visible}"


def _make_undecided_finding(point: PointResult, row: Row) -> Finding:
    row.gate = "fails"
    why = f": {row.reason}" if row.reason else ""
    return Finding(
        rule="undecided", point=point.name, metric=row.metric, message=f"{point.name}: {row.title} is UNDECIDED{why}"
    )


def _get_status(row: Row, rule: Rule) -> Literal["fails", "unjudged", "undecided", "passes"]:
    if not row.sampled:
        change = row.a - row.b if row.higher_is_better else row.b - row.a
        return "fails" if change > (rule.more if rule.more is not None else (rule.share or 0) * row.a) else "passes"
    if not row.judged:
        return "unjudged"
    limit = _compute_limit(row, rule)
    if row.differs and _compute_worsening(row, row.ratio) > limit:
        return "fails"
    return "undecided" if max(_compute_worsening(row, row.low), _compute_worsening(row, row.high)) > limit else "passes"


def _compute_limit(row: Row, rule: Rule) -> float:
    """Return the limit as a logarithm of how much longer a time is, or how much longer a rate takes for the same."""
    if rule.share is not None:
        return math.log1p(rule.share)
    more = rule.more or 0.0
    if row.higher_is_better:
        return math.log(row.a / (row.a - more)) if more < row.a else math.inf
    return math.log1p(more / row.a)


def _compute_worsening(row: Row, ratio: float | None) -> float:
    if ratio is None:
        return math.inf
    log = math.log(ratio) if ratio > 0 else -math.inf
    return -log if row.higher_is_better else log
