"""The API process watches itself: how late its event loop wakes, and whether descriptors are left.

Owns the limit on descriptors and the one line a person reads when it is reached: libuv closes the
connections that it has no descriptor for without telling anybody. Knows no request.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from collections.abc import Callable

log = logging.getLogger("paceline")

PROBE_SECONDS = 0.25
_REMIND_SECONDS = 10.0


async def watch_process(
    observe_lag: Callable[[float], None], count_exhausted: Callable[[float], None]
) -> None:
    """Until it is cancelled. How late timers come is how long something held the event loop."""
    loop = asyncio.get_running_loop()
    descriptors = DescriptorWatch(count_exhausted)
    while True:
        due = loop.time() + PROBE_SECONDS
        await asyncio.sleep(PROBE_SECONDS)
        now = loop.time()
        observe_lag(max(now - due, 0.0))
        descriptors.check(now)


class DescriptorWatch:
    """Logs that descriptors ran out: at once, and every ten seconds for as long as it lasts."""

    def __init__(
        self,
        count_exhausted: Callable[[float], None],
        is_free: Callable[[], bool] | None = None,
    ) -> None:
        self._count_exhausted = count_exhausted
        self._is_free = is_free or descriptor_is_free
        self._since: float | None = None
        self._checked_at = 0.0
        self._logged_at = 0.0

    def check(self, now: float) -> None:
        if self._is_free():
            if self._since is not None:
                log.warning("descriptors are free again after %.1f s", now - self._since)
            self._since = None
            return
        if self._since is None:
            self._since = self._checked_at = now
            self._logged_at = now - _REMIND_SECONDS
        self._count_exhausted(max(now - self._checked_at, PROBE_SECONDS))
        self._checked_at = now
        if now - self._logged_at >= _REMIND_SECONDS:
            self._logged_at = now
            log.error(
                "no file descriptor is left (the limit is %d): new connections are closed "
                "unanswered; raise it with `ulimit -n`",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )


def descriptor_is_free() -> bool:
    """Whether another connection could be accepted. It tries: counting would need one itself."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


def raise_descriptor_limit() -> int:
    """A connection is a descriptor: take as many as the hard limit allows, and say how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS calls it unlimited, and refuses that
        log.warning("the limit of descriptors stays as it is: %s", error)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
