"""Rules of a context-free grammar in llguidance's dialect of Lark, whose lexer is greedy.

The lexer takes the longest lexeme and never looks back: with ``("b" | "bc") "c"`` as two lexemes, ``bc`` would not be
found. So a grammar without recursion becomes a single lexeme, which has exactly its texts. In others the largest parts
without recursion are lexemes: every output is one of the grammar's, but one that needs a shorter lexeme is not found.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping

from llmc.errors import GrammarError
from llmc.runtime.guided.gbnf import (
    Characters,
    Choice,
    Node,
    Reference,
    Repetition,
    Sequence,
    children,
    references,
)
from llmc.runtime.guided.patterns import MOST_REPETITIONS


def to_lark(rules: Mapping[str, Node]) -> str:
    """The grammar of ``rules`` from ``root`` on.

    Raises:
        GrammarError: repetitions multiply to too many, or no text has an end.
    """
    used = _reachable(rules)
    if "root" not in _find_names(used, _ends):
        raise GrammarError("grammar: it allows no text: all that 'root' derives goes on without an end")
    flat = _find_names(used, _names_only)
    _check_repetitions(used, flat)
    return "\n".join(_Text(used, flat).lines) + "\n"


def _reachable(rules: Mapping[str, Node]) -> dict[str, Node]:
    found, waiting = {"root": rules["root"]}, ["root"]
    while waiting:
        for name in references(rules[waiting.pop()]) - found.keys():
            found[name] = rules[name]
            waiting.append(name)
    return found


def _find_names(rules: Mapping[str, Node], holds: Callable[[Node, Container[str]], bool]) -> dict[str, None]:
    """The smallest set of rules of which ``holds`` is true, given that set; each after those that it needs."""
    found: dict[str, None] = {}
    before = -1
    while before < len(found):
        before = len(found)
        for name in (*rules, *list(rules)[::-1]):
            if name not in found and holds(rules[name], found):
                found[name] = None
    return found


def _names_only(node: Node, names: Container[str]) -> bool:
    return all(name in names for name in references(node))


def _ends(node: Node, ending: Container[str]) -> bool:
    """True if a text of the node has an end."""
    return isinstance(node, Characters) or _derives(node, ending, _ends)


def _may_be_empty(node: Node, empty: Container[str]) -> bool:
    return node.lark == '""' if isinstance(node, Characters) else _derives(node, empty, _may_be_empty)


def _derives(node: Node, names: Container[str], holds: Callable[[Node, Container[str]], bool]) -> bool:
    if isinstance(node, Reference):
        return node.name in names
    if isinstance(node, Repetition) and (node.least == 0 or node.most == 0):
        return True
    return (any if isinstance(node, Choice) else all)(holds(part, names) for part in children(node))


def _check_repetitions(rules: Mapping[str, Node], flat: Iterable[str]) -> None:
    largest: dict[str, int] = {}

    def of(node: Node) -> int:
        if isinstance(node, Reference):
            return largest.get(node.name, 1)
        below = max(map(of, children(node)), default=1)
        return below * max(1, node.least, node.most or 0) if isinstance(node, Repetition) else below

    for name in (*flat, *rules):
        largest[name] = max(largest.get(name, 1), of(rules[name]))
        if largest[name] > MOST_REPETITIONS:
            raise GrammarError(
                f"grammar: rule {name!r} repeats something {largest[name]} times, expected at most {MOST_REPETITIONS}"
            )


def _is_word(node: Node) -> bool:
    """True for some characters one after the other, of which a grammar may have thousands side by side."""
    return isinstance(node, Characters) or (isinstance(node, Sequence) and all(map(_is_word, node.parts)))


class _Text:
    """Rules in Lark's notation: parts without recursion are terminals, in capitals."""

    def __init__(self, rules: Mapping[str, Node], flat: Container[str]) -> None:
        self._rules, self._flat = rules, flat
        self._empty = _find_names(rules, _may_be_empty)
        self._names = {name: f"r{number}" for number, name in enumerate(rules) if name not in flat}
        self._terminals: dict[str | Node, str] = {}
        self._waiting: deque[tuple[str, Node]] = deque()
        self.lines = [f"start: {self._of(Reference('root'))}"]
        self.lines += [f"{label}: {self._of(rules[name])}" for name, label in self._names.items()]
        while self._waiting:
            label, node = self._waiting.popleft()
            self.lines.append(f"{label}: {self._of(node, True)}")

    def _of(self, node: Node, terminal: bool = False) -> str:
        if not terminal and _names_only(node, self._flat):
            label = self._terminal(node)
            return f"({label})?" if _may_be_empty(node, self._empty) else label
        if isinstance(node, Characters):
            return node.lark
        if isinstance(node, Reference):
            return self._terminal(node) if terminal else self._names[node.name]
        if isinstance(node, Sequence):
            return " ".join(self._of(part, terminal) for part in node.parts) or '""'
        if isinstance(node, Repetition):
            return self._repetition(node, terminal)
        return f"({' | '.join(self._of(part, terminal) for part in self._options(children(node), terminal))})"

    def _terminal(self, node: Node) -> str:
        key = node.lark if isinstance(node, Characters) else node.name if isinstance(node, Reference) else node
        if key not in self._terminals:
            self._terminals[key] = f"T{len(self._terminals)}"
            self._waiting.append(
                (self._terminals[key], self._rules[node.name] if isinstance(node, Reference) else node)
            )
        return self._terminals[key]

    def _options(self, parts: tuple[Node, ...], terminal: bool) -> tuple[Node, ...]:
        """The parts of a choice, words as one beside parts with recursion."""
        words = () if terminal else tuple(filter(_is_word, parts))
        return (Choice(words), *(part for part in parts if not _is_word(part))) if words else parts

    def _repetition(self, node: Repetition, terminal: bool) -> str:
        if node.most == 0:
            return '""'
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        counts = bounds.get((node.least, node.most)) or f"{{{node.least},{'' if node.most is None else node.most}}}"
        return f"({self._of(node.part, terminal)}){counts}"
