"""Make the requests of a load: the same on every rank, on every machine and in every mode, because a seed determines
them.

Lengths and gaps come from numpy's PCG64, with one stream each. Token ids are a hash of (seed, stream, position), so
that the beginning of a stream does not depend on how much of it is read: this is how prompts share prefixes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dcpbench.errors import UsageError
from dcpbench.points.names import CLOSED, REPLAY, TRACE
from dcpbench.serving.load_words import LOGNORMAL, UNIFORM, parse_delays, parse_lengths
from dcpbench.serving.request_files import compute_lengths, read_requests
from dcpbench.serving.requests import LazyPrompt, ServeRequest
from dcpbench.serving.trace_formats import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dcpbench.points.point import Load, Point
    from dcpbench.points.settings import Settings
    from dcpbench.serving.request_files import Row

INPUTS, OUTPUTS, GAPS, TURNS, MESSAGES, BRANCHES, DELAYS = range(7)  # streams of numpy's generator
OWN, GROUP, HASH, ANSWER, SYSTEM = range(5)  # token streams: request, prefix group, hashed block, answer, system prompt
MAX_SECONDS = 1e8  # three years: an open loop that takes longer is a mistake in its rate
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def make_requests(load: Load, vocab: int, trace: Path | None = None) -> list[ServeRequest]:
    """Return the requests of a load by arrival, prompts of int32 ids below `vocab`; those of a replay are made when read.

    `trace` is the file that load.trace names. Raise UsageError if it cannot be read or has changed.
    """
    if load.trace:
        if trace is None:
            raise UsageError(f"the load comes from {load.trace}, which is not there; give it with --requests FILE.")
        found = read_requests(trace, Reading.of_load(load))
        if load.trace_sha256 and load.trace_sha256 != found.sha256:
            raise UsageError(f"{trace} is not the file that it was when the run began; start another run, with -o.")
        rows = found.rows[: load.requests]
        if load.sessions:
            return _make_trace_sessions(load, vocab, rows, found.reading.block_size)
        block = found.reading.block_size
        answers = [row.output_tokens for row in rows]
        times = [row.arrival_s for row in rows] if load.arrival == TRACE else draw_arrival_times(load)
        prompts = [
            _make_row_prompt(load, vocab, i, row, block)
            if row.prompt is not None
            else _make_lazy_prompt(load, row.input_tokens, _make_row_prompt, load, vocab, i, row, block)
            for i, row in enumerate(rows)
        ]
    else:
        inputs, outputs = draw_lengths(load)
        if load.sessions:
            return _make_session_requests(load, vocab, inputs, outputs)
        answers, times = outputs.tolist(), draw_arrival_times(load)
        prompts = [
            _make_lazy_prompt(load, int(n), _make_prompt, load, vocab, i, int(n), i % load.prefix_groups)
            for i, n in enumerate(inputs)
        ]
    return [
        ServeRequest(number=i, prompt=prompt, output_tokens=count, arrival_s=at)
        for i, (prompt, count, at) in enumerate(zip(prompts, answers, times, strict=True))
    ]


def make_point_requests(point: Point, settings: Settings, vocab: int) -> list[ServeRequest]:
    """Return the requests of a point's load, with the file that the settings name. Raise as `make_requests` does."""
    assert point.load is not None
    if settings.trace_path:
        return make_requests(point.load, vocab, Path(settings.trace_path))
    return list(_make_requests_once(point.load, vocab))


@functools.lru_cache(maxsize=1)
def _make_requests_once(load: Load, vocab: int) -> tuple[ServeRequest, ...]:
    """Return the requests of a load that no file describes. Forecasts of several layouts share them, and so their prompts."""
    return tuple(make_requests(load, vocab, None))


@dataclasses.dataclass(frozen=True)
class Extent:
    """Sizes of the requests of a load, in tokens of prompt and output together."""

    shortest: int
    longest: int
    output: int  # output tokens of all requests
    longest_output: int
    ends_s: float  # arrival time of the last request in s; 0 in a closed loop

    def find_longest_served(self, positions: int) -> int:
        """Return the tokens of the longest request that fits a model with this number of positions; if none fits, of
        the longest.
        """
        return self.longest if self.shortest > positions else min(self.longest, positions)


@functools.cache
def compute_extent(load: Load, trace: str = "") -> Extent:
    """Return the extent of a load without making its prompts; `trace` is the path of the file that it names."""
    if load.trace:
        rows = read_requests(Path(trace), Reading.of_load(load)).rows[: load.requests]
        inputs, outputs = compute_lengths(rows)
        times = [row.arrival_s for row in rows if not row.turn] if load.arrival == TRACE else draw_arrival_times(load)
    else:
        inputs, outputs = draw_lengths(load)
        times = draw_arrival_times(load)
    tokens = inputs + outputs
    return Extent(int(tokens.min()), int(tokens.max()), int(outputs.sum()), int(outputs.max()), times[-1] or 0.0)


def draw_lengths(load: Load) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of each prompt and of each answer, int64, in the order in which they are sent.

    Turns of a session follow one another, and their prompts include all earlier turns.
    """
    inputs = _draw_numbers(load, "--input-tokens", load.input_tokens, INPUTS)
    outputs = _draw_numbers(load, "--output-tokens", load.output_tokens, OUTPUTS)
    if not load.sessions:
        return inputs, outputs
    turns = compute_turn_numbers(load)
    if load.turn_tokens:
        inputs = np.where(turns == 0, inputs, _draw_numbers(load, "--sessions tokens", load.turn_tokens, MESSAGES))
    inputs = np.where(turns == 0, inputs + load.system_tokens, inputs)
    if load.branch or load.subagents:
        for number, parent in enumerate(draw_parents(load).tolist()):
            inputs[number] += inputs[parent] + outputs[parent] if parent >= 0 else 0
        return inputs, outputs
    before = np.cumsum(inputs + outputs) - inputs - outputs
    first = np.flatnonzero(turns == 0)[np.cumsum(turns == 0) - 1]
    return inputs + before - before[first], outputs


def compute_turn_numbers(load: Load) -> np.ndarray:
    """Return the turn number of each request within its session, int64; the last session may be cut off.

    The sub-agents of a turn have one number, between those of their turn and of the next.
    """
    places, group = _compute_places(load), load.subagents + 1
    return 2 * (places // group) + (places % group > 0) if load.subagents else places


def _compute_places(load: Load) -> np.ndarray:
    """Return the place of each request in its session, int64: each turn but the last is followed by its sub-agents."""
    if not load.sessions:
        return np.zeros(load.requests, dtype=np.int64)
    turns = _draw_numbers(load, "--sessions turns", load.turns, TURNS)
    lengths = turns + (turns - 1) * load.subagents
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), load.requests)) + 1]
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    places: np.ndarray = (np.arange(len(starts)) - starts)[: load.requests]
    return places


def draw_parents(load: Load) -> np.ndarray:
    """Return the number of the request that each turn continues, int64; -1 for first turns.

    It is the turn before or, with the probability of `branch`, one of the earlier turns, each equally likely: the prefixes of a
    session's prompts are then a tree, as where an agent retries, or leaves a sub-task behind. Sub-agents, and the turn after them,
    continue the turn before them.
    """
    if load.subagents:
        places, group = _compute_places(load), load.subagents + 1
        before = np.where(places % group == 0, places - group, places // group * group)
        continued: np.ndarray = np.where(places == 0, -1, np.arange(len(places)) - places + before)
        return continued
    turns = compute_turn_numbers(load)
    before = turns - 1
    if load.branch:
        chance, choice = _make_generator(_get_seed(load), BRANCHES).random((2, load.requests))
        earlier = np.floor(choice * np.maximum(before, 0)).astype(np.int64)
        before = np.where((turns > 1) & (chance < load.branch), earlier, before)
    parents: np.ndarray = np.where(turns == 0, -1, np.arange(len(turns)) - turns + before)
    return parents


def draw_delays(load: Load) -> np.ndarray:
    """Return the time in s from the answer before to each turn, which first turns ignore; sub-agents begin at once."""
    if load.subagents:
        own = draw_delays(msgspec.structs.replace(load, subagents=0))
        return np.where(_compute_places(load) % (load.subagents + 1) == 0, own, 0.0)
    delays, count = parse_delays("--sessions think", load.think_time), load.requests
    generator = _make_generator(_get_seed(load), DELAYS)
    if delays.kind == UNIFORM:
        return generator.uniform(delays.low, delays.high, size=count)
    if delays.kind == LOGNORMAL:
        drawn: np.ndarray = delays.low * np.exp(delays.sigma * generator.standard_normal(count))
        return drawn
    return np.full(count, delays.low)


def count_sessions(load: Load) -> int:
    """Return the number of sessions of a load, or of its requests if it has no sessions."""
    if load.trace:
        return (load.trace_facts.sessions if load.trace_facts else 0) or load.requests
    return int((compute_turn_numbers(load) == 0).sum()) if load.sessions else load.requests


def draw_arrival_times(load: Load) -> list[float | None]:
    """Return the arrival times of requests, or sessions, in s after the start, the first at 0; None each in a closed
    loop.

    Gaps are gamma distributed with shape `burstiness` and mean 1 / `request_rate`, as in vLLM's bench: 1 makes them
    exponential (a Poisson process); their coefficient of variation is burstiness^-½. For a paced load they are scaled
    to have that mean, as in vLLM. Raise UsageError if the last request would arrive after MAX_SECONDS.
    """
    if load.arrival == CLOSED:
        return [None] * load.requests
    assert load.request_rate is not None
    shape, count = load.burstiness, count_sessions(load)
    gaps = _make_generator(_get_seed(load), GAPS).standard_gamma(shape, size=count - 1)
    mean_s = 1 / load.request_rate
    with np.errstate(over="ignore"):
        drawn = float(gaps.sum())
    gaps = gaps / drawn * (mean_s * (count - 1)) if load.paced and 0 < drawn < math.inf else gaps * (mean_s / shape)
    times = [0.0, *np.cumsum(gaps).tolist()]
    if not times[-1] <= MAX_SECONDS:
        raise UsageError(
            f"--request-rate {load.request_rate:g}: the last of {count:,} {'sessions' if load.sessions else 'requests'} would come after years; "
            "write requests per second, such as --request-rate 0.5."
        )
    return times


def make_token_ids(seed: int, kind: int, stream: int, count: int, vocab: int) -> np.ndarray:
    """Return the first `count` ids of a stream, int32 below `vocab`: SplitMix64 (Steele, Lea and Flood 2014) of a
    counter.
    """
    return make_block_ids(seed, kind, [stream], count, vocab)


def _finish_splitmix64(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser to counters that have been incremented, uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def make_block_ids(seed: int, kind: int, streams: Sequence[int], count: int, vocab: int) -> np.ndarray:
    """Return the first `count` ids of each of several streams, one after the other, as make_token_ids makes them."""
    if not streams:
        return np.empty(0, dtype=np.int32)
    start = _apply_splitmix64(_apply_splitmix64(seed) + kind)
    x = np.array([(start + stream) & _MASK for stream in streams], dtype=np.uint64) + np.uint64(_GOLDEN)
    starts = _finish_splitmix64(x)
    offsets = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    mixed = _finish_splitmix64(starts[:, None] + offsets[None, :])
    ids: np.ndarray = (mixed % np.uint64(vocab)).astype(np.int32).reshape(-1)
    return ids


def _get_seed(load: Load) -> int:
    """Return the seed of a load that is served here; imports have none."""
    assert load.seed is not None
    return load.seed


def _draw_numbers(load: Load, option: str, text: str, stream: int) -> np.ndarray:
    lengths, count = parse_lengths(option, text), load.requests
    generator = _make_generator(_get_seed(load), stream)
    if lengths.kind == UNIFORM:
        return generator.integers(lengths.low, lengths.high, size=count, endpoint=True, dtype=np.int64)
    if lengths.kind == LOGNORMAL:
        drawn: np.ndarray = lengths.low * np.exp(lengths.sigma * generator.standard_normal(count))
        return drawn.round().clip(min=1).astype(np.int64)
    return np.full(count, lengths.low, dtype=np.int64)


def _make_lazy_prompt(load: Load, tokens: int, make: Callable[..., np.ndarray], *given: Any) -> np.ndarray | LazyPrompt:  # noqa: ANN401
    """Return a prompt that a replay makes when it reads it, as it may have millions; a live run would lose time by that."""
    return LazyPrompt(tokens, functools.partial(make, *given)) if load.mode == REPLAY else make(*given)


def _make_prompt(load: Load, vocab: int, number: int, length: int, group: int) -> np.ndarray:
    """Return a prompt: the group's tokens first, then its own."""
    shared = round((load.prefix_share or 0) * length)
    own = _make_own_tokens(load, vocab, number, length - shared)
    return np.concatenate([make_token_ids(_get_seed(load), GROUP, group, shared, vocab), own]) if shared else own


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A turn of a session: what it adds to the conversation, and when it is sent."""

    message: np.ndarray  # int32 ids
    output_tokens: int
    session: int
    turn: int
    parent: int | None  # number of the request that it continues
    arrival_s: float | None
    delay_s: float


def _make_session_requests(load: Load, vocab: int, inputs: np.ndarray, outputs: np.ndarray) -> list[ServeRequest]:
    """Return the requests of generated sessions, one session after the other."""
    turns, times, parents = compute_turn_numbers(load), draw_arrival_times(load), draw_parents(load)
    delays, system = draw_delays(load), make_token_ids(_get_seed(load), SYSTEM, 0, load.system_tokens, vocab)
    found: list[_Turn] = []
    session = -1
    for number, (turn, parent) in enumerate(zip(turns.tolist(), parents.tolist(), strict=True)):
        if turn == 0:
            session += 1
            own = int(inputs[number]) - load.system_tokens
            message = np.concatenate([system, _make_prompt(load, vocab, number, own, session % load.prefix_groups)])
        else:
            message = _make_own_tokens(load, vocab, number, int(inputs[number] - inputs[parent] - outputs[parent]))
        found.append(
            _Turn(
                message,
                int(outputs[number]),
                session,
                turn,
                parent if turn else None,
                None if turn else times[session],
                float(delays[number]) if turn else 0.0,
            )
        )
    return _link_turns(load, vocab, found)


def _make_trace_sessions(load: Load, vocab: int, rows: Sequence[Row], block_size: int) -> list[ServeRequest]:
    """Return the requests of a file's sessions, one session after the other."""
    timed = load.arrival == TRACE
    times = [] if timed else draw_arrival_times(load)
    found: list[_Turn] = []
    session = -1
    for number, row in enumerate(rows):
        session += row.turn == 0
        first = None if row.turn or timed else times[session]
        found.append(
            _Turn(
                _make_row_prompt(load, vocab, number, row, block_size),
                row.output_tokens,
                session,
                row.turn,
                number - 1 if row.turn else None,
                row.arrival_s if timed else first,
                row.delay_s if row.turn else 0.0,
            )
        )
    return _link_turns(load, vocab, found)


def _link_turns(load: Load, vocab: int, turns: Sequence[_Turn]) -> list[ServeRequest]:
    """Return the requests of turns: each prompt is the prompt and the answer of its parent, then its message.

    Prompts of turns that continue one another are prefixes of the same array.
    """
    continued = {turn.parent for turn in turns}
    found: list[ServeRequest] = []
    for run in _split_runs(turns):
        first = turns[run[0]]
        before: list[np.ndarray] = []
        if first.parent is not None:
            parent = found[first.parent]
            assert parent.answer is not None
            before = [parent.prompt, parent.answer]
        parts = list(before)
        for number in run:
            answer = make_token_ids(_get_seed(load), ANSWER, number, turns[number].output_tokens, vocab)
            parts += [turns[number].message, answer]
        whole, end = np.concatenate(parts), sum(map(len, before))
        for number in run:
            turn = turns[number]
            end += len(turn.message)
            found.append(
                ServeRequest(
                    number=number,
                    prompt=whole[:end],
                    output_tokens=turn.output_tokens,
                    arrival_s=turn.arrival_s,
                    session=turn.session,
                    turn=turn.turn,
                    parent=turn.parent,
                    delay_s=turn.delay_s,
                    answer=whole[end : end + turn.output_tokens] if number in continued else None,
                )
            )
            end += turn.output_tokens
    return found


def _split_runs(turns: Sequence[_Turn]) -> list[list[int]]:
    """Return the numbers of turns in runs, in which each turn continues the one before."""
    runs: list[list[int]] = []
    for number, turn in enumerate(turns):
        if turn.parent is not None and turn.parent == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _make_own_tokens(load: Load, vocab: int, number: int, length: int) -> np.ndarray:
    return make_token_ids(_get_seed(load), OWN, number, length, vocab)


def _make_row_prompt(load: Load, vocab: int, number: int, row: Row, block_size: int) -> np.ndarray:
    """Return the prompt of a row: its ids, blocks that follow from its hash ids, or a prompt that shares a prefix with its group."""
    if row.prompt is not None:
        if int(row.prompt.max()) >= vocab:
            raise UsageError(f"token id {row.prompt.max()} in {load.trace}, and the model has {vocab:,} of them.")
        return row.prompt
    if row.hash_ids is not None:
        blocks = make_block_ids(_get_seed(load), HASH, row.hash_ids, block_size, vocab)
        rest = row.input_tokens - len(blocks)  # positive where the last block is too short to have a hash
        tail = [make_token_ids(_get_seed(load), OWN, number, rest, vocab)] if rest > 0 else []
        whole: np.ndarray = np.concatenate([blocks, *tail])
        return whole[: row.input_tokens]
    group = number % load.prefix_groups if row.prefix_group is None else row.prefix_group
    return _make_prompt(load, vocab, number, row.input_tokens, group)


def _make_generator(seed: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, stream])))


def _apply_splitmix64(x: int) -> int:
    """Apply SplitMix64's finaliser to a number, so that neighbouring seeds and streams are uncorrelated."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
