"""Test how a rank reports the signal counters in its memory while a kernel may wait for one."""

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
from dcpbench.exchange.signals import BarrierKind, BufferBarriers
from dcpbench.exchange.torch_collectives import Group
from dcpbench.hangs.signal_waits import Signals
from dcpbench.kernels.symm_mem import BufferAllocator
from dcpbench.launch import hang_capture
from dcpbench.measuring import flight_recorder

RANKS = 3


def make_barriers() -> BufferBarriers:
    """Return the barriers of rank 1 of three: `merge`, in which the first block waits for all, and `q_gather`, in
    which each block waits for the same block.
    """
    allocator = BufferAllocator(torch.zeros(1 << 20, dtype=torch.uint8))
    kinds = [
        BarrierKind(what="merge of symm", phase="merge", counters=allocator.allocate_counters(RANKS), by_blocks=False),
        BarrierKind(
            what="q_gather of symm", phase="q_gather", counters=allocator.allocate_counters(RANKS), by_blocks=True
        ),
    ]
    return BufferBarriers(Group(size=RANKS, rank=1, handle=object()), kinds)


@pytest.fixture(autouse=True)
def _no_others(monkeypatch):
    monkeypatch.setattr(signals, "_known", [])
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda _: [0, 1, 2])


def read_signals() -> Signals:
    """Read and decode the counters."""
    return msgspec.json.decode(signals.read_signals(limit_s=0.05), type=Signals)


def test_counters_stored_by_distance_are_reported_by_rank():
    """Fill rank 1's counters: column n belongs to rank (1 + n) mod 3. In `merge` the counts of the blocks follow the
    columns.
    """
    barriers = make_barriers()
    merge, q_gather = (kind.counters for kind in barriers.kinds)
    merge.flatten()[:5] = torch.tensor([0, 7, 6, 5, 5])
    q_gather[0], q_gather[1] = torch.tensor([3, 4, 3]), torch.tensor([2, 3, 2])
    assert [(m.what, m.ranks, m.rows) for m in read_signals().barriers] == [
        ("merge of symm", (0, 1, 2), [[5, 6, 5, 7]]),
        ("q_gather of symm", (0, 1, 2), [[3, 3, 3, 4], [2, 2, 2, 3]]),
    ]


def test_freed_memory_and_a_single_rank_report_no_counters():
    barriers = make_barriers()
    alone = BufferBarriers(Group(size=1, rank=0, handle=None), barriers.kinds)
    assert len(read_signals().barriers) == 2
    del barriers
    assert alone.kinds == []
    assert signals.read_signals() == b""


def test_cuda_error_is_reported_as_the_reason_for_missing_counters(monkeypatch):
    """Raise RuntimeError, as torch does for every CUDA error."""
    barriers = make_barriers()  # kept alive

    def fail_to_copy(_: BufferBarriers) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    monkeypatch.setattr(BufferBarriers, "copy_out", fail_to_copy)
    found = read_signals()
    assert barriers.kinds
    assert found.barriers == []
    assert found.unread == "its counters could not be copied: CUDA error: an illegal memory access was encountered"


def test_copy_that_does_not_end_times_out(monkeypatch):
    """Simulate a GPU with an event that never completes."""
    barriers = make_barriers()
    cuda = torch.device("cuda", 0)
    never = SimpleNamespace(record=lambda: None, query=lambda: False)
    monkeypatch.setattr(signals, "_aside", {cuda: None})
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.Event", lambda: never)
    assert signals._wait_for_copies([barriers], {cuda}, 0.02) == "the copy of its counters had not ended after 0.02 s"


def test_changing_counters_are_not_reported(monkeypatch):
    """Change counters during the copy, as in a slow run: values that two ranks read at different moments are
    inconsistent.
    """
    barriers = make_barriers()
    counters = barriers.kinds[0].counters
    monkeypatch.setattr(signals, "COPY_INTERVAL_S", 0.0)
    copy_out = BufferBarriers.copy_out

    def copy_and_count(of: BufferBarriers) -> None:
        counters.add_(1)
        copy_out(of)

    monkeypatch.setattr(BufferBarriers, "copy_out", copy_and_count)
    assert read_signals() == Signals(unread="its counters still changed while they were read")


@pytest.mark.parametrize("signal_stacks", ["", "Current thread 0x01 (most recent call first):\n"], ids=["none", "some"])
def test_stacks_missing_from_the_signal_handler_come_from_the_responder(tmp_path, monkeypatch, signal_stacks):
    """Answer from another thread, as the main thread inside a driver may never receive SIGUSR1; a third thread never
    returns.
    """
    logs = tmp_path / "logs"
    logs.mkdir()
    never = threading.Event()
    monkeypatch.setattr(flight_recorder, "MAX_WRITER_DELAY_S", 0.5)
    responses = {
        hang_capture.FLIGHT: never.wait,
        hang_capture.STACKS: flight_recorder.collect_stacks,
        hang_capture.ANSWERED: lambda: b"{}",
    }
    flight_recorder.start_responder(
        logs / hang_capture.ASK.format(0), {logs / name.format(0): respond for name, respond in responses.items()}
    )
    send_request = hang_capture._send_request

    def send_request_when_ready(pipe) -> bool:
        while not send_request(pipe):
            time.sleep(0.01)
        return True

    monkeypatch.setattr(hang_capture, "_send_request", send_request_when_ready)
    ranks = SimpleNamespace(
        folder=tmp_path,
        logs=logs,
        ranks=range(1),
        find_pids=lambda: {0: os.getpid()},
        collect_stacks=lambda: {"0": signal_stacks},
        read_exits=list,
    )
    folder, stacks = hang_capture.capture_hang(ranks)
    (logs / hang_capture.ASK.format(0)).unlink()
    assert (folder / "stacks-0.txt").read_text() == stacks["0"]
    assert stacks["0"] == signal_stacks or (
        not signal_stacks and "in test_stacks_missing_from_the_signal_handler" in stacks["0"]
    )
    assert [*logs.iterdir()] == []
