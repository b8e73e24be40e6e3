"""Real text for measurements of accuracy: pages of this project and of the Python manual."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from server.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/operations.md", "docs/architecture.md", "docs/performance.md")
TOPICS = ("exceptions", "naming", "with", "class")


def windows(tokenizer: Tokenizer, positions: int) -> list[list[int]]:
    """Token ids of eight texts; each has positions / 8 tokens and the one that follows."""
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    texts += [topics[topic] for topic in TOPICS]
    length = positions // len(texts) + 1
    ids = [tokenizer.encode(text, add_special_tokens=False)[:length] for text in texts]
    assert all(len(window) == length for window in ids), "a text is too short for so many positions"
    return ids
