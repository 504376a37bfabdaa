"""Statistics: shares, bytes and parameters from the counts of steps; recall and precision of predictors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_gguf import write_relu

from hotset.backends.base import StepStats
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, row_bytes
from hotset.model.config import config_from_gguf
from hotset.model.cost import Cost
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.predictor import Predictor
from hotset.report.layers import stats_table
from hotset.sparsity import taps
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import prepare
from hotset.sparsity.stats import LayerStats, StatsSummary, StepCosts, measure_predictor

N_FF, D = 96, 64
Q4, Q8 = row_bytes(GGMLType.Q4_0, D), row_bytes(GGMLType.Q8_0, D)
TYPES = {"ffn_gate": GGMLType.Q4_0, "ffn_up": GGMLType.Q8_0, "ffn_down": GGMLType.Q8_0, "fc1": GGMLType.F16}
MLP = Predictor("mlp", (0.1, 0.1))


def opened(path: Path, *args: Any, **how: Any) -> GGUFFile:
    return open_gguf(
        write_relu(
            path, *args, type_of=lambda n: TYPES.get(n.split(".")[-1].removesuffix("_t"), GGMLType.F32), **how
        )
    )


def step(n_tokens: int = 1, **counts: list[int]) -> StepStats:
    names = ("selected", "active", "gate_rows", "up_rows", "down_rows")
    times = {"predictor": [0.1, 0.2], "ffn": [1.0, 2.0], "attention": [3.0, 4.0]}
    return StepStats(
        n_tokens, **{name: np.array(counts[name]) for name in names},
        **{name: np.array(value) for name, value in times.items()}, other=0.5,
    )  # fmt: skip


def dense_step(n_tokens: int = 1, gated: bool = True) -> StepStats:
    every, rows = [n_tokens * N_FF] * 2, [N_FF] * 2
    gate = rows if gated else [0, 0]
    return step(n_tokens, selected=every, active=[30, 20], gate_rows=gate, up_rows=rows, down_rows=rows)


def test_every_row_equals_the_models_cost(tmp_path: Path) -> None:
    """Check that a dense step reads as much as Cost says, and multiplies every parameter of the matrices."""
    gguf = opened(tmp_path / "model.gguf", dialect="gguf", ranks=(32, 32))
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    costs = StepCosts(graph, gguf.tensors)
    summary = costs.summary([dense_step()])
    assert summary.bytes_touched_per_token == summary.bytes_total_per_token
    assert summary.bytes_touched_per_token == sum(Cost(graph, gguf.tensors).weight_bytes.values())
    matrices = [t for name, t in gguf.tensors.items() if len(t.shape) == 2 and name != "token_embd.weight"]
    assert summary.active_parameters == sum(t.n_elements for t in matrices)
    assert summary.flops == 2 * summary.active_parameters


def test_rows_that_were_read_are_bytes(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf", ranks=(32, 64))
    graph = describe(config_from_gguf(gguf), gguf.tensors, MLP)
    costs = StepCosts(graph, gguf.tensors)
    counts = {"selected": [40, 10], "active": [8, 2], "gate_rows": [40, 10]}
    summary = costs.summary([step(**counts, up_rows=[12, 4], down_rows=[8, 2])])
    first, second = summary.layers
    fc = [rank * D * 2 + N_FF * rank * 4 for rank in (32, 64)]  # fc1 is F16, fc2 F32
    assert first.bytes == 40 * Q4 + 12 * Q8 + 8 * Q8 + fc[0]
    assert second.bytes == 10 * Q4 + 4 * Q8 + 2 * Q8 + fc[1]
    assert (first.active_share, first.selected_share) == (8 / N_FF, 40 / N_FF)
    assert summary.active_share == pytest.approx(10 / (2 * N_FF))
    ffn = 2 * N_FF * (Q4 + Q8 + Q8)
    assert summary.bytes_total_per_token - ffn == summary.bytes_touched_per_token - first.bytes - second.bytes
    rest = 2 * (2 * D * D + 2 * D * 32) + 96 * D  # q, output, k, v; the output matrix
    assert summary.active_parameters == rest + D * (40 + 12 + 8 + 10 + 4 + 2) + (D + N_FF) * (32 + 64)
    assert first.attention_s == 3.0
    assert summary.seconds == pytest.approx({"predictor": 0.3, "ffn": 3.0, "attention": 7.0, "other": 0.5})
    assert (first.recall, first.precision) == (None, None)


def test_scales_of_planes_are_read_by_group(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf", dialect="gguf")
    config = config_from_gguf(gguf)
    ready = prepare(gguf, config, choose(config, gguf.tensors))
    costs = StepCosts(describe(config, ready.weights.tensors), ready.weights.tensors)
    counts = {"selected": [N_FF, N_FF], "active": [8, N_FF], "gate_rows": [N_FF] * 2}
    first, second = costs.summary([step(**counts, up_rows=[8, N_FF], down_rows=[8, N_FF])]).layers
    groups = 3 * (1 - (1 - 8 / N_FF) ** 32)
    assert first.bytes == pytest.approx(N_FF * Q4 + 8 * Q8 + 8 * D + groups * 2 * D)
    assert second.bytes == N_FF * Q4 + N_FF * Q8 + N_FF * D + 3 * 2 * D


def test_a_down_matrix_by_output_is_read_whole(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf", dialect="gguf")
    costs = StepCosts(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors)
    counts = {"selected": [N_FF] * 2, "active": [8, 1], "gate_rows": [N_FF] * 2}
    layer = costs.summary([step(**counts, up_rows=[8, 1], down_rows=[8, 1])]).layers[0]
    assert layer.bytes == N_FF * Q4 + 8 * Q8 + D * row_bytes(GGMLType.Q8_0, N_FF)


def test_tokens_of_a_step_share_its_bytes(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf", "opt")
    graph = describe(config_from_gguf(gguf), gguf.tensors)
    costs = StepCosts(graph, gguf.tensors)
    one, four = (costs.summary([dense_step(n, gated=False)]) for n in (1, 4))
    embedded = 2 * D * 4  # a token's rows of the embedding and of the positions
    alone, shared = one.bytes_touched_per_token, four.bytes_touched_per_token
    assert shared - embedded == pytest.approx((alone - embedded) / 4)
    assert one.active_parameters == four.active_parameters
    assert four.n_tokens == 4


def test_nothing_yet_is_zero_and_json(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf")
    summary = StepCosts(describe(config_from_gguf(gguf), gguf.tensors), gguf.tensors).summary([])
    assert (summary.n_tokens, summary.active_share) == (0, 0)
    assert json.loads(json.dumps(summary.as_dict()))["layers"][1]["layer"] == 1


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
def test_counts_of_a_backend_equal_its_taps(architecture: str, tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf", architecture)
    graph = describe(config_from_gguf(gguf), gguf.tensors, MLP)
    backend = ReferenceBackend(gguf, graph, n_blocks=1, sparse=True)
    costs = StepCosts(graph, gguf.tensors)
    active, steps = 0, []
    for values in taps.of_backend(backend)(
        np.arange(40, dtype=np.int32), ("blk.0.ffn_masked", "blk.1.ffn_masked")
    ):
        stats = backend.stats()
        assert stats is not None
        steps.append(stats)
        active += sum(np.count_nonzero(value) for value in values.values())
    summary = costs.summary(steps)
    assert summary.active_share == pytest.approx(active / (2 * 40 * N_FF))
    assert summary.bytes_touched_per_token > 0
    assert all(value > 0 for value in summary.seconds.values())


def test_recall_and_precision(tmp_path: Path) -> None:
    gguf = opened(tmp_path / "model.gguf")
    graph = describe(config_from_gguf(gguf), gguf.tensors, MLP)
    tokens = (np.arange(120, dtype=np.int32) * 5 % 96).reshape(2, 60)

    def backend(graph: Graph) -> ReferenceBackend:
        return ReferenceBackend(gguf, graph, n_blocks=1)

    found = measure_predictor(taps.of_backend(backend(graph)), graph, tokens, 64)
    for i, layer in enumerate(found):
        names = tuple(f"blk.{i}.{name}" for name in ("ffn_act", "ffn_pred"))
        runs = [taps.whole(taps.of_backend(backend(graph)), row, names) for row in tokens]
        neurons, scores = (np.concatenate([run[name] for run in runs]) for name in names)
        fires, chosen = neurons != 0, scores >= np.float32(0.1)
        assert layer.layer == i
        assert layer.recall == (fires & chosen).sum() / fires.sum()
        assert layer.precision == (fires & chosen).sum() / chosen.sum()
        assert layer.of_magnitude == pytest.approx(np.abs(neurons[chosen]).sum() / np.abs(neurons).sum())
        assert (layer.active_share, layer.selected_share) == (fires.mean(), chosen.mean())
    summary = StepCosts(graph, gguf.tensors).summary([]).with_quality(found)
    assert [layer.recall for layer in summary.layers] == [layer.recall for layer in found]


@pytest.mark.parametrize("predicted", [False, True])
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_a_table_has_a_cell_for_each_column(predicted: bool, measured: bool, routed: bool) -> None:
    quality = (0.875, 0.625) if measured else (None, None)
    layers = tuple(
        LayerStats(i, 0.25, 0.5, *quality, 0.75 if routed else None, 2000.0, 0.001 * predicted, 0.002, 0.003)
        for i in range(2)
    )
    seconds = {"predictor": 0.004, "ffn": 0.005, "attention": 0.006, "other": 0.0}
    columns, rows = stats_table(StatsSummary(layers, 1, 1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, seconds))
    names = [column.lstrip(">").replace("\n", " ") for column in columns]
    assert [len(row) for row in rows] == [len(names)] * 3
    first, last = (dict(zip(names, row, strict=True)) for row in (rows[0], rows[2]))
    expected = {"layer": "0", "active": "25%", "FFN bytes": "2.0 KiB", "FFN ms": "2.000", "attn. ms": "3.000"}
    expected |= {"experts": "75%"} if routed else {}
    expected |= {"recall": "88%", "precise": "62%"} if measured else {}
    assert expected.items() <= first.items()
    assert {
        "layer": "all",
        "FFN bytes": "3.9 KiB",
        "FFN ms": "5.000",
        "attn. ms": "6.000",
    }.items() <= last.items()
    if predicted:
        assert (first["chosen"], first["pred. ms"], last["pred. ms"]) == ("50%", "1.000", "4.000")
    if measured:
        assert last["recall"] == last["precise"] == ""
