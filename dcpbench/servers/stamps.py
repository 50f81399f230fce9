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


class StampedSocket(socket.socket):
    """Of TCP. What asyncio reads from it is stamped."""

    age_s: float | None = None
    """How long what was read last had lain in the kernel; None where it does not say."""
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
        self.age_s = age_s(told)
        return count


def age_s(told: list[tuple[int, int, bytes]]) -> float | None:
    """Since the bytes came with which the kernel tells this; the last of them, where it has put several packets together."""
    for level, kind, data in told:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS) and len(data) == TIMESPEC.size:
            seconds, ns = TIMESPEC.unpack(data)
            return max((time.time_ns() - seconds * 1_000_000_000 - ns) * NS, 0.0) if seconds else None
    return None
