"""What every backend guarantees, alone and next to the CPU: each test runs for each kind of conforming.py.

The other files test the kernels and the peculiarities of one backend.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import N_VOCAB, batch, logits_of, tokens
from conforming import KINDS, Kind, Make
from tiny_gguf import write_llama
from waiting import until

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.reference import ReferenceBackend
from hotset.errors import InvalidRequestError, StepCancelledError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

IDS, BLOCKS = tokens(150), [3, 1, 6]
QUANTISED = {"attn_v": GGMLType.Q8_0, "ffn_down": GGMLType.Q4_1, "output": GGMLType.F16}


def types_of(name: str) -> GGMLType:
    return QUANTISED.get(name.split(".")[-1], GGMLType.Q4_0)


@pytest.fixture(scope="module", params=["floats", "blocks"])
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    """Yield a model of float32, and one of several types in blocks."""
    types = {} if request.param == "floats" else {"type_of": types_of}
    with open_gguf(write_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_ctx=512, **types)) as opened:
        yield opened


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def make(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Yield a function that opens a backend; they are closed at the end, twice."""
    made: list[Any] = []
    with kind.opened(monkeypatch, tmp_path / "home") as plain:

        def opened(*given: Any, **options: Any) -> Any:
            made.append(plain(*given, **options))
            return made[-1]

        yield opened
        for _ in range(2):
            for backend in made:
                backend.close()
        made.clear()


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
def test_rows_depend_only_on_their_tokens(gguf: GGUFFile, kind: Kind, make: Make, kv_type: str) -> None:
    """Check splits of a prompt, neighbours, blocks in any order, and a prefix that two sequences share."""
    if not kind.computes(kv_type):
        with pytest.raises(UnsupportedModelError, match=f"a {kv_type} cache|KV cache: .* {kv_type} "):
            make(gguf, kv_type=kv_type)
        return
    others, more = tokens(40, seed=1), tokens(9, seed=2)
    backend = make(gguf, kv_type=kv_type)
    expected = logits_of(backend, IDS, [], BLOCKS)
    tolerance = 1e-4 if kv_type == "f32" else 3e-2  # a cache may round to the other neighbour
    if kv_type != "q4_0":  # whose codes are far apart
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        reference = ReferenceBackend(gguf, graph, n_blocks=8, kv_type=kv_type)  # type: ignore[arg-type]
        of_reference = logits_of(reference, IDS, [], BLOCKS)
        assert np.abs(expected - of_reference).max() < 3e-2 * np.abs(of_reference).max()
    for splits in ([64], [1, 2, 40, 66, 69, 149]):
        kind.same(logits_of(backend, IDS, splits, [0, 2, 5]), expected, tolerance)
    mixed = [
        backend.step(batch([(others[:20], 0, [4]), (IDS[:33], 0, [0, 7])])).logits[20:].copy(),
        backend.step(batch([(IDS[33:34], 33, [0, 7]), (others[20:21], 20, [4])])).logits[:1].copy(),
        backend.step(batch([(others[21:22], 21, [4]), (IDS[34:70], 34, [0, 7])])).logits[1:].copy(),
    ]
    kind.same(np.concatenate(mixed), expected[:70], tolerance)
    n = 2 * BLOCK_SIZE
    both = backend.step(batch([(IDS[n:], n, [3, 1, 7]), (more, n, [3, 1, 4])])).logits.copy()
    kind.same(both[: len(IDS) - n], expected[n:], tolerance)
    alone = logits_of(backend, np.concatenate([IDS[:n], more]), [], [0, 2, 5])
    kind.same(both[len(IDS) - n :], alone[n:], tolerance)


def test_logits_of_the_wanted_rows(gguf: GGUFFile, kind: Kind, make: Make) -> None:
    backend, step = make(gguf), batch([(IDS[:75], 0, [0, 1])])  # more rows than a device computes at once
    expected = backend.step(step).logits.copy()
    for wanted in ([74], [3, 50, 74], []):
        found = backend.step(replace(step, outputs=np.array(wanted, np.int32))).logits
        assert found.shape == (len(wanted), N_VOCAB)
        kind.same(found, expected[wanted])
    found = backend.step(batch([(IDS[75:80], 75, [0, 1])])).logits.copy()  # steps without rows fill the cache
    kind.same(found, logits_of(backend, IDS[:80], [], [2, 3])[75:])


def test_taps_are_the_references_and_change_no_logit(gguf: GGUFFile, kind: Kind, make: Make) -> None:
    backend, graph = make(gguf), describe(config_from_gguf(gguf), gguf.tensors)
    names = tuple(op.out.name for op in graph.primitives)[:-1]
    has_blocks = gguf.tensors["token_embd.weight"].type != GGMLType.F32
    tolerance = 5e-2 if has_blocks else 2e-4  # some backends round inputs of their products to eight bits
    plain = backend.step(batch([(IDS[:30], 0, [1])])).logits.copy()
    expected = ReferenceBackend(gguf, graph, n_blocks=2).step(batch([(IDS[:30], 0, [1])], names)).taps
    for some in (names, *((name,) for name in names[::9])):
        tapped = backend.step(batch([(IDS[:30], 0, [1])], some))
        kind.same(tapped.logits, plain)
        assert set(tapped.taps) == set(some)
        for name in some:
            off = np.abs(tapped.taps[name] - expected[name]).max()
            assert off < tolerance * np.abs(expected[name]).max(), name
    with pytest.raises(InvalidRequestError, match="no value named 'nothing'"):
        backend.step(batch([(IDS[:3], 0, [1])], ("nothing",)))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [0, 1, N_VOCAB]}, "outside the vocabulary"),
    ({"tokens": [0, 1, -1]}, "outside the vocabulary"),
    ({"positions": [0, 1]}, "differ in length"),
    ({"positions": [-1, 0, 1]}, "position -1"),
    ({"positions": [0, 1, 3 * BLOCK_SIZE]}, "position 192"),
    ({"sequences": [0, 0, 1]}, "block table"),
    ({"sequences": [-1, 0, 0]}, "block table"),
    ({"block_tables": [[-1, 0, 1]]}, "no KV block"),
    ({"block_tables": [[8, 0, 1]]}, "no KV block"),
    ({"outputs": [3]}, "output index"),
    ({"tokens": [], "positions": [], "sequences": [], "outputs": []}, "1 to 160 tokens, not 0"),
]


def test_a_broken_batch_is_refused_and_the_next_one_is_right(gguf: GGUFFile, kind: Kind, make: Make) -> None:
    backend, right = make(gguf), batch([(IDS[:3], 0, [2, 0, 1])])
    expected = backend.step(right).logits.copy()
    arrays = ("tokens", "positions", "sequences", "block_tables", "outputs")
    for changed, message in BROKEN:
        given = {name: np.array(changed.get(name, getattr(right, name)), np.int32) for name in arrays}
        with pytest.raises(InvalidRequestError, match=message):
            backend.step(Batch(**given))
    kind.same(backend.step(right).logits, expected)


def test_a_cancelled_step_can_be_taken_again(gguf: GGUFFile, kind: Kind, make: Make) -> None:
    if kind.name == "reference":
        pytest.skip("its steps end by themselves")
    backend, stop = make(gguf), threading.Event()
    backend.cancel()  # has no effect without a running step
    expected = logits_of(backend, IDS, [], BLOCKS)

    def cancel() -> None:
        while not stop.wait(0.0005):
            backend.cancel()

    def is_cancelled() -> bool:
        try:
            backend.step(batch([(IDS, 0, BLOCKS)]))
        except StepCancelledError:
            return True
        return False

    canceller = threading.Thread(target=cancel)
    canceller.start()
    try:
        until(is_cancelled)
    finally:
        stop.set()
        canceller.join()
    kind.same(logits_of(backend, IDS, [64], BLOCKS), expected)
