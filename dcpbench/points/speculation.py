"""Describe steps of several tokens (speculative decoding, as with DeepSeek-V3's MTP layer), and draw which drafts are accepted. No torch.

A step verifies N drafts of each request, so that a request has N + 1 query rows. Drafts are accepted up to the first that is rejected,
and the step samples one more token: a request gets 1 to N + 1 tokens.

`acceptance` holds conditional probabilities: aᵢ is the probability that draft i is accepted if all drafts before it were. The expected
tokens of a step are

    1 + a₁ + a₁·a₂ + … + a₁·a₂·…·a_N

Engines report other quantities. vLLM's counter `vllm:spec_decode_num_accepted_tokens_per_pos`, divided by
`vllm:spec_decode_num_drafts`, is the share of all steps that accept position i: the product a₁·…·aᵢ. Its mean acceptance length, 1 +
accepted tokens / drafts, and SGLang's accept length (`sglang:spec_accept_length`, `avg_spec_accept_length`) are the tokens of a step,
the sampled one included.
"""

from __future__ import annotations

import itertools
import json
import operator
from pathlib import Path

import msgspec

from dcpbench.errors import UnusedOptionsError, UsageError

MAX_DRAFT_TOKENS = 7  # eight query rows of a request
SEPARATOR = "/"
_EXAMPLE = "--mtp 3,acceptance=0.85/0.6/0.4"
_MASK = (1 << 64) - 1


class Speculation(msgspec.Struct, frozen=True):
    """Hold the drafts of a step and the probability that each is accepted if those before it were."""

    draft_tokens: int
    acceptance: tuple[float, ...] = ()  # a probability for each draft; empty if none is stated

    @property
    def query_length(self) -> int:
        """Return the query rows of a request in a step."""
        return self.draft_tokens + 1

    @property
    def reached(self) -> tuple[float, ...]:
        """Return for each draft the probability that it and all before it are accepted, as vLLM reports acceptance by position."""
        return tuple(itertools.accumulate(self.acceptance, operator.mul))

    @property
    def expected_tokens(self) -> float | None:
        """Return the expected tokens of a request's step, 1 + a₁ + a₁·a₂ + …; None if no acceptance is stated."""
        return 1 + sum(self.reached) if len(self.acceptance) == self.draft_tokens else None

    def count_accepted(self, seed: int, request: int, step: int) -> int:
        """Return the accepted drafts of a request's step, which depend on these numbers alone: not on the layout, the batch or its order.

        One uniform number u decides: k drafts or more are accepted if u < a₁·…·a_k.
        """
        u = _draw_uniform(seed, request, step)
        return sum(u < share for share in self.reached)


def make_speculation(draft_tokens: int, acceptance: str) -> Speculation | None:
    """Return the speculation of a point from its fields `mtp` and `acceptance`; None for steps of one token."""
    if not draft_tokens:
        return None
    return Speculation(draft_tokens, tuple(map(float, acceptance.split(SEPARATOR))) if acceptance else ())


def check_draft_tokens(count: int) -> int:
    """Return a number of drafts; raise UsageError unless it is from 0 to MAX_DRAFT_TOKENS."""
    if not 0 <= count <= MAX_DRAFT_TOKENS:
        raise UsageError(
            f"--mtp tokens={count}: a step verifies 1 to {MAX_DRAFT_TOKENS} drafts (0: none); write for example --mtp 3."
        )
    return count


def parse_acceptance(text: str) -> str:
    """Return `0.85/0.6/0.4`, or the probabilities of a JSON file, as points store them; raise UsageError."""
    typed = text.strip()
    parts: object = typed.split(SEPARATOR)
    if not _are_numbers(parts):
        parts = _read_file(typed)
    values = [float(part) for part in parts]  # type: ignore[attr-defined]
    if wrong := [value for value in values if not 0 <= value <= 1]:
        raise UsageError(f"--mtp acceptance={typed}: {wrong[0]:g} is no probability; write for example {_EXAMPLE}.")
    return SEPARATOR.join(f"{value:.6g}" for value in values)


def check_acceptance(draft_tokens: tuple[int, ...], acceptance: str) -> None:
    """Raise UsageError unless there are as many probabilities as drafts, of the largest of several numbers of drafts."""
    stated, most = len(acceptance.split(SEPARATOR)) if acceptance else 0, max(draft_tokens, default=0)
    if stated and not most:
        raise UnusedOptionsError(
            f"--mtp acceptance={acceptance} has no drafts; add tokens={stated}, or leave --mtp out.",
            ["--mtp acceptance"],
        )
    if stated not in (0, most):
        raise UsageError(
            f"--mtp tokens={most} with {stated} probabilities ({acceptance}); state one for each draft, such as "
            f"{_make_example(most)}."
        )


def require_acceptance(draft_tokens: tuple[int, ...], acceptance: str) -> None:
    """Raise UsageError if there are drafts and no acceptance: the tokens of a step depend on it, and no default is assumed."""
    most = max(draft_tokens, default=0)
    if most and not acceptance:
        raise UsageError(
            f"--mtp {most} without acceptance: how many tokens a step yields depends on it. Add the probability that each draft is "
            f"accepted if those before it were, as in --mtp {most},{_make_example(most)}, or acceptance=FILE."
        )


def _make_example(draft_tokens: int) -> str:
    return f"acceptance={SEPARATOR.join(['0.8', *['0.6'] * (draft_tokens - 1)])}"


def limit_acceptance(draft_tokens: int, acceptance: str) -> str:
    """Return the probabilities of the first `draft_tokens` drafts; empty without drafts."""
    return SEPARATOR.join(acceptance.split(SEPARATOR)[:draft_tokens]) if acceptance else ""


def _are_numbers(parts: object) -> bool:
    try:
        return [float(part) for part in parts] != []  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False


def _read_file(path: str) -> list[float]:
    """Return the list of a JSON file, or that of its key `acceptance`."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else "it is not JSON"
        raise UsageError(
            f"--mtp acceptance={path}: neither probabilities nor a file that can be read ({why}); write for example {_EXAMPLE}, or a "
            "JSON file with [0.85, 0.6, 0.4]."
        ) from e
    values = found.get("acceptance") if isinstance(found, dict) else found
    if not isinstance(values, list) or not _are_numbers(values):
        raise UsageError(
            f"--mtp acceptance={path}: the file has no list of probabilities; write [0.85, 0.6, 0.4], or the same under the key "
            '"acceptance".'
        )
    return values


def _draw_uniform(*numbers: int) -> float:
    """Return a number from 0 to less than 1 that depends on `numbers` alone (SplitMix64 over them, in turn)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return (state >> 11) / (1 << 53)
