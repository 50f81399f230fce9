"""Score detectors on the corpus by synchronisations found, missed, and reported wrongly."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


T = TypeVar("T")


class Seen(msgspec.Struct, kw_only=True):
    """Hold the reports of one detector for one program: a rule id for each synchronisation."""

    syncs: list[str] = []
    hazards: list[str] = []  # rules of operations that only may block


class Truth(msgspec.Struct, kw_only=True):
    """Hold the known synchronisations of one program."""

    name: str
    expected: list[str] = []
    hazards: list[str] = []
    held_up_ms: float | None = (
        None  # ms until the program returned, after `queued_ms` of GPU work was queued; None without a GPU
    )


class CorpusRun(msgspec.Struct, kw_only=True):
    """Hold one run of the corpus on one machine."""

    device: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    queued_ms: float | None = None
    programs: list[Truth]
    detectors: dict[str, dict[str, Seen]]  # findings by detector and program


class Score(msgspec.Struct, kw_only=True):
    """Hold the score of one detector over all programs."""

    detector: str
    true: int  # number of true synchronisations
    found: int
    false: int  # number of reported ones that do not exist
    named: int  # number found under the right rule
    hazards: int
    hazards_found: int
    programs: int  # number of programs that wait
    programs_found: int  # number of these with at least one reported wait
    wrong: list[str]  # programs with waits of which none is found, or with false reports

    @property
    def recall(self) -> float:
        """Return the share of true synchronisations that was found."""
        return self.found / self.true

    @property
    def precision(self) -> float:
        """Return the share of reports that is true."""
        return self.found / max(1, self.found + self.false)


def score_detectors(run: CorpusRun) -> list[Score]:
    """Return a score for each detector of a run, over the programs that it saw."""
    return [_score_detector(name, seen, run.programs) for name, seen in run.detectors.items()]


def _score_detector(detector: str, seen: dict[str, Seen], programs: list[Truth]) -> Score:
    counts = dict.fromkeys(
        ("true", "found", "false", "named", "hazards", "hazards_found", "programs", "programs_found"), 0
    )
    result = Score(detector=detector, wrong=[], **counts)
    for program in programs:
        if program.name not in seen:
            continue
        got = seen[program.name]
        found = min(len(got.syncs), len(program.expected))
        result.true += len(program.expected)
        result.found += found
        result.false += len(got.syncs) - found
        result.named += (Counter(got.syncs) & Counter(program.expected)).total()
        result.hazards += len(program.hazards)
        result.hazards_found += min(len(got.hazards), len(program.hazards))
        result.programs += bool(program.expected)
        result.programs_found += bool(found)
        if (program.expected and not found) or len(got.syncs) > found:
            false = len(got.syncs) > found
            result.wrong.append(
                f"{program.name} ({len(got.syncs)} of {len(program.expected)})" if false else program.name
            )
    return result


def find_contradictions(run: CorpusRun) -> list[str]:
    """Return the programs with an expectation that the clock contradicts.

    Such a program is held up without a known wait, or returns at once in spite of one. A program is held up if it returns
    after more than half of the GPU work that was queued before it.
    """
    if run.queued_ms is None:
        return []
    return [
        f"{p.name}: back after {p.held_up_ms:.2f} of {run.queued_ms:.0f} ms, with {len(p.expected)} waits expected"
        for p in run.programs
        if p.held_up_ms is not None and (p.held_up_ms > run.queued_ms / 2) != bool(p.expected)
    ]


def format_runs(runs: Sequence[CorpusRun]) -> str:
    """Format the tables of docs/syncs-detectors.md; runs with the same expectations share one."""
    tables: dict[bytes, list[CorpusRun]] = {}
    for run in runs:
        expected = [(p.name, p.expected, p.hazards) for p in run.programs]
        tables.setdefault(msgspec.json.encode(expected), []).append(run)
    return "\n".join(map(_format_runs, tables.values()))


def _format_runs(runs: Sequence[CorpusRun]) -> str:
    programs = runs[0].programs
    waiting = sum(bool(p.expected) for p in programs)
    waits, hazards = sum(len(p.expected) for p in programs), sum(len(p.hazards) for p in programs)
    machines = "; ".join(dict.fromkeys(f"{run.device}, torch {run.torch}" for run in runs))
    lines = [
        f"{machines}: {waiting} of {len(programs)} programs wait, {waits} times; {hazards} calls may block.",
        "",
        "| detector | waits found | false | right kind | may block | programs found |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    scores = [
        (name, s) for run, names in _name_detectors(runs) for name, s in zip(names, score_detectors(run), strict=True)
    ]
    rows = _group_detectors(
        (name, f"{s.found} | {s.false} | {s.named} | {s.hazards_found} | {s.programs_found}") for name, s in scores
    )
    lines += [f"| {detectors} | {numbers} |" for numbers, detectors in rows.items()]
    wrong = _group_detectors((name, ", ".join(s.wrong)) for name, s in scores if s.wrong)
    notes = [f"- {detectors}: {names}" for names, detectors in wrong.items()]
    notes += [f"- **the clock disagrees** on {run.device}: {text}" for run in runs for text in find_contradictions(run)]
    if notes:
        lines += ["", "Nothing, or too much, is found in:", "", *notes]
    return "\n".join(lines) + "\n"


def _name_detectors(runs: Sequence[CorpusRun]) -> Iterator[tuple[CorpusRun, list[str]]]:
    """Yield each run with the names of its detectors, which have the device's name if it differs from that of the first run."""
    for run in runs:
        suffix = "" if run.device == runs[0].device else f" ({run.device})"
        yield run, [f"{name}{suffix}" for name in run.detectors]


def _group_detectors(found: Iterable[tuple[str, T]]) -> dict[T, str]:
    """Return the detectors of each finding, in the order of the first."""
    detectors: dict[T, list[str]] = {}
    for detector, finding in found:
        detectors.setdefault(finding, []).append(detector)
    return {finding: "; ".join(dict.fromkeys(names)) for finding, names in detectors.items()}


def format_programs(runs: Sequence[CorpusRun]) -> str:
    """Format a table of the waits that each detector finds in each program; `(n)` are calls that may block.

    Detectors with equal findings share a column. The clock is that of the first run.
    """
    first = runs[0]
    columns = {
        name: tuple(
            _format_counts(seen.get(p.name, Seen()).syncs, seen.get(p.name, Seen()).hazards) for p in first.programs
        )
        for run, names in _name_detectors(runs)
        for name, seen in zip(names, run.detectors.values(), strict=True)
    }
    grouped = {
        names: column for column, names in _group_detectors((name, column) for name, column in columns.items()).items()
    }
    heads = ["program", "held up ms", "waits", *grouped]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for program, *counts in zip(first.programs, *grouped.values(), strict=True):
        held = "" if program.held_up_ms is None else f"{program.held_up_ms:.2f}"
        expected = _format_counts(program.expected, program.hazards)
        lines.append(f"| {' | '.join([program.name, held, expected, *counts])} |")
    return "\n".join(lines) + "\n"


def _format_counts(syncs: list[str], hazards: list[str]) -> str:
    return f"{len(syncs)} ({len(hazards)})" if hazards else str(len(syncs))
