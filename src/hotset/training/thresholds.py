"""`hotset sparse calibrate`: thresholds of a model for a given loss or sparsity.

1. The text is split into windows. Windows whose hash is in the lowest quarter are held out and used only for
   measurements; losses are estimated from the others. A window's role does not depend on the rest of the
   text.
2. The losses of all thresholds are estimated together, by gradients (threshold_losses.py).
3. For a target, the thresholds that save most are chosen (threshold_choice.py). The engine runs with each
   kind of them separately on held-out windows; the ratio of measured to estimated loss becomes a factor of
   that kind's losses.
4. For a target in perplexity, choosing and measuring is repeated until the measured loss is just below the
target.

Estimates and measurements threshold all tokens, like the tokens of answers. By default, prompts are computed
without thresholds, so an answer after a long prompt is closer to the model than measured here.

Losses and measurements are stored in `work` immediately. So a killed run continues, and another
target needs only a few measurements.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import torch

from hotset.api import Model, load_opened
from hotset.backends.torch.graph import TorchGraph
from hotset.engine.perplexity import PerplexityResult, compare_chunks
from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import check_folder, check_output, write_whole
from hotset.loader.build import build, open_model
from hotset.model.decoder import describe
from hotset.model.thresholds import THRESHOLD_NAMES, LayerThresholds, ThresholdName
from hotset.placement.channel_rates import plan_here
from hotset.reporter import Reporter
from hotset.settings import LoadSettings
from hotset.sparsity.thresholds import BaseMode, Calibrated, Thresholds, thresholds_path
from hotset.training.threshold_choice import KINDS, ThresholdChoice, ThresholdChoices, bytes_of_sites
from hotset.training.threshold_losses import LayerLosses, LossPass, sites_of

if TYPE_CHECKING:
    from hotset.model.config import ModelConfig
    from hotset.placement.channels import ChannelPlan

_HELD_OUT = 64  # of 256 values of a hash's first byte
_TINY = 1e-30  # a threshold in the graph that has no effect
_KIND_WINDOWS = 6  # windows on which a single kind is measured
_ROUNDS = 6  # limit of choosing and measuring
_CLOSE = 0.1  # relative distance below the target that is close enough
_FIRST_RATIO = 0.7  # increase of the loss per nat of KL, before it is measured
_FACTORS = (0.2, 5.0)
_NEARLY_NOTHING = 0.01  # part of a choice's loss at which the measured KL is mostly rounding
_MOST_KL = 5.0  # limit of the KL, in nats per nat of increase of the loss
_LAYOUT = 2  # version of the files in the work folder


@dataclass(frozen=True)
class ThresholdSettings:
    """The target of a calibration, one of three, and its options.

    max_increase: of the perplexity, relative. share: of the bytes of the matrices whose inputs can be
    thresholded. uniform: of the values of each input and gate, the same in every layer, without a search: a
    baseline.

    only: the thresholds that may be nonzero. mode: the sparsity mode that they are added to; None: the
    model's default. n_ctx: tokens of a window. n_tokens: from which losses are estimated. n_measured:
    held-out tokens that are run; half of them are scored.
    """

    max_increase: float | None = None
    share: float | None = None
    uniform: float | None = None
    only: tuple[ThresholdName, ...] = THRESHOLD_NAMES
    mode: BaseMode | None = None
    n_ctx: int = 512
    n_tokens: int = 4096
    n_measured: int = 16384
    n_threads: int | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.max_increase, self.share, self.uniform)) != 1:
            raise InvalidRequestError(
                "a calibration needs one target: an increase of perplexity (max_increase='1%'), a share "
                "of the bytes (sparsity=0.5) or a share of all values (uniform=0.25)"
            )
        if self.max_increase is not None and not 0 < self.max_increase <= 10:
            raise InvalidRequestError(
                f"the increase of perplexity must be above 0 and at most 1000%, not {self.max_increase:%}"
            )
        if self.mode is not None and self.mode not in get_args(BaseMode):
            raise InvalidRequestError(
                f"thresholds are added to one of {', '.join(get_args(BaseMode))}, not to {self.mode!r}"
            )
        for share in (self.share, self.uniform):
            if share is not None and not 0 < share < 1:
                raise InvalidRequestError(f"the sparsity must be between 0 and 1, not {share}")
        if not self.only or (unknown := sorted(set(self.only) - set(THRESHOLD_NAMES))):
            raise InvalidRequestError(
                f"the thresholds must be some of {', '.join(THRESHOLD_NAMES)}"
                + (f", not {unknown[0]!r}" if self.only else "")
            )


@dataclass(frozen=True)
class Measured:
    """Results with all tokens thresholded, on held-out windows, compared with the model without thresholds.

    Errors are standard errors. saved: predicted share of the bytes of the matrices whose inputs can be
    thresholded.
    """

    saved: float
    ppl_dense: float
    ppl: float
    increase: float
    increase_error: float
    kl: float
    same_top: float
    n_scored: int


@dataclass(frozen=True)
class CalibratedThresholds:
    """The result of a calibration.

    predicted: the loss in nats of KL, by kind. plan: what this machine skips with them. problems: missed
    targets, one sentence each.
    """

    path: Path
    thresholds: Thresholds
    measured: Measured
    predicted: dict[str, float]
    plan: ChannelPlan
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            "path": str(self.path),
            "measured": asdict(self.measured),
            "foreseen": self.predicted,
            "gain": self.plan.as_dict(),
            "layers": [dict(layer.items()) for layer in self.thresholds.layers],
            "problems": list(self.problems),
        }


def calibrate_thresholds(
    model: str | os.PathLike[str],
    text: str,
    out: str | os.PathLike[str] | None = None,
    settings: ThresholdSettings | None = None,
    *,
    work: str | os.PathLike[str] | None = None,
    keep: bool = False,
    progress: Reporter | None = None,
) -> CalibratedThresholds:
    """Find the thresholds of a model file on a text and write them.

    out: the file, by default next to the model. work: a folder for the state of a run, by default OUT.work;
    keep: keep it for other targets. Raises HotsetError for a text that is too short, and for files that
    cannot be written.
    """
    settings = settings or ThresholdSettings(max_increase=0.01)
    loading = LoadSettings(
        n_threads=settings.n_threads, device="cpu", sparsity=settings.mode, progress=progress
    )
    with open_model(model, loading) as opened:
        target = Path(out) if out is not None else thresholds_path(opened.gguf.path)
        folder = Path(work) if work is not None else target.with_name(f"{target.name}.work")
        check_output(target, opened.gguf.paths)
        check_folder(folder)
        n_ctx = min(settings.n_ctx, opened.config.n_ctx_train)
        settings = replace(settings, n_ctx=n_ctx)
        with load_opened(opened.with_settings(n_ctx=n_ctx)) as loaded:
            search = Search(loaded, text, folder, settings, progress)
            found = search.run(target)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def every_threshold(config: ModelConfig) -> list[LayerThresholds]:
    """Return thresholds without effect at all possible sites: in experts, only gates."""
    every = LayerThresholds(**dict.fromkeys(THRESHOLD_NAMES, _TINY))
    of_experts = LayerThresholds(attn_in=_TINY, attn_out=_TINY, gate=_TINY)
    return [of_experts if layer.experts is not None else every for layer in config.layers]


def windows_of(model: Model, text: str, n_ctx: int) -> tuple[np.ndarray, np.ndarray]:
    """Split a text into windows int32 [n, n_ctx], each beginning like a text: to learn from, and held out.

    A window's part, and its place in it, depend only on the hash of its tokens.
    """
    rows = model.tokenizer.rows(model.tokenizer.encode(text, add_special=True), n_ctx)
    digests = [hashlib.sha256(np.ascontiguousarray(row, np.int32).tobytes()).digest() for row in rows]
    order = sorted(range(len(rows)), key=lambda i: digests[i])
    held = [i for i in order if digests[i][0] < _HELD_OUT]
    return rows[[i for i in order if digests[i][0] >= _HELD_OUT]], rows[held]


class Search:
    def __init__(
        self, model: Model, text: str, work: Path, settings: ThresholdSettings, progress: Reporter | None
    ) -> None:
        self.model, self.settings, self.progress = model, settings, progress
        model.engine.require_logits()
        learned, held = windows_of(model, text, settings.n_ctx)
        n_learned = max(1, settings.n_tokens // settings.n_ctx)
        n_held = max(2, settings.n_measured // settings.n_ctx)
        if len(learned) < 1 or len(held) < 2:
            raise InvalidRequestError(
                f"the text is too short: it has {len(learned)} windows of {settings.n_ctx} tokens to learn "
                f"from and {len(held)} to measure on, but needs 1 and 2; give more text"
            )
        self.learned, self.held = learned[:n_learned], held[:n_held]
        self.model_facts = Calibrated.of(model.gguf)
        self.mode = cast(BaseMode, model.sparsity.mode)
        self.text = {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "windows": settings.n_ctx,
            "learned": _hash(self.learned),
            "measured": _hash(self.held),
            "rule": f"a window is held out if the SHA-256 of its int32 tokens begins below {_HELD_OUT}",
        }
        # Measurements include their windows in their own keys.
        key = [_LAYOUT, self.model_facts.hash, self.mode, str(model.sparsity.spec), _hash(self.learned)]
        self.work = _Work(work, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32], settings.n_ctx)
        layer_thresholds = every_threshold(model.config)
        self.graph = describe(model.config, model.weights.tensors, model.decided.predictor, layer_thresholds)
        if not any(sites.keys() & set(settings.only) for sites in sites_of(self.graph)):
            raise InvalidRequestError(
                f"the model has no sites for {', '.join(settings.only)}: experts only have thresholds "
                "of gates; name other thresholds, or omit `only`"
            )

    def run(self, target: Path) -> CalibratedThresholds:
        gated = [layer.gated for layer in self.model.config.layers]
        sizes = bytes_of_sites(self.graph, self.model.weights)
        losses = [layer.only(self.settings.only, self.settings.uniform) for layer in self._losses()]
        choices = ThresholdChoices(losses, sizes, gated)
        choice, measured, problems = self._chosen(choices)
        thresholds = Thresholds(
            self.model_facts, choice.layers, self.mode, False, self.text,
            {
                **asdict(measured), "kept": [dict(layer) for layer in choice.kept], "all_tokens_cut": True,
                "target": self._target(),
            },
        )  # fmt: skip
        thresholds.save(target)
        plan = plan_here(
            self.model.gguf, self.model.config, thresholds, self.settings.n_threads, progress=self.progress
        )
        return CalibratedThresholds(target, thresholds, measured, dict(choice.loss), plan, tuple(problems))

    def _target(self) -> dict[str, Any]:
        names = ("max_increase", "share", "uniform")
        target = {name: value for name in names if (value := getattr(self.settings, name)) is not None}
        return target | ({"only": list(self.settings.only)} if self.settings.only != THRESHOLD_NAMES else {})

    # ---- losses

    def _losses(self) -> list[LayerLosses]:
        if self.settings.n_threads is not None:
            torch.set_num_threads(self.settings.n_threads)
        tokens = torch.from_numpy(self.learned.astype(np.int64))
        graph = TorchGraph(self.model.weights, self.graph)
        graph.on_part = self._counting("thresholds on offer", graph.n_parts)
        losses = LossPass(graph, tokens[0])
        first = self.work.load_losses(losses)
        # Each window runs through the layers once forward and once backward.
        per_window = 2 * graph.n_parts
        graph.on_part = self._counting("losses", per_window * len(tokens), per_window * first)
        for i in range(first, len(tokens)):
            losses.add(tokens[i], seed=i)
            self.work.save_losses(losses, i + 1)
        return losses.layers

    # ---- choices

    def _chosen(self, choices: ThresholdChoices) -> tuple[ThresholdChoice, Measured, list[str]]:
        settings = self.settings
        if settings.uniform is not None:
            choice = choices.at_price(0.0)  # the only one
            return choice, self._measure(choice.layers, choice.saved, len(self.held), "measuring"), []
        if settings.share is not None:
            choice = choices.with_share(settings.share)
            if sum(loss > 0 for loss in choice.loss.values()) > 1:  # otherwise there is nothing to weigh
                self._measure_kinds(choices, choice)
                choice = choices.with_share(settings.share)
            problems = []
            if choice.saved < settings.share:
                problems.append(
                    f"a share of {settings.share:.0%} cannot be saved: the largest thresholds on offer save "
                    f"{choice.saved:.0%} of the bytes"
                )
            return choice, self._measure(choice.layers, choice.saved, len(self.held), "measuring"), problems
        assert settings.max_increase is not None
        goal = math.log1p(settings.max_increase)
        ratio = self._measure_kinds(choices, choices.with_loss(goal / _FIRST_RATIO))
        return self._to_goal(choices, goal, ratio)

    def _measure_kinds(self, choices: ThresholdChoices, choice: ThresholdChoice) -> float:
        """Measure each kind of this choice separately, and set the factors of the losses.

        Returns the increase of the loss per nat of KL. Any change also changes the rounding of products'
        inputs, which adds a KL (0.003 for SmolLM2) without a loss of perplexity. So the KL of a nearly empty
        choice is subtracted.
        """
        kinds = {kind: choice.only(kind) for kind in KINDS}
        kinds = {
            kind: layers for kind, layers in kinds.items() if any(layer.has_thresholds for layer in layers)
        }
        n = min(_KIND_WINDOWS, len(self.held))
        least = choices.with_loss(choice.total_loss * _NEARLY_NOTHING)
        rounding = 0.0
        if any(layer.has_thresholds for layer in least.layers):
            smallest = self._measure(least.layers, least.saved, n, "measuring the smallest thresholds")
            rounding = max(0.0, smallest.kl - least.total_loss)
        kl = rise = 0.0
        for i, (kind, layers) in enumerate(kinds.items(), 1):
            alone = self._measure(layers, choice.saved, n, f"kind {i} of {len(kinds)}")
            own = max(0.0, alone.kl - rounding)
            if choice.loss[kind] > 0:
                choices.factors[kind] = float(np.clip(own / choice.loss[kind], *_FACTORS))
            kl, rise = kl + own, rise + math.log1p(alone.increase)
        return float(np.clip(rise / kl, 1 / _MOST_KL, 2.0)) if kl > 0 else _FIRST_RATIO

    def _to_goal(
        self, choices: ThresholdChoices, goal: float, ratio: float
    ) -> tuple[ThresholdChoice, Measured, list[str]]:
        """Choose and measure until the increase of the loss is just below the goal."""
        best: tuple[ThresholdChoice, Measured] | None = None
        low, high = 0.0, math.inf  # predicted losses whose measurements are below the goal, above it
        predicted = goal / ratio
        for i in range(_ROUNDS):
            choice = choices.with_loss(predicted)
            measured = self._measure(choice.layers, choice.saved, len(self.held), f"round {i + 1}")
            # The perplexity may be unchanged by chance although the output changed.
            rise = max(math.log1p(measured.increase), measured.kl / _MOST_KL)
            if rise <= goal:
                low = predicted
                if best is None or choice.saved > best[0].saved:
                    best = choice, measured
                if rise > (1 - _CLOSE) * goal:
                    break
            else:
                high = predicted
            # Losses are about proportional; bisect only if that leads out of the interval.
            wanted = predicted * (1 - _CLOSE / 2) * goal / max(rise, goal / 4)
            if not low < wanted < high:
                wanted = (low + high) / 2 if high < math.inf else 2 * predicted
            predicted = wanted
        if best is None or not best[0].saved:
            raise HotsetError(
                f"no thresholds were found with an increase of perplexity below {math.expm1(goal):.2%} on "
                "held-out text; allow a larger one, or give more text"
            )
        return *best, []

    # ---- measurements

    def _measure(
        self, layers: Sequence[LayerThresholds], saved: float, n_windows: int, label: str
    ) -> Measured:
        windows = self.held[:n_windows]
        key = [_hash(windows), [dict(layer.items()) for layer in layers]]
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        known = self.work.measured.get(name)
        if known is None:
            dense, thresholded = self._compare(layers, windows, label)
            apart = thresholded.divergence
            assert apart is not None
            known = {
                "ppl_dense": dense.ppl, "ppl": thresholded.ppl, "increase": apart.ppl_ratio - 1,
                "increase_error": apart.ppl_ratio_error, "kl": apart.kl, "same_top": apart.same_top,
                "n_scored": thresholded.n_scored,
            }  # fmt: skip
            self.work.add_measured(name, known)
        return Measured(saved=saved, **known)

    def _compare(
        self, layers: Sequence[LayerThresholds], windows: np.ndarray, label: str
    ) -> tuple[PerplexityResult, PerplexityResult]:
        thresholds = Thresholds(self.model_facts, tuple(layers), self.mode)
        approximate = Model(*build(self.model.decided.with_thresholds(thresholds)))
        try:
            *_, (dense, thresholded) = compare_chunks(
                (self.model.engine, approximate.engine), windows.flatten().tolist(),
                n_ctx=self.settings.n_ctx,
                n_neurons=(0, 0), progress=self.progress, label=label,
            )  # fmt: skip
            return dense, thresholded
        finally:
            approximate.thread.close()
            approximate.backend.close()

    def _counting(self, label: str, total: int, done: int = 0) -> Callable[[], None]:
        """Return a function that counts a layer per call, and start counting."""
        progress = self.progress or Reporter()
        progress.advance(label, done, total, "layers")
        left = itertools.count(done + 1)
        return lambda: progress.advance(label, next(left), total, "layers")


class _Work:
    """The stored state of a run: sums of losses, and measurements, one per line."""

    def __init__(self, folder: Path, key: str, n_ctx: int) -> None:
        self.folder, self.n_ctx = folder / key, n_ctx
        self.folder.mkdir(parents=True, exist_ok=True)
        self.measured: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / "measured.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # incomplete, because the process ended
                    self.measured |= json.loads(line)

    def add_measured(self, name: str, values: dict[str, Any]) -> None:
        self.measured[name] = values
        lines = (json.dumps({name: values}) + "\n" for name, values in self.measured.items())
        write_whole({self.folder / "measured.jsonl": "".join(lines)})

    def load_losses(self, losses: LossPass) -> int:
        """Load the sums that `save_losses` stored; return the number of their windows."""
        try:
            data = (self.folder / "losses.npz").read_bytes()
            with np.load(io.BytesIO(data)) as kept:
                arrays = {name: kept[name] for name in kept.files}
        except (OSError, ValueError, zipfile.BadZipFile):  # missing or damaged
            return 0
        n = int(arrays.pop("n_windows"))
        own = _arrays(losses)
        if {name: values.shape for name, values in own.items()} != {
            name: values.shape for name, values in arrays.items()
        }:
            return 0
        for name, values in own.items():
            values[...] = arrays[name]
        for layer in losses.layers:
            layer.n_tokens = n * self.n_ctx
        return n

    def save_losses(self, losses: LossPass, n_windows: int) -> None:
        file = io.BytesIO()
        np.savez(file, n_windows=n_windows, **_arrays(losses))  # type: ignore[arg-type]
        write_whole({self.folder / "losses.npz": file.getvalue()})


def _arrays(losses: LossPass) -> dict[str, np.ndarray]:
    """Return all sums and their thresholds, without copying."""
    return {
        f"{i}.{kind}.{name}": values
        for i, layer in enumerate(losses.layers)
        for kind, part in (("thresholds", layer.thresholds), ("loss", layer.loss), ("cut", layer.zeroed))
        for name, values in part.items()
    }


def _hash(windows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(windows, np.int32).tobytes()).hexdigest()
