"""From typed fields and token ids to core requests: limits, ids, seeds, stop tokens, cache scope.

Past this file a Request is right by type: every id is in the vocabulary and the length fits. Knows
the fields that both endpoints share; what a prompt is made of is decided before.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scheduler.types import Request, SamplingParams
from server.errors import InvalidRequest
from server.schemas import GenerationFields

# Below this, dividing logits only turns them into one-hot with risk of overflow: it is greedy.
SMALLEST_TEMPERATURE = 1e-5
_SEED_BITS = (1 << 63) - 1

# The tokens of a text in the field of that name. Raises InvalidRequest.
Encode = Callable[[str, str], list[int]]


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """In tokens. `total` bounds prompt plus answer; input and output may be bounded further."""

    total: int
    input: int | None
    output: int | None
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """What of a request did not come from its body."""

    id: str
    arrival: float
    tenant: str


def resolve_max_tokens(num_prompt: int, wanted: int | None, limits: TokenLimits) -> int:
    """How many tokens may be generated. Raises InvalidRequest where the prompt is too long.

    The rule: a wish above the server's output limit is refused; a wish above what the context
    leaves is cut to that; no wish means what is left, up to the output limit.
    """
    if limits.output is not None and wanted is not None and wanted > limits.output:
        raise InvalidRequest(
            f"This server generates at most {limits.output} tokens a request, you asked for "
            f"{wanted}. Ask for less, or leave the limit out.",
            param="max_tokens",
            code="max_output_tokens_exceeded",
        )
    if limits.input is not None and num_prompt > limits.input:
        raise InvalidRequest(
            f"This server takes prompts of at most {limits.input} tokens, yours has "
            f"{num_prompt}. Please shorten it.",
            code="max_input_tokens_exceeded",
        )
    left = limits.total - num_prompt
    if left < 0 or (left == 0 and wanted != 0):
        raise context_exceeded(f"{num_prompt} tokens", limits.total)
    if wanted is not None:
        return min(wanted, left)
    return left if limits.output is None else min(left, limits.output)


def context_exceeded(size: str, total: int) -> InvalidRequest:
    return InvalidRequest(
        f"This model's maximum context length is {total} tokens, answer included. However, your "
        f"prompt has {size}. Please shorten it.",
        code="context_length_exceeded",
    )


def check_tokens(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Every list of ids in the API comes through here."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is not in the vocabulary (0 to {vocab_size - 1})."[:200],
                param=param,
            )


def build_requests(
    fields: GenerationFields,
    prompt: Sequence[int],
    origin: RequestOrigin,
    *,
    max_tokens: int,
    sampling: SamplingParams,
    stop_token_ids: frozenset[int],
    grammar: bytes = b"",
) -> tuple[Request, ...]:
    """The n requests of one prompt. Their ids are unique under `origin.id`."""
    namespace = cache_namespace(origin.tenant, None, fields.cache_salt)
    first = Request(
        id=origin.id,
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        stop_token_ids=tuple(sorted(stop_token_ids)),
        priority=fields.priority,
        tenant=origin.tenant,
        arrival=origin.arrival,
        cache_namespace=namespace,
        grammar=grammar,
    )
    return tuple(
        replace(
            first,
            id=f"{origin.id}-{index}",
            sampling=replace(sampling, seed=choice_seed(sampling.seed, index)),
        )
        for index in range(fields.num_sequences)
    )


def sampling_params(
    fields: GenerationFields,
    vocab_size: int,
    *,
    num_logprobs: int | None,
    prompt_logprobs: int | None,
    encode: Encode,
) -> SamplingParams:
    """Raises InvalidRequest for a token outside the vocabulary."""
    allowed = fields.allowed_token_ids or []
    check_tokens(allowed, vocab_size, "allowed_token_ids")
    greedy = fields.temperature < SMALLEST_TEMPERATURE or fields.top_p == 0
    bias, never = _logit_bias(fields, vocab_size, encode)
    return SamplingParams(
        temperature=0.0 if greedy else fields.temperature,
        top_k=fields.top_k if 0 < fields.top_k < vocab_size else 0,
        top_p=fields.top_p or 1.0,
        min_p=fields.min_p,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=bias,
        allowed_token_ids=tuple(sorted(set(allowed))),
        bad_words=tuple(dict.fromkeys((*_bad_words(fields, encode), *never))),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed & _SEED_BITS,
        min_tokens=fields.min_tokens,
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(
    fields: GenerationFields, vocab_size: int, encode: Encode
) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[int, ...], ...]]:
    """Ids, or texts, whose every token gets the bias. The last on an id wins.

    What is never to come, false, is a bad word of one token: no finite bias holds where a
    constraint leaves nothing else.
    """
    given = fields.logit_bias
    entries = given.items() if isinstance(given, dict) else given
    bias: dict[int, float | None] = {}
    for key, value in entries:
        if type(key) not in (int, str) or not _is_bias(value):
            raise InvalidRequest(
                "An entry of logit_bias is an id or a text, with a bias from -100 to 100 or false.",
                param="logit_bias",
            )
        # int() would also take ' 1', '1_0' and digits of other scripts.
        if isinstance(key, str) and key.isascii() and key.isdigit() and isinstance(given, dict):
            ids = [int(key.lstrip("0")[:11] or "0")]
        elif isinstance(given, dict) and _is_numeric(key):
            raise InvalidRequest(
                "This key of logit_bias is neither a token id nor a text; a text that looks like "
                "a number goes into the list form, [[text, bias]].",
                param="logit_bias",
            )
        else:
            ids = [key] if isinstance(key, int) else encode(key, "logit_bias")
        if not ids:
            raise InvalidRequest("A text of logit_bias must not be empty.", param="logit_bias")
        check_tokens(ids, vocab_size, "logit_bias")
        bias |= dict.fromkeys(ids, None if value is False else value)
    finite = sorted((token, value) for token, value in bias.items() if value is not None)
    return tuple(finite), tuple((token,) for token in sorted(bias) if bias[token] is None)


def _is_numeric(key: str) -> bool:
    try:
        float(key)
    except ValueError:
        return False
    return True


def _is_bias(value: Any) -> bool:
    return value is False or (type(value) in (int, float) and -100 <= value <= 100)


def _bad_words(fields: GenerationFields, encode: Encode) -> tuple[tuple[int, ...], ...]:
    """A word at the beginning of a text and inside it has different tokens."""
    found = [
        tuple(encode(spelling, "bad_words"))
        for word in fields.bad_words
        for spelling in (word, " " + word.lstrip())
    ]
    return tuple(word for word in found if word)


def stop_tokens(
    fields: GenerationFields, eos_token_ids: Sequence[int], vocab_size: int, *, has_grammar: bool
) -> frozenset[int]:
    """The client's stop tokens, and the model's own unless they are to be ignored.

    The end of a grammar is the end in any case, so there they are never ignored.
    """
    check_tokens(fields.stop_token_ids, vocab_size, "stop_token_ids")
    own = () if fields.ignore_eos and not has_grammar else eos_token_ids
    return frozenset((*fields.stop_token_ids, *own))


def check_min_tokens(fields: GenerationFields, max_tokens: int) -> None:
    if fields.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {fields.min_tokens}, but at most {max_tokens} tokens can be generated.",
            param="min_tokens",
        )


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the first has the request's own, so n=1 equals the first of n."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & _SEED_BITS


def cache_namespace(tenant: str, adapter: str | None, salt: str | None) -> bytes:
    """Distinct for distinct (tenant, adapter, salt): each part is marked absent or has its length.

    The tenant comes from the key, never from the body, so no salt reaches another's cache.
    """
    return b"".join(_part(part) for part in (tenant, adapter, salt))


def _part(text: str | None) -> bytes:
    if text is None:
        return b"\x00"
    data = text.encode("utf-8")
    return b"\x01" + len(data).to_bytes(4, "little") + data
