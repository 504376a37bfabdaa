"""Prompts of MoE models read an expert's matrix once per tile of pairs of a token and the expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import batch, logits_of, tokens
from cases import quick_are
from expert_models import FORMS, model
from vulkan_runs import assert_every_operation_is_right, stage_of, validated, vulkan

from hotset import _core
from hotset.backends.vulkan.devices import find_device
from hotset.backends.vulkan.kernels import Recorder, VulkanKernels
from hotset.backends.vulkan.shapes import TOKENS_OF_FEW
from hotset.backends.vulkan.steps import TILE, n_tiles

__all__ = ["validated"]  # the fixture
NONE = 0xFFFFFFFF
PRODUCTS = "rounded_few", "rounded_many", "linear_few", "linear_many"


def grouped(experts: np.ndarray, n_experts: int, most: int) -> np.ndarray:
    """Group pairs on a device: the tiles, uint32 [tiles, 1 + most]. experts: int [n, n_used], -1 for none."""
    device = _core.VulkanDevice(find_device("vulkan").index, True)
    recorder, (n, n_used) = Recorder(VulkanKernels(device)), experts.shape
    route = np.zeros((n, 2 * n_used + 3), np.float32)
    route[:, :n_used] = experts
    tiles = n_tiles(experts.size, n_experts, most)
    given = device.allocate(route.nbytes, "to_device")
    out = device.allocate(4 * (tiles * (most + 1) + n_experts), "from_device")
    given.write(0, route.reshape(-1).view(np.uint8))
    bindings = [(given, 0, given.size, False), (out, 0, out.size, True)]
    recorder.add("group", [most], bindings, (n, n_used, route.shape[1], n_experts, tiles), (1, 1, 1))
    recorder.program.finish()
    _core.vulkan_run([recorder.program], _core.VulkanCancel())
    found = out.read(0, out.size).view(np.uint32)
    return found[: tiles * (most + 1)].reshape(tiles, most + 1)


@pytest.mark.parametrize("most", [TOKENS_OF_FEW, TILE])
@pytest.mark.parametrize(
    ("n", "n_used", "n_experts", "share"),
    [(5, 2, 3, 1.0), (100, 4, 9, 0.7), (70, 8, 600, 1.0), (40, 1, 1, 1.0), (9, 3, 4, 0.0)],
)
def test_each_pair_is_in_a_tile_of_its_expert(
    n: int, n_used: int, n_experts: int, share: float, most: int
) -> None:
    """Check the tiles: no pair is lost or doubled, and only the last tile of an expert has room."""
    rng = np.random.default_rng(n)
    experts = np.argsort(rng.random((n, n_experts)), axis=1)[:, :n_used]
    experts[rng.random(experts.shape) >= share] = -1
    tiles = grouped(experts, n_experts, most)
    used = tiles[tiles[:, 0] != NONE]
    assert (tiles[len(used) :] == NONE).all()
    assert len(used) == sum(-(-int(n_pairs) // most) for n_pairs in np.bincount(experts[experts >= 0]))
    for expert, *pairs in used.tolist():
        own = [pair for pair in pairs if pair != NONE]
        assert pairs[: len(own)] == own
        assert (experts.reshape(-1)[own] == expert).all()
    found = used[:, 1:][used[:, 1:] != NONE]
    assert np.array_equal(np.sort(found), np.flatnonzero(experts.reshape(-1) >= 0))


@pytest.mark.parametrize(
    "form", quick_are(("mixed", "halves"), ("mixed", "halves", "biased", "floats and blocks", "relu", "many"))
)
def test_grouped_pairs_have_the_same_bits(tmp_path: Path, form: str) -> None:
    """Compare steps of few and of many tokens with single tokens, and each value with the reference."""
    with model(tmp_path, n_layer=1, **FORMS[form]) as gguf:
        backend, ids = vulkan(gguf), tokens(76)
        expected = logits_of(backend, ids, range(1, 76), [3, 1])
        assert np.array_equal(logits_of(backend, ids, [], [3, 1]), expected)
        assert np.array_equal(logits_of(backend, ids, [5, 13, 40], [3, 1]), expected)
        compiled = stage_of(backend).opened.kernels.compiled
        kernels = {key[0] for key in compiled if key[0] in PRODUCTS and key[2] > 1 and key[3] > 0}  # type: ignore[operator]
        many = {"halves": {"linear_few", "linear_many"}, "many": {"rounded_few"}}
        assert kernels == many.get(form, {"rounded_few", "rounded_many"})
        assert_every_operation_is_right(gguf, backend, ids, [5], [3, 1])
        backend.close()


def test_workgroups_that_read_matrices_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the matrices that gate, up and down read in a step of one token, and in a prompt."""
    recorded: list[tuple[str, str, int]] = []
    add = Recorder.add

    def counted(self: Recorder, name: str, *arguments: Any, **named: Any) -> None:
        recorded.append((name, self.operation.split(".")[-1], arguments[3][1]))
        add(self, name, *arguments, **named)

    monkeypatch.setattr(Recorder, "add", counted)
    with model(tmp_path, n_layer=1) as gguf:  # three of nine experts
        backend = vulkan(gguf)
        for n, n_matrices, n_groupings in ((1, 3, 0), (80, 16, 1)):  # 240 pairs in at most 16 tiles
            recorded.clear()
            backend.step(batch([(tokens(n), 0, [3, 1])]))
            products = {of: matrices for name, of, matrices in recorded if name in PRODUCTS}
            assert [products[of] for of in ("ffn_gate", "ffn_up", "ffn_down")] == [n_matrices] * 3
            assert sum(name == "group" for name, *_ in recorded) == n_groupings
        backend.close()
