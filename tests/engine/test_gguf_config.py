"""GGUF metadata as a config: what it becomes, and that faults are one line naming the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.errors import ModelFileError
from engine.gguf_config import from_gguf
from engine.gguf_file import open_gguf
from engine.loading import open_model
from engine.model_config import ModelConfig
from tests.support.models import VOCAB_SIZE, tiny_model, write_gguf


def read_gguf(path: Path, *describe: Any, family: str = "llama") -> ModelConfig:
    write_gguf(tiny_model(family), path, describe=lambda w: [step(w) for step in describe])
    return from_gguf(open_gguf(path))


def test_tokens_without_a_row_are_refused(tmp_path: Path) -> None:
    path, words = tmp_path / "a.gguf", [str(number) for number in range(VOCAB_SIZE + 1)]
    with pytest.raises(ModelFileError, match="tokens, token_embd"):
        read_gguf(path, lambda w: w.add_array("tokenizer.ggml.tokens", words))
    with pytest.raises(ModelFileError, match="tokens, token_embd"):
        open_model(path)


def test_gguf_stop_tokens_are_united(tmp_path: Path) -> None:
    """B146"""
    config = read_gguf(
        tmp_path / "a.gguf", lambda w: w.add_uint32("tokenizer.ggml.eot_token_id", 9)
    )
    assert config.eos_token_ids == (2, 9)


def test_gguf_sizes_equal_those_of_the_model(tmp_path: Path) -> None:
    config = read_gguf(tmp_path / "a.gguf", family="qwen3")
    assert (config.architecture, config.qk_norm, config.head_dim) == ("qwen3", True, 32)
    assert (config.vocab_size, config.num_layers, config.num_kv_heads) == (160, 2, 2)


def test_gguf_values_that_say_nothing_special_are_read(tmp_path: Path) -> None:
    read_gguf(
        tmp_path / "a.gguf",
        lambda w: w.add_type("model"),
        lambda w: w.add_causal_attention(True),
        lambda w: w.add_logit_scale(1.0),
        lambda w: w.add_final_logit_softcapping(0.0),
    )


GGUF_REFUSED: dict[str, tuple[Any, str]] = {
    "scaling": (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "longrope"),
    "scaling without factor": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        "rope.scaling.factor is missing",
    ),
    "sharded": (lambda w: w.add_uint16("split.count", 3), "shards"),
    "experts": (lambda w: w.add_expert_count(8), "mixture-of-experts"),
    "vocab size": (lambda w: w.add_vocab_size(161), "llama.vocab_size"),
    "longer tokenizer (B148)": (
        lambda w: w.add_token_list([str(i) for i in range(161)]),
        "161 tokens",
    ),
    "an adapter": (lambda w: w.add_type("adapter"), "general.type is 'adapter'"),
    "logits scaled": (lambda w: w.add_logit_scale(0.5), "llama.logit_scale is 0.5"),
    "logits capped": (
        lambda w: w.add_final_logit_softcapping(30.0),
        "llama.final_logit_softcapping is 30.0",
    ),
    "embeddings scaled": (lambda w: w.add_embedding_scale(12.0), "llama.embedding_scale"),
    "sees what follows": (lambda w: w.add_causal_attention(False), "llama.attention.causal"),
    "key and value lengths": (lambda w: w.add_value_length(8), "value_length"),
    "partial rotation": (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count"),
    "eos beyond the vocabulary": (
        lambda w: w.add_uint32("tokenizer.ggml.eot_token_id", 160),
        "special token 160",
    ),
    "eos as text": (
        lambda w: w.add_string("tokenizer.ggml.eot_token_id", "x"),
        "eot_token_id is 'x'",
    ),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_unknown_or_wrong_gguf_metadata_is_one_line(case: str, tmp_path: Path) -> None:
    """B142 B148"""
    describe, reason = GGUF_REFUSED[case]
    model = tiny_model("llama", head_dim=None)
    del model.config.head_dim
    write_gguf(model, tmp_path / "a.gguf", describe=describe)
    with pytest.raises(ModelFileError) as caught:
        from_gguf(open_gguf(tmp_path / "a.gguf"))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gguf_of_an_unknown_architecture_is_one_line(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="unknown architecture 'mamba'"):
        from_gguf(open_gguf(tmp_path / "a.gguf"))
