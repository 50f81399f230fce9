"""Kill sweeps at random moments, resume them, and count lost records, duplicate records and remaining processes.

    python -m tools.kills --kills 500 --points 200 --seed 1 --out kills.jsonl
    python -m tools.kills --kills 500 --points 200 --quick        # ranks and an agent without torch; takes minutes

Each sweep runs a tiny model on two gloo ranks. A kill sends SIGKILL, SIGTERM or SIGINT to the command, torchrun's agent, a rank, the
supervisor of a rank, or several of them, at a random moment of starting or measuring. Each process without a parent must then end
within 5 s. If one rank got SIGKILL, the command must record that within 5 s, or start another job. A command that has ended is repeated
with --resume until every point has its record. Exit code 1: a record was lost, a point has two records, a process was left alive, the end
of a rank was noticed late, or a command was refused or ended with an unexpected code.
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
from tests.cli.job_processes import ACCOUNT, AGENT, MARK_VARIABLE, RANK, find_alive, find_by_role, find_processes

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
MAX_NOTICE_S = 5.0  # maximum time in s that a process may run after its parent has ended
MAX_END_S = 90.0  # maximum time in s for a process to end after a signal, on a busy machine
ALLOWED_CODES, REFUSED_CODE = (0, 4), 2  # exit codes: all points measured, or some failed; the command was refused
MAX_KILL_DELAY_S = {
    False: 2.0,
    True: 1.0,
}  # maximum delay in s of a kill after measuring begins, for real and for quick ranks
QUICK_POINT_S = 0.2


def make_sweep_command(points: int, *, quick: bool) -> list[str]:
    """Return the command line of a sweep of this many points, half of them with dcp 2."""
    contexts = range(FIRST_CONTEXT[quick], FIRST_CONTEXT[quick] + points // 2)
    return [
        *("sweep", "--model", "tiny", "--tp", "2", "--dcp", "1,2", "--concurrency", "1"),
        *("--context", ",".join(map(str, contexts)), "--seconds", "0.2", "--no-profile", "--device", "cpu"),
        *("--timeout", "retries=1000000"),  # a point is not at fault if it is killed often
    ]


@dataclasses.dataclass
class Count:
    """Count kills, sweeps, commands, and violations of each kind."""

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
    def violation_count(self) -> int:
        """Return the number of all violations."""
        return self.lost + self.duplicated + self.alive + self.refused + self.late + self.other


class Kills:
    """Hold the number of kills, the counts and the output file, which the threads of all sweeps share."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.max_kills, self.points, self.quick, self.out = args.kills, args.points, args.quick, args.out
        self.folder, self.count = folder, Count()
        self.ends = time.monotonic() + args.minutes * 60
        self._lock = threading.Lock()
        program = [str(Path(dcpbench_fake.__file__))] if self.quick else ["-m", "dcpbench.cli"]
        self.command = [sys.executable, *program, *make_sweep_command(self.points, quick=self.quick)]
        self.env = dict(os.environ)
        if self.quick:
            paths = [str(Path(fake_worker.__file__).parent), str(Path(__file__).parents[1])]
            self.env |= {
                "PYTHONPATH": os.pathsep.join(paths),
                "DCPBENCH_QUICK": "1",
                fake_worker.POINT_S: str(QUICK_POINT_S),
            }

    def take_number(self) -> int | None:
        """Return the number of the next kill; None after the last kill, or after the time limit."""
        with self._lock:
            if self.count.kills >= self.max_kills or time.monotonic() > self.ends:
                return None
            self.count.kills += 1
            return self.count.kills

    def write_row(self, **row: object) -> None:
        """Append a line of JSON to the file of --out."""
        if self.out:
            with self._lock, self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def print_line(self, text: str) -> None:
        """Print a line with the time."""
        with self._lock:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def count_violation(self, kind: str, text: str, number: int = 1) -> None:
        """Count violations of a kind, and print them."""
        with self._lock:
            setattr(self.count, kind, getattr(self.count, kind) + number)
        self.print_line(f"VIOLATION ({kind}): {text}")


class Sweep:
    """Run the commands of one sweep in its folder, one after another."""

    def __init__(self, kills: Kills, number: int, rng: random.Random) -> None:
        self.kills, self.number, self.rng = kills, number, rng
        self.folder = kills.folder / f"sweep-{number}"
        self.recorded: set[str] = set()
        self.duplicated_keys: set[str] = set()
        self.starting_s = 15.0
        self.runs = 0

    def run(self) -> None:
        """Run commands until every point has a record; kill each of them at random while kills are left."""
        done = False
        while not done:
            done = self._run_command()
            self._check_records()
        records = [r for r in read_records(self.folder) if r.outcome == "ok"]
        keys = collections.Counter(r.point.get_key() for r in records)
        points = self.kills.points
        if len(keys) != points:
            self.kills.count_violation("lost", f"{self.folder}: {len(keys)} of {points} points", points - len(keys))
        self.kills.count.sweeps += 1
        self.kills.print_line(f"sweep {self.number}: {len(keys)} of {points} points ok, after {self.runs} commands")
        self.kills.write_row(sweep=self.number, points=points, ok=len(keys), records=len(records), commands=self.runs)
        shutil.rmtree(self.folder)

    def _run_command(self) -> bool:
        """Run one command; return True if it ended without a kill and measured all points."""
        self.runs += 1
        self.kills.count.commands += 1
        log = self.folder.with_suffix(".log")
        with log.open("ab") as out:
            run = subprocess.Popen(
                [*self.kills.command, "-o", str(self.folder), "--resume"],
                stdout=out,
                stderr=out,
                env=self.kills.env | {MARK_VARIABLE: str(self.folder)},
                start_new_session=True,
            )
        while run.poll() is None:
            if not self._wait_for_moment(run):
                continue
            if run.poll() is None and (number := self.kills.take_number()):
                killed = self._kill(run, number)
                if COMMAND in killed:
                    return False
        self._check_gone(set(find_processes(str(self.folder))), time.monotonic(), "a command that was not killed")
        if run.returncode not in ALLOWED_CODES:
            tail = log.read_text(errors="replace")[-1500:]
            kind = "refused" if run.returncode == REFUSED_CODE else "other"
            self.kills.count_violation(kind, f"sweep {self.number} ended with {run.returncode}:\n{tail}")
        return run.returncode == 0

    def _wait_for_moment(self, run: subprocess.Popen[bytes]) -> bool:
        """Wait until a random moment of starting or measuring; return False if no kills are left."""
        if self.kills.count.kills >= self.kills.max_kills or time.monotonic() > self.kills.ends:
            run.wait()
            return False
        began, measuring = time.monotonic(), self.rng.random() < 0.5
        until = self.rng.uniform(0, MAX_KILL_DELAY_S[self.kills.quick] if measuring else self.starting_s)
        jobs = len(list(self.folder.glob("progress-*")))
        while measuring and run.poll() is None and len(list(self.folder.glob("progress-*"))) == jobs:
            time.sleep(0.1)
            if time.monotonic() - began > MAX_END_S:
                return True
        if measuring:
            self.starting_s = max(1.0, time.monotonic() - began)
            began = time.monotonic()
        while run.poll() is None and time.monotonic() - began < until:
            time.sleep(0.02)
        return True

    def _kill(self, run: subprocess.Popen[bytes], number: int) -> tuple[str, ...]:
        mark, choice = str(self.folder), self.rng.choice(TARGETS)
        by_role = {COMMAND: [run.pid]} | {role: find_by_role(mark, role) for role in (AGENT, RANK, ACCOUNT)}
        targets = tuple(t for t in choice if by_role[t]) or (COMMAND,)
        pids = {t: self.rng.choice(by_role[t]) for t in targets}
        number_sent = {t: self.rng.choice(SIGNALS) for t in targets}
        below = set(find_processes(mark)) - {run.pid}
        before = self._count_reactions()
        ranks = set(by_role[RANK])
        since = time.monotonic()
        for target in self.rng.sample(targets, len(targets)):
            try:
                os.kill(pids[target], number_sent[target])
            except ProcessLookupError:
                continue
        text = ", ".join(f"{number_sent[t].name} to {t}" for t in targets)
        self.kills.count.by_target["+".join(targets)] += 1
        noticed = None
        if COMMAND in targets:
            self._wait_for_command(run, text)
            took = self._check_gone(below | set(find_processes(mark)), time.monotonic(), text)
        else:
            self._wait_for_signalled(pids, text)
            took = self._check_gone(ranks, time.monotonic(), text) if AGENT in targets else 0.0
            if targets == (RANK,) and number_sent[RANK] == signal.SIGKILL:
                noticed = self._check_noticed(run, since, before, text)
        stage = "starting" if not ranks else "with ranks"
        summary = f"gone after {took:.1f} s" + (f", noticed after {noticed:.1f} s" if noticed is not None else "")
        self.kills.print_line(f"[{number}/{self.kills.max_kills}] sweep {self.number}, {stage}: {text}; {summary}")
        signals = {t: number_sent[t].name for t in targets}
        gone = round(took, 3) if COMMAND in targets or AGENT in targets else None
        late = None if noticed is None else round(noticed, 3)
        self.kills.write_row(
            kill=number, sweep=self.number, ranks=len(ranks), signals=signals, gone_s=gone, noticed_s=late
        )
        return targets

    def _wait_for_command(self, run: subprocess.Popen[bytes], text: str) -> None:
        try:
            run.wait(MAX_END_S)
        except subprocess.TimeoutExpired:
            self.kills.count_violation("other", f"{text}: the command did not end within {MAX_END_S:g} s")
            run.kill()
            run.wait()

    def _wait_for_signalled(self, pids: dict[str, int], text: str) -> None:
        """Wait until all signalled processes have ended."""
        end = time.monotonic() + MAX_END_S
        left = set(pids.values())
        while find_alive(str(self.folder), left):
            if time.monotonic() > end:
                self.kills.count_violation("other", f"{text}: still alive after {MAX_END_S:g} s")
                return
            time.sleep(0.02)

    def _check_gone(self, pids: set[int], since: float, text: str) -> float:
        """Count and kill the processes that are alive after MAX_NOTICE_S; return the seconds until all have ended."""
        took = self._wait_until_gone(pids, since, MAX_NOTICE_S)
        self.kills.count.longest_s = max(self.kills.count.longest_s, took)
        mark = str(self.folder)
        if left := find_alive(mark, pids):
            found = {p: w for p, w in find_processes(mark).items() if p in left}
            self.kills.count_violation("alive", f"{text}: {found} after {MAX_NOTICE_S:g} s", len(left))
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        return took

    def _count_reactions(self) -> tuple[int, int]:
        """Return the numbers of failed points and of jobs; one of them grows when a command detects a broken job."""
        records = self.folder / RECORDS_FILE
        failed = records.read_bytes().count(b'"outcome":"failed"') if records.exists() else 0
        return failed, len(list(self.folder.glob(JOB_FILES)))

    def _check_noticed(self, run: subprocess.Popen[bytes], since: float, before: tuple[int, int], text: str) -> float:
        """Return the seconds from the end of a rank to the reaction of its command."""
        while run.poll() is None and self._count_reactions() == before and time.monotonic() - since < MAX_END_S:
            time.sleep(0.02)
        took = time.monotonic() - since
        self.kills.count.noticed_s = max(self.kills.count.noticed_s, took)
        if took > MAX_NOTICE_S:
            self.kills.count_violation("late", f"{text}: noticed after {took:.1f} s")
        return took

    def _wait_until_gone(self, pids: set[int], since: float, limit_s: float) -> float:
        """Return the seconds until all processes have ended, at most the limit."""
        mark = str(self.folder)
        while find_alive(mark, pids) and time.monotonic() - since < limit_s:
            time.sleep(0.02)
        return time.monotonic() - since

    def _check_records(self) -> None:
        """Count ok records that are lost or duplicated."""
        if not (self.folder / RECORDS_FILE).exists():
            return
        ok = collections.Counter(r.point.get_key() for r in read_records(self.folder) if r.outcome == "ok")
        if lost := self.recorded - set(ok):
            self.kills.count_violation("lost", f"{self.folder}: {sorted(lost)}", len(lost))
        if duplicated := [key for key, number in ok.items() if number > 1 and key not in self.duplicated_keys]:
            self.kills.count_violation("duplicated", f"{self.folder}: {duplicated}", len(duplicated))
            self.duplicated_keys |= set(duplicated)
        self.recorded = set(ok)


def main(arguments: list[str] | None = None) -> int:
    """Run the sweeps, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="total kills; default: %(default)s")
    parser.add_argument("--points", type=int, default=6, help="points of a sweep, an even number; default: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="use an agent and ranks without torch, which start quickly"
    )
    parser.add_argument(
        "--out", type=Path, help="append a line of JSON for each kill and sweep, and the counts, to a file"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of targets, signals and moments; default: %(default)s"
    )
    parser.add_argument("--at-once", type=int, default=2, help="sweeps that run in parallel; default: %(default)s")
    parser.add_argument(
        "--minutes", type=float, default=120, help="time in min after which no kill follows; default: %(default)s"
    )
    args = parser.parse_args(arguments)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # if a shell started this program in the background, it ignores SIGINT, and so would the commands
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dcpbench-kills-") as name:
        kills = Kills(args, Path(name))

        def run_lane(lane: int) -> None:
            number = lane
            while kills.count.kills < kills.max_kills and time.monotonic() < kills.ends:
                Sweep(kills, number, random.Random(f"{args.seed}/{number}")).run()
                number += args.at_once

        lanes = [threading.Thread(target=run_lane, args=(lane,)) for lane in range(1, args.at_once + 1)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    count, minutes = kills.count, (time.monotonic() - began) / 60
    print(
        f"{count.kills} kills over {count.sweeps} sweeps of {args.points} points, {count.commands} commands, in {minutes:.0f} min"
    )
    print("targets: " + ", ".join(f"{target} {number}" for target, number in count.by_target.most_common()))
    print(
        f"lost {count.lost}, duplicated {count.duplicated}, alive after {MAX_NOTICE_S:g} s: {count.alive}, refused {count.refused}"
    )
    print(f"a rank's end noticed later than {MAX_NOTICE_S:g} s: {count.late}, other {count.other}")
    print(
        f"longest survival of a parent's end: {count.longest_s:.1f} s; longest time to notice a killed rank: {count.noticed_s:.1f} s"
    )
    fields = dataclasses.asdict(count) | {"by_target": dict(count.by_target)}
    kills.write_row(
        count=fields, points=args.points, ranks="quick" if args.quick else "real", minutes=round(minutes, 1)
    )
    return 1 if count.violation_count or count.kills < args.kills else 0


if __name__ == "__main__":
    sys.exit(main())
