"""The OpenAPI document of this server, made of the models that parse the bodies.

What a model cannot say (a field of any form, an example) is in examples.py.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from pydantic import BaseModel

from server.answers import Json
from server.anthropic.errors import is_anthropic
from server.anthropic.schemas import CountRequest as CountMessages
from server.anthropic.schemas import MessagesRequest
from server.openapi.examples import SCHEMAS, example
from server.openapi.operations import BATCH_OPERATIONS, OPERATIONS, Operation
from server.responses.schemas import CountRequest as CountInput
from server.responses.schemas import ResponseRequest
from server.schemas import SHARED, ChatRequest

_PARTS = "#/components/schemas/{model}"
_SHARE = (MessagesRequest, ResponseRequest)
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR: Json = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def model_name(model: type[BaseModel]) -> str:
    """Two bodies are called CountRequest where they live."""
    for body, name in ((CountMessages, "CountMessages"), (CountInput, "CountInput")):
        if model is body:
            return name
    return model.__name__


def body_schema(model: type[BaseModel], parts: Json) -> Json:
    """The schema of one body, with an example and a default for each field; fills `parts`."""
    schema = model.model_json_schema(ref_template=_PARTS)
    parts.update(schema.pop("$defs", {}))
    if model in _SHARE:
        chat = ChatRequest.model_json_schema(ref_template=_PARTS)["properties"]
        schema["properties"] |= {
            name: chat[name] for name in SHARED if name not in schema["properties"]
        }
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        if _says_nothing(field):
            field.update(SCHEMAS[name])
        field.pop("title", None)
        _push_down_length(field)
        if name not in required and "default" not in field:
            field["default"] = _made_default(model, name)
        given = example(model_name(model), name)
        if given is not None:
            field["examples"] = [given]
    schema["title"] = model_name(model)
    return schema


def _push_down_length(field: Json) -> None:
    """A length of either form of a field is, to JSON Schema, another word for each form."""
    words = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}
    if "anyOf" in field and "maxLength" in field:
        most = field.pop("maxLength")
        for option in field["anyOf"]:
            if option.get("type") in words:
                option[words[option["type"]]] = most


def _says_nothing(field: Json) -> bool:
    if not field.keys() & {"type", "anyOf", "oneOf", "$ref", "enum", "const", "allOf"}:
        return True
    return any(option == {"items": {}, "type": "array"} for option in field.get("anyOf", ()))


def _made_default(model: type[BaseModel], name: str) -> Any:
    field = (ChatRequest.model_fields | model.model_fields)[name]
    return None if field.default_factory is None else field.get_default(call_default_factory=True)


@functools.cache
def document(version: str, served: str | None = None, with_batches: bool = False) -> Json:
    """`served` is the one name of a model that is taken, once it is known."""
    parts: Json = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    operations = (*OPERATIONS, *BATCH_OPERATIONS) if with_batches else OPERATIONS
    bodies = {op.body for op in operations if op.body is not None}
    for model in sorted(bodies, key=model_name):
        parts[model_name(model)] = body_schema(model, parts)
        if served is not None and "model" in parts[model_name(model)]["properties"]:
            parts[model_name(model)]["properties"]["model"] |= {"enum": [served]}
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": version,
            "description": "An LLM server. Null equals absent for every field; unknown fields are "
            "named in the header x-paceline-ignored-params. The header x-request-timeout-seconds "
            "says how long an answer is of use. docs/api.md has every rule.",
        },
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(operation: Operation) -> Json:
    answers: Json = {}
    if isinstance(operation.answer, str):
        answers[operation.answer] = {"schema": {"type": "string"}}
    else:
        answers["application/json"] = {"schema": operation.answer}
    if operation.streams:
        answers["text/event-stream"] = {"schema": {}}  # tools differ in what an event is to them
    error = "AnthropicError" if is_anthropic(operation.path) else "Error"
    failure = {"application/json": {"schema": _reference(error)}}
    if operation.path in ("/health", "/ready"):
        failure = answers
    made: Json = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method}{operation.path}").strip("_"),
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "4XX": {"description": "The request is at fault.", "content": failure},
            "5XX": {"description": "The server is not able to.", "content": failure},
        },
    }
    names = re.findall(r"\{(\w+)\}", operation.path)
    text = {"type": "string"}
    parameters = [{"name": n, "in": "path", "required": True, "schema": text} for n in names]
    parameters += [{"name": n, "in": "query", "schema": text} for n in operation.query]
    if parameters:
        made["parameters"] = parameters
    if operation.path == "/v1/files" and operation.method == "post":
        made["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": UPLOAD}},
        }
    if operation.body is not None:
        schema = _reference(model_name(operation.body))
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


UPLOAD: Json = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string", "enum": ["batch"], "examples": ["batch"]},
    },
}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
