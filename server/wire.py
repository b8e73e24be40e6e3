"""The messages between the API process and the core process, and their framing.

Owns the format: msgspec msgpack behind a four-byte length, typed both ways, never pickle. Knows
neither sockets' owners nor what a message causes. Both ends are the same version of this file,
so there is no negotiation: a message that does not decode is a bug and ends the connection.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from scheduler.limits import SchedulerLimits
from scheduler.types import Finished, KVCapacity, KVMap, Request, StepStats, Submit, Tokens
from server.config import EngineConfig

MAX_MESSAGE_BYTES = 256 << 20
LENGTH_BYTES = 4


class WireError(ValueError):
    """The stream of bytes is not a stream of our messages."""


# --- to the core ---------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message: what to build, the limits that were asked for, facts of the tokenizer.

    Ids from `vocab_limit` on have no text, whatever the size of the model's head: never sampled.
    `eos_token_ids` are the tokenizer's; the model's files may name others. `tokens` are the bytes
    of each id and `special_ids` those that mark structure: what grammars need to know.
    """

    config: EngineConfig
    limits: SchedulerLimits
    vocab_limit: int
    eos_token_ids: tuple[int, ...] = ()
    tokens: tuple[bytes, ...] = ()
    special_ids: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True):
    """What the first core is told on its command line, as JSON: the settings as they were typed.

    Start still says what to build; this only lets work begin before the server has loaded.
    """

    config: EngineConfig
    limits: SchedulerLimits


class Group(msgspec.Struct, frozen=True):
    """One Submit; the prompt and the grammar that its requests share travel once."""

    prompt: tuple[int, ...]
    requests: tuple[Request, ...]
    grammar: bytes = b""

    @classmethod
    def pack(cls, requests: Iterable[Request]) -> Group:
        members = tuple(requests)
        prompt = members[0].prompt
        assert all(member.prompt == prompt for member in members), "a group shares its prompt"
        grammar = members[0].grammar
        assert all(member.grammar == grammar for member in members), "a group shares its grammar"
        bare = tuple(replace(member, prompt=(), grammar=b"") for member in members)
        return cls(prompt, bare, grammar)

    def unpack(self) -> Submit:
        return Submit(
            tuple(
                replace(member, prompt=self.prompt, grammar=self.grammar)
                for member in self.requests
            )
        )


class Commands(msgspec.Struct, frozen=True, tag="commands"):
    """Everything since the last message. Order: submits, aborts, drain, inspect."""

    submits: tuple[Group, ...] = ()
    aborts: tuple[str, ...] = ()
    drain: bool = False
    inspect: bool = False


ToCore = Start | Commands


# --- from the core -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CoreInfo:
    """What the core turned out to be, once it is ready.

    `max_model_len` is the effective limit: the smallest of the model's context, the wish of the
    command line and what the KV pool can hold for one sequence. `eos_token_ids` are those of every
    source. `notes` are lines for people: the KV formula first.
    """

    model_name: str
    max_model_len: int
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    capacity: KVCapacity
    limits: SchedulerLimits
    dtype: str
    device: str
    kernels: str
    notes: tuple[str, ...] = ()
    load_seconds: float = 0.0


class FailureKind(StrEnum):
    """MODEL: the file or the settings are wrong and stay wrong. ENGINE: it broke while it ran."""

    MODEL = "model"
    ENGINE = "engine"


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress before Ready; `total` 0 means unknown."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Loaded and warm: from now on only Step messages follow."""

    info: CoreInfo


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last message of a core that ends by itself: one line for people."""

    kind: FailureKind
    message: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    """The events of one turn of the loop, or of several while the reader was slow.

    All tokens come before all ends, which is their order in each request. Tokens of one request
    are merged; stats stay one a turn until there are very many.
    """

    tokens: tuple[Tokens, ...] = ()
    finished: tuple[Finished, ...] = ()
    stats: tuple[StepStats, ...] = ()
    kv_map: KVMap | None = None


FromCore = Loading | Ready | Failed | Step


# --- framing -------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_to_core = msgspec.msgpack.Decoder(ToCore)
_from_core = msgspec.msgpack.Decoder(FromCore)


def encode(message: ToCore | FromCore) -> bytes:
    """The frame of a message: length, big-endian, and body. Raises WireError if it is too long."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_to_core(body: bytes | bytearray | memoryview) -> ToCore:
    """Raises WireError if the body is not a message to the core."""
    try:
        return _to_core.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message to the core: {error}") from error


def decode_from_core(body: bytes | bytearray | memoryview) -> FromCore:
    """Raises WireError if the body is not a message from the core."""
    try:
        return _from_core.decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message from the core: {error}") from error


def body_length(header: bytes | bytearray | memoryview) -> int:
    """What the first LENGTH_BYTES of a frame say. Raises WireError."""
    length = int.from_bytes(header, "big")
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message announces {length} bytes, the maximum is {MAX_MESSAGE_BYTES}")
    return length


class FrameBuffer:
    """Bytes in as they come, whole bodies out."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        bodies: list[bytes] = []
        start = 0
        with memoryview(self._bytes) as view:
            while len(view) - start >= LENGTH_BYTES:
                body_at = start + LENGTH_BYTES
                end = body_at + body_length(view[start:body_at])
                if end > len(view):
                    break
                bodies.append(bytes(view[body_at:end]))
                start = end
        del self._bytes[:start]
        return bodies
