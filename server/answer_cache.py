"""Final answers of deterministic requests, kept for requests that ask for it and are the same.

Not the prefix cache, which keeps the KV of prompts and saves prefill: this keeps whole answers and
saves everything, so it must know who may see one and how long it is true. Owns the key, and what
is kept in memory; redis_answers.py keeps them for several servers. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from server.answers import Json
from server.choice import Delta
from server.errors import InvalidRequest
from server.generation import Emit, Generation, PromptGroup
from server.requests import SMALLEST_TEMPERATURE
from server.schemas import AnswerCacheWish, GenerationFields
from server.shared_room import SharedRoom

MAX_BYTES = 64 << 20
# What a request is served by, but not what is answered.
_NOT_ANSWERED = frozenset(
    {"answer_cache", "cache_salt", "metadata", "model", "priority", "stream", "stream_options"}
    | {"timings", "user"}
)
_BYTES_OF_ENTRY = 256  # of a log-probability, about


# The tenant, and a digest of all that sets answers apart, the tenant too.
Key = tuple[str, bytes]


def answer_key(fields: GenerationFields, *, tenant: str, model: str, kind: str) -> Key:
    """Equal only for equal tenant, scope, model, data version, kind of answer and request."""
    wish = fields.answer_cache
    assert wish is not None
    asked = fields.model_dump(mode="json", exclude=set(_NOT_ANSWERED))
    # A list in JSON, so that no part can pass for a piece of its neighbour. Objects keep their
    # order: the model is shown tools as they were sent, and a schema's order is the answer's.
    parts = [tenant, wish.scope, wish.user, model, wish.data_version, kind, asked]
    return tenant, hashlib.sha256(msgspec.json.encode(parts)).digest()


def check_wish(fields: GenerationFields) -> AnswerCacheWish | None:
    """The wish for a cached answer, if there is one. Raises InvalidRequest if it cannot be."""
    wish = fields.answer_cache
    if wish is None:
        return None
    if (wish.scope == "user") != (wish.user is not None):
        raise InvalidRequest(
            "answer_cache.user goes with scope 'user', and only with it.", param="answer_cache.user"
        )
    is_greedy = fields.temperature < SMALLEST_TEMPERATURE or fields.top_p == 0
    if not is_greedy and fields.seed is None:
        raise InvalidRequest(
            "Only an answer with temperature 0 or a seed can come from the answer cache.",
            param="answer_cache",
        )
    if fields.num_sequences > fields.n or getattr(fields, "prompt_logprobs", None) is not None:
        raise InvalidRequest(
            "The answer cache goes with neither best_of nor prompt_logprobs.", param="answer_cache"
        )
    return wish


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """One delta for each choice, and what was used to make them."""

    deltas: tuple[Delta, ...]
    usage: Json

    def size(self) -> int:
        return 1024 + sum(
            4 * len(delta.text) + _BYTES_OF_ENTRY * len(delta.entries) for delta in self.deltas
        )


class AnswerCache(Protocol):
    """What is lost is made again, so neither method fails."""

    async def get(self, key: Key) -> CachedAnswer | None: ...

    async def put(self, key: Key, answer: CachedAnswer, ttl_seconds: float) -> None: ...


class MemoryAnswers:
    """Of one process."""

    def __init__(self, now: Callable[[], float], *, max_bytes: int = MAX_BYTES) -> None:
        self._now = now
        self._room: SharedRoom[bytes, CachedAnswer] = SharedRoom(max_bytes)

    @property
    def num_bytes(self) -> int:
        return self._room.num_bytes

    async def get(self, key: Key) -> CachedAnswer | None:
        answer = self._room.get(key, self._now())
        if answer is not None:
            self._room.use(key)
        return answer

    async def put(self, key: Key, answer: CachedAnswer, ttl_seconds: float) -> None:
        now = self._now()
        self._room.put(key, answer, size=answer.size(), until=now + ttl_seconds, now=now)


Keep = Callable[[CachedAnswer], Awaitable[None]]


class Recording:
    """A Generation whose answer is kept once it is whole."""

    def __init__(self, generation: Generation, keep: Keep) -> None:
        self._generation = generation
        self._keep = keep
        self._deltas: dict[int, Delta] = {}

    async def run(self, emit: Emit) -> None:
        async def record(index: int, delta: Delta) -> None:
            known = self._deltas.setdefault(index, Delta())
            known.text += delta.text
            known.entries += delta.entries
            known.finish_reason, known.stop = delta.finish_reason, delta.stop
            await emit(index, delta)

        await self._generation.run(record)
        deltas = tuple(self._deltas[index] for index in sorted(self._deltas))
        await self._keep(CachedAnswer(deltas, self._generation.usage()))

    def usage(self) -> Json:
        return {**self._generation.usage(), "answer_cache": "miss"}


class Replay:
    """In place of a Generation: the same deltas, without the core."""

    def __init__(self, answer: CachedAnswer, groups: list[PromptGroup]) -> None:
        self._answer = answer
        self._choices = [choice for group in groups for choice in group.choices]

    async def run(self, emit: Emit) -> None:
        for index, delta in enumerate(self._answer.deltas):
            self._choices[index].finish_reason = delta.finish_reason
            await emit(index, replace(delta, entries=list(delta.entries)))

    def usage(self) -> Json:
        return {**self._answer.usage, "answer_cache": "hit"}
