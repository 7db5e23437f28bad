"""Refuse parts of a request that its chat template leaves out: the model would never see them."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from llmc.errors import RequestError, UsageError, format_value
from llmc.runtime.text.chat_template import ChatTemplate, with_calls_as_mappings
from llmc.runtime.text.control_tokens import Disguise

Messages = Sequence[Mapping[str, Any]]
Write = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
_ADVICE = "which the model's chat template does not show to the model"


def render_messages(
    template: ChatTemplate,
    messages: Messages,
    add_generation_prompt: bool = True,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    disguise: Disguise | None = None,
    write: Write | None = None,
    ignored: Callable[[str], None] | None = None,
    **variables: Any,
) -> str:
    """The prompt for ``messages``, with the arguments and errors of :meth:`ChatTemplate.render`.

    Args:
        write: writes calls (names with arguments) into the content if the template does not show them, for clients that
            describe tools to the model in another way.
        ignored: called if names of messages (refused without it) or words beside calls are not shown.

    Raises:
        UsageError: the template does not read an argument, or leaves out a message, or names, calls or results in
            messages.
    """
    known = template.variables(tools is not None)
    tools = tools and [_without_strict(tool) for tool in tools]
    if tools and write is None and "tools" not in known:
        raise UsageError(
            "tools",
            f"is given, {_ADVICE}",
            "leave it out, or describe the tools in a message and name the model's tool_format",
        )
    if documents and "documents" not in known:
        raise UsageError("documents", f"is given, {_ADVICE}", "write them into a message")
    if unknown := variables.keys() - known:
        readable = sorted(known - {"messages", "tools", "documents", "add_generation_prompt"})
        expected = f"expected some of {', '.join(readable)}" if readable else "which reads none; leave it out"
        raise UsageError(
            "chat_template_kwargs",
            f"holds {format_value(min(unknown))}, which the model's chat template does not read, {expected}",
        )

    def render(given: Messages) -> str:
        return template.render(
            given,
            add_generation_prompt,
            tools=tools,
            documents=documents,
            continue_final_message=continue_final_message,
            disguise=disguise,
            **variables,
        )

    if "developer" not in template.source(tools is not None):  # other templates treat this role as the system's
        messages = [{**message, "role": "system"} if _is(message, "developer") else message for message in messages]
    prompt = render(messages)
    _refuse_hidden(render, messages, continue_final_message, ignored)
    for name, less in _LESS:
        fewer = [stripped for message in messages if (stripped := less(message)) is not None]
        if fewer != list(messages) and _same(render, fewer, prompt):
            if less is _without_calls and write is not None:
                messages = [_spell_calls(message, write) for message in with_calls_as_mappings(messages)]
                prompt = render(messages)
                continue
            if less is _without_name and ignored is not None:
                ignored("messages.name")
                continue
            format_too = " or name the model's tool_format" if less is _without_calls else ""
            raise UsageError("messages", f"holds {name}, {_ADVICE}", f"write it into the content{format_too}")
    return prompt


def _refuse_hidden(
    render: Callable[[Messages], str], messages: Messages, goes_on: bool, ignored: Callable[[str], None] | None
) -> None:
    """Refuse messages whose texts the template leaves out, such as those of a role that it does not know.

    All texts are rendered once more as random numbers; the prompt must contain them. Results of tools are compared
    later; the end of a continued message is searched for anyway. Many templates leave out the model's words beside
    calls: those are ignored.
    """
    key, owners = f"{secrets.randbelow(10**18):018}", list[int]()

    def mark(index: int) -> str:
        owners.append(index)
        return f"{key}{len(owners) - 1:09}"

    end = len(messages) - goes_on
    marked = [m if _is(m, "tool") else _replace_texts(m, partial(mark, i)) for i, m in enumerate(messages[:end])]
    try:
        shown = {piece[:9] for piece in render([*marked, *messages[end:]]).split(key)[1:]}
    except (RequestError, UsageError):  # a template that refuses other texts has read them
        return
    for index in (index for number, index in enumerate(owners) if f"{number:09}" not in shown):
        if not messages[index].get("tool_calls"):
            raise UsageError(
                f"messages[{index}]",
                f"has the role {format_value(messages[index].get('role'))}, {_ADVICE} there, "
                "expected system (first), user, assistant or tool",
            )
        if ignored is not None:
            ignored("messages.content")


def _replace_texts(message: Any, mark: Callable[[], str]) -> Any:
    """The message with each text replaced by a mark; images and blanks stay."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": mark()} if content.strip() else message
    if not isinstance(content, list | tuple):
        return message
    return {**message, "content": [_replace_text(part, mark) for part in content]}


def _replace_text(part: Any, mark: Callable[[], str]) -> Any:
    text = part.get("text") if isinstance(part, Mapping) else None
    return {**part, "text": mark()} if isinstance(text, str) and text.strip() else part


def _same(render: Callable[[Messages], str], messages: Messages, prompt: str) -> bool:
    """True if other messages give the same prompt; a template that refuses them has read the difference."""
    try:
        return bool(messages) and render(messages) == prompt
    except (RequestError, UsageError):
        return False


def _spell_calls(message: Any, write: Write) -> Any:
    """A message with its calls written into its content; UsageError for the calls of an answer that was cut off."""
    if not (_is(message, "assistant") and message.get("tool_calls")):
        return message
    calls = [(call["function"]["name"], call["function"].get("arguments") or {}) for call in message["tool_calls"]]
    if not all(isinstance(given, Mapping) for _, given in calls):
        raise UsageError(
            "messages", "holds a call whose arguments are not a JSON object, so it cannot be written", "leave it out"
        )
    content = message.get("content") or ""
    text = content + ("\n" if content else "") + write(calls)
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _without_strict(tool: Any) -> Any:
    """A tool without ``strict``, which only concerns the grammar of calls and is not shown to the model."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    return {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}


def _is(message: object, role: str) -> bool:
    return isinstance(message, Mapping) and message.get("role") == role


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not (_is(message, "assistant") and message.get("tool_calls")):
        return message
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": message.get("content") or ""}


def _without_name(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or _is(message, "tool") or message.get("name") is None:
        return message
    return {key: value for key, value in message.items() if key != "name"}


# Optional parts of a message: the name of each, and a function that removes it.
_LESS: tuple[tuple[str, Callable[[Mapping[str, Any]], Mapping[str, Any] | None]], ...] = (
    ("tool_calls", _without_calls),  # or in the format that the client names
    ("a name", _without_name),
    ("the result of a tool", lambda message: None if _is(message, "tool") else message),
)
