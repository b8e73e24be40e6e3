"""B131: descriptors run out; the server says so, counts it and goes on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.process_watch import DescriptorWatch, descriptor_is_free
from tests.support.http_server import TextEngine, eventually, house, in_loop, metric


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        highest = os.dup(0)
        taken.append(highest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, hard))
        while descriptor_is_free():
            taken.append(os.dup(0))
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@in_loop
async def test_exhausted_descriptors_are_logged_counted_and_survived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with house(TextEngine({"greet": "Hello"}), live=True) as server:
        with no_descriptor_left():
            await eventually(lambda: "no file descriptor is left (the limit is" in caplog.text)
        await eventually(lambda: "descriptors are free again" in caplog.text)
        assert (await server.chat("greet")).status_code == 200
        text = (await server.client.get("/metrics")).text
        assert metric(text, "paceline_descriptors_exhausted_seconds_total") >= 0.25


def test_a_lasting_exhaustion_is_one_line_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[float] = []
    free = [True, *[False] * 100, True, True]
    watch = DescriptorWatch(counted.append, lambda: free.pop(0))
    for tick in range(103):
        watch.check(1000 + tick / 4)
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3 + ["WARNING"]
    assert sum(counted) == pytest.approx(25.0)


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may_be() -> None:
    probe = (
        "import resource as r; from server.process_watch import raise_descriptor_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 200)); raise_descriptor_limit()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(200, 200)"
