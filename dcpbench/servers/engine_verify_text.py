"""Format the comparison of engines' settings (engine_verify.py): the table, and the sentences of the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP, REAL
from dcpbench.servers.answer_pairs import BATCH, CACHE, REPEAT, SERVERS
from dcpbench.servers.answer_verdict import DIFFER, RARE
from dcpbench.servers.answer_verdict_text import DOUBT_TEXTS, format_detectable, format_limit, format_rounding
from dcpbench.servers.edge_answers import AGAIN, NEW, SHARED
from dcpbench.servers.engine_agreement import BASE_DIFFERS, SCORES, find_smallest
from dcpbench.servers.engine_verify import PROMPTS, START
from dcpbench.servers.exit_reason import ADVICE
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.servers.edge_answers import Cell
    from dcpbench.servers.engine_agreement import Finding, Judgement
    from dcpbench.servers.engine_verify import EngineReport, Failure, SettingResult

TITLES = {
    REPEAT: "repeated",
    CACHE: "cache hit",
    BATCH: "in a batch",
    SERVERS: "from the first",
    SCORES: "prompt tokens",
}
CACHE_NAMES = {NEW: "prefix-cache misses", SHARED: "shared prefixes", AGAIN: "prefix-cache hits"}
CELL_CACHES = {NEW: "prefix-cache miss", SHARED: "shared prefix", AGAIN: "prefix-cache hit"}
DOUBTS = DOUBT_TEXTS | {
    BASE_DIFFERS: "the first setting has no clean verdict, so agreement with it proves nothing",
}
MAX_LISTED = 6  # values that are listed one by one


def make_table(report: EngineReport) -> Table:
    """Return a table with a row for each setting, and a column for each effect."""
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Greedy answers, compared with {report.results[0].name}",
        caption="Prompts that differ beyond rounding, of all prompts; near-ties in parentheses; ? unknown.",
    )
    table.add_column("setting")
    for title in (*TITLES.values(), "verdict"):
        table.add_column(title, justify="right")
    for result in report.results:
        cells = [_format_effect(result.judgement, effect) for effect in TITLES]
        table.add_row(result.name, *cells, _format_outcome(result))
    for name in report.not_run:
        table.add_row(name, *[""] * len(TITLES), "not compared" if report.interrupted else "not started")
    return table


def format_report(report: EngineReport) -> list[str]:
    """Return the sentences below the table: one verdict for each setting, then what was covered."""
    base = report.results[0]
    lines = []
    for result in report.results:
        lines += _format_setting(result, base)
    if report.not_run:
        lines.append(
            f"Not compared, as the command was interrupted: {format_list(report.not_run)}."
            if report.interrupted
            else f"Not started, as the first setting gave no answers to compare with: {format_list(report.not_run)}."
        )
    if dummy := [result.name for result in report.results if result.dummy_weights]:
        lines.append(
            f"Engine's own dummy weights: {format_list(dummy)}. They are nearly zero, and need not be the same in every layout or "
            "engine; use --weights synthetic, or a model with weights."
        )
    lines += [_format_left_out(result, report.new_tokens) for result in report.results if result.left_out][:1]
    return lines


def _format_left_out(result: SettingResult, new_tokens: int) -> str:
    longer = _format_values([f"{n:,}" for n in result.left_out])
    if result.max_model_len is None:
        return (
            f"Prompts of {longer} tokens were left out, as {result.name} does not report its maximum context; name lengths that it "
            "takes with --context."
        )
    return (
        f"Prompts of {longer} tokens were left out: with {new_tokens} new tokens they are longer than the "
        f"{result.max_model_len:,} that {result.name} takes (its --max-model-len or --context-length)."
    )


def _format_effect(judgement: Judgement | None, effect: str) -> str:
    counts = [c for c in judgement.counts if c.effect == effect] if judgement else []
    if not counts:
        return ""
    differing, prompts, ties, unknown = (
        sum(getattr(c, name) for c in counts) for name in ("differing", "prompts", "near_ties", "unknown")
    )
    return f"{differing:,}/{prompts:,}{f' ({ties:,})' if ties else ''}{f' {unknown:,}?' if unknown else ''}"


def _format_outcome(result: SettingResult) -> str:
    if result.failure is None:
        return result.verdict
    return (
        "did not start"
        if result.failure.stage == START
        else "prompts refused"
        if result.failure.stage == PROMPTS
        else "failed"
    )


def _format_setting(result: SettingResult, base: SettingResult) -> list[str]:
    if result.failure is not None:
        return _format_failure(result, result.failure)
    judgement = result.judgement
    assert judgement is not None
    if judgement.verdict == DIFFER:
        first, *others = judgement.findings
        found = [_format_finding(first, judgement, base), *_format_further(others, base)]
        found.append(format_rounding(judgement.limits) if judgement.logprobs else "")
        return [f"{result.name}: {judgement.verdict}. {' '.join(filter(None, found))}"]
    if judgement.undecided:
        doubts = "; ".join(DOUBTS[doubt] for doubt in judgement.undecided)
        example = _format_rare(judgement, base) if RARE in judgement.undecided else ""
        seen = format_detectable(judgement.detectable, judgement.mean_compared)
        rounding = format_rounding(judgement.limits) if judgement.logprobs else ""
        text = " ".join(filter(None, (f"{doubts}.", example, seen, rounding)))
        return [f"{result.name}: {judgement.verdict}: {text}"]
    return [f"{result.name}: {judgement.verdict}. {_format_agreement(result, judgement, base)}"]


def _format_agreement(result: SettingResult, judgement: Judgement, base: SettingResult) -> str:
    """Return what was compared without a difference, and the smallest difference that would have been seen."""
    cells = [c.cell for c in judgement.counts]
    batches = _format_values([str(n) for n in sorted({cell.batch for cell in cells})])
    what = "Its answers repeat" if result is base else f"It answers as {base.name} does"
    ties, outliers = (sum(getattr(c, name) for c in judgement.counts) for name in ("near_ties", "outliers"))
    further = f" and {format_count(outliers, 'outlier')}" if outliers else ""
    lengths = f"{format_count(len(result.lengths), 'length')} of prompts from {result.lengths[0]:,} to {result.lengths[-1]:,} tokens"
    text = [
        f"{what}, apart from rounding, at {lengths} and batch sizes {batches}; {format_count(ties, 'near-tie')}{further}.",
        format_detectable(judgement.detectable, judgement.mean_compared),
        format_rounding(judgement.limits)
        if judgement.logprobs
        else "The server gives no log-probabilities: answers were compared by their tokens alone.",
    ]
    text.append(_format_hits(result.hit_tokens))
    return " ".join(filter(None, text))


def _format_hits(hit_tokens: int | None) -> str:
    if hit_tokens is None:
        return "It does not report prefix-cache hits, so whether repeated prompts used its cache is unknown."
    if not hit_tokens:
        return "It reports no prefix-cache hit: its cache was not tested."
    return f"It reports prefix-cache hits of {hit_tokens:,} tokens."


def _format_finding(finding: Finding, judgement: Judgement, base: SettingResult) -> str:
    """Return the smallest conditions that show a difference, what differs there, and where else it shows."""
    count = f"{finding.differing:,} of {format_count(finding.prompts, 'prompt')}"
    if finding.test != REAL:
        count += f" {format_limit(finding.test, judgement.limits)}"
    smallest = (
        f"Smallest setting that shows it: {_format_cell(finding.smallest)}; {_format_example(finding, judgement)}."
    )
    if finding.lengths:
        return (
            f"It {_format_effect_name(finding.effect, base)}: {count}. {smallest} It shows at {_format_shown(finding)}."
        )
    often = (
        f"one request in {finding.period} is wrong, at regular places"
        if finding.period
        else "there are no conditions under which most prompts differ"
    )
    return f"It {_format_effect_name(finding.effect, base)}: {count}. It is sporadic: {often}. {smallest}"


def _format_further(findings: Sequence[Finding], base: SettingResult) -> list[str]:
    """Return a sentence about findings other than the first."""
    parts = [
        f"{_format_effect_name(one.effect, base)} ({one.differing:,} of {format_count(one.prompts, 'prompt')})"
        for one in findings
    ]
    return [f"It also {format_list(parts)}."] if parts else []


def _format_effect_name(effect: str, base: SettingResult) -> str:
    return {
        SERVERS: f"answers differently from {base.name}",
        SCORES: f"gives the tokens of prompts other log-probabilities than {base.name}",
        REPEAT: "differs from itself when a request is repeated",
        CACHE: "differs from itself when a prompt is asked again (prefix cache)",
        BATCH: "differs from itself between answers in a batch and alone",
    }[effect]


def _format_rare(judgement: Judgement, base: SettingResult) -> str:
    """Return how many pairs of answers differ beyond rounding, and the smallest conditions of one."""
    smallest = find_smallest(judgement.counts)
    assert smallest is not None
    real, pairs = sum(c.real for c in judgement.counts), sum(c.pairs for c in judgement.counts)
    return (
        f"{real:,} of {format_count(pairs, 'pair')} of answers differ so. Smallest setting that shows one: it {_format_effect_name(smallest.effect, base)} "
        f"with {_format_cell(smallest.cell)}."
    )


def _format_cell(cell: Cell) -> str:
    return f"a prompt of {format_count(cell.length, 'token')}, batch size {cell.batch}, {CELL_CACHES[cell.cache]}"


def _format_example(finding: Finding, judgement: Judgement) -> str:
    """Return the first differing position, the gap there, and that rounding does not explain it."""
    limits, test = judgement.limits, finding.test
    if finding.first is None:
        limit = limits.scores if finding.effect == SCORES else limits.list_limits(DRIFT_SIZE)[test.place]
        return (
            f"log-probabilities of equal tokens are {format_short_number(finding.drift)} apart on average, and rounding explains up to "
            f"{format_short_number(limit)}"
        )
    limit = limits.list_limits(GAP)[test.place]
    apart = f", {format_short_number(finding.gap)} apart in log-probability" if finding.gap is not None else ""
    explained = (
        f"rounding explains up to {format_short_number(limit)}"
        if finding.gap is not None and finding.gap > limit
        else "the servers list no likely token in common there"
    )
    return f"token {finding.first} of the answer is another one{apart}; {explained}"


def _format_shown(finding: Finding) -> str:
    parts = [
        ("prompts of", "tokens", [f"{n:,}" for n in finding.lengths], [f"{n:,}" for n in finding.clean_lengths]),
        ("batch sizes", "", [str(n) for n in finding.batches], [str(n) for n in finding.clean_batches]),
        ("", "", [CACHE_NAMES[c] for c in finding.caches], [CACHE_NAMES[c] for c in finding.clean_caches]),
    ]
    return "; ".join(
        " ".join(filter(None, (before, _format_values(shown), after)))
        + (f" (not {_format_values(clean)})" if clean else "")
        for before, after, shown, clean in parts
    )


def _format_values(values: Sequence[str]) -> str:
    """Return a few values as a list, many as their range."""
    if len(values) <= MAX_LISTED:
        return format_list(values)
    return f"{values[0]} to {values[-1]} ({len(values)} values)"


def _format_failure(result: SettingResult, failure: Failure) -> list[str]:
    """Return what failed, the last lines of the log, and what to do next."""
    reason = failure.reason.rstrip(".")
    if failure.stage == PROMPTS:
        return [f"{result.name}: {result.verdict}: {reason}."]
    if failure.stage == START:
        head = f"{result.name}: {result.verdict}, as {reason}."
    else:
        where = "before the first prompt"
        if failure.cell is not None:
            where = f"at request {result.requests:,} with {_format_cell(failure.cell)}"
        head = f"{result.name}: {result.verdict}. It fails {where}: {reason}."
    log = [f"    {line}" for line in failure.lines]
    if failure.cause in ADVICE:  # the reason ends with it
        return [head, "The last lines of its log:", *log, f"Its log: {result.log}."]
    advice = (
        f"Read {result.log}; then try flags that avoid it in an engine's file or as a variant, for example --variant "
        "'other=--attention-backend triton', or leave this setting out."
    )
    return [head, "The last lines of its log:", *log, advice]
