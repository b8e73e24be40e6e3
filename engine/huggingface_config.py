"""A ModelConfig from config.json and generation_config.json of a Hugging Face directory.

Owns the names and defaults of that format, old (`rope_theta` + `rope_scaling`) and new
(`rope_parameters`). It must not know torch; it never runs code from the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelFileError
from engine.model_config import (
    HUGGINGFACE_ARCHITECTURES,
    HUGGINGFACE_MODEL_TYPES,
    MAX_LAYERS,
    MAX_POSITIONS,
    ROPE_TYPES,
    Architecture,
    Fields,
    ModelConfig,
    RopeConfig,
    checked,
    yarn_attention_factor,
)

MAX_JSON_BYTES = 1 << 25
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DEFAULT_MISTRAL_WINDOW = 4096
_DEFAULT_QWEN_FULL_LAYERS = 28


def from_huggingface(directory: Path) -> ModelConfig:
    """Read config.json and, if there, generation_config.json. Raises ModelFileError."""
    path = directory / "config.json"
    fields = Fields(str(path), read_json_object(path))
    generation_path = directory / "generation_config.json"
    generation = Fields(
        str(generation_path),
        read_json_object(generation_path) if generation_path.is_file() else {},
    )
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    num_layers = fields.integer("num_hidden_layers", limit=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    positions = fields.integer("max_position_embeddings", limit=MAX_POSITIONS)
    attention_bias = architecture.qkv_bias is None and fields.flag("attention_bias", False)
    config = ModelConfig(
        architecture=architecture.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=_head_dim(fields, hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, positions),
        max_position_embeddings=positions,
        layer_windows=_layer_windows(fields, architecture, num_layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=attention_bias and architecture.output_bias is None,
        mlp_bias=architecture.mlp_bias and fields.flag("mlp_bias", False),
        qk_norm=architecture.qk_norm,
        eos_token_ids=tuple(sorted(_eos_token_ids(fields) | _eos_token_ids(generation))),
        bos_token_id=fields.token_id("bos_token_id"),
        generation_defaults=_generation_defaults(generation),
        checkpoint_dtype=fields.text("dtype", fields.text("torch_dtype", "float32")),
    )
    return checked(config, str(path))


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a small JSON file whose top level is an object. Raises ModelFileError."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelFileError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: not a JSON object")
    return value


def _architecture(fields: Fields) -> Architecture:
    names = fields.values.get("architectures")
    if names:
        known, table = f"{names!r:.60}", HUGGINGFACE_ARCHITECTURES
        name = names[0] if isinstance(names, list) else None
    else:
        name, table = fields.text("model_type"), HUGGINGFACE_MODEL_TYPES
        known = f"{name!r:.60}"
    found = table.get(name) if isinstance(name, str) else None
    if found is None:
        raise fields.error(f"unknown architecture {known}; known: {', '.join(table)}")
    return found


def _refuse_unsupported(fields: Fields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"hidden_act {activation!r:.60} is not supported (silu is)")
    if fields.has("quantization_config"):
        raise fields.error("quantization_config: quantised safetensors are not supported")
    if fields.flag("rope_interleaved", False):
        raise fields.error("rope_interleaved is not supported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor is not supported")


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if hidden_size % num_heads:
        raise fields.error(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
    return hidden_size // num_heads


def _layer_windows(
    fields: Fields, architecture: Architecture, num_layers: int
) -> tuple[int | None, ...]:
    nowhere = (None,) * num_layers
    if not architecture.windowed:
        return nowhere
    if architecture.name == "mistral":
        if "sliding_window" in fields.values and not fields.has("sliding_window"):
            return nowhere
        window = fields.integer("sliding_window", _DEFAULT_MISTRAL_WINDOW)
        first = 0
    else:
        if not fields.flag("use_sliding_window", False) or not fields.has("sliding_window"):
            return nowhere
        window = fields.integer("sliding_window")
        given = fields.values.get("max_window_layers", _DEFAULT_QWEN_FULL_LAYERS)
        if type(given) is not int or given < 0:
            raise fields.error(f"max_window_layers is {given!r:.60}, not a number of layers")
        first = given
    kinds = fields.values.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    table = {"sliding_attention": window, "full_attention": None}
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(type(kind) is not str or kind not in table for kind in kinds)
    ):
        raise fields.error(
            f"layer_types must be {num_layers} times 'full_attention' or 'sliding_attention'"
        )
    return tuple(table[kind] for kind in kinds)


def _rope(fields: Fields, positions: int) -> RopeConfig:
    new, old = fields.values.get("rope_parameters"), fields.values.get("rope_scaling")
    name = "rope_parameters" if new is not None else "rope_scaling"
    values = new if new is not None else (old or {})
    if not isinstance(values, dict):
        raise fields.error(f"{name} is {values!r:.60}, not an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise fields.error(f"{name}: parameters for each layer type are not supported")
    scaling = Fields(f"{fields.source}: {name}", values)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ROPE_TYPES:
        raise scaling.error(f"unknown rope type {kind!r:.60}; known: {', '.join(ROPE_TYPES)}")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.error("partial_rotary_factor is not supported")
    theta = scaling.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig("default", theta)
    original = fields.integer(
        "original_max_position_embeddings",
        scaling.integer("original_max_position_embeddings", positions),
    )
    if kind == "yarn":
        return _yarn(scaling, theta, positions, original)
    if kind == "llama3":
        low = scaling.number("low_freq_factor")
        high = scaling.number("high_freq_factor")
        if high <= low:
            raise scaling.error(f"high_freq_factor {high} is not above low_freq_factor {low}")
        return RopeConfig("llama3", theta, scaling.number("factor"), original, low, high)
    # Like the reference, `dynamic` measures growth against max_position_embeddings.
    return RopeConfig(kind, theta, scaling.number("factor"), positions)


def _yarn(scaling: Fields, theta: float, positions: int, original: int) -> RopeConfig:
    factor = scaling.number("factor", positions / original)
    if scaling.has("attention_factor"):
        attention_factor = scaling.number("attention_factor")
    elif scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        above = yarn_attention_factor(factor, scaling.number("mscale"))
        attention_factor = above / yarn_attention_factor(factor, scaling.number("mscale_all_dim"))
    else:
        attention_factor = yarn_attention_factor(factor)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        attention_factor=attention_factor,
    )


def _eos_token_ids(fields: Fields) -> set[int]:
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    checked_ids = (Fields(fields.source, {"eos_token_id": item}) for item in ids)
    return {token for item in checked_ids if (token := item.token_id("eos_token_id")) is not None}


def _generation_defaults(generation: Fields) -> tuple[tuple[str, float], ...]:
    """Sampling fields as the model's makers advise; none where they advise greedy decoding."""
    defaults: list[tuple[str, float]] = []
    if generation.values.get("do_sample") is False:
        return ()
    for name in _SAMPLING_FIELDS:
        value = generation.values.get(name)
        if value is None:
            continue
        if type(value) not in (int, float):
            raise generation.error(f"{name} is {value!r:.60}, not a number")
        defaults.append((name, float(value)))
    return tuple(defaults)
