"""`hotset serve`: one model over HTTP."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.console import print_choice, print_memory, read_text, say
from hotset.cli.progress import ProgressBar
from hotset.errors import HotsetError, install_command
from hotset.server.settings import ServerSettings
from hotset.storage import catalogue, resolve, store

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.server.settings import ServerSettings

_PARTS = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")
_MAX_KEYS_BYTES = 1 << 20  # of a file of API keys
_KEY_VARIABLE = "HOTSET_API_KEY"


def _option(names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names.split(), help=help, rich_help_panel="Server", **more)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where a server listens, who may ask, and how much at a time."""

    host: Annotated[str, _option("--host", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("--port", "Port to listen on; 0: any free one.", min=0, max=65535)] = 8080
    api_key: Annotated[
        list[str] | None,
        _option("--api-key", f"Key that clients must send; repeatable; also {_KEY_VARIABLE}."),
    ] = None
    api_key_file: Annotated[
        Path | None, _option("--api-key-file", "API keys, one a line.", exists=True, dir_okay=False)
    ] = None
    allow_no_api_key: Annotated[
        bool, _option("--allow-no-api-key", "Serve other machines without a key.")
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        _option("--cors-origin", "Allow web pages of this origin; *: all; repeatable."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        _option("--allowed-host", "Allow this name in the Host header; *: any; repeatable."),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        _option("--trusted-proxy", "Address of a proxy whose X-Forwarded-For is trusted; repeatable."),
    ] = None
    max_queue: Annotated[
        int, _option("--max-queue", "Requests that may wait; more are refused (429).", min=0)
    ] = 64
    max_tokens: Annotated[
        int | None, _option("--max-tokens", "Most tokens of an answer; default: the context.", min=1)
    ] = None
    timeout: Annotated[
        float | None, _option("--timeout", "Most seconds that an answer takes; default: no limit.", min=0)
    ] = None
    replicas: Annotated[
        int | None, options.scale_option("--replicas", "Copies of the model on the machines of --ray.", min=1)
    ] = None
    max_replicas: Annotated[
        int | None, options.scale_option("--max-replicas", "Most copies, added as requests need them.", min=1)
    ] = None
    grace: Annotated[float, _option("--grace", "Seconds that running answers get at shutdown.", min=0)] = 30.0

    def settings(self) -> ServerSettings:
        return ServerSettings(
            host=self.host,
            port=self.port,
            api_keys=self._keys(),
            allow_no_api_key=self.allow_no_api_key,
            cors_origins=tuple(self.cors_origin or ()),
            allowed_hosts=tuple(self.allowed_host or ()),
            trusted_proxies=tuple(self.trusted_proxy or ()),
            max_queue=self.max_queue,
            max_tokens=self.max_tokens,
            max_seconds=self.timeout,
            grace_seconds=self.grace,
        )

    def _keys(self) -> tuple[str, ...]:
        keys = list(self.api_key or [])
        if from_environment := os.environ.get(_KEY_VARIABLE):
            keys.append(from_environment)
        if self.api_key_file is not None:
            lines = read_text(self.api_key_file, "--api-key-file", _MAX_KEYS_BYTES).splitlines()
            in_file = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
            if not in_file:  # a server that was to be locked must not stand open
                raise typer.BadParameter(
                    f"{self.api_key_file} has no key in it.", param_hint="--api-key-file"
                )
            keys += in_file
        return tuple(keys)


def serve(
    model: options.OptionalModel = None,
    alias: options.Alias = None,
    parallel: options.Parallel = 16,
    contexts: options.Contexts = 4,
    ctx_size: options.ContextSize = None,
    *,
    loading: options.ModelOptions,
    scale: options.ScaleOptions,
    server: ServerOptions,
) -> None:
    """Serve a model over HTTP: the APIs of OpenAI, Anthropic and Ollama."""
    check_installed()
    settings = loading.settings(n_ctx=ctx_size, max_sequences=parallel, n_seqs=contexts)
    server_settings = server.settings()
    bar = ProgressBar()
    with bar:
        path = resolve(model or catalogue.DEFAULT, progress=bar)
    names = (*(alias or ()), model_name(path))
    if server.replicas is not None or server.max_replicas is not None:
        if scale.stages is not None:
            raise typer.BadParameter(
                "replicas have whole models; leave one of them out.", param_hint="--stages"
            )
        from hotset.scale.replicas import Replicas, serve_replicas

        replicas = Replicas(least=server.replicas or 1, most=server.max_replicas)
        name = options.name_everywhere(model or catalogue.DEFAULT, path)
        serve_replicas(name, settings, server_settings, names, replicas, scale.ray, say)
        return

    from hotset.server.listen import listen
    from hotset.server.service import Service

    def load() -> Model:
        with bar:
            loaded = scale.load(model or catalogue.DEFAULT, path, settings, bar)
        print_choice(loaded)
        print_memory(loaded)
        return loaded

    service = Service(
        load,
        server_settings,
        name=names[0],
        aliases=names[1:],
        ready=lambda: say(f"{names[0]} is loaded"),
    )
    listen(service, lambda where: say(f"listening on {where}"))


def check_installed() -> None:
    """Raises HotsetError where the extra is missing."""
    if missing := [part for part in _PARTS if find_spec(part) is None]:
        raise HotsetError(
            f"the server needs {', '.join(missing)}; install it with: {install_command('serve')}"
        )


def model_name(path: Path) -> str:
    """What a model is called: as in the store, or as its file."""
    stored = (model.name for model in store.list_models() if model.path == path)
    return next(stored, path.stem)
