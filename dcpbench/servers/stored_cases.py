"""Store each measured case of a server at once, so that --resume measures only the cases that an interruption left out. No torch.

A server that ran already may have been started again with other flags in between. It is the same one if its process began at the
same time; if it does not report that, and whatever else it reports is equal, its other flags are assumed to be the same.

NAME.cases.jsonl lies next to the step times NAME.json that are made from it. Its first line is a CaseSource, each further line a
StoredCase, all with checksums. An incomplete last line is removed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dcpbench.records import checksums
from dcpbench.records.lines import UNREADABLE
from dcpbench.records.record import EngineSettings, Environment, Gpu
from dcpbench.servers.step_probe import CaseSamples
from dcpbench.serving.step_times import EnginePath, EngineServer
from dcpbench.show.terminal import print_stderr
from dcpbench.show.text import format_count
from dcpbench.show.whole_files import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dcpbench.serving.step_times import Case

T = TypeVar("T")
MAX_DIFFERENCES = 3  # that the message names
MAX_CASES = 8  # cases that the message names


class CaseSource(msgspec.Struct, frozen=True, kw_only=True):
    """Describe what the times of cases depend on. Cases are used again only if all of it is equal."""

    path: EnginePath
    engine: EngineServer  # without kv_tokens, which differ from start to start and show in the contexts of cases
    server: dict[str, str]  # command without its port, arguments that the server reports, fields of requests
    settings: EngineSettings | None  # as the server's log states them
    environment: Environment  # GPU, driver and version of dcpbench
    started_s: float | None = None  # start of the process of a server that ran already; None if it is not reported

    @property
    def assumption(self) -> str:
        """Return the assumption under which cases are taken over; empty if the server is known to have the same flags."""
        if self.server.get("command") or self.started_s is not None:
            return ""
        return "Flags that the server does not report are assumed unchanged."


class StoredCase(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a measured case as the file has it."""

    samples: CaseSamples
    hide_launch: bool  # argument of step_probe.measure_case
    seconds: float  # duration of the measurement
    gpu: Gpu | None = None  # state of the GPUs from the begin of the command to the end of this case

    @property
    def key(self) -> tuple[Case, bool]:
        """Return what distinguishes measurements on a server."""
        return self.samples.case, self.hide_launch


class CaseFile:
    """Hold the stored cases of a server, and append further ones."""

    def __init__(self, path: Path, cases: dict[tuple[Case, bool], StoredCase]) -> None:
        self.path, self.cases = path, cases

    @classmethod
    def open(cls, path: Path, source: CaseSource) -> CaseFile:
        """Return the file of this source with the cases of an interrupted measurement.

        Begin a new file if there is none. Do the same, and print why, if its cases have another source. Raise OSError if the file
        cannot be read or written.
        """
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        stored = _decode_line(lines[0], CaseSource) if lines else None
        cases: dict[tuple[Case, bool], StoredCase] = {}
        if stored == source:
            cases = {one.key: one for line in lines[1:] if (one := _decode_line(line, StoredCase)) is not None}
            if cases:
                print_stderr(_format_taken_over(path, source, [str(one.samples.case) for one in cases.values()]))
        elif lines:
            why = "their server cannot be read" if stored is None else _format_differences(stored, source)
            print_stderr(f"{path}: the stored cases are measured again: {why}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, b"".join(map(_encode_line, (source, *cases.values()))))
        return cls(path, cases)

    def append(self, one: StoredCase) -> None:
        """Add a case, which is on disk afterwards. Raise OSError if it cannot be written."""
        with self.path.open("ab") as f:
            f.write(_encode_line(one))
            f.flush()
            os.fsync(f.fileno())
        self.cases[one.key] = one


def _format_taken_over(path: Path, source: CaseSource, cases: Sequence[str]) -> str:
    """Return which cases are not measured again, what that assumes, and how to measure them again."""
    verb = "is" if len(cases) == 1 else "are"
    listed = [*cases[:MAX_CASES], *([f"and {len(cases) - MAX_CASES} more"] if len(cases) > MAX_CASES else [])]
    assumption = f" {source.assumption} To measure all cases again, remove this file." if source.assumption else ""
    return f"{path}: {format_count(len(cases), 'case')} of an earlier measurement {verb} taken over: {'; '.join(listed)}.{assumption}"


def _encode_line(value: msgspec.Struct) -> bytes:
    return checksums.add_checksum(msgspec.json.encode(value)) + b"\n"


def _decode_line(line: bytes, kind: type[T]) -> T | None:
    """Return the value of a line; None if the line is incomplete or damaged."""
    try:
        return msgspec.json.decode(line, type=kind) if checksums.check(line) else None
    except UNREADABLE:
        return None


def _format_differences(before: CaseSource, now: CaseSource) -> str:
    """Return the values of one source that another one does not have, such as `engine.version was 0.25 and is 0.26`."""
    old, new = _flatten(before), _flatten(now)
    names = [name for name in old | new if old.get(name) != new.get(name)]
    more = f", and {len(names) - MAX_DIFFERENCES} more" if len(names) > MAX_DIFFERENCES else ""
    listed = (f"{name} was {old.get(name)} and is {new.get(name)}" for name in names[:MAX_DIFFERENCES])
    return ", ".join(listed) + more


def _flatten(source: CaseSource) -> dict[str, object]:
    """Return the values of all parts of a source, by names such as `engine.version`."""
    parts = msgspec.to_builtins(source).items()
    found: dict[str, object] = {}
    for part, value in parts:
        found |= {f"{part}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {part: value}
    return found
