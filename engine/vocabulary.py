"""What a grammar has to know of a tokenizer.

Apart from grammar.py, so that a process that compiles none imports neither numpy nor llguidance.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Id -> bytes, and which ids are no text."""

    tokens: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
