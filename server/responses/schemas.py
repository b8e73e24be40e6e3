"""The fields of POST /v1/responses: types and ranges. What they mean is in conversion.py."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from server.schemas import INT64, MAX_TOP_LOGPROBS, Strict

MAX_ITEMS = 4096
# The first is served. The others are about tools and inputs that there are none of, and about
# thoughts, which are told whole.
Include = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
ModelName = Annotated[str, Field(max_length=1024)]


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class Function(Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function, a namespace of them, or what only OpenAI's servers run: offered_tools.py."""

    type: Annotated[str, Field(max_length=64)]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[Function] = Field(default_factory=list, max_length=128)


class ResponseStreamOptions(Strict):
    # Padding against traffic analysis; we never pad, so only "off" is true.
    include_obfuscation: Literal[False] = False


class CountRequest(Strict):
    model: ModelName | None = None
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_ITEMS)] = Field(
        default_factory=list
    )
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled"] = "disabled"


class ResponseRequest(CountRequest):
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    max_tool_calls: int | None = Field(None, ge=1, lt=INT64)  # of built-in tools: there are none
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[Include] = Field(default_factory=list, max_length=16)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    background: bool = False
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    user: Annotated[str, Field(max_length=1024)] | None = None
    service_tier: Literal["auto", "default"] | None = None


# Fields that we know and do not serve; dropping one could change what the client relies on.
REFUSED = ("context_management", "conversation", "prompt")
