"""Streams of tokens become text of whole characters, and the same text however they arrive."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.detokenizer import IncrementalDetokenizer
from server.gguf_tokenizer import read_gguf
from server.token_pieces import Spelling, TokenPieces
from server.tokenizer import Tokenizer
from tests.support.tokenizers import (
    BOS,
    IM_END,
    byte_level_backend,
    byte_level_metadata,
    byte_tokenizer,
    sentencepiece_tokenizer,
)

BYTES = byte_tokenizer(None)
BPE = Tokenizer(read_gguf(byte_level_metadata(byte_level_backend()), "test.gguf"))
SPM = sentencepiece_tokenizer()
MARK = "\ufffd"


def stream(tokenizer: Tokenizer, prompt: list[int], pieces: list[list[int]], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return "".join(map(detokenizer.add, pieces)) + detokenizer.finish()


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids at random (broken bytes, specials, unknown ids) and ids of real text."""
    anything = st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=40)
    text = st.text("ahelo w😀ไčé日\u200d.", max_size=20)
    return anything | text.map(lambda each: tokenizer.encode(each, add_special_tokens=False))


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, SPM], ids=["bytes", "bpe", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_any_split_streams_the_full_decode(
    tokenizer: Tokenizer, skip: bool, data: st.DataObject
) -> None:
    """B001."""
    ids = data.draw(ids_of(tokenizer))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    edges = [0, *cuts, len(ids)]
    pieces = [ids[start:end] for start, end in itertools.pairwise(edges)]
    assert stream(tokenizer, [], pieces, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, SPM], ids=["bytes", "bpe", "sentencepiece"])
@given(data=st.data())
def test_streamed_text_is_what_follows_the_text_of_the_prompt(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """B002: an unfinished character of the prompt is completed or left to the prompt."""
    prompt, generated = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + generated, skip_special_tokens=True)
    text = stream(tokenizer, prompt, [[each] for each in generated], skip=True)
    assert text in (whole.removeprefix(before), whole.removeprefix(before.removesuffix(MARK)))


@pytest.mark.parametrize("character", ["😀", "ก", "č", "日"])
def test_character_spelled_by_several_tokens_arrives_whole(character: str) -> None:
    """B001."""
    detokenizer = BYTES.detokenizer([], skip_special_tokens=True)
    ids = list(character.encode())
    assert [detokenizer.add([each]) for each in ids] == [""] * (len(ids) - 1) + [character]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize(
    ("generated", "text"), [(b"\x82\xac!", "€!"), (b"abc", "abc"), (b"", ""), (b"\x82", MARK)]
)
def test_prompt_that_ends_inside_a_character_is_never_replayed(generated: bytes, text: str) -> None:
    """B002."""
    prompt = list(b"Hello world \xe2")
    assert stream(BYTES, prompt, [[each] for each in generated], skip=True) == text


def test_unfinished_character_at_the_end_is_one_replacement_mark() -> None:
    """B001: only here may a mark appear."""
    detokenizer = BYTES.detokenizer([], skip_special_tokens=True)
    assert detokenizer.add(list(b"ok \xf0\x9f\x98")) == "ok "
    assert detokenizer.finish() == MARK


def test_special_tokens_are_skipped_without_touching_the_text_around_them() -> None:
    """B007."""
    ids = [*b"Hello", IM_END]
    assert stream(BYTES, [BOS], [ids], skip=True) == "Hello"
    assert stream(BYTES, [BOS], [ids], skip=False) == "Hello<|im_end|>"


def test_sentencepiece_space_is_stripped_only_at_the_start_of_a_text() -> None:
    ids = SPM.encode("hello world", add_special_tokens=False)
    assert SPM.token_bytes(ids[0]) == b" hello"
    assert stream(SPM, [], [[each] for each in ids], skip=True) == "hello world"
    assert stream(SPM, [1], [[each] for each in ids], skip=True) == "hello world"
    assert stream(SPM, ids, [[each] for each in ids], skip=True) == " hello world"


def test_ids_without_a_token_are_nothing() -> None:
    """B148: rows of the model above the vocabulary."""
    beyond = [BYTES.vocab_size, BYTES.vocab_size + 1000, -1]
    assert BYTES.decode([*b"a", *beyond, *b"b"], skip_special_tokens=False) == "ab"
    assert BYTES.token_bytes(BYTES.vocab_size) == b""


def test_work_of_a_stream_does_not_grow_with_its_length() -> None:
    """The bytes of each token are asked for at most once, however long the stream is."""
    asked: list[int] = []

    class Counting(TokenPieces):
        def token_bytes(self, token_id: int) -> bytes:
            asked.append(token_id)
            return super().token_bytes(token_id)

    pieces = Counting(["a", "b"], spelling=Spelling.BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(
        pieces, [0] * 10_000, skip_special_tokens=True, strips_first_space=False
    )
    assert len(asked) <= 4
    asked.clear()
    assert "".join(detokenizer.add([1]) for _ in range(1000)) == "b" * 1000
    assert len(asked) <= 1000
