# SPDX-License-Identifier: Apache-2.0
"""Pickles for torch to read, made without torch: names are written, nothing is looked up.

Protocol 2, as `torch.save` writes. Where torch may load with `weights_only=True`, only what that
allows is written, and all else is refused by its path.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardkeep import values
from shardkeep.boxes import strides as row_major
from shardkeep.dtypes import TABLE, lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import OutTensor

__all__ = ["Pickling", "torch_name"]

_STORAGES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16",
    "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte",
    "bool": "Bool", "complex128": "ComplexDouble", "complex64": "ComplexFloat",
}  # fmt: skip
_BATCH = 1000
_DEPTH = 64


def torch_name(value: object) -> str:
    """`Size`, `dtype` or `device` for a plain value of torch or what stands for one, else empty."""
    kind = type(value)
    known = kind.__module__ == "torch" and kind.__name__ in ("Size", "dtype", "device")
    return kind.__name__ if known else ""


class Pickling:
    """One pickle being made."""

    def __init__(self, *, weights_only: bool, storage: Callable[[OutTensor], str]) -> None:
        """`storage` gives the key of a tensor's storage."""
        self._out = bytearray(b"\x80\x02")
        self._weights_only = weights_only
        self._storage = storage
        self._memo: dict[object, int] = {}
        self._kept: list[object] = []

    def finished(self) -> bytes:
        """The pickle."""
        return bytes(self._out) + b"."

    # --- pieces that callers put together

    def name(self, module: str, name: str) -> None:
        """A class or function."""
        if self._again((module, name)):
            return
        self._out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self._keep((module, name))

    def call(self, module: str, name: str, *args: Any) -> None:
        """What a function gives."""
        self.name(module, name)
        self.value(tuple(args), "")
        self._out += b"R"

    def instance(self, module: str, name: str, state: Any) -> None:
        """An object of a class, with its state: a dict of attributes or what it takes."""
        self.name(module, name)
        self._out += b")\x81"
        self.value(state, name)
        self._out += b"b"

    def once(self, key: tuple[Any, ...], write: Callable[[], None]) -> None:
        """Something that never changes: written the first time, and referred to after that."""
        if not self._again(("once", *key)):
            write()
            self._keep(("once", *key))

    # --- values

    def value(self, value: Any, path: str, depth: int = 0) -> None:
        """Any value of a state; a callable writes itself."""
        kind = type(value)
        if depth > _DEPTH:
            raise UnsupportedValueError(f"{path}: nested deeper than {_DEPTH}")
        if kind is dict or kind is OrderedDict:
            self._mapping(value, path, depth)
        elif kind is list:
            self._out += b"]"
            self._batches(b"e", [(item, f"{path}.{at}") for at, item in enumerate(value)], depth)
        elif kind is tuple:
            self._tuple(value, path, depth)
        elif kind is OutTensor:
            self._tensor(value, path)
        elif kind in _ATOMS:
            _ATOMS[kind](self, value, path)
        elif torch_name(value):
            self._of_torch(value, path)
        elif kind is Counter:
            self.name("collections", "Counter")
            self.value((dict(value),), path, depth + 1)
            self._out += b"R"
        elif kind is set or (kind is frozenset and not self._weights_only):
            # In an order that the next process has too: a convert may be gone on with there.
            self.name("builtins", kind.__name__)
            ordered = sorted(value, key=lambda member: values.encode(member, where=path))
            self.value((ordered,), path, depth + 1)
            self._out += b"R"
        elif isinstance(value, Written):
            value.write(self)
        else:
            self._other(value, path, depth)

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> None:
        if type(value) is dict:
            self._out += b"}"
        else:
            self.name("collections", "OrderedDict")
            self._out += b")R"
        flat: list[tuple[Any, str]] = []
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            flat += (key, inner), (item, inner)
        self._batches(b"u", flat, depth)

    def _batches(self, end: bytes, items: list[tuple[Any, str]], depth: int) -> None:
        for low in range(0, len(items), 2 * _BATCH):
            self._out += b"("
            for item, path in items[low : low + 2 * _BATCH]:
                self.value(item, path, depth + 1)
            self._out += end

    def _tuple(self, value: tuple[Any, ...], path: str, depth: int) -> None:
        if not value:
            self._out += b")"
            return
        if len(value) > 3:
            self._out += b"("
        for at, item in enumerate(value):
            self.value(item, f"{path}.{at}", depth + 1)
        self._out += b"\x85\x86\x87t"[min(len(value), 4) - 1 :][:1]

    def _tensor(self, tensor: OutTensor, path: str) -> None:
        if self._again(id(tensor)):
            return
        dtype = lookup(tensor.dtype)
        if not dtype.torch:
            raise UnsupportedValueError(f"{path}: torch has no dtype {tensor.dtype}")
        title = _STORAGES.get(dtype.name)
        count = tensor.nbytes // (dtype.itemsize if title else 1)
        if tensor.requires_grad:
            self.name("torch._utils", "_rebuild_parameter")
        self.name("torch._utils", "_rebuild_tensor_v2" if title else "_rebuild_tensor_v3")
        self._out += b"("
        self._out += b"("
        self.value("storage", "")
        if title:
            self.name("torch", f"{title}Storage")
        else:
            self.name("torch.storage", "UntypedStorage")
        self.value(self._storage(tensor), "")
        self.value("cpu", "")
        self.value(count, "")
        self._out += b"tQ"
        view: tuple[Any, ...] = (0, tensor.shape, row_major(tensor.shape), False, OrderedDict())
        for item in view:
            self.value(item, "")
        if not title:
            self.name("torch", dtype.name)
        self._out += b"tR"
        if tensor.requires_grad:
            self._out += b"\x88"
            self.value(OrderedDict(), "")
            self._out += b"\x87R"
        self._kept.append(tensor)
        self._keep(id(tensor))

    def _of_torch(self, value: Any, path: str) -> None:
        kind = torch_name(value)
        if kind == "Size":
            self.name("torch", "Size")
            self.value((tuple(value),), path)
            self._out += b"R"
        elif kind == "dtype":
            self.name("torch", str(value).removeprefix("torch."))
        else:
            device, _, index = str(value).partition(":")
            self.call("torch", "device", device, *([int(index)] if index else []))

    def _other(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if self._weights_only or not _reduces(value):
            raise UnsupportedValueError(
                f"{path}: a value of type {kind.__module__}.{kind.__qualname__} cannot be written "
                "for torch to load; convert it, or leave it out"
            )
        function, args, *more = value.__reduce_ex__(2)
        made = b"R"
        if function.__name__ == "__newobj__":
            function, *args = args
            made = b"\x81"
        self.name(function.__module__, function.__qualname__)
        self.value(tuple(args), path, depth + 1)
        self._out += made
        state, items = (*more, None, None)[:2]
        if state is not None:
            self.value(state, path, depth + 1)
            self._out += b"b"
        if items is not None:
            self._batches(b"e", [(item, path) for item in items], depth)

    # --- atoms

    def _int(self, value: int, path: str) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes([value])
        elif -(2**31) <= value < 2**31:
            self._out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            size = value.bit_length() // 8 + 1
            if size > 255:
                raise UnsupportedValueError(f"{path}: an integer of {size} bytes; torch reads 255")
            self._out += b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def _text(self, value: str, path: str) -> None:
        if self._again(value):
            return
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise UnsupportedValueError(f"{path!r}: not valid Unicode. Pass bytes") from error
        if len(data) >= 2**32:
            raise UnsupportedValueError(f"{path}: a text of {len(data)} bytes is too long")
        self._out += b"X" + struct.pack("<I", len(data)) + data
        if len(data) < 256:
            self._keep(value)

    def _binary(self, value: bytes, path: str) -> None:
        self.call("_codecs", "encode", value.decode("latin1"), "latin1")

    def _bytearray(self, value: bytearray, path: str) -> None:
        self.call("builtins", "bytearray", bytes(value))

    def _complex(self, value: complex, path: str) -> None:
        self.call("builtins", "complex", value.real, value.imag)

    # --- the memo

    def _again(self, key: object) -> bool:
        index = self._memo.get(key)
        if index is not None:
            self._out += b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index)
        return index is not None

    def _keep(self, key: object) -> None:
        index = self._memo[key] = len(self._memo)
        self._out += b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def _constant(self, code: bytes) -> None:
        self._out += code

    def _float(self, value: float, path: str) -> None:
        self._out += b"G" + struct.pack(">d", value)


class Written:
    """Something that writes itself into a pickle."""

    def write(self, pickling: Pickling) -> None:
        """Write it."""
        raise NotImplementedError


_ATOMS: dict[type, Callable[[Pickling, Any, str], None]] = {
    type(None): lambda p, _, __: p._constant(b"N"),
    bool: lambda p, value, _: p._constant(b"\x88" if value else b"\x89"),
    int: Pickling._int,
    float: Pickling._float,
    str: Pickling._text,
    bytes: Pickling._binary,
    bytearray: Pickling._bytearray,
    complex: Pickling._complex,
}
_EXACT = frozenset(
    {"builtins.frozenset", "builtins.range", "builtins.slice", "collections.deque",
     "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta",
     "datetime.timezone", "decimal.Decimal", "fractions.Fraction", "uuid.UUID",
     "pathlib.PosixPath", "pathlib.WindowsPath", "pathlib.PurePosixPath", "pathlib.PureWindowsPath"}
)  # fmt: skip


def _reduces(value: object) -> bool:
    """Whether a value is plain, and tells itself how it is pickled."""
    kind = type(value)
    if f"{kind.__module__.removesuffix('._local')}.{kind.__qualname__}" in _EXACT:
        return True
    if isinstance(value, (np.number, np.bool_)):
        return kind.__module__ == "numpy" and value.dtype.name in TABLE
    return isinstance(value, np.dtype) and value.name in TABLE
