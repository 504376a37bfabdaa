"""GBNF, the grammar notation of llama.cpp, translated to llguidance's Lark.

GBNF describes texts character by character. llguidance puts a lexer before its parser, and the lexer always
takes the longest match of a terminal: `[a-z]+ "b"` would never see its "b". The translation makes terminals
as large as possible, since they are fast. It splits a terminal if the longest match could be the wrong one. A
grammar without recursion becomes one terminal.

    lark_of('root ::= "(" root ")" | [a-z]+')    # "start: r0\\nr0: (T0 r0 T1 | T2)\\n..."
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

_MAX_POSITIONS = 4000  # characters in the terminals of a grammar, with references written out
_MAX_WORK = 300_000  # states times character classes of their automaton

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN = re.compile(r"(!?)<\[([0-9]{1,9})\]>")
_TIMES = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {mark: mark for mark in '\\"[]-'}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class Chars(NamedTuple):
    """One character in the ranges (first, last), or outside them if is_negated."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False


class Token(NamedTuple):
    """One token of the vocabulary, or any other token if is_negated."""

    id: str
    is_negated: bool


class Ref(NamedTuple):
    """A reference to a rule."""

    name: str


class NodeSequence(NamedTuple):
    """A sequence of nodes; without nodes, the empty text."""

    items: tuple[Node, ...]


class Alternatives(NamedTuple):
    """A choice of one of several nodes."""

    items: tuple[Node, ...]


class Repeat(NamedTuple):
    """A repeated node. most: None for no limit."""

    item: Node
    least: int
    most: int | None


Node = Chars | Token | Ref | NodeSequence | Alternatives | Repeat


def lark_of(text: str) -> str:
    """Translate a grammar. Tokens must be ids, `<[id]>`: the caller replaces their texts before.

    Raises ValueError, with the line, for a text that is not GBNF, and RecursionError for deep nesting.
    """
    rules = rules_of(text)
    split: set[str | int] = set()
    while True:
        terminals = _Terminals(rules, split)
        wrong = set() if terminals.is_one else _Lexer(terminals).ambiguous()
        if not wrong:
            return terminals.lark()
        split |= wrong


def rules_of(text: str) -> dict[str, Node]:
    """Parse a grammar. Raises the errors of `lark_of`."""
    rules = _Parser(text).rules()
    if "root" not in rules:
        raise ValueError("the grammar has no rule 'root'")
    for name, node in rules.items():
        missing = next((ref.name for ref in _refs(node) if ref.name not in rules), None)
        if missing is not None:
            raise ValueError(f"rule {name!r} refers to {missing!r}, which is not defined")
    return rules


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, NodeSequence | Alternatives):
        return node.items
    return (node.item,) if isinstance(node, Repeat) else ()


def _refs(node: Node) -> Iterator[Ref]:
    if isinstance(node, Ref):
        yield node
    for child in _children(node):
        yield from _refs(child)


# --- from text to rules


class _Parser:
    """A parser of grammars that follows llama.cpp's."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._skip()
            self._take("::=")
            self._skip(lines=True)
            found[name] = self._choice(is_nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("the end of the rule")
            self._skip(lines=True)
        return found

    def _choice(self, *, is_nested: bool) -> Node:
        items = [self._row(is_nested)]
        while self._next() == "|":
            self._at += 1
            self._skip(lines=True)
            items.append(self._row(is_nested))
        return items[0] if len(items) == 1 else Alternatives(tuple(items))

    def _row(self, is_nested: bool) -> Node:
        items: list[Node] = []
        while True:
            mark = self._next()
            if mark and mark in "*+?{":
                if not items:
                    raise self._error(f"something before {mark!r} that it repeats")
                items.append(self._repeat(items.pop()))
            elif (node := self._node(mark)) is not None:
                items.append(node)
            else:
                return items[0] if len(items) == 1 else NodeSequence(tuple(items))
            self._skip(lines=is_nested)

    def _node(self, mark: str) -> Node | None:
        """Parse the node that begins here; None if no node does."""
        if mark == '"':
            return self._literal()
        if mark == "[":
            return self._class()
        if mark and mark in "<!":
            return self._token()
        if mark == ".":
            self._at += 1
            return Chars((), is_negated=True)
        if mark == "(":
            self._at += 1
            self._skip(lines=True)
            node = self._choice(is_nested=True)
            self._take(")")
            return node
        return Ref(self._name()) if _NAME.match(mark) else None

    def _literal(self) -> Node:
        self._at += 1
        found = []
        while self._next() != '"':
            char = self._char()
            found.append(Chars(((char, char),)))
        self._at += 1
        return found[0] if len(found) == 1 else NodeSequence(tuple(found))

    def _class(self) -> Node:
        self._at += 1
        is_negated = self._next() == "^"
        self._at += is_negated
        ranges = []
        while self._next() != "]":
            first = last = self._char()
            if self._next() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                last = self._char()
                if last < first:
                    raise self._error("a range whose first character is not behind its last")
            ranges.append((first, last))
        self._at += 1
        return Chars(tuple(ranges), is_negated) if ranges else NodeSequence(())

    def _char(self) -> int:
        char = self._next()
        if not char:
            raise self._error('a closing " or ]')
        self._at += 1
        if char != "\\":
            return ord(char)
        kind = self._next()
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if kind not in _HEX_DIGITS:
            self._at -= 2
            raise self._error("an escape that GBNF knows")
        digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
        if not re.fullmatch(f"[0-9A-Fa-f]{{{_HEX_DIGITS[kind]}}}", digits):
            raise self._error(f"{_HEX_DIGITS[kind]} hexadecimal digits")
        code = int(digits, 16)
        if code > sys.maxunicode or 0xD800 <= code < 0xE000:
            raise self._error("the code of a character")
        self._at += len(digits)
        return code

    def _token(self) -> Node:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise self._error("a token of this model's vocabulary, as <text> or <[id]>")
        self._at = found.end()
        return Token(found[2], is_negated=bool(found[1]))

    def _repeat(self, node: Node) -> Node:
        mark = self._next()
        if mark != "{":
            self._at += 1
            return _repeated(node, int(mark == "+"), 1 if mark == "?" else None)
        found = _TIMES.match(self._text, self._at)
        if found is None:
            raise self._error("{n}, {m,} or {m,n}")
        least = int(found[1][:18])
        most = least if found[2] is None else int(found[3][:18]) if found[3] else None
        if most is not None and most < least:
            raise self._error("{m,n} with m not above n")
        self._at = found.end()
        return _repeated(node, least, most)

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._error("a name")
        self._at = found.end()
        return found[0]

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, mark: str) -> None:
        if not self._text.startswith(mark, self._at):
            raise self._error(repr(mark))
        self._at += len(mark)

    def _skip(self, *, lines: bool = False) -> None:
        """Skip spaces and comments."""
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _error(self, expected: str) -> ValueError:
        line = self._text.count("\n", 0, self._at) + 1
        rest = self._text[self._at : self._at + 20].partition("\n")[0]
        return ValueError(f"line {line}: expected {expected}, not {rest!r}" if rest else
                          f"line {line}: expected {expected}, not the end of the line")  # fmt: skip


def _repeated(node: Node, least: int, most: int | None) -> Node:
    """Repeat a node. Nested repetitions become one if all counts between the extremes are possible."""
    if most == 0:
        return NodeSequence(())
    if isinstance(node, Repeat):
        if node.most is None:
            is_whole = least > 0 or node.least <= 1
        else:
            is_whole = least == most or node.least - 1 <= least * (node.most - node.least)
        if is_whole:
            unlimited = node.most is None or most is None
            return Repeat(
                node.item, node.least * least, None if unlimited else (node.most or 0) * (most or 0)
            )
    return Repeat(node, least, most)


# --- from rules to terminals


class _Terminals:
    """The division of a grammar into rules and terminals.

    split: the nodes, by id, and the rules, by name, that are not terminals although they could be. A node
    without recursion and tokens is a terminal, and so is a token. keys: the terminals, by a rule's name or
    the id of a node. follow: for each terminal, the set of terminals that may come next, as bits. first: the
    terminals that may begin an answer, as bits.
    """

    def __init__(self, rules: dict[str, Node], split: set[str | int]) -> None:
        self.rules, self._split = rules, split
        self._regular: dict[str, bool | None] = {}
        self.is_one = self._key(Ref("root")) is not None
        self.keys: dict[str | int, Node] = {}
        self._order: dict[str, None] = {}  # rules that are not terminals
        self._collect(Ref("root"))
        self._bits = {key: 1 << i for i, key in enumerate(self.keys)}
        self._empty: set[str] = set()  # rules that match the empty text
        self._heads = dict.fromkeys(self._order, 0)
        self._tails = dict.fromkeys(self._order, 0)
        self.follow = dict.fromkeys(self.keys, 0)
        while self._grow_heads():
            pass
        while self._grow_tails():
            pass
        self.first = self._first(Ref("root"))

    def _is_regular(self, node: Node) -> bool:
        if isinstance(node, Ref):
            if node.name not in self._regular:
                self._regular[node.name] = None  # until it is known: a rule that leads back here is recursive
                self._regular[node.name] = self._is_regular(self.rules[node.name])
            return bool(self._regular[node.name])
        return not isinstance(node, Token) and all(self._is_regular(child) for child in _children(node))

    def _key(self, node: Node) -> str | int | None:
        key = node.name if isinstance(node, Ref) else id(node)
        if isinstance(node, Token | Chars):
            return key
        return key if key not in self._split and self._is_regular(node) else None

    def _collect(self, node: Node) -> None:
        key = self._key(node)
        if key is not None:
            self.keys[key] = node
        elif not isinstance(node, Ref):
            for child in _children(node):
                self._collect(child)
        elif node.name not in self._order:
            self._order[node.name] = None
            self._collect(self.rules[node.name])

    # ---- which terminals begin a node and follow it ----

    def is_empty(self, node: Node) -> bool:
        """Return whether a node matches the empty text."""
        match node:
            case Chars() | Token():
                return False
            case Ref():
                if self._key(node) is not None:
                    return self.is_empty(self.rules[node.name])
                return node.name in self._empty
            case NodeSequence():
                return all(self.is_empty(item) for item in node.items)
            case Alternatives():
                return any(self.is_empty(item) for item in node.items)
            case Repeat():
                return not node.least or self.is_empty(node.item)

    def _first(self, node: Node) -> int:
        key = self._key(node)
        if key is not None:
            return self._bits[key]
        if isinstance(node, Ref):
            return self._heads[node.name]
        found = 0
        for child in _children(node):
            found |= self._first(child)
            if isinstance(node, NodeSequence) and not self.is_empty(child):
                break
        return found

    def _grow_heads(self) -> bool:
        before = len(self._empty), dict(self._heads)
        for name in self._order:
            if self.is_empty(self.rules[name]):
                self._empty.add(name)
            self._heads[name] |= self._first(self.rules[name])
        return before != (len(self._empty), self._heads)

    def _grow_tails(self) -> bool:
        before = dict(self._tails)
        for name in self._order:
            self._continue(self.rules[name], self._tails[name])
        return before != self._tails

    def _continue(self, node: Node, after: int) -> None:
        """Note that the terminals `after` may follow a node."""
        key = self._key(node)
        if key is not None:
            self.follow[key] |= after
        elif isinstance(node, Ref):
            self._tails[node.name] |= after
        elif isinstance(node, NodeSequence):
            for item in reversed(node.items):
                self._continue(item, after)
                after = self._first(item) | (after if self.is_empty(item) else 0)
        else:
            again = after
            if isinstance(node, Repeat) and node.most != 1:
                again |= self._first(node.item)
                is_choice = isinstance(node.item, Alternatives) and self._key(node.item) is None
                if is_choice and node.most is None and node.least <= 1:
                    node = node.item  # the lexer joins two runs of characters in a row
            for child in _children(node):
                own = self._first(child) if self._is_run(child) else 0
                self._continue(child, again & ~own | after)

    def _is_run(self, node: Node) -> bool:
        """Return whether a node is a terminal that also matches two of its matches in a row."""
        if isinstance(node, Ref) and self._key(node) is not None:
            return self._is_run(self.rules[node.name])
        is_endless = isinstance(node, Repeat) and node.least <= 1 and node.most is None
        return is_endless and self._key(node) is not None

    # ---- Lark ----

    def lark(self) -> str:
        """Return the grammar: rules r0, r1, ..., and terminals T0, T1, ..."""
        rules = {name: f"r{i}" for i, name in enumerate(self._order)}
        terminals = {key: f"T{i}" for i, key in enumerate(self.keys)}
        lines = [f"start: {rules.get('root') or terminals['root']}"]
        lines += [f"{rules[name]}: {self._in_rule(self.rules[name], rules, terminals)}" for name in rules]
        waiting = [(terminals[key], node) for key, node in self.keys.items() if not isinstance(node, Token)]
        while waiting:
            name, node = waiting.pop()
            body = self.rules[node.name] if isinstance(node, Ref) else node
            for ref in _refs(body):
                if ref.name not in terminals:
                    terminals[ref.name] = f"T{len(terminals)}"
                    waiting.append((terminals[ref.name], ref))
            lines.append(f"{name}: {_in_terminal(body, terminals)}")
        return "\n".join(lines) + "\n"

    def _in_rule(self, node: Node, rules: dict[str, str], terminals: dict[str | int, str]) -> str:
        key = self._key(node)
        if isinstance(node, Token):
            return f"<[{'^' * node.is_negated}{node.id}]>"
        if key is not None:
            return terminals[key]
        if isinstance(node, Ref):
            return rules[node.name]
        return _joined(node, [self._in_rule(child, rules, terminals) for child in _children(node)])


def _in_terminal(node: Node, terminals: dict[str | int, str]) -> str:
    if isinstance(node, Ref):
        return terminals[node.name]
    if isinstance(node, Chars):
        return _chars_as_lark(node)
    if isinstance(node, NodeSequence) and all(_single(item) for item in node.items):
        return json.dumps("".join(map(_single, node.items)), ensure_ascii=False)
    return _joined(node, [_in_terminal(child, terminals) for child in _children(node)])


def _joined(node: Node, parts: list[str]) -> str:
    """Return the Lark of a sequence, a choice or a repetition from the Lark of its parts."""
    if isinstance(node, Repeat):
        return f"({parts[0]}){{{node.least},{'' if node.most is None else node.most}}}"
    return f"({(' | ' if isinstance(node, Alternatives) else ' ').join(parts)})" if parts else '""'


def _single(node: Node) -> str:
    """Return the only character that a node matches, or ""."""
    if isinstance(node, Chars) and not node.is_negated and len(node.ranges) == 1:
        first, last = node.ranges[0]
        return chr(first) if first == last else ""
    return ""


def _chars_as_lark(node: Chars) -> str:
    if not node.ranges:
        return "/(?s:.)/"
    ranges = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in node.ranges)
    return f"/[{'^' * node.is_negated}{ranges}]/"


# --- the lexer


class _TerminalPart(NamedTuple):
    """A part of a terminal. first, last: sets of positions, as bits, at which a match begins and ends."""

    is_empty: bool
    first: int
    last: int


class _Lexer:
    """An automaton of all terminals, which shows for which of them the longest match can be wrong.

    A position is a character of a terminal; a state is the set of positions after some characters. Counted
    repetitions count as unlimited. This finds too many terminals, never too few.
    """

    def __init__(self, terminals: _Terminals) -> None:
        self._terminals = terminals
        self._classes = _classes(terminals)
        self._after: list[int] = []  # of each position: the positions that may come next
        self._holds = [0] * len(self._classes)  # of each class of characters: the positions that match it
        self._long: set[str | int] = set()  # terminals with too many positions
        # The parts of each terminal, and all its positions.
        self._parts: dict[str | int, tuple[_TerminalPart, int]] = {}
        for key, node in terminals.keys.items():
            begin = len(self._after)
            body = terminals.rules[node.name] if isinstance(node, Ref) else node
            part = _TerminalPart(False, 0, 0) if isinstance(node, Token) else self._part(body)
            if len(self._after) > _MAX_POSITIONS:
                self._long.add(key)
            self._parts[key] = part, (1 << len(self._after)) - (1 << begin)

    def _part(self, node: Node) -> _TerminalPart:
        if len(self._after) > _MAX_POSITIONS:
            return _TerminalPart(False, 0, 0)
        match node:
            case Chars():
                position = 1 << len(self._after)
                self._after.append(0)
                for i, char in enumerate(self._classes):
                    if any(first <= char <= last for first, last in node.ranges) != node.is_negated:
                        self._holds[i] |= position
                return _TerminalPart(False, position, position)
            case Ref():
                return self._part(self._terminals.rules[node.name])
            case Repeat():
                part = self._part(node.item)
                if node.most == 0:
                    return _TerminalPart(True, 0, 0)
                if node.most != 1:
                    self._join(part.last, part.first)
                return part._replace(is_empty=part.is_empty or not node.least)
            case Alternatives():
                parts = [self._part(item) for item in node.items]
                first = last = 0
                for part in parts:
                    first, last = first | part.first, last | part.last
                return _TerminalPart(any(part.is_empty for part in parts), first, last)
            case NodeSequence():
                return self._row([self._part(item) for item in node.items])
            case Token():
                raise AssertionError("a token is a terminal of its own")

    def _row(self, parts: list[_TerminalPart]) -> _TerminalPart:
        whole = _TerminalPart(True, 0, 0)
        for part in parts:
            self._join(whole.last, part.first)
            first = whole.first | (part.first if whole.is_empty else 0)
            last = part.last | (whole.last if part.is_empty else 0)
            whole = _TerminalPart(whole.is_empty and part.is_empty, first, last)
        return whole

    def _join(self, last: int, first: int) -> None:
        for position in _bits(last):
            self._after[position] |= first

    def ambiguous(self) -> set[str | int]:
        """Return the terminals that may continue where another reading begins the next terminal."""
        if self._long:
            return self._long
        wrong: set[str | int] = set()
        seen: set[int] = set()
        waiting = [self._begin(self._terminals.first)]
        n_work = 0
        while waiting:
            upcoming = waiting.pop()
            for state in {upcoming & held for held in self._holds} - seen - {0}:
                seen.add(state)
                waiting += self._step(state, wrong)
            n_work += len(self._holds)
            if n_work > _MAX_WORK:  # too much work: every terminal of several characters
                return {key for key, (_, positions) in self._parts.items() if positions.bit_count() > 1}
        return wrong

    def _step(self, state: int, wrong: set[str | int]) -> tuple[int, int]:
        """Return the positions that may come next in the terminals of a state, and in their successors.

        Adds to `wrong` the terminals of the former that the latter make ambiguous.
        """
        going_on = 0
        for position in _bits(state):
            going_on |= self._after[position]
        behind = 0
        for key, (part, _) in self._parts.items():
            if part.last & state:
                behind |= self._begin(self._terminals.follow[key])
        both = 0
        for held in self._holds:
            if behind & held:
                both |= going_on & held
        if both:
            wrong.update(key for key, (_, positions) in self._parts.items() if positions & both)
        return going_on, behind

    def _begin(self, terminals: int) -> int:
        """Return the positions at which terminals, given as bits, begin."""
        found = 0
        for i, (part, _) in enumerate(self._parts.values()):
            if terminals >> i & 1:
                found |= part.first
        return found


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _classes(terminals: _Terminals) -> list[int]:
    """Return one character of each set of characters that the grammar never distinguishes."""
    bounds = {0}
    for rule in terminals.rules.values():
        waiting = [rule]
        while waiting:
            node = waiting.pop()
            waiting += _children(node)
            if isinstance(node, Chars):
                bounds.update(bound for first, last in node.ranges for bound in (first, last + 1))
    return sorted(bounds)
