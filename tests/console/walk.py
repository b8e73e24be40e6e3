"""`make test-console`: a loaded server, a real browser, and what a person would look at.

Light and dark, desktop and phone; screenshots go to bench/out/console. The last line says what was
seen. The server has a scripted model, so the walk is the same everywhere; with --url it walks over
any server that runs, for pictures of a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from tests.console.browser import Visit, browser, missing
from tests.support.load_client import run_load
from tests.support.scripted_server import running_server

OUT = Path("bench/out/console")
KEY = "walk-key"
MAX_REQUESTS = 20_000  # of a visit that hangs
WORDS = ["the", "pace", "of", "a", "line", "of", "riders", "is", "set", "by", "the", "first"]


@contextmanager
def load(url: str, concurrency: int) -> Iterator[None]:
    """Requests without a pause until the context is left; some share a prompt."""
    address = urlparse(url)
    host, port = address.hostname or "", address.port or 80
    stop = threading.Event()

    def bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
        rng = random.Random(7)
        for index in range(MAX_REQUESTS):
            if stop.is_set():
                return
            shared = " ".join(WORDS * (1 + index % 3))
            prompt = shared if index % 3 else " ".join(rng.choices(WORDS, k=rng.randrange(5, 60)))
            fields = {"max_tokens": rng.randrange(20, 90), "stream": True, "ignore_eos": True}
            yield f"ride-{index:03}", "/v1/completions", {"prompt": prompt, **fields}

    def run() -> None:
        asyncio.run(run_load(host, port, bodies(), concurrency, key=KEY))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive(), "the load did not end"


def see_live(visit: Visit) -> tuple[int, int]:
    """The timeline moves and the map fills; steps that went by and blocks in use."""
    visit.wait_for_number("#kv", "data-used", "> 0")
    visit.wait_for_number("#chart-tokens", "data-newest", "> 0")
    first = visit.number("#chart-tokens", "data-newest")
    visit.wait_for_number("#chart-tokens", "data-newest", f"> {first}")
    visit.page.wait_for_timeout(2500)
    moved = visit.number("#chart-tokens", "data-newest") - first
    assert visit.page.locator("#chart-tokens canvas, #chart-tokens .bk-Figure").count() > 0
    assert visit.page.locator("#table-live tr[data-id]").count() > 0
    return int(moved), int(visit.number("#kv", "data-used"))


def chat(visit: Visit, text: str) -> int:
    """Writes by keyboard alone; the pieces of the answer."""
    page = visit.page
    page.keyboard.press("/")
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    page.locator("#play-stats:not(:empty)").wait_for()
    pieces = page.locator("#messages .assistant span[data-ms]")
    assert pieces.count() > 1
    assert page.locator("#waterfall .lane").count() == 7
    code = page.locator("#code")
    assert "curl -N http" in (code.text_content() or "")
    page.locator("#code-python").click()
    assert "client.chat.completions.create(" in (code.text_content() or "")
    assert text in (code.text_content() or "")
    page.locator("#code-curl").click()
    return pieces.count()


def see_request(visit: Visit) -> None:
    page = visit.page
    page.locator("#tab-requests").click()
    page.locator("#table-done tr[data-id]").first.focus()
    page.keyboard.press("Enter")
    page.locator("#detail-body .lane").first.wait_for()
    page.wait_for_timeout(200)


def walk(url: str, scheme: str, size: str, text: str) -> tuple[int, int, int]:
    """One visit from the key to the chat: (steps, blocks, pieces)."""
    shot = f"{scheme}-{size}"
    with browser(scheme, size) as context:
        visit = Visit(context, url)
        page = visit.page
        if visit.asks_for_key():
            visit.log_in("wrong")
            page.locator("#login-error:not(:empty)").wait_for()
            visit.log_in(KEY)
        visit.wait_ready()
        steps, blocks = see_live(visit)
        visit.check()
        page.screenshot(path=OUT / f"live-{shot}.png")
        pieces = chat(visit, text)
        page.wait_for_timeout(300)
        visit.check()
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=OUT / f"chat-{shot}.png")
        see_request(visit)
        visit.check()
        page.screenshot(path=OUT / f"request-{shot}.png")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
    return steps, blocks, pieces


def see_empty(url: str) -> None:
    with browser("light", "desktop") as context:
        visit = Visit(context, url)
        if visit.asks_for_key():
            visit.log_in(KEY)
        visit.wait_ready()
        visit.page.locator("#kv[data-used]").wait_for()
        visit.wait_for_number("#kv", "data-used", "= 0")
        visit.check()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-console")
    parser.add_argument("--url", help="a server that runs; default: one with a scripted model")
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--text", default="What is a paceline?")
    arguments = parser.parse_args()
    if reason := missing():
        print(f"test-console: {reason}", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    if arguments.url:
        return tour(arguments.url, arguments)
    flags = ("--api-key", KEY, "--log-level", "warning", "--max-running", "20")
    with running_server("ready", *flags) as (_process, client):
        return tour(str(client.base_url), arguments)


def tour(url: str, arguments: argparse.Namespace) -> int:
    seen = []
    for scheme, size in (
        ("light", "desktop"),
        ("dark", "desktop"),
        ("light", "phone"),
        ("dark", "phone"),
    ):
        with load(url, arguments.concurrency):
            seen.append(walk(url, scheme, size, arguments.text))
    see_empty(url)
    steps, _, pieces = (sum(column) for column in zip(*seen, strict=True))
    most = max(blocks for _, blocks, _ in seen)
    shots = len(list(OUT.glob("*.png")))
    print(
        f"test-console: {len(seen)} visits, light and dark, 1280 and 375 px: {steps} steps went "
        f"by, the KV map held up to {most} blocks and emptied, {pieces} pieces "
        f"of text chatted, no page error, nothing asked elsewhere; {shots} screenshots in {OUT}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
