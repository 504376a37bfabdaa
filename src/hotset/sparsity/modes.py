"""The sparsity mode of a model: which one is chosen, and why. preparing.py opens the files that it needs.

    dense      all neurons
    exact      all gates, but rows of up and down only for neurons that fire: bitwise identical to dense
    predicted  the neurons that a predictor selects, and among these only those that fire: an approximation
    threshold  one of the above, with small values set to zero by a calibration's thresholds: an approximation

The default is the fastest mode that computes the model as published: `predicted` if the file carries
predictors, otherwise `exact` if neurons can be exactly zero, otherwise `dense`. It is never `threshold`,
which changes the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hotset.errors import InvalidRequestError
from hotset.load_parameters import LOAD_PARAMETERS, SparsityMode
from hotset.model.predictor import PredictorKind
from hotset.model.thresholds import LayerThresholds
from hotset.sparsity.predictor_spec import PredictorSpec, parse_predictor
from hotset.sparsity.thresholds import BaseMode, Thresholds

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo
    from hotset.model.config import ModelConfig


@dataclass(frozen=True)
class Choice:
    """A mode and the reason for it, one sentence.

    predictor, spec: for `predicted`, which predictor and its settings. thresholds: for `threshold`; they name
    the mode that they are added to.
    """

    mode: SparsityMode
    predictor: PredictorKind | None
    reason: str
    spec: PredictorSpec | None = None
    thresholds: Thresholds | None = None

    @property
    def base(self) -> BaseMode:
        """Return the mode without the thresholds."""
        if self.thresholds is not None:
            return self.thresholds.mode
        assert self.mode != "threshold", "a Choice of mode threshold has thresholds"
        return self.mode

    @property
    def layer_thresholds(self) -> tuple[LayerThresholds, ...]:
        """Return the thresholds of each layer, for decoder.describe; empty without thresholds."""
        return () if self.thresholds is None else self.thresholds.layers


def asked_mode(
    mode: str | None, predictor: str | None, thresholds: object = None
) -> tuple[SparsityMode | None, PredictorSpec | None]:
    """Return the mode and predictor that a user requests, for any model.

    thresholds: not None if the user names some. Raises InvalidRequestError for unknown or contradicting
    values.
    """
    LOAD_PARAMETERS["sparsity"].checked(mode)
    spec = None if predictor is None else parse_predictor(predictor)
    if spec is not None and mode in ("dense", "exact"):
        raise InvalidRequestError(f"`predictor` requires sparsity='predicted', not '{mode}'")
    if thresholds is not None and mode not in (None, "threshold"):
        raise InvalidRequestError(f"`thresholds` requires sparsity='threshold', not '{mode}'")
    return cast(SparsityMode | None, mode), spec


def choose(
    config: ModelConfig,
    tensors: Mapping[str, TensorInfo],
    mode: str | None = None,
    predictor: str | None = None,
    thresholds: Thresholds | None = None,
) -> Choice:
    """Return the mode and predictor for a model; `mode` and `predictor` are the user's choices, or None.

    thresholds: for mode `threshold`; they name the mode that they are added to. Raises InvalidRequestError if
    the model cannot run in the requested mode, or a value is unknown.
    """
    if thresholds is not None:
        below = choose(config, tensors, thresholds.mode, predictor)
        reason = (
            f"threshold: small values count as zero, as calibrated; "
            f"{below.reason.removesuffix(', as requested')}"
        )
        return replace(below, mode="threshold", reason=reason, thresholds=thresholds)
    mode, spec = asked_mode(mode, predictor)
    spec = spec and spec.resolved(config)
    activation = _activation_name(config)
    if config.masked:
        return _choose_masked(config, mode, spec)
    published = all(
        f"blk.{i}.{name}.weight" in tensors for i in range(config.n_layer) for name in ("fc1", "fc2")
    )
    if (mode in ("exact", "predicted") or spec is not None) and not config.has_zeros:
        raise InvalidRequestError(
            f"the model's activation is {activation}, which has no zeros, so only dense is possible; "
            "if the file is a ReLU model that does not say so, name its activation (activation='relu')"
        )
    if spec is not None and spec.kind == "mlp" and not published:
        raise InvalidRequestError(
            "the predictor mlp must be in the file (fc1, fc2), but this file has none; choose svd, or train "
            "it with 'hotset sparse train'"
        )

    if config.activation.top_k is not None and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "a Gaussian top-k needs all gates first, so a predictor saves nothing; use exact"
        )
    if not config.causal and (mode == "predicted" or spec is not None):
        raise InvalidRequestError("predictors for embedding models are not supported; use exact")
    if 0 in config.n_ff and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "predictors for models with layers without an FFN are not supported; use exact"
        )
    if config.has_experts and (mode == "predicted" or spec is not None):
        raise InvalidRequestError(
            "predictors for neurons inside experts are not supported; leave the predictor out, or use exact"
        )
    requested = "as requested" if mode is not None else ""
    if mode == "dense":
        return Choice("dense", None, f"dense: all neurons, {requested}")
    if mode == "exact":
        return Choice("exact", None, f"exact: only neurons that fire, {requested}")
    if spec is not None:
        how = "the file carries it" if spec.kind == "mlp" else "hotset builds it from the weights"
        return Choice("predicted", spec.kind, f"predicted: by {spec}, as requested ({how})", spec)
    if published and config.has_zeros:
        spec = PredictorSpec("mlp")
        return Choice("predicted", "mlp", "predicted: the file carries predictors (fc1, fc2)", spec)
    if mode == "predicted":
        spec = PredictorSpec("svd").resolved(config)
        reason = f"predicted: by {spec}, {requested}; the file carries no predictors, so hotset builds one"
        return Choice("predicted", "svd", reason, spec)
    if config.has_zeros:
        reason = f"exact: its activation is {activation}, so neurons that do not fire contribute nothing"
        return Choice("exact", None, reason)
    return Choice("dense", None, f"dense: {activation} has no zeros")


def _choose_masked(config: ModelConfig, mode: SparsityMode | None, spec: PredictorSpec | None) -> Choice:
    """Choose for a model that includes its predictors' mask, which decoder.describe always adds."""
    if spec is not None and spec != PredictorSpec("mlp"):
        raise InvalidRequestError(
            f"the mask of the file's own predictors is part of the model, so {spec} cannot replace it"
        )
    if mode == "exact" and not config.has_zeros:
        raise InvalidRequestError("the model's activation has no zeros; use dense")
    how = f"{mode}, as requested" if mode is not None else "predicted"
    return Choice(mode or "predicted", None, f"{how}: the mask of the file's predictors is part of the model")


def _activation_name(config: ModelConfig) -> str:
    names = {"relu": "ReLU", "relu2": "squared ReLU", "fatrelu": "FATReLU"}
    gate, up = config.activation.gate, config.activation.up
    name = "dReLU" if gate == up == "relu" else names.get(str(gate), str(gate))
    return name if config.activation.top_k is None else f"{name} with a Gaussian top-k"
