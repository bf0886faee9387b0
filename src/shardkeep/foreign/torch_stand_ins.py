# SPDX-License-Identifier: Apache-2.0
"""What stands in for torch's own classes and functions in pickles; torch itself is never imported.

A tensor becomes a `TensorView`: which storage, and how it lies in there. What a storage is comes
from whoever reads the file, through the persistent ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardkeep.dtypes import TABLE
from shardkeep.errors import FormatError
from shardkeep.foreign.graphs import Constant, Global, StandIn
from shardkeep.foreign.numpy_stand_ins import NumpyArray
from shardkeep.foreign.stand_ins import PLAIN
from shardkeep.wording import shown

__all__ = [
    "TORCH",
    "Storage",
    "StorageType",
    "TensorView",
    "TorchDType",
    "TorchDevice",
    "TorchName",
    "TorchSize",
]

MAX_DIMENSIONS = 32
_EXPANDED = 64 << 20
"""Bytes that a tensor may have although its storage is much smaller: `expand` makes such."""


class TorchSize(tuple[int, ...]):
    """A `torch.Size`; stored as one."""

    __slots__ = ()

    flat = True


class TorchDType:
    """A `torch.dtype`; stored as one."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
        """Without `torch.`."""

    def __str__(self) -> str:
        return f"torch.{self.name}"

    def __repr__(self) -> str:
        return str(self)

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if type(other).__name__ == "dtype" else NotImplemented

    def __hash__(self) -> int:
        return hash(self.name)


class TorchDevice:
    """A `torch.device`; stored as one."""

    __slots__ = ("text",)

    def __init__(self, kind: object, index: object = None) -> None:
        if type(kind) is not str or len(kind) > 40 or not kind.isidentifier():
            raise ValueError("a device of another kind")
        if index is not None and (type(index) is not int or not 0 <= index < 128):
            raise ValueError("a device of another number")
        self.text = kind if index is None else f"{kind}:{index}"
        """As torch writes it."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"device({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if type(other).__name__ == "device" else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)


# `values` knows torch's plain types by these names, and so stores what they stand for.
for _cls, _name in ((TorchSize, "Size"), (TorchDType, "dtype"), (TorchDevice, "device")):
    _cls.__module__, _cls.__name__, _cls.__qualname__ = "torch", _name, _name


@dataclass(frozen=True, slots=True)
class TorchName:
    """A layout, a memory format or another constant of torch."""

    name: str
    """As in `torch.strided`."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages."""

    dtype: str | None
    """Of its elements; None where they are bytes of any type."""
    name: str
    """As in `torch.FloatStorage`."""


@dataclass(eq=False, slots=True)
class Storage(StandIn):
    """Bytes that tensors lie in."""

    dtype: str | None
    """Of its elements, where it says."""
    nbytes: int
    """How many."""
    place: Any = None
    """Where they are; whoever reads the file knows."""

    flat = True


@dataclass(eq=False, slots=True)
class TensorView(StandIn):
    """A tensor: some elements of a storage. Its bounds were checked."""

    storage: Storage
    """Where its elements are."""
    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    offset: int
    """Element of the storage at which it begins."""
    shape: tuple[int, ...]
    """Its extent."""
    strides: tuple[int, ...]
    """Steps in elements."""
    requires_grad: bool
    """Whether it gathers gradients."""

    flat = True


def _ints(given: object, what: str) -> tuple[int, ...]:
    if not isinstance(given, tuple) or len(given) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor whose {what} is no tuple, or too long")
    if not all(type(n) is int and 0 <= n < 2**62 for n in given):
        raise ValueError(f"a tensor whose {what} is {shown(given)}")
    return tuple(given)


def view_of(
    storage: object,
    dtype: str | None,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
) -> TensorView:
    """A tensor, once it is known to lie within its storage."""
    if not isinstance(storage, Storage) or dtype is None:
        raise ValueError("a tensor without a storage")
    shape, strides = _ints(size, "size"), _ints(stride, "stride")
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise ValueError(f"a tensor of size {shape}, stride {strides} at {shown(offset)}")
    itemsize, count = TABLE[dtype].itemsize, math.prod(shape)
    if count:
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        if (last + 1) * itemsize > storage.nbytes:
            raise FormatError(
                f"a tensor of size {shape}, stride {strides} at element {offset} reaches past the "
                f"end of its storage of {storage.nbytes} bytes"
            )
    if count * itemsize > max(_EXPANDED, 16 * storage.nbytes):
        raise FormatError(
            f"a tensor of size {shape} repeats a storage of {storage.nbytes} bytes too often"
        )
    return TensorView(storage, dtype, offset, shape, strides, requires_grad is True)


def _plain_bits(metadata: object) -> None:
    if metadata and type(metadata) is dict and any(metadata.values()):
        raise FormatError(
            f"a tensor with lazy bits ({shown(list(metadata))}) cannot be read; "
            "resolve them before saving (resolve_conj, resolve_neg)"
        )


def _dtype_of(storage: object) -> str | None:
    return storage.dtype if isinstance(storage, Storage) else None


def _tensor(storage: object, offset: object, size: object, stride: object) -> TensorView:
    return view_of(storage, _dtype_of(storage), offset, size, stride, False)


def _tensor_v2(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object = None,
    metadata: object = None,
) -> TensorView:
    _plain_bits(metadata)
    return view_of(storage, _dtype_of(storage), offset, size, stride, requires_grad)


def _tensor_v3(
    storage: object,
    offset: object,
    size: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> TensorView:
    _plain_bits(metadata)
    if type(dtype) is not TorchDType or dtype.name not in TABLE:
        raise FormatError(f"a tensor of {shown(dtype)} cannot be read")
    return view_of(storage, dtype.name, offset, size, stride, requires_grad)


def _parameter(data: object, requires_grad: object, *_rest: object) -> object:
    if isinstance(data, TensorView):
        data.requires_grad = requires_grad is True
    elif not isinstance(data, NumpyArray):
        raise ValueError("a parameter that is no tensor")
    return data


def _from_type(function: object, cls: object, args: object, state: object) -> object:
    """A tensor with attributes, which are left out; or a subclass, which is not read."""
    if type(function) is not Global or type(cls) is not Global or type(args) is not tuple:
        raise ValueError("a tensor of no type")
    if cls.name not in _TENSORS:
        raise FormatError(f"a tensor of class {cls.name} cannot be read; save its plain tensors")
    if not function.name.startswith("torch._utils._rebuild_"):
        raise ValueError(f"a tensor made by {function.name}")
    return function.make(*args)


def _device_tensor(data: object, dtype: object, _device: object, requires_grad: object) -> object:
    """A tensor of an accelerator; one of bfloat16 is stored as float32, for numpy's sake."""
    made = _parameter(data, requires_grad)
    name = dtype.name if type(dtype) is TorchDType else ""
    stored = made.dtype if isinstance(made, TensorView) else getattr(made, "name", "")
    if isinstance(made, NumpyArray) and (stored, name) == ("float32", "bfloat16"):
        made = made.cast(name)
        stored = name
    if not name or name != stored:
        raise FormatError(f"a tensor of {shown(dtype)} that is stored as {stored} cannot be read")
    return made


def _refused(what: str) -> Callable[..., object]:
    def make(*_args: object) -> object:
        raise FormatError(f"{what} cannot be read; save plain, dense tensors instead")

    return make


_INTS = {int}


def _size(items: object = ()) -> TorchSize:
    if type(items) is not tuple and type(items) is not list:
        raise ValueError("a size of no numbers")
    if items and (len(items) > 1000 or set(map(type, items)) != _INTS):
        raise ValueError("a size of no numbers")
    return TorchSize(items)


def _named(name: object) -> TorchName:
    if type(name) is not str or len(name) > 100:
        raise ValueError("no name")
    return TorchName(name)


_TENSORS = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexDouble": "complex128", "ComplexFloat": "complex64",
}  # fmt: skip
_QUANTISED = ("QUInt8", "QInt8", "QInt32", "QUInt4x2", "QUInt2x4")
_UTILS: dict[str, Callable[..., object]] = {
    "_rebuild_tensor": _tensor,
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": _tensor_v3,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
    "_rebuild_device_tensor_from_numpy": _device_tensor,
    "_rebuild_device_tensor_from_cpu_tensor": _device_tensor,
    "_rebuild_xla_tensor": _device_tensor,
    "_rebuild_sparse_tensor": _refused("a sparse tensor"),
    "_rebuild_sparse_csr_tensor": _refused("a sparse tensor"),
    "_rebuild_nested_tensor": _refused("a nested tensor"),
    "_rebuild_qtensor": _refused("a quantised tensor"),
    "_rebuild_meta_tensor_no_storage": _refused("a meta tensor, which has no elements,"),
    "_rebuild_wrapper_subclass": _refused("a subclass of Tensor"),
}


def _entries() -> dict[str, Callable[..., object] | Constant]:
    table: dict[str, Callable[..., object] | Constant] = {
        "torch.Size": _size,
        "torch.device": TorchDevice,
        "torch.serialization._get_layout": _named,
        "torch._tensor._rebuild_from_type": _refused("a subclass of Tensor"),
        "torch._tensor._rebuild_from_type_v2": _from_type,
        **{name: _refused("a tensor of a very old version") for name in _TENSORS},
        **{f"torch._utils.{name}": make for name, make in _UTILS.items()},
    }
    for name in TABLE:
        table[f"torch.{name}"] = Constant(TorchDType(name))
    for bits in range(1, 8):
        for name in (f"int{bits}", f"uint{bits}"):
            table[f"torch.{name}"] = Constant(TorchDType(name))
    for title, dtype in _STORAGES.items():
        table[f"torch.{title}Storage"] = Constant(StorageType(dtype, f"torch.{title}Storage"))
    for title in _QUANTISED:
        table[f"torch.{title}Storage"] = Constant(StorageType(None, f"torch.{title}Storage"))
    for name in ("storage.UntypedStorage", "storage._UntypedStorage", "UntypedStorage"):
        table[f"torch.{name}"] = Constant(StorageType(None, "torch.UntypedStorage"))
    for name in ("contiguous_format", "channels_last", "channels_last_3d", "preserve_format",
                 "strided", "per_tensor_affine", "per_channel_affine"):  # fmt: skip
        table[f"torch.{name}"] = Constant(TorchName(f"torch.{name}"))
    return table


TORCH: dict[str, Callable[..., object] | Constant] = {**PLAIN, **_entries()}
"""Plain values, and torch's tensors, sizes, dtypes and devices."""
