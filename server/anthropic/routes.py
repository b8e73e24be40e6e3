"""POST /v1/messages and /v1/messages/count_tokens: the Anthropic API over the way of chat."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import Route

from server.answers import Json
from server.anthropic.answers import MessagesFormat
from server.anthropic.conversion import NAMES, parse_count, parse_messages
from server.anthropic.errors import FRAMING, PATH
from server.anthropic.schemas import MessagesChat
from server.body_route import BodyRoute
from server.chat import prepare_chat
from server.field_names import client_names
from server.inference import Endpoint, InferenceApp, Services, check_model
from server.middleware import RequestContext
from server.text_routes import chat_tokens


def add_anthropic(app: FastAPI, services: Services) -> None:
    """What becomes of a hint depends on the model, so a body is read for the one that there is."""

    async def count(fields: MessagesChat, context: RequestContext) -> Json:
        del context
        model = services.model()
        check_model(fields.model, model.name)
        with client_names(NAMES):
            tokens = await services.workers.run(lambda: chat_tokens(fields, model))
        counted: Json = {"input_tokens": len(tokens)}
        if fields.has_context_management:  # before its edits, of which none is made
            counted["context_management"] = {"original_input_tokens": len(tokens)}
        return counted

    counter = BodyRoute(services, lambda raw: parse_count(raw, services.model()), count)
    messages = Endpoint(
        lambda raw: parse_messages(raw, services.model()),
        "msg_",
        prepare_chat,
        MessagesFormat,
        FRAMING,
        names=NAMES,
    )
    app.router.routes += [
        Route(PATH, InferenceApp(services, messages), methods=["POST"]),
        Route(PATH + "/count_tokens", counter, methods=["POST"]),
    ]
