"""The fields of the two endpoints: their types and ranges, and the rule for those not listed.

Types are strict (a bool is no number, a float no integer) and null equals absent: it is dropped
before anything looks. What a field means is decided in requests.py, chat.py and completions.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from server.errors import InvalidRequest
from server.field_faults import first_fault
from server.unserved import REFUSED, refuse_unserved

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5  # as the API that this endpoint follows
MAX_ID_LIST = 1024
MAX_BAD_WORDS = 128
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]

T = TypeVar("T")
# Of any length: the first fault is told, and making hundreds of thousands would stop all else.
Many = Annotated[list[T], Field(fail_fast=True)]

# As llama.cpp takes it: ids or texts, and false for "never".
BiasList = list[Annotated[list[Any], Field(min_length=2, max_length=2)]]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())
    # Whether names that it does not have are told to the client.
    tells_unknown: ClassVar[bool] = True

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return _without_nulls(given) if isinstance(given, dict) else given


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Padding against traffic analysis; we never pad, so only "off" is true.
    include_obfuscation: Literal[False] = False


class AnswerCacheWish(Strict):
    """`data_version` is the caller's word for the state of what the answer depends on."""

    scope: Literal["tenant", "user"]
    user: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    data_version: Annotated[str, Field(min_length=1, max_length=256)]
    ttl_seconds: int = Field(3600, ge=1, le=7 * 86400)


class GenerationFields(Strict):
    """What both endpoints share."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, lt=INT64)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    logit_bias: dict[str, Bias | Literal[False]] | BiasList = Field(
        default_factory=dict, max_length=MAX_ID_LIST
    )
    allowed_token_ids: Annotated[Many[TokenId], Field(min_length=1, max_length=2**16)] | None = None
    bad_words: list[BadWord] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] = Field(
        default_factory=list
    )
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_ID_LIST)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0, lt=INT64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(0, ge=-100, le=100)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    timings: bool = False
    answer_cache: AnswerCacheWish | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    # For the client's own books; reported as without effect.
    user: Annotated[str, Field(max_length=1024)] | None = None

    @property
    def num_sequences(self) -> int:
        """How many are generated of one prompt."""
        return self.n

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationFields):
    prompt: Any = None  # its four forms are told apart in completions.py
    max_tokens: int = Field(16, ge=0, lt=INT64)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
    suffix: Annotated[str, Field(max_length=2**20)] = ""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def num_sequences(self) -> int:
        return max(self.n, self.best_of or 1)


class TextPart(Strict):
    """Also what an assistant said in refusal, which is text to a chat template."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refusal_is_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") == "refusal":
            return {"type": "text", "text": given.get("refusal")}
        return given


class FunctionCall(Strict):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    tells_unknown: ClassVar[bool] = False  # clients send back what servers of all kinds have said

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Dropping these would drop what was said.
    function_call: None = None
    audio: None = None
    # Elsewhere a wish that the answer goes on from this message: continue_final_message here.
    prefix: Literal[False] | None = None
    partial: Literal[False] | None = None


class ChatRequest(GenerationFields):
    messages: Many[Message]
    max_tokens: int | None = Field(None, ge=1, lt=INT64)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**20)
    include_reasoning: bool = True
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)


# Accepted, typed and reported: nothing in the answer depends on them.
WITHOUT_EFFECT = frozenset({"user", "metadata"})

# What the bodies of other APIs may hold with the meaning that it has in a chat request.
SHARED = (
    "answer_cache",
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "priority",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop_token_ids",
    "timings",
    "top_k",
    "truncate_prompt_tokens",
    "truncation_side",
)

FieldsT = TypeVar("FieldsT", bound=Strict)
RequestT = TypeVar("RequestT", bound=GenerationFields)


@dataclass(frozen=True, slots=True)
class Parsed(Generic[FieldsT]):
    """A body whose fields have the right types, and the names in it that change nothing.

    Of these, `unknown` are those that no endpoint has, and hints that this server cannot follow.
    """

    fields: FieldsT
    ignored: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def parse_strict(schema: type[FieldsT], raw: dict[str, Any]) -> Parsed[FieldsT]:
    """Raises InvalidRequest, naming the field, for a wrong value and for a constraint not served.

    An unknown name is accepted and reported, unless dropping it could change what the client
    relies on: those are in REFUSED.
    """
    given = _without_nulls(raw)
    unknown = []
    for name, value in given.items():
        if name in schema.model_fields:
            continue
        refuse_unserved(name, value)
        if name not in REFUSED:
            unknown.append(name)
    try:
        fields = schema.model_validate(given)
    except ValidationError as error:
        raise first_fault(error) from None
    for name in given:
        if name in schema.model_fields:
            unknown += dict.fromkeys(_unknown_within(getattr(fields, name), given[name], name))
    return Parsed(fields, (*sorted(WITHOUT_EFFECT & given.keys()), *unknown), tuple(unknown))


def _unknown_within(fields: Any, given: Any, path: str) -> Iterator[str]:
    """Names of objects inside the body that their models do not have."""
    # Members of a list are of one kind; of those without names there may be millions.
    if isinstance(fields, list) and isinstance(given, list) and _has_names(fields[:1]):
        for member, raw in zip(fields, given, strict=True):
            yield from _unknown_within(member, raw, path)
    if not isinstance(fields, Strict) or not fields.tells_unknown or not isinstance(given, dict):
        return
    known = {field.alias or name: name for name, field in type(fields).model_fields.items()}
    for name, value in _without_nulls(given).items():
        if name in known:
            yield from _unknown_within(getattr(fields, known[name]), value, f"{path}.{name}")
        else:
            yield f"{path}.{name}"


def _has_names(members: list[Any]) -> bool:
    return any(isinstance(member, Strict | list) for member in members)


def parse_fields(schema: type[RequestT], raw: dict[str, Any]) -> Parsed[RequestT]:
    """`parse_strict` for a generating request."""
    parsed = parse_strict(schema, raw)
    if parsed.fields.stream_options is not None and not parsed.fields.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    return parsed


def parse_chat(raw: dict[str, Any]) -> Parsed[ChatRequest]:
    return parse_fields(ChatRequest, raw)


def parse_completion(raw: dict[str, Any]) -> Parsed[CompletionRequest]:
    return parse_fields(CompletionRequest, raw)


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
