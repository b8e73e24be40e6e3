"""transformers' continuous batching on the same machine, where it is installed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from tests.gpu.guard import Result
from tests.gpu.shapes import MODELS
from tests.gpu.steps import Sizes, few_requests


def transformers_continuous_batching(sizes: Sizes, device: torch.device) -> Iterator[Result]:
    """An eighth of the output, random weights of the same shape; few requests, then all of them."""
    name = f"transformers continuous batching, {sizes.main}"
    try:
        import transformers
    except ImportError:
        yield {"name": name, "absent": True}
        return
    config = MODELS[sizes.main]
    output = max(1, sizes.output // 8)
    theirs = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=sizes.dtype).eval()
    options = transformers.GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [
        [(i * 7919 + j * 31) % config.vocab_size for j in range(sizes.prompt)]
        for i in range(sizes.requests)
    ]
    more = {}
    if device.type != "cuda":  # there it takes what it finds
        more["continuous_batching_config"] = transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=256
        )
    for count in (few_requests(sizes), sizes.requests):
        begin = time.perf_counter()
        done = model.generate_batch(prompts[:count], generation_config=options, **more).values()
        took = time.perf_counter() - begin
        tokens = sum(len(answer.generated_tokens) for answer in done)
        if tokens != count * output:  # it only logs what went wrong
            raise RuntimeError(f"{tokens} tokens of {count * output} came")
        # Without the start of its manager and its captures.
        served = max(a.lifespan[1] for a in done) - min(a.created_time for a in done)
        yield {
            "name": f"{name} {count} x {sizes.prompt}/{output}",
            "version": transformers.__version__,
            "attention": model.config._attn_implementation,
            "seconds_with_start": took,
            "seconds": served,
            "output_tokens_per_second": tokens / served,
        }
