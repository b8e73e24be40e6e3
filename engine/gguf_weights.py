"""The tensors of a GGUF file under Hugging Face names, dequantised.

Owns GGUF's tensor names and the order of its q and k rows. It must not know the decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError
from engine.gguf_config import ROPE_FREQS
from engine.gguf_file import GGMLType, GGUFFile
from engine.model_config import GGUF_ARCHITECTURES, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output.bias": "lm_head.bias",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFWeights:
    """A WeightSource over an open file."""

    def __init__(self, file: GGUFFile, config: ModelConfig):
        self.description = str(file.path)
        self._file = file
        self._config = config
        self._permuted = GGUF_ARCHITECTURES[config.architecture].permuted_in_gguf
        self._stored_names = {
            huggingface_name(name): name for name in file.tensors if name != ROPE_FREQS
        }

    def names(self) -> Iterable[str]:
        return self._stored_names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._stored_names[name]].shape

    def num_bytes(self, name: str) -> int:
        return self._file.tensors[self._stored_names[name]].nbytes

    def read(self, name: str) -> Tensor:
        """Float32, in a memory of its own."""
        import torch

        return torch.from_numpy(self.array(name))

    def array(self, name: str) -> NDArray[np.float32]:
        """The same without torch."""
        stored = self._stored_names[name]
        tensor = self._file.tensors[stored]
        values = self._values(stored)
        values = np.array(values, np.float32, copy=values.base is not None).reshape(tensor.shape)
        ordered: NDArray[np.float32] = self._unpermuted(name, values)
        return ordered

    def _values(self, stored: str) -> Any:
        kind, data = self._file.tensors[stored].type, self._file.data(stored)
        if kind is GGMLType.F32:
            return data.view("<f4")
        import gguf  # not cheap, and norms are F32 nearly everywhere

        try:
            return gguf.dequantize(data, gguf.GGMLQuantizationType(kind.value))
        except NotImplementedError:
            raise ModelFileError(
                f"{self.description}: tensor {stored!r:.80} has type {kind.name}, "
                "which cannot be dequantised"
            ) from None

    def _unpermuted(self, name: str, values: Any) -> Any:
        if self._permuted and ".self_attn.q_proj." in name:
            return unpermute(values, self._config.num_heads)
        if self._permuted and ".self_attn.k_proj." in name:
            return unpermute(values, self._config.num_kv_heads)
        return values


def huggingface_name(name: str) -> str:
    """Translate a GGUF tensor name; an unknown one comes back as it is."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal():
        return name
    _, layer, module, kind = parts
    return f"model.layers.{int(layer)}.{_LAYER_NAMES.get(module, module)}.{kind}"


def unpermute(rows: Any, num_heads: int) -> Any:
    """Reorder rows (axis 0) of q or k from interleaved RoPE pairs to pairs of halves.

    Whole rows move, so it works on packed blocks too: rows may be [outputs, bytes of a row].
    """
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))
