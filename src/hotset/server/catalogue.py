"""The models of a server: the names that requests may use, and their files.

A request never names a file: hotset looks up the name in this list and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.errors import FormatError, HotsetError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.server.model_settings import ModelSettings, ModelsFile
from hotset.storage import aliases, created, store
from hotset.storage.projectors import projector_of


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A model that requests may name. is_stored: the store has it, so that it may be deleted."""

    name: str
    path: Path
    settings: ModelSettings
    is_stored: bool = False


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Facts in a model file.

    size, modified: bytes and st_mtime_ns of its first file; n_bytes: of all. quantization: the tensor type
    with most of the bytes. has_zeros: whether its neurons can be zero, so that idle ones are skipped; None if
    this version cannot run the file. sees: whether it reads images, because it has a projector.
    """

    size: int
    modified: int
    n_bytes: int
    architecture: str
    n_parameters: int
    quantization: str
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    has_zeros: bool | None
    sees: bool = False

    @classmethod
    def of(cls, gguf: GGUFFile) -> FileFacts:
        stat, family = gguf.path.stat(), gguf.architecture
        n_bytes: dict[str, int] = {}
        for tensor in gguf.tensors.values():
            n_bytes[tensor.type.name] = n_bytes.get(tensor.type.name, 0) + tensor.nbytes

        def number(key: str) -> int:
            value = gguf.metadata.get(f"{family}.{key}", 0)
            return value if isinstance(value, int) else 0

        tokens = gguf.metadata.get("tokenizer.ggml.tokens")
        return cls(
            size=stat.st_size,
            modified=stat.st_mtime_ns,
            n_bytes=gguf.nbytes,
            architecture=family,
            n_parameters=gguf.n_parameters,
            quantization=max(n_bytes, key=lambda name: n_bytes[name], default=""),
            n_ctx_train=number("context_length"),
            n_vocab=len(tokens) if isinstance(tokens, Sequence) else 0,
            n_embd=number("embedding_length"),
            has_zeros=_has_zeros(gguf),
            sees=projector_of(gguf.path) is not None,
        )


def _has_zeros(gguf: GGUFFile) -> bool | None:
    try:
        return config_from_gguf(gguf).has_zeros
    except HotsetError:
        return None


class Catalogue:
    """The models of a server, as the last `scan` found them.

    named: models of the command line, by name. folder: its models are offered too. with_store: whether the
    models of the store are offered. file: settings, and more models.
    """

    def __init__(
        self,
        named: Mapping[str, Path],
        *,
        folder: Path | None = None,
        with_store: bool = False,
        file: ModelsFile | None = None,
    ) -> None:
        self._named, self._folder, self._with_store = dict(named), folder, with_store
        self.file = file or ModelsFile()
        self._facts: dict[Path, FileFacts] = {}
        self._damaged: dict[Path, tuple[int, int]] = {}  # sizes and times of files that cannot be read
        self._by_name: dict[str, Offered] = {}
        self.models: tuple[Offered, ...] = ()
        self.aliases: dict[str, str] = {}  # → the model's name

    def find(self, name: str) -> Offered | None:
        """Return the model of a name or an alias; case does not matter, and `:latest` is optional."""
        lower = name.lower()
        return self._by_name.get(lower) or self._by_name.get(aliases.untagged(lower))

    def scan(self) -> None:
        """Look for models. Call it in a thread, because it reads the disk. An error changes nothing."""
        found: dict[str, Offered] = {}
        for offered in self._files():
            found.setdefault(offered.name.lower(), offered)
        models = tuple(found.values())
        given = [(alias, one.name) for one in models for alias in one.settings.aliases]
        kept = {}
        for alias, name in (*given, *aliases.read().items()):
            if alias.lower() not in found and (model := found.get(name.lower())):
                found[alias.lower()] = model
                kept[alias] = model.name
        self.models, self.aliases, self._by_name = models, kept, found

    def check(self) -> None:
        """Check that each table of the file is about an existing model; call it after a scan.

        Raises InvalidRequestError.
        """
        for name, settings in self.file.models.items():
            if self.find(name) is None:
                raise InvalidRequestError(
                    f"[models.{name}] is about no model that is here: name its file or a stored model in "
                    f"'model'{f', not {settings.model!r}' if settings.model else ''}"
                )
        for model in self.models:
            for alias in model.settings.aliases:
                if (other := self.find(alias)) is not None and other.name != model.name:
                    raise InvalidRequestError(
                        f"{alias!r} is to be an alias of {model.name!r}, and names {other.name!r} too"
                    )

    def facts(self, path: Path) -> FileFacts | None:
        """Return facts of a file, None if it cannot be read. Reads the disk if the file has changed."""
        try:
            stat, known = path.stat(), self._facts.get(path)
            version = stat.st_size, stat.st_mtime_ns
            if known is not None and (known.size, known.modified) == version:
                return known
            if self._damaged.get(path) == version:
                return None
            gguf = open_gguf(path)
            try:
                found = self._facts[path] = FileFacts.of(gguf)
            finally:
                gguf.close()
        except (OSError, HotsetError) as error:
            self._facts.pop(path, None)
            if isinstance(error, FormatError) and not isinstance(error.__context__, OSError):
                self._damaged[path] = version
            return None
        return found

    def _files(self) -> Iterator[Offered]:
        """Yield every model: of the models file, command line, folder, store. The first of a name counts."""
        stored = {model.name: model.path for model in store.list_models()}
        root = store.models_folder().resolve()
        found: list[tuple[str, Path]] = []
        for name, settings in self.file.models.items():
            if settings.model is not None and (path := self._path(settings.model)) is not None:
                found.append((name, path))
        found += [(name, path) for name, path in self._named.items() if path.is_file()]
        if self._folder is not None:
            found += _names_in(self._folder)
        if self._with_store:
            found += stored.items()
        own = {name.lower(): settings for name, settings in self.file.models.items()}
        for name, path in found:
            settings = own.get(name.lower(), self.file.default)
            is_stored = stored.get(name) == path and path.resolve().is_relative_to(root)
            yield Offered(name=name, path=path, settings=settings, is_stored=is_stored)
        here = {name.lower(): path for name, path in reversed(found)}
        for name, one in created.read().items():
            if (base := here.get(one.base.lower()) or self._base(one.base, here.values())) is not None:
                made = ModelSettings(template=one.template, load=one.load, sampling=one.sampling)
                settings = made.over(own.get(name.lower(), self.file.default))
                yield Offered(name=name, path=base, settings=settings)

    def _base(self, name: str, offered: Collection[Path]) -> Path | None:
        """Return the file of a created model's base, if it is offered or the store is; otherwise None."""
        try:
            path = store.local_path(name)
        except HotsetError:  # several models have this name
            return None
        return path if self._with_store or path in offered else None

    def _path(self, model: str) -> Path | None:
        beside = self.file.folder / model
        return beside if beside.is_file() else store.local_path(model)


def _names_in(folder: Path) -> list[tuple[str, Path]]:
    """Return the models of a folder by their files' names, or by their paths if two have the same name."""
    paths = store.complete_models(folder)
    stems = [path.stem.lower() for path in paths]
    return [
        (
            path.stem
            if stems.count(path.stem.lower()) == 1
            else path.relative_to(folder).with_suffix("").as_posix(),
            path,
        )
        for path in paths
    ]


def with_aliases(file: ModelsFile, more: Mapping[str, str]) -> ModelsFile:
    """Return the models file with aliases of the command line. more: alias → name of a model."""
    models = dict(file.models)
    for alias, name in more.items():
        settings = models.get(name, file.default)
        models[name] = replace(settings, aliases=(*settings.aliases, alias))
    return replace(file, models=models)
