"""`hotset serve`: one model over HTTP."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotset.cli import options
from hotset.cli.console import DownloadBar, say, tell_choice, tell_memory
from hotset.errors import HotsetError
from hotset.storage import catalogue, resolve, store

if TYPE_CHECKING:
    from hotset.api import Model

_SERVER = "Server"
_PARTS = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")


def serve(
    model: options.OptionalModel = None,
    port: Annotated[
        int, typer.Option("--port", help="0: any that is free.", min=0, max=65535, rich_help_panel=_SERVER)
    ] = 8080,
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", "-a", help="What the model is called; repeatable.", rich_help_panel=_SERVER),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", "-np", help="Answers at once.", min=1, rich_help_panel=_SERVER)
    ] = 16,
    ctx_size: options.ContextSize = None,
    *,
    loading: options.ModelOptions,
) -> None:
    """Serve a model over HTTP, in OpenAI's dialect and others."""
    check_installed()
    settings = loading.settings(n_ctx=ctx_size, max_sequences=parallel)
    from hotset.server.settings import ServerSettings

    server_settings = ServerSettings(port=port)
    bar = DownloadBar()
    with bar:
        path = resolve(model or catalogue.DEFAULT, progress=bar)
    names = (*(alias or ()), model_name(path))

    import hotset
    from hotset.server.listen import listen
    from hotset.server.service import Service

    def load() -> Model:
        loaded = hotset.load(path, settings, progress=bar)
        tell_choice(loaded)
        tell_memory(loaded)
        say(f"{names[0]} is loaded")
        return loaded

    service = Service(load, server_settings, name=names[0], aliases=names[1:])
    listen(service, lambda where: say(f"listening on {where}"))


def check_installed() -> None:
    """Raises HotsetError where the extra is missing."""
    if missing := [part for part in _PARTS if find_spec(part) is None]:
        raise HotsetError(
            f"the server needs {', '.join(missing)}; install it with: pip install 'hotset[serve]'"
        )


def model_name(path: Path) -> str:
    """What a model is called: as in the store, or as its file."""
    stored = (model.name for model in store.list_models() if model.path == path)
    return next(stored, path.stem)
