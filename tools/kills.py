"""Kills sweeps of real ranks at random, goes on with --resume, and counts what was lost, done twice or left alive.

    python -m tools.kills --kills 500 --points 200 --seed 1 --out kills.jsonl
    python -m tools.kills --kills 500 --points 200 --quick        # ranks and an agent without torch: minutes

Each sweep is of a tiny model on two gloo ranks. A kill is SIGKILL, SIGTERM or SIGINT to the command, torchrun's agent,
a rank, the process that keeps account of a rank, or several of them, at a random moment of starting or measuring. After
it, whatever has lost the process that started it must be gone within 5 s, and where one rank was killed with -9, the
command must have recorded that, or begun another job. A command that is gone is repeated with --resume, until every point has its record. Ends with 1 where a record
was lost, a point has two, a process was left alive, a rank's end was noticed late, or a command was refused or ended as
none should.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from dcpbench.records.file import read_records
from dcpbench.records.folder import JOB_FILES, RECORDS_FILE
from tests.cli import dcpbench_fake, fake_worker
from tests.cli.job_processes import ACCOUNT, AGENT, MARK, RANK, of_role, processes, still

FIRST_CONTEXT = {False: 16, True: 301}  # context of the first point, for real ranks and for quick ones
COMMAND = "command"
TARGETS = (
    (COMMAND,),
    (AGENT,),
    (RANK,),
    (ACCOUNT,),
    (COMMAND, AGENT),
    (COMMAND, RANK),
    (AGENT, RANK),
    (COMMAND, AGENT, RANK),
)
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
ALLOWED_S = 5.0  # maximum time in s that a process may outlive its parent
ORDERLY_S = 90.0  # maximum time in s for a process to end after it was signalled, on a busy machine
ENDS, REFUSED = (0, 4), 2  # exit codes of sweeps that were not killed (all measured, or some failed), or refused
MEASURING_S = {False: 2.0, True: 1.0}  # latest kill in s after the first sign of measuring, for real and quick ranks
QUICK_POINT_S = 0.2


def sweep(points: int, *, quick: bool) -> list[str]:
    """Return the command line of a sweep of this many points, half of them with dcp 2."""
    contexts = range(FIRST_CONTEXT[quick], FIRST_CONTEXT[quick] + points // 2)
    return [
        *("sweep", "--model", "tiny", "--tp", "2", "--dcp", "1,2", "--concurrency", "1"),
        *("--context", ",".join(map(str, contexts)), "--seconds", "0.2", "--no-profile", "--device", "cpu"),
        *("--timeout", "retries=1000000"),  # a point that is killed often is not to blame
    ]


@dataclasses.dataclass
class Count:
    """Count the results."""

    kills: int = 0
    sweeps: int = 0
    commands: int = 0
    lost: int = 0
    duplicated: int = 0
    alive: int = 0
    refused: int = 0
    late: int = 0
    other: int = 0
    longest_s: float = 0.0
    noticed_s: float = 0.0
    by_target: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def violations(self) -> int:
        """Return the number of violations of all kinds."""
        return self.lost + self.duplicated + self.alive + self.refused + self.late + self.other


class Kills:
    """Hold all sweeps; each thread runs one after the other."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.wanted, self.points, self.quick, self.out = asked.kills, asked.points, asked.quick, asked.out
        self.folder, self.count = folder, Count()
        self.ends = time.monotonic() + asked.minutes * 60
        self._lock = threading.Lock()
        program = [str(Path(dcpbench_fake.__file__))] if self.quick else ["-m", "dcpbench.cli"]
        self.command = [sys.executable, *program, *sweep(self.points, quick=self.quick)]
        self.env = dict(os.environ)
        if self.quick:
            found = [str(Path(fake_worker.__file__).parent), str(Path(__file__).parents[1])]
            self.env |= {
                "PYTHONPATH": os.pathsep.join(found),
                "DCPBENCH_QUICK": "1",
                fake_worker.POINT_S: str(QUICK_POINT_S),
            }

    def take(self) -> int | None:
        """Return the number of the next kill, or None if there have been enough."""
        with self._lock:
            if self.count.kills >= self.wanted or time.monotonic() > self.ends:
                return None
            self.count.kills += 1
            return self.count.kills

    def keep(self, **row: object) -> None:
        """Append a line of JSON to the raw record."""
        if self.out:
            with self._lock, self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def say(self, text: str) -> None:
        """Print a line with the time."""
        with self._lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def found(self, kind: str, text: str, number: int = 1) -> None:
        """Count a violation."""
        with self._lock:
            setattr(self.count, kind, getattr(self.count, kind) + number)
        self.say(f"VIOLATION ({kind}): {text}")


class Sweep:
    """Hold one folder, in which commands run one after the other."""

    def __init__(self, kills: Kills, number: int, chance: random.Random) -> None:
        self.kills, self.number, self.chance = kills, number, chance
        self.folder = kills.folder / f"sweep-{number}"
        self.known: set[str] = set()
        self.twice: set[str] = set()
        self.starting_s = 15.0
        self.runs = 0

    def run(self) -> None:
        """Run commands until every point is recorded, each killed at random as long as there are kills left."""
        done = False
        while not done:
            done = self._command()
            self._check_records()
        records = [r for r in read_records(self.folder) if r.outcome == "ok"]
        keys = collections.Counter(r.point.get_key() for r in records)
        wanted = self.kills.points
        if len(keys) != wanted:
            self.kills.found("lost", f"{self.folder}: {len(keys)} of {wanted} points", wanted - len(keys))
        self.kills.count.sweeps += 1
        self.kills.say(f"sweep {self.number}: {len(keys)} of {wanted} points ok, after {self.runs} commands")
        self.kills.keep(sweep=self.number, points=wanted, ok=len(keys), records=len(records), commands=self.runs)
        shutil.rmtree(self.folder)

    def _command(self) -> bool:
        """Run one command; return True if it ended by itself with all points measured."""
        self.runs += 1
        self.kills.count.commands += 1
        log = self.folder.with_suffix(".log")
        with log.open("ab") as out:
            run = subprocess.Popen(
                [*self.kills.command, "-o", str(self.folder), "--resume"],
                stdout=out,
                stderr=out,
                env=self.kills.env | {MARK: str(self.folder)},
                start_new_session=True,
            )
        while run.poll() is None:
            if not self._wait(run):
                continue
            if run.poll() is None and (number := self.kills.take()):
                killed = self._kill(run, number)
                if COMMAND in killed:
                    return False
        self._check_gone(set(processes(str(self.folder))), time.monotonic(), "a command that ended by itself")
        if run.returncode not in ENDS:
            tail = log.read_text(errors="replace")[-1500:]
            kind = "refused" if run.returncode == REFUSED else "other"
            self.kills.found(kind, f"sweep {self.number} ended with {run.returncode}:\n{tail}")
        return run.returncode == 0

    def _wait(self, run: subprocess.Popen[bytes]) -> bool:
        """Wait until a random moment of starting or measuring; return False if no kill is due."""
        if self.kills.count.kills >= self.kills.wanted or time.monotonic() > self.kills.ends:
            run.wait()
            return False
        began, measuring = time.monotonic(), self.chance.random() < 0.5
        until = self.chance.uniform(0, MEASURING_S[self.kills.quick] if measuring else self.starting_s)
        jobs = len(list(self.folder.glob("progress-*")))
        while measuring and run.poll() is None and len(list(self.folder.glob("progress-*"))) == jobs:
            time.sleep(0.1)
            if time.monotonic() - began > ORDERLY_S:
                return True
        if measuring:
            self.starting_s = max(1.0, time.monotonic() - began)
            began = time.monotonic()
        while run.poll() is None and time.monotonic() - began < until:
            time.sleep(0.02)
        return True

    def _kill(self, run: subprocess.Popen[bytes], number: int) -> tuple[str, ...]:
        mark, wanted = str(self.folder), self.chance.choice(TARGETS)
        there = {COMMAND: [run.pid]} | {role: of_role(mark, role) for role in (AGENT, RANK, ACCOUNT)}
        targets = tuple(t for t in wanted if there[t]) or (COMMAND,)
        pids = {t: self.chance.choice(there[t]) for t in targets}
        number_sent = {t: self.chance.choice(SIGNALS) for t in targets}
        below = set(processes(mark)) - {run.pid}
        said = self._said()
        ranks = set(there[RANK])
        since = time.monotonic()
        for target in self.chance.sample(targets, len(targets)):
            try:
                os.kill(pids[target], number_sent[target])
            except ProcessLookupError:
                continue
        text = ", ".join(f"{number_sent[t].name} to {t}" for t in targets)
        self.kills.count.by_target["+".join(targets)] += 1
        noticed = None
        if COMMAND in targets:
            self._ended(run, text)
            took = self._check_gone(below | set(processes(mark)), time.monotonic(), text)
        else:
            self._gone_itself(pids, text)
            took = self._check_gone(ranks, time.monotonic(), text) if AGENT in targets else 0.0
            if targets == (RANK,) and number_sent[RANK] == signal.SIGKILL:
                noticed = self._check_noticed(run, since, said, text)
        stage = "starting" if not ranks else "with ranks"
        told = f"gone after {took:.1f} s" + (f", noticed after {noticed:.1f} s" if noticed is not None else "")
        self.kills.say(f"[{number}/{self.kills.wanted}] sweep {self.number}, {stage}: {text}; {told}")
        signals = {t: number_sent[t].name for t in targets}
        gone = round(took, 3) if COMMAND in targets or AGENT in targets else None
        late = None if noticed is None else round(noticed, 3)
        self.kills.keep(kill=number, sweep=self.number, ranks=len(ranks), signals=signals, gone_s=gone, noticed_s=late)
        return targets

    def _ended(self, run: subprocess.Popen[bytes], text: str) -> None:
        try:
            run.wait(ORDERLY_S)
        except subprocess.TimeoutExpired:
            self.kills.found("other", f"{text}: the command had not ended after {ORDERLY_S:g} s")
            run.kill()
            run.wait()

    def _gone_itself(self, pids: dict[str, int], text: str) -> None:
        """Wait for the processes that were signalled, all of which end on any of these signals."""
        end = time.monotonic() + ORDERLY_S
        left = set(pids.values())
        while still(str(self.folder), left):
            if time.monotonic() > end:
                self.kills.found("other", f"{text}: still alive after {ORDERLY_S:g} s")
                return
            time.sleep(0.02)

    def _check_gone(self, pids: set[int], since: float, text: str) -> float:
        """Count those of the processes that are alive ALLOWED_S later; return how long the last one took."""
        took = self._wait_gone(pids, since, ALLOWED_S)
        self.kills.count.longest_s = max(self.kills.count.longest_s, took)
        mark = str(self.folder)
        if left := still(mark, pids):
            found = {p: w for p, w in processes(mark).items() if p in left}
            self.kills.found("alive", f"{text}: {found} after {ALLOWED_S:g} s", len(left))
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        return took

    def _said(self) -> tuple[int, int]:
        """Return counts that change once a command has detected a broken job: it records a point, or begins another
        job.
        """
        records = self.folder / RECORDS_FILE
        failed = records.read_bytes().count(b'"outcome":"failed"') if records.exists() else 0
        return failed, len(list(self.folder.glob(JOB_FILES)))

    def _check_noticed(self, run: subprocess.Popen[bytes], since: float, said: tuple[int, int], text: str) -> float:
        """Return the time from the end of a rank to the reaction of its command."""
        while run.poll() is None and self._said() == said and time.monotonic() - since < ORDERLY_S:
            time.sleep(0.02)
        took = time.monotonic() - since
        self.kills.count.noticed_s = max(self.kills.count.noticed_s, took)
        if took > ALLOWED_S:
            self.kills.found("late", f"{text}: noticed after {took:.1f} s")
        return took

    def _wait_gone(self, pids: set[int], since: float, limit_s: float) -> float:
        """Return the seconds until all of the processes have ended, at most the limit."""
        mark = str(self.folder)
        while still(mark, pids) and time.monotonic() - since < limit_s:
            time.sleep(0.02)
        return time.monotonic() - since

    def _check_records(self) -> None:
        """Check that no ok record is lost, and none is duplicated."""
        if not (self.folder / RECORDS_FILE).exists():
            return
        ok = collections.Counter(r.point.get_key() for r in read_records(self.folder) if r.outcome == "ok")
        if lost := self.known - set(ok):
            self.kills.found("lost", f"{self.folder}: {sorted(lost)}", len(lost))
        if twice := [key for key, number in ok.items() if number > 1 and key not in self.twice]:
            self.kills.found("duplicated", f"{self.folder}: {twice}", len(twice))
            self.twice |= set(twice)
        self.known = set(ok)


def main(arguments: list[str] | None = None) -> int:
    """Read the options, kill, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--points", type=int, default=6, help="of a sweep, an even number; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="ranks and an agent without torch, which start at once")
    parser.add_argument(
        "--out", type=Path, help="append a line of JSON for each kill and sweep, and the counts, to a file"
    )
    parser.add_argument("--seed", type=int, default=0, help="of targets, signals and moments; default: %(default)s")
    parser.add_argument("--at-once", type=int, default=2, help="sweeps side by side; default: %(default)s")
    parser.add_argument("--minutes", type=float, default=120, help="no more kills after so long; default: %(default)s")
    asked = parser.parse_args(arguments)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job would hand on that it is ignored
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dcpbench-kills-") as name:
        kills = Kills(asked, Path(name))

        def work(lane: int) -> None:
            number = lane
            while kills.count.kills < kills.wanted and time.monotonic() < kills.ends:
                Sweep(kills, number, random.Random(f"{asked.seed}/{number}")).run()
                number += asked.at_once

        lanes = [threading.Thread(target=work, args=(lane,)) for lane in range(1, asked.at_once + 1)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    c, minutes = kills.count, (time.monotonic() - began) / 60
    print(
        f"{c.kills} kills over {c.sweeps} sweeps of {asked.points} points, {c.commands} commands, in {minutes:.0f} min"
    )
    print("of: " + ", ".join(f"{target} {number}" for target, number in c.by_target.most_common()))
    print(f"lost {c.lost}, duplicated {c.duplicated}, alive after {ALLOWED_S:g} s: {c.alive}, refused {c.refused}")
    print(f"a rank's end noticed later than {ALLOWED_S:g} s: {c.late}, other {c.other}")
    print(
        f"the longest that anything outlived what started it: {c.longest_s:.1f} s, a killed rank: {c.noticed_s:.1f} s"
    )
    told = dataclasses.asdict(c) | {"by_target": dict(c.by_target)}
    kills.keep(count=told, points=asked.points, ranks="quick" if asked.quick else "real", minutes=round(minutes, 1))
    return 1 if c.violations or c.kills < asked.kills else 0


if __name__ == "__main__":
    sys.exit(main())
