"""POST /slots/{id_slot}: save, restore and erase the tokens of a slot, as llama-server does.

A slot is a number: the `id_slot` of a request, or otherwise the slot in which the request runs. It holds the
tokens of the latest answer that ended there. Their keys and values are in KV blocks that all slots share.
After a restore, every request that begins with the same tokens finds them, in any slot.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from hotset.backends.base import BLOCK_SIZE
from hotset.engine.blocks import Prefix
from hotset.engine.saved_prefix import NO_PREFIX, SessionFiles
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import entries
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError, without_folders
from hotset.server.manage import check_allowed
from hotset.server.replies import JsonReply
from hotset.server.rows import Body
from hotset.server.shapes import SlotReply
from hotset.server.streams import serving
from hotset.units import human_size

router = APIRouter(route_class=BodyRoute)

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]{0,199}")
_ACTIONS = ("save", "restore", "erase")
_DISK_BLOCK = 4096  # bytes, to which the size of a file is rounded up
_saving = threading.Lock()  # two saves at once would count the same room twice


class SlotBody(Body):
    """A saved slot. filename: in the folder of --slot-save-path; not needed for erase."""

    model: str | None = None
    filename: str | None = None


@router.post("/slots/{id_slot}", responses={200: {"model": SlotReply}})
async def slots(
    id_slot: int,
    http: Request,
    action: str | None = None,
    body: SlotBody = SlotBody(),  # noqa: B008
) -> Response:
    """Save, restore or erase a slot. A damaged file restores the tokens before the damage."""
    # All clients share slots and files.
    check_allowed(http, "slots are saved, restored and erased", "save, restore or erase slots")
    service = await serving(http, body.model, required=False)
    model, folder = service.model, service.settings.slot_save_path
    if folder is None:
        raise RequestError(
            "slots are not saved by this server; start it with --slot-save-path", 501, code="not_supported"
        )
    if isinstance(service.slots, HotsetError):
        raise RequestError(str(service.slots), 501, code="not_supported")
    assert service.slots is not None, "it is ready"
    if not 0 <= id_slot < model.engine.max_sequences:
        raise RequestError(
            f"there is no slot {id_slot}: this server has {model.engine.max_sequences}", param="id_slot"
        )
    if action not in _ACTIONS:
        raise RequestError(f"action is one of {', '.join(_ACTIONS)}", param="action")
    held = _Slot(service.slots, id_slot, model.decided.settings.cache_disk_bytes)
    if action == "erase":
        return JsonReply(await service.in_thread(held.erase))
    path = _path(Path(folder), body.filename)
    return JsonReply(await service.in_thread(held.save if action == "save" else held.restore, path))


def _path(folder: Path, name: str | None) -> Path:
    if name is None or not _FILE_NAME.fullmatch(name):
        raise RequestError(
            "filename is the plain name of a file: letters, digits, '.', '_', '-', and no folder",
            param="filename",
        )
    return folder / name


class _Slot:
    """A slot, used in a thread outside of the event loop. most: bytes of all files in the folder."""

    def __init__(self, files: SessionFiles, id_slot: int, most: int) -> None:
        self._files, self._id, self._most = files, id_slot, most
        self._held = files.thread.engine.keep_slots()

    @property
    def _prefix(self) -> Prefix:
        return self._held.get(self._id, NO_PREFIX)

    def save(self, path: Path) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            with _saving:
                saved = self._files.save(path, self._prefix, reserve=self._room(path))
        except RequestError:
            raise
        except InvalidRequestError as error:
            raise RequestError(without_folders(str(error), path), param="filename") from None
        except HotsetError as error:
            raise RequestError(without_folders(str(error), path), 500, code="not_saved") from None
        return SlotReply.written(
            id_slot=self._id, filename=path.name, n_saved=saved.n_tokens, n_written=saved.n_bytes,
            timings={"save_ms": _ms_since(begun)},
        )  # fmt: skip

    def _room(self, path: Path) -> Callable[[int], None]:
        """Return a function that takes bytes of the room left in the folder. It raises RequestError."""
        others = (entry for entry in entries(path.parent) if entry.name != path.name)
        left = self._most - sum(map(_n_bytes, others))

        def take(n: int) -> None:
            nonlocal left
            left -= n
            if left < 0:
                raise RequestError(
                    f"the files of saved slots have at most {human_size(self._most)}; save under an "
                    "existing name, delete files, or start the server with a larger --cache-disk",
                    507,
                    code="slots_full",
                )

        return take

    def restore(self, path: Path) -> dict[str, Any]:
        begun = time.perf_counter()
        try:
            saved = self._files.read(path, about_bytes=0)
        except FileNotFoundError:
            raise RequestError(f"there is no saved slot {path.name!r}", 404, param="filename") from None
        except HotsetError as error:
            raise RequestError(without_folders(str(error), path), param="filename") from None
        if not saved.is_of_model:
            raise RequestError(
                f"{path.name} was saved by another model, type of cache or version of hotset",
                param="filename",
            )
        n_tokens = self._files.restore(saved)
        self._held[self._id] = saved.prefix.cut(n_tokens // BLOCK_SIZE)
        return SlotReply.written(
            id_slot=self._id, filename=path.name, n_restored=n_tokens, n_read=saved.n_bytes,
            timings={"restore_ms": _ms_since(begun)},
        )  # fmt: skip

    def erase(self) -> dict[str, Any]:
        prefix = self._held.pop(self._id, NO_PREFIX)
        self._files.erase(prefix)
        return SlotReply.written(id_slot=self._id, n_erased=len(prefix.tokens))


def _n_bytes(entry: os.DirEntry[str]) -> int:
    """Return the bytes of a file on the disk; 0 for a link or a folder."""
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # it was deleted
        return 0
    return -(-status.st_size // _DISK_BLOCK) * _DISK_BLOCK if stat.S_ISREG(status.st_mode) else 0


def _ms_since(begun: float) -> float:
    return round(1e3 * (time.perf_counter() - begun), 3)
