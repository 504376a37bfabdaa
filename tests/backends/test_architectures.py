"""Every architecture compared with transformers: a tiny model with random parameters gives the same logits.

Each recipe of `tiny_models.RECIPES` is written as GGUF in F32. Every backend runs it as a whole prompt, in
chunks, token by token, and mixed with other sequences. Prompts are longer than the sliding windows (24) and
the original contexts (32) of the recipes, and need several KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, batch, cpu_backend, tokens
from transformers_oracle import (
    BACKENDS,
    LENGTHS,
    PLANS,
    RECIPES,
    TOLERANCE,
    open_backend,
    recipe,
    relative_error,
    run,
    tiny_models,
)

import hotset
from hotset.backends.base import BLOCK_SIZE, Backend
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

pytest.importorskip("transformers")

__all__ = ["recipe"]  # the fixture


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, recipe: Any) -> Iterator[Backend]:
    backend = open_backend(request.param, recipe[0])
    yield backend
    backend.close()


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan == "mixed" else pytest.mark.slow) for plan in PLANS]
)
def test_logits_match_transformers(recipe: Any, backend: Backend, plan: str) -> None:
    _, sequences, expected = recipe
    found = run(backend, sequences, PLANS[plan])
    for i in range(len(sequences)):
        assert relative_error(found[i], expected[i]) < TOLERANCE, f"sequence {i}"


@pytest.mark.parametrize("name", ["gemma3-relu", "phi3-relu", "granite-relu"])
def test_neurons_that_are_zero_are_left_out(tmp_path: Path, name: str) -> None:
    """Compare skipped neurons with dense, behind norms and scales, and with gate and up in one matrix."""
    recipe = tiny_models.RECIPES[name]
    path = tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)
    ids = np.random.default_rng(0).integers(0, tiny_models.VOCABULARY, 50)
    found = {}
    for mode in ("dense", "exact", "svd"):
        how = {"predictor": "svd:96"} if mode == "svd" else {"sparsity": mode}
        with hotset.load(path, device="cpu", n_threads=2, n_ctx=128, **how) as model:
            found[mode] = model.logits(ids.tolist())
            stats = model.backend.stats()
            assert stats is not None
            assert 0 < stats.active.sum() < 0.9 * stats.selected.sum() or mode == "svd"
    assert np.array_equal(found["dense"], found["exact"])
    assert relative_error(found["svd"], found["dense"]) < 0.5


@pytest.mark.parametrize(
    "name",
    ["gemma2-caps", "gemma3n-widths", "gpt-oss", "deepseek2-lite", "refact-odd-heads", "nomic-bert"],
    ids=["soft cap", "shared layers", "sinks", "MLA", "ALiBi", "encoder"],
)
def test_a_q4_0_cache_of_every_kind_of_attention(name: str, run_folder: Path) -> None:
    """Compare each operation over a transformed cache with the reference, and the logits without taps."""
    heads = tiny_models.HEADS_OF_32.get(name, tiny_models.THREE_HEADS if name == "nomic-bert" else {})
    with open_gguf(tiny_models.shared_gguf(name, run_folder, **heads)) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        ids, splits = tokens(80), [] if graph.is_encoder else [70, 71]
        backend = cpu_backend(gguf, graph, n_blocks=2, max_batch=80, n_threads=2, kv_type="q4_0")
        assert_every_operation_is_right(gguf, graph, backend, ids, splits, [1, 0])
        step = batch([(ids, 0, [0, 1])])
        plain = backend.step(step).logits.copy()
        tapped = backend.step(replace(step, taps=tuple(value.name for value in graph.values))).logits
        np.testing.assert_array_equal(plain, tapped)
        backend.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "granitemoe", "qwen3next"])
def test_experts_of_a_checkpoint_may_be_in_one_tensor(tmp_path: Path, name: str) -> None:
    """Convert a checkpoint with one tensor for all experts, and one with a tensor for each expert."""
    recipe, files = RECIPES[name], {}
    model = tiny_models.build(recipe)
    for form in (True, False):
        folder = tmp_path / str(form)
        tiny_models.save(recipe, model, folder, save_original_format=form)
        files[form] = tmp_path / f"{form}.gguf"
        convert_hf(folder, files[form], "q8_0")
    with open_gguf(files[True]) as one, open_gguf(files[False]) as other:
        assert one.tensors["blk.0.ffn_up_exps.weight"].type == GGMLType.Q8_0
        assert one.tensors["blk.0.ffn_gate_inp.weight"].type == GGMLType.F32
        assert one.tensors.keys() == other.tensors.keys()
        for tensor in one.tensors:
            np.testing.assert_array_equal(one.data(tensor), other.data(tensor))


def test_a_checkpoint_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe, folder = RECIPES["mixtral"], tmp_path / "checkpoint"
    tiny_models.save(recipe, tiny_models.build(recipe), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    whole = tensors.pop(name)
    for more, message in (
        ({}, r"blk\.1\.ffn_up_exps\.weight of 4 experts, not of 5"),
        ({name: whole[:-1]}, "shapes that differ in the checkpoint"),
        ({name: whole, name.replace(".3.", ".7."): whole}, "experts"),
    ):
        save_file(tensors | {k: v.clone() for k, v in more.items()}, folder / "model.safetensors")
        with pytest.raises(FormatError, match=message):
            convert_hf(folder, tmp_path / "m.gguf", "f32")


@pytest.mark.parametrize(
    ("name", "entry"), [("qwen3moe", {"mlp_only_layers": [1]}), ("qwen2moe", {"decoder_sparse_step": 2})]
)
def test_layers_without_experts_between_others_are_refused(tmp_path: Path, name: str, entry: dict) -> None:
    recipe = replace(RECIPES[name], written_as=entry)
    with pytest.raises(UnsupportedModelError, match=next(iter(entry))):
        tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)


def test_prompts_cross_windows_contexts_and_blocks() -> None:
    assert LENGTHS[0] > 2 * BLOCK_SIZE
    assert min(LENGTHS) > max(tiny_models.ROPE_ORIGINAL, 24)


def test_two_rotations_are_each_layers_own_where_they_are_seen(tmp_path: Path) -> None:
    """Check a fully tapped step, which applies the rotation that attention applies otherwise."""
    recipe = tiny_models.RECIPES["gemma3-pattern"]
    with open_gguf(tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        with closing(cpu_backend(gguf, graph, n_blocks=1, max_batch=40, n_threads=1)) as backend:
            assert_every_operation_is_right(gguf, graph, backend, tokens(40), [], [0])
