"""The sentences of a report: the few it opens with, and the others, over all workloads, models and runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dcpbench.reports import answer, findings, origins
from dcpbench.reports.serving import findings as serving

if TYPE_CHECKING:
    from dcpbench.reports.frames import Frames

MOST = 8
"""Sentences that a report opens with; what counts less stands further below."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """A sentence, and how much it counts: 0 most."""

    text: str
    weight: float


def sentences(frames: Frames) -> list[str]:
    """What a report opens with, in reading order: SLO, best layouts, break-even, room, and how far to trust it."""
    return split(frames)[0]


def apart(frames: Frames) -> list[float]:
    """By how much repeats differ, of each point that was measured more than once."""
    tables = (frames.findings.repeats, serving.repeats(frames.served))
    return [float(value) for table in tables if len(table) for value in table["apart"]]


def split(frames: Frames) -> tuple[list[str], list[str]]:
    """What a report opens with, see `sentences`, and what else its answer says."""
    notes = [t for t in _notes(frames) if t.text]
    kept = sorted(range(len(notes)), key=lambda i: (notes[i].weight, i))[:MOST]
    return [t.text for i, t in enumerate(notes) if i in kept], [t.text for i, t in enumerate(notes) if i not in kept]


def _notes(frames: Frames) -> list[Note]:
    if frames.everything.empty:
        return [Note(text=f"No point finished: {answer.outcomes(frames)}. There is nothing to compare.", weight=0)]
    notes = []
    if frames.cpu:
        notes.append(
            Note(
                text="CPU: functional run. It shows which layouts run. No conclusion about performance can be drawn from "
                "its times.",
                weight=0,
            )
        )
    notes.append(Note(text=origins.sentence(frames), weight=0.15))
    if len(frames.findings.points):
        notes.append(Note(text=answer.slo_sentence(frames), weight=0.1))
        notes += _scopes(frames)
        notes.append(Note(text=answer.replay(serving.replay_against_live(findings.timed(frames.served))), weight=3.5))
    notes.append(Note(text=answer.room(findings.kv_by_layout(frames.everything)), weight=3))
    return [*notes, Note(text=answer.trust(frames, apart(frames)), weight=0.2)]


def _scopes(frames: Frames) -> list[Note]:
    """Of each run, model and mode: the best layouts, the most within the SLO, where DCP pays, and KV pressure."""
    found = frames.findings
    points = found.points
    tables = (found.best, found.most, found.break_even, found.ratios, found.against_best)
    short = serving.pressure(findings.timed(frames.served))
    notes = []
    scopes = list(dict.fromkeys(zip(points["run"], points["model"], points["mode"], strict=True)))
    for i, scope in enumerate(scopes):
        best, most, even, over, against = (answer.of(table, *scope) for table in tables)
        lost = answer.of(frames.others, *scope[:2])
        lost = lost[lost["mode"].fillna("decode") == scope[2]] if len(lost) else lost
        judged = len(best) and best["slo_excess"].notna().any()
        plain = answer.baseline_is_best(over, against)
        parts = (
            (1.0 if len(best) else 4.5, answer.best(best)),
            (2.0, answer.most(most, best) if judged else ""),
            (1.5, "" if plain else answer.pays(against)),
            (1.5 if plain else 3.2, answer.ahead(even, over, lost, pays=plain)),
            (4.0, answer.pressure(answer.of(short, *scope), answer.of(points, *scope))),
        )
        name = answer.scope_name(frames, *scope)
        notes += [Note(text=f"{name}: {text}" if text else "", weight=w + i / 10) for w, text in parts]
    return notes
