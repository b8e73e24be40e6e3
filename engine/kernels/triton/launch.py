"""How kernels meet the machine: interpreted or compiled, which dtype dots take, programs to start.

The interpreter (TRITON_INTERPRET=1, for tests) has no bfloat16 arithmetic: there dots are float32.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED_PROGRAMS = 4


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The type of both sides of a dot on inputs of `dtype`."""
    return tl.float32 if interpreted() else DTYPES[dtype]


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact ones, not TF32's."""
    return "ieee" if dtype is torch.float32 else "tf32"


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of the GPU; a few where kernels are interpreted one program after the other."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count
