"""Step plans as arrays: the slot tables and the flat batch that a step computes.

Owns the token table and the block tables of the slots. Must not know models or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.arrays import Array, Ints, to_device, zeros
from scheduler.types import StepPlan

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of a step, row after row, without padding.

    row 0 (length 3)  row 1 (length 1)  row 2 (length 2)
    t0 t1 t2          t3                t4 t5            tokens
    offsets = 0       3                 4      6         rows + 1

    Per-row columns stay on the host, where kernels plan their work; per-token columns are on the
    device. A kv slot is block_id * block_size + offset in the block.
    """

    starts: Ints  # [rows] position of each row's first token
    lengths: Ints  # [rows]
    offsets: Ints  # [rows + 1]
    block_tables: NDArray[np.int32]  # [rows, blocks], -1 = unused
    token_ids: Array  # [tokens] int64
    positions: Array  # [tokens] int64
    kv_slots: Array  # [tokens] int64

    @property
    def ends(self) -> Ints:
        """[rows] the position after each row's last token, which is its length in KV."""
        return self.starts + self.lengths


@dataclass(frozen=True, slots=True)
class Outputs:
    """The tokens whose hidden states a step gives: of each row the last, of some rows all.

    The last is among them though it may not be sampled from: there a number that is not finite
    shows, whichever token of the row met it.
    """

    tokens: Ints  # [outputs] of the batch, ascending
    offsets: Ints  # [rows + 1]; row i has outputs offsets[i] .. offsets[i + 1] - 1

    @classmethod
    def of(cls, batch: Batch, whole: NDArray[np.bool_]) -> Outputs:
        """`whole` [rows]: the rows of which all are wanted."""
        if not whole.any():
            return cls(batch.offsets[1:] - 1, np.arange(len(whole) + 1))
        offsets = np.zeros(len(whole) + 1, dtype=np.int64)
        counts = np.where(whole, batch.lengths, 1)
        np.cumsum(counts, out=offsets[1:])
        first = batch.offsets[1:] - counts
        return cls(np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], counts), offsets)


class SlotTables:
    """What each slot holds: its token ids (on the device) and its block table (on the host).

    token_table[slot, position] is written at admission and by each sampled token, so that a step
    reads tokens which the host may not have seen yet.
    """

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, device: torch.device | None
    ) -> None:
        # One column more: the token sampled at the last position has a place, though none reads it.
        self.token_table = zeros((num_slots, max_model_len + 1), "int64", device)
        # The same memory for numpy, whose calls cost less.
        on_host = device is None or device.type == "cpu"
        self._host_table = np.asarray(self.token_table) if on_host else None
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = np.full((num_slots, max_blocks), -1, dtype=np.int32)
        self._block_size = block_size
        self._device = device

    def admit(self, slot: int, token_ids: Sequence[int]) -> None:
        """Reset the slot: these tokens and no blocks."""
        self._block_tables[slot] = -1
        ids = np.array(token_ids, dtype=np.int64)
        self.token_table[slot, : len(ids)] = to_device(ids, self._device)

    def set_blocks(self, plan: StepPlan) -> None:
        """Apply the plan's block columns."""
        self._block_tables[np.asarray(plan.block_slots), np.asarray(plan.block_indices)] = (
            np.asarray(plan.block_ids)
        )

    def batch(self, plan: StepPlan) -> Batch:
        """The plan's rows as one flat batch; no work in Python grows with the tokens."""
        slots = np.asarray(plan.slots, dtype=np.int64)
        starts = np.asarray(plan.starts, dtype=np.int64)
        lengths = np.asarray(plan.lengths, dtype=np.int64)
        offsets = np.zeros(len(slots) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])

        if offsets[-1] == len(slots):  # one token a row
            slot_of_token, positions = slots, starts
        else:
            row_of_token = np.repeat(np.arange(len(slots)), lengths)
            positions = np.arange(offsets[-1]) + (starts - offsets[:-1])[row_of_token]
            slot_of_token = slots[row_of_token]
        block_index, in_block = np.divmod(positions, self._block_size)
        block_ids = self._block_tables[slot_of_token, block_index].astype(np.int64)
        assert block_ids.min() >= 0, "a row reaches beyond its block table"
        token_ids, on_device = self._upload(
            slot_of_token, positions, block_ids * self._block_size + in_block
        )
        width = -(-int((starts + lengths).max()) // self._block_size)
        return Batch(
            starts=starts,
            lengths=lengths,
            offsets=offsets,
            block_tables=self._block_tables[slots, :width],
            token_ids=token_ids,
            positions=on_device[0],
            kv_slots=on_device[1],
        )

    def _upload(
        self, slots: Ints, positions: Ints, kv_slots: Ints
    ) -> tuple[Array, Sequence[Array]]:
        """The ids at positions of slots; positions and kv_slots on the device."""
        if self._device is None:
            return self.token_table[slots, positions], (positions, kv_slots)
        if self._host_table is not None:
            import torch

            ids = torch.from_numpy(self._host_table[slots, positions])
            return ids, (torch.from_numpy(positions), torch.from_numpy(kv_slots))
        columns = to_device(np.stack((slots, positions, kv_slots)), self._device)
        return self.token_table[columns[0], columns[1]], columns[1:]

    def write_tokens(self, slots: Ints, positions: Ints, token_ids: Array) -> None:
        """Set token_table[slots[i], positions[i]] = token_ids[i]; all [rows] int64."""
        if self._host_table is not None:
            self._host_table[slots, positions] = np.asarray(token_ids)
            return
        at = to_device(np.stack((slots, positions)), self._device)
        self.token_table[at[0], at[1]] = token_ids
