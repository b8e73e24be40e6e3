"""What the API offers: each route with its body, its query and its answer. Plain data.

A test holds this against the routes of the app: a new route is not forgotten here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from server.answers import Json
from server.anthropic.schemas import CountRequest as CountMessages
from server.anthropic.schemas import MessagesRequest
from server.batches.routes import BatchRequest
from server.embeddings import EmbeddingRequest
from server.responses.schemas import CountRequest as CountInput
from server.responses.schemas import ResponseRequest
from server.schemas import ChatRequest, CompletionRequest
from server.text_routes import Detokenize, TokenizeText


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _array(items: Json) -> Json:
    return {"type": "array", "items": items}


TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
ANY_OBJECT: Json = {"type": "object"}
_USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
_REASON: Json = {"enum": ["stop", "length", "tool_calls"]}
_CHAT = _object(
    id=TEXT,
    object={"const": "chat.completion"},
    created=COUNT,
    model=TEXT,
    choices=_array(
        _object(
            index=COUNT,
            message=_object(role={"const": "assistant"}, content={"type": ["string", "null"]}),
            logprobs={"type": ["object", "null"]},
            finish_reason=_REASON,
        )
    ),
    usage=_USAGE,
)
_COMPLETION = _object(
    id=TEXT,
    object={"const": "text_completion"},
    created=COUNT,
    model=TEXT,
    choices=_array(
        _object(
            index=COUNT,
            text=TEXT,
            logprobs={"type": ["object", "null"]},
            finish_reason={"enum": ["stop", "length"]},
        )
    ),
    usage=_USAGE,
)
_MESSAGE = _object(
    id=TEXT,
    type={"const": "message"},
    role={"const": "assistant"},
    model=TEXT,
    content=_array(_object(type={"enum": ["text", "thinking", "tool_use"]})),
    stop_reason={
        "enum": [
            "end_turn",
            "max_tokens",
            "stop_sequence",
            "tool_use",
            "model_context_window_exceeded",
        ]
    },
    stop_sequence={"type": ["string", "null"]},
    usage=_object(input_tokens=COUNT, output_tokens=COUNT, cache_read_input_tokens=COUNT),
)
_RESPONSE = _object(
    id=TEXT,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["in_progress", "completed", "incomplete", "failed", "cancelled"]},
    model=TEXT,
    output=_array(_object(type={"enum": ["message", "reasoning", "function_call"]}, id=TEXT)),
    usage={"anyOf": [{"type": "null"}, _object(input_tokens=COUNT, output_tokens=COUNT)]},
)
_EMBEDDINGS = _object(
    object={"const": "list"},
    data=_array(
        _object(
            object={"const": "embedding"},
            index=COUNT,
            embedding={"anyOf": [TEXT, _array({"type": "number"})]},
        )
    ),
    model=TEXT,
    usage=_object(prompt_tokens=COUNT, total_tokens=COUNT),
)
_CARD = _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
_LIST = _object(object={"const": "list"}, data=_array(ANY_OBJECT))


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` is the schema of a 200, or the name of a media type that is not JSON."""

    method: str
    path: str
    summary: str
    answer: Json | str
    body: type[BaseModel] | None = None
    streams: bool = False
    query: tuple[str, ...] = ()


_FILE = _object(id=TEXT, object={"const": "file"}, bytes=COUNT, filename=TEXT, purpose=TEXT)
_BATCH = _object(
    id=TEXT,
    object={"const": "batch"},
    endpoint=TEXT,
    input_file_id=TEXT,
    status={"enum": ["in_progress", "completed", "failed", "expired", "cancelling", "cancelled"]},
    request_counts=_object(total=COUNT, completed=COUNT, failed=COUNT),
)
_DELETED = _object(deleted={"const": True})

# With --data-dir only.
BATCH_OPERATIONS = (
    Operation("post", "/v1/files", "Keep a file", _FILE),
    Operation("get", "/v1/files", "The files", _LIST, query=("purpose", "order", "limit", "after")),
    Operation("get", "/v1/files/{file_id}", "One file's facts", _FILE),
    Operation("delete", "/v1/files/{file_id}", "Delete a file", _DELETED),
    Operation("get", "/v1/files/{file_id}/content", "A file's bytes", "application/octet-stream"),
    Operation("post", "/v1/batches", "Run the lines of a file", _BATCH, BatchRequest),
    Operation("get", "/v1/batches", "The batches", _LIST, query=("limit", "after")),
    Operation("get", "/v1/batches/{batch_id}", "One batch", _BATCH),
    Operation("post", "/v1/batches/{batch_id}/cancel", "Cancel a batch", _BATCH),
)
_STATUS = _object(status=TEXT)

OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation", _CHAT, ChatRequest, True),
    Operation(
        "post",
        "/v1/chat/completions/input_tokens",
        "Count the tokens of a conversation",
        _object(input_tokens=COUNT),
        ChatRequest,
    ),
    Operation("post", "/v1/completions", "Continue a text", _COMPLETION, CompletionRequest, True),
    Operation("post", "/v1/embeddings", "Texts to vectors", _EMBEDDINGS, EmbeddingRequest),
    Operation("post", "/v1/responses", "Create a response", _RESPONSE, ResponseRequest, True),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of an input",
        _object(input_tokens=COUNT),
        CountInput,
    ),
    Operation(
        "get",
        "/v1/responses/{response_id}",
        "A stored response, or its events",
        _RESPONSE,
        streams=True,
        query=("stream", "starting_after"),
    ),
    Operation(
        "delete",
        "/v1/responses/{response_id}",
        "Forget a response",
        _object(deleted={"const": True}),
    ),
    Operation("post", "/v1/responses/{response_id}/cancel", "Cancel a background run", _RESPONSE),
    Operation(
        "get",
        "/v1/responses/{response_id}/input_items",
        "What a response was made of",
        _LIST,
        query=("order", "limit", "after"),
    ),
    Operation("post", "/v1/messages", "Answer, Anthropic style", _MESSAGE, MessagesRequest, True),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count tokens, Anthropic style",
        _object(input_tokens=COUNT),
        CountMessages,
    ),
    Operation(
        "post",
        "/tokenize",
        "Text, or messages, to token ids",
        _object(count=COUNT, max_model_len=COUNT, tokens=_array(COUNT)),
        TokenizeText,
    ),
    Operation("post", "/detokenize", "Token ids to text", _object(prompt=TEXT), Detokenize),
    Operation(
        "post", "/apply-template", "Messages to prompt text", _object(prompt=TEXT), ChatRequest
    ),
    Operation("get", "/v1/models", "The served model", _LIST),
    Operation("get", "/v1/models/{model_id}", "One model", _CARD),
    Operation("get", "/health", "Whether a restart would help", _STATUS),
    Operation("get", "/ready", "Whether a new request would be taken", _STATUS),
    Operation("get", "/metrics", "Prometheus metrics", "text/plain"),
    Operation("get", "/version", "The version", _object(version=TEXT)),
    Operation("get", "/", "The name and version", _object(name=TEXT, version=TEXT)),
    Operation("get", "/openapi.json", "This document", ANY_OBJECT),
    Operation("get", "/docs", "This document for people", "text/html"),
    Operation(
        "get", "/admin/requests", "Running and finished requests", ANY_OBJECT, query=("limit",)
    ),
    Operation(
        "get", "/admin/requests/{request_id}/timeline", "One request, step by step", ANY_OBJECT
    ),
    Operation("get", "/admin/trace", "A trace of some seconds", ANY_OBJECT, query=("seconds",)),
    Operation("get", "/admin/live", "Live numbers for the console", "text/event-stream"),
)
