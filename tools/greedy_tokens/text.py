"""Format the verdict as text and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from tools.greedy_tokens.comparison import BEYOND, FEW, NEAR_TIES, ROUNDING, ROUTING, WIDE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tools.greedy_tokens.comparison import Difference, Reason, Verdict

FP32 = "fp32"
JSON_PROPERTIES = {"engines": ("beyond_near_tie", "ratio"), "pairs": ("near_ties", "near_tie_share", "beyond_near_tie")}
"""Properties that the JSON also has."""


def format_json(found: Verdict) -> str:
    """Format the verdict as JSON, with each differing position."""
    fields = msgspec.to_builtins(found)
    for part, names in JSON_PROPERTIES.items():
        for given, one in zip(fields[part], getattr(found, part), strict=True):
            given |= {name: getattr(one, name) for name in names}
    return json.dumps(fields, indent=1) + "\n"


def format_verdict(found: Verdict) -> str:
    """Format the tables, each differing position, and the verdict with its reasons."""
    parts = [
        _format_table(
            ("engines", "prompts", "positions", "equal", "near-ties left out", "beyond a near-tie"),
            [
                (
                    f"{p.left} and {p.right}", f"{p.prompts}", f"{p.positions:,}", f"{p.equal:,}",
                    f"{p.near_ties} ({p.near_tie_share:.1%})", f"{p.beyond_near_tie}",
                )
                for p in found.pairs
            ],
        ),
        _format_table(
            ("engine and fp32", "positions", "equal", "near-ties", "beyond a near-tie", "mean difference", "over rounding"),
            [
                (
                    e.name, f"{e.positions:,}", f"{e.equal:,}", f"{len(e.differences) - e.beyond_near_tie}", f"{e.beyond_near_tie}",
                    f"{e.mean:.4f}", f"{e.ratio:.2f}",
                )
                for e in found.engines
            ],
        ),
        "".join(
            [
                *(line for p in found.pairs for line in _list_differences(p.left, p.right, p.differences)),
                *(
                    line
                    for e in found.engines
                    for line in _list_differences(e.name, FP32, (d for d in e.differences if not d.near_tie))
                ),
            ]
        ),
        _format_limits(found),
        f"{found.verdict}\n" + "".join(f"  {_format_reason(reason)}\n" for reason in found.reasons),
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _format_limits(found: Verdict) -> str:
    return (
        f"A near-tie is up to {found.tie_limit:.4f} apart in fp32; its two likeliest tokens are {found.median_gap:.4f} apart (median). "
        f"Rounding could change the experts of {found.routing_ties:.1%} of the positions.\n"
    )


def _format_table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Format a Markdown table with aligned columns; return an empty text without rows."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    lines = [names, tuple("-" * width for width in widths), *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |\n"
        for line in lines
    )


def _list_differences(left: str, right: str, differences: Iterable[Difference]) -> list[str]:
    """Format a line for each differing position: the token that fp32 ranks first, its engine, and the difference."""
    lines = []
    for d in sorted(differences, key=lambda d: -abs(d.ahead)):
        first, second = ((left, d.left), (right, d.right))[:: 1 if d.ahead >= 0 else -1]
        other = "" if d.best in {d.left, d.right} else f"; its likeliest is t{d.best}"
        lines.append(
            f"prompt {d.prompt + 1}, token {d.position + 1}: fp32 has {_format_token(*first)} ahead of {_format_token(*second)} by "
            f"{abs(d.ahead):.4f} ({_get_kind(d)}){other}\n"
        )
    return lines


def _format_token(engine: str, token: int) -> str:
    return f"its own t{token}" if engine == FP32 else f"t{token} of {engine}"


def _get_kind(difference: Difference) -> str:
    if difference.routing:
        return "near-tie of experts"
    return "near-tie" if difference.near_tie else "beyond a near-tie"


def _format_reason(reason: Reason) -> str:
    names = " and ".join(reason.engines)
    if reason.kind == BEYOND:
        return f"{names}: {reason.value:.0f} positions differ beyond a near-tie{'' if len(reason.engines) > 1 else ' from fp32'}."
    if reason.kind == ROUNDING:
        return f"{names}: log-probabilities differ from fp32 {reason.value:.2f} times as much as rounding explains; the limit is {reason.limit:g}."
    if reason.kind == NEAR_TIES:
        return (
            f"{names}: {reason.value:.1%} of the positions are near-ties, more than {reason.limit:.0%}; take a model folder with fewer layers or "
            "experts, or in bf16."
        )
    if reason.kind == FEW:
        return f"{names}: {reason.value:.0f} positions are compared, fewer than {reason.limit:.0f}; raise --prompts of all commands."
    if reason.kind == ROUTING:
        return f"Rounding could change the experts of {reason.value:.1%} of the positions, more than {reason.limit:.0%}; take a model folder with fewer experts."
    assert reason.kind == WIDE
    return (
        f"Near-ties are up to {reason.value:.4f} apart, more than the two likeliest tokens of half of the positions ({reason.limit:.4f}), so "
        "that a wrong token looks like one; take a model folder with fewer layers or experts, or in bf16."
    )
