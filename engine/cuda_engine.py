"""The engine of a CUDA device: TorchEngine with fused kernels, CUDA graphs and a fused sampler.

Only puts the parts together. Imported where a GPU is used, and by tests in the interpreter.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.triton import partial_bytes
from engine.cuda_graphs import CudaRecorder
from engine.cuda_memory import CudaMemory, DeviceMemory, MemoryPlan, plan_memory
from engine.cuda_runner import CudaRunner
from engine.grammar import GrammarCompiler
from engine.kernels.triton.penalties import penalise
from engine.kernels.triton.sampling import draw
from engine.kv_memory import kv_bytes_per_token
from engine.loading import LoadedModel
from engine.torch_engine import TorchEngine
from scheduler.types import KVCapacity


class TritonSampling:
    """Implements engine.torch_sampling.SamplerKernels."""

    draw = staticmethod(draw)
    penalise = staticmethod(penalise)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine must be ready for, whatever its KV budget turns out to be."""

    block_size: int
    num_slots: int
    max_model_len: int
    max_step_tokens: int

    def capacity(self, num_blocks: int) -> KVCapacity:
        longest = min(self.max_model_len, num_blocks * self.block_size)
        return KVCapacity(num_blocks, self.block_size, self.num_slots, longest)


def make_sized_cuda_engine(
    model: LoadedModel,
    limits: Limits,
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory: DeviceMemory | None = None,
    **options: Any,
) -> tuple[TorchEngine, MemoryPlan]:
    """The engine with all the KV blocks that fit, found by a trial; its weights are loaded.

    `options` are make_cuda_engine's. Raises ValueError if no block fits.
    """

    def trial(num_blocks: int) -> None:
        engine, runner = _made(
            model, device=device, dtype=dtype, capacity=limits.capacity(num_blocks), **options
        )
        engine.warm_up(max_step_tokens=limits.max_step_tokens)
        if runner.graphs is not None:
            runner.graphs.capture_all()
        # Runner and graphs know each other, and its pool has to go before the next is made.
        del engine, runner
        gc.collect()

    block_bytes = limits.block_size * kv_bytes_per_token(model.config, dtype)
    # A larger pool holds more keys for a step to split: one such step eager, one captured.
    block_bytes += 2 * partial_bytes(
        model.config,
        num_tokens=limits.block_size,
        deterministic=bool(options.get("deterministic", False)),
    )
    plan = plan_memory(
        trial,
        memory or CudaMemory(device),
        trial_blocks=-(-limits.max_model_len // limits.block_size),
        block_bytes=block_bytes,
    )
    capacity = limits.capacity(plan.num_blocks)
    return _made(model, device=device, dtype=dtype, capacity=capacity, **options)[0], plan


def make_cuda_engine(model: LoadedModel, **options: Any) -> TorchEngine:
    """With `capacity` as given; the other options as in `_made`."""
    return _made(model, **options)[0]


def _made(
    model: LoadedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    capacity: KVCapacity,
    vocab_limit: int | None = None,
    grammars: GrammarCompiler | None = None,
    deterministic: bool = False,
    graphs: bool = True,
) -> tuple[TorchEngine, CudaRunner]:
    """`dtype` is the KV's (float8_e4m3fn too). `deterministic` concerns attention: the products
    of the model keep their bits in any batch if they are engine.gpu_linear's invariant ones.
    """
    runner = CudaRunner(
        model.decoder,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        dtype=dtype,
        device=device,
        max_rows=capacity.num_slots,
        max_model_len=capacity.max_model_len,
        deterministic=deterministic,
        recorder=CudaRecorder(device) if graphs and device.type == "cuda" else None,
    )
    engine = TorchEngine(
        model,
        device=device,
        dtype=dtype,
        capacity=capacity,
        vocab_limit=vocab_limit,
        runner=runner,
        grammars=grammars,
        sampler_kernels=TritonSampling(),
    )
    return engine, runner
