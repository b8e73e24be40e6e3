"""Where the time of steps goes, by kind of step: `paceline serve --profile-steps`.

Owns the sums and the table. It watches an engine and the stream of events from outside; it must
not know models, kernels or sockets. Not for a loop whose engine runs while submit has returned:
kernels are charged to the step whose submit they ran in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.loop import Engine, PendingResult
from scheduler.types import Event, KVCapacity, StepPlan, StepResult, StepStats

Emit = Callable[[list[Event]], None]
KernelSeconds = Callable[[], dict[str, float]]

_HEAD = "head"  # the phase of the kernels that a step's sample_seconds include
_SIZES = ((1, "1 row"), (4, "2-4 rows"), (16, "5-16 rows"), (32, "17-32 rows"))


def kind_of(stats: StepStats) -> str:
    """decode by rows, prefill by tokens, or mixed."""
    prefill, decode = stats.num_prefill_tokens, stats.num_decode_tokens
    if prefill and decode:
        return "mixed"
    if prefill:
        return "prefill, up to 128" if prefill <= 128 else "prefill, above 128"
    size = next((words for limit, words in _SIZES if decode <= limit), "33 rows or more")
    return f"decode, {size}"


@dataclass(slots=True)
class _Sums:
    """Of one kind: seconds of parts in the order of a step."""

    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class StepProfile:
    """Wrap the engine and the emit of one ServingLoop, then ask for the table."""

    def __init__(
        self, clock: Callable[[], float], kernel_seconds: KernelSeconds | None = None
    ) -> None:
        """`kernel_seconds` gives seconds by phase since the last call, where kernels tell."""
        self._clock = clock
        self._kernel_seconds = kernel_seconds or dict
        self._steps: dict[int, dict[str, float]] = {}  # submitted, not yet in a sum
        self._kinds: dict[str, _Sums] = {}
        self._kernel_seconds()  # what the warm-up took is nobody's

    def engine(self, engine: Engine) -> Engine:
        return _WatchedEngine(engine, self)

    def emit(self, emit: Emit) -> Emit:
        def watched(events: list[Event]) -> None:
            begin = self._clock()
            emit(events)
            if events and isinstance(stats := events[-1], StepStats):
                self._add(stats, self._clock() - begin)

        return watched

    def table(self) -> str:
        """Milliseconds a step, and the share of each part."""
        lines = ["steps by kind, milliseconds of a step (the share of its time)"]
        for kind, sums in sorted(self._kinds.items()):
            total = sum(sums.seconds.values())
            lines.append(
                f"{kind}: {sums.steps} steps, {sums.tokens / sums.steps:.1f} tokens, "
                f"{total / sums.steps * 1e3:.3f} ms"
            )
            lines += [
                f"  {part:12} {seconds / sums.steps * 1e3:9.3f}  {seconds / (total or 1):6.1%}"
                for part, seconds in sums.seconds.items()
            ]
        return "\n".join(lines)

    def submitted(self, step: int) -> None:
        """The engine has run, or queued, a step."""
        self._steps[step] = self._kernel_seconds()

    def finished(self, result: StepResult) -> None:
        """All of a result after the last layer but the head is the sampler's."""
        kernels = self._steps[result.step]
        kernels["sampling"] = max(0.0, result.sample_seconds - kernels.get(_HEAD, 0.0))

    def _add(self, stats: StepStats, emit_seconds: float) -> None:
        measured = self._steps.pop(stats.step, None)
        if measured is None or not stats.num_prefill_tokens + stats.num_decode_tokens:
            return
        sums = self._kinds.setdefault(kind_of(stats), _Sums())
        sums.steps += 1
        sums.tokens += stats.num_prefill_tokens + stats.num_decode_tokens
        rest = max(0.0, stats.step_seconds - sum(measured.values()))
        for part, seconds in (
            ("planning", stats.plan_seconds),
            *measured.items(),
            ("rest of step", rest),
            ("transport", emit_seconds),
        ):
            sums.seconds[part] += seconds


class _WatchedEngine:
    """Implements scheduler.loop.Engine around another."""

    def __init__(self, engine: Engine, profile: StepProfile) -> None:
        self._engine, self._profile = engine, profile

    @property
    def capacity(self) -> KVCapacity:
        return self._engine.capacity

    def submit(self, plan: StepPlan) -> PendingResult:
        pending = self._engine.submit(plan)
        self._profile.submitted(plan.step)
        return _WatchedResult(pending, self._profile)


class _WatchedResult:
    def __init__(self, pending: PendingResult, profile: StepProfile) -> None:
        self._pending, self._profile = pending, profile

    def result(self) -> StepResult:
        result = self._pending.result()
        self._profile.finished(result)
        return result
