"""Chat templates are programs from strangers: what they do is bounded, and what they may do is what jinja does."""

import jinja2.sandbox
import pytest

from llmc.errors import RequestError
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.sandbox import LONGEST_SOURCE, to_json, weight

MESSAGES = [{"role": "user", "content": "hello world"}]


def render(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(MESSAGES)


def grown(step: str, start: str = "'a'*1000", rounds: int = 40) -> str:
    """A template whose value x becomes ``step`` again and again."""
    return (
        f"{{% set ns = namespace(x={start}, y={start}) %}}{{% for i in range({rounds}) %}}"
        f"{{% set ns.x = {step} %}}{{% set ns.y = {step.replace('ns.x', 'ns.y')} %}}{{% endfor %}}"
    )


PAIRS, TUPLES = grown("[ns.x, ns.x]", "[1]"), grown("(ns.x, ns.x)", "(1,)")
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "macro": "{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "literal": "{% for a in range(90000) %}" + "x" * 10000 + "{% endfor %}",
    "literal in a macro": "{% macro m() %}" + "x" * 10000 + "{% endmacro %}"
    "{% for a in range(90000) %}{% set x = m() %}{% endfor %}",
    "block": "{% set ns=namespace(x='a'*1000) %}{% for i in range(40) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x=y %}{% endfor %}",
    "filtered block": "{% filter replace('a', 'b'*1000) %}{{ 'a'*10000 }}{% endfilter %}",
    "plus": grown("ns.x + ns.x"),
    "tilde": grown("ns.x ~ ns.x"),
    "times": "{{ 'x' * 10**10 }}",
    "list times": "{{ [1] * 10**9 }}",
    "list plus": grown("ns.x + ns.x", "[1]"),
    "format": grown("'{0}{0}'.format(ns.x)"),
    "format_map": grown("'{x}{x}'.format_map({'x': ns.x})"),
    "percent": grown("'%s%s' % (ns.x, ns.x)"),
    "format filter": grown("'%s%s' | format(ns.x, ns.x)"),
    "replace": grown("ns.x.replace('a', 'aa')"),
    "replace filter": grown("ns.x | replace('a', 'aa')"),
    "join": grown("''.join([ns.x, ns.x])"),
    "join filter": grown("[ns.x, ns.x] | map('upper') | join"),
    "urlencode": grown("ns.x | urlencode", "'%'*1000"),
    "slices": grown("[ns.x, messages[0].content * 9999, ('a' * 300000)[1:]]", "[]", 9999),
    "numbers": "{{ 9**99999 }}",
    "products": grown("ns.x * ns.x", "3"),
    "sums": grown("ns.x + ns.x", "3", 6000),
    "digits": "{{ ('f' * 1000000) | int(base=16) }}",
    "sum of lists": "{{ ([[1] * 1000] * 10000) | sum(start=[]) | length }}",
    "nested text": PAIRS + "{{ ns.x }}",
    "nested json": PAIRS + "{{ ns.x | tojson }}",
    "nested filter": PAIRS + "{{ ns.x | upper }}",
    "nested map": PAIRS + "{{ [ns.x] | map('string') | first }}",
    "nested equality": PAIRS + "{{ ns.x == ns.y }}",
    "nested test": PAIRS + "{{ ns.x is eq(ns.y) }}",
    "nested select": PAIRS + "{{ [ns.x] | select('eq', ns.y) | list }}",
    "nested sort": PAIRS + "{{ [ns.x, ns.y] | sort }}",
    "nested index": PAIRS + "{{ [ns.x].index(ns.y) }}",
    "nested change": PAIRS + "{% for i in [0, 1] %}{{ loop.changed(ns.x if i else ns.y) }}{% endfor %}",
    "nested message": PAIRS + "{{ raise_exception(ns.x) }}",
    "nested key": TUPLES + "{{ {ns.x: 1} }}",
    "nested get": TUPLES + "{{ messages[0].get(ns.x) }}",
    "nested member": TUPLES + "{{ ns.x in messages[0] }}",
    "nested dict": TUPLES + "{{ dict([(ns.x, 1)]) }}",
    "nested unique": TUPLES + "{{ [ns.x] | unique | list }}",
    "search": "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{{ 'b' in x }}{% endfor %}",
    "find": "{% set x = 'a' * 1000000 %}{% for i in range(90000) %}{{ x.find('b') }}{% endfor %}",
    "arguments": "{% macro m() %}{{ varargs }}{% endmacro %}"
    "{% for i in range(9999) %}{{ m(*range(9999)) }}{% endfor %}",
    "date": "{{ strftime_now('%c' * 1000) }}",
    **{
        call: f"{{{{ {call} }}}}"
        for call in (
            "'a' | center(10**9)",
            "'a'.center(10**9)",
            "'a'.ljust(10**9)",
            "'a'.zfill(10**9)",
            "'\t'.expandtabs(10**9)",
            "'{:1000000000}'.format(1)",
            "'{:{}}'.format(1, 10**9)",
            "'{:{x[w]}}'.format(1, x={'w': 10**9})",
            "'{a:{b}}'.format_map({'a': 1, 'b': 10**9})",
            "('{:1000000000}' | safe).format(1)",
            "'%1000000000d' % 1",
            "'%*d' % (10**9, 1)",
            "'%.1000000000f' % 1",
            "'%(a)1000000000d' % {'a': 1}",
            "('a\n' * 1000) | indent(10**7)",
            "('a\n' * 1000) | indent('x' * 100000)",
            "[1] | batch(10**9, 'x') | list",
            "[1] | slice(10**9) | list",
            "1.5 | round(10**8)",
            "messages | tojson(indent=10**8)",
            "messages | tojson(false, 10**8)",
            "range(10000) | list | tojson(separators=['x' * 100000, 'y'])",
            *(f"('a' * 900000).{name}('ab' ~ 'a' * 400000)" for name in ("rfind", "rindex", "rsplit", "rpartition")),
            "('a' * 900000).rsplit(sep='ab' ~ 'a' * 400000)",
            *(f"('\\u1234' * 600000).{name}('\\u3456' * 600000)" for name in ("strip", "lstrip", "rstrip")),
            "('a' * 900000) | trim('b' * 900000)",
            "range(100000) | map(attribute='a.' * 40000 ~ 'a', default=1) | list",
            "range(100000) | groupby('a.' * 40000 ~ 'a')",
            "range(100000) | list | sort(false, false, 'a.' * 40000 ~ 'a')",
        )
    },
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_templates_that_work_without_end_are_refused(source: str):
    with pytest.raises(RequestError, match=r"chat template does what no template needs: it .*; mend it, or"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a b' | wordwrap(1) }}",
        "{{ 'a' | urlize }}",
        "{{ lipsum(10**6) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        "{{ ('a' * 100000).translate({97: 'x' * 100000}) }}",
        "{{ 'a'.encode('utf-32') }}",
        "{{ (messages | map('upper')).send(1) }}",
    ],
)
def test_what_cannot_be_counted_is_refused(source: str):
    with pytest.raises(RequestError, match="chat template"):
        render(source)


@pytest.mark.parametrize("source", ["{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}", PAIRS + "{{ ns }}"])
def test_a_namespace_does_not_show_what_it_holds(source: str):
    assert render(source) == "<Namespace>"


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", "{% if 1 %}" * 900 + "{% endif %}" * 900]
)
def test_sources_that_nest_without_end_are_refused(source: str):
    with pytest.raises(RequestError, match="chat template failed: RecursionError"):
        render(source)


def test_sources_without_end_are_refused():
    with pytest.raises(RequestError, match="it has 100,001 characters, at most 100,000 are expected"):
        render("a" * (LONGEST_SOURCE + 1))


def test_long_messages_give_a_template_as_much_to_do():
    source = "{% for message in messages %}{{ (message.content ~ '') | trim | replace('a', 'b') }}{% endfor %}"
    messages = [{"role": "user", "content": "a" * 10_000}] * 400
    assert len(ChatTemplate({"default": source}, {}).render(messages)) == 4_000_000


def test_a_list_that_is_held_twice_weighs_twice():
    inner = ["ab", {"c": (1, None)}]
    assert weight([inner, inner]) == 1 + 2 * weight(inner) == 1 + 2 * (1 + 3 + 1 + 2 + 1 + 2)


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
