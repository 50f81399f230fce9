"""--fail-on: which changes for the worse end a command with exit code 1."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Literal

from dcpbench.compare.model import Comparison, Finding, PointResult, Row
from dcpbench.compare.words import range_text
from dcpbench.errors import UsageError
from dcpbench.records import metrics
from dcpbench.show.numbers import short_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORDS = ("undecided", "missing")
"""Rules without a limit."""
EXAMPLE = "--fail-on slower:2%,itl_p99:5%,syncs:+0"
_LIMIT = re.compile(r"(?:(?P<share>\d+(?:\.\d+)?)%|\+(?P<more>\d+(?:\.\d+)?))")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One part of --fail-on."""

    text: str
    name: str
    share: float | None = None
    """By what share of A a metric may be worse."""
    more: float | None = None
    """Or by how much, in its unit."""


def read_rules(text: str | None) -> list[Rule]:
    """`slower:2%,syncs:+0` as rules. Raises UsageError with what to type instead."""
    return [_rule(part.strip()) for part in text.split(",")] if text is not None else []


def _rule(text: str) -> Rule:
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
    return Rule(text, name, share=float(share) / 100 if share else None, more=float(more) if more else None)


def apply(comparison: Comparison, rules: Sequence[Rule]) -> None:
    """Judge the comparison by the rules: its findings, and each row's `gate`.

    A row that was sampled fails where its corrected interval leaves out equality on the worse side and its ratio is
    beyond the limit; it is undecided where the interval reaches beyond the limit. `undecided` without a rule of a metric
    fails for every row whose verdict is UNDECIDED. With any rule, points that ran in A and not in B fail, too: a change
    that breaks points is no faster for it.
    """
    comparison.rules = [rule.text for rule in rules]
    if not rules:
        return
    words = {rule.name for rule in rules}
    findings: list[Finding] = []
    for point in comparison.points:
        for row in point.rows:
            row.gate = ""
            findings += _of_row(point, row, rules)
    if "undecided" in words and words <= {*WORDS}:
        findings += [_undecided(p, row) for p in comparison.points for row in p.rows if row.verdict == "UNDECIDED"]
    broken = [b for b in comparison.broken if b.side == "b"]
    findings += [Finding(rule="failed", point=b.name, message=f"{b.name}: {b.outcome}: {b.reason}") for b in broken]
    if "missing" in words:
        missing = [(name, "only in A") for name in comparison.only_a]
        missing += [(p.name, t) for p in comparison.points for t in p.not_compared if t.endswith("(absent in B)")]
        findings += [Finding(rule="missing", point=name, message=f"{name}: {text}") for name, text in missing]
    findings += [
        Finding(rule=text, message=f"{text}: no compared point has it", status="undecided")
        for text in unused(comparison, rules)
    ]
    if "undecided" in words:
        for finding in findings:
            finding.status = "fails"
    comparison.findings = sorted(findings, key=lambda f: f.status != "fails")


def unused(comparison: Comparison, rules: Sequence[Rule]) -> list[str]:
    """Rules about metrics that no compared point has: they guard nothing, which must be said."""
    seen = {(p.workload, row.metric) for p in comparison.points for row in p.rows}
    return [
        rule.text for rule in rules if rule.name not in WORDS and not any(_is_of(rule, w, metric) for w, metric in seen)
    ]


def _of_row(point: PointResult, row: Row, rules: Sequence[Rule]) -> Iterator[Finding]:
    for rule in rules:
        if rule.name in WORDS or not _is_of(rule, point.workload, row.metric):
            continue
        status = _status(row, rule)
        row.gate = max(row.gate, status, key=("", "passes", "undecided", "fails").index)
        if status != "passes":
            said = "worse by" if status == "fails" else "may be worse by"
            ratio = "" if row.ratio is None or row.absolute else f", ratio {row.ratio:.4f}{range_text(row)}"
            message = (
                f"{point.name}: {row.title} {said} more than {rule.text.partition(':')[2]}: "
                f"{short_number(row.a, 4)} → {short_number(row.b, 4)} {row.unit}{ratio}"
            )
            yield Finding(rule=rule.text, point=point.name, metric=row.metric, status=status, message=message)


def _undecided(point: PointResult, row: Row) -> Finding:
    row.gate = "fails"
    why = f": {row.reason}" if row.reason else ""
    return Finding(
        rule="undecided", point=point.name, metric=row.metric, message=f"{point.name}: {row.title} is UNDECIDED{why}"
    )


def _is_of(rule: Rule, workload: str, metric: str) -> bool:
    """Whether the rule is about this row's metric."""
    found = metrics.named(rule.name, workload)
    return found is not None and found.option == metric


def _status(row: Row, rule: Rule) -> Literal["fails", "undecided", "passes"]:
    if not row.sampled:
        change = row.a - row.b if row.higher_is_better else row.b - row.a
        return "fails" if change > (rule.more if rule.more is not None else (rule.share or 0) * row.a) else "passes"
    if row.low is None:
        return "undecided"
    limit = _limit(row, rule)
    if row.differs and _worse(row, row.ratio) > limit:
        return "fails"
    return "undecided" if max(_worse(row, row.low), _worse(row, row.high)) > limit else "passes"


def _limit(row: Row, rule: Rule) -> float:
    """As a logarithm of how much worse: a time 2 % longer and a rate that takes 2 % longer alike."""
    if rule.share is not None:
        return math.log1p(rule.share)
    more = rule.more or 0.0
    if row.higher_is_better:
        return math.log(row.a / (row.a - more)) if more < row.a else math.inf
    return math.log1p(more / row.a)


def _worse(row: Row, ratio: float | None) -> float:
    if ratio is None:
        return math.inf
    log = math.log(ratio) if ratio > 0 else -math.inf
    return -log if row.higher_is_better else log
