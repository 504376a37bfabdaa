"""The placement problem as a mixed-integer program for HiGHS (see solver.py and problem.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hotset.placement.budget import LayerFacts
from hotset.placement.problem import Candidate, PlacementProblem, group_sums
from hotset.placement.table import CPU, LayerPlacement, layer_time

SMALL = 1500  # up to this many neurons · devices, neurons are placed one by one, exactly
GRADE = 1.2  # neurons whose frequencies differ by less than this factor form a group
RAREST = 1e-4  # lower frequencies count as equal to it
TIME_LIMIT = 15.0  # seconds; the best solution found by then is used
GAP = 1e-3  # of the predicted time: the accepted distance from the optimum
_US, _MIB = 1e6, 2.0**-20  # units of the program: numbers around 1

_Term = tuple[range, float | np.ndarray]  # variables and their factor, or factors


class MixedIntegerProgram:
    """The mixed-integer program of a problem, in microseconds and MiB."""

    def __init__(self, problem: PlacementProblem) -> None:
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
        self.on: dict[tuple[int, int], range] = {}  # layer, device → whole, with cold neurons
        self.groups: dict[tuple[int, int], range] = {}  # layer, device → variables of its groups
        self._build()

    def _sizes(self, falling: np.ndarray) -> np.ndarray:
        """Return the sizes of groups of similarly hot neurons. falling: frequencies in falling order."""
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
        """Add the candidate of a layer on device d with neurons on the CPU, and return its variable.

        Such a layer pays the round trip even without a cold neuron. A complete layer is a separate candidate,
        which keeps the relaxation of the program tight.
        """
        problem = self.problem
        device, rates = problem.rates.devices[d], problem.rates
        nothing = LayerPlacement(d, np.zeros(layer.n_ff, bool))
        attention = layer_time(layer, rates, nothing, problem.frequencies[i]).attention
        launch = device.ffn_launch + layer.shared_bytes / device.read_busy
        sync = device.sync + layer.shared_bytes / rates.cpu_read_busy
        sizes, order = self.sizes[i], problem.order[i]
        cold, hot = (group_sums(seconds[order], sizes) for seconds in problem.seconds_of_neurons(i, d))
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

    def run(self, bound: float | None) -> tuple[Candidate | None, str]:
        """Solve the program: return a candidate or None, and a message on how good it is.

        bound: seconds of a known placement, if any; the result must be better.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        problem = self.problem
        cost = np.array(self.cost)
        rows = list(self.rows)
        if bound is not None:
            # A solution must be better by the gap. Otherwise the greedy placement is as good as the optimum.
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
        candidate = self._candidate(found.x)
        if not problem.fits(candidate):  # because the program rounds
            return None, "what HiGHS found does not fit by a rounding"
        how = "optimal" if found.status == 0 else f"the best that HiGHS found in {TIME_LIMIT:.0f} s"
        return candidate, f"{how}, within {100 * max(found.mip_gap, self.gap):.2g}% of the least time (HiGHS)"

    def _candidate(self, x: np.ndarray) -> Candidate:
        candidate = []
        for i, layer in enumerate(self.problem.facts.layers):
            d = next(
                d for d in (CPU, *self.problem.usable) if (i, d) in self.on and x[self.on[i, d]].sum() > 0.5
            )
            if x[self.on[i, d][0]] > 0.5:
                candidate.append(LayerPlacement(d))
                continue
            counts = np.floor(x[self.groups[i, d].start : self.groups[i, d].stop] * self.sizes[i] + 1e-4)
            hot, order, at = np.zeros(layer.n_ff, bool), self.problem.order[i], 0
            for count, size in zip(counts.astype(int), self.sizes[i], strict=True):
                hot[order[at : at + count]] = True
                at += size
            candidate.append(LayerPlacement(d, None if hot.all() else hot))
        return candidate
