"""Rebuilds a tokenizer from the `tokenizer.*` metadata of a GGUF file.

Two kinds are known: `gpt2`, a byte-level BPE whose word splitter is named by `tokenizer.ggml.pre`,
and `llama`, a SentencePiece BPE with scores instead of merges. Knows nothing of the container
format (engine/gguf_file.py) and nothing of weights.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from engine.errors import ModelFileError
from server.chat_template import ChatTemplate
from server.token_pieces import SPACE_MARK, Spelling, TokenPieces
from server.tokenizer_parts import TokenizerParts

log = logging.getLogger(__name__)


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Splitter:
    """How text is cut into words before merging: each pattern cuts what the one before left whole.

    `ignore_merges`: a word that is a token as a whole needs no merges. `adds_bos` holds where the
    file does not say. `nfc`: the original tokenizer normalises to composed characters.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_MARKS}|{_SPACES}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+@|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*@"
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED.replace('@', '')}|\p{{N}}|{_CASED_MARKS}|{_SPACES}"
_GPT4O = rf"{_CASED.replace('@', _CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_CASED_MARKS}|{_SPACES}"

# `tokenizer.ggml.pre` -> splitter; the patterns are those of the original tokenizers.
SPLITTERS: dict[str, Splitter] = {
    "default": Splitter((_GPT2,)),
    "gpt-2": Splitter((_GPT2,)),
    "gpt2": Splitter((_GPT2,)),
    "smollm": Splitter((r"\p{N}", _GPT2)),
    "starcoder": Splitter((r"\p{N}", _GPT2)),
    "refact": Splitter((r"\p{N}", _GPT2)),
    "command-r": Splitter((r"\p{N}", _GPT2)),
    "llama-bpe": Splitter((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "llama3": Splitter((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "llama-v3": Splitter((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "falcon3": Splitter((_LLAMA3,), ignore_merges=True, adds_bos=True),
    "dbrx": Splitter((_LLAMA3,)),
    "smaug-bpe": Splitter((_LLAMA3,)),
    "qwen2": Splitter((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Splitter((_QWEN2,), nfc=True),
    "stablelm2": Splitter((_QWEN2,)),
    "olmo": Splitter((_GPT2,)),
    "tekken": Splitter((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": Splitter((_GPT4O,)),
    "llama4": Splitter((_GPT4O,), ignore_merges=True, adds_bos=True),
}

# Control tokens that end a turn, where the file names no end-of-turn id of its own.
TURN_ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|eot|>"}
)


def read_gguf(metadata: Mapping[str, Any], source: str) -> TokenizerParts:
    """The tokenizer that the metadata describes; `source` names the file in messages.

    Raises ModelFileError if a field is missing, of the wrong kind or contradicts another.
    """
    fields = _Fields(metadata, source)
    tokens = fields.texts("tokens")
    types = fields.numbers("token_type", len(tokens)) or [TokenType.NORMAL] * len(tokens)
    kind = fields.text("model")
    if kind == "gpt2":
        splitter = _splitter(fields)
        backend = _byte_level(fields, tokens, splitter)
        spelling, adds_bos, adds_space = Spelling.BYTE_LEVEL, splitter.adds_bos, False
    elif kind == "llama":
        adds_space = fields.flag("add_space_prefix", default=True)
        backend = _sentencepiece(fields, tokens, types, adds_space=adds_space)
        spelling, adds_bos = Spelling.SENTENCEPIECE, True
    else:
        raise fields.error(f"tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported")
    literal = _add_tokens(backend, tokens, types)
    special = {
        i for i, type_ in enumerate(types) if type_ in (TokenType.CONTROL, TokenType.UNKNOWN)
    }
    bos = fields.token_id("bos_token_id", len(tokens))
    eos = fields.token_id("eos_token_id", len(tokens))
    prefix = (bos,) if bos is not None and fields.flag("add_bos_token", default=adds_bos) else ()
    suffix = (eos,) if eos is not None and fields.flag("add_eos_token", default=False) else ()
    return TokenizerParts(
        backend=backend,
        pieces=TokenPieces(tokens, spelling=spelling, literal_ids=literal, special_ids=special),
        bos=bos,
        prefix=prefix,
        suffix=suffix,
        eos_token_ids=_eos_ids(fields, tokens, types, eos),
        strips_first_space=adds_space,
        chat_template=_chat_template(fields, tokens),
    )


def _splitter(fields: _Fields) -> Splitter:
    name = fields.text("pre", default="")
    if name in SPLITTERS:
        return SPLITTERS[name]
    found = f"names an unknown pre-tokenizer {name!r}" if name else "names no pre-tokenizer"
    log.warning(
        "%s %s (tokenizer.ggml.pre): words are split as GPT-2 does, so token ids may be wrong and "
        "answers poor; use a newer conversion of the model",
        fields.source,
        found,
    )
    return SPLITTERS["default"]


def _byte_level(fields: _Fields, tokens: Sequence[str], splitter: Splitter) -> tokenizers.Tokenizer:
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(fields.texts("merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise fields.error(f"tokenizer.ggml.merges[{index}] is not two pieces: {line!r}")
        merges.append((left, right))
    model = _bpe(fields, _vocabulary(tokens), merges, ignore_merges=splitter.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if splitter.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), behavior="isolated") for each in splitter.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _sentencepiece(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int], *, adds_space: bool
) -> tokenizers.Tokenizer:
    scores = fields.numbers("scores", len(tokens))
    if scores is None:
        raise fields.error("tokenizer.ggml.scores is missing")
    vocabulary = _vocabulary(tokens)
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == TokenType.UNKNOWN), None)
    model = _bpe(
        fields,
        vocabulary,
        score_merges(tokens, scores, types),
        byte_fallback=True,
        unk_token=unknown,
        fuse_unk=True,
    )
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces]) if adds_space else spaces
    )
    return backend


def score_merges(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: every cut of a piece into two pieces, best score first.

    SentencePiece always joins the neighbours whose joined piece scores highest (Kudo and Richardson
    2018); a merge list in order of score does the same.
    """
    ids = {token: i for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[token_id], ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id, the first id where a token stands twice (the others can only be decoded)."""
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _bpe(
    fields: _Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # the package raises nothing narrower
        raise fields.error(f"vocabulary and merges do not fit: {error}") from None


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]
) -> set[int]:
    """Make control and user-defined tokens match as they stand; their ids."""
    control: list[AddedToken] = []
    plain: list[AddedToken] = []
    literal: set[int] = set()
    for token_id, kind in enumerate(types):
        token = tokens[token_id]
        if kind == TokenType.CONTROL and token:
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED and token and SPACE_MARK not in token:
            plain.append(AddedToken(token, special=False, normalized=False))
        else:
            continue
        literal.add(token_id)
    backend.add_special_tokens(control)
    backend.add_tokens(plain)
    return literal


def _eos_ids(
    fields: _Fields, tokens: Sequence[str], types: Sequence[int], eos: int | None
) -> frozenset[int]:
    named = (fields.token_id(name, len(tokens)) for name in ("eot_token_id", "eom_token_id"))
    ids = {token_id for token_id in (eos, *named) if token_id is not None}
    ids.update(
        token_id
        for token_id, token in enumerate(tokens)
        if token in TURN_ENDS and types[token_id] == TokenType.CONTROL
    )
    return frozenset(ids)


def _chat_template(fields: _Fields, tokens: Sequence[str]) -> ChatTemplate | None:
    templates: dict[str, str] = {}
    for key, value in fields.metadata.items():
        if key == "tokenizer.chat_template":
            templates["default"] = value
        elif key.startswith("tokenizer.chat_template."):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    templates = {name: source for name, source in templates.items() if isinstance(source, str)}
    if "default" not in templates:
        return None
    special = {
        f"{name}_token": tokens[token_id]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := fields.token_id(f"{field}_token_id", len(tokens))) is not None
    }
    return ChatTemplate(templates, special_tokens=special)


class _Fields:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {reason}")

    def text(self, name: str, *, default: str | None = None) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, str):
            raise self.error(f"tokenizer.ggml.{name} is missing or not a string")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise self.error(f"tokenizer.ggml.{name} is not a boolean")
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < num_tokens:
            log.warning(
                "%s: tokenizer.ggml.%s is %r, which is no token of %d: ignored",
                self.source,
                name,
                value,
                num_tokens,
            )
            return None
        return value

    def texts(self, name: str) -> list[str]:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(f"tokenizer.ggml.{name} is missing or not a list of strings")
        return value

    def numbers(self, name: str, count: int) -> list[Any] | None:
        """A numeric array of `count` entries; None if the file has none."""
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return None
        values = value.tolist() if isinstance(value, array) else value
        if not isinstance(values, list) or len(values) != count:
            raise self.error(f"tokenizer.ggml.{name} does not have one number for each token")
        if not all(isinstance(item, int | float) for item in values):
            raise self.error(f"tokenizer.ggml.{name} is not a list of numbers")
        return values
