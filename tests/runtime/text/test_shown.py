"""What a chat template does not show is refused, or written where it does."""

import time
from typing import Any

import pytest

from llmc.errors import UsageError
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.shown import render_messages
from llmc.runtime.tools.formats import writer

LINEAR_S = 3.0  # 0.3 s here; texts that are looked for one by one took 9 s
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
ABLE = """{% if tools %}{{ tools | tojson }}{% endif %}{% if documents %}{{ documents | tojson }}{% endif %}
{%- for message in messages %}{{ message.role }} {{ message.name }}: {{ message.content }}
{%- if message.tool_calls and tools %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}{{ mood }}"""
SILENT = "{% for message in messages if message.role != 'tool' %}{{ message }}{% endfor %}"
KNOWN = """{% for message in messages %}{% if message.role == 'system' and loop.first %}S: {{ message.content }}
{%- elif message.role in ('user', 'assistant') %}{{ message.role }}: {{ message.content | trim | upper }}{% endif %}
{%- endfor %}"""
LAST = "{% for message in messages[-1:] %}{{ message.content }}{% endfor %}"
FIRST = "{% for message in messages %}{{ message.content[0].text }}{% endfor %}"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SILENT_BESIDE = """{% for message in messages %}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% else %}
{{- message.content }}{% endif %}{% endfor %}"""
USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"x": 1}'}}
CALLED = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
TOOLS = [{"type": "function", "function": {"name": "now"}}]


def shown(source: str, *messages: dict[str, Any], **given: Any) -> str:
    return render_messages(ChatTemplate({"default": source}, {}), messages, **given)


@pytest.mark.parametrize(
    ("source", "messages", "given", "said"),
    [
        (PLAIN, [USER], {"tools": TOOLS}, "tools is given, which"),
        (PLAIN, [USER], {"documents": [{"text": "a"}]}, "documents is given, which"),
        (PLAIN, [USER], {"mood": 1}, "chat_template_kwargs holds 'mood', .* reads none"),
        (ABLE, [USER], {"message": 1}, "chat_template_kwargs holds 'message', .* some of mood"),
        (PLAIN, [{**USER, "name": "Ann"}], {}, "messages holds a name, which"),
        (PLAIN, [USER, CALLED], {}, "messages holds tool_calls, which .* name the model's tool_format"),
        (ABLE, [USER, CALLED], {}, "messages holds tool_calls, which"),  # which shows them beside tools alone
        (SILENT, [USER, CALLED, RESULT], {}, "messages holds the result of a tool, which"),
        (KNOWN, [{"role": "bot", "content": "a"}, USER], {}, r"messages\[0\] has the role 'bot', which"),
        (KNOWN, [USER, {"role": "function", "content": [{"type": "text", "text": "x"}]}], {}, r"messages\[1\] has"),
        (KNOWN, [USER, {"role": "system", "content": "a"}], {}, r"messages\[1\] has the role 'system'"),  # not first
        (KNOWN, [USER, {"content": "hello"}], {}, r"messages\[1\] has the role None"),
        (LAST, [USER, {"role": "assistant", "content": "a"}, USER], {}, r"messages\[0\] has"),  # "a" is shown, later
        (FIRST, [{"role": "user", "content": PARTS}], {}, r"messages\[0\] has the role 'user'"),
    ],
)
def test_what_a_template_leaves_out_is_refused(source, messages, given, said):
    with pytest.raises(UsageError, match=said):
        shown(source, *messages, **given)


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]], ids=["text", "parts"])
def test_developers_speak_as_the_system_where_a_template_knows_none(content):
    given = [{"role": "developer", "content": content}, USER]
    assert "Be brief." in shown(KNOWN.replace("message.content }}", "message.content | string }}"), *given)
    own = PLAIN + "{# developer #}"
    assert shown(own, *given).startswith("developer: ")


def test_texts_that_a_template_changes_are_shown():
    messages = [{"role": "user", "content": " shout "}, {"role": "assistant", "content": ""}]
    assert shown(KNOWN, *messages) == "user: SHOUTassistant: "


def test_what_it_shows_is_taken():
    messages = [{**USER, "name": "Ann"}, CALLED, RESULT]
    text = shown(ABLE, *messages, tools=TOOLS, documents=[{"text": "b"}], mood="merry")
    assert all(part in text for part in ("Ann", '"x": 1', "noon", "merry", '"b"'))


def test_calls_are_written_in_the_format_that_is_named():
    text = shown(PLAIN, USER, CALLED, RESULT, tools=TOOLS, write=writer("hermes"))
    assert 'assistant: so\n<tool_call>\n{"name": "now", "arguments": {"x": 1}}\n</tool_call>\ntool: noon' in text
    cut = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "now", "arguments": '{"x'}}]}
    with pytest.raises(UsageError, match="holds a call whose arguments are not a JSON object"):
        shown(PLAIN, USER, cut, write=writer("hermes"))


def test_words_beside_calls_may_be_left_out_as_llama_does_and_are_named():
    named: list[str] = []
    assert "so" not in shown(SILENT_BESIDE, USER, CALLED, RESULT, ignored=named.append)
    assert named == ["messages.content"]
    assert shown(SILENT_BESIDE, USER, CALLED, RESULT)


def test_long_conversations_are_compared_in_linear_time():
    messages = [{"role": "system" if i % 3 else "user", "content": f"text {i} " + "lorem " * 20} for i in range(20_000)]
    start = time.process_time()
    shown(PLAIN, *messages)
    assert time.process_time() - start < LINEAR_S
