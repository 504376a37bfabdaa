"""What a model needs on a device, in bytes, before anything is loaded there.

A budget is a promise: weights, keys and values, workspace and the device's own context together never exceed
it. So everything that a backend will hold is counted here, from the graph and the tensor table alone: no
weight is read, nothing of torch is imported, and Python's integers do not overflow at 175 billion parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.formats.quants import GGMLType, row_bytes


def matrix_bytes(type: GGMLType, n_rows: int, n_cols: int) -> int:
    """Bytes that n_rows rows of a GGUF matrix take on a device: as many as in the file.

    Codes and scales are split there (backends/gpu/matrix.py), which moves bytes and adds none.
    """
    return int(n_rows) * row_bytes(type, int(n_cols))


@dataclass(frozen=True)
class DeviceBudget:
    """Planned bytes of one device, by kind, and the limit that they stay within.

    weights: of layers and output: attention, norms, predictors, FFNs that are not split. neurons: the rows of
    hot neurons. kv: keys and values of its layers. workspace: intermediates, logits, what streams through.
    context: what the device's runtime takes before the first tensor.
    """

    device: str
    limit: int
    weights: int = 0
    neurons: int = 0
    kv: int = 0
    workspace: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.neurons + self.kv + self.workspace + self.context


@dataclass(frozen=True)
class Budget:
    """Planned bytes: of each device, and of weights that the CPU reads where they are mapped."""

    devices: tuple[DeviceBudget, ...]
    host: int = 0
