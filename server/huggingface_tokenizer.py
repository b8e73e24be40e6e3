"""Reads a tokenizer from a Hugging Face model directory.

tokenizer.json holds the vocabulary; tokenizer_config.json, special_tokens_map.json,
generation_config.json and config.json say which tokens begin and end a text; the chat template is a
file of its own or part of a config. Knows nothing of weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ModelFileError
from server.chat_template import ChatTemplate
from server.token_pieces import SPACE_MARK, Spelling, TokenPieces
from server.tokenizer_parts import TokenizerParts

_MAX_TOKEN_ID = 1 << 22  # the list of tokens is as long
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def read_directory(path: Path) -> TokenizerParts:
    """The tokenizer of the model in `path`; raises ModelFileError with one clear line."""
    backend = _backend(path)
    config = _json(path, "tokenizer_config.json")
    names = _special_names(config, _json(path, "special_tokens_map.json"))
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    highest = max(vocabulary.values(), default=-1)
    if highest > _MAX_TOKEN_ID:
        raise ModelFileError(f"{path / 'tokenizer.json'}: a token has the id {highest}")
    tokens: list[str | None] = [None] * (highest + 1)
    for token, token_id in vocabulary.items():
        tokens[token_id] = token
    spelling, strips_first_space = _spelling(path, backend)
    bos = vocabulary.get(names.get("bos_token", ""))
    eos = vocabulary.get(names.get("eos_token", ""))
    prefix, suffix = _around(backend)
    return TokenizerParts(
        backend=backend,
        pieces=TokenPieces(
            tokens,
            spelling=spelling,
            literal_ids=added.keys(),
            special_ids={token_id for token_id, token in added.items() if token.special},
        ),
        bos=bos,
        prefix=_explicit(config.get("add_bos_token"), bos, prefix),
        suffix=_explicit(config.get("add_eos_token"), eos, suffix),
        eos_token_ids=frozenset(_eos_ids(path, eos)),
        strips_first_space=strips_first_space,
        chat_template=_chat_template(path, config, names),
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        hint = " (tokenizer.model must be converted first)"
        raise ModelFileError(
            f"{path}: no tokenizer.json{hint if (path / 'tokenizer.model').is_file() else ''}"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing narrower
        raise ModelFileError(f"{file}: not a tokenizer: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(path: Path, name: str) -> dict[str, Any]:
    """The object in a file of the directory; empty if there is no such file."""
    file = path / name
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{file}: not a JSON object")
    return value


def _special_names(*configs: dict[str, Any]) -> dict[str, str]:
    """bos_token and its like -> text; the first config that names one wins."""
    names: dict[str, str] = {}
    for config in configs:
        for name in _NAMED:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                names.setdefault(name, text)
    return names


def _spelling(path: Path, backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """How tokens spell bytes and whether decoding strips one space at the start."""
    if backend.decoder is not None:
        decoder = json.loads(backend.decoder.__getstate__())
        steps = decoder.get("decoders", [decoder])
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds:
            return Spelling.BYTE_LEVEL, False
        if any(_replaces_mark(step) for step in steps):
            return Spelling.SENTENCEPIECE, any(_strips_space(step) for step in steps)
    raise ModelFileError(
        f"{path / 'tokenizer.json'}: only byte-level and SentencePiece decoders are supported"
    )


def _replaces_mark(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("replacement") == SPACE_MARK)
    return bool(step["type"] == "Replace" and step.get("pattern") == {"String": SPACE_MARK})


def _strips_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)


def _around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


def _explicit(flag: object, token_id: int | None, found: tuple[int, ...]) -> tuple[int, ...]:
    """add_bos_token or add_eos_token of the config, which outranks the post-processor."""
    if not isinstance(flag, bool) or token_id is None:
        return found
    if not flag:
        return tuple(each for each in found if each != token_id)
    return found if token_id in found else (token_id, *found)


def _eos_ids(path: Path, tokenizer_eos: int | None) -> Iterator[int]:
    """Every id that any of the configs calls the end (their union: each may know one more)."""
    if tokenizer_eos is not None:
        yield tokenizer_eos
    for name in ("generation_config.json", "config.json"):
        value = _json(path, name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is int and token_id >= 0:
                yield token_id
            elif token_id is not None:
                raise ModelFileError(f"{path / name}: eos_token_id {value!r} is not a token id")


def _chat_template(
    path: Path, config: dict[str, Any], names: dict[str, str]
) -> ChatTemplate | None:
    """The template file outranks the one in the config, as in transformers."""
    templates: dict[str, str] = {}
    for value in (_json(path, "chat_template.json"), config):
        found = value.get("chat_template")
        if isinstance(found, str):
            templates["default"] = found
        elif isinstance(found, list):
            templates.update(_named_templates(found))
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _text(path / "chat_template.jinja")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _text(file)
    return ChatTemplate(templates, special_tokens=names) if "default" in templates else None


def _named_templates(entries: list[Any]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if isinstance(entry, dict):
            name, template = entry.get("name"), entry.get("template")
            if isinstance(name, str) and isinstance(template, str):
                yield name, template


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(f"{file}: cannot be read: {error}") from None
