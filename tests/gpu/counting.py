"""Counts what a step asks of the device, and finds out whether it ever waits, without a device.

The engine runs on torch's meta device: tensors with shapes and no contents. An operation that would
read contents on the host (a wait, on a GPU) raises there. Triton launches are noted and not run.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import engine.arrays
import engine.attention.triton
import engine.batch
import engine.kernels.triton.launch
import engine.kernels.triton.penalties
import engine.kernels.triton.sampling
import engine.prompt_scores
import engine.sampler
import engine.token_rules
import engine.torch_sampling

META = torch.device("meta")
H200_MULTIPROCESSORS = 132
# Operations that only make or describe tensors, or copy from the host.
NO_LAUNCH = {
    "empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "view", "_unsafe_view",
    "slice", "select", "split", "split_with_sizes", "transpose", "t", "expand", "unsqueeze",
    "squeeze", "unbind", "as_strided", "_reshape_alias", "permute", "lift_fresh", "_to_copy",
}  # fmt: skip
UPLOADERS = (
    engine.attention.triton,
    engine.batch,
    engine.kernels.triton.penalties,
    engine.kernels.triton.sampling,
    engine.prompt_scores,
    engine.sampler,
    engine.arrays,
    engine.token_rules,
    engine.torch_sampling,
)


class Operations(TorchDispatchMode):
    """Counts torch's operations on meta tensors that would launch a kernel."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [arg for arg in (*args, result) if isinstance(arg, Tensor)]
        if any(tensor.device == META for tensor in tensors) and name not in NO_LAUNCH:
            self._counts[name] += 1
        elif name == "_to_copy" and tensors[0].device == META and result.dtype != tensors[0].dtype:
            self._counts["cast"] += 1
        return result


class LiveBytes(TorchDispatchMode):
    """The most that tensors made inside it hold at once, in the allocator's units of 512 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        inputs = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.device == META:
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs:
                    self._live[StorageWeakRef(storage)] = -(-storage.nbytes() // 512) * 512
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._live.values()))
        return result


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, engines on the meta device can take steps; what they launch is counted by name."""
    counts: Counter[str] = Counter()

    def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
        counts["upload"] += 1
        return torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, device=device)

    def launch(kernel: Any, *_args: Any, **_options: Any) -> None:
        counts[kernel.fn.__name__] += 1

    with contextlib.ExitStack() as stack:
        for module in UPLOADERS:
            stack.callback(setattr, module, "to_device", module.to_device)
            module.to_device = upload
        attention = engine.attention.triton
        stack.callback(setattr, attention, "num_multiprocessors", attention.num_multiprocessors)
        attention.num_multiprocessors = lambda _device: H200_MULTIPROCESSORS
        for kind in (InterpretedFunction, JITFunction):
            stack.callback(setattr, kind, "run", kind.run)
            kind.run = launch
        stack.enter_context(Operations(counts))
        yield counts
