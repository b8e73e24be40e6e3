"""All products of a model converted at once; the server does it layer by layer as it loads."""

from __future__ import annotations

import torch

from engine.decoder import Decoder, DecoderLayer
from engine.gpu_linear import convert_head, convert_layer


def convert_linears(decoder: Decoder, scheme: str, *, dtype: torch.dtype) -> None:
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        convert_layer(layer, scheme, dtype=dtype)
    convert_head(decoder, scheme, dtype=dtype)
