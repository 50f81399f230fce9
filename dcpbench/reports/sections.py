"""The report as plain text and tables, in reading order; Markdown and HTML only differ in how they print it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcpbench.reports import chosen, exchanges, explain, findings, opening, sync_sites, tables
from dcpbench.reports.section import Section
from dcpbench.reports.serving import sections as served

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames
    from dcpbench.reports.plots import Picture


def report(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """All sections that have something to say."""
    points = frames.points
    timed = findings.timed(frames)
    everything = frames.everything
    exchanged = exchanges.frame(timed)
    sections = [
        Section(
            slug="findings",
            title="What the records say",
            bullets=opening.sentences(frames),
            tables=[
                tables.best(findings.best_per_load(timed)), tables.ratios(findings.dcp_against_baseline(timed)),
                exchanges.table(exchanged), *served.findings(frames),
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
        *served.sections(frames, pictures),
        Section(
            slug="time", title="Where a step's time goes",
            paragraphs=explain.phases(points), pictures=[p for p in pictures if p.kind == "phases"],
            tables=[tables.steps(points), sync_sites.table(frames)],
        ),
        Section(
            slug="kv", title="KV capacity and what bounded it",
            pictures=[p for p in pictures if p.kind == "kv"], tables=[tables.kv(findings.kv_by_layout(everything))],
            bullets=explain.bounds(everything),
        ),
        Section(
            slug="failures", title="Points that did not run",
            paragraphs=[] if len(frames.others) else ["Every point ran."], tables=[tables.others(frames.others)],
        ),
        Section(
            slug="repeats", title="Whether repeats agree",
            paragraphs=[] if everything.empty else [findings.repeats_sentence(opening.apart(frames))],
            tables=[tables.repeats(findings.repeats(frames)), served.repeats(frames)],
        ),
        Section(
            slug="honesty", title="Before you believe a number",
            paragraphs=explain.honesty(everything), tables=[tables.honesty(everything)],
        ),
        Section(slug="method", title="How it was measured", bullets=explain.method(frames)),
        Section(slug="environment", title="Environment", tables=[tables.environment(frames)]),
    ]  # fmt: skip
    for section in sections:
        section.tables = [table for table in section.tables if table.rows]
    return [s for s in sections if s.paragraphs or s.bullets or s.commands or s.tables or s.pictures]
