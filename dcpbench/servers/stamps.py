"""Sockets that say when what they read had come: by the kernel, however late their process gets to read it.

A client that shares its machine is woken late, and late again for the last of many streams that are told of at once. Linux writes
down when a packet came (SO_TIMESTAMPNS, of TCP since 4.14); elsewhere the time of the read is all that is known.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Any, Self

TIMESPEC = struct.Struct("@ll")
ANCILLARY = socket.CMSG_SPACE(TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
SO_TIMESTAMPNS = 35
"""Of Linux, but for three architectures that nobody serves from; where it means nothing the kernel says so."""
NS = 1e-9
SURE_NS = 20_000
"""Between two readings of one clock, within which another is taken for simultaneous."""


class StampedSocket(socket.socket):
    """Of TCP. What asyncio reads from it is stamped."""

    came_s: float | None = None
    """When what was read last had come, by time.perf_counter(); None where the kernel does not say."""
    _stamps = False

    def stamp(self) -> Self:
        """Itself, whose bytes the kernel stamps from now on, where it can."""
        if sys.platform == "linux":
            try:
                self.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self._stamps = True
            except OSError:
                pass
        return self

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:  # noqa: ANN401 -- whatever asyncio reads into
        """See socket.socket."""
        if not self._stamps:
            return super().recv_into(buffer, nbytes, flags)
        count, told, _, _ = self.recvmsg_into([buffer], ANCILLARY, flags)
        self.came_s = came_s(told)
        return count


def came_s(told: list[tuple[int, int, bytes]]) -> float | None:
    """When the bytes came with which the kernel tells this, by time.perf_counter(); None where it does not say.

    Of several packets that were read as one it tells of the last.
    """
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS) and len(data) == TIMESPEC.size:
            seconds, ns = TIMESPEC.unpack(data)
            return (seconds * 1_000_000_000 + ns - _apart_ns()) * NS if seconds else None
    return None


def _apart_ns() -> int:
    """The date less time.perf_counter(), now, as clocks may be set; read again where this process was stopped in between."""
    while True:
        before = time.perf_counter_ns()
        date = time.time_ns()
        if (after := time.perf_counter_ns()) - before < SURE_NS:
            return date - (before + after) // 2
