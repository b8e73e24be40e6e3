"""The roofline of each step shape: bytes, FLOPs, floors, launches, and what the design predicts.

python -m tests.gpu.roofline > docs/gpu-roofline.md. Arithmetic only; launches are counted on the
meta device. Nothing here is measured.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from scheduler.types import KVCapacity, SamplingParams

if TYPE_CHECKING:
    from engine.torch_engine import TorchEngine

BYTES_PER_SECOND = 4.3e12  # what copies reach on an H200
FLOPS_PER_SECOND = 790e12  # what dense bf16 products reach
# What the design is taken to reach of them; to be replaced by measured shares.
PRODUCT_SHARE, ATTENTION_SHARE, PREFILL_PRODUCT_SHARE, PREFILL_ATTENTION_SHARE = 0.9, 0.8, 0.8, 0.5
SMALL_LAUNCH_SECONDS = 2e-6  # a launch in a graph that moves next to nothing
ELEMENT = 2  # bytes of bf16
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Shape:
    """`decodes` rows of one token at `context`, and one row of `prefill` tokens at its start."""

    name: str
    decodes: int
    context: int
    prefill: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prefill

    @property
    def rows(self) -> int:
        return self.decodes + (self.prefill > 0)


SHAPES = [
    *(
        Shape(f"decode {batch} x {context // 1024}k", batch, context)
        for context in (1024, 8192)
        for batch in (1, 8, 64, 256)
    ),
    Shape("prefill 2,048", 0, 0, 2048),
    Shape("mixed 64 x 1k + 448", 64, 1024, 448),
]


@dataclass(frozen=True)
class Costs:
    product_bytes: int
    product_flops: int
    attention_bytes: int
    attention_flops: int
    other_bytes: int

    @property
    def floor_seconds(self) -> float:
        total_bytes = self.product_bytes + self.attention_bytes + self.other_bytes
        flops = self.product_flops + self.attention_flops
        return max(total_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)

    def predicted_seconds(self, launches: int, *, is_prefill: bool) -> float:
        """Products, then attention, then the rest; each by what binds it, plus launches."""
        product_share = PREFILL_PRODUCT_SHARE if is_prefill else PRODUCT_SHARE
        attention_share = PREFILL_ATTENTION_SHARE if is_prefill else ATTENTION_SHARE
        products = max(
            self.product_bytes / (PRODUCT_SHARE * BYTES_PER_SECOND),
            self.product_flops / (product_share * FLOPS_PER_SECOND),
        )
        attention = max(
            self.attention_bytes / (ATTENTION_SHARE * BYTES_PER_SECOND),
            self.attention_flops / (attention_share * FLOPS_PER_SECOND),
        )
        others = self.other_bytes / (ATTENTION_SHARE * BYTES_PER_SECOND)
        return products + attention + others + launches * SMALL_LAUNCH_SECONDS


def costs(config: object, shape: Shape) -> Costs:
    """Of a step in bf16; each weight is read once, each layer's KV once a row."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    layers, tokens = config.num_layers, shape.tokens
    of_layer = hidden * (q + 2 * kv) + q * hidden + 3 * hidden * inner
    head = hidden * config.vocab_size
    keys = shape.decodes * shape.context + shape.prefill
    pairs = shape.decodes * shape.context + shape.prefill * (shape.prefill + 1) // 2
    # Between the products a token's activations are written and read a few times.
    activations = tokens * (6 * hidden + 3 * (q + 2 * kv) + 2 * q + 3 * inner)
    return Costs(
        product_bytes=ELEMENT * (layers * of_layer + head),
        product_flops=2 * (layers * of_layer * tokens + head * shape.rows),
        attention_bytes=ELEMENT * layers * (2 * keys * kv + 2 * tokens * q),
        attention_flops=4 * layers * pairs * q,
        other_bytes=ELEMENT * layers * activations + 4 * 3 * shape.rows * config.vocab_size,
    )


def engine_on_meta(name: str, *, max_rows: int, max_tokens: int) -> TorchEngine:
    """As make_cuda_engine makes it, without a device and without graphs."""
    from engine.cuda_engine import TritonSampling
    from engine.cuda_runner import CudaRunner
    from engine.torch_engine import TorchEngine
    from tests.gpu.counting import META
    from tests.gpu.shapes import MODELS, random_model

    sizes = {"num_blocks": max_rows * (max_tokens // 16 + 2), "block_size": 16}
    model = random_model(
        MODELS[name], dtype=torch.bfloat16, device=META, max_positions=max_tokens + 16
    )
    runner = CudaRunner(
        model.decoder,
        **sizes,
        dtype=torch.bfloat16,
        device=META,
        max_rows=max_rows,
        max_model_len=max_tokens + 16,
    )
    return TorchEngine(
        model,
        device=META,
        dtype=torch.bfloat16,
        capacity=KVCapacity(**sizes, num_slots=max_rows, max_model_len=max_tokens + 16),
        runner=runner,
        sampler_kernels=TritonSampling(),
    )


def launches(name: str) -> dict[str, Counter[str]]:
    """Of a greedy decode step and of a prefill step."""
    from tests.gpu.counting import counted
    from tests.gpu.shapes import plan

    found = {}
    with counted() as counts:
        engine = engine_on_meta(name, max_rows=4, max_tokens=496)
        engine.submit(plan([0, 0], [9, 9], block_size=16, sampling=GREEDY))
        for kind, starts, lengths in (("decode", [9, 9], [1, 1]), ("prefill", [0], [200])):
            counts.clear()
            engine.submit(plan(starts, lengths, block_size=16))
            found[kind] = Counter(counts)
    return found


def peak_bytes(name: str, *, starts: list[int], lengths: list[int]) -> int:
    """The most that a step holds beside weights and KV, as its own code allocates it."""
    from tests.gpu.counting import LiveBytes, counted
    from tests.gpu.shapes import plan

    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    with counted():
        engine = engine_on_meta(name, max_rows=len(starts), max_tokens=max(ends))
        engine.submit(plan(starts, lengths, block_size=16, sampling=GREEDY))
        with LiveBytes() as live:
            engine.submit(plan(starts, lengths, block_size=16))
    return live.peak


# Steps whose memory is predicted here and measured by the check.
MEMORY_STEPS = {
    "prefill of 2,048": ([0], [2048]),
    "decode of 256 at 1k": ([1023] * 256, [1] * 256),
}


def table(name: str) -> list[str]:
    from tests.gpu.shapes import MODELS

    config = MODELS[name]
    counts = launches(name)
    lines = [
        f"## {name}",
        "",
        "| step | GB of products | GB of KV | TFLOP | floor, ms | bound by | launches "
        "| predicted, ms | share of the floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        cost = costs(config, shape)
        is_prefill = shape.prefill > 0
        of_step = counts["prefill" if is_prefill else "decode"]
        count = of_step.total() - of_step["upload"]
        if shape.decodes and is_prefill:
            count += 2 * config.num_layers  # split items and their combine beside the long ones
        flops = cost.product_flops + cost.attention_flops
        by_flops = flops / FLOPS_PER_SECOND >= cost.floor_seconds
        predicted = cost.predicted_seconds(count, is_prefill=is_prefill)
        lines.append(
            f"| {shape.name} | {cost.product_bytes / 1e9:.2f} | {cost.attention_bytes / 1e9:.2f} "
            f"| {flops / 1e12:.2f} | {1e3 * cost.floor_seconds:.2f} "
            f"| {'FLOPs' if by_flops else 'bytes'} | {count} | {1e3 * predicted:.2f} "
            f"| {cost.floor_seconds / predicted:.0%} |"
        )
    decode = counts["decode"]
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(decode.items()))
    memory = ", ".join(
        f"{step}: {peak_bytes(name, starts=starts, lengths=lengths) / 1e6:,.1f} MB"
        for step, (starts, lengths) in MEMORY_STEPS.items()
    )
    return [
        *lines,
        "",
        f"A greedy decode step by operation: {named}.",
        "",
        f"Predicted peak of a step beside weights and KV: {memory}.",
        "",
    ]


HEAD = f"""# Roofline of the GPU path

Written by `python -m tests.gpu.roofline`. **Nothing on this page was measured on a GPU.** Bytes and
FLOPs are arithmetic; launches are counted on torch's meta device (as torch's dispatcher sees them:
a library may use two kernels for one operation); predictions are predictions, written down so that
the first measured run (`bench/gpu_check.sh`) can be held against them.

- Floor: the larger of all bytes over {BYTES_PER_SECOND / 1e12} TB/s and all FLOPs over
  {FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, as an H200 reaches them in plain copies and dense bf16
  products. Each weight is read once a step, each layer's KV once a row, all in bf16.
- Predicted: products at {PRODUCT_SHARE:.0%} of the bytes' rate ({PREFILL_PRODUCT_SHARE:.0%} of the
  FLOPs' in prefill), decode attention at {ATTENTION_SHARE:.0%}, prefill attention at
  {PREFILL_ATTENTION_SHARE:.0%}, elementwise kernels at {ATTENTION_SHARE:.0%}, one after the other,
  and {SMALL_LAUNCH_SECONDS * 1e6:.0f} us for each launch on top. These shares are assumptions.
- Launches are those of a step without a graph; a captured decode step replays those of its layers
  as one. The embedding, the logits and the sampler stay outside of the graph; with overlapped
  steps the host queues them while the step before is running.
- To hold a run against it: `bench/gpu_check.sh` writes one JSON file. Its `MODEL decode BATCH x
  CONTEXT graphs depth 1` is a row below: `busy_milliseconds` is the device's part, to be compared
  with "predicted"; `step_milliseconds` above it is time in which the host did not keep up
  (`idle_share`). `share_of_floor` there is the last column here. `kernels` begins with what the
  device reaches in a copy and in a product: the two rates of the floor.
"""


def end_to_end(name: str, *, batch: int, prompt: int, output: int) -> str:
    """Output tokens per second of `batch` equal requests at once, prefills first."""
    from tests.gpu.shapes import MODELS

    config = MODELS[name]
    counts = launches(name)
    prefills = costs(config, Shape("", 0, 0, 2048))
    count = counts["prefill"].total() - counts["prefill"]["upload"]
    # Two prompts a step, each attending to itself alone.
    pairs = 2 * (prompt * (prompt + 1) // 2)
    alone = replace(
        prefills, attention_flops=4 * config.num_layers * pairs * config.num_heads * config.head_dim
    )
    seconds = alone.predicted_seconds(count, is_prefill=True) * batch * prompt / 2048
    count = counts["decode"].total() - counts["decode"]["upload"]
    middle = costs(config, Shape("", batch, prompt + output // 2))
    seconds += output * middle.predicted_seconds(count, is_prefill=False)
    return (
        f"{batch} requests of {prompt} + {output} tokens on {name}: predicted "
        f"{batch * output / seconds:,.0f} output tokens/s ({seconds:.1f} s), host time hidden."
    )


def main() -> None:
    print(HEAD)
    for name in ("Llama-3.1-8B", "Qwen3-8B"):
        print("\n".join(table(name)))
    print("## End to end\n")
    print(end_to_end("Qwen3-8B", batch=256, prompt=1024, output=1024))


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    main()
