"""CudaRunner: a Decoder with fused Triton kernels, paged attention and CUDA graphs.

Implements engine.torch_engine.ModelRunner. Computes what Decoder.forward does, with ten launches
a layer: the four products, and between them norm + residual, rotation + KV store, attention and
its combine, SiLU. Must not know sequences or sampling. Never waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.arrays import Ints
from engine.attention import fused_attention
from engine.attention.triton import Columns
from engine.batch import Batch
from engine.cuda_graphs import DecodeGraphs, Recorder, StaticInputs
from engine.decoder import Decoder, DecoderLayer
from engine.kernels.triton.norms import add_rms_norm, gated_silu, rms_norm
from engine.kernels.triton.rotary import rotate_and_store
from engine.kv_cache import KVCache
from engine.lack_of_memory import is_out_of_memory, release_memory
from engine.torch_outputs import outputs_of

# A step that does not fit into memory is cut into pieces; if not even pieces of so few tokens fit,
# the scheduler makes smaller steps.
MIN_PIECE = 16


class CudaRunner:
    """The model with its KV cache on one device."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_model_len: int,
        deterministic: bool = False,
        kv_scales: Tensor | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`dtype` is the KV's, `kv_scales` what float8_e4m3fn needs; see KVCache.

        `recorder` captures decode steps of up to `max_rows` rows; None: all steps are eager.
        """
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
        self._attention = fused_attention(
            self._cache,
            num_heads=config.num_heads,
            windows=config.layer_windows,
            deterministic=deterministic,
        )
        self.graphs = None
        if recorder is not None:
            self.graphs = DecodeGraphs(
                self._of_static_inputs,
                self._attention,
                max_rows=max_rows,
                max_model_len=max_model_len,
                num_blocks=num_blocks,
                block_size=block_size,
                device=device,
                recorder=recorder,
            )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._cache.copy_blocks(pairs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    @torch.inference_mode()
    def forward(self, batch: Batch, outputs: Ints) -> Tensor:
        """A captured graph where one fits; else eagerly, in pieces if memory is short."""
        if self.graphs is not None and (batch.lengths == 1).all():
            hidden = self.graphs.replay(batch)
            if hidden is not None:
                return hidden
            hidden = self._forward_in_pieces(batch, len(batch.token_ids))
            self.graphs.capture_next()
            return hidden
        hidden = self._forward_in_pieces(batch, len(batch.token_ids))
        return outputs_of(hidden, batch, outputs)

    def _forward_in_pieces(self, batch: Batch, max_tokens: int) -> Tensor:
        """Rows do not see each other, and a row is the sum of shorter ones: so halves will do."""
        parts = pieces(batch, max_tokens)
        try:
            results = [self._eager(part) for part in parts]
            return results[0] if len(results) == 1 else torch.cat(results)
        except RuntimeError as error:
            if max_tokens <= MIN_PIECE or not is_out_of_memory(error):
                raise
        # Outside the handler, whose traceback holds the tensors of the failed attempt.
        del parts
        release_memory(self._cache.layers.device)
        return self._forward_in_pieces(batch, max(MIN_PIECE, max_tokens // 2))

    def _eager(self, batch: Batch) -> Tensor:
        windows = dict.fromkeys(self._attention.windows)
        columns = {window: self._attention.columns(batch, window) for window in windows}
        return self._layers(batch.token_ids, batch.positions, batch.kv_slots, columns)

    def _of_static_inputs(self, inputs: StaticInputs) -> Tensor:
        return self._layers(inputs.token_ids, inputs.positions, inputs.kv_slots, inputs.columns)

    def _layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        columns: Mapping[int | None, Columns],
    ) -> Tensor:
        """Hidden states after the final norm [tokens, hidden]."""
        decoder = self._decoder
        hidden = functional.embedding(token_ids, decoder.embedding)
        delta = None
        for layer in decoder.layers:
            assert isinstance(layer, DecoderLayer)
            norm = layer.attention_norm
            if delta is None:
                normed = rms_norm(hidden, norm.weight, norm.eps)
            else:
                hidden, normed = add_rms_norm(hidden, delta, norm.weight, norm.eps)
            of_layer = columns[self._attention.windows[layer.index]]
            mixed = self._attend(layer, normed, positions, kv_slots, of_layer)
            delta = layer.output(mixed)
            norm = layer.mlp_norm
            hidden, normed = add_rms_norm(hidden, delta, norm.weight, norm.eps)
            delta = layer.down(gated_silu(layer.gate_up(normed)))
        assert delta is not None
        return add_rms_norm(hidden, delta, decoder.norm.weight, decoder.norm.eps)[1]

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        columns: Columns,
    ) -> Tensor:
        """[tokens, heads * head_dim]"""
        index = layer.index
        keys, values = self._cache.layers[index]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = (layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps)
        scales = None
        if self._cache.scales is not None:
            of_keys, of_values = self._cache.scales[index]
            scales = (of_keys, of_values)
        q = normed.new_empty((len(normed), layer.num_heads, layer.head_dim))
        rotate_and_store(
            layer.qkv(normed),
            norms=norms,
            tables=(self._decoder.cos, self._decoder.sin),
            positions=positions,
            kv_slots=kv_slots,
            q_out=q,
            keys=keys,
            values=values,
            scales=scales,
        )
        out = torch.empty_like(q)
        self._attention.run(columns, index, q, out)
        return out.view(len(q), -1)


def pieces(batch: Batch, max_tokens: int) -> list[Batch]:
    """The batch as batches of at most max_tokens tokens, in order; rows are cut where they must."""
    num_tokens = len(batch.token_ids)
    if num_tokens <= max_tokens:
        return [batch]
    parts = []
    for begin in range(0, num_tokens, max_tokens):
        end = min(begin + max_tokens, num_tokens)
        first = int(np.searchsorted(batch.offsets, begin, side="right")) - 1
        last = int(np.searchsorted(batch.offsets, end, side="left"))
        cuts = np.clip(batch.offsets[first : last + 1], begin, end)
        parts.append(
            replace(
                batch,
                starts=batch.starts[first:last] + cuts[:-1] - batch.offsets[first:last],
                lengths=np.diff(cuts),
                offsets=cuts - begin,
                block_tables=batch.block_tables[first:last],
                token_ids=batch.token_ids[begin:end],
                positions=batch.positions[begin:end],
                kv_slots=batch.kv_slots[begin:end],
            )
        )
    return parts
