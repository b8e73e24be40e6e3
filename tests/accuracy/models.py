"""Logits of a whole text: from fp32 torch on dequantised weights, and from the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.cpu_count import usable_cores
from engine.loading import load_weights, open_model
from engine.native_cpu import NativeModel, NativeOptions
from engine.native_runner import native_file

Logits = Callable[[list[int]], NDArray[np.float32]]  # token ids -> [tokens, vocab]
_BLOCK = 16


def reference(path: Path) -> Logits:
    """fp32 throughout, plain attention without a cache."""
    model = load_weights(open_model(path), dtype=torch.float32, device=torch.device("cpu"))

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    @torch.inference_mode()
    def logits(token_ids: list[int]) -> NDArray[np.float32]:
        hidden = model.decoder(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        return model.decoder.logits(hidden).numpy()

    return logits


def native(path: Path, *, kv_type: str, longest: int) -> Logits:
    """The kernels as a server uses them, one text as one prefill."""
    file = native_file(open_model(path))
    blocks = -(-longest // _BLOCK)
    options = NativeOptions(
        num_blocks=blocks,
        block_size=_BLOCK,
        max_model_len=blocks * _BLOCK,
        max_step_tokens=longest,
        num_threads=usable_cores(),
        kv_type=kv_type,
    )
    model = NativeModel(file.config, file.weights, options)

    def logits(token_ids: list[int]) -> NDArray[np.float32]:
        hidden = model.forward(
            token_ids=np.array(token_ids, dtype=np.int32),
            positions=np.arange(len(token_ids), dtype=np.int32),
            row_starts=np.array([0, len(token_ids)], dtype=np.int32),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
        )
        return model.logits(hidden).copy()

    return logits
