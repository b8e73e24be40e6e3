"""The overhead measurement measures what it says, on a small scale; no speed is asked for here."""

from __future__ import annotations

import pytest

from tests.overhead.bench import main
from tests.overhead.server import NUM_WORDS, tokenizer


def test_text_of_a_token_is_its_instant() -> None:
    made = tokenizer()
    assert made.decode([0, 255, NUM_WORDS - 1], skip_special_tokens=True) == "0000,00ff,ffff,"


@pytest.mark.timeout(120)
def test_small_run_sees_every_token(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--streams", "8", "--rate", "200", "--tokens", "40", "--rounds", "1"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("bench-overhead: 8 streams, one API process: ")
    assert "observability costs" in line
