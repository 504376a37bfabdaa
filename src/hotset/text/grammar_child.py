"""The program of the process that tries a grammar, so that the model's own process stays safe.

`constraint.py` starts it (`child_main.py`). It gets a grammar, {"kind": ..., "text": ..., "around": ...,
"marks": [...]}, and answers with llguidance's form, {"grammar": ..., "ignored": [...]}, or {"error": ...}.
ignored: the parts of JSON schemas that llguidance does not support, which are left to the model. Inside
llguidance a grammar may take minutes, gigabytes or the whole stack. That can only end this process.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hotset.text.gbnf import lark_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

STACK_BYTES = 2 << 20  # a quarter of the stack of a thread in the model's process
MAX_MASK_SECONDS = 0.1  # for one search of the allowed tokens: a hundred times the usual time
_TRIED_TOKENS = 32  # bytes that the trial matches

# Models choose the space between the parts of JSON, but it has a limit: a weak model would never stop.
JSON_SPACE = r"( |\n[ \t]{0,20})"

NAME_KEY = "x-hotset-name"
"""The key of a JSON schema that holds its name for messages."""
_TYPES = {"string", "number", "integer", "boolean", "null", "array", "object"}
_VALUES = {"const", "enum", "default", "example", "examples"}  # keywords that hold values, not schemas
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # name -> schema
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_TYPES_OF_VALUES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(_OF_NAMES, dict),
    **dict.fromkeys(_COUNTS, int),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (int, float)),
    **dict.fromkeys(("pattern", "format", "$ref"), str),
    **dict.fromkeys(("required", "allOf", "anyOf", "oneOf", "prefixItems"), list),
    "additionalProperties": (dict, bool),
    "items": (dict, bool, list),
}  # of keywords
_NO_URI = re.compile(r"[^\w!#$%&'()*+,./:;=?@~-]", re.ASCII)  # characters that a URI has only as codes
_JSON_RULE = re.compile(r"%json\s*(?=\{)")


def compiled(kind: str, text: str) -> str:
    """Return a grammar in llguidance's form. Raises ValueError for an invalid text."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(_guided(text)))
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if is_gbnf(text):
        text = lark_of(text)
    elif not re.search(r"(?m)^\s*start\b[^:\n]*:", text):
        raise ValueError(
            "it has neither a rule 'root ::=', as GBNF begins, nor a rule 'start:', as Lark does"
        )
    return LLMatcher.grammar_from_lark(text)


def is_gbnf(text: str) -> bool:
    """Return whether a grammar has GBNF's rule `root ::=`."""
    return re.search(r"(?m)^\s*root\s*::=", text) is not None


def _guided(text: str) -> dict[str, Any]:
    """Return a JSON schema with its options for llguidance."""
    schema = json.loads(text, parse_constant=_no_constant)
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object, or true or false")
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE, "lenient": True}}


def surrounded(grammar: str, around: str | None) -> str:
    """Return a grammar inside another one, whose Lark refers to it as `@answer`."""
    if around is None:
        return grammar
    inner = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    inner[0]["name"] = "answer"
    return json.dumps({"grammars": [{"lark_grammar": around}, *inner]})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Schemas:
    """The JSON schemas inside a grammar: in its `%json` rules, or the grammar itself.

    ignored: the keywords that were left out.
    """

    def __init__(self, kind: str, text: str) -> None:
        self.ignored: list[str] = []
        self._kind, self._text = kind, text
        self._patterns: dict[str, bool] = {}

    def enforceable(self) -> str:
        """Return the grammar without the keywords that llguidance cannot read."""
        return self._replaced(self._without)

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield the enforceable schemas that have a name (NAME_KEY), each as a schema of its own."""
        for whole in map(self._without, self._schemas()):
            for name, path in _named(whole, ()):
                yield name, json.dumps(_only(whole, path))

    def _schemas(self) -> list[Any]:
        found: list[Any] = []

        def keep(schema: Any) -> Any:
            found.append(schema)
            return schema

        self._replaced(keep)
        return found

    def _replaced(self, change: Callable[[Any], Any]) -> str:
        if self._kind == "regex":
            return self._text
        if self._kind == "json_schema":
            schema = json.loads(self._text, parse_constant=_no_constant)
            return json.dumps(change(schema))
        parts, at = [], 0
        for match in _JSON_RULE.finditer(self._text):
            if match.start() < at:
                continue
            try:
                schema, end = json.JSONDecoder().raw_decode(self._text, match.end())
            except ValueError:
                continue
            changed = change(schema)
            if changed != schema:
                parts += [self._text[at : match.end()], json.dumps(changed)]
                at = end
        return "".join([*parts, self._text[at:]])

    def _without(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self._without(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _COUNTS and isinstance(value, float) and value.is_integer():
                kept[key] = int(value)
            elif not _has_its_type(key, value) or (key == "$schema" and "json-schema.org" not in str(value)):
                self.ignored.append(f"{key} {json.dumps(value)}")
            elif key in _OF_NAMES and isinstance(value, dict):
                kept[key] = {name: self._named_schema(name, one) for name, one in value.items()}
            elif key == "$ref" and isinstance(value, str):
                kept[key] = _NO_URI.sub(lambda found: quote(found[0]), value)
            elif key == "type" and not _is_type(value):
                self.ignored.append(f"type {json.dumps(value)}")
            elif key == "pattern" and isinstance(value, str) and not self._is_pattern(value):
                self.ignored.append(f"pattern {json.dumps(value)}")
            elif value is not None or key in _VALUES:
                kept[key] = value if key in _VALUES else self._without(value)
        names = kept.get("patternProperties")
        wrong = [name for name in names if not self._is_pattern(name)] if isinstance(names, dict) else []
        for name in wrong:
            self.ignored.append(f"patternProperties {json.dumps(name)}")
            del kept["patternProperties"][name]
            kept.pop("additionalProperties", None)  # it would forbid the names that the pattern allowed
        return kept

    def _named_schema(self, name: str, schema: Any) -> Any:
        if isinstance(schema, dict | bool):
            return self._without(schema)
        self.ignored.append(f"{name} {json.dumps(schema)}")
        return {}

    def _is_pattern(self, pattern: str) -> bool:
        if pattern not in self._patterns:
            schema = json.dumps({"type": "string", "pattern": pattern})
            self._patterns[pattern] = "regex" not in (tried(compiled("json_schema", schema), []) or "")
        return self._patterns[pattern]


def _has_its_type(key: str, value: Any) -> bool:
    """Return whether the value of a keyword has a type that JSON Schema allows. Null is absence."""
    types = _TYPES_OF_VALUES.get(key, object)
    is_flag = isinstance(value, bool) and types in (int, (int, float))
    return value is None or (isinstance(value, types) and not is_flag)


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return all(isinstance(one, str) and one in _TYPES for one in types)


def _named(schema: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield the names in a schema, each with the path to its part of the schema."""
    if isinstance(schema, dict):
        if isinstance(schema.get(NAME_KEY), str):
            yield schema[NAME_KEY], path
        for key, value in schema.items():
            yield from _named(value, (*path, key))
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            yield from _named(value, (*path, i))


def _only(schema: Any, path: tuple[str | int, ...]) -> Any:
    """Return a schema in which only the alternatives along `path` remain possible."""
    if not path:
        return schema
    if isinstance(schema, list):
        return [_only(one, path[1:]) if i == path[0] else {"const": 0} for i, one in enumerate(schema)]
    return {key: _only(value, path[1:]) if key == path[0] else value for key, value in schema.items()}


class Bytes:
    """A vocabulary of bytes, an end of text, and marks. The model's vocabulary would take long to send."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, marks: list[str]) -> None:
        self.tokens = [bytes([i]) for i in range(255)] + [b"", b"\xff<end>", b"\xff<mark>"]
        self.tokens += [b"\xff" + mark.encode("utf-8", "replace") for mark in marks]

    def __call__(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))


def _vocabulary(marks: list[str]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(Bytes(marks)))


def _own_ids(grammar: str) -> str:
    """Rewrite a grammar for Bytes: every token id of the model becomes the same mark."""
    return re.sub(r"<\[(\^?)\d+\]>", r"<[\g<1>257]>", grammar)


def tried(grammar: str, marks: list[str]) -> str | None:
    """Return the fault of a grammar, or None. Matches some bytes, as answers would."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(_vocabulary(marks), _own_ids(grammar), log_level=0, limits=limits)
    for _ in range(_TRIED_TOKENS):
        if matcher.is_error():
            break
        begun = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - begun > MAX_MASK_SECONDS:
            return f"too slow: it takes more than {MAX_MASK_SECONDS:g} s to find what may come next"
        if matcher.is_stopped():
            break
        allowed = [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1 and i != Bytes.eos_token_id]
        if not allowed:
            break
        matcher.consume_token(allowed[len(allowed) // 2])
    error = matcher.get_error().split("\n<")[0]  # without the parser's state, which follows
    if error in ("NoExtension", "NoExtensionBias"):
        return "there is no text that follows it"
    return error or None


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers requests."""
    import_module("llguidance")
    return _answer


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return answered(request)
    except RecursionError:
        return {"error": "it is nested too deep"}
    except ValueError as error:
        return {"error": str(error)}


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one request."""
    kind, marks = request["kind"], request["marks"]
    parts = [Schemas(kind, request["text"])]
    if request["around"] is not None:
        parts.append(Schemas("grammar", request["around"]))
    grammar = surrounded(compiled(kind, request["text"]), request["around"])
    error = tried(grammar, marks)
    if error is not None:
        texts = [part.enforceable() for part in parts]
        grammar = surrounded(compiled(kind, texts[0]), texts[1] if len(texts) > 1 else None)
        error = tried(grammar, marks)
    if error is None:
        ignored = [one for part in parts for one in part.ignored]
        return {"grammar": grammar, "ignored": [*ignored, *_unenforced(grammar, marks)]}
    for part in parts:
        for name, schema in part.named():
            own = tried(compiled("json_schema", schema), [])
            if own is not None:
                return {"error": own, "name": name}
    return {"error": error}


def _unenforced(grammar: str, marks: list[str]) -> list[str]:
    """Return the keywords that llguidance leaves to the model."""
    from llguidance import LLMatcher

    _, said = LLMatcher.validate_grammar_with_warnings(_own_ids(grammar), _vocabulary(marks))
    return [str(one) for one in said]
