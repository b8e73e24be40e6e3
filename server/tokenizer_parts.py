"""What a loader of a model's files hands to the Tokenizer; plain data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from server.chat_template import ChatTemplate
from server.token_pieces import TokenPieces


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader finds in a model's files.

    `prefix` and `suffix` are put around a plain text (often BOS and nothing). `strips_first_space`:
    the vocabulary puts a space before every text, which decoding takes away again.
    """

    backend: tokenizers.Tokenizer
    pieces: TokenPieces
    bos: int | None
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    eos_token_ids: frozenset[int]
    strips_first_space: bool
    chat_template: ChatTemplate | None
