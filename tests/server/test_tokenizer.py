"""A tokenizer from a model directory: ids, specials, ends of text, bytes and bounds."""

from __future__ import annotations

import functools
import json
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from engine.errors import ModelFileError
from server.special_text import MarkedText
from server.text import TextError
from server.tokenizer import Tokenizer, load_tokenizer
from tests.support.tokenizers import (
    BOS,
    BYTE_VOCAB_SIZE,
    IM_END,
    IM_START,
    byte_level_backend,
    byte_tokenizer,
    write_directory,
)

BACKEND = byte_level_backend()
BYTES = byte_tokenizer()
NAMES = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@functools.cache
def from_directory() -> Tokenizer:
    with tempfile.TemporaryDirectory() as path:
        return load_tokenizer(write_directory(Path(path), BACKEND, tokenizer_config=NAMES))


@pytest.fixture
def bpe() -> Tokenizer:
    return from_directory()


@given(text=st.text())
def test_text_survives_encoding(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    assert BYTES.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()


@given(ids=st.lists(st.integers(0, BACKEND.get_vocab_size() - 2), max_size=30))
def test_decode_equals_the_backends(ids: list[int]) -> None:
    tokenizer = from_directory()
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == BACKEND.decode(
            ids, skip_special_tokens=skip
        )


def test_added_tokens_are_literal_text(bpe: Tokenizer) -> None:
    note = bpe.encode("<note é>", add_special_tokens=False)
    assert len(note) == 1
    assert bpe.token_bytes(note[0]) == "<note é>".encode()
    assert not bpe.is_special(note[0])
    assert bpe.decode(note, skip_special_tokens=True) == "<note é>"


def test_specials_spelled_out_in_a_text_become_tokens_and_are_skipped() -> None:
    ids = BYTES.encode("a<|im_end|>b", add_special_tokens=False)
    assert ids == [97, IM_END, 98]
    assert BYTES.is_special(IM_END)
    assert BYTES.decode(ids, skip_special_tokens=True) == "ab"


def test_bytes_of_tokens_are_true_bytes() -> None:
    """B074."""
    ids = BYTES.encode("“😀”", add_special_tokens=False)
    assert [BYTES.token_bytes(each) for each in ids] == [bytes([byte]) for byte in "“😀”".encode()]


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogate_is_a_text_error(text: str) -> None:
    """B031."""
    with pytest.raises(TextError, match="lone surrogate U\\+D"):
        BYTES.encode(text, add_special_tokens=True)


def test_surrogate_pair_of_json_is_one_character() -> None:
    """B031."""
    text = json.loads('"\\ud83d\\ude00"')
    assert BYTES.encode(text, add_special_tokens=False) == list("😀".encode())


def test_special_tokens_are_added_on_request_only() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    assert tokenizer.encode("a", add_special_tokens=True) == [BOS, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_chat_prompt_gets_bos_once() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    assert tokenizer.encode_chat(MarkedText("<|bos|><|im_start|>a")) == [BOS, IM_START, 97]
    assert tokenizer.encode_chat(MarkedText("<|im_start|>a")) == [BOS, IM_START, 97]
    assert byte_tokenizer().encode_chat(MarkedText("a")) == [97]


@given(text=st.text(max_size=60))
def test_longer_text_than_the_limit_cannot_fit(text: str) -> None:
    """B040: refused by its length alone, without tokenizing."""
    tokenizer = from_directory()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(text) <= tokenizer.max_chars_for(len(ids))


def test_encoding_a_long_run_leaves_the_interpreter_to_others() -> None:
    """B040: another thread runs while one long word is cut up."""
    beats, done = 0, threading.Event()

    def work() -> None:
        BYTES.encode("a" * 1_000_000, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.wait(0.005):
        beats += 1
    thread.join()
    assert beats >= 5


def test_threads_share_a_tokenizer() -> None:
    texts = [f"text {index} 😀" * 50 for index in range(16)]
    found: dict[str, list[int]] = {}

    def work(text: str) -> None:
        found[text] = BYTES.encode(text, add_special_tokens=False)

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {text: list(text.encode()) for text in texts}


def test_end_of_text_is_the_union_of_every_source(tmp_path: Path) -> None:
    """B146."""
    path = write_directory(
        tmp_path,
        BACKEND,
        tokenizer_config=NAMES,
        generation_config={"eos_token_id": [2, 7], "temperature": 0.6},
        config={"eos_token_id": 9},
    )
    assert load_tokenizer(path).eos_token_ids == {1, 2, 7, 9}


def test_end_of_text_without_generation_config(tmp_path: Path) -> None:
    """B146."""
    path = write_directory(tmp_path, BACKEND, special_tokens_map=NAMES)
    assert load_tokenizer(path).eos_token_ids == {1}
    write_directory(tmp_path, BACKEND, generation_config={"temperature": 1.0})
    assert load_tokenizer(path).eos_token_ids == {1}


@pytest.mark.parametrize(
    ("config", "ids"),
    [({}, [0, 42, 1]), ({"add_bos_token": False}, [42, 1]), ({"add_eos_token": False}, [0, 42])],
)
def test_config_outranks_the_post_processor(
    tmp_path: Path, config: dict[str, bool], ids: list[int]
) -> None:
    backend = byte_level_backend()
    backend.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = load_tokenizer(write_directory(tmp_path, backend, tokenizer_config=NAMES | config))
    text = tokenizer.decode([42], skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=True) == ids


def test_config_adds_bos_that_the_post_processor_does_not(tmp_path: Path) -> None:
    config = NAMES | {"add_bos_token": True}
    tokenizer = load_tokenizer(write_directory(tmp_path, BACKEND, tokenizer_config=config))
    assert tokenizer.encode("", add_special_tokens=True) == [0]


def test_truncation_of_the_file_is_not_ours(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load_tokenizer(write_directory(tmp_path, backend))
    assert len(tokenizer.encode("z " * 50, add_special_tokens=True)) > 50
    assert len(tokenizer.encode("z", add_special_tokens=True)) == 1


def test_vocabulary_counts_added_tokens(bpe: Tokenizer) -> None:
    """B148."""
    assert bpe.vocab_size == BACKEND.get_vocab_size(with_added_tokens=True)
    assert BYTES.vocab_size == BYTE_VOCAB_SIZE


@pytest.mark.parametrize("source", ["config", "config list", "file", "file over config"])
def test_chat_template_is_found(tmp_path: Path, source: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    configs = {
        "config": {"chat_template": template},
        "config list": {
            "chat_template": [
                {"name": "default", "template": template},
                {"name": "rag", "template": "no"},
            ]
        },
        "file": {},
        "file over config": {"chat_template": "no"},
    }
    path = write_directory(tmp_path, BACKEND, tokenizer_config=NAMES | configs[source])
    if source.startswith("file"):
        (path / "chat_template.jinja").write_text(template)
    found = load_tokenizer(path).chat_template
    assert found is not None
    assert found.render([{"role": "user", "content": "hi"}]) == "<s>hi"
    found.close()


def test_model_without_a_template_has_none(bpe: Tokenizer) -> None:
    assert bpe.chat_template is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.model": "x"}, "must be converted"),
        ({"tokenizer.json": "{"}, "not a tokenizer"),
        ({"tokenizer.json": "[]"}, "not a tokenizer"),
        ({"tokenizer_config.json": "{"}, "not readable as JSON"),
        ({"tokenizer_config.json": "[]"}, "not a JSON object"),
        ({"generation_config.json": '{"eos_token_id": "2"}'}, "not a token id"),
        ({"chat_template.jinja": b"\xff"}, "cannot be read"),
    ],
)
def test_unusable_directory_is_one_clear_line(
    tmp_path: Path, files: dict[str, str | bytes], reason: str
) -> None:
    if files and not set(files) & {"tokenizer.json", "tokenizer.model"}:
        write_directory(tmp_path, BACKEND)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelFileError, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_unsupported_decoder_is_refused(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelFileError, match="decoders are supported"):
        load_tokenizer(write_directory(tmp_path, backend))


def test_an_id_beyond_all_vocabularies_is_refused(tmp_path: Path) -> None:
    """A list of four billion tokens is no vocabulary, and no memory for one."""
    path = write_directory(tmp_path, BACKEND)
    content = json.loads((path / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 4_000_000_000
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFileError, match="a token has the id 4000000000"):
        load_tokenizer(path)
