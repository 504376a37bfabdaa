"""The classes of Hugging Face checkpoints: a module for each family, with a row for each class."""

from __future__ import annotations

from hotset.convert.checkpoints import (
    deepseek,
    encoders,
    ernie,
    exaone,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    llama,
    mistral,
    moe,
    olmo,
    qwen,
    recurrent,
    sees,
)
from hotset.convert.checkpoints.classes import HFClass

_FAMILIES = (
    deepseek,
    encoders,
    ernie,
    exaone,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    llama,
    mistral,
    moe,
    olmo,
    qwen,
    recurrent,
    sees,
)

CLASSES: dict[str, HFClass] = {name: row for family in _FAMILIES for name, row in family.CLASSES.items()}
"""Name of a class in config.json → its row."""
