"""A device's memory, tested without one: pieces that hold tensors, copies on a stream, planned savings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from placement_problems import layer, model, place_budget, power_law, rates

torch = pytest.importorskip("torch")

from hotset.backends.triton import arena as arenas  # noqa: E402
from hotset.backends.triton import planning  # noqa: E402
from hotset.backends.triton.arena import Arena  # noqa: E402
from hotset.backends.triton.stream import CopyStream  # noqa: E402
from hotset.errors import OutOfMemoryError  # noqa: E402
from hotset.formats.quants import GGMLType, row_bytes  # noqa: E402
from hotset.placement.solver import solve  # noqa: E402
from hotset.placement.table import Device  # noqa: E402


def test_tensors_of_an_arena_lie_apart_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "PIECE", 4096)
    monkeypatch.setattr(arenas, "ROUNDING", 1024)
    arena = Arena("cpu")
    made = [arena.empty(shape, dtype) for shape, dtype in (
        ((3, 5), torch.float32), ((700,), torch.uint8), ((0, 4), torch.float16), ((9,), torch.int64),
        ((1000,), torch.float32), ((5000,), torch.uint8), ((2, 2), torch.int32),
    )]  # fmt: skip
    for i, tensor in enumerate(made):
        tensor.fill_(i + 1)
    for i, tensor in enumerate(made):
        assert tensor.is_contiguous()
        assert not (tensor != i + 1).any()
        assert tensor.storage_offset() * tensor.element_size() % arenas.ALIGNMENT == 0
    # Half a piece, a whole one, one of 5 KiB. The last tensor fitted in the first piece.
    assert arena.reserved == 4096 + 4096 + 5120
    assert made[-1].untyped_storage().data_ptr() == made[0].untyped_storage().data_ptr()
    values = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert torch.equal(arena.copy_of(values), values)
    arena.clear()
    assert arena.reserved == 0


@pytest.mark.parametrize("type_", [GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.F16])
def test_the_weights_of_a_model_take_little_more_than_their_bytes(type_: GGMLType) -> None:
    """Plan 7 billion weights, for which torch's own rounding would waste a fifth of a gigabyte or more."""
    d, ff, n_layer = 4096, 11008, 32
    scale = {GGMLType.F16: 0}.get(type_, 2)  # bytes for 32 weights
    tensors = [
        (n_rows, n_bytes)
        for n_rows, n_cols in ((d + 2048, d), (d, d), (ff, d), (ff, d), (ff, d), (1, 2 * d)) * n_layer
        for n_bytes in (row_bytes(type_, n_cols) - scale * n_cols // 32, scale * n_cols // 32)
    ]
    planned = sum(n_rows * n_bytes for n_rows, n_bytes in tensors)
    arena = Arena("meta", planned)
    for shape in tensors:
        arena.empty(shape, torch.uint8)
    assert arena.reserved - planned < 8 << 20


class Stream:
    """A stream of a device that computes nothing until a thread waits for it."""

    def __init__(self, device: object = None) -> None:
        self.log: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.log.append("waits")


def test_two_parts_are_there_at_a_time_on_one_stream_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    made = [0]

    class Event:
        def __init__(self) -> None:
            made[0] += 1
            self.name = made[0]

        def record(self, stream: Stream) -> None:
            log.append(f"record {self.name}")

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

    class Part:  # replaces a tensor
        def record_stream(self, stream: Stream) -> None:
            assert stream is compute

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        streams.add(id(stream))
        yield

    compute, streams = Stream(), set[int]()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    copies = CopyStream(torch.device("cuda", 0))
    for i in range(4):  # across layers: the same stream and the same two buffers

        def make(i: int = i) -> dict[str, Any]:
            log.append(f"copy {i}")
            return {"rows": Part()}

        copies.take(make)
        copies.used()
    assert log == [
        "copy 0", "record 1", "copy 1", "record 2", "wait 1", "copy 2", "record 3", "wait 2", "copy 3",
        "record 4",
    ]  # fmt: skip
    assert len(streams) == 1
    assert compute.log == ["waits"] * 4


def test_plan_reserves_torchs_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "find_device", lambda name: torch.device(name.replace("simulated", "cpu")))
    monkeypatch.setattr(planning, "free_bytes", lambda device: 8 << 30)
    on_cuda, stand_in = planning.limit_of("cuda:0", 5 << 20, 2.0), planning.limit_of("simulated", 0, 2.0)
    assert (on_cuda.limit, on_cuda.context) == (2 << 30, 5 << 20)
    assert 64 << 20 <= on_cuda.spare <= 96 << 20
    assert stand_in.spare == 0
    assert planning.limit_of("cuda:0", 0, None).spare == on_cuda.spare


def test_spare_bytes_count_as_workspace() -> None:
    facts, rng = model([layer(40), layer(40)]), np.random.default_rng(0)
    frequencies = [power_law(40, rng) for _ in range(2)]
    limit, spare = place_budget(facts, 0.5), 300_000
    plain = solve(facts, rates(), [Device("gpu", limit, 10_000)], frequencies)
    spared = solve(facts, rates(), [Device("gpu", limit + spare, 10_000, spare)], frequencies)
    assert plain.budget is not None
    assert spared.budget is not None
    (before,), (after,) = plain.budget.devices, spared.budget.devices
    assert after == replace(before, limit=limit + spare, workspace=before.workspace + spare)
    smallest = facts.smallest_bytes() + 10_000
    solve(facts, rates(), [Device("gpu", smallest + spare, 10_000, spare)], frequencies)
    with pytest.raises(OutOfMemoryError, match="the smallest budget that works"):
        solve(facts, rates(), [Device("gpu", smallest + spare - 1, 10_000, spare)], frequencies)
