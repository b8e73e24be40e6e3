"""SchedulerLimits: what a step and the queue may hold.

The numbers that a person sets, by flag. Owns no rule: what they limit is decided in scheduler.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step and the queue may hold.

    `max_step_tokens` is the token budget of a step. Together at most `max_running` + `max_waiting`
    requests are accepted and unfinished; `max_running` of them can have a slot. Admission leaves
    `watermark_blocks` available while something runs. A row of prefill has at most
    `max_chunk_tokens`; None leaves it to the budget. A step that decodes is paced to
    `max_step_seconds`, the target of TPOT, by taking fewer prompt tokens; None does not pace.
    `num_tenants` may come, and share engine and queue alike but for those `weights` that are not 1.
    """

    max_step_tokens: int
    max_waiting: int
    max_running: int
    watermark_blocks: int
    prefix_caching: bool = True
    max_chunk_tokens: int | None = None
    max_step_seconds: float | None = None
    num_tenants: int = 1
    weights: tuple[tuple[str, float], ...] = ()
