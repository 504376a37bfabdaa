"""Models that must compute the same although their files differ, for cases that no other library covers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu, tokens
from tiny_gguf import write_llama, write_relu

from hotset.backends.base import Backend
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

IDS = tokens(30)
RNG = np.random.default_rng(4)


def reference(gguf: GGUFFile) -> Backend:
    return ReferenceBackend(gguf, describe(config_from_gguf(gguf), gguf.tensors), n_blocks=2)


backends = pytest.mark.parametrize("backend", [reference, lambda gguf: cpu(gguf, n_blocks=2, kv_type="f32")])


def logits(gguf: GGUFFile, backend: Callable[[GGUFFile], Backend]) -> np.ndarray:
    return backend(gguf).step(batch([(IDS, 0, [1])])).logits.copy()


def matrices(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of an F32 file: name → values, outermost dimension first."""
    with open_gguf(path) as gguf:
        return {
            t.name: gguf.data(t.name).view(np.float32).reshape(t.shape[::-1]).copy()
            for t in gguf.tensors.values()
        }


def rewritten(source: Path, out: Path, tensors: dict[str, np.ndarray], **keys: int) -> GGUFFile:
    with open_gguf(source) as gguf:
        writer = GGUFWriter(out, gguf.architecture)
        for key, value in keys.items():
            writer.add(f"{gguf.architecture}.{key.replace('__', '.')}", value)
        copy_metadata(gguf, writer)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32), GGMLType.F32)
    writer.write()
    return open_gguf(out)


@backends
def test_a_value_head_of_another_width(backend: Callable[[GGUFFile], Backend], tmp_path: Path) -> None:
    """Check that zero channels of v change nothing, whatever attn_output has for them."""
    path = write_llama(tmp_path / "m.gguf", n_head=4, n_head_kv=2, head_dim=16)
    expected = logits(open_gguf(path), backend)
    wide = matrices(path)
    for i in range(2):
        v, out = wide[f"blk.{i}.attn_v.weight"], wide[f"blk.{i}.attn_output.weight"]
        padded = np.zeros((2, 24, 64), np.float32)
        padded[:, :16] = v.reshape(2, 16, 64)
        wide[f"blk.{i}.attn_v.weight"] = padded.reshape(48, 64)
        reads = RNG.standard_normal((64, 4, 24)).astype(np.float32)
        reads[:, :, :16] = out.reshape(64, 4, 16)
        wide[f"blk.{i}.attn_output.weight"] = reads.reshape(64, 96)
    found = rewritten(path, tmp_path / "wide.gguf", wide, attention__value_length=24)
    assert config_from_gguf(found).head_dim_v == 24
    np.testing.assert_allclose(logits(found, backend), expected, rtol=1e-4, atol=1e-4)


@backends
def test_the_bias_of_a_fused_qkv_goes_to_its_parts(
    backend: Callable[[GGUFFile], Backend], tmp_path: Path
) -> None:
    path = write_relu(tmp_path / "m.gguf", "falcon", dialect="gguf")
    fused = matrices(path)
    split = dict(fused)
    for i in range(2):
        weight, bias = fused[f"blk.{i}.attn_qkv.weight"], RNG.standard_normal(128).astype(np.float32)
        fused[f"blk.{i}.attn_qkv.bias"] = bias
        del split[f"blk.{i}.attn_qkv.weight"]
        for name, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
            split[f"blk.{i}.attn_{name}.weight"] = weight[rows]
            split[f"blk.{i}.attn_{name}.bias"] = bias[rows]
    expected = logits(rewritten(path, tmp_path / "split.gguf", split), backend)
    found = logits(rewritten(path, tmp_path / "fused.gguf", fused), backend)
    np.testing.assert_array_equal(found, expected)
    assert not np.allclose(logits(open_gguf(path), backend), expected, atol=1e-2)


@backends
def test_positions_of_opt_begin_at_its_third_row(
    backend: Callable[[GGUFFile], Backend], tmp_path: Path
) -> None:
    """Check that the first two rows are never read, and that each position has its own row."""
    path = write_relu(tmp_path / "m.gguf", "opt", dialect="gguf", n_ctx=64)
    model = matrices(path)
    expected = logits(open_gguf(path), backend)
    rows = model["position_embd.weight"]
    unread = rows.copy()
    unread[:2] = 1e3
    unread[2 + len(IDS) :] = 1e3
    found = rewritten(path, tmp_path / "unread.gguf", {**model, "position_embd.weight": unread})
    np.testing.assert_array_equal(logits(found, backend), expected)
    for at in (0, len(IDS) - 1):
        changed = rows.copy()
        changed[2 + at] += 1
        found = rewritten(path, tmp_path / "changed.gguf", {**model, "position_embd.weight": changed})
        differs = (logits(found, backend) != expected).any(axis=1)
        assert differs.tolist() == [i >= at for i in range(len(IDS))]
