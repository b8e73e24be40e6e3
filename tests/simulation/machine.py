"""The stateful property test: hypothesis chooses limits and commands, the rig checks everything.

PACELINE_EXAMPLES multiplies the number of examples (1 in `make test`).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.policy import Fair, FirstComeFirstServed, Priority
from scheduler.types import SamplingParams
from tests.simulation.rig import Rig

EXAMPLES = float(os.environ.get("PACELINE_EXAMPLES", "1"))

token = st.integers(0, 4)
# Few trunks and short tails, so that prompts share blocks, whole prompts and nothing. The second
# trunk has the blocks of the first behind another beginning.
_TRUNK = tuple(j * j % 5 for j in range(24))
TRUNKS = (_TRUNK, (4, *_TRUNK[1:]), tuple((j * j + j // 3 + 1) % 5 for j in range(24)))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    trunk = draw(st.sampled_from(TRUNKS))[: draw(st.integers(1, 20))]
    return (*trunk, *draw(st.lists(token, max_size=3)))


rigs = st.builds(
    Rig,
    num_blocks=st.integers(4, 20),
    block_size=st.integers(1, 4),
    max_step_tokens=st.integers(1, 24),
    max_running=st.integers(1, 6),
    max_waiting=st.sampled_from((2, 50)),
    watermark_blocks=st.integers(0, 2),
    prefix_caching=st.sampled_from((True, True, False)),
    max_chunk_tokens=st.sampled_from((None, 1, 5)),
    max_model_len=st.sampled_from((20, 1000)),
    policy=st.sampled_from(
        (
            FirstComeFirstServed(),
            Priority(ageing_seconds=3.0),
            Fair(),
            Fair(Priority(ageing_seconds=3.0)),
        )
    ),
    num_tenants=st.sampled_from((1, 3)),
    weights=st.sampled_from(((), (("b", 3.0),))),
    depth=st.integers(0, 2),  # one more than the loop uses
)


class SchedulerMachine(RuleBasedStateMachine):
    """Any command may come at any moment, also between a plan and its result."""

    @initialize(rig=rigs)
    def start(self, rig: Rig) -> None:
        self.rig = rig

    @rule(
        prompt=prompts(),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        max_tokens=st.integers(0, 10),
        stop_token_ids=st.sampled_from(((), (3, 4, 5))),
        priority=st.integers(-1, 1),
        namespace=st.sampled_from((b"", b"", b"", b"other")),
        min_tokens=st.sampled_from((0, 0, 3)),
        prompt_logprobs=st.sampled_from((None, None, None, 0)),
        tenant=st.sampled_from("abc"),
        patience=st.sampled_from((None, None, None, 0.0, 2.0, 5.0)),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        n: int,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        priority: int,
        namespace: bytes,
        min_tokens: int,
        prompt_logprobs: int | None,
        tenant: str,
        patience: float | None,
    ) -> None:
        self.rig.add_group(
            n,
            prompt,
            max_tokens,
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_namespace=namespace,
            tenant=tenant,
            deadline=None if patience is None else self.rig.clock() + patience,
            sampling=SamplingParams(min_tokens=min_tokens, prompt_logprobs=prompt_logprobs),
        )

    def one_of(self, choice: int) -> str:
        ids = list(self.rig.scheduler.sequences)
        return ids[choice % len(ids)]

    @precondition(lambda self: self.rig.scheduler.sequences)
    @rule(choice=st.integers(0, 50))
    def abort(self, choice: int) -> None:
        self.rig.abort(self.one_of(choice), "unknown")

    @precondition(lambda self: self.rig.scheduler.sequences)
    @rule(choice=st.integers(0, 50))
    def fail_next_row(self, choice: int) -> None:
        self.rig.failing.add(self.one_of(choice))

    @rule(tokens=st.integers(0, 12))
    def run_short_of_memory(self, tokens: int) -> None:
        self.rig.memory = tokens

    @rule()
    def have_memory_again(self) -> None:
        self.rig.memory = 1 << 20

    @precondition(lambda self: len(self.rig.in_flight) <= self.rig.depth)
    @rule()
    def plan(self) -> None:
        self.rig.plan()

    @precondition(lambda self: self.rig.in_flight)
    @rule()
    def apply(self) -> None:
        self.rig.apply()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.run()


def machine_settings(max_examples: int) -> settings:
    """`max_examples` runs of up to 40 commands, the same ones every time."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
