"""`paceline chat`: a conversation in the terminal with any OpenAI-style server.

Speaks HTTP only, like every other client. Keeps the conversation; measures what a person feels:
the time to the first token and the tokens per second after it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

_HELP = "/new forgets the conversation, /quit (or Ctrl-D) ends. Ctrl-C stops an answer."
# What a model says is for the person: escape sequences would speak to the terminal.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TIMEOUT = httpx.Timeout(10.0, read=None)

Message = dict[str, str]


class ChatError(Exception):
    """One line for the person at the terminal."""


@dataclass(slots=True)
class Answer:
    """What one turn said and how it felt."""

    text: str = ""
    num_tokens: int = 0
    first_seconds: float = 0.0
    total_seconds: float = 0.0

    def summary(self) -> str:
        rest = self.total_seconds - self.first_seconds
        pace = (
            f", {(self.num_tokens - 1) / rest:.1f} tokens/s"
            if rest > 0 and self.num_tokens > 1
            else ""
        )
        return f"{self.num_tokens} tokens, first after {1000 * self.first_seconds:.0f} ms{pace}"


def chat(url: str, *, api_key: str, max_tokens: int | None) -> int:
    """Talks until the input ends; the exit code."""
    console = Console(highlight=False)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT) as client:
        try:
            model = find_model(client)
        except ChatError as error:
            console.print(f"paceline: {error}", markup=False, soft_wrap=True)
            return 1
        console.print(f"{model} at {url}. {_HELP}", markup=False, soft_wrap=True)
        return _converse(console, client, {"model": model, "max_tokens": max_tokens})


def find_model(client: httpx.Client) -> str:
    """The first model of the server. Raises ChatError."""
    try:
        response = client.get("/v1/models")
    except httpx.TransportError as error:
        raise ChatError(
            f"no server answers at {client.base_url} ({error}). Start one with: paceline serve"
        ) from None
    if response.status_code != 200:
        raise ChatError(_explain(response))
    return str(response.json()["data"][0]["id"])


def _converse(console: Console, client: httpx.Client, settings: dict[str, Any]) -> int:
    messages: list[Message] = []
    while True:
        try:
            text = console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if text == "/quit":
            return 0
        if text == "/new":
            messages = []
        elif text:
            question = [*messages, {"role": "user", "content": text}]
            answer = _ask(console, client, {**settings, "messages": question})
            if answer is not None:
                messages = [*question, {"role": "assistant", "content": answer.text}]


def _ask(console: Console, client: httpx.Client, body: dict[str, Any]) -> Answer | None:
    """One turn on the screen; None if there was no answer to remember."""
    answer = Answer()

    def write(piece: str) -> None:
        console.file.write(_CONTROL.sub("\ufffd", piece))
        console.file.flush()

    try:
        stream_answer(client, body, answer, write)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]")
    except ChatError as error:
        console.print(f"\n{error}", markup=False, style="red", soft_wrap=True)
    if not answer.text:
        return None
    console.print(f"\n[dim]{answer.summary()}[/]")
    return answer


def stream_answer(
    client: httpx.Client, body: dict[str, Any], answer: Answer, write: Callable[[str], None]
) -> None:
    """Fills `answer` while `write` gets each piece of text. Raises ChatError."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    begin = time.monotonic()
    try:
        with client.stream("POST", "/v1/chat/completions", json={**body, **options}) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_explain(response))
            for event in _events(response):
                if piece := _piece(event):
                    if not answer.text:
                        answer.first_seconds = time.monotonic() - begin
                    answer.text += piece
                    answer.num_tokens += 1  # about; the usage at the end is exact
                    write(piece)
                if usage := event.get("usage"):
                    answer.num_tokens = usage["completion_tokens"]
    except httpx.TransportError as error:
        raise ChatError(f"the connection broke: {error}") from None
    finally:
        answer.total_seconds = time.monotonic() - begin


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ChatError(event["error"]["message"])
            yield event


def _piece(event: dict[str, Any]) -> str:
    for choice in event["choices"]:
        return choice["delta"].get("content") or ""
    return ""


def _explain(response: httpx.Response) -> str:
    try:
        return f"{response.status_code}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"
