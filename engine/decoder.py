"""The decoder-only transformer of every family we serve.

Owns everything from token ids to logits but attention itself, which a callable of the caller
does: it holds the KV. So this file must not know KV, sequences or batches: it sees flat tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.linear import make_linear
from engine.model_config import ModelConfig
from engine.rope import apply_rope, rope_tables

# attend(layer, q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v like k)
#   -> [tokens, heads, head_dim]; q and k are normed and rotated; it writes k and v to the cache
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

# torch splits an elementwise loop between threads from this many elements on, at any element
_PARALLEL_ELEMENTS = 32768


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32 (arXiv 1910.07467)."""

    def __init__(self, weight: Tensor, eps: float):
        super().__init__()
        self.register_buffer("weight", weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        return normed.to(x.dtype) * self.weight


class DecoderLayer(nn.Module):
    """One block; built from its tensors, named as in Hugging Face checkpoints after the index."""

    def __init__(self, config: ModelConfig, index: int, weights: Mapping[str, Tensor]):
        super().__init__()
        self.index = index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        eps = config.rms_norm_eps
        self.attention_norm = RMSNorm(weights["input_layernorm.weight"], eps)
        self.mlp_norm = RMSNorm(weights["post_attention_layernorm.weight"], eps)
        self.qkv = _fused(weights, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.output = _fused(weights, "self_attn.o_proj")
        self.gate_up = _fused(weights, "mlp.gate_proj", "mlp.up_proj")
        self.down = _fused(weights, "mlp.down_proj")
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(weights["self_attn.q_norm.weight"], eps)
            self.k_norm = RMSNorm(weights["self_attn.k_norm.weight"], eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        hidden = hidden + self._attention(self.attention_norm(hidden), cos, sin, attend)
        return hidden + self.down(gated_silu(self.gate_up(self.mlp_norm(hidden))))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.output(attend(self.index, q, k, v).reshape(x.shape[0], -1))


class Decoder(nn.Module):
    """Embedding, layers, final norm, head. All modules are complete when it is built.

    `max_positions` bounds the positions it can compute (the length of its rotary tables).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,  # [vocab, hidden]
        layers: list[DecoderLayer],
        norm: Tensor,  # [hidden]
        head: Tensor | None,  # [vocab, hidden]; None: the embedding
        max_positions: int,
    ):
        super().__init__()
        self.config = config
        self.max_positions = max_positions
        self.register_buffer("embedding", embedding)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(norm, config.rms_norm_eps)
        self.head = make_linear(embedding if head is None else head)
        cos, sin = rope_tables(config.rope, config.head_dim, max_positions)
        self.register_buffer("cos", cos.to(embedding.device))
        self.register_buffer("sin", sin.to(embedding.device))
        self.eval()

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions: [tokens] int64 -> final-norm hidden [tokens, hidden]."""
        hidden = functional.embedding(token_ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, attend)
        return self.norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, vocab] float32
        return self.head(hidden).float()


def gated_silu(x: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, gate | up].

    On the CPU in pieces that torch computes in one thread: between threads it splits anywhere,
    and the elements left over at a split are computed by other instructions, which would make
    their last bit depend on the number of tokens. It may overwrite x.
    """
    gate, up = x.chunk(2, dim=-1)
    if x.device.type != "cpu":
        return functional.silu(gate) * up
    for rows in gate.split(max(1, (_PARALLEL_ELEMENTS - 1) // gate.shape[-1])):
        functional.silu(rows, inplace=True)
    return gate * up


def _fused(weights: Mapping[str, Tensor], *names: str) -> nn.Module:
    """One product for several that share an input."""
    weight = [weights[f"{name}.weight"] for name in names]
    bias = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return make_linear(
        weight[0] if len(weight) == 1 else torch.cat(weight),
        torch.cat(bias) if bias else None,
    )
