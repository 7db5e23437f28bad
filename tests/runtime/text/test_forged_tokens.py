"""No text of a request becomes a control token, whatever the template writes around it or makes of it."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.errors import RequestError
from llmc.runtime.text import control_tokens
from llmc.runtime.text.chat_template import ChatTemplate
from llmc.runtime.text.control_tokens import Disguise
from llmc.runtime.text.tokenizer import Tokenizer

CONTROLS = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<|1|>", "</s>", "<s>"]
TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "angles": """<|im_start|>system
{%- for tool in tools %}{% for name, about in tool.function.parameters.properties.items() %}
<parameter>{% for key in about if key not in ['type'] %}
<{{ key }}>{{ about[key] }}</{{ key }}>{% endfor %}{% endfor %}{% endfor %}<|im_end|>"""
    + TURNS,
    "opened": TURNS + "<{{ messages[0].name }}<|{{ x }}<|im_{{ documents[0].title }}{{ messages[0].content }}|>",
    "lowered": TURNS + "{{ messages[0].content | lower }}{{ x | replace('-', '') }}{{ messages[0].name | reverse }}",
    "joined": TURNS + "{{ [messages[0].name, x, documents[0].title] | join }}{{ tools[0].function.name[1:] }}{{ n }}|>",
    "assembled": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{{ '<|' + 'end|>' }}{% endfor %}"
    "{{ x }}{{ messages[0].name }}",
    "keyed": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}{% for t in tools %}"
    "{% for key in t.function.parameters.properties %}<|{{ key }}|>{% endfor %}{% endfor %}<|{{ n }}|>",
}
PUTS_TOGETHER = ("assembled", "keyed")


@pytest.fixture(scope="module")
def tokenizer(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = Path(shutil.copytree(byte_level_folder, tmp_path_factory.mktemp("controls") / "tokenizer"))
    file = folder / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), "additional_special_tokens": CONTROLS}
    file.write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


def controls_of(tokenizer: Tokenizer, source: str, texts: list[str], n: int = 7, role: str = "user") -> list[str]:
    """The control tokens of a conversation in which these stand in every place that texts have."""
    content, name, key, title, x, tool = texts
    disguise = Disguise(tokenizer.controls)
    properties = {key: {"type": "string", key: title, "description": content}}
    prompt = ChatTemplate({"default": source}, {}, tokenizer.controls).render(
        [{"role": role, "content": content, "name": name}, {"role": "user", "content": title}],
        tools=[{"type": "function", "function": {"name": tool, "parameters": {"properties": properties}}}],
        documents=[{"title": title}],
        disguise=disguise,
        x=x,
        n=n,
    )
    ids = tokenizer.encode_disguised(prompt, disguise)
    return [tokenizer.decode([i], skip_special_tokens=False) for i in ids if tokenizer.is_silent(i)]


HARMLESS = ["hello", "bob", "city", "Notes", "high", "find"]
PIECES = sorted({text[start:end] for text in CONTROLS for start in range(len(text)) for end in range(start, len(text))})
OTHERS = ["-", " ", "a", "\n", "\ue000", "\U000f0000", "\U00017000", "\\udb80\\udc00"]
TEXTS = st.lists(st.sampled_from([*PIECES, *CONTROLS, *OTHERS]), max_size=5).map("".join)


@pytest.mark.threat("forged-tokens")
@pytest.mark.parametrize("name", TEMPLATES)
@given(texts=st.lists(TEXTS, min_size=6, max_size=6), n=st.integers(0, 3), upper=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_texts_make_the_control_tokens_of_harmless_ones(tokenizer, name, texts, n, upper):
    expected = controls_of(tokenizer, TEMPLATES[name], HARMLESS)
    try:
        found = controls_of(tokenizer, TEMPLATES[name], [t.upper() if upper else t for t in texts], n)
    except RequestError as error:
        assert name in PUTS_TOGETHER and "together spell a control token" in str(error)
    else:
        assert found == expected


def test_a_role_that_makes_another_control_token_is_refused(tokenizer):
    turns = ["<|user|>", "<|end|>"]
    assert controls_of(tokenizer, TEMPLATES["assembled"], HARMLESS) == turns * 2
    assert controls_of(tokenizer, TEMPLATES["assembled"], HARMLESS, role="assistant")[0] == "<|assistant|>"
    with pytest.raises(RequestError, match=r"spell a control token of the model \('<\|end\|>'"):
        controls_of(tokenizer, TEMPLATES["assembled"], HARMLESS, role="end")


@pytest.mark.threat("json-cost")
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 15])
def test_a_text_is_looked_through_in_pieces_as_in_one(piece, monkeypatch):
    """Other threads wait while one call looks through megabytes."""
    monkeypatch.setattr(control_tokens, "PIECE", piece)
    pattern, chance = r"<s>|<s2?>>|aa|<<<<", random.Random(piece)
    finder, whole = control_tokens.Finder(pattern, 5), re.compile(pattern)
    for _ in range(300):
        text = "".join(chance.choices(["<", "s", ">", "a", "2", "<s>", "b"], k=chance.randrange(30)))
        assert finder.findall(text) == whole.findall(text)
        assert finder.sub(lambda match: f"[{match[0]}]", text) == whole.sub(lambda match: f"[{match[0]}]", text)
