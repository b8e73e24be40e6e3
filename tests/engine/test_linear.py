"""Linear strategies: the right product, and the same bits for a row in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from engine.linear import Linear, PackedLinear, RowLinear, make_linear

# (inputs, outputs): those of the default model but its head, and awkward ones
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (1100, 50), (33, 17), (4096, 8)]
NUM_ROWS = [*range(1, 18), 31, 32, 33, 63, 64, 65, 128, 512]


@pytest.fixture(params=[1, 2, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("strategy", [Linear, PackedLinear, RowLinear])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_product_is_right(strategy: type[nn.Module], biased: bool, num_rows: int) -> None:
    weight, bias = torch.randn(40, 70), torch.randn(40) if biased else None
    x = torch.randn(num_rows, 70)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert (strategy(weight, bias)(x) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("strategy", [Linear, PackedLinear, RowLinear])
def test_no_rows_give_no_rows(strategy: type[nn.Module]) -> None:
    assert strategy(torch.randn(40, 70))(torch.empty(0, 70)).shape == (0, 40)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [*((PackedLinear, shape) for shape in SHAPES), (RowLinear, (64, 96)), (RowLinear, (33, 17))],
)
def test_row_is_the_same_bits_in_any_batch(
    strategy: type[nn.Module], shape: tuple[int, int]
) -> None:
    inputs, outputs = shape
    linear = strategy(torch.randn(outputs, inputs))
    row = torch.randn(1, inputs)
    alone = linear(row)[0]
    for num_rows in NUM_ROWS:
        place = int(torch.randint(num_rows, ()))
        batch = torch.randn(num_rows, inputs)
        batch[place] = row
        assert torch.equal(linear(batch)[place], alone), (num_rows, place)


def test_strategy_follows_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_linear(torch.randn(4, 4)), PackedLinear)
    assert isinstance(make_linear(torch.randn(4, 4, dtype=torch.bfloat16)), Linear)
    assert isinstance(make_linear(torch.randn(4, 4, device="meta")), Linear)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(make_linear(torch.randn(4, 4)), RowLinear)
