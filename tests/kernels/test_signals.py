"""What a rank says of the signals in its memory while a kernel may wait for one: counters as they lie there, and errors."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import torch

from dcpbench.exchange import signals
from dcpbench.exchange.signals import Kind, Meetings
from dcpbench.exchange.torch_collectives import Group
from dcpbench.hangs.signal_waits import Signals
from dcpbench.kernels.symm_mem import Carver
from dcpbench.launch import hang_capture
from dcpbench.measuring import flight_recorder

RANKS = 3


def made() -> Meetings:
    """Of rank 1 of three: `merge`, whose first block meets for all, and `q_gather`, of which each block meets by itself."""
    carver = Carver(torch.zeros(1 << 20, dtype=torch.uint8))
    kinds = [
        Kind(what="merge of symm", phase="merge", counters=carver.allocate_counters(RANKS), by_blocks=False),
        Kind(what="q_gather of symm", phase="q_gather", counters=carver.allocate_counters(RANKS), by_blocks=True),
    ]
    return Meetings(Group(size=RANKS, rank=1, handle=object()), kinds)


@pytest.fixture(autouse=True)
def _no_others(monkeypatch):
    monkeypatch.setattr(signals, "_known", [])
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0, 1, 2])


def told() -> Signals:
    """What is read."""
    return msgspec.json.decode(signals.read_signals(limit_s=0.05), type=Signals)


def test_counters_are_told_by_rank_though_they_lie_by_distance():
    """Column n of rank 1's is what rank (1 + n) mod 3 has added. Of `merge` the blocks' counts lie behind the columns."""
    meetings = made()
    merge, q_gather = (kind.counters for kind in meetings.kinds)
    merge.flatten()[:5] = torch.tensor([0, 7, 6, 5, 5])
    q_gather[0], q_gather[1] = torch.tensor([3, 4, 3]), torch.tensor([2, 3, 2])
    assert [(m.what, m.ranks, m.rows) for m in told().meetings] == [
        ("merge of symm", (0, 1, 2), [[5, 6, 5, 7]]),
        ("q_gather of symm", (0, 1, 2), [[3, 3, 3, 4], [2, 2, 2, 3]]),
    ]


def test_of_memory_that_is_gone_and_of_a_rank_alone_nothing_is_told():
    meetings = made()
    alone = Meetings(Group(size=1, rank=0, handle=None), meetings.kinds)
    assert len(told().meetings) == 2
    del meetings
    assert alone.kinds == []
    assert signals.read_signals() == b""


def test_a_broken_device_is_a_sentence_and_no_error(monkeypatch):
    """torch raises RuntimeError for whatever CUDA says."""
    meetings = made()  # kept

    def broken(_: Meetings) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    monkeypatch.setattr(Meetings, "copy_out", broken)
    got = told()
    assert meetings.kinds
    assert got.meetings == []
    assert got.unread == "its counters could not be copied: CUDA error: an illegal memory access was encountered"


def test_a_copy_that_does_not_end_is_given_up(monkeypatch):
    """A GPU's, played: its event never comes."""
    meetings = made()
    cuda = torch.device("cuda", 0)
    never = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(signals, "_aside", {cuda: None})
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.Event", lambda: never)
    assert signals._wait_for_copies([meetings], {cuda}, 0.02) == "the copy of its counters had not ended after 0.02 s"


def test_counters_that_still_change_are_not_told(monkeypatch):
    """As in a run that is only slow: what two ranks have read at two moments does not go together."""
    meetings = made()
    counters = meetings.kinds[0].counters
    monkeypatch.setattr(signals, "APART_S", 0.0)
    copy_out = Meetings.copy_out

    def counting(of: Meetings) -> None:
        counters.add_(1)
        copy_out(of)

    monkeypatch.setattr(Meetings, "copy_out", counting)
    assert told() == Signals(unread="its counters still changed while they were read")


@pytest.mark.parametrize("brought", ["", "Current thread 0x01 (most recent call first):\n"], ids=["none", "some"])
def test_stacks_that_no_signal_brought_are_those_that_the_rank_wrote_itself(tmp_path, monkeypatch, brought):
    """A main thread inside a driver may never see SIGUSR1; another thread answers, though a third never comes back."""
    logs = tmp_path / "logs"
    logs.mkdir()
    never = threading.Event()
    monkeypatch.setattr(flight_recorder, "EACH_S", 0.5)
    says = {
        hang_capture.FLIGHT: never.wait,
        hang_capture.STACKS: flight_recorder.collect_stacks,
        hang_capture.ANSWERED: lambda: b"{}",
    }
    flight_recorder.start_responder(
        logs / hang_capture.ASK.format(0), {logs / name.format(0): say for name, say in says.items()}
    )
    ask = hang_capture._send_request

    def ask_once_it_listens(pipe) -> bool:
        while not ask(pipe):
            time.sleep(0.01)
        return True

    monkeypatch.setattr(hang_capture, "_send_request", ask_once_it_listens)
    ranks = SimpleNamespace(
        folder=tmp_path,
        logs=logs,
        ranks=range(1),
        find_pids=lambda: {0: os.getpid()},
        collect_stacks=lambda: {"0": brought},
        read_exits=list,
    )
    folder, stacks = hang_capture.capture_hang(ranks)
    (logs / hang_capture.ASK.format(0)).unlink()
    assert (folder / "stacks-0.txt").read_text() == stacks["0"]
    assert stacks["0"] == brought or (not brought and "in test_stacks_that_no_signal_brought" in stacks["0"])
    assert [*logs.iterdir()] == []
