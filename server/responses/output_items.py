"""The output items of one response, made piece by piece, and the events that tell of each change.

One item is open at a time: thoughts, a message or a call.

    output_item.added [content_part.added] delta* done [content_part.done] output_item.done
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from server.answers import Json
from server.reading import ChatPiece, Thought
from server.tools.pieces import CallStart, Content


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


class OutputItems:
    """`done` holds the closed items. Call `add` for every piece and `finish` once.

    `cuts` are (characters, log-probabilities) of the deltas of each item: with the items, they are
    enough to tell the same events again.
    """

    def __init__(
        self,
        make_id: Callable[[str], str] = new_id,
        namespaces: Mapping[str, str] | None = None,
    ) -> None:
        self.done: list[Json] = []
        self.cuts: list[list[tuple[int, int]]] = []
        self._make_id = make_id
        self._namespaces = namespaces or {}  # by function
        self._open: Json | None = None

    def add(self, piece: ChatPiece, rows: list[Json]) -> list[Json]:
        """Events without their sequence number; `rows` are log-probabilities that came with it."""
        match piece:
            case Content(text):
                return [*self._ensure("message"), *self._text("output_text", text, rows)]
            case Thought(text):
                return [*self._ensure("reasoning"), *self._text("reasoning_text", text, [])]
            case CallStart(_, name):
                return [*self._close("completed"), *self._start(self._call(name))]
            case _:
                item = self._item()
                item["arguments"] += piece.text
                self.cuts[-1].append((len(piece.text), 0))
                kind = "response.function_call_arguments.delta"
                return [{"type": kind, **self._place(), "delta": piece.text}]

    def finish(self, *, is_cut: bool) -> list[Json]:
        """A cut answer ends within its last item."""
        return self._close("incomplete" if is_cut else "completed")

    def _item(self) -> Json:
        assert self._open is not None
        return self._open

    def _place(self) -> Json:
        return {"item_id": self._item()["id"], "output_index": len(self.done)}

    def _ensure(self, kind: str) -> list[Json]:
        if self._open is not None and self._open["type"] == kind:
            return []
        made = [*self._close("completed"), *self._start(self._texts(kind))]
        # Events are written later, so what they tell must not grow with the item.
        added = {"type": "response.content_part.added", **self._in_part(), "part": _part(kind)}
        made.append(added)
        self._item()["content"].append(_part(kind))
        return made

    def _in_part(self) -> Json:
        return {**self._place(), "content_index": 0}

    def _start(self, item: Json) -> list[Json]:
        self._open = item
        self.cuts.append([])
        added = {**item, "content": []} if "content" in item else dict(item)
        index = len(self.done)
        return [{"type": "response.output_item.added", "output_index": index, "item": added}]

    def _text(self, kind: str, text: str, rows: list[Json]) -> list[Json]:
        part = self._item()["content"][0]
        part["text"] += text
        self.cuts[-1].append((len(text), len(rows)))
        event = {"type": f"response.{kind}.delta", **self._in_part(), "delta": text}
        if kind == "output_text":
            part["logprobs"] += rows
            event["logprobs"] = rows
        return [event]

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        if item["type"] == "function_call":
            kind = "response.function_call_arguments.done"
            told = {"arguments": item["arguments"], "name": item["name"]}
            made = [{"type": kind, **self._place(), **told}]
        else:
            part = item["content"][0]
            told = {name: part[name] for name in ("text", "logprobs") if name in part}
            made = [
                {"type": f"response.{part['type']}.done", **self._in_part(), **told},
                {"type": "response.content_part.done", **self._in_part(), "part": part},
            ]
        index = len(self.done)
        self.done.append(item)
        self._open = None
        return [
            *made,
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]

    def _texts(self, kind: str) -> Json:
        head = {"id": "", "type": kind, "status": "in_progress"}
        if kind == "reasoning":
            return {**head, "id": self._make_id("rs_"), "summary": [], "content": []}
        return {**head, "id": self._make_id("msg_"), "role": "assistant", "content": []}

    def _call(self, name: str) -> Json:
        call = {
            "id": self._make_id("fc_"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": self._make_id("call_"),
            "name": name,
            "arguments": "",
        }
        if name in self._namespaces:
            call["namespace"] = self._namespaces[name]
        return call


def _part(kind: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
