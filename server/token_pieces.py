"""The bytes behind each token id: the one truth that decoding, streaming and logprobs share.

A byte-level BPE spells bytes with 256 printable characters; a SentencePiece vocabulary writes a
space as U+2581 and falls back to tokens named <0x00>..<0xFF>. Added tokens are literal text in
both. Nothing here knows how text becomes ids.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from enum import Enum

SPACE_MARK = "\u2581"
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
    """Token id -> bytes, worked out on first use so that loading a large vocabulary stays quick.

    `tokens[id]` is the vocabulary's spelling, None for an id without a token. `literal_ids` are
    added tokens, written as they stand; `special_ids` are those that mark structure, not text.
    Safe to share between threads: a race computes the same value twice.
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
        self._tokens = tuple(tokens)
        self._spelling = spelling
        self._literal_ids = frozenset(literal_ids)
        self._alphabet: Mapping[str, int] = byte_alphabet()
        self._bytes: list[bytes | None] = [None] * len(self._tokens)
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that no token has (padding rows of a model)."""
        if not 0 <= token_id < len(self._tokens):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that is made of whole characters; None for others."""
        text = self._texts.get(token_id)
        if text is None:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                return None
            if 0 <= token_id < len(self._tokens):
                self._texts[token_id] = text
        return text

    def longest(self) -> int:
        """Upper bound of the bytes of any token, at least 1."""
        spelled = (token for token in self._tokens if token is not None)
        if self._spelling is Spelling.BYTE_LEVEL:
            return max((len(token) for token in spelled), default=1) or 1
        return max((len(token.replace(SPACE_MARK, " ").encode()) for token in spelled), default=1)

    def _spell(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        if token is None:
            return b""
        if token_id in self._literal_ids:
            return token.encode()
        if self._spelling is Spelling.BYTE_LEVEL:
            try:
                return bytes([self._alphabet[character] for character in token])
            except KeyError:
                return token.encode()
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()
