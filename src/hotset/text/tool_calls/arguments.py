"""How forms write the arguments of a call, after its name: JSON, tags, or pairs.

Each reader passes the arguments on as JSON. It returns whether they are complete. Partial ones end where the
model broke off, so they are not valid JSON and no client runs half a call.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.text.tool_calls.parser import ToolCallParser
from hotset.text.tool_calls.reader import Steps
from hotset.text.tool_calls.values import TYPES, as_json, properties_of, quoted, typed, types_of


@dataclass(frozen=True)
class Json:
    """A form like `{"city": "Rome"}`, passed on as the model writes it.

    A call without an object has no arguments.
    """

    @property
    def opening(self) -> str:
        return "{"

    def read(self, parser: ToolCallParser, _: str, ends: tuple[str, ...]) -> Steps[bool]:
        yield from parser.space()
        if (yield from parser.peek("{", "[")):
            return (yield from parser.value(parser.arguments, ends)) == ""
        if ends and (yield from parser.peek(*ends)):
            parser.arguments("{}")
            return True
        if ends:
            yield from parser.until(ends, parser.arguments)
        return False


@dataclass(frozen=True)
class Tags:
    """A form like `<parameter=city>Rome</parameter>`. The function's schema gives the type of a value.

    key, key_end: around the name of a parameter. before: the mark before its value. Attributes may come
    first: `string="true"` and `string="false"` tell whether the value is text. says_type: a grammar writes
    them. lines: line ends on both sides of the value belong to the form.
    """

    key: str
    key_end: str
    value_end: str
    before: str = ""
    lines: bool = False
    says_type: bool = False

    @property
    def opening(self) -> str:
        return self.key

    def read(self, parser: ToolCallParser, name: str, ends: tuple[str, ...]) -> Steps[bool]:
        schema = parser.schema(name)
        properties = properties_of(schema)
        opening = "{"
        while True:
            parser.hold()
            yield from parser.space()
            if not (yield from parser.at(self.key)):
                break
            key = yield from parser.head(self.key_end)
            attributes = (yield from parser.head(self.before)) if self.before else ""
            if key is None or attributes is None:
                return _broken(parser, opening)
            parser.drop()
            types = types_of(properties.get(key), schema)
            if 'string="true"' in attributes:
                types = frozenset({"string"})
            elif 'string="false"' in attributes:
                types = TYPES - {"string"}
            parser.arguments(f"{opening}{quoted(key)}: ")
            opening = ", "
            if not (yield from self._value(parser, types)):
                return False
        if not (yield from parser.peek(*ends)):
            return _broken(parser, opening)
        parser.drop()
        parser.arguments("{}" if opening == "{" else "}")
        return True

    def _value(self, parser: ToolCallParser, types: frozenset[str]) -> Steps[bool]:
        ends: tuple[str, ...] = (self.value_end,)
        if self.lines and (yield from parser.at("\n")):
            ends = (f"\n{self.value_end}", self.value_end)
        if types == {"string"}:  # passed on unchanged
            parser.arguments('"')
            end = yield from parser.until(ends, lambda text: parser.arguments(quoted(text)[1:-1]))
            parser.arguments('"' if end else "")
        else:
            pieces: list[str] = []
            end = yield from parser.until(ends, pieces.append)
            text = "".join(pieces)
            parser.arguments(typed(text, types) if end else quoted(text)[:-1])
        parser.take(len(end))
        return bool(end)


@dataclass(frozen=True)
class Pairs:
    """A form like `city="Rome", days=2)` or `city:<escape>Rome<escape>,days:2}`.

    Literals follow names, up to a bracket.
    """

    between: str
    end: str
    quotes: tuple[str, ...]
    opening: str = "{"

    def read(self, parser: ToolCallParser, _: str, ends: tuple[str, ...]) -> Steps[bool]:
        opening = "{"
        while True:
            parser.hold()
            yield from parser.space(",")
            if (yield from parser.at(self.end)):
                parser.drop()
                parser.arguments("{}" if opening == "{" else "}")
                return True
            quote = yield from parser.at(*self.quotes)
            key = (yield from parser.head(quote)) if quote else (yield from parser.name())
            yield from parser.space()
            if not key or not (yield from parser.at(self.between)):
                return _broken(parser, opening)
            parser.drop()
            parser.arguments(f"{opening}{quoted(key)}: ")
            opening = ", "
            yield from parser.space()
            pieces: list[str] = []
            stop = yield from parser.value(pieces.append, (",", *ends), self.quotes)
            text = "".join(pieces)
            if stop is None:
                parser.arguments(quoted(text)[:-1])
                return False
            parser.arguments(as_json(text) or quoted(_unquoted(text.strip(), self.quotes)))


def _unquoted(text: str, quotes: tuple[str, ...]) -> str:
    """Strip quotes from a string with unescaped quotes inside, as LFM2.5's template writes them."""
    for quote in quotes:
        if len(text) >= 2 * len(quote) and text.startswith(quote) and text.endswith(quote):
            return text[len(quote) : -len(quote)]
    return text


def _broken(parser: ToolCallParser, opening: str) -> bool:
    """Make the text since `hold` text again, because it is not an argument. Return False."""
    parser.arguments("{" if opening == "{" else "")
    parser.reject()
    return False


Arguments = Json | Tags | Pairs
