"""Hands every reader of files damaged ones, a million in all, and flips each single bit of a sealed record.

    python -m tools.fuzz --inputs 1000000 --out fuzz.jsonl
    python -m tools.fuzz --kinds trace,heartbeats --inputs 20000
    python -m tools.fuzz --again trace:4711          # one input, with its traceback

Kinds of files, and how they are damaged, are those of tests/unit/hostile_files.py; input `trace:4711` is the same each time
with the same --seed. All kinds get the same time, in rounds, until there were enough inputs; each has a separate process.
Ends with 1 where a reader raised what is no error of ours, took over 2 s of a CPU, or over 1 GiB of memory, or where a
flipped bit went unnoticed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from dcpbench.errors import DcpbenchError
from dcpbench.records.folder import RECORDS_FILE
from dcpbench.records.repair import SEALED, audit_file
from tests.unit.hostile_files import KINDS, damaged

SLOW_S = 2.0  # maximum CPU time in s of a reader for one file
STUCK_S = 60  # time in s after which a reader is interrupted
MEMORY_BYTES = 1 << 30  # maximum bytes of memory of a reader, in addition to that of its process
LEAST = 1000  # minimum number of inputs of each kind, however slow it is
WORST = 10  # maximum number of violations of a kind that are listed one by one


class StuckError(BaseException):
    """Interrupt a reader; no reader can mistake it for an error of the file."""


@dataclasses.dataclass
class Told:
    """Hold the outcomes of the inputs of a kind."""

    kind: str
    inputs: int = 0
    read: int = 0
    refused: int = 0
    wrong: int = 0
    slow: int = 0
    memory: int = 0
    slowest_s: float = 0.0
    peak_bytes: int = 0
    longest_sentence: int = 0
    examples: list[str] = dataclasses.field(default_factory=list)

    @property
    def violations(self) -> int:
        """Return the number of all violations."""
        return self.wrong + self.slow + self.memory

    def add(self, other: Told) -> None:
        """Add another round of the same kind."""
        for name in ("inputs", "read", "refused", "wrong", "slow", "memory"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("slowest_s", "peak_bytes", "longest_sentence"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.examples += other.examples


def chance(seed: int, kind: str, number: int) -> random.Random:
    """Return the random generator that determines how input `number` of a kind is damaged."""
    return random.Random(f"{seed}/{kind}/{number}")


def fuzz(kind: str, seed: int, first: int, least: int, seconds: float) -> Told:
    """Pass damaged files to the reader of a kind, from number `first` on, at least `least` files and for at least
    `seconds`.
    """
    told, of = Told(kind), KINDS[kind]
    os.fsync = lambda fd: None  # noqa: ARG005 -- as it is called
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _stuck)
    shared = Path("/dev/shm")  # noqa: S108 -- memory, as no test is of the disk
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="dcpbench-fuzz-") as name:
        folder = Path(name)
        path = folder / of.name
        content = of.content(folder)
        end = time.monotonic() + seconds
        while told.inputs < least or time.monotonic() < end:
            number = first + told.inputs
            path.write_bytes(damaged(content, chance(seed, kind, number)))
            one(told, number, path)
    told.peak_bytes = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return told


def one(told: Told, number: int, path: Path) -> None:
    """Read a file, and count the outcome."""
    began = time.process_time()
    signal.alarm(STUCK_S)
    problem = ""
    try:
        KINDS[told.kind].read(path)
        told.read += 1
    except DcpbenchError as e:
        told.refused += 1
        told.longest_sentence = max(told.longest_sentence, len(str(e)))
    except MemoryError:
        told.memory += 1
        problem = "memory"
    except StuckError:
        told.slow += 1
        problem = f"interrupted after {STUCK_S} s"
    except Exception as e:  # noqa: BLE001 -- that is what is looked for
        told.wrong += 1
        problem = f"{type(e).__name__}: {str(e)[:200]}"
    finally:
        signal.alarm(0)
    took = time.process_time() - began
    told.inputs += 1
    told.slowest_s = max(told.slowest_s, took)
    if took > SLOW_S and not problem:
        told.slow += 1
        problem = f"{took:.1f} s"
    if problem and len(told.examples) < WORST:
        told.examples.append(f"{told.kind}:{number}: {problem}")


def _stuck(*_: object) -> None:
    raise StuckError


def flips() -> Told:
    """Flip every single bit of a sealed record, one at a time: each must be detected as damage of its line."""
    told = Told("flipped bits")
    with tempfile.TemporaryDirectory(prefix="dcpbench-fuzz-") as name:
        folder = Path(name)
        of = KINDS["records with checksums"]
        content = of.content(folder)
        path = folder / RECORDS_FILE
        path.write_bytes(content)
        assert audit_file(folder).faults == [], SEALED
        whole = audit_file(folder)
        line = content.splitlines(keepends=True)[0]
        for bit in range(8 * len(line)):
            wrong = bytearray(content)
            wrong[bit // 8] ^= 1 << bit % 8
            path.write_bytes(wrong)
            found = audit_file(folder)
            told.inputs += 1
            if found.faults:
                told.refused += 1
            else:
                told.wrong += 1
                told.examples.append(f"bit {bit} of {len(line)} bytes: {found.records} of {whole.records} records")
    return told


def again(name: str, seed: int) -> int:
    """Read one input without catching its exception."""
    kind, _, number = name.rpartition(":")
    with tempfile.TemporaryDirectory(prefix="dcpbench-fuzz-") as folder:
        content = KINDS[kind].content(Path(folder))
        path = Path(folder) / KINDS[kind].name
        path.write_bytes(damaged(content, chance(seed, kind, int(number))))
        try:
            print(f"read: {KINDS[kind].read(path)!r}"[:2000])
        except DcpbenchError as e:
            print(f"refused: {e}")
        except Exception:  # noqa: BLE001 -- it is shown
            traceback.print_exc()
            return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Read the options, fuzz in rounds, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all kinds together; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60, help="no further round after so long; default: %(default)s"
    )
    parser.add_argument("--kinds", default="", help="such as 'trace,heartbeats'; default: all")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--round", type=float, default=10.0, help="seconds of a kind in a round; default: %(default)s")
    parser.add_argument("--again", default="", help="KIND:NUMBER, one input")
    parser.add_argument("--out", type=Path, help="a line of JSON for each kind")
    asked = parser.parse_args(arguments)
    if asked.again:
        return again(asked.again, asked.seed)
    kinds = asked.kinds.split(",") if asked.kinds else list(KINDS)
    found = {kind: Told(kind) for kind in kinds}
    ends = time.monotonic() + asked.minutes * 60
    while sum(t.inputs for t in found.values()) < asked.inputs and time.monotonic() < ends:
        for kind in kinds:
            told = fresh(kind, asked.seed, found[kind].inputs, asked.round)
            found[kind].add(told)
            for text in told.examples:
                print(f"VIOLATION {text}", flush=True)
        print(f"{time.strftime('%H:%M:%S')} {sum(t.inputs for t in found.values()):,} inputs", flush=True)
    told_all = [*found.values(), *([] if asked.kinds else [flips()])]
    for told in told_all:
        print(
            f"{told.kind}: {told.inputs:,} inputs, {told.read:,} read, {told.refused:,} refused, {told.wrong} wrong, "
            f"{told.slow} slow, {told.memory} out of memory; at most {told.slowest_s:.2f} s, {told.peak_bytes >> 20} MiB more"
        )
    if asked.out:
        rows = [dataclasses.asdict(t) | {"seed": asked.seed} for t in told_all]
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    total = sum(t.inputs for t in found.values())
    violations = sum(t.violations for t in told_all)
    print(f"{total:,} inputs over {len(kinds)} kinds, {violations} violations")
    return 1 if violations or total < asked.inputs else 0


def fresh(kind: str, seed: int, first: int, seconds: float) -> Told:
    """Run `fuzz` in a fork with its own memory and limits."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            told = fuzz(kind, seed, first, 0 if first else LEAST, seconds)
            with os.fdopen(write, "w", encoding="utf-8") as out:
                out.write(json.dumps(dataclasses.asdict(told)))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as said:
        text = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        return Told(kind, inputs=1, wrong=1, examples=[f"{kind}, from {first} on: its process ended with {status}"])
    return Told(**json.loads(text))


if __name__ == "__main__":
    sys.exit(main())
