"""The hybrid engine, with CPU tensors in place of the GPU's: the CPU engine's logits for any split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from cases import quick_are, quick_if
from sparse_runs import MODELS, N_FF, TOLERANCE, prepared, relative_error, write
from tiny_gguf import write_llama

torch = pytest.importorskip("torch")

from hybrid_runs import ORDERS, chain, split, whole  # noqa: E402
from waiting import within  # noqa: E402

from hotset import _core  # noqa: E402
from hotset.backends.cpu.backend import CpuBackend  # noqa: E402
from hotset.backends.pipeline import ChainBackend  # noqa: E402
from hotset.backends.triton.cpu_offload import CpuOffload  # noqa: E402
from hotset.backends.triton.kernels import Kernels  # noqa: E402
from hotset.errors import (  # noqa: E402
    DeviceError,
    InvalidRequestError,
    StepCancelledError,
    UnsupportedModelError,
)
from hotset.formats.gguf import GGUFFile, open_gguf  # noqa: E402
from hotset.formats.quants import GGMLType as T  # noqa: E402
from hotset.load_parameters import KVType  # noqa: E402
from hotset.model.config import config_from_gguf  # noqa: E402
from hotset.placement.table import CPU, LayerPlacement, Placement  # noqa: E402

# With quantised weights the CPU rounds activations to int8, in steps of 1/127 of the largest of 32. The
# device does not, so each product differs by about 1%.
QUANTIZED_TOLERANCE = 0.05

ONE_BY_ONE = [*range(20, 30)]


def both(
    gguf: GGUFFile,
    mode: str,
    placement: Placement,
    kv_type: KVType = "f32",
    n_threads: int = 2,
    **options: Any,
) -> tuple[CpuBackend, ChainBackend]:
    ready, graph = prepared(gguf, mode)
    given: dict[str, Any] = {"n_blocks": 8, "max_batch": 48, "kv_type": kv_type, "n_threads": n_threads}
    sparse = mode != "dense"
    hybrid = chain(placement, ready.weights, graph, sparse=sparse, **given, **options)
    return cpu_backend(ready.weights, graph, sparse=sparse, **given), hybrid


def assert_same_logits(
    cpu: CpuBackend | ChainBackend, hybrid: ChainBackend, tolerance: float = TOLERANCE
) -> None:
    ids = tokens(30)
    expected = logits_of(cpu, ids, ONE_BY_ONE, [2])
    found = within(120, lambda: logits_of(hybrid, ids, ONE_BY_ONE, [2]))
    assert relative_error(found, expected) < tolerance
    # Several sequences: one continues, one begins.
    more = batch([(tokens(1, 7), 30, [2]), (tokens(3, 8), 0, [5])])
    expected = cpu.step(more).logits.copy()
    assert relative_error(within(120, lambda: hybrid.step(more)).logits, expected) < tolerance
    within(120, hybrid.close)


@pytest.mark.parametrize(
    ("model", "mode", "share"),
    quick_if(
        lambda model, mode, share: share == 0.3 and (model == "bamboo" or mode == "exact"),
        MODELS, ["exact", "predicted"], [0.0, 0.3, 1.0],
    ),
)  # fmt: skip
def test_any_share_of_neurons_on_the_device(tmp_path: Path, model: str, mode: str, share: float) -> None:
    gguf = write(tmp_path, model)
    for n_threads in (1, 2):
        cpu, hybrid = both(gguf, mode, split(share), n_threads=n_threads)
        assert_same_logits(cpu, hybrid)


@pytest.mark.parametrize("share", quick_are((0.3,), [0.0, 0.3, 1.0]))
@pytest.mark.parametrize("model", ["nemotron-biases", "arcee", "gemma3-relu", "phi3-relu", "granite-relu"])
def test_architectures_of_plain_files(run_folder: Path, model: str, share: float) -> None:
    pytest.importorskip("transformers")
    from tiny_models import shared_gguf

    gguf = open_gguf(shared_gguf(model, run_folder))
    n_layer = config_from_gguf(gguf).n_layer
    cpu, hybrid = both(gguf, "exact", split(share, n_layer=n_layer, n_ff=160))
    assert_same_logits(cpu, hybrid, n_layer / 2 * TOLERANCE)


@pytest.mark.parametrize("type_", quick_are((T.Q4_0,), [T.F16, T.Q8_0, T.Q4_0]), ids=lambda t: t.name)
@pytest.mark.parametrize("dialect", ["powerinfer", "gguf"])
def test_quantised_weights(tmp_path: Path, type_: T, dialect: Any) -> None:
    gguf = write(tmp_path, "bamboo", type_, dialect=dialect)
    tolerance = TOLERANCE if type_ == T.F16 else QUANTIZED_TOLERANCE
    cpu, hybrid = both(gguf, "exact", split(0.3))
    assert_same_logits(cpu, hybrid, tolerance)
    if dialect == "powerinfer":
        # The CPU engine's predictor reads int8, which moves neurons across the threshold, so both predict on
        # a device here. The second layer's predictor still sees the error of the first layer's cold neurons.
        _, device = both(gguf, "predicted", split(1.0))
        assert_same_logits(device, both(gguf, "predicted", split(0.3))[1], 2 * tolerance)


def test_prompts_stream_and_decoding_shares(tmp_path: Path) -> None:
    cpu, hybrid = both(write(tmp_path, "llama"), "predicted", split(0.3), stream_from=8)
    assert_same_logits(cpu, hybrid)
    ids = tokens(9)
    cpu, hybrid = both(write(tmp_path, "llama"), "predicted", split(0.3), stream_from=8)
    hybrid.step(batch([(ids, 0, [0])]))
    assert not hybrid.cpu_worker_seconds().any()
    hybrid.step(batch([(ids[:1], 9, [0])]))
    assert hybrid.cpu_worker_seconds().all()
    hybrid.step(batch([(ids, 0, [1])]))  # streams again; the earlier step does not count
    assert not hybrid.cpu_worker_seconds().any()
    assert not hybrid.stats().active_on_cpu.any()  # type: ignore[union-attr]
    found, expected = hybrid.stats(), cpu.step(batch([(ids, 0, [1])])) and cpu.stats()
    assert found is not None
    assert expected is not None
    np.testing.assert_array_equal(found.selected, expected.selected)


def test_every_part_of_the_cpu_has_the_kernels_that_are_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = []
    made = _core.Plan

    def noted(*arguments: Any) -> Any:
        forced.append(arguments[-1])
        return made(*arguments)

    monkeypatch.setattr(_core, "Plan", noted)
    gguf = write(tmp_path, "llama", ranks=(32, 64, 32))
    hybrid_of(gguf, split(0.3, devices=[CPU, 0, 1]), isa="scalar").close()
    assert forced == ["scalar"] * 3


@pytest.mark.parametrize(("stream_from", "most"), [(None, 48), (8, 7), (100, 48), (1, 1)])
def test_a_service_holds_the_steps_that_do_not_stream(
    tmp_path: Path, stream_from: int | None, most: int
) -> None:
    hybrid = hybrid_of(write(tmp_path, "llama"), split(0.3), stream_from=stream_from)
    assert [stage.worker.max_batch for stage in hybrid.stages] == [most]  # type: ignore[union-attr]
    hybrid.close()


# ---- layers on several processors


@pytest.mark.parametrize("n_cpu", [0, 1, 3, 4])
def test_dense_models_are_split_by_layers(tmp_path: Path, n_cpu: int) -> None:
    gguf = open_gguf(write_llama(tmp_path / "m.gguf", n_layer=4))
    placement = whole([CPU] * n_cpu + [0] * (4 - n_cpu), output=0)
    cpu, hybrid = both(gguf, "dense", placement)
    assert [set(held) for held in hybrid.device_bytes()] == [{"weights", "experts", "kv", "workspace"}]
    assert_same_logits(cpu, hybrid, 2 * TOLERANCE)  # four layers


def test_all_on_the_cpu_is_the_cpu_engine_to_the_bit(tmp_path: Path) -> None:
    gguf = write(tmp_path, "bamboo")
    cpu, hybrid = both(gguf, "exact", Placement((), (LayerPlacement(CPU),) * 2, CPU))
    ids = tokens(20)
    np.testing.assert_array_equal(logits_of(hybrid, ids, [5], [0]), logits_of(cpu, ids, [5], [0]))


@pytest.mark.parametrize(
    ("model", "owners", "mode"),
    quick_if(
        lambda model, owners, mode: owners == ORDERS[2],
        ["llama", "falcon-7b", "opt"], ORDERS, ["exact", "predicted"],
    ),
    ids=str,
)  # fmt: skip
def test_a_chain_of_processors(tmp_path: Path, model: str, owners: list[int], mode: str) -> None:
    gguf = write(tmp_path, model, ranks=(32, 64, 32))
    cpu, hybrid = both(gguf, mode, split(0.4, devices=owners))
    held: dict[int, int] = {}
    for device, stage in zip(hybrid.devices, hybrid.stages, strict=True):
        held[device] = held.get(device, 0) + sum(stage.nbytes.values())
    assert held.pop(CPU, 0) == 0
    assert {i: sum(kinds.values()) for i, kinds in enumerate(hybrid.device_bytes())} == held
    assert_same_logits(cpu, hybrid, 1.5 * TOLERANCE)


def test_a_placement_is_of_the_model(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama")
    for placement, message in {
        whole([0]): "the placement has 1 layers and the model 2",
        Placement(("simulated",), whole([1, 1]).layers, 1): "names a device that is not among its 1",
    }.items():
        with pytest.raises(InvalidRequestError, match=message):
            both(gguf, "exact", placement)
    dense = open_gguf(write_llama(tmp_path / "dense.gguf", n_ff=N_FF))
    with pytest.raises(UnsupportedModelError, match="the neurons of layer 0 cannot be shared"):
        both(dense, "dense", split(0.3))


# ---- statistics, taps


@pytest.mark.parametrize("owners", [[0, 0], [CPU, 0], [0, 1], [0, CPU]], ids=str)
@pytest.mark.parametrize(
    ("model", "mode"),
    quick_if(
        lambda model, mode: (mode == "predicted") == (model == "llama"),
        ["llama", "opt"], ["exact", "predicted"],
    ),
)  # fmt: skip
def test_statistics_include_both_sides(tmp_path: Path, model: str, mode: str, owners: list[int]) -> None:
    cpu, hybrid = both(write(tmp_path, model), mode, split(0.3, devices=owners))
    for part in ([(tokens(12), 0, [0])], [(tokens(1), 12, [0])]):
        cpu.step(batch(part))
        hybrid.step(batch(part))
        expected, found = cpu.stats(), hybrid.stats()
        assert expected is not None
        assert found is not None
        assert found.n_tokens == expected.n_tokens
        np.testing.assert_array_equal(found.selected, expected.selected)
        np.testing.assert_array_equal(found.active, expected.active)
        assert found.active_on_cpu is not None
        assert (found.active_on_cpu > 0).all()
        shared = np.array([owner != CPU for owner in owners])
        assert ((found.active_on_cpu < found.active) == shared).all()
        assert found.down_rows.min() > 0
        assert found.ffn.min() > 0
        assert found.attention.min() > 0
        assert found.other > 0
        assert (hybrid.cpu_worker_seconds() > 0).tolist() == [owner != CPU for owner in owners]


@pytest.mark.parametrize("owners", [[0, 0], [CPU, 0], [0, 1], [0, CPU]], ids=str)
def test_taps_of_every_part(tmp_path: Path, owners: list[int]) -> None:
    gguf = write(tmp_path, "llama")
    cpu, hybrid = both(gguf, "predicted", split(0.3, devices=owners))
    names = ("embedding", "blk.0.attn", "blk.0.out", "blk.1.ffn_inp", "blk.1.attn_norm", "output_norm")
    request = batch([(tokens(5), 0, [0])], names)
    expected, found = cpu.step(request), hybrid.step(request)
    assert set(found.taps) == set(names)
    for name in names:
        assert relative_error(found.taps[name], expected.taps[name]) < TOLERANCE
    split_layer = max(i for i, owner in enumerate(owners) if owner != CPU)
    with pytest.raises(InvalidRequestError, match=rf"blk\.{split_layer}\.ffn_act cannot be tapped"):
        hybrid.step(batch([(tokens(1), 0, [0])], (f"blk.{split_layer}.ffn_act",)))
    with pytest.raises(InvalidRequestError, match="no value named 'nothing'"):
        hybrid.step(batch([(tokens(1), 0, [0])], ("nothing",)))
    hybrid.step(batch([(tokens(1), 0, [0])]))


# ---- failures


def _fall_off() -> None:
    raise RuntimeError("the device fell off the bus")


class Failing(Kernels):
    """Kernels that fail, or do something else, after `countdown` calls of the named kernels."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.countdown, self.then = -1, _fall_off
        for name in ("linear", "sparse_ffn", "attention", "rms_norm", "pack_bits"):
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.countdown -= 1
            if self.countdown == 0:
                self.then()
            return work(*arguments, **options)

        return call


@pytest.mark.parametrize("owners", [[0, 0], [CPU, 0], [0, 1]], ids=str)
def test_a_device_that_fails_anywhere(tmp_path: Path, owners: list[int]) -> None:
    gguf = write(tmp_path, "llama")
    kernels = Failing()
    cpu, hybrid = both(gguf, "predicted", split(0.3, devices=owners), kernels=kernels)
    ids = tokens(4)
    expected = cpu.step(batch([(ids, 0, [0])])).logits.copy()
    failures = 0
    for at in range(1, 40):
        kernels.countdown = at
        try:
            within(120, lambda: hybrid.step(batch([(ids, 0, [0])])))
        except RuntimeError as error:
            failures += str(error) == "the device fell off the bus"
        kernels.countdown = -1
        found = within(120, lambda: hybrid.step(batch([(ids, 0, [0])]))).logits
        assert relative_error(found, expected) < TOLERANCE
    assert 5 < failures < 39  # one for each call of a step, and no more
    within(120, hybrid.close)


@pytest.mark.parametrize("at", [1, 6, 11, 13])
def test_a_step_that_is_cancelled(tmp_path: Path, at: int) -> None:
    kernels = Failing()
    cpu, hybrid = both(write(tmp_path, "llama"), "predicted", split(0.2), kernels=kernels)
    request = batch([(tokens(4), 0, [0])])
    expected = cpu.step(request).logits.copy()
    kernels.countdown, kernels.then = at, hybrid.cancel
    with pytest.raises(StepCancelledError, match="was cancelled"):
        within(120, lambda: hybrid.step(request))
    found = within(120, lambda: hybrid.step(request)).logits
    assert relative_error(found, expected) < TOLERANCE
    within(120, hybrid.close)


def hybrid_of(gguf: GGUFFile, placement: Placement, **options: Any) -> ChainBackend:
    ready, graph = prepared(gguf, "exact")
    return chain(placement, ready.weights, graph, **{"kv_type": "f16", "n_threads": 3, **options})


@pytest.mark.parametrize(
    ("devices", "owners", "options", "message"),
    [
        # The CPU's own layers have started their threads when the device refuses its part.
        (("simulated",), [CPU, 0, 0], {"kv_type": "q8_0"}, "q8_0 cache runs on the CPU only"),
        # The CPU worker has started its threads when its stage cannot be built.
        (("simulated",), [0, 0, 0], {"kv_type": "q8_0"}, "q8_0 cache runs on the CPU only"),
        # A whole device and its CPU worker exist when the next device is missing.
        (("simulated", "cuda:0"), [CPU, 0, 1], {}, "cuda"),
        # The CPU worker itself is running when its link to the device is missing.
        (("simulated",), [0, 0, 0], {"synchronisation": "memops"}, "memops"),
    ],
    ids=["stage", "worker", "next", "synchronisation"],
)
def test_failed_build_leaves_nothing_behind(
    tmp_path: Path,
    threads: Callable[[int], int],
    devices: tuple[str, ...],
    owners: list[int],
    options: dict[str, Any],
    message: str,
) -> None:
    gguf = write(tmp_path, "llama", ranks=(32, 64, 32), n_head=2)  # heads that fit a q8_0 cache
    placement = split(0.3, devices=owners)
    with pytest.raises((UnsupportedModelError, DeviceError), match=message) as refused:
        hybrid_of(gguf, Placement(devices, placement.layers, placement.output_device), **options)
    assert threads(0) == 0, refused  # the exception's frames still hold the built objects


def test_closing_ends_every_thread(tmp_path: Path, threads: Callable[[int], int]) -> None:
    gguf = write(tmp_path, "llama", ranks=(32, 64, 32))
    hybrid = hybrid_of(gguf, split(0.3, devices=[CPU, 0, 1]))
    assert threads(6) == 2 + 2 * 2  # two of the thread pool next to this one, and two per CPU worker
    within(120, lambda: hybrid.step(batch([(tokens(3), 0, [0])])))
    hybrid.close()
    assert threads(0) == 0
    hybrid.close()


@pytest.mark.parametrize("taps", [(), ("blk.0.attn", "blk.1.out")], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_each_layer_is_submitted_and_collected_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, taps: tuple[str, ...]
) -> None:
    said: list[tuple[str, int]] = []
    for name in ("submit", "collect"):
        work = getattr(CpuOffload, name)

        def noted(self: CpuOffload, layer: int, *rest: Any, name: str = name, work: Any = work) -> Any:
            said.append((name, layer))
            return work(self, layer, *rest)

        monkeypatch.setattr(CpuOffload, name, noted)
    _, hybrid = both(write(tmp_path, "llama"), "predicted", split(share))
    for n in (1, 5):
        said.clear()
        within(120, lambda n=n: hybrid.step(batch([(tokens(n), 0, [0])], taps)))
        assert said == [("submit", 0), ("collect", 0), ("submit", 1), ("collect", 1)]
    within(120, hybrid.close)
