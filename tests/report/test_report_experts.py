"""Counted experts, and their section of a report: hotness and its drift over a text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from backend_runs import cpu_backend
from cases import quick_are
from cli_runs import inside
from html_page import check_self_contained
from random_traces import EXPERTS, moe_layer, random_trace, traced

import hotset
from hotset.convert.reorder import reorder
from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.offload.cache_stats import CacheStats
from hotset.report.activity import LAGS
from hotset.report.experts import drift_of, experts_dict, experts_line, hotness_of
from hotset.report.layers import expert_table
from hotset.report.plots import plots_of_experts
from hotset.sparsity.profile import Profile, collect, profile_path
from hotset.sparsity.sidecar import fingerprint
from hotset.sparsity.taps import of_backend

TOKENS = np.random.default_rng(5).integers(0, 90, 150).astype(np.int32)
RELU = {"llama.hidden_activation": "relu"}


def profiled(gguf: GGUFFile, tokens: np.ndarray = TOKENS) -> Profile:
    config = config_from_gguf(gguf)
    backend = cpu_backend(
        gguf, describe(config, gguf.tensors), n_blocks=3, max_batch=50, kv_type="f16", sparse=config.has_zeros
    )
    return collect(of_backend(backend), config, tokens, model=fingerprint(gguf), longest=192)


@pytest.mark.parametrize("keys", [{}, RELU, RELU | {"llama.leading_dense_block_count": 0}])
def test_neurons_inside_experts_and_experts_are_counted(tmp_path: Path, keys: dict[str, str]) -> None:
    with open_gguf(moe_layer(tmp_path / "m.gguf", keys=keys)) as gguf:
        found = profiled(gguf)
        config = config_from_gguf(gguf)
    n_experts, k = EXPERTS
    names = [f"blk.{i}.{what}" for i in range(3) for what in ("ffn_route", "ffn_act")]
    with hotset.load(tmp_path / "m.gguf", device="cpu", n_ctx=192) as model:
        taps = model.taps(TOKENS.tolist(), names)
    assert (found.n_tokens, list(found.experts)) == (150, [0, 1, 2])
    for layer in range(3):
        ids = taps[f"blk.{layer}.ffn_route"][:, :k].astype(int)
        fires = taps[f"blk.{layer}.ffn_act"].reshape(150, k, -1) != 0
        experts, neurons = np.zeros(n_experts, int), np.zeros((n_experts, fires.shape[2]), int)
        for token in range(150):
            for place, id in enumerate(ids[token]):
                experts[id] += 1
                neurons[id] += fires[token, place]
        np.testing.assert_array_equal(found.experts[layer], experts)
        np.testing.assert_array_equal(found.counts[layer], neurons.ravel())
        summary = found.summary()[layer].experts
        assert summary is not None
        assert (summary.n, summary.busiest) == (n_experts, experts.max() / 150)
        hottest = np.cumsum(np.sort(experts)[::-1])
        assert summary.hot_share == (1 + int((hottest < 0.8 * 450).sum())) / n_experts
        assert summary.n_never == (experts == 0).sum()
    assert config.has_zeros == bool(keys)
    assert [row[1] for row in expert_table(found.summary())[1]] == ["8", "8", "8"]


def test_a_profile_with_experts_survives_its_file_and_adds_up(tmp_path: Path) -> None:
    with open_gguf(moe_layer(tmp_path / "m.gguf", keys=RELU)) as gguf:
        one, other = profiled(gguf), profiled(gguf, TOKENS[:90])
    one.save(tmp_path / "p.gguf")
    found = Profile.open(tmp_path / "p.gguf")
    both = found.merge(other)
    for layer in range(3):
        np.testing.assert_array_equal(found.experts[layer], one.experts[layer])
        np.testing.assert_array_equal(both.experts[layer], one.experts[layer] + other.experts[layer])
    with pytest.raises(InvalidRequestError, match="has no counts of experts"):
        found.merge(replace(other, experts={}))
    with pytest.raises(UnsupportedModelError, match="inside experts cannot be reordered"):
        reorder(tmp_path / "m.gguf", tmp_path / "out.gguf", found)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize(
    ("name", "counts", "message"),
    [
        ("blk.0.expert_counts", [3, 9], "more often than its tokens"),
        ("blk.0.expert_counts", [3, -1], "more often than its tokens"),
        ("blk.0.expert_counts", [1, 2, 3], "do not share their neurons"),
        ("blk.1.expert_counts", [1, 2], "is not an activation profile"),
        ("blk.0.router_counts", [1, 2], "is not an activation profile"),
    ],
)
def test_counts_of_experts_that_cannot_be_are_refused(
    tmp_path: Path, name: str, counts: list[int], message: str
) -> None:
    writer = GGUFWriter(tmp_path / "p.gguf", "hotset")
    writer.add("hotset.profile.n_tokens", 8)
    writer.add("hotset.profile.model", "m")
    writer.add("hotset.profile.data", ["d"])
    for tensor, numbers in (("blk.0.counts", [1, 2, 3, 4]), (name, counts)):
        writer.add_tensor(tensor, np.array(numbers, "<i8").view(np.uint8), GGMLType.I64)
    writer.write()
    with pytest.raises(FormatError, match=message):
        Profile.open(tmp_path / "p.gguf")


# ---- hotness and drift ----


def test_drift_equals_the_change_of_expert_sets() -> None:
    trace = replace(random_trace(100, (2, 8, 3), seed=2), starts=(0, 30, 64))
    found = drift_of(trace)
    ends = [*trace.starts[1:], trace.n_tokens]
    for layer in range(2):
        sets = [set(map(int, ids)) for ids in trace.routes[:, layer]]
        for i, lag in enumerate(LAGS):
            pairs = [
                (sets[t], sets[t - lag])
                for start, end in zip(trace.starts, ends, strict=True)
                for t in range(start + lag, end)
            ]
            expected = np.mean([len(a & b) / 3 for a, b in pairs]) if pairs else np.nan
            assert found.overlap[layer, i] == pytest.approx(expected, nan_ok=True)
        shares = trace.counts[layer] / 100
        assert found.independent[layer] == pytest.approx((shares**2).sum() / 3)
    assert (found.window, found.hot_then.shape) == (33, (2, 3))
    np.testing.assert_allclose(found.hot_then[:, 0], found.hot_now[:, 0])
    assert (found.hot_then <= found.hot_now + 1e-12).all()


def test_experts_that_change_are_seen_to_drift() -> None:
    """Use experts 0 and 1 in the first half of the text, 2 and 3 in the second."""
    early, late = np.tile([0, 1], (64, 3, 1)), np.tile([2, 3], (64, 3, 1))
    found = drift_of(traced(np.concatenate([early, late]), 8))
    np.testing.assert_array_equal(found.hot_then, np.tile([1, 1, 0, 0], (3, 1)))
    np.testing.assert_array_equal(found.hot_now, np.ones((3, 4)))
    assert found.overlap[0, 0] == 126 / 127
    hotness = hotness_of(Profile((), 128, "m", (), {1: np.array([64, 64, 64, 64, 0, 0, 0, 0])}), 2)
    one, other = plots_of_experts(
        replace(hotness, layers=(0, 1, 2), hotness=hotness.hotness.repeat(3, 0)), found
    )
    assert "in the median layer 50% of the experts get 80% of the choices" in one.alt
    assert "get 100% of the choices there, but 0% at the end" in other.alt
    for plot in (one, other):
        assert len(plot.table[1]) == 3
        assert {len(row) for row in plot.table[1]} == {len(plot.table[0])}


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_short_texts_can_be_drawn(n_tokens: int) -> None:
    trace = random_trace(n_tokens)
    hotness = hotness_of(Profile((), n_tokens, "m", (), dict(enumerate(trace.counts))), 2)
    for plot in plots_of_experts(hotness, drift_of(trace)):
        plot.draw().canvas.draw()  # type: ignore[attr-defined]


# ---- the command line ----


@pytest.mark.parametrize("keys", quick_are((RELU,), [{}, RELU]))
def test_profile_and_report_of_a_mixture(
    tmp_path: Path, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = moe_layer(tmp_path / "m.gguf", keys=keys)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; " * 4)
    done = inside("report", model, "-f", text, "-c", 64, "--json")
    alone = json.loads(done.stdout)
    assert "busiest has" in inside("profile", model, "-f", text, "-c", 64).stdout
    counted = Profile.open(profile_path(model))
    assert alone["n_tokens"] == counted.n_tokens
    expected = np.stack([count / counted.n_tokens for count in counted.experts.values()])
    np.testing.assert_allclose(alone["experts"]["hotness"], expected, atol=1e-6)
    assert (alone["run"], alone["drift"]["lags"]) == (None, list(LAGS))
    assert bool(alone["layers"]) == bool(keys), "curves of neurons, where these have zeros"
    inside("report", model, "-f", text, "-c", 64, "--images", "svg")
    page = check_self_contained((tmp_path / "m.report.html").read_text("utf-8"))
    assert page is not None
    names = {place.name for place in tmp_path.glob("m.report-*.svg")}
    assert names >= {"m.report-experts.svg", "m.report-drift.svg"}
    assert ("m.report-power-law.svg" in names) == bool(keys)
    done = inside("report", model, "--json", returns=None)  # only from the profile
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["drift"] is None
    assert json.loads(done.stdout)["experts"] == alone["experts"]


def test_a_line_of_experts() -> None:
    beside = CacheStats(hits=1300, on_cpu=600, fetched=124, streamed=100)
    assert experts_line(beside) == (
        "1,300 of 2,000 experts were in the cache (65%), 100 streamed, 124 fetched, 600 computed by the CPU"
    )
    stored = CacheStats(hits=3, misses=1)
    assert experts_line(stored) == "3 of 4 experts were in the cache (75%), 1 read from the disk"
    assert experts_line(CacheStats()) == "0 of 0 experts were in the cache"
    assert experts_dict(beside + stored) == {
        "hits": 1303, "on_cpu": 600, "fetched": 124, "read": 1, "streamed": 100, "hit_rate": 1303 / 2004
    }  # fmt: skip
