"""Sockets that report when received data arrived: by the kernel, regardless of how late the process reads it.

A client that shares its machine is woken late, and is even later for the last of many streams reported at once. Linux
records when a packet arrived (SO_TIMESTAMPNS, for TCP since 4.14); elsewhere only the time of the read is known.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Any, Self

TIMESPEC = struct.Struct("@ll")
ANCILLARY = socket.CMSG_SPACE(TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
SO_TIMESTAMPNS = 35  # value on Linux but for three architectures not used for serving, where the kernel refuses it
NS = 1e-9
SURE_NS = 20_000  # between two readings of one clock, within which another is taken for simultaneous


class StampedSocket(socket.socket):
    """TCP socket with timestamps on the data that asyncio reads from it."""

    came_s: float | None = None  # arrival of the data read last, by time.perf_counter(); None: the kernel gives none
    _stamps = False

    def enable_timestamps(self) -> Self:
        """Enable timestamps of received bytes by the kernel if possible; return the socket."""
        if sys.platform == "linux":
            try:
                self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self._stamps = True
            except OSError:
                pass
        return self

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ANN401 -- any buffer of asyncio
        """Implement socket.socket.recv_into."""
        if not self._stamps:
            return super().recv_into(buffer, nbytes, flags)
        count, ancillary, _, _ = self.recvmsg_into([buffer], ANCILLARY, flags)
        self.came_s = read_arrival_s(ancillary)
        return count


def read_arrival_s(ancillary: list[tuple[int, int, bytes]]) -> float | None:
    """Return the arrival time in a read's ancillary data, by time.perf_counter(); None if the kernel does not report
    it.

    For several packets in one read, it is that of the last.
    """
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS) and len(data) == TIMESPEC.size:
            seconds, ns = TIMESPEC.unpack(data)
            return (seconds * 1_000_000_000 + ns - _measure_clock_offset_ns()) * NS if seconds else None
    return None


def _measure_clock_offset_ns() -> int:
    """Return the difference of the date and time.perf_counter() now, as clocks may be set; repeated if the process was
    interrupted.
    """
    while True:
        before = time.perf_counter_ns()
        date = time.time_ns()
        if (after := time.perf_counter_ns()) - before < SURE_NS:
            return date - (before + after) // 2
