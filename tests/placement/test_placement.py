"""Placement: the least predicted time under a budget, compared with brute force and simpler methods."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from placement_problems import GPU, layer, model, place_budget, power_law, rates

from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.placement.budget import LayerFacts, ModelFacts
from hotset.placement.milp import MixedIntegerProgram
from hotset.placement.problem import PlacementProblem
from hotset.placement.solver import solve
from hotset.placement.table import CPU, Device, LayerPlacement, Placement, Rates, predict
from hotset.report.placement import placement_table


def room_for(facts: ModelFacts, n_neurons: int, context: int = 10_000) -> int:
    """Return the bytes for the fixed parts of all layers and for `n_neurons` of the first layer's neurons."""
    fixed = sum(one.fixed_bytes + one.kv_bytes for one in facts.layers)
    neurons = n_neurons * facts.layers[0].neuron_bytes
    return fixed + neurons + facts.output_bytes + facts.workspace_bytes + facts.stream_bytes + context


# -- against brute force -------------------------------------------------------------------------


def bytes_of(facts: ModelFacts, layers: Sequence[LayerPlacement], device: int) -> int:
    """Count the bytes independently, only from the meaning of the facts."""
    total, streams = facts.workspace_bytes, False
    for one, place in zip(facts.layers, layers, strict=True):
        if place.device != device:
            continue
        hot = one.n_split if place.hot is None else int(place.hot.sum())
        total += one.fixed_bytes + one.kv_bytes + hot * one.neuron_bytes + (one.shared_bytes if hot else 0)
        streams |= place.hot is not None and not place.hot.all()
    if layers[-1].device == device:
        total += facts.output_bytes
    return total + (facts.stream_bytes if streams else 0)


def every_layer(one: LayerFacts, devices: Sequence[int]) -> Iterator[LayerPlacement]:
    for device in devices:
        yield LayerPlacement(device)
        if device == CPU:
            continue
        for bits in range(2**one.n_split - 1):
            yield LayerPlacement(device, np.array([bits >> k & 1 for k in range(one.n_split)], bool))


def brute_force(
    facts: ModelFacts, machine: Rates, devices: Sequence[Device], frequencies: Sequence[np.ndarray]
) -> float:
    """Return the least predicted time over all choices of a device and of hot neurons for each layer.

    A choice whose hot neurons save less than their own launch is left out (communication constraint).
    """
    best = np.inf
    options = []
    for one, frequency in zip(facts.layers, frequencies, strict=True):
        mine = []
        for place in every_layer(one, [CPU, *range(len(devices))]):
            if place.hot is not None and place.hot.any():
                saved = frequency[place.hot].sum() * one.fired_bytes / machine.cpu_gather_busy
                saved += place.hot.sum() * one.always_bytes / machine.cpu_read_busy
                launch = machine.devices[place.device].ffn_launch
                launch += one.shared_bytes / machine.devices[place.device].read_busy
                if saved < launch:
                    continue
            mine.append(place)
        options.append(mine)
    for layers in itertools.product(*options):
        owners = [place.device for place in layers]
        if owners != sorted(owners) or owners[-1] == CPU:
            continue
        if any(
            bytes_of(facts, layers, d) + devices[d].context > devices[d].limit for d in set(owners) - {CPU}
        ):
            continue
        best = min(best, predict(facts, machine, layers, frequencies).total)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_the_placement_is_as_good_as_any(seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts = model(
        [
            layer(
                4 if seed % 3 else 5,
                n_split=0 if seed % 4 == 3 and i == 1 else None,
                shared=int(rng.integers(0, 2)) * 60_000,
                scale=int(rng.integers(1, 4)),
            )
            for i in range(3)
        ]
    )
    frequencies = [rng.random(one.n_ff) ** 3 for one in facts.layers]
    machine = rates(
        gpu=replace(GPU, launch=float(rng.choice([1e-7, 4e-6])), sync=float(rng.choice([1e-6, 2e-5])))
    )
    devices = [Device("cuda:0", place_budget(facts, rng.uniform(0.0, 1.0)), 10_000)]
    found = solve(facts, machine, devices, frequencies)
    assert found.predicted is not None
    assert found.predicted.total == pytest.approx(brute_force(facts, machine, devices, frequencies), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_two_devices_are_as_good_as_any_cut_of_the_layers(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    facts = model([layer(3, scale=int(rng.integers(1, 3))) for _ in range(3)])
    frequencies = [rng.random(3) for _ in facts.layers]
    half = place_budget(facts, 0.3 + 0.2 * seed)
    devices = [Device("cuda:0", half, 10_000), Device("cuda:1", int(half * 0.9), 10_000)]
    found = solve(facts, rates(2), devices, frequencies)
    assert found.predicted is not None
    expected = brute_force(facts, rates(2), devices, frequencies)
    assert found.predicted.total == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shared", [0, 150_000])
@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_used_up_and_never_exceeded(seed: int, shared: int) -> None:
    """Check that a GPU that speeds up each layer is full except for a neuron or two.

    Scales count once per layer.
    """
    rng = np.random.default_rng(200 + seed)
    facts = model([layer(500, shared=shared, scale=int(rng.integers(1, 4))) for _ in range(4)])
    frequencies = [rng.uniform(0.2, 0.4, 500) for _ in facts.layers]
    machine = rates(gpu=replace(GPU, launch=0.0))
    least = facts.smallest_bytes(4) + 4 * shared + 10_000
    limit = least + int(rng.uniform(0.05, 0.4) * (facts.whole_bytes + facts.stream_bytes - least))
    problem = PlacementProblem(facts, machine, (Device("cuda:0", limit, 10_000),), frequencies, 4, True)
    greedy = problem.greedy()
    exact, how = MixedIntegerProgram(problem).run(None)
    largest = max(one.neuron_bytes for one in facts.layers)
    for choice in (greedy, exact):
        assert choice is not None, how
        assert problem.fits(choice)
        left = limit - problem.budget_of(problem.filled(choice), 0).total
        assert 0 <= left < 2 * largest
    found = solve(facts, machine, problem.devices, frequencies, n_gpu_layers=4)
    assert found.budget is not None
    assert 0 <= limit - found.budget.devices[0].total < 2 * largest


def test_whole_numbers_that_the_solver_just_misses_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that 0.9999999 of a neuron counts as the neuron: HiGHS accepts integers within 1e-6."""
    from scipy import optimize

    facts = replace(model([layer(100) for _ in range(1)]), stream_bytes=0)
    rng = np.random.default_rng(3)
    frequencies = [rng.uniform(0.2, 0.4, 100) for _ in facts.layers]
    devices = (Device("cuda:0", room_for(facts, 50), 10_000),)
    problem = PlacementProblem(facts, rates(), devices, frequencies, 1, True)
    found, _ = MixedIntegerProgram(problem).run(None)
    assert found is not None
    milp = optimize.milp

    def nearly(*args: Any, **options: Any) -> Any:
        result = milp(*args, **options)
        result.x = np.where(result.x > 0.5, result.x - 1e-6, result.x)
        return result

    monkeypatch.setattr(optimize, "milp", nearly)
    again, _ = MixedIntegerProgram(problem).run(None)
    assert again is not None
    assert sum(int(place.hot.sum()) for place in found if place.hot is not None) > 0
    for one, other in zip(found, again, strict=True):
        assert one.device == other.device
        np.testing.assert_array_equal(one.hot, other.hot)


# -- against simpler methods ---------------------------------------------------------------------


def spread(
    facts: ModelFacts,
    found: Placement,
    choose: str,
    rng: np.random.Generator,
    frequencies: Sequence[np.ndarray],
) -> float:
    """Predict the seconds with as many hot neurons in total as `found`, spread evenly over the layers.

    choose: "random", or otherwise the hottest neurons of each layer.
    """
    n_hot = sum(
        one.n_ff if place.hot is None else int(place.hot.sum())
        for one, place in zip(facts.layers, found.layers, strict=True)
    )
    per_layer = n_hot // len(facts.layers)
    layers = []
    for frequency in frequencies:
        hot = np.zeros(len(frequency), bool)
        order = rng.permutation(len(frequency)) if choose == "random" else np.argsort(-frequency)
        hot[order[:per_layer]] = True
        layers.append(LayerPlacement(0, hot))
    return predict(facts, rates(), layers, frequencies).total


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_hotness_beats_random_and_uniform_choices_on_a_skewed_profile(fraction: float) -> None:
    rng = np.random.default_rng(3)
    facts = model([layer(2048) for _ in range(12)])
    frequencies = [power_law(2048, rng, density=rng.uniform(0.03, 0.4)) for _ in facts.layers]
    devices = [Device("cuda:0", place_budget(facts, fraction), 10_000)]
    found = solve(facts, rates(), devices, frequencies)
    assert found.predicted is not None
    assert found.n_cpu_layers == 0
    assert found.predicted.total < 0.98 * spread(facts, found, "uniform", rng, frequencies)
    assert found.predicted.total < 0.7 * spread(facts, found, "random", rng, frequencies)
    assert found.served_share is not None
    assert found.served_share > 1.3 * found.hot_share


def test_layers_beyond_the_tenth_get_their_own_neurons() -> None:
    """Check the order of layers (as text, 10 sorts before 2): each layer has other hot neurons."""
    n_ff = 40
    facts = model([layer(n_ff) for _ in range(13)])
    frequencies = [np.full(n_ff, 0.001) for _ in facts.layers]
    for i, frequency in enumerate(frequencies):
        frequency[3 * i : 3 * i + 4] = 0.9
    devices = [Device("cuda:0", room_for(facts, 13 * 4), 10_000)]
    quick = rates(gpu=replace(GPU, launch=1e-7, sync=1e-6))
    found = solve(facts, quick, devices, frequencies)
    for i, place in enumerate(found.layers):
        assert place.hot is not None
        assert place.hot[3 * i : 3 * i + 4].all(), i


# -- a large model -------------------------------------------------------------------------------


def large(n_layer: int, d: int, n_ff: int, kv_width: int) -> ModelFacts:
    """Return a model with 4.5 bits per weight, predictors of rank 1024 and a cache of 4096 tokens."""
    row = d * 9 // 16
    fixed = (2 * d * d + 2 * d * kv_width + 1024 * (d + n_ff)) * 9 // 16
    one = LayerFacts(n_ff, n_ff, fixed, 3 * row + 16, 0, 4096 * kv_width * 4, 2048 * kv_width * 4, 0, 3 * row)
    return ModelFacts((one,) * n_layer, 32_000 * d, 200 << 20, 2 * n_ff * (3 * row + 16))


def test_a_70b_model_is_placed_in_seconds() -> None:
    facts = large(80, 8192, 28672, 1024)
    rng = np.random.default_rng(1)
    frequencies = [power_law(28672, rng, density=rng.uniform(0.03, 0.2)) for _ in facts.layers]
    limit = 24 << 30
    found = solve(facts, rates(), [Device("cuda:0", limit, 500 << 20)], frequencies)
    assert found.budget is not None
    assert found.predicted is not None
    [planned] = found.budget.devices
    assert 0.95 * limit <= planned.total <= limit
    assert found.n_cpu_layers == 0
    assert found.served_share is not None
    assert found.served_share > 0.7


def test_bytes_of_a_175b_model_do_not_overflow() -> None:
    facts = large(96, 12288, 49152, 12288)
    assert facts.whole_bytes > 2**36
    place = [LayerPlacement(0)] * 96
    problem = PlacementProblem(
        facts, rates(), (Device("cuda:0", 2**40, 0),), [np.zeros(49152)] * 96, None, True
    )
    budget = problem.budget_of(place, 0)
    row = 12288 * 9 // 16
    assert budget.neurons == 96 * 49152 * (3 * row + 16)
    assert budget.kv == 96 * 4096 * 12288 * 4
    assert budget.total == facts.whole_bytes


# -- requested placements ------------------------------------------------------------------------


def test_a_model_that_fits_is_on_one_device_and_a_dense_one_goes_by_layers() -> None:
    facts = model([layer(8, n_split=0) for _ in range(6)])
    frequencies = [np.zeros(8)] * 6
    fits = solve(facts, rates(2), [Device("cuda:0", facts.whole_bytes + 10_000, 10_000)] * 2, frequencies)
    assert fits.is_whole
    assert fits.devices == ("cuda:0",)
    half = Device("cuda:0", place_budget(facts, 0.5), 10_000)
    split = solve(facts, rates(), [half], frequencies)
    assert 0 < split.n_cpu_layers < 6
    assert [place.hot for place in split.layers] == [None] * 6
    assert [place.device for place in split.layers] == sorted(place.device for place in split.layers)
    fewer = solve(facts, rates(), [half], frequencies, n_gpu_layers=1)
    assert fewer.n_cpu_layers == 5
    with pytest.raises(
        OutOfMemoryError, match=r"6 layers cannot be placed in 0.01 GiB on cuda:0: the smallest"
    ):
        solve(facts, rates(), [half], frequencies, n_gpu_layers=6)
    with pytest.raises(InvalidRequestError, match="1 layer or more"):
        solve(facts, rates(), [half], frequencies, n_gpu_layers=0)


def test_a_budget_that_is_left_is_explained_where_the_choice_was_free() -> None:
    facts = model([layer(8, n_split=0) for _ in range(4)])
    frequencies = [np.zeros(8)] * 4
    part, room = place_budget(facts, 0.8), 10 * facts.whole_bytes + 10_000
    slow = rates(gpu=replace(GPU, launch=1.0))

    def notes(limit: int, **asked: Any) -> str:
        return " ".join(solve(facts, slow, [Device("cuda:0", limit, 10_000)], frequencies, **asked).notes)

    assert "of cuda:0's budget is used: more on it would be slower" in notes(part)
    assert "budget" not in notes(room)  # the whole model is on the device
    assert "budget" not in notes(part, n_gpu_layers=1)  # the number of layers was requested


def test_layers_stay_whole_where_neurons_are_not_to_be_split() -> None:
    facts = model([layer(8) for _ in range(6)])
    rng = np.random.default_rng(0)
    frequencies = [power_law(8, rng) for _ in range(6)]
    devices = [Device("cuda:0", place_budget(facts, 0.6), 10_000)]
    found = solve(facts, rates(), devices, frequencies, split_neurons=False)
    assert not any(place.is_split for place in found.layers)
    assert 0 < found.n_cpu_layers < 6


def test_the_smallest_budget_that_is_named_works_and_less_does_not() -> None:
    facts = large(4, 4096, 8192, 1024)
    rng = np.random.default_rng(0)
    frequencies = [power_law(8192, rng) for _ in facts.layers]
    context = 500 << 20
    smallest = facts.smallest_bytes() + context
    with pytest.raises(OutOfMemoryError, match=f"{-(-smallest * 100 // 2**30) / 100:.2f} GiB"):
        solve(facts, rates(), [Device("cuda:0", smallest - 1, context)], frequencies)
    found = solve(facts, rates(), [Device("cuda:0", smallest, context)], frequencies)
    assert found.n_cpu_layers == 3


def test_a_layer_has_no_hot_neuron_where_its_launch_costs_more() -> None:
    facts = replace(model([layer(64), layer(64)]), stream_bytes=0)
    frequencies = [np.full(64, 1e-3), np.full(64, 0.5)]
    slow_launch = rates(gpu=replace(GPU, launch=5e-6))
    devices = [Device("cuda:0", room_for(facts, 40), 10_000)]
    found = solve(facts, slow_launch, devices, frequencies, n_gpu_layers=2)
    cold, warm = (place.hot for place in found.layers)
    assert cold is not None
    assert not cold.any()
    assert warm is not None
    assert warm.sum() == 40


def test_frequencies_of_another_model_are_refused() -> None:
    facts = model([layer(8)])
    with pytest.raises(InvalidRequestError, match="do not match this model"):
        solve(facts, rates(), [Device("cuda:0", 1 << 30, 0)], [np.zeros(9)])


def test_placement_in_any_order_is_reported_correctly() -> None:
    cold = np.arange(8) < 2
    places = [CPU, CPU, 0, 0, CPU, 1, 0]
    layers = tuple(LayerPlacement(d, cold if i == 2 else None) for i, d in enumerate(places))
    placement = Placement(("cuda:0", "cuda:1"), layers, CPU, n_ff=(8,) * 7)
    assert [placement.layers_of(d) for d in (CPU, 0, 1)] == [[0, 1, 4], [2, 3, 6], [5]]
    assert placement.n_cpu_layers == 3
    _, rows = placement_table(placement)
    assert rows[0][1] == "0 to 1, 4 whole, cold neurons of 1, output"
    # One device has all layers but not the output, so the CPU computes too.
    assert not Placement(("cuda:0",), (LayerPlacement(0),) * 2, CPU).is_whole
    assert Placement(("cuda:0",), (LayerPlacement(0),) * 2, 0).is_whole
