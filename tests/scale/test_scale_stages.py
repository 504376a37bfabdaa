"""A model split over machines, in one process: the split, batches in parts, a stage, a lost cache.

Tests that need a cluster are in tests/cluster/, which `make test-scale` runs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import N_VOCAB, batch, cpu_backend, logits_of, tokens
from fake_backend import FakeBackend
from tiny_gguf import write_llama
from waiting import until

pytest.importorskip("hotset._core", reason="the native module is not built")

import hotset
from hotset.backends.base import Batch, StepResult
from hotset.backends.stage import Span
from hotset.engine.engine import Engine
from hotset.engine.sampler import SamplingParams
from hotset.errors import (
    CacheLostError,
    ContextLengthError,
    InvalidRequestError,
    OutOfMemoryError,
    StepCancelledError,
)
from hotset.formats.gguf import open_gguf
from hotset.loader.build import open_model, plan_model
from hotset.loader.decide import Opened
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.scale.links import LOST, Channel, Line, LinkError, new_keys
from hotset.scale.messages import Failed, Message, most_bytes
from hotset.scale.splits import Room, Split, n_pieces, parse_splits, pieces, planned, spans
from hotset.scale.worker import StageWorker
from hotset.settings import LoadSettings
from hotset.sparsity.sidecar import fingerprint

HOST = "127.0.0.1"
N_LAYER = 3
SETTINGS = LoadSettings(n_ctx=128, n_threads=1, max_batch=48, device="cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_layer=N_LAYER, n_embd=64)


# --- the split


def test_stages_are_hosts_and_their_layers():
    assert parse_splits("a:1,b:2", 3) == [Split("a", 1), Split("b", 2)]
    assert parse_splits(" [::1]:3 ", 3) == [Split("[::1]", 3)]
    for wrong in ("", "a", "a:", ":3", "a:0", "a:x", "a:1,", "a:-1,b:4", "a:4", "a:" + "9" * 40):
        with pytest.raises(InvalidRequestError, match="is not a stage: write HOST:LAYERS"):
            parse_splits(wrong, 3)
    with pytest.raises(InvalidRequestError, match="have 2 layers together, and the model has 3"):
        parse_splits("a:1,b:1", 3)


def test_planned_stages_fill_the_quickest_machine_first_and_are_no_more_than_needed():
    rooms = [
        Room("slow", 100, 1.0),
        Room("quick", 25, 4.0),
        Room("near", 25, 2.0, 0.1),
        Room("far", 25, 2.0, 1.0),
    ]
    assert planned([10] * 2, rooms) == [Split("quick", 2)]
    assert planned([10] * 4, rooms) == [Split("quick", 2), Split("near", 2)]
    assert planned([10] * 9, rooms) == [
        Split("quick", 2),
        Split("near", 2),
        Split("far", 2),
        Split("slow", 3),
    ]
    with pytest.raises(OutOfMemoryError, match="needs 300 B, and the machines have room for 175 B"):
        planned([10] * 30, rooms)


# --- batches in pieces


def test_pieces_are_the_batch_and_few_where_it_is_small():
    assert [n_pieces(n, 3) for n in (1, 7, 8, 16, 63, 64, 512)] == [1, 1, 2, 3, 3, 6, 6]
    assert {n_pieces(n, 1) for n in (1, 16, 512)} == {1}
    whole = batch([(tokens(1, 7), 5, [2]), (tokens(9, 8), 0, [3]), (tokens(1, 9), 60, [4])])
    for n in (1, 2, 3, 5):
        parts = pieces(whole, n)
        assert len(parts) == n
        for name in ("tokens", "positions", "sequences"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(one, name) for one in parts]), getattr(whole, name)
            )
        starts = np.cumsum([0, *(len(one.tokens) for one in parts)])
        outputs = [one.outputs + start for one, start in zip(parts, starts[:-1], strict=True)]
        np.testing.assert_array_equal(np.concatenate(outputs), whole.outputs)
        assert all(one.outputs.dtype == np.int32 for one in parts)


# --- stages


class Workers:
    """The stages of a model as their machines have them, in one process: a backend."""

    def __init__(self, path: Path, splits: list[Split], n_blocks: int = 8) -> None:
        gguf = open_gguf(path)
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        self.steps = 0
        self.workers = [StageWorker() for _ in splits]
        self.keys = []
        for worker, span in zip(self.workers, spans(graph, splits), strict=True):
            told = worker.open(
                model=str(path), settings=SETTINGS, release=hotset.__version__, mark=fingerprint(gguf),
                span=Span(*span), n_blocks=n_blocks, counts=False,
            )  # fmt: skip
            assert isinstance(told, dict), told
            self.keys.append(told["key"])
        gguf.close()

    def step(self, whole: Batch) -> StepResult:
        self.steps += 1
        rows: list[Any] = []
        for piece in pieces(whole, n_pieces(len(whole.tokens), len(self.workers))):
            passed: Any = None
            for worker in self.workers:
                passed = worker.run(self.steps, piece, passed)
            rows.append(passed)
        if failed := [one for one in rows if isinstance(one, Failed)]:
            raise failed[0].error()
        return StepResult(np.concatenate(rows))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
            worker.close()


class Linked(Workers):
    """Workers connected like a cluster's: over sockets, each stage with a thread of its own."""

    def __init__(self, path: Path, splits: list[Split], n_blocks: int = 8) -> None:
        super().__init__(path, splits, n_blocks)
        self.link()

    def link(self) -> None:
        keys = new_keys()
        leaves = Channel(keys, self.keys[-1], most_bytes(SETTINGS, 0, N_VOCAB))
        self.line = Line(Channel(keys, self.keys[0], most=0), leaves, HOST)
        before = zip(self.workers, [keys[0], *self.keys], strict=False)
        self.addresses = [worker.listen(HOST, key) for worker, key in before]
        after = zip([*self.addresses[1:], self.line.address], [*self.keys[1:], keys[0]], strict=True)
        for worker, (address, key) in zip(self.workers, after, strict=True):
            assert worker.link(address, key) is None
        self.line.connect(self.addresses[0])

    def step(self, whole: Batch) -> StepResult:
        self.steps += 1
        rows = self.line.step(self.steps, pieces(whole, n_pieces(len(whole.tokens), len(self.workers))))
        if failed := [one for one in rows if isinstance(one, Failed)]:
            raise failed[0].error()
        return StepResult(np.concatenate(rows))

    def close(self) -> None:
        self.line.close()
        super().close()


def stage_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hotset-stage"]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in stage_threads():
        thread.join(30)
    assert not stage_threads()


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("kind", [Workers, Linked])
@pytest.mark.parametrize("counts", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_stages_in_pieces_have_the_bits_of_the_whole(path: Path, counts: list[int], kind: type[Workers]):
    gguf = open_gguf(path)
    whole = cpu_backend(
        gguf, describe(config_from_gguf(gguf), gguf.tensors), n_blocks=8, max_batch=48, n_threads=1
    )
    stages = kind(path, [Split("x", n) for n in counts])
    ids = tokens(40)
    ends = [11, 33, *range(36, 40)]
    np.testing.assert_array_equal(logits_of(stages, ids, ends, [2]), logits_of(whole, ids, ends, [2]))  # type: ignore[arg-type]
    mixed = batch([(tokens(1, 7), 40, [2]), (tokens(3, 8), 0, [5]), (tokens(20, 9), 0, [6])])
    np.testing.assert_array_equal(stages.step(mixed).logits, whole.step(mixed).logits)
    stages.close()
    whole.close()


def test_a_stage_that_was_cancelled_passes_it_on_and_goes_on_with_the_next_step(path: Path):
    stages = Workers(path, [Split("x", 1), Split("y", 2)])
    step = batch([(tokens(20), 0, [0])])
    expected = stages.step(step).logits.copy()
    stages.workers[0].cancel(2)
    stages.workers[1].cancel(1)
    with pytest.raises(StepCancelledError):
        stages.step(step)
    np.testing.assert_array_equal(stages.step(step).logits, expected)
    stages.close()


@pytest.mark.usefixtures("no_thread_is_left")
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_line_that_lost_a_stage_is_over_and_another_one_computes_the_same(path: Path, gone: int):
    stages = Linked(path, [Split("x", 1)] * 3)
    step = batch([(tokens(40), 0, [0])])  # of several pieces
    expected = stages.step(step).logits.copy()
    worker = stages.workers[gone]
    run = worker.run

    def dies(*_: Any) -> Any:
        raise EOFError("as a process that is killed")

    worker.run = dies  # type: ignore[method-assign]
    with pytest.raises(LOST):
        stages.step(step)
    with pytest.raises(LOST):
        stages.step(step)
    worker.run = run  # type: ignore[method-assign]
    stages.link()
    np.testing.assert_array_equal(stages.step(step).logits, expected)
    stages.close()


@pytest.mark.usefixtures("no_thread_is_left")
def test_what_a_line_that_is_over_left_to_compute_is_not_computed(path: Path):
    stages = Linked(path, [Split("x", 1), Split("y", 2)])
    last = stages.workers[1]
    computed, begun, gate = [], threading.Event(), threading.Event()
    run = last._stage.run

    def held(piece: Batch, *more: Any) -> Any:
        begun.set()
        assert gate.wait(30)
        computed.append(len(piece.tokens))
        return run(piece, *more)

    last._stage.run = held  # type: ignore[method-assign]
    for piece in pieces(batch([(tokens(16), 0, [0])]), 2):
        stages.line._enters.send(Message(1, piece, None))
    assert begun.wait(30)  # the first
    stages.line.close()
    last.cancel(1)
    gate.set()
    for thread in stage_threads():
        thread.join(30)
    assert computed == [8]
    stages.close()


@pytest.mark.usefixtures("no_thread_is_left")
def test_a_stage_whose_neighbour_does_not_come_ends_its_start_with_a_message(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    stages = Workers(path, [Split("x", 1), Split("y", 2)])
    monkeypatch.setattr("hotset.scale.worker.START_SECONDS", 0.0)
    first, last = stages.workers
    driver = new_keys()
    first.listen(HOST, driver[0])
    address = last.listen(HOST, new_keys()[0])
    problem = first.link(address, stages.keys[1])
    assert problem == f"the neighbour at {address} did not answer as a member of this line"
    address = last.listen(HOST, stages.keys[0])
    assert first.link(address, stages.keys[1]) is None
    assert until(first.alive) == "a neighbour of this stage did not connect in time"
    stages.close()


@pytest.mark.usefixtures("no_thread_is_left")
def test_an_invalid_message_ends_the_line_with_a_message_and_another_line_works(path: Path):
    stages = Linked(path, [Split("x", 1), Split("y", 2)])
    step = batch([(tokens(5), 0, [4])])
    expected = stages.step(step).logits.copy()
    stages.line._enters._socket.send(b"\x80\4")
    with pytest.raises(LOST):
        stages.step(step)
    told = [worker.alive() for worker in stages.workers]
    assert told == ["a message of a neighbour is invalid", None]
    stages.link()
    np.testing.assert_array_equal(stages.step(step).logits, expected)
    assert [worker.alive() for worker in stages.workers] == [None, None]
    stages.close()


def test_rows_of_another_step_or_piece_are_refused(path: Path):
    stages = Linked(path, [Split("x", 3)])
    step = batch([(tokens(5), 0, [4])])
    (worker,) = stages.workers
    run = worker.run
    worker.run = lambda *given: run(*given)[1:]  # type: ignore[method-assign]
    with pytest.raises(LinkError, match="4 rows of step 1 arrived, where 5 of step 1 are due"):
        stages.step(step)
    stages.close()


def test_what_keeps_a_stage_from_opening_is_a_sentence(path: Path, tmp_path: Path):
    other = write_llama(tmp_path / "m.gguf", n_layer=N_LAYER, n_embd=128)
    how: dict[str, Any] = {
        "settings": SETTINGS, "release": hotset.__version__, "mark": fingerprint(open_gguf(path)),
        "span": Span(0, 1), "n_blocks": 8, "counts": False,
    }  # fmt: skip
    found = StageWorker().open(model=str(other), **how)
    assert isinstance(found, Failed)
    assert isinstance(found.error(), InvalidRequestError)
    assert "differs from the file of the starting machine" in str(found.error())
    older = StageWorker().open(model=str(path), **{**how, "release": "0.0.1"})
    assert isinstance(older, Failed)
    assert "and the machine that asks 0.0.1; install the same version" in str(older.error())
    gone = StageWorker().open(model=str(tmp_path / "gone.gguf"), **how)
    assert isinstance(gone, Failed)
    assert "gone.gguf" in str(gone.error())


def test_splitting_a_model_over_machines_needs_no_memory_for_it(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hotset.loader.build.free_memory", lambda: 1)
    with pytest.raises(OutOfMemoryError, match="a context of 128 tokens needs a cache"):
        plan_model(open_model(path, SETTINGS))
    with warnings.catch_warnings(), closing(open_model(path, SETTINGS).gguf) as gguf:
        warnings.simplefilter("error")
        decided = plan_model(Opened(SETTINGS, gguf, config_from_gguf(gguf), ()), mapped=True)
        assert (decided.n_ctx, decided.ram) == (128, None)
        asked = Opened(replace(SETTINGS, n_ctx=None), gguf, config_from_gguf(gguf), ())
        assert plan_model(asked, mapped=True).n_ctx == decided.config.n_ctx_train


def test_an_error_arrives_as_it_was():
    for error in (StepCancelledError(), ContextLengthError("too long"), OutOfMemoryError("full")):
        found = Failed.of(error).error()
        assert (type(found), str(found)) == (type(error), str(error))
    assert str(Failed.of(KeyError("x")).error()) == "KeyError: 'x'"


# --- a cache that is lost


class Losing(FakeBackend):
    """Forgets all keys and values at some steps, as a machine that died does."""

    lost_at: tuple[int, ...] = ()
    n_steps = 0

    def step(self, batch: Batch) -> StepResult:
        self.n_steps += 1
        if self.n_steps in self.lost_at:
            self.cache[:] = -1
            raise CacheLostError("a machine was lost")
        return super().step(batch)


@pytest.mark.parametrize("lost_at", [(1,), (4,), (6, 7, 20)], ids=str)
def test_what_a_lost_cache_held_is_computed_anew(lost_at: tuple[int, ...]):
    def answers(backend: FakeBackend) -> list[list[int]]:
        engine = Engine(backend, 400, max_sequences=3)
        prompt = list(range(1, 90))
        found = [
            engine.enqueue(
                engine.prepare([*prompt, i], SamplingParams(seed=i, max_tokens=30, ignore_eos=True))
            )
            for i in range(5)
        ]
        while engine.has_work:
            engine.step()
        assert [one.error for one in found] == [None] * 5
        assert engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks
        return [one.generated for one in found]

    backend = Losing()
    backend.lost_at = lost_at
    assert answers(backend) == answers(FakeBackend())
    assert backend.n_steps > max(lost_at)


def test_cancelling_a_stage_from_another_thread_ends_what_it_computes(path: Path):
    stages = Workers(path, [Split("x", 3)])
    worker = stages.workers[0]
    run, begun, gate = worker._stage.run, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        begun.set()
        assert gate.wait(30)
        return run(*args)

    worker._stage.run = held  # type: ignore[method-assign]
    cancelled: list[int] = []
    worker._stage.cancel = lambda: cancelled.append(1)  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: stages.step(batch([(tokens(4), 0, [0])])))
    thread.start()
    assert begun.wait(30)
    worker.cancel(1)
    gate.set()
    thread.join(30)
    assert cancelled == [1]
    stages.close()
