"""Messages and frames: what one end writes, the other reads, whole or not at all."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.limits import SchedulerLimits
from scheduler.types import (
    Finished,
    FinishReason,
    FirstToken,
    KVCapacity,
    Request,
    SamplingParams,
    StepStats,
    Submit,
    TokenLogprobs,
    Tokens,
)
from server.config import EngineConfig
from server.event_backlog import EventBacklog
from server.wire import (
    MAX_MESSAGE_BYTES,
    Commands,
    CoreInfo,
    Failed,
    FailureKind,
    FrameBuffer,
    FromCore,
    Group,
    Loading,
    Ready,
    Start,
    Step,
    ToCore,
    WireError,
    decode_from_core,
    decode_to_core,
    encode,
)

LIMITS = SchedulerLimits(max_step_tokens=8, max_waiting=4, max_running=2, watermark_blocks=1)
SAMPLING = SamplingParams(
    temperature=0.5, logit_bias=((3, -100.0), (7, 1.5)), seed=2**63, num_logprobs=0
)
REQUEST = Request(
    "a", (1, 2, 2**31), 5, (2, 0), SAMPLING, -3, "tenant", 12.5, cache_namespace=b"\x00\xff"
)
INFO = CoreInfo(
    model_name="tiny",
    max_model_len=64,
    context_length=128,
    vocab_size=100,
    eos_token_ids=(2, 3),
    capacity=KVCapacity(4, 16, 2, 64),
    limits=LIMITS,
    dtype="float32",
    device="cpu",
    kernels="reference",
    notes=("a line",),
)
LOGPROB = TokenLogprobs(1, -math.inf, ((1, -0.5), (2, -math.inf)))
TO_CORE: list[ToCore] = [
    Start(EngineConfig(model="m", kv_memory=2**40), LIMITS, 100),
    Commands((Group.pack([REQUEST]),), ("b", "c"), drain=True),
    Commands(),
]
FROM_CORE: list[FromCore] = [
    Loading("weights", 3, 10),
    Ready(INFO),
    Failed(FailureKind.MODEL, "no such file"),
    Step(
        (Tokens("a", (1, 2), (LOGPROB,), (LOGPROB,), FirstToken(1.0, 2.0, 3.0, 16)),),
        (Finished("b", FinishReason.STOP, "", 2, 1, 4.5), Finished("c", FinishReason.ERROR, "x")),
        (StepStats(1, 2, 3, 4, 5, 6, step_seconds=0.5),),
    ),
]


def body(frame: bytes) -> bytes:
    (only,) = FrameBuffer().feed(frame)
    return only


@pytest.mark.parametrize("message", TO_CORE)
def test_messages_to_the_core_survive_the_wire(message: ToCore) -> None:
    assert decode_to_core(body(encode(message))) == message


@pytest.mark.parametrize("message", FROM_CORE)
def test_messages_from_the_core_survive_the_wire(message: FromCore) -> None:
    assert decode_from_core(body(encode(message))) == message


def test_a_group_sends_its_prompt_once_and_shares_it_after() -> None:
    prompt = tuple(range(5000))
    requests = tuple(replace(REQUEST, id=str(i), prompt=prompt) for i in range(50))
    frame = encode(Commands((Group.pack(requests),)))
    assert len(frame) < 3 * len(encode(Commands((Group.pack(requests[:1]),))))
    message = decode_to_core(body(frame))
    assert isinstance(message, Commands)
    submit = message.submits[0].unpack()
    assert submit == Submit(requests)
    assert len({id(request.prompt) for request in submit.requests}) == 1


@given(st.lists(st.integers(1, 40), max_size=30))
def test_frames_are_found_however_the_bytes_arrive(sizes: list[int]) -> None:
    frames = [encode(Commands(aborts=(str(i),) * i)) for i in range(6)]
    data = b"".join(frames)
    buffer, bodies, at = FrameBuffer(), [], 0
    for size in [*sizes, len(data)]:
        bodies += buffer.feed(data[at : at + size])
        at += size
    assert [decode_to_core(found) for found in bodies] == [
        decode_to_core(frame[4:]) for frame in frames
    ]


def test_a_length_beyond_the_maximum_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(WireError, match="maximum"):
        FrameBuffer().feed((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        pickle.dumps({"type": "start"}),
        encode(Loading("x"))[4:],  # a message of the other direction
        encode(Commands(aborts=("a",)))[4:-1],
    ],
)
def test_what_is_not_a_message_is_an_error_and_nothing_else(garbage: bytes) -> None:
    with pytest.raises(WireError):
        decode_to_core(garbage)


# --- the backlog ---------------------------------------------------------------------------------


def test_unsent_tokens_of_a_request_become_one_event_in_order() -> None:
    backlog = EventBacklog()
    first = FirstToken(1.0, 2.0, 3.0, 0)
    backlog.add([Tokens("a", (1,), first=first), Tokens("b", (9,))])
    backlog.add([Tokens("a", (2, 3), (LOGPROB,)), Finished("a", FinishReason.LENGTH)])
    step = backlog.take()
    assert step.tokens == (Tokens("a", (1, 2, 3), (LOGPROB,), (), first), Tokens("b", (9,)))
    assert step.finished == (Finished("a", FinishReason.LENGTH),)
    assert not backlog


def test_an_end_never_overtakes_its_tokens_when_a_backlog_is_split() -> None:
    backlog = EventBacklog()
    for name in "abc":
        backlog.add([Tokens(name, tuple(range(100_000))), Finished(name, FinishReason.STOP)])
    seen: set[str] = set()
    num_messages = 0
    while backlog:
        step = backlog.take()
        num_messages += 1
        seen |= {tokens.request_id for tokens in step.tokens}
        assert {finished.request_id for finished in step.finished} <= seen
    assert seen == {"a", "b", "c"}
    assert num_messages > 1


def test_unsent_stats_are_bounded_and_their_sums_stay_right() -> None:
    backlog = EventBacklog()
    for step in range(5000):
        backlog.add([StepStats(step, step % 7, 0, 10, 1, 2, num_decode_tokens=3)])
    stats = backlog.take().stats
    assert len(stats) <= 1024
    assert sum(entry.num_decode_tokens for entry in stats) == 15_000
    assert stats[-1].num_running == 4999 % 7


def test_lanes_that_wait_are_the_newest_however_many_stats_were_unsent() -> None:
    backlog = EventBacklog()
    for step in range(3000):
        waiting = (("a", 5), ("b", step))
        backlog.add([StepStats(step, 1, 5 + step, 10, 1, 2, waiting=waiting)])
    backlog.add([StepStats(3000, 1, 7, 10, 1, 2, waiting=(("b", 7),))])
    assert backlog.take().stats[-1].waiting == (("b", 7),)
