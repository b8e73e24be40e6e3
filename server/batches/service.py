"""Files and batches of one server: its database, its routes, and the runner while it lives."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import FastAPI
from starlette.types import ASGIApp

from server.batches.database import Database
from server.batches.files import FileRoutes
from server.batches.routes import BatchRoutes
from server.batches.runner import BatchRunner
from server.config import ConfigError
from server.inference import Services


class BatchService:
    """Raises ConfigError if the folder cannot be used, by another server's lock for example."""

    def __init__(self, services: Services, endpoints: Mapping[str, ASGIApp]) -> None:
        folder = services.config.data_dir
        try:
            self._database = Database(Path(folder))
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            if "locked" in reason:
                reason = "another server has it (one server a folder)"
            raise ConfigError(f"--data-dir {folder}: {reason}") from None
        self._runner = BatchRunner(self._database, services.core, endpoints)
        self._routes = (
            FileRoutes(services, self._database),
            BatchRoutes(services, self._database, self._runner),
        )

    def add_to(self, app: FastAPI) -> None:
        for routes in self._routes:
            routes.add_to(app)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._runner.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._database.close()
