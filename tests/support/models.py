"""Small random models of every family, made by transformers, and the plain references for them.

Owns the saving in both formats and a dense causal attention for a Decoder without a KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor

from engine.loading import LoadedModel
from engine.model_config import ModelConfig

VOCAB_SIZE = 160
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_WINDOW = {"use_sliding_window": True, "sliding_window": 7}

# case -> (transformers' config class, what differs from _SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "smollm-tied": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 6,
            "hidden_size": 96,
            "rope_theta": 1e5,
        },
    ),
    "llama-mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 24}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-sizes": ("LlamaConfig", {"intermediate_size": 101, "hidden_size": 72}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2Config", {**_WINDOW, "max_window_layers": 1}),
    "qwen2-layer-types": (
        "Qwen2Config",
        {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases-window": (
        "Qwen3Config",
        {**_WINDOW, "head_dim": 16, "max_window_layers": 0, "attention_bias": True},
    ),
}


def tiny_config(family: str, **changes: Any) -> Any:
    """transformers' config of a case of FAMILIES, with further changes."""
    class_name, differences = FAMILIES[family]
    values = {**_SIZES, **differences, **changes}
    if "rope_parameters" in values:
        values["rope_parameters"] = {"rope_theta": 10000.0, **values["rope_parameters"]}
    return getattr(transformers, class_name)(**values)


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A model in float32 whose random weights make attention, norms and biases all matter."""
    config = tiny_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
            parameter.copy_(noise * scale + (1.0 if name.endswith("norm.weight") else 0.0))
    return model.float().eval()


def save_tiny_model(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> Any:
    """Save a tiny_model as a Hugging Face directory (without a tokenizer) and return it."""
    model = tiny_model(family, seed=seed, **changes)
    model.save_pretrained(directory)
    return model


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """transformers' logits of one sequence: [tokens, vocab] float32."""
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()


def dense_attend(config: ModelConfig) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of one whole sequence, with the sliding window of each layer."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * config.head_dim**-0.5
        at = torch.arange(q.shape[0], device=q.device)
        seen = at[None, :] <= at[:, None]
        window = config.layer_windows[layer]
        if window is not None:
            seen &= at[None, :] > at[:, None] - window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)

    return attend


def dense_logits(model: LoadedModel, token_ids: Sequence[int]) -> Tensor:
    """Our logits of one sequence, all at once: [tokens, vocab] float32."""
    device = model.decoder.embedding.device
    ids = torch.tensor(list(token_ids), device=device)
    positions = torch.arange(len(ids), device=device)
    hidden = model.decoder(ids, positions, dense_attend(model.config))
    return model.decoder.logits(hidden)


# --- GGUF --------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    model: Any,
    path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    extra_tensors: dict[str, Any] | None = None,
    without: str = "",
) -> None:
    """Write a tiny model as llama.cpp's converter does; matrices as `kind`.

    The model itself gets the dequantised matrices, so that it stays the reference of the file.
    `describe` may add metadata; the parameter `without` is left out.
    """
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    describe(writer)
    tied = config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if name != without and not (tied and name.startswith("lm_head")):
            _add_parameter(writer, model, name, parameter, kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_parameter(
    writer: gguf.GGUFWriter,
    model: Any,
    name: str,
    parameter: Tensor,
    kind: gguf.GGMLQuantizationType,
) -> None:
    values = parameter.numpy()
    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    packed = gguf.quantize(values, kind)
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.array(gguf.dequantize(packed, kind))))
    if writer.arch == "llama":
        packed = _interleaved(packed, name, model.config)
    writer.add_tensor(gguf_name(name), packed, raw_dtype=kind)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face parameter."""
    module, kind = name.rsplit(".", 1)
    if module in _GGUF_NAMES:
        return f"{_GGUF_NAMES[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def _interleaved(rows: Any, name: str, config: Any) -> Any:
    """q and k rows as llama.cpp stores them: halves of a rotary pair next to each other."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    module = name.split(".")[-2]
    if module not in heads:
        return rows
    head_rows = rows.reshape(heads[module], 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(head_rows.swapaxes(1, 2).reshape(rows.shape))
