"""Images among the text of a message.

A content with images is an ImageText: a text with a random placeholder for each image. All code between a
request and the chat template treats it as text. Then the template's text for an image replaces each
placeholder (`text/messages.py`), and the image's tokens replace that text.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from hotset.errors import InvalidRequestError

Detail = Literal["auto", "low", "high"]
DETAILS: tuple[Detail, ...] = get_args(Detail)
NOTE = "[image: this model reads only text]"
NO_TOKEN = -1  # in place of the token ids of images

_MARK = f"{secrets.randbits(64):020}"  # of this process, so that no client can guess a placeholder
_PLACEHOLDER = re.compile(rf"({_MARK}-[0-9a-f]{{16}}-)")


@dataclass(frozen=True, eq=False)
class GivenImage:
    """An image of a message. data: the bytes of a file. detail: the wanted resolution.

    address: an http or https URL from which `data` is still to be fetched; "" if it is there.
    """

    data: bytes = b""
    detail: Detail = "auto"
    address: str = ""

    @cached_property
    def key(self) -> bytes:
        """Return a digest of the file and the wanted resolution."""
        return hashlib.blake2b(self.data, digest_size=32, person=self.detail.encode()).digest()


class ImageText(str):
    """A text with images. images: placeholder → image. Operations of `str` return a text without them."""

    images: Mapping[str, GivenImage]

    def __new__(cls, text: str, images: Mapping[str, GivenImage]) -> ImageText:
        self = super().__new__(cls, text)
        self.images = images
        return self

    def __getnewargs__(self) -> tuple[str, Mapping[str, GivenImage]]:  # type: ignore[override]
        return str(self), self.images


def text_of_image(image: GivenImage) -> ImageText:
    """Return a text that consists of one image."""
    placeholder = f"{_MARK}-{secrets.token_hex(8)}-"
    return ImageText(placeholder, {placeholder: image})


def images_of(text: Any) -> Mapping[str, GivenImage]:
    """Return the images of a content by placeholder."""
    return text.images if isinstance(text, ImageText) else {}


def joined(separator: str, texts: Iterable[str]) -> str:
    """Return joined texts with the images of all."""
    texts = list(texts)
    images = {name: image for text in texts for name, image in images_of(text).items()}
    whole = separator.join(texts)
    return ImageText(whole, images) if images else whole


def without_images(messages: Sequence[dict[str, Any]], why: str) -> list[dict[str, Any]]:
    """Return messages for a model that reads only text. why: the reason, for the message.

    A note replaces an image of a tool's result: a program that calls tools must not fail at each later
    request because of it. Raises InvalidRequestError for an image of a user.
    """
    if any(message.get("role") != "tool" and images_of(message.get("content")) for message in messages):
        raise InvalidRequestError(f"this model reads only text: {why}")
    return [
        {**message, "content": _PLACEHOLDER.sub(NOTE, str(message["content"]))}
        if message.get("role") == "tool" and images_of(message.get("content"))
        else message
        for message in messages
    ]


def split(text: str) -> list[str]:
    """Return texts and placeholders in turn; the first and the last are texts, perhaps empty."""
    return _PLACEHOLDER.split(text)


def as_parts(content: Any) -> Any:
    """Return a content as a list of parts in Hugging Face's form if it has placeholders."""
    if isinstance(content, list):
        return [one for part in content for one in _parts_of(part)]
    pieces = split(content) if isinstance(content, str) else []
    if len(pieces) < 2:
        return content
    return [
        {"type": "image"} if i % 2 else {"type": "text", "text": piece}
        for i, piece in enumerate(pieces)
        if piece
    ]


def _parts_of(part: Any) -> list[Any]:
    found = as_parts(part.get("text")) if isinstance(part, Mapping) else part
    return found if isinstance(found, list) else [part]


def placeholders_in(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the placeholders in the contents of messages, in order."""
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        texts = [content] if isinstance(content, str) else content if isinstance(content, list) else []
        for text in texts:
            text = text.get("text") if isinstance(text, Mapping) else text
            found += split(text)[1::2] if isinstance(text, str) else []
    return found


@dataclass(frozen=True)
class ImageSource:
    """A source of the places that images have in a prompt.

    marker: the text that published chat templates of its family write for an image. plain_marker: a text with
    `marker` in it for a template that knows no images. pieces: returns an image's place: texts, and counts of
    its tokens; raises InvalidRequestError.
    """

    marker: str
    plain_marker: str
    pieces: Callable[[GivenImage], Sequence[str | int]]


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image in a prompt. firsts: for each count of its pieces, the index of the first token."""

    image: GivenImage
    firsts: tuple[int, ...]


class PromptTokens(list[int]):
    """The token ids of a prompt with images, in order; ids of their tokens are NO_TOKEN.

    A copy of the list has no images, and the engine refuses its ids. placed: the engine's prompt, once its
    images are encoded; several answers share it.
    """

    images: tuple[PlacedImage, ...] = ()
    placed: Any = None
