"""Files and batches in SQLite, in one folder of one server.

Owns the schema and every statement. A line's result is written in one transaction, and so are the
files at a batch's end: whatever kills the process, each line is in the output once. All calls run
in one thread; the caller awaits them. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from server.errors import Unavailable, retry_headers

T = TypeVar("T")
Row = dict[str, Any]

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER, content BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, tenant TEXT NOT NULL,
    status TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body TEXT NOT NULL,
    is_error INTEGER, result TEXT, PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
"""
_STORAGE_SECONDS = 30.0  # for a full disk to be noticed by somebody
OPEN = ("in_progress", "cancelling")
_FILE_FACTS = "id, purpose, filename, created_at, expires_at, length(content) AS bytes"


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch that has no result yet."""

    batch_id: str
    number: int
    custom_id: str
    body: str


class StorageFailed(Unavailable):
    """Nothing of the transaction was kept: the disk is full, or the folder is gone."""

    def __init__(self, error: sqlite3.Error) -> None:
        super().__init__(
            f"The server's data folder cannot be used: {error}.",
            code="store_unavailable",
            headers=retry_headers(_STORAGE_SECONDS),
        )


class Database:
    """`folder` is made if it is not there. Raises OSError or sqlite3.Error if it cannot be used."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._connection = sqlite3.connect(
            folder / "batches.sqlite3", check_same_thread=False, isolation_level=None, timeout=2
        )
        self._connection.row_factory = sqlite3.Row
        # One server a folder: another one finds it locked, and says so.
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.executescript(_SCHEMA)

    async def run(self, work: Callable[[Transaction], T]) -> T:
        """`work` in one transaction: all of it is kept, or nothing. Raises StorageFailed."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._run, work)
        except sqlite3.Error as error:
            raise StorageFailed(error) from None

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._connection.close()

    def _run(self, work: Callable[[Transaction], T]) -> T:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            value = work(Transaction(self._connection))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # a full disk has ended it already
                self._connection.execute("ROLLBACK")
            raise
        return value


class Transaction:
    """Statements of one transaction. What is of another tenant is not there."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    # --- files ---

    def add_file(
        self,
        tenant: str,
        purpose: str,
        filename: str,
        content: bytes,
        *,
        now: int,
        expires_at: int | None = None,
    ) -> Row:
        file_id = "file-" + secrets.token_hex(12)
        row = (file_id, tenant, purpose, filename, now, expires_at, content)
        self._connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        found = self.file(tenant, file_id)
        assert found is not None
        return found

    def file(self, tenant: str, file_id: str) -> Row | None:
        return self._one(
            f"SELECT {_FILE_FACTS} FROM files WHERE tenant = ? AND id = ?", (tenant, file_id)
        )

    def content(self, tenant: str, file_id: str) -> bytes | None:
        row = self._one("SELECT content FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
        return None if row is None else bytes(row["content"])

    def files(self, tenant: str, purpose: str | None) -> list[Row]:
        """The newest first."""
        return self._all(
            f"SELECT {_FILE_FACTS} FROM files WHERE tenant = ? AND (? IS NULL OR purpose = ?) "
            "ORDER BY rowid DESC",
            (tenant, purpose, purpose),
        )

    def num_bytes(self, tenant: str) -> int:
        row = self._one(
            "SELECT COALESCE(SUM(length(content)), 0) AS total FROM files WHERE tenant = ?",
            (tenant,),
        )
        assert row is not None
        return int(row["total"])

    def delete_file(self, tenant: str, file_id: str) -> bool:
        done = self._connection.execute(
            "DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id)
        )
        return done.rowcount > 0

    def expire_files(self, now: int) -> None:
        self._connection.execute("DELETE FROM files WHERE expires_at <= ?", (now,))

    # --- batches ---

    def add_batch(self, tenant: str, facts: Row, lines: Sequence[tuple[str, str]]) -> None:
        """`lines` are (custom_id, body)."""
        self._connection.execute(
            "INSERT INTO batches (id, tenant, status, facts) VALUES (?, ?, ?, ?)",
            (facts["id"], tenant, facts["status"], json.dumps(facts)),
        )
        self._connection.executemany(
            "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?)",
            [(facts["id"], number, *line) for number, line in enumerate(lines)],
        )

    def batch(self, tenant: str, batch_id: str) -> Row | None:
        row = self._one("SELECT facts FROM batches WHERE tenant = ? AND id = ?", (tenant, batch_id))
        return None if row is None else self._with_counts(json.loads(row["facts"]))

    def batches(self, tenant: str) -> list[Row]:
        """The newest first."""
        rows = self._all(
            "SELECT facts FROM batches WHERE tenant = ? ORDER BY number DESC", (tenant,)
        )
        return [self._with_counts(json.loads(row["facts"])) for row in rows]

    def open_batches(self) -> list[tuple[str, Row]]:
        """(tenant, facts), the oldest first."""
        rows = self._all(
            "SELECT tenant, facts FROM batches WHERE status IN (?, ?) ORDER BY number", OPEN
        )
        return [(row["tenant"], json.loads(row["facts"])) for row in rows]

    def update_batch(self, batch_id: str, **changes: Any) -> None:
        row = self._one("SELECT facts FROM batches WHERE id = ?", (batch_id,))
        assert row is not None
        facts = {**json.loads(row["facts"]), **changes}
        self._connection.execute(
            "UPDATE batches SET status = ?, facts = ? WHERE id = ?",
            (facts["status"], json.dumps(facts), batch_id),
        )

    def waiting_lines(self, batch_id: str, limit: int, after: int = -1) -> list[Line]:
        rows = self._all(
            "SELECT batch_id, number, custom_id, body FROM lines "
            "WHERE batch_id = ? AND result IS NULL AND number > ? ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [Line(**row) for row in rows]

    def finish_line(self, line: Line, result: Row, *, is_error: bool) -> None:
        """The first result of a line stays."""
        self._connection.execute(
            "UPDATE lines SET result = ?, is_error = ? "
            "WHERE batch_id = ? AND number = ? AND result IS NULL",
            (json.dumps(result), is_error, line.batch_id, line.number),
        )

    def results(self, batch_id: str, *, is_error: bool) -> bytes:
        rows = self._all(
            "SELECT result FROM lines WHERE batch_id = ? AND is_error = ? ORDER BY number",
            (batch_id, is_error),
        )
        return "".join(row["result"] + "\n" for row in rows).encode()

    def drop_lines(self, batch_id: str) -> None:
        self._connection.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    def counts(self, batch_id: str) -> Row:
        row = self._one(
            "SELECT COUNT(*) AS total, COALESCE(SUM(is_error = 0), 0) AS completed, "
            "COALESCE(SUM(is_error), 0) AS failed FROM lines WHERE batch_id = ?",
            (batch_id,),
        )
        assert row is not None
        return row

    def _with_counts(self, facts: Row) -> Row:
        if facts["status"] in OPEN:
            facts["request_counts"] = self.counts(facts["id"])
        return facts

    def _one(self, statement: str, values: Sequence[Any]) -> Row | None:
        row = self._connection.execute(statement, values).fetchone()
        return None if row is None else dict(row)

    def _all(self, statement: str, values: Sequence[Any]) -> list[Row]:
        return [dict(row) for row in self._connection.execute(statement, values)]
