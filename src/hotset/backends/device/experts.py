"""The experts of MoE layers as device backends read them, and which of them an expert cache may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hotset.formats.gguf import TensorInfo
from hotset.formats.quants import GGMLType
from hotset.formats.source import WeightSource
from hotset.model.operations import ExpertLinear, ExpertSum, Ffn, Route
from hotset.offload.expert_cache import ACTIVATIONS, parts_of
from hotset.offload.uploads import matrix_rows


def expert_rows(
    source: WeightSource, op: ExpertLinear | ExpertSum, id: int, there: np.ndarray | None = None
) -> np.ndarray:
    """Return the bytes of the rows that a product uses of an expert's matrix, uint8 [rows, bytes of a row].

    there: the bytes of all its rows, if they are already in memory.
    """
    info = source.tensors[op.weights[0]]
    stored = info.shape[1]
    if there is None:
        part = (op.weights[0], id, 1) if len(op.weights) == 1 else (op.weights[id], 0, stored)
        there = matrix_rows(source, [part], info.nbytes // info.shape[-1])[:]
    rows = there.reshape(stored, -1)
    return rows if isinstance(op, ExpertSum) else rows[op.first_row : op.first_row + op.n_rows]


def why_not_cached(
    ffn: Ffn, tensors: Mapping[str, TensorInfo], types: Collection[GGMLType], *, neuron_major: bool = False
) -> str:
    """Return which part of a layer's experts would differ in its last bits between a device and the CPU.

    The text is empty if nothing would differ. types: the tensor types of experts that the device computes
    bitwise like the CPU. neuron_major: whether it does so for neuron-major down projections.
    """
    parts = parts_of(ffn).values()
    if not isinstance(ffn.select, Route) or ffn.top_k is not None or ffn.sub_norm is not None:
        return "experts with predictors, or with a norm or a selection among their neurons"
    if not neuron_major and any(isinstance(op, ExpertSum) and op.neuron_major for op in parts):
        return "neuron-major down projections"
    if any(len({tensors[name].type for name in op.weights}) > 1 for op in parts):
        return "experts of several types"
    others = {tensors[name].type for op in parts for name in op.weights}.difference(types)
    if others:
        return f"experts of the type {min(type_.name for type_ in others)}"
    kinds = [op.kind for op in (ffn.gate_act, ffn.up_act) if op is not None]
    return next((f"the activation {kind}" for kind in kinds if kind not in ACTIVATIONS), "")
