"""Uploads of weights to a device while others are rearranged: results, refusals and failures."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_llama
from vulkan_runs import validated

from hotset import _core
from hotset.backends.vulkan.devices import find_device
from hotset.errors import DeviceError, FormatError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, row_bytes

__all__ = ["validated"]  # the fixture
T = GGMLType
OFFSET = 256
LOST = -4


def opened(*, staged: bool) -> Any:
    return _core.VulkanDevice(find_device("vulkan").index, True, staged)


def given(type_: GGMLType, n_cols: int, n_rows: int) -> dict[str, Any]:
    """Return a matrix of random bytes with every other row chosen."""
    shape = 1, n_rows, row_bytes(type_, n_cols)
    data = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    rows = np.arange(0, n_rows, 2, dtype=np.int32)
    return {"type": type_, "cols": n_cols, "data": data, "rows": rows, "n_threads": 2}


def room(device: Any, matrix: dict[str, Any]) -> tuple[Any, Any]:
    """Return the places for codes and the rest, from an offset on."""
    n_tiles = -(-len(matrix["rows"]) // 32)
    sizes = _core.vulkan_tile_bytes(matrix["type"], matrix["cols"])
    places = [
        (device.allocate(OFFSET + n_tiles * size, "device"), OFFSET) if size else None for size in sizes
    ]
    return places[0], places[1]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("type_", "n_cols", "n_rows"),
    [(T.Q6_K, 512, 90), (T.Q4_0, 4096, 17_000), (T.F32, 70_001, 130)],  # 1 slice, 3, and 3 of one tile each
)
def test_what_is_there(type_: GGMLType, n_cols: int, n_rows: int, staged: bool) -> None:
    device, matrix = opened(staged=staged), given(type_, n_cols, n_rows)
    places = room(device, matrix)
    _core.vulkan_upload(**matrix, codes=places[0], more=places[1])
    for wanted, place in zip(_core.vulkan_rearranged(**matrix), places, strict=True):
        if place is not None:
            assert np.array_equal(place[0].read(OFFSET, len(wanted)), wanted)
        else:
            assert not len(wanted)


def test_load_without_room_is_refused() -> None:
    device, matrix = opened(staged=False), given(T.Q4_1, 64, 70)
    codes, more = room(device, matrix)
    for wrong in (
        {"codes": (codes[0], OFFSET + 1)}, {"more": (more[0], OFFSET + 1)}, {"codes": (codes[0], 1 << 60)},
        {"more": None}, {"type": T.F16, "data": np.zeros((1, 70, 128), np.uint8)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"outside the buffer|exactly if the type needs it"):
            _core.vulkan_upload(**{**matrix, "codes": codes, "more": more, **wrong})


@pytest.mark.parametrize(
    "name",
    ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkMapMemory", "vkAllocateCommandBuffers",
     "vkBeginCommandBuffer", "vkEndCommandBuffer", "vkCreateFence", "vkQueueSubmit"],
)  # fmt: skip
def test_a_copy_that_fails(name: str) -> None:
    """Let the copy of a first slice fail, or of the third during the second; the next upload is complete."""
    matrix, said = given(T.Q4_0, 4096, 17_000), list[str]()
    wanted = _core.vulkan_rearranged(**matrix)[0]
    for n in (1, 2, 3):
        device = opened(staged=True)
        codes, more = room(device, matrix)
        _core.vulkan_fail(name, n, LOST)
        try:
            _core.vulkan_upload(**matrix, codes=codes, more=more)
        except DeviceError as raised:
            said.append(str(raised))
        _core.vulkan_fail("", 0, 0)
        _core.vulkan_upload(**matrix, codes=codes, more=more)
        assert np.array_equal(codes[0].read(OFFSET, len(wanted)), wanted)
        del device, codes, more
        gc.collect()
    assert len(said) >= 2
    assert all("the device was lost" in one for one in said)


def test_a_file_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    """Check that missing bytes become zeros, in whichever thread reads them.

    The loader's call of `check` at the end then raises an error.
    """
    path = write_llama(tmp_path / "m.gguf", n_layer=1, n_embd=256, n_ff=8192, head_dim=64)
    with open_gguf(path) as gguf:
        info = gguf.tensors["blk.0.ffn_up.weight"]
        data = gguf.data(info.name).reshape(1, info.shape[1], -1)
        rows = np.arange(info.shape[1], dtype=np.int32)
        matrix = {"type": info.type, "cols": info.shape[0], "data": data, "rows": rows, "n_threads": 2}
        device = opened(staged=False)
        codes, more = room(device, matrix)
        for is_there in (True, False):
            _core.vulkan_upload(**matrix, codes=codes, more=more)
            assert codes[0].read(OFFSET + 8192, 4096).any() == is_there
            os.truncate(path, info.offset // 4096 * 4096)
        with pytest.raises(FormatError, match="was cut short"):
            gguf.check()
