"""What the machine can do at most, and how much of that the CPU kernels use.

    python -m tests.limits [--model FILE] [--threads 1,2] [--tier NAME] [--rounds 5]

Limits come from loops that do nothing else, on as many threads: bytes read from memory; products
of 8-bit and of 16-bit integers; fp32 products. Three shares of each load are shown: the products
with weights, at the rate of 8 bits; those and what attention multiplies, at the rate of 16 bits;
and the reading of every weight once, and of the KV. The best of some rounds, in which limits and
kernels take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.cpu_count import usable_cores
from engine.default_model import resolve_model
from engine.kernels.cpu.library import KINDS, LIMITS, load_library
from engine.kv_memory import IntegerKV, kv_bytes_per_token
from engine.loading import open_model
from engine.native_cpu import NativeModel, NativeOptions
from engine.native_runner import NativeFile, native_file
from engine.parameters import EMBEDDING, HEAD, parameter_shapes

BLOCK = 16
CONTEXT = 160
PREFILL = 512
BATCH = 32
_KV_PROJECTIONS = ("k_proj.weight", "v_proj.weight")


@dataclass(frozen=True)
class Load:
    name: str
    rows: int
    length: int
    start: int


LOADS = (
    Load(f"decode alone, context {CONTEXT}", 1, 1, CONTEXT),
    Load(f"decode {BATCH} rows, context {BLOCK}", BATCH, 1, BLOCK),
    Load(f"decode {BATCH} rows, context {CONTEXT}", BATCH, 1, CONTEXT),
    Load(f"prefill {PREFILL} tokens", 1, PREFILL, 0),
)


class Work:
    """What a step of a load has to do at least.

    Of the last layer, rows need keys and values of all tokens, and all else of one.
    """

    def __init__(self, file: NativeFile, tier: str | None) -> None:
        library = load_library(tier)
        assert library is not None
        config = file.config
        shapes = {n: s for n, s in parameter_shapes(config).items() if len(s) == 2}
        head = HEAD if HEAD in shapes else EMBEDDING
        used = [name for name in shapes if name == head or name not in (EMBEDDING, HEAD)]
        last = f"model.layers.{config.num_layers - 1}."
        of_rows = [
            name
            for name in used
            if name == head or (name.startswith(last) and not name.endswith(_KV_PROJECTIONS))
        ]

        def products(names: Iterable[str]) -> int:
            return sum(int(np.prod(shapes[name])) for name in names)

        def packed(name: str) -> int:
            kind = KINDS[file.weights.kind(name)]
            return int(library.paceline_packed_bytes(kind, *shapes[name]))

        self._of_rows = products(of_rows)
        self._of_tokens = products(used) - self._of_rows
        self._layers = config.num_layers
        self._of_position = 2 * config.num_heads * config.head_dim  # that a token of a layer sees
        self._weight_bytes = sum(packed(name) for name in used)
        self._kv_bytes = kv_bytes_per_token(config, IntegerKV(2))

    def weight_products(self, load: Load) -> int:
        return load.rows * (load.length * self._of_tokens + self._of_rows)

    def attention_products(self, load: Load) -> int:
        end = load.start + load.length
        seen = sum(range(load.start + 1, end + 1)) * (self._layers - 1) + end
        return load.rows * seen * self._of_position

    def bytes_read(self, load: Load) -> int:
        return self._weight_bytes + load.rows * (load.start + load.length) * self._kv_bytes


def step_of(model: NativeModel, load: Load) -> Callable[[], None]:
    """A step of the load, up to the logits of each row's last token."""
    blocks = -(-(load.start + load.length) // BLOCK)
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, load.rows * load.length)
    positions = np.tile(np.arange(load.start, load.start + load.length), load.rows)
    starts = np.arange(load.rows + 1) * load.length
    tables = np.arange(load.rows * blocks).reshape(load.rows, blocks)

    def step() -> None:
        hidden = model.forward(
            token_ids=tokens.astype(np.int32),
            positions=positions.astype(np.int32),
            row_starts=starts.astype(np.int32),
            block_tables=tables.astype(np.int32),
            outputs=(starts[1:] - 1).astype(np.int32),
        )
        model.logits(hidden)

    return step


def measure(file: NativeFile, *, threads: int, tier: str | None, rounds: int) -> None:
    library = load_library(tier)
    assert library is not None
    work = Work(file, tier)
    blocks = max(load.rows * -(-(load.start + load.length) // BLOCK) for load in LOADS)
    options = NativeOptions(
        num_blocks=blocks,
        block_size=BLOCK,
        max_model_len=max(load.start + load.length for load in LOADS),
        max_step_tokens=PREFILL,
        num_threads=threads,
        tier=tier,
    )
    model = NativeModel(file.config, file.weights, options)
    steps = {load: step_of(model, load) for load in LOADS}
    limits, seconds = dict.fromkeys(LIMITS, 0.0), dict.fromkeys(LOADS, float("inf"))
    for _ in range(rounds):
        for index, name in enumerate(LIMITS):
            limits[name] = max(limits[name], library.paceline_limit(index, threads))
        for load, step in steps.items():
            for _ in range(20 if load.rows * load.length == 1 else 3):
                begin = time.perf_counter()
                step()
                seconds[load] = min(seconds[load], time.perf_counter() - begin)
    print(f"{library.paceline_tier().decode()}, {threads} threads:", end=" ")
    print(", ".join(f"{value / 1e9:.1f} G {name} a second" for name, value in limits.items()))
    for load in LOADS:
        took = seconds[load]
        of_weights = work.weight_products(load) / limits["int8_products"] / took
        of_attention = work.attention_products(load) / limits["int16_products"] / took
        reading = work.bytes_read(load) / limits["read_bytes"] / took
        print(
            f"  {load.name:28} {took * 1e3:8.2f} ms   products with weights {of_weights:4.0%}, "
            f"and of attention {of_weights + of_attention:4.0%}, reading {reading:4.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="The machine's limits and the kernels' share.")
    parser.add_argument("--model", default=None, help="default: the embedded one")
    parser.add_argument("--threads", default=f"1,{usable_cores()}", help="counts, with commas")
    parser.add_argument("--tier", default=None, help="default: the best here")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    file = native_file(open_model(Path(resolve_model(given.model))))
    for threads in sorted({int(count) for count in given.threads.split(",")}):
        measure(file, threads=threads, tier=given.tier, rounds=given.rounds)


if __name__ == "__main__":
    main()
