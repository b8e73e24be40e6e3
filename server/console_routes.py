"""The console's files: static, open, and nothing in them that a key would guard.

The page asks for the key itself and reads only guarded routes. Charts come from the Bokeh package
where it is installed (the extra `console`); it is found here, not imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response

from server.errors import NotFound

FILES = Path(__file__).parent / "console"
LIBRARY = ("bokeh.min.js", "bokeh-api.min.js")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Bokeh styles its own elements in place.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def console_paths() -> frozenset[str]:
    """Every path that `add_console` answers, by exact name."""
    names = {f"/console/{path.name}" for path in FILES.iterdir() if path.suffix in _TYPES}
    library = {f"/console/lib/{name}" for name in LIBRARY}
    return frozenset({"/console", "/console/"} | names | library)


def add_console(app: FastAPI) -> None:
    for path in sorted(console_paths()):
        app.router.add_route(path, _handler(path), methods=["GET"])


def _handler(path: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(_request: Request) -> Response:
        if path == "/console":
            return RedirectResponse("/console/")
        if path.startswith("/console/lib/"):
            return _library(path.rpartition("/")[2])
        name = path.removeprefix("/console/") or "index.html"
        headers = {**_HEADERS, "cache-control": "no-cache"}
        return FileResponse(FILES / name, media_type=_TYPES[Path(name).suffix], headers=headers)

    return page


def _library(name: str) -> Response:
    file = _bokeh_files()
    if file is None:
        raise NotFound("Charts need Bokeh: pip install 'paceline[console]'.", code="no_charts")
    headers = {**_HEADERS, "cache-control": "private, max-age=86400"}
    return FileResponse(file / name, media_type=_TYPES[".js"], headers=headers)


def _bokeh_files() -> Path | None:
    spec = importlib.util.find_spec("bokeh")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "server" / "static" / "js"
    return folder if (folder / LIBRARY[0]).is_file() else None
