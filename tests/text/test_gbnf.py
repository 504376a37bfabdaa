"""GBNF translated to Lark: both accept the same texts, whatever lexer the grammar library uses."""

from __future__ import annotations

import itertools
import random

import pytest

from hotset.text import gbnf, grammar_child
from hotset.text.gbnf import Alternatives, Chars, Node, NodeSequence, Ref, Repeat

pytest.importorskip("llguidance")

WORDS = ["".join(word) for n in range(6) for word in itertools.product("abc", repeat=n)]


def accepted(grammar: str, words: list[str]) -> set[str]:
    """Return the words that llguidance, reading byte by byte, accepts for a GBNF grammar."""
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    tokenizer = LLTokenizer(TokenizerWrapper(grammar_child.Bytes([])))
    lark = LLMatcher.grammar_from_lark(gbnf.lark_of(grammar))
    matcher = LLMatcher(tokenizer, lark, log_level=0)
    if matcher.is_error():
        return set()
    found = set()
    for word in words:
        one, data = matcher.deep_copy(), list(word.encode())
        if one.try_consume_tokens(data) == len(data) and one.is_accepting():
            found.add(word)
    return found


class Reference:
    """Matches a grammar by definition: from each place in the text, the places that a node can reach."""

    def __init__(self, grammar: str, text: str) -> None:
        self._rules, self._text = gbnf.rules_of(grammar), text
        self._ends: dict[tuple[str, int], set[int]] = {}
        before = -1
        while before != (before := sum(map(len, self._ends.values()))):
            for name, node in self._rules.items():
                for begin in range(len(text) + 1):
                    self._ends[name, begin] = self._from(node, begin)

    def accepts(self) -> bool:
        return len(self._text) in self._ends["root", 0]

    def _from(self, node: Node, begin: int) -> set[int]:
        match node:
            case Chars(ranges, is_negated):
                char = self._text[begin : begin + 1]
                found = any(first <= ord(char) <= last for first, last in ranges) if char else is_negated
                return {begin + 1} if found != is_negated else set()
            case Ref(name):
                return self._ends.get((name, begin), set())
            case Alternatives(items):
                return set().union(*(self._from(item, begin) for item in items))
            case NodeSequence(items):
                ends = {begin}
                for item in items:
                    ends = set().union(*(self._from(item, end) for end in ends))
                return ends
            case Repeat(item, least, most):
                ends, found = {begin}, {begin} if not least else set()
                for n in range(1, (least + len(self._text) + 1 if most is None else most) + 1):
                    ends = set().union(*(self._from(item, end) for end in ends))
                    found |= ends if n >= least else set()
                return found
        raise AssertionError(node)


def drawn(draw: random.Random, depth: int) -> str:
    """Draw a part of a random grammar."""
    kind = draw.random()
    if not depth or kind < 0.3:
        return draw.choice(['"a"', '"b"', "[ab]", '"ab"', "[^a]", '"ba"', '"c"'])
    if kind < 0.45:
        return draw.choice(["root", "x", "y-Z"])
    if kind < 0.7:
        return " ".join(drawn(draw, depth - 1) for _ in range(draw.randint(2, 3)))
    if kind < 0.85:
        return "(" + " | ".join(drawn(draw, depth - 1) for _ in range(draw.randint(2, 3))) + ")"
    return f"({drawn(draw, depth - 1)})" + draw.choice(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,3}"])


@pytest.mark.parametrize("seed", range(60))
def test_random_grammars_accept_the_same_texts(seed: int):
    draw = random.Random(seed)
    grammar = "\n".join(
        f"{name} ::= " + " | ".join(drawn(draw, 3) for _ in range(draw.randint(1, 2)))
        for name in ("root", "x", "y-Z")
    )
    expected = {word for word in WORDS if Reference(grammar, word).accepts()}
    assert accepted(grammar, WORDS) == expected, grammar


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ("root ::= ( [x]* )*", ["", "x", "xxx"], ["y"]),
        ("root ::= ( ( [x]{1,2} ){1,2} [y] ){2,3}", ["xyxxy", "xxxxyxyxy"], ["xy", "xxxxxyxy"]),
        ("root ::= ([x]{0,300}){0,300} [y]", ["y", "x" * 1000 + "y"], ["x"]),
        ('root ::= w "b"\nw ::= [a-z]+ | "(" w ")"', ["ab", "bb", "(z)b"], ["b", "a"]),
        ('root ::= "é\\u00e9\\U0001F999\\x41" [^\\]\\-^] . [-a] [a-]', ["éé🦙Ax\n--"], ["éé🦙A]x--"]),
        ('root ::= fooBar foo-bar foo_bar 1a\nfooBar ::= "a"\nfoo-bar ::= "b"\nfoo_bar ::= "c"\n1a ::= "d"',
         ["abcd"], ["abc"]),
        ('root ::= start\nstart ::= "a" | # a comment\n  "b"\n', ["a", "b"], [""]),
        ('root ::= (\n  "a"\n  | "b"\n)  { 2 , 3 }', ["ab", "aba"], ["a", "abab"]),
        ('root ::= a\na ::= "x"\na ::= "y"', ["y"], ["x"]),
        ('root ::= "" | [] "a" | "b"{0}', ["", "a"], ["b"]),
    ],
)  # fmt: skip
def test_notation(grammar: str, yes: list[str], no: list[str]):
    assert accepted(grammar, yes + no) == set(yes)


XML = """
root ::= element
element ::= "<" name ">" (text | element)* "</" name ">"
name ::= [a-z]+
text ::= [^<]+
"""


def test_free_text_in_a_recursive_grammar_stays_one_terminal():
    """Merge characters into terminals: single characters would be too slow for a model's vocabulary."""
    assert any(line.endswith("){1,}") and "^" in line for line in gbnf.lark_of(XML).splitlines())
    assert accepted(XML, ["<a>b c<d>e</d></a>", "<a></a>", "<a>b", "<a>b</a>c"]) == {
        "<a>b c<d>e</d></a>",
        "<a></a>",
    }


C = """
root ::= (declaration)*
declaration ::= "int" ws identifier "(" ")" ws "{" statement* "}"
statement ::= identifier ws "=" ws expression ";" | "while" "(" expression ")" "{" statement* "}" | comment
expression ::= term (("+" | "-") term)*
term ::= identifier | number | "(" ws expression ws ")"
identifier ::= [a-zA-Z_] [a-zA-Z_0-9]*
number ::= [0-9]+
comment ::= "/*" ( [^*] | ("*" [^/]) )* "*/"
ws ::= ([ \\t\\n]+)
"""


def test_a_grammar_of_a_programming_language():
    text = "int main() {x = (\n1+while2 )-x;while(1){/* a */whilst = 3;}}int f() {}"
    wrong = {text[:-1], text.replace("x =", "1 ="), text.replace("while2", "2while")}
    assert accepted(C, [text, *wrong]) == {text}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "a\n', "line 2: expected a closing"),
        ("root ::= [a", "line 1: expected a closing"),
        ('root ::= "\\q"', r"line 1: expected an escape that GBNF knows, not '\\\\q\"'"),
        ('root ::= "\\x4"', "line 1: expected 2 hexadecimal digits"),
        ('root ::= "\\uD800"', "line 1: expected the code of a character"),
        ("root ::= [z-a]", "a range whose first character"),
        ('root ::= "a"{3,2}', "with m not above n"),
        ('root ::= "a"{,2}', "expected {n}, {m,} or {m,n}"),
        ("root ::= *", "something before '\\*' that it repeats"),
        ('root ::= ("a"\n', "line 2: expected '\\)', not the end"),
        ('root ::= "a" )', "line 1: expected the end of the rule, not '\\)'"),
        ('root "a"', "line 1: expected '::='"),
        ("x ::= root", "no rule 'root'"),
        ("root ::= x", "rule 'root' refers to 'x', which is not defined"),
        ("root ::= <x>", "expected a token"),
    ],
)
def test_error_names_place_and_cause(grammar: str, reason: str):
    with pytest.raises(ValueError, match=reason):
        gbnf.lark_of(grammar)
