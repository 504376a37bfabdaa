"""Moves operations of a step forward, so that rows are read from disk while something else is computed.

Which neurons or experts a layer needs is known once its predictor or router has run. If these only need
values from before attention (SmallThinker's router, predictors of Falcon's parallel layers), they run before
it. A shared expert whose result is weighted before it is added (Qwen's) runs before the routed experts. Reads
begin after the predictor or router. Only the order of operations changes, no result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hotset.model.fusion import Fused
from hotset.model.operations import (
    ExpertLinear,
    ExpertSum,
    Ffn,
    Route,
    TransposedLinear,
    Value,
)


@dataclass(frozen=True)
class Ahead:
    """The groups in their new order.

    begins: the value after which the rows of an FFN are known.
    """

    groups: list[Fused]
    begins: dict[Value, Ffn]


def chosen_rows(ffn: Ffn) -> str | None:
    """Return the tensor whose rows only a predictor or only a router chooses; None otherwise."""
    if ffn.route is None:
        return ffn.decides.weight if ffn.mask is not None else None
    return ffn.up.weights[0] if ffn.mask is None and isinstance(ffn.up, ExpertLinear) else None


def look_ahead(groups: list[Fused], is_stored: Callable[[str], bool]) -> Ahead:
    """Move predictors and routers forward, and operations without chosen rows before their FFN.

    is_stored: whether a tensor's rows come from a store that cannot hold all of them.
    """
    ordered, begins = list(groups), {}
    for group in groups:
        ffn = group.ffn
        if ffn is None or (rows := chosen_rows(ffn)) is None or not is_stored(rows):
            continue
        at = next(i for i, one in enumerate(ordered) if one is group)
        first = next(i for i, one in enumerate(ordered) if one.layer == ffn.layer)
        decided = ffn.route.x if ffn.route is not None else ffn.mask.scores if ffn.mask is not None else None
        assert decided is not None
        chain = _producers(ordered[first:at], decided)
        others = [one for one in ordered[first:at] if not _is_in(one, chain)]
        is_early = any(map(_mixes_tokens, others)) and not any(map(_mixes_tokens, chain))
        beside = _independent(ordered[at + 1 :], group)
        between = (others if is_early else []) + beside
        if not (is_early or beside) or any(map(_fetches_too, between)) or not chain:
            continue
        own, before = group, [*chain, *others] if is_early else ordered[first:at]
        if ffn.route is not None:
            chosen = Fused([ffn.route], [ffn.route.x], [ffn.route.out])
            before = [*chain, chosen, *others] if is_early else [*before, chosen]
            chain = [*chain, chosen]
            inner = [value for value in group.inner if value != ffn.route.out]
            own = replace(group, inner=inner, reads=[*group.reads, ffn.route.out])
        ordered[first : at + 1 + len(beside)] = [*before, *beside, own]
        begins[chain[-1].out[0]] = ffn
    return Ahead(ordered, begins)


def _producers(groups: Sequence[Fused], value: Value) -> list[Fused]:
    """Return the groups that a value depends on, in order."""
    wanted, found = {value}, []
    for group in reversed(groups):
        if wanted & set(group.out):
            wanted |= set(group.reads)
            found.append(group)
    return found[::-1]


def _independent(groups: Sequence[Fused], ffn: Fused) -> list[Fused]:
    """Return the groups after an FFN in its layer, up to the first that reads its result."""
    found = []
    for group in groups:
        if group.layer != ffn.layer or set(group.reads) & set(ffn.out):
            break
        found.append(group)
    return found


def _is_in(group: Fused, groups: Sequence[Fused]) -> bool:
    return any(one is group for one in groups)


def _mixes_tokens(group: Fused) -> bool:
    """Return whether a group has a token mixer, which takes long enough to read rows."""
    return any(op.mixes_tokens for op in group.ops)


def _fetches_too(group: Fused) -> bool:
    """Return whether a group might itself request rows, which would end pending reads."""
    rows = (ExpertLinear, ExpertSum, TransposedLinear, Route)
    return any(isinstance(op, rows) or (isinstance(op, Ffn) and op.leaves_out) for op in group.ops)
