"""`hotset serve`: one model over HTTP, or several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import print_choice, print_memory, read_text, say
from hotset.cli.default_model import default_model
from hotset.cli.progress import ProgressBar
from hotset.cli.values import DURATION, SIZE, TIME_OR_EVER, one_of
from hotset.errors import HotsetError, install_command
from hotset.escaping import clause
from hotset.files import expanded
from hotset.loader.adapters import check_adapter
from hotset.memory import free_memory
from hotset.server.keys import read_keys
from hotset.server.mcp.file import McpServer, read_servers
from hotset.server.settings import LOG_FORMS, ServerSettings
from hotset.storage import find_created, on_this_machine, resolve, store
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.settings import LoadSettings

_PARTS = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")
_OTEL_PARTS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_MCP_PARTS = ("mcp", "mcp_types", "httpx2")
_MAX_KEYS_BYTES = 1 << 20  # of a file of API keys
_KEY_VARIABLE = "HOTSET_API_KEY"
_SHARE_OF_FREE = 0.9  # of the free memory, for models without a given limit


def _option(names: str, help: str, **more: Any) -> Any:
    return options.option(names, help, "Server", **more)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options for a server's address, its clients and their limits."""

    host: Annotated[str, _option("--host", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("--port", "Port to listen on; 0 takes any free one.", min=0, max=65535)] = (
        8080
    )
    socket: Annotated[
        str | None, _option("--socket", "A Unix socket to listen on, in place of an address.", metavar="PATH")
    ] = None
    tls_cert: Annotated[
        Path | None, _option("--tls-cert", "HTTPS: a certificate (PEM).", exists=True, dir_okay=False)
    ] = None
    tls_key: Annotated[
        Path | None,
        _option(
            "--tls-key", "HTTPS: the certificate's key, without a passphrase.", exists=True, dir_okay=False
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", f"Key that clients must send; repeatable; also {_KEY_VARIABLE}."),
    ] = None
    api_key_file: Annotated[
        Path | None, _option("--api-key-file", "File of API keys, one per line.", exists=True, dir_okay=False)
    ] = None
    keys_file: Annotated[
        Path | None,
        _option("--keys-file", "TOML file of API keys with names and limits.", exists=True, dir_okay=False),
    ] = None
    allow_no_api_key: Annotated[
        bool, _option("--allow-no-api-key", "Serve other machines without a key.")
    ] = False
    cors_origins: Annotated[
        list[str] | None,
        _option("--cors-origin", "Allow web pages of this origin; *: all; repeatable."),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _option("--allowed-host", "Allow this name in the Host header; *: any; repeatable."),
    ] = None
    trusted_proxies: Annotated[
        list[str] | None,
        _option("--trusted-proxy", "Address of a proxy whose X-Forwarded-For is trusted; repeatable."),
    ] = None
    strict_requests: Annotated[
        bool, _option("--strict-requests", "Refuse fields of requests that have no effect.")
    ] = False
    allow_remote_images: Annotated[
        bool, _option("--allow-remote-images", "Fetch images of messages from public http addresses.")
    ] = False
    max_queue: Annotated[
        int, _option("--max-queue", "Requests that may wait; more are refused (429).", min=0)
    ] = 64
    max_tokens: Annotated[
        int | None, _option("--max-tokens", "Most tokens of an answer.", usual="the context", min=1)
    ] = None
    reasoning_budget: options.ReasoningBudget = None
    reasoning_budget_message: options.ReasoningBudgetMessage = None
    max_seconds: Annotated[
        float | None,
        _option("--timeout", "Longest time of an answer.", kind=DURATION, usual="no limit"),
    ] = None
    replicas: Annotated[
        int | None, options.scale_option("--replicas", "Copies of the model on the machines of --ray.", min=1)
    ] = None
    max_replicas: Annotated[
        int | None, options.scale_option("--max-replicas", "Most copies, added as requests need them.", min=1)
    ] = None
    max_memory: Annotated[
        float | None,
        _option(
            "--max-memory", "Memory of all loaded models together.", kind=SIZE, usual="0.9 of free memory"
        ),
    ] = None
    keep_alive: Annotated[
        float | None,
        _option(
            "--keep-alive", "Unload idle models after this time; -1: never.", kind=TIME_OR_EVER, usual="5m"
        ),
    ] = None
    models_file: Annotated[
        Path | None,
        _option("--models-file", "TOML file with the settings of each model.", exists=True, dir_okay=False),
    ] = None
    request_log: Annotated[
        str | None,
        _option("--request-log", "A line for each request, without its text; -: on stderr.", metavar="FILE"),
    ] = None
    log_form: Annotated[str, _option("--log-form", "Format of these lines.", kind=one_of(*LOG_FORMS))] = (
        "json"
    )
    access_log: Annotated[
        bool,
        _option(
            "--access-log/--no-access-log", "Without --request-log: a short line for each request on stderr."
        ),
    ] = True
    otlp_traces_endpoint: Annotated[
        str | None,
        _option(
            "--otlp-traces-endpoint",
            "OpenTelemetry: a span for each request, without its text, to this collector.",
            metavar="URL",
        ),
    ] = None
    slot_save_path: Annotated[
        Path | None,
        _option(
            "--slot-save-path",
            "Folder of the files that POST /slots saves; together at most --cache-disk.",
            exists=True,
            file_okay=False,
        ),
    ] = None
    lora_dir: Annotated[
        Path | None,
        _option(
            "--lora-dir", "Folder that clients may load adapters (LoRA) from.", exists=True, file_okay=False
        ),
    ] = None
    mcp: Annotated[
        Path | None,
        _option("--mcp", "mcp.json: MCP servers whose tools the page offers.", exists=True, dir_okay=False),
    ] = None
    grace_seconds: Annotated[
        float, _option("--grace", "Time that running answers get at shutdown.", kind=DURATION, usual="30s")
    ] = 30.0

    @property
    def is_of_several(self) -> bool:
        """Return whether an option is given that only a server of several models has."""
        return any(value is not None for value in (self.max_memory, self.keep_alive, self.models_file))

    def settings(self) -> ServerSettings:
        if self.otlp_traces_endpoint is not None:
            check_installed(_OTEL_PARTS, "traces need", "serve,otel")
        names = {one.name for one in fields(ServerSettings)} & {one.name for one in fields(self)}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        plain = {name: str(value) for name, value in given.items() if isinstance(value, Path)}
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return ServerSettings(
            **given | plain | lists | {
                "api_keys": self._keys(),
                "named_keys": () if self.keys_file is None else read_keys(self.keys_file),
                "request_log": self.request_log or ("-" if self.access_log else None),
                "log_form": "short" if self.request_log is None else self.log_form,
                "mcp_servers": self._mcp_servers(),
            }
        )  # fmt: skip

    def _mcp_servers(self) -> tuple[McpServer, ...]:
        if self.mcp is None:
            return ()
        check_installed(_MCP_PARTS, "tools of MCP servers need", "serve,mcp")
        servers = read_servers(self.mcp)
        for one in servers:
            if one.unused:
                say(f"{self.mcp}: {one.name}: {clause(', '.join(one.unused))} has no effect here")
        return servers

    def _keys(self) -> tuple[str, ...]:
        keys = list(self.api_key or [])
        if from_environment := os.environ.get(_KEY_VARIABLE):
            keys.append(from_environment)
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, "--api-key-file", _MAX_KEYS_BYTES).splitlines()
            in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not in_file:  # a server that should require a key must not start without one
                raise typer.BadParameter(
                    f"{self.api_key_file} has no key in it.", param_hint="--api-key-file"
                )
            keys += in_file
        return tuple(keys)


def serve(
    models: options.Models = None,
    alias: Annotated[
        list[str] | None,
        _option("--alias -a", "Name of the model for clients; with several models NAME=MODEL; repeatable."),
    ] = None,
    max_sequences: options.Parallel = 16,
    n_seqs: options.Contexts = 4,
    *,
    loading: options.AnswerOptions,
    scale: options.ScaleOptions,
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP, or several: the APIs of OpenAI, Anthropic and Ollama."""
    check_installed()
    loading.check_cache_disk("--cache-dir or --slot-save-path", has_folder=server.slot_save_path is not None)
    settings = loading.settings(max_sequences=max_sequences, n_seqs=n_seqs)
    server_settings = server.settings()
    is_scaled = any(
        one is not None for one in (server.replicas, server.max_replicas, scale.stages, scale.ray)
    )
    several = not models or len(models) > 1 or server.is_of_several or _folder(models) is not None
    if is_scaled and server.slot_save_path is not None:
        raise typer.BadParameter(
            "slots are saved where one machine's CPU computes; leave it out.", param_hint="--slot-save-path"
        )
    if several and is_scaled and (models or server.is_of_several):
        raise typer.BadParameter("several models are served by one machine; name one.", param_hint="MODEL")
    if several and not is_scaled:
        _serve_several(models or [], alias or [], settings, server_settings, server)
    else:
        model = models[0] if models else default_model()
        _serve_one(model, alias or [], settings, server_settings, scale, server)


def _serve_one(
    model: str,
    alias: list[str],
    settings: LoadSettings,
    server_settings: ServerSettings,
    scale: options.ScaleOptions,
    server: ServerOptions,
) -> None:
    if pairs := [one for one in alias if "=" in one]:
        raise typer.BadParameter(
            f"with one model write --alias NAME, not '{pairs[0]}'; NAME=MODEL is for several models.",
            param_hint="--alias",
        )
    for adapter, _ in settings.loras:
        check_adapter(adapter)
    bar = ProgressBar()
    with bar:
        path = resolve(model, progress=bar)
    names = (*alias, model_name(path, model))
    if scale.stages is not None:
        options.check_not_created(model, "--stages")
    if server.replicas is not None or server.max_replicas is not None:
        options.check_not_created(model, "--replicas")
        if server.mcp is not None:
            raise typer.BadParameter(
                "replicas are behind a front that calls no tools; leave this option out.", param_hint="--mcp"
            )
        for option, given in (
            ("--keys-file", server.keys_file),
            ("--request-log", server.request_log),
            ("--otlp-traces-endpoint", server.otlp_traces_endpoint),
        ):
            if given is not None:
                raise typer.BadParameter(
                    "replicas are behind a front that counts no tokens; leave this option out.",
                    param_hint=option,
                )
        if scale.stages is not None:
            raise typer.BadParameter(
                "replicas have whole models; leave one of them out.", param_hint="--stages"
            )
        from hotset.scale.replicas import Replicas, serve_replicas

        replicas = Replicas(least=server.replicas or 1, most=server.max_replicas)
        name = options.name_everywhere(model, path)
        serve_replicas(name, settings, server_settings, names, replicas, scale.ray, say)
        return

    from hotset.server.listen import listen
    from hotset.server.service import Service

    def load() -> Model:
        with bar:
            loaded = scale.load(model, path, settings, bar)
        print_choice(loaded)
        print_memory(loaded)
        return loaded

    service = Service(
        load,
        server_settings,
        name=names[0],
        aliases=names[1:],
        ready=lambda: say(f"INFO:     {names[0]} is loaded"),
    )
    listen(service, lambda where: say(f"listening on {where}"))


def _serve_several(
    given: list[str],
    alias: list[str],
    settings: LoadSettings,
    server_settings: ServerSettings,
    server: ServerOptions,
) -> None:
    from hotset.server.catalogue import Catalogue, with_aliases
    from hotset.server.listen import listen
    from hotset.server.model_settings import KEEP_ALIVE_SECONDS, ModelsFile, until_unloaded
    from hotset.server.models import Models

    if settings.lora is not None:
        raise typer.BadParameter(
            "it is for one model, without --max-memory, --keep-alive and --models-file: write load = "
            "{ lora = [...] } in a --models-file, or start with --lora-dir and load it over HTTP.",
            param_hint="--lora",
        )
    file = ModelsFile.read(server.models_file) if server.models_file is not None else ModelsFile()
    file = with_aliases(file, _aliases(alias))
    folder = _folder(given)
    named, first = ({}, []) if folder is not None else _named(given)
    if not given and not file.models and not store.list_models():
        name = default_model()
        with ProgressBar() as bar:
            resolve(name, progress=bar)
    found = Catalogue(named, folder=folder, with_store=not given, file=file)
    found.scan()
    found.check()
    memory = server.max_memory if server.max_memory is not None else file.max_memory
    keep = until_unloaded(server.keep_alive) if server.keep_alive is not None else file.keep_alive
    budget = int(free_memory() * _SHARE_OF_FREE) if memory is None else int(memory * 2**30)
    say(f"{_count(len(found.models), 'model')}; memory limit for loaded models: {human_size(budget)}")
    models = Models(
        found,
        server_settings,
        load=settings,
        budget=budget,
        keep_alive=KEEP_ALIVE_SECONDS if keep is None else keep,
        first=tuple(first),
        report=say,
    )
    listen(models, lambda where: say(f"listening on {where}"))


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _folder(given: list[str] | None) -> Path | None:
    """Return the folder of models that was given; None for a model, also one that is a folder."""
    if not given or len(given) > 1 or store.find_local(given[0]) is not None:
        return None
    path = expanded(given[0])
    return path if path.is_dir() and len(store.complete_models(path)) > 1 else None


def _named(given: list[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the files of the given models by name, and the given names; a created model has its own name.

    Models that are not on this machine are fetched.
    """
    found: dict[str, Path] = {}
    first = []
    with ProgressBar() as bar:
        for model in given:
            path = resolve(model, progress=bar)
            if found.setdefault(name := model_name(path), path) != path:
                raise typer.BadParameter(
                    f"{found[name]} and {path} are both called {name!r}: rename one, or name both in a "
                    "--models-file.",
                    param_hint="MODEL",
                )
            first.append(model_name(path, model))
    return found, first


def _aliases(given: list[str]) -> dict[str, str]:
    """Return alias → model from NAME=MODEL."""
    pairs = [one.partition("=") for one in given]
    if wrong := [one for one, (name, _, model) in zip(given, pairs, strict=True) if not name or not model]:
        raise typer.BadParameter(
            f"several models are served: write {wrong[0] or 'NAME'}=MODEL.", param_hint="--alias"
        )
    return {name: model for name, _, model in pairs}


def check_installed(
    parts: Sequence[str] = _PARTS, what: str = "the server needs", extra: str = "serve"
) -> None:
    """Raise HotsetError if packages of the extra are missing."""
    if missing := [part for part in parts if not _is_installed(part)]:
        raise HotsetError(f"{what} {', '.join(missing)}; install it with: {install_command(extra)}")


def _is_installed(part: str) -> bool:
    try:
        return find_spec(part) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def model_name(path: Path, given: str | None = None) -> str:
    """Return the name of a model: its name as a created model, its name in the store, or its file's.

    given: its name on the command line.
    """
    if given is not None and (made := find_created(given)) is not None:
        return made[0]
    stored = (model.name for model in on_this_machine() if model.path == path)
    return next(stored, path.stem)
