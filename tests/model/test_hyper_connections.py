"""Residual streams that each part of a layer reads, writes and mixes (mHC).

They are compared with transformers' module of DeepSeek V4, by kernel, and with torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from backend_runs import batch, cpu_backend
from derived_bounds import Oracle

from hotset import _core
from hotset.backends.reference import ReferenceBackend
from hotset.backends.torch.graph import TorchGraph
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.graph import Graph
from hotset.model.operations import (
    AddStreams,
    Embed,
    Heads,
    HyperConnection,
    Linear,
    SelectOutputs,
    UnitNorm,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

N_TOKENS, EPS = 23, 1e-5
SHAPES = [(4, 24, 20), (2, 40, 1), (3, 27, 4)]  # streams, width, iterations


def tensors_of(n: int, d: int) -> dict[str, np.ndarray]:
    rng, width = np.random.default_rng(n), n * (n + 2)
    shapes = {
        "x": (N_TOKENS, d), "fn": (width, n * d), "base": (width,), "scale": (3,), "part": (d, d),
        "head_fn": (n, n * d), "head_base": (n,), "head_scale": (1,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def written(path: Path, n: int, d: int) -> GGUFFile:
    writer = GGUFWriter(path / "m.gguf", "none")
    for name, values in tensors_of(n, d).items():
        writer.add_tensor(name, values, GGMLType.F32)
    writer.write()
    return open_gguf(path / "m.gguf")


def graph_of(n: int, d: int, iterations: int) -> Graph:
    """Return a graph of two parts of a layer around one matrix, and the sum of the streams at the end."""
    graph, eps = Graph(), 1e-4
    x = graph.add(Embed(graph.value("embedding", d), "x"))
    x = graph.add(AddStreams(graph.value("streams", n * d), None, x, None, n, 1.0))

    def weights(x: object, name: str, prefix: str, width: int) -> object:
        flat = graph.add(UnitNorm(graph.value(f"{name}_unit", n * d), x, EPS, 1))
        m = graph.add(Linear(graph.value(f"{name}_m", width), flat, f"{prefix}fn"))
        out = graph.value(f"{name}_weights", width)
        return graph.add(HyperConnection(out, m, f"{prefix}scale", f"{prefix}base", n, eps, iterations))

    for name in ("first", "second"):
        w = weights(x, name, "", n * (n + 2))
        read = graph.add(Heads(graph.value(f"{name}_read", n), w, 1))
        write = graph.add(Heads(graph.value(f"{name}_write", n * (n + 1)), w, 1, n))
        given = graph.add(AddStreams(graph.value(f"{name}_in", d), None, x, read, 1))
        y = graph.add(Linear(graph.value(f"{name}_out", d), given, "part"))
        both = graph.add(Heads(graph.value(f"{name}_both", (n + 1) * d), y, 1, 0, x))
        x = graph.add(AddStreams(graph.value(f"{name}_streams", n * d), None, both, write, n))
    read = weights(x, "head", "head_", n)
    x = graph.add(AddStreams(graph.value("sum", d), None, x, read, 1))
    graph.add(SelectOutputs(graph.value("logits", d), x))
    return graph


def step() -> object:
    return batch([(np.arange(N_TOKENS, dtype=np.int32), 0, [0])])


@pytest.mark.parametrize(("n", "d", "iterations"), SHAPES)
def test_the_reference_is_transformers_module(tmp_path: Path, n: int, d: int, iterations: int) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    given = {name: torch.from_numpy(values) for name, values in tensors_of(n, d).items()}
    config = transformers.DeepseekV4Config(
        hidden_size=d, hc_mult=n, hc_sinkhorn_iters=iterations, hc_eps=1e-4, rms_norm_eps=EPS
    )
    around, head = theirs.DeepseekV4HyperConnection(config), theirs.DeepseekV4HyperHead(config)
    with torch.no_grad():
        for name in ("fn", "base", "scale"):
            getattr(around, name).copy_(given[name])
            getattr(head, f"hc_{name}").copy_(given[f"head_{name}"])
        x = given["x"][None, :, None].expand(-1, -1, n, -1)
        for _ in range(2):
            post, comb, collapsed = around(x.contiguous())
            y = collapsed @ given["part"].T
            x = post[..., None] * y[..., None, :] + comb.transpose(-1, -2) @ x
        expected = head(x)[0].numpy()
    found = ReferenceBackend(written(tmp_path, n, d), graph_of(n, d, iterations), n_blocks=1).step(step())
    np.testing.assert_allclose(found.logits, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("n", "d", "iterations"), SHAPES)
def test_every_kernel_is_the_reference(tmp_path: Path, n: int, d: int, iterations: int) -> None:
    gguf, graph = written(tmp_path, n, d), graph_of(n, d, iterations)
    names = tuple(value.name for value in graph.values)
    backend = cpu_backend(gguf, graph, n_blocks=1, n_threads=2)
    tapped = batch([(np.arange(N_TOKENS, dtype=np.int32), 0, [0])], names)
    Oracle(gguf, graph, n_blocks=1).check(tapped, backend.step(tapped))
    expected = backend.step(step()).logits.copy()
    for isa in _core.available_isas():
        for n_threads in (1, 3):
            other = cpu_backend(gguf, graph, n_blocks=1, n_threads=n_threads, isa=isa)
            np.testing.assert_array_equal(other.step(step()).logits, expected)
    alone = batch([(np.array([7], np.int32), 0, [0])])
    np.testing.assert_array_equal(backend.step(alone).logits[0], expected[7])


@pytest.mark.parametrize(("n", "d", "iterations"), SHAPES)
def test_torch_computes_the_same(tmp_path: Path, n: int, d: int, iterations: int) -> None:
    gguf, graph = written(tmp_path, n, d), graph_of(n, d, iterations)
    expected = ReferenceBackend(gguf, graph, n_blocks=1).step(step()).logits
    model, x = TorchGraph(gguf, graph), None
    for part in model.parts:
        x = model.run(part, torch.arange(N_TOKENS)[None], x)[part.result]
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
