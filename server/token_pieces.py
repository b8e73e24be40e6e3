"""The bytes behind each token id: the one truth that decoding, streaming and logprobs share.

A byte-level BPE spells bytes with 256 printable characters; a SentencePiece vocabulary writes a
space as U+2581 and falls back to tokens named <0x00>..<0xFF>. Added tokens are literal text in
both. Nothing here knows how text becomes ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from enum import Enum

SPACE_MARK = "\u2581"
_SPACE_BYTES = SPACE_MARK.encode()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Spelling(Enum):
    """How ordinary tokens spell bytes."""

    BYTE_LEVEL = "byte-level"
    SENTENCEPIECE = "sentencepiece"


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet (Radford et al. 2019, GPT-2).

    Printable Latin-1 bytes stand for themselves, the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


class TokenPieces:
    """Token id -> bytes.

    `tokens[id]` is the vocabulary's spelling, None for an id without a token: not kept, the bytes
    say as much in half the memory. `literal_ids` are added tokens, written as they stand;
    `special_ids` are those that mark structure, not text. Safe to share between threads: a race
    computes the same text twice.
    """

    def __init__(
        self,
        tokens: Sequence[str | None],
        *,
        spelling: Spelling,
        literal_ids: Set[int] = frozenset(),
        special_ids: Set[int] = frozenset(),
    ) -> None:
        self.special_ids = frozenset(special_ids)
        spell = _speller(spelling)
        self.all_bytes = tuple(
            _literal(token) if index in literal_ids else spell(token)
            for index, token in enumerate(tokens)
        )
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.all_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that no token has (padding rows of a model)."""
        return self.all_bytes[token_id] if 0 <= token_id < len(self.all_bytes) else b""

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that is made of whole characters; None for others."""
        text = self._texts.get(token_id)
        if text is None:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                return None
            if 0 <= token_id < len(self.all_bytes):
                self._texts[token_id] = text
        return text

    def longest(self) -> int:
        """Bytes of the longest token, at least 1."""
        return max(map(len, self.all_bytes), default=1) or 1


def _literal(token: str | None) -> bytes:
    return b"" if token is None else token.encode()


def _speller(spelling: Spelling) -> Callable[[str | None], bytes]:
    return _byte_level(byte_alphabet()) if spelling is Spelling.BYTE_LEVEL else _sentencepiece


def _byte_level(alphabet: Mapping[str, int]) -> Callable[[str | None], bytes]:
    to_latin = str.maketrans({character: chr(byte) for character, byte in alphabet.items()})
    known = frozenset(alphabet)

    def spell(token: str | None) -> bytes:
        if token is None or not known.issuperset(token):
            return _literal(token)
        return token.translate(to_latin).encode("latin-1")

    return spell


def _sentencepiece(token: str | None) -> bytes:
    if token is not None and (match := _BYTE_TOKEN.match(token)):
        return bytes([int(match[1], 16)])
    return _literal(token).replace(_SPACE_BYTES, b" ")
