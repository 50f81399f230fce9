"""Report where the gain of DCP comes from: the gain of each load by cause, as replays with causes switched off split it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from dcpbench.reports import load_labels
from dcpbench.reports.tables import Column, Table, make_table, make_text_columns
from dcpbench.serving.gain_split import CAUSES, HEADINGS, GainPart, format_share
from dcpbench.serving.run_gains import read_run_gains
from dcpbench.show.numbers import format_number, format_percent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dcpbench.records.record import Record
    from dcpbench.reports.dataframes import Frames
    from dcpbench.serving.run_gains import RunGain

TITLE = "Where DCP's gain comes from"
READING = (
    "For each load the table has the layout with DCP that has the most output per GPU. The part of a cause is what replays lose if this cause "
    "alone is switched off, that is, set to the value of the same layout without DCP. An interaction has the sign of the gain if either of its causes "
    "alone brings it, and the opposite sign if both are needed. All parts sum to the gain."
)
INTERACTION = "interaction"  # heading of the column of all parts of several causes together


def build_rows(frames: Frames) -> pd.DataFrame:
    """Return a row for each split load, with its GainSplit in the column `split`."""
    rows = [
        {
            "run": run,
            "model": frames.format_model(record.point.model),
            "mode": record.point.load.mode,
            "load": load_labels.format_served_load(record.point),
            "load_arrival": record.point.load.arrival,
            "concurrency": record.point.concurrency,
            "split": gain.split,
        }
        for run, record, gain in _iter_gains(frames)
        if gain.split is not None and record.point.load is not None
    ]
    found = pd.DataFrame(rows)
    return found if found.empty else found.sort_values(["run", "model", "concurrency"], kind="stable")


def build_table(frames: Frames) -> Table:
    """Build a table of the gain of each load and its parts, as shares of the baseline's value."""
    columns: list[Column] = [
        *make_text_columns("model", "load"),
        ("layout", lambda r: r["split"].layout.layout),
        ("against", lambda r: r["split"].baseline.layout),
        ("of", lambda r: HEADINGS[r["split"].metric]),
        ("without", lambda r: format_number(r["split"].baseline.value, 3)),
        ("with", lambda r: format_number(r["split"].layout.value, 3)),
        ("gain", lambda r: format_share(r["split"].share)),
        *((cause, _make_cause_formatter(cause)) for cause in CAUSES),
        (INTERACTION, _format_interactions),
        ("preemptions", lambda r: f"{r['split'].baseline.preemptions:,} → {r['split'].layout.preemptions:,}"),
        ("prompt tokens cached", _format_hits),
    ]
    return make_table(f"{TITLE}, replayed", build_rows(frames), columns, text_columns=5)


def describe_gains(frames: Frames) -> list[str]:
    """Return how the parts are to be read, and the reason for each gain that could not be split."""
    gains = list(_iter_gains(frames))
    sentences = [
        f"{record.point.layout_name} at {load_labels.format_served_load(record.point)} was not split: {gain.reason}"
        for _, record, gain in gains
        if gain.split is None
    ]
    if len(sentences) == len(gains):
        return sentences
    return [READING, *sentences]


def _iter_gains(frames: Frames) -> Iterator[tuple[str, Record, RunGain]]:
    """Yield (run, record of the point with DCP, gain) of each split load."""
    for run in frames.runs:
        records = {record.point.get_key(): record for record in run.records}
        for gain in read_run_gains(run.folder):
            if gain.key in records:
                yield run.name, records[gain.key], gain


def _make_cause_formatter(cause: str) -> Any:  # noqa: ANN401 - the formatter of a column
    def format_cause(row: Any) -> str:  # noqa: ANN401 - a row
        split = row["split"]
        return format_share(next(split.compute_share(part) for part in split.parts if part.causes == (cause,)))

    return format_cause


def _format_interactions(row: Any) -> str:  # noqa: ANN401 - a row
    """Return `−3 % (KV capacity and step time)` for each interaction."""
    split = row["split"]
    interactions: list[GainPart] = [part for part in split.list_shown() if len(part.causes) > 1]
    texts = [f"{format_share(split.compute_share(part))} ({part.format_interaction()})" for part in interactions]
    return "; ".join(texts) or format_share(0.0)


def _format_hits(row: Any) -> str:  # noqa: ANN401 - a row
    split = row["split"]
    return f"{format_percent(split.baseline.hit_share)} → {format_percent(split.layout.hit_share)}"
