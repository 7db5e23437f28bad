"""llama.cpp's grammars: against a matcher written for the purpose, and by what their guide says."""

from random import Random
from typing import Any

import pytest

from llmc.errors import GrammarError
from llmc.runtime.guided.gbnf import read_gbnf
from llmc.runtime.guided.lexemes import to_lark

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
        return ("set", random.choice(["a", "b", "c", "ab", "bc", "abc"]))
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
    @pytest.mark.parametrize("seed", range(40))
    def test_is_that_of_the_rules(self, byte_level: Any, seed: int) -> None:
        random = Random(seed)
        names = ["root", "x", "y-1"]
        rules = {name: random_tree(random, names) for name in names}
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
        assert found == expected, grammar
