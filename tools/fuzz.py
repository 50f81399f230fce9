"""Pass damaged files to every reader of files, and flip each single bit of a record with a checksum.

    python -m tools.fuzz --inputs 1000000 --out fuzz.jsonl
    python -m tools.fuzz --kinds trace,heartbeats --inputs 20000
    python -m tools.fuzz --again trace:4711          # read one input, and print its traceback

tests/unit/hostile_files.py defines the kinds of files and how they are damaged. The same --seed gives the same input `trace:4711`. Rounds follow
until there are enough inputs; a round reads files of each kind for the same time, in a separate process per kind. The file of --out gets a line
of JSON for each kind.

Exit code 1: a reader raised an exception that is not one of dcpbench's errors, or needed more than 2 s of CPU time or 1 GiB of memory, or a
flipped bit was not detected.
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
from tests.unit.hostile_files import KINDS, damage_text

MAX_CPU_S = 2.0  # maximum CPU time in s for one file
READER_TIMEOUT_S = 60  # time in s after which a reader is interrupted
MAX_MEMORY_BYTES = 1 << 30  # maximum bytes of memory of a reader, in addition to that of its process
MIN_INPUTS = 1000  # minimum number of inputs of each kind, however slow it is
MAX_EXAMPLES = 10  # maximum number of violations of a kind that are listed one by one


class ReaderTimeoutError(BaseException):
    """Interrupt a reader; no reader catches it as an error of the file."""


@dataclasses.dataclass
class Counts:
    """Count the outcomes of the inputs of a kind."""

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
    def violation_count(self) -> int:
        """Return the number of all violations."""
        return self.wrong + self.slow + self.memory

    def add(self, other: Counts) -> None:
        """Add the counts of another round."""
        for name in ("inputs", "read", "refused", "wrong", "slow", "memory"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("slowest_s", "peak_bytes", "longest_sentence"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.examples += other.examples


def make_rng(seed: int, kind: str, number: int) -> random.Random:
    """Return the random generator that determines how input `number` of a kind is damaged."""
    return random.Random(f"{seed}/{kind}/{number}")


def fuzz_kind(kind: str, seed: int, first: int, min_inputs: int, seconds: float) -> Counts:
    """Pass damaged files to the reader of a kind, from input `first` on: at least `min_inputs` files, and for at least `seconds`."""
    counts, reader = Counts(kind), KINDS[kind]
    os.fsync = lambda fd: None  # noqa: ARG005 -- os.fsync has this argument
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MAX_MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _raise_timeout)
    shared = Path("/dev/shm")  # noqa: S108 -- the files are in memory, as the disk is not tested
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="dcpbench-fuzz-") as name:
        folder = Path(name)
        path = folder / reader.name
        content = reader.content(folder)
        end = time.monotonic() + seconds
        while counts.inputs < min_inputs or time.monotonic() < end:
            number = first + counts.inputs
            path.write_bytes(damage_text(content, make_rng(seed, kind, number)))
            read_one(counts, number, path)
    counts.peak_bytes = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return counts


def read_one(counts: Counts, number: int, path: Path) -> None:
    """Read one damaged file, and count the outcome."""
    began = time.process_time()
    signal.alarm(READER_TIMEOUT_S)
    problem = ""
    try:
        KINDS[counts.kind].read(path)
        counts.read += 1
    except DcpbenchError as e:
        counts.refused += 1
        counts.longest_sentence = max(counts.longest_sentence, len(str(e)))
    except MemoryError:
        counts.memory += 1
        problem = "memory"
    except ReaderTimeoutError:
        counts.slow += 1
        problem = f"interrupted after {READER_TIMEOUT_S} s"
    except Exception as e:  # noqa: BLE001 -- any exception is a violation
        counts.wrong += 1
        problem = f"{type(e).__name__}: {str(e)[:200]}"
    finally:
        signal.alarm(0)
    took = time.process_time() - began
    counts.inputs += 1
    counts.slowest_s = max(counts.slowest_s, took)
    if took > MAX_CPU_S and not problem:
        counts.slow += 1
        problem = f"{took:.1f} s"
    if problem and len(counts.examples) < MAX_EXAMPLES:
        counts.examples.append(f"{counts.kind}:{number}: {problem}")


def _raise_timeout(*_: object) -> None:
    raise ReaderTimeoutError


def flip_bits() -> Counts:
    """Flip each bit of a record with a checksum, one at a time, and count the flips that are not detected."""
    counts = Counts("flipped bits")
    with tempfile.TemporaryDirectory(prefix="dcpbench-fuzz-") as name:
        folder = Path(name)
        reader = KINDS["records with checksums"]
        content = reader.content(folder)
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
            counts.inputs += 1
            if found.faults:
                counts.refused += 1
            else:
                counts.wrong += 1
                counts.examples.append(f"bit {bit} of {len(line)} bytes: {found.records} of {whole.records} records")
    return counts


def repeat_input(name: str, seed: int) -> int:
    """Read one input, and print its result or traceback; return 1 for a violation."""
    kind, _, number = name.rpartition(":")
    with tempfile.TemporaryDirectory(prefix="dcpbench-fuzz-") as folder:
        content = KINDS[kind].content(Path(folder))
        path = Path(folder) / KINDS[kind].name
        path.write_bytes(damage_text(content, make_rng(seed, kind, int(number))))
        try:
            print(f"read: {KINDS[kind].read(path)!r}"[:2000])
        except DcpbenchError as e:
            print(f"refused: {e}")
        except Exception:  # noqa: BLE001 -- the traceback is printed
            traceback.print_exc()
            return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Fuzz all kinds in rounds, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="total inputs of all kinds; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=60, help="time in min after which no round starts; default: %(default)s"
    )
    parser.add_argument("--kinds", default="", help="kinds of files, such as 'trace,heartbeats'; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the damages; default: %(default)s")
    parser.add_argument(
        "--round", type=float, default=10.0, help="time of each kind in a round, in s; default: %(default)s"
    )
    parser.add_argument(
        "--again", default="", metavar="KIND:NUMBER", help="read this input, and print the result or the traceback"
    )
    parser.add_argument("--out", type=Path, help="file that gets a line of JSON for each kind")
    args = parser.parse_args(arguments)
    if args.again:
        return repeat_input(args.again, args.seed)
    kinds = args.kinds.split(",") if args.kinds else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"there are no kinds {', '.join(unknown)}; --kinds takes {', '.join(KINDS)}")
    found = {kind: Counts(kind) for kind in kinds}
    ends = time.monotonic() + args.minutes * 60
    while sum(t.inputs for t in found.values()) < args.inputs and time.monotonic() < ends:
        for kind in kinds:
            counts = fuzz_in_fork(kind, args.seed, found[kind].inputs, args.round)
            found[kind].add(counts)
            for text in counts.examples:
                print(f"VIOLATION {text}", flush=True)
        print(f"{time.strftime('%H:%M:%S')} {sum(t.inputs for t in found.values()):,} inputs", flush=True)
    all_counts = [*found.values(), *([] if args.kinds else [flip_bits()])]
    for counts in all_counts:
        print(
            f"{counts.kind}: {counts.inputs:,} inputs, {counts.read:,} read, {counts.refused:,} refused, {counts.wrong} wrong, "
            f"{counts.slow} slow, {counts.memory} out of memory; at most {counts.slowest_s:.2f} s, {counts.peak_bytes >> 20} MiB more"
        )
    if args.out:
        rows = [dataclasses.asdict(t) | {"seed": args.seed} for t in all_counts]
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    total = sum(t.inputs for t in found.values())
    violations = sum(t.violation_count for t in all_counts)
    print(f"{total:,} inputs over {len(kinds)} kinds, {violations} violations")
    return 1 if violations or total < args.inputs else 0


def fuzz_in_fork(kind: str, seed: int, first: int, seconds: float) -> Counts:
    """Run `fuzz_kind` in a fork, which has its own memory and limits."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            counts = fuzz_kind(kind, seed, first, 0 if first else MIN_INPUTS, seconds)
            with os.fdopen(write, "w", encoding="utf-8") as out:
                out.write(json.dumps(dataclasses.asdict(counts)))
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        return Counts(kind, inputs=1, wrong=1, examples=[f"{kind}, from {first} on: its process ended with {status}"])
    return Counts(**json.loads(text))


if __name__ == "__main__":
    sys.exit(main())
