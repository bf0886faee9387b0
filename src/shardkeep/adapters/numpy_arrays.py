# SPDX-License-Identifier: Apache-2.0
"""numpy arrays, with the element types of ml_dtypes."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from shardkeep.arrays import (
    ArrayForm,
    FlatSink,
    HostSink,
    HostSource,
    LocalTarget,
    NotComposite,
    Sink,
    SinkPiece,
    Source,
    Staging,
    Unstepped,
)
from shardkeep.boxes import whole
from shardkeep.dtypes import TABLE, DType
from shardkeep.errors import UnsupportedValueError
from shardkeep.memory import Memory, address_of
from shardkeep.metadata import TensorProperties

__all__ = ["ADAPTER"]

Array = npt.NDArray[np.generic]

_TARGET_LOOKS = attrgetter("__class__", "shape", "dtype", "strides", "flags.writeable")


class NumpyArrays(NotComposite, Unstepped):
    """The adapter for `numpy.ndarray`."""

    def claims(self, kind: type) -> bool:
        """Arrays, not scalars: those are plain values."""
        return issubclass(kind, np.ndarray)

    def glances(self, values: Sequence[Array]) -> Sequence[Hashable]:
        """Class, shape and element type."""
        return [(type(value), value.shape, value.dtype) for value in values]

    def form(self, value: Array, where: str) -> ArrayForm:
        """A numpy array is whole on its rank."""
        array = _checked(value, where)
        dtype = _dtype_of(array, where)
        boxes = (whole(array.shape),)
        return ArrayForm(array.shape, dtype, TensorProperties(dtype.name), boxes)

    def sources(self, value: Array, where: str) -> Sequence[Source]:
        """The array itself."""
        array = _checked(value, where)
        return (HostSource(_bits(array, _dtype_of(array, where))),)

    def addresses(self, values: Sequence[Array]) -> Sequence[int]:
        """Where the first element lies."""
        return [address_of(value) if value.size else 0 for value in values]

    def host_addresses(self, values: Sequence[Array], nbytes: Sequence[int]) -> Sequence[int]:
        """Of those that lie there as they are stored."""
        little = sys.byteorder == "little"
        return [
            address_of(value)
            if little
            and value.nbytes == size > 0
            and value.flags.c_contiguous
            and value.dtype.isnative
            else 0
            for value, size in zip(values, nbytes, strict=True)
        ]

    def tie(self, value: Array) -> Hashable:
        """Memory, strides and element type."""
        return ("numpy", address_of(value), value.strides, value.dtype.str)

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape and element type."""
        array = _checked(value, where)
        return array.shape, _dtype_of(array, where)

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Filled in place."""
        array = _checked(value, where)
        if not array.flags.writeable:
            raise UnsupportedValueError(f"{where}: the target array is read-only")
        memory = _memory(array)
        if memory is not None and memory.may_repeat():
            raise UnsupportedValueError(
                f"{where}: elements of the target share memory (its strides overlap); load into a "
                "copy"
            )
        dtype = _dtype_of(array, where)
        piece = SinkPiece(whole(array.shape), self.sink(array, dtype), memory)
        return LocalTarget(array.shape, dtype, (piece,), value, memory)

    def target_glances(self, values: Sequence[Array]) -> Sequence[Hashable]:
        """Class, layout and element type, and whether it may be written to."""
        return list(map(_TARGET_LOOKS, values))

    def target_addresses(
        self, values: Sequence[Array], names: Sequence[str], reach: Sequence[int]
    ) -> Sequence[int]:
        """Where the first element lies; an array has all of its memory."""
        return self.addresses(values)

    def sink(self, value: Array, dtype: DType) -> Sink:
        """Its memory."""
        array = np.asarray(value)
        if array.flags.c_contiguous and array.dtype.isnative:
            return FlatSink(array.reshape(-1).view(np.uint8), array.shape, dtype)
        return HostSink(_bits(array, dtype), dtype)

    def settle(self, values: Iterable[Array], wait: bool = True) -> Staging | None:
        """Nothing computes behind numpy's back."""
        return None

    def from_numpy(self, array: Array, dtype: DType) -> object:
        """The array itself."""
        return array


def _checked(value: object, where: str) -> Array:
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedValueError(f"{where}: masked arrays cannot be stored; save data and mask")
    return np.asarray(value)


def _memory(array: Array) -> Memory | None:
    if array.size == 0:
        return None
    return Memory("cpu", address_of(array), array.shape, array.strides, array.itemsize)


def _dtype_of(array: Array, where: str) -> DType:
    row = _row_of(array.dtype)
    if row is None or row.itemsize != array.dtype.itemsize:
        raise UnsupportedValueError(
            f"{where}: numpy arrays of dtype {array.dtype} cannot be stored"
        )
    return row


@cache
def _row_of(dtype: np.dtype[np.generic]) -> DType | None:
    # By name: MindSpore brings a bfloat16 type of its own that differs from ml_dtypes' in identity.
    return TABLE.get(dtype.name)


def _bits(array: Array, dtype: DType) -> Array:
    """The same memory as bits; big-endian stays marked, so that copies swap."""
    if array.dtype.byteorder != ">":
        return array.view(dtype.bits())
    # The two halves of a complex number are swapped each by itself.
    return array if dtype.kind == "complex" else array.view(dtype.bits().newbyteorder(">"))


ADAPTER = NumpyArrays()
