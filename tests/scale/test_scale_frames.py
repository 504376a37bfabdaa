"""Frames between stages: every field is carried, and what is damaged, replayed or too long is refused."""

from __future__ import annotations

import ast
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset.scale
from hotset.backends.base import Batch
from hotset.errors import ContextLengthError, InvalidRequestError
from hotset.scale import frames
from hotset.scale.frames import (
    FIELDS,
    HEADER_BYTES,
    TAG_BYTES,
    TEXT_BYTES,
    Bounds,
    Channel,
    Failed,
    Frame,
    FrameKind,
    LinkError,
    Message,
    encode,
)

FORWARD, BACK = b"f" * 32, b"b" * 32  # keys of the two directions
PIECES = Bounds(FrameKind.PIECE, n_tokens=8, n_sequences=4, n_pages=5, n_columns=6)
ROWS = replace(PIECES, kind=FrameKind.ROWS)
LARGE = Bounds(FrameKind.PIECE, n_tokens=1 << 16, n_sequences=1 << 16, n_pages=1 << 16, n_columns=6)


def ints(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-5, 1 << 30, shape).astype(np.int32)


def floats(n: int, width: int = 6) -> np.ndarray:
    """Any bits, among them NaN and infinity."""
    bits = np.random.default_rng(n).integers(0, 1 << 32, (n, width), np.uint32)
    bits[:1, :2] = 0x7F800000, 0xFFC00001
    return bits.view(np.float32)


def a_batch(n: int = 7, **more: Any) -> Batch:
    return Batch(ints(n), ints(n, seed=1), ints(n, seed=2), ints(3, 5), ints(2), **more)


FULL = a_batch(
    taps=("blk.0.ffn_act", "blk.1.ß"),
    thresholded=np.arange(7) % 3 == 0,
    states=ints(3),
    saves=ints(7, seed=3),
)
MESSAGES = [
    Message(3, FULL, floats(7)),
    Message(1 << 40, a_batch(), None),
    Message(0, a_batch(0), floats(0)),
    Message(5, a_batch(), Failed("ContextLengthError", "too long: ß \udc80")),
    Message(-1, None, floats(4)),
    Message(2, None, Failed("KeyError", "'x'")),
]


def wire(messages: Sequence[Message], bounds: Bounds = LARGE, key: bytes = FORWARD) -> list[bytes]:
    """The bytes of each message, as one connection sends them."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours, key, BACK)) as channel, theirs:
        found = []
        for message in messages:
            channel.send(encode(message, replace(bounds, kind=kind_of(message))))
            found.append(theirs.recv(1 << 20))
        return found


def kind_of(message: Message) -> FrameKind:
    return FrameKind.ROWS if message.batch is None else FrameKind.PIECE


@contextmanager
def fed(data: bytes, key: bytes = FORWARD) -> Iterator[Channel]:
    """A connection on which these bytes arrive, and then its end."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours, BACK, key)) as channel:
        with theirs:
            theirs.sendall(data)
        yield channel


def refused(data: bytes, bounds: Bounds = PIECES, after: int = 0, key: bytes = FORWARD) -> str:
    """Why the message is refused that follows so many good ones."""
    with fed(data, key) as channel:
        for _ in range(after):
            channel.receive(bounds)
        with pytest.raises(LinkError) as found:
            channel.receive(bounds)
        return str(found.value)


def header(number: int = 0, kind: int = 1, magic: bytes = b"HSTG", version: int = 1, **shapes: Any) -> bytes:
    """The header of a frame with its tag, as a hostile stage that has the key would send it. shapes: field →
    type, rows and columns."""
    given = [value for field in FIELDS for value in shapes.get(field.name, (0, 0, 0))]
    found = frames.HEADER.pack(magic, version, kind, number, 0, *given)
    return found + frames.hmac.digest(FORWARD, found, "sha256")


# --- what is carried


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_a_message_arrives_with_the_same_bits(message: Message) -> None:
    (data,) = wire([message])
    with fed(data) as channel:
        found = channel.receive(replace(LARGE, kind=kind_of(message)))
        with pytest.raises(EOFError):
            channel.receive(LARGE)
    assert found.step == message.step
    assert (found.batch is None) == (message.batch is None)
    if message.batch is not None and found.batch is not None:
        for field in fields(Batch):
            same(getattr(found.batch, field.name), getattr(message.batch, field.name))
    if isinstance(message.passed, Failed):
        assert found.passed == replace(
            message.passed, message=message.passed.message.replace("\udc80", "\\udc80")
        )
    else:
        same(found.passed, message.passed)


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape, found.tobytes()) == (
            expected.dtype, expected.shape, expected.tobytes(),
        )  # fmt: skip
        assert found.flags.aligned
        assert found.flags.c_contiguous
    else:
        assert found == expected


def test_every_field_of_a_batch_is_carried() -> None:
    """A new field of Batch must be added to FIELDS, and VERSION raised. Stages have no adapters, and hand out
    all logits."""
    carried = {field.name for field in fields(Batch)} - {"adapter_scales", "wants_candidates"}
    assert all(getattr(FULL, name) is not None for name in carried)
    assert carried <= {field.name for field in FIELDS}
    with pytest.raises(AssertionError, match="no adapters"):
        encode(Message(1, a_batch(adapter_scales=[(("digest", 1.0),)] * 3), None), LARGE)


def test_arrays_that_are_not_contiguous_arrive() -> None:
    strided = a_batch()
    strided = replace(strided, tokens=ints(14)[::2], page_tables=ints(5, 3).T)
    (data,) = wire([Message(1, strided, floats(7)[::-1])])
    with fed(data) as channel:
        found = channel.receive(LARGE)
    assert found.batch is not None
    same(found.batch.tokens, ints(14)[::2])
    same(found.batch.page_tables, ints(5, 3).T)
    same(found.passed, np.ascontiguousarray(floats(7)[::-1]))


def test_a_large_message_arrives_in_pieces() -> None:
    rows = np.random.default_rng(0).standard_normal((300, 2000)).astype(np.float32)
    bounds = replace(ROWS, n_tokens=300, n_columns=2000)
    ours, theirs = socket.socketpair()
    with closing(Channel(ours, FORWARD, BACK)) as sender, closing(Channel(theirs, BACK, FORWARD)) as receiver:
        frame = encode(Message(1, None, rows), bounds)
        thread = threading.Thread(target=lambda: [sender.send(frame) for _ in range(2)])
        thread.start()
        for _ in range(2):
            same(receiver.receive(bounds).passed, rows)
        thread.join()


def test_an_error_arrives_with_its_type() -> None:
    long = "x" * (2 * TEXT_BYTES)
    (data,) = wire([Message(1, None, Failed.of(ContextLengthError(long)))])
    with fed(data) as channel:
        found = channel.receive(ROWS).passed
    assert isinstance(found, Failed)
    error = found.error()
    assert isinstance(error, ContextLengthError)
    assert long.startswith(str(error))
    assert len(str(error)) == 4096


# --- what is refused


def test_every_byte_is_authenticated() -> None:
    (data,) = wire(MESSAGES[:1])
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1 << i % 8
        assert "damaged" in refused(bytes(damaged))


def test_a_frame_that_ends_early_is_lost() -> None:
    (data,) = wire(MESSAGES[:1])
    for n in range(len(data)):
        with fed(data[:n]) as channel, pytest.raises(EOFError) as found:
            channel.receive(PIECES)
        assert str(found.value) == ("the connection ended within a frame" if n else "")


def test_frames_arrive_once_and_in_order() -> None:
    first, second, third = wire([MESSAGES[0]] * 3)
    with fed(first + second + third) as channel:
        assert [channel.receive(PIECES).step for _ in range(3)] == [3, 3, 3]
    assert refused(first + first, after=1) == "frame 0 of kind 1 arrived where frame 1 of kind 1 is due"
    assert refused(second + first) == "frame 1 of kind 1 arrived where frame 0 of kind 1 is due"
    assert refused(first + third, after=1) == "frame 2 of kind 1 arrived where frame 1 of kind 1 is due"


def test_a_frame_of_another_connection_or_direction_is_refused() -> None:
    for key in (BACK, b"o" * 32):
        assert "header is damaged" in refused(wire(MESSAGES[:1], key=key)[0])


def test_the_arrays_of_one_frame_do_not_fit_the_header_of_another() -> None:
    first, other = (wire([Message(3, a_batch(), rows)])[0] for rows in (floats(7), -floats(7)))
    head = HEADER_BYTES + TAG_BYTES
    assert first[:head] == other[:head]
    assert len(first) == len(other)
    assert "arrays of a frame are damaged" in refused(
        first[:head] + other[head:-TAG_BYTES] + first[-TAG_BYTES:]
    )


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_no_length_is_allocated_before_it_is_within_bounds(
    field: frames.Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("this memory is not to be allocated")

    code, most = frames.TYPES[field.dtype], getattr(PIECES, field.rows)
    columns = 1 if field.columns is None else getattr(PIECES, field.columns)
    shapes = [(most + 1, columns), (1, columns + 1), (2**32 - 1, 2**32 - 1)]
    with monkeypatch.context() as patched:
        patched.setattr(np, "empty", never)
        for rows, n in shapes:
            said = refused(header(**{field.name: (code, rows, n)}))
            assert said == f"{field.name} of a step is {rows} x {n}; at most {most} x {columns} is expected"
        assert "has type 9" in refused(header(**{field.name: (9, 1, 1)}))


def test_a_frame_that_is_no_message_is_refused() -> None:
    def framed(**shapes: Any) -> bytes:
        """With arrays of no bytes."""
        head = header(**shapes)
        return head + frames.hmac.digest(FORWARD, head[:HEADER_BYTES], "sha256")

    empty = dict.fromkeys(("tokens", "positions", "sequences", "outputs"), (1, 0, 1))
    empty["page_tables"] = (1, 0, 5)
    with fed(framed(**empty)) as channel:
        assert channel.receive(PIECES).passed is None
    assert refused(framed()) == "a frame has no field outputs"
    assert "has the fields error" in refused(framed(**empty, error=(3, 0, 1)))
    rows = {"rows": (2, 0, 6)}
    both = {**rows, "error": (3, 0, 1), "message": (3, 0, 1)}
    assert "has the fields" in refused(framed(**empty, **both))
    assert "has the fields of none" in refused(framed(kind=2), ROWS)
    assert "has the fields" in refused(framed(kind=2, **empty, **rows), ROWS)
    for wrong in ({"kind": 3}, {"magic": b"HTTP"}, {"version": 2}):
        assert "arrived where frame 0 of kind 1 is due" in refused(framed(**wrong, **empty))  # type: ignore[arg-type]
    assert "of kind 1 arrived where frame 0 of kind 2" in refused(framed(**empty), ROWS)


def test_what_the_receiver_would_refuse_is_not_sent() -> None:
    for name, wrong, said in (
        ("tokens", ints(7).astype(np.int64),
         "tokens of a step must be int32 with 1 dimensions, not int64 with 1"),
        ("page_tables", ints(5), "page_tables of a step must be int32 with 2 dimensions, not int32 with 1"),
        ("tokens", ints(9), "tokens of a step is 9 x 1; at most 8 x 1 is expected"),
        ("page_tables", ints(3, 6), "page_tables of a step is 3 x 6; at most 4 x 5 is expected"),
        ("taps", ("x" * TEXT_BYTES, "y"), "taps of a step is 1048578 x 1; at most 1048576 x 1 is expected"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError) as found:
            encode(Message(1, replace(a_batch(), **{name: wrong}), None), PIECES)  # type: ignore[arg-type]
        assert str(found.value) == said
    with pytest.raises(InvalidRequestError, match="rows of a step is 7 x 5; at most 8 x 6 is expected"):
        encode(Message(1, a_batch(), floats(7, 5)), PIECES)


# --- nothing is unpickled


class Hostile:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_hostile_pickle_is_numbers_or_text(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    hostile = pickle.dumps(Hostile(trace))
    hostile += b"." * (-len(hostile) % 4)
    raw = np.frombuffer(hostile, np.uint8)
    batch = replace(a_batch(), tokens=raw.view(np.int32), taps=(raw.tobytes().decode("latin-1"),))
    shapes = [(0, 0, 0)] * len(FIELDS)
    with fed(wire([Message(1, batch, None)])[0]) as channel:
        assert channel.receive(LARGE).batch is not None
    # In every field, by a stage that has the key and sends what it likes.
    for i, field in enumerate(FIELDS):
        n = len(raw) // np.dtype(field.dtype).itemsize
        shape = (n, 1) if field.columns is None else (1, n)
        given = [*shapes[:i], (frames.TYPES[field.dtype], *shape), *shapes[i + 1 :]]
        frame = Frame(FrameKind.PIECE, 1, tuple(value for one in given for value in one), (raw,))
        ours, theirs = socket.socketpair()
        bounds = replace(LARGE, n_columns=n)
        with (
            closing(Channel(ours, FORWARD, BACK)) as sender,
            closing(Channel(theirs, BACK, FORWARD)) as found,
        ):
            sender.send(frame)
            with pytest.raises(LinkError, match="a frame has no field"):
                found.receive(bounds)
    with fed(hostile) as channel, pytest.raises((LinkError, EOFError)):
        channel.receive(LARGE)
    assert not trace.exists()
    pickle.loads(hostile)
    assert trace.exists()


def test_stages_import_nothing_that_unpickles() -> None:
    for name in ("frames", "links", "worker", "stages"):
        source = (Path(hotset.scale.__file__).parent / f"{name}.py").read_text("utf-8")
        found = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {one for one in found if one.partition(".")[0] in ("pickle", "multiprocessing", "marshal")}
