"""The call formats of model families, and which of them a checkpoint's chat template teaches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmc.errors import UsageError, format_value
from llmc.runtime.tools.calls import CallFormat
from llmc.runtime.tools.gemma_calls import GemmaCalls
from llmc.runtime.tools.harmony import HarmonyCalls
from llmc.runtime.tools.json_calls import JsonCalls, NamedCalls
from llmc.runtime.tools.python_calls import PythonCalls
from llmc.runtime.tools.xml_calls import XmlCalls

_MISTRAL = JsonCalls(("[TOOL_CALLS]",), listed=True)
FORMATS: dict[str, CallFormat] = {
    # Hermes 2 and 3, Qwen 2.5 and 3, SmolLM3, EXAONE 4, Granite 4, Hunyuan
    "hermes": JsonCalls(("<tool_call>",), "</tool_call>", pad="\n", between="\n"),
    # Qwen3-Coder
    "qwen3_coder": XmlCalls("<tool_call>", "</tool_call>", pad="\n"),
    "seed_oss": XmlCalls("<seed:tool_call>", "</seed:tool_call>", pad=""),
    # Llama 3.1 and 3.2, whose templates allow one call per message
    "llama3": JsonCalls(("<|python_tag|>",), bare=True, keys=("name", "parameters")),
    # Mistral up to Small 3.1
    "mistral": _MISTRAL,
    # Mistral from Small 3.2 on: Magistral, Devstral, Ministral 3
    "mistral_args": NamedCalls("[TOOL_CALLS]", "[ARGS]", _MISTRAL),
    "hunyuan": JsonCalls(("<tool_calls>",), "</tool_calls>", listed=True),
    # Granite 3
    "granite": JsonCalls(("<|tool_call|>", "<tool_call>"), listed=True),
    "phi4_mini": JsonCalls(("<|tool_call|>",), "<|/tool_call|>", listed=True),
    "functools": JsonCalls(("functools[",), listed=True),
    # Command R7B and Command A
    "cohere": JsonCalls(
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        listed=True,
        keys=("tool_name", "parameters"),
        numbered="tool_call_id",
        frame=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "olmo3": PythonCalls("<function_calls>", "</function_calls>", between="\n"),
    "functiongemma": GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    # gpt-oss
    "harmony": HarmonyCalls(),
    # Gemma 3, which has no format except in prompts; the second format of Llama 3.2 and 4
    "pythonic": PythonCalls("", "", between=", "),
}

# The first of these texts in a template decides the format; more specific texts come first.
_TELLING = (
    ("<seed:tool_call>", "seed_oss"),
    ("<|START_ACTION|>", "cohere"),
    ("<start_function_call>", "functiongemma"),
    ("<|tool_call>", "gemma4"),
    ("<|channel|>commentary", "harmony"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("functools", "functools"),
    ("<|/tool_call|>", "phi4_mini"),
    ("<|/tool|>", "phi4_mini"),
    ("<|tool_call|>", "granite"),
    ("<tool_calls>", "hunyuan"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<function_calls>", "olmo3"),
    ("python list of the function calls", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('{"name": function name, "parameters"', "llama3"),
)


def format_of(template: str) -> str | None:
    """The name of the format that a chat template's source teaches; None if it teaches no known one."""
    return next((name for text, name in _TELLING if text in template), None)


def writer(name: str | None) -> Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str] | None:
    """The function that writes calls in a named format; None for None. Raises UsageError: unknown format."""
    return None if name is None else format_named(name).write


def format_named(name: str) -> CallFormat:
    if name not in FORMATS:
        raise UsageError("tool_format", f"is {format_value(name)}, expected one of {', '.join(FORMATS)}")
    return FORMATS[name]
