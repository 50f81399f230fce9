"""Build the report as plain text and tables in reading order; Markdown and HTML differ only in how they print it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.points.names import LIVE, MODES, REPLAY
from dcpbench.reports import (
    answer,
    answer_tables,
    engine_steps,
    engines,
    exchanges,
    explain,
    figures,
    findings,
    floors,
    gains,
    instance_ratios,
    load_labels,
    overview,
    record_tables,
    stalls,
    sync_sites,
    tables,
)
from dcpbench.reports.explain import build_definitions
from dcpbench.show.text import format_capitalized

if TYPE_CHECKING:
    from dcpbench.reports.dataframes import Frames
    from dcpbench.reports.plots import Picture
    from dcpbench.reports.tables import Table


FOLDED = "The answer in full"  # heading of the bullets of a section that are folded


@dataclasses.dataclass(kw_only=True)
class Section:
    """Hold one part of a report; all strings are plain text, and the renderer escapes them."""

    slug: str
    title: str
    lead: str = ""  # sentence that answers the section's question
    aside: str = ""  # conditions that change how the numbers of the section are to be read
    first: list[Picture] = dataclasses.field(default_factory=list)  # pictures above everything but the lead
    paragraphs: list[str] = dataclasses.field(default_factory=list)
    bullets: list[str] = dataclasses.field(default_factory=list)
    folded: list[str] = dataclasses.field(default_factory=list)  # further bullets, folded under FOLDED
    commands: list[str] = dataclasses.field(default_factory=list)
    tables: list[Table] = dataclasses.field(default_factory=list)
    pictures: list[Picture] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)  # paragraphs below the tables

    def is_more_than_tables(self) -> bool:
        """Return True if the section has anything besides tables."""
        texts = (self.lead, self.paragraphs, self.bullets, self.folded, self.commands, self.notes)
        return any((*texts, self.first, self.pictures))


def build_sections(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return all sections that have content."""
    folded, further = answer.split_sentences(frames)
    sections = [
        _build_answer(frames, pictures, folded),
        _build_engine_steps(frames, pictures),
        *_build_performance(frames, pictures),
        *_build_points(frames, pictures),
        *_build_served(frames),
        Section(
            slug="client",
            title="The client that sent the requests",
            tables=[record_tables.build_client_table(frames)],
        ),
        _build_comparisons(frames, further),
        *_build_trust(frames),
    ]
    for section in sections:
        section.tables = [table for table in section.tables if table.rows]
        if all(table.title == explain.WORDS for table in section.tables) and not section.is_more_than_tables():
            section.tables = []
    return [s for s in sections if s.tables or s.is_more_than_tables()]


def _select_pictures(pictures: list[Picture], *subjects: str) -> list[Picture]:
    """Return the pictures of these subjects: decode first, then served requests, live before replayed."""
    return [p for subject in subjects for p in pictures if p.subject == subject]


def _build_answer(frames: Frames, pictures: list[Picture], folded: list[str]) -> Section:
    lead, text = overview.format_answer(frames, brief=True), overview.format_answer(frames)
    grids = answer_tables.build_grids(frames)
    definitions = build_definitions(frames, "output throughput", "ratio, ×", "DCP pays", "clearly")
    return Section(
        slug="answer",
        title="The answer",
        lead=lead,
        aside=format_capitalized(
            load_labels.SEPARATOR.join(caveat for caveat in overview.list_caveats(frames) if caveat not in text)
        ),
        first=_select_pictures(pictures, "engines", "overview"),
        paragraphs=[engines.format_dcp_gains(frames)] if lead != text else [],
        bullets=overview.format_bullets(frames),
        folded=folded,
        pictures=_select_pictures(pictures, "break-even"),
        tables=[engines.build_table(frames), *grids, *([definitions] if grids else [])],
    )


def _build_engine_steps(frames: Frames, pictures: list[Picture]) -> Section:
    """Return the section that compares the decode steps of several engines by part."""
    return Section(
        slug="engine-steps",
        title=engine_steps.TITLE,
        bullets=engine_steps.describe_slower_parts(frames),
        pictures=_select_pictures(pictures, "engine-steps"),
        tables=[engine_steps.build_table(frames)],
        notes=engine_steps.describe_limits(frames),
    )


def _build_performance(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return the sections on throughput and latencies under load."""
    return [
        Section(
            slug="throughput",
            title="Output throughput against load",
            pictures=_select_pictures(pictures, "throughput"),
            tables=[build_definitions(frames, "output throughput", "per GPU", "steady", "goodput")],
        ),
        Section(
            slug="latency",
            title="TTFT and ITL, p50 and p99",
            paragraphs=figures.explain_not_drawn(frames.served, "ttft", "itl"),
            pictures=_select_pictures(pictures, "ttft", "itl"),
            tables=[
                stalls.build_table(frames),
                build_definitions(frames, "TTFT", "ITL", "TPOT", "p50, p90, p95, p99", "SLO"),
            ],
        ),
        Section(
            slug="frontier",
            title="Throughput per GPU against speed per user",
            paragraphs=figures.explain_not_drawn(frames.served, "frontier"),
            pictures=_select_pictures(pictures, "frontier"),
            tables=[build_definitions(frames, "per GPU", "per user")],
        ),
        Section(
            slug="gains",
            title=gains.TITLE,
            paragraphs=gains.describe_gains(frames),
            pictures=_select_pictures(pictures, "gains"),
            tables=[gains.build_table(frames)],
        ),
        Section(
            slug="instances",
            title="Prefill and decode on separate GPUs",
            bullets=instance_ratios.describe_best_ratios(findings.select_timed(frames.served)),
            tables=[
                *instance_ratios.build_grids(frames),
                *(instance_ratios.build_table(frames, mode) for mode in MODES),
            ],
        ),
    ]


def _build_points(frames: Frames, pictures: list[Picture]) -> list[Section]:
    """Return the sections on KV limits, time of steps, points that did not run, and all points of decode."""
    points, everything = frames.points, frames.everything
    return [
        Section(
            slug="kv",
            title="KV capacity and its limit",
            pictures=_select_pictures(pictures, "kv"),
            tables=[tables.build_kv_table(frames.kv), build_definitions(frames, "KV tokens per GiB")],
            bullets=explain.explain_bounds(everything),
        ),
        Section(
            slug="time",
            title="Where a step's time goes",
            paragraphs=[*floors.format_decode_sentences(points), *explain.describe_phases(points)],
            pictures=[*_select_pictures(pictures, "phases"), *_select_pictures(pictures, "routings")],
            tables=[
                tables.build_steps_table(points),
                floors.build_table(points),
                build_definitions(frames, "step time", "floor", "phases, GPU idle", "host syncs"),
            ],
        ),
        Section(
            slug="syncs",
            title="Where the host waited",
            tables=[sync_sites.build_table(frames)],
            paragraphs=sync_sites.describe_sites(frames),
        ),
        Section(
            slug="failures",
            title="Points that did not run",
            paragraphs=[] if len(frames.others) or everything.empty else ["Every point ran."],
            tables=[tables.build_others_table(frames.others, engines=bool(frames.engines))],
        ),
        Section(
            slug="points",
            title="Every point",
            tables=[tables.build_points_table(points), record_tables.build_choice_table(frames)],
            paragraphs=explain.explain_absent(points),
            bullets=explain.explain_warnings(points),
        ),
    ]


def _build_served(frames: Frames) -> list[Section]:
    """Return the sections on all live points, all replayed points, and the deviation between the two."""
    served = frames.served
    if served.empty:
        return []
    parts = [
        Section(
            slug=f"serving-{mode}",
            title=title,
            paragraphs=explain.describe_served(points) + floors.format_served_sentences(points),
            bullets=explain.explain_warnings(points),
            tables=[
                tables.build_served_table(served, mode),
                record_tables.build_turns_table(frames, mode),
                tables.build_served_details(served, mode),
            ],
        )
        for mode, title in ((LIVE, "Serving, live"), (REPLAY, "Serving, replayed in virtual time"))
        if len(points := served[served["mode"] == mode])
    ]
    compared = tables.build_replay_table(findings.compare_replay_with_live(served))
    return [*parts, Section(slug="serving-replay-error", title="Replay against live", tables=[compared])]


def _build_comparisons(frames: Frames, further: list[str]) -> Section:
    found = frames.findings
    exchanged = exchanges.compare_exchanges(findings.select_timed(frames.points))
    compared = [
        table
        for mode in ("decode", *MODES)
        for table in (
            answer_tables.build_best_table(found.best, mode),
            answer_tables.build_ratios_table(found.ratios, mode),
        )
    ]
    return Section(
        slug="comparisons",
        title="Every comparison",
        bullets=further + exchanges.describe_ratios(exchanged, frames),
        tables=[*compared, exchanges.build_table(exchanged)],
    )


def _build_trust(frames: Frames) -> list[Section]:
    """Return the sections on agreement of repeats, and on what was run, how, and on which hardware."""
    everything, repeats = frames.everything, frames.findings.repeats
    return [
        Section(
            slug="repeats",
            title="Agreement of repeats",
            paragraphs=[]
            if everything.empty
            else [findings.format_repeats_sentence(answer.collect_repeat_differences(frames))],
            tables=[
                tables.build_repeats_table(repeats),
                tables.build_repeats_table(findings.select_served_repeats(frames.served), served=True),
            ],
        ),
        Section(
            slug="conditions",
            title="Before you use a number",
            paragraphs=explain.describe_conditions(everything),
            tables=[tables.build_conditions_table(everything)],
        ),
        Section(
            slug="run",
            title="Commands and layouts",
            commands=list(dict.fromkeys(e.command for r in frames.records if (e := r.environment) and e.command)),
            tables=[tables.build_runs_table(frames)],
            paragraphs=explain.list_file_notes(frames),
        ),
        Section(
            slug="method",
            title="How it was measured",
            bullets=explain.describe_method(frames),
            tables=[build_definitions(frames)],
        ),
        Section(slug="environment", title="Environment", tables=[tables.build_environment_table(frames)]),
    ]
