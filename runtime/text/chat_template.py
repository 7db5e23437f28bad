"""Messages to a prompt with the checkpoint's chat template, rendered as by transformers' ``apply_chat_template``.

Templates run in a sandbox (:mod:`llmc.runtime.text.sandbox`) and receive plain copies of bounded size.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes

from llmc.errors import BundleError, RequestError, UsageError, format_value
from llmc.runtime.text.control_tokens import FIRST_STAND, LAST_STAND, ControlTokens, Disguise, Finder
from llmc.runtime.text.sandbox import Sandbox
from llmc.runtime.text.tokenizer import CONFIG_FILE, REMEDY, Tokenizer, read_tokenizer_config

TEMPLATE_FILE = "chat_template.jinja"
# Characters of messages, tools, documents and variables together; more than any context in use holds.
LARGEST_INPUT = 8_000_000
# A value counts as this many characters: a template's work on 250,000 values, such as writing them as JSON, takes some
# hundredths of a second, during which no other Python thread runs.
VALUE_SIZE = 32
_TOO_LARGE = f"the messages hold more than {LARGEST_INPUT:,} characters, each value counted as {VALUE_SIZE}; send less"
# Nesting depth: JSON schemas of tools stay below 20, and Python's own recursion ends at some hundreds.
DEEPEST = 100
# Templates compare the values of these keys with known words; such a word is not hidden as a control token.
_COMPARED = ("role", "type")
# Templates may turn these roles into control tokens, as '<|' + role + '|>', without naming them.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
LONGEST_REASON = 500  # characters of a template's own error message, which may be of any length
# Keys that hold a message's reasoning: templates read the first, older ones the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template. Safe to share between threads.

    Args:
        templates: jinja sources by name; ``default`` is used, or ``tool_use`` for messages with tools.
        special_tokens: variables such as ``bos_token`` that every template sees.
        controls: tokens that are marked where the template itself writes them; default: none.

    Raises:
        RequestError: the template is not valid jinja.
    """

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], controls: ControlTokens | None = None
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._sources = dict(templates)
        self._marked = _Compiled(self._sources, special_tokens, controls.mark if controls else str)

    @cached_property
    def _plain(self) -> "_Compiled":
        return _Compiled(self._sources, self._special_tokens, str)

    @classmethod
    def from_folder(cls, folder: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Load chat_template.jinja, or else the template in tokenizer_config.json. Raises RequestError: the model has
        no chat template, or it is not valid jinja; BundleError: a file cannot be read."""
        return cls(_read_templates(Path(folder)), tokenizer.special_tokens, tokenizer.controls)

    def source(self, tools: bool) -> str:
        """The source of the template for messages with tools, or without."""
        return self._sources[self._name(tools)]

    def variables(self, tools: bool) -> frozenset[str]:
        """Input names that the template for messages with tools, or without, may read."""
        return self._known[self._name(tools)]

    @cached_property
    def _known(self) -> dict[str, frozenset[str]]:
        sandbox = self._marked.sandbox
        globals_ = sandbox.globals.keys() | self._special_tokens.keys()
        read = {name: jinja2.meta.find_undeclared_variables(sandbox.parse(s)) for name, s in self._sources.items()}
        return {name: frozenset(names - globals_) for name, names in read.items()}

    @cached_property
    def _reads_parts_alone(self) -> bool:
        """True if the template shows texts only in lists of parts, as some vision models' do."""
        text = secrets.token_hex(16)

        def shows(content: Any) -> bool:
            messages = [{"role": "user", "content": content}]
            try:
                return text in self._plain.render("default", {**self._special_tokens, "messages": messages})
            except RequestError:
                return False

        return not shows(text) and shows([{"type": "text", "text": text}])

    def _name(self, tools: bool) -> str:
        return "tool_use" if tools and "tool_use" in self._sources else "default"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        disguise: Disguise | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``. It already holds the special tokens: encode it without adding them again.

        Args:
            messages: ``[{"role": ..., "content": ...}, ...]``; the template decides about further keys.
            add_generation_prompt: end with the beginning of the assistant's answer.
            tools: JSON schemas of functions the model may call.
            documents: texts to answer from.
            continue_final_message: end where the text of the last message, the assistant's, ends. If the template trims
                messages, that end is trimmed, too.
            disguise: hides the control tokens that these texts spell; default: they are not hidden.
            variables: anything else the template reads, such as ``enable_thinking``.

        Raises:
            UsageError: the messages are malformed, nested too deeply, or hold a value that JSON lacks.
            RequestError: the template refuses the messages, leaves out the text to be continued, or fails; or they have
                more than :data:`LARGEST_INPUT` characters.
        """
        compiled, name = self._marked if disguise else self._plain, self._name(tools is not None)
        if not isinstance(messages, list | tuple) or not messages:
            raise UsageError(
                "messages", f"is {format_value(messages)}, expected a list of mappings with role and content"
            )
        checked = with_calls_as_mappings(messages)
        mark = secrets.token_hex(16) if continue_final_message else None
        if mark is not None:
            if add_generation_prompt:
                raise UsageError("continue_final_message", "is True and add_generation_prompt too", "set one of them")
            checked[-1] = _mark_end(checked[-1], f"{mark} ")
        if self._reads_parts_alone:
            checked = [_with_parts(message) for message in checked]
        extras = {"tools": tools, "documents": documents, **variables}

        def render(copies: _Copies) -> str:
            values = {
                **compiled.special_tokens,
                "messages": [copies.message(message, f"messages[{i}]") for i, message in enumerate(checked)],
                "add_generation_prompt": add_generation_prompt,
                **{key: copies.plain(value, key) for key, value in extras.items()},
            }
            return compiled.render(name, values)

        rendered = render(_Copies(disguise.hide if disguise else str))
        if disguise is not None:
            harmless = _Copies(
                lambda text: _WORDS.sub(lambda word: chr(LAST_STAND) * len(word[0]), text), compiled.words
            )
            rendered = disguise.controls.settle(rendered, lambda: render(harmless))
        return rendered if mark is None else _until(rendered, mark)


class _Compiled:
    """Templates by name, with ``mark`` applied to their source and to the special tokens."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], mark: Callable[[str], str]
    ) -> None:
        self.special_tokens = {name: mark(text) for name, text in special_tokens.items()}
        self.sandbox = Sandbox(mark)
        self._sources = sources
        self._templates = {name: _call_guarded(self.sandbox.from_string, source) for name, source in sources.items()}

    def render(self, name: str, values: dict[str, Any]) -> str:
        rendered: str = _call_guarded(self._templates[name].render, values)
        return rendered

    @cached_property
    def words(self) -> frozenset[str]:
        """Names and texts that the templates compare with."""
        trees = [self.sandbox.parse(source) for source in self._sources.values()]
        texts = {node.value for tree in trees for node in tree.find_all(jinja2.nodes.Const)}
        return frozenset({*texts, *(node.attr for tree in trees for node in tree.find_all(jinja2.nodes.Getattr))})


def has_template(folder: Path) -> bool:
    """True if a model's files hold a chat template, usable or not."""
    return (folder / TEMPLATE_FILE).is_file() or bool(read_tokenizer_config(folder).get("chat_template"))


def _read_templates(folder: Path) -> dict[str, str]:
    file = folder / TEMPLATE_FILE
    if file.is_file():
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file} cannot be read ({error}); {REMEDY}") from error
    templates_value = read_tokenizer_config(folder).get("chat_template")
    if templates_value is None:
        raise RequestError("the model has no chat template; pass a prompt instead of messages")
    try:
        templates = (
            {"default": templates_value}
            if isinstance(templates_value, str)
            else {each["name"]: each["template"] for each in templates_value}
        )
    except (TypeError, KeyError) as error:
        raise BundleError(
            "chat_template is neither text nor a list of named texts", path=folder / CONFIG_FILE
        ) from error
    if "default" not in templates:
        names = ", ".join(templates)
        raise RequestError(f"none of the model's chat templates ({names}) is the default; pass a prompt instead")
    return templates


# ---------------------------------------------------------------------------------------------------------- messages


def with_calls_as_mappings(messages: Sequence[Any]) -> list[Any]:
    """The messages with tool calls as templates read them: arguments, which OpenAI's clients send as JSON text, are
    parsed; the result of a call gets the name of its tool, which some templates write."""
    names: dict[Any, Any] = {}
    copies = []
    for message in messages:
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list | tuple):
            calls = [_call(call) for call in message["tool_calls"]]
            for call in calls:
                if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
                    names |= {call["id"]: call["function"].get("name")} if isinstance(call.get("id"), str) else {}
            message = {**message, "tool_calls": calls}
        elif isinstance(message, Mapping) and message.get("role") == "tool" and not message.get("name"):
            name = names.get(str(message.get("tool_call_id")))
            message = message if name is None else {**message, "name": name}
        copies.append(message)
    return copies


def _with_parts(message: Any) -> Any:
    """A message whose text is wrapped in a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _mark_end(message: Any, mark: str) -> Any:
    """The last message with a mark at the end of its text, which is how transformers finds that position."""
    wrong = "expected a text of the assistant without calls, for the answer to continue"
    if not isinstance(message, Mapping) or message.get("role") != "assistant" or message.get("tool_calls"):
        raise UsageError("continue_final_message", f"is True, but the last message is another one, {wrong}")
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    parts = list(content) if isinstance(content, list | tuple) else []
    for at in reversed(range(len(parts))):
        if isinstance(parts[at], Mapping) and isinstance(parts[at].get("text"), str):
            parts[at] = {**parts[at], "text": parts[at]["text"] + mark}
            return {**message, "content": parts}
    raise UsageError("continue_final_message", f"is True, but the last message has no text, {wrong}")


def _until(rendered: str, mark: str) -> str:
    """The prompt up to the mark; the blank after it shows whether the template keeps blanks at the end of texts."""
    position = rendered.rfind(mark)
    if position < 0:
        raise RequestError("the model's chat template leaves out the last message, which the answer must continue")
    return rendered[:position] if rendered.startswith(f"{mark} ", position) else rendered[:position].rstrip()


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    if function["arguments"].count(",") * VALUE_SIZE > LARGEST_INPUT:
        raise RequestError(_TOO_LARGE)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # arguments of an answer that was cut off: templates see the text
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class _Copies:
    """Copies of what clients pass, made of JSON's types only.

    Args:
        hide: applied to every text.
        words: in copies without control tokens, the texts to keep: roles and texts that the template compares with.
    """

    def __init__(self, hide: Callable[[str], str], words: frozenset[str] | None = None) -> None:
        self._text = hide
        self._words = words
        self._keys: dict[Any, str] = {}
        self._size = 0  # of the copies

    def message(self, message: Any, where: str) -> dict[str, Any]:
        """A message with the keys that templates expect."""
        if not isinstance(message, Mapping):
            raise UsageError(where, f"is a {type(message).__name__}, expected a mapping with role and content")
        if not isinstance(message.get("role"), str):
            raise UsageError(where, f"has the role {format_value(message.get('role'))}, expected text such as user")
        if not isinstance(message.get("content"), (str, list, tuple)) and not message.get("tool_calls"):
            raise UsageError(
                where, f"has the content {format_value(message.get('content'))}, expected text or a list of parts"
            )
        # Templates expect a missing value to be absent, not None.
        plain = self.plain({key: value for key, value in message.items() if value is not None}, where)
        reasoning = next((plain[key] for key in _REASONING if plain.get(key) is not None), None)
        return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}

    def plain(self, value: Any, where: str, depth: int = 0) -> Any:
        self._size += VALUE_SIZE + (len(value) if isinstance(value, str) else 0)
        if self._size > LARGEST_INPUT:
            raise RequestError(_TOO_LARGE)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(str.__str__(value))  # a subclass may override str()
        if isinstance(value, int | float):
            number = int(value) if isinstance(value, int) else float(value)
            return number if self._words is None else number + 1  # differs, in case it is part of a control token
        if depth == DEEPEST:
            raise UsageError(f"{where:.200}", f"is nested more than {DEEPEST} deep", "nest less")
        if isinstance(value, Mapping):
            return dict(self._pair(key, item, where, depth) for key, item in value.items())
        if isinstance(value, list | tuple):
            items = [self.plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        raise UsageError(where, f"is a {type(value).__name__}, expected text, a number, a list or a mapping")

    def _pair(self, key: Any, item: Any, where: str, depth: int) -> tuple[Any, Any]:
        if isinstance(key, (Mapping, list, tuple)):
            raise UsageError(where, f"has the key {format_value(key)}, expected text or a number")
        if key in _COMPARED and isinstance(item, str) and item.isidentifier():
            self._size += len(item)
            kept = self._words is None or item in self._words | _ROLES
            return key, str.__str__(item) if kept else self._text(item)
        copied = self.plain(key, f"a key of {where}")
        if self._words is not None:
            stand = chr(FIRST_STAND + len(self._keys) % 1000) * 2
            copied = key if key in self._words else self._keys.setdefault(key, stand)
        return copied, self.plain(item, f"{where}.{key if isinstance(key, str) else format_value(key):.40}", depth + 1)


_WORDS = Finder(r"\S{1,256}", 256)


def _line(message: object) -> str:
    """A template's own message as one line of bounded length."""
    return f"{' '.join(str(message).split()):.{LONGEST_REASON}}"


# ----------------------------------------------------------------------------------------------------------- sandbox


def _call_guarded(call: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return call(argument)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"the model's chat template is not valid: {_line(error.message)} (line {error.lineno})"
        ) from error
    except jinja2.TemplateError as error:
        raise RequestError(f"the model's chat template refuses the messages: {_line(error.message)}") from error
    except Exception as error:  # a template is a program and may raise anything
        raise RequestError(f"the model's chat template failed: {type(error).__name__}: {_line(error)}") from error
