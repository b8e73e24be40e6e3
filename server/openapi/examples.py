"""An example for every field of every body, and the schemas of fields that models leave open.

Plain data. A test posts each example to its endpoint, and fails for a field without one.
"""

from __future__ import annotations

from server.answers import Json

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": _SCHEMA}
_USER: list[Json] = [{"role": "user", "content": "What is the capital of France?"}]
_TEXT_INPUT: Json = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ]
}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
        },
    },
}

# Where a model says "anything", because code tells the forms apart.
SCHEMAS: dict[str, Json] = {
    "prompt": _TEXT_INPUT,
    "input": _TEXT_INPUT,
    "tools": {"type": "array", "maxItems": 128, "items": _TOOL},
    "tool_choice": {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {"type": "object", "required": ["name"]},
                },
            },
        ]
    },
}

# By field; an entry "Model.field" is for that body alone.
EXAMPLES: Json = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "allowed_token_ids": [72, 105],
    "answer_cache": {"scope": "tenant", "data_version": "2026-11-29", "ttl_seconds": 600},
    "background": False,
    "bad_words": ["never"],
    "best_of": 1,
    "cache_control": {"type": "ephemeral"},
    "cache_salt": "project-7",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "completion_window": "24h",
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "dimensions": 8,
    "echo": False,
    "enable_thinking": False,
    "encoding_format": "base64",
    "endpoint": "/v1/chat/completions",
    "frequency_penalty": 0.2,
    "ignore_eos": False,
    "include": ["message.output_text.logprobs"],
    "include_reasoning": True,
    "include_stop_str_in_output": False,
    "inference_geo": "global",
    "input": ["one text", "another text"],
    "input_file_id": "file-0123456789ab",
    "instructions": "Answer in one word.",
    "logit_bias": {"72": -100, "105": 5.5},
    "logprobs": True,
    "max_completion_tokens": 64,
    "max_output_tokens": 64,
    "max_tokens": 64,
    "max_tool_calls": 4,
    "messages": _USER,
    "metadata": {"purpose": "test"},
    "min_p": 0.05,
    "min_tokens": 2,
    "model": None,  # the served one
    "n": 2,
    "normalize": True,
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "output_format": {"type": "json_schema", "schema": _SCHEMA},
    "parallel_tool_calls": False,
    "pooling": "last",
    "presence_penalty": 0.2,
    "previous_response_id": None,
    "priority": 10,
    "prompt": "Once upon a time",
    "prompt_logprobs": 1,
    "reasoning": {"effort": "none"},
    "reasoning_effort": "none",
    "repetition_penalty": 1.1,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "place", "schema": _SCHEMA, "strict": True},
    },
    "return_token_strs": True,
    "seed": 42,
    "service_tier": "auto",
    "skip_special_tokens": True,
    "stop": ["\n\n"],
    "stop_sequences": ["\n\n"],
    "stop_token_ids": [10],
    "store": True,
    "stream": False,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["yes", "no"]},
    "suffix": "",
    "system": "Answer in one word.",
    "temperature": 0.7,
    "text": {"format": {"type": "json_schema", "name": "place", "schema": _SCHEMA}},
    "thinking": {"type": "disabled"},
    "thinking_token_budget": -1,
    "timings": True,
    "tokens": [72, 105],
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": _FUNCTION}],
    "top_k": 40,
    "top_logprobs": 2,
    "top_p": 0.9,
    "truncate_prompt_tokens": 4000,
    "truncation": "disabled",
    "truncation_side": "left",
    "user": "user-7",
    "CompletionRequest.logprobs": 2,
    "MessagesRequest.metadata": {"user_id": "user-7"},
    "MessagesRequest.tool_choice": {"type": "auto"},
    "MessagesRequest.tools": [
        {"name": "weather", "description": "The weather of a city.", "input_schema": _SCHEMA}
    ],
    "ResponseRequest.input": "What is the capital of France?",
    "ResponseRequest.stream_options": {"include_obfuscation": False},
    "ResponseRequest.tools": [{"type": "function", **_FUNCTION, "strict": True}],
}


# Bodies that count take the fields of those that generate.
_COUNTERS = {"CountMessages": "MessagesRequest", "CountInput": "ResponseRequest"}


def example(model: str, field: str) -> object:
    """Raises KeyError for a field without one."""
    own = f"{_COUNTERS.get(model, model)}.{field}"
    return EXAMPLES[own if own in EXAMPLES else field]
