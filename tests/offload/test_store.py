"""Reads that bypass the page cache, and stored rows (csrc/store/)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu_backend, logits_of, tokens
from cases import quick_if
from expert_models import FORMS
from expert_models import model as write_experts
from fresh_python import run_python
from sparse_runs import ONE_BY_ONE, cpu, prepared, write
from stored_weights import BLOCKS, failures_of, stored

from hotset import _core
from hotset.errors import InvalidRequestError, OutOfMemoryError, ReadError
from hotset.formats.quants import GGMLType
from hotset.offload import weight_store as stored_module
from hotset.offload.weight_store import StoredWeights, Use, embeddings_of

KINDS = [False, pytest.param(True, marks=pytest.mark.skipif(not _core.ring_allowed(), reason="no io_uring"))]


@pytest.fixture
def bytes_(tmp_path: Path) -> np.ndarray:
    """Write a random file of a little more than 3 MB to `tmp_path`/data, and return its bytes."""
    made = np.random.default_rng(0).integers(0, 256, (3 << 20) + 1234, np.uint8)
    (tmp_path / "data").write_bytes(made.tobytes())
    return made


@pytest.mark.parametrize("ring", KINDS)
@pytest.mark.parametrize("depth", [1, 16])
def test_pieces_come_as_they_stand(tmp_path: Path, bytes_: np.ndarray, ring: bool, depth: int) -> None:
    rng = np.random.default_rng(1)
    reader = _core.Reader(ring, depth)
    first = rng.integers(0, len(bytes_) - 1, 40)
    pieces = [(int(a), np.zeros(rng.integers(1, len(bytes_) - a + 1), np.uint8)) for a in first]
    pieces += [(0, np.zeros(len(bytes_), np.uint8)), (len(bytes_) - 1, np.zeros(1, np.uint8))]
    reader.read(str(tmp_path / "data"), pieces)
    for offset, piece in pieces:
        assert np.array_equal(piece, bytes_[offset : offset + len(piece)])


@pytest.mark.parametrize("ring", KINDS)
def test_fault_gives_one_message_and_the_next_read_works(
    tmp_path: Path, bytes_: np.ndarray, ring: bool
) -> None:
    """Check that reads that fail, return fewer bytes or find the end never give wrong bytes."""
    reader, path = _core.Reader(ring, 4), str(tmp_path / "data")
    reader.inject_faults(0.05, 3)
    right, messages = 0, []
    for i in range(200):
        piece = np.zeros(100_000, np.uint8)
        try:
            reader.read(path, [(i * 4321, piece)])
            assert np.array_equal(piece, bytes_[i * 4321 : i * 4321 + len(piece)])
            right += 1
        except ReadError as error:
            messages.append(str(error))
    assert right > 100
    assert len(messages) > 3
    assert all(path in message for message in messages)
    reader.inject_faults(0, 0)
    reader.read(path, [(0, piece)])
    assert np.array_equal(piece, bytes_[: len(piece)])


@pytest.mark.parametrize("ring", KINDS)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_short_reads_are_continued(tmp_path: Path, bytes_: np.ndarray, ring: bool, share: float) -> None:
    """Shorten reads at any byte, as POSIX allows: whole pages, inside a page, at the end of the file."""
    reader, path = _core.Reader(ring, 4), str(tmp_path / "data")
    reader.inject_faults(share, 11, short_only=True)
    for first, size in ((0, len(bytes_)), (4321, 100_000), (5000, 10), (len(bytes_) - 1300, 1300)):
        piece = np.zeros(size, np.uint8)
        reader.read(path, [(first, piece)])
        assert np.array_equal(piece, bytes_[first : first + size])


def test_files_that_are_not_there_or_too_short(tmp_path: Path, bytes_: np.ndarray) -> None:
    reader = _core.Reader(False, 2)
    with pytest.raises(ReadError, match=r"(?i)nothing cannot be read: no such file"):
        reader.read(str(tmp_path / "nothing"), [(0, np.zeros(1, np.uint8))])
    with pytest.raises(ValueError, match="past its end"):
        reader.read(str(tmp_path / "data"), [(len(bytes_), np.zeros(1, np.uint8))])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not copied on this system")
@pytest.mark.parametrize("ring", KINDS)
def test_a_child_reads_with_threads_of_its_own(tmp_path: Path, bytes_: np.ndarray, ring: bool) -> None:
    reader, piece = _core.Reader(ring, 2), np.zeros(5000, np.uint8)
    reader.read(str(tmp_path / "data"), [(7, piece)])
    piece[:] = 0
    child = os.fork()
    if child == 0:
        reader.read(str(tmp_path / "data"), [(7, piece)])
        os._exit(0 if np.array_equal(piece, bytes_[7:5007]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rows_are_copied_for_devices(tmp_path: Path, bytes_: np.ndarray) -> None:
    """Use a group in which only 20 of 44 rows are ever requested: it has 20 slots."""
    path, runtime = str(tmp_path / "data"), _core.Runtime(1)
    store = _core.RowStore(_core.Reader(False, 4), 0, 64)
    parts = [(path, 1000, 300, 300), (path, 20_000, 70_000, 70_000)]  # the second too large to copy
    group = store.group(44, parts, 4, 20, 20)
    assert store.most_bytes == 20 * _core.RowStore.slot_bytes_of([300, 70_000])
    store.allocate(store.most_bytes)
    assert store.is_whole
    assert store.n_slots(group) == 20
    asked = np.arange(3, 43, 2, dtype=np.int32)
    for rows, n_misses in ((asked[:5], 5), (asked[3:9], 9), (asked, 20), (asked[::3], 20)):
        small, large = store.copy(group, np.ascontiguousarray(rows), runtime)
        for i, row in enumerate(rows):
            at = 1000 + 300 * int(row), 20_000 + 70_000 * int(row)
            assert np.array_equal(small[300 * i :][:300], bytes_[at[0] :][:300])
            assert np.array_equal(large[70_000 * i :][:70_000], bytes_[at[1] :][:70_000])
        assert store.counts()[1] == n_misses
    assert store.peek(group, 4, 0, runtime) is None
    there = store.peek(group, 5, 1, runtime)
    assert there is not None
    assert np.array_equal(there, bytes_[20_000 + 70_000 * 5 :][:70_000])
    assert store.counts()[0] == 2 + 9 + 7  # a peek counts as no request
    for wrong in ([0, 0], [5, 3], [44], list(range(21))):
        with pytest.raises(ValueError, match=r"rows must rise|than one fetch may have"):
            store.copy(group, np.array(wrong, np.int32))
    runtime.close()


# ---- a model whose rows are read when they are needed


# Only anonymous memory counts: the system may drop pages of files and libraries at any moment.
TOUCHED = r"""
import re, sys, time
from pathlib import Path
import numpy as np
from hotset import _core

def anonymous_bytes():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

path, n_rows, row, is_given = sys.argv[1], *map(int, sys.argv[2:])
store = _core.RowStore(_core.Reader(False, 2), 0, 64)
store.group(n_rows, [(path, 0, row, row)], 8, 8)
store.allocate(n_rows * row // 2)
before = is_given and anonymous_bytes()
store.touch_ahead()
store.preload(0, np.arange(8, dtype=np.int32))
assert store.counts()[1] == 0  # nothing was requested
until = time.monotonic() + 30
while is_given and anonymous_bytes() - before < n_rows * row * 0.4:
    assert time.monotonic() < until, "the memory was never given"
    time.sleep(0.01)
for i, expected in enumerate(np.fromfile(path, np.uint8, 8 * row).reshape(8, row)):
    assert np.array_equal(store.peek(0, i, 0), expected)
del store  # which ends the thread wherever it is
"""


def test_memory_is_given_before_it_is_needed(tmp_path: Path) -> None:
    """Allocate memory ahead, if the system can, while rows arrive: the rows must stay unchanged.

    This runs in a new process. Here malloc may reuse a block of an earlier test whose memory is already
    allocated.
    """
    n_rows, row = 8192, 16 << 10
    np.random.default_rng(2).integers(0, 256, (8, row), np.uint8).tofile(tmp_path / "rows")
    os.truncate(tmp_path / "rows", n_rows * row)
    store = _core.RowStore(_core.Reader(False, 2), 0, 64)
    store.group(n_rows, [(str(tmp_path / "rows"), 0, row, row)], 8, 8)
    with pytest.raises(ValueError, match="has no memory yet"):
        store.touch_ahead()
    kernel = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) if sys.platform == "linux" else ()
    is_given = kernel >= (5, 14)
    done = run_python(TOUCHED, tmp_path / "rows", n_rows, row, int(is_given))
    assert done.returncode == 0, done.stderr
    if not is_given:
        pytest.skip("this system gives memory when it is used")


TYPES = [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0]


@pytest.mark.parametrize(
    ("dialect", "model", "type_"),
    quick_if(
        lambda dialect, model, type_: model == "bamboo" or type_ == GGMLType.Q4_0,
        ["powerinfer", "gguf"], ["llama", "bamboo", "opt", "falcon-40b"], TYPES,
    ),
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_any_budget_gives_the_same_bits(tmp_path: Path, model: str, type_: GGMLType, dialect: str) -> None:
    """Compare the modes dense and exact, with the prompt in one step and token by token."""
    gguf = write(tmp_path, model, type_, dialect=dialect)
    ids, blocks = tokens(24), [2, 0]
    ready, graph = prepared(gguf, "dense")
    expected = logits_of(
        cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2), ids, [], blocks
    )
    whole = cpu(gguf, "exact")
    logits_of(whole, ids, ONE_BY_ONE, blocks)
    for mode in ("dense", "exact"):
        for share in (0.0, 0.4, 1.0):
            backend, weights = stored(gguf, mode, share)
            for splits in ([], ONE_BY_ONE):
                np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)
            if mode == "exact":  # over resident and newly read rows together
                for name in ("selected", "active", "gate_rows"):
                    mine, theirs = (getattr(one.stats(), name) for one in (backend, whole))
                    np.testing.assert_array_equal(mine, theirs)
            counts = weights.counts()
            assert (counts.misses > 0) == (counts.bytes_read > 0) == (share < 1)  # a whole one is read first
            assert counts.hits > 0 or share == 0  # with share 0, weights stream and few rows stay
            backend.close()


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_input_major_down_matrix_has_no_rows_of_neurons(tmp_path: Path, model: str) -> None:
    """Use a square matrix, whose shape does not show the order of its rows."""
    gguf = write(tmp_path, model, GGMLType.Q8_0, dialect="gguf", n_ff=64)
    ready, graph = prepared(gguf, "dense")
    whole = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2)
    backend, _ = stored(gguf, "dense", 0.5)
    ids = tokens(24)
    np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), logits_of(whole, ids, [], [2]))


@pytest.mark.parametrize("ring", KINDS)
@pytest.mark.parametrize("model", ["llama", "opt"])
def test_predictor_decides_the_read_rows(tmp_path: Path, model: str, ring: bool) -> None:
    gguf = write(tmp_path, model, GGMLType.Q4_0)
    ids, blocks = tokens(24), [2, 0]
    ready, graph = prepared(gguf, "predicted", "svd")
    whole = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2, sparse=True)
    for share in (0.0, 0.3, 1.0):
        backend, weights = stored(gguf, "predicted", share, predictor="svd", ring=ring)
        for splits in (ONE_BY_ONE, []):
            np.testing.assert_array_equal(
                logits_of(backend, ids, splits, blocks), logits_of(whole, ids, splits, blocks)
            )
            mine, theirs = backend.stats(), whole.stats()
            assert mine is not None
            assert theirs is not None
            np.testing.assert_array_equal(mine.selected, theirs.selected)
            np.testing.assert_array_equal(mine.active, theirs.active)
        counts = weights.counts()
        assert (counts.misses == 0) == (share == 1.0)  # all was read at first
        assert counts.hits > 0 or share == 0.0


@pytest.mark.parametrize("form", FORMS)
def test_experts_come_as_the_router_names_them(tmp_path: Path, form: str) -> None:
    gguf = write_experts(tmp_path, **FORMS[form])
    ids, blocks = tokens(40), [2, 0]
    ready, graph = prepared(gguf, "dense")
    whole = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2)
    expected = logits_of(whole, ids, [], blocks)
    for share in (0.0, 0.4, 1.0):
        backend, weights = stored(gguf, "dense", share)
        for splits in (ONE_BY_ONE, []):
            np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)
        assert (weights.counts().misses > 0) == (share < 1)  # else all is read at first
    names = tuple(value.name for value in graph.values)
    step = batch([(ids, 0, blocks)], names)
    taps, others = backend.step(step).taps, whole.step(step).taps
    for name in names:
        np.testing.assert_array_equal(taps[name], others[name])


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_a_step_that_needs_more_than_usual_borrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Borrow slots of other layers, whose rows are then read again: a prompt, then tokens, twice."""
    monkeypatch.setattr(stored_module, "USUAL_SHARE", 0.0)
    monkeypatch.setattr(stored_module, "USUAL_LEAST", 40)
    gguf = write(tmp_path, "llama", GGMLType.Q8_0, ranks=(32, 64, 32))
    predictor = "svd" if mode == "predicted" else None
    ready, graph = prepared(gguf, mode, predictor)
    ids, blocks = tokens(40), [2, 0]
    whole = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2, sparse=True)
    expected = logits_of(whole, ids, [], blocks)
    backend, weights = stored(gguf, mode, 0.6, predictor=predictor)
    assert weights.store is not None
    groups = list(stored_module.groups_of(graph, ready.weights.tensors, sparse=True))
    held = sum(weights.store.n_slots(i) * group.slot_bytes for i, group in enumerate(groups))
    staging = weights.shares.rows - held
    some = [group for group in groups if group.usual < group.n_rows]
    assert some
    if mode == "predicted":  # no group is read whole
        assert staging < min(group.nbytes for group in groups) / 4
    for splits in ([20], list(range(20, 40)), [20]):
        np.testing.assert_array_equal(logits_of(backend, ids, splits, blocks), expected)
    one, missed = batch([(ids[:1], 0, blocks)]), []
    for step in (one, one, one, batch([(ids, 0, blocks)]), one):
        before = weights.store.counts()[1]
        backend.step(step)
        missed.append(weights.store.counts()[1] - before)
    assert mode == "exact" or missed[4] > missed[2]  # the prompt evicted the rows in the borrowed slots
    backend.close()


def test_an_embedding_is_read_by_the_row(tmp_path: Path) -> None:
    """Read rows of the embedding if it does not fit; they count neither as hits nor as misses."""
    gguf = write(tmp_path, "llama", GGMLType.Q4_0)
    ready, graph = prepared(gguf, "exact")
    [embedding] = embeddings_of(graph, ready.weights.tensors, 8)
    assert embedding.names == ("token_embd.weight",)
    assert (embedding.usual, embedding.at_once) == (8, 8) < (embedding.n_rows,) * 2
    ids, splits = tokens(30), [8, 16, 24]
    expected = logits_of(cpu(gguf, "exact"), ids, [], [2])
    for ring in {False, _core.ring_allowed()}:
        backend, weights = stored(gguf, "exact", 0.5, max_batch=8, step=8, ring=ring)
        assert not weights.shares.whole
        np.testing.assert_array_equal(logits_of(backend, ids, splits, [2]), expected)
        assert weights.store is not None
        mine, rows = weights.counts(), weights.store.counts()
        assert (mine.hits, mine.misses) == rows[:2]
        assert 4 * 4096 <= mine.bytes_read - rows[2] <= 2 * 4096 * len(ids)
        backend.close()
    with pytest.raises(ValueError, match="more tokens than the store has room for"):
        stored(gguf, "exact", 0.5, max_batch=9, step=8)
    backend, weights = stored(gguf, "exact", 1.0, step=8)
    assert weights.shares.whole
    np.testing.assert_array_equal(logits_of(backend, ids, [], [2]), expected)
    assert weights.counts().bytes_read == 0


def test_an_embedding_that_is_the_output_stays(tmp_path: Path) -> None:
    gguf = write(tmp_path, "opt", GGMLType.Q8_0)
    ready, graph = prepared(gguf, "exact")
    assert embeddings_of(graph, ready.weights.tensors) == []
    backend, _ = stored(gguf, "exact", 0.3)
    ids = tokens(12)
    np.testing.assert_array_equal(
        logits_of(backend, ids, [5], [2]), logits_of(cpu(gguf, "exact"), ids, [], [2])
    )


def test_gates_first_counts_as_one_operation_does(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama", GGMLType.Q8_0)
    backend, _ = stored(gguf, "exact", 0.5)
    ready, graph = prepared(gguf, "exact")
    whole = cpu_backend(ready.weights, graph, n_blocks=8, max_batch=128, n_threads=2, sparse=True)
    for step in (batch([(tokens(1), 0, [2])]), batch([(tokens(24), 0, [2])])):
        found = []
        for each in (backend, whole):
            each.step(step)
            stats = each.stats()
            assert stats is not None
            found.append([stats.selected, stats.active, stats.gate_rows, stats.down_rows])
        np.testing.assert_array_equal(*found)


def test_impossible_budget_gives_one_message(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama", GGMLType.Q8_0)
    ready, graph = prepared(gguf, "exact")
    with pytest.raises(OutOfMemoryError, match=r"raise the memory budget by"):
        StoredWeights(ready.weights, graph, 1000, Use(sparse=True), reader=_core.Reader(False, 2), gap=0)
    backend, _ = stored(gguf, "exact", 0.5)
    with pytest.raises(InvalidRequestError, match=r"blk\.0\.ffn_gate lies inside an FFN"):
        backend.step(batch([(tokens(1), 0, [2])], taps=("blk.0.ffn_gate",)))
    backend.step(batch([(tokens(1), 0, [2])]))


def test_faults_end_a_step_and_the_next_is_right(tmp_path: Path) -> None:
    """Check that a step with failing reads gives the right bits or a message."""
    gguf = write(tmp_path, "llama", GGMLType.Q4_0)
    ids = tokens(60)
    expected = logits_of(cpu(gguf, "exact"), ids, [], BLOCKS)
    assert failures_of(*stored(gguf, "exact", 0.1), 0.05, ids, expected) > 2


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses writers of a file that is read")
def test_changed_file_gives_one_message(tmp_path: Path) -> None:
    gguf = write(tmp_path, "llama", GGMLType.Q4_0)
    backend, _ = stored(gguf, "exact", 0.1)
    backend.step(batch([(tokens(1), 0, [2])]))
    with gguf.path.open("r+b") as file:
        file.truncate(gguf.path.stat().st_size // 2)
    with pytest.raises(ReadError, match="changed while it was in use"):
        backend.step(batch([(tokens(1), 0, [2])]))
    with pytest.raises(ReadError):
        backend.step(batch([(tokens(1), 0, [2])]))
