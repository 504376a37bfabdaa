"""Traces of routes, and the hits of caches of experts that replay them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend
from byte_models import N_VOCAB
from cli_runs import inside
from random_traces import TEXT, moe_layer, random_trace, simulate, traced
from routes import PUBLISHED, ROUTERS, Router, synthetic_routes

import hotset
from hotset.backends.base import Batch
from hotset.errors import FormatError, HotsetError, InvalidRequestError, ModelNotFoundError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.offload.replacement import Replacement, arrange
from hotset.report.replay import POLICIES, SHARES, replay
from hotset.sparsity.recorder import record
from hotset.sparsity.trace import RouteTrace, trace_path

# ---- recording ----


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_routes_equal_whole_steps(tmp_path: Path, activation: str) -> None:
    path = moe_layer(tmp_path / "m.gguf", keys={"llama.hidden_activation": activation})
    ids = np.random.default_rng(3).integers(0, N_VOCAB, (2, 70)).astype(np.int32)
    told = []
    with hotset.load(path, device="cpu", n_ctx=128, max_batch=32) as model:
        found = record(
            model.tap_steps, model.graph, model.weights, ids,
            model="m", name="n", progress=lambda done, total: told.append((done, total)),
        )  # fmt: skip
        assert found.token_cycle == model.cost.token_cycle
    assert (found.starts, found.layers, found.n_experts, found.n_used) == ((0, 70), (0, 1, 2), 8, 3)
    assert told[-1] == (140, 140)
    with open_gguf(path) as gguf:
        graph = describe(config_from_gguf(gguf), gguf.tensors)
        names = tuple(f"blk.{i}.ffn_route" for i in range(3))
        for row, start in zip(ids, found.starts, strict=True):
            backend = cpu_backend(gguf, graph, n_blocks=2, max_batch=70, kv_type="f16")
            blocks, none = np.array([[0, 1]], np.int32), np.zeros(0, np.int32)
            batch = Batch(row, np.arange(70, dtype=np.int32), np.zeros(70, np.int32), blocks, none, names)
            taps = backend.step(batch).taps
            for i, name in enumerate(names):
                np.testing.assert_array_equal(found.routes[start : start + 70, i], taps[name][:, :3])
    assert np.sum(found.counts) == 140 * 3 * 3
    assert found.counts[1][5] == (found.routes[:, 1] == 5).sum()


def test_a_model_without_experts_has_no_routes(tmp_path: Path) -> None:
    path = moe_layer(tmp_path / "m.gguf", experts=None)
    with (
        hotset.load(path, device="reference", n_ctx=128) as model,
        pytest.raises(InvalidRequestError, match="there is nothing to trace"),
    ):
        record(model.tap_steps, model.graph, model.weights, np.zeros(4, np.int32), model="m", name="n")


# ---- files ----


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = replace(random_trace(), starts=(0, 17, 40), layers=(2, 3, 7))
    trace.save(tmp_path / "t.gguf")
    found = RouteTrace.open(tmp_path / "t.gguf")
    np.testing.assert_array_equal(found.routes, trace.routes)
    assert replace(found, routes=trace.routes) == trace
    assert (found.routes.dtype, found.cycle, found.token_cycle) == (np.int32, 6, 2 * (100 + 101 + 102))


def damaged() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return changes of a hostile file: keys, and the routes of its layers."""
    routes = random_trace().routes
    layer = routes[:, 0].astype("<i2")
    negative, large, twice = layer.copy(), layer.copy(), layer.copy()
    negative[3, 0], large[3, 0], twice[3, 1] = -1, 8, twice[3, 0]
    yield "no experts", {"n_experts": 0}
    yield "too many experts", {"n_experts": 1 << 20}
    yield "a text for a number", {"n_experts": "8"}
    yield "no name", {"name": 3}
    yield "no starts", {"starts": np.zeros(0, np.int64)}
    yield "starts that fall", {"starts": np.array([0, 9, 9])}
    yield "a start behind the end", {"starts": np.array([0, 60])}
    yield "a start that is not the first", {"starts": np.array([1])}
    yield "starts that are no numbers", {"starts": np.array([0.0])}
    yield "fewer sizes than layers", {"expert_bytes": np.array([100, 101])}
    yield "a size below zero", {"expert_bytes": np.array([100, 101, -1])}
    yield "a size beyond all files", {"expert_bytes": np.array([100, 101, 1 << 60])}
    yield "an expert below zero", {"layer": negative}
    yield "an expert that is not there", {"layer": large}
    yield "an expert twice", {"layer": twice}
    yield "fewer tokens in a layer", {"layer": layer[:50]}
    yield "other tensors", {"tensor": "blk.0.counts"}
    yield "layers that fall", {"tensor": "blk.9.routes"}


@pytest.mark.parametrize(("what", "change"), list(damaged()), ids=lambda value: str(value)[:40])
def test_other_file_than_a_trace_is_refused(tmp_path: Path, what: str, change: dict[str, Any]) -> None:
    trace = random_trace()
    layers = [trace.routes[:, i].astype("<i2") for i in range(3)]
    layers[0] = change.get("layer", layers[0])
    keys: dict[str, Any] = {"model": "m", "name": "n", "data": "d", "n_experts": 8}
    keys |= {"starts": np.array([0]), "expert_bytes": np.array([100, 101, 102])}
    writer = GGUFWriter(tmp_path / "t.gguf", "hotset")
    for key, value in keys.items():
        writer.add(f"hotset.trace.{key}", change.get(key, value))
    for i, layer in enumerate(layers):
        name = change.get("tensor", "blk.0.routes") if i == 0 else f"blk.{i}.routes"
        data = np.ascontiguousarray(layer)
        writer.add_tensor(name, data.view(np.uint8), GGMLType.I16, (data.shape[1], data.shape[0]))
    writer.write()
    if not change:
        RouteTrace.open(tmp_path / "t.gguf")
        return
    with pytest.raises(
        FormatError, match="is not a trace of experts or neurons; make one with 'hotset sparse trace'"
    ):
        RouteTrace.open(tmp_path / "t.gguf")


def test_the_file_that_is_damaged_was_a_trace(tmp_path: Path) -> None:
    """Check that the undamaged file is valid, so that the test before passes for the right reason."""
    test_other_file_than_a_trace_is_refused(tmp_path, "nothing", {})


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        RouteTrace.open(tmp_path / "nowhere.gguf")
    with pytest.raises(FormatError):
        RouteTrace.open(moe_layer(tmp_path / "m.gguf"))
    (tmp_path / "text").write_text("no GGUF")
    with pytest.raises(HotsetError):
        RouteTrace.open(tmp_path / "text")


# ---- replaying ----


@pytest.mark.parametrize("seed", [0, 1])
def test_hit_rates_equal_plain_simulations(seed: int) -> None:
    trace = random_trace(seed=seed)
    replayed, routes = replay(trace), trace.routes.tolist()
    assert [point.share for point in replayed.points] == list(SHARES)
    assert replayed.n_counted == 30 * 6
    assert replayed.cliff == 6 / 24
    for point in replayed.points:
        assert point.n_slots == round(point.share * 24)
        assert point.n_bytes == point.n_slots * 102
        assert point.cycles == point.n_slots / 6
        assert list(point.hit_rates) == list(POLICIES)
        for policy in ("lru", "optimum"):
            assert point.hit_rates[policy] == simulate(routes, trace.sizes, policy, point.n_slots) / 180, (
                policy,
                point,
            )
        assert max(point.hit_rates.values()) == point.hit_rates["optimum"]
        cache = Replacement(arrange(point.n_slots, 3, 2), 3, 8)
        hits = cache.replay(trace.routes, 30).sum()
        assert point.hit_rates["hotset"] == hits / 180
        if point.n_slots >= 3:  # also below a token cycle
            assert point.hit_rates["hotset"] > 0


def test_a_trace_of_one_token_cannot_be_replayed() -> None:
    with pytest.raises(InvalidRequestError, match="one token"):
        replay(random_trace(1))


def test_synthetic_routes_have_the_requested_statistics() -> None:
    """Check that popularity and locality have their effects, and that a seed gives the same routes."""
    flat = replace(ROUTERS["gemma-4-26B-A4B"].locality, zipf=0.0, slow=0.0, fast=0.0)

    def overlap(router: Router) -> tuple[float, float]:
        """Return the share of experts from the previous token, and of choices of the busiest eighth."""
        routes = synthetic_routes(router, 400, seed=1)
        assert (np.diff(np.sort(routes)) > 0).all()
        same = (routes[1:, :, :, None] == routes[:-1, :, None, :]).any(axis=3).mean()
        counts = np.sort(traced(routes, router.n_experts).counts, axis=1)
        return float(same), float(counts[:, -router.n_experts // 8 :].sum() / counts.sum())

    base = Router(3, 64, 8, flat)
    even, skewed = overlap(base), overlap(replace(base, locality=replace(flat, zipf=1.0)))
    local = overlap(replace(base, locality=replace(flat, fast=2.0, fast_half=8.0)))
    assert even == pytest.approx((1 / 8, 1 / 8), abs=0.04)
    assert skewed[1] > 0.4
    assert local[0] > 0.4
    one = synthetic_routes(base, 20, seed=1)
    np.testing.assert_array_equal(one, synthetic_routes(base, 20, seed=1))
    assert (one != synthetic_routes(base, 20, seed=2)).any()


@pytest.mark.parametrize("name", ROUTERS)
def test_the_policies_have_the_shape_of_published_replays(name: str) -> None:
    """Check synthetic routes that were fitted to published replays (bench/routes.py).

    They have a cliff at the token cycle; below it separate slots hit far more than a fixed choice, with some
    points missing to the optimum.
    """
    router = replace(ROUTERS[name], n_layers=5)
    trace = traced(synthetic_routes(router, 1024, seed=0), router.n_experts)
    published = PUBLISHED[name]
    for point in replay(trace, tuple(published)).points:
        rates, said = point.hit_rates, published[point.share]
        for policy in ("lru", "optimum"):
            if policy in said:
                assert rates[policy] == pytest.approx(said[policy], abs=0.1), (policy, point)
        assert (rates["lru"] == 0) == (point.cycles < 1) == (said["lru"] == 0)
        assert rates["hotset"] > said["static"] + 0.1
        if point.cycles < 1:
            assert rates["hotset"] > said["per_layer"] - 0.1
        if point.cycles >= 1.5:
            spared = 0.03 if point.cycles < 4 else 0.0  # of LRU's misses
            assert 1 - rates["hotset"] < (1 - spared) * (1 - rates["lru"])
    assert [point.cycles < 1 for point in replay(trace, (0.05,)).points] == [router.n_experts != 256]


# ---- the command line ----


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_trace_and_replay(tmp_path: Path, text: Path, activation: str) -> None:
    model = moe_layer(tmp_path / "m.gguf", keys={"llama.hidden_activation": activation})
    done = inside("trace", model, "-f", text, "-c", 64)
    place = trace_path(model)
    assert f"Replay it with: hotset sparse trace --replay {place}" in done.stderr
    trace = RouteTrace.open(place)
    assert (len(trace.layers), trace.n_experts, trace.n_used, trace.name) == (3, 8, 3, "m.gguf")
    done = inside("trace", "--replay", place, "--json")
    facts = json.loads(done.stdout)
    assert facts["n_tokens"] == trace.n_tokens
    assert facts["points"] == list(replay(trace).as_dict()["points"])
    assert facts["token_cycle"] == trace.token_cycle
    assert facts["policies"].keys() == facts["points"][0]["hit_rates"].keys()
    done = inside("trace", "--replay", place)
    assert "optimum" in done.stdout
    assert "A token cycle is" in done.stderr
    assert "37.5% of the experts" in done.stderr


def test_trace_writes_to_the_given_place_and_replaces_nothing(tmp_path: Path, text: Path) -> None:
    model = moe_layer(tmp_path / "m.gguf")
    other = tmp_path / "other.gguf"
    done = inside("trace", model, "-f", text, "-n", 20, "-o", other, "--json")
    assert json.loads(done.stdout)["path"] == str(other)
    assert json.loads(done.stdout)["n_tokens"] == 20
    assert not trace_path(model).exists()
    inside("trace", model, "-f", text, "-n", 20)
    assert "exists" in inside("trace", model, "-f", text, "-n", 20, returns=2).stderr
    inside("trace", model, "-f", text, "-n", 10, "-o", trace_path(model))
    assert RouteTrace.open(trace_path(model)).n_tokens == 10


def test_wrong_usage_gives_one_message(tmp_path: Path, text: Path) -> None:
    model = moe_layer(tmp_path / "m.gguf")
    for arguments in (
        (), (model,), ("-f", text), (model, "--replay", text), ("-f", text, "--replay", text),
        ("--replay", text, "-o", tmp_path / "x"), (model, "-f", text, "-o", model),
    ):  # fmt: skip
        assert inside("trace", *arguments, returns=2).stderr.startswith("error: ")
    assert "is not a trace of experts" in inside("trace", "--replay", model, returns=1).stderr
    (tmp_path / "empty.txt").write_text(" \n")
    done = inside("trace", model, "-f", tmp_path / "empty.txt", returns=None)
    assert (done.returncode, "is empty" in done.stderr) == (2, True)
    done = inside("trace", moe_layer(tmp_path / "d.gguf", experts=None), "-f", text, returns=None)
    assert (done.returncode, "there are no experts" in done.stderr) == (2, True)
