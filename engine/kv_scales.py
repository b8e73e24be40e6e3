"""The scales of a float8 KV cache: one for the keys and one for the values of each head.

Found by one forward pass over a few tokens of the vocabulary, before there is a cache. The type has
the same relative precision over its whole range, so only the range matters, and it gets a margin.
Must not know where the cache is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.decoder import Decoder

FP8_MAX = 448.0  # of float8_e4m3fn
MARGIN = 4.0  # how much larger than anything seen a number may be
NUM_TOKENS = 256


def calibrated_scales(decoder: Decoder) -> Tensor:
    """[layers, 2, kv_heads] float32: for keys and values; the same ones for the same model."""
    config = decoder.config
    device = decoder.embedding.device
    num_tokens = min(NUM_TOKENS, decoder.max_positions)
    # Spread over the vocabulary by a golden ratio: rare tokens as well as common ones.
    ids = (torch.arange(num_tokens, device=device) * 0.6180339887 % 1 * config.vocab_size).long()
    largest = torch.zeros((config.num_layers, 2, config.num_kv_heads), device=device)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for part, states in enumerate((k, v)):
            largest[layer, part] = states.float().abs().amax((0, 2))
        heads = [states.transpose(0, 1)[None] for states in (q, k, v)]
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    decoder(ids, torch.arange(num_tokens, device=device), attend)
    # A head with nothing in it, or with what is no number, has the scale 1.
    scales = largest * (MARGIN / FP8_MAX)
    return torch.where(torch.isfinite(scales) & (scales > 0), scales, 1.0)
