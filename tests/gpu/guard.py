"""Parts of a measurement that fail alone. Imports no torch, so that its lack is one more result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator

Result = dict[str, object]


def guarded(name: str, results: Iterable[Result]) -> Iterator[Result]:
    """The results as they come; an error, even of an import, is one more, and ends them alone."""
    try:
        yield from results
    except Exception as error:  # the next part may well work
        traceback.print_exc()
        yield {"name": name, "error": f"{type(error).__name__}: {error}"}


def one(name: str, make: Callable[[], Result]) -> Iterator[Result]:
    """A single result, under that name."""
    yield from guarded(name, ({"name": name, **make()} for _ in (None,)))
