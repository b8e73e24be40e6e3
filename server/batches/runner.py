"""Runs the lines of open batches, below all interactive work, until each has a result.

Owns when a line may run. A line is an ordinary request to its endpoint, made in this process; a
line that was running when the process was killed runs again, and has one result all the same.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from server.answers import Json
from server.batches.database import Database, Line, Row, StorageFailed, Transaction
from server.core_client import CoreClient, CoreState
from server.errors import ApiError, envelope
from server.inference import IGNORED_HEADER, as_api_error
from server.middleware import RequestContext

log = logging.getLogger("paceline.batches")

LOWEST_PRIORITY = 100
# Lines at a time while nobody else is served; while somebody is, none begins.
MAX_LINES = 4
# After the last interactive request, before a line begins.
QUIET_SECONDS = 0.5
POLL_SECONDS = 0.02
BLOCKED_SECONDS = 0.25  # between looks whether others are done
IDLE_SECONDS = 2.0
STORAGE_SECONDS = 5.0  # between tries to write to a disk that is full
MAX_ATTEMPTS = 3
RETRIED = (429, 503)


class BatchRunner:
    """`run` it as a task; `wake` it when there is a new batch."""

    def __init__(
        self, database: Database, core: CoreClient, endpoints: Mapping[str, ASGIApp]
    ) -> None:
        self._database = database
        self._core = core
        self._endpoints = endpoints
        self._awake = asyncio.Event()
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._contexts: dict[tuple[str, int], RequestContext] = {}
        self._attempts: dict[tuple[str, int], int] = {}
        self._busy_at = 0.0

    def wake(self) -> None:
        self._awake.set()

    def cancel(self, batch_id: str) -> None:
        """The lines of it that run; the loop does the rest."""
        for key, task in self._tasks.items():
            if key[0] == batch_id:
                task.cancel()
        self.wake()

    async def run(self) -> None:
        try:
            while True:
                self._awake.clear()
                try:
                    is_busy = await self._turn()
                except StorageFailed as error:
                    log.error("batches wait: %s", error.message)
                    await asyncio.sleep(STORAGE_SECONDS)
                    continue
                if not is_busy:
                    await self._sleep(IDLE_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _turn(self) -> bool:
        """Begins what may begin; False if there is no open batch."""
        batches = await self._database.run(lambda of: of.open_batches())
        for tenant, facts in batches:
            await self._advance(tenant, facts)
        if batches:
            await self._sleep(POLL_SECONDS if self._may_begin() else BLOCKED_SECONDS)
        return bool(batches)

    async def _advance(self, tenant: str, facts: Row) -> None:
        batch_id = facts["id"]
        running = [number for batch, number in self._tasks if batch == batch_id]
        is_over = facts["status"] == "cancelling" or time.time() >= facts["expires_at"]
        if is_over:
            self.cancel(batch_id)
            if not running:
                await self._end(tenant, facts)
            return
        room = MAX_LINES - len(self._tasks)
        lines = await self._database.run(
            lambda of: of.waiting_lines(batch_id, MAX_LINES + len(running))
        )
        if not lines:
            await self._end(tenant, facts)
            return
        new = [line for line in lines if line.number not in running]
        if new and room > 0 and self._may_begin():
            line = new[0]
            key = (batch_id, line.number)
            self._tasks[key] = asyncio.create_task(self._run_line(key, tenant, facts, line))

    def _may_begin(self) -> bool:
        """Every open stream that is not a line's is somebody who waits for an answer.

        Lines read their prompts one at a time: a step full of prompts is what would make somebody
        wait who comes just then.
        """
        now = asyncio.get_running_loop().time()
        if self._core.num_open > len(self._tasks):
            self._busy_at = now
        if any(_reads_prompt(context) for context in self._contexts.values()):
            return False
        return self._core.state is CoreState.READY and now - self._busy_at >= QUIET_SECONDS

    async def _run_line(self, key: tuple[str, int], tenant: str, facts: Row, line: Line) -> None:
        try:
            request_id = uuid.uuid4().hex
            context = RequestContext(request_id, time.monotonic(), tenant)
            self._contexts[key] = context
            status, answer = await self._ask(facts["endpoint"], line, context)
            if status in RETRIED:
                await self._sleep(1.0)
                return
            self._attempts[key] = self._attempts.get(key, 0) + 1
            if status >= 500 and self._attempts[key] < MAX_ATTEMPTS:
                return
            del self._attempts[key]
            response = {"status_code": status, "request_id": request_id, **answer}
            result = _result(line.custom_id, response, None)
            await self._keep(line, result, is_error=status != 200)
        except Exception:
            log.exception("line %s of %s", line.number, line.batch_id)
        finally:
            self._contexts.pop(key, None)
            self._tasks.pop(key, None)

    async def _keep(self, line: Line, result: Row, *, is_error: bool) -> None:
        """Tries until the result is kept: the line must not be computed again for a full disk."""
        while True:
            try:
                return await self._database.run(
                    lambda of: of.finish_line(line, result, is_error=is_error)
                )
            except StorageFailed as error:
                log.error("a result of %s waits: %s", line.batch_id, error.message)
                await asyncio.sleep(STORAGE_SECONDS)

    async def _ask(self, endpoint: str, line: Line, context: RequestContext) -> tuple[int, Json]:
        """The status of the endpoint's own answer; its body, and the fields without effect."""
        body = json.loads(line.body)
        ignored = ["priority"] if body.get("priority") is not None else []
        body["priority"] = LOWEST_PRIORITY
        given = json.dumps(body).encode()
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "headers": [(b"content-length", str(len(given)).encode())],
            "paceline": context,
        }
        messages = [{"type": "http.request", "body": given, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()  # nobody hangs up
            return messages.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        try:
            await self._endpoints[endpoint](scope, receive, send)
        except Exception as error:
            told: ApiError = as_api_error(error, context.id)
            return told.status, {"body": envelope(told)}
        data = b"".join(message.get("body", b"") for message in sent[1:])
        answer: Json = {"body": json.loads(data)}
        ignored += dict(sent[0]["headers"]).get(IGNORED_HEADER, b"").decode().split(", ")
        if any(ignored):
            answer["ignored_params"] = list(filter(None, ignored))
        return sent[0]["status"], answer

    async def _end(self, tenant: str, facts: Row) -> None:
        """Files, status and counts in one transaction; lines without a result get an error."""
        now = int(time.time())
        is_cancelled = facts["status"] == "cancelling"
        status = "cancelled" if is_cancelled else "completed"
        if not is_cancelled and now >= facts["expires_at"]:
            status = "expired"

        def end(of: Transaction) -> None:
            self._give_up(of, facts["id"], f"batch_{status}")
            changes: Row = {"status": status, f"{status}_at": now}
            changes["request_counts"] = of.counts(facts["id"])
            for name, is_error in (("output_file_id", False), ("error_file_id", True)):
                content = of.results(facts["id"], is_error=is_error)
                if content:
                    filename = f"{facts['id']}_{name.removesuffix('_file_id')}.jsonl"
                    made = of.add_file(tenant, "batch_output", filename, content, now=now)
                    changes[name] = made["id"]
            of.update_batch(facts["id"], **changes)
            of.drop_lines(facts["id"])

        await self._database.run(end)

    @staticmethod
    def _give_up(of: Transaction, batch_id: str, code: str) -> None:
        while lines := of.waiting_lines(batch_id, 1000):
            for line in lines:
                error = {"code": code, "message": "This line was not run."}
                of.finish_line(line, _result(line.custom_id, None, error), is_error=True)

    async def _sleep(self, seconds: float) -> None:
        """Until `wake`, or so long."""
        try:
            async with asyncio.timeout(seconds):
                await self._awake.wait()
        except TimeoutError:
            return


def _reads_prompt(context: RequestContext) -> bool:
    """Until its first token; what has no tokens reads until its end."""
    return context.timeline is None or context.timeline.clock.sampled is None


def _result(custom_id: str, answer: Json | None, error: Json | None) -> Json:
    return {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": custom_id,
        "response": answer,
        "error": error,
    }
