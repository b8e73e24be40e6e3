"""How many blocks of KV a core gets: from the settings, the model and the memory that is free.

Owns the rule and the words for people where it cannot be met. Must not know the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.kv_memory import (
    ElementSize,
    available_memory,
    blocks_for,
    describe,
    kv_bytes_per_token,
    useful_blocks,
)
from scheduler.limits import SchedulerLimits
from scheduler.types import KVCapacity
from server.config import EngineConfig

if TYPE_CHECKING:
    from engine.model_config import ModelConfig


def size_cache(
    model: ModelConfig,
    config: EngineConfig,
    limits: SchedulerLimits,
    device: str,
    dtype: ElementSize,
) -> tuple[KVCapacity, str]:
    """How many blocks, and the line that says why. Raises ModelFileError if they do not fit.

    Without --kv-memory it is what `max_running` sequences of full length could use, but on a GPU
    at most nine tenths of the free memory, on a CPU at most a quarter of it and no more than four
    such sequences or 2 GiB: RAM is shared with everything else on the machine.
    """
    max_model_len = config.max_model_len or model.context_length
    if max_model_len > model.context_length and model.rope.type != "dynamic":
        raise ModelFileError(
            f"--max-model-len {max_model_len}: the model's context is {model.context_length}"
        )
    free = available_memory(device)
    bytes_per_token = kv_bytes_per_token(model, dtype)
    memory = config.kv_memory
    if memory is None and device == "cuda":
        memory = free * 9 // 10
    elif memory is None:
        memory = min(free // 4, max(2 << 30, 4 * max_model_len * bytes_per_token))
    elif memory > free:
        raise ModelFileError(
            f"--kv-memory {memory / 2**30:.2f}GiB: only {free / 2**30:.2f} GiB are free"
        )
    try:
        num_blocks = blocks_for(
            memory, bytes_per_token=bytes_per_token, block_size=config.block_size
        )
    except ValueError as error:
        raise ModelFileError(str(error)) from None
    if config.kv_memory is None:
        useful = useful_blocks(
            max_running=limits.max_running,
            max_model_len=max_model_len,
            block_size=config.block_size,
        )
        num_blocks = min(num_blocks, useful)
    max_model_len = min(max_model_len, num_blocks * config.block_size)
    if max_model_len < 2:
        raise ModelFileError("the KV memory holds one token; a prompt and its answer need two")
    capacity = KVCapacity(num_blocks, config.block_size, limits.max_running, max_model_len)
    return capacity, describe(model, dtype, num_blocks=num_blocks, block_size=config.block_size)
