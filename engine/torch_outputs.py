"""The hidden states that a step gives, of all that a model in torch has computed.

A number that is not finite is no part of stored KV (engine.kv_cache), so the tokens after it in its
row do not meet it; here the row's last state does, or the answer would go on from a hole. Must not
know KV or sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Ints, largest_magnitudes, rows_at, to_device
from engine.batch import Batch


def outputs_of(hidden: Tensor, batch: Batch, outputs: Ints) -> Tensor:
    """hidden [tokens, hidden] at `outputs`, ascending, which hold each row's last token.

    The last is NaN where any token of its row is not finite.
    """
    if len(batch.lengths) == len(hidden):  # a token a row, and all of them are outputs
        return hidden
    first, last = batch.offsets[:-1], batch.offsets[1:] - 1
    places = np.stack((first, last, np.searchsorted(outputs, last)))
    of_first, of_last, of_output = to_device(places, hidden.device)
    broken = ~torch.isfinite(largest_magnitudes(hidden))
    so_far = broken.cumsum(0)
    num_broken = so_far[of_last] - so_far[of_first] + broken[of_first]
    states = rows_at(hidden, outputs, hidden.device)
    spoilt = torch.zeros(len(states), dtype=torch.bool, device=hidden.device)
    spoilt[of_output] = num_broken > 0
    return states.masked_fill_(spoilt[:, None], torch.nan)
