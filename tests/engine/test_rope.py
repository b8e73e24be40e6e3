"""Rotary tables of every type against transformers', and their rule of determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model_config import RopeConfig, yarn_attention_factor
from engine.rope import apply_rope, rope_tables
from engine.rope_tables import inverse_frequencies
from tests.support.models import tiny_config

LENGTH = 256  # max_position_embeddings of the tiny models
YARN = RopeConfig("yarn", 1e4, 4.0, 64, attention_factor=yarn_attention_factor(4.0))
ODD_YARN = {
    "rope_type": "yarn",
    "factor": 3.0,
    "original_max_position_embeddings": 100,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "attention_factor": 1.7,
    "truncate": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[dict[str, Any], RopeConfig]] = {
    "default": ({"rope_type": "default"}, RopeConfig()),
    "linear": ({"rope_type": "linear", "factor": 2.5}, RopeConfig("linear", 1e4, 2.5, LENGTH)),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, RopeConfig("dynamic", 1e4, 2.5, LENGTH)),
    "llama3": (LLAMA3, RopeConfig("llama3", 1e4, 8.0, 32, 1.0, 4.0)),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, YARN),
    "yarn, all fields": (
        ODD_YARN,
        RopeConfig(
            "yarn",
            1e4,
            3.0,
            100,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
            attention_factor=1.7,
        ),
    ),
}


def transformers_tables(parameters: dict[str, Any], num_positions: int) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(tiny_config("llama", rope_parameters=parameters, head_dim=64))
    with torch.no_grad():
        cos, sin = rotary(torch.zeros(1), torch.arange(num_positions)[None])
    return cos[0, :, :32], sin[0, :, :32]


@pytest.mark.parametrize("num_positions", [LENGTH, 5000])
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_transformers(case: str, num_positions: int) -> None:
    """B142: at positions 0, 100 and beyond the original length, so at all of them."""
    parameters, rope = CASES[case]
    ours = rope_tables(rope, 64, num_positions)
    for mine, theirs in zip(ours, transformers_tables(parameters, num_positions), strict=True):
        assert mine.shape == (num_positions, 32)
        assert mine.dtype is torch.float32
        for position in (0, 100, num_positions - 1):
            assert (mine[position] - theirs[position]).abs().max() < 1e-3
        assert (mine - theirs).abs().mean() < 1e-5


def test_every_type_differs_from_the_default_beyond_the_original_length() -> None:
    plain = rope_tables(RopeConfig(), 64, 5000)[0]
    for case, (_, rope) in CASES.items():
        if case != "default":
            assert (rope_tables(rope, 64, 5000)[0] - plain).abs().max() > 0.5


def test_only_dynamic_depends_on_the_number_of_positions() -> None:
    for case, (_, rope) in CASES.items():
        short, long = inverse_frequencies(rope, 64, LENGTH), inverse_frequencies(rope, 64, 5000)
        assert np.array_equal(short, long) == (case != "dynamic")


def test_dynamic_is_the_default_up_to_the_trained_length() -> None:
    dynamic = RopeConfig("dynamic", 1e4, 4.0, LENGTH)
    assert np.array_equal(
        inverse_frequencies(dynamic, 64, 17), inverse_frequencies(RopeConfig(), 64, 17)
    )


def test_frequency_factors_divide() -> None:
    """B145"""
    factors = tuple(1.0 + index for index in range(32))
    divided = inverse_frequencies(RopeConfig(frequency_factors=factors), 64, 1)
    plain = inverse_frequencies(RopeConfig(), 64, 1)
    assert np.allclose(divided * np.array(factors), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_keeps_norms_and_gives_relative_positions(dtype: torch.dtype) -> None:
    cos, sin = rope_tables(RopeConfig(), 64, 300)
    q, k = torch.randn(64).to(dtype).float(), torch.randn(64).to(dtype).float()

    def rotated(x: Tensor, position: int) -> Tensor:
        at = torch.tensor([position])
        result = apply_rope(x.to(dtype)[None, None], cos[at], sin[at])
        assert result.dtype is dtype
        return result[0, 0].float()

    tolerance = 1e-3 if dtype is torch.float32 else 0.5
    assert torch.equal(rotated(q, 0), q)
    assert abs(rotated(q, 250).norm() - q.norm()) < tolerance
    near, far = rotated(q, 10) @ rotated(k, 3), rotated(q, 207) @ rotated(k, 200)
    assert abs(near - far) < tolerance
