"""Token ids to text, all at once or as they arrive; both from the same bytes, so they agree.

Text is the concatenated bytes of the tokens read as UTF-8, where each maximal broken part becomes
one U+FFFD. Owns the state of one stream; knows nothing of stop strings, requests or HTTP.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from server.token_pieces import TokenPieces

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class IncrementalDetokenizer:
    """The text that follows `prompt_ids`, in pieces of whole characters.

    Joined, the pieces of `add` and `finish` are the text of prompt and generated tokens minus the
    text of the prompt. Where the prompt ends inside a character, the first piece holds the
    completed character, and nothing of the prompt if the model does not complete it.
    `strips_first_space` drops the one space that SentencePiece puts before a text, and only there:
    when nothing visible came before. Costs O(bytes) a token.
    """

    def __init__(
        self,
        pieces: TokenPieces,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool,
        strips_first_space: bool,
    ) -> None:
        self._pieces = pieces
        self._hidden = pieces.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        tail = self._tail(prompt_ids)
        self._strip_next = strips_first_space and not tail
        self._decoder.decode(tail)
        self._prompt_rest = self._decoder.getstate()[0]
        # Between characters, and nothing to strip: whole characters need no decoder.
        self._is_between = not self._strip_next and not self._prompt_rest

    def add(self, token_ids: Sequence[int]) -> str:
        """The characters completed by these tokens; may be empty."""
        if self._is_between and len(token_ids) == 1 and token_ids[0] not in self._hidden:
            text = self._pieces.whole_text(token_ids[0])
            if text is not None:
                return text
        text = self._decode(token_ids)
        self._is_between = not (
            self._strip_next or self._prompt_rest or self._decoder.getstate()[0]
        )
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        data = b"".join(
            self._pieces.token_bytes(token_id)
            for token_id in token_ids
            if token_id not in self._hidden
        )
        if not data:
            return ""
        if self._prompt_rest:
            if not _may_continue(self._prompt_rest, data[0]):
                self._decoder.reset()
            self._prompt_rest = b""
        if self._strip_next:
            self._strip_next = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """One U+FFFD if the last generated character was left unfinished, else nothing."""
        if self._prompt_rest:
            return ""
        return self._decoder.decode(b"", final=True)

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to hold any unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id not in self._hidden:
                tail = self._pieces.token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail


def decode(
    pieces: TokenPieces,
    token_ids: Iterable[int],
    *,
    skip_special_tokens: bool,
    strips_first_space: bool,
) -> str:
    """The text of a whole sequence."""
    stream = IncrementalDetokenizer(
        pieces, skip_special_tokens=skip_special_tokens, strips_first_space=strips_first_space
    )
    return stream.add(tuple(token_ids)) + stream.finish()


def _may_continue(unfinished: bytes, byte: int) -> bool:
    """Whether `byte` is a valid next byte of the unfinished character."""
    try:
        codecs.getincrementaldecoder("utf-8")(errors="strict").decode(unfinished + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True
