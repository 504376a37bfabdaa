"""Messages between stages: each field arrives with the same bits, and invalid heads are refused."""

from __future__ import annotations

import ast
import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset.scale
from hotset.backends.base import Batch
from hotset.errors import ContextLengthError
from hotset.scale.messages import Failed, Header, Message, most_bytes
from hotset.settings import LoadSettings


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
    taps=("blk.0.ffn_act", "blk.1.ß \udc80"),
    thresholded=np.arange(7) % 3 == 0,
    states=ints(3),
    saves=ints(7, seed=3),
    rotary=ints(7, 3),
    groups=ints(7, 2),
)
MESSAGES = [
    Message(3, FULL, floats(7)),
    Message(1 << 40, a_batch(), None),
    Message(0, a_batch(0), floats(0)),
    Message(5, a_batch(), Failed("ContextLengthError", "too long: ß \udc80")),
    Message(-1, None, floats(4)),
    Message(2, None, Failed("KeyError", "'x'")),
]


def carried(message: Message) -> Message:
    data, arrays = message.encode()
    found = Header.decode(data)
    body = b"".join(array.tobytes() for array in arrays)
    assert len(body) == found.n_bytes
    return found.message(np.frombuffer(body, np.uint8))


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


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_message_arrives_with_the_same_bits(message: Message) -> None:
    found = carried(message)
    assert found.step == message.step
    assert (found.batch is None) == (message.batch is None)
    if message.batch is not None and found.batch is not None:
        for field in fields(Batch):
            same(getattr(found.batch, field.name), getattr(message.batch, field.name))
    same(found.passed, message.passed)


def test_every_field_of_a_batch_is_carried() -> None:
    """Stages have no adapters and no images, and return all logits."""
    names = {field.name for field in fields(Batch)} - {"adapter_scales", "image_rows", "wants_candidates"}
    assert all(getattr(FULL, name) is not None for name in names)
    adapted = Message(1, a_batch(adapter_scales=[(("digest", 1.0),)] * 3), None)
    with pytest.raises(AssertionError, match="no adapters"):
        adapted.encode()


def test_an_error_arrives_with_its_type() -> None:
    long = "x" * (1 << 21)
    found = carried(Message(1, None, Failed.of(ContextLengthError(long)))).passed
    assert isinstance(found, Failed)
    error = found.error()
    assert isinstance(error, ContextLengthError)
    assert str(error) == long[:4096]


def test_the_limit_covers_the_largest_step() -> None:
    settings = LoadSettings(max_batch=7, max_sequences=9)
    table = ints(9, 5)
    data, _ = Message(1, replace(FULL, block_tables=table), floats(7)).encode()
    assert Header.decode(data).n_bytes <= most_bytes(settings, n_blocks=5, width=6)
    data, _ = Message(1, replace(FULL, block_tables=ints(1000, 5)), floats(7)).encode()
    assert Header.decode(data).n_bytes > most_bytes(settings, n_blocks=5, width=6)


def head(*arrays: object, **more: object) -> object:
    return {"step": 1, "taps": [], "failed": None, "arrays": arrays, **more}


@pytest.mark.parametrize(
    "found",
    [
        [], 7, {}, head(more=1), head(["rows", "<f4"]), head(["rows", "O", [1]]), head(["rows", "<f4", [-1]]),
        head(["rows", "<f4", ["x"]]), head(["tokens", "<i4", [0]]), head(["__class__", "<i4", [0]]),
        head(failed=[1]),
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_head_is_refused(found: object) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Header.decode(json.dumps(found).encode()).message(np.empty(0, np.uint8))


class Hostile:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_numbers_or_no_head(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    hostile = pickle.dumps(Hostile(trace))
    with pytest.raises(UnicodeDecodeError):
        Header.decode(hostile)
    raw = np.frombuffer(hostile + b"." * (-len(hostile) % 4), np.int32)
    carried(Message(1, a_batch(), raw.view(np.float32).reshape(1, -1)))
    assert not trace.exists()
    pickle.loads(hostile)
    assert trace.exists()


def test_stages_import_nothing_that_unpickles() -> None:
    for name in ("messages", "links", "worker", "stages"):
        source = (Path(hotset.scale.__file__).parent / f"{name}.py").read_text("utf-8")
        found = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert not {one for one in found if one.partition(".")[0] in ("pickle", "multiprocessing", "marshal")}
        assert "pyobj" not in source  # of pyzmq, which pickles
