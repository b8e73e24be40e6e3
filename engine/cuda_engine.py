"""The engine of a CUDA device: TorchEngine with fused kernels, CUDA graphs and a fused sampler.

Only puts the parts together. Imported where a GPU is used, and by tests in the interpreter.
"""

from __future__ import annotations

import torch

from engine.cuda_graphs import CudaRecorder
from engine.cuda_runner import CudaRunner
from engine.grammar import GrammarCompiler
from engine.kernels.triton.penalties import penalise
from engine.kernels.triton.sampling import draw
from engine.loading import LoadedModel
from engine.torch_engine import TorchEngine
from scheduler.types import KVCapacity


class TritonSampling:
    """Implements engine.sampler.SamplerKernels."""

    draw = staticmethod(draw)
    penalise = staticmethod(penalise)


def make_cuda_engine(
    model: LoadedModel,
    *,
    device: torch.device,
    dtype: torch.dtype,
    capacity: KVCapacity,
    vocab_limit: int | None = None,
    grammars: GrammarCompiler | None = None,
    deterministic: bool = False,
    graphs: bool = True,
) -> TorchEngine:
    """`dtype` is the KV's (float8_e4m3fn too). `deterministic` concerns attention: the products
    of the model keep their bits in any batch if they are engine.gpu_linear.InvariantLinear.
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
        recorder=CudaRecorder(device) if graphs else None,
    )
    return TorchEngine(
        model,
        device=device,
        dtype=dtype,
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        num_slots=capacity.num_slots,
        max_model_len=capacity.max_model_len,
        vocab_limit=vocab_limit,
        runner=runner,
        grammars=grammars,
        sampler_kernels=TritonSampling(),
    )
