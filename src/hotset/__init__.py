"""hotset runs large language models on a personal computer by touching only the neurons that fire.

    import hotset
    with hotset.load("smollm2-135m") as model:
        print(model.generate("The sky is", max_tokens=32).text)

Importing it is cheap: each name here is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotset.api import Model, load, plan
    from hotset.async_model import AsyncModel
    from hotset.comparison import compare, compare_chunks
    from hotset.engine.perplexity import Divergence, PerplexityResult
    from hotset.engine.reranking import RankedDocument
    from hotset.engine.sampler import SamplingParams, TokenLogprobs
    from hotset.errors import (
        ContextLengthError,
        DeviceError,
        DownloadError,
        FormatError,
        HotsetError,
        InvalidRequestError,
        ModelNotFoundError,
        OutOfMemoryError,
        TokenizerError,
        UnsupportedModelError,
    )
    from hotset.generation import ChatMessage, Chunk, Completion, Timings
    from hotset.placement.table import Placement
    from hotset.settings import LoadSettings
    from hotset.sparsity.modes import Choice
    from hotset.sparsity.stats import LayerStats, PredictorQuality, StatsSummary

    __version__: str

_HOMES = {
    "hotset.api": ("Model", "load", "plan"),
    "hotset.async_model": ("AsyncModel",),
    "hotset.comparison": ("compare", "compare_chunks"),
    "hotset.engine.perplexity": ("Divergence", "PerplexityResult"),
    "hotset.engine.reranking": ("RankedDocument",),
    "hotset.engine.sampler": ("SamplingParams", "TokenLogprobs"),
    "hotset.errors": (
        "ContextLengthError",
        "DeviceError",
        "DownloadError",
        "FormatError",
        "HotsetError",
        "InvalidRequestError",
        "ModelNotFoundError",
        "OutOfMemoryError",
        "TokenizerError",
        "UnsupportedModelError",
    ),
    "hotset.generation": ("ChatMessage", "Chunk", "Completion", "Timings"),
    "hotset.sparsity.modes": ("Choice",),
    "hotset.placement.table": ("Placement",),
    "hotset.settings": ("LoadSettings",),
    "hotset.sparsity.stats": ("LayerStats", "PredictorQuality", "StatsSummary"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncModel",
    "ChatMessage",
    "Choice",
    "Chunk",
    "Completion",
    "ContextLengthError",
    "DeviceError",
    "Divergence",
    "DownloadError",
    "FormatError",
    "HotsetError",
    "InvalidRequestError",
    "LayerStats",
    "LoadSettings",
    "Model",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PerplexityResult",
    "Placement",
    "PredictorQuality",
    "RankedDocument",
    "SamplingParams",
    "StatsSummary",
    "Timings",
    "TokenLogprobs",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
    "compare",
    "compare_chunks",
    "load",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("hotset")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return __all__
