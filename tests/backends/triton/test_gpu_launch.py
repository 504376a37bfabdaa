"""Rules of Triton's launcher on a device, checked without one for every launch of whole steps."""

from __future__ import annotations

import ast
import shutil
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import threshold_models

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from backend_runs import batch, logits_of, tokens  # noqa: E402
from expert_models import model  # noqa: E402
from fake_cuda import Runtime  # noqa: E402
from gpu_inputs import new, weights  # noqa: E402
from gpu_runs import Recorder, gpu, masks, run, split, write  # noqa: E402
from hybrid_runs import EVEN, LINK_ONLY, SMALL, hybrid  # noqa: E402
from sparse_runs import prepared  # noqa: E402
from threshold_models import EVERY, graph_of  # noqa: E402
from threshold_models import run as run_thresholded  # noqa: E402
from tiny_gguf import write_relu  # noqa: E402

from hotset.backends.base import LOGIT_GROUP  # noqa: E402
from hotset.backends.triton import experts_kernel, fallback, launch, spin_kernel, triton_kernels  # noqa: E402
from hotset.backends.triton import stage as stages  # noqa: E402
from hotset.backends.triton.cpu_offload import CudaDriver  # noqa: E402
from hotset.backends.triton.fallback import ANGLE_STEP, N_COUNTS, RopeTable, TokenThreshold  # noqa: E402
from hotset.backends.triton.kernels import Kernels  # noqa: E402
from hotset.backends.triton.matrix import DeviceMatrix  # noqa: E402
from hotset.errors import DeviceError  # noqa: E402
from hotset.formats.gguf import open_gguf  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.model.decoder import describe  # noqa: E402
from hotset.model.graph import thresholded_products  # noqa: E402
from hotset.model.operations import Activate, Value  # noqa: E402
from hotset.offload.misses import Fetching  # noqa: E402

OF_EXPERTS = ("experts", "choose_experts", "fetch_experts", "route", "sum_experts")
OF_STEPS = (
    "zero_small", "angles", "linear", "linear_normed", "project_heads", "linear_bits", "linear_t", "neurons",
    "fired", "gated", "sparse_ffn", "pack_bits", "rms_norm", "layer_norm", "gaussian_top_k", "rotate",
    "store_kv", "rotate_store", "attention", "largest",
)  # fmt: skip


@pytest.mark.parametrize("number", [np.float32(1), np.int64(1), np.float64(1), np.bool_(True), np.uint8(1)])
def test_numbers_of_numpy_are_refused_by_name(number: np.generic) -> None:
    kernel = SimpleNamespace(arg_names=("x", "threshold"), __name__="_some_kernel")
    x = torch.zeros(1)
    launch.check(kernel, (1, 2), (x, number.item()), {"W": 4, "KIND": None, "PRECISION": "ieee"})
    what = f"of _some_kernel is a numpy.{type(number).__name__}"
    for name, grid, args, constants in (
        ("threshold", (1,), (x, number), {}), ("W", (1,), (x, 1), {"W": number}),
        ("grid[1]", (1, number), (x, 1), {}),
    ):  # fmt: skip
        with pytest.raises(AssertionError) as error:
            launch.check(kernel, grid, args, constants)  # type: ignore[arg-type]
        assert str(error.value).startswith(f"{name} {what}")


def test_a_grid_that_no_device_has_is_refused_by_name() -> None:
    kernel = SimpleNamespace(arg_names=("x",), __name__="_some_kernel")
    launch.check(kernel, (1 << 20, launch.MOST_PROGRAMS, 1), (1,), {})
    for grid in ((1, 1 + launch.MOST_PROGRAMS), (1, 1, 1 + launch.MOST_PROGRAMS)):
        with pytest.raises(AssertionError, match="the grid of _some_kernel"):
            launch.check(kernel, grid, (1,), {})


def every_kernel() -> dict[str, Any]:
    return {
        name: value
        for module in (triton_kernels, experts_kernel, spin_kernel)
        for name, value in vars(module).items()
        if name.endswith("_kernel") and hasattr(value, "arg_names")
    }


def test_every_kernel_waits_for_the_launch_before_it() -> None:
    """Check that every kernel waits, whatever it does: later launches may rely on it for earlier ones."""
    for name, kernel in every_kernel().items():
        (function,) = ast.parse(textwrap.dedent(kernel.src)).body
        assert isinstance(function, ast.FunctionDef)
        first = function.body[ast.get_docstring(function) is not None]
        assert ast.unparse(first) == "await_launches()", name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[tuple[Any, ...]]]:
    """Return the kernels whose launches were checked, with the variants of each.

    Each operation of a step is checked but not launched. Its fallback computes it, for the next operation.
    """
    seen: dict[str, set[tuple[Any, ...]]] = {}

    def check_alone(
        kernel: Any, grid: tuple[int, ...], *args: Any, warps: int, fused: bool = True,
        stages: int | None = None, at_once: bool = False, **constants: Any,
    ) -> None:  # fmt: skip
        launch.check(kernel, grid, args, constants)
        options = {"warps": warps, "fused": fused, "stages": stages, **constants}
        seen.setdefault(kernel.__name__, set()).add(launch.variant(kernel, args, options))

    def both(module: Any, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if not options.get("neuron_major"):  # a device has no such experts
                result = getattr(module, name)(*args, **options)
            value = getattr(fallback, name)(*args, **options)
            if name == "linear_normed" and isinstance(result[1], fallback.Weighed):
                out, squares = value[0], torch.zeros_like(result[1].squares)
                squares[:, 0] = (out**2).sum(dim=1)
                return out, fallback.Weighed(out * args[4], squares, args[5])
            return value

        return call

    made = Kernels.__init__

    def init(self: Kernels, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        for module, names in ((triton_kernels, OF_STEPS), (experts_kernel, OF_EXPERTS)):
            for name in names:
                setattr(self, name, both(module, name))

    monkeypatch.setattr(launch, "launch", check_alone)
    monkeypatch.setattr(Kernels, "__init__", init)
    return seen


@contextmanager
def fused(folder: Path, **given: Any) -> Iterator[Any]:
    """Yield a dense SiLU model with enough rows to fuse products with norms, heads and activations."""
    keys = {"llama.hidden_activation": "silu"}
    file = open_gguf(write_relu(folder / "silu.gguf", dialect="gguf", keys=keys, type_of=lambda name: T.Q4_0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "MATVEC_PROGRAMS", 1)
        yield gpu(file, describe(config_from_gguf(file), file.tensors), **given)


def test_every_launch_has_pythons_numbers(tmp_path: Path, launched: dict[str, set[Any]]) -> None:
    """Check that numbers from files, plans and shapes are Python's: no launch gets a NumPy number."""
    ids, splits = tokens(50), [33, 43, 44, 46]
    for name, mode, predictor in (
        ("bamboo", "exact", None), ("bamboo", "predicted", None), ("opt", "predicted", "svd:32"),
        ("falcon-40b", "predicted", None),
    ):  # fmt: skip
        folder = tmp_path / f"{name}-{mode}"
        folder.mkdir()
        ready, graph = prepared(write(folder, name), mode, predictor)  # type: ignore[arg-type]
        logits_of(gpu(ready.weights, graph), ids, splits, [3])
        stage, _ = split(ready.weights, graph, masks(0.3))
        run(stage, ids, splits)
    keys = {"llama.activation_sparsity_scale": [1.0, 0.5]}
    top_k = open_gguf(write_relu(tmp_path / "top_k.gguf", dialect="gguf", keys=keys))
    ready, graph = prepared(top_k, "exact")
    logits_of(gpu(ready.weights, graph), ids, splits, [3])
    ready, graph = prepared(write(tmp_path, "bamboo", n_vocab=2 * LOGIT_GROUP), "exact")
    tapped = gpu(ready.weights, graph)  # tapped values are not fused with later operations
    tapped.step(batch([(ids[:3], 0, [3])], tuple(ffn.selected.name for ffn in graph.ffns)))
    weights, graph = graph_of(threshold_models.write(tmp_path, "llama"), EVERY)
    thresholded = gpu(weights, graph, input_major=[op.weight for op in thresholded_products(graph)])
    run_thresholded(thresholded, threshold_models.IDS, threshold_models.THRESHOLDED, [9, 10])
    with fused(tmp_path) as backend:
        logits_of(backend, ids, [*splits, 48], [3])
    for rates in (EVEN, LINK_ONLY):
        backend = hybrid(model(tmp_path, biased=True, **SMALL), expert_slots=4, fetching=Fetching(rates, 4))
        logits_of(backend, ids, splits, [2])
        backend.close()
    spin_kernel.submit(torch.zeros(1, 4), None, torch.zeros(1, 4), torch.zeros(1, 1), torch.zeros(1))
    spin_kernel.collect(torch.zeros(1), torch.zeros(1, 4), torch.zeros(1, 4))
    assert every_kernel().keys() - launched.keys() == set()


@pytest.mark.slow
def test_no_step_needs_a_kernel_that_was_not_compiled_at_load(
    tmp_path: Path, launched: dict[str, set[Any]]
) -> None:
    """Check any number of tokens, at any position, with outputs for some of them.

    Layers are whole or split, with thresholds, or with fetched experts.
    """
    n = 70

    def check_steps(name: str, stage: Any) -> None:
        launched.clear()
        stage.warm_up()
        warm = {kernel: set(variants) for kernel, variants in launched.items()}
        assert warm
        for size in (*range(1, 19), 31, 32, 33, 40, 48, 63, 64, 65, n):
            ids = tokens(size)
            for step in (batch([(ids, 0, [0, 1])]), batch([(ids[:1], 64, [1, 0])])):
                step = replace(step, outputs=step.outputs[-(size % 7 + 1) :])
                stage.run(step)
        for kernel, variants in launched.items():
            assert variants <= warm.get(kernel, set()), (name, kernel, variants - warm.get(kernel, set()))

    given = {"n_blocks": 2, "max_batch": n}
    for model_, mode, predictor in (("bamboo", "exact", None), ("opt", "predicted", "svd:32")):
        folder = tmp_path / model_
        folder.mkdir()
        ready, graph = prepared(write(folder, model_, T.Q4_0), mode, predictor)  # type: ignore[arg-type]
        check_steps(model_, gpu(ready.weights, graph, **given).stage)
        check_steps(f"{model_}, split", split(ready.weights, graph, masks(0.3), **given, stream_from=40)[0])
    with fused(tmp_path, **given) as backend:
        check_steps("fused", backend.stage)
        assert {"_project_heads_kernel", "_matvec_kernel"} <= launched.keys()
    weights_, graph = graph_of(threshold_models.write(tmp_path, "llama"), EVERY)
    by_input = [op.weight for op in thresholded_products(graph)]
    check_steps("thresholds", gpu(weights_, graph, input_major=by_input, **given).stage)
    backend = hybrid(
        model(tmp_path, biased=True, **SMALL), expert_slots=4, fetching=Fetching(LINK_ONLY, 4), **given
    )
    check_steps("experts", backend.stages[0])
    backend.close()


def test_kernels_are_compiled_before_steps_are_captured(
    tmp_path: Path, launched: dict[str, set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that steps that only compile are not recorded, but the steps after them are."""
    captured: list[int] = []

    @contextmanager
    def compiled_first(device: Any) -> Iterator[None]:
        yield
        captured.append(len(recorder.made))

    recorder = Recorder()
    monkeypatch.setattr(stages, "compiled_first", compiled_first)
    ready, graph = prepared(write(tmp_path, "bamboo", T.Q4_0), "exact")
    stage = gpu(ready.weights, graph, capture=recorder).stage
    stage.kernels.triton = True
    stage.warm_up()
    assert captured == [0]
    assert len(recorder.made) == 4  # of 1, 2, 4 and 8 tokens


class FakeKernel:
    """A Triton kernel: `warmup` compiles, indexing the result loads, indexing the kernel launches."""

    arg_names = ("x", "n")
    params = tuple(SimpleNamespace(do_not_specialize_on_alignment=name == "n") for name in arg_names)

    def __init__(self, name: str, compile_: Any) -> None:
        self.__name__, self._compile = name, compile_
        self.loaded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        self._compile()

        class Loader:
            def __getitem__(_, index: tuple[int, ...]) -> None:  # noqa: N805
                self.loaded.append((args[0].dtype, args[0].data_ptr() % 16, *args[1:]))

        return Loader()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((self._compile(), *args[1:]))


def test_kernels_are_compiled_at_the_same_time_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that two compilations run at once, and that each variant is compiled once.

    The output of a launch that was not made is 0. A kernel that the CPU waits for is launched.
    """
    monkeypatch.setattr(launch, "usable_cores", lambda: 2)
    meeting = threading.Barrier(2, timeout=60)
    first, second = FakeKernel("first", meeting.wait), FakeKernel("second", meeting.wait)
    at_once = FakeKernel("at_once", lambda: None)
    x = torch.zeros(64)
    with launch.compiled_first(torch.device("cpu")):
        out = torch.empty(1 << 16)
        for n in (3, 16, 48):  # one variant
            launch.launch(first, (1,), out, n, warps=4)
        launch.launch(second, (1,), x[1:], 1, warps=4)
        launch.launch(at_once, (1,), x, 5, warps=4, at_once=True)
        assert not out.any()
        assert at_once.launched == [(None, 5)]
    assert first.loaded == [(torch.float32, 0, 3)]
    assert second.loaded == [(torch.float32, 4, 1)]
    assert not first.launched + second.launched
    launch.launch(at_once, (1,), x, 7, warps=4)
    assert at_once.launched[1:] == [(None, 7)]


def test_smallest_variant_of_a_kernel_is_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the other variants follow, the slowest first."""
    monkeypatch.setattr(launch, "usable_cores", lambda: 3)
    kernels = FakeKernel("one", lambda: None), FakeKernel("other", lambda: None)
    order: list[tuple[str, int]] = []
    ended: set[str] = set()
    meeting = threading.Barrier(2, timeout=60)  # both first variants, while a third thread is idle
    for kernel in kernels:
        kept = kernel.warmup

        def warmup(*args: Any, kernel: Any = kernel, kept: Any = kept, **options: Any) -> Any:
            order.append((kernel.__name__, options["T"]))
            if options["T"] == 1:
                meeting.wait()
                ended.add(kernel.__name__)
            else:
                assert ended == {"one", "other"}
            return kept(*args, **options)

        monkeypatch.setattr(kernel, "warmup", warmup)
    with launch.compiled_first(torch.device("cpu")):
        for tokens in (8, 1, 4):
            for kernel in kernels:
                launch.launch(kernel, (1,), torch.zeros(64), 5, warps=4, T=tokens)
    assert set(order[:2]) == {("one", 1), ("other", 1)}
    assert set(order[2:]) == {(name, tokens) for name in ("one", "other") for tokens in (8, 4)}
    assert order[2][1] == 8


@pytest.mark.parametrize("dependent", [False, True])
def test_variants_are_compiled_as_triton_will_look_for_them(
    dependent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use Triton's own compiler and cache for a missing device.

    A launch must find the compiled variant for tensors that are alike.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    loaded: list[Any] = []
    fake = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, binary_ext="cubin",
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda source, metadata: loaded.append(source) or (lambda *args: None),
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 1 << 16},
            load_binary=lambda *args: (1, 2, 3, 0, 1024), unload_module=lambda module: None,
        ),
    )  # fmt: skip
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(launch, "DEPENDENT", dependent)
    kernel = triton_kernels._pack_kernel
    kernel.device_caches.clear()
    try:
        with launch.compiled_first(torch.device("cpu")):
            triton_kernels.pack_bits(torch.zeros(3, 32), 0.5)
        (compiled,) = kernel.device_caches[0][0].values()
        triton_kernels.pack_bits(torch.ones(5, 32), 0.25)
        assert list(kernel.device_caches[0][0].values()) == [compiled]
        assert len(loaded) == 1
        assert compiled.metadata.launch_pdl == dependent  # Triton's launcher turns it into an attribute
    finally:
        kernel.device_caches.clear()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "needs a C compiler to launch kernels, and finds none: install gcc"),
        ("false", "cannot compile what launches its kernels: .*false ended with 1"),
        (
            "no header",
            "cannot compile what launches its kernels: .*Python.h is missing: install Python's headers",
        ),
    ],
)
def test_missing_compiler_gives_one_message(
    compiler: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check the message for errors of Triton's own function that calls the compiler."""
    from triton.runtime.build import _build

    monkeypatch.delenv("CC", raising=False)
    if compiler is None:
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CC", shutil.which("false") or "/bin/false")
    if compiler == "no header":
        paths = SimpleNamespace(get_paths=lambda: {"include": str(tmp_path)})
        monkeypatch.setattr(launch, "sysconfig", paths)
    (tmp_path / "stub.c").write_text("int x;")

    def build() -> None:
        _build("stub", str(tmp_path / "stub.c"), str(tmp_path), [], [], [], [])

    with pytest.raises(DeviceError, match=said) as error:
        launch.launch(FakeKernel("kernel", build), (1,), torch.zeros(1), 1, warps=4)
    assert "HOTSET_TRITON=0" in str(error.value)
    with pytest.raises(DeviceError, match=said), launch.compiled_first(torch.device("cpu")):
        launch.launch(FakeKernel("kernel", build), (1,), torch.zeros(1), 1, warps=4)


def test_unwritable_cache_gives_one_message() -> None:
    def refused() -> None:
        raise PermissionError(13, "Permission denied", "/nowhere/cache")

    with pytest.raises(DeviceError, match=r"cannot write its cache: .*/nowhere/cache.*TRITON_CACHE_DIR"):
        launch.launch(FakeKernel("kernel", refused), (1,), torch.zeros(1), 1, warps=4)


@pytest.mark.parametrize(("hip", "refuses"), [(False, "register"), (False, "address"), (True, "register")])
def test_a_refused_registration_leaves_no_error_to_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, hip: bool, refuses: str
) -> None:
    memory = np.zeros(8192, np.uint8)
    device = Runtime(monkeypatch, hip=hip, refuses=refuses)
    driver = CudaDriver(torch.device("cuda", 0))
    with pytest.raises(DeviceError, match="cuda:0 cannot map 8192 bytes of host memory"):
        driver.register(memory)
    device.launch()
    assert not device.registered
    device.refuses = ""
    address = driver.register(memory)
    assert address - memory.ctypes.data == (0 if hip else 4096)
    assert device.registered == {memory.ctypes.data}
    driver.unregister(memory)
    assert not device.registered


@pytest.mark.parametrize("is_lost", [False, True])
def test_any_thread_can_let_registered_memory_go(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """Check memory of a model that another thread closes, also after its device has failed."""
    memory, device = np.zeros(8192, np.uint8), Runtime(monkeypatch)
    driver = CudaDriver(torch.device("cuda", 0))
    driver.register(memory)
    device.is_lost = is_lost
    with ThreadPoolExecutor(1) as other:
        other.submit(driver.unregister, memory).result()
    assert not device.registered


def test_memory_that_stays_registered_leaves_no_error_to_the_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, device = np.zeros(8192, np.uint8), Runtime(monkeypatch, hip=True)
    driver = CudaDriver(torch.device("cuda", 0))
    driver.register(memory)
    device.refuses = "release"
    driver.unregister(memory)
    device.launch()


@pytest.mark.parametrize("max_batch", [100, 300, 700])
def test_every_tile_of_a_product_is_warmed_up(monkeypatch: pytest.MonkeyPatch, max_batch: int) -> None:
    """Check Hopper, whose tiles depend on the tokens, the rows and the multiprocessors."""
    monkeypatch.setattr(triton_kernels, "is_hopper", lambda x: True)
    monkeypatch.setattr(triton_kernels, "multiprocessors", lambda device: 132)
    half, sizes = torch.empty(0, dtype=torch.float16), torch.empty(0)
    warm = [n for n in (max_batch, *stages.WARM_SIZES) if n <= max_batch]
    every = set()
    for n_rows in (512, 4096, 11008, 22016, 32000):
        m = weights(T.Q4_0, n_rows, 4096)
        tile_of = {
            n: triton_kernels.product_tile(triton_kernels.Halves(half, sizes, n), m, n_rows)
            for n in range(9, max_batch + 1)
        }
        assert set(tile_of.values()) == {tile_of[n] for n in warm if n > 8}
        every |= set(tile_of.values())
    assert len(every) == {100: 5, 300: 6, 700: 6}[max_batch]


def test_a_grid_has_room_for_any_number_of_tokens(launched: dict[str, set[Any]]) -> None:
    """Check tokens, or pairs of tokens and experts, that exceed the second dimension of a grid."""
    n = 70_000
    x, tokens_, by = new(n, 64), new(n, dtype=torch.int32), TokenThreshold(new(n, dtype=torch.int32), 0.1)
    m, counts = weights(T.Q4_0, 64, 64), new(N_COUNTS, dtype=torch.int64)
    triton_kernels.zero_small(x, by)
    triton_kernels.rms_norm(x, new(64), 1e-5, by=by)
    triton_kernels.linear(x, m)
    triton_kernels.linear_bits(x, m, None, 0.0)
    triton_kernels.sparse_ffn(x, m, m, m, activation="relu", counts=counts)
    blocks, table = new(4, 2, 64, 64, dtype=torch.float16), new(1, 4, dtype=torch.int32)
    cos_sin = triton_kernels.angles(tokens_, RopeTable("neox", 64, new(2, ANGLE_STEP, 32), new(2, 16, 32)))
    q = triton_kernels.rotate_store(
        new(n, 128), new(n, 128), new(n, 128), cos_sin, blocks, blocks, table, tokens_, tokens_, n_head=2
    )
    triton_kernels.attention(q, blocks, blocks, table, tokens_, tokens_, n_head=2, scale=0.1)
    value = Value(0, 1, "x")
    slots = torch.zeros((n, 2), dtype=torch.int32)
    experts_kernel.experts(
        torch.empty(n, 64), slots, None, *(DeviceMatrix.empty(T.Q8_0, 4 * 64, 64, "cpu") for _ in range(2)),
        n_neurons=64, activation=Activate(value, value, "silu"), up_activation=None, neuron_major=False,
        sparse=False,
    )  # fmt: skip
    assert launched.keys() >= {"_zero_small_kernel", "_pack_kernel", "_heads_kernel", "_values_kernel"}
