"""Which layers, and which neurons of a layer, live on which device.

A layer on a device has everything there but its cold neurons: attention, norms, predictor and the rows of hot
neurons. The CPU computes the cold ones that fire at the same time. Layers that do not fit at all stay on the
CPU; they come first, as with llama.cpp's -ngl, and devices follow one another down the layers.

`solve` minimises the predicted time of a token (PowerInfer, arXiv 2312.12456, section 6, maximises the
activations on the GPU instead):

    sum over layers of  attention + max(launch + hot rows / device, round trip + cold rows that fire / CPU)

under each device's budget, with rates measured while both sides are busy. A layer whose hot neurons save the
CPU less than their own launch has none (the communication constraint), and one whose neurons are all on the
device pays no round trip. It is a mixed-integer program: which device has a layer and whether it has any hot
or cold neurons are binary, the shares of groups of equally hot neurons are continuous, or whole neurons where
a model is small. HiGHS solves it; a greedy placement bounds it, and is kept where none better is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotset.errors import InvalidRequestError, OutOfMemoryError
from hotset.sparsity.budget import Budget, DeviceBudget, LayerFacts, ModelFacts

CPU = -1  # in place of the index of a device


@dataclass(frozen=True)
class LayerPlacement:
    """device: index into Placement.devices, CPU (-1): all of the layer on the CPU.

    hot: bool [n_ff], the neurons whose rows are on the device; None: all of them, and no round trip.
    """

    device: int
    hot: np.ndarray | None = None

    @property
    def is_split(self) -> bool:
        """Whether the CPU computes neurons of a layer that is on a device."""
        return self.device != CPU and self.hot is not None and not bool(self.hot.all())


@dataclass(frozen=True)
class LayerTime:
    """Predicted seconds of one layer for one token.

    attention: what precedes the FFN, with norms and predictor. hot: neurons on the device; cold: those of the
    CPU, computed meanwhile; sync: the round trip. Of a layer on the CPU, attention and cold are the CPU's.
    """

    attention: float
    hot: float = 0.0
    cold: float = 0.0
    sync: float = 0.0

    @property
    def total(self) -> float:
        return self.attention + max(self.hot, self.cold + self.sync)


@dataclass(frozen=True)
class Predicted:
    """Seconds per token: of each layer, and of embedding, final norm and output together."""

    layers: tuple[LayerTime, ...]
    output: float

    @property
    def total(self) -> float:
        return sum(layer.total for layer in self.layers) + self.output


@dataclass(frozen=True)
class Placement:
    """What goes where.

    devices: torch names, such as ("cuda:0", "cuda:1"); layers on them are contiguous, in this order, after
    those on the CPU. output_device: of the final norm and the output matrix; CPU (-1) only where all layers
    are on the CPU. hot_share, served_share: of all neurons the share on devices, and the share of activations
    that these make. notes: a sentence each. n_ff: neurons of each layer.
    """

    devices: tuple[str, ...]
    layers: tuple[LayerPlacement, ...]
    output_device: int
    budget: Budget | None = None
    predicted: Predicted | None = None
    hot_share: float | None = None
    served_share: float | None = None
    notes: tuple[str, ...] = ()
    n_ff: tuple[int, ...] = ()

    @property
    def n_cpu_layers(self) -> int:
        """Layers that are on the CPU as a whole; they come first."""
        return sum(layer.device == CPU for layer in self.layers)

    @property
    def is_whole(self) -> bool:
        """Whether one device has all of the model, so that the CPU computes nothing."""
        return len({layer.device for layer in self.layers}) == 1 and not any(
            layer.device == CPU or layer.is_split for layer in self.layers
        )

    def layers_of(self, device: int) -> range:
        """The layers of a device (or of the CPU): contiguous."""
        mine = [i for i, layer in enumerate(self.layers) if layer.device == device]
        return range(mine[0], mine[-1] + 1) if mine else range(0)


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device is. read, read_busy: bytes per second of matrices, alone and while the CPU works too.
    launch: seconds of one kernel before its first byte. sync: seconds of a round trip to the CPU.
    """

    read: float
    read_busy: float
    launch: float
    sync: float


@dataclass(frozen=True)
class Rates:
    """Bytes per second of the CPU, alone and while devices work too: of rows one after the other (read) and
    of rows here and there (gather); and the devices.
    """

    cpu_read: float
    cpu_gather: float
    cpu_read_busy: float
    cpu_gather_busy: float
    devices: tuple[DeviceRates, ...]


@dataclass(frozen=True)
class Device:
    """One to place on. limit: bytes that may be used; context: of these, what its runtime takes by itself."""

    name: str
    limit: int
    context: int


LAYER_KERNELS = 8  # launches of a layer beside its sparse FFN
SMALL = 1500  # neurons of a model that is placed neuron by neuron, exactly
GRADE = 1.2  # neurons whose frequencies differ by less than this factor are a group
RAREST = 1e-4  # frequencies below it are equal
BLOCK = 64  # neurons that the greedy placement takes at once
TIME_LIMIT = 15.0  # seconds; the best found until then is used
GAP = 1e-3  # of the predicted time: how near the optimum is near enough
_US, _MIB = 1e6, 2.0**-20  # units of the program: numbers around 1


def solve(
    facts: ModelFacts,
    rates: Rates,
    devices: Sequence[Device],
    frequencies: Sequence[np.ndarray],
    *,
    n_gpu_layers: int | None = None,
    split: bool = True,
) -> Placement:
    """The placement with the least predicted time per token.

    frequencies: per layer [n_ff], how often each neuron fires, 0 to 1. n_gpu_layers: the last so many layers
    are on devices, no more and no fewer. split: False keeps the neurons of a layer together.
    Raises OutOfMemoryError, with the smallest budget that works, where nothing fits.
    """
    problem = _Problem(facts, rates, tuple(devices), frequencies, n_gpu_layers, split)
    whole = problem.whole()
    if whole is not None:
        return problem.placement(whole, "all of the model fits on one device")
    greedy = problem.greedy()
    exact, how = problem.optimal(greedy)
    found = [choice for choice in (exact, greedy) if choice is not None]
    if not found:
        raise OutOfMemoryError(problem.refusal())
    best = min(found, key=problem.seconds)
    if best is greedy and exact is not greedy:
        how = f"placed greedily: {how}"
    return problem.placement(problem.filled(best), how)


def place_index(
    facts: ModelFacts,
    rates: Rates,
    devices: Sequence[Device],
    frequencies: Sequence[np.ndarray],
    on_gpu: Sequence[np.ndarray],
) -> Placement:
    """The placement that a GPU index describes: all layers on devices, with the neurons that it names.

    on_gpu: per layer bool [n_ff]. Raises OutOfMemoryError where the devices do not hold that.
    """
    problem = _Problem(facts, rates, tuple(devices), frequencies, len(facts.layers), True)
    if not all(problem.is_split):
        raise InvalidRequestError(
            "a GPU index names neurons, and this model's layers cannot be split; leave --gpu-index out"
        )
    for owners in problem.cuts(0):
        choice = [
            LayerPlacement(d, None if hot.all() else hot) for d, hot in zip(owners, on_gpu, strict=True)
        ]
        if problem.fits(choice):
            return problem.placement(choice, "as the GPU index says")
    choice = [LayerPlacement(0, None if hot.all() else hot) for hot in on_gpu]
    needed = problem.budget_of(choice, 0).total
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
    """A placement that `solve` found before. owners: index into devices, or CPU, of each layer.

    Raises InvalidRequestError where it is none of this problem.
    """
    problem = _Problem(facts, rates, tuple(devices), frequencies, None, True)
    choice = [LayerPlacement(int(d), mask) for d, mask in zip(owners, hot, strict=True)]
    if len(choice) != problem.n_layer or not problem.fits(choice):
        raise InvalidRequestError("the placement that was kept does not fit")
    return problem.placement(choice, how)


def predict(
    facts: ModelFacts, rates: Rates, layers: Sequence[LayerPlacement], frequencies: Sequence[np.ndarray]
) -> Predicted:
    """Seconds per token of a placement, in generation at half the context's depth."""
    times = tuple(
        _layer_time(layer, rates, place, frequency)
        for layer, place, frequency in zip(facts.layers, layers, frequencies, strict=True)
    )
    last = layers[-1].device
    speed = rates.cpu_read if last == CPU else rates.devices[last].read
    return Predicted(times, facts.output_bytes / speed)


def _layer_time(layer: LayerFacts, rates: Rates, place: LayerPlacement, frequency: np.ndarray) -> LayerTime:
    read = layer.fixed_bytes + layer.kv_read_bytes
    fired = float(frequency.sum()) if layer.n_split else 0.0
    if place.device == CPU:
        streamed = layer.n_split * layer.always_bytes + layer.shared_bytes
        cold = streamed / rates.cpu_read + fired * layer.fired_bytes / rates.cpu_gather
        return LayerTime(read / rates.cpu_read, cold=cold)
    device = rates.devices[place.device]
    attention = read / device.read + LAYER_KERNELS * device.launch
    if not layer.n_split:
        return LayerTime(attention)
    n_hot, hot_fired = layer.n_split, fired
    if place.hot is not None:
        n_hot, hot_fired = int(place.hot.sum()), float(frequency[place.hot].sum())
    n_cold, cold_fired = layer.n_split - n_hot, fired - hot_fired
    hot = cold = sync = 0.0
    if n_hot:
        n_bytes = n_hot * layer.always_bytes + hot_fired * layer.fired_bytes + layer.shared_bytes
        hot = device.launch + n_bytes / device.read_busy
    if n_cold:
        streamed = n_cold * layer.always_bytes + layer.shared_bytes
        cold = streamed / rates.cpu_read_busy + cold_fired * layer.fired_bytes / rates.cpu_gather_busy
        sync = device.sync
    return LayerTime(attention, hot, cold, sync)


_Choice = list[LayerPlacement]


class _Problem:
    """One placement problem; a choice is a LayerPlacement for each layer."""

    def __init__(
        self,
        facts: ModelFacts,
        rates: Rates,
        devices: tuple[Device, ...],
        frequencies: Sequence[np.ndarray],
        n_gpu_layers: int | None,
        split: bool,
    ) -> None:
        self.facts, self.rates, self.devices, self.frequencies = facts, rates, devices, frequencies
        self.n_layer, self.asked = len(facts.layers), n_gpu_layers
        if n_gpu_layers is not None and n_gpu_layers < 1:
            raise InvalidRequestError(f"there must be 1 layer or more on devices, not {n_gpu_layers}")
        if len(frequencies) != self.n_layer or any(
            len(frequency) != layer.n_ff for frequency, layer in zip(frequencies, facts.layers, strict=False)
        ):
            raise InvalidRequestError("the activation frequencies are not those of this model's neurons")
        self.room = [device.limit - device.context - facts.workspace_bytes for device in devices]
        self.usable = [d for d, room in enumerate(self.room) if room > 0]
        self.is_split = [split and layer.n_split > 0 for layer in facts.layers]
        self._of_neurons: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._more_of_none: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.order = [np.argsort(-frequency, kind="stable") for frequency in frequencies]

    @property
    def n_on_devices(self) -> int:
        """Layers that were asked for on devices; 1, the least, where it is free."""
        return min(self.asked, self.n_layer) if self.asked is not None else 1

    def n_cpu_choices(self) -> range:
        """How many layers may be on the CPU."""
        if self.asked is None:
            return range(self.n_layer)
        return range(self.n_layer - self.n_on_devices, self.n_layer - self.n_on_devices + 1)

    # ---- what a choice costs ----

    def output_seconds(self) -> float:
        """Of the output matrix, on the fastest device that may have it."""
        return self.facts.output_bytes / max(self.rates.devices[d].read for d in self.usable)

    def seconds(self, choice: _Choice) -> float:
        return predict(self.facts, self.rates, choice, self.frequencies).total

    def budget_of(self, choice: _Choice, d: int) -> DeviceBudget:
        """Planned bytes of a device."""
        device, facts = self.devices[d], self.facts
        weights = neurons = kv = stream = 0
        for layer, place in zip(facts.layers, choice, strict=True):
            if place.device != d:
                continue
            n_hot = layer.n_split if place.hot is None else int(place.hot.sum())
            weights += layer.fixed_bytes
            neurons += n_hot * layer.neuron_bytes + (layer.shared_bytes if n_hot else 0)
            kv += layer.kv_bytes
            if place.is_split:
                stream = facts.stream_bytes
        if choice[-1].device == d:
            weights += facts.output_bytes
        workspace = facts.workspace_bytes + stream
        return DeviceBudget(device.name, device.limit, weights, neurons, kv, workspace, device.context)

    def fits(self, choice: _Choice) -> bool:
        budgets = [self.budget_of(choice, d) for d in {place.device for place in choice} - {CPU}]
        return all(budget.total <= budget.limit for budget in budgets)

    # ---- the simplest choice ----

    def whole(self) -> _Choice | None:
        """Everything on the first device that holds it."""
        if self.n_cpu_choices()[0] > 0:
            return None
        for d in self.usable:
            choice = [LayerPlacement(d)] * self.n_layer
            if self.fits(choice):
                return choice
        return None

    # ---- greedy ----

    def greedy(self) -> _Choice | None:
        """The best of one choice for each number of layers on the CPU and two ways to cut the others.

        Within a cut, the bytes of a device go to the groups of neurons that save the CPU most seconds per
        byte, as long as the CPU is the slower side of their layer.
        """
        best: tuple[float, _Choice] | None = None
        n_more, step = 0, 1  # more layers on the CPU than must be: 0, 1, 3, 7
        for n_cpu in self.n_cpu_choices():
            if n_more:
                n_more -= 1
                continue
            found = [choice for cut in self.cuts(n_cpu) for choice in self._filled_cuts(cut)]
            if found and step > 4:
                break
            if found:
                n_more, step = step - 1, 2 * step
            for choice in found:
                seconds = self.seconds(choice)
                if self.fits(choice) and (best is None or seconds < best[0]):
                    best = seconds, choice
        return None if best is None else best[1]

    def cuts(self, n_cpu: int) -> list[list[int]]:
        """Device of each layer: in proportion to the devices' room, and as few devices as hold the least."""
        cuts = []
        total = sum(self.room[d] for d in self.usable)
        if total > 0:
            shares = np.cumsum([self.room[d] / total for d in self.usable])
            middles = (np.arange(self.n_layer - n_cpu) + 0.5) / (self.n_layer - n_cpu)
            cuts.append([CPU] * n_cpu + [self.usable[i] for i in np.searchsorted(shares, middles)])
        owners, taken, devices = [], self.facts.output_bytes, list(self.usable)
        for i in reversed(range(n_cpu, self.n_layer)):
            least = self._least_bytes(i)
            while devices and taken + least + self._stream(i) > self.room[devices[-1]]:
                devices.pop()
                taken = 0
            if not devices:
                return cuts
            owners.append(devices[-1])
            taken += least
        last = [CPU] * n_cpu + owners[::-1]
        return cuts if last in cuts else [*cuts, last]

    def _least_bytes(self, i: int) -> int:
        layer = self.facts.layers[i]
        return layer.fixed_bytes + layer.kv_bytes if self.is_split[i] else layer.whole_bytes

    def _stream(self, i: int) -> int:
        return self.facts.stream_bytes if self.is_split[i] else 0

    def _filled_cuts(self, owners: list[int]) -> list[_Choice]:
        """Two choices of one cut: neurons shared out among its layers, and layers completed one by one."""
        empty = [
            LayerPlacement(d, np.zeros(layer.n_ff, bool) if d != CPU and is_split else None)
            for d, layer, is_split in zip(owners, self.facts.layers, self.is_split, strict=True)
        ]
        if not self.fits(empty):
            return []
        by_layer = list(empty)
        left = {d: self._left(empty, d) for d in self.usable}
        for i in sorted(range(self.n_layer), key=lambda i: -self._cold_seconds(i)):
            layer, d = self.facts.layers[i], owners[i]
            n_bytes = layer.n_split * layer.neuron_bytes + layer.shared_bytes
            if d != CPU and self.is_split[i] and n_bytes <= left[d]:
                by_layer[i] = LayerPlacement(d)
                left[d] -= n_bytes
        return [self.filled(empty), self.filled(by_layer)]

    def _cold_seconds(self, i: int) -> float:
        return float(self.seconds_of_neurons(i)[0].sum())

    def _left(self, choice: _Choice, d: int) -> int:
        """Bytes of a device that a choice leaves."""
        budget = self.budget_of(choice, d)
        return budget.limit - budget.total

    def seconds_of_neurons(self, i: int, d: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Of each neuron of a layer: seconds of the CPU if it is cold, of device d if it is hot."""
        layer, rates, frequency = self.facts.layers[i], self.rates, self.frequencies[i]
        cold = (
            layer.always_bytes / rates.cpu_read_busy + frequency * layer.fired_bytes / rates.cpu_gather_busy
        )
        hot = (layer.always_bytes + frequency * layer.fired_bytes) / rates.devices[d].read_busy
        self._of_neurons[i, d] = cold, hot
        return cold, hot

    def filled(self, choice: _Choice) -> _Choice:
        """The same with what is left of each device given to more neurons, those first that save the CPU most
        seconds per byte, where no layer becomes slower.
        """
        choice = list(choice)
        for d in self.usable:
            split = [i for i, place in enumerate(choice) if place.device == d and place.is_split]
            more = {i: self._more(i, d, choice[i]) for i in split}
            sizes = [_group_sizes(len(neurons), BLOCK) for neurons, _ in more.values()]
            if not sum(map(len, sizes)):
                continue
            gains = [
                _group_sums(gain, size) / (np.maximum(size, 1) * self.facts.layers[i].neuron_bytes)
                for (i, (_, gain)), size in zip(more.items(), sizes, strict=True)
            ]
            owner = np.repeat(split, list(map(len, sizes)))
            of_one = np.array([layer.neuron_bytes for layer in self.facts.layers])[owner]
            n, left = np.concatenate(sizes), self._left(choice, d)
            left -= sum(self.facts.layers[i].shared_bytes for i in split if not _some(choice[i].hot))
            best = np.argsort(-np.concatenate(gains), kind="stable")
            before = np.concatenate([[0], np.cumsum((n * of_one)[best])[:-1]])
            taken = np.clip((left - before) // of_one[best], 0, n[best])
            taken[np.argmax(taken < n[best]) + 1 if (taken < n[best]).any() else len(taken) :] = 0
            counts = np.bincount(owner[best], weights=taken, minlength=self.n_layer).astype(np.int64)
            for i in split:
                choice[i] = self._grown(i, choice[i], more[i][0][: counts[i]])
        return choice

    def _more(self, i: int, d: int, place: LayerPlacement) -> tuple[np.ndarray, np.ndarray]:
        """Cold neurons of a layer that may become hot without making it slower, hottest first; their seconds
        on the CPU.
        """
        layer, hot, device = self.facts.layers[i], place.hot, self.rates.devices[d]
        assert hot is not None
        is_empty = not hot.any()
        if is_empty and (i, d) in self._more_of_none:
            return self._more_of_none[i, d]
        cold_s, hot_s = self.seconds_of_neurons(i, d)
        order = self.order[i][~hot[self.order[i]]]
        now = self.time(i, place)
        nothing = _layer_time(layer, self.rates, LayerPlacement(d, np.zeros_like(hot)), self.frequencies[i])
        already = device.launch + layer.shared_bytes / device.read_busy + float(hot_s[hot].sum())
        ends = nothing.attention + already + np.cumsum(hot_s[order])
        n = int(np.searchsorted(ends, now * (1 + 1e-12), side="right"))
        found = order[:n], cold_s[order[:n]]
        if is_empty:
            self._more_of_none[i, d] = found
        return found

    def _grown(self, i: int, place: LayerPlacement, neurons: np.ndarray) -> LayerPlacement:
        """The layer with more hot neurons; as it was where that is slower, or not worth the launch."""
        if not len(neurons) or place.hot is None:
            return place
        hot = place.hot.copy()
        hot[neurons] = True
        grown = LayerPlacement(place.device, None if hot.all() else hot)
        saved = float(self.seconds_of_neurons(i, place.device)[0][hot].sum())
        if saved < self.rates.devices[place.device].launch:
            return place
        return grown if self.time(i, grown) <= self.time(i, place) * (1 + 1e-9) else place

    def time(self, i: int, place: LayerPlacement) -> float:
        return _layer_time(self.facts.layers[i], self.rates, place, self.frequencies[i]).total

    # ---- the program ----

    def optimal(self, greedy: _Choice | None) -> tuple[_Choice | None, str]:
        """The choice that HiGHS finds, and a sentence on how good it is."""
        if not self.usable:
            return None, ""
        program = _Program(self)
        bound = None if greedy is None else self.seconds(greedy)
        return program.run(bound)

    # ---- the result ----

    def refusal(self) -> str:
        """The sentence for a problem without a solution."""
        smallest = self.devices[0].context + self.facts.smallest_bytes(self.n_on_devices)
        if not any(self.is_split):
            last = self.facts.layers[self.n_layer - self.n_on_devices :]
            smallest = self.devices[0].context + self.facts.workspace_bytes + self.facts.output_bytes
            smallest += sum(layer.whole_bytes for layer in last)
        what = "the model" if self.asked is None else f"{self.n_on_devices} layers"
        given = " and ".join(f"{device.limit / 2**30:.2f} GiB on {device.name}" for device in self.devices)
        return (
            f"{what} cannot be placed in {given}: the smallest budget that works is "
            f"{-(-smallest * 100 // 2**30) / 100:.2f} GiB (--vram-budget); a shorter context (-c) or a "
            "smaller batch lowers it"
        )

    def placement(self, choice: _Choice, how: str) -> Placement:
        """The result of a choice; devices that it leaves unused are left out."""
        used = sorted({place.device for place in choice} - {CPU})
        number = {CPU: CPU} | {d: new for new, d in enumerate(used)}
        predicted = predict(self.facts, self.rates, choice, self.frequencies)
        planned = tuple(self.budget_of(choice, d) for d in used)
        budget = Budget(planned, self._host_bytes(choice), self.facts.stream_bytes)
        layers = tuple(LayerPlacement(number[place.device], place.hot) for place in choice)
        hot = total = served = fired = 0.0
        for layer, place, frequency in zip(self.facts.layers, choice, self.frequencies, strict=True):
            if not layer.n_split:
                continue
            total += layer.n_ff
            fired += float(frequency.sum())
            if place.device != CPU:
                mine = slice(None) if place.hot is None else place.hot
                hot += layer.n_ff if place.hot is None else int(place.hot.sum())
                served += float(frequency[mine].sum())
        notes = [how]
        for one in planned:
            is_free = self.asked is None and any(p.device == CPU or p.is_split for p in choice)
            if is_free and one.total < 0.95 * one.limit:
                share = 100 * one.total / one.limit
                notes.append(f"{share:.0f}% of {one.device}'s budget is used: more on it would be slower")
        return Placement(
            tuple(self.devices[d].name for d in used),
            layers,
            number[choice[-1].device],
            budget,
            predicted,
            hot / total if total else None,
            served / fired if fired else None,
            tuple(notes),
            tuple(layer.n_ff for layer in self.facts.layers),
        )

    def _host_bytes(self, choice: _Choice) -> int:
        n_bytes = 0
        for layer, place in zip(self.facts.layers, choice, strict=True):
            if place.device == CPU:
                n_bytes += layer.whole_bytes - layer.kv_bytes
            elif place.is_split and place.hot is not None:
                n_bytes += int((~place.hot).sum()) * layer.neuron_bytes + layer.shared_bytes
        return n_bytes


def _group_sizes(n: int, size: int) -> np.ndarray:
    """n neurons in groups of `size`, the last one smaller."""
    return np.diff(np.append(np.arange(0, n, size), n)) if n else np.zeros(0, np.int64)


def _group_sums(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, np.concatenate([[0], np.cumsum(sizes)[:-1]])) if len(sizes) else values


def _some(hot: np.ndarray | None) -> bool:
    return hot is None or bool(hot.any())


_Term = tuple[range, float | np.ndarray]  # variables and their factor, or factors


class _Program:
    """The mixed-integer program of a problem, in microseconds and MiB."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        facts = problem.facts
        n_pairs = len(problem.usable)
        n_neurons = sum(
            layer.n_split for layer, split in zip(facts.layers, problem.is_split, strict=True) if split
        )
        self.is_small = n_neurons * n_pairs <= SMALL
        self.gap = 1e-7 if self.is_small else GAP
        self.sizes = [
            self._sizes(frequency[order]) if split else np.zeros(0, np.int64)
            for frequency, order, split in zip(
                problem.frequencies, problem.order, problem.is_split, strict=True
            )
        ]
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[np.ndarray, np.ndarray, float, float]] = []
        self.on: dict[tuple[int, int], range] = {}  # layer, device → whole there, and with cold neurons
        self.groups: dict[tuple[int, int], range] = {}  # layer, device → variables of its groups
        self._build()

    def _sizes(self, falling: np.ndarray) -> np.ndarray:
        """Sizes of groups of about equally hot neurons; frequencies that fall."""
        if self.is_small:
            return np.ones(len(falling), np.int64)
        grade = np.floor(np.log(np.maximum(falling, RAREST)) / np.log(GRADE))
        ends = np.append(np.flatnonzero(np.diff(grade)) + 1, len(falling))
        return np.diff(ends, prepend=0)

    def _variables(self, n: int, cost: float, upper: float, integral: bool) -> range:
        first = len(self.cost)
        self.cost += [cost] * n
        self.upper += [upper] * n
        self.integral += [int(integral)] * n
        return range(first, first + n)

    def _row(self, terms: Sequence[_Term], low: float = -np.inf, high: float = np.inf) -> None:
        columns = [np.asarray(column) for column, _ in terms]
        values = [
            np.broadcast_to(np.asarray(value, float), column.shape)
            for column, (_, value) in zip(columns, terms, strict=True)
        ]
        self.rows.append((np.concatenate(columns), np.concatenate(values), low, high))

    def _build(self) -> None:
        problem, facts = self.problem, self.problem.facts
        n_bytes: dict[int, list[_Term]] = {d: [] for d in problem.usable}
        streams = {d: self._variables(1, 0.0, 1.0, True)[0] for d in problem.usable}
        allowed = problem.n_cpu_choices()
        for i, layer in enumerate(facts.layers):
            if i < allowed[-1]:
                seconds = problem.time(i, LayerPlacement(CPU))
                self.on[i, CPU] = self._variables(1, seconds * _US, 1.0, True)
            for d in problem.usable if i >= allowed[0] else ():
                seconds = problem.time(i, LayerPlacement(d))
                whole = self._variables(1, seconds * _US, 1.0, True)
                n_bytes[d].append((whole, layer.whole_bytes * _MIB))
                self.on[i, d] = whole
                if problem.is_split[i]:
                    self.on[i, d] = range(
                        whole[0], self._add_partial(i, d, layer, n_bytes[d], streams[d]) + 1
                    )
            self._row([(self.on[i, d], 1.0) for d in (CPU, *problem.usable) if (i, d) in self.on], 1.0, 1.0)
        for d in problem.usable:
            n_bytes[d].append((range(streams[d], streams[d] + 1), facts.stream_bytes * _MIB))
            n_bytes[d].append((self.on[problem.n_layer - 1, d], facts.output_bytes * _MIB))
            self._row(n_bytes[d], high=problem.room[d] * _MIB)
        for i in range(problem.n_layer - 1):  # devices follow one another down the layers
            for k in range(len(problem.usable)):
                before = [CPU, *problem.usable[:k]]
                terms = [(self.on[i + 1, d], 1.0) for d in before if (i + 1, d) in self.on]
                terms += [(self.on[i, d], -1.0) for d in before if (i, d) in self.on]
                if terms:
                    self._row(terms, high=0.0)

    def _add_partial(self, i: int, d: int, layer: LayerFacts, n_bytes: list[_Term], stream: int) -> int:
        """The choice of a layer on device d with neurons on the CPU; returns its variable.

        Such a layer pays the round trip even with no cold neuron: one that is complete is a choice of its
        own, which keeps the relaxation of the program tight.
        """
        problem = self.problem
        device, rates = problem.rates.devices[d], problem.rates
        nothing = LayerPlacement(d, np.zeros(layer.n_ff, bool))
        attention = _layer_time(layer, rates, nothing, problem.frequencies[i]).attention
        launch = device.launch + layer.shared_bytes / device.read_busy
        sync = device.sync + layer.shared_bytes / rates.cpu_read_busy
        sizes, order = self.sizes[i], problem.order[i]
        cold, hot = (_group_sums(seconds[order], sizes) for seconds in problem.seconds_of_neurons(i, d))
        on = self._variables(1, attention * _US, 1.0, True)
        any_hot = self._variables(1, 0.0, 1.0, True)
        time = self._variables(1, 1.0, np.inf, False)
        x = self.groups[i, d] = self._variables(len(sizes), 0.0, 1.0, self.is_small)
        self._row([(time, 1.0), (any_hot, -launch * _US), (x, -hot * _US)], low=0.0)
        self._row([(time, 1.0), (on, -(sync + cold.sum()) * _US), (x, cold * _US)], low=0.0)
        self._row([(x, 1.0), (any_hot, -float(len(sizes)))], high=0.0)
        self._row([(x[:1], 1.0), (any_hot, -1.0)], high=0.0)
        self._row([(any_hot, 1.0), (on, -1.0)], high=0.0)
        self._row([(on, 1.0), (range(stream, stream + 1), -1.0)], high=0.0)
        self._row([(x, cold * _US), (any_hot, -launch * _US)], low=0.0)  # the communication constraint
        n_bytes.append((on, (layer.fixed_bytes + layer.kv_bytes) * _MIB))
        n_bytes.append((any_hot, layer.shared_bytes * _MIB))
        n_bytes.append((x, sizes * (layer.neuron_bytes * _MIB)))
        return on[0]

    def run(self, bound: float | None) -> tuple[_Choice | None, str]:
        """bound: seconds of a placement that is known."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        problem = self.problem
        cost = np.array(self.cost)
        rows = list(self.rows)
        if bound is not None:
            # Better by the gap, or there is none: the greedy placement is then as good as the optimum.
            limit = (bound - problem.output_seconds()) * _US * (1 - self.gap)
            rows.append((np.arange(len(cost)), cost, -np.inf, limit))
        data = np.concatenate([values for _, values, _, _ in rows])
        columns = np.concatenate([columns for columns, _, _, _ in rows])
        starts = np.concatenate([[0], np.cumsum([len(columns) for columns, _, _, _ in rows])])
        matrix = csr_array((data, columns, starts), shape=(len(rows), len(cost)))
        matrix.sum_duplicates()
        low, high = (np.array([row[k] for row in rows]) for k in (2, 3))
        found = milp(
            cost,
            integrality=np.array(self.integral),
            bounds=Bounds(0, np.array(self.upper)),
            constraints=LinearConstraint(matrix, low, high),
            options={"time_limit": TIME_LIMIT, "mip_rel_gap": self.gap},
        )
        if found.x is None:
            if found.status == 2 and bound is not None:
                return None, f"HiGHS finds none that is better by {100 * self.gap:.2g}%"
            return None, f"HiGHS found none in {TIME_LIMIT:.0f} s"
        choice = self._choice(found.x)
        if not problem.fits(choice):  # by a rounding of the program's
            return None, "what HiGHS found does not fit by a rounding"
        how = "optimal" if found.status == 0 else f"the best that HiGHS found in {TIME_LIMIT:.0f} s"
        return choice, f"{how}, within {100 * max(found.mip_gap, self.gap):.2g}% of the least time (HiGHS)"

    def _choice(self, x: np.ndarray) -> _Choice:
        choice = []
        for i, layer in enumerate(self.problem.facts.layers):
            d = next(
                d for d in (CPU, *self.problem.usable) if (i, d) in self.on and x[self.on[i, d]].sum() > 0.5
            )
            if x[self.on[i, d][0]] > 0.5:
                choice.append(LayerPlacement(d))
                continue
            counts = np.floor(x[self.groups[i, d].start : self.groups[i, d].stop] * self.sizes[i] + 1e-4)
            hot, order, at = np.zeros(layer.n_ff, bool), self.problem.order[i], 0
            for count, size in zip(counts.astype(int), self.sizes[i], strict=True):
                hot[order[at : at + count]] = True
                at += size
            choice.append(LayerPlacement(d, None if hot.all() else hot))
        return choice
