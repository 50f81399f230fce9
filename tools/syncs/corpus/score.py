"""Score detectors on the corpus by synchronisations found, missed, and reported wrongly."""

from __future__ import annotations

from collections import Counter

import msgspec


class Seen(msgspec.Struct, kw_only=True):
    """Hold what one detector reports for one program: a rule id for each synchronisation."""

    syncs: list[str] = []
    hazards: list[str] = []
    """Rules of operations that only may block."""


class Truth(msgspec.Struct, kw_only=True):
    """Hold the true behaviour of one program."""

    name: str
    expected: list[str] = []
    hazards: list[str] = []
    held_up_ms: float | None = None
    """Time until the host came back, with `queued_ms` of GPU work before the program; None without a GPU."""


class CorpusRun(msgspec.Struct, kw_only=True):
    """Hold one run of the corpus on one machine."""

    device: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    queued_ms: float | None = None
    programs: list[Truth]
    detectors: dict[str, dict[str, Seen]]
    """Findings by detector and program."""


class Score(msgspec.Struct, kw_only=True):
    """Hold the score of one detector over all programs."""

    detector: str
    true: int
    """Number of true synchronisations."""
    found: int
    false: int
    """Number of reported ones that do not exist."""
    named: int
    """Number found under the right rule."""
    hazards: int
    hazards_found: int
    programs: int
    """Number of programs that wait."""
    programs_found: int
    """Number of these with at least one reported wait."""
    wrong: list[str]
    """Programs with missed or false reports."""

    @property
    def recall(self) -> float:
        """Return the share of true synchronisations that was found."""
        return self.found / self.true

    @property
    def precision(self) -> float:
        """Return the share of reports that is true."""
        return self.found / max(1, self.found + self.false)


def score(run: CorpusRun) -> list[Score]:
    """Return a score for each detector of a run, over the programs that it saw."""
    return [_score(name, seen, run.programs) for name, seen in run.detectors.items()]


def _score(detector: str, seen: dict[str, Seen], programs: list[Truth]) -> Score:
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
        if len(got.syncs) != len(program.expected):
            result.wrong.append(f"{program.name}: {len(got.syncs)} of {len(program.expected)}")
    return result


def contradictions(run: CorpusRun) -> list[str]:
    """Return the programs with an expectation that the clock contradicts.

    Such a program is held up without a wait, or returns at once in spite of one. A program is held up if it returns
    after more than half of the GPU work that was queued before it.
    """
    if run.queued_ms is None:
        return []
    return [
        f"{p.name}: back after {p.held_up_ms:.2f} of {run.queued_ms:.0f} ms, with {len(p.expected)} waits expected"
        for p in run.programs
        if p.held_up_ms is not None and (p.held_up_ms > run.queued_ms / 2) != bool(p.expected)
    ]


def markdown(runs: list[CorpusRun]) -> str:
    """Return the table of docs/syncs-detectors.md, one for each run."""
    return "\n".join(map(_format_run, runs))


def _format_run(run: CorpusRun) -> str:
    scores = score(run)
    waiting = sum(bool(p.expected) for p in run.programs)
    waits, hazards = sum(len(p.expected) for p in run.programs), sum(len(p.hazards) for p in run.programs)
    lines = [
        (
            f"{run.device}, torch {run.torch}: {len(run.programs)} programs, of which {waiting} wait, {waits} times; "
            f"{hazards} calls may block."
        ),
        "",
        "| detector | waits found | false | right kind | may block | programs found |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {s.detector} | {s.found} | {s.false} | {s.named} | {s.hazards_found} | {s.programs_found} |" for s in scores
    ]
    notes = [f"- {s.detector}: {'; '.join(s.wrong)}" for s in scores if s.wrong]
    notes += [f"- **the clock disagrees**: {text}" for text in contradictions(run)]
    if notes:
        lines += ["", "Where a detector is wrong (seen of expected):", "", *notes]
    return "\n".join(lines) + "\n"


def format_programs(run: CorpusRun) -> str:
    """Return a table of the waits that each detector finds in each program; `(n)` are calls that may block."""
    heads = ["program", "held up ms", "waits", *run.detectors]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for program in run.programs:
        held = "" if program.held_up_ms is None else f"{program.held_up_ms:.2f}"
        seen = [detector.get(program.name, Seen()) for detector in run.detectors.values()]
        counts = [
            _format_counts(program.expected, program.hazards),
            *(_format_counts(s.syncs, s.hazards) for s in seen),
        ]
        lines.append(f"| {program.name} | {held} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def _format_counts(syncs: list[str], hazards: list[str]) -> str:
    return f"{len(syncs)} ({len(hazards)})" if hazards else str(len(syncs))
