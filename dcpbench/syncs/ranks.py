"""Ranks of a distributed program: which rank a trace file belongs to, and which ranks have no trace.

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

    from dcpbench.syncs.model import TraceSummary

_FRONT_END = re.compile(r"(?:^|[._-])async_llm(?:[._-]|$)")
_RANK = re.compile(r"(?<![a-zA-Z])rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_PARALLEL = re.compile(r"(?<![a-zA-Z])(dp|pp|tp|ep)[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_SGLANG = re.compile(r"-TP-\d+(?:-(?:DP|PP|EP)-\d+)*(?:-\w+)?\.trace\.json")


class FileRank(NamedTuple):
    """Rank that a file name gives."""

    rank: int | None = None
    replica: str = ""
    """Group in which `rank` counts, such as `DP 1` or `DP 0, PP 1`; empty where the name gives none."""


def parse_file_name(name: str) -> FileRank:
    """Return the rank in a trace's file name: `rankN`, else the tensor-parallel rank that SGLang writes."""
    ranks = _RANK.findall(name)
    parallel = {key.lower(): int(value) for key, value in _PARALLEL.findall(name)}
    if ranks:
        return FileRank(int(ranks[-1]), _name_groups(parallel, "dp"))
    if _SGLANG.search(name):
        return FileRank(parallel["tp"], _name_groups(parallel, "dp", "pp"))
    return FileRank()


def _name_groups(parallel: dict[str, int], *keys: str) -> str:
    return ", ".join(f"{key.upper()} {parallel[key]}" for key in keys if key in parallel)


def is_front_end(name: str) -> bool:
    """Return whether a file name is that of vLLM's front end, which records the CPU only."""
    return bool(_FRONT_END.search(name))


class MissingRanks(NamedTuple):
    """Ranks of one group that have no trace."""

    ranks: tuple[int, ...]
    of: int
    """Number of ranks that the group has at least."""
    replica: str = ""


def find_missing(traces: Sequence[TraceSummary], *, all_ranks: bool = False) -> list[MissingRanks]:
    """Return the ranks without a trace.

    One rank's trace alone may be what the user wants to see, so it asks for no others, unless `all_ranks` is set or a
    front end's trace shows that a server wrote everything that is there.
    """
    workers = [trace for trace in traces if trace.rank is not None and not trace.front_end]
    whole = all_ranks or any(trace.front_end for trace in traces)
    if not whole and len({(trace.replica, trace.rank) for trace in workers}) < 2:  # noqa: PLR2004 -- a single rank
        return []
    groups: dict[str, set[int]] = {}
    for trace in workers:
        groups.setdefault(trace.replica, set()).add(trace.rank or 0)
    found = set().union(*groups.values())
    size = max([*(rank + 1 for rank in found), *(trace.world_size or 0 for trace in workers)], default=0)
    if len(found) == sum(map(len, groups.values())):  # each rank is in one group: ranks count over all groups
        groups = {"": found}
    return [
        MissingRanks(tuple(gaps), size, replica)
        for replica, ranks in groups.items()
        if (gaps := _find_gaps(ranks, size))
    ]


def _find_gaps(ranks: Iterable[int], size: int) -> list[int]:
    return sorted(set(range(size)).difference(ranks))
