"""Settings for loading and using each model of a server with several: the file of `--models-file`.

max_memory = "12G"              # that loaded models have together; a number: GiB
keep_alive = "10m"              # idle models are unloaded after that; -1: never

[default]                       # of every model that says nothing else
load = { n_ctx = 8192 }         # fields of LoadSettings

[models.coder]
model = "qwen2.5-coder.gguf"    # a path, from this file's folder, or a stored name; default: "coder"
aliases = ["gpt-4o"]
pinned = true                   # loaded at the start, never unloaded
template = "coder.jinja"        # a chat template in place of the file's
load = { n_ctx = 16384, kv_type = "q8_0", lora = ["style.gguf:0.5"] }  # (paths as of model)
sampling = { temperature = 0.2 }  # fields of SamplingParams, for requests that leave them out
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hotset.engine.sampler import SamplingParams
from hotset.errors import HotsetError, InvalidRequestError, did_you_mean
from hotset.files import read_small_text, unreadable
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import flag, seconds, shown, size, text
from hotset.settings import LoadSettings
from hotset.storage.aliases import check_alias
from hotset.text.chat import MAX_SOURCE_CHARS

KEEP_ALIVE_SECONDS = 300.0
_LONGEST_SECONDS = 10 * 366 * 86400.0  # some clients cannot read a date later than that
_MAX_BYTES = 1 << 20
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "penalty_last_n", "presence_penalty",
    "frequency_penalty", "max_tokens", "seed", "stop",
)  # fmt: skip
_LOADING = tuple(LOAD_PARAMETERS)


def until_unloaded(value: float | str) -> float:
    """Return the seconds of a `keep_alive` in Ollama's form: a number, or a text such as "10m" or "1h30m".

    A negative value, and one of more than ten years, gives inf. Raises InvalidRequestError.
    """
    found = seconds("keep_alive", value, -math.inf)
    return found if 0 <= found <= _LONGEST_SECONDS else math.inf


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of one model, as in a table of the file. None, or empty: the server's setting.

    keep_alive: seconds without a request until it is unloaded; inf: only for memory. template: its text.
    """

    model: str | None = None
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    keep_alive: float | None = None
    template: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def over(self, other: ModelSettings) -> ModelSettings:
        """Return these settings, with missing ones taken from another object."""
        return replace(
            self,
            keep_alive=other.keep_alive if self.keep_alive is None else self.keep_alive,
            template=other.template if self.template is None else self.template,
            load={**other.load, **self.load},
            sampling={**other.sampling, **self.sampling},
        )


@dataclass(frozen=True, kw_only=True)
class ModelsFile:
    """A file of models.

    max_memory: GiB. default: settings of every model. models: by name, each with the defaults. folder: its
    paths are relative to it.
    """

    max_memory: float | None = None
    keep_alive: float | None = None
    default: ModelSettings = field(default_factory=ModelSettings)
    models: Mapping[str, ModelSettings] = field(default_factory=dict)
    folder: Path = Path()

    @classmethod
    def read(cls, path: Path) -> ModelsFile:
        """Read a file. Raises InvalidRequestError, which names the error and its place."""
        try:
            given = tomllib.loads(read_small_text(path, _MAX_BYTES))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"{path} is not a TOML file: {error}") from None
        try:
            return cls._of(given, path.parent)
        except HotsetError as error:
            raise InvalidRequestError(f"{path}: {error}") from None
        except TypeError as error:  # such as a field of LoadSettings that is a table
            raise InvalidRequestError(f"{path} has a value of another type: {error}") from None

    @classmethod
    def _of(cls, given: dict[str, Any], folder: Path) -> ModelsFile:
        _check_names(given, ("max_memory", "keep_alive", "default", "models"), "the file")
        default = _settings(given.get("default", {}), "default", folder)
        if default.model is not None or default.aliases or default.pinned:
            raise InvalidRequestError("[default] has what all models share: no model, aliases or pinned")
        tables = _table(given.get("models", {}), "models")
        models = {
            name: _settings(table, f"models.{name}", folder).over(default) for name, table in tables.items()
        }
        memory, keep = given.get("max_memory"), given.get("keep_alive")
        return cls(
            max_memory=None if memory is None else size("max_memory", memory),
            keep_alive=None if keep is None else until_unloaded(keep),
            default=default,
            models=models,
            folder=folder,
        )


def _settings(given: Any, where: str, folder: Path) -> ModelSettings:
    table = dict(_table(given, where))
    _check_names(table, tuple(one.name for one in fields(ModelSettings)), f"[{where}]")
    load = _table(table.get("load", {}), f"{where}.load")
    sampling = _table(table.get("sampling", {}), f"{where}.sampling")
    _check_names(load, _LOADING, f"{where}.load")
    _check_names(sampling, _SAMPLING, f"{where}.sampling")
    try:
        settings = LoadSettings(**load)
        if settings.lora is not None:
            load = load | {"lora": [[str(folder / path), scale] for path, scale in settings.loras]}
        SamplingParams(**sampling)
    except HotsetError as error:
        raise InvalidRequestError(f"[{where}] {error}") from None
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list):
        raise InvalidRequestError(f"[{where}] aliases is a list of names, not {shown(aliases)}")
    keep, template, model = table.get("keep_alive"), table.get("template"), table.get("model")
    return ModelSettings(
        model=None if model is None else text("model", model),
        aliases=tuple(check_alias(text("aliases", alias)) for alias in aliases),
        pinned=flag("pinned", table.get("pinned", False)),
        keep_alive=None if keep is None else until_unloaded(keep),
        template=None if template is None else _template(folder / text("template", template)),
        load=load,
        sampling=sampling,
    )


def _template(path: Path) -> str:
    try:
        return read_small_text(path, MAX_SOURCE_CHARS)
    except OSError as error:
        raise InvalidRequestError(unreadable(path, error)) from None


def _table(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequestError(f"{where} is a table, not {shown(given)}")
    return given


def _check_names(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            meant = did_you_mean(name.lower(), {one: one for one in known})
            raise InvalidRequestError(
                f"{where} has no {shown(name)} ({meant or 'it knows ' + ', '.join(known)})"
            )
