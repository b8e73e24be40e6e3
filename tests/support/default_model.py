"""The default model outside our own code: its weights read by the gguf package, in transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import torch
from torch import Tensor

from engine.default_model import find_default_model
from engine.loading import open_model

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def transformers_model() -> LlamaForCausalLM:
    """transformers' Llama in float32 with the dequantised weights of the default model."""
    import transformers

    ours = open_model(find_default_model()).config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=ours.vocab_size,
            hidden_size=ours.hidden_size,
            intermediate_size=ours.intermediate_size,
            num_hidden_layers=ours.num_layers,
            num_attention_heads=ours.num_heads,
            num_key_value_heads=ours.num_kv_heads,
            max_position_embeddings=ours.max_position_embeddings,
            rms_norm_eps=ours.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": ours.rope.theta},
            tie_word_embeddings=True,
        )
    ).eval()
    model.load_state_dict(dequantised_state(), strict=False)
    return model


def dequantised_state() -> dict[str, Tensor]:
    """The default model's tensors read by the gguf package alone, rows of q and k put back."""
    reader = gguf.GGUFReader(find_default_model())
    layer_names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": 9, "attn_k": 3}
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
            state[f"{name}.weight"] = values
            continue
        if parts[2] in heads:
            pairs = values.reshape(heads[parts[2]], -1, 2, values.shape[1])
            values = pairs.transpose(1, 2).reshape(values.shape)
        state[f"model.layers.{parts[1]}.{layer_names[parts[2]]}.weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state
