"""Management of several models on one server: load, unload, fetch, name and delete them.

The routes have the forms of llama-server and of Ollama.
Without an API key only this machine may do so, and no page of another origin.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse

from hotset.errors import HotsetError
from hotset.load_parameters import LOAD_PARAMETERS
from hotset.loader.modelfile import MAX_CHARS, Modelfile, made_of
from hotset.server import shapes
from hotset.server.body import BodyRoute
from hotset.server.catalogue import Offered
from hotset.server.errors import RequestError, body_of, problem_of
from hotset.server.key_limits import Holder
from hotset.server.models import Models
from hotset.server.openai.models import entry
from hotset.server.pulls import Pulls
from hotset.server.replies import JsonReply, dumped, event
from hotset.server.rows import Body, Flag, integer
from hotset.server.shapes import JSON_LINES
from hotset.server.streams import HOLDER, file_of, host_of, limited_holder, listed, while_connected
from hotset.storage import aliases, created, store
from hotset.storage.catalogue import ENTRIES

# Headers that a reverse proxy adds: behind a proxy, every request comes from this machine.
_FORWARDED = (
    "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "forwarded", "via",
)  # fmt: skip


def models_of(http: Request) -> Models:
    host = host_of(http)
    assert isinstance(host, Models)
    return host


def check_manager(http: Request) -> None:
    """Raise RequestError (403) if the request has no managing key and does not come from this machine."""
    check_allowed(http, "models are managed", "manage models")


def may_manage(http: Request) -> bool:
    try:
        check_manager(http)
    except RequestError:
        return False
    return True


def check_allowed(http: Request, done: str, do: str) -> None:
    """Check as `check_manager` for another action of managers. done, do: its words in messages."""
    if host_of(http).settings.has_keys:  # requests without a valid key were refused earlier
        holder: Holder | None = http.scope.get(HOLDER)
        if holder is None or not holder.manages:
            raise RequestError(f"this key may not {do}", 403, code="not_a_manager")
        return
    origin, host = http.headers.get("origin"), http.headers.get("host", "")
    is_page_of_another = origin is not None and origin.partition("://")[2].lower() != host.lower()
    is_forwarded = any(name in http.headers for name in _FORWARDED)
    if is_page_of_another or is_forwarded or not _is_loopback(http):
        raise RequestError(
            f"{done} with an API key, or from this machine; start the server with --api-key-file",
            403,
            code="not_a_manager",
        )


def _check_target(http: Request, name: str) -> None:
    """Raise RequestError if the key may not use this model, or the model behind this alias."""
    holder, offered = limited_holder(http), models_of(http).catalogue.find(name)
    if holder is not None and not holder.may_ask(name if offered is None else offered.name):
        raise holder.not_served(name)


def _is_loopback(http: Request) -> bool:
    """Return whether a request comes from this machine: a loopback address, or a Unix socket."""
    if http.client is None:  # also if the server could not determine the connection's address
        return host_of(http).settings.socket is not None
    try:
        return ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False


router = APIRouter(route_class=BodyRoute)


def adapter_path(http: Request, given: str) -> str:
    """Return the path of the adapter that a client names.

    Only files in the folder of --lora-dir are allowed. Raises RequestError.
    """
    folder = host_of(http).settings.lora_dir
    if folder is None:
        raise RequestError(
            "clients load no adapters from this server; start it with --lora-dir", 403, code="not_supported"
        )
    try:
        inside = Path(folder).resolve()
        found = inside.joinpath(given).resolve()
        is_inside = found.is_relative_to(inside) and found.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        is_inside = False
    if not is_inside:
        raise RequestError("there is no such adapter in the folder of --lora-dir", param="lora_path")
    return str(found)


_managed = [Depends(check_manager)]
_Name = Annotated[str, Field(min_length=1)]


class ModelBody(Body):
    model: _Name


class LoadModelBody(ModelBody):
    """A model to load. n_ctx: tokens of the context; by default the context of the settings."""

    n_ctx: integer(LOAD_PARAMETERS["n_ctx"].low, 1 << 30) | None = None  # type: ignore[valid-type]


class OllamaModelBody(Body):
    """A model. name: the field of older clients."""

    model: str | None = None
    name: str | None = None

    def named(self) -> str:
        if not (name := self.model or self.name):
            raise RequestError("model is missing", param="model", code="missing_required_parameter")
        return name


class PullBody(OllamaModelBody):
    stream: Flag | None = None
    insecure: Flag | None = None  # for a registry without TLS, which hotset does not support


class CopyBody(Body):
    source: _Name
    destination: _Name


class ExampleMessage(Body):
    role: Literal["system", "user", "assistant"]
    content: str


Parameter = str | int | float | bool


class CreateBody(OllamaModelBody):
    """A model to create.

    from: the model that it is made of. modelfile: the whole Modelfile, as older clients send it. files,
    adapters, quantize: refused, since without them it would be another model.
    """

    base: Annotated[str | None, Field(alias="from")] = None
    modelfile: str | None = None
    system: str | None = None
    template: str | None = None
    parameters: dict[str, Parameter | list[Parameter]] | None = None
    messages: list[ExampleMessage] | None = None
    license: str | list[str] | None = None
    stream: Flag | None = None
    files: Any = None
    adapters: Any = None
    quantize: Any = None

    def parsed(self) -> tuple[Modelfile, str]:
        """Return the Modelfile that the body describes, and its text. Raises InvalidRequestError."""
        for name in ("files", "adapters", "quantize"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is not supported; name a stored model by from", param=name)
        if self.modelfile is None:
            if not self.base:
                raise RequestError("from is missing", param="from", code="missing_required_parameter")
            given = self.parameters or {}
            values = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
            messages = self.messages or ()
            modelfile = Modelfile(
                base=self.base,
                system=_with_plain_newlines(self.system or ""),
                template=self.template or None,
                parameters={name.lower(): tuple(map(str, some)) for name, some in values.items() if some},
                messages=tuple((one.role, _with_plain_newlines(one.content)) for one in messages),
            )
            if not modelfile.can_be_written:
                raise RequestError(
                    'a text of a created model has no three quotation marks (""") in it, a name no line '
                    f"break, and all together have at most {MAX_CHARS} characters"
                )
            return modelfile, modelfile.text
        return Modelfile.parse(self.modelfile), self.modelfile


def _with_plain_newlines(text: str) -> str:
    """Return the text with LF line ends, as in a Modelfile that was read."""
    return text.replace("\r\n", "\n")


# ---- llama-server's ----


@router.get("/models")
async def models(http: Request) -> dict[str, Any]:
    """Return the same list as /v1/models."""
    return {"object": "list", "data": [entry(one) for one in await listed(http)]}


@router.post("/models/load", dependencies=_managed)
async def load(body: LoadModelBody, http: Request) -> dict[str, bool]:
    """Begin to load a model, and do not wait for it. /models/events and /v1/models report the progress."""
    _, name, _ = await file_of(http, body.model)
    await models_of(http).load(name, body.n_ctx)
    return {"success": True}


@router.post("/models/unload", dependencies=_managed)
async def unload(body: ModelBody, http: Request) -> dict[str, bool]:
    """Unload a model once the requests that use it are answered."""
    _, name, _ = await file_of(http, body.model)
    await while_connected(http, models_of(http).unload(name))
    return {"success": True}


@router.get("/models/events")
async def events(http: Request) -> Response:
    """Send the states of models as server-sent events.

    The first events are the states of all models that are not unloaded. Later events are changes of a state.
    An event is `{"model", "value", ...}`, as `status` in /v1/models.
    """
    host = models_of(http)
    holder: Holder | None = http.scope.get(HOLDER)

    async def states() -> AsyncIterator[bytes]:
        shown: dict[str, dict[str, Any]] = {}
        while not host.stopping:
            change = asyncio.ensure_future(host.changed())
            try:
                now = {
                    name: state
                    for name, state in host.states().items()
                    if holder is None or holder.may_ask(name)
                }
                for name in shown.keys() - now.keys():
                    now[name] = {"value": "unloaded"}
                for name, state in now.items():
                    if shown.get(name) != state:
                        yield event({"model": name, **state})
                shown = {name: state for name, state in now.items() if state != {"value": "unloaded"}}
                await change
            finally:
                change.cancel()

    return EventSourceResponse(
        states(),
        sep="\n",
        ping=host.settings.keep_alive_seconds,
        ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
    )


@router.get("/models/catalogue")
async def published(http: Request) -> dict[str, Any]:
    """Return the models that /api/pull knows by name and that this version runs. `q`: words to search for."""
    words = http.query_params.get("q", "").lower().split()
    return {"object": "list", "data": await asyncio.to_thread(_published, words)}


def _published(words: list[str]) -> list[dict[str, Any]]:
    stored = {model.name.lower() for model in store.list_models()}
    return [
        {
            "id": entry.name,
            "repository": entry.repo,
            "size": entry.size or None,
            "has_zeros": entry.relu,
            "needs": entry.needs,
            "is_stored": entry.name.lower() in stored,
        }
        for entry in ENTRIES
        if entry.unsupported is None
        and all(word in f"{entry.name} {entry.repo} {entry.architecture}".lower() for word in words)
    ]


# ---- Ollama's ----


@router.post("/api/pull", dependencies=_managed, responses=shapes.errors(shapes.OllamaErrorReply))
async def pull(body: PullBody, http: Request) -> Response:
    """Fetch a model into the store: a name of the catalogue, or owner/repository of the hub."""
    name, host = body.named(), models_of(http)
    states = pulls_of(http).states(name)

    async def rest() -> None:
        async for _ in states:
            pass
        await host.scan(now=True)

    if body.stream is False:
        await while_connected(http, rest())
        return JsonReply({"status": "success"})
    first = await anext(states)  # raises if the request is wrong

    async def lines() -> AsyncIterator[bytes]:
        try:
            yield dumped(first) + b"\n"
            async for state in states:
                yield dumped(state) + b"\n"
            await host.scan(now=True)
            yield dumped({"status": "success"}) + b"\n"
        except HotsetError as error:
            yield dumped(body_of(problem_of(error), http.url.path)) + b"\n"
        finally:
            await states.aclose()  # type: ignore[attr-defined]

    return StreamingResponse(lines(), media_type=JSON_LINES)


def pulls_of(http: Request) -> Pulls:
    found: Pulls = http.app.state.pulls
    return found


@router.post("/api/copy", dependencies=_managed, responses=shapes.errors(shapes.OllamaErrorReply))
async def copy(body: CopyBody, http: Request) -> Response:
    """Give a model another name, an alias. Its file is not copied."""
    host = models_of(http)
    _, source, _ = await file_of(http, body.source)
    alias = aliases.check_alias(aliases.untagged(body.destination))
    if host.catalogue.find(alias) is not None:  # the name exists: it must be this key's
        _check_target(http, alias)
    if alias.lower() in {model.name.lower() for model in host.catalogue.models}:
        raise RequestError(
            f"a model is called {alias!r} already; choose another name", 409, param="destination"
        )
    await asyncio.to_thread(aliases.add, alias, source)
    await host.scan(now=True)
    return Response()


@router.post("/api/create", dependencies=_managed, responses=shapes.errors(shapes.OllamaErrorReply))
async def create(body: CreateBody, http: Request) -> Response:
    """Make a model of another served one, with a system message, parameters or a template.

    No file is copied.
    """
    host, name = models_of(http), aliases.untagged(body.named())
    modelfile, text = await asyncio.to_thread(body.parsed)
    # The key must be allowed to use the base model. The new model has another name.
    _, base, path = await file_of(http, aliases.untagged(modelfile.base))
    old = await asyncio.to_thread(created.find, name)
    if old is not None or host.catalogue.find(name) is not None:  # also an alias, which the new one hides
        _check_target(http, name)
    if old is None and name.lower() in {model.name.lower() for model in host.catalogue.models}:
        raise RequestError(f"a model is called {name!r} already; choose another name", param="model")

    def kept() -> None:
        adapters = tuple(adapter_path(http, one) for one in modelfile.adapters)
        if created.find(base) is not None:
            raise RequestError(
                f"{base!r} was created itself: name the model that it is made of", param="from"
            )
        created.add(name, made_of(replace(modelfile, adapters=adapters), path, base=base, source=text))

    await asyncio.to_thread(kept)
    if old is not None and host.catalogue.find(name) is not None:
        await while_connected(http, host.unload(name))
    await host.scan(now=True)
    if body.stream is False:
        return JsonReply({"status": "success"})
    return Response(dumped({"status": "success"}) + b"\n", media_type=JSON_LINES)


@router.delete("/api/delete", dependencies=_managed, responses=shapes.errors(shapes.OllamaErrorReply))
async def delete(body: OllamaModelBody, http: Request) -> Response:
    """Delete an alias, or a model of the store with its files, once no request uses it."""
    host, name = models_of(http), aliases.untagged(body.named())
    _check_target(http, name)
    if await asyncio.to_thread(aliases.remove, name):
        await host.scan(now=True)
        return Response()
    if await asyncio.to_thread(created.find, name) is not None:
        if host.catalogue.find(name) is not None:
            await while_connected(http, host.unload(name))
        await asyncio.to_thread(created.remove, name)
        await host.scan(now=True)
        return Response()
    await file_of(http, name)  # raises if the name is unknown
    offered = host.catalogue.find(name)
    if offered is None or not offered.is_stored or offered.name.lower() != name.lower():
        raise _not_deleted(name, offered)
    await while_connected(http, host.unload(offered.name))
    await asyncio.to_thread(store.remove, offered.name)
    await host.scan(now=True)
    return Response()


def _not_deleted(name: str, offered: Offered | None) -> RequestError:
    if offered is not None and offered.name.lower() != name.lower():
        why = f"it is an alias of {offered.name!r}, given by the command line or the file of models"
    else:
        why = "its file is not the store's; delete the file itself"
    return RequestError(f"{name!r} is not deleted: {why}", 403, param="model", code="not_in_store")
