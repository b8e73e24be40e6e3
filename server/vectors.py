"""Pooled hidden states to the vectors of an answer: their length, their norm, how they are written.

Apart from embeddings.py, since numpy comes with it: a server that makes none goes without.
"""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray

from server.errors import InvalidRequest

Vector = NDArray[np.float32]


def shape_vector(pooled: bytes, *, dimensions: int | None, normalize: bool) -> Vector:
    """The first `dimensions` numbers, then brought to length 1 if that is wanted.

    Raises InvalidRequest.
    """
    vector = np.frombuffer(pooled, dtype="<f4")
    if dimensions is not None:
        if dimensions > len(vector):
            raise InvalidRequest(
                f"This model's vectors have {len(vector)} dimensions.", param="dimensions"
            )
        vector = vector[:dimensions]
    if normalize:
        exact = vector.astype(np.float64)
        norm = float(np.sqrt(exact @ exact))
        vector = (exact / (norm or 1.0)).astype("<f4")
    return vector


def encoded(vector: Vector, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.tobytes()).decode("ascii")
    return [float(value) for value in vector]
