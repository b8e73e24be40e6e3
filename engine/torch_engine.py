"""TorchEngine: step plans on cpu or cuda through torch.

Owns the model in torch with its KV cache, and that no step records gradients. The order of work in
a step is StepEngine's; what to run next is the scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.arrays import Ints
from engine.attention import select_attention
from engine.batch import Batch
from engine.decoder import Decoder
from engine.grammar import GrammarCompiler
from engine.kv_cache import KVCache
from engine.lack_of_memory import is_out_of_memory, release_memory
from engine.loading import LoadedModel
from engine.step_engine import ModelRunner, StepEngine
from engine.step_result import PendingStep
from engine.torch_outputs import outputs_of
from engine.torch_sampling import SamplerKernels, TorchSampling
from scheduler.loop import OutOfMemory
from scheduler.types import KVCapacity, StepPlan

log = logging.getLogger("paceline.engine")


class TorchRunner:
    """ModelRunner of a Decoder with paged attention in torch."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_scales: Tensor | None = None,
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._cache = KVCache(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
            scales=kv_scales,
        )
        self._attention = select_attention(
            self._cache, num_heads=config.num_heads, windows=config.layer_windows
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(pairs)

    def forward(self, batch: Batch, outputs: Ints) -> Tensor:
        hidden: Tensor = self._decoder(
            batch.token_ids, batch.positions, self._attention.plan(batch)
        )
        return outputs_of(hidden, batch, outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)


class TorchEngine:
    """Implements scheduler.loop.Engine: `submit` queues a step, the result waits for the device."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        capacity: KVCapacity,
        vocab_limit: int | None = None,
        runner: ModelRunner | None = None,
        grammars: GrammarCompiler | None = None,
        sampler_kernels: SamplerKernels | None = None,
    ) -> None:
        """`dtype` is the KV's. `vocab_limit`: the tokenizer's size, if the model's is padded.

        `runner` replaces the one in torch, for the blocks of `capacity`.
        `grammars` is what serves sequences with a grammar; without it they fail.
        `sampler_kernels` replace parts of the sampler.
        """
        self.capacity = capacity
        self._device = device
        self._runner = runner or TorchRunner(
            model.decoder,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            dtype=dtype,
            device=device,
        )
        vocab_size = model.config.vocab_size
        self._steps = StepEngine(
            self._runner,
            TorchSampling(vocab_size=vocab_size, device=device, kernels=sampler_kernels),
            vocab_size=vocab_size,
            device=device,
            capacity=capacity,
            vocab_limit=vocab_limit,
            grammars=grammars,
        )

    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue a step; on the cpu it is done at return. Steps run in the order of submission.

        Raises OutOfMemory if there is no memory for it: then nothing was sampled, and the slots of
        its rows have to be admitted again.
        """
        try:
            with torch.inference_mode():
                return self._steps.submit(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = " ".join(str(error).split())
        # Outside the handler, whose traceback holds the tensors of the failed attempt.
        release_memory(self._device)
        size = f"{len(plan.seq_ids)} rows and {sum(plan.lengths)} tokens"
        log.warning("no memory for a step of %s: %.300s", size, reason)
        raise OutOfMemory(reason)

    @torch.inference_mode()
    def warm_up(self, *, max_step_tokens: int) -> None:
        """See StepEngine."""
        self._steps.warm_up(max_step_tokens=max_step_tokens)
