"""One choice of an answer: core events in, text and log-probabilities that may be shown out.

Streaming and plain answers are both made of the deltas of this class, so they cannot differ; and
tokens are taken one by one, so merging events cannot matter. Knows no HTTP and no JSON.

    token ids -> detokenizer -> stop strings -> text        entry of a token goes out with the
              -> entries -----------------------^           first character of its token

Thoughts and calls pass by the stop strings: these are about what is shown as the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.types import Finished, FinishReason, TokenLogprobs, Tokens
from server.logprobs import Entry
from server.reading import AS_IT_IS, ContentFinder, Reading
from server.stop_strings import StopStrings


class Detokenizer(Protocol):
    def add(self, token_ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TextRules:
    """What of the generated tokens becomes text, and what text ends the answer.

    A stop token never becomes text unless `include_stop` asks for it; nor has it an entry then.
    Stop strings and stop tokens count from token number `min_tokens` + 1 on.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    reading: Reading = AS_IT_IS  # tokens of thought are counted; stop strings are of the content


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as the answer's beginning; `offsets` are where its tokens begin.

    Its tokens have entries if `logprobs`: those of the answer may be there for other ends.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    logprobs: bool


@dataclass(slots=True)
class Delta:
    """What one choice may show now. Empty only if nothing was to be shown at all.

    `stop` is the stop string that ended the choice, if one did.
    """

    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.finish_reason)


class Choice:
    """Call `add` for each Tokens and `end` for the Finished; both return what may be shown.

    `finish_reason` is set by a stop string before the core knows; later events change nothing.
    """

    def __init__(
        self, rules: TextRules, detokenizer: Detokenizer, echo: Echo | None = None
    ) -> None:
        self.num_tokens = 0
        self.pooled = b""  # little-endian float32, if it was asked for
        self.num_reasoning_tokens = 0
        self.sum_logprobs = 0.0  # of all tokens, where they were asked for
        self.finish_reason: FinishReason | None = None
        self._stop: str | None = None
        self._rules = rules
        self._detokenizer = detokenizer
        self._stops = StopStrings(rules.stops, include_stop=rules.include_stop)
        self._echo = echo
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._start = len(echo.text) if echo else 0  # of generated text in the client's text
        self._decoded = 0  # characters of generated text that the detokenizer has made
        self._shown = 0  # of these, characters given out
        self._entries: deque[Entry] = deque()
        self._saw_stop_token = False
        reading = rules.reading if rules.stops else Reading(rules.reading.thinking)
        self._finder = None if reading == AS_IT_IS else ContentFinder(reading)
        # Pieces that may be content, and whether a stop string could count there.
        self._undecided: deque[tuple[str, bool]] = deque()

    def add(self, event: Tokens) -> Delta:
        if self.finish_reason is not None:
            return Delta()
        if event.prompt_logprobs:
            self._prompt_logprobs += event.prompt_logprobs
        self.pooled = self.pooled or event.pooled
        text = ""
        for index, token_id in enumerate(event.token_ids):
            if self._saw_stop_token:
                break
            logprobs = None
            if self._rules.logprobs:
                logprobs = event.logprobs[index]
                self.sum_logprobs += logprobs.logprob
            text += self._take(token_id, logprobs)
            if self.finish_reason is not None:
                break
        return self._delta(text)

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]:
        """Of each prompt token after the first, where they were asked for."""
        return self._prompt_logprobs

    def end(self, event: Finished) -> Delta:
        if self.finish_reason is not None:
            return Delta()
        shown = self._watched(self._decode_rest())
        if self._finder is not None and self._rules.stops:
            shown += self._decided(self._finder.finish())
        if self.finish_reason is None:
            shown += self._stops.flush()
            self.finish_reason = event.reason
        return self._delta(shown)

    def _take(self, token_id: int, logprobs: TokenLogprobs | None) -> str:
        self.num_tokens += 1
        is_stop = token_id in self._rules.stop_token_ids and self._may_stop()
        self._saw_stop_token = is_stop
        if is_stop and not self._rules.include_stop:
            return ""
        if logprobs is not None:
            self._entries.append(Entry(token_id, self._start + self._decoded, logprobs))
        decoded = self._detokenizer.add((token_id,))
        self._decoded += len(decoded)
        if self._finder is None:
            return self._cut_at_stop(decoded)
        # The markers count as thoughts.
        was_thinking = self._finder.is_thinking
        shown = self._watched(decoded)
        self.num_reasoning_tokens += was_thinking or self._finder.is_thinking
        return shown

    def _watched(self, text: str) -> str:
        """What of the text may be shown, where not all of it is content."""
        if self._finder is None:
            return self._cut_at_stop(text)
        decided = self._finder.feed(text)
        if not self._rules.stops:
            return text
        self._undecided.append((text, self._may_stop()))
        return self._decided(decided)

    def _decided(self, counts: list[int]) -> str:
        """The beginning of what was undecided: passed by and content in turns."""
        shown = ""
        for number, count in enumerate(counts):
            while count and self.finish_reason is None:
                text, may_stop = self._undecided.popleft()
                if count < len(text):
                    self._undecided.appendleft((text[count:], may_stop))
                part = text[:count]
                shown += self._cut_at_stop(part, may_stop) if number % 2 else part
                count -= len(part)
        return shown

    def _cut_at_stop(self, text: str, may_stop: bool | None = None) -> str:
        if not self._rules.stops or not text:
            return text
        may_stop = self._may_stop() if may_stop is None else may_stop
        shown, stop = self._stops.feed(text, may_stop=may_stop)
        if stop is not None:
            self._stop = stop
            self.finish_reason = FinishReason.STOP
        return shown

    def _may_stop(self) -> bool:
        return self.num_tokens > self._rules.min_tokens

    def _decode_rest(self) -> str:
        rest = self._detokenizer.finish()
        self._decoded += len(rest)
        return rest

    def _delta(self, text: str) -> Delta:
        self._shown += len(text)
        entries = self._due_entries() if self._entries else []
        delta = Delta(text, entries, self.finish_reason, self._stop)
        if self._echo is not None and (delta or self.finish_reason):
            delta.text = self._echo.text + delta.text
            if self._echo.logprobs:
                delta.entries = self._echo_entries(self._echo) + delta.entries
            self._echo = None
        return delta

    def _due_entries(self) -> list[Entry]:
        """Entries of tokens whose first character is out; at the end those before the cut.

        Without a stop string nothing was cut, and tokens without text of their own come too.
        """
        cut = self.finish_reason is FinishReason.STOP and self._shown < self._decoded
        everything = self.finish_reason is not None and not cut
        due = []
        while self._entries and (everything or self._entries[0].offset < self._start + self._shown):
            due.append(self._entries.popleft())
        return due

    def _echo_entries(self, echo: Echo) -> list[Entry]:
        values: list[TokenLogprobs | None] = [None, *self._prompt_logprobs]
        rows = zip(echo.token_ids, echo.offsets, values, strict=True)
        return [Entry(token_id, offset, value) for token_id, offset, value in rows]
