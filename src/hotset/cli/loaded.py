"""`hotset ps` and `hotset stop`: the models that a running server has loaded."""

from __future__ import annotations

import json as json_text
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from hotset.cli import options
from hotset.cli.client import URL, fetched, is_address, no_model_server, running
from hotset.cli.console import print_json, print_table, say
from hotset.units import human_size

_Url = Annotated[str | None, typer.Option("--url", help="Address of the server.", show_default=URL)]

_MOST_BYTES = 1 << 63  # of a model


def ps(url: _Url = None, json: options.Json = False) -> None:
    """List the models that a running server has loaded."""
    models = _loaded(url)
    if json:
        print_json(models)
        return
    rows = [
        [
            str(one.get("name")),
            human_size(size) if type(size := one.get("size")) is int and 0 <= size < _MOST_BYTES else "?",
            str(one.get("context_length", "?")),
            _left(one.get("expires_at")),
        ]
        for one in models
    ]
    print_table(["model", ">size", ">context", "unloads"], rows)


def stop(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name of 'hotset ps'.")], url: _Url = None
) -> None:
    """Unload a model of a running server, once its requests are answered."""
    at, key = _server(url)
    absent = "it keeps its only model loaded; end the server instead, or start it with --keep-alive"
    fetched(at, "/models/unload", key, {"model": model}, absent=absent)
    say(f"{model} is unloaded.")


def _server(url: str | None) -> tuple[str, str]:
    if url is not None and not is_address(url):
        raise typer.BadParameter(
            "it must begin with http:// or https:// and name a host.", param_hint="--url"
        )
    return running(url)


def _loaded(url: str | None) -> list[dict[str, Any]]:
    """Return the entries of /api/ps. Raises HotsetError for a reply of another form."""
    at, key = _server(url)
    try:
        models = json_text.loads(fetched(at, "/api/ps", key))["models"]
    except (ValueError, LookupError, TypeError, RecursionError):
        models = None
    if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
        raise no_model_server(at, "its list of loaded models has another form")
    return models


def _left(expires: Any) -> str:
    """Return when a model is unloaded, unless it is used: "in 4 min", or "never"."""
    try:
        seconds = (datetime.fromisoformat(str(expires)) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    if seconds > 365 * 86400:
        return "never"
    return f"in {seconds / 60:.0f} min" if seconds > 90 else f"in {max(seconds, 0):.0f} s"
