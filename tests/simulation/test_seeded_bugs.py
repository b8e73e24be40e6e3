"""A share of the seeded bugs: the property test fails for each, as it must.

`python -m tests.simulation.seeded_bugs` plants them all and prints what caught them.
"""

from __future__ import annotations

import pytest

from tests.simulation.machine import EXAMPLES
from tests.simulation.seeded_bugs import BUGS, Bug

# Every other one in a quick run.
SHARE = BUGS if EXAMPLES > 1 else BUGS[::2]


@pytest.mark.parametrize("bug", SHARE, ids=lambda bug: bug.name.replace(" ", "-"))
def test_seeded_bug_is_caught(bug: Bug) -> None:
    assert bug.is_caught() is not None


def test_bug_is_gone_after_its_run() -> None:
    bug = BUGS[0]
    original = vars(bug.owner)[bug.method]
    with bug.planted():
        assert vars(bug.owner)[bug.method] is not original
    assert vars(bug.owner)[bug.method] is original
