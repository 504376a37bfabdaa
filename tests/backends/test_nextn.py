"""Layers for multi-token prediction (MTP), compared with a layer of transformers between the same matrices.

transformers' classes leave these layers out. Here the last layer of a model becomes one: in the file through
a key and extra tensors, in transformers as the only layer of a model that receives its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import BLOCKS, batch, cpu_backend

from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import NEXTN_INPUT, describe, describe_nextn

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
nextn_models = pytest.importorskip("nextn_models")
tiny_models = pytest.importorskip("tiny_models")

D, N_TOKENS = tiny_models.SHAPE["hidden_size"], 40
Nextn = Any  # nextn_models.Nextn


@pytest.fixture(params=[*nextn_models.MODELS, "glm4moe, own matrices"])
def nextn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nextn]:
    name, _, own = request.param.partition(", ")
    found = nextn_models.made(tmp_path, name, own_matrices=bool(own))
    yield found
    found.gguf.close()


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def expected(
    model: Any,
    around: dict[str, np.ndarray],
    embedding: np.ndarray,
    eps: float,
    tokens: np.ndarray,
    hidden: Any,
) -> np.ndarray:
    """Return the logits after each token, by the published formula. hidden: the states before the tokens."""
    both = [rms(embedding[tokens], around["enorm"], eps), rms(hidden, around["hnorm"], eps)]
    x = torch.from_numpy((np.concatenate(both, axis=1) @ around["eh_proj"].T).astype(np.float32))
    with torch.no_grad():
        return model(inputs_embeds=x[None], use_cache=False).logits[0].numpy()


def test_attention_and_experts_of_nemotron(tmp_path: Path) -> None:
    """Check two layers in one, with a last norm that subtracts the mean, as the converter writes them."""
    path, model, around, embedding = nextn_models.made_nemotron(tmp_path)
    draw = np.random.default_rng(2)
    tokens = draw.integers(0, 300, N_TOKENS).astype(np.int32)
    hidden = draw.standard_normal((N_TOKENS, D)).astype(np.float32)
    wanted = expected(model, around, embedding, model.config.layer_norm_epsilon, tokens, hidden)
    with open_gguf(path) as gguf:
        backend = backend_of(gguf, n_threads=2)
        found = backend.run(batch([(tokens, 1, [0])]), hidden).copy()
        backend.close()
        plain = reference_of(gguf).step(batch([(tokens, 1, [0])]), hidden).logits
    for rows in (found, plain):
        assert np.abs(rows - wanted).max() / np.abs(wanted).max() < 1e-4


def backend_of(gguf: GGUFFile, **options: Any) -> CpuBackend:
    graph = describe_nextn(config_from_gguf(gguf), gguf.tensors)
    return cpu_backend(gguf, graph, n_blocks=BLOCKS, max_batch=64, kv_type="f32", **options)


def reference_of(gguf: GGUFFile) -> ReferenceBackend:
    return ReferenceBackend(gguf, describe_nextn(config_from_gguf(gguf), gguf.tensors), n_blocks=BLOCKS)


def test_logits_equal_a_layer_of_transformers(nextn: Nextn) -> None:
    """Compare a layer after the model's own hidden states: whole, in chunks, with a neighbour, by threads."""
    config = config_from_gguf(nextn.gguf)
    tokens = np.random.default_rng(2).integers(0, tiny_models.VOCABULARY, N_TOKENS + 1).astype(np.int32)
    trunk = cpu_backend(
        nextn.gguf, describe(config, nextn.gguf.tensors), n_blocks=BLOCKS, max_batch=64, n_threads=2
    )
    step = batch([(tokens[:-1], 0, [0])], (NEXTN_INPUT,)).with_states_of_rows(0)
    hidden, behind = trunk.step(step).taps[NEXTN_INPUT].copy(), tokens[1:]
    trunk.close()
    eps = nextn.model.config.rms_norm_eps
    wanted = expected(nextn.model, nextn.around, nextn.embedding, eps, behind, hidden)

    found = []
    for n_threads, splits in ((1, []), (2, [7, 8, 30])):
        backend, rows = backend_of(nextn.gguf, n_threads=n_threads), []
        for first, last in zip([0, *splits], [*splits, N_TOKENS], strict=True):
            part = batch([(behind[first:last], first + 1, [0])])
            rows.append(backend.run(part, hidden[first:last]).copy())
        found.append(np.concatenate(rows))
        if n_threads == 2:  # a token of another sequence precedes
            beside = batch([(behind[5:6], 1, [1]), (behind, 1, [2])])
            both = backend.run(beside, np.concatenate([hidden[3:4], hidden]))
            found.append(both[1:].copy())
        backend.close()
    plain = reference_of(nextn.gguf).step(batch([(behind, 1, [0])]), hidden).logits
    for rows in (found[0], plain):
        assert np.abs(rows - wanted).max() / np.abs(wanted).max() < 1e-4
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_first_position_is_not_attended(tmp_path: Path) -> None:
    found = nextn_models.made(tmp_path, "glm4moe", own_matrices=False)
    draw = np.random.default_rng(2)
    tokens = draw.integers(0, tiny_models.VOCABULARY, 3).astype(np.int32)
    hidden = draw.standard_normal((3, D)).astype(np.float32)
    with found.gguf as gguf:
        backend = backend_of(gguf, n_threads=1)
        alone = backend.run(batch([(tokens[1:], 1, [0])]), hidden[1:]).copy()
        backend.run(batch([(tokens, 0, [1])]), hidden)
        np.testing.assert_array_equal(backend.run(batch([(tokens[1:], 1, [1])]), hidden[1:]), alone)
        backend.close()


def test_a_model_reads_nothing_of_the_layer(tmp_path: Path) -> None:
    found = nextn_models.made(tmp_path, "glm4moe", own_matrices=False)
    with found.gguf as gguf:
        config = config_from_gguf(gguf)
        assert config.n_layer == 2
        read = {w.name for op in describe(config, gguf.tensors).primitives for w in op.weights_read}
        assert not [name for name in read if name.startswith("blk.2.")]
        own = {w.name for op in describe_nextn(config, gguf.tensors).primitives for w in op.weights_read}
        assert {name for name in gguf.tensors if name.startswith("blk.2.")} <= own
        assert {name for name in own if not name.startswith("blk.2.")} == {
            "token_embd.weight", "output.weight"
        }  # fmt: skip
        with pytest.raises(UnsupportedModelError, match="has 1 layers for multi-token prediction"):
            describe_nextn(config, gguf.tensors, 1)
        odd = dict(gguf.tensors) | {"blk.2.nextn.other.weight": gguf.tensors["blk.2.nextn.enorm.weight"]}
        with pytest.raises(UnsupportedModelError, match=r"unknown tensors, such as blk\.2\.nextn\.other"):
            describe_nextn(config, odd)
