"""What the machine can do at most, and how much of that the CPU kernels use.

    python -m tests.limits [--model FILE] [--threads 1,2] [--tier NAME] [--rounds 5]

Limits come from loops that do nothing else, on as many threads: bytes read from memory; products of
8-bit integers; fp32 products. Decoding alone is held against the first (every weight once, and the
KV), a batch of 32 and a prefill against the second (a product for every weight of every token; what
attention multiplies is not counted, though its time is). The best of some rounds, in which
limits and kernels take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class Load:
    name: str
    rows: int
    length: int
    start: int
    limit: str


LOADS = (
    Load(f"decode alone, context {CONTEXT}", 1, 1, CONTEXT, "read_bytes"),
    Load(f"decode {BATCH} rows, context {CONTEXT}", BATCH, 1, CONTEXT, "int8_products"),
    Load(f"prefill {PREFILL} tokens", 1, PREFILL, 0, "int8_products"),
)


class Weights:
    """Sizes of what a step multiplies with: the layers for each token, the head for each row."""

    def __init__(self, file: NativeFile, tier: str | None) -> None:
        library = load_library(tier)
        assert library is not None
        shapes = {n: s for n, s in parameter_shapes(file.config).items() if len(s) == 2}
        head = HEAD if HEAD in shapes else EMBEDDING
        layers = [name for name in shapes if name not in (EMBEDDING, HEAD)]

        def packed(name: str) -> int:
            kind = KINDS[file.weights.kind(name)]
            return int(library.paceline_packed_bytes(kind, *shapes[name]))

        config = file.config
        self.layer_products = sum(int(np.prod(shapes[name])) for name in layers)
        self.head_products = int(np.prod(shapes[head]))
        self.num_bytes = sum(packed(name) for name in [*layers, head])
        self.kv_bytes = kv_bytes_per_token(config, IntegerKV(2))

    def work(self, load: Load) -> int:
        if load.limit == "read_bytes":
            return self.num_bytes + load.rows * (load.start + load.length) * self.kv_bytes
        tokens = load.rows * load.length
        return tokens * self.layer_products + load.rows * self.head_products


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
        )
        model.logits(hidden[starts[1:] - 1])

    return step


def measure(file: NativeFile, *, threads: int, tier: str | None, rounds: int) -> None:
    library = load_library(tier)
    assert library is not None
    weights = Weights(file, tier)
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
        share = weights.work(load) / seconds[load] / limits[load.limit]
        print(f"  {load.name:32} {seconds[load] * 1e3:8.2f} ms  {share:5.0%} of {load.limit}")


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
