"""Hangs: heartbeats as they are written and read, dumps of other programs, and the rank found to keep the others
waiting.
"""

from __future__ import annotations

import itertools
import json
import socket
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpbench import cli
from dcpbench.errors import RecordsError
from dcpbench.hangs import dumps, evidence, heartbeats
from dcpbench.hangs import format as hang_format
from dcpbench.hangs.evidence import Device, ProcessState
from dcpbench.hangs.finding import find_cause
from dcpbench.hangs.heartbeats import HeartbeatWriter
from dcpbench.hangs.signal_waits import BarrierCounters, Signals
from dcpbench.launch import hang_capture

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dcpbench.hangs.finding import Finding

X = SimpleNamespace(dtype="torch.float32", shape=(2, 64))
HALF = SimpleNamespace(dtype="torch.float32", shape=(64,))
DOUBLE = SimpleNamespace(dtype="torch.float64", shape=(2, 64))
GROUP = "0"


class Job:
    """Ranks with heartbeats, each with a script of its collectives in a step: `(op, phase, layer)`, optionally another
    tensor.
    """

    def __init__(
        self, folder: Path, ranks: int, groups: dict[str, Sequence[int]] | None = None, *, waits: bool = True
    ) -> None:
        self.folder = folder
        groups = groups or {GROUP: range(ranks)}
        self.ranks = [
            HeartbeatWriter(
                folder / f"heartbeats-{r}.bin", r, ranks, waits=waits, members=lambda name: (name, groups[name])
            )
            for r in range(ranks)
        ]

    def run_collective(
        self, rank: int, op: str, phase: str, layer: int, *, x: Any = X, group: str = GROUP, hangs: bool = False
    ) -> None:
        """Run one collective of a rank; with `hangs` it never returns."""
        own = self.ranks[rank]
        own.set_layer(layer)
        own.set_phase(phase)
        entered = own.start_collective(op, x, group)
        if not hangs:
            entered.__exit__(None, None, None)

    def run_steps(self, count: int = 2) -> None:
        """Run whole steps of two layers on all ranks."""
        for _ in range(count):
            for layer in range(2):
                for phase in ("attn_reduce", "mlp_reduce"):
                    for rank in range(len(self.ranks)):
                        self.run_collective(rank, "all_reduce", phase, layer)

    def found(self) -> Finding:
        """Return the cause that is found from the files of the folder."""
        return find_cause(evidence.read_evidence([self.folder]))


def test_heartbeats_record_step_phase_layer_and_open_collective(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.run_steps(1)
    job.ranks[0].record_step(heartbeats.REPLAY)
    job.run_collective(0, "all_gather", "merge", 1, x=HALF, hangs=True)
    read = heartbeats.read_heartbeats(tmp_path / "heartbeats-0.bin")
    assert (read.rank, read.ranks, read.steps, read.step, read.phase, read.layer) == (0, 1, 1, "replay", "merge", 1)
    one = read.last
    assert one is not None
    assert one.state == heartbeats.INSIDE
    assert one.call is not None
    assert (one.number, one.call.description) == (5, "all_gather of float32 [64]")
    assert "test_hangs.py" in one.call.at
    assert " in run_collective" in one.call.at


def test_ring_keeps_the_last_collectives_and_drops_damaged_texts(
    tmp_path: Path,
) -> None:
    """Run 1,034 collectives of one shape each: the ring has the last 1,024, and the last ten texts overwrite the first
    ten.
    """
    job = Job(tmp_path, 1)
    for n in range(heartbeats.RING + 10):
        job.run_collective(0, "all_reduce", "moe", 0, x=SimpleNamespace(dtype="torch.float32", shape=(n,)))
    found = heartbeats.read_heartbeats(tmp_path / "heartbeats-0.bin").collectives
    assert [found[0].number, found[-1].number, len(found)] == [11, heartbeats.RING + 10, heartbeats.RING]
    assert found[-1].call is not None
    assert found[-1].call.shape == (heartbeats.RING + 9,)
    place = heartbeats.TEXTS_AT + (heartbeats.RING + 10) % heartbeats.TEXTS * heartbeats.TEXT_BYTES
    data = bytearray((tmp_path / "heartbeats-0.bin").read_bytes())
    text = place + heartbeats.TEXT.size
    for at, value in ((place, data[place] ^ 1), (text, ord("x")), (text + 3, 0xFF)):
        damaged = data[:at] + bytes([value]) + data[at + 1 :]
        (tmp_path / "heartbeats-0.bin").write_bytes(damaged)
        assert heartbeats.read_heartbeats(tmp_path / "heartbeats-0.bin").collectives[-1].call is None


def test_members_of_a_group_are_kept_completely_or_not_at_all(tmp_path: Path) -> None:
    """A group has every second rank, up to 150 of them, and a text has 548 characters; half a number would blame
    another rank.
    """
    groups = {f"{count:03}": range(0, 2 * count, 2) for count in range(1, 151)}
    job = Job(tmp_path, 3, groups)
    for group in groups:
        for rank in (0, 2):
            job.run_collective(rank, "all_reduce", "moe", 0, group=group, hangs=group == "150")
    calls = [event.call for event in heartbeats.read_heartbeats(tmp_path / "heartbeats-2.bin").collectives]
    members = [call is not None and heartbeats.parse_ranks(call.ranks) for call in calls]
    most = sum(map(bool, members))
    assert members == [*map(list, groups.values())][:most] + [[]] * (150 - most)
    assert 60 < most < 150
    found = job.found()
    assert {*found.ranks, *found.waiting} <= {*groups["150"]}


def test_long_group_names_and_places_are_cut(tmp_path: Path) -> None:
    """The first 40 characters of a group's name and the last 100 of a place are kept."""
    job = Job(tmp_path, 1, {(name := "g" * 50 + "h" * 300): [0]})
    at = f"{'d' * 300}/file.py:12 in function"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeats, "_format_frame", lambda _: at)
        job.run_collective(0, "all_reduce", "moe", 0, group=name)
    (event,) = heartbeats.read_heartbeats(tmp_path / "heartbeats-0.bin").collectives
    assert event.call == heartbeats.Call("all_reduce", "float32", (2, 64), name[:40], "0", at[-100:])


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2, 3, 6], [5, 7], [60_000, 60_001], []])
def test_formatted_ranks_are_parsed_back(ranks: list[int]) -> None:
    assert heartbeats.parse_ranks(heartbeats.format_ranks(ranks)) == ranks


@pytest.mark.parametrize("x, kind", [(HALF, "shape"), (DOUBLE, "dtype")])  # noqa: PT006 -- as everywhere
def test_rank_with_another_shape_or_dtype_is_named(tmp_path: Path, x: Any, kind: str) -> None:
    job = Job(tmp_path, 4)
    job.run_steps()
    for rank in range(4):
        job.run_collective(rank, "all_reduce", "attn_reduce", 0, x=x if rank == 2 else X, hangs=True)
    found = job.found()
    assert (found.kind, found.ranks, found.phase, found.layer, found.number) == (kind, [2], "attn_reduce", 0, 9)
    assert found.waiting == [0, 1, 3]


def test_rank_that_left_the_usual_order_is_named(tmp_path: Path) -> None:
    """Steps are all_reduce in attn_reduce, then in mlp_reduce; rank 0 runs a gather instead."""
    job = Job(tmp_path, 2)
    job.run_steps()
    job.run_collective(0, "all_gather", "merge", 0, hangs=True)
    job.run_collective(1, "all_reduce", "attn_reduce", 0, hangs=True)
    found = job.found()
    assert (found.kind, found.ranks) == ("order", [0])
    assert found.why == ["rank 1 went on as in earlier steps."]


def test_differing_shape_is_named_if_collectives_are_asynchronous(tmp_path: Path) -> None:
    """With NCCL both hosts return at once and then run the same collectives, which proves nothing about their devices."""
    job = Job(tmp_path, 2, waits=False)
    job.run_steps()
    for rank in range(2):
        job.run_collective(rank, "all_reduce", "attn_reduce", 0, x=HALF if rank else X)
        job.run_collective(rank, "all_reduce", "mlp_reduce", 0)
    found = job.found()
    assert (found.kind, found.ranks, found.phase, found.layer) == ("shape", [1], "attn_reduce", 0)


def test_two_differing_ranks_without_history_are_both_not_blamed(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run_collective(0, "all_gather", "merge", 0, hangs=True)
    job.run_collective(1, "all_reduce", "attn_reduce", 0, hangs=True)
    assert "Nothing tells which of the two is right." in job.found().why


def test_first_diverging_collective_is_named_if_later_tensors_match(tmp_path: Path) -> None:
    """Rank 1 skips attn_reduce of layer 0: its next reduction has the same shape, and only the gather differs."""
    job = Job(tmp_path, 3)
    job.run_steps()
    for rank in (0, 2):
        job.run_collective(rank, "all_reduce", "attn_reduce", 0)
        job.run_collective(rank, "all_reduce", "mlp_reduce", 0, hangs=True)
    job.run_collective(1, "all_reduce", "mlp_reduce", 0)
    job.run_collective(1, "all_gather", "lm_head", heartbeats.NO_LAYER, hangs=True)
    found = job.found()
    assert (found.kind, found.ranks, found.number, found.layer) == ("order", [1], 9, 0)
    assert any("left that one out" in why for why in found.why)


def test_missing_rank_is_named_with_phase_line_and_process_state(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    job.run_steps()
    for rank in (0, 1):
        job.run_collective(rank, "all_reduce", "mlp_reduce", 1, hangs=True)
    job.ranks[2].set_phase("moe")
    stack = (
        'Current thread 0x00007f00 (most recent call first):\n  File "/a/dcpbench/engine/model.py", line 7 in experts\n'
    )
    (tmp_path / "stacks-2.txt").write_text(f'{stack}  File "/a/w.py", line 1 in <module>\n')
    seen = [ProcessState(rank=2, pid=7, state="S", cpu=0.01), ProcessState(rank=0, pid=8, state="S", cpu=0.0)]
    (tmp_path / "ranks.json").write_bytes(msgspec.json.encode(seen))
    found = job.found()
    assert (found.kind, found.ranks, found.waiting, found.phase, found.layer) == ("behind", [2], [0, 1], "moe", 1)
    assert "rank 2 sleeps in phase moe of layer 1 at dcpbench/engine/model.py:7 in experts" in found.message
    assert "ranks 0-1 wait for it in all_reduce of float32 [2, 64], collective 9 of the group" in found.message


def test_rank_still_inside_a_complete_collective_is_behind(tmp_path: Path) -> None:
    """In a job that is only slow, rank 2 has not returned from the 9th collective, and the others wait in the 10th."""
    job = Job(tmp_path, 3)
    job.run_steps()
    for rank in range(3):
        job.run_collective(rank, "all_reduce", "attn_reduce", 0, hangs=rank == 2)
    for rank in range(2):
        job.run_collective(rank, "all_reduce", "mlp_reduce", 0, hangs=True)
    found = job.found()
    assert (found.kind, found.ranks, found.waiting, found.phase) == ("behind", [2], [0, 1], "attn_reduce")


def test_ended_rank_is_blamed_and_ranks_waiting_in_a_chain_are_not(tmp_path: Path) -> None:
    """Ranks 0 and 1 share a group, and 1 and 2 another: 0 waits for 1, which waits for 2, which has ended."""
    job = Job(tmp_path, 3, {"a": [0, 1], "b": [1, 2]})
    job.run_collective(0, "all_reduce", "moe", 0, group="a", hangs=True)
    job.run_collective(1, "all_reduce", "merge", 0, group="b", hangs=True)
    (tmp_path / "ranks.json").write_bytes(msgspec.json.encode([ProcessState(rank=2, ended="ended with exit code 3")]))
    found = job.found()
    assert (found.kind, found.ranks, found.waiting) == ("gone", [2], [1])


def test_ranks_in_two_groups_that_wait_for_each_other_are_reported(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, {"a": [0, 1], "b": [0, 1]})
    job.run_collective(0, "all_reduce", "moe", 0, group="a", hangs=True)
    job.run_collective(1, "all_reduce", "merge", 0, group="b", hangs=True)
    found = job.found()
    assert (found.kind, found.ranks) == ("apart", [0, 1])


def test_no_rank_is_blamed_if_all_are_in_the_same_collective(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.run_collective(rank, "all_reduce", "moe", 0, hangs=True)
    found = job.found()
    assert (found.kind, found.ranks, found.waiting) == ("together", [], [0, 1])


@pytest.mark.parametrize("held", [[0], [0, 1]], ids=["one", "all"])
def test_ranks_blocked_in_the_kernel_are_blamed(held: list[int], tmp_path: Path) -> None:
    """All ranks are in the same collective; heartbeats are in mapped files, so that a frozen file system blocks their
    writer.
    """
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.run_collective(rank, "all_reduce", "moe", 0, hangs=True)
    seen = [
        ProcessState(rank=r, pid=9, state="D" if r in held else "S", uninterruptible=r in held, wchan="io_schedule")
        for r in (0, 1)
    ]
    (tmp_path / "ranks.json").write_bytes(msgspec.json.encode(seen))
    found = job.found()
    assert (found.kind, found.ranks, found.waiting) == ("kernel", held, [r for r in (0, 1) if r not in held])
    who = "rank 0 waits" if held == [0] else "ranks 0-1 wait"
    assert found.message == (
        f"{who} in the kernel in io_schedule, for a disk, a network file system or a driver that does not answer"
    )
    assert "none is behind" not in found.message


def test_stopped_rank_is_blamed_though_all_are_in_the_same_collective(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for rank in range(2):
        job.run_collective(rank, "all_reduce", "moe", 0, hangs=True)
    seen = [ProcessState(rank=0, pid=8, state="S"), ProcessState(rank=1, pid=9, state="T")]
    (tmp_path / "ranks.json").write_bytes(msgspec.json.encode(seen))
    found = job.found()
    assert (found.kind, found.ranks, found.waiting) == ("stopped", [1], [0])
    assert found.message == "rank 1 was stopped by a signal in phase moe of layer 0 (state T)"
    assert "`kill -CONT 9`" in found.why[0]


def test_rank_behind_and_blocked_in_the_kernel_is_reported_as_behind(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    job.run_collective(0, "all_reduce", "moe", 0, hangs=True)
    seen = [ProcessState(rank=1, pid=9, state="D", uninterruptible=True)]
    (tmp_path / "ranks.json").write_bytes(msgspec.json.encode(seen))
    found = job.found()
    assert (found.kind, found.ranks) == ("behind", [1])
    assert found.why[-1] == "rank 1 waits in the kernel, where no signal reaches a process (state D)."


@pytest.mark.parametrize(
    ("norms", "ranks", "layer", "phase", "why"),
    [
        ([36, 36], [], 17, "mlp", "None is behind the others."),
        ([37, 35], [1], 17, "attention", ""),
        ([121, 1], [], None, "", "who is behind is not known"),
    ],
    ids=["equal norms", "one behind", "far apart"],
)
def test_norm_counter_gives_the_layer_of_a_replayed_step(
    tmp_path: Path, norms: list[int], ranks: list[int], layer: int | None, phase: str, why: str
) -> None:
    """Norm 36 = 2 · 17 + 2 is the norm after attention of layer 17."""
    for rank, norm in enumerate(norms):
        own = HeartbeatWriter(
            tmp_path / f"heartbeats-{rank}.bin", rank, 2, waits=False, members=lambda _: ("0", [0, 1])
        )
        own.record_step(heartbeats.REPLAY)
        (tmp_path / f"device-{rank}.json").write_bytes(msgspec.json.encode(Device(norm=norm)))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert (found.kind, found.ranks, found.layer, found.phase) == ("device", ranks, layer, phase)
    assert "launched as replay" in found.message
    assert why in " ".join(found.why)


def test_position_of_a_single_rank_is_read_from_its_device(tmp_path: Path) -> None:
    own = HeartbeatWriter(tmp_path / "heartbeats-0.bin", 0, 1, waits=False, members=lambda _: ("0", [0]))
    own.record_step(heartbeats.REPLAY)
    (tmp_path / "device-0.json").write_bytes(msgspec.json.encode(Device(norm=7)))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert found.message == "devices stand still in a step launched as replay: rank 0 in attention of layer 3"


@pytest.mark.parametrize(
    "bad",
    [b"{", b'{"norm": "\xff"}', b'{"norm": -1.5}', b'{"other": ' + b"[" * 100_000],
    ids=["cut", "no text", "no number", "nested too deep"],
)
def test_invalid_json_of_a_rank_raises_records_error_with_file_name(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "device-0.json").write_bytes(bad)
    with pytest.raises(RecordsError, match=r"device-0\.json cannot be read: "):
        evidence.read_evidence([tmp_path])


def test_replayed_step_without_device_file_has_unknown_cause(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "heartbeats-0.bin", 0, 1, waits=False, members=lambda _: ("0", [0])).record_step(
        heartbeats.REPLAY
    )
    assert find_cause(evidence.read_evidence([tmp_path])).kind == "unknown"


SPY = """Process {pid}: python train.py
Python v3.11.4 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
{frames}
Thread 0x7F1 (idle): "Thread-1"
    wait (threading.py:324)
"""
IN_REDUCE = "    all_reduce (torch/distributed/distributed_c10d.py:2501)\n    step (/app/train.py:40)\n    <module> (/app/train.py:90)\n"
ELSEWHERE = "    load (/app/data.py:12)\n    <module> (/app/train.py:70)\n"


def test_py_spy_dumps_name_the_process_outside_the_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in range(4):
        text = SPY.format(pid=100 + rank, frames=ELSEWHERE if rank == 3 else IN_REDUCE)
        (tmp_path / f"rank{rank}.txt").write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", "explain", str(tmp_path), "--json"])
    assert ended.value.code == 0
    (cause,) = json.loads(capsys.readouterr().out)
    assert (cause["kind"], cause["ranks"], cause["line"]) == ("behind", [3], "app/data.py:12 in load")


def test_process_id_in_a_file_name_is_not_taken_as_a_rank(tmp_path: Path) -> None:
    for pid in (101, 102, 103):
        frames = ELSEWHERE if pid == 103 else IN_REDUCE
        (tmp_path / f"dump-{pid}.txt").write_text(SPY.format(pid=pid, frames=frames))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert (found.kind, found.ranks) == ("behind", [])
    assert found.message.startswith("process 103 (dump-103.txt) is at app/data.py:12 in load")


def test_unreadable_dumps_are_listed_and_other_files_are_ignored(tmp_path: Path) -> None:
    """Rank 2's file is empty, rank 4's holds py-spy's error, and rank 5's is a flight recorder that was cut off."""
    for rank, frames in ((0, IN_REDUCE), (1, IN_REDUCE), (3, ELSEWHERE)):
        (tmp_path / f"rank-{rank}.txt").write_text(SPY.format(pid=100 + rank, frames=frames))
    (tmp_path / "rank-2.txt").touch()
    (tmp_path / "rank-4.txt").write_text("Error: Permission Denied: Try running again with elevated permissions\n")
    (tmp_path / "flight-5.json").write_text('{"entries": [')
    (tmp_path / "README.md").write_text("dumps of Monday\n")
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert (found.kind, found.ranks) == ("behind", [3])
    assert [Path(text.split()[0]).name for text in found.unread] == ["flight-5.json", "rank-2.txt", "rank-4.txt"]
    assert found.why[-1] == "Nothing is known about ranks 2 and 4-5."


def test_number_of_an_unreadable_dump_is_not_reported_as_a_rank(tmp_path: Path) -> None:
    for pid in (101, 102):
        (tmp_path / f"dump-{pid}.txt").write_text(SPY.format(pid=pid, frames=IN_REDUCE))
    (tmp_path / "dump-103.txt").touch()
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert [Path(text.split()[0]).name for text in found.unread] == ["dump-103.txt"]
    assert not any("103" in why for why in found.why)


def test_dumps_with_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    """Three containers each have a process 1; the third is elsewhere. A file that is given twice counts once."""
    paths = [tmp_path / f"n{host}" / "dump-1.txt" for host in range(3)]
    for host, path in enumerate(paths):
        path.parent.mkdir()
        path.write_text(SPY.format(pid=1, frames=ELSEWHERE if host == 2 else IN_REDUCE))
    found = find_cause(evidence.read_evidence([*paths, paths[0].parent]))
    assert found.message.startswith("process 1 (n2/dump-1.txt) is at app/data.py:12 in load, and the other 2 wait")
    assert found.read == [f"n{host}/dump-1.txt" for host in range(3)]


def test_second_flight_recorder_of_a_rank_is_listed_as_unread(tmp_path: Path) -> None:
    for host in ("a", "b"):
        (tmp_path / host).mkdir()
        content = {"rank": 0, **make_flight_record(("all_reduce", [4], "started"))}
        (tmp_path / host / "flight-0.json").write_text(json.dumps(content))
    found = evidence.read_evidence([tmp_path / "a", tmp_path / "b"])
    assert found.read == ["a/flight-0.json"]
    assert found.unread[0].startswith(f"{tmp_path}/b/flight-0.json is of rank 0, and so is another")


def test_flight_recorders_without_ranks_are_answered_with_file_names_to_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, state in (("a", "started"), ("b", "completed")):
        (tmp_path / f"{name}.json").write_text(json.dumps(make_flight_record(("all_reduce", [4], state))))
    with pytest.raises(SystemExit):
        cli.main(["hang", "explain", str(tmp_path)])
    out = capsys.readouterr().out
    assert "keeps whom waiting.\n" in out
    assert "name them flight-0.json, flight-1.json" in out


def test_html_page_overwrites_an_existing_file_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options `--html rank-*.txt` have no name for the page, so that the first dump is taken for it."""
    dumps = [tmp_path / f"rank-{rank}.txt" for rank in range(3)]
    for rank, path in enumerate(dumps):
        path.write_text(SPY.format(pid=rank + 100, frames=IN_REDUCE))
    before = dumps[0].read_text()
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", "explain", "--html", *map(str, dumps)])
    assert (ended.value.code, "such as --html hang.html" in capsys.readouterr().err) == (2, True)
    assert dumps[0].read_text() == before
    page = tmp_path / "page.html"
    page.write_text("of Monday")
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", "explain", str(tmp_path), "--html", str(page), "--force"])
    assert (ended.value.code, "of Monday" in page.read_text()) == (0, False)


def test_empty_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.txt").write_text(SPY.format(pid=100, frames=ELSEWHERE))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", "explain", ""])
    assert (ended.value.code, "a path is empty" in capsys.readouterr().err) == (2, True)


def test_html_page_escapes_names_from_dumps(tmp_path: Path) -> None:
    """The name of a function in a dump may be anything."""
    for rank in range(3):
        frames = ELSEWHERE.replace("load", "<script>alert(1)</script>") if rank == 2 else IN_REDUCE
        (tmp_path / f"rank{rank}.txt").write_text(SPY.format(pid=100 + rank, frames=frames))
    page = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["hang", "explain", *map(str, sorted(tmp_path.glob("rank*.txt"))), "--html", str(page)])
    assert ended.value.code == 0
    text = page.read_text()
    assert "behind" in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert(1)" not in text


def test_stacks_waiting_at_one_line_have_unknown_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.txt").write_text(SPY.format(pid=100 + rank, frames=IN_REDUCE))
    with pytest.raises(SystemExit):
        cli.main(["hang", "explain", str(tmp_path)])
    out = capsys.readouterr().out
    assert "unknown" in out
    assert "Read: rank0.txt, rank1.txt." in out


def make_flight_record(*calls: tuple[str, list[int], str]) -> dict[str, object]:
    """Return a flight recorder's JSON of two ranks, with one (operation, shape, state) for each collective."""
    entries = [
        {
            "collective_seq_id": n,
            "input_dtypes": ["Float"],
            "input_sizes": [shape],
            "is_p2p": False,
            "process_group": ["0", "default_pg"],
            "profiling_name": f"nccl:{op}",
            "retired": state == "completed",
            "state": state,
            "time_created_ns": n,
        }
        for n, (op, shape, state) in enumerate(calls, 1)
    ]
    return {"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": entries}


def test_flight_recorders_name_the_rank_that_launched_no_collective(tmp_path: Path) -> None:
    done = ("all_reduce", [4, 3], "completed")
    (tmp_path / "flight-0.json").write_text(json.dumps(make_flight_record(done, ("all_gather", [4], "started"))))
    (tmp_path / "flight-1.json").write_text(json.dumps(make_flight_record(done)))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert (found.kind, found.ranks, found.number, found.collective) == ("behind", [1], 2, "all_gather of float [4]")


STEP = [
    (op, phase, layer)
    for layer in range(2)
    for op, phase in (("all_gather", "merge"), ("reduce_scatter", "merge"), ("all_reduce", "moe"))
]


@pytest.mark.parametrize("flight", [False, True], ids=["heartbeats alone", "with flight recorders"])
def test_skipped_gather_is_named_though_hosts_launch_more_steps(tmp_path: Path, flight: bool) -> None:
    """With NCCL, hosts launch two more steps after the fault in layer 1; its recorder has other names of collectives."""
    job = Job(tmp_path, 2, waits=False)
    for step in range(5):
        for rank, (number, call) in itertools.product(range(2), enumerate(STEP)):
            if (step, rank, number) != (2, 1, 3):
                job.run_collective(rank, *call)
    if flight:
        for rank in range(2):
            calls = [
                (f"_{m.call.op}_base", [2, 64], "scheduled")
                for m in heartbeats.read_heartbeats(tmp_path / f"heartbeats-{rank}.bin").collectives
                if m.call
            ]
            content: Any = make_flight_record(*calls)
            for entry, m in zip(
                content["entries"],
                heartbeats.read_heartbeats(tmp_path / f"heartbeats-{rank}.bin").collectives,
                strict=True,
            ):
                entry["time_created_ns"] = m.began_ns
            (tmp_path / f"flight-{rank}.json").write_text(json.dumps(content))
    found = job.found()
    assert (found.kind, found.ranks, found.phase, found.layer, found.number) == ("order", [1], "merge", 1, 2 * 6 + 4)
    assert "rank 1 began reduce_scatter of float32 [2, 64] (phase merge, layer 1" in found.message
    assert "rank 0 all_gather of float32 [2, 64]" in found.message
    assert any("left that one out" in why for why in found.why)


def test_rank_without_recorded_collectives_is_not_blamed(tmp_path: Path) -> None:
    """Rank 1 may wait in the same collective."""
    (tmp_path / "flight-0.json").write_text(json.dumps(make_flight_record(("all_reduce", [4], "started"))))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert (found.kind, found.ranks, found.waiting) == ("unknown", [], [0])
    assert "of rank 1 no collectives were read" in found.message


def test_differing_sizes_are_no_fault_in_all_to_all_or_completed_calls(tmp_path: Path) -> None:
    """A completed collective with different sizes did no harm if all ranks continued with the same one."""
    done, started = "completed", "started"
    calls = (
        [("alltoall", 4, 5, started)],
        [("all_reduce", 4, 5, done), ("all_reduce", 6, 6, done), ("barrier", 1, 1, started)],
    )
    for one in calls:
        for rank in range(2):
            content = make_flight_record(*[(op, [sizes[rank]], state) for op, *sizes, state in one])
            (tmp_path / f"flight-{rank}.json").write_text(json.dumps(content))
        assert find_cause(evidence.read_evidence([tmp_path])).kind == "together"


def test_flight_recorders_name_differing_shapes(tmp_path: Path) -> None:
    (tmp_path / "flight-0.json").write_text(json.dumps(make_flight_record(("all_reduce", [4], "started"))))
    (tmp_path / "flight-1.json").write_text(json.dumps(make_flight_record(("all_reduce", [5], "started"))))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert found.kind == "shape"
    assert "all_reduce of float [4]" in found.message
    assert "all_reduce of float [5]" in found.message


def test_pickle_is_refused_with_advice_and_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x04\x95rest")
    with pytest.raises(RecordsError, match=r"is a pickle.*_dump_fr_trace_json"):
        evidence.read_evidence([tmp_path / "nccl_trace_rank_0"])


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"entries": 3}', '{"entries": [{}]}', '{"entries": [[]]}', "Thread 1 (", "Process 1: x\n    f (y:1)"],
)
def test_file_without_a_dump_raises_records_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank0.txt").write_text(text)
    with pytest.raises(RecordsError):
        evidence.read_evidence([tmp_path / "rank0.txt"])


def test_main_thread_is_found_in_dumps_of_faulthandler_and_py_spy() -> None:
    text = 'Thread 0x01 [gloo] (most recent call first):\n  File "a.py", line 3 in f\n\nCurrent thread 0x02 (most recent call first):\n  File "b.py", line 4 in <module>\n'
    first, second = dumps.parse_threads(text)
    assert not first.is_main
    assert second.is_main
    assert [t.is_main for t in dumps.parse_threads(SPY.format(pid=1, frames=IN_REDUCE))] == [True, False]


def make_merge_signals(
    rank: int, ranks: int, completed: int, heard: dict[int, int], number: int = 0, phase: str = "merge"
) -> Signals:
    """Return the signals of one kind of barrier in a rank's memory: its own count, and the counts received from its
    peers.
    """
    row = [completed, *(completed if peer == rank else heard[peer] for peer in range(ranks))]
    one = BarrierCounters(number=number, what="merge of symm", phase=phase, ranks=tuple(range(ranks)), rows=[row])
    return Signals(barriers=[one])


def write_replaying_ranks(folder: Path, signals: Sequence[Signals], norms: Sequence[int]) -> Finding:
    """Write the files of ranks that replay a step on their devices, each with its last norm and its signals."""
    ranks = range(len(signals))
    for rank, own_signals, norm in zip(ranks, signals, norms, strict=True):
        own = HeartbeatWriter(
            folder / f"heartbeats-{rank}.bin", rank, len(ranks), waits=False, members=lambda _: ("0", ranks)
        )
        own.record_step(heartbeats.REPLAY)
        (folder / f"device-{rank}.json").write_bytes(msgspec.json.encode(Device(norm=norm)))
        (folder / f"signals-{rank}.json").write_bytes(msgspec.json.encode(own_signals))
    return find_cause(evidence.read_evidence([folder]))


def test_rank_with_a_lost_signal_is_named_and_not_the_waiting_rank(tmp_path: Path) -> None:
    """Both ranks began the 70th merge: rank 1 got rank 0's signal and continued; rank 0 has 69 signals only. Norm 3 = 2
    · 1 + 1.
    """
    found = write_replaying_ranks(
        tmp_path, [make_merge_signals(0, 2, 69, {1: 69}), make_merge_signals(1, 2, 70, {0: 70})], [3, 3]
    )
    assert (found.kind, found.ranks, found.waiting, found.phase, found.layer) == ("signal", [1], [0], "merge", 1)
    assert (found.collective, found.number) == ("merge of symm", 70)
    assert "rank 1 has passed merge of symm, barrier 70, and none of its signals has reached rank 0" in found.message


@pytest.mark.parametrize("norm", [2, 3])
def test_prefix_gather_belongs_to_the_layer_that_attends_to_it(tmp_path: Path, norm: int) -> None:
    """Norm 2 = 2 · 0 + 2 is the last before layer 1's prefixes are gathered in captured pieces, 3 = 2 · 1 + 1 for its
    windows.
    """
    signals = [
        make_merge_signals(0, 2, 4, {1: 4}, phase="prefix_gather"),
        make_merge_signals(1, 2, 5, {0: 5}, phase="prefix_gather"),
    ]
    found = write_replaying_ranks(tmp_path, signals, [norm, norm])
    assert (found.kind, found.phase, found.layer) == ("signal", "prefix_gather", 1)


def test_rank_with_a_signal_missing_at_three_peers_is_named(tmp_path: Path) -> None:
    """Ranks 0 to 2 have each other's fifth signal, and only the fourth of rank 3, which has completed barrier 5 itself."""
    waiting = [make_merge_signals(r, 4, 4, {p: 4 if p == 3 else 5 for p in range(4) if p != r}) for r in range(3)]
    found = write_replaying_ranks(tmp_path, [*waiting, make_merge_signals(3, 4, 5, {0: 5, 1: 5, 2: 5})], [3, 3, 3, 3])
    assert (found.kind, found.ranks, found.waiting) == ("signal", [3], [0, 1, 2])


def test_signal_missing_at_one_peer_is_lost_though_its_sender_waits_too(tmp_path: Path) -> None:
    """Rank 2's signal reached rank 1 and not rank 0; rank 2 waits itself, although all its peers have signalled."""
    signals = [
        make_merge_signals(0, 3, 4, {1: 5, 2: 4}),
        make_merge_signals(1, 3, 5, {0: 5, 2: 5}),
        make_merge_signals(2, 3, 4, {0: 5, 1: 5}),
    ]
    found = write_replaying_ranks(tmp_path, signals, [3, 3, 3])
    assert (found.kind, found.ranks, found.waiting) == ("signal", [2], [0])


def test_rank_missing_from_a_barrier_is_named_with_position_of_its_device(tmp_path: Path) -> None:
    """Rank 1 has rank 0's fifth signal and has completed four: its device is in the experts of layer 0, norm 2 = 2 · 0
    + 2.
    """
    found = write_replaying_ranks(
        tmp_path, [make_merge_signals(0, 2, 4, {1: 4}), make_merge_signals(1, 2, 4, {0: 5})], [3, 2]
    )
    assert (found.kind, found.ranks, found.waiting, found.phase, found.layer) == ("behind", [1], [0], "mlp", 0)
    assert "rank 1 is by its device in mlp of layer 0; rank 0 waits for its signal in a kernel" in found.message
    assert "merge of symm, barrier 5 (phase merge, layer 1)" in found.message


def test_wrapped_counters_are_compared_by_difference(tmp_path: Path) -> None:
    """After 2³¹ − 1 comes −2³¹."""
    most = 2**31 - 1
    found = write_replaying_ranks(
        tmp_path,
        [make_merge_signals(0, 2, most, {1: most}), make_merge_signals(1, 2, -most - 1, {0: -most - 1})],
        [3, 3],
    )
    assert (found.kind, found.ranks) == ("signal", [1])


def test_barriers_without_waiting_ranks_are_ignored(tmp_path: Path) -> None:
    """There are as many signals as barriers, so that only the devices' norms count."""
    found = write_replaying_ranks(
        tmp_path, [make_merge_signals(0, 2, 4, {1: 4}), make_merge_signals(1, 2, 4, {0: 4})], [3, 3]
    )
    assert (found.kind, found.ranks) == ("device", [])


def test_ranks_read_at_different_times_are_not_compared(tmp_path: Path) -> None:
    """No rank can be two barriers ahead of a waiting one."""
    found = write_replaying_ranks(
        tmp_path, [make_merge_signals(0, 2, 4, {1: 4}), make_merge_signals(1, 2, 9, {0: 9})], [3, 3]
    )
    assert (found.kind, found.ranks) == ("device", [])


def test_ranks_waiting_for_each_other_in_two_barriers_are_reported(tmp_path: Path) -> None:
    """Rank 0 is in barrier 5 of the first buffer, and rank 1 in barrier 5 of the second."""
    barriers = [
        [make_merge_signals(r, 2, 4, {1 - r: 4 + (n != r)}, number=n).barriers[0] for n in range(2)] for r in range(2)
    ]
    found = write_replaying_ranks(tmp_path, [Signals(barriers=one) for one in barriers], [3, 3])
    assert (found.kind, found.ranks) == ("apart", [0, 1])


def test_rank_waiting_in_a_kernel_is_not_blamed_for_a_host_collective(tmp_path: Path) -> None:
    """On the CPU, rank 1 waits in a reduction for rank 0, which waits in a kernel for rank 1's signal."""
    job = Job(tmp_path, 2)
    job.run_steps()
    job.ranks[0].set_layer(1)
    job.ranks[0].set_phase("merge")
    job.run_collective(1, "all_reduce", "attn_reduce", 1, hangs=True)
    for rank, own_signals in enumerate((make_merge_signals(0, 2, 4, {1: 4}), make_merge_signals(1, 2, 5, {0: 5}))):
        (tmp_path / f"signals-{rank}.json").write_bytes(msgspec.json.encode(own_signals))
    found = job.found()
    assert (found.kind, found.ranks, found.phase, found.layer) == ("signal", [1], "merge", 1)


def test_unreadable_signals_are_listed_as_unread(tmp_path: Path) -> None:
    found = write_replaying_ranks(
        tmp_path, [Signals(unread="the copy had not ended"), make_merge_signals(1, 2, 5, {0: 5})], [3, 3]
    )
    assert found.kind == "device"
    assert found.unread == ["Signals of rank 0: the copy had not ended."]


def test_nccl_ras_report_is_stored_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is one line over loopback; NCCL answers and closes the connection."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            line, _ = server.accept()
            with line:
                requests.append(line.recv(100))
                line.sendall(b"NCCL version 2.28\nCommunicators: <1 mismatch>\n")

        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=answer)
        thread.start()
        hang_capture.fetch_nccl_report(tmp_path / "nccl-ras.txt")
        thread.join()
    assert requests == [b"verbose status\n"]
    Job(tmp_path, 1).run_steps(1)
    assert "Communicators: &lt;1 mismatch&gt;" in hang_format.render_page(hang_format.read_hangs([tmp_path]))


def test_unreachable_nccl_ras_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses are a port without a listener, an invalid one and an empty one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    for address in (f"127.0.0.1:{free}", "nowhere", ""):
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        hang_capture.fetch_nccl_report(tmp_path / "nccl-ras.txt")
    assert [*tmp_path.iterdir()] == []


COLLECTIVES = st.tuples(  # a collective: its rank, its operation, its group, and whether it hangs
    st.integers(0, 2), st.sampled_from(["all_reduce", "all_gather"]), st.sampled_from(["a", "b"]), st.booleans()
)
MEMORY = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), min_size=3, max_size=3)
"""For each rank, the number of completed barriers and of its peers' signals."""


@given(
    collectives=st.lists(COLLECTIVES, max_size=12),
    memory=st.none() | MEMORY,
    waits=st.booleans(),
    norms=st.none() | MEMORY,
)
def test_any_files_of_ranks_give_a_message(
    collectives: list[tuple[int, str, str, bool]],
    memory: list[tuple[int, ...]] | None,
    waits: bool,
    norms: list[tuple[int, ...]] | None,
) -> None:
    """A rank that hangs in a collective runs no more. No rank is both blamed and waiting."""
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name), 3, {"a": [0, 1, 2], "b": [0, 1]}, waits=waits)
        stuck: set[int] = set()
        for rank, op, group, hangs in collectives:
            if rank not in stuck and (group == "a" or rank < 2):
                job.run_collective(rank, op, "moe", 0, group=group, hangs=hangs)
                stuck |= {rank} if hangs else set()
        for rank, (completed, *heard) in enumerate(memory or []):
            own_signals = make_merge_signals(
                rank, 3, completed, dict(zip([p for p in range(3) if p != rank], heard, strict=True))
            )
            (job.folder / f"signals-{rank}.json").write_bytes(msgspec.json.encode(own_signals))
        for rank, (norm, *_) in enumerate(norms or []):
            (job.folder / f"device-{rank}.json").write_bytes(msgspec.json.encode(Device(norm=norm)))
        found = job.found()
        assert found.message
        if found.kind in ("behind", "signal", "device"):
            assert not {*found.ranks} & {*found.waiting}
        (hang,) = hang_format.read_hangs([job.folder])
        assert hang_format.format_text(hang)


@pytest.mark.parametrize(
    ("ranks", "out", "expected"),
    [
        (4, 1, "rank 0 is at app/data.py:12 in load, and the other 3 wait"),
        (5, 2, "rank 0, rank 1 are at app/data.py:12 in load, and the other 3 wait"),
        (4, 2, ""),
        (4, 3, ""),
    ],
)
def test_stacks_blame_a_minority_only(ranks: int, out: int, expected: str, tmp_path: Path) -> None:
    """If half of the ranks are elsewhere, it is unknown which half waits for the other."""
    for rank in range(ranks):
        frames = ELSEWHERE if rank < out else IN_REDUCE
        (tmp_path / f"rank{rank}.txt").write_text(SPY.format(pid=100 + rank, frames=frames))
    found = find_cause(evidence.read_evidence([tmp_path]))
    assert found.kind == ("behind" if expected else "unknown")
    if expected:
        assert found.message == f"{expected} in all_reduce, at app/train.py:40 in step"
        assert (found.ranks, found.waiting) == ([*range(out)], [*range(out, ranks)])
