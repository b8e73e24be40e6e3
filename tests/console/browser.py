"""Debian's Chromium under Playwright, and what every visit to the console must hold.

A visit fails on any error of the page, any request to another host and any sideways scrolling.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

CHROMIUM = Path("/usr/bin/chromium")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"desktop": (1280, 860), "phone": (375, 812)}


def missing() -> str | None:
    """Why there can be no browser here, or None."""
    if not CHROMIUM.exists():
        return "no chromium here: apt-get install chromium"
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "no playwright here: pip install playwright"
    return None


@contextmanager
def browser(scheme: str, size: str) -> Iterator[BrowserContext]:
    """`scheme` is light or dark, `size` one of SIZES."""
    from playwright.sync_api import sync_playwright

    width, height = SIZES[size]
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=str(CHROMIUM),
            args=list(_FLAGS),
            viewport={"width": width, "height": height},
            color_scheme="dark" if scheme == "dark" else "light",
            has_touch=size == "phone",
        )
        context.set_default_timeout(60_000)
        try:
            yield context
        finally:
            context.close()


class Visit:
    """One page, and what went wrong on it."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.pages[0]
        self.faults: list[str] = []
        host = urlparse(url).netloc
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on(
            "console",
            lambda entry: (
                self.faults.append(entry.text)
                if entry.type == "error" and "401" not in entry.text
                else None
            ),
        )
        self.page.on(
            "request",
            lambda request: (
                self.faults.append(f"asked {request.url[:200]}")
                if urlparse(request.url).netloc not in ("", host)
                else None
            ),
        )
        self.page.goto(url + "/console/")

    def asks_for_key(self) -> bool:
        """Once the page knows whether it must."""
        login = self.page.locator("#login[open]")
        login.or_(self.page.locator("#state[data-state=ready]")).first.wait_for()
        return login.count() > 0

    def log_in(self, key: str) -> None:
        self.page.locator("#key").fill(key)
        self.page.locator("#login button").click()

    def wait_ready(self) -> None:
        self.page.locator("#state[data-state=ready]").wait_for()

    def number(self, selector: str, name: str) -> float:
        return float(self.page.locator(selector).get_attribute(name) or 0)

    def wait_for_number(self, selector: str, name: str, condition: str) -> None:
        """Until `condition` holds of the attribute, as JavaScript over `value`."""
        self.page.wait_for_function(
            "([selector, name, condition]) => { const value = "
            "Number(document.querySelector(selector).getAttribute(name) ?? 0);"
            # An expression of ours, and eval is what the page's own policy forbids.
            "const [op, limit] = condition.split(' ');"
            "return op === '>' ? value > Number(limit) : value === Number(limit); }",
            arg=[selector, name, condition],
        )

    def check(self) -> None:
        assert not self.faults, self.faults
        wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"the page is {wide} px too wide"
