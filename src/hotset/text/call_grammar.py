"""Grammars of tool calls, in llguidance's Lark, from the description of a form (tool_calls/forms.py).

Arguments that a form writes as one JSON object follow their schema in every respect. If a form writes each
argument separately, as tags or pairs, they are the arguments of `properties`, in that order. A string that
the form does not quote follows `enum` and `const`, but no other keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.errors import InvalidRequestError
from hotset.parameters import shown
from hotset.text.constraint import is_marker
from hotset.text.grammar_child import JSON_SPACE, NAME_KEY
from hotset.text.tokenizer import Tokenizer
from hotset.text.tool_calls.arguments import Json, Pairs, Tags
from hotset.text.tool_calls.bodies import Named, Objects, kimi_head
from hotset.text.tool_calls.forms import Form
from hotset.text.tool_calls.values import properties_of, resolved, types_of

MAX_CALLS = 16  # of one list: bounds the answer of a model that never stops calling
_GAP = r"/\n?/"
_TEXT = "/(?s:.*)/"

_MORE = {
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "anyOf",
    "oneOf",
    "allOf",
}  # may name arguments

Function = Mapping[str, Any]


@dataclass(frozen=True)
class CallRules:
    """Lark of one call, or of all calls if one pair of marks encloses them.

    opening: its first mark; "" if the form has none. rest: the Lark after the opening. gap: the Lark between
    several calls; None if only one can follow.
    """

    opening: str
    rest: str
    gap: str | None


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def mark(tokenizer: Tokenizer, text: str) -> str:
    """Return Lark of a mark. Tokens that are markers appear in it by their ids: `<[id]>`."""
    parts: list[str] = []
    plain = ""
    for part in re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", text):
        id = tokenizer.vocabulary.get(part)
        if id is not None and is_marker(tokenizer, id):
            parts += [literal(plain)] * bool(plain) + [f"<[{id}]>"]
            plain = ""
        else:
            plain += part
    return " ".join(parts + [literal(plain)] * bool(plain))


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return Lark of JSON by a schema. The model may ignore keywords that llguidance lacks."""
    guidance = {"whitespace_pattern": JSON_SPACE, "lenient": True}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': guidance}, allow_nan=False)}"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the schema of a tool must be plain data, as JSON has it ({error})"
        ) from None


def schema_of(function: Function) -> Mapping[str, Any]:
    """Return the schema of the arguments: an object, without further properties unless it allows them."""
    schema = function.get("parameters") or {"properties": {}}
    closed = {} if "properties" not in schema or schema.keys() & _MORE else {"additionalProperties": False}
    return {"type": "object", **closed, **schema, NAME_KEY: name_of(function)}


def name_of(function: Function) -> str:
    """Return the name of a tool as messages show it."""
    return f"the tool {shown(function['name'])}"


class CallGrammar:
    """The grammar of calls of a list of functions.

    rules: Lark rules that the result of `call` refers to. many: whether an answer may have several calls.
    """

    def __init__(self, tokenizer: Tokenizer, functions: Sequence[Function], *, many: bool) -> None:
        self.rules: list[str] = []
        self._tokenizer, self._functions, self._many = tokenizer, functions, many

    def call(self, form: Form, template: str) -> CallRules:
        """Return the Lark of calls in `form`. Raise InvalidRequestError for schemas that it cannot follow."""
        # Mistral's older templates put lists of objects after the mark that the newer ones use for names.
        if form.named and (form.name != "mistral" or "[ARGS]" in template):
            return self._named(form.named, template, form.writes_bare)
        return self._objects(form.objects or Objects(), form.writes_bare)

    # ---- objects ----

    def _objects(self, body: Objects, is_bare: bool) -> CallRules:
        home = "#/items/anyOf" if body.as_list else "#/anyOf"
        schema: dict[str, Any] = {"anyOf": [self._object(body, i, home) for i in range(len(self._functions))]}
        if body.as_list:
            most = MAX_CALLS if self._many else 1
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": most}
        self.rules.append(f"object: {json_rule(schema)}")
        if is_bare:
            return CallRules("", "object", None)
        opening, end = self._mark(body.opening[0]), self._mark(body.end)
        if body.as_list:
            return CallRules(opening, f"object {end}", None)
        return CallRules(opening, f'"\\n" object "\\n" {end}', '"\\n"')

    def _object(self, body: Objects, i: int, home: str) -> dict[str, Any]:
        function = self._functions[i]
        key = body.arguments_key
        properties = {
            body.name_key: {"const": function["name"]},
            key: moved(schema_of(function), f"{home}/{i}/properties/{key}"),
        }
        if body.name_key == "tool_name":
            properties = {"tool_call_id": {"type": "string", "pattern": "^[0-9]{1,2}$"}, **properties}
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    # ---- names, followed by arguments ----

    def _named(self, body: Named, template: str, is_bare: bool) -> CallRules:
        names = []
        for i, function in enumerate(self._functions):
            in_section = self._mark(body.call) if body.section else ""
            head = f"{in_section} {self._head(body, function['name'], template)}"
            arguments = self._arguments(body, i, function)
            gap = _GAP if body.gap and not isinstance(body.arguments, Json) else ""
            self.rules.append(f"call_{i}: {head} {arguments} {gap} {self._mark(body.end)}")
            names.append(f"call_{i}")
        one = " | ".join(names)
        gap = _GAP if body.gap else ""
        if not body.section:
            return CallRules(self._mark(body.call), f"({one})", gap)
        self.rules.append(f"any_call: {one}")
        between = '", "' if not body.call else gap
        calls = (
            f"any_call ({between} any_call){{0,{MAX_CALLS - 1}}}" if body.many and self._many else "any_call"
        )
        if not body.call:
            calls = f'"[" {calls} "]"'
        if is_bare:
            return CallRules("", calls, None)
        rest = f"{gap} {calls} {gap} {self._mark(body.section_end)}"
        return CallRules(self._mark(body.section[0]), rest, None if body.many else gap)

    def _head(self, body: Named, name: str, template: str) -> str:
        after = self._mark(body.after_name)
        if body.head is kimi_head:
            return f"{literal(f'functions.{name}:')} /[0-9]{{1,2}}/ {after}"
        if "[CALL_ID]" in body.in_head and "[CALL_ID]" in template:
            return f"{literal(name)} {self._mark('[CALL_ID]')} /[A-Za-z0-9]{{9}}/ {after}"
        return f"{literal(name)} {after}"

    def _arguments(self, body: Named, i: int, function: Function) -> str:
        schema = schema_of(function)
        if isinstance(body.arguments, Json):
            return json_rule(schema)
        properties = properties_of(schema)
        if not properties and any(key in schema for key in ("$ref", "anyOf", "oneOf", "allOf")):
            raise InvalidRequestError(
                f"the parameters of the tool {shown(function['name'])} have no properties of their own, and "
                'the model writes arguments by name; give "properties" at the top of the schema'
            )
        required = schema.get("required")
        required = required if isinstance(required, list | tuple) else ()
        named = []
        for n, (key, one) in enumerate(properties.items()):
            rule = f"arg_{i}_{n}"
            self._argument(body.arguments, rule, key, one, schema)
            named.append((rule, key in required))
        if isinstance(body.arguments, Tags):
            gap = _GAP if body.gap else ""
            return " ".join(f"({gap} {rule}){'' if must else '?'}" for rule, must in named)
        return f"{self._list(f'args_{i}', named)} {literal(body.arguments.end)}"

    def _list(self, name: str, items: list[tuple[str, bool]]) -> str:
        """Return a rule for items with commas between the present ones; it has one rule per first item."""
        if not items:
            return ""
        first, more = "", ""
        for n, (rule, must) in reversed(list(enumerate(items))):
            begins = f"{rule} {more}"
            first = begins if must or not first else f"{begins} | {first}"
            self.rules.append(f"{name}_{n}: {first}")
            follows = f'("," " "? {rule}){"" if must else "?"} {more}'
            self.rules.append(f"{name}_{n}_more: {follows}")
            first, more = f"{name}_{n}", f"{name}_{n}_more"
        return first if any(must for _, must in items) else f"({first})?"

    def _argument(
        self, form: Tags | Pairs, rule: str, key: str, schema: Any, root: Mapping[str, Any]
    ) -> None:
        types = types_of(schema, root)
        is_raw = "string" in types and not (isinstance(form, Pairs) and len(form.quotes[0]) == 1)
        if isinstance(form, Tags):
            attribute = f' string="{"true" if is_raw else "false"}"' if form.says_type else ""
            before = self._mark(form.before)
            gap = _GAP if form.before and form.before != ">" else ""
            head = f"{self._mark(form.key)} {literal(key)} {self._mark(form.key_end)} "
            head += f"{literal(attribute)} " * bool(attribute) + f"{gap} {before}" + ' "\\n"' * form.lines
            end = "\n" * form.lines + form.value_end
        else:
            head = f"{literal(key + form.between)}" + f" {self._mark(form.quotes[0])}" * is_raw
            end = form.quotes[0] if is_raw else ""
        if not is_raw:
            value = json_rule(_alone(schema, root))
            self.rules.append(f"{rule}: {head} {value} {self._mark(end)}")
            return
        known = _strings(schema, root)
        if known:
            values = " | ".join(map(literal, known))
            self.rules.append(f"{rule}: {head} ({values}) {self._mark(end)}")
            return
        self.rules.append(f"{rule}: {head} {rule}_text")
        self.rules.append(f"{rule}_text{self._text_until(end)}")

    def _text_until(self, end: str) -> str:
        """Return the end of a rule: any text up to the mark `end`."""
        found = self._mark(end)
        if "<[" in found:
            return f": {_TEXT} {self._mark(end.strip())}"
        return f"[suffix={found}]: {_TEXT}"

    def _mark(self, text: str) -> str:
        return mark(self._tokenizer, text)


def _strings(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the texts that a schema lists as `enum` or `const`; [] if it lists none."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = resolved(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return []
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    is_list = isinstance(values, list) and values and all(isinstance(value, str) for value in values)
    return values if is_list else []


def _alone(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one argument, with the root schema in `$defs` if it has references."""
    if not isinstance(schema, Mapping):
        return {} if schema is True else {"not": {}}
    alone = dict(moved(schema, "#/$defs/root"))
    if NAME_KEY in root:
        alone[NAME_KEY] = root[NAME_KEY]
    if '"$ref"' in json.dumps(schema, default=str):
        alone["$defs"] = {"root": moved(root, "#/$defs/root")}
    return alone


def moved(schema: Any, home: str) -> Any:
    """Return `schema` with references to its own root changed to `home`, its place in another schema."""
    if isinstance(schema, Mapping):
        return {
            key: home + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else moved(value, home)
            for key, value in schema.items()
        }
    if isinstance(schema, list | tuple):
        return [moved(value, home) for value in schema]
    return schema
