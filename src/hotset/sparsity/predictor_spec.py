"""The value of `--predictor` (predictors.py explains the predictors)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hotset.errors import InvalidRequestError
from hotset.formats.quants import GGMLType
from hotset.model.predictor import PredictorKind

if TYPE_CHECKING:
    from hotset.model.config import ModelConfig

# Defaults of svd, measured (docs/guides/run-sparse.md): 4 bits select the same neurons as 8 and allow twice
# the rank. Beyond an eighth of the width, more rank costs as many bytes as it saves in the gate.
DEFAULT_RANK_SHARE, DEFAULT_SVD_TYPE = 8, GGMLType.Q4_0
_TYPES = {name: GGMLType[name.upper()] for name in ("q8_0", "q4_0", "q3_k", "f16")}


@dataclass(frozen=True)
class PredictorSpec:
    """The value of `--predictor`. rank: of svd. type: of the weights; None for mlp: the file's.

    None for svd is replaced by the model's default (`resolved`).
    """

    kind: PredictorKind
    type: GGMLType | None = None
    rank: int | None = None

    def __str__(self) -> str:
        parts = (self.rank, self.type and self.type.name.lower())
        return ":".join([self.kind, *(f"{part}" for part in parts if part is not None)])

    def resolved(self, config: ModelConfig) -> PredictorSpec:
        """Return the spec with a model's defaults filled in."""
        if self.kind != "svd":
            return self
        rank = max(32, config.n_embd // DEFAULT_RANK_SHARE // 32 * 32)
        return replace(self, rank=self.rank or rank, type=self.type or DEFAULT_SVD_TYPE)


def parse_predictor(text: str) -> PredictorSpec:
    """Parse `--predictor`. Raises InvalidRequestError, which lists the accepted forms."""
    kind, *rest = text.strip().lower().split(":")
    if kind == "sign":
        raise InvalidRequestError("the predictor sign was removed; use svd")
    try:
        match kind, rest:
            case "mlp", []:
                return PredictorSpec("mlp")
            case "mlp", ["q8_0" | "q4_0" | "q3_k" as type_]:
                return PredictorSpec("mlp", type=_TYPES[type_])
            case "svd", []:
                return PredictorSpec("svd")
            case "svd", [rank, *more] if len(more) < 2 and int(rank) >= 1:
                return PredictorSpec("svd", rank=int(rank), type=_TYPES[more[0]] if more else None)
    except (KeyError, ValueError):
        pass
    raise InvalidRequestError(
        f"the predictor {text!r} is unknown; it must be mlp, mlp:TYPE (q8_0, q4_0, q3_k), svd, "
        "svd:RANK or svd:RANK:TYPE (q8_0, q4_0, q3_k, f16)"
    )
