"""The solver: the placement with the least predicted time per token.

`solve` minimises the predicted time of a token (PowerInfer, arXiv 2312.12456, section 6, maximises the
activations on the GPU instead):

    sum over layers of  attention + max(launch + hot rows / device, round trip + cold rows that fire / CPU)

under each device's budget, with rates measured while both sides are busy. A layer whose hot neurons save the
CPU less than their own launch gets none (the communication constraint). A layer with all neurons on the
device pays no round trip. This is a mixed-integer program. The device of a layer, and whether the layer has
any hot or cold neurons, are binary. The shares of groups of equally hot neurons are continuous; in a small
model neurons are placed one by one. HiGHS solves it. A greedy placement bounds it, and is the result if HiGHS
finds no better one.

problem.py has the problem and the greedy placement, milp.py the program for HiGHS. The solver puts the CPU's
layers first, so that a step crosses to a device once; build.py accepts any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.placement.budget import ModelFacts
from hotset.placement.milp import MixedIntegerProgram
from hotset.placement.problem import Candidate, PlacementProblem
from hotset.placement.table import Device, LayerPlacement, Placement, Rates


def solve(
    facts: ModelFacts,
    rates: Rates,
    devices: Sequence[Device],
    frequencies: Sequence[np.ndarray],
    *,
    n_gpu_layers: int | None = None,
    split_neurons: bool = True,
) -> Placement:
    """Return the placement with the least predicted time per token.

    frequencies: per layer [n_ff], how often each neuron fires, 0 to 1. n_gpu_layers: exactly this many
    layers, the last ones, are on devices. split_neurons: False keeps the neurons of a layer together.
    Raises OutOfMemoryError, with the smallest budget that works, if nothing fits.
    """
    problem = PlacementProblem(facts, rates, tuple(devices), frequencies, n_gpu_layers, split_neurons)
    whole = problem.whole()
    if whole is not None:
        has_cache = any(layer.n_experts for layer in facts.layers)
        what = "everything but the experts" if has_cache else "all of the model"
        alone = problem.placement(whole, f"{what} fits on one device")
        return _with_more_slots(problem, alone) if has_cache else alone
    if any(problem.stays):
        if (around := problem.around()) is None:
            raise OutOfMemoryError(problem.refusal())
        return problem.placement(around, "the layers that the device computes, from the best one on")
    greedy = problem.greedy()
    exact, how = _optimal(problem, greedy)
    found = [candidate for candidate in (exact, greedy) if candidate is not None]
    if not found:
        raise OutOfMemoryError(problem.refusal())
    best = min(found, key=problem.seconds)
    if best is greedy and exact is not greedy:
        how = f"placed greedily: {how}"
    return problem.placement(problem.filled(best), how)


def _with_more_slots(problem: PlacementProblem, alone: Placement) -> Placement:
    """Return the placement on one device, or a faster one on several devices with more expert slots."""
    together = [LayerPlacement(d) for d in problem.splits(0)[0]]
    used = {place.device for place in together}
    if len(used) == 1 or not problem.fits(together):
        return alone
    other = problem.placement(together, f"{len(used)} devices have slots for more experts than one")
    assert alone.predicted is not None
    assert other.predicted is not None
    seconds = other.predicted.total + sum(problem.rates.devices[d].sync for d in used)  # between devices
    return other if seconds < alone.predicted.total else alone


def _optimal(problem: PlacementProblem, greedy: Candidate | None) -> tuple[Candidate | None, str]:
    """Return the candidate that HiGHS finds, or None, and a message on how good it is."""
    if not problem.usable:
        return None, ""
    bound = None if greedy is None else problem.seconds(greedy)
    return MixedIntegerProgram(problem).run(bound)


def place_index(
    facts: ModelFacts,
    rates: Rates,
    devices: Sequence[Device],
    frequencies: Sequence[np.ndarray],
    on_gpu: Sequence[np.ndarray],
) -> Placement:
    """Return the placement that a GPU index describes: all layers on devices, with the neurons that it names.

    on_gpu: per layer bool [n_ff]. Raises OutOfMemoryError if the devices cannot hold it, and
    InvalidRequestError if a layer cannot be split.
    """
    problem = PlacementProblem(facts, rates, tuple(devices), frequencies, len(facts.layers), True)
    if not all(problem.is_split):
        raise InvalidRequestError(
            "a GPU index names neurons, and this model's layers cannot be split; leave gpu_index out"
        )
    for owners in problem.splits(0):
        candidate = [
            LayerPlacement(d, None if hot.all() else hot) for d, hot in zip(owners, on_gpu, strict=True)
        ]
        if problem.fits(candidate):
            return problem.placement(candidate, "as the GPU index says")
    candidate = [LayerPlacement(0, None if hot.all() else hot) for hot in on_gpu]
    needed = problem.budget_of(candidate, 0).total
    raise OutOfMemoryError(
        f"the GPU index needs {-(-needed * 100 // 2**30) / 100:.2f} GiB with this context; raise the budget, "
        "or leave the index out to plan for the budget that is there"
    )


def rebuild(
    facts: ModelFacts,
    rates: Rates,
    devices: Sequence[Device],
    frequencies: Sequence[np.ndarray],
    owners: Sequence[int],
    hot: Sequence[np.ndarray | None],
    how: str,
) -> Placement:
    """Rebuild a placement that `solve` found before. owners: per layer an index into devices, or CPU.

    Raises InvalidRequestError if it does not fit this problem.
    """
    problem = PlacementProblem(facts, rates, tuple(devices), frequencies, None, True)
    candidate = [LayerPlacement(int(d), mask) for d, mask in zip(owners, hot, strict=True)]
    if len(candidate) != problem.n_layer or not problem.fits(candidate):
        raise InvalidRequestError("the placement that was kept does not fit")
    return problem.placement(candidate, how)
