"""The activation of an FFN: its names, and the keys of a file that describe it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.model.keys import (
    FATRELU_THRESHOLD_KEY,
    MAX_MULTIPLIER,
    TOP_K_KEY,
    UP_ACTIVATION_KEY,
    Keys,
    is_array,
    number,
)
from hotset.model.operations import XIELU, ActivationKind, has_zeros
from hotset.parameters import shown


@dataclass(frozen=True)
class FFNActivation:
    """An activation: neuron = f_gate(gate) * f_up(up), or f_gate(up) in an FFN without a gate.

    up: None applies no function to the up projection. threshold: for kinds with one (see
    operations.Activate). top_k: multiplier of a Gaussian top-k of the gates before f (see
    operations.GaussianTopK); None: no top-k. xielu: its parameters.
    """

    gate: ActivationKind
    up: ActivationKind | None = None
    threshold: float = 0.0
    top_k: float | None = None
    xielu: XIELU | None = None

    @property
    def has_zeros(self) -> bool:
        """Return whether it sets neurons to exactly zero."""
        return has_zeros(self.gate) or self.top_k is not None


MAX_CLAMP = 1e6
CLAMPED = FFNActivation("clamped_silu", up="clamped_plus_one", threshold=7.0)
SILU = FFNActivation("silu")
GELU = FFNActivation("gelu")
GELU_TANH = FFNActivation("gelu_tanh")
RELU = FFNActivation("relu")
RELU2 = FFNActivation("relu2")
XIELU_OF_LAYERS = FFNActivation("xielu")  # with parameters from keys
DRELU = FFNActivation("relu", up="relu")
# Activations of neurons that a key or an option may name; the other kinds are parts of an architecture.
_NAMED: tuple[ActivationKind, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu")


def parse_activation(text: str, threshold: float | None = None) -> FFNActivation:
    """Return the activation that a key or an option names: silu, relu, relu2, drelu, fatrelu:0.01, ...

    threshold: for a plain "fatrelu". Raises InvalidRequestError, which lists the accepted names.
    """
    name, _, number = text.strip().lower().partition(":")
    name = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}.get(name, name)
    if name == "fatrelu":
        if number:
            try:
                threshold = float(number)
            except ValueError:
                threshold = None
        if threshold is None or not (math.isfinite(threshold) and threshold >= 0):
            raise InvalidRequestError(
                f"the activation {text!r} needs a threshold of at least 0, for instance fatrelu:0.01"
            )
        return FFNActivation("fatrelu", threshold=threshold)
    if name == "drelu" and not number:
        return DRELU
    if name not in _NAMED or number:
        known = ", ".join([*(k for k in _NAMED if k != "fatrelu"), "drelu", "fatrelu:T"])
        raise InvalidRequestError(f"the activation {text!r} is unknown; it must be one of {known}")
    return FFNActivation(name)


def activation_of(keys: Keys, unnamed: FFNActivation) -> FFNActivation:
    """Return the activation of a file. unnamed: the default if the file names none."""
    gate, up = keys.text("hidden_activation"), keys.metadata.get(UP_ACTIVATION_KEY)
    threshold = number(keys.metadata, FATRELU_THRESHOLD_KEY)
    try:
        activation = unnamed if gate is None else parse_activation(gate, threshold)
    except InvalidRequestError as error:
        raise UnsupportedModelError(
            f"in the file's key {keys.architecture}.hidden_activation, {error}"
        ) from None
    if up is None:
        return activation
    if not isinstance(up, str) or up != "relu":  # `up` may be an array, which cannot be compared
        raise UnsupportedModelError(
            f"the file's key {UP_ACTIVATION_KEY} is {shown(up)}; only relu is supported"
        )
    return FFNActivation(activation.gate, "relu", activation.threshold)


def top_k_of(keys: Keys, n_layer: int) -> tuple[float | None, ...]:
    """Return the multipliers of the layers' Gaussian top-k; None for layers whose value is -inf."""
    values = keys.get(TOP_K_KEY)
    if values is None:
        return (None,) * n_layer
    if not is_array(values) or len(values) != n_layer:
        raise keys.error(TOP_K_KEY, f"must hold a number for each of {n_layer} layers")
    if any(isinstance(v, bool | np.bool_ | str) or not -math.inf <= v <= MAX_MULTIPLIER for v in values):
        raise keys.error(TOP_K_KEY, f"must hold numbers up to {MAX_MULTIPLIER:g}, or -inf")
    return tuple(None if v == -math.inf else float(v) for v in values)


def clamp_of(keys: Keys, n_layer: int) -> tuple[float, ...]:
    """Return each layer's SwiGLU clamp: an upper limit of gate and of the magnitude of up; 0: no clamp."""
    found = []
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        value = keys.get(key, 0.0)
        values = list(value)[:n_layer] if is_array(value) else [value] * n_layer
        numbers = [number({key: one}, key) for one in values]
        if len(numbers) != n_layer or any(n is None or not 0 <= n <= MAX_CLAMP for n in numbers):
            raise keys.error(key, f"must hold a number up to {MAX_CLAMP:g} for each layer")
        found.append(tuple(n if n is not None and n > 1e-6 else 0.0 for n in numbers))
    of_experts, of_shared = found
    if keys.get("swiglu_clamp_shexp") is not None and of_experts != of_shared:
        raise UnsupportedModelError(
            f"the file's keys {keys.architecture}.swiglu_clamp_exp and swiglu_clamp_shexp differ, which is "
            "not supported"
        )
    return of_experts


def xielu_of(keys: Keys, n_layer: int) -> tuple[XIELU, ...]:
    """Return the xIELU parameters of each layer.

    The keys have no architecture prefix and hold one number, or one per layer. The parameters are
    softplus(alpha_p) and beta + softplus(alpha_n).
    """
    found = []
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        key = f"xielu.{name}"
        value = keys.metadata.get(key)
        values = list(value) if is_array(value) else [value] * n_layer  # type: ignore[arg-type]
        numbers = [number({key: one}, key) for one in values]
        if len(numbers) != n_layer or None in numbers:
            raise FormatError(f"the file's key {key} must hold a number, or one for each of {n_layer} layers")
        if any(abs(number) > 1e4 for number in numbers if number is not None):
            raise FormatError(f"the file's key {key} holds a number above 10000; the file is damaged")
        found.append(np.array(numbers, np.float64))
    alpha_p, alpha_n, beta, eps = found
    positive, negative = np.logaddexp(0, alpha_p), beta + np.logaddexp(0, alpha_n)
    return tuple(XIELU(*map(float, each)) for each in zip(positive, negative, beta, eps, strict=True))
