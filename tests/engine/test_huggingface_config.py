"""Hugging Face configs: what they become, and that faults are one line naming the field."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelFileError
from engine.huggingface_config import from_huggingface
from engine.model_config import ModelConfig
from tests.support.models import FAMILIES, tiny_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def read(directory: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    values = {**LLAMA, **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return from_huggingface(directory)


def test_missing_optional_fields_get_the_formats_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 16, False)
    assert (config.rope.type, config.rope.theta) == ("default", 10000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)
    assert config.layer_windows == (None, None)
    assert config.context_length == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_structure_equals_transformers(family: str, tmp_path: Path) -> None:
    theirs = tiny_config(
        family, architectures=[FAMILIES[family][0].replace("Config", "ForCausalLM")]
    )
    theirs.save_pretrained(tmp_path)
    ours = from_huggingface(tmp_path)
    assert ours.num_heads == theirs.num_attention_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full"] * 2
    window = getattr(theirs, "sliding_window", None)
    assert ours.layer_windows == tuple(
        window if kind == "sliding_attention" else None for kind in kinds
    )


def test_model_type_stands_in_for_missing_architectures(tmp_path: Path) -> None:
    assert read(tmp_path, architectures=..., model_type="qwen3").qk_norm


def test_mistral_without_the_field_has_its_familys_window(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"])
    assert config.layer_windows == (4096, 4096)


def test_qwen_window_is_off_unless_asked_for(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["Qwen2ForCausalLM"], sliding_window=8)
    assert config.layer_windows == (None, None)


def test_eos_ids_of_all_files_are_united(tmp_path: Path) -> None:
    """B146"""
    config = read(tmp_path, {"eos_token_id": [7, 9], "temperature": 0.6}, eos_token_id=2)
    assert config.eos_token_ids == (2, 7, 9)
    assert config.generation_defaults == (("temperature", 0.6),)


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        ([5, 2], None, (2, 5)),
        (2, {"temperature": 1}, (2,)),
        (..., {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": None}, ()),
        (0, {"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_id_may_be_anywhere_in_any_form(
    config_eos: Any, generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """B146"""
    assert read(tmp_path, generation, eos_token_id=config_eos).eos_token_ids == expected


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "x", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_old_and_new_rope_layouts_are_read_alike(rope: dict[str, Any], tmp_path: Path) -> None:
    """B142"""
    config = read(tmp_path, **rope)
    expected = ("llama3", 5e5, 8.0, 64, 1.0, 4.0)
    found = config.rope
    assert expected == (
        found.type,
        found.theta,
        found.factor,
        found.original_max_position_embeddings,
        found.low_freq_factor,
        found.high_freq_factor,
    )


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, {"type": "default"}])
def test_absent_scaling_is_default(rope: Any, tmp_path: Path) -> None:
    """B142"""
    config = read(tmp_path, rope_scaling=rope, rope_theta=1e6)
    assert (config.rope.type, config.rope.theta) == ("default", 1e6)


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    """B142"""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read(tmp_path, rope_scaling=scaling)
    assert config.context_length == 1024
    assert config.rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    "architectures of another type": ({"architectures": 7}, "unknown architecture"),
    "unknown model type": ({"architectures": ..., "model_type": "t5"}, "'t5'"),
    "neither": ({"architectures": ...}, "model_type is missing"),
    "missing size": ({"hidden_size": ...}, "hidden_size is missing"),
    "size as text": ({"hidden_size": "64"}, "hidden_size is '64'"),
    "size as a boolean": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "size zero": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "size negative": ({"vocab_size": -1}, "vocab_size is -1"),
    "size huge": ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
    "too many layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    "size fractional": ({"intermediate_size": 1.5}, "intermediate_size is 1.5"),
    "eps not a number": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "eps infinite": ({"rms_norm_eps": math.inf}, "rms_norm_eps"),
    "heads not shared evenly": ({"num_key_value_heads": 3}, "3 KV heads"),
    "hidden not divided evenly": ({"hidden_size": 66}, "hidden_size 66"),
    "odd head": ({"head_dim": 15}, "head_dim is 15"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "partial rotation": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "eos as text": ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    "eos list with text": ({"eos_token_id": [2, "x"]}, "eos_token_id is 'x'"),
    "eos beyond the vocabulary": ({"eos_token_id": 160}, "special token 160"),
    "tie as text": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    "rope unknown": ({"rope_scaling": {"rope_type": "foo"}}, "unknown rope type 'foo'"),
    "rope longrope": ({"rope_scaling": {"type": "longrope"}}, "unknown rope type 'longrope'"),
    "rope not an object": ({"rope_scaling": [1]}, "rope_scaling is [1]"),
    "rope type not text": ({"rope_scaling": {"type": 3}}, "type is 3"),
    "rope without factor": ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    "rope factor zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
    "rope ramp upside down": (
        {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        "high_freq_factor",
    ),
    "rope for each layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "layer type",
    ),
    "interleaved rotation": ({"rope_interleaved": True}, "rope_interleaved"),
    "positions beyond reason": ({"max_position_embeddings": 1 << 30}, "max_position_embeddings"),
    "yarn beyond reason": ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "positions"),
    "window layers as text": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": "all",
        },
        "max_window_layers is 'all'",
    ),
    "rope base one": ({"rope_theta": 1.0}, "rope base"),
    "layer types of another length": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention"],
        },
        "layer_types must be 2 times",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_or_wrong_config_is_one_line_with_its_field(case: str, tmp_path: Path) -> None:
    """B142 (unknown rope types refuse to start)"""
    changes, reason = REFUSED[case]
    with pytest.raises(ModelFileError) as caught:
        read(tmp_path, **changes)
    message = str(caught.value)
    assert reason in message
    assert message.startswith(str(tmp_path / "config.json"))
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"a": 1', "\x00", "null"])
def test_broken_json_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFileError) as caught:
        from_huggingface(tmp_path)
    assert "\n" not in str(caught.value)


def test_json_that_is_not_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        from_huggingface(tmp_path)


def test_absent_config_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: cannot be read"):
        from_huggingface(tmp_path)


@pytest.mark.parametrize("generation", [{"temperature": "hot"}, {"eos_token_id": -3}])
def test_wrong_generation_config_names_its_file(generation: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config\.json"):
        read(tmp_path, generation)


def test_greedy_advice_leaves_no_sampling_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, {"do_sample": False, "temperature": 0.6, "eos_token_id": 3})
    assert config.generation_defaults == ()
    assert config.eos_token_ids == (3,)


# As published, without the fields that say nothing about structure.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SmolLM2": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 49152,
        },
        {"head_dim": 64, "num_kv_heads": 3, "tie_word_embeddings": True, "eos_token_ids": (2,)},
    ),
    "Llama 2": (
        {
            "architectures": ["LlamaForCausalLM"],
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "torch_dtype": "float16",
            "vocab_size": 32000,
        },
        {"num_kv_heads": 32, "head_dim": 128, "checkpoint_dtype": "float16"},
    ),
    "Llama 3.2": (
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {"eos_token_ids": (128001, 128008, 128009), "context_length": 131072},
    ),
    "Mistral 0.3": (
        {
            "architectures": ["MistralForCausalLM"],
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32768,
        },
        {"layer_windows": (None,) * 32},
    ),
    "Qwen 2.5": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "eos_token_id": 151645,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {
            "qkv_bias": True,
            "output_bias": False,
            "layer_windows": (None,) * 24,
            "head_dim": 64,
        },
    ),
    "Qwen 3": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"qk_norm": True, "qkv_bias": False, "head_dim": 128},
    ),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configs_are_read(model: str, tmp_path: Path) -> None:
    values, expected = PUBLISHED[model]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = from_huggingface(tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected
