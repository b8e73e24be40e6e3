"""The fields of POST /v1/messages and /v1/messages/count_tokens: types and ranges.

What they mean in terms of a chat request is in conversion.py. Blocks are read there, too: an
unknown kind of block is refused by name, never dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.schemas import INT64, MAX_CHOICES, ChatRequest, Many, StopString, Strict

MAX_STOP_SEQUENCES = 4


class Turn(Strict):
    tells_unknown: ClassVar[bool] = False

    role: Literal["user", "assistant", "system"]
    content: str | Many[dict[str, Any]]


class Metadata(Strict):
    user_id: Annotated[str, Field(max_length=256)] | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1024, lt=2**20)
    display: Literal["summarized", "omitted", "updates"] | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CustomTool(Strict):
    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_CHOICES)
    strict: bool | None = None
    allowed_callers: list[str] = Field(default=["direct"], max_length=MAX_CHOICES)
    defer_loading: bool = False
    eager_input_streaming: bool | None = None  # arguments are sent as they are made in any case
    cache_control: dict[str, Any] | None = None  # every prefix is cached


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ContextManagement(Strict):
    edits: list[dict[str, Any]] = Field(default_factory=list, max_length=MAX_CHOICES)


class CountRequest(Strict):
    model: Annotated[str, Field(max_length=1024)]
    messages: Many[Turn] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    thinking: Thinking | None = None
    tools: list[CustomTool] = Field(default_factory=list, max_length=MAX_CHOICES)
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older place
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, lt=INT64)
    stop_sequences: list[StopString] = Field(default_factory=list, max_length=MAX_STOP_SEQUENCES)
    stream: bool = False
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Literal["global"] | None = None


class MessagesChat(ChatRequest):
    """The chat request that means the same, and what of its origin the answer's form depends on.

    Without `include_reasoning` blocks of thought are empty.
    """

    has_context_management: bool = False


# Fields that we know and do not serve; dropping one could change what the client relies on.
REFUSED = ("compaction", "container", "mcp_servers", "thread")
