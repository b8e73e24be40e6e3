"""A ModelConfig from the metadata and the tensor directory of a GGUF file.

Owns the key names of that format. Biases and tied heads are not in the metadata, so the tensors
that are there decide. It must not know torch.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from engine.gguf_file import GGMLType, GGUFFile
from engine.model_config import (
    GGUF_ARCHITECTURES,
    MAX_LAYERS,
    MAX_POSITIONS,
    Fields,
    ModelConfig,
    RopeConfig,
    checked,
    yarn_attention_factor,
)

ROPE_FREQS = "rope_freqs.weight"
_EOS_KEYS = (
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.eom_token_id",
)
# What would change the answers if it were passed over, with the values that mean nothing special.
_PLAIN: dict[str, tuple[object, ...]] = {
    "general.type": ("model",),
    "{name}.attention.causal": (True,),
    "{name}.attention.scale": (0.0,),
    "{name}.attention.clamp_kqv": (0.0,),
    "{name}.attention.max_alibi_bias": (0.0,),
    "{name}.attn_logit_softcapping": (0.0,),
    "{name}.final_logit_softcapping": (0.0,),
    "{name}.embedding_scale": (0.0, 1.0),
    "{name}.residual_scale": (0.0, 1.0),
    "{name}.logit_scale": (0.0, 1.0),
    "{name}.pooling_type": (0,),
    "{name}.use_parallel_residual": (False,),
}


def from_gguf(file: GGUFFile) -> ModelConfig:
    """Read the metadata of an open file. Raises ModelFileError."""
    fields = Fields(str(file.path), file.metadata)
    name = fields.text("general.architecture")
    architecture = GGUF_ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise fields.error(f"unknown architecture {name!r:.60}; known: {known}")
    _refuse_unsupported(fields, name)
    num_layers = fields.integer(f"{name}.block_count", limit=MAX_LAYERS)
    hidden_size = fields.integer(f"{name}.embedding_length")
    num_heads = _same_in_all_layers(fields, f"{name}.attention.head_count")
    head_dim = _head_dim(fields, name, hidden_size, num_heads)
    window = None
    if fields.has(f"{name}.attention.sliding_window"):
        window = fields.integer(f"{name}.attention.sliding_window")
    positions = fields.integer(f"{name}.context_length", limit=MAX_POSITIONS)
    config = ModelConfig(
        architecture=name,
        vocab_size=_vocab_size(file, fields, name),
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(fields, f"{name}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_same_in_all_layers(fields, f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        rope=_rope(file, fields, name, positions),
        max_position_embeddings=positions,
        layer_windows=(window,) * num_layers,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias=_has_bias(file, "attn_q", architecture.qkv_bias),
        output_bias=_has_bias(file, "attn_output", architecture.output_bias),
        mlp_bias=_has_bias(file, "ffn_up", None if architecture.mlp_bias else False),
        qk_norm=architecture.qk_norm,
        eos_token_ids=tuple(
            sorted({token for key in _EOS_KEYS if (token := fields.token_id(key)) is not None})
        ),
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        checkpoint_dtype="gguf",
    )
    return checked(config, str(file.path))


def _has_bias(file: GGUFFile, tensor: str, fixed: bool | None) -> bool:
    return f"blk.0.{tensor}.bias" in file.tensors if fixed is None else fixed


def _refuse_unsupported(fields: Fields, name: str) -> None:
    shards = fields.values.get("split.count", 1)
    if shards not in (0, 1):
        raise fields.error(f"one of {shards!r:.20} shards: merge them into one file first")
    if fields.values.get(f"{name}.expert_count"):
        raise fields.error("mixture-of-experts models are not supported")
    for key, plain in _PLAIN.items():
        key = key.format(name=name)
        if fields.values.get(key) not in (None, *plain):
            raise fields.error(f"{key} is {fields.values[key]!r:.60}, which is not supported")


def _same_in_all_layers(fields: Fields, key: str, default: int | None = None) -> int:
    value = fields.values.get(key)
    if isinstance(value, array):
        if not value or any(each != value[0] for each in value):
            raise fields.error(f"{key} differs from layer to layer, which is not supported")
        return Fields(fields.source, {key: value[0]}).integer(key)
    return fields.integer(key, default)


def _head_dim(fields: Fields, name: str, hidden_size: int, num_heads: int) -> int:
    key, value = f"{name}.attention.key_length", f"{name}.attention.value_length"
    if not fields.has(key) and hidden_size % num_heads:
        raise fields.error(f"embedding_length {hidden_size} is no multiple of {num_heads} heads")
    head_dim = fields.integer(key, max(1, hidden_size // num_heads))
    if fields.integer(value, head_dim) != head_dim:
        raise fields.error(f"{key} and {value} differ, which is not supported")
    if fields.integer(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise fields.error("rope.dimension_count is not the head size, which is not supported")
    return head_dim


def _vocab_size(file: GGUFFile, fields: Fields, name: str) -> int:
    """The rows of the embedding; every token of the tokenizer must have one."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.error("tensor 'token_embd.weight' is missing")
    rows = embedding.shape[0]
    if fields.integer(f"{name}.vocab_size", rows) != rows:
        raise fields.error(f"{name}.vocab_size is not the {rows} rows of token_embd.weight")
    tokens = fields.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list | range) and len(tokens) > rows:
        raise fields.error(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, token_embd.weight only {rows} rows"
        )
    return rows


def _rope(file: GGUFFile, fields: Fields, name: str, positions: int) -> RopeConfig:
    theta = fields.number(f"{name}.rope.freq_base", 10000.0)
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    factors = _frequency_factors(file, fields)
    if kind == "none":
        # Before there was a scaling type, a lone factor meant linear scaling.
        factor = fields.number(f"{name}.rope.scale_linear", 1.0)
        if factor == 1.0:
            return RopeConfig("default", theta, frequency_factors=factors)
        return RopeConfig("linear", theta, factor, positions, frequency_factors=factors)
    if kind not in ("linear", "yarn"):
        raise fields.error(f"unknown {name}.rope.scaling.type {kind!r:.60}; known: linear, yarn")
    factor = fields.number(f"{name}.rope.scaling.factor")
    original = fields.integer(f"{name}.rope.scaling.original_context_length", positions)
    if kind == "linear":
        return RopeConfig("linear", theta, factor, original, frequency_factors=factors)
    if fields.values.get(f"{name}.rope.scaling.yarn_log_multiplier"):
        raise fields.error("rope.scaling.yarn_log_multiplier is not supported")
    scale = fields.number(
        f"{name}.rope.scaling.attn_factor",
        fields.number(f"{name}.rope.scaling.yarn_attn_factor", 1.0),
    )
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.number(f"{name}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number(f"{name}.rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=scale * yarn_attention_factor(factor),
        frequency_factors=factors,
    )


def _frequency_factors(file: GGUFFile, fields: Fields) -> tuple[float, ...]:
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return ()
    if tensor.type is not GGMLType.F32 or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 12:
        raise fields.error(f"tensor '{ROPE_FREQS}' is not a short list of F32 numbers")
    values: Any = file.data(ROPE_FREQS).reshape(-1).view("<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise fields.error(f"tensor '{ROPE_FREQS}' holds a number that is not positive")
    return tuple(values.tolist())
