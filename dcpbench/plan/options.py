"""Parse one option from the command line or a configuration file, or raise an error with the
accepted form. No torch.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.counts import parse_count, suggest_counts
from dcpbench.points.names import BACKENDS, CUT, REPLAY, SYNTHETIC, WHOLE, flag
from dcpbench.points.point import AXES, LOAD_AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.points.axes import Axis

LONGEST_NAME = 1_000
"""Maximum number of characters of a name or a path."""
LONGEST_SHOWN = 80
"""Maximum number of characters of a value that an error repeats."""


def check_seconds(option: str, value: float, example: int) -> None:
    """Raise UsageError unless `value` is a positive, finite time."""
    if not 0 < value < math.inf:
        raise UsageError(f"{option} {value:g} is not a positive number of seconds; try {option} {example}.")


def parse_bytes(name: str, value: object) -> int:
    """Parse `100GiB`, `40GB` or `512 MiB`."""
    typed = shown(value)
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", typed):
        raise UsageError(f"{flag(name)} {typed} has no unit; write for example {flag(name)} 100GiB or 40GB.")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", typed, re.IGNORECASE)
    if not match or isinstance(value, bool):
        raise UsageError(f"{flag(name)} {typed}: not a size; write for example {flag(name)} 100GiB or 40GB.")
    digits, unit, binary = match.groups()
    amount = float(digits) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    _check_size(name, amount, typed)
    size = int(amount)
    if size < 1:
        raise UsageError(f"{flag(name)} {typed}: must be more than 0 bytes; write for example {flag(name)} 100GiB.")
    return size


def items(name: str, value: object) -> list[object]:
    """Return the items of a comma-separated list, a list or one value; never empty."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    found = found if isinstance(found, list | tuple) else [found]
    if not found or found == [""]:
        raise UsageError(f"{flag(name)} is empty; write for example {example(name)}, or leave it out.")
    if "" in found:
        raise UsageError(
            f"{flag(name)} {quoted(value)} has an empty entry; write a comma list such as {example(name)}."
        )
    return list(found)


def example(name: str) -> str:
    """Return an example of an option's value."""
    examples = {axis.name: axis.values[0] for axis in (*AXES, *LOAD_AXES) if axis.values} | {
        "model": "deepseek-v3,kimi-k2",
        "backend": ",".join(BACKENDS),
        "weights": SYNTHETIC,
        "weights_dtype": "fp8,bf16",
        "kv_dtype": "fp8,bf16",
        "tp": "4,8",
        "dcp": "1,4",
        "ep": f"{CUT},{WHOLE}",
        "concurrency": "8,32",
        "context": "4000,32000",
        "request_rate": "0.5,2",
        "input_tokens": "4000,lognormal:8000:0.5",
        "output_tokens": "500,1500",
        "num_requests": "1000",
        "burstiness": "0.5",
        "prefix_share": "0.5",
        "chunk": "8192",
        "mode": REPLAY,
        "disaggregate": "1:1,1:2",
        "transfer_gb_s": "50",
        "transfer_ms": "2",
        "requests": "trace.jsonl",
        "step_times": "runs/NAME/step-times/FILE.json",
        "gpus": "8",
        "kv_memory": "100GiB",
    }
    return f"{flag(name)} {examples.get(name, '1')}"


def ints(name: str, value: object) -> tuple[int, ...]:
    """Parse `4,8`, each number once."""
    return tuple(dict.fromkeys(whole(name, item) for item in items(name, value)))


def whole(name: str, value: object) -> int:
    """Return the number of `4` or `64k`. Raises UsageError."""
    found = parse_count(value) if isinstance(value, str) else value
    if isinstance(found, int) and not isinstance(found, bool):
        _check_size(name, found, shown(value))
        return found
    if isinstance(value, str) and (choices := suggest_counts(value)):
        raise UsageError(f"{flag(name)} {value}: {choices}.")
    raise UsageError(f"{flag(name)} {shown(value)}: not a whole number; write for example {example(name)}.")


def degrees(name: str, value: object) -> tuple[str, ...]:
    """Parse `1,tp`, each value once: numbers of ranks, or all ranks of a layout."""
    return tuple(dict.fromkeys(WHOLE if item == WHOLE else str(whole(name, item)) for item in items(name, value)))


def names(name: str, value: object) -> tuple[str, ...]:
    """Parse `ag_rs,a2a`, each name once."""
    return tuple(dict.fromkeys(name_of(name, item) for item in items(name, value)))


def name_of(name: str, value: object) -> str:
    """Parse a name such as `bf16`."""
    if value == "":
        raise UsageError(f"{flag(name)} is empty; write for example {example(name)}, or leave it out.")
    if not isinstance(value, str):
        raise UsageError(f"{flag(name)} {shown(value)}: not a name; write for example {example(name)}.")
    if len(value) > LONGEST_NAME:
        raise UsageError(
            f"{flag(name)} {shown(value)} has {len(value):,} characters; write for example {example(name)}."
        )
    return value


def number(name: str, value: object) -> float:
    """Parse a number such as `2.5`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value not in (math.inf, -math.inf):  # the options that accept inf handle it themselves
            _check_size(name, value, shown(value))
        return float(value)
    raise UsageError(f"{flag(name)} {quoted(value)}: not a number; write for example {flag(name)} 10.")


def switch(name: str, value: object) -> bool:
    """Parse `true` or `false`."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {quoted(value)}; write true or false.")
    return value


def switches(name: str, value: object) -> tuple[bool, ...]:
    """Parse `true`, or `[false, true]` for an axis with both values."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(switch(name, item) for item in values))


def parser_of(axis: Axis) -> Callable[[str, object], object]:
    """Return the parser for values of a field of a point or load."""
    one, several = {str: (name_of, names), int: (whole, ints), bool: (switch, switches)}[axis.kind]
    return one if axis.one else several


def shown(value: object) -> str:
    """Format a value for a sentence: a short value unchanged, else its beginning; nested lists are not expanded in
    full.
    """
    if isinstance(value, int) and value.bit_length() > LONGEST_SHOWN:
        return f"(a number of {value.bit_length():,} bits)"
    try:
        text = value if isinstance(value, str) else reprlib.repr(value)
    except ValueError:  # a list of numbers that Python does not print
        text = f"({type(value).__name__})"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def quoted(value: object) -> str:
    """Format a value as `shown` does, with text in quotes."""
    return repr(shown(value)) if isinstance(value, str) else shown(value)


def _check_size(name: str, value: float, typed: str) -> None:
    if abs(value) > MAX_NUMBER:
        raise UsageError(
            f"{flag(name)} {typed} is above {MAX_NUMBER:g}, more than anything that can be measured; write for example "
            f"{example(name)}."
        )


def check_positive(name: str, value: int) -> None:
    """Raise UsageError for a value of 0 or less."""
    if value < 1:
        raise UsageError(f"{flag(name)} {value} is not positive; try {example(name)}.")


def check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UsageError with the nearest alternatives if a value is not in `known`."""
    if value not in known:
        raise UsageError(f"{flag(name)} {value} is unknown{did_you_mean(value, known)}")


def did_you_mean(value: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about a name that is not in `known`, with the nearest one."""
    near = difflib.get_close_matches(value, known, n=1) or difflib.get_close_matches(value.lower(), known, n=1)
    return (f"; did you mean {near[0]}?" if near else ".") + f" Known: {', '.join(known)}."
