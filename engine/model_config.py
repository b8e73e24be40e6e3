"""What a model is: sizes, rotary embedding, windows, special tokens.

Owns the table of architectures and the typed look-ups that both readers share
(engine/huggingface_config.py and engine/gguf_config.py). It must not know torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family differs from Llama. None: the model's own config (or its tensors) decide."""

    name: str
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool = False  # True: the config may ask for it
    qk_norm: bool = False
    windowed: bool = False  # True: the config may ask for a sliding window
    permuted_in_gguf: bool = False  # GGUF stores q and k rows for interleaved RoPE


LLAMA = Architecture("llama", mlp_bias=True, permuted_in_gguf=True)
MISTRAL = Architecture("mistral", qkv_bias=False, output_bias=False, windowed=True)
QWEN2 = Architecture("qwen2", qkv_bias=True, output_bias=False, windowed=True)
QWEN3 = Architecture("qwen3", qk_norm=True, windowed=True)

HUGGINGFACE_ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,  # SmolLM and SmolLM2 too
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}
# `model_type`, for a config.json without `architectures`
HUGGINGFACE_MODEL_TYPES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
GGUF_ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,  # Mistral and SmolLM too
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
MAX_LAYERS = 4096
MAX_POSITIONS = 1 << 22  # the rotary tables of a head of 128 take 512 bytes a position
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: type, base and the parameters of its scaling (engine/rope.py uses them).

    `frequency_factors` (GGUF's rope_freqs.weight, head_dim / 2 numbers) divide the frequencies.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # 0: not given
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # multiplies cos and sin
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, complete: nothing else about its structure is ever looked up.

    `layer_windows[i]` is the sliding window of layer i (position p sees p - window + 1 .. p) or
    None. `generation_defaults` are the sampling fields of generation_config.json as (name, value).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: tuple[tuple[str, float], ...] = ()
    checkpoint_dtype: str = "float32"

    @property
    def context_length(self) -> int:
        """Positions the model was made for: YaRN may extend the trained length."""
        if self.rope.type != "yarn":
            return self.max_position_embeddings
        extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
        return max(self.max_position_embeddings, extended)


class Fields:
    """Typed look-ups in parsed metadata; each fault names the file and the field."""

    def __init__(self, source: str, values: Mapping[str, Any]):
        self.source = source
        self.values = values

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(f"{self.source}: {reason}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, limit: int = (1 << 31) - 1) -> int:
        """A whole number from 1 to limit."""
        value = self._value(key, default)
        if type(value) is not int or not 1 <= value <= limit:
            raise self.error(f"{key} is {_shown(value)}, not a whole number from 1 to {limit}")
        return value

    def token_id(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
            raise self.error(f"{key} is {_shown(value)}, not a token id")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.error(f"{key} is {_shown(value)}, not a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(f"{key} is {_shown(value)}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.error(f"{key} is {_shown(value)}, not a string")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{key} is missing")
        return value


def checked(config: ModelConfig, source: str) -> ModelConfig:
    """The config, if its parts fit together. Raises ModelFileError otherwise."""
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{source}: {config.num_heads} attention heads are no multiple of "
            f"{config.num_kv_heads} KV heads"
        )
    if config.head_dim % 2 or config.head_dim < 4:
        raise ModelFileError(f"{source}: head_dim is {config.head_dim}, not even and at least 4")
    if config.context_length > MAX_POSITIONS:
        raise ModelFileError(
            f"{source}: a context of {config.context_length} positions "
            f"(at most {MAX_POSITIONS} are supported)"
        )
    if config.rope.theta <= 1:
        raise ModelFileError(f"{source}: the rope base is {config.rope.theta}, not above 1")
    for token in (*config.eos_token_ids, config.bos_token_id):
        if token is not None and token >= config.vocab_size:
            raise ModelFileError(
                f"{source}: special token {token} is not below vocab_size {config.vocab_size}"
            )
    factors = config.rope.frequency_factors
    if factors and len(factors) != config.head_dim // 2:
        raise ModelFileError(
            f"{source}: rope_freqs.weight has {len(factors)} numbers for head_dim {config.head_dim}"
        )
    return config


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The YaRN paper's scale of cos and sin, 0.1 mscale ln(factor) + 1 (arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
