# SPDX-License-Identifier: Apache-2.0
"""What stands in for numpy's arrays, scalars and dtypes in other systems' pickles.

Only element types of `shardkeep.dtypes` are known. An array keeps the bytes of the pickle; it is
made when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardkeep.dtypes import TABLE, lookup
from shardkeep.foreign.graphs import Constant, Global, StandIn
from shardkeep.wording import shown

__all__ = ["NUMPY", "NumpyArray", "NumpyDType", "NumpyType"]

_CODES = {
    "?": "bool", "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16",
    "i4": "int32", "u4": "uint32", "i8": "int64", "u8": "uint64", "f2": "float16",
    "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
}  # fmt: skip


def _require(fine: bool, wrong: str) -> None:
    if not fine:
        raise ValueError(wrong)


@dataclass(frozen=True, slots=True)
class NumpyType:
    """A class of scalars, as `numpy.float32`."""

    name: str
    """Name in `shardkeep.dtypes.TABLE`."""


class NumpyDType(StandIn):
    """A dtype."""

    __slots__ = ("name", "order")

    flat = True

    def __init__(self, name: str) -> None:
        self.name = name
        """Name in `shardkeep.dtypes.TABLE`."""
        self.order = "<"
        """`<`, or `>` for big-endian elements."""

    def build(self, state: Any) -> None:
        """Take numpy's state: a version, the byte order, and nothing that plain types have."""
        _require(type(state) is tuple and len(state) >= 2, "a dtype of another form")
        order = state[1]
        _require(order in ("<", ">", "|", "="), f"byte order {shown(order)}")
        _require(state[2] is None and state[4] is None, "a structured dtype")
        self.order = ">" if order == ">" else "<"

    def to_numpy(self) -> np.dtype[Any]:
        """The dtype of the elements as they lie."""
        dtype = lookup(self.name).to_numpy()
        return dtype.newbyteorder(">") if self.order == ">" else dtype


class NumpyArray(StandIn):
    """An array whose bytes are part of a pickle."""

    __slots__ = ("becomes", "data", "dtype", "fortran", "shape")

    flat = True

    def __init__(self) -> None:
        self.dtype: NumpyDType | None = None
        self.becomes = ""
        """The type that its elements are cast to, if they are stored as another."""
        self.shape: tuple[int, ...] = ()
        self.fortran = False
        self.data: bytes = b""

    def build(self, state: Any) -> None:
        """Take numpy's state: version, shape, dtype, whether column-major, and the bytes."""
        _version, shape, dtype, fortran, data = state
        _require(isinstance(dtype, NumpyDType), "an array without a dtype")
        if type(data) is str:  # Python 2's
            data = data.encode()
        _require(type(data) in (bytes, bytearray), "an array of objects")
        _require(type(shape) is tuple and len(shape) <= 32, "an array of too many dimensions")
        _require(all(type(n) is int and n >= 0 for n in shape), "an array of odd shape")
        nbytes = math.prod(shape) * TABLE[dtype.name].itemsize
        _require(nbytes == len(data), f"an array of {nbytes} bytes with {len(data)} of them")
        self.dtype, self.shape, self.fortran, self.data = dtype, shape, bool(fortran), data

    @property
    def name(self) -> str:
        """Of the type of its elements; empty until that is known."""
        return self.becomes or ("" if self.dtype is None else self.dtype.name)

    def cast(self, name: str) -> NumpyArray:
        """Another of the same bytes that becomes this type; the pickle may hold this one, too."""
        made = NumpyArray()
        made.dtype, made.shape, made.fortran = self.dtype, self.shape, self.fortran
        made.data, made.becomes = self.data, name
        return made

    def array(self) -> npt.NDArray[Any]:
        """The array itself, in the machine's byte order."""
        _require(self.dtype is not None, "an array without a state")
        assert self.dtype is not None
        kind = self.dtype.to_numpy()
        flat = np.frombuffer(self.data, kind)
        made = flat.reshape(self.shape, order="F" if self.fortran else "C")
        native = lookup(self.becomes).to_numpy() if self.becomes else kind.newbyteorder("=")
        return np.ascontiguousarray(made, native).reshape(self.shape)


def _dtype(code: Any, *_flags: object) -> NumpyDType:
    if type(code) is NumpyType:
        return NumpyDType(code.name)
    _require(type(code) is str and len(code) < 40, "a dtype of another form")
    name = code.lstrip("<>|=")
    name = _CODES.get(name, name)
    _require(name in TABLE, f"dtype {code!r} is not supported")
    return NumpyDType(name)


def _reconstruct(cls: object, shape: object, code: object) -> NumpyArray:
    _require(type(cls) is Global and cls.name == "numpy.ndarray", "a subclass of numpy.ndarray")
    return NumpyArray()


def _scalar(dtype: Any, data: Any) -> object:
    _require(isinstance(dtype, NumpyDType), "a scalar without a dtype")
    if type(data) is str:
        data = data.encode("latin1")
    kind = dtype.to_numpy()
    _require(type(data) is bytes and len(data) == kind.itemsize, "a scalar of another size")
    return np.frombuffer(data, kind)[0].astype(kind.newbyteorder("="))


def _frombuffer(data: object, dtype: object, shape: object, order: object) -> NumpyArray:
    made = NumpyArray()
    made.build((1, shape, dtype, order == "F", data))
    return made


def _not_called(*_args: object) -> object:
    raise ValueError("it is a name here, not something to call")


def _entries() -> dict[str, Callable[..., object] | Constant]:
    table: dict[str, Callable[..., object] | Constant] = {
        "numpy.dtype": _dtype,
        "numpy.ndarray": _not_called,
    }
    for core in ("numpy.core", "numpy._core"):
        table[f"{core}.multiarray._reconstruct"] = _reconstruct
        table[f"{core}.multiarray.scalar"] = _scalar
        table[f"{core}.numeric._frombuffer"] = _frombuffer
    for name in _CODES.values():
        for full in (f"numpy.{name}", f"numpy.{name}_"):
            table[full] = Constant(NumpyType(name))
    for row in TABLE.values():
        table[f"ml_dtypes.{row.name}"] = Constant(NumpyType(row.name))
    for name in [name for name in TABLE if TABLE[name].numpy]:
        # numpy 2.x writes dtypes as objects of classes of their own.
        title = name[0].upper() + name[1:] + "DType"
        table[f"numpy.dtypes.{title}"] = lambda *_args, name=name: NumpyDType(name)
    return table


NUMPY = _entries()
"""Names of numpy and ml_dtypes."""
