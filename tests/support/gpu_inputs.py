"""Inputs of the GPU backend's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from make_blocks import random_blocks

from hotset.backends.base import BLOCK_SIZE
from hotset.backends.triton import fallback
from hotset.backends.triton import matrix as matrices
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.formats.quants import GGMLType, dequantize, row_bytes


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weights(type_: GGMLType, n_rows: int, n_cols: int) -> DeviceMatrix:
    """Return a matrix with the right fields, without memory."""
    row = matrices.taken_apart(np.zeros((1, row_bytes(type_, n_cols)), np.uint8), type_)
    parts = {name: new(n_rows, part.shape[1], dtype=part.dtype) for name, part in row.items()}
    return DeviceMatrix(type_, n_rows, n_cols, **parts)


EPS = float(np.finfo(np.float32).eps)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
K_TYPES = (GGMLType.Q4_K, GGMLType.Q6_K)


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def randn(*shape: int, seed: int = 0) -> np.ndarray:
    return rng_of(*shape, seed).standard_normal(shape).astype(np.float32)


def input_major(type_: GGMLType, widths: Sequence[int], n_in: int) -> tuple[DeviceMatrix, np.ndarray]:
    """Return input-major matrices of one input, and their values [n_in, sum of widths]."""
    parts = [matrix(type_, n, n_in, seed) for seed, n in enumerate(widths)]
    made = DeviceMatrix.input_major(n_in, widths, lambda i: parts[i][0])
    return made, np.concatenate([w for _, w in parts]).T


def matrix(type_: GGMLType, n_rows: int, n_cols: int, seed: int = 0) -> tuple[DeviceMatrix, np.ndarray]:
    """Return a matrix and its values in float64."""
    data = random_blocks(type_, n_rows, n_cols, rng_of(n_rows, n_cols, seed)).reshape(-1).view(np.uint8)
    m = DeviceMatrix.from_bytes(data, type_, n_rows, n_cols, "cpu")
    return m, dequantize(data, type_, (n_cols, n_rows)).astype(np.float64)


def token_threshold(n: int, threshold: float) -> fallback.TokenThreshold:
    """Return a threshold from which every third token is exempt."""
    return fallback.TokenThreshold(torch.from_numpy((np.arange(n) % 3 > 0).astype(np.int32)), threshold)


class Cache:
    """KV blocks in random order for sequences of given lengths, and the reference's attention over them."""

    def __init__(self, lengths: list[int], n_head_kv: int, dim: int, dim_v: int, dtype: torch.dtype) -> None:
        needed = [-(-n // BLOCK_SIZE) for n in lengths]
        free = rng_of(sum(lengths)).permutation(sum(needed) + 2)
        self.tables = np.full((len(lengths), max(needed) + 1), -1, np.int32)
        for row, n in zip(self.tables, needed, strict=True):
            row[:n], free = free[:n], free[n:]
        n_blocks = sum(needed) + 2
        self.k = torch.full((n_blocks, n_head_kv, BLOCK_SIZE, dim), float("nan"), dtype=dtype)
        self.v = torch.full((n_blocks, n_head_kv, BLOCK_SIZE, dim_v), float("nan"), dtype=dtype)
        self.lengths = lengths

    def tokens(self, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sequences and positions of the latest `last` tokens of each sequence."""
        pairs = [(s, p) for s, n in enumerate(self.lengths) for p in range(max(n - last, 0), n)]
        sequences, positions = np.array(pairs, np.int32).T.copy()
        return torch.from_numpy(sequences), torch.from_numpy(positions)
