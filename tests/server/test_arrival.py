"""Bytes that nobody has read yet: what they waited is a part of their request's time."""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

import pytest

from server.arrival import arrived_at
from tests.support.http_server import COMPLETIONS, house, in_loop

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the tick")


class Kernel:
    """A socket whose data came so many milliseconds ago."""

    def __init__(self, waited_ms: int) -> None:
        self.waited_ms = waited_ms

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return struct.pack("=52xI", self.waited_ms)[:size]


@linux_only
def test_only_what_is_proved_counts() -> None:
    tick = time.clock_getres(6)
    now = 1000 * tick + tick / 2
    assert arrived_at(Kernel(0), now) == now
    # A tick may have passed in the instant of arrival.
    assert arrived_at(Kernel(round(tick * 1e3)), now) == pytest.approx(1000 * tick)
    assert arrived_at(Kernel(round(10 * tick * 1e3)), now) == pytest.approx(991 * tick)


def test_without_a_tcp_socket_to_read_is_to_arrive() -> None:
    assert arrived_at(None, 5.0) == 5.0
    left, right = socket.socketpair()
    with left, right:
        assert arrived_at(left, 5.0) == 5.0


@linux_only
@in_loop
async def test_a_request_that_waits_for_the_event_loop_waits_in_its_timeline() -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    async with house(live=True) as server:
        await server.client.get("/health")
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head.encode() + body)
            time.sleep(0.3)  # noqa: ASYNC251  # the server's loop as well
            rows = []
            while not rows:
                rows = (await server.client.get("/admin/requests")).json()["finished"]
    assert rows[0]["phases_ms"]["parse"] > 200
    assert rows[0]["ttft_ms"] > 200
