"""The C library's heap: what loading leaves behind there goes back to the system.

glibc keeps freed memory in reserve below what is still in use, megabytes of it after a file has
been read or tables have been built. Knows nothing of what was freed.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Takes milliseconds; does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
