"""The report as plain text and tables, in reading order; Markdown and HTML only differ in how they print it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.reports import chosen, exchanges, explain, findings, sync_sites, tables

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.tables import Table


@dataclasses.dataclass(kw_only=True)
class Section:
    """One part of a report. All strings are plain text: whoever prints them escapes them."""

    slug: str
    title: str
    paragraphs: list[str] = dataclasses.field(default_factory=list)
    bullets: list[str] = dataclasses.field(default_factory=list)
    commands: list[str] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    pictures: list[Picture] = dataclasses.field(default_factory=list)


def report(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """All sections that have something to say."""
    points = frames.points
    timed = findings.timed(frames)
    repeats = findings.repeats(frames)
    exchanged = exchanges.frame(timed)
    sections = [
        Section(
            slug="findings",
            title="What the records say",
            bullets=[*findings.headline(frames), *exchanges.sentences(exchanged, frames)],
            tables=[
                tables.best(findings.best_per_load(timed)), tables.ratios(findings.dcp_against_baseline(timed)),
                exchanges.table(exchanged),
            ],
        ),
        Section(
            slug="run", title="What was run", commands=explain.commands(frames), tables=[tables.runs(frames)],
            paragraphs=explain.file_notes(frames),
        ),
        Section(
            slug="figures", title="Throughput and latency",
            pictures=[p for p in pictures if p.kind in ("throughput", "itl", "frontier")],
        ),
        Section(
            slug="points", title="Every point", tables=[tables.points(points), chosen.table(frames)],
            paragraphs=explain.absent(points), bullets=explain.marks(points),
        ),
        Section(
            slug="time", title="Where a step's time goes",
            paragraphs=explain.phases(points), pictures=[p for p in pictures if p.kind == "phases"],
            tables=[tables.steps(points), sync_sites.table(frames)],
        ),
        Section(
            slug="kv", title="KV capacity and what bounded it",
            pictures=[p for p in pictures if p.kind == "kv"], tables=[tables.kv(findings.kv_by_layout(points))],
            bullets=explain.bounds(points),
        ),
        Section(
            slug="failures", title="Points that did not run",
            paragraphs=[] if len(frames.others) else ["Every point ran."], tables=[tables.others(frames.others)],
        ),
        Section(
            slug="repeats", title="Whether repeats agree",
            paragraphs=[] if points.empty else [findings.repeats_sentence(repeats)], tables=[tables.repeats(repeats)],
        ),
        Section(
            slug="honesty", title="Before you believe a number",
            paragraphs=explain.honesty(points), tables=[tables.honesty(points)],
        ),
        Section(slug="method", title="How it was measured", bullets=explain.METHOD),
        Section(slug="environment", title="Environment", tables=[tables.environment(frames)]),
    ]  # fmt: skip
    for section in sections:
        section.tables = [table for table in section.tables if table.rows]
    return [s for s in sections if s.paragraphs or s.bullets or s.commands or s.tables or s.pictures]
