"""Parse dumps that other tools write of a hanging program: `py-spy dump`, Python's faulthandler, torch's flight
recorder.

The flight recorder is read as JSON. No file is trusted: pickles are never loaded, and a file in another format raises
RecordsError with the command that produces the expected one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.hangs.heartbeats import INSIDE, RETURNED, Call, CollectiveEvent, format_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MAX_BYTES = 256 << 20
PROCESS = re.compile(r"^Process (\d+): (.*)$")
SPY_THREAD = re.compile(r"^Thread (\S+)(?: \(([^)]*)\))?(?:: \"(.*)\")?\s*$")
SPY_FRAME = re.compile(r"^ {4}(.+?) \((.+?)(?::(\d+))?\)\s*$")
FAULT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
FAULT_FRAME = re.compile(r'^ {2}File "(.*)", line (\d+) in (.*)$')
PICKLE = (b"\x80", b"PK\x03\x04")  # first bytes of a pickle and of a file written by torch.save
NAMED = re.compile(r"rank[-_ ]?(\d+)|[-_.](\d+)(?:\.[a-z]+)*$", re.IGNORECASE)
DUMP_FILE_NAME = re.compile(  # names of files that are meant to be dumps
    r"rank[-_ ]?\d|^(?:dump|flight|nccl[-_]trace|py-spy|stacks?)[-_.]", re.IGNORECASE
)
NO_DUMP = (msgspec.DecodeError, AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""Exceptions raised while decoding JSON that has another structure."""
NO_RANK = -1  # rank of a process for which no rank number is known


class Frame(msgspec.Struct, frozen=True):
    """A call of a stack."""

    function: str
    file: str
    line: int | None

    @property
    def location(self) -> str:
        """Return the frame as `engine/model.py:12 in step`."""
        place = "/".join(self.file.strip("/").split("/")[-3:])
        return f"{place}{'' if self.line is None else f':{self.line}'} in {self.function}"


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """Stack of a thread, innermost call first."""

    rank: int
    process: str = ""
    name: str = ""
    active: bool | None = None  # True if the thread was running on a CPU according to py-spy; None if unknown
    frames: tuple[Frame, ...]

    @property
    def is_main(self) -> bool:
        """Return True if this is the main thread of its program, which alone executes module-level code."""
        return self.name == "MainThread" or any(frame.function == "<module>" for frame in self.frames)


def parse_rank(path: Path) -> int:
    """Return the rank in a file's name, `stacks-3.txt` or `nccl_trace_rank_3`; NO_RANK without one."""
    found = NAMED.search(path.name)
    return int(found[1] or found[2]) if found else NO_RANK


def read_text(path: Path) -> str:
    """Return the text of a file. Raise RecordsError if it cannot be read."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordsError(f"{path} has more than {MAX_BYTES >> 20} MiB; name a smaller dump.")
        data = path.read_bytes()
    except OSError as e:
        raise RecordsError(f"{path} cannot be read: {e.strerror}.") from e
    if data.startswith(PICKLE):
        raise RecordsError(
            f"{path} is a pickle, and reading one may run whatever it holds; have torch write JSON instead: "
            "torch._C._distributed_c10d._dump_fr_trace_json()."
        )
    return data.decode(errors="replace")


def parse_threads(text: str, rank: int = NO_RANK) -> list[Thread]:
    """Return all threads in a dump of py-spy, of one process or several, or of faulthandler; none for another text."""
    found: list[Thread] = []
    process = name = ""
    active: bool | None = None
    headed = False
    frames: list[Frame] = []
    for line in [*text.splitlines(), "Process 0: "]:
        named, spied, thread = PROCESS.match(line), SPY_THREAD.match(line), FAULT_THREAD.match(line)
        if named or spied or thread:
            if frames:
                found.append(Thread(rank=rank, process=process, name=name, active=active, frames=tuple(frames)))
            frames, headed = [], named is None
        if named:
            process = f"{named[1]}: {named[2]}"
        elif thread:
            name, active = "", None
        elif spied:
            status = spied[2] or ""
            name, active = spied[3] or "", True if "active" in status else False if "idle" in status else None
        elif headed and (frame := FAULT_FRAME.match(line)):
            frames.append(Frame(frame[3], frame[1], int(frame[2])))
        elif headed and (frame := SPY_FRAME.match(line)):
            frames.append(Frame(frame[1], frame[2], int(frame[3]) if frame[3] else None))
    return found


def parse_flight(text: str, path: Path, named: int = NO_RANK) -> tuple[int, list[CollectiveEvent]]:
    """Parse the JSON of a flight recorder; return (rank, its last collectives, oldest first).

    `named` is the rank to use if the JSON has none. A collective has ended if torch has found so: for NCCL by querying
    the device, so collectives that the watchdog has not checked yet count as not ended. Raise RecordsError if the text
    is not the JSON of a flight recorder.
    """
    try:
        trace = msgspec.json.decode(text)
        entries, groups = trace["entries"], trace.get("pg_config") or {}
        rank = trace["rank"] if isinstance(trace.get("rank"), int) else named
        ranks = {str(name): _convert_ranks(of.get("ranks")) for name, of in groups.items()}
        collectives = [_convert_entry(order, e, ranks) for order, e in enumerate(entries, 1) if not e.get("is_p2p")]
    except NO_DUMP as e:
        raise RecordsError(f"{path} is no JSON of torch's flight recorder ({type(e).__name__}: {str(e)[:100]}).") from e
    return rank, collectives


def _convert_entry(order: int, e: dict[str, Any], ranks: dict[str, str]) -> CollectiveEvent:
    name = str(e["process_group"][0])
    shape = tuple(int(n) for n in next(iter(e["input_sizes"]), ()))
    dtype = str(next(iter(e["input_dtypes"]), "")).lower()
    at = next((f"{f.get('filename')}:{f.get('line')} in {f.get('name')}" for f in e.get("frames") or []), "")
    op = str(e["profiling_name"]).rpartition(":")[2]
    done = bool(e.get("retired")) or e.get("state") == "completed"
    return CollectiveEvent(
        order=order,
        number=int(e["collective_seq_id"]),
        call=Call(op, dtype, shape, name, ranks.get(name, ranks.get("", "")), at),
        phase="",
        layer=None,
        state=RETURNED if done else INSIDE,
        began_ns=int(e.get("time_created_ns") or 0),
    )


def _convert_ranks(given: object) -> str:
    """Return a list of ranks, given as `[0, 1]` or as a list, in the form of `format_ranks`."""
    numbers: Iterable[Any] = (
        re.findall(r"\d+", given) if isinstance(given, str) else given if isinstance(given, list) else []
    )
    return format_ranks(int(n) for n in numbers)
