"""When the bytes of a request arrived, as far as the kernel can tell: before we read them.

A busy event loop reads late, and that time is the request's too. Linux keeps for each TCP socket
the tick in which data last came; only what is proved by it counts, so that requests to an idle
server do not grow by a tick. Elsewhere, and on other sockets, to read is to arrive.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from typing import Protocol

# CLOCK_MONOTONIC_COARSE of linux/time.h: its resolution is the length of a tick.
_TICK_CLOCK = 6
# tcpi_last_data_recv of struct tcp_info in linux/tcp.h: milliseconds in whole ticks.
_OFFSET = 52
_SIZE = _OFFSET + 4


class Socket(Protocol):
    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


def arrived_at(sock: Socket | None, now: float) -> float:
    """The latest instant at which the newest bytes can have come; `now` if nothing is known.

    Ticks are multiples of their length on the monotonic clock (Linux 6.4 and later; before, they
    are off by a part of a tick, and so is this).
    """
    if sock is None or sys.platform != "linux":
        return now
    try:
        facts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:  # not TCP
        return now
    if len(facts) < _SIZE:
        return now
    waited_ms: int = struct.unpack_from("=I", facts, _OFFSET)[0]
    tick = time.clock_getres(_TICK_CLOCK)
    return min(now, now - now % tick - waited_ms / 1e3 + tick)
