"""Options of each bench -> its cases, with the device's defaults for what was not typed. No torch."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from typing import TYPE_CHECKING

from dcpbench.bench_records import Case
from dcpbench.errors import UsageError
from dcpbench.layout import local_length

if TYPE_CHECKING:
    from collections.abc import Sequence

KV_WRITE_VARIANTS = ("check-all", "filter", "masked-kernel")
DP_SLICE_VARIANTS = ("cuda-slice", "host-slice")
DTYPES = ("bf16", "fp8")


def kv_write_cases(
    *,
    cpu: bool,
    tokens: str | None,
    dcp: str | None,
    dtype: str | None,
    variant: str | None,
    layers: int | None,
    scale: float,
    empty: bool,
) -> list[Case]:
    """Every variant at every size. `empty` adds, for each, a rank of the largest dcp that owns none of the tokens.

    Raises UsageError for values that cannot work.
    """
    if not 0 < scale < math.inf:
        raise UsageError(f"--scale {scale:g} is not a positive number; try --scale 1.")
    variants = _names("--variant", variant, KV_WRITE_VARIANTS)
    sizes = _counts("--tokens", tokens, (16, 64) if cpu else (16, 256, 4096, 65536))
    ranks = _counts("--dcp", dcp, (1, 4) if cpu else (1, 8))
    calls = _count("--layers", layers, 2 if cpu else 61)
    shares = [(n, 1) for n in ranks] + ([(max(ranks), 0)] if empty else [])
    cases = []
    for kind, (n, some), size in itertools.product(_names("--dtype", dtype, DTYPES), shares, sizes):
        owned = local_length(size, 0, n) * some
        columns: dict[str, int | float | str] = {"tokens": size, "dcp": n, "owned": owned, "dtype": kind}
        if scale != 1.0 and kind == "fp8":
            columns["scale"] = scale
        cases += [Case(variant=name, calls=calls, sizes=columns) for name in variants]
    return cases


def dp_slice_cases(
    *, cpu: bool, tokens: str | None, dp: str | None, variant: str | None, steps: int | None
) -> list[Case]:
    """Every variant for every number of ranks and of tokens of the busiest one. Raises UsageError as above."""
    variants = _names("--variant", variant, DP_SLICE_VARIANTS)
    sizes = _counts("--tokens", tokens, (16, 64) if cpu else (16, 256, 4096))
    ranks = _counts("--dp", dp, (4,) if cpu else (8,))
    calls = _count("--steps", steps, 2 if cpu else 16)
    return [
        Case(variant=name, calls=calls, sizes={"tokens": size, "dp": n})
        for n, size, name in itertools.product(ranks, sizes, variants)
    ]


def _counts(option: str, typed: str | None, default: Sequence[int]) -> tuple[int, ...]:
    """A comma list of positive whole numbers, none twice."""
    example = f"{option} {','.join(map(str, default))}"
    if typed is None:
        return tuple(default)
    items = [item.strip() for item in typed.split(",")]
    for item in items:
        if not re.fullmatch(r"[0-9]{1,9}", item) or int(item) < 1:
            raise UsageError(f"{option} {typed}: '{item}' is not a positive whole number; write for example {example}.")
    return tuple(dict.fromkeys(map(int, items)))


def _count(option: str, typed: int | None, default: int) -> int:
    if typed is not None and typed < 1:
        raise UsageError(f"{option} {typed} is not a positive number; try {option} {default}.")
    return default if typed is None else typed


def _names(option: str, typed: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """A comma list of known names, in their usual order."""
    if typed is None:
        return tuple(known)
    items = [item.strip() for item in typed.split(",")]
    for item in items:
        if item not in known:
            near = difflib.get_close_matches(item, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UsageError(f"{option} '{item}' is unknown{hint} Write a comma list of: {', '.join(known)}.")
    return tuple(name for name in known if name in items)
