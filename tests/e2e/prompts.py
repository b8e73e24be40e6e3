"""Thirty-two prompts for the default model: chat, prose, code, lists, other scripts."""

from __future__ import annotations

from pathlib import Path

from server.tokenizer import load_tokenizer

_QUESTIONS = (
    "What is the capital of France?",
    "Explain how a bicycle stays upright.",
    "Write a haiku about the sea.",
    "List five fruits that are red.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' into German.",
    "What is 17 times 23?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
    "How do I reverse a list in Python?",
)

_TEXTS = (
    "Once upon a time, in a village by the river,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "import json\n\ndef read_config(path):\n",
    "SELECT name, count(*) FROM orders",
    "<html>\n<head><title>",
    "1, 1, 2, 3, 5, 8,",
    "Q: How many legs has a spider?\nA:",
    "Příliš žluťoučký kůň úpěl",
    "La capitale de la France est",
    "今日の天気は",
    "Le café coûte 3 €, naïvement 😀",
    "To be, or not to be, that is",
    "The mitochondria is the",
    "Dear Sir or Madam,\n\nI am writing to",
    "| name | age |\n|---|---|\n| Ann | 31 |\n|",
    '{"id": 1, "tags": ["a", "b"],',
    "ERROR 2024-03-01 12:00:01 connection refused:",
    "A train leaves at 9:00 at 80 km/h.",
    "Roses are red,",
)


def prompt_ids(path: Path) -> list[tuple[int, ...]]:
    """Ten chats, twenty texts, and two that are long."""
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_template is not None
    chats = [
        tokenizer.encode(
            tokenizer.chat_template.render([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in _QUESTIONS
    ]
    texts = [tokenizer.encode(text, add_special_tokens=True) for text in _TEXTS]
    long = [
        tokenizer.encode(" ".join(group), add_special_tokens=True)
        for group in (_TEXTS, (*_QUESTIONS, *_TEXTS[::-1]))
    ]
    return [tuple(ids) for ids in (*chats, *texts, *long)]
