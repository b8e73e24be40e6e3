"""Fields that we know and an endpoint does not serve: refused unless they ask for nothing.

Dropping one could change what the client relies on: a limit, an end, a form, words for the model.
"""

from __future__ import annotations

from typing import Any

from server.errors import InvalidRequest

NO_FUNCTIONS = "The old form of tool calls is not supported; use tools and tool_choice."
NOT_HERE = "This field is not supported by this server."
ELSEWHERE = "This is a field of another endpoint; here it would do nothing."
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
# What other servers call limits, ends and forms of an answer.
_NOT_HERE = (
    "add_special_tokens",
    "audio",
    "bad_words_ids",
    "chat_template",
    "chat_template_kwargs",
    "choice",
    "custom_logit_processor",
    "documents",
    "ebnf",
    "force_words_ids",
    "format",
    "grammar",
    "json",
    "json_object",
    "json_schema",
    "logit_processors",
    "logits_processors",
    "logprob_token_ids",
    "lora_path",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "mm_processor_kwargs",
    "moderation",
    "n_predict",
    "no_repeat_ngram_size",
    "output_format",
    "prediction",
    "prompt_embeds",
    "regex",
    "stop_regex",
    "stop_words",
    "structural_tag",
    "thinking_token_budget",
    "web_search_options",
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
    "use_beam_search": ((False,), "Beam search is not supported by this server."),
    "tools": (([],), "There are no tools in /v1/completions."),
    "tool_choice": (("none", "auto"), "There are no tools in /v1/completions."),
    "functions": (([],), NO_FUNCTIONS),
    "function_call": (("none", "auto"), NO_FUNCTIONS),
}
REFUSED |= {name: (neutral, ELSEWHERE) for name, neutral in _ELSEWHERE.items()}
REFUSED |= dict.fromkeys(_NOT_HERE, ((), NOT_HERE))
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
