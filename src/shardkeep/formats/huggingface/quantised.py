# SPDX-License-Identifier: Apache-2.0
"""Quantised weights as what they stand for: worked out when read, and only what is wanted.

Two ways of storing them are known, by the names and types of tensors. `weight` of float8_e4m3fn
with `weight_scale_inv`, a factor for each block of 128 by 128 (DeepSeek). `x_blocks` of bytes with
two 4-bit floats each and `x_scales`, an exponent for 32 of them (MXFP4, gpt-oss): that is `x`, of
which transformers keeps the last two dimensions exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from shardkeep.dtypes import lookup
from shardkeep.errors import FormatError
from shardkeep.foreign.boxes_read import read_box
from shardkeep.foreign.found import Raw, StoredTensor, whole
from shardkeep.formats.huggingface.places import Home
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = ["Target", "dequantised"]

Target = Literal["bfloat16", "float16", "float32"]
Ints = tuple[int, ...]
Array = npt.NDArray[Any]

SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Elements of MXFP4 that share an exponent, in half as many bytes."""
AT_ONCE = 1 << 20
"""Elements that are worked out together, so that what they are in between stays small."""


def dequantised(
    state: Mapping[str, StoredTensor], home: Home, target: Target
) -> dict[str, StoredTensor]:
    """The same tensors, with those that are quantised in place of their blocks and scales."""
    if target not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dequantise is {target!r}; use 'bfloat16', 'float16' or 'float32'")
    store, block = LocalStore(home.root), _block_size(home)
    out: dict[str, StoredTensor] = {}
    for name, tensor in state.items():
        scales = state.get(name + SCALE)
        exponents = state.get(name.removesuffix(BLOCKS) + SCALES)
        if name.endswith(SCALE) and _is_fp8(state.get(name.removesuffix(SCALE))):
            continue
        if name.endswith(SCALES) and _is_bytes(state.get(name.removesuffix(SCALES) + BLOCKS)):
            continue
        if _is_fp8(tensor) and scales is not None:
            out[name] = _scaled(name, tensor, scales, store, block, target)
        elif name.endswith(BLOCKS) and _is_bytes(tensor) and exponents is not None:
            bare = name.removesuffix(BLOCKS)
            if bare in state:
                raise FormatError(f"{home.given} has both {bare} and {name}")
            out[bare] = _packed(name, tensor, exponents, store, target)
        else:
            out[name] = tensor
    return out


def _is_fp8(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.dtype == "float8_e4m3fn"


def _is_bytes(tensor: StoredTensor | None) -> bool:
    return tensor is not None and tensor.dtype == "uint8"


def _block_size(home: Home) -> tuple[int, int]:
    """Of fp8 weights: as the model's configuration says, if it is there, or 128 by 128."""
    if not home.is_file and "config.json" in home.names():
        config: Any = home.read_json("config.json").get("quantization_config")
        size = config.get("weight_block_size") if isinstance(config, dict) else None
        if isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size):
            rows, columns = size
            if min(rows, columns) > 0:
                return rows, columns
    return 128, 128


@dataclass(frozen=True)
class _Stored:
    """A tensor that lies in one file."""

    store: LocalStore
    place: Raw
    dtype: np.dtype[Any]
    shape: Ints

    @classmethod
    def of(cls, name: str, tensor: StoredTensor, store: LocalStore) -> _Stored:
        if len(tensor.parts) != 1 or not isinstance(tensor.parts[0].place, Raw):
            raise FormatError(
                f"{name} is quantised, and empty or in several pieces; read it without dequantise"
            )
        return cls(store, tensor.parts[0].place, lookup(tensor.dtype).to_numpy(), tensor.shape)

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        with storage_errors(f"opening {self.store.root / self.place.file}"):
            file = self.store.open(self.place.file)
        try:
            return read_box(file, self.place.start, self.dtype, self.shape, offsets, sizes)
        finally:
            file.close()


def _scaled(
    name: str,
    tensor: StoredTensor,
    scales: StoredTensor,
    store: LocalStore,
    block: tuple[int, int],
    target: Target,
) -> StoredTensor:
    shape = tensor.shape
    expected = (*shape[:-2], *(-(-n // step) for n, step in zip(shape[-2:], block, strict=False)))
    if len(shape) < 2 or scales.shape != expected or lookup(scales.dtype).kind != "float":
        raise FormatError(
            f"{name} of shape {shape} has scales of shape {scales.shape} and type {scales.dtype}; "
            f"for blocks of {block[0]} by {block[1]} they must be floats of shape {expected}"
        )
    place = _Scaled(
        _Stored.of(name, tensor, store), _Stored.of(name + SCALE, scales, store), block, target
    )
    return whole(target, shape, place)


@dataclass(frozen=True)
class _Scaled:
    """fp8 weights times the factor of their block."""

    weights: _Stored
    scales: _Stored
    block: tuple[int, int]
    target: str

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """Worked out some rows at a time."""
        out = np.empty(sizes, lookup(self.target).to_numpy())
        step = max(1, AT_ONCE // max(1, sizes[-1]))
        for index in np.ndindex(sizes[:-2]):
            lead = tuple(at + n for at, n in zip(offsets[:-2], index, strict=True))
            for low in range(0, sizes[-2], step):
                rows = min(step, sizes[-2] - low)
                box = (offsets[-2] + low, offsets[-1]), (rows, sizes[-1])
                out[(*index, slice(low, low + rows))] = self._rows(lead, *box)
        return _bits(out)

    def _rows(self, lead: Ints, offsets: tuple[int, int], sizes: tuple[int, int]) -> Array:
        ones = (1,) * len(lead)
        codes = self.weights.read((*lead, *offsets), (*ones, *sizes)).reshape(sizes)
        first = [at // step for at, step in zip(offsets, self.block, strict=True)]
        counts = [
            (at + n - 1) // step + 1 - low
            for at, n, step, low in zip(offsets, sizes, self.block, first, strict=True)
        ]
        scales = self.scales.read((*lead, *first), (*ones, *counts)).reshape(counts)
        factors = scales.astype(np.float32)
        for dim in (0, 1):
            # Each factor as often as its block has rows or columns in the box.
            edges = (first[dim] + np.arange(counts[dim] + 1)) * self.block[dim] - offsets[dim]
            factors = np.repeat(factors, np.diff(edges.clip(0, sizes[dim])), axis=dim)
        values = _fp8_values()[codes.view(np.uint8)]
        with np.errstate(all="ignore"):
            values *= factors
        return _cast(values, self.target)


def _packed(
    name: str, tensor: StoredTensor, scales: StoredTensor, store: LocalStore, target: Target
) -> StoredTensor:
    shape = tensor.shape
    if len(shape) < 2 or shape[-1] != GROUP // 2 or scales.shape != shape[:-1]:
        raise FormatError(
            f"{name} of shape {shape} and its scales of shape {scales.shape} are not MXFP4: "
            f"{GROUP // 2} bytes for each scale"
        )
    if not _is_bytes(scales):
        raise FormatError(f"{name}: its scales are {scales.dtype}, not uint8")
    blocks = _Stored.of(name, tensor, store)
    place = _Packed(blocks, _Stored.of(name, scales, store), target)
    flat = (*shape[:-2], shape[-2] * GROUP)
    if len(flat) == 3:
        return whole(target, (flat[0], flat[2], flat[1]), _Transposed(place))
    return whole(target, flat, place)


@dataclass(frozen=True)
class _Packed:
    """4-bit floats, two in a byte, the lower half first, times a power of two for each group."""

    blocks: _Stored
    scales: _Stored
    target: str

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """Worked out some rows at a time."""
        out = np.empty(sizes, lookup(self.target).to_numpy())
        if not sizes[:-1]:
            out[...] = self._rows(offsets, sizes)
            return _bits(out)
        rest = sizes[1:]
        step = max(1, AT_ONCE // max(1, int(np.prod(rest, dtype=np.int64))))
        for low in range(0, sizes[0], step):
            rows = min(step, sizes[0] - low)
            out[low : low + rows] = self._rows((offsets[0] + low, *offsets[1:]), (rows, *rest))
        return _bits(out)

    def _rows(self, offsets: Ints, sizes: Ints) -> Array:
        first = offsets[-1] // GROUP
        groups = (offsets[-1] + sizes[-1] - 1) // GROUP + 1 - first
        at, size = (*offsets[:-1], first), (*sizes[:-1], groups)
        codes = self.blocks.read((*at, 0), (*size, GROUP // 2))
        scales = self.scales.read(at, size)
        with np.errstate(all="ignore"):
            values = _fp4_pairs()[codes].reshape(*size, GROUP)
            # In two steps, neither of which leaves the range that the product may be in.
            exponent = scales.astype(np.int32) - 127
            values *= np.ldexp(np.float32(1), exponent // 2)[..., None]
            values *= np.ldexp(np.float32(1), exponent - exponent // 2)[..., None]
        flat = values.reshape(*sizes[:-1], groups * GROUP)
        low = offsets[-1] - first * GROUP
        return _cast(flat[..., low : low + sizes[-1]], self.target)


@dataclass(frozen=True)
class _Transposed:
    """The last two dimensions exchanged."""

    of: _Packed

    def read(self, offsets: Ints, sizes: Ints) -> Array:
        """Reads the box that it is before."""
        lead, (a, b), (m, n) = offsets[:-2], offsets[-2:], sizes[-2:]
        found = self.of.read((*lead, b, a), (*sizes[:-2], n, m))
        return np.ascontiguousarray(found.swapaxes(-1, -2))


@cache
def _fp8_values() -> npt.NDArray[np.float32]:
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    values: npt.NDArray[np.float32] = every.astype(np.float32)
    return values


@cache
def _fp4_pairs() -> npt.NDArray[np.float32]:
    """The two values of every byte."""
    half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = np.array(half + [-value for value in half], np.float32)
    every = np.arange(256)
    return np.stack([values[every & 15], values[every >> 4]], axis=-1)


def _cast(values: Array, target: str) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(lookup(target).to_numpy(), copy=False)


def _bits(values: Array) -> Array:
    return values.view(lookup(values.dtype).bits())
