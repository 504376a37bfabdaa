"""Rows of the table of request fields (fields.py), and the JSON bodies that are checked against them.

A row states the effect of a field: it sets something, needs no action, is ignored with a reason, or is
refused with a reason. A field without a row is ignored, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic_core import core_schema

from hotset.errors import InvalidRequestError
from hotset.parameters import Parameter, below_infinity, real_number, whole_number

MAX_IGNORED = 20
"""Ignored fields of a request, or of one object in it, that are reported."""
MAX_NAME = 64
"""Characters of the name of an ignored field that are reported."""

_UNKNOWN = "hotset does not know it"


# ---- types: a value of another JSON type is converted if that loses nothing ----


def _number(given: Any) -> Any:
    if isinstance(given, str) and len(given) < 32:
        try:
            return float(given)
        except ValueError:
            return given
    return given


def _whole(given: Any) -> Any:
    if isinstance(given, str) and len(given) < 32 and re.fullmatch(r"-?\d+(\.0+)?", given, re.ASCII):
        return int(given.partition(".")[0])
    if isinstance(given, float) and given.is_integer():
        return int(given)
    return given


def _flag(given: Any) -> Any:
    if isinstance(given, int) and given in (0, 1):
        return bool(given)
    return {"true": True, "false": False}.get(given.lower(), given) if isinstance(given, str) else given


def _text(given: Any) -> Any:
    return str(given) if isinstance(given, int | float) and not isinstance(given, bool) else given


def _checked(kind: Any, check: Callable[[str, Any], Any], low: float | None, high: float | None) -> Any:
    """Return a numeric type with a check of parameters.py. low, high: the range in the OpenAPI document.

    The check gets no name: a message about a body begins with the path of the field.
    """
    read, word = (_whole, "integer") if kind is int else (_number, "number")

    def validated(given: Any) -> Any:
        value = read(given)
        try:
            check("", value)
        except InvalidRequestError as error:
            raise ValueError(str(error).strip()) from None
        return value

    bounds = {"minimum": low, "maximum": high}
    schema = {"type": word} | {name: bound for name, bound in bounds.items() if bound is not None}
    return Annotated[kind, BeforeValidator(validated), WithJsonSchema(schema)]


def number_of(parameter: Parameter) -> Any:
    """Return the type of a numeric parameter, with its own check."""
    check, low, high = lambda name, value: parameter.checked(value, name), parameter.least, parameter.high
    return _checked(parameter.kind, check, low, high)


def number(low: float | None = None, high: float | None = None) -> Any:
    """Return the type of a number in a range; a text that spells a number is accepted."""
    return _checked(float, lambda name, value: real_number(name, value, low, high), low, high)


def integer(low: int | None = None, high: int | None = None) -> Any:
    """Return the type of a whole number in a range; `40.0` and "40" are accepted."""
    return _checked(int, lambda name, value: whole_number(name, value, low, high), low, high)


Integer = integer()
Number = number()
Bias = _checked(float, below_infinity, None, None)
Flag = Annotated[bool, BeforeValidator(_flag)]
Text = Annotated[str, BeforeValidator(_text)]


def at_most(n: int) -> BeforeValidator:
    """Return a check of an object with names that the client chooses; it may have `n` entries."""

    def checked(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > n:
            raise ValueError(f"it has {len(given)} entries, and at most {n} are accepted")
        return given

    return BeforeValidator(checked)


# ---- rows ----

Use = Literal["sampling", "request", "template", "thinking", "route", "free", "ignored", "refused"]


MANY = "*"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Row:
    """One field of requests.

    says: the meaning of the value, or why the field is ignored or refused.
    kind: type and range.
    also: further names of the field; the first that a request has counts.
    use: the value is a sampling parameter ("sampling"), a field of AnswerRequest ("request"), a variable of
        the template ("template"), says how much to think ("thinking"), or is read by a route ("route").
        Otherwise the field needs no action ("free"), is "ignored", or is "refused".
    sets: the setting it gives a value to; by default the one of its name. MANY: `read` returns several
        settings by name, which rows above this one override.
    read: makes the setting's value; None unsets the setting, even if it has a default.
    neutral: values without effect.
    """

    name: str
    says: str
    kind: Any = Any
    also: tuple[str, ...] = ()
    use: Use = "sampling"
    sets: str = ""
    read: Callable[[Any], Any] = _same
    neutral: tuple[Any, ...] = ()

    @property
    def setting(self) -> str:
        return self.sets or self.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    def values(self, body: Body) -> Iterator[tuple[str, Any]]:
        """Yield the names that a body has for this field, with their values, in the order of preference."""
        for name in self.names:
            if (attribute := _attribute(name)) in body.model_fields_set:
                yield name, getattr(body, attribute)

    def asks(self, value: Any) -> bool:
        """Return whether a value has an effect: false and empty values have none."""
        return value not in (None, False, "", *self.neutral) and value != [] and value != {}


# ---- bodies ----


def _fail_fast(schema: Any) -> None:
    """Make every list in one of pydantic's schemas stop at its first error."""
    if isinstance(schema, list | tuple):
        for one in schema:
            _fail_fast(one)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for one in schema.values():
            _fail_fast(one)


class Body(BaseModel):
    """The JSON object of a request, or an object in it.

    A null field counts as absent: clients write out every field that they know. A list is checked up to its
    first wrong element. Only the names of the first unknown fields are kept, for `ignored_fields`.
    rows: of the table, for the fields that `having` added.
    """

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)
    rows: ClassVar[tuple[Row, ...]] = ()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known, fields = cls._names(), {}
        unknown: dict[str, None] = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in known:
                fields[name] = value
            elif len(unknown) < MAX_IGNORED:
                unknown[name[:MAX_NAME].encode("ascii", "replace").decode()] = None
        return fields | unknown

    @classmethod
    def _names(cls) -> frozenset[str]:
        """Return the names that fields have in JSON."""
        names = cls.__dict__.get("_json_names")
        if names is None:
            aliases = {field.alias for field in cls.model_fields.values() if field.alias}
            names = frozenset(cls.model_fields.keys() | aliases)
            type.__setattr__(cls, "_json_names", names)
        return names

    def settings(self, use: Use) -> dict[str, Any]:
        """Return the settings that the given fields of this use make, by name."""
        return {setting: value for setting, (value, _) in self.sources(use).items()}

    def sources(self, use: Use) -> dict[str, tuple[Any, str]]:
        """Return the settings with the names of the fields that make them."""
        found: dict[str, tuple[Any, str]] = {}
        for row in self.rows:
            if row.use != use:
                continue
            for name, given in row.values(self):
                value = row.read(given)
                made = value if row.sets == MANY else {row.setting: value}
                found = {setting: (one, name) for setting, one in made.items()} | found
        return found


class UnknownPart(Body):
    """A part of a request of a type that hotset does not know, or does not support. It is ignored."""

    type: str

    @property
    def why_ignored(self) -> str | None:
        """Return the reason; None if hotset supports the type of this part after all."""
        return _UNKNOWN


class ByType:
    """An annotation of a union of bodies, which their field `type` distinguishes.

    default: the type of an object without one. UnknownPart in the union accepts all other types.
    """

    def __init__(self, default: str | None = None) -> None:
        self._default = default

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        choices: dict[str, Any] = {}
        for body in get_args(source):
            kinds = get_args(body.model_fields["type"].annotation)
            for kind in kinds or ("unknown",):
                if isinstance(kind, str):
                    choices[f"[{kind}]"] = handler.generate_schema(body)  # errors omit names in brackets

        def tag(given: Any) -> str:
            kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
            found = f"[{kind or self._default}]"
            return found if found in choices else "[unknown]"

        return core_schema.tagged_union_schema(choices, tag)


def settings_of(use: Use) -> Callable[[Body], dict[str, Any]]:
    """Return the `read` of a row whose value is a body with settings of this use."""
    return lambda given: given.settings(use)


_B = TypeVar("_B", bound=Body)


def having(*rows: Row) -> Callable[[type[_B]], type[_B]]:
    """Return a class decorator that gives a body the fields of rows, each with all of its names."""

    def with_rows(body: type[_B]) -> type[_B]:
        fields: dict[str, Any] = {}
        for row in rows:
            kind = Annotated[Any, AfterValidator(_refusal(row))] if row.use == "refused" else row.kind | None
            for name in row.names:
                field = Field(None, alias=name, description=row.says)
                fields[_attribute(name)] = (kind, field)
        made = create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )
        made.rows = (*body.rows, *rows)
        return made

    return with_rows


def _attribute(name: str) -> str:
    """Return the attribute for a field; it avoids attributes of pydantic's, such as `json`."""
    return f"{name}_" if hasattr(BaseModel, name) else name


def _refusal(row: Row) -> Callable[[Any], Any]:
    def checked(given: Any) -> Any:
        if row.asks(given):
            raise ValueError(row.says)
        return given

    return checked


def ignored_fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the ignored fields of a body, as paths without the positions in lists, with the reasons."""
    if isinstance(value, UnknownPart):
        if reason := value.why_ignored:
            yield path + value.type[:MAX_NAME], reason
    elif isinstance(value, Body):
        for name in value.model_extra or ():
            yield path + name, _UNKNOWN
        first: dict[tuple[Use, str], tuple[str, Any]] = {}
        for row in value.rows:
            for name, given in row.values(value):
                if row.use == "ignored" and row.asks(given):
                    yield path + name, row.says
                elif row.use in ("sampling", "request", "thinking") and row.sets != MANY:
                    other, wanted = first.setdefault((row.use, row.setting), (name, given))
                    if given != wanted:
                        yield path + name, f"{other} says otherwise"
        for name in value.model_fields_set:
            yield from ignored_fields(getattr(value, name, None), f"{path}{name.rstrip('_')}.")
    elif isinstance(value, list) and value and isinstance(value[0], Body | list):
        for one in value:
            yield from ignored_fields(one, path)
