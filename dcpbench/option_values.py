"""Reads one option, as typed or as a configuration file has it, or says what to write instead. No torch."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING

from dcpbench.choices import ALL_REDUCES, BACKENDS, EXCHANGES, MIXED, PREFILLS, REPLAY, flag
from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

SYNTHETIC = "synthetic"


def check_seconds(option: str, value: float, example: int) -> None:
    """Raise UsageError unless `value` is a time that can pass."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {value:g} is not a positive number of seconds; try {option} {example}.")


def parse_bytes(name: str, value: object) -> int:
    """`100GiB`, `40GB` or `512 MiB`."""
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", str(value)):
        raise UsageError(f"{flag(name)} {value} has no unit; write for example {flag(name)} 100GiB or 40GB.")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if not match or isinstance(value, bool):
        raise UsageError(f"{flag(name)} {value}: not a size; write for example {flag(name)} 100GiB or 40GB.")
    digits, unit, binary = match.groups()
    size = int(float(digits) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if size < 1:
        raise UsageError(f"{flag(name)} {value}: must be more than 0 bytes; write for example {flag(name)} 100GiB.")
    return size


def items(name: str, value: object) -> list[object]:
    """A comma list, a list or one value; never empty."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    found = found if isinstance(found, list | tuple) else [found]
    if not found or found == [""]:
        raise UsageError(f"{flag(name)} is empty; write for example {example(name)}, or leave it out.")
    if "" in found:
        raise UsageError(f"{flag(name)} {value!r} has an empty entry; write a comma list such as {example(name)}.")
    return list(found)


def example(name: str) -> str:
    """What an option can look like."""
    examples = {
        "model": "deepseek-v3,kimi-k2", "backend": ",".join(BACKENDS), "exchange": EXCHANGES[0], "dtype": "bf16",
        "weights": SYNTHETIC, "all_reduce": ALL_REDUCES[0],
        "tp": "4,8", "dcp": "1,4", "concurrency": "8,32", "context": "4000,32000", "request_rate": "0.5,2",
        "input_tokens": "4000,lognormal:8000:0.5", "output_tokens": "500,1500", "num_requests": "480",
        "burstiness": "0.5", "prefix_share": "0.5", "chunk": "8192", "policy": MIXED, "prefill": PREFILLS[0],
        "mode": REPLAY, "requests": "trace.jsonl", "step_times": "runs/NAME/step-times/FILE.json",
    }  # fmt: skip
    return f"{flag(name)} {examples.get(name, '1')}"


def ints(name: str, value: object) -> tuple[int, ...]:
    """`4,8`, each once."""
    return tuple(dict.fromkeys(whole(name, item) for item in items(name, value)))


def whole(name: str, value: object) -> int:
    """`4`."""
    digits = re.fullmatch(r"[+-]?\d{1,99}", value.strip()) if isinstance(value, str) else None
    if digits or (isinstance(value, int) and not isinstance(value, bool)):
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise UsageError(f"{flag(name)} {value}: not a whole number; write for example {example(name)}.")


def names(name: str, value: object) -> tuple[str, ...]:
    """`ag_rs,a2a`, each once."""
    return tuple(dict.fromkeys(name_of(name, item) for item in items(name, value)))


def name_of(name: str, value: object) -> str:
    """`bf16`."""
    if value == "":
        raise UsageError(f"{flag(name)} is empty; write for example {example(name)}, or leave it out.")
    if not isinstance(value, str):
        raise UsageError(f"{flag(name)} {value!r}: not a name; write for example {example(name)}.")
    return value


def number(name: str, value: object) -> float:
    """`2.5`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise UsageError(f"{flag(name)} {value!r}: not a number; write for example {flag(name)} 10.")


def switch(name: str, value: object) -> bool:
    """`true`."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; write true or false.")
    return value


def switches(name: str, value: object) -> tuple[bool, ...]:
    """`true`, or `[false, true]` for an axis of both."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(switch(name, item) for item in values))


def check_positive(name: str, value: int) -> None:
    """Raise UsageError for 0 and less."""
    if value < 1:
        raise UsageError(f"{flag(name)} {value} is not positive; try {example(name)}.")


def check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UsageError for what is not in `known`, with the nearest of them."""
    if value not in known:
        raise UsageError(f"{flag(name)} {value} is unknown{did_you_mean(value, known)}")


def did_you_mean(value: str, known: Sequence[str]) -> str:
    """The end of a sentence about a name that is not in `known`."""
    near = difflib.get_close_matches(value, known, n=1) or difflib.get_close_matches(value.lower(), known, n=1)
    return (f"; did you mean {near[0]}?" if near else ".") + f" Known: {', '.join(known)}."
