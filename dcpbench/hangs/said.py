"""Format hangs as text, as JSON and as an HTML page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.hangs import evidence, finding
from dcpbench.hangs.beats import RAISED
from dcpbench.hangs.finding import at_meetings, find, inside
from dcpbench.records.folder import HANGS_FOLDER
from dcpbench.show import web
from dcpbench.show.text import LINES, LONGEST_LINE, capital, cut, printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.hangs.evidence import Evidence, Rank
    from dcpbench.hangs.finding import Finding
    from dcpbench.hangs.meetings import Wait


@dataclasses.dataclass(frozen=True)
class Hang:
    """One job that stood still."""

    name: str
    evidence: Evidence
    finding: Finding


def explained(paths: Sequence[Path]) -> list[Hang]:
    """Return a Hang for each named hang of a run, and one for all other files together. Raise RecordsError if none can
    be read.
    """
    hangs, others = [], []
    for path in paths:
        below = (
            sorted(p for p in (path / HANGS_FOLDER).iterdir() if p.is_dir()) if (path / HANGS_FOLDER).is_dir() else []
        )
        if below:
            hangs += [_hang([folder], str(folder)) for folder in below]
        else:
            others.append(path)
    return hangs + ([_hang(others, ", ".join(map(str, others[:3])) + (" …" if others[3:] else ""))] if others else [])


def _hang(paths: Sequence[Path], name: str) -> Hang:
    found = evidence.of_files(paths)
    return Hang(name, found, find(found))


def as_json(hang: Hang) -> dict[str, object]:
    """Return the finding and the position of each rank as values for JSON."""
    met = {wait.rank: wait for wait in at_meetings(hang.evidence)}
    ranks = [
        {"rank": rank.rank, "name": rank.name, **dict(zip(COLUMNS, _row(rank, met.get(rank.rank))[1:], strict=True))}
        for rank in hang.evidence.ranks
    ]
    return {"name": hang.name, **msgspec.to_builtins(hang.finding), "at": ranks}


COLUMNS = ("phase", "layer", "collective", "number", "cpu", "line")


def _row(rank: Rank, wait: Wait | None) -> list[str]:
    beat, one = rank.beats, inside(rank)
    _, _, line = finding.spot(rank)
    cpu = rank.seen.cpu if rank.seen else None
    if one is None and beat is not None and beat.last is not None and beat.last.state == RAISED:
        one = beat.last
    call = one.call.said if one and one.call else ""
    if one and one.state == RAISED:
        call += ", left with an error"
    if not call and rank.seen and rank.seen.ended:
        call = rank.seen.ended
    number = str(one.number) if one else ""
    if wait is not None:
        call, number = wait.meeting.what, str(wait.number)
    return [
        rank.name,
        beat.phase if beat else "",
        "" if beat is None or beat.layer is None else str(beat.layer),
        call,
        number,
        "" if cpu is None else f"{cpu:.0%}",
        line,
    ]


def as_text(hang: Hang) -> str:
    """Return the report as text: the sentence, the reasons, a table of the ranks, and the files that were read."""
    found = hang.finding
    rows = _rows(hang.evidence)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [
        f"{hang.name}: {found.kind}",
        f"{capital(found.said)}.",
        *found.why,
        "",
        *table,
        "",
        f"Read: {', '.join(found.read)}." if found.read else "",
        *(f"Not read: {text}" for text in found.unread),
        *hang.evidence.gpus.strip().splitlines(),
    ]
    return "\n".join(cut(printable(line), 4 * LONGEST_LINE) for line in lines).rstrip() + "\n"


def as_page(hangs: Sequence[Hang]) -> str:
    """Return an HTML page that loads no other file."""
    told = [
        {
            "name": printable(hang.name),
            "kind": hang.finding.kind,
            "said": printable(capital(hang.finding.said)),
            "why": [printable(why) for why in hang.finding.why],
            "columns": _rows(hang.evidence)[0],
            "rows": [[printable(cell) for cell in row] for row in _rows(hang.evidence)[1:]],
            "stacks": [(rank.name, printable(_stacks(rank), LINES)) for rank in hang.evidence.ranks if rank.threads],
            "gpus": printable(hang.evidence.gpus, LINES),
            "nccl": printable(hang.evidence.nccl, LINES),
            "read": [printable(name) for name in hang.finding.read],
            "unread": [printable(text) for text in hang.finding.unread],
        }
        for hang in hangs
    ]
    values = {
        "title": "Hangs",
        "main": "main",
        "main_called": "hangs",
        "policy": web.policy(),
        "theme": web.read(web.STYLE),
    }
    return web.fill(web.read("page.html.j2", __package__ or ""), values | {"hangs": told})


def _rows(evidence: Evidence) -> list[list[str]]:
    """Return the header and a row per rank, with the columns that have a value."""
    met = {wait.rank: wait for wait in at_meetings(evidence)}
    rows = [["rank", *COLUMNS], *(_row(rank, met.get(rank.rank)) for rank in evidence.ranks)]
    shown = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in shown] for row in rows]


def _stacks(rank: Rank) -> str:
    return "\n\n".join(
        "\n".join([thread.name or "thread", *(f"  {f.said}" for f in thread.frames)]) for thread in rank.threads
    )
