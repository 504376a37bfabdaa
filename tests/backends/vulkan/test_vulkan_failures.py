"""Faults of a Vulkan driver: failing calls, lost devices, odd kinds of memory, damaged files of its compiler.

Nothing stays open (the fixture `validated`), and no thread waits forever.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_are
from tiny_gguf import write_llama
from tiny_server import MESSAGES, client_of, write_model
from vulkan_runs import stage_of, validated, vulkan
from waiting import WATCHDOG

from hotset import _core
from hotset.backends.vulkan import pipelines
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.kernels import VulkanKernels
from hotset.errors import DeviceError, OutOfMemoryError
from hotset.formats.gguf import open_gguf

__all__ = ["validated"]  # the fixture
NO_HOST_MEMORY, NO_MEMORY, INITIALISATION, LOST = -1, -2, -3, -4
OPENING = (
    "vkCreateDevice", "vkCreateCommandPool", "vkCreatePipelineCache", "vkCreateBuffer", "vkAllocateMemory",
    "vkBindBufferMemory", "vkMapMemory",
)  # fmt: skip
COMPUTING = (
    "vkCreateDescriptorSetLayout", "vkCreatePipelineLayout", "vkCreateShaderModule",
    "vkCreateComputePipelines", "vkCreateDescriptorPool", "vkAllocateDescriptorSets",
    "vkAllocateCommandBuffers", "vkBeginCommandBuffer", "vkEndCommandBuffer", "vkCreateFence",
    "vkQueueSubmit", "vkWaitForFences",
)  # fmt: skip


# -- failing calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick_are(OPENING[:3], OPENING))
def test_a_device_that_does_not_open(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each call of a kind fail in turn, until none is left. A failed device keeps no memory."""
    ids, said, opened = tokens(9), list[str](), list[_core.VulkanDevice]()

    def open_device(*given: Any, **named: Any) -> _core.VulkanDevice:
        opened.append(pipelines.open_device(*given, **named))
        return opened[-1]

    monkeypatch.setattr("hotset.backends.vulkan.opening.open_device", open_device)
    with open_gguf(write_llama(tmp_path / "m.gguf", n_layer=1)) as gguf:
        for n in (1, 2, 3, 5, 8):
            _core.vulkan_fail(name, n, NO_MEMORY)
            gc.disable()
            backend: Any = None
            try:
                backend = vulkan(gguf)
            except OutOfMemoryError as raised:
                said.append(str(raised))
            finally:
                _core.vulkan_fail("", 0, 0)
            is_freed = not any(device.allocated for device in opened)
            gc.enable()
            if backend is None:
                assert is_freed
                continue
            assert logits_of(backend, ids, [], [0]).shape == (9, 96)
            backend.close()
            gc.collect()
        # Memory that the host sees is requested twice, and a pipeline cache is optional.
        assert all("ran out of memory while" in one for one in said)
        assert said or name in ("vkAllocateMemory", "vkCreatePipelineCache")


@pytest.mark.parametrize("name", quick_are(COMPUTING[:3], COMPUTING))
def test_a_step_that_fails(tmp_path: Path, name: str) -> None:
    """Check that the error names the failed call, and that the next step is bitwise right."""
    ids, said = tokens(9), list[str]()
    with open_gguf(write_llama(tmp_path / "m.gguf", n_layer=1)) as gguf:
        expected = logits_of(vulkan(gguf), ids, [8], [0])
        for n in (1, 2, 4):
            backend = vulkan(gguf)
            _core.vulkan_fail(name, n, LOST)
            try:
                for _ in range(4):  # the n-th call of this kind is in one of these steps
                    logits_of(backend, ids, [8], [0])
            except DeviceError as raised:
                said.append(str(raised))
            _core.vulkan_fail("", 0, 0)
            assert np.array_equal(logits_of(backend, ids, [8], [0]), expected)
            backend.close()
            gc.collect()
        assert said or name not in ("vkQueueSubmit", "vkWaitForFences", "vkCreateFence")
        assert all("the device was lost" in one and "leave `device` out" in one for one in said)


def test_a_kernel_that_is_not_made_leaves_nothing() -> None:
    """Let the creation of each object of a kernel fail: earlier objects are freed."""
    info = find_device("vulkan")
    for name in COMPUTING[:4]:
        device = pipelines.open_device(info)
        _core.vulkan_fail(name, 1, NO_HOST_MEMORY)
        with pytest.raises(OutOfMemoryError, match="the machine ran out of memory while compiling a kernel"):
            VulkanKernels(device).get("select", [])
        VulkanKernels(device).get("select", [])
        del device


@pytest.mark.parametrize("name", ["vkCreateInstance", "vkCreateDebugUtilsMessengerEXT"])
def test_an_instance_that_does_not_start(name: str) -> None:
    """Check that a failed instance is removed, and that the next attempt can work."""
    code = (
        "import hotset._core as c\n"
        f"c.vulkan_fail('{name}', 1, {INITIALISATION})\n"
        "try: c.vulkan_devices(True)\n"
        "except Exception as error: print(error)\n"
        "print(len(c.vulkan_devices(True)) > 0)"
    )
    said, found = _python(code)
    assert "it could not be initialised" in said
    assert found == "True"


def _python(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WATCHDOG, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# -- a server --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "result"), [("vkQueueSubmit", NO_MEMORY), ("vkWaitForFences", LOST), ("vkQueueSubmit", LOST)]
)
async def test_every_request_is_answered(tmp_path: Path, name: str, result: int) -> None:
    """Check that the requests of the failed step get an error, and the others their text."""

    async def ask(client: httpx.AsyncClient, seed: int) -> httpx.Response:
        body = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "seed": seed}
        return await client.post("/v1/chat/completions", json=body)

    load = {"device": "vulkan", "n_ctx": 128, "max_batch": 32, "max_sequences": 2}
    async with client_of(write_model(tmp_path / "model.gguf"), load=load) as (client, service):
        del service
        first = await ask(client, 0)
        assert first.status_code == 200
        text = first.json()["choices"][0]["message"]["content"]
        _core.vulkan_fail(name, 4, result)
        replies = await asyncio.gather(*(ask(client, i) for i in range(8)))
        failed = [one for one in replies if one.status_code != 200]
        assert 0 < len(failed) < 8
        for one in failed:
            assert one.status_code >= 500
            assert "Vulkan" in one.json()["error"]["message"]
        for one in replies:
            if one.status_code == 200:
                assert one.json()["choices"][0]["message"]["content"] == text
        assert (await ask(client, 9)).json()["choices"][0]["message"]["content"] == text


@pytest.mark.slow
async def test_a_thousand_requests_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the memory of the device and of this process after 200 and after 1,000 requests."""
    import psutil

    monkeypatch.delenv("HOTSET_VULKAN_VALIDATION")

    load = {"device": "vulkan", "n_ctx": 256, "max_batch": 64}
    async with client_of(write_model(tmp_path / "model.gguf"), load=load) as (client, service):
        stage = stage_of(service.model.backend)  # type: ignore[arg-type]
        process, held = psutil.Process(), []
        for n in range(1, 1001):
            body = {
                "messages": [{"role": "user", "content": f"{n} hello " * (n % 5 + 1)}],
                "max_tokens": n % 7 + 1,
                "seed": n,
            }
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            if n % 200 == 0:
                gc.collect()
                held.append((stage.opened.device.allocated, process.memory_info().rss))
        assert len({device for device, _ in held}) == 1
        assert held[-1][1] - held[0][1] < 32 << 20
        print([(device, rss >> 20) for device, rss in held])


# -- memory of a discrete card ---------------------------------------------------------------------

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
HOST = VISIBLE | COHERENT
GIB = 1 << 30
DISCRETE = ([(24 * GIB, 1), (64 * GIB, 0)], [(0, LOCAL), (1, HOST), (1, HOST | CACHED)])
WINDOW = (
    [(24 * GIB, 1), (64 * GIB, 0), (GIB >> 2, 1)],
    [(2, LOCAL | HOST), (0, LOCAL), (1, HOST), (1, HOST | CACHED)],
)
RESIZABLE = ([(24 * GIB, 1), (64 * GIB, 0)], [(1, HOST), (0, LOCAL), (0, LOCAL | HOST), (1, HOST | CACHED)])
INTEGRATED = ([(32 * GIB, 1)], [(0, LOCAL), (0, LOCAL | HOST), (0, LOCAL | HOST | CACHED)])


@pytest.mark.parametrize(
    ("memory", "device", "to_device", "from_device", "staging"),
    [
        (DISCRETE, 0, 1, 2, 1),
        (WINDOW, 1, 0, 3, 0),  # both see 256 MiB: for the numbers of a step, not for weights
        (RESIZABLE, 2, 2, 3, 0),  # weights are written directly
        (INTEGRATED, 1, 1, 2, 1),
    ],
    ids=["discrete", "window", "resizable BAR", "integrated"],
)
def test_memory_of_other_devices(
    memory: Any, device: int, to_device: int, from_device: int, staging: int
) -> None:
    heaps, types = memory
    allowed = (1 << len(types)) - 1
    places = {"device": device, "to_device": to_device, "from_device": from_device, "staging": staging}
    for place, expected in places.items():
        assert _core.vulkan_memory_type(heaps, types, allowed, place) == expected, place
    only_host = sum(1 << i for i, (_, flags) in enumerate(types) if not flags & LOCAL)
    if only_host:  # memory types that a buffer does not allow are not chosen
        assert types[_core.vulkan_memory_type(heaps, types, only_host, "device") or 0][1] & HOST
    assert _core.vulkan_memory_type(heaps, types, 0, "device") is None
    with pytest.raises(ValueError, match="names no heap"):
        _core.vulkan_memory_type(heaps[:1], [(5, LOCAL)], 1, "device")


def test_full_window_does_not_end_the_answer(tmp_path: Path) -> None:
    """Check that the host's own memory is used if its window on the device's memory is full."""
    device = pipelines.open_device(find_device("vulkan"))
    _core.vulkan_fail("vkAllocateMemory", 1, NO_MEMORY)
    buffer = device.allocate(4096, "to_device")
    buffer.view()[:] = 7
    assert (buffer.read(0, 4096) == 7).all()
    _core.vulkan_fail("vkAllocateMemory", 1, NO_MEMORY)
    with pytest.raises(OutOfMemoryError, match="ran out of memory while allocating 1 MiB"):
        device.allocate(1 << 20, "device")


# -- kernels on disk -------------------------------------------------------------------------------


def test_kernels_are_kept(tmp_path: Path) -> None:
    info = find_device("vulkan")
    with open_gguf(write_llama(tmp_path / "m.gguf", n_layer=1)) as gguf:
        backend = vulkan(gguf)
        backend.step(batch([(tokens(1), 0, [0])]))
        assert stage_of(backend).opened.device.is_cache_of(stage_of(backend).opened.device.compiled())
        backend.close()
    path = pipelines.path_of(info)
    assert path.is_relative_to(tmp_path / "home")
    assert os.listdir(path.parent) == [path.name]
    assert pipelines.read(info)
    assert pipelines.path_of(info) != pipelines.path_of(replace(info, driver="9.9"))


def _changed(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


def test_damaged_entries_are_skipped(tmp_path: Path) -> None:
    """Check that the driver gets only complete data with its own header. The file is then written again."""
    info = find_device("vulkan")
    device = pipelines.open_device(info)
    good = device.compiled()
    assert device.is_cache_of(good)
    headers = {
        "short": good[:31], "empty": b"", "length": _changed(good, 0, b"\xff\xff\xff\xff"),
        "no length": _changed(good, 0, bytes(4)), "version": _changed(good, 4, b"\2\0\0\0"),
        "vendor": _changed(good, 8, b"\1\2\3\4"), "device": _changed(good, 12, b"\1\2\3\4"),
        "compiler": _changed(good, 16, b"other compiler!!"),
    }  # fmt: skip
    assert not any(map(device.is_cache_of, headers.values()))
    path = pipelines.path_of(info)
    path.parent.mkdir(parents=True)
    for damaged in headers.values():
        path.write_bytes(b"hotsetVK" + hashlib.sha256(damaged).digest() + damaged)
        again = _core.VulkanDevice(info.index, True, False, pipelines.read(info))
        pipelines.keep(info, again)
        assert pipelines.read(info) == good
    whole = path.read_bytes()
    for torn in (
        whole[:-1],
        whole[:20],
        whole + b"x",
        b"",
        _changed(whole, 10, b"x"),
        b"other..." + whole[8:],
    ):
        path.write_bytes(torn)
        assert pipelines.read(info) == b""
    path.write_bytes(b"hotsetVK" + bytes(pipelines.MOST_BYTES))
    assert pipelines.read(info) == b""
    pipelines.keep(info, device)
    assert pipelines.read(info) == good
    path.unlink()
    path.mkdir()
    assert pipelines.read(info) == b""
    pipelines.keep(info, device)  # a folder in the file's place causes no error
    assert path.is_dir()
    del again
