"""Adaptive predictors for a ReLU-family model: collect, train, grow until good enough, and write.

PowerInfer (arXiv 2312.12456, section 5.2) gives every layer a two-layer network that selects neurons, as
small as the layer's sparsity and skew allow. Here:

1. Pairs of predictor input and active set are collected from text (pairs.py).
2. Each layer's initial rank is proportional to the mean entropy of its neurons' firing, which is low if few
   neurons fire or if the same ones do.
3. A layer is trained (predictor_layer.py) and calibrated to the requested recall. While too few of the
   selected neurons fire, its rank is doubled, as long as that saves more bytes than it costs and all
   predictors together stay within their share of the model.
4. The model runs with all predictors on held-out text. If its perplexity differs too much from the exact one,
   the allowed miss rate is halved, and steps 3 and 4 are repeated.

Every step is deterministic, and its results are stored in `folder/training`. So a killed run that is started
again takes the same path and reuses the stored results.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hotset.api import Model, load_opened
from hotset.backends.torch.devices import torch_device
from hotset.cores import usable_cores
from hotset.engine.perplexity import PerplexityResult, compare_chunks
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import check_folder, check_output, check_target
from hotset.formats.gguf import Dialect, open_gguf
from hotset.formats.overlay import Overlay
from hotset.formats.quants import TYPES, GGMLType, fitting, quantize, row_bytes
from hotset.formats.torch_file import read_torch, write_torch
from hotset.loader.build import build, open_model
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.operations import Add, LayerNorm
from hotset.model.predictor import Predictor
from hotset.reporter import Reporter
from hotset.settings import LoadSettings
from hotset.sparsity import sidecar
from hotset.sparsity.calibration import values_of
from hotset.sparsity.modes import Choice
from hotset.sparsity.predictor_spec import PredictorSpec
from hotset.sparsity.predictors import MemoryTensors
from hotset.training import pairs as pair_files
from hotset.training import predictor_files, predictor_layer
from hotset.training.pairs import LayerTaps, PairShards
from hotset.training.predictor_layer import PredictorWeights, Quality, Schedule
from hotset.units import human_size

if TYPE_CHECKING:
    from hotset.formats.source import WeightSource
    from hotset.model.config import ModelConfig
    from hotset.model.graph import Graph
    from hotset.sparsity.stats import PredictorQuality

STEP = 32  # ranks are multiples of this, so that rows of fc2 are whole blocks
GATHERED = 1.6  # cost of a gathered byte in streamed bytes (docs/contributing/internals/pitfalls.md)
_WIDTH_PER_RANK = 6  # a layer with the largest entropy starts at a sixth of the width
_HELD_OUT = 10  # one sequence in this many is held out
_HIGHEST_RECALL = 0.9995
_LAYOUT = 1  # version of the files in folder/training
_LOOK_SECONDS = 1.0  # between two looks at the progress of processes


@dataclass(frozen=True)
class PredictorSettings:
    """The goals and limits of predictors.

    recall: share of the firing neurons' magnitude that is selected. precision: share of selected neurons that
    fire, at which a layer is good enough. max_increase: of the perplexity on held-out text, relative.
    max_share: of the model's bytes, for all predictors together. type: of fc1 and fc2 in the file; None: Q4_0
    if the model is quantised (it selects hardly more neurons than Q8_0 at half the bytes), otherwise F16.
    max_bytes: of the pairs on disk. n_tokens: limit of the texts. n_ctx: tokens of a sequence. n_measured:
    limit of the held-out tokens for the perplexity; half of them are scored. device: a word of
    LoadSettings for a device of torch. jobs: layers trained in parallel; None: one per usable core, one on a
    GPU. n_threads: that run the model; None: every core. keep: leave the state of the training in its folder.
    """

    recall: float = 0.98
    precision: float = 0.6
    max_increase: float = 0.005
    max_share: float = 0.10
    type: GGMLType | None = None
    max_bytes: int = 2 << 30
    n_tokens: int | None = None
    n_ctx: int = 512
    n_measured: int = 8192
    schedule: Schedule = field(default_factory=Schedule)
    device: str = "cpu"
    jobs: int | None = None
    n_threads: int | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("recall", 0, 1), ("precision", 0, 1), ("max_share", 0, 1)):
            value = getattr(self, name)
            if not low < value < high:
                raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}")
        if not self.max_increase > 0:
            raise InvalidRequestError(f"max_increase must be above 0, not {self.max_increase}")
        if self.schedule.epochs <= 0 or self.schedule.batch < 1 or self.schedule.learning_rate <= 0:
            raise InvalidRequestError("epochs, batch and learning rate must be above 0")


Stop = Literal["target", "pays", "room"]
REASONS: dict[Stop, str] = {
    "target": "good enough",
    "pays": "more would cost more than it saves",
    "room": "no room for more",
}


@dataclass(frozen=True)
class LayerReport:
    """The predictor of one layer.

    n_bytes: of fc1 and fc2; share: of the model's bytes. quality: on held-out tokens. stopped: why its rank
    did not grow further.
    """

    layer: int
    rank: int
    n_bytes: int
    share: float
    quality: Quality
    stopped: Stop


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    recall: to which the layers were calibrated in the end. problems: missed goals, one sentence each.
    measured: the layers as the engine runs them, on held-out text; exact and predicted: perplexity with all
    of them.
    """

    layers: tuple[LayerReport, ...]
    measured: tuple[PredictorQuality, ...]
    recall: float
    exact: PerplexityResult
    predicted: PerplexityResult
    share: float
    n_tokens: int
    problems: tuple[str, ...]
    files: tuple[Path, ...]
    dialect: Dialect

    @property
    def increase(self) -> float:
        """Return the relative increase of the perplexity."""
        return _increase(self.predicted)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        value = asdict(self)
        value["increase"] = self.increase
        for layer in value["layers"]:
            del layer["quality"]["shift"]  # is in the weights
        value["files"] = [str(path) for path in self.files]
        return value


def train_predictors(
    model: str | os.PathLike[str],
    texts: Sequence[str],
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    settings: PredictorSettings | None = None,
    *,
    activation: str | None = None,
    dialect: Dialect | None = None,
    progress: Reporter | None = None,
) -> Trained:
    """Train a predictor for each layer of a model file and write them.

    texts: the text on which the model runs. folder: receives model_<layer>.pt and config.json, and during the
    training its state, from which a killed run continues. out: the model file with predictors; None: do not
    write one. dialect: None chooses PowerInfer's format if it can hold the model unchanged. Raises
    HotsetError for a model without zeros, too short texts, predictors that cannot be small enough, and files
    that cannot be written.
    """
    settings = settings or PredictorSettings()
    folder = Path(folder)
    check_folder(folder)
    for layer in ("config.json", "model_0.pt"):
        check_target(folder / layer)
    if out is not None:
        check_output(out)
    settings = replace(settings, device=torch_device(settings.device))
    loading = LoadSettings(
        n_threads=settings.n_threads, device="cpu", sparsity="exact", activation=activation, max_batch=256,
        progress=progress,
    )  # fmt: skip
    with (
        open_model(model, loading) as opened,
        load_opened(opened.with_settings(n_ctx=min(settings.n_ctx, opened.config.n_ctx_train))) as loaded,
    ):
        if loaded.config.masked:
            raise InvalidRequestError(
                "the mask of the file's own predictors is part of the model, so it cannot have others"
            )
        chosen = _dialect(loaded, dialect) if out is not None else "gguf"
        if out is not None:
            check_target(out, loaded.gguf.paths)
        settings = replace(settings, type=settings.type or _default_type(loaded))
        run = _Training(loaded, activation, texts, folder, settings, progress)
        trained = run.train()
        predictor_files.write_folder(folder, run.weights)
        files = [folder / "config.json", *(folder / f"model_{i}.pt" for i in range(len(run.weights)))]
        if out is not None:
            predictor_files.write_merged(Path(out), loaded.gguf, loaded.config, run.weights, run.type, chosen)
            files.insert(0, Path(out))
    if not settings.keep:
        shutil.rmtree(folder / "training", ignore_errors=True)
    return replace(trained, files=tuple(files), dialect=chosen)


def _default_type(model: Model) -> GGMLType:
    name = model.graph.ffns[0].decides.weight
    return GGMLType.Q4_0 if TYPES[model.weights.tensors[name].type].block_size > 1 else GGMLType.F16


def _dialect(model: Model, asked: Dialect | None) -> Dialect:
    if asked == "gguf":
        return asked
    try:
        predictor_files.powerinfer_architecture(model.gguf, model.config)
    except InvalidRequestError:
        if asked is not None:
            raise
        return "gguf"
    return "powerinfer"


def split_texts(
    model: Model, texts: Sequence[str], settings: PredictorSettings
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return sequences of model.n_ctx tokens to train on, in random order, and held-out ones.

    The end of each text, a tenth of it, is held out. Each sequence begins like a text.
    """
    train: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    n_ctx, left, tokenizer = model.n_ctx, settings.n_tokens, model.tokenizer
    for text in texts:
        tokens = tokenizer.encode(text, add_special=True)[:left]
        left = None if left is None else left - len(tokens)
        rows = list(tokenizer.rows(tokens, n_ctx))
        n_held = -(-len(rows) // _HELD_OUT)
        train += rows[: len(rows) - n_held]
        held_out += rows[len(rows) - n_held :]
    while len(held_out) < 2 and train:
        held_out.insert(0, train.pop())
    if not train:
        raise InvalidRequestError(
            f"the text is too short: it has {len(held_out)} sequences of {n_ctx} tokens, but predictors need "
            "at least three, two of them for measurements; give more text, or a smaller n_ctx"
        )
    order = np.random.default_rng(settings.schedule.seed).permutation(len(train))
    return [train[i] for i in order], held_out


@dataclass(frozen=True)
class _Task:
    """One layer to train, if necessary, and to measure. ranks: its previous ranks and the current one."""

    model: Path
    activation: str | None
    pairs: Path
    checkpoints: Path
    layer: int
    ranks: tuple[int, ...]
    recall: float
    settings: PredictorSettings


def _work(task: _Task, on_step: Callable[[], None]) -> Quality:
    with open_gguf(task.model) as gguf:
        config = config_from_gguf(gguf, activation=task.activation)
        with PairShards(task.pairs, config.n_ff) as pairs:

            def decides() -> np.ndarray:
                return _deciding_matrix(gguf, describe(config, gguf.tensors), task.layer)

            weights = _trained(task, pairs, decides, on_step)
            held_out = pairs.layer(task.layer, "held_out")
            assert task.settings.type is not None
            return predictor_layer.calibrate(
                held_out, weights, task.settings.type, task.recall, task.settings.device
            )


def _checkpoint(task: _Task) -> Path:
    return task.checkpoints / f"blk.{task.layer}.{'-'.join(map(str, task.ranks))}.pt"


def _trained(
    task: _Task, pairs: PairShards, decides: Callable[[], np.ndarray], on_step: Callable[[], None]
) -> PredictorWeights:
    """Return the weights from a checkpoint, or train them and write the checkpoint."""
    path = _checkpoint(task)
    if path.is_file():
        return _read(path)
    settings, rank, part = task.settings, task.ranks[-1], pairs.layer(task.layer, "train")
    seed = settings.schedule.seed + task.layer
    if len(task.ranks) == 1:
        weights = predictor_layer.start(part, decides(), rank, settings.device, seed)
    else:
        before = _trained(replace(task, ranks=task.ranks[:-1]), pairs, decides, on_step)
        weights = predictor_layer.grown(before, rank, part, seed)
    schedule = replace(settings.schedule, seed=seed)
    weights = predictor_layer.train(part, weights, schedule, settings.device, on_step)
    write_torch(path, {"fc1.weight": weights.fc1, "fc2.weight": weights.fc2})
    return weights


def _read(path: Path) -> PredictorWeights:
    tensors = read_torch(path)
    assert isinstance(tensors, dict)
    return PredictorWeights(tensors["fc1.weight"], tensors["fc2.weight"])


def _deciding_matrix(weights: WeightSource, graph: Graph, layer: int) -> np.ndarray:
    """Return the matrix, float32 [n_ff, n_embd], that decides which neurons fire.

    Its product with the predictor's input does so, up to a bias and the scale of the input. The norm before
    the FFN multiplies channels; a layer norm also removes the mean.
    """
    ffn = graph.ffns[layer]
    op, norm = ffn.decides, ffn.norm
    assert norm is not None, "the norm is a separate operation only if a predictor reads it, too"
    rows = values_of(weights, op.weight)[op.first_row : op.first_row + op.out.width]
    matrix = rows if norm.weight is None else rows * values_of(weights, norm.weight)
    if isinstance(norm, LayerNorm):
        matrix = matrix - matrix.mean(axis=1, keepdims=True)
    return np.ascontiguousarray(matrix, np.float32)


def predictor_inputs(config: ModelConfig, graph: Graph) -> list[str]:
    """Return the name of the value that each layer's predictor reads (ModelConfig.predictor_input)."""
    adds = {op.out: op for op in graph.ops if isinstance(op, Add)}
    names = []
    for ffn in graph.ffns:
        # The layer's input is an operand of the sum after attention, to which the FFN's result is added.
        after = next(op for op in adds.values() if op.layer == ffn.layer and op.part == "attention")
        names.append(after.a.name if config.predictor_input == "layer_input" else after.out.name)
    return names


class _Training:
    """A training, from text to weights."""

    def __init__(
        self,
        model: Model,
        activation: str | None,
        texts: Sequence[str],
        folder: Path,
        settings: PredictorSettings,
        progress: Reporter | None,
    ) -> None:
        self.model, self.config, self.settings, self.progress = model, model.config, settings, progress
        self.config.require_ffns("predictors")
        self.activation, self.folder = activation, folder
        assert settings.type is not None
        self.type = settings.type
        self.train_sequences, self.held_out = split_texts(model, texts, settings)
        self.model_bytes = sum(
            info.nbytes
            for name, info in model.gguf.tensors.items()
            if not predictor_files.is_of_predictor(name)
        )
        self.weights: list[PredictorWeights] = []
        self.ranks: list[tuple[int, ...]] = []
        self.stopped: dict[int, Stop] = {}
        self.qualities: dict[tuple[int, tuple[int, ...], float], Quality] = {}

    def train(self) -> Trained:
        settings = self.settings
        n_tokens = self._collect()
        self.ranks = [(rank,) for rank in self._first_ranks()]
        recall = settings.recall
        with _Pool(settings, self.config.n_layer) as pool:
            while True:
                self._grow(pool, recall)
                self.weights = self._calibrated(recall)
                predicted = self._predicted_model()
                try:
                    exact_ppl, predicted_ppl = self._perplexity(predicted)
                    increase = _increase(predicted_ppl)
                    done = increase <= settings.max_increase or recall >= _HIGHEST_RECALL
                    measured = self._measure(predicted) if done else ()
                finally:
                    predicted.backend.close()
                self._say(
                    f"recall {recall:.2%}: perplexity {exact_ppl.ppl:.3f} exact, "
                    f"{predicted_ppl.ppl:.3f} predicted ({increase:+.2%})"
                )
                if done:
                    break
                recall = min(1 - (1 - recall) / 2, _HIGHEST_RECALL)
        layers = tuple(self._report(i, recall) for i in range(self.config.n_layer))
        share = sum(layer.n_bytes for layer in layers) / self.model_bytes
        problems = self._problems(layers, increase, recall)
        return Trained(
            layers, measured, recall, exact_ppl, predicted_ppl, share, n_tokens, problems, (), "gguf"
        )

    # ---- pairs ----

    def _collect(self) -> int:
        config, graph = self.config, self.model.graph
        sources = [
            LayerTaps(name, f"blk.{i}.ffn_act", config.n_embd, config.n_ff[i])
            for i, name in enumerate(predictor_inputs(config, graph))
        ]
        digest = hashlib.sha256()
        for sequence in [*self.train_sequences, *self.held_out]:
            digest.update(sequence.tobytes() + b"/")
        identity = {
            "layout": _LAYOUT,
            "model": sidecar.fingerprint(self.model.gguf),
            "activation": str(config.activation),
            "tokens": digest.hexdigest(),
        }
        collected = pair_files.collect(
            self._pairs_folder,
            self.model.tap_steps,
            sources,
            self.train_sequences,
            self.held_out,
            max_bytes=self.settings.max_bytes,
            settings=identity,
            progress=self.progress,
        )
        schedule = asdict(self.settings.schedule)
        identity |= {"max_bytes": self.settings.max_bytes, "schedule": schedule}
        identity["device"] = self.settings.device.partition(":")[0]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self._checkpoints = self.folder / "training" / f"layers-{key}"
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        self._say(
            f"{collected.n_train + collected.n_held_out} tokens, {collected.n_held_out} of them held out: "
            f"{human_size(collected.n_bytes)} of pairs"
            + (", which is all that max_bytes allows" if collected.limited else "")
        )
        self._n_steps = self.settings.schedule.n_steps(collected.n_train)
        return collected.n_train + collected.n_held_out

    @property
    def _pairs_folder(self) -> Path:
        return self.folder / "training" / "pairs"

    # ---- ranks ----

    def _n_bytes(self, layer: int, rank: int) -> int:
        """Return the bytes of a layer's predictor in the model file."""
        type, width, n_ff = self.type, self.config.n_embd, self.config.n_ff[layer]
        return row_bytes(fitting(type, width), width) * rank + row_bytes(fitting(type, rank), rank) * n_ff

    @property
    def _room(self) -> int:
        """Return how many bytes all predictors together may have."""
        return int(self.settings.max_share * self.model_bytes)

    def _first_ranks(self) -> list[int]:
        """Return initial ranks by sparsity and skew: the mean entropy of a neuron's firing, in bits."""
        with PairShards(self._pairs_folder, self.config.n_ff) as pairs:
            entropies = [entropy(pairs.layer(i, "train").frequencies()) for i in range(self.config.n_layer)]
        unit = self.config.n_embd / _WIDTH_PER_RANK
        ranks = [max(STEP, round(unit * entropy / STEP) * STEP) for entropy in entropies]
        least = sum(self._n_bytes(i, STEP) for i in range(len(ranks)))
        if least > self._room:
            raise InvalidRequestError(
                f"even predictors of rank {STEP} take {least / self.model_bytes:.1%} of the model as "
                f"{self.type.name}, but only {self.settings.max_share:.0%} is allowed; choose a smaller "
                "type, or raise max_share"
            )
        while sum(self._n_bytes(i, rank) for i, rank in enumerate(ranks)) > self._room:
            ranks = [max(STEP, rank - STEP) if rank == max(ranks) else rank for rank in ranks]
        return ranks

    def _grow(self, pool: _Pool, recall: float) -> None:
        """Train and measure all layers at this recall, and grow those that need it, until none does."""
        settings, n_layer = self.settings, self.config.n_layer
        self.stopped.clear()
        self._run_tasks(pool, [(i, self.ranks[i]) for i in range(n_layer)], recall)
        while True:
            wanting = []
            for i in range(n_layer):
                if i in self.stopped:
                    continue
                if self._quality(i, recall).precision >= settings.precision:
                    self.stopped[i] = "target"
                else:
                    wanting.append(i)
            larger: list[tuple[int, tuple[int, ...]]] = []
            used = sum(self._n_bytes(i, ranks[-1]) for i, ranks in enumerate(self.ranks))
            for i in sorted(wanting, key=lambda i: self._quality(i, recall).precision):
                rank = self._next_rank(i, self._room - used)
                if rank is None:
                    self.stopped[i] = "room"
                else:
                    used += self._n_bytes(i, rank) - self._n_bytes(i, self.ranks[i][-1])
                    larger.append((i, (*self.ranks[i], rank)))
            if not larger:
                return
            self._run_tasks(pool, larger, recall)
            for i, ranks in larger:
                if self._cost(i, ranks, recall) < self._cost(i, self.ranks[i], recall):
                    self.ranks[i] = ranks
                else:
                    self.stopped[i] = "pays"

    def _next_rank(self, layer: int, room: int) -> int | None:
        """Return twice the rank, or as much as fits; None if not even a quarter more fits."""
        now = self.ranks[layer][-1]
        rank = min(2 * now, self.config.n_embd // STEP * STEP)
        while rank > now and self._n_bytes(layer, rank) - self._n_bytes(layer, now) > room:
            rank -= STEP
        return rank if rank >= now + max(STEP, now // 4) else None

    def _cost(self, layer: int, ranks: tuple[int, ...], recall: float) -> float:
        """Return the bytes that a token reads for the predictor and the selected rows, in streamed bytes."""
        decides = self.model.graph.ffns[layer].decides
        row = self.model.weights.tensors[decides.weight].row_bytes
        rows = self.qualities[layer, ranks, recall].selected_share * self.config.n_ff[layer]
        return self._n_bytes(layer, ranks[-1]) + GATHERED * rows * row

    def _quality(self, layer: int, recall: float) -> Quality:
        return self.qualities[layer, self.ranks[layer], recall]

    # ---- work ----

    def _task(self, layer: int, ranks: tuple[int, ...], recall: float) -> _Task:
        return _Task(
            self.model.gguf.path, self.activation, self._pairs_folder, self._checkpoints, layer, ranks,
            recall, self.settings,
        )  # fmt: skip

    def _run_tasks(self, pool: _Pool, wanted: list[tuple[int, tuple[int, ...]]], recall: float) -> None:
        tasks = [self._task(i, ranks, recall) for i, ranks in wanted]
        new = sum(not _checkpoint(task).is_file() for task in tasks)
        label, progress = f"training {new} layers" if new else "calibrating", self.progress or Reporter()
        # A layer takes minutes, so progress counts the steps of all trained layers.
        total, unit = (new * self._n_steps, "steps") if new else (len(tasks), "layers")

        def advance(done: int) -> None:
            progress.advance(label, min(done, total - 1), total, unit)  # complete only after the last layer

        advance(0)
        for done, (task, quality) in enumerate(pool.results(tasks, advance if new else None), 1):
            self.qualities[task.layer, task.ranks, recall] = quality
            if not new:
                advance(done)
        progress.advance(label, total, total, unit)

    def _calibrated(self, recall: float) -> list[PredictorWeights]:
        return [
            _read(_checkpoint(self._task(i, ranks, recall))).shifted(self._quality(i, recall).shift)
            for i, ranks in enumerate(self.ranks)
        ]

    # ---- the model with its predictors ----

    def _measured_sequences(self) -> list[np.ndarray]:
        """Return the last held-out sequences, because the first half yields the thresholds."""
        n = max(2, self.settings.n_measured // len(self.held_out[0]))
        return self.held_out[-n:]

    def _predicted_model(self) -> Model:
        """Return the loaded model with the predictors over it. Close only its backend."""
        model, extra = self.model, MemoryTensors()
        for i, weights in enumerate(self.weights):
            for part, matrix in (("fc1", weights.fc1), ("fc2", weights.fc2)):
                type = fitting(self.type, matrix.shape[1])
                data = np.ascontiguousarray(quantize(matrix, type)).reshape(-1).view(np.uint8)
                extra.add(f"blk.{i}.{part}.weight", data, type, matrix.shape[::-1])
        laid = Overlay(model.weights, extra)  # type: ignore[arg-type]
        thresholds = (predictor_files.THRESHOLD,) * self.config.n_layer
        choice = Choice("predicted", "mlp", "predicted: as trained", PredictorSpec("mlp"))
        return Model(*build(model.decided.with_predictor(choice, laid, Predictor("mlp", thresholds))))

    def _perplexity(self, predicted: Model) -> tuple[PerplexityResult, PerplexityResult]:
        tokens = np.concatenate(self._measured_sequences()).tolist()
        engines = (self.model.engine, predicted.engine)
        n_neurons = (sum(self.config.n_ff),) * 2
        n_ctx = len(self.held_out[0])
        *_, (exact, other) = compare_chunks(
            engines, tokens, n_ctx=n_ctx, n_neurons=n_neurons, progress=self.progress
        )
        return exact, other

    def _measure(self, predicted: Model) -> tuple[PredictorQuality, ...]:
        tokens = np.concatenate(self._measured_sequences()[-2:])
        return tuple(predicted.measure_predictor(tokens.tolist()))

    # ---- reports

    def _report(self, layer: int, recall: float) -> LayerReport:
        rank = self.ranks[layer][-1]
        n_bytes = self._n_bytes(layer, rank)
        quality = self._quality(layer, recall)
        return LayerReport(layer, rank, n_bytes, n_bytes / self.model_bytes, quality, self.stopped[layer])

    def _problems(self, layers: Sequence[LayerReport], increase: float, recall: float) -> tuple[str, ...]:
        settings, problems = self.settings, []
        if increase > settings.max_increase:
            problems.append(
                f"perplexity rises by {increase:.2%} on held-out text, more than "
                f"{settings.max_increase:.2%}, even at a recall of {recall:.2%}: give more text"
            )
        short = [layer for layer in layers if layer.stopped == "room"]
        if short:
            worst = min(short, key=lambda layer: layer.quality.precision)
            problems.append(
                f"{len(short)} of {len(layers)} layers would select fewer neurons with more rank, but "
                f"{settings.max_share:.0%} of the model is not enough: in layer "
                f"{worst.layer} {worst.quality.precision:.0%} of the selected neurons fire, but the goal is "
                f"{settings.precision:.0%}; use a smaller `type` or a larger max_share"
            )
        return tuple(problems)

    def _say(self, text: str) -> None:
        if self.progress is not None:
            self.progress.say(text)


def _increase(predicted: PerplexityResult) -> float:
    assert predicted.divergence is not None
    return predicted.divergence.ppl_ratio - 1


def entropy(frequencies: np.ndarray) -> float:
    """Return the bits per neuron of a layer whose neurons fire independently at these frequencies."""
    p = np.clip(frequencies, 1e-12, 1 - 1e-12)
    return float(-(p * np.log2(p) + (1 - p) * np.log2(1 - p)).mean())


class _Pool:
    """A runner of tasks in worker processes, or in this process for one at a time."""

    def __init__(self, settings: PredictorSettings, n_layer: int) -> None:
        n_cores = usable_cores()
        jobs = settings.jobs or (n_cores if settings.device == "cpu" else 1)
        self._jobs = max(1, min(jobs, n_layer))
        self._n_threads = max(1, n_cores // self._jobs)
        self._executor: Executor | None = None
        self._steps: Any = None  # of all tasks, in all processes

    def results(
        self, tasks: Sequence[_Task], on_steps: Callable[[int], None] | None = None
    ) -> Iterator[tuple[_Task, Quality]]:
        """Yield results in the order of completion.

        on_steps: receives the number of training steps that are done, of all these tasks.
        """
        on_steps = on_steps or (lambda _: None)
        if self._jobs == 1 or (len(tasks) == 1 and self._executor is None):
            done = itertools.count(1)
            for task in tasks:
                yield task, _work(task, lambda: on_steps(next(done)))
            return
        if self._executor is None:
            # Spawned, because torch's threads and a GPU's context do not survive a fork.
            processes = multiprocessing.get_context("spawn")
            self._steps = processes.Value("q", 0)
            self._executor = ProcessPoolExecutor(
                self._jobs, processes, _start_worker, (self._n_threads, self._steps)
            )
        before = self._steps.value
        futures = {self._executor.submit(_work_in_process, task): task for task in tasks}
        pending: Collection[Future[Quality]] = futures
        try:
            while pending:
                finished, pending = wait(pending, _LOOK_SECONDS, FIRST_COMPLETED)
                on_steps(self._steps.value - before)
                for future in finished:
                    yield futures[future], future.result()
        except BrokenProcessPool:
            raise HotsetError(
                "the system ended a process that trained a layer, perhaps because memory is too small for "
                f"{self._jobs} of them; start again with jobs=1, which reuses finished layers"
            ) from None

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)


_steps_of_all: Any = None  # in a worker process: the counter of its pool


def _work_in_process(task: _Task) -> Quality:
    def step() -> None:
        with _steps_of_all.get_lock():
            _steps_of_all.value += 1

    return _work(task, step)


def _start_worker(n_threads: int, steps: Any) -> None:
    import signal

    import torch

    global _steps_of_all  # noqa: PLW0603 - a worker process has one pool
    _steps_of_all = steps
    torch.set_num_threads(n_threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()

    def follow() -> None:
        """End this worker if its parent was killed; otherwise it would wait forever."""
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
