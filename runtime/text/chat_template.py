"""Messages to a prompt, by the checkpoint's own chat template.

Templates are programs from a stranger, so they run in jinja's immutable sandbox and see nothing but plain data. They
render what transformers' ``apply_chat_template(tokenize=False)`` renders.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.errors import BundleError, RequestError, UsageError
from llmc.runtime.text.tokenizer import CONFIG_FILE, Tokenizer, read_tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"
# Names under which a message's reasoning is passed; templates read the first, older ones the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Safe to share between threads.

    Args:
        templates: jinja sources by name; ``default`` is used, or ``tool_use`` for messages with tools.
        special_tokens: variables such as ``bos_token`` that every template sees.

    Raises:
        RequestError: the template is not valid jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _guarded(environment.from_string, source) for name, source in templates.items()}

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Load chat_template.jinja, or else what tokenizer_config.json holds.

        Raises:
            RequestError: the model has no chat template, or one that is not valid jinja.
            BundleError: a file cannot be read.
        """
        return cls(_read_templates(Path(folder)), tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``. It holds the special tokens already: encode it without adding them again.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``; further keys are the template's business.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: JSON schemas of functions the model may call.
            documents: texts to answer from.
            variables: whatever else the template reads, such as ``enable_thinking``.

        Raises:
            UsageError: the messages are malformed, or hold something else than text, numbers, lists and mappings.
            RequestError: the template refuses the messages, or fails.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        values = {
            **self._special_tokens,
            "messages": [_message(message, f"messages[{i}]") for i, message in enumerate(_checked(messages))],
            "add_generation_prompt": add_generation_prompt,
            "tools": _plain(tools, "tools"),
            "documents": _plain(documents, "documents"),
            **{key: _plain(value, key) for key, value in variables.items()},
        }
        return str(_guarded(self._templates[name].render, values))


def _read_templates(folder: Path) -> dict[str, str]:
    """Sources by name; the file goes before the configuration."""
    file = folder / TEMPLATE_FILE
    if file.is_file():
        return {"default": _read_text(file)}
    found = read_tokenizer_config(folder).get("chat_template")
    if found is None:
        raise RequestError(f"{folder}: the model has no chat template; pass a prompt instead of messages")
    try:
        templates = {"default": found} if isinstance(found, str) else {each["name"]: each["template"] for each in found}
    except (TypeError, KeyError) as error:
        raise BundleError(f"{folder / CONFIG_FILE}: chat_template is neither text nor a list of named texts") from error
    if "default" not in templates:
        names = ", ".join(templates)
        raise RequestError(
            f"{folder}: none of the model's chat templates ({names}) is the default; pass a prompt instead"
        )
    return templates


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{file} cannot be read ({error}); take it from the checkpoint again") from error


# ---------------------------------------------------------------------------------------------------------- messages


def _checked(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, (list, tuple)) or not messages:
        found = "empty" if isinstance(messages, (list, tuple)) else f"a {type(messages).__name__}"
        raise UsageError(f"messages is {found}, expected a list of mappings with role and content")
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is a {type(message).__name__}, expected a mapping with role and content")
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where} has the role {message.get('role')!r}, expected text such as user or assistant")
    if not isinstance(message.get("content"), (str, list, tuple)) and not message.get("tool_calls"):
        raise UsageError(f"{where} has the content {message.get('content')!r}, expected text or a list of parts")
    # Templates expect what is not there to be missing, not None.
    plain = _plain({key: value for key, value in message.items() if value is not None}, where)
    reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any, where: str) -> Any:
    """A copy of ``value`` made of JSON's types only: methods of richer objects are no business of a template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # whatever the subclass makes of str()
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item, f"{where}[{i}]") for i, item in enumerate(value))
    raise UsageError(f"{where} is a {type(value).__name__}, expected text, a number, a list or a mapping")


# ----------------------------------------------------------------------------------------------------------- sandbox


def _guarded(call: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return call(argument)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the model's chat template is not valid: {error.message} (line {error.lineno})") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"the model's chat template refuses the messages: {error.message}") from error
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(f"the model's chat template failed: {type(error).__name__}: {error}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox, which bounds ranges, with a bound for products too: ``'x' * 10**10`` would take all memory."""

    intercepted_binops = frozenset({"*", "**"})
    largest = 1_000_000

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute ``left operator right``.

        Raises:
            SecurityError: the result would be too large for a prompt.
        """
        length = max((len(side) for side in (left, right) if isinstance(side, str | list | tuple)), default=0)
        times = max((side for side in (left, right) if isinstance(side, int)), default=0)
        if (operator == "*" and length * times > self.largest) or (operator == "**" and times > 1000):
            raise SecurityError(f"a product of more than {self.largest} items")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals = {
        **environment.globals,
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *items, **named: dict(*items, **named),  # the type itself would hand out its methods
        "namespace": _Namespace,
    }
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's words for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the type jinja declares)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace, without names that could pose as Python internals."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a template may set a name "self"
        attributes = dict(*args[1:], **named)
        for name in attributes:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}: it begins with an underscore")
