"""transformers' continuous batching on the same machine, where it is installed."""

from __future__ import annotations

import time

import torch

from tests.gpu.guard import Result
from tests.gpu.shapes import MODELS
from tests.gpu.steps import Sizes, let_go


def transformers_continuous_batching(sizes: Sizes, device: torch.device) -> Result:
    """The same number of requests, an eighth of the output, random weights of the same shape."""
    name = f"transformers continuous batching, {sizes.models[-1]}"
    try:
        import transformers
    except ImportError:
        return {"name": name, "absent": True}
    let_go(device)
    config = MODELS[sizes.models[-1]]
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
    begin = time.perf_counter()
    done = model.generate_batch(prompts, generation_config=options)
    took = time.perf_counter() - begin
    tokens = sum(len(answer.generated_tokens) for answer in done.values())
    return {
        "name": name,
        "version": transformers.__version__,
        "requests": sizes.requests,
        "output": output,
        "seconds": took,
        "output_tokens_per_second": tokens / took,
    }
