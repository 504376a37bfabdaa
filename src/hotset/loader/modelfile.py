"""Modelfiles in Ollama's format: a model made from another one.

    FROM smollm2-135m
    SYSTEM \"\"\"Answer in one sentence.\"\"\"
    ADAPTER style.gguf
    PARAMETER temperature 0.2
    PARAMETER stop "END"
    MESSAGE user What is water?
    MESSAGE assistant H2O.

The system message and the example messages become a part of the chat template. So every API schema, the chat
and the count of tokens include them: the template begins with lines that put them before the conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotset.engine.sampler import SamplingParams
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import expanded
from hotset.formats.gguf import open_gguf
from hotset.formats.lora import open_gguf_adapter
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import shown
from hotset.sampling_parameters import PARAMETERS
from hotset.settings import LoadSettings
from hotset.storage.created import Created
from hotset.text import turn_formats
from hotset.text.chat import MAX_SOURCE_CHARS

MAX_CHARS = 1 << 20  # of a Modelfile
_ROLES = ("system", "user", "assistant")
_INSTRUCTIONS = ("from", "system", "template", "parameter", "message", "adapter", "license")
# The names of parameters in a Modelfile.
_SAMPLING = {one.modelfile: one for one in PARAMETERS.values() if one.modelfile}
_LOAD = {one.modelfile: one for one in LOAD_PARAMETERS.values() if one.modelfile}
# Ollama's parameters for loading, which have no effect here.
_LOADING = (
    "num_keep", "num_batch", "num_gpu", "num_gqa", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv",
    "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "rope_frequency_base",
    "rope_frequency_scale", "penalize_newline",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Modelfile:
    """A parsed Modelfile.

    base: of FROM. adapters: paths. parameters: name → values, as texts. messages: (role, text) of the
    examples.
    """

    base: str
    system: str = ""
    template: str | None = None
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    messages: tuple[tuple[str, str], ...] = ()
    adapters: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Modelfile:
        """Parse the text of a Modelfile. Raises InvalidRequestError, which names the line."""
        if len(text) > MAX_CHARS:
            raise InvalidRequestError(
                f"the Modelfile has {len(text)} characters, and at most {MAX_CHARS} are read"
            )
        found: dict[str, Any] = {}
        parameters: dict[str, list[str]] = {}
        messages: list[tuple[str, str]] = []
        adapters: list[str] = []
        for number, instruction, value in _instructions(text):
            if instruction == "parameter":
                name, _, given = value.partition(" ")
                parameters.setdefault(name.lower(), []).append(_unquoted(given.strip()))
            elif instruction == "message":
                role, _, content = value.partition(" ")
                if role not in _ROLES:
                    raise InvalidRequestError(
                        f"line {number}: MESSAGE is of {', '.join(_ROLES)}, not {shown(role)}"
                    )
                messages.append((role, _unquoted(content.strip())))
            elif instruction == "adapter":
                adapters.append(_unquoted(value))
            elif instruction != "license":
                found["base" if instruction == "from" else instruction] = _unquoted(value)
        if not found.get("base"):
            raise InvalidRequestError("the Modelfile has no FROM, which names the model that it begins with")
        values = {name: tuple(given) for name, given in parameters.items()}
        return cls(parameters=values, messages=tuple(messages), adapters=tuple(adapters), **found)

    @property
    def can_be_written(self) -> bool:
        """Return whether parsing `text` restores the object.

        Three quotation marks would end a value, and a line break a name.
        """
        try:
            return Modelfile.parse(self.text) == self
        except InvalidRequestError:
            return False

    @property
    def text(self) -> str:
        """Serialise to the text of a Modelfile."""
        quoted = '"""{}"""'.format
        lines = [f"FROM {self.base}", *(f"ADAPTER {quoted(path)}" for path in self.adapters)]
        lines += [f"TEMPLATE {quoted(self.template)}"] if self.template else []
        lines += [f"SYSTEM {quoted(self.system)}"] if self.system else []
        for name, values in self.parameters.items():
            plain = [value if _is_plain(value) else quoted(value) for value in values]
            lines += [f"PARAMETER {name} {value}" for value in plain]
        lines += [f"MESSAGE {role} {quoted(text)}" for role, text in self.messages]
        return "\n".join(lines) + "\n"


def _instructions(text: str) -> Iterable[tuple[int, str, str]]:
    """Yield (line, instruction, value); a value between three quotation marks may have several lines."""
    lines = text.replace("\r\n", "\n").split("\n")
    i = 0
    while i < len(lines):
        number, line = i + 1, lines[i].strip()
        i += 1
        if not line or line.startswith("#"):
            continue
        word, _, value = line.partition(" ")
        if word.lower() not in _INSTRUCTIONS:
            known = ", ".join(name.upper() for name in _INSTRUCTIONS)
            raise InvalidRequestError(f"line {number}: there is no {shown(word)}; instructions are {known}")
        value = value.strip()
        if value.count('"""') == 1:
            parts = [value]
            while i < len(lines) and parts[-1].count('"""') < 1 + (len(parts) == 1):
                parts.append(lines[i])
                i += 1
            value = "\n".join(parts).rstrip()
            if value.count('"""') < 2:
                raise InvalidRequestError(f'line {number}: its """ is not closed')
        yield number, word.lower(), value


def _unquoted(value: str) -> str:
    for quote in ('"""', '"'):
        if len(value) >= 2 * len(quote) and value.startswith(quote) and value.endswith(quote):
            return value[len(quote) : -len(quote)]
    return value


def _is_plain(value: str) -> bool:
    """Return whether a value is read unchanged without quotation marks around it."""
    return value == _unquoted(value.strip()) and not {"\n", '"'} & set(value)


def made_of(
    modelfile: Modelfile, path: Path, *, base: str, source: str, folder: Path | None = None
) -> Created:
    """Return the created model of a Modelfile.

    path: the file of its base. base: the stored name of the base. source: its text. folder: the folder that
    relative paths of adapters start from. Raises InvalidRequestError, and errors of opening the files.
    """
    sampling, load = _settings(modelfile.parameters)
    if modelfile.adapters:
        load["lora"] = [[str(_adapter(one, folder)), 1.0] for one in modelfile.adapters]
    template = modelfile.template
    if template is not None and template.strip() in turn_formats.FORMATS:
        template = turn_formats.named(template)
    elif template is not None and not re.search(r"\{%|\{\{-?\s*messages", template):
        raise InvalidRequestError(
            "TEMPLATE is a template of Go, and hotset's are Jinja's: name one "
            f"({', '.join(sorted(turn_formats.FORMATS))}), or leave it out for the model's own"
        )
    if modelfile.system or modelfile.messages:
        if template is None:
            with open_gguf(path) as gguf:
                own = gguf.metadata.get("tokenizer.chat_template")
                tokens = gguf.metadata.get("tokenizer.ggml.tokens")
            if not isinstance(own, str) or not own:
                own = turn_formats.by_vocabulary(tokens if isinstance(tokens, list) else ()).source
            template = own
        template = _with_messages_of(modelfile, template)
    if template is not None and len(template) > MAX_SOURCE_CHARS:
        raise InvalidRequestError(
            f"the template has {len(template)} characters, and at most {MAX_SOURCE_CHARS} are read"
        )
    return Created(base=base, template=template, sampling=sampling, load=load, modelfile=source)


def replaced_template(made: Created, template: str) -> str:
    """Return a template in place of a created model's own, with the messages of its Modelfile."""
    return _with_messages_of(Modelfile.parse(made.modelfile), template) if made.modelfile else template


def _with_messages_of(modelfile: Modelfile, template: str) -> str:
    system = [("system", modelfile.system)] if modelfile.system else []
    return with_messages(template, system, modelfile.messages) if system or modelfile.messages else template


def _adapter(name: str, folder: Path | None) -> Path:
    """Return the path of an ADAPTER, a file or a folder. Raises InvalidRequestError or the file's error."""
    found = expanded(name)
    if not found.is_absolute():
        if folder is None:
            raise InvalidRequestError(f"ADAPTER is a whole path on the server, not {shown(name)}")
        found = folder.absolute() / found
    if found.is_file():
        with open_gguf_adapter(found):  # raises an error for an invalid file
            pass
    elif not (found / "adapter_config.json").is_file():
        raise InvalidRequestError(
            f"ADAPTER: there is no adapter {found}; name a GGUF file, or a folder of PEFT's"
        )
    return found


def with_messages(template: str, system: list[tuple[str, str]], examples: Iterable[tuple[str, str]]) -> str:
    """Return a chat template that puts a default system message, then examples, before conversations."""

    def literal(messages: Iterable[tuple[str, str]]) -> str:
        # JSON texts, lists and objects are also valid in Jinja.
        return json.dumps([{"role": role, "content": text} for role, text in messages], ensure_ascii=False)

    return (
        "{%- if messages and messages[0]['role'] == 'system' -%}"
        "{%- set _first, messages = (messages | list)[:1], (messages | list)[1:] -%}"
        "{%- else -%}"
        f"{{%- set _first = {literal(system)} -%}}"
        "{%- endif -%}"
        f"{{%- set messages = _first + {literal(examples)} + (messages | list) -%}}"
        f"{template}"
    )


def _settings(parameters: Mapping[str, tuple[str, ...]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return fields of SamplingParams and of LoadSettings. Raises InvalidRequestError."""
    sampling: dict[str, Any] = {}
    load: dict[str, Any] = {}
    for name, values in parameters.items():
        if name == "stop":
            sampling["stop"] = list(values)
        elif name in _LOAD:
            load[_LOAD[name].name] = _number(name, values[-1], int)
        elif name in _SAMPLING:
            parameter = _SAMPLING[name]
            sampling[parameter.name] = _number(name, values[-1], int if parameter.kind is int else float)
        elif name not in _LOADING:
            known = ", ".join(sorted((*_SAMPLING, *_LOAD, "stop")))
            raise InvalidRequestError(f"there is no PARAMETER {shown(name)}; there are {known}")
    for name, least in ("max_tokens", 1), ("seed", 0):  # lower values mean no limit, and any seed
        if sampling.get(name, least) < least:
            del sampling[name]
    try:
        SamplingParams(**sampling)
        LoadSettings(**load)
    except HotsetError as error:
        fields = {one.name: name for name, one in (_SAMPLING | _LOAD).items()}
        field_name, _, rest = str(error).partition(" ")
        raise InvalidRequestError(f"PARAMETER {fields.get(field_name, field_name)} {rest}") from None
    return sampling, load


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise InvalidRequestError(f"PARAMETER {name} is {what}, not {shown(text)}") from None
