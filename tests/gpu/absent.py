"""Lets the engine be imported on a machine that lacks packages which no measurement uses."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

# Imported by engine for reading GGUF files and for grammars.
UNUSED = ("gguf", "llguidance", "llguidance.numpy", "llguidance.torch")


class Absent(ModuleType):
    """Has every attribute, and none that can be used."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def stand_in_for_unused_packages() -> list[str]:
    """The names of those that are absent."""
    absent = [name for name in UNUSED if importlib.util.find_spec(name.split(".")[0]) is None]
    for name in absent:
        sys.modules[name] = Absent(name)
    return absent
