"""Small tokenizers for tests: one id a byte, a trained byte-level BPE, a scored SentencePiece BPE.

All are the real Tokenizer class over small vocabularies, so nothing about text is pretended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from server.chat_template import ChatTemplate
from server.gguf_tokenizer import TokenType, read_gguf
from server.token_pieces import SPACE_MARK, Spelling, TokenPieces, byte_alphabet
from server.tokenizer import Tokenizer
from server.tokenizer_parts import TokenizerParts

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The byte tokenizer: ids 0..255 are the bytes, then these.
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
BYTE_SPECIALS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
BYTE_VOCAB_SIZE = 260

CORPUS = (
    "Hello world, this is the tale of a tokenizer that had 123 words and 4567 letters.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. 😀😃 ไทย 日本語 déjà vu.",
    "def add(x, y):\n    return x + y\n\n\nprint(add(1, 2))  # it's fine, isn't it?",
)


def byte_tokenizer(
    chat_template: str | None = CHATML,
    *,
    adds_bos: bool = False,
    eos_token_ids: frozenset[int] = frozenset({EOS, IM_END}),
) -> Tokenizer:
    """One token a byte: `encode("ab") == [97, 98]`; the specials of BYTE_SPECIALS are 256..259."""
    spelled = {byte: character for character, byte in byte_alphabet().items()}
    tokens = [spelled[byte] for byte in range(256)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in BYTE_SPECIALS])
    specials = frozenset(range(256, BYTE_VOCAB_SIZE))
    template = None
    if chat_template is not None:
        names = {"bos_token": BYTE_SPECIALS[0], "eos_token": BYTE_SPECIALS[1]}
        template = ChatTemplate(chat_template, special_tokens=names)
    return Tokenizer(
        TokenizerParts(
            backend=backend,
            pieces=TokenPieces(
                [*tokens, *BYTE_SPECIALS],
                spelling=Spelling.BYTE_LEVEL,
                literal_ids=specials,
                special_ids=specials,
            ),
            bos=BOS,
            prefix=(BOS,) if adds_bos else (),
            suffix=(),
            eos_token_ids=eos_token_ids,
            strips_first_space=False,
            chat_template=template,
        )
    )


def byte_level_backend(vocab_size: int = 400) -> tokenizers.Tokenizer:
    """A trained byte-level BPE with specials <s> 0, </s> 1, <turn> 2 and the plain token <note>."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<note é>", special=False, normalized=False)])
    return backend


def write_directory(path: Path, backend: tokenizers.Tokenizer, **configs: Any) -> Path:
    """A Hugging Face model directory: tokenizer.json and <name>.json for every config given."""
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, config in configs.items():
        (path / f"{name}.json").write_text(json.dumps(config))
    return path


def byte_level_metadata(backend: tokenizers.Tokenizer, **fields: Any) -> dict[str, Any]:
    """The metadata that a GGUF of this byte-level backend holds; `fields` replace or add."""
    model = json.loads(backend.to_str())
    added = {token["id"]: token["special"] for token in model["added_tokens"]}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [
        TokenType.NORMAL
        if index not in added
        else TokenType.CONTROL
        if added[index]
        else TokenType.USER_DEFINED
        for index in range(len(tokens))
    ]
    named = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in model["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


# Pieces of the SentencePiece vocabulary with their scores: a higher one is merged earlier.
PIECES = (
    ("he", -1.0), ("ll", -2.0), (SPACE_MARK + "w", -3.0), ("or", -4.0), ("ld", -5.0),
    ("hell", -6.0), (SPACE_MARK + "hell", -7.0), ("hello", -7.5), (SPACE_MARK + "hello", -8.0),
    (SPACE_MARK + "wor", -9.0), (SPACE_MARK + "world", -10.0), (SPACE_MARK * 2, -11.0),
    (SPACE_MARK * 4, -12.0), ("aa", -13.0), ("aaa", -14.0), ("aaaa", -15.0),
    ("ab", -16.0), ("bc", -17.0), ("abc", -18.0), ("čé", -19.0),
)  # fmt: skip
LETTERS = SPACE_MARK + "abcdehlorwčé."


def sentencepiece_metadata(**fields: Any) -> dict[str, Any]:
    """The metadata of a small GGUF of kind `llama`: <unk> 0, <s> 1, </s> 2, 256 bytes, pieces."""
    pieces = [*PIECES, *((letter, -100.0 - i) for i, letter in enumerate(LETTERS))]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    scores = [0.0] * len(tokens)
    tokens += [piece for piece, _ in pieces]
    scores += [score for _, score in pieces]
    types += [TokenType.NORMAL] * len(pieces)
    named = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in named.items() if value is not None}


def sentencepiece_tokenizer(**fields: Any) -> Tokenizer:
    return Tokenizer(read_gguf(sentencepiece_metadata(**fields), "test.gguf"))


@contextmanager
def template(source: str | dict[str, str], **options: Any) -> Iterator[ChatTemplate]:
    """A chat template whose process ends with the block."""
    made = ChatTemplate(source, **options)
    try:
        yield made
    finally:
        made.close()
