"""Times of dispatches: a table by operation, a trace file, and no cost if they are off."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, tokens
from tiny_gguf import write_llama
from vulkan_runs import stage_of, validated, vulkan

from hotset import _core
from hotset.backends.vulkan.budget import dispatches
from hotset.backends.vulkan.candidates import n_chunks
from hotset.backends.vulkan.kernels import Recorder
from hotset.backends.vulkan.timings import TRACE
from hotset.errors import DeviceError, OutOfMemoryError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

__all__ = ["validated"]  # the fixture
NO_MEMORY = -2
LONG = 300  # tokens of a prompt that is submitted layer by layer


@pytest.fixture
def gguf(tmp_path: Path) -> Iterator[GGUFFile]:
    with open_gguf(write_llama(tmp_path / "m.gguf", n_vocab=200)) as opened:
        yield opened


def test_every_dispatch_of_a_step_is_timed(gguf: GGUFFile) -> None:
    """Check steps with one and with many tokens; a prompt has more dispatches than one pool of timestamps."""
    backend = vulkan(gguf, max_batch=LONG)
    stage, one, many = stage_of(backend), batch([(tokens(1), 0, [0])]), batch([(tokens(LONG), 0, range(5))])
    plain = [backend.step(step).logits.copy() for step in (one, many)]
    assert backend.start_timing()
    for step, logits in zip((one, many), plain, strict=True):
        for _ in range(2):
            assert np.array_equal(backend.step(step).logits, logits)
    taken = backend.end_timing()
    assert [times.n_tokens for times in taken] == [1, LONG]
    assert taken[0].n_steps == 2
    assert 0 < taken[0].on_device < taken[0].on_host
    n = sum(operation.dispatches for operation in taken[0].operations)
    counted = dispatches(stage.graph, gguf.tensors)
    assert n == counted.total() - len(n_chunks(200)) + 1  # a copy of the logits, not their candidates
    assert 2 < taken[0].groups <= n
    named = {operation.operation: operation for operation in taken[0].operations if operation.weight_bytes}
    assert {"attn_q", "ffn_gate"} < set(named)
    assert all(operation.seconds >= 0 for operation in taken[0].operations)
    assert np.array_equal(backend.step(one).logits, plain[0])
    assert backend.end_timing() == []


OF_A_MIXTURE = {"attn_v": GGMLType.Q6_K, "ffn_down": GGMLType.Q6_K}


@pytest.mark.parametrize(
    ("type_of", "n_dispatches"),
    [
        (lambda _: GGMLType.Q4_0, 8),
        (lambda name: OF_A_MIXTURE.get(name.split(".")[-1], GGMLType.Q4_K), 9),  # v has another type than q
    ],
    ids=["Q4_0", "Q4_K and Q6_K"],
)
def test_a_dense_layer_has_few_dispatches(tmp_path: Path, type_of: Any, n_dispatches: int) -> None:
    """Count the dispatches of a layer for one token, and their groups, in a context of two splits."""
    found, sizes = [], {"n_embd": 256, "n_ff": 256, "head_dim": 64}
    for n_layer in (1, 2):
        path = write_llama(tmp_path / "m.gguf", n_layer=n_layer, type_of=type_of, **sizes)
        with open_gguf(path) as gguf:
            backend = vulkan(gguf, n_blocks=9)
            backend.start_timing()
            backend.step(batch([(tokens(1), 0, [0])]))
            [times] = backend.end_timing()
            found.append((sum(one.dispatches for one in times.operations), times.groups))
            backend.close()
    (one, of_one), (two, of_two) = found
    assert two - one == n_dispatches
    assert of_two - of_one == 8
    with open_gguf(write_llama(tmp_path / "m.gguf", n_layer=32, type_of=type_of, **sizes)) as gguf:
        counted = dispatches(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
    assert counted.total() <= 32 * n_dispatches + 6


def test_steps_without_timing_have_no_timestamps(gguf: GGUFFile) -> None:
    """Let each creation of a pool fail: only timed programs have one."""
    backend = vulkan(gguf)
    stage, step = stage_of(backend), batch([(tokens(1), 0, [0])])
    program = _core.VulkanProgram(stage.opened.device)
    program.finish()
    assert program.times().shape == (0, 2)
    _core.vulkan_fail("vkCreateQueryPool", 1, NO_MEMORY)
    try:
        expected = backend.step(step).logits.copy()
        backend.start_timing()
        with pytest.raises(OutOfMemoryError, match="ran out of memory while recording a step"):
            backend.step(step)
    finally:
        _core.vulkan_fail("", 0, 0)
    assert np.array_equal(backend.step(step).logits, expected)
    _core.vulkan_fail("vkGetQueryPoolResults", 1, NO_MEMORY)
    with pytest.raises(OutOfMemoryError, match="while reading the times of a step"):
        backend.step(step)
    assert np.array_equal(backend.step(step).logits, expected)


def test_a_program_that_never_ran_has_no_times(gguf: GGUFFile) -> None:
    stage = stage_of(vulkan(gguf))
    stage.start_timing()
    recorder, made = Recorder(stage.opened.kernels), stage.opened.device.allocate(3 * 4 << 16, "from_device")
    recorder.add("probe", [], [(made, 0, made.size, True)], (), (1, 1, 1))
    recorder.program.finish()
    with pytest.raises(ValueError, match="has not run"):
        recorder.program.times()


def test_a_trace_has_an_event_for_each_dispatch(tmp_path: Path) -> None:
    model, trace = write_llama(tmp_path / "m.gguf"), tmp_path / "trace.json"
    code = (
        f"import hotset\nwith hotset.load({str(model)!r}, device='vulkan', n_ctx=64) as model:\n"
        "    [model.logits([1, 2, 3]) for _ in range(2)]\n"
    )
    done = run(code, trace)
    assert done.returncode == 0, done.stderr
    head, *events = json.loads(trace.read_text())
    assert (head["ph"], head["name"]) == ("M", "process_name")
    assert {event["ph"] for event in events} == {"X"}
    assert all(
        before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in itertools.pairwise(events)
    )
    names = [event["name"] for event in events]
    assert names[: len(names) // 2] == names[len(names) // 2 :]
    assert {"blk.0.attn_q", "blk.1.attn"} < set(names)
    assert {event["args"]["tokens"] for event in events} == {3}
    assert {event["cat"] for event in events} > {"norm", "attention"}


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "m.gguf")
    done = run(f"import hotset; hotset.load({str(model)!r}, device='vulkan')", tmp_path / "no" / "trace.json")
    assert "HOTSET_VULKAN_TRACE=" in done.stderr
    assert "the file cannot be written: No such file" in done.stderr
    assert DeviceError.__name__ in done.stderr


def run(code: str, trace: Path) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = os.environ | {TRACE: str(trace)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
