"""Text of a judged comparison of servers' answers (agreement.py): the table, and the sentences of the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dcpbench.servers.agreement import NOISY
from dcpbench.servers.answer_noise import REAL
from dcpbench.servers.answer_pairs import BATCH, CACHE, EFFECTS, REPEAT, SERVERS
from dcpbench.servers.answer_verdict import AGREE, CONSISTENT, DIFFER
from dcpbench.servers.answer_verdict_text import DOUBT_TEXTS, format_detectable, format_limit, format_rounding
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.servers.agreement import Comparison, Finding, Report
    from dcpbench.servers.conditions import CacheUse

WHEN = {
    REPEAT: "when a request is repeated under the same conditions",
    CACHE: "when a prompt is asked again (prefix cache)",
    BATCH: "between answers alone and in a batch",
}
TITLES = {REPEAT: "repeated", CACHE: "asked again", BATCH: "in a batch", SERVERS: "B from A"}
DOUBTS = DOUBT_TEXTS | {
    NOISY: "servers differ from themselves beyond rounding when a request is repeated, so their differences cannot be separated",
}
MIN_CACHED_CONTEXT = 256  # tokens of a prompt long enough for any prefix cache to keep whole blocks


def make_table(report: Report, urls: Sequence[str]) -> Table:
    """Return a table with a row for each server at each length, and a column for each effect."""
    names = " and ".join(f"{name}: {url}" for name, url in zip("AB", urls, strict=False))
    caption = "Pairs of answers that differ beyond rounding, of all pairs; near-ties in parentheses; ? unknown; * beyond chance."
    table = Table(box=SIMPLE_HEAD, title=f"Greedy answers, {names}", caption=caption)
    effects = EFFECTS if report.servers > 1 else EFFECTS[:-1]
    for title in ("prompt tokens", "server", *(TITLES[effect] for effect in effects), "drift"):
        table.add_column(title, justify="right")
    found = {(c.context, c.server, c.effect): c for c in report.comparisons}
    for context in sorted({c.context for c in report.comparisons}):
        for server in "AB"[: report.servers]:
            row = [found.get((context, "AB" if effect == SERVERS else server, effect)) for effect in effects]
            row = [c if c is None or c.effect != SERVERS or server == "B" else None for c in row]
            drift = max((c.drift for c in row if c is not None and c.drift is not None), default=None)
            table.add_row(f"{context:,}", server, *map(_format_cell, row), format_short_number(drift))
    return table


def _format_cell(c: Comparison | None) -> str:
    if c is None:
        return ""
    ties = f" ({c.near_ties})" if c.near_ties else ""
    unknown = f" {c.unknown}?" if c.unknown else ""
    return f"{c.real}/{c.pairs}{ties}{unknown}{' *' if c.differs else ''}"


def format_verdict(report: Report, caches: Sequence[CacheUse] = ()) -> list[str]:
    """Return the sentences below the table, the verdict first."""
    lines = [f"{report.verdict}: {_format_reason(report)}"]
    if report.verdict != DIFFER:
        lines.append(format_detectable(report.detectable, report.mean_compared))
    if report.logprobs:
        lines.append(format_rounding(report.limits))
    else:
        lines.append("The servers give no log-probabilities: answers were compared by their tokens alone.")
    lines += [_format_cache(name, use, report) for name, use in zip("AB", caches, strict=False)]
    return lines


def _format_reason(report: Report) -> str:
    if report.verdict == DIFFER:
        return " ".join(_format_finding(finding, report) for finding in report.findings)
    if report.verdict == AGREE:
        return f"B answers as A does up to prompts of {_get_max_context(report):,} tokens. {_capitalize_first(_format_own(report))}"
    if report.verdict == CONSISTENT:
        return f"up to prompts of {_get_max_context(report):,} tokens, {_format_own(report)}"
    return f"{'; '.join(DOUBTS[doubt] for doubt in report.undecided)}. {_capitalize_first(_format_own(report))}"


def _format_finding(finding: Finding, report: Report) -> str:
    who = (
        "B differs from A"
        if finding.effect == SERVERS
        else f"{_format_name(finding.server, report)} differs from itself"
    )
    what = [who]
    lengths = sorted({c.context for c in report.comparisons})
    if not finding.contexts:
        what.append("over all lengths of prompts")
    elif finding.contexts == [n for n in lengths if n >= finding.contexts[0]]:
        what.append(f"from prompts of {finding.contexts[0]:,} tokens on")
    else:
        what.append(f"at prompts of {format_list([f'{n:,}' for n in finding.contexts])} tokens")
    what.append(WHEN.get(finding.effect, ""))
    place = ""
    if finding.first is not None:
        context = f" (after {finding.contexts[0] + finding.first - 1:,} tokens of context)" if finding.contexts else ""
        place = f", first in token {finding.first} of an answer{context}"
    count = f"{finding.differing} of {format_count(finding.prompts, 'prompt')}"
    limit = format_limit(finding.test, report.limits)
    return f"{' '.join(filter(None, what))}: {count} {limit}{place if finding.test == REAL else ''}."


def _format_own(report: Report) -> str:
    """Return how often pairs of a server's own answers, and of both servers', differed."""
    parts = []
    for server in ("A", "B", "AB")[: 3 if report.servers > 1 else 1]:
        of = [c for c in report.comparisons if c.server == server]
        pairs, ties, other = (sum(getattr(c, name) for c in of) for name in ("pairs", "near_ties", "unknown"))
        real = sum(c.real for c in of)
        who = "B differed from A" if server == "AB" else f"{_format_name(server, report)} differed from itself"
        kinds = [f"{n} {kind}" for n, kind in ((ties, "near-ties"), (real, "beyond rounding"), (other, "unknown")) if n]
        parts.append(f"{who} in {ties + real + other} of {pairs:,} pairs" + (f" ({', '.join(kinds)})" if kinds else ""))
    return f"{format_list(parts)}."


def _format_cache(name: str, use: CacheUse, report: Report) -> str:
    who = _capitalize_first(_format_name(name, report))
    if _get_max_context(report) < MIN_CACHED_CONTEXT:
        return f"{who}: prompts of fewer than {MIN_CACHED_CONTEXT} tokens may not be in a prefix cache; name longer ones with --context."
    if use.hit_tokens is None:
        return f"{who} does not report prefix-cache hits, so whether answers used its cache is unknown."
    if not use.hit_tokens:
        return f"{who} reports no prefix-cache hit: its cache was not tested."
    return f"{who} reports prefix-cache hits of {use.hit_tokens:,} tokens."


def _get_max_context(report: Report) -> int:
    return max(c.context for c in report.comparisons)


def _format_name(server: str, report: Report) -> str:
    return server if report.servers > 1 else "the server"


def _capitalize_first(text: str) -> str:
    return text[:1].upper() + text[1:]
