"""A model's chat template: messages in, prompt text out.

Templates are untrusted code, whether they come with the model or not. They are compiled and run in
a child process (template_process.py) with a jinja2 sandbox and limits of time, memory and output
that the kernel keeps; a failure ends with its request. Knows nothing of tokens or HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.chat_messages import TemplateError, fit_messages
from server.template_process import RenderFailed, TemplateProcess
from server.template_traits import Message, TemplateTraits, learn_traits

__all__ = ["ChatTemplate", "TemplateError"]

MAX_SECONDS = 2.0
MAX_OUTPUT_CHARS = 16_000_000
MAX_SOURCE_CHARS = 1_000_000
_MAX_MESSAGE_CHARS = 500


class ChatTemplate:
    """One or several named templates of a model; safe to call from any thread.

    `templates` is a source or name -> source with a "default"; "tool_use" serves requests with
    tools if there is one. `special_tokens` (bos_token, eos_token, ...) are variables of every
    render. The child process starts with the first `start` or `render`; `close` ends it, and so
    does the garbage collector.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        max_seconds: float = MAX_SECONDS,
        max_output_chars: int = MAX_OUTPUT_CHARS,
    ) -> None:
        self._sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        self._special_tokens = dict(special_tokens or {})
        self._process = TemplateProcess(
            self._sources, max_seconds=max_seconds, max_output_chars=max_output_chars
        )
        self._traits: dict[str, TemplateTraits] = {}

    @property
    def source(self) -> str:
        """All of the templates, to look for words in."""
        return "\n".join(self._sources.values())

    def start(self) -> None:
        """Start the child and compile; raises TemplateError if the model's template is no good."""
        self._traits_of("default")

    def render(
        self,
        messages: Sequence[Message],
        first_index: int = 0,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation in the form of the chat completions API.

        Errors count messages from `first_index` on. Raises TemplateError for a conversation that
        the template refuses or cannot show, or whose render passes a limit; TextError for a lone
        surrogate.
        """
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        fitted = fit_messages(
            messages,
            self._traits_of(name),
            knows_developer="developer" in self._sources[name],
            first_index=first_index,
        )
        given = {**variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._run(name, fitted, given)
        except RenderFailed as error:
            raise _client_error(error) from None

    def close(self) -> None:
        """End the child process; a later render starts another."""
        self._process.close()

    def _traits_of(self, name: str) -> TemplateTraits:
        if name not in self._traits:
            if any(len(source) > MAX_SOURCE_CHARS for source in self._sources.values()):
                raise TemplateError("This model's chat template is too large.")

            def attempt(messages: Sequence[Message]) -> str | None:
                try:
                    return self._run(name, messages, {"add_generation_prompt": False})
                except RenderFailed as error:
                    if error.kind in ("raised", "failed"):
                        return None
                    raise

            try:
                self._traits[name] = learn_traits(attempt)
            except RenderFailed as error:
                raise _client_error(error) from None
        return self._traits[name]

    def _run(self, name: str, messages: Sequence[Message], given: Mapping[str, Any]) -> str:
        absent = {"tools": None, "documents": None}  # transformers passes them, too
        variables = {**absent, **self._special_tokens, **given, "messages": messages}
        return self._process.render(name, variables)


def _client_error(error: RenderFailed) -> TemplateError:
    """The template's own message as it is; for a failure, that it is the template that failed."""
    message = str(error)[:_MAX_MESSAGE_CHARS]
    if error.kind == "raised":
        return TemplateError(message, "messages")
    return TemplateError(f"The model's chat template could not be used: {message}", "messages")
