"""Seeded bugs: does the property test notice? `python -m tests.simulation.seeded_bugs` shows it.

Each bug is one line of the product replaced by a wrong one, in memory and for one run of the state
machine. A line that is no longer there is an error, so the list can't rot.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler.batch import Batch
from scheduler.block_pool import BlockPool
from scheduler.deadlines import Deadlines
from scheduler.draft import Draft
from scheduler.entry import EntryFinder
from scheduler.line import Lane, Line, Turns
from scheduler.prefix import KeyChain
from scheduler.rows import Rows
from scheduler.scheduler import Scheduler
from scheduler.sequence import Sequence
from tests.simulation.machine import SchedulerMachine, machine_settings

MAX_EXAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Bug:
    name: str
    owner: type
    method: str
    right: str
    wrong: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = vars(self.owner)[self.method]
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.right) == 1, f"{self.name}: the line to break is gone"
        broken = source.replace(self.right, self.wrong)
        namespace: dict[str, object] = {}
        code = compile("from __future__ import annotations\n" + broken, self.name, "exec")
        exec(code, original.__globals__, namespace)
        setattr(self.owner, self.method, namespace[self.method])
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)

    def is_caught(self) -> str | None:
        """The error that the state machine ends in, or None if it notices nothing."""
        quick = settings(machine_settings(MAX_EXAMPLES), phases=[Phase.generate], print_blob=False)
        with self.planted():
            try:
                run_state_machine_as_test(SchedulerMachine, settings=quick)
            except Exception as error:
                first = _first_of(error)
                return f"{type(first).__name__}: {first}".splitlines()[0]
        return None


def _first_of(error: BaseException) -> BaseException:
    """The first error: taking down a broken machine often raises another."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__context__ is not None:
            error = error.__context__
        else:
            return error


BUGS = (
    Bug("drop a reference", BlockPool, "share", "self.refs[block] += 1", "pass"),
    Bug(
        "free twice",
        Batch,
        "leave",
        "self.pool.release(sequence.block_ids)",
        "self.pool.release(sequence.block_ids); self.pool.release(sequence.block_ids[:1])",
    ),
    Bug("lose a block", BlockPool, "release", "reversed(table)", "reversed(table[1:])"),
    Bug("lose a slot", Batch, "leave", "self._free_slots.append(sequence.slot)", "pass"),
    Bug("evict and still find", BlockPool, "_evict", "self._forget(block)", "pass"),
    Bug(
        "evict what was just found",
        Batch,
        "enter",
        "new = self.pool.take(self.num_blocks(sequence) - num_shared)",
        "self.pool.release(entry.blocks);"
        " new = self.pool.take(self.num_blocks(sequence) - num_shared);"
        " [self.pool.refs.__setitem__(b, self.pool.refs[b] + 1) for b in entry.blocks]",
    ),
    Bug(
        "publish a partial block",
        Batch,
        "publish",
        "end // self._block_size",
        "-(-end // self._block_size)",
    ),
    Bug(
        "keep what a failed row wrote",
        Scheduler,
        "apply",
        "self.batch.pool.unpublish(block)",
        "pass",
    ),
    Bug(
        "keep what a refused plan published",
        Scheduler,
        "take_back",
        "self.batch.pool.unpublish(block)",
        "pass",
    ),
    Bug(
        "wait for the token of a refused row",
        Draft,
        "take_back",
        "sequence.num_pending -= samples",
        "pass",
    ),
    Bug(
        "let a refused row run on",
        Scheduler,
        "take_back",
        "self._rows.preempt(sequence)",
        "pass",
    ),
    Bug("ignore the namespace", KeyChain, "extend", "_ROOT + namespace", "_ROOT"),
    Bug("ignore what came before", KeyChain, "extend", "parent = digest", "pass"),
    Bug(
        "skip the last token of a full hit",
        EntryFinder,
        "_cached",
        "(len(sequence.token_ids) - 1) // self._block_size",
        "len(sequence.token_ids) // self._block_size",
    ),
    Bug("fork before the prompt is there", EntryFinder, "_fork_source", "< step", "<= step"),
    Bug(
        "copy the wrong block",
        EntryFinder,
        "_fork",
        "source.block_ids[num_full] if",
        "source.block_ids[num_full - 1] if",
    ),
    Bug("forget to copy", Rows, "_enter", "if entry.copy_source is not None", "if False"),
    Bug(
        "share the partial block",
        EntryFinder,
        "_fork",
        "source.block_ids[:num_full]",
        "source.block_ids[: num_full + 1]",
    ),
    Bug(
        "off by one chunk",
        Draft,
        "add",
        "self._starts.append(sequence.num_computed)",
        "self._starts.append(sequence.num_computed + 1)",
    ),
    Bug("zero-length row", Rows, "_use_up", "if length > 0", "if length >= 0"),
    Bug("compute past the limit", Rows, "_plan_decodes", "< s.end", "<= s.end"),
    Bug("exceed the budget", Draft, "_advance", "self.left -= length", "self.left -= length // 2"),
    Bug("exceed the chunk", Rows, "_use_up", "self._max_chunk - draft.lengths[row]", "999"),
    Bug(
        "grow without telling the engine",
        Rows,
        "_plan_decodes",
        "draft.add_blocks(sequence, num_blocks)",
        "pass",
    ),
    Bug("victim in the plan", Rows, "_free_a_block", "running[-1]", "running[0]"),
    Bug(
        "re-enter with a token pending",
        Rows,
        "_admit",
        "if sequence is None or sequence.num_pending:",
        "if sequence is None:",
    ),
    Bug("charge nobody", Lane, "charge", "self.served += cost / self.weight", "pass"),
    Bug("forget the weight", Lane, "charge", "cost / self.weight", "cost"),
    Bug("count idle time as a claim", Line, "_wait", "if not lane.waiting:", "if 0:"),
    Bug(
        "serve the most served",
        Turns,
        "first",
        "self._heap[0]",
        "max(self._heap)",
    ),
    Bug("pay for what was not computed", Line, "leave", "if not sequence.has_sampled", "if 0"),
    Bug("wait on past the deadline", Deadlines, "due", "[0] <= now", "[0] < now"),
    Bug("end what has begun", Scheduler, "expire", "and not sequence.has_begun", ""),
    Bug(
        "keep the place of what is over",
        Scheduler,
        "_finish",
        "self.places.give_back(request.tenant)",
        "pass",
    ),
    Bug(
        "go to the end of the line",
        Line,
        "_wait",
        "insort(lane.waiting, sequence, key=_by_turn)",
        "lane.waiting.append(sequence)",
    ),
    Bug(
        "count time alone in the batch as a claim",
        Line,
        "fall_back",
        "self._wait(sequence)",
        "insort(sequence.lane.waiting, sequence, key=_by_turn)",
    ),
    Bug("stay in line when it is over", Line, "leave", "self._stop_waiting(sequence)", "pass"),
    Bug("lose an abort", Scheduler, "handle", "if i in self.sequences]", "if 0]"),
    Bug("finish twice", Scheduler, "_finish", "del self.sequences[request.id]", "pass"),
    Bug("run on after a stop token", Scheduler, "_apply_row", "if token in", "if 0 and token in"),
    Bug(
        "stop before min_tokens",
        Scheduler,
        "_apply_row",
        "> request.sampling",
        ">= request.sampling",
    ),
    Bug("one token too many", Scheduler, "_apply_row", "num_generated == r", "num_generated > r"),
    Bug(
        "report prompt logprobs again",
        Sequence,
        "report",
        "max(0, self.num_prompt_logprobs - start)",
        "0",
    ),
)


def main() -> int:
    escaped = 0
    for bug in BUGS:
        started = time.perf_counter()
        error = bug.is_caught()
        escaped += error is None
        seconds = time.perf_counter() - started
        print(f"{bug.name:36} {seconds:6.1f} s  {error or 'ESCAPED'}"[:120], flush=True)
    print(f"{len(BUGS) - escaped} of {len(BUGS)} seeded bugs caught")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
