# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors on any device.

Only plain tensors and parameters are taken as they are. Subclasses that can say what they are made
of (`__tensor_flatten__`) are stored as their parts; every other subclass could hide anything behind
its data pointer and is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.adapters import torch_steps
from shardkeep.adapters.torch_devices import PINNED, DeviceSink, DeviceSource, follow_current
from shardkeep.adapters.torch_memory import host_bits, host_bytes, tensor_of
from shardkeep.arrays import (
    ArrayForm,
    ArrayParts,
    FlatSink,
    HostSink,
    HostSource,
    LocalTarget,
    Sink,
    SinkPiece,
    Source,
    Staging,
    Stepped,
)
from shardkeep.boxes import whole
from shardkeep.dtypes import TABLE, DType
from shardkeep.errors import UnsupportedValueError
from shardkeep.memory import Memory
from shardkeep.metadata import TensorProperties

__all__ = ["ADAPTER", "check_storage", "properties_of", "wrapper_parts"]

Array = npt.NDArray[np.generic]

_BY_TORCH: dict[torch.dtype, DType] = {
    getattr(torch, row.torch): row
    for row in TABLE.values()
    if row.torch and hasattr(torch, row.torch)
}
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LOOKS = attrgetter("__class__", "shape", "dtype", "requires_grad", "layout", "is_meta")
_TARGET_LOOKS = attrgetter("__class__", "shape", "dtype", "layout", "device")
_is_contiguous = torch.Tensor.is_contiguous
_is_conj = torch.Tensor.is_conj
_is_neg = torch.Tensor.is_neg
_is_zero = torch.Tensor._is_zerotensor
_stride = torch.Tensor.stride
_is_cpu = attrgetter("is_cpu")
_nbytes = attrgetter("nbytes")
_data_ptr = torch.Tensor.data_ptr
_untyped_storage = torch.Tensor.untyped_storage
_storage_ptr = torch.UntypedStorage.data_ptr
_storage_nbytes = torch.UntypedStorage.nbytes


class TorchTensors:
    """The adapter for `torch.Tensor`."""

    def claims(self, kind: type) -> bool:
        """Every tensor, also those refused later: by name, not by falling through."""
        return issubclass(kind, torch.Tensor)

    def glances(self, values: Sequence[torch.Tensor]) -> Sequence[Hashable | None]:
        """Everything that `form` looks at."""
        try:
            # Without a loop of ours: this is done for every tensor of every save.
            # Whatever they are asked beside: some of them may be asked again by themselves.
            formats = ["contiguous_format"] * len(values)
            if not all(map(_is_contiguous, values)):
                formats = [_memory_format(value) for value in values]
            return list(zip(map(_LOOKS, values), formats, strict=True))
        except Exception:
            # Some tensors, such as nested ones, refuse to be asked.
            return [None] * len(values)

    def form(self, value: object, where: str) -> ArrayForm:
        """A plain tensor is whole on its rank."""
        tensor, dtype = _checked(value, where)
        if tensor.is_meta:
            raise UnsupportedValueError(f"{where}: a meta tensor holds no data to save")
        properties = properties_of(dtype.name, tensor.requires_grad, _memory_format(tensor))
        shape = tuple(tensor.shape)
        return ArrayForm(shape, dtype, properties, (whole(shape),))

    def sources(self, value: object, where: str) -> Sequence[Source]:
        """Its memory, or what must be brought over from a device."""
        tensor, dtype = _checked(value, where)
        check_storage(tensor, where)
        if tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg():
            return (HostSource(host_bits(tensor, dtype)),)
        return (DeviceSource(tensor.detach(), dtype),)

    def addresses(self, values: Sequence[torch.Tensor]) -> Sequence[int]:
        """Where the first element lies; 0 where there is none."""
        return list(map(_data_ptr, values))

    def tie(self, value: torch.Tensor) -> Hashable:
        """Memory, strides, element type, and whether it is a lazy view."""
        kind, device = value.dtype, value.device
        lazy = value.is_conj(), value.is_neg()
        return ("torch", device.type, device.index, value.data_ptr(), value.stride(), kind, lazy)

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape and element type; meta tensors are welcome."""
        tensor, dtype = _checked(value, where)
        return tuple(tensor.shape), dtype

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Filled in place; a meta tensor is allocated on `device`."""
        tensor, dtype = _checked(value, where)
        result = value
        if tensor.is_meta:
            result = tensor = _allocate(tensor, device)
        if tensor.is_conj() or tensor.is_neg():
            raise UnsupportedValueError(f"{where}: the target is a lazy conjugate or negative view")
        check_storage(tensor, where)
        shape = tuple(tensor.shape)
        memory = _memory(tensor, shape)
        if memory is not None and not tensor.is_contiguous() and memory.may_repeat():
            raise UnsupportedValueError(
                f"{where}: elements of the target share memory (its strides overlap); load into a "
                "copy"
            )
        piece = SinkPiece(whole(shape), self.sink(tensor, dtype), memory)
        return LocalTarget(shape, dtype, (piece,), result, memory)

    def target_glances(self, values: Sequence[torch.Tensor]) -> Sequence[Hashable | None]:
        """Everything that `target` looks at, but for addresses and storages."""
        try:
            if any(any(map(odd, values)) for odd in (_is_neg, _is_conj, _is_zero)):
                return [None] * len(values)
            looks = map(_TARGET_LOOKS, values)
            if all(map(_is_contiguous, values)):
                return list(looks)
            return list(zip(looks, map(_stride, values), strict=True))
        except Exception:
            return [None] * len(values)

    def target_addresses(
        self, values: Sequence[torch.Tensor], names: Sequence[str], reach: Sequence[int]
    ) -> Sequence[int]:
        """Where the first element lies; storages are looked at, one and all."""
        count = len(values)
        storages = list(map(_untyped_storage, values))
        begin = np.fromiter(map(_data_ptr, values), np.uint64, count)
        end = np.fromiter(map(_storage_ptr, storages), np.uint64, count)
        end += np.fromiter(map(_storage_nbytes, storages), np.uint64, count)
        for row in np.flatnonzero(begin + np.array(reach, np.uint64) > end).tolist():
            check_storage(values[row], names[row])
        addresses: list[int] = begin.tolist()
        return addresses

    def host_addresses(
        self, values: Sequence[torch.Tensor], nbytes: Sequence[int]
    ) -> Sequence[int]:
        """Of those that are whole: `sources` says what is wrong with the others."""
        if sys.byteorder != "little":
            return [0] * len(values)
        count = len(values)
        plain = np.fromiter(map(_is_contiguous, values), np.bool_, count)
        plain &= np.fromiter(map(_is_cpu, values), np.bool_, count)
        for odd in (_is_neg, _is_conj, _is_zero):
            plain &= ~np.fromiter(map(odd, values), np.bool_, count)
        storages = list(map(_untyped_storage, values))
        begin = np.fromiter(map(_data_ptr, values), np.uint64, count)
        end = np.fromiter(map(_storage_ptr, storages), np.uint64, count)
        end += np.fromiter(map(_storage_nbytes, storages), np.uint64, count)
        held = np.fromiter(map(_nbytes, values), np.uint64, count)
        plain &= (begin + held <= end) & (held == np.array(nbytes, np.uint64))
        addresses: list[int] = np.where(plain, begin, 0).tolist()
        return addresses

    def sink(self, value: torch.Tensor, dtype: DType) -> Sink:
        """Its memory, or that of the device."""
        if not value.is_cpu:
            return DeviceSink(value.detach())
        if value.is_contiguous() and value.nbytes:
            return FlatSink(host_bytes(value), value.shape, dtype)
        return HostSink(host_bits(value, dtype), dtype)

    def settle(self, values: Iterable[torch.Tensor], wait: bool = True) -> Staging | None:
        """Wait for the devices; copies from and to them go through pinned memory."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        devices = {value.device for value in values if value.is_cuda}
        for device in devices:
            if wait:
                torch.cuda.synchronize(device)
            else:
                follow_current(device)
        return PINNED if devices else None

    def stepped(self, values: Sequence[torch.Tensor]) -> Stepped:
        """Parameters and optimizer state; changes in place through `.data` are not counted."""
        return torch_steps.stepped(values)

    def is_composite(self, kind: type) -> bool:
        """A wrapper subclass that can say what it is made of."""
        return kind not in _PLAIN and hasattr(kind, "__tensor_flatten__")

    def parts(self, value: Any) -> ArrayParts | None:
        """Inner tensors of a wrapper subclass."""
        kind, names, context = wrapper_parts(value)
        inner = {name: getattr(value, name) for name in names}
        return ArrayParts(kind, inner, {"__context__": context})

    def any_composite(self, values: Sequence[Any]) -> bool:
        """All are."""
        return True

    def from_numpy(self, array: Array, dtype: DType) -> torch.Tensor:
        """A tensor over the same memory."""
        if not dtype.torch:
            raise UnsupportedValueError(f"torch has no dtype {dtype.name}")
        return tensor_of(array, dtype)


def _memory_format(tensor: torch.Tensor) -> str:
    channels_last = (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    return "channels_last" if channels_last else "contiguous_format"


@cache
def properties_of(
    dtype: str, requires_grad: bool, memory_format: str = "contiguous_format"
) -> TensorProperties:
    """What is recorded of a tensor; thousands of tensors share a handful."""
    return TensorProperties(dtype, requires_grad=requires_grad, memory_format=memory_format)


def wrapper_parts(value: Any) -> tuple[str, Sequence[str], object]:
    """Of a wrapper subclass: its class, the names of its inner tensors, and what else it needs."""
    names, context = value.__tensor_flatten__()
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if any(getattr(value, name).is_meta for name in names):
        raise UnsupportedValueError(
            f"a {kind} on the meta device can be neither saved nor filled; give it memory first"
        )
    # Of torchao's optimizer states the element type is only what they say they are: a DTensor
    # around one forgets it.
    appearance = torch.dtype if kind.startswith("torchao.optim.") else ()
    return kind, names, _plain_context(context, appearance)


def _plain_context(context: object, without: Any = ()) -> object:
    """Flags, sizes and dtypes of a wrapper subclass, without the tuple types torch gives them."""
    if isinstance(context, dict):
        return {str(key): _plain_context(item, without) for key, item in context.items()}
    if isinstance(context, (list, tuple)) and not isinstance(context, torch.Size):
        return [_plain_context(item, without) for item in context if not isinstance(item, without)]
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
    if _is_zero(value):
        raise UnsupportedValueError(f"{where}: a zero tensor has no memory; use torch.zeros")
    dtype = _BY_TORCH.get(value.dtype)
    if dtype is None:
        raise UnsupportedValueError(f"{where}: tensors of {value.dtype} cannot be stored")
    return value, dtype


def check_storage(tensor: torch.Tensor, where: str) -> None:
    """A storage may have been shrunk under a tensor; there is nothing behind it then."""
    item, numel = tensor.element_size(), tensor.numel()
    last = numel - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if numel and (tensor.storage_offset() + last + 1) * item > held:
        raise UnsupportedValueError(
            f"{where}: the tensor needs {(tensor.storage_offset() + last + 1) * item} bytes, but "
            f"its storage has {held}; it was resized under it"
        )


_device_name = cache(str)


def _memory(tensor: torch.Tensor, shape: tuple[int, ...]) -> Memory | None:
    if 0 in shape:
        return None
    item = tensor.element_size()
    strides = tuple([step * item for step in tensor.stride()])
    return Memory(_device_name(tensor.device), tensor.data_ptr(), shape, strides, item)


def _allocate(meta: torch.Tensor, device: object) -> torch.Tensor:
    place: Any = "cpu" if device is None else device
    made = torch.empty(meta.shape, dtype=meta.dtype, device=place)
    if isinstance(meta, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=meta.requires_grad)
    return made.requires_grad_(meta.requires_grad)


ADAPTER = TorchTensors()
