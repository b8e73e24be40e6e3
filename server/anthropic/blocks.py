"""Turns and blocks of the Anthropic API as messages of a chat.

Pure. An unknown kind of block is refused by its place, never dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from server.answers import Json
from server.anthropic.schemas import Turn
from server.chat_messages import as_parts
from server.errors import InvalidRequest

# What Claude Code writes before its system prompt: a word to Anthropic, anew in each request, which
# the model has no use for and after which no prefix is found in the cache.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def chat_messages(system: str | list[Json] | None, turns: Sequence[Turn]) -> list[Json]:
    """Turns of one role in a row are one turn, as the API says; templates may take no others."""
    rows = [[message] for message in _system(system)]
    for index, turn in enumerate(turns):
        for message in _turn(f"messages[{index}]", turn):
            if rows and rows[-1][0]["role"] == message["role"] in ("user", "assistant"):
                rows[-1].append(message)
            else:
                rows.append([message])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def check_open(message: Json, where: str) -> None:
    """Whether an assistant's message can be continued."""
    parts = as_parts(message.get("content"))
    if message.get("tool_calls") or not parts or not parts[-1]["text"].strip():
        raise InvalidRequest(
            "A last turn of the assistant is continued, so it must be of text.", param=where
        )


def _system(system: str | list[Json] | None) -> list[Json]:
    if not system:
        return []
    first, *rest = as_parts(system) if isinstance(system, str) else _text_parts("system", system)
    first["text"] = _BILLING.sub("", first["text"])
    shown = [first, *rest] if first["text"] else rest
    return [{"role": "system", "content": shown}] if shown else []


def _joined(row: Sequence[Json]) -> Json:
    joined: Json = {"role": row[0]["role"]}
    for name in ("content", "tool_calls"):
        parts = [part for message in row for part in as_parts(message.get(name) or None)]
        if parts:
            joined[name] = parts
    thoughts = [message.get("reasoning_content") for message in row]
    if any(thoughts):
        joined["reasoning_content"] = "\n".join(filter(None, thoughts))
    return joined


def _turn(where: str, turn: Turn) -> list[Json]:
    if turn.role == "system":  # it may come anywhere here, which to a template a developer's may
        content = turn.content
        if not isinstance(content, str):
            content = _text_parts(f"{where}.content", content)
        return [{"role": "developer", "content": content}]
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_assistant(f"{where}.content", turn.content)]
    return _user(f"{where}.content", turn.content)


def _user(where: str, blocks: list[Json]) -> list[Json]:
    """Results of tools become messages of their own, in order, with the texts between them."""
    messages: list[Json] = []
    parts: list[Json] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            parts += _text_parts(where, [block], first=index)
            continue
        if parts:
            messages.append({"role": "user", "content": parts})
            parts = []
        messages.append(_tool_result(place, block))
    if parts or not messages:
        messages.append({"role": "user", "content": parts})
    return messages


def _tool_result(where: str, block: Json) -> Json:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in _text_parts(f"{where}.content", content))
    if not isinstance(content, str):
        raise InvalidRequest("Content must be a text or a list of blocks.", param=where)
    if block.get("is_error") is True:
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": _text(where, block, "tool_use_id"), "content": content}


def _assistant(where: str, blocks: list[Json]) -> Json:
    message: Json = {"role": "assistant"}
    texts: list[Json] = []
    calls = []
    thoughts = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block.get("type"):
            case "tool_use":
                calls.append(_tool_use(place, block))
            case "thinking":
                thoughts.append(_text(place, block, "thinking"))
            case "redacted_thinking":
                _text(place, block, "data")  # of another model, which only its maker can read
            case _:
                texts += _text_parts(where, [block], first=index)
    if texts:
        message["content"] = texts[0]["text"] if len(texts) == 1 else texts
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool_use(where: str, block: Json) -> Json:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest("The input of a tool must be an object.", param=f"{where}.input")
    function = {"name": _text(where, block, "name"), "arguments": json.dumps(given)}
    return {"id": _text(where, block, "id"), "type": "function", "function": function}


def _text_parts(where: str, blocks: list[Json], *, first: int = 0) -> list[Json]:
    parts = []
    for index, block in enumerate(blocks, first):
        place = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"Blocks of type '{str(kind)[:40]}' are not supported here.", param=place
            )
        parts.append({"type": "text", "text": _text(place, block, "text")})
    return parts


def _text(where: str, block: Json, name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest("This must be a text.", param=f"{where}.{name}")
    return value
