"""Find which ranks kept the others waiting: a finding with its reasons, or `unknown` with what was read.

All ranks of a group must begin the same collectives in the same order. The n-th collective that each rank began in the
group is compared, and the first of these cases that applies is the finding:

1. Two ranks began different collectives as their n-th: the order, shape or dtype differs.
2. A rank waits in a GPU kernel for a peer's signal, by the counters in its memory: either the peer has passed that
place and its signal was lost, or the peer has not reached it.
3. Some ranks wait in the n-th collective, which another rank has not begun: that rank is behind, and its position is
the place of the hang.
4. A rank was stopped by a signal, or it waits in the operating system's kernel, uninterruptible: for a disk or a driver that
does not answer.
5. All ranks are in the same collective: none is behind, and the transport or the device does not progress.
6. No rank is in a known collective: the position of the devices in a step, by their norm markers; otherwise only each
rank's own position is reported.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

import msgspec

from dcpbench.hangs import signal_waits
from dcpbench.hangs.dumps import NO_RANK
from dcpbench.hangs.heartbeats import INSIDE, RAISED, RETURNED, CollectiveEvent, format_ranks, parse_ranks
from dcpbench.show.text import format_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dcpbench.hangs.dumps import Frame
    from dcpbench.hangs.evidence import Evidence, Rank
    from dcpbench.hangs.signal_waits import Wait

    Lines = Mapping[int, Mapping[int, CollectiveEvent]]  # collectives of a group, by rank and number

UNEVEN = ("all_gather", "all_to_all", "alltoall", "gather", "reduce_scatter", "scatter")
REDUCES = {"attention": "attn_reduce", "mlp": "mlp_reduce"}  # phase of the reduction that ends each half of a layer
STOPPED = "T"  # state of a process that got SIGSTOP, in proc(5)
MAX_NORM_GAP = 2  # norms between ranks of one step: each half of a layer has a collective
OURS = "dcpbench/"
_WAITS = (
    "all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all all_to_all_single barrier "
    "broadcast broadcast_object_list gather gather_object monitored_barrier recv reduce reduce_scatter "
    "reduce_scatter_single reduce_scatter_tensor scatter send synchronize"
)
WAITS = frozenset(_WAITS.split())  # functions of torch in which a rank waits for others, or for its device
NAME_THEM = (
    "Flight recorders are compared by rank, and their names tell none: name them flight-0.json, flight-1.json, …"
)
WAITS_IN = ("distributed_c10d.py", "torch/cuda/", "torch/distributed/")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The responsible ranks of a hang, with the reasons."""

    kind: str
    """Kind of the finding.

    - `order`, `shape`, `dtype`: the rank began another collective than the others.
    - `signal`: the rank has passed the kernel barrier in which others wait for its signal.
    - `behind`: the rank has not reached the collective or the kernel barrier in which the others wait.
    - `gone`: as `behind`, and the rank has ended.
    - `together`: all ranks are in the same collective.
    - `apart`: groups wait for each other.
    - `device`: steps were launched, and the devices do not finish them.
    - `kernel`: the rank waits in the operating system's kernel for a disk or a driver.
    - `stopped`: the process of the rank was stopped by a signal and not continued.
    - `outside`: no rank is in a collective.
    - `unknown`: the evidence does not decide.
    """
    message: str  # the finding in one sentence
    ranks: list[int] = []  # ranks that differ or are behind
    waiting: list[int] = []
    phase: str = ""  # phase of the responsible rank, or that in which the others wait if its collective is unknown
    layer: int | None = None
    collective: str = ""  # collective in which the other ranks wait, or should be
    number: int | None = None  # number of that collective within its group
    line: str = ""  # source line of the responsible rank
    waiting_at: str = ""  # source line at which the other ranks wait
    why: list[str] = []
    read: list[str] = []
    unread: list[str] = []


def find_cause(evidence: Evidence) -> Finding:
    """Return the finding that the evidence supports."""
    groups = _group_collectives(evidence)
    found = (
        _find_first_mismatch(evidence, groups) or _find_barrier_wait(evidence, groups) or _find_behind(evidence, groups)
    )
    found = _find_stopped(evidence) or _find_blocked(evidence, found) or found
    found = found or _find_stalled_collective(evidence, groups)
    found = found or _find_device_stall(evidence) or _find_by_stacks(evidence) or _report_outside(evidence)
    why = found.why
    if evidence.unknown:
        numbers = format_list(format_ranks(evidence.unknown).split(","))
        why = [*why, f"Nothing is known about rank{'s' if len(evidence.unknown) > 1 else ''} {numbers}."]
    return msgspec.structs.replace(found, why=why, read=evidence.read, unread=evidence.unread)


def find_mismatch(evidence: Evidence) -> Finding | None:
    """Return a finding if two ranks began different collectives, else None; it explains a job that broke before it
    hung.
    """
    return _find_first_mismatch(evidence, _group_collectives(evidence))


def get_collectives(rank: Rank) -> list[CollectiveEvent]:
    """Return the rank's last collectives.

    They come from the heartbeats if the host waited in collectives, otherwise from the flight recorder with the source
    lines of the heartbeats.
    """
    if rank.heartbeats is not None and (rank.heartbeats.waits or rank.flight is None):
        return rank.heartbeats.collectives
    if rank.flight is None:
        return []
    own = rank.heartbeats.collectives if rank.heartbeats else []
    return [_add_source_line(one, own) for one in rank.flight]


def _add_source_line(one: CollectiveEvent, own: Sequence[CollectiveEvent]) -> CollectiveEvent:
    at = next(
        (b for b in reversed(own) if b.began_ns <= one.began_ns and (not b.ended_ns or one.began_ns <= b.ended_ns)),
        None,
    )
    if at is None or one.call is None or at.call is None:
        return one
    call = msgspec.structs.replace(one.call, at=at.call.at, above=at.call.above)
    if at.call.dtype:  # NCCL's names, such as _all_gather_base, are not those of the program
        call = msgspec.structs.replace(call, op=at.call.op, dtype=at.call.dtype, shape=at.call.shape)
    return dataclasses.replace(one, call=call, phase=at.phase, layer=at.layer)


def get_open_collective(rank: Rank) -> CollectiveEvent | None:
    """Return the collective that the rank waits in, or None if it waits in none or this is unknown."""
    known = get_collectives(rank)
    if rank.heartbeats is not None and not rank.heartbeats.waits and rank.flight is None:
        return None  # collectives were only launched on the device, and its progress is unknown
    return next((m for m in known if m.state == INSIDE), None)


def find_signal_waits(evidence: Evidence) -> list[Wait]:
    """Return the ranks that wait in a kernel for signals of their peers."""
    return signal_waits.find_waits({rank.rank: rank.signals for rank in evidence.ranks if rank.signals is not None})


def _group_collectives(evidence: Evidence) -> Mapping[str, Lines]:
    """Return the collectives that each rank began, by group and rank."""
    lines: dict[str, dict[int, dict[int, CollectiveEvent]]] = collections.defaultdict(
        lambda: collections.defaultdict(dict)
    )
    for rank in evidence.ranks:
        for one in get_collectives(rank):
            if one.call is not None:
                lines[one.known_call.group][rank.rank][one.number] = one
    return lines


def _get_place(one: CollectiveEvent) -> tuple[object, ...]:
    return one.known_call.signature, one.phase, one.layer, one.known_call.at


def _find_first_mismatch(evidence: Evidence, groups: Mapping[str, Lines]) -> Finding | None:
    """Return the finding of case 1, the earliest over all groups."""
    found = []
    for lines in groups.values():
        numbers = sorted({n for line in lines.values() for n in line})
        by_number = {n: {r: line[n] for r, line in lines.items() if n in line} for n in numbers}
        different = (n for n, of in by_number.items() if not _is_same_collective(of))
        split = next((n for n in different if not _is_harmless(by_number[n], by_number.get(n + 1))), None)
        if split is None:
            continue
        strayed = next((n for n, of in by_number.items() if len({_get_place(m) for m in of.values()}) > 1), split)
        found.append((min(m.began_ns for m in by_number[strayed].values()), lines, by_number[strayed], strayed, split))
    if not found:
        return None
    _, lines, at, number, split = min(found, key=lambda one: one[0])
    return _describe_mismatch(evidence, lines, at, number, split)


def _is_same_collective(of: Mapping[int, CollectiveEvent]) -> bool:
    """Return True if all ranks began the same collective."""
    return len({_get_signature(one) for one in of.values()}) <= 1


def _is_harmless(of: Mapping[int, CollectiveEvent], following: Mapping[int, CollectiveEvent] | None) -> bool:
    """Return True if a difference did no harm: every rank returned from it, and the following collectives agree.

    Collectives of dcpbench never pass: its ranks agree in every argument, and NCCL may return on a rank that gave fewer
    bytes.
    """
    back = all(one.state == RETURNED and one.call is not None and not one.call.at for one in of.values())
    return back and following is not None and following.keys() == of.keys() and _is_same_collective(following)


def _get_signature(one: CollectiveEvent) -> tuple[str, str, tuple[int, ...]]:
    """Return the part of a collective that must agree: (op, dtype, shape).

    The shape is left empty for collectives of other programs that accept parts of different sizes.
    """
    op, dtype, shape = one.known_call.signature
    return op, dtype, () if op in UNEVEN and not one.known_call.at else shape


def _describe_mismatch(
    evidence: Evidence, lines: Lines, at: Mapping[int, CollectiveEvent], number: int, split: int
) -> Finding:
    odd, sure, why = _find_odd_ranks(lines, at, number)
    others = sorted(set(at) - odd)
    theirs, mine = at[others[0]], at[min(odd)]
    kind = "dtype" if theirs.known_call.dtype != mine.known_call.dtype else "shape"
    if (theirs.known_call.op, *_get_place(theirs)[1:]) != (mine.known_call.op, *_get_place(mine)[1:]):
        kind = "order"
    who, them = _describe_ranks(odd), _describe_ranks(others)
    sentence = (
        f"{who} began {mine.known_call.description}{_format_context(mine)} as collective {number} of the group, and {them} "
        f"{theirs.known_call.description}{_format_context(theirs)}"
    )
    if kind == "order":
        why += _explain_order(lines, at, odd, number)
    if not sure:
        why.append("Nothing tells which of the two is right.")
    if split > number:
        why.append(f"From there on they agree in op, dtype and shape up to collective {split}, where they stand still.")
    return Finding(
        kind=kind,
        message=sentence,
        ranks=sorted(odd),
        waiting=[r for r in others if get_open_collective(next(e for e in evidence.ranks if e.rank == r))],
        phase=mine.phase,
        layer=mine.layer,
        collective=theirs.known_call.description,
        number=number,
        line=mine.known_call.at,
        waiting_at=theirs.known_call.at,
        why=why,
    )


def _find_odd_ranks(lines: Lines, at: Mapping[int, CollectiveEvent], number: int) -> tuple[set[int], bool, list[str]]:
    """Return (ranks that differ, True if that is certain, reasons).

    The minority differs from the majority; in a tie, the ranks that left the order of earlier steps differ.
    """
    sides: dict[object, set[int]] = collections.defaultdict(set)
    for rank, one in at.items():
        sides[_get_place(one)].add(rank)
    by_size = sorted(sides.values(), key=lambda side: (len(side), -min(side)))
    if len(by_size[-1]) > len(by_size[-2]):
        return set(at) - by_size[-1], True, [f"{_describe_ranks(by_size[-1])} agree."]
    as_before = [side for side in by_size if all(_is_usual_successor(lines, at, r, number) for r in side)]
    if len(as_before) == 1:
        return set(at) - as_before[0], True, [f"{_describe_ranks(as_before[0])} went on as in earlier steps."]
    return by_size[0], False, []


def _is_usual_successor(lines: Lines, at: Mapping[int, CollectiveEvent], rank: int, number: int) -> bool:
    """Return True if the collective that the rank began followed the one before it in an earlier step, too."""
    before = lines[rank].get(number - 1)
    return before is not None and _get_place(at[rank]) in _list_successors(lines, before, number)


def _list_successors(lines: Lines, one: CollectiveEvent, number: int) -> list[tuple[object, ...]]:
    """Return the collectives that followed `one` each time any rank began it at the same place before."""
    return [
        _get_place(line[n + 1])
        for line in lines.values()
        for n, m in line.items()
        if n + 1 < number and n + 1 in line and _get_place(m) == _get_place(one)
    ]


def _explain_order(lines: Lines, at: Mapping[int, CollectiveEvent], odd: set[int], number: int) -> list[str]:
    """Return further facts about an order that differs: swapped, additional or missing collectives."""
    one, other = min(odd), min(set(at) - odd)
    mine, theirs = lines[one], lines[other]
    places = {
        n: (_get_place(mine[n]) if n in mine else None, _get_place(theirs[n]) if n in theirs else None)
        for n in (number, number + 1)
    }
    (mine_now, theirs_now), (mine_next, theirs_next) = places[number], places[number + 1]
    if mine_next == theirs_now and theirs_next == mine_now:
        return [f"{_describe_ranks(odd)} took it and the one after it in the other order."]
    if mine_next is not None and mine_next == theirs_now:
        return [f"{_describe_ranks(odd)} began one more in between, or took two in the other order."]
    if mine_now == theirs_next or mine_now in _list_successors(lines, at[other], number):
        return [
            f"It comes behind the other's: {_describe_ranks(odd)} left that one out, or took the two in the other order."
        ]
    return []


def _find_barrier_wait(evidence: Evidence, groups: Mapping[str, Lines]) -> Finding | None:
    """Return the finding of case 2; None if the absent rank waits in another collective."""
    by_rank = {rank.rank: rank for rank in evidence.ranks}
    waiting = find_signal_waits(evidence)
    if lost := [wait for wait in waiting if wait.passed]:
        return _report_lost_signal(by_rank, lost)
    roots = {r for wait in waiting for r in wait.absent} - {wait.rank for wait in waiting}
    if not roots:
        return _report_crossed_barriers(by_rank, waiting) if waiting else None
    others = {rank.rank for rank in evidence.ranks} - roots - {wait.rank for wait in waiting}
    in_one = [one for root in roots & by_rank.keys() if (one := get_open_collective(by_rank[root])) and one.call]
    if any(get_open_collective(by_rank[r]) is None for one in in_one for r in _find_late_ranks(groups, one) & others):
        return None
    return _report_absent_ranks(by_rank, roots, [wait for wait in waiting if roots & {*wait.absent}])


def _find_late_ranks(groups: Mapping[str, Lines], one: CollectiveEvent) -> set[int]:
    """Return the ranks that have not begun a collective."""
    lines = groups[one.known_call.group]
    expected = set(parse_ranks(one.known_call.ranks)) or set(lines)
    return {r for r in expected if r not in lines or max(lines[r]) < one.number}


def _report_lost_signal(by_rank: Mapping[int, Rank], lost: Sequence[Wait]) -> Finding:
    """Return the finding for missing signals of ranks that have passed the barrier."""
    one = lost[0]
    place = (one.description, one.passed, one.barrier.ranks)
    waiting = sorted({w.rank for w in lost if (w.description, w.passed, w.barrier.ranks) == place})
    who = sorted(one.passed)
    phase, layer = _get_barrier_place(by_rank[one.rank], one)
    culprit = by_rank[who[0]]
    return Finding(
        kind="signal",
        message=f"{_describe_ranks(who, 'has', 'have')} passed {one.description}, and none of its signals has reached {_describe_ranks(waiting)}, "
        f"where a kernel waits for it{_format_step_place(phase, layer)}; {_describe_ranks(who, 'is', 'are')} {_format_position(culprit)}",
        ranks=who,
        waiting=waiting,
        phase=phase,
        layer=layer,
        collective=one.barrier.what,
        number=one.number,
        line=get_position(culprit)[2],
        waiting_at=get_position(by_rank[one.rank])[2],
        why=[f"{_describe_ranks(waiting, 'has', 'have')} ended {one.number - 1} such barriers, by its counters."],
    )


def _report_absent_ranks(by_rank: Mapping[int, Rank], roots: set[int], waiting: Sequence[Wait]) -> Finding:
    """Return the finding for ranks that have not reached a barrier."""
    one = waiting[0]
    known = [by_rank[r] for r in sorted(roots) if r in by_rank]
    ended = {rank.rank: rank.seen.ended for rank in known if rank.seen and rank.seen.ended}
    phase, layer = _get_barrier_place(by_rank[one.rank], one)
    gone = len(ended) == len(roots)
    first = next((rank for rank in known if rank.rank not in ended), known[0] if known else None)
    at = "has ended" if gone else f"is {_format_position(first)}" if first else "is at an unknown position"
    ranks = sorted({w.rank for w in waiting})
    own = get_position(first) if first else ("", None, "")
    on_device = None if first is None or _is_host_position(first) else first.device
    return Finding(
        kind="gone" if gone else "behind",
        message=f"{_describe_ranks(roots)} {at}; {_describe_ranks(ranks, 'waits', 'wait')} for its signal in a kernel, "
        f"in {one.description}{_format_step_place(phase, layer)}",
        ranks=sorted(roots),
        waiting=ranks,
        phase=on_device.half if on_device else own[0] or phase,
        layer=on_device.layer if on_device else layer if own[1] is None else own[1],
        collective=one.barrier.what,
        number=one.number,
        line=own[2],
        waiting_at=get_position(by_rank[one.rank])[2],
        why=[f"rank {r} ended: {how}." for r, how in ended.items()]
        + [_describe_process(rank) for rank in known if rank.seen and rank.rank not in ended],
    )


def _report_crossed_barriers(by_rank: Mapping[int, Rank], waiting: Sequence[Wait]) -> Finding:
    """Return the finding for ranks in several barriers that wait for each other."""
    one = waiting[0]
    phase, layer = _get_barrier_place(by_rank[one.rank], one)
    ranks = sorted({w.rank for w in waiting})
    return Finding(
        kind="apart",
        message="; ".join(
            f"rank {w.rank} is in {w.description} and waits for {_describe_ranks(w.absent)}" for w in waiting
        ),
        ranks=ranks,
        waiting=ranks,
        phase=phase,
        layer=layer,
        collective=one.barrier.what,
        number=one.number,
        why=["They came to different barriers of kernels in different orders."],
    )


def _is_host_position(rank: Rank) -> bool:
    """Return True if the position of the rank is that of its host because the position of its device is unknown."""
    return rank.device is None or not rank.device.norm or rank.heartbeats is None or rank.heartbeats.waits


def _get_barrier_place(rank: Rank, wait: Wait) -> tuple[str, int | None]:
    """Return (phase, layer) of the barrier that a rank is in."""
    if not _is_host_position(rank):
        assert rank.device is not None
        # In captured pieces prefixes of a layer are gathered ahead of its first norm (engine/piecewise_graph.py).
        ahead = wait.barrier.phase == "prefix_gather" and rank.device.half == "mlp"
        return wait.barrier.phase or REDUCES[rank.device.half], rank.device.layer + ahead
    phase, layer, _ = get_position(rank)
    host_waits = rank.heartbeats is not None and rank.heartbeats.waits
    return wait.barrier.phase or (phase if host_waits else ""), layer if host_waits else None


def _format_position(rank: Rank) -> str:
    """Return `by its device in attention of layer 1` or `in phase moe of layer 1 at model.py:12 in experts`."""
    if not _is_host_position(rank):
        assert rank.device is not None
        return f"by its device in {rank.device.position}"
    return _format_place(*get_position(rank)).strip()


def _format_step_place(phase: str, layer: int | None, *lines: str) -> str:
    """Return a place in brackets; `lines` are those of the source, innermost first."""
    source = " ← ".join(filter(None, lines))
    parts = [f"phase {phase}" if phase else "", f"layer {layer}" if layer is not None else "", source]
    return f" ({', '.join(filter(None, parts))})" if any(parts) else ""


def _find_behind(evidence: Evidence, groups: Mapping[str, Lines]) -> Finding | None:
    """Return the finding of case 3, from the ranks that each waiting rank waits for, or for groups that wait for each
    other.
    """
    by_rank = {rank.rank: rank for rank in evidence.ranks}
    waits: dict[int, CollectiveEvent] = {
        r: one for r, rank in by_rank.items() if (one := get_open_collective(rank)) and one.call
    }
    for_whom = {rank: _find_late_ranks(groups, one) - {rank} for rank, one in waits.items()}
    late = set().union(*for_whom.values()) - {wait.rank for wait in find_signal_waits(evidence)}
    unread = {r for r in late if r not in by_rank or not _has_progress(by_rank[r])}
    roots = {r for r in late - unread if not for_whom.get(r)}  # in no collective, or in one that all have reached
    if not late:
        return None
    if not roots:
        return _report_unread_ranks(waits, unread) if unread else _report_crossed_groups(waits, for_whom, late)
    waiting = sorted(r for r, whom in for_whom.items() if whom & roots)
    one = waits[waiting[0]]
    known = [by_rank[r] for r in sorted(roots)]
    ended = {rank.rank: rank.seen.ended for rank in known if rank.seen and rank.seen.ended}
    first = next((rank for rank in known if rank.rank not in ended), known[0])
    phase, layer, line = get_position(first)
    doing = "has ended" if ended and len(ended) == len(roots) else _describe_state(first)
    sentence = (
        f"{_describe_ranks(roots)} {doing}{_format_place(phase, layer, line)}; {_describe_ranks(waiting, 'waits', 'wait')} for it in "
        f"{one.known_call.description}, collective {one.number} of the group{_format_context(one)}"
    )
    why = [f"rank {r} ended: {how}." for r, how in ended.items()]
    why += [f"Of {_describe_ranks(unread)} no collectives were read."] if unread else []
    return Finding(
        kind="gone" if len(ended) == len(roots) else "behind",
        message=sentence,
        ranks=sorted(roots),
        waiting=waiting,
        phase=phase or one.phase,
        layer=layer if layer is not None else one.layer,
        collective=one.known_call.description,
        number=one.number,
        line=line,
        waiting_at=one.known_call.at,
        why=why + [_describe_process(rank) for rank in known if rank.seen and rank.rank not in ended],
    )


def _has_progress(rank: Rank) -> bool:
    """Return True if it is known which collectives the rank began, or that the rank has ended."""
    return rank.heartbeats is not None or rank.flight is not None or bool(rank.seen and rank.seen.ended)


def _report_unread_ranks(waits: Mapping[int, CollectiveEvent], unread: set[int]) -> Finding:
    """Return the finding for ranks that wait for ranks without any evidence of their collectives."""
    rank, one = next(iter(waits.items()))
    return Finding(
        kind="unknown",
        message=f"unknown: {_describe_ranks(waits, 'waits', 'wait')}, rank {rank} in {one.known_call.description}{_format_context(one)}, and of "
        f"{_describe_ranks(unread)} no collectives were read",
        waiting=sorted(waits),
        collective=one.known_call.description,
        number=one.number,
        waiting_at=one.known_call.at,
    )


def _report_crossed_groups(
    waits: Mapping[int, CollectiveEvent], for_whom: Mapping[int, set[int]], late: set[int]
) -> Finding:
    """Return the finding for ranks of several groups that wait for each other."""
    ranks = sorted(r for r in late if for_whom.get(r))
    parts = []
    for rank in ranks:
        one = waits[rank]
        parts.append(
            f"rank {rank} is in {one.known_call.description}{_format_context(one)} and waits for {_describe_ranks(for_whom[rank])}"
        )
    one = waits[ranks[0]]
    return Finding(
        kind="apart",
        message="; ".join(parts),
        ranks=ranks,
        waiting=ranks,
        phase=one.phase,
        layer=one.layer,
        collective=one.known_call.description,
        number=one.number,
        line=one.known_call.at,
        why=["They began collectives of different groups in different orders."],
    )


def _find_stopped(evidence: Evidence) -> Finding | None:
    """Return the finding of case 4 for ranks that were stopped: no other evidence explains a hang without them."""
    stopped = {rank.rank: rank for rank in evidence.ranks if rank.seen is not None and rank.seen.state == STOPPED}
    if not stopped:
        return None
    phase, layer, line = get_position(stopped[min(stopped)])
    pids = " ".join(str(rank.seen.pid) for rank in stopped.values() if rank.seen is not None)
    return Finding(
        kind="stopped",
        message=f"{_describe_ranks(stopped, 'was', 'were')} stopped by a signal{_format_place(phase, layer, line)} (state T)",
        ranks=sorted(stopped),
        waiting=sorted({rank.rank for rank in evidence.ranks} - set(stopped)),
        phase=phase,
        layer=layer,
        line=line,
        why=[f"Ctrl-Z, a debugger or `kill -STOP` stops a process; `kill -CONT {pids}` continues it."],
    )


def _find_blocked(evidence: Evidence, found: Finding | None) -> Finding | None:
    """Return the finding of case 4: ranks blocked in the operating system's kernel.

    If `found` names such a rank, return it with this reason added; if it names only others, return None.
    """
    blocked = {
        rank.rank: rank.seen.wchan for rank in evidence.ranks if rank.seen is not None and rank.seen.uninterruptible
    }
    if not blocked or (found is not None and not set(found.ranks) & set(blocked)):
        return None
    names = format_list(sorted(set(filter(None, blocked.values()))))
    where = f" in {names}" if names else ""
    verb = "waits" if len(blocked) == 1 else "wait"
    why = f"{_describe_ranks(blocked)} {verb} in the kernel{where}, where no signal reaches a process (state D)."
    if found is not None:
        return msgspec.structs.replace(found, why=[*found.why, why])
    return Finding(
        kind="kernel",
        message=f"{_describe_ranks(blocked)} {verb} in the kernel{where}, for a disk, a network file system or a driver that does not answer",
        ranks=sorted(blocked),
        waiting=sorted({rank.rank for rank in evidence.ranks} - set(blocked)),
        why=[why],
    )


def _find_stalled_collective(evidence: Evidence, groups: Mapping[str, Lines]) -> Finding | None:
    """Return the finding of case 5."""
    waits = {rank.rank: one for rank in evidence.ranks if (one := get_open_collective(rank)) and one.call}
    if not waits:
        return None
    one = next(iter(waits.values()))
    expected = set(parse_ranks(one.known_call.ranks)) or set(groups[one.known_call.group])
    same = {r for r, m in waits.items() if m.call and (m.call.group, m.number) == (one.known_call.group, one.number)}
    if same != expected:
        return None
    return Finding(
        kind="together",
        message=f"{_describe_ranks(same)} are all in {one.known_call.description}, collective {one.number} of the group{_format_context(one)}, and none is behind",
        waiting=sorted(same),
        phase=one.phase,
        layer=one.layer,
        collective=one.known_call.description,
        number=one.number,
        waiting_at=one.known_call.at,
        why=[
            "If they stay there, the collective makes no progress: the network, a peer's memory, or on GPUs an earlier kernel is stuck."
        ],
    )


def _find_device_stall(evidence: Evidence) -> Finding | None:
    """Return the finding of case 6 if hosts only launched steps on devices that mark their progress."""
    known = {rank.rank: rank.device for rank in evidence.ranks if rank.device is not None and rank.device.norm}
    handed = [rank.heartbeats for rank in evidence.ranks if rank.heartbeats is not None and not rank.heartbeats.waits]
    if not known or not len(known) == len(handed) == len(evidence.ranks):
        return None
    norms = sorted({device.norm for device in known.values()})
    by_norm = [[r for r, d in known.items() if d.norm == n] for n in norms]
    places = ", ".join(f"{_describe_ranks(ranks)} in {known[ranks[0]].position}" for ranks in by_norm)
    same_norm, far = len(norms) == 1, norms[-1] - norms[0] > MAX_NORM_GAP
    late = [] if same_norm or far else by_norm[0]
    at = None if far else known[by_norm[0][0]]
    why = ["A position is the norm that a device began last. Kernels between two norms cannot be distinguished."]
    if same_norm and len(known) > 1:
        why.append("None is behind the others.")
    if far:
        why.append("They are too far apart to be in one step: who is behind is not known.")
    return Finding(
        kind="device",
        message=f"devices stand still in a step launched as {handed[0].step or 'nothing'}: {places}",
        ranks=late,
        waiting=[r for r in known if late and r not in late],
        layer=at.layer if at else None,
        phase=at.half if at else "",
        why=why,
    )


def _find_by_stacks(evidence: Evidence) -> Finding | None:
    """Return the finding of case 3 from stacks alone: some ranks are in a waiting function of torch, and others are
    not.
    """
    ranks = dict(enumerate(evidence.ranks))
    stacks = {r: rank.frames for r, rank in ranks.items() if rank.frames}
    waits = {r: call for r, frames in stacks.items() if (call := _find_waiting_call(frames)) is not None}
    out = [r for r in stacks if r not in waits]
    if (
        any(get_collectives(rank) for rank in evidence.ranks)
        or len(stacks) < 2  # noqa: PLR2004
        or not waits
        or len(out) * 2 >= len(stacks)
    ):
        return None
    if not out:
        return _find_odd_line(ranks, waits)
    names = ", ".join(ranks[r].name for r in out)
    spot = _find_own_frame(stacks[out[0]])
    wait = next(iter(waits.values()))
    return Finding(
        kind="behind",
        message=f"{names} {'is' if len(out) == 1 else 'are'} at {spot.location}, and the other {len(waits)} wait in {wait[0].function}, "
        f"at {wait[1].location}",
        ranks=_list_rank_numbers(ranks, out),
        waiting=_list_rank_numbers(ranks, waits),
        collective=wait[0].function,
        line=spot.location,
        waiting_at=wait[1].location,
        why=["By Python stacks alone: which collective it is, and whether it is the same one, they do not say."],
    )


def _list_rank_numbers(ranks: Mapping[int, Rank], some: Iterable[int]) -> list[int]:
    """Return the numbers of those ranks that have one."""
    return [ranks[r].rank for r in some if ranks[r].rank != NO_RANK]


def _find_odd_line(ranks: Mapping[int, Rank], waits: Mapping[int, tuple[Frame, Frame]]) -> Finding | None:
    """Return the finding if all ranks wait, and a minority of them at another line."""
    lines: dict[str, list[int]] = collections.defaultdict(list)
    for r, (call, own) in waits.items():
        lines[f"{call.function}, at {own.location}"].append(r)
    common, most = max(lines.items(), key=lambda line: len(line[1]))
    few = [r for r in waits if r not in most]
    if not few or len(few) * 2 >= len(waits):
        return None
    at = next(line for line, of in lines.items() if few[0] in of)
    return Finding(
        kind="order",
        message=f"{', '.join(ranks[r].name for r in few)} waits in {at}, and the other {len(most)} in {common}",
        ranks=_list_rank_numbers(ranks, few),
        waiting=_list_rank_numbers(ranks, waits),
        collective=common,
        line=at,
        waiting_at=common,
        why=["By Python stacks alone: shapes and numbers of collectives they do not say."],
    )


def _report_outside(evidence: Evidence) -> Finding:
    """Return the finding for ranks outside collectives (case 6), or `unknown`."""
    placed = [rank for rank in evidence.ranks if rank.heartbeats is not None or rank.frames]
    parts = [f"{rank.name} {_describe_state(rank)}{_format_place(*get_position(rank))}" for rank in placed[:8]]
    if (
        placed
        and all(rank.heartbeats is not None for rank in placed)
        and not any(get_open_collective(rank) for rank in placed)
    ):
        on_device = [rank for rank in placed if rank.heartbeats is not None and not rank.heartbeats.waits]
        why = ["No rank waits in a collective."]
        if on_device:
            why = ["The host does not see what the device does inside a step, and torch's flight recorder is empty."]
        return Finding(kind="unknown" if on_device else "outside", message="; ".join(parts), why=why)
    summary = "what was read does not tell who keeps whom waiting"
    unnamed = any(rank.flight is not None and rank.rank == NO_RANK for rank in evidence.ranks)
    why = [NAME_THEM] if unnamed else []
    return Finding(kind="unknown", message=". ".join(filter(None, (summary, "; ".join(parts)))), why=why)


def _find_waiting_call(frames: Sequence[Frame]) -> tuple[Frame, Frame] | None:
    """Return (the outermost waiting function of torch, its caller)."""
    for call, above in reversed([*itertools.pairwise(frames)]):
        if call.function in WAITS and any(part in call.file for part in WAITS_IN):
            return call, above
    return None


def _find_own_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of dcpbench, else the innermost known frame."""
    return next((f for f in frames if OURS in f.file), next((f for f in frames if f.line is not None), frames[0]))


def get_position(rank: Rank) -> tuple[str, int | None, str]:
    """Return the position of a rank as (phase, layer, line)."""
    heartbeats = rank.heartbeats
    line = ""
    if rank.frames:
        inner = next((f for f in rank.frames if f.line is not None), rank.frames[0])
        own = _find_own_frame(rank.frames)
        line = inner.location if inner == own else f"{inner.location}, called at {own.location}"
    return (heartbeats.phase, heartbeats.layer, line) if heartbeats else ("", None, line)


def _describe_state(rank: Rank) -> str:
    if rank.heartbeats is not None and rank.heartbeats.last is not None and rank.heartbeats.last.state == RAISED:
        return "has left a collective with an error and is"
    return rank.pace or "is"


def _describe_process(rank: Rank) -> str:
    seen = rank.seen
    assert seen is not None
    if seen.cpu is None:
        return f"rank {rank.rank}: process {seen.pid} was in state {seen.state or 'unknown'}."
    return f"rank {rank.rank}: its main thread used {seen.cpu:.0%} of a CPU."


def _format_place(phase: str, layer: int | None, line: str) -> str:
    parts = [
        f"in phase {phase}" if phase else "",
        f"of layer {layer}" if layer is not None else "",
        f"at {line}" if line else "",
    ]
    return "".join(f" {part}" for part in parts if part) if any(parts) else " at an unknown position"


def _format_context(one: CollectiveEvent) -> str:
    return _format_step_place(one.phase, one.layer, one.known_call.at, one.known_call.above)


def _describe_ranks(ranks: Iterable[int], of_one: str = "", of_many: str = "") -> str:
    """Return `rank 3` or `ranks 0-3,6`, followed by the verb of one rank or of many if they are given."""
    known = sorted(ranks)
    text, verb = (f"rank {known[0]}", of_one) if len(known) == 1 else (f"ranks {format_ranks(known)}", of_many)
    return f"{text} {verb}".rstrip()
