"""Define the tables, numbers and names of an nsys export, as NVIDIA documents them (sources: the package's docstring)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from dcpbench.syncs.traces.blocking import API_NAMES, get_wait_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

Block = dict[str, Any]  # columns of some rows: int64 arrays, and lists for texts, which may be UTF-8, and for payloads
ABSENT = int(np.iinfo(np.int64).min)  # integer in a column that a row or the whole table lacks
BLOCK_ROWS = 1 << 15

CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"  # whole CUDA graphs, which nsys records by default instead of kernels
SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
RANGES = "NVTX_EVENTS"
STRINGS = "StringIds"
THREAD_NAMES = "ThreadNames"
CHAINS = "CUDA_CALLCHAINS"
DIAGNOSTICS = "DIAGNOSTIC_EVENT"
INCOMPLETE = "Not all CUDA events might have been collected"  # diagnostic of nsys, also of recordings that lack nothing
_OF_GPU = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid")
COLUMNS: dict[str, tuple[str, ...]] = {  # integer columns that are read of each table
    CALLS: ("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "callchainId"),
    KERNELS: (*_OF_GPU, "demangledName"),
    COPIES: (*_OF_GPU, "bytes", "copyKind", "srcKind", "dstKind"),
    FILLS: (*_OF_GPU, "bytes", "memKind"),
    GRAPHS: _OF_GPU,
    SYNCS: ("start", "end", "correlationId", "globalPid", "syncType", "eventId"),
    RANGES: ("start", "end", "eventType", "globalTid", "domainId", "textId"),
    THREAD_NAMES: ("globalTid", "nameId"),
    CHAINS: ("id", "symbol", "module", "stackDepth"),
    DIAGNOSTICS: ("globalPid",),
}
EVENTS = (CALLS, KERNELS, COPIES, FILLS, GRAPHS, SYNCS, RANGES)  # an nsys export has at least one of these tables

RUNTIME, DRIVER, CUDA_API, BACKTRACE = 0, 1, 26, 67  # classes in CALLS; BACKTRACE repeats a call with its chain
OTHER_CLASSES = (13, 28, 29, 33, 34, 35, 36, 77)  # classes in CALLS of EGL, cuDNN, cuBLAS and graph nodes
MARK, PUSH_POP, START_END, DOMAIN = 34, 59, 60, 75  # types of NVTX events
OTHER_NVTX = (32, 33, 35, 36, 37, 38, 39, 76)
SAMPLING_DOMAIN = "Python Periodic Sampling"
OWN_DOMAINS = (SAMPLING_DOMAIN, "GIL Trace")  # NVTX domains of nsys itself
COPY_KINDS = ("Unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")  # by number
MIGRATIONS = (11, 12, 13)  # directions of migrations of unified memory, which no call makes
MEMORY_KINDS = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
SYNC_TYPES = ("Unknown", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")  # by number, as in Kineto
STREAM_WAIT, STREAM_SYNC = 2, 3
NO_EVENT = 0xFFFFFFFF  # event of a wait for a stream, which some versions' exports call STREAM_WAIT
PROCESS_SHIFT = 24  # bits below the process in a globalTid 0xHHVVPPPPPPTTTTTT (hardware, VM, process, thread)
ID_MASK = 0xFFFFFF

_VERSION = re.compile(r"_v\d{4,5}$")
_SUFFIXED = re.compile(r"^((?:cuda|cu)[A-Z]\w*?)_")
_TORCH_SUFFIX = re.compile(
    r"(?:, (?:seq|op_id) = -?\d+)+(?:, sizes = .*|, input_op_ids = .*)?$|, (?:sizes|input_op_ids) = .*$", re.DOTALL
)
_OPERATOR = re.compile(r"^[A-Za-z_]\w*::\w")


class Export(Protocol):
    """Give the tables of an export, in blocks."""

    def read_blocks(self, table: str, texts: Sequence[str] = ()) -> Iterator[Block]:
        """Yield the rows of a table, its COLUMNS and columns of texts or bytes; nothing if it is not there."""
        ...

    def read_strings(self, ids: Ints) -> dict[int, str]:
        """Return the strings with these ids, as far as they are there."""
        ...


def normalise_call(name: str) -> str:
    """Return the name of a call as Kineto writes it: without the version of the runtime, `cudaMemcpyAsync_v3020`."""
    return _VERSION.sub("", name)


def is_damaged_call(name: str) -> bool:
    """Return whether a name is that of a relevant call with a suffix that no version of CUDA has."""
    found = _SUFFIXED.match(name)
    return found is not None and found[1] in API_NAMES and get_wait_kind(name) is None


def parse_range(text: str) -> tuple[str, Literal["ops", "ranges"]]:
    """Return the name of an NVTX range and whether it is an operator: torch's emit_nvtx writes `aten::mm, seq = 1, op_id = 7`."""
    name = _TORCH_SUFFIX.sub("", text)
    return name, "ops" if _OPERATOR.match(name) else "ranges"


def format_copy(kind: int, source: int, target: int) -> str:
    """Return the name of a copy as Kineto writes it; empty for numbers that mean nothing."""
    known = len(MEMORY_KINDS)
    source, target = (known - 1 if k == ABSENT else k for k in (source, target))
    if not (0 <= kind < len(COPY_KINDS) and 0 <= source < known and 0 <= target < known):
        return ""
    return f"Memcpy {COPY_KINDS[kind]} ({MEMORY_KINDS[source]} -> {MEMORY_KINDS[target]})"


def format_fill(kind: int) -> str:
    """Return the name of a fill as Kineto writes it."""
    return f"Memset ({MEMORY_KINDS[kind] if 0 <= kind < len(MEMORY_KINDS) else MEMORY_KINDS[-1]})"


def format_sync(kind: int) -> str:
    """Return the name of a synchronisation as Kineto writes it; empty for a number that means nothing."""
    return SYNC_TYPES[kind] if 0 <= kind < len(SYNC_TYPES) else ""


def get_process(ids: Ints) -> Ints:
    """Return the processes of globalTids or globalPids; ABSENT where there is none."""
    return np.where(ids == ABSENT, ABSENT, ids >> PROCESS_SHIFT)


def make_ints(values: Sequence[object]) -> tuple[Ints, int]:
    """Return an array of integers, ABSENT for None and for what is no integer, and the number of the latter."""
    try:
        return np.array([ABSENT if v is None else v for v in values], np.int64), 0
    except (TypeError, ValueError, OverflowError):
        fine = [v if isinstance(v, int) and -(1 << 62) < v < 1 << 62 else ABSENT for v in values]
        return np.array(fine, np.int64), sum(v is not None and f == ABSENT for v, f in zip(values, fine, strict=True))
