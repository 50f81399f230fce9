"""Options of each bench -> its cases, with the device's defaults for what was not typed. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import itertools
import math
import re
from typing import TYPE_CHECKING

from dcpbench.bench.record import Case
from dcpbench.errors import UsageError
from dcpbench.plan.options import parse_bytes
from dcpbench.points.batches import padded_batch
from dcpbench.points.layout import Prefix, local_length
from dcpbench.points.names import BACKENDS, EXCHANGES
from dcpbench.points.shapes import KV_WIDTH, LATENT, VALUE, load_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KV_WRITE_VARIANTS = ("check-all", "filter", "masked-kernel")
DP_SLICE_VARIANTS = ("cuda-slice", "host-slice")
PADDED_SLOTS_VARIANTS = ("slot-0-live", "slot-0-padding")
PROMPT_IDS = ("elsewhere", "known")
SHORTEST_PADDED = 3
"""Tokens of a request of padded-slots: two that padding rows may overwrite, and the one that the step reads."""
DTYPES = ("bf16", "fp8")
MERGE_VARIANTS = ("head-order", "correct", "pack", "combine", "value-proj")
MOE_VARIANTS = ("triton", "torch", "deepgemm")
MOE_PRODUCTS = ("gate-up", "down")
MOE_ROWS = ("uniform", "skewed", "few")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "all-reduce-symm")
EXCHANGE_VARIANTS = tuple(dict.fromkeys(("ag_rs", "ag_rs-bf16", *EXCHANGES)))
"""`ag_rs-bf16` reduces partial outputs in bf16, which the engine does not."""
KV_GATHER_VARIANTS = ("nccl", "direct")
BUFFERS = ("pool", "plain")
POOL_BYTES = 4 << 30
"""What SGLang reserves for it (#24040)."""
CPU_POOL_BYTES = 1 << 20
ROW_BYTES = 2 * KV_WIDTH
"""Of a KV row in bf16."""
LENGTHS = ("even", "uneven")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What defaults depend on."""

    cpu: bool
    ranks: int = 1


def attention_cases(
    machine: Machine,
    *,
    heads: str | None,
    requests: str | None,
    context: str | None,
    page: str | None,
    lengths: str,
    backend: str | None,
    layers: int | None,
) -> list[Case]:
    """Every backend at every size; those of one pool follow each other, so that they can share it.

    Raises UsageError for values that cannot work.
    """
    cpu = machine.cpu
    here = ("reference", "triton") if cpu else ("flashinfer", "triton")
    backends = _names("--backend", backend, BACKENDS) if backend else here
    grid = itertools.product(
        _names("--lengths", lengths, LENGTHS),
        _counts("--page", page, (4,) if cpu else (64,)),
        _counts("--context", context, (16,) if cpu else (8192, 131072)),
        _counts("--requests", requests, (1, 3) if cpu else (1, 8, 64)),
        _counts("--heads", heads, (16,) if cpu else (16, 64, 128)),
        backends,
    )
    calls = _layers(layers)
    return [
        Case(
            variant=name,
            calls=calls,
            sizes={"heads": h, "requests": b, "context": s, "page": p, "lengths": division},
        )
        for division, p, s, b, h, name in grid
    ]


def exchange_cases(
    machine: Machine,
    *,
    heads: str | None,
    requests: str | None,
    variant: str | None,
    layers: int | None,
    q_replicate: bool,
    project_first: bool,
) -> list[Case]:
    """Every exchange at every size. Raises UsageError as above, and for heads that the ranks cannot share evenly."""
    ranks = machine.ranks
    counts = _heads(_counts("--heads", heads, (8,) if machine.cpu else (128,)), "--ranks", ranks)
    return [
        Case(
            variant=name,
            calls=_layers(layers),
            sizes={
                "heads": h,
                "requests": b,
                "ranks": ranks,
                "value": VALUE if project_first else LATENT,
                "q": "replicated" if q_replicate else "gathered",
            },
        )
        for h, b, name in itertools.product(
            counts,
            _counts("--requests", requests, (1, 4) if machine.cpu else (1, 8, 32, 128)),
            _names("--variant", variant, EXCHANGE_VARIANTS),
        )
    ]


def merge_cases(
    machine: Machine,
    *,
    heads: str | None,
    requests: str | None,
    dcp: str | None,
    variant: str | None,
    layers: int | None,
) -> list[Case]:
    """Every kernel at every size; one request's queries are in the order of heads already. Raises as above."""
    cpu = machine.cpu
    cases = []
    for n in _counts("--dcp", dcp, (2,) if cpu else (4,)):
        counts = _heads(_counts("--heads", heads, (8,) if cpu else (128,)), "--dcp", n)
        batches = _counts("--requests", requests, (1, 3) if cpu else (1, 8, 32, 128, 512))
        names = _names("--variant", variant, MERGE_VARIANTS)
        cases += [
            Case(variant=name, calls=_layers(layers), sizes={"heads": h, "requests": b, "dcp": n})
            for h, name, b in itertools.product(counts, names, batches)
            if (name, b) != ("head-order", 1)
        ]
    return cases


def moe_cases(
    machine: Machine,
    *,
    model: str | None,
    tp: str | None,
    requests: str | None,
    rows: str,
    variant: str | None,
    layers: int | None,
) -> list[Case]:
    """Both products of a model's experts, each expert cut by width over tp, at every size.

    DeepGEMM takes part where it is installed. Raises UsageError as above, and for a width that tp does not divide.
    """
    cpu = machine.cpu
    shape = load_shape(model or ("tiny" if cpu else "deepseek-v3"))
    usable = MOE_VARIANTS if importlib.util.find_spec("deep_gemm") and not cpu else MOE_VARIANTS[:-1]
    names = _names("--variant", variant, MOE_VARIANTS) if variant else usable
    cases = []
    for n, b, kind, product, name in itertools.product(
        _counts("--tp", tp, (1, 2) if cpu else (1, 4, 8)),
        _counts("--requests", requests, (1, 4) if cpu else (8, 32, 128)),
        _names("--rows", rows, MOE_ROWS),
        MOE_PRODUCTS,
        names,
    ):
        if shape.moe_inter % n:
            raise UsageError(f"--tp {n} does not divide {shape.name}'s experts, {shape.moe_inter} wide; try --tp 1.")
        sizes: dict[str, int | float | str] = {"product": product, "experts": shape.experts, "top_k": shape.top_k}
        sizes |= {"hidden": shape.hidden, "width": shape.moe_inter // n, "requests": b, "rows": kind}
        cases.append(Case(variant=name, calls=_layers(layers), sizes=sizes))
    return cases


def collectives_cases(
    machine: Machine, *, requests: str | None, width: str | None, variant: str | None, layers: int | None
) -> list[Case]:
    """Every collective at every size. Raises UsageError as above, and for a width that the ranks cannot share."""
    cpu, ranks = machine.cpu, machine.ranks
    widths = _counts("--width", width, (64,) if cpu else (7168,))
    for w in widths:
        if w % ranks:
            raise UsageError(f"--width {w} cannot be divided among {ranks} ranks; try --width {w // ranks * ranks}.")
    return [
        Case(variant=name, calls=_layers(layers), sizes={"requests": b, "width": w, "ranks": ranks})
        for w, name, b in itertools.product(
            widths,
            _names("--variant", variant, COLLECTIVES),
            _counts("--requests", requests, (1, 4) if cpu else (1, 8, 32, 128, 512)),
        )
    ]


def kv_write_cases(
    machine: Machine,
    *,
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
    cpu = machine.cpu
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


def kv_gather_cases(
    machine: Machine,
    *,
    requests: str | None,
    tokens: str | None,
    variant: str | None,
    buffer: str | None,
    pool_bytes: str | None,
    layers: int | None,
) -> list[Case]:
    """Both ways with every buffer at every size; `outgrown` is a pool that is too small for a case.

    Raises UsageError as above, and for fewer tokens than requests.
    """
    cpu, ranks = machine.cpu, machine.ranks
    default = CPU_POOL_BYTES if cpu else POOL_BYTES
    pool = default if pool_bytes is None else parse_bytes("pool_bytes", pool_bytes)
    cases = []
    for r, t, kind, name in itertools.product(
        _counts("--requests", requests, (3,) if cpu else (1, 16)),
        _counts("--tokens", tokens, (64,) if cpu else (8192, 131072, 4194304)),
        _names("--buffer", buffer, BUFFERS),
        _names("--variant", variant, KV_GATHER_VARIANTS),
    ):
        if t < r:
            raise UsageError(f"--tokens {t} are fewer than --requests {r}; try --tokens {64 * r}.")
        part_bytes = Prefix.uneven(t, r, ranks).part_rows * ROW_BYTES
        fits = part_bytes * (ranks if name == "nccl" else 1) <= pool
        sizes: dict[str, int | float | str] = {"requests": r, "tokens": t, "ranks": ranks}
        sizes["buffer"] = "outgrown" if kind == "pool" and not fits else kind
        sizes["pool_bytes"] = pool
        cases.append(Case(variant=name, calls=_layers(layers), sizes=sizes))
    return cases


def dp_slice_cases(
    machine: Machine, *, tokens: str | None, dp: str | None, variant: str | None, steps: int | None
) -> list[Case]:
    """Every variant for every number of ranks and of tokens of the busiest one. Raises UsageError as above."""
    cpu = machine.cpu
    variants = _names("--variant", variant, DP_SLICE_VARIANTS)
    sizes = _counts("--tokens", tokens, (16, 64) if cpu else (16, 256, 4096))
    ranks = _counts("--dp", dp, (4,) if cpu else (8,))
    calls = _count("--steps", steps, 2 if cpu else 16)
    return [
        Case(variant=name, calls=calls, sizes={"tokens": size, "dp": n})
        for n, size, name in itertools.product(ranks, sizes, variants)
    ]


def padded_slots_cases(
    machine: Machine, *, requests: str | None, context: str | None, ids: str | None, variant: str | None
) -> list[Case]:
    """Both variants at every size. Raises UsageError as above, and for batches without a padding row."""
    cases = []
    for b, s, kind, name in itertools.product(
        _counts("--requests", requests, (3,) if machine.cpu else (3, 33)),
        _counts("--context", context, (16,) if machine.cpu else (64, 8192)),
        _names("--ids", ids, PROMPT_IDS),
        _names("--variant", variant, PADDED_SLOTS_VARIANTS),
    ):
        rows = padded_batch(b)
        if rows == b:
            raise UsageError(f"--requests {b} fill a graph of {rows} rows, and nothing is padded; try --requests 3.")
        if s < SHORTEST_PADDED:
            raise UsageError(f"--context {s} leaves nothing to overwrite; try --context {SHORTEST_PADDED}.")
        cases.append(Case(variant=name, calls=1, sizes={"requests": b, "rows": rows, "context": s, "ids": kind}))
    return cases


def _heads(heads: Sequence[int], option: str, ranks: int) -> Sequence[int]:
    """Heads that the ranks of a DCP group can share evenly."""
    for h in heads:
        if h % ranks:
            raise UsageError(
                f"--heads {h} cannot be divided among {ranks} ranks; try --heads {-(-h // ranks) * ranks} or another "
                f"{option}."
            )
    return heads


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


def _layers(typed: int | None) -> int:
    """Calls of a pass; 0: as many as the bench finds useful."""
    return 0 if typed is None else _count("--layers", typed, 16)


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


CASES: dict[str, Callable[..., list[Case]]] = {
    "attention": attention_cases,
    "exchange": exchange_cases,
    "collectives": collectives_cases,
    "merge": merge_cases,
    "moe": moe_cases,
    "kv-gather": kv_gather_cases,
    "kv-write": kv_write_cases,
    "dp-slice": dp_slice_cases,
    "padded-slots": padded_slots_cases,
}
"""What makes the cases of each bench of its options."""
