"""What to tell who writes a setting that there is not: what it is called here.

Owns the names that vLLM, TGI and llama.cpp's server have for what we have too. Knows no values.
"""

from __future__ import annotations

import difflib

from server.options import OPTIONS

# Their name, with underscores -> ours.
ELSEWHERE = {
    # vLLM
    "model": "model",
    "tokenizer": "model",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_step_tokens",
    "long_prefill_token_threshold": "max_chunk_tokens",
    "gpu_memory_utilization": "kv_memory",
    "kv_cache_memory_bytes": "kv_memory",
    "kv_cache_dtype": "kv_dtype",
    "enable_prefix_caching": "prefix_caching",
    "scheduling_policy": "policy",
    "async_scheduling": "depth",
    "quantization": "gpu_quantize",
    "tool_call_parser": "tool_parser",
    "enable_auto_tool_choice": "tool_parser",
    "allowed_origins": "cors_origin",
    "uvicorn_log_level": "log_level",
    "otlp_traces_endpoint": "otel",
    # TGI
    "model_id": "model",
    "max_concurrent_requests": "max_waiting",
    "max_batch_size": "max_running",
    "max_batch_prefill_tokens": "max_step_tokens",
    "max_total_tokens": "max_model_len",
    "max_input_length": "max_input_tokens",
    "cuda_memory_fraction": "kv_memory",
    "quantize": "gpu_quantize",
    "hostname": "host",
    "cors_allow_origin": "cors_origin",
    "json_output": "log_format",
    # llama.cpp
    "m": "model",
    "c": "max_model_len",
    "ctx_size": "max_model_len",
    "np": "max_running",
    "parallel": "max_running",
    "t": "threads",
    "b": "max_step_tokens",
    "batch_size": "max_step_tokens",
    "ub": "max_step_tokens",
    "ubatch_size": "max_step_tokens",
    "n": "max_output_tokens",
    "n_predict": "max_output_tokens",
    "ctk": "kv_dtype",
    "cache_type_k": "kv_dtype",
    "ctv": "kv_dtype",
    "cache_type_v": "kv_dtype",
    "ngl": "device",
    "n_gpu_layers": "device",
    "gpu_layers": "device",
    "a": "served_model_name",
    "alias": "served_model_name",
    "slots": "timelines",
}


def known_as(name: str) -> str | None:
    """Our name, with underscores, for what somebody called `name`; None if nothing is near."""
    plain = name.lstrip("-").replace("-", "_").lower().removeprefix("no_")
    if plain in ELSEWHERE:
        return ELSEWHERE[plain]
    near = difflib.get_close_matches(plain, OPTIONS, n=1, cutoff=0.75)
    return near[0] if near else None


def unknown_flag(flag: str) -> str:
    """One line for a flag that does not exist."""
    name = flag.partition("=")[0]
    ours = known_as(name)
    if ours == "model":
        return f"{name}: there is no such flag; the model is named without one: serve MODEL"
    hint = f"; here it may be {OPTIONS[ours].flag}" if ours else ""
    return f"{name}: there is no such flag{hint} (--help lists all)"
