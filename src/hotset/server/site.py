"""The page at `/` and its files in `page/`: plain HTML, CSS and JavaScript, served unchanged.

`parameters.js` is made from the tables of parameters.

The server reads the files once, when it starts, into a table: no path of a request reaches the disk. A policy
allows only the page's own scripts and styles. It forbids scripts in the HTML or from elsewhere, HTML made of
strings (Trusted Types), and frames around the page. The page itself needs no key, but its requests do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response

from hotset.load_parameters import LOAD_PARAMETERS
from hotset.parameters import Parameter
from hotset.sampling_parameters import PARAMETERS

router = APIRouter(include_in_schema=False)

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    # Browsers ask again each time, and get a new file only if it changed: an upgrade mixes no two versions.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str

    @cached_property
    def etag(self) -> str:
        return f'"{sha256(self.content).hexdigest()[:32]}"'


@cache
def _files() -> dict[str, _File]:
    """Return every file of the page by its path below `page/`."""
    found = {}
    folder = files("hotset.server") / "page"
    for place, prefix in ((folder, ""), (folder / "vendor", "vendor/")):
        for entry in place.iterdir():
            media_type = _TYPES.get(entry.name.rpartition(".")[2])
            if media_type is not None and entry.is_file():
                found[prefix + entry.name] = _File(entry.read_bytes(), media_type)
    return found | {"parameters.js": _File(_parameters(), _TYPES["js"])}


def _parameters() -> bytes:
    """Return the page's parameters.js: the parameters of answers, and of loading, that the page offers."""
    return "".join(
        f"export const {name} = {json.dumps([_field(one) for one in table.values() if one.label])};\n"
        for name, table in (("FIELDS", PARAMETERS), ("LOADING", LOAD_PARAMETERS))
    ).encode()


def _field(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name, "label": one.label, "note": one.summary, "whole": one.kind is int,
        "min": one.least, "max": one.high, "slider": one.slider,
    }  # fmt: skip


@router.api_route("/", methods=["GET", "HEAD"])
async def index(http: Request) -> Response:
    return _served("index.html", http)


@router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
async def file(name: str, http: Request) -> Response:
    return _served(name, http)


def _served(name: str, http: Request) -> Response:
    file = _files().get(name)
    if file is None:
        return Response(f"there is no {http.url.path}\n", 404, _HEADERS, "text/plain")
    headers = _HEADERS | {"ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in http.headers.get("If-None-Match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
