"""Evidence about the ranks of a hanging job, read from a folder or from dump files of any program.

heartbeats-R.bin            see heartbeats.py
flight-R.json               torch's flight recorder
stacks-R.txt, py-spy-R.txt  Python stacks, by faulthandler and by py-spy
ranks.json                  state of each process, one ProcessState per process
device-R.json               last norm that the rank's device began, a Device
signals-R.json              signal counters in the rank's memory, a Signals
log-R.txt                   last lines of the rank's log
gpus.txt, nccl-ras.txt      reports of nvidia-smi and NCCL about the machine
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.errors import RecordsError
from dcpbench.hangs import dumps, heartbeats
from dcpbench.hangs.dumps import NO_RANK
from dcpbench.hangs.signal_waits import Signals
from dcpbench.records.lines import UNREADABLE
from dcpbench.show.text import make_unique_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.hangs.dumps import Frame, Thread
    from dcpbench.hangs.heartbeats import CollectiveEvent, RankHeartbeats

SEEN_FILE, GPUS_FILE, NCCL_FILE = "ranks.json", "gpus.txt", "nccl-ras.txt"
BUSY, IDLE = 0.7, 0.2  # share of a CPU from which on a rank spins, and up to which it sleeps


Read = TypeVar("Read")


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process when it was looked at."""

    rank: int
    pid: int | None = None
    state: str = ""  # state letter of proc(5): R, S, D, T or Z; empty if the process had ended
    cpu: float | None = None  # CPU time of its main thread over the time of looking
    uninterruptible: bool = False  # True if in uninterruptible sleep (state D) at the observation's beginning and end
    wchan: str = ""  # kernel function in which the process waits (wchan of proc(5)), if known
    ended: str = ""  # how the process ended; empty if it had not


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a rank's device within a step."""

    norm: int  # last norm begun: 2 l + 1 before, 2 l + 2 after attention of layer l; 0: none

    @property
    def layer(self) -> int:
        """Return the layer that the device is in, or the number of layers if it is past the last one."""
        return (self.norm - 1) // 2

    @property
    def half(self) -> str:
        """Return `attention`, which includes the projections and reductions around it, or `mlp`."""
        return "attention" if self.norm % 2 else "mlp"

    @property
    def position(self) -> str:
        """Return the position as `attention of layer 3`; past the last norm of a step it is the attention of one more
        layer.
        """
        return f"{self.half} of layer {self.layer}"


@dataclasses.dataclass
class Rank:
    """Everything known about one rank, or about one process of another program."""

    rank: int
    name: str
    heartbeats: RankHeartbeats | None = None
    flight: list[CollectiveEvent] | None = None
    device: Device | None = None
    signals: Signals | None = None
    threads: list[Thread] = dataclasses.field(default_factory=list)
    seen: ProcessState | None = None
    log: str = ""

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the stack of the main thread, innermost frame first.

        If no thread is known to be the main one, return the stack of the only thread, or an empty tuple if there are
        several.
        """
        main = next((t for t in self.threads if t.is_main), None)
        return (main or self.threads[0]).frames if main or len(self.threads) == 1 else ()

    @property
    def pace(self) -> str:
        """Return `sleeps` or `spins` by the CPU time of the process, or an empty string if neither can be concluded."""
        cpu = self.seen.cpu if self.seen else None
        return "" if cpu is None else "spins" if cpu >= BUSY else "sleeps" if cpu <= IDLE else ""


@dataclasses.dataclass
class Evidence:
    """All files that were read, grouped by rank, and the reasons why others could not be read."""

    ranks: list[Rank] = dataclasses.field(default_factory=list)
    read: list[str] = dataclasses.field(default_factory=list)
    unread: list[str] = dataclasses.field(default_factory=list)  # one sentence per file that could not be read
    unknown: list[int] = dataclasses.field(default_factory=list)  # ranks that have files of which none could be read
    gpus: str = ""
    nccl: str = ""

    def get_rank(self, rank: int, name: str = "") -> Rank:
        """Return the rank with this number, or the process with this name if it has no rank."""
        found = next((r for r in self.ranks if r.rank == rank and (rank != NO_RANK or r.name == name)), None)
        if found is None:
            found = Rank(rank, f"rank {rank}" if rank != NO_RANK else name)
            self.ranks.append(found)
        return found


def read_evidence(paths: Sequence[Path]) -> Evidence:
    """Read evidence from `paths`: files, and all files in folders. Raise RecordsError if no file could be read."""
    found = Evidence()
    typed = {os.path.realpath(path): path for path in paths if not path.is_dir()}
    inside = [path for folder in paths if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_file()]
    named = typed | {os.path.realpath(path): path for path in inside}
    missed = []
    for path, name in make_unique_names([*named.values()]).items():
        try:
            if _read_file(found, path, name):
                found.read.append(name)
            elif os.path.realpath(path) in typed or dumps.DUMP_FILE_NAME.search(path.name):
                found.unread.append(f"{path} is no dump of py-spy or faulthandler, and no JSON of the flight recorder.")
                missed.append(dumps.parse_rank(path))
        except RecordsError as e:
            found.unread.append(str(e))
            missed.append(dumps.parse_rank(path))
    known = {rank.rank for rank in found.ranks}
    if NO_RANK not in known:  # otherwise numbers in names may be process ids
        found.unknown = sorted({*missed} - known - {NO_RANK})
    found.ranks.sort(key=lambda r: (r.rank == NO_RANK, r.rank, r.name))
    if not found.ranks:
        why = " ".join(found.unread[:3])
        raise RecordsError(
            f"{', '.join(map(str, paths))}: nothing there says where a rank was. {why}".rstrip()
            + " Name the folder of a run with a point that hung, or dumps of py-spy or of torch's flight recorder."
        )
    return found


def _read_file(found: Evidence, path: Path, called: str) -> bool:
    """Read one file by its name or content into `found`; return True if its kind is known.

    Dumps with the same file name come from several hosts, so the number in such a name is local to its host.
    """
    if path.suffix == ".bin":
        read = heartbeats.read_heartbeats(path)
        found.get_rank(read.rank).heartbeats = read
        return True
    for beginning, take in OURS.items():
        if path.name.startswith(beginning) and path.suffix == ".json":
            take(found, path)
            return True
    if path.name.startswith("log-"):
        found.get_rank(dumps.parse_rank(path), path.name).log = dumps.read_text(path)
        return True
    if path.name in (GPUS_FILE, NCCL_FILE):
        setattr(found, "gpus" if path.name == GPUS_FILE else "nccl", dumps.read_text(path))
        return True
    if path.suffix == ".html" or path.name == "finding.json":
        return False
    text = dumps.read_text(path)
    named = dumps.parse_rank(path) if called == path.name else NO_RANK
    if text.lstrip().startswith("{") and '"entries"' in text:
        _add_flight(found, *dumps.parse_flight(text, path, named), path, called)
        return True
    threads = dumps.parse_threads(text, named)
    for process in dict.fromkeys(t.process for t in threads):
        pid = process.partition(":")[0]
        name = f"process {pid} ({called})" if process else called
        rank = named
        if str(rank) == pid or len({t.process for t in threads}) > 1:  # a file may be named by its process, too
            rank = NO_RANK
        of = found.get_rank(rank, name)
        of.threads = of.threads or [t for t in threads if t.process == process]
    return bool(threads)


def _add_flight(found: Evidence, rank: int, collectives: list[CollectiveEvent], path: Path, called: str) -> None:
    of = found.get_rank(rank, called)
    if of.flight is not None:
        raise RecordsError(f"{path} is of {of.name}, and so is another flight recorder; name those of one job.")
    of.flight = collectives


def _read_device(found: Evidence, path: Path) -> None:
    found.get_rank(dumps.parse_rank(path)).device = _decode_json(path, Device)


def _read_signals(found: Evidence, path: Path) -> None:
    rank = found.get_rank(dumps.parse_rank(path))
    rank.signals = _decode_json(path, Signals)
    if rank.signals.unread:
        found.unread.append(f"Signals of {rank.name}: {rank.signals.unread}.")


def _read_processes(found: Evidence, path: Path) -> None:
    for seen in _decode_json(path, list[ProcessState]):
        found.get_rank(seen.rank).seen = seen


OURS = {"device-": _read_device, "signals-": _read_signals, SEEN_FILE: _read_processes}  # readers by file name prefix


def _decode_json(path: Path, kind: type[Read]) -> Read:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as e:
        raise RecordsError(f"{path} cannot be read: {str(e)[:200]}.") from e
