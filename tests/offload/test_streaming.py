"""Weights that do not fit: which ones stay, and equal bits whichever ones stream (csrc/store/stream.h)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, cpu, cpu_backend, logits_of, mixed_types, tokens
from expert_models import FORMS
from expert_models import model as write_experts
from stored_weights import BLOCKS, failures_of, graph_of, streaming
from tiny_gguf import write_llama
from waiting import WATCHDOG

from hotset import _core
from hotset.errors import ReadError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.offload.streaming import Piece, arrange, least_for, pieces_of
from hotset.offload.weight_store import Use, share_out, sizes_of


def dense(tmp_path: Path, **options: Any) -> GGUFFile:
    """Write a model without zeros, so that every step needs all weights."""
    path = tmp_path / "dense.gguf"
    return open_gguf(write_llama(path, n_embd=256, n_ff=288, head_dim=64, type_of=mixed_types, **options))


@pytest.mark.parametrize("ring", [False, _core.ring_allowed()])
def test_a_dense_model_gives_the_same_bits_in_any_memory(tmp_path: Path, ring: bool) -> None:
    """Stream any share of the weights, for a prompt in one step and token by token.

    The ring continues from one step to the next.
    """
    gguf, ids = dense(tmp_path, n_layer=3), tokens(20)
    expected = logits_of(cpu(gguf, n_blocks=8), ids, [], BLOCKS)
    streamed = []
    for share in (0.0, 0.1, 0.3, 0.6, 0.9, 1.0):
        backend, weights = streaming(gguf, share, ring=ring)
        for splits in (list(range(1, 20)), [], [7]):
            np.testing.assert_array_equal(logits_of(backend, ids, splits, BLOCKS), expected)
        streamed.append(weights.shares.streamed)
        assert (weights.counts().bytes_streamed > 0) == (streamed[-1] > 0)
        assert weights.resident.nbytes <= weights.shares.resident + 64
        backend.close()
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[0] > 2 * streamed[-2] > streamed[-1] == 0


def test_streamed_weights_are_read_once_per_step(tmp_path: Path) -> None:
    gguf = dense(tmp_path, n_layer=3)
    backend, weights = streaming(gguf, 0.3)
    read = []
    for step in (batch([(tokens(1), 0, BLOCKS)]), batch([(tokens(60), 0, BLOCKS)])) * 2:
        backend.step(step)
        read.append(weights.counts().bytes_streamed)
    each = set(np.diff(read).tolist())
    assert len(each) == 1  # the same for one token and for sixty
    assert weights.shares.streamed <= each.pop() < weights.shares.streamed + 30 * 8192


@pytest.mark.parametrize("form", FORMS)
def test_moe_streams_experts_that_the_router_omits(tmp_path: Path, form: str) -> None:
    """Stream attention and shared experts, also in a plan with every tap."""
    gguf, ids = write_experts(tmp_path, **FORMS[form]), tokens(20)
    graph = graph_of(gguf)
    whole = cpu_backend(gguf, graph, n_blocks=8, max_batch=128, n_threads=2)
    expected = logits_of(whole, ids, [], BLOCKS)
    backend, weights = streaming(gguf, 0.0)
    assert weights.shares.streamed > 0
    for splits in (list(range(1, 20)), []):
        np.testing.assert_array_equal(logits_of(backend, ids, splits, BLOCKS), expected)
    names = tuple(value.name for value in graph.values)
    for step in (batch([(ids, 0, BLOCKS)], names), batch([(ids, 0, BLOCKS)])):
        mine, others = backend.step(step), whole.step(step)
        np.testing.assert_array_equal(mine.logits, others.logits)
        for name in mine.taps:
            np.testing.assert_array_equal(mine.taps[name], others.taps[name])


def test_faults_end_a_step_and_the_next_is_right(tmp_path: Path) -> None:
    gguf, ids = dense(tmp_path, n_layer=2), tokens(40)
    expected = logits_of(cpu(gguf, n_blocks=8), ids, [], BLOCKS)
    assert failures_of(*streaming(gguf, 0.1), 0.02, ids, expected) > 5


def test_a_child_streams_by_itself(tmp_path: Path) -> None:
    """Fork while the parent's reads are running."""
    gguf, step = dense(tmp_path, n_layer=2), batch([(tokens(3), 0, BLOCKS)])
    backend, _ = streaming(gguf, 0.1)
    expected = backend.step(step).logits.copy()
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(backend.step(step).logits, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(backend.step(step).logits, expected)


def test_changed_file_gives_one_message(tmp_path: Path) -> None:
    gguf, step = dense(tmp_path, n_layer=2), batch([(tokens(3), 0, BLOCKS)])
    backend, _ = streaming(gguf, 0.1)
    backend.step(step)
    with gguf.path.open("r+b") as file:
        file.truncate(gguf.path.stat().st_size // 2)
    for _ in range(2):
        with pytest.raises(ReadError, match="changed while it was in use"):
            backend.step(step)


def test_weights_read_twice_stay(tmp_path: Path) -> None:
    """Use a tied embedding in the first and the last operation; vectors are decoded once."""
    for tied in (False, True):
        gguf = dense(tmp_path, tied=tied)
        names = {name for piece in pieces_of(graph_of(gguf), gguf.tensors, ()) for name in piece.names}
        assert ("output.weight" in names) is not tied
        assert "token_embd.weight" not in names
        assert {"blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= names
        assert not any("norm" in name for name in names)
        gguf.close()


def test_the_largest_stay_and_the_others_stream_everywhere() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 60, rng.integers(1, 30)) * 64
        pieces = [Piece((str(i),), int(n), int(n) + 8) for i, n in enumerate(sizes)]
        n_bytes = int(rng.integers(least_for(pieces), sizes.sum() + 100))
        found = arrange(pieces, n_bytes)
        kept = sum(piece.nbytes for piece, stays in zip(pieces, found.stays, strict=True) if stays)
        streams = [piece.room for piece, stays in zip(pieces, found.stays, strict=True) if not stays]
        assert kept + found.ring <= n_bytes
        assert found.ring >= max(streams, default=0) * (2 if least_for(pieces, 2) <= n_bytes else 1)
    equal = [Piece((str(i),), 64, 64) for i in range(40)]
    stays = arrange(equal, 22 * 64).stays  # two of them are the ring
    assert sum(stays) == 20
    assert all(7 <= sum(stays[i : i + 16]) <= 9 for i in range(25))


def test_rows_have_little_where_weights_stream(tmp_path: Path) -> None:
    """Check the shares of rows: small if weights stream, otherwise all the remaining bytes."""
    gguf = write_experts(tmp_path, **next(iter(FORMS.values())))
    sizes = sizes_of(graph_of(gguf), gguf.tensors, Use(sparse=False))
    for n_bytes in range(sizes.least_of_all, sizes.resident + sizes.most + 1, 997):
        shares = share_out(sizes, n_bytes)
        assert shares.rows >= sizes.least
        assert shares.resident + shares.streaming.ring + shares.rows <= n_bytes
        assert shares.streamed == 0 or shares.rows < sizes.least + sizes.most / 8
        again = share_out(sizes, shares.resident + shares.streaming.ring + shares.rows)
        assert again == shares  # building uses the planned total


def test_a_process_that_closes_nothing_ends_in_silence(tmp_path: Path) -> None:
    """Check that nothing is reported as a leak: native code holds the arrays that hold streamed weights."""
    dense(tmp_path, n_layer=2).close()
    program = f"""
import hotset
from hotset.placement import ram
ram.own_memory, ram.PROGRAM = (lambda: 0), 0
for budget in range(1, 100):
    try:
        model = hotset.load({str(tmp_path / "dense.gguf")!r}, n_ctx=64, max_batch=4, ram_budget=budget / 2048)
        break
    except hotset.HotsetError:
        pass
print(model.ram.streamed > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WATCHDOG)
    assert (done.stdout, done.stderr) == ("True\n", "")
