"""Parse and format loads: lengths, limits and objectives. No numpy, because the command line imports this module."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.points.counts import PATTERN, parse_count, suggest_counts
from dcpbench.points.names import CLOSED, GAMMA, OBJECTIVES, REPLAY, TRACE_TIMES, join_value
from dcpbench.records.stats import OBJECTIVE, compute_min_samples
from dcpbench.show.text import format_capitalized, format_count, format_list

if TYPE_CHECKING:
    from dcpbench.points.point import Load

FIXED, UNIFORM, LOGNORMAL = "fixed", "uniform", "lognormal"
TRACE_LENGTHS = "trace"  # value of Load.input_tokens and output_tokens if a file holds the lengths
MAX_TOKENS = 1_000_000_000
MAX_DELAY_S = 86_400  # longest time between an answer and the next turn, as typed
MAX_SIGMA = 3.0  # one prompt in forty is 400 medians, one in forty a 400th of it: more must be a mistake
_LENGTHS = "write a number such as 4000, uniform:1000-7000 or lognormal:4000:0.5 (median and sigma)"
_PLAIN = re.compile(r"[+-]?\d{1,99}")
_FIXED = re.compile(PATTERN)
_UNIFORM = re.compile(rf"uniform:({PATTERN})-({PATTERN})")
_LOGNORMAL = re.compile(rf"lognormal:({PATTERN}):([^:]+)")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distribution of the number of tokens of prompts or of answers."""

    kind: str  # `fixed` (low), `uniform` (low to high, both included) or `lognormal` (median low, sigma)
    low: int
    high: int = 0
    sigma: float = 0.0

    def __str__(self) -> str:
        """Return the canonical form of the option."""
        return _format_distribution(self.kind, str(self.low), str(self.high), self.sigma)


@dataclasses.dataclass(frozen=True)
class Delays:
    """Distribution of times in s, in the notation of lengths."""

    kind: str
    low: float
    high: float = 0.0
    sigma: float = 0.0

    def __str__(self) -> str:
        """Return the canonical form of the option."""
        return _format_distribution(self.kind, f"{self.low:g}", f"{self.high:g}", self.sigma)


def _format_distribution(kind: str, low: str, high: str, sigma: float) -> str:
    if kind == UNIFORM:
        return f"uniform:{low}-{high}"
    return f"lognormal:{low}:{sigma:g}" if kind == LOGNORMAL else low


def format_varied_lengths(tokens: int) -> str:
    """Return an option for lengths around `tokens` that differ by up to a tenth, or by one token: `uniform:1350-1650`
    for 1500.
    """
    return str(Lengths(UNIFORM, max(9 * tokens // 10, 1), -(-11 * tokens // 10)))


PROMPTS, ANSWERS = "4000", format_varied_lengths(1500)  # on GPUs; varied answers avoid lock-step (docs/serving.md)
CPU_PROMPTS, CPU_ANSWERS = "32", format_varied_lengths(8)
USUAL_CLIENTS = (8, 32, 48)  # default of --concurrency on GPUs
SPARE_REQUESTS = 0.1  # share by which the default exceeds what p99 of TTFT needs, as some may fail or be cut off


def _count_usual_requests() -> int:
    """Return the default of --num-requests: enough for p99 of TTFT, some to spare, and evenly shared by the usual clients."""
    rounds = math.lcm(*USUAL_CLIENTS)
    return math.ceil(compute_min_samples(OBJECTIVE) * (1 + SPARE_REQUESTS) / rounds) * rounds


USUAL_REQUESTS = _count_usual_requests()  # default of --num-requests on GPUs


PRESETS: dict[str, dict[str, object]] = {
    "coding-agent": {
        "turns": "lognormal:30:0.5",
        "system_tokens": 12_000,
        "input_tokens": "lognormal:278:0.84",
        "turn_tokens": format_varied_lengths(1732),
        "output_tokens": format_varied_lengths(522),
        "think_time": 1.9,
    }
}
"""Options of --sessions preset.

coding-agent: README of the data set Inferact/codex_swebenchpro_traces (610 runs of Codex on SWE-bench Pro). Calls of a run: p50 30, p90
57, mean 33. Prompt of the first call: p50 12,278, p90 12,813, of which 12,000 are taken as the same in all runs. Output tokens:
17,239 / 33 = 522 a call. Prompts grow from 12,367 to 84,482 tokens in 32 calls, so that a call adds 2,254 - 522 = 1,732 of its own. Of
all prompt tokens 2,133,687 / 2,266,055 = 94 % were cached; here a cache that forgets nothing has 97 %. The time of a tool is the mean of `exec_command` in TraceLab
(arXiv:2606.30560, 184k calls in 97.8 h). Where only a mean is published, lengths vary by a tenth around it.
"""


def parse_lengths(option: str, value: object) -> Lengths:
    """Return the lengths of `4000`, `64k`, `uniform:1000-7000` or `lognormal:4000:0.5`. Raises UsageError."""
    text = "" if isinstance(value, bool) else str(value).strip()
    if _FIXED.fullmatch(text):
        return Lengths(FIXED, _parse_tokens(option, text, text))
    if found := _UNIFORM.fullmatch(text):
        low, high = (_parse_tokens(option, text, number) for number in found.groups())
        if low > high:
            raise UsageError(f"{join_value(option, text)}: {low} is more than {high}; write uniform:{high}-{low}.")
        return Lengths(UNIFORM, low, high)
    if found := _LOGNORMAL.fullmatch(text):
        return Lengths(LOGNORMAL, _parse_tokens(option, text, found[1]), sigma=_parse_sigma(option, text, found[2]))
    raise UsageError(f"{join_value(option, value)}: not a length; {_LENGTHS}.")


def parse_delays(option: str, value: object) -> Delays:
    """Return the times of `2`, `uniform:0.5-3` or `lognormal:1.2:0.8` (median and sigma), in s. Raise UsageError."""
    text = str(value).strip()
    kind, *rest = text.split(":")
    numbers = [_parse_float(word) for part in rest for word in (part.split("-") if kind == UNIFORM else [part])]
    if kind == UNIFORM and len(numbers) == 2 and 0 <= numbers[0] <= numbers[1] <= MAX_DELAY_S:  # noqa: PLR2004 - its ends
        return Delays(UNIFORM, numbers[0], numbers[1])
    if kind == LOGNORMAL and len(numbers) == 2 and 0 < numbers[0] <= MAX_DELAY_S:  # noqa: PLR2004 - median and sigma
        return Delays(LOGNORMAL, numbers[0], sigma=_parse_sigma(option, text, rest[1]))
    if not rest and not isinstance(value, bool) and 0 <= (seconds := _parse_float(text)) <= MAX_DELAY_S:
        return Delays(FIXED, seconds)
    raise UsageError(
        f"{join_value(option, text)}: not 0 to {MAX_DELAY_S:,} seconds; write for example think=5, think=uniform:0.5-3 or "
        "think=lognormal:1.2:0.8 (median and sigma)."
    )


def parse_slo(value: object) -> dict[str, float]:
    """Parse `ttft=500,itl=50`, or a table or a list of a configuration file, in ms. Raise UsageError for other values."""
    example = "write for example --slo ttft=500,itl=50, in ms"
    if value in ("", {}, []):
        raise UsageError(f"--slo is empty; {example}, or leave it out.")
    parts = value if isinstance(value, list) else str(value).split(",")
    pairs = list(value.items()) if isinstance(value, dict) else [_parse_objective(str(part), example) for part in parts]
    found: dict[str, float] = {}
    for name, limit in pairs:
        if name not in OBJECTIVES:
            raise UsageError(f"--slo {name}: not one of {', '.join(OBJECTIVES)}; {example}.")
        if name in found:
            raise UsageError(f"--slo names {name} twice; {example}.")
        number = _parse_float(limit)
        if not 0 < number < math.inf:
            raise UsageError(f"--slo {name}={limit}: not a positive number of ms; {example}.")
        found[name] = number
    return found


def format_load(load: Load, concurrency: int) -> str:
    """Return `8 clients, 480 × 4000→1500 tokens`, with `, replay` for a replay; docs/serving.md explains the loops."""
    if load.arrival == CLOSED:
        who = "1 client" if concurrency == 1 else f"{concurrency} clients"
    elif load.arrival == GAMMA:
        bursts = "" if load.burstiness == 1 else f" burstiness {load.burstiness:g}"
        who = f"{load.request_rate:g} req/s{bursts}{format_drawn(load)}"
    else:
        who = TRACE_TIMES
    what = f"of {load.trace}" if load.trace else f"× {load.input_tokens}→{load.output_tokens} tokens"
    sessions = f" in {format_sessions(load)}" if load.sessions else ""
    groups = f" by {load.prefix_groups:,} groups" if (load.prefix_groups or 1) > 1 else ""
    shared = f", {load.prefix_share * 100:g}% shared{groups}" if load.prefix_share else ""
    bound = f", {concurrency} at once" if load.arrival != CLOSED and concurrency < load.requests else ""
    return f"{who}, {load.requests:,} {what}{sessions}{shared}{bound}{', replay' if load.mode == REPLAY else ''}"


def is_lock_step(load: Load, concurrency: int) -> bool:
    """Return True if clients of a closed loop run in lock-step because all requests have the same length:
    docs/serving.md.
    """
    same_length = all(_PLAIN.fullmatch(lengths) for lengths in (load.input_tokens, load.output_tokens))
    return same_length and load.arrival == CLOSED and not load.sessions and 1 < concurrency < load.requests


def format_varied_option(output_tokens: str) -> str:
    """Return the option that varies the lengths of answers by a tenth, or by one token; for one-token answers, of
    prompts.
    """
    if int(output_tokens) == 1:
        return "--input-tokens uniform:LOW-HIGH"
    return f"--output-tokens {format_varied_lengths(int(output_tokens))}"


def format_lock_step_warning(output_tokens: str, *, some: str = "", dp: bool) -> str:
    """Return the warning about clients in lock-step; `some` limits it to some points, `dp` adds the effect on attention
    DP.
    """
    others = ["TTFT", *(["ITL p99"] if int(output_tokens) > 1 else []), "goodput", *["the output of attention DP"] * dp]
    return (
        f"Clients run in lock-step{some}: all requests of their closed loop have one length, so that they prefill and decode "
        f"at the same time, and few steps contain both. {format_capitalized(format_list(others))} are different with varied lengths "
        f"({format_varied_option(output_tokens)})."
    )


def format_drawn(load: Load) -> str:
    """Return the suffix of the rate of an open loop that sent requests with their drawn gaps."""
    return ", as drawn" if load.paced is False else ""


def format_sessions(load: Load) -> str:
    """Return `sessions of 4 turns`, `sessions of uniform:2-8 turns, 200 new tokens each later turn, 5 s between turns`; `3 sessions` of a file."""
    if load.trace_facts is not None:
        return format_count(load.trace_facts.sessions, "session")
    parts = [f"sessions of {load.turns} turns"]
    parts += [f"{load.turn_tokens} new tokens each later turn"] if load.turn_tokens else []
    parts += [f"{parse_delays('--sessions think', load.think_time)} s between turns"] if load.think_time else []
    parts += [f"{load.system_tokens:,} shared system tokens"] if load.system_tokens else []
    parts += [f"{load.branch:.0%} of turns from an earlier turn"] if load.branch else []
    parts += [f"{load.subagents} sub-agents after each turn but the last"] if load.subagents else []
    return ", ".join(parts)


def _parse_tokens(option: str, text: str, number: str) -> int:
    count = parse_count(number)
    if count is None:
        choices = suggest_counts(number) or f"not a length in whole tokens; {_LENGTHS}"
        raise UsageError(f"{join_value(option, text)}: {choices}.")
    if count < 1:
        raise UsageError(
            f"{join_value(option, text)}: {count} tokens; a request has at least 1 in and 1 out. Or {_LENGTHS}."
        )
    if count > MAX_TOKENS:
        raise UsageError(f"{join_value(option, text)}: {count:,} tokens are more than any model takes; {_LENGTHS}.")
    return count


def _parse_sigma(option: str, text: str, number: str) -> float:
    sigma = _parse_float(number)
    if not 0 < sigma <= MAX_SIGMA:
        raise UsageError(
            f"{join_value(option, text)}: sigma is {number}, and can be more than 0 and up to {MAX_SIGMA:g}; it is the standard "
            "deviation of the logarithm, so 0.5 puts two of three lengths within a factor of 1.65 of the median."
        )
    return sigma


def _parse_objective(part: str, example: str) -> tuple[str, str]:
    name, equals, limit = (x.strip() for x in part.partition("="))
    if not equals:
        raise UsageError(f"--slo {part}: not NAME=MS; {example}.")
    return name, limit


def _parse_float(value: object) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        return math.nan
