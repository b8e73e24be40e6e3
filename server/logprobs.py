"""Log-probabilities in the two forms of the API. Knows tokens and JSON, not streams.

A token's text is its own bytes read as UTF-8, where bytes that are no character on their own are
written as \\xNN; `bytes` holds the true bytes. -inf, which JSON lacks, is written as -9999.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.types import TokenLogprobs

MASKED = -9999.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer. `offset` is where it begins in the text that the client gets.

    `logprobs` is None for the first token of an echoed prompt, which nothing precedes.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


class TokenNames:
    """Token id -> (text, bytes), each worked out once."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            data = self._token_bytes(token_id)
            known = data.decode("utf-8", errors="backslashreplace"), list(data)
            self._known[token_id] = known
        return known


def finite(value: float) -> float:
    """NaN, which no engine should make, is masked too: `not >=` catches it."""
    return value if value >= MASKED else MASKED


def chat_content(entries: Sequence[Entry], names: TokenNames) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat choice."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None, "chat does not echo its prompt"
        shown = _named(entry.token_id, entry.logprobs.logprob, names)
        shown["top_logprobs"] = [
            _named(token_id, logprob, names) for token_id, logprob in entry.logprobs.top
        ]
        content.append(shown)
    return content


def _named(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    text, data = names(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": data}


def completion_rows(entries: Sequence[Entry], names: TokenNames) -> list[tuple[Any, ...]]:
    """Of each token: text, value, alternatives, offset.

    The alternatives map text to value, the sampled token included; of several tokens with the same
    text the most probable one stays.
    """
    rows: list[tuple[Any, ...]] = []
    for entry in entries:
        text = names(entry.token_id)[0]
        if entry.logprobs is None:
            rows.append((text, None, None, entry.offset))
            continue
        value = entry.logprobs.logprob
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.logprobs.top, (entry.token_id, value)):
            name = names(token_id)[0]
            top[name] = max(finite(logprob), top.get(name, MASKED))
        rows.append((text, finite(value), top, entry.offset))
    return rows


def prompt_columns(
    entries: Sequence[TokenLogprobs], names: TokenNames
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM writes them: by position, then by id; nothing precedes the first.

    The rank is known of the best only, and of a prompt token that is among them.
    """
    rows: list[dict[str, Any] | None] = [None]
    for entry in entries:
        row = {
            str(token_id): _ranked(token_id, logprob, rank, names)
            for rank, (token_id, logprob) in enumerate(entry.top, 1)
        }
        own = _ranked(entry.token_id, entry.logprob, None, names)
        row.setdefault(str(entry.token_id), own)
        rows.append(row)
    return rows


def _ranked(token_id: int, logprob: float, rank: int | None, names: TokenNames) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names(token_id)[0]}


COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def completion_columns(rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """`logprobs` of a completion choice: four columns, one row a token."""
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}
