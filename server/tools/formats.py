"""How model families write tool calls: plain data, one entry a format.

Which one a model speaks is found in its chat template, or told by `--tool-parser`. What is done
with a format is in call_reader.py (text to calls) and call_grammar.py (the grammar of calls).

    hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>     one marker a call
    smollm   <tool_call>[{"name": "f", "arguments": {...}}, ...]</tool_call>
    mistral  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]            to 2024
    mistral-args  [TOOL_CALLS]f[ARGS]{...}[TOOL_CALLS]...                     from 2025 on
    llama    {"name": "f", "parameters": {...}}; {...}                        the whole answer
    pythonic [f(a="x", b=[1, None]), g()]                                     the whole answer

Where a call is enforced, `pythonic` takes the JSON of `llama`: a schema says what JSON may come.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` may be "" for calls that are the whole answer; `arguments` is the key for them.

    `before` and `after` are what the grammar writes between the marker and the call; the reader
    takes any white space. `is_list`: the calls of one answer stand in one list, behind one marker.
    """

    name: str
    opening: str
    closing: str
    arguments: str = "arguments"
    before: str = ""
    after: str = ""
    between: str = "\n"
    is_list: bool = False
    # Beside `opening`, a marker that says the same.
    also: str = ""
    # Between a name and its arguments, where calls are no objects.
    separator: str = ""
    is_pythonic: bool = False


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat("hermes", "<tool_call>", "</tool_call>", before="\n", after="\n"),
    "smollm": ToolFormat("smollm", "<tool_call>", "</tool_call>", between=", ", is_list=True),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS]", "", between=", ", is_list=True),
    "mistral-args": ToolFormat("mistral-args", "[TOOL_CALLS]", "", between="", separator="[ARGS]"),
    "llama": ToolFormat(
        "llama", "", "", arguments="parameters", between="; ", also="<|python_tag|>"
    ),
    "pythonic": ToolFormat(
        "pythonic",
        "",
        "",
        arguments="parameters",
        between="; ",
        also="<|python_start|>",
        is_pythonic=True,
    ),
}
TOOL_PARSERS = ("auto", *FORMATS)

# How templates show the form of a call; the second opens it in Llama 4.
_PYTHONIC_SIGNS = ("[func_name1(", "<|python_start|>")

# For a template that shows no tools: what the model is told, in the words of a system message.
INSTRUCTIONS = """You can call functions to help with the request. These are the functions:
<tools>{tools}</tools>

To call functions, answer with nothing but a list of calls, in this form:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>"""


def format_of(source: str) -> ToolFormat:
    """The format that a chat template teaches; smollm, by instructions, if it teaches none."""
    if "[TOOL_CALLS]" in source:
        return FORMATS["mistral-args" if "[ARGS]" in source else "mistral"]
    if "tools" in source and "<tool_call>" in source:
        return FORMATS["hermes"]
    if "tools" in source and any(sign in source for sign in _PYTHONIC_SIGNS):
        return FORMATS["pythonic"]
    if "tools" in source and ('"parameters":' in source or "<|python_tag|>" in source):
        return FORMATS["llama"]
    return FORMATS["hermes"] if "tools" in source else FORMATS["smollm"]
