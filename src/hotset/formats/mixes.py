"""Mixes: which matrices of a model get another type than the one in the mix's name.

They are llama.cpp's, by name: Q4_K_M uses Q6_K for some of attn_v and ffn_down, IQ2_XS uses Q4_K for attn_v
of models with grouped queries, and so on, because errors of these matrices cost more than their bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hotset.formats.quants import GGMLType

_T = GGMLType
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """The position of a matrix, number `at` of the `of` of its kind, and facts of its model.

    grouped: four or more queries share keys and values.
    """

    at: int
    of: int
    n_experts: int = 0
    grouped: bool = False
    falcon: bool = False
    imatrix: bool = False

    def first(self, part: int) -> bool:
        """Return whether it is in the first 1/part."""
        return self.at < self.of // part

    @property
    def better(self) -> bool:
        """Return whether it is in the first or the last eighth, or is every third between."""
        first, last = self.of // 8, 7 * self.of // 8
        return self.at < first or self.at >= last or (self.at - first) % 3 == 2

    @property
    def middle(self) -> bool:
        """Return whether it is in neither the first nor the last eighth."""
        return self.of // 8 <= self.at < 7 * self.of // 8


Rule = Callable[[Place], GGMLType | None]  # None: the type in the mix's name
Rules = Mapping[str, Rule]  # by the name of a mix

_LOW = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs")  # below 2.5 bits
_TWO = ("iq2_s", "iq2_m")


def _always(type: GGMLType) -> Rule:
    return lambda _: type


def _if_better(type: GGMLType) -> Rule:
    return lambda place: type if place.better else None


def _if_grouped(type: GGMLType, otherwise: GGMLType | None = None) -> Rule:
    return lambda place: type if place.grouped else otherwise


def _low_value(otherwise: GGMLType) -> Rule:
    return lambda place: _T.Q4_K if place.grouped or place.n_experts >= 4 else otherwise


def _first_eighth(type: GGMLType, *, imatrix: bool | None = None) -> Rule:
    """Return a rule for the first eighth. imatrix: only with an importance matrix, or only without."""
    return lambda place: type if place.first(8) and imatrix in (None, place.imatrix) else None


def _iq3_xxs_value(place: Place) -> GGMLType:
    return _T.Q4_K if place.grouped else _T.IQ3_XXS if place.imatrix else _T.IQ3_S


def _iq3_xxs_down(place: Place) -> GGMLType | None:
    return None if place.imatrix else _T.Q4_K if place.first(8) else _T.Q3_K


def _iq3_m_down(place: Place) -> GGMLType | None:
    return _T.Q4_K if place.first(8) or (place.n_experts == 8 and place.better) else None


def _q3_k_m_down(place: Place) -> GGMLType:
    return _T.Q5_K if place.first(16) else _T.Q4_K if place.better or not place.falcon else _T.Q3_K


def _q4_k_m_down(place: Place) -> GGMLType | None:
    if place.falcon and not place.first(16):
        return _T.Q5_K if place.better else None
    return _T.Q6_K if place.better else None


_VALUE: Rules = {
    **dict.fromkeys(_LOW, _low_value(_T.Q2_K)),
    **dict.fromkeys(_TWO, _low_value(_T.IQ3_S)),
    "q2_k": _if_grouped(_T.Q4_K, _T.Q3_K),
    "q2_k_s": _if_grouped(_T.Q4_K),
    "iq3_xxs": _iq3_xxs_value,
    **dict.fromkeys(("iq3_xs", "iq3_s"), _if_grouped(_T.Q4_K)),
    "iq3_m": _always(_T.Q4_K),
    "q3_k_m": lambda place: _T.Q5_K if place.at < 2 else _T.Q4_K,
    "q3_k_l": _always(_T.Q5_K),
    **dict.fromkeys(("iq4_nl", "iq4_xs"), _if_grouped(_T.Q5_K)),
    "q4_k_s": lambda place: _T.Q5_K if place.at < 4 else None,
    **dict.fromkeys(("q4_k_m", "q5_k_m"), _if_better(_T.Q6_K)),
}
_DOWN: Rules = {
    **dict.fromkeys(_LOW, _first_eighth(_T.Q2_K)),
    **dict.fromkeys(_TWO, _first_eighth(_T.IQ3_S)),
    "q2_k": _always(_T.Q3_K),
    "q2_k_s": _first_eighth(_T.Q4_K),
    "iq3_xxs": _iq3_xxs_down,
    "iq3_m": _iq3_m_down,
    "q3_k_m": _q3_k_m_down,
    "q3_k_l": lambda place: _T.Q4_K if place.falcon else _T.Q5_K,
    **dict.fromkeys(("iq4_nl", "iq4_xs"), _first_eighth(_T.Q5_K, imatrix=False)),
    "q4_0": _first_eighth(_T.Q4_1, imatrix=True),
    "q5_0": _first_eighth(_T.Q5_1, imatrix=True),
    "q4_k_s": lambda place: _T.Q5_K if place.first(8) and not place.falcon else None,
    "q4_k_m": _q4_k_m_down,
    "q5_k_m": _if_better(_T.Q6_K),
}
_MIXED_OUTPUT: Rules = {
    **dict.fromkeys(("iq1_s", "iq1_m"), _always(_T.IQ2_XXS)),
    **dict.fromkeys((*_TWO, "iq3_xxs"), _always(_T.IQ3_S)),
    "q2_k": _always(_T.Q3_K),
    **dict.fromkeys(("q3_k_m", "iq3_m"), _always(_T.Q4_K)),
    "q3_k_l": _always(_T.Q5_K),
}
_EIGHT_EXPERTS_OUTPUT = frozenset((
    *_LOW, *_TWO, "q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m",
    "iq4_nl", "iq4_xs",
))  # fmt: skip
_QUERY_KEY: Rules = {"iq3_xs": _always(_T.IQ3_XXS), "iq3_xxs": _always(_T.IQ2_S)}
_UP: Rules = {"iq3_xs": lambda place: _T.IQ3_XXS if place.middle else None}
_EMBEDDING: Rules = {
    **dict.fromkeys(_LOW, _always(_T.Q2_K)),
    **dict.fromkeys((*_TWO, "iq3_xxs"), _always(_T.IQ3_S)),
    **dict.fromkeys(("tq2_0", "tq1_0"), _always(_T.Q4_K)),
}
FIVE_BIT_OUTPUT = frozenset((*_LOW, *_TWO, "iq3_xxs"))
"""Mixes whose output matrix is Q5_K; in the others it is Q6_K."""


def kind_of(name: str) -> str | None:
    """Return the kind of a matrix that mixes distinguish; each kind is numbered over the layers."""
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "embedding"
    if re.search(r"attn_(qkv|kv_b|v)\.weight", name):
        return "value"
    if match := re.search(r"attn_(k|q|output)\.weight|ffn_(up|gate|down)", name):
        return match[1] or match[2]
    return None


def layer_of(name: str) -> int:
    """Return the number of a tensor's layer, or -1."""
    match = _LAYER.match(name)
    return -1 if match is None else int(match[1])


def mixed_type(mix: str, kind: str | None, place: Place, *, large: bool = False) -> GGMLType | None:
    """Return the type of a matrix of a kind in a mix; None: the type in the mix's name.

    large: a model of 80 layers with grouped queries, whose attn_v is small.
    """
    low, eight = mix in (*_LOW, *_TWO), place.n_experts == 8
    match kind:
        case "value" if eight and not low:
            return _T.Q8_0
        case "value":
            found = _type(_VALUE, mix, place)
            small = found in (_T.Q3_K, _T.Q4_K) or (found is None and mix.startswith(("q3_k", "q4_k")))
            return _T.Q5_K if large and not low and small else found
        case "k" if eight:
            return _T.Q4_K if low else _T.Q8_0
        case "k" | "q":
            return _type(_QUERY_KEY, mix, place)
        case "output" if place.falcon and not low:
            return _T.Q4_K if mix == "q3_k_l" else None
        case "output" if eight:
            return _T.Q5_K if mix in _EIGHT_EXPERTS_OUTPUT else None
        case "output":
            return _type(_MIXED_OUTPUT, mix, place)
        case "down":
            return _type(_DOWN, mix, place)
        case "up" | "gate":
            return _type(_UP, mix, place)
        case "embedding":
            return _type(_EMBEDDING, mix, place)
    return None


def _type(rules: Rules, mix: str, place: Place) -> GGMLType | None:
    rule = rules.get(mix)
    return None if rule is None else rule(place)
