"""Fields that we know and an endpoint does not serve: refused unless they ask for nothing.

Dropping one could change what the client relies on: a limit, an end, a form, words for the model.
"""

from __future__ import annotations

from typing import Any

from server.errors import InvalidRequest

NO_FUNCTIONS = "The old form of tool calls is not supported; use tools and tool_choice."
NOT_HERE = "This field is not supported by this server."
ELSEWHERE = "This is a field of another endpoint; here it would do nothing."
IN_THE_BODY = "Fields stand in the body itself here, not in an object within it."
# Of our other endpoints.
_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "background": (False,),
    "best_of": (1,),
    "context_management": ({},),
    "echo": (False,),
    "enable_thinking": (False,),
    "include": ([],),
    "include_reasoning": (True,),
    "inference_geo": ("global",),
    "input": (),
    "instructions": (),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tool_calls": (),
    "messages": (),
    "output_config": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "reasoning": (),
    "stop_sequences": ([],),
    "system": (),
    "text": (),
    "thinking": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# What other servers call limits, ends and forms of an answer, its prompt, and weights added to it.
_NOT_HERE = (
    "adapter",
    "adapter_id",
    "adapter_name",
    "adapter_source",
    "add_special_tokens",
    "audio",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chat_template",
    "chat_template_kwargs",
    "choice",
    "custom_logit_processor",
    "documents",
    "ebnf",
    "eos_token_id",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "format",
    "grammar",
    "image_data",
    "images",
    "input_embeds",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "json",
    "json_object",
    "json_schema",
    "logit_processors",
    "logits_processors",
    "logprob_token_ids",
    "lora",
    "lora_adapter",
    "lora_adapters",
    "lora_id",
    "lora_name",
    "lora_path",
    "lora_request",
    "max_gen_len",
    "max_length",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "mm_processor_kwargs",
    "moderation",
    "n_cmpl",
    "n_predict",
    "no_repeat_ngram_size",
    "num_predict",
    "num_return_sequences",
    "output_format",
    "prediction",
    "prompt_embeds",
    "prompt_token_ids",
    "reasoning_budget",
    "regex",
    "stop_regex",
    "stop_strings",
    "stop_tokens",
    "stop_words",
    "structural_tag",
    "suppress_tokens",
    "t_max_predict_ms",
    "thinking_budget",
    "thinking_token_budget",
    "web_search_options",
)
# Bags that hold such fields: a client that wrote one meant what is in it.
_BAGS = (
    "extra_body",
    "generation_config",
    "options",
    "parameters",
    "sampling_params",
    "vllm_xargs",
)
# The values that ask for nothing, and what to say otherwise. Of no use to an endpoint's own fields.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "Filling in before a suffix is not supported by this server."),
    "store": ((False,), "This server stores no answers."),
    "service_tier": (("auto", "default"), "This server has the service tier 'default' only."),
    "modalities": ((["text"],), "This server answers with text only."),
    "reasoning_effort": (("none",), "There is no reasoning in /v1/completions."),
    "verbosity": (("medium",), NOT_HERE),
    "continue_final_message": ((False,), NOT_HERE),
    "length_penalty": ((1, 1.0), NOT_HERE),
    "truncate": ((False, "NONE"), "This field is truncate_prompt_tokens here."),
    "use_beam_search": ((False,), "Beam search is not supported by this server."),
    "tools": (([],), "There are no tools in /v1/completions."),
    "tool_choice": (("none", "auto"), "There are no tools in /v1/completions."),
    "functions": (([],), NO_FUNCTIONS),
    "function_call": (("none", "auto"), NO_FUNCTIONS),
}
REFUSED |= {name: (neutral, ELSEWHERE) for name, neutral in _ELSEWHERE.items()}
REFUSED |= dict.fromkeys(_NOT_HERE, ((), NOT_HERE))
REFUSED |= dict.fromkeys(_BAGS, (({},), IN_THE_BODY))
REFUSED_PREFIXES = ("guided_",)


def refuse_unserved(name: str, value: Any) -> None:
    """Raises InvalidRequest for a constraint that we do not keep."""
    if name.startswith(REFUSED_PREFIXES):
        raise InvalidRequest(NOT_HERE, param=name, code="unsupported_parameter")
    if name not in REFUSED:
        return
    neutral, message = REFUSED[name]
    # `True == 1` must not pass for the value of another type.
    if not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
        raise InvalidRequest(message, param=name, code="unsupported_parameter")
