"""The placement problem: the possible placements, their costs, and the greedy placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotset.errors import InvalidRequestError
from hotset.offload.misses import Fetching, fetched_of, n_spare, tokens_to_stream
from hotset.placement.budget import Budget, MemoryBudget, ModelFacts
from hotset.placement.table import (
    CPU,
    Device,
    LayerPlacement,
    Placement,
    Rates,
    crossings,
    expert_hits,
    layer_time,
    predict,
)
from hotset.units import human_size

BLOCK = 64  # neurons that the greedy placement adds at once
EXPERT_ENTRY = 4  # bytes of an expert's entry in the table of slots
SLOTS_BYTES = 32 << 10  # the most bytes that rounding adds to the matrices of all slots


Candidate = list[LayerPlacement]  # one per layer


@dataclass(frozen=True)
class ExpertSlots:
    """The expert slots of one device: slots of the cache, spare slots per layout, and the bytes of both."""

    n: int = 0
    n_spare: int = 0
    n_bytes: int = 0


class PlacementProblem:
    """A placement problem, with the costs of candidates and the greedy candidates."""

    def __init__(
        self,
        facts: ModelFacts,
        rates: Rates,
        devices: tuple[Device, ...],
        frequencies: Sequence[np.ndarray],
        n_gpu_layers: int | None,
        split_neurons: bool,
    ) -> None:
        self.facts, self.rates, self.devices, self.frequencies = facts, rates, devices, frequencies
        self.n_layer, self.asked = len(facts.layers), n_gpu_layers
        if n_gpu_layers is not None and n_gpu_layers < 1:
            raise InvalidRequestError(f"there must be 1 layer or more on devices, not {n_gpu_layers}")
        if len(frequencies) != self.n_layer or any(
            len(frequency) != layer.n_ff for frequency, layer in zip(frequencies, facts.layers, strict=False)
        ):
            raise InvalidRequestError("the activation frequencies do not match this model's neurons")
        self.room = [
            device.limit - device.context - device.spare - facts.workspace_bytes for device in devices
        ]
        self.usable = [d for d, room in enumerate(self.room) if room > 0]
        self.is_split = [split_neurons and layer.n_split > 0 for layer in facts.layers]
        self._of_neurons: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._more_of_none: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self.order = [np.argsort(-frequency, kind="stable") for frequency in frequencies]

    @property
    def n_on_devices(self) -> int:
        """Return the number of layers requested on devices; 1, the minimum, without a request."""
        return min(self.asked, self.n_layer) if self.asked is not None else 1

    def n_cpu_choices(self) -> range:
        """Return how many of the first layers may be on the CPU.

        Layers that no device computes are on the CPU too.
        """
        if self.asked is None:
            return range(self.n_layer)
        return range(self.n_layer - self.n_on_devices, self.n_layer - self.n_on_devices + 1)

    # ---- costs of a candidate ----

    def output_seconds(self) -> float:
        """Return the seconds of the output matrix on the fastest device that may have it."""
        return self.facts.output_bytes / max(self.rates.devices[d].read for d in self.usable)

    def seconds(self, candidate: Candidate) -> float:
        return predict(self.facts, self.rates, candidate, self.frequencies).total

    def expert_slots(self, candidate: Candidate, d: int) -> ExpertSlots:
        """Return the expert slots for which a device has room after everything else.

        Everything else comes first, since every token reads it; a token reads only the slots of its experts.
        Spare slots take at most a quarter of the remaining bytes. If all experts have a slot, spare slots are
        not needed.
        """
        own = [
            layer
            for layer, place in zip(self.facts.layers, candidate, strict=True)
            if place.device == d and layer.is_cached
        ]
        if not own:
            return ExpertSlots()
        n_all = sum(layer.n_experts for layer in own)
        allowed = int(self.facts.expert_share * n_all)
        if not allowed:
            return ExpertSlots()
        mean = sum(layer.n_experts * layer.expert_bytes for layer in own) / n_all
        most = max(layer.expert_bytes for layer in own)
        # Layers share slots in proportion to their experts; a table has the slot of each expert.
        beside = EXPERT_ENTRY * n_all + SLOTS_BYTES
        room = self._left(candidate, d) - beside
        if n_all * mean <= room and allowed == n_all:
            return ExpertSlots(n_all, 0, int(n_all * mean) + beside)
        each = sum(
            {layer.layout: layer.expert_bytes for layer in own}.values()
        )  # a spare slot of each layout
        wanted = n_spare(self.rates.devices[d].misses, most, max(layer.n_used for layer in own))
        spare = min(wanted, max(layer.n_experts for layer in own), max(room // 4, 0) // each)
        spare = spare if spare > 1 else 0
        n = min(max(int((room - spare * each - most) // mean), 0), allowed)
        used = int(n * mean) + (most if n else 0) + spare * each
        return ExpertSlots(max(n, self.facts.least_slots), spare, used + beside if used else 0)

    def budget_of(self, candidate: Candidate, d: int) -> MemoryBudget:
        """Return the planned bytes of a device."""
        device, facts = self.devices[d], self.facts
        weights = neurons = kv = stream = 0
        for layer, place in zip(facts.layers, candidate, strict=True):
            if place.device != d:
                continue
            n_hot = layer.n_split if place.hot is None else int(place.hot.sum())
            weights += layer.fixed_bytes
            neurons += n_hot * layer.neuron_bytes + (layer.shared_bytes if n_hot else 0)
            kv += layer.kv_bytes
            if place.is_split:
                stream = facts.stream_bytes
        if candidate[-1].device == d:
            weights += facts.output_bytes
        workspace = facts.workspace_bytes + stream + device.spare
        return MemoryBudget(device.name, device.limit, weights, neurons, kv, workspace, device.context)

    def fits(self, candidate: Candidate) -> bool:
        budgets = [self.budget_of(candidate, d) for d in {place.device for place in candidate} - {CPU}]
        return all(budget.total <= budget.limit for budget in budgets)

    # ---- the simplest candidate ----

    def whole(self) -> Candidate | None:
        """Return the candidate with everything on the first device that holds it; None if no device does."""
        if self.n_cpu_choices()[0] > 0 or any(self.stays):
            return None
        for d in self.usable:
            candidate = [LayerPlacement(d)] * self.n_layer
            if self.fits(candidate):
                return candidate
        return None

    # ---- layers that no device computes ----

    @property
    def stays(self) -> list[bool]:
        """Return for each layer whether it stays on the CPU because no device computes it."""
        return [layer.missing is not None for layer in self.facts.layers]

    def around(self) -> Candidate | None:
        """Return the best candidate with one device that has all layers it computes, from some layer on.

        A token goes to the device and back for each run of layers, and each run has its own workspace. Return
        None if no candidate fits.
        """
        stays, found = self.stays, []
        first = self.n_cpu_choices()
        for d in self.usable:
            for n_cpu in first:
                candidate = [LayerPlacement(CPU if i < n_cpu or stays[i] else d) for i in range(self.n_layer)]
                n_more = crossings(candidate)
                needed = self.budget_of(candidate, d).total + n_more * self.facts.workspace_bytes
                if any(place.device == d for place in candidate) and needed <= self.devices[d].limit:
                    seconds = self.seconds(candidate) + n_more * self.rates.devices[d].sync
                    found.append((seconds, -n_cpu, candidate))
        return max(found, key=lambda one: (-one[0], one[1]))[2] if found else None

    # ---- greedy ----

    def greedy(self) -> Candidate | None:
        """Return the best greedy candidate over numbers of layers on the CPU; None if nothing fits.

        The other layers are split among devices in up to two ways. Within a split, the bytes of a device go
        to the groups of neurons that save the CPU most seconds per byte, while the CPU is the slower side.
        """
        best: tuple[float, Candidate] | None = None
        n_more, step = 0, 1  # layers on the CPU beyond the fewest that fit: 0, 1, 3, 7
        for n_cpu in self.n_cpu_choices():
            if n_more:
                n_more -= 1
                continue
            found = [candidate for split in self.splits(n_cpu) for candidate in self._filled_splits(split)]
            if found and step > 4:
                break
            if found:
                n_more, step = step - 1, 2 * step
            for candidate in found:
                seconds = self.seconds(candidate)
                if self.fits(candidate) and (best is None or seconds < best[0]):
                    best = seconds, candidate
        return None if best is None else best[1]

    def splits(self, n_cpu: int) -> list[list[int]]:
        """Return up to two assignments of a device to each layer, with the first n_cpu layers on the CPU.

        One is in proportion to the devices' room. The other uses as few devices as hold the minimum.
        """
        splits = []
        total = sum(self.room[d] for d in self.usable)
        if total > 0:
            shares = np.cumsum([self.room[d] / total for d in self.usable])
            middles = (np.arange(self.n_layer - n_cpu) + 0.5) / (self.n_layer - n_cpu)
            splits.append([CPU] * n_cpu + [self.usable[i] for i in np.searchsorted(shares, middles)])
        owners, taken, devices = [], self.facts.output_bytes, list(self.usable)
        for i in reversed(range(n_cpu, self.n_layer)):
            least = self._least_bytes(i)
            while devices and taken + least + self._stream(i) > self.room[devices[-1]]:
                devices.pop()
                taken = 0
            if not devices:
                return splits
            owners.append(devices[-1])
            taken += least
        last = [CPU] * n_cpu + owners[::-1]
        return splits if last in splits else [*splits, last]

    def _least_bytes(self, i: int) -> int:
        layer = self.facts.layers[i]
        return layer.fixed_bytes + layer.kv_bytes if self.is_split[i] else layer.whole_bytes

    def _stream(self, i: int) -> int:
        return self.facts.stream_bytes if self.is_split[i] else 0

    def _filled_splits(self, owners: list[int]) -> list[Candidate]:
        """Return two candidates of one split; none if it does not fit even without hot neurons.

        One spreads neurons over all layers, the other completes layers one by one.
        """
        empty = [
            LayerPlacement(d, np.zeros(layer.n_ff, bool) if d != CPU and is_split else None)
            for d, layer, is_split in zip(owners, self.facts.layers, self.is_split, strict=True)
        ]
        if not self.fits(empty):
            return []
        by_layer = list(empty)
        left = {d: self._left(empty, d) for d in self.usable}
        for i in sorted(range(self.n_layer), key=lambda i: -self._cpu_worker_seconds(i)):
            layer, d = self.facts.layers[i], owners[i]
            n_bytes = layer.n_split * layer.neuron_bytes + layer.shared_bytes
            if d != CPU and self.is_split[i] and n_bytes <= left[d]:
                by_layer[i] = LayerPlacement(d)
                left[d] -= n_bytes
        return [self.filled(empty), self.filled(by_layer)]

    def _cpu_worker_seconds(self, i: int) -> float:
        return float(self.seconds_of_neurons(i)[0].sum())

    def _left(self, candidate: Candidate, d: int) -> int:
        """Return the bytes of a device that a candidate leaves unused."""
        budget = self.budget_of(candidate, d)
        return budget.limit - budget.total

    def seconds_of_neurons(self, i: int, d: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Return for each neuron of a layer its seconds on the CPU if cold, and on device d if hot."""
        layer, rates, frequency = self.facts.layers[i], self.rates, self.frequencies[i]
        cold = (
            layer.always_bytes / rates.cpu_read_busy + frequency * layer.fired_bytes / rates.cpu_gather_busy
        )
        hot = (layer.always_bytes + frequency * layer.fired_bytes) / rates.devices[d].read_busy
        self._of_neurons[i, d] = cold, hot
        return cold, hot

    def filled(self, candidate: Candidate) -> Candidate:
        """Return the candidate with the remaining bytes of each device given to more neurons.

        Neurons that save the CPU most seconds per byte come first. No layer becomes slower.
        """
        candidate = list(candidate)
        for d in self.usable:
            split = [i for i, place in enumerate(candidate) if place.device == d and place.is_split]
            more = {i: self._more(i, d, candidate[i]) for i in split}
            sizes = [group_sizes(len(neurons), BLOCK) for neurons, _ in more.values()]
            if not sum(map(len, sizes)):
                continue
            gains = [
                group_sums(gain, size) / (np.maximum(size, 1) * self.facts.layers[i].neuron_bytes)
                for (i, (_, gain)), size in zip(more.items(), sizes, strict=True)
            ]
            owner = np.repeat(split, list(map(len, sizes)))
            of_one = np.array([layer.neuron_bytes for layer in self.facts.layers])[owner]
            n, left = np.concatenate(sizes), self._left(candidate, d)
            left -= sum(self.facts.layers[i].shared_bytes for i in split if not _some(candidate[i].hot))
            best = np.argsort(-np.concatenate(gains), kind="stable")
            before = np.concatenate([[0], np.cumsum((n * of_one)[best])[:-1]])
            taken = np.clip((left - before) // of_one[best], 0, n[best])
            taken[np.argmax(taken < n[best]) + 1 if (taken < n[best]).any() else len(taken) :] = 0
            counts = np.bincount(owner[best], weights=taken, minlength=self.n_layer).astype(np.int64)
            for i in split:
                candidate[i] = self._grown(i, candidate[i], more[i][0][: counts[i]])
        return candidate

    def _more(self, i: int, d: int, place: LayerPlacement) -> tuple[np.ndarray, np.ndarray]:
        """Return the cold neurons that can become hot without making their layer slower, hottest first.

        The second array has their seconds on the CPU.
        """
        layer, hot, device = self.facts.layers[i], place.hot, self.rates.devices[d]
        assert hot is not None
        is_empty = not hot.any()
        if is_empty and (i, d) in self._more_of_none:
            return self._more_of_none[i, d]
        cold_s, hot_s = self.seconds_of_neurons(i, d)
        order = self.order[i][~hot[self.order[i]]]
        now = self.time(i, place)
        nothing = layer_time(layer, self.rates, LayerPlacement(d, np.zeros_like(hot)), self.frequencies[i])
        already = device.ffn_launch + layer.shared_bytes / device.read_busy + float(hot_s[hot].sum())
        ends = nothing.attention + already + np.cumsum(hot_s[order])
        n = int(np.searchsorted(ends, now * (1 + 1e-12), side="right"))
        found = order[:n], cold_s[order[:n]]
        if is_empty:
            self._more_of_none[i, d] = found
        return found

    def _grown(self, i: int, place: LayerPlacement, neurons: np.ndarray) -> LayerPlacement:
        """Return the layer with more hot neurons, or unchanged if that is slower or not worth the launch."""
        if not len(neurons) or place.hot is None:
            return place
        hot = place.hot.copy()
        hot[neurons] = True
        grown = LayerPlacement(place.device, None if hot.all() else hot)
        saved = float(self.seconds_of_neurons(i, place.device)[0][hot].sum())
        if saved < self.rates.devices[place.device].ffn_launch:
            return place
        return grown if self.time(i, grown) <= self.time(i, place) * (1 + 1e-9) else place

    def time(self, i: int, place: LayerPlacement) -> float:
        return layer_time(self.facts.layers[i], self.rates, place, self.frequencies[i]).total

    # ---- the result ----

    def refusal(self) -> str:
        """Return the message for a problem without a solution."""
        beside = self.devices[0].context + self.devices[0].spare
        smallest = beside + self.facts.smallest_bytes(self.n_on_devices)
        if not any(self.is_split):
            last = self.facts.layers[self.n_layer - self.n_on_devices :]
            smallest = beside + self.facts.workspace_bytes + self.facts.output_bytes
            smallest += sum(layer.whole_bytes for layer in last)
        what = "the model" if self.asked is None else f"{self.n_on_devices} layers"
        given = " and ".join(f"{device.limit / 2**30:.2f} GiB on {device.name}" for device in self.devices)
        return (
            f"{what} cannot be placed in {given}: the smallest budget that works is "
            f"{-(-smallest * 100 // 2**30) / 100:.2f} GiB (vram_budget); a shorter context (n_ctx) or a "
            "smaller batch lowers it"
        )

    def placement(self, candidate: Candidate, how: str) -> Placement:
        """Return the placement of a candidate, without the devices that it does not use."""
        used = sorted({place.device for place in candidate} - {CPU})
        number = {CPU: CPU} | {d: new for new, d in enumerate(used)}
        slots = [self.expert_slots(candidate, d) for d in range(len(self.devices))]
        n_experts = [
            sum(layer.n_experts for layer, place in zip(self.facts.layers, candidate, strict=True)
                if place.device == d)
            for d in range(len(self.devices))
        ]  # fmt: skip
        cached = [own.n / max(n_all, 1) for own, n_all in zip(slots, n_experts, strict=True)]
        devices = tuple(
            rates if own.n_spare else replace(rates, link=0.0)
            for rates, own in zip(self.rates.devices, slots, strict=True)
        )
        rates = replace(self.rates, devices=devices)
        predicted = predict(self.facts, rates, candidate, self.frequencies, cached)
        planned = tuple(replace(self.budget_of(candidate, d), experts=slots[d].n_bytes) for d in used)
        fetches = {d for d in used if slots[d].n_spare}
        pinned = self._pinned_bytes(candidate, fetches)
        budget = Budget(planned, self._host_bytes(candidate), self.facts.stream_bytes, pinned)
        layers = tuple(LayerPlacement(number[place.device], place.hot) for place in candidate)
        hot = total = served = fired = 0.0
        for layer, place, frequency in zip(self.facts.layers, candidate, self.frequencies, strict=True):
            if not layer.n_split:
                continue
            total += layer.n_ff
            fired += float(frequency.sum())
            if place.device != CPU:
                mine = slice(None) if place.hot is None else place.hot
                hot += layer.n_ff if place.hot is None else int(place.hot.sum())
                served += float(frequency[mine].sum())
        notes = [how, *self._of_experts(sum(slots[d].n for d in used), sum(n_experts[d] for d in used))]
        ahead = {i: layer.attention for i, layer in enumerate(predicted.layers)}
        fetching = {
            d: Fetching(misses, slots[d].n_spare, ahead)
            for d in used
            if (misses := rates.devices[d].misses) is not None
        }
        notes += [self._of_misses(fetching[d], candidate, d) for d in fetching]
        notes += [f"{human_size(pinned)} of experts are pinned in memory"] if pinned else []
        for one in planned:
            is_free = self.asked is None and any(p.device == CPU or p.is_split for p in candidate)
            if is_free and one.total < 0.95 * one.limit:
                share = 100 * one.total / one.limit
                notes.append(f"{share:.0f}% of {one.device}'s budget is used: more on it would be slower")
        return Placement(
            tuple(self.devices[d].name for d in used),
            layers,
            number[candidate[-1].device],
            budget,
            predicted,
            hot / total if total else None,
            served / fired if fired else None,
            tuple(notes),
            tuple(layer.n_ff for layer in self.facts.layers),
            tuple(slots[d].n for d in used),
            tuple(fetching.get(d) for d in used),
        )

    def _of_experts(self, n_slots: int, n_experts: int) -> list[str]:
        """Return a message on the expected hits of a cache with n_slots of n_experts experts on devices."""
        if not n_experts:
            return []
        layers = [layer for layer in self.facts.layers if layer.n_used]
        if not any(layer.is_cached for layer in layers):
            return ["the CPU computes all experts: no device has this model's"]
        share = n_slots / n_experts
        return [
            f"{n_slots} of {n_experts} experts have a slot on a device ({100 * share:.0f}%); of a token's "
            f"about {100 * expert_hits(share):.0f}% are expected there, the CPU computes the others meanwhile"
        ]

    def _of_misses(self, fetching: Fetching, candidate: Candidate, d: int) -> str:
        """Return a message on the missing experts that a device fetches because that is faster."""
        misses = fetching.rates
        layer = max(
            (layer for layer, place in zip(self.facts.layers, candidate, strict=True)
             if place.device == d and layer.is_cached),
            key=lambda layer: layer.expert_bytes,
        )  # fmt: skip
        few = fetched_of(misses, layer.n_used, layer.expert_bytes, fetching.n_spare)[-1]
        from_ = tokens_to_stream(misses)
        wanted = "any expert" if from_ == 1 else f"an expert that at least {from_} tokens need"
        return (
            f"{self.devices[d].name} fetches {few} of {layer.n_used} experts that a token misses in a layer, "
            f"at {misses.link / 1e9:.3g} GB/s (the CPU: {misses.cpu / 1e9:.3g} GB/s); in prompts it is "
            f"quicker with {wanted}, and both share the missing experts"
        )

    def _pinned_bytes(self, candidate: Candidate, fetches: set[int]) -> int:
        """Return the bytes of experts that devices read in pinned host memory."""
        return sum(
            layer.n_experts * layer.expert_bytes
            for layer, place in zip(self.facts.layers, candidate, strict=True)
            if place.device in fetches and layer.is_cached and self.devices[place.device].pins
        )

    def _host_bytes(self, candidate: Candidate) -> int:
        n_bytes = 0
        for layer, place in zip(self.facts.layers, candidate, strict=True):
            n_bytes += layer.n_experts * layer.expert_bytes
            if place.device == CPU:
                n_bytes += layer.whole_bytes - layer.kv_bytes
            elif place.is_split and place.hot is not None:
                n_bytes += int((~place.hot).sum()) * layer.neuron_bytes + layer.shared_bytes
        return n_bytes


def group_sizes(n: int, size: int) -> np.ndarray:
    """Return the sizes of groups of n neurons: `size` each, the last one possibly smaller."""
    return np.diff(np.append(np.arange(0, n, size), n)) if n else np.zeros(0, np.int64)


def group_sums(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the sums of consecutive groups of values, with these group sizes."""
    return np.add.reduceat(values, np.concatenate([[0], np.cumsum(sizes)[:-1]])) if len(sizes) else values


def _some(hot: np.ndarray | None) -> bool:
    return hot is None or bool(hot.any())
