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
from dcpbench.show.text import format_capitalized, format_list

if TYPE_CHECKING:
    from dcpbench.points.point import Load

FIXED, UNIFORM, LOGNORMAL = "fixed", "uniform", "lognormal"
TRACE_LENGTHS = "trace"
"""Value of Load.input_tokens and output_tokens if a file holds the lengths."""
MAX_TOKENS = 1_000_000_000
MAX_SIGMA = 3.0
"""One prompt in forty is then 400 times the median, and the median 400 times another's: more is a mistake."""
_LENGTHS = "write a number such as 4000, uniform:1000-7000 or lognormal:4000:0.5 (median and sigma)"
_PLAIN = re.compile(r"[+-]?\d{1,99}")
_FIXED = re.compile(PATTERN)
_UNIFORM = re.compile(rf"uniform:({PATTERN})-({PATTERN})")
_LOGNORMAL = re.compile(rf"lognormal:({PATTERN}):([^:]+)")


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Distribution of the number of tokens of prompts or of answers."""

    kind: str
    """`fixed` (low), `uniform` (low to high, both included) or `lognormal` (median low, sigma)."""
    low: int
    high: int = 0
    sigma: float = 0.0

    def __str__(self) -> str:
        """Return the canonical form of the option."""
        if self.kind == UNIFORM:
            return f"uniform:{self.low}-{self.high}"
        return f"lognormal:{self.low}:{self.sigma:g}" if self.kind == LOGNORMAL else str(self.low)


def format_varied_lengths(tokens: int) -> str:
    """Return an option for lengths around `tokens` that differ by up to a tenth, or by one token: `uniform:1350-1650`
    for 1500.
    """
    return str(Lengths(UNIFORM, max(9 * tokens // 10, 1), -(-11 * tokens // 10)))


PROMPTS, ANSWERS = "4000", format_varied_lengths(1500)
"""Defaults on GPUs: prompt length, answer length. With answers of identical length, clients
would run in lock-step, which changes which layout is called best: docs/serving.md.
"""
CPU_PROMPTS, CPU_ANSWERS = "32", format_varied_lengths(8)
USUAL_CLIENTS = (8, 32, 48)  # default of --concurrency on GPUs
SPARE_REQUESTS = 0.1  # share by which the default exceeds what p99 of TTFT needs, as some may fail or be cut off


def _count_usual_requests() -> int:
    """Return the default of --num-requests: enough for p99 of TTFT, some to spare, and evenly shared by the usual clients."""
    rounds = math.lcm(*USUAL_CLIENTS)
    return math.ceil(compute_min_samples(OBJECTIVE) * (1 + SPARE_REQUESTS) / rounds) * rounds


USUAL_REQUESTS = _count_usual_requests()  # default of --num-requests on GPUs


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
    sessions = f" in sessions of {format_sessions(load)}" if load.sessions else ""
    shared = f", {load.prefix_share:.0%} shared by {load.prefix_groups}" if load.prefix_share else ""
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
    others = ["TTFT", *(["ITL p99"] if int(output_tokens) > 1 else []), "goodput", *["what attention DP gives"] * dp]
    return (
        f"Clients run in lock-step{some}: all requests of their closed loop have one length, so that they prefill and decode "
        f"at the same time, and few steps have both. {format_capitalized(format_list(others))} differ where lengths differ "
        f"({format_varied_option(output_tokens)})."
    )


def format_drawn(load: Load) -> str:
    """Return the suffix of the rate of an open loop that sent requests with their drawn gaps."""
    return ", as drawn" if load.paced is False else ""


def format_sessions(load: Load) -> str:
    """Return `4 turns`, `uniform:2-8 turns, 200 tokens each later one, 5 s between them`."""
    later = f", {load.turn_tokens} tokens each later one" if load.turn_tokens else ""
    return f"{load.turns} turns{later}{f', {load.think_time:g} s between them' if load.think_time else ''}"


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
