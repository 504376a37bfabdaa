"""The sides of `hotset perplexity --compare`: their words, their settings, and the table of results.

    --compare exact --compare svd:256          two modes of MODEL
    --compare OTHER.gguf                       MODEL against another file
    --compare OTHER.gguf,exact,cache-type=q8_0 a file, its mode, a setting
    --compare thresholds=FILE                  MODEL against itself with a file of thresholds

A side is a list of words, separated by commas: a mode (dense, exact, predicted, threshold), a predictor
(svd:256, or predicted:svd:256), a setting (NAME=VALUE), or otherwise a model. The rest of the command line
gives the other settings. Its mode, predictor, profile and activation apply only to MODEL, not to another
file. A mode, a predictor or thresholds of a side replace both its mode and its predictor.

A file of --thresholds applies to the sides with the word `threshold`. If no side has it, it applies to
MODEL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from hotset.backends.registry import CPU, REFERENCE
from hotset.load_parameters import SparsityMode
from hotset.model.predictor import PredictorKind
from hotset.report.bars import percent

if TYPE_CHECKING:
    from hotset.api import Model
    from hotset.engine.perplexity import PerplexityResult
    from hotset.settings import LoadSettings
    from hotset.sparsity.modes import Choice

SETTINGS = {
    "cache-type": "kv_type",
    "activation": "activation",
    "device": "device",
    "profile": "profile",
    "thresholds": "thresholds",
}
_OF_THRESHOLDS = ("thresholds", "sparse_prompts")
_OF_THE_FILE = ("sparsity", "predictor", "profile", "activation", "gpu_index", *_OF_THRESHOLDS)
_OF_THE_GPU = ("vram_budget", "n_gpu_layers", "gpu_index")


@dataclass(frozen=True)
class Side:
    """One side of a comparison. model: a path or a name. said: its own settings, as the user wrote them."""

    model: str
    settings: LoadSettings
    said: tuple[str, ...] = ()


def sides_of(
    model: str, settings: LoadSettings, compare: Sequence[str], thresholds: Path | None = None
) -> list[Side]:
    """Return the sides to compare: MODEL and the one that is named, or only the named ones.

    thresholds: a file for the sides of MODEL with the word `threshold`, if the settings have none.
    """
    named = [_side(words, model, settings, thresholds) for words in compare]
    return [Side(model, settings), *named] if len(named) < 2 else named


def says_threshold(compare: Sequence[str]) -> bool:
    """Return whether a side of MODEL asks for mode `threshold` without a file of its own."""
    return any(
        words.model is None and words.changed.get("sparsity") == "threshold" and not words.names_thresholds
        for words in map(_read, compare)
    )


@dataclass(frozen=True)
class _Words:
    """The parsed words of a side: another model or None, fields of LoadSettings, settings as written."""

    model: str | None
    changed: dict[str, Any]
    said: tuple[str, ...]

    @property
    def names_thresholds(self) -> bool:
        return "thresholds" in self.changed


def _read(text: str) -> _Words:
    def wrong(message: str) -> typer.BadParameter:
        return typer.BadParameter(message, param_hint="--compare")

    other: str | None = None
    changed: dict[str, Any] = {}
    said: list[str] = []

    def put(key: str, value: str, what: str) -> None:
        if key in changed:
            raise wrong(f"{text} names {what} twice.")
        changed[key] = value

    for word in [text] if Path(text).is_file() else text.split(","):
        head, _, rest = word.partition(":")
        name, equals, value = word.partition("=")
        if head == "predicted" and rest:
            put("sparsity", head, "a mode")
            put("predictor", rest, "a predictor")
        elif word in get_args(SparsityMode):
            put("sparsity", word, "a mode")
        elif head in get_args(PredictorKind):
            put("predictor", word, "a predictor")
        elif equals and name in SETTINGS:
            put(SETTINGS[name], value, name)
            said.append(word)
        elif not word or (equals and not Path(word).is_file()):
            raise wrong(
                f"{word!r} in {text!r} is not a mode, predictor, model or setting; the settings are "
                f"{', '.join(f'{key}=...' for key in SETTINGS)}."
            )
        elif other is not None:
            raise wrong(f"{text} names two models; give each a --compare of its own.")
        else:
            other = word
    return _Words(other, changed, tuple(said))


def _side(text: str, model: str, settings: LoadSettings, thresholds: Path | None) -> Side:
    words = _read(text)
    changed = words.changed
    unsaid: tuple[str, ...] = ()
    if words.model is not None:
        unsaid = _OF_THE_FILE
    elif not changed.keys().isdisjoint(("sparsity", "predictor", "thresholds")):
        unsaid = ("sparsity", "predictor")
        if changed.get("sparsity") in ("dense", "exact"):
            unsaid += ("profile",)  # only predictions use it
        if changed.get("sparsity") == "threshold":
            changed = {"thresholds": thresholds or settings.thresholds} | changed
        elif not words.names_thresholds:
            unsaid += _OF_THRESHOLDS
    if changed.get("device") in (CPU, REFERENCE):
        unsaid += _OF_THE_GPU
    plain = type(settings)()
    fields = {name: getattr(plain, name) for name in unsaid} | changed
    return Side(words.model or model, replace(settings, **fields), words.said)


def names_of(sides: Sequence[Side], models: Sequence[Model]) -> list[str]:
    """Return a short name for each side: the file if there are several, the mode, the settings."""
    files = [model.gguf.path.name.removesuffix(".gguf") for model in models]
    several = len(set(files)) > 1
    names = []
    for side, model, file in zip(sides, models, files, strict=True):
        choice = model.sparsity
        names.append(" ".join([*([file] if several else []), _mode_of(choice), *side.said]))
    return names


def _mode_of(choice: Choice) -> str:
    predictor = "" if choice.spec is None else str(choice.spec)
    return f"threshold {predictor}".strip() if choice.mode == "threshold" else predictor or choice.mode


def table_of(names: Sequence[str], results: Sequence[PerplexityResult]) -> tuple[list[str], list[list[str]]]:
    """Return a row for each side. Comparisons with the first side are blank in its own row."""
    counted = any(result.active_share is not None for result in results)
    chosen = any((result.selected_share or 1) < 1 for result in results)
    columns = ["", ">PPL", ">÷ first", ">KL mean", ">KL 99%", ">same top"]
    columns += [">active"] * counted + [">chosen"] * chosen + [">t/s"]
    rows = []
    for name, result in zip(names, results, strict=True):
        row = [name, f"{result.ppl:.4f} ± {result.error:.4f}"]
        one = result.divergence
        if one is None:
            row += [""] * 4
        else:
            row += [f"{one.ppl_ratio:.5f} ± {one.ppl_ratio_error:.5f}"]
            row += [f"{one.kl:.3g} ± {one.kl_error:.1g}", f"{one.kl_p99:.3g}"]
            row += [f"{100 * one.same_top:.2f} ± {100 * one.same_top_error:.2f}%"]
        row += [percent(result.active_share)] * counted + [percent(result.selected_share)] * chosen
        rows.append([*row, f"{result.tokens_per_second:.0f}"])
    return columns, rows
