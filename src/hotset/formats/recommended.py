"""Sampling parameters that a GGUF file recommends, under the keys `general.sampling.*` of llama.cpp.

They are the defaults of a model for requests that leave a parameter out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.formats.gguf import GGUFFile, GGUFWriter, ValueType
from hotset.sampling_parameters import PARAMETERS

_PREFIX = "general.sampling."
KEYS = {
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    **{
        name: name
        for name in (
            "top_k", "top_p", "min_p", "penalty_last_n", "xtc_probability", "xtc_threshold", "mirostat",
            "mirostat_tau", "mirostat_eta",
        )
    },
}  # fmt: skip
"""The end of a key → the parameter."""


def recommended(gguf: GGUFFile) -> tuple[dict[str, Any], list[str]]:
    """Return the recommended parameters of a file, and a sentence for each value that is not valid."""
    found: dict[str, Any] = {}
    problems = []
    for end, name in KEYS.items():
        value = gguf.metadata.get(_PREFIX + end)
        if isinstance(value, float):
            value = float(str(np.float32(value)))  # 0.7, not 0.699999988
        if value is not None:
            try:
                found[name] = PARAMETERS[name].checked(value)
            except InvalidRequestError as error:
                problems.append(f"{gguf.path} recommends a sampling parameter that is ignored: {error}")
    return found, problems


def recommend(writer: GGUFWriter, params: Mapping[str, Any]) -> None:
    """Write recommended parameters. Raises InvalidRequestError for a value that is not valid."""
    for end, name in KEYS.items():
        if name in params:
            kind = ValueType.INT32 if PARAMETERS[name].kind is int else ValueType.FLOAT32
            writer.add(_PREFIX + end, PARAMETERS[name].checked(params[name]), kind)
