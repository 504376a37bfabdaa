"""Thresholds: predicted and measured costs, the choice of thresholds, and `hotset sparse calibrate`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byte_models import PRINTABLE
from byte_models import write_model as write_bytes
from cli_runs import inside
from tiny_gguf import write_llama, write_relu
from told import Told
from torch_graphs import same_as_reference, thresholded_graph

import hotset
from hotset.backends import decoded as weights
from hotset.backends.torch.graph import TorchGraph
from hotset.errors import HotsetError, InvalidRequestError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import dequantize
from hotset.model.predictor import Predictor
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds
from hotset.sparsity.thresholds import Thresholds
from hotset.training import thresholds as training
from hotset.training.threshold_choice import SiteBytes, ThresholdChoice, ThresholdChoices, bytes_of_sites
from hotset.training.threshold_losses import LayerLosses, LossPass, sites_of
from hotset.training.thresholds import (
    Measured,
    ThresholdSettings,
    calibrate_thresholds,
    windows_of,
)

pytest.importorskip("hotset._core", reason="the native module is not built")

QUICK = {"n_ctx": 32, "n_tokens": 256, "n_measured": 512}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bytes(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def text(path: Path) -> str:
    """Return a text by the model itself: random models predict no other text, so cuts would cost nothing."""
    with hotset.load(path, n_seqs=8) as model:
        answers = [
            model.generate("a", seed=seed, max_tokens=240, logit_bias=PRINTABLE, ignore_eos=True)
            for seed in range(24)
        ]
    return "".join(answer.text for answer in answers)


def silu(folder: Path) -> GGUFFile:
    keys = {"llama.hidden_activation": "silu"}
    return open_gguf(write_relu(folder / "silu.gguf", dialect="gguf", keys=keys))


# -- the graph in torch --------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "bamboo", "falcon", "opt"])
@pytest.mark.parametrize("dialect", ["gguf", "powerinfer"])
def test_torch_equals_the_reference(tmp_path: Path, architecture: str, dialect: Any) -> None:
    more = {"n_head_kv": 1} if architecture == "falcon" else {}
    path = write_relu(tmp_path / "model.gguf", architecture, dialect=dialect, **more)
    with open_gguf(path) as gguf:
        same_as_reference(gguf)
        if dialect == "powerinfer":
            same_as_reference(gguf, Predictor("mlp", (0.1, 0.1)))


OTHERS = ("gemma2", "gemma3", "gemma3n", "gemma3n-widths", "mistral-window", "qwen3", "phi3", "granite")
RECURRENT = (
    "lfm2",
    "qwen3next",
    "kimi-linear",
    "deepseek4",
    "qwen35",
    "nemotron-h",
    "rwkv6",
    "rwkv7",
    "mamba",
    "qwen4exp",
)
LATENT = ("deepseek2-lite", "deepseek2-v3")


@pytest.mark.parametrize("name", [*OTHERS, *RECURRENT, *LATENT])
def test_other_architectures_too(run_folder: Path, name: str) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        same_as_reference(gguf)


@pytest.mark.parametrize(
    "name", ["mixtral", "glm4moe-groups", "gpt-oss", "smallthinker", "nemotron-h-moe-latent"]
)
def test_mixtures_too(run_folder: Path, name: str) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        same_as_reference(gguf)


@pytest.mark.parametrize(
    "more", [{}, {"one_by_one": True}, {"down_neuron_major": True}], ids=lambda m: [*m, ""][0]
)
def test_experts_without_slots_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    decoded: list[int] = []

    def counted(data: np.ndarray, type: Any, shape: Any) -> np.ndarray:
        decoded.append(math.prod(shape))
        return dequantize(data, type, shape)

    monkeypatch.setattr(weights, "dequantize", counted)
    with open_gguf(write_llama(tmp_path / "model.gguf", experts=(6, 3), **more)) as gguf:
        graph, tokens = thresholded_graph(gguf), torch.arange(40)[None]
        expected = TorchGraph(gguf, graph).logits(tokens)
        decoded.clear()
        found = TorchGraph(gguf, graph, room=0).logits(tokens)
        assert torch.equal(found, expected)
        assert sum(decoded) <= sum(math.prod(info.shape) for info in gguf.tensors.values())


def assert_gradient_of_attention(gguf: GGUFFile, step: float = 1e-3) -> None:
    """Compare the gradient of attention's input with finite differences."""
    graph = thresholded_graph(gguf)
    model = TorchGraph(gguf, graph)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 96, (1, 12), generator=generator)
    site = sites_of(graph)[0]["attn_in"].out
    direction = torch.randn(12, site.width, generator=generator)
    found: list[torch.Tensor] = []

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.log_softmax(-1)[:, 7].sum()

    model.gradients(
        tokens, model.streams(tokens), loss, [site], lambda value, x, gradient: found.append(gradient)
    )

    def moved(by: float) -> float:
        edits = model.edited({site.id: lambda x: x + by * direction})
        return float(loss(model.logits(tokens, edits)))

    difference = (moved(step) - moved(-step)) / (2 * step)
    assert float((found[0] * direction).sum()) == pytest.approx(difference, rel=0.02)


def test_gradients_go_through_the_weights_of_experts(tmp_path: Path) -> None:
    """Let attention's input change the weights of the experts, but not the choice of experts."""
    with open_gguf(write_llama(tmp_path / "model.gguf", experts=(6, 3), n_layer=3)) as gguf:
        assert_gradient_of_attention(gguf)


@pytest.mark.parametrize("name", [*RECURRENT, *LATENT])
def test_gradients_go_through_states_and_latent_vectors(run_folder: Path, name: str) -> None:
    tiny_models = pytest.importorskip("tiny_models")
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        # Steep functions need small differences: RWKV 6's decay is e to the power of -e to a power.
        assert_gradient_of_attention(gguf, 1e-4 if name in ("rwkv6", "deepseek4") else 1e-3)


def test_gradients_equal_the_whole_networks(tmp_path: Path) -> None:
    """Compare gradients computed layer by layer, from kept streams, with one whole backward pass."""
    with silu(tmp_path) as gguf:
        graph = thresholded_graph(gguf)
        model = TorchGraph(gguf, graph)
        tokens = torch.from_numpy(np.random.default_rng(2).integers(0, 96, (2, 20)))
        watched = [site.out for sites in sites_of(graph) for site in sites.values()]
        assert len(watched) == 10
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def loss(logits: torch.Tensor) -> torch.Tensor:
            return logits.log_softmax(-1)[:, 7].sum()

        model.gradients(
            tokens, model.streams(tokens), loss, watched,
            lambda value, x, gradient: found.update({value.id: (x, gradient)}),
        )  # fmt: skip
        assert found.keys() == {value.id for value in watched}
        for value in watched:
            held: list[torch.Tensor] = []

            def hold(x: torch.Tensor, held: list[torch.Tensor] = held) -> torch.Tensor:
                held.append(x.detach().requires_grad_())
                return held[0]

            x: torch.Tensor | None = None
            for part in model.parts:
                x = model.run(part, tokens, x, model.edited({value.id: hold}))[part.result]
            assert x is not None
            (whole,) = torch.autograd.grad(loss(x), held)
            assert torch.equal(found[value.id][0], held[0])
            assert torch.allclose(found[value.id][1], whole, rtol=1e-3, atol=1e-5 * float(whole.abs().max()))


# -- losses --------------------------------------------------------------------------------------


def test_losses_are_half_the_squares_of_removed_values() -> None:
    """Compare losses with a mask for each threshold, for an input and for the two sites of the neurons."""
    rng = np.random.default_rng(3)
    x, g, gate = (torch.from_numpy(rng.standard_normal((9, 14)).astype(np.float32)) for _ in range(3))
    offers = {
        "ffn_in": np.array([0, 0.3, 0.9]),
        "gate": np.array([0, 0.5, 0.8, 1.1]),
        "down_in": np.array([0, 0.2, float(x.abs().max())]),
    }
    losses = LayerLosses.empty(offers, dict.fromkeys(offers, 14))
    for part in (slice(0, 4), slice(4, 9)):
        losses.add_input("ffn_in", x[part], g[part])
        losses.add_neurons(gate[part], x[part], g[part])
    moved = (x * g).double()

    def half_square(gone: torch.Tensor) -> float:
        return float((moved * gone).sum(1).square().sum() / 2)

    for i, t in enumerate(offers["ffn_in"]):
        gone = x.abs() < t
        assert losses.loss["ffn_in"][i] == pytest.approx(half_square(gone), abs=1e-9)
        assert losses.zeroed["ffn_in"][i] == gone.sum()
    for i, t in enumerate(offers["gate"]):
        assert losses.zeroed["gate"][i] == (gate.abs() < t).sum()
        for j, u in enumerate(offers["down_in"]):
            gone = (gate.abs() < t) | (x.abs() < u)
            assert losses.loss["neurons"][i, j] == pytest.approx(half_square(gone), abs=1e-9)
            assert losses.zeroed["neurons"][i, j] == gone.sum()
    # Values equal to a threshold stay.
    assert losses.zeroed["neurons"][0, 2] == 14 * 9 - 1


@pytest.mark.parametrize("name", THRESHOLD_NAMES)
def test_estimate_is_close_to_the_measured_loss(tmp_path: Path, name: str) -> None:
    """Cut one site of one layer a little, and compare the model's KL with the estimate over drawn tokens."""
    with silu(tmp_path) as gguf:
        graph = thresholded_graph(gguf)
        model = TorchGraph(gguf, graph)
        text = torch.from_numpy(np.random.default_rng(4).integers(0, 96, 48))
        losses = LossPass(model, text)
        n = 40
        for seed in range(n):
            losses.add(text, seed)
        layer = losses.layers[0]
        at = 3
        threshold = float(layer.thresholds[name][at])
        sums = layer.loss["neurons"] if name in ("gate", "down_in") else layer.loss[name]
        place = {"gate": (at, 0), "down_in": (0, at)}.get(name, at)
        predicted = float(sums[place]) / (n * 48)
        assert layer.n_tokens == n * 48
        site = losses.sites[0][name]
        before = model.logits(text[None]).double().log_softmax(-1)
        edit = {site.out.id: lambda x: torch.where(x.abs() < threshold, 0.0, x)}
        thresholded = model.logits(text[None], model.edited(edit))
        after = thresholded.double().log_softmax(-1)
        kl = float((before.exp() * (before - after)).sum(-1).mean())
        assert kl > 1e-6
        assert predicted == pytest.approx(kl, rel=0.35)


# -- choices -------------------------------------------------------------------------------------


def drawn_choices(seed: int) -> tuple[ThresholdChoices, list[LayerLosses], list[SiteBytes]]:
    rng = np.random.default_rng(seed)
    losses, sizes = [], []
    for _ in range(2):
        offers = {name: np.array([0.0, 1.0, 2.0]) for name in THRESHOLD_NAMES}
        one = LayerLosses.empty(offers, dict.fromkeys(offers, 10))
        one.n_tokens = 4
        for name in one.loss:
            steps = rng.uniform(0, 1, one.loss[name].shape)
            zeroed = rng.integers(1, 14, one.zeroed[name].shape)
            for axis in range(steps.ndim):
                steps, zeroed = steps.cumsum(axis), zeroed.cumsum(axis)
            one.loss[name] = steps - steps.flat[0]
            one.zeroed[name] = np.minimum(zeroed - zeroed.flat[0], 40)
        one.zeroed["gate"] = np.array([0, 15, 30])
        losses.append(one)
        sizes.append(SiteBytes(*rng.integers(100, 1000, 5).tolist()))
    return ThresholdChoices(losses, sizes, [True, True]), losses, sizes


def every_choice(losses: LayerLosses, size: SiteBytes) -> list[tuple[float, float]]:
    """Return (loss, bytes) of each way to cut a layer."""
    found = []
    for a, o, i, g, d in np.ndindex(3, 3, 3, 3, 3):
        share = {name: losses.zeroed[name][at] / 40 for name, at in
                 (("attn_in", a), ("attn_out", o), ("ffn_in", i), ("gate", g))}  # fmt: skip
        loss = losses.loss["attn_in"][a] + losses.loss["attn_out"][o] + losses.loss["ffn_in"][i]
        loss += losses.loss["neurons"][g, d]
        saved = share["attn_in"] * size.attn_in + share["attn_out"] * size.attn_out
        saved += share["ffn_in"] * size.gate + max(share["ffn_in"], share["gate"]) * size.up
        saved += losses.zeroed["neurons"][g, d] / 40 * size.down
        found.append((loss / 4, saved))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_no_other_choice_saves_more_at_less_loss(seed: int) -> None:
    choices, losses, sizes = drawn_choices(seed)
    ways = [every_choice(*one) for one in zip(losses, sizes, strict=True)]
    total = sum(size.total for size in sizes)
    both = np.array([(a[0] + b[0], (a[1] + b[1]) / total) for a in ways[0] for b in ways[1]])
    greatest = both[:, 0].max()
    seen = set()
    for part in (0.05, 0.2, 0.4, 0.7):
        choice = choices.with_loss(part * greatest)
        seen.add(choice.saved)
        assert choice.total_loss <= part * greatest
        better = both[(both[:, 0] < choice.total_loss - 1e-9) & (both[:, 1] > choice.saved + 1e-9)]
        assert not len(better)
        again = choices.with_share(choice.saved - 1e-9)
        assert again.saved >= choice.saved - 1e-9
        assert again.total_loss <= choice.total_loss + 1e-9
    assert len(seen) > 1
    assert choices.with_loss(0.0).saved == choices.with_loss(0.0).total_loss == 0
    assert choices.with_share(0.999).saved == pytest.approx(both[:, 1].max())


def test_only_named_sites_have_thresholds() -> None:
    _, losses, sizes = drawn_choices(0)
    for names in (("down_in",), ("gate",), ("attn_in", "ffn_in")):
        choices = ThresholdChoices([layer.only(names) for layer in losses], sizes, [True, True])
        choice = choices.with_share(0.9)
        assert any(value for layer in choice.layers for _, value in layer.items())
        for layer in choice.layers:
            assert not any(value for name, value in layer.items() if name not in names)
        # With only these sites to cut, every layer's loss equals the measured loss of its last step.
        assert choice.total_loss == pytest.approx(sum(
            one.loss[kind][-1, 0] / 4 if names == ("gate",) else
            one.loss[kind][0, -1] / 4 if names == ("down_in",) else one.loss[kind][-1] / 4
            for one in losses for kind in (names if len(names) == 2 else ("neurons",))
        ))  # fmt: skip


def test_uniform_cutoffs_cut_the_same_share_everywhere() -> None:
    _, losses, sizes = drawn_choices(1)
    for names, share in ((("down_in",), 0.5), (THRESHOLD_NAMES[1:], 0.25), (("gate",), 0.3)):
        choice = ThresholdChoices(
            [layer.only(names, share) for layer in losses], sizes, [True, True]
        ).at_price(0.0)
        for own, layer in zip(choice.layers, losses, strict=True):
            for name, value in own.items():
                counts = layer.zeroed["neurons"][0] if name == "down_in" else layer.zeroed[name]
                nearest = int(np.argmin(np.abs(counts / (layer.n_tokens * layer.widths[name]) - share)))
                assert value == (layer.thresholds[name][nearest] if name in names else 0)


def test_a_kind_that_costs_more_than_it_was_thought_is_cut_less() -> None:
    choices, _, _ = drawn_choices(0)
    before = choices.with_share(0.4)
    choices.factors["attn_in"] = choices.factors["attn_out"] = 1e6
    after = choices.with_share(0.4)
    assert any(layer.attn_in or layer.attn_out for layer in before.layers)
    assert not any(layer.attn_in or layer.attn_out for layer in after.layers)


def test_rounding_loss_does_not_change_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure factors of 2, 0.5 and 1, with a constant KL on top, which must not change the factors."""
    _, losses, sizes = drawn_choices(2)
    for one in losses:
        for values in one.loss.values():  # the first step costs next to nothing
            values[(*np.zeros(values.ndim - 1, int), 1)] = 1e-3
    choices = ThresholdChoices(losses, sizes, [True, True])
    truth = {"attn_in": 2.0, "attn_out": 0.5, "ffn_in": 1.0, "neurons": 1.0}

    def measured(self: Any, layers: Any, saved: float, n_windows: int, label: str) -> Measured:
        kl = 0.25
        for layer, one in zip(layers, losses, strict=True):
            at = {name: int(np.searchsorted(one.thresholds[name], value)) for name, value in layer.items()}
            for kind, factor in truth.items():
                place = (at["gate"], at["down_in"]) if kind == "neurons" else at[kind]
                kl += factor * float(one.loss[kind][place]) / one.n_tokens
        return Measured(saved, 9.0, 9.0, 0.0, 0.0, kl, 1.0, 100)

    search = object.__new__(training.Search)
    search.held, search.progress = np.zeros((3, 8), np.int32), None
    monkeypatch.setattr(training.Search, "_measure", measured)
    choice = choices.with_share(0.99)
    assert all(loss > 0.1 for loss in choice.loss.values())
    search._measure_kinds(choices, choice)
    assert choices.factors == pytest.approx(truth, rel=0.1)


def test_cuts_of_one_kind() -> None:
    layer = LayerThresholds(gate=1, attn_in=2, attn_out=3, ffn_in=4, down_in=5)
    choice = ThresholdChoice((layer,), {}, 0.5)
    assert choice.only("neurons") == (LayerThresholds(gate=1, down_in=5),)
    assert choice.only("ffn_in") == (LayerThresholds(ffn_in=4),)


@pytest.mark.parametrize("architecture", ["llama", "falcon", "opt"])
def test_bytes_equal_the_matrices(tmp_path: Path, architecture: str) -> None:
    more = {"n_head_kv": 1} if architecture == "falcon" else {}
    with open_gguf(write_relu(tmp_path / "m.gguf", architecture, dialect="gguf", **more)) as gguf:
        for i, size in enumerate(bytes_of_sites(thresholded_graph(gguf), gguf)):
            names = [f"blk.{i}.{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "attn_qkv")]
            of = {name: info.nbytes for name, info in gguf.tensors.items()}
            assert size.attn_in == sum(of.get(name, 0) for name in names)
            assert size.attn_out == of[f"blk.{i}.attn_output.weight"]
            assert size.gate == of.get(f"blk.{i}.ffn_gate.weight", 0)
            assert size.up == of[f"blk.{i}.ffn_up.weight"]
            assert size.down == of[f"blk.{i}.ffn_down.weight"]


# -- the whole -----------------------------------------------------------------------------------


def test_the_place_of_a_window_does_not_depend_on_the_rest(path: Path, text: str) -> None:
    with hotset.load(path, device="reference") as model:
        learned, held = windows_of(model, text, 32)
        fewer = windows_of(model, text[: len(text) // 2 // 31 * 31], 32)
    assert len(learned) > len(held) > 20
    assert not {row.tobytes() for row in learned} & {row.tobytes() for row in held}
    assert (held[:, 0] == 256).all()  # each begins with BOS
    for whole, part in zip((learned, held), fewer, strict=True):
        known = [row.tobytes() for row in whole]
        places = [known.index(row.tobytes()) for row in part if row.tobytes() in known]
        assert len(places) >= len(part) - 1
        assert places == sorted(places)


def test_calibration_for_a_rise_of_perplexity(path: Path, text: str, tmp_path: Path) -> None:
    out = tmp_path / "out.thresholds.json"
    told = Told()
    found = calibrate_thresholds(
        path, text, out, ThresholdSettings(max_increase=0.02, **QUICK), progress=told
    )
    assert found.measured.increase <= 0.02
    assert 0 < found.measured.kl <= 5 * math.log(1.02)
    assert found.measured.saved > 0.02
    assert found.thresholds == Thresholds.open(out)
    assert not found.thresholds.prompts
    for i, layer in enumerate(found.thresholds.layers):
        for name, threshold in layer.items():
            kept = found.thresholds.kept(i, name)
            assert kept is not None
            assert 0 < kept <= 1
            assert kept < 1 or not threshold
    assert found.thresholds.measured["target"] == {"max_increase": 0.02}
    assert 0 < (found.thresholds.kept(0, "down_in") or 0) < 1  # placement/channels.py uses this share
    assert not (tmp_path / "out.thresholds.json.work").exists()
    (n_layers,) = {total for label, _, total in told.steps if label == "losses"}
    assert ("losses", 0, n_layers) in told.steps
    assert ("losses", n_layers, n_layers) in told.steps
    # The reported values equal the engine's on the held-out windows, if this machine applies every threshold.
    replace(found.thresholds, measured={}).save(out)
    with hotset.load(path, n_ctx=32) as dense, hotset.load(path, n_ctx=32, thresholds=out) as thresholded:
        _, held = windows_of(dense, text, 32)
        from hotset.engine.perplexity import compare_chunks

        tokens = held[:16].flatten().tolist()
        *_, (_, other) = compare_chunks(
            [dense.engine, thresholded.engine], tokens, n_ctx=32, n_neurons=[0, 0]
        )
    assert other.divergence is not None
    assert other.divergence.ppl_ratio - 1 == found.measured.increase
    assert other.divergence.kl == found.measured.kl > 0


def test_calibration_for_a_share(path: Path, text: str, tmp_path: Path) -> None:
    found = calibrate_thresholds(path, text, tmp_path / "out.json", ThresholdSettings(share=0.3, **QUICK))
    assert 0.3 <= found.measured.saved < 0.33
    assert found.problems == ()
    settings = ThresholdSettings(share=0.3, only=("ffn_in", "gate"), **QUICK)
    found = calibrate_thresholds(path, text, tmp_path / "out.json", settings)
    for layer in found.thresholds.layers:
        assert not any((layer.attn_in, layer.attn_out, layer.down_in))
    assert found.thresholds.measured["target"] == {"share": 0.3, "only": ["ffn_in", "gate"]}


def test_a_uniform_share(path: Path, text: str, tmp_path: Path) -> None:
    settings = ThresholdSettings(uniform=0.5, only=("down_in",), **QUICK)
    found = calibrate_thresholds(path, text, tmp_path / "out.json", settings)
    for i, layer in enumerate(found.thresholds.layers):
        assert [name for name, value in layer.items() if value] == ["down_in"]
        assert found.thresholds.kept(i, "down_in") == pytest.approx(0.5, abs=0.05)
    assert found.measured.kl > 0


def test_killed_run_resumes(path: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ThresholdSettings(max_increase=0.02, **QUICK)
    whole = calibrate_thresholds(path, text, tmp_path / "whole.json", settings)
    out, work = tmp_path / "out.json", tmp_path / "work"
    n_passes = n_measured = 0
    add, compare = LossPass.add, training.Search._compare

    def counted_add(self: LossPass, *arguments: Any, **named: Any) -> None:
        nonlocal n_passes
        n_passes += 1
        add(self, *arguments, **named)

    def counted_compare(self: Any, *arguments: Any) -> Any:
        nonlocal n_measured
        n_measured += 1
        return compare(self, *arguments)

    monkeypatch.setattr(LossPass, "add", counted_add)
    monkeypatch.setattr(training.Search, "_compare", counted_compare)
    per_window = 2 * 2  # two layers, forward and back
    for stop in (("losses", 3 * per_window + 1), ("kind 2 of 4", 0), ("round 1", 4 * 32)):
        with pytest.raises(KeyboardInterrupt):
            calibrate_thresholds(path, text, out, settings, work=work, progress=Told(stop))
        assert not out.exists()
    # The interrupted pass and the interrupted measurement ran twice.
    assert (n_passes, n_measured) == (9, 7)
    again = calibrate_thresholds(path, text, out, settings, work=work, keep=True)
    assert n_passes == 9
    assert again.thresholds == whole.thresholds
    n_before = n_measured
    other = calibrate_thresholds(
        path, text, out, ThresholdSettings(max_increase=0.02, **QUICK), work=work, keep=True
    )
    assert (other.thresholds, n_measured) == (whole.thresholds, n_before)
    assert n_passes == 9


def test_a_model_with_predictors_is_cut_in_addition(text: str, tmp_path: Path) -> None:
    from byte_models import write_sparse

    model = write_sparse(tmp_path / "m.gguf")
    for mode in ("exact", None):
        settings = ThresholdSettings(share=0.3, mode=mode, **QUICK)
        found = calibrate_thresholds(model, text, tmp_path / "out.json", settings)
        assert found.thresholds.mode == (mode or "predicted")
        assert any(layer.attn_in for layer in found.thresholds.layers)
        with hotset.load(model, thresholds=tmp_path / "out.json") as loaded:
            assert loaded.sparsity.mode == "threshold"


def test_a_moe_is_cut(text: str, tmp_path: Path) -> None:
    model, out = write_bytes(tmp_path / "m.gguf", experts=(4, 2)), tmp_path / "out.json"
    found = calibrate_thresholds(model, text, out, ThresholdSettings(share=0.3, **QUICK))
    assert (
        found.measured.saved >= 0.3
    )  # share of the bytes of attention and of the up matrices of a token's experts
    assert found.measured.kl > 0
    for layer, kept in zip(found.thresholds.layers, found.thresholds.measured["kept"], strict=True):
        assert layer.attn_in or layer.attn_out
        assert layer.gate
        assert not layer.ffn_in
        assert not layer.down_in
        assert kept.keys() == {"attn_in", "attn_out", "gate"}
    with hotset.load(model, thresholds=out) as thresholded, hotset.load(model) as dense:
        assert thresholded.sparsity.mode == "threshold"
        _, other = hotset.compare([dense, thresholded], text[:400], n_ctx=32)
    assert other.divergence is not None
    assert other.divergence.kl > 0


@pytest.mark.parametrize("neuron_major", [False, True])
def test_gates_of_experts_cost_the_prediction(text: str, tmp_path: Path, neuron_major: bool) -> None:
    model = write_bytes(tmp_path / "m.gguf", experts=(4, 2), down_neuron_major=neuron_major)
    settings = ThresholdSettings(uniform=0.4, only=("gate",), **QUICK)
    found = calibrate_thresholds(model, text, tmp_path / "out.json", settings)
    measured = found.measured
    assert measured.kl > 0
    assert 0.25 < found.predicted["neurons"] / measured.kl < 4
    for kept in found.thresholds.measured["kept"]:
        assert kept["gate"] == pytest.approx(0.6, abs=0.03)
    with open_gguf(model) as gguf:
        experts = [info.nbytes for info in gguf.tensors.values() if "_exps" in info.name]
        others = [
            info.nbytes for info in gguf.tensors.values() if ".attn_" in info.name and "norm" not in info.name
        ]
    thresholded = (
        sum(experts) / 2 * (2 if neuron_major else 1) / 3
    )  # half of the experts: up, and a neuron-major down
    assert measured.saved == pytest.approx(0.4 * thresholded / (thresholded + sum(others)), rel=0.05)


def test_uncalibratable_models_are_refused(path: Path, text: str, tmp_path: Path) -> None:
    settings = ThresholdSettings(max_increase=0.01, **QUICK)
    with pytest.raises(InvalidRequestError, match="the text is too short: it has"):
        calibrate_thresholds(path, "a b c", tmp_path / "o.json", settings)
    with pytest.raises(InvalidRequestError, match="is one of the files that are read"):
        calibrate_thresholds(path, text, path, settings)
    with pytest.raises(HotsetError, match="no thresholds were found with an increase of perplexity below 0"):
        calibrate_thresholds(path, text, tmp_path / "o.json", ThresholdSettings(max_increase=1e-9, **QUICK))
    assert not (tmp_path / "o.json").exists()
    moe_layer = write_bytes(tmp_path / "experts.gguf", experts=(4, 2))
    settings = ThresholdSettings(share=0.5, only=("ffn_in", "down_in"), **QUICK)
    with pytest.raises(
        InvalidRequestError,
        match="no sites for ffn_in, down_in: experts only have thresholds of gates",
    ):
        calibrate_thresholds(moe_layer, text, tmp_path / "o.json", settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "one target"),
        ({"share": 0.5, "max_increase": 0.1}, "one target"),
        ({"share": 1.0}, "between 0 and 1"),
        ({"share": math.nan}, "between 0 and 1"),
        ({"max_increase": 0.0}, "above 0"),
        ({"max_increase": 11}, "above 0"),
        ({"share": 0.5, "uniform": 0.1}, "one target"),
        ({"uniform": 1.0}, "between 0 and 1"),
        ({"share": 0.5, "only": ()}, "some of gate, attn_in"),
        ({"share": 0.5, "only": ("down",)}, "not 'down'"),
        ({"share": 0.5, "mode": "threshold"}, "thresholds are added to one of dense, exact, predicted"),
    ],
)
def test_targets_that_mean_nothing(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ThresholdSettings(**settings)


def test_the_table(
    path: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import thresholds

    file = tmp_path / "text.txt"
    file.write_text(text)
    shown = tmp_path / "shown.svg"
    words = ["--n-ctx", 64, "--tokens", 128, "--measured", 256, "--chunks", 4, "--rounds", 1, "--answer", 4]
    arguments = ["--model", path, "--calibrate", file, "--judge", file, "--work", tmp_path / "work", *words]
    arguments += ["--targets", "0.2,0.4", "--uniform", "0.5:attn_out+down_in", "--plot", shown]
    monkeypatch.setattr("sys.argv", ["x", *map(str, arguments)])
    thresholds.main()
    *_, last = capsys.readouterr().out.strip().splitlines()
    rows = json.loads(last)["results"]
    kind = "0.5:attn_out+down_in"
    assert [row["target"] for row in rows] == ["0.2", "0.4", f"uniform {kind}", f"searched {kind}"]
    assert 0.2 <= rows[0]["saved"] < 0.4 <= rows[1]["saved"]
    # Thresholds that skip nothing at this machine's rates are not applied.
    assert all(row["matrices"] for row in rows if row["kl"] > 0)
    assert rows[2]["saved"] <= rows[3]["saved"] < 1.1 * rows[2]["saved"]
    assert all(row["speed"] > 0 for row in rows)
    assert shown.stat().st_size > 1000


def test_the_subcommand(path: Path, text: str, tmp_path: Path) -> None:
    file, out = tmp_path / "text.txt", tmp_path / "t.json"
    file.write_text(text)
    quick = ["-c", 32, "--tokens", 256, "--measured", 512, "-o", out]
    done = inside("calibrate", path, "-f", file, "--max-ppl-increase", "2%", "--json", *quick)
    found = json.loads(done.stdout)
    assert found.keys() == {"path", "measured", "foreseen", "gain", "layers", "problems"}
    assert found["path"] == str(out)
    assert found["measured"]["increase"] <= 0.02
    assert re.search(r"losses: (\d+) of \1 layers", done.stderr)
    done = inside("perplexity", path, "-f", file, "-c", 32, "--chunks", 4, "--thresholds", out, "--json")
    assert json.loads(done.stdout)["sparsity"] == "threshold"
    done = inside("calibrate", path, "-f", file, "--sparsity", "0.3", *quick)
    assert "all thresholded" in done.stdout
    done = inside(
        "calibrate", path, "-f", file, "--uniform", "0.3", "--only", "down_in,gate", "--json", *quick
    )
    thresholded = {
        name for layer in json.loads(done.stdout)["layers"] for name, value in layer.items() if value
    }
    assert thresholded == {"gate", "down_in"}
    for wrong in (
        ("--max-ppl-increase", "1%%"), ("--sparsity", "half"), ("--sparsity", "-1"), ("--only", "down"),
    ):  # fmt: skip
        inside("calibrate", path, "-f", file, *wrong, *quick, returns=2)
    done = inside(
        "calibrate", path, "-f", file, "--sparsity", "0.5", "--max-ppl-increase", "1", *quick, returns=2
    )
    assert "needs one target" in done.stderr
