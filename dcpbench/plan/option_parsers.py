"""Parse one option from the command line or a configuration file, or raise an error with the
accepted form. No torch.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import shlex
from typing import TYPE_CHECKING

from dcpbench.errors import UsageError
from dcpbench.points.bounds import MAX_NUMBER
from dcpbench.points.counts import parse_count, suggest_counts
from dcpbench.points.expert_distribution import parse_routing
from dcpbench.points.names import BACKENDS, MOE_EP, MOE_TP, REPLAY, SYNTHETIC, format_flag, format_setting, join_value
from dcpbench.points.point import AXES, LOAD_AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.points.axes import Axis

MAX_NAME_CHARS = 1_000  # maximum number of characters of a name or a path
MAX_SHOWN_CHARS = 80  # maximum number of characters of a value that an error repeats


def check_seconds(option: str, value: float, example: int) -> None:
    """Raise UsageError unless `value` is a positive, finite time."""
    if not 0 < value < math.inf:
        raise UsageError(
            f"{join_value(option, f'{value:g}')} is not a positive number of seconds; try {join_value(option, example)}."
        )


def parse_bytes(name: str, value: object) -> int:
    """Parse `100GiB`, `40GB` or `512 MiB`."""
    typed = format_value(value)
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", typed):
        raise UsageError(
            f"{format_setting(name, typed)} has no unit; write for example {format_flag(name)} 100GiB or 40GB."
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", typed, re.IGNORECASE)
    if not match or isinstance(value, bool):
        raise UsageError(
            f"{format_setting(name, typed)}: not a size; write for example {format_flag(name)} 100GiB or 40GB."
        )
    digits, unit, binary = match.groups()
    amount = float(digits) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " ")
    _check_size(name, amount, typed)
    size = int(amount)
    if size < 1:
        raise UsageError(
            f"{format_setting(name, typed)}: must be more than 0 bytes; write for example {format_flag(name)} 100GiB."
        )
    return size


def split_command(where: str, text: str) -> list[str]:
    """Return the words of a command line. Raise UsageError for an open quote, with the option `where`."""
    try:
        return shlex.split(text)
    except ValueError as e:
        raise UsageError(f"{where}: {text!r} cannot be read: {e}; close every quote.") from e


def split_items(name: str, value: object) -> list[object]:
    """Return the items of a comma-separated list, a list or one value; never empty."""
    found = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    found = found if isinstance(found, list | tuple) else [found]
    if not found or found == [""]:
        raise UsageError(f"{format_flag(name)} is empty; write for example {format_example(name)}, or leave it out.")
    if "" in found:
        raise UsageError(
            f"{format_setting(name, format_quoted(value))} has an empty entry; write a comma list such as {format_example(name)}."
        )
    return list(found)


def format_example(name: str) -> str:
    """Return an example of an option's value."""
    examples = {axis.name: axis.values[0] for axis in (*AXES, *LOAD_AXES) if axis.values} | {
        "model": "deepseek-v3,kimi-k2",
        "backend": ",".join(BACKENDS),
        "weights": SYNTHETIC,
        "weights_dtype": "fp8,bf16",
        "kv_dtype": "fp8,bf16",
        "tp": "4,8",
        "dcp": "1,4",
        "ep": f"{MOE_TP},{MOE_EP}",
        "routing": "even,zipf:1",
        "mtp": "3",
        "acceptance": "0.85/0.6/0.4",
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
    return format_setting(name, examples.get(name, "1"))


def parse_ints(name: str, value: object) -> tuple[int, ...]:
    """Parse `4,8`, each number once."""
    return tuple(dict.fromkeys(parse_int(name, item) for item in split_items(name, value)))


def parse_positive_ints(name: str, value: object) -> tuple[int, ...]:
    """Parse `4,8`, each number once. Raise UsageError for a number of 0 or less."""
    found = parse_ints(name, value)
    for number in found:
        check_positive(name, number)
    return found


def parse_int(name: str, value: object) -> int:
    """Return the number of `4` or `64k`. Raise UsageError."""
    found = parse_count(value) if isinstance(value, str) else value
    if isinstance(found, int) and not isinstance(found, bool):
        _check_size(name, found, format_value(value))
        return found
    if isinstance(value, str) and (choices := suggest_counts(value)):
        raise UsageError(f"{format_setting(name, value)}: {choices}.")
    raise UsageError(
        f"{format_setting(name, format_value(value))}: not a whole number; write for example {format_example(name)}."
    )


def parse_degrees(name: str, value: object) -> tuple[str, ...]:
    """Parse `1,tp`, each value once: numbers of ranks, or all ranks of a layout."""
    return tuple(
        dict.fromkeys(MOE_EP if item == MOE_EP else str(parse_int(name, item)) for item in split_items(name, value))
    )


def parse_names(name: str, value: object) -> tuple[str, ...]:
    """Parse `ag_rs,a2a`, each name once."""
    return tuple(dict.fromkeys(parse_name(name, item) for item in split_items(name, value)))


def parse_name(name: str, value: object) -> str:
    """Parse a name such as `bf16`."""
    if value == "":
        raise UsageError(f"{format_flag(name)} is empty; write for example {format_example(name)}, or leave it out.")
    if not isinstance(value, str):
        raise UsageError(
            f"{format_setting(name, format_value(value))}: not a name; write for example {format_example(name)}."
        )
    if len(value) > MAX_NAME_CHARS:
        raise UsageError(
            f"{format_setting(name, format_value(value))} has {len(value):,} characters; write for example {format_example(name)}."
        )
    return value


def parse_number(name: str, value: object) -> float:
    """Parse a number such as `2.5`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value not in (math.inf, -math.inf):  # the options that accept inf handle it themselves
            _check_size(name, value, format_value(value))
        return float(value)
    raise UsageError(
        f"{format_setting(name, format_quoted(value))}: not a number; write for example {format_setting(name, 10)}."
    )


def parse_bool(name: str, value: object) -> bool:
    """Parse `true` or `false`."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {format_quoted(value)}; write true or false.")
    return value


def parse_bools(name: str, value: object) -> tuple[bool, ...]:
    """Parse `true`, or `[false, true]` for an axis with both values."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(dict.fromkeys(parse_bool(name, item) for item in values))


def parse_routings(name: str, value: object) -> tuple[str, ...]:
    """Parse `even,zipf:1,counts.json`, each routing once."""
    return tuple(dict.fromkeys(parse_routing(parse_name(name, item)) for item in split_items(name, value)))


def get_parser(axis: Axis) -> Callable[[str, object], object]:
    """Return the parser for values of a field of a point or load."""
    one, several = {str: (parse_name, parse_names), int: (parse_int, parse_ints), bool: (parse_bool, parse_bools)}[
        axis.kind
    ]
    return one if axis.one else several


def format_value(value: object) -> str:
    """Format a value for a sentence: a short value unchanged, else its beginning; nested lists are not expanded in
    full.
    """
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_CHARS:
        return f"(a number of {value.bit_length():,} bits)"
    try:
        text = value if isinstance(value, str) else reprlib.repr(value)
    except ValueError:  # a list of numbers that Python does not print
        text = f"({type(value).__name__})"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def format_quoted(value: object) -> str:
    """Format a value as `format_value` does, with text in quotes."""
    return repr(format_value(value)) if isinstance(value, str) else format_value(value)


def _check_size(name: str, value: float, typed: str) -> None:
    if abs(value) > MAX_NUMBER:
        raise UsageError(
            f"{format_setting(name, typed)} is above {MAX_NUMBER:g}, more than anything that can be measured; write for example "
            f"{format_example(name)}."
        )


def check_positive(name: str, value: int) -> None:
    """Raise UsageError for a value of 0 or less."""
    if value < 1:
        raise UsageError(f"{format_setting(name, value)} is not positive; try {format_example(name)}.")


def check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UsageError with the nearest alternatives if a value is not in `known`."""
    if value not in known:
        raise UsageError(f"{format_setting(name, value)} is unknown{suggest_known(value, known)}")


def suggest_known(value: str, known: Sequence[str]) -> str:
    """Return the end of a sentence about a name that is not in `known`, with the nearest one."""
    near = difflib.get_close_matches(value, known, n=1) or difflib.get_close_matches(value.lower(), known, n=1)
    return (f"; did you mean {near[0]}?" if near else ".") + f" Known: {', '.join(known)}."
