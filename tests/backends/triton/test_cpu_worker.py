"""The CPU worker's part of a layer: the bits of the CPU engine, on request, and no thread waits for ever."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import tokens
from cases import quick_are
from fake_cuda import FakeCuda
from sparse_runs import MODELS, N_FF, cpu, hot_neurons, prepared, step, write
from tiny_gguf import write_llama, write_relu
from waiting import WATCHDOG, until, when, within
from worker_runs import LAYERS, N_EMBD, ask, cpu_worker, inputs, offload, packed, random_bits, torch

from hotset import _core
from hotset.backends.cpu.worker import split_ffns
from hotset.backends.triton import cpu_offload
from hotset.backends.triton.cpu_offload import CpuOffload, choose_kind, round_trip_seconds
from hotset.errors import DeviceError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType as T


@pytest.mark.parametrize("n_threads", quick_are((2,), [1, 2]))
@pytest.mark.parametrize("type_", [T.F32, T.F16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", MODELS)
def test_with_all_neurons_it_is_the_ffn_to_the_bit(
    tmp_path: Path, model: str, type_: T, n_threads: int
) -> None:
    gguf = write(tmp_path, model, type_)
    ids = tokens(6)
    for mode in ("exact", "predicted"):
        names = [f"blk.{i}.{name}" for i in LAYERS for name in ("ffn_down", "ffn_norm", "attn_norm")]
        names += [f"blk.{i}.ffn_pred" for i in LAYERS if mode == "predicted"]
        _, graph = prepared(gguf, mode)
        present = {value.name for value in graph.values}
        taps = dict(step(cpu(gguf, mode), ids, [name for name in names if name in present]).taps)
        cold = cpu_worker(gguf, mode, hot=np.zeros(N_FF, np.bool_), n_threads=n_threads)
        for i in LAYERS:
            reads = split_ffns(graph)[i].decides.x.name
            h = torch.from_numpy(taps[reads])
            bits = None
            if mode == "predicted":
                bits = packed(~(taps[f"blk.{i}.ffn_pred"] < np.float32(0.1)))
            bias = split_ffns(graph)[i].down.bias  # the device adds it
            added = 0 if bias is None else gguf.data(bias).view(np.float32)
            np.testing.assert_array_equal(ask(cold, i, h, bits) + added, taps[f"blk.{i}.ffn_down"])
            alone = [ask(cold, i, h[t : t + 1], None if bits is None else bits[t : t + 1]) for t in range(6)]
            np.testing.assert_array_equal(np.concatenate(alone) + added, taps[f"blk.{i}.ffn_down"])
        cold.close()


def masked_plan(gguf: GGUFFile, mode: str, layer: int, h: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the sum of the wanted neurons, by a plan of the CPU engine's operations that reads every row."""
    ready, graph = prepared(gguf, mode)
    ffn = split_ffns(graph)[layer]
    n = len(h)
    plan = _core.Plan(n, 1, 1, _core.Runtime(1))
    x, scores = plan.buffer(N_EMBD, False), plan.buffer(N_FF, False)
    values, kept, out = plan.buffer(N_FF, False), plan.buffer(N_FF, False), plan.buffer(N_EMBD, False)
    floats = [np.ascontiguousarray(h), np.where(wanted, 1, -1).astype(np.float32)]
    for table, buffer in zip(floats, (x, scores), strict=True):
        plan.add("embed", weight=(0, table.view(np.uint8).reshape(-1)), of="token", first_row=0, out=buffer)
    parts = []
    for linear in (op for op in (ffn.gate, ffn.up) if op is not None):
        bias = None if linear.bias is None else gguf.data(linear.bias).view(np.float32)
        weight = int(gguf.tensors[linear.weight].type), gguf.data(linear.weight)
        parts.append({"weight": weight, "bias": bias})
    both = "relu" if MODELS_UP.get(gguf.metadata["general.architecture"]) else None
    plan.add(
        "neurons", x=x, gate=parts[0] if len(parts) == 2 else None, up=parts[-1], activation="relu",
        up_activation=both, sparse=False, out=values,
    )  # fmt: skip
    plan.add("mask", x=values, scores=scores, threshold=0.0, first=0, out=kept)
    down = int(gguf.tensors[ffn.down.weight].type), ready.weights.data(ffn.down.weight)
    plan.add("transposed_linear", x=kept, weight=down, sparse=False, out=out)
    plan.finish()
    ids = np.arange(n, dtype=np.int32)
    plan.run(ids, ids, np.zeros(n, np.int32), np.zeros((1, 1), np.int32), np.zeros(0, np.int32))
    return plan.rows(out).copy()


MODELS_UP = {"bamboo": True}  # models with an activation of up


@pytest.mark.parametrize("type_", [T.F32, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("model", MODELS)
def test_hot_neurons_are_never_added(tmp_path: Path, model: str, type_: T) -> None:
    gguf = write(tmp_path, model, type_)
    for mode in ("exact", "predicted"):
        for share in (0.05, 0.9):
            cold = cpu_worker(gguf, mode, share)
            for n in (1, 11):
                h, bits = inputs(n), random_bits(n)
                named = np.unpackbits(bits.numpy(), axis=1, count=N_FF, bitorder="little").astype(bool)
                for layer in LAYERS:
                    wanted = np.broadcast_to(~hot_neurons(share, seed=layer), (n, N_FF))
                    if mode == "predicted":
                        wanted = wanted & named
                    found = ask(cold, layer, h, bits if mode == "predicted" else None)
                    np.testing.assert_array_equal(found, masked_plan(gguf, mode, layer, h.numpy(), wanted))
                    assert np.abs(found).max() > 0
                    at = LAYERS.index(layer)
                    selected, active = cold.counts()[:, :2].T
                    assert selected.tolist() == [wanted.sum() if i == at else 0 for i in range(2)]
                    assert 0 < active[at] <= selected[at]
                    assert (cold.seconds() > 0).tolist() == [i == at for i in range(2)]
            cold.close()


def test_rows_beyond_the_step_are_not_computed(tmp_path: Path) -> None:
    cold = cpu_worker(write(tmp_path, "llama"), "predicted")
    h, bits = inputs(8), random_bits(8)
    expected = ask(cold, 0, h[:3], bits[:3])
    with cold.step(3):
        cold.submit(0, h, bits)
        found = cold.collect(0).numpy()
    np.testing.assert_array_equal(found[:3], expected)
    assert found.shape == (8, N_EMBD)
    assert np.isfinite(found).all()
    assert cold.counts()[0, 0] <= 3 * N_FF


def test_the_cpu_works_while_the_device_does(tmp_path: Path) -> None:
    """Check that the result arrives between submit and collect without help of this thread."""
    cold = cpu_worker(write(tmp_path, "llama"), "exact")
    expected = ask(cold, 1, inputs(2))
    shared = cold._exchange.shared
    done = shared.memory[shared.done : shared.done + 8].view(np.int32)
    with cold.step(2):
        cold.submit(1, inputs(2))
        until(lambda: done[1])
        assert done.tolist() == [0, 1]
        np.testing.assert_array_equal(cold.collect(1).numpy(), expected)
        assert done.tolist() == [0, 0]


def test_nothing_predicted_is_zero(tmp_path: Path) -> None:
    cold = cpu_worker(write(tmp_path, "bamboo"), "predicted")
    ask(cold, 0, inputs(2), random_bits(2))
    found = ask(cold, 0, inputs(2), packed(np.zeros((2, N_FF), np.bool_)))
    np.testing.assert_array_equal(found, np.zeros((2, N_EMBD)))
    hot = np.repeat(hot_neurons(0.3)[None], 2, axis=0)
    np.testing.assert_array_equal(ask(cold, 0, inputs(2), packed(hot)), np.zeros((2, N_EMBD)))


def test_faults_are_named_before_a_step(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama")
    with pytest.raises(InvalidRequestError, match=r"bool \[736\], not float64 \[736\]"):
        cpu_worker(gguf, "exact", hot=np.zeros(N_FF))
    with pytest.raises(InvalidRequestError, match=r"bool \[736\], not bool \[735\]"):
        cpu_worker(gguf, "exact", hot=np.zeros(N_FF - 1, np.bool_))
    with pytest.raises(InvalidRequestError, match="layer 0 has no neuron on the CPU"):
        cpu_worker(gguf, "exact", hot=np.ones(N_FF, np.bool_))
    with pytest.raises(DeviceError, match="cpu has no streams"):
        cpu_worker(gguf, "exact", kind="memops")
    with pytest.raises(InvalidRequestError, match="no predictor"):
        ask(cpu_worker(gguf, "exact"), 0, inputs(1), random_bits(1))
    with pytest.raises(InvalidRequestError, match="has a predictor"):
        ask(cpu_worker(gguf, "predicted"), 0, inputs(1))
    silu = open_gguf(write_llama(tmp_path / "silu.gguf"))
    ready, graph = prepared(silu, "dense")
    with pytest.raises(UnsupportedModelError, match="the neurons of layer 0 cannot be shared"):
        offload(ready.weights, graph, {0: np.zeros(96, np.bool_)}, max_batch=1)
    cold = cpu_worker(gguf, "exact")
    with pytest.raises(ValueError, match="takes 1 to 16 tokens, not 17"):
        cold.begin_step(17)


def test_the_environment_forces_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kind("cpu").kind == "direct"
    monkeypatch.setenv("HOTSET_HANDSHAKE", "spin")
    assert choose_kind("cpu").kind == "spin"
    monkeypatch.setenv("HOTSET_HANDSHAKE", "pigeon")
    with pytest.raises(InvalidRequestError, match="HOTSET_HANDSHAKE must be one of memops, spin"):
        choose_kind("cpu")


def test_kinds_are_tried_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device, tried = torch.device("cuda", 0), list[str]()
    outcomes: dict[str, float | str] = {}

    def measured(command: list[str]) -> float:
        assert command[0] == sys.executable
        assert command[-2] == "cuda:0"
        tried.append(command[-1])
        if isinstance(outcome := outcomes[command[-1]], str):
            raise DeviceError(outcome)
        return outcome

    monkeypatch.delenv("HOTSET_HANDSHAKE", raising=False)
    monkeypatch.setattr(cpu_offload, "measured_by", measured)
    for given, kind, order in (
        ({"memops": 9e-6, "spin": 7e-6}, "spin", ["memops", "spin"]),
        ({"memops": "too old", "spin": 7e-6}, "spin", ["memops", "spin"]),
        ({"memops": "a", "spin": "b", "hostfunc": 5e-5}, "hostfunc", ["memops", "spin", "hostfunc"]),
        ({"memops": "a", "spin": "b", "hostfunc": "c"}, "direct", ["memops", "spin", "hostfunc"]),
    ):
        monkeypatch.setattr(cpu_offload, "_chosen", {})
        outcomes, tried[:] = given, []
        chosen = choose_kind(device)
        assert (chosen.kind, tried) == (kind, order)
        assert all(reason in chosen.reason for reason in outcomes.values() if isinstance(reason, str))
        assert choose_kind(device) is chosen
        assert tried == order  # and not again


def test_a_process_that_measures_may_fail_in_any_way() -> None:
    def said(code: str, timeout: float = 60.0) -> float:
        return cpu_offload.measured_by([sys.executable, "-S", "-c", code], timeout)

    assert said("print('a line'); print(1.5e-05)") == 1.5e-5
    with pytest.raises(DeviceError, match=r"^no such call$"):
        said("import sys; print('more', file=sys.stderr); sys.exit('no such call')")
    with pytest.raises(DeviceError, match="its process ended with -9"):
        said("import os; os.kill(os.getpid(), 9)")
    with pytest.raises(DeviceError, match="nothing after"):
        said("import time; time.sleep(60)", 0.5)


def test_a_round_trip_is_measured() -> None:
    assert 0 < round_trip_seconds("cpu", width=256) < 1


# ---- failures: each ends soon with a reason, and the next step works


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[CpuOffload]:
    made = cpu_worker(write(tmp_path, "llama"), "exact", timeout=WATCHDOG)
    yield made
    within(WATCHDOG, made.close)


def assert_works(cold: CpuOffload) -> None:
    fresh = within(WATCHDOG, lambda: ask(cold, 1, inputs(2)))
    assert np.abs(fresh).max() > 0
    np.testing.assert_array_equal(within(WATCHDOG, lambda: ask(cold, 1, inputs(2))), fresh)


def test_a_device_that_fails_leaves_the_next_step_clean(cold: CpuOffload) -> None:
    def fail(at: int) -> None:
        with cold.step(2):
            for point, work in enumerate([lambda: cold.submit(0, inputs(2)), lambda: cold.collect(0)] * 2):
                if point == at:
                    raise ZeroDivisionError("the device")
                work()
            raise ZeroDivisionError("the device")

    for at in range(5):
        with pytest.raises(ZeroDivisionError, match="the device"):
            within(WATCHDOG, lambda at=at: fail(at))
        assert_works(cold)


def test_submitted_work_must_be_collected(cold: CpuOffload) -> None:
    with pytest.raises(DeviceError, match="layer 0 were submitted and not collected"), cold.step(1):
        cold.submit(0, inputs(1))
    assert_works(cold)


def test_finished_result_must_be_collected(cold: CpuOffload) -> None:
    """Check that a result that was not collected is an error: the next step would collect it."""
    done = cold._exchange.shared.flags(cold._exchange.shared.done)

    def answered_and_left() -> None:
        with cold.step(1):
            cold.submit(0, inputs(1))
            until(lambda: done[0])

    with pytest.raises(DeviceError, match="layer 0 were submitted and not collected"):
        within(WATCHDOG, answered_and_left)
    assert_works(cold)


def assert_released(cold: CpuOffload, action: Callable[[], object], message: str) -> None:
    """Check that an action ends a collect without a submit, with this message."""
    in_step = threading.Event()

    def wait_for_nothing() -> None:
        with cold.step(1):
            in_step.set()
            cold.collect(0)

    when(in_step, action)
    with pytest.raises(DeviceError, match=message):
        within(WATCHDOG, wait_for_nothing)


def test_a_waiter_is_released_from_elsewhere(cold: CpuOffload) -> None:
    assert_released(cold, lambda: cold.cancel("the plug was pulled"), "given up: the plug was pulled")
    assert_works(cold)


def test_a_waiter_is_released_by_close(cold: CpuOffload) -> None:
    assert_released(cold, cold.close, "was closed")
    with pytest.raises(DeviceError, match="cannot begin: the CPU worker was closed"):
        cold.begin_step(1)
    cold.close()


def test_a_step_within_a_step_is_refused(cold: CpuOffload) -> None:
    with cold.step(1), pytest.raises(DeviceError, match="in the middle of a step"):
        cold.begin_step(1)
    assert_works(cold)


def test_ctrl_c_gets_through_to_a_waiter(cold: CpuOffload) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def wait_for_nothing() -> None:
        with cold.step(1):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            cold.collect(0)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for_nothing()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_works(cold)


def test_a_layer_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    path = write_relu(tmp_path / "wide.gguf", n_embd=512, n_ff=2048, ranks=(32,), n_head=8)
    gguf = open_gguf(path)
    ready, graph = prepared(gguf, "exact")
    h = torch.from_numpy(np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32))
    layers = {0: np.zeros(2048, np.bool_)}
    slow = offload(ready.weights, graph, layers, max_batch=1024, n_threads=1, timeout=1e-3)

    def work() -> None:
        while True:  # the watchdog may be late for one layer, but not for every layer
            with slow.step(1024):
                slow.submit(0, h)
                slow.collect(0)

    with pytest.raises(DeviceError, match=r"layer 0 of the CPU worker took more than 0\.001 s"):
        within(WATCHDOG, work)
    # The next step begins once the thread has finished the layer; until then it raises.
    busy = "the hybrid step cannot begin: the CPU worker is still busy with a layer of the previous step"
    refusals: list[str] = []

    def begins() -> bool:
        try:
            slow.begin_step(1)
        except DeviceError as error:
            refusals.append(str(error))
            return False
        return True

    until(begins)
    slow.abort("the end")
    assert set(refusals) <= {busy}
    within(WATCHDOG, slow.close)


def test_several_services_in_one_process(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama")
    workers = [cpu_worker(gguf, "exact", share) for share in (0.1, 0.5, 0.9)]
    expected = [ask(one, 0, inputs(2)) for one in workers]
    for one in workers:
        one.begin_step(2)
        one.submit(0, inputs(2))
    for one, rows in zip(workers, expected, strict=True):
        np.testing.assert_array_equal(one.collect(0).numpy(), rows)
        one.end_step()
    workers[0].close()
    np.testing.assert_array_equal(ask(workers[1], 0, inputs(2)), expected[1])


@pytest.mark.parametrize("n_threads", [1, 2])
def test_many_random_steps(tmp_path: Path, n_threads: int) -> None:
    cold = cpu_worker(write(tmp_path, "opt", T.Q8_0), "predicted", n_threads=n_threads)
    rng = np.random.default_rng(n_threads)
    known: dict[tuple[int, int, int], np.ndarray] = {}
    seen = 0

    def steps() -> None:
        nonlocal seen
        for _ in range(300):
            n, seed = int(rng.integers(1, 4)), int(rng.integers(3))
            broken = rng.random() < 0.1
            try:
                with cold.step(n):
                    for layer in LAYERS:
                        cold.submit(layer, inputs(n, seed), random_bits(n, seed=seed))
                        if broken and rng.random() < 0.5:
                            raise ZeroDivisionError
                        rows = cold.collect(layer).numpy()
                        expected = known.setdefault((layer, n, seed), rows)
                        np.testing.assert_array_equal(rows, expected)
                        seen += 1
            except ZeroDivisionError:
                pass

    within(WATCHDOG, steps)
    assert seen > 400


# ---- streams: the fake executes requests in order, on its own thread


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    made = FakeCuda()
    yield made
    made.close()


def on_stream(tmp_path: Path, fake: FakeCuda, kind: str, **options: Any) -> CpuOffload:
    return cpu_worker(write(tmp_path, "llama"), "predicted", kind=kind, driver=fake, **options)


@pytest.mark.parametrize("kind", ["memops", "hostfunc"])
def test_a_captured_step_is_replayed(tmp_path: Path, fake: FakeCuda, kind: str) -> None:
    direct, streamed = cpu_worker(write(tmp_path, "llama"), "predicted"), on_stream(tmp_path, fake, kind)
    h, bits = inputs(2), random_bits(2)
    out: list[torch.Tensor] = []

    def work() -> None:
        for layer in LAYERS:
            streamed.submit(layer, h, bits)
            out.append(streamed.collect(layer))

    graph = fake.capture(work)
    for seed in range(20):
        h.copy_(inputs(2, seed))
        bits.copy_(random_bits(2, seed=seed))
        with streamed.step(2):
            fake.replay(graph)
        for layer in LAYERS:
            np.testing.assert_array_equal(out[layer].numpy(), ask(direct, layer, h, bits))
    within(WATCHDOG, streamed.close)
    assert not fake.registered


def test_memory_operations_are_constant_and_in_order(tmp_path: Path, fake: FakeCuda) -> None:
    streamed = on_stream(tmp_path, fake, "memops")
    h, bits = inputs(1), random_bits(1)

    def work() -> None:
        for layer in LAYERS:
            streamed.submit(layer, h, bits)
            streamed.collect(layer)

    fake.capture(work)
    done = 64  # a cache line after the requests
    expected = []
    for i in range(2):
        expected += ["copy", "copy", f"write {4 * i} 1"]
        expected += [f"wait {done + 4 * i} 1", f"write {done + 4 * i} 0", "copy"]
    assert fake.log == expected
    within(WATCHDOG, streamed.close)


@pytest.mark.parametrize("kind", ["memops", "hostfunc"])
def test_a_stream_that_waits_is_released(tmp_path: Path, fake: FakeCuda, kind: str) -> None:
    streamed = on_stream(tmp_path, fake, kind)
    h, bits = inputs(1), random_bits(1)

    in_step = threading.Event()

    def wait_for_nothing() -> None:
        with streamed.step(1):
            in_step.set()
            streamed.collect(0)

    when(in_step, lambda: streamed.cancel("someone pulled the plug"))
    with pytest.raises(DeviceError, match="someone pulled the plug"):
        within(WATCHDOG, wait_for_nothing)
    fake.fails_at = "wait" if kind == "memops" else "copy"
    with pytest.raises(RuntimeError, match="failed"):
        within(WATCHDOG, lambda: ask(streamed, 0, h, bits))
    fake.fails_at = None
    direct = cpu_worker(write(tmp_path, "llama"), "predicted")
    with streamed.step(1):
        streamed.submit(0, h, bits)
        out = streamed.collect(0)
    np.testing.assert_array_equal(out.numpy(), ask(direct, 0, h, bits))
    within(WATCHDOG, streamed.close)


def test_a_replay_after_the_step_was_given_up_does_not_hang(tmp_path: Path, fake: FakeCuda) -> None:
    streamed = on_stream(tmp_path, fake, "memops")
    h, bits = inputs(1), random_bits(1)
    graph = fake.capture(lambda: [(streamed.submit(i, h, bits), streamed.collect(i)) for i in LAYERS])

    def work() -> None:
        streamed.begin_step(1)
        streamed._native.poison("the CPU worker failed")
        for _ in range(3):
            fake.replay(graph)
        streamed.end_step()

    with pytest.raises(DeviceError, match="given up: the CPU worker failed"):
        within(WATCHDOG, work)
    with streamed.step(1):
        fake.replay(graph)
    within(WATCHDOG, streamed.close)


def test_a_device_that_cannot_be_waited_for_ends_the_service(tmp_path: Path, fake: FakeCuda) -> None:
    streamed = on_stream(tmp_path, fake, "memops")

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"), streamed.step(1):
        fake.synchronize = broken  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match=r"cpu failed in an earlier step; start again \(an illegal"):
        streamed.begin_step(1)
    within(WATCHDOG, streamed.close)
