"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API over the way of chat."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route

from server.answers import Json
from server.anthropic.answers import MessagesFormat
from server.anthropic.conversion import parse_count, parse_messages
from server.anthropic.errors import FRAMING, PATH
from server.body_route import BodyRoute
from server.chat import prepare_chat
from server.inference import Endpoint, InferenceApp, Services, check_model
from server.middleware import RequestContext
from server.schemas import ChatRequest
from server.text_routes import chat_tokens

MESSAGES = Endpoint(parse_messages, "msg_", prepare_chat, MessagesFormat, FRAMING)


def add_anthropic(app: FastAPI, services: Services) -> None:
    async def count(fields: ChatRequest, context: RequestContext) -> Json:
        del context
        model = services.model()
        check_model(fields.model, model.name)
        tokens = await services.workers.run(lambda: chat_tokens(fields, model))
        return {"input_tokens": len(tokens)}

    counter = BodyRoute(services, parse_count, count)
    app.router.routes += [
        Route(PATH, InferenceApp(services, MESSAGES), methods=["POST"]),
        Route(PATH + "/count_tokens", counter, methods=["POST"]),
    ]
