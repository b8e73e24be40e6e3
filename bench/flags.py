"""How the values of flags are read, and what is found out before a measurement begins.

It owns errors of one line for all of `paceline bench`. It must not know what a flag is for.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")

PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    """A mistake is one line, not a list of all flags; no flag has a second, shorter name."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists all flags)\n")


def number(low: float, high: float = 1e9) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return value

    return parse


def positive(text: str) -> float:
    value = number(0)(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return parse


def list_of(parse: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def parse_list(text: str) -> tuple[T, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parse_list


def id_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text} is not FIRST-LAST with FIRST < LAST")
    return int(first), int(last)


def key(text: str) -> str:
    if not (text.isascii() and text.isprintable()):  # it goes into a header
        raise argparse.ArgumentTypeError("a key is ASCII")
    return text


def server_url(text: str) -> str:
    """With or without a scheme and /v1."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        is_one = is_one and text.isascii() and text.isprintable()
    except ValueError:  # a port above 65535, half of an IPv6 address
        is_one = False
    if not is_one:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as http://HOST:PORT")
    return text


def result_file(text: str) -> Path:
    """Can be written: it would be a pity to find out after the measurement."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: is a directory")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written")
    return path


def picture_file(text: str) -> Path:
    path = result_file(text)
    if path.suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text}: its name ends in one of {', '.join(PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is missing: pip install 'paceline[plot]'")
    return path
