"""A weight matrix in device memory: quantised as in the file, with separate fields of blocks.

A GGUF block puts a scale before its codes (18 bytes for 32 weights of Q4_0). So codes are at unaligned
addresses, and neighbouring threads read with gaps. Here each field of the blocks is a matrix of its own. The
codes of a row are contiguous and aligned to 16 bytes, and scales are read separately. No number changes and
no byte is added.

    field       Q4_0   Q4_1   Q5_0   Q5_1   Q8_0   Q4_K           Q6_K
    codes       qs     qs     qs     qs     qs     qs             ql      [n_rows, bytes of codes]
    scales      d      d      d      d      d      d              d       float16 [n_rows, blocks]
    mins               m             m             dmin                   float16 [n_rows, blocks]
    high                      qh     qh                           qh      int32 [n_rows, blocks]; Q6_K: bytes
    sub_scales                                            scales  scales  bytes, 12 a block; Q6_K: int8, 16

MXFP4 (only for experts of a cache) has codes like Q4_0, which index a table, and an exponent byte as scale.

A byte of `codes` holds two weights HALF columns apart (formats/quants.py has the bit diagrams):

    byte c  →  columns 2 * HALF * (c // HALF) + c % HALF, the low nibble, and that + HALF, the high one
    HALF    =  16 (Q4_0, Q4_1, Q5_0, Q5_1), 32 (Q4_K), 64 (Q6_K)

Down projections of a plain file (formats/planes.py) are planes: codes by neuron, and scales that 32 neurons
share. `scales` is then [groups, n_cols], one value per column, and `group_of` has each neuron's row of it.
Input-major matrices, the transpose of some others, have the same form; their rows are inputs, and `mins` are
shared like scales. In Q4_K 256 inputs share a row of scales and of mins. Each 32 inputs also have a row of
`sub_scales` and a row of factors of the minimums in `high`, a byte each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hotset.backends.stage import SLICE_VALUES
from hotset.backends.triton.arena import Arena
from hotset.backends.triton.plugin import CAPABILITIES
from hotset.errors import UnsupportedModelError
from hotset.formats.channels import HALVES
from hotset.formats.planes import PLANE_GROUP
from hotset.formats.quants import TYPES, GGMLType, row_bytes
from hotset.offload.uploads import Lines

_FLOATS: dict[GGMLType, tuple[np.dtype, torch.dtype]] = {
    GGMLType.F32: (np.dtype("<f4"), torch.float32),
    GGMLType.F16: (np.dtype("<f2"), torch.float16),
    GGMLType.BF16: (np.dtype("<i2"), torch.bfloat16),  # NumPy has no bfloat16, so its bits are int16
}
# Type → field of DeviceMatrix → field of the block, and the dtype of its bytes.
_FIELDS: dict[GGMLType, dict[str, tuple[str, str]]] = {
    GGMLType.Q4_0: {"codes": ("qs", "u1"), "scales": ("d", "<f2")},
    GGMLType.Q4_1: {"codes": ("qs", "u1"), "scales": ("d", "<f2"), "mins": ("m", "<f2")},
    GGMLType.Q5_0: {"codes": ("qs", "u1"), "scales": ("d", "<f2"), "high": ("qh", "<i4")},
    GGMLType.Q5_1: {
        "codes": ("qs", "u1"),
        "scales": ("d", "<f2"),
        "mins": ("m", "<f2"),
        "high": ("qh", "<i4"),
    },
    GGMLType.Q8_0: {"codes": ("qs", "i1"), "scales": ("d", "<f2")},
    GGMLType.Q4_K: {
        "codes": ("qs", "u1"),
        "scales": ("d", "<f2"),
        "mins": ("dmin", "<f2"),
        "sub_scales": ("scales", "u1"),
    },
    GGMLType.Q6_K: {
        "codes": ("ql", "u1"),
        "scales": ("d", "<f2"),
        "high": ("qh", "u1"),
        "sub_scales": ("scales", "i1"),
    },
    GGMLType.MXFP4: {"codes": ("qs", "u1"), "scales": ("e", "u1")},
}
_K_GROUP = 256
FIELDS = ("codes", "scales", "mins", "high", "sub_scales")
EXPERT_TYPES = (*_FLOATS, *_FIELDS)
"""The tensor types that experts of a cache may have (exact.py)."""
SUPPORTED = CAPABILITIES.tensor_types
"""The tensor types that every product supports."""


@dataclass(frozen=True)
class WeightBlocks:
    """Rows in blocks of 32 weights, the form of the CPU's integer products (csrc/kernels/blocks.h).

    A weight is scale * sub_scale * q + min. q: whole numbers, float32 [n, blocks, 32]. scale, min: float32
    [n, blocks]. sub_scale: whole numbers [n, blocks, 2], one for each half of a block.
    """

    q: Tensor
    scale: Tensor
    min: Tensor | None = None
    sub_scale: Tensor | None = None

    def values(self) -> Tensor:
        """Decode the rows to float32 [n, blocks, 32], in the order of operations of formats/quants.py."""
        scale = self.scale[..., None]
        if self.sub_scale is not None:
            scale = (scale * self.sub_scale).repeat_interleave(16, dim=2)
        return scale * self.q if self.min is None else scale * self.q + self.min[..., None]


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix [n_rows, n_cols] of a GGUF type on one device. The module's docstring describes the fields."""

    type: GGMLType
    n_rows: int
    n_cols: int
    codes: Tensor
    scales: Tensor | None = None
    mins: Tensor | None = None
    high: Tensor | None = None
    sub_scales: Tensor | None = None
    group_of: Tensor | None = None  # int32 [n_rows], only for planes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        parts = [getattr(self, field.name) for field in fields(self)]
        return sum(part.numel() * part.element_size() for part in parts if isinstance(part, Tensor))

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row's codes."""
        return self.codes.shape[1] * self.codes.element_size()

    @classmethod
    def from_bytes(
        cls,
        data: Lines,
        type: GGMLType,
        n_rows: int,
        n_cols: int,
        device: torch.device | str,
        rows: np.ndarray | None = None,
        arena: Arena | None = None,
    ) -> DeviceMatrix:
        """Copy a matrix of a file, or its rows `rows`, to a device, some rows at a time.

        data: the bytes of n_rows rows, as in the file; an array may have any shape. rows: int64, the rows to
        copy, in this order. arena: device memory for a matrix that lives as long as the stage. Raises
        UnsupportedModelError for a type that no device kernel supports.
        """
        type = GGMLType(type)
        check_type(type)
        whole = data.reshape(n_rows, row_bytes(type, n_cols)) if isinstance(data, np.ndarray) else data
        n_kept = n_rows if rows is None else len(rows)
        parts: dict[str, Tensor] = {}
        step = max(SLICE_VALUES // n_cols, 1)
        # An empty selection also takes one iteration, so that the parts get their shapes.
        for first in range(0, max(n_kept, 1), step):
            last = min(first + step, n_kept)
            chunk = whole[first:last] if rows is None else whole[rows[first:last]]
            for name, piece in taken_apart(np.ascontiguousarray(chunk), type).items():
                if name not in parts:
                    parts[name] = _new((n_kept, piece.shape[1]), piece.dtype, device, arena)
                parts[name][first:last].copy_(piece)
        return cls(type, n_kept, n_cols, **parts)

    @classmethod
    def empty(cls, type: int, n_rows: int, n_cols: int, device: torch.device | str) -> DeviceMatrix:
        """Return a matrix of zero bytes, whose rows `put` writes later.

        Raises UnsupportedModelError for a type outside EXPERT_TYPES.
        """
        type = GGMLType(type)
        if type not in EXPERT_TYPES:
            raise UnsupportedModelError(
                f"experts of type {type.name} cannot be computed on a GPU; use device='cpu'"
            )
        row = taken_apart(np.zeros((1, row_bytes(type, n_cols)), np.uint8), type)
        parts = {
            name: torch.zeros((n_rows, piece.shape[1]), dtype=piece.dtype, device=device)
            for name, piece in row.items()
        }
        return cls(type, n_rows, n_cols, **parts)

    def put(self, first: int, rows: np.ndarray) -> None:
        """Write rows in the layout of the file, uint8 [n, row bytes], to the rows from `first` on."""
        for name, piece in taken_apart(np.ascontiguousarray(rows), self.type).items():
            getattr(self, name)[first : first + len(rows)].copy_(piece)

    @classmethod
    def from_planes(
        cls,
        codes: Lines,
        scales: np.ndarray,
        device: torch.device | str,
        rows: np.ndarray | None = None,
        arena: Arena | None = None,
    ) -> DeviceMatrix:
        """Copy the neuron-major down projection of a plain file, and only those scales that `rows` need.

        codes: bytes [n_ff, n_cols / 2] (Q4_0) or [n_ff, n_cols] (Q8_0). scales: float16 [n_ff / 32, n_cols].
        rows: int64, neurons to copy, in this order; None copies all (`codes` must be an array then). arena:
        as in from_bytes.
        """
        n_cols = scales.shape[1]
        if rows is None:
            assert isinstance(codes, np.ndarray)
            rows = np.arange(len(codes))
        rows = np.asarray(rows, np.int64)
        groups, group_of = np.unique(rows // PLANE_GROUP, return_inverse=True)
        width = codes[rows[:1]].shape[1]
        is_q8 = width == n_cols
        out = _new((len(rows), width), torch.int8 if is_q8 else torch.uint8, device, arena)

        def there(values: np.ndarray) -> Tensor:
            host = torch.from_numpy(values)
            return _new(tuple(host.shape), host.dtype, device, arena).copy_(host)

        step = max(SLICE_VALUES // n_cols, 1)
        for first in range(0, len(rows), step):
            some = codes[rows[first : first + step]].view(np.int8 if is_q8 else np.uint8)
            out[first : first + step].copy_(torch.from_numpy(some))
        return cls(
            GGMLType.Q8_0 if is_q8 else GGMLType.Q4_0,
            len(rows),
            n_cols,
            out,
            scales=there(scales.view(np.float16)[groups]),
            group_of=there(group_of.reshape(-1).astype(np.int32)),
        )

    @classmethod
    def input_major(
        cls, n_in: int, n_out: Sequence[int], load: Callable[[int], DeviceMatrix], arena: Arena | None = None
    ) -> DeviceMatrix:
        """Join matrices of one input and type input-major, a row per input: [n_in, sum of n_out].

        n_out: rows of each matrix. load: loads one matrix, which is dropped before the next.
        can_be_input_major_on_device must be true. arena: as in from_bytes. Values stay bitwise identical.
        """
        made: DeviceMatrix | None = None
        first = 0
        for i, n in enumerate(n_out):
            m = load(i)
            if made is None:
                made = m.empty_by_channel(n_in, sum(n_out), arena)
            m.transpose_into(made, first)
            first += n
        assert made is not None
        return made

    def empty_by_channel(self, n_in: int, n_out: int, arena: Arena | None) -> DeviceMatrix:
        """Allocate an uninitialised input-major matrix of this matrix's type, [n_in, n_out]."""
        type, groups, wide = self.type, n_in // PLANE_GROUP, self.scales

        def new(n_rows: int, n_cols: int, dtype: torch.dtype) -> Tensor:
            return _new((n_rows, n_cols), dtype, self.device, arena)

        codes = new(n_in, n_out * self.codes.shape[1] // n_in, self.codes.dtype)
        if type in _FLOATS:
            return DeviceMatrix(type, n_in, n_out, codes)
        assert wide is not None
        group_of = torch.arange(n_in, dtype=torch.int32, device=self.device) // PLANE_GROUP
        is_k = type == GGMLType.Q4_K
        return DeviceMatrix(
            type, n_in, n_out, codes,
            scales=new(wide.shape[1], n_out, wide.dtype),
            mins=None if self.mins is None else new(wide.shape[1], n_out, wide.dtype),
            high=new(groups, n_out, torch.uint8) if is_k else None,
            sub_scales=new(groups, n_out, torch.uint8) if is_k else None,
            group_of=_new((n_in,), torch.int32, self.device, arena).copy_(group_of),
        )  # fmt: skip

    def transpose_into(self, to: DeviceMatrix, first: int) -> None:
        """Write the transpose to the columns of `to` from `first` on."""
        n_in, n_out = to.n_rows, self.n_rows
        width = self.codes.shape[1]  # elements of n_in columns; a byte may hold two columns
        own = slice(first * width // n_in, (first + n_out) * width // n_in)
        step = max(SLICE_VALUES // n_out // _K_GROUP, 1) * _K_GROUP
        half = HALVES.get(self.type)
        for begin in range(0, n_in, step):
            rows = slice(begin, min(begin + step, n_in))
            part = self.codes[:, rows.start * width // n_in : rows.stop * width // n_in]
            if half is None:
                to.codes[rows, own] = part.T
                continue
            pairs = _nibbles(part, half).T.reshape(rows.stop - rows.start, -1, 2, half)
            to.codes[rows, own] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(pairs), -1)
        columns = slice(first, first + n_out)
        for name in ("scales", "mins"):
            if (values := getattr(self, name)) is not None:
                getattr(to, name)[:, columns] = values.T
        if self.type == GGMLType.Q4_K:
            assert to.sub_scales is not None
            assert to.high is not None
            for plane, values in zip((to.sub_scales, to.high), self._sub_scales(), strict=True):
                plane[:, columns] = values.reshape(n_out, -1).T

    def _sub_scales(self) -> tuple[Tensor, Tensor]:
        return _sub_scales_q4_k({name: getattr(self, name) for name in _FIELDS[self.type]})

    def values(self, rows: slice | Tensor) -> Tensor:
        """Decode some rows to float32 [n, n_cols], bitwise identical to the file's decoder.

        rows: a slice, or indices int64 [n] on the same device.
        """
        if self.type in _FLOATS:
            return self.codes[rows].float()
        if self.group_of is not None:
            return self._values_of_planes(self.codes[rows], self.group_of[rows].long())
        return self.blocks(rows).values().reshape(-1, self.n_cols)

    def _values_of_planes(self, codes: Tensor, group: Tensor) -> Tensor:
        half, coarse = HALVES.get(self.type), group // 8 if self.type == GGMLType.Q4_K else group
        assert self.scales is not None
        scale, q = (
            self.scales[coarse].float(),
            codes.float() if half is None else _nibbles(codes, half).float(),
        )
        if self.sub_scales is not None and self.high is not None and self.mins is not None:
            scale = scale * self.sub_scales[group].float()
            return scale * q - self.mins[coarse].float() * self.high[group].float()
        if self.mins is not None:
            return scale * q + self.mins[group].float()
        return scale * (q - 8 if half else q)

    @property
    def is_float(self) -> bool:
        """Return whether the weights are floats, not blocks."""
        return self.type in _FLOATS

    def blocks(self, rows: slice | Tensor) -> WeightBlocks:
        """Return the blocks of some rows of a quantised matrix that has no planes. rows: as in values."""
        part = {name: getattr(self, name)[rows] for name in _FIELDS[self.type]}
        return _BLOCKS[self.type](part)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode the whole matrix, [n_rows, n_cols]."""
        out = torch.empty((self.n_rows, self.n_cols), dtype=dtype, device=self.device)
        for rows in self.slices():
            out[rows] = self.values(rows).to(dtype)
        return out

    def slices(self) -> list[slice]:
        """Split the rows so that each slice decodes to a temporary of some megabytes."""
        step = max(SLICE_VALUES // self.n_cols, 1)
        return [slice(i, min(i + step, self.n_rows)) for i in range(0, self.n_rows, step)]


@dataclass(frozen=True)
class HostRows:
    """A matrix, or a bias (F32, one row), of each expert of a layer in host memory.

    rows: for each expert uint8 [n_rows, row bytes], in memory or read on access. addresses: int64 [n_expert]
    on the device, the device's addresses of the first bytes; 0 for rows that are read on access.
    """

    type: GGMLType
    rows: Sequence[np.ndarray]
    addresses: Tensor

    @cached_property
    def n_bytes(self) -> int:
        """Return the bytes of one expert."""
        return self.rows[0].nbytes


def _new(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, arena: Arena | None
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device) if arena is None else arena.empty(shape, dtype)


def block_fields(type: GGMLType) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the bytes of a block in a file, and each field's first byte and length.

    The block of a float type is one weight.
    """
    if type in _FLOATS:
        size = _FLOATS[type][0].itemsize
        return size, {"codes": (0, size)}
    layout = TYPES[type].block
    assert layout is not None
    assert layout.fields is not None
    return layout.itemsize, {
        name: (int(layout.fields[field][1]), layout[field].itemsize)
        for name, (field, _) in _FIELDS[type].items()
    }


def check_type(type: GGMLType) -> None:
    """Raise UnsupportedModelError for a tensor type that no device kernel supports."""
    if type not in SUPPORTED:
        names = ", ".join(TYPES[t].name for t in sorted(SUPPORTED))
        raise UnsupportedModelError(
            f"tensors of type {type.name} cannot be computed on a GPU; use a file of {names}, or "
            "device='cpu'."
        )


def taken_apart(rows: np.ndarray, type: GGMLType) -> dict[str, Tensor]:
    """Split rows of blocks, uint8 [n, row bytes], into the fields of DeviceMatrix.

    The fields are [n, width], on the host.
    """
    if type in _FLOATS:
        dtype, torch_dtype = _FLOATS[type]
        # Copy, because a mapped file is read-only.
        return {"codes": torch.from_numpy(rows.view(dtype).copy()).view(torch_dtype)}
    layout = TYPES[type].block
    assert layout is not None
    blocks = rows.reshape(-1).view(layout)
    n_blocks = rows.shape[1] // layout.itemsize
    parts = {}
    for name, (field, seen_as) in _FIELDS[type].items():
        n_bytes = n_blocks * layout[field].itemsize
        piece = np.array(blocks[field]).reshape(-1).view(np.uint8).reshape(len(rows), n_bytes)
        parts[name] = torch.from_numpy(piece.view(np.dtype(seen_as)))
    return parts


# ---- fields of n rows → whole numbers and scales ----------------------------------------------------------


def _nibbles(codes: Tensor, half: int) -> Tensor:
    """Unpack uint8 [n, m] to uint8 [n, 2m], columns in order. Low and high nibbles are `half` apart."""
    packed = codes.reshape(len(codes), -1, half)
    return torch.stack([packed & 15, packed >> 4], dim=2).reshape(len(codes), -1)


def _by_blocks(codes: Tensor, part: dict[str, Tensor]) -> Tensor:
    return codes.reshape(*part["scales"].shape, -1).float()


def _five_bits(part: dict[str, Tensor]) -> Tensor:
    shifts = torch.arange(32, dtype=torch.int32, device=part["high"].device)
    fifth = (part["high"][..., None] >> shifts) & 1
    return _by_blocks(_nibbles(part["codes"], 16), part) + 16 * fifth


def _column(part: dict[str, Tensor], name: str) -> Tensor:
    return part[name].float()[..., None]


def _sub_scales_q4_k(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the factors of scales and of minimums, uint8 [n, blocks, 8] each."""
    packed = part["sub_scales"].reshape(*part["scales"].shape, 3, 4)
    first, second, third = packed.unbind(2)
    scale = torch.cat([first & 63, (third & 15) | (first >> 6) << 4], dim=2)
    return scale, torch.cat([second & 63, (third >> 4) | (second >> 6) << 4], dim=2)


def _scales_q4_k(part: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return scales and minimums, float32 [n, blocks, 8] each."""
    scale, minimum = _sub_scales_q4_k(part)
    return _column(part, "scales") * scale.float(), _column(part, "mins") * minimum.float()


def _codes_q6_k(part: dict[str, Tensor]) -> Tensor:
    """Return the codes of each sub-block plus 32, uint8 [n, blocks, 16, 16]."""
    shape = *part["scales"].shape, 16, 16
    high = part["high"].reshape(*part["scales"].shape, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=high.device)[:, None]
    high = ((high >> shifts) & 3).reshape(shape)
    return _nibbles(part["codes"], 64).reshape(shape) | high << 4


def _blocks_q4_0(part: dict[str, Tensor]) -> WeightBlocks:
    return WeightBlocks(_by_blocks(_nibbles(part["codes"], 16), part) - 8, part["scales"].float())


def _blocks_q4_1(part: dict[str, Tensor]) -> WeightBlocks:
    return WeightBlocks(
        _by_blocks(_nibbles(part["codes"], 16), part), part["scales"].float(), part["mins"].float()
    )


def _blocks_q5_0(part: dict[str, Tensor]) -> WeightBlocks:
    return WeightBlocks(_five_bits(part) - 16, part["scales"].float())


def _blocks_q5_1(part: dict[str, Tensor]) -> WeightBlocks:
    return WeightBlocks(_five_bits(part), part["scales"].float(), part["mins"].float())


def _blocks_q8_0(part: dict[str, Tensor]) -> WeightBlocks:
    return WeightBlocks(_by_blocks(part["codes"], part), part["scales"].float())


def _blocks_q4_k(part: dict[str, Tensor]) -> WeightBlocks:
    scale, minimum = _scales_q4_k(part)
    n = len(scale)
    q = _nibbles(part["codes"], 32).reshape(n, -1, 32).float()
    return WeightBlocks(q, scale.reshape(n, -1), -minimum.reshape(n, -1))


def _blocks_q6_k(part: dict[str, Tensor]) -> WeightBlocks:
    n = len(part["scales"])
    scale = part["scales"].float().repeat_interleave(8, dim=1)
    return WeightBlocks(
        _codes_q6_k(part).reshape(n, -1, 32).float() - 32,
        scale,
        sub_scale=part["sub_scales"].reshape(n, -1, 2).float(),
    )


# Twice the values of four bits of MXFP4: a sign, two bits of exponent, one bit of mantissa.
_FP4 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


def _blocks_mxfp4(part: dict[str, Tensor]) -> WeightBlocks:
    codes, exponents = part["codes"], part["scales"].to(torch.int32)
    numbers = torch.tensor(_FP4, device=codes.device)[_nibbles(codes, 16).long()]
    # 2^(e - 128) by its bits; the two smallest are subnormal.
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1) << 23)
    return WeightBlocks(_by_blocks(numbers, part), bits.to(torch.int32).view(torch.float32))


_BLOCKS: dict[GGMLType, Callable[[dict[str, Tensor]], WeightBlocks]] = {
    GGMLType.Q4_0: _blocks_q4_0,
    GGMLType.Q4_1: _blocks_q4_1,
    GGMLType.Q5_0: _blocks_q5_0,
    GGMLType.Q5_1: _blocks_q5_1,
    GGMLType.Q8_0: _blocks_q8_0,
    GGMLType.Q4_K: _blocks_q4_k,
    GGMLType.Q6_K: _blocks_q6_k,
    GGMLType.MXFP4: _blocks_mxfp4,
}
