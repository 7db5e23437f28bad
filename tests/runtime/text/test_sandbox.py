"""Chat templates are programs from strangers: what they may do is what jinja's sandbox does."""

import jinja2.sandbox
import pytest

from llmc.errors import RequestError
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.sandbox import LONGEST_SOURCE, to_json

MESSAGES = [{"role": "user", "content": "hello world"}]


def render(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(MESSAGES)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", "{% if 1 %}" * 900 + "{% endif %}" * 900]
)
def test_sources_that_nest_without_end_are_refused(source: str):
    with pytest.raises(RequestError, match="chat template failed: RecursionError"):
        render(source)


def test_sources_without_end_are_refused():
    with pytest.raises(RequestError, match="it has 100,001 characters, at most 100,000 are expected"):
        render("a" * (LONGEST_SOURCE + 1))


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}{% endfor %}",
        "{% for x in 'abc' | map('upper') %}{{ loop.revindex }}{{ x }}{% else %}none{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{{ loop.depth }}{% endfor %}",
        "{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ k }}{{ v }}{% endfor %}",
        "{% for x in missing %}{{ x }}{% endfor %}",
        "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{{ varargs }}{% endmacro %}"
        "{{ m(1) }}{% call m(3, 4, 5) %}x{% endcall %}",
        "{% set x %}a{{ 1 }}b{% endset %}{{ x | upper }}{% filter indent(2) %}a\nb{% endfilter %}",
        "{{ [1, 2][::-1] + [3] }}{{ (1, 2) + (3,) }}{{ 'abc'[1:] * 2 }}{{ [0] * 3 }}",
        "{{ 7 % 4 }}{{ 2 ** 10 - 1 }}{{ 7 // 2 }}{{ -1 + 2 }}",
        "{{ '%s: %5.2f%%' % ('a', 1.234) }}{{ '{} {:>4} {{}}'.format('a', 5) }}{{ '%d' | format(3) }}",
        "{{ 'a,b'.split(',') | join('-') }}{{ ', '.join(['a', 'b'] | map('title')) }}{{ 'a' ~ 1 ~ none }}",
        "{{ {'b': 1, 'a': [1, 2.5, none, true]} | dictsort }}",
        "{{ [3, 1, 2] | sort | first }}{{ [1, 1] | unique | list }}",
        "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'gt', 1) | map(attribute='a') | list }}{{ [1, 2] | sum }}",
        "{{ 'a' in 'abc' and 1 in [1] and 'k' in {'k': 1} }}{{ 1 < 2 < 3 }}",
        "{{ 'a' is in('abc') }}{{ 2 is divisibleby 2 }}",
        "{{ 'abc' | truncate(2, true, '.') }}{{ 'a' | center(5) }}",
        "{{ '4.7' | float | round | int }}{{ ' x '.strip().upper() }}",
        "{{ range(3) | list }}{{ cycler('a', 'b').next() }}{% set j = joiner() %}{{ j() }}{{ j() }}",
        "{{ [1, 2, 3] | batch(2) | list }}",
        "{{ missing | default('d') }}{{ missing is defined }}{{ messages | length }}",
        "{{ messages[0].content.startswith('hello') }}",
        "{% block a %}{{ messages[0]['role'] }}{% endblock %}{% autoescape true %}{{ '<' ~ '&' }}{% endautoescape %}",
        "{{ messages[0].content | wordcount }}{{ '&' | e }}",
        "{{ {'a': 1} | items | list }}{{ [[1, 2], [3]] | map('last') | list }}",
    ],
)
def test_templates_render_what_jinja_renders(source: str):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    assert render(source) == plain.from_string(source).render(messages=MESSAGES)


def test_json_is_not_escaped_for_html():
    assert to_json({"b": "<é>", "a": 1}, sort_keys=True) == '{"a": 1, "b": "<é>"}'
