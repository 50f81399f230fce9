"""Identify ranks of a distributed program: which rank a trace file belongs to, and which ranks have no trace.

File names: vLLM writes `dp0_pp0_tp1_dcp0_ep0_rank1.<ns>.pt.trace.json.gz` for a worker and `<host>_<pid>.async_llm.<ns>…` for its front end,
SGLang `<id>-TP-1[-DP-0][-PP-0][-EP-0][-EXTEND|-DECODE].trace.json.gz` (sources: `get_worker_rank_suffix` of vllm/distributed/utils.py,
vllm/v1/engine/async_llm.py, sglang/srt/managers/scheduler_components/profiler_manager.py). A rank in the trace's own
`distributedInfo`, which torch writes, has precedence.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dcpbench.syncs.sync_report import TraceSummary

_FRONT_END = re.compile(r"(?:^|[._-])async_llm(?:[._-]|$)")
_RANK = re.compile(r"(?<![a-zA-Z])rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_PARALLEL = re.compile(r"(?<![a-zA-Z])(dp|pp|tp|ep)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_SGLANG = re.compile(r"-TP-\d+(?:-(?:DP|PP|EP)-\d+)*(?:-\w+)?\.trace\.json")


class Group(NamedTuple):
    """Identify a part of a server in which ranks count from 0."""

    dp: int | None = None  # data-parallel rank
    pp: int | None = None  # pipeline-parallel rank


class FileRank(NamedTuple):
    """Rank that a file name gives."""

    rank: int | None = None
    group: Group = Group()


def parse_file_name(name: str) -> FileRank:
    """Return the rank in a trace's file name: `rankN`, else the tensor-parallel rank that SGLang writes."""
    ranks = _RANK.findall(name)
    parallel = {key.lower(): int(value) for key, value in _PARALLEL.findall(name)}
    if ranks:
        return FileRank(int(ranks[-1]), Group(parallel.get("dp")))
    if _SGLANG.search(name):
        return FileRank(parallel["tp"], Group(parallel.get("dp"), parallel.get("pp")))
    return FileRank()


def is_front_end(name: str) -> bool:
    """Return True if a file name is that of vLLM's front end, which records the CPU only."""
    return bool(_FRONT_END.search(name))


class MissingRanks(NamedTuple):
    """Hold the ranks of one group that have no trace."""

    ranks: tuple[int, ...]
    group_size: int  # number of ranks that the group has at least
    group: Group = Group()


def find_missing(traces: Sequence[TraceSummary], *, all_ranks: bool = False) -> list[MissingRanks]:
    """Return the ranks without a trace.

    One rank's trace alone may be what the user wants to see, so it asks for no others, unless `all_ranks` is set or a
    front end's trace shows that a server wrote everything that is there.
    """
    workers = [trace for trace in traces if trace.rank is not None and not trace.front_end]
    found: dict[Group, set[int]] = {}
    for trace in workers:
        found.setdefault(Group(trace.dp_rank, trace.pp_rank), set()).add(trace.rank or 0)
    number = sum(map(len, found.values()))
    if number < 2 and not all_ranks and not any(trace.front_end for trace in traces):  # noqa: PLR2004 -- one rank alone
        return []
    every = set().union(*found.values())
    if len(every) == number:  # each rank is in one group: ranks count over all groups, as in SGLang's attention DP
        found = {Group(): every}
    size = max([*(rank + 1 for rank in every), *(trace.world_size or 0 for trace in workers)], default=0)
    gaps = ((group, set(range(size)) - found.get(group, set())) for group in _expand_groups(found))
    return [MissingRanks(tuple(sorted(ranks)), size, group) for group, ranks in gaps if ranks]


def _expand_groups(found: Iterable[Group]) -> list[Group]:
    """Return the groups from the first to the last, those without any trace as well."""
    dps, pps = {group.dp for group in found}, {group.pp for group in found}
    return [Group(dp, pp) for dp in _expand_ranks(dps) for pp in _expand_ranks(pps)]


def _expand_ranks(ranks: set[int | None]) -> list[int | None]:
    known = [rank for rank in ranks if rank is not None]
    return [*([None] if None in ranks else []), *(range(max(known) + 1) if known else ())]
