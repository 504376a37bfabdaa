"""The expected gain of skipping zeros. A matrix without a gain stays unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threshold_models import EVERY, thresholds_of, with_kept, write
from tiny_gguf import write_llama

import hotset
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds
from hotset.placement import channel_rates
from hotset.placement.channels import (
    ChannelPlan,
    ChannelRates,
    MatrixKind,
    Workload,
    applied,
    plan_channels,
)
from hotset.sparsity.thresholds import Thresholds, thresholds_path

T = GGMLType
KEPT = dict.fromkeys(THRESHOLD_NAMES, 0.5)


def planned(
    gguf: GGUFFile, thresholds: Thresholds, rows: float = 1e9, input_major: float = 1e9, **options: Any
) -> ChannelPlan:
    graph = describe(config_from_gguf(gguf), gguf.tensors, layer_thresholds=thresholds.layers)
    works = Workload.of(graph, gguf.tensors)
    rates = {work.kind: ChannelRates(rows, input_major) for work in works}
    return plan_channels(graph, gguf.tensors, thresholds, rates, **options)


def test_gain_follows_the_unread_codes(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    plan = planned(gguf, with_kept(gguf, [KEPT, KEPT], replace(EVERY, gate=0)))
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    matrices = [f"blk.{i}.{name}.weight" for i in range(2) for name in names]
    assert sorted(plan.chosen) == sorted(matrices)
    n_bytes = sum(gguf.tensors[name].nbytes for name in matrices)
    assert plan.left_out == n_bytes * 16 / 18 / 2  # half of the codes, and all scales
    listed = sum(gguf.tensors[name].shape[0] for name in matrices)  # a nanosecond for each input
    assert plan.saved == pytest.approx((plan.left_out - listed) / 1e9)


def test_a_matrix_that_would_not_gain_stays(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    kept = [{**KEPT, "attn_in": 0.9}, {**KEPT, "attn_out": 0.1}]
    plan = planned(gguf, with_kept(gguf, kept, replace(EVERY, gate=0)), input_major=0.5e9)
    assert plan.chosen == ("blk.1.attn_output.weight",)
    assert planned(gguf, with_kept(gguf, kept), input_major=0.01e9).chosen == ()


def test_rows_of_up_are_skipped_if_they_are_fewer(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    plan = planned(gguf, with_kept(gguf, [{**KEPT, "gate": 0.05}, {**KEPT, "gate": 0.9}]))
    of_up = {gain.tensor: gain for gain in plan.gains if "ffn_up" in gain.tensor}
    assert [of_up[f"blk.{i}.ffn_up.weight"].neuron_major for i in range(2)] == [True, False]
    assert "blk.0.ffn_up.weight" not in plan.chosen
    assert plan.whole == {"blk.1.ffn_up.weight"}


def test_rows_of_up_are_left_out_only_where_that_pays_for_the_second_pass(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    only_gate = LayerThresholds(gate=0.3)
    plan = planned(gguf, with_kept(gguf, [{"gate": 0.8}, {"gate": 0.3}], only_gate))
    assert plan.whole == {"blk.0.ffn_up.weight"}
    assert [gain.pays for gain in plan.gains if "ffn_up" in gain.tensor] == [False, True]
    assert (
        planned(gguf, thresholds_of(gguf, layer_thresholds=only_gate)).whole == frozenset()
    )  # each step decides


def test_rows_of_experts_are_left_out_where_that_pays(tmp_path: Path) -> None:
    """Count only the bytes of the experts that a token uses."""
    file = write_llama(tmp_path / "model.gguf", experts=(4, 2), type_of=lambda name: T.Q4_0)
    gguf = open_gguf(file)
    plan = planned(gguf, with_kept(gguf, [{"gate": 0.8}, {"gate": 0.3}], LayerThresholds(gate=0.3)))
    assert [gain.pays for gain in plan.gains] == [False, True]
    assert plan.whole == {"blk.0.ffn_up_exps.weight"}
    assert plan.chosen == ()
    assert plan.gains[1].n_bytes == gguf.tensors["blk.1.ffn_up_exps.weight"].nbytes // 2
    assert plan.gains[1].read_bytes == pytest.approx(0.3 * plan.gains[1].n_bytes)


@pytest.mark.parametrize("kept", [None, "half", [], [{"attn_in": 2}, "x"], [{"attn_in": float("nan")}, {}]])
def test_where_nothing_is_known_each_step_decides(tmp_path: Path, kept: Any) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    thresholds = with_kept(gguf, kept)
    assert not thresholds.knows_kept
    plan = planned(gguf, thresholds)
    assert len(plan.chosen) == 14
    assert (plan.left_out, plan.saved) == (None, None)


def test_types_without_channels_gain_nothing(tmp_path: Path) -> None:
    gguf = write(tmp_path, type=T.F16)
    assert planned(gguf, with_kept(gguf, [KEPT, KEPT], replace(EVERY, gate=0))).gains == ()


def test_rates_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(n_threads: int, work: Workload) -> ChannelRates:
        measured.append((n_threads, work))
        return ChannelRates(2e9, 1e9)

    monkeypatch.setattr(channel_rates, "measure_rates", measure)
    path = tmp_path / "machine.json"
    small, large = (Workload(MatrixKind(T.Q4_0, n, n), 1 << 20) for n in (256, 4096))
    other = Workload(MatrixKind(T.Q6_K, 256, 256), 1 << 20)
    rates = ChannelRates(2e9, 1e9)
    for _ in range(2):
        assert channel_rates.of_cpu([small, other], 3, path=path) == {
            small.kind: rates,
            other.kind: rates,
        }
    channel_rates.of_cpu([large], 3, path=path)
    assert measured == [(3, small), (3, other), (3, large)]
    known = json.loads(path.read_text())
    path.write_text(json.dumps({key: {"rows": "fast", "channels": -1} for key in known}))
    channel_rates.of_cpu([small], 3, path=path)
    assert measured[3:] == [(3, small)]


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K], ids=lambda t: t.name)
def test_measurement_is_a_rate(monkeypatch: pytest.MonkeyPatch, type_: GGMLType) -> None:
    monkeypatch.setattr(channel_rates, "_SECONDS", 0.001)
    rates = channel_rates.measure_rates(1, Workload(MatrixKind(type_, 256, 512), 1 << 18))
    assert rates.rows > 0
    assert rates.channels > 0


def test_rates_are_of_matrices_like_the_model_s(tmp_path: Path) -> None:
    """Longer channels are read faster, so matrices of each shape have their own rates."""
    gguf = write(tmp_path, type=T.Q4_0, n_embd=512, n_ff=2976)
    graph = describe(config_from_gguf(gguf), gguf.tensors, layer_thresholds=[EVERY, EVERY])
    works = Workload.of(graph, gguf.tensors)
    assert {work.kind[1:] for work in works} == {
        info.shape for info in gguf.tensors.values() if "blk" in info.name and len(info.shape) == 2
    }
    assert {(work.type, work.n_bytes) for work in works} == {(T.Q4_0, 4 << 20)}
    attention = describe(
        config_from_gguf(gguf), gguf.tensors, layer_thresholds=[replace(LayerThresholds(), attn_in=1.0)] * 2
    )
    assert {work.n_bytes for work in Workload.of(attention, gguf.tensors)} == {1 << 20}


def test_rates_are_of_each_type(tmp_path: Path) -> None:
    """Use Q4_0's rate for a type without an input-major layout."""

    def type_of(name: str) -> GGMLType:
        return T.Q6_K if "attn_v" in name else T.Q5_0 if "ffn_up" in name else T.Q4_K

    gguf = write(tmp_path, n_embd=256, n_ff=512, type_of=type_of)
    graph = describe(config_from_gguf(gguf), gguf.tensors, layer_thresholds=[EVERY, EVERY])
    works = Workload.of(graph, gguf.tensors)
    assert {work.type for work in works} == {T.Q4_K, T.Q6_K, T.Q4_0}
    rates = {work.kind: ChannelRates(1e9, 0.1e9 if work.type == T.Q6_K else 1e9) for work in works}
    plan = plan_channels(graph, gguf.tensors, with_kept(gguf, [KEPT, KEPT]), rates)
    assert not [name for name in plan.chosen if "attn_v" in name]
    assert len([name for name in plan.chosen if "attn_q" in name]) == 2
    assert plan.rates["blk.0.attn_v.weight"] == 0.1
    assert plan.rates["blk.0.attn_q.weight"] == 1.0


def test_loading_builds_copies_that_pay_and_notes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_rates, "measure_rates", lambda n_threads, work: ChannelRates(1e9, 0.5e9))
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    gguf = write(tmp_path, type=T.Q4_0)
    kept = [KEPT, {**KEPT, "attn_out": 0.1}]
    with_kept(gguf, kept, replace(EVERY, gate=0)).save(thresholds_path(gguf.path))
    with hotset.load(gguf.path, sparsity="threshold", device="cpu", n_threads=1, n_ctx=128) as model:
        copies = {name for name in model.weights.tensors if name.endswith("_c.blocks")}
        assert copies == {"blk.1.attn_output_c.blocks"}
        plan = model.decided.channels
        assert plan is not None
        assert plan.summary().startswith(
            "thresholds: zeros of 1 of 14 matrices are skipped; a token is expected"
        )


def test_thresholds_that_skip_nothing_are_dropped(tmp_path: Path) -> None:
    """They would only change the answer. A threshold whose share is unknown stays."""
    gguf = write(tmp_path, type=T.Q4_0)
    kept = [{**KEPT, "gate": 0.9, "down_in": 0.2}, {"attn_in": 0.9, "gate": 0.05}]
    thresholds = with_kept(gguf, kept)
    graph = describe(config_from_gguf(gguf), gguf.tensors, layer_thresholds=thresholds.layers)

    def left(**options: Any) -> list[set[str]]:
        plan = planned(gguf, thresholds, input_major=0.45e9, copies=not options.get("stored"))
        layers = applied(plan, graph, thresholds, **options).layers
        return [{name for name, value in layer.items() if value} for layer in layers]

    unknown = {"attn_out", "ffn_in", "down_in"}
    assert left() == [{"gate", "down_in"}, {"gate", *unknown}]
    assert left(stored=True) == [{"gate"}, {"gate", *unknown}]
    assert left(split=[0]) == [set(THRESHOLD_NAMES), {"gate", *unknown}]


def test_answer_is_unchanged_if_nothing_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = write(tmp_path, type=T.Q4_0)
    with_kept(gguf, [KEPT, KEPT]).save(thresholds_path(gguf.path))
    ids, found = list(range(3, 40)), {}
    for channels in (None, 0.01e9, 1e9):
        rates = ChannelRates(1e9, channels or 1e9)
        monkeypatch.setattr(channel_rates, "measure_rates", lambda *_, rates=rates: rates)
        sparsity = None if channels is None else "threshold"
        settings: dict[str, Any] = {"device": "cpu", "n_threads": 1, "n_ctx": 128}
        settings["sparse_prompts"] = channels is not None
        monkeypatch.setenv("HOTSET_HOME", str(tmp_path / f"home-{channels}"))  # has the rates
        with hotset.load(gguf.path, sparsity=sparsity, **settings) as model:
            found[channels] = model.logits(ids)
            dropped = "10 of 10 thresholds are not applied, because they save no time on this machine"
            assert (dropped in model.notes) == (channels == 0.01e9)
    np.testing.assert_array_equal(found[None], found[0.01e9])
    assert (found[None] != found[1e9]).any()
