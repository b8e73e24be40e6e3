"""Which Paceline this is: the version that the command, the API, the metrics and the log tell."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("paceline")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
