"""The types that cross the borders between server, scheduler and engine.

Everything here is frozen, plain data: it is built once, read by others and never changed. Nothing
here may know torch, HTTP or text. Times are seconds of one monotonic clock that the caller reads.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. ABORT is the client's doing, ERROR is ours.

    EXPIRED: it had not been begun by its deadline, and nothing of it was computed.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    EXPIRED = "expired"


class Pooling(StrEnum):
    """What of a prompt's hidden states, after the last norm, is reported as one vector."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence chooses its next token; validated before it is built.

    temperature 0 is greedy (the lowest id wins a tie). top_k 0, top_p 1 and min_p 0 are off.
    `seed` with the index of the generated token keys a counter-based generator, so a draw never
    depends on batch mates. `num_logprobs`: None reports nothing, 0 the sampled token only, k the
    k best besides. `prompt_logprobs` asks the same for every prompt position after the first.
    `pooling` asks for a vector of the prompt.
    `allowed_token_ids`: nothing else may come; () allows all. None of `bad_words`, each the ids of
    a word, may come to stand in the answer.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    min_tokens: int = 0
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate; a body with n > 1 becomes n of them in one Submit.

    `id` is ours and unique. `prompt` is never empty. `max_tokens` 0 asks only for what the prompt
    yields. `stop_token_ids` already holds the model's EOS ids unless they are to be ignored. A
    lower `priority` is more urgent. `cache_namespace` separates prefix caches (tenant, adapter,
    salt). Requests of one Submit share a prompt, and so its KV. `grammar` is what the answer must
    obey, in a form that only the engine reads; b"" is free. What has no slot by `deadline` is not
    begun any more; what has goes on.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    tenant: str = ""
    arrival: float = 0.0
    deadline: float | None = None
    cache_namespace: bytes = b""
    grammar: bytes = b""


# --- commands: server -> scheduler -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Accept all of these requests or none; all have the same prompt and cache namespace."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests wherever they are; an id that is unknown or finished is ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; the loop ends once what was accepted has finished."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Tell once who holds which KV block; asked for only while somebody looks."""


Command = Submit | Abort | Drain | Inspect


# --- plans and results: scheduler <-> engine -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What an engine can hold. Block ids are 0 .. num_blocks - 1, slots 0 .. num_slots - 1."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters (or re-enters) a slot: all its tokens so far and how to sample.

    The first `num_prompt_tokens` of `token_ids` are the prompt, the rest was generated before a
    preemption; so the index of the next generated token is len(token_ids) - num_prompt_tokens.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    grammar: bytes = b""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration of the model: columns, one row a sequence.

    Row i computes positions starts[i] .. starts[i] + lengths[i] - 1 of the sequence in slots[i];
    samples[i] is 1 where the row's last position yields a new token. The engine applies, in this
    order: `admissions` (reset the slot), the block columns (table[block_slots[j],
    block_indices[j]] = block_ids[j]), `copies` (source block, target block), then the rows.
    """

    step: int
    seq_ids: tuple[str, ...]
    slots: array[int]
    starts: array[int]
    lengths: array[int]
    samples: bytes
    block_slots: array[int]
    block_indices: array[int]
    block_ids: array[int]
    admissions: tuple[Admission, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and the best alternatives as (id, logprob), best first.

    Values are natural logs of the distribution before temperature, after bias and penalties;
    a masked token is -inf.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, row by row as in its plan.

    token_ids[i] is () for a row that does not sample. logprobs[i] belongs to token_ids[i];
    prompt_logprobs[i] has one entry for each position p of the row with p + 1 inside the prompt:
    the log-probability of the prompt token at p + 1. `row_errors` are (row, message): that
    sequence fails alone. After the tokens of `ended_rows` their grammars allow nothing more: these
    sequences stop, whatever else they ask for. `pooled[i]` is the pooled prompt of a row that ends
    it, little-endian float32, else b"". `device_seconds` is the step without planning,
    `sample_seconds` its part after the last layer.
    """

    step: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    row_errors: tuple[tuple[int, str], ...] = ()
    ended_rows: tuple[int, ...] = ()
    pooled: tuple[bytes, ...] | None = None
    device_seconds: float = 0.0
    sample_seconds: float = 0.0


# --- events: scheduler -> server -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Where the time before a request's first token went, as instants of the core's clock.

    queue ends at `scheduled_at`, prefill at `prefilled_at`, the first sample at `sampled_at`.
    """

    scheduled_at: float
    prefilled_at: float
    sampled_at: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one request, in order; `first` comes with the first of them only."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    first: FirstToken | None = None
    pooled: bytes = b""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request. `stop_token_id` is the stop token that ended it, if one did."""

    request_id: str
    reason: FinishReason
    message: str = ""
    stop_token_id: int | None = None
    num_preemptions: int = 0
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a step over known tokens: a chunk of a prompt, or what a preemption had lost.

    `entered`: with this row the request got its slot, so what is before `start` was there already.
    """

    request_id: str
    slot: int
    start: int
    length: int
    entered: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request gave up slot and KV at `at`."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """Facts after one turn of the loop. Gauges are now; counts and seconds are this turn's.

    A turn that only handled commands has num_prefill_tokens = num_decode_tokens = 0 and no
    seconds. Prefix queries and hits are prompt tokens looked up and found at admission. Refused
    steps are plans that the engine had no memory for. The step ended at `ended_at`. Its rows that
    are not in `prompt_rows` are the decodes: one for each sequence that runs and is past its
    prompt.
    """

    step: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_blocks_cached: int
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    plan_seconds: float = 0.0
    step_seconds: float = 0.0
    device_seconds: float = 0.0
    ended_at: float = 0.0
    prompt_rows: tuple[PromptRow, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    num_refused_steps: int = 0
    waiting: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class KVMap:
    """Who holds each block: little-endian uint16, 0 free, 1 cached, 2 several, 3 + i owners[i]."""

    owners: tuple[str, ...]
    blocks: bytes


Event = Tokens | Finished | StepStats | KVMap
