"""The limits of a killable child, beside those that the server was started with."""

from __future__ import annotations

import subprocess
import sys

import pytest

from server.child import command


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is of Linux")
@pytest.mark.parametrize(("born_with", "wanted", "has"), [(4, 3, 3), (3, 4, 3), (None, 3, 3)])
def test_a_child_takes_no_more_than_its_limit_nor_than_ulimit_allows(
    born_with: int | None, wanted: int, has: int
) -> None:
    """`ulimit -v` is a hard limit: asking for more is an error, which cost the server its chats."""
    born = "" if born_with is None else f"r.setrlimit(r.RLIMIT_AS, ({born_with << 30},) * 2); "
    program = f"import resource as r; {born}from server.child import limit_memory; "
    program += f"limit_memory({wanted << 30}); print(r.getrlimit(r.RLIMIT_AS)[0] >> 30)"
    done = subprocess.run(command(program), capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) == has
