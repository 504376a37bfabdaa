"""Gemma 3n, in addition to the tests of every architecture: streams, shared keys and values, refused keys."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, batch, cpu_backend, tokens
from tiny_gguf import with_other_keys

import hotset
from hotset import _core
from hotset.cli import models
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.operations import Attention

tiny_models = pytest.importorskip("tiny_models")


@pytest.fixture(params=["gemma3n", "gemma3n-widths", "gemma3n-unshared"])
def path(request: pytest.FixtureRequest, run_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(tiny_models.shared_gguf(request.param, run_folder).read_bytes())
    return copy


def test_every_operation_is_the_references(path: Path) -> None:
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        for isa in _core.available_isas():
            with closing(cpu_backend(gguf, graph, n_blocks=2, max_batch=80, n_threads=2, isa=isa)) as backend:
                assert_every_operation_is_right(gguf, graph, backend, tokens(70), [40, 41], [1, 0])
                found = [
                    backend.step(batch([(tokens(70), 0, [1, 0])], taps)).logits.copy()
                    for taps in ((), tuple(value.name for value in graph.values))
                ]
                np.testing.assert_array_equal(*found)


def test_shared_keys_and_values_take_no_memory(path: Path) -> None:
    with open_gguf(path) as gguf:
        config = config_from_gguf(gguf)
        graph = describe(config, gguf.tensors)
    own = [layer.source is None for layer in config.layers]
    for op in graph.ops:
        if isinstance(op, Attention) and op.source is not None:
            assert own[op.source]
            assert (op.window == 0) == (config.layers[op.source].window == 0)
    cost = Cost(graph, gguf.tensors)
    of_layer = 2 * 2 * config.n_head_kv * config.head_dim
    assert cost.kv_bytes_per_token("f16") == sum(own) * of_layer
    assert cost.kv_bytes_read(9, "f16") == config.n_layer * of_layer * 10


def test_a_prefix_that_was_computed_is_shared(path: Path) -> None:
    """Check that the keys and values that the last layers attend to are in the prefix cache too."""
    ids = tokens(140).tolist()
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with hotset.load(path, device="cpu", n_threads=2, n_ctx=256) as model:
        first = list(model.generate(ids, **asked).tokens)
        again = model.generate(ids, **asked)
        assert list(again.tokens) == first
        longer = list(model.generate([*ids[:100], 7, 8, 9], **asked).tokens)
    with hotset.load(path, device="cpu", n_threads=1, n_ctx=256) as model:
        assert list(model.generate([*ids[:100], 7, 8, 9], **asked).tokens) == longer


def test_what_is_shown(run_folder: Path) -> None:
    path = tiny_models.shared_gguf("gemma3n", run_folder)
    with open_gguf(path) as gguf:
        facts = models.describe(gguf, path)
    assert facts["activation"] == "gelu_tanh, in 3 of the layers behind a Gaussian top-k"


def changed(path: Path, **keys: Any) -> GGUFFile:
    """Return the file with other keys; None removes a key."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return with_other_keys(path, path.with_name("changed.gguf"), given)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"altup__active_idx": 1}, UnsupportedModelError, "active_idx is not 0"),
        ({"activation_sparsity_scale": None}, FormatError, "activation_sparsity_scale is missing"),
        ({"attention__shared_kv_layers": 99}, FormatError, "shared_kv_layers is 99"),
        ({"altup__num_inputs": 1}, FormatError, "num_inputs is 1"),
    ],
)
def test_keys_that_are_refused(
    run_folder: Path, tmp_path: Path, keys: dict[str, Any], error: type[Exception], message: str
) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(tiny_models.shared_gguf("gemma3n", run_folder).read_bytes())
    with changed(copy, **keys) as gguf, pytest.raises(error, match=message):
        config_from_gguf(gguf)


def test_layers_without_an_own_kind_are_refused(run_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(tiny_models.shared_gguf("gemma3n", run_folder).read_bytes())
    # Only the fifth of seven layers has no window; if six share, it has no other to share with.
    message = "leaves no layer whose keys and values are shared"
    with changed(copy, attention__shared_kv_layers=6) as gguf, pytest.raises(FormatError, match=message):
        config_from_gguf(gguf)


def test_multipliers_follow_the_shares(run_folder: Path) -> None:
    with open_gguf(tiny_models.shared_gguf("gemma3n", run_folder)) as gguf:
        found = [layer.activation.top_k for layer in config_from_gguf(gguf).layers]
        assert found[0] == pytest.approx(1.6448536)
        assert found[3:] == [None] * 4
        values = gguf.metadata["gemma3n.activation_sparsity_scale"]
        assert list(values)[3:] == [-math.inf] * 4


def test_a_token_without_an_own_embedding_has_the_first(run_folder: Path) -> None:
    """Check sizes as in transformers; files of llama.cpp's converter, padded with zeros, run too."""
    with open_gguf(tiny_models.shared_gguf("gemma3n-widths", run_folder)) as gguf:
        info = gguf.tensors["per_layer_token_embd.weight"]
        assert info.type == GGMLType.F32
        rows = np.array(gguf.data(info.name)).view(np.float32).reshape(info.shape[::-1])
        np.testing.assert_array_equal(rows[300:], np.repeat(rows[:1], len(rows) - 300, axis=0))
        assert not np.array_equal(rows[1], rows[0])


def test_tensors_of_layers_that_share_may_be_there(run_folder: Path, tmp_path: Path) -> None:
    """Check tensors that llama.cpp requires in every file but never reads."""
    with open_gguf(tiny_models.shared_gguf("gemma3n", run_folder)) as gguf:
        config = config_from_gguf(gguf)
        more = {
            f"blk.{i}.{name}.weight": gguf.tensors[f"blk.0.{name}.weight"]
            for i, layer in enumerate(config.layers)
            for name in ("attn_k", "attn_v", "attn_k_norm")
            if layer.source is not None
        }
        assert more
        assert not more.keys() & gguf.tensors.keys()
        named = {name: replace(info, name=name) for name, info in more.items()}
        describe(config, dict(gguf.tensors) | named)
