"""Layers for multi-token prediction (MTP), compared with a layer of transformers between the same matrices.

transformers' classes leave these layers out. Here the last layer of a model is made one: in the file by a key
and the tensors around it, in transformers as the only layer of a model that is given its input.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import PAGES, batch

from hotset.backends.cpu.backend import CpuBackend
from hotset.convert.hf import convert_hf
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import NEXTN_INPUT, describe, describe_nextn

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")

D, N_TOKENS = tiny_models.SHAPE["hidden_size"], 40
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Recipe → settings, and whether the checkpoint's norms are less one.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "glm4moe": ({"num_hidden_layers": 3}, False),
    "deepseek2-v3": ({"num_hidden_layers": 3}, False),
    "qwen3next": (ALTERNATING, True),
    "qwen35": (ALTERNATING, True),
}


@dataclass
class Nextn:
    """A file with such a layer, the model of transformers that is it alone, and the tensors around it."""

    gguf: GGUFFile
    model: Any
    around: dict[str, np.ndarray]
    embedding: np.ndarray


def with_nextn(path: Path, out: Path, around: dict[str, np.ndarray]) -> None:
    """The file with its last layer made one for multi-token prediction."""
    with open_gguf(path) as gguf:
        writer, name = GGUFWriter(out, gguf.architecture), gguf.architecture
        copy_metadata(gguf, writer)
        writer.add(f"{name}.nextn_predict_layers", 1)
        for info in gguf.tensors.values():
            writer.add_tensor(info.name, gguf.data(info.name), info.type, info.shape)
        last = int(gguf.metadata[f"{name}.block_count"]) - 1
        for stem, values in around.items():
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            writer.add_tensor(f"blk.{last}.nextn.{stem}.weight", data, GGMLType.F32, values.shape[::-1])
        writer.write()


def made(folder: Path, name: str, *, own_matrices: bool) -> Nextn:
    settings, less_one = MODELS[name]
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    model = tiny_models.build(recipe, **settings)
    draw = np.random.default_rng(1).standard_normal
    around = {stem: (1 + 0.3 * draw(D)).astype(np.float32) for stem in ("enorm", "hnorm", "shared_head_norm")}
    around["eh_proj"] = (draw((D, 2 * D)) / (2 * D) ** 0.5).astype(np.float32)
    if own_matrices:
        shape = tiny_models.VOCABULARY, D
        around |= {stem: draw(shape).astype(np.float32) for stem in ("embed_tokens", "shared_head_head")}
    with_nextn(tiny_models.to_gguf(recipe, model, folder), folder / "nextn.gguf", around)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    model.model.layers = model.model.layers[-1:]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 1
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = model.model.config.layer_types = ["full_attention"]
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.from_numpy(around["shared_head_norm"] - np.float32(less_one)))
        if own_matrices:
            model.lm_head.weight.copy_(torch.from_numpy(around["shared_head_head"]))
            embedding = around["embed_tokens"]
    return Nextn(open_gguf(folder / "nextn.gguf"), model, around, embedding)


@pytest.fixture(params=[*MODELS, "glm4moe, own matrices"])
def nextn(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Nextn]:
    name, _, own = request.param.partition(", ")
    found = made(tmp_path, name, own_matrices=bool(own))
    yield found
    found.gguf.close()


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def expected(nextn: Nextn, tokens: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    eps, around = nextn.model.config.rms_norm_eps, nextn.around
    both = [rms(nextn.embedding[tokens], around["enorm"], eps), rms(hidden, around["hnorm"], eps)]
    x = torch.from_numpy((np.concatenate(both, axis=1) @ around["eh_proj"].T).astype(np.float32))
    with torch.no_grad():
        return nextn.model(inputs_embeds=x[None], use_cache=False).logits[0].numpy()


def test_attention_and_experts_of_nemotron(tmp_path: Path) -> None:
    """Two layers of the model are one, and the last norm has a mean; as the converter writes it."""
    from safetensors.torch import load_file, save_file

    recipe = tiny_models.EXPERTS["nemotron-h-moe-latent"]
    parts = ["moe", "full_attention", "linear_attention", "full_attention", "moe"]
    model = tiny_models.build(recipe, layers_block_type=parts, num_hidden_layers=5)
    folder = tmp_path / "checkpoint"
    tiny_models.save(recipe, model, folder)
    renamed = {
        re.sub(r"^backbone\.layers\.([34])\.", lambda match: f"mtp.layers.{int(match[1]) - 3}.", name): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    draw = np.random.default_rng(1).standard_normal
    around = {stem: (1 + 0.3 * draw(D)).astype(np.float32) for stem in ("enorm", "hnorm", "final_layernorm")}
    around["eh_proj"] = (draw((D, 2 * D)) / (2 * D) ** 0.5).astype(np.float32)
    of = {stem: f"mtp.layers.{int(stem == 'final_layernorm')}.{stem}.weight" for stem in around}
    save_file(
        renamed | {of[stem]: torch.from_numpy(values) for stem, values in around.items()},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"layers_block_type": parts[:3], "num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    convert_hf(folder, tmp_path / "model.gguf", "f32")

    embedding = model.model.embeddings.weight.detach().numpy()
    model.model.layers = model.model.layers[-2:]
    model.model.norm_f = torch.nn.LayerNorm(D, model.config.layer_norm_epsilon, bias=False)
    with torch.no_grad():
        model.model.norm_f.weight.copy_(torch.from_numpy(around["final_layernorm"]))
    tokens, hidden = np.random.default_rng(2).integers(0, 300, N_TOKENS).astype(np.int32), draw((N_TOKENS, D))
    hidden, eps = hidden.astype(np.float32), model.config.layer_norm_epsilon
    both = [rms(embedding[tokens], around["enorm"], eps), rms(hidden, around["hnorm"], eps)]
    x = torch.from_numpy((np.concatenate(both, axis=1) @ around["eh_proj"].T).astype(np.float32))
    with torch.no_grad():
        wanted = model(inputs_embeds=x[None], use_cache=False).logits[0].numpy()
    with open_gguf(tmp_path / "model.gguf") as gguf:
        backend = backend_of(gguf, n_threads=2)
        found = backend.run(batch([(tokens, 0, [0])]), hidden).copy()
        backend.close()
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 1e-4


def backend_of(gguf: GGUFFile, **options: Any) -> CpuBackend:
    graph = describe_nextn(config_from_gguf(gguf), gguf.tensors)
    return CpuBackend(gguf, graph, n_pages=PAGES, max_batch=64, kv_type="f32", **options)


def test_logits_are_those_of_a_layer_of_transformers(nextn: Nextn) -> None:
    """Behind the model's own hidden states; whole, chunk by chunk, beside another, by any threads."""
    config = config_from_gguf(nextn.gguf)
    tokens = np.random.default_rng(2).integers(0, tiny_models.VOCABULARY, N_TOKENS + 1).astype(np.int32)
    trunk = CpuBackend(
        nextn.gguf, describe(config, nextn.gguf.tensors), n_pages=PAGES, max_batch=64, n_threads=2
    )
    step = batch([(tokens[:-1], 0, [0])], (NEXTN_INPUT,)).with_states_of_rows(0)
    hidden, behind = trunk.step(step).taps[NEXTN_INPUT].copy(), tokens[1:]
    trunk.close()
    wanted = expected(nextn, behind, hidden)

    found = []
    for n_threads, splits in ((1, []), (2, [7, 8, 30])):
        backend, rows = backend_of(nextn.gguf, n_threads=n_threads), []
        for first, last in zip([0, *splits], [*splits, N_TOKENS], strict=True):
            part = batch([(behind[first:last], first, [0])])
            rows.append(backend.run(part, hidden[first:last]).copy())
        found.append(np.concatenate(rows))
        if n_threads == 2:  # a token of another sequence comes first
            beside = batch([(behind[5:6], 0, [1]), (behind, 0, [2])])
            both = backend.run(beside, np.concatenate([hidden[3:4], hidden]))
            found.append(both[1:].copy())
        backend.close()
    error = np.abs(found[0] - wanted).max() / np.abs(wanted).max()
    assert error < 1e-4
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_a_model_reads_nothing_of_the_layer(tmp_path: Path) -> None:
    found = made(tmp_path, "glm4moe", own_matrices=False)
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
        with pytest.raises(UnsupportedModelError, match=r"not known, such as blk\.2\.nextn\.other"):
            describe_nextn(config, odd)
