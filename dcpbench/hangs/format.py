"""Format hangs as text, as JSON and as an HTML page."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from dcpbench.hangs import evidence, finding
from dcpbench.hangs.finding import find_cause, find_signal_waits, get_open_collective
from dcpbench.hangs.heartbeats import RAISED
from dcpbench.records.folder import HANGS_FOLDER
from dcpbench.show import web
from dcpbench.show.text import LINES, MAX_LINE_CHARS, fit_text, format_capitalized, make_printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.hangs.evidence import Evidence, Rank
    from dcpbench.hangs.finding import Finding
    from dcpbench.hangs.signal_waits import Wait


@dataclasses.dataclass(frozen=True)
class Hang:
    """A job that hung."""

    name: str
    evidence: Evidence
    finding: Finding


def read_hangs(paths: Sequence[Path]) -> list[Hang]:
    """Return a Hang for each named hang of a run, and one for all other files together. Raise RecordsError if none can
    be read.
    """
    hangs, others = [], []
    for path in paths:
        below = (
            sorted(p for p in (path / HANGS_FOLDER).iterdir() if p.is_dir()) if (path / HANGS_FOLDER).is_dir() else []
        )
        if below:
            hangs += [_read_hang([folder], str(folder)) for folder in below]
        else:
            others.append(path)
    return hangs + (
        [_read_hang(others, ", ".join(map(str, others[:3])) + (" …" if others[3:] else ""))] if others else []
    )


def _read_hang(paths: Sequence[Path], name: str) -> Hang:
    found = evidence.read_evidence(paths)
    return Hang(name, found, find_cause(found))


def to_json(hang: Hang) -> dict[str, object]:
    """Return the finding and the position of each rank as values for JSON."""
    waits = {wait.rank: wait for wait in find_signal_waits(hang.evidence)}
    ranks = [
        {
            "rank": rank.rank,
            "name": rank.name,
            **dict(zip(COLUMNS, _make_row(rank, waits.get(rank.rank))[1:], strict=True)),
        }
        for rank in hang.evidence.ranks
    ]
    return {"name": hang.name, **msgspec.to_builtins(hang.finding), "at": ranks}


COLUMNS = ("phase", "layer", "collective", "number", "cpu", "line")


def _make_row(rank: Rank, wait: Wait | None) -> list[str]:
    heartbeats, one = rank.heartbeats, get_open_collective(rank)
    _, _, line = finding.get_position(rank)
    cpu = rank.seen.cpu if rank.seen else None
    if one is None and heartbeats is not None and heartbeats.last is not None and heartbeats.last.state == RAISED:
        one = heartbeats.last
    call = one.call.description if one and one.call else ""
    if one and one.state == RAISED:
        call += ", left with an error"
    if not call and rank.seen and rank.seen.ended:
        call = rank.seen.ended
    number = str(one.number) if one else ""
    if wait is not None:
        call, number = wait.barrier.what, str(wait.number)
    return [
        rank.name,
        heartbeats.phase if heartbeats else "",
        "" if heartbeats is None or heartbeats.layer is None else str(heartbeats.layer),
        call,
        number,
        "" if cpu is None else f"{cpu:.0%}",
        line,
    ]


def format_text(hang: Hang) -> str:
    """Return the report as text: the sentence, the reasons, a table of the ranks, and the files that were read."""
    found = hang.finding
    rows = _make_rows(hang.evidence)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [
        f"{hang.name}: {found.kind}",
        f"{format_capitalized(found.message)}.",
        *found.why,
        "",
        *table,
        "",
        f"Read: {', '.join(found.read)}." if found.read else "",
        *(f"Not read: {text}" for text in found.unread),
        *hang.evidence.gpus.strip().splitlines(),
    ]
    return "\n".join(fit_text(make_printable(line), 4 * MAX_LINE_CHARS) for line in lines).rstrip() + "\n"


def render_page(hangs: Sequence[Hang]) -> str:
    """Return an HTML page that loads no other file."""
    entries = [
        {
            "name": make_printable(hang.name),
            "kind": hang.finding.kind,
            "message": make_printable(format_capitalized(hang.finding.message)),
            "why": [make_printable(why) for why in hang.finding.why],
            "columns": _make_rows(hang.evidence)[0],
            "rows": [[make_printable(cell) for cell in row] for row in _make_rows(hang.evidence)[1:]],
            "stacks": [
                (rank.name, make_printable(_format_stacks(rank), LINES)) for rank in hang.evidence.ranks if rank.threads
            ],
            "gpus": make_printable(hang.evidence.gpus, LINES),
            "nccl": make_printable(hang.evidence.nccl, LINES),
            "read": [make_printable(name) for name in hang.finding.read],
            "unread": [make_printable(text) for text in hang.finding.unread],
        }
        for hang in hangs
    ]
    values = {
        "title": "Hangs",
        "main": "main",
        "main_called": "hangs",
        "policy": web.build_content_policy(),
        "theme": web.read_asset(web.STYLE),
    }
    return web.render_template(web.read_asset("page.html.j2", __package__ or ""), values | {"hangs": entries})


def _make_rows(evidence: Evidence) -> list[list[str]]:
    """Return the header and a row per rank, with the columns that have a value."""
    waits = {wait.rank: wait for wait in find_signal_waits(evidence)}
    rows = [["rank", *COLUMNS], *(_make_row(rank, waits.get(rank.rank)) for rank in evidence.ranks)]
    shown = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return [[row[column] for column in shown] for row in rows]


def _format_stacks(rank: Rank) -> str:
    return "\n\n".join(
        "\n".join([thread.name or "thread", *(f"  {f.location}" for f in thread.frames)]) for thread in rank.threads
    )
