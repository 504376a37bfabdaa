"""Images in the messages of clients: the parts of OpenAI's, Anthropic's and Hugging Face's forms."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from hotset.errors import FormatError, InvalidRequestError
from hotset.files import expanded, missing, read_small_file
from hotset.parameters import shown
from hotset.text.image_text import DETAILS, Detail, GivenImage

MOST_BYTES = 64 << 20
"""The largest file of an image that is read."""
KINDS = ("image", "image_url", "input_image")
"""Types of parts that are images."""
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.-]+)*?(;base64)?,", re.ASCII | re.IGNORECASE)
_SOURCES = ("image", "path", "url", "base64", "data", "bytes")  # fields of Hugging Face's form, and Python's


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image."""
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in KINDS


def given_image(part: Mapping[str, Any], *, local: bool = True) -> GivenImage | None:
    """Return the image of a part; None for a part of another type.

    local: accept paths and objects of this machine, as programs give them, not clients of a server. Raises
    InvalidRequestError for an image that cannot be read.
    """
    if not is_image(part):
        return None
    source: Any = part.get("source")
    if isinstance(source, Mapping):  # Anthropic's form
        if source.get("type") == "base64":
            return GivenImage(from_base64(source.get("data")))
        if source.get("type") == "url":
            return _from_address(source.get("url"), "auto", local=False)
        kind = shown(source.get("type"))
        raise InvalidRequestError(f"the source of an image must be base64 or url, not {kind}")
    if "image_url" in part:  # OpenAI's forms
        given: Any = part["image_url"]
        detail: Any = part.get("detail")
        if isinstance(given, Mapping):
            given, detail = given.get("url"), given.get("detail", detail)
        return _from_address(given, checked_detail(detail), local=local)
    name = next((name for name in _SOURCES if part.get(name) is not None), None)
    if name is None:
        raise InvalidRequestError("an image needs a source, such as image_url or path")
    detail = checked_detail(part.get("detail"))
    if name in ("base64", "data") and isinstance(part[name], str):
        return GivenImage(from_base64(part[name]), detail)
    if local:
        return image_from(part[name], detail)
    return _from_address(part[name], detail, local=False)


def image_from(given: Any, detail: Detail = "auto") -> GivenImage:
    """Return an image from a path, a data URL, the bytes of a file, or an image of Pillow.

    Raises InvalidRequestError for anything else, and for a file that cannot be read.
    """
    if isinstance(given, GivenImage):
        return given
    if isinstance(given, bytes | bytearray | memoryview):
        return GivenImage(bytes(given), detail)
    if isinstance(given, str | os.PathLike):
        return _from_address(os.fspath(given), detail, local=True)
    if type(given).__module__.partition(".")[0] == "PIL" and callable(getattr(given, "save", None)):
        return GivenImage(_saved(given), detail)
    raise InvalidRequestError(
        f"an image must be a path, bytes, a data URL or an image of Pillow, not {shown(type(given).__name__)}"
    )


def checked_detail(given: Any) -> Detail:
    """Return the wanted resolution; null means auto. Raises InvalidRequestError for an unknown one."""
    for detail in DETAILS:
        if given == detail:
            return detail
    if given in (None, ""):
        return "auto"
    names = ", ".join(DETAILS)
    raise InvalidRequestError(f"the detail of an image must be one of {names}, not {shown(given)}")


def from_base64(given: Any) -> bytes:
    """Return the bytes of a base64 text, after the head of a data URL if it has one.

    Raises InvalidRequestError."""
    if not isinstance(given, str) or not given:
        raise InvalidRequestError("the data of an image must be a text in base64")
    head = _DATA_URL.match(given)
    try:
        text = given[head.end() if head else 0 :].strip().replace("\r", "").replace("\n", "")
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequestError("the data of an image is not valid base64") from None


def _from_address(given: Any, detail: Detail, *, local: bool) -> GivenImage:
    if not isinstance(given, str) or not given:
        raise InvalidRequestError("the URL of an image must be a text")
    if given[:5].lower() == "data:":
        head = _DATA_URL.match(given)
        if head is None:
            raise InvalidRequestError("the data URL of an image must begin with data:image/TYPE;base64,")
        if head[1]:
            return GivenImage(from_base64(given), detail)
        return GivenImage(unquote_to_bytes(given[head.end() :]), detail)
    if given[:8].lower().startswith(("http://", "https://")):
        return GivenImage(detail=detail, address=given)
    if not local:
        raise InvalidRequestError(
            f"the URL of an image must be a data URL or begin with https://, not {shown(given[:40])}"
        )
    return GivenImage(_from_file(expanded(given)), detail)


def _from_file(path: Path) -> bytes:
    try:
        return read_small_file(path, MOST_BYTES)
    except FileNotFoundError:
        raise InvalidRequestError(missing(path, "image")) from None
    except FormatError as error:
        raise InvalidRequestError(str(error).removesuffix(".")) from None


def _saved(image: Any) -> bytes:
    """Return an image of Pillow as a PNG file, which loses nothing."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
