"""`hotset imatrix`: sums of squares of the inputs of matrices, against transformers' own inputs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_runs import write_model
from tiny_gguf import write_relu
from tiny_models import RECIPES, build, shared_gguf, to_gguf
from typer.testing import CliRunner

import hotset
from hotset.cli.main import app
from hotset.engine.importance import collect
from hotset.formats.imatrix import ImportanceMatrix

IDS = np.random.default_rng(0).integers(0, 300, (3, 24)).astype(np.int32)


def test_sums_equal_transformers(tmp_path: Path) -> None:
    model = build(RECIPES["llama"])
    path = to_gguf(RECIPES["llama"], model, tmp_path)
    sums: dict[str, np.ndarray] = {}

    def watch(name: str) -> None:
        def add(_: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
            squares = args[0].detach().double().square().reshape(-1, args[0].shape[-1]).sum(0).numpy()
            sums[name] = sums.get(name, 0) + squares

        model.get_submodule(name).register_forward_pre_hook(add)

    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    n_layer = model.config.num_hidden_layers
    of_file = {
        f"model.layers.{i}.{a}": f"blk.{i}.{b}.weight" for i in range(n_layer) for a, b in names.items()
    }
    for name in (*of_file, "lm_head"):
        watch(name)
    with torch.no_grad():
        for row in IDS:
            model(torch.tensor(row[None].astype(np.int64)))
    with hotset.load(path, device="cpu", sparsity="dense", kv_type="f16") as loaded:
        found = collect(loaded.tap_steps, loaded.graph, IDS, output=True)
        assert "output.weight" not in collect(loaded.tap_steps, loaded.graph, IDS).inputs
    assert set(found.inputs) == {*of_file.values(), "output.weight"}
    for name, expected in sums.items():
        mine = found.inputs[of_file.get(name, "output.weight")]
        assert mine.counts.tolist() == [IDS.size]
        np.testing.assert_allclose(mine.sums[0], expected, rtol=2e-2)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_have_sums_of_their_tokens(name: str, run_folder: Path) -> None:
    """Compare each expert's sums, token by token, with the values inside the graph."""
    with hotset.load(shared_gguf(name, run_folder), device="cpu", sparsity="dense") as loaded:
        found = collect(loaded.tap_steps, loaded.graph, IDS)
        ffn = next(ffn for ffn in loaded.graph.ffns if ffn.route is not None)
        route = ffn.route
        up = f"blk.{ffn.layer}.ffn_up_exps.weight"
        down = f"blk.{ffn.layer}.ffn_down_exps.weight"
        expected = {up: np.zeros_like(found.inputs[up].sums), down: np.zeros_like(found.inputs[down].sums)}
        counts = np.zeros(len(found.inputs[up].counts))
        for row in IDS:
            values = loaded.taps(row.tolist(), [route.out.name, ffn.up.x.name, ffn.down.x.name])
            for chosen, x, neurons in zip(*(values[key] for key in values), strict=True):
                parts = neurons.reshape(route.n_used, -1)
                xs = np.broadcast_to(
                    x.reshape(-1, expected[up].shape[1]), (route.n_used, expected[up].shape[1])
                )
                for k, expert in enumerate(chosen[: route.n_used].astype(int)):
                    expected[up][expert] += xs[k] ** 2
                    expected[down][expert] += parts[k] ** 2
                    counts[expert] += 1
    for key, sums in expected.items():
        assert np.array_equal(found.inputs[key].counts, counts)
        np.testing.assert_allclose(found.inputs[key].sums, sums, rtol=1e-4, atol=1e-6)


def test_matrices_with_a_row_per_neuron_have_no_sums(tmp_path: Path) -> None:
    path = write_relu(tmp_path / "relu.powerinfer.gguf", "llama")
    with hotset.load(path, device="cpu", sparsity="dense") as loaded:
        found = collect(loaded.tap_steps, loaded.graph, IDS % 60)
    assert "blk.0.ffn_up.weight" in found.inputs
    assert not [name for name in found.inputs if "ffn_down_t" in name]


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["imatrix", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_command(tmp_path: Path) -> None:
    model, text, out = write_model(tmp_path / "m.gguf"), tmp_path / "t.txt", tmp_path / "i.gguf"
    text.write_text("the quick brown fox " * 20)
    code, _, told = run(model, "-f", text, "-o", out, "-c", 64)
    assert code == 0, told
    assert "--imatrix" in told
    first = ImportanceMatrix.open(out)
    assert (first.chunk_size, first.datasets) == (64, (str(text),))
    assert first.n_chunks > 1
    code, printed, told = run(model, "-f", text, "-o", out, "-c", 64, "--chunks", 1, "--merge", out, "--json")
    assert code == 0, told
    both = ImportanceMatrix.open(out)
    assert json.loads(printed) == {
        "path": str(out),
        "matrices": len(first.inputs),
        "chunks": first.n_chunks + 1,
        "n_ctx": 64,
        "datasets": [str(text), str(text)],
        "experts_without_tokens": {},
    }
    assert both.inputs["blk.0.attn_q.weight"].counts.tolist() == [64 * both.n_chunks]
    code, _, told = run(model, "-f", text, "-o", out, "-c", 512)
    assert code == 2
    assert "fewer than a chunk of 512" in told
