"""Split the gains of a replayed run by cause: of each load, of the leading layout with DCP over the same one without it.

A split needs the records and the step times of both layouts, which are in the run's folder. It is stored there in
GAINS_FILE, so that reports do not replay anything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import msgspec

from dcpbench.errors import DcpbenchError, RecordsError, UsageError
from dcpbench.models import load_shape
from dcpbench.points.memory import PAGES_OF_PADDING
from dcpbench.points.settings import Settings
from dcpbench.records.folder import GAINS_FILE
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import is_functional
from dcpbench.serving import gain_split
from dcpbench.serving.draft_steps import estimate_draft_steps
from dcpbench.serving.gain_split import GainSplit, Side
from dcpbench.serving.loads import make_point_requests
from dcpbench.serving.replay import ENGINE_VOCAB, get_loop_timing, make_engine_config
from dcpbench.serving.scheduler import SchedulerConfig
from dcpbench.serving.step_times import read_step_times
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from dcpbench.records.record import Record

MAX_LOADS = 6  # loads of a run that are split: those with the largest differences
MAX_STEPS = 2_000_000  # of all replays of a run's splits, which are minutes
MAX_DEVIATION = 0.02  # share by which a replay may differ from the record that it repeats


class RunGain(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the gain of one load by cause, or why it could not be split."""

    key: str  # of the point with DCP
    split: GainSplit | None = None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Hold the records of a layout with DCP and of the same layout without it, under the same load."""

    record: Record
    baseline: Record

    @property
    def ratio(self) -> float:
        """Return the difference of both outputs, as the logarithm of their ratio."""
        return math.log(_get_output(self.record) / _get_output(self.baseline))

    @property
    def steps(self) -> int:
        """Return the number of steps of eight replays, half of which are like each layout's own."""
        own = [record.serve.steps for record in (self.record, self.baseline) if record.serve is not None]
        return 4 * sum(steps or 0 for steps in own)


def store_run_gains(folder: Path, records: Iterable[Record], watch: Callable[[str], None] = lambda _: None) -> None:
    """Split the gains of a run and write them to its folder; without a load that has both layouts it has no such file."""
    pairs = sorted(_iter_pairs(list(records)), key=lambda pair: -abs(pair.ratio))[:MAX_LOADS]
    found, steps = [], 0
    for n, pair in enumerate(pairs):
        watch(f"gain {n + 1} of {len(pairs)} by cause: {pair.record.point.layout_name}")
        steps += pair.steps
        found.append(_split_pair(folder, pair) if steps <= MAX_STEPS else _leave_out(pair))
    if not found:
        (folder / GAINS_FILE).unlink(missing_ok=True)
    else:
        write_file(folder / GAINS_FILE, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read_run_gains(folder: Path) -> list[RunGain]:
    """Return the gains of a run by cause; none if it has no file of them. Raise RecordsError for a damaged file."""
    path = folder / GAINS_FILE
    if not path.is_file():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[RunGain])
    except (OSError, *UNREADABLE) as e:
        raise RecordsError(f"{path} cannot be read: {e}; remove it, and repeat the run's command with --resume.") from e


def _iter_pairs(records: list[Record]) -> Iterator[_Pair]:
    """Yield for each load the layout with DCP that has most output per GPU, of those with a baseline that ran."""
    ran = [r for r in records if r.outcome == "ok" and r.serve is not None and not is_functional(r)]
    replayed = [r for r in ran if r.point.replayed and not r.point.repeat]
    plain = {gain_split.make_baseline_key(r.point): r for r in replayed if r.point.dcp == 1}
    leading: dict[bytes, _Pair] = {}
    for record in replayed:
        point = record.point
        baseline = plain.get(gain_split.make_baseline_key(point))
        if baseline is None or not gain_split.is_splittable(point):
            continue
        load = msgspec.json.encode((point.model, point.concurrency, point.load, record.origin or ""))
        found = leading.get(load)
        if found is None or _get_output(record) / point.gpus > _get_output(found.record) / found.record.point.gpus:
            leading[load] = _Pair(record, baseline)
    yield from leading.values()


def _get_output(record: Record) -> float:
    assert record.serve is not None
    return record.serve.output_tok_s


def _leave_out(pair: _Pair) -> RunGain:
    reason = f"its replays have about {pair.steps:,} steps, and those of all splits of a run at most {MAX_STEPS:,}."
    return RunGain(key=pair.record.point.get_key(), reason=reason)


def _split_pair(folder: Path, pair: _Pair) -> RunGain:
    point, baseline = pair.record.point, pair.baseline.point
    try:
        settings = msgspec.convert(pair.record.measured_with, Settings)
        sides = {one.point.layout_name: _make_side(folder, one) for one in (pair.record, pair.baseline)}
        vocab = load_shape(point.model).vocab if pair.record.kv is not None else ENGINE_VOCAB
        requests = make_point_requests(point, settings, vocab)
        limit_s = math.inf if settings.limit_seconds is None else settings.limit_seconds
        split = gain_split.split_gain(point, baseline, requests, sides, limit_s)
        _check_outputs(split, pair)
        return RunGain(key=point.get_key(), split=split)
    except (DcpbenchError, msgspec.ValidationError) as e:
        return RunGain(key=point.get_key(), reason=str(e))


def _make_side(folder: Path, record: Record) -> Side:
    """Return what a replayed layout contributes to a replay: its scheduler's configuration and its step times."""
    point, conditions, kv = record.point, record.conditions, record.kv
    if conditions is None or not conditions.step_times:
        raise RecordsError(f"the record of {point.layout_name} names no step times.")
    times, _ = estimate_draft_steps(read_step_times(folder / conditions.step_times), point)
    if times.engine is not None:
        config = make_engine_config(point, times.engine, conditions.policy or times.engine.policy)
    elif kv is not None:
        pages = kv.capacity_tokens // (point.page_size * point.dcp * point.dp) + PAGES_OF_PADDING
        config = SchedulerConfig.from_point(point, pages=pages, max_context=point.context)
    else:
        raise RecordsError(f"the record of {point.layout_name} has no KV cache.")
    return Side(config=config, times=times, loop=get_loop_timing(times.engine))


def _check_outputs(split: GainSplit, pair: _Pair) -> None:
    """Raise UsageError if the replays of a split do not have the output of the records that they repeat."""
    if split.metric != gain_split.OUTPUT:
        return
    for side, record in ((split.layout, pair.record), (split.baseline, pair.baseline)):
        if abs(side.value / _get_output(record) - 1) > MAX_DEVIATION:
            raise UsageError(
                f"a replay of {side.layout} has {side.value:,.4g} tok/s where its record has {_get_output(record):,.4g}: "
                "its step times or requests are not those of the record."
            )
