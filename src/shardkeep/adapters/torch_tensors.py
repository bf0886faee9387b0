# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors on any device.

Only plain tensors and parameters are taken as they are. Subclasses that can say what they are made
of (`__tensor_flatten__`) are stored as their parts; every other subclass could hide anything behind
its data pointer and is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.arrays import (
    ArrayParts,
    Bytes,
    HostSink,
    HostSource,
    LocalArray,
    LocalTarget,
    Memory,
    Sink,
    SinkPiece,
    Source,
    SourcePiece,
    region,
)
from shardkeep.boxes import flat_range_boxes, whole
from shardkeep.dtypes import TABLE, DType
from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import TensorProperties

__all__ = ["ADAPTER", "properties_of"]

Array = npt.NDArray[np.generic]

_BY_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, row.torch): row
    for row in TABLE.values()
    if row.torch and hasattr(torch, row.torch)
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class TorchTensors:
    """The adapter for `torch.Tensor`."""

    def claims(self, kind: type) -> bool:
        """Every tensor, also those refused later: by name, not by falling through."""
        return issubclass(kind, torch.Tensor)

    def held(self, value: object, where: str) -> LocalArray:
        """A plain tensor is whole on its rank."""
        tensor, dtype = _checked(value, where)
        if tensor.device.type == "meta":
            raise UnsupportedValueError(f"{where}: a meta tensor holds no data to save")
        channels_last = (
            tensor.dim() == 4
            and not tensor.is_contiguous()
            and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        properties = properties_of(
            dtype.name,
            tensor.requires_grad,
            "channels_last" if channels_last else "contiguous_format",
        )
        shape = tuple(tensor.shape)
        piece = SourcePiece(whole(shape), _source(tensor, dtype))
        return LocalArray(shape, dtype, properties, (piece,), (), _tie(tensor))

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape and element type; meta tensors are welcome."""
        tensor, dtype = _checked(value, where)
        return tuple(tensor.shape), dtype

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Filled in place; a meta tensor is allocated on `device`."""
        tensor, dtype = _checked(value, where)
        result = value
        if tensor.device.type == "meta":
            result = tensor = _allocate(tensor, device)
        if tensor.is_conj() or tensor.is_neg():
            raise UnsupportedValueError(f"{where}: the target is a lazy conjugate or negative view")
        memory = _memory(tensor)
        if memory is not None and memory.may_repeat():
            raise UnsupportedValueError(
                f"{where}: elements of the target share memory (its strides overlap); load into a "
                "copy"
            )
        plain = tensor.detach()
        sink: Sink
        if plain.device.type == "cpu":
            sink = HostSink(_host_bits(plain, dtype), dtype)
        else:
            sink = DeviceSink(plain)
        shape = tuple(plain.shape)
        piece = SinkPiece(whole(shape), sink, memory)
        return LocalTarget(shape, dtype, (piece,), result)

    def parts(self, value: object, where: str) -> ArrayParts | None:
        """Inner tensors of a wrapper subclass."""
        assert isinstance(value, torch.Tensor)
        if type(value) in _PLAIN or not hasattr(value, "__tensor_flatten__"):
            return None
        names, context = value.__tensor_flatten__()
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return ArrayParts(
            kind,
            {name: getattr(value, name) for name in names},
            {"__context__": _plain_context(context)},
        )

    def from_numpy(self, array: Array, dtype: DType) -> torch.Tensor:
        """A tensor over the same memory."""
        if not dtype.torch:
            raise UnsupportedValueError(f"torch has no dtype {dtype.name}")
        return _tensor_of(array, dtype)


@cache
def properties_of(
    dtype: str, requires_grad: bool, memory_format: str = "contiguous_format"
) -> TensorProperties:
    """What is recorded of a tensor; thousands of tensors share a handful."""
    return TensorProperties(dtype, requires_grad=requires_grad, memory_format=memory_format)


def _plain_context(context: object) -> object:
    """Flags, sizes and dtypes of a wrapper subclass, without the tuple types torch gives them."""
    if isinstance(context, dict):
        return {str(key): _plain_context(item) for key, item in context.items()}
    if isinstance(context, (list, tuple)) and not isinstance(context, torch.Size):
        return [_plain_context(item) for item in context]
    return context


def _checked(value: object, where: str) -> tuple[torch.Tensor, DType]:
    assert isinstance(value, torch.Tensor)
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        what = "nested" if value.is_nested else str(value.layout).rpartition(".")[2]
        raise UnsupportedValueError(
            f"{where}: {'quantised' if value.is_quantized else what} tensors cannot be stored; "
            "save their dense parts"
        )
    if type(value) not in _PLAIN:
        raise UnsupportedValueError(
            f"{where}: tensors of type {type(value).__module__}.{type(value).__qualname__} cannot "
            "be stored: the class does not say what it is made of (__tensor_flatten__)"
        )
    dtype = _BY_TORCH.get(value.dtype)
    if dtype is None:
        raise UnsupportedValueError(f"{where}: tensors of {value.dtype} cannot be stored")
    return value, dtype


def _tie(tensor: torch.Tensor) -> Any:
    if tensor.numel() == 0:
        return None
    return (
        "torch",
        tensor.device.type,
        tensor.device.index,
        tensor.data_ptr(),
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _memory(tensor: torch.Tensor) -> Memory | None:
    if tensor.numel() == 0:
        return None
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    return Memory(str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), strides, item)


def _host_bits(tensor: torch.Tensor, dtype: DType) -> Array:
    """The same host memory as a numpy array of bits."""
    if dtype.itemsize == 16:
        return tensor.numpy()
    if tensor.dtype.is_complex and dtype.numpy:
        return tensor.numpy().view(dtype.bits())
    return tensor.view(_BITS[dtype.itemsize]).numpy().view(dtype.bits())


def _tensor_of(array: Array, dtype: DType) -> torch.Tensor:
    """A tensor over the memory of a contiguous array of bits."""
    kind = getattr(torch, dtype.torch)
    if dtype.itemsize == 16:
        return torch.from_numpy(array.view(np.complex128))
    signed = np.uint8 if dtype.itemsize == 1 else np.dtype(f"i{dtype.itemsize}")
    return torch.from_numpy(array.view(signed)).view(kind)


def _source(tensor: torch.Tensor, dtype: DType) -> Source:
    plain = tensor.detach()
    if plain.device.type == "cpu" and not plain.is_conj() and not plain.is_neg():
        return HostSource(_host_bits(plain, dtype))
    return DeviceSource(plain, dtype)


def _allocate(meta: torch.Tensor, device: object) -> torch.Tensor:
    place: Any = "cpu" if device is None else device
    made = torch.empty(meta.shape, dtype=meta.dtype, device=place)
    if isinstance(meta, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=meta.requires_grad)
    return made.requires_grad_(meta.requires_grad)


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Elements on an accelerator, or behind a lazy conjugate: brought over block by block."""

    tensor: torch.Tensor
    """Never copied as a whole."""
    dtype: DType
    """Element type."""

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Bring the elements to the host and copy their bits."""
        tensor = self.tensor
        at = 0
        for offsets, sizes in flat_range_boxes(tuple(tensor.shape), start, stop):
            part = tensor[region(offsets, sizes)].resolve_conj().resolve_neg()
            host = part.contiguous().cpu()
            bits = np.ascontiguousarray(_host_bits(host, self.dtype)).reshape(-1).view(np.uint8)
            np.copyto(out[at : at + bits.size], bits)
            at += bits.size

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DeviceSource:
        """A view of a box."""
        return DeviceSource(self.tensor[region(offsets, sizes)], self.dtype)


@dataclass(frozen=True, slots=True)
class DeviceSink:
    """Memory on an accelerator; casts happen there."""

    tensor: torch.Tensor
    """The target."""

    def put(self, offsets: tuple[int, ...], block: Array, dtype: DType) -> None:
        """Send a block over; the host buffer is free again on return."""
        source = _tensor_of(np.ascontiguousarray(block), dtype)
        # A contiguous copy of a block without dimensions has one.
        self.tensor[region(offsets, block.shape)].copy_(source.reshape(block.shape))


ADAPTER = TorchTensors()
