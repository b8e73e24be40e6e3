"""Pages of a list, as clients walk them: `limit`, `after`, `order`, and whether there is more."""

from __future__ import annotations

from starlette.requests import Request

from server.answers import Json
from server.errors import InvalidRequest


def page_of(rows: list[Json], request: Request) -> Json:
    """One page of rows, which are the newest first: `limit` of them after the id `after`."""
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc.", param="order")
    rows = rows if order == "desc" else rows[::-1]
    limit = request.query_params.get("limit", "100")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= 10_000):
        raise InvalidRequest("limit is a number from 1 to 10000.", param="limit")
    after = request.query_params.get("after")
    if after is not None:
        ids = [row["id"] for row in rows]
        if after not in ids:  # an empty page would say that there is no more
            raise InvalidRequest(f"There is no '{after[:100]}' to go on after.", param="after")
        rows = rows[ids.index(after) + 1 :]
    shown = rows[: int(limit[:6])]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rows) > len(shown),
    }
