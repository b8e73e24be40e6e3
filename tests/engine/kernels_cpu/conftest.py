"""Every tier that was built and that this CPU runs."""

from __future__ import annotations

import ctypes

import pytest

from engine.kernels.cpu.library import available_tiers, load_library


@pytest.fixture(params=available_tiers() or [pytest.param("", marks=pytest.mark.skip)])
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    library = load_library(request.param)
    assert library is not None
    return library
