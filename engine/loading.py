"""From a path to a model that is ready to run: picks the format, config and weights together.

It must not know where models come from (engine/default_model.py does) nor what runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.gguf_config import from_gguf
from engine.gguf_file import GGUFFile, open_gguf
from engine.huggingface_config import from_huggingface
from engine.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from engine.decoder import Decoder
    from engine.weights import LayerChange, Progress, WeightSource


# What is the tokenizer's: a model has to know how many tokens there are.
_VOCABULARY = frozenset({"tokenizer.ggml.tokens", "tokenizer.ggml.merges"})


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`warnings` are lines for the operator: what in the files was left unused."""

    config: ModelConfig
    decoder: Decoder
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model whose config is read and whose weights are not; `gguf` is None for a directory."""

    path: Path
    config: ModelConfig
    gguf: GGUFFile | None


def open_model(path: Path) -> ModelFiles:
    """A Hugging Face directory or .gguf file, without importing torch. Raises ModelFileError."""
    if path.is_dir():
        return ModelFiles(path, from_huggingface(path), None)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or directory")
    file = open_gguf(path, counted=_VOCABULARY)
    return ModelFiles(path, from_gguf(file), file)


def load_weights(
    files: ModelFiles,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    max_model_len: int | None = None,
    change: LayerChange | None = None,
) -> LoadedModel:
    """The weights of open files.

    `max_model_len` is the longest sequence to be served (default: the model's context length).
    `change` is done to each layer before the next is read: quantised, they never all lie on the
    device in their first form.
    Raises ModelFileError, one line, for anything wrong with the files.
    """
    from engine.gguf_weights import GGUFWeights
    from engine.safetensors_files import SafetensorsWeights
    from engine.weights import LoadOptions, load_decoder

    config = files.config
    source: WeightSource
    if files.gguf is None:
        source = SafetensorsWeights(files.path)
    else:
        source = GGUFWeights(files.gguf, config)
    options = LoadOptions(dtype, device, max_model_len or config.context_length, change)
    decoder, warnings = load_decoder(config, source, options, progress)
    return LoadedModel(config, decoder, tuple(warnings))
