"""Adapters (LoRA) of a model: listing and default scales as in llama-server, loading as in vLLM.

All clients share them, and they are read from this machine's files. Without an API key only this machine may
change them, by the same rule as for loading models (manage.py).
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from pydantic import ConfigDict, Field, RootModel

from hotset.backends.adapters import MOST_ADAPTERS
from hotset.engine.adapters import LoadedAdapter
from hotset.errors import HotsetError, InvalidRequestError, OutOfMemoryError
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError, without_folders
from hotset.server.fields import LoraScale
from hotset.server.manage import adapter_path, check_manager
from hotset.server.replies import JsonReply
from hotset.server.rows import Body, Integer, Number
from hotset.server.service import Service
from hotset.server.shapes import AdapterReply
from hotset.server.streams import ClientGoneError, serving, while_connected

router = APIRouter(route_class=BodyRoute)
_managed = [Depends(check_manager)]
_Name = Annotated[str, Field(min_length=1, max_length=4096)]


class ScalesBody(RootModel[Annotated[list[LoraScale], Field(max_length=MOST_ADAPTERS)]]):
    """A list, as llama-server has it."""

    model_config = ConfigDict(strict=True)


class LoadBody(Body):
    """An adapter to load.

    lora_name: the name by which requests choose it; None: the file's name. scale: for requests that choose no
    adapter.
    """

    lora_path: _Name
    lora_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$")] | None = None
    scale: Number = 0.0
    model: str | None = None


class UnloadBody(Body):
    lora_name: _Name | None = None
    lora_int_id: Integer | None = None
    model: str | None = None


@router.get("/lora-adapters", responses={200: {"model": list[AdapterReply]}})
async def listed(http: Request) -> Response:
    """Return the adapters of a model (`?model=`)."""
    service = await serving(http, http.query_params.get("model"), required=False)
    return JsonReply([_entry(each) for each in service.model.adapters.loaded])


@router.post("/lora-adapters", responses={200: {"model": list[AdapterReply]}}, dependencies=_managed)
async def scaled(body: ScalesBody, http: Request) -> Response:
    """Set the scale of each adapter for requests that choose no adapter; a missing adapter gets 0."""
    service = await serving(http, http.query_params.get("model"), required=False)
    adapters = service.model.adapters
    await _done(http, service, adapters.set_scales, {one.id: one.scale for one in body.root})
    return JsonReply([_entry(each) for each in adapters.loaded])


@router.post("/v1/load_lora_adapter", responses={200: {"model": AdapterReply}}, dependencies=_managed)
async def load(body: LoadBody, http: Request) -> Response:
    """Load an adapter from the folder of --lora-dir: a GGUF file, or a folder of PEFT's.

    By default only requests that choose the adapter use it. A client that disconnects ends the load.
    """
    path = adapter_path(http, body.lora_path)
    service = await serving(http, body.model, required=False)
    adapters = service.model.adapters
    gone = threading.Event()

    def check() -> None:
        if gone.is_set():
            raise ClientGoneError

    try:
        read = partial(adapters.load, check=check)
        loaded = await _done(http, service, read, path, body.scale, body.lora_name, file=Path(path))
        return JsonReply(_entry(loaded))
    finally:
        gone.set()


@router.post("/v1/unload_lora_adapter", responses={200: {"model": AdapterReply}}, dependencies=_managed)
async def unload(body: UnloadBody, http: Request) -> Response:
    """Unload an adapter. Running answers keep it."""
    which = body.lora_int_id if body.lora_name is None else body.lora_name
    if which is None:
        raise RequestError("lora_name is missing", param="lora_name", code="missing_required_parameter")
    service = await serving(http, body.model, required=False)
    return JsonReply(_entry(await _done(http, service, service.model.adapters.unload, which)))


async def _done(http: Request, service: Service, work: Any, *given: Any, file: Path | None = None) -> Any:
    """Return the result of `work`, which runs in a thread because it waits for a step.

    file: the adapter. Raises RequestError for arguments or a file that cannot be used.
    """
    try:
        return await while_connected(http, service.in_thread(work, *given))
    except InvalidRequestError as error:
        raise RequestError(_message(error, file)) from None
    except OutOfMemoryError:
        raise
    except HotsetError as error:
        raise RequestError(_message(error, file), param="lora_path") from None


def _message(error: HotsetError, file: Path | None) -> str:
    return without_folders(str(error), *() if file is None else (file,))


def _entry(each: LoadedAdapter) -> dict[str, Any]:
    return AdapterReply.written(id=each.id, name=each.name, path=each.adapter.path.name, scale=each.scale)
