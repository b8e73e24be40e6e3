"""A tokenizer rebuilt from GGUF metadata gives the ids of the tokenizer it was made from."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.default_model import find_default_model
from engine.errors import ModelFileError
from server.gguf_tokenizer import SPLITTERS, TokenType, read_gguf
from server.special_text import MarkedText
from server.token_pieces import SPACE_MARK
from server.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import (
    LETTERS,
    PIECES,
    byte_level_backend,
    byte_level_metadata,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
)

BACKEND = byte_level_backend()
BYTE_LEVEL = Tokenizer(read_gguf(byte_level_metadata(BACKEND), "test.gguf"))
SPM = sentencepiece_tokenizer()


@given(text=st.text("helo wrdab č😀\n123<s>'", max_size=40) | st.text(max_size=20))
def test_byte_level_ids_equal_the_originals(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)
    assert ids == BACKEND.encode(text, add_special_tokens=False).ids
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == text


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece's BPE in the plainest way: join the best pair, the leftmost of equals."""
    scores = dict(PIECES)
    pieces = list((SPACE_MARK + text.replace(" ", SPACE_MARK)) if text else "")
    while True:
        pairs = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    spelled: list[str] = []
    for piece in pieces:
        if piece in scores or piece in LETTERS:
            spelled.append(piece)
        else:
            spelled.extend(f"<0x{byte:02X}>" for byte in piece.encode())
    return spelled


@given(text=st.text("ahelo wrdbcčé.😀", max_size=40))
def test_sentencepiece_pieces_equal_the_reference(text: str) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = SPM.encode(text, add_special_tokens=False)
    assert [tokens[each] for each in ids] == sentencepiece_reference(text)
    assert SPM.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_falls_back_to_bytes() -> None:
    """B074."""
    ids = SPM.encode("😀", add_special_tokens=False)
    assert b"".join(map(SPM.token_bytes, ids)) == " 😀".encode()
    assert SPM.token_bytes(3 + 0xF0) == b"\xf0"


def test_bos_is_added_as_the_file_says() -> None:
    assert SPM.encode("a", add_special_tokens=True)[0] == 1  # the rule of its kind
    without = sentencepiece_tokenizer(add_bos_token=False)
    assert without.encode("", add_special_tokens=True) == []
    both = sentencepiece_tokenizer(add_eos_token=True)
    assert both.encode("", add_special_tokens=True) == [1, 2]


def test_space_prefix_is_optional() -> None:
    tokenizer = sentencepiece_tokenizer(add_space_prefix=False)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert [tokenizer.token_bytes(each) for each in ids] == [b"hello"]
    assert tokenizer.decode(SPM.encode("hello", add_special_tokens=False), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 123  ok", ["It", "'s", " 123", " ", " ok"]),
        ("smollm", "a 123b", ["a", " ", "1", "2", "3", "b"]),
        ("llama-bpe", "a 12345\n\n b", ["a", " ", "123", "45", "\n\n", " b"]),
        ("llama-bpe", "DON'T", ["DON", "'T"]),
        ("qwen2", "x12 y", ["x", "1", "2", " y"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("gpt-4o", "fooBar's 1234/", ["foo", "Bar's", " ", "123", "4", "/"]),
    ],
)
def test_words_are_split_as_the_original_does(pre: str, text: str, words: list[str]) -> None:
    backend = read_gguf(byte_level_metadata(BACKEND, pre=pre), "test.gguf").backend
    cuts = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in cuts] == words


@pytest.mark.parametrize("pre", sorted(SPLITTERS))
def test_every_splitter_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer(read_gguf(byte_level_metadata(BACKEND, pre=pre), "test.gguf"))
    text = "Hello,  WORLD's 12345 \t\r\n\n čeština 日本語 😀👩‍👩‍👧 __x__ \x00 fooBar/"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", [None, "brand-new"])
def test_unknown_splitter_is_a_loud_warning(
    pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """B148."""
    with caplog.at_level(logging.WARNING):
        parts = read_gguf(byte_level_metadata(BACKEND, pre=pre), "model.gguf")
    assert "model.gguf" in caplog.text
    assert "pre-tokenizer" in caplog.text
    ids = Tokenizer(parts).encode("it's 1", add_special_tokens=False)
    assert ids == BACKEND.encode("it's 1").ids


def test_control_and_user_defined_tokens_match_as_they_stand() -> None:
    ids = BYTE_LEVEL.encode("a<turn><note é>", add_special_tokens=False)[1:]
    assert [BYTE_LEVEL.is_special(each) for each in ids] == [True, False]
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=True) == "<note é>"


def test_end_of_text_is_the_union_of_every_source() -> None:
    """B146."""
    assert BYTE_LEVEL.eos_token_ids == {1}
    metadata = byte_level_metadata(BACKEND, eot_token_id=2, eom_token_id=7)
    assert read_gguf(metadata, "test.gguf").eos_token_ids == {1, 2, 7}


def test_turn_marker_without_a_name_of_its_own_ends_text() -> None:
    """B146: the file names </s> only, yet the model ends its turns with <|im_end|>."""
    metadata = byte_level_metadata(BACKEND)
    metadata["tokenizer.ggml.tokens"] = [
        "<|im_end|>" if token == "<turn>" else token for token in metadata["tokenizer.ggml.tokens"]
    ]
    assert read_gguf(metadata, "test.gguf").eos_token_ids == {1, 2}


def test_chat_templates_of_the_file_are_used() -> None:
    metadata = byte_level_metadata(BACKEND)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    metadata["tokenizer.chat_template.tool_use"] = "tools {{ messages[0].content }}"
    template = read_gguf(metadata, "test.gguf").chat_template
    assert template is not None
    messages = [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "<s>hi"
    assert template.render(messages, tools=[{"type": "function"}]) == "tools hi"
    template.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": None}, "model is missing"),
        ({"model": "bert"}, "'gpt2' and 'llama' are supported"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": ["a", 1]}, "tokens is missing or not a list of strings"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "not two pieces"),
        ({"merges": ["nosuchpiece a"]}, "do not fit"),
        ({"token_type": [1]}, "one number for each token"),
        ({"add_bos_token": 1}, "not a boolean"),
    ],
)
def test_contradictory_metadata_is_one_clear_line(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        read_gguf(byte_level_metadata(BACKEND, **fields), "test.gguf")
    assert str(caught.value).startswith("test.gguf: ")
    assert "\n" not in str(caught.value)


def test_scores_must_fit_the_tokens() -> None:
    for scores in ([1.0], ["x"] * len(sentencepiece_metadata()["tokenizer.ggml.tokens"]), None):
        with pytest.raises(ModelFileError, match="scores"):
            read_gguf(sentencepiece_metadata(scores=scores), "test.gguf")


def test_id_without_a_token_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """B148."""
    with caplog.at_level(logging.WARNING):
        parts = read_gguf(byte_level_metadata(BACKEND, eos_token_id=10**6), "test.gguf")
    assert parts.eos_token_ids == frozenset()
    assert "eos_token_id is 1000000" in caplog.text


def test_token_that_stands_twice_keeps_both_texts() -> None:
    metadata = byte_level_metadata(BACKEND)
    metadata["tokenizer.ggml.tokens"].append("H")
    metadata["tokenizer.ggml.token_type"].append(TokenType.NORMAL)
    tokenizer = Tokenizer(read_gguf(metadata, "test.gguf"))
    last = tokenizer.vocab_size - 1
    assert tokenizer.token_bytes(last) == b"H"
    assert tokenizer.encode("H", add_special_tokens=False) == BACKEND.encode("H").ids


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    try:
        return load_tokenizer(find_default_model())
    except ModelFileError as error:
        pytest.skip(str(error))


@pytest.mark.model
def test_default_chat_has_the_known_ids(smollm: Tokenizer) -> None:
    assert smollm.chat_template is not None
    text = smollm.chat_template.render([{"role": "user", "content": "hi"}])
    smollm.chat_template.close()
    assert smollm.encode_chat(MarkedText(text)) == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018,
        411, 407, 19712, 8182, 2, 198, 1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198,
    ]  # fmt: skip


@pytest.mark.model
def test_facts_of_the_file(smollm: Tokenizer) -> None:
    assert smollm.eos_token_ids == {2}
    assert smollm.bos == 1
    assert smollm.vocab_size == 49152
    assert smollm.encode("", add_special_tokens=True) == []


@pytest.mark.model
@pytest.mark.parametrize(
    "text",
    [
        "Hello  wörld! 123 it's DON'T\r\n\n\t x=1;",
        "😀👩‍👩‍👧‍👦 ไทย čeština 日本語 עברית العربية",
        "\x00\x7f\ufeff\ufffd\u2028" + "a" * 3000,
        " leading and trailing  ",
    ],
)
def test_rich_text_survives(smollm: Tokenizer, text: str) -> None:
    ids = smollm.encode(text, add_special_tokens=False)
    assert smollm.decode(ids, skip_special_tokens=False) == text
    detokenizer = smollm.detokenizer([], skip_special_tokens=False)
    pieces = [detokenizer.add([each]) for each in ids]
    assert "".join(pieces) + detokenizer.finish() == text
