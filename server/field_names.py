"""What the client of another API calls the fields of a chat request: errors name what it sent.

Pure. The tables are beside the conversions that they turn around; nothing here knows an API.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from server.errors import ApiError

# (pattern of the beginning of a path in a chat request, what the client calls it); the first
# that fits counts.
Names = Sequence[tuple[str, str]]
ErrorT = TypeVar("ErrorT", bound=ApiError)


def renamed(error: ErrorT, names: Names) -> ErrorT:
    """The same error with the client's word for its field, in the message too."""
    found = error.param
    if found is None:
        return error
    for pattern, word in names:
        match = re.match(rf"(?:{pattern})(?![A-Za-z0-9_])", found)
        if match is not None:
            error.param = match.expand(word) + found[match.end() :]
            # Only where it stands for the field: `messages` is a word as well.
            if not found.isalpha():
                error.message = error.message.replace(found, error.param)
            break
    return error


@contextmanager
def client_names(names: Names) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        renamed(error, names)
        raise
