"""Find the steps of a program: which annotations mark them, in which step a moment lies, and how often a site occurs per step.

Steps are ranges that a name declares (`ProfilerStep#N`, an engine's own annotations, `--step-range`), or numbered ranges
that cover most of the work, which is a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

STEP = "ProfilerStep#"  # begin of the names of steps of torch.profiler
PROFILER_STEP = re.compile(r"^ProfilerStep[#*]?\d+$")
NUMBERED = re.compile(r"^(.*?\D|)(\d+)$")
HOW_TO_MARK = (
    'prof.step() marks steps only where profile() has schedule=; or wrap each step in record_function(f"step {n}") and give '
    "--step-range '^step '."
)
MAX_RANGES = 5  # ranges that are listed where none marks a step
MIN_STEADY_STEPS = 3  # steps from which the first counts as warm-up
MIN_SHARE = 0.5  # share of the work that numbered ranges must exceed to be taken for steps

StepSource = Literal["", "profiler", "engine", "pattern", "numbered"]


class LaunchedWork(NamedTuple):
    """Hold the GPU work that was launched within some time."""

    launches: int = 0
    gpu_us: float = 0.0

    def compute_share(self, total: LaunchedWork) -> float | None:
        """Return the share of `total`, the smaller one by number and by GPU time; None without any work."""
        shares = [part / whole for part, whole in zip(self, total, strict=True) if whole]
        return min(1.0, *shares) if shares else None


class Range(NamedTuple):
    """Hold one annotation."""

    name: str
    start: float
    end: float
    empty: bool = False  # True if nothing was launched in it, and nothing waited
    work: LaunchedWork = LaunchedWork()  # work that was launched in it


@dataclasses.dataclass(frozen=True)
class Steps:
    """Hold steps in order of time."""

    marked_by: str = ""  # common part of their names, such as `ProfilerStep#`; empty without steps
    start: NDArray[np.float64] = dataclasses.field(default_factory=lambda: np.zeros(0))
    end: float = 0.0  # end of the last one, or start of one that is left out behind it
    source: StepSource = ""
    names: frozenset[str] = frozenset()  # names of the ranges that are steps
    phases: tuple[str, ...] = ()  # phase of each step, such as `decode`, where an engine's annotation gives it
    share: float | None = None  # share of the work that was launched in steps
    rejected: tuple[str, ...] = ()  # names of numbered ranges that cover too little of the work
    prepared: NDArray[np.float64] | None = None  # where preparation begins, if annotated; None: at `start`

    @property
    def is_guessed(self) -> bool:
        """Return True if only numbers at the end of their names make them steps."""
        return self.source == "numbered"

    def __len__(self) -> int:
        return len(self.start)

    def find_indices(self, moments: Sequence[float] | NDArray[Any]) -> list[int | None]:
        """Return the index of the step of each moment.

        A moment between two steps belongs to the earlier one, unless it lies in the preparation of the later one. A
        moment before the first step has None, a moment behind the last one the number of steps.
        """
        begin = self.start if self.prepared is None else self.prepared
        at = np.searchsorted(begin, moments, "right") - 1
        behind = len(self.start)
        return [None if i < 0 else behind if m > self.end else int(i) for i, m in zip(at, moments, strict=True)]

    def count_phases(self) -> dict[str, int]:
        """Return the number of steps of each phase, the most frequent first; empty where phases are unknown."""
        return dict(Counter(phase for phase in self.phases if phase).most_common())

    def find_steady(self) -> dict[str, list[int]]:
        """Return the steps of each phase without the first one, where there are at least three."""
        members: dict[str, list[int]] = {}
        for step, phase in enumerate(self.phases or ("",) * len(self)):
            members.setdefault(phase, []).append(step)
        return {phase: found[1:] if len(found) >= MIN_STEADY_STEPS else found for phase, found in members.items()}


class Engine(NamedTuple):
    """Describe the annotations that an engine puts around each forward pass."""

    marked_by: str
    pattern: re.Pattern[str]
    find_phase: Callable[[re.Match[str]], str]
    preparation: str = ""  # annotation in which the next step is prepared; empty if the engine has none


def _find_phase_by_counts(match: re.Match[str]) -> str:
    prefill, decode = int(match["prefill"]), int(match["decode"])
    return "mixed" if prefill and decode else "prefill" if prefill else "decode"


_SGLANG_PHASES = {
    **dict.fromkeys(("EXTEND", "SPLIT_PREFILL", "DLLM_EXTEND"), "prefill"),
    **dict.fromkeys(("DECODE", "VERIFY", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "DRAFT_LOOP"), "decode"),
    "MIXED": "mixed",
    "IDLE": "idle",
}

ENGINES = (
    Engine(  # vLLM, annotate_profile of vllm/v1/worker/gpu_worker.py
        "execute_context_N_generation_M",
        re.compile(r"^execute_(?:\d+_)?context_(?P<prefill>\d+)\(.*\)_generation_(?P<decode>\d+)\(.*\)$"),
        _find_phase_by_counts,
    ),
    Engine(  # the same function of vLLM before 0.15
        "execute_new_N_cached_M",
        re.compile(r"^execute_new_(?P<prefill>\d+)_cached_(?P<decode>\d+)$"),
        _find_phase_by_counts,
    ),
    Engine(  # SGLang, build_step_span_name of sglang/srt/utils/profile_utils.py
        "step[MODE bs=N]",
        re.compile(rf"^(?:step\[)?(?P<mode>{'|'.join(_SGLANG_PHASES)})\b.*\bbs=\d+"),
        lambda match: _SGLANG_PHASES[match["mode"]],
        preparation="scheduler.get_next_batch_to_run",
    ),
)


def check_step_range(pattern: str | None, name: str = "--step-range") -> None:
    """Raise UsageError if a pattern is empty or no regular expression; `name` is that of its option or key."""
    if pattern == "":
        raise UsageError(f"{name} is empty; give a regular expression such as '^decode_step', or leave it out.")
    try:
        re.compile(pattern or "")
    except re.error as e:
        raise UsageError(
            f"{name} {pattern!r} is no regular expression ({e}); give one such as '^decode_step'."
        ) from None


def find_steps(ranges: Sequence[Range], total: LaunchedWork, pattern: str | None = None) -> Steps:
    """Find the steps among annotations.

    In this order: the ranges that `pattern` matches, if it is given; `ProfilerStep#N` of torch.profiler; the annotations
    of an engine; the numbered ranges that cover most of the work. Of numbered ranges each number occurs once: layers lie
    in each step and so occur in all of them.

    Args:
        ranges: Annotations of the program.
        total: Work of the whole program, of which guessed steps must cover more than half.
        pattern: Regular expression of the names of steps.
    """
    engine = _find_engine_steps(ranges, total)
    if pattern is not None:
        named = _make_steps(pattern, [r for r in ranges if re.search(pattern, r.name)], "pattern", total)
        return _add_phases(named, engine)
    profiler = {r.name: r for r in reversed(ranges) if PROFILER_STEP.match(r.name)}
    if profiler:
        return _add_phases(_make_steps(STEP, list(profiler.values()), "profiler", total), engine)
    return engine or _guess_steps(ranges, total)


def _add_phases(steps: Steps, engine: Steps | None) -> Steps:
    """Return the steps with the phases of the engine's annotations that begin in each of them."""
    within: list[set[str]] = [set() for _ in range(len(steps))]
    for step, phase in zip(steps.find_indices(engine.start), engine.phases, strict=True) if engine else ():
        if step is not None and step < len(steps):
            within[step].add(phase)
    if not any(within):
        return steps
    phases = ("mixed" if len(found) > 1 else next(iter(found), "") for found in within)
    return dataclasses.replace(steps, phases=tuple(phases))


def _find_engine_steps(ranges: Sequence[Range], total: LaunchedWork) -> Steps | None:
    """Return the steps of the engine that has most of them; those in which nothing happened are left out."""
    names = {r.name for r in ranges}
    phases = {
        engine.marked_by: {name: engine.find_phase(match) for name in names if (match := engine.pattern.match(name))}
        for engine in ENGINES
    }
    found = {marked_by: [r for r in ranges if r.name in of_name] for marked_by, of_name in phases.items()}
    marked_by = max(found, key=lambda engine: len(found[engine]))
    matched = [r for r in found[marked_by] if not r.empty] or found[marked_by]
    if not matched:
        return None
    steps = _make_steps(marked_by, matched, "engine", total)
    by_start = {r.start: phases[marked_by][r.name] for r in matched}
    (preparation,) = (engine.preparation for engine in ENGINES if engine.marked_by == marked_by)
    prepared = _find_preparations(steps, matched, [r for r in ranges if r.name == preparation])
    return dataclasses.replace(
        steps, prepared=prepared, phases=tuple(by_start[start] for start in steps.start.tolist())
    )


def _find_preparations(
    steps: Steps, matched: Sequence[Range], preparations: Sequence[Range]
) -> NDArray[np.float64] | None:
    """Return when the preparation of each step begins: the last one that lies between the previous step and this one."""
    if not preparations:
        return None
    begin = np.sort([r.start for r in preparations])
    until = np.sort([r.end for r in preparations])
    ordered = sorted(matched, key=lambda r: r.start)
    ends = np.concatenate([[-np.inf], np.maximum.accumulate([r.end for r in ordered])])
    previous = ends[np.searchsorted([r.start for r in ordered], steps.start)]
    at = np.searchsorted(until, steps.start, "right") - 1
    found = begin[at]
    prepared: NDArray[np.float64] = np.where((at >= 0) & (found >= previous), found, steps.start)
    return prepared


def _guess_steps(ranges: Sequence[Range], total: LaunchedWork) -> Steps:
    """Return the numbered ranges that cover most of the work, if they cover more than half of it."""
    families = [_make_steps(name, members, "numbered", total) for name, members in _find_families(ranges)]
    covering = [steps for steps in families if (steps.share or 0.0) > MIN_SHARE]
    if not covering:
        return Steps(rejected=tuple(steps.marked_by for steps in families))
    return max(covering, key=lambda steps: steps.share or 0.0)


def _find_families(ranges: Iterable[Range]) -> list[tuple[str, list[Range]]]:
    """Return ranges with names that differ only in the number at their end, if each number occurs once."""
    families: dict[str, dict[str, list[Range]]] = {}
    for r in ranges:
        numbered = NUMBERED.match(r.name)
        if numbered:
            families.setdefault(numbered[1], {}).setdefault(numbered[2], []).append(r)
    return [
        (name, [r[0] for r in members.values()])
        for name, members in families.items()
        if len(members) > 1 and all(len(r) == 1 for r in members.values())
    ]


def _make_steps(marked_by: str, ranges: list[Range], source: StepSource, total: LaunchedWork) -> Steps:
    if not ranges:
        return Steps()
    last, end = max(ranges, key=lambda r: r.start), max(r.end for r in ranges)
    others = [r for r in ranges if r.name != last.name]
    if others and last.empty and PROFILER_STEP.match(last.name):  # the last prof.step() opened it
        ranges, end = others, last.start
    work = LaunchedWork(sum(r.work.launches for r in ranges), sum(r.work.gpu_us for r in ranges))
    names = frozenset(r.name for r in [*ranges, last])
    starts = np.unique([r.start for r in ranges])
    return Steps(marked_by, starts, end, source, names, share=work.compute_share(total))


def format_ranges(names: Iterable[str]) -> str:
    """Format the annotations that could be steps, the most frequent first."""
    found = Counter(names)
    if not found:
        return "There are no ranges in this trace."
    listed = [f"{name!r} ({times})" for name, times in found.most_common(MAX_RANGES)]
    return f"Ranges in this trace: {', '.join(listed)}{', …' if len(found) > MAX_RANGES else ''}."


class Occurrences(NamedTuple):
    """Hold how the occurrences of one site are distributed over the steps."""

    per_step: float | None = None  # mean over the steps of steady state, of the phase that has most; None without steps
    per_phase: dict[str, float] = {}  # noqa: RUF012 -- never changed; mean of steady steps by phase; empty if phases are unknown
    warmup_only: bool = False  # each lies before the first step, or in a first one that is warm-up
    outside: int = 0  # number in no step that are not warm-up, such as those behind the last step


def count_occurrences(steps_of_site: Sequence[int | None], steps: Steps) -> Occurrences:
    """Count the occurrences of a site by step, given the step of each as `Steps.find_indices` returns it.

    With at least three steps of a phase its first one is warm-up, as caches fill and kernels are loaded in it, and so is
    everything before the first step. What lies behind the last step is outside; but engines annotate the forward pass
    alone and sample behind it. So up to as many occurrences as another step has belong to the last one, and where it
    has fewer, the recording ended within it and it is not counted.
    """
    if not len(steps):
        return Occurrences()
    last, steady = len(steps) - 1, steps.find_steady()
    has_warm_up = sum(map(len, steady.values())) < len(steps)
    found = Counter(steps_of_site)
    most = max((found[s] for members in steady.values() for s in members if s < last), default=0)
    tail = min(found[len(steps)], max(0, most - found[last]))
    outside = found[len(steps)] - tail + (0 if has_warm_up else found[None])
    found[last] += tail
    if steps.source == "engine" and found[last] < most:
        steady = {phase: [s for s in members if s < last] or members for phase, members in steady.items()}
    per_phase = {phase: sum(found[s] for s in members) / len(members) for phase, members in steady.items()}
    return Occurrences(
        per_step=max(per_phase.values()),
        per_phase=per_phase if any(per_phase) else {},
        warmup_only=has_warm_up and not outside and not any(per_phase.values()),
        outside=outside,
    )
