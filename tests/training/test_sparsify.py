"""Sparsifying a model: the student, its closed-form start, training, resuming, merging, the command."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import quick_are
from tiny_gguf import write_llama, write_relu
from told import Told
from waiting import WATCHDOG

from hotset.errors import FormatError, HotsetError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFWriter, open_gguf
from hotset.formats.imatrix import ImportanceMatrix, Inputs
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.config import config_from_gguf

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

import hotset  # noqa: E402
from hotset.backends.torch.functions import rms_norm  # noqa: E402
from hotset.backends.torch.graph import TorchGraph  # noqa: E402
from hotset.convert.reorder import reorder  # noqa: E402
from hotset.sparsity.profile import collect  # noqa: E402
from hotset.sparsity.sidecar import fingerprint  # noqa: E402
from hotset.training import generate as writing  # noqa: E402
from hotset.training.adapters import TrainedAdapters, digest, merge  # noqa: E402
from hotset.training.calibrate import LayerTarget, calibrate, cheapest, choose_targets, kernel_widths  # noqa: E402
from hotset.training.generate import circles, generate, read_documents  # noqa: E402
from hotset.training.sparsify import (  # noqa: E402
    SparsifySettings,
    TorchTeacher,
    Training,
    TrainingTexts,
    read_curve,
)
from hotset.training.student import (  # noqa: E402
    Activity,
    LowRankLinear,
    SparseGLU,
    Student,
    load_base,
)
from hotset.training.text import (  # noqa: E402
    Mixture,
    WeightedText,
    parse_amount,
    parse_text,
    split_held_out,
)

N_CTX = 32
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 96, 6000).astype(np.int32)


@pytest.fixture(scope="module")
def silu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("silu") / "silu.gguf", spread=lambda name: 1.0)


def training(path: Path, folder: Path, **settings: Any) -> Training:
    folder.mkdir(exist_ok=True)
    gguf = open_gguf(path)
    base = load_base(gguf)
    defaults: dict[str, Any] = {
        "n_ctx": N_CTX, "batch": 2, "rank": 8, "warmup": 2, "n_tokens": 40 * 2 * N_CTX,
    }  # fmt: skip
    return Training(
        base, TorchTeacher(base),
        TrainingTexts(
            Mixture([WeightedText("random", TOKENS[:4000])], N_CTX),
            torch.from_numpy(TOKENS[4000 : 4000 + 8 * N_CTX].reshape(8, N_CTX)).long(),
        ),
        folder, SparsifySettings(**{**defaults, **settings}), model=digest(gguf),
    )  # fmt: skip


def hidden(
    base: TorchGraph, tokens: torch.Tensor, student: Student | None = None, activity: Any = None
) -> torch.Tensor:
    """Return the input of the output matrix."""
    compute = None if student is None else student.compute(activity)
    output = base.graph.ops[-1]
    stream = base.streams(tokens, compute)[-1]
    (read,) = output.inputs
    return base.run(base.parts[-1], tokens, stream, compute, until=read)[read]


def thread_names() -> list[str]:
    return [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]


def logits_of(path: Path, tokens: np.ndarray) -> np.ndarray:
    with hotset.load(path, device="reference", kv_type="f32", n_ctx=64) as model:
        return model.logits(tokens.tolist())


class TestNetwork:
    @pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
    @pytest.mark.parametrize("tied", [False, True])
    def test_equals_the_reference(self, tmp_path: Path, architecture: str, tied: bool) -> None:
        path = write_llama(tmp_path / "m.gguf", architecture=architecture, tied=tied)
        with open_gguf(path) as gguf:
            base = load_base(gguf)
        tokens = TOKENS[:40]
        got = base.logits(torch.from_numpy(tokens).long()[None]).numpy()
        wanted = logits_of(path, tokens)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())

    @pytest.mark.parametrize("recipe", ["llama", "llama-biases", "mistral-window", "smollm3"])
    def test_equals_the_checkpoint(self, tmp_path: Path, recipe: str) -> None:
        model = tiny_models.build(tiny_models.RECIPES[recipe])
        with open_gguf(tiny_models.to_gguf(tiny_models.RECIPES[recipe], model, tmp_path)) as gguf:
            base = load_base(gguf)
        tokens = torch.from_numpy(TOKENS[:64]).long()[None]
        with torch.no_grad():
            wanted = model(tokens).logits[0]
            got = base.logits(tokens)
        assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))

    def test_a_batch_is_its_rows(self, silu: Path) -> None:
        with open_gguf(silu) as gguf:
            base = load_base(gguf)
        tokens = torch.from_numpy(TOKENS[: 3 * N_CTX]).long().view(3, N_CTX)
        with torch.no_grad():
            together = base.logits(tokens).view(3, N_CTX, -1)
            for i in range(3):
                torch.testing.assert_close(together[i], base.logits(tokens[i : i + 1]), rtol=1e-4, atol=1e-4)

    def test_model_of_another_family_is_refused(self, tmp_path: Path) -> None:
        for architecture in ("falcon", "opt", "llama"):  # the last in PowerInfer's dialect
            dialect = "powerinfer" if architecture == "llama" else "gguf"
            path = write_relu(tmp_path / f"{architecture}.gguf", architecture, dialect=dialect)
            with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match="Llama family"):
                load_base(gguf)

    @pytest.mark.parametrize(
        ("recipe", "reason"),
        [
            ("gemma2", "scales or caps its logits"),
            ("gemma3", "has norms after its FFNs"),
            ("granite", "scales or caps its logits"),
            ("lfm2", r"has the matrix blk\.0\.shortconv"),
            ("mixtral", r"has the matrix blk\.0\.ffn_"),
            ("nemotron", "has layer norms"),
            ("phi3", r"has the matrix blk\.0\.attn_qkv\.weight"),
            ("phi3-short", "has a separate rotation for long contexts"),
        ],
    )
    def test_other_layers_are_refused(self, run_folder: Path, recipe: str, reason: str) -> None:
        path = tiny_models.shared_gguf(recipe, run_folder)
        with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match=reason):
            load_base(gguf)


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(got: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Check that the values are equal, and the gradients of a random weighting of them too."""
    torch.testing.assert_close(got, wanted)
    weight = torch.randn_like(wanted)
    for own, plain in zip(
        torch.autograd.grad((got * weight).sum(), inputs),
        torch.autograd.grad((wanted * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(own, plain)


class TestFusedFunctions:
    @pytest.mark.parametrize("shape", [(5,), (2, 3)])
    def test_low_rank_linear(self, shape: tuple[int, ...]) -> None:
        x, bias, a, b = doubles(*shape, 7), doubles(4), doubles(2, 7), doubles(4, 2)
        weight = torch.randn(4, 7, dtype=torch.float64)
        wanted = torch.nn.functional.linear(x, weight + b @ a, bias)
        assert_same_gradients(LowRankLinear.apply(x, weight, bias, a, b), wanted, [x, bias, a, b])
        without = LowRankLinear.apply(x, weight, None, a, b)
        assert_same_gradients(without, torch.nn.functional.linear(x, weight + b @ a), [x, a, b])

    @pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
    def test_rms_norm(self, shape: tuple[int, ...]) -> None:
        x, weight = doubles(*shape), doubles(8)
        wanted = torch.nn.functional.rms_norm(x, (8,), weight, 0.3)
        assert_same_gradients(rms_norm(x, weight, 0.3), wanted, [x, weight])


class TestSparseGLU:
    @pytest.mark.parametrize("both", [False, True])
    def test_value_and_gradient_equal_the_plain_formula(self, both: bool) -> None:
        gate, up = doubles(5, 7), doubles(5, 7)
        scale = doubles(7)
        got = SparseGLU.apply(gate, up, scale, both, 0.0, 1.0)
        wanted = gate.relu() * (up.relu() if both else up) * scale
        assert_same_gradients(got, wanted, [gate, up, scale])

    @pytest.mark.parametrize("both", [False, True])
    def test_price_follows_the_share(self, both: bool) -> None:
        """Shift every gate a little: the share of active neurons must change as the gradient predicts."""
        generator = torch.Generator().manual_seed(0)
        gate = torch.randn(1000, 400, generator=generator, requires_grad=True)
        up = torch.randn(1000, 400, generator=generator, requires_grad=True)
        width, price = 0.1, 3.0
        value = SparseGLU.apply(gate, up, torch.ones(400), both, price / gate.numel(), width)
        value.backward(torch.zeros_like(gate))

        def share(shift: float) -> float:
            fires = gate.detach() + shift > 0
            if both:
                fires &= up.detach() + shift > 0
            return float(fires.float().mean())

        slope = price * (share(width) - share(-width)) / (2 * width)
        moved = gate.grad.sum() + (up.grad.sum() if both else 0.0)
        assert float(moved) == pytest.approx(slope, rel=0.05)


class TestCalibration:
    @pytest.mark.parametrize("activation", ["relu", "drelu"])
    @pytest.mark.parametrize("rank", [0, 8])
    def test_start_is_near_and_sparse(self, silu: Path, activation: Any, rank: int) -> None:
        with open_gguf(silu) as gguf:
            base = load_base(gguf)
        tokens = torch.from_numpy(TOKENS[: 64 * N_CTX]).long().view(64, N_CTX)
        fitted, cut_only = Student(base, activation, rank), Student(base, activation, rank)
        calibrate(base, fitted, tokens, [LayerTarget(0.28)] * 2)
        widths = kernel_widths(base, fitted, tokens)
        assert len(widths) == 2
        assert min(widths) > 0
        with torch.no_grad():
            wanted = hidden(base, tokens[:8])
            activity = Activity()
            start = hidden(base, tokens[:8], fitted, activity)
            cut_only.load(dict(fitted.named_values()))
            for name, value in cut_only.named_values():
                if "ffn_down" in name:
                    value.zero_()
            unfitted = hidden(base, tokens[:8], cut_only)
        assert float(torch.stack(activity.share).mean()) == pytest.approx(0.28, abs=0.05)
        missed, missed_by_cuts = ((x - wanted).square().mean() for x in (start, unfitted))
        assert float(missed) < (0.95 if rank else 0.8) * float(missed_by_cuts)


def small_gate(name: str) -> float:
    return 0.3 if "ffn_gate" in name else 1.0


@pytest.fixture(scope="module")
def small_gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with gates where SiLU is nearly linear, as in the middle layers of a real model."""
    return write_llama(tmp_path_factory.mktemp("small") / "gates.gguf", spread=small_gate)


@pytest.fixture(scope="module")
def base(small_gates: Path) -> TorchGraph:
    with open_gguf(small_gates) as gguf:
        return load_base(gguf)


@pytest.fixture(scope="module")
def shifted(tmp_path_factory: pytest.TempPathFactory) -> TorchGraph:
    """Write a model with gates near -1, where SiLU is nearly constant and a neuron nearly linear."""
    biases = {f"blk.{i}.ffn_gate.bias": [-1.0] * 96 for i in range(2)}
    path = tmp_path_factory.mktemp("shifted") / "gates.gguf"
    with open_gguf(write_llama(path, spread=small_gate, vectors=biases)) as gguf:
        return load_base(gguf)


class TestLinearPath:
    TEXT = torch.from_numpy(TOKENS[: 64 * N_CTX]).long().view(64, N_CTX)

    def start(
        self, base: TorchGraph, targets: list[LayerTarget], rank: int = 8
    ) -> tuple[Student, float, float]:
        """Return the student, its error of the last hidden state on other text, and its active share."""
        student = Student(base, "relu", rank)
        calibrate(base, student, self.TEXT, targets)
        other = torch.from_numpy(TOKENS[64 * N_CTX : 80 * N_CTX]).long().view(16, N_CTX)
        activity = Activity()
        with torch.no_grad():
            missed = (hidden(base, other, student, activity) - hidden(base, other)).square().mean()
        return student, float(missed), float(torch.stack(activity.share).mean())

    def test_it_says_more_than_as_many_sparse_neurons(self, shifted: TorchGraph) -> None:
        n_ff = shifted.graph.ffns[0].n_ff
        _, missed, active = self.start(shifted, [LayerTarget(0.3)] * 2)
        student, missed_less, active_too = self.start(shifted, [LayerTarget(0.2, n_ff // 8)] * 2)
        assert missed_less < 0.8 * missed
        assert active_too == pytest.approx(active, abs=0.05)
        for layer in range(2):
            scale, bias = (student.get(f"blk.{layer}.{name}") for name in ("ffn_scale", "ffn_gate.bias"))
            assert scale is not None
            assert bias is not None
            assert int((scale == 0).sum()) == int((bias < -100).sum()) == n_ff // 8
        assert max(kernel_widths(shifted, student, self.TEXT)) < 1  # retired gates do not count

    def test_it_comes_along_into_the_file(self, small_gates: Path, base: TorchGraph, tmp_path: Path) -> None:
        n_ff = base.graph.ffns[0].n_ff
        student, _, _ = self.start(base, [LayerTarget(0.2, n_ff // 8), LayerTarget(0.3)])
        values = {name: value.detach().numpy() for name, value in student.named_values()}
        with open_gguf(small_gates) as gguf:
            adapters = TrainedAdapters(values, "relu", 8, digest(gguf))
            adapters.save(tmp_path / "a.safetensors")
            merge(gguf, adapters, tmp_path / "out.gguf", GGMLType.F32)
            merge(
                gguf, TrainedAdapters.open(tmp_path / "a.safetensors"), tmp_path / "int8.gguf", GGMLType.F32
            )
        tokens = TOKENS[5000 : 5000 + N_CTX]
        with torch.no_grad():
            wanted = base.logits(torch.from_numpy(tokens).long()[None], student.compute()).numpy()
        size = np.abs(wanted).max()
        np.testing.assert_allclose(logits_of(tmp_path / "out.gguf", tokens), wanted, atol=1e-3 * size)
        assert np.abs(logits_of(tmp_path / "int8.gguf", tokens) - wanted).max() < 0.1 * size
        with open_gguf(tmp_path / "out.gguf") as gguf:
            info = gguf.tensors["blk.0.ffn_gate.weight"]
            gate = gguf.data("blk.0.ffn_gate.weight").view(np.float32).reshape(info.shape[::-1])
            always = np.flatnonzero(~gate.any(1))
            assert len(always) == n_ff // 8
            assert (gguf.data("blk.0.ffn_gate.bias").view(np.float32)[always] == 1).all()

    def test_a_student_takes_it_from_adapters(self, base: TorchGraph) -> None:
        student, _, _ = self.start(base, [LayerTarget(0.2, 5), LayerTarget(0.3)])
        other = Student(base, "relu", 12)
        other.load(dict(student.named_values()))
        tokens = self.TEXT[:2]
        with torch.no_grad():
            want, got = (hidden(base, tokens, one) for one in (student, other))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

    def test_the_choice_keeps_to_the_share(self, shifted: TorchGraph) -> None:
        targets = choose_targets(shifted, self.TEXT, 0.3, shifted.graph.ffns[0].n_ff // 8)
        assert any(choice.n_linear for choice in targets)
        _, missed, active = self.start(shifted, targets)
        assert active == pytest.approx(0.3, abs=0.05)
        assert missed < self.start(shifted, [LayerTarget(0.3)] * 2)[1]
        assert all(choice.n_linear == 0 for choice in choose_targets(shifted, self.TEXT, 0.3))

    def test_the_layers_that_suffer_more_get_more(self) -> None:
        """Find the least sum of all layers' errors, among all targets within the share, by brute force."""
        rng = np.random.default_rng(4)
        shares = np.array([0.05, 0.1, 0.2, 0.3, 0.5])
        options = [
            [(float(weight / s), float(s), LayerTarget(float(s))) for s in shares]
            for weight in rng.uniform(0.1, 10, 4)
        ]
        chosen = [choice.share for choice in cheapest(options, 0.25)]
        suffered = sum(layer[list(shares).index(s)][0] for layer, s in zip(options, chosen, strict=True))
        assert sum(chosen) <= 4 * 0.25
        for other in itertools.product(range(5), repeat=4):
            if sum(shares[list(other)]) <= sum(chosen) + 1e-9:
                assert sum(options[i][o][0] for i, o in enumerate(other)) >= suffered - 1e-9

    def test_drelu_has_none(self) -> None:
        with pytest.raises(InvalidRequestError, match="activation='relu'"):
            SparsifySettings(activation="drelu", linear=4)


def test_adapters_do_not_depend_on_strides_and_keep_small_channels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 30), np.float32)
    a[:, 7] *= 1000  # a channel that is larger than the others
    values = {"blk.0.attn_q.a": np.asfortranarray(a), "blk.0.attn_q.b": a.T.copy()}
    TrainedAdapters(values, "relu", 4, "x").save(tmp_path / "a.safetensors")
    got = TrainedAdapters.open(tmp_path / "a.safetensors").values
    for name, value in values.items():
        axis = 0 if name.endswith(".a") else 1
        error = np.abs(got[name] - value).max(axis)
        assert (error < 0.02 * np.abs(value).max(axis)).all()


class TestTraining:
    def test_the_start_tells_how_far_it_is(self, silu: Path, tmp_path: Path) -> None:
        reporter = Told()
        training(silu, tmp_path / "run").prepare(reporter)
        labels = ("choosing layers", "calibrating layers")
        assert reporter.steps == [(label, done, 2) for label in labels for done in (0, 1, 2)]

    @pytest.mark.parametrize("labels", [0.0, 0.3])
    @pytest.mark.slow
    def test_training_recovers_the_teacher(self, silu: Path, tmp_path: Path, labels: float) -> None:
        """Add noise to one matrix of the student: training must recover the teacher, as the curve shows."""
        run = training(silu, tmp_path / "run", lr=1e-2, vector_lr=1e-3, labels=labels, scored=0.7)
        run.prepare()
        noisy = run.student.get("blk.0.attn_output.b")
        assert noisy is not None
        with torch.no_grad():
            noisy.copy_(0.3 * torch.randn(noisy.shape, generator=torch.Generator().manual_seed(1)))
        run.run(eval_every=20, save_every=40)
        curve = read_curve(tmp_path / "run" / "curve.jsonl")
        assert [line["step"] for line in curve] == [0, 20, 40]
        assert [line["tokens"] for line in curve] == [0, 20 * 2 * N_CTX, 40 * 2 * N_CTX]
        assert curve[-1]["kl"] < 0.6 * curve[0]["kl"]
        assert len(curve[-1]["idle_per_layer"]) == 2

    def test_neurons_become_idle(self, silu: Path, tmp_path: Path) -> None:
        """Check that half of the neurons fire after the swap, and that the price makes more of them idle."""
        run = training(silu, tmp_path / "run", vector_lr=1e-2, price=2.0, n_tokens=60 * 2 * N_CTX)
        run.widths = kernel_widths(run.base, run.student, run.texts.held_out)
        assert run.evaluate().idle == pytest.approx(0.5, abs=0.05)
        run.run(eval_every=100, save_every=100)
        assert run.evaluate().idle == pytest.approx(0.72, abs=0.06)

    @pytest.mark.slow
    def test_calibrated_share_stays(self, silu: Path, tmp_path: Path) -> None:
        run = training(silu, tmp_path / "run")
        run.prepare()
        run.run(eval_every=20, save_every=40)
        for line in read_curve(tmp_path / "run" / "curve.jsonl"):
            assert line["idle"] == pytest.approx(0.72, abs=0.05)

    @pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 4])
    @pytest.mark.slow
    def test_resumes_after_a_kill(self, silu: Path, tmp_path: Path, rank: int) -> None:
        class KilledError(Exception):
            pass

        def kill(run: Training) -> None:
            if run.step == 7:
                raise KilledError

        options = {"rank": rank, "n_tokens": 12 * 2 * N_CTX}
        whole = training(silu, tmp_path / "whole", **options)
        whole.prepare()
        whole.run(eval_every=3, save_every=4)
        killed = training(silu, tmp_path / "killed", **options)
        killed.prepare()
        with pytest.raises(KilledError):
            killed.run(eval_every=3, save_every=4, on_step=kill)
        assert [line["step"] for line in read_curve(tmp_path / "killed" / "curve.jsonl")] == [0, 3, 6]
        resumed = training(silu, tmp_path / "killed", **options)
        reporter = Told()
        resumed.prepare(reporter)
        assert reporter.said == [f"resumed after {4 * 2 * N_CTX} tokens"]
        resumed.run(eval_every=3, save_every=4)
        curves = [read_curve(tmp_path / name / "curve.jsonl") for name in ("whole", "killed")]
        for one, other in zip(*curves, strict=True):
            del one["seconds"], other["seconds"]
            assert one == other
        first, second = (
            TrainedAdapters.open(tmp_path / n / "adapters.safetensors") for n in ("whole", "killed")
        )
        for name, value in first.values.items():
            np.testing.assert_array_equal(value, second.values[name])
        assert not list((tmp_path / "killed").glob(".*"))

    def test_other_settings_do_not_resume(self, silu: Path, tmp_path: Path) -> None:
        run = training(silu, tmp_path / "run")
        run.prepare()
        run.save()
        with pytest.raises(InvalidRequestError, match="other settings \\(idle\\)"):
            training(silu, tmp_path / "run", idle=0.5).prepare()

    def test_time_can_end_it(self, silu: Path, tmp_path: Path) -> None:
        run = training(silu, tmp_path / "run", hours=1.0)
        run.prepare()
        run.train_step()
        assert 0 < run.progress < 0.01
        run.seconds = 3600.0
        assert run.progress == 1

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"activation": "silu"}, "relu or drelu"),
            ({"rank": -1}, "rank"),
            ({"idle": 1.0}, "`idle`"),
            ({"batch": 0}, "at least 1"),
            ({"lr": float("nan")}, "learning rate"),
            ({"lr": 0.0}, "learning rate"),
            ({"vector_lr": 0.0}, "learning rate"),
            ({"vector_lr": float("inf")}, "learning rate"),
        ],
    )
    def test_settings_are_checked(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            SparsifySettings(**settings)


class TestMerging:
    @pytest.mark.parametrize("activation", quick_are(("relu",), ["relu", "drelu"]))
    @pytest.mark.parametrize("rank", quick_are((8,), [0, 8]))
    def test_merged_file_is_the_student(self, silu: Path, tmp_path: Path, activation: str, rank: int) -> None:
        run = training(silu, tmp_path / "run", activation=activation, rank=rank, n_tokens=5 * 2 * N_CTX)
        run.prepare()
        run.run(eval_every=100, save_every=100)
        adapters = TrainedAdapters.open(tmp_path / "run" / "adapters.safetensors")
        run.student.load({name: torch.from_numpy(value) for name, value in adapters.values.items()})
        out = tmp_path / "merged.gguf"
        with open_gguf(silu) as gguf:
            merge(gguf, adapters, out, GGMLType.F32)
        tokens = TOKENS[:N_CTX]
        with torch.no_grad():
            wanted = run.base.logits(torch.from_numpy(tokens).long()[None], run.student.compute()).numpy()
        got = logits_of(out, tokens)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())
        with open_gguf(out) as gguf:
            assert gguf.metadata["llama.hidden_activation"] == activation
            config = config_from_gguf(gguf)
            assert config.has_zeros
            assert config.activation.up == ("relu" if activation == "drelu" else None)
            assert gguf.tensors["token_embd.weight"].type == GGMLType.F32
        with hotset.load(out, device="cpu", sparsity="exact", n_ctx=64) as model:
            taps = model.taps(tokens.tolist(), ["blk.0.ffn_act", "blk.1.ffn_act"])
            sparse = model.logits(tokens.tolist())
        np.testing.assert_allclose(sparse, wanted, atol=0.1 * np.abs(wanted).max())
        active = np.mean([np.count_nonzero(tap) / tap.size for tap in taps.values()])
        assert active == pytest.approx(0.28, abs=0.06)

    @pytest.mark.slow
    def test_types(self, silu: Path, tmp_path: Path) -> None:
        run = training(silu, tmp_path / "run")
        run.prepare()
        run.save()
        adapters = TrainedAdapters.open(tmp_path / "run" / "adapters.safetensors")
        with open_gguf(silu) as gguf:
            merge(gguf, adapters, tmp_path / "q8.gguf", GGMLType.Q8_0)
            with pytest.raises(InvalidRequestError, match="one of the files that are read"):
                merge(gguf, adapters, silu)
        with open_gguf(tmp_path / "q8.gguf") as gguf:
            assert gguf.tensors["blk.0.ffn_up.weight"].type == GGMLType.Q8_0
            assert gguf.tensors["blk.0.ffn_gate.bias"].type == GGMLType.F32
            assert gguf.tensors["output.weight"].type == GGMLType.F32
            assert gguf.metadata["general.file_type"] == 7

    def test_keeps_the_types_of_the_original_and_can_be_reordered(self, tmp_path: Path) -> None:
        path = write_llama(
            tmp_path / "q4_1.gguf", type_of=lambda name: GGMLType.Q4_1, spread=lambda name: 1.0
        )
        with open_gguf(path) as gguf:
            base = load_base(gguf)
            tokens = torch.from_numpy(TOKENS[: 8 * N_CTX]).long().view(8, N_CTX)
            student = Student(base, "relu", 4)
            calibrate(base, student, tokens, [LayerTarget(0.2, 16), LayerTarget(0.3)])
            values = {name: value.detach().numpy() for name, value in student.named_values()}
            merge(gguf, TrainedAdapters(values, "relu", 4, digest(gguf)), tmp_path / "out.gguf")
        with open_gguf(tmp_path / "out.gguf") as gguf:
            down = gguf.tensors["blk.0.ffn_down_t.weight"]
            assert (down.type, down.shape) == (GGMLType.Q8_0, (64, 96))
            assert gguf.tensors["blk.1.attn_q.weight"].type == GGMLType.Q4_1
            assert gguf.tensors["blk.1.ffn_up.weight"].type == GGMLType.Q4_1
            assert "blk.0.ffn_down.weight" not in gguf.tensors
        tokens = TOKENS[:N_CTX]
        with hotset.load(tmp_path / "out.gguf", n_ctx=64) as model:
            profile = collect(model.tap_steps, model.config, tokens[None], model=fingerprint(model.gguf))
            before = model.logits(tokens.tolist())
        reorder(tmp_path / "out.gguf", tmp_path / "sorted.gguf", profile)
        with hotset.load(tmp_path / "sorted.gguf", n_ctx=64) as model:
            assert model.sparsity.mode == "exact"
            after = model.logits(tokens.tolist())
        np.testing.assert_allclose(after, before, atol=0.02 * np.abs(before).max())

    def test_importance_lowers_the_errors_of_important_inputs(self, tmp_path: Path) -> None:
        path = write_llama(
            tmp_path / "q4_1.gguf", type_of=lambda name: GGMLType.Q4_1, spread=lambda name: 1.0
        )
        weights = np.where(np.arange(64) < 8, 1000, 1).astype(np.float32)
        importance = ImportanceMatrix({"blk.0.ffn_up.weight": Inputs(weights[None], np.ones(1, np.float32))})
        with open_gguf(path) as gguf:
            student = Student(load_base(gguf), "relu", 4)
            for value in student.parameters():
                torch.nn.init.normal_(value)
            values = {name: value.detach().numpy() for name, value in student.named_values()}
            adapters = TrainedAdapters(values, "relu", 4, digest(gguf))
            for name, type, by in (
                ("f32", GGMLType.F32, None),
                ("plain", None, None),
                ("by", None, importance),
            ):
                merge(gguf, adapters, tmp_path / f"{name}.gguf", type, importance=by)

        def up(name: str) -> np.ndarray:
            with open_gguf(tmp_path / f"{name}.gguf") as gguf:
                info = gguf.tensors["blk.0.ffn_up.weight"]
                return dequantize(gguf.data(info.name), info.type, info.shape)

        plain, by = (np.square(up(name) - up("f32"))[:, :8].mean() for name in ("plain", "by"))
        assert by < 0.5 * plain

    def test_adapters_of_another_model_are_refused(self, silu: Path, tmp_path: Path) -> None:
        other = write_llama(tmp_path / "other.gguf", seed=2)
        run = training(silu, tmp_path / "run")
        run.prepare()
        run.save()
        adapters = TrainedAdapters.open(tmp_path / "run" / "adapters.safetensors")
        with open_gguf(other) as gguf, pytest.raises(InvalidRequestError, match="trained on other weights"):
            merge(gguf, adapters, tmp_path / "out.gguf")
        assert not (tmp_path / "out.gguf").exists()

    def test_other_file_than_an_adapter_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"there is no file .*; train some"):
            TrainedAdapters.open(tmp_path / "missing")
        (tmp_path / "bad").write_bytes(b"\xff" * 100)
        with pytest.raises(FormatError, match="safetensors"):
            TrainedAdapters.open(tmp_path / "bad")

        from safetensors.numpy import save

        (tmp_path / "plain").write_bytes(save({"a": np.ones(1)}))
        with pytest.raises(FormatError, match="does not contain adapters"):
            TrainedAdapters.open(tmp_path / "plain")

    @pytest.mark.parametrize(
        ("metadata", "tensors", "message"),
        [
            ({"activation": "gelu"}, {}, "lack their activation"),
            ({"rank": "-3"}, {}, "lack their activation"),
            ({"rank": "9" * 5000}, {}, "lack their activation"),
            ({}, {"x.a.scale": None}, "lack the scales of x.a"),
            ({}, {"x.a.scale": np.ones((3, 64), np.float32)}, "lack the scales of x.a"),
            ({}, {"x.a.channel": np.ones((5, 5, 5), np.float32)}, "lack the scales of x.a"),
            ({}, {"x.a.scale": np.full((4, 1), np.inf, np.float32)}, "not finite"),
            ({}, {"y": np.full(3, np.nan, np.float16)}, "not finite"),
        ],
    )
    def test_adapters_with_odd_parts_are_refused(
        self, metadata: dict[str, str], tensors: dict[str, Any], message: str, tmp_path: Path
    ) -> None:
        from safetensors.numpy import load_file, save

        path = tmp_path / "a.safetensors"
        TrainedAdapters({"x.a": np.ones((4, 64), np.float32)}, "relu", 4, "m").save(path)
        kept = {name: value for name, value in (load_file(path) | tensors).items() if value is not None}
        told = {"format": "hotset adapters 1", "activation": "relu", "rank": "4", "model": "m"} | metadata
        path.write_bytes(save(kept, told))
        with pytest.raises(FormatError, match=message):
            TrainedAdapters.open(path)

    @pytest.mark.parametrize(
        ("activation", "changes", "message"),
        [
            ("relu", {"blk.1.attn_q.a": None}, r"blk\.1\.attn_q\.a"),
            ("relu", {"blk.1.attn_q.b": None}, r"lack blk\.1\.attn_q\.b, \[128, 4\]"),
            ("relu", {"blk.0.ffn_scale": None}, r"lack blk\.0\.ffn_scale, \[96\]"),
            ("relu", {"blk.0.ffn_scale": (97,)}, r"have \[97\] for blk\.0\.ffn_scale, \[96\]"),
            ("relu", {"blk.0.ffn_up.b": (96, 5)}, r"have \[96, 5\] for blk\.0\.ffn_up\.b, \[96, 4\]"),
            ("relu", {"blk.0.ffn_down.a": (4, 1)}, r"have \[4, 1\] for blk\.0\.ffn_down\.a, \[4, 96\]"),
            ("relu", {"blk.0.ffn_gate.bias": ()}, r"have \[\] for blk\.0\.ffn_gate\.bias"),
            ("relu", {"blk.0.ffn_linear.a": (2, 64)}, r"lack blk\.0\.ffn_linear\.b, \[64, 2\]"),
            ("relu", {"blk.2.attn_norm": (64,)}, r"blk\.2\.attn_norm, which no such model has"),
            ("relu", {"output_norm": (1,)}, r"have \[1\] for output_norm, \[64\]"),
            ("drelu", {}, r"lack blk\.0\.ffn_up\.bias, \[96\]: they are damaged, or belong to another model"),
            ("relu", {"blk.0.ffn_up.bias": (96,)}, r"ffn_up\.bias, which no such model has"),
        ],
    )
    def test_adapters_that_do_not_fit_are_refused(
        self, activation: str, changes: dict[str, Any], message: str, silu: Path, tmp_path: Path
    ) -> None:
        with open_gguf(silu) as gguf:
            student = Student(load_base(gguf), "relu", 4)
            values = {name: value.detach().numpy() for name, value in student.named_values()}
            for name, shape in changes.items():
                values.pop(name, None)
                if shape is not None:
                    values[name] = np.zeros(shape, np.float32)
            adapters = TrainedAdapters(values, activation, 4, digest(gguf))
            with pytest.raises(FormatError, match=message):
                merge(gguf, adapters, tmp_path / "out.gguf", GGMLType.F32)
        assert list(tmp_path.iterdir()) == []

    def test_int8_is_close(self, tmp_path: Path) -> None:
        values = {
            "blk.0.ffn_up.a": RNG.standard_normal((4, 64)).astype(np.float32),
            "blk.0.ffn_up.b": RNG.standard_normal((96, 4)).astype(np.float32) * 1e-3,
            "blk.0.ffn_gate.bias": RNG.standard_normal(96).astype(np.float32),
            "blk.0.ffn_down.b": np.zeros((64, 4), np.float32),
        }
        TrainedAdapters(values, "relu", 4, "x").save(tmp_path / "a.safetensors")
        read = TrainedAdapters.open(tmp_path / "a.safetensors")
        assert (read.activation, read.rank, read.model) == ("relu", 4, "x")
        for name, value in values.items():
            assert np.abs(read.values[name] - value).max() <= np.abs(value).max() / 200

    @pytest.mark.parametrize("name", ["llama-biases", "mistral-window", "smollm3-biases"])
    def test_other_tensors_of_a_layer_stay(self, tmp_path: Path, name: str) -> None:
        """Check a bias of up, which is scaled with its rows, windows, and layers without rotation."""
        recipe = tiny_models.RECIPES[name]
        path = tiny_models.to_gguf(recipe, tiny_models.build(recipe), tmp_path)
        with open_gguf(path) as gguf:
            base = load_base(gguf)
            student = Student(base, "relu", 4)
            tokens = torch.from_numpy(TOKENS[: 8 * N_CTX]).long().view(8, N_CTX)
            calibrate(base, student, tokens, [LayerTarget(0.3)] * base.graph.n_layer)
            values = {name: value.detach().numpy() for name, value in student.named_values()}
            merge(gguf, TrainedAdapters(values, "relu", 4, digest(gguf)), tmp_path / "out.gguf", GGMLType.F32)
        with torch.no_grad():
            wanted = base.logits(tokens[:1], student.compute()).numpy()
        got = logits_of(tmp_path / "out.gguf", TOKENS[:N_CTX])
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


class TestText:
    def test_windows_are_a_function_of_the_seed(self) -> None:
        sources = [
            WeightedText("a", np.arange(1000, dtype=np.int32), 3),
            WeightedText("b", np.arange(1000, 2000), 1),
        ]
        first, second = Mixture(sources, 16, seed=5), Mixture(sources, 16, seed=5)
        for number in (700, 3, 699, 5000):
            np.testing.assert_array_equal(first.window(number), second.window(number))
        windows = np.stack([first.window(i) for i in range(800)])
        assert windows.shape == (800, 16)
        assert (np.diff(windows, axis=1) == 1).all()
        assert np.mean(windows[:, 0] < 1000) == pytest.approx(0.75, abs=0.06)
        assert (windows != np.stack([Mixture(sources, 16, 6).window(i) for i in range(800)])).any()

    def test_one_round_covers_a_text_once(self) -> None:
        moe_layer = Mixture([WeightedText("a", np.arange(160, dtype=np.int32))], 16)
        starts = [int(moe_layer.window(i)[0]) // 16 for i in range(9)]
        assert sorted(starts) == list(range(starts[0] * 0, 9))

    def test_too_little_text_is_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="at least 64"):
            Mixture([WeightedText("a", np.arange(50))], 32)
        with pytest.raises(InvalidRequestError, match="no text"):
            Mixture([], 32)
        with pytest.raises(InvalidRequestError, match="too short"):
            split_held_out([1, 2, 3], 32)

    def test_held_out_is_not_trained_on(self) -> None:
        kept, held = split_held_out(list(range(1000)), 10)
        assert len(held) == 8
        assert kept[-1] + 1 == held[0][0]
        assert held[-1][-1] == 999

    def test_options(self, tmp_path: Path) -> None:
        odd = tmp_path / "odd:2"
        odd.write_text("x")
        assert parse_text(str(odd)) == (odd, 1.0)
        assert parse_text("a.txt:0.5") == (Path("a.txt"), 0.5)
        assert parse_text("a.txt") == (Path("a.txt"), 1.0)
        assert parse_amount("1000", "--generate") == (1000, 1.0)
        assert parse_amount("1000:0.25", "--generate") == (1000, 0.25)
        for bad in ("x", "0", "10:-1", "10:x"):
            with pytest.raises(InvalidRequestError, match="--on-policy"):
                parse_amount(bad, "--on-policy")
        with pytest.raises(InvalidRequestError, match="weight"):
            parse_text("a.txt:0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    recipe = tiny_models.RECIPES["llama"]
    tiny_models.save(recipe, tiny_models.build(recipe), folder)
    return folder


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Path:
    from hotset.convert.hf import convert_hf

    path = checkpoint.parent / "tiny.gguf"
    convert_hf(checkpoint, path, "f32")
    return path


class Asked:
    """A stand-in for a model that encodes each opening as one token."""

    tokenizer = SimpleNamespace(encode=lambda text, add_special: [-1])


class TestGenerating:
    def test_resumes_where_it_stopped(self, converted: Path, tmp_path: Path) -> None:
        path = tmp_path / "generated.jsonl"
        with hotset.load(converted, n_ctx=256, n_seqs=8) as model:
            texts = [model.tokenizer.encode("the thing in the thin thing " * 40)]
            first = generate(model, path, 600, texts=texts)
            assert sum(map(len, first)) >= 600
            with path.open("a") as file:
                file.write("[1, 2")  # cut short by a kill
            more = generate(model, path, 2500, texts=texts)
        assert more[: len(first)] == first
        later = more[len(first) :]
        assert later
        assert not set(map(tuple, first)) & set(map(tuple, later))  # it continues instead of starting again
        assert sum(map(len, more)) >= 2500
        assert read_documents(path) == more

    def test_continuations_begin_with_a_piece_of_a_text(self) -> None:
        """Check pieces of 8 to 48 tokens from any place of a text, in as many cases as questions leave."""
        text, source = list(range(100)), random.Random(1)
        begun = [writing.beginning_of(Asked(), source, [text], 0.0) for _ in range(3000)]  # type: ignore[arg-type]
        openings = [one for one in begun if one == [-1]]
        pieces = [one for one in begun if one != [-1]]
        assert len(openings) / len(begun) == pytest.approx(0.5, abs=0.05)
        assert all(one == list(range(one[0], one[0] + len(one))) for one in pieces)
        lengths = {len(one) for one in pieces}
        assert (min(lengths), max(lengths)) == (8, 48)
        assert {one[0] for one in pieces} == set(range(52))

    def test_circles_are_known(self) -> None:
        assert not circles([])
        assert not circles(list(range(100)))
        assert not circles([*range(80), *range(20)])
        assert circles([*range(20), *([3, 1, 4, 1, 5] * 12)])

    def test_half_of_repetitive_answers_is_kept(
        self, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("hotset.training.generate.circles", lambda document: True)
        with hotset.load(converted, n_ctx=256, n_seqs=8) as model:
            documents = generate(model, tmp_path / "generated.jsonl", 600)
        assert sum(map(len, documents)) >= 600

    def test_another_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text('{"a": 1}\n')
        with pytest.raises(FormatError, match="line 1"):
            read_documents(tmp_path / "x")


class TestCommand:
    def run(self, *arguments: object) -> dict[str, Any]:
        from typer.testing import CliRunner

        from hotset.cli.main import app

        result = CliRunner().invoke(app, ["sparsify", *map(str, arguments), "--json"])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return dict(json.loads(result.stdout))

    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "text.txt"
        path.write_text(" ".join(f"the {i} thing in {i * 7}" for i in range(600)))
        return path

    @pytest.mark.slow
    def test_checkpoint_to_relu_model_and_merge(self, checkpoint: Path, text: Path, tmp_path: Path) -> None:
        options = (
            "--lora",
            4,
            "-n",
            256,
            "-c",
            16,
            "--batch",
            2,
            "--text",
            f"{text}:2",
            "--generate",
            "200:1",
        )
        told = self.run(checkpoint, tmp_path / "out.gguf", *options)
        assert told["evaluation"]["tokens"] == 256
        with open_gguf(tmp_path / "out.gguf") as gguf:
            assert gguf.metadata["llama.hidden_activation"] == "relu"
        with hotset.load(tmp_path / "out.gguf", n_ctx=64) as model:
            assert model.sparsity.mode == "exact"
            model.generate("the thing", max_tokens=4, temperature=0)
        folder = tmp_path / "out.sparsify"
        merged = tmp_path / "again.gguf"
        self.run(folder / "original.gguf", merged, "--adapters", told["adapters"])
        assert merged.read_bytes() == (tmp_path / "out.gguf").read_bytes()
        wider = ("--lora", 6, *options[2:], "--from-adapters", told["adapters"], "--on-policy", "100:2")
        again = self.run(folder / "original.gguf", tmp_path / "b.gguf", *wider)
        work = tmp_path / "b.sparsify"
        assert 100 <= sum(map(len, read_documents(work / "on_policy.jsonl"))) < 200 * N_CTX
        assert not list(work.rglob("*.gguf*"))
        first = json.loads((work / "curve.jsonl").read_text().splitlines()[0])
        assert first["kl"] == pytest.approx(told["evaluation"]["kl"], rel=0.05)
        assert again["evaluation"]["step"] == 8

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ((), "no text to train on"),
            (("--lora", 0, "--text", "TEXT"), "--lora must be at least 1"),
            (("--on-policy", 100), "--from-adapters"),
            (("--text", "TEXT", "--idle", 2), "--idle"),
            (("--adapters", "missing.safetensors"), "there is no file missing.safetensors; check the path"),
            (("--text", "TEXT", "-c", 4096), "too short|at least"),
        ],
    )
    def test_mistakes_give_one_message(
        self, converted: Path, text: Path, tmp_path: Path, options: tuple[object, ...], message: str
    ) -> None:
        from typer.testing import CliRunner

        from hotset.cli.main import app

        words = [str(text) if option == "TEXT" else str(option) for option in options]
        result = CliRunner().invoke(app, ["sparsify", str(converted), str(tmp_path / "o.gguf"), *words])
        assert isinstance(result.exception, SystemExit)
        assert result.exit_code == 2
        told = " ".join(result.output.split())
        assert told.startswith("error: ")
        assert re.search(message, told, re.IGNORECASE)
        assert not (tmp_path / "o.gguf").exists()

    def test_a_text_that_is_not_there_is_a_wrong_option(
        self, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from typer.testing import CliRunner

        from hotset.cli.main import app

        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(app, ["sparsify", str(converted), "o.gguf", "--text", "missing.txt"])
        assert result.exit_code == 2
        assert "there is no file missing.txt; check the path" in " ".join(result.output.split())
        assert not (tmp_path / "o.gguf").exists()

    def test_the_process_computes_afterwards_as_before(
        self, converted: Path, text: Path, tmp_path: Path
    ) -> None:
        """Restore the flush of denormals, which training sets: later code would have other bits."""
        from typer.testing import CliRunner

        from hotset.cli.main import app

        before = torch.get_num_threads()
        options = ["--text", str(text), "-c", "4096", "--threads", str(before + 1)]
        result = CliRunner().invoke(app, ["sparsify", str(converted), str(tmp_path / "o.gguf"), *options])
        assert isinstance(result.exception, SystemExit)
        tiny = np.full(8, 1e-20, np.float32)
        assert (tiny * tiny > 0).all()
        assert torch.get_num_threads() == before


class TestProcesses:
    def test_windows_are_shared_out(self, silu: Path, tmp_path: Path) -> None:
        """Check that two processes share, without repeats, the windows of one with twice the batch."""
        one = training(silu, tmp_path, batch=4, scored=0.5)
        two = [training(silu, tmp_path, batch=2, scored=0.5) for _ in range(2)]
        for process, run in enumerate(two):
            run.process, run.n_processes = process, 2
        seen = []
        for step in range(3):
            for run in (one, *two):
                run.step = step
            np.testing.assert_array_equal(torch.cat([run.windows() for run in two]), one.windows())
            assert two[0].tokens == two[1].tokens == one.tokens
            seen += [tuple(window) for window in one.windows().tolist()]
            scored = [run.scored_positions(1000).tolist() for run in (one, two[0], two[1])]
            assert scored[0] == scored[1] != scored[2]
        assert len(set(seen)) == 12

    @pytest.mark.slow
    def test_two_equal_one_with_twice_the_batch(self, silu: Path, tmp_path: Path) -> None:
        """Compare the curve of two processes, which share windows and average gradients, with one process.

        No thread of the process group may outlive it: a thread that frees a tensor while the interpreter ends
        aborts the process.
        """
        script = tmp_path / "two.py"
        script.write_text(
            "import sys, pathlib\n"
            f"sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
            "import test_sparsify as t\n"
            "from hotset.training.processes import torchrun_processes\n"
            f"paths = pathlib.Path({str(silu)!r}), pathlib.Path({str(tmp_path / 'two')!r})\n"
            "with torchrun_processes(on_gpu=False) as (process, n_processes):\n"
            "    run = t.training(*paths, batch=1, n_tokens=6 * 2 * t.N_CTX)\n"
            "    run.process, run.n_processes = process, n_processes\n"
            "    run.prepare(); run.run(eval_every=3, save_every=6)\n"
            "    assert 'pt_gloo_runloop' in t.thread_names() or sys.platform != 'linux'\n"
            "assert 'pt_gloo_runloop' not in t.thread_names()\n"
        )
        (tmp_path / "two").mkdir()
        done = subprocess.run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                str(script),
            ],
            check=False, capture_output=True, timeout=WATCHDOG,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()[-6000:]
        one = training(silu, tmp_path / "one", batch=2, n_tokens=6 * 2 * N_CTX)
        one.prepare()
        one.run(eval_every=3, save_every=6)
        both = [read_curve(tmp_path / name / "curve.jsonl") for name in ("one", "two")]
        for left, right in zip(*both, strict=True):
            assert left["tokens"] == right["tokens"]
            assert left["kl"] == pytest.approx(right["kl"], rel=2e-2)


def test_other_files_than_models_give_one_message(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.write()
    with open_gguf(tmp_path / "x.gguf") as gguf, pytest.raises(HotsetError):
        load_base(gguf)
