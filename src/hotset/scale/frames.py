"""Frames: messages between stages, as raw arrays after a fixed header, authenticated.

    header | tag of the header | arrays of the fields that are present, in the order of FIELDS | tag of both

The header is a struct (see HEADER): magic, version, kind, sequence number, step, and for each field its
type (0: absent) and shape. All numbers are little-endian. A tag is HMAC-SHA-256 with the key of this
connection and direction (links.py). The sequence number counts frames. A frame that is altered, replayed,
left out or out of order is therefore rejected. The header has its own tag because its lengths are used
before the arrays have arrived. Nothing is allocated before these lengths are within `Bounds`. Received bytes
are only interpreted as numbers or UTF-8.
"""

from __future__ import annotations

import hmac
import math
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from hotset import errors
from hotset.backends.base import Batch
from hotset.errors import HotsetError, InvalidRequestError, StepCancelledError
from hotset.settings import LoadSettings

MAGIC, VERSION = b"HSTG", 1
TEXT_BYTES = 1 << 20  # of a text field: names of taps, or an error message
TAG_BYTES = 32
_MESSAGE_LETTERS = 4096  # of an error message; the rest is left out
_CHUNK = 1 << 18  # bytes that are hashed and sent at a time: one side hashes while the other one sends
TYPES = {"<i4": 1, "<f4": 2, "|u1": 3}  # number in the header


class LinkError(ConnectionError):
    """Raised if received data is rejected, or the other side did not answer; close the connection then."""


@dataclass(frozen=True)
class Failed:
    """An error that kept a stage from computing. kind: the name of its class."""

    kind: str
    message: str

    @staticmethod
    def of(error: Exception) -> Failed:
        return Failed(type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> Exception:
        """Return the error as an exception."""
        if self.kind == StepCancelledError.__name__:
            return StepCancelledError()
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, HotsetError):
            return kind(self.message)
        return RuntimeError(f"{self.kind}: {self.message}")


Passed = np.ndarray | Failed  # the result of a stage for a piece: rows, float32 [n_rows, width], or an error


@dataclass(frozen=True)
class Message:
    """A message of a stage. Between stages: a piece of a step, with the previous stage's result (None for the
    first stage). From the last stage: batch is None, and rows are logits."""

    step: int
    batch: Batch | None
    passed: Passed | None


class FrameKind(IntEnum):
    """The kind of a frame: whether the message has a batch."""

    PIECE = 1
    ROWS = 2


@dataclass(frozen=True)
class Bounds:
    """The limits of messages at one end of a stage. n_tokens, n_sequences, n_pages: maxima of a batch;
    n_columns: of rows, exactly."""

    kind: FrameKind
    n_tokens: int
    n_sequences: int
    n_pages: int
    n_columns: int
    n_text: ClassVar[int] = TEXT_BYTES

    @classmethod
    def of(cls, kind: FrameKind, settings: LoadSettings, n_pages: int, n_columns: int) -> Self:
        """Return the bounds for a model with these settings. An engine's tables of KV blocks have a row for
        each sequence that may run; other callers have at most one for each token."""
        n_sequences = max(settings.max_batch, settings.max_sequences)
        return cls(kind, settings.max_batch, n_sequences, n_pages, n_columns)


@dataclass(frozen=True)
class Field:
    """An array of a frame. rows, columns: fields of Bounds that limit its dimensions; None: it has one."""

    name: str
    dtype: str
    rows: str
    columns: str | None = None


FIELDS = (  # fields of four bytes come first, so every array is aligned
    Field("tokens", "<i4", "n_tokens"),
    Field("positions", "<i4", "n_tokens"),
    Field("sequences", "<i4", "n_tokens"),
    Field("page_tables", "<i4", "n_sequences", "n_pages"),
    Field("outputs", "<i4", "n_tokens"),
    Field("states", "<i4", "n_sequences"),
    Field("saves", "<i4", "n_tokens"),
    Field("rows", "<f4", "n_tokens", "n_columns"),
    Field("thresholded", "|u1", "n_tokens"),
    Field("taps", "|u1", "n_text"),  # names, separated by \0
    Field("error", "|u1", "n_text"),  # `Failed.kind`
    Field("message", "|u1", "n_text"),
)
_REQUIRED = ("tokens", "positions", "sequences", "page_tables", "outputs")  # of a batch
_OPTIONAL = ("thresholded", "states", "saves")
HEADER = struct.Struct("<4sHHQq" + "BII" * len(FIELDS))
HEADER_BYTES = HEADER.size


@dataclass(frozen=True)
class Frame:
    """A message that is ready to be sent. shapes: type, rows and columns of each field; parts: uint8."""

    kind: FrameKind
    step: int
    shapes: tuple[int, ...]
    parts: tuple[np.ndarray, ...]


def encode(message: Message, bounds: Bounds) -> Frame:
    """Return a message as a frame, whose parts are views of its arrays. Raises InvalidRequestError for a
    message that the receiver, who has the same bounds, would reject."""
    assert message.batch is None or message.batch.adapter_scales is None, "stages have no adapters"
    arrays = _arrays_of(message)
    kind = FrameKind.ROWS if message.batch is None else FrameKind.PIECE
    shapes: list[int] = []
    parts = []
    for field in FIELDS:
        array = arrays.get(field.name)
        if array is None:
            shapes += 0, 0, 0
            continue
        dtype, n_dims = np.dtype(field.dtype), 1 if field.columns is None else 2
        if array.dtype != dtype or array.ndim != n_dims:
            raise InvalidRequestError(
                f"{field.name} of a step must be {dtype.name} with {n_dims} dimensions, not "
                f"{array.dtype.name} with {array.ndim}"
            )
        rows, columns = array.shape if array.ndim == 2 else (len(array), 1)
        if problem := _out_of_bounds(field, rows, columns, bounds):
            raise InvalidRequestError(problem)
        shapes += TYPES[field.dtype], rows, columns
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return Frame(kind, message.step, tuple(shapes), tuple(parts))


def _arrays_of(message: Message) -> dict[str, np.ndarray]:
    """Return the arrays of the present fields by name."""
    found: dict[str, np.ndarray] = {}
    batch, passed = message.batch, message.passed
    if batch is not None:
        found = {name: getattr(batch, name) for name in _REQUIRED}
        for name in _OPTIONAL:
            if (array := getattr(batch, name)) is not None:
                found[name] = array.view(np.uint8) if array.dtype == np.bool_ else array
        if batch.taps:
            found["taps"] = _of_text("\0".join(batch.taps))
    if isinstance(passed, Failed):
        found["error"] = _of_text(passed.kind)
        found["message"] = _of_text(passed.message[:_MESSAGE_LETTERS])
    elif passed is not None:
        found["rows"] = passed
    return found


def _message_of(kind: FrameKind, step: int, arrays: Mapping[str, np.ndarray]) -> Message:
    """Return the message with these fields: the inverse of `_arrays_of`. Raises LinkError for others."""
    present = set(arrays)
    batch = None
    if kind is FrameKind.PIECE:
        if missing := set(_REQUIRED) - present:
            raise LinkError(f"a frame has no field {min(missing)}")
        thresholded = arrays.get("thresholded")
        required: dict[str, Any] = {name: arrays[name] for name in _REQUIRED}
        batch = Batch(
            **required,
            taps=tuple(_text(arrays["taps"]).split("\0")) if "taps" in arrays else (),
            thresholded=None if thresholded is None else thresholded != 0,
            states=arrays.get("states"),
            saves=arrays.get("saves"),
        )
        present -= {*_REQUIRED, *_OPTIONAL, "taps"}
    passed: Passed | None = None
    if present == {"error", "message"}:
        passed = Failed(_text(arrays["error"]), _text(arrays["message"]))
    elif present == {"rows"}:
        passed = arrays["rows"]
    elif present or kind is FrameKind.ROWS:
        raise LinkError(f"a frame of kind {kind} has the fields {', '.join(sorted(arrays)) or 'of none'}")
    return Message(step, batch, passed)


def _out_of_bounds(field: Field, rows: int, columns: int, bounds: Bounds) -> str | None:
    """Return a message if the shape of a field is out of bounds; otherwise None."""
    most = getattr(bounds, field.rows), 1 if field.columns is None else getattr(bounds, field.columns)
    fits = columns <= most[1] if field.name == "page_tables" else columns == most[1]
    if rows <= most[0] and fits:
        return None
    return f"{field.name} of a step is {rows} x {columns}; at most {most[0]} x {most[1]} is expected"


def _of_text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "backslashreplace"), np.uint8)


def _text(array: np.ndarray) -> str:
    return array.tobytes().decode("utf-8", "replace")


class Channel:
    """A connection on which both sides have proved that they have the key (links.py).

    sends, receives: the keys of the two directions, 32 bytes each. One thread may send while another one
    receives.
    """

    def __init__(self, tcp: socket.socket, sends: bytes, receives: bytes) -> None:
        self._tcp = tcp
        # Copied for each tag, so that the key is prepared only once.
        self._sends, self._receives = (hmac.new(key, digestmod="sha256") for key in (sends, receives))
        self._n_sent = self._n_received = 0
        self._head = bytearray(HEADER_BYTES + TAG_BYTES)

    def send(self, frame: Frame) -> None:
        """Send a frame. Raises OSError if the other side is gone."""
        header = HEADER.pack(MAGIC, VERSION, frame.kind, self._n_sent, frame.step, *frame.shapes)
        self._n_sent += 1
        mac = self._sends.copy()
        mac.update(header)
        head = header + mac.digest()
        if sum(part.nbytes for part in frame.parts) <= _CHUNK:  # one packet, if it is small
            payload = b"".join(part.data for part in frame.parts)
            mac.update(payload)
            self._tcp.sendall(b"".join((head, payload, mac.digest())))
            return
        self._tcp.sendall(head)
        for part in frame.parts:
            for at in range(0, len(part), _CHUNK):
                chunk = part[at : at + _CHUNK].data
                mac.update(chunk)
                self._tcp.sendall(chunk)
        self._tcp.sendall(mac.digest())

    def receive(self, bounds: Bounds) -> Message:
        """Return the next message, whose arrays are views of memory of its own.

        Raises EOFError if the other side has closed the connection, OSError if it is gone, and
        LinkError for a frame that is damaged or out of bounds. Close the connection after any of them.
        """
        head = memoryview(self._head)
        n = self._tcp.recv_into(head)
        if not n:
            raise EOFError
        self._fill(head[n:])
        mac = self._receives.copy()
        mac.update(head[:HEADER_BYTES])
        magic, version, kind, number, step, *shapes = HEADER.unpack_from(head)
        if not hmac.compare_digest(head[HEADER_BYTES:], mac.digest()):
            raise LinkError("a frame's header is damaged: its tag does not fit")
        if (magic, version, number, kind) != (MAGIC, VERSION, self._n_received, bounds.kind):
            raise LinkError(
                f"frame {number} of kind {kind} arrived where frame {self._n_received} of kind "
                f"{bounds.kind} is due"
            )
        self._n_received += 1
        fields = []  # of the present fields: field, first byte, end, shape
        end = 0
        for field, code, rows, columns in zip(FIELDS, shapes[::3], shapes[1::3], shapes[2::3], strict=True):
            if not code:
                continue
            if code != TYPES[field.dtype]:
                raise LinkError(f"{field.name} of a frame has type {code}, not {TYPES[field.dtype]}")
            if problem := _out_of_bounds(field, rows, columns, bounds):
                raise LinkError(problem)
            start, shape = end, (rows,) if field.columns is None else (rows, columns)
            end += math.prod(shape) * np.dtype(field.dtype).itemsize
            fields.append((field, start, end, shape))
        payload = np.empty(end + TAG_BYTES, np.uint8)
        for at in range(0, len(payload), _CHUNK):
            self._fill(payload[at : at + _CHUNK].data)
            mac.update(payload[at : min(at + _CHUNK, end)].data)
        if not hmac.compare_digest(payload[end:].tobytes(), mac.digest()):
            raise LinkError("the arrays of a frame are damaged: their tag does not fit")
        arrays = {
            field.name: payload[start:stop].view(field.dtype).reshape(shape)
            for field, start, stop, shape in fields
        }
        return _message_of(bounds.kind, step, arrays)

    def _fill(self, view: memoryview) -> None:
        """Read bytes until the view is full."""
        while view:
            n = self._tcp.recv_into(view)
            if not n:
                raise EOFError("the connection ended within a frame")
            view = view[n:]

    def shutdown(self) -> None:
        """End the connection, and release a thread that sends or receives."""
        with suppress(OSError):
            self._tcp.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; safe to call twice. No other thread may use it."""
        self.shutdown()
        self._tcp.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
