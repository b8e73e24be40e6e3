"""From the tensors of a checkpoint to a Decoder with nothing missing.

A WeightSource (see safetensors_files.py, gguf_weights.py) knows one format; what must be there is
engine.parameters' business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.decoder import Decoder, DecoderLayer
from engine.errors import ModelFileError
from engine.model_config import ModelConfig
from engine.parameters import (
    EMBEDDING,
    HEAD,
    NORM,
    ParameterSource,
    check_names,
    layer_shapes,
    parameter_shapes,
)

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)
LayerChange = Callable[[DecoderLayer], None]


class WeightSource(ParameterSource, Protocol):
    """Tensors of one checkpoint by their Hugging Face names."""

    def num_bytes(self, name: str) -> int: ...
    def read(self, name: str) -> Tensor: ...  # on the CPU, floating point, may share file memory


@dataclass(frozen=True, slots=True)
class LoadOptions:
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    change: LayerChange | None = None  # of each layer, before the next is read


def load_decoder(
    config: ModelConfig,
    source: WeightSource,
    options: LoadOptions,
    progress: Progress | None = None,
) -> tuple[Decoder, list[str]]:
    """Build the decoder layer by layer. Returns it with warnings, one line each.

    Raises ModelFileError when parameters are missing, misshapen or unknown.
    """
    warnings = check_names(config, source)
    shapes = parameter_shapes(config)
    total = sum(source.num_bytes(name) for name in shapes)
    done = 0

    def take(name: str) -> Tensor:
        nonlocal done
        tensor = source.read(name)
        if not tensor.is_floating_point():
            raise ModelFileError(f"{source.description}: {name} is {tensor.dtype}, not floats")
        tensor = tensor.to(device=options.device, dtype=options.dtype).contiguous()
        done += source.num_bytes(name)
        if progress is not None:
            progress(done, total)
        return tensor

    embedding = take(EMBEDDING)
    layers = []
    for index in range(config.num_layers):
        weights = {name: take(f"model.layers.{index}.{name}") for name in layer_shapes(config)}
        layer = DecoderLayer(config, index, weights)
        del weights  # the products are copies, so the device had both
        if options.change is not None:
            options.change(layer)
        layers.append(layer)
    norm = take(NORM)
    head = None if config.tie_word_embeddings else take(HEAD)
    if head is None and HEAD in set(source.names()):
        warnings += _untied_head_warning(source)
    decoder = Decoder(
        config,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        max_positions=options.max_positions,
    )
    return decoder, warnings


def _untied_head_warning(source: WeightSource) -> list[str]:
    head, embedding = source.read(HEAD), source.read(EMBEDDING)
    if torch.equal(head, embedding):
        return []
    return [
        f"{source.description}: {HEAD} differs from the embedding, but the config ties them: "
        "the embedding is used"
    ]
