"""Suggest options if no layout can be recommended: options that were tried and that lead to an answer. No torch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.models import load_shape
from dcpbench.points.cluster_specs import LINKS, load_machine
from dcpbench.points.names import FP8
from dcpbench.serving.load_words import FIXED, parse_lengths
from dcpbench.serving.loads import compute_extent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dcpbench.recommend.advise import Query

    Answers = Callable[[Query], bool]  # function that returns True if a query has an answer for one of its loads

MAX_HOSTS = 8  # maximum number of hosts of a suggested layout
SMALLER_CHUNK = 8192  # number of prompt tokens of a step that is suggested if the query has more


def suggest_options(query: Query, answers: Answers) -> list[str]:
    """Return options with each of which there is an answer, with the nearest numbers that do; pairs if no single option does."""
    more = (words for words, other in _iter_more_gpus(query) if answers(other))
    alone = (words for words, other in _iter_switches(query) if answers(other))
    both = (
        f"{one} with {two}"
        for one, other in itertools.chain(_iter_switches(query), _iter_more_gpus(query))
        for two, last in _iter_switches(other)
        if answers(last)
    )
    return [*itertools.islice(more, 1), *alone, *_suggest_lighter_loads(query, answers)] or [*itertools.islice(both, 1)]


def _iter_more_gpus(query: Query) -> Iterator[tuple[str, Query]]:
    """Yield queries with more GPUs, in powers of two, over several hosts if one has no more."""
    host = query.machine.gpus_per_host
    linked = f"{query.machine.gpu}+{LINKS[0].name}"
    gpus = 1 << max(query.gpus).bit_length()
    while gpus <= MAX_HOSTS * host:
        if gpus <= host or query.machine.link is not None:
            yield f"--gpus {gpus}", dataclasses.replace(query, gpus=(gpus,))
        else:
            machine = load_machine(linked)
            yield (
                f"--machine {linked} --gpus {gpus}",
                dataclasses.replace(query, gpus=(gpus,), machine=machine, named=linked),
            )
        gpus *= 2


def _iter_switches(query: Query) -> Iterator[tuple[str, Query]]:
    """Yield queries with one option that is not set yet, or without one that is."""
    smaller = tuple(
        (n, most, load and msgspec.structs.replace(load, chunk=min(load.chunk, SMALLER_CHUNK)))
        for n, most, load in query.loads
    )
    for words, other in (
        *((f"--weights-dtype {name}", dataclasses.replace(query, weights_dtype=name)) for name in (FP8, "bf16")),
        ("--kv-dtype fp8", dataclasses.replace(query, kv_dtype=FP8)),
        ("no --kv-memory", dataclasses.replace(query, kv_memory=None)),
        (f"--prefill chunk={SMALLER_CHUNK}", dataclasses.replace(query, loads=smaller)),
        ("--cycled to compare layouts that hold only part of the layers", dataclasses.replace(query, cycled=True)),
    ):
        if other != query:
            yield words, other


def _suggest_lighter_loads(query: Query, answers: Answers) -> list[str]:
    """Return the largest value of each number of a load with which there is an answer."""
    found = []
    for option, requested, with_ in _iter_numbers(query):
        most = _find_largest(requested - 1, lambda n, with_=with_: answers(with_(n)))  # type: ignore[misc]
        if most:
            found.append(f"--{option} up to {most}")
    return found


def _iter_numbers(query: Query) -> Iterator[tuple[str, int, Callable[[int], Query]]]:
    """Yield (option, its current value, query with another value) for the lightest load."""
    requests, tokens, load = min(query.loads, key=lambda load: load[:2])

    def make_query(*loads: object) -> Query:
        return dataclasses.replace(query, loads=(loads,))  # type: ignore[arg-type]

    if load is None:
        yield "concurrency", requests, lambda n: make_query(n, tokens, None)
        yield "context", tokens, lambda n: make_query(requests, n, None)
        return
    positions, lengths = load_shape(query.model).max_position, parse_lengths("--input-tokens", load.input_tokens)

    def make_shorter(n: int) -> Query:
        other = msgspec.structs.replace(load, input_tokens=str(n))
        return make_query(requests, compute_extent(other).find_longest_served(positions), other)

    if lengths.kind == FIXED:
        yield "input-tokens", lengths.low, make_shorter


def _find_largest(limit: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number of 1 to `most` for which `holds` is true, assuming that it is true up to that number; else 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
