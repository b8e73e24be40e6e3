"""These tests run kernels in Triton's interpreter, which is chosen before triton is imported."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
    "triton was imported before its interpreter was chosen"
)
os.environ["TRITON_INTERPRET"] = "1"

# There are wheels for Linux only.
HAS_TRITON = find_spec("triton") is not None
if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return None if HAS_TRITON else "triton is not installed: the tests of its kernels are left out"
