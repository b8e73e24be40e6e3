"""The batch-invariant product with dense, int8 and int4 weights in the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.gpu_linear import SCHEMES, Float8Linear
from engine.kernels.triton import gemm
from engine.kernels.triton.gemm import Weight, dense, dequantise, quantise_int4, quantise_int8

FORMS = {"dense": dense, "int8": quantise_int8, "int4": quantise_int4}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def twin(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    exact = x.double() @ dequantise(weight).double().t()
    return exact if bias is None else exact + bias.double()


def assert_equal_to_twin(x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    for tile_rows in (None, gemm.FIXED_ROWS):
        ours = gemm.multiply(x, weight, bias, tile_rows=tile_rows)
        torch.testing.assert_close(ours.double(), twin(x, weight, bias), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 1, 17, 70])
def test_products_of_every_form_equal_the_twin(form: str, tokens: int) -> None:
    weight = FORMS[form](normal(130, 96, seed=1))
    assert_equal_to_twin(normal(tokens, 96), weight, normal(130, seed=2))


@pytest.mark.parametrize("form", FORMS)
def test_inputs_summed_in_several_chunks(form: str) -> None:
    weight = FORMS[form](normal(40, 2048, seed=1))
    assert weight.num_chunks > 1
    assert_equal_to_twin(normal(3, 2048), weight)


def test_inputs_that_no_block_divides() -> None:
    assert_equal_to_twin(normal(2, 101), dense(normal(20, 101, seed=1)))


@pytest.mark.parametrize("form", FORMS)
def test_bits_do_not_depend_on_the_batch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among few and among many, where one program sums all the chunks itself."""
    monkeypatch.setattr(gemm, "SPLIT_UP_TO", 8)
    weight = FORMS[form](normal(40, 2048, seed=1))
    x, bias = normal(70, 2048), normal(40, seed=2)
    many = gemm.multiply(x, weight, bias)
    few = gemm.multiply(x[30:35], weight, bias)
    alone = gemm.multiply(x[33:34], weight, bias)
    assert torch.equal(few, many[30:35])
    assert torch.equal(alone, many[33:34])


def test_quantised_weights_are_close_to_the_weights() -> None:
    """Half a step: of 127 to each side of zero, or of 15 between a group's ends."""
    weight = normal(16, 256)
    weight[3] = 0
    int8, int4 = dequantise(quantise_int8(weight)), dequantise(quantise_int4(weight))
    assert ((int8 - weight).abs() <= weight.abs().amax(1, keepdim=True) / 254 + 1e-6).all()
    groups = weight.view(16, 2, 128)
    step = (groups.amax(2) - groups.amin(2)) / 15
    errors = (int4 - weight).view(16, 2, 128).abs().amax(2)
    # The zero point is a whole number, which may move an end by another half step.
    assert (errors <= step + 1e-6).all()
    assert (int8[3] == 0).all()
    assert (int4[3] == 0).all()


def test_int4_refuses_inputs_it_can_not_group() -> None:
    with pytest.raises(ValueError, match="no multiple of 32"):
        quantise_int4(normal(4, 40))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_makes_a_linear(scheme: str) -> None:
    weight, bias, x = normal(48, 64, seed=1), normal(48, seed=2), normal(5, 64)
    made = SCHEMES[scheme](weight, bias)(x)
    exact = torch.nn.functional.linear(x, weight, bias)
    error = (made - exact).norm() / exact.norm()
    assert error < {"invariant": 1e-5, "float8": 0.06}.get(scheme, 0.02 if "8" in scheme else 0.15)


def test_float8_scales_each_row_by_itself() -> None:
    """An outlier in one token must not spoil its neighbours."""
    linear = Float8Linear(normal(48, 64, seed=1), None)
    x = normal(2, 64)
    spoiled = torch.stack((x[0], x[1] * 1e4))
    torch.testing.assert_close(linear(spoiled)[0], linear(x)[0])
