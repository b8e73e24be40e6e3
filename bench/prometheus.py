"""Histograms out of a server's /metrics, before and after a run.

It owns the little of the Prometheus text format that is needed. It must not know whose metrics they
are: a name is chosen by a part of it.
"""

from __future__ import annotations

import re

from bench.http_stream import HttpClient, RequestFailed

Histograms = dict[str, dict[str, float]]  # name{labels} -> upper bound -> cumulative count

READ_SECONDS = 30.0
_BUCKET = re.compile(r'^(\w+)_bucket\{(.*?)le="([^"]+)"(.*?)\}\s+(\S+)')


def parse_histograms(text: str, *, containing: str) -> Histograms:
    """Cumulative buckets of every histogram whose name contains a word, in the order given."""
    found: Histograms = {}
    for line in text.splitlines():
        match = _BUCKET.match(line)
        if match is None or containing not in match[1]:
            continue
        labels = ",".join(part.strip(",") for part in (match[2], match[4]) if part.strip(","))
        name = f"{match[1]}{{{labels}}}" if labels else match[1]
        try:
            found.setdefault(name, {})[match[3]] = float(match[5])
        except ValueError:
            continue
    return found


async def read_histograms(client: HttpClient, *, containing: str) -> Histograms:
    """Empty where the server has no /metrics that we may read."""
    try:
        exchange = await client.request("GET", "/metrics", b"", READ_SECONDS)
    except RequestFailed:
        return {}
    if exchange.status != 200:
        return {}
    return parse_histograms(exchange.body.decode("utf-8", "replace"), containing=containing)


def difference(before: Histograms, after: Histograms) -> Histograms:
    """What was added between two readings; histograms that did not move are left out."""
    moved: Histograms = {}
    for name, buckets in after.items():
        earlier = before.get(name, {})
        added = {bound: count - earlier.get(bound, 0.0) for bound, count in buckets.items()}
        if any(added.values()):
            moved[name] = added
    return moved
