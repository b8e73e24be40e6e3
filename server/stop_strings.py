"""Stop strings in a stream of text: what may be shown now, what must wait, where the answer ends.

Rule: the stop string that is complete first wins; of several complete at the same character the
longest (it starts earliest). So the result depends on the text alone, never on how it was cut into
pieces. Knows nothing of tokens or requests.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one stream. Holds back only the longest suffix that may still become a stop string.

    Each stop string is followed by a Knuth-Morris-Pratt automaton, so a character costs O(number
    of stop strings), however long they are.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if "" in stops:
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text safe to show, the stop string that ends the answer or None).

        With `may_stop` False a stop string that is complete in this piece is ordinary text (before
        min_tokens); one that only begins in it still counts later. After a match the stream is
        over: the rest of `text` is dropped, and feed must not be called again.
        """
        if not self._stops:
            return text, None
        window = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None and may_stop:
                self._held = ""
                return window[: end if self._include_stop else end - len(stop)], stop
        keep = max(self._matched)
        safe = len(window) - keep
        self._held = window[safe:]
        return window[:safe], None

    def flush(self) -> str:
        """What was held back; call it once the answer has ended without a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop string now complete."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            fallbacks = self._fallbacks[index]
            length = self._matched[index]
            while length and stop[length] != character:
                length = fallbacks[length - 1]
            length += stop[length] == character
            if length == len(stop):
                if complete is None or length > len(complete):
                    complete = stop
                length = fallbacks[length - 1]
            self._matched[index] = length
        return complete


def _fallbacks(stop: str) -> tuple[int, ...]:
    """Entry i: length of the longest proper prefix of `stop` that ends stop[: i + 1]."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return tuple(table)
