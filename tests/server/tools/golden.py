"""Texts of models, and what is in them: the golden corpus of tool calls.

name -> (format, text, content, calls as (name, arguments exactly as written)).
"""

from __future__ import annotations

Call = tuple[str, str]
Golden = tuple[str, str, str, list[Call]]

NAMES = ("add", "ping", "get_weather", "f")
# Numbers, an empty string, nested arrays of objects, unicode, escaped quotes, brackets in strings.
HARD = (
    '{"n": -1.5e-3, "s": "", "a": [[{"x": [1, {"y": null}]}], []], "u": "é开😀\\u00e9", '
    '"q": "say \\"hi\\" }]{[ \\\\", "t": true}'
)

GOLDEN: dict[str, Golden] = {
    "hermes": (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    "hermes-hard": (
        "hermes",
        f'<tool_call>\n{{"name": "f", "arguments": {HARD}}}\n</tool_call>',
        "",
        [("f", HARD)],
    ),
    "hermes-two": (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>',
        "Let me see.",
        [("ping", "{}"), ("add", '{"a":1}')],
    ),
    "hermes-no-arguments": (
        "hermes",
        '<tool_call>{"name": "ping"}</tool_call><tool_call>{"name":"add","arguments":{"a":1}}'
        "</tool_call>",
        "",
        [("ping", "{}"), ("add", '{"a":1}')],
    ),
    "hermes-null-arguments": (
        "hermes",
        '<tool_call>{"name": "ping", "arguments": null}</tool_call>',
        "",
        [("ping", "{}")],
    ),
    "hermes-arguments-first": (
        "hermes",
        '<tool_call>{"arguments": {"a": [1]}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a": [1]}')],
    ),
    "hermes-more-keys": (
        "hermes",
        '<tool_call>{"id": "x}", "name": "add", "why": {"a": "}"}, "arguments": {"a": 1}, "z": 3}'
        "</tool_call>",
        "",
        [("add", '{"a": 1}')],
    ),
    "hermes-text-after": (
        "hermes",
        '<tool_call>{"name": "ping"}</tool_call>\n\nThat is all. ',
        "That is all.",
        [("ping", "{}")],
    ),
    "hermes-no-call": (
        "hermes",
        "2 < 3 and <tool> </tool_call>\n",
        "2 < 3 and <tool> </tool_call>\n",
        [],
    ),
    "hermes-not-json": ("hermes", "<tool_call> call me", "<tool_call> call me", []),
    "hermes-marker-begun": ("hermes", "so <tool_cal", "so <tool_cal", []),
    "hermes-object-begun": ("hermes", '<tool_call>\n{"na', '<tool_call>\n{"na', []),
    "hermes-cut": (
        "hermes",
        '<tool_call>\n{"name": "add", "arguments": {"a": "x',
        "",
        [("add", '{"a": "x')],
    ),
    "smollm": (
        "smollm",
        '<tool_call>[{"name": "ping", "arguments": {}}, {"name": "f", "arguments": '
        f"{HARD}}}]</tool_call>",
        "",
        [("ping", "{}"), ("f", HARD)],
    ),
    "smollm-none": ("smollm", "<tool_call>[]</tool_call>", "", []),
    "mistral": (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "ping", "arguments": {}}]',
        "",
        [("add", '{"a": 1}'), ("ping", "{}")],
    ),
    "mistral-hard": (
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {HARD}}}]',
        "",
        [("f", HARD)],
    ),
    "mistral-text": ("mistral", "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
    "mistral-args": (
        "mistral-args",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]ping[ARGS]{}',
        "",
        [("add", '{"a": 1}'), ("ping", "{}")],
    ),
    "mistral-args-hard": (
        "mistral-args",
        f"I look.\n[TOOL_CALLS] f [ARGS] {HARD}",
        "I look.",
        [("f", HARD)],
    ),
    "mistral-args-id": (
        "mistral-args",
        '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": "[ARGS]"}',
        "",
        [("add", '{"a": "[ARGS]"}')],
    ),
    "mistral-args-list": (
        "mistral-args",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
        "",
        [("add", '{"a": 1}')],
    ),
    "mistral-args-text": (
        "mistral-args",
        "[TOOL_CALLS]no name at all[ARG]",
        "[TOOL_CALLS]no name at all[ARG]",
        [],
    ),
    "mistral-args-text-after": (
        "mistral-args",
        "[TOOL_CALLS]ping[ARGS]{}\n Done.",
        "Done.",
        [("ping", "{}")],
    ),
    "mistral-args-cut": (
        "mistral-args",
        '[TOOL_CALLS]add[ARGS]{"a": "x',
        "",
        [("add", '{"a": "x')],
    ),
    "pythonic": (
        "pythonic",
        '[get_weather(city="São Paulo", days=3), ping()]',
        "",
        [("get_weather", '{"city": "São Paulo", "days": 3}'), ("ping", "{}")],
    ),
    "pythonic-values": (
        "pythonic",
        "[f(a=[1, {'k': None}], b=True, c='it\\'s, \\u00e9)', d=-1.5e-3, e=(1, 2), g={}, h=false)]",
        "",
        [
            (
                "f",
                '{"a": [1, {"k": null}], "b": true, "c": "it\'s, é)", "d": -0.0015, "e": [1, 2], '
                '"g": {}, "h": false}',
            )
        ],
    ),
    "pythonic-odd-values": (
        "pythonic",
        '[f(a=today, b="\\/", c=1e999, d=b"x", e = "a" , )]',
        "",
        [("f", '{"a": "today", "b": "/", "c": "1e999", "d": "b\\"x\\"", "e": "a"}')],
    ),
    "pythonic-markers": (
        "pythonic",
        "<|python_start|>[ping()]<|python_end|>",
        "",
        [("ping", "{}")],
    ),
    "pythonic-text-after": ("pythonic", "[ping()]\n\nDone. ", "Done.", [("ping", "{}")]),
    "pythonic-object": (
        "pythonic",
        ' {"name": "add", "parameters": {"a": 1}}',
        "",
        [("add", '{"a": 1}')],
    ),
    "pythonic-list": ("pythonic", "[1, 2, 3]\n", "[1, 2, 3]\n", []),
    "pythonic-unknown": ("pythonic", "[print(a=1)]", "[print(a=1)]", []),
    "pythonic-positional": ("pythonic", '[f("x")]', '[f("x")]', []),
    "pythonic-comparison": ("pythonic", "[f(a==1)]", "[f(a==1)]", []),
    "pythonic-text": ("pythonic", "No [f(a=1)] here.", "No [f(a=1)] here.", []),
    "pythonic-begun": ("pythonic", "[get_wea", "[get_wea", []),
    "pythonic-cut": (
        "pythonic",
        '[get_weather(city="Rome", days=',
        "",
        [("get_weather", '{"city": "Rome"')],
    ),
    "llama": ("llama", '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    "llama-hard": ("llama", f'{{"name": "f", "parameters": {HARD}}}', "", [("f", HARD)]),
    "llama-two": (
        "llama",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "ping", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("ping", "{}")],
    ),
    "llama-tag": (
        "llama",
        '<|python_tag|>{"name": "ping", "parameters": {}}',
        "",
        [("ping", "{}")],
    ),
    "llama-json-answer": (
        "llama",
        '{"name": "Ada", "parameters": {"a": 1}}',
        '{"name": "Ada", "parameters": {"a": 1}}',
        [],
    ),
    "llama-text": ("llama", "<p>No {calls} here</p> ", "<p>No {calls} here</p> ", []),
    "llama-blank": ("llama", "  \n ", "  \n ", []),
}
