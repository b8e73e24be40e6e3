"""Text to token ids and back for one model, loaded from a Hugging Face directory or a GGUF file.

Owns the rules around the vocabulary: what is added around a text, which ids end an answer, how long
a text may be. Where the parts come from is in huggingface_tokenizer.py and gguf_tokenizer.py.
Knows nothing of requests or HTTP. Every method may be called from any thread; `encode` releases the
interpreter lock while it works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.gguf_file import open_gguf
from server.detokenizer import IncrementalDetokenizer, decode
from server.gguf_tokenizer import read_gguf
from server.huggingface_tokenizer import read_directory
from server.special_text import MarkedText, SpecialTokens
from server.text import reject_surrogates
from server.tokenizer_parts import TokenizerParts


class Tokenizer:
    """The vocabulary of one model; immutable after construction."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.bos = parts.bos
        self.eos_token_ids = parts.eos_token_ids
        self.chat_template = parts.chat_template
        self.vocab_size = len(parts.pieces)  # ids 0..vocab_size-1 have a text
        self._backend = parts.backend
        self._pieces = parts.pieces
        self._prefix = list(parts.prefix)
        self._suffix = list(parts.suffix)
        self._strips_first_space = parts.strips_first_space
        self._longest_token = parts.pieces.longest()
        self.special_tokens = SpecialTokens(parts.backend)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a plain text. Special tokens spelled out in it become those tokens.

        `add_special_tokens` puts around it what the model was trained with (BOS, rarely EOS).
        Raises TextError for a lone surrogate. Bound the length with `max_chars_for` first.
        """
        encoding = self._backend.encode_batch_fast(
            [reject_surrogates(text)], add_special_tokens=False
        )[0]
        ids: list[int] = encoding.ids
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def encode_chat(self, text: MarkedText) -> list[int]:
        """Token ids of a rendered chat template: BOS is added only where the template did not.

        Special tokens with the mark in them are plain text. Raises TextError.
        """
        if text.mark:
            reject_surrogates(text.marked)
            ids = self.special_tokens.encode(text)
        else:
            ids = self.encode(text.marked, add_special_tokens=False)
        if ids[: len(self._prefix)] == self._prefix:
            return ids
        return self._prefix + ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; ids that no token has are nothing."""
        return decode(
            self._pieces,
            token_ids,
            skip_special_tokens=skip_special_tokens,
            strips_first_space=self._strips_first_space,
        )

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> IncrementalDetokenizer:
        """A stream of the text that follows `prompt_ids`."""
        return IncrementalDetokenizer(
            self._pieces,
            prompt_ids,
            skip_special_tokens=skip_special_tokens,
            strips_first_space=self._strips_first_space,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The true bytes of one token, possibly a part of a character; b"" for an unknown id."""
        return self._pieces.token_bytes(token_id)

    def all_token_bytes(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id, the one tuple that all share."""
        return self._pieces.all_bytes

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids for which `is_special` holds."""
        return self._pieces.special_ids

    def is_special(self, token_id: int) -> bool:
        """Whether the token marks structure (BOS, turn markers) and is left out of plain text."""
        return token_id in self._pieces.special_ids

    def max_chars_for(self, max_tokens: int) -> int:
        """A text of more characters than this cannot fit in `max_tokens`; refuse it unread.

        A character is at least one byte, and no token holds more bytes than the longest one.
        """
        return max_tokens * self._longest_token


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a model directory or .gguf file.

    Raises engine.errors.ModelFileError with one clear line if files are missing or make no sense.
    """
    if model_path.suffix == ".gguf":
        return Tokenizer(read_gguf(open_gguf(model_path).metadata, str(model_path)))
    return Tokenizer(read_directory(model_path))
