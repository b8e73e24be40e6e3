"""Text to tokens and back, templates applied, prompts counted: what needs no engine.

Prompts are made here exactly as generation makes them, by the same code. Owns these four bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.routing import Route

from server.answers import Json
from server.body_route import BodyRoute
from server.chat import prepare_chat, render_chat
from server.errors import InvalidRequest
from server.inference import Services, check_model
from server.middleware import RequestContext
from server.prepare import ServedModel, check_length
from server.requests import RequestOrigin, check_tokens
from server.schemas import (
    ChatRequest,
    GenerationFields,
    Many,
    Parsed,
    Strict,
    TokenId,
    parse_chat,
    parse_fields,
    parse_strict,
)
from server.text import TextError

MAX_TOKENS_IN_BODY = 1 << 20
FieldsT = TypeVar("FieldsT", bound=Strict)


class TokenizeText(Strict):
    """A body with `messages` instead of `prompt` takes the fields of a chat request."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(ChatRequest):
    return_token_strs: bool = False


class Detokenize(Strict):
    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Many[TokenId] = Field(max_length=MAX_TOKENS_IN_BODY)
    skip_special_tokens: bool = False


def parse_tokenize(raw: dict[str, Any]) -> Parsed[TokenizeText] | Parsed[TokenizeChat]:
    has_messages = raw.get("messages") is not None
    if has_messages and raw.get("prompt") is not None:
        raise InvalidRequest("Give prompt or messages, not both.", param="prompt")
    return parse_fields(TokenizeChat, raw) if has_messages else parse_strict(TokenizeText, raw)


def parse_detokenize(raw: dict[str, Any]) -> Parsed[Detokenize]:
    return parse_strict(Detokenize, raw)


def chat_tokens(fields: ChatRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt that this chat request would have. Raises InvalidRequest as that would."""
    (group,) = prepare_chat(fields, model, RequestOrigin("count", 0.0, ""))
    return group.requests[0].prompt


class TextRoutes:
    """`add_to` an app; one instance a server."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def add_to(self, app: FastAPI) -> None:
        routes: dict[str, BodyRoute[Any]] = {
            "/tokenize": self._route(parse_tokenize, self._tokenize),
            "/detokenize": self._route(parse_detokenize, self._detokenize),
            "/apply-template": self._route(parse_chat, self._apply_template),
            "/v1/chat/completions/input_tokens": self._route(parse_chat, self._count),
        }
        for path, route in routes.items():
            app.router.routes.append(Route(path, route, methods=["POST"]))

    def _route(
        self,
        parse: Callable[[dict[str, Any]], Any],
        work: Callable[[Any, ServedModel], Json],
    ) -> BodyRoute[Any]:
        async def answer(fields: Any, context: RequestContext) -> Json:
            del context
            model = self._services.model()
            check_model(fields.model, model.name)
            return await self._services.workers.run(lambda: work(fields, model))

        return BodyRoute(self._services, parse, answer)

    def _tokenize(self, fields: TokenizeText | TokenizeChat, model: ServedModel) -> Json:
        tokenizer = model.tokenizer
        if isinstance(fields, GenerationFields):
            tokens = list(chat_tokens(fields, model))
        else:
            check_length(len(fields.prompt), model)
            try:
                tokens = tokenizer.encode(
                    fields.prompt, add_special_tokens=fields.add_special_tokens
                )
            except TextError as error:
                raise InvalidRequest(str(error), param="prompt") from None
        names = [model.token_names(token)[0] for token in tokens]
        return {
            "count": len(tokens),
            "max_model_len": model.limits.total,
            "tokens": tokens,
            "token_strs": names if fields.return_token_strs else None,
        }

    def _detokenize(self, fields: Detokenize, model: ServedModel) -> Json:
        check_tokens(fields.tokens, model.limits.vocab_size, "tokens")
        text = model.tokenizer.decode(fields.tokens, skip_special_tokens=fields.skip_special_tokens)
        return {"prompt": text}

    def _apply_template(self, fields: ChatRequest, model: ServedModel) -> Json:
        return {"prompt": render_chat(fields, model)}

    def _count(self, fields: ChatRequest, model: ServedModel) -> Json:
        return {"object": "response.input_tokens", "input_tokens": len(chat_tokens(fields, model))}
