"""The report as plain text and tables, in reading order; Markdown and HTML only differ in how they print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.points.names import MODES
from dcpbench.reports import (
    answer_tables,
    chosen,
    definitions,
    exchanges,
    explain,
    figures,
    findings,
    opening,
    sync_sites,
    tables,
)
from dcpbench.reports.section import Section
from dcpbench.reports.serving import sections as served

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.tables import Table

RATES = ("output throughput", "per GPU", "steady", "goodput")
LATENCIES = ("TTFT", "ITL", "TPOT", "p50, p90, p95, p99", "SLO")
COMPARED = ("output throughput", "ratio, ×", "DCP pays", "clearly")


def report(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """All sections that have something to say."""
    everything = frames.everything
    first, more = opening.split(frames)
    sections = [
        _answer(frames, pictures, first),
        Section(
            slug="throughput",
            title="Throughput against concurrency",
            pictures=_drawn(pictures, "throughput"),
            tables=[definitions.table(frames, RATES)],
        ),
        Section(
            slug="latency",
            title="TTFT and ITL, p50 and p99",
            paragraphs=figures.not_drawn(frames.served, "ttft", "itl"),
            pictures=_drawn(pictures, "ttft", "itl"),
            tables=[definitions.table(frames, LATENCIES)],
        ),
        Section(
            slug="frontier",
            title="Throughput per GPU against speed per user",
            paragraphs=figures.not_drawn(frames.served, "frontier"),
            pictures=_drawn(pictures, "frontier"),
            tables=[definitions.table(frames, ("per GPU", "per user"))],
        ),
        Section(
            slug="kv",
            title="KV capacity and what bounded it",
            pictures=_drawn(pictures, "kv"),
            tables=[
                tables.kv(findings.kv_by_layout(everything)),
                definitions.table(frames, ("KV tokens per GiB",)),
            ],
            bullets=explain.bounds(everything),
        ),
        Section(
            slug="time",
            title="Where a step's time goes",
            paragraphs=explain.phases(frames.points),
            pictures=_drawn(pictures, "phases"),
            tables=[
                tables.steps(frames.points),
                definitions.table(frames, ("step time", "phases, GPU idle", "host syncs")),
            ],
        ),
        Section(
            slug="syncs",
            title="Where the host waited",
            tables=[sync_sites.table(frames)],
            paragraphs=sync_sites.sentences(frames),
        ),
        Section(
            slug="failures",
            title="Points that did not run",
            paragraphs=[] if len(frames.others) or everything.empty else ["Every point ran."],
            tables=[tables.others(frames.others)],
        ),
        _points(frames),
        *served.sections(frames),
        _comparisons(frames, more),
        Section(
            slug="repeats",
            title="Whether repeats agree",
            paragraphs=[] if everything.empty else [findings.repeats_sentence(opening.apart(frames))],
            tables=[tables.repeats(frames.findings.repeats), served.repeats(frames)],
        ),
        Section(
            slug="honesty",
            title="Before you believe a number",
            paragraphs=explain.honesty(everything),
            tables=[tables.honesty(everything)],
        ),
        Section(
            slug="run",
            title="What was run",
            commands=explain.commands(frames),
            tables=[tables.runs(frames)],
            paragraphs=explain.file_notes(frames),
        ),
        Section(
            slug="method",
            title="How it was measured",
            bullets=explain.method(frames),
            tables=[definitions.table(frames)],
        ),
        Section(slug="environment", title="Environment", tables=[tables.environment(frames)]),
    ]
    for section in sections:
        section.tables = [table for table in section.tables if table.rows]
        if all(table.title == definitions.TITLE for table in section.tables) and not section.is_more_than_tables():
            section.tables = []
    return [s for s in sections if s.tables or s.is_more_than_tables()]


def _answer(frames: Frames, pictures: list[Picture], sentences: list[str]) -> Section:
    found = frames.findings
    grids = answer_tables.grids(found.best, found.most, found.ratios, frames)
    return Section(
        slug="answer",
        title="The answer",
        bullets=sentences,
        pictures=_drawn(pictures, "break-even"),
        tables=[*grids, definitions.table(frames, COMPARED)] if grids else [],
    )


def _points(frames: Frames) -> Section:
    points = frames.points
    return Section(
        slug="points",
        title="Every point",
        tables=[tables.points(points), chosen.table(frames)],
        paragraphs=explain.absent(points),
        bullets=explain.marks(points),
    )


def _comparisons(frames: Frames, sentences: list[str]) -> Section:
    best, ratios = frames.findings.best, frames.findings.ratios
    exchanged = exchanges.frame(findings.timed(frames.points))
    by_mode: list[Table] = [
        table
        for mode in ("decode", *MODES)
        for table in (answer_tables.best(best, mode), answer_tables.ratios(ratios, mode))
    ]
    return Section(
        slug="comparisons",
        title="Every comparison",
        bullets=sentences + exchanges.sentences(exchanged, frames),
        tables=[*by_mode, exchanges.table(exchanged)],
    )


def _drawn(pictures: list[Picture], *subjects: str) -> list[Picture]:
    """Pictures of these subjects: of decode, then of served requests, live before replayed."""
    return [p for subject in subjects for p in pictures if p.subject == subject]
