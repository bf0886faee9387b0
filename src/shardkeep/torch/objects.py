# SPDX-License-Identifier: Apache-2.0
"""Objects that torch's planners would pickle, as plain values.

Torch's planners take lists and mappings apart, and nothing else: tuples of tensors, arrays of numpy
and streams reach storage as objects. Those three are stored as named tuples, whose names no class
can have; other readers of the checkpoint see tuples. Everything else is stored as plain values are,
or refused.
"""

from __future__ import annotations

import io
import math
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardkeep import dtypes, values
from shardkeep.adapters.torch_memory import host_bits, tensor_of
from shardkeep.errors import CheckpointError, FormatError, UnsupportedValueError

__all__ = ["decode_object", "decode_stream", "encode_object", "stream_of"]

_Stream = namedtuple("_Stream", ("position", "data"))
_Tensor = namedtuple("_Tensor", ("dtype", "shape", "data"))
_Array = namedtuple("_Array", ("dtype", "shape", "data"))
# No class statement can make such a name, so no named tuple of a program is taken for one of these.
_Stream.__name__, _Tensor.__name__, _Array.__name__ = (
    "io.BytesIO",
    "torch.Tensor",
    "numpy.ndarray",
)


def encode_object(value: object, name: str) -> bytes:
    """The encoding of an object; `UnsupportedValueError` names what cannot be stored."""
    try:
        return values.encode(value, where=name)
    except UnsupportedValueError:
        lowered = _lower(value, name, 0)
        if lowered is value:
            raise
        return values.encode(lowered, where=name)


def _lower(value: Any, name: str, depth: int) -> Any:
    """The same value with what we know of put in named tuples; itself where there is none."""
    if depth > values.MAX_DEPTH:
        return value
    if type(value) is io.BytesIO:
        return _Stream(value.tell(), value.getvalue())
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return _lower_tensor(value, name)
    if type(value) is np.ndarray and value.dtype.name in dtypes.TABLE:
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return _Array(value.dtype.name, value.shape, little.tobytes())
    if type(value) in (list, tuple):
        items = [_lower(item, name, depth + 1) for item in value]
        return value if _same(items, value) else type(value)(items)
    if type(value) is deque:
        items = [_lower(item, name, depth + 1) for item in value]
        return value if _same(items, list(value)) else deque(items, value.maxlen)
    if type(value) in (dict, OrderedDict):
        items = [_lower(item, name, depth + 1) for item in value.values()]
        same = _same(items, list(value.values()))
        return value if same else type(value)(zip(value, items, strict=True))
    return value


def _same(items: Sequence[object], others: Sequence[object]) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))


def _lower_tensor(value: torch.Tensor, name: str) -> _Tensor:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise UnsupportedValueError(
            f"{name}: holds a tensor that is not dense; torch's planner takes tuples for objects. "
            "Put its dense parts into a dict or a list"
        )
    dtype = dtypes.lookup(value.dtype)
    host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _Tensor(dtype.name, tuple(value.shape), host_bits(host, dtype).tobytes())


def decode_object(data: bytes, name: str, target: object = None) -> object:
    """What `encode_object` took. `target` tells the classes of named tuples and Enums."""
    try:
        return values.like(target, values.decode(data, named=_build))
    except CheckpointError as error:
        error.add_note(f"The entry is {name}.")
        raise


def _build(kind: str, fields: tuple[str, ...], items: tuple[object, ...]) -> object:
    builder = _BUILDERS.get(kind)
    if builder is None:
        return items
    try:
        return builder(*items)
    except (KeyError, TypeError, ValueError) as error:  # too few fields, no dtype, sizes too large
        raise FormatError(f"not a {kind}: {type(error).__name__}: {error}") from error


def _build_stream(position: int, data: bytes) -> io.BytesIO:
    if type(position) is not int or type(data) is not bytes or not 0 <= position < 2**62:
        raise FormatError("not a stream")
    stream = io.BytesIO(data)
    stream.seek(position)
    return stream


def _bits(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[dtypes.DType, Any]:
    row = dtypes.TABLE[dtype]
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape):
        raise FormatError("not the shape of an array")
    if len(shape) > 32 or math.prod(shape) * row.itemsize != len(data):
        raise FormatError(f"an array of shape {shape} {dtype} in {len(data)} bytes")
    return row, np.frombuffer(data, row.bits().newbyteorder("<")).astype(row.bits()).reshape(shape)


def _build_tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    row, bits = _bits(dtype, shape, data)
    if not row.torch:
        raise FormatError(f"torch has no dtype {dtype}")
    return tensor_of(bits.reshape(-1), row).reshape(shape)


def _build_array(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    row, bits = _bits(dtype, shape, data)
    return bits.view(row.to_numpy())


_BUILDERS: dict[str, Callable[..., object]] = {
    "io.BytesIO": _build_stream,
    "torch.Tensor": _build_tensor,
    "numpy.ndarray": _build_array,
}


def stream_of(value: object) -> io.BytesIO:
    """A stream as torch's planners expect it: made here, of a value that was decoded here.

    What they do with it, `torch.load(weights_only=False)`, could run whatever a stream says.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def decode_stream(stream: io.BytesIO, name: str) -> object:
    """The object in a stream that a planner made, without running what it says."""
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnsupportedValueError(
            f"{name}: the planner gives a stream that is not torch.save of a plain value, and a "
            "stream can run code when it is read. Have its lookup_object give the object itself, "
            f"as plain values, arrays or io.BytesIO ({type(error).__name__}: {error})"
        ) from error
