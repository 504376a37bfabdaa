"""Matrices that a checkpoint stores as FP8 (E4M3) with scales, decoded while they are read.

DeepSeek, Qwen and MiniMax publish blocks of 128 rows and columns with a scale each. It is `weight_scale_inv`,
which is a factor in spite of its name, or in DeepSeek V4 `scale`, a power of two. compressed-tensors, FBGEMM
and ModelOpt have a scale for a matrix or for each of its rows (`weight_scale`). Scales of activations are for
engines that compute in FP8, and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hotset.convert.mxfp4 import EXPONENTS, PAIRS, matrix_of
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.torch_file import to_floats

CODES = np.dtype([("e4m3", "u1")])  # sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinity
SCALES = (".weight_scale_inv", ".weight_scale", ".scale")
_UNUSED = re.compile(r".*\.(input_scale|input_global_scale|output_scale|[kqv]_scale|activation_scale)")
_BLOCK = (128, 128)


def _values() -> np.ndarray:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    positive = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    positive[127] = np.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


VALUES = _values()
POWERS = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # of EXPONENTS


@dataclass(frozen=True)
class Scaled:
    """A matrix whose rows and columns can be selected as in an array, without decoding it.

    Other attributes of arrays raise UnsupportedModelError. name: of the tensor. codes: CODES [n_rows,
    n_columns]. scales: float32 [blocks of rows, blocks of columns]; rows, columns: the block of each one.
    """

    name: str
    codes: np.ndarray
    scales: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def ndim(self) -> int:
        return self.codes.ndim

    @property
    def dtype(self) -> np.dtype:
        return self.codes.dtype

    @property
    def size(self) -> int:
        return self.codes.size

    @property
    def T(self) -> Scaled:  # noqa: N802 - NumPy's name
        return Scaled(self.name, self.codes.T, self.scales.T, self.columns, self.rows)

    def __len__(self) -> int:
        return len(self.codes)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python and NumPy look for these
            raise AttributeError(attribute)
        raise self._unsupported()

    def _unsupported(self) -> UnsupportedModelError:
        return UnsupportedModelError(f"the tensor {self.name} is FP8, which is not supported of this tensor")

    def __getitem__(self, key: Any) -> Scaled:
        """Select rows, or (rows, columns); an ellipsis before them works as for two dimensions."""
        keys = key if isinstance(key, tuple) else (key,)
        if keys[0] is Ellipsis:
            keys = (slice(None), *keys[1:])[-2:]
        rows, columns = (*keys, slice(None))[:2]
        if isinstance(rows, int) or isinstance(columns, int):
            raise self._unsupported()
        codes = self.codes[rows][:, columns]
        return Scaled(self.name, codes, self.scales, self.rows[rows], self.columns[columns])

    def reshape(self, n: int, *_: int) -> list[Scaled]:
        """Return n equal parts of the rows, the only reshape that a matrix of heads needs."""
        if n < 1 or len(self) % n:
            raise self._unsupported()
        size = len(self) // n
        return [self[i * size : (i + 1) * size] for i in range(n)]

    def floats(self) -> np.ndarray:
        """Return the decoded values, float32."""
        found: np.ndarray = VALUES[self.codes["e4m3"]] * self.scales[self.rows][:, self.columns]
        return found


def is_fp8(quantised: object) -> bool:
    """Return whether a quantization_config describes FP8 weights with scales."""
    if not isinstance(quantised, dict):
        return False
    match quantised.get("quant_method"):
        case "fp8":
            return quantised.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn")
        case "fbgemm_fp8":
            return True
        case "compressed-tensors":
            return quantised.get("format") == "float-quantized"
        case "modelopt":
            return quantised.get("quant_algo") == "FP8"
    return False


def block_of(quantised: object) -> tuple[int, int]:
    """Return the rows and columns of a block with one scale."""
    found = quantised.get("weight_block_size") if isinstance(quantised, dict) else None
    if found is None and isinstance(quantised, dict):
        groups = quantised.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            found = weights.get("block_structure") if isinstance(weights, dict) else None
    if found is None:
        return _BLOCK
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(n) is int and 0 < n < 1 << 31 for n in found)
    ):
        raise FormatError(
            f"config.json says that blocks of FP8 are {str(found)[:60]}: two whole numbers are needed"
        )
    return found[0], found[1]


def scaled(tensors: Mapping[str, np.ndarray], block: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the tensors, with FP8 and FP4 ones joined to their scales, and without the scales."""
    found, used = {}, set()
    for name, values in tensors.items():
        if values.dtype == PAIRS:
            exponents = name.removesuffix(".weight") + ".scale"
            if exponents not in tensors or tensors[exponents].dtype != EXPONENTS:
                raise UnsupportedModelError(
                    f"the tensor {name} is I8 without a scale in F8_E8M0, which is not supported"
                )
            used.add(exponents)
            found[name] = cast("np.ndarray", matrix_of(name, values, tensors[exponents]))
        elif values.dtype == CODES:
            stem = name.removesuffix(".weight")
            scale = next((stem + kind for kind in SCALES if stem + kind in tensors), None)
            if scale is None or scale == name or values.ndim != 2:
                raise UnsupportedModelError(
                    f"the tensor {name} is FP8 in {values.ndim} dimensions"
                    f"{' without a weight_scale' if scale is None else ''}, which is not supported"
                )
            used.add(scale)
            matrix = _under(name, values, tensors[scale], block)
            found[name] = cast("np.ndarray", matrix)  # it has the attributes that converting needs
    for name, values in tensors.items():
        if name not in found and name not in used and not _UNUSED.fullmatch(name):
            if values.dtype == EXPONENTS:
                raise UnsupportedModelError(
                    f"the tensor {name} is F8_E8M0 and no scale of one in FP8 or FP4, which is not supported"
                )
            found[name] = values
    return found


def _under(name: str, codes: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> Scaled:
    n_rows, n_columns = codes.shape
    rows, columns = np.zeros(n_rows, np.int64), np.zeros(n_columns, np.int64)
    in_blocks = scales.dtype == EXPONENTS
    scales = POWERS[scales["e8m0"]] if in_blocks else to_floats(np.ascontiguousarray(scales))
    if scales.size == 1 and not in_blocks:
        return Scaled(name, codes, scales.reshape(1, 1), rows, columns)
    if scales.shape in ((n_rows,), (n_rows, 1)) and n_rows > 1 and not in_blocks:
        return Scaled(name, codes, scales.reshape(-1, 1), np.arange(n_rows), columns)
    if scales.shape != (-(-n_rows // block[0]), -(-n_columns // block[1])):
        raise FormatError(
            f"the tensor {name} is {list(codes.shape)} and its scales {list(scales.shape)}, for blocks of "
            f"{block[0]} by {block[1]}; download the checkpoint again"
        )
    return Scaled(name, codes, scales, np.arange(n_rows) // block[0], np.arange(n_columns) // block[1])
