"""POST /v1/embeddings: texts to vectors, as rows of the same steps that generate.

Owns what is particular to embeddings: the inputs, the pooling, length and form of the vectors. An
input is a request that generates nothing and whose prompt is pooled by the engine.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from scheduler.types import Pooling
from server.answers import Json
from server.body_route import BodyRoute
from server.choice import Delta
from server.completions import read_prompts, tokenize_prompt
from server.errors import InvalidRequest
from server.generation import Generation, PromptGroup
from server.inference import Services, check_model
from server.middleware import RequestContext
from server.prepare import LogprobsWish, ServedModel, make_group
from server.requests import RequestOrigin
from server.schemas import INT64, GenerationFields, Parsed, Strict, parse_strict
from server.timings import RequestClock
from server.truncation import truncate_prompt

MAX_INPUTS = 2048
# Sequences of one body that wait or run at a time, so that one body does not fill the queue.
WINDOW = 64


class EmbeddingRequest(Strict):
    model: Annotated[str, Field(max_length=1024)] | None = None
    input: Any = None  # the forms of a completion's prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**20)
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=INT64)
    truncation_side: Literal["left", "right"] = "left"
    priority: int = Field(0, ge=-100, le=100)
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None

    def of_prompts(self) -> GenerationFields:
        """What an input has in common with a prompt."""
        return GenerationFields.model_validate(
            {
                "temperature": 0.0,
                "truncate_prompt_tokens": self.truncate_prompt_tokens,
                "truncation_side": self.truncation_side,
                "priority": self.priority,
                "cache_salt": self.cache_salt,
            }
        )


def parse_embedding(raw: dict[str, Any]) -> Parsed[EmbeddingRequest]:
    return parse_strict(EmbeddingRequest, raw)


def prepare_inputs(
    fields: EmbeddingRequest, model: ServedModel, origin: RequestOrigin
) -> list[PromptGroup]:
    """One group an input, in order. Raises InvalidRequest."""
    import server.vectors  # noqa: F401 (a tenth of a second, the first time: here no stream waits)

    prompts = read_prompts(fields.input, param="input")
    if len(prompts) > MAX_INPUTS:
        raise InvalidRequest(f"There may be at most {MAX_INPUTS} inputs.", param="input")
    shared = fields.of_prompts()
    return [
        _group(fields, shared, prompt, index, model, origin) for index, prompt in enumerate(prompts)
    ]


def _group(
    fields: EmbeddingRequest,
    shared: GenerationFields,
    prompt: str | list[int],
    index: int,
    model: ServedModel,
    origin: RequestOrigin,
) -> PromptGroup:
    token_ids = tokenize_prompt(prompt, model, param="input")
    token_ids = truncate_prompt(token_ids, shared, model, wanted=0)
    group = make_group(
        shared,
        token_ids,
        model,
        replace(origin, id=f"{origin.id}-{index}"),
        wanted_tokens=0,
        logprobs=LogprobsWish(),
        first_index=index,
    )
    pooling = Pooling(fields.pooling)
    requests = tuple(
        replace(request, sampling=replace(request.sampling, pooling=pooling))
        for request in group.requests
    )
    return replace(group, requests=requests)


def embeddings_route(services: Services) -> BodyRoute[EmbeddingRequest]:
    async def answer(fields: EmbeddingRequest, context: RequestContext) -> Json:
        model = services.model()
        check_model(fields.model, model.name)
        clock = RequestClock(received=context.received, parsed=services.now())
        answer_id = uuid.uuid4().hex
        origin = RequestOrigin(answer_id, context.received, context.tenant)
        groups = await services.workers.run(lambda: prepare_inputs(fields, model, origin))
        clock.tokenized = services.now()
        services.begin_timeline(context, answer_id, clock, groups)
        await _run(services, groups, clock, context, min(WINDOW, model.max_group))
        vectors = _shaped(groups, fields)
        num_tokens = sum(len(group.requests[0].prompt) for group in groups)
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": vector,
                }
                for index, vector in enumerate(vectors)
            ],
            "model": model.name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    return BodyRoute(services, parse_embedding, answer)


def _shaped(groups: Sequence[PromptGroup], fields: EmbeddingRequest) -> list[str | list[float]]:
    """Raises InvalidRequest."""
    from server.vectors import encoded, shape_vector

    vectors = [
        shape_vector(
            group.choices[0].pooled, dimensions=fields.dimensions, normalize=fields.normalize
        )
        for group in groups
    ]
    return [encoded(vector, fields.encoding_format) for vector in vectors]


async def _run(
    services: Services,
    groups: Sequence[PromptGroup],
    clock: RequestClock,
    context: RequestContext,
    size: int,
) -> None:
    """`size` inputs at a time."""

    async def nothing(index: int, delta: Delta) -> None:
        """What there is to show is the vector, which the choice keeps."""
        del index, delta

    timeline = context.timeline
    patience = services.patience(context, streams=False)
    for begin in range(0, len(groups), size):
        window = groups[begin : begin + size]
        generation = Generation(
            services.core,
            services.metrics,
            clock,
            services.now,
            window,
            context.id,
            patience if begin == 0 else None,
        )
        is_last = begin + size >= len(groups)
        await (generation.run(nothing) if is_last else generation.run_part(nothing))
        if timeline is not None:
            timeline.num_cached += sum(group.cached_tokens or 0 for group in window)
