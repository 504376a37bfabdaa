"""Answers that follow a grammar: llguidance's view of the vocabulary, masks, ends, and hostile grammars.

Most tests use the fake backend with random logits: any real model follows a grammar more easily.
"""

from __future__ import annotations

import codecs
import gc
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import write_model
from cases import quick_are
from fake_backend import FakeBackend
from json_schemas import LONG_TO_COMPILE, SCHEMAS
from tiny_tokenizers import bpe_metadata, sentencepiece_metadata
from waiting import WATCHDOG

import hotset
from hotset.engine import engine as engine_module
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.engine.sequence import Sequence
from hotset.errors import HotsetError, InvalidRequestError
from hotset.text import constraint, grammar_child
from hotset.text.constraint import GrammarConstraint, Grammars
from hotset.text.mask import TokenMask
from hotset.text.tokenizer import Tokenizer, load_tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

KINDS = {"bpe": bpe_metadata, "sentencepiece": sentencepiece_metadata}


@cache
def grammars(kind: str = "bpe") -> Grammars:
    return Grammars(load_tokenizer(KINDS[kind]()))


def ids_of(mask: TokenMask, tokenizer: Tokenizer) -> set[int]:
    bits = np.unpackbits(mask.bits, bitorder="little")
    assert not bits[tokenizer.n_vocab :].any()
    assert mask.ids is None or mask.ids.tolist() == np.flatnonzero(bits).tolist()
    return set(np.flatnonzero(bits).tolist())


def after(rule: GrammarConstraint, tokens: list[int]) -> GrammarConstraint:
    for token in tokens:
        rule.accept(token)
    return rule


# --- the vocabulary


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", ["", "Hello w", "äö "])
def test_mask_of_any_text_has_all_utf8_continuations(kind: str, before: str):
    tokenizer = grammars(kind).tokenizer
    rule = after(grammars(kind).constraint("regex", "(?s:.*)"), tokenizer.encode_inside(before))
    expected = set(tokenizer.stop_ids)
    for id in range(tokenizer.n_vocab):
        piece = tokenizer.token_bytes(id)
        try:
            codecs.getincrementaldecoder("utf-8")("strict").decode(piece)
        except UnicodeDecodeError:
            continue
        if piece and not tokenizer.is_special(id):
            expected.add(id)
    assert ids_of(rule.mask(), tokenizer) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_inside_a_character_only_its_continuation_is_allowed(kind: str):
    tokenizer = grammars(kind).tokenizer
    first = next(i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i) == b"\xf0")
    rule = after(grammars(kind).constraint("regex", "(?s:.*)"), [first])
    allowed = ids_of(rule.mask(), tokenizer)
    assert allowed
    assert {tokenizer.token_bytes(id)[0] for id in allowed} <= set(range(0x90, 0xC0))


@pytest.mark.parametrize("kind", KINDS)
def test_every_text_is_allowed_by_the_tokens_that_it_is_made_of(kind: str):
    tokenizer = grammars(kind).tokenizer
    text = '  Äpfel {"a": [1, 2.5e3, null]} 👋🏽 of the lazy dog.\n    end'
    rule = grammars(kind).constraint("regex", "(?s:.*)")
    for token in tokenizer.encode_inside(text):
        assert token in ids_of(rule.mask(), tokenizer), tokenizer.token_bytes(token)
        rule.accept(token)
    assert rule.can_end
    assert not rule.finished


@pytest.mark.parametrize("kind", KINDS)
def test_forced_text_comes_in_the_tokens_of_the_model(kind: str):
    """Check that forced text uses the tokenizer's own tokens, which the model knows best."""
    tokenizer = grammars(kind).tokenizer
    text = " over the lazy dog"
    rule = grammars(kind).constraint("regex", re.escape(text).replace("\\ ", " "))
    came = []
    while not rule.finished:
        (token,) = ids_of(rule.mask(), tokenizer)
        came.append(token)
        rule.accept(token)
    assert came == tokenizer.encode_inside(text)


def test_sentencepiece_space_needs_a_space_in_the_grammar():
    """Check that the token "▁the" counts as " the": a text does not begin with an extra space."""
    tokenizer = grammars("sentencepiece").tokenizer
    rule = grammars("sentencepiece").constraint("regex", "the")
    allowed = ids_of(rule.mask(), tokenizer)
    assert allowed
    assert all(not tokenizer.token_bytes(id).startswith(b" ") for id in allowed)


def test_a_mark_that_a_grammar_spells_is_text():
    """Spell marks as text: a mark's token would have its special meaning. A user-defined token is text."""
    tokens = bpe_metadata()["tokenizer.ggml.tokens"]
    types = np.array([1] * (len(tokens) - 4) + [3, 3, 3, 4], np.int32)
    types[len(tokens) - 4] = 4  # <|im_start|> as a file would have <|channel|>
    tokenizer = load_tokenizer(bpe_metadata(token_type=types))
    rule = Grammars(tokenizer).constraint("regex", r"<\|im_start\|>    <\|im_end\|>")
    came = []
    while not rule.finished:
        came.append(min(ids_of(rule.mask(), tokenizer)))
        rule.accept(came[-1])
    assert tokenizer.decode(came) == "<|im_start|>    <|im_end|>"
    marks = {tokens.index(piece) for piece in ("<|im_start|>", "<|im_end|>")}
    assert not marks & set(came)
    assert tokens.index("    ") in came


def test_a_long_beginning_that_spells_a_mark_is_split_in_linear_time():
    """Split by bytes, because the model's tokens spell the mark. Quadratic time would be an hour."""
    begun = "<|im_start|>" + "a" * 100_000
    rule = grammars().constraint("regex", "(?s:.*)", begun=begun)
    assert rule.can_end


def test_byte_outside_utf8_is_never_allowed():
    """Check the token of byte FF, which begins a mark in llguidance's tables."""
    tokenizer = grammars().tokenizer
    byte = next(i for i in range(tokenizer.n_vocab) if tokenizer.token_bytes(i) == b"\xff")
    assert byte not in ids_of(grammars().constraint("regex", "(?s:.*)").mask(), tokenizer)


def test_the_vocabulary_is_made_once(monkeypatch: pytest.MonkeyPatch):
    made = Grammars(grammars().tokenizer)
    library = made.library
    monkeypatch.setattr(constraint, "_vocabulary", lambda tokenizer: pytest.fail("made again"))
    first, second = (made.constraint("regex", "a+") for _ in range(2))
    first.accept(made.tokenizer.encode_inside("a")[0])
    assert (first.can_end, second.can_end) == (True, False), "each answer has its own place in the grammar"
    assert made.library is library


# --- answers


def prepared(engine: Engine, prompt: list[int], params: SamplingParams, kind: str = "bpe") -> Sequence:
    """Enqueue a sequence whose output follows the form in the parameters."""
    made = grammars(kind)
    assert params.form is not None
    rule = made.constraint(*params.form)
    sequence = engine.prepare(prompt, params, stop_ids=made.tokenizer.stop_ids, constraint=rule)
    engine.enqueue(sequence)
    return sequence


def answers(kind: str, form: dict[str, Any], seeds: range, **params: Any) -> list[Sequence]:
    """Return finished answers of random logits, four at a time, at a temperature that takes any token."""
    made = grammars(kind)
    backend = FakeBackend(n_vocab=made.tokenizer.n_vocab + 5, n_blocks=64)  # (padded, as in real models)
    engine = Engine(backend, 512, max_sequences=4)
    prompt = made.tokenizer.encode("Hello")
    found = []
    for seed in seeds:
        each = SamplingParams(seed=seed, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, **form, **params)
        found.append(prepared(engine, prompt, each, kind))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
    return found


def text_of(sequence: Sequence, kind: str) -> str:
    tokenizer = grammars(kind).tokenizer
    decoder = tokenizer.stream(skip_special=True)
    return "".join(decoder.push(id) for id in sequence.generated) + decoder.flush()


@pytest.mark.parametrize("kind", quick_are(("bpe",), KINDS))
@pytest.mark.parametrize("name", SCHEMAS)
def test_two_hundred_answers_are_json_of_their_schemas(kind: str, name: str):
    """Draw ten answers for each of ten schemas, in both kinds of vocabulary; some reach the token limit."""
    schema = SCHEMAS[name]
    for sequence in answers(kind, {"json_schema": schema}, range(10), max_tokens=400):
        text = text_of(sequence, kind)
        assert sequence.finish_reason == "stop", text
        jsonschema.validate(json.loads(text), schema)


def test_an_answer_that_is_cut_says_so():
    long = {"type": "string", "minLength": 200}
    for sequence in answers("bpe", {"json_schema": long}, range(3), max_tokens=20):
        assert sequence.finish_reason == "length"


def test_any_json_object():
    whole = 0
    for sequence in answers("bpe", {"json_object": True}, range(12), max_tokens=300):
        if sequence.finish_reason == "stop":
            whole += 1
            assert isinstance(json.loads(text_of(sequence, "bpe")), dict)
    assert whole


@pytest.mark.parametrize(
    "pattern", ["yes|no", "[a-f0-9]{8}(-[a-f0-9]{4}){3}", "(?i:ab)+c{3}", r"\d{1,3}( Äpfel| 🦙)?", ".{5}"]
)
def test_the_whole_answer_matches_a_regular_expression(pattern: str):
    for sequence in answers("sentencepiece", {"regex": pattern}, range(5), max_tokens=300):
        if sequence.finish_reason == "stop":
            assert re.fullmatch(pattern, text_of(sequence, "sentencepiece"))
        else:
            assert "+" in pattern


GBNF_LIST = """\
# a list, as llama.cpp's examples have it
root ::= item+ "."
item ::= "- " [^\\r\\n\\x0b\\x0c\\u0085\\u2028\\u2029]{1,5} "\\n"
"""
GBNF_ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")
expr  ::= term ([-+*/] term){0,3}
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]{0,3} ws
num   ::= [0-9]{1,4} ws
ws    ::= [ \t\n]?
"""
GBNF_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
LARK = """
start: greeting NAME "!"
greeting: "Hello " | "Bye "
NAME: /[A-Z][a-z]{1,6}/
"""
ARITHMETIC = r"(?s)[a-z0-9_()+*/ \t\n-]+=[ \t\n]?[a-z0-9_()+*/ \t\n-]+\n"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (GBNF_LIST, "(- [^\r\n\x0b\x0c\x85\u2028\u2029]{1,5}\n)+\\."),
        (GBNF_ARITHMETIC, ARITHMETIC),
        (GBNF_JSON, r"(?s)\{.*\}\s*"),
        (LARK, "(Hello|Bye) [A-Z][a-z]{1,6}!"),
        (r'root ::= "\u00e9\U0001F999\x41" . [\u00e4-\u00f6]', "é🦙A(?s:.)[ä-ö]"),
        ('root ::= "a\\"b" "." # one "." here\n', 'a"b\\.'),
        ('root ::= ( [x]* | "ab" )* [x]', "(x|ab)*x"),
        ('root ::= ( [x]{1,3} "-" ){2,5}', "(x{1,3}-){2,5}"),
        ('root ::= a\na ::= "(" a ")" | [a-c]{1,3} "b"', r"\(*[a-c]{1,3}b\)*"),
        ("root ::= <|im_start|> !<[5]>{3} [a-z]{2}", "(?s).*[a-z]{2}"),
    ],
)
def test_an_answer_follows_a_grammar(grammar: str, pattern: str):
    whole = 0
    for sequence in answers("bpe", {"grammar": grammar}, range(8), max_tokens=300):
        if sequence.finish_reason == "stop":
            whole += 1
            assert re.fullmatch(pattern, text_of(sequence, "bpe"))
    assert whole


def test_tokens_of_gbnf_are_tokens_and_not_their_text():
    made = grammars()
    tokenizer = made.tokenizer
    id = tokenizer.vocabulary["<|im_start|>"]
    rule = made.constraint("grammar", 'root ::= <|im_start|> "<|im_start|>" !<|im_start|>')
    assert ids_of(rule.mask(), tokenizer) == {id}
    rule.accept(id)
    assert id not in ids_of(rule.mask(), tokenizer)
    assert tokenizer.vocabulary["<"] in ids_of(rule.mask(), tokenizer)
    for token in tokenizer.encode_inside("<|im_start|>"):
        rule.accept(token)
    allowed = ids_of(rule.mask(), tokenizer)
    assert id not in allowed
    assert len(allowed) > 100


def test_parts_of_schemas_that_grammars_lack_are_left_to_the_model(caplog: pytest.LogCaptureFixture):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^(?=x)y$"},
            "b": {"type": "any"},
            "c": {"const": 1},
        },
        "required": ["a", "c"],
        "propertyNames": {"maxLength": 9},
        "patternProperties": {"^(?!x)": {"type": "null"}},
        "additionalProperties": None,
    }
    with caplog.at_level("WARNING", "hotset.grammar"):
        rule = grammars().constraint("json_schema", json.dumps(schema))
    (record,) = caplog.records
    for part in ("(?=x)", "(?!x)", "any", "propertyNames"):
        assert part in record.getMessage()
    for token in grammars().tokenizer.encode_inside('{"a":"anything","c":'):
        rule.accept(token)
    starts = {grammars().tokenizer.token_bytes(id)[:1] for id in ids_of(rule.mask(), grammars().tokenizer)}
    assert starts <= {b"1", b" ", b"\n"}


@pytest.mark.parametrize(
    ("schema", "answer", "wrong"),
    [
        ({"type": "object", "properties": [], "required": {}}, "{}", "1"),
        ({"type": "object", "properties": {"a": None, "b": "text"}, "required": "a"}, '{"a": 1}', "[]"),
        ({"type": "string", "minLength": 2.0, "maxLength": "9"}, '"abc"', '"a"'),
        ({"type": "array", "items": {"type": "null"}, "maxItems": True}, "[null]", "[1]"),
        ({"$ref": "#/$defs/List[a b]", "$defs": {"List[a b]": {"type": "null"}}}, "null", "1"),
        ({"$ref": "#/$defs/R<a>", "$defs": {"R<a>": {"type": "null"}}}, "null", "1"),
        ({"$schema": "https://example.org/own", "type": "null"}, "null", "1"),
    ],
)
def test_malformed_keywords_of_schemas_are_left_to_the_model(schema: dict[str, Any], answer: str, wrong: str):
    """PHP writes empty objects as lists, and TypeScript's generators write references without codes."""
    tokenizer = grammars().tokenizer
    text = json.dumps(schema)
    assert after(grammars().constraint("json_schema", text), tokenizer.encode_inside(answer)).can_end
    with pytest.raises((InvalidRequestError, AssertionError)):
        assert after(grammars().constraint("json_schema", text), tokenizer.encode_inside(wrong)).can_end


def test_an_answer_ends_where_nothing_can_follow_without_a_token_for_it():
    for sequence in answers("bpe", {"regex": "[a-z]{3}"}, range(4)):
        assert sequence.finish_reason == "stop"
        assert sequence.tokens[-1] not in grammars().tokenizer.stop_ids


def test_model_ends_an_answer_that_may_continue():
    stops = grammars().tokenizer.stop_ids
    likely = dict.fromkeys(stops, 6.0)
    found = answers("bpe", {"regex": "[a-z]{2,9}"}, range(20), logit_bias=likely)
    assert {sequence.tokens[-1] in stops for sequence in found} == {True, False}
    assert all(re.fullmatch("[a-z]{2,9}", text_of(sequence, "bpe")) for sequence in found)


def test_ignore_eos_continues_until_the_grammar_ends():
    for sequence in answers("bpe", {"regex": "[a-z]{1,30}"}, range(4), ignore_eos=True):
        assert sequence.finish_reason == "stop"
        assert len(text_of(sequence, "bpe")) == 30


def test_bias_and_constraint_together_may_forbid_everything():
    digits = {
        id: -np.inf
        for id in range(grammars().tokenizer.n_vocab)
        if grammars().tokenizer.token_bytes(id)[:1].isdigit()
    }
    (sequence,) = answers("bpe", {"regex": "[0-9]+"}, range(1), logit_bias=digits)
    assert sequence.finish_reason == "error"
    assert str(sequence.error) == (
        "the answer cannot continue: its required form allows no token that logit_bias and ignore_eos allow"
    )


def test_penalties_and_bias_apply_to_allowed_tokens():
    made = grammars()
    wanted = made.tokenizer.encode_inside("b")[0]
    for sequence in answers("bpe", {"regex": "[a-c]"}, range(5), logit_bias={wanted: 1000}):
        assert sequence.generated == [wanted]


def test_same_tokens_in_any_batch_and_without_free_blocks():
    """Check that a preempted sequence, which is computed again, keeps its place in the grammar."""
    made, form = grammars(), SamplingParams(seed=3, regex="([a-z ]{1,40}\\.\n){20,30}", max_tokens=150)

    def run(engine: Engine, n: int) -> list[Sequence]:
        found = [prepared(engine, made.tokenizer.encode("Hello" + " x" * i), form) for i in range(n)]
        steps = 0
        while engine.has_work:
            steps += 1
            if steps % 17 == 0:
                engine.backend.cancel()  # a cancelled step runs again
            engine.step()
        return found

    n_vocab = made.tokenizer.n_vocab
    (alone,) = run(Engine(FakeBackend(n_vocab, n_blocks=64), 256), 1)
    few = Engine(FakeBackend(n_vocab, n_blocks=5), 256, max_sequences=3)
    leave, n_left = few.scheduler.remove, []
    few.scheduler.remove = lambda sequence: (n_left.append(sequence.finish_reason), leave(sequence))[1]  # type: ignore[method-assign]
    crowded = run(few, 3)
    assert None in n_left, "none lost its blocks"
    assert crowded[0].tokens == alone.tokens
    for sequence in crowded:
        assert sequence.error is None
        assert re.match("([a-z ]{1,40}\\.\n)*", text_of(sequence, "bpe"))


# --- masks computed while the model computes


def test_looking_ahead_changes_no_token(monkeypatch: pytest.MonkeyPatch):
    made = grammars()
    params = SamplingParams(seed=5, max_tokens=60)

    def answers(n: int) -> list[list[int]]:
        engine = Engine(FakeBackend(made.tokenizer.n_vocab, n_blocks=64), 256, max_sequences=n)
        sequences = []
        for i in range(n):
            rule = made.constraint("regex", "([a-z ]{1,40}\\.\n){20,30}")
            sequences.append(engine.prepare([1 + i, 2], params, constraint=rule))
            engine.enqueue(sequences[-1])
        while engine.has_work:
            engine.step()
        return [sequence.generated for sequence in sequences]

    ahead = answers(4)
    looked: list[int] = []
    monkeypatch.setattr(GrammarConstraint, "look_ahead", lambda self: looked.append(1))
    assert answers(4) == ahead
    assert len(looked) == sum(len(tokens) for tokens in ahead), "once for each token that is drawn"


def test_a_mask_that_was_found_ahead_is_the_same_and_holds_until_a_token_is_taken():
    made = grammars()
    plain, ahead = (made.constraint("regex", "[a-c]{3}(yes|no)") for _ in range(2))
    while not plain.finished:
        ahead.look_ahead()
        ahead.look_ahead()  # a cancelled step begins again
        assert ahead.mask().bits.tolist() == plain.mask().bits.tolist()
        token = min(ids_of(ahead.mask(), made.tokenizer))
        for rule in (plain, ahead):
            rule.accept(token)
        assert (ahead.finished, ahead.can_end) == (plain.finished, plain.can_end)


def test_error_of_a_mask_is_raised_when_the_mask_is_needed(monkeypatch: pytest.MonkeyPatch):
    made = grammars()
    engine = Engine(FakeBackend(made.tokenizer.n_vocab), 256)
    sequence = engine.prepare([1], SamplingParams(seed=1), constraint=made.constraint("regex", "[a-c]{30}"))
    other = engine.prepare([2], SamplingParams(seed=1, max_tokens=3))
    engine.enqueue(sequence)
    engine.enqueue(other)
    engine.step()
    monkeypatch.setattr(grammar_child, "MAX_MASK_SECONDS", -1.0)
    while engine.has_work:
        engine.step()
    assert "to find what may come next" in str(sequence.error)
    assert other.finish_reason == "length"


class Held(GrammarConstraint):
    """A constraint whose masks another thread computes only after `gate` opens."""

    gate = threading.Event()

    def _find_ahead(self) -> None:
        assert self.gate.wait(WATCHDOG)
        super()._find_ahead()


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_mask_that_takes_long_is_not_waited_for(is_slow: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "MASK_SECONDS", 0.0)
    monkeypatch.setattr(Held, "gate", threading.Event())
    made = grammars()
    params = SamplingParams(seed=5, max_tokens=20)
    engine = Engine(FakeBackend(made.tokenizer.n_vocab), 256)

    def prepared(kind: type[GrammarConstraint]) -> Sequence:
        rule = made.constraint("regex", "([a-z ]{1,40}\\.\n){20,30}")
        rule.__class__ = kind
        rule.is_slow = is_slow
        return engine.prepare([1, 2], params, constraint=rule)

    alone = prepared(GrammarConstraint)
    engine.enqueue(alone)
    while engine.has_work:
        engine.step()
    held, free = prepared(Held), engine.prepare([3], SamplingParams(seed=1, max_tokens=30))
    engine.enqueue(held)
    engine.enqueue(free)
    while free.finish_reason is None:
        engine.step()
    assert (len(free.generated), held.generated) == (30, [])
    Held.gate.set()
    while engine.has_work:
        engine.step()
    assert held.error is None
    assert held.generated == alone.generated


def test_a_grammar_whose_first_mask_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch):
    made = grammars()
    monkeypatch.setattr(grammar_child, "MAX_MASK_SECONDS", -1.0)
    with pytest.raises(InvalidRequestError, match="to find what may come next"):
        made.constraint("regex", "[a-c]{31}")


def test_the_thread_of_masks_ends_with_the_grammars_and_a_fork_has_one_of_its_own():
    made = Grammars(grammars().tokenizer)
    rule = made.constraint("regex", "[a-c]{3}")
    rule.look_ahead()
    expected = ids_of(rule.mask(), made.tokenizer)
    (thread,) = (one for one in threading.enumerate() if one is made._threads[0]._thread)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks with threads
        child = os.fork()
    if not child:
        again = made.constraint("regex", "[a-c]{3}")
        again.look_ahead()
        os._exit(0 if ids_of(again.mask(), made.tokenizer) == expected else 1)
    assert os.waitpid(child, 0)[1] == 0
    del made, rule
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# --- what cannot be used


HOSTILE = {
    "not_json": ("json_schema", "{", "EOF|Expecting"),
    "list": ("json_schema", "[1]", "a schema is an object"),
    "nan": ("json_schema", '{"minimum": NaN}', "NaN is not JSON"),
    "remote": ("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}', "does not fetch"),
    "file": ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
    "endless": ("json_schema", '{"$ref": "#"}', "no text that follows it"),
    "never": ("json_schema", '{"allOf": [{"type": "null"}, {"type": "string"}]}', "unsatisf|Unsatisf"),
    "reference": ("json_schema", '{"$ref": "#/$defs/x"}', "'/\\$defs/x' does not exist"),
    "name": (
        "json_schema",
        '{"x-hotset-name": "the format \'f\'", "enum": []}',
        "the schema of the format 'f' cannot be used: Unsat",
    ),
    "deep": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "deep|recursion"),
    "wide": (
        "json_schema",
        json.dumps({"properties": {f"p{i}": {} for i in range(9000)}}),
        "does not compile within|too large",
    ),
    "regex": ("regex", "(a", r"\(a is not a regular expression that grammars know: unclosed group"),
    "parentheses": ("regex", "(" * 3000 + "a" + ")" * 3000, "the regular expression cannot be used"),
    "lookahead": ("regex", "a(?=b)", "grammars know: look-around, including look-ahead .* is not supported"),
    "gbnf": ("grammar", 'root ::= "a', "line 1: expected a closing"),
    "no_rule": ("grammar", "root ::= other", "'root' refers to 'other', which is not defined"),
    "no_token": ("grammar", "root ::= <no token>", "<no token> is not one token"),
    "deep_gbnf": ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deep"),
    "unclosed": ("grammar", 'root ::= "' + '\\"' * 100_000, "expected a closing"),
    "neither": ("grammar", "hello", "neither a rule"),
    "lark": ("grammar", "start: (", "Expected|expected"),
    "nesting": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
    "nul": ("regex", "a\0b", "a character 0"),
    "long": ("regex", "a" * (1 << 18) + "a", "at most 262144"),
    "items": ("grammar", 'start: "a"{1000000000}', "Too many items|too big|too large"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_unusable_file_gives_one_message(name: str):
    kind, text, reason = HOSTILE[name]
    with pytest.raises(InvalidRequestError, match=reason) as error:
        grammars().constraint(kind, text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert "/tmp" not in str(error.value)


BURSTING = {
    "chain of rules": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(12_000)) + '\nr12000: "a"',
    ),
    "chain of references": (
        "json_schema",
        json.dumps(
            {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(7000)}}
        ),
    ),
    "divisors": ("json_schema", LONG_TO_COMPILE),
    "intersections": ("grammar", "start: A\nA: " + " & ".join(f"/.*a.{{{i}}}x.*/" for i in range(60))),
}


@pytest.mark.parametrize("name", BURSTING)
def test_hostile_files_are_bounded_in_time_and_stack(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constraint, "LIMITS", replace(constraint.LIMITS, seconds=1.0))
    with pytest.raises(InvalidRequestError, match=r"does not compile within|cannot be used"):
        grammars().constraint(*BURSTING[name])


def test_schema_excludes_a_grammar():
    with pytest.raises(InvalidRequestError, match="`json_object` and `regex` cannot be combined"):
        SamplingParams(json_object=True, regex="a")
    with pytest.raises(InvalidRequestError, match="json_schema must be a JSON schema"):
        SamplingParams(json_schema=3)
    with pytest.raises(InvalidRequestError, match="JSON data"):
        SamplingParams(json_schema={"const": object()})
    with pytest.raises(InvalidRequestError, match="regex must be a text"):
        SamplingParams(regex=3)


def test_missing_llguidance_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constraint, "find_spec", lambda name: None)
    with pytest.raises(HotsetError, match=r"pip install '\.\[serve\]'"):
        Grammars(grammars().tokenizer).constraint("regex", "a")


# --- from Python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hotset.Model]:
    path: Path = write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with hotset.load(path, device="reference", max_batch=32) as model:
        yield model


def test_generate_stream_and_chat(model: hotset.Model):
    schema = {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 1, "maxItems": 3}
    answer = model.generate("Hello", json_schema=schema, seed=1)
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.text), schema)
    pieces = [chunk.text for chunk in model.stream("Hello", json_schema=json.dumps(schema), seed=1)]
    assert "".join(pieces) == answer.text
    message = model.chat([{"role": "user", "content": "Hello"}], regex="(yes|no)!", seed=2)
    assert message.content in ("yes!", "no!")
    first, second = model.generate_many(["a", "b"], grammar='root ::= [a-c]{3} "."', seed=3, logprobs=1)
    for one in (first, second):
        assert re.fullmatch(r"[a-c]{3}\.", one.text)
        # Logprobs are the model's own, unchanged by the grammar: a random model rarely likes forced tokens.
        assert min(each.logprob for each in one.logprobs) < -1


def test_unusable_grammar_is_an_error_at_the_call(model: hotset.Model):
    with pytest.raises(InvalidRequestError, match="regular expression cannot be used"):
        model.stream("Hello", regex="(")
