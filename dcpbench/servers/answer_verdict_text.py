"""Format the comparison of servers' answers (server_comparison.py): the table, and the sentences of the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dcpbench.servers.answer_counts import AGAIN, NEW, SHARED
from dcpbench.servers.answer_noise import DRIFT_SIZE, GAP, LAYOUT_FACTOR, QUANTILES, REAL
from dcpbench.servers.answer_pairs import BATCH, CACHE, REPEAT, SCORES, SERVERS
from dcpbench.servers.answer_verdict import (
    BASE_DIFFERS,
    FEW_TOKENS,
    MANY_OUTLIERS,
    MAX_OUTLIER_SHARE,
    MIN_COMPARED,
    RARE,
    TOO_WIDE,
    UNATTRIBUTED,
    UNMEASURED,
    find_smallest,
)
from dcpbench.servers.exact_tests import CONFIDENCE
from dcpbench.servers.exit_reason import ADVICE
from dcpbench.servers.server_comparison import PROMPTS, START
from dcpbench.show.numbers import format_short_number
from dcpbench.show.text import format_count, format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.servers.answer_counts import Cell
    from dcpbench.servers.answer_noise import Limits, ShareTest
    from dcpbench.servers.answer_verdict import Detectable, Finding, Judgement
    from dcpbench.servers.server_comparison import Failure, Report, SettingResult

TITLES = {
    REPEAT: "repeated",
    CACHE: "cache hit",
    BATCH: "in a batch",
    SERVERS: "from the reference",
    SCORES: "prompt tokens",
}
CACHE_NAMES = {NEW: "prefix-cache misses", SHARED: "shared prefixes", AGAIN: "prefix-cache hits"}
CELL_CACHES = {NEW: "prefix-cache miss", SHARED: "shared prefix", AGAIN: "prefix-cache hit"}
DOUBTS = {
    BASE_DIFFERS: "the setting that it is compared with has no clean verdict, so agreement with it would not prove correctness",
    RARE: "some answers differ beyond rounding, too few to be distinguished from chance; ask more with --num-prompts",
    TOO_WIDE: "the rounding is so large that a fault could look like it; use a model without quantized activations, or trained weights",
    UNMEASURED: "some answers differ, and the rounding is unknown, as the answers of each server to the same prompt are almost always "
    "identical; use more or longer prompts (--num-prompts, --context)",
    MANY_OUTLIERS: f"more than {MAX_OUTLIER_SHARE:.0%} of the answers differ more than the largest rounding that was measured",
    UNATTRIBUTED: "some answers differ, and no log-probabilities say whether those are near-ties",
    FEW_TOKENS: f"answers diverge at near-ties so early that fewer than {MIN_COMPARED:g} of their tokens could be compared on average; "
    "use a model with trained weights, or without quantized activations",
}
LIMIT_NAMES = ("the typical", "the large", "the very large")  # rounding at each of QUANTILES
assert len(LIMIT_NAMES) == len(QUANTILES)
MIN_CACHED_LENGTH = 256  # tokens of a prompt long enough for any prefix cache to keep whole blocks
MAX_LISTED = 6  # values that are listed one by one


def make_table(report: Report) -> Table:
    """Return a table with a row for each setting, and a column for each effect."""
    references = list(dict.fromkeys(result.reference for result in report.results if result.reference))
    table = Table(
        box=SIMPLE_HEAD,
        title=f"Greedy answers, compared with {format_list(references)}" if references else "Greedy answers",
        caption="Prompts that differ beyond rounding, of all prompts; near-ties in parentheses; ? unknown.",
    )
    table.add_column("setting")
    for title in (*TITLES.values(), "verdict"):
        table.add_column(title, justify="right")
    for result in report.results:
        cells = [_format_effect(result.judgement, effect) for effect in TITLES]
        table.add_row(f"{result.name} {result.url}".strip(), *cells, _format_outcome(result))
    for name in report.not_run:
        table.add_row(name, *[""] * len(TITLES), "not compared" if report.interrupted else "not started")
    return table


def format_report(report: Report) -> list[str]:
    """Return the sentences below the table: one verdict for each setting, then what was covered."""
    lines = []
    for result in report.results:
        lines += _format_setting(result)
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
    return {START: "did not start", PROMPTS: "prompts refused"}.get(result.failure.stage, "failed")


def _format_setting(result: SettingResult) -> list[str]:
    if result.failure is not None:
        return _format_failure(result, result.failure)
    judgement = result.judgement
    assert judgement is not None
    if judgement.findings:
        first, *others = judgement.findings
        text = [_format_finding(first, judgement, result), *_format_further(others, result)]
    elif judgement.undecided:
        text = [f"{'; '.join(DOUBTS[doubt] for doubt in judgement.undecided)}."]
        text += [_format_rare(judgement, result)] if RARE in judgement.undecided else []
    else:
        text = [_format_agreement(result, judgement)]
    if not judgement.findings:
        text.append(_format_detectable(judgement.detectable, judgement.mean_compared))
    text.append(
        _format_rounding(judgement.limits)
        if judgement.logprobs
        else "The server gives no log-probabilities: answers were compared by their tokens alone."
    )
    text.append(_format_hits(result))
    return [f"{result.name}: {judgement.verdict}{':' if judgement.undecided else '.'} {' '.join(text)}"]


def _format_agreement(result: SettingResult, judgement: Judgement) -> str:
    """Return what was compared without a difference."""
    sizes = sorted({c.cell.batch for c in judgement.counts})
    batches = f"batch size{'s' if len(sizes) > 1 else ''} {_format_values([str(n) for n in sizes])}"
    what = f"Its answers equal those of {result.reference}" if result.reference else "Its answers repeat"
    ties, outliers = (sum(getattr(c, name) for c in judgement.counts) for name in ("near_ties", "outliers"))
    further = f" and {format_count(outliers, 'outlier')}" if outliers else ""
    first, last = result.lengths[0], result.lengths[-1]
    lengths = (
        f"prompts of {first:,} tokens"
        if first == last
        else f"{len(result.lengths):,} lengths of prompts from {first:,} to {last:,} tokens"
    )
    return f"{what}, apart from rounding, at {lengths} and {batches}; {format_count(ties, 'near-tie')}{further}."


def _format_hits(result: SettingResult) -> str:
    if result.hit_tokens:
        return f"It reports prefix-cache hits of {result.hit_tokens:,} tokens."
    if result.lengths and result.lengths[-1] < MIN_CACHED_LENGTH:
        return f"Prompts of fewer than {MIN_CACHED_LENGTH} tokens may not be in a prefix cache; name longer ones with --context."
    if result.hit_tokens is None:
        return "It does not report prefix-cache hits, so whether repeated prompts used its cache is unknown."
    return "It reports no prefix-cache hit: its cache was not tested."


def _format_finding(finding: Finding, judgement: Judgement, result: SettingResult) -> str:
    """Return the smallest conditions that show a difference, what differs there, and where else it shows."""
    limit = "" if finding.test == REAL else f" {_format_limit(finding.test, judgement.limits)}"
    count = f"{finding.differing:,} of {format_count(finding.prompts, 'prompt')}{limit}"
    smallest = (
        f"Smallest setting that shows it: {_format_cell(finding.smallest)}; {_format_example(finding, judgement)}."
    )
    text = [f"It {_format_effect_name(finding.effect, result)}: {count}."]
    if finding.lengths:
        text += [smallest, f"It shows at {_format_shown(finding)}."]
    elif finding.period:
        text += [f"It is sporadic: one request in {finding.period} is wrong, at regular places.", smallest]
    else:
        text += ["It is sporadic: there are no conditions under which most prompts differ.", smallest]
    return " ".join(text)


def _format_further(findings: Sequence[Finding], result: SettingResult) -> list[str]:
    """Return a sentence about findings other than the first."""
    parts = [
        f"{_format_effect_name(one.effect, result)} ({one.differing:,} of {format_count(one.prompts, 'prompt')})"
        for one in findings
    ]
    return [f"It also {format_list(parts)}."] if parts else []


def _format_effect_name(effect: str, result: SettingResult) -> str:
    return {
        SERVERS: f"answers differently from {result.reference}",
        SCORES: f"gives the tokens of prompts other log-probabilities than {result.reference}",
        REPEAT: "differs from itself when a request is repeated",
        CACHE: "differs from itself when a prompt is sent again (prefix cache)",
        BATCH: "differs from itself between answers in a batch and alone",
    }[effect]


def _format_rare(judgement: Judgement, result: SettingResult) -> str:
    """Return how many pairs of answers differ beyond rounding, and the smallest conditions of one."""
    smallest = find_smallest(judgement.counts, REAL, judgement.limits)
    assert smallest is not None
    real, pairs = sum(c.real for c in judgement.counts), sum(c.pairs for c in judgement.counts)
    return (
        f"{real:,} of {format_count(pairs, 'pair')} of answers differ so. Smallest setting that shows one: it {_format_effect_name(smallest.effect, result)} "
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
    context = f"{finding.smallest.length + finding.first - 1:,} tokens of context"
    return f"token {finding.first} of the answer (after {context}) is another one{apart}; {explained}"


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
        "'other=--attention-backend NAME', or leave this setting out."
    )
    return [head, "The last lines of its log:", *log, advice]


def _format_rounding(limits: Limits) -> str:
    """Return how large the measured rounding is."""
    if not limits.is_measured:
        return (
            "Rounding could not be measured: the answers of one server to the same prompt are almost always identical."
        )
    parts = [
        effect.format(format_short_number(noise.values[0]), format_short_number(noise.values[-1]))
        for noise, effect in (
            (limits.drift_noise, "log-probabilities move by {} (median) and up to {}"),
            (limits.gap_noise, "answers diverge at tokens that are {} apart (median) and up to {}"),
        )
        if noise.values
    ]
    return f"On one server, where only the batch or the prefix cache changes, {format_list(parts)}."


def _format_detectable(found: Detectable, mean_compared: float) -> str:
    """Return the smallest fault that would have been seen, and how much of the answers was compared."""
    shares = f"{found.prompts:.2%} of prompts ({found.prompts_of_a_length:.0%} of those of one length), or in {found.tokens:.3%} of tokens"
    gap = f"more than {format_short_number(found.gap)} apart in log-probability"
    text = [
        f"A fault in {shares}, would have been seen with {CONFIDENCE:.0%} confidence, if it chooses tokens {gap}, or replaces all likely tokens."
    ]
    if found.typical_prompts < 1 and found.typical_gap < found.gap:
        smaller = format_short_number(found.typical_gap)
        text.append(
            f"A fault in {found.typical_prompts:.0%} of prompts would have been seen if they are more than {smaller} apart."
        )
    text.append(f"On average {mean_compared:.1f} tokens of an answer were compared.")
    return " ".join(text)


def _format_limit(test: ShareTest, limits: Limits) -> str:
    """Return what the prompts of a finding exceed."""
    limit = format_short_number(limits.list_limits(test.size)[test.place])
    what = {GAP: "diverge at tokens more than", DRIFT_SIZE: "have log-probabilities of equal tokens more than"}[
        test.size
    ]
    factor = f" ({LAYOUT_FACTOR:g} times {LIMIT_NAMES[test.place]} rounding)" if limits.is_measured else ""
    return f"{what} {limit} apart{factor}"
