"""Rules of a context-free grammar in llguidance's dialect of Lark, whose lexer is greedy, with the same outputs.

The lexer takes the longest lexeme and never looks back: with ``("b" | "bc") "c"`` as two lexemes, ``bc`` would not be
found. So a grammar without recursion becomes a single lexeme, and in others the largest parts without recursion do, as
long as no lexeme can go on with what may follow the end of another one that begins alike. Those that can are taken
apart into lexemes of one character, which leave the lexer no choice.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from llmc.errors import GrammarError
from llmc.runtime.guided.gbnf import (
    ANY,
    Characters,
    Choice,
    Lexeme,
    Node,
    Ranges,
    Reference,
    Repetition,
    Sequence,
    children,
    common,
    merged,
    references,
)
from llmc.runtime.guided.regexes import MOST_REPETITIONS

# Steps of looking for lexemes that get into each other's way; with more, those not yet looked at are taken apart.
_MOST_STEPS = 200_000
# What the name of a rule ends with in the form that is taken apart; no rule's own name can.
_APART = "!"


def to_lark(rules: Mapping[str, Node]) -> str:
    """The grammar whose outputs are those of ``rules`` from ``root`` on.

    Raises:
        GrammarError: repetitions multiply to too many, or no text has an end.
    """
    used = _reachable(_with_an_end(rules))
    flat = _without_recursion(used)
    _check_repetitions(used, flat)
    return _Translation(used, flat).text()


def _with_an_end(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules without what never ends, such as ``x ::= "a" x``: an output would get there and not go on."""
    ending = _ending(rules)
    if "root" not in ending:
        raise GrammarError("grammar: it allows no text: all that 'root' derives goes on without an end")

    def cut(node: Node) -> Node:
        if isinstance(node, Choice):
            return Choice(tuple(cut(part) for part in node.parts if _ends(part, ending)))
        if isinstance(node, Repetition) and not _ends(node.part, ending):
            return Sequence(())
        return _rebuilt(node, cut)

    return {name: cut(node) for name, node in rules.items() if name in ending}


def _ending(rules: Mapping[str, Node]) -> set[str]:
    """Names of the rules that derive a text with an end."""
    found: set[str] = set()
    users = _users(rules)
    waiting = dict.fromkeys(rules)
    while waiting:
        name, _ = waiting.popitem()
        if name not in found and _ends(rules[name], found):
            found.add(name)
            waiting.update(dict.fromkeys(users[name]))
    return found


def _ends(node: Node, ending: Collection[str]) -> bool:
    if isinstance(node, Characters):
        return bool(node.ranges)
    if isinstance(node, Reference):
        return node.name in ending
    if isinstance(node, Repetition) and (node.least == 0 or node.most == 0):
        return True
    return (any if isinstance(node, Choice) else all)(_ends(part, ending) for part in children(node))


def _users(rules: Mapping[str, Node]) -> dict[str, list[str]]:
    """Names of the rules that name each rule outside of lexemes."""
    found: dict[str, list[str]] = {name: [] for name in rules}
    for name, node in rules.items():
        for other in references(node):
            found[other].append(name)
    return found


def _reachable(rules: Mapping[str, Node]) -> dict[str, Node]:
    found, waiting = {"root": rules["root"]}, ["root"]
    while waiting:
        for name in references(rules[waiting.pop()]) - found.keys():
            found[name] = rules[name]
            waiting.append(name)
    return found


def _without_recursion(rules: Mapping[str, Node]) -> dict[str, None]:
    """Names of the rules that name no rule of a cycle, each after those that it names."""
    missing = {name: references(node) for name, node in rules.items()}
    users = _users(rules)
    found: dict[str, None] = {}
    waiting = [name for name, named in missing.items() if not named]
    while waiting:
        name = waiting.pop()
        found[name] = None
        for user in users[name]:
            missing[user].discard(name)
            if not missing[user]:
                waiting.append(user)
    return found


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


def _grouped(node: Node, flat: Mapping[str, None]) -> Node:
    """A part of a rule, its largest parts without recursion as lexemes."""
    if all(name in flat for name in references(node)):
        return Lexeme(node)
    if isinstance(node, Choice):
        words = tuple(part for part in node.parts if _is_word(part))
        others = (_grouped(part, flat) for part in node.parts if not _is_word(part))
        return Choice((*([Lexeme(Choice(words))] if words else ()), *others))
    return _rebuilt(node, lambda part: _grouped(part, flat))


def _is_word(node: Node) -> bool:
    """True for some characters one after the other, of which a grammar may have thousands side by side."""
    return isinstance(node, Characters) or (isinstance(node, Sequence) and all(map(_is_word, node.parts)))


def _lexemes(node: Node) -> Iterator[Lexeme]:
    if isinstance(node, Lexeme):
        yield node
    else:
        for part in children(node):
            yield from _lexemes(part)


def _rebuilt(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with its parts changed."""
    if isinstance(node, Sequence | Choice):
        return type(node)(tuple(map(change, node.parts)))
    return Repetition(change(node.part), node.least, node.most) if isinstance(node, Repetition) else node


# ------------------------------------------------------------------------------------------------ what begins and ends


class _Starts:
    """The characters with which the texts of a part begin, and whether one of them is empty."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._known: dict[str, tuple[Ranges, bool]] = dict.fromkeys(rules, ((), False))
        users = _users(rules)
        waiting = dict.fromkeys(rules)
        while waiting:
            name, _ = waiting.popitem()
            found = self.of(rules[name])
            if found != self._known[name]:
                self._known[name] = found
                waiting.update(dict.fromkeys(users[name]))

    def of(self, node: Node) -> tuple[Ranges, bool]:
        if isinstance(node, Characters):
            return node.ranges, False
        if isinstance(node, Reference):
            return self._known[node.name.removesuffix(_APART)]
        if isinstance(node, Sequence):
            return self.of_sequence(node.parts)
        parts = [self.of(part) for part in children(node)]
        first = merged([pair for ranges, _ in parts for pair in ranges])
        if isinstance(node, Repetition):
            return (() if node.most == 0 else first), node.least == 0 or parts[0][1]
        return first, any(empty for _, empty in parts)

    def of_sequence(self, parts: Iterable[Node]) -> tuple[Ranges, bool]:
        first: list[tuple[int, int]] = []
        for part in parts:
            ranges, empty = self.of(part)
            first += ranges
            if not empty:
                return merged(first), False
        return merged(first), True


@dataclass
class _Automaton:
    """The characters of a part that come first, last and after each other, repetitions taken as without an end."""

    empty: bool = True
    first: frozenset[Characters] = frozenset()
    last: frozenset[Characters] = frozenset()
    follows: list[tuple[frozenset[Characters], frozenset[Characters]]] = field(default_factory=list)
    rules: set[str] = field(default_factory=set)


class _Automata:
    """The automata of parts without recursion."""

    def __init__(self, rules: Mapping[str, Node], flat: Iterable[str]) -> None:
        self._rules: dict[str, _Automaton] = {}
        for name in flat:  # each after those that it names
            self._rules[name] = self._of(rules[name])

    def of(self, node: Node) -> tuple[_Automaton, dict[Characters, list[Characters]]] | None:
        """The automaton of a part, and what comes after each character within it; None if that would be too large."""
        own = self._of(node)
        pairs, names, waiting = list(own.follows), set(own.rules), list(own.rules)
        while waiting:
            below = self._rules[waiting.pop()]
            pairs += below.follows
            waiting += below.rules - names
            names |= below.rules
        if sum(len(ends) * len(starts) for ends, starts in pairs) > _MOST_STEPS:
            return None
        after: dict[Characters, dict[Characters, None]] = {}
        for ends, starts in pairs:
            for end in ends:
                after.setdefault(end, {}).update(dict.fromkeys(starts))
        return own, {end: list(starts) for end, starts in after.items()}

    def _of(self, node: Node) -> _Automaton:
        if isinstance(node, Characters):
            return _Automaton(False, frozenset((node,)), frozenset((node,)))
        if isinstance(node, Reference):
            known = self._rules[node.name]
            return _Automaton(known.empty, known.first, known.last, rules={node.name})
        parts = [self._of(part) for part in children(node)]
        if isinstance(node, Sequence):
            return _in_order(parts)
        if isinstance(node, Repetition) and node.most != 1:
            parts = [_in_order([*parts, *parts])] if node.most != 0 else []
        return _Automaton(
            any(part.empty for part in parts) or not parts or (isinstance(node, Repetition) and node.least == 0),
            frozenset().union(*(part.first for part in parts)),
            frozenset().union(*(part.last for part in parts)),
            [pair for part in parts for pair in part.follows],
            set().union(*(part.rules for part in parts)),
        )


def _in_order(parts: Iterable[_Automaton]) -> _Automaton:
    found = _Automaton()
    for part in parts:
        found.follows += [*part.follows, (found.last, part.first)]
        found.rules |= part.rules
        found.first |= part.first if found.empty else frozenset()
        found.last = found.last | part.last if part.empty else part.last
        found.empty = found.empty and part.empty
    return found


# ------------------------------------------------------------------------------------------------------- translation


class _Translation:
    def __init__(self, rules: Mapping[str, Node], flat: Mapping[str, None]) -> None:
        self._rules = rules
        self._flat = flat
        self._starts = _Starts(rules)
        self._automata = _Automata(rules, flat)
        self._bodies: dict[str, Node] = {}
        self._steps = 0

    def text(self) -> str:
        """The grammar in Lark's notation."""
        if "root" in self._flat:
            self._bodies = {"root": Lexeme(self._rules["root"])}
        else:
            named = {name: rule for name, rule in self._rules.items() if name not in self._flat}
            self._bodies = {name: _grouped(rule, self._flat) for name, rule in named.items()}
            while clashing := self._clashing():
                for name, body in list(self._bodies.items()):
                    self._bodies[name] = self._apart(body, clashing)
        return _Text(self._rules, self._bodies, self._starts).lines()

    def _apart(self, node: Node, clashing: Collection[Lexeme]) -> Node:
        if node not in clashing:
            return node if isinstance(node, Lexeme) else _rebuilt(node, lambda part: self._apart(part, clashing))
        part = children(node)[0]
        waiting = list(references(part))
        while waiting:
            name = waiting.pop()
            if name + _APART not in self._bodies:
                self._bodies[name + _APART] = self._single(self._rules[name])
                waiting.extend(references(self._rules[name]))
        return self._single(part)

    def _single(self, node: Node) -> Node:
        """A part without recursion, each character a lexeme."""
        if isinstance(node, Characters):
            return Lexeme(node)
        return Reference(node.name + _APART) if isinstance(node, Reference) else _rebuilt(node, self._single)

    def _clashing(self) -> set[Lexeme]:
        """Lexemes that can go on where one ends that is read from the same place, and something may follow that."""
        lexemes = [lexeme for body in self._bodies.values() for lexeme in _lexemes(body)]
        longer = {lexeme for lexeme in lexemes if not isinstance(lexeme.part, Characters)}
        found_automata = {lexeme: self._automata.of(lexeme.part) for lexeme in lexemes} if longer else {}
        automata = {lexeme: found for lexeme, found in found_automata.items() if found is not None}
        if len(automata) < len(lexemes) or len(lexemes) ** 2 > _MOST_STEPS:
            return longer
        order = _Order(self._bodies, self._starts)
        follow = {
            lexeme: merged([pair for after in afters for pair in self._starts.of(after.part)[0]])
            for lexeme, afters in order.follow.items()
        }
        found = set()
        waiting = {(one, other): None for one in order.root for other in order.root}
        seen = set(waiting)
        while waiting:
            (one, other), _ = waiting.popitem()
            meet, clash = self._compared(automata[one], automata[other], follow[one])
            if clash:
                found.add(other)
            if meet:
                after = {(a, b): None for a in order.follow[one] for b in order.follow[other] if (a, b) not in seen}
                seen.update(after)
                waiting.update(after)
            if self._steps > _MOST_STEPS:
                return longer
        return found

    def _compared(self, one: "_Found", other: "_Found", follow: Ranges) -> tuple[bool, bool]:
        """If both can end with the same text, and if the other can go on with ``follow`` where the one ends."""
        (ending, after_one), (longer, after_other) = one, other
        meet = clash = False
        self._steps += len(ending.first) * len(longer.first)
        if self._steps > _MOST_STEPS:
            return False, False
        waiting = {(a, b): None for a in ending.first for b in longer.first}
        seen = set(waiting)
        while waiting and self._steps <= _MOST_STEPS:
            (a, b), _ = waiting.popitem()
            if not common(a.ranges, b.ranges):
                continue
            next_b = after_other.get(b, ())
            self._steps += 1 + len(after_one.get(a, ())) * len(next_b)
            meet = meet or (a in ending.last and b in longer.last)
            clash = clash or (a in ending.last and any(common(c.ranges, follow) for c in next_b))
            pairs = {(c, d): None for c in after_one.get(a, ()) for d in next_b if (c, d) not in seen}
            seen.update(pairs)
            waiting.update(pairs)
        return meet, clash


_Found = tuple[_Automaton, dict[Characters, list[Characters]]]


class _Order:
    """The lexemes that come first in the rule ``root``, and those that come after each, in any place of the grammar."""

    def __init__(self, bodies: Mapping[str, Node], starts: _Starts) -> None:
        self._starts = starts
        self._firsts: dict[str, frozenset[Lexeme]] = dict.fromkeys(bodies, frozenset())
        self._afters: dict[str, frozenset[Lexeme]] = dict.fromkeys(bodies, frozenset())
        self.follow: dict[Lexeme, frozenset[Lexeme]] = {}
        users = _users(bodies)
        waiting = dict.fromkeys(bodies)
        while waiting:
            name, _ = waiting.popitem()
            first = self._first(bodies[name])
            if first != self._firsts[name]:
                self._firsts[name] = first
                waiting.update(dict.fromkeys(users[name]))
        self.root = self._firsts["root"]
        self._waiting = dict.fromkeys(bodies)
        while self._waiting:
            name, _ = self._waiting.popitem()
            self._walk(bodies[name], self._afters[name])

    def _first(self, node: Node) -> frozenset[Lexeme]:
        if isinstance(node, Lexeme):
            return frozenset((node,))
        if isinstance(node, Reference):
            return self._firsts[node.name]
        parts = children(node)
        if isinstance(node, Sequence):
            full = next((at for at, part in enumerate(parts) if not self._starts.of(part)[1]), len(parts))
            parts = parts[: full + 1]
        return frozenset().union(*map(self._first, parts))

    def _walk(self, node: Node, after: frozenset[Lexeme]) -> None:
        if isinstance(node, Lexeme):
            self.follow[node] = self.follow[node] | after if node in self.follow else after
        elif isinstance(node, Reference):
            if not after <= self._afters[node.name]:
                self._afters[node.name] |= after
                self._waiting[node.name] = None
        elif isinstance(node, Sequence):
            for part in reversed(node.parts):
                self._walk(part, after)
                after = self._first(part) | after if self._starts.of(part)[1] else self._first(part)
        else:
            if isinstance(node, Repetition) and node.most != 1:
                after |= self._first(node)
            for part in children(node):
                self._walk(part, after)


class _Text:
    """Rules with lexemes, written in Lark's notation: lexemes and the rules in them in capitals."""

    def __init__(self, rules: Mapping[str, Node], bodies: Mapping[str, Node], starts: _Starts) -> None:
        self._starts = starts
        self._rules = rules
        self._names = {name: f"r{number}" for number, name in enumerate(bodies)}
        self._terminals: dict[str, str] = {}
        self._lexemes: dict[str | Node | Ranges, tuple[str, Node]] = {}
        self._lines = [f"start: {self._names['root']}"]
        self._lines += [f"{self._names[name]}: {self._of(body)}" for name, body in bodies.items()]
        self._lines += [f"{name}: {self._of(part, True)}" for name, part in self._lexemes.values()]
        waiting = list(self._terminals)
        while waiting:
            name, before = waiting.pop(), len(self._terminals)
            self._lines.append(f"{self._terminals[name]}: {self._of(rules[name], True)}")
            waiting += list(self._terminals)[before:]

    def lines(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _of(self, node: Node, terminal: bool = False) -> str:
        if isinstance(node, Lexeme):
            return self._lexeme(node)
        if isinstance(node, Characters):
            return _class(node.ranges)
        if isinstance(node, Reference):
            known = self._terminals.setdefault(node.name, f"R{len(self._terminals)}") if terminal else ""
            return known or self._names[node.name]
        if isinstance(node, Sequence):
            return " ".join(self._runs(node.parts, terminal)) or '""'
        if isinstance(node, Repetition):
            return self._repetition(node, terminal)
        return f"({' | '.join(self._of(part, terminal) for part in children(node))})"

    def _runs(self, parts: Iterable[Node], terminal: bool) -> Iterator[str]:
        """Texts of the parts, characters beside each other as one."""
        for literal, run in groupby(parts, lambda part: isinstance(part, Characters) and _is_single(part.ranges)):
            if literal:
                yield json.dumps("".join(chr(part.ranges[0][0]) for part in run if isinstance(part, Characters)))
            else:
                yield from (self._of(part, terminal) for part in run)

    def _repetition(self, node: Repetition, terminal: bool) -> str:
        if node.most == 0:
            return '""'
        bounds = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        counts = bounds.get((node.least, node.most)) or f"{{{node.least},{'' if node.most is None else node.most}}}"
        return f"({self._of(node.part, terminal)}){counts}"

    def _lexeme(self, lexeme: Lexeme) -> str:
        """A lexeme's name; one that may be empty is left out instead."""
        part = lexeme.part
        key = part.ranges if isinstance(part, Characters) else part.name if isinstance(part, Reference) else lexeme
        name, _ = self._lexemes.setdefault(key, (f"L{len(self._lexemes)}", part))
        return f"({name})?" if self._starts.of(lexeme.part)[1] else name


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class(ranges: Ranges) -> str:
    if ranges == ANY:
        return "/(?s:.)/"
    members = (f"\\x{{{a:x}}}" if a == b else f"\\x{{{a:x}}}-\\x{{{b:x}}}" for a, b in ranges)
    return f"/[{''.join(members)}]/"
