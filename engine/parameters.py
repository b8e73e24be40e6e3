"""The parameters that a config calls for, under Hugging Face names, and whether they are there.

One that is absent or has another shape is an error, a tensor left over is named: nothing is ever
served at random. Must not know how values are stored, nor torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from engine.errors import ModelFileError
from engine.model_config import ModelConfig

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Tables that other programs store beside the weights; ours are computed from the config.
_KNOWN_HELPERS = re.compile(
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|.*\.attn\.masked_bias"
)
_INSIDE_MODEL = re.compile(r"model\.layers\.(\d+)\..*|lm_head\..*|model\.norm\..*")


class ParameterSource(Protocol):
    """Names and shapes of one checkpoint."""

    description: str  # the file or directory, for messages

    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of one layer: name after `model.layers.N.` -> shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    linears = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, outputs, inputs, bias in linears:
        shapes[f"{name}.weight"] = (outputs, inputs)
        if bias:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """All parameters that the config calls for, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        for name, shape in layer_shapes(config).items():
            shapes[f"model.layers.{index}.{name}"] = shape
    shapes[NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def check_names(config: ModelConfig, source: ParameterSource) -> list[str]:
    """Compare what is there with what the config calls for. Returns warnings."""
    wanted = parameter_shapes(config)
    present = set(source.names())
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ModelFileError(f"{source.description}: missing weights: {listed(missing)}")
    for name, shape in wanted.items():
        if source.shape(name) != shape:
            raise ModelFileError(
                f"{source.description}: {name} has shape {list(source.shape(name))}, "
                f"but the config calls for {list(shape)}"
            )
    extra = sorted(
        name
        for name in present - set(wanted) - {HEAD}  # a head besides a tied one: see load_decoder
        if not _KNOWN_HELPERS.fullmatch(name)
    )
    changing = [name for name in extra if _would_change_answers(name, config)]
    if changing:
        raise ModelFileError(
            f"{source.description}: weights that this architecture has no place for: "
            f"{listed(changing)}"
        )
    return [f"{source.description}: weights not used: {listed(extra)}"] if extra else []


def _would_change_answers(name: str, config: ModelConfig) -> bool:
    """Whether leaving this tensor out would silently serve another model."""
    found = _INSIDE_MODEL.fullmatch(name)
    return found is not None and (found[1] is None or int(found[1]) < config.num_layers)


def listed(names: list[str]) -> str:
    shown = ", ".join(f"{name:.80}" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
