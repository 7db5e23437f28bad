"""llama.cpp's grammars: against a matcher written for the purpose, and by what their guide says."""

from random import Random
from typing import Any

import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.gbnf import to_lark

Tree = tuple[Any, ...]
LONGEST = 5


class Matcher:
    """The texts that rules derive, by the definition: least sets of ends for every rule and start."""

    def __init__(self, rules: dict[str, Tree], text: str) -> None:
        self.rules, self.text = rules, text
        self.known: dict[tuple[str, int], frozenset[int]] = {}

    def matches(self) -> bool:
        while True:
            before = dict(self.known)
            for name, tree in self.rules.items():
                for start in range(len(self.text) + 1):
                    self.known[name, start] = self.ends(tree, start)
            if before == self.known:
                return len(self.text) in self.known["root", 0]

    def ends(self, tree: Tree, start: int) -> frozenset[int]:
        kind, *rest = tree
        if kind == "set":
            return frozenset({start + 1} if self.text[start : start + 1] and self.text[start] in rest[0] else ())
        if kind == "rule":
            return self.known.get((rest[0], start), frozenset())
        if kind == "choice":
            return frozenset().union(*(self.ends(part, start) for part in rest))
        if kind == "sequence":
            found = frozenset({start})
            for part in rest:
                found = frozenset().union(*(self.ends(part, end) for end in found))
            return found
        part, least, most = rest
        found, reached = (frozenset({start}) if least == 0 else frozenset()), frozenset({start})
        for count in range(1, (most if most is not None else least + len(self.text) + 1) + 1):
            reached = frozenset().union(*(self.ends(part, end) for end in reached))
            found |= reached if count >= least else frozenset()
        return found


def random_tree(random: Random, names: list[str], depth: int = 0) -> Tree:
    kind = random.choice(["set", "set", "rule", "sequence", "choice", "repetition"] if depth < 3 else ["set", "rule"])
    if kind == "set":
        letters = random.choice(["a", "b", "c", "ab", "bc", "abc"])
        return ("set", letters) if random.random() < 0.6 else ("sequence", *(("set", letter) for letter in letters))
    if kind == "rule":
        return ("rule", random.choice(names))
    if kind == "repetition":
        counts = random.choice([(0, 1), (0, None), (1, None), (2, 2), (0, 2), (1, 3), (0, 0), (2, None)])
        return ("repetition", random_tree(random, names, depth + 1), *counts)
    parts = [random_tree(random, names, depth + 1) for _ in range(random.randint(1, 3))]
    return (kind, *parts) if random.random() < 0.95 else (kind, ("sequence",), *parts)


def written(tree: Tree) -> str:
    kind, *rest = tree
    if kind == "set":
        return f'"{rest[0]}"' if len(rest[0]) == 1 else f"[{rest[0]}]"
    if kind == "rule":
        return str(rest[0])
    if kind == "repetition":
        part, least, most = rest
        signs = {(0, 1): "?", (0, None): "*", (1, None): "+", (2, 2): "{2}", (2, None): "{2,}"}
        return f"({written(part)}){signs.get((least, most), f'{{{least},{most}}}')}"
    return f"({(' | ' if kind == 'choice' else ' ').join(map(written, rest))})"


TEXTS = [""]
for _ in range(LONGEST):
    TEXTS += [text + letter for text in TEXTS if len(text) == len(TEXTS[-1]) for letter in "abc"]


class TestLanguage:
    @pytest.mark.threat("gbnf")
    @pytest.mark.parametrize("seed", range(30))
    def test_is_that_of_the_rules_or_with_recursion_a_part_of_it(self, byte_level, seed):
        random = Random(seed)
        names = ["root", "x", "y-1"]
        rules = {name: random_tree(random, names) for name in names}
        if seed % 2:  # with recursion for certain, so that lexemes stand beside each other
            parts = [random_tree(random, ["x"], 1) for _ in range(3)]
            rules = {
                "root": ("choice", parts[0], ("sequence", parts[1], ("rule", "root"), parts[2])),
                "x": random_tree(random, ["x"]),
            }
        grammar = "\n".join(f"{name} ::= {written(tree)}" for name, tree in rules.items())
        texts = random.sample(TEXTS, 60)
        expected = {text for text in texts if Matcher(rules, text).matches()}
        try:
            byte_level.ask(grammar=grammar)
        except GrammarError as error:
            assert "allows no" in str(error)
            assert not expected, grammar
            return
        found = {text for text in texts if byte_level.reads(byte_level.start(grammar=grammar), text)}
        assert found <= expected and (seed % 2 or found == expected), grammar

    def test_notices_a_lexer_that_never_looks_back(self, byte_level):
        """The planted error: the lexemes as the grammar has them."""
        lark = 'start: (B | BC) "c"\nB: "b"\nBC: "bc"'
        assert not byte_level.reads(byte_level.start(grammar=lark), "bc")
        assert byte_level.reads(byte_level.start(grammar='root ::= ("b" | "bc") "c"'), "bc")

    def test_is_restricted_where_a_lexeme_beside_recursion_ends_early(self, byte_level):
        grammar = 'root ::= ("b" | "bc") ("c" | "(" root ")")'
        assert byte_level.reads(byte_level.start(grammar=grammar), "b(bcc)")
        assert not byte_level.reads(byte_level.start(grammar=grammar), "bc")


# A grammar, texts that it derives, and texts that it does not.
FORMS: list[tuple[str, list[str], list[str]]] = [
    ('root ::= ("b" | "bc") "c"', ["bc", "bcc"], ["b", "bccc"]),
    ('root ::= ("ab"* ("a" "b"))?', ["", "ab", "abab"], ["a", "aba"]),
    ('root ::= ("a"+)? "!"', ["!", "aa!"], ["a"]),
    ("root ::= ([x]*)* [y]", ["y", "xxy"], ["x"]),
    ("root ::= ([x]{2}){2}", ["xxxx"], ["xx", "xxx", "xxxxx"]),
    ('root ::= "a"{0} "b"{1,2} "c"{2,}', ["bcc", "bbccc"], ["abcc", "bc"]),
    (r"root ::= [a\-z] [^\x00-\x1f\]] [+-] [-a]", ["-a+-", "z!-a"], ["b!+-", "a]+-"]),
    ("root ::= . .", ["\n\n", "é🎉"], ["a"]),
    (r'root ::= "\"\\\[\]\n\r\t\x41\u00e9\U0001F389"', ['"\\[]\n\r\tAé🎉'], []),
    ("root ::= # the whole\n  (\n  x # one\n  |\n  y-Y_1\n) \r\nx ::= |\n[a]\ny-Y_1 ::= [b]", ["", "a", "b"], ["ab"]),
    ('root ::= "(" root ")" | word\nword ::= [a-z]+ ("if" | "i")', ["((xif))", "xi", "(iif)"], ["(xif", "f"]),
    ('root ::= root "+" term | term\nterm ::= [0-9]+', ["1+22+3"], ["+1", "1+"]),
    ('root ::= x\nx ::= "a" x | "b"\ny ::= "c" y', ["ab"], ["c"]),
]
REFUSED = [
    ("root ::= <think>", "'<think>' at line 1, column 10, expected characters, for tokens"),
    ('root ::= !<think>* "a"', "for tokens"),
    ("root ::= []", "expected a member of the class"),
    ("root ::= [z-a]", "expected a range that does not end below its start"),
    ("root ::= [a", "the end at line 1, column 12, expected ] that"),
    ('root ::= "a', "the end at line 1, column 12, expected a quote"),
    ('root ::= "a"{,2}', "'{,2}' at line 1, column 13, expected {2}, {2,} or {2,3}"),
    ('root ::= "a"{3,2}', "expected at least as many as the 3"),
    ('root ::= "a"{4000000000}', "expected {2}"),
    (r'root ::= "\ud800"', "expected a character"),
    (r"root ::= \d", "expected the end of the line"),
    (r"root ::= [\d]", "expected one of the escapes"),
    ('root ::= ("a"', "the end at line 1, column 14, expected )"),
    ('root ::= "a" )', "expected the end of the line"),
    ('root ::= "a"\nroot ::= "b"', "'root' is already"),
    ('root ::= "a"\nx', "expected ::="),
    ("root ::= " + "(" * 200, "at most 100 parentheses"),
    ('root ::= "a" root', "grammar allows no text"),
    ('root ::= x{200}\nx ::= y{100}\ny ::= "a"', "in the rule 'root' 20000 times, expected at most 16384"),
    ('root ::= "(" root ")" | x{200}\nx ::= "a"{100}', "repeats something in the rule 'root' 20000 times"),
]


class TestForms:
    @pytest.mark.parametrize(("grammar", "derived", "others"), FORMS)
    def test_mean_what_they_mean_in_llama_cpp(self, byte_level, grammar, derived, others):
        for text in derived:
            assert byte_level.reads(byte_level.start(grammar=grammar), text), text
        for text in others:
            assert not byte_level.reads(byte_level.start(grammar=grammar), text), text

    @pytest.mark.parametrize(("grammar", "message"), REFUSED, ids=[message for _, message in REFUSED])
    def test_are_refused_in_a_sentence(self, byte_level, grammar, message):
        with pytest.raises(GrammarError) as caught:
            byte_level.ask(grammar=grammar)
        assert message in str(caught.value)
        assert len(str(caught.value)) < 200

    def test_keep_lexemes_whole_where_the_lexer_can_tell_them_apart(self):
        """Masks over lexemes of one character take several times as long."""
        grammar = 'root ::= "[" (item ("," item)*)? "]"\nitem ::= root | string\nstring ::= "\\"" [^"]* "\\""'
        assert ': "\\"" (/[' in to_lark(grammar)
