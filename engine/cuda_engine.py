"""The engine of a CUDA device: TorchEngine with fused kernels, CUDA graphs and a fused sampler.

Only puts the parts together. Imported where a GPU is used, and by tests in the interpreter.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.triton import partial_bytes
from engine.cuda_graphs import CudaRecorder
from engine.cuda_memory import (
    CudaMemory,
    DeviceMemory,
    MemoryPlan,
    plan_memory,
)
from engine.cuda_runner import CudaRunner
from engine.decoder import Decoder, DecoderLayer
from engine.gpu_linear import convert_head, convert_layer, refusal
from engine.grammar import GrammarCompiler
from engine.kernels.triton.penalties import penalise
from engine.kernels.triton.sampling import draw
from engine.kv_memory import kv_bytes_per_token
from engine.kv_scales import calibrated_scales
from engine.lack_of_memory import release_memory
from engine.loading import LoadedModel
from engine.model_config import ModelConfig
from engine.torch_engine import TorchEngine
from scheduler.types import KVCapacity


class TritonSampling:
    """Implements engine.torch_sampling.SamplerKernels."""

    draw = staticmethod(draw)
    penalise = staticmethod(penalise)


CUDA_GRANULE = 2 << 20  # what the driver hands out, in bytes
# --gpu-quantize -> engine.gpu_linear's scheme
SCHEMES = {"int8": "int8", "int4": "int4", "fp8": "float8"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """In which form weights and KV are kept; `scheme` is engine.gpu_linear's, None as loaded."""

    scheme: str | None
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype

    def change(self, layer: DecoderLayer) -> None:
        """Convert the products of a layer that was just read; see engine.loading."""
        if self.scheme is not None:
            convert_layer(layer, self.scheme, dtype=self.dtype)

    def finish(self, decoder: Decoder) -> Tensor | None:
        """Convert what is left of changed layers' model; the scales of the KV, if it needs any."""
        if self.scheme is not None:
            convert_head(decoder, self.scheme, dtype=self.dtype)
            release_memory(decoder.embedding.device)
        if self.kv_dtype is not torch.float8_e4m3fn:
            return None
        return calibrated_scales(decoder)


def prepare(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    *,
    quantise: str = "none",
    kv_dtype: str = "auto",
    deterministic: bool = False,
) -> Prepared:
    """Before weights are read. Raises ValueError, one line, for what can not be."""
    fp8 = {"--gpu-quantize fp8": quantise == "fp8", "--kv-dtype fp8": kv_dtype == "fp8"}
    for flag in (flag for flag, wanted in fp8.items() if wanted):
        if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            name = torch.cuda.get_device_name()
            raise ValueError(f"{flag}: {name} has no float8; it needs compute capability 8.9")
    scheme = SCHEMES.get(quantise)
    if deterministic:
        if quantise == "fp8":
            raise ValueError(
                "--gpu-quantize fp8: its products depend on the batch, which --deterministic "
                "rules out; int8 and int4 do not"
            )
        scheme = "invariant" if scheme is None else f"{scheme}-invariant"
    reason = None if scheme is None else refusal(config, scheme)
    if reason is not None:
        raise ValueError(f"--gpu-quantize {quantise}: {reason}")
    return Prepared(scheme, dtype, torch.float8_e4m3fn if kv_dtype == "fp8" else dtype)


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

    granule = 1
    if device.type == "cuda":
        granule = CUDA_GRANULE
        # The trial's workspaces serve the engine too.
        options["capture_stream"] = torch.cuda.Stream(device)

    memory = memory or CudaMemory(device)

    def trial(num_blocks: int) -> int:
        engine, runner = _made(
            model, device=device, dtype=dtype, capacity=limits.capacity(num_blocks), **options
        )
        engine.warm_up(max_step_tokens=limits.max_step_tokens)
        if runner.graphs is not None:
            runner.graphs.capture_all()
        others = memory.used_by_others()
        # Runner and graphs know each other, and its pool has to go before the next is made.
        del engine, runner
        gc.collect()
        return others

    block_bytes = limits.block_size * kv_bytes_per_token(model.config, dtype)
    # A larger pool holds more keys for a step to split: one such step eager, one captured.
    block_bytes += 2 * partial_bytes(
        model.config,
        num_tokens=limits.block_size,
        deterministic=bool(options.get("deterministic", False)),
    )
    plan = plan_memory(
        trial,
        memory,
        trial_blocks=-(-limits.max_model_len // limits.block_size),
        block_bytes=block_bytes,
        granule=granule,
    )
    while True:
        capacity = limits.capacity(plan.num_blocks)
        try:
            engine, _ = _made(model, device=device, dtype=dtype, capacity=capacity, **options)
        except torch.OutOfMemoryError:
            # Somebody has taken memory since the trial.
            if plan.num_blocks < 2:
                raise
        else:
            return engine, plan
        release_memory(device)
        plan = replace(plan, num_blocks=plan.num_blocks - max(1, plan.num_blocks // 50))


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
    kv_scales: Tensor | None = None,
    graphs: bool = True,
    capture_stream: torch.cuda.Stream | None = None,
) -> tuple[TorchEngine, CudaRunner]:
    """`dtype` is the KV's (float8_e4m3fn with `kv_scales`, see KVCache).

    `deterministic` concerns attention: the products of the model keep their bits in any batch if
    they are engine.gpu_linear's invariant ones.
    """
    recorder = None
    if graphs and device.type == "cuda":
        recorder = CudaRecorder(capture_stream or torch.cuda.Stream(device))
    runner = CudaRunner(
        model.decoder,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        dtype=dtype,
        device=device,
        max_rows=capacity.num_slots,
        max_model_len=capacity.max_model_len,
        deterministic=deterministic,
        kv_scales=kv_scales,
        recorder=recorder,
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
