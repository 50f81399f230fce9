"""Build the report as plain text and tables in reading order; Markdown and HTML differ only in how they print it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.names import LIVE, MODES, REPLAY
from dcpbench.reports import (
    answer,
    answer_tables,
    chosen,
    client,
    exchanges,
    explain,
    figures,
    findings,
    floors,
    instances,
    overview,
    stalls,
    sync_sites,
    tables,
    turns,
    words,
)
from dcpbench.reports.explain import definitions
from dcpbench.show.text import capital

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.tables import Table


FOLDED = "The answer in full"
"""Heading of the bullets of a section that are folded."""


@dataclasses.dataclass(kw_only=True)
class Section:
    """Hold one part of a report; all strings are plain text, and the renderer escapes them."""

    slug: str
    title: str
    lead: str = ""
    """Sentence that answers the section's question."""
    aside: str = ""
    """Conditions that change how the numbers of the section are to be read."""
    first: list[Picture] = dataclasses.field(default_factory=list)
    """Pictures above everything but the lead."""
    paragraphs: list[str] = dataclasses.field(default_factory=list)
    bullets: list[str] = dataclasses.field(default_factory=list)
    folded: list[str] = dataclasses.field(default_factory=list)
    """Further bullets, folded under FOLDED."""
    commands: list[str] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    pictures: list[Picture] = dataclasses.field(default_factory=list)

    def is_more_than_tables(self) -> bool:
        """Return True if the section has anything besides tables."""
        return bool(
            self.lead or self.folded or self.first or self.paragraphs or self.bullets or self.commands or self.pictures
        )


def report(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return all sections that have content."""
    folded, further = answer.split(frames)
    sections = [
        _answer(frames, pictures, folded),
        *_performance(frames, pictures),
        *_points(frames, pictures),
        *_served(frames),
        Section(
            slug="client",
            title="The client that sent the requests",
            paragraphs=client.sentences(frames),
            tables=[client.table(frames)],
        ),
        _comparisons(frames, further),
        *_trust(frames),
    ]
    for section in sections:
        section.tables = [table for table in section.tables if table.rows]
        if all(table.title == explain.WORDS for table in section.tables) and not section.is_more_than_tables():
            section.tables = []
    return [s for s in sections if s.tables or s.is_more_than_tables()]


def _drawn(pictures: list[Picture], *subjects: str) -> list[Picture]:
    """Return the pictures of these subjects: decode first, then served requests, live before replayed."""
    return [p for subject in subjects for p in pictures if p.subject == subject]


def _answer(frames: Frames, pictures: list[Picture], folded: list[str]) -> Section:
    lead = overview.sentence(frames)
    grids = answer_tables.grids(frames)
    return Section(
        slug="answer",
        title="The answer",
        lead=lead,
        aside=capital(words.SEPARATOR.join(said for said in overview.caveats(frames) if said not in lead)),
        first=_drawn(pictures, "overview"),
        bullets=overview.short(frames),
        folded=folded,
        pictures=_drawn(pictures, "break-even"),
        tables=[*grids, definitions(frames, "output throughput", "ratio, ×", "DCP pays", "clearly")] if grids else [],
    )


def _performance(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return the sections on throughput and latencies under load."""
    return [
        Section(
            slug="throughput",
            title="Output throughput against load",
            pictures=_drawn(pictures, "throughput"),
            tables=[definitions(frames, "output throughput", "per GPU", "steady", "goodput")],
        ),
        Section(
            slug="latency",
            title="TTFT and ITL, p50 and p99",
            paragraphs=figures.not_drawn(frames.served, "ttft", "itl"),
            pictures=_drawn(pictures, "ttft", "itl"),
            tables=[stalls.table(frames), definitions(frames, "TTFT", "ITL", "TPOT", "p50, p90, p95, p99", "SLO")],
        ),
        Section(
            slug="frontier",
            title="Throughput per GPU against speed per user",
            paragraphs=figures.not_drawn(frames.served, "frontier"),
            pictures=_drawn(pictures, "frontier"),
            tables=[definitions(frames, "per GPU", "per user")],
        ),
        Section(
            slug="instances",
            title="Prefill and decode on separate GPUs",
            bullets=instances.sentences(findings.timed(frames.served)),
            tables=[*instances.grid(frames), *(instances.table(frames, mode) for mode in MODES)],
        ),
    ]


def _points(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return the sections on KV limits, time of steps, points that did not run, and all points of decode."""
    points, everything = frames.points, frames.everything
    return [
        Section(
            slug="kv",
            title="KV capacity and what bounded it",
            pictures=_drawn(pictures, "kv"),
            tables=[tables.kv(frames.kv), definitions(frames, "KV tokens per GiB")],
            bullets=explain.bounds(everything),
        ),
        Section(
            slug="time",
            title="Where a step's time goes",
            paragraphs=[*floors.sentences(points), *explain.phases(points)],
            pictures=_drawn(pictures, "phases"),
            tables=[
                tables.steps(points),
                floors.table(points),
                definitions(frames, "step time", "floor", "phases, GPU idle", "host syncs"),
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
        Section(
            slug="points",
            title="Every point",
            tables=[tables.points(points), chosen.table(frames)],
            paragraphs=explain.absent(points),
            bullets=explain.marks(points),
        ),
    ]


def _served(frames: Frames) -> list[Section]:
    """Return the sections on all live points, all replayed points, and the deviation between the two."""
    served = frames.served
    if served.empty:
        return []
    told = [
        Section(
            slug=f"serving-{mode}",
            title=title,
            paragraphs=explain.served(points) + floors.served(points),
            bullets=explain.marks(points),
            tables=[tables.served(served, mode), turns.table(frames, mode), tables.served_details(served, mode)],
        )
        for mode, title in ((LIVE, "Serving, live"), (REPLAY, "Serving, replayed in virtual time"))
        if len(points := served[served["mode"] == mode])
    ]
    compared = tables.replay(findings.replay_against_live(served))
    return [*told, Section(slug="serving-replay-error", title="Replay against live", tables=[compared])]


def _comparisons(frames: Frames, further: list[str]) -> Section:
    found = frames.findings
    exchanged = exchanges.frame(findings.timed(frames.points))
    compared = [
        table
        for mode in ("decode", *MODES)
        for table in (answer_tables.best(found.best, mode), answer_tables.ratios(found.ratios, mode))
    ]
    return Section(
        slug="comparisons",
        title="Every comparison",
        bullets=further + exchanges.sentences(exchanged, frames),
        tables=[*compared, exchanges.table(exchanged)],
    )


def _trust(frames: Frames) -> list[Section]:
    """Return the sections on agreement of repeats, and on what was run, how, and on which hardware."""
    everything, repeats = frames.everything, frames.findings.repeats
    return [
        Section(
            slug="repeats",
            title="Whether repeats agree",
            paragraphs=[] if everything.empty else [findings.repeats_sentence(answer.apart(frames))],
            tables=[tables.repeats(repeats), tables.served_repeats(findings.served_repeats(frames.served))],
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
            slug="method", title="How it was measured", bullets=explain.method(frames), tables=[definitions(frames)]
        ),
        Section(slug="environment", title="Environment", tables=[tables.environment(frames)]),
    ]
