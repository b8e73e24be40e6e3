"""Models by their shapes, with random weights or none (on the meta device), and steps of a shape.

For measuring and counting: nothing here needs a checkpoint or a GPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.decoder import Decoder, DecoderLayer
from engine.loading import LoadedModel
from engine.model_config import ModelConfig, RopeConfig
from scheduler.types import Admission, SamplingParams, StepPlan

LLAMA3_ROPE = RopeConfig("llama3", 500000.0, 8.0, 8192)
MODELS: dict[str, ModelConfig] = {
    "Llama-3.1-8B": ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=LLAMA3_ROPE,
        max_position_embeddings=131072,
        layer_windows=(None,) * 32,
        tie_word_embeddings=False,
    ),
    "Qwen3-8B": ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40960,
        layer_windows=(None,) * 36,
        tie_word_embeddings=False,
        qk_norm=True,
    ),
    # For --dry-run: every part of it, and small enough for an interpreter.
    "tiny": ModelConfig(
        architecture="qwen3",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=4096,
        layer_windows=(None,),
        tie_word_embeddings=False,
        qk_norm=True,
    ),
}


def random_model(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, max_positions: int
) -> LoadedModel:
    """A model whose activations stay within range; on the meta device, without any weights."""

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return weight.normal_(0, columns**-0.5)

    def norm(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    layers = []
    for index in range(config.num_layers):
        weights = {
            "input_layernorm.weight": norm(hidden),
            "post_attention_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": matrix(config.num_heads * dim, hidden),
            "self_attn.k_proj.weight": matrix(config.num_kv_heads * dim, hidden),
            "self_attn.v_proj.weight": matrix(config.num_kv_heads * dim, hidden),
            "self_attn.o_proj.weight": matrix(hidden, config.num_heads * dim),
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if config.qk_norm:
            weights["self_attn.q_norm.weight"] = norm(dim)
            weights["self_attn.k_norm.weight"] = norm(dim)
        layers.append(DecoderLayer(config, index, weights))
    decoder = Decoder(
        config,
        embedding=matrix(config.vocab_size, hidden),
        layers=layers,
        norm=norm(hidden),
        head=matrix(config.vocab_size, hidden),
        max_positions=max_positions,
    )
    return LoadedModel(config, decoder)


def plan(
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    block_size: int,
    sampling: SamplingParams | None = None,
    step: int = 0,
    first_block: int = 0,
) -> StepPlan:
    """Row i in slot i, each with blocks of its own; with `sampling`, admitted in this step."""
    num_rows = len(starts)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = [-(-(end + 1) // block_size) for end in ends]
    slots = [row for row in range(num_rows) for _ in range(counts[row])]
    admissions: tuple[Admission, ...] = ()
    if sampling is not None:
        admissions = tuple(
            Admission(row, tuple(i % 251 for i in range(end)), end, sampling, ())
            for row, end in enumerate(ends)
        )
    return StepPlan(
        step=step,
        seq_ids=tuple(str(row) for row in range(num_rows)),
        slots=array("q", range(num_rows)),
        starts=array("q", starts),
        lengths=array("q", lengths),
        samples=b"\1" * num_rows,
        block_slots=array("q", slots),
        block_indices=array("q", [index for count in counts for index in range(count)]),
        block_ids=array("q", range(first_block, first_block + len(slots))),
        admissions=admissions,
    )
