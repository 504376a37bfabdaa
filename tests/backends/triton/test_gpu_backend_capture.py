"""Features of GPUs, tested without one: captured steps, memory that runs out, missing devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from backend_runs import assert_close, batch, logits_of, tokens
from gpu_runs import N_LAYER, Recorder, Recording, gpu, masks, run, split, write
from sparse_runs import prepared

from hotset.backends.base import LOGIT_GROUP
from hotset.backends.reference import ReferenceBackend
from hotset.backends.triton import devices
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.kv import StepInputs
from hotset.backends.triton.weights import DeviceWeights
from hotset.errors import DeviceError, OutOfMemoryError
from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType


@pytest.mark.parametrize("model", ["bamboo", "opt", "falcon-40b"])
def test_captured_steps_read_only_fixed_addresses(tmp_path: Path, model: str) -> None:
    ready, graph = prepared(write(tmp_path, model), "predicted")
    recorder = Recorder()
    captured = gpu(ready.weights, graph, capture=recorder)
    plain = gpu(ready.weights, graph)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 96, (3, 90)).astype(np.int32)
    blocks = [[4, 1], [0, 7], [2, 6]]
    for backend in (captured, plain):
        backend.step(batch([(ids[i, :60], 0, blocks[i]) for i in range(1)]))
        backend.step(batch([(ids[i, :20], 0, blocks[i]) for i in range(1, 3)]))
    places = [60, 20, 20]
    for step in range(16):
        who = [[0], [0, 1, 2], [2, 1], [1, 2, 0]][step % 4]  # enters a KV block, changes rows of tables
        parts = [(ids[i, places[i] : places[i] + 1], places[i], blocks[i]) for i in who]
        for i in who:
            places[i] += 1
        found, expected = captured.step(batch(parts)), plain.step(batch(parts))
        assert_close(found.logits, expected.logits)
        ours, theirs = captured.stats(), plain.stats()
        assert ours is not None
        assert theirs is not None
        np.testing.assert_array_equal(ours.active, theirs.active)
    assert [recording.n_replays for recording in recorder.made] == [3, 7, 3]  # 1, 3 and 2 tokens


def test_captured_steps_give_the_outputs_that_are_wanted(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    recorder = Recorder()
    captured = gpu(ready.weights, graph, capture=recorder)
    expected = logits_of(ReferenceBackend(ready.weights, graph, n_blocks=1), tokens(4), [], [0])
    whole = batch([(tokens(4), 0, [0])])
    for wanted in ([0, 1, 2, 3], [1, 3], [2], []):
        part = type(whole)(
            whole.tokens, whole.positions, whole.sequences, whole.block_tables, np.array(wanted, np.int32)
        )
        found = captured.step(part).logits
        assert found.shape == (len(wanted), 96)
        if wanted:
            assert_close(found, expected[wanted])
    assert recorder.made[0].n_replays == 3


def test_a_captured_step_does_not_read_the_outputs_of_the_step_before(tmp_path: Path) -> None:
    """Check a captured step after a step with more output rows: it computes a row for each of its tokens."""
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    recorder = Recorder()
    captured, plain = gpu(ready.weights, graph, capture=recorder), gpu(ready.weights, graph)
    short, long = batch([(tokens(3), 0, [0])]), batch([(tokens(40), 0, [1])])
    some = replace(short, outputs=np.array([1], np.int32))
    last = replace(long, outputs=np.arange(37, 40, dtype=np.int32))
    for step in (short, last, some, long, some):
        assert_close(captured.step(step).logits, plain.step(step).logits)
    assert recorder.made[0].n_replays == 2


def test_a_split_layer_is_captured_with_its_round_trip(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo"), "predicted")
    ids, recorder = tokens(20), Recorder()
    splits = [*range(6, 20)]
    expected = logits_of(gpu(ready.weights, graph), ids, splits, [2, 0])
    stage, cold = split(ready.weights, graph, masks(0.3), capture=recorder)
    assert_close(run(stage, ids, splits), expected)
    assert recorder.made[0].n_replays == 0  # the prompt of six
    assert recorder.made[1].n_replays == len(splits) - 1
    assert cold.n_posts > N_LAYER * len(splits)


class FakeGraphs:
    """torch's graphs and streams without CUDA. log: the calls. fails: whether a capture fails."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pools: set[int] = set()
        self.streams: list[object] = []
        self.current: object = None
        self.fails = False
        patch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "Stream", lambda device: object())
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "synchronize", lambda device: self.log.append("synchronize"))
        patch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("empty"))
        patch.setattr(Kernels, "capturable", True)

    @contextmanager
    def _on(self, stream: object) -> Iterator[None]:
        self.streams.append(stream)
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert self.current is not None
        assert capture_error_mode == "thread_local"
        self.pools.add(id(pool))
        self.log.append("begin")

    def capture_end(self) -> None:
        self.log.append("end")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture\nand more")

    def replay(self) -> None:
        self.log.append("replay")


def test_cuda_graphs_share_a_stream_and_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check torch's recording with its CUDA parts replaced: the calls, and the use of its results."""
    cuda = FakeGraphs(monkeypatch)
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    backend = gpu(ready.weights, graph)
    for n in (1, 2, 8, 9):
        step = batch([(tokens(n), 0, [0])])
        expected = backend.step(step).logits.copy()
        np.testing.assert_array_equal(backend.step(step).logits, expected)
    assert cuda.log == ["synchronize", "begin", "end", "replay"] * 3  # the allocator keeps its memory
    assert len(cuda.pools) == len({id(stream) for stream in cuda.streams}) == 1
    assert not backend.notes


@pytest.mark.parametrize("where", ["a call", "the end"])
def test_stage_continues_without_captures_after_a_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    cuda = FakeGraphs(monkeypatch)
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    kernels = Kernels("cpu", triton=False)
    expected = gpu(ready.weights, graph, capture=Recorder()).step(batch([(tokens(3), 0, [0])])).logits
    backend = gpu(ready.weights, graph, kernels=kernels)
    backend.step(batch([(tokens(1), 0, [0])]))
    attention = kernels.attention

    def forbidden(*arguments: Any, **options: Any) -> torch.Tensor:
        if cuda.current is not None:
            raise torch.OutOfMemoryError("operation not permitted when stream is capturing\nand more")
        return attention(*arguments, **options)

    if where == "a call":
        kernels.attention = forbidden  # type: ignore[method-assign]
    else:
        cuda.fails = True
    for _ in range(2):  # a failed capture is not repeated
        np.testing.assert_array_equal(backend.step(batch([(tokens(3), 0, [0])])).logits, expected)
        assert cuda.current is None
    assert cuda.log.count("begin") == 2
    assert cuda.log[-1] == "synchronize"  # clears the error
    (note,) = backend.notes
    assert note.startswith("cpu: steps of 3 tokens cannot be captured, and are launched one kernel after")
    assert note.endswith(
        "(operation not permitted when stream is capturing)"
        if where == "a call"
        else "(operation failed due to a previous error during capture)"
    )
    backend.step(batch([(tokens(1), 0, [0])]))
    assert cuda.log[-1] == "replay"  # earlier captures stay


def test_the_step_before_a_capture_has_the_shapes_of_the_capture(tmp_path: Path) -> None:
    """Check that a capture does not load a kernel for other shapes: loading is forbidden in a capture."""
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    kernels, seen = Kernels("cpu", triton=False), list[list[Any]]()

    def noted(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        seen[-1].append((call, [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
        return call(*args, **options)

    for name in ("linear", "rms_norm", "attention", "rotate_store", "sparse_ffn"):
        setattr(kernels, name, partial(noted, vars(kernels)[name]))

    def capture(function: Callable[[], torch.Tensor]) -> tuple[Recording, torch.Tensor]:
        seen.append([])
        recording = Recording(function)
        return recording, recording.result

    backend = gpu(ready.weights, graph, kernels=kernels, capture=capture)
    whole = batch([(tokens(5), 0, [0])])
    for wanted in ([4], []):
        seen[:] = [[]]
        found = backend.step(replace(whole, outputs=np.array(wanted, np.int32))).logits
        assert found.shape == (len(wanted), 96)
        if wanted:
            assert seen[0] == seen[1]
        whole = batch([(tokens(6), 0, [0])])


class LateCopies:
    """A replacement of kv.Copies: a late stream that copies only when a thread waits for it."""

    def __init__(self) -> None:
        self._queued: list[Callable[[], object]] = []
        self._ended = 0

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._queued.append(lambda: to.copy_(source))

    def then(self, work: Callable[[], object]) -> None:
        self._queued.append(work)

    def end(self) -> None:
        self._ended = len(self._queued)

    def wait(self) -> None:
        for work in self._queued[: self._ended]:
            work()
        del self._queued[: self._ended]


def test_numbers_of_a_step_are_not_overwritten_before_they_are_copied() -> None:
    """Run three chunks of a prompt without a wait of the host: each must see its own numbers."""
    copies = LateCopies()
    inputs = StepInputs(8, 4, {0: 16}, torch.device("cpu"), copies)  # type: ignore[arg-type]
    seen: list[tuple[list[int], list[int], float]] = []

    def step() -> None:  # the device's work after the copies
        seen.append(
            (
                inputs.positions[:3].tolist(),
                inputs.block_tables[0, :1].tolist(),
                inputs.vectors[0][0, 0].item(),
            )
        )

    for i in range(3):
        rows = np.full((3, 16), i, np.float32)
        inputs.fill(batch([(tokens(3), 3 * i, [i])]), {0: rows})
        copies.then(step)
    copies.end()
    copies.wait()
    assert seen == [([3 * i, 3 * i + 1, 3 * i + 2], [i], float(i)) for i in range(3)]


def test_block_tables_are_copied_when_they_change() -> None:
    copies = LateCopies()
    inputs = StepInputs(8, 4, {0: 16}, torch.device("cpu"), copies)  # type: ignore[arg-type]

    def filled(*parts: tuple[np.ndarray, int, list[int]]) -> int:
        """Return how many copies a step makes."""
        inputs.fill(batch(list(parts)), {0: np.ones((sum(len(ids) for ids, _, _ in parts), 16), np.float32)})
        n = len(copies._queued)
        copies.wait()
        return n

    one, two = (tokens(1), 3, [2, -1]), (tokens(2), 70, [1, 3])
    assert [filled(one) for _ in range(2)] == [2, 1]
    assert [filled(one, two), filled(one, two), filled(one), filled(two, one)] == [2, 1, 1, 2]
    assert inputs.sequences[:3].tolist() == [0, 0, 1]
    assert inputs.positions[:3].tolist() == [70, 71, 3]
    assert inputs.block_tables[:2, :2].tolist() == [[1, 3], [2, -1]]
    assert filled((tokens(1), 64, [2, 5])) == 2
    assert inputs.block_tables[0, :2].tolist() == [2, 5]


def test_the_largest_logits_of_groups_come_with_the_logits(tmp_path: Path) -> None:
    n_vocab = 2 * LOGIT_GROUP
    ready, graph = prepared(write(tmp_path, "bamboo", n_vocab=n_vocab), "exact")
    recorder = Recorder()
    backend = gpu(ready.weights, graph, capture=recorder)
    for step in range(3):  # plain, recorded, replayed
        found = backend.step(batch([(tokens(1, seed=step), step, [0])]))
        assert found.largest is not None
        expected = found.logits.reshape(1, -1, LOGIT_GROUP).max(axis=2)
        np.testing.assert_array_equal(found.largest, expected)
    assert recorder.made[0].n_replays == 2
    assert backend.step(batch([(tokens(20), 3, [0])])).largest is None  # too many rows for this


def test_taps_and_long_steps_are_not_captured(tmp_path: Path) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    recorder = Recorder()
    backend = gpu(ready.weights, graph, capture=recorder)
    backend.step(batch([(tokens(20), 0, [0])]))
    backend.step(batch([(tokens(1), 20, [0])], ("blk.0.out",)))
    backend.stage.timed = True
    backend.step(batch([(tokens(1), 20, [0])]))
    assert not recorder.made
    seconds = backend.stage.seconds()
    assert seconds[:, 1:3].min() > 0  # of every layer's FFN and attention
    assert seconds[0, 3] > 0


@pytest.mark.parametrize("split_layers", [False, True])
def test_warming_up_leaves_no_trace(tmp_path: Path, split_layers: bool) -> None:
    ready, graph = prepared(write(tmp_path, "opt"), "exact")
    ids = tokens(20)
    options = {"stream_from": 16, "stream_bytes": 3000}
    stage, _ = split(ready.weights, graph, masks(0.3 if split_layers else 1.0), **options)
    expected = run(stage, ids, [15])
    stage, _ = split(ready.weights, graph, masks(0.3 if split_layers else 1.0), **options)
    stage.run(batch([(ids[:9], 0, [2, 0])]))
    stage.warm_up()
    found = run(stage, ids[9:], [6, 10], at=9)
    assert_close(found, expected[9:])


def test_out_of_memory_gives_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, graph = prepared(write(tmp_path, "bamboo"), "exact")
    kernels = Kernels("cpu", triton=False)
    backend = gpu(ready.weights, graph, kernels=kernels)
    expected = backend.step(batch([(tokens(9), 0, [0])])).logits.copy()
    attention = backend.stage.kernels.attention

    def exhausted(*arguments: Any, **options: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    kernels.attention = exhausted  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError, match=r"cpu ran out of memory while computing 9 tokens; load .*"):
        backend.step(batch([(tokens(9), 0, [0])]))
    kernels.attention = attention  # type: ignore[method-assign]
    np.testing.assert_array_equal(backend.step(batch([(tokens(9), 0, [0])])).logits, expected)

    monkeypatch.setattr("hotset.backends.triton.backend.free_bytes", lambda device: 100_000)
    with pytest.raises(OutOfMemoryError, match=r"needs .* on cpu, .* and 97.7 KiB are free; share it"):
        gpu(ready.weights, graph, needed=100_001)


def test_vectors_are_on_the_device_once() -> None:
    values = np.arange(6, dtype=np.float32)
    info = TensorInfo("norm", (6,), GGMLType.F32, values.nbytes, 0)
    source = SimpleNamespace(tensors={"norm": info}, data=lambda name: values.view(np.uint8))
    weights = DeviceWeights(source, torch.device("cpu"))
    whole = weights.vector("norm")
    assert weights.vector("norm") is weights.bias("norm") is whole
    part = weights.vector("norm", 2, 3)
    assert part.tolist() == [2, 3, 4]
    assert weights.vector("norm", 2, 3) is part
    assert weights.nbytes == 4 * (6 + 3)
    assert weights.bias(None) is None


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(DeviceError, match="is built without cuda; install the build for it"):
        devices.find_device("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no cuda device; check its driver"):
        devices.find_device("cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    assert devices.find_device("cuda:1") == torch.device("cuda", 1)
    assert devices.find_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(DeviceError, match="cuda:2 is not there: PyTorch finds 2"):
        devices.find_device("cuda:2")


def test_a_device_that_triton_does_not_compile_for_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HOTSET_TRITON", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(7, 5), (8, 0), (12, 1)][index])
    with pytest.raises(
        DeviceError, match=r"cuda:0 has compute capability 7\.5, .* need 8\.0; use device='cpu'"
    ):
        devices.find_device("cuda:0")
    for index in (1, 2):
        assert devices.find_device(f"cuda:{index}") == torch.device("cuda", index)
    monkeypatch.setenv("HOTSET_TRITON", "0")
    assert devices.find_device("cuda:0") == torch.device("cuda", 0)
    monkeypatch.delenv("HOTSET_TRITON")
    monkeypatch.setattr(torch.version, "hip", "6.2")  # AMD has other version numbers
    assert devices.find_device("cuda:0") == torch.device("cuda", 0)


def python(code: str, **environment: str) -> str:
    """Return the standard output of a fresh interpreter."""
    here = str(Path(__file__).parent)
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": here, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def test_missing_torch_names_the_package() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hotset.backends.triton import open_gpu\n"
        "from hotset.errors import DeviceError\n"
        "try: open_gpu(None, None, 'cuda', None)\n"
        "except DeviceError as error: print(error)\n"
    )
    assert "pip install '.[gpu]'" in python(code)


def test_nothing_of_torch_is_imported_before_a_gpu_is_opened() -> None:
    code = "import sys, hotset.backends.triton, hotset.backends.triton.devices; print('torch' in sys.modules)"
    assert python(code).strip() == "False"
