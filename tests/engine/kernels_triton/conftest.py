"""These tests run kernels in Triton's interpreter, which is chosen before triton is imported."""

from __future__ import annotations

import os
import sys

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
    "triton was imported before its interpreter was chosen"
)
os.environ["TRITON_INTERPRET"] = "1"
